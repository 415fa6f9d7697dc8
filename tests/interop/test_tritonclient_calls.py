"""Every call of tritonclient.http that needs neither shared memory nor tracing, of its synchronous class and of its asyncio one."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.interop.served_v2 import DATATYPES, DECLARED, OTHERS
from tests.interop.servers import Server

pytestmark = pytest.mark.filterwarnings("default")  # gevent's own

Call = Callable[..., Any]

NOT_HERE = {"register_system_shared_memory", "register_cuda_shared_memory", "update_trace_settings", "get_trace_settings"}
"""The calls that need shared memory or tracing."""
NO_CALLS = {"close", "plugin", "register_plugin", "unregister_plugin"}

ARRAYS: Mapping[str, np.ndarray[Any, Any]] = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.arange(256, dtype=np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-32768, 32767], np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1], np.int64),
    "FP16": np.array([0.1, -65504, 6e-8], np.float16),
    "BF16": np.array([0.1, 256, -1e30], ml_dtypes.bfloat16),
    "FP32": np.array([0.1, 3.4028235e38, -1e-45], np.float32),
    "FP64": np.array([0.1, 1.7976931348623157e308, -5e-324]),
    "BYTES": np.array([b"one", "zwölf".encode(), b""], dtype=object),
}


class Blocking:
    """The synchronous client."""

    def __init__(self, module: Any, at: str) -> None:
        self.module, self.client = module, module.InferenceServerClient(at)

    def __call__(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        return getattr(self.client, name)(*arguments, **options)

    def close(self) -> None:
        self.client.close()


class Asyncio:
    """The asyncio client, on an event loop of its own in a thread."""

    def __init__(self, module: Any, at: str) -> None:
        self.module, self._loop = module, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.client = self._run(self._made(at))

    async def _made(self, at: str) -> Any:
        return self.module.InferenceServerClient(at)

    def _run(self, awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(120)

    def __call__(self, name: str, /, *arguments: Any, **options: Any) -> Any:
        return self._run(getattr(self.client, name)(*arguments, **options))

    def close(self) -> None:
        self._run(self.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def triton(needs: Callable[[str, str], Any]) -> Any:
    return needs("tritonclient", "tritonclient.http")


@pytest.fixture(scope="module")
def refused(needs: Callable[[str, str], Any]) -> Any:
    """The client's exception."""
    return needs("tritonclient", "tritonclient.utils").InferenceServerException


@pytest.fixture(scope="module", params=["sync", "asyncio"])
def call(request: pytest.FixtureRequest, needs: Callable[[str, str], Any], v2_server: Server) -> Iterator[Any]:
    """call("infer", ...) calls that method of a client."""
    at = f"{v2_server.host}:{v2_server.port}"
    if request.param == "sync":
        client: Blocking | Asyncio = Blocking(needs("tritonclient", "tritonclient.http"), at)
    else:
        client = Asyncio(needs("tritonclient", "tritonclient.http.aio"), at)
    yield client
    client.close()


def given(triton: Any, array: np.ndarray[Any, Any], datatype: str, name: str = "INPUT0", *, binary: bool = True) -> Any:
    t = triton.InferInput(name, list(array.shape), datatype)
    if datatype == "BF16" and not binary:  # the client refuses what the server reads
        t._data = [float(v) for v in array.flatten()]
    else:
        t.set_data_from_numpy(array, binary_data=binary)
    return t


def sample(datatype: str) -> np.ndarray[Any, Any]:
    """An array as the client has it: BF16 was FP32 to its older versions."""
    dtype = importlib.import_module("tritonclient.utils").triton_to_np_dtype(datatype)
    return ARRAYS[datatype].astype(dtype)


def floats(triton: Any, *values: float) -> list[Any]:
    return [given(triton, np.array(values, np.float32), "FP32")]


# ---- the calls


def test_every_call_of_the_client_is_tested_here(call: Any) -> None:
    calls = {n for n, _ in inspect.getmembers(call.client, callable) if not n.startswith("_")} - NO_CALLS - NOT_HERE
    own = Path(__file__).read_text()
    assert {name for name in calls if f'"{name}"' not in own and f".{name}(" not in own} == set()


