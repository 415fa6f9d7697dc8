"""Runs one attack: a server, good clients and the attacker in three processes; what came of it, and what does not hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

from benchmarks.good import LIMIT, Waits
from benchmarks.servers import ROOT
from tests.attacks.attack import Attack
from tests.attacks.attacker import Ended
from tests.attacks.served import DRAIN, GOODBYES, Served, events, records, serving, tracebacks

MiB = 1 << 20
SETTLED = 15.0
"""Seconds that the server has for giving back what an attack has cost."""
NOTHING = 4 * MiB
"""A second round that adds less has added nothing: the pages in use differ by some from run to run."""
_ROUNDS = 3
_LATE = 30.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of one attack."""

    attack: str
    collector: bool
    seed: int
    seconds: float
    good: tuple[Waits, ...]
    ends: dict[str, int]
    """How many of the attack's connections or requests ended in which way."""
    endings: tuple[Ended, ...]
    """The details of each ending; of the first ones only if they are many."""
    did: dict[str, int]
    peak: int
    """Bytes by which the server grew at most."""
    after: int
    """And by which it is larger once it has settled, or 15 s later."""
    cpu: float
    """Seconds of CPU that the server used meanwhile, good clients' share included."""
    log_bytes: int
    log_lines: dict[str, int]
    """By event; without those of completed exchanges."""
    log_seconds: float
    """How long they were counted: the attack's seconds, and what a slow machine adds."""
    risen: dict[str, float]
    """Samples of the attack's counters that have risen, and by how much."""
    tracebacks: tuple[str, ...]
    alive: bool
    status: int | None
    """The server's exit status after SIGTERM."""
    stop: float
    """Seconds from SIGTERM to its end."""
    events: frozenset[str] = field(default=frozenset())
    attacker_failed: str = ""
    second: int | None = None
    """Bytes that a further round of the attack has added to what stays, where more stays than the attack's limit; else None."""
    processes: int = 1
    """The number of processes of the server: each limits its own log."""
    large: tuple[str, ...] = ()
    """Objects of 64 KiB and more that are there after it, and not in a server that has answered good clients only."""


def run(
    attack: Attack,
    *,
    seconds: float,
    seed: int = 0,
    collector: bool = True,
    to_the_end: bool = False,
    processes: int = 1,
) -> Row:
    """One run, of at least the seconds that the attack needs. `to_the_end`: SIGTERM comes while the attack is made again, rather
    than after it. If more stays than the attack's limit, further rounds show whether that adds to it."""
    seconds = max(seconds, attack.least)
    if processes > 1:
        attack = replace(attack, settings=(*attack.settings, f"listen.processes={processes}"))
    with serving(attack, collector=collector) as served, _good(served, attack.fields) as good:
        counted = served.samples() if attack.counters else {}
        began, before, cpu, log_before = time.monotonic(), served.resident(), served.cpu(), len(served.log())
        served.forget_peak()
        attacker = _attacking(attack, served, seconds=seconds, seed=seed)
        waits = good(seconds)
        failed, told = _told(attacker, seconds)
        cpu, peak = served.cpu() - cpu, max(0, served.peak() - before)
        alive, log, log_seconds = served.alive, served.log()[log_before:], time.monotonic() - began
        risen = _risen(attack.counters, counted, served.samples() if alive and attack.counters else {})
        after = _settled(served, before + attack.after * MiB) - before
        second, large = None, Counter[str]()
        if alive and after > attack.after * MiB:
            second = _further_rounds(attack, served, before + after, seconds=seconds, seed=seed)
            large = _large(served, _usual(attack, collector))
        again = _attacking(attack, served, seconds=seconds, seed=seed + 1) if to_the_end and alive else None
        if again is not None:
            time.sleep(min(1.0, seconds / 2))
        stop = served.terminate() if alive else 0.0
        if again is not None:
            again.kill()
            again.communicate()
        everything = served.log()
    return Row(
        attack=attack.name, collector=collector, seed=seed, seconds=seconds, good=waits, ends=told["ends"],
        endings=tuple(Ended(**ended) for ended in told["endings"]), did=told["did"], peak=peak, after=after, cpu=cpu,
        log_bytes=len(log), log_lines=_lines(log), log_seconds=log_seconds, risen=risen,
        tracebacks=tuple(tracebacks(everything)), alive=alive, status=served.status, stop=stop,
        events=frozenset(events(everything)), attacker_failed=failed, second=second, processes=processes,
        large=tuple(f"{count} x {kind}" for kind, count in large.items()),
    )  # fmt: skip


def _further_rounds(attack: Attack, served: Served, most: int, *, seconds: float, seed: int) -> int:
    """The bytes that the same once more adds to what stays, beyond those `most`. CPython's share of it differs by some from
    round to round, and does not rise: if a round adds something, there is one more, and the least of them counts."""
    added = list[int]()
    while (not added or min(added) > NOTHING) and len(added) < _ROUNDS:
        _told(_attacking(attack, served, seconds=seconds, seed=seed), seconds)
        resident = _settled(served, most)
        added.append(resident - most)
        most = max(most, resident)
    return min(added)


def _large(served: Served, usual: Counter[str]) -> Counter[str]:
    """The large objects that are there and unusual, once there are none, or the time to settle is over."""
    until = time.monotonic() + SETTLED
    while (found := served.large() - usual) and time.monotonic() < until:
        time.sleep(0.5)
    return found


