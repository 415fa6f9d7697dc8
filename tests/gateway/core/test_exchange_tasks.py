"""Exchanges in tasks that are used again: nothing of one reaches the next, and the reader never waits for one."""

from __future__ import annotations

import contextvars
import gc
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.core import runner
from gateway.core.exchange import Exchange
from gateway.core.runner import Runner
from gateway.errors import Ending, GatewayError, ModelCrashed
from protocols.buffers import ByteBudget
from protocols.events import Head, Request

Script = Callable[[Exchange], Awaitable[Any]]

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


class Wire:
    """The wire of an exchange, with the calls that its end makes."""

    name, windowed = "wire", True

    def credit(self, stream: int, n: int) -> None: ...
    def release(self, stream: int) -> None: ...


class Readiness:
    """A readiness source whose calls the test adds to a list."""

    def __init__(self) -> None:
        self.ready: deque[Callable[[], None]] = deque()
        self.rung = trio.Event()
        self.waits = 0

    def look(self) -> bool:
        return bool(self.ready)

    async def wait(self) -> None:
        self.waits += 1
        await self.rung.wait()
        self.rung = trio.Event()

    def tell(self, at_most: int) -> int:
        told = 0
        while self.ready and told < at_most:
            told += 1
            self.ready.popleft()()
        return told


class House:
    """Exchange tasks, what their exchanges do, and what became of each; the one connection of them all."""

    def __init__(self, *, led: bool = True) -> None:
        self.readiness = Readiness()
        self.led = led
        self.tasks = Runner(self.work, self.blame, self.conclude)
        self.scripts: dict[int, Script] = {}
        self.log: list[str] = []
        self.ends: dict[str, GatewayError | None] = {}
        self.closed: set[str] = set()
        self.written: list[list[str]] = []
        """The exchanges that ended since the last write."""
        self.unwritten: list[str] = []
        self.budget = ByteBudget(2**20)
        self.last_sent = 0.0
        self.limits: Any = SimpleNamespace(checkpoint_bytes=2**16)
        self.peer, self.pool = "", None
        self.nursery: trio.Nursery

    clock = staticmethod(trio.current_time)

    async def work(self, exchange: Exchange) -> None:
        await self.scripts[exchange.stream](exchange)

    def blame(self, exchange: Exchange, error: Exception) -> GatewayError:
        return error if isinstance(error, GatewayError) else ModelCrashed(f"{type(error).__name__}: {error}")

    def conclude(self, exchange: Exchange, error: GatewayError | None) -> None:
        self.ends[exchange.id] = error
        if not self.unwritten:
            self.tasks.turn_soon(self)
        self.unwritten.append(exchange.id)

    heavy = False

    def turn(self) -> None:
        self.written.append(self.unwritten)
        self.unwritten = []

    def exchange_closed(self, exchange: Exchange) -> None:
        self.closed.add(exchange.id)

    def failed(self, error: Exception) -> None:
        raise AssertionError from error

    def make(self, script: Script, id: str = "") -> Exchange:
        stream = len(self.scripts) + 1
        self.scripts[stream] = script
        request = Request(stream=stream, head=Head(method=b"POST", target=b"/", authority=b"", headers=[]))
        return Exchange(self, Wire(), request, id=id or str(stream), now=self.clock())  # type: ignore[arg-type]

    def tell(self, act: Callable[[], None]) -> None:
        """The leader is told."""
        self.readiness.ready.append(act)
        self.readiness.rung.set()

    def begin(self, *scripts: Script) -> list[Exchange]:
        """One read begins these: found by the leader, where there is one."""
        exchanges = [self.make(script) for script in scripts]

        def start() -> None:
            for exchange in exchanges:
                self.tasks.start(exchange)

        self.tell(start) if self.led else start()
        return exchanges

    async def run(self, *scripts: Script) -> list[Exchange]:
        """Begins these exchanges, and returns once no task can go on."""
        exchanges = self.begin(*scripts)
        await still()
        return exchanges

    @property
    def living(self) -> int:
        return len(self.nursery.child_tasks)


async def still() -> None:
    """Waits until no task and no thread runs."""
    await wait_all_tasks_blocked()
    while trio.to_thread.current_default_thread_limiter().borrowed_tokens:
        await wait_all_tasks_blocked()
    await wait_all_tasks_blocked()


