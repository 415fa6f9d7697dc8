"""The stories that the cancel sweep interrupts: clients and models that number what they say, and remember it."""

from __future__ import annotations

import enum
import json
import math
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import trio
import trio.testing

from gateway import client
from gateway.catalog.repository import Repository
from gateway.client import Peer
from gateway.config import BidiConfig, Config, HTTP2Config, LimitsConfig, ListenConfig
from gateway.doorbell import Doorbell
from gateway.errors import TransportLost
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import MemoryTransport
from models.adapt import adapt
from models.blocking import cancel_token
from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Part, PartKind, Prompt, Tensor, Token
from models.session import Session
from models.spec import Model, ModelSpec
from protocols import v2
from protocols.aws import bidi
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Close, ConnectionEnd, Data, End, Frame, Headers, Opcode, Request, Reset, Response
from protocols.http1.connection import HTTP1Connection
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.lmi.response import parse_stream_line
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection

VICTIM, COMPANION, NEIGHBOUR, NEXT, FRESH = "victim", "companion", "neighbour", "next", "fresh"
"""Who is interrupted; who shares its connection; who has its own; who comes afterwards on the same connection, and on
a new one."""

In = TypeVar("In")
Out = TypeVar("Out")


def fragment(data: Buffer, last: bool) -> bytes:
    """A part, with whether others continue it."""
    return bytes(data) + (b"." if last else b"+")


class View(enum.Enum):
    """What a client made of the end of its exchange."""

    PENDING = "pending"
    COMPLETE = "complete"
    ERROR = "error"
    CUT = "cut"


@dataclass(slots=True, eq=False)
class Talk:
    """One exchange as both ends remember it. What was said and heard are the messages' bytes, in order."""

    name: str
    line: str
    model: str
    asked: list[bytes] = field(default_factory=list)
    taken: list[bytes] = field(default_factory=list)
    said: list[bytes] = field(default_factory=list)
    heard: list[bytes] = field(default_factory=list)
    view: View = View.PENDING
    begun: int = 0
    over: int = 0
    left: bool = False
    """The client ended it by itself."""
    calls: int = 1
    """How often the model may be called for it."""
    strands: bool = False
    """Messages that begin alike, up to a full stop, are in order; others are side by side."""
    kept: Callable[[Buffer, bool], bytes] = fragment
    """How a part is remembered."""

    @property
    def query(self) -> str:
        return f"?talk={self.name}"


def named(query: str) -> str:
    """The name of a talk, by the query of its request."""
    return query.removeprefix("talk=")


class Boom(Exception):
    """What a model of the sweep raises at its k-th step."""


class Stage:
    """What the clients and the models of one run share."""

    def __init__(
        self,
        connect: Callable[[str], MemoryTransport],
        survived: Callable[[str, HTTP2Connection], None],
        fired: Callable[[], None],
    ) -> None:
        self.talks: dict[str, Talk] = {}
        self.connect = connect
        """A connection of that name."""
        self.survived = survived
        """Told of an HTTP/2 connection that is about to be closed by its client, and idle."""
        self._fired = fired
        self.crash = Doorbell()
        """Rung, the first model's worker crashes."""
        self.leave = Doorbell()
        """Rung, the victim resets its stream or closes its WebSocket."""
        self.can_leave = False
        self.points = self.raise_at = 0
        self.rude = False
        """The victim's model raises while it is cancelled."""
        self.tls: ssl.SSLContext | None = None
        """With which clients encrypt."""
        self.repository: Repository
        self.start_soon: Callable[..., None]
        """Runs what is neither a client nor the server's, such as a container."""
        self.patient = False
        """While it is true nothing is interrupted."""

    def talk(self, name: str, line: str = "", model: str = "m") -> Talk:
        """A new exchange, on the connection of its own name unless another is given."""
        talk = self.talks[name] = Talk(name, line or name, model)
        return talk

    def point(self, talk: Talk) -> None:
        """A place where the victim's model may raise."""
        if talk.name == VICTIM:
            self.points += 1
            if self.points == self.raise_at:
                self._fired()
                raise Boom("boom") if self.points % 2 else ModelError("said so", code="SaidSo")

    @contextmanager
    def call(self, query: str) -> Iterator[Talk]:
        """A model's call: its beginning and its end are counted."""
        talk = self.talks[named(query)]
        talk.begun += 1
        try:
            yield talk
        except BaseException:
            if self.rude and talk.name == VICTIM:
                raise Boom("rude") from None
            raise
        finally:
            talk.over += 1


