"""Failures of models are grouped by type and place, with its traceback and what the client was told, in bounded memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import trio

from gateway.config import Config, ListenConfig, OperatorConfig, RepositoryConfig
from gateway.core.exchange import Exchange
from gateway.fronts.answers import incidents_of_all
from gateway.operator.views import IncidentView
from gateway.telemetry.incidents import GROUPS, TRACEBACK, Incidents
from gateway.testing import memory_gateway
from gateway.workers.failures import Failure
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Prompt, Token
from models.spec import ModelSpec, Restart, RestartPolicy
from tests.gateway.operator.operators import Operator
from tests.gateway.operator.test_operator import NO_PORT
from tests.gateway.operator.test_operator_events import reading
from tests.gateway.telemetry.test_tallies import X, wait

SECRET = "a secret of the body"


async def flaky(prompt: Prompt) -> AsyncIterator[Token]:
    hidden = prompt.text + SECRET
    yield Token(text="one")
    raise KeyError(len(hidden))


async def refuses(prompt: Prompt) -> AsyncIterator[Token]:
    raise ModelError("not today")
    yield Token(text="")


def in_a_thread(prompt: Prompt) -> str:
    raise OSError("disk\x1b[31m full, password=hunter2")


async def test_failures_of_one_place_are_one_group(autojump_clock: Any) -> None:
    async with memory_gateway([flaky, refuses, in_a_thread], NO_PORT) as house:
        operator = Operator(house.gateway)
        assert await operator.get("/incidents") == {"incidents": []}
        for _ in range(3):
            answer = await house.client().lmi(SECRET, "flaky", stream=True)
        await house.client().lmi("x", "refuses")
        await house.client().lmi("x", "in_a_thread")
        thread, group = (await operator.get("/incidents"))["incidents"]
        assert (group["type"], group["model"], group["version"], group["count"]) == ("KeyError", "flaky", "1", 3)
        assert group["place"].endswith(" in flaky")
        assert __file__ in group["place"]
        assert (thread["type"], thread["place"].rpartition(" ")[2]) == ("OSError", "in_a_thread")
        assert thread["error"] == r"OSError: disk\x1b[31m full, password=********"
        assert len(group["numbers"]) == 3
        assert group["told"] == f"the model failed; incident {group['numbers'][-1]} in the server's log"
        assert group["numbers"][-1] in str(answer.error)
        assert group["stream"]
        assert "traceback" not in group
        for number in group["numbers"]:
            whole = await operator.get(f"/incidents/{number}")
            assert whole["id"] == group["id"]
        assert "raise KeyError(len(hidden))" in whole["traceback"]
        assert SECRET not in str(whole)
        assert "hunter2" not in str(await operator.get(f"/incidents/{thread['id']}"))
        missing = await operator.ask("GET", "/incidents/none")
        assert (missing.status, missing.json["code"]) == (404, "NotFound")


async def test_without_the_setting_the_text_is_in_the_log_alone(autojump_clock: Any) -> None:
    config = Config(
        listen=ListenConfig(port=-1), repository=RepositoryConfig(roots=()), operator=OperatorConfig(tracebacks=False)
    )
    async with memory_gateway([flaky], config) as house:
        operator = Operator(house.gateway)
        await house.client().lmi("x", "flaky", stream=True)
        (group,) = (await operator.get("/incidents"))["incidents"]
        assert (await operator.get(f"/incidents/{group['id']}"))["traceback"] == ""


async def test_a_load_that_fails_and_a_mistake_of_ours_are_incidents_too(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Any:
        raise ImportError("no weights")

    spec = ModelSpec(
        name="broken", family=spec_of(flaky).family, load=load, restart=RestartPolicy(kind=Restart.TEMPORARY)
    )  # fmt: skip
    async with memory_gateway([wait], NO_PORT) as house:
        operator = Operator(house.gateway)
        with pytest.raises(ImportError):
            await house.gateway.supervisor.load(spec)
        monkeypatch.setattr(Exchange, "answer_written", lambda self: None)
        monkeypatch.setattr(house.gateway.dispatcher._admission, "asked", lambda exchange, route: 1 / 0)
        with trio.move_on_after(5):
            await house.client().infer(X, "wait")
        kinds = {(group["type"], group["stream"] != "") for group in (await operator.get("/incidents"))["incidents"]}
        assert kinds == {("ImportError", False), ("ZeroDivisionError", True)}


async def test_an_error_that_nobody_can_look_at_is_told_to_its_client_all_the_same(autojump_clock: Any) -> None:
    class Hostile(Exception):
        @property
        def kind_there(self) -> str:
            raise RuntimeError("not for you")

    async def hostile(prompt: Prompt) -> AsyncIterator[Token]:
        yield Token(text="one")
        raise KeyError if prompt.text == "x" else Hostile

    async with memory_gateway([hostile], NO_PORT) as house:
        operator = Operator(house.gateway)
        for text in ("hostile", "x"):
            answer = await house.client().lmi(text, "hostile", stream=True)
            assert "the model failed; incident" in str(answer.error)
        assert [group["type"] for group in (await operator.get("/incidents"))["incidents"]] == ["KeyError"]


async def test_each_is_told_to_who_reads_events(autojump_clock: Any) -> None:
    async with memory_gateway([flaky], NO_PORT) as house, reading(house.gateway) as reader:
        await house.client().lmi("x", "flaky", stream=True)
        await trio.sleep(2)
        ((_, first),) = reader.told("incident")
        await trio.sleep(5)
        assert reader.told("incident") == []
        for _ in range(2):
            await house.client().lmi("x", "flaky", stream=True)
        await trio.sleep(2)
        ((_, again),) = reader.told("incident")
        assert (first["count"], again["count"], again["id"]) == (1, 3, first["id"])
        assert "traceback" not in again


async def test_a_server_without_a_plane_keeps_nothing(autojump_clock: Any) -> None:
    async with memory_gateway([flaky], NO_PORT) as house:
        await house.client().lmi("x", "flaky", stream=True)
        assert house.gateway.supervisor.explained == []
        operator = Operator(house.gateway)
        assert await operator.get("/incidents") == {"incidents": []}


def raised_at(line: int, text: str = "x") -> Exception:
    """One that is raised at a line of its own."""
    names: dict[str, Any] = {}
    exec(compile("\n" * line + "def fails(text):\n raise ValueError(text)", "made.py", "exec"), names)
    try:
        names["fails"](text)
    except ValueError as e:
        return e
    raise AssertionError


@pytest.fixture
def incidents() -> Incidents:
    return Incidents(tracebacks=True)


def add(incidents: Incidents, error: BaseException, number: int = 0, model: str = "m") -> None:
    incidents.add(Failure(incident=f"{number:012x}", error=error, model=model, stream="s", told="told"))


def test_groups_are_so_many_and_the_quiet_one_goes(incidents: Incidents) -> None:
    for line in range(GROUPS):
        add(incidents, raised_at(line), line)
    add(incidents, raised_at(0), 500)
    add(incidents, raised_at(GROUPS), GROUPS)
    places = [group.place for group in incidents.groups]
    assert len(places) == GROUPS
    assert places[:2] == [f"made.py:{GROUPS + 2} in fails", "made.py:2 in fails"]
    assert "made.py:3 in fails" not in places
    assert [group.count for group in incidents.since(incidents.revision - 2)] == [2, 1]
    assert incidents.find(f"{500:012x}") is incidents.find(f"{0:012x}")
    assert incidents.find(f"{1:012x}") is None


@pytest.mark.parametrize("text", ["long " * 100_000, "\x1b[31m\u202e" * 10_000, "\udcff" * 30_000, "日本" * 30_000])
def test_a_traceback_is_bounded_and_escaped(text: str, incidents: Incidents) -> None:
    add(incidents, raised_at(1, text))
    (group,) = incidents.groups
    assert len(group.traceback.encode()) <= TRACEBACK
    assert all(c.isprintable() or c == "\n" for c in group.traceback)
    assert len(group.error) <= 300 * 6


def test_one_that_goes_deep_or_whose_text_cannot_be_read_is_one_as_any(incidents: Incidents) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("not even this")

    def deep(n: int) -> None:
        deep(n + 1)

    with pytest.raises(RecursionError) as caught:
        deep(0)
    add(incidents, caught.value, 1)
    add(incidents, Mute(), 2)
    add(incidents, BaseExceptionGroup("several", [Mute(), raised_at(3)]), 3)
    assert [group.type for group in incidents.groups] == ["ExceptionGroup", "Mute", "RecursionError"]
    assert incidents.groups[1].error == "Mute: (its text cannot be read)"


def test_nothing_of_an_exception_is_kept(incidents: Incidents) -> None:
    class Large:
        pass

    def fails() -> None:
        local = Large()
        known.append(weakref.ref(local))
        raise ValueError("x")

    known: list[weakref.ref[Large]] = []
    for number in range(2):
        try:
            fails()
        except ValueError as e:
            add(incidents, e, number)
    gc.collect()
    assert [one() for one in known] == [None, None]
    assert incidents.groups[0].count == 2


def test_what_was_raised_in_another_process_has_its_type_and_place(incidents: Incidents) -> None:
    class RaisedThere(Exception):
        kind_there = "ValueError"

    error = RaisedThere("ValueError: no such token")
    error.add_note('in process 1:\n  File "app.py", line 12, in generate\n    raise ValueError\n')
    add(incidents, error)
    (group,) = incidents.groups
    assert (group.type, group.place, group.error) == ("ValueError", "app.py:12 in generate", "ValueError: no such token")


def test_the_same_in_two_fronts_is_one_group() -> None:
    one = IncidentView(
        id="a", type="KeyError", place="app.py:1 in f", model="m", version="1", error="KeyError: 1", count=2, first=10.0,
        last=20.0, stream="s", told="t", numbers=["a", "b"], traceback="first",
    )  # fmt: skip
    later = msgspec.structs.replace(
        one, id="c", count=3, first=15.0, last=30.0, numbers=["c"], error="KeyError: 2", traceback="second"
    )  # fmt: skip
    other = msgspec.structs.replace(one, place="app.py:2 in f", id="d")
    merged, alone = incidents_of_all([later, one, other])
    assert (merged.id, merged.count, merged.first, merged.last) == ("a", 5, 10.0, 30.0)
    assert (merged.error, merged.traceback, merged.numbers) == ("KeyError: 2", "first", ["a", "b", "c"])
    assert alone == other
