"""Memory of a process that owns itself goes back to the system when it is freed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another"),
]

MiB = 1024 * 1024

# what long texts are read in: several threads, blocks of some mebibytes, and small ones that stay between them
PROGRAM = """
import sys, threading
from gateway.catalog.process_memory import resident_bytes, return_large_blocks

return_large_blocks()
kept, meet = [], threading.Barrier(4)

def read() -> None:
    text = b"x" * (20 << 20)
    del text
    texts = []
    for size in range(2, 10):
        texts.append(b"x" * (size << 20))
        kept.append(b"y" * 2000)
    meet.wait()

before = resident_bytes()
threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident_bytes() - before)
"""


def kept_after(**environment: str) -> int:
    """Bytes by which a process is larger once all that was large has been freed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, env={**os.environ, **environment}
    )
    return int(done.stdout)


def test_large_blocks_return_when_they_are_freed() -> None:
    assert kept_after() < 8 * MiB


def test_what_the_environment_tells_the_allocator_holds() -> None:
    assert kept_after(MALLOC_TRIM_THRESHOLD_=str(64 * MiB), MALLOC_MMAP_THRESHOLD_=str(32 * MiB)) > 32 * MiB
