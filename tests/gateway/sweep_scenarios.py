"""The stories that the cancel sweep interrupts: clients and models that number what they say, and remember it."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import msgspec
import numpy as np
import trio
import trio.testing

from gateway import client
from gateway.catalog.repository import Repository
from gateway.client import Peer, questions
from gateway.client.answers import Answer, InferAnswer, LinesAnswer
from gateway.client.questions import Question
from gateway.config import BidiConfig, Config, HTTP2Config, LimitsConfig, ListenConfig
from gateway.doorbell import Doorbell
from gateway.errors import TransportLost
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import MemoryTransport
from gateway.testing import MemoryPlace, MemoryProcess, MemoryProcesses, current_process, in_memory_processes
from gateway.testing.stories import models
from gateway.testing.stories.clients import Body, Hearing, Socket, Streams, read_http1, viewed, write
from gateway.testing.stories.models import END, In, Out, Watched
from gateway.testing.stories.talk import Talk, View, named
from models.adapt import adapt
from models.blocking import cancel_token
from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Part, PartKind, Prompt, Tensor, Token
from models.session import Session
from models.spec import Model, ModelSpec
from protocols.aws import bidi
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Close, ConnectionEnd, Data, End, Frame, Head, Opcode, Request, Response
from protocols.http1.connection import HTTP1Connection
from protocols.http2.connection import HTTP2Connection
from protocols.roles import Role

HANG_TIMEOUT = 0.04
"""Virtual seconds after which a process that is stopped is killed."""
VICTIM, COMPANION, NEIGHBOUR, NEXT, FRESH = "victim", "companion", "neighbour", "next", "fresh"
"""Names of talks: the interrupted one; one on its connection; one on a connection of its own; one that comes afterwards on
the same connection, and one on a new connection."""


class Boom(Exception):
    """Raised by a model of the sweep at its k-th step."""


class Stage:
    """The state that the clients and the models of one run share."""

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
        """Ringing it crashes the first model's worker."""
        self.leave = Doorbell()
        """Ringing it makes the victim reset its stream or close its WebSocket."""
        self.can_leave = False
        self.points = self.raise_at = 0
        self.rude = False
        """True if the victim's model raises while it is cancelled."""
        self.tls: ssl.SSLContext | None = None
        """The context with which clients encrypt; None for clear text."""
        self.processes: MemoryProcesses | None = None
        """The processes of the first model; None if it runs in the gateway."""
        self.there: dict[str, MemoryProcess | None] = {}
        """The process that each call has begun in."""
        self.repository: Repository
        self.start_soon: Callable[..., None]
        """Runs what is neither a client nor the server's, such as a container."""
        self.patient = False
        """While True, nothing is interrupted."""

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
        """A model's call."""
        talk = self.talks[named(query)]
        self.there[talk.name] = current_process()
        with talk.call():
            try:
                yield talk
            except BaseException:
                if self.rude and talk.name == VICTIM:
                    raise Boom("rude") from None
                raise


class Sweeping(Watched[In, Out]):
    """A session whose model may raise before and after each message."""

    def __init__(self, session: Session[In, Out], talk: Talk, stage: Stage) -> None:
        super().__init__(session, talk)
        self.session, self.stage = session, stage

    async def receive(self) -> In:
        self.stage.point(self.talk)
        message = await super().receive()
        self.stage.point(self.talk)
        return message

    async def send(self, message: Out) -> None:
        self.stage.point(self.talk)
        await super().send(message)
        self.stage.point(self.talk)


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
    if scenario.place is not None:
        alike: dict[str, Any] = {"instances": 2, "hang_timeout": HANG_TIMEOUT, "place": scenario.place}
        calm, stage.processes = in_memory_processes(calm, **alike)
        other, _ = in_memory_processes(other, **alike)

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


def played(act: Callable[[Sweeping[Any, Any]], Awaitable[None]]) -> Callable[[Stage], Model]:
    """Returns a function that makes a model whose sessions run `act`."""

    def model_of(stage: Stage) -> Model:
        async def model(session: Session[Any, Any]) -> None:
            with stage.call(session.call.query) as talk:
                await act(Sweeping(session, talk, stage))

        return model

    return model_of


