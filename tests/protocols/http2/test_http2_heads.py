"""Requests in one HEADERS frame open their streams beside h2: with and without that, the same bytes must mean the same."""

from __future__ import annotations

import re
from typing import TypeAlias

import pytest
from h2.stream import H2Stream
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.buffers import ByteBudget
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Data, End, Event, GoAway, Head, Refused, Request, Reset, Response
from protocols.http2 import heads as http2_heads
from protocols.http2 import payload
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.http2.frames import PREFACE, Kind
from protocols.http2.heads import (
    MalformedHeadError,
    joined_cookies,
    lies_about_length,
    malformed,
    plain_request,
    read_request,
)
from protocols.http2.payload import field_block
from protocols.roles import Role
from tests.protocols.http2.http2_helpers import END_HEADERS, END_STREAM, GET, POST, ByHand, check, data, frame, output, pull
from tests.protocols.http2.http2_helpers import settings as settings_frame

Sent: TypeAlias = Response | Data | End | Reset | GoAway
LIMITS = HTTP2Limits(streams=4, head=600, fields=4)

PSEUDO = (
    *POST, (b":method", b"GET"), (b":method", b"CONNECT"), (b":method", b"G T"), (b":path", b""), (b":path", b"x"),
    (b":scheme", b"ftp"), (b":authority", b""), (b":status", b"100"), (b":status", b"200"), (b":protocol", b"websocket"),
    (b":x", b"y"), (b":", b""),
)  # fmt: skip
REGULAR = (
    (b"x", b"y"), (b"x", b""), (b"x", b" y"), (b"x", b"y\t"), (b"x", b"a\r"), (b"x", b"a\nb"), (b"x", b"\0"),
    (b"x", b"\n"), (b"x", b"\x0by\xff"), (b"X", b"y"), (b"", b"y"), (b"a b", b"y"), (b"a:b", b"y"), (b"a\nb", b"y"),
    (b"(", b"y"), (b"\x7f", b"y"), (b"te", b"trailers"), (b"te", b"TRAILERS"), (b"te", b"gzip"), (b"upgrade", b"h2c"),
    (b"connection", b"x"), (b"host", b"example"), (b"host", b"other"), (b"cookie", b"a=1"), (b"cookie", b"b=2"),
    (b"content-length", b"0"), (b"content-length", b"5"), (b"content-length", b"+5"), (b"content-length", b""),
    (b"content-length", b"9" * 18), (b"content-length", b"9" * 30), (b"content-length", b"9" * 5000),
    (b"content-length", "٣".encode()), (b"expect", b"100-continue"), (b"expect", b"else"), (b"x", b"y" * 700),
)  # fmt: skip
pseudo = st.sampled_from(PSEUDO)
regular = st.one_of(st.sampled_from(REGULAR), st.tuples(st.binary(max_size=3), st.binary(max_size=3)))
heads = st.one_of(
    st.builds(lambda more: [*POST, *more], st.lists(regular, max_size=5)),
    st.builds(lambda more: [*POST, *more], st.lists(st.just((b"x", b"y")), max_size=3)),
    st.lists(st.one_of(pseudo, pseudo, regular), max_size=7),
    st.builds(lambda order, more: [*order, *more], st.permutations(POST), st.lists(st.one_of(pseudo, regular), max_size=2)),
)


ODD = [
    *([*POST, field] for field in REGULAR),
    *([*POST, field] for field in PSEUDO),
    *([*POST[:at], *POST[at + 1 :]] for at in range(4)),
    *([*POST[:at], field, *POST[at + 1 :]] for at in range(4) for field in PSEUDO if field[0] == POST[at][0]),
    *([*POST[:at], (b"x", b"y"), *POST[at:]] for at in range(4)),
    [*POST, (b"cookie", b"a=1"), (b"x", b"y"), (b"cookie", b"b=2")],
    [*POST, (b"content-length", b"5"), (b"content-length", b"5")],
    [*POST, *[(b"x", b"y")] * 5],
]


@settings(max_examples=500)
@given(heads)
def test_what_is_certainly_fine_is_fine_to_h2(headers: list[tuple[bytes, bytes]]) -> None:
    agree(headers)


def test_odd_heads_are_not_certainly_fine() -> None:
    for headers in ODD:
        agree(headers)


def agree(headers: list[tuple[bytes, bytes]]) -> None:
    names = [name for name, _ in headers if not name.startswith(b":")]
    fields = {name: value for name, value in headers if name.startswith(b":")}
    regular = [field for field in headers if not field[0].startswith(b":")]
    authority = http2_heads._authority(fields, [*regular, (b"host", b"")])
    refused = http2_heads._unacceptable(fields, regular, names, authority)
    found = http2_heads._certainly_fine(headers, fields, names)
    assert not found or refused or not malformed(headers)
    # Not the other way round, but for the heads that are worth it.
    assert found or headers != list(POST)


