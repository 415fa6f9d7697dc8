"""The sweep's stories on SageMaker's wires: both sides of the platform, a container behind it, models that come and go."""

from __future__ import annotations

import base64
import functools
import json
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio

from gateway import client
from gateway.client import Peer
from gateway.config import BidiConfig, EndpointConfig, RepositoryConfig, SigV4Config
from gateway.containers.connection import ContainerLimits
from gateway.containers.model import container_spec
from gateway.errors import TransportLost
from gateway.net.transport import MemoryTransport, memory_pair
from models.errors import ModelError
from models.messages import Family, Part
from models.session import Session
from models.spec import Model, ModelSpec
from protocols.aws import bidi, sigv4
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Close, ConnectionEnd, Data, End, Frame, Headers, Request, Response
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection
from protocols.websocket.handshake import END_OF_INPUT, accept_headers, end_of_input
from tests.gateway.sweep_scenarios import (
    _EVENTS,
    _JSON,
    _SMALL,
    _STREAM,
    COMPANION,
    FRESH,
    NEIGHBOUR,
    NEXT,
    VICTIM,
    Boom,
    HTTP2Line,
    LinesParser,
    Parser,
    PartsParser,
    Scenario,
    Stage,
    Talk,
    View,
    Watched,
    _bidi_scenario,
    _line,
    _together,
    bidi_talk,
    echo,
    fragment,
    generate,
    numbered,
    on_stream,
    over_http1,
    over_websocket,
    pieces_of,
)

_PART = 400
_OCTETS: Headers = [(b"content-type", b"application/octet-stream")]
_HTTP = 4096 + 2048
"""What an HTTP/1.1 connection may hold: what is read ahead, and the send buffer with a message beyond it."""


# -- models and what is made of their answers ------------------------------------------------------------------------


def answer(stage: Stage) -> Model:
    """Takes the one part, and answers with parts of one size."""

    async def model(session: Session[Part, Part]) -> None:
        with stage.call(session.call.query) as talk:
            me = Watched[Part, Part](stage, session, talk)
            await me.receive()
            for i in range(5):
                if i % 2:
                    await trio.sleep(0.0007)
                await me.send(Part(data=b"%d" % i * _PART))
            await trio.sleep(0.0011)

    return model


class BodyParser(Parser):
    """A body as it is, read as parts of one size."""

    def data(self, piece: Buffer) -> None:
        super().data(piece)
        while self.status == 200 and len(self.body) >= _PART:
            self.talk.heard.append(fragment(self.body[:_PART], True))
            del self.body[:_PART]


class StreamedParser(Parser):
    """A response stream: another parser's body in PayloadParts."""

    def __init__(self, inner: Parser) -> None:
        super().__init__(inner.talk)
        self._inner, self._decoder, self._failed = inner, bidi.ResponseDecoder(), False

    def head(self, response: Response) -> None:
        super().head(response)
        self._inner.head(response)

    def data(self, piece: Buffer) -> None:
        if self.status != 200:
            return
        self._decoder.receive_data(piece)
        while isinstance(event := self._decoder.next_event(), bidi.PayloadPart | bidi.StreamFailure):
            if isinstance(event, bidi.PayloadPart):
                self._inner.data(event.data)
            else:
                self._failed = True

    def end(self) -> View:
        if self.status != 200:
            return View.ERROR
        self._decoder.receive_eof()
        return View.ERROR if self._failed else self._inner.end()


class LiteralParser(Parser):
    """The literal JSON form."""

    _failed = False

    def data(self, piece: Buffer) -> None:
        super().data(piece)
        while self.status == 200 and (at := self.body.find(b"\n")) >= 0:
            ((kind, members),) = json.loads(self.body[:at]).items()
            del self.body[: at + 1]
            if kind == "PayloadPart":
                last = members["CompletionState"] == bidi.Completion.COMPLETE.value
                self.talk.heard.append(fragment(base64.b64decode(members["Bytes"]), last))
            else:
                self._failed = True

    def end(self) -> View:
        if self.status != 200:
            return View.ERROR
        assert not self.body, "half an object"
        return View.ERROR if self._failed else View.COMPLETE


