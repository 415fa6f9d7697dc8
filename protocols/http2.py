"""The HTTP/2 connection as a sans-IO machine, for both roles: bytes in, events out, and windows that follow the consumer."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import NoReturn, final

from h2.events import (
    Event as LibraryEvent,
)
from h2.events import (
    InformationalResponseReceived,
    RemoteSettingsChanged,
    RequestReceived,
    ResponseReceived,
    SettingsAcknowledged,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError as LibraryError
from h2.settings import SettingCodes
from h2.stream import H2Stream
from msgspec.structs import replace

from protocols.buffers import ByteBudget
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import (
    NEED_DATA,
    Buffer,
    ConnectionEnd,
    Data,
    End,
    Event,
    GoAway,
    Headers,
    Ping,
    Refused,
    Request,
    Reset,
    Response,
    Sent,
    Signal,
)
from protocols.http2_frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEAD,
    LARGEST_ID,
    PADDED,
    Code,
    Frame,
    FrameSplitter,
    Kind,
    data_head,
    goaway,
    rst_stream,
    unpad,
)
from protocols.http2_heads import (
    MalformedHeadError,
    content_length,
    lies_about_length,
    plain_request,
    read_request,
    read_response,
    read_trailers,
    request_fields,
    response_block,
    trailer_fields,
)
from protocols.http2_hpack import Block
from protocols.http2_library import REMEMBERED, Library
from protocols.http2_output import ControlQueue, Gather, PayloadQueue, flat_views
from protocols.http2_windows import LARGEST_WINDOW, Ledger, ReceiveWindows
from protocols.roles import Role

LARGEST_DATA = 16_384
"""Payload of one DATA frame that we write, at most: a turn of the round robin, whatever larger frames the peer takes."""
SHARE = 16_384
"""What each stream may queue, whatever the other streams have queued."""
WORTHWHILE = 1024
"""A frame is not cut shorter than this to fill the end of a write."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HTTP2Limits:
    """What one connection may cost. All are bytes, but for `streams` (open at once, of the peer's), `continuations`
    (CONTINUATION frames of a header block), `settings_entries` (of a SETTINGS frame) and `fields` (of a head).

    `initial_window` and `max_window` bound what a stream may hold unread, `send_buffer` what it may queue to write,
    `connection_send_buffer` what all may queue beyond their shares, `output` the control frames that wait before
    `choked`. `head` is the header list as RFC 9113 section 6.5.2 counts it.
    """

    streams: int = 1000
    initial_window: int = 65_536
    max_window: int = 262_144
    frame_size: int = 16_384
    continuations: int = 8
    settings_entries: int = 32
    head: int = 32_768
    fields: int = 100
    send_buffer: int = 65_536
    connection_send_buffer: int = 262_144
    output: int = 262_144

    def __post_init__(self) -> None:
        if not 1 <= self.initial_window <= self.max_window <= LARGEST_WINDOW:
            raise ValueError(
                f"initial_window {self.initial_window} and max_window {self.max_window}: 1 to 2**31 - 1, in this order"
            )
        if not 16_384 <= self.frame_size < 2**24:
            raise ValueError(f"frame_size is {self.frame_size}; RFC 9113 section 4.2 allows 16384 to 16777215")


@final
@dataclass(slots=True)
class FloodCounters:
    """Frames that cost the peer little and us something, since the connection began: counted here; the policy reads them.

    `resets` holds the peer's RST_STREAM frames and ours for its errors, never our NO_ERROR after a complete answer.
    """

    resets: int = 0
    pings: int = 0
    settings: int = 0
    empty_data: int = 0
    window_updates: int = 0
    priority: int = 0


@final
class _Stream:
    """One stream until it is closed and everything received on it is consumed."""

    __slots__ = (
        "bodyless",
        "counted",
        "dropped",
        "ended",
        "expected",
        "finished",
        "head_sent",
        "id",
        "library",
        "queue",
        "received",
        "receiving",
        "reset",
        "trailers",
    )

    def __init__(self, stream: int, library: H2Stream) -> None:
        self.id = stream
        self.library = library
        self.receiving = True
        """The peer may still send on it."""
        self.dropped = False
        """Nobody reads it any more."""
        self.expected: int | None = None
        self.received = 0
        self.bodyless = False
        """Client: the answer has no body, whatever its head says (HEAD)."""
        self.head_sent = False
        self.ended = False
        """`send` accepted our End."""
        self.finished = False
        """Our END_STREAM is out of the queue."""
        self.reset = False
        self.trailers: Headers = ()
        self.queue = PayloadQueue()
        self.counted = True

    @property
    def open(self) -> bool:
        return not self.reset and (self.receiving or not self.finished)