@played
async def echo(me: Sweeping[Part, Part]) -> None:
    """Sends every part back."""
    await models.echo(me, goodbye=Part(data=b"goodbye", kind=PartKind.UTF8))


@played
async def both_ways(me: Sweeping[Part, Part]) -> None:
    """Reads in a task of its own while it writes."""

    async def listen() -> None:
        try:
            await models.listen(me)
        except trio.Cancelled:
            if me.stage.rude and me.talk.name == VICTIM:
                raise Boom("rude listener") from None
            raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        for i in range(5):
            await me.send(Part(data=b"tick %d" % i * 20))
            await trio.sleep(0.0013)


@played
async def early(me: Sweeping[Part, Part]) -> None:
    """Has enough after the first part."""
    await me.receive()
    await me.send(Part(data=b"enough " * 300))


@played
async def generate(me: Sweeping[Prompt, Token]) -> None:
    """A few tokens, and some work after the last of them."""
    prompt = await me.receive()
    for i in range(prompt.parameters.max_new_tokens):
        if i % 3 == 1:
            await trio.sleep(0.0007)
        await me.send(Token(text=f" {i}" * 20, id=i))
    await trio.sleep(0.0021)


def generate_in_threads(stage: Stage) -> Model:
    """A few tokens from a synchronous generator. It cannot know which of them were sent: it says what it offered."""

    def model(prompt: Prompt) -> Iterator[str]:
        with stage.call(f"talk={prompt.text}") as talk:
            talk.take(prompt.text.encode())
            for i in range(prompt.parameters.max_new_tokens):
                stage.point(talk)
                cancel_token().check()
                talk.say(b" %d" % i)
                yield f" {i}"

    return adapt(model, family=Family.TEXT)[0]


@played
async def double(me: Sweeping[InferRequest, InferResponse]) -> None:
    """x + x."""
    x = (await me.receive())["x"]
    await trio.sleep(0.0011)
    await me.send(InferResponse(outputs=[Tensor(name="y", data=x + x)]))


@played
async def double_at_once(me: Sweeping[InferRequest, InferResponse]) -> None:
    """x + x, without waiting but for the slow: a request that is there whole is answered in the step that found it."""
    x = (await me.receive())["x"]
    if me.talk.name.endswith("slow"):
        await trio.sleep(0.0011)
    await me.send(InferResponse(outputs=[Tensor(name="y", data=x + x)]))


# -- clients -------------------------------------------------------------------------------------------------------

_DATE = 1_700_000_000_000
_TURN = 0.0003
"""Seconds that a writer waits before each piece."""


def fail(error: RemoteProtocolError) -> None:
    """A client may meet a connection that ends in the middle of something, and no other violation."""
    raise error


class HTTP2Line(Streams):
    """Streams that share a connection, with small windows so that answers wait for their readers."""

    def __init__(self, stage: Stage, name: str, *, window: int = 1024) -> None:
        super().__init__(stage.connect(name), window, fail)
        if stage.tls is not None:
            self.peer.transport = TLSTransport(self.peer.transport, stage.tls, server_side=False, hostname="localhost")
        self.stage = stage

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deals events out to the streams until the connection ends."""
        try:
            if isinstance(self.peer.transport, TLSTransport):
                await self.peer.transport.handshake()
        except TransportLost:
            self.peer.close()
        task_status.started()
        await self.deal()

    async def reset_when_told(self, talk: Talk, stream: int) -> None:
        """Resets the victim's stream when the sweep orders it."""
        self.stage.can_leave = True
        await self.stage.leave.wait()
        if self.reset(stream):
            talk.left = True
            with suppress(TransportLost):
                await self.peer.flush()


async def ask(
    where: Peer | HTTP2Line,
    talk: Talk,
    question: Question,
    body: Body,
    *,
    pace: float = 0.0,
    stream: int = 1,
    method: bytes = b"POST",
) -> Answer:
    """One request and its answer; `pace` is the reader's, in seconds a piece. A body that the question has not is of no
    length that its client would know."""
    answer = question.answer()
    head = Head(
        method=method,
        target=(question.path + talk.query).encode(),
        authority=b"a",
        headers=question.headers,
        content_length=None if question.body is None else len(question.body),
    )
    hearing = Hearing(talk, answer, pace)
    if isinstance(where, Peer):
        await _on_connection(where, talk, Request(stream=stream, head=head), body, hearing)
    else:
        await _on_stream(where, talk, head, body, hearing)
    return answer


