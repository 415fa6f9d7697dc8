"""Memory that a gateway and an instance share: one side puts large bytes there, the other looks at them where they are.

Each direction has a memfd of its own: it is on no mount, has no name, and is gone with the last who has it open or mapped,
whoever was killed. It is sparse, so that what nobody has used takes nothing, and sealed: nobody can cut it off under a
reader.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar, final

import msgspec
import numpy as np
import numpy.typing as npt

from protocols.events import Buffer

T = TypeVar("T")

SMALLEST = 64 * 1024
"""Bytes from which on a tensor or a part goes through shared memory; below, in the frame that tells of it (both cost the
same at 64 KiB)."""
IDLE_SECONDS = 10.0
"""How often the side that lends memory is to give back what it has not used since."""
_STEP = 4 * 1024 * 1024  # bytes that are copied, or given back, at once: a millisecond or two
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
Soon: TypeAlias = "Callable[[Callable[[], None]], None]"
"""Has the loop call something soon, from any thread: several times are once. It does not raise."""


class LargerThanMemory(ValueError):
    """One message has more bytes than all of the memory, so that it would wait for ever."""


@final
class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where bytes are in a memory of the side that says so. The other side says the `key` when it needs them no more."""

    key: int
    memory: int
    """Its own, 0, or one that several lend from."""
    offset: int
    size: int


