"""What a worker asks of whoever calls a model, and of whoever watches its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from models.spec import Model, ModelSpec


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
