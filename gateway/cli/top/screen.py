"""The screen of `everywire top`: looks again and again, draws, and obeys keys, until it is left."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from gateway.cli.top.frame import SORTS, WAITS, Look, Shown, frame
from gateway.operator.client import PlaneClient

_STREAMS = 200  # that are asked for
_MARGIN = 10  # seconds by which the history that is asked for is longer
_ENTER, _LEAVE, _HOME, _REST = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[J"
_END_OF_LINE = "\x1b[K\r\n"


def look(plane: PlaneClient) -> tuple[Look | None, Look]:
    """The figures at the begin of the time that the verdict covers, None if that is the server's start, and the present
    answers of the plane."""
    streams = plane.ask("GET", f"/streams?sort=waited&limit={_STREAMS}")["streams"]
    now = Look(stats=plane.ask("GET", "/stats"), models=plane.ask("GET", "/models")["models"], streams=streams)
    seconds = now.stats["verdict"]["seconds"]
    if seconds >= now.stats["uptime"]:
        return None, now
    points = plane.ask("GET", f"/history?seconds={seconds + _MARGIN:.0f}")["points"]
    return begin_of(points, now.stats["at"] - seconds), now


def begin_of(points: Sequence[Mapping[str, Any]], at: float) -> Look | None:
    """The point of the history that is nearest to a time, as a look; None if there is none."""
    point = min(points, key=lambda point: abs(point["at"] - at), default=None)
    if point is None:
        return None
    models = {
        name: {**one, "first": {"buckets": one["first"]}, "duration": {"buckets": one["duration"]}}
        for name, one in point["models"].items()
    }
    return Look(stats={"at": point["at"], "models": models}, models=(), streams=())


def once(plane: PlaneClient) -> list[str]:
    """One frame."""
    return frame(*look(plane), Shown(), width=shutil.get_terminal_size((160, 24)).columns, height=10_000)


def watch(plane: PlaneClient, interval: float) -> None:
    """Draws a frame each `interval` seconds until `q` is pressed."""
    (before, now), shown = look(plane), Shown()
    with _cbreak() as pressed:
        while True:
            size = shutil.get_terminal_size()
            lines = frame(before, now, shown, width=size.columns, height=size.lines)
            sys.stdout.write(_HOME + _END_OF_LINE.join(lines) + _REST)
            sys.stdout.flush()
            key = pressed(interval)
            if key == "q":
                return
            if key:
                shown = obeyed(key, shown)
            elif not shown.paused:
                before, now = look(plane)


def obeyed(key: str, shown: Shown) -> Shown:
    """The choices after a key was pressed; a key that means nothing changes none."""
    match key:
        case "s":
            return replace(shown, sort=SORTS[(SORTS.index(shown.sort) + 1) % len(SORTS)])
        case "f":
            return replace(shown, waits_for=WAITS[(WAITS.index(shown.waits_for) + 1) % len(WAITS)])
        case "p":
            return replace(shown, paused=not shown.paused)
    return shown


@contextmanager
def _cbreak() -> Iterator[Callable[[float], str]]:
    """A screen of its own, and what waits so many seconds for a key: empty if none comes. At the end all is as before."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        # not by the stream: it would keep what else was typed from `select`
        return os.read(descriptor, 1).decode("latin-1") or "q" if ready else ""

    tty.setcbreak(descriptor)
    sys.stdout.write(_ENTER)
    try:
        yield pressed
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