async def _on_connection(peer: Peer, talk: Talk, request: Request, body: Body, hearing: Hearing) -> None:
    """Over HTTP/1.1. A chunked request says Expect, and does not wait for it."""

    async def writing() -> None:
        try:
            head = msgspec.structs.replace(request.head, expects_continue=request.head.content_length is None)
            await peer.send(Request(stream=request.stream, head=head))
            await write(peer, request.stream, body)
        except TransportLost:
            return
        except LocalProtocolError as e:
            if "takes no further request" not in str(e):  # the server has left before the first
                raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(writing)
        await trio.lowlevel.checkpoint()
        talk.view = await viewed(partial(read_http1, peer, hearing), fail)
        nursery.cancel_scope.cancel()


async def _on_stream(line: HTTP2Line, talk: Talk, head: Head, body: Body, hearing: Hearing) -> None:
    """Over HTTP/2."""
    if not line.machine.can_open:
        talk.view = View.CUT
        return
    stream, inbox = line.open()
    line.machine.send(Request(stream=stream, head=head))

    async def writing() -> None:
        try:
            await write(line.peer, stream, body)
        except TransportLost:
            return
        except LocalProtocolError:
            if line.machine.is_open(stream):
                raise

    with suppress(TransportLost):  # an answer may have come before that
        await line.peer.flush()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writing)
        if talk.name == VICTIM:
            nursery.start_soon(line.reset_when_told, talk, stream)
        talk.view = await viewed(partial(line.read, inbox, hearing), fail)
        nursery.cancel_scope.cancel()


async def on_socket(
    stage: Stage, talk: Talk, path: str, hearing: Hearing, writing: Callable[[Socket], Awaitable[None]]
) -> None:
    """A WebSocket, on which the model says when it is over."""
    transport = stage.connect(talk.line)
    socket = await Socket.open(talk, transport, path + talk.query)
    if socket is None:
        transport.close()
        return
    machine, peer = socket.machine, socket.peer

    async def written() -> None:
        with suppress(TransportLost):
            await writing(socket)

    async def close_when_told() -> None:
        stage.can_leave = True
        await stage.leave.wait()
        if machine.is_open:
            talk.left = True
            with suppress(TransportLost):
                await peer.send(Close())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(written)
        if talk.name == VICTIM:
            nursery.start_soon(close_when_told)
        talk.view = await viewed(partial(socket.read, hearing), fail)
        nursery.cancel_scope.cancel()
    transport.close()


async def over_websocket(
    stage: Stage, talk: Talk, parts: Sequence[tuple[bytes, bool]], *, pace: float = 0.0, path: str = "", ends: bool = False
) -> None:
    """A duplex conversation of frames; the model ends it, where it is told (`ends`) that there is no more input."""

    async def writing(socket: Socket) -> None:
        await socket.write(talk, parts, _TURN)
        if ends and socket.machine.is_open and socket.peer.end_of_input:
            await socket.peer.send(Frame(opcode=Opcode.TEXT, fin=True, data=socket.peer.end_of_input))

    path = path or f"/models/{talk.model}/invocations-bidirectional-stream"
    await on_socket(stage, talk, path, Hearing(talk, Answer(), pace), writing)


# -- requests ------------------------------------------------------------------------------------------------------


def in_pieces(talk: Talk, body: bytes, n: int, *messages: bytes) -> Body:
    """A body in n pieces, which is these messages."""

    async def pieces() -> AsyncGenerator[Buffer, None]:
        for message in messages:
            talk.ask(message)
        size = len(body) // n + 1
        for at in range(0, len(body), size):
            await trio.sleep(_TURN)
            yield body[at : at + size]

    return pieces


def numbered(name: str, sizes: Sequence[int]) -> list[tuple[bytes, bool]]:
    """Parts of these sizes or a little more, each third one whole and the others to be continued."""
    return [(f"{name} {i} ".encode().ljust(size, b"."), i % 3 == 2) for i, size in enumerate(sizes)]


