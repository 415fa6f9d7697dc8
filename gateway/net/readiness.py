"""Tells the owners of transports when they are ready: by one epoll set, or by two waiting tasks for each transport."""

from __future__ import annotations

import select
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, final

import trio

from gateway.doorbell import Doorbell
from gateway.net.tables import is_hollow, shrunk
from gateway.net.transport import Transport

_EVENTS = 256  # the most events of one look


class Watchable(Transport, Protocol):
    """A transport with a file descriptor."""

    def fileno(self) -> int: ...


class Edges(Protocol):
    """The calls of an epoll set, in which descriptors are registered edge-triggered."""

    def register(self, descriptor: int, mask: int, /) -> None: ...
    def unregister(self, descriptor: int, /) -> None: ...
    def poll(self, timeout: float, at_most: int, /) -> list[tuple[int, int]]: ...
    def close(self) -> None: ...
    async def wait(self) -> None:
        """Returns when `poll` may have events."""
        ...


class Told(Protocol):
    """The owner of a transport, which is told of its changes. No call raises or waits."""

    blocked: bool
    """True if the owner waits until it can send."""

    def readable(self, hung_up: bool) -> None:
        """Called when there are bytes, an end of stream or an error. `hung_up` is true if there is an end, an error or
        urgent data: a short receive then does not mean that nothing is left."""
        ...

    def writable(self) -> None: ...
    def failed(self, error: Exception) -> None:
        """Called when a wait for the transport raises."""
        ...


class Readiness(Protocol):
    """An owner's side of readiness: asks to be told when its transport is ready next. There are two kinds,
    `PolledTransport` and `WaitedTransport`; an owner uses both alike."""

    def want_readable(self) -> None:
        """Called after everything was received: asks to be told when there is more."""
        ...

    def want_writable(self) -> None:
        """Called when the transport takes no more bytes: asks to be told when it does."""
        ...

    def forget(self) -> None:
        """Ends the telling. Called before the transport is closed."""
        ...


class ReadinessSource(Protocol):
    """The source from which the task that reads and writes learns which transports are ready."""

    async def wait(self) -> None:
        """Returns when a transport may be ready."""
        ...

    def look(self) -> bool:
        """Learns what is ready now, and adds it to the events not yet told. True if there are any."""
        ...

    def tell(self, at_most: int) -> int:
        """Tells at most this many owners. Returns how many it told; 0 when there is nothing left to tell."""
        ...


@final
class PolledTransport:
    """One socket's place in a poller. The poller tells the owner of each change without being asked."""

    __slots__ = ("_descriptor", "_poller")

    def __init__(self, poller: Poller, descriptor: int) -> None:
        self._poller, self._descriptor = poller, descriptor

    def tell(self, owner: Told) -> None:
        """Tells `owner` of each change from now on; if the socket is ready already, at the next look. Does nothing after
        `forget`."""
        if self._descriptor >= 0:
            self._poller.add(self._descriptor, owner)

    def want_readable(self) -> None:
        """Does nothing: the poller tells of every change."""

    want_writable = want_readable

    def forget(self) -> None:
        """Ends the telling. Must be called before the socket is closed."""
        descriptor, self._descriptor = self._descriptor, -1
        self._poller.remove(descriptor)


@final
class WaitedTransport:
    """A transport that no poller can watch. Two tasks wait for it, one in each direction, each time its owner asks."""

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
        """Tells `owner` until it calls `forget`. Cancelling this does not end the owner: the canceller must end it."""
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

    A socket is registered once, edge-triggered. Its owner is told of every change, and receives or sends until the kernel
    answers that it would block. That saves a system call and a task switch for each read.
    """

    available = hasattr(select, "epoll")
    """True if this system has epoll. If not, each connection is a `WaitedTransport`."""

    def __init__(self, edges: Edges | None = None) -> None:
        """`edges` is the epoll set: by default the kernel's. A test without sockets gives one in memory."""
        self._edges = _Kernel() if edges is None else edges
        self._owners: dict[int, Told] = {}
        # The events that are told now, the first one last, and what the kernel gave since they began: of each descriptor
        # one entry here and one there at most, however often it becomes ready. The socket of an entry may be closed by now,
        # and its number another's: the owner of that one then finds nothing to receive.
        self._events: list[tuple[int, int]] = []
        self._next: dict[int, int] = {}

    def watch(self, descriptor: int) -> PolledTransport:
        """Returns a place for a socket. Its owner is named later, by `PolledTransport.tell`."""
        return PolledTransport(self, descriptor)

    def add(self, descriptor: int, owner: Told) -> None:
        self._edges.register(descriptor, _WATCHED)
        self._owners[descriptor] = owner

    def remove(self, descriptor: int) -> None:
        self._next.pop(descriptor, None)
        if self._owners.pop(descriptor, None) is not None:
            self._edges.unregister(descriptor)

    def look(self) -> bool:
        """True if something is ready now. Asks the kernel each time, also if events are left: on a busy server some always
        are, and newly ready sockets would not be seen."""
        if self._events or self._next:
            later = self._next
            for descriptor, mask in self._edges.poll(0, _EVENTS):
                later[descriptor] = later.get(descriptor, 0) | mask
            return True
        self._events = events = self._edges.poll(0, _EVENTS)
        events.reverse()
        return bool(events)

    async def wait(self) -> None:
        await self._edges.wait()
        self.look()

    def tell(self, at_most: int) -> int:
        events, owners, told = self._events, self._owners, 0
        while True:
            while events and told < at_most:
                descriptor, mask = events.pop()
                owner = owners.get(descriptor)
                if owner is None:  # closed since: two of these at most for each connection
                    continue
                told += 1
                if mask == _USUAL:
                    owner.readable(False)
                elif mask & _RECEIVE:
                    owner.readable(mask & _BEHIND != 0)
                if owner.blocked and mask & _SEND:
                    owner.writable()
            if not self._next or told == at_most:
                return told
            self._events = events = list(self._next.items())
            events.reverse()
            self._next.clear()

    def rest(self) -> None:
        """Gives back the room of its tables that is empty now."""
        self._owners = shrunk(self._owners)
        if is_hollow(self._next):
            self._next = self._next.copy()

    def close(self) -> None:
        """Closes the epoll set. Called when every owner is gone."""
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
    # after a short receive these may still be unread: the end, an error, and a peer's urgent data (tcp(7))
    _BEHIND = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR | select.EPOLLPRI
    _RECEIVE = select.EPOLLIN | _BEHIND
    _SEND = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
    _USUAL = select.EPOLLIN | select.EPOLLOUT  # bytes came, and each edge also reports that it can send
