"""Every wire that carries tensors: how a model of tensors is asked over it, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gateway import client
from gateway.client import questions
from gateway.client.answers import BodyAnswer
from gateway.client.conversations import Client, SocketConversation
from gateway.client.questions import Question
from gateway.testing import MemoryGateway
from models.messages import datatype_of
from protocols import v2
from protocols.v2.tensors import encode_binary, to_json

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Ask: TypeAlias = Callable[[MemoryGateway, str, Arrays], Awaitable[dict[str, npt.NDArray[Any]]]]


class Refused(AssertionError):
    """The answer was an error: its text, and its HTTP status or the name of gRPC's code, empty if the wire has none."""

    def __init__(self, text: str, status: str = "") -> None:
        super().__init__(text)
        self.text, self.status = text, status


def _arrays(answer: v2.V2Answer) -> dict[str, npt.NDArray[Any]]:
    return {output.name: output.elements for output in answer.outputs}


async def _ask(served: MemoryGateway, question: Question) -> Any:
    answer = await Client(served.http2() if question.http2 else served.http1()).ask(question)
    if answer.error or answer.status != 200:
        raise Refused(answer.error or bytes(answer.body).decode(), answer.failed_as or str(answer.status))
    return answer


def _through(ask: Callable[[Arrays, str], Question]) -> Ask:
    async def asking(served: MemoryGateway, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        return _arrays((await _ask(served, ask(inputs, model))).messages[-1])

    return asking


def _elsewhere(path: str, *, binary: bool) -> Ask:
    """A v2 request and its reply as the body of another route."""

    async def asking(served: MemoryGateway, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        question = questions.infer(inputs, model, binary=binary)
        asked = await _ask(served, replace(question, path=path.format(model), answer=BodyAnswer))
        headers = [(name, value) for name, value in asked.headers if name != v2.IHCL]
        kind = next(value for name, value in headers if name == b"content-type")
        if b"json-header-size=" in kind:
            headers.append((v2.IHCL, kind.rpartition(b"=")[2]))
        return _arrays(v2.decode_infer_reply(headers, asked.body))

    return asking


async def _raw(served: MemoryGateway, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    """A body of nothing but the binary data, or the bytes of the one element of BYTES: for a model of one input."""
    (array,) = inputs.values()
    data = array.item() if array.dtype.hasobject else b"".join(encode_binary(array, datatype_of(array.dtype)))
    question = questions.infer({}, model)
    asked = replace(question, headers=((v2.IHCL, b"0"),), body=data)
    return _arrays((await _ask(served, asked)).messages[-1])


async def _generate(served: MemoryGateway, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    members = {name: json.loads(to_json(array, datatype_of(array.dtype))) for name, array in inputs.items()}
    (document,) = (await _ask(served, questions.generate(members, model))).messages
    return {name: np.atleast_1d(value) for name, value in document.items() if not name.startswith("model_")}


async def _response_stream(served: MemoryGateway, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
    body = questions.infer(inputs, model, binary=False).body or b""
    answer = await _ask(served, questions.invoke(model, body, stream=True))
    return _arrays(v2.decode_infer_reply([], b"".join(answer.messages)))


def _session(*, binary: bool) -> Ask:
    async def asking(served: MemoryGateway, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        session = SocketConversation(await client.websocket(served.connect(), f"/v2/models/{model}/infer"))
        tensors = [v2.V2Tensor(name=name, datatype=datatype_of(a.dtype), array=a) for name, a in inputs.items()]
        try:
            if not binary:
                await session.send((questions.infer(inputs, model, binary=False).body or b"").decode())
                return _arrays(v2.decode_streamed_reply(await session.receive() or b""))
            await session.send(b"".join(v2.encode_infer_frame(tensors, binary_data_output=True)))
            reply = await session.receive() or b""
            if reply[:1] == b"{":  # an error
                return _arrays(v2.decode_streamed_reply(reply))
            frame = v2.split_frame(reply)
            return _arrays(v2.decode_streamed_reply(frame.body, frame.header_length))
        except v2.V2Error as e:
            raise Refused(e.message) from None
        finally:
            await session.close()

    return asking


WIRES: Mapping[str, Ask] = {
    "JSON": _through(lambda inputs, model: questions.infer(inputs, model, binary=False)),
    "binary": _through(questions.infer),
    "events": _through(lambda inputs, model: questions.infer(inputs, model, binary=False, stream=True)),
    "frames": _through(lambda inputs, model: questions.infer(inputs, model, stream=True)),
    "gRPC": _through(questions.grpc_infer),
    "gRPC, typed": _through(lambda inputs, model: questions.grpc_infer(inputs, model, typed=True)),
    "gRPC stream": _through(lambda inputs, model: questions.grpc_infer(inputs, model, stream=True)),
    "WebSocket, JSON": _session(binary=False),
    "WebSocket, binary": _session(binary=True),
    "InvokeEndpoint, JSON": _elsewhere("/endpoints/{}/invocations", binary=False),
    "InvokeEndpoint, binary": _elsewhere("/endpoints/{}/invocations", binary=True),
    "InvokeEndpointWithResponseStream": _response_stream,
    "multi-model, JSON": _elsewhere("/models/{}/invoke", binary=False),
    "multi-model, binary": _elsewhere("/models/{}/invoke", binary=True),
    "container": _elsewhere("/invocations?model_name={}", binary=False),
    "raw": _raw,
    "generate": _generate,
}
"""The function that asks over each wire, by the wire's name. `raw` takes one input, in the shape that the model declares."""

TEXTS = tuple(
    name
    for name in WIRES
    if "JSON" in name or name in ("events", "container", "generate", "InvokeEndpointWithResponseStream")
)
"""The wires whose requests are JSON, which holds nothing but text."""
