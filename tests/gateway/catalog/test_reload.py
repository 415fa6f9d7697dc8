"""Hot reload: the new version is loaded beside the old one, the switch is one moment, and no call is refused for it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.config import Config, RepositoryConfig
from gateway.errors import Conflict, InsufficientStorage, NotFound
from gateway.workers.states import State
from models.spec import Model, ModelSpec, WarmupFailed
from protocols.events import Data, End
from tests.gateway.catalog.test_repository import swept
from tests.gateway.promises import STREAMS, WIRE, House, Probe, answering, at_once, pausing, raw, serving, silent


class Version:
    """A version of the model, whose `load()` waits until it may go on."""

    def __init__(self, script: Any, wire: str, version: str = "2", *, waits: bool = False) -> None:
        self.probe = Probe(script)
        self.probe.speak(wire)
        self.wire, self.version = wire, version
        self.gate = trio.Event()
        if not waits:
            self.gate.set()
        self.fails = False
        self.diary: list[str] = []

    @asynccontextmanager
    async def load(self) -> AsyncIterator[Model]:
        self.diary.append("load")
        try:
            await self.gate.wait()
            if self.fails:
                raise OSError("no weights")
            yield self.probe
        finally:
            self.diary.append("unload")

    def spec(self, **options: Any) -> ModelSpec:
        wire = WIRE[self.wire]
        return ModelSpec(
            name="probe", family=wire.family, decoupled=wire.decoupled, load=self.load, version=self.version, **options
        )


@asynccontextmanager
async def reloading(house: House, *arguments: Any, **options: Any) -> AsyncIterator[list[Any]]:
    """A reload that has begun; at the end of the block it is over, and what came of it is in the list."""
    came: list[Any] = []

    async def reload() -> None:
        try:
            came.append(await house.gateway.reload("probe", *arguments, **options))
        except Exception as e:
            came.append(e)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reload)
        await house.still()
        yield came


@pytest.mark.parametrize("wire", [w for w in STREAMS if w != "bridge"])
async def test_streams_end_on_the_old_version_while_new_calls_are_the_new_ones(wire: str, autojump_clock: MockClock) -> None:
    old, new = Version(pausing, wire, "1"), Version(answering, wire, waits=True)
    new.probe.go.set()
    async with serving(old.spec(), wire=wire) as house:
        stream = await house.call(wire)
        await stream.take(3)
        async with reloading(house, new.spec()) as came:
            while_loading = await house.call(wire)
            await while_loading.take(3)  # the old one answers
            assert (old.probe.calls, new.probe.calls, came) == (2, 0, [])
            new.gate.set()
        assert (came[0].version, came[0].state) == ("2", State.READY)
        with at_once():
            answer, over = await (await house.call(wire)).rest()
        assert (len(answer), over.how, new.probe.calls) == (1, "complete", 1)
        assert old.diary == ["load"]
        old.probe.go.set()
        for call in (stream, while_loading):
            assert (await call.rest())[1].how == "complete"
        await house.still()
        assert old.diary == ["load", "unload"]
        assert set(house.endings) == {"complete"}


async def test_who_waits_for_a_slot_of_the_old_version_has_it(autojump_clock: MockClock) -> None:
    old, new = Version(answering, "json-http1", "1"), Version(silent, "json-http1")
    async with serving(old.spec(capacity=1)) as house:
        calls = [await house.call("json-http1") for _ in range(3)]
        await house.still()
        await house.gateway.reload("probe", new.spec())
        assert (old.probe.live, old.probe.calls) == (1, 1)
        old.probe.go.set()
        for call in calls:
            assert (await call.rest())[1].how == "complete"
        assert (old.probe.calls, new.probe.calls) == (3, 0)
        await house.still()
        assert old.diary == ["load", "unload"]


@pytest.mark.parametrize("ends", ["before", "after"])
async def test_an_upload_that_was_under_way_is_answered_by_the_new_version(ends: str, autojump_clock: MockClock) -> None:
    old, new = Version(answering, "json-http1", "1"), Version(answering, "json-http1")
    new.probe.go.set()
    async with serving(old.spec()) as house:
        line, body = house.line("http1"), b'{"inputs": "hello"}'
        await line.send(raw(1, b"POST", "/predictions/probe", content_length=len(body)), Data(stream=1, buffers=(body[:5],)))
        await house.still()
        if ends == "after":  # nobody is left on the old one: it has gone when the rest comes
            await house.gateway.reload("probe", new.spec())
            await house.still()
            assert old.diary == ["load", "unload"]
        else:
            busy = await house.call("json-http1")
            await house.still()
            await house.gateway.reload("probe", new.spec())
            assert old.diary == ["load"]
        await line.send(Data(stream=1, buffers=(body[5:],)), End(stream=1))
        status, _, _ = await line.peer.read_answer(1)
        assert (status, new.probe.calls) == (200, 1)
        if ends == "before":
            old.probe.go.set()
            assert (await busy.rest())[1].how == "complete"


async def test_a_version_that_cannot_be_loaded_leaves_the_old_one_serving(autojump_clock: MockClock) -> None:
    old, new = Version(answering, "json-http1", "1"), Version(silent, "json-http1")
    old.probe.go.set()
    new.fails = True
    async with serving(old.spec()) as house:
        async with reloading(house, new.spec()) as came:
            pass
        assert [(type(e), str(e)) for e in came] == [(OSError, "no weights")]
        assert (await (await house.call("json-http1")).rest())[1].how == "complete"
        assert (house.gateway.models["probe"].version, old.probe.calls) == ("1", 1)
        assert old.diary == ["load"]


async def test_a_version_that_fails_its_warm_up_serves_nobody(autojump_clock: MockClock) -> None:
    async def cold(model: Model) -> None:
        raise ValueError("cold")

    old, new = Version(silent, "json-http1", "1"), Version(silent, "json-http1")
    async with serving(old.spec()) as house:
        with pytest.raises(WarmupFailed, match="cold"):
            await house.gateway.reload("probe", new.spec(warmup=cold))
        assert (house.gateway.models["probe"].version, new.diary) == ("1", ["load", "unload"])


async def test_without_a_spec_the_same_is_loaded_again_and_counts_begin_anew(autojump_clock: MockClock) -> None:
    only = Version(answering, "json-http1", "1")
    only.probe.go.set()
    async with serving(only.spec()) as house:
        first = house.gateway.supervisor.workers["probe"]
        status = await house.gateway.reload("probe")
        await house.still()
        assert (only.diary, status.restarts, status.ready) == (["load", "load", "unload"], 0, True)
        assert house.gateway.supervisor.workers["probe"] is not first
        assert first.state is State.STOPPED


async def test_streams_that_last_longer_than_the_patience_are_lost(autojump_clock: MockClock) -> None:
    old, new = Version(pausing, "bidi", "1"), Version(silent, "bidi")
    async with serving(old.spec()) as house:
        call = await house.call("bidi")
        await call.take(3)
        began = trio.current_time()
        await house.gateway.reload("probe", new.spec(), patience=7.0)
        assert trio.current_time() == began
        numbers, over = await call.rest()
        assert (numbers, over.how, over.code) == ([], "error", "InternalStreamFailure")
        assert 7.0 <= trio.current_time() - began < 8.0
        await house.still()
        assert (old.diary, new.diary) == (["load", "unload"], ["load"])


async def test_both_versions_must_fit(autojump_clock: MockClock) -> None:
    old, new = Version(silent, "bidi", "1"), Version(silent, "bidi")
    config = Config(repository=RepositoryConfig(memory=1000))
    async with serving(old.spec(memory=600), config=config) as house:
        assert house.gateway.repository.used == 600
        with pytest.raises(InsufficientStorage, match=r"needs 500 bytes .* 600 of 1000 .*repository\.memory"):
            await house.gateway.reload("probe", new.spec(memory=500))
        assert new.diary == []
        await house.gateway.reload("probe", new.spec(memory=400))
        await house.still()
        assert house.gateway.repository.used == 400
        await house.gateway.drain()


async def test_what_cannot_be_reloaded(autojump_clock: MockClock) -> None:
    old, new = Version(silent, "bidi", "1"), Version(silent, "bidi", waits=True)
    async with serving(old.spec()) as house:
        with pytest.raises(NotFound, match="no model 'other' is in service"):
            await house.gateway.reload("other")
        with pytest.raises(ValueError, match="of the same name and family"):
            await house.gateway.reload("probe", replace(new.spec(), name="other"))
        with pytest.raises(ValueError, match="of the same name and family"):
            await house.gateway.reload("probe", Version(silent, "v2-http1").spec())
        async with reloading(house, new.spec()):
            with pytest.raises(Conflict, match="is being reloaded"):
                await house.gateway.reload("probe")
            new.gate.set()


async def test_a_model_that_is_unloaded_meanwhile_stays_unloaded(autojump_clock: MockClock) -> None:
    old, new = Version(silent, "bidi", "1"), Version(silent, "bidi", waits=True)
    async with serving(old.spec()) as house:
        async with reloading(house, new.spec()) as came:
            await house.gateway.control.unload("probe")
            new.gate.set()
        assert [type(e) for e in came] == [Conflict]
        assert dict(house.gateway.models) == {}
        assert new.diary == ["load", "unload"]
        await house.gateway.drain()


async def test_a_model_that_was_given_up_is_replaced_by_one_that_works(autojump_clock: MockClock) -> None:
    old, new = Version(silent, "json-http1", "1"), Version(answering, "json-http1")
    old.fails = True
    new.probe.go.set()
    async with serving(old.spec()) as house:
        await trio.sleep(60)
        assert house.gateway.models["probe"].state is State.FAILED
        await house.gateway.reload("probe", new.spec())
        assert (await (await house.call("json-http1")).rest())[1].how == "complete"


async def test_a_load_asked_for_meanwhile_is_a_conflict_and_harms_neither(autojump_clock: MockClock) -> None:
    old, new = Version(silent, "bidi", "1"), Version(silent, "bidi", waits=True)
    old.fails = True
    async with serving(old.spec()) as house:
        await trio.sleep(60)
        async with reloading(house, new.spec()) as came:
            with pytest.raises(Conflict, match="is being loaded"):
                await house.gateway.control.load("probe")
            new.gate.set()
        assert (came[0].version, came[0].ready) == ("2", True)


@pytest.mark.parametrize("seed", range(5))
async def test_under_load_no_call_is_refused_for_a_reload(seed: int, autojump_clock: MockClock) -> None:
    chance = random.Random(seed)
    wires = ("json-http1", "lmi-http2", "json-http2", "lmi-http1")

    async def short(probe: Probe, session: Any) -> None:
        await probe.take(session)
        await trio.sleep(chance.random())
        await probe.say(session)

    async with serving(Version(short, "json-http1", "0").spec(capacity=3)) as house:
        done: list[str] = []

        async def caller(wire: str, at: float) -> None:
            await trio.sleep(at)
            done.append((await (await house.call(wire)).rest())[1].how)

        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(caller, chance.choice(wires), 10 * chance.random())
            for number in range(1, 6):
                await trio.sleep(2 * chance.random())
                await house.gateway.reload("probe", Version(short, "json-http1", str(number)).spec(capacity=3))
        assert done == ["complete"] * 60
        assert house.endings == {"complete": 60}
        assert house.gateway.models["probe"].version == "5"


async def test_an_unload_is_over_when_the_old_version_is_too(autojump_clock: MockClock) -> None:
    old, new = Version(pausing, "bidi", "1"), Version(silent, "bidi")
    config = Config(repository=RepositoryConfig(unload_timeout=5.0))
    async with serving(old.spec(), config=config) as house:
        call = await house.call("bidi")
        await call.take(3)
        await house.gateway.reload("probe", new.spec(), patience=1000.0)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call.rest)
            await house.gateway.control.unload("probe")
        assert 5.0 <= trio.current_time() - began < 6.0
        assert old.diary == new.diary == ["load", "unload"]
        await house.gateway.control.load("probe")
        assert (house.gateway.models["probe"].version, new.diary[-1]) == ("2", "load")


async def test_a_drain_ends_both_versions(autojump_clock: MockClock) -> None:
    old, new = Version(pausing, "bidi", "1"), Version(silent, "bidi")
    async with serving(old.spec()) as house:
        call = await house.call("bidi")
        await call.take(3)
        await house.gateway.reload("probe", new.spec())
        report = await house.gateway.drain()
        assert report.endings == {"drained": 1}
        assert (old.diary, new.diary) == (["load", "unload"], ["load", "unload"])


async def test_a_reload_that_is_cancelled_at_any_step_has_switched_or_changed_nothing(autojump_clock: MockClock) -> None:
    old = Version(silent, "bidi", "1")
    async with serving(old.spec()) as house:
        switched = cancelled = 0
        for step in range(1, 500):
            before = house.gateway.supervisor.workers["probe"]
            version = Version(silent, "bidi", str(step + 1))
            spec: ModelSpec = version.spec()
            act: Callable[[], Any] = lambda spec=spec: house.gateway.reload("probe", spec)  # noqa: E731
            fired, caught = await swept(act, step)
            await house.still()
            now = house.gateway.supervisor.workers["probe"]
            cancelled += caught
            switched += now is not before
            assert now.ready
            if caught and now is before:
                assert version.diary in ([], ["load", "unload"])
            elif not caught:
                assert (now.spec.version, before.state) == (version.version, State.STOPPED)
            assert house.gateway.repository.used == 0
            if not fired:
                break
        assert not fired
        assert cancelled >= 2
        assert switched >= 1