def test_health_and_readiness(call: Any) -> None:
    assert call("is_server_live") is True
    assert call("is_server_ready") is True
    assert call("is_model_ready", "identity_fp32") is True
    assert call("is_model_ready", "identity_fp32", "1") is True
    assert call("is_model_ready", "identity_fp32", "9") is False
    assert call("is_model_ready", "nobody") is False
    assert call("is_server_live", headers={"X-Mine": "1"}, query_params={"a": "b c", "d": [1, 2]}) is True


def test_metadata(call: Any) -> None:
    server = call("get_server_metadata")
    assert server["name"] == "everywire"
    assert {"binary_tensor_data", "statistics", "model_repository", "parameters"} <= set(server["extensions"])
    for version in ("", "1"):
        model = call("get_model_metadata", "mixed", version)
        assert (model["name"], model["versions"], model["platform"]) == ("mixed", ["1"], "python")
        assert model["inputs"][0] == {"name": "a", "datatype": "FP16", "shape": [2, 2]}
        assert [output["name"] for output in model["outputs"]] == ["A", "B", "C"]
    assert call("get_model_metadata", "batching")["inputs"][0]["shape"] == [-1, 2]


def test_configuration(call: Any) -> None:
    for version in ("", "1"):
        config = call("get_model_config", "batching", version)
        assert (config["name"], config["max_batch_size"]) == ("batching", 4)
        told = [{k: config[which][0][k] for k in ("name", "data_type", "dims")} for which in ("input", "output")]
        assert told[0] == {"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [2]}
        assert told[1] == {"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [2]}
        assert config["model_transaction_policy"]["decoupled"] is False
    assert call("get_model_config", "identity_bytes")["input"][0]["data_type"] == "TYPE_STRING"


def test_the_index_names_every_model(call: Any) -> None:
    index = call("get_model_repository_index")
    assert {m["name"]: (m["version"], m["state"]) for m in index} == dict.fromkeys([*DECLARED, *OTHERS], ("1", "READY"))


def test_a_model_is_unloaded_and_loaded(call: Any, triton: Any, refused: Any) -> None:
    call("unload_model", "plain", unload_dependents=True)
    assert call("is_model_ready", "plain") is False
    assert call("is_server_ready") is True
    index = {m["name"]: m for m in call("get_model_repository_index")}
    assert index["plain"]["state"] == "UNAVAILABLE"
    assert index["identity_fp32"]["state"] == "READY"
    with pytest.raises(refused):
        call("infer", "plain", floats(triton, 1))
    call("load_model", "plain")
    assert call("is_model_ready", "plain") is True
    call("load_model", "plain")  # again: what is there stays
    call("unload_model", "nobody")  # as Triton
    with pytest.raises(refused, match="nobody"):
        call("load_model", "nobody")
    with pytest.raises(refused, match="config"):
        call("load_model", "plain", config=json.dumps({"max_batch_size": 8}))
    assert call("is_model_ready", "plain") is True


def test_statistics_of_a_model_of_a_version_and_of_all(call: Any, triton: Any) -> None:
    (before,) = call("get_inference_statistics", "fixed")["model_stats"]
    for _ in range(3):
        call("infer", "fixed", [given(triton, np.ones((2, 2), np.float32), "FP32")])
    (after,) = call("get_inference_statistics", "fixed", "1")["model_stats"]
    assert (after["name"], after["version"]) == ("fixed", "1")
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 3
    parts = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    assert after["inference_stats"].keys() >= set(parts)
    assert all(after["inference_stats"][part].keys() >= {"count", "ns"} for part in parts)
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 3
    assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
    everyone = {m["name"]: m for m in call("get_inference_statistics")["model_stats"]}
    assert everyone.keys() >= DECLARED.keys() - {"plain"}
    assert everyone["fixed"]["inference_count"] == after["inference_count"]


def test_a_batch_counts_as_one_execution_of_several_inferences(call: Any, triton: Any) -> None:
    (before,) = call("get_inference_statistics", "batching")["model_stats"]
    call("infer", "batching", [given(triton, np.ones((3, 2), np.float32), "FP32")])
    (after,) = call("get_inference_statistics", "batching")["model_stats"]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["execution_count"] - before["execution_count"] == 1


def test_failures_are_counted_apart(call: Any, triton: Any, refused: Any) -> None:
    (before,) = call("get_inference_statistics", "failing")["model_stats"]
    with pytest.raises(refused, match="the model refuses"):
        call("infer", "failing", floats(triton, 1))
    (after,) = call("get_inference_statistics", "failing")["model_stats"]
    assert after["inference_stats"]["fail"]["count"] - before["inference_stats"]["fail"]["count"] == 1
    assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"]
    assert after["inference_count"] == before["inference_count"]


def test_log_settings(call: Any, refused: Any) -> None:
    members = {"log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"}
    before = call("get_log_settings")
    assert before.keys() == members
    assert before["log_error"] is True
    changed = call("update_log_settings", {"log_verbose_level": 1})
    assert changed["log_verbose_level"] == 1
    assert call("get_log_settings") == changed
    assert call("update_log_settings", {"log_verbose_level": before["log_verbose_level"]}) == before
    with pytest.raises(refused, match="log_nothing"):
        call("update_log_settings", {"log_nothing": 1})
    with pytest.raises(refused, match="log_info"):
        call("update_log_settings", {"log_info": "yes"})


def test_no_region_of_shared_memory_is_registered(call: Any) -> None:
    assert call("get_system_shared_memory_status") == []
    assert call("get_cuda_shared_memory_status") == []
    call("unregister_system_shared_memory")
    call("unregister_cuda_shared_memory")
    call("unregister_system_shared_memory", "region")
    call("unregister_cuda_shared_memory", "region")


# ---- infer


@pytest.mark.parametrize("out", ["binary", "JSON", "default"])
@pytest.mark.parametrize("into", ["binary", "JSON"])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_comes_back(call: Any, triton: Any, datatype: str, into: str, out: str) -> None:
    array = sample(datatype)
    outputs = None if out == "default" else [triton.InferRequestedOutput("OUTPUT0", binary_data=out == "binary")]
    tensor = given(triton, array, datatype, binary=into == "binary")
    result = call("infer", f"identity_{datatype.lower()}", [tensor], outputs=outputs)
    expected = array
    if datatype == "BYTES" and out == "JSON":
        expected = np.array([e.decode() for e in array], dtype=object)  # the client's own view of JSON
    got = result.as_numpy("OUTPUT0")
    assert got.dtype == expected.dtype
    if datatype == "BF16" and out == "JSON":  # the text is the shortest of a BF16; the client reads it as FP32
        got = got.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(got, expected)
    assert ("data" in result.get_output("OUTPUT0")) is (out == "JSON")


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_no_elements_come_back(call: Any, triton: Any, datatype: str, into: bool, out: bool) -> None:
    array = sample(datatype)[:0]
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=out)]
    result = call("infer", f"identity_{datatype.lower()}", [given(triton, array, datatype, binary=into)], outputs=outputs)
    assert result.as_numpy("OUTPUT0").shape == (0,)


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("into", [True, False])
def test_rank_0_where_the_model_is_open(call: Any, triton: Any, into: bool, out: bool) -> None:
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=out)]
    result = call("infer", "anything", [given(triton, np.array(7, np.int32), "INT32", binary=into)], outputs=outputs)
    assert result.as_numpy("OUTPUT0").shape == ()
    assert result.as_numpy("OUTPUT0") == 7


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("into", [True, False])
def test_not_a_number_and_infinity(call: Any, triton: Any, into: bool, out: bool) -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=out)]
    result = call("infer", "identity_fp32", [given(triton, array, "FP32", binary=into)], outputs=outputs)
    expected = array if out else np.array([np.nan, np.nan, np.nan, 1], np.float32)  # JSON has only null
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), expected)


