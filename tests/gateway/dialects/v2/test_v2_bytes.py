"""BYTES: the bound on elements, the places where they become objects, and the budget that pays."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio

import models.adapt
from gateway import client
from gateway.config import Config, LimitsConfig
from models.adapt import AT_ONCE, STEP, blocking, spec_of
from models.messages import Family, InferRequest, InferResponse, Part, Tensor
from models.spec import Batching
from protocols import v2
from protocols.events import Frame, Opcode
from protocols.v2 import tensors
from tests.gateway.dialects.v2.test_v2_pieces import Taker, body_of
from tests.gateway.promises import House, limits, serving

Objects = npt.NDArray[np.object_]
KiB = 1024


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, int]]:
    """Each step in which elements become objects, or objects elements: what, whether on the event loop, and how many."""
    steps: list[tuple[str, bool, int]] = []
    loop = threading.get_ident()
    fill, items, texts = v2.BytesData.fill, tensors._bytes_items, tensors._to_bytes

    def filling(self: v2.BytesData, flat: Any) -> Iterator[None]:
        done = 0
        for _ in fill(self, flat):
            made = sum(element is not None for element in flat[done : done + 2 * STEP])
            steps.append(("in", threading.get_ident() == loop, made))
            done += made
            yield

    def writing(array: Any) -> Iterator[list[bytes]]:
        for part in items(array):
            steps.append(("out", threading.get_ident() == loop, len(part)))
            yield part

    def reading(values: list[Any], name: str) -> list[bytes]:
        steps.append(("json", threading.get_ident() == loop, len(values)))
        return texts(values, name)

    monkeypatch.setattr(v2.BytesData, "fill", filling)
    monkeypatch.setattr(tensors, "_bytes_items", writing)
    monkeypatch.setattr(tensors, "_to_bytes", reading)
    return steps


def read(converted: list[tuple[str, bool, int]]) -> list[tuple[str, bool, int]]:
    """The steps of inputs: a test's own requests are written too."""
    return [step for step in converted if step[0] != "out"]


def elements(count: int, text: bytes = b"ab") -> Objects:
    return np.array([text, b"c"] * (count // 2) + [b""] * (count % 2), object)


def as_json(count: int) -> bytes:
    data = ["ab"] * count
    return json.dumps({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [count], "data": data}]}).encode()


async def asked(house: House, array: Objects, model: str = "m", what: str = "infer", **options: Any) -> tuple[int, bytes]:
    headers, body = body_of(array, datatype="BYTES", **options)
    fields = [(name.decode(), value.decode()) for name, value in headers]
    status, _, said = await house.ask(f"/v2/models/{model}/{what}", body, *fields)
    return status, said


def sizes(x: Objects) -> npt.NDArray[np.int64]:
    return np.array([x.size, sum(map(len, x.ravel().tolist()))])


async def sizes_async(x: Objects) -> npt.NDArray[np.int64]:
    return sizes(x)


def sizes_each(x: Objects) -> Iterator[npt.NDArray[np.int64]]:
    yield sizes(x)


async def sizes_each_async(x: Objects) -> AsyncIterator[npt.NDArray[np.int64]]:
    yield sizes(x)


@blocking(False)
def sizes_here(x: Objects) -> npt.NDArray[np.int64]:
    return sizes(x)


# -- how many ----------------------------------------------------------------------------------------------------------


FEW = limits(bytes_elements=10)
TOO_MANY = b"BYTES [11] has 11 elements: the inputs of a request have at most 10 of BYTES (limits.bytes_elements)"


