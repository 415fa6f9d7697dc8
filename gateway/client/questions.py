"""The requests of each dialect: path, headers and body, and the class that reads the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy.typing as npt

from gateway.client.answers import (
    Answer,
    BodyAnswer,
    CompletionAnswer,
    CompletionEventsAnswer,
    EventsAnswer,
    GeneratedAnswer,
    GenerateEventsAnswer,
    GenerateReplyAnswer,
    InferAnswer,
    InferCallAnswer,
    InferEventsAnswer,
    InferFramesAnswer,
    InferStreamAnswer,
    LinesAnswer,
)
from models.messages import datatype_of
from protocols import v2
from protocols.aws import bidi
from protocols.events import Headers
from protocols.grpc.framing import frame
from protocols.grpc.heads import call_head
from protocols.grpc.metadata import Metadata
from protocols.grpc.v2_client import render_infer_request

_JSON: Headers = ((b"content-type", b"application/json"),)
_EVENTS: Headers = ((b"content-type", bidi.CONTENT_TYPE.encode()),)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request of a dialect, and the class that reads its answer. `body` None: it is sent piece by piece."""

    path: str
    answer: Callable[[], Answer]
    headers: Headers = _JSON
    body: bytes | None = b""
    declares: bool = True
    """True if the head has a content-length for the body. gRPC's heads have none."""
    http2: bool = False
    """True if only HTTP/2 can carry the request."""


def lmi(prompt: str, model: str = "", /, *, stream: bool = False, **parameters: Any) -> Question:
    """Text generation at LMI's routes: one document, or jsonlines."""
    asked = {"inputs": prompt, "parameters": parameters, **({"stream": True} if stream else {})}
    path = f"/predictions/{model}" if model else "/invocations"
    return Question(path=path, body=json.dumps(asked).encode(), answer=LinesAnswer if stream else GeneratedAnswer)


def openai(
    messages: str | Sequence[Mapping[str, str]], model: str = "", /, *, stream: bool = False, **parameters: Any
) -> Question:
    """A chat completion; a str stands for one message of the user."""
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    asked = {"messages": said, "stream": stream, **({"model": model} if model else {}), **parameters}
    answer = CompletionEventsAnswer if stream else CompletionAnswer
    return Question(path="/v1/chat/completions", body=json.dumps(asked).encode(), answer=answer)


def infer(
    inputs: Mapping[str, npt.NDArray[Any]],
    model: str,
    *,
    binary: bool = True,
    stream: bool = False,
    parameters: Mapping[str, Any] = v2.NO_PARAMETERS,
) -> Question:
    """v2's infer, or its infer_stream, with tensors in both directions as binary data or in JSON."""
    tensors = [v2.V2Tensor(name=name, datatype=datatype_of(a.dtype), array=a) for name, a in inputs.items()]
    headers, buffers = v2.encode_infer_request(tensors, parameters=parameters, binary=binary, binary_data_output=binary)
    fields = tuple(field for field in headers if field[0] != b"content-length")
    path, body = f"/v2/models/{model}/infer", b"".join(buffers)
    if not stream:
        return Question(path=path, headers=fields, body=body, answer=InferAnswer)
    if binary:
        fields = (*fields, (b"accept", v2.FRAMES.encode()))
    return Question(
        path=path + "_stream", headers=fields, body=body, answer=InferFramesAnswer if binary else InferEventsAnswer
    )


def generate(members: Mapping[str, Any], model: str, /, *, stream: bool = False, **parameters: Any) -> Question:
    """v2's generate, or generate_stream; text is the member `text_input`."""
    asked = {**members, **({"parameters": parameters} if parameters else {})}
    path = f"/v2/models/{model}/generate" + ("_stream" if stream else "")
    answer = GenerateEventsAnswer if stream else GenerateReplyAnswer
    return Question(path=path, body=json.dumps(asked).encode(), answer=answer)


def grpc_infer(
    inputs: Mapping[str, npt.NDArray[Any]],
    model: str,
    *,
    stream: bool = False,
    typed: bool = False,
    id: str = "",
    parameters: Mapping[str, Any] = v2.NO_PARAMETERS,
    timeout: float | None = None,
    metadata: Metadata = (),
) -> Question:
    """gRPC's ModelInfer, for models with one response to a request, or its ModelStreamInfer with one request, for any model.
    Both need HTTP/2.

    `typed` sends `contents` instead of raw data. `timeout` is the time in seconds that the server has for the call
    (`grpc-timeout`): the server then ends it with DEADLINE_EXCEEDED, while a scope of the caller's abandons the call.
    `protocols.v2.V2Error` for tensors and parameters that gRPC has no form for, `protocols.errors.LocalProtocolError` for
    invalid metadata.
    """
    body = grpc_request(inputs, model, typed=typed, id=id, parameters=parameters)
    method, answer = ("ModelStreamInfer", InferStreamAnswer) if stream else ("ModelInfer", InferCallAnswer)
    head = call_head("inference.GRPCInferenceService", method, authority=b"", timeout=timeout, metadata=metadata)
    return Question(path=head.target.decode(), headers=head.headers, body=body, answer=answer, declares=False, http2=True)


def grpc_request(
    inputs: Mapping[str, npt.NDArray[Any]],
    model: str,
    *,
    typed: bool = False,
    id: str = "",
    parameters: Mapping[str, Any] = v2.NO_PARAMETERS,
) -> bytes:
    """The body of one request of ModelInfer or ModelStreamInfer: a framed message."""
    tensors = [v2.V2Tensor(name=name, datatype=datatype_of(a.dtype), array=a) for name, a in inputs.items()]
    return b"".join(frame(render_infer_request(model, tensors, id=id, parameters=parameters, typed=typed)))


def invoke(endpoint: str, body: bytes, content_type: str = "application/json", *, stream: bool = False) -> Question:
    """SageMaker's InvokeEndpoint, or InvokeEndpointWithResponseStream."""
    path = f"/endpoints/{endpoint}/invocations" + ("-response-stream" if stream else "")
    headers = ((b"content-type", content_type.encode()),)
    return Question(path=path, headers=headers, body=body, answer=EventsAnswer if stream else BodyAnswer)


def bidirectional(endpoint: str) -> Question:
    """SageMaker's InvokeEndpointWithBidirectionalStream: events in both directions."""
    path = f"/endpoints/{endpoint}/invocations-bidirectional-stream"
    return Question(path=path, headers=_EVENTS, body=None, answer=EventsAnswer, http2=True)
