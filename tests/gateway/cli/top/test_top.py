"""`everywire top`: a frame of two looks that were recorded, the keys, and the program before a plane that answers them."""

from __future__ import annotations

import copy
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gateway.cli.main import program
from gateway.cli.top.frame import SORTS, WAITS, Look, Shown, frame
from gateway.cli.top.screen import obeyed

LOOKS = json.loads((Path(__file__).parent / "looks.json").read_text())
"""Two looks, 2 seconds apart, at a server whose client reads nothing of `fast`, while `shout` has 2 slots for 5 calls."""
BEFORE, NOW = (Look(**look) for look in LOOKS)
PATIENCE = 60.0


def lines_of(
    before: Look | None = BEFORE, now: Look = NOW, *, width: int = 120, height: int = 40, **shown: Any
) -> list[str]:
    return frame(before, now, Shown(**shown), width=width, height=height)


def test_a_frame_says_where_time_goes_and_who_waits() -> None:
    head, said, parts, _, *rest = lines_of()
    assert head.startswith("everywire 0.1.0  http://127.0.0.1:21580  READY ")
    assert head.endswith(" up 3.3s")
    assert len(head) == 120
    assert said == "shout is full: 2 of 2 slots, 1 queued, 3.5 s for a slot"
    bars = "model ████████████ 48  slot █████████ 36  room ████ 15"
    assert parts == f"{bars}    5 live  1.0 req/s  9.9 items/s  0.0 % err"
    assert rest[0].split() == ["MODEL", "STATE", "SLOTS", "QUEUED", "REQ/S", "FIRST", "p50/p99", "p99", "ERR"]
    assert rest[3].split() == ["shout", "ready", "2/2", "1", "1.0", "2.5s/2.5s", "2.5s", "0.0%"]
    assert rest[6].split() == ["STREAM", "MODEL", "WAITS", "FOR", "AGE", "ITEMS", "OUT", "PEER"]
    assert rest[9].split() == ["1cb55ac09", "fast", "room", "3.0s", "3.0s", "93", "186.3", "KiB", "127.0.0.1"]
    assert rest[-1].startswith("5 streams: all, by waited   q quit")


def test_without_an_earlier_look_rates_are_those_since_the_begin() -> None:
    flaky = next(line.split() for line in lines_of(None) if line.startswith("flaky "))
    assert flaky[4:] == ["0.6", "10ms/25ms", "25ms", "100.0%"]


def test_a_server_that_has_begun_anew_has_no_rate_below_zero() -> None:
    anew = copy.deepcopy(LOOKS[0])
    anew["stats"]["at"] = NOW.stats["at"] + 1
    anew["stats"]["models"]["flaky"]["endings"]["model-error"] = 1
    assert " 0.0 req/s  0.0 items/s  0.0 % err" in lines_of(NOW, Look(**anew))[2]