# -- one request, one body -------------------------------------------------------------------------------------------


def _unary(
    name: str,
    route: str,
    model: Callable[[Stage], Model],
    parser: Callable[[Talk], Parser],
    *,
    http2: bool = False,
    **more: Any,
) -> Scenario:
    """A request whose answer comes piece by piece: of text in lines, or of parts."""
    text = model is generate
    family = Family.TEXT if text else Family.PARTS

    async def ask(where: Peer | HTTP2Line, talk: Talk, pace: float = 0.0, words: int = 150) -> None:
        said = f"{talk.name} ".encode() * words
        body = json.dumps({"inputs": said.decode(), "parameters": {"max_new_tokens": 5}, "stream": True}).encode()
        headers, body, message = (_JSON, body, said) if text else (_OCTETS, said, fragment(said, True))
        path = route.format(talk.model) + talk.query
        content = pieces_of(talk, body, message, 3)
        if isinstance(where, HTTP2Line):
            await on_stream(where, talk, path, headers, content, parser(talk), pace=pace, length=len(body))
        else:
            await over_http1(where, 1, talk, path, headers, content, parser(talk), pace=pace, length=len(body))

    async def alone(stage: Stage, talk: Talk, **how: Any) -> None:
        if http2:
            async with _line(stage, talk.line) as line:
                await ask(line, talk, **how)
        else:
            peer = client.http1(stage.connect(talk.line))
            await ask(peer, talk, **how)
            peer.close()

    async def play(stage: Stage) -> None:
        victim, other = stage.talk(VICTIM), stage.talk(COMPANION, VICTIM if http2 else "", "n")
        if not http2:
            await _together(alone(stage, victim, pace=0.0004), alone(stage, other, words=20))
            return
        async with _line(stage, VICTIM) as line:
            await _together(ask(line, victim, 0.0003), ask(line, other, words=20))
            if line.machine.can_open:
                await ask(line, stage.talk(NEXT, VICTIM, "n"), words=1)

    async def again(stage: Stage) -> None:
        await alone(stage, stage.talk(FRESH), words=2)

    each = (_STREAM if http2 else _HTTP) + 2 * 8 * 150 + _PART
    settings: dict[str, Any] = {"memory": 2 * each, "buffer": 600} | more
    return Scenario(
        name=name, wire="http/2" if http2 else "http/1.1", model=model, family=family, play=play, again=again, **settings
    )


# -- the forms of BiDi -----------------------------------------------------------------------------------------------

_SIGNER = sigv4.Credentials(access_key_id="AKIDEXAMPLE", secret_access_key="a secret of ours", region="eu-west-1")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """What the stories need of a file system, as long as the process lasts."""
    folder = tempfile.TemporaryDirectory()
    keys = f"[sweep]\naws_access_key_id={_SIGNER.access_key_id}\naws_secret_access_key={_SIGNER.secret_access_key}\n"
    Path(folder.name, "credentials").write_text(keys)
    for name in ("a", "b", "c"):
        model = Path(folder.name, "models", name)
        model.mkdir(parents=True)
        (model / "model.toml").write_text('factory = "echo"\nmemory = 1000\ncapacity = 1\n')
    return folder


def _path(*names: str) -> str:
    return str(Path(_folder().name, *names))


Encode = Callable[[bytes, bool], Any]


def _ga(data: bytes, last: bool) -> Any:
    return bidi.encode_request_event(data, bidi.DataType.BINARY, _state(last))


def _json_event(data: bytes, last: bool) -> Any:
    return b"".join(bidi.encode_json_event(data, bidi.DataType.BINARY, _state(last)))


def _state(last: bool) -> bidi.Completion:
    return bidi.Completion.COMPLETE if last else bidi.Completion.PARTIAL