class Watched(Generic[In, Out]):
    """A session whose messages are remembered."""

    def __init__(self, stage: Stage, session: Session[Any, Any], talk: Talk) -> None:
        self._stage, self._session, self._talk = stage, session, talk

    async def receive(self) -> In:
        self._stage.point(self._talk)
        message: In = await self._session.receive()
        self._talk.taken.append(said(message))
        self._stage.point(self._talk)
        return message

    async def send(self, message: Out) -> None:
        self._stage.point(self._talk)
        await self._session.send(message)
        self._talk.said.append(said(message))
        self._stage.point(self._talk)


def said(message: Any) -> bytes:
    """The bytes by which a message is remembered."""
    match message:
        case Part():
            return fragment(message.data, message.last)
        case Prompt() | Token():
            return message.text.encode()
        case InferRequest():
            return bytes(message["x"].tobytes())
        case InferResponse():
            return bytes(message.outputs[0].data.tobytes())
        case _:
            raise TypeError(message)


# -- models --------------------------------------------------------------------------------------------------------


def serve(stage: Stage, scenario: Scenario) -> list[ModelSpec]:
    """The scenario's model under the names m and n; the worker of m crashes when `stage.crash` rings."""
    if scenario.served is not None:
        calm, other = map(scenario.served(stage), ("m", "n"))
    else:
        model = scenario.model(stage)

        @asynccontextmanager
        async def give() -> AsyncIterator[Model]:
            yield model

        calm, other = (ModelSpec(name=name, family=scenario.family, load=give) for name in ("m", "n"))

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        async def crash() -> None:
            await stage.crash.wait()
            raise Boom("the worker crashed")

        async with trio.open_nursery() as nursery, calm.load() as model:
            nursery.start_soon(crash)
            yield model
            nursery.cancel_scope.cancel()

    return [replace(calm, load=load, capacity=scenario.capacity), replace(other, capacity=scenario.capacity)]


def echo(stage: Stage) -> Model:
    """Says hello, sends every part back, says goodbye at the end of input or after the part `end`."""

    async def model(session: Session[Part, Part]) -> None:
        with stage.call(session.call.query) as talk:
            me = Watched[Part, Part](stage, session, talk)
            await me.send(Part(data=b"hello"))
            try:
                while True:
                    part = await me.receive()
                    await me.send(part)
                    if part.data == b"end":
                        break
            except trio.EndOfChannel:
                pass
            await me.send(Part(data=b"goodbye", kind=PartKind.UTF8))

    return model


def both_ways(stage: Stage) -> Model:
    """Reads in a task of its own while it writes."""

    async def model(session: Session[Part, Part]) -> None:
        with stage.call(session.call.query) as talk:
            me = Watched[Part, Part](stage, session, talk)

            async def listen() -> None:
                try:
                    while (await me.receive()).data != b"end":
                        pass
                except trio.EndOfChannel:
                    return
                except trio.Cancelled:
                    if stage.rude and talk.name == VICTIM:
                        raise Boom("rude listener") from None
                    raise

            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                for i in range(5):
                    await me.send(Part(data=b"tick %d" % i * 20))
                    await trio.sleep(0.0013)

    return model


def early(stage: Stage) -> Model:
    """Has enough after the first part."""

    async def model(session: Session[Part, Part]) -> None:
        with stage.call(session.call.query) as talk:
            me = Watched[Part, Part](stage, session, talk)
            await me.receive()
            await me.send(Part(data=b"enough " * 300))

    return model


def generate(stage: Stage) -> Model:
    """A few tokens, and some work after the last of them."""

    async def model(session: Session[Prompt, Token]) -> None:
        with stage.call(session.call.query) as talk:
            me = Watched[Prompt, Token](stage, session, talk)
            prompt = await me.receive()
            for i in range(prompt.parameters.max_new_tokens):
                if i % 3 == 1:
                    await trio.sleep(0.0007)
                await me.send(Token(text=f" {i}" * 20, id=i))
            await trio.sleep(0.0021)

    return model


def generate_in_threads(stage: Stage) -> Model:
    """A few tokens from a synchronous generator. It cannot know which of them were sent: it says what it offered."""

    def model(prompt: Prompt) -> Iterator[str]:
        with stage.call(f"talk={prompt.text}") as talk:
            talk.taken.append(prompt.text.encode())
            for i in range(prompt.parameters.max_new_tokens):
                stage.point(talk)
                cancel_token().check()
                talk.said.append(b" %d" % i)
                yield f" {i}"

    return adapt(model, family=Family.TEXT)[0]


def double(stage: Stage) -> Model:
    """x + x."""

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        with stage.call(session.call.query) as talk:
            me = Watched[InferRequest, InferResponse](stage, session, talk)
            x = (await me.receive())["x"]
            await trio.sleep(0.0011)
            await me.send(InferResponse(outputs=[Tensor(name="y", data=x + x)]))

    return model


