"""The sweep's stories of gRPC: a call with one answer, and a stream with requests of two models, side by side and in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np
import trio

from gateway.client import questions
from gateway.client.answers import StreamCallAnswer
from gateway.testing.stories.talk import Talk
from models.messages import Family, InferRequest, InferResponse, Tensor
from models.session import Session
from models.spec import Model, ModelSpec
from protocols.events import Buffer
from protocols.grpc.v2_client import StreamedAnswer, read_streamed_response
from tests.gateway.sweep_scenarios import (
    _STREAM,
    COMPANION,
    FRESH,
    VICTIM,
    HTTP2Line,
    Scenario,
    Stage,
    Sweeping,
    ask,
    double,
    in_pieces,
    over_http2,
    tensor_of,
)

_RESPONSES = {"m": 3, "n": 1}
"""To each request, by the model: that of the first is decoupled."""


# -- models and what is made of their answers ------------------------------------------------------------------------


def counted(stage: Stage) -> Callable[[str], ModelSpec]:
    """Says what it was asked, with a number behind it."""

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        with stage.call(session.call.query) as talk:
            me = Sweeping[InferRequest, InferResponse](session, talk, stage)
            x = (await me.receive())["x"]
            for number in range(_RESPONSES[session.call.model]):
                await trio.sleep(0.0007)
                await me.send(InferResponse(outputs=[Tensor(name="y", data=np.append(x, np.uint8(number)))]))

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        yield model

    return lambda name: ModelSpec(name=name, family=Family.TENSOR, load=load, decoupled=_RESPONSES[name] > 1)


@final
class RequestsAnswer(StreamCallAnswer):
    """A stream whose messages are the responses of its models; `failed` are the requests that were told so."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[StreamedAnswer] = []

    def _message(self, data: Buffer) -> None:
        found = read_streamed_response(data)
        if found.error:
            self.failed.append(found)
        else:
            self.messages.append(found.answer)


# -- clients -----------------------------------------------------------------------------------------------------------


async def _infer(line: HTTP2Line, talk: Talk, **how: Any) -> None:
    """One request and one answer."""
    x = tensor_of(talk, {VICTIM: 1500, COMPANION: 300}.get(talk.name, 20))
    question = questions.grpc_infer({"x": x}, talk.model)
    body = in_pieces(talk, question.body or b"", 3, x.tobytes())
    await ask(line, talk, replace(question, body=None), body, **how)


async def _stream(line: HTTP2Line, talk: Talk, *, pause: float = 0.0003, **how: Any) -> None:
    """Several requests, the first of them of the talk's model; each in two pieces, after a pause."""
    sizes = {VICTIM: (600, 40, 700, 300, 20, 500), COMPANION: (30, 200)}.get(talk.name, (20, 40))
    models = [talk.model, *("n", "m", "n", "n", "m")][: len(sizes)]
    talk.strands, talk.calls = True, len(sizes)

    async def body() -> AsyncGenerator[Buffer, None]:
        for number, (model, size) in enumerate(zip(models, sizes, strict=True)):
            await trio.sleep(pause)
            text = f"{talk.name}{number}.".encode().ljust(size, b".")
            talk.ask(text)
            message = questions.grpc_request({"x": np.frombuffer(text, np.uint8)}, model, id=str(number))
            half = len(message) // 2
            yield message[:half]
            yield message[half:]

    question = replace(questions.grpc_infer({}, talk.model, stream=True), body=None, answer=RequestsAnswer)
    answer = await ask(line, talk, question, body, **how)
    assert isinstance(answer, RequestsAnswer)
    assert {failed.answer.id for failed in answer.failed} <= set(map(str, range(len(sizes))))
    if talk.name == FRESH:
        assert (len(answer.messages), answer.failed) == (sum(_RESPONSES[model] for model in models), [])


# -- scenarios ---------------------------------------------------------------------------------------------------------

_STREAMS: dict[str, Any] = {
    "pace": 0.0011,
    "model": double,
    "family": Family.TENSOR,
    "served": counted,
    "memory": 2 * (_STREAM + 2 * 1200),
    "without": frozenset(["raise"]),  # which ends a request there, and not the exchange
}

GRPC: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        over_http2("grpc", _infer, pace=0.0002, model=double, family=Family.TENSOR, memory=2 * (_STREAM + 6200 + 6200)),
        over_http2("grpc-stream", _stream, **_STREAMS),
    )
}

SLOW = over_http2("grpc-stream-slow", partial(_stream, pause=0.004), **_STREAMS)
"""A stream whose requests are answered, most of them, before the next one comes."""
