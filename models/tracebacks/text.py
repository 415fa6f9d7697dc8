"""The text of an exception as log, console and processes show it: the author's frames first, everywire's folded to a line.

If no frame in it is the author's, the mistake is everywire's own, and all frames are shown. An exception of everywire's
types, such as the end of a process, then says all in its text, and is shown without frames. The cause of a chain comes
first, as in Python's own tracebacks. Exceptions that came from a thread, a batch or another process look as if raised here.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

from models.tracebacks.frames import Origin, ToldElsewhere, author_frame, authors, folded, frames_of, notes_of, written

TEXT = 16 * 1024
"""The most characters of the text of an exception: its end."""
_MESSAGE = 2000  # characters of one exception's message and notes
_CHAIN = 8  # exceptions of a chain, the last
_MEMBERS = 8  # members of a group
_FRAME = re.compile(r'^[ |]*File "([^"\n]+)", line (\d{1,9}), in (.+)$', re.MULTILINE)
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"


def text_of(error: BaseException, *, most: int = TEXT) -> str:
    """Returns the text of an exception, without a newline at its end. It never raises for what the exception contains."""
    try:
        whole = not any(map(_is_authors, _tree(error)))
        text = "\n".join(_lines(error, whole=whole, deep=0))
    except Exception:  # an author's class may do anything when it is looked at
        text = f"{type(error).__name__} (it cannot be shown)"
    return text if len(text) <= most else f"...{text[3 - most :]}"


def explains(error: BaseException) -> BaseException | None:
    """Returns the exception if its text says more than its type and message, which a log line has already; else None."""
    try:
        tree = _tree(error)
        return error if len(tree) > 1 or any(map(_is_authors, tree)) or not _is_of_ours(error) else None
    except Exception:
        return error


def origin_of(error: BaseException) -> tuple[str, int, str] | None:
    """Returns file, line and function of the author's innermost frame, in the exception or in what led to it; None if there
    is no such frame. That of another process stands in a note."""
    for one in reversed(_tree(error)):
        if (frame := author_frame(one)) is not None:
            return frame.filename, frame.lineno or 0, frame.name
        for note in reversed(notes_of(one)):
            if not isinstance(note, Origin) and (found := _FRAME.findall(note[-TEXT:])):
                file, line, name = found[-1]
                return file, int(line), name
    return None


def keep_frames(error: BaseException) -> None:
    """Notes the frames of an exception, of its causes and of its members, which are about to lose them. A note replaces an
    older one."""
    for one in _tree(error):
        frames = frames_of(one)
        notes = [note for note in notes_of(one) if not isinstance(note, Origin)]
        if frames:
            shown = folded(frames) if any(authors(frames)) else written(frames)
            lines = ["In its thread:", "Traceback (most recent call last):", *shown, *_message(one, [])]
            origin = Origin("\n".join(lines)[:TEXT])
            origin.frames = frames
            one.__notes__ = [*notes, origin]


def _tree(error: BaseException) -> list[BaseException]:
    """The exception, those that led to it and the members of groups: the first causes first, each once."""
    found: dict[int, BaseException] = {}
    _look(error, found, 0)
    return list(found.values())


def _look(error: BaseException, found: dict[int, BaseException], deep: int) -> None:
    for link, _ in _chain(error):
        if id(link) not in found and deep < _CHAIN:
            found[id(link)] = link
            for member in _members(link):
                _look(member, found, deep + 1)


def _chain(error: BaseException) -> list[tuple[BaseException, str]]:
    """The exception behind those that led to it, each with the words between it and the next."""
    chain, seen, one = [(error, "")], {id(error)}, error
    while len(chain) < _CHAIN:
        before, words = (one.__cause__, _CAUSE) if one.__cause__ is not None else (one.__context__, _CONTEXT)
        if before is None or id(before) in seen or (one.__cause__ is None and one.__suppress_context__):
            break
        chain.append((before, words))
        seen.add(id(before))
        one = before
    return chain[::-1]


def _members(error: BaseException) -> tuple[BaseException, ...]:
    return tuple(error.exceptions[:_MEMBERS]) if isinstance(error, BaseExceptionGroup) else ()


def _elsewhere(error: BaseException) -> str:
    return next((note for note in reversed(notes_of(error)) if isinstance(note, ToldElsewhere)), "")


def _is_authors(error: BaseException) -> bool:
    return bool(_elsewhere(error)) or any(authors(frames_of(error)))


def _is_of_ours(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in ("gateway", "models", "protocols")


def _lines(error: BaseException, *, whole: bool, deep: int) -> Iterator[str]:
    for one, words in _chain(error):
        yield from _own_lines(one, whole=whole, deep=deep)
        if words:
            yield from ("", words, "")


def _own_lines(error: BaseException, *, whole: bool, deep: int) -> Iterator[str]:
    notes = [note for note in notes_of(error) if not isinstance(note, Origin | ToldElsewhere)]
    if text := _elsewhere(error):
        yield from text.rstrip("\n").split("\n")
        yield from (line for note in notes for line in note[:_MESSAGE].split("\n"))
        return
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    frames = frames_of(error)
    if frames and not (whole and _is_of_ours(error)):
        yield f"{'Exception Group ' if members else ''}Traceback (most recent call last):"
        yield from written(frames) if whole else folded(frames)
    yield from _message(error, notes)
    if deep < _CHAIN:
        for number, member in enumerate(members[:_MEMBERS], 1):
            yield f"  +---------------- {number} of {len(members)} ----------------"
            yield from (f"  | {line}" for line in _lines(member, whole=whole, deep=deep + 1))
    if len(members) > _MEMBERS:
        yield f"  +---------------- and {len(members) - _MEMBERS} more"


def _message(error: BaseException, notes: list[str]) -> list[str]:
    kind = type(error)
    bare = traceback.TracebackException(kind, error, None, compact=True)
    bare.__notes__ = list(notes)
    text = "".join(bare.format_exception_only()).rstrip("\n")
    if _is_of_ours(error):
        text = text.removeprefix(f"{kind.__module__}.")
    return (text if len(text) <= _MESSAGE else f"{text[:_MESSAGE]}...").split("\n")
