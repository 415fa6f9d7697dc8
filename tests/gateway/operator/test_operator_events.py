"""The event stream: what opens, changes and closes is told once, to a reader that is waited for and costs no memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from starlette.types import Message

from gateway.config import Config, DrainConfig
from gateway.gateway import Gateway
from gateway.operator import events as watch
from gateway.operator.app import operator_app
from gateway.testing.stories.talk import Leave
from protocols.events import NEED_DATA
from protocols.sse import SSEDecoder
from tests.gateway.catalog.test_repository import swept
from tests.gateway.operator.operators import Operator
from tests.gateway.operator.test_operator import NO_PORT
from tests.gateway.promises import Probe, answering, counting, pausing, serving, silent


class Reader:
    """Reads the event stream, as long as it `takes`."""

    def __init__(self, app: Any, target: str = "/streams/events") -> None:
        self._operator = Operator(app)
        self._scope = self._operator.scope("GET", target, {})
        self.status, self.headers, self.over = 0, dict[bytes, bytes](), False
        self._decoder = SSEDecoder()
        self.largest = 0
        self.takes = trio.Event()
        self.takes.set()
        self.left = trio.Event()
        self.asked = False

    async def _receive(self) -> Message:
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        body = message["body"]
        self.largest = max(self.largest, len(body))
        self._decoder.receive_data(body)
        self.over = not message.get("more_body", False)

    async def run(self) -> None:
        await self._operator.app(self._scope, self._receive, self._send)
        self.over = True

    def all(self) -> list[tuple[str, Any]]:
        """Returns the events since the last call."""
        found = []
        while (event := self._decoder.next_event()) is not NEED_DATA:
            found.append((event.event, json.loads(event.data)))
        return found

    def events(self) -> list[tuple[str, Any]]:
        """Returns the events since the last call, except `stats`, which comes each second."""
        return [(name, data) for name, data in self.all() if name != "stats"]

    def told(self, *wanted: str) -> list[tuple[str, Any]]:
        """Returns the events of these kinds since the last call."""
        return [(name, data) for name, data in self.all() if name in wanted]


@asynccontextmanager
async def reading(gateway: Gateway, target: str = "/streams/events") -> AsyncIterator[Reader]:
    """A reader, until the end of the block."""
    reader = Reader(gateway, target)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)
        await trio.testing.wait_all_tasks_blocked()
        yield reader
        reader.left.set()


async def test_what_opens_changes_and_closes_is_told_once(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("lmi-http1"), config=NO_PORT) as house, reading(house.gateway) as reader:
        assert reader.headers[b"content-type"].startswith(b"text/event-stream")
        assert reader.headers[b"x-accel-buffering"] == b"no"
        ((name, models),) = reader.events()
        assert (name, [(model["name"], model["state"]) for model in models]) == ("models", [("probe", "ready")])
        call = await house.call("lmi-http1")
        await house.still()
        await trio.sleep(1.5)
        ((name, opened),) = reader.told("opened", "changed", "closed")
        assert (name, opened["model"], opened["waits_for"]) == ("opened", "probe", "model")
        await trio.sleep(10)
        assert reader.events() == []
        probe.go.set()
        assert len((await call.rest())[0]) == 6
        await house.still()
        await trio.sleep(1.5)
        ((name, closed),) = reader.told("opened", "changed", "closed")
        assert (name, closed["id"], closed["ending"], closed["status"]) == ("closed", opened["id"], "complete", 200)
        assert closed["bytes_out"] > opened["bytes_out"] > 3000


async def test_one_that_was_over_before_anybody_looked_is_told_as_closed(autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("json-http1"), config=NO_PORT) as house, reading(house.gateway) as reader:
        reader.events()
        await (await house.call("json-http1")).rest()
        await trio.sleep(1.5)
        assert [(name, data["ending"]) for name, data in reader.events()] == [("closed", "complete")]


async def test_what_a_stream_waits_for_is_told_when_it_changes(autojump_clock: Any) -> None:
    async with serving(Probe(counting).spec("lmi-http1"), config=NO_PORT) as house, reading(house.gateway) as reader:
        reader.events()
        call = await house.call("lmi-http1")
        await trio.sleep(1.5)
        assert [(name, data["waits_for"]) for name, data in reader.told("opened", "changed")] == [("opened", "room")]
        await call.take(100)
        await trio.sleep(1.5)
        ((name, data),) = reader.events()
        assert (name, data["waits_for"]) == ("changed", "room")
        await call.leave(Leave.RESET)


async def test_models_are_told_when_a_slot_of_one_is_taken_and_when_it_is_free_again(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=NO_PORT) as house, reading(house.gateway) as reader:
        reader.events()
        call = await house.call("json-http1")
        await trio.sleep(1.5)
        await call.leave(Leave.RESET)
        await trio.sleep(1.5)
        assert [[model["slots_in_use"] for model in models] for _, models in reader.told("models")] == [[1], [0]]


async def test_models_are_told_when_a_state_changes(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=NO_PORT) as house, reading(house.gateway) as reader:
        reader.events()
        await house.gateway.control.unload("probe")
        await trio.sleep(1.5)
        assert reader.events() == [("models", [])]
        await house.gateway.control.load("probe")
        await trio.sleep(1.5)
        assert [[model["state"] for model in models] for _, models in reader.events()] == [["ready"]]


async def test_a_reader_that_stops_is_told_how_much_it_has_missed(autojump_clock: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(watch, "KEPT", 5)
    answers, stays = Probe(answering), Probe(silent, "stays")
    answers.go.set()
    specs = [answers.spec("json-http1"), stays.spec("json-http1")]
    async with serving(*specs, config=NO_PORT) as house, reading(house.gateway) as reader:
        held = [await house.call("json-http1", "stays") for _ in range(2)]
        await trio.sleep(1.5)
        known = {data["id"] for _, data in reader.told("opened")}
        assert len(known) == 2
        reader.takes = trio.Event()
        held.append(await house.call("json-http1", "stays"))  # news, so that something waits for the reader
        await trio.sleep(10)
        for _ in range(20):
            await (await house.call("json-http1")).rest()
        for call in held:
            await call.leave(Leave.RESET)
        await trio.sleep(10)
        (watching,) = house.gateway.observer.watchers
        state = watching.__self__  # type: ignore[attr-defined]
        assert len(state._ended) == 5
        reader.takes.set()
        await trio.sleep(3)
        events = reader.told("dropped", "closed")
        closed = [data for name, data in events if name == "closed"]
        (dropped,) = [data["closed"] for name, data in events if name == "dropped"]
        assert known <= {data["id"] for data in closed}  # no stream stays in the reader's list for ever
        assert len([data for data in closed if "ending" in data]) + dropped == 23
        assert state._known == {}


async def test_events_are_written_in_pieces(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("lmi-http2", capacity=1, queue=300, party_share=100), config=NO_PORT) as house:
        line = house.line("http2")
        calls = [await house.call("lmi-http2", line=line) for _ in range(300)]
        await house.still()
        async with reading(house.gateway) as reader:
            said = [data["waits_for"] for _, data in reader.told("opened")]
            assert (len(said), said.count("slot")) == (300, 299)
            assert reader.largest == 32 * 1024
        await calls[0].leave(Leave.RESET)


@pytest.mark.parametrize(("interval", "seconds"), [("0.1", 1.0), ("1", 1.0), ("4", 4.0)])
async def test_figures_are_told_at_each_look_but_once_a_second_at_most(
    interval: str, seconds: float, autojump_clock: Any
) -> None:
    target = f"/streams/events?interval={interval}"
    async with serving(Probe(silent).spec("json-http1"), config=NO_PORT) as house, reading(house.gateway, target) as reader:
        ((_, first),) = reader.told("stats")
        call = await house.call("json-http1")
        await trio.sleep(20)
        told = reader.told("stats")
        assert len(told) == pytest.approx(20 / seconds, abs=2)
        assert (sum(first["live"].values()), [sum(data["live"].values()) for _, data in told][-1]) == (0, 1)
        await call.leave(Leave.RESET)


async def test_a_drain_ends_it_with_the_report(autojump_clock: Any) -> None:
    config = Config(repository=NO_PORT.repository, drain=DrainConfig(timeout=5))
    async with serving(Probe(silent).spec("json-http1"), config=config) as house, reading(house.gateway) as reader:
        call = await house.call("json-http1")
        await trio.sleep(1.5)
        await house.gateway.drain()
        await house.still()
        assert reader.over
        *_, (closing, closed), (last, report) = reader.told("closed", "drained")
        assert (closing, closed["ending"]) == ("closed", "drained")
        assert (last, report["endings"]) == ("drained", {"drained": 1})
        await call.rest()


async def test_a_reader_that_leaves_is_forgotten(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=NO_PORT) as house:
        async with reading(house.gateway) as reader:
            assert len(house.gateway.observer.watchers) == 1
        assert reader.over
        assert house.gateway.observer.watchers == []


async def test_readers_are_so_many_and_no_more(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=NO_PORT) as house:
        app = operator_app(house.gateway)
        readers = [Reader(app) for _ in range(8)]
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.run)
            await house.still()
            refused = await Operator(app).ask("GET", "/streams/events")
            assert (refused.status, refused.json["error"][:9]) == (503, "8 read th")
            readers.pop().left.set()
            await house.still()
            last = Reader(app)
            nursery.start_soon(last.run)
            await house.still()
            assert last.status == 200
            for reader in (*readers, last):
                reader.left.set()


@pytest.mark.parametrize("interval", ["0", "61", "nan", "soon", ""])
async def test_an_interval_is_in_bounds(interval: str) -> None:
    answer = await Operator(Gateway(NO_PORT)).ask("GET", f"/streams/events?interval={interval}")
    assert answer.status == 400
    assert "from 0.1 to 60" in answer.json["error"]


async def test_a_reader_that_is_cancelled_at_any_step_leaves_nothing(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=NO_PORT) as house:
        call = await house.call("json-http1")
        app = operator_app(house.gateway)
        cancelled = 0
        for step in range(1, 200):
            reader = Reader(app)

            async def read(reader: Reader = reader) -> None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(reader.run)
                    await trio.sleep(2.5)
                    reader.left.set()

            fired, caught = await swept(read, step)
            cancelled += caught
            assert house.gateway.observer.watchers == []
            if not fired:
                break
        assert not fired
        assert cancelled >= 5
        async with trio.open_nursery() as nursery:  # all eight places are there
            readers = [Reader(app) for _ in range(8)]
            for reader in readers:
                nursery.start_soon(reader.run)
            await house.still()
            assert [reader.status for reader in readers] == [200] * 8
            for reader in readers:
                reader.left.set()
        await call.leave(Leave.RESET)


async def test_a_drain_tells_how_far_it_is(autojump_clock: Any) -> None:
    config = Config(repository=NO_PORT.repository, drain=DrainConfig(timeout=30, delay=2))
    probe = Probe(pausing)
    async with serving(probe.spec("lmi-http1"), config=config) as house, reading(house.gateway) as reader:
        calls = [await house.call("lmi-http1") for _ in range(3)]
        await trio.sleep(1.5)
        assert reader.told("draining") == []
        house.gateway.begin_drain()
        await trio.sleep(1.5)
        refused = await house.call("lmi-http1")
        await refused.rest()
        await calls[0].leave(Leave.RESET)
        await trio.sleep(1.5)
        first, *_, (_, last) = reader.told("draining")
        assert {**first[1], "began": 0, "deadline": 0} == {"began": 0, "deadline": 0, "live": 3, "ended": {}, "refused": 0}
        assert first[1]["deadline"] - first[1]["began"] == pytest.approx(32)
        assert (last["live"], last["ended"], last["refused"]) == (3, {"cancelled-by-client": 1}, 1)
        house.gateway.begin_drain(5)
        await trio.sleep(1.5)
        ((_, shortened),) = reader.told("draining")
        assert shortened["deadline"] < last["deadline"] - 15
        probe.go.set()
        for call in calls[1:]:
            await call.rest()
        await house.gateway.reported()
        await house.still()
        *_, (_, drained), (end, report) = reader.told("draining", "drained")
        assert (end, drained["ended"]) == ("drained", report["endings"])
