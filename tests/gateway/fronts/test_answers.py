"""A model in several fronts, as the operator plane tells it: sums, and the first place where it is not well."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec import UNSET

from gateway.fronts.answers import _Watch as Watch
from gateway.fronts.answers import models_of_all
from gateway.operator.events import News
from gateway.operator.views import ErrorView, IncidentView, ModelView
from gateway.serving.drain import DrainProgress


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


def news(**told: Any) -> News:
    nothing: dict[str, Any] = {
        "models": None, "incidents": [], "draining": None, "dropped": 0, "streams": b"", "opened": [], "closed": [],
    }  # fmt: skip
    return News(**(nothing | told))


def events(told: bytearray) -> list[tuple[str, Any]]:
    blocks = [block.split("\n", 1) for block in told.decode().strip().split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


class Link:
    def __init__(self, number: int) -> None:
        self.number = number
        self.exit: str | None = None


def link(number: int) -> Any:
    return Link(number)


DRAIN = DrainProgress(began=100.0, deadline=130.0, live=3, ended={"complete": 1}, refused=2)


def test_the_drain_of_all_is_told_as_one_and_that_of_a_front_that_is_replaced_not() -> None:
    watch, one, other = Watch(), link(0), link(1)
    assert events(watch.events_of({one: news(draining=DRAIN)}, draining=False)) == []
    later = DrainProgress(began=101.0, deadline=131.0, live=1, ended={"complete": 1, "drained": 1}, refused=0)
    told = events(watch.events_of({one: news(draining=DRAIN), other: news(draining=later)}, draining=True))
    ended = {"complete": 2, "drained": 1}
    assert told == [("draining", {"began": 100.0, "deadline": 131.0, "live": 4, "ended": ended, "refused": 2})]
    assert events(watch.events_of({one: news(), other: news()}, draining=True)) == []


def test_an_incident_of_one_front_is_told_with_what_the_others_have_of_it() -> None:
    watch, one, other = Watch(), link(0), link(1)
    view = IncidentView(
        id="a", type="KeyError", place="app.py:1 in f", model="m", version="1", error="KeyError: 1", count=2, first=1.0,
        last=2.0, stream="s", told="t", numbers=["a", "b"],
    )  # fmt: skip
    again = msgspec.structs.replace(view, id="c", count=1, first=3.0, last=3.0, numbers=["c"])
    watch.events_of({one: news(incidents=[view]), other: news()}, draining=False)
    ((name, told),) = events(watch.events_of({one: news(), other: news(incidents=[again])}, draining=False))
    assert (name, told["id"], told["count"], told["numbers"]) == ("incident", "a", 3, ["a", "b", "c"])
    one.exit = "killed"
    ((_, told),) = events(watch.events_of({other: news(incidents=[again])}, draining=False))
    assert (told["id"], told["count"]) == ("c", 1)
