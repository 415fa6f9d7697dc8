"""A model in processes that several fronts share, played in one Trio run: what each front has of it, and when it has not."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.catalog.process_model import described_fields, loadable
from gateway.catalog.processes.linked import ModelNews, Offer, SharedModel
from gateway.errors import WorkerLost
from gateway.instances.links import LinkedProcess
from gateway.instances.memory import SharedMemory
from gateway.instances.messages import Describe, Described, Load, Message
from gateway.instances.pipe import Pipe
from gateway.instances.socket_stream import SocketStream
from gateway.instances.spawn import ProcessPlan
from gateway.instances.trio_child import TrioChild
from gateway.workers.states import State
from gateway.workers.worker import Worker
from models.errors import ModelError
from models.messages import Family, InferRequest, Part
from models.session import Session
from models.spec import Batching, ModelSpec, TensorSpec
from tests.gateway.instances.sides import PATIENCE, Client, streams

MiB = 1024 * 1024


class Process:
    """A process of the model: a task here, which its owner ends."""

    def __init__(self, number: int, spec: ModelSpec) -> None:
        self.number, self._spec = number, spec
        self.wanted = list[str]()
        """Why fronts want its end."""
        self.links = 0
        self.child: TrioChild
        self._life = trio.CancelScope()
        self._ends = list[SocketStream]()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with streams() as (ours, theirs):
            self.child = child = TrioChild(Pipe(theirs), self._describe)
            pipe = Pipe(ours)
            pipe.post(Describe("m", "app:m", {}))
            pipe.post(Load(4))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pipe.write)
                nursery.start_soon(pipe.read, lambda message: None)
                with self._life:
                    async with trio.open_nursery() as life:
                        life.start_soon(child.run)
                        await wait_all_tasks_blocked()
                        task_status.started()
                nursery.cancel_scope.cancel()

    def _describe(self, message: Describe) -> tuple[ModelSpec, Message]:
        return self._spec, Described({}, False)

    def link(self, process: LinkedProcess) -> None:
        self.links += 1
        end, *memory = map(os.dup, process.descriptors)
        process.handed()
        stream = SocketStream(socket.socket(fileno=end))
        self.child.link(stream, SharedMemory.of_descriptors(*memory) if memory else None)

    def die(self) -> None:
        self._life.cancel()


class Machine:
    """All processes of one model, and the fronts that its owner tells of them. It is what they ask."""

    def __init__(self, spec: ModelSpec, nursery: trio.Nursery, instances: int) -> None:
        self.spec, self._nursery, self._instances = spec, nursery, instances
        self.processes: dict[int, Process] = {}
        self.parting: dict[int, float] = {}
        self.let = list[int]()
        self.fronts = list[SharedModel]()
        self.failures, self.reason, self.over = 0, "", False
        self.given_up = list[int]()

    async def start(self, number: int) -> Process:
        process = Process(number, self.spec)
        await self._nursery.start(process.run)
        self.processes[len(self.processes) + 1] = process
        self.tell()
        return process

    def end(self, process: Process, reason: str = "InstanceEnded: its process ended (SIGSEGV)") -> None:
        """Ends one, and tells the fronts."""
        process.die()
        id = next(id for id, one in self.processes.items() if one is process)
        self.parting[id] = -1
        self.reason = reason
        self.failures += not self.news.offers
        self.tell()

    @property
    def news(self) -> ModelNews:
        offers = [
            Offer(id, one.number, 4711 + id, self.parting.get(id))
            for id, one in self.processes.items()
            if self.parting.get(id) != -1
        ]
        return ModelNews("m", 1, offers, self.failures, self.reason, self.over, self.given_up)

    def tell(self) -> None:
        for front in self.fronts:
            front.take(self.news)

    def front(self, fronts: int = 2, **completed: Any) -> ModelSpec:
        """Makes the spec that one more front serves."""
        plans = [ProcessPlan(name="m", number=number, shared_memory=MiB) for number in range(self._instances)]
        model = SharedModel("m", described_fields(self.spec), plans, self, 1, len(self.fronts))
        model.take(self.news)
        self.fronts.append(model)
        return loadable(replace(model.spec(fronts), **completed))

    def link(self, id: int, process: LinkedProcess) -> None:
        self.processes[id].link(process)

    def kill(self, id: int, why: str) -> None:
        self.processes[id].wanted.append(why)

    def let_go(self, id: int) -> None:
        self.let.append(id)


async def echo(session: Session[Any, Any]) -> None:
    async for message in session:
        await session.send(message)


@asynccontextmanager
async def machine(model: Any = echo, *, instances: int = 2, start: bool = True, **spec: Any) -> AsyncIterator[Machine]:
    """Its processes, all of which are ready."""

    @asynccontextmanager
    async def load() -> AsyncIterator[Any]:
        yield model

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            one = Machine(ModelSpec(**{"name": "m", "family": Family.PARTS, "load": load, **spec}), nursery, instances)
            for number in range(instances * start):
                await one.start(number)
            yield one
            for process in one.processes.values():
                process.die()
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def served(machine: Machine, **spec: Any) -> AsyncIterator[Worker]:
    """A front's worker of it."""
    worker = Worker(machine.front(**spec))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        yield worker
        worker.stop()
        await worker.stopped.wait()


