"""Workers: loading, crashing, giving up and stopping in every state; slots, queues and threads; endings of sessions."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.config import LimitsConfig
from gateway.core.exchange import Exchange
from gateway.core.turn import Turn
from gateway.errors import (
    BadRequest,
    Conflict,
    DeadlineExceeded,
    Ending,
    GatewayError,
    ModelCrashed,
    ModelFailed,
    ModelOutOfMemory,
    NotFound,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from gateway.party import Party
from gateway.workers.states import State
from gateway.workers.supervisor import Supervisor
from gateway.workers.worker import Worker
from models.blocking import run_step
from models.errors import ModelError
from models.messages import Family, Part, PartKind, Token
from models.session import Session
from models.spec import Model, ModelSpec, RestartPolicy
from protocols.buffers import ByteBudget
from protocols.events import Head, Request
from tests.models.channels import MemoryChannel

Parts = Session[Part, Part]
PATIENCE = 60.0
"""Seconds after which a thread that nobody released fails."""


class Nobody:
    """The wire and the connection of an exchange that is only ever called and interrupted."""

    name, windowed, exclusive, peer = "memory", True, False, "test"
    limits, budget, clock = LimitsConfig(), ByteBudget(1 << 20), staticmethod(trio.current_time)

    def __init__(self, party: Party | None = None) -> None:
        self.party = party or Party("test")


class Caller:
    """A client's exchange: it calls a worker as the gateway does, and keeps what became of it."""

    numbers = iter(range(1, 1 << 30))

    def __init__(self, *messages: Part, party: Party | None = None) -> None:
        nobody: Any = Nobody(party)
        self.exchange = Exchange(
            nobody, nobody, Request(stream=1, head=Head(method=b"POST", target=b"/")), id=f"x{next(self.numbers)}", now=0.0
        )
        self.channel = MemoryChannel(*messages)
        self.called = trio.Event()
        self.ended = trio.Event()
        self.outcome: GatewayError | str | None = None

    async def call(self, worker: Worker, wire: Family = Family.PARTS) -> None:
        exchange = self.exchange
        try:
            with trio.CancelScope() as scope:
                exchange.begin(scope, Turn(), trio.current_time())
                with await worker.slots.take(exchange):
                    self.called.set()
                    await worker.call(Session(self.channel), exchange, wire)
                self.outcome = "complete"
            if scope.cancelled_caught:
                self.outcome = "left" if exchange.gone else exchange.interruption_or_deadline
        except GatewayError as e:
            self.outcome = e
        finally:
            self.ended.set()

    def leave(self) -> None:
        """The client is gone."""
        self.exchange.peer_gone(Ending.CANCELLED)


async def echo(session: Parts) -> None:
    async for part in session:
        await session.send(part)


async def forever(_: Session[Any, Any]) -> None:
    await trio.sleep_forever()


class House:
    """Loads a model that can be told to crash, and keeps a diary of what happened."""

    def __init__(self, model: Model = echo) -> None:
        self.model = model
        self.diary: list[str] = []
        self.crash = trio.Event()
        self.error: Exception = ZeroDivisionError("in the background")
        self.before: Callable[[], Awaitable[None]] | None = None
        self.after: Callable[[], Awaitable[None]] | None = None

    @property
    def loads(self) -> int:
        return self.diary.count("load")

    @asynccontextmanager
    async def load(self) -> AsyncIterator[Model]:
        self.diary.append("load")
        crash = self.crash = trio.Event()

        async def background() -> None:
            await crash.wait()
            raise self.error

        try:
            if self.before is not None:
                await self.before()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(background)
                yield self.model
                nursery.cancel_scope.cancel()
        finally:
            self.diary.append("unload")
            if self.after is not None:
                await self.after()
            self.diary.append("unloaded")

    def spec(self, **options: Any) -> ModelSpec:
        options = {
            "name": "m",
            "family": Family.PARTS,
            "restart": RestartPolicy(intensity=3, period=10.0, backoff=1.0, jitter=0.0),
            **options,
        }
        return ModelSpec(load=self.load, **options)


@asynccontextmanager
async def running(spec: ModelSpec) -> AsyncIterator[Worker]:
    """A worker whose first load is decided; it is stopped at the end of the block."""
    worker = Worker(spec)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await worker.first_load()
        yield worker
        worker.stop()
        await worker.stopped.wait()


@asynccontextmanager
async def calling(worker: Worker, n: int = 1) -> AsyncIterator[list[Caller]]:
    """n callers that were let in or wait, in this order; the block's end waits for theirs."""
    callers = [Caller() for _ in range(n)]
    async with trio.open_nursery() as nursery:
        for caller in callers:
            nursery.start_soon(caller.call, worker)
            await wait_all_tasks_blocked()
        yield callers