async def _talk_in_form(
    form: str, line: HTTP2Line, talk: Talk, parts: Sequence[tuple[bytes, bool]], *, pace: float = 0.0, cut: int = 0
) -> None:
    path = f"/endpoints/{talk.model}/invocations-bidirectional-stream{talk.query}"
    headers = [*_EVENTS, (bidi.MODEL_QUERY_STRING.encode(), talk.query[1:].encode())]
    sign: Callable[[int, bytes], bytes] = lambda date, event: bytes(32)  # noqa: E731
    if form == "signed":
        head = Request(stream=1, method=b"POST", target=path.encode(), authority=b"a", headers=headers)
        given = sigv4.sign_request(head, _SIGNER, now=time.time(), payload=sigv4.STREAMING_EVENTS)
        assert given.events is not None
        headers += given.headers
        sign = given.events.sign
    elif form == "literal":
        headers[0] = (b"content-type", bidi.JSON_CONTENT_TYPE.encode())

    def sealed(event: bytes) -> bytes:
        date = int(time.time() * 1000)
        return b"".join(bidi.encode_envelope(event, date_ms=date, signature=sign(date, event)))

    async def body() -> AsyncGenerator[Buffer, None]:
        for data, last in parts:
            await trio.sleep(0.0003)
            talk.asked.append(fragment(data, last))
            if form == "literal":
                written = b"".join(bidi.encode_literal_part(data, bidi.DataType.BINARY, _state(last)))
            else:
                written = sealed((_json_event if form == "json" else _ga)(data, last))
            half = len(written) // 2 + 1
            yield written[:half]
            yield written[half:]
        if form != "literal":
            yield sealed(b"")

    parse = LiteralParser(talk) if form == "literal" else PartsParser(talk)
    await on_stream(line, talk, path, headers, body, parse, pace=pace)


def _in_form(form: str, **more: Any) -> Scenario:
    # base64 is a third more, and the part that is put together from it is paid beside it
    settings: dict[str, Any] = {"memory": 3 * (_STREAM + 3 * 2600)} | more
    talk = functools.partial(_talk_in_form, form)
    return _bidi_scenario(f"bidi-{form}", echo, [10, 900, 2600, 5], talk=talk, **settings)


def _anywhere() -> Scenario:
    """A path that a client has made up: the default model's."""

    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model="n")
        frames = [*numbered(VICTIM, [10, 900, 1800, 1500]), (b"end", True)]
        await _together(
            over_websocket(stage, victim, frames, pace=0.0021, path="/any/path.of/theirs"),
            over_websocket(stage, neighbour, [*numbered(NEIGHBOUR, [30, 30]), (b"end", True)]),
        )

    async def again(stage: Stage) -> None:
        await over_websocket(stage, stage.talk(FRESH), [(b"end", True)], path="/x")

    return Scenario(
        name="anywhere",
        wire="websocket",
        model=echo,
        family=Family.PARTS,
        play=play,
        again=again,
        memory=2 * (_HTTP + 4000),
        config=replace(_SMALL, bidi=BidiConfig(default_model="m")),
    )


def _ended() -> Scenario:
    """A client of the container's WebSocket that says when there is no more input, and then waits for the answer."""

    async def play(stage: Stage) -> None:
        victim, neighbour = stage.talk(VICTIM), stage.talk(NEIGHBOUR, model="n")
        await _together(
            over_websocket(stage, victim, numbered(VICTIM, [10, 900, 1800]), pace=0.0021, ends=True),
            over_websocket(stage, neighbour, numbered(NEIGHBOUR, [30, 30, 30]), ends=True),
        )

    async def again(stage: Stage) -> None:
        await over_websocket(stage, stage.talk(FRESH), [(b"part", True)], ends=True)

    memory = 2 * (_HTTP + 4000)
    return Scenario(
        name="ended", wire="websocket", model=echo, family=Family.PARTS, play=play, again=again, memory=memory, config=_SMALL
    )


# -- a container behind a bridge -------------------------------------------------------------------------------------


