"""The harness tells how connections ended and what does not hold: an attack that costs too much fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.accounting import family, loop_seconds
from benchmarks.good import Waits, summed
from benchmarks.load.connections import frame
from tests.attacks.attack import Attack, attacks
from tests.attacks.attacker import Ended
from tests.attacks.ears import HTTP1Ear, HTTP2Ear, WebSocketEar
from tests.attacks.run import MiB, Row, broken
from tests.attacks.table import as_csv, summary, text

ROOT = Path(__file__).parents[2]

GOODBYE = frame(4, 0, 0, b"") + frame(7, 0, 0, (9).to_bytes(4, "big") + (11).to_bytes(4, "big") + b"too many ping frames")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_goodbye_is_read_wherever_it_is_cut(size: int) -> None:
    ear = HTTP2Ear()
    said = frame(0, 1, 1, bytes(30)) + frame(3, 0, 3, (7).to_bytes(4, "big")) + GOODBYE
    for at in range(0, len(said), size):
        ear.take(said[at : at + size])
    assert (ear.last, ear.said) == ("goaway 11", "too many ping frames")
    assert ear.counts == {"data": 1, "rst 7": 1}
    assert ear.answered == 1
    assert ear.replies() == frame(4, 1, 0, b"")
    assert ear.replies() == b""


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_close_is_read_behind_its_handshake(size: int) -> None:
    ear = WebSocketEar()
    said = (
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n\x8a\x01a\x82\x7e\x01\x00"
        + bytes(256)
        + b"\x88\x08"
        + b"\x03\xf0too bad"[:8]
    )
    for at in range(0, len(said), size):
        ear.take(said[at : at + size])
    assert (ear.last, ear.said) == ("close 1008", "too ba")
    assert ear.counts == {"status 101": 1, "pong": 1, "data": 1, "close": 1}


def test_a_refused_handshake_is_an_end() -> None:
    ear = WebSocketEar()
    ear.take(b"HTTP/1.1 403 Forbidden\r\n\r\nnot from there")
    assert (ear.last, ear.said) == ("status 403", "not from there")


@pytest.mark.parametrize("size", [1, 9, 1000])
def test_statuses_of_many_answers_are_counted(size: int) -> None:
    ear, said = HTTP1Ear(), b"HTTP/1.1 200 OK\r\n\r\nyes" * 3 + b"HTTP/1.1 503 Busy\r\n\r\n"
    for at in range(0, len(said), size):
        ear.take(said[at : at + size])
    assert ear.counts == {"status 200": 3, "status 503": 1}
    assert ear.last == "status 503"


FLOOD = Attack(
    name="flood",
    what="",
    run=lambda attacker: None,
    ends="goaway 11",
    counters=("everywire_floods_total",),
    events=("flood",),
)
HELD = Row(
    attack="flood", collector=True, seed=0, seconds=1.0, good=(summed("", "kept", [0.01] * 50),), ends={"goaway 11": 3},
    endings=(Ended(by="goaway 11", frames=50, bytes=5000, seconds=0.2),), did={}, peak=MiB, after=MiB, cpu=0.3, log_bytes=100,
    log_lines={"flood": 3}, log_seconds=1.5, risen={'everywire_floods_total{kind="ping"}': 3.0}, tracebacks=(), alive=True, status=0, stop=0.1,
    events=frozenset({"flood"}),
)  # fmt: skip


def test_what_holds_is_no_failure() -> None:
    assert broken(FLOOD, HELD, times=True) == []
    assert broken(FLOOD, replace(HELD, ends={"goaway 11": 3, "young": 1})) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (replace(HELD, ends={"goaway 11": 2, "reset": 1}), "which should be goaway 11"),
        (replace(HELD, ends={"open": 1}), "which should be goaway 11"),
        (replace(HELD, ends={}), "ended with nothing"),
        (replace(HELD, ends={"young": 3}), "which should be goaway 11"),
        (replace(HELD, peak=33 * MiB), "the server grew by 33 MiB, of 32"),
        (replace(HELD, after=9 * MiB), "it is 9 MiB larger 15 s after"),
        (replace(HELD, after=9 * MiB, second=5 * MiB), "; the second round adds 5 MiB"),
        (replace(HELD, after=9 * MiB, second=0, large=("1 x bytes of 70 KiB",)), "; there are 1 x bytes of 70 KiB"),
        (replace(HELD, after=9 * MiB, second=0, large=("9 x builtins.set of 512 KiB",)), "; there are 9 x builtins.set"),
        (replace(HELD, alive=False, status=-9), "ended during the attack with status -9"),
        (replace(HELD, status=1), "after SIGTERM it ended with status 1"),
        (replace(HELD, stop=9.5), "9.5 s later"),
        (replace(HELD, tracebacks=("Traceback ...",)), "1 tracebacks in the log"),
        (replace(HELD, log_lines={"exchange": 30, "flood": 36}), "36 lines of 'flood' in the log, of 35"),
        (replace(HELD, risen={}), "everywire_floods_total has not risen"),
        (replace(HELD, events=frozenset()), "the log does not tell 'flood'"),
        (replace(HELD, good=(summed("", "kept", [0.01], ["reset"]),)), "1 good requests (kept) failed; reset"),
        (replace(HELD, good=(summed("", "kept", []),)), "no good request (kept) was answered"),
        (replace(HELD, attacker_failed="KeyError"), "the attack itself failed: KeyError"),
    ],
)
def test_what_does_not_hold_is_told(row: Row, said: str) -> None:
    (found,) = broken(FLOOD, row)
    assert said in found


def test_what_stays_is_the_allocators_where_a_second_round_adds_nothing_and_nothing_is_large() -> None:
    assert broken(FLOOD, replace(HELD, after=90 * MiB, second=3 * MiB), times=True) == []
    tables = ("1 x builtins.set of 512 KiB",)
    (said,) = broken(FLOOD, replace(HELD, after=90 * MiB, second=3 * MiB, large=tables), times=True)
    assert said.endswith("; there are 1 x builtins.set of 512 KiB")


def test_an_attack_may_owe_an_end_soon_after_sigterm() -> None:
    row = replace(HELD, stop=3.2)
    assert broken(FLOOD, row) == []
    assert broken(replace(FLOOD, stop=3.0), row) == ["after SIGTERM it ended with status 0, 3.2 s later"]


# In a process of its own: it walks over all that there is, which here is tens of thousands of tests.
_WALK = """
import gc
from tests.attacks.served import large_objects

