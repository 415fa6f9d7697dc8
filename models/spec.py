"""What a gateway needs to know to serve a model: how to load it, which messages it speaks, how much of it runs at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, final

from models.messages import Family
from models.session import Session


class Model(Protocol):
    """A model is called once a session and returns when it has nothing more to say.

    One primitive for unary calls, server streams, client streams and duplex: receive from the session and send to it,
    in any order; to read while writing, open a nursery. Returning with input unread is fine. An exception ends this
    session alone: ModelError with its text, any other with an id.
    """

    def __call__(self, session: Session[Any, Any], /) -> Awaitable[None]: ...


LOAD_TIMEOUT = 240.0
"""Seconds that loading may take where nobody says."""

Load: TypeAlias = Callable[[], AbstractAsyncContextManager[Model]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A declared input or output: v2 datatype, and shape with -1 where it varies."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """OTP's rule: more than `intensity` crashes within `period` seconds and the model is given up; before that it
    restarts after `backoff` seconds, doubled for each crash in the period, at most `backoff_max`."""

    intensity: int = 3
    period: float = 10.0
    backoff: float = 0.1
    backoff_max: float = 5.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the gateway serves it.

    `load` is an async context manager that yields the model: it is entered again after each crash, so state in it is
    clean at each start, and background tasks live inside it. An exception out of it is the worker's crash.
    `inputs` and `outputs` None: undeclared, anything is accepted.
    """

    name: str
    family: Family
    load: Load
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    version: str = "1"
    platform: str = "python"
    capacity: int = 64
    """Sessions at once."""
    queue: int = 1000
    """Sessions that may wait for a slot."""
    timeout: float = 0.0
    """Seconds a session may last; 0: no limit."""
    load_timeout: float = LOAD_TIMEOUT
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    many: bool = False
    """Whether it stands for many models, and reads itself which of them a call is for."""
    memory: int = 0
    """Bytes that the loaded model needs; 0: undeclared."""
    accepts: bool = False
    """Whether the model itself calls `session.accept()`; before that, its errors are still HTTP errors."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {self.capacity}")
        if self.memory < 0:
            raise ValueError(f"memory must be at least 0, not {self.memory}")
        if not self.name:
            raise ValueError("a model needs a name")