async def outcome(worker: Worker, *messages: Part, wire: Family = Family.PARTS) -> GatewayError | str | None:
    caller = Caller(*messages)
    await caller.call(worker, wire)
    return caller.outcome


def records(caplog: pytest.LogCaptureFixture, message: str) -> list[Any]:
    return [record for record in caplog.records if record.message == message]


def is_lost(caller: Caller) -> bool:
    return isinstance(caller.outcome, WorkerLost)


# -- loading and crashing --------------------------------------------------------------------------------------------


async def test_a_loaded_model_is_ready_and_answers() -> None:
    house = House()
    async with running(house.spec()) as worker:
        assert (worker.state, worker.ready, worker.reason) == (State.READY, True, "")
        caller = Caller(Part(data=b"x"))
        await caller.call(worker)
        assert (caller.outcome, caller.channel.sent) == ("complete", [Part(data=b"x")])
        assert (worker.slots.in_use, worker.slots.live) == (0, set())
    assert worker.state is State.STOPPED
    assert house.diary == ["load", "unload", "unloaded"]


async def test_a_load_that_raises_is_tried_again_after_the_backoff(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    house = House()

    async def fail_once() -> None:
        if house.loads == 1:
            raise OSError("no weights")

    house.before = fail_once
    async with running(house.spec()) as worker:
        assert (worker.state, worker.reason) == (State.RESTARTING, "OSError: no weights")
        with pytest.raises(Unavailable, match="model 'm' is restarting; try again"):
            worker.check_ready(Caller().exchange)
        began = trio.current_time()
        await trio.sleep(0.9)
        assert house.loads == 1
        await trio.sleep(0.2)
        assert (worker.state, worker.reason, house.loads) == (State.READY, "", 2)
        assert trio.current_time() - began == pytest.approx(1.1)
    (record,) = records(caplog, "model crashed")
    assert (record.model, record.reason, record.restart_in) == ("m", "OSError: no weights", 1.0)
    assert isinstance(record.exc_info[1], OSError)


async def test_a_load_that_hangs_is_ended_at_its_timeout(autojump_clock: MockClock) -> None:
    house = House()
    house.before = trio.sleep_forever
    async with running(house.spec(load_timeout=20.0)) as worker:
        assert trio.current_time() == pytest.approx(20.0)
        assert worker.state is State.RESTARTING
        assert worker.reason == "TimeoutError: loading took longer than 20 s (models.m.load_timeout)"
        assert house.diary == ["load", "unload", "unloaded"]


async def test_a_load_that_ends_after_its_timeout_was_never_ready(autojump_clock: MockClock) -> None:
    house = House()

    async def deaf() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(30)

    house.before = deaf
    worker = Worker(house.spec(load_timeout=20.0))
    seen: list[State] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await worker.first_load()
        seen.append(worker.state)
        nursery.cancel_scope.cancel()
    assert seen == [State.RESTARTING]
    assert worker.reason.startswith("TimeoutError: loading took longer")


async def test_a_slow_load_and_a_long_life_meet_no_timeout(autojump_clock: MockClock) -> None:
    house = House()

    async def slow() -> None:
        await trio.sleep(19)

    house.before = slow
    async with running(house.spec(load_timeout=20.0)) as worker:
        await trio.sleep(10_000)
        assert (worker.state, house.loads) == (State.READY, 1)


async def test_a_crash_in_the_background_ends_live_sessions_and_loads_the_model_anew(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(forever)
    async with running(house.spec()) as worker, calling(worker, 2) as callers:
        house.crash.set()
        for caller in callers:
            await caller.ended.wait()
        assert all(map(is_lost, callers))
        assert worker.state is State.RESTARTING
        assert isinstance(await outcome(worker), Unavailable)
        await trio.sleep(1.1)
        house.model = echo
        assert (worker.state, house.loads, worker.slots.in_use) == (State.READY, 2, 0)
        assert isinstance(await late_outcome(worker), str)
    assert worker.reason == ""
    (record,) = records(caplog, "model crashed")
    assert record.reason == "ZeroDivisionError: in the background"


async def late_outcome(worker: Worker) -> GatewayError | str | None:
    """The outcome of a caller that leaves when its session has begun."""
    caller = Caller()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caller.call, worker)
        await caller.called.wait()
        caller.leave()
    return caller.outcome


async def test_sessions_learn_of_a_crash_before_the_clean_up_has_run(autojump_clock: MockClock) -> None:
    house = House(forever)
    async with running(house.spec()) as worker, calling(worker) as (caller,):

        async def clean_up() -> None:
            with trio.CancelScope(shield=True):
                await caller.ended.wait()

        house.after = clean_up
        house.crash.set()
        await caller.ended.wait()
        assert is_lost(caller)


async def test_waits_double_and_too_many_crashes_give_the_model_up(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    house = House()
    async with running(house.spec()) as worker:
        for wait in (1.0, 2.0, 4.0):
            house.crash.set()
            await wait_all_tasks_blocked()
            before = house.loads
            await trio.sleep(wait - 0.1)
            assert (worker.state, house.loads) == (State.RESTARTING, before)
            await trio.sleep(0.2)
            assert (worker.state, house.loads) == (State.READY, before + 1)
        house.crash.set()
        await wait_all_tasks_blocked()
        assert worker.state is State.FAILED
        with pytest.raises(Unavailable, match="it crashed too often; the log says why"):
            worker.check_ready(Caller().exchange)
        await trio.sleep(10_000)
        assert (worker.state, house.loads) == (State.FAILED, 4)
    (record,) = records(caplog, "model given up")
    assert record.restart_in is None


async def test_crashes_of_long_ago_are_forgiven_and_forgotten(autojump_clock: MockClock) -> None:
    house = House()
    async with running(house.spec()) as worker:
        for _ in range(20):
            house.crash.set()
            await trio.sleep(11)
            assert worker.state is State.READY
        assert len(worker.crashes) == 1


async def test_more_crashes_than_a_hundred_can_be_too_many(autojump_clock: MockClock) -> None:
    house = House()
    policy = RestartPolicy(intensity=120, period=1000.0, backoff=0.0)

    async def fail() -> None:
        raise OSError

    house.before = fail
    async with running(house.spec(restart=policy)) as worker:
        await trio.sleep(1)
        assert (worker.state, house.loads) == (State.FAILED, 121)


async def test_a_group_of_one_is_told_as_that_one() -> None:
    house = House()
    house.error = ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("x" * 1000)])])
    async with running(house.spec()) as worker:
        house.crash.set()
        await wait_all_tasks_blocked()
        assert worker.reason.startswith("OSError: xxx")
        assert len(worker.reason) == 300


