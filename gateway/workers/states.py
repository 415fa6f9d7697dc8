"""The states of a worker, all transitions between them, and the error that callers get in each."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import final

import trio

from gateway.errors import NotFound, Unavailable
from models.spec import Restart

RESTART_GRACE = 5.0
"""Seconds for which a crashed model still counts as ready. If it is back by then, its server stays in service."""


class State(enum.Enum):
    """The state of a worker."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"
    """The model crashed, and is not loaded again."""
    ENDED = "ended"
    """The model ended by itself, and its policy does not load it again."""
    STOPPED = "stopped"


# All transitions and their meaning: `Worker` makes no others, and the diagram in the documentation is drawn from these.
TRANSITIONS: Mapping[State, Mapping[State, str]] = {
    State.LOADING: {
        State.LOADING: "the first load begins",
        State.READY: "load() has given the model, and its warm-up calls are answered",
        State.RESTARTING: "the load failed or took too long; the next one begins after the policy's wait",
        State.FAILED: "the load failed or took too long, and the policy allows no further one",
        State.STOPPED: "stop is called, or a worker that is not lasting fails to load and gives the model up",
    },
    State.READY: {
        State.DRAINING: "stop is called; running sessions have its patience, in seconds, to end",
        State.RESTARTING: "the context of load() ends, by an exception or by itself; live sessions end with an error",
    },
    State.DRAINING: {State.STOPPED: "the sessions are over, and the context of load() has ended"},
    State.RESTARTING: {
        State.RESTARTING: "the crash is counted, and the policy's wait begins",
        State.LOADING: "the wait is over, and the next load begins",
        State.FAILED: "the model is given up: too many crashes within the policy's period, or the policy is temporary",
        State.ENDED: "the model ended by itself, and the policy does not load it again",
        State.STOPPED: "stop is called, or a worker that is not lasting gives its model up or lets it end",
    },
    State.FAILED: {State.STOPPED: "stop is called"},
    State.ENDED: {State.STOPPED: "stop is called"},
    State.STOPPED: {},
}


@final
class Life:
    """The state of one worker, and the answers to callers and health checks in that state.

    It knows only the model's name, so that a reference to it does not keep the model alive.
    """

    __slots__ = (
        "_lost_at",
        "_restart",
        "lasting",
        "loaded",
        "name",
        "restart_at",
        "since",
        "starts",
        "state",
        "stop",
        "there",
    )  # fmt: skip

    def __init__(self, name: str, restart: Restart, *, lasting: bool) -> None:
        self.name, self._restart, self.lasting = name, restart, lasting
        self.state = State.LOADING
        self.since: float | None = None
        """The time of the last change of state, on Trio's clock; None before the worker runs."""
        self.starts = 0
        """The number of loads begun."""
        self.restart_at: float | None = None
        """The time of the next load, on Trio's clock, while the worker is RESTARTING; otherwise None."""
        self.there = False
        """True while the model is loaded."""
        self.loaded = False
        """True once the model has been loaded."""
        self._lost_at = -math.inf  # the time at which it was last ready, on Trio's clock
        self.stop = trio.Event()
        """Set when the worker is asked to end."""

    def enter(self, state: State) -> None:
        """Changes the state; the transition must be one of `TRANSITIONS`."""
        assert state in TRANSITIONS[self.state], f"{self.state} does not become {state}"
        now = trio.current_time()
        if self.state is State.READY:
            self._lost_at = now
        self.state, self.since = state, now

    @property
    def absence(self) -> str:
        """The reason why the model does not count as ready, in words for anybody; empty if it does. A model that crashed
        less than `RESTART_GRACE` seconds ago and is being loaded again does count."""
        match self.state:
            case State.READY:
                return ""
            case State.LOADING | State.RESTARTING if self.loaded:
                if trio.current_time() - self._lost_at < RESTART_GRACE:
                    return ""
                return f"crashed, and is not back within {RESTART_GRACE:g} s"
            case State.LOADING if self.starts <= 1:
                return "is loading"
            case State.LOADING | State.RESTARTING:
                return "could not be loaded, and is tried again"
            case State.FAILED:
                return "was given up"
            case State.ENDED:
                return "has ended"
            case _:
                return "is being unloaded"

    def check(self) -> None:
        """Raises the error for a caller if the model cannot be called."""
        match self.state:
            case State.READY:
                return
            case State.STOPPED if self.stop.is_set() or not self.lasting:
                raise NotFound(f"model {self.name!r} is not loaded")
            case State.FAILED:
                # no Retry-After: the model comes back only when an operator loads it
                said = f"model {self.name!r} is unavailable: it crashed too often; the log says why"
                if self._restart is Restart.TEMPORARY:
                    said = f"model {self.name!r} is unavailable: it crashed, and is not restarted; the log says why"
                raise Unavailable(said, retry_after=None)
            case State.ENDED:
                raise Unavailable(f"model {self.name!r} is unavailable: it has ended", retry_after=None)
            case _:
                wait = 0.0 if self.restart_at is None else self.restart_at - trio.current_time()
                raise Unavailable(f"model {self.name!r} is {self.state.value}; try again", retry_after=wait)
