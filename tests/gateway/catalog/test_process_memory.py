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

# As when long texts are read: several threads take blocks of some MiB, and small ones that stay between them.
PROGRAM = """
import sys, threading
from gateway.catalog.process_memory import give_back, resident_bytes, return_large_blocks

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
give_back(False)
print(resident_bytes() - before)
"""


def kept_after(**environment: str) -> tuple[int, int]:
    """Bytes by which a process is larger once all that was large has been freed, and once that has been given back."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, env={**os.environ, **environment}
    )
    freed, given_back = map(int, done.stdout.split())
    return freed, given_back


def test_large_blocks_return_when_they_are_freed_and_others_at_rest() -> None:
    freed, given_back = kept_after()
    assert freed < 28 * MiB  # four threads' blocks below 4 MiB
    assert given_back < 4 * 4 * MiB  # the ends of their arenas


def test_what_the_environment_tells_the_allocator_holds() -> None:
    assert kept_after(MALLOC_TRIM_THRESHOLD_=str(64 * MiB), MALLOC_MMAP_THRESHOLD_=str(32 * MiB))[0] > 32 * MiB


# As many connections do: it takes blocks too small for a mapping of their own, and keeps a few.
AT_WORK = """
import sys, time, trio, trio.testing
from gateway.catalog.process_memory import give_back_at_rest, resident_bytes

rests = []

def rest() -> None:
    rests.append(resident_bytes())

async def main() -> None:
    before = resident_bytes()
    async with trio.open_nursery() as nursery:
        if "gives" in sys.argv:
            nursery.start_soon(give_back_at_rest, rest)
            await trio.testing.wait_all_tasks_blocked()
        blocks = [bytes(2000) for _ in range(40_000)]
        kept = blocks[::400]
        del blocks
        until = time.process_time() + 1
        while time.process_time() < until:
            pass
        with trio.move_on_after(30 if "gives" in sys.argv else 3):
            while resident_bytes() - before > 8 * 2**20:
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    assert bool(rests) == ("gives" in sys.argv)
    print(resident_bytes() - before)

trio.run(main)
"""


@pytest.mark.parametrize("gives", [True, False])
def test_what_work_has_taken_goes_back_in_a_quiet_second(gives: bool) -> None:
    done = subprocess.run([sys.executable, "-c", AT_WORK, *["gives"] * gives], capture_output=True, check=True)
    assert (int(done.stdout) < 8 * MiB) is gives


# The start leaves objects, and a crowd comes: as many streams as fill the collector's youngest generation some hundred times.
SETTLED = """
import gc, sys
from gateway.catalog.process_memory import settle

if "chosen" in sys.argv:
    gc.set_threshold(700, 10, 12)
start = [[] for _ in range(1000)]
settle()
runs = []
gc.callbacks.append(lambda phase, info: runs.append(info["generation"]) if phase == "start" else None)
crowd = [[] for _ in range(600_000)]
print(gc.get_freeze_count() >= 1000, runs.count(2))
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="its collector has no full runs")
def test_full_runs_of_the_collector_are_rare_in_a_server_unless_somebody_has_chosen() -> None:
    frozen, usual = subprocess.run([sys.executable, "-c", SETTLED], capture_output=True, check=True).stdout.split()
    _, chosen = subprocess.run([sys.executable, "-c", SETTLED, "chosen"], capture_output=True, check=True).stdout.split()
    assert frozen == b"True"
    assert int(usual) <= 1
    assert int(chosen) >= 3
