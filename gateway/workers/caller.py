"""What a worker asks of whoever calls a model, and of whoever watches its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.errors import Ending, GatewayError
    from gateway.party import Party
    from models.spec import Model, ModelSpec


class Caller(Protocol):
    """Whoever calls a model: an exchange is one."""

    incident: str
    """The id of the log's line that explains its failure; written by the worker."""
    stopped_by: str
    """`gateway` where that has stopped the model before it had returned; written by the worker."""
    instance: int
    """The number of the process of its model that was called; written by the slot, and not set before."""

    had_slot: bool
    """Whether it has a slot, or had one; written by the slot, and not set before."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int:
        """The level at which it waits for a slot: `gateway.workers.slots`."""
        ...

    @property
    def key(self) -> Party | None:
        """That of the key which it has shown; None where it has shown none."""
        ...

    @property
    def party(self) -> Party:
        """Whom its slot is counted for."""
        ...

    @property
    def held(self) -> int:
        """Bytes of the budget that it holds."""
        ...

    @property
    def bytes_in(self) -> int:
        """Of its body."""
        ...

    @property
    def copied(self) -> int:
        """Bytes of its body that were copied on their way."""
        ...

    @property
    def deadline(self) -> float:
        """On Trio's clock; infinite where there is none."""
        ...

    @property
    def gone(self) -> bool:
        """Whether its client has left."""
        ...

    @property
    def ending(self) -> Ending | None:
        """Its one ending, once that is decided."""
        ...

    @property
    def cancelled_at(self) -> float | None:
        """When its work was told to stop, or its time was over, on Trio's clock; None: neither was so."""
        ...

    @property
    def interruption_or_deadline(self) -> GatewayError:
        """Why it is to stop."""
        ...

    def silence(self, now: float) -> float:
        """Seconds, since it had its slot, for which its client could have said something and no byte has gone either way."""
        ...

    def interrupt(self, error: GatewayError) -> None:
        """Stops its work; the first error is its ending."""
        ...

    def limit_time(self, seconds: float, setting: str) -> None:
        """It ends, with the name of the setting, that many seconds from now."""
        ...

    def reserve_objects(self, n: int) -> Callable[[], None]:
        """Pays so many bytes from the budget; what comes back gives them back."""
        ...

    def slot_wait_began(self) -> None:
        """It waits for a slot from now on."""
        ...

    def slot_wait_over(self) -> None:
        """It has one, or waits no longer."""
        ...


class CallSpans(Protocol):
    """Makes spans of a model's calls."""

    def waited(self, model: str, asked: int) -> None:
        """The current exchange has waited for a slot, since `asked` on `perf_counter_ns`."""
        ...

    def model(self, spec: ModelSpec, model: Model) -> Model:
        """The model, with a span around each call."""
        ...

    def batched(self, spec: ModelSpec) -> ModelSpec:
        """The model before its requests are joined, with a span around each batch."""
        ...
