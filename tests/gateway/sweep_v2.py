"""The sweep's stories of v2 with many responses: streams in both forms, requests in pieces, and sessions over a WebSocket."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import trio

from gateway import client
from gateway.errors import TransportLost
from models.messages import Family, InferRequest, InferResponse, Tensor
from models.session import Session
from models.spec import Model, ModelSpec
from protocols import v2
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Close, ConnectionEnd, Frame, Headers, Opcode
from protocols.sse import ServerSentEvent, SSEDecoder
from protocols.websocket.connection import WebSocketConnection
from tests.gateway.sweep_scenarios import (
    _JSON,
    _STREAM,
    COMPANION,
    FRESH,
    NEIGHBOUR,
    NEXT,
    VICTIM,
    HTTP2Line,
    Parser,
    Scenario,
    Stage,
    Talk,
    View,
    Watched,
    _line,
    _or_cut,
    _together,
    on_stream,
    over_http1,
    pieces_of,
)

_ROW = 300  # bytes of a row that comes in pieces
_FRAMES: Headers = [(b"accept", v2.FRAMES.encode())]


# -- models and what is made of their answers ------------------------------------------------------------------------


def repeat(stage: Stage) -> Model:
    """Says x five times."""

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        with stage.call(session.call.query) as talk:
            me = Watched[InferRequest, InferResponse](stage, session, talk)
            x = (await me.receive())["x"]
            for number in range(5):
                if number % 2:
                    await trio.sleep(0.0007)
                await me.send(InferResponse(outputs=[Tensor(name="y", data=x + number)]))
            await trio.sleep(0.0011)

    return model


def row_by_row(stage: Stage) -> Callable[[str], ModelSpec]:
    """Answers each piece with its rows."""

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        with stage.call(session.call.query) as talk:
            while True:
                stage.point(talk)
                piece = await session.receive()
                talk.taken += [row.tobytes() for row in piece["x"]]
                stage.point(talk)
                for row in piece["x"]:
                    await session.send(InferResponse(outputs=[Tensor(name="y", data=row)]))
                    talk.said.append(row.tobytes())
                    stage.point(talk)
                if piece.last:
                    return

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        yield model

    return lambda name: ModelSpec(name=name, family=Family.TENSOR, load=load, pieces=True)


def converse(stage: Stage) -> Model:
    """Says each x twice, until one is empty."""

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        with stage.call(session.call.query) as talk:
            me = Watched[InferRequest, InferResponse](stage, session, talk)
            while (x := (await me.receive())["x"]).size:
                await me.send(InferResponse(outputs=[Tensor(name="y", data=x)]))
                await me.send(InferResponse(outputs=[Tensor(name="y", data=x)]))

    return model


class _Replies(Parser):
    """A stream of replies."""

    _failed = False

    def told(self, data: Buffer, header_length: int | None = None) -> None:
        assert not self._failed, "a response after the last"
        try:
            self.talk.heard.append(v2.decode_streamed_reply(data, header_length)["y"].elements.tobytes())
        except v2.V2Error:
            self._failed = True

    def end(self) -> View:
        return View.ERROR if self.status != 200 or self._failed else View.COMPLETE


class EventsParser(_Replies):
    """Server-sent events."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(talk)
        self._decoder = SSEDecoder()

    def data(self, piece: Buffer) -> None:
        if self.status == 200:
            self._decoder.receive_data(piece)
            while isinstance(event := self._decoder.next_event(), ServerSentEvent):
                self.told(event.data)