@pytest.mark.parametrize("what", ["infer", "infer_stream"])
async def test_more_elements_than_may_be_are_refused_by_their_shape(what: str, converted: list[Any]) -> None:
    async with serving(spec_of(sizes, "m"), config=FEW) as house:
        assert (await asked(house, elements(10), what=what))[0] == 200
        status, said = await asked(house, elements(11), what=what)
        assert status == 400
        assert TOO_MANY in said
        status, _, said = await house.ask(f"/v2/models/m/{what}", as_json(11))
        assert status == 400
        assert TOO_MANY in said
        lie = {"name": "x", "datatype": "BYTES", "shape": [2**40], "data": ["a"]}
        status, _, said = await house.ask(f"/v2/models/m/{what}", json.dumps({"inputs": [lie]}).encode())
        assert (status, b"has 1099511627776 elements" in said) == (400, True)
        assert read(converted) == [("in", False, 10)], "of the first, which was not refused"


async def test_elements_of_all_inputs_count_together() -> None:
    def both(x: Objects, y: Objects) -> npt.NDArray[np.int64]:
        return np.array([x.size + y.size])

    async with serving(spec_of(both, "m"), config=FEW) as house:
        inputs = [{"name": n, "datatype": "BYTES", "shape": [6], "data": ["a"] * 6} for n in ("x", "y")]
        status, _, said = await house.ask("/v2/models/m/infer", json.dumps({"inputs": inputs}).encode())
        assert status == 400
        assert b"'y': BYTES [6] has 6 elements, and those before it 6" in said.replace(b'\\"', b"'")
        inputs[0] = {"name": "x", "datatype": "BYTES", "shape": [4], "data": ["a"] * 4}
        assert (await house.ask("/v2/models/m/infer", json.dumps({"inputs": inputs}).encode()))[0] == 200


async def test_generate_counts_them_too() -> None:
    async with serving(spec_of(sizes, "m"), config=FEW) as house:
        assert (await house.ask("/v2/models/m/generate", json.dumps({"x": ["a"] * 10}).encode()))[0] == 200
        status, _, said = await house.ask("/v2/models/m/generate", json.dumps({"x": ["a"] * 11}).encode())
        assert status == 400
        assert TOO_MANY in said


async def test_a_session_counts_them_for_each_message() -> None:
    async with serving(spec_of(sizes, "m"), config=FEW) as house:
        peer = await client.websocket(house.memory.connect(), "/v2/models/m/infer")
        for count, wanted in ((10, b'"outputs"'), (11, TOO_MANY), (10, b'"outputs"')):
            await peer.send(Frame(opcode=Opcode.TEXT, fin=True, data=as_json(count)))
            assert wanted in bytes((await peer.next_event()).data)
        peer.close()


async def test_pieces_are_counted_by_the_whole() -> None:
    async with serving(spec_of(Taker(), "m", family=Family.TENSOR, pieces=True), config=FEW) as house:
        status, said = await asked(house, elements(11))
        assert status == 400
        assert TOO_MANY in said


# -- the threads that make objects -------------------------------------------------------------------------------------


MANY = 40_001


@pytest.mark.parametrize("model", [sizes, sizes_async, sizes_each, sizes_each_async, sizes_here])
async def test_many_elements_become_objects_beside_the_loop_and_in_steps(model: Any, converted: list[Any]) -> None:
    async with serving(spec_of(model, "m")) as house:
        array = elements(MANY)
        status, said = await asked(house, array, what="infer_stream" if "each" in model.__name__ else "infer")
        assert status == 200
        assert f"[{MANY},{sum(map(len, array))}]".encode() in said
    steps = [(on_loop, made) for what, on_loop, made in converted if what == "in"]
    assert not any(on_loop for on_loop, _ in steps)
    assert sum(made for _, made in steps) == MANY
    assert max(made for _, made in steps) == STEP


async def test_elements_of_one_length_are_made_in_the_same_steps(converted: list[Any]) -> None:
    async with serving(spec_of(sizes_async, "m")) as house:
        status, said = await asked(house, np.array([b"abc"] * MANY, object))
        assert (status, f"[{MANY},{3 * MANY}]".encode() in said) == (200, True)
    assert read(converted) == [("in", False, STEP), ("in", False, STEP), ("in", False, MANY - 2 * STEP)]


