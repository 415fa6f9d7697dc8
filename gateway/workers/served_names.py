"""The rule for the names by which OpenAI's clients call models: each is one model's alone."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.config.text import show
from models.spec import ModelSpec


def clash(spec: ModelSpec, others: Iterable[ModelSpec]) -> str:
    """Returns the reason why a model cannot be beside the others: one of its names is another model's too. Empty if there is
    none. Versions of the model itself, which have its own name, may be among the others."""
    served = {name for name in spec.served_names if name != spec.name}
    for other in others:
        if other.name == spec.name:
            continue
        if other.name in served:
            return f"model {show(spec.name)} has the served name {show(other.name)}, which is the name of another model"
        if not other.served_names:
            continue
        if spec.name in other.served_names:
            return f"model {show(other.name)} has the served name {show(spec.name)}, which is the name of another model"
        if both := served.intersection(other.served_names):
            return f"models {show(other.name)} and {show(spec.name)} both have the served name {show(min(both))}"
    return ""
