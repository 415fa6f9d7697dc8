"""tritonclient.grpc, unmodified: every call of its synchronous class and of its asyncio one, and streams of both."""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.interop import served_grpc, served_v2
from tests.interop.servers import Server, serving
from tests.interop.test_tritonclient_calls import ARRAYS, Asyncio, Blocking

PATIENCE = 120
NO_CALLS = {"close", "plugin", "register_plugin", "unregister_plugin"}
MiB = 2**20

pytestmark = [
    pytest.mark.usefixtures("triton"),  # before any server: where the client is absent, none need start
    pytest.mark.filterwarnings("default"),  # its own
]


@pytest.fixture(scope="module")
def grpcio(needs: Callable[[str, str], Any]) -> Any:
    return needs("grpcio", "grpc")


@pytest.fixture(scope="module")
def triton(needs: Callable[[str, str], Any], grpcio: Any) -> Any:
    return needs("tritonclient", "tritonclient.grpc")


@pytest.fixture(scope="module")
def refused(needs: Callable[[str, str], Any], triton: Any) -> Any:
    """The client's exception."""
    return needs("tritonclient", "tritonclient.utils").InferenceServerException


@pytest.fixture(scope="module", params=["sync", "asyncio"])
def call(
    request: pytest.FixtureRequest, triton: Any, needs: Callable[[str, str], Any], grpc_server: Server
) -> Iterator[Any]:
    """call("infer", ...) calls that method of a client."""
    at = f"{grpc_server.host}:{grpc_server.port}"
    if request.param == "sync":
        client: Blocking | Asyncio = Blocking(triton, at)
    else:
        client = Asyncio(needs("tritonclient", "tritonclient.grpc.aio"), at)
    yield client
    client.close()


@pytest.fixture
def client(triton: Any, grpc_server: Server) -> Iterator[Any]:
    """A synchronous client."""
    with triton.InferenceServerClient(f"{grpc_server.host}:{grpc_server.port}") as client:
        yield client


@pytest.fixture
def stub(triton: Any, grpcio: Any, grpc_server: Server) -> Iterator[Any]:
    """The service as tritonclient's messages are sent by hand."""
    with grpcio.insecure_channel(f"{grpc_server.host}:{grpc_server.port}") as channel:
        yield triton.service_pb2_grpc.GRPCInferenceServiceStub(channel)


def given(triton: Any, array: np.ndarray[Any, Any], datatype: str, name: str = "INPUT0") -> Any:
    t = triton.InferInput(name, list(array.shape), datatype)
    t.set_data_from_numpy(array)
    return t


def said(triton: Any, text: str) -> list[Any]:
    return [given(triton, np.array([text.encode()], dtype=object), "BYTES")]


def floats(triton: Any, *values: float) -> list[Any]:
    return [given(triton, np.array(values, np.float32), "FP32")]


def number(triton: Any, value: int) -> list[Any]:
    return [given(triton, np.array([value], np.int32), "INT32")]


def text(result: Any) -> str:
    element: bytes = result.as_numpy("OUTPUT0")[0]
    return element.decode()


# ---- calls about models and the server


def test_every_call_of_the_client_is_tested_here(call: Any) -> None:
    calls = {n for n, _ in inspect.getmembers(call.client, callable) if not n.startswith("_")} - NO_CALLS
    own = Path(__file__).read_text()
    assert {name for name in calls if f'"{name}"' not in own and f".{name}(" not in own} == set()


@pytest.mark.by_default
def test_health_and_readiness(call: Any) -> None:
    assert call("is_server_live") is True
    assert call("is_server_ready") is True
    assert call("is_model_ready", "fixed") is True
    assert call("is_model_ready", "fixed", "1") is True
    assert call("is_model_ready", "fixed", "9") is False
    assert call("is_model_ready", "nobody") is False


def test_metadata_and_configuration(call: Any, triton: Any) -> None:
    server = call("get_server_metadata")
    assert server.name == "everywire"
    assert {"binary_tensor_data", "model_repository", "statistics"} <= set(server.extensions)
    model = call("get_model_metadata", "batching", "1")
    assert (model.name, list(model.versions)) == ("batching", ["1"])
    assert [(t.name, t.datatype, list(t.shape)) for t in model.inputs] == [("INPUT0", "FP32", [-1, 2])]
    config = call("get_model_config", "batching").config
    types = triton.model_config_pb2
    assert (config.name, config.max_batch_size) == ("batching", 4)
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [("INPUT0", types.TYPE_FP32, [2])]
    assert [(t.name, t.data_type, list(t.dims)) for t in config.output] == [("OUTPUT0", types.TYPE_FP32, [2])]
    assert not config.model_transaction_policy.decoupled
    assert call("get_model_config", "counting").config.model_transaction_policy.decoupled
    assert call("get_model_metadata", "fixed", as_json=True)["inputs"][0]["shape"] == ["2", "2"]


