"""Short words for the promises: models that keep count, callers that stop, leave or lie, and the ledger of what is left."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import trio
from trio.testing import wait_all_tasks_blocked

from gateway import client
from gateway.client import Peer, Question, questions
from gateway.client.answers import Answer, CallAnswer
from gateway.config import Config, LimitsConfig, SigV4Config
from gateway.containers.connection import ContainerLimits
from gateway.containers.model import container_spec
from gateway.core.connection import Connection
from gateway.errors import TransportLost
from gateway.net.transport import MemoryTransport
from gateway.testing import MemoryGateway, memory_gateway
from gateway.testing.invariants import broken_ledgers, left_over
from gateway.testing.stories.clients import ask
from gateway.testing.stories.talk import Form, Leave
from gateway.wires.http2 import HTTP2Wire
from models.adapt import spec_of
from models.messages import Family, InferResponse, Part, Tensor, Token
from models.session import Session
from models.spec import ModelSpec
from protocols import v2
from protocols.aws import bidi, sigv4
from protocols.errors import RemoteProtocolError
from protocols.events import (
    Buffer,
    Close,
    ConnectionEnd,
    Data,
    End,
    Frame,
    GoAway,
    Head,
    Opcode,
    Ping,
    Request,
    Reset,
    Response,
)
from protocols.http2.frames import Kind
from tests.gateway import ways
from tests.gateway.sagemaker_answers import LiteralAnswer, WithinEvents

KiB = 1024
PAYLOAD = 1000
"""Bytes of a numbered message, as its model makes it."""
EPOCH = 784111777.0
"""The time on the wall clock of `serving`, always: seconds since 1970."""
NOW = b"Sun, 06 Nov 1994 08:49:37 GMT"
DATE = b"date: %b\r\nx-content-type-options: nosniff\r\n" % NOW
BASE = 10_000_000
"""Added to each number in a tensor, so that all have one length in JSON."""

CANCELLED = {"cancelled-by-client": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A wire's calls: the form that carries them, and the codes of their failures."""

    form: Form
    transport: str = "http2"
    carries: Form | None = None
    """The form of the body, if a SageMaker form carries another. Default None: the wire's own form."""
    asks: Callable[[str], Question] | None = None
    """Makes the request for a model by its name. Default None: the form's own request."""
    opens: bool = False
    """True if a duplex client speaks first: its first message tells the form of the answer."""
    blames: bool = False
    """True if the platform answers for its model: 424, whatever the model's own status was."""
    survives: bool = False
    """True if the call goes on after an error of its model, which ends one request of many."""
    apart: bool = False
    """True if each request of its call has its own end: an error is a message of the call, and the exchange completes."""

    @property
    def body(self) -> Form:
        """The form of the request's body."""
        return self.carries or self.form

    @property
    def family(self) -> Family:
        """The family of messages that the model speaks."""
        return Family(self.body.kind)

    @property
    def streams(self) -> bool:
        """True if each message leaves when it is sent."""
        return self.body.streams

    @property
    def duplex(self) -> bool:
        return self.form.duplex

    @property
    def accepted(self) -> bool:
        """True if the head goes out before the model is called."""
        return self.duplex or self.transport == "websocket"

    @property
    def asked(self) -> bool:
        """True if the client sends a message before the answer."""
        return self.opens or not self.duplex

    @property
    def crash(self) -> str:
        """The status of a model that raised."""
        return "424" if self.blames or self.family is Family.TEXT else self.code("500")

    @property
    def grpc(self) -> bool:
        return self.form in (Form.GRPC, Form.GRPC_STREAM)

    @property
    def decoupled(self) -> bool:
        """True if its models must be declared decoupled to answer more than once."""
        return self.form is Form.GRPC_STREAM

    def code(self, status: str) -> str:
        """The wire's own code for this HTTP status."""
        return _CODES[status] if self.grpc else status

    @property
    def lost(self) -> str:
        """The wire's code for a call whose worker ended during it."""
        return self.code("500" if self.grpc else "503")

    def ended(self, ending: str, times: int = 1) -> dict[str, int]:
        """The counts of endings after a model ended like this."""
        return {"complete" if self.apart else ending: times}

    @property
    def in_band(self) -> str:
        """The place of an error in an answer that has begun: a last "line", an "event", a "close", a "message" or the
        "trailers"; or "cut", if the body is cut off."""
        if self.transport == "websocket":
            return "close"
        if self.grpc:
            return "message" if self.apart else "trailers"
        if self.form in (Form.BIDI, Form.STREAM):
            return "event"
        return "cut" if self.body.cuts else "line"

    def question(self, model: str, upto: int | None = None) -> Question:
        """The request for a model; `upto` is the most tokens."""
        question = self.asks(model) if self.asks is not None else asked(self.body, model, upto)
        if self.carries is None:
            return question
        through = questions.invoke(model, question.body or b"", stream=self.form is Form.STREAM)
        answer = partial(WithinEvents, question.answer) if self.form is Form.STREAM else question.answer
        return replace(through, headers=question.headers, answer=answer)

    def expected(self, *, lost: bool = False) -> tuple[str, str]:
        """`how` and `code` of an error in the middle of an answer. `lost`: True if it was not the model's fault."""
        match self.in_band:
            case "event":
                return "error", "InternalStreamFailure" if lost else "ModelStreamError"
            case "close":
                return "error", "1011"
            case "cut":
                return "cut", ""
            case _:
                return "error", ""

    @property
    def drained(self) -> str:
        """The code of a drain's end in the middle of an answer; "" without one of its own."""
        return "14" if self.grpc else {"close": "1001"}.get(self.in_band, "")

    def failed(self, over: Over, text: str, *, lost: bool = False) -> None:
        """Checks that a cut answer ended with this error, as far as the wire has words."""
        how, code = self.expected(lost=lost)
        assert over.how == how
        if how == "error":
            assert over.code == code
            assert text in over.text