def double_at_once(stage: Stage) -> Model:
    """x + x, without waiting but for the slow: a request that is there whole is answered in the step that found it."""

    async def model(session: Session[InferRequest, InferResponse]) -> None:
        with stage.call(session.call.query) as talk:
            me = Watched[InferRequest, InferResponse](stage, session, talk)
            x = (await me.receive())["x"]
            if talk.name.endswith("slow"):
                await trio.sleep(0.0011)
            await me.send(InferResponse(outputs=[Tensor(name="y", data=x + x)]))

    return model


# -- clients -------------------------------------------------------------------------------------------------------

_DATE = 1_700_000_000_000
_EVENTS: Headers = [(b"content-type", bidi.CONTENT_TYPE.encode())]
_JSON: Headers = [(b"content-type", b"application/json")]


class HTTP2Line:
    """Streams that share a connection, with small windows so that answers wait for their readers."""

    def __init__(self, stage: Stage, name: str, *, window: int = 1024) -> None:
        limits = HTTP2Limits(initial_window=window, max_window=window)
        self.machine = HTTP2Connection(Role.CLIENT, limits)
        self.peer = Peer(stage.connect(name), self.machine)
        if stage.tls is not None:
            self.peer.transport = TLSTransport(self.peer.transport, stage.tls, server_side=False, hostname="localhost")
        self.stage = stage
        self._inboxes: dict[int, trio.MemorySendChannel[Any]] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deals events out to the streams until the connection ends."""
        try:
            if isinstance(self.peer.transport, TLSTransport):
                await self.peer.transport.handshake()
        except TransportLost:
            self.peer.close()
        task_status.started()
        try:
            while not isinstance(event := await self.peer.next_event(), ConnectionEnd):
                inbox = self._inboxes.get(getattr(event, "stream", 0))
                if inbox is not None:
                    inbox.send_nowait(event)
        except TransportLost:
            pass
        except RemoteProtocolError as e:
            _cut_off(e)
        finally:
            for stream in list(self._inboxes):
                self.forget(stream)

    def forget(self, stream: int) -> None:
        """The stream's reader hears no more."""
        inbox = self._inboxes.pop(stream, None)
        if inbox is not None:
            inbox.close()

    def open(self, path: str, headers: Headers, length: int | None = None) -> tuple[int, trio.MemoryReceiveChannel[Any]]:
        """Queues a request's head."""
        if not self.machine.can_open:
            raise TransportLost("no stream can be opened any more")
        stream = self.machine.next_stream
        self._inboxes[stream], inbox = trio.open_memory_channel[Any](math.inf)
        self.machine.send(
            Request(
                stream=stream, method=b"POST", target=path.encode(), authority=b"a", headers=headers, content_length=length
            )
        )
        return stream, inbox

    async def write(self, stream: int, data: Buffer) -> None:
        """Sends a piece of the body while anybody wants it."""
        if self.machine.is_open(stream):
            await self.peer.send(Data(stream=stream, buffers=(data,)))

    async def end(self, stream: int) -> None:
        if self.machine.is_open(stream):
            await self.peer.send(End(stream=stream))

    async def reset_when_told(self, talk: Talk, stream: int) -> None:
        """The victim leaves when the sweep says so."""
        self.stage.can_leave = True
        await self.stage.leave.wait()
        if self.machine.is_open(stream):
            talk.left = True
            self.machine.send(Reset(stream=stream, code=8))
            self.forget(stream)
            with suppress(TransportLost):
                await self.peer.flush()


async def on_stream(
    line: HTTP2Line,
    talk: Talk,
    path: str,
    headers: Headers,
    body: Callable[[], AsyncGenerator[Buffer, None]],
    parse: Parser,
    *,
    pace: float = 0.0,
    length: int | None = None,
) -> None:
    """One request and its answer on an HTTP/2 connection; `pace` is the reader's, in seconds a frame."""

    async def write(stream: int) -> None:
        try:
            async with aclosing(body()) as pieces:
                async for piece in pieces:
                    await line.write(stream, piece)
            await line.end(stream)
        except TransportLost:
            return

    async def read(events: trio.MemoryReceiveChannel[Any]) -> View:
        async for event in events:
            match event:
                case Response():
                    parse.head(event)
                case Data():
                    await trio.sleep(pace)
                    parse.data(event.buffers[0])
                    line.peer.credit(event)
                    with suppress(TransportLost):  # what was written before is still to be read
                        await line.peer.flush()
                case End():
                    return parse.end()
                case Reset():
                    return View.CUT
        return View.CUT

    try:
        stream, events = line.open(path, headers, length)
        await line.peer.flush()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, stream)
            if talk.name == VICTIM:
                nursery.start_soon(line.reset_when_told, talk, stream)
            talk.view = await _or_cut(read(events))
            nursery.cancel_scope.cancel()
    except TransportLost:
        talk.view = View.CUT


