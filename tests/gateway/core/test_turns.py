"""Turns: a client that keeps the gateway as busy as it can costs the others a bounded number of steps."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from benchmarks import requests
from benchmarks.neighbours import LOADS
from gateway.client import post
from gateway.config import BidiConfig, Config, HTTP2Config, LimitsConfig
from gateway.config.tree import HTTP2FloodsConfig
from gateway.core.contracts import TURN_SECONDS
from gateway.core.exchange import Exchange
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.library.tensors import identity
from models.messages import Family, Part, Prompt, Token
from models.session import Session
from protocols.events import Buffer

STEP = 0.0005  # seconds that one exchange, or one message, takes
BEGIN = 1000  # steps after which the neighbour asks
PATIENCE = 400  # steps that its answer may take: three rounds of a connection's and of the leader's
END = BEGIN + 8 * PATIENCE


class Press:
    """A connection that has always more for the server to read than it can take, and takes whatever it is answered. It
    counts the steps that it makes the server take, each of the same time on the clock, and does at a step what it is told."""

    def __init__(self, clock: MockClock) -> None:
        self.clock = clock
        self.steps, self.end, self.spent = 0, END, 0.0
        self.at: dict[int, Callable[[], None]] = {}
        self.each: list[Callable[[], None]] = []

    def step(self, _: object = None) -> None:
        self.spend(STEP)

    def spend(self, seconds: float) -> None:
        """Something takes so long, which makes a step whenever that adds up to one."""
        self.clock.jump(seconds)
        self.spent += seconds
        while self.spent >= STEP:
            self.spent -= STEP
            self.steps += 1
            self.at.pop(self.steps, lambda: None)()
            for look in self.each:
                look()

    def begin(self, memory: MemoryGateway, load: str) -> None:
        ours = memory.connect()
        theirs, side, sink = ours._other, LOADS[load](), memoryview(bytearray(65536))
        due, receive, send = [memoryview(side.opening)], theirs.try_receive_into, theirs.try_send

        def give(buffers: Sequence[Buffer]) -> int:
            while ours.try_receive_into(sink):
                pass
            return send(buffers)

        def take(buffer: memoryview) -> int | None:
            while self.steps < self.end:
                due[0] = due[0] or memoryview(side.more())
                n = ours.try_send(due)
                due[0] = due[0][n:]
                if due[0]:
                    break
            return receive(buffer)

        theirs.try_receive_into, theirs.try_send = take, give  # type: ignore[method-assign]


async def echo(session: Session[Part, Part]) -> None:
    async for part in session:
        press.step()
        await session.send(part)


press: Press


@asynccontextmanager
async def pressed(clock: MockClock, load: str, *, hub: bool) -> AsyncIterator[tuple[Press, MemoryGateway]]:
    """A gateway beside whose clients somebody presses; the time of the clock is the press's."""
    global press
    press = Press(clock)
    async with memory_gateway([identity, echo], CONFIG, hub=hub) as memory:
        with memory.gateway.watched(press.step):
            yield press, memory


_NO_FLOODS = HTTP2Config(floods=HTTP2FloodsConfig(enabled=False))  # else who presses by resets is ended before it presses
CONFIG = Config(bidi=BidiConfig(default_model="echo"), http2=_NO_FLOODS)
loads = pytest.mark.parametrize("load", [load for load in LOADS if load != "pings"])  # pings are no step of an exchange
drivers = pytest.mark.parametrize("hub", [True, False], ids=["leader", "waiting"])


class Client:
    """Asks a question at some steps, and notes the step of each answer."""

    def __init__(self, press: Press, memory: MemoryGateway, *, kept: bool) -> None:
        self.press, self.memory, self.kept = press, memory, kept
        self.asked: list[int] = []
        self.answered: list[int] = []
        self.buffer = memoryview(bytearray(4096))
        self.connection = memory.connect()
        press.each.append(self.look)

    def ask(self) -> None:
        if not self.kept:
            self.connection = self.memory.connect()
        question = requests.infer_binary(16)
        assert self.connection.try_send([question]) == len(question)
        self.asked.append(self.press.steps)

    def look(self) -> None:
        if self.connection.try_receive_into(self.buffer):
            assert bytes(self.buffer[:15]) == b"HTTP/1.1 200 OK"
            self.answered.append(self.press.steps)

    @property
    def waited(self) -> list[int]:
        assert len(self.answered) == len(self.asked), (self.asked, self.answered)
        return [answered - asked for asked, answered in zip(self.asked, self.answered, strict=True)]


async def over(press: Press) -> None:
    """The press has done all it wanted to."""
    for _ in range(10 * press.end):
        if press.steps >= press.end:
            break
        await trio.lowlevel.checkpoint()


