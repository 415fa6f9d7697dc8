"""The receiving side of an HTTP/2 connection: makes events from frames, plain ones itself and the others through h2.

`next_event` has a quick way. It turns a plain DATA frame at the front of the input, or a request in one HEADERS frame, into
an event in one step (2.2 and 9.6 us). The general way takes 3.5 and 55 us for them. For a landing stream, up to RUN DATA
frames are one event.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

from h2.events import (
    DataReceived,
    InformationalResponseReceived,
    PingAckReceived,
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

from protocols.buffers import Budget
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import (
    NEED_DATA,
    TURN,
    Buffer,
    ConnectionEnd,
    Data,
    End,
    Event,
    GoAway,
    NoRoom,
    Refused,
    Request,
    Reset,
    Signal,
)
from protocols.http2.floods import YOUNG
from protocols.http2.frames import (
    END_HEADERS,
    END_STREAM,
    FRAME_HEAD,
    HEAD,
    LARGEST_ID,
    Code,
    FrameSplitter,
    HTTP2Frame,
    Kind,
    copy_payloads,
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
)
from protocols.http2.library import LibraryPath
from protocols.http2.limits import HTTP2Limits
from protocols.http2.stream import Stream
from protocols.http2.stream_table import StreamTable
from protocols.roles import Role

if TYPE_CHECKING:
    from protocols.http2.payload import PayloadPath

_head_at = FRAME_HEAD.unpack_from

_BARE_GOAWAY = HEAD + 8  # bytes of one without debug data
_OBJECT = re.compile(r"( from)? <[^<>]* at 0x[0-9a-f]+>")  # hpack's errors show one, whose address is not for a peer

QUIET_FRAMES = 16
"""The most frames without an event that one call reads: at most a millisecond or two, even for the most expensive ones."""


class FrameReader(StreamTable):
    """The input of a connection. `beside` is the library if plain frames may be handled without it, else None."""

    def __init__(
        self,
        role: Role,
        limits: HTTP2Limits,
        library: LibraryPath,
        beside: PayloadPath | None,
        budget: Budget | None,
        now: float,
    ) -> None:
        super().__init__(role, limits, library, budget, now)
        self._beside = beside
        self._inbound = library.inbound(None)
        self._splitter = FrameSplitter(
            preface=not self._client,
            frame_size=library.max_inbound_frame_size,
            continuations=limits.continuations,
            block=2 * limits.head,
            settings_entries=limits.settings_entries,
        )
        self._eof = False
        self._made_at = self._begun_at = now  # the time of the last frame
        self._fresh = False  # input came since `_begun_at` was set, so the last frame may have begun later

    def receive_data(self, data: Buffer) -> None:
        """Stores a copy of `data` for `next_event`. After a protocol error or `close` it is ignored."""
        if self._eof:
            raise LocalProtocolError("data after receive_eof")
        if not self._over:
            if not self._splitter.buffer:
                self._begun_at = self.now
            self._fresh = True
            self._splitter.receive(data)

    def receive_eof(self) -> None:
        """Tells that the peer sends no more bytes. Output can still be written to it."""
        self._eof = True

    def next_event(self) -> Event | Signal:
        """The next event; ConnectionEnd after the end of input, at each call; NEED_DATA; or TURN after `QUIET_FRAMES` frames
        without an event.

        RemoteProtocolError, with the HTTP/2 error code as `wire_code`, if the peer broke the connection and not just a
        stream, and an equal one at each later call. All events before the error have been returned by then.
        """
        events = self._events
        if events:
            return events.popleft()
        quiet = 0
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
                if self._fresh and self._splitter.at:
                    self._begun_at, self._fresh = self.now, False
                return self._at_end() if self._eof else NEED_DATA
            self._receive_frame(frame)
            if events:
                return events.popleft()
            quiet += 1
            if quiet == QUIET_FRAMES:
                return TURN

    # Plain frames.

    def _next_plain(self) -> Event | None:
        """The event of a plain DATA or HEADERS frame at the front of the input, with the same effects as the general way.
        None, and nothing done, if the front is anything else."""
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
        if found.place is not None:
            return self._land(found, found.place, buffer)
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
        ledger = found.window
        unread = ledger.unread + n
        if unread > ledger.reserved and not self._windows.pay(ledger, unread):
            return None
        window.current_window_size, whole.current_window_size = left, left_of_all
        found.received = received
        self._windows.connection.unread += n
        ledger.unread = unread
        if left < ledger.low:
            ledger.low = left
        if end == size:
            splitter.clear()
        else:
            splitter.at = end
        if flags:
            assert self._beside is not None, "without a payload path nothing is counted here"
            self._beside.end_received(found.library)
            self._receive_end(found, ())
        return Data(stream=stream, buffers=(buffer[start:end],))

    def _land(self, found: Stream, place: memoryview, buffer: bytes) -> Event | None:
        """Reads the stream's plain DATA frames at the front of the input into its place. None, and nothing done, if there
        are none."""
        if not found.receiving or found.dropped:
            return None
        splitter, window, whole, received = self._splitter, found.inbound, self._inbound, found.received
        missing = None if found.expected is None else found.expected - received
        room = min(len(place), window.current_window_size, whole.current_window_size)
        n, pieces, end, ended = splitter.payloads(buffer, found.id, room if missing is None else min(room, missing), missing)
        if not n or not self._windows.pay(found.window, found.window.unread + n):
            return None
        copy_payloads(buffer, pieces, place)
        window.current_window_size -= n
        whole.current_window_size -= n
        self._windows.received(found.window, n)
        found.received, self._landing = received + n, found
        splitter.skip(end)
        if ended:
            assert self._beside is not None, "without a payload path nothing is counted here"
            self._beside.end_received(found.library)
            self._receive_end(found, ())
        return Data(stream=found.id, buffers=(found.fill(place, n),))

    def _next_request(self, stream: int, block: bytes, *, ended: bool) -> Event | None:
        """Reads a request in one HEADERS frame. A valid one opens its stream here; h2 gets everything else as a whole."""
        beside, splitter = self._beside, self._splitter
        if beside is None or len(block) > splitter.block or not beside.opens(stream):
            return None
        known = beside.decoder.look(block)
        if known is None:
            return None
        head = known.head
        if head is None:
            head = known.head = plain_request(known.headers, fields=self.limits.fields, size=self.limits.head)
        if head is None or (ended and head.content_length) or not self._welcome(stream):
            beside.decoder.put_back(known)
            return None
        splitter.skip_block(len(block))
        self._open_request(Request(stream=stream, head=head), beside.open_inbound(stream, ended=ended), ended=ended)
        return self._events.popleft() if self._events else None

    # All frames.

    def _refuse_frame(self, error: RemoteProtocolError) -> NoReturn:
        # h2 sees the head of the refused frame and judges errors in the head itself.
        if error.wire_code == Code.FRAME_SIZE_ERROR:
            self._ask_library(self._splitter.pending_head)
        self._fail(error)

    def _at_end(self) -> Event:
        if not self._splitter.at_boundary:
            self._fail(RemoteProtocolError("the connection ended inside a frame", wire_code=Code.PROTOCOL_ERROR))
        return ConnectionEnd()

    def _receive_frame(self, frame: HTTP2Frame) -> None:
        if self._splitter.block_stream and frame.kind not in (Kind.HEADERS, Kind.PUSH_PROMISE, Kind.CONTINUATION):
            self._give_library(frame)
        elif frame.kind == Kind.DATA:
            self._receive_payload(frame)
        elif frame.kind == Kind.HEADERS:
            if not frame.flags & END_HEADERS:
                self._block_at = self.now
            self._give_library(frame)
        elif frame.kind == Kind.CONTINUATION:
            self._give_library(frame)
        else:
            self._receive_control(frame)

    def _receive_control(self, frame: HTTP2Frame) -> None:
        self._count(frame)
        if frame.kind == Kind.GOAWAY and not frame.stream and len(frame.payload) >= 8:
            # h2 would end the connection at any GOAWAY, so it gets only one that cannot be parsed.
            self._receive_goaway(frame)
        elif frame.kind == Kind.PRIORITY and frame.stream and len(frame.payload) == 5:
            return  # RFC 9113 section 5.3.2: deprecated, and ignored
        elif frame.kind <= Kind.CONTINUATION:
            self._give_library(frame)

    def _ask_library(self, data: bytes) -> list[LibraryEvent]:
        try:
            return self._h2.receive_data(data)
        except LibraryError as error:
            self._obey(error)

    def _obey(self, error: LibraryError) -> NoReturn:
        """Ends the machine, because h2 has ended the connection. Its GOAWAY, which comes last and gives no reason, goes out
        with one."""
        said, code = _OBJECT.sub("", str(error))[:200] or "protocol error", int(error.error_code)
        frames = self._h2.data_to_send()
        self._control.put(frames[:-_BARE_GOAWAY] + goaway(code, int.from_bytes(frames[-8:-4]), said.encode()))
        self._die(RemoteProtocolError(said, wire_code=code))

    def _give_library(self, frame: HTTP2Frame) -> None:
        events = self._ask_library(frame.head + frame.payload)
        if frame.kind in (Kind.HEADERS, Kind.CONTINUATION) and frame.stream in self._reset_by_us:
            # Trailers sent before our reset arrived are legal (RFC 9113 section 5.4.2): no answer.
            self._h2.data_to_send()
            if not self._under_way(frame.stream):
                self._count_reset()
        elif not events:
            self._count_meaningless(frame, whole=not self._splitter.block_stream)
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
            case WindowUpdated(stream_id=0):
                self._granted_to_us += event.delta
            case RemoteSettingsChanged():
                change = event.changed_settings.get(SettingCodes.INITIAL_WINDOW_SIZE)
                if change is not None and change.new_value != change.original_value:
                    self.counters.settings += self._open // 100
                    self.counters.total += self._open // 100
                    for found in self._streams.values():
                        self._arm(found)
            case SettingsAcknowledged():
                self._receive_acknowledgement(event)
            case PingAckReceived(ping_data=data) if data == self._goodbye:
                self._say_goodbye()

    # Heads.

    def _receive_request(self, event: RequestReceived) -> None:
        stream = event.stream_id
        ended = event.stream_ended is not None
        if self._too_late(stream):
            # Ignored (RFC 9113 section 6.8). The AWS SDK has forgotten the stream: an RST_STREAM on it would make the SDK
            # end the connection, with all other streams.
            self._h2.reset(stream, Code.REFUSED_STREAM)
            self._remember_reset(stream)
            return
        if not self._welcome(stream):
            if self._open >= self.limits.streams and not self._settings_due:
                self.counters.refused += 1
                self.counters.total += 1
            self._reset_in_library(stream, Code.REFUSED_STREAM)
            return
        headers = joined_cookies(self._h2.decoder.fields)
        try:
            request = read_request(stream, headers, ended=ended, fields=self.limits.fields, size=self.limits.head)
        except MalformedHeadError:
            self._stream_error(stream, Code.PROTOCOL_ERROR)
            return
        self._open_request(request, self._h2.streams[stream], ended=ended)

    def _open_request(self, request: Request | Refused, library: H2Stream, *, ended: bool) -> None:
        stream = request.stream
        window = self._windows.open(library.inbound_flow_control_window)
        if window is None:
            self._reset_in_library(stream, Code.REFUSED_STREAM)
            return
        found = self._adopt(stream, library, window)
        found.receiving = not ended
        self._highest = stream
        self._events.append(request)
        if isinstance(request, Refused):
            found.dropped = True
            self._count_reset()
        else:
            found.expected = request.head.content_length
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
        if found.has_wrong_length(ended=True):
            self._stream_error(found.id, Code.PROTOCOL_ERROR)
            return
        self._receive_end(found, trailers)

    # Payload.

    def _receive_payload(self, frame: HTTP2Frame) -> None:
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
        """Takes `data` from a frame of n flow-controlled bytes that h2 has counted."""
        self._windows.received(found.window, n)
        found.received += len(data)
        if not data and not ended:
            self._count_empty(found)
        if found.has_wrong_length(ended=ended):
            self._windows.consumed(found.window, n)
            self._stream_error(found.id, Code.PROTOCOL_ERROR)
            self._return_connection_credit()
            return
        if data and not found.dropped:
            if self._windows.pay(found.window, found.window.unread):
                self._events.append(Data(stream=found.id, buffers=(found.landed(data),)))
            else:
                found.dropped = True
                self._events.append(NoRoom(stream=found.id, n=n))
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

    def _receive_late_payload(self, frame: HTTP2Frame) -> None:
        """Counts DATA on a stream whose peer may not send. It is legal until our RST_STREAM has arrived, and an error
        after."""
        stream, n = frame.stream, len(frame.payload)
        try:
            given = self._h2.discard(frame)
            self._windows.granted(given)
            if given:
                self._control.put(window_update(0, given))
        except LibraryError as error:
            self._obey(error)
        self._windows.discarded(n)
        self.counters.late += n
        if not self._under_way(stream):
            self._count_waste(HEAD + n)
            if not n:
                self.counters.empty_data += 1
        if stream not in self._reset_by_us:
            self._count_reset()
            self._control.put(rst_stream(stream, Code.STREAM_CLOSED), stream if self.is_open(stream) else 0)
        if self.is_open(stream):
            self._remember_reset(stream)
            self._lose(self._streams[stream])
            self._events.append(Reset(stream=stream, code=int(Code.STREAM_CLOSED)))
        self._return_connection_credit()

    # Resets, settings and ends.

    def _receive_reset(self, event: StreamReset) -> None:
        code = int(event.error_code)
        found = self._streams[event.stream_id]
        if not event.remote_reset:
            self._count_reset()
            self._remember_reset(found.id)
            self._drain(found.id)
        elif not found.finished and self.now - found.opened_at < YOUNG:
            self._count_reset()
        lingered = found.lingering
        self._lose(found)
        if not lingered:
            self._events.append(Reset(stream=found.id, code=code))

    def _receive_acknowledgement(self, event: SettingsAcknowledged) -> None:
        self._splitter.frame_size = self._h2.max_inbound_frame_size
        change = event.changed_settings.get(SettingCodes.INITIAL_WINDOW_SIZE)
        if change is not None:
            self._adjust_windows(change.new_value - (change.original_value or 0))

    def _receive_goaway(self, frame: HTTP2Frame) -> None:
        last = int.from_bytes(frame.payload[:4]) & LARGEST_ID
        self._peer_leaves = True
        self._events.append(GoAway(code=int.from_bytes(frame.payload[4:8]), last_stream=last, debug=frame.payload[8:]))
        if self._client:
            self._lose_above(last)

    def _fail(self, error: RemoteProtocolError) -> NoReturn:
        self._h2.close_connection(error.wire_code or Code.PROTOCOL_ERROR, str(error).encode())
        self._drain()
        self._die(error)

    def _die(self, error: RemoteProtocolError) -> NoReturn:
        self._error = error.again()
        self._splitter.clear()
        self._abandon()
        raise error.again()
