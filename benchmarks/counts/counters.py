"""Counts of the steps of a case: calls, bytecodes, allocations, system calls. Each counter has its own run.

Nothing of the client's task counts, but for allocations: no tool tells them by task, and the client's are the same each
time. Bytecodes and allocations are also those of Trio, h2 and all else that the gateway uses.
"""

from __future__ import annotations

import gc
import select
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, MethodDescriptorType
from typing import Any, TypeAlias

import trio

from benchmarks.trips import Trip

Work: TypeAlias = Callable[[], Awaitable[None]]
Counts: TypeAlias = dict[str, int]
Counter: TypeAlias = Callable[[Work], Awaitable[Counts]]

_OF_SYSTEM = (socket.socket.__bases__[0], select.epoll) if hasattr(select, "epoll") else (socket.socket.__bases__[0],)
_NO_CALLS = frozenset({"fileno", "gettimeout", "detach", "fromfd", "settimeout"})
"""Methods of sockets and epoll sets that do not enter the kernel each time."""
_OF_POSIX = frozenset(
    {"read", "write", "readv", "writev", "pread", "pwrite", "open", "close", "pipe", "pipe2", "dup", "dup2", "fstat",
     "stat", "eventfd", "eventfd_read", "eventfd_write", "fork", "posix_spawn", "waitpid", "waitid", "kill", "sched_yield",
     "sendfile", "memfd_create", "ftruncate", "lseek", "getrandom", "urandom"}
)  # fmt: skip


async def calls(work: Work) -> Counts:
    """Calls of the gateway's functions, the modules of those, and how often the path goes on in another room."""
    trip = Trip()
    sys.setprofile(trip.seen)
    try:
        await work()
    finally:
        sys.setprofile(None)
    told = trip.told()
    return {name: told[name] for name in ("calls", "modules", "changes of room")}


async def bytecodes(work: Work) -> Counts:
    """Bytecodes that the interpreter executes."""
    client, current, count = trio.lowlevel.current_task(), trio.lowlevel.current_task, 0

    def one(code: CodeType, offset: int) -> None:
        nonlocal count
        try:
            count += current() is not client
        except RuntimeError:  # between two tasks
            count += 1

    await _watched(sys.monitoring.events.INSTRUCTION, one, work)
    return {"bytecodes": count}


async def system_calls(work: Work) -> Counts:
    """Calls of methods of sockets and epoll sets, and of functions of `os`, that enter the kernel."""
    client, current, count = trio.lowlevel.current_task(), trio.lowlevel.current_task, 0
    known: dict[object, bool] = {}

    def one(code: CodeType, offset: int, function: object, first: object) -> None:
        nonlocal count
        match function:
            case MethodDescriptorType():
                key: object = function
            case BuiltinFunctionType():
                key = (type(function.__self__), function.__name__)
            case _:
                return
        enters = known.get(key)
        if enters is None:
            enters = known[key] = _enters_the_kernel(function)
        if enters:
            try:
                count += current() is not client
            except RuntimeError:
                count += 1

    await _watched(sys.monitoring.events.CALL, one, work)
    return {"system calls": count}


def _enters_the_kernel(function: Any) -> bool:
    name = function.__name__
    if isinstance(function, MethodDescriptorType):
        return issubclass(function.__objclass__, _OF_SYSTEM) and name not in _NO_CALLS
    owner = function.__self__
    return (isinstance(owner, _OF_SYSTEM) and name not in _NO_CALLS) or (
        getattr(owner, "__name__", "") == "posix" and name in _OF_POSIX
    )


async def _watched(event: int, callback: Callable[..., None], work: Work) -> None:
    watch = sys.monitoring
    watch.use_tool_id(watch.PROFILER_ID, "counts")
    watch.register_callback(watch.PROFILER_ID, event, callback)
    watch.set_events(watch.PROFILER_ID, event)
    try:
        await work()
    finally:
        watch.set_events(watch.PROFILER_ID, 0)
        watch.free_tool_id(watch.PROFILER_ID)


async def allocations(work: Work) -> Counts:
    """Allocations, the bytes that they asked for, and the bytes of those that were not freed."""
    import memray

    kinds = memray.AllocatorType
    free = {kinds.FREE, kinds.MUNMAP, kinds.PYMALLOC_FREE}
    with tempfile.TemporaryDirectory(prefix="everywire-counts-") as folder:
        file = Path(folder) / "allocations"
        with memray.Tracker(file, trace_python_allocators=True):
            await work()
        count = size = 0
        held: dict[int, int] = {}
        with memray.FileReader(file) as reader:
            for record in reader.get_allocation_records():
                if record.allocator in free:
                    held.pop(record.address, None)
                else:
                    count, size = count + 1, size + record.size
                    held[record.address] = record.size
    return {"allocations": count, "bytes allocated": size, "bytes kept": sum(held.values())}


COUNTERS: Mapping[str, Counter] = {
    "calls": calls,
    "bytecodes": bytecodes,
    "allocations": allocations,
    "system calls": system_calls,
}


def still() -> None:
    """Puts all that there is out of the collector's reach, and the collector to rest: its runs would come by chance."""
    gc.collect()
    gc.freeze()
    gc.disable()
