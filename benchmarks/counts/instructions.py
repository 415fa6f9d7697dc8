"""Counts the instructions of this process, where the kernel and the machine can: what `perf stat` asks for."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CALLS = {"x86_64": 298, "aarch64": 241}
"""perf_event_open(2) by machine."""
_HARDWARE, _INSTRUCTIONS = 0, 1
_SIZE = 64
"""PERF_ATTR_SIZE_VER0."""
_NO_KERNEL_NOR_HYPERVISOR = 1 << 5 | 1 << 6


@contextmanager
def counted_instructions(kind: int = _HARDWARE, event: int = _INSTRUCTIONS) -> Iterator[Callable[[], int | None]]:
    """Yields a function that returns the count of the block so far, of this thread in user mode. It returns None where the
    kernel does not count."""
    descriptor = _opened(kind, event)
    try:
        yield lambda: None if descriptor is None else int.from_bytes(os.read(descriptor, 8), "little")
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _opened(kind: int, event: int) -> int | None:
    number = _CALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return None
    attributes = struct.pack("<IIQQQQQ", kind, _SIZE, event, 0, 0, 0, _NO_KERNEL_NOR_HYPERVISOR).ljust(_SIZE, b"\0")
    descriptor = ctypes.CDLL(None).syscall(number, ctypes.c_char_p(attributes), 0, -1, -1, 0)
    return descriptor if descriptor >= 0 else None
