"""tritonclient.http, unmodified."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.interop.servers import Server

pytestmark = pytest.mark.filterwarnings("default")  # gevent's own


@pytest.fixture
def triton(needs: Callable[[str, str], Any]) -> Any:
    return needs("tritonclient", "tritonclient.http")


def tensor(triton: Any, name: str, array: np.ndarray, datatype: str, *, binary: bool = True) -> Any:
    t = triton.InferInput(name, list(array.shape), datatype)
    t.set_data_from_numpy(array, binary_data=binary)
    return t


@pytest.mark.by_default
def test_add_sub_with_binary_tensors(server: Server, triton: Any) -> None:
    a, b = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 3, np.int32)
    with triton.InferenceServerClient(f"{server.host}:{server.port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("add_sub")
        result = client.infer("add_sub", [tensor(triton, "INPUT0", a, "INT32"), tensor(triton, "INPUT1", b, "INT32")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("FP32", np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)),
        ("FP64", np.array([[0.1, 1e300]])),
        ("INT64", np.array([-(2**63), 2**63 - 1])),
        ("UINT8", np.arange(256, dtype=np.uint8)),
        ("BOOL", np.array([True, False, True])),
        ("BYTES", np.array([b"one", "zwölf".encode(), b""], dtype=object)),
        ("FP32", np.zeros((0, 3), np.float32)),
    ],
    ids=lambda v: v if isinstance(v, str) else str(v.shape),
)
def test_identity_gives_every_datatype_back(
    server: Server, triton: Any, datatype: str, array: np.ndarray, binary: bool
) -> None:
    with triton.InferenceServerClient(f"{server.host}:{server.port}") as client:
        outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary)]
        result = client.infer("identity", [tensor(triton, "INPUT0", array, datatype, binary=binary)], outputs=outputs)
    expected = array
    if datatype == "BYTES" and not binary:
        expected = np.array([element.decode() for element in array], dtype=object)  # the client's own view of JSON
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), expected)


def test_a_large_tensor_comes_back_unchanged(server: Server, triton: Any) -> None:
    array = np.arange(2**22, dtype=np.float32).reshape(1, -1)
    with triton.InferenceServerClient(f"{server.host}:{server.port}", network_timeout=120.0) as client:
        result = client.infer("identity", [tensor(triton, "INPUT0", array, "FP32")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_errors_have_a_text_the_client_shows(server: Server, triton: Any) -> None:
    from tritonclient.utils import InferenceServerException

    with triton.InferenceServerClient(f"{server.host}:{server.port}") as client:
        with pytest.raises(InferenceServerException, match="unknown model 'nobody'"):
            client.infer("nobody", [])
        assert client.get_model_metadata("add_sub")["name"] == "add_sub"
        assert client.get_server_metadata()["name"] == "everywire"
