"""Code that blocks: each model has its own threads, steps and stops have time limits, and a stuck step is replaced."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway import client
from gateway.catalog.factories import load_spec
from gateway.config import Config, ModelConfig
from gateway.config.load import load
from gateway.testing import in_memory_processes, memory_gateway
from gateway.workers.states import State
from gateway.workers.stop_times import BOUNDS, StopTimes
from gateway.workers.stuck import StuckWatch
from gateway.workers.worker import Worker
from models.adapt import spec_of
from models.blocking import CancelToken, Step, StepHolder, cancel_token, run_step, step_holder
from models.messages import Family, GenerationParameters, InferRequest, InferResponse, Prompt, Tensor
from models.rolling import RollingBatch, rolling
from models.session import Session
from models.spec import Batching, ModelSpec, RestartPolicy
from tests.gateway.promises import House, Line, serving
from tests.models.steps import Counting

PATIENCE = 60.0
"""Real seconds after which a thread that nobody released fails instead of hanging the tests."""


class Gates:
    """A function that blocks until it is let go, and what it saw; of numbers above 0 it makes twice as much at once."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.leave = threading.Event()
        self.tokens: list[CancelToken] = []
        self.inside = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, request: InferRequest) -> InferResponse:
        x = request["x"]
        if (x <= 0).any():
            self.block_here()
        return InferResponse(outputs=(Tensor(name="y", data=x * 2),))

    def block_here(self) -> None:
        with self._lock:
            self.tokens.append(cancel_token())
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.entered.release()
        assert self.leave.wait(PATIENCE)
        with self._lock:
            self.inside -= 1

    async def wait_entered(self, times: int = 1) -> None:
        for _ in range(times):
            assert await trio.to_thread.run_sync(lambda: self.entered.acquire(timeout=PATIENCE))

    def spec(self, name: str = "m", **fields: Any) -> ModelSpec:
        return spec_of(self, name, family=Family.TENSOR, **fields)


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    gates.leave.set()


def asked(*values: float) -> bytes:
    tensor = {"name": "x", "datatype": "FP64", "shape": [len(values), 1], "data": values}
    return json.dumps({"inputs": [tensor]}).encode()


async def begin(house: House, *values: float, model: str = "m") -> Line:
    line = house.line("http1")
    await line.send(*client.post(line.next_stream(), f"/v2/models/{model}/infer", asked(*values)))
    await house.still()
    return line


async def answer(line: Line) -> tuple[int, Any]:
    status, _, body = await line.peer.read_answer(1)
    return status, json.loads(body)


async def infer(house: House, *values: float, model: str = "m") -> Any:
    status, said = await answer(await begin(house, *values, model=model))
    assert status == 200, said
    return said["outputs"][0]["data"]


async def passes(clock: MockClock, seconds: float) -> None:
    """Time that threads have no part in: it stands still while they run."""
    for _ in range(round(seconds * 2)):
        clock.jump(0.5)
        await wait_all_tasks_blocked()


async def returned(worker: Worker) -> None:
    """Threads tell nobody when they have."""
    watch = worker.stuck
    while watch._running or watch.now or worker.slots.in_use or watch.limiter.borrowed_tokens:
        await trio.lowlevel.checkpoint()
    assert [*watch._spare, *watch._watched, *watch._breached] == []


def logged(caplog: pytest.LogCaptureFixture, message: str) -> list[Any]:
    return [record for record in caplog.records if record.getMessage() == message]


def worker_of(house: House, name: str = "m") -> Worker:
    return house.gateway.supervisor.workers[name]


# -- threads


async def test_a_model_has_threads_of_its_own_and_no_more_than_it_may(gates: Gates) -> None:
    other = Gates()
    async with serving(gates.spec(threads=2), other.spec("other", capacity=3)) as house:
        lines = [await begin(house, 0) for _ in range(4)]
        await gates.wait_entered(2)
        await house.still()
        assert gates.inside == 2
        assert await infer(house, 21, model="other") == [42]
        assert worker_of(house, "other").stuck.limiter.total_tokens == 3
        gates.leave.set()
        assert [(await answer(line))[0] for line in lines] == [200] * 4
        assert gates.most == 2
        assert worker_of(house).stuck.limiter.borrowed_tokens == 0


