"""kserve's InferenceGRPCClient, unmodified: health, both forms of tensors, errors, and how often it tries what is unavailable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.interop.servers import Server

pytestmark = [
    pytest.mark.usefixtures("kserve"),  # before any server: where kserve is absent, none need start
    pytest.mark.filterwarnings("default"),  # its own
]

Talk = Callable[..., Any]
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def kserve(needs: Callable[[str, str], Any]) -> Any:
    return needs("kserve", "kserve")


@pytest.fixture
def talk(kserve: Any, grpc_server: Server) -> Talk:
    """talk(conversation) runs `await conversation(client)`; more arguments are the client's."""

    def talk(conversation: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
        async def run() -> Any:
            async with kserve.InferenceGRPCClient(f"{grpc_server.host}:{grpc_server.port}", **options) as client:
                return await conversation(client)

        return asyncio.run(run())

    return talk


def asked(kserve: Any, model: str, array: Array, datatype: str, *, binary: bool = True, **more: Any) -> Any:
    tensor = kserve.InferInput(name="INPUT0", datatype=datatype, shape=list(array.shape))
    tensor.set_data_from_numpy(array, binary_data=binary)
    return kserve.InferRequest(model_name=model, infer_inputs=[tensor], **more)


def said(kserve: Any, model: str, text: str) -> Any:
    return asked(kserve, model, np.array([text.encode()], dtype=object), "BYTES")


def text(response: Any) -> str:
    element = response.outputs[0].as_numpy()[0]
    return element.decode() if isinstance(element, bytes) else str(element)


@pytest.mark.by_default
def test_health(talk: Talk) -> None:
    async def conversation(client: Any) -> list[bool]:
        return [
            await client.is_server_live(),
            await client.is_server_ready(),
            await client.is_model_ready("fixed"),
            await client.is_model_ready("nobody"),
        ]

    assert talk(conversation) == [True, True, True, False]


ARRAYS: list[tuple[str, Array]] = [
    ("BOOL", np.array([True, False])),
    ("UINT8", np.array([0, 255], np.uint8)),
    ("UINT16", np.array([0, 65535], np.uint16)),
    ("UINT32", np.array([0, 2**32 - 1], np.uint32)),
    ("UINT64", np.array([0, 2**64 - 1], np.uint64)),
    ("INT8", np.array([-128, 127], np.int8)),
    ("INT16", np.array([-32768, 32767], np.int16)),
    ("INT32", np.array([-(2**31), 2**31 - 1], np.int32)),
    ("INT64", np.array([-(2**63), 2**63 - 1], np.int64)),
    ("FP16", np.array([0.1, -65504], np.float16)),
    ("FP32", np.array([0.1, -3.4028235e38], np.float32)),
    ("FP64", np.array([0.1, 1e300])),
    ("BYTES", np.array([b"one", "zwölf".encode(), b""], dtype=object)),
    ("FP32", np.zeros(0, np.float32)),
]
FORMS = [
    pytest.param(datatype, array, binary, id=f"{datatype}-{array.size}-{'raw' if binary else 'typed'}")
    for datatype, array in ARRAYS
    for binary in (True, False)
    if binary or datatype != "FP16"  # which contents have no place for
]


@pytest.mark.parametrize(("datatype", "array", "binary"), FORMS)
def test_every_datatype_comes_back(kserve: Any, talk: Talk, datatype: str, array: Array, binary: bool) -> None:
    request = asked(kserve, f"identity_{datatype.lower()}", array, datatype, binary=binary, request_id="seven")
    response = talk(lambda client: client.infer(request))
    (output,) = response.outputs
    assert (response.id, response.model_version, output.datatype) == ("seven", "1", datatype)
    answer = output.as_numpy()
    if datatype == "BYTES":
        answer = np.array([e.encode() if isinstance(e, str) else e for e in answer], dtype=object)
    np.testing.assert_array_equal(answer, array)


def test_metadata_and_parameters_reach_the_model(kserve: Any, talk: Talk) -> None:
    request = asked(
        kserve, "headers", np.array([b""], dtype=object), "BYTES", parameters={"text": "one", "number": 2, "truth": True}
    )
    told = json.loads(text(talk(lambda client: client.infer(request, headers=(("x-one", "1"),)))))
    assert told["parameters"] == {"text": "one", "number": 2, "truth": True}
    assert told["headers"]["x-one"] == "1"


@pytest.mark.parametrize(
    ("model", "size", "status", "words"),
    [
        ("nobody", 2, "NOT_FOUND", "unknown model 'nobody'"),
        ("fixed", 2, "INVALID_ARGUMENT", "[2, 2]"),
        ("identity_int32", 2, "INVALID_ARGUMENT", "INT32, got FP32"),
        ("counting", 2, "UNIMPLEMENTED", "INT32|ModelStreamInfer"),
    ],
)
def test_an_error_has_a_status_and_a_reason(
    kserve: Any, talk: Talk, needs: Callable[[str, str], Any], model: str, size: int, status: str, words: str
) -> None:
    error = needs("kserve", "grpc").RpcError
    request = asked(kserve, model, np.ones(size, np.float32), "FP32")
    if model == "counting":
        request = asked(kserve, model, np.ones(1, np.int32), "INT32")
    with pytest.raises(error) as told:
        talk(lambda client: client.infer(request))
    assert told.value.code().name == status
    assert any(word in told.value.details() for word in words.split("|"))


@pytest.mark.parametrize(("options", "tries"), [({}, "3"), ({"retries": 2}, "2"), ({"retries": 0}, "1")])
def test_what_is_unavailable_is_tried_as_often_as_the_client_wants(
    kserve: Any, talk: Talk, needs: Callable[[str, str], Any], options: dict[str, Any], tries: str
) -> None:
    error = needs("kserve", "grpc").RpcError
    name = f"kserve{tries}"
    with pytest.raises(error) as told:
        talk(lambda client: client.infer(said(kserve, "refusing", f"{name} 9")), **options)
    assert told.value.code().name == "UNAVAILABLE"
    assert text(talk(lambda client: client.infer(said(kserve, "tried", name)))) == tries


def test_the_second_try_may_do(kserve: Any, talk: Talk) -> None:
    assert text(talk(lambda client: client.infer(said(kserve, "refusing", "second 1")))) == "2"


def test_a_deadline_stops_the_model(kserve: Any, talk: Talk, needs: Callable[[str, str], Any]) -> None:
    error = needs("kserve", "grpc").RpcError
    with pytest.raises(error) as told:
        talk(lambda client: client.infer(said(kserve, "waiting", "kserve"), timeout=3))
    assert told.value.code().name == "DEADLINE_EXCEEDED"
    assert text(talk(lambda client: client.infer(said(kserve, "tells", "cancelled kserve")))) == "cancelled kserve"


def test_messages_of_more_than_grpcios_own_limit(kserve: Any, talk: Talk) -> None:
    array = np.arange(4 * 2**20, dtype=np.float32)
    request = asked(kserve, "identity_fp32", array, "FP32")
    response = talk(lambda client: client.infer(request, timeout=120))
    np.testing.assert_array_equal(response.outputs[0].as_numpy(), array)