def test_a_server_that_is_not_ready_says_why() -> None:
    models = [{**NOW.models[0], "restart_in": 8.2}, {"name": "unloaded", "state": "unloaded", "reason": ""}]
    stats = {**NOW.stats, "ready": False, "reasons": ["fast: restarting"]}
    head, *rest = lines_of(now=Look(stats=stats, models=models, streams=[]))
    assert "NOT READY: fast: restarting, fast restarting in 8 s" in head
    assert ["unloaded", "unloaded"] in [line.split() for line in rest]


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (300, 100)])
def test_no_frame_is_larger_than_its_screen(width: int, height: int) -> None:
    lines = lines_of(width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_what_peers_choose_cannot_drive_a_terminal() -> None:
    streams = copy.deepcopy(list(NOW.streams))
    streams[0]["model"] = "\x1b[2J\n" + "m" * 200
    stats = {**NOW.stats, "verdict": {**NOW.stats["verdict"], "sentence": "\x1b[2J fails"}}
    assert all(line.isprintable() for line in lines_of(now=Look(stats=stats, models=NOW.models, streams=streams)))


def test_streams_are_chosen_and_sorted() -> None:
    *_, stream, foot = lines_of(waits_for="slot")
    assert (stream.split()[:3], foot[:29]) == (["1cb55ac06", "shout", "slot"], "1 stream: those that wait for")
    assert lines_of(sort="bytes_out")[11].startswith("1cb55ac09  fast")
    assert lines_of(paused=True)[-1].endswith("PAUSED")


@pytest.mark.parametrize(
    ("key", "field", "values"), [("s", "sort", SORTS), ("f", "waits_for", WAITS), ("p", "paused", (False, True))]
)
def test_a_key_goes_through_what_can_be_chosen(key: str, field: str, values: tuple[Any, ...]) -> None:
    shown, seen = Shown(), []
    for _ in values:
        seen.append(getattr(shown, field))
        shown = obeyed(key, shown)
    assert (tuple(seen), shown) == (values, Shown())
    assert obeyed("x", Shown()) == Shown()


# -- the program ---------------------------------------------------------------------------------------------------

EVENTS = [("models", []), ("stats", {"version": "1"}), ("opened", {}), ("stats", {"version": "2"})]


class Plane(BaseHTTPRequestHandler):
    """Answers with the looks that were recorded, the second one for ever."""

    looks = 0
    points: tuple[Any, ...] = ()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        look = LOOKS[min(Plane.looks, 1)]
        if path == "/models":
            Plane.looks += 1  # it is asked for last
        answers: dict[str, Any] = {"/history": {"points": Plane.points}}
        answers |= {"/stats": look["stats"], "/models": {"models": look["models"]}, "/streams": {"streams": look["streams"]}}
        if path == "/streams/events":
            body = b"".join(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode() for name, data in EVENTS)
        else:
            body = json.dumps(answers[path]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None: ...


@pytest.fixture
def plane() -> Iterator[str]:
    Plane.looks = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Plane) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_one_frame_is_printed_where_no_terminal_is(plane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    result = CliRunner().invoke(program, ["top", "--url", plane])
    assert (result.exit_code, result.output.splitlines()) == (0, lines_of(None, BEFORE, height=1000))


def test_the_columns_cover_the_time_of_the_verdict(plane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is older than its verdict has the figures of that time in its history."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    now, kept = copy.deepcopy(LOOKS[1]), LOOKS[0]["stats"]
    now["stats"] |= {"uptime": 100.0, "verdict": now["stats"]["verdict"] | {"seconds": now["stats"]["at"] - kept["at"]}}
    models = {
        name: {**one, "first": cut(one["first"]["buckets"]), "duration": cut(one["duration"]["buckets"])}
        for name, one in kept["models"].items()
    }
    older = {"at": kept["at"] - 2, "models": {}}
    monkeypatch.setattr(
        Plane, "points", (older, {"at": kept["at"], "models": models}, {"at": now["stats"]["at"], "models": {}})
    )
    monkeypatch.setattr("tests.gateway.cli.top.test_top.LOOKS", [now, now])
    result = CliRunner().invoke(program, ["top", "--url", plane, "--once"])
    assert (result.exit_code, result.output.splitlines()) == (0, lines_of(BEFORE, Look(**now), height=1000))


def cut(buckets: list[int]) -> list[int]:
    """Buckets as a history has them: those at the end that are 0 are left out."""
    return buckets[: max((number for number, n in enumerate(buckets, 1) if n), default=0)]


def test_as_json_it_prints_the_figures_with_each_look(plane: str) -> None:
    result = CliRunner().invoke(program, ["top", "--url", plane, "--json"])
    assert [json.loads(line) for line in result.output.splitlines()] == [{"version": "1"}, {"version": "2"}]
    result = CliRunner().invoke(program, ["top", "--url", plane, "--json", "--once"])
    assert [json.loads(line) for line in result.output.splitlines()] == [{"version": "1"}]


def test_without_a_plane_it_says_what_to_do() -> None:
    result = CliRunner().invoke(program, ["top"])
    assert (result.exit_code, result.output[:34]) == (2, "Error: No operator plane to ask. S")
    result = CliRunner().invoke(program, ["top", "--url", "http://127.0.0.1:1"])
    assert (result.exit_code, "no operator plane answers" in result.output) == (4, True)


@pytest.mark.programs
def test_in_a_terminal_it_draws_until_q_and_leaves_the_screen_as_it_was(plane: str, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "gateway", "top", "--url", plane, "--interval", "0.1"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    text = ""
    try:
        for wanted, key in [("by waited", b"s"), ("by age", b"f"), ("wait for slot", b"q"), ("\x1b[?1049l", b"")]:
            deadline = time.monotonic() + PATIENCE
            while wanted not in text:
                ready, _, _ = select.select([master], [], [], max(deadline - time.monotonic(), 0))
                assert ready, text
                text += os.read(master, 65536).decode()
            os.write(master, key)
        assert process.wait(PATIENCE) == 0
        assert text.startswith("\x1b[?1049h\x1b[?25l")
    finally:
        process.kill()
        process.wait()
        os.close(master)