@asynccontextmanager
async def house(*, led: bool = True) -> AsyncIterator[House]:
    made = House(led=led)
    async with trio.open_nursery() as nursery:
        made.nursery = nursery
        made.tasks.begin(nursery, made.readiness if led else None)
        await wait_all_tasks_blocked()
        try:
            yield made
        finally:
            nursery.cancel_scope.cancel()
    assert made.tasks.idle == 0


@pytest.fixture(params=[True, False], ids=["found by the leader", "given to a task"], name="led")
def _led(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def at_once(_: Exchange) -> None:
    return


async def briefly(_: Exchange) -> None:
    await trio.lowlevel.checkpoint()


async def forever(_: Exchange) -> None:
    await trio.sleep_forever()


# -- ways to wait ------------------------------------------------------------------------------------------------------


async def not_at_all() -> None:
    return


async def for_an_event_that_is_set() -> None:
    event = trio.Event()
    event.set()
    await event.wait()


async def in_a_nursery() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, 0)
        nursery.start_soon(trio.lowlevel.checkpoint)


async def for_a_thread() -> None:
    assert await trio.to_thread.run_sync(colour.get) == colour.get()


async def shielded() -> None:
    with trio.CancelScope(shield=True):
        await trio.lowlevel.checkpoint()


async def with_time() -> None:
    with trio.fail_after(1000):
        await trio.lowlevel.checkpoint()


async def out_of_time() -> None:
    with trio.move_on_after(0) as scope:
        await trio.sleep_forever()
    assert scope.cancelled_caught


async def numbers() -> AsyncGenerator[int, None]:
    for n in range(3):
        await trio.lowlevel.checkpoint()
        yield n


async def over_a_generator() -> None:
    async with aclosing(numbers()) as items:
        assert [n async for n in items] == [0, 1, 2]


async def over_a_part_of_a_generator() -> None:
    async with aclosing(numbers()) as items:
        async for _ in items:
            break


WAITS: list[Callable[[], Awaitable[None]]] = [
    not_at_all, trio.lowlevel.checkpoint, for_an_event_that_is_set, in_a_nursery, for_a_thread, shielded, with_time,
    out_of_time, over_a_generator, over_a_part_of_a_generator,
]  # fmt: skip


@pytest.fixture(params=WAITS, ids=lambda wait: wait.__name__, name="wait")
def _wait(request: pytest.FixtureRequest) -> Any:
    return request.param


# -- one exchange's context is its own -----------------------------------------------------------------------------------


async def test_context_variables_are_an_exchanges_own(wait: Callable[[], Awaitable[None]], led: bool) -> None:
    seen: list[tuple[str, str]] = []

    async def paint(exchange: Exchange) -> None:
        before = colour.get()
        colour.set(exchange.id)
        await wait()
        colour.set(colour.get() + "!")
        await wait()
        seen.append((before, colour.get()))

    async with house(led=led) as made:
        for _ in range(8):
            await made.run(paint)
        await made.run(paint, paint, paint)
        made.tell(lambda: seen.append((colour.get(), "")))
        await wait_all_tasks_blocked()
        assert set(made.ends.values()) == {None}
    assert [before for before, _ in seen] == ["none"] * len(seen)
    assert sorted(after for _, after in seen if after) == sorted(f"{i}!" for i in range(1, 12))


async def test_owners_are_told_and_new_tasks_begin_without_a_models_variables(wait: Callable[[], Awaitable[None]]) -> None:
    """A task that has run a model must not lead with the context variables that the model set."""
    seen: set[str] = set()

    async def paint(exchange: Exchange) -> None:
        seen.add(colour.get())
        colour.set("red")
        await wait()

    async def look(exchange: Exchange) -> None:
        seen.add(colour.get())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 0)
        seen.add(colour.get())

    async with house() as made:
        for _ in range(12):  # Trio chooses at random which task runs first
            made.begin(paint)
            for _ in range(3):
                await trio.lowlevel.checkpoint()
                made.tell(lambda: seen.add(colour.get()))
            await made.run(look, look)
            for task in made.nursery.child_tasks:
                seen.add(task.context.get(colour, "none"))
    assert seen == {"none"}


