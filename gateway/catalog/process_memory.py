"""What memory this process has, and how it is given back to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from typing import NoReturn

import trio

from models.blocking import in_thread

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_LARGE = 1024 * 1024
_SAID = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_LOOK = 1.0  # seconds from one look at the work done to the next
_WORK = 0.5  # seconds of CPU, of which a trim's few milliseconds are little
_QUIET = 0.25  # of the time


def resident_bytes() -> int:
    """Bytes of memory that this process has; 0 where the system does not tell (it has no /proc)."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def share_one_arena() -> None:
    """Has all threads of this process allocate from one arena, where the C library is glibc. It gives each its own
    otherwise, and of those alone `malloc_trim` cannot give back the end: up to 64 MiB in each that has loaded a model. For
    whoever owns a process that unloads models, before it has threads."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def return_large_blocks() -> None:
    """Has each block of a mebibyte or more, and free memory at an arena's end beyond that, return to the system when it is
    freed, where the C library is glibc and the environment does not tell it otherwise (`mallopt(3)`). By itself glibc takes
    the largest block that was ever freed for the size of what to keep, up to 32 MiB, and 64 in each arena: what a few large
    texts have taken once stays for good. Whoever allocates such a block pays for pages that the kernel clears; whole bodies
    do not, which come from a `BodyPool`. For whoever owns the process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _SAID):
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE)


def give_back(has_cycles: bool) -> None:
    """Gives back what is left of a model: cycles to Python's allocator, and free memory to the system where libc can. The
    collector stops all threads while it looks through everything there is, so it looks only where it has to."""
    if has_cycles:
        gc.collect()
    _trim()


async def give_back_at_rest() -> NoReturn:
    """Gives free memory back to the system where libc can, in each quiet second after work, until it is cancelled: what many
    connections, or a few large texts, have taken does not stay. For whoever owns the process."""
    before, worked = time.process_time(), 0.0
    while True:
        await trio.sleep(_LOOK)
        before, spent = (now := time.process_time()), now - before
        worked += spent
        if worked >= _WORK and spent <= _QUIET * _LOOK:
            await in_thread(_trim)  # which takes milliseconds, and lets others run
            before, worked = time.process_time(), 0.0


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
