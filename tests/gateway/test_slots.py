"""Slots know who calls by a protocol alone, and keep nothing of a model alive."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway import client
from gateway.errors import Closing, DeadlineExceeded, Ending, GatewayError, ModelCrashed, Overloaded, Refusal
from gateway.party import Party
from gateway.workers.caller import Caller
from gateway.workers.worker import Worker
from models.adapt import spec_of
from models.messages import Family, Part, Token
from models.session import Session
from models.spec import Model, ModelSpec
from tests.gateway.promises import serving
from tests.models.channels import MemoryChannel


class Call:
    """One call that is no exchange: it has what `Caller` asks for, and tells what it was told."""

    incident = stopped_by = ""
    priority = held = bytes_in = copied = 0
    gone, deadline = False, float("inf")
    ending: Ending | None = None
    cancelled_at: float | None = None
    key: Party | None = None

    def __init__(self, id: str, party: Party | None = None) -> None:
        self.id, self.party = id, party or Party(id)
        self.told: list[Any] = []

    @property
    def interruption_or_deadline(self) -> GatewayError:
        return DeadlineExceeded("too late")

    def interrupt(self, error: GatewayError) -> None:
        self.told.append(error)

    def limit_time(self, seconds: float, setting: str) -> None:
        self.told.append((seconds, setting))

    def reserve_objects(self, n: int) -> Callable[[], None]:
        return lambda: None

    def slot_wait_began(self) -> None:
        self.told.append("waits")

    def slot_wait_over(self) -> None:
        self.told.append("waits no longer")


async def fragile(session: Session[Part, Part]) -> None:
    async for part in session:
        if part.data == b"break":
            raise ZeroDivisionError("mine")
        await session.send(part)


class Loads:
    """Loads one model, again and again."""

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Model]:
        yield fragile


def spec(**options: Any) -> ModelSpec:
    return ModelSpec(name="m", family=Family.PARTS, load=Loads(), **options)


@asynccontextmanager
async def running(spec: ModelSpec) -> AsyncIterator[Worker]:
    worker = Worker(spec)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await worker.first_load()
        yield worker
        worker.stop()


async def test_a_caller_need_not_be_an_exchange() -> None:
    async with running(spec(capacity=1, timeout=9.0)) as worker, trio.open_nursery() as nursery:
        first, second = Call("first"), Call("second")

        async def call(caller: Caller, data: bytes, sent: list[Part]) -> None:
            channel = MemoryChannel(Part(data=data))
            with await worker.slots.take(caller):
                await worker.call(Session(channel), caller, Family.PARTS)
            sent += channel.sent

        answer: list[Part] = []
        with await worker.slots.take(first):
            nursery.start_soon(call, second, b"x", answer)
            await wait_all_tasks_blocked()
            assert (worker.slots.live, worker.slots.waiting, worker.slots.queued) == ({first, second}, {second}, 1)
        await wait_all_tasks_blocked()
        assert first.told == [(9.0, "models.m.timeout")]
        assert (second.told, answer) == (["waits", "waits no longer", (9.0, "models.m.timeout")], [Part(data=b"x")])
        with pytest.raises(ModelCrashed, match="incident") as caught:
            await call(first, b"break", [])
        assert first.incident in str(caught.value)
        assert worker.last_error is not None
        assert worker.last_error.incident == first.incident
        assert (worker.slots.in_use, worker.slots.live, worker.statistics.succeeded, worker.statistics.failed) == (
            0,
            set(),
            2,
            1,
        )


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_who_knows_the_slots_keeps_neither_the_worker_nor_its_model_alive() -> None:
    worker = Worker(spec())
    slots, load = worker.slots, weakref.ref(worker.spec.load)
    assert load() is not None
    del worker
    assert load() is None
    assert slots.in_use == 0


# -- the share of a party --------------------------------------------------------------------------------------------


async def test_a_party_with_its_share_waits_though_a_slot_is_free_and_another_has_it() -> None:
    greedy, other = Party("greedy"), Party("other")
    async with running(spec(capacity=4, party_share=60)) as worker, trio.open_nursery() as nursery:
        slots = worker.slots
        held = [slots.take_now(Call(str(n), greedy)) for n in range(3)]
        assert all(held)
        assert slots.take_now(Call("one more", greedy)) is None
        served: list[str] = []

        async def call(caller: Call) -> None:
            with await slots.take(caller):
                served.append(caller.id)

        nursery.start_soon(call, Call("greedy's", greedy))
        await wait_all_tasks_blocked()
        assert (slots.free, slots.queued, served) == (1, 1, [])
        nursery.start_soon(call, Call("other's", other))
        await wait_all_tasks_blocked()
        assert (slots.queued, served) == (1, ["other's"])
        for slot in held:
            assert slot is not None
            with slot:
                pass
            await wait_all_tasks_blocked()
        assert served == ["other's", "greedy's"]
        assert (slots.free, slots.queue.used_by(greedy), slots.queue.used_by(other), slots.live) == (4, 0, 0, set())


@pytest.mark.parametrize(
    ("queue", "refused", "says"),
    [
        (10, 10, "3 of 4 slots and 9 of 10 places in the queue, and one party may have 90 percent of each"),
        (1, 2, "4 sessions run and 1 wait"),
        (0, 1, "this client has 3 of 4 slots and 0 of 0 places"),
    ],
)
async def test_one_party_cannot_take_all_places_in_the_queue(queue: int, refused: int, says: str) -> None:
    greedy = Party("greedy")
    async with running(spec(capacity=4, queue=queue)) as worker, trio.open_nursery() as nursery:
        slots = worker.slots
        held = [slots.take_now(Call(str(n), greedy)) for n in range(3)]
        if queue:
            held.append(slots.take_now(Call("another's")))

        async def wait(caller: Call) -> None:
            with await slots.take(caller):
                pass

        for n in range(refused - 1):
            nursery.start_soon(wait, Call(f"waits {n}", greedy))
        await wait_all_tasks_blocked()
        assert slots.queued == refused - 1
        with pytest.raises(Overloaded, match=says) as caught:
            await slots.take(Call("too many", greedy))
        assert caught.value.refusal is (Refusal.QUEUE if queue == 1 else Refusal.PARTY_SHARE)
        with pytest.raises(Overloaded, match=says):
            worker.check_ready(Call("too many", greedy))
        if queue != 1:
            worker.check_ready(Call("another"))
        for slot in held:
            assert slot is not None
            with slot:
                pass
        await wait_all_tasks_blocked()
        assert (slots.in_use, slots.queued, slots.live) == (0, 0, set())


@pytest.mark.parametrize(("share", "most"), [(50, 2), (100, 3), (None, 3)])
async def test_a_key_has_its_own_share_from_its_first_call(share: int | None, most: int) -> None:
    key = Party("key", share=share)
    async with running(spec(capacity=4)) as worker:
        held = []
        for n in range(most):
            caller = Call(str(n), key)
            caller.key = key
            held.append(worker.slots.take_now(caller))
        assert all(held)
        caller = Call("one more", key)
        caller.key = key
        assert worker.slots.take_now(caller) is None
        held.append(worker.slots.take_now(Call("another's")))
        assert worker.slots.in_use == most + 1
        for slot in held:
            assert slot is not None
            slot.leave()


async def test_what_parties_have_is_counted_only_while_slots_are_short() -> None:
    greedy = Party("greedy")
    async with running(spec(capacity=10)) as worker:
        slots = worker.slots
        for _ in range(3):  # it begins and ends again and again
            held = [slots.take_now(Call(str(n), greedy)) for n in range(9)]
            assert slots.queue.used_by(greedy) == 0  # slots are not short yet, so they are not counted
            assert slots.take_now(Call("one more", greedy)) is None
            assert slots.queue.used_by(greedy) == 9
            for slot in held:
                assert slot is not None
                slot.leave()
            assert (slots.queue.used_by(greedy), slots.free) == (0, 10)


async def test_a_slot_that_its_thread_keeps_is_its_partys_and_one_that_was_replaced_is_not() -> None:
    greedy = Party("greedy")
    async with running(spec(capacity=2)) as worker:
        slots = worker.slots
        slot = slots.take_now(Call("first", greedy))
        assert slot is not None
        slot.hold()
        with slot:
            pass
        assert slots.take_now(Call("second", greedy)) is None
        slots.replaced(slot)
        second = slots.take_now(Call("second", greedy))
        assert second is not None
        assert slots.take_now(Call("third", greedy)) is None
        assert slots.in_use == 2
        with second:
            pass
        slots.replacement_back(slot)
        assert (slots.in_use, slots.free, slots.queue.used_by(greedy)) == (0, 2, 0)


class Slotted:
    """A model of one house whose sessions last until they are told to end."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.go = trio.Semaphore(0)

    async def __call__(self, session: Session[Any, Any]) -> None:
        self.order.append((await session.receive()).text)
        await self.go.acquire()
        await session.send(Token(text="x"))