def test_statistics_of_a_model_and_of_all(call: Any, triton: Any) -> None:
    (before,) = call("get_inference_statistics", "columns").model_stats
    call("infer", "columns", [given(triton, np.ones((4, 3), np.int32), "INT32")])
    (after,) = call("get_inference_statistics", "columns", "1").model_stats
    assert (after.name, after.version) == ("columns", "1")
    assert after.inference_stats.success.count == before.inference_stats.success.count + 1
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    everyone = {stats.name for stats in call("get_inference_statistics").model_stats}
    assert everyone == {*served_grpc.MODELS, *served_v2.DECLARED}


def test_the_index_names_every_model(call: Any, refused: Any) -> None:
    index = call("get_model_repository_index")
    assert {m.name: m.state for m in index.models} == dict.fromkeys({*served_grpc.MODELS, *served_v2.DECLARED}, "READY")


def test_a_model_is_unloaded_and_loaded(call: Any, triton: Any, refused: Any) -> None:
    call("unload_model", "plain", unload_dependents=True)
    assert call("is_model_ready", "plain") is False
    assert call("is_server_ready") is True
    states = {m.name: m.state for m in call("get_model_repository_index").models}
    assert (states["plain"], states["fixed"]) == ("UNAVAILABLE", "READY")
    with pytest.raises(refused) as gone:
        call("infer", "plain", floats(triton, 1))
    assert gone.value.status() in ("StatusCode.NOT_FOUND", "StatusCode.UNAVAILABLE")
    call("load_model", "plain")
    assert call("is_model_ready", "plain") is True
    call("load_model", "plain")  # again: what is there stays
    call("unload_model", "nobody")  # as Triton
    with pytest.raises(refused, match="nobody") as unknown:
        call("load_model", "nobody")
    assert unknown.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(refused, match="config") as mine:
        call("load_model", "plain", config=json.dumps({"max_batch_size": 8}))
    assert mine.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_log_settings_are_read_and_changed(call: Any, refused: Any) -> None:
    def settings(response: Any) -> dict[str, Any]:
        return {name: getattr(v, v.WhichOneof("parameter_choice")) for name, v in response.settings.items()}

    before = settings(call("get_log_settings"))
    assert before["log_info"] is True
    assert before["log_verbose_level"] == 0
    changed = settings(call("update_log_settings", {"log_verbose_level": 1}))
    assert changed == before | {"log_verbose_level": 1}
    assert settings(call("get_log_settings")) == changed
    assert settings(call("update_log_settings", {"log_verbose_level": 0})) == before
    for wrong in ({"log_nothing": True}, {"log_file": "elsewhere"}, {"log_info": True, "log_error": False}):
        with pytest.raises(refused) as told:
            call("update_log_settings", wrong)
        assert told.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_there_is_neither_tracing_nor_shared_memory(call: Any, refused: Any) -> None:
    for name, arguments in {
        "get_trace_settings": (),
        "update_trace_settings": ("fixed", {"trace_level": "TIMESTAMPS"}),
        "register_system_shared_memory": ("region", "/region", 64),
        "register_cuda_shared_memory": ("region", b"aGFuZGxl", 0, 64),
    }.items():
        with pytest.raises(refused) as told:
            call(name, *arguments)
        assert told.value.status() == "StatusCode.UNIMPLEMENTED", name
    assert not call("get_system_shared_memory_status").regions
    assert not call("get_cuda_shared_memory_status").regions
    for region in ("", "region"):
        call("unregister_system_shared_memory", region)
        call("unregister_cuda_shared_memory", region)


@pytest.mark.parametrize("name", ["get_model_metadata", "get_model_config", "get_inference_statistics"])
def test_unknown_models_and_versions_are_named(call: Any, name: str, refused: Any) -> None:
    for model, words in ((("nobody",), "unknown model 'nobody'"), (("fixed", "9"), "no version '9'")):
        with pytest.raises(refused, match=words) as told:
            call(name, *model)
        assert told.value.status() == "StatusCode.NOT_FOUND"


# ---- tensors


@pytest.mark.parametrize("datatype", ARRAYS)
def test_every_datatype_comes_back(call: Any, triton: Any, datatype: str) -> None:
    from tritonclient.utils import triton_to_np_dtype

    array = ARRAYS[datatype].astype(triton_to_np_dtype(datatype))
    result = call("infer", f"identity_{datatype.lower()}", [given(triton, array, datatype)], request_id="seven")
    response = result.get_response()
    assert (response.id, response.model_version, response.outputs[0].datatype) == ("seven", "1", datatype)
    answer = result.as_numpy("OUTPUT0")
    if datatype == "BYTES":
        assert list(answer) == list(array)
    else:
        assert answer.tobytes() == array.tobytes()


