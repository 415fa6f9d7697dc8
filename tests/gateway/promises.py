"""Short words for the promises: models that keep count, callers that stop, leave or lie, and the ledger of what is left."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import trio
from trio.testing import wait_all_tasks_blocked

from gateway import client
from gateway.client import Peer
from gateway.config import Config, LimitsConfig, SigV4Config
from gateway.containers.connection import ContainerLimits
from gateway.containers.model import container_spec
from gateway.core.connection import Connection
from gateway.errors import TransportLost
from gateway.net.transport import MemoryTransport
from gateway.testing import MemoryGateway, memory_gateway
from gateway.wires.http2 import HTTP2Wire
from models.adapt import spec_of
from models.messages import Family, InferResponse, Part, Tensor, Token
from models.session import Session
from models.spec import ModelSpec
from protocols import v2
from protocols.aws import bidi, sigv4
from protocols.errors import RemoteProtocolError
from protocols.events import Close, ConnectionEnd, Data, End, Frame, GoAway, Opcode, Ping, Pong, Request, Reset, Response
from protocols.http2.frames import Kind
from protocols.lmi import parse_stream_line
from protocols.sse import ServerSentEvent, SSEDecoder
from tests.gateway import ways

KiB = 1024
PAYLOAD = 1000
EPOCH = 784111777.0
"""The time on the wall clock of `serving`, always."""
NOW = b"Sun, 06 Nov 1994 08:49:37 GMT"
DATE = b"date: %b\r\n" % NOW
"""Bytes of a numbered message, as its model makes it."""
BASE = 10_000_000
"""What is added to a number in a tensor, so that all have one length in JSON."""

CANCELLED = {"cancelled-by-client": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A wire's calls: what carries them, and how they say what went wrong."""

    family: Family = Family.PARTS
    transport: str = "http2"
    streams: bool = True
    """Whether each message leaves when it is sent."""
    duplex: bool = False
    opens: bool = False
    """Whether a duplex client speaks first: its first message tells the form of the answer."""
    in_band: str = "line"
    """Where an answer that has begun says its error: in a last "line", an "event", a "close"; or the body is "cut"."""
    blames: bool = False
    """Whether the platform answers for its model: 424, whatever the model's own status was."""
    crash: str = "424"
    """The status of a model that raised."""
    accepted: bool = False
    """Whether the head goes out before the model is called."""
    survives: bool = False
    """Whether it goes on after an error of its model, which ends one request of many."""

    @property
    def asked(self) -> bool:
        """Whether there is a message before the answer."""
        return self.opens or not self.duplex

    def expected(self, *, lost: bool = False) -> tuple[str, str]:
        """`how` and `code` of an error in the middle of an answer; `lost`: it was not the model's fault."""
        match self.in_band:
            case "event":
                return "error", "InternalStreamFailure" if lost else "ModelStreamError"
            case "close":
                return "error", "1011"
            case "cut":
                return "cut", ""
            case _:
                return "error", ""

    def failed(self, over: Over, text: str, *, lost: bool = False) -> None:
        """The end of an answer in the middle says this error, as far as the wire has words."""
        how, code = self.expected(lost=lost)
        assert over.how == how
        if how == "error":
            assert over.code == code
            assert text in over.text


_BIDI = Wire(duplex=True, in_band="event", accepted=True)
_SOCKET = Wire(transport="websocket", duplex=True, in_band="close", accepted=True)


def _both(name: str, **about: Any) -> dict[str, Wire]:
    return {f"{name}-{transport}": Wire(transport=transport, **about) for transport in ("http1", "http2")}


