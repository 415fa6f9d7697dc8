"""A scikit-learn pipeline with a column of text answers on every tensor wire with its own `predict_proba`, to the last digit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio

from gateway.catalog.factories import load_spec
from gateway.config import BatchingConfig, ModelConfig, ProcessConfig, TensorConfig
from gateway.testing import memory_gateway
from models.spec import ModelSpec
from tests.gateway.dialects.tensor_wires import WIRES, Refused

USAGE = np.array([0.1, 29.9, 50.0, 1e-300, 123.456])
PLAN = ["gold", "größter", "bronze", "unheard of", "silver"]


@pytest.fixture(scope="module")
def served(needs: Callable[[str, str], Any]) -> Any:
    """The module with the pipelines."""
    needs("sklearn", "sklearn")
    return needs("sklearn", "tests.interop.served_sklearn")


def model(attribute: str, **settings: Any) -> ModelSpec:
    return load_spec("m", ModelConfig(factory=f"tests.interop.served_sklearn:{attribute}", **settings))


PROCESS = ProcessConfig(enabled=True, instances=1)
PLACES = {
    "here": {"attribute": "churn"},
    "on the loop": {"attribute": "churn_async"},
    "in a process": {"attribute": "churn", "process": PROCESS},
    "in a process on asyncio": {"attribute": "churn_async", "process": ProcessConfig(enabled=True, loop="asyncio")},
}


def texts(words: list[str]) -> npt.NDArray[Any]:
    return np.array([word.encode() for word in words], object)


def probabilities(found: dict[str, npt.NDArray[Any]], rows: int) -> npt.NDArray[np.float64]:
    return np.asarray(found["OUTPUT0"], np.float64).reshape(rows, 2)  # generate has flat arrays


@pytest.mark.parametrize("place", PLACES)
async def test_each_wire_carries_the_pipelines_own_probabilities(served: Any, place: str) -> None:
    wanted = served.churn(np.array(PLAN), USAGE)
    assert len({round(row[0], 3) for row in wanted}) > 3, "the rows differ, so that a wrong text would be seen"
    async with memory_gateway([model(**PLACES[place])]) as gateway:
        for wire, ask in WIRES.items():
            if wire == "raw":  # a request of one input
                continue
            found = await ask(gateway, "m", {"plan": texts(PLAN), "usage": USAGE})
            assert probabilities(found, len(PLAN)).tolist() == wanted.tolist(), wire


async def test_a_raw_request_is_one_text(served: Any) -> None:
    spec = model("mood", inputs=(TensorConfig(name="text", datatype="BYTES", shape=(1,)),))
    async with memory_gateway([spec]) as gateway:
        for word in served.TEXTS.tolist():
            found = await WIRES["raw"](gateway, "m", {"text": texts([word])})
            assert found["OUTPUT0"].tolist() == served.MOOD.predict_proba(np.array([word])).tolist()


@pytest.mark.parametrize("process", [ProcessConfig(), PROCESS], ids=["here", "in a process"])
async def test_so_do_requests_that_are_joined(served: Any, process: ProcessConfig) -> None:
    words = served.TEXTS.tolist()
    inputs, outputs = (TensorConfig(name="text", datatype="BYTES", shape=()),), (TensorConfig(name="OUTPUT0", shape=(2,)),)
    batching = BatchingConfig(enabled=True, max_delay=0.2, preferred=(len(words),))
    spec = model("mood", inputs=inputs, outputs=outputs, max_batch_size=len(words), batching=batching, process=process)
    answers: dict[str, Any] = {}

    async def one(word: str) -> None:
        answers[word] = (await WIRES["binary"](gateway, "m", {"text": texts([word])}))["OUTPUT0"].tolist()

    async with memory_gateway([spec]) as gateway, trio.open_nursery() as nursery:
        for word in words:
            nursery.start_soon(one, word)
    assert answers == {word: served.MOOD.predict_proba(np.array([word])).tolist() for word in words}


async def test_bytes_that_are_no_text_are_refused_and_never_a_category_it_has_not_seen(served: Any) -> None:
    plan = np.array([b"gold", b"gr\xf6\xdfter"], object)
    async with memory_gateway([model("churn")]) as gateway:
        with pytest.raises(Refused, match="'plan' is text for the model: element 1 is not UTF-8") as refused:
            await WIRES["binary"](gateway, "m", {"plan": plan, "usage": USAGE[:2]})
    assert refused.value.status == "400"