def test_nothing_and_batches(call: Any, triton: Any) -> None:
    nothing = call("infer", "identity_fp32", floats(triton))
    assert (nothing.as_numpy("OUTPUT0").shape, list(nothing.get_response().raw_output_contents)) == ((0,), [b""])
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    np.testing.assert_array_equal(call("infer", "batching", [given(triton, rows, "FP32")]).as_numpy("OUTPUT0"), rows)


def test_outputs_that_are_asked_for(call: Any, triton: Any) -> None:
    arrays = {
        "a": (np.ones((2, 2), np.float16), "FP16"),
        "b": (np.arange(4, dtype=np.uint32).reshape(2, 2), "UINT32"),
        "c": (np.array([True, False, True]), "BOOL"),
    }
    inputs = [given(triton, array, datatype, name) for name, (array, datatype) in arrays.items()]
    result = call("infer", "mixed", inputs, outputs=[triton.InferRequestedOutput(name) for name in ("C", "A")])
    assert [output.name for output in result.get_response().outputs] == ["C", "A"]
    np.testing.assert_array_equal(result.as_numpy("C"), arrays["c"][0])
    assert result.as_numpy("B") is None
    scores = [given(triton, np.array([1, 4, 2, 3], np.float32), "FP32")]
    best = call("infer", "labelled", scores, outputs=[triton.InferRequestedOutput("OUTPUT0", class_count=2)])
    assert best.as_numpy("OUTPUT0").tolist() == [b"4.000000:1:dog", b"3.000000:3:yak"]


def test_what_the_model_is_told(call: Any, triton: Any) -> None:
    told = json.loads(
        text(
            call(
                "infer",
                "headers",
                said(triton, ""),
                headers={"x-one": "1"},
                parameters={"i": 1, "s": "t", "b": True, "d": 0.5},
            )
        )
    )
    assert told["headers"]["x-one"] == "1"
    assert told["headers"]["user-agent"].startswith("grpc-python")
    assert told["parameters"] == {"i": 1, "s": "t", "b": True, "d": 0.5}
    sequence = {"sequence_id": 7, "sequence_start": True, "sequence_end": False, "priority": 2}
    told = json.loads(text(call("infer", "headers", said(triton, ""), **sequence)))
    assert told["parameters"] == sequence


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(call: Any, triton: Any, algorithm: str) -> None:
    for array in (np.zeros(3, np.float32), np.zeros(MiB, np.float32), np.random.default_rng(1).random(50_000, np.float32)):
        inputs = [given(triton, array, "FP32")]
        result = call("infer", "identity_fp32", inputs, compression_algorithm=algorithm)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_64_mib_go_both_ways(call: Any, triton: Any) -> None:
    array = np.arange(16 * MiB, dtype=np.float32)
    result = call("infer", "identity_fp32", [given(triton, array, "FP32")], client_timeout=PATIENCE)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)


def test_async_infer_of_the_synchronous_client(client: Any, triton: Any, refused: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.async_infer("identity_fp32", floats(triton, 1.5), lambda result, error: answers.put((result, error)))
    result, error = answers.get(timeout=PATIENCE)
    assert error is None
    assert result.as_numpy("OUTPUT0").tolist() == [1.5]
    client.async_infer("nobody", floats(triton, 1), lambda result, error: answers.put((result, error)))
    result, error = answers.get(timeout=PATIENCE)
    assert result is None
    assert error.status() == "StatusCode.NOT_FOUND"


# ---- contents, as messages made by hand


CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def asked(triton: Any, model: str, *inputs: tuple[str, list[int], Mapping[str, Any]], raw: Any = (), **more: Any) -> Any:
    """A ModelInferRequest with inputs of a datatype, a shape and contents."""
    pb = triton.service_pb2
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=list(raw), **more)
    for place, (datatype, shape, contents) in enumerate(inputs):
        request.inputs.add(
            name=f"INPUT{place}",
            datatype=datatype,
            shape=shape,
            contents=pb.InferTensorContents(**contents) if contents else None,
        )
    return request


@pytest.mark.parametrize("datatype", CONTENTS)
def test_typed_contents_of_every_datatype(stub: Any, triton: Any, datatype: str) -> None:
    array = ARRAYS[datatype]
    values = {CONTENTS[datatype]: array.tolist()}
    response = stub.ModelInfer(
        asked(triton, f"identity_{datatype.lower()}", (datatype, list(array.shape), values), id="typed"), timeout=PATIENCE
    )
    assert response.id == "typed"
    answer = triton.InferResult(response).as_numpy("OUTPUT0")
    if answer is None:  # typed, too
        answer = np.array(getattr(response.outputs[0].contents, CONTENTS[datatype]))
    np.testing.assert_array_equal(answer.astype(array.dtype), array)


NOTHING: Mapping[str, Any] = {}
ONE = b"\0\0\x80?"


