"""The interfaces that a worker needs of a model's callers, and of the tracing of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.errors import Ending, GatewayError
    from gateway.party import Party
    from models.spec import Model, ModelSpec


class Caller(Protocol):
    """A caller of a model, such as an exchange."""

    incident: str
    """The id of the log line that explains its failure. The worker sets it."""
    stopped_by: str
    """`gateway` if the gateway stopped the model before it had returned. The worker sets it."""
    instance: int
    """The number of the model's process that was called. The slot sets it; before that it has no value."""

    had_slot: bool
    """True if the caller has a slot, or had one. The slot sets it; before that it has no value."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int:
        """The level at which it waits for a slot: see `gateway.workers.slots`."""
        ...

    @property
    def key(self) -> Party | None:
        """The party of the key that the caller sent; None without a key."""
        ...

    @property
    def party(self) -> Party:
        """The party that its slot counts for."""
        ...

    @property
    def held(self) -> int:
        """Bytes of the budget that it holds."""
        ...

    @property
    def bytes_in(self) -> int:
        """Bytes of its body."""
        ...

    @property
    def copied(self) -> int:
        """Bytes of its body that were copied on their way."""
        ...

    @property
    def deadline(self) -> float:
        """The deadline on Trio's clock; infinite if there is none."""
        ...

    @property
    def gone(self) -> bool:
        """True if its client has disconnected."""
        ...

    @property
    def ending(self) -> Ending | None:
        """Its one ending; None before that is decided."""
        ...

    @property
    def cancelled_at(self) -> float | None:
        """The time on Trio's clock at which its work was told to stop, or its deadline passed; None before either."""
        ...

    @property
    def interruption_or_deadline(self) -> GatewayError:
        """The error that stops it."""
        ...

    def silence(self, now: float) -> float:
        """Returns the seconds without a byte in either direction in which its client could have sent something. The time
        before its slot does not count."""
        ...

    def interrupt(self, error: GatewayError) -> None:
        """Stops its work; the first error is its ending."""
        ...

    def limit_time(self, seconds: float, setting: str) -> None:
        """Ends it that many seconds from now, with an error that names the setting."""
        ...

    def reserve_objects(self, n: int) -> Callable[[], None]:
        """Takes `n` bytes from the budget. Returns a function that gives them back."""
        ...

    def slot_wait_began(self) -> None:
        """Notes that it waits for a slot from now on."""
        ...

    def slot_wait_over(self) -> None:
        """Notes that it has a slot, or waits no longer."""
        ...


class CallSpans(Protocol):
    """Makes the spans of a model's calls."""

    def waited(self, model: str, asked: int) -> None:
        """Records that the current exchange has waited for a slot, since `asked` on `perf_counter_ns`."""
        ...

    def model(self, spec: ModelSpec, model: Model) -> Model:
        """Returns the model with a span around each call."""
        ...

    def batched(self, spec: ModelSpec) -> ModelSpec:
        """Returns the spec of a model whose requests are batched, with a span around each batch."""
        ...
