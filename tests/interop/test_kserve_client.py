"""kserve's InferenceRESTClient, unmodified: the binary tensor extension's own examples, both forms, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.interop.servers import Server

pytestmark = [
    pytest.mark.usefixtures("kserve"),  # before any server: where kserve is absent, none need start
    pytest.mark.filterwarnings("default"),  # its own
]

Talk = Callable[[Callable[[Any], Awaitable[Any]]], Any]


@pytest.fixture(scope="module")
def kserve(needs: Callable[[str, str], Any]) -> Any:
    return needs("kserve", "kserve")


@pytest.fixture(params=["HTTP/1.1", "HTTP/2"])
def talk(request: pytest.FixtureRequest, kserve: Any) -> Talk:
    """talk(conversation) runs `await conversation(client)`; on HTTP/2 by prior knowledge where httpx is told so."""
    import httpx

    def talk(conversation: Callable[[Any], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            second = request.param == "HTTP/2"
            transport = httpx.AsyncHTTPTransport(http1=not second, http2=second)
            async with kserve.InferenceRESTClient(
                kserve.RESTConfig(transport=transport, protocol="v2", verbose=True)
            ) as client:
                return await conversation(client)

        return asyncio.run(run())

    return talk


def given(kserve: Any, name: str, array: np.ndarray[Any, Any], datatype: str, *, binary: bool = True) -> Any:
    tensor = kserve.InferInput(name=name, datatype=datatype, shape=list(array.shape))
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def example(kserve: Any) -> list[Any]:
    """The inputs of the extension's first example."""
    return [
        given(kserve, "input_0", np.array([[1.1, 2.22], [3.345, 4.34343]], np.float16), "FP16"),
        given(kserve, "input_1", np.array([[1, 2], [3, 4]], np.uint32), "UINT32", binary=False),
        given(kserve, "input_2", np.array([True, False, True]), "BOOL"),
    ]


@pytest.fixture(scope="module")
def wanted(needs: Callable[[str, str], Any]) -> Callable[..., list[Any]]:
    """wanted(name=True) asks for that output as binary data."""
    requested = needs("kserve", "kserve.protocol.infer_type").RequestedOutput
    return lambda **binary: [requested(name=name, parameters={"binary_data": form}) for name, form in binary.items()]


@pytest.mark.by_default
def test_the_extensions_first_example(kserve: Any, talk: Talk, v2_server: Server, wanted: Callable[..., list[Any]]) -> None:
    # as published but for RequestedOutput(binary_data=) and requested_outputs=, which the released class does not have
    request = kserve.InferRequest(
        model_name="mymodel",
        request_id="2ja0ls9j1309",
        infer_inputs=example(kserve),
        request_outputs=wanted(output_0=True, output_1=False),
    )

    async def conversation(client: Any) -> Any:
        return await client.infer(
            v2_server.url, model_name="mymodel", data=request, headers={"Host": "test-server.com"}, timeout=120
        )

    response = talk(conversation)
    assert (response.id, response.model_name) == ("2ja0ls9j1309", "mymodel")  # it keeps no version
    first, second = response.outputs
    expected = np.array([[1.1, 2.22], [3.345, 4.34343], [2.2, 4.44]], np.float16)
    assert first.as_numpy().dtype == np.float16
    np.testing.assert_allclose(first.as_numpy(), expected, rtol=1e-3)
    assert second.data == [0.1, 0.2, 0.3, 0.4]
    np.testing.assert_array_equal(second.as_numpy(), np.array([[0.1, 0.2], [0.3, 0.4]], np.float32))