async def test_a_clean_up_after_a_crash_that_hangs_is_cut_short(autojump_clock: MockClock) -> None:
    house = House()
    house.after = trio.sleep_forever
    async with running(house.spec()) as worker:
        house.crash.set()
        await trio.sleep(4.9)
        assert (worker.state, house.loads) == (State.RESTARTING, 1)
        await trio.sleep(0.2)
        assert worker.reason == "TimeoutError: unloading took longer than 5 s"
        await trio.sleep(1.0)
        assert (worker.state, house.loads) == (State.READY, 2)


async def test_a_load_that_ends_its_own_context_is_a_crash(autojump_clock: MockClock) -> None:
    loads = 0

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        nonlocal loads
        loads += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end, nursery.cancel_scope)
            yield echo

    async def end(scope: trio.CancelScope) -> None:
        await trio.sleep(1)
        scope.cancel()

    async with running(ModelSpec(name="m", family=Family.PARTS, load=load)) as worker:
        await trio.sleep(1.05)
        assert worker.state is State.RESTARTING
        assert worker.reason == "LoadEnded: load() ended its context by itself"
        await trio.sleep(0.1)
        assert (worker.ready, loads) == (True, 2)


# -- stopping --------------------------------------------------------------------------------------------------------


async def test_stopping_while_it_loads_gives_up_the_load(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    house = House()
    house.before = trio.sleep_forever
    worker = Worker(house.spec())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await wait_all_tasks_blocked()
        assert worker.state is State.LOADING
        worker.stop()
        await worker.stopped.wait()
    assert trio.current_time() == 0
    assert (worker.state, house.diary) == (State.STOPPED, ["load", "unload", "unloaded"])
    assert caplog.records == []


async def test_stopping_before_it_runs_loads_nothing() -> None:
    house = House()
    worker = Worker(house.spec())
    worker.stop()
    await worker.run()
    await worker.first_load()
    assert (worker.state, house.diary) == (State.STOPPED, [])


async def test_stopping_while_it_waits_to_restart_does_not_wait(autojump_clock: MockClock) -> None:
    house = House()
    async with running(house.spec()) as worker:
        house.crash.set()
        await wait_all_tasks_blocked()
        began = trio.current_time()
        worker.stop()
        await worker.stopped.wait()
        assert (worker.state, house.loads, trio.current_time()) == (State.STOPPED, 1, began)


async def test_stopping_what_was_given_up_and_stopping_twice_are_fine() -> None:
    house = House()
    async with running(house.spec(restart=RestartPolicy(intensity=0))) as worker:
        house.crash.set()
        await wait_all_tasks_blocked()
        assert worker.state is State.FAILED
        for _ in range(2):
            worker.stop()
            await worker.stopped.wait()
        with pytest.raises(NotFound, match="model 'm' is not loaded"):
            worker.check_ready(Caller().exchange)


async def test_stopping_ends_live_sessions_and_those_that_wait_and_then_unloads() -> None:
    house = House(forever)
    async with running(house.spec(capacity=1)) as worker, calling(worker, 3) as callers:
        worker.stop()
        assert worker.state is State.DRAINING
        with pytest.raises(Unavailable, match="is draining"):
            worker.check_ready(Caller().exchange)
        worker.stop()
        await worker.stopped.wait()
        assert all(map(is_lost, callers))
    assert house.diary == ["load", "unload", "unloaded"]


async def test_a_model_is_unloaded_after_its_last_session_and_its_last_thread(autojump_clock: MockClock) -> None:
    leave, entered = threading.Event(), trio.Event()

    async def model(_: Parts) -> None:
        token = trio.lowlevel.current_trio_token()

        def step() -> None:
            trio.from_thread.run_sync(entered.set, trio_token=token)
            leave.wait(PATIENCE)

        try:
            await run_step(step)
        finally:
            house.diary.append("session over")

    house = House(model)
    async with running(house.spec()) as worker, calling(worker) as (caller,):
        await entered.wait()
        worker.stop()
        await trio.sleep(4.9)
        assert is_lost(caller)
        assert (house.diary, worker.slots.in_use) == (["load", "session over"], 1)
        leave.set()
        while worker.slots.in_use:
            await trio.lowlevel.checkpoint()
        await worker.stopped.wait()
    assert house.diary == ["load", "session over", "unload", "unloaded"]


async def test_a_thread_that_does_not_return_delays_the_unloading_by_five_seconds(autojump_clock: MockClock) -> None:
    leave, entered = threading.Event(), trio.Event()

    async def model(_: Parts) -> None:
        await run_step(lambda: (trio.from_thread.run_sync(entered.set), leave.wait(PATIENCE)))

    house = House(model)

    async def clean_up() -> None:
        await trio.sleep(4)  # it has its own five seconds

    house.after = clean_up
    async with running(house.spec()) as worker, calling(worker):
        await entered.wait()
        began = trio.current_time()
        worker.stop()
        await worker.stopped.wait()
        assert trio.current_time() - began == pytest.approx(9)
        assert house.diary == ["load", "unload", "unloaded"]
        leave.set()
        while worker.slots.in_use:
            await trio.lowlevel.checkpoint()


async def test_an_unloading_that_hangs_is_cut_short_and_told(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    house = House()
    house.after = trio.sleep_forever
    async with running(house.spec()) as worker:
        pass
    assert trio.current_time() == pytest.approx(5)
    assert worker.state is State.STOPPED
    (record,) = records(caplog, "model did not unload")
    assert record.reason == "unloading took longer than 5 s"


async def test_an_unloading_that_raises_is_told_and_is_no_crash(caplog: pytest.LogCaptureFixture) -> None:
    house = House()

    async def fail() -> None:
        raise OSError("busy")

    house.after = fail
    async with running(house.spec()) as worker:
        pass
    assert (worker.state, worker.crashes, house.loads) == (State.STOPPED, [], 1)
    (record,) = records(caplog, "model did not unload")
    assert record.reason == "busy"


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.RESTARTING, State.FAILED])
async def test_a_worker_that_is_cancelled_from_outside_is_stopped_in_every_state(state: State) -> None:
    house = House(forever)
    worker = Worker(house.spec(restart=RestartPolicy(intensity=0 if state is State.FAILED else 3)))
    if state is State.LOADING:
        house.before = trio.sleep_forever
    async with trio.open_nursery() as clients, trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await wait_all_tasks_blocked()
        caller = Caller()
        if state is State.READY:
            clients.start_soon(caller.call, worker)
            await caller.called.wait()
        elif state is not State.LOADING:
            house.crash.set()
            await wait_all_tasks_blocked()
        assert worker.state is state
        nursery.cancel_scope.cancel()
    assert (worker.state, worker.stopped.is_set()) == (State.STOPPED, True)
    assert house.diary == ["load", "unload", "unloaded"]
    await worker.first_load()
    if state is State.READY:
        assert is_lost(caller)