async def _or_cut(reading: Awaitable[View]) -> View:
    try:
        return await reading
    except TransportLost:
        return View.CUT
    except RemoteProtocolError as e:
        _cut_off(e)
        return View.CUT


def _cut_off(error: RemoteProtocolError) -> None:
    """A client may meet a connection that ends in the middle of something, and no other violation."""
    if "the connection ended" not in str(error):
        raise error


class Parser:
    """What a client makes of an answer's body. This one keeps it whole."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.status = 0
        self.headers: Headers = []
        self.body = bytearray()

    def head(self, response: Response) -> None:
        """The answer begins."""
        self.status, self.headers = response.status, response.headers

    def data(self, piece: Buffer) -> None:
        self.body += piece

    def end(self) -> View:
        """The body is whole."""
        return View.COMPLETE if self.status == 200 else View.ERROR


class PartsParser(Parser):
    """An event stream."""

    def __init__(self, talk: Talk) -> None:
        super().__init__(talk)
        self._decoder = bidi.ResponseDecoder()
        self._failed = False

    def data(self, piece: Buffer) -> None:
        if self.status == 200:
            self._decoder.receive_data(piece)
            self._pull()

    def _pull(self) -> None:
        while isinstance(event := self._decoder.next_event(), bidi.PayloadPart | bidi.StreamFailure):
            if isinstance(event, bidi.PayloadPart):
                self.talk.heard.append(self.talk.kept(event.data, event.completion is bidi.Completion.COMPLETE))
            else:
                self._failed = True

    def end(self) -> View:
        if self.status != 200:
            return View.ERROR
        self._decoder.receive_eof()
        self._pull()
        return View.ERROR if self._failed else View.COMPLETE


class LinesParser(Parser):
    """LMI's jsonlines."""

    _last = False
    _failed = False

    def data(self, piece: Buffer) -> None:
        super().data(piece)
        while self.status == 200 and (at := self.body.find(b"\n")) >= 0:
            line = parse_stream_line(self.body[:at])
            del self.body[: at + 1]
            assert not self._last, "a line after the last"
            self._last = "generated_text" in line
            if line.get("details", {}).get("finish_reason") == "error":
                self._failed = True
            elif not line["token"].get("special_token"):
                self.talk.heard.append(line["token"]["text"].encode())

    def end(self) -> View:
        if self.status != 200:
            return View.ERROR
        assert self._last, "the stream ended without its last line"
        assert not self.body, "the stream ended in the middle of a line"
        return View.ERROR if self._failed else View.COMPLETE


class TensorParser(Parser):
    """A v2 reply."""

    def end(self) -> View:
        if self.status != 200:
            return View.ERROR
        reply = v2.decode_infer_reply(self.headers, self.body)
        self.talk.heard.append(reply.outputs[0].array.tobytes())
        return View.COMPLETE


async def over_http1(
    peer: Peer,
    stream: int,
    talk: Talk,
    path: str,
    headers: Headers,
    body: Callable[[], AsyncGenerator[Buffer, None]],
    parse: Parser,
    *,
    pace: float = 0.0,
    length: int | None = None,
    method: bytes = b"POST",
) -> None:
    """One request and its answer on an HTTP/1.1 connection. A chunked one says Expect, and does not wait for it."""
    head = Request(
        stream=stream,
        method=method,
        target=path.encode(),
        authority=b"a",
        headers=headers,
        content_length=length,
        expects_continue=length is None,
    )

    async def write() -> None:
        try:
            await peer.send(head)
            async with aclosing(body()) as pieces:
                async for piece in pieces:
                    await peer.send(Data(stream=stream, buffers=(piece,)))
            await peer.send(End(stream=stream))
        except TransportLost:
            return
        except LocalProtocolError as e:
            if "takes no further request" not in str(e):  # the server has left before the first
                raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await trio.lowlevel.checkpoint()
        talk.view = await _or_cut(_answer(peer, parse, pace))
        nursery.cancel_scope.cancel()


async def _answer(peer: Peer, parse: Parser, pace: float) -> View:
    while True:
        match event := await peer.next_event():
            case Response():
                parse.head(event)
            case Data():
                await trio.sleep(pace)
                peer.credit(event)
                parse.data(event.buffers[0])
            case End():
                return parse.end()
            case ConnectionEnd():
                return View.CUT


async def infer_at_once(peer: Peer, stream: int, talk: Talk) -> None:
    """A small v2 request in one write, and its answer."""
    body, tensor, headers = _tensor(talk, 40)
    talk.asked.append(tensor)
    try:
        await peer.send(*client.post(stream, f"/v2/models/{talk.model}/infer{talk.query}", body, headers))
    except TransportLost:
        pass  # what was said before is still to be read
    except LocalProtocolError as e:
        if "takes no further request" not in str(e):
            raise
    talk.view = await _or_cut(_answer(peer, TensorParser(talk), 0.0))