def asked(form: Form, model: str, upto: int | None = None) -> Question:
    """The request of a form."""
    most = upto or (65536 if form.streams else 1000)
    question = ask(form, model, text="x", tokens=most, tensor=np.array([1]), body=b"00000000")
    if form in (Form.INVOKE, Form.STREAM):
        return replace(question, answer=NumberedAnswer if form is Form.INVOKE else partial(WithinEvents, NumberedAnswer))
    return question


def _posted(path: str, body: bytes | None = None, answer: type[Answer] = Answer) -> Question:
    return Question(path=path, body=body, answer=answer, headers=())


class NumberedAnswer(Answer):
    """One numbered message after the other."""

    def _read(self, data: Buffer) -> None:
        self.body += data
        while len(self.body) >= PAYLOAD:
            self.messages.append(bytes(self.body[:PAYLOAD]))
            del self.body[:PAYLOAD]

    def _finish(self) -> None:
        assert not self.body, "half a message"


def _both(name: str, form: Form, **about: Any) -> dict[str, Wire]:
    return {f"{name}-{transport}": Wire(form=form, transport=transport, **about) for transport in ("http1", "http2")}


_BIDI = Wire(form=Form.BIDI)
_SOCKET = Wire(form=Form.SOCKET, transport="websocket")

WIRE: dict[str, Wire] = {
    **_both("lmi", Form.LMI),
    "bidi": _BIDI,
    "websocket": _SOCKET,
    # wires of SageMaker's platform and its containers
    **_both("stream", Form.STREAM, carries=Form.LMI, blames=True),
    **_both("streamparts", Form.STREAM, blames=True),
    **_both("invoke", Form.INVOKE, carries=Form.LMI, blames=True),
    **_both("invokeparts", Form.INVOKE, blames=True),
    **_both(
        "container",
        Form.INVOKE,
        asks=lambda model: _posted(f"/invocations?model_name={model}", b"00000000", NumberedAnswer),
    ),
    **_both("mme", Form.INVOKE, asks=lambda model: _posted(f"/models/{model}/invoke", b"00000000", NumberedAnswer)),
    "bidi-json": replace(_BIDI, opens=True),
    "bidi-literal": replace(
        _BIDI,
        asks=lambda model: replace(
            questions.bidirectional(model),
            headers=[(b"content-type", bidi.JSON_CONTENT_TYPE.encode())],
            answer=LiteralAnswer,
        ),
    ),
    "bidi-signed": _BIDI,
    "bidi-padded": _BIDI,
    "websocket-anywhere": replace(  # only for the model "probe"
        _SOCKET, asks=lambda model: _posted("/as/one/likes.it?a=b") if model == _ANYWHERE else asked(Form.SOCKET, model)
    ),
    "bridge": _BIDI,
    # v2, with each response as it comes
    **_both("inferstream", Form.INFER_EVENTS),
    **_both("inferframes", Form.INFER_FRAMES),
    **_both("generatestream", Form.INFER_EVENTS, asks=lambda model: questions.generate({"x": 1}, model, stream=True)),
    "v2session": Wire(
        form=Form.INFER_EVENTS,
        transport="websocket",
        asks=lambda model: replace(asked(Form.INFER_JSON, model), path=f"/v2/models/{model}/infer"),
        survives=True,
    ),
    "grpcstream-http2": Wire(form=Form.GRPC_STREAM, apart=True),
    # answers of one piece
    "grpcinfer-http2": Wire(form=Form.GRPC),
    **_both("json", Form.LMI_JSON),
    **_both("v2", Form.INFER_JSON),
    **_both("invokejson", Form.INVOKE, carries=Form.LMI_JSON, blames=True),
    **_both("invokev2", Form.INVOKE, carries=Form.INFER_JSON, blames=True),
    "streamv2-http2": Wire(form=Form.STREAM, carries=Form.INFER_JSON, blames=True),
}
WIRES = tuple(WIRE)
STREAMS = tuple(name for name, wire in WIRE.items() if wire.streams)
UNARY = tuple(name for name, wire in WIRE.items() if not wire.streams)
DUPLEX = tuple(name for name, wire in WIRE.items() if wire.duplex)
LEAVES = {"fin": Leave.CLOSE, "half-close": Leave.HALF, "rst": Leave.RESET}
"""The ways in which a client ends its whole connection, by the tests' names."""
_ANYWHERE = "probe"
PADDING = 64
"""Characters of padding in a part of a padded wire, at most."""