# -- slots and the queue ---------------------------------------------------------------------------------------------


async def test_sessions_beyond_the_capacity_wait_in_order_and_those_beyond_the_queue_are_refused() -> None:
    house = House(forever)
    async with running(house.spec(capacity=2, queue=3)) as worker, calling(worker, 5) as callers:
        assert [c.called.is_set() for c in callers] == [True, True, False, False, False]
        refused = await outcome(worker)
        assert isinstance(refused, Overloaded)
        assert (
            refused.message
            == "model 'm' is busy: 2 sessions run and 3 wait (models.m.capacity, models.m.queue); try again later"
        )
        assert worker.slots.in_use == 2
        for gone, (first, next_in) in enumerate([(1, 2), (2, 3), (0, 4)]):
            callers[first].leave()
            await wait_all_tasks_blocked()
            assert [c.called.is_set() for c in callers].count(True) == 3 + gone
            assert callers[next_in].called.is_set()
        for caller in callers:
            caller.leave()
        await wait_all_tasks_blocked()
        assert (worker.slots.in_use, worker.slots.live) == (0, set())


async def test_no_queue_means_no_waiting() -> None:
    house = House(forever)
    async with running(house.spec(capacity=1, queue=0)) as worker, calling(worker) as (caller,):
        assert isinstance(await outcome(worker), Overloaded)
        caller.leave()


