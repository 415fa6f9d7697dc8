"""Tells when a transport is ready: one private epoll set for descriptors, two waiting tasks for the rest."""

from __future__ import annotations

import select
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, final

import trio

from gateway.doorbell import Doorbell
from gateway.net.transport import Transport

_EVENTS = 256  # at most, of one look


class Watchable(Transport, Protocol):
    """A transport with a number by which its edges are named."""

    def fileno(self) -> int: ...


class Edges(Protocol):
    """An epoll set for descriptors that are registered edge-triggered."""

    def register(self, descriptor: int, mask: int, /) -> None: ...
    def unregister(self, descriptor: int, /) -> None: ...
    def poll(self, timeout: float, at_most: int, /) -> list[tuple[int, int]]: ...
    def close(self) -> None: ...
    async def wait(self) -> None:
        """Returns when `poll` may give something."""
        ...


class Told(Protocol):
    """The owner of a transport, which is told when that is ready. No call raises or waits."""

    blocked: bool
    """True if it wants to know that it can send."""

    def readable(self, hung_up: bool) -> None:
        """Bytes, an end of stream or an error are there. `hung_up`: an end, an error or urgent data among them, so a
        short receive does not mean that nothing is left."""
        ...

    def writable(self) -> None: ...
    def failed(self, error: Exception) -> None:
        """The transport cannot even be waited for."""
        ...


class Readiness(Protocol):
    """Tells an owner of the next time that its transport is ready, if asked to. There are two kinds, `PolledTransport` and
    `WaitedTransport`, which an owner uses alike."""

    def want_readable(self) -> None:
        """There is nothing more to receive: tells when there is."""
        ...

    def want_writable(self) -> None:
        """It takes no more bytes: tells when it does."""
        ...

    def forget(self) -> None:
        """There is nothing more to tell. Called before the transport is closed."""
        ...


class ReadinessSource(Protocol):
    """The place where a leading task learns which transports are ready."""

    async def wait(self) -> None:
        """Returns when something may be ready."""
        ...

    def look(self) -> bool:
        """Learns what is ready now, beside what is still to be told. True if there is something to tell."""
        ...

    def tell(self, at_most: int) -> int:
        """Tells so many owners at most. How many it told: 0 when nobody is left to be told."""
        ...


@final
class PolledTransport:
    """One socket's place with a poller, which tells its owner of each change without being asked."""

    __slots__ = ("_descriptor", "_poller")

    def __init__(self, poller: Poller, descriptor: int) -> None:
        self._poller, self._descriptor = poller, descriptor

    def tell(self, owner: Told) -> None:
        """Tells `owner` from now on; what is so already, at once. Nothing where `forget` came before."""
        if self._descriptor >= 0:
            self._poller.add(self._descriptor, owner)

    def want_readable(self) -> None:
        """It tells by itself."""

    want_writable = want_readable

    def forget(self) -> None:
        """To be called before the socket is closed."""
        descriptor, self._descriptor = self._descriptor, -1
        self._poller.remove(descriptor)


@final
class WaitedTransport:
    """A transport that no poller can watch: two tasks wait for it, one in each direction, as often as its owner asks."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._dry, self._full, self._over = Doorbell(), Doorbell(), trio.Event()

    def want_readable(self) -> None:
        self._dry.ring()

    def want_writable(self) -> None:
        self._full.ring()

    def forget(self) -> None:
        self._over.set()

    async def run(self, owner: Told) -> None:
        """Tells `owner` until it says `forget`. Cancelling this does not end the owner: who cancels does."""
        transport = self._transport
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait, owner, self._dry, transport.wait_readable, partial(owner.readable, False))
            nursery.start_soon(self._wait, owner, self._full, transport.wait_writable, owner.writable)
            await self._over.wait()
            nursery.cancel_scope.cancel()

    async def _wait(
        self, owner: Told, asked: Doorbell, wait: Callable[[], Awaitable[None]], tell: Callable[[], None]
    ) -> None:
        try:
            while True:
                await asked.wait()
                await wait()
                tell()
        except Exception as e:
            owner.failed(e)


@final
class Poller(ReadinessSource):
    """Tells each socket's owner when it becomes readable or writable.

    A socket is registered once, edge-triggered: its owner is told of every change, and receives, or sends, until the
    kernel says that it would block. That saves the system call and the task switch that a wait for each read costs.
    """

    available = hasattr(select, "epoll")
    """Elsewhere a connection waits by itself."""

    def __init__(self, edges: Edges | None = None) -> None:
        """`edges` are those of the kernel, or of memory where a test has no sockets."""
        self._edges = _Kernel() if edges is None else edges
        self._owners: dict[int, Told] = {}
        # the events to tell of each descriptor, in the order in which the descriptors became ready
        self._events: OrderedDict[int, int] = OrderedDict()

    def watch(self, descriptor: int) -> PolledTransport:
        """A place for a socket, whose owner is named later."""
        return PolledTransport(self, descriptor)

    def add(self, descriptor: int, owner: Told) -> None:
        self._edges.register(descriptor, _WATCHED)
        self._owners[descriptor] = owner

    def remove(self, descriptor: int) -> None:
        self._events.pop(descriptor, None)
        if self._owners.pop(descriptor, None) is not None:
            self._edges.unregister(descriptor)

    def look(self) -> bool:
        """True if something is ready now. Asks the kernel each time: if it asked only when nothing is left to tell, it would
        miss news for as long as there is enough to do."""
        events = self._events
        if events:
            for descriptor, mask in self._edges.poll(0, _EVENTS):
                events[descriptor] = events.get(descriptor, 0) | mask
        else:
            events.update(self._edges.poll(0, _EVENTS))
        return bool(events)

    async def wait(self) -> None:
        await self._edges.wait()
        self.look()

    def tell(self, at_most: int) -> int:
        events, owners, told = self._events, self._owners, 0
        while events and told < at_most:
            told += 1
            descriptor, mask = events.popitem(last=False)
            owner = owners.get(descriptor)
            if owner is None:
                continue
            if mask == _USUAL:
                owner.readable(False)
            elif mask & _RECEIVE:
                owner.readable(mask & _BEHIND != 0)
            if owner.blocked and mask & _SEND:
                owner.writable()
        return told

    def close(self) -> None:
        """Every owner is gone."""
        self._edges.close()


@final
class _Kernel:
    """One epoll set."""

    def __init__(self) -> None:
        epoll = select.epoll()
        self.register, self.unregister, self.poll, self.close = epoll.register, epoll.unregister, epoll.poll, epoll.close
        self.wait = partial(trio.lowlevel.wait_readable, epoll.fileno())


if Poller.available:
    _WATCHED = select.EPOLLIN | select.EPOLLPRI | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
    # events that a short receive may have stopped before: the end, an error, and a peer's urgent data (tcp(7))
    _BEHIND = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR | select.EPOLLPRI
    _RECEIVE = select.EPOLLIN | _BEHIND
    _SEND = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
    _USUAL = select.EPOLLIN | select.EPOLLOUT  # a request, to one who may answer: an edge tells all that is so