_CODES = {"422": "3", "500": "13", "503": "14", "504": "4"}
"""gRPC's codes, by the HTTP statuses of other wires."""


@functools.cache
def _credentials() -> Any:
    """A file of one key, which lasts as long as the tests."""
    file = tempfile.NamedTemporaryFile("w", suffix=".ini")  # noqa: SIM115  # closed with the process
    file.write(f"[tests]\naws_access_key_id={SIGNER.access_key_id}\naws_secret_access_key={SIGNER.secret_access_key}\n")
    file.flush()
    return file


SIGNER = sigv4.Credentials(access_key_id="AKIDEXAMPLE", secret_access_key="a secret of ours", region="eu-west-1")


def configured(wire: str, config: Config) -> Config:
    """The configuration with what this wire needs."""
    if wire == "bidi-padded":
        return replace(config, bidi=replace(config.bidi, padding=PADDING))
    if wire == "websocket-anywhere":
        return replace(config, bidi=replace(config.bidi, default_model=_ANYWHERE))
    if wire == "bidi-signed":
        verified = SigV4Config(credentials=_credentials().name)
        # the promises ask other routes beside, without a key
        open_otherwise = replace(config.access, unsigned=True)
        return replace(config, sagemaker=replace(config.sagemaker, sigv4=verified), access=open_otherwise)
    return config


# -- models ----------------------------------------------------------------------------------------------------------


