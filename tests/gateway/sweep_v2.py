"""The sweep's stories of v2 with many responses: streams in both forms, requests in pieces, and sessions over a WebSocket."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np
import trio

from gateway.client import Peer, questions
from gateway.client.answers import Answer
from gateway.testing.stories.clients import Hearing, Socket
from gateway.testing.stories.talk import Talk
from models.messages import Family, InferRequest, InferResponse, Tensor
from models.session import Session
from models.spec import Model, ModelSpec
from protocols import v2
from protocols.events import Buffer, Frame, Opcode
from tests.gateway.sweep_scenarios import (
    _STREAM,
    FRESH,
    NEIGHBOUR,
    VICTIM,
    HTTP2Line,
    Scenario,
    Stage,
    Sweeping,
    ask,
    in_pieces,
    on_socket,
    over_http1,
    over_http2,
    played,
    tensor_of,
    together,
)

_ROWS, _ROW = 8, 300
"""The rows of a request that comes in pieces, and the bytes of each row."""


# -- models and what is made of their answers ------------------------------------------------------------------------


@played
async def repeat(me: Sweeping[InferRequest, InferResponse]) -> None:
    """Says x five times."""
    x = (await me.receive())["x"]
    for number in range(5):
        if number % 2:
            await trio.sleep(0.0007)
        await me.send(InferResponse(outputs=[Tensor(name="y", data=x + number)]))
    await trio.sleep(0.0011)


def row_by_row(stage: Stage) -> Callable[[str], ModelSpec]:
    """Answers each piece with its rows."""

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        with stage.call(session.call.query) as talk:
            while True:
                stage.point(talk)
                piece = await session.receive()
                for row in piece["x"]:
                    talk.take(row.tobytes())
                stage.point(talk)
                for row in piece["x"]:
                    await session.send(InferResponse(outputs=[Tensor(name="y", data=row)]))
                    talk.say(row.tobytes())
                    stage.point(talk)
                if piece.last:
                    return

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        yield model

    return lambda name: ModelSpec(name=name, family=Family.TENSOR, load=load, pieces=True)


@played
async def converse(me: Sweeping[InferRequest, InferResponse]) -> None:
    """Says each x twice, until one is empty."""
    while (x := (await me.receive())["x"]).size:
        for _ in range(2):
            await me.send(InferResponse(outputs=[Tensor(name="y", data=x)]))


@final
class SessionHearing(Hearing):
    """Replies as frames and as text."""

    async def frame(self, frame: Frame) -> None:
        assert frame.fin
        if frame.opcode is Opcode.TEXT:
            reply = v2.decode_streamed_reply(frame.data)
        else:
            found = v2.split_frame(frame.data)
            reply = v2.decode_streamed_reply(found.body, found.header_length)
        self.talk.hear(reply["y"].elements.tobytes())


# -- clients -----------------------------------------------------------------------------------------------------------


async def _stream(elements: int, pieces: int, where: Peer | HTTP2Line, talk: Talk, **how: Any) -> None:
    """Over HTTP/1.1 a request in JSON, answered by events; over HTTP/2 a binary one, answered by frames."""
    x = tensor_of(talk, elements, np.int64)
    question = questions.infer({"x": x}, talk.model, binary=isinstance(where, HTTP2Line), stream=True)
    await ask(where, talk, question, in_pieces(talk, question.body or b"", pieces, x.tobytes()), **how)


async def _rows(where: Peer | HTTP2Line, talk: Talk, **how: Any) -> None:
    """A request whose rows are sent one by one, each in two pieces, and answered by frames."""
    first = sum(talk.name.encode()) % 200
    array = np.full((_ROWS, _ROW), first, np.uint8) + np.arange(_ROWS, dtype=np.uint8)[:, np.newaxis]
    question = questions.infer({"x": array}, talk.model, stream=True)
    text = (question.body or b"")[: -array.nbytes]

    async def content() -> AsyncGenerator[Buffer, None]:
        yield text
        for row in array:
            await trio.sleep(0.0003)
            talk.ask(row.tobytes())
            yield row[:100].tobytes()
            await trio.sleep(0.0002)
            yield row[100:].tobytes()

    await ask(where, talk, replace(question, body=None), content, **how)


async def _session(stage: Stage, talk: Talk, sizes: list[int], *, pace: float = 0.0) -> None:
    """Requests of these sizes as frames and as text in turn, some in fragments, and an empty one at the end."""

    async def writing(socket: Socket) -> None:
        for turn, size in enumerate([*sizes, 0]):
            x = tensor_of(talk, size, np.int64)
            talk.ask(x.tobytes())
            tensor = v2.V2Tensor(name="x", datatype="INT64", array=x)
            if turn % 2:
                _, body = v2.encode_infer_request([tensor], binary=False)
                message, opcode = b"".join(body), Opcode.TEXT
            else:
                message, opcode = b"".join(v2.encode_infer_frame([tensor], binary_data_output=True)), Opcode.BINARY
            cut = len(message) // 2 if turn % 3 else len(message)
            for at, data in enumerate(filter(None, (message[:cut], message[cut:]))):
                await trio.sleep(0.0003)
                if not socket.machine.is_open:
                    return
                last = at == 1 or cut == len(message)
                await socket.peer.send(Frame(opcode=Opcode.CONTINUATION if at else opcode, fin=last, data=data))

    hearing = SessionHearing(talk, Answer(), pace)
    await on_socket(stage, talk, f"/v2/models/{talk.model}/infer", hearing, writing)


# -- scenarios ---------------------------------------------------------------------------------------------------------


def _websocket() -> Scenario:
    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model="n")
        await together(_session(stage, victim, [3, 60, 150, 100, 20, 40], pace=0.0021), _session(stage, neighbour, [3, 40]))

    async def again(stage: Stage) -> None:
        await _session(stage, stage.talk(FRESH), [3])

    return Scenario(
        name="v2-session",
        wire="websocket",
        model=converse,
        family=Family.TENSOR,
        play=play,
        again=again,
        # the read-ahead, the message at hand, and an answer beyond the send buffer
        memory=2 * (4096 + 2048 + 1600 + 1600),
        without=frozenset(["raise"]),  # which ends a request there, and not the exchange
    )


_TENSORS: dict[str, Any] = {"model": repeat, "family": Family.TENSOR}
_PIECES: dict[str, Any] = {**_TENSORS, "served": row_by_row}

V2: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        over_http1("v2-stream", partial(_stream, 40, 2), memory=2 * (4096 + 2048 + 1024), **_TENSORS),
        over_http2("v2-stream-h2", partial(_stream, 150, 3), memory=2 * (_STREAM + 2 * 1600), **_TENSORS),
        over_http1("v2-pieces", _rows, memory=2 * (4096 + 2048), **_PIECES),
        over_http2("v2-pieces-h2", _rows, memory=2 * (_STREAM + 1600), **_PIECES),
        _websocket(),
    )
}
