"""The JSON bodies of v2's extensions for managing a server: statistics, repository, logging, shared memory."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, final

import msgspec

from protocols.events import Buffer
from protocols.json import strict
from protocols.v2.tensors import V2Error

_DEPTH = 64  # the deepest nesting of any body here; none needs more than two levels
_SHOWN = 100

Body = TypeVar("Body", bound="ModelIndexRequest | LoadRequest | UnloadRequest | LogChange")

_Count = Annotated[int, msgspec.Meta(ge=0)]

# -- statistics


@final
class Duration(msgspec.Struct, frozen=True):
    """The number of times that something happened, and its total time in nanoseconds."""

    count: _Count
    ns: _Count


@final
class InferenceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a model's calls, on every wire. Each call is counted once, at its end, as a success or as a failure.
    The time of a success is the sum of its queue, compute_input, compute_infer and compute_output."""

    success: Duration
    fail: Duration
    queue: Duration
    """Waiting for one of the model's slots, for calls that succeeded."""
    compute_input: Duration
    """Reading the tensors of a request."""
    compute_infer: Duration
    """The model itself, including its waits: a session of parts lasts as long as its client wants."""
    compute_output: Duration
    """Writing the tensors of a reply."""
    cache_hit: Duration
    """Always 0: there is no response cache."""
    cache_miss: Duration
    cancel: Duration
    """The calls in `fail` whose client left before the answer was complete. Triton does not have this member."""


@final
class ResponseStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the nth responses of calls that may have many."""

    compute_infer: Duration
    compute_output: Duration
    success: Duration
    fail: Duration
    empty_response: Duration
    cancel: Duration


@final
class BatchStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The executions with one batch size."""

    batch_size: _Count
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@final
class MemoryUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that a model was loaded into."""

    type: Literal["CPU"]
    id: int
    byte_size: _Count


@final
class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of inference requests' bodies, and the bytes that were copied or converted in user space until the model had
    its arrays; a byte copied twice counts twice. Triton does not have this member."""

    received_bytes: _Count
    copied_bytes: _Count


@final
class ModelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of one model since it was loaded."""

    name: str
    version: str
    last_inference: _Count
    """The end of the last call, in milliseconds since 1970; 0 if there was none."""
    inference_count: _Count
    """Inferences of calls that succeeded: each item of a batch is one."""
    execution_count: _Count
    """Calls of the model that succeeded."""
    inference_stats: InferenceStatistics
    response_stats: dict[str, ResponseStatistics]
    """By the index of a response in its call, from 0 to 127."""
    batch_stats: tuple[BatchStatistics, ...]
    memory_usage: tuple[MemoryUsage, ...]
    """The memory reserved for a model that was loaded from a folder."""
    transfer: Transfer


@final
class StatisticsReply(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of the requested models."""

    model_stats: tuple[ModelStatistics, ...]


# -- models


@final
class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the models in service."""

    models: tuple[str, ...]


@final
class ModelIndexRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of models for an index."""

    ready: bool = False
    """True for only the models that are ready."""


@final
class ModelIndexEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model that is loaded, or that could be."""

    name: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
    reason: str
    version: str = ""
    """Absent if it is known only after loading the model."""


@final
class LoadParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """There are no parameters: a model is loaded as its folder or the configuration says."""


@final
class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to load a model."""

    parameters: LoadParameters = LoadParameters()


@final
class UnloadParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`unload_dependents` is accepted without effect: no model depends on another."""

    unload_dependents: bool = False


@final
class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to unload a model."""

    parameters: UnloadParameters = UnloadParameters()


@final
class LoadReply(msgspec.Struct, frozen=True, kw_only=True):
    """The model is loaded and answers."""

    name: str
    load: Literal[True] = True


@final
class UnloadReply(msgspec.Struct, frozen=True, kw_only=True):
    """The model is unloaded, or was not loaded before."""

    name: str
    unload: Literal[True] = True


# -- the log


@final
class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the server's log. Each severity includes those above it."""

    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: _Count
    log_format: str


@final
class LogChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of the log settings; null and absent members stay unchanged. Switching a severity on also switches on the more
    severe ones; switching it off also switches off the less severe ones. The file and the format cannot change."""

    log_file: str | None = None
    log_info: bool | None = None
    log_warning: bool | None = None
    log_error: bool | None = None
    log_verbose_level: _Count | None = None
    log_format: str | None = None


# -- shared memory


@final
class SharedMemoryRegion(msgspec.Struct, frozen=True, kw_only=True):
    """A registered region of shared memory: there is none."""

    name: str


@final
class Done(msgspec.Struct, frozen=True):
    """The request succeeded; the body is empty."""


def decode(body: Buffer, kind: type[Body], what: str) -> Body:
    """The request in a body. An empty body is a request without members. V2Error, which begins with `what`, otherwise."""
    if not len(body):
        return kind()
    try:
        value = strict.loads(body, depth=_DEPTH, what=what, duplicates=False)
    except strict.JSONError as e:
        raise V2Error(e.message) from None
    if kind is LoadRequest:
        _refuse_overrides(value, what)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as e:
        raise V2Error(f"{what}: {str(e)[: 2 * _SHOWN]}") from None


def _refuse_overrides(value: Any, what: str) -> None:
    """Refuses Triton's parameters that replace a model's own files."""
    parameters = value.get("parameters") if isinstance(value, dict) else None
    for name in parameters if isinstance(parameters, dict) else ():
        if name == "config" or name.startswith("file:"):
            raise V2Error(
                f"{what}: parameter {name[:_SHOWN]!r} is not accepted: a model is loaded as its folder or the configuration "
                "says"
            )