def test_bytes_that_are_no_text(call: Any, triton: Any) -> None:
    array = np.array([b"\xff\x00", b"\x00" * 3], dtype=object)
    result = call("infer", "identity_bytes", [given(triton, array, "BYTES")])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_an_id_comes_back(call: Any, triton: Any) -> None:
    assert call("infer", "identity_fp32", floats(triton, 1), request_id="ä 7").get_response()["id"] == "ä 7"
    assert "id" not in call("infer", "identity_fp32", floats(triton, 1)).get_response()


def test_a_version_is_chosen(call: Any, triton: Any, refused: Any) -> None:
    reply = call("infer", "identity_fp32", floats(triton, 1), model_version="1").get_response()
    assert (reply["model_name"], reply["model_version"]) == ("identity_fp32", "1")
    with pytest.raises(refused, match="no version '9'") as caught:
        call("infer", "identity_fp32", floats(triton, 1), model_version="9")
    assert caught.value.status() == "404"


def test_parameters_of_every_kind_reach_the_model(call: Any, triton: Any) -> None:
    result = call(
        "infer", "said", floats(triton, 1),
        sequence_id=7, sequence_start=True, sequence_end=True, priority=2, timeout=30_000_000,
        parameters={"a": "x", "b": 0.5, "c": True, "d": -3},
    )  # fmt: skip
    assert json.loads(result.as_numpy("SAID")[0]) == {
        "sequence_id": 7, "sequence_start": True, "sequence_end": True, "priority": 2, "timeout": 30_000_000,
        "a": "x", "b": 0.5, "c": True, "d": -3,
    }  # fmt: skip


