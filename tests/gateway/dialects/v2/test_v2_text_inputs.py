"""Inputs that are annotated as text are text on every wire, and wherever the model runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio

import models.adapt
from gateway.testing import in_memory_processes, memory_gateway
from models.adapt import AT_ONCE, blocking, spec_of
from models.errors import ModelError
from models.messages import BytesTensor, InferRequest, InferResponse, Tensor
from models.session import Session
from models.spec import Batching, ModelSpec, TensorSpec, declare
from protocols import v2
from tests.gateway.dialects.tensor_wires import TEXTS, WIRES, Refused
from tests.models.channels import MemoryChannel

Text = npt.NDArray[np.str_]
Kinds = npt.NDArray[np.object_]
WORDS = ["gold", "größer", "", "😀 a"]
MiB = 1024**2


def kind(array: npt.NDArray[Any]) -> Kinds:
    """The argument of a model as texts: the array's kind, the type of its elements, and the elements as Python shows them."""
    elements = array.reshape(-1).tolist()
    return np.array([array.dtype.kind, *{type(item).__name__ for item in elements}, *map(repr, elements)], object)


SEEN = ["U", "str", *map(repr, WORDS)]
UNSEEN = ["O", "bytes", *[repr(word.encode()) for word in WORDS]]


def function(plan: Text) -> Kinds:
    return kind(plan)


async def coroutine(plan: Text) -> Kinds:
    return kind(plan)


def generator(plan: Text) -> Iterator[Kinds]:
    yield kind(plan)


async def async_generator(plan: Text) -> AsyncIterator[Kinds]:
    yield kind(plan)


@blocking(False)
def on_the_loop(plan: Text) -> Kinds:
    return kind(plan)


@blocking(False)
def generator_on_the_loop(plan: Text) -> Iterator[Kinds]:
    yield kind(plan)


class Pipeline:
    def __call__(self, plan: Text) -> Kinds:
        return kind(plan)


@declare(inputs=[TensorSpec(name="plan", datatype="BYTES", shape=(-1,))])
def described(plan: Text) -> Kinds:
    return kind(plan)


def declared(thing: Any, shape: tuple[int, ...] = (-1,)) -> ModelSpec:
    return spec_of(thing, "m", inputs=(TensorSpec(name="plan", datatype="BYTES", shape=shape),))


def in_process(thing: Any, shape: tuple[int, ...] = (-1,)) -> ModelSpec:
    return in_memory_processes(declared(thing, shape))[0]


def batched(thing: Any, shape: tuple[int, ...] = (-1,)) -> ModelSpec:
    inputs = (TensorSpec(name="plan", datatype="BYTES", shape=shape[1:]),)
    return spec_of(thing, "m", inputs=inputs, max_batch_size=8, batching=Batching())


def shows(given: npt.NDArray[Any]) -> list[Any]:
    return [item.decode() if isinstance(item, bytes) else item for item in given.tolist()]


async def asked(spec: ModelSpec, wire: str, words: Any = WORDS) -> list[Any]:
    """The argument of the model for these words, asked over a wire."""
    array = np.array([word.encode() if isinstance(word, str) else word for word in words], object)
    async with memory_gateway([spec]) as served:
        (output,) = (await WIRES[wire](served, "m", {"plan": array})).values()
        return shows(output)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("where", [declared, in_process])
async def test_text_arrives_as_text_on_every_wire(wire: str, where: Any) -> None:
    if wire == "raw":  # one element
        assert await asked(where(function, (1,)), wire, [WORDS[1]]) == ["U", "str", repr(WORDS[1])]
    else:
        assert await asked(where(function), wire) == SEEN


@pytest.mark.parametrize(
    "model",
    [function, coroutine, on_the_loop, Pipeline(), described, generator, async_generator, generator_on_the_loop],
    ids=lambda model: getattr(model, "__name__", "object"),
)
@pytest.mark.parametrize("wire", ["events", "frames", "gRPC stream"])
@pytest.mark.parametrize("where", [declared, in_process])
async def test_text_arrives_as_text_whatever_the_model_is(model: Any, wire: str, where: Any) -> None:
    assert await asked(where(model), wire) == SEEN


def annotated(hint: Any) -> Any:
    async def model(plan: Any) -> Any:
        return kind(plan)

    model.__annotations__ = {"plan": hint}
    return model