async def test_a_task_that_an_embedders_connection_has_made_does_not_keep_that_connections_variables() -> None:
    seen: list[str] = []

    async def look(_: Exchange) -> None:
        seen.append(colour.get())

    async with house(led=False) as made:
        contextvars.copy_context().run(lambda: (colour.set("theirs"), made.begin(look)))
        await wait_all_tasks_blocked()
        await made.run(look)
    assert seen == ["none", "none"]


async def test_the_tasks_context_is_the_one_that_a_model_runs_in(led: bool) -> None:
    async def compare(exchange: Exchange) -> None:
        for i in range(3):
            colour.set(f"{exchange.id}.{i}")
            assert trio.lowlevel.current_task().context[colour] == f"{exchange.id}.{i}"
            await trio.lowlevel.checkpoint()

    async with house(led=led) as made:
        await made.run(compare, compare)
        await made.run(compare)
        assert made.ends == {"1": None, "2": None, "3": None}


# -- scopes ------------------------------------------------------------------------------------------------------------


async def test_an_exchange_that_is_cut_ends_and_the_next_ones_run_undisturbed(led: bool) -> None:
    async with house(led=led) as made:
        for _ in range(3):
            (exchange,) = await made.run(forever)
            exchange.peer_gone(Ending.CANCELLED)
            await wait_all_tasks_blocked()
            assert exchange.id in made.closed
            await made.run(briefly, at_once)
        assert {i: e for i, e in made.ends.items() if int(i) % 3 != 1} == dict.fromkeys(("2", "3", "5", "6", "8", "9"))


async def test_an_exchange_that_is_cut_in_its_last_step_takes_its_scope_with_it(led: bool, wait: Any) -> None:
    async def cut_at_the_end(exchange: Exchange) -> None:
        await wait()
        exchange.peer_gone(Ending.CANCELLED)

    async def undisturbed(_: Exchange) -> None:
        await trio.lowlevel.checkpoint()
        assert trio.current_effective_deadline() == float("inf")

    async with house(led=led) as made:
        for _ in range(3):
            await made.run(cut_at_the_end, undisturbed)
            await made.run(undisturbed)
        assert [made.ends[str(i)] for i in (2, 3, 5, 6, 8, 9)] == [None] * 6


async def test_an_exchange_that_is_cut_after_its_work_cancels_nobody(led: bool) -> None:
    async with house(led=led) as made:
        (exchange,) = await made.run(briefly)
        exchange.peer_gone(Ending.CANCELLED)
        await made.run(briefly)
        assert made.ends == {"1": None, "2": None}
        assert "1" in made.closed


async def test_an_exchange_that_is_cut_before_it_begins_waits_for_nothing(led: bool) -> None:
    """Found by the leader, it does not begin at all; in a task of its own it is cancelled where it first waits."""
    log: list[str] = []

    async def wait(_: Exchange) -> None:
        log.append("began")
        await trio.lowlevel.checkpoint()
        log.append("never")

    async with house(led=led) as made:
        exchange = made.make(wait)
        exchange.peer_gone(Ending.CANCELLED)
        made.tell(lambda: made.tasks.start(exchange)) if led else made.tasks.start(exchange)
        await wait_all_tasks_blocked()
        assert (log, made.closed) == ([] if led else ["began"], {"1"})
        await made.run(briefly)
        assert made.ends["2"] is None


async def test_a_deadline_that_passes_after_the_end_cancels_nobody(led: bool, mock_clock: MockClock) -> None:
    async def limited(exchange: Exchange) -> None:
        exchange.limit_time(5, "a setting")
        assert trio.current_effective_deadline() == trio.current_time() + 5

    go = trio.Event()
    async with house(led=led) as made:
        await made.run(limited)
        await made.run(lambda _: go.wait())
        mock_clock.jump(10)
        await wait_all_tasks_blocked()
        go.set()
        await made.run(limited)
        assert made.ends == {"1": None, "2": None, "3": None}


