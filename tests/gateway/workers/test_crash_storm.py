"""A storm of crashes: twenty models that fail wherever a model can, under two hundred streams on all wires."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, final

import pytest
import trio

from gateway.errors import TransportLost
from gateway.workers.restart_policy import within_period
from gateway.workers.states import State
from models.errors import ModelError
from models.session import Session
from models.spec import Model, ModelSpec, RestartPolicy
from protocols.v2 import V2Error
from tests.gateway.promises import STREAMS, Call, House, Over, Probe, serving

WIRES = [w for w in STREAMS if w not in ("bridge", "bidi-signed", "bidi-padded", "websocket-anywhere")]
"""Wires of one gateway with the default configuration."""
MODELS, CALLERS = 20, 10
NUMBERS = 20
"""The count of numbers in a stream without a fault."""
SECONDS, POLICY = 30.0, RestartPolicy()
SEEDS = (7,)
"""One is ten seconds of work; each is another storm."""


class Failed(Exception):
    """Raised by a model of the storm."""


# by the name of the fail point, the exception that a model raises in one of its sessions
IN_SESSION: dict[str, Callable[[], BaseException]] = {
    "exception": lambda: Failed("in a session"),
    "group": lambda: ExceptionGroup("in a nursery", [Failed("one"), Failed("two")]),
    "exit": lambda: SystemExit(3),
    "memory": lambda: MemoryError(),
    "model error": lambda: ModelError("no such voice", code="Voice", status=422),
}


@final
@dataclass(eq=False)
class Storm:
    """One model and what happens to it."""

    name: str
    wire: str
    chance: random.Random
    probe: Probe = field(init=False)
    life: trio.CancelScope = field(init=False)
    loads: int = 0
    bad_loads: int = 0
    """Loads that will fail from now on."""
    bad_exit: bool = False
    """True if its next clean-up raises."""
    next_session: str = ""
    """The fail point of the next session. Default "": none."""
    crashes: list[float] = field(default_factory=list)
    """The time of each crash, of the worker or of one session."""

    def __post_init__(self) -> None:
        self.probe = Probe(self.script, self.name)
        self.probe.speak(self.wire)

    def spec(self) -> ModelSpec:
        return ModelSpec(name=self.name, family=self.probe.family, load=self.load, restart=POLICY, decoupled=True)

    @asynccontextmanager
    async def load(self) -> AsyncIterator[Model]:
        self.loads += 1
        await trio.sleep(0.01)
        if self.bad_loads:
            self.bad_loads -= 1
            self.crashed()
            raise Failed("while it loads")
        with trio.CancelScope() as self.life:
            try:
                yield self.probe
            finally:
                if self.bad_exit:
                    self.bad_exit = False
                    raise Failed("in its clean-up")
        if self.life.cancelled_caught:
            raise Failed("in the background")

    def die(self) -> None:
        """Makes the background work of its `load()` fail."""
        self.crashed()
        self.life.cancel()

    def crashed(self) -> None:
        self.crashes.append(trio.current_time())

    async def script(self, probe: Probe, session: Session[Any, Any]) -> None:
        failure, self.next_session = self.next_session, ""
        fails_at = self.chance.randrange(NUMBERS) if failure else -1
        await probe.take(session)
        for number in range(NUMBERS):
            if number == fails_at:
                self.crashed()
                raise IN_SESSION[failure]()
            await session.send(probe.message(number))
            await trio.sleep(self.chance.uniform(0, 0.5))


@final
@dataclass(frozen=True, slots=True)
class Told:
    """One caller's record of one stream."""

    began: float
    over: float
    numbers: list[int]
    how: str


async def calling(house: House, storm: Storm, until: float, told: list[Told]) -> None:
    """One caller: stream after stream, read to its end, on a connection each."""
    while trio.current_time() < until:
        began, numbers, over = trio.current_time(), [], None
        call: Call | None = None
        try:
            call = await house.call(storm.wire, storm.name)
            while isinstance(number := await call.next(), int):
                numbers.append(number)
            over = number
        except V2Error as error:  # one request of a session ended
            over = Over("error", error.message)
        except TransportLost as refusal:  # a WebSocket that is refused
            over = Over("refused" if "503" in str(refusal) else "lost", str(refusal))
        finally:
            if call is not None:
                call.line.peer.close()
        told.append(Told(began, trio.current_time(), numbers, over.how))
        if over.how != "complete":
            await trio.sleep(storm.chance.uniform(0, 2))


