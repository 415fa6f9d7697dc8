"""Notices a step that blocks the event loop, while it lasts, and names its model.

The loop stamps the time ten times a second, by its coarse timer. A thread wakes about as often and checks only that stamp.
If the stamp is late, the thread reads the stack of the loop's thread, and finds the task of the step and its model. A step
that releases the interpreter (`time.sleep`, a read, a loop in Python) is logged while it lasts. A C call that holds the
interpreter stops this thread too: it is logged afterwards, with the line at which the loop goes on.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TypeAlias, final

import trio

import models
import protocols

log = logging.getLogger("gateway")

PULSE = 0.1
"""Seconds between two stamps of the loop."""
_AGAIN = 0.05  # seconds between two looks at a loop that is late
_HELD = 0.1  # seconds: a thread that wakes less late than this was only waiting for its turn of the interpreter
_QUIET = 10.0  # seconds between two lines about one model
_GROWN = 10.0  # a block is logged again when it lasts this many times as long
_STACK = 12  # the most lines of a stack

_OURS = (f"{Path(__file__).parents[1]}{os.sep}", *(f"{path}{os.sep}" for path in (*models.__path__, *protocols.__path__)))
_MODELS = tuple(f"{Path(path) / 'library'}{os.sep}" for path in models.__path__)
_TRIO = f"{Path(trio.__file__).parent}{os.sep}"
_PYTHON = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))  # these may lie inside _PYTHON

Whose: TypeAlias = "Callable[[trio.lowlevel.Task], tuple[str, str]]"
"""Returns the model that a task works for, and the id of its exchange; empty texts if there is none."""


@final
@dataclass(slots=True)
class Blocks:
    """The number of steps that blocked the loop, and their seconds, by model. An empty name: the gateway's own code."""

    count: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the loop's thread."""

    task: trio.lowlevel.Task | None
    model: str
    exchange: str
    at: str
    stack: list[str]