def test_the_extensions_second_example(kserve: Any, talk: Talk, v2_server: Server) -> None:
    request = kserve.InferRequest(
        model_name="mymodel", infer_inputs=example(kserve), parameters={"binary_data_output": True}
    )
    heads: dict[str, str] = {}
    response = talk(lambda client: client.infer(v2_server.url, model_name="mymodel", data=request, response_headers=heads))
    assert int(heads["content-length"]) - int(heads["inference-header-content-length"]) == 12 + 16
    assert [output.as_numpy().shape for output in response.outputs] == [(3, 2), (2, 2)]
    assert len(response.id) == 36  # the client invents one


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("BOOL", np.array([True, False])),
        ("UINT8", np.array([0, 255], np.uint8)),
        ("UINT64", np.array([0, 2**64 - 1], np.uint64)),
        ("INT8", np.array([-128, 127], np.int8)),
        ("INT64", np.array([-(2**63), 2**63 - 1], np.int64)),
        ("FP16", np.array([0.1, -65504], np.float16)),
        ("FP32", np.array([0.1, -3.4028235e38], np.float32)),
        ("FP64", np.array([0.1, 1e300])),
        ("BYTES", np.array([b"one", "zwölf".encode(), b""], dtype=object)),
        ("FP32", np.zeros(0, np.float32)),
    ],
    ids=lambda v: v if isinstance(v, str) else str(v.size),
)
def test_every_datatype_comes_back(
    kserve: Any,
    talk: Talk,
    v2_server: Server,
    datatype: str,
    array: np.ndarray[Any, Any],
    into: bool,
    out: bool,
    wanted: Callable[..., list[Any]],
) -> None:
    if datatype == "FP16" and not into:
        pytest.skip("the client does not send FP16 as JSON")
    model = f"identity_{datatype.lower()}"
    request = kserve.InferRequest(
        model_name=model,
        infer_inputs=[given(kserve, "INPUT0", array, datatype, binary=into)],
        request_outputs=wanted(OUTPUT0=out),
    )
    (output,) = talk(lambda client: client.infer(v2_server.url, model_name=model, data=request)).outputs
    expected = array
    if datatype == "BYTES":
        expected = np.array([e.decode() for e in array], dtype=object)  # the client's own view, of both forms
    np.testing.assert_array_equal(output.as_numpy(), expected)


def test_a_request_that_is_a_dictionary(talk: Talk, v2_server: Server) -> None:
    data = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1.5, 2.5]}]}
    heads: dict[str, str] = {}
    response = talk(lambda client: client.infer(v2_server.url, data, model_name="identity_fp32", response_headers=heads))
    assert response.outputs[0].data == [1.5, 2.5]
    assert heads["content-type"] == "application/json"


def test_not_a_number_is_read_as_one(kserve: Any, talk: Talk, v2_server: Server) -> None:
    array = np.array([np.nan, 1], np.float32)
    request = kserve.InferRequest(model_name="identity_fp32", infer_inputs=[given(kserve, "INPUT0", array, "FP32")])
    (output,) = talk(lambda client: client.infer(v2_server.url, model_name="identity_fp32", data=request)).outputs
    assert output.data == [None, 1.0]
    np.testing.assert_array_equal(output.as_numpy(), array)


def test_health(talk: Talk, v2_server: Server) -> None:
    async def conversation(client: Any) -> list[bool]:
        at = v2_server.url
        return [
            await client.is_server_live(at),
            await client.is_server_ready(at),
            await client.is_model_ready(at, "mymodel"),
            await client.is_model_ready(at, "nobody"),
        ]

    assert talk(conversation) == [True, True, True, False]


@pytest.mark.parametrize(
    ("model", "shape", "words"),
    [
        ("nobody", [2], "unknown model 'nobody'.*404 Not Found"),
        ("fixed", [2], r"'INPUT0'.*\[2, 2\].*\[2\].*400 Bad Request"),
        ("identity_int32", [2], "'INPUT0'.*INT32.*FP32.*400 Bad Request"),
    ],
)
def test_the_client_shows_the_reason(
    kserve: Any, talk: Talk, v2_server: Server, model: str, shape: list[int], words: str
) -> None:
    import httpx

    request = kserve.InferRequest(
        model_name=model, infer_inputs=[given(kserve, "INPUT0", np.ones(shape, np.float32), "FP32")]
    )
    with pytest.raises(httpx.HTTPStatusError, match=words):
        talk(lambda client: client.infer(v2_server.url, model_name=model, data=request))
