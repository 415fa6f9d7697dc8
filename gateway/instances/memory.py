"""Memory that a gateway and an instance share: one side puts large bytes there, and the other reads them in place.

Each direction has its own memfd, which is on no mount and has no name. The kernel frees it when nothing has it open or
mapped any more, even after a kill. It is sparse, so that unused parts take no memory, and sealed, so that it cannot be
truncated while it is read.
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
"""The bytes of a tensor or a part from which it goes through shared memory. Smaller ones are in the message itself. Both
ways cost the same at 64 KiB."""
IDLE_SECONDS = 10.0
"""Seconds after which the lending side returns memory to the system that it has not used meanwhile."""
_STEP = 4 * 1024 * 1024  # bytes that are copied or returned at once, in a millisecond or two
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
Soon: TypeAlias = "Callable[[Callable[[], None]], None]"
"""Schedules a call on the loop, from any thread. It does not raise."""


class LargerThanMemory(ValueError):
    """One message has more bytes than the whole memory. It would wait for ever."""


@final
class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The place of bytes in the sender's memory. The receiver sends the `key` back when it no longer needs them."""

    key: int
    memory: int
    """The index of the memory: 0 is the sender's own, 1 the one that several processes share."""
    offset: int
    size: int


@final
class Ranges:
    """The free ranges of a memory of `size` bytes. The lowest are taken first, because they have been touched before."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]  # in order; no two are adjacent
        self._taken: dict[int, int] = {}
        self._touched = 0  # free bytes from here on have never been touched
        self._highest = 0  # the highest end of a range taken since `idle` returned None

    def take(self, n: int) -> int | None:
        """Takes `n` contiguous bytes and returns their start, which begins a page; None if there are not so many."""
        n = _pages(n)
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= n:
                self._free[at : at + 1] = [(start + n, stop)] if stop - start > n else []
                self._taken[start] = n
                self._highest = max(self._highest, start + n)
                return start
        return None

    def release(self, start: int) -> None:
        """Frees the range that `take` returned this start for."""
        free, stop = self._free, start + self._taken.pop(start)
        self._touched = max(self._touched, stop)
        at = bisect(free, (start, stop))
        before = at > 0 and free[at - 1][1] == start
        after = at < len(free) and free[at][0] == stop
        free[at - before : at + after] = [(free[at - 1][0] if before else start, free[at][1] if after else stop)]

    def idle(self, most: int) -> tuple[int, int] | None:
        """Returns a range of at most `most` bytes that may be returned to the system; None if there is none. Its bytes are
        free, touched, and above all that was taken since the last None. They count as untouched from now on."""
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
    """One memory that this side lends from. Taken bytes are free again when no object of this process refers to them any
    more, in any thread."""

    def __init__(self, descriptor: int) -> None:
        """Maps the memory and takes over the descriptor."""
        self.size = os.fstat(descriptor).st_size
        self._mapping: mmap.mmap | None = mmap.mmap(descriptor, self.size)
        self._base = _address(self._mapping)
        self._ranges = Ranges(self.size)
        self._turn = threading.Lock()  # guards `_ranges`: a model may take an array in any thread
        self._loans: dict[int, weakref.ref[object]] = {}
        self._returned = deque[int]()  # appended to by any thread
        self._waiting = set[Callable[[], None]]()
        self.soon: Soon = _at_once
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, size: int) -> Arena:
        """Makes an arena of new memory of at least `size` bytes. OSError if the system has none."""
        return _opened(cls, _create(size))

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that the arena takes now."""
        return _used(self.descriptor) if self._close.alive else 0

    def take(self, n: int) -> memoryview | None:
        """Returns `n` writable bytes, not cleared; None if there is no room or the arena is closed. `n` is at least 1."""
        with self._turn:
            self._collect()
            start = self._ranges.take(n) if self._mapping is not None else None
        return None if start is None else self._lent(start, n)

    def take_all(self, sizes: Sequence[int], wake: Callable[[], None]) -> list[memoryview] | None:
        """Takes memory for all sizes, or for none. If there is no room for all, it returns None, and `wake` is called once
        as soon as something is free again, unless `forget` prevents it."""
        self._waiting.add(wake)  # first, so that no release is missed from now on
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
        """Prevents a later call of `wake`."""
        self._waiting.discard(wake)

    def offset_of(self, view: memoryview) -> int | None:
        """Returns the offset of a view in this memory; None if it is elsewhere."""
        offset = _address(view) - self._base
        return offset if 0 <= offset < self.size else None

    def give_back(self) -> bool:
        """Returns some memory to the system that was not used since the last False. True if there may be more: call it again
        soon."""
        with self._turn:
            self._collect()
            idle = self._ranges.idle(_STEP)
            if idle is not None and self._mapping is not None:
                start, stop = idle
                with suppress(OSError):  # the memory then stays resident
                    self._mapping.madvise(mmap.MADV_REMOVE, start, stop - start)
        return idle is not None

    def close(self) -> None:
        """Stops lending. The mapping stays until nothing refers to lent bytes any more."""
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
    """The memories that the other side lends from, mapped for reading only."""

    def __init__(self, *descriptors: int) -> None:
        """Maps the memories and takes over the descriptors."""
        self._mappings = [mmap.mmap(one, os.fstat(one).st_size, prot=mmap.PROT_READ) for one in descriptors]
        self._seen: dict[int, weakref.ref[object]] = {}
        self._unseen = deque[int]()  # appended to by any thread
        self.soon: Soon = _at_once
        self.tell: Callable[[list[int]], None] | None = None
        """Called with the keys of blocks that nothing here refers to any more; None: they are dropped."""
        self.descriptors = descriptors
        self._close = weakref.finalize(self, _close_all, descriptors)

    @property
    def used_bytes(self) -> int:
        """Bytes of memory that the other side's memories take now."""
        return sum(map(_used, self.descriptors)) if self._close.alive else 0

    def view(self, block: Block) -> memoryview:
        """Returns the bytes of a block, which stays lent while anything refers to them. ValueError for an invalid block."""
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
        """Passes the waiting keys to `tell`."""
        keys = []
        while self._unseen:
            keys.append(self._unseen.popleft())
        if keys and self.tell is not None:
            self.tell(keys)

    def close(self) -> None:
        """Closes the window after the other side is gone. Bytes that are in use stay readable."""
        self.tell, self.soon = None, _never
        self._mappings.clear()
        self._close()


