"""Measures the memory of this process, and returns free memory to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import trio

from models.blocking import in_thread

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_LARGE = 4 * 1024 * 1024
_SAID = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_LOOK = 1.0  # seconds between two checks of the CPU time used
_WORK = 0.5  # seconds of CPU time before a trim, whose few milliseconds are little beside it
_QUIET = 0.25  # the most CPU seconds per second that count as quiet
_LITTLE, _STILL = 0.1, 0.05  # both, for a server that is almost idle: the end of a crowd is little work
_USUALLY, _RARELY = 10, 50  # middle runs of the garbage collector before a full one may come
_FEW = 20_000  # objects more than at the start that a collection may find: it takes 2 ms then, in which the loop stands


def resident_bytes() -> int:
    """Returns the resident bytes of this process; 0 on a system without /proc."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def share_one_arena() -> None:
    """Makes all threads of this process allocate from one arena, if the C library is glibc. By default glibc gives each
    thread its own, and `malloc_trim` cannot return the end of those: up to 64 MiB for each thread that has loaded a model.
    To be called only by the owner of a process that unloads models, before it starts threads."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def return_large_blocks() -> None:
    """Makes glibc return each freed block of 4 MiB or more to the system, and free memory beyond 4 MiB at an arena's end.
    `give_back_at_rest` returns smaller ones. It does nothing with another C library, or if the environment sets these
    values (`mallopt(3)`).

    By default glibc raises both limits to the largest block ever freed, up to 32 MiB, and 64 MiB at an arena's end. A block
    that goes back costs its next owner the time in which the kernel clears its pages: with limits of 1 MiB, a JSON request
    of 640 KB had 380 page faults, with these it has none. Whole bodies come from a `BodyPool`. To be called only by the
    owner of the process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _SAID):
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE)


def settle() -> None:
    """Hides the objects of the start from the garbage collector, as they live as long as the process, and makes its full
    runs rarer. A full run looks at all objects while every client waits: for 0.2 s beside 8,000 streams. Cycles that die
    young are found as before; others may wait up to five times as long, or for the next quiet second. To be called only by
    the owner of the process, once it serves."""
    gc.collect()
    gc.freeze()
    young, middle, old = gc.get_threshold()
    if old == _USUALLY:  # else somebody has chosen it
        gc.set_threshold(young, middle, _RARELY)


def give_back(has_cycles: bool) -> None:
    """Frees what is left of a model: reference cycles if `has_cycles`, and then returns free memory to the system if libc
    can. The garbage collector stops all threads while it examines every object, so it runs only if it has to."""
    if has_cycles:
        gc.collect()
    _trim()


async def give_back_at_rest(rest: Callable[[], None]) -> NoReturn:
    """Returns free memory to the system if libc can, in a quiet second after work, until it is cancelled. The memory of many
    connections, or of a few large texts, does not stay. Before that it calls `rest`, to make tables small again. To be run
    only by the owner of the process."""
    before, worked, blocks = time.process_time(), 0.0, sys.getallocatedblocks()
    while True:
        await trio.sleep(_LOOK)
        before, spent = (now := time.process_time()), now - before
        worked += spent
        if (worked >= _WORK and spent <= _QUIET * _LOOK) or (worked >= _LITTLE and spent <= _STILL * _LOOK):
            rest()
            # CPython keeps thousands of freed tuples, each of which can hold an arena of 1 MiB, until a full collection.
            if gc.isenabled() and sys.getallocatedblocks() - blocks < _FEW:
                gc.collect()
            await in_thread(_trim)  # which takes milliseconds, without the GIL
            before, worked = time.process_time(), 0.0


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
