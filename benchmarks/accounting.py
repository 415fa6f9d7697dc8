"""Reads the CPU time and resident memory of another process, and pins it to a core."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

LINUX = sys.platform.startswith("linux")
_TICKS = os.sysconf("SC_CLK_TCK")


class UnknownCostError(Exception):
    """Raised if this platform does not report a figure of a process; the text names it."""


def cpu_seconds(pid: int) -> float:
    """User and system time in seconds of a process with all its threads, also those that have ended.

    Linux has a clock for it, in nanoseconds. Elsewhere `ps` reports it in hundredths or whole seconds: measure for several
    seconds there (`precision`).
    """
    if LINUX:
        # clock_getcpuclockid(3), which Python lacks: the complement of the pid, and 2 for user and system together.
        return time.clock_gettime((~pid << 3) | 2)
    return parse_cpu_time(_ps(pid, "time"))


def tree_cpu_seconds(pid: int) -> float:
    """CPU seconds of a process, of those that it has started, and of theirs. Those that have ended count in hundredths of a
    second, once their parent has waited for them. Elsewhere than on Linux, only the process itself counts."""
    seconds = cpu_seconds(pid)
    if LINUX:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return seconds
        seconds += (int(fields[13]) + int(fields[14])) / _TICKS
        for child in children(pid):
            with suppress(OSError):  # it has just ended, and its parent's share has not been read
                seconds += tree_cpu_seconds(child)
    return seconds


def children(pid: int) -> list[int]:
    """The processes that a process has started. Linux only."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def family(pid: int) -> list[int]:
    """A process and its descendants that live, itself first. Linux only."""
    found = [pid]
    for each in found:
        with suppress(OSError):  # it has just ended
            found += children(each)
    return found


def loop_seconds(pid: int) -> dict[int, float]:
    """The CPU time of the main thread, where the loop runs, of a process and each of its descendants, by pid. Linux only."""
    found = dict[int, float]()
    for each in family(pid):
        with suppress(OSError), open(f"/proc/{each}/task/{each}/schedstat") as times:
            found[each] = int(times.read().split()[0]) / 1e9
    return found


def precision() -> str:
    """The precision of CPU times here, as a text for readers of the figures."""
    if LINUX:
        return "CPU time as the kernel counts it, in nanoseconds"
    return "CPU time as ps prints it, in hundredths or whole seconds: only runs of several seconds mean something"


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, in bytes."""
    if LINUX:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    return int(_ps(pid, "rss")) * 1024


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs, in bytes; pages that it has in common with others count in proportion. 0 if
    the process has ended. Linux only. Pages of files are left out: their share changes when other processes begin or end."""
    if not LINUX:
        raise UnknownCostError(f"this platform ({sys.platform}) does not tell the anonymous memory of a process")
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            sizes = [line.split() for line in rollup]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(size[1]) * 1024 for size in sizes if size[0] in ("Pss_Anon:", "Pss_Shmem:"))


def _ps(pid: int, column: str) -> str:
    try:
        done = subprocess.run(["ps", "-o", f"{column}=", "-p", str(pid)], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise UnknownCostError(f"this platform ({sys.platform}) does not tell the {column} of another process") from None
    return done.stdout.strip()


def parse_cpu_time(text: str) -> float:
    """The seconds in the output of `ps -o time`: [[days-]hours:]minutes:seconds, with or without a fraction."""
    days, _, rest = text.rpartition("-")
    seconds = 0.0
    for part in rest.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + 86_400 * int(days or 0)


def cores() -> tuple[int, int] | None:
    """The core for servers and the core for load; None if processes cannot be pinned, or there is only one core."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[0], allowed[1]) if len(allowed) > 1 else None


def pin(pid: int, core: int) -> None:
    """Keeps a process on one core."""
    os.sched_setaffinity(pid, {core})


def allow_descriptors(wanted: int) -> None:
    """Lets this process, and those it starts, open that many descriptors, or as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
