"""Where a worker is in its life: its states, and every change between them that there is."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """Where a worker is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"
    """Given up: it crashed, and is not loaded again."""
    ENDED = "ended"
    """It ended by itself, and its policy lets it."""
    STOPPED = "stopped"


# Every change of state that there is, and what it means: `Worker` makes no other, and the documentation draws these.
TRANSITIONS: Mapping[State, Mapping[State, str]] = {
    State.LOADING: {
        State.LOADING: "the first attempt begins",
        State.READY: "load() gave the model, and its warm-up is answered",
        State.RESTARTING: "loading failed, or took too long: again after the policy's wait",
        State.FAILED: "loading failed, and the policy has no further start",
        State.STOPPED: "stop, or the first load of one that is not lasting failed",
    },
    State.READY: {
        State.DRAINING: "stop: sessions that run have its patience",
        State.RESTARTING: "load()'s context ended, by an exception or by itself: live sessions are lost",
    },
    State.DRAINING: {State.STOPPED: "the sessions are over, and load()'s context is left"},
    State.RESTARTING: {
        State.RESTARTING: "the policy's wait begins: the crash is counted",
        State.LOADING: "the wait is over",
        State.FAILED: "too many crashes within the period, or it is temporary: given up",
        State.ENDED: "it ended by itself, and the policy lets it",
        State.STOPPED: "stop, or one that is not lasting was given up",
    },
    State.FAILED: {State.STOPPED: "stop"},
    State.ENDED: {State.STOPPED: "stop"},
    State.STOPPED: {},
}