@loads
@drivers
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "fresh"])
async def test_a_connection_is_answered_after_a_few_steps_of_a_neighbour_who_presses(
    load: str, hub: bool, kept: bool, mock_clock: MockClock
) -> None:
    async with pressed(mock_clock, load, hub=hub) as (press, memory):
        client = Client(press, memory, kept=kept)
        await wait_all_tasks_blocked()  # the one that is kept is known
        press.at |= {BEGIN + n * PATIENCE: client.ask for n in range(4)}
        press.begin(memory, load)
        await over(press)
        assert max(client.waited) <= PATIENCE


@loads
@drivers
async def test_timers_and_other_tasks_have_their_turn_beside_a_client_who_presses(
    load: str, hub: bool, mock_clock: MockClock
) -> None:
    late: list[float] = []

    async def watch() -> None:
        while True:
            due = trio.current_time() + 10 * STEP
            await trio.sleep_until(due)
            late.append(trio.current_time() - due)

    async with pressed(mock_clock, load, hub=hub) as (press, memory), trio.open_nursery() as nursery:
        await wait_all_tasks_blocked()
        nursery.start_soon(watch)
        press.begin(memory, load)
        await over(press)
        nursery.cancel_scope.cancel()
    assert max(late) <= PATIENCE * STEP


@loads
@drivers
async def test_a_drain_begins_beside_a_client_who_presses(load: str, hub: bool, mock_clock: MockClock) -> None:
    async with pressed(mock_clock, load, hub=hub) as (press, memory):
        began: list[int] = []

        async def obey() -> None:
            await asked.wait()
            memory.gateway.begin_drain()
            while not memory.gateway.draining:
                await trio.lowlevel.checkpoint()
            began.append(press.steps)
            press.end = 0

        asked = trio.Event()
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey)
            press.at[BEGIN] = asked.set
            press.begin(memory, load)
            await over(press)
    assert BEGIN <= began[0] <= BEGIN + 2 * PATIENCE  # the drain's task has its turn, and then ours again


# -- the timer's -------------------------------------------------------------------------------------------------------


async def test_what_lasts_too_long_ends_some_at_a_time(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    look, ended = Exchange.check_stamps, 0

    def check(exchange: Exchange, now: float) -> None:
        nonlocal ended
        look(exchange, now)
        if exchange.interruption is not None:
            ended += 1
            autojump_clock.jump(STEP)
        if ended == 100:
            all_ended.set()

    async def other() -> None:
        while True:
            seen.append(ended)
            await trio.sleep(TURN_SECONDS / 2)

    seen, all_ended = list[int](), trio.Event()
    monkeypatch.setattr(Exchange, "check_stamps", check)
    config = Config(limits=LimitsConfig(body_silence=1))
    async with memory_gateway([spec_of(identity, "identity", family=Family.TENSOR)], config) as memory:
        peer = memory.http2()
        for stream in range(1, 200, 2):
            await peer.send(*post(stream, "/v2/models/identity/infer", None))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            with trio.fail_after(5):
                await all_ended.wait()
            nursery.cancel_scope.cancel()
        peer.close()
    at_once = max(later - before for before, later in itertools.pairwise([*seen, ended]))
    assert at_once <= TURN_SECONDS / STEP + 1


# -- a model's own turn ------------------------------------------------------------------------------------------------


class Steps(trio.abc.Instrument):
    """Counts the scheduler's steps of one task."""

    def __init__(self, task: trio.lowlevel.Task) -> None:
        self.task, self.count = task, 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self.task


@asynccontextmanager
async def counted() -> AsyncIterator[Steps]:
    steps = Steps(trio.lowlevel.current_task())
    trio.lowlevel.add_instrument(steps)
    try:
        yield steps
    finally:
        trio.lowlevel.remove_instrument(steps)


QUESTION = b'{"inputs":"a","parameters":{"max_new_tokens":200},"stream":true}'
ASKED = (
    b"POST /models/paced/invoke HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (
        len(QUESTION),
        QUESTION,
    )
)


@drivers
async def test_a_model_that_paces_itself_takes_one_step_for_each_token(hub: bool, autojump_clock: MockClock) -> None:
    taken: list[int] = []

    async def paced(prompt: Session[Prompt, Token]) -> None:
        await prompt.receive()
        async with counted() as steps:
            for n in range(100):
                await trio.sleep(0.01)
                await prompt.send(Token(id=n, text=" more"))
            taken.append(steps.count)

    async with memory_gateway([spec_of(paced, "paced", family=Family.TEXT)], hub=hub) as memory:
        connection, buffer = memory.connect(), memoryview(bytearray(65536))
        for _ in range(4):  # some lead before they wait, and some have a task that was another's
            assert connection.try_send([ASKED]) == len(ASKED)
            answer = b""
            while not answer.endswith(b"\r\n0\r\n\r\n"):
                n = connection.try_receive_into(buffer)
                if n is None:
                    await connection.wait_readable()
                else:
                    answer += buffer[:n]
            assert answer.count(b"\n") > 100
    assert taken == [100] * 4