@final
class SharedMemory:
    """One side's shared memory of both directions.

    Bytes that it lends are copied into its own arena, unless they are already in an arena that the other side sees.
    """

    def __init__(self, arena: Arena, window: Window, *, also: Arena | None = None) -> None:
        """`also` is an arena that several processes see; its owner closes it."""
        self.arena, self.window = arena, window
        self._arenas = [arena] if also is None else [arena, also]
        self._held: dict[int, Buffer] = {}  # bytes lent to the other side, by key
        self._key = 0

    @classmethod
    def create(cls, size: int, *, also: Arena | None = None) -> SharedMemory:
        """Makes new memory of `size` bytes in each direction. OSError if the system has none."""
        arena = Arena.create(size)
        try:
            return cls(arena, _opened(Window, _create(size)), also=also)
        except BaseException:
            arena.close()
            raise

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that the other side has to map, for `of_descriptors`."""
        return [*self.window.descriptors, *[arena.descriptor for arena in self._arenas]]

    @classmethod
    def of_descriptors(cls, lent: int, *seen: int) -> SharedMemory:
        """Makes the other side's memory of these descriptors, and takes them over. If they are not such memory, it closes
        them and raises OSError or ValueError."""
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
        """Calls `tell`, from now on, with the keys of blocks that this side no longer needs."""
        self.arena.soon = self.window.soon = soon
        self.window.tell = tell

    def places(self, buffers: Sequence[Buffer], wake: Callable[[], None]) -> list[memoryview] | None:
        """Returns shared memory for each buffer; a buffer that is in shared memory already is its own place. None if there
        is no room for all, as for `Arena.take_all`. LargerThanMemory if they can never fit."""
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
        """Returns an array in shared memory, not cleared, which is sent without a copy. If it is small, or there is no room
        now, its memory is not shared. May be called in any thread."""
        array = np.empty(shape, dtype)  # takes no memory before it is touched
        if array.nbytes < SMALLEST or array.dtype.hasobject or (place := self.arena.take(array.nbytes)) is None:
            return array
        return np.frombuffer(place, array.dtype).reshape(array.shape)

    def lend(self, place: memoryview) -> Block:
        """Lends bytes in shared memory to the other side. Returns the block to send; the bytes are held until the other side
        gives the block back."""
        where = self._where(place)
        assert where is not None
        self._key += 1
        self._held[self._key] = place
        return Block(self._key, *where, place.nbytes)

    def take_back(self, keys: Sequence[int]) -> None:
        """Takes back blocks that the other side no longer needs. ValueError for a block that it does not have."""
        for key in keys:
            if self._held.pop(key, None) is None:
                raise ValueError(f"block {key} is not lent")

    def close(self) -> None:
        """Closes the memory after the other side is gone. Bytes that are in use stay valid. A second call does nothing."""
        self._held.clear()
        self.arena.close()
        self.window.close()

    def _where(self, view: memoryview) -> tuple[int, int] | None:
        for number, arena in enumerate(self._arenas):
            if (offset := arena.offset_of(view)) is not None:
                return number, offset
        return None


def copied(source: Buffer, target: memoryview) -> Iterator[None]:
    """Copies bytes in steps of a millisecond or two, and yields after each, so that other tasks may run. Does nothing if
    source and target are the same place."""
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
