"""The data-frame codec: lengths in their one legal form, and both ways of unmasking over every alignment."""

from __future__ import annotations

import pytest

from protocols.events import Opcode
from protocols.websocket.frames import MASKED, Landing, NextBytes, flat, mask, mask_in_place, read_header, write_header

KEY = b"\x37\xfa\x21\x3d"


def masked_by_definition(data: bytes, key: bytes) -> bytes:
    """RFC 6455 section 5.3, as it is written there."""
    return bytes(octet ^ key[i % 4] for i, octet in enumerate(data))


def pattern(n: int) -> bytes:
    return bytes(i * 7 + (i >> 8) & 0xFF for i in range(n))


@pytest.mark.parametrize(
    ("length", "header"),
    [
        (0, "8200"),
        (125, "827d"),
        (126, "827e007e"),
        (256, "827e0100"),
        (65535, "827effff"),
        (65536, "827f0000000000010000"),
        (2**63 - 1, "827f7fffffffffffffff"),
    ],
)
def test_a_length_is_written_and_read_in_its_shortest_form(length: int, header: str) -> None:
    wire = write_header(0x82, length, 0)
    assert wire.hex() == header
    assert read_header(bytearray(wire), 0, False) == (length, len(wire))
    masked = bytearray(b"??" + write_header(0x82, length, MASKED) + KEY)
    assert read_header(masked, 2, True) == (length, len(masked))


@pytest.mark.parametrize("length", [0, 5, 126, 65535, 65536])
@pytest.mark.parametrize("masked", [False, True])
def test_an_incomplete_header_asks_for_more(length: int, masked: bool) -> None:
    wire = write_header(0x01, length, MASKED if masked else 0) + (KEY if masked else b"")
    for cut in range(len(wire)):
        assert read_header(bytearray(wire[:cut]), 0, masked) is NextBytes.MORE


@pytest.mark.parametrize(
    ("wire", "masked"),
    [
        pytest.param("c200", False, id="extension bit 1"),
        pytest.param("a200", False, id="extension bit 2"),
        pytest.param("9200", False, id="extension bit 3"),
        pytest.param("8300", False, id="reserved data opcode"),
        pytest.param("8800", False, id="Close"),
        pytest.param("8900", False, id="Ping"),
        pytest.param("8280", False, id="masked towards a client"),
        pytest.param("8200", True, id="unmasked towards a server"),
        pytest.param("827e007d", False, id="125 in two bytes"),
        pytest.param("827f000000000000ffff", False, id="65535 in eight bytes"),
        pytest.param("827f8000000000000000", False, id="2**63"),
    ],
)
def test_anything_but_a_well_formed_data_header_is_left_to_wsproto(wire: str, masked: bool) -> None:
    assert read_header(bytearray.fromhex(wire), 0, masked) is NextBytes.OTHER


@pytest.mark.parametrize("length", [*range(13), 125, 126, 127, 598, 599, 600, 601, 602, 603, 604, 4096, 16383])
def test_both_unmasking_paths_agree_with_the_definition(length: int) -> None:
    data = pattern(length)
    masked = mask(data, KEY)
    assert masked == masked_by_definition(data, KEY)
    assert type(masked) is bytes
    assert mask(bytearray(masked), KEY) == data


@pytest.mark.parametrize("start", range(0, 24, 4))
@pytest.mark.parametrize("tail", range(9))
def test_masking_in_place_touches_its_range_alone_at_every_alignment(start: int, tail: int) -> None:
    data = pattern(64)
    buffer = bytearray(data)
    stop = start + 24 + tail
    mask_in_place(buffer, start, stop, KEY)
    assert buffer[start:stop] == masked_by_definition(data[:stop], KEY)[start:]
    assert buffer[:start] + buffer[stop:] == data[:start] + data[stop:]


@pytest.mark.parametrize("step", [65535, 65536, 65537, 70001, 131073, 300003])
@pytest.mark.parametrize("key", [KEY, None])
def test_a_landing_frame_is_clear_when_it_is_full_whatever_the_steps(step: int, key: bytes | None) -> None:
    data = pattern(300003)
    wire = memoryview(mask(data, key) if key else data)
    landing = Landing(Opcode.BINARY, True, key, bytearray(len(data)))
    landing.paid = len(data)
    while landing.missing:
        n = min(step, landing.missing)
        landing.rest[:n] = wire[-landing.missing :][:n]
        landing.advance(n)
    assert bytes(landing.buffer) == data
    assert len(landing.rest) == 0


def test_flat_counts_bytes_whatever_the_view() -> None:
    words = memoryview(bytearray(range(24))).cast("I")
    assert flat(words) == bytes(range(24))
    assert len(flat(words)) == 24
    assert flat(memoryview(bytes(range(10)))[::3]) == bytes([0, 3, 6, 9])
    assert flat(memoryview(b"")) == b""
    text = b"as it is"
    assert flat(text) is text