WIRE: dict[str, Wire] = {
    **_both("lmi", family=Family.TEXT),
    "bidi": _BIDI,
    "websocket": _SOCKET,
    # what SageMaker's platform and its containers add
    **_both("stream", family=Family.TEXT, in_band="event", blames=True),
    **_both("streamparts", in_band="event", blames=True),
    **_both("invoke", family=Family.TEXT, blames=True),
    **_both("invokeparts", in_band="cut", blames=True),
    **_both("container", in_band="cut", crash="500"),
    **_both("mme", in_band="cut", crash="500"),
    "bidi-json": replace(_BIDI, opens=True),
    "bidi-literal": _BIDI,
    "bidi-signed": _BIDI,
    "bidi-padded": _BIDI,
    "websocket-anywhere": _SOCKET,  # of the model "probe"
    "bridge": _BIDI,
    # v2, with each response as it comes
    **_both("inferstream", family=Family.TENSOR, crash="500"),
    **_both("inferframes", family=Family.TENSOR, crash="500"),
    **_both("generatestream", family=Family.TENSOR, crash="500"),
    "v2session": Wire(family=Family.TENSOR, transport="websocket", in_band="close", accepted=True, survives=True),
    # answers of one piece
    **_both("json", family=Family.TEXT, streams=False),
    **_both("v2", family=Family.TENSOR, streams=False, crash="500"),
    **_both("invokejson", family=Family.TEXT, streams=False, blames=True),
    **_both("invokev2", family=Family.TENSOR, streams=False, blames=True),
    "streamv2-http2": Wire(family=Family.TENSOR, streams=False, blames=True),
}
WIRES = tuple(WIRE)
STREAMS = tuple(name for name, wire in WIRE.items() if wire.streams)
UNARY = tuple(name for name, wire in WIRE.items() if not wire.streams)
DUPLEX = tuple(name for name, wire in WIRE.items() if wire.duplex)
_ANYWHERE = "probe"
PADDING = 64
"""The most of a padded wire's part."""


def family_of(wire: str) -> Family:
    """The family that a wire's dialect speaks."""
    return WIRE[wire].family


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
        return replace(config, sagemaker=replace(config.sagemaker, sigv4=verified))
    return config


# -- models ----------------------------------------------------------------------------------------------------------


class Probe:
    """A model that runs a script and keeps count of what became of it."""

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
        return spec_of(self, self.name, family=self.family, **options)

    def speak(self, wire: str) -> None:
        """From now on its messages are that wire's."""
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
        """The request, where the wire has one before the answer."""
        if self.asked:
            await session.receive()

    async def say(self, session: Session[Any, Any], times: int = 1) -> None:
        """The next numbers."""
        for _ in range(times):
            await session.send(self.message(self.sent))
            self.sent += 1

    async def hear(self, session: Session[Any, Any]) -> int:
        """The number of the next part."""
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
        """What the models of a bridge are served by."""
        self.lines: list[Line] = []
        self._tasks = self._tasks_before = 0

    def line(self, kind: str) -> Line:
        """A new client connection, "http1" or "http2"."""
        transport = Tap(self.memory.connect())
        peer = client.http1(transport) if kind == "http1" else client.http2(transport)
        return self._keep(Line(peer, transport))

    async def call(self, wire: str, model: str = "probe", line: Line | None = None, **options: Any) -> Call:
        """A call of a model over a wire, on a connection of its own where none is given; its request is written."""
        about = WIRE[wire]
        if about.transport == "websocket":
            tap = Tap(self.memory.connect())
            named = f"/models/{model}/invocations-bidirectional-stream"
            if wire == "v2session":
                session = SessionCall(self._keep(Line(await client.websocket(tap, f"/v2/models/{model}/infer"), tap)), 1)
                await session.ask()
                return session
            anywhere = wire == "websocket-anywhere" and model == _ANYWHERE
            peer = await client.websocket(tap, "/as/one/likes.it?a=b" if anywhere else named)
            return SocketCall(self._keep(Line(peer, tap)), 1)
        line = line or self.line(about.transport)
        call: Call = _CALLS[wire.removesuffix(f"-{about.transport}")](line, line.next_stream())
        opening: Any = call.open  # each has options of its own
        await opening(model, **options)
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
        head, *rest = client.post(stream, path, body, headers)
        named = raw(stream, method, path, headers=head.headers, content_length=head.content_length)
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
        """Everything has run as far as it can without time or a client."""
        await wait_all_tasks_blocked()

    async def opened(self, before: int) -> None:
        self._tasks_before, self._tasks = before, await self._busy_tasks()

    async def _busy_tasks(self) -> int:
        gateways = [self.gateway, *(container.gateway for container in self.containers)]
        return await tasks() - sum(gateway.server.runner.idle for gateway in gateways)

    def check_ledger(self) -> None:
        """No exchange is live, so nothing is held: no byte, no slot, no credit, on connections that stay open."""
        counts = self.gateway.counts()
        assert (counts.exchanges, counts.bytes_reserved, counts.slots_in_use) == (0, 0, 0)
        for container in self.containers:
            left = container.gateway.counts()
            assert (left.connections, left.exchanges, left.bytes_reserved, left.slots_in_use) == (0, 0, 0, 0)
        for connection in self.gateway.server.connections:
            assert not connection.exchanges
            if isinstance(connection.wire, HTTP2Wire):
                machine = connection.wire._machine
                assert (machine.open_streams, machine.unconsumed) == (0, 0)
                assert all(ledger.available == ledger.library for ledger in machine.windows().values())

    async def closed(self) -> None:
        """The clients leave: neither connection nor task outlives them. What was loaded at run time goes too."""
        await self.still()
        self.check_ledger()
        repository = self.gateway.repository
        for model in repository.list():
            await repository.unload(model.name)
        assert (repository.names, repository.used) == ([], 0)
        for line in self.lines:
            line.peer.close()
        await self.still()
        counts = self.gateway.counts()
        assert (counts.connections, counts.exchanges, counts.bytes_reserved, counts.slots_in_use) == (0, 0, 0, 0)
        drained = self.gateway.over
        if not (drained and self.containers):  # those have no drain
            assert await self._busy_tasks() == (self._tasks_before if drained else self._tasks)


