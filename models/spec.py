"""The specification of a model for a gateway: how it is loaded, its messages, and how much of it runs at once."""

from __future__ import annotations

import enum
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, final

import trio

from models.blocking import running_loop
from models.chat import ChatMessage
from models.continuations import Continuations
from models.errors import is_failure, leaves
from models.formatters import InputFormatter, OutputFormatter
from models.messages import DATATYPES, TEXT_FEATURES, Family, Finish, GenerationParameters, Prompt, Token, ToolCall
from models.session import Call, Session


class Model(Protocol):
    """A model is called once for each session, and returns when it has nothing more to send.

    This one interface serves unary calls, server streams, client streams and duplex: receive from the session and send to it
    in any order. To read while writing, open a nursery. A model may return with unread input. An exception ends this session
    alone: the client gets the text of a ModelError, and for any other an id.
    """

    def __call__(self, session: Session[Any, Any], /) -> Awaitable[None]: ...


_SUBPROTOCOL = re.compile(r"(?!everywire\.key\.)[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
"""A token (RFC 6455 section 11.3.4), without those by which clients show keys."""

_LONGEST_SERVED = 256

LOAD_TIMEOUT = 240.0
"""The default limit for loading, in seconds."""
STALL_TIMEOUT = 600.0
"""The default `stall_timeout` of text models, in seconds."""

Load: TypeAlias = Callable[[], AbstractAsyncContextManager[Model]]


Warmup: TypeAlias = Sequence[Any] | Callable[[Model], Awaitable[None]]
"""Messages, each the whole input of a call, such as a Prompt; or an author's function that is called with the model."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A declared input or output of a tensor model. ValueError for properties that v2 does not have."""

    name: str
    datatype: str = ""
    """The v2 name, such as FP32 or BYTES. Empty: any."""
    shape: tuple[int, ...] | None = None
    """The size of each dimension, -1 if it varies. None: any number of dimensions. If the model has a `max_batch_size`, it
    is the shape of one item, without the batch dimension."""
    optional: bool = False
    """True if a request may omit this input."""
    labels: tuple[str, ...] = ()
    """For the classification of an output: the name of each index of the last dimension."""
    pad: bool | int | float | str | None = None
    """For an input with a -1 in its shape: requests that differ there may be joined (`Batching`), filled up to the longest
    with this value. None: only requests with equal shapes are joined."""
    like: str = ""
    """For an output with a -1 in its shape: the input that has these dimensions too, in the same order. For each request,
    they are cut back to its own size."""

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
        if self.pad is not None:
            if not self.datatype or not self.variable:
                raise ValueError(
                    f"{said}: pad needs a datatype, and a shape with a -1, got {self.datatype!r} and {self.shape}"
                )
            if not _holds(self.datatype, self.pad):
                raise ValueError(f"{said}: pad must be a value of {self.datatype}, got {self.pad!r:.60}")

    @property
    def variable(self) -> tuple[int, ...]:
        """The indexes of the dimensions that vary."""
        return tuple([axis for axis, size in enumerate(self.shape or ()) if size == -1])


def _holds(datatype: str, value: bool | int | float | str) -> bool:
    """True if an element of this datatype can have that value, rounded for floats."""
    if datatype in ("BYTES", "BOOL"):
        return type(value) is (str if datatype == "BYTES" else bool)
    if type(value) not in (int, float):
        return False
    if datatype[0] in "FB":
        return True
    bits, signed = int(datatype.lstrip("UINT")), datatype[0] == "I"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    return type(value) is int and low <= value < high


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """The batching of a tensor model's requests: Triton's dynamic batcher.

    Requests are joined if their inputs have the same names, datatypes and shapes apart from the batch dimension, and if
    their parameters and requested outputs are equal; at most `max_batch_size` rows. `models.batching` has the rules.
    ValueError if fields contradict each other.
    """

    max_delay: float = 0.0
    """Seconds that the first request of a batch waits for others while the model is idle. 0: none, so a batch has the
    requests that have queued while the model was busy."""
    preferred: tuple[int, ...] = ()
    """Numbers of rows that start a batch at once. As soon as the first requests of the queue have exactly one of these
    numbers, they are a batch, by the largest number that fits, and the others wait for the next. Otherwise they wait for
    `max_delay`, or until the next request has no room."""
    pad_rows: bool = False
    """True if a batch is filled up to the next preferred number of rows, with copies of its last row."""
    instances: int = 1
    """Batches that run at once."""
    retry: bool = True
    """True if the requests of a batch whose call raised are called again, each alone and once, so that only the bad one
    fails. Use False for a model that must not get a request twice: all of them fail then, unless the function was not
    called, because its arguments could not be made."""
    priority_levels: int = 0
    """The number of priority levels: requests may have a parameter `priority` from 1, the first, to this. 0: it is
    ignored."""
    default_priority: int = 0
    """The priority of requests that have none, or one above the levels. 0: the last level."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_delay < float("inf"):
            raise ValueError(f"batching: max_delay must be a number of seconds, at least 0, got {self.max_delay}")
        if any(type(rows) is not int or rows < 1 for rows in self.preferred):
            raise ValueError(f"batching: preferred must be numbers of rows, at least 1, got {str(self.preferred)[:100]}")
        if self.pad_rows and not self.preferred:
            raise ValueError("batching: pad_rows needs preferred numbers of rows to fill up to")
        if self.instances < 1:
            raise ValueError(f"batching: instances must be at least 1, got {self.instances}")
        if not 0 <= self.default_priority <= max(self.priority_levels, 0):
            raise ValueError(
                f"batching: default_priority must be from 0 to priority_levels, {self.priority_levels}, "
                f"got {self.default_priority}"
            )


@final
class Shape(tuple[int, ...]):
    """The shape of an array in an annotation, -1 if it varies: `Annotated[NDArray[np.float32], Shape(-1, 4)]`."""

    __slots__ = ()

    def __new__(cls, *sizes: int) -> Shape:
        return super().__new__(cls, sizes)


class Declaration(TypedDict, total=False):
    """The fields of `ModelSpec` that a tensor model may declare itself."""

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    max_batch_size: int
    decoupled: bool
    pieces: bool
    batching: Batching


DECLARED: Mapping[str, tuple[type, ...]] = {
    "inputs": (list, tuple),
    "outputs": (list, tuple),
    "max_batch_size": (int,),
    "decoupled": (bool,),
    "pieces": (bool,),
    "batching": (Batching,),
}
"""The names of a declaration, each with the types of its values."""

MARK = "__model_declared__"
"""The attribute that `declare` sets: the object is a tensor model, even if annotations do not tell."""

C = TypeVar("C", bound=Callable[..., Any])


def declare(**declared: Unpack[Declaration]) -> Callable[[C], C]:
    """Declares the tensors of a function, a class or a loader, and its other request properties, as attributes. They take
    precedence over annotations, and suffice without any. A function then takes arrays by the names of its parameters. If its
    one parameter is named `request`, or unlike any declared input, it takes the whole InferRequest, and if that is named
    `session`, a session. TypeError for an unknown name, or a value of the wrong type."""
    for name, value in declared.items():
        if name not in DECLARED:
            raise TypeError(f"declare has no {name[:60]!r}; it has: {', '.join(DECLARED)}")
        if not isinstance(value, DECLARED[name]):
            wanted = "a list of TensorSpecs" if list in DECLARED[name] else DECLARED[name][0].__name__
            raise TypeError(f"declare: {name} must be {wanted}, not {type(value).__name__}")

    def mark(thing: C) -> C:
        for name, value in declared.items():
            setattr(thing, name, value)
        setattr(thing, MARK, True)
        return thing

    return mark


@final
class Restart(enum.Enum):
    """The condition for loading a model again, in the terms of OTP's supervisors."""

    PERMANENT = "permanent"
    """Always."""
    TRANSIENT = "transient"
    """After a crash, but not if the context of its `load()` ended by itself without an exception."""
    TEMPORARY = "temporary"
    """Never."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """OTP's rule: after more than `intensity` crashes within `period` seconds the model is given up. Before that it restarts
    after `backoff` seconds, doubled for each crash in the period, at most `backoff_max`. ValueError if fields contradict
    each other."""

    kind: Restart = Restart.PERMANENT
    intensity: int = 3
    period: float = 10.0
    backoff: float = 0.1
    backoff_max: float = 5.0
    jitter: float = 0.1
    """The largest random part of a wait that is left out, from 0 to 1, so that models that crash together restart apart."""
    escalate: bool = False
    """True if the gateway drains and ends when this model is given up. False: it goes on without the model."""

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"restart.jitter must be from 0 to 1, got {self.jitter!r}")
        if self.escalate and self.kind is Restart.TEMPORARY:
            raise ValueError("restart.escalate: a temporary model is never restarted, so it is never given up either")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model as the gateway serves it.

    `load` is an async context manager that yields the model. It is entered again after each crash, so its state is new at
    each start; background tasks live inside it. An exception out of it is a crash of the worker. None for `inputs` or
    `outputs` means undeclared: any are accepted. ValueError if fields contradict each other.
    """

    name: str
    family: Family
    load: Load
    inputs: tuple[TensorSpec, ...] | None = None
    outputs: tuple[TensorSpec, ...] | None = None
    version: str = "1"
    platform: str = "python"
    required: bool = True
    """True: a server that is configured with this model is ready only while the model answers. A model that a client has
    loaded never counts."""
    capacity: int = 64
    """Sessions at once."""
    queue: int = 1000
    """Sessions that may wait for a slot."""
    queue_timeout: float = 60.0
    """Seconds that a session may wait for a slot. 0: as long as its own deadline allows."""
    party_share: int = 90
    """Percent of `capacity`, and of `queue`, that one party may hold: a key, a client's certificate, or else a connection.
    It is rounded up, but never to all if there are two or more. 100: all."""
    idle_when_wanted: float = 30.0
    """Seconds that a session may wait for its client, without a message in either direction, while others wait for a slot.
    0: no limit."""
    queue_bytes: int = 0
    """Bytes that the bodies of all waiting sessions may hold together. 0: no limit of the model's own."""
    body_bytes: int = 0
    """Bytes that the bodies of all running sessions may hold together. 0: no limit of the model's own."""
    timeout: float = 0.0
    """Seconds a session may last. 0: no limit."""
    load_timeout: float = LOAD_TIMEOUT
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    warmup: Warmup = ()
    """The calls to make each time after loading, before any client is served: see `warm_up`."""
    threads: int = 0
    """Blocking steps at once. 0: `capacity`, at most 64."""
    step_timeout: float = 0.0
    """Seconds a blocking step may run before it counts as stuck. Its session then ends, and another may use its place until
    its thread returns. If a round of a rolling batch is stuck, all its sessions end, and the model is loaded again. 0: no
    limit."""
    stall_timeout: float | None = None
    """Seconds for which the model may say nothing while it could: beyond, its session ends with 504. Not counted are the
    times in which it waits for its client, in `receive` or in `send`. 0: no limit. None: 600 for a text model, and 0 for any
    other."""
    stop_within: float = 0.0
    """Seconds in which the model, with its last blocking step, must return once its session has ended. Otherwise it counts
    as stuck. 0: no limit."""
    stuck_limit: int = 4
    """Sessions that may be stuck at once. One more is a crash of the model."""
    many: bool = False
    """True if it represents many models, and determines itself which of them a call is for."""
    memory: int = 0
    """Bytes that the loaded model needs. 0: undeclared."""
    accepts: bool = False
    """True if the model itself calls `session.accept()`. Before that, its errors are still HTTP errors."""
    subprotocols: tuple[str, ...] = ()
    """The subprotocols of WebSockets that the model speaks. The first that a client offers and that is here is chosen, and
    is the session's `call.subprotocol`. If there is none, none is chosen: many clients then end the connection."""
    max_batch_size: int = 0
    """Above 0, each tensor has a leading batch dimension of at most this size, equal for all inputs of a request. 0: the
    shapes are complete."""
    decoupled: bool = False
    """True if a request may have any number of responses, as from a generator. False: it has one."""
    pieces: bool = False
    """True if the model asks for binary inputs as they arrive. A request then comes as several InferRequests, each with some
    of the rows, and with `last` on the final one."""
    batching: Batching | None = None
    """The batching of several requests' rows, at most `max_batch_size` of them. None: one call is one request."""
    parameters: frozenset[str] | None = None
    """The GenerationParameters, by name, that a text model acts on, without those that only concern the form of the answer.
    None: undeclared. `lmi.unsupported` decides what happens to a request with another one. If `stop_sequences` is in it, the
    model ends its texts there itself; otherwise the gateway does."""
    features: frozenset[str] | None = None
    """The features that a request may ask of the model: for a text model names of `TEXT_FEATURES`, for a tensor model of
    `TENSOR_FEATURES`. A request that asks for more is refused. None: that of the loaded model (its attribute
    `features`), or nothing."""
    context: int = 0
    """The most tokens of a prompt and its answer together, for a text model. An answer without a limit ends there at the
    latest; if the model counts the tokens of prompts, every answer does. 0: that of the loaded model (its attribute
    `context`), or unknown."""
    served_names: tuple[str, ...] = ()
    """Names by which OpenAI's clients call the model too, such as `org/llama:8b`: printable text of at most 256 characters.
    Other clients, keys, metrics and logs know its own name alone, which may be among them. No other model may have one."""
    max_new_tokens: int = 0
    """The most tokens of a sequence that a request may ask of a text model, if that is below the server's limit. 0: the
    server's limit."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options in the model's own serving.properties about how it is served: `option.X` by the name X."""
    chat_template: Callable[[Sequence[ChatMessage]], str] | None = None
    """Makes a text model's prompt for a conversation. None: `models.chat.plain_template`."""
    count_tokens: Callable[[str], int] | None = None
    """Counts a prompt's tokens, for a text model that can without generating; it is called in a thread. None: the number is
    known only if the model tells it during the generation (`Session.prompt_tokens`)."""
    input_formatter: InputFormatter | None = None
    """Reads the requests of a text model at LMI's routes, in place of the schema."""
    output_formatter: OutputFormatter | None = None
    """Writes the answers of a text model at LMI's routes."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {self.capacity}")
        if self.queue_timeout < 0 or self.queue_bytes < 0:
            raise ValueError(
                f"queue_timeout and queue_bytes must be at least 0, not {self.queue_timeout}, {self.queue_bytes}"
            )
        if not 1 <= self.party_share <= 100 or self.idle_when_wanted < 0:
            raise ValueError(
                f"party_share must be from 1 to 100 and idle_when_wanted at least 0, not {self.party_share}, "
                f"{self.idle_when_wanted}"
            )
        if self.stall_timeout is not None and self.stall_timeout < 0:
            raise ValueError(f"stall_timeout must be at least 0, or None, not {self.stall_timeout}")
        if self.body_bytes < 0:
            raise ValueError(f"body_bytes must be at least 0, not {self.body_bytes}")
        if self.threads < 0 or self.stuck_limit < 0:
            raise ValueError(f"threads and stuck_limit must be at least 0, not {self.threads} and {self.stuck_limit}")
        if self.memory < 0:
            raise ValueError(f"memory must be at least 0, not {self.memory}")
        if self.max_new_tokens < 0 or self.context < 0:
            raise ValueError(f"max_new_tokens and context must be at least 0, not {self.max_new_tokens} and {self.context}")
        if not self.name:
            raise ValueError("a model needs a name")
        if type(self.subprotocols) is not tuple:
            raise ValueError(f"subprotocols are a tuple of strings, not {str(self.subprotocols)[:60]!r}")
        for name in self.subprotocols:
            if not isinstance(name, str) or not _SUBPROTOCOL.fullmatch(name):
                raise ValueError(
                    "subprotocols: each is 1 to 128 letters, digits and !#$%&'*+.^_`|~-, and does not begin with "
                    f"everywire.key., not {str(name)[:60]!r}"
                )
        if self.features is not None:
            check_features(self.features, self.family)
        self._check_served_names()
        self._check_tensors(f"model {self.name[:60]!r}")

    @property
    def longest_stall(self) -> float:
        """`stall_timeout`, with the default of the model's family in place of None."""
        if self.stall_timeout is None:
            return STALL_TIMEOUT if self.family is Family.TEXT else 0.0
        return self.stall_timeout

    def _check_served_names(self) -> None:
        if type(self.served_names) is not tuple:
            raise ValueError(f"served_names are a tuple of strings, not {str(self.served_names)[:60]!r}")
        for name in self.served_names:
            if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_SERVED or not name.isprintable():
                raise ValueError(
                    f"served_names: each is 1 to {_LONGEST_SERVED} printable characters, not {str(name)[:60]!r}"
                )

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
        if self.batching is not None:
            self._check_batching(said, self.batching)
        if optional := [tensor.name for tensor in self.outputs or () if tensor.optional]:
            raise ValueError(f"{said}: output {optional[0][:60]!r} cannot be optional: a model gives all that it declares")

    def _check_batching(self, said: str, batching: Batching) -> None:
        if not self.max_batch_size:
            raise ValueError(f"{said}: batching needs a max_batch_size, the rows that one call may have")
        for what, wrong in (("decoupled", self.decoupled), ("accepts", self.accepts), ("many", self.many)):
            if wrong:
                raise ValueError(f"{said}: batching is for models with one response to each request: batching or {what}")
        if beyond := [rows for rows in batching.preferred if rows > self.max_batch_size]:
            raise ValueError(
                f"{said}: batching.preferred has {beyond[0]}, above the max_batch_size of {self.max_batch_size}"
            )
        inputs = {tensor.name: tensor for tensor in self.inputs or ()}
        if not any(tensor.pad is not None for tensor in inputs.values()):
            return
        if self.outputs is None:
            raise ValueError(f"{said}: inputs with a pad need declared outputs, as those are cut back")
        for tensor in self.outputs:
            if tensor.shape is not None and not tensor.variable:
                continue
            source = inputs.get(tensor.like)
            if tensor.shape is None or source is None or len(source.variable) != len(tensor.variable):
                raise ValueError(
                    f"{said}: output {tensor.name[:60]!r} is to be cut back, as inputs have a pad: give it a "
                    "shape, and where that has a -1 say like = the input whose -1 those are"
                )


TENSOR_FEATURES = frozenset(("embedding", "ranking", "matryoshka"))
"""The names that a tensor model may have in its `features`."""


def check_features(features: Collection[str], family: Family) -> None:
    """Raises ValueError for a name that is no feature of models of this family."""
    known = {Family.TEXT: TEXT_FEATURES, Family.TENSOR: TENSOR_FEATURES}.get(family, frozenset[str]())
    if isinstance(features, str) or (unknown := sorted(str(name)[:60] for name in features if name not in known)):
        there = ", ".join(sorted(known)) or "none"
        got = features[:60] if isinstance(features, str) else unknown[0]
        raise ValueError(f"features: expected a collection of these, for a {family.value} model: {there}; got {got!r}")


def features_of(model: object, family: Family) -> frozenset[str]:
    """The `features` of a loaded model; empty if it has none. ValueError for a name that is no feature. A part of a torch
    module may have that name: it counts as nothing."""
    said = getattr(model, "features", None)
    if not isinstance(said, frozenset | set | tuple | list):
        return frozenset()
    check_features(said, family)
    return frozenset(said)


def context_of(model: object) -> int:
    """The `context` of a loaded model; 0 if it has none, or none that is a number of tokens."""
    context = getattr(model, "context", 0)
    return context if type(context) is int and context > 0 else 0


Check: TypeAlias = Callable[[Any, Any], object]
"""A function of a message and a model's answer to it. It raises if the answer is wrong."""


@final
class WarmupFailed(Exception):
    """A model raised in its warm-up, or gave a wrong answer: it is not served."""


async def warm_up(model: Model, spec: ModelSpec, check: Check | None = None) -> None:
    """Calls the model with each message of `spec.warmup`, in order and one at a time, each in a separate session with the
    dialect `warmup`. The model's messages are passed to `check` and dropped. If `spec.warmup` is a function, it is awaited
    with the model instead, and makes its own calls.

    WarmupFailed if the model raises, if its answer is wrong, and if a tensor model gives none, unless it is decoupled; it
    has the number of the call. A model that reads on past its message has ended properly. A model must not wait here for a
    message that only a client would send. If this is cancelled, the model is cancelled.
    """
    if not isinstance(spec.warmup, Sequence):
        try:
            await spec.warmup(model)
        except BaseException as e:
            if not is_failure(e):
                raise
            raise WarmupFailed(f"the warm-up raised {_told(e)}") from e
        return
    for number, message in enumerate(spec.warmup, 1):
        call = Call(id=f"warmup-{number}", model=spec.name, version=spec.version, dialect="warmup")
        channel = _OneMessage(message, check)
        try:
            await running_loop().around(channel.text, model(Session(channel, call)))
        except BaseException as e:
            if not is_failure(e):
                raise
            if channel.wrong is None and not all(isinstance(leaf, trio.EndOfChannel) for leaf in leaves(e)):
                raise WarmupFailed(f"warm-up request {number} of {len(spec.warmup)} raised {_told(e)}") from e
        if channel.wrong is not None:
            said = f"the answer to warm-up request {number} of {len(spec.warmup)} is wrong: {channel.wrong}"
            raise WarmupFailed(said) from channel.wrong
        if spec.family is Family.TENSOR and not (spec.decoupled or channel.answered):
            said = f"warm-up request {number} of {len(spec.warmup)} has no answer, and the model is not decoupled"
            raise WarmupFailed(said)


def _told(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@final
class _OneMessage:
    """A client that sends one message and takes all answers: of a text, only as much as a client would get."""

    def __init__(self, message: Any, check: Check | None) -> None:
        self._message, self._check = message, check
        self.exhausted = self.answered = False
        self.text = Continuations(message.parameters if isinstance(message, Prompt) else GenerationParameters())
        self.wrong: Exception | None = None
        """The first exception of the check, even if the model went on after it."""

    @property
    def complete(self) -> bool:
        return self.text.complete

    async def receive(self) -> Any:
        await running_loop().checkpoint()
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        return self._message

    async def send(self, message: Any, /) -> None:
        await running_loop().checkpoint()
        self.answered = True
        if self._check is not None:
            try:
                self._check(self._message, message)
            except Exception as e:
                self.wrong = self.wrong or e
                raise
        if type(message) in (Token, ToolCall, Finish) and self.text.passes(message):
            self.text.take(message)
            self.text.sent()
