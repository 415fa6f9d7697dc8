"""Dynamic batching: every request gets its own rows, whatever it is joined with, and nobody else's trouble."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import trio
import trio.lowlevel
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from trio.testing import MockClock, wait_all_tasks_blocked

from models.adapt import blocking, spec_of
from models.batching import Batcher, running
from models.blocking import Step, StepHolder, set_step_holder
from models.errors import ModelError
from models.messages import BytesTensor, Family, InferRequest, InferResponse, Tensor
from models.session import Call, Session
from models.spec import Batching, TensorSpec
from tests.models.channels import MemoryChannel

Answer = Callable[[InferRequest], Awaitable[InferResponse]]


def rows(*values: float, width: int = 2) -> InferRequest:
    """Rows of `width` equal values each."""
    data = np.repeat(np.array(values, np.float32)[:, None], width, axis=1)
    data.flags.writeable = False
    return InferRequest(inputs=(Tensor(name="x", data=data),))


def asking(request: InferRequest, **parameters: Any) -> InferRequest:
    return InferRequest(inputs=request.inputs, id=request.id, outputs=request.outputs, parameters=parameters)


@dataclass
class Executed(StepHolder):
    """The reports of a batcher to its statistics, and the number of held slots."""

    sizes: list[int] = field(default_factory=list)
    copied: int = 0
    held: int = 0
    waits: int = 0

    def executed(self, rows: int, joining: int, infer: int, cutting: int, copied: int) -> None:
        assert min(joining, infer, cutting) >= 0
        self.sizes.append(rows)
        self.copied += copied

    def hold(self, *, stopping: bool = True) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1
        assert self.held >= 0

    def waited(self, ns: int) -> None:
        assert ns >= 0
        self.waits += 1


class Threads:
    """A watcher of steps that finds none stuck."""

    def __init__(self) -> None:
        self.limiter = trio.CapacityLimiter(8)
        self.running: set[Step] = set()

    def begin(self, step: Step, holder: StepHolder) -> None:
        self.running.add(step)

    def end(self, step: Step) -> None:
        self.running.remove(step)

    def over(self, holder: StepHolder) -> bool:
        return False


class Doubler:
    """Doubles x when it is let go, and remembers the shapes that it was called with."""

    def __init__(self, *, slow: bool = False) -> None:
        self.calls: list[list[float]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.requests: list[InferRequest] = []
        self.slow, self.go = slow, trio.Event()
        self.active = self.most = self.short = 0

    async def __call__(self, request: InferRequest) -> InferResponse:
        x = request["x"]
        self.requests.append(request)
        self.shapes.append(x.shape)
        self.calls.append([float(row[0]) if row.size else 0 for row in x])
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            if self.slow:
                await trio.sleep(1)
            else:
                await self.go.wait()
        finally:
            self.active -= 1
        if (x < 0).any():
            raise ModelError("no negative numbers", code="Negative", status=422)
        return InferResponse(outputs=(Tensor(name="y", data=(x * 2)[self.short :]),))


@dataclass
class Served:
    """A batched model and its clients."""

    model: Any
    nursery: trio.Nursery
    seen: Executed
    answers: dict[str, InferResponse | BaseException] = field(default_factory=dict)

    async def ask(self, request: InferRequest, deadline: float = float("inf")) -> InferResponse:
        channel = MemoryChannel(request)
        set_step_holder(self.seen)
        with trio.CancelScope(deadline=deadline):
            await self.model(Session(channel, Call(model="m"), deadline=deadline))
        (response,) = channel.sent
        assert isinstance(response, InferResponse)
        return response

    def begin(self, name: str, request: InferRequest, deadline: float = float("inf")) -> trio.CancelScope:
        """A client of its own; cancelling the scope is its leaving."""
        scope = trio.CancelScope()

        async def client() -> None:
            with scope:
                try:
                    self.answers[name] = await self.ask(request, deadline)
                except Exception as e:
                    self.answers[name] = e

        self.nursery.start_soon(client)
        return scope

    async def begun(self, *clients: tuple[str, InferRequest]) -> list[trio.CancelScope]:
        """One after the other, so that their order is known."""
        scopes = []
        for client in clients:
            scopes.append(self.begin(*client))
            await wait_all_tasks_blocked()
        return scopes

    def values(self, name: str, output: str = "y") -> list[float]:
        """The first value of each row that a client got."""
        answer = self.answers[name]
        assert isinstance(answer, InferResponse), answer
        (data,) = [tensor.data for tensor in answer.outputs if tensor.name == output]
        return [float(row[0]) for row in data]

    @property
    def calm(self) -> bool:
        """True if nothing is left of any request."""
        batcher = self.model
        assert isinstance(batcher, Batcher)
        return not batcher.queued and not batcher._runs and not batcher._buckets and not self.seen.held


@asynccontextmanager
async def serving(model: Any, most: int = 8, batching: Batching | None = None, **fields: Any) -> AsyncIterator[Served]:
    seen = Executed()
    spec = spec_of(model, "m", family=Family.TENSOR, max_batch_size=most, batching=batching or Batching(), **fields)
    async with running(spec, seen, Threads()) as batched, trio.open_nursery() as nursery:
        yield Served(batched, nursery, seen)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


# -- requests that share a call


async def test_what_has_queued_while_the_model_was_busy_is_one_call() -> None:
    model = Doubler()
    async with serving(model) as served:
        await served.begun(("a", rows(1)), ("b", rows(2, 3)), ("c", rows(4)))
        assert model.calls == [[1]]  # the first one waits for nobody
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [2, 3, 4]]
        assert [served.values(name) for name in "abc"] == [[2], [4, 6], [8]]
        assert served.seen.sizes == [1, 3]
        assert served.seen.waits == 3
        assert served.calm


async def test_a_batch_has_at_most_so_many_rows_and_keeps_the_order() -> None:
    model = Doubler()
    async with serving(model, most=3) as served:
        await served.begun(("a", rows(1)), ("b", rows(2, 2)), ("c", rows(3, 3)), ("d", rows(4)), ("e", rows(5)))
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [2, 2], [3, 3, 4], [5]]


async def test_requests_that_the_model_could_tell_apart_are_not_joined() -> None:
    model = Doubler()
    x = np.ones((1, 2), np.float32)
    other = {
        "plain": rows(1),
        "width": rows(1, width=3),
        "datatype": InferRequest(inputs=(Tensor(name="x", data=x.astype(np.float64)),)),
        "tensor parameter": InferRequest(inputs=(Tensor(name="x", data=x, parameters={"k": 1}),)),
        "one": asking(rows(1), k=1),
        "one, a float": asking(rows(1), k=1.0),
        "true": asking(rows(1), k=True),
        "outputs": InferRequest(inputs=rows(1).inputs, outputs=("y",)),
        "more inputs": InferRequest(inputs=(*rows(1).inputs, Tensor(name="z", data=x))),
        "no common rows": InferRequest(inputs=(*rows(1).inputs, Tensor(name="z", data=np.ones((2, 2))))),
    }
    async with serving(model) as served:
        await served.begun(("busy", rows(9)), *other.items(), *[(name + "'", request) for name, request in other.items()])
        model.go.set()
        await wait_all_tasks_blocked()
        together = [(len(calls), shape[0]) for calls, shape in zip(model.calls, model.shapes, strict=True)]
        assert together == [(1, 1), *[(2, 2)] * 9, (1, 1), (1, 1)]
        assert all(isinstance(served.answers[name], InferResponse) for name in other)


async def test_buckets_have_their_turns_by_their_oldest_request() -> None:
    model = Doubler()
    async with serving(model) as served:
        clients = [("0", rows(1)), ("1", rows(1)), ("2", rows(2, width=3)), ("3", rows(3)), ("4", rows(4, width=3))]
        await served.begun(*clients, ("5", rows(5, width=1)))
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [1, 3], [2, 4], [5]]


async def test_two_instances_run_two_batches_and_no_third() -> None:
    model = Doubler()
    async with serving(model, batching=Batching(instances=2)) as served:
        await served.begun(("a", rows(1)), ("b", rows(2)), ("c", rows(3)), ("d", rows(4)))
        assert model.calls == [[1], [2]]
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [2], [3, 4]]
        assert model.most == 2


# -- when they go


async def test_the_first_request_waits_for_others_but_never_longer_than_the_delay(autojump_clock: MockClock) -> None:
    model = Doubler()
    model.go.set()
    async with serving(model, batching=Batching(max_delay=5)) as served:
        await served.begun(("a", rows(1)))
        await trio.sleep(3)
        await served.begun(("b", rows(2)))
        assert model.calls == []
        await trio.sleep(1.9)
        assert model.calls == []
        await trio.sleep(0.2)
        assert model.calls == [[1, 2]]
        await served.begun(("c", rows(3)))
        await trio.sleep(4.9)
        assert "c" not in served.answers
        await trio.sleep(0.2)
        assert served.values("c") == [6]


async def test_a_full_batch_and_one_of_a_preferred_size_do_not_wait(autojump_clock: MockClock) -> None:
    model = Doubler()
    model.go.set()
    async with serving(model, most=6, batching=Batching(max_delay=5, preferred=(4,))) as served:
        await served.begun(("a", rows(1, 1)), ("b", rows(2)))
        assert model.calls == []
        await served.begun(("c", rows(3)))
        assert model.calls == [[1, 1, 2, 3]]
        await served.begun(("d", rows(4, 4, 4)), ("e", rows(5, 5, 5)))
        assert model.calls[1:] == [[4, 4, 4, 5, 5, 5]]
        await served.begun(("f", rows(6, 6, 6)), ("g", rows(7, 7, 7, 7, 7)))
        assert model.calls[2:] == [[6, 6, 6]]  # there is no room for g
        await trio.sleep(6)
        assert model.calls[3:] == [[7, 7, 7, 7, 7]]
        assert trio.current_time() < 20


async def test_of_more_than_a_preferred_size_that_many_go_first() -> None:
    model = Doubler()
    async with serving(model, batching=Batching(preferred=(2, 4))) as served:
        await served.begun(("a", rows(1, 1, 1)), *[(str(n), rows(n)) for n in range(2, 9)])
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1, 1, 1], [2, 3, 4, 5], [6, 7], [8]]


async def test_a_higher_priority_goes_first_and_a_wrong_one_is_the_clients_mistake() -> None:
    model = Doubler()
    async with serving(model, most=2, batching=Batching(priority_levels=3, default_priority=2)) as served:
        clients = [(1, {}), (2, {}), (3, {"priority": 3}), (4, {"priority": 1}), (5, {"priority": 7}), (6, {"priority": 1})]
        await served.begun(*[(str(n), asking(rows(n), **said)) for n, said in clients])
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [4, 6], [2, 5], [3]]
        assert all("priority" not in request.parameters for request in model.requests)
        for wrong in ("high", -1, True):
            with pytest.raises(ModelError, match="parameter priority of the request must be a whole number") as refused:
                await served.ask(asking(rows(1), priority=wrong))
            assert refused.value.status == 400


async def test_a_sequence_runs_one_by_one_in_its_order() -> None:
    model = Doubler()
    async with serving(model, batching=Batching(instances=3, priority_levels=2)) as served:
        await served.begun(
            ("a", asking(rows(1), sequence_id=7)),
            ("b", asking(rows(2), sequence_id=7)),
            ("c", asking(rows(3), sequence_id=7, priority=1)),
            ("d", asking(rows(4), sequence_id="7")),
            ("e", asking(rows(5), sequence_id=0)),
        )
        assert model.calls == [[1], [4], [5]]
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [4], [5], [2], [3]]
        assert served.calm


# -- requests that leave


async def test_who_leaves_the_queue_is_in_no_batch_and_who_leaves_a_batch_is_missed_by_nobody() -> None:
    model = Doubler()
    async with serving(model) as served:
        _, queued, leaving, _ = await served.begun(("a", rows(1)), ("b", rows(2)), ("c", rows(3)), ("d", rows(4, 5)))
        queued.cancel()
        await wait_all_tasks_blocked()
        model.go.set()
        model.go = trio.Event()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [3, 4, 5]]
        leaving.cancel()
        await wait_all_tasks_blocked()
        assert served.seen.held == 1  # its rows are still in the model
        model.go.set()
        await wait_all_tasks_blocked()
        assert served.values("d") == [8, 10]
        assert set(served.answers) == {"a", "d"}
        assert served.calm


async def test_a_batch_that_nobody_waits_for_is_cancelled() -> None:
    model = Doubler()
    async with serving(model) as served:
        first, second, third = await served.begun(("a", rows(1)), ("b", rows(2)), ("c", rows(3)))
        first.cancel()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [2, 3]]
        second.cancel()
        await wait_all_tasks_blocked()
        assert model.active == 1
        third.cancel()
        await wait_all_tasks_blocked()
        assert model.active == 0
        assert served.calm


async def test_a_deadline_that_passes_in_the_queue_is_never_run(autojump_clock: MockClock) -> None:
    model = Doubler()
    async with serving(model) as served:
        served.begin("a", rows(1))
        await trio.sleep(1)
        served.begin("b", rows(2), deadline=trio.current_time() + 2)
        served.begin("c", rows(3), deadline=trio.current_time() + 9)
        await trio.sleep(5)
        model.go.set()
        await trio.sleep(1)
        assert model.calls == [[1], [3]]
        assert served.calm


async def test_a_request_whose_deadline_is_over_waits_for_its_end_and_is_not_run(autojump_clock: MockClock) -> None:
    model = Doubler()
    async with serving(model) as served:
        served.begin("a", rows(1))
        await wait_all_tasks_blocked()
        scope = trio.CancelScope()

        async def late() -> None:
            with scope:  # the owner of the deadline cancels long after it
                await served.model(Session(MemoryChannel(rows(2)), deadline=trio.current_time() + 1))

        served.nursery.start_soon(late)
        await trio.sleep(2)
        model.go.set()
        await trio.sleep(1)
        assert model.calls == [[1]]
        scope.cancel()
        await wait_all_tasks_blocked()
        assert served.calm


async def test_a_step_that_nobody_waits_for_keeps_its_instance_and_the_slots_until_it_returns() -> None:
    let_go, begun = threading.Event(), threading.Event()

    def block(request: InferRequest) -> InferResponse:
        begun.set()
        assert let_go.wait(60)
        return InferResponse(outputs=(Tensor(name="y", data=request["x"]),))

    async with serving(block) as served:
        first, _ = await served.begun(("a", rows(1)), ("b", rows(2)))
        await trio.to_thread.run_sync(begun.wait)
        first.cancel()
        await wait_all_tasks_blocked()
        assert served.seen.held == 1
        assert served.model.queued == 1
        let_go.set()
        while "b" not in served.answers:
            await trio.lowlevel.checkpoint()
        assert served.values("b") == [2]
        assert served.calm


async def test_the_end_of_the_model_is_told_to_all_who_wait_for_it() -> None:
    spec = spec_of(Doubler(), "m", max_batch_size=2, batching=Batching(max_delay=1))
    errors = []

    async def client(model: Any, *values: float) -> None:
        try:
            await model(Session(MemoryChannel(rows(*values))))
        except RuntimeError as e:
            errors.append(str(e))

    async with trio.open_nursery() as nursery:
        async with running(spec, Executed(), Threads()) as model:
            for n in range(4):
                nursery.start_soon(client, model, n)
            await wait_all_tasks_blocked()
        await client(model, 5)
    assert errors == ["model 'm' was unloaded"] * 5


# -- errors of the model


async def test_only_the_bad_one_fails_as_each_is_called_again_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = Doubler()
    async with serving(model) as served:
        await served.begun(("a", rows(1)), ("b", rows(2)), ("c", rows(3, -3)), ("d", rows(4)))
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [2, 3, -3, 4], [2], [3, -3], [4]]
        assert [served.values(name) for name in "abd"] == [[2], [4], [8]]
        error = served.answers["c"]
        assert isinstance(error, ModelError)
        assert (error.code, error.status) == ("Negative", 422)
        assert [record.getMessage() for record in caplog.records] == [
            "a batch failed; each of its requests is called again, alone"
        ]
        assert served.seen.sizes == [1, 1, 1]
        assert served.calm


async def test_a_model_that_must_not_see_a_request_twice_fails_all_of_the_batch() -> None:
    model = Doubler()
    async with serving(model, batching=Batching(retry=False)) as served:
        await served.begun(("a", rows(1)), ("b", rows(2)), ("c", rows(-3)))
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [2, -3]]
        told = [served.answers[name] for name in "bc"]
        assert [(type(error), str(error)) for error in told] == [(ModelError, "no negative numbers")] * 2
        assert told[0] is not told[1]  # an exception has one traceback


@pytest.mark.parametrize(
    ("raised", "told"), [(ZeroDivisionError, RuntimeError), (MemoryError, MemoryError), (SystemExit, RuntimeError)]
)
async def test_whatever_a_call_raises_is_its_requests_and_not_the_models_end(raised: Any, told: Any) -> None:
    go = trio.Event()

    async def model(request: InferRequest) -> InferResponse:
        await go.wait()
        if len(request["x"]) > 1:
            raise raised
        return InferResponse(outputs=(Tensor(name="y", data=request["x"]),))

    async with serving(model, batching=Batching(retry=False)) as served:
        await served.begun(("a", rows(1)), ("b", rows(2)), ("c", rows(2)))
        go.set()
        await wait_all_tasks_blocked()
        assert [type(served.answers[name]) for name in "bc"] == [told] * 2
        assert str(served.answers["b"]) == f"the call of a batch of 2 requests raised {raised.__name__}"
        assert type(served.answers["b"].__cause__) is raised  # type: ignore[union-attr]
        with pytest.raises(raised):
            await served.ask(rows(3, 3))  # one that is alone gets it as it is
        assert (await served.ask(rows(4))).outputs[0].data.tolist() == [[4, 4]]


async def test_a_wrong_number_of_rows_is_told_with_what_was_expected_and_not_tried_again() -> None:
    model = Doubler()
    model.short = 1
    async with serving(model) as served:
        await served.begun(("a", rows(1)), ("b", rows(2, 2)), ("c", rows(3)))
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1], [2, 2, 3]]
        told = [served.answers[name] for name in "abc"]
        assert [(type(error), getattr(error, "code", "")) for error in told] == [(ModelError, "BadOutput")] * 3
        assert (
            str(told[1])
            == str(told[2])
            == (
                "model 'm' was called with 3 rows, and gave output 'y' with shape [2, 2]: expected 3 rows, one for each "
                "(max_batch_size)"
            )
        )
        assert served.calm


async def none(session: Session[InferRequest, InferResponse]) -> None:
    await session.receive()


async def two(session: Session[InferRequest, InferResponse]) -> None:
    async for request in session:
        for _ in range(2):
            await session.send(InferResponse(outputs=(Tensor(name="y", data=request["x"]),)))


@pytest.mark.parametrize(("model", "code"), [(none, "NoAnswer"), (two, "TooManyResponses")])
async def test_a_call_has_one_response(model: Any, code: str) -> None:
    async with serving(model) as served:
        with pytest.raises(ModelError) as told:
            await served.ask(rows(1))
        assert (told.value.code, told.value.status) == (code, 500)
        assert served.calm


async def test_a_session_that_reads_on_past_its_end_has_ended() -> None:
    async def model(session: Session[InferRequest, InferResponse]) -> None:
        async with trio.open_nursery():
            while True:
                request = await session.receive()
                assert session.call.model == "m"
                await session.send(InferResponse(outputs=(Tensor(name="y", data=request["x"]),)))

    async with serving(model) as served:
        await served.begun(*[(str(n), rows(n)) for n in range(3)])
        assert [served.values(str(n)) for n in range(3)] == [[0], [1], [2]]


# -- memory


async def test_one_that_is_alone_is_passed_through_and_what_is_joined_is_read_only_views() -> None:
    model = Doubler()
    async with serving(model) as served:
        request = rows(1)
        await served.begun(("a", request), ("b", rows(2)), ("c", rows(3)))
        assert model.requests[0] is request
        model.go.set()
        await wait_all_tasks_blocked()
        data = [served.answers[name].outputs[0].data for name in "bc"]  # type: ignore[union-attr]
        assert data[0].base is data[1].base is not None
        assert not any(one.flags.writeable for one in (*data, model.requests[1]["x"]))
        assert served.seen.copied == 16


async def test_memory_is_used_again_when_nobody_looks_at_it_and_not_before(autojump_clock: MockClock) -> None:
    places: list[int] = []
    kept: list[NDArray[Any]] = []

    async def echo(request: InferRequest) -> InferResponse:
        await trio.sleep(1)
        x = request["x"]
        if len(x) > 1:
            places.append(x.__array_interface__["data"][0])
        return InferResponse(outputs=(Tensor(name="y", data=x),))

    async with serving(echo) as served:
        wide = 100_000

        async def batch(first: float) -> None:
            await served.begun(*[(str(n), rows(first + n, width=wide)) for n in range(3)])
            await trio.sleep(3)

        await batch(10)
        kept.append(served.answers["1"].outputs[0].data)  # type: ignore[union-attr]
        served.answers.clear()
        await batch(20)
        assert (kept[0] == 11).all()
        assert places[0] != places[1]
        served.answers.clear()
        kept.clear()
        await batch(30)
        assert places[2] in places[:2]
        assert served.values("2") == [32]


async def test_what_is_long_is_joined_beside_the_event_loop_and_one_may_leave_meanwhile() -> None:
    model = Doubler()
    async with serving(model) as served:
        scopes = await served.begun(*[(str(n), rows(n, width=500_000)) for n in range(4)])
        model.go.set()
        while len(served.seen.sizes) < 1:
            await trio.lowlevel.checkpoint()
        scopes[2].cancel()
        while set(served.answers) != {"0", "1", "3"} or not served.calm:  # noqa: ASYNC110, threads tell nobody
            await trio.sleep(0.001)
        assert [served.values(name) for name in "013"] == [[0], [2], [6]]


async def test_elements_of_bytes_are_joined_and_one_that_is_alone_is_not_looked_at() -> None:
    class Elements:
        looked = 0
        shape = (1, 1)

        def array(self) -> NDArray[Any]:
            self.looked += 1
            return np.array([[b"lazy"]], object)

    go = trio.Event()

    async def echo(request: InferRequest) -> InferResponse:
        await go.wait()
        return InferResponse(outputs=tuple(request.inputs))

    async with serving(echo) as served:
        alone, other = Elements(), Elements()
        eager = InferRequest(inputs=(Tensor(name="x", data=np.array([[b"eager"], [b""]], object)),))
        clients = [InferRequest(inputs=(BytesTensor.of("x", one),)) for one in (alone, other)]
        await served.begun(("a", clients[0]), ("b", clients[1]), ("c", eager))
        go.set()
        await wait_all_tasks_blocked()
        assert alone.looked == 0
        data = {name: served.answers[name].outputs[0].data.tolist() for name in "bc"}  # type: ignore[union-attr]
        assert data == {"b": [[b"lazy"]], "c": [[b"eager"], [b""]]}


# -- padding


async def test_a_batch_is_filled_up_to_a_preferred_number_of_rows() -> None:
    model = Doubler()
    async with serving(model, most=8, batching=Batching(preferred=(4,), pad_rows=True)) as served:
        await served.begun(("a", rows(1)), ("b", rows(2)), ("c", rows(3, 3)), ("d", rows()))
        model.go.set()
        await wait_all_tasks_blocked()
        assert model.calls == [[1, 1, 1, 1], [2, 3, 3, 3]]
        assert [served.values(name) for name in "abcd"] == [[2], [4], [6, 6], []]
        assert served.seen.sizes == [1, 3]  # the rows of the requests, without those that fill up
        await served.begun(("e", rows(*range(5))), ("f", rows()))
        assert model.calls[2:] == [[0, 1, 2, 3, 4], []]  # there is nothing to fill up to, and nothing to fill up with


LENGTHS = {
    "inputs": (
        TensorSpec(name="x", datatype="FP32", shape=(-1,), pad=-5.0),
        TensorSpec(name="words", datatype="BYTES", shape=(-1, 2), pad="none", optional=True),
    ),
    "outputs": (TensorSpec(name="y", datatype="FP32", shape=(2, -1), like="x"), TensorSpec(name="n", shape=(1,))),
}


async def test_dimensions_that_vary_are_filled_up_and_cut_back(autojump_clock: MockClock) -> None:
    seen = []

    async def model(request: InferRequest) -> InferResponse:
        await trio.sleep(1)
        x = request["x"]
        seen.append(x.tolist())
        y = np.stack([x, x * 2], axis=1)
        n = np.array([[len(row)] for row in x])
        return InferResponse(outputs=(Tensor(name="y", data=y), Tensor(name="n", data=n)))

    async with serving(model, **LENGTHS) as served:
        await served.begun(("busy", rows(0)), ("a", rows(1, width=1)), ("b", rows(2, 3, width=3)), ("c", rows(4, width=2)))
        await trio.sleep(3)
        assert seen[1] == [[1, -5, -5], [2, 2, 2], [3, 3, 3], [4, 4, -5]]
        y = {name: served.answers[name].outputs[0].data.tolist() for name in "abc"}  # type: ignore[union-attr]
        assert y == {"a": [[[1], [2]]], "b": [[[2] * 3, [4] * 3], [[3] * 3, [6] * 3]], "c": [[[4, 4], [8, 8]]]}
        assert served.values("c", "n") == [3]  # as the model gave it: it is like nothing


async def test_an_output_that_is_not_like_its_input_says_so(autojump_clock: MockClock) -> None:
    async def model(request: InferRequest) -> InferResponse:
        await trio.sleep(1)
        x = request["x"]
        return InferResponse(outputs=(Tensor(name="y", data=np.stack([x[:, 1:]] * 2, axis=1)),))

    async with serving(model, **LENGTHS) as served:
        await served.begun(("busy", rows(0, width=5)), ("a", rows(1, width=3)), ("b", rows(1, width=2)))
        await trio.sleep(3)
        assert str(served.answers["a"]) == (
            "model 'm' was called with 'x' of shape [2, 3], filled up with its pad, and gave output 'y' with shape [2, 2, 2]: "
            "expected 3 in dimension 2 (like = 'x')"
        )


# -- settings that contradict each other

X = TensorSpec(name="x", datatype="FP32", shape=(-1,), pad=0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_batch_size": 0}, "batching needs a max_batch_size"),
        ({"decoupled": True}, "batching or decoupled"),
        ({"accepts": True}, "batching or accepts"),
        ({"batching": Batching(preferred=(9,))}, "batching.preferred has 9, above the max_batch_size of 8"),
        ({"inputs": (X,)}, "inputs with a pad need declared outputs"),
        ({"inputs": (X,), "outputs": (TensorSpec(name="y"),)}, "output 'y' is to be cut back"),
        ({"inputs": (X,), "outputs": (TensorSpec(name="y", shape=(-1,)),)}, "say like = the input"),
        ({"inputs": (X,), "outputs": (TensorSpec(name="y", shape=(-1, -1), like="x"),)}, "say like = the input"),
    ],
)
def test_a_spec_that_cannot_be_batched_says_why(fields: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spec_of(two, "m", **{"max_batch_size": 8, "batching": Batching(), **fields})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Batching(max_delay=-1), "max_delay must be"),
        (lambda: Batching(preferred=(0,)), "preferred must be"),
        (lambda: Batching(pad_rows=True), "pad_rows needs preferred"),
        (lambda: Batching(instances=0), "instances must be"),
        (lambda: Batching(default_priority=1), "default_priority must be from 0 to priority_levels, 0, got 1"),
        (lambda: TensorSpec(name="x", shape=(-1,), pad=0), "pad needs a datatype"),
        (lambda: TensorSpec(name="x", datatype="INT8", shape=(2,), pad=0), "a shape with a -1"),
        (lambda: TensorSpec(name="x", datatype="INT8", shape=(-1,), pad=128), "pad must be a value of INT8, got 128"),
        (lambda: TensorSpec(name="x", datatype="UINT16", shape=(-1,), pad=-1), "pad must be a value of UINT16"),
        (lambda: TensorSpec(name="x", datatype="INT64", shape=(-1,), pad=0.5), "pad must be a value of INT64"),
        (lambda: TensorSpec(name="x", datatype="BYTES", shape=(-1,), pad=0), "pad must be a value of BYTES"),
        (lambda: TensorSpec(name="x", datatype="BOOL", shape=(-1,), pad=0), "pad must be a value of BOOL"),
        (lambda: TensorSpec(name="x", datatype="BF16", shape=(-1,), pad="0"), "pad must be a value of BF16"),
    ],
)
def test_a_setting_that_makes_no_sense_says_why(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


# -- any sequence of clients


@dataclass(frozen=True)
class Client:
    """Comes, asks for rows that nobody else has, and may leave."""

    at: float
    sizes: tuple[int, int]
    leaves: float | None
    parameter: int
    bad: bool

    def request(self, number: int) -> InferRequest:
        count, width = self.sizes
        data = np.arange(count * width, dtype=np.float32).reshape(count, width) + 1000 * (number + 1)
        if self.bad:
            data = -data
        parameters = {"k": self.parameter, "sequence_id": 1 if self.parameter == 2 else 0}
        return InferRequest(inputs=(Tensor(name="x", data=data),), parameters=parameters)


CLIENTS = st.builds(
    Client,
    at=st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.05, 2.0]),
    sizes=st.tuples(st.integers(0, 4), st.integers(1, 3)),
    leaves=st.none() | st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.5]),
    parameter=st.integers(0, 2),
    bad=st.sampled_from([False, False, False, True]),
)
BATCHINGS = st.builds(
    Batching,
    max_delay=st.sampled_from([0.0, 0.3]),
    preferred=st.sampled_from([(), (2,), (3, 4)]),
    instances=st.integers(1, 3),
)


@given(clients=st.lists(CLIENTS, max_size=12), batching=BATCHINGS, padded=st.booleans(), filled=st.booleans())
@settings(max_examples=150)
def test_every_request_gets_exactly_its_own_rows(
    clients: list[Client], batching: Batching, padded: bool, filled: bool
) -> None:
    fields: dict[str, Any] = {}
    if padded:
        fields["inputs"] = (TensorSpec(name="x", datatype="FP32", shape=(-1,), pad=0.0),)
        fields["outputs"] = (TensorSpec(name="y", datatype="FP32", shape=(-1,), like="x"),)
    if filled and batching.preferred:
        batching = Batching(
            max_delay=batching.max_delay, preferred=batching.preferred, instances=batching.instances, pad_rows=True
        )

    async def main() -> None:
        model = Doubler(slow=True)
        async with serving(model, most=4, batching=batching, **fields) as served:
            scopes: dict[int, trio.CancelScope] = {}

            async def come(number: int, client: Client) -> None:
                await trio.sleep(client.at)
                scopes[number] = served.begin(str(number), client.request(number))
                if client.leaves is not None:
                    await trio.sleep(client.leaves)
                    scopes[number].cancel()

            async with trio.open_nursery() as nursery:
                for number, client in enumerate(clients):
                    nursery.start_soon(come, number, client)
            await trio.sleep(100)
            assert served.calm
            assert model.most <= batching.instances
            for number, client in enumerate(clients):
                answer = served.answers.get(str(number))
                if answer is None:
                    assert client.leaves is not None
                elif client.bad and 0 not in client.sizes:
                    assert isinstance(answer, ModelError)
                else:
                    assert isinstance(answer, InferResponse), answer
                    (y,) = answer.outputs
                    assert np.array_equal(y.data, client.request(number)["x"] * 2)
            assert all(len(call) <= 4 for call in model.calls)

    trio.run(main, clock=MockClock(autojump_threshold=0))


class Canceller(trio.abc.Instrument):
    """Cancels at the start of the nth step of any task."""

    def __init__(self, at: int) -> None:
        self.left, self.scope = at, trio.CancelScope()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.left == 0:
            self.scope.cancel()
        self.left -= 1


@pytest.mark.parametrize("blocks", [False, True])
def test_a_client_that_leaves_at_any_step_leaves_nothing_and_is_missed_by_nobody(blocks: bool) -> None:
    async def model(request: InferRequest) -> InferResponse:
        await trio.sleep(1)
        if (request["x"] < 0).any():
            raise ModelError("no negative numbers")
        return InferResponse(outputs=(Tensor(name="y", data=request["x"] * 2),))

    @blocking(True)
    def steps(request: InferRequest) -> InferResponse:
        if (request["x"] < 0).any():
            raise ModelError("no negative numbers")
        return InferResponse(outputs=(Tensor(name="y", data=request["x"] * 2),))

    async def main(canceller: Canceller, victim: int) -> bool:
        trio.lowlevel.add_instrument(canceller)
        async with serving(steps if blocks else model) as served:

            async def client(n: int) -> None:
                request = rows(-n if n == 2 else n)
                if n != victim:
                    served.begin(str(n), request)
                    return
                with canceller.scope:
                    try:
                        served.answers[str(n)] = await served.ask(request)
                    except ModelError as e:
                        served.answers[str(n)] = e

            others = {str(n) for n in range(4) if n != victim}
            for n in range(4):
                served.nursery.start_soon(client, n)
            if blocks:
                while not (others <= set(served.answers) and served.calm):  # noqa: ASYNC110, threads tell nobody
                    await trio.sleep(0.001)
            else:
                await trio.sleep(20)
                assert others <= set(served.answers)
                assert served.calm
            for n in range(4):
                if n == victim and str(n) not in served.answers:
                    continue
                assert isinstance(served.answers[str(n)], ModelError) if n == 2 else served.values(str(n)) == [2 * n]
        return canceller.left >= 0

    for victim in (0, 1, 2):
        at = 0
        while not trio.run(main, Canceller(at), victim, clock=None if blocks else MockClock(autojump_threshold=0)):
            at += 1 if not blocks else 7
            if blocks and at > 300:
                break