def test_a_sequence_may_be_named_by_text(call: Any, triton: Any) -> None:
    result = call("infer", "said", floats(triton, 1), sequence_id="seven", sequence_start=True)
    assert json.loads(result.as_numpy("SAID")[0])["sequence_id"] == "seven"


def test_headers_and_a_query_change_nothing(call: Any, triton: Any) -> None:
    result = call(
        "infer",
        "identity_fp32",
        floats(triton, 1, 2),
        headers={"X-Mine": "1", "Accept": "*/*"},
        query_params={"a": ["b", "ü"]},
    )
    assert result.as_numpy("OUTPUT0").tolist() == [1, 2]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compression_both_ways(call: Any, triton: Any, coding: str) -> None:
    array = np.zeros(10_000, np.float32)
    for request, response in ((coding, None), (None, coding), (coding, coding)):
        result = call(
            "infer", "identity_fp32", [given(triton, array, "FP32")],
            request_compression_algorithm=request, response_compression_algorithm=response,
        )  # fmt: skip
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_outputs_are_chosen_each_in_its_form(call: Any, triton: Any) -> None:
    inputs = [
        given(triton, np.array([[1.5, 2.5], [3.5, 4.5]], np.float16), "FP16", "a"),
        given(triton, np.array([[1, 2], [3, 4]], np.uint32), "UINT32", "b", binary=False),
        given(triton, np.array([True, False, True]), "BOOL", "c"),
    ]
    outputs = [triton.InferRequestedOutput("C", binary_data=False), triton.InferRequestedOutput("A", binary_data=True)]
    result = call("infer", "mixed", inputs, outputs=outputs)
    assert [output["name"] for output in result.get_response()["outputs"]] == ["C", "A"]
    assert result.as_numpy("C").tolist() == [True, False, True]
    assert result.as_numpy("A").tolist() == [[1.5, 2.5], [3.5, 4.5]]
    assert result.as_numpy("B") is None


@pytest.mark.parametrize("binary", [True, False])
def test_classification(call: Any, triton: Any, binary: bool) -> None:
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=binary, class_count=2)]
    result = call("infer", "labelled", floats(triton, 0.25, 4, 0.5, 2), outputs=outputs)
    told = [e.decode() if isinstance(e, bytes) else e for e in result.as_numpy("OUTPUT0").tolist()]
    assert told == ["4.000000:1:dog", "2.000000:3:yak"]
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=True, class_count=1)]
    result = call("infer", "batching", [given(triton, np.array([[1, 2], [4, 3]], np.float32), "FP32")], outputs=outputs)
    assert result.as_numpy("OUTPUT0").tolist() == [[b"2.000000:1"], [b"4.000000:0"]]


