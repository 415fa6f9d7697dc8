"""Slots know who calls by a protocol alone, and keep nothing of a model alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.errors import DeadlineExceeded, Ending, GatewayError, ModelCrashed
from gateway.workers.caller import Caller
from gateway.workers.worker import Worker
from models.messages import Family, Part
from models.session import Session
from models.spec import Model, ModelSpec
from tests.models.channels import MemoryChannel


class Call:
    """One call that is no exchange: it has what `Caller` asks for, and tells what it was told."""

    incident = stopped_by = ""
    priority = held = bytes_in = copied = 0
    gone, deadline = False, float("inf")
    ending: Ending | None = None
    cancelled_at: float | None = None

    def __init__(self, id: str) -> None:
        self.id = id
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