async def tasks() -> int:
    """Tasks that live when everything stands still."""
    await wait_all_tasks_blocked()
    return trio.lowlevel.current_statistics().tasks_living


@asynccontextmanager
async def serving(
    *specs: ModelSpec, config: Config | None = None, capacity: int = 64 * KiB, wire: str = "bidi"
) -> AsyncIterator[House]:
    """A house for one story. At its end the clients leave and nothing may be left: the ledger is checked twice, with
    the connections open and with them closed. What hangs fails after 1,000 s of the (mocked) clock. `wire` is the one
    that needs a configuration or a bridge of its own."""
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
                memory_gateway(served, config, capacity=capacity, wall_clock=lambda: EPOCH)
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
    """On a mocked clock: what happens inside waits for no timer."""
    began = trio.current_time()
    yield
    assert trio.current_time() == began


def limits(**changes: Any) -> Config:
    """A configuration with other limits."""
    return Config(limits=replace(LimitsConfig(), **changes))


# -- clients ---------------------------------------------------------------------------------------------------------


class Tap:
    """A transport that remembers what the client has read."""

    short_is_dry = False

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
        """The same past the machine: `transport.read` has it all."""
        buffer = memoryview(bytearray(64 * KiB))
        while (n := self.transport.try_receive_into(buffer)) != 0:
            if n is None:
                await self.transport.wait_readable()

    def send_and_close(self, *events: Any) -> None:
        """All of it before the server can look."""
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

    def __init__(self, line: Line, stream: int) -> None:
        self.line, self.stream = line, stream
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.over: Over | None = None
        self._numbers: deque[int] = deque()
        self._failure: Over | None = None

    async def open(self, model: str) -> None:
        raise NotImplementedError

    async def next(self) -> int | Over:
        while not self._numbers:
            if self.over is not None:
                return self.over
            await self._step()
        return self._numbers.popleft()

    async def rest(self) -> tuple[list[int], Over]:
        """The numbers that are still to come, and how it ended."""
        numbers: list[int] = []
        while isinstance(number := await self.next(), int):
            numbers.append(number)
        return numbers, number

    async def take(self, n: int) -> list[int]:
        numbers = [await self.next() for _ in range(n)]
        assert all(isinstance(number, int) for number in numbers), numbers
        return numbers  # type: ignore[return-value]

    async def _step(self) -> None:
        event = await self.line.event(self.stream)
        match event:
            case Response() if event.status >= 200:
                self.status, self.headers = event.status, dict(event.headers)
                self._body = bytearray()
            case Data():
                self.line.peer.credit(event)
                self.feed(bytes(event.buffers[0]))
            case End():
                self.over = self.ended()
            case Reset() | ConnectionEnd():
                self.over = Over("cut", code=str(getattr(event, "code", "")))

    def feed(self, data: bytes) -> None:
        self._body += data

    def ended(self) -> Over:
        text = self._body.decode(errors="replace")
        return Over("complete" if self.status == 200 else "refused", text, str(self.status))

    async def leave(self, how: str) -> None:
        """The client goes away: "fin", "half-close" (of the transport), "rst", "reset" (RST_STREAM), "goaway", "close"
        (a WebSocket Close)."""
        line = self.line
        match how:
            case "fin":
                line.peer.close()
            case "half-close":
                line.transport.send_eof()
            case "rst":
                line.reset()
            case "reset":
                await line.send(Reset(stream=self.stream, code=8))
            case "goaway":
                await line.send(GoAway())
                line.peer.close()
            case "close":
                await line.send(Close(code=1000))