async def pipelined(stage: Stage, *talks: Talk) -> None:
    """Small v2 requests in one write; each answer is read by a machine of its own, a byte at a time."""
    transport = stage.connect(VICTIM)
    machines = [HTTP1Connection(Role.CLIENT) for _ in talks]
    requests = bytearray()
    for machine, talk in zip(machines, talks, strict=True):
        body, tensor, headers = _tensor(talk, 40)
        talk.asked.append(tensor)
        for event in client.post(1, f"/v2/models/{talk.model}/infer{talk.query}", body, headers):
            machine.send(event)
        requests += b"".join(machine.data_to_send(len(body) + 4096))
    buffer, received = memoryview(bytearray(4096)), bytearray()

    async def read(machine: HTTP1Connection, parse: Parser) -> View:
        while True:
            match machine.next_event():
                case Response() as head:
                    parse.head(head)
                case Data(buffers=(piece,)):
                    parse.data(piece)
                case End():
                    return parse.end()
                case ConnectionEnd():
                    return View.CUT
                case _:
                    while not received and (n := transport.try_receive_into(buffer)) != 0:
                        if n is None:
                            await transport.wait_readable()
                        else:
                            received.extend(buffer[:n])
                    if received:
                        machine.receive_data(received[:1])
                        del received[:1]
                    else:
                        machine.receive_eof()

    with suppress(TransportLost):
        assert transport.try_send([requests]) == len(requests)
    for machine, talk in zip(machines, talks, strict=True):
        talk.view = await _or_cut(read(machine, TensorParser(talk)))
    transport.close()


async def over_websocket(
    stage: Stage,
    talk: Talk,
    frames: Sequence[tuple[bytes, bool]],
    *,
    pace: float = 0.0,
    path: str = "",
    ends: bool = False,
) -> None:
    """A duplex conversation of frames; the model ends it, where it is told (`ends`) that there is no more input."""
    path = path or f"/models/{talk.model}/invocations-bidirectional-stream"
    transport = stage.connect(talk.line)
    try:
        peer = await client.websocket(transport, path + talk.query)
    except (TransportLost, RemoteProtocolError) as e:
        refused = str(e).rpartition(" ")[2].isdigit()
        talk.view = View.ERROR if refused else View.CUT
        transport.close()
        return
    machine = peer.machine
    assert isinstance(machine, WebSocketConnection)

    async def write() -> None:
        first = True
        try:
            for data, last in frames:
                await trio.sleep(0.0003)
                if not machine.is_open:
                    return
                talk.asked.append(talk.kept(data, last))
                await peer.send(Frame(opcode=Opcode.BINARY if first else Opcode.CONTINUATION, fin=last, data=data))
                first = last
            if ends and machine.is_open and peer.end_of_input:
                await peer.send(Frame(opcode=Opcode.TEXT, fin=True, data=peer.end_of_input))
        except TransportLost:
            return

    async def read() -> View:
        while True:
            match event := await peer.next_event():
                case Frame():
                    await trio.sleep(pace)
                    machine.credit(len(event.data))
                    talk.heard.append(talk.kept(event.data, event.fin))
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
            try:
                await peer.send(Close())
            except TransportLost:
                return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        if talk.name == VICTIM:
            nursery.start_soon(close_when_told)
        talk.view = await _or_cut(read())
        nursery.cancel_scope.cancel()
    transport.close()


# -- what is said --------------------------------------------------------------------------------------------------


def events_of(
    talk: Talk, parts: Sequence[tuple[bytes, bool]], *, cut: int = 0
) -> Callable[[], AsyncGenerator[Buffer, None]]:
    """Parts as a BiDi client sends them, each event in two pieces, or in pieces of `cut` bytes."""

    async def body() -> AsyncGenerator[Buffer, None]:
        for data, last in parts:
            await trio.sleep(0.0003)
            talk.asked.append(talk.kept(data, last))
            state = bidi.Completion.COMPLETE if last else bidi.Completion.PARTIAL
            event = b"".join(bidi.encode_request_part(data, bidi.DataType.BINARY, state, date_ms=_DATE))
            size = cut or len(event) // 2 + 1
            for at in range(0, len(event), size):
                yield event[at : at + size]
        yield b"".join(bidi.encode_request_end(date_ms=_DATE))

    return body


def numbered(name: str, sizes: Sequence[int]) -> list[tuple[bytes, bool]]:
    """Parts of these sizes or a little more, each third one whole and the others to be continued."""
    return [(f"{name} {i} ".encode().ljust(size, b"."), i % 3 == 2) for i, size in enumerate(sizes)]


