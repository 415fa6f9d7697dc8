"""Short words for HTTP/2 stories: a connected pair of machines, a peer that writes frames by hand, and the invariants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hpack import Decoder, Encoder

from protocols.buffers import ByteBudget
from protocols.errors import RemoteProtocolError
from protocols.events import TURN, ConnectionEnd, Data, End, Event, Head, Request, Response, Sent, Signal
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.http2.frames import PREFACE, FrameSplitter, HTTP2Frame, Kind
from protocols.roles import Role

DEFAULT = HTTP2Limits()
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x4, 0x8, 0x20
GET = ((b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"example"), (b":path", b"/"))
POST = ((b":method", b"POST"), *GET[1:])


def check(machine: HTTP2Connection) -> None:
    """The ledger agrees with h2's windows, and the connection's window covers those of its streams."""
    windows = machine.windows()
    for ledger in windows.values():
        assert ledger.available == ledger.library
        assert ledger.unread >= 0
        assert ledger.owed >= 0
    streams = [ledger for stream, ledger in windows.items() if stream]
    assert sum(ledger.unread for ledger in streams) == windows[0].unread == machine.unconsumed
    assert windows[0].library >= sum(ledger.library for ledger in streams)


def told(machine: HTTP2Connection) -> Event | Signal:
    """The next event, or what there is in place of one, however many frames without any come first."""
    while (event := machine.next_event()) is TURN:
        pass
    return event


def pull(machine: HTTP2Connection) -> list[Event]:
    """Every event that is there."""
    events: list[Event] = []
    while not isinstance(event := told(machine), Signal):
        check(machine)
        events.append(event)
        if isinstance(event, ConnectionEnd):
            break
    return events


def take(machine: HTTP2Connection, at_most: int = 65_536) -> tuple[bytes, Sent]:
    """One write: what it holds and what it changed."""
    buffers = machine.data_to_send(at_most)
    data = b"".join(buffers)
    assert len(data) <= at_most
    return data, machine.data_sent() if data else Sent()


def output(machine: HTTP2Connection) -> bytes:
    """Everything the machine can write now."""
    written = b""
    while machine.has_output:
        data, _ = take(machine)
        assert data, "has_output, and data_to_send gives nothing"
        written += data
    return written


def body(events: Iterable[Event], stream: int = 1) -> bytes:
    """The payload of one stream, joined."""
    return b"".join(
        bytes(buffer) for event in events if isinstance(event, Data) and event.stream == stream for buffer in event.buffers
    )


def heads(events: Iterable[Event]) -> list[Event]:
    """The events that are not payload."""
    return [event for event in events if not isinstance(event, Data)]


def frames(data: bytes) -> list[HTTP2Frame]:
    """The bytes of a server's output as frames; all of them must be whole."""
    splitter = FrameSplitter(preface=False, frame_size=2**24, continuations=100, block=2**24, settings_entries=100)
    splitter._first = False
    splitter.receive(data)
    found = []
    while (frame := splitter.next_frame()) is not None:
        found.append(frame)
    assert splitter.at_boundary
    return found


def kinds(data: bytes) -> list[tuple[Kind, int]]:
    """Kind and stream of each frame."""
    return [(Kind(frame.kind), frame.stream) for frame in frames(data)]


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """A frame by hand."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def data(stream: int, payload: bytes, flags: int = 0) -> bytes:
    """A DATA frame by hand."""
    return frame(Kind.DATA, flags, stream, payload)


def settings(values: dict[int, int] | None = None) -> bytes:
    """A SETTINGS frame by hand."""
    payload = b"".join(key.to_bytes(2) + value.to_bytes(4) for key, value in (values or {}).items())
    return frame(Kind.SETTINGS, 0, 0, payload)


class ByHand:
    """A server machine and a client that writes its frames by hand, legal or not."""

    OPENING = (PREFACE, settings(), frame(Kind.SETTINGS, 0x1))

    def __init__(
        self,
        limits: HTTP2Limits = DEFAULT,
        *,
        budget: ByteBudget | None = None,
        ready: bool = True,
        payload_path: bool = True,
    ) -> None:
        self.server = HTTP2Connection(Role.SERVER, limits, budget=budget, payload_path=payload_path)
        self.encoder = Encoder()
        self.decoder = Decoder()
        if ready:
            assert self.says(*self.OPENING) == []
            output(self.server)

    def says(self, *written: bytes) -> list[Event]:
        """Events that these bytes make."""
        for piece in written:
            self.server.receive_data(piece)
        return pull(self.server)

    def block(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        return bytes(self.encoder.encode(list(headers)))

    def head(self, stream: int, headers: Sequence[tuple[bytes, bytes]] = POST, flags: int = 0) -> bytes:
        block = self.block(headers)
        first, rest = block[:16_384], block[16_384:]
        if not rest:
            return frame(Kind.HEADERS, END_HEADERS | flags, stream, first)
        return frame(Kind.HEADERS, flags, stream, first) + frame(Kind.CONTINUATION, END_HEADERS, stream, rest)

    def fails(self, *written: bytes) -> int | None:
        """The error code of the connection error that these bytes make; the GOAWAY must say the same."""
        with pytest.raises(RemoteProtocolError) as caught:
            self.says(*written)
        last = frames(output(self.server))[-1]
        assert last.kind == Kind.GOAWAY
        assert int.from_bytes(last.payload[4:8]) == caught.value.wire_code
        return caught.value.wire_code


class Pair:
    """A client and a server, connected; `flow` moves bytes until nothing moves and keeps the events of both."""

    def __init__(
        self,
        client: HTTP2Limits = DEFAULT,
        server: HTTP2Limits = DEFAULT,
        *,
        budget: ByteBudget | None = None,
        ready: bool = True,
        payload_path: bool = True,
    ) -> None:
        self.client = HTTP2Connection(Role.CLIENT, client, payload_path=payload_path)
        self.server = HTTP2Connection(Role.SERVER, server, budget=budget, payload_path=payload_path)
        self.at_client: list[Event] = []
        self.at_server: list[Event] = []
        if ready:
            self.flow()

    def flow(self) -> None:
        while self.client.has_output or self.server.has_output:
            self.to_server()
            self.to_client()

    def to_server(self) -> list[Event]:
        self.server.receive_data(output(self.client))
        events = pull(self.server)
        self.at_server += events
        return events

    def to_client(self) -> list[Event]:
        self.client.receive_data(output(self.server))
        events = pull(self.client)
        self.at_client += events
        return events

    def request(self, stream: int, payload: bytes = b"", *, end: bool = True) -> None:
        """Sends a request; the bytes do not flow yet."""
        self.client.send(Request(stream=stream, head=Head(method=b"POST", target=b"/", authority=b"example")))
        if payload:
            self.client.send(Data(stream=stream, buffers=(payload,)))
        if end:
            self.client.send(End(stream=stream))

    def respond(self, stream: int, payload: bytes = b"", *, end: bool = True) -> None:
        """Sends a response; the bytes do not flow yet."""
        self.server.send(Response(stream=stream, status=200))
        if payload:
            self.server.send(Data(stream=stream, buffers=(payload,)))
        if end:
            self.server.send(End(stream=stream))