class LinesCall(Call):
    """LMI, jsonlines."""

    path = "/predictions/{}"

    async def open(self, model: str, *, upto: int = 65536, body: bytes | None = None) -> None:
        asked = {"inputs": "x", "stream": True, "parameters": {"max_new_tokens": upto}}
        self._whole = False
        await self.line.send(*client.post(self.stream, self.path.format(model), body or json.dumps(asked).encode()))

    def feed(self, data: bytes) -> None:
        self._body += data
        while self.status == 200 and b"\n" in self._body:
            line, _, rest = bytes(self._body).partition(b"\n")
            self._body[:] = rest
            document = parse_stream_line(line)
            token = document["token"]
            if "error_msg" in token:
                self._failure = Over("error", token["error_msg"])
            elif not token.get("special_token"):
                self._numbers.append(token["id"])
            self._whole |= "generated_text" in document

    def ended(self) -> Over:
        if self.status != 200:
            return Call.ended(self)
        return self._failure or (Over("complete") if self._whole else Over("cut", "no last line"))


class JSONCall(LinesCall):
    """LMI, one JSON document."""

    async def open(self, model: str, *, upto: int = 1000, body: bytes | None = None) -> None:
        asked = {"inputs": "x", "parameters": {"max_new_tokens": upto}}
        await self.line.send(*client.post(self.stream, self.path.format(model), body or json.dumps(asked).encode()))

    feed, ended = Call.feed, Call.ended


