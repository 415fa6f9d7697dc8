"""Fair turns: a light connection waits a bounded time for answers, however many others keep the gateway busy."""

from collections.abc import Callable
from typing import Any

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.core.connection import Connection
from gateway.core.exchange import Exchange
from gateway.core.runner import Runner
from gateway.net.readiness import Poller
from protocols.http2 import reader
from protocols.http2.reader import FrameReader
from tests.gateway.core import test_turns
from tests.gateway.core.test_exchange_tasks import house, still
from tests.gateway.core.test_turns import Client, over, pressed

STEP = 0.0001
"""Seconds that an exchange takes, or a message."""
FRAME = STEP / 2
"""Seconds that a frame takes which makes no event."""
PATIENCE = 0.125
"""Seconds that an answer may take: for a fresh connection it needs some six rounds of the loop, each of five milliseconds of
the leader's and of what that makes others do."""
EVERY = round(2 * PATIENCE / STEP)
"""Steps between two questions."""
ASKED = 3

pytestmark = pytest.mark.sweep

drivers = pytest.mark.parametrize("hub", [True, False], ids=["leader", "waiting"])


async def waits(
    load: str, number: int, clock: MockClock, monkeypatch: pytest.MonkeyPatch, *, hub: bool, kept: bool
) -> list[float]:
    """The seconds that each of the light client's questions waited beside `number` heavy connections."""
    begin = 1000 + 40 * number  # by then each has had its first turn, which a heavy one has too
    monkeypatch.setattr(test_turns, "STEP", STEP)
    async with pressed(clock, load, hub=hub) as (press, memory):
        receive = FrameReader._receive_frame

        def received(reader: FrameReader, frame: Any) -> None:
            receive(reader, frame)
            press.spend(FRAME)

        monkeypatch.setattr(FrameReader, "_receive_frame", received)
        client = Client(press, memory, kept=kept)
        await wait_all_tasks_blocked()  # the one that is kept is known
        press.at |= {begin + n * EVERY: client.ask for n in range(ASKED)}
        press.end = begin + ASKED * EVERY
        for _ in range(number):
            press.begin(memory, load)
        await over(press)
        assert len(client.asked) == ASKED
        answered = client.answered + [press.end] * (ASKED - len(client.answered))
        return [(at - asked) * STEP for asked, at in zip(client.asked, answered, strict=True)]


# Only 10 connections send messages: each has a session, whose model takes turns too.
@pytest.mark.parametrize(
    ("load", "number"),
    [("resets", 1), ("resets", 30), ("late-resets", 30), ("pings", 30), ("pipelined", 30), ("messages", 10)],
)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "fresh"])
@drivers
async def test_a_light_connection_waits_no_longer_beside_many_heavy_ones_than_beside_one(
    load: str, number: int, kept: bool, hub: bool, mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await waits(load, number, mock_clock, monkeypatch, hub=hub, kept=kept)
    assert max(found) <= PATIENCE, found


# -- heavy connections come last, and they come ----------------------------------------------------------------------------


class Due:
    """A connection that is due again at the end of each of its turns, which takes a millisecond."""

    def __init__(self, runner: Runner, clock: MockClock, *, heavy: bool) -> None:
        self.runner, self.clock, self.heavy, self.turns = runner, clock, heavy, 0
        runner.turn_soon(self)

    def turn(self) -> None:
        self.turns += 1
        self.clock.jump(0.001)
        self.runner.turn_soon(self)


async def test_heavy_connections_have_turns_also_where_light_ones_are_always_due(mock_clock: MockClock) -> None:
    async with house() as made:
        made.tasks.leading = True  # the test calls `write`, so it leads
        light = [Due(made.tasks, mock_clock, heavy=False) for _ in range(10)]
        heavy = [Due(made.tasks, mock_clock, heavy=True) for _ in range(3)]
        for _ in range(30):
            assert made.tasks.write()
        assert [due.turns for due in heavy] == [10] * 3
        assert min(due.turns for due in light) >= 12
        made.tasks._due.clear()
        made.tasks._due_heavy.clear()


async def test_what_a_heavy_connection_begins_comes_last_and_not_only_then(mock_clock: MockClock) -> None:
    ran: list[str] = []

    async def work(exchange: Exchange) -> None:
        ran.append(exchange.id)
        mock_clock.jump(0.01)  # each is a round of the leader's

    async with house() as made:

        def start(heavy: bool, number: int) -> Callable[[], None]:
            def begin() -> None:
                made.heavy = heavy
                for n in range(number):
                    made.tasks.start(made.make(work, f"{'heavy' if heavy else 'light'} {n}"))

            return begin

        made.tell(start(True, 3))
        made.tell(start(False, 10))
        await still()
        assert ran[0] == "light 0"
        assert sorted(ran) == sorted([*(f"light {n}" for n in range(10)), *(f"heavy {n}" for n in range(3))])
        assert {"heavy 0", "heavy 1", "heavy 2"} <= set(ran[:8])


# -- weaknesses that are planted -----------------------------------------------------------------------------------------


def deaf_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the kernel only where the leader has nothing else to do."""
    look = Poller.look

    async def wait(poller: Poller) -> None:
        await poller._edges.wait()
        look(poller)

    monkeypatch.setattr(Poller, "look", lambda poller: bool(poller._events))
    monkeypatch.setattr(Poller, "wait", wait)


def frames_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine reads all frames that make no event."""
    monkeypatch.setattr(reader, "QUIET_FRAMES", 1 << 30)


def nobody_is_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections are in one list."""
    monkeypatch.setattr(Connection, "heavy", property(lambda connection: False, lambda connection, heavy: None))


def turns_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn ends by its number of events alone."""
    monkeypatch.setattr("gateway.core.connection.TURN_SECONDS", float("inf"))


@pytest.mark.parametrize(
    ("plant", "load", "number", "kept"),
    [
        (deaf_hub, "resets", 10, True),
        (frames_without_end, "pings", 10, False),
        (nobody_is_heavy, "resets", 60, False),
        (turns_without_time, "pings", 60, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_planted_weakness_makes_light_connections_wait(
    plant: Callable[[pytest.MonkeyPatch], None],
    load: str,
    number: int,
    kept: bool,
    mock_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    found = await waits(load, number, mock_clock, monkeypatch, hub=True, kept=kept)
    assert max(found) > PATIENCE, found
