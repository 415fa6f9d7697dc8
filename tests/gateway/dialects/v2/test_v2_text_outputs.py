"""Outputs of text: numpy's str_, bytes_ and StringDType, and objects, are BYTES on every wire, wherever the model runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gateway.testing import in_memory_processes, memory_gateway
from models.adapt import spec_of
from models.annotations import output_specs
from models.messages import InferRequest, InferResponse, Tensor, datatype_of
from protocols.v2 import tensors
from tests.gateway.dialects.tensor_wires import WIRES, Refused

pytestmark = pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 1 has no StringDType")

WORDS = ["gold", "größer", "", "a text that is longer than sixteen bytes"]
X = {"x": np.array([1])}


def strings(words: list[Any] = WORDS, **options: Any) -> npt.NDArray[Any]:
    return np.array(words, np.dtypes.StringDType(**options))


def function(x: npt.NDArray[np.int64]) -> Any:
    return strings()


async def coroutine(x: npt.NDArray[np.int64]) -> Any:
    return {"OUTPUT0": strings()}


def generator(x: npt.NDArray[np.int64]) -> Iterator[Any]:
    yield strings()


def whole(request: InferRequest) -> InferResponse:
    return InferResponse(outputs=(Tensor(name="OUTPUT0", data=strings()),))


async def whole_async(request: InferRequest) -> InferResponse:
    return whole(request)


def backwards(x: npt.NDArray[np.int64]) -> Any:
    return np.repeat(strings(WORDS[::-1]), 2)[::-2]


def here(model: Any) -> Any:
    return spec_of(model, "m")


def elsewhere(model: Any) -> Any:
    return in_memory_processes(here(model))[0]


def texts(array: npt.NDArray[Any]) -> list[str]:
    return [item.decode() if isinstance(item, bytes) else item for item in array.tolist()]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("where", [here, elsewhere])
async def test_a_stringdtype_is_bytes_on_every_wire(wire: str, where: Any) -> None:
    if wire == "raw":
        pytest.skip("a raw request needs a declared shape")
    async with memory_gateway([where(function)]) as served:
        assert texts((await WIRES[wire](served, "m", X))["OUTPUT0"]) == WORDS


@pytest.mark.parametrize("wire", ["events", "frames", "gRPC stream"])
@pytest.mark.parametrize("where", [here, elsewhere])
@pytest.mark.parametrize("model", [function, coroutine, generator, whole, whole_async, backwards])
async def test_whatever_the_model_is(model: Any, wire: str, where: Any) -> None:
    async with memory_gateway([where(model)]) as served:
        assert texts((await WIRES[wire](served, "m", X))["OUTPUT0"]) == WORDS


@pytest.mark.parametrize("missing", [None, float("nan"), object()])
@pytest.mark.parametrize("wire", ["JSON", "binary", "gRPC", "frames"])
@pytest.mark.parametrize("where", [here, elsewhere])
@pytest.mark.parametrize("direct", [True, False])
async def test_a_missing_value_is_an_error_that_names_the_output(missing: Any, wire: str, where: Any, direct: bool) -> None:
    def model(request: InferRequest) -> Any:
        data = strings(["a", missing], na_object=missing)
        return InferResponse(outputs=(Tensor(name="label", data=data),)) if direct else {"label": data}

    async with memory_gateway([where(model)]) as served:
        with pytest.raises(Refused) as refused:
            await WIRES[wire](served, "m", X)
    assert "'label'" in refused.value.text.replace('\\"', "'")
    assert "missing" in refused.value.text, refused.value.text
    assert refused.value.status in ("500", "INTERNAL")


async def test_a_missing_value_that_is_itself_a_text_is_that_text() -> None:
    def model(x: npt.NDArray[np.int64]) -> Any:
        return strings(["a", "n/a"], na_object="n/a")

    async with memory_gateway([here(model)]) as served:
        assert texts((await WIRES["JSON"](served, "m", X))["OUTPUT0"]) == ["a", "n/a"]


def test_it_may_be_annotated_and_sent() -> None:
    make: Any = np.dtypes.StringDType
    (output,) = output_specs("f", np.ndarray[tuple[int], make]) or ()
    assert (output.datatype, output.shape) == ("BYTES", (-1,))
    assert datatype_of(make()) == "BYTES"


@pytest.mark.parametrize("dtype", ["U", "S", "T", "O"])
async def test_many_elements_are_written_beside_the_loop_whatever_their_dtype(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model(request: InferRequest) -> InferResponse:
        return InferResponse(outputs=(Tensor(name="o", data=np.array(["ab"] * 20_000, dtype)),))

    loop, on_loop = threading.get_ident(), list[bool]()
    items = tensors._bytes_items

    def writing(array: Any) -> Any:
        for part in items(array):
            on_loop.append(threading.get_ident() == loop)
            yield part

    async with memory_gateway([here(model)]) as served:
        monkeypatch.setattr(tensors, "_bytes_items", writing)
        assert (await WIRES["binary"](served, "m", X))["o"].size == 20_000
    assert on_loop == [False, False]