async def raining(house: House, storm: Storm, until: float) -> None:
    """One thing after another happens to a model, below what its policy bears; and each time it is back within a second."""
    while trio.current_time() < until:
        await trio.sleep(storm.chance.uniform(4, 8))
        worker = house.gateway.supervisor.workers[storm.name]
        recent = within_period(POLICY, worker.crashes, trio.current_time())
        match storm.chance.randrange(5):
            case 0 if len(recent) + 1 <= POLICY.intensity:
                storm.die()
            case 1 if len(recent) + 2 <= POLICY.intensity:
                storm.bad_loads = 1
                storm.die()
            case 2 if len(recent) + 1 <= POLICY.intensity:
                storm.bad_exit = True
                storm.die()
            case _:
                storm.next_session = storm.chance.choice(list(IN_SESSION))
                continue
        await house.still()
        with trio.fail_after(1):
            while not worker.ready:  # noqa: ASYNC110  # as whoever asks for its readiness sees it
                await trio.sleep(0.01)


async def breaking(house: House, storm: Storm) -> float:
    """More crashes than a model's policy bears: it is given up; when."""
    worker = house.gateway.supervisor.workers[storm.name]
    await trio.sleep(SECONDS / 2)
    while worker.state is not State.FAILED:
        if worker.ready:
            storm.die()
        await trio.sleep(0.01)
    return trio.current_time()


@pytest.mark.sweep
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_crash_ends_the_streams_of_its_own_model_and_no_other(seed: int, autojump_clock: Any) -> None:
    chance = random.Random(seed)
    wires = chance.sample(WIRES, k=len(WIRES))
    storms = [Storm(f"m{n:02}", wires[n % len(wires)], random.Random(chance.random())) for n in range(MODELS)]
    broken, calm = storms[:2], storms[2:4]
    given_up: dict[str, float] = {}
    told: dict[str, list[Told]] = {storm.name: [] for storm in storms}

    most = [0]

    async def watch() -> None:
        while trio.current_time() < until:
            most[0] = max(most[0], house.gateway.counts().exchanges)
            await trio.sleep(0.1)

    async def broke(storm: Storm) -> None:
        given_up[storm.name] = await breaking(house, storm)

    async with serving(*(storm.spec() for storm in storms)) as house:
        began = trio.current_time()
        until = began + SECONDS
        async with trio.open_nursery() as nursery:
            for storm in storms:
                for _ in range(CALLERS):
                    nursery.start_soon(calling, house, storm, until, told[storm.name])
            nursery.start_soon(watch)
            for storm in broken:
                nursery.start_soon(broke, storm)
            for storm in storms[4:]:
                nursery.start_soon(raining, house, storm, until - 8)
        assert most[0] >= 0.9 * MODELS * CALLERS
        streams = [stream for storm in storms for stream in told[storm.name]]
        assert sum(house.endings.values()) == len(streams), "one ending each"
        assert len([at for storm in storms for at in storm.crashes]) >= 2 * MODELS
        for storm in storms:
            worker = house.gateway.supervisor.workers[storm.name]
            assert worker.state is (State.FAILED if storm in broken else State.READY)
            for stream in told[storm.name]:
                assert stream.numbers == list(range(len(stream.numbers)))
                if stream.how == "complete":
                    assert len(stream.numbers) == NUMBERS
                elif stream.began < given_up.get(storm.name, float("inf")):
                    near = [at for at in storm.crashes if stream.began - 1 <= at <= stream.over]
                    assert near, (storm.name, storm.wire, stream, storm.crashes)
        for storm in calm:
            assert {stream.how for stream in told[storm.name]} == {"complete"}
        for storm in broken:
            assert {stream.how for stream in told[storm.name] if stream.began > given_up[storm.name]} == {"refused"}
