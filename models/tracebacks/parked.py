"""Frames of code that waits: of tasks, of coroutines and of threads, and the author's line among them.

Nothing is noted while code runs: all of it is read when somebody asks why a model says nothing.
"""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import trio

from models.tracebacks.frames import folded, is_authors, is_ours

FRAMES = 200
"""The most frames that are read of one task."""
TASKS = 1000
"""The most tasks that are read at once."""
_STACK = 4000  # characters of a stack, the innermost
_AT_ITS_END = "_nested_child_finished"  # Trio's function in which a task waits for the tasks of its nursery
_TRIOS = 4  # the innermost frames of such a task that are Trio's: this one and those that it awaits


class Parked(NamedTuple):
    """The place where code waits."""

    at: str = ""
    """The author's innermost line, as `file:line in function`; empty if no frame is the author's."""
    stack: str = ""
    """The lines of the whole stack, as a traceback has them, the innermost last."""


def await_frames(waiting: Any) -> list[FrameType]:
    """The frames of a coroutine that waits, the innermost first, by Trio's `Task.iter_await_frames`. They go on in the
    coroutine that code of everywire continues by hand, as `gateway.core.runner.resumed` does: its variable `work`."""
    frames: list[FrameType] = []
    while waiting is not None and len(frames) < FRAMES:
        of = SimpleNamespace(coro=waiting)  # all that Trio's method reads of a task: asyncio's tasks have none such
        frames += [frame for frame, _ in trio.lowlevel.Task.iter_await_frames(of)]  # type: ignore[arg-type]
        waiting = local(frames[-1], "work") if frames and is_ours(frames[-1].f_code.co_filename) else None
        if not inspect.iscoroutine(waiting):
            break
    return frames[: -FRAMES - 1 : -1]


def stacks_of(task: trio.lowlevel.Task) -> Iterator[list[FrameType]]:
    """Yields the frames of a task, and those of each task in its nurseries, each with the innermost first. A task that
    waits for those comes after them. Call it on the loop, of a task that waits."""
    yield from _stacks(task, [TASKS])


def _stacks(task: trio.lowlevel.Task, left: list[int]) -> Iterator[list[FrameType]]:
    left[0] -= 1
    own = await_frames(task.coro)
    waits = any(frame.f_code.co_name == _AT_ITS_END for frame in own[:_TRIOS])
    if not waits:
        yield own
    for child in [child for nursery in task.child_nurseries for child in nursery.child_tasks]:
        if left[0] > 0:
            yield from _stacks(child, left)
    if waits:
        yield own


def thread_frames(thread: int) -> list[FrameType]:
    """The frames that a thread runs now, the innermost first; none for a thread that is over."""
    frames, frame = list[FrameType](), sys._current_frames().get(thread)
    while frame is not None and len(frames) < FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames


def parked(stacks: Iterable[list[FrameType]]) -> Parked:
    """The place of the first stack that has a frame of the author; of the first stack at all if none has."""
    first: list[FrameType] = []
    for frames in stacks:
        if (author := author_of(frames)) is not None:
            return Parked(place_of(author), _text(frames))
        first = first or frames
    return Parked("", _text(first))


def author_of(frames: list[FrameType]) -> FrameType | None:
    """The innermost frame of the author's own code; the innermost frame is the first. The author's folder is that of the
    outermost frame that belongs neither to everywire nor to Trio or Python: the libraries that it calls lie elsewhere. None
    without such a frame."""
    foreign = [frame for frame in frames if is_authors(frame.f_code.co_filename)]
    if not foreign:
        return None
    file = foreign[-1].f_code.co_filename  # for typed or generated code, a word such as <stdin>
    folder = f"{Path(file).parent}{os.sep}"
    return next(frame for frame in foreign if (path := frame.f_code.co_filename) == file or path.startswith(folder))


def place_of(frame: FrameType) -> str:
    """`file:line in function`."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def local(frame: FrameType, name: str) -> Any:
    """The value of a local variable of a function that may run in another thread; None if it has none of that name. No value
    is kept alive longer by this."""
    code = frame.f_code
    if name not in code.co_varnames and name not in code.co_freevars and name not in code.co_cellvars:
        return None
    values = frame.f_locals
    value = values.get(name)
    if type(values) is dict:
        values.clear()  # a copy, which CPython keeps with the frame before 3.13
    return value


def _text(frames: list[FrameType]) -> str:
    lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in reversed(frames))
    return "\n".join(folded(lines))[-_STACK:] if frames else ""
