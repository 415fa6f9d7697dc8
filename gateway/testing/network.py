"""A network between a client and a gateway in memory: what it does to the bytes is declared, and happens at exact bytes."""

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
"""Seconds that what a closed end has sent may wait to be taken."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One direction of a connection. Bytes are counted from the first that is carried; None: it does not happen."""

    piece: int = 65536
    """The most that arrives at once; 1: a byte at a time."""
    delay: float = 0.0
    """Seconds that each byte is under way."""
    rate: float = math.inf
    """Bytes a second."""
    stall_at: int | None = None
    """After so many bytes nothing is carried for `stall` seconds."""
    stall: float = math.inf
    cut_at: int | None = None
    """After so many bytes both ends see the connection end in order, whatever was still under way."""
    reset_at: int | None = None
    """After so many bytes both ends see it reset."""

    def __post_init__(self) -> None:
        if self.piece < 1 or not self.rate > 0 or self.delay < 0 or self.stall < 0:
            raise ValueError(f"a piece has a byte, a rate is above 0, and no time is below it: {self}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProfile:
    """What a network does to a connection: `up` is what the client sends, `down` what it receives."""

    up: Way = field(default_factory=Way)
    down: Way = field(default_factory=Way)


@final
class Link:
    """A connection through a network: `client` and `server` are its two ends, `run` carries bytes between them.

    It behaves as TCP does. An end that closes is seen as the end of its direction by the other; what is sent to one that
    has closed is answered with a reset; and where the other end does not take what one had sent before it closed, its
    system gives up after 10 to 20 s, and keepalive finds that out: a reset too. `capacity` is what each direction of each
    end holds, and what is under way.
    """

    def __init__(self, profile: NetworkProfile | None = None, capacity: int = 65536) -> None:
        profile = profile or NetworkProfile()
        self.client, near = memory_pair(capacity)
        far, self.server = memory_pair(capacity)
        self._ends = near, far
        self._ways = _Carrier(self, near, far, profile.up, capacity), _Carrier(self, far, near, profile.down, capacity)
        self.clogged = False
        self.disturbed = False
        """Whether the network itself has ended it."""

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes that have arrived, up and down."""
        return self._ways[0].carried, self._ways[1].carried

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not any(way.busy for way in self._ways)

    async def run(self) -> None:
        """Carries until the connection is over, in both directions."""
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
        """Nothing is carried any more, in either direction, until `unclog`."""
        self.clogged = True

    def unclog(self) -> None:
        """What has waited arrives."""
        self.clogged = False
        for way in self._ways:
            way.bell.ring()

    def cut(self) -> None:
        """Both ends see the connection end; what was under way is lost."""
        self.disturbed = True
        self._over()

    def reset(self) -> None:
        """Both ends see a reset; what was under way is lost."""
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
        """Rung when the link is no longer clogged, or over."""
        self._flying: deque[tuple[float, bytes]] = deque()  # when it arrives; empty bytes are the end of the direction
        self._aloft = 0
        self._last = 0.0  # when the last byte that was taken has left
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
            if e.left:  # one end is gone: the other is told as TCP tells it
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
        """What is due arrives."""
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
                self._take()  # room for as much, at once: a slow reader is slow, and not one in bursts
            if n == 0:
                await self._taken()
            elif self.carried == self._next_fault():
                await self._fault()
            elif self._way.piece < 65536:
                await trio.lowlevel.checkpoint()  # so that whoever reads sees pieces

    async def _taken(self) -> None:
        """Returns when the sink takes more, or has been told that nobody is there any more."""
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
