"""Incidents: failures that the log explains under a number, grouped by type and place. The last 100 groups are kept."""

from __future__ import annotations

import time
from collections import deque
from typing import final

from gateway.config.text import text_without_secrets
from gateway.untrusted_text import escape
from gateway.workers.failures import Failure
from models.tracebacks.frames import frames_of
from models.tracebacks.text import explains, origin_of, text_of

GROUPS = 100
"""The most groups that are kept. Beyond it, the group whose last failure is oldest is dropped."""
TRACEBACK = 16 * 1024
"""The most bytes of a traceback: its end, with the innermost frames."""
_NUMBERS = 20  # the most incident numbers of a group that are kept
_TEXT, _NAME = 300, 200  # characters


@final
class IncidentGroup:
    """Failures of one type, raised at one place, in one model. Times are seconds since 1970."""

    __slots__ = (
        "count", "error", "first", "id", "last", "model", "numbers", "place", "revision", "stream", "told", "traceback",
        "type", "version",
    )  # fmt: skip

    def __init__(self, type: str, place: str, model: str, number: str, now: float, text: str) -> None:
        self.type, self.place, self.model = type, place, model
        self.id = number
        """The number of its first incident."""
        self.first = self.last = now
        self.count = self.revision = 0
        self.numbers = deque[str](maxlen=_NUMBERS)
        """The numbers of its last incidents, as clients and the log have them."""
        self.version = self.error = self.stream = self.told = ""
        """Facts of its last incident: the model's version, the exception's type and text, the stream's id, and the text that
        the client got."""
        self.traceback = text
        """The traceback of its first incident; empty if tracebacks are not kept."""


@final
class Incidents:
    """Keeps the groups of incidents. They keep an exception's text alone: no frame, and so no local, body or header."""

    def __init__(self, *, tracebacks: bool) -> None:
        """`tracebacks` is the setting `operator.tracebacks`."""
        self._tracebacks = tracebacks
        self._groups: dict[tuple[str, str, str], IncidentGroup] = {}  # the last changed at the end
        self.revision = 0
        """The number of failures so far. A group has the number at its last one."""

    def add(self, failure: Failure) -> None:
        """Adds a failure that the log explains."""
        error, model = failure.error, escape(failure.model[:_NAME])
        kind = escape(str(getattr(error, "kind_there", "") or type(error).__name__)[:_NAME])
        key = kind, escape(_place_of(error)[:_NAME]), model
        now, group = round(time.time(), 3), self._groups.pop(key, None)
        if group is None:
            group = IncidentGroup(*key, failure.incident, now, _traceback_of(error) if self._tracebacks else "")
        self._groups[key] = group
        if len(self._groups) > GROUPS:
            del self._groups[next(iter(self._groups))]
        self.revision += 1
        group.revision, group.last = self.revision, now
        group.count += 1
        group.numbers.append(failure.incident)
        group.version, group.stream, group.told = failure.version, failure.stream, failure.told
        group.error = escape(text_without_secrets(_said(error))[:_TEXT])

    @property
    def groups(self) -> list[IncidentGroup]:
        """All groups, the one with the latest failure first."""
        return list(reversed(self._groups.values()))

    def since(self, revision: int) -> list[IncidentGroup]:
        """Returns the groups with a failure after that revision, the oldest first."""
        found: list[IncidentGroup] = []
        for group in reversed(self._groups.values()):
            if group.revision <= revision:
                break
            found.append(group)
        return found[::-1]

    def find(self, number: str) -> IncidentGroup | None:
        """Returns the group of an incident's number; None if it is not kept."""
        return next((group for group in self.groups if group.id == number or number in group.numbers), None)


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # `__str__` is the author's own code
        text = "(its text cannot be read)"
    return text if getattr(error, "kind_there", "") else f"{type(error).__name__}: {text}"


def _place_of(error: BaseException) -> str:
    """Returns the place in the author's code where it was raised; if there is none, the place in ours, except for an error
    that says all in its text, such as the end of a process."""
    if (origin := origin_of(error)) is not None:
        file, line, name = origin
        return f"{file}:{line} in {name}"
    frames = [] if explains(error) is None else frames_of(error)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def _traceback_of(error: BaseException) -> str:
    """Formats the traceback as the log does."""
    text = text_without_secrets(text_of(error))
    escaped = "\n".join(map(escape, text.splitlines())).encode("utf-8", "replace")
    if len(escaped) > TRACEBACK:
        escaped = b"..." + escaped[3 - TRACEBACK :]
    return escaped.decode("utf-8", "ignore")
