"""Runs the cases: each figure in a process of its own, which is a copy of one that has imported everything.

`python -m benchmarks.counts.measure` reads an Order from its input and writes a line for each case. `python -m benchmarks
counts` starts it with a fixed hash seed.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import trio
from trio.testing import MockClock

from benchmarks.accounting import tree_cpu_seconds
from benchmarks.counts.cases import CASES, Case
from benchmarks.counts.ceilings import is_above
from benchmarks.counts.counters import COUNTERS, Counter, Counts, still
from benchmarks.counts.instructions import counted_instructions
from benchmarks.counts.lockstep import running
from gateway.testing.seeding import seeded

TRIES = 5
"""Runs of a figure, at most. Sets of objects grow by the addresses of what is in them, so some runs have an allocation more
or less. A ceiling is the median of all, and one run that keeps it is enough."""
BY_ADDRESS = ("allocations", "system calls")
"""The counters of which a ceiling needs more than one run. The other one, of system calls, has the kernel's own timing."""
TIMES = 8
GROWTH_ROUNDS = 2, 24
"""The least and the most."""


class CountError(Exception):
    """A case could not be counted; the text says why."""


# ---- counts


def counted(case: Case, counter: str) -> Counts:
    """The counts of one case by one counter, in this process."""
    with seeded(0):
        return trio.run(_counted, case, COUNTERS[counter], counter == "system calls", clock=MockClock())


async def _counted(case: Case, counter: Counter, sockets: bool) -> Counts:
    kept = scattered()
    async with running(case, sockets=sockets) as steps:
        await steps.take(case.warm)
        still()
        counts = await counter(lambda: steps.take(case.steps))
        kept.clear()
        return counts
    raise AssertionError


def scattered() -> list[bytes]:
    """Leaves free memory of every small size in pieces, in an order by chance, so that no two runs have objects at the same
    addresses, in any folder. Clear the list to free the rest too."""
    chance = random.SystemRandom()
    pieces = [bytes(size) for size in range(0, 480, 16) for _ in range(400 + chance.randrange(200))]
    chance.shuffle(pieces)
    del pieces[len(pieces) // 2 :]
    return pieces


def counters_of(case: Case) -> Iterator[str]:
    """The counters of a case that there are here."""
    for name in COUNTERS:
        if (name == "system calls" and not (case.sockets and sys.platform == "linux")) or (
            name == "allocations" and find_spec("memray") is None
        ):
            continue
        yield name


def all_counts(case: Case, ceilings: Mapping[str, int] | None) -> Counts:
    """All counts of a case: the least of as many runs as it takes to keep the ceilings; without ceilings, medians."""
    counts: Counts = {"units": case.units}
    for name in counters_of(case):
        tries: list[Counts] = []
        least: Counts = {}
        while len(tries) < TRIES:
            tries.append(in_a_copy(lambda name=name: counted(case, name)))  # type: ignore[misc]
            least = {figure: min(one[figure] for one in tries) for figure in tries[0]}
            if ceilings is not None and not any(
                is_above(figure, count, ceilings.get(figure, count), case.units) for figure, count in least.items()
            ):
                break
            if ceilings is None and name not in BY_ADDRESS:
                break
        medians = {figure: statistics.median_low(one[figure] for one in tries) for figure in tries[0]}
        counts |= medians if ceilings is None else least
    if not case.fresh:  # a connection that goes on holds more or less by where the count ends
        counts.pop("bytes kept", None)
    return counts


# ---- growth


def cost(case: Case, units: int) -> tuple[float, int | None]:
    """Microseconds of CPU of this process, with all that it starts, for one of so many units on one connection, and the
    instructions of one if the kernel counts them."""
    with seeded(0):
        return trio.run(_cost, case, units, clock=MockClock())


async def _cost(case: Case, units: int) -> tuple[float, int | None]:
    async with running(case) as steps:
        await steps.take(case.warm)
        client = await steps.opened(case.plan(units, in_flight=case.in_flight))
        with counted_instructions() as instructions:
            before = tree_cpu_seconds(os.getpid())
            await client.step(units)
            spent = tree_cpu_seconds(os.getpid()) - before
        told = instructions()
        return spent / units * 1e6, told and told // units
    raise AssertionError


def growth(case: Case, most: float) -> tuple[float | None, int | None]:
    """The cost of a unit among eight times as many beside one among `case.size`, the least of the rounds of each; and the
    instructions of a unit. None where it is not measured. There are more rounds while the ratio is above `most`."""
    if not case.size:
        return None, None
    few: list[tuple[float, int | None]] = []
    many: list[tuple[float, int | None]] = []
    ratio = most + 1
    while len(few) < GROWTH_ROUNDS[0] or (ratio > most and len(few) < GROWTH_ROUNDS[1]):
        few.append(in_a_copy(lambda: cost(case, case.size)))
        many.append(in_a_copy(lambda: cost(case, TIMES * case.size)))
        ratio = min(us for us, _ in many) / min(us for us, _ in few)
    told = [instructions for _, instructions in many if instructions]
    return ratio, min(told) if told else None


# ---- processes


def in_a_copy(work: Callable[[], Any]) -> Any:
    """Runs a function in a fork of this process, and returns its result by way of JSON. CountError if it fails."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(read)
            try:
                told = json.dumps({"result": work()})
                status = 0
            except BaseException:
                told = json.dumps({"error": traceback.format_exc()})
            with os.fdopen(write, "w") as out:
                out.write(told)
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    told = json.loads(text) if text else {"error": f"the process ended with status {status}"}
    if "error" in told:
        raise CountError(told["error"])
    return told["result"]


def main() -> None:
    order: dict[str, Any] = json.load(sys.stdin)
    ceilings: dict[str, dict[str, int]] | None = order["ceilings"]
    for name in order["names"]:
        case = CASES[name]
        told: dict[str, Any] = {"case": name}
        try:
            told["counts"] = all_counts(case, None if ceilings is None else ceilings.get(name, {}))
            ratio, instructions = growth(case, order["growth"])
            told |= {"growth": ratio, "instructions": instructions}
        except CountError as error:
            told["error"] = str(error)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
