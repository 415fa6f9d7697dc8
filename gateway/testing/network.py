"""A network between a client and a gateway in memory. Its faults are declared, and happen at exact bytes."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import final

import trio

from gateway.doorbell import Doorbell
from gateway.errors import TransportLost
from gateway.net.transport import MemoryTransport, memory_pair

_ORPHAN = 10.0
"""Seconds that the bytes of a closed end may wait for the other end to take them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One direction of a connection. The `_at` values count carried bytes; default None: the fault does not happen."""

    piece: int = 65536
    """The most bytes that arrive at once; 1: a byte at a time."""
    delay: float = 0.0
    """Seconds that each byte travels."""
    rate: float = math.inf
    """Bytes per second."""
    stall_at: int | None = None
    """After so many bytes, nothing is carried for `stall` seconds."""
    stall: float = math.inf
    cut_at: int | None = None
    """After so many bytes, both ends see an orderly end of the connection. Bytes on their way are lost."""
    reset_at: int | None = None
    """After so many bytes, both ends see a reset."""

    def __post_init__(self) -> None:
        if self.piece < 1 or not self.rate > 0 or self.delay < 0 or self.stall < 0:
            raise ValueError(f"a piece has a byte, a rate is above 0, and no time is below it: {self}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProfile:
    """The behaviour of a network: `up` is the direction from the client, `down` that to the client."""

    up: Way = field(default_factory=Way)
    down: Way = field(default_factory=Way)


@final
class Link:
    """A connection through a network: `client` and `server` are its two ends, and `run` carries bytes between them.

    It behaves as TCP does. When an end closes, the other sees the end of that direction. Bytes sent to a closed end are
    answered with a reset. If an end does not take bytes of an end that has closed, the connection is reset after 10 to 20 s,
    as a system gives up and keepalive notices. `capacity` is the bytes that each direction of each end holds, and those on
    their way.
    """

    def __init__(self, profile: NetworkProfile | None = None, capacity: int = 65536) -> None:
        profile = profile or NetworkProfile()
        self.client, near = memory_pair(capacity)
        far, self.server = memory_pair(capacity)
        self._ends = near, far
        self._ways = _Carrier(self, near, far, profile.up, capacity), _Carrier(self, far, near, profile.down, capacity)
        self.clogged = False
        self.disturbed = False
        """True if the network has cut or reset the connection."""

    @property
    def carried(self) -> tuple[int, int]:
        """The bytes that have arrived, up and down."""
        return self._ways[0].carried, self._ways[1].carried

    @property
    def idle(self) -> bool:
        """True if no bytes are on their way."""
        return not any(way.busy for way in self._ways)

    async def run(self) -> None:
        """Carries bytes until the connection is over in both directions."""
        try:
            async with trio.open_nursery() as nursery:
                for way in self._ways:
                    nursery.start_soon(way.run)
        finally:
            self._over()

    def _over(self) -> None:
        for end in self._ends:
            end.close()
        self.unclog()

    def clog(self) -> None:
        """Stops carrying bytes in both directions, until `unclog`."""
        self.clogged = True

    def unclog(self) -> None:
        """Carries bytes again; those that have waited arrive."""
        self.clogged = False
        for way in self._ways:
            way.bell.ring()

    def cut(self) -> None:
        """Ends the connection for both ends; bytes on their way are lost."""
        self.disturbed = True
        self._over()

    def reset(self) -> None:
        """Resets the connection for both ends; bytes on their way are lost."""
        self.disturbed = True
        for end in self._ends:
            end.reset()
        self._over()


@final
class _Carrier:
    """One direction: bytes from `source` to `sink`, in order, each when its time has come."""

    def __init__(self, link: Link, source: MemoryTransport, sink: MemoryTransport, way: Way, capacity: int) -> None:
        self._link, self._source, self._sink, self._way, self._capacity = link, source, sink, way, capacity
        self.carried = 0
        self.bell = Doorbell()
        """Rings when the link is no longer clogged, or over."""
        self._flying: deque[tuple[float, bytes]] = deque()  # pieces by time of arrival; an empty one ends the direction
        self._aloft = 0
        self._last = 0.0  # the time at which the last byte left
        self._ended = False
        self._buffer = memoryview(bytearray(min(way.piece, capacity)))

    @property
    def busy(self) -> bool:
        return bool(self._flying or self._source._inbox or self._sink._other._inbox)

    async def run(self) -> None:
        try:
            while not (self._ended and not self._flying):
                self._take()
                await self._carry()
                if self._ended:
                    if self._flying:
                        await trio.sleep_until(self._flying[0][0])
                elif self._flying:
                    with trio.move_on_at(self._flying[0][0]):
                        if self._aloft < self._capacity:
                            await self._source.wait_readable()
                        else:
                            await trio.sleep_forever()
                else:
                    await self._source.wait_readable()
        except TransportLost as e:
            if e.left:  # one end is gone: the other sees a reset, as with TCP
                for end in (self._source, self._sink):
                    end.reset()

    def _take(self) -> None:
        way, now = self._way, trio.current_time()
        while not self._ended and self._aloft < self._capacity:
            n = self._source.try_receive_into(self._buffer)
            if n is None:
                return
            self._ended = n == 0
            self._last = max(now, self._last) + n / way.rate
            self._flying.append((self._last + way.delay, bytes(self._buffer[:n])))
            self._aloft += n

    async def _carry(self) -> None:
        """Delivers the pieces that are due."""
        while self._flying and self._flying[0][0] <= trio.current_time():
            if self._link.clogged:
                await self.bell.wait()
                continue
            _, piece = self._flying[0]
            if not piece:
                self._flying.popleft()
                self._sink.send_eof()
                continue
            limit = self._next_fault()
            if limit == self.carried:
                await self._fault()
                continue
            n = self._sink.try_send([piece[: limit - self.carried]])
            self.carried += n
            self._aloft -= n
            if n < len(piece):
                self._flying[0] = (0.0, piece[n:])
            else:
                self._flying.popleft()
            if n:
                self._take()  # uses the new room at once, so that a slow reader does not get bursts
            if n == 0:
                await self._taken()
            elif self.carried == self._next_fault():
                await self._fault()
            elif self._way.piece < 65536:
                await trio.lowlevel.checkpoint()  # so that a reader sees separate pieces

    async def _taken(self) -> None:
        """Waits until the sink takes more. TransportLost if it does not, and its sender has closed long ago."""
        while True:
            orphaned = self._source.deserted
            with trio.move_on_after(_ORPHAN) as patience:
                await self._sink.wait_writable()
            if not patience.cancelled_caught:
                return
            if orphaned:
                raise TransportLost("its sender has closed, and waits no longer", left=True)

    def _next_fault(self) -> int:
        way = self._way
        faults = (at for at in (way.cut_at, way.reset_at, way.stall_at) if at is not None and at >= self.carried)
        return min(faults, default=2**62)

    async def _fault(self) -> None:
        way, at = self._way, self.carried
        if way.stall_at == at:
            await trio.sleep(way.stall)
            self._way = Way(piece=way.piece, delay=way.delay, rate=way.rate, cut_at=way.cut_at, reset_at=way.reset_at)
        if at in (way.cut_at, way.reset_at):
            (self._link.cut if at == way.cut_at else self._link.reset)()
            raise TransportLost("the network has ended it")
