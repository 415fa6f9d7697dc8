"""A model in several fronts, as the operator plane tells it: sums, and the first place where it is not well."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from gateway.fronts.answers import models_of_all
from gateway.operator.views import ErrorView, ModelView


def model(name: str = "chat", state: str = "ready", reason: str = "", **more: Any) -> ModelView:
    return ModelView(name=name, version="1", state=state, reason=reason, **more)


def test_its_numbers_are_sums() -> None:
    (one,) = models_of_all({
        0: [model(capacity=4, slots_in_use=1, queued=2, crashes=1)],
        1: [model(capacity=4, slots_in_use=3, queued=0, crashes=0)],
    })  # fmt: skip
    assert (one.capacity, one.slots_in_use, one.queued, one.crashes) == (8, 4, 2, 1)
    assert one.state == "ready"
    assert one.restarts is UNSET  # nobody has said it


def test_its_state_is_the_first_that_is_not_ready_with_the_front_that_has_it() -> None:
    (one,) = models_of_all({0: [model()], 1: [model(state="given-up", reason="OSError: no weights")]})
    assert (one.state, one.reason) == ("given-up", "front 1: OSError: no weights")


def test_its_last_error_is_the_newest_of_all() -> None:
    old, new = ErrorView(error="old", incident="a", ago=9.0), ErrorView(error="new", incident="b", ago=1.0)
    (one,) = models_of_all({0: [model(last_error=old)], 1: [model(last_error=new)], 2: [model(last_error=None)]})
    assert one.last_error == new


def test_each_model_is_there_once_by_name_also_where_not_all_have_it() -> None:
    told = models_of_all({0: [model("b"), model("a")], 1: [model("a"), model("c")]})
    assert [one.name for one in told] == ["a", "b", "c"]
    assert models_of_all({}) == []