def test_threads_are_as_many_as_sessions_up_to_64() -> None:
    for fields, threads in (({}, 64), ({"capacity": 7}, 7), ({"capacity": 500}, 64), ({"capacity": 5, "threads": 9}, 9)):
        assert Worker(Gates().spec(**fields)).stuck.limiter.total_tokens == threads


# -- steps over their time


async def test_a_stuck_step_ends_its_session_and_is_replaced_until_it_returns(
    gates: Gates, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(gates.spec(capacity=1, step_timeout=5)) as house:
        worker = worker_of(house)
        line = await begin(house, 0)
        await gates.wait_entered()
        await passes(mock_clock, 7)
        assert await answer(line) == (504, {"error": "a step of model 'm' ran longer than 5 s (models.m.step_timeout)"})
        assert (worker.stuck.now, worker.stuck.total, worker.slots.in_use) == (1, 1, 1)
        assert gates.tokens[0].cancelled
        (record,) = logged(caplog, "model is stuck")
        assert "in block_here" in record.stack
        assert "models.m.step_timeout" in record.reason
        assert await infer(house, 3) == [6]  # another place, another thread
        await passes(mock_clock, 60)
        assert len(logged(caplog, "model is stuck")) == 1
        gates.leave.set()
        await returned(worker)
        (record,) = logged(caplog, "a stuck step or session has returned")
        assert record.replacement == "taken back"
        assert record.seconds >= 60
        assert (worker.stuck.now, worker.stuck.total, worker.slots.in_use) == (0, 1, 0)
        assert worker.stuck.limiter.total_tokens == 1
        assert await infer(house, 4) == [8]
        assert worker.slots.free == 1


async def test_the_time_is_that_of_each_step_and_does_not_count_the_wait_for_a_thread(
    gates: Gates, mock_clock: MockClock
) -> None:
    async with serving(gates.spec(threads=1, step_timeout=5, stuck_limit=0)) as house:
        first = await begin(house, 0)
        await gates.wait_entered()
        second = await begin(house, 0)
        await passes(mock_clock, 3)
        assert worker_of(house).stuck.now == 0
        gates.leave.set()
        assert [(await answer(line))[0] for line in (first, second)] == [200, 200]


async def test_a_step_of_a_client_that_has_left_is_stuck_too(gates: Gates, mock_clock: MockClock) -> None:
    async with serving(gates.spec(capacity=1, step_timeout=5)) as house:
        worker = worker_of(house)
        line = await begin(house, 0)
        await gates.wait_entered()
        line.peer.close()
        await passes(mock_clock, 3)
        assert (worker.stuck.now, worker.slots.in_use, worker.slots.free) == (0, 1, 0)
        await passes(mock_clock, 5)
        assert (worker.stuck.now, worker.slots.in_use, worker.slots.free) == (1, 1, 1)
        gates.leave.set()
        await returned(worker)


async def test_a_generator_is_stuck_in_its_step_or_its_clean_up(gates: Gates, mock_clock: MockClock) -> None:
    def generate(text: str) -> Iterator[str]:
        try:
            yield "one "
            yield "two "
        finally:
            gates.block_here()

    async with serving(spec_of(generate, "m", capacity=1, step_timeout=5)) as house:
        status, _, body = await house.ask("/predictions/m", b'{"inputs": "?", "parameters": {"max_new_tokens": 1}}')
        assert (status, json.loads(body)) == (200, {"generated_text": "one "})
        await gates.wait_entered()
        await passes(mock_clock, 10)
        assert worker_of(house).stuck.now == 1
        gates.leave.set()
        await returned(worker_of(house))


@pytest.mark.parametrize("replaced", [True, False])
async def test_a_place_in_a_limiter_of_the_models_own_is_replaced_where_it_says_so(
    gates: Gates, mock_clock: MockClock, replaced: bool
) -> None:
    own = trio.CapacityLimiter(1)

    async def model(request: InferRequest) -> InferResponse:
        return await run_step(lambda: gates(request), limiter=own, replaced=replaced)

    async with serving(spec_of(model, "m", step_timeout=5)) as house:
        stuck = await begin(house, 0)
        await gates.wait_entered()
        await passes(mock_clock, 7)
        assert (await answer(stuck))[0] == 504
        assert (own.total_tokens, worker_of(house).stuck.limiter.total_tokens) == (1 + replaced, 64)
        if replaced:
            assert await infer(house, 3) == [6]
        gates.leave.set()
        await returned(worker_of(house))
        while own.borrowed_tokens:
            await trio.lowlevel.checkpoint()
        assert own.total_tokens == 1
        assert await infer(house, 4) == [8]


# -- more than may be


async def test_one_more_than_may_be_stuck_is_a_crash_and_the_model_starts_anew(
    gates: Gates, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    spec = gates.spec(capacity=2, step_timeout=5, stuck_limit=1, restart=RestartPolicy(backoff=1))
    async with serving(spec) as house:
        worker = worker_of(house)
        lines = [await begin(house, 0) for _ in range(2)]
        await gates.wait_entered(2)
        await passes(mock_clock, 6.5)
        assert [(await answer(line))[0] for line in lines] == [504, 504]
        assert worker.state is State.RESTARTING
        assert worker.reason == (
            "TooManyStuck: 2 sessions are stuck, above 1 (models.m.stuck_limit); "
            "a step of model 'm' ran longer than 5 s (models.m.step_timeout)"
        )
        await passes(mock_clock, 2)
        assert worker.state is State.READY
        assert (worker.stuck.now, worker.slots.free, worker.slots.in_use) == (2, 1, 2)  # one of them was replaced
        assert await infer(house, 5) == [10]
        gates.leave.set()
        await returned(worker)
        assert (worker.slots.free, worker.stuck.limiter.total_tokens) == (2, 2)
        assert len(logged(caplog, "model crashed")) == 1


async def test_a_model_that_is_stuck_again_and_again_is_given_up(gates: Gates, mock_clock: MockClock) -> None:
    policy = RestartPolicy(intensity=1, period=1000, backoff=1)
    async with memory_gateway([gates.spec(capacity=8, step_timeout=5, stuck_limit=0, restart=policy)]) as memory:
        house = House(memory)
        for _ in range(2):
            line = await begin(house, 0)
            await gates.wait_entered()
            await passes(mock_clock, 7)
            assert (await answer(line))[0] == 504
            await passes(mock_clock, 3)
        assert worker_of(house).state is State.FAILED
        assert (await answer(await begin(house, 1)))[0] == 503
        gates.leave.set()
        await returned(worker_of(house))


# -- sessions that do not stop in time


async def test_a_model_that_goes_on_after_its_session_is_late_and_then_stuck(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def stubborn(session: Session[InferRequest, InferResponse]) -> None:
        request = await session.receive()
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(float(request["x"][0, 0]))

    async with serving(spec_of(stubborn, "m", capacity=1, stop_within=2)) as house:
        worker = worker_of(house)
        for seconds, stuck in ((1.0, 0), (10.0, 1)):
            line = await begin(house, seconds)
            await house.still()
            line.peer.close()
            await trio.sleep(4.5)
            assert (worker.stuck.now, worker.slots.free) == (stuck, 1)
            assert worker.stopping.breaches == stuck
        (record,) = logged(caplog, "model stopped late")
        assert "the limit is 2 s (models.m.stop_within)" in record.reason
        assert len(logged(caplog, "model is stuck")) == 1
        await trio.sleep(10)
        assert (worker.stuck.now, worker.stuck.total, worker.slots.free, worker.slots.in_use) == (0, 1, 1, 0)
        await returned(worker)
        assert (worker.stopping.times.count, worker.stopping.breaches) == (2, 1)
        assert worker.stopping.longest == pytest.approx(10)
        assert [BOUNDS[i] for i, n in enumerate(worker.stopping.times.buckets) if n] == [1.0, 10.0]


async def test_how_long_a_model_takes_to_stop_counts_its_last_step_and_its_deadline(
    gates: Gates, mock_clock: MockClock
) -> None:
    async with serving(gates.spec(timeout=3)) as house:
        worker = worker_of(house)
        assert await infer(house, 1) == [2]
        assert worker.stopping.times.count == 0  # nobody told it to stop
        line = await begin(house, 0)
        await gates.wait_entered()
        await passes(mock_clock, 4)
        assert (await answer(line))[0] == 504
        await passes(mock_clock, 20)
        assert worker.stopping.times.count == 0
        gates.leave.set()
        await returned(worker)
        assert worker.stopping.times.count == 1
        assert worker.stopping.longest >= 20
        assert worker.stopping.breaches == 0  # nothing was promised


@pytest.mark.parametrize("place", ["here", "there"])
async def test_an_answer_that_is_complete_stays_so_whatever_thread_its_model_has_left_behind(
    place: str, gates: Gates, mock_clock: MockClock
) -> None:
    left = trio.Event()

    async def leaves(session: Session[InferRequest, InferResponse]) -> None:
        request = await session.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_step, gates.block_here)
            await gates.wait_entered()
            nursery.cancel_scope.cancel()
        await session.send(InferResponse(outputs=request.inputs))
        left.set()

    spec = spec_of(leaves, "m", capacity=3, stop_within=1)
    async with serving(spec if place == "here" else in_memory_processes(spec)[0]) as house:
        worker = worker_of(house)
        line = await begin(house, 1)
        await left.wait()
        await passes(mock_clock, 3)
        assert (await answer(line))[0] == 200
        assert (worker.stuck.now, worker.slots.in_use) == (1, 1)
        gates.leave.set()
        await returned(worker)
        assert house.endings == {"complete": 1}


class Elsewhere:
    """A model that stands for one in processes: it holds out, and what is stuck is said by the process."""

    def __init__(self) -> None:
        self.leave, self.holders = trio.Event(), list[StepHolder]()
        self.__model_instances__ = ("one",)

    async def __call__(self, session: Session[Any, Any]) -> None:
        self.holders.append(step_holder())
        with trio.CancelScope(shield=True):
            await self.leave.wait()


async def test_what_is_stuck_in_a_process_is_what_that_says_and_never_a_crash_of_the_model(mock_clock: MockClock) -> None:
    model = Elsewhere()

    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        yield model

    spec = ModelSpec(name="m", family=Family.TENSOR, load=load, capacity=2, stop_within=2, stuck_limit=0)
    async with serving(spec) as house:
        worker = worker_of(house)
        lines = [await begin(house, 0) for _ in range(2)]
        for line in lines:
            line.peer.close()
        await passes(mock_clock, 5)
        assert (worker.stopping.breaches, worker.stuck.now, worker.slots.free) == (2, 0, 0)
        for holder, replaced in zip(model.holders, (True, False), strict=True):
            for _ in range(2):  # the second time says nothing new
                holder.stuck_there(step=False, stack="", replaced=replaced)
        assert (worker.stuck.now, worker.slots.free, worker.state) == (2, 1, State.READY)
        model.leave.set()
        await house.still()
        assert (worker.stuck.now, worker.slots.free, worker.stuck.total) == (0, 2, 2)


# -- batches


async def test_a_stuck_batch_ends_all_of_its_sessions_and_the_next_one_runs(gates: Gates, mock_clock: MockClock) -> None:
    spec = gates.spec(step_timeout=5, max_batch_size=4, batching=Batching(max_delay=0.5))
    async with serving(spec) as house:
        worker = worker_of(house)
        lines = [await begin(house, 0) for _ in range(3)]
        await passes(mock_clock, 1)
        await gates.wait_entered()
        late = await begin(house, 7)
        await passes(mock_clock, 7)
        said = (504, {"error": "a step of model 'm' ran longer than 5 s (models.m.step_timeout)"})
        assert [await answer(line) for line in lines] == [said] * 3
        status, told = await answer(late)
        assert (status, told["outputs"][0]["data"]) == (200, [14])
        assert (worker.stuck.now, worker.stuck.total, worker.slots.in_use) == (1, 1, 0)
        gates.leave.set()
        await returned(worker)
        assert worker.stuck.limiter.total_tokens == 64
        line = await begin(house, 8)
        await passes(mock_clock, 1)
        assert (await answer(line))[0] == 200


async def test_leaving_a_batch_that_goes_on_for_others_is_not_stopping_late(gates: Gates, mock_clock: MockClock) -> None:
    spec = gates.spec(stop_within=2, max_batch_size=4, batching=Batching(max_delay=0.5))
    async with serving(spec) as house:
        worker = worker_of(house)
        lines = [await begin(house, 0) for _ in range(2)]
        await passes(mock_clock, 1)
        await gates.wait_entered()
        lines[0].peer.close()
        await passes(mock_clock, 10)
        assert (worker.stopping.breaches, worker.stuck.now) == (0, 0)
        gates.leave.set()
        assert (await answer(lines[1]))[0] == 200
        await returned(worker)
        assert worker.stopping.times.count == 0


# -- rolling batches


class Rounds:
    """A text model on a rolling batch, whose step blocks where a sequence is named "stuck". Each load has one of its own."""

    def __init__(self, gates: Gates) -> None:
        self.gates, self.loaded, self.batches = gates, list[Counting](), list[RollingBatch[Any]]()

    @asynccontextmanager
    async def load(self) -> AsyncIterator[RollingBatch[Any]]:
        steps, step = Counting(), Counting.step

        def blocking(sequences: Any) -> Any:
            if any(sequence.name == "stuck" for sequence in sequences):
                self.gates.block_here()
            return step(steps, sequences)

        self.loaded.append(steps)
        async with rolling(Stepping(steps, blocking)) as batch:
            self.batches.append(batch)
            yield batch

    def spec(self, **fields: Any) -> ModelSpec:
        return spec_of(self.load, "m", family=Family.TEXT, restart=RestartPolicy(backoff=1), **fields)


class Stepping:
    """A step model with another step."""

    def __init__(self, steps: Counting, step: Any) -> None:
        self.open, self.prefill, self.close, self.step = steps.open, steps.prefill, steps.close, step


async def prompt(house: House, name: str, length: int = 1) -> Line:
    line = house.line("http1")
    body = json.dumps({"inputs": name, "parameters": {"max_new_tokens": length}}).encode()
    await line.send(*client.post(line.next_stream(), "/predictions/m", body))
    return line


async def test_a_stuck_round_ends_its_sessions_and_the_model_is_loaded_anew(
    gates: Gates, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rounds = Rounds(gates)
    async with serving(rounds.spec(step_timeout=5), wire="json-http1") as house:
        worker = worker_of(house)
        assert (await answer(await prompt(house, "a")))[0] == 200
        lines = [await prompt(house, "stuck", 9)]
        await gates.wait_entered()
        lines += [await prompt(house, name) for name in ("b", "c")]  # those wait for the next round
        while len(rounds.batches[0]._calls) < 3:
            await trio.lowlevel.checkpoint()
        await passes(mock_clock, 4)
        assert (worker.state, worker.stuck.now) == (State.READY, 0)
        await passes(mock_clock, 2.5)
        why = "a step of model 'm' ran longer than 5 s (models.m.step_timeout)"
        for line in lines:
            status, said = await answer(line)
            assert (status, why in str(said)) == (504, True), said
        assert house.endings == {"complete": 1, "deadline": 3}
        assert (worker.state, worker.reason) == (State.RESTARTING, f"RoundStuck: {why}")
        assert (worker.stuck.now, worker.stuck.total, worker.slots.in_use) == (1, 1, 0)
        (record,) = logged(caplog, "model is stuck")
        assert (record.reason, "in block_here" in record.stack) == (why, True)
        assert gates.tokens[0].cancelled
        await passes(mock_clock, 2)
        assert worker.state is State.READY
        assert (await answer(await prompt(house, "d")))[0] == 200
        assert [sorted(steps.opened) for steps in rounds.loaded] == [["a", "b", "c", "stuck"], ["d"]]
        assert (worker.stuck.now, rounds.loaded[0].closed) == (
            1,
            ["a"],
        )  # the stuck step is inside: nothing is closed beside it
        gates.leave.set()
        await returned(worker)
        assert len(logged(caplog, "a stuck step or session has returned")) == 1
        assert rounds.loaded[0].closed == ["a"]


async def test_a_round_of_a_warm_up_has_the_time_of_the_load(gates: Gates, mock_clock: MockClock) -> None:
    rounds = Rounds(gates)
    spec = rounds.spec(
        step_timeout=1, load_timeout=60, warmup=(Prompt(text="stuck", parameters=GenerationParameters(max_new_tokens=1)),)
    )
    worker = Worker(spec)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await gates.wait_entered()
        mock_clock.jump(20)
        worker.stuck.tick(trio.current_time())
        assert (worker.state, worker.stuck.total) == (State.LOADING, 0)
        gates.leave.set()
        await worker.first_load()
        assert (worker.state, len(rounds.loaded)) == (State.READY, 1)
        worker.stop()


async def test_a_round_whose_clients_have_all_left_is_stuck_too(gates: Gates, mock_clock: MockClock) -> None:
    rounds = Rounds(gates)
    async with serving(rounds.spec(step_timeout=5), wire="json-http1") as house:
        worker = worker_of(house)
        line = await prompt(house, "stuck")
        await gates.wait_entered()
        line.peer.close()
        await passes(mock_clock, 6.5)
        assert (worker.stuck.total, worker.state, house.endings) == (1, State.RESTARTING, {"cancelled-by-client": 1})
        await passes(mock_clock, 2)
        assert (await answer(await prompt(house, "b")))[0] == 200
        gates.leave.set()
        await returned(worker)


# -- the end


async def test_a_drain_does_not_wait_for_a_stuck_thread_longer_than_it_may(gates: Gates, mock_clock: MockClock) -> None:
    async with serving(gates.spec(step_timeout=1)) as house:
        worker = worker_of(house)
        line = await begin(house, 0)
        await gates.wait_entered()
        await passes(mock_clock, 3)
        assert (await answer(line))[0] == 504
        house.gateway.begin_drain()
        await passes(mock_clock, 30)
        assert house.gateway.over
        assert worker.stuck.now == 1
        gates.leave.set()
        await returned(worker)


async def test_a_worker_has_left_when_the_thread_of_a_stuck_batch_has(gates: Gates, mock_clock: MockClock) -> None:
    spec = gates.spec(step_timeout=1, max_batch_size=4, batching=Batching())
    async with memory_gateway([spec]) as memory:
        house = House(memory)
        line = await begin(house, 0)
        await gates.wait_entered()
        await passes(mock_clock, 3)
        assert (await answer(line))[0] == 504
        worker, left = worker_of(house), trio.Event()
        assert worker.slots.in_use == 0

        async def leave() -> None:
            await worker.slots.all_left()
            left.set()

        async with trio.open_nursery() as nursery:
            worker.stop()
            nursery.start_soon(leave)
            await passes(mock_clock, 10)
            assert worker.state is State.STOPPED
            assert not left.is_set()
            gates.leave.set()


class Deaf(StepHolder):
    """Holds a step of a session that has its whole answer already, and so is not interrupted any more."""

    told = ""

    def interrupt(self, text: str) -> None:
        self.told = text


def test_the_token_of_a_stuck_step_is_cancelled_whatever_its_session_says() -> None:
    watch, holder = StuckWatch(Gates().spec(step_timeout=2), list), Deaf()
    step = Step(CancelToken(), watch.limiter)
    watch.begin(step, holder)
    watch.tick(1000)
    assert not step.token.cancelled  # it has no thread yet
    step.began = 997
    watch.tick(999)
    assert not step.token.cancelled
    watch.tick(999.5)
    assert step.token.cancelled
    assert "models.m.step_timeout" in holder.told
    assert (watch.now, watch.limiter.total_tokens) == (1, 65)
    watch.tick(2000)
    assert (watch.now, watch.total) == (1, 1)


# -- how it is said


def test_the_configuration_says_it_in_the_place_of_the_model() -> None:
    plain = ModelConfig(factory="models.library.tensors:identity")
    spec = load_spec("m", plain)
    assert (spec.threads, spec.step_timeout, spec.stop_within, spec.stuck_limit) == (0, 0.0, 0.0, 4)
    said = {"threads": "3", "step_timeout": "30s", "stop_within": "500ms", "stuck_limit": "0"}
    overrides = {"models.m.factory": plain.factory, **{f"models.m.{key}": value for key, value in said.items()}}
    config: Config = load(file=None, environ={}, overrides=overrides)
    spec = load_spec("m", config.models["m"])
    assert (spec.threads, spec.step_timeout, spec.stop_within, spec.stuck_limit) == (3, 30.0, 0.5, 0)


@pytest.mark.parametrize("field", ["threads", "stuck_limit"])
def test_a_number_below_zero_is_none(field: str) -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        spec_of(Gates(), "m", family=Family.TENSOR, **{field: -1})


def test_the_times_of_stopping_are_in_buckets_that_include_their_bound() -> None:
    times = StopTimes(within=0.5)
    for seconds in (0.0, 0.001, 0.0011, 0.5, 30.0, 31.0):
        times.stopped(seconds)
    buckets = times.times.buckets
    assert sum(buckets) == times.times.count == 6
    assert (buckets[0], buckets[1], buckets[-2], buckets[-1]) == (2, 1, 1, 1)
    assert (times.longest, round(times.times.seconds, 4)) == (31.0, 61.5021)
    assert [times.breaks(seconds) for seconds in (0.5, 0.51)] == [False, True]
    assert not StopTimes().breaks(1000)
    assert list(BOUNDS) == sorted(BOUNDS)
    assert np.all(np.diff(BOUNDS) > 0)
