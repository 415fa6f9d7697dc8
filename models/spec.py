"""What a gateway needs to know to serve a model: how to load it, which messages it speaks, how much of it runs at once."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, final

from models.chat import ChatMessage
from models.formatters import InputFormatter, OutputFormatter
from models.messages import DATATYPES, Family
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


Warmup: TypeAlias = Sequence[Any] | Callable[[Model], Awaitable[None]]
"""Messages, each the whole input of a call, such as a Prompt; or a function of the model's author, called with the model."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A declared input or output of a tensor model. ValueError for what v2 does not have."""

    name: str
    datatype: str = ""
    """The v2 name, such as FP32 or BYTES; empty: any."""
    shape: tuple[int, ...] | None = None
    """The size of each dimension, -1 where it varies; None: any number of dimensions. That of one item, without the batch
    dimension, where the model has a `max_batch_size`."""
    optional: bool = False
    """Whether a request may come without this input."""
    labels: tuple[str, ...] = ()
    """For the classification of an output: the word for each index of the last dimension."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a tensor needs a name")
        said = f"tensor {self.name[:60]!r}"
        if self.datatype and self.datatype not in DATATYPES:
            known = ", ".join(DATATYPES)
            raise ValueError(f"{said}: datatype must be one of {known}, or empty for any, got {self.datatype[:20]!r}")
        if self.shape is not None and not all(type(size) is int and size >= -1 for size in self.shape):
            raise ValueError(f"{said}: a dimension is a size, or -1 for any, got {str(self.shape)[:100]}")
        if self.shape and -1 < self.shape[-1] < len(self.labels):
            raise ValueError(f"{said}: {len(self.labels)} labels for a last dimension of {self.shape[-1]}")


@final
class Shape(tuple[int, ...]):
    """The shape of an array in an annotation, -1 where it varies: `Annotated[NDArray[np.float32], Shape(-1, 4)]`."""

    __slots__ = ()

    def __new__(cls, *sizes: int) -> Shape:
        return super().__new__(cls, sizes)


class Declaration(TypedDict, total=False):
    """What a tensor model may declare of itself; the fields of `ModelSpec` have the meaning of each."""

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    max_batch_size: int
    decoupled: bool
    pieces: bool


DECLARED: Mapping[str, tuple[type, ...]] = {
    "inputs": (list, tuple),
    "outputs": (list, tuple),
    "max_batch_size": (int,),
    "decoupled": (bool,),
    "pieces": (bool,),
}
"""The names of a declaration, each with the types of its values."""

C = TypeVar("C", bound=Callable[..., Any])


def declare(**declared: Unpack[Declaration]) -> Callable[[C], C]:
    """Declares the tensors of a function, a class or a loader, and how it takes requests, as attributes of it. They win
    over what annotations say. TypeError for another name, or for a value of another type."""
    for name, value in declared.items():
        if name not in DECLARED:
            raise TypeError(f"declare has no {name[:60]!r}; it has: {', '.join(DECLARED)}")
        if not isinstance(value, DECLARED[name]):
            wanted = "a list of TensorSpecs" if list in DECLARED[name] else DECLARED[name][0].__name__
            raise TypeError(f"declare: {name} must be {wanted}, not {type(value).__name__}")

    def mark(thing: C) -> C:
        for name, value in declared.items():
            setattr(thing, name, value)
        return thing

    return mark


@final
class Restart(enum.Enum):
    """When a model is loaded again, in the words of OTP's supervisors."""

    PERMANENT = "permanent"
    """Always."""
    TRANSIENT = "transient"
    """After a crash; not when the context of its `load()` ended by itself, without an exception."""
    TEMPORARY = "temporary"
    """Never."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """OTP's rule: more than `intensity` crashes within `period` seconds and the model is given up; before that it
    restarts after `backoff` seconds, doubled for each crash in the period, at most `backoff_max`. ValueError where it
    contradicts itself."""

    kind: Restart = Restart.PERMANENT
    intensity: int = 3
    period: float = 10.0
    backoff: float = 0.1
    backoff_max: float = 5.0
    jitter: float = 0.1
    """The share of a wait, from 0 to 1, that chance may take off it: what crashed together is not loaded together."""
    escalate: bool = False
    """Whether the gateway drains and ends when this model is given up, instead of going on without it."""

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"restart.jitter must be from 0 to 1, got {self.jitter!r}")
        if self.escalate and self.kind is Restart.TEMPORARY:
            raise ValueError("restart.escalate: a temporary model is never restarted, so it is never given up either")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the gateway serves it.

    `load` is an async context manager that yields the model: it is entered again after each crash, so state in it is
    clean at each start, and background tasks live inside it. An exception out of it is the worker's crash.
    `inputs` and `outputs` None: undeclared, anything is accepted. ValueError where it contradicts itself.
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
    queue_timeout: float = 0.0
    """Seconds that a session may wait for a slot; 0: as long as its own time allows."""
    queue_bytes: int = 0
    """Bytes that the bodies of the sessions that wait may hold together; 0: no bound of the model's own."""
    timeout: float = 0.0
    """Seconds a session may last; 0: no limit."""
    load_timeout: float = LOAD_TIMEOUT
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    warmup: Warmup = ()
    """What it is called with each time it was loaded, before any client is served: see `models.warmup`."""
    many: bool = False
    """Whether it stands for many models, and reads itself which of them a call is for."""
    memory: int = 0
    """Bytes that the loaded model needs; 0: undeclared."""
    accepts: bool = False
    """Whether the model itself calls `session.accept()`; before that, its errors are still HTTP errors."""
    max_batch_size: int = 0
    """Above 0 each tensor has a leading batch dimension, the same for all inputs of a request and at most this; 0: the
    shapes are whole."""
    decoupled: bool = False
    """Whether a request may have any number of responses, as those of a generator; else it has one."""
    pieces: bool = False
    """Whether the model asks for binary inputs as they arrive: then a request comes as several InferRequests, each with
    some of the rows, and `last` on the final one."""
    parameters: frozenset[str] | None = None
    """The GenerationParameters, by name, that a text model acts on, beside those that are the answer's form alone; None:
    it does not say. `lmi.unsupported` decides what becomes of a request that gives another."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What the model's own serving.properties says of how it is served: `option.X` by the name X."""
    chat_template: Callable[[Sequence[ChatMessage]], str] | None = None
    """The prompt of a text model for a conversation; None: `models.chat.plain_template`."""
    input_formatter: InputFormatter | None = None
    """Reads the requests of a text model at LMI's routes, in place of the schema."""
    output_formatter: OutputFormatter | None = None
    """Writes its answers there."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {self.capacity}")
        if self.queue_timeout < 0 or self.queue_bytes < 0:
            raise ValueError(
                f"queue_timeout and queue_bytes must be at least 0, not {self.queue_timeout}, {self.queue_bytes}"
            )
        if self.memory < 0:
            raise ValueError(f"memory must be at least 0, not {self.memory}")
        if not self.name:
            raise ValueError("a model needs a name")
        self._check_tensors(f"model {self.name[:60]!r}")

    def _check_tensors(self, said: str) -> None:
        if self.max_batch_size < 0:
            raise ValueError(f"{said}: max_batch_size must be at least 0, not {self.max_batch_size}")
        if self.pieces and self.max_batch_size:
            raise ValueError(f"{said}: a request that comes in pieces cannot be part of a batch: pieces or max_batch_size")
        if self.family is not Family.TENSOR and (self.inputs or self.outputs or self.max_batch_size or self.pieces):
            raise ValueError(f"{said}: a {self.family.value} model has no tensors to declare")
        for side, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            names = []
            for tensor in tensors or ():
                if not isinstance(tensor, TensorSpec):
                    raise TypeError(f"{said}: {side} are TensorSpecs, not {type(tensor).__name__}")
                if tensor.name in names:
                    raise ValueError(f"{said}: two {side} have the name {tensor.name[:60]!r}")
                names.append(tensor.name)
        if optional := [tensor.name for tensor in self.outputs or () if tensor.optional]:
            raise ValueError(f"{said}: output {optional[0][:60]!r} cannot be optional: a model gives all that it declares")