def test_a_body_made_by_the_client_and_a_reply_read_by_it(call: Any, triton: Any, v2_server: Server) -> None:
    import urllib.request

    client = call.client
    make = getattr(client, "generate_request_body", None) or triton.InferenceServerClient.generate_request_body
    read = getattr(client, "parse_response_body", None) or triton.InferenceServerClient.parse_response_body
    body, length = make(floats(triton, 1, 2), request_id="7")
    request = urllib.request.Request(
        f"{v2_server.url}/v2/models/identity_fp32/infer", body, {"Inference-Header-Content-Length": str(length)}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        result = read(answer.read(), header_length=int(answer.headers["Inference-Header-Content-Length"]))
    assert result.as_numpy("OUTPUT0").tolist() == [1, 2]
    assert result.get_response()["id"] == "7"


def test_requests_in_flight_together(needs: Callable[[str, str], Any], triton: Any, v2_server: Server) -> None:
    at = f"{v2_server.host}:{v2_server.port}"
    with triton.InferenceServerClient(at, concurrency=4) as client:
        asked = [client.async_infer("identity_fp32", floats(triton, n), request_id=str(n)) for n in range(16)]
        results = [a.get_result(timeout=120) for a in asked]
    assert [r.as_numpy("OUTPUT0").tolist() for r in results] == [[n] for n in range(16)]

    aio = needs("tritonclient", "tritonclient.http.aio")

    async def together() -> list[Any]:
        async with aio.InferenceServerClient(at) as client:
            return await asyncio.gather(
                *[client.infer("identity_fp32", floats(triton, n), request_id=str(n)) for n in range(16)]
            )

    assert [r.get_response()["id"] for r in asyncio.run(together())] == [str(n) for n in range(16)]


def test_an_error_of_a_request_in_flight_is_told_when_its_result_is_asked_for(
    triton: Any, v2_server: Server, refused: Any
) -> None:
    with triton.InferenceServerClient(f"{v2_server.host}:{v2_server.port}") as client:
        asked = client.async_infer("nobody", floats(triton, 1))
        with pytest.raises(refused, match="unknown model 'nobody'"):
            asked.get_result(timeout=120)


def test_a_plugin_of_the_client_adds_its_headers(call: Any, triton: Any, needs: Callable[[str, str], Any]) -> None:
    basic = needs("tritonclient", "tritonclient.http.auth").BasicAuth
    call.client.register_plugin(basic("name", "secret"))
    try:
        assert call("infer", "identity_fp32", floats(triton, 1)).as_numpy("OUTPUT0").tolist() == [1]
    finally:
        call.client.unregister_plugin()


# ---- errors


def wrong(triton: Any, name: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The model, the inputs and the options of a call that is refused."""
    match name:
        case "unknown model":
            return "nobody", floats(triton, 1), {}
        case "missing input":
            return "mixed", [], {}
        case "unknown input":
            return "fixed", [given(triton, np.ones((2, 2), np.float32), "FP32", "other")], {}
        case "datatype":
            return "fixed", [given(triton, np.ones((2, 2), np.int32), "INT32")], {}
        case "shape":
            return "fixed", [given(triton, np.ones((3, 2), np.float32), "FP32")], {}
        case "unknown output":
            return "identity_fp32", floats(triton, 1), {"outputs": [triton.InferRequestedOutput("OTHER")]}
        case "no data":
            return "fixed", [triton.InferInput("INPUT0", [2, 2], "FP32")], {}
        case "not UTF-8":
            array = np.array([b"\xff"], dtype=object)
            outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=False)]
            return "identity_bytes", [given(triton, array, "BYTES")], {"outputs": outputs}
        case "shared memory":
            shared = triton.InferInput("INPUT0", [4], "FP32")
            shared.set_shared_memory("region", 16)
            return "identity_fp32", [shared], {}
        case "timeout":
            return "identity_fp32", floats(triton, 1), {"timeout": -1}
        case "batch":
            return "batching", [given(triton, np.ones((5, 2), np.float32), "FP32")], {}
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("unknown model", "404", "unknown model 'nobody'"),
        ("missing input", "400", "'a'"),
        ("unknown input", "400", "'other'"),
        ("datatype", "400", "'INPUT0'.*FP32.*INT32"),
        ("shape", "400", r"'INPUT0'.*\[2, 2\].*\[3, 2\]"),
        ("unknown output", "400", "'OTHER'"),
        ("no data", "400", "'INPUT0'.*data"),
        ("not UTF-8", "400", "'OUTPUT0'.*binary_data"),
        ("shared memory", "400", "shared_memory"),
        ("timeout", "400", "timeout"),
        ("batch", "400", "batch.*4.*5"),
    ],
)
def test_the_client_shows_the_status_and_the_reason(
    call: Any, triton: Any, name: str, status: str, words: str, refused: Any
) -> None:
    model, inputs, options = wrong(triton, name)
    with pytest.raises(refused, match=words) as caught:
        call("infer", model, inputs, **options)
    assert caught.value.status() == status
    assert call("infer", "identity_fp32", floats(triton, 1)).as_numpy("OUTPUT0").tolist() == [1]  # the connection goes on


@pytest.mark.parametrize("name", ["get_model_metadata", "get_model_config", "get_inference_statistics"])
def test_unknown_models_and_versions_are_named(call: Any, name: str, refused: Any) -> None:
    with pytest.raises(refused, match="unknown model 'nobody'") as caught:
        call(name, "nobody")
    assert caught.value.status() == "404"
    with pytest.raises(refused, match="no version '9'") as caught:
        call(name, "fixed", "9")
    assert caught.value.status() == "404"