@final
class Ranges:
    """Which of so many bytes are free: the lowest are taken first, because they have been touched before."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]  # by their starts; no two meet
        self._taken: dict[int, int] = {}
        self._touched = 0  # no free byte at or above it has been
        self._highest = 0  # end of what was taken since the last look for idle ones

    def take(self, n: int) -> int | None:
        """Where n bytes are that are free no more, from the start of a page on; None where so many are nowhere together."""
        n = _pages(n)
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= n:
                self._free[at : at + 1] = [(start + n, stop)] if stop - start > n else []
                self._taken[start] = n
                self._highest = max(self._highest, start + n)
                return start
        return None

    def release(self, start: int) -> None:
        """Frees what was taken there."""
        free, stop = self._free, start + self._taken.pop(start)
        self._touched = max(self._touched, stop)
        at = bisect(free, (start, stop))
        before = at > 0 and free[at - 1][1] == start
        after = at < len(free) and free[at][0] == stop
        free[at - before : at + after] = [(free[at - 1][0] if before else start, free[at][1] if after else stop)]

    def idle(self, most: int) -> tuple[int, int] | None:
        """Bytes that may be given back to the system, at most so many: free ones that have been touched, above all that was
        taken since the last None. They count as untouched from now on."""
        for start, stop in reversed(self._free):
            begin, end = max(start, self._highest), min(stop, self._touched)
            if begin < end:
                self._touched = max(begin, end - most)
                return self._touched, end
        self._touched = min(self._touched, self._highest)
        self._highest = 0
        return None


@final
class Arena:
    """One memory that this side lends from: what is taken of it comes back when nobody here looks at it any more, in
    whatever thread."""

    def __init__(self, descriptor: int) -> None:
        """Maps it. The descriptor is its own from then on."""
        self.size = os.fstat(descriptor).st_size
        self._mapping: mmap.mmap | None = mmap.mmap(descriptor, self.size)
        self._base = _address(self._mapping)
        self._ranges = Ranges(self.size)
        self._turn = threading.Lock()  # of those who look at them: a model may take an array in any thread
        self._loans: dict[int, weakref.ref[object]] = {}
        self._returned = deque[int]()  # by any thread
        self._waiting = set[Callable[[], None]]()
        self.soon: Soon = _at_once
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, size: int) -> Arena:
        """One of a new memory, of at least so many bytes. OSError where there can be none."""
        return _opened(cls, _create(size))

    @property
    def used_bytes(self) -> int:
        """The memory that it takes now."""
        return _used(self.descriptor) if self._close.alive else 0

    def take(self, n: int) -> memoryview | None:
        """Writable memory of n bytes, at least one, not cleared; None where there is no room, or it is closed."""
        with self._turn:
            self._collect()
            start = self._ranges.take(n) if self._mapping is not None else None
        return None if start is None else self._lent(start, n)

    def take_all(self, sizes: Sequence[int], wake: Callable[[], None]) -> list[memoryview] | None:
        """The same of each size, or of none. Where there is no room for all, `wake` is called as soon as something has come
        back, unless it is forgotten."""
        self._waiting.add(wake)  # before the look: what comes back from now on is told
        starts = list[int]()
        with self._turn:
            self._collect()
            for n in sizes:
                start = self._ranges.take(n)
                if start is None:
                    for taken in starts:
                        self._ranges.release(taken)
                    return None
                starts.append(start)
        self._waiting.discard(wake)
        return [self._lent(start, n) for start, n in zip(starts, sizes, strict=True)]

    def forget(self, wake: Callable[[], None]) -> None:
        """It is not called any more."""
        self._waiting.discard(wake)

    def offset_of(self, view: memoryview) -> int | None:
        """Where in this memory that is; None where it is somewhere else."""
        offset = _address(view) - self._base
        return offset if 0 <= offset < self.size else None

    def give_back(self) -> bool:
        """Gives some memory back to the system that was not used since this was last False. True where there may be more:
        it is to be called again before others wait."""
        with self._turn:
            self._collect()
            idle = self._ranges.idle(_STEP)
            if idle is not None and self._mapping is not None:
                start, stop = idle
                with suppress(OSError):  # it is warm, then
                    self._mapping.madvise(mmap.MADV_REMOVE, start, stop - start)
        return idle is not None

    def close(self) -> None:
        """Nothing more is lent. The mapping, and its descriptor, go with the last who looks at what was."""
        self.soon, self._mapping = _never, None
        self._close()

    def _lent(self, start: int, n: int) -> memoryview:
        assert self._mapping is not None, "it is closed"
        lent = np.frombuffer(self._mapping, np.uint8, n, start)
        loans, returned, waiting = self._loans, self._returned, self._waiting

        def back(_: object) -> None:
            del loans[start]
            returned.append(start)
            if waiting:
                self.soon(self._wake)

        loans[start] = weakref.ref(lent, back)
        return lent.data

    def _collect(self) -> None:
        while self._returned:
            self._ranges.release(self._returned.popleft())

    def _wake(self) -> None:
        waiting = [*self._waiting]
        self._waiting.clear()
        for wake in waiting:
            wake()


@final
class Window:
    """The memories that the other side lends from, as this side sees them: nothing is written here."""

    def __init__(self, *descriptors: int) -> None:
        """Maps them. The descriptors are its own from then on."""
        self._mappings = [mmap.mmap(one, os.fstat(one).st_size, prot=mmap.PROT_READ) for one in descriptors]
        self._seen: dict[int, weakref.ref[object]] = {}
        self._unseen = deque[int]()  # by any thread
        self.soon: Soon = _at_once
        self.tell: Callable[[list[int]], None] | None = None
        """Is told the keys of blocks that nobody here looks at any more; None: there is nobody to tell."""
        self.descriptors = descriptors
        self._close = weakref.finalize(self, _close_all, descriptors)

    @property
    def used_bytes(self) -> int:
        """The memory that they take now."""
        return sum(map(_used, self.descriptors)) if self._close.alive else 0

    def view(self, block: Block) -> memoryview:
        """The bytes of a block. It stays here as long as anything looks at it. ValueError for one that cannot be."""
        key, memory, offset, size = block.key, block.memory, block.offset, block.size
        whole = len(self._mappings[memory]) if 0 <= memory < len(self._mappings) else 0
        if offset < 0 or size < SMALLEST or offset + size > whole:
            raise ValueError(f"a block of {size} bytes at {offset} of {whole}")
        if key in self._seen:
            raise ValueError(f"block {key} is lent twice")
        seen, unseen = self._seen, self._unseen
        lent = np.frombuffer(self._mappings[memory], np.uint8, size, offset)

        def gone(_: object) -> None:
            del seen[key]
            unseen.append(key)
            if len(unseen) == 1:
                self.soon(self.tell_now)

        seen[key] = weakref.ref(lent, gone)
        return lent.data

    def tell_now(self) -> None:
        """Tells what there is to tell."""
        keys = []
        while self._unseen:
            keys.append(self._unseen.popleft())
        if keys and self.tell is not None:
            self.tell(keys)

    def close(self) -> None:
        """The other side is gone. What is looked at stays."""
        self.tell, self.soon = None, _never
        self._mappings.clear()
        self._close()


@final
class SharedMemory:
    """What one side of an instance has of the memory in both directions.

    What it lends is copied into its own arena, unless it is in one already that the other side sees too.
    """

    def __init__(self, arena: Arena, window: Window, *, also: Arena | None = None) -> None:
        """`also`: what several lend from, and whose owner closes it."""
        self.arena, self.window = arena, window
        self._arenas = [arena] if also is None else [arena, also]
        self._held: dict[int, Buffer] = {}  # what the other side was told of
        self._key = 0

    @classmethod
    def create(cls, size: int, *, also: Arena | None = None) -> SharedMemory:
        """New memory, so much in each direction. OSError where there can be none."""
        arena = Arena.create(size)
        try:
            return cls(arena, _opened(Window, _create(size)), also=also)
        except BaseException:
            arena.close()
            raise

    @property
    def descriptors(self) -> list[int]:
        """What the other side is to map, for `of_descriptors`."""
        return [*self.window.descriptors, *[arena.descriptor for arena in self._arenas]]

    @classmethod
    def of_descriptors(cls, lent: int, *seen: int) -> SharedMemory:
        """The other side's of these, which are its own from then on. OSError or ValueError for what is no such memory, and
        then they are closed."""
        try:
            arena = _opened(Arena, lent)
            try:
                return cls(arena, Window(*seen))
            except BaseException:
                arena.close()
                raise
        except BaseException:
            _close_all(seen)
            raise

    def attach(self, soon: Soon, tell: Callable[[list[int]], None]) -> None:
        """From now on `tell` is told what this side looks at no more."""
        self.arena.soon = self.window.soon = soon
        self.window.tell = tell

    def places(self, buffers: Sequence[Buffer], wake: Callable[[], None]) -> list[memoryview] | None:
        """Memory for each of these: all, or none, as of `Arena.take_all`; where one is in a memory already, it itself.
        LargerThanMemory."""
        views = [memoryview(buffer) for buffer in buffers]
        here = [self._where(view) is not None for view in views]
        new = [view for view, known in zip(views, here, strict=True) if not known]
        if sum([_pages(view.nbytes) for view in new]) > self.arena.size:
            size = sum([view.nbytes for view in new])
            said = f"a message with tensors or parts of {size} bytes is larger than all of the shared memory"
            raise LargerThanMemory(f"{said}, {self.arena.size} bytes")
        taken = self.arena.take_all([view.nbytes for view in new], wake) if new else []
        if taken is None:
            return None
        left = iter(taken)
        return [view if known else next(left) for view, known in zip(views, here, strict=True)]

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array, not cleared, whose bytes the other side sees as they are when it is sent; where it is small, or there is
        no room now, one of usual memory. In any thread."""
        array = np.empty(shape, dtype)  # which takes nothing before it is touched
        if array.nbytes < SMALLEST or array.dtype.hasobject or (place := self.arena.take(array.nbytes)) is None:
            return array
        return np.frombuffer(place, array.dtype).reshape(array.shape)

    def lend(self, place: memoryview) -> Block:
        """What to tell the other side of bytes in a memory, which then has them until it says otherwise."""
        where = self._where(place)
        assert where is not None
        self._key += 1
        self._held[self._key] = place
        return Block(self._key, *where, place.nbytes)

    def take_back(self, keys: Sequence[int]) -> None:
        """The other side needs these no more. ValueError for what it does not have."""
        for key in keys:
            if self._held.pop(key, None) is None:
                raise ValueError(f"block {key} is not lent")

    def close(self) -> None:
        """The other side is gone. Whoever looks at what it has lent may go on. A second call does nothing."""
        self._held.clear()
        self.arena.close()
        self.window.close()

    def _where(self, view: memoryview) -> tuple[int, int] | None:
        for number, arena in enumerate(self._arenas):
            if (offset := arena.offset_of(view)) is not None:
                return number, offset
        return None


def copied(source: Buffer, target: memoryview) -> Iterator[None]:
    """Copies in steps of a millisecond or two, after each of which others may have a turn; nothing where both are one."""
    if _address(source) == _address(target):
        return
    given, taken = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    for start in range(0, len(taken), _STEP):
        np.copyto(taken[start : start + _STEP], given[start : start + _STEP])
        yield


def _create(size: int) -> int:
    size = _pages(size)
    descriptor = os.memfd_create("everywire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _opened(opens: Callable[[int], T], descriptor: int) -> T:
    try:
        return opens(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _used(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512  # stat(2)


def _pages(n: int) -> int:
    return -(-n // mmap.PAGESIZE) * mmap.PAGESIZE


def _address(buffer: Buffer | mmap.mmap) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _at_once(call: Callable[[], None]) -> None:
    call()


def _never(call: Callable[[], None]) -> None:
    pass