async def test_a_few_are_made_where_the_function_is(converted: list[Any]) -> None:
    async with serving(spec_of(sizes_async, "m"), spec_of(sizes, "n")) as house:
        await asked(house, elements(AT_ONCE))
        await asked(house, elements(2), "n")
        assert read(converted) == [("in", True, AT_ONCE), ("in", False, 2)]


async def test_a_model_of_messages_makes_them_itself(converted: list[Any]) -> None:
    async def handed_on(request: InferRequest) -> InferResponse:
        (tensor,) = request.inputs
        return InferResponse(outputs=(tensor,))

    async with serving(spec_of(handed_on, "m")) as house:
        assert (await asked(house, elements(MANY), binary_data_output=True))[0] == 200
        assert read(converted) == []


@pytest.mark.parametrize("what", ["infer", "generate"])
async def test_strings_of_json_become_elements_beside_the_loop(what: str, converted: list[Any]) -> None:
    count = AT_ONCE + 1  # in less text than codecs take to a thread
    body = as_json(count) if what == "infer" else json.dumps({"x": ["ab"] * count}).encode()
    assert len(body) < 256 * KiB
    async with serving(spec_of(sizes_async, "m")) as house:
        status, _, said = await house.ask(f"/v2/models/m/{what}", body)
        assert (status, f"[{count},{2 * count}]".encode() in said) == (200, True)
    assert read(converted) == [("json", False, count)]


