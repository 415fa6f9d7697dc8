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
"""What each stream may queue, whatever the other streams have queued."""
WORTHWHILE = 1024
"""A frame is not cut shorter than this to fill the end of a write."""


@cache
def _passing() -> type[PayloadPath] | None:
    """What passes plain frames by h2; None, and a warning, where the installed h2 has not the names that this takes."""
    try:
        from protocols.http2.payload import PayloadPath
    except ImportError as missing:
        costs = f"HTTP/2 goes through h2's own objects, which costs several times as much: {missing}"
        warnings.warn(costs, RuntimeWarning, stacklevel=3)
        return None
    return PayloadPath


_passing()  # whoever imports this is warned, not whoever makes the first connection


@final
class HTTP2Connection(FrameReader):
    """One HTTP/2 connection (RFC 9113), server or client, over the h2 library.

    The caller moves bytes: `receive_data` and `next_event` inwards, `data_to_send` and `data_sent` outwards. It is
    always pullable; only windows push back. h2 decides on everything that is not plain: DATA frames on open streams and
    requests in one HEADERS frame are handled here, against h2's own windows and states, and handed on without it. With
    `payload_path=False`, and where the installed h2 has not the names that this takes, of which a warning tells, everything
    goes through h2: the same events and bytes (but for how header blocks are compressed) at several times the cost.

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

    `scheme` is the `:scheme` of a client's requests; a server reports what the request says. `budget` bounds what all
    streams together hold unread, and their windows beyond the first. A stream for which it has not even room to begin is
    refused with REFUSED_STREAM. Where it has none for what comes on one, NoRoom says so: that stream is as after `drop`.
    `date` is what a server's final heads say, `now` the time from which on the peer owes its first SETTINGS.
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

    # What the connection is like.

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
        return alive and not leaving and allowed and self._windows.affordable

    @property
    def next_stream(self) -> int:
        """Client: the number for the next Request. Larger odd ones may be used too."""
        return self._h2.highest_outbound_stream_id + 2 if self._h2.highest_outbound_stream_id else 1

    @property
    def _refusing(self) -> bool:
        return self._last_sent is not None and self._last_sent < LARGEST_ID

    @property
    def waits_for(self) -> Unfinished | None:
        """What has begun and is not whole, once `next_event` has said NEED_DATA; None between two frames."""
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
        """Ends the connection for what its peer does, though it is not against the protocol: GOAWAY with the code, and the
        reason as its debug data, goes ahead of all that is queued, every stream is over, and nothing more is read. From then
        on all is as after a RemoteProtocolError."""
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

    def respond(
        self, stream: int, status: int, headers: Headers, buffers: Sequence[Buffer] = (), trailers: Headers = ()
    ) -> None:
        """A whole answer: what `send` does with a final Response, with Data if there are buffers, and with End, but that a
        LocalProtocolError has queued nothing of it."""
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
        queue, limits = found.queue, self.limits
        held = queue.nbytes + queue.leaving
        own, shared = limits.send_buffer - held, limits.connection_send_buffer - self._queued
        if own <= shared:  # as of nearly every stream
            return own if own > 0 else 0
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
        self._return_connection_credit()  # ahead of the head, which then may say that nothing follows
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
        """What a final head has behind these fields: the date where they have none (RFC 9110 section 6.6.1), and what else
        all of them have."""
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
        # Not through h2, which would end the connection. A later GOAWAY never names more than an earlier (section 6.8).
        named = max(event.last_stream, self._highest)
        self._last_sent = named if self._last_sent is None else min(self._last_sent, named)
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
        """Writes our end of a stream whose payload is all out of the queue: on its head, where that has not begun to leave.
        Trailers are encoded only here, because header blocks must reach the peer in the order of their encoding."""
        trailers = stream.trailers
        frames = self._h2.end(stream.library, trailers)
        if trailers or not self._control.end_head(stream.id):
            self._control.put(frames, stream.id)
        self._finished(stream)

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
        """Appends one DATA frame of the stream whose turn it is, or all full ones where it has every turn, and says how long
        they are; 0 if none can or should be written."""
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
