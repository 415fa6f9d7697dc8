"""The client's readers take what the server sends: answers have no limits of their own on any wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from gateway import client
from gateway.client import questions
from gateway.client.conversations import Client, SocketConversation
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.messages import InferRequest, InferResponse, Tensor
from protocols import v2

MiB = 1024**2
NUMPY_DIMS = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32
ANSWERS: Mapping[str, tuple[Tensor, ...]] = {
    "more dimensions than a request may have": (Tensor(name="o", data=np.arange(2).reshape(2, *(1,) * 16)),),
    "all dimensions": (Tensor(name="o", data=np.zeros((1,) * NUMPY_DIMS, np.float32)),),
    "more outputs than a request may have inputs": tuple(Tensor(name=f"o{i}", data=np.array([i])) for i in range(300)),
    "a million numbers": (Tensor(name="o", data=np.full(1_000_001, 7, np.int8)),),
    "a long text": (Tensor(name="o", data=np.array([b"a" * 34 * MiB], object)),),
}

WIRES: Mapping[str, Callable[..., Any]] = {
    "JSON": lambda x: questions.infer(x, "m", binary=False),
    "binary": lambda x: questions.infer(x, "m"),
    "events": lambda x: questions.infer(x, "m", binary=False, stream=True),
    "frames": lambda x: questions.infer(x, "m", stream=True),
    "gRPC": lambda x: questions.grpc_infer(x, "m"),
    "gRPC stream": lambda x: questions.grpc_infer(x, "m", stream=True),
}
# a second and more on some wires
WHICH = [pytest.param(name, marks=pytest.mark.sweep) if name == "a long text" else name for name in ANSWERS]


def says(request: InferRequest) -> InferResponse:
    return InferResponse(outputs=ANSWERS[request["which"][0].decode()])


def check(answer: v2.V2Answer, wanted: tuple[Tensor, ...]) -> None:
    assert [output.name for output in answer.outputs] == [tensor.name for tensor in wanted]
    for output, tensor in zip(answer.outputs, wanted, strict=True):
        assert np.array_equal(output.elements, tensor.data)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("wire", WIRES)
async def test_each_answer_is_read_by_our_own_client(wire: str, which: str) -> None:
    question = WIRES[wire]({"which": np.array([which.encode()], object)})
    async with memory_gateway([spec_of(says, "m")]) as served:
        peer = served.http2() if question.http2 else served.http1()
        answer = (await Client(peer).ask(question)).check()
        check(answer.messages[0], ANSWERS[which])


@pytest.mark.parametrize("which", WHICH)
async def test_each_answer_is_read_in_a_session_too(which: str) -> None:
    asked = v2.V2Tensor(name="which", datatype="BYTES", array=np.array([which.encode()], object))
    async with memory_gateway([spec_of(says, "m")]) as served:
        session = SocketConversation(await client.websocket(served.connect(), "/v2/models/m/infer"))
        await session.send(b"".join(v2.encode_infer_frame([asked], binary_data_output=True)))
        frame = v2.split_frame(await session.receive() or b"")
        check(v2.decode_streamed_reply(frame.body, frame.header_length), ANSWERS[which])
        await session.close()


def test_a_reader_has_the_limits_that_its_call_sets() -> None:
    body = b'{"outputs":[{"name":"o","datatype":"INT8","shape":[1,1,1],"data":[1]}]}'
    assert v2.decode_infer_reply([], body)["o"].elements.ndim == 3
    with pytest.raises(v2.V2Error, match="at most 2 dimensions, got 3"):
        v2.decode_infer_reply([], body, limits=v2.V2Limits(dims=2))
    shape = [1] * (NUMPY_DIMS + 1)
    body = b'{"outputs":[{"name":"o","datatype":"INT8","shape":%b,"data":[1]}]}' % str(shape).encode()
    with pytest.raises(v2.V2Error, match=f"at most {NUMPY_DIMS} dimensions, got {NUMPY_DIMS + 1}"):
        v2.decode_infer_reply([], body, limits=v2.V2Limits(dims=1000))