async def ready(worker: Worker) -> Any:
    while not worker.ready:
        await wait_all_tasks_blocked(0.001)
    return worker.model


async def becomes(holds: Callable[[], bool]) -> None:
    while not holds():
        await wait_all_tasks_blocked(0.001)


async def answer(model: Any, data: bytes = b"hello") -> bytes:
    client = Client(Part(data=data))
    await model(Session(client))
    return bytes(client.log[0].data)


async def test_two_fronts_call_the_same_processes() -> None:
    async with machine() as one, served(one) as a, served(one) as b:
        for worker in (a, b):
            model = await ready(worker)
            assert await answer(model) == b"hello"
            assert await answer(model, b"x" * 200_000) == b"x" * 200_000  # in its own memory
        assert [process.links for process in one.processes.values()] == [2, 2]


async def test_fronts_with_a_session_each_have_it_in_different_processes() -> None:
    async with machine() as one, served(one) as a, served(one) as b:
        clients = Client(more=True), Client(more=True)
        async with trio.open_nursery() as nursery:
            for worker, client in zip((a, b), clients, strict=True):
                model = await ready(worker)
                await becomes(lambda model=model: len(model._ready()) == 2)  # type: ignore[misc]
                nursery.start_soon(model, Session(client))
            await wait_all_tasks_blocked()
            views = [{one.number: one.sessions for one in (await ready(worker)).__model_instances__} for worker in (a, b)]
            assert views == [{0: 1, 1: 0}, {0: 0, 1: 1}]
            for client in clients:
                client.says.close()


async def test_each_front_has_its_share_rounded_up_and_its_parent_decides_when_it_starts() -> None:
    tensors = (TensorSpec(name="x", datatype="FP32", shape=(1,)),)
    batched: dict[str, Any] = {"family": Family.TENSOR, "inputs": tensors, "outputs": tensors, "max_batch_size": 8}
    async with machine(instances=3, start=False, **batched) as one:
        spec = one.front(2, capacity=5, queue=1001, queue_bytes=3, batching=Batching(instances=1), load_timeout=3.0)
    assert (spec.capacity, spec.queue, spec.queue_bytes, spec.body_bytes) == (3, 501, 2, 0)
    assert spec.batching is not None
    assert spec.batching.instances == 2  # there are three
    assert spec.load_timeout == math.inf
    assert not spec.warmup


async def test_a_front_waits_for_the_first_process_and_is_told_of_each_failure_once() -> None:
    async with machine(start=False) as one, served(one) as worker:
        await wait_all_tasks_blocked()
        assert worker.state is State.LOADING
        one.failures, one.reason = 1, "RaisedThere: OSError: no weights"
        one.tell()
        await worker.first_load()
        assert worker.reason == "RaisedThere: OSError: no weights"
        await becomes(lambda: worker.state is State.LOADING)
        await wait_all_tasks_blocked()
        assert len(worker.crashes) == 1
        await one.start(0)
        assert await answer(await ready(worker)) == b"hello"


async def test_a_model_that_is_given_up_is_that_in_every_front() -> None:
    async with machine(instances=1) as one, served(one) as worker:
        await ready(worker)
        one.over = True
        one.end(one.processes[1])
        await becomes(lambda: worker.state is State.FAILED)
        assert worker.given_up
        assert worker.reason == "InstanceEnded: its process ended (SIGSEGV)"


