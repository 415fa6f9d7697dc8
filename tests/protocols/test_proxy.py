"""The PROXY protocol: headers as HAProxy's specification has them, at every split, and whatever else may come."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import RemoteProtocolError
from protocols.events import NEED_DATA
from protocols.proxy import LONGEST, SIGNATURE_2, ProxyHeader, ProxyReceiver

V4, V6 = ipaddress.IPv4Address, ipaddress.IPv6Address
REST = b"GET / HTTP/1.1\r\n\r\n"


def binary(command: int, family: int, block: bytes = b"", *, length: int | None = None, version: int = 2) -> bytes:
    size = len(block) if length is None else length
    return SIGNATURE_2 + struct.pack("!BBH", version << 4 | command, family, size) + block


def unix(path: bytes) -> bytes:
    return path.ljust(108, b"\0")


TCP4 = ProxyHeader(version=2, source=(V4("203.0.113.7"), 56324), destination=(V4("192.0.2.1"), 443))
TCP6 = ProxyHeader(version=2, source=(V6("2001:db8::7"), 1), destination=(V6("2001:db8::1"), 65535))
TLVS = b"\x01\x00\x02h2" + b"\xea\x00\x03abc" + b"\x03\x00\x04\0\0\0\0"
BLOCK_4 = bytes([203, 0, 113, 7, 192, 0, 2, 1]) + struct.pack("!HH", 56324, 443)
BLOCK_6 = V6("2001:db8::7").packed + V6("2001:db8::1").packed + struct.pack("!HH", 1, 65535)

HEADERS = {
    # section 2.1 has this one
    b"PROXY TCP4 192.168.0.1 192.168.0.11 56324 443\r\n": ProxyHeader(
        version=1, source=(V4("192.168.0.1"), 56324), destination=(V4("192.168.0.11"), 443)
    ),
    b"PROXY TCP4 255.255.255.255 255.255.255.255 65535 65535\r\n": ProxyHeader(
        version=1, source=(V4("255.255.255.255"), 65535), destination=(V4("255.255.255.255"), 65535)
    ),
    b"PROXY TCP6 2001:DB8::7 ::1 0 443\r\n": ProxyHeader(version=1, source=(V6("2001:db8::7"), 0), destination=(V6("::1"), 443)),
    b"PROXY TCP6 " + b" ".join([b":".join([b"ffff"] * 8)] * 2) + b" 65535 65535\r\n": ProxyHeader(
        version=1, source=(V6("ffff:" * 7 + "ffff"), 65535), destination=(V6("ffff:" * 7 + "ffff"), 65535)
    ),
    b"PROXY UNKNOWN\r\n": ProxyHeader(version=1),
    b"PROXY UNKNOWN " + b" ".join([b":".join([b"ffff"] * 8)] * 2) + b" 65535 65535\r\n": ProxyHeader(version=1),
    binary(1, 0x11, BLOCK_4): TCP4,
    binary(1, 0x11, BLOCK_4 + TLVS): TCP4,
    binary(1, 0x21, BLOCK_6): TCP6,
    binary(1, 0x31, unix(b"/run/client") + unix(b"/run/proxy")): ProxyHeader(
        version=2, source=b"/run/client", destination=b"/run/proxy"
    ),
    binary(1, 0x31, unix(b"\0abstract") + unix(b"")): ProxyHeader(version=2, source=b"\0abstract", destination=b""),
    binary(1, 0x31, b"/" * 216): ProxyHeader(version=2, source=b"/" * 108, destination=b"/" * 108),
    # LOCAL, whatever else it says; a client that is not told; what is no stream
    binary(0, 0): ProxyHeader(version=2),
    binary(0, 0x11, BLOCK_4): ProxyHeader(version=2),
    binary(0, 0xFF, b"x"): ProxyHeader(version=2),
    binary(1, 0): ProxyHeader(version=2),
    binary(1, 0x01, TLVS): ProxyHeader(version=2),
    binary(1, 0x10): ProxyHeader(version=2),
    binary(1, 0x12, BLOCK_4): ProxyHeader(version=2),
    binary(1, 0x11, BLOCK_4 + bytes(65535 - 12)): TCP4,
}  # fmt: skip


def received(pieces: Iterator[bytes] | list[bytes], **options: Any) -> tuple[ProxyHeader, bytes]:
    receiver = ProxyReceiver(**options)
    for piece in pieces:
        receiver.receive_data(piece)
        event = receiver.next_event()
    assert isinstance(event, ProxyHeader)
    assert receiver.next_event() is event
    assert not receiver.begun
    return event, receiver.rest


@pytest.mark.parametrize("header", HEADERS, ids=lambda h: repr(h[:60]))
def test_a_header_is_read_and_what_is_behind_it_is_the_clients(header: bytes) -> None:
    assert received([header]) == (HEADERS[header], b"")
    assert received([header + REST]) == (HEADERS[header], REST)


@pytest.mark.parametrize("header", [h for h in HEADERS if len(h) < 300], ids=lambda h: repr(h[:60]))
def test_every_split_gives_the_same(header: bytes) -> None:
    for at in range(1, len(header)):
        receiver = ProxyReceiver()
        receiver.receive_data(header[:at])
        assert receiver.next_event() is NEED_DATA
        assert (receiver.begun, receiver.rest) == (True, b"")
        receiver.receive_data(header[at:] + REST)
        assert (receiver.next_event(), receiver.rest) == (HEADERS[header], REST)
    assert received([bytes([byte]) for byte in header]) == (HEADERS[header], b"")


@pytest.mark.parametrize(
    "begin",
    [
        REST, b"PUT / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"PROXYTCP4 ", b"PROXY\t", b"proxy TCP4 ", b" PROXY ",
        b"\x16\x03\x01", b"\r\nGET", b"\r\n\r\n\x00\r\nQUIET", b"\n",
    ],
)  # fmt: skip
def test_a_connection_without_a_header_loses_nothing(begin: bytes) -> None:
    assert received([begin]) == (ProxyHeader(version=0), begin)
    receiver, seen = ProxyReceiver(), b""
    for byte in begin:
        receiver.receive_data(bytes([byte]))
        seen += bytes([byte])
        if receiver.next_event() is not NEED_DATA:
            break
    assert (receiver.next_event(), receiver.rest) == (ProxyHeader(version=0), seen)


@pytest.mark.parametrize("begin", [b"", b"P", b"PROXY", b"\r\n\r\n\x00\r\nQUIT"])
def test_who_leaves_before_a_header_has_begun_has_sent_none(begin: bytes) -> None:
    receiver = ProxyReceiver()
    receiver.receive_data(begin)
    assert receiver.next_event() is NEED_DATA
    receiver.receive_eof()
    assert (receiver.next_event(), receiver.rest) == (ProxyHeader(version=0), begin)


MALFORMED = {
    b"PROXY \r\n": "expected TCP4, TCP6 or UNKNOWN",
    b"PROXY TCP5 1.1.1.1 2.2.2.2 1 2\r\n": "expected TCP4, TCP6 or UNKNOWN",
    b"PROXY UNKNOWNS\r\n": "expected TCP4, TCP6 or UNKNOWN",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1\r\n": "expected TCP4, TCP6 or UNKNOWN",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2 3\r\n": "expected TCP4, TCP6 or UNKNOWN",
    b"PROXY TCP4  1.1.1.1 2.2.2.2 1 2\r\n": "expected TCP4, TCP6 or UNKNOWN",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 01 2\r\n": "expected TCP4, TCP6 or UNKNOWN",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 -1 2\r\n": "expected TCP4, TCP6 or UNKNOWN",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\n\r\n": "expected TCP4, TCP6 or UNKNOWN",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1 \xb2\r\n": "expected TCP4, TCP6 or UNKNOWN",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 65536 2\r\n": "a port is from 0 to 65535",
    b"PROXY TCP4 01.1.1.1 2.2.2.2 1 2\r\n": "no addresses of TCP4",
    b"PROXY TCP4 1.1.1 2.2.2.2 1 2\r\n": "no addresses of TCP4",
    b"PROXY TCP4 ::1 ::1 1 2\r\n": "no addresses of TCP4",
    b"PROXY TCP6 1.1.1.1 2.2.2.2 1 2\r\n": "no addresses of TCP6",
    b"PROXY TCP6 :::1 ::1 1 2\r\n": "no addresses of TCP6",
    b"PROXY UNKNOWN " + b"x" * 94: "no CRLF in its first 107 bytes",
    b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\n" + REST * 5: "expected TCP4, TCP6 or UNKNOWN",
    binary(1, 0x11, BLOCK_4, version=1): "got 0x11",
    binary(2, 0x11, BLOCK_4): "got 0x22",
    binary(1, 0x41, BLOCK_6): "no family and transport are 0x41",
    binary(1, 0x13, BLOCK_4): "no family and transport are 0x13",
    binary(1, 0x11, BLOCK_4[:-1]): "addresses of family 1 have 12 bytes, got 11",
    binary(1, 0x21, BLOCK_6[:-1]): "addresses of family 2 have 36 bytes, got 35",
    binary(1, 0x31, bytes(215)): "addresses of family 3 have 216 bytes, got 215",
}


@pytest.mark.parametrize("data", MALFORMED, ids=lambda h: repr(h[:60]))
def test_what_is_malformed_is_refused_as_soon_as_it_is_whole(data: bytes) -> None:
    receiver = ProxyReceiver()
    receiver.receive_data(data)
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.next_event()
    assert MALFORMED[data] in str(caught.value)
    assert len(str(caught.value)) < 600


def test_version_and_length_are_judged_before_the_rest_has_come() -> None:
    for head, said in (
        (binary(3, 0), "got 0x23"),
        (binary(1, 0x11, length=11), "have 12 bytes, got 11"),
        (binary(0, 0, length=1009), "PROXY header of 1025 bytes: more than 1024 (limits.head)"),
    ):
        receiver = ProxyReceiver(1024)
        receiver.receive_data(head)
        with pytest.raises(RemoteProtocolError) as caught:
            receiver.next_event()
        assert said in str(caught.value)
    assert received([binary(0, 0, bytes(1008))], at_most=1024)[0] == ProxyHeader(version=2)


@pytest.mark.parametrize("header", [h for h in HEADERS if len(h) < 300], ids=lambda h: repr(h[:60]))
def test_a_header_that_is_cut_off_is_malformed(header: bytes) -> None:
    begin = 6 if header.startswith(b"PROXY") else 12
    for at in range(begin, len(header)):
        receiver = ProxyReceiver()
        receiver.receive_data(header[:at])
        receiver.receive_eof()
        with pytest.raises(RemoteProtocolError, match=f"cut off after {at} bytes"):
            receiver.next_event()


_PIECES = st.binary(max_size=40) | st.sampled_from(
    [*HEADERS, *MALFORMED, b"PROXY ", b"\r\n", b" ", SIGNATURE_2, b"TCP4", b"1.1.1.1"]
)


@given(st.lists(_PIECES, max_size=8), st.lists(st.integers(1, 50), min_size=1))
def test_garbage_is_a_header_or_none_or_malformed_however_it_is_cut(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)

    def outcome(sizes: list[int]) -> Any:
        receiver, at = ProxyReceiver(), 0
        try:
            while at < len(data):
                size = sizes[at % len(sizes)]
                receiver.receive_data(data[at : at + size])
                at += size
                if isinstance(event := receiver.next_event(), ProxyHeader):
                    return event, receiver.rest + data[at:]
            receiver.receive_eof()
            event = receiver.next_event()
        except RemoteProtocolError as e:
            return type(e)
        assert isinstance(event, ProxyHeader)
        return event, receiver.rest

    whole = outcome([len(data) or 1])
    assert outcome(cuts) == whole
    if whole is not RemoteProtocolError and whole[0].version == 0:
        assert whole[1] == data


def test_the_longest_header_there_is() -> None:
    data = binary(0, 0, bytes(65535))
    assert len(data) == LONGEST
    assert received([data])[1] == b""