def _event(data: bytes, last: bool) -> bytes:
    return b"".join(bidi.encode_request_part(data, bidi.DataType.BINARY, state_of(last), date_ms=_DATE))


def state_of(last: bool) -> bidi.Completion:
    """COMPLETE for a part that ends its message, else PARTIAL."""
    return bidi.Completion.COMPLETE if last else bidi.Completion.PARTIAL


def conversation(talk: Talk) -> Question:
    """A BiDi conversation with the talk's model."""
    question = questions.bidirectional(talk.model)  # the query in its path is by what the ledger knows it
    return replace(question, headers=(*question.headers, (bidi.MODEL_QUERY_STRING.encode(), talk.query[1:].encode())))


async def bidi_talk(
    line: HTTP2Line,
    talk: Talk,
    parts: Sequence[tuple[bytes, bool]],
    *,
    pace: float = 0.0,
    cut: int = 0,
    question: Question | None = None,
    write: Callable[[bytes, bool], bytes] = _event,
    end: Callable[[], bytes] = lambda: b"".join(bidi.encode_request_end(date_ms=_DATE)),
) -> None:
    """A BiDi conversation on one stream, each event in two pieces, or in pieces of `cut` bytes."""

    async def body() -> AsyncGenerator[Buffer, None]:
        for data, last in parts:
            await trio.sleep(_TURN)
            talk.ask(talk.kept(data, last))
            event = write(data, last)
            size = cut or len(event) // 2 + 1
            for at in range(0, len(event), size):
                yield event[at : at + size]
        if ended := end():
            yield ended

    await ask(line, talk, question or conversation(talk), body, pace=pace)


def tensor_of(talk: Talk, elements: int, dtype: Any = np.int32) -> Any:
    """A tensor that is the talk's own."""
    return np.arange(elements, dtype=dtype) + sum(talk.name.encode())


async def infer(
    where: Peer | HTTP2Line, talk: Talk, *, elements: int = 0, pieces: int = 3, pace: float = 0.0, stream: int = 1
) -> None:
    """A v2 request with a binary tensor, its body in pieces."""
    x = tensor_of(talk, elements or {VICTIM: 1500, COMPANION: 300, NEXT: 30}.get(talk.name, 20))
    question = questions.infer({"x": x}, talk.model)
    body = in_pieces(talk, question.body or b"", pieces, x.tobytes())
    await ask(where, talk, question, body, pace=pace, stream=stream)


async def infer_at_once(peer: Peer, stream: int, talk: Talk) -> None:
    """A small v2 request in one write, and its answer."""
    x = tensor_of(talk, 40)
    question = questions.infer({"x": x}, talk.model)
    talk.ask(x.tobytes())
    try:
        await peer.send(*client.post(stream, question.path + talk.query, question.body, question.headers))
    except TransportLost:
        pass  # answers sent before are still to be read
    except LocalProtocolError as e:
        if "takes no further request" not in str(e):
            raise
    talk.view = await viewed(partial(read_http1, peer, Hearing(talk, question.answer(), 0.0)), fail)


async def pipelined(stage: Stage, *talks: Talk) -> None:
    """Small v2 requests in one write; each answer is read by a machine of its own, a byte at a time."""
    transport = stage.connect(VICTIM)
    machines = [HTTP1Connection(Role.CLIENT) for _ in talks]
    requests = bytearray()
    for machine, talk in zip(machines, talks, strict=True):
        x = tensor_of(talk, 40)
        question = questions.infer({"x": x}, talk.model)
        talk.ask(x.tobytes())
        for event in client.post(1, question.path + talk.query, question.body, question.headers):
            machine.send(event)
        requests += b"".join(machine.data_to_send(len(question.body or b"") + 4096))
    buffer, received = memoryview(bytearray(4096)), bytearray()

    async def read(machine: HTTP1Connection, hearing: Hearing) -> View:
        while True:
            match machine.next_event():
                case Response() as head:
                    hearing.answer.head(head)
                case Data(buffers=(piece,)):
                    await hearing.piece(piece)
                case End():
                    return hearing.end()
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
        talk.view = await viewed(partial(read, machine, Hearing(talk, InferAnswer())), fail)
    transport.close()