class InferCall(Call):
    """v2 infer."""

    path = "/v2/models/{}/infer"

    async def open(self, model: str) -> None:
        tensor = {"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}
        body = json.dumps({"inputs": [tensor]}).encode()
        await self.line.send(*client.post(self.stream, self.path.format(model), body))


class StreamedReplies(InferCall):
    """v2 infer_stream, as server-sent events."""

    path = "/v2/models/{}/infer_stream"

    async def open(self, model: str) -> None:
        await super().open(model)
        self._events = SSEDecoder()

    def feed(self, data: bytes) -> None:
        if self.status != 200:
            self._body += data
            return
        self._events.receive_data(data)
        while isinstance(event := self._events.next_event(), ServerSentEvent):
            self.told(event.data)

    def told(self, data: Any, header_length: int | None = None) -> None:
        assert self._failure is None, "a response after the last"
        try:
            self._numbers.append(int(v2.decode_streamed_reply(data, header_length)["y"].elements[0]) - BASE)
        except v2.V2Error as error:
            self._failure = Over("error", error.message)

    def ended(self) -> Over:
        return super().ended() if self.status != 200 else self._failure or Over("complete")


class FramedReplies(StreamedReplies):
    """v2 infer_stream, as frames."""

    async def open(self, model: str) -> None:
        tensor = v2.V2Tensor(name="x", datatype="INT64", array=np.array([1]))
        headers, body = v2.encode_infer_request([tensor], binary_data_output=True)
        asked = [*(h for h in headers if h[0] != b"content-length"), (b"accept", v2.FRAMES.encode())]
        await self.line.send(*client.post(self.stream, self.path.format(model), b"".join(body), asked))
        self._frames = v2.FrameDecoder()

    def feed(self, data: bytes) -> None:
        if self.status != 200:
            self._body += data
            return
        self._frames.receive_data(data)
        while isinstance(frame := self._frames.next_frame(), v2.V2Frame):
            self.told(frame.body, frame.header_length)

    def ended(self) -> Over:
        if self.status == 200:
            self._frames.receive_eof()
        return super().ended()


class GeneratedReplies(StreamedReplies):
    """v2 generate_stream of a model of tensors."""

    path = "/v2/models/{}/generate_stream"

    async def open(self, model: str) -> None:
        await self.line.send(*client.post(self.stream, self.path.format(model), b'{"x":1}'))
        self._events = SSEDecoder()

    def told(self, data: Any, header_length: int | None = None) -> None:
        assert self._failure is None, "a response after the last"
        reply = json.loads(data)
        if "error" in reply:
            self._failure = Over("error", reply["error"])
        else:
            self._numbers.append(reply["y"][0] - BASE)


class BodyCall(Call):
    """A model of parts whose answer is a body as it is, or one part after the other."""

    path = "/invocations?model_name={}"

    async def open(self, model: str) -> None:
        await self.line.send(*client.post(self.stream, self.path.format(model), b"00000000"))

    def feed(self, data: bytes) -> None:
        self._body += data
        while self.status == 200 and len(self._body) >= PAYLOAD:
            self._numbers.append(int(self._body[:8]))
            del self._body[:PAYLOAD]

    def ended(self) -> Over:
        if self.status != 200:
            return super().ended()
        assert not self._body, "half a message"
        return self._failure or Over("complete")


class Events:
    """The response stream: the body comes in PayloadParts. Before the class whose body that is."""

    path = "/endpoints/{}/invocations-response-stream"
    _decoder: bidi.ResponseDecoder | None = None
    _failure: Over | None

    def feed(self: Any, data: bytes) -> None:
        if self.status != 200:
            self._body += data
            return
        decoder = self._decoder = self._decoder or bidi.ResponseDecoder()
        decoder.receive_data(data)
        while True:
            match decoder.next_event():
                case bidi.PayloadPart(data=part):
                    super().feed(bytes(part))  # type: ignore[misc]
                case bidi.StreamFailure() as failure:
                    self._failure = Over("error", failure.message, failure.exception_type)
                case _:
                    return

    def ended(self: Any) -> Over:
        if self.status == 200 and self._decoder is not None:
            self._decoder.receive_eof()
        return self._failure or super().ended()  # type: ignore[misc,no-any-return]


class StreamedLines(Events, LinesCall):
    """InvokeEndpointWithResponseStream, text."""


class StreamedParts(Events, BodyCall):
    """InvokeEndpointWithResponseStream, parts."""


class StreamedInfer(Events, InferCall):
    """InvokeEndpointWithResponseStream, tensors."""


class InvokedLines(LinesCall):
    """InvokeEndpoint, text in lines."""

    path = "/endpoints/{}/invocations"


class InvokedJSON(JSONCall):
    """InvokeEndpoint, text in one document."""

    path = "/endpoints/{}/invocations"


class InvokedInfer(InferCall):
    """InvokeEndpoint, tensors."""

    path = "/endpoints/{}/invocations"


class InvokedParts(BodyCall):
    """InvokeEndpoint, parts."""

    path = "/endpoints/{}/invocations"


class MMECall(BodyCall):
    """The multi-model container's invoke."""

    path = "/models/{}/invoke"


class EventsCall(Call):
    """BiDi over HTTP/2."""

    content_type = bidi.CONTENT_TYPE
    _said = 0

    async def open(self, model: str) -> None:
        self._decoder = bidi.ResponseDecoder()
        path = f"/endpoints/{model}/invocations-bidirectional-stream"
        (head,) = client.post(self.stream, path, None, [(b"content-type", self.content_type.encode())])
        await self.line.send(self.signed(head))

    def signed(self, head: Request) -> Request:
        return head

    def part(self, size: int = PAYLOAD) -> Data:
        """The next numbered part, as the SDK frames it."""
        data = f"{self._said:08d}".encode().ljust(size, b".")
        self._said += 1
        return Data(stream=self.stream, buffers=tuple(self.encoded(data)))

    def encoded(self, data: bytes) -> Any:
        return bidi.encode_request_part(data, date_ms=0)

    def encoded_end(self) -> Any:
        return bidi.encode_request_end(date_ms=0)

    async def say(self, size: int = PAYLOAD) -> None:
        await self.line.send(self.part(size))

    async def hush(self) -> None:
        """The input is complete."""
        end = tuple(self.encoded_end())
        await self.line.send(*([Data(stream=self.stream, buffers=end)] if end else []), End(stream=self.stream))

    def feed(self, data: bytes) -> None:
        if self.status != 200:
            self._body += data
            return
        self._decoder.receive_data(data)
        while True:
            match self._decoder.next_event():
                case bidi.PayloadPart(data=part):
                    self._numbers.append(int(bytes(part[:8])))
                case bidi.StreamFailure() as failure:
                    self._failure = Over("error", failure.message, failure.exception_type)
                case _:
                    return

    def ended(self) -> Over:
        if self.status != 200:
            return super().ended()
        self._decoder.receive_eof()
        return self._failure or Over("complete")


class JSONEventsCall(EventsCall):
    """The seed's JSON form as events. The first of them comes before the numbered ones, and tells the form."""

    async def open(self, model: str) -> None:
        await super().open(model)
        await self.line.send(Data(stream=self.stream, buffers=tuple(self.encoded(b"hello"))))

    def encoded(self, data: bytes) -> Any:
        return bidi.encode_envelope(b"".join(bidi.encode_json_event(data)), date_ms=0)


class LiteralCall(EventsCall):
    """The seed's JSON form as it stands: a run of objects."""

    content_type = bidi.JSON_CONTENT_TYPE

    def encoded(self, data: bytes) -> Any:
        return bidi.encode_literal_part(data)

    def encoded_end(self) -> Any:
        return ()

    def feed(self, data: bytes) -> None:
        self._body += data
        while self.status == 200 and b"\n" in self._body:
            line, _, rest = bytes(self._body).partition(b"\n")
            self._body[:] = rest
            ((kind, members),) = json.loads(line).items()
            assert self._failure is None, "a line after the last"
            if kind == "PayloadPart":
                self._numbers.append(int(base64.b64decode(members["Bytes"])[:8]))
            else:
                self._failure = Over("error", members["Message"], kind)


class SignedCall(EventsCall):
    """BiDi whose head and events are signed."""

    def signed(self, head: Request) -> Request:
        given = sigv4.sign_request(head, SIGNER, now=time.time(), payload=sigv4.STREAMING_EVENTS)
        assert given.events is not None
        self._signer = given.events
        return raw(head.stream, head.method, head.target.decode(), headers=[*head.headers, *given.headers])

    def _sealed(self, event: bytes) -> Any:
        date = int(time.time() * 1000)
        return bidi.encode_envelope(event, date_ms=date, signature=self._signer.sign(date, event))

    def encoded(self, data: bytes) -> Any:
        return self._sealed(bidi.encode_request_event(data))

    def encoded_end(self) -> Any:
        return self._sealed(b"")


class SocketCall(Call):
    """The container's WebSocket."""

    _said = 0

    def part(self, size: int = PAYLOAD) -> Frame:
        data = f"{self._said:08d}".encode().ljust(size, b".")
        self._said += 1
        return Frame(opcode=Opcode.BINARY, fin=True, data=data)

    async def say(self, size: int = PAYLOAD) -> None:
        await self.line.send(self.part(size))

    def heard(self, data: Any) -> int:
        return int(bytes(data[:8]))

    async def _step(self) -> None:
        match await self.line.event(1):
            case Frame(data=data):
                self._numbers.append(self.heard(data))
            case Close(code=code, reason=reason):
                await self.line.peer.flush()  # the machine has answered
                self.over = Over("complete" if code == 1000 else "error", reason, str(code))
            case ConnectionEnd():
                self.over = Over("cut")
            case Ping() | Pong():
                pass


class SessionCall(SocketCall):
    """A WebSocket session of v2. An error of the model is the end of its request, and here of the call: there is one."""

    async def ask(self) -> None:
        """One request."""
        tensor = {"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}
        await self.line.send(Frame(opcode=Opcode.TEXT, fin=True, data=json.dumps({"id": "7", "inputs": [tensor]}).encode()))

    def heard(self, data: Any) -> int:
        return int(v2.decode_streamed_reply(data)["y"].elements[0]) - BASE


_CALLS: dict[str, type[Any]] = {
    "lmi": LinesCall,
    "json": JSONCall,
    "v2": InferCall,
    "inferstream": StreamedReplies,
    "inferframes": FramedReplies,
    "generatestream": GeneratedReplies,
    "stream": StreamedLines,
    "streamparts": StreamedParts,
    "streamv2": StreamedInfer,
    "invoke": InvokedLines,
    "invokejson": InvokedJSON,
    "invokev2": InvokedInfer,
    "invokeparts": InvokedParts,
    "container": BodyCall,
    "mme": MMECall,
    "bidi": EventsCall,
    "bidi-json": JSONEventsCall,
    "bidi-literal": LiteralCall,
    "bidi-signed": SignedCall,
    "bidi-padded": EventsCall,
    "bridge": EventsCall,
}
"""By the wire's name without its transport."""


def raw(stream: int, method: bytes, path: str, **options: Any) -> Request:
    """A request head by hand."""
    return Request(stream=stream, method=method, target=path.encode(), authority=b"localhost", **options)
