"""Memory for bodies: warm, and used again when nobody looks at it any more; or growing in its place, and gone at its end."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol, final

import numpy as np

from gateway.errors import Overloaded, Refusal
from gateway.party import MemoryAccount
from protocols.buffers import mapped
from protocols.events import Buffer

if TYPE_CHECKING:
    from protocols.buffers import Budget

SMALLEST = 64 * 1024
"""Below it a body is cheaper to allocate than to pool."""
_IDLE_SECONDS = 10.0
_MAPPED = 256 * 1024  # a larger body that grows is mapped


class BodyMemory(Protocol):
    """Other memory for whole bodies: of a model that sees them there, in a process of its own."""

    def take(self, n: int) -> memoryview | None:
        """As of a BodyPool, which lends them where this has no room."""
        ...


@final
class BodyPool:
    """Lends memory for whole bodies.

    Fresh memory costs ten times what copying into it does: the kernel clears each page when it is first touched. Lent
    memory comes back by itself when the last view of it dies, also one that a model has kept, in whatever thread. At most
    `keep` bytes wait to be lent again, none longer than some ten seconds after the last loan.
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
        """Writable memory of n bytes, at least one, not cleared: whoever fills it gives out no more than was filled."""
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
        returned, loans, key = self._returned, self._loans, id(memory)

        def back(_: object) -> None:
            del loans[key]
            returned.append(memory)

        loans[key] = weakref.ref(lent, back)
        return lent.data

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


@final
class GrowingBody:
    """Memory for a body of at most `most` bytes of which nobody knows how many it will have.

    A large one is mapped whole at once, which costs what is touched of it: it is never moved, and the system has it back
    with its last view. An allocator keeps memory that several threads return to it, up to twice the largest piece for each.
    """

    __slots__ = ("_mapped", "_most", "_small", "size")

    def __init__(self, most: int) -> None:
        self._most = most
        self._small = bytearray()
        self._mapped: mmap.mmap | None = None
        self.size = 0

    def append(self, data: Buffer) -> None:
        """Appends at most as many bytes as there is room for."""
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
        """The appended bytes; nothing may be appended afterwards."""
        return memoryview(self._small) if self._mapped is None else memoryview(self._mapped)[: self.size]

    def clear(self) -> None:
        """Gives the memory back, of which there must be no view."""
        self._small, self.size = bytearray(), 0
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None


def _size_of(n: int) -> int:
    """n rounded up to one of eight sizes in each doubling, so that bodies of about one size share memory."""
    step = max(1 << (n.bit_length() - 4), mmap.PAGESIZE)
    return -(-n // step) * step


def no_bytes(budget: Budget, n: int) -> Overloaded:
    """The error for a session that the budget has no n bytes more for."""
    if isinstance(budget, MemoryAccount) and budget.has_its_share(n):
        return share_is_held(budget, n)
    return Overloaded(
        f"no memory for {n} bytes: {budget.used} of {budget.limit} bytes are in use (limits.total_bytes); try again later",
        refusal=Refusal.MEMORY,
    )


def share_is_held(account: MemoryAccount, n: int = 0) -> Overloaded:
    """The error for a session whose party holds its share, and gets no n bytes more while memory is scarce."""
    wanted = f"no memory for {n} bytes: " if n else ""
    return Overloaded(
        f"{wanted}{account.used} of {account.limit} bytes are in use (limits.total_bytes), {account.held} of them for this "
        "client: while more than half are in use, nobody gets more who holds limits.party_share percent; try again later",
        refusal=Refusal.PARTY_SHARE,
    )