@final
class Lines(LinesAnswer):
    """LMI's lines in its own form, in which nothing is between them, and a failure has its token and its reason."""

    def _read(self, data: Buffer) -> None:
        text = bytes(self.body) + bytes(data)
        assert not text.startswith(b"\n"), "an empty line"
        assert b"\n\n" not in text, "an empty line"
        super()._read(data)

    def _line(self, line: dict[str, Any]) -> None:
        failed = (line.get("details") or {}).get("finish_reason") == "error"
        assert failed == ("error_msg" in line["token"]), line
        super()._line(line)


async def complete(
    where: Peer | HTTP2Line, talk: Talk, *, tokens: int = 6, pace: float = 0.0, chunked: int = 0, prompt: str = ""
) -> None:
    """An LMI request answered in jsonlines; `chunked` is the number of chunks of its body, 0 for a declared length."""
    question = questions.lmi(prompt or talk.name, talk.model, stream=True, max_new_tokens=tokens)
    question = replace(question, answer=Lines)
    body = in_pieces(talk, question.body or b"", chunked or 1, (prompt or talk.name).encode())
    await ask(where, talk, replace(question, body=None) if chunked else question, body, pace=pace)


# -- scenarios -----------------------------------------------------------------------------------------------------

Play = Callable[[Stage], Awaitable[None]]
Ask = Callable[..., Awaitable[None]]
"""Asks once, given a connection and a talk; `pace` is the reader's."""

_SMALL = Config(
    listen=ListenConfig(port=-1),
    limits=LimitsConfig(total_bytes=4 * 1024 * 1024, send_buffer=1024, read_ahead=4096, connection_send_buffer=4096),
    http2=HTTP2Config(initial_window=2048, max_window=4096),
    bidi=BidiConfig(session_timeout=600.0),
)


# Bytes that a stream may hold: the window that RFC 9113 gives it until the client has acknowledged ours, and its growth.
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
    """Slots of each worker."""
    buffer: int = 1500
    """Bytes in flight in each direction of a connection, as in a kernel's socket buffers."""
    tls: bool = False
    rude: bool = False
    """True if the victim's model raises while it is cancelled."""
    cuts: bool = False
    """True if an error in the middle of an answer has no words: the answer is cut off."""
    served: Callable[[Stage], Callable[[str], ModelSpec]] | None = None
    """Makes the specs of the models, by their names, in place of `model`."""
    place: MemoryPlace | None = None
    """The place of the models' processes; None if they run in the gateway."""
    without: frozenset[str] = frozenset()
    """Targets that do not apply to it."""
    ahead: int = 1_000_000
    """Messages that the victim's model may have said, or be about to say, and its client not heard."""


async def together(*plays: Awaitable[Any]) -> None:
    async def run(play: Awaitable[Any]) -> None:
        await play

    async with trio.open_nursery() as nursery:
        for play in plays:
            nursery.start_soon(run, play)


@asynccontextmanager
async def http2_line(stage: Stage, name: str, **more: Any) -> AsyncIterator[HTTP2Line]:
    """A connection, and its end."""
    line = HTTP2Line(stage, name, **more)
    async with trio.open_nursery() as nursery:
        await nursery.start(line.run)
        yield line
        await trio.testing.wait_all_tasks_blocked()
        stage.survived(name, line.machine)
        line.peer.close()


def over_http1(name: str, ask: Ask, *, pace: float = 0.0004, again: bool = False, other: str = "n", **more: Any) -> Scenario:
    """Two clients at once, each on its own connection; the victim's is used `again` if it can be."""

    async def alone(stage: Stage, talk: Talk, **how: Any) -> None:
        peer = client.http1(stage.connect(talk.line))
        await ask(peer, talk, **how)
        if again and talk.name == VICTIM and usable(peer, talk):
            await ask(peer, stage.talk(NEXT, VICTIM, other), stream=2)
        peer.close()

    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model=other)
        await together(alone(stage, victim, pace=pace), alone(stage, neighbour))

    async def fresh(stage: Stage) -> None:
        await alone(stage, stage.talk(FRESH))

    return Scenario(**{"name": name, "wire": "http/1.1", "play": play, "again": fresh, "buffer": 600, **more})


