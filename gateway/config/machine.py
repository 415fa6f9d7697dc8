"""Memory and cores that this process may use: the machine's, or less if its control group, such as a container's, allows
less.

Files of control groups are as Linux documents them: version 2 in Documentation/admin-guide/cgroup-v2.rst (memory.max,
cpu.max), version 1 in cgroup-v1/memory.rst (memory.limit_in_bytes) and scheduler/sched-bwc.rst (cpu.cfs_quota_us).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


@cache
def usable_memory() -> int:
    """Bytes of memory that this process may use, measured once."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *memory_limits(_ROOT)])


@cache
def usable_cores() -> int:
    """Cores that this process may keep busy, at least 1 and rounded down, measured once."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([affinity, *core_limits(_ROOT)])))


def memory_limits(root: Path) -> Iterator[int]:
    """The memory limit, in bytes, of each control group of this process that has one. `root` is the root of the file system.
    An unreadable or invalid value is no limit."""
    for folder in _folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (limit := _number(_read(folder / name))) is not None:
                yield limit


def core_limits(root: Path) -> Iterator[float]:
    """The cores that each control group of this process may keep busy, if it has a quota: its quota of time in each
    period."""
    for folder in _folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        pairs = [(quota, period), (_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))]
        for allowed, of in ((_number(one), _number(other)) for one, other in pairs):
            if allowed and of:
                yield allowed / of


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the control groups that this process is in, for a controller: its own, and those above, whose limits
    hold too. A container may see its own as the topmost one, whatever its path is outside."""
    mounts = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = mounts  # version 2: one hierarchy for all
        elif controller in controllers.split(","):
            mount = next((m for m in (mounts / controllers, mounts / controller) if m.is_dir()), mounts / controller)
        else:
            continue
        inner = PurePosixPath(path.lstrip("/"))
        if ".." not in inner.parts:  # a path with .. is of a group that this process cannot see
            yield from (mount / part for part in (inner, *inner.parents))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _number(text: str) -> int | None:
    """A number above 0; `max` and -1, which stand for no limit, are none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 and int(text) else None