def read(headers: list[tuple[bytes, bytes]]) -> Head | None:
    if not all(value.isdigit() and len(value) < 30 for name, value in headers if name == b"content-length"):
        return None
    try:
        request = read_request(1, joined_cookies(headers), ended=False, fields=4, size=600)
    except MalformedHeadError:
        return None
    return request.head if isinstance(request, Request) else None


@settings(max_examples=300)
@given(heads)
def test_a_plain_request_is_the_request_that_it_is_after_h2(headers: list[tuple[bytes, bytes]]) -> None:
    found = plain_request(headers, fields=4, size=600)
    assert found is None or (found == read(headers) and not malformed(joined_cookies(headers)))


class Twin:
    """A server, with or without the way beside h2, and how often it went that way."""

    def __init__(self, *, beside: bool, budget: int | None = None, limits: HTTP2Limits = LIMITS) -> None:
        bound = None if budget is None else ByteBudget(budget * limits.initial_window)
        self.machine = HTTP2Connection(Role.SERVER, limits, budget=bound)
        self.opened = 0
        library = self.machine._h2
        assert isinstance(library, payload.PayloadPath)
        opens, open_inbound = library.opens, library.open_inbound

        def counted(stream: int, *, ended: bool) -> H2Stream:
            self.opened += 1
            return open_inbound(stream, ended=ended)

        library.opens = lambda stream: beside and opens(stream)  # type: ignore[method-assign]
        library.open_inbound = counted  # type: ignore[method-assign]

    def receive(self, written: bytes) -> tuple[list[Event], int | None, str]:
        self.machine.receive_data(written)
        try:
            return pull(self.machine), None, ""
        except RemoteProtocolError as error:
            return [], error.wire_code, re.sub("0x[0-9a-f]+", "", str(error))  # hpack names objects by address

    def act(self, event: Sent) -> bool:
        try:
            self.machine.send(event)
        except LocalProtocolError:
            return False
        return True

    def state(self) -> object:
        """Everything that h2 knows, and all that was written."""
        h2 = self.machine._h2
        table = h2.decoder.header_table
        streams = {
            number: (
                vars(stream.state_machine), vars(stream._inbound_window_manager), stream.outbound_flow_control_window,
                stream.max_outbound_frame_size, stream._expected_content_length, stream.request_method, stream._authority,
            )
            for number, stream in h2.streams.items()
        }  # fmt: skip
        return (
            output(self.machine), streams, h2.highest_inbound_stream_id, h2.state_machine.state, dict(h2._closed_streams),
            h2.inbound_flow_control_window, list(table.dynamic_entries), table._current_size, self.machine.counters,
            self.machine.windows(), self.machine.open_streams, self.machine.must_close,
        )  # fmt: skip


streams = st.sampled_from([1, 3, 3, 5, 5, 7, 7, 9, 11, 11, 13, 2, 0])
flags = st.sampled_from([*[END_HEADERS] * 5, *[END_HEADERS | END_STREAM] * 4, 0, 0x24, 0x2C, 0xC, 0x44])
written_heads = st.tuples(st.just("head"), streams, flags, heads)
steps = st.one_of(
    written_heads,
    written_heads,
    written_heads,
    st.builds(
        lambda stream, n, flag: data(stream, bytes(n), flag), streams, st.sampled_from([0, 5, 90]), st.sampled_from([0, 1])
    ),
    st.builds(lambda stream: frame(Kind.RST_STREAM, 0, stream, bytes(4)), streams),
    st.sampled_from([frame(Kind.GOAWAY, 0, 0, bytes(8)), frame(Kind.CONTINUATION, END_HEADERS, 3, b"\x82")]),
    st.builds(settings_frame, st.dictionaries(st.sampled_from([1, 3, 4, 5]), st.sampled_from([0, 100, 20_000]), max_size=2)),
    st.builds(lambda stream, status: Response(stream=stream, status=status), streams, st.sampled_from([100, 200])),
    st.builds(lambda stream, n: Data(stream=stream, buffers=(bytes(n),)), streams, st.sampled_from([1, 5000])),
    st.builds(lambda stream: End(stream=stream), streams),
    st.builds(lambda stream: Reset(stream=stream, code=8), streams),
    st.sampled_from([GoAway(last_stream=5), GoAway(last_stream=2**31 - 1)]),
)