def usable(peer: Peer, talk: Talk) -> bool:
    """True if an HTTP/1.1 connection takes another request after the talk's."""
    assert isinstance(peer.machine, HTTP1Connection)
    return talk.view in (View.COMPLETE, View.ERROR) and peer.machine.idle and not peer.machine.must_close


def over_http2(
    name: str,
    ask: Ask,
    *,
    pace: float = 0.0004,
    window: int = 1024,
    neighbour: bool = False,
    other: str = "n",
    **more: Any,
) -> Scenario:
    """Two streams at once on one connection, one of them the victim; then, if the connection lives, a third."""

    async def three(stage: Stage) -> None:
        victim, companion = stage.talk(VICTIM), stage.talk(COMPANION, VICTIM, other)
        async with http2_line(stage, VICTIM, window=window) as line:
            await together(ask(line, victim, pace=pace), ask(line, companion))
            if line.machine.can_open:
                await ask(line, stage.talk(NEXT, VICTIM, other))

    async def alone(stage: Stage, name: str, model: str) -> None:
        async with http2_line(stage, name) as line:
            await ask(line, stage.talk(name, model=model))

    async def four(stage: Stage) -> None:
        await together(three(stage), alone(stage, NEIGHBOUR, "n"))

    async def fresh(stage: Stage) -> None:
        await alone(stage, FRESH, "m")

    play = four if neighbour else three
    return Scenario(**{"name": name, "wire": "http/2", "play": play, "again": fresh, **more})


def bidi_scenario(
    name: str, model: Callable[[Stage], Model], sizes: Sequence[int], *, cut: int = 0, talk: Ask = bidi_talk, **more: Any
) -> Scenario:
    """Conversations of parts of these sizes."""
    others = {COMPANION: [30, 700], NEIGHBOUR: [30, 700], NEXT: [20], FRESH: [20, 40]}

    async def converse(line: HTTP2Line, one: Talk, **how: Any) -> None:
        victim = one.name == VICTIM
        await talk(line, one, numbered(one.name, sizes if victim else others[one.name]), cut=cut if victim else 0, **how)

    return over_http2(name, converse, model=model, family=Family.PARTS, **more)


def websocket_scenario(
    name: str, sizes: Sequence[int], *, other: Sequence[int] = (30, 30, 30), path: str = "", ends: bool = False, **more: Any
) -> Scenario:
    """Two clients at once, whose model ends when it is told; the victim's and the last have the path."""

    async def converse(stage: Stage, talk: Talk, sizes: Sequence[int], **how: Any) -> None:
        parts = numbered(talk.name, sizes)
        if not ends or not parts:
            parts.append((b"part" if ends else END, True))
        await over_websocket(stage, talk, parts, path="" if talk.name == NEIGHBOUR else path, ends=ends, **how)

    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model="n")
        await together(converse(stage, victim, sizes, pace=0.0021), converse(stage, neighbour, other))

    async def again(stage: Stage) -> None:
        await converse(stage, stage.talk(FRESH), ())

    return Scenario(name=name, wire="websocket", model=echo, family=Family.PARTS, play=play, again=again, **more)


async def _infer_again(stage: Stage) -> None:
    peer = client.http1(stage.connect(FRESH))
    await infer(peer, stage.talk(FRESH), pieces=1)
    peer.close()


def _tensor_scenario(name: str, play: Play, model: Callable[[Stage], Model]) -> Scenario:
    return Scenario(
        name=name, wire="http/1.1", model=model, family=Family.TENSOR, play=play, again=_infer_again, memory=2 * 4096
    )


def _inline() -> Scenario:
    """Small requests one after the other, each there whole when it is found: a leader answers most of them itself."""

    async def line(stage: Stage, own: str, *names: str) -> None:
        peer = client.http1(stage.connect(own))
        for stream, name in enumerate(names, 1):
            talk = stage.talk(name, own, "m" if name == VICTIM else "n")
            await infer_at_once(peer, stream, talk)
            if not usable(peer, talk):
                break
        peer.close()

    async def play(stage: Stage) -> None:
        await together(
            line(stage, VICTIM, "first", VICTIM, f"{NEXT}-slow", f"{NEXT}-1", f"{NEXT}-2"),
            line(stage, NEIGHBOUR, NEIGHBOUR, f"{NEIGHBOUR}-1", f"{NEIGHBOUR}-slow", f"{NEIGHBOUR}-2"),
        )

    return _tensor_scenario("inline", play, double_at_once)