class Pool:
    __slots__ = ("blocks",)

def large():
    gc.collect()  # the walk before may have met its own frame, which is a cycle then
    return set(large_objects())

before, pool = large(), Pool()
pool.blocks = [memoryview(bytearray(100_001))[7:]]
assert large() - before == {"builtins.bytearray of 97 KiB"}
pool.blocks = table = dict.fromkeys(range(30_000))
while table:
    table.popitem()  # which leaves the table as large as it was
assert any(kind.startswith("builtins.dict") for kind in large() - before)
"""


@pytest.mark.programs
def test_large_objects_are_found_wherever_something_leads_to_them() -> None:
    subprocess.run([sys.executable, "-c", _WALK], cwd=ROOT, check=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel is asked for the threads' CPU time")
def test_the_loops_work_is_told_of_a_process_and_its_descendants() -> None:
    before = loop_seconds(os.getpid())
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    os.sched_yield()
    assert loop_seconds(os.getpid())[os.getpid()] > before[os.getpid()]
    assert family(os.getpid())[0] == os.getpid()


def test_the_machines_speed_is_judged_where_it_is_asked_for() -> None:
    row = replace(HELD, ends={"goaway 11": 2, "open": 1})
    assert broken(FLOOD, row) == []
    (said,) = broken(FLOOD, row, times=True)
    assert "which should be goaway 11" in said
    row = replace(HELD, good=(Waits(load="", connection="kept", asked=9, median=0.1, p99=0.3, worst=0.3),))
    assert broken(FLOOD, row) == []
    assert broken(FLOOD, row, times=True) == ["p99 of good requests (kept) is 300 ms, of 250"]


def test_tables_tell_how_it_was_ended() -> None:
    machine = {"processor": "some", "cores": 2, "python": "CPython 3.12", "system": "Linux"}
    for table in (text([HELD]), as_csv([HELD], machine)):
        assert "goaway 11 x 3 (<= 50 frames, 0.20 s)" in table
        assert "10/10/10" in table


def test_the_summary_has_the_larger_figures_of_both_runs() -> None:
    machine = {"processor": "some", "cores": 2, "python": "CPython 3.12", "system": "Linux"}
    slow = Waits(load="", connection="kept", asked=9, median=0.1, p99=0.2, worst=0.3, failed=2)
    off = replace(HELD, collector=False, good=(slow,))
    lines = summary(as_csv([HELD, off], machine), {HELD.attack: "Frames."}).splitlines()
    assert lines[2:] == [f"| {HELD.attack} | Frames. | 200 | 300 | 2 | {HELD.after >> 20} |"]


def test_each_attack_says_what_it_does() -> None:
    found = attacks()
    assert all(attack.what.endswith(".") for attack in found.values()), found