async def test_a_thousand_sessions_of_one_connection_keep_nobody_elses_waiting_for_all_of_them(
    autojump_clock: MockClock,
) -> None:
    model = Slotted()
    async with serving(spec_of(model, "probe", family=Family.TEXT, capacity=4, queue=2000, queue_timeout=0)) as house:
        greedy = house.line("http2")
        for _ in range(1000):
            await greedy.send(*client.post(greedy.next_stream(), "/predictions/probe", b'{"inputs": "greedy"}'))
        await house.still()
        slots = house.gateway.supervisor.workers["probe"].slots
        assert (slots.in_use, slots.queued, model.order) == (3, 997, ["greedy"] * 3)  # one is kept for others
        async with trio.open_nursery() as nursery:
            for n in range(6):
                nursery.start_soon(house.ask, "/predictions/probe", json.dumps({"inputs": f"other {n}"}).encode())
                await house.still()
            assert model.order == ["greedy"] * 3 + ["other 0"]
            for _ in range(6):
                model.go.release()
                await house.still()
            # each slot that comes free is another's, as long as the greedy one has more than any of them
            assert [who for who in model.order if who != "greedy"] == [f"other {n}" for n in range(6)]
            for _ in range(6):
                model.go.release()
                await house.still()
        assert house.endings["complete"] >= 6
        greedy.peer.close()
        await house.still()
        assert (slots.in_use, slots.queued, slots.live, slots.queue.used_by(Party(""))) == (0, 0, set(), 0)


