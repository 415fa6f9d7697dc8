"""The last changes of state of each model, with their times and reasons, whatever version of it has made them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import final

import msgspec
from msgspec import UNSET, UnsetType

from gateway.workers.worker import Worker

KEPT_CHANGES = 50
"""Changes of each model."""
_MODELS = 256  # that are remembered: the one that has been quiet for longest is forgotten


class ChangeView(msgspec.Struct, kw_only=True, frozen=True):
    """A model, or one version of it, has come into a state."""

    at: float
    """Seconds since 1970."""
    state: str
    version: str
    reason: str
    """The failure before it; empty where there was none."""
    front: int | UnsetType = UNSET
    """The process, where there are several."""


@final
class StateChanges:
    """The changes that workers have told since this was made."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        """`workers` are there already."""
        self._by_name: dict[str, deque[ChangeView]] = {}  # the one that has changed last at the end
        self._last: dict[str, int] = {}  # the worker that has made the last change, by a number alone: it is kept by others
        for worker in workers:
            self.noticed(worker)

    def noticed(self, worker: Worker) -> None:
        """A worker has changed, or is new."""
        name, changes = worker.name, self._by_name.pop(worker.name, None)
        if changes is None:
            changes = deque(maxlen=KEPT_CHANGES)
            if len(self._by_name) >= _MODELS:
                quiet = next(iter(self._by_name))
                del self._by_name[quiet], self._last[quiet]
        self._by_name[name] = changes
        at, state = round(time.time(), 3), worker.state.value
        if changes and self._last[name] == id(worker) and changes[-1].state == state:
            at = changes.pop().at  # it says more of what it has said
        self._last[name] = id(worker)
        changes.append(ChangeView(at=at, state=state, version=worker.spec.version, reason=worker.reason))

    def of(self, name: str) -> list[ChangeView]:
        """Those of a model, the oldest first."""
        return list(self._by_name.get(name, ()))
