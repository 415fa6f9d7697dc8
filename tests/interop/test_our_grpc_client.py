"""Our client of gRPC, and a server of grpcio's with Triton's own messages: calls, streams, statuses, deadlines, cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gateway.client import BrokenOff, Refused, grpc_infer
from gateway.client.sync import Client

pytestmark = [
    pytest.mark.usefixtures("triton"),  # before any server: where they are absent, none need start
    pytest.mark.filterwarnings("default"),  # their own
]
PATIENCE = 60
X = np.arange(3, dtype=np.float32)


@pytest.fixture(scope="module")
def grpcio(needs: Callable[[str, str], Any]) -> Any:
    return needs("grpcio", "grpc")


@pytest.fixture(scope="module")
def triton(needs: Callable[[str, str], Any], grpcio: Any) -> Any:
    """Its messages."""
    return needs("tritonclient", "tritonclient.grpc.service_pb2")


class Theirs:
    """The service: a model's name says what becomes of it; every other one gives its inputs back."""

    def __init__(self, grpcio: Any, triton: Any) -> None:
        self._grpcio, self._triton = grpcio, triton
        self.metadata: dict[str, Any] = {}
        self.remaining = 0.0
        self.asked, self.left = threading.Event(), threading.Event()

    def answer(self, request: Any) -> Any:
        answer = self._triton.ModelInferResponse(model_name=request.model_name, id=request.id)
        for tensor in request.inputs:
            answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        answer.raw_output_contents.extend(request.raw_input_contents)
        return answer

    def infer(self, request: Any, context: Any) -> Any:
        self.metadata, self.remaining = dict(context.invocation_metadata()), context.time_remaining()
        if request.model_name == "nobody":
            context.abort(self._grpcio.StatusCode.NOT_FOUND, "nobody: 100 % unknown, café")
        if request.model_name == "stuck":
            context.add_callback(self.left.set)
            self.asked.set()
            assert self.left.wait(PATIENCE)
        return self.answer(request)

    def stream(self, requests: Any, context: Any) -> Iterator[Any]:
        for request in requests:
            for _ in range(2):
                yield self._triton.ModelStreamInferResponse(infer_response=self.answer(request))
            if request.model_name == "says":
                yield self._triton.ModelStreamInferResponse(error_message="no more")
            if request.model_name == "ends":
                context.abort(self._grpcio.StatusCode.ABORTED, "no more")


@pytest.fixture
def theirs(grpcio: Any, triton: Any) -> Iterator[tuple[Theirs, Client]]:
    """The service behind a port, and a client of ours that calls it."""
    served = Theirs(grpcio, triton)
    request, answer = triton.ModelInferRequest.FromString, triton.ModelInferResponse.SerializeToString
    methods = {
        "ModelInfer": grpcio.unary_unary_rpc_method_handler(served.infer, request, answer),
        "ModelStreamInfer": grpcio.stream_stream_rpc_method_handler(
            served.stream, request, triton.ModelStreamInferResponse.SerializeToString
        ),
    }
    with ThreadPoolExecutor(4) as pool:
        server = grpcio.server(pool, options=[("grpc.max_receive_message_length", -1)])
        server.add_generic_rpc_handlers([grpcio.method_handlers_generic_handler("inference.GRPCInferenceService", methods)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with Client(f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
                yield served, client
        finally:
            server.stop(None).wait(PATIENCE)


def test_a_call_and_a_stream(theirs: tuple[Theirs, Client]) -> None:
    served, client = theirs
    asked = grpc_infer({"x": X}, "any", id="7", timeout=30, metadata=[("x-tenant", "blue"), ("seed-bin", b"\x00\xff")])
    (reply,) = client.call(asked).messages
    assert (reply.id, reply["x"].elements.tolist()) == ("7", [0, 1, 2])
    assert (served.metadata["x-tenant"], served.metadata["seed-bin"]) == ("blue", b"\x00\xff")
    assert 20 < served.remaining <= 30
    large = np.arange(6_000_000, dtype=np.float32)  # more than all windows together
    (reply,) = client.call(grpc_infer({"x": large}, "any")).messages
    assert np.array_equal(reply["x"].elements, large)
    assert [r["x"].elements.tolist() for r in client.stream(grpc_infer({"x": X}, "any", stream=True))] == [[0, 1, 2]] * 2


def test_what_goes_wrong(theirs: tuple[Theirs, Client]) -> None:
    _, client = theirs
    with pytest.raises(Refused) as refused:
        client.call(grpc_infer({"x": X}, "nobody"))
    assert str(refused.value) == "NOT_FOUND: nobody: 100 % unknown, café"
    for model, said in (("says", "no more"), ("ends", "ABORTED: no more")):
        stream = client.stream(grpc_infer({"x": X}, model, stream=True))
        assert (next(stream).model_name, next(stream).model_name) == (model, model)
        with pytest.raises(BrokenOff) as broken:
            next(stream)
        assert str(broken.value) == said


def test_who_takes_too_long_is_left(theirs: tuple[Theirs, Client]) -> None:
    served, client = theirs
    client.timeout = 0.5
    while not served.asked.is_set():  # which may take longer than that
        with pytest.raises(TimeoutError):
            client.call(grpc_infer({"x": X}, "stuck"))
    assert served.left.wait(PATIENCE)