@pytest.mark.parametrize(
    ("model", "inputs", "raw", "words"),
    [
        ("identity_fp32", [("FP32", [1], NOTHING)], [], "INPUT0"),
        ("identity_fp32", [("FP32", [1], NOTHING)], [ONE, ONE], "raw_input_contents"),
        ("identity_fp32", [("FP32", [1], {"fp32_contents": [1]})], [ONE], "INPUT0|raw_input_contents"),
        ("identity_fp32", [("FP32", [2], NOTHING)], [ONE], "INPUT0.*8.*4"),
        ("identity_fp32", [("FP32", [1], {"fp64_contents": [1]})], [], "INPUT0"),
        ("identity_fp32", [("FP32", [1], {"fp32_contents": [1], "int_contents": [1]})], [], "INPUT0"),
        ("identity_fp32", [("FP32", [2], {"fp32_contents": [1]})], [], "INPUT0"),
        ("identity_int8", [("INT8", [1], {"int_contents": [300]})], [], "INPUT0"),
        ("identity_uint16", [("UINT16", [1], {"uint_contents": [65536]})], [], "INPUT0"),
        ("identity_fp16", [("FP16", [1], {"fp32_contents": [1]})], [], "INPUT0.*raw"),
        ("identity_bf16", [("BF16", [1], {"fp32_contents": [1]})], [], "INPUT0.*raw"),
        ("identity_bytes", [("BYTES", [1], NOTHING)], [b"\4\0\0\0abc"], "INPUT0"),
        ("identity_bytes", [("BYTES", [1], NOTHING)], [b"\3\0\0\0abcd"], "INPUT0"),
        ("identity_bytes", [("BYTES", [2], NOTHING)], [b"\3\0\0\0abc"], "INPUT0"),
        ("open", [("FP32", [2**62, 4], NOTHING)], [b""], "INPUT0"),
        ("open", [("FP32", [2**32, 2**31], NOTHING)], [b""], "INPUT0"),
        ("open", [("FP32", [-1, 1], NOTHING)], [ONE], "INPUT0"),
        ("identity_fp32", [("fp32", [1], NOTHING)], [ONE], "INPUT0"),
        ("identity_fp32", [("", [1], NOTHING)], [ONE], "INPUT0"),
        ("identity_fp32", [], [], "INPUT0"),
        ("identity_fp32", [("FP32", [1], NOTHING)] * 2, [ONE, ONE], "INPUT1"),
    ],
)
def test_what_cannot_be_an_input_is_named(
    stub: Any, triton: Any, grpcio: Any, model: str, inputs: list[Any], raw: list[bytes], words: str
) -> None:
    with pytest.raises(grpcio.RpcError) as told:
        stub.ModelInfer(asked(triton, model, *inputs, raw=raw), timeout=PATIENCE)
    assert told.value.code() is grpcio.StatusCode.INVALID_ARGUMENT
    assert re.search(words, told.value.details()), told.value.details()


def test_parameters_that_cannot_be(stub: Any, triton: Any, grpcio: Any) -> None:
    pb = triton.service_pb2
    for name, value in {
        "empty": pb.InferParameter(),
        "triton_mine": pb.InferParameter(string_param="x"),
        "triton_enable_empty_final_response": pb.InferParameter(int64_param=1),
        "timeout": pb.InferParameter(string_param="1"),
        "priority": pb.InferParameter(string_param="1"),
    }.items():
        with pytest.raises(grpcio.RpcError) as told:
            stub.ModelInfer(
                asked(triton, "identity_fp32", ("FP32", [1], NOTHING), raw=[ONE], parameters={name: value}), timeout=PATIENCE
            )
        assert told.value.code() is grpcio.StatusCode.INVALID_ARGUMENT, name
        assert name in told.value.details()


def test_an_index_of_another_repository_and_messages_of_no_kind(stub: Any, triton: Any, grpcio: Any) -> None:
    with pytest.raises(grpcio.RpcError) as told:
        stub.RepositoryIndex(triton.service_pb2.RepositoryIndexRequest(repository_name="other"), timeout=PATIENCE)
    assert told.value.code() is grpcio.StatusCode.UNIMPLEMENTED


# ---- errors


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ("model", "INTERNAL"),
        ("400", "INVALID_ARGUMENT"),
        ("401", "UNAUTHENTICATED"),
        ("403", "PERMISSION_DENIED"),
        ("404", "NOT_FOUND"),
        ("409", "FAILED_PRECONDITION"),
        ("413", "RESOURCE_EXHAUSTED"),
        ("418", "INVALID_ARGUMENT"),
        ("429", "RESOURCE_EXHAUSTED"),
    ],
)
def test_a_model_chooses_its_status(call: Any, triton: Any, refused: Any, told: str, status: str) -> None:
    with pytest.raises(refused, match="the model refuses, grün") as error:
        call("infer", "failing", said(triton, told))
    assert error.value.status() == f"StatusCode.{status}"


def test_a_bug_of_a_model_is_told_by_an_id_alone(call: Any, triton: Any, refused: Any) -> None:
    with pytest.raises(refused, match=r"incident [0-9a-f]+") as error:
        call("infer", "failing", said(triton, "bug"))
    assert error.value.status() == "StatusCode.INTERNAL"
    assert "secret" not in error.value.message()


