"""Pooled memory: it comes back when the last view dies, and never while anybody could still look at it."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gateway.core.memory import SMALLEST, BodyPool, _size_of

KiB, MiB = 1024, 1024 * 1024
N = 100_000


@pytest.fixture(name="pool")
def _pool() -> Iterator[BodyPool]:
    """A pool, and no collector: memory must come back by itself."""
    gc.collect()
    gc.disable()
    yield BodyPool(16 * MiB)
    gc.enable()


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


VIEWS: dict[str, Callable[[memoryview], Any]] = {
    "itself": lambda view: view,
    "a slice": lambda view: view[10:20],
    "a slice of a slice": lambda view: view[10:][5:][:1],
    "read-only": lambda view: view.toreadonly(),
    "cast": lambda view: view.cast("i"),
    "an array": lambda view: np.frombuffer(view, np.uint8),
    "an array of another type": lambda view: np.frombuffer(view, np.float32, 5, 16),
    "a slice of an array": lambda view: np.frombuffer(view, np.uint8)[7:90][::3],
    "a reshaped array": lambda view: np.frombuffer(view, np.uint8).reshape(100, -1).T[3],
    "a view of the owner": lambda view: np.asarray(view.obj)[3:5],
    "a view of an array": lambda view: memoryview(np.frombuffer(view, np.uint8)[4:]),
    "a dict of arrays": lambda view: {"x": [np.frombuffer(view[8:], np.int8)]},
}


@pytest.mark.parametrize("kind", VIEWS)
def test_memory_stays_away_while_any_view_lives_and_comes_back_with_the_last(pool: BodyPool, kind: str) -> None:
    view = pool.take(N, 0.0)
    where = address(view)
    kept = VIEWS[kind](view)
    del view
    others = [pool.take(N, 0.0) for _ in range(3)]
    assert where not in map(address, others)
    del kept
    assert address(pool.take(N, 0.0)) == where


def test_a_view_that_was_released_lets_go(pool: BodyPool) -> None:
    view = pool.take(N, 0.0)
    where = address(view)
    piece = view[5:]
    view.release()
    assert address(pool.take(N, 0.0)) != where
    piece.release()
    again = [address(pool.take(N, 0.0))]
    assert where in again


def test_memory_that_dies_in_another_thread_comes_back(pool: BodyPool) -> None:
    views = [pool.take(N, 0.0) for _ in range(20)]
    where = set(map(address, views))

    def drop(mine: list[memoryview]) -> None:
        while mine:
            mine.pop()

    threads = [threading.Thread(target=drop, args=(views[i::4],)) for i in range(4)]
    views.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del threads
    taken = [pool.take(N, 0.0) for _ in range(20)]
    assert set(map(address, taken)) == where


def test_threads_and_the_loop_never_hold_the_same_memory(pool: BodyPool) -> None:
    """Each borrower writes its own mark all over and finds nothing else when it looks again."""
    held: list[tuple[int, memoryview]] = []
    wrong: list[int] = []

    def check(mark: int, view: memoryview) -> None:
        if view.tobytes() != bytes((mark,)) * len(view):
            wrong.append(mark)

    for round_ in range(200):
        mark = round_ % 251
        view = pool.take(SMALLEST + (round_ % 3) * 10_000, 0.0)
        view[:] = bytes((mark,)) * len(view)
        held.append((mark, view))
        del view
        if len(held) > 5:
            thread = threading.Thread(target=check, args=held.pop(round_ % 5))
            thread.start()
            if round_ % 7 == 0:
                thread.join()
    for mark, view in held:
        check(mark, view)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon is False:
            thread.join()
    assert wrong == []


class Lazarus:
    """In a cycle, so that the collector finds it; what it holds is looked at once more, and kept, as it dies."""

    risen: memoryview | None = None

    def __init__(self, view: memoryview) -> None:
        self.view, self.me = view, self

    def __del__(self) -> None:
        Lazarus.risen = self.view


def test_memory_that_a_finalizer_brings_back_to_life_is_not_lent(pool: BodyPool) -> None:
    view = pool.take(N, 0.0)
    where = address(view)
    Lazarus(view)
    del view
    gc.collect()
    assert Lazarus.risen is not None
    assert address(pool.take(N, 0.0)) != where
    Lazarus.risen = None
    gc.collect()
    taken = [pool.take(N, 0.0) for _ in range(2)]
    assert where in map(address, taken)


@pytest.mark.parametrize("n", [1, 1000, SMALLEST - 1])
def test_small_memory_is_not_pooled(pool: BodyPool, n: int) -> None:
    view = pool.take(n, 0.0)
    assert (len(view), view.readonly, view.format) == (n, False, "B")
    del view
    pool.tick(0.0)
    assert pool.idle_bytes == 0


@pytest.mark.parametrize("n", [SMALLEST, SMALLEST + 1, N, 4 * MiB - 1, 4 * MiB, 4 * MiB + 1])
def test_pooled_memory_has_its_length_and_begins_at_a_page(pool: BodyPool, n: int) -> None:
    for _ in range(2):
        view = pool.take(n, 0.0)
        assert (len(view), view.readonly, view.format) == (n, False, "B")
        assert address(view) % mmap.PAGESIZE == 0
        view[0] = view[-1] = 7
        del view
        pool.tick(0.0)
    assert pool.idle_bytes == _size_of(n)


def test_sizes_waste_at_most_an_eighth_and_are_whole_pages() -> None:
    sizes = set()
    for n in (
        *range(SMALLEST, 4 * SMALLEST, 97),
        *(2**k + d for k in range(16, 31) for d in (-1, 0, 1) if 2**k + d >= SMALLEST),
    ):
        size = _size_of(n)
        assert n <= size < n + max(n // 8, mmap.PAGESIZE)
        assert size % mmap.PAGESIZE == 0
        assert _size_of(size) == size
        if SMALLEST <= n <= 2 * SMALLEST:
            sizes.add(size)
    assert len(sizes) == 9  # eight steps, and both ends


def test_bodies_of_about_one_size_share_memory_and_others_do_not(pool: BodyPool) -> None:
    where = address(pool.take(N, 0.0))
    pool.tick(0.0)
    bigger = pool.take(2 * N, 0.0)
    assert address(bigger) != where
    assert address(pool.take(N - 1000, 0.0)) == where


def test_no_more_is_kept_than_allowed() -> None:
    size = _size_of(N)
    pool = BodyPool(2 * size)
    views = [pool.take(N, 0.0) for _ in range(5)]
    assert pool.idle_bytes == 0
    views.clear()
    pool.tick(0.0)
    assert pool.idle_bytes == 2 * size
    views = [pool.take(N, 0.0) for _ in range(3)]
    assert pool.idle_bytes == 0
    assert len(set(map(address, views))) == 3


@pytest.mark.parametrize("keep", [0, _size_of(N) - 1])
def test_what_is_larger_than_allowed_is_not_kept_at_all(keep: int) -> None:
    pool = BodyPool(keep)
    pool.take(N, 0.0)
    pool.tick(0.0)
    assert pool.idle_bytes == 0


def test_idle_memory_goes_back_to_the_system_when_nobody_has_needed_any(pool: BodyPool) -> None:
    pool.take(N, 100.0)
    pool.tick(110.0)
    assert pool.idle_bytes == _size_of(N)
    pool.take(10, 109.0)  # not from the pool: this one does not count
    pool.tick(110.1)
    assert pool.idle_bytes == 0
    assert len(pool.take(N, 111.0)) == N


def test_memory_on_loan_is_not_freed_by_time_nor_by_the_end_of_the_pool() -> None:
    pool = BodyPool(MiB)
    view = pool.take(N, 0.0)
    view[:] = b"x" * N
    pool.tick(1000.0)
    del pool
    gc.collect()
    assert view.tobytes() == b"x" * N


def test_a_kernel_that_has_no_huge_pages_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *args: Any) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    assert len(BodyPool(0).take(8 * MiB, 0.0)) == 8 * MiB