def _bridged(
    stage: Stage, *, talk: Callable[[Stage, Peer, Request], Awaitable[None]] | None = None
) -> Callable[[str], ModelSpec]:
    """A spec of that name behind a container in memory, which does as `echo`, or as `talk`, over its WebSocket, and as
    `answer` at /invocations."""

    async def dial() -> MemoryTransport:
        await trio.lowlevel.checkpoint()
        ours, theirs = memory_pair(1500)
        stage.start_soon(_contain, stage, theirs, talk or _container_echo)
        return ours

    limits = ContainerLimits(health_interval=0, read_ahead=4096, half_close_quiet=0.001)
    return lambda name: container_spec("ws://container", name=name, limits=limits, dial=dial)


async def _contain(
    stage: Stage, transport: MemoryTransport, talk: Callable[[Stage, Peer, Request], Awaitable[None]]
) -> None:
    try:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        request = await peer.next_event()
        if not isinstance(request, Request):
            return
        if request.method == b"POST":
            await _invocation(stage, peer, request)
        elif not request.upgrade:
            await peer.send(Response(stream=1, status=200, headers=[(b"content-length", b"0")]), End(stream=1))
        else:
            await talk(stage, peer, request)
    except (TransportLost, RemoteProtocolError, LocalProtocolError, Boom, ModelError):
        pass  # the platform has left, or the container is gone
    finally:
        transport.close()


async def _invocation(stage: Stage, peer: Peer, request: Request) -> None:
    body = bytearray()
    while not isinstance(event := await peer.next_event(), End):
        if not isinstance(event, Data):
            return
        peer.credit(event)
        body += event.buffers[0]
    with stage.call(f"talk={body.partition(b' ')[0].decode()}") as talk:
        talk.taken.append(fragment(body, True))
        stage.point(talk)
        await peer.send(Response(stream=1, status=200, headers=_OCTETS))
        for i in range(5):
            await trio.sleep(0.0003)
            stage.point(talk)
            talk.said.append(fragment(b"%d" % i * _PART, True))
            await peer.send(Data(stream=1, buffers=(b"%d" % i * _PART,)))
        await peer.send(End(stream=1))
        while not isinstance(await peer.next_event(), ConnectionEnd):
            pass


async def _container_echo(stage: Stage, peer: Peer, request: Request) -> None:
    await peer.send(Response(stream=1, status=101, headers=accept_headers(request)))
    assert isinstance(peer.machine, HTTP1Connection)
    machine = WebSocketConnection(Role.SERVER)
    machine.receive_data(peer.machine.switch())
    peer = Peer(peer.transport, machine)
    with stage.call(request.target.partition(b"?")[2].decode()) as talk:
        while True:
            match await peer.next_event():
                case Frame() as frame:
                    stage.point(talk)
                    machine.credit(len(frame.data))
                    talk.taken.append(fragment(frame.data, frame.fin))
                    talk.said.append(fragment(frame.data, frame.fin))
                    await peer.send(frame)
                case Close():
                    await peer.flush()
                case ConnectionEnd():
                    return


def _behind_bridge() -> Scenario:
    found = _bidi_scenario("bridge", echo, [10, 900, 2600, 5], memory=3 * (_STREAM + 2600), neighbour=True)
    return replace(found, served=_bridged)


async def _late_answer(stage: Stage, peer: Peer, request: Request) -> None:
    """A container that is told the end of the input, and only then answers, one frame after the other, after a while."""
    end = end_of_input(request.headers)
    assert end is not None
    await peer.send(Response(stream=1, status=101, headers=[*accept_headers(request), (END_OF_INPUT, end)]))
    assert isinstance(peer.machine, HTTP1Connection)
    machine = WebSocketConnection(Role.SERVER)
    machine.receive_data(peer.machine.switch())
    peer = Peer(peer.transport, machine)
    with stage.call(request.target.partition(b"?")[2].decode()) as talk:
        frames: list[Frame] = []
        while not isinstance(event := await peer.next_event(), Close | ConnectionEnd):
            if isinstance(event, Frame):
                stage.point(talk)
                machine.credit(len(event.data))
                if event.data == end:
                    break
                talk.taken.append(fragment(event.data, event.fin))
                frames.append(event)
        else:
            await peer.flush()
            return
        for frame in frames:
            await trio.sleep(0.002)
            stage.point(talk)
            talk.said.append(fragment(frame.data, frame.fin))
            await peer.send(frame)
        await peer.send(Close())
        while not isinstance(await peer.next_event(), Close | ConnectionEnd):
            pass


