"""An operator puts a new process in the place of one of a model's: what callers, the plane and the log see of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.config import Config, ListenConfig, RepositoryConfig
from gateway.testing import MemoryGateway, MemoryProcesses, current_process, in_memory_processes, memory_gateway
from models.adapt import spec_of
from models.library.echo import Echo
from models.messages import Family, Prompt, Token
from models.session import Session
from models.spec import Model, ModelSpec, Restart, RestartPolicy
from tests.gateway.operator.operators import Answer, Operator

PATIENCE = 30.0
NO_PORT = Config(listen=ListenConfig(port=-1), repository=RepositoryConfig(roots=()))


def pid() -> int:
    process = current_process()
    assert process is not None
    return process.pid


class Stage:
    """A model that says which processes it runs in: they load, fail, and hold their callers as a test has it."""

    def __init__(self) -> None:
        self.may_load, self.may_end = trio.Event(), trio.Event()
        self.may_load.set()
        self.fails = False
        self.left = list[int]()
        """The processes whose model has left its `load()`."""
        self.memory: MemoryGateway
        self.processes: MemoryProcesses

    async def _model(self, session: Session[Prompt, Token]) -> None:
        prompt = await session.receive()
        await session.send(Token(text=f"{pid()} "))
        if prompt.text == "hold":
            await self.may_end.wait()
            await session.send(Token(text=f"{pid()}"))

    @asynccontextmanager
    async def _load(self) -> AsyncIterator[Model]:
        await self.may_load.wait()
        if self.fails:
            raise OSError("no such weights")
        yield self._model
        self.left.append(pid())

    async def restart(self, number: Any = 0, name: str = "m") -> Answer:
        return await Operator(self.memory.gateway).ask("POST", f"/models/{name}/instances/{number}/restart")

    async def call(self, prompt: str = "x") -> str:
        """The processes that have answered a call."""
        return (await self.memory.client().lmi(prompt, "m", stream=True)).text.strip()

    @property
    def instances(self) -> list[tuple[str, int]]:
        return [(one.state, one.pid) for one in self.memory.gateway.models["m"].instances]

    @property
    def pids(self) -> list[int]:
        return [pid for _, pid in self.instances]

    async def until(self, true: Callable[[], Any]) -> None:
        with trio.fail_after(1000):
            while not true():  # noqa: ASYNC110
                await trio.sleep(0.01)


@asynccontextmanager
async def staged(*, instances: int = 1, beside: Sequence[ModelSpec] = (), **policy: Any) -> AsyncIterator[Stage]:
    """A gateway with such a model. Sessions of a process that is replaced have PATIENCE."""
    stage = Stage()
    restart = RestartPolicy(**{"backoff": 1, "backoff_max": 1, "jitter": 0, **policy})
    spec = ModelSpec(name="m", family=Family.TEXT, load=stage._load, restart=restart, stop_within=PATIENCE, capacity=9)
    spec, stage.processes = in_memory_processes(spec, instances=instances)
    async with memory_gateway([spec, *beside], NO_PORT, check=True) as stage.memory:
        yield stage


def logged(caplog: pytest.LogCaptureFixture, message: str) -> list[Any]:
    return [record for record in caplog.records if record.message == message]


async def test_a_new_process_takes_the_place_of_the_old_one_whose_sessions_end_there(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with staged() as stage, trio.open_nursery() as nursery:
        held, answers = list[str](), list[Answer]()

        async def hold() -> None:
            held.append(await stage.call("hold"))

        async def restart() -> None:
            answers.append(await stage.restart())

        nursery.start_soon(hold)
        await stage.until(lambda: stage.memory.gateway.models["m"].slots_in_use)
        stage.may_load = trio.Event()
        nursery.start_soon(restart)
        await stage.until(lambda: stage.instances == [("loading", 2)])
        assert await stage.call() == "1", "it is the only one"
        stage.may_load.set()
        await stage.until(lambda: answers)
        assert answers[0].status == 200
        told = answers[0].json
        assert told["state"] == "ready"
        assert [(one["state"], one["pid"], one["restarts"]) for one in told["instances"]] == [("ready", 2, 1)]
        assert await stage.call() == "2"
        assert stage.left == []
        stage.may_end.set()
        await stage.until(lambda: held)
        assert held == ["1 1"]
        await stage.until(lambda: stage.left)
        assert stage.left == [1], "its load() was left in peace"
    (noted,) = logged(caplog, "operator request")
    assert (noted.action, noted.model, noted.instance) == ("restart", "m", 0)
    assert [(one.model, one.instance) for one in logged(caplog, "instance restarted")] == [("m", 0)]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_sessions_of_the_old_process_have_the_patience_of_an_unload(autojump_clock: Any) -> None:
    async with staged() as stage, trio.open_nursery() as nursery:
        seen = list[float]()

        async def hold() -> None:
            answer = await stage.memory.client().lmi("hold", "m", stream=True)
            assert (answer.complete, "try again" in answer.error) == (False, True)
            seen.append(trio.current_time())

        nursery.start_soon(hold)
        await stage.until(lambda: stage.memory.gateway.models["m"].slots_in_use)
        assert (await stage.restart()).status == 200
        began = trio.current_time()
        await stage.until(lambda: seen)
        assert seen[0] - began >= PATIENCE
        assert await stage.call() == "2"


async def test_while_another_process_is_ready_the_old_one_gets_no_new_sessions(autojump_clock: Any) -> None:
    async with staged(instances=2) as stage, trio.open_nursery() as nursery:
        zero, one = stage.pids
        stage.may_load = trio.Event()
        nursery.start_soon(stage.restart, 1)
        await stage.until(lambda: stage.instances == [("ready", zero), ("loading", 3)])
        assert {await stage.call() for _ in range(5)} == {str(zero)}
        stage.may_load.set()
        await stage.until(lambda: stage.instances == [("ready", zero), ("ready", 3)])
        await stage.until(lambda: stage.left == [one])


@pytest.mark.parametrize("instances", [1, 2])
async def test_a_new_process_that_does_not_come_up_leaves_the_old_one(
    instances: int, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(instances=instances) as stage:
        before = stage.instances
        stage.fails = True
        refused = await stage.restart()
        assert (refused.status, refused.json["code"]) == (500, "LoadFailed")
        assert refused.json["error"] == (
            "instance 0 of model 'm' cannot be started anew: RaisedThere: OSError: no such weights; the old process goes on"
        )
        assert stage.instances == before
        assert {await stage.call() for _ in range(20)} <= {str(pid) for pid in stage.pids}
        assert [one.instance for one in logged(caplog, "instance not restarted")] == [0]
        stage.fails = False
        assert (await stage.restart()).status == 200
        assert stage.instances[0] == ("ready", instances + 2)
        stage.processes.last[0].kill()
        await stage.until(lambda: stage.instances[0] == ("ready", instances + 3))


async def test_an_old_process_that_ends_meanwhile_is_started_again_by_the_policy(autojump_clock: Any) -> None:
    async with staged(instances=2) as stage, trio.open_nursery() as nursery:
        stage.may_load, answers, old = trio.Event(), list[Answer](), stage.processes.last[0]

        async def restart() -> None:
            answers.append(await stage.restart())

        nursery.start_soon(restart)
        await stage.until(lambda: stage.instances[0] == ("loading", 3))
        old.kill()
        await wait_all_tasks_blocked()
        stage.fails = True
        stage.may_load.set()
        await stage.until(lambda: answers)
        assert (answers[0].status, "goes on" in answers[0].json["error"]) == (500, False)
        assert stage.instances[0] == ("restarting", 0)
        stage.fails = False
        await stage.until(lambda: stage.instances[0] == ("ready", 4))


async def test_another_process_that_is_given_up_meanwhile_does_not_take_the_model_along(autojump_clock: Any) -> None:
    async with staged(instances=2, kind=Restart.TEMPORARY) as stage, trio.open_nursery() as nursery:
        old, _ = stage.pids
        stage.may_load = trio.Event()
        nursery.start_soon(stage.restart, 0)
        await stage.until(lambda: stage.instances[0] == ("loading", 3))
        stage.processes.last[1].kill()
        await stage.until(lambda: stage.instances[1] == ("given-up", 0))
        assert await stage.call() == str(old), "it is the only one"
        stage.may_load.set()
        await stage.until(lambda: stage.instances == [("ready", 3), ("given-up", 0)])


async def test_a_process_that_was_given_up_can_be_started_again(autojump_clock: Any) -> None:
    async with staged(instances=2, kind=Restart.TEMPORARY) as stage:
        _, other = stage.pids
        stage.processes.last[0].kill()
        await stage.until(lambda: stage.instances[0] == ("given-up", 0))
        stage.fails = True
        assert (await stage.restart()).status == 500
        assert stage.instances == [("given-up", 0), ("ready", other)]
        stage.fails = False
        assert (await stage.restart()).status == 200
        assert stage.instances == [("ready", 4), ("ready", other)]


async def test_a_model_that_is_unloaded_meanwhile_keeps_nobody_waiting(autojump_clock: Any) -> None:
    async with staged() as stage, trio.open_nursery() as nursery:
        stage.may_load, answers = trio.Event(), list[Answer]()

        async def restart() -> None:
            answers.append(await stage.restart())

        nursery.start_soon(restart)
        await stage.until(lambda: stage.instances == [("loading", 2)])
        assert (await stage.restart()).json["code"] == "Conflict"
        assert (await Operator(stage.memory.gateway).ask("POST", "/models/m/unload")).status == 200
        await stage.until(lambda: answers)
        assert (answers[0].status, "ended meanwhile" in answers[0].json["error"]) == (500, True)


@pytest.mark.parametrize(
    ("name", "number", "status", "code", "said"),
    [
        ("none", 0, 404, "NotFound", "no model 'none'"),
        ("m", 2, 404, "NotFound", "model 'm' has no instance 2: it has 0, 1"),
        ("m", "first", 400, "ValidationError", "the number of an instance must be a whole number from 0, not 'first'"),
        ("m", "-1", 400, "ValidationError", "not '-1'"),
        ("here", 0, 409, "Conflict", "model 'here' does not run in processes (models.NAME.process)"),
    ],
)
async def test_what_cannot_be_restarted_is_refused(
    name: str, number: Any, status: int, code: str, said: str, autojump_clock: Any
) -> None:
    async with staged(instances=2, beside=[spec_of(Echo(), "here")]) as stage:
        refused = await stage.restart(number, name)
        assert (refused.status, refused.json["code"], said in refused.json["error"]) == (status, code, True), refused.json
        assert sorted(stage.instances) == [("ready", 1), ("ready", 2)]


async def test_a_process_that_is_on_its_way_is_left_to_itself(autojump_clock: Any) -> None:
    async with staged(instances=2) as stage:
        stage.processes.last[0].kill()
        await stage.until(lambda: stage.instances[0][0] == "restarting")
        assert (await stage.restart()).status == 409
        await stage.until(lambda: stage.instances[0][0] == "ready")