@final
class LoopWatch:
    """Watches one event loop from a thread, inside `watching`. It must be made and entered on that loop."""

    def __init__(
        self, limit: float, whose: Whose, blocks: Blocks, late: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """`limit`: the seconds that a step may take. The thread calls `whose`, and counts longer steps in `blocks`. `late`:
        see `beat_until`."""
        self._late = late
        self._limit, self._whose, self._blocks = limit, whose, blocks
        self._beat = 0.0
        self._over = threading.Event()
        self._said: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Runs the thread during the block."""
        self._loop, self._root = threading.get_ident(), trio.lowlevel.current_root_task()
        self._beat = time.monotonic()
        thread = threading.Thread(target=self._watch, name="everywire loop watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(_AGAIN)  # not longer: the thread may be inside a log handler of the embedder

    async def beat_until(self, due: float) -> None:
        """Sleeps until `due`, on Trio's clock, and stamps the time meanwhile. Calls `late` with the seconds by which each
        stamp was late."""
        while (now := trio.current_time()) < due:
            self._beat = time.monotonic()
            next_due = min(due, now + PULSE)
            await trio.sleep_until(next_due)
            self._late(trio.current_time() - next_due)
        self._beat = time.monotonic()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            now, collected = time.monotonic(), _collected()
            planned = max(self._beat + PULSE + self._limit, now + _AGAIN)
            if self._over.wait(planned - now):
                return
            now, beat = time.monotonic(), self._beat
            if now - beat - PULSE < self._limit:
                continue
            # if this thread was kept from running too, it did not see the step
            held = now - planned > max(self._limit / 2, _HELD)
            step, cause = self._look(), "one step"
            if held:
                cause = "the interpreter was held, or the process did not run"
                if _collected() != collected:
                    step, cause = self._unnamed(step), "a garbage collection"
            elif not self._over.wait(_AGAIN) and self._beat == beat and (again := self._look()).task is not step.task:
                step, cause = self._unnamed(again), "many steps"
            self._tell_until_over(step, cause, beat)
            del step

    def _tell_until_over(self, step: _Step, cause: str, beat: float) -> None:
        model, due = step.model, 0.0
        said = False
        while self._beat == beat or not due:
            lasts = time.monotonic() - beat - PULSE
            if lasts >= due:
                first, due = not due, lasts * _GROWN
                if not first or self._may_say(model):
                    said = True
                    self._say(step, cause, lasts)
            if self._over.wait(_AGAIN):
                break
        seconds = max(self._beat - beat - PULSE, self._limit)
        count, sums = self._blocks.count, self._blocks.seconds
        sums[model] = sums.get(model, 0.0) + seconds
        count[model] = count.get(model, 0) + 1
        if said:
            log.warning("event loop runs again", extra={"model": model, "seconds": round(seconds, 3)})

    def _may_say(self, model: str) -> bool:
        now = time.monotonic()
        if now - self._said.get(model, -_QUIET) < _QUIET:
            self._unsaid[model] = self._unsaid.get(model, 0) + 1
            return False
        self._said[model] = now
        return True

    def _say(self, step: _Step, cause: str, seconds: float) -> None:
        facts = {"model": step.model, "id": step.exchange, "seconds": round(seconds, 3), "cause": cause, "at": step.at}
        if unsaid := self._unsaid.pop(step.model, 0):
            facts["unreported"] = unsaid
        hint = "a plain def runs in a thread; an async def must await, or call trio.to_thread.run_sync"
        log.warning("event loop blocked", extra={**facts, "hint": hint if step.model else "", "stack": step.stack})

    def _look(self) -> _Step:
        """Returns the step that the loop's thread runs now."""
        frame = sys._current_frames().get(self._loop)
        frames: list[FrameType] = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        task, own = _task_of(self._root, frames)
        author = _authors(own)
        model, exchange = ("", "") if task is None else self._whose(task)
        stack = [_place(frame) for frame in frames[:_STACK]]
        return _Step(
            task=task,
            model=model if author is not None else "",  # the gateway's own work for a model does not count as the model's
            exchange=exchange,
            at=_place(author) if author is not None else stack[0] if stack else "",
            stack=stack,
        )

    def _unnamed(self, step: _Step) -> _Step:
        return _Step(task=step.task, model="", exchange="", at=step.at, stack=step.stack)


def _collected() -> int:
    """Returns the number of full garbage collections so far."""
    return int(gc.get_stats()[2]["collections"])


def _task_of(root: trio.lowlevel.Task | None, frames: list[FrameType]) -> tuple[trio.lowlevel.Task | None, list[FrameType]]:
    """Returns the task that runs these frames, and those of them that are its own, the innermost first. None if no task
    does, or the loop goes on meanwhile."""
    running, tasks = set(frames), [] if root is None else [root]
    try:
        while tasks:
            task = tasks.pop()
            outermost = getattr(task.coro, "cr_frame", None)
            if outermost in running:
                return task, frames[: frames.index(outermost) + 1]
            for nursery in list(task.child_nurseries):
                tasks += list(nursery.child_tasks)
    except RuntimeError:  # the set of tasks has changed: the loop goes on
        pass
    return None, []


def _authors(frames: list[FrameType]) -> FrameType | None:
    """Returns the innermost frame of the model author's own code. The author's folder is that of the outermost frame that
    belongs neither to the gateway nor to Trio or Python; the libraries that it calls lie elsewhere. None without such a
    frame."""
    foreign = [frame for frame in frames if not _is_brought(frame)]
    if not foreign:
        return None
    file = foreign[-1].f_code.co_filename  # for typed or generated code, a word such as <stdin>
    folder = f"{Path(file).parent}{os.sep}"
    return next(frame for frame in foreign if frame.f_code.co_filename == file or _is_any(frame, folder))


def _is_brought(frame: FrameType) -> bool:
    ours = _is_any(frame, *_OURS) and not _is_any(frame, *_MODELS)
    return ours or _is_any(frame, _TRIO, "<frozen ") or (_is_any(frame, *_PYTHON) and not _is_any(frame, *_PACKAGES))


def _is_any(frame: FrameType, *folders: str) -> bool:
    return frame.f_code.co_filename.startswith(folders)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