async def test_the_end_of_a_process_is_its_sessions_and_others_go_on() -> None:
    async with machine() as one, served(one) as worker:
        model = await ready(worker)
        clients = [Client(more=True) for _ in range(4)]
        ends = list[str]()

        async def call(client: Client) -> None:
            try:
                await model(Session(client))
                ends.append("whole")
            except WorkerLost as e:
                ends.append(str(e))

        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(call, client)
                await wait_all_tasks_blocked()
            one.end(one.processes[1])
            await becomes(lambda: len(ends) == 2)
            assert ends == ["the process of model 'm' ended; try again"] * 2
            assert await answer(model) == b"hello"
            for client in clients:
                client.says.close()
        assert ends[2:] == ["whole"] * 2
        assert worker.ready
        await becomes(lambda: one.let == [1])


async def test_a_front_that_has_no_process_left_waits_for_the_next() -> None:
    async with machine(instances=1) as one, served(one) as worker:
        await ready(worker)
        one.end(one.processes[1])
        await becomes(lambda: not worker.ready)
        await one.start(0)
        assert await answer(await ready(worker)) == b"hello"
        assert "SIGSEGV" in str(worker.last_error)


async def test_one_whose_place_another_has_ends_its_sessions_and_gets_no_more() -> None:
    async with machine(instances=1) as one, served(one) as worker:
        model, client = await ready(worker), Client(more=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(model, Session(client))
            await wait_all_tasks_blocked()
            await one.start(0)
            await becomes(lambda: one.processes[2].links == 1)
            one.parting[1] = 60.0
            one.tell()
            await wait_all_tasks_blocked()
            for _ in range(3):
                await answer(model)
            sessions = {status.pid: status.sessions for status in model.__model_instances__}
            assert sessions == {4712: 1, 4713: 0}
            assert one.let == []
            client.says.close()
        await becomes(lambda: one.let == [1])
        assert one.processes[1].wanted == []


async def test_a_front_that_unloads_it_hangs_up_and_ends_no_process() -> None:
    async with machine() as one:
        async with served(one) as worker:
            await ready(worker)
        assert sorted(one.let) == [1, 2]
        assert [process.wanted for process in one.processes.values()] == [[], []]
        async with served(one) as again:
            assert await answer(await ready(again)) == b"hello"


async def test_a_front_asks_for_the_end_of_a_process_whose_loop_is_silent() -> None:
    async with machine(instances=1, stop_within=1.0) as one, served(one) as worker:
        model = await ready(worker)
        (instance,) = model._there.values()
        instance.kill("a session had not stopped")
        assert one.processes[1].wanted == ["a session had not stopped"]


def asked(sequence: int | str, **more: bool) -> InferRequest:
    return InferRequest(inputs=(), parameters={"sequence_id": sequence, **more})


async def test_every_front_finds_the_process_of_a_sequence_and_says_where_it_was_lost() -> None:
    async with machine(instances=3, family=Family.TENSOR) as one, served(one) as a, served(one) as b:
        fronts = [await ready(a), await ready(b)]
        for front in fronts:
            await becomes(lambda front=front: len([*front.__model_instances__]) == 3)  # type: ignore[misc]
        found = {sequence: [front._chosen(asked(sequence)).number for front in fronts] for sequence in (*range(1, 40), "a")}
        assert all(here == there for here, there in found.values())
        assert {here for here, _ in found.values()} == {0, 1, 2}
        lost = next(sequence for sequence, (number, _) in found.items() if number == 1)
        kept = next(sequence for sequence, (number, _) in found.items() if number == 2)
        one.end(one.processes[2])
        await becomes(lambda: all(len([*front.__model_instances__]) == 2 for front in fronts))
        for front in fronts:
            with pytest.raises(ModelError, match="is lost: its process ended"):
                front._chosen(asked(lost))
            with pytest.raises(WorkerLost):
                front._chosen(asked(lost, sequence_start=True))  # until its process is there again
            assert front._chosen(asked(kept)).number == 2
        one.given_up = [1]
        one.tell()
        (number,) = {front._chosen(asked(lost, sequence_start=True)).number for front in fronts}
        assert number in (0, 2)


async def test_news_of_an_instance_that_there_is_none_of_is_refused() -> None:
    async with machine(instances=1) as one:
        one.front()
        with pytest.raises(ValueError, match="has 1 instances"):
            one.fronts[0].take(ModelNews("m", 1, [Offer(9, 1, 4711)], 0, "", over=False, given_up=[]))