def _pipelined() -> Scenario:
    async def play(stage: Stage) -> None:
        await pipelined(stage, stage.talk(VICTIM), stage.talk(NEXT, VICTIM, "n"))

    return _tensor_scenario("pipelined", play, double)


async def _infer_over_http1(peer: Peer, talk: Talk, **how: Any) -> None:
    elements, pieces = {VICTIM: (0, 4), NEXT: (100, 4), NEIGHBOUR: (400, 2)}.get(talk.name, (20, 1))
    await infer(peer, talk, elements=elements, pieces=pieces, **how)


def _lmi(name: str, model: Callable[[Stage], Model], *, chunked: int = 0, prompt: str = "", tokens: int = 6) -> Scenario:
    async def ask(peer: Peer, talk: Talk, **how: Any) -> None:
        if talk.name == VICTIM:
            await complete(peer, talk, chunked=chunked, prompt=prompt, tokens=tokens, **how)
        else:
            await complete(peer, talk, tokens=3 if talk.name == NEIGHBOUR else 2, **how)

    memory = 2 * (4096 + 2048 + 2 * len(prompt) + 1024)
    return over_http1(name, ask, model=model, family=Family.TEXT, memory=memory)


def _queue() -> Scenario:
    """One slot: the victim waits for it, or holds it while others wait."""

    async def late(stage: Stage, delay: float, talk: Talk, tokens: int = 3) -> None:
        await trio.sleep(delay)
        peer = client.http1(stage.connect(talk.line))
        await complete(peer, talk, tokens=tokens)
        peer.close()

    async def play(stage: Stage) -> None:
        first, victim, third = stage.talk("first"), stage.talk(VICTIM), stage.talk("third")
        await together(late(stage, 0, first), late(stage, 0.0001, victim), late(stage, 0.0002, third))

    async def again(stage: Stage) -> None:
        await late(stage, 0, stage.talk(FRESH), 2)

    memory = 3 * (4096 + 2048 + 1024)
    return Scenario(
        name="queue", wire="http/1.1", model=generate, family=Family.TEXT, play=play, again=again, memory=memory, capacity=1
    )


_LARGE = replace(
    _SMALL,
    limits=replace(_SMALL.limits, read_ahead=128 * 1024),
    http2=HTTP2Config(initial_window=16_384, max_window=65_536),
)

ONE_OF_EACH: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        # the body, what is read ahead of it, and the answer, which is more than the send buffer; for two clients
        over_http1(
            "v2", _infer_over_http1, pace=0.0002, again=True, buffer=1500, model=double, family=Family.TENSOR,
            memory=2 * (6200 + 4096 + 2048 + 6200),
        ),
        over_http2(
            "v2-h2", infer, pace=0.0002, model=double, family=Family.TENSOR, memory=2 * (_STREAM + 6200 + 6200)
        ),
        _pipelined(),
        _inline(),
        _lmi("lmi", generate),
        _lmi("chunked", generate, chunked=4, prompt="victim" + " words" * 900),
        _lmi("threads", generate_in_threads, tokens=4),
        _queue(),
        bidi_scenario("bidi", echo, [10, 900, 2600, 5], memory=3 * (_STREAM + 2600), neighbour=True),
        bidi_scenario("tls", echo, [10, 900, 2600, 5], memory=3 * (_STREAM + 2600), tls=True),
        bidi_scenario("early", early, [10, 900, 2600, 3000, 900], memory=3 * (_STREAM + 2600)),
        bidi_scenario("nursery", both_ways, [10, 900, 300], memory=3 * _STREAM),
        bidi_scenario("rude", both_ways, [10, 900, 300], memory=3 * _STREAM, rude=True),
        bidi_scenario(
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
        websocket_scenario("websocket", [10, 900, 2600, 1800, 1500, 1700, 1600, 1400], memory=2 * (4096 + 2048 + 2600)),
        websocket_scenario("websocket-large", [10, 70_000, 5], memory=3 * 70_000 + 4096, config=_LARGE, buffer=32_768),
    )
}  # fmt: skip