def texts(count: int) -> npt.NDArray[np.str_]:
    return np.array(["ü", "ab"] * (count // 2))


def words(x: npt.NDArray[np.int64]) -> npt.NDArray[np.str_]:
    return texts(int(x[0]))


async def words_async(x: npt.NDArray[np.int64]) -> npt.NDArray[np.str_]:
    return texts(int(x[0]))


async def objects_async(x: npt.NDArray[np.int64]) -> Objects:
    return np.array([b"ab"] * int(x[0]), object)


async def pairs_async(x: npt.NDArray[np.int64]) -> dict[str, Any]:
    return {"OUTPUT0": [["a", "b"]] * (int(x[0]) // 2)}


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("model", [words, words_async, objects_async, pairs_async])
async def test_many_outputs_of_text_are_written_beside_the_loop_and_in_steps(
    model: Any, binary: bool, converted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, made = threading.get_ident(), list[bool]()
    tensor = models.adapt._tensor

    def making(name: str, value: Any) -> Tensor:
        if not isinstance(value, np.ndarray) or value.dtype.kind != "O":
            made.append(threading.get_ident() == loop)
        return tensor(name, value)

    monkeypatch.setattr(models.adapt, "_tensor", making)
    async with serving(spec_of(model, "m")) as house:
        asked = {"name": "x", "datatype": "INT64", "shape": [1], "data": [MANY - 1]}
        body = {"inputs": [asked], "parameters": {"binary_data_output": binary}}
        status, fields, said = await house.ask("/v2/models/m/infer", json.dumps(body).encode())
        assert status == 200
        reply = v2.decode_infer_reply([(n.encode(), v.encode()) for n, v in fields.items()], said)
        assert reply["OUTPUT0"].elements.size == MANY - 1
    steps = [(on_loop, count) for what, on_loop, count in converted if what == "out"]
    assert not any(on_loop for on_loop, _ in steps)
    assert not any(made)
    assert max(count for _, count in steps) == STEP


@pytest.mark.parametrize("count", [2, AT_ONCE // 2 + 1])
async def test_requests_that_are_joined_are_made_objects_beside_the_loop(count: int, converted: list[Any]) -> None:
    batching = Batching(max_delay=1.0, preferred=(2 * count,))
    spec = spec_of(joined, "m", max_batch_size=2 * count, batching=batching)
    async with serving(spec) as house, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(asked, house, elements(count))
    steps = [on_loop for what, on_loop, _ in converted if what == "in"]
    assert len(steps) == 2
    assert any(steps) is (2 * count <= AT_ONCE)


def joined(x: Objects) -> Objects:
    return x


# -- the budget --------------------------------------------------------------------------------------------------------


class Held:
    """A model's function that says when it has its array, and keeps it until it is told."""

    def __init__(self) -> None:
        self.has, self.go = threading.Event(), threading.Event()

    def __call__(self, x: Objects) -> npt.NDArray[np.int64]:
        self.has.set()
        assert self.go.wait(60)
        return np.array([x.size])


async def test_objects_are_paid_for_until_the_thread_that_has_them_returns() -> None:
    held, count = Held(), 10_000
    async with serving(spec_of(held, "m")) as house:
        line = house.line("http1")
        headers, body = body_of(elements(count), datatype="BYTES")
        await line.send(*house.posted(1, "/v2/models/m/infer", body, headers=headers))
        await trio.to_thread.run_sync(held.has.wait)
        budget = house.gateway.budget
        used = 64 * count + 2 * len(body)
        assert used - KiB <= budget.used < used + 64 * KiB
        line.peer.close()
        await house.still()
        assert budget.used >= 64 * count, "the thread has them, though its client has left"
        held.go.set()
        with trio.fail_after(60):
            while budget.used or house.gateway.counts().slots_in_use:  # noqa: ASYNC110  # nothing tells when
                await trio.sleep(0.001)


async def test_strings_of_json_are_paid_for_until_the_answer() -> None:
    held, count = Held(), 10_000
    async with serving(spec_of(held, "m")) as house:
        body = as_json(count)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.ask, "/v2/models/m/infer", body)
            await trio.to_thread.run_sync(held.has.wait)
            assert house.gateway.budget.used >= 64 * count + 2 * len(body)
            held.go.set()
        await house.still()
        assert house.gateway.budget.used == 0


async def test_a_session_pays_for_one_message_at_a_time() -> None:
    async with serving(spec_of(sizes_async, "m")) as house:
        peer = await client.websocket(house.memory.connect(), "/v2/models/m/infer")
        for _ in range(3):
            await peer.send(Frame(opcode=Opcode.TEXT, fin=True, data=as_json(10_000)))
            assert b"[10000,20000]" in bytes((await peer.next_event()).data)
            await house.still()
            assert house.gateway.budget.used == 0
        peer.close()


@pytest.mark.parametrize("model", [sizes, sizes_async, sizes_each])
@pytest.mark.parametrize("form", ["binary", "json"])
async def test_where_there_is_no_memory_for_the_objects_nothing_is_made(form: str, model: Any, converted: list[Any]) -> None:
    small = Config(limits=replace(LimitsConfig(), total_bytes=1024 * KiB, memory_refuse=100, memory_reset=100))
    async with serving(spec_of(model, "m"), config=small) as house:
        if form == "binary":
            status, said = await asked(house, elements(20_000), what="infer_stream")
        else:
            status, _, said = await house.ask("/v2/models/m/infer_stream", as_json(20_000))
        assert status == 503
        assert b"limits.total_bytes" in said
        assert read(converted) == []
        assert house.gateway.budget.used == 0


# -- parts -------------------------------------------------------------------------------------------------------------


def size_of(data: bytes) -> str:
    return str((type(data).__name__, len(data)))


async def size_of_async(data: bytes) -> str:
    return size_of(data)


@pytest.mark.parametrize("model", [size_of, size_of_async])
async def test_a_large_part_is_copied_beside_the_loop_and_paid_for(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size, loop = 4 * 1024 * KiB, threading.get_ident()
    convert, copies = models.adapt._convert, list[tuple[bool, int]]()

    def converting(message: Part, texts: Any) -> Any:
        steps = convert(message, texts)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                copies.append((threading.get_ident() == loop, house.gateway.budget.used))
                return end.value
            yield 0

    monkeypatch.setattr(models.adapt, "_convert", converting)
    async with serving(spec_of(model, "m")) as house:
        status, _, said = await house.ask("/models/m/invoke", bytes(size))
        assert (status, said) == (200, f"('bytes', {size})".encode())
        ((on_loop, used),) = copies
        assert not on_loop
        assert used >= 2 * size
        assert house.gateway.budget.used == 0