def test_a_request_that_is_wrong_is_told_so_and_the_connection_goes_on(call: Any, triton: Any, refused: Any) -> None:
    region = triton.InferInput("INPUT0", [4], "FP32")
    region.set_shared_memory("region", 16)
    for model, inputs, more, status, words in [
        ("nobody", floats(triton, 1), {}, "NOT_FOUND", "nobody"),
        ("fixed", floats(triton, 1), {"model_version": "9"}, "NOT_FOUND", "version '9'"),
        ("fixed", floats(triton, 1), {}, "INVALID_ARGUMENT", r"INPUT0.*\[2, 2\].*\[1\]"),
        ("fixed", [given(triton, np.ones((2, 2), np.int32), "INT32")], {}, "INVALID_ARGUMENT", "FP32.*INT32"),
        ("identity_fp32", floats(triton, 1), {"outputs": [triton.InferRequestedOutput("X")]}, "INVALID_ARGUMENT", "'X'"),
        ("identity_fp32", [region], {}, "INVALID_ARGUMENT", "shared"),
        ("counting", number(triton, 3), {}, "UNIMPLEMENTED", "ModelStreamInfer"),
    ]:
        with pytest.raises(refused, match=words) as error:
            call("infer", model, inputs, **more)
        assert error.value.status() == f"StatusCode.{status}"
    assert call("infer", "identity_fp32", floats(triton, 1)).as_numpy("OUTPUT0").tolist() == [1]


def test_a_crashed_model_is_unavailable_until_it_is_loaded_again(client: Any, triton: Any, refused: Any) -> None:
    assert text(client.infer("crashing", said(triton, "fine?"))) == "well"
    with pytest.raises(refused) as lost:
        client.infer("crashing", said(triton, "crash"))
    assert lost.value.status() == "StatusCode.INTERNAL"
    client.infer("tells", said(triton, "loading again"))
    with pytest.raises(refused) as away:
        client.infer("crashing", said(triton, "fine?"))
    assert away.value.status() == "StatusCode.UNAVAILABLE"
    assert not client.is_model_ready("crashing")
    client.infer("says", said(triton, "load"))
    while not client.is_model_ready("crashing"):
        pass
    assert text(client.infer("crashing", said(triton, "fine?"))) == "well"


# ---- leaving


def test_the_deadline_of_a_call_stops_its_model(
    call: Any, triton: Any, refused: Any, request: pytest.FixtureRequest
) -> None:
    name = f"late {request.node.callspec.id}"
    with pytest.raises(refused) as late:
        call("infer", "waiting", said(triton, name), client_timeout=3)
    assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert call("infer", "tells", said(triton, f"cancelled {name}"), client_timeout=PATIENCE)
    with pytest.raises(refused, match="timeout") as short:
        call("infer", "waiting", said(triton, "shorter"), timeout=1000)
    assert short.value.status() == "StatusCode.DEADLINE_EXCEEDED"