@final
class HTTP2Connection:
    """One HTTP/2 connection (RFC 9113), server or client, over the h2 library.

    The caller moves bytes: `receive_data` and `next_event` inwards, `data_to_send` and `data_sent` outwards. It is
    always pullable; only windows push back. h2 decides on everything that is not plain: DATA frames on open streams and
    requests in one HEADERS frame are handled here, against h2's own windows and states, and handed on without it.

    **Receiving.** Bytes that came with Data events are the consumer's until it says `credit`, and nothing else gives
    window back; whoever will read no more says `drop`. Both are owed also for a stream that was reset: its
    bytes belong to the connection's window. Data and End of a stream no longer come after `drop`, after Refused, nor
    after a server's End; a Reset always comes. A Reset may name a stream that was never announced (its head was
    malformed), and one with code 0 may follow the End of a response: the server needs no more of the request.

    **Sending.** `send` never blocks and takes any size: who wants bounds asks `room` first. A server's End while the
    peer still sends is followed by RST_STREAM(NO_ERROR) once it is written, as section 8.1 allows and as clients
    need that wait for their own end. A LocalProtocolError has queued nothing.

    **Ending.** After a RemoteProtocolError `data_to_send` still gives the GOAWAY. When the transport is gone, call `close`;
    then credit or drop what is unread, so that a byte budget gets everything back.

    `scheme` is the `:scheme` of a client's requests; a server reports what the request says. `budget` bounds the
    receive windows of all streams together; a stream it has no room for is refused with REFUSED_STREAM.
    """

    def __init__(
        self,
        role: Role,
        limits: HTTP2Limits = HTTP2Limits(),
        *,
        budget: ByteBudget | None = None,
        scheme: bytes = b"https",
    ) -> None:
        self.role = role
        self.limits = limits
        self.scheme = scheme
        self.counters = FloodCounters()
        self._client = role is Role.CLIENT
        self._h2 = Library(
            client=self._client,
            streams=limits.streams,
            initial_window=limits.initial_window,
            frame_size=limits.frame_size,
            head=limits.head,
        )
        self._splitter = FrameSplitter(
            preface=not self._client,
            frame_size=self._h2.max_inbound_frame_size,
            continuations=limits.continuations,
            block=2 * limits.head,
            settings_entries=limits.settings_entries,
        )
        self._windows = ReceiveWindows(initial=limits.initial_window, maximum=limits.max_window, budget=budget)
        self._streams: dict[int, _Stream] = {}
        self._open = 0
        self._reset_by_us: OrderedDict[int, None] = OrderedDict()
        self._highest = 0
        self._events: deque[Event] = deque()
        self._error: RemoteProtocolError | None = None
        self._eof = False
        self._closed = False
        self._peer_leaves = False
        self._last_sent: int | None = None
        self._leaves_with_error = False
        self._control = ControlQueue()
        self._control.put(self._h2.opening)
        self._ring: OrderedDict[int, _Stream] = OrderedDict()
        self._queued = 0
        self._leaving: list[tuple[_Stream, int]] = []
        self._ending: list[int] = []
        self._handed_out = False

    # What the connection is like.

    def is_open(self, stream: int) -> bool:
        """Whether the stream is neither reset nor complete in both directions: a Reset may be sent, and until our own
        End also the rest."""
        found = self._streams.get(stream)
        return found is not None and found.open

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return self._open

    @property
    def unconsumed(self) -> int:
        """Bytes given out in Data events, or about to be, for which no credit came yet."""
        return self._windows.unread

    @property
    def has_output(self) -> bool:
        """Whether `data_to_send` would give something. Payload that waits for a window does not count."""
        return bool(self._control.nbytes) or (bool(self._ring) and self._h2.outbound_flow_control_window > 0)

    @property
    def choked(self) -> bool:
        """Whether more control frames wait than `limits.output`: the peer makes us answer and does not read. Whoever
        drives the connection stops reading from it until this is False again."""
        return self._control.nbytes > self.limits.output

    @property
    def idle(self) -> bool:
        """Whether no stream is open and nothing waits to be written."""
        return not self._open and not self.has_output and not self._handed_out

    @property
    def must_close(self) -> bool:
        """Whether nothing more can come of the connection: once the output is written, close it. True after a protocol
        error and after our own GOAWAY with an error code; and, when no stream is open any more, after our last
        GOAWAY, any GOAWAY of the peer, or its end of the connection."""
        if self._error is not None or self._closed or self._leaves_with_error:
            return True
        leaving = self._peer_leaves or self._eof or self._refusing
        return leaving and not self._open

    @property
    def can_open(self) -> bool:
        """Client: whether a Request may be sent now, by the peer's MAX_CONCURRENT_STREAMS, both sides' GOAWAY, the
        stream numbers and the byte budget."""
        alive = self._client and not self._over and not self._eof
        leaving = self._peer_leaves or self._last_sent is not None
        allowed = self._open < self._h2.remote_settings.max_concurrent_streams and self.next_stream <= LARGEST_ID
        return alive and not leaving and allowed and self._windows.affordable(self._h2.local_settings.initial_window_size)

    @property
    def next_stream(self) -> int:
        """Client: the number for the next Request. Larger odd ones may be used too."""
        return self._h2.highest_outbound_stream_id + 2 if self._h2.highest_outbound_stream_id else 1

    @property
    def _refusing(self) -> bool:
        return self._last_sent is not None and self._last_sent < LARGEST_ID

    def windows(self) -> dict[int, Ledger]:
        """The receive windows of all streams that are not forgotten, and the connection's under 0, each beside h2's own
        count: `ledger.available == ledger.library` always."""
        ledgers = {0: self._windows.ledger(0, self._h2.inbound_flow_control_window)}
        for stream in self._streams.values():
            ledgers[stream.id] = self._windows.ledger(stream.id, stream.library.inbound_flow_control_window)
        return ledgers

    # Receiving.

    def receive_data(self, data: Buffer) -> None:
        """Stores a copy of `data`, to be pulled with `next_event`. After a protocol error or `close` it is ignored."""
        if self._eof:
            raise LocalProtocolError("data after receive_eof")
        if not self._over:
            self._splitter.receive(data)

    def receive_eof(self) -> None:
        """The peer sends no more bytes. What it may still be told can be written."""
        self._eof = True

    def next_event(self) -> Event | Signal:
        """The next event, ConnectionEnd (again and again) after the end of input, else NEED_DATA.

        Raises RemoteProtocolError, with the HTTP/2 error code as `wire_code`, when the peer broke the connection (not
        just a stream), and the same one on each further call; every event before it was given.
        """
        while not self._events:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if self._closed:
                return ConnectionEnd()
            try:
                frame = self._splitter.next_frame()
            except RemoteProtocolError as error:
                self._refuse_frame(error)
            if frame is None:
                return self._at_end() if self._eof else NEED_DATA
            self._receive_frame(frame)
        return self._events.popleft()

    def credit(self, stream: int, n: int) -> None:
        """The consumer took n bytes of the stream, which may be long over. More than it was given, or after `drop`, is a
        LocalProtocolError."""
        self._windows.consumed(stream, n)
        if n:
            found = self._streams[stream]
            self._return_credit(found, grow=not found.dropped)

    def drop(self, stream: int) -> int:
        """Nobody will read the stream any more: what is unread is credited (the answer says how many bytes), and what
        still comes is credited as it comes. Our own direction is not concerned. Any number of times, for any stream."""
        found = self._streams.get(stream)
        if found is None:
            return 0
        found.dropped = True
        unread = self._windows.unread_on(stream)
        self._windows.consumed(stream, unread)
        self._return_credit(found, grow=False)
        return unread

    def _refuse_frame(self, error: RemoteProtocolError) -> NoReturn:
        # h2 sees the head of the refused frame, so that what is wrong with the head itself is its verdict.
        if error.wire_code == Code.FRAME_SIZE_ERROR:
            self._ask_library(self._splitter.pending_head)
        self._fail(error)

    def _at_end(self) -> Event:
        if not self._splitter.at_boundary:
            self._fail(RemoteProtocolError("the connection ended inside a frame", wire_code=Code.PROTOCOL_ERROR))
        return ConnectionEnd()

    def _receive_frame(self, frame: Frame) -> None:
        if self._splitter.block_stream and frame.kind not in (Kind.HEADERS, Kind.PUSH_PROMISE, Kind.CONTINUATION):
            self._give_library(frame)
        elif frame.kind == Kind.DATA:
            self._receive_payload(frame)
        elif frame.kind == Kind.HEADERS:
            self._receive_head(frame)
        elif frame.kind == Kind.GOAWAY and not frame.stream and len(frame.payload) >= 8:
            # h2 takes any GOAWAY for the end of the connection; only one that it cannot read is its business.
            self._receive_goaway(frame)
        elif frame.kind == Kind.PRIORITY:
            # RFC 9113 section 5.3.2: deprecated, to be ignored.
            self.counters.priority += 1
            if not frame.stream or len(frame.payload) != 5:
                self._give_library(frame)
        elif frame.kind <= Kind.CONTINUATION:
            self._count(frame)
            self._give_library(frame)

    def _count(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.RST_STREAM:
                self.counters.resets += 1
            case Kind.PING:
                self.counters.pings += 1
            case Kind.SETTINGS if not frame.flags & ACK:
                self.counters.settings += 1
            case Kind.WINDOW_UPDATE:
                self.counters.window_updates += 1

    def _ask_library(self, data: bytes) -> list[LibraryEvent]:
        try:
            return self._h2.receive_data(data)
        except LibraryError as error:
            self._drain()
            self._die(RemoteProtocolError(str(error)[:200] or "protocol error", wire_code=int(error.error_code)))

    def _give_library(self, frame: Frame) -> None:
        events = self._ask_library(frame.head + frame.payload)
        if frame.kind in (Kind.HEADERS, Kind.CONTINUATION) and frame.stream in self._reset_by_us:
            # Trailers that were under way when we reset the stream are legal (RFC 9113 section 5.4.2): no answer.
            self._h2.data_to_send()
        for event in events:
            self._receive_library_event(event)
        self._drain()

    def _receive_library_event(self, event: LibraryEvent) -> None:
        match event:
            case RequestReceived():
                self._receive_request(event)
            case ResponseReceived() | InformationalResponseReceived():
                self._receive_response(event)
            case TrailersReceived():
                self._receive_trailers(event)
            case StreamReset():
                self._receive_reset(event)
            case WindowUpdated(stream_id=stream) if stream in self._streams:
                self._arm(self._streams[stream])
            case RemoteSettingsChanged():
                for found in self._streams.values():
                    self._arm(found)
            case SettingsAcknowledged():
                self._receive_acknowledgement(event)

    def _receive_head(self, frame: Frame) -> None:
        """HEADERS. A request that is in order opens its stream here; everything else goes to h2 whole."""
        plain = frame.flags in (END_HEADERS, END_HEADERS | END_STREAM) and self._h2.opens(frame.stream)
        block = self._h2.decoder.look(frame.payload) if plain else None
        if block is None:
            self._give_library(frame)
            return
        ended = bool(frame.flags & END_STREAM)
        head = self._request_of(block)
        if head is None and lies_about_length(block.headers) and self._welcome(frame.stream):
            # h2 would end the connection, and its other streams with it; a malformed request is its stream's alone
            # (RFC 9113 section 8.1.1)
            library = self._h2.open_inbound(frame.stream, None, ended=ended)
            refused = Refused(stream=frame.stream, status=400, message="content-length: expected one number in digits")
            self._open_request(refused, library, ended=ended)
            return
        if head is None or (ended and head.content_length) or not self._welcome(frame.stream):
            self._h2.decoder.put_back(block)
            self._give_library(frame)
            return
        library = self._h2.open_inbound(frame.stream, head.content_length, ended=ended)
        self._open_request(replace(head, stream=frame.stream), library, ended=ended)

    def _request_of(self, block: Block) -> Request | None:
        if block.request is None:
            block.request = plain_request(block.headers, fields=self.limits.fields, size=self.limits.head)
        return block.request

    def _welcome(self, stream: int) -> bool:
        """Whether the peer may open this stream, by both sides' GOAWAY and the limit of open ones."""
        too_late = self._peer_leaves or (self._last_sent is not None and stream > self._last_sent)
        return not too_late and self._open < self.limits.streams

    def _receive_request(self, event: RequestReceived) -> None:
        stream = event.stream_id
        ended = event.stream_ended is not None
        if not self._welcome(stream):
            self._reset_in_library(stream, Code.REFUSED_STREAM)
            return
        try:
            head = read_request(stream, event.headers, ended=ended, fields=self.limits.fields, size=self.limits.head)
        except MalformedHeadError:
            self._stream_error(stream, Code.PROTOCOL_ERROR)
            return
        self._open_request(head, self._h2.streams[stream], ended=ended)

    def _open_request(self, head: Request | Refused, library: H2Stream, *, ended: bool) -> None:
        stream = head.stream
        if not self._windows.open(stream, library.inbound_flow_control_window):
            self._reset_in_library(stream, Code.REFUSED_STREAM)
            return
        found = self._adopt(stream, library)
        found.receiving = not ended
        self._highest = stream
        self._events.append(head)
        if isinstance(head, Refused):
            found.dropped = True
        else:
            found.expected = head.content_length
            if ended:
                self._events.append(End(stream=stream))
        self._return_connection_credit()

    def _receive_response(self, event: ResponseReceived | InformationalResponseReceived) -> None:
        found = self._streams[event.stream_id]
        ended = isinstance(event, ResponseReceived) and event.stream_ended is not None
        try:
            head = read_response(found.id, event.headers, fields=self.limits.fields, size=self.limits.head)
            if head.status >= 200:
                bodyless = found.bodyless or head.status in (204, 304)
                found.expected = 0 if bodyless else content_length(head.headers)
            if ended and found.expected:
                raise MalformedHeadError("content-length, and no body follows")
        except MalformedHeadError:
            self._stream_error(found.id, Code.PROTOCOL_ERROR)
            return
        self._events.append(head)
        if ended:
            self._receive_end(found, ())

    def _receive_trailers(self, event: TrailersReceived) -> None:
        found = self._streams[event.stream_id]
        try:
            trailers = read_trailers(event.headers, fields=self.limits.fields, size=self.limits.head)
        except MalformedHeadError:
            self._stream_error(found.id, Code.PROTOCOL_ERROR)
            return
        if self._wrong_length(found, ended=True):
            self._stream_error(found.id, Code.PROTOCOL_ERROR)
            return
        self._receive_end(found, trailers)

    def _receive_payload(self, frame: Frame) -> None:
        found = self._streams.get(frame.stream)
        if found is None or not found.receiving:
            self._receive_late_payload(frame)
            return
        data = unpad(frame) if frame.flags & PADDED else frame.payload
        if data is None or not self._h2.consume(found.library, len(frame.payload)):
            self._give_library(frame)
        else:
            self._accept_payload(found, data, len(frame.payload), ended=bool(frame.flags & END_STREAM))

    def _accept_payload(self, found: _Stream, data: bytes, n: int, *, ended: bool) -> None:
        """`data` came in a frame of n flow-controlled bytes, which h2 has counted."""
        self._windows.received(found.id, n)
        found.received += len(data)
        if not data and not ended:
            self.counters.empty_data += 1
        if found.expected is not None and self._wrong_length(found, ended=ended):
            self._windows.consumed(found.id, n)
            self._stream_error(found.id, Code.PROTOCOL_ERROR)
            self._return_connection_credit()
            return
        if data and not found.dropped:
            self._events.append(Data(stream=found.id, buffers=(data,)))
        if ended:
            self._h2.end_received(found.library)
            self._receive_end(found, ())
        unused = n if found.dropped else n - len(data)
        if unused:
            self._windows.consumed(found.id, unused)
            self._return_credit(found, grow=False)

    def _receive_late_payload(self, frame: Frame) -> None:
        """DATA on a stream whose peer may not send: legal while our RST_STREAM is under way, else an error."""
        mine = frame.stream % 2 == self._client
        highest = self._h2.highest_outbound_stream_id if mine else self._h2.highest_inbound_stream_id
        idle = not 0 < frame.stream <= highest
        if idle or not self._h2.consume(None, len(frame.payload)):
            self._give_library(frame)
        else:
            self._discard_payload(frame)

    def _discard_payload(self, frame: Frame) -> None:
        self._windows.discarded(len(frame.payload))
        if not frame.payload:
            self.counters.empty_data += 1
        if self.is_open(frame.stream):
            self._stream_error(frame.stream, Code.STREAM_CLOSED)
        elif frame.stream not in self._reset_by_us:
            self.counters.resets += 1
            self._control.put(rst_stream(frame.stream, Code.STREAM_CLOSED))
        self._return_connection_credit()

    def _wrong_length(self, stream: _Stream, *, ended: bool) -> bool:
        """RFC 9113 section 8.1.1. Of a body that nobody reads it does not matter, and our answer shall not suffer."""
        if stream.expected is None or stream.dropped:
            return False
        return stream.received > stream.expected or (ended and stream.received != stream.expected)

    def _receive_end(self, stream: _Stream, trailers: Headers) -> None:
        stream.receiving = False
        if not stream.dropped:
            self._events.append(End(stream=stream.id, trailers=trailers))
        self._settle(stream)

    def _receive_reset(self, event: StreamReset) -> None:
        code = int(event.error_code)
        found = self._streams[event.stream_id]
        if not event.remote_reset:
            self.counters.resets += 1
            self._remember_reset(found.id)
            self._drain(found.id)
        self._lose(found)
        self._events.append(Reset(stream=found.id, code=code))

    def _receive_acknowledgement(self, event: SettingsAcknowledged) -> None:
        self._splitter.frame_size = self._h2.max_inbound_frame_size
        change = event.changed_settings.get(SettingCodes.INITIAL_WINDOW_SIZE)
        if change is not None:
            for stream in self._streams:
                if stream in self._h2.streams:
                    self._windows.adjust(stream, change.new_value - (change.original_value or 0))
            if self._streams:
                self._return_connection_credit()

    def _receive_goaway(self, frame: Frame) -> None:
        last = int.from_bytes(frame.payload[:4]) & LARGEST_ID
        self._peer_leaves = True
        self._events.append(GoAway(code=int.from_bytes(frame.payload[4:8]), last_stream=last, debug=frame.payload[8:]))
        if self._client:
            for found in [found for found in self._streams.values() if found.open and found.id > last]:
                # Section 6.8: the peer never acted on it. It must not hear of it either: to it the stream is idle.
                self._h2.reset_stream(found.id, Code.REFUSED_STREAM)
                self._h2.data_to_send()
                self._remember_reset(found.id)
                self._lose(found)
                self._events.append(Reset(stream=found.id, code=int(Code.REFUSED_STREAM)))

    # Credit.

    def _return_credit(self, stream: _Stream, *, grow: bool) -> None:
        if stream.receiving:
            increment = self._windows.stream_increment(stream.id, grow=grow)
            if increment:
                self._control.put(self._h2.grant(increment, stream.library))
        else:
            self._settle(stream)
        if not self._over:
            self._return_connection_credit()

    def _return_connection_credit(self) -> None:
        increment = self._windows.connection_increment()
        if increment:
            self._control.put(self._h2.grant(increment))

    # Sending.

    def send(self, event: Request | Response | Data | End | Reset | GoAway | Ping) -> None:
        """Queues what the event says. Response, Data and End need a stream that is open and not ended by us, Data and
        End the final head before them; a 1xx Response may come before that. Data is kept by reference until it is
        written. A Reset drops what the stream has queued. A GoAway refuses streams above its number and lets the
        others finish. A Ping carries 8 bytes; its answer is not reported.
        """
        if self._over:
            raise LocalProtocolError("the connection is over")
        match event:
            case Data():
                self._send_data(event)
            case End():
                self._send_end(event)
            case Response():
                self._send_response(event)
            case Request():
                self._send_request(event)
            case Reset():
                self._send_reset(event)
            case GoAway():
                self._send_goaway(event)
            case Ping():
                self._send_ping(event)

    def room(self, stream: int) -> int:
        """How many more bytes the stream may queue: up to `limits.send_buffer` in all while the connection's streams
        together have less than `limits.connection_send_buffer` queued, and up to SHARE always.

        The share keeps a stream that a stalled one's bytes would crowd out going, frame by frame; and because a
        stream with an empty queue always has room, whoever waits for room waits for its own stream to be written
        and for no other. 0 for a stream on which nothing more can be sent.
        """
        found = self._streams.get(stream)
        if found is None or found.reset or found.ended:
            return 0
        held = found.queue.nbytes + found.queue.leaving
        own = self.limits.send_buffer - held
        shared = self.limits.connection_send_buffer - self._queued
        return max(0, min(own, max(SHARE - held, shared)))

    def queued(self, stream: int) -> int:
        """Bytes of the stream's payload that are not written yet."""
        found = self._streams.get(stream)
        return 0 if found is None else found.queue.nbytes + found.queue.leaving

    def leaving(self, stream: int) -> int:
        """Those of them that `data_to_send` has handed out."""
        found = self._streams.get(stream)
        return 0 if found is None else found.queue.leaving

    def shutdown(self, last: bool) -> None:
        """A graceful end in two steps (RFC 9113 section 6.8). The first says GOAWAY with the largest number: open no more
        streams; those under way are still accepted. With `last` it names the highest accepted stream; newer ones are
        refused with REFUSED_STREAM. What is open finishes either way. Repeating a step does nothing.
        """
        if not self._over and (self._last_sent is None or (last and not self._refusing)):
            self._send_goaway(GoAway(last_stream=self._highest if last else LARGEST_ID))

    def close(self) -> None:
        """The transport is gone: nothing will be written or received any more, and every stream is over. Bytes that were
        given out are still to be credited or dropped. Any number of times."""
        self._closed = True
        self._splitter.clear()
        self._events.clear()
        self._abandon()
        self._control.clear()
        self._leaving.clear()
        self._ending.clear()
        self._handed_out = False
        self._queued = 0

    def _sendable(self, stream: int) -> _Stream:
        found = self._streams.get(stream)
        if found is None or not found.open:
            raise LocalProtocolError(f"stream {stream} is not open")
        if found.ended:
            raise LocalProtocolError(f"stream {stream} is already ended")
        return found

    def _send_request(self, event: Request) -> None:
        if not self._client:
            raise LocalProtocolError("a server sends no requests")
        if not self.can_open:
            raise LocalProtocolError("no stream may be opened now: see can_open")
        if not event.stream % 2 or not self.next_stream <= event.stream <= LARGEST_ID:
            raise LocalProtocolError(f"stream {event.stream} cannot be opened; the next number is {self.next_stream}")
        fields = request_fields(event, self.scheme)
        self._windows.open(event.stream, self._h2.local_settings.initial_window_size)
        self._h2.send_headers(event.stream, fields)
        found = self._adopt(event.stream, self._h2.streams[event.stream])
        found.head_sent = True
        found.bodyless = event.method == b"HEAD"
        self._drain()
        self._return_connection_credit()

    def _send_response(self, event: Response) -> None:
        if self._client:
            raise LocalProtocolError("a client sends no responses")
        found = self._sendable(event.stream)
        if found.head_sent:
            raise LocalProtocolError(f"stream {event.stream} already has its response head")
        block = response_block(event)
        self._control.put(self._h2.response(found.library, block, interim=event.status < 200))
        found.head_sent = event.status >= 200

    def _send_data(self, event: Data) -> None:
        found = self._headed(event.stream)
        self._queued += found.queue.put(flat_views(event.buffers))
        self._arm(found)

    def _send_end(self, event: End) -> None:
        found = self._headed(event.stream)
        found.trailers = tuple(trailer_fields(event.trailers))
        found.ended = True
        if not self._client:
            found.dropped = True
        if not found.queue.nbytes:
            self._finish(found)

    def _send_reset(self, event: Reset) -> None:
        if not self.is_open(event.stream):
            raise LocalProtocolError(f"stream {event.stream} is not open")
        if not 0 <= event.code < 2**32:
            raise LocalProtocolError(f"{event.code} is not an error code")
        self._reset_in_library(event.stream, event.code)
        self._lose(self._streams[event.stream])

    def _send_goaway(self, event: GoAway) -> None:
        if not 0 <= event.code < 2**32 or not 0 <= event.last_stream <= LARGEST_ID or len(event.debug) > LARGEST_DATA - 8:
            raise LocalProtocolError("code, last_stream or debug of a GoAway is out of range")
        # Not through h2, which would end the connection. A later GOAWAY never names more than an earlier (section 6.8).
        named = max(event.last_stream, self._highest)
        self._last_sent = named if self._last_sent is None else min(self._last_sent, named)
        self._leaves_with_error = self._leaves_with_error or event.code != Code.NO_ERROR
        self._control.put(goaway(event.code, self._last_sent, event.debug))

    def _send_ping(self, event: Ping) -> None:
        if len(event.data) != 8:
            raise LocalProtocolError(f"an HTTP/2 PING carries 8 bytes, not {len(event.data)}")
        self._h2.ping(event.data)
        self._drain()

    def _headed(self, stream: int) -> _Stream:
        found = self._sendable(stream)
        if not found.head_sent:
            raise LocalProtocolError(f"stream {stream} has no head yet")
        return found

    def _finish(self, stream: _Stream) -> None:
        """Writes our end of a stream whose payload is all out of the queue. Trailers are encoded only here, because
        header blocks must reach the peer in the order of their encoding."""
        if stream.trailers:
            self._h2.send_headers(stream.id, stream.trailers, end_stream=True)
            frames = self._h2.data_to_send()
        else:
            self._h2.end_sent(stream.library)
            frames = data_head(0, end=True, stream=stream.id)
        self._control.put(frames, 0 if self._cuts(stream) else stream.id)
        self._finished(stream)

    def _finish_with_payload(self, stream: _Stream) -> None:
        """Our end of a stream goes out with its last DATA frame."""
        self._h2.end_sent(stream.library)
        if not self._cuts(stream):
            self._ending.append(stream.id)
        self._finished(stream)

    def _finished(self, stream: _Stream) -> None:
        cut = self._cuts(stream)
        stream.finished = True
        if cut:
            self._reset_in_library(stream.id, Code.NO_ERROR)
            self._lose(stream)
        else:
            self._settle(stream)

    def _cuts(self, stream: _Stream) -> bool:
        """Whether RST_STREAM(NO_ERROR) follows our end: a server's whole answer to a request that is not whole."""
        return stream.receiving and not self._client

    # Writing.

    def data_to_send(self, at_most: int) -> list[Buffer]:
        """The next buffers to write, at most so many bytes: control frames first, then a DATA frame of each stream in turn
        that its window and the connection's let write. Empty if there is nothing, or no space for a frame: 10 bytes are
        the least.

        Payload from 4 KiB on is handed out by reference. Nothing else may be written between these bytes. They count
        as queued until `data_sent`; asking again before that is a LocalProtocolError.
        """
        if self._handed_out:
            raise LocalProtocolError("data_to_send again before data_sent")
        out = Gather()
        while out.nbytes < at_most:
            if self._control.nbytes:
                frames, ends = self._control.take(at_most - out.nbytes)
                out.add(frames)
                if ends:
                    self._ending.append(ends)
            elif not self._ring or not self._write_frame(out, at_most - out.nbytes):
                break
        self._handed_out = out.nbytes > 0
        return out.buffers()

    def data_sent(self) -> Sent:
        """The buffers of the last `data_to_send` are written. Says which streams have more room and which are ended: for
        a stream reset after END_STREAM, when the RST_STREAM is written."""
        if not self._handed_out:
            raise LocalProtocolError("data_sent without data_to_send")
        for stream, n in self._leaving:
            stream.queue.leaving -= n
            self._queued -= n
        sent = Sent(room=list(dict.fromkeys([stream.id for stream, _ in self._leaving])), ended=self._ending)
        self._leaving, self._ending, self._handed_out = [], [], False
        return sent

    def _write_frame(self, out: Gather, space: int) -> bool:
        """One DATA frame of the stream whose turn it is; False if it cannot or should not be written."""
        stream = next(iter(self._ring.values()))
        library, queue = self._h2, stream.queue
        allowed = min(
            queue.nbytes,
            LARGEST_DATA,
            library.max_outbound_frame_size,
            library.outbound_flow_control_window,
            stream.library.outbound_flow_control_window,
        )
        n = min(allowed, space - HEAD)
        if n <= 0 or (n < allowed and out.nbytes and n < WORTHWHILE):
            return False
        pieces = queue.take(n)
        library.outbound_flow_control_window -= n
        stream.library.outbound_flow_control_window -= n
        self._leaving.append((stream, n))
        last = stream.ended and not queue.nbytes
        out.add(data_head(n, end=last and not stream.trailers, stream=stream.id))
        for piece in pieces:
            out.add(piece)
        del self._ring[stream.id]
        self._arm(stream)
        if last and stream.trailers:
            self._finish(stream)
        elif last:
            self._finish_with_payload(stream)
        return True

    # Streams.

    def _adopt(self, stream: int, library: H2Stream) -> _Stream:
        found = self._streams[stream] = _Stream(stream, library)
        self._open += 1
        return found

    def _arm(self, stream: _Stream) -> None:
        """Puts the stream at the end of the ring if it may write, else out of it."""
        if not stream.queue.nbytes or stream.library.outbound_flow_control_window <= 0:
            self._ring.pop(stream.id, None)
        elif stream.id not in self._ring:
            self._ring[stream.id] = stream

    def _stream_error(self, stream: int, code: int) -> None:
        """The peer broke one stream. If that was with its END_STREAM after ours, there is nothing left to reset."""
        self.counters.resets += 1
        if not self._h2.streams[stream].closed:
            self._reset_in_library(stream, code)
        if stream in self._streams:
            self._lose(self._streams[stream])
        self._events.append(Reset(stream=stream, code=int(code)))

    def _reset_in_library(self, stream: int, code: int) -> None:
        self._h2.reset_stream(stream, code)
        self._remember_reset(stream)
        self._drain(stream)

    def _remember_reset(self, stream: int) -> None:
        self._reset_by_us[stream] = None
        if len(self._reset_by_us) > REMEMBERED:
            self._reset_by_us.popitem(last=False)

    def _lose(self, stream: _Stream) -> None:
        """The stream is reset, by whomever: nothing of it will be sent or received, only its unread bytes remain."""
        stream.reset = True
        stream.receiving = False
        self._queued -= stream.queue.discard()
        self._ring.pop(stream.id, None)
        self._settle(stream)

    def _settle(self, stream: _Stream) -> None:
        """Counts a stream out when it is not open any more, and forgets it when it is read to the end."""
        if stream.open:
            return
        if stream.counted:
            stream.counted = False
            self._open -= 1
        if not self._windows.unread_on(stream.id) and self._streams.pop(stream.id, None) is not None:
            self._windows.forget(stream.id)

    # The connection's own end.

    @property
    def _over(self) -> bool:
        return self._error is not None or self._closed

    def _drain(self, ends: int = 0) -> None:
        """To be called after everything that h2 is told: a GOAWAY would clear what it holds."""
        frames = self._h2.data_to_send()
        if frames:
            self._control.put(frames, ends)

    def _fail(self, error: RemoteProtocolError) -> NoReturn:
        self._h2.close_connection(error.wire_code or Code.PROTOCOL_ERROR)
        self._drain()
        self._die(error)

    def _die(self, error: RemoteProtocolError) -> NoReturn:
        self._error = error
        self._splitter.clear()
        self._abandon()
        raise error

    def _abandon(self) -> None:
        for stream in list(self._streams.values()):
            self._lose(stream)