class Probe:
    """A model that runs a script and counts its calls and their ends."""

    def __init__(self, script: Callable[[Probe, Session[Any, Any]], Awaitable[None]], name: str = "probe") -> None:
        self.script, self.name = script, name
        self.family, self.asked = Family.PARTS, False
        self.calls = self.live = self.stopped = self.returned = self.sent = 0
        self.received: list[int] = []
        self.go = trio.Event()

    async def __call__(self, session: Session[Any, Any]) -> None:
        self.calls += 1
        self.live += 1
        try:
            await self.script(self, session)
            self.returned += 1
        finally:
            self.live -= 1
            self.stopped += 1

    def spec(self, wire: str, **options: Any) -> ModelSpec:
        """The model in the family of a wire."""
        self.speak(wire)
        if WIRE[wire].decoupled:
            options.setdefault("decoupled", True)
        return spec_of(self, self.name, family=self.family, **options)

    def speak(self, wire: str) -> None:
        """Sets the wire whose messages it sends and takes from now on."""
        self.family, self.asked = WIRE[wire].family, WIRE[wire].asked

    def message(self, number: int) -> Any:
        text = f"{number:08d}".ljust(PAYLOAD, ".")
        match self.family:
            case Family.TEXT:
                return Token(text=text, id=number)
            case Family.PARTS:
                return Part(data=text.encode())
            case Family.TENSOR:
                return InferResponse(outputs=(Tensor(name="y", data=np.full(PAYLOAD // 9, BASE + number)),))

    async def take(self, session: Session[Any, Any]) -> None:
        """Takes the request, if the wire has one before the answer."""
        if self.asked:
            await session.receive()

    async def say(self, session: Session[Any, Any], times: int = 1) -> None:
        """Sends the next `times` numbers."""
        for _ in range(times):
            await session.send(self.message(self.sent))
            self.sent += 1

    async def hear(self, session: Session[Any, Any]) -> int:
        """Receives the next part, and returns its number."""
        number = int(bytes((await session.receive()).data[:8]))
        self.received.append(number)
        return number


async def counting(probe: Probe, session: Session[Any, Any]) -> None:
    """Counts for ever, as fast as there is room."""
    await probe.take(session)
    while True:
        await probe.say(session)


async def silent(probe: Probe, session: Session[Any, Any]) -> None:
    """Takes the request and never answers."""
    await probe.take(session)
    await trio.sleep_forever()


async def pausing(probe: Probe, session: Session[Any, Any]) -> None:
    """Says three numbers, waits for `go`, says three more."""
    await probe.take(session)
    await probe.say(session, 3)
    await probe.go.wait()
    await probe.say(session, 3)


async def answering(probe: Probe, session: Session[Any, Any]) -> None:
    """Says one number when told to `go`."""
    await probe.take(session)
    await probe.go.wait()
    await probe.say(session)


async def deaf(probe: Probe, session: Session[Any, Any]) -> None:
    """Reads nothing until told to `go`, then everything."""
    await probe.go.wait()
    await probe.take(session)
    async for part in session:
        probe.received.append(int(bytes(part.data[:8])))


async def echoing(probe: Probe, session: Session[Any, Any]) -> None:
    """Answers each part with the next number."""
    await probe.take(session)
    async for part in session:
        probe.received.append(int(bytes(part.data[:8])))
        await probe.say(session)


# -- the house and its ledger ----------------------------------------------------------------------------------------


class House:
    """A gateway in memory, and what is left in it."""

    def __init__(self, memory: MemoryGateway, containers: tuple[MemoryGateway, ...] = ()) -> None:
        self.memory, self.gateway = memory, memory.gateway
        self.containers = containers
        """The gateways that serve the models of a bridge."""
        self.lines: list[Line] = []
        self._tasks = self._tasks_before = 0

    def line(self, kind: str) -> Line:
        """A new client connection, "http1" or "http2"."""
        transport = Tap(self.memory.connect())
        return self._keep(Line(client.http1(transport) if kind == "http1" else client.http2(transport), transport))

    async def socket(self, path: str) -> Line:
        """A new WebSocket."""
        transport = Tap(self.memory.connect())
        return self._keep(Line(await client.websocket(transport, path), transport))

    async def call(self, wire: str, model: str = "probe", line: Line | None = None, **options: Any) -> Call:
        """A call of a model over a wire, on a connection of its own if `line` is None; its request is written."""
        question = WIRE[wire].question(model, **options)
        if WIRE[wire].transport == "websocket":
            line = await self.socket(question.path)
        line = line or self.line(WIRE[wire].transport)
        call = _CALLS.get(wire, _BY_FORM.get(WIRE[wire].form, Call))(line, line.next_stream(), whole=not WIRE[wire].streams)
        await call.open(question)
        return call

    async def ask(
        self,
        path: str,
        body: bytes | None = b"",
        *headers: tuple[str, str],
        method: bytes = b"POST",
        line: Line | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """One request and its whole answer, on a connection of its own where none is given."""
        line = line or self.line("http1")
        stream = line.next_stream()
        fields = [(name.encode(), value.encode()) for name, value in headers]
        await line.send(*self.posted(stream, path, body, method, fields))
        status, answered, whole = await line.peer.read_answer(stream)
        return status, {name.decode(): value.decode() for name, value in answered.items()}, whole

    @staticmethod
    def posted(stream: int, path: str, body: bytes | None, method: bytes = b"POST", headers: Any = ()) -> tuple[Any, ...]:
        """The events of a request by any method."""
        asked, *rest = client.post(stream, path, body, headers)
        named = raw(stream, method, path, headers=asked.head.headers, content_length=asked.head.content_length)
        return (named, *rest)

    def _keep(self, line: Line) -> Line:
        self.lines.append(line)
        return line

    @property
    def endings(self) -> dict[str, int]:
        """How exchanges have ended so far."""
        return self.gateway.counts().endings

    @property
    def connections(self) -> int:
        return self.gateway.counts().connections

    def connection(self, line: Line) -> Connection:
        """The server's side of a client's connection."""
        return next(c for c in self.gateway.server.connections if ways.serves(c, line.transport.below))

    async def still(self) -> None:
        """Waits until everything has run as far as it can without time or a client."""
        await wait_all_tasks_blocked()

    async def opened(self, before: int) -> None:
        self._tasks_before, self._tasks = before, await self._busy_tasks()

    async def _busy_tasks(self) -> int:
        gateways = [self.gateway, *(container.gateway for container in self.containers)]
        return await tasks() - sum(gateway.server.runner.idle for gateway in gateways)

    def check_ledger(self) -> None:
        """Checks that nothing is held without a live exchange: no byte, slot or credit, on connections that stay open."""
        counts = self.gateway.counts()
        assert (counts.exchanges, counts.bytes_reserved, counts.slots_in_use) == (0, 0, 0), counts
        assert not [left for container in self.containers for left in left_over(container.gateway)]
        assert not list(broken_ledgers(self.gateway))
        for connection in self.gateway.server.connections:
            assert not connection.exchanges
            if isinstance(connection.wire, HTTP2Wire):
                machine = connection.wire._machine
                assert (machine.open_streams, machine.unconsumed) == (0, 0)

    async def closed(self) -> None:
        """The clients leave: neither connection nor task outlives them. Models loaded at run time are unloaded."""
        await self.still()
        self.check_ledger()
        repository = self.gateway.repository
        for model in repository.list():
            await repository.unload(model.name)
        assert (repository.names, repository.used) == ([], 0)
        for line in self.lines:
            line.peer.close()
        await self.still()
        assert not left_over(self.gateway)
        drained = self.gateway.over
        if not (drained and self.containers):  # those have no drain
            assert await self._busy_tasks() == (self._tasks_before if drained else self._tasks)


async def tasks() -> int:
    """The number of tasks that live when everything stands still."""
    await wait_all_tasks_blocked()
    return trio.lowlevel.current_statistics().tasks_living


@asynccontextmanager
async def serving(
    *specs: ModelSpec,
    config: Config | None = None,
    capacity: int = 64 * KiB,
    wire: str = "bidi",
    driver: str = ways.DRIVERS[0],
) -> AsyncIterator[House]:
    """A house for one story. At its end the clients leave and nothing may be left: the ledger is checked twice, with
    the connections open and with them closed. A story that hangs fails after 1,000 s of the mocked clock. `wire` is the one
    that needs a configuration or a bridge of its own; `driver` is one of `ways.DRIVERS`."""
    failure: Exception | None = None
    before = await tasks()
    config = configured(wire, config or Config())
    with trio.move_on_after(1000) as patience:
        async with AsyncExitStack() as stack:
            containers: list[MemoryGateway] = []
            served = list(specs)
            if wire == "bridge":
                served.clear()
                for spec in specs:
                    container = await stack.enter_async_context(
                        memory_gateway([replace(spec, timeout=0)], capacity=capacity)
                    )
                    containers.append(container)
                    served.append(bridge_to(container, spec))
            memory = await stack.enter_async_context(
                memory_gateway(
                    served, config, capacity=capacity, wall_clock=lambda: EPOCH, chance=lambda: 0.0, hub=driver == "leader"
                )
            )
            house = House(memory, tuple(containers))
            await house.opened(before)
            try:
                yield house
                await house.closed()
            except Exception as e:
                failure = e  # raised outside of the nursery, which would wrap it
    if failure is not None:
        raise failure
    assert not patience.cancelled_caught, "nothing moves any more"


def bridge_to(container: MemoryGateway, spec: ModelSpec, **limits: Any) -> ModelSpec:
    """A model behind a container of its own."""

    async def dial() -> MemoryTransport:
        await trio.lowlevel.checkpoint()
        return container.connect()

    allowed = ContainerLimits(health_interval=0, **limits)
    shown = container_spec("ws://container", name=spec.name, limits=allowed, dial=dial)
    return replace(shown, capacity=spec.capacity, queue=spec.queue, timeout=spec.timeout)


@contextmanager
def at_once() -> Iterator[None]:
    """Checks, on a mocked clock, that the block waits for no timer."""
    began = trio.current_time()
    yield
    assert trio.current_time() == began


def limits(**changes: Any) -> Config:
    """A configuration with other limits."""
    return Config(limits=replace(LimitsConfig(), **changes))


# -- clients ---------------------------------------------------------------------------------------------------------


class Tap:
    """A transport that remembers what the client has read."""

    short_is_dry = behind = False

    def __init__(self, below: MemoryTransport) -> None:
        self.below, self.read = below, bytearray()
        self.peer, self.alpn, self.pending = below.peer, below.alpn, False
        self.try_send, self.wait_readable, self.wait_writable = below.try_send, below.wait_readable, below.wait_writable
        self.hung_up, self.send_eof, self.close = below.hung_up, below.send_eof, below.close

    def try_receive_into(self, buffer: memoryview) -> int | None:
        n = self.below.try_receive_into(buffer)
        self.read += buffer[: n or 0]
        return n


class Line:
    """A client's connection, read for one stream at a time: what comes for others is kept for them."""

    def __init__(self, peer: Peer, transport: Tap) -> None:
        self.peer, self.transport, self.machine = peer, transport, peer.machine
        self._kept: dict[int, deque[Any]] = {}
        self._streams = itertools.count(1, 1 if "HTTP1" in type(peer.machine).__name__ else 2)
        self.ended = False
        self.goaways: list[GoAway] = []

    @property
    def http2(self) -> bool:
        return "HTTP2" in type(self.machine).__name__

    def next_stream(self) -> int:
        return next(self._streams)

    async def send(self, *events: Any) -> None:
        await self.peer.send(*events)

    async def event(self, stream: int) -> Any:
        """The next event of a stream, or ConnectionEnd."""
        kept = self._kept.setdefault(stream, deque())
        while not kept:
            if self.ended:
                return ConnectionEnd()
            self._sort(await self._next())
        return kept.popleft()

    async def _next(self) -> Any:
        try:
            return await self.peer.next_event()
        except (TransportLost, RemoteProtocolError):
            return ConnectionEnd()

    def _sort(self, event: Any) -> None:
        if isinstance(event, ConnectionEnd):
            self.ended = True
        elif isinstance(event, GoAway):
            self.goaways.append(event)
        else:
            self._kept.setdefault(getattr(event, "stream", 1), deque()).append(event)

    async def read(self) -> None:
        """Takes what is there from the transport, credits nothing, and waits for nothing."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_all)
                await wait_all_tasks_blocked()
                scope.cancel()

    async def _read_all(self) -> None:
        while not self.ended:
            self._sort(await self._next())

    async def data(self, stream: int) -> Data:
        """The next piece of a body, whatever comes before it."""
        while not isinstance(event := await self.event(stream), Data):
            assert isinstance(event, Response)
        return event

    async def over(self) -> None:
        """Reads to the end of the connection."""
        await self._read_all()

    async def over_raw(self) -> None:
        """Reads to the end of the connection without the machine: `transport.read` has it all."""
        buffer = memoryview(bytearray(64 * KiB))
        while (n := self.transport.try_receive_into(buffer)) != 0:
            if n is None:
                await self.transport.wait_readable()

    def send_and_close(self, *events: Any) -> None:
        """Sends all events and closes, before the server can look."""
        for event in events:
            self.machine.send(event)
        data = b"".join(self.machine.data_to_send(2**20))
        assert self.transport.try_send([data]) == len(data)
        self.peer.close()

    async def ping(self) -> None:
        """An HTTP/2 PING; it must be answered at once, whatever the streams do."""
        data = b"at once!"
        answer = bytes((0, 0, 8, Kind.PING, 1, 0, 0, 0, 0)) + data
        before = self.transport.read.count(answer)
        with at_once():
            await self.send(Ping(data=data))
            await self.read()
            assert self.transport.read.count(answer) == before + 1

    def reset(self) -> None:
        """TCP RST."""
        self.transport.below.reset()


@dataclass(frozen=True)
class Over:
    """The end of an answer: "complete", "error" (in-band), "refused" (an HTTP status) or "cut" (no end at all)."""

    how: str
    text: str = ""
    code: str = ""


class Call:
    """One call. `next` gives the next number of the answer, or Over, again and again."""

    def __init__(self, line: Line, stream: int, *, whole: bool = False) -> None:
        self.line, self.stream, self._whole = line, stream, whole
        self.answer = Answer()
        self.over: Over | None = None
        self._numbers: deque[int] = deque()

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.answer.headers)

    async def open(self, question: Question) -> None:
        """Sends the request."""
        self.answer = question.answer()
        head, *rest = client.post(self.stream, question.path, question.body, question.headers, declares=question.declares)
        await self.line.send(self.signed(head), *rest)

    def signed(self, head: Request) -> Request:
        return head

    async def next(self) -> int | Over:
        while not self._numbers:
            if self.over is not None:
                return self.over
            await self._step()
        return self._numbers.popleft()

    async def rest(self) -> tuple[list[int], Over]:
        """The rest of the numbers, and the end of the answer."""
        numbers: list[int] = []
        while isinstance(number := await self.next(), int):
            numbers.append(number)
        return numbers, number

    async def take(self, n: int) -> list[int]:
        numbers = [await self.next() for _ in range(n)]
        assert all(isinstance(number, int) for number in numbers), numbers
        return numbers  # type: ignore[return-value]

    async def _step(self) -> None:
        match await self.line.event(self.stream):
            case Response() as response if response.status >= 200:
                self.answer.head(response)
            case Data() as data:
                self.line.peer.credit(data)
                self.answer.feed(data.buffers[0])
                self._count()
            case End(trailers=trailers):
                self.answer.end(trailers)
                self._count()
                self.over = self._ended()
            case Frame(data=frame):
                self._numbers.append(number_of(self.heard(frame)))
            case Close(code=code, reason=reason):
                await self.line.peer.flush()  # the machine has answered
                self.over = Over("complete" if code == 1000 else "error", reason, str(code))
            case Reset() | ConnectionEnd() as end:
                self.over = Over("cut", code=str(getattr(end, "code", "")))

    def heard(self, data: Any) -> Any:
        """The message of a frame."""
        return bytes(data)

    def _count(self) -> None:
        """An answer of one piece has no numbers here: its text is at its end."""
        if not self._whole:
            self._numbers += map(number_of, self.answer.messages)
            self.answer.messages.clear()

    def _ended(self) -> Over:
        answer = self.answer
        text = answer.body.decode(errors="replace")
        if isinstance(answer, CallAnswer):
            return self._ended_with(answer)
        if answer.status != 200:
            return Over("refused", text, str(answer.status))
        if answer.error:
            failure = getattr(answer, "failure", None)
            return Over("error", failure.message, failure.exception_type) if failure else Over("error", answer.error)
        return Over("complete", text, "200") if self._whole else Over("complete")

    def _ended_with(self, answer: CallAnswer) -> Over:
        """The end of a gRPC call. A request of a stream that goes on ends without a code."""
        assert answer.code is not None
        if not answer.error:
            return Over("complete", code="200" if self._whole else "")
        code = str(answer.code.value) if answer.code else ""
        return Over("refused" if answer.refused else "error", answer.error, code)

    async def leave(self, how: Leave | GoAway) -> None:
        """The client leaves as the simulator's clients do, or sends GOAWAY before it closes."""
        line = self.line
        match how:
            case Leave.CLOSE:
                line.peer.close()
            case Leave.HALF:
                line.transport.send_eof()
            case Leave.RESET:
                line.reset()
            case Leave.STREAM:
                await line.send(Reset(stream=self.stream, code=8) if line.http2 else Close(code=1000))
            case GoAway():
                await line.send(how)
                line.peer.close()


def number_of(message: Any) -> int:
    """The number of a model's message, from the form of any wire."""
    match message:
        case str() | bytes():
            return int(message[:8])
        case dict():
            return int(message["y"][0]) - BASE
        case _:
            return int(message["y"].elements[0]) - BASE


class DuplexCall(Call):
    """One whose client sends numbered parts too."""

    _said = 0

    def part(self, size: int = PAYLOAD) -> Any:
        """The next part, as its wire frames it."""
        data = f"{self._said:08d}".encode().ljust(size, b".")
        self._said += 1
        return self.framed(data)

    def framed(self, data: bytes) -> Any:
        raise NotImplementedError

    async def say(self, size: int = PAYLOAD) -> None:
        await self.line.send(self.part(size))


class EventsCall(DuplexCall):
    """BiDi over HTTP/2."""

    def framed(self, data: bytes) -> Data:
        return Data(stream=self.stream, buffers=tuple(self.encoded(data)))

    def encoded(self, data: bytes) -> Any:
        return bidi.encode_request_part(data, date_ms=0)

    def encoded_end(self) -> Any:
        return bidi.encode_request_end(date_ms=0)

    async def hush(self) -> None:
        """Completes the input."""
        end = tuple(self.encoded_end())
        await self.line.send(*([Data(stream=self.stream, buffers=end)] if end else []), End(stream=self.stream))


class JSONEventsCall(EventsCall):
    """The seed's JSON form as events. The first of them comes before the numbered ones, and tells the form."""

    async def open(self, question: Question) -> None:
        await super().open(question)
        await self.line.send(self.framed(b"hello"))

    def encoded(self, data: bytes) -> Any:
        return bidi.encode_envelope(b"".join(bidi.encode_json_event(data)), date_ms=0)


class LiteralCall(EventsCall):
    """The seed's JSON form as it stands: a run of objects."""

    def encoded(self, data: bytes) -> Any:
        return bidi.encode_literal_part(data)

    def encoded_end(self) -> Any:
        return ()


class SignedCall(EventsCall):
    """BiDi whose head and events are signed."""

    def signed(self, request: Request) -> Request:
        head = request.head
        given = sigv4.sign_request(head, SIGNER, now=time.time(), payload=sigv4.STREAMING_EVENTS)
        assert given.events is not None
        self._signer = given.events
        return raw(request.stream, head.method, head.target.decode(), headers=[*head.headers, *given.headers])

    def _sealed(self, event: bytes) -> Any:
        date = int(time.time() * 1000)
        return bidi.encode_envelope(event, date_ms=date, signature=self._signer.sign(date, event))

    def encoded(self, data: bytes) -> Any:
        return self._sealed(bidi.encode_request_event(data))

    def encoded_end(self) -> Any:
        return self._sealed(b"")


class SocketCall(DuplexCall):
    """The container's WebSocket."""

    async def open(self, question: Question) -> None:
        """Its handshake was the request."""

    def framed(self, data: bytes) -> Frame:
        return Frame(opcode=Opcode.BINARY, fin=True, data=data)


class SessionCall(SocketCall):
    """A WebSocket session of v2. An error of the model is the end of its request, and here of the call: there is one."""

    async def open(self, question: Question) -> None:
        asked = {"id": "7", **json.loads(question.body or b"")}
        await self.line.send(Frame(opcode=Opcode.TEXT, fin=True, data=json.dumps(asked).encode()))

    def heard(self, data: Any) -> Any:
        return v2.decode_streamed_reply(data)


_BY_FORM: dict[Form, type[Call]] = {Form.BIDI: EventsCall, Form.SOCKET: SocketCall}
_CALLS: dict[str, type[Call]] = {
    "bidi-json": JSONEventsCall,
    "bidi-literal": LiteralCall,
    "bidi-signed": SignedCall,
    "v2session": SessionCall,
}
"""By the names of wires that have a class of their own."""


def raw(stream: int, method: bytes, path: str, **options: Any) -> Request:
    """A request by hand."""
    return Request(stream=stream, head=Head(method=method, target=path.encode(), authority=b"localhost", **options))