@pytest.mark.parametrize("waits", [False, True])
async def test_a_deadline_that_passes_in_the_last_step_is_this_exchanges(
    led: bool, waits: bool, mock_clock: MockClock
) -> None:
    async def limited(exchange: Exchange) -> None:
        if waits:
            await trio.lowlevel.checkpoint()
        exchange.limit_time(5, "a setting")
        mock_clock.jump(10)

    async with house(led=led) as made:
        await made.run(limited)
        await made.run(briefly)
        error = made.ends["1"]
        assert error is not None
        assert "a setting" in error.message
        assert made.ends["2"] is None


async def generator_with_time() -> AsyncGenerator[int, None]:
    with trio.move_on_after(5):
        yield 1
        yield 2


async def generator_with_tasks() -> AsyncGenerator[int, None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        yield 1
        yield 2


@pytest.mark.parametrize("generator", [generator_with_time, generator_with_tasks])
@pytest.mark.parametrize("end", ["returns", "raises", "waits", "is cut"])
async def test_a_scope_that_a_model_leaves_open_harms_nobody_else(
    led: bool, generator: Callable[[], AsyncGenerator[int, None]], end: str, mock_clock: MockClock
) -> None:
    """PEP 789's mistake: an async generator that was given up in the middle of a timeout or a nursery."""
    kept: list[Any] = []  # so that nobody finalizes it

    async def sloppy(exchange: Exchange) -> None:
        items = generator()
        kept.append(items)
        async for _ in items:
            break
        if end == "waits":
            await trio.lowlevel.checkpoint()
        if end == "is cut":
            exchange.peer_gone(Ending.CANCELLED)
            await trio.lowlevel.checkpoint()
        if end == "raises":
            raise ValueError

    async def careful(_: Exchange) -> None:
        await trio.lowlevel.checkpoint()
        assert trio.current_effective_deadline() == float("inf")

    async with house(led=led) as made:
        for _ in range(3):
            await made.run(sloppy, careful)
            mock_clock.jump(10)
            await made.run(careful)
        assert [made.ends[str(i)] for i in (2, 3, 5, 6, 8, 9)] == [None] * 6
        assert len(made.ends) == 9
        for items in kept:  # closing a generator from another task may raise in Trio
            with suppress(RuntimeError, IndexError, AssertionError, BaseExceptionGroup):
                await items.aclose()
        await made.run(careful, lambda _: in_a_nursery())
        assert (made.ends["10"], made.ends["11"]) == (None, None)


async def test_what_a_cancelled_model_held_is_free_without_the_collector(led: bool) -> None:
    """This includes the memory of bodies."""

    class Body:
        pass

    alive: list[Any] = []

    async def hold(_: Exchange) -> None:
        body = Body()
        alive.append(weakref.ref(body))
        await trio.lowlevel.checkpoint()
        await trio.sleep_forever()

    gc.collect()
    gc.disable()
    try:
        async with house(led=led) as made:
            for _ in range(2):
                (exchange,) = await made.run(hold)
                exchange.peer_gone(Ending.CANCELLED)
                del exchange
                await wait_all_tasks_blocked()
            assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


# -- leadership ----------------------------------------------------------------------------------------------------------


async def test_whoever_is_told_next_is_told_though_a_model_waits_for_ever(wait: Callable[[], Awaitable[None]]) -> None:
    async def stuck(_: Exchange) -> None:
        await wait()
        await trio.sleep_forever()

    async with house() as made:
        for n in range(5):
            await made.run(stuck)
            await made.run(at_once)
            assert len(made.ends) == n + 1
        assert len(made.closed) == 0  # nobody has sent an answer, but
        assert len(made.ends) == 5


async def test_of_two_that_begin_with_one_read_the_second_runs_though_the_first_waits() -> None:
    async with house() as made:
        for _ in range(3):
            await made.run(forever, at_once, forever, briefly)
        assert sorted(map(int, made.ends)) == [2, 4, 6, 8, 10, 12]


async def test_many_that_begin_with_one_read_and_wait_all_run_at_once() -> None:
    go, running = trio.Event(), 0

    async def stuck(_: Exchange) -> None:
        nonlocal running
        running += 1
        await go.wait()

    async with house() as made:
        for _ in range(2):
            await made.run(*[stuck] * 100)
        assert running == 200
        go.set()
        await wait_all_tasks_blocked()
        assert len(made.ends) == 200
        await made.run(at_once)
        assert len(made.ends) == 201


async def test_there_is_one_leader_at_most(wait: Callable[[], Awaitable[None]]) -> None:
    inside = most = 0

    async with house() as made:
        original = made.readiness.wait

        async def counted() -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            try:
                await original()
            finally:
                inside -= 1

        made.readiness.wait = counted  # type: ignore[method-assign]
        for _ in range(20):
            made.begin(*[lambda _: wait()] * 3)
            await trio.lowlevel.checkpoint()
            await made.run(lambda _: wait())
            assert inside == 1
        assert len(made.ends) == 80
    assert most == 1


@pytest.mark.parametrize("error", [ValueError, StopAsyncIteration, StopIteration, trio.EndOfChannel, trio.TooSlowError])
async def test_a_model_that_raises_ends_alone(led: bool, wait: Any, error: type[Exception]) -> None:
    async def fail(_: Exchange) -> None:
        await wait()
        raise error

    async with house(led=led) as made:
        for _ in range(3):
            await made.run(fail, at_once)
        for i in (1, 3, 5):
            assert isinstance(made.ends[str(i)], ModelCrashed)
            assert made.ends[str(i + 1)] is None


async def test_what_a_model_raises_out_of_a_nursery_across_the_hand_over_is_its_own(led: bool) -> None:
    async def boom() -> None:
        raise ValueError

    async def fail(_: Exchange) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(boom)
            await trio.sleep_forever()

    async with house(led=led) as made:
        await made.run(fail, fail)
        await made.run(at_once)
        assert isinstance(made.ends["1"], ModelCrashed)
        assert made.ends["3"] is None


async def test_a_model_has_one_task_from_its_first_step_to_its_last(wait: Callable[[], Awaitable[None]], led: bool) -> None:
    tasks: dict[str, set[Any]] = {}

    async def note(exchange: Exchange) -> None:
        for _ in range(3):
            tasks.setdefault(exchange.id, set()).add(trio.lowlevel.current_task())
            await wait()

    async with house(led=led) as made:
        await made.run(note, note)
        assert [len(seen) for seen in tasks.values()] == [1, 1]


async def test_a_lock_that_is_taken_before_the_hand_over_is_given_back_after_it() -> None:
    lock = trio.Lock()

    async def locked(_: Exchange) -> None:
        lock.acquire_nowait()
        await trio.lowlevel.checkpoint()
        lock.release()

    async with house() as made:
        await made.run(locked)
        await made.run(locked)
        assert made.ends == {"1": None, "2": None}


async def test_every_step_that_an_instrument_sees_has_an_end() -> None:
    class Steps(trio.abc.Instrument):
        def __init__(self) -> None:
            self.open: list[trio.lowlevel.Task] = []

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            assert not self.open
            self.open.append(task)

        def after_task_step(self, task: trio.lowlevel.Task) -> None:
            if self.open:
                assert self.open.pop() is task is trio.lowlevel.current_task()

    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    try:
        async with house() as made:
            await made.run(*[lambda _: in_a_nursery()] * 3)
            assert len(made.ends) == 3
    finally:
        trio.lowlevel.remove_instrument(steps)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("waits", [False, True])
async def test_what_is_no_exception_ends_the_tasks_and_every_exchange_returns(
    led: bool, waits: bool, kind: type[BaseException]
) -> None:
    """`work` lets nothing of the kind out unless the process is to end."""

    async def quit_(_: Exchange) -> None:
        if waits:
            await trio.lowlevel.checkpoint()
        raise kind

    exchanges: list[Exchange] = []

    async def serve() -> None:
        async with house(led=led) as made:
            exchanges.extend(await made.run(forever))
            exchanges.extend(made.begin(forever, quit_, forever))
            await trio.sleep_forever()

    with pytest.raises(BaseExceptionGroup) as info:
        await serve()
    assert info.group_contains(kind)
    assert all(exchange._returned for exchange in exchanges)


# -- how many ------------------------------------------------------------------------------------------------------------


async def test_tasks_are_used_again() -> None:
    async with house() as made:
        await made.run(at_once)
        assert made.living == 1  # the leader alone
        for _ in range(10):
            await made.run(briefly)
        assert made.living == 2
        assert made.tasks.idle == 1


async def test_no_more_tasks_stay_idle_than_allowed(led: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_MOST_IDLE", 3)
    go = trio.Event()
    async with house(led=led) as made:
        await made.run(*[lambda _: go.wait()] * 10)
        assert (made.living, made.tasks.idle) == (10 + led, 0)
        go.set()
        await wait_all_tasks_blocked()
        assert (made.living, made.tasks.idle) == (3 + led, 3)
        await made.run(*[briefly] * 10)
        assert (made.living, made.tasks.idle) == (3 + led, 3)
        assert len(made.ends) == 20


@pytest.mark.parametrize(
    "state", ["nobody idle", "some idle", "leader told", "its exchange waits", "a new leader begins", "more have begun"]
)
async def test_the_end_of_the_server_leaves_no_task_and_no_exchange(state: str) -> None:
    exchanges: list[Exchange] = []
    for steps in range(4):
        async with house() as made:
            if state == "some idle":
                await made.run(*[briefly] * 5)
            elif state == "leader told":
                exchanges += made.begin(at_once)
            elif state == "its exchange waits":
                exchanges += await made.run(forever)
            elif state == "a new leader begins":
                exchanges += made.begin(forever, forever)
            elif state == "more have begun":
                exchanges += await made.run(forever)
                exchanges += made.begin(*[forever] * 70)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
        assert made.living == 0
    # those that the leader was never told of have not begun
    assert all(exchange._returned or exchange._scope is None for exchange in exchanges)


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("script", [at_once, briefly, forever])
async def test_what_one_look_began_returns_also_where_the_server_ends_before_its_turn(
    script: Script, heavy: bool, mock_clock: MockClock
) -> None:
    exchanges: list[Exchange] = []
    async with house() as made:
        made.heavy = heavy

        def start() -> None:
            exchanges.append(made.make(script))
            made.tasks.start(exchanges[-1])
            mock_clock.jump(1)  # a look that takes so long lets others have their turn before what it has begun
            if len(exchanges) == 4:
                made.nursery.cancel_scope.cancel()

        for _ in range(4):
            made.tell(start)
        await trio.sleep_forever()
    assert (len(exchanges), made.ends) == (4, {})
    assert all(exchange._returned for exchange in exchanges)


# -- writing -------------------------------------------------------------------------------------------------------------


async def test_answers_are_written_before_the_leader_waits_again(wait: Callable[[], Awaitable[None]]) -> None:
    async with house() as made:
        original = made.readiness.wait

        async def wait_() -> None:
            assert not made.unwritten or wait is not not_at_all
            await original()

        made.readiness.wait = wait_  # type: ignore[method-assign]
        for _ in range(3):
            await made.run(*[lambda _: wait()] * 3)
            assert len(made.ends) % 3 == 0
        if wait is not_at_all:
            assert (made.unwritten, sum(map(len, made.written))) == ([], 9)


async def test_the_leader_says_whether_it_will_write() -> None:
    seen: list[bool] = []

    async def look(_: Exchange) -> None:
        seen.append(made.tasks.leading)

    async with house() as made:
        await made.run(look)
        assert not made.tasks.leading
        await made.run(forever)
        assert not made.tasks.leading
        await made.run(briefly, briefly)
        assert not made.tasks.leading
    assert seen == [True]


async def test_answers_of_many_that_are_ready_leave_in_batches_and_others_run_in_between() -> None:
    async with house() as made:
        for _ in range(200):
            made.begin(at_once)
        await wait_all_tasks_blocked()
        assert sum(map(len, made.written)) == 200
        assert 1 < len(made.written) < 20


@pytest.mark.parametrize("begins", [True, False])
async def test_those_who_are_always_ready_do_not_keep_others_from_their_turn(begins: bool) -> None:
    async with house() as made:

        def again() -> None:
            if begins:
                made.tasks.start(made.make(at_once))
            made.tell(again)

        made.tell(again)
        with trio.fail_after(60):
            for _ in range(20):
                await trio.lowlevel.checkpoint()
        if begins:
            assert len(made.ends) > 0