def pieces_of(talk: Talk, body: bytes, message: bytes, n: int) -> Callable[[], AsyncGenerator[Buffer, None]]:
    """A body in n pieces."""

    async def pieces() -> AsyncGenerator[Buffer, None]:
        talk.asked.append(message)
        size = len(body) // n + 1
        for at in range(0, len(body), size):
            await trio.sleep(0.0003)
            yield body[at : at + size]

    return pieces


async def bidi_talk(
    line: HTTP2Line, talk: Talk, parts: Sequence[tuple[bytes, bool]], *, pace: float = 0.0, cut: int = 0
) -> None:
    """A BiDi conversation on one stream."""
    path = f"/endpoints/{talk.model}/invocations-bidirectional-stream{talk.query}"  # by which the ledger knows it
    headers = [*_EVENTS, (bidi.MODEL_QUERY_STRING.encode(), talk.query[1:].encode())]
    await on_stream(line, talk, path, headers, events_of(talk, parts, cut=cut), PartsParser(talk), pace=pace)


def _tensor(talk: Talk, elements: int) -> tuple[bytes, bytes, Headers]:
    array = np.arange(elements, dtype=np.int32) + sum(talk.name.encode())
    headers, buffers = v2.encode_infer_request(
        [v2.V2Tensor(name="x", datatype="INT32", array=array)], binary_data_output=True
    )
    return b"".join(buffers), array.tobytes(), [h for h in headers if h[0] != b"content-length"]


async def infer(peer: Peer, stream: int, talk: Talk, *, elements: int = 1500, pieces: int = 4, pace: float = 0.0) -> None:
    """A v2 request with a binary tensor over HTTP/1.1, its body in pieces."""
    body, tensor, headers = _tensor(talk, elements)
    path = f"/v2/models/{talk.model}/infer{talk.query}"
    content = pieces_of(talk, body, tensor, pieces)
    await over_http1(peer, stream, talk, path, headers, content, TensorParser(talk), length=len(body), pace=pace)


async def generate_over_http1(
    stage: Stage, talk: Talk, *, tokens: int = 6, pace: float = 0.0, chunked: int = 0, prompt: str = ""
) -> None:
    """An LMI request answered in jsonlines; `chunked` is the number of chunks of its body, 0 for a declared length."""
    prompt = prompt or talk.name
    body = json.dumps({"inputs": prompt, "parameters": {"max_new_tokens": tokens}, "stream": True}).encode()
    path = f"/predictions/{talk.model}{talk.query}"
    peer = client.http1(stage.connect(talk.line))
    content = pieces_of(talk, body, prompt.encode(), chunked or 1)
    length = None if chunked else len(body)
    await over_http1(peer, 1, talk, path, _JSON, content, LinesParser(talk), length=length, pace=pace)
    peer.close()


# -- scenarios -----------------------------------------------------------------------------------------------------

Play = Callable[[Stage], Awaitable[None]]

_SMALL = Config(
    listen=ListenConfig(port=-1),
    limits=LimitsConfig(total_bytes=4 * 1024 * 1024, send_buffer=1024, read_ahead=4096, connection_send_buffer=4096),
    http2=HTTP2Config(initial_window=2048, max_window=4096),
    bidi=BidiConfig(session_timeout=600.0),
)


# What a stream may hold: the window that RFC 9113 gives it until the client has acknowledged ours, and its growth.
_STREAM = 65_535 + 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A story: who serves, what the clients do, and what a fresh client does afterwards."""

    name: str
    wire: str
    model: Callable[[Stage], Model]
    family: Family
    play: Play
    again: Play
    memory: int
    """The most that the byte budget may have had in use, whatever happens."""
    config: Config = _SMALL
    capacity: int = 8
    """Of the workers."""
    buffer: int = 1500
    """Bytes in flight in each direction of a connection, as in a kernel's socket buffers."""
    tls: bool = False
    rude: bool = False
    """The victim's model raises while it is cancelled."""
    cuts: bool = False
    """An error in the middle of an answer has no words: the answer is cut off."""
    served: Callable[[Stage], Callable[[str], ModelSpec]] | None = None
    """Makes the specs of the models, by their names, in place of `model`."""
    without: frozenset[str] = frozenset()
    """Targets that it has not."""
    ahead: int = 1_000_000
    """Messages that the victim's model may have said, or be about to say, and its client not heard."""


async def _together(*plays: Awaitable[Any]) -> None:
    async def run(play: Awaitable[Any]) -> None:
        await play

    async with trio.open_nursery() as nursery:
        for play in plays:
            nursery.start_soon(run, play)


@asynccontextmanager
async def _line(stage: Stage, name: str, **more: Any) -> AsyncIterator[HTTP2Line]:
    """A connection, and its end."""
    line = HTTP2Line(stage, name, **more)
    async with trio.open_nursery() as nursery:
        await nursery.start(line.run)
        yield line
        await trio.testing.wait_all_tasks_blocked()
        stage.survived(name, line.machine)
        line.peer.close()