async def test_a_client_that_leaves_the_queue_takes_no_slot_and_keeps_nobody_waiting() -> None:
    house = House(forever)
    async with running(house.spec(capacity=1)) as worker, calling(worker, 3) as (first, second, third):
        second.leave()
        await second.ended.wait()
        assert second.outcome == "left"
        first.leave()
        await third.called.wait()
        assert worker.slots.in_use == 1
        third.leave()
        await third.ended.wait()
        assert worker.slots.in_use == 0


@pytest.mark.parametrize("granted", [True, False])
async def test_a_slot_granted_in_the_moment_its_client_leaves_is_not_lost(granted: bool) -> None:
    house = House(forever)
    async with running(house.spec(capacity=1)) as worker, trio.open_nursery() as nursery:
        second = Caller()
        with await worker.slots.take(Caller().exchange):
            nursery.start_soon(second.call, worker)
            await wait_all_tasks_blocked()
            if not granted:
                second.leave()
        if granted:
            second.leave()  # the slot is its own by now, but it has not run since
        await second.ended.wait()
        assert (second.outcome, second.called.is_set()) == ("left", granted)
        assert worker.slots.in_use == 0


async def test_a_slot_granted_in_the_moment_the_worker_stops_starts_nothing() -> None:
    house = House()
    async with running(house.spec(capacity=1)) as worker, trio.open_nursery() as nursery:
        second = Caller()
        with await worker.slots.take(Caller().exchange):
            nursery.start_soon(second.call, worker)
            await wait_all_tasks_blocked()
        worker.stop()
        await second.ended.wait()
        assert isinstance(second.outcome, Unavailable)
        assert not second.called.is_set()
        assert worker.slots.in_use == 0


async def test_a_queue_is_turned_away_when_the_worker_is_lost_though_a_thread_keeps_the_slot() -> None:
    leave, entered = threading.Event(), trio.Event()

    async def model(_: Parts) -> None:
        await run_step(lambda: (trio.from_thread.run_sync(entered.set), leave.wait(PATIENCE)))

    house = House(model)
    spec = house.spec(capacity=1, restart=RestartPolicy(intensity=0))
    async with running(spec) as worker, trio.open_nursery() as nursery:
        first, second = Caller(), Caller()
        nursery.start_soon(first.call, worker)
        await entered.wait()
        nursery.start_soon(second.call, worker)
        while not worker.slots.queued:
            await trio.lowlevel.checkpoint()
        house.crash.set()
        await second.ended.wait()
        await first.ended.wait()
        assert is_lost(first)
        assert is_lost(second)
        assert worker.slots.in_use == 1
        leave.set()
        while worker.slots.in_use:
            await trio.lowlevel.checkpoint()


async def test_a_slot_is_held_by_an_abandoned_step_until_it_returns() -> None:
    leave, entered = threading.Event(), trio.Event()

    async def model(_: Parts) -> None:
        await run_step(lambda: (trio.from_thread.run_sync(entered.set), leave.wait(PATIENCE)))

    house = House(model)
    async with running(house.spec(capacity=1, queue=1)) as worker, trio.open_nursery() as nursery:
        first, second = Caller(), Caller()
        nursery.start_soon(first.call, worker)
        await entered.wait()
        first.leave()
        await first.ended.wait()
        assert (worker.slots.in_use, worker.slots.live) == (1, set())
        house.model = echo
        nursery.start_soon(second.call, worker)
        while not worker.slots.queued:
            await trio.lowlevel.checkpoint()
        assert not second.called.is_set()
        leave.set()
        await second.ended.wait()
        assert worker.slots.in_use == 0


