"""The streams of an HTTP/2 connection, from their first frame until they are forgotten."""

from __future__ import annotations

from collections import OrderedDict, deque

from h2.stream import H2Stream

from protocols.buffers import Budget
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import End, Event, Headers, Reset
from protocols.floods import BYTES
from protocols.http2.floods import LATE, FloodCounters
from protocols.http2.frames import ACK, GOODBYES, HEAD, Code, HTTP2Frame, Kind, goaway
from protocols.http2.library import REMEMBERED, LibraryPath
from protocols.http2.limits import HTTP2Limits
from protocols.http2.output import ControlQueue
from protocols.http2.stream import Stream
from protocols.http2.windows import FIRST_CONNECTION_WINDOW, FLOOR, Ledger, ReceiveWindows, Window
from protocols.roles import Role

LOOKS = 30
"""The most calls of `tick` that a stream may linger after its answer."""


class StreamTable:
    """The streams that are not forgotten: their credit, the order in which they write, and how each ends."""

    def __init__(self, role: Role, limits: HTTP2Limits, library: LibraryPath, budget: Budget | None, now: float) -> None:
        self.role = role
        self.limits = limits
        self.now = now
        """The time in seconds on the driver's clock. The driver sets it with each input and about once a second. The machine
        has no clock and only compares these times."""
        self.counters = FloodCounters()
        self._client = role is Role.CLIENT
        self._h2 = library
        self._windows = ReceiveWindows(initial=limits.initial_window, maximum=limits.max_window, budget=budget)
        self._streams: dict[int, Stream] = {}
        self._open = 0
        self._highest = 0  # that the peer has opened
        self._last_sent: int | None = None  # the stream in our GOAWAY
        self._goodbye = b""  # the data of the PING that awaits its acknowledgement
        self._peer_leaves = False
        self._reset_by_us: OrderedDict[int, float] = OrderedDict()
        self.pinged_at: float | None = None
        """The time of the last complete PING without ACK; None before the first."""
        self._settings_due, self._pings_due = 1, 0  # acknowledgements that the peer owes
        self._block_at = now  # the time when the open header block began
        self._granted_to_us = 0  # bytes of the connection's send window beyond the initial ones
        self._events: deque[Event] = deque()
        self._error: RemoteProtocolError | None = None
        self._closed = False
        self._control = ControlQueue()
        self._control.put(library.opening)
        self._ring: OrderedDict[int, Stream] = OrderedDict()
        self._queued = 0
        self._answered: set[int] = set()
        self._lingering: OrderedDict[int, Stream] = OrderedDict()
        self._landing: Stream | None = None  # the last stream whose payload had a place

    def is_open(self, stream: int) -> bool:
        """True if the stream is not reset, not complete in both directions, and not lingering. It may be reset then and,
        until our own End, be written to."""
        found = self._streams.get(stream)
        return found is not None and found.open

    @property
    def open_streams(self) -> int:
        """The number of open streams."""
        return self._open

    @property
    def lingering(self) -> int:
        """The number of streams that have their whole answer but whose peer may still send: `tick` must be called."""
        return len(self._lingering)

    @property
    def unconsumed(self) -> int:
        """The bytes in Data events, given out or pending, that have not been credited."""
        return self._windows.unread

    def received(self, stream: int) -> tuple[int, int]:
        """Bytes of the stream that its consumer has not taken, and those that its window lets the peer send in all."""
        found = self._streams.get(stream)
        return (0, 0) if found is None else (found.window.unread, found.window.granted)

    def window(self, stream: int) -> tuple[int, int]:
        """How many bytes the peer lets us send on the stream now, by its window and the connection's, and with how many its
        SETTINGS let a stream begin."""
        found = self._streams.get(stream)
        if found is None:
            return 0, 0
        own, shared = found.library.outbound_flow_control_window, self._h2.outbound_flow_control_window
        return max(0, min(own, shared)), self._h2.remote_settings.initial_window_size

    def windows(self) -> dict[int, Ledger]:
        """The receive windows of all streams that are not forgotten, and the connection's as number 0. For each,
        `ledger.available == ledger.library` must hold."""
        ledgers = {0: self._windows.ledger(None, self._h2.inbound_flow_control_window)}
        for stream in self._streams.values():
            ledgers[stream.id] = self._windows.ledger(stream.window, stream.library.inbound_flow_control_window)
        return ledgers

    # Flood counts.

    def flood_counters(self, completed: int) -> FloodCounters:
        """The counters for a `FloodPolicy`, with the derived ones filled in. `completed` is the number of exchanges that
        ended complete, which the driver knows."""
        counters, windows = self.counters, self._windows
        counters.completed = completed
        counters.payload_in = FIRST_CONNECTION_WINDOW + windows.returned - self._h2.inbound_flow_control_window
        counters.payload_out = FIRST_CONNECTION_WINDOW + self._granted_to_us - self._h2.outbound_flow_control_window
        return counters

    def _count(self, frame: HTTP2Frame) -> None:
        counters, ack = self.counters, frame.flags & ACK
        self._count_waste(HEAD + len(frame.payload))
        match frame.kind:
            case Kind.PING if not ack:
                counters.pings += 1
                self.pinged_at = self.now
            case Kind.PING if self._pings_due:
                self._pings_due -= 1
            case Kind.SETTINGS if not ack:
                counters.settings += 1
            case Kind.SETTINGS if self._settings_due:
                self._settings_due = 0
            case Kind.WINDOW_UPDATE:
                counters.window_updates += 1
            case Kind.RST_STREAM:
                pass  # counted later, once its target is known
            case Kind.PUSH_PROMISE:
                self._block_at = self.now
            case _:
                self._count_priority()

    def _count_meaningless(self, frame: HTTP2Frame, *, whole: bool) -> None:
        """Counts a frame that had no effect: it was for a stream that is over, or for a header block that is not `whole`."""
        if frame.kind == Kind.RST_STREAM:
            if not self._under_way(frame.stream):
                self._count_priority()
            elif frame.stream in self._reset_by_us:
                self._reset_by_us[frame.stream] = -LATE  # the peer sends it only once
        elif frame.kind in (Kind.HEADERS, Kind.CONTINUATION) and whole:
            self._count_reset()  # h2 answers it with RST_STREAM

    def _count_reset(self) -> None:
        self.counters.resets += 1
        self.counters.total += 1

    def _count_priority(self) -> None:
        self.counters.priority += 1
        self.counters.total += 1

    def _count_waste(self, nbytes: int) -> None:
        self.counters.waste += nbytes
        self.counters.total += 1 + nbytes // BYTES

    def _count_empty(self, stream: Stream) -> None:
        """Counts a DATA frame without payload that does not end its stream."""
        counters = self.counters
        counters.empty_data += 1
        counters.total += 1
        if stream.received != stream.fed:
            stream.fed, stream.empty_row = stream.received, 0
            counters.fed += 1
        stream.empty_row += 1
        if stream.empty_row > counters.empty_row:
            counters.empty_row = stream.empty_row

    def _under_way(self, stream: int) -> bool:
        """True if the peer may have sent a frame of a stream that is over before it got our reset."""
        return self.now - self._reset_by_us.get(stream, -LATE) < LATE

    # Credit.

    def credit(self, stream: int, n: int) -> None:
        """Counts n bytes as taken by the consumer; the stream may be long over. LocalProtocolError for more than it was
        given, and after `drop`."""
        found = self._streams.get(stream)
        if found is None or not 0 < n <= found.window.unread:
            unread = 0 if found is None else found.window.unread
            if n:
                raise LocalProtocolError(f"credit of {n} bytes on stream {stream}, which has {unread} unread")
        elif self._windows.consumed(found.window, n):
            self._return_credit(found, grow=not found.dropped)
        elif not found.receiving:
            self._settle(found)

    def land(self, stream: int, buffer: memoryview) -> bool:
        """Makes the rest of the stream's payload land in `buffer`, which must be writable bytes. Its Data events are then
        views of the buffer, each behind the one before, and one may cover several frames. A frame that does not fit, and all
        that follow it, come as usual. The machine releases the buffer when it is full, at `drop`, and with the stream.
        False, and nothing done, if no more payload can come."""
        found = self._streams.get(stream)
        if found is None or not found.receiving or found.dropped:
            return False
        found.place, found.window.lands = buffer or None, True
        self._landing = found
        return True

    @property
    def lands(self) -> bool:
        """True if the next input is probably payload with a place, judging by the last: more may be received at once."""
        return self._landing is not None and self._landing.place is not None

    def drop(self, stream: int) -> int:
        """Discards the stream's input from now on. Unread bytes are credited, and their number returned; later bytes are
        credited as they come. The sending direction is not affected. It may be called any number of times, for any
        stream."""
        found = self._streams.get(stream)
        if found is None:
            return 0
        found.dropped, found.place = True, None
        unread = found.window.unread
        if unread:
            self._windows.consumed(found.window, unread)
        self._return_credit(found, grow=False)
        if found.lingering:
            self._windows.unreserve(found.window)
        return unread

    def reserved(self, stream: int) -> int:
        """The bytes of the budget that the stream has reserved."""
        found = self._streams.get(stream)
        return 0 if found is None else found.window.reserved

    def charge(self, stream: int, budget: Budget) -> int:
        """Makes the stream reserve from another budget from now on. Returns the bytes that are already reserved; the caller
        must transfer those itself."""
        found = self._streams.get(stream)
        return 0 if found is None else self._windows.charge(found.window, budget)

    def trim(self) -> None:
        """Gives back memory that streams have reserved ahead of their input. Call it about once a second."""
        for stream in self._streams.values():
            self._windows.trim(stream.window)

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

    def _adjust_windows(self, delta: int) -> None:
        """Changes all windows, because the peer has acknowledged another initial window."""
        known = [found for stream, found in self._streams.items() if stream in self._h2.streams]
        for found in known:
            self._windows.adjust(found.window, delta)
        for found in known:
            # the owed quarter of the old window may be all of the new one, and the peer would wait for it
            if found.window.owed:
                self._return_credit(found, grow=False)
        if self._streams:
            self._return_connection_credit()

    # Which streams the peer may open.

    def _welcome(self, stream: int) -> bool:
        """True if the peer may open this stream, by both sides' GOAWAY and the limit of open streams."""
        return not self._peer_leaves and not self._too_late(stream) and self._open < self.limits.streams

    def _too_late(self, stream: int) -> bool:
        """True if our GOAWAY has told the peer that we ignore this stream."""
        return self._last_sent is not None and stream > self._last_sent

    def _say_goodbye(self) -> None:
        """Takes the next step after a first GOAWAY, when the peer has acknowledged a PING behind it. The first
        acknowledgement shows that the peer has read the GOAWAY, and opens no more. Yet it may overtake the heads that
        waited to be written (RFC 9113 section 6.7 asks for its priority), so a second PING fetches those."""
        if self._goodbye == GOODBYES[0]:
            self._goodbye = GOODBYES[1]
            self._h2.ping(self._goodbye)
            self._pings_due += 1
        else:
            self._goodbye = b""
            self._last_sent = self._highest
            self._control.put(goaway(Code.NO_ERROR, self._last_sent, b""))

    # The life of a stream.

    def _adopt(self, stream: int, library: H2Stream, window: Window) -> Stream:
        found = self._streams[stream] = Stream(stream, library, window, self._h2.inbound(library))
        found.opened_at = self.now
        self._open += 1
        self.counters.opened += 1
        if self._lingering:
            self._make_place(0)
        return found

    def _arm(self, stream: Stream) -> None:
        """Puts the stream at the end of the ring if it may write, else takes it out."""
        if not stream.queue.nbytes or stream.library.outbound_flow_control_window <= 0:
            self._ring.pop(stream.id, None)
        elif stream.id not in self._ring:
            self._ring[stream.id] = stream

    def _stream_error(self, stream: int, code: int) -> None:
        """Ends a stream that the peer broke. If that was with its END_STREAM after ours, nothing is left to reset."""
        self._count_reset()
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
        self._reset_by_us[stream] = self.now
        if len(self._reset_by_us) > REMEMBERED:
            self._reset_by_us.popitem(last=False)

    def _lose(self, stream: Stream) -> None:
        """Marks the stream as reset, by either side: nothing of it is sent or received, only its unread bytes remain."""
        stream.reset = True
        stream.receiving, stream.place = False, None
        self._queued -= stream.queue.discard()
        self._ring.pop(stream.id, None)
        self._settle(stream)

    def _settle(self, stream: Stream) -> None:
        """Stops counting a stream that is not open any more, and forgets it once it is read to its end."""
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

    def _lose_above(self, last: int) -> None:
        """Ends our streams above `last`, which the peer never handled (RFC 9113 section 6.8). No frame is sent for them: to
        the peer they are idle."""
        for found in [found for found in self._streams.values() if found.open and found.id > last]:
            self._h2.reset(found.id, Code.REFUSED_STREAM)
            self._remember_reset(found.id)
            self._lose(found)
            self._events.append(Reset(stream=found.id, code=int(Code.REFUSED_STREAM)))

    def _abandon(self) -> None:
        for stream in list(self._streams.values()):
            self._lose(stream)

    # Lingering.

    def tick(self) -> bool:
        """Resets lingering streams on which nothing has come since the last call, and those that have outlasted LOOKS calls.
        Call it about once a second while `lingering` is not 0. True if it reset any."""
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

    def _receive_end(self, stream: Stream, trailers: Headers) -> None:
        """Handles the peer's END_STREAM."""
        stream.receiving = False
        if stream.window.base > FLOOR:
            self._windows.shrink(stream.window)
        if not stream.dropped:
            self._events.append(End(stream=stream.id, trailers=trailers))
        if stream.finished:
            self._settle(stream)

    def _finished(self, stream: Stream) -> None:
        """Handles our END_STREAM having left the queue."""
        stream.finished = True
        if not stream.receiving:
            self._settle(stream)
        elif not self._client:
            stream.lingering, stream.counted = True, False
            self._open -= 1
            self._answered.add(stream.id)

    def _linger(self, written: list[int]) -> None:
        """Makes the lingering streams among these resettable, because the last byte of their answers is written."""
        for number in self._answered.intersection(written):
            self._answered.discard(number)
            stream = self._streams.get(number)
            if stream is not None and stream.lingering:
                self._lingering[number] = stream
                if not stream.window.unread:
                    self._windows.unreserve(stream.window)
        self._make_place(1)

    def _make_place(self, keep: int) -> None:
        """Resets the streams that have lingered longest. They count against MAX_CONCURRENT_STREAMS (section 5.1.2), so they
        may have at most half of what the open streams leave, and no new stream is kept out."""
        while len(self._lingering) > max(keep, (self.limits.streams - self._open) // 2):
            self._reset_lingering(next(iter(self._lingering.values())))

    def _reset_lingering(self, stream: Stream) -> None:
        self._control.put(self._h2.reset(stream.id, Code.NO_ERROR))
        self._remember_reset(stream.id)
        self._lose(stream)

    # The output of h2, and the end.

    @property
    def _over(self) -> bool:
        return self._error is not None or self._closed

    def _drain(self, ends: int = 0) -> None:
        """Queues the output of h2. Call it after everything that h2 is told: a GOAWAY would clear what h2 holds."""
        frames = self._h2.data_to_send()
        if frames:
            self._control.put(frames, ends)
