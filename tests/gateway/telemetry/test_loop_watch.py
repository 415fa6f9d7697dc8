"""A step that keeps the event loop is named while it lasts: the model, the line, the seconds; and nobody else is blamed."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from gateway.config import Config, LimitsConfig
from gateway.telemetry import loop_watch
from gateway.telemetry.loop_watch import Blocks, LoopWatch
from gateway.telemetry.metrics import exposition
from gateway.testing import MemoryGateway, memory_gateway
from models.messages import Family, Prompt
from models.spec import ModelSpec

LIMIT = 0.3  # seconds: a busy machine may stop the process for less
PATIENCE = 30.0
CONFIG = Config(limits=LimitsConfig(loop_block=LIMIT))


class Told(logging.Handler):
    """Lines of the log about the loop. A step that blocks it here goes on as soon as there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked: list[Any] = []
        self.again: list[Any] = []
        self.named = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "event loop blocked":
            self.blocked.append(record)
            self.named.set()
        elif record.msg == "event loop runs again":
            self.again.append(record)


told: Told


@pytest.fixture(autouse=True)
def _told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    global told
    told = Told()
    monkeypatch.setattr(loop_watch, "PULSE", LIMIT)
    logging.getLogger("gateway").addHandler(told)
    gc.disable()  # a collection would be taken for the cause, where the machine is slow enough
    yield
    gc.enable()
    logging.getLogger("gateway").removeHandler(told)


async def until(so: Callable[[], object]) -> None:
    """The thread has come so far."""
    while not so():  # noqa: ASYNC110  # nothing tells when
        await trio.sleep(LIMIT)


def line_of(record: Any) -> str:
    return str(record.at).rpartition("/")[2]


async def waits(prompt: Prompt) -> str:
    assert told.named.wait(PATIENCE)
    return "waited"


async def counts(prompt: Prompt) -> str:
    n = 0
    while not told.named.is_set():
        n += 1
    return "counted"


async def blocks_later(prompt: Prompt) -> AsyncIterator[str]:
    yield "one "
    await trio.lowlevel.checkpoint()
    await waits(prompt)
    yield "two"