async def test_a_model_that_is_not_ready_takes_no_slot() -> None:
    house = House()
    house.before = trio.sleep_forever
    worker = Worker(house.spec())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await wait_all_tasks_blocked()
        loading = await outcome(worker)
        assert isinstance(loading, Unavailable)
        assert loading.message == "model 'm' is loading; try again"
        nursery.cancel_scope.cancel()
    assert isinstance(await outcome(worker), Unavailable), "nobody has unloaded it: its server is going"
    assert (worker.slots.in_use, worker.slots.live) == (0, set())


async def test_a_model_lost_between_slot_and_call_is_unavailable() -> None:
    house = House()
    async with running(house.spec()) as worker:
        caller = Caller()
        with await worker.slots.take(caller.exchange):
            worker.stop()
            with pytest.raises(Unavailable):
                await worker.call(Session(caller.channel), caller.exchange, Family.PARTS)
        assert caller.exchange.interruption is None


async def test_a_session_lasts_no_longer_than_its_timeout(autojump_clock: MockClock) -> None:
    house = House(forever)
    async with running(house.spec(timeout=7.0)) as worker:
        assert isinstance(await outcome(worker), DeadlineExceeded)
        assert trio.current_time() == pytest.approx(7.0)
        assert worker.slots.in_use == 0
        assert worker.ready, "a session that is too long is no fault of the worker"


# -- the ending for each way that a model ends -----------------------------------------------------------------------


def raising(error: BaseException) -> Model:
    async def model(_: Session[Any, Any]) -> None:
        raise error

    return model


def in_nursery(model: Model, *, depth: int = 1) -> Model:
    async def wrapped(session: Session[Any, Any]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_nursery(model, depth=depth - 1) if depth > 1 else model, session)

    return wrapped


@pytest.fixture(params=[0, 1, 3], ids=lambda n: f"in {n} nurseries")
def wrap(request: pytest.FixtureRequest) -> Callable[[Model], Model]:
    return lambda model: in_nursery(model, depth=request.param) if request.param else model


async def end_of(model: Model, *messages: Part, complete: bool = False) -> tuple[Any, Caller]:
    async with running(House(model).spec()) as worker:
        caller = Caller(*messages)
        caller.channel.complete = complete
        await caller.call(worker)
        assert (worker.slots.in_use, worker.slots.live, worker.ready, worker.crashes) == (0, set(), True, [])
        return caller.outcome, caller


async def test_a_model_error_reaches_the_client_with_its_text_code_and_status(wrap: Callable[[Model], Model]) -> None:
    error, caller = await end_of(wrap(raising(ModelError("too hot", code="Hot", status=418))))
    assert isinstance(error, ModelFailed)
    assert (error.message, error.code, error.status) == ("too hot", "Hot", 418)
    assert caller.exchange.incident == ""


async def test_any_other_exception_is_an_incident_that_the_log_explains(
    wrap: Callable[[Model], Model], caplog: pytest.LogCaptureFixture
) -> None:
    error, caller = await end_of(wrap(raising(ZeroDivisionError("secret"))))
    assert isinstance(error, ModelCrashed)
    incident = caller.exchange.incident
    assert error.message == f"the model failed; incident {incident} in the server's log"
    assert len(incident) == 12
    (record,) = records(caplog, "model raised")
    assert (record.model, record.id, record.incident) == ("m", caller.exchange.id, incident)
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_errors_of_ours_pass_through_a_model(wrap: Callable[[Model], Model]) -> None:
    ours = BadRequest("bad frame")
    error, _ = await end_of(wrap(raising(ours)))
    assert error is ours


@pytest.mark.parametrize("error", [ModelError("said"), BadRequest("said")])
async def test_what_is_meant_for_the_client_wins_over_what_comes_with_it(error: Exception) -> None:
    group = ExceptionGroup("several", [trio.EndOfChannel(), ExceptionGroup("deep", [ZeroDivisionError(), error])])
    told, _ = await end_of(raising(group))
    assert isinstance(told, GatewayError)
    assert told.message == "said"


async def test_several_errors_are_one_incident_with_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    group = ExceptionGroup("several", [ZeroDivisionError(), KeyError()])
    error, _ = await end_of(raising(group))
    assert isinstance(error, ModelCrashed)
    (record,) = records(caplog, "model raised")
    assert record.exc_info[1] is group


async def test_reading_past_the_end_of_input_is_a_normal_end(wrap: Callable[[Model], Model]) -> None:
    async def model(session: Parts) -> None:
        while True:
            await session.send(await session.receive())

    end, caller = await end_of(wrap(model), Part(data=b"x"))
    assert (end, caller.channel.sent) == ("complete", [Part(data=b"x")])


async def test_sending_after_the_answer_is_complete_is_a_normal_end(wrap: Callable[[Model], Model]) -> None:
    async def model(session: Parts) -> None:
        await session.send(Part(data=b"x"))

    end, _ = await end_of(wrap(model), complete=True)
    assert end == "complete"