class FramesParser(_Replies):
    """Frames."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(talk)
        self._decoder = v2.FrameDecoder()

    def data(self, piece: Buffer) -> None:
        if self.status == 200:
            self._decoder.receive_data(piece)
            while isinstance(frame := self._decoder.next_frame(), v2.V2Frame):
                self.told(frame.body, frame.header_length)

    def end(self) -> View:
        if self.status == 200:
            self._decoder.receive_eof()
        return super().end()


# -- clients -----------------------------------------------------------------------------------------------------------


def _numbers(talk: Talk, elements: int) -> Any:
    return np.arange(elements, dtype=np.int64) + sum(talk.name.encode())


async def _stream_over_http1(stage: Stage, talk: Talk, *, elements: int = 40, pace: float = 0.0) -> None:
    """A request in JSON, answered by events."""
    x = _numbers(talk, elements)
    tensor = {"name": "x", "shape": [elements], "datatype": "INT64", "data": x.tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    peer = client.http1(stage.connect(talk.line))
    path = f"/v2/models/{talk.model}/infer_stream{talk.query}"
    content = pieces_of(talk, body, x.tobytes(), 2)
    await over_http1(peer, 1, talk, path, _JSON, content, EventsParser(talk), length=len(body), pace=pace)
    peer.close()


async def _stream_over_http2(line: HTTP2Line, talk: Talk, *, elements: int = 150, pace: float = 0.0) -> None:
    """A binary request, answered by frames."""
    x = v2.V2Tensor(name="x", datatype="INT64", array=_numbers(talk, elements))
    headers, buffers = v2.encode_infer_request([x], binary_data_output=True)
    body = b"".join(buffers)
    asked = [*(h for h in headers if h[0] != b"content-length"), *_FRAMES]
    path = f"/v2/models/{talk.model}/infer_stream{talk.query}"
    content = pieces_of(talk, body, x.elements.tobytes(), 3)
    await on_stream(line, talk, path, asked, content, FramesParser(talk), length=len(body), pace=pace)


def _rows(talk: Talk, rows: int) -> tuple[Headers, Callable[[], AsyncGenerator[Buffer, None]]]:
    """A request whose rows are sent one by one, each in two pieces."""
    array = np.full((rows, _ROW), sum(talk.name.encode()) % 200, np.uint8) + np.arange(rows, dtype=np.uint8)[:, np.newaxis]
    x = v2.V2Tensor(name="x", datatype="UINT8", array=array)
    headers, (text, *_) = v2.encode_infer_request([x], binary_data_output=True)

    async def content() -> AsyncGenerator[Buffer, None]:
        yield text
        for row in array:
            await trio.sleep(0.0003)
            talk.asked.append(row.tobytes())
            yield row[:100].tobytes()
            await trio.sleep(0.0002)
            yield row[100:].tobytes()

    return [*(h for h in headers if h[0] != b"content-length"), *_FRAMES], content


async def _pieces_over_http1(stage: Stage, talk: Talk, rows: int, *, pace: float = 0.0) -> None:
    headers, content = _rows(talk, rows)
    peer = client.http1(stage.connect(talk.line))
    path = f"/v2/models/{talk.model}/infer_stream{talk.query}"
    await over_http1(peer, 1, talk, path, headers, content, FramesParser(talk), pace=pace)
    peer.close()


async def _pieces_over_http2(line: HTTP2Line, talk: Talk, rows: int, *, pace: float = 0.0) -> None:
    headers, content = _rows(talk, rows)
    path = f"/v2/models/{talk.model}/infer_stream{talk.query}"
    await on_stream(line, talk, path, headers, content, FramesParser(talk), pace=pace)


async def _session(stage: Stage, talk: Talk, sizes: list[int], *, pace: float = 0.0) -> None:
    """Requests of these sizes as frames and as text in turn, some in fragments, and an empty one at the end."""
    transport = stage.connect(talk.line)
    try:
        peer = await client.websocket(transport, f"/v2/models/{talk.model}/infer{talk.query}")
    except (TransportLost, RemoteProtocolError) as e:
        talk.view = View.ERROR if str(e).rpartition(" ")[2].isdigit() else View.CUT
        transport.close()
        return
    machine = peer.machine
    assert isinstance(machine, WebSocketConnection)

    async def write() -> None:
        with suppress(TransportLost):
            for turn, size in enumerate([*sizes, 0]):
                x = _numbers(talk, size)
                talk.asked.append(x.tobytes())
                tensor = v2.V2Tensor(name="x", datatype="INT64", array=x)
                if turn % 2:
                    _, body = v2.encode_infer_request([tensor], binary=False)
                    message, opcode = b"".join(body), Opcode.TEXT
                else:
                    message, opcode = b"".join(v2.encode_infer_frame([tensor], binary_data_output=True)), Opcode.BINARY
                cut = len(message) // 2 if turn % 3 else len(message)
                for at, data in enumerate(filter(None, (message[:cut], message[cut:]))):
                    await trio.sleep(0.0003)
                    if not machine.is_open:
                        return
                    last = at == 1 or cut == len(message)
                    await peer.send(Frame(opcode=Opcode.CONTINUATION if at else opcode, fin=last, data=data))

    async def read() -> View:
        while True:
            match event := await peer.next_event():
                case Frame():
                    await trio.sleep(pace)
                    machine.credit(len(event.data))
                    assert event.fin
                    if event.opcode is Opcode.TEXT:
                        reply = v2.decode_streamed_reply(event.data)
                    else:
                        frame = v2.split_frame(event.data)
                        reply = v2.decode_streamed_reply(frame.body, frame.header_length)
                    talk.heard.append(reply["y"].elements.tobytes())
                case Close():
                    with suppress(TransportLost):
                        await peer.flush()
                    if talk.left:
                        return View.CUT
                    return View.COMPLETE if event.code == 1000 else View.ERROR
                case ConnectionEnd():
                    return View.CUT

    async def close_when_told() -> None:
        stage.can_leave = True
        await stage.leave.wait()
        if machine.is_open:
            talk.left = True
            with suppress(TransportLost):
                await peer.send(Close())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        if talk.name == VICTIM:
            nursery.start_soon(close_when_told)
        talk.view = await _or_cut(read())
        nursery.cancel_scope.cancel()
    transport.close()


# -- scenarios ---------------------------------------------------------------------------------------------------------


def _http1(name: str, ask: Any, memory: int, **more: Any) -> Scenario:
    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model="n")
        await _together(ask(stage, victim, pace=0.0004), ask(stage, neighbour))

    async def again(stage: Stage) -> None:
        await ask(stage, stage.talk(FRESH))

    return Scenario(
        name=name, wire="http/1.1", family=Family.TENSOR, play=play, again=again, memory=memory, buffer=600, **more
    )


def _http2(name: str, ask: Any, memory: int, **more: Any) -> Scenario:
    async def play(stage: Stage) -> None:
        victim, companion = stage.talk(VICTIM), stage.talk(COMPANION, VICTIM, "n")
        async with _line(stage, VICTIM) as line:
            await _together(ask(line, victim, pace=0.0004), ask(line, companion))
            if line.machine.can_open:
                await ask(line, stage.talk(NEXT, VICTIM, "n"))

    async def again(stage: Stage) -> None:
        async with _line(stage, FRESH) as line:
            await ask(line, stage.talk(FRESH))

    return Scenario(name=name, wire="http/2", family=Family.TENSOR, play=play, again=again, memory=memory, **more)


def _websocket() -> Scenario:
    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model="n")
        await _together(_session(stage, victim, [3, 60, 150, 100, 20, 40], pace=0.0021), _session(stage, neighbour, [3, 40]))

    async def again(stage: Stage) -> None:
        await _session(stage, stage.talk(FRESH), [3])

    return Scenario(
        name="v2-session",
        wire="websocket",
        model=converse,
        family=Family.TENSOR,
        play=play,
        again=again,
        # what is read ahead, the message at hand, and an answer beyond the send buffer
        memory=2 * (4096 + 2048 + 1600 + 1600),
        without=frozenset(["raise"]),  # which ends a request there, and not the exchange
    )


V2: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        _http1("v2-stream", _stream_over_http1, 2 * (4096 + 2048 + 1024), model=repeat),
        _http2("v2-stream-h2", _stream_over_http2, 2 * (_STREAM + 2 * 1600), model=repeat),
        _http1(
            "v2-pieces",
            lambda stage, talk, pace=0.0: _pieces_over_http1(stage, talk, 8, pace=pace),
            2 * (4096 + 2048),
            model=repeat,
            served=row_by_row,
        ),
        _http2(
            "v2-pieces-h2",
            lambda line, talk, pace=0.0: _pieces_over_http2(line, talk, 8, pace=pace),
            2 * (_STREAM + 1600),
            model=repeat,
            served=row_by_row,
        ),
        _websocket(),
    )
}
