"""Notices while it lasts that one step keeps the event loop from everything else, and names whose it is.

The loop stamps the time ten times a second, by its coarse timer. A thread, woken about as often, looks at that stamp alone;
only when it is late does it look at the stack of the loop's thread, find the task whose step that is, and whom it works
for. A step that releases the interpreter (`time.sleep`, a read, a loop in Python) is named while it lasts. A C call that
holds the interpreter stops this thread as well: it is told afterwards, with the line at which the loop goes on.
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
_HELD = 0.1  # seconds that the thread itself comes late, where others merely have the interpreter in turns
_QUIET = 10.0  # seconds between two lines about one model
_GROWN = 10.0  # a block that lasts so many times as long is told once more
_STACK = 12  # lines

_OURS = (f"{Path(__file__).parents[1]}{os.sep}", *(f"{path}{os.sep}" for path in (*models.__path__, *protocols.__path__)))
_MODELS = tuple(f"{Path(path) / 'library'}{os.sep}" for path in models.__path__)
_TRIO = f"{Path(trio.__file__).parent}{os.sep}"
_PYTHON = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))  # below those, at times

Whose: TypeAlias = "Callable[[trio.lowlevel.Task], tuple[str, str]]"
"""The model that a task works for, and the id of its exchange; empty where there is none."""


@final
@dataclass(slots=True)
class Blocks:
    """The number of steps that kept the loop, and their seconds, by model; an empty name: the gateway's own code."""

    count: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class _Step:
    """The step that the loop's thread was in."""

    task: trio.lowlevel.Task | None
    model: str
    exchange: str
    at: str
    stack: list[str]


@final
class LoopWatch:
    """Watches one event loop from a thread of its own, between `watching` and its end. Made and entered on that loop."""

    def __init__(
        self, limit: float, whose: Whose, blocks: Blocks, late: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """`limit`: seconds that a step may take. `whose` is asked in the thread, and counts in `blocks`."""
        self._late = late
        self._limit, self._whose, self._blocks = limit, whose, blocks
        self._beat = 0.0
        self._over = threading.Event()
        self._said: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The thread lives as long as the block."""
        self._loop, self._root = threading.get_ident(), trio.lowlevel.current_root_task()
        self._beat = time.monotonic()
        thread = threading.Thread(target=self._watch, name="everywire loop watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(_AGAIN)  # at most: it may be logging, to a handler of the embedder's

    async def beat_until(self, due: float) -> None:
        """Sleeps until then, on Trio's clock, and stamps the time meanwhile; `late` is told how late each stamp came."""
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
            # a thread that was kept as well saw nothing of it
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
        hint = "a def runs in a thread; an async def awaits, or calls trio.to_thread.run_sync"
        log.warning("event loop blocked", extra={**facts, "hint": hint if step.model else "", "stack": step.stack})

    def _look(self) -> _Step:
        """The step that the loop's thread is in now."""
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
            model=model if author is not None else "",  # the gateway's own work for it is not the model's
            exchange=exchange,
            at=_place(author) if author is not None else stack[0] if stack else "",
            stack=stack,
        )

    def _unnamed(self, step: _Step) -> _Step:
        return _Step(task=step.task, model="", exchange="", at=step.at, stack=step.stack)


def _collected() -> int:
    """The number of full garbage collections so far."""
    return int(gc.get_stats()[2]["collections"])


def _task_of(root: trio.lowlevel.Task | None, frames: list[FrameType]) -> tuple[trio.lowlevel.Task | None, list[FrameType]]:
    """The task that runs these frames, and which of them are its own, the innermost first; None where it is none's, or the
    loop goes on meanwhile."""
    running, tasks = set(frames), [] if root is None else [root]
    try:
        while tasks:
            task = tasks.pop()
            outermost = getattr(task.coro, "cr_frame", None)
            if outermost in running:
                return task, frames[: frames.index(outermost) + 1]
            for nursery in list(task.child_nurseries):
                tasks += list(nursery.child_tasks)
    except RuntimeError:  # it changes
        pass
    return None, []


def _authors(frames: list[FrameType]) -> FrameType | None:
    """The innermost frame of an author's own code, in the folder of the first that is neither ours nor Trio's nor
    Python's: libraries that it calls lie elsewhere. None where there is no such frame."""
    foreign = [frame for frame in frames if not _is_brought(frame)]
    if not foreign:
        return None
    file = foreign[-1].f_code.co_filename  # a word such as <stdin> for code that was typed in, or made
    folder = f"{Path(file).parent}{os.sep}"
    return next(frame for frame in foreign if frame.f_code.co_filename == file or _is_any(frame, folder))


def _is_brought(frame: FrameType) -> bool:
    ours = _is_any(frame, *_OURS) and not _is_any(frame, *_MODELS)
    return ours or _is_any(frame, _TRIO, "<frozen ") or (_is_any(frame, *_PYTHON) and not _is_any(frame, *_PACKAGES))


def _is_any(frame: FrameType, *folders: str) -> bool:
    return frame.f_code.co_filename.startswith(folders)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