def _bidi_scenario(
    name: str,
    model: Callable[[Stage], Model],
    sizes: Sequence[int],
    *,
    cut: int = 0,
    window: int = 1024,
    neighbour: bool = False,
    talk: Callable[..., Awaitable[None]] = bidi_talk,
    **more: Any,
) -> Scenario:
    """Two streams at once on one connection, one of them the victim; then, if the connection lives, a third."""

    async def play(stage: Stage) -> None:
        victim, companion = stage.talk(VICTIM), stage.talk(COMPANION, VICTIM, "n")

        async def three() -> None:
            async with _line(stage, VICTIM, window=window) as line:
                await _together(
                    talk(line, victim, numbered(VICTIM, sizes), pace=0.0004, cut=cut),
                    talk(line, companion, numbered(COMPANION, [30, 700])),
                )
                if line.machine.can_open:
                    await talk(line, stage.talk(NEXT, VICTIM, "n"), numbered(NEXT, [20]))

        async def elsewhere() -> None:
            if neighbour:
                async with _line(stage, NEIGHBOUR) as line:
                    await talk(line, stage.talk(NEIGHBOUR, model="n"), numbered(NEIGHBOUR, [30, 700]))

        await _together(three(), elsewhere())

    async def again(stage: Stage) -> None:
        async with _line(stage, FRESH) as line:
            await talk(line, stage.talk(FRESH), numbered(FRESH, [20, 40]))

    return Scenario(name=name, wire="http/2", model=model, family=Family.PARTS, play=play, again=again, **more)


async def _infer_again(stage: Stage) -> None:
    peer = client.http1(stage.connect(FRESH))
    await infer(peer, 1, stage.talk(FRESH), elements=20, pieces=1)
    peer.close()


def _v2_http1() -> Scenario:
    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model="n")

        async def twice() -> None:
            peer = client.http1(stage.connect(VICTIM))
            await infer(peer, 1, victim, pace=0.0002)
            assert isinstance(peer.machine, HTTP1Connection)
            if victim.view in (View.COMPLETE, View.ERROR) and peer.machine.idle and not peer.machine.must_close:
                await infer(peer, 2, stage.talk(NEXT, VICTIM, "n"), elements=100)
            peer.close()

        async def once() -> None:
            peer = client.http1(stage.connect(NEIGHBOUR))
            await infer(peer, 1, neighbour, elements=400, pieces=2)
            peer.close()

        await _together(twice(), once())

    # the body, what is read ahead of it, and the answer, which is more than the send buffer; for two clients
    memory = 2 * (6200 + 4096 + 2048 + 6200)
    return Scenario(
        name="v2", wire="http/1.1", model=double, family=Family.TENSOR, play=play, again=_infer_again, memory=memory
    )


def _inline() -> Scenario:
    """Small requests one after the other, each there whole when it is found: a leader answers most of them itself."""

    async def play(stage: Stage) -> None:
        async def line(own: str, *names: str) -> None:
            peer = client.http1(stage.connect(own))
            assert isinstance(peer.machine, HTTP1Connection)
            for stream, name in enumerate(names, 1):
                talk = stage.talk(name, own, "m" if name == VICTIM else "n")
                await infer_at_once(peer, stream, talk)
                if talk.view not in (View.COMPLETE, View.ERROR) or not peer.machine.idle or peer.machine.must_close:
                    break
            peer.close()

        await _together(
            line(VICTIM, "first", VICTIM, f"{NEXT}-slow", f"{NEXT}-1", f"{NEXT}-2"),
            line(NEIGHBOUR, NEIGHBOUR, f"{NEIGHBOUR}-1", f"{NEIGHBOUR}-slow", f"{NEIGHBOUR}-2"),
        )

    return Scenario(
        name="inline",
        wire="http/1.1",
        model=double_at_once,
        family=Family.TENSOR,
        play=play,
        again=_infer_again,
        memory=2 * 4096,
    )


def _pipelined() -> Scenario:
    async def play(stage: Stage) -> None:
        await pipelined(stage, stage.talk(VICTIM), stage.talk(NEXT, VICTIM, "n"))

    return Scenario(
        name="pipelined",
        wire="http/1.1",
        model=double,
        family=Family.TENSOR,
        play=play,
        again=_infer_again,
        memory=2 * 4096,
    )