async def _whole_talk(
    line: HTTP2Line, talk: Talk, parts: Sequence[tuple[bytes, bool]], *, pace: float = 0.0, cut: int = 0
) -> None:
    """A conversation whose last part ends its message: the container cannot be told the end in the middle of one."""
    await bidi_talk(line, talk, [*parts[:-1], (parts[-1][0], True)], pace=pace, cut=cut)


def _late_behind_bridge() -> Scenario:
    """The client has ended its input, and the session waits for the container's answer."""
    found = _bidi_scenario("bridge-late", echo, [10, 900, 2600], memory=3 * (_STREAM + 2600), talk=_whole_talk)
    return replace(found, served=functools.partial(_bridged, talk=_late_answer))


# -- models that come and go -----------------------------------------------------------------------------------------


async def _ask(peer: Peer, talk: Talk, method: bytes, path: str, body: bytes = b"", headers: Headers = ()) -> bytes:
    """One request on an HTTP/1.1 connection; the body of its answer."""
    kept = Parser(talk)

    async def content() -> AsyncGenerator[Buffer, None]:
        for at in range(0, len(body), 20):
            await trio.sleep(0.0017)  # some of it comes when the model is there
            yield body[at : at + 20]

    target = f"{path}{talk.query}"
    talk.asked.append(body)
    talk.taken.append(body)
    await over_http1(peer, 1, talk, target, headers, content, kept, length=len(body), method=method)
    return bytes(kept.body)


def _load(name: str) -> bytes:
    return json.dumps({"model_name": name, "url": _path("models", name)}).encode()


async def _alone(stage: Stage, name: str, method: bytes, path: str, body: bytes = b"", headers: Headers = ()) -> bytes:
    talk = stage.talk(name, model="n")
    peer = client.http1(stage.connect(talk.line))
    answered = await _ask(peer, talk, method, path, body, headers)
    peer.close()
    return answered


async def _clean_up(stage: Stage) -> None:
    """All of the API once more, and nothing is left: a model that was on its way is waited for."""
    repository = stage.repository
    assert not any(entry.users.count or entry.waiters for entry in repository.holdings.entries.values())
    while [model.name for model in repository.list()] != repository.names:  # noqa: ASYNC110  # nothing tells when
        await trio.sleep(0.001)
    if "c" not in repository.names:
        await _alone(stage, FRESH, b"POST", "/models", _load("c"))
    listed = json.loads(await _alone(stage, f"{FRESH}-list", b"GET", "/models"))
    names = [model["modelName"] for model in listed["models"]]
    assert names == repository.names
    said = await _alone(stage, f"{FRESH}-invoke", b"POST", "/models/c/invoke", b"said", _OCTETS)
    assert said == b"said"
    for name in names:
        await _alone(stage, f"{FRESH}-{name}", b"DELETE", f"/models/{name}")
    assert (repository.names, repository.used) == ([], 0)


def _models(name: str, play: Callable[[Stage], Awaitable[None]], without: Sequence[str] = ()) -> Scenario:
    roots = RepositoryConfig(roots=(_path("models"),), memory=3000, models=3)
    config = replace(
        _SMALL,
        sagemaker=replace(_SMALL.sagemaker, multi_model=True),
        repository=roots,
        endpoints={"many": EndpointConfig(models=_path("models"))},
    )
    return Scenario(
        name=name,
        wire="http/1.1",
        model=generate,
        family=Family.TEXT,
        play=play,
        again=_clean_up,
        memory=3 * (_HTTP + _STREAM),
        config=config,
        without=frozenset({"raise", *without}),
    )


