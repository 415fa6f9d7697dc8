"""Frames of an exception, and which of them are the author's: not those of everywire and Trio, nor Python's beside them.

An exception that leaves a thread or a batch must keep no frame alive (`models.blocking.detached`). Its frames then stand in
a note, as text for any log, and as facts for ours (`Origin`). An exception of another process has a text (`ToldElsewhere`).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar, final

import trio

FRAMES = 200
"""The most frames of an exception that are kept: the first, and the innermost."""
_FIRST = 20
E = TypeVar("E", bound=BaseException)


def _folders(*packages: str) -> Iterator[str]:
    """The folders of our packages: beside this one, or each where it was imported from."""
    for name in packages:
        yield os.path.join(_ROOT, name)
        found = getattr(sys.modules.get(name), "__file__", None)
        if found:
            yield os.path.dirname(os.path.abspath(found))


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOT, _TRIO = os.path.dirname(_HERE), os.path.dirname(os.path.abspath(trio.__file__))
_OURS = tuple(os.path.join(folder, "") for folder in _folders("gateway", "models", "protocols"))
_MODELS = tuple(os.path.join(_HERE, name, "") for name in ("library", "backends"))  # models, as an author's are
_TRIOS = (os.path.join(_TRIO, ""), os.path.join(os.path.dirname(_TRIO), "outcome", ""))
_PYTHON = tuple(os.path.join(path, "") for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# These raise exceptions that were kept as values: their frames go on in the Origin.
_THROWERS = {(os.path.join(_HERE, "blocking.py"), name) for name in ("in_thread", "throw")}

Frames = Sequence[traceback.FrameSummary]


@final
class Origin(str):
    """A note with the frames that an exception had when it was detached from them."""

    __slots__ = ("frames",)
    frames: Frames


@final
class ToldElsewhere(str):
    """A note with the whole text of the exception in the process that raised it. It is shown in place of the exception."""

    __slots__ = ()


def blamed(error: E, call: Any) -> E:
    """Gives an exception about a result of an author's code the place of that code, as if it had been raised there. Raise it
    by `models.blocking.throw`."""
    call = call.func if isinstance(call, functools.partial) else call
    call = inspect.unwrap(call if hasattr(call, "__code__") or inspect.ismethod(call) else type(call).__call__)
    code = getattr(call, "__code__", None)
    if code is not None and not is_ours(code.co_filename):
        origin = Origin(f'File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}')
        origin.frames = [traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)]
        error.add_note(origin)
    return error


def is_ours(path: str) -> bool:
    """True for a file of everywire, except its models."""
    return path.startswith(_OURS) and not path.startswith(_MODELS)


def is_authors(path: str) -> bool:
    """True for a file of the author: none of everywire, Trio and Python."""
    return not is_ours(path) and not path.startswith(_TRIOS) and _other(path) == "author"


def frames_of(error: BaseException) -> Frames:
    """Returns the frames of an exception, the innermost last, through the threads and batches that it came through."""
    own: list[traceback.FrameSummary] = []
    if error.__traceback__ is not None:
        own = list(traceback.extract_tb(error.__traceback__, limit=-FRAMES))
        if len(own) == FRAMES:  # the first ones tell how it began
            own = [*traceback.extract_tb(error.__traceback__, limit=_FIRST), *own[_FIRST:]]
    if own and (own[-1].filename, own[-1].name) not in _THROWERS:
        return own
    origin = next((note for note in reversed(notes_of(error)) if isinstance(note, Origin)), None)
    return own if origin is None else [*own, *origin.frames][-FRAMES:]


def notes_of(error: BaseException) -> list[str]:
    """Returns the notes of an exception (PEP 678) that are text."""
    notes = getattr(error, "__notes__", ())
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list | tuple) else []


def authors(frames: Frames) -> list[bool]:
    """True for each frame of the author. The standard library's belong to everywire beside a frame of it."""
    kinds = ["ours" if is_ours(f.filename) or f.filename.startswith(_TRIOS) else _other(f.filename) for f in frames]
    for order in (range(1, len(kinds)), range(len(kinds) - 2, -1, -1)):
        step = -1 if order.step > 0 else 1
        for at in order:
            if kinds[at] == "python" and kinds[at + step] == "ours":
                kinds[at] = "ours"
    return [kind != "ours" for kind in kinds]


def _other(path: str) -> str:
    inside = path.startswith(_PYTHON) and not any(part in path for part in _PACKAGES)
    return "python" if inside or path.startswith("<frozen ") else "author"


def author_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Returns the innermost frame of the author in an exception; None if there is none."""
    frames = frames_of(error)
    return next((f for f, own in zip(reversed(frames), reversed(authors(frames)), strict=True) if own), None)


def folded(frames: Frames) -> Iterator[str]:
    """Yields the lines of frames: the author's as Python writes them, and one line for each run of others. The run that led
    to the author's first frame stands behind the last."""
    runs = [(own, [f for f, _ in run]) for own, run in groupby(zip(frames, authors(frames), strict=True), lambda f: f[1])]
    callers = runs.pop(0)[1] if len(runs) > 1 and not runs[0][0] else []
    for at, (own, run) in enumerate(runs):
        if own:
            yield from written(run)
        else:
            raised = f" (raised in {_place(run[-1])})" if 0 < at == len(runs) - 1 else ""
            yield f"  ... {_counted(run)}{raised}"
    if callers:
        yield f"  ... called by {_counted(callers)}"


def written(frames: Frames) -> Iterator[str]:
    """Yields the lines of frames as Python writes them."""
    for text in traceback.StackSummary.from_list(list(frames)).format():
        yield from text.rstrip("\n").split("\n")


def _counted(run: Frames) -> str:
    whose = "everywire" if any(is_ours(frame.filename) for frame in run) else "Trio"
    return f"{len(run)} frame{'s' if len(run) > 1 else ''} of {whose}"


def _place(frame: traceback.FrameSummary) -> str:
    path = frame.filename
    root = _ROOT if path.startswith(_OURS) else os.path.dirname(_TRIO)
    name = os.path.relpath(path, root) if path.startswith(root) else os.path.basename(path)
    return f"{frame.name}, line {frame.lineno} of {name.removesuffix('.py').replace(os.sep, '.')}"
