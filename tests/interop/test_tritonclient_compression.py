"""tritonclient.http, sync and asyncio, with compressed requests and replies."""

import gzip
import http.client
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.interop.servers import Server

pytestmark = pytest.mark.filterwarnings("default")  # gevent's own

ALGORITHMS = [None, "gzip", "deflate"]
ARRAYS = {
    "short": np.arange(4, dtype=np.float32),
    "long": np.arange(1_000_000, dtype=np.float32),
    "hard": np.random.default_rng(1).integers(0, 2**31, 100_000, dtype=np.int32).view(np.float32),
}
PATH = "v2/models/identity/infer"


def asked(triton: Any, array: np.ndarray, *, binary: bool) -> dict[str, Any]:
    tensor = triton.InferInput("INPUT0", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return {"inputs": [tensor], "outputs": [triton.InferRequestedOutput("OUTPUT0", binary_data=binary)], "request_id": "one"}


@pytest.mark.parametrize("response", ALGORITHMS)
@pytest.mark.parametrize("request_", ALGORITHMS)
@pytest.mark.parametrize("kind", ["short", "long", "hard"])
def test_the_sync_client_gets_the_tensor_back(
    server: Server, needs: Callable[[str, str], Any], kind: str, request_: str | None, response: str | None
) -> None:
    triton, array = needs("tritonclient", "tritonclient.http"), ARRAYS[kind]
    with triton.InferenceServerClient(f"{server.host}:{server.port}", network_timeout=120.0) as client:
        result = client.infer(
            "identity",
            **asked(triton, array, binary=True),
            request_compression_algorithm=request_,
            response_compression_algorithm=response,
        )
    assert result.get_response()["id"] == "one"
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0").view(np.int32), array.view(np.int32))


@pytest.mark.parametrize("response", ALGORITHMS)
@pytest.mark.parametrize("request_", ALGORITHMS)
@pytest.mark.parametrize("binary", [True, False])
def test_the_asyncio_client_gets_the_tensor_back(
    server: Server, needs: Callable[[str, str], Any], binary: bool, request_: str | None, response: str | None
) -> None:
    triton = needs("tritonclient", "tritonclient.http.aio")
    import asyncio

    async def infer(array: np.ndarray) -> Any:
        async with triton.InferenceServerClient(f"{server.host}:{server.port}") as client:
            result = await client.infer(
                "identity",
                **asked(triton, array, binary=binary),
                request_compression_algorithm=request_,
                response_compression_algorithm=response,
            )
            return result.as_numpy("OUTPUT0")

    for array in (ARRAYS["short"], ARRAYS["long"][:20_000]):
        np.testing.assert_array_equal(asyncio.run(infer(array)), array)


def test_a_body_of_another_coding_than_it_says_is_told_so(server: Server, needs: Callable[[str, str], Any]) -> None:
    triton = needs("tritonclient", "tritonclient.http")
    refused = needs("tritonclient", "tritonclient.utils").InferenceServerException
    with (
        triton.InferenceServerClient(f"{server.host}:{server.port}") as client,
        pytest.raises(refused, match="the gzip body is damaged") as caught,
    ):
        client.infer("identity", **asked(triton, ARRAYS["short"], binary=True), headers={"Content-Encoding": "gzip"})
    assert caught.value.status() == "400"


@pytest.mark.parametrize(
    ("accepted", "decode"), [("gzip", gzip.decompress), ("deflate", zlib.decompress), ("gzip, deflate, br", gzip.decompress)]
)
def test_the_reply_is_compressed_on_the_wire(server: Server, accepted: str, decode: Callable[[bytes], bytes]) -> None:
    array = ARRAYS["long"][:50_000]
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [50_000], "parameters": {"binary_data_size": array.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=120)
    headers = {"Accept-Encoding": accepted, "Inference-Header-Content-Length": str(len(head))}
    connection.request("POST", f"/{PATH}", head + array.tobytes(), headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    assert (reply.status, reply.getheader("Content-Encoding")) == (200, accepted.partition(",")[0])
    assert reply.getheader("Content-Length") == str(len(body))
    assert len(body) < array.nbytes
    content = decode(body)
    length = int(reply.getheader("Inference-Header-Content-Length") or 0)
    assert json.loads(content[:length])["outputs"][0]["parameters"] == {"binary_data_size": array.nbytes}
    np.testing.assert_array_equal(np.frombuffer(content[length:], "<f4"), array)