async def run_in_codec_thread(prompt: Prompt) -> str:
    """Blocks in a task of its own."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waits, prompt)
    return "done"


async def quick(prompt: Prompt) -> str:
    return prompt.text


@pytest.mark.parametrize(
    ("model", "function"), [(waits, "waits"), (counts, "counts"), (blocks_later, "waits"), (run_in_codec_thread, "waits")]
)
@pytest.mark.parametrize("hub", [True, False], ids=["leader", "waiting"])
async def test_a_model_that_blocks_is_named_while_it_lasts(model: Any, function: str, hub: bool) -> None:
    async with memory_gateway([model, quick], CONFIG, hub=hub) as memory:
        registry = memory.gateway.registry
        await memory.client().lmi("hi", model.__name__)
        (record,) = told.blocked
        assert record.model == model.__name__
        assert record.seconds >= LIMIT
        assert line_of(record).startswith("test_loop_watch.py:")
        assert line_of(record).endswith(f" in {function}")
        assert record.id
        await until(lambda: told.again)
        assert told.again[0].seconds >= record.seconds
        text = exposition(registry)[1].decode()
        assert f'everywire_loop_blocks_total{{model="{model.__name__}"}} 1.0' in text
        assert f'everywire_loop_blocked_seconds_total{{model="{model.__name__}"}}' in text


async def test_so_is_one_whose_code_is_in_no_file() -> None:
    typed: dict[str, Any] = {"Prompt": Prompt, "wait": lambda: told.named.wait(PATIENCE)}
    exec(compile("async def typed_in(prompt: Prompt) -> str:\n    return str(wait())", "<stdin>", "exec"), typed)
    async with memory_gateway([typed["typed_in"]], CONFIG) as memory:
        assert (await memory.client().lmi("hi", "typed_in")).text == "True"
        (record,) = told.blocked
        assert (record.model, line_of(record)) == ("typed_in", "<stdin>:2 in typed_in")


async def test_a_load_that_blocks_is_named() -> None:
    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        assert told.named.wait(PATIENCE)
        yield quick_session

    async def quick_session(session: Any) -> None: ...

    spec = ModelSpec(name="heavy", load=load, family=Family.TEXT)
    async with memory_gateway([spec], CONFIG):
        (record,) = told.blocked
        assert record.model == "heavy"
        assert line_of(record).endswith(" in load")


async def test_work_of_ours_for_a_model_is_not_called_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    async with memory_gateway([quick], CONFIG) as memory:
        tick = memory.gateway.server.pool.tick

        def slow(now: float) -> None:
            if not told.blocked:
                assert threading.Event.wait(told.named, PATIENCE)
            tick(now)

        monkeypatch.setattr(type(memory.gateway.server.pool), "tick", lambda pool, now: slow(now))
        await until(lambda: told.blocked)
        assert told.blocked[0].model == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is found by no name")
async def test_a_c_call_that_holds_the_interpreter_is_told_afterwards() -> None:
    holding = ctypes.PyDLL(None).usleep

    async def holds(prompt: Prompt) -> str:
        holding(900_000)
        return "held"

    async with memory_gateway([holds], CONFIG) as memory:
        await memory.client().lmi("hi", "holds")
        await until(lambda: told.blocked)
        record = told.blocked[0]
        assert "interpreter was held" in record.cause
        if record.model:  # the thread comes as the call ends, or a moment later
            assert (record.model, line_of(record).partition(" in ")[2]) == ("holds", "holds")


async def test_a_model_that_blocks_again_and_again_is_told_once_in_a_while_and_always_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell, looked = LoopWatch._tell_until_over, threading.Event()

    def tells(watch: LoopWatch, *seen: Any) -> None:
        looked.set()
        tell(watch, *seen)

    async def again(prompt: Prompt) -> str:
        looked.clear()
        assert looked.wait(PATIENCE)
        return "done"

    monkeypatch.setattr(LoopWatch, "_tell_until_over", tells)
    async with memory_gateway([again], CONFIG) as memory:
        for n in range(1, 4):
            await memory.client().lmi("hi", "again")
            await until(lambda n=n: memory.gateway.timer.blocks.count.get("again", 0) >= n)
        assert len(told.blocked) == 1
        assert memory.gateway.timer.blocks.count["again"] == 3


async def test_nobody_looks_where_the_setting_is_0_and_no_thread_is_left_behind() -> None:
    def watches() -> int:
        return sum(thread.name == "everywire loop watch" for thread in threading.enumerate())

    before = watches()
    async with memory_gateway([quick], CONFIG) as memory:
        await until_served(memory)
        assert watches() == before + 1
    assert watches() == before
    async with memory_gateway([quick], Config(limits=LimitsConfig(loop_block=0))) as memory:
        await until_served(memory)
        assert watches() == before


async def until_served(memory: MemoryGateway) -> None:
    await memory.client().lmi("hi", "quick")


class Queued:
    """Linux's count of a thread's waits for a CPU: so many seconds more at each look."""

    def __init__(self, more: float) -> None:
        self.more, self.sum = more, 0.0

    def seconds(self) -> float:
        self.sum += self.more
        return self.sum

    def close(self) -> None: ...


@pytest.mark.parametrize(("more", "starved"), [(10.0, True), (0.0, False)])
async def test_a_loop_that_waits_for_a_cpu_is_told_from_one_that_is_blocked(more: float, starved: bool) -> None:
    told: list[tuple[float, bool]] = []
    watch = LoopWatch(10.0, lambda task: ("", ""), Blocks(), lambda *late: told.append(late))
    with watch.watching():
        watch._queued = Queued(more)  # type: ignore[assignment]
        await watch.beat_until(trio.current_time() + 0.01)
    assert [late for _, late in told] == [starved]


async def test_a_step_that_sleeps_is_no_wait_for_a_cpu() -> None:
    told: list[tuple[float, bool]] = []
    watch = LoopWatch(10.0, lambda task: ("", ""), Blocks(), lambda *late: told.append(late))

    async def sleeps() -> None:
        time.sleep(1)  # noqa: ASYNC251

    with watch.watching():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.beat_until, trio.current_time() + 0.05)
            await trio.lowlevel.checkpoint()
            nursery.start_soon(sleeps)
    ((seconds, starved),) = told
    assert seconds > 0.5
    assert not starved


def test_a_look_keeps_nothing_of_what_it_has_seen() -> None:
    class Body:
        """The memory that a call holds."""

    bodies: list[weakref.ref[Body]] = []
    begun, seen = threading.Event(), threading.Event()

    def work() -> None:
        body = Body()
        bodies.append(weakref.ref(body))
        begun.set()
        assert seen.wait(PATIENCE)

    worker = threading.Thread(target=work)
    worker.start()
    assert begun.wait(PATIENCE)
    watch = LoopWatch(LIMIT, lambda task: ("", ""), Blocks())
    watch._loop, watch._root = worker.ident or 0, None
    watcher = threading.Thread(target=watch._look)
    watcher.start()
    watcher.join(PATIENCE)
    seen.set()
    worker.join(PATIENCE)
    assert [body() for body in bodies] == [None]