@pytest.mark.parametrize("hint", [
    npt.NDArray[np.str_], np.ndarray[Any, np.dtype[np.str_]], np.ndarray[tuple[int], np.dtype[np.str_]], npt.NDArray[str],
    npt.NDArray[np.str_] | None, np.ndarray[Any, np.dtypes.StrDType],
])  # fmt: skip
async def test_every_spelling_of_str_is_text(hint: Any) -> None:
    assert await asked(declared(annotated(hint)), "binary") == SEEN


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 1 has no StringDType")
async def test_a_stringdtype_is_one_too() -> None:
    make = np.dtypes.StringDType
    for hint in (npt.NDArray[make], np.ndarray[Any, make], np.ndarray[Any, np.dtype[make]], np.ndarray[Any, make()]):  # type: ignore[valid-type, misc]
        assert await asked(declared(annotated(hint)), "binary", [*WORDS, "nul\0"]) == ["T", *SEEN[1:], repr("nul\0")]


@pytest.mark.parametrize("hint", [
    npt.NDArray[np.bytes_], npt.NDArray[np.object_], npt.NDArray[Any], np.ndarray, npt.NDArray[np.character],
    npt.NDArray[np.str_ | np.object_], npt.NDArray[np.str_] | npt.NDArray[np.bytes_], None,
])  # fmt: skip
@pytest.mark.parametrize("wire", ["JSON", "binary"])
async def test_what_is_not_annotated_as_text_stays_bytes(hint: Any, wire: str) -> None:
    model = annotated(np.ndarray if hint is None else hint)
    if hint is None:
        model = declare(inputs=[TensorSpec(name="plan", datatype="BYTES")])(lambda plan: kind(plan))
    assert await asked(spec_of(model, "m"), wire) == UNSEEN


async def test_a_session_and_a_whole_request_have_bytes() -> None:
    async def session(session: Session[InferRequest, InferResponse]) -> None:
        async for request in session:
            await session.send(InferResponse(outputs=(Tensor(name="o", data=kind(request["plan"])),)))

    def whole(request: InferRequest) -> Kinds:
        return kind(request["plan"])

    for model in (session, whole):
        assert await asked(spec_of(model, "m"), "binary") == UNSEEN


async def test_an_optional_input_and_others_beside_it_are_as_they_say() -> None:
    def model(x: npt.NDArray[np.int64], plan: Text = np.array(["none"]), note: Kinds | None = None) -> Any:  # noqa: B008
        return {"plan": kind(plan), "note": kind(note) if note is not None else np.array([0])}

    x = np.array([1])
    async with memory_gateway([spec_of(model, "m")]) as served:
        for wire in ("JSON", "binary", "gRPC"):
            found = await WIRES[wire](served, "m", {"x": x})
            assert shows(found["plan"]) == ["U", "str", "'none'"]
            found = await WIRES[wire](served, "m", {"x": x, "plan": np.array(["a"]), "note": np.array([b"b"], object)})
            assert (shows(found["plan"]), shows(found["note"])) == (["U", "str", "'a'"], ["O", "bytes", "b'b'"])


async def test_shapes_and_empty_arrays_stay() -> None:
    def shape(plan: Text) -> npt.NDArray[np.int64]:
        return np.array([*plan.shape, plan.dtype.kind == "U", not plan.flags.writeable], np.int64)

    async with memory_gateway([spec_of(shape, "m")]) as served:
        for sizes in ((), (0,), (2, 0, 3), (2, 3)):
            for wire in ("JSON", "binary", "gRPC"):
                given = np.full(sizes, b"ab", object)
                assert (await WIRES[wire](served, "m", {"plan": given}))["OUTPUT0"].tolist() == [*sizes, 1, 1]


# -- bytes that are no text ---------------------------------------------------------------------------------------------------

BROKEN = [b"gold", b"caf\xe9", b"ok"]
STATUS = {
    "gRPC": "INVALID_ARGUMENT", "gRPC, typed": "INVALID_ARGUMENT", "gRPC stream": "200", "WebSocket, binary": "",
    "InvokeEndpoint, binary": "424",
}  # fmt: skip
"""The status of a wire, where it is not 400."""


@pytest.mark.parametrize("wire", [wire for wire in WIRES if wire not in TEXTS])
@pytest.mark.parametrize("where", [declared, in_process, batched])
async def test_what_is_not_utf_8_is_refused_by_name(wire: str, where: Any) -> None:
    with pytest.raises(Refused) as refused:
        await asked(
            where(function, (1,)) if wire == "raw" else where(function), wire, BROKEN[1:2] if wire == "raw" else BROKEN
        )
    said = f"input 'plan' is text for the model: element {wire != 'raw':d} is not UTF-8: unexpected end of data at byte 3"
    assert said in refused.value.text
    assert refused.value.status == STATUS.get(wire, "400")