async def test_a_closed_resource_of_the_models_own_is_an_incident() -> None:
    error, _ = await end_of(raising(trio.ClosedResourceError("its database")))
    assert isinstance(error, ModelCrashed)


async def test_an_incident_beside_a_normal_end_is_still_an_incident() -> None:
    error, _ = await end_of(raising(ExceptionGroup("both", [trio.EndOfChannel(), ZeroDivisionError()])))
    assert isinstance(error, ModelCrashed)


async def test_a_model_that_raises_while_it_is_cancelled_ends_as_cancelled(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def model(session: Parts) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(forever, session)
            nursery.start_soon(rude)

    async def rude() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ZeroDivisionError("on the way out")

    async with running(House(model).spec(timeout=3.0)) as worker:
        assert isinstance(await outcome(worker), DeadlineExceeded)
        assert worker.slots.in_use == 0
    (record,) = records(caplog, "model raised while cancelled")
    assert isinstance(record.exc_info[1], ExceptionGroup)


async def test_a_group_of_nothing_but_cancellations_is_a_cancellation(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def model(session: Parts) -> None:
        try:
            await forever(session)
        except trio.Cancelled as e:
            raise BaseExceptionGroup("as older nurseries did", [e]) from None

    async with running(House(model).spec(timeout=3.0)) as worker:
        assert isinstance(await outcome(worker), DeadlineExceeded)
    assert records(caplog, "model raised while cancelled") == []


# torch's, of a device, is a RuntimeError
of_a_device = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})("CUDA out of memory")


@pytest.mark.parametrize("error", [MemoryError(), of_a_device, ExceptionGroup("of a nursery", [OSError(), MemoryError()])])
async def test_a_model_that_runs_out_of_memory_says_so_with_507(error: Exception) -> None:
    async with running(House(raising(error)).spec()) as worker:
        caller = Caller()
        await caller.call(worker)
        assert isinstance(caller.outcome, ModelOutOfMemory)
        assert caller.outcome.status == 507
        incident = caller.exchange.incident
        assert caller.outcome.message == f"the model ran out of memory; incident {incident} in the server's log"
        assert worker.ready


async def test_an_interrupt_from_the_keyboard_is_never_swallowed() -> None:
    group = BaseExceptionGroup("both", [KeyboardInterrupt(), ZeroDivisionError()])
    async with running(House(raising(group)).spec()) as worker:
        with pytest.raises(BaseExceptionGroup) as caught:
            await Caller().call(worker)
        assert caught.value is group
        assert worker.slots.in_use == 0


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
async def test_what_else_is_no_exception_is_a_crash_of_its_session(error: BaseException, wrapped: bool) -> None:
    raised = BaseExceptionGroup("of a nursery", [error, ZeroDivisionError()]) if wrapped else error
    async with running(House(raising(raised)).spec()) as worker:
        caller = Caller()
        await caller.call(worker)
        assert isinstance(caller.outcome, ModelCrashed)
        assert worker.slots.in_use == 0


async def test_a_model_of_another_family_is_converted_for_the_wire() -> None:
    async def words(session: Session[Any, Any]) -> None:
        async for prompt in session:
            await session.send(Token(text=prompt.text.upper()))

    async with running(House(words).spec(family=Family.TEXT)) as worker:
        caller = Caller(Part(data=b"hi"))
        await caller.call(worker)
    assert caller.outcome == "complete"
    assert caller.channel.sent == [Part(data=b"HI", kind=PartKind.UTF8), Part(data=b"", kind=PartKind.UTF8)]


# -- the supervisor --------------------------------------------------------------------------------------------------


class Street:
    """Several houses under one supervisor, and one diary."""

    def __init__(self, *names: str) -> None:
        self.diary: list[str] = []
        self.hangs: set[str] = set()
        self.fails: set[str] = set()
        self.supervisor = Supervisor(
            ModelSpec(name=n, family=Family.PARTS, load=self._load(n), restart=RestartPolicy(intensity=0)) for n in names
        )

    def _load(self, name: str) -> Callable[[], AbstractAsyncContextManager[Model]]:
        @asynccontextmanager
        async def load() -> AsyncIterator[Model]:
            self.diary.append(f"load {name}")
            if name in self.fails:
                raise OSError
            if name in self.hangs:
                await trio.sleep_forever()
            yield echo
            self.diary.append(f"unload {name}")

        return load

    def states(self) -> Iterator[str]:
        return (w.state.value for w in self.supervisor.workers.values())