async def _loading(stage: Stage) -> None:
    """Two load at once, and a third wants the name that is taken."""

    async def late() -> None:
        await trio.sleep(0.002)
        await _alone(stage, NEIGHBOUR, b"GET", "/models")

    await _together(
        _one_of_model(stage, VICTIM, b"POST", "/models", _load("a")),
        _alone(stage, f"{NEIGHBOUR}-b", b"POST", "/models", _load("b")),
        late(),
    )


async def _one_of_model(stage: Stage, name: str, method: bytes, path: str, body: bytes = b"", headers: Headers = ()) -> None:
    """The same for the victim."""
    talk = stage.talk(name)
    peer = client.http1(stage.connect(talk.line))
    await _ask(peer, talk, method, path, body, headers)
    peer.close()


async def _unloading(stage: Stage) -> None:
    """A model is unloaded while one session is under way, and another waits for its slot."""
    stage.patient = True
    await _alone(stage, "before", b"POST", "/models", _load("a"))
    stage.patient = False
    queued = _library_talk(stage, "queued")

    async def session(talk: Talk, delay: float, sizes: Sequence[int]) -> None:
        await trio.sleep(delay)
        async with _line(stage, talk.line) as line:
            await bidi_talk(line, talk, numbered(talk.name, sizes), pace=0.0003)

    async def unload() -> None:
        await trio.sleep(0.0008)
        await _one_of_model(stage, VICTIM, b"DELETE", "/models/a")

    await _together(session(_library_talk(stage, NEIGHBOUR), 0, [10, 700, 20]), session(queued, 0.0004, [10]), unload())
    queued.asked.clear()  # it may be told that the model is gone


def _library_talk(stage: Stage, name: str) -> Talk:
    """A talk with a loaded model, which remembers nothing: it sends back what it is sent."""
    talk = stage.talk(name, model="a")
    talk.taken, talk.said = talk.asked, talk.heard
    return talk


async def _using(stage: Stage) -> None:
    """The first use of a model, and another's beside it."""
    await _together(
        _one_of_model(stage, VICTIM, b"POST", "/endpoints/many/invocations", b"one " * 50, _target("a")),
        _alone(stage, NEIGHBOUR, b"POST", "/endpoints/many/invocations", b"two", _target("b")),
        _alone(stage, f"{NEIGHBOUR}-a", b"POST", "/endpoints/many/invocations", b"three", _target("a")),
    )


def _target(model: str) -> Headers:
    return [*_OCTETS, (b"x-amzn-sagemaker-target-model", f"{model}.tar.gz".encode())]


def _scenarios() -> list[Scenario]:
    streamed_lines = lambda talk: StreamedParser(LinesParser(talk))  # noqa: E731
    streamed_parts = lambda talk: StreamedParser(BodyParser(talk))  # noqa: E731
    stream, invoke = "/endpoints/{}/invocations-response-stream", "/endpoints/{}/invocations"
    signed = replace(_SMALL, sagemaker=replace(_SMALL.sagemaker, sigv4=SigV4Config(credentials=_path("credentials"))))
    bridge_invoke = _unary("bridge-invoke", stream, answer, streamed_parts)
    return [
        _unary("stream", stream, generate, streamed_lines),
        _unary("stream-h2", stream, answer, streamed_parts, http2=True),
        _unary("invoke", invoke, answer, BodyParser, cuts=True),
        _unary("invoke-h2", invoke, generate, LinesParser, http2=True),
        _unary("container", "/models/{}/invoke", answer, BodyParser, cuts=True),
        _unary("container-h2", "/models/{}/invoke", answer, BodyParser, http2=True, cuts=True),
        _in_form("json"),
        _in_form("literal"),
        _in_form("signed", config=signed),
        _in_form("padded", config=replace(_SMALL, bidi=replace(_SMALL.bidi, padding=64))),
        _anywhere(),
        _behind_bridge(),
        _late_behind_bridge(),
        _ended(),
        replace(bridge_invoke, served=_bridged),
        _models("load", _loading),
        _models("unload", _unloading, without=["memory"]),  # which would hit the load before it
        _models("first-use", _using),
    ]


SAGEMAKER: dict[str, Scenario] = {scenario.name: scenario for scenario in _scenarios()}
