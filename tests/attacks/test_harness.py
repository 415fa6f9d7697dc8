"""The harness tells how connections ended and what does not hold: an attack that costs too much fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.good import Waits, summed
from benchmarks.load.connections import frame
from tests.attacks.attack import Attack, attacks
from tests.attacks.attacker import Ended
from tests.attacks.ears import HTTP1Ear, HTTP2Ear, WebSocketEar
from tests.attacks.run import MiB, Row, broken
from tests.attacks.table import as_csv, summary, text

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
