"""DATA frames bypass h2's objects: the same bytes through a plain H2Connection must give the same events, windows and states."""

from __future__ import annotations

import h2.events as h2_events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import RemoteProtocolError
from protocols.events import Data, End, Event, Head, Request, Reset, Response
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.http2.frames import PREFACE, Kind
from protocols.roles import Role
from tests.protocols.http2.http2_helpers import END_HEADERS, check, frame, output, pull
from tests.protocols.http2.http2_helpers import settings as settings_frame

WINDOW = 16_384
STREAMS = (1, 3, 5)
OPENING = (PREFACE, settings_frame(), frame(Kind.SETTINGS, 0x1))


class Plain:
    """A server of h2 alone."""

    def __init__(self) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.h2.initiate_connection()
        self.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
        self.h2.increment_flow_control_window(10_000_000)

    def receive(self, data: bytes) -> tuple[list[Event], int | None]:
        try:
            return [mine for event in self.h2.receive_data(data) for mine in self._event(event)], None
        except ProtocolError as error:
            return [], int(error.error_code)

    def _event(self, event: h2_events.Event) -> list[Event]:
        match event:
            case h2_events.RequestReceived():
                assert event.stream_id is not None
                return [Request(stream=event.stream_id, head=Head(method=b"POST", target=b"/"))]
            case h2_events.DataReceived() if event.data:
                return [Data(stream=event.stream_id, buffers=(event.data,))]
            case h2_events.StreamEnded():
                return [End(stream=event.stream_id)]
            case h2_events.StreamReset():
                return [Reset(stream=event.stream_id, code=int(event.error_code))]
        return []

    def act(self, what: str, stream: int) -> None:
        match what:
            case "respond":
                self.h2.send_headers(stream, [(b":status", b"200")])
            case "end":
                self.h2.end_stream(stream)
                if self.h2.streams[stream].open:
                    self.h2.reset_stream(stream)
            case "reset":
                self.h2.reset_stream(stream, 8)


class Ours:
    """A server of ours, which never takes a byte."""

    def __init__(self) -> None:
        self.machine = HTTP2Connection(Role.SERVER, HTTP2Limits(initial_window=WINDOW, max_window=WINDOW))

    def receive(self, data: bytes) -> tuple[list[Event], int | None]:
        self.machine.receive_data(data)
        try:
            events = pull(self.machine)
        except RemoteProtocolError as error:
            return [], error.wire_code
        return [self._event(event) for event in events], None

    def _event(self, event: Event) -> Event:
        match event:
            case Request(stream=stream):
                return Request(stream=stream, head=Head(method=b"POST", target=b"/"))
            case End(stream=stream):
                return End(stream=stream)
        return event

    def may(self, what: str, stream: int) -> bool:
        found = self.machine._streams.get(stream)
        if found is None or not found.open:
            return False
        return what == "reset" or (not found.head_sent if what == "respond" else found.head_sent and not found.ended)

    def act(self, what: str, stream: int) -> None:
        match what:
            case "respond":
                self.machine.send(Response(stream=stream, status=200))
            case "end":
                self.machine.send(End(stream=stream))
                output(self.machine)
                while self.machine.lingering:  # h2 has no such thing, so it must be over
                    self.machine.tick()
            case "reset":
                self.machine.send(Reset(stream=stream, code=8))


# Static table entries and literals, which leave HPACK's state alone.
REQUEST = b"\x83\x87\x84\x01\x01h"
TRAILERS = b"\x00\x01t\x011"


def payloads(flags: int, n: int, padding: int) -> bytes:
    return bytes((min(padding, 255),)) + bytes(n + padding) if flags & 0x8 else bytes(n)


data_frames = st.builds(
    lambda flags, stream, n, padding: frame(Kind.DATA, flags, stream, payloads(flags, n, padding)),
    st.sampled_from([0, 0, 0, 1, 1, 8, 9, 0xF6]),
    st.sampled_from([*STREAMS, *STREAMS, *STREAMS, 1 | 1 << 31, 0, 2, 99]),
    st.sampled_from([0, 1, 100, 5000, 16_000]),
    st.sampled_from([0, 1, 200]),
)
head_frames = st.builds(
    lambda flags, stream: frame(Kind.HEADERS, flags, stream),
    st.sampled_from([END_HEADERS, END_HEADERS, END_HEADERS | 1, 0]),
    st.sampled_from(STREAMS),
)
resets = st.builds(lambda stream: frame(Kind.RST_STREAM, 0, stream, bytes(4)), st.sampled_from(STREAMS))
acts = st.tuples(st.sampled_from(["respond", "end", "reset"]), st.sampled_from(STREAMS))


@settings(max_examples=300)
@given(st.lists(st.one_of(data_frames, data_frames, head_frames, resets, acts), max_size=14))
def test_the_same_bytes_mean_the_same_with_and_without_the_bypass(steps: list[bytes | tuple[str, int]]) -> None:
    plain, ours = Plain(), Ours()
    for opening in OPENING:
        assert plain.receive(opening) == ours.receive(opening)
    for step in [frame(Kind.HEADERS, END_HEADERS, 1), *steps]:
        if isinstance(step, tuple):
            if ours.may(*step):
                plain.act(*step)
                ours.act(*step)
        else:
            written = headed(step, plain.h2)
            expected, error = plain.receive(written)
            assert ours.receive(written) == (expected, error)
            if error is not None:
                return
        compare(plain.h2, ours.machine)


def headed(written: bytes, plain: H2Connection) -> bytes:
    """A HEADERS frame gets the block that fits: a request or trailers."""
    if written[3] != Kind.HEADERS:
        return written
    stream = int.from_bytes(written[5:9])
    return frame(Kind.HEADERS, written[4], stream, TRAILERS if stream in plain.streams else REQUEST)


def compare(plain: H2Connection, ours: HTTP2Connection) -> None:
    check(ours)
    output(ours)
    assert plain.streams.keys() <= ours._h2.streams.keys(), "ours are swept less often"
    for number, stream in plain.streams.items():
        twin = ours._h2.streams[number]
        assert stream.state_machine.state == twin.state_machine.state
        assert stream.closed_by == twin.closed_by
        if stream.open:
            assert stream.inbound_flow_control_window == twin.inbound_flow_control_window