def _v2_http2() -> Scenario:
    async def post(line: HTTP2Line, talk: Talk, elements: int, pace: float = 0.0) -> None:
        body, tensor, headers = _tensor(talk, elements)
        path = f"/v2/models/{talk.model}/infer{talk.query}"
        content = pieces_of(talk, body, tensor, 3)
        await on_stream(line, talk, path, headers, content, TensorParser(talk), length=len(body), pace=pace)

    async def play(stage: Stage) -> None:
        victim, companion = stage.talk(VICTIM), stage.talk(COMPANION, VICTIM, "n")
        async with _line(stage, VICTIM) as line:
            await _together(post(line, victim, 1500, 0.0002), post(line, companion, 300))
            if line.machine.can_open:
                await post(line, stage.talk(NEXT, VICTIM, "n"), 30)

    async def again(stage: Stage) -> None:
        async with _line(stage, FRESH) as line:
            await post(line, stage.talk(FRESH), 20)

    return Scenario(
        name="v2-h2",
        wire="http/2",
        model=double,
        family=Family.TENSOR,
        play=play,
        again=again,
        memory=2 * (_STREAM + 6200 + 6200),
    )


def _lmi(name: str, model: Callable[[Stage], Model], *, chunked: int = 0, prompt: str = "", tokens: int = 6) -> Scenario:
    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model="n")
        await _together(
            generate_over_http1(stage, victim, pace=0.0004, chunked=chunked, prompt=prompt, tokens=tokens),
            generate_over_http1(stage, neighbour, tokens=3),
        )

    async def again(stage: Stage) -> None:
        await generate_over_http1(stage, stage.talk(FRESH), tokens=2)

    memory = 2 * (4096 + 2048 + 2 * len(prompt) + 1024)
    return Scenario(
        name=name, wire="http/1.1", model=model, family=Family.TEXT, play=play, again=again, memory=memory, buffer=600
    )


def _queue() -> Scenario:
    """One slot: the victim waits for it, or holds it while others wait."""

    async def play(stage: Stage) -> None:
        first, victim, third = stage.talk("first"), stage.talk(VICTIM), stage.talk("third")

        async def late(delay: float, talk: Talk) -> None:
            await trio.sleep(delay)
            await generate_over_http1(stage, talk, tokens=3)

        await _together(late(0, first), late(0.0001, victim), late(0.0002, third))

    async def again(stage: Stage) -> None:
        await generate_over_http1(stage, stage.talk(FRESH), tokens=2)

    return Scenario(
        name="queue",
        wire="http/1.1",
        model=generate,
        family=Family.TEXT,
        play=play,
        again=again,
        memory=3 * (4096 + 2048 + 1024),
        capacity=1,
    )


def _websocket(name: str, sizes: Sequence[int], *, memory: int, config: Config = _SMALL, **more: Any) -> Scenario:
    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model="n")
        await _together(
            over_websocket(stage, victim, [*numbered(VICTIM, sizes), (b"end", True)], pace=0.0021),
            over_websocket(stage, neighbour, [*numbered(NEIGHBOUR, [30, 30, 30]), (b"end", True)]),
        )

    async def again(stage: Stage) -> None:
        await over_websocket(stage, stage.talk(FRESH), [(b"end", True)])

    return Scenario(
        name=name,
        wire="websocket",
        model=echo,
        family=Family.PARTS,
        play=play,
        again=again,
        memory=memory,
        config=config,
        **more,
    )


_LARGE = replace(
    _SMALL,
    limits=replace(_SMALL.limits, read_ahead=128 * 1024),
    http2=HTTP2Config(initial_window=16_384, max_window=65_536),
)

ONE_OF_EACH: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        _v2_http1(),
        _v2_http2(),
        _pipelined(),
        _inline(),
        _lmi("lmi", generate),
        _lmi("chunked", generate, chunked=4, prompt="victim" + " words" * 900),
        _lmi("threads", generate_in_threads, tokens=4),
        _queue(),
        _bidi_scenario("bidi", echo, [10, 900, 2600, 5], memory=3 * (_STREAM + 2600), neighbour=True),
        _bidi_scenario("tls", echo, [10, 900, 2600, 5], memory=3 * (_STREAM + 2600), tls=True),
        _bidi_scenario("early", early, [10, 900, 2600, 3000, 900], memory=3 * (_STREAM + 2600)),
        _bidi_scenario("nursery", both_ways, [10, 900, 300], memory=3 * _STREAM),
        _bidi_scenario("rude", both_ways, [10, 900, 300], memory=3 * _STREAM, rude=True),
        _bidi_scenario(
            "bidi-large",
            echo,
            [10, 70_000, 5],
            cut=16_000,
            window=20_000,
            config=_LARGE,
            buffer=32_768,
            # the part as it is put together, and its echo until it is written
            memory=3 * (65_535 + 65_536) + 70_200 + 70_000,
        ),
        _websocket("websocket", [10, 900, 2600, 1800, 1500, 1700, 1600, 1400], memory=2 * (4096 + 2048 + 2600)),
        _websocket("websocket-large", [10, 70_000, 5], memory=3 * 70_000 + 4096, config=_LARGE, buffer=32_768),
    )
}
