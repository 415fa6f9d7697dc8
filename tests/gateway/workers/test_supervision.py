"""Supervision as an operator and an embedder see it: kinds of restart, giving up, and the state of every model."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.catalog.factories import load_spec
from gateway.config import Config, ListenConfig, ModelConfig, RestartConfig
from gateway.config.problem import ConfigError
from gateway.errors import ModelGivenUp
from gateway.gateway import Gateway
from gateway.testing import in_memory_processes
from gateway.workers.states import State
from gateway.workers.supervisor import Supervisor
from gateway.workers.worker import Worker
from models.spec import Model, ModelSpec, Restart, RestartPolicy
from tests.gateway.promises import WIRE, WIRES, House, Probe, answering, pausing, serving, silent


class Loader:
    """A model whose `load()` can be told to crash, or to end by itself."""

    def __init__(self, model: Model, fails: bool = False) -> None:
        self.model, self.fails = model, fails
        self.loads = 0
        self.crash, self.end = trio.Event(), trio.Event()

    @asynccontextmanager
    async def load(self) -> AsyncIterator[Model]:
        self.loads += 1
        crash, end = self.crash, self.end = trio.Event(), trio.Event()
        if self.fails:
            raise OSError("no weights")

        async def over(scope: trio.CancelScope) -> None:
            await end.wait()
            scope.cancel()

        async def fall() -> None:
            await crash.wait()
            raise ZeroDivisionError("in the background")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(over, nursery.cancel_scope)
            nursery.start_soon(fall)
            yield self.model
            nursery.cancel_scope.cancel()

    def spec(self, wire: str, name: str = "probe", **policy: Any) -> ModelSpec:
        restart = RestartPolicy(**{"backoff": 2.5, "jitter": 0.0, **policy})
        return ModelSpec(name=name, family=WIRE[wire].family, load=self.load, restart=restart)


def made(script: Any, wire: str, **policy: Any) -> tuple[Probe, Loader, ModelSpec]:
    probe = Probe(script)
    probe.speak(wire)
    loader = Loader(probe)
    return probe, loader, loader.spec(wire, **policy)


@asynccontextmanager
async def supervised(*specs: ModelSpec, wire: str = "bidi") -> AsyncIterator[House]:
    """A house that is drained at its end, when the tasks of its loaders are over too."""
    async with serving(*specs, wire=wire) as house:
        yield house
        await house.gateway.drain()


# -- kinds of restart ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "how", "state"),
    [
        (Restart.PERMANENT, "crash", State.RESTARTING),
        (Restart.PERMANENT, "end", State.RESTARTING),
        (Restart.TRANSIENT, "crash", State.RESTARTING),
        (Restart.TRANSIENT, "end", State.ENDED),
        (Restart.TEMPORARY, "crash", State.FAILED),
        (Restart.TEMPORARY, "end", State.ENDED),
    ],
)
async def test_what_becomes_of_a_model_that_crashes_or_ends(
    kind: Restart, how: str, state: State, autojump_clock: MockClock
) -> None:
    _, loader, spec = made(answering, "json-http1", kind=kind)
    async with supervised(spec) as house:
        getattr(loader, how).set()
        await house.still()
        assert house.gateway.models["probe"].state is state
        await trio.sleep(100)
        again = state is State.RESTARTING
        assert (loader.loads, house.gateway.models["probe"].ready) == (2 if again else 1, again)


async def test_a_temporary_model_that_does_not_load_is_not_tried_again(autojump_clock: MockClock) -> None:
    loader = Loader(Probe(silent), fails=True)
    async with supervised(loader.spec("json-http1", kind=Restart.TEMPORARY)) as house:
        await trio.sleep(100)
        status = house.gateway.models["probe"]
        assert (loader.loads, status.state, status.reason) == (1, State.FAILED, "OSError: no weights")


async def test_models_in_processes_are_unloaded_side_by_side(autojump_clock: MockClock) -> None:
    loader = Loader(Probe(silent))
    there = [in_memory_processes(loader.spec("json-http1", name)) for name in ("a", "b", "c")]
    supervisor = Supervisor([spec for spec, _ in there])
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        for _, processes in there:
            processes.last[0].stop()  # it answers nothing, and is killed after some seconds
        began = trio.current_time()
        await supervisor.stop()
        assert trio.current_time() - began < 5
    assert not any(processes.last[0].alive for _, processes in there)


async def test_chance_takes_a_share_off_the_wait_and_a_seed_repeats_it(mock_clock: MockClock) -> None:
    async def waits(seed: int) -> list[float | None]:
        worker = Worker(
            Loader(Probe(silent), fails=True).spec("bidi", jitter=0.5, intensity=3, backoff=1.0),
            chance=random.Random(seed).random,
        )
        seen: list[float | None] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.run)
            for _ in range(3):
                await wait_all_tasks_blocked()
                assert worker.life.restart_at is not None
                seen.append(worker.life.restart_at - trio.current_time())
                mock_clock.jump(seen[-1] or 0)
            await wait_all_tasks_blocked()
            worker.stop()
        return seen

    first, again, other = await waits(1), await waits(1), await waits(2)
    assert first == pytest.approx(again)
    assert first != pytest.approx(other)
    for wait, most in zip(first, (1.0, 2.0, 4.0), strict=True):
        assert wait is not None
        assert most / 2 <= wait < most


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (RestartConfig(kind="temporary", escalate=True), "a temporary model is never restarted"),
        (RestartConfig(jitter=1.5), "restart.jitter must be from 0 to 1, got 1.5"),
    ],
)
def test_a_policy_that_contradicts_itself_is_a_mistake_of_the_configuration(config: RestartConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_spec("m", ModelConfig(factory="models.library.echo:Echo", restart=config))


# -- answers to clients ----------------------------------------------------------------------------------------------


async def refused(house: House, wire: str) -> dict[str, str]:
    """The head of the refusal of a call."""
    if WIRE[wire].transport == "websocket":
        path = "/v2/models/probe/infer" if wire == "v2session" else "/models/probe/invocations-bidirectional-stream"
        fields = (("upgrade", "websocket"), ("connection", "upgrade"), ("sec-websocket-version", "13"))
        status, headers, _ = await house.ask(
            path, None, *fields, ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="), method=b"GET"
        )
        assert status == 503
        return headers
    call = await house.call(wire)
    _, over = await call.rest()
    assert (over.how, over.code) == (("error", "") if WIRE[wire].apart else ("refused", WIRE[wire].code("503")))
    return {name.decode(): value.decode() for name, value in call.headers.items()}


@pytest.mark.parametrize("wire", [w for w in WIRES if w != "bridge" and not WIRE[w].grpc])  # which says no times
async def test_while_it_restarts_every_wire_says_when_to_come_back_and_after_it_was_given_up_none_does(
    wire: str, autojump_clock: MockClock
) -> None:
    probe, loader, spec = made(answering, wire, intensity=1)
    async with supervised(spec, wire=wire) as house:
        loader.crash.set()
        await house.still()
        assert (await refused(house, wire))["retry-after"] == "3"  # 2.5 s, rounded up
        await trio.sleep(2.3)
        assert (await refused(house, wire))["retry-after"] == "1"
        await trio.sleep(0.3)
        assert house.gateway.models["probe"].ready
        loader.crash.set()
        await house.still()
        assert house.gateway.models["probe"].state is State.FAILED
        assert "retry-after" not in await refused(house, wire)
        assert probe.calls == 0


# -- the state of every model ----------------------------------------------------------------------------------------


async def test_a_snapshot_says_how_each_model_fares_and_never_changes(autojump_clock: MockClock) -> None:
    probe, loader, spec = made(pausing, "bidi", intensity=1)
    other = Probe(silent, "other").spec("bidi", capacity=7, version="4")
    async with supervised(spec, other) as house:
        first = house.gateway.models
        assert list(first) == ["probe", "other"]
        assert (first["other"].version, first["other"].capacity, first["other"].ready) == ("4", 7, True)
        call = await house.call("bidi")
        await call.take(3)
        assert (first["probe"].slots_in_use, house.gateway.models["probe"].slots_in_use) == (0, 1)
        began = trio.current_time()
        loader.crash.set()
        await call.rest()
        now = house.gateway.models["probe"]
        assert (now.state, now.reason) == (State.RESTARTING, "ZeroDivisionError: in the background")
        assert (now.crashes, now.restarts, now.restart_at) == (1, 0, began + 2.5)
        await trio.sleep(3)
        now = house.gateway.models["probe"]
        assert (now.state, now.reason, now.crashes, now.restarts, now.restart_at) == (State.READY, "", 1, 1, None)
        assert first["probe"].state is State.READY
        with pytest.raises(FrozenInstanceError):
            now.crashes = 0  # type: ignore[misc]
        assert probe.live == 0


async def test_who_waits_for_a_change_sees_each_state_that_lasts(autojump_clock: MockClock) -> None:
    _, loader, spec = made(silent, "bidi", intensity=1)
    seen: list[State] = []
    async with supervised(spec) as house:

        async def watch() -> None:
            snapshot = house.gateway.models
            while snapshot["probe"].state is not State.FAILED:
                snapshot = await house.gateway.models_after(snapshot.revision)
                seen.append(snapshot["probe"].state)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await house.still()
            assert seen == []
            loader.crash.set()
            await trio.sleep(3)
            loader.crash.set()
    # a state that lasted only a moment may be missed
    assert (seen[0], seen[-1]) == (State.RESTARTING, State.FAILED)
    assert State.READY in seen


@pytest.mark.parametrize(
    ("kind", "how", "word"),
    [
        (Restart.PERMANENT, "crash", {"status": "Unhealthy"}),
        (Restart.TEMPORARY, "crash", {"status": "FAILED", "reason": "was given up"}),
        (Restart.TRANSIENT, "end", {"status": "ENDED", "reason": "has ended"}),
    ],
)
async def test_readiness_and_ping_are_true_to_the_state(
    kind: Restart, how: str, word: dict[str, str], autojump_clock: MockClock
) -> None:
    _, loader, spec = made(silent, "json-http1", kind=kind)
    async with supervised(spec) as house:
        getattr(loader, how).set()
        await house.still()
        status, _, body = await house.ask("/v2/models/probe/ready", None, method=b"GET")
        assert (status, body) == (503, b'{"name":"probe","ready":false}')
        status, _, body = await house.ask("/ping", None, method=b"GET")
        assert (status, json.loads(body)) == (503 if "reason" in word else 200, {"probe": word})


# -- escalation ------------------------------------------------------------------------------------------------------


async def test_a_model_that_nothing_goes_on_without_ends_the_gateway_after_a_drain(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    _, loader, spec = made(silent, "bidi", intensity=0, escalate=True)
    gateway = Gateway(Config(listen=ListenConfig(port=-1)), [spec, Probe(silent, "other").spec("bidi")])
    errors: list[ModelGivenUp] = []

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        try:
            await gateway.serve(task_status=task_status)
        except ModelGivenUp as e:
            errors.append(e)

    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        loader.crash.set()
        await gateway.stopped()
        assert (await gateway.drain()).clean
    (error,) = errors
    assert "model 'probe' was given up (ZeroDivisionError: in the background)" in str(error)
    assert "models.probe.restart.escalate" in str(error)
    assert [r.levelname for r in caplog.records if r.message == "a model was given up: draining"] == ["CRITICAL"]


async def test_without_that_the_others_go_on(autojump_clock: MockClock) -> None:
    _, loader, spec = made(silent, "bidi", intensity=0)
    async with supervised(spec, Probe(answering, "other").spec("bidi")) as house:
        loader.crash.set()
        await trio.sleep(100)
        models = house.gateway.models
        assert (models["probe"].state, models["other"].state) == (State.FAILED, State.READY)
        assert not house.gateway.draining