@pytest.mark.parametrize("left", [True, False], ids=["its session is over", "its session goes on"])
async def test_what_was_replaced_before_anybody_counted_is_nobodys(left: bool) -> None:
    greedy = Party("greedy")
    async with running(spec(capacity=4, party_share=50)) as worker:
        slots = worker.slots
        slot = slots.take_now(Call("stuck", greedy))
        assert slot is not None
        slot.hold()
        if left:
            slot.leave()
        slots.replaced(slot)
        held = [slots.take_now(Call(str(n), party)) for n, party in enumerate((Party("other"), greedy, greedy))]
        assert all(held)
        assert slots.take_now(Call("one more", greedy)) is None
        assert (slots.queue.used_by(greedy), slots.in_use) == (2, 4)
        for one in held:
            assert one is not None
            one.leave()
        slots.replacement_back(slot)
        slots.live.clear()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/predictions/probe", {"inputs": "x"}, 503),
        ("/v1/completions", {"model": "probe", "prompt": "x"}, 429),
        ("/v2/models/probe/generate", {"text_input": "x"}, 503),
        ("/endpoints/probe/invocations", {"inputs": "x"}, 503),
    ],
)
async def test_a_share_is_refused_in_the_words_of_the_form_and_counted(
    path: str, body: dict[str, str], status: int, autojump_clock: MockClock
) -> None:
    async with serving(spec_of(Slotted(), "probe", family=Family.TEXT, capacity=3, queue=0)) as house:
        registry, line = house.gateway.registry, house.line("http2")
        for _ in range(2):
            await line.send(*client.post(line.next_stream(), "/predictions/probe", b'{"inputs": "x"}'))
        await house.still()
        said, headers, _ = await house.ask(path, json.dumps(body).encode(), ("content-type", "application/json"), line=line)
        assert (said, headers["retry-after"]) == (status, "1")
        for metric in ("everywire_refusals_total", "everywire_party_refusals_total"):
            assert registry.get_sample_value(metric, {"reason": "party-share"}) == 1
            assert registry.get_sample_value(metric, {"reason": "queue-full"}) in (0, None)
        house.gateway.server.connection_ended(Closing.REFUSED)
        assert registry.get_sample_value("everywire_party_refusals_total", {"reason": "connections"}) == 1
        assert registry.get_sample_value("everywire_ended_connections_total", {"reason": "refused-at-limit"}) == 1
        line.peer.close()
        await house.still()
