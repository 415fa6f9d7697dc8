"""The HTTP/2 connection as a sans-IO machine, for both roles: bytes in, events out, and windows that follow the consumer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, final

from protocols.buffers import Budget
from protocols.date_field import DateField
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import (
    Buffer,
    Data,
    End,
    GoAway,
    Headers,
    Ping,
    Request,
    Reset,
    Response,
    Sent,
)
from protocols.http2.floods import CRAMPED, FloodCounters
from protocols.http2.frames import (
    GOODBYES,
    HEAD,
    LARGEST_DATA,
    LARGEST_ID,
    Code,
    Kind,
    goaway,
)
from protocols.http2.heads import request_fields
from protocols.http2.library import LibraryPath
from protocols.http2.limits import DEFAULT_LIMITS, HTTP2Limits
from protocols.http2.output import gathered
from protocols.http2.reader import FrameReader
from protocols.http2.stream import Stream
from protocols.http2.stream_table import LOOKS
from protocols.http2.unfinished import Part, Unfinished
from protocols.roles import Role

if TYPE_CHECKING:
    from protocols.http2.payload import PayloadPath

__all__ = ["LARGEST_DATA", "LOOKS", "SHARE", "FloodCounters", "HTTP2Connection", "HTTP2Limits"]

_NO_DATE = DateField()

SHARE = 16_384
"""Bytes that each stream may queue, even if the other streams use up the rest."""
WORTHWHILE = 1024
"""Bytes: a DATA frame is not cut shorter than this to fill the end of a write."""


@cache
def _passing() -> type[PayloadPath] | None:
    """The class that handles plain frames without h2. None, after a warning, if the installed h2 lacks names that it
    needs."""
    try:
        from protocols.http2.payload import PayloadPath
    except ImportError as missing:
        costs = f"HTTP/2 goes through h2's own objects, which costs several times as much: {missing}"
        warnings.warn(costs, RuntimeWarning, stacklevel=3)
        return None
    return PayloadPath


_passing()  # the warning comes at import, and not at the first connection


@final
class HTTP2Connection(FrameReader):
    """One HTTP/2 connection (RFC 9113), server or client, over the h2 library.

    The caller moves bytes: inwards with `receive_data` and `next_event`, outwards with `data_to_send` and `data_sent`.
    Events can always be taken; only windows push back. Plain frames, which are DATA frames on open streams and requests in
    one HEADERS frame, are handled here on h2's own windows and states. h2 decides on everything else. With
    `payload_path=False`, and if the installed h2 lacks names that the payload path needs (a warning tells), h2 handles
    everything. The events and bytes are the same then, except for the compression of header blocks, at several times the
    cost.

    **Receiving.** The bytes of Data events occupy the window until the consumer calls `credit`; nothing else gives window
    back. A consumer that reads no more calls `drop`. Both are needed also for a stream that was reset, because its bytes
    occupy the connection's window. Data and End of a stream no longer come after `drop`, after Refused, and after a server's
    own End; a Reset always comes. A Reset may name a stream that was never announced, because its head was malformed. One
    with code 0 may follow the End of a response: the server needs no more of the request.

    **Sending.** `send` never blocks and takes any size: to bound the queue, ask `room` first. A LocalProtocolError means
    that nothing was queued.

    **Lingering.** If a server has answered a request completely before the request is complete, its stream is half closed:
    it counts as not open, nothing more of it is reported, not even a Reset, and its input is dropped. It ends with the
    peer's END_STREAM or RST_STREAM, or with our RST_STREAM(NO_ERROR) (section 8.1), which asks the peer to stop. Ours waits
    until the peer had time to read the answer: some clients forget an answer if they read its reset together with it, and
    others read nothing before their request is sent. `tick` sends it. It goes out earlier if more than `limits.linger` bytes
    came, and if lingering streams take more than half of the places in `limits.streams` that the open streams leave.

    **Ending.** After a RemoteProtocolError, `data_to_send` still gives the GOAWAY. When the transport is gone, call `close`,
    then credit or drop all unread bytes, so that the byte budget gets everything back.

    `scheme` is the `:scheme` of a client's requests; a server reports that of the request. `budget` bounds the unread input
    of all streams together, and the growth of their windows. A stream that has not even room to begin is refused with
    REFUSED_STREAM. If there is no room for later input of a stream, NoRoom reports it, and the stream is as after `drop`.
    `date` has the Date of a server's final heads. `now` is the time from which on the peer owes its first SETTINGS.
    """

    def __init__(
        self,
        role: Role,
        limits: HTTP2Limits = DEFAULT_LIMITS,
        *,
        budget: Budget | None = None,
        scheme: bytes = b"https",
        payload_path: bool = True,
        date: DateField = _NO_DATE,
        now: float = 0.0,
    ) -> None:
        passing = _passing() if payload_path else None
        library = (LibraryPath if passing is None else passing)(
            client=role is Role.CLIENT,
            streams=limits.streams,
            initial_window=limits.initial_window,
            frame_size=limits.frame_size,
            head=limits.head,
        )
        beside = library if passing is not None and isinstance(library, passing) else None
        super().__init__(role, limits, library, beside, budget, now)
        self._date = date
        self.scheme = scheme
        self._leaves_with_error = False
        self._leaving: list[tuple[Stream, int]] = []
        self._ending: list[int] = []
        self._handed_out = False

    # The state of the connection.

    @property
    def has_output(self) -> bool:
        """True if `data_to_send` would give something. Payload that waits for a window does not count."""
        return bool(self._control.nbytes) or (bool(self._ring) and self._h2.outbound_flow_control_window > 0)

    @property
    def choked(self) -> bool:
        """True if more than `limits.output` bytes of control frames wait: the peer makes us answer and does not read. The
        driver must stop reading from the peer until this is False again."""
        return self._control.nbytes > self.limits.output

    @property
    def idle(self) -> bool:
        """True if no stream is open and no output waits to be written."""
        return not self._open and not self.has_output and not self._handed_out

    @property
    def must_close(self) -> bool:
        """True if the connection has no further use: close it once the output is written. This is so after a protocol error
        and after our own GOAWAY with an error code. Once no stream is open, it is also so after our last GOAWAY, any GOAWAY
        of the peer, and the peer's end of the connection."""
        if self._error is not None or self._closed or self._leaves_with_error:
            return True
        leaving = self._peer_leaves or self._eof or self._refusing
        return leaving and not self._open

    @property
    def can_open(self) -> bool:
        """Client: True if a Request may be sent now, by the peer's MAX_CONCURRENT_STREAMS, both sides' GOAWAY, the stream
        numbers and the byte budget."""
        alive = self._client and not self._over and not self._eof
        leaving = self._peer_leaves or self._last_sent is not None
        allowed = self._open < self._h2.remote_settings.max_concurrent_streams and self.next_stream <= LARGEST_ID
        return alive and not leaving and allowed and self._windows.affordable

    @property
    def next_stream(self) -> int:
        """Client: the number for the next Request. Larger odd numbers are valid too."""
        return self._h2.highest_outbound_stream_id + 2 if self._h2.highest_outbound_stream_id else 1

    @property
    def _refusing(self) -> bool:
        return self._last_sent is not None and self._last_sent < LARGEST_ID

    @property
    def waits_for(self) -> Unfinished | None:
        """The part that the peer has begun and not finished, once `next_event` has returned NEED_DATA. None between two
        frames."""
        splitter, at = self._splitter, self._begun_at
        if splitter.expects_settings:
            return Unfinished(Part.SETTINGS, self._made_at)
        if splitter.block_stream:
            return Unfinished(Part.HEAD, self._block_at)
        if not splitter.buffer:
            return None
        head = splitter.pending_head
        if len(head) < HEAD:
            return Unfinished(Part.FRAME, at)
        part = Part.HEAD if head[3] in (Kind.HEADERS, Kind.PUSH_PROMISE) else Part.PAYLOAD
        return Unfinished(part, at, len(splitter.buffer) - splitter.at - HEAD)

    def give_up(self, code: int, reason: str) -> None:
        """Ends the connection over behaviour that the protocol allows. GOAWAY with the code, and the reason as its debug
        data, goes ahead of all queued output; every stream is over; and nothing more is read. From then on the machine is as
        after a RemoteProtocolError."""
        if self._over:
            return
        self._control.drop_rest()
        self._control.put(goaway(code, self._highest, reason.encode()))
        self._error = RemoteProtocolError(reason, wire_code=code)
        self._splitter.clear()
        self._events.clear()
        self._abandon()

    # Sending.

    def send(self, event: Request | Response | Data | End | Reset | GoAway | Ping) -> None:
        """Queues the event. Response, Data and End need a stream that is open and that we have not ended. Data and End also
        need the final head before them; 1xx Responses may come before that head. Data is kept by reference until it is
        written. A Reset drops the stream's queue. A GoAway refuses streams above its number and lets the others finish. A
        Ping carries 8 bytes; its answer is not reported.
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

    def respond(
        self, stream: int, status: int, headers: Headers, buffers: Sequence[Buffer] = (), trailers: Headers = ()
    ) -> None:
        """Sends a whole answer: a final Response, Data if there are buffers, and End. Unlike three calls of `send`, a
        LocalProtocolError means that none of it is queued."""
        if self._over:
            raise LocalProtocolError("the connection is over")
        if status < 200:
            raise LocalProtocolError(f"status {status} is an interim one, which answers nothing")
        found = self._answerable(stream)
        if trailers:
            self._h2.check_trailers(trailers)
        n = found.queue.put(buffers)
        try:
            self._control.put(self._h2.response(found.library, status, headers, self._date_of(headers)))
        except LocalProtocolError:
            found.queue.discard()
            raise
        found.head_sent = True
        if n:
            self._queued += n
            if found.library.outbound_flow_control_window > 0:
                self._ring[stream] = found
        self._end(found, trailers)

    def send_data(self, stream: int, buffers: Sequence[Buffer]) -> None:
        """Sends a Data without an event object."""
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
        """The number of bytes that the stream may still queue. Its limit is `limits.send_buffer` while all streams together
        have less than `limits.connection_send_buffer` queued, and SHARE otherwise.

        With the share, a stream can go on frame by frame even if a stalled one fills the common queue. A stream with an
        empty queue always has room, so a caller that waits for room waits for its own stream alone. 0 if nothing more can be
        sent on the stream.
        """
        found = self._streams.get(stream)
        if found is None or found.reset or found.ended:
            return 0
        queue, limits = found.queue, self.limits
        held = queue.nbytes + queue.leaving
        own, shared = limits.send_buffer - held, limits.connection_send_buffer - self._queued
        if own <= shared:  # as of nearly every stream
            return own if own > 0 else 0
        return max(0, min(own, max(SHARE - held, shared)))

    def queued(self, stream: int) -> int:
        """The bytes of the stream's payload that are not written yet."""
        found = self._streams.get(stream)
        return 0 if found is None else found.queue.nbytes + found.queue.leaving

    def leaving(self, stream: int) -> int:
        """The bytes of the stream's payload that `data_to_send` has handed out and that are not written yet."""
        found = self._streams.get(stream)
        return 0 if found is None else found.queue.leaving

    def shutdown(self, last: bool) -> None:
        """Ends the connection gracefully, in two steps (RFC 9113 section 6.8). The first GOAWAY names the largest number:
        the peer should open no more streams, and those on their way are still accepted. With `last` it names the highest
        accepted stream; newer ones are ignored, as the peer knows from the number. Open streams finish either way. Repeating
        a step does nothing.

        A PING follows the first GOAWAY, and another its acknowledgement. The second one shows that all streams that the peer
        had begun are here, so the machine then takes the second step by itself. A caller takes it after a while for a peer
        that does not answer.
        """
        if self._over or self._refusing or (self._last_sent is not None and not last):
            return
        if last:
            self._send_goaway(GoAway(last_stream=self._highest))
        else:
            self._send_goaway(GoAway(last_stream=LARGEST_ID))
            self._goodbye = GOODBYES[0]
            self._send_ping(Ping(data=self._goodbye))

    def close(self) -> None:
        """Tells that the transport is gone: nothing more is written or received, and every stream is over. Bytes that were
        given out must still be credited or dropped. It may be called any number of times."""
        self._closed = True
        self._h2.close()
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
        if event.body is not None:
            raise LocalProtocolError("send: a body is sent as Data, behind its Request")
        fields = request_fields(event.head, self.scheme)
        window = self._windows.open(self._h2.local_settings.initial_window_size)
        assert window is not None, "can_open has asked the budget"
        self._return_connection_credit()  # ahead of the head, which may end the stream
        self._h2.send_headers(event.stream, fields)
        found = self._adopt(event.stream, self._h2.streams[event.stream], window)
        found.head_sent = True
        found.bodyless = event.head.method == b"HEAD"
        self._drain()

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
        date = self._date_of(headers) if status >= 200 else ()
        self._control.put(self._h2.response(found.library, status, headers, date))
        found.head_sent = status >= 200

    def _date_of(self, headers: Headers) -> Headers:
        """The fields that end a final head: a date if it has none (RFC 9110 section 6.6.1), and those of all heads."""
        for name, _ in headers:
            if name == b"date":
                return self._date.beside
        return self._date.fields

    def _send_end(self, stream: int, trailers: Headers) -> None:
        found = self._headed(stream)
        if trailers:
            self._h2.check_trailers(trailers)
        self._end(found, trailers)

    def _end(self, found: Stream, trailers: Headers) -> None:
        if trailers:
            found.trailers = tuple(trailers)
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
        # Not through h2, which would end the connection. A later GOAWAY never names a higher stream (section 6.8).
        named = max(event.last_stream, self._highest)
        self._last_sent = named if self._last_sent is None else min(self._last_sent, named)
        self._goodbye = b""
        self._leaves_with_error = self._leaves_with_error or event.code != Code.NO_ERROR
        self._control.put(goaway(event.code, self._last_sent, event.debug))

    def _send_ping(self, event: Ping) -> None:
        if len(event.data) != 8:
            raise LocalProtocolError(f"an HTTP/2 PING carries 8 bytes, not {len(event.data)}")
        self._h2.ping(event.data)
        self._pings_due += 1
        self._drain()

    def _headed(self, stream: int) -> Stream:
        found = self._sendable(stream)
        if not found.head_sent:
            raise LocalProtocolError(f"stream {stream} has no head yet")
        return found

    def _finish(self, stream: Stream) -> None:
        """Writes our end of a stream whose payload has left the queue: as a flag of its head, if that has not begun to
        leave. Trailers are encoded only here, because header blocks must reach the peer in the order of their encoding."""
        trailers = stream.trailers
        frames = self._h2.end(stream.library, trailers)
        if trailers or not self._control.end_head(stream.id):
            self._control.put(frames, stream.id)
        self._finished(stream)

    # Writing.

    def data_to_send(self, at_most: int) -> list[Buffer]:
        """The next buffers to write, at most `at_most` bytes: control frames first, then in turn a DATA frame of each stream
        whose window and the connection's allow it. Empty if there is nothing, or no space for a frame: that takes at least
        10 bytes.

        Payload of 4 KiB and more is handed out by reference. Nothing else may be written between these buffers. Their bytes
        count as queued until `data_sent`; a second call before that is a LocalProtocolError.
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
        """Confirms that the last `data_to_send` is written. Returns the streams that have more room or have ended."""
        if not self._handed_out:
            raise LocalProtocolError("data_sent without data_to_send")
        leaving, self._leaving = self._leaving, []
        ended, self._ending = self._ending, []
        self._handed_out = False
        self.counters.heads_sent += len(ended)
        for stream, n in leaving:
            self.counters.data_sent += -(-n // LARGEST_DATA)
            stream.queue.leaving -= n
            self._queued -= n
        if self._answered:
            self._linger(ended)
        if len(leaving) == 1:
            return Sent(room=[leaving[0][0].id], ended=ended)
        return Sent(room=list(dict.fromkeys([stream.id for stream, _ in leaving])), ended=ended)

    def _write_frame(self, out: list[bytes | memoryview], filled: int, space: int) -> int:
        """Appends one DATA frame of the next stream, or all full ones if no other waits. Returns their size, perhaps 0."""
        ring, h2 = self._ring, self._h2
        number, stream = ring.popitem(last=False)
        library, queue = stream.library, stream.queue
        allowed, head = queue.nbytes, HEAD
        if allowed > h2.outbound_flow_control_window:
            allowed = h2.outbound_flow_control_window
        if allowed > library.outbound_flow_control_window:
            allowed = library.outbound_flow_control_window
        if allowed > LARGEST_DATA:
            frames = 1 if ring else min(allowed, space) // (LARGEST_DATA + HEAD) or 1
            allowed, head = frames * LARGEST_DATA, frames * HEAD
        n = allowed if allowed <= space - head else space - HEAD
        if n <= 0 or (n < allowed and filled and n < WORTHWHILE):
            ring[number] = stream
            ring.move_to_end(number, last=False)
            return 0
        last = stream.ended and n == queue.nbytes
        h2.data(library, queue.take(n), n, last and not stream.trailers, out)
        self._leaving.append((stream, n))
        if queue.nbytes:
            if library.outbound_flow_control_window > 0:
                ring[number] = stream
            if n < CRAMPED and n == allowed:
                self.counters.cramped += 1
                self.counters.total += 1
        if last and stream.trailers:
            self._finish(stream)
        elif last:
            self._finished(stream)
            self._ending.append(number)
        return head + n
