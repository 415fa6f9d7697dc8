"""The plane tells of one model: its changes of state, its versions during a reload, its batches, its blocked slots."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.client.questions import lmi
from gateway.fronts.answers import models_of_all
from gateway.operator.state_changes import KEPT_CHANGES, ChangeView, StateChanges
from gateway.operator.views import ModelView, VersionView
from gateway.testing import memory_gateway
from gateway.workers.states import State
from gateway.workers.worker import Worker
from models.adapt import spec_of
from models.spec import Batching, Model
from tests.gateway.dialects.text.test_rolling_wires import spec as rolling_spec
from tests.gateway.dialects.v2.test_v2_batching import Gated
from tests.gateway.operator.operators import Operator
from tests.gateway.operator.test_operator import NO_PORT
from tests.gateway.operator.test_operator_events import reading
from tests.gateway.telemetry.test_tallies import X, flood, wait, words
from tests.models.steps import Counting


async def test_a_state_is_told_with_its_time_and_reason(autojump_clock: Any) -> None:
    crash = trio.Event()

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        async def model(session: Any) -> None:
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_crash)
            yield model
            nursery.cancel_scope.cancel()

    async def _crash() -> None:
        await crash.wait()
        raise OSError("no weights")

    async with memory_gateway([replace(spec_of(words), load=load)], NO_PORT) as house:
        operator = Operator(house.gateway)
        (first,) = (await operator.get("/models/words"))["history"]
        assert (first["state"], first["version"], first["reason"]) == ("ready", "1", "")
        crash.set()
        await trio.sleep(0.001)
        history = (await operator.get("/models/words"))["history"]
        assert [change["state"] for change in history[:2]] == ["ready", "restarting"]
        assert "no weights" in history[1]["reason"]
        assert sorted(change["at"] for change in history) == [change["at"] for change in history]


async def test_versions_and_their_sessions_are_told_while_a_model_is_reloaded(autojump_clock: Any) -> None:
    async with memory_gateway([words], NO_PORT) as house:
        operator = Operator(house.gateway)
        assert (await operator.get("/models/words"))["versions"] == [{"version": "1", "state": "ready", "sessions": 0}]
        async with trio.open_nursery() as nursery, reading(house.gateway) as reader:
            nursery.start_soon(house.client().lmi, "x", "words")
            await trio.sleep(2)
            reader.events()
            await house.gateway.reload("words", replace(spec_of(words), version="2"))
            nursery.start_soon(house.client().lmi, "x", "words")
            await trio.sleep(1.5)
            told = (await operator.get("/models/words"))["versions"]
            assert told == [
                {"version": "2", "state": "ready", "sessions": 1}, {"version": "1", "state": "draining", "sessions": 1},
            ]  # fmt: skip
            *_, (_, models) = reader.told("models")
            assert models[0]["versions"] == told
        await trio.sleep(1)
        assert [one["version"] for one in (await operator.get("/models/words"))["versions"]] == ["2"]
        history = (await operator.get("/models/words"))["history"]
        assert [(c["version"], c["state"]) for c in history] == [
            ("1", "ready"), ("2", "loading"), ("2", "ready"), ("1", "draining"), ("1", "stopped"),
        ]  # fmt: skip


async def test_sizes_of_batches_are_told(autojump_clock: Any) -> None:
    gated = Gated()
    gated.go.set()
    async with memory_gateway([gated.spec(Batching(max_delay=0.5)), wait], NO_PORT) as house:
        operator = Operator(house.gateway)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(house.client().infer, {"x": np.zeros((1, 2), np.float32)}, "m")
        await house.client().infer(X, "wait")
        assert (await operator.get("/models/m"))["batches"] == {"2": 1}
        assert (await operator.get("/models/wait"))["batches"] == {"1": 1}
        assert "batches" not in (await operator.get("/models"))["models"][0]


async def test_slots_that_are_held_for_clients_that_do_not_read_are_told(autojump_clock: Any) -> None:
    async with memory_gateway([flood], NO_PORT, capacity=1024) as house, reading(house.gateway) as reader:
        talk = house.client("http1").about(lmi("x", "flood", stream=True, max_new_tokens=5000))
        await talk.begin()
        await trio.sleep(2)
        model = await Operator(house.gateway).get("/models/flood")
        assert (model["slots_in_use"], model["slots_blocked"]) == (1, 1)
        assert [models[0]["slots_blocked"] for _, models in reader.told("models")][-1] == 1
        talk.leave()
        await wait_all_tasks_blocked()
        assert (await Operator(house.gateway).get("/models/flood"))["slots_blocked"] == 0


def worker(name: str, state: State = State.READY, version: str = "1") -> Any:
    return SimpleNamespace(name=name, state=state, reason="", spec=SimpleNamespace(version=version))


def test_changes_are_so_many_of_so_many_models_and_keep_no_worker() -> None:
    changes = StateChanges([])
    for number in range(300):
        changes.noticed(worker(f"m{number}"))
    assert (changes.of("m0"), len(changes.of("m299"))) == ([], 1)
    one = Worker(spec_of(words))
    for _ in range(KEPT_CHANGES):
        for state in (State.LOADING, State.READY):
            changes.noticed(worker("words", state))
    assert len(changes.of("words")) == KEPT_CHANGES
    changes.noticed(one)
    kept = [changes._by_name, changes._last, *changes._by_name.values(), *changes.of("words")]
    assert {id(holder) for holder in kept}.isdisjoint(map(id, gc.get_referrers(one)))


def test_a_state_that_is_told_twice_is_one_change_which_has_the_later_reason() -> None:
    changes, one = StateChanges([]), worker("m", State.RESTARTING)
    changes.noticed(one)
    (first,) = changes.of("m")
    one.reason = "OSError"
    changes.noticed(one)
    assert changes.of("m") == [ChangeView(at=first.at, state="restarting", version="1", reason="OSError")]
    changes.noticed(worker("m", State.RESTARTING, version="2"))
    assert len(changes.of("m")) == 2


def test_several_fronts_are_told_as_one_model() -> None:
    def view(*changes: float, batches: dict[str, int], sessions: int) -> ModelView:
        history = [ChangeView(at=at, state="ready", version="1", reason="") for at in changes]
        versions = [VersionView(version="1", state="ready", sessions=sessions)]
        return ModelView(
            name="m", version="1", state="ready", reason="", slots_blocked=sessions, versions=versions, batches=batches,
            history=history,
        )  # fmt: skip

    (model,) = models_of_all({
        0: [view(1.0, 3.0, batches={"2": 1, "10": 1}, sessions=1)], 1: [view(2.0, batches={"2": 4}, sessions=2)],
    })  # fmt: skip
    assert model.slots_blocked == 3
    assert model.versions == [VersionView(version="1", state="ready", sessions=3)]
    assert model.batches == {"2": 5, "10": 1}
    assert isinstance(model.history, list)
    assert [(change.at, change.front) for change in model.history] == [(1.0, 0), (2.0, 1), (3.0, 0)]


async def test_a_rolling_batch_tells_how_many_sequences_it_has_stepped_at_once(autojump_clock: Any) -> None:
    async with memory_gateway([rolling_spec(Counting())], NO_PORT) as house:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(partial(house.client().lmi, "x", "count", max_new_tokens=3))
        sizes = (await Operator(house.gateway).get("/models/count"))["batches"]
        assert sum(int(size) * times for size, times in sizes.items()) == 6
        assert set(sizes) <= {"1", "2"}
