"""The streams of an HTTP/2 connection, from their first frame until they are forgotten: open, lingering, read to the end."""

from __future__ import annotations

from collections import OrderedDict, deque

from h2.stream import H2Stream

from protocols.buffers import Budget
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import End, Event, Headers, Reset
from protocols.floods import BYTES
from protocols.http2.floods import LATE, FloodCounters
from protocols.http2.frames import ACK, HEAD, Code, HTTP2Frame, Kind
from protocols.http2.library import REMEMBERED, LibraryPath
from protocols.http2.limits import HTTP2Limits
from protocols.http2.output import ControlQueue
from protocols.http2.stream import Stream
from protocols.http2.windows import FIRST_CONNECTION_WINDOW, FLOOR, Ledger, ReceiveWindows, Window
from protocols.roles import Role

LOOKS = 30
"""How many calls of `tick` a stream may outlast its answer at most."""


class StreamTable:
    """The streams that are not forgotten, and the credit, the order to write in and the end of each."""

    def __init__(self, role: Role, limits: HTTP2Limits, library: LibraryPath, budget: Budget | None, now: float) -> None:
        self.role = role
        self.limits = limits
        self.now = now
        """The time of what is received and done, in seconds on the driver's clock: he says it with what he receives, and
        about once a second. The machine has no clock, it compares what it was told."""
        self.counters = FloodCounters()
        self._client = role is Role.CLIENT
        self._h2 = library
        self._windows = ReceiveWindows(initial=limits.initial_window, maximum=limits.max_window, budget=budget)
        self._streams: dict[int, Stream] = {}
        self._open = 0
        self._reset_by_us: OrderedDict[int, float] = OrderedDict()
        self.pinged_at: float | None = None
        """When the last whole PING without ACK came; None before."""
        self._settings_due, self._pings_due = 1, 0  # acknowledgements that the peer owes
        self._block_at = now  # a header block that is open began
        self._granted_to_us = 0  # bytes of the connection's window, beside those that it began with
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

    def windows(self) -> dict[int, Ledger]:
        """The receive windows of all streams that are not forgotten, and the connection's under 0, each beside h2's own
        count: `ledger.available == ledger.library` always."""
        ledgers = {0: self._windows.ledger(None, self._h2.inbound_flow_control_window)}
        for stream in self._streams.values():
            ledgers[stream.id] = self._windows.ledger(stream.window, stream.library.inbound_flow_control_window)
        return ledgers

    # What is counted.

    def flood_counters(self, completed: int) -> FloodCounters:
        """What a `FloodPolicy` is asked about, with what need not be counted as it comes. `completed`: exchanges that ended
        complete so far, which the driver knows."""
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
                pass  # counted where it is known what it resets
            case Kind.PUSH_PROMISE:
                self._block_at = self.now
            case _:
                self._count_priority()

    def _count_meaningless(self, frame: HTTP2Frame, *, whole: bool) -> None:
        """Nothing has happened by the frame: one of a stream that is over, or of a header block that is not `whole`."""
        if frame.kind == Kind.RST_STREAM:
            if not self._under_way(frame.stream):
                self._count_priority()
            elif frame.stream in self._reset_by_us:
                self._reset_by_us[frame.stream] = -LATE  # they say it once
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
        """DATA without payload came on it, which does not end it."""
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
        """Whether a frame of a stream that is over may have been sent before our own reset of it came there."""
        return self.now - self._reset_by_us.get(stream, -LATE) < LATE

    # Credit.

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

    def land(self, stream: int, buffer: memoryview) -> bool:
        """The rest of the stream's payload is copied into `buffer`, which is writable and of bytes: its Data are views of
        that, each behind the one before, and several frames may be one. A frame that it has no room for, and
        what follows it, come as without it. The machine forgets the buffer when it is full, by `drop`, and with the
        stream. False, and nothing done, where nothing is to come."""
        found = self._streams.get(stream)
        if found is None or not found.receiving or found.dropped:
            return False
        found.place, found.window.lands = buffer or None, True
        self._landing = found
        return True

    @property
    def lands(self) -> bool:
        """Whether what comes next is, by what came last, payload that has a place: more of it may be received at once."""
        return self._landing is not None and self._landing.place is not None

    def drop(self, stream: int) -> int:
        """Nobody will read the stream any more: what is unread is credited (the answer says how many bytes), and what
        still comes is credited as it comes. Our own direction is not concerned. Any number of times, for any stream."""
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
        """Bytes of the budget that the stream has reserved."""
        found = self._streams.get(stream)
        return 0 if found is None else found.window.reserved

    def charge(self, stream: int, budget: Budget) -> int:
        """What the stream reserves from now on is that budget's. Says how much is reserved already, which the caller hands
        over from the one to the other."""
        found = self._streams.get(stream)
        return 0 if found is None else self._windows.charge(found.window, budget)

    def trim(self) -> None:
        """To be called about once a second: gives back what streams have reserved ahead of what may still come."""
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
        """The peer has acknowledged another initial window."""
        known = [found for stream, found in self._streams.items() if stream in self._h2.streams]
        for found in known:
            self._windows.adjust(found.window, delta)
        for found in known:
            if found.window.owed:  # a quarter of what it was may be all of what it is, and the peer waits for it
                self._return_credit(found, grow=False)
        if self._streams:
            self._return_connection_credit()

    # From the first frame to the last.

    def _adopt(self, stream: int, library: H2Stream, window: Window) -> Stream:
        found = self._streams[stream] = Stream(stream, library, window, self._h2.inbound(library))
        found.opened_at = self.now
        self._open += 1
        self.counters.opened += 1
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
        """The stream is reset, by whomever: nothing of it will be sent or received, only its unread bytes remain."""
        stream.reset = True
        stream.receiving, stream.place = False, None
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

    def _lose_above(self, last: int) -> None:
        """The peer never acted on our streams above this one (RFC 9113 section 6.8). It must not hear of them either: to it
        they are idle."""
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

    def _receive_end(self, stream: Stream, trailers: Headers) -> None:
        """The peer's END_STREAM has come."""
        stream.receiving = False
        if stream.window.base > FLOOR:
            self._windows.shrink(stream.window)
        if not stream.dropped:
            self._events.append(End(stream=stream.id, trailers=trailers))
        if stream.finished:
            self._settle(stream)

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

    # What h2 says, and whether anything still counts.

    @property
    def _over(self) -> bool:
        return self._error is not None or self._closed

    def _drain(self, ends: int = 0) -> None:
        """To be called after everything that h2 is told: a GOAWAY would clear what it holds."""
        frames = self._h2.data_to_send()
        if frames:
            self._control.put(frames, ends)