@settings(max_examples=400)
@given(st.lists(steps, max_size=16), st.booleans(), st.sampled_from([None, 2]))
def test_requests_beside_h2_and_through_it_are_the_same(
    steps: list[bytes | Sent | tuple[str, int, int, list[tuple[bytes, bytes]]]], index: bool, budget: int | None
) -> None:
    beside, through = (
        Twin(beside=True, budget=budget),
        Twin(beside=False, budget=budget),
    )
    encoder = Encoder()
    opening = (
        PREFACE + settings_frame() + frame(Kind.SETTINGS, 0x1) + frame(Kind.HEADERS, END_HEADERS, 1, encoder.encode(POST))
    )
    for step in [opening, *steps]:
        if isinstance(step, tuple):
            _, stream, flag, headers = step
            if lies_about_length(headers):
                continue  # here we differ from h2 on purpose: see test_http2_errors
            block = encoder.encode([(name, value, not index) for name, value in headers])
            step = frame(Kind.HEADERS, flag, stream, block)
        if isinstance(step, bytes):
            said = through.receive(step)
            assert beside.receive(step) == said
            assert beside.state() == through.state()
            if said[1] is not None:
                return
            check(beside.machine)
        else:
            assert beside.act(step) == through.act(step)
            assert beside.state() == through.state()
    assert not through.opened


@pytest.mark.parametrize("limits", [LIMITS, HTTP2Limits()])
@pytest.mark.parametrize("flag", [END_HEADERS, END_HEADERS | END_STREAM])
@pytest.mark.parametrize("index", [False, True])
def test_odd_heads_are_judged_as_h2_judges_them(limits: HTTP2Limits, flag: int, index: bool) -> None:
    for headers in ODD:
        if lies_about_length(headers):
            continue
        beside, through = (
            Twin(beside=True, limits=limits),
            Twin(beside=False, limits=limits),
        )
        encoder = Encoder()
        opening = PREFACE + settings_frame() + frame(Kind.HEADERS, END_HEADERS, 1, encoder.encode(POST))
        written = [opening]
        for stream in (3, 5, 7):
            block = encoder.encode([(name, value, not index) for name, value in headers])
            written.append(frame(Kind.HEADERS, flag, stream, block))
        for piece in written:
            assert beside.receive(piece) == through.receive(piece)
            assert beside.state() == through.state()


def test_most_requests_do_go_beside_h2() -> None:
    twin, encoder = Twin(beside=True), Encoder()
    twin.receive(PREFACE + settings_frame() + frame(Kind.SETTINGS, 0x1))
    for stream in range(1, 2001, 2):
        block = encoder.encode([*POST, (b"x", b"%d" % (stream % 5))])
        (head,), _, _ = twin.receive(frame(Kind.HEADERS, END_HEADERS, stream, block))
        assert head == Request(
            stream=stream, head=Head(method=b"POST", target=b"/", headers=((b"x", b"%d" % (stream % 5)),), authority=b"example",
            scheme=b"https", version=b"2",
        ))  # fmt: skip
        twin.act(Reset(stream=stream, code=8))
    assert twin.opened == 999, "all but the first, with which h2 opens the connection"
    assert len(twin.machine._h2.streams) < 100, "closed streams are swept"


def test_a_request_that_h2_must_judge_is_decoded_once() -> None:
    client = ByHand()
    client.says(client.head(1))
    refused = client.head(3, [*GET, (b"new", b"entry"), (b"host", b"other")])
    assert isinstance(client.says(refused)[0], Refused)
    (head,) = client.says(client.head(5, [*GET, (b"new", b"entry")]))
    assert isinstance(head, Request)
    assert head.head.headers == ((b"new", b"entry"),), "the table has the entry once, where the client supposes it"


def test_a_head_inside_another_head_ends_the_connection() -> None:
    client = ByHand()
    client.says(client.head(1), frame(Kind.HEADERS, 0, 3, b""))
    assert client.fails(client.head(5)) == 1


@pytest.mark.parametrize("value", [b"\x0bx", b"x\x0c", b" x", b"x\t", b"a\0", b"a\r", b"a\n", b"x" * 100 + b" "])
def test_a_response_field_that_no_peer_accepts_is_never_sent(value: bytes) -> None:
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="'x'"):
            field_block(((b"x", value),))


def test_credentials_and_long_values_of_responses_are_not_kept() -> None:
    field_block(((b"x", b"kept"),))
    before = payload._remembered.cache_info().currsize
    long = (b"x", b"y" * 33)
    field_block(((b"set-cookie", b"not kept"), (b"x-request-id", b"new"), (b"x-amzn-requestid", b"new"), long))
    assert payload._remembered.cache_info().currsize == before