def _usual(attack: Attack, collector: bool) -> Counter[str]:
    """The large objects of a server of this attack that has answered good clients only."""
    with serving(attack, collector=collector) as fresh, _good(fresh, attack.fields):
        return fresh.large()


@contextmanager
def _good(served: Served, fields: Sequence[tuple[str, str]]) -> Iterator[Any]:
    """Good clients that are ready: a function that lets them ask for so many seconds, and tells their waits."""
    command = [sys.executable, "-m", "benchmarks.good", str(served.port), "--pid", str(served.pid)]
    command += [part for name, value in fields for part in ("--field", name, value)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        try:
            assert stdout.readline() == "ready\n", (
                f"the good clients have no answer before the attack: {served.log()[-2000:]}"
            )

            def asked(seconds: float) -> tuple[Waits, ...]:
                stdin.write(f"{seconds}\n")
                stdin.flush()
                return tuple(
                    Waits(**{**found, "failures": tuple(found["failures"])}) for found in json.loads(stdout.readline())
                )

            yield asked
        finally:
            process.kill()


def _attacking(attack: Attack, served: Served, *, seconds: float, seed: int) -> subprocess.Popen[str]:
    """The attacker, which has begun."""
    command = [sys.executable, "-m", "tests.attacks.attacker", attack.name, "--port", str(served.port)]
    command += ["--operator-port", str(served.operator), "--metrics-port", str(served.metrics)]
    command += ["--tls-port", str(served.tls_port), "--seconds", str(seconds), "--seed", str(seed)]
    command += ["--folder", str(served.folder)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _told(attacker: subprocess.Popen[str], seconds: float) -> tuple[str, dict[str, Any]]:
    """The attacker's failure, empty if there is none, and its report."""
    try:
        output, errors = attacker.communicate(timeout=seconds + _LATE)
    except subprocess.TimeoutExpired:
        attacker.kill()
        output, errors = "", f"it was not over {_LATE:g} s after its time; {attacker.communicate()[1]}"
    if attacker.returncode or not output:
        return errors[-2000:] or f"status {attacker.returncode}", {"ends": {}, "endings": [], "did": {}}
    told: dict[str, Any] = json.loads(output)
    return "", told


def _risen(counters: Sequence[str], before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    mine = [sample for sample in after if sample.startswith(counters)] if isinstance(counters, tuple) else []
    return {sample: after[sample] - before.get(sample, 0.0) for sample in mine if after[sample] > before.get(sample, 0.0)}


def _lines(log: str) -> dict[str, int]:
    counted = Counter(event for event, fields in records(log) if event != "exchange" or fields.get("ending") != "complete")
    return dict(counted.most_common())


def _settled(served: Served, small: int) -> int:
    """The resident bytes, once they are at most `small`, or the time to settle is over."""
    until = time.monotonic() + SETTLED
    while (resident := served.resident()) > small and time.monotonic() < until:
        time.sleep(0.1)
    return resident


def broken(attack: Attack, row: Row, *, times: bool = False) -> list[str]:
    """The broken promises, in words. `times`: also those that depend on the machine."""
    said: list[str] = []
    if row.attacker_failed:
        said.append(f"the attack itself failed: {row.attacker_failed}")
    if not row.alive:
        said.append(f"the server ended during the attack with status {row.status}")
    if row.tracebacks:
        said.append(f"{len(row.tracebacks)} tracebacks in the log; the first: {row.tracebacks[0]}")
    if row.peak > attack.growth * MiB:
        said.append(f"the server grew by {row.peak / MiB:.0f} MiB, of {attack.growth}")
    if row.after > attack.after * MiB:
        larger = f"it is {row.after / MiB:.0f} MiB larger {SETTLED:g} s after the attack, of {attack.after}"
        if row.second is None or row.second > NOTHING:
            said.append(larger + (f"; the second round adds {row.second / MiB:.0f} MiB" if row.second is not None else ""))
        elif row.large:
            said.append(f"{larger}; there are {', '.join(row.large[:5])}")
    if row.alive and (row.status not in (0, 3) or row.stop > (attack.stop or DRAIN + GOODBYES + 2)):
        said.append(f"after SIGTERM it ended with status {row.status}, {row.stop:.1f} s later")
    allowed_lines = row.processes * (attack.lines + 10 * row.log_seconds)
    said += [
        f"{count} lines of {event!r} in the log, of {allowed_lines:.0f}"
        for event, count in row.log_lines.items()
        if count > allowed_lines
    ]
    for counter in attack.counters:
        if not any(sample.startswith(counter) for sample in row.risen):
            said.append(f"{counter} has not risen")
    said += [f"the log does not tell {event!r}" for event in attack.events if event not in row.events]
    if attack.ends:
        wanted = "open|young" if attack.ends == "open" else attack.ends
        others = [by for by in row.ends if not re.fullmatch(wanted, by)]
        allowed = {"young"} if times else {"young", "open"}  # the time of the end depends on the machine too
        if len(others) == len(row.ends) or not allowed.issuperset(others):
            said.append(f"its connections ended with {row.ends or 'nothing'}, which should be {attack.ends}")
    if attack.fair:
        said += [
            f"{waits.failed} good requests ({waits.connection}) failed; {waits.failures[0]}"
            for waits in row.good
            if waits.failed
        ]
        said += [f"no good request ({waits.connection}) was answered" for waits in row.good if not waits.asked]
        if times:
            said += [
                f"p99 of good requests ({waits.connection}) is {waits.p99 * 1000:.0f} ms, of {LIMIT * 1000:g}"
                for waits in row.good
                if waits.p99 > LIMIT
            ]
    return said
