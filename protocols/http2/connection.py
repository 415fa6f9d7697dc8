"""The HTTP/2 connection as a sans-IO machine, for both roles: bytes in, events out, and windows that follow the consumer."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NoReturn, final

from h2.events import (
    DataReceived,
    InformationalResponseReceived,
    RemoteSettingsChanged,
    RequestReceived,
    ResponseReceived,
    SettingsAcknowledged,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.events import (
    Event as LibraryEvent,
)
from h2.exceptions import ProtocolError as LibraryError
from h2.settings import SettingCodes
from h2.stream import H2Stream
from msgspec.structs import force_setattr

from protocols.buffers import ByteBudget
from protocols.date_field import DateField
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
from protocols.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    HEAD,
    LARGEST_ID,
    Code,
    Frame,
    FrameSplitter,
    Kind,
    goaway,
    rst_stream,
    window_update,
)
from protocols.http2.heads import (
    MalformedHeadError,
    content_length,
    joined_cookies,
    plain_request,
    read_request,
    read_response,
    read_trailers,
    request_fields,
    trailer_fields,
)
from protocols.http2.library import REMEMBERED, LibraryPath
from protocols.http2.limits import DEFAULT_LIMITS, FloodCounters, HTTP2Limits
from protocols.http2.output import ControlQueue, gathered
from protocols.http2.stream import Stream
from protocols.http2.windows import Ledger, ReceiveWindows, Window
from protocols.roles import Role

try:
    from protocols.http2.payload import PayloadPath
except ImportError as missing:
    _LANE: type[PayloadPath] | None = None
    warnings.warn(f"HTTP/2 goes through h2's own objects, which costs several times as much: {missing}", RuntimeWarning, 2)
else:
    _LANE = PayloadPath

__all__ = ["LARGEST_DATA", "SHARE", "FloodCounters", "HTTP2Connection", "HTTP2Limits"]

_NO_DATE = DateField()

LARGEST_DATA = 16_384
"""Payload of one DATA frame that we write, at most: a turn of the round robin, and what every peer takes (section 4.2)."""
SHARE = 16_384
"""What each stream may queue, whatever the other streams have queued."""
WORTHWHILE = 1024
"""A frame is not cut shorter than this to fill the end of a write."""
LOOKS = 30
"""How many calls of `tick` a stream may outlast its answer at most."""
_head_at = FRAME_HEAD.unpack_from


@final
class HTTP2Connection:
    """One HTTP/2 connection (RFC 9113), server or client, over the h2 library.

    The caller moves bytes: `receive_data` and `next_event` inwards, `data_to_send` and `data_sent` outwards. It is
    always pullable; only windows push back. h2 decides on everything that is not plain: DATA frames on open streams and
    requests in one HEADERS frame are handled here, against h2's own windows and states, and handed on without it. With
    `lane=False`, and where the installed h2 has not the names that this takes, everything goes through h2: the same
    events and bytes (but for how header blocks are compressed) at several times the cost.

    **Receiving.** Bytes that came with Data events are the consumer's until it says `credit`, and nothing else gives
    window back; whoever will read no more says `drop`. Both are owed also for a stream that was reset: its
    bytes belong to the connection's window. Data and End of a stream no longer come after `drop`, after Refused, nor
    after a server's End; a Reset always comes. A Reset may name a stream that was never announced (its head was
    malformed), and one with code 0 may follow the End of a response: the server needs no more of the request.

    **Sending.** `send` never blocks and takes any size: who wants bounds asks `room` first. A LocalProtocolError has
    queued nothing.

    **Lingering.** A server's whole answer to a request that is not whole leaves the stream half closed: it is not open
    any more, nothing is reported of it, not even a Reset, and what comes is dropped. The peer's END_STREAM or RST_STREAM
    ends it, else our RST_STREAM(NO_ERROR) (section 8.1), which asks the peer to stop. That one waits until the peer has
    had time to read the answer: some clients forget an answer whose reset they read with it, others read nothing
    before their request is out. It is sent by `tick`, and before that past `limits.linger` bytes and for a stream that
    others may need the place of: of `limits.streams`, those that linger have half of what the open ones leave.

    **Ending.** After a RemoteProtocolError `data_to_send` still gives the GOAWAY. When the transport is gone, call `close`;
    then credit or drop what is unread, so that a byte budget gets everything back.

    `scheme` is the `:scheme` of a client's requests; a server reports what the request says. `budget` bounds the
    receive windows of all streams together; a stream it has no room for is refused with REFUSED_STREAM. `date` is what a
    server's final heads say.
    """

    def __init__(
        self,
        role: Role,
        limits: HTTP2Limits = DEFAULT_LIMITS,
        *,
        budget: ByteBudget | None = None,
        scheme: bytes = b"https",
        lane: bool = True,
        date: DateField = _NO_DATE,
    ) -> None:
        self.role = role
        self._date = date
        self.limits = limits
        self.scheme = scheme
        self.counters = FloodCounters()
        self._client = role is Role.CLIENT
        way = _LANE if lane and _LANE is not None else LibraryPath
        self._h2 = way(
            client=self._client,
            streams=limits.streams,
            initial_window=limits.initial_window,
            frame_size=limits.frame_size,
            head=limits.head,
        )
        self._lane = self._h2 if _LANE is not None and isinstance(self._h2, _LANE) else None
        self._inbound = self._h2.inbound(None)
        self._splitter = FrameSplitter(
            preface=not self._client,
            frame_size=self._h2.max_inbound_frame_size,
            continuations=limits.continuations,
            block=2 * limits.head,
            settings_entries=limits.settings_entries,
        )
        self._windows = ReceiveWindows(initial=limits.initial_window, maximum=limits.max_window, budget=budget)
        self._streams: dict[int, Stream] = {}
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
        self._ring: OrderedDict[int, Stream] = OrderedDict()
        self._queued = 0
        self._answered: set[int] = set()
        self._lingering: OrderedDict[int, Stream] = OrderedDict()
        self._leaving: list[tuple[Stream, int]] = []
        self._ending: list[int] = []
        self._handed_out = False

    # What the connection is like.

    def is_open(self, stream: int) -> bool:
        """Whether the stream is neither reset nor complete in both directions, nor lingering: a Reset may be sent, and
        until our own End also the rest."""
        found = self._streams.get(stream)
        return found is not None and found.open

    @property
    def open_streams(self) -> int:
        """How many streams are open."""
        return self._open

    @property
    def lingering(self) -> int:
        """How many streams of peers that have their whole answer and may still send are to be looked at by `tick`."""
        return len(self._lingering)

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
        ledgers = {0: self._windows.ledger(None, self._h2.inbound_flow_control_window)}
        for stream in self._streams.values():
            ledgers[stream.id] = self._windows.ledger(stream.window, stream.library.inbound_flow_control_window)
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
        just a stream), and one that says the same on each further call; every event before it was given.
        """
        events = self._events
        if events:
            return events.popleft()
        while True:
            event = self._next_plain()
            if event is not None:
                return event
            if self._error is not None:
                raise self._error.again()
            if self._closed:
                return ConnectionEnd()
            try:
                frame = self._splitter.next_frame()
            except RemoteProtocolError as error:
                self._refuse_frame(error)
            if frame is None:
                return self._at_end() if self._eof else NEED_DATA
            self._receive_frame(frame)
            if events:
                return events.popleft()

    def credit(self, stream: int, n: int) -> None:
        """The consumer took n bytes of the stream, which may be long over. More than it was given, or after `drop`, is a
        LocalProtocolError."""
        found = self._streams.get(stream)
        if found is None or not 0 < n <= found.window.unread:
            unread = 0 if found is None else found.window.unread
            if n:
                raise LocalProtocolError(f"credit of {n} bytes on stream {stream}, which has {unread} unread")
        elif self._windows.consumed(found.window, n):
            self._return_credit(found, grow=not found.dropped)
        elif not found.receiving:
            self._settle(found)

    def drop(self, stream: int) -> int:
        """Nobody will read the stream any more: what is unread is credited (the answer says how many bytes), and what
        still comes is credited as it comes. Our own direction is not concerned. Any number of times, for any stream."""
        found = self._streams.get(stream)
        if found is None:
            return 0
        found.dropped = True
        unread = found.window.unread
        if unread:
            self._windows.consumed(found.window, unread)
        self._return_credit(found, grow=False)
        if found.lingering:
            self._windows.unreserve(found.window)
        return unread

    def tick(self) -> bool:
        """To be called about once a second while streams are `lingering`: resets those on which nothing has come since the
        last call, or that have outlasted LOOKS of them. Says whether there were any."""
        over = []
        for stream in self._lingering.values():
            quiet = stream.looks and stream.swallowed == stream.swallowed_before
            stream.swallowed_before = stream.swallowed
            stream.looks += 1
            if quiet or stream.looks > LOOKS:
                over.append(stream)
        for stream in over:
            self._reset_lingering(stream)
        return bool(over)

    def _next_plain(self) -> Event | None:
        """What a plain DATA or HEADERS frame at the front of the input means; None, and nothing done, if what is there is
        not just that. It does what the general way would, for the frames that come most."""
        splitter = self._splitter
        buffer, at = splitter.buffer, splitter.at
        start, size = at + HEAD, len(buffer)
        if size < start or type(buffer) is not bytes or splitter.block_stream:
            return None
        length_and_kind, flags, stream = _head_at(buffer, at)
        n = length_and_kind >> 8
        end = start + n
        if end > size or n > splitter.frame_size:
            return None
        found = self._streams.get(stream)
        if found is None:
            is_head = length_and_kind & 0xFF == Kind.HEADERS and flags & ~END_STREAM == END_HEADERS
            return self._next_request(stream, buffer[start:end], ended=bool(flags & END_STREAM)) if is_head else None
        window, whole = found.inbound, self._inbound
        left, left_of_all = window.current_window_size - n, whole.current_window_size - n
        if (
            length_and_kind & 0xFF
            or flags > END_STREAM
            or not n
            or not found.receiving
            or found.dropped
            or left < 0
            or left_of_all < 0
        ):
            return None
        received = found.received + n
        if found.expected is not None and (received > found.expected or (flags and received != found.expected)):
            return None
        window.current_window_size, whole.current_window_size = left, left_of_all
        found.received = received
        self._windows.connection.unread += n
        ledger = found.window
        ledger.unread += n
        if left < ledger.low:
            ledger.low = left
        if end == size:
            splitter.clear()
        else:
            splitter.at = end
        if flags:
            assert self._lane is not None, "without the lane nothing is counted here"
            self._lane.end_received(found.library)
            self._receive_end(found, ())
        return Data(stream=stream, buffers=(buffer[start:end],))

    def _next_request(self, stream: int, block: bytes, *, ended: bool) -> Event | None:
        """A request in one HEADERS frame. One that is in order opens its stream here; everything else goes to h2 whole."""
        lane, splitter = self._lane, self._splitter
        if lane is None or len(block) > splitter.block or not lane.opens(stream):
            return None
        known = lane.decoder.look(block)
        if known is None:
            return None
        head = known.request
        if head is None:
            head = known.request = plain_request(known.headers, fields=self.limits.fields, size=self.limits.head)
        if head is None or (ended and head.content_length) or not self._welcome(stream):
            lane.decoder.put_back(known)
            return None
        splitter.skip_block(len(block))
        head = head.__copy__()  # type: ignore[attr-defined]  # what copy.copy would come to
        force_setattr(head, "stream", stream)
        self._open_request(head, lane.open_inbound(stream, ended=ended), ended=ended)
        return self._events.popleft() if self._events else None

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
            self._give_library(frame)
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
            self._obey(error)

    def _obey(self, error: LibraryError) -> NoReturn:
        """h2 has ended the connection."""
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
            case DataReceived(stream_id=stream):
                ended = event.stream_ended is not None
                self._accept_payload(self._streams[stream], event.data, event.flow_controlled_length, ended=ended)
            case StreamReset():
                self._receive_reset(event)
            case WindowUpdated(stream_id=stream) if stream in self._streams:
                self._arm(self._streams[stream])
            case RemoteSettingsChanged():
                for found in self._streams.values():
                    self._arm(found)
            case SettingsAcknowledged():
                self._receive_acknowledgement(event)

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
        headers = joined_cookies(self._h2.decoder.fields)
        try:
            head = read_request(stream, headers, ended=ended, fields=self.limits.fields, size=self.limits.head)
        except MalformedHeadError:
            self._stream_error(stream, Code.PROTOCOL_ERROR)
            return
        self._open_request(head, self._h2.streams[stream], ended=ended)

    def _open_request(self, head: Request | Refused, library: H2Stream, *, ended: bool) -> None:
        stream = head.stream
        window = self._windows.open(library.inbound_flow_control_window)
        if window is None:
            self._reset_in_library(stream, Code.REFUSED_STREAM)
            return
        found = self._adopt(stream, library, window)
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
        headers = joined_cookies(self._h2.decoder.fields)
        try:
            head = read_response(found.id, headers, fields=self.limits.fields, size=self.limits.head)
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
        headers = joined_cookies(self._h2.decoder.fields)
        try:
            trailers = read_trailers(headers, fields=self.limits.fields, size=self.limits.head)
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
        data = self._h2.payload(found.library, frame)
        if data is None:
            self._give_library(frame)
        else:
            self._accept_payload(found, data, len(frame.payload), ended=bool(frame.flags & END_STREAM))

    def _accept_payload(self, found: Stream, data: bytes, n: int, *, ended: bool) -> None:
        """`data` came in a frame of n flow-controlled bytes, which h2 has counted."""
        self._windows.received(found.window, n)
        found.received += len(data)
        if not data and not ended:
            self.counters.empty_data += 1
        if self._wrong_length(found, ended=ended):
            self._windows.consumed(found.window, n)
            self._stream_error(found.id, Code.PROTOCOL_ERROR)
            self._return_connection_credit()
            return
        if data and not found.dropped:
            self._events.append(Data(stream=found.id, buffers=(data,)))
        if ended:
            self._receive_end(found, ())
        unused = n if found.dropped else n - len(data)
        if unused:
            self._windows.consumed(found.window, unused)
            self._return_credit(found, grow=False)
        if found.lingering:
            found.swallowed += n
            if found.swallowed > self.limits.linger and found.id in self._lingering:
                self._reset_lingering(found)

    def _receive_late_payload(self, frame: Frame) -> None:
        """DATA on a stream whose peer may not send: legal while our RST_STREAM is under way, else an error."""
        stream, n = frame.stream, len(frame.payload)
        try:
            given = self._h2.discard(frame)
            self._windows.granted(given)
            if given:
                self._control.put(window_update(0, given))
        except LibraryError as error:
            self._obey(error)
        self._windows.discarded(n)
        if not n:
            self.counters.empty_data += 1
        if stream not in self._reset_by_us:
            self.counters.resets += 1
            self._control.put(rst_stream(stream, Code.STREAM_CLOSED), stream if self.is_open(stream) else 0)
        if self.is_open(stream):
            self._remember_reset(stream)
            self._lose(self._streams[stream])
            self._events.append(Reset(stream=stream, code=int(Code.STREAM_CLOSED)))
        self._return_connection_credit()

    def _wrong_length(self, stream: Stream, *, ended: bool) -> bool:
        """RFC 9113 section 8.1.1. Of a body that nobody reads it does not matter, and our answer shall not suffer."""
        if stream.expected is None or stream.dropped:
            return False
        return stream.received > stream.expected or (ended and stream.received != stream.expected)

    def _receive_end(self, stream: Stream, trailers: Headers) -> None:
        stream.receiving = False
        if not stream.dropped:
            self._events.append(End(stream=stream.id, trailers=trailers))
        if stream.finished:
            self._settle(stream)

    def _receive_reset(self, event: StreamReset) -> None:
        code = int(event.error_code)
        found = self._streams[event.stream_id]
        if not event.remote_reset:
            self.counters.resets += 1
            self._remember_reset(found.id)
            self._drain(found.id)
        lingered = found.lingering
        self._lose(found)
        if not lingered:
            self._events.append(Reset(stream=found.id, code=code))

    def _receive_acknowledgement(self, event: SettingsAcknowledged) -> None:
        self._splitter.frame_size = self._h2.max_inbound_frame_size
        change = event.changed_settings.get(SettingCodes.INITIAL_WINDOW_SIZE)
        if change is not None:
            known = [found for stream, found in self._streams.items() if stream in self._h2.streams]
            for found in known:
                self._windows.adjust(found.window, change.new_value - (change.original_value or 0))
            for found in known:
                if found.window.owed:  # a quarter of what it was may be all of what it is, and the peer waits for it
                    self._return_credit(found, grow=False)
            if self._streams:
                self._return_connection_credit()

    def _receive_goaway(self, frame: Frame) -> None:
        last = int.from_bytes(frame.payload[:4]) & LARGEST_ID
        self._peer_leaves = True
        self._events.append(GoAway(code=int.from_bytes(frame.payload[4:8]), last_stream=last, debug=frame.payload[8:]))
        if self._client:
            for found in [found for found in self._streams.values() if found.open and found.id > last]:
                # Section 6.8: the peer never acted on it. It must not hear of it either: to it the stream is idle.
                self._h2.reset(found.id, Code.REFUSED_STREAM)
                self._remember_reset(found.id)
                self._lose(found)
                self._events.append(Reset(stream=found.id, code=int(Code.REFUSED_STREAM)))

    # Credit.

    def _return_credit(self, stream: Stream, *, grow: bool) -> None:
        if stream.receiving:
            increment = self._windows.stream_increment(stream.window, grow=grow)
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
                self.send_data(event.stream, event.buffers)
            case End():
                self._send_end(event.stream, event.trailers)
            case Response():
                self._send_response(event.stream, event.status, event.headers)
            case Request():
                self._send_request(event)
            case Reset():
                self._send_reset(event)
            case GoAway():
                self._send_goaway(event)
            case Ping():
                self._send_ping(event)

    def respond(self, stream: int, status: int, headers: Headers, buffers: Sequence[Buffer] = ()) -> None:
        """A whole answer: what `send` does with a final Response, with Data if there are buffers, and with End."""
        if self._over:
            raise LocalProtocolError("the connection is over")
        if status < 200:
            raise LocalProtocolError(f"status {status} is an interim one, which answers nothing")
        found = self._answerable(stream)
        n = found.queue.put(buffers)
        try:
            self._control.put(self._h2.response(found.library, status, self._dated(headers)))
        except LocalProtocolError:
            found.queue.discard()
            raise
        found.head_sent = True
        if n:
            self._queued += n
            if found.library.outbound_flow_control_window > 0:
                self._ring[stream] = found
        self._end(found, ())

    def send_data(self, stream: int, buffers: Sequence[Buffer]) -> None:
        """What `send` does with Data."""
        found = self._streams.get(stream)
        if found is None or found.ended or found.reset or not found.head_sent:
            if self._over:
                raise LocalProtocolError("the connection is over")
            found = self._headed(stream)
        n = found.queue.put(buffers)
        if n:
            self._queued += n
            if stream not in self._ring and found.library.outbound_flow_control_window > 0:
                self._ring[stream] = found

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
        self._answered.clear()
        self._leaving.clear()
        self._ending.clear()
        self._handed_out = False
        self._queued = 0

    def _sendable(self, stream: int) -> Stream:
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
        window = self._windows.open(self._h2.local_settings.initial_window_size)
        assert window is not None, "can_open has asked the budget"
        self._h2.send_headers(event.stream, fields)
        found = self._adopt(event.stream, self._h2.streams[event.stream], window)
        found.head_sent = True
        found.bodyless = event.method == b"HEAD"
        self._drain()
        self._return_connection_credit()

    def _answerable(self, stream: int) -> Stream:
        found = self._streams.get(stream)
        if found is None or found.ended or found.reset or self._client:
            if self._client:
                raise LocalProtocolError("a client sends no responses")
            found = self._sendable(stream)
        if found.head_sent:
            raise LocalProtocolError(f"stream {stream} already has its response head")
        return found

    def _send_response(self, stream: int, status: int, headers: Headers) -> None:
        found = self._answerable(stream)
        if status >= 200:
            headers = self._dated(headers)
        self._control.put(self._h2.response(found.library, status, headers))
        found.head_sent = status >= 200

    def _dated(self, headers: Headers) -> Headers:
        """The fields of a final head, with the date where they do not have one (RFC 9110 section 6.6.1)."""
        value = self._date.value
        if value:
            for name, _ in headers:
                if name == b"date":
                    break
            else:
                return [*headers, (b"date", value)]
        return headers

    def _send_end(self, stream: int, trailers: Headers) -> None:
        found = self._headed(stream)
        self._end(found, tuple(trailer_fields(trailers)) if trailers else ())

    def _end(self, found: Stream, trailers: Headers) -> None:
        found.trailers = trailers
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

    def _headed(self, stream: int) -> Stream:
        found = self._sendable(stream)
        if not found.head_sent:
            raise LocalProtocolError(f"stream {stream} has no head yet")
        return found

    def _finish(self, stream: Stream) -> None:
        """Writes our end of a stream whose payload is all out of the queue. Trailers are encoded only here, because
        header blocks must reach the peer in the order of their encoding."""
        if stream.trailers:
            self._h2.send_headers(stream.id, stream.trailers, end_stream=True)
            frames = self._h2.data_to_send()
        else:
            pieces: list[bytes | memoryview] = []
            self._h2.data(stream.library, [], 0, True, pieces)
            frames = b"".join(pieces)
        self._control.put(frames, stream.id)
        self._finished(stream)

    def _finished(self, stream: Stream) -> None:
        """Our END_STREAM is out of the queue."""
        stream.finished = True
        if not stream.receiving:
            self._settle(stream)
        elif not self._client:
            stream.lingering, stream.counted = True, False
            self._open -= 1
            self._answered.add(stream.id)

    def _linger(self, written: list[int]) -> None:
        """Of these streams the last byte of ours is written: from now on those that linger may be reset."""
        for number in self._answered.intersection(written):
            self._answered.discard(number)
            stream = self._streams.get(number)
            if stream is not None and stream.lingering:
                self._lingering[number] = stream
                if not stream.window.unread:
                    self._windows.unreserve(stream.window)
        self._make_place(1)

    def _make_place(self, keep: int) -> None:
        """Resets the streams that have lingered longest while they, which count against MAX_CONCURRENT_STREAMS (section
        5.1.2), have more than half of what the open ones leave: so they are in no new stream's way."""
        while len(self._lingering) > max(keep, (self.limits.streams - self._open) // 2):
            self._reset_lingering(next(iter(self._lingering.values())))

    def _reset_lingering(self, stream: Stream) -> None:
        self._control.put(self._h2.reset(stream.id, Code.NO_ERROR))
        self._remember_reset(stream.id)
        self._lose(stream)

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
        out: list[bytes | memoryview] = []
        filled, control = 0, self._control
        while filled < at_most:
            if control.nbytes:
                n = control.take(at_most - filled, out, self._ending)
            elif self._ring:
                n = self._write_frame(out, filled, at_most - filled)
            else:
                break
            if not n:
                break
            filled += n
        self._handed_out = filled > 0
        return gathered(out, filled)

    def data_sent(self) -> Sent:
        """The buffers of the last `data_to_send` are written. Says which streams have more room and which are ended."""
        if not self._handed_out:
            raise LocalProtocolError("data_sent without data_to_send")
        leaving, self._leaving = self._leaving, []
        ended, self._ending = self._ending, []
        self._handed_out = False
        for stream, n in leaving:
            stream.queue.leaving -= n
            self._queued -= n
        if self._answered:
            self._linger(ended)
        if len(leaving) == 1:
            return Sent(room=[leaving[0][0].id], ended=ended)
        return Sent(room=list(dict.fromkeys([stream.id for stream, _ in leaving])), ended=ended)

    def _write_frame(self, out: list[bytes | memoryview], filled: int, space: int) -> int:
        """Appends one DATA frame of the stream whose turn it is, and says how long it is; 0 if it cannot or should not be
        written."""
        ring, h2 = self._ring, self._h2
        number, stream = ring.popitem(last=False)
        library, queue = stream.library, stream.queue
        allowed = queue.nbytes
        if allowed > LARGEST_DATA:
            allowed = LARGEST_DATA
        if allowed > h2.outbound_flow_control_window:
            allowed = h2.outbound_flow_control_window
        if allowed > library.outbound_flow_control_window:
            allowed = library.outbound_flow_control_window
        n = allowed if allowed <= space - HEAD else space - HEAD
        if n <= 0 or (n < allowed and filled and n < WORTHWHILE):
            ring[number] = stream
            ring.move_to_end(number, last=False)
            return 0
        last = stream.ended and n == queue.nbytes
        h2.data(library, queue.take(n), n, last and not stream.trailers, out)
        self._leaving.append((stream, n))
        if queue.nbytes and library.outbound_flow_control_window > 0:
            ring[number] = stream
        if last and stream.trailers:
            self._finish(stream)
        elif last:
            self._finished(stream)
            self._ending.append(number)
        return HEAD + n

    # Streams.

    def _adopt(self, stream: int, library: H2Stream, window: Window) -> Stream:
        found = self._streams[stream] = Stream(stream, library, window, self._h2.inbound(library))
        self._open += 1
        if self._lingering:
            self._make_place(0)
        return found

    def _arm(self, stream: Stream) -> None:
        """Puts the stream at the end of the ring if it may write, else out of it."""
        if not stream.queue.nbytes or stream.library.outbound_flow_control_window <= 0:
            self._ring.pop(stream.id, None)
        elif stream.id not in self._ring:
            self._ring[stream.id] = stream

    def _stream_error(self, stream: int, code: int) -> None:
        """The peer broke one stream. If that was with its END_STREAM after ours, there is nothing left to reset."""
        self.counters.resets += 1
        self._reset_in_library(stream, code)
        found = self._streams.get(stream)
        lingered = found is not None and found.lingering
        if found is not None:
            self._lose(found)
        if not lingered:
            self._events.append(Reset(stream=stream, code=int(code)))

    def _reset_in_library(self, stream: int, code: int) -> None:
        frames = self._h2.reset(stream, code)
        if frames:
            self._remember_reset(stream)
            self._control.put(frames, stream)

    def _remember_reset(self, stream: int) -> None:
        self._reset_by_us[stream] = None
        if len(self._reset_by_us) > REMEMBERED:
            self._reset_by_us.popitem(last=False)

    def _lose(self, stream: Stream) -> None:
        """The stream is reset, by whomever: nothing of it will be sent or received, only its unread bytes remain."""
        stream.reset = True
        stream.receiving = False
        self._queued -= stream.queue.discard()
        self._ring.pop(stream.id, None)
        self._settle(stream)

    def _settle(self, stream: Stream) -> None:
        """Counts a stream out when it is not open any more, and forgets it when it is read to the end."""
        if not stream.reset and (stream.receiving or not stream.finished):
            return
        if stream.counted:
            stream.counted = False
            self._open -= 1
        elif stream.lingering:
            stream.lingering = False
            self._lingering.pop(stream.id, None)
        if not stream.window.unread and self._streams.pop(stream.id, None) is not None:
            self._windows.forget(stream.window)

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
        self._error = error.again()
        self._splitter.clear()
        self._abandon()
        raise error.again()

    def _abandon(self) -> None:
        for stream in list(self._streams.values()):
            self._lose(stream)