def test_a_call_that_is_cancelled_stops_its_model(client: Any, triton: Any, refused: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    asked = client.async_infer("waiting", said(triton, "unary"), lambda result, error: answers.put(error))
    client.infer("tells", said(triton, "begun unary"))
    asked.cancel()
    assert answers.get(timeout=PATIENCE).status() == "StatusCode.CANCELLED"
    client.infer("tells", said(triton, "cancelled unary"))


def test_a_task_of_asyncio_that_is_cancelled_stops_its_model(
    triton: Any, needs: Callable[[str, str], Any], grpc_server: Server
) -> None:
    aio = needs("tritonclient", "tritonclient.grpc.aio")

    async def run() -> None:
        async with aio.InferenceServerClient(f"{grpc_server.host}:{grpc_server.port}") as client:
            task = asyncio.create_task(client.infer("waiting", said(triton, "task")))
            await client.infer("tells", said(triton, "begun task"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.infer("tells", said(triton, "cancelled task"))

    asyncio.run(run())


# ---- streams


class Stream:
    """A stream of the synchronous client, and what it hears."""

    def __init__(self, client: Any, **options: Any) -> None:
        self.client = client
        self._heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: self._heard.put((result, error)), **options)

    def ask(self, model: str, inputs: list[Any], id: str = "", **options: Any) -> None:
        self.client.async_stream_infer(model, inputs, request_id=id, **options)

    def next(self) -> Any:
        """The next response, or the error."""
        result, error = self._heard.get(timeout=PATIENCE)
        return error if result is None else result

    def end(self) -> list[Any]:
        """Sends no more, and what is heard then."""
        self.client.stop_stream()
        rest = []
        while not self._heard.empty():
            rest.append(self.next())
        return rest


def spoken(result: Any) -> tuple[str, Any, bool]:
    """A streamed response: its id, its number or text, and whether it is the last."""
    response = result.get_response()
    array = result.as_numpy("OUTPUT0")
    value = None if array is None else array[0].decode() if array.dtype == object else int(array[0])
    return response.id, value, response.parameters["triton_final_response"].bool_param


@pytest.mark.by_default
def test_a_decoupled_model_answers_any_number_of_times(client: Any, triton: Any) -> None:
    stream = Stream(client)
    stream.ask("counting", number(triton, 3), "three", enable_empty_final_response=True)
    assert [spoken(stream.next()) for _ in range(4)] == [
        ("three", 0, False), ("three", 1, False), ("three", 2, False), ("three", None, True),
    ]  # fmt: skip
    stream.ask("counting", number(triton, 0), "none", enable_empty_final_response=True)
    assert spoken(stream.next()) == ("none", None, True)
    stream.ask("counting", number(triton, 2), "two")  # nobody asks for its end
    assert [spoken(heard) for heard in stream.end()] == [("two", 0, False), ("two", 1, False)]


def as_vllm(triton: Any, prompt: str, *, stream: bool) -> list[Any]:
    """The inputs of a request as the clients of Triton's vLLM backend have them."""
    parameters = {"temperature": "0.5", "max_tokens": "100"}
    return [
        given(triton, np.array([prompt.encode()], dtype=object), "BYTES", "text_input"),
        given(triton, np.array([stream], dtype=bool), "BOOL", "stream"),
        given(triton, np.array([json.dumps(parameters).encode()], dtype=object), "BYTES", "sampling_parameters"),
        given(triton, np.array([True], dtype=bool), "BOOL", "exclude_input_in_output"),
    ]


@pytest.mark.by_default
def test_a_model_of_text_is_asked_as_vllms_backend_is(client: Any, triton: Any) -> None:
    outputs = [triton.InferRequestedOutput("text_output")]
    stream = Stream(client)
    stream.ask("speaking", as_vllm(triton, "one two", stream=True), "a", outputs=outputs, enable_empty_final_response=True)
    heard = [stream.next() for _ in range(3)]
    assert [result.as_numpy("text_output") for result in heard[:2]] == [[b"0.5one "], [b"0.5two "]]
    assert [r.get_response().parameters["triton_final_response"].bool_param for r in heard] == [False, False, True]
    stream.ask("speaking", as_vllm(triton, "one two", stream=False), "b", outputs=outputs)
    (whole,) = stream.end()
    assert whole.as_numpy("text_output") == [b"0.5one 0.5two "]
    assert whole.get_response().parameters["triton_final_response"].bool_param


def test_all_of_a_text_is_one_answer(call: Any, triton: Any) -> None:
    answer = call("infer", "speaking", as_vllm(triton, "one two", stream=False))
    assert answer.as_numpy("text_output") == [b"0.5one 0.5two "]


def test_three_models_share_a_stream(client: Any, triton: Any) -> None:
    stream = Stream(client)
    stream.ask("waiting", said(triton, "first"), "slow")
    stream.ask("says", said(triton, "second"), "fast")  # is done before the slow one, and told after it
    stream.ask("counting", number(triton, 3), "many", enable_empty_final_response=True)
    assert [spoken(stream.next()) for _ in range(4)] == [
        ("many", 0, False), ("many", 1, False), ("many", 2, False), ("many", None, True),
    ]  # fmt: skip
    client.infer("tells", said(triton, "go second"))
    stream.ask("says", said(triton, "first"), "release")
    assert [spoken(stream.next()) for _ in range(3)] == [
        ("slow", "first", True), ("fast", "done", True), ("release", "done", True),
    ]  # fmt: skip
    assert stream.end() == []


def test_the_errors_of_a_stream_are_messages_of_it(client: Any, triton: Any) -> None:
    stream = Stream(client)
    stream.ask("nobody", floats(triton, 1), "a")
    assert "unknown model 'nobody'" in str(stream.next())
    stream.ask("fixed", floats(triton, 1), "b")
    assert "INPUT0" in str(stream.next())
    stream.ask("counting", number(triton, -2), "c")
    assert [spoken(stream.next())[1] for _ in range(2)] == [0, 1]
    assert "no more numbers" in str(stream.next())
    stream.ask("failing", said(triton, "bug"), "d")
    assert "incident" in str(stream.next())
    stream.ask("identity_fp32", floats(triton, 1.5), "e")
    assert stream.next().as_numpy("OUTPUT0").tolist() == [1.5]
    assert stream.end() == []


def test_errors_come_in_the_order_of_the_requests(client: Any, triton: Any) -> None:
    # for the client is told no id of what was refused
    stream = Stream(client)
    stream.ask("waiting", said(triton, "ordered"))
    stream.ask("nobody", floats(triton, 1))
    stream.ask("fixed", floats(triton, 1))
    stream.ask("counting", floats(triton, 1))
    assert "INT32, got FP32" in str(stream.next())  # a decoupled model keeps no order
    stream.ask("says", said(triton, "ordered"))
    assert spoken(stream.next())[1] == "ordered"
    assert "unknown model 'nobody'" in str(stream.next())
    assert "'INPUT0'" in str(stream.next())
    assert spoken(stream.next())[1] == "done"
    assert stream.end() == []


def test_a_request_of_a_stream_has_a_time_of_its_own(client: Any, triton: Any) -> None:
    stream = Stream(client)
    stream.ask("waiting", said(triton, "hurried"), timeout=3_000_000)
    client.infer("tells", said(triton, "begun hurried"))
    stream.ask("flowing", said(triton, "hurried flow"), timeout=200_000)
    errors: list[str] = []
    while len(errors) < 2:
        heard = stream.next()
        errors += [str(heard)] if isinstance(heard, Exception) else []
    assert all("timeout" in error for error in errors)
    client.infer("tells", said(triton, "cancelled hurried"))
    stream.ask("identity_fp32", floats(triton, 1.5))
    assert stream.next().as_numpy("OUTPUT0").tolist() == [1.5]
    assert stream.end() == []


def test_more_requests_than_are_under_way_at_once(client: Any, triton: Any) -> None:
    stream = Stream(client)
    ids = [str(number) for number in range(300)]
    for id in ids:
        stream.ask("identity_fp32", floats(triton, float(id)), id)
        stream.ask("counting", number(triton, 2), f"many {id}", enable_empty_final_response=True)
    heard = [result.get_response() for result in stream.end()]
    assert [response.id for response in heard if response.model_name == "identity_fp32"] == ids
    many = [response.id for response in heard if response.model_name == "counting"]
    assert sorted(many) == sorted(3 * [f"many {id}" for id in ids])


def test_an_error_in_a_stream_has_the_id_of_its_request(stub: Any, triton: Any) -> None:
    requests = [
        asked(triton, "nobody", ("FP32", [1], NOTHING), raw=[ONE], id="one"),
        asked(triton, "identity_fp32", ("FP32", [3], NOTHING), raw=[ONE], id="two"),
    ]
    responses = list(stub.ModelStreamInfer(iter(requests), timeout=PATIENCE))
    assert sorted(response.infer_response.id for response in responses) == ["one", "two"]
    assert all(response.error_message for response in responses)
    assert all(r.infer_response.parameters["triton_final_response"].bool_param for r in responses)


@pytest.mark.parametrize(("model", "value", "status"), [("nobody", 1, "NOT_FOUND"), ("counting", -1, "FAILED_PRECONDITION")])
def test_the_first_error_ends_a_stream_that_asks_for_statuses(
    client: Any, triton: Any, model: str, value: int, status: str
) -> None:
    stream = Stream(client, headers={"triton_grpc_error": "true"})
    stream.ask(model, number(triton, value))
    if model == "counting":
        assert spoken(stream.next())[1] == 0
    assert stream.next().status() == f"StatusCode.{status}"
    client.stop_stream()


def test_a_stream_in_which_nothing_is_asked_or_nothing_said(stub: Any, triton: Any) -> None:
    assert list(stub.ModelStreamInfer(iter(()), timeout=PATIENCE)) == []
    none = asked(triton, "counting", ("INT32", [1], {"int_contents": [0]}))
    assert list(stub.ModelStreamInfer(iter([none]), timeout=PATIENCE)) == []


def test_a_stream_of_64_mib_messages(client: Any, triton: Any) -> None:
    array = np.arange(16 * MiB, dtype=np.float32)
    stream = Stream(client)
    stream.ask("identity_fp32", [given(triton, array, "FP32")])
    np.testing.assert_array_equal(stream.next().as_numpy("OUTPUT0"), array)
    assert stream.end() == []


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_compressed_stream(client: Any, triton: Any, algorithm: str) -> None:
    stream = Stream(client, compression_algorithm=algorithm)
    for many in (1, 10_000):
        array = np.ones(many, np.float32)
        stream.ask("identity_fp32", [given(triton, array, "FP32")])
        np.testing.assert_array_equal(stream.next().as_numpy("OUTPUT0"), array)
    assert stream.end() == []


def test_a_stream_that_is_cancelled_stops_all_of_its_models(client: Any, triton: Any) -> None:
    stream = Stream(client)
    stream.ask("flowing", said(triton, "flow"))
    stream.ask("waiting", said(triton, "wait"))
    for name in ("flow", "wait"):
        client.infer("tells", said(triton, f"begun {name}"))
    client.stop_stream(cancel_requests=True)
    for name in ("flow", "wait"):
        client.infer("tells", said(triton, f"cancelled {name}"))


def test_many_busy_streams_are_cancelled_at_once(triton: Any, needs: Callable[[str, str], Any], grpc_server: Server) -> None:
    aio = needs("tritonclient", "tritonclient.grpc.aio")
    names = [f"storm {n}" for n in range(40)]

    async def requests(name: str) -> Any:
        yield {"model_name": "flowing", "inputs": said(triton, name)}
        await asyncio.Event().wait()

    async def run() -> None:
        async with aio.InferenceServerClient(f"{grpc_server.host}:{grpc_server.port}") as client:
            streams = [client.stream_infer(requests(name)) for name in names]
            await asyncio.gather(*(anext(stream) for stream in streams))
            for stream in streams:
                stream.cancel()
            for name in names:
                await client.infer("tells", said(triton, f"cancelled {name}"))
            assert await client.is_server_ready()

    asyncio.run(run())


def test_the_deadline_of_a_stream_stops_its_models(client: Any, triton: Any) -> None:
    stream = Stream(client, stream_timeout=3)
    stream.ask("waiting", said(triton, "stream late"))
    assert stream.next().status() == "StatusCode.DEADLINE_EXCEEDED"
    client.infer("tells", said(triton, "cancelled stream late"))
    client.stop_stream()


def test_a_stream_of_asyncio(triton: Any, needs: Callable[[str, str], Any], grpc_server: Server) -> None:
    aio = needs("tritonclient", "tritonclient.grpc.aio")

    async def requests(*all: tuple[str, list[Any], str], more: asyncio.Event | None = None) -> Any:
        for model, inputs, id in all:
            yield {"model_name": model, "inputs": inputs, "request_id": id}
        if more is not None:
            await more.wait()

    async def run() -> None:
        async with aio.InferenceServerClient(f"{grpc_server.host}:{grpc_server.port}") as client:
            asked = requests(
                ("counting", number(triton, 2), "n"), ("identity_fp32", floats(triton, 1), "f"), ("nobody", [], "")
            )
            heard = [(result, error) async for result, error in client.stream_infer(asked)]
            ids = sorted(result.get_response().id for result, _ in heard if result is not None)
            assert ids == ["f", "n", "n"]
            (error,) = [error for _, error in heard if error is not None]
            assert "unknown model 'nobody'" in str(error)
            endless = client.stream_infer(requests(("flowing", said(triton, "aio"), ""), more=asyncio.Event()))
            async for _ in endless:
                break
            endless.cancel()
            await client.infer("tells", said(triton, "cancelled aio"))

    asyncio.run(run())


# ---- the end


def test_a_drain_that_ends_cuts_what_goes_on(triton: Any, grpcio: Any, tmp_path: Path) -> None:
    settings = ["drain = { timeout = 1.0 }", *served_grpc.models()]
    with serving(tmp_path, "served_grpc.py", settings, status=3) as server, ExitStack() as stack:
        at = f"{server.host}:{server.port}"
        unary, streaming = (stack.enter_context(triton.InferenceServerClient(at)) for _ in range(2))
        answers: queue.Queue[Any] = queue.Queue()
        unary.async_infer("waiting", said(triton, "unary"), lambda result, error: answers.put(error))
        stream = Stream(streaming)
        stream.ask("waiting", said(triton, "streamed"))
        for name in ("unary", "streamed"):
            unary.infer("tells", said(triton, f"begun {name}"))
        server.terminate()
        for error in (answers.get(timeout=PATIENCE), stream.next()):
            assert error.status() == "StatusCode.UNAVAILABLE"
            assert "drain" in str(error) or "shutting down" in str(error)


def test_many_calls_share_a_connection(triton: Any, needs: Callable[[str, str], Any], grpc_server: Server) -> None:
    aio = needs("tritonclient", "tritonclient.grpc.aio")

    async def run() -> None:
        async with aio.InferenceServerClient(f"{grpc_server.host}:{grpc_server.port}") as client:
            calls = (client.infer("identity_fp32", floats(triton, float(n)), request_id=str(n)) for n in range(500))
            for n, result in enumerate(await asyncio.gather(*calls)):
                assert (result.get_response().id, result.as_numpy("OUTPUT0").tolist()) == (str(n), [n])

    asyncio.run(run())


def until_refused(client: Any, triton: Any) -> None:
    """Calls until that raises: a signal takes its time."""
    while True:
        client.infer("refusing", said(triton, "x 0"))


def test_a_drain_lets_calls_end_and_refuses_others(triton: Any, grpcio: Any, refused: Any, tmp_path: Path) -> None:
    settings = ["drain = { timeout = 600 }", *served_grpc.models()]
    with (
        serving(tmp_path, "served_grpc.py", settings) as server,
        triton.InferenceServerClient(f"{server.host}:{server.port}") as client,
    ):
        stream = Stream(client)
        stream.ask("waiting", said(triton, "drained"), "under way")
        client.infer("tells", said(triton, "begun drained"))
        server.terminate()
        with pytest.raises(refused) as away:
            until_refused(client, triton)
        assert away.value.status() == "StatusCode.UNAVAILABLE"
        stream.ask("says", said(triton, "drained"))
        assert spoken(stream.next()) == ("under way", "drained", True)
        stream.end()