async def test_models_start_in_order_and_stop_in_reverse() -> None:
    street = Street("a", "b", "c")
    async with trio.open_nursery() as nursery:
        await nursery.start(street.supervisor.run)
        assert list(street.states()) == ["ready"] * 3
        await street.supervisor.stop()
    assert street.diary == ["load a", "load b", "load c", "unload c", "unload b", "unload a"]
    assert list(street.states()) == ["stopped"] * 3


async def test_a_model_that_fails_leaves_the_others_alone() -> None:
    street = Street("a", "b", "c")
    street.fails = {"b"}
    async with trio.open_nursery() as nursery:
        await nursery.start(street.supervisor.run)
        assert list(street.states()) == ["ready", "failed", "ready"]
        assert await outcome(street.supervisor.workers["c"], Part(data=b"x")) == "complete"
        assert street.supervisor.loading == []
        await street.supervisor.stop()


async def test_stopping_while_one_loads_gives_it_up_and_starts_no_other() -> None:
    street = Street("a", "b", "c")
    street.hangs = {"b"}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(street.supervisor.run)
        await wait_all_tasks_blocked()
        assert street.supervisor.loading == ["b", "c"]
        await street.supervisor.stop()
    assert street.diary == ["load a", "load b", "unload a"]
    assert list(street.states()) == ["stopped"] * 3


async def test_a_supervisor_that_is_cancelled_stops_every_worker() -> None:
    street = Street("a", "b")
    async with trio.open_nursery() as nursery:
        await nursery.start(street.supervisor.run)
        nursery.cancel_scope.cancel()
    assert list(street.states()) == ["stopped"] * 2


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two models are named 'a': give one another name"):
        Street("a", "a")


async def test_a_model_that_exits_while_it_loads_ends_nobody_else() -> None:
    house = House()

    async def leave() -> None:
        raise SystemExit(3)

    house.before = leave
    async with running(house.spec()) as worker:
        assert (worker.state, worker.reason) == (State.RESTARTING, "SystemExit: 3")


async def test_a_patient_stop_lets_sessions_end_and_an_impatient_one_hurries_it(mock_clock: MockClock) -> None:
    house = House(forever)
    async with running(house.spec(capacity=1)) as worker, calling(worker, 2) as (first, second):
        worker.stop(20.0)
        await second.ended.wait()
        assert isinstance(second.outcome, Unavailable)
        mock_clock.jump(19)
        await wait_all_tasks_blocked()
        assert (worker.state, first.ended.is_set()) == (State.DRAINING, False)
        worker.stop(60.0)  # no more patience than before
        mock_clock.jump(1)
        await first.ended.wait()
        assert is_lost(first)
    async with running(house.spec()) as worker, calling(worker) as (caller,):
        worker.stop(20.0)
        await wait_all_tasks_blocked()
        worker.stop()
        await caller.ended.wait()
        assert is_lost(caller)


async def test_models_come_and_go_at_run_time_beside_the_configured_ones() -> None:
    street, house, other = Street("a"), House(), House()
    supervisor = street.supervisor
    async with trio.open_nursery() as nursery:
        with pytest.raises(Unavailable):
            await supervisor.load(house.spec())
        await nursery.start(supervisor.run)
        worker = await supervisor.load(house.spec(name="b"))
        await supervisor.load(other.spec(name="c"))
        assert (list(supervisor.workers), supervisor.workers["b"]) == (["a", "b", "c"], worker)
        for taken in ("a", "b"):
            with pytest.raises(Conflict, match=f"a model named '{taken}' is there already"):
                await supervisor.load(house.spec(name=taken))
        await supervisor.unload("b")
        assert (list(supervisor.workers), house.diary) == (["a", "c"], ["load", "unload", "unloaded"])
        for absent in ("a", "b"):
            with pytest.raises(NotFound, match=f"no model '{absent}' was loaded"):
                await supervisor.unload(absent)
        await supervisor.stop()
        with pytest.raises(Unavailable):
            await supervisor.load(house.spec(name="b"))
    assert other.diary == ["load", "unload", "unloaded"]


async def test_a_load_at_run_time_that_fails_raises_what_the_model_raised_and_leaves_nothing(
    autojump_clock: MockClock,
) -> None:
    street, house = Street("a"), House()

    async def fail() -> None:
        raise OSError("no weights")

    house.before = fail
    async with trio.open_nursery() as nursery:
        await nursery.start(street.supervisor.run)
        with pytest.raises(OSError, match="no weights"):
            await street.supervisor.load(house.spec())
        assert (list(street.supervisor.workers), house.diary) == (["a"], ["load", "unload", "unloaded"])
        house.before = trio.sleep_forever
        with trio.move_on_after(1):
            await street.supervisor.load(house.spec())
        assert (list(street.supervisor.workers), house.loads) == (["a"], 2)
        house.before = None
        assert (await street.supervisor.load(house.spec())).ready
        await street.supervisor.stop()
