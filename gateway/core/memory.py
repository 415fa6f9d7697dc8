"""Memory for bodies: pooled memory, used again once no view of it is left, and memory that grows in place."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from gateway.errors import Overloaded, Refusal
from gateway.net.tables import is_hollow
from gateway.party import MemoryAccount
from protocols.buffers import mapped
from protocols.events import Buffer

if TYPE_CHECKING:
    from protocols.buffers import Budget

SMALLEST = 64 * 1024
"""Bytes below which a body is cheaper to allocate than to pool."""
_IDLE_SECONDS = 10.0
_MAPPED = 256 * 1024  # a larger body that grows is mapped


class BodyMemory(Protocol):
    """Memory for whole bodies that a model's own process shares."""

    def take(self, n: int) -> memoryview | None:
        """Returns writable memory of n bytes; None if it has no room: the caller then takes memory of a BodyPool."""
        ...


@final
class BodyPool:
    """Lends memory for whole bodies.

    Fresh memory costs ten times as much as copying into it: the kernel clears each page when it is first touched. Lent
    memory comes back when the last view of it dies, even one that a model has kept, in any thread. At most `keep` bytes
    wait to be lent again, none longer than about ten seconds after the last loan.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._idle: dict[int, deque[mmap.mmap]] = {}
        self._returned: deque[mmap.mmap] = deque()  # by any thread
        self._loans: dict[int, weakref.ref[object]] = {}
        self.idle_bytes = 0
        """Bytes that wait to be lent again."""
        self._used_at = 0.0

    @property
    def lent_bytes(self) -> int:
        """Bytes that are lent and not back."""
        return sum(lent.nbytes for loan in list(self._loans.values()) if isinstance(lent := loan(), np.ndarray))

    def take(self, n: int, now: float) -> memoryview:
        """Lends writable memory of n bytes, n at least 1. It is not cleared: the caller must pass on only what it filled."""
        if n < SMALLEST:
            return np.empty(n, np.uint8).data
        self._used_at = now
        self._collect()
        size = _size_of(n)
        idle = self._idle.get(size)
        if idle:
            memory = idle.pop()
            self.idle_bytes -= size
        else:
            memory = mapped(size)
        lent = np.frombuffer(memory, np.uint8, n)
        # no closure: it would be six objects of each stream whose body has begun, and these are collected together
        self._loans[id(memory)] = weakref.ref(lent, partial(_back, self._loans, self._returned, memory))
        return lent.data

    def rest(self) -> None:
        """Gives back the room of its table of loans, if nothing is lent. Loans hold the table: it stays the same object."""
        if not self._loans and is_hollow(self._loans):
            self._loans.clear()

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            size = len(memory)
            if self.idle_bytes + size <= self._keep:
                self._idle.setdefault(size, deque()).append(memory)
                self.idle_bytes += size
            # else its last reference ends here

    def tick(self, now: float) -> None:
        """Gives idle memory back to the system when no body has needed any for a while."""
        self._collect()
        if self.idle_bytes and now - self._used_at > _IDLE_SECONDS:
            self._idle.clear()
            self.idle_bytes = 0


def _back(loans: dict[int, weakref.ref[object]], returned: deque[mmap.mmap], memory: mmap.mmap, _: object) -> None:
    del loans[id(memory)]
    returned.append(memory)


@final
class GrowingBody:
    """Memory for a body of unknown length, of at most `most` bytes.

    A large one is mapped whole at once, and costs only the pages that are touched. The body is never moved, and the system
    gets the memory back with its last view. An allocator would keep memory that several threads return to it, up to twice
    the largest piece for each.
    """

    __slots__ = ("_mapped", "_most", "_small", "size")

    def __init__(self, most: int) -> None:
        self._most = most
        self._small = bytearray()
        self._mapped: mmap.mmap | None = None
        self.size = 0

    def append(self, data: Buffer) -> None:
        """Appends bytes; the caller must not append more than there is room for."""
        mapped, end = self._mapped, self.size + len(data)
        if mapped is None and end > _MAPPED:
            mapped = self._mapped = mmap.mmap(-1, self._most, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapped[: self.size] = bytes(self._small)
            self._small = bytearray()
        if mapped is None:
            self._small += data
        else:
            mapped[self.size : end] = data
        self.size = end

    def view(self) -> memoryview:
        """Returns the appended bytes; nothing may be appended afterwards."""
        return memoryview(self._small) if self._mapped is None else memoryview(self._mapped)[: self.size]

    def clear(self) -> None:
        """Gives the memory back; there must be no view of it."""
        self._small, self.size = bytearray(), 0
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


def _size_of(n: int) -> int:
    """Returns n rounded up to one of eight sizes in each doubling, so that bodies of similar sizes share memory."""
    step = max(1 << (n.bit_length() - 4), mmap.PAGESIZE)
    return -(-n // step) * step


def no_bytes(budget: Budget, n: int) -> Overloaded:
    """Makes the error for a session for which the budget has no n more bytes."""
    if isinstance(budget, MemoryAccount) and budget.has_its_share(n):
        return share_is_held(budget, n)
    return Overloaded(
        f"no memory for {n} bytes: {budget.used} of {budget.limit} bytes are in use (limits.total_bytes); try again later",
        refusal=Refusal.MEMORY,
    )


def share_is_held(account: MemoryAccount, n: int = 0) -> Overloaded:
    """Makes the error for a session whose party holds its share, and gets no n more bytes while memory is scarce."""
    wanted = f"no memory for {n} bytes: " if n else ""
    return Overloaded(
        f"{wanted}{account.used} of {account.limit} bytes are in use (limits.total_bytes), {account.held} of them for this "
        "client: while more than half are in use, a client that holds limits.party_share percent gets no more; "
        "try again later",
        refusal=Refusal.PARTY_SHARE,
    )
