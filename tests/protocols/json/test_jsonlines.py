"""JSON lines: what is written, and what a client reads whatever the pieces it arrives in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA
from protocols.json.lines import LineDecoder, encode_line


def drain(decoder: LineDecoder) -> list[bytes]:
    lines = []
    while isinstance(line := decoder.next_event(), bytes):
        lines.append(line)
    return lines


def decode(*pieces: bytes, eof: bool = True) -> list[bytes]:
    decoder = LineDecoder()
    lines = []
    for piece in pieces:
        decoder.receive_data(piece)
        lines += drain(decoder)
    if eof:
        decoder.receive_eof()
    return lines + drain(decoder)


def test_a_line_ends_with_lf() -> None:
    assert encode_line(b'{"a": 1}') == b'{"a": 1}\n'


@pytest.mark.parametrize("text", [b"", b'{\n"a": 1}'])
def test_what_is_not_one_line_is_the_callers_mistake(text: bytes) -> None:
    with pytest.raises(LocalProtocolError):
        encode_line(text)


STREAM = b'{"a": 1}\n\n  \r\n{"b": 2}\r\n{"c":\t"d"} \n{"last": true}'
LINES = [b'{"a": 1}', b'{"b": 2}', b'{"c":\t"d"}', b'{"last": true}']


def test_every_cut_of_a_stream_gives_the_same_lines() -> None:
    assert decode(STREAM) == LINES
    for cut in range(len(STREAM) + 1):
        assert decode(STREAM[:cut], STREAM[cut:]) == LINES
    assert decode(*(bytes([byte]) for byte in STREAM)) == LINES


def test_a_line_without_its_end_waits_for_the_end_of_the_body() -> None:
    assert decode(STREAM, eof=False) == LINES[:-1]
    decoder = LineDecoder()
    decoder.receive_eof()
    assert decoder.next_event() is NEED_DATA


def test_the_bound_is_exact_whether_the_end_has_come_or_not() -> None:
    decoder = LineDecoder(max_line=4)
    decoder.receive_data(b"1234\n123")
    assert drain(decoder) == [b"1234"]
    decoder.receive_data(b"4")
    assert drain(decoder) == []
    decoder.receive_data(b"\n")
    assert drain(decoder) == [b"1234"]
    for tail in (b"12345", b"12345\n"):
        decoder = LineDecoder(max_line=4)
        decoder.receive_data(tail)
        for _ in range(2):
            with pytest.raises(RemoteProtocolError, match="at most 4 bytes"):
                decoder.next_event()


@settings(max_examples=80)
@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\t "), min_size=1, max_size=6), max_size=5),
    st.integers(1, 9),
)
def test_what_is_encoded_is_decoded(texts: list[str], size: int) -> None:
    body = b"".join(encode_line(text.encode()) for text in texts)
    assert decode(*(body[i : i + size] for i in range(0, len(body), size))) == [text.encode() for text in texts]


@settings(max_examples=80)
@given(st.lists(st.binary(max_size=5), max_size=8))
def test_any_bytes_in_any_pieces_give_the_same_lines(pieces: list[bytes]) -> None:
    assert decode(*pieces) == decode(b"".join(pieces))