async def test_str_cannot_hold_a_nul_at_the_end_and_says_so() -> None:
    with pytest.raises(Refused, match="'plan' is text for the model: element 1 ends with a NUL") as refused:
        await asked(declared(function), "binary", ["a\0b", "a\0"])
    assert refused.value.status == "400"
    assert await asked(declared(function), "binary", ["a\0b"]) == ["U", "str", repr("a\0b")]


async def test_an_array_that_its_longest_element_makes_too_wide_is_refused_before_it_is_made() -> None:
    words = ["a" * MiB, *["b"] * 1000]
    with pytest.raises(
        Refused, match="numpy's str_ takes 4198498304 bytes for 1001 elements as long as the longest"
    ) as refused:
        await asked(declared(function), "binary", words)
    assert refused.value.status == "400"


# -- batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize("processes", [False, True])
async def test_in_a_batch_only_the_request_that_is_no_text_is_refused(
    retry: bool, processes: bool, autojump_clock: Any
) -> None:
    rows: list[int] = []

    def each(plan: Text) -> Kinds:
        rows.append(len(plan))
        return np.array([f"{plan.dtype.kind}:{word}" for word in plan], object)

    spec = spec_of(each, "m", max_batch_size=8, batching=Batching(max_delay=1.0, preferred=(3,), retry=retry))
    if processes:
        spec = in_memory_processes(spec)[0]
    answers: dict[bytes, Any] = {}

    async def one(word: bytes) -> None:
        try:
            answers[word] = shows((await WIRES["binary"](served, "m", {"plan": np.array([word], object)}))["OUTPUT0"])
        except Refused as refused:
            answers[word] = (refused.status, refused.text)

    async with memory_gateway([spec]) as served, trio.open_nursery() as nursery:
        for word in ("ä".encode(), b"\xff", b"longer"):
            nursery.start_soon(one, word)
    status, text = answers.pop(b"\xff")
    assert (status, "'plan' is text for the model: element 0 is not UTF-8" in text) == ("400", True)
    assert answers == {"ä".encode(): ["U:ä"], b"longer": ["U:longer"]}
    assert rows == [1, 1], "the batch itself never reached the function"


# -- its cost -----------------------------------------------------------------------------------------------------


async def test_text_is_made_in_steps_and_many_elements_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    beside, steps = list[int](), list[int]()
    step, apart = models.adapt._next, models.adapt._next_beside

    def stepping(given: Any) -> Any:
        steps.append(1)
        return step(given)

    async def aside(given: Any) -> Any:
        beside.append(1)
        return await apart(given)

    monkeypatch.setattr(models.adapt, "_next", stepping)
    monkeypatch.setattr(models.adapt, "_next_beside", aside)
    await asked(declared(coroutine), "JSON", ["ab"] * 4)
    assert steps
    assert not beside
    for words in (["ab"] * (AT_ONCE + 1), ["a" * MiB], ["b", "a" * (MiB // 2)]):
        steps.clear()
        beside.clear()
        for wire in ("JSON", "binary"):
            await asked(declared(coroutine), wire, words)
        assert len(beside) == len(steps) > 0, "one call in a thread for each step"


async def test_the_memory_of_text_is_paid_for_until_the_function_returns() -> None:
    used: list[int] = []

    def model(plan: Text) -> npt.NDArray[np.int64]:
        used.append(served.gateway.budget.used)
        return np.array([plan.nbytes])

    words = np.array([b"a" * 1000] * 200, object)
    async with memory_gateway([spec_of(model, "m")]) as served:
        assert (await WIRES["binary"](served, "m", {"plan": words}))["OUTPUT0"] == 4 * 1000 * 200
        assert used[0] >= 4 * 1000 * 200 + 2 * 1000 * 200, "the array, its texts, and the bytes that came"
        assert served.gateway.budget.used == 0


async def test_the_message_stays_as_it_came() -> None:
    tensor = BytesTensor.of("plan", v2.BytesData(memoryview(b"\1\0\0\0a"), (1,), 1))
    request = InferRequest(inputs=(tensor,))
    channel = MemoryChannel(request)
    async with declared(coroutine).load() as model:
        await model(Session(channel))
    assert not v2.BytesData.made.fget(tensor.given)  # type: ignore[attr-defined]
    assert request["plan"].tolist() == [b"a"]


async def test_a_model_asked_without_a_wire_refuses_as_well() -> None:
    channel = MemoryChannel(InferRequest(inputs=(Tensor(name="plan", data=np.array([b"\xff"], object)),)))
    async with declared(coroutine).load() as model:
        with pytest.raises(ModelError, match="'plan' is text for the model") as refused:
            await model(Session(channel))
    assert (refused.value.code, refused.value.status) == ("BadInputs", 400)
