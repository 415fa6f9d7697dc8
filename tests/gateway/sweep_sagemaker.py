"""The sweep's stories on SageMaker's wires: both sides of the platform, a container behind it, models that come and go."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, final

import trio

from gateway import client
from gateway.client import Peer, questions
from gateway.client.answers import Answer
from gateway.client.questions import Question
from gateway.config import BidiConfig, EndpointConfig, RepositoryConfig, SigV4Config
from gateway.containers.connection import ContainerLimits
from gateway.containers.model import container_spec
from gateway.errors import TransportLost
from gateway.net.transport import MemoryTransport, memory_pair
from gateway.testing.stories.talk import Messages, Talk, fragment
from models.errors import ModelError
from models.messages import Family, Part
from models.spec import Model, ModelSpec
from protocols.aws import bidi, sigv4
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Close, ConnectionEnd, Data, End, Frame, Head, Headers, Request, Response
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection
from protocols.websocket.handshake import END_OF_INPUT, accept_headers, end_of_input
from tests.gateway.sagemaker_answers import LiteralAnswer, WithinEvents
from tests.gateway.sweep_scenarios import (
    _SMALL,
    _STREAM,
    FRESH,
    NEIGHBOUR,
    NEXT,
    VICTIM,
    Boom,
    HTTP2Line,
    Lines,
    Scenario,
    Stage,
    Sweeping,
    ask,
    bidi_scenario,
    bidi_talk,
    conversation,
    echo,
    generate,
    http2_line,
    in_pieces,
    numbered,
    over_http1,
    over_http2,
    played,
    state_of,
    together,
    websocket_scenario,
)

_PART = 400
_OCTETS: Headers = [(b"content-type", b"application/octet-stream")]
_HTTP = 4096 + 2048
"""Bytes that an HTTP/1.1 connection may hold: the read-ahead, and the send buffer with a message beyond it."""


# -- models and what is made of their answers ------------------------------------------------------------------------


@played
async def answer(me: Sweeping[Part, Part]) -> None:
    """Takes the one part, and answers with parts of one size."""
    await me.receive()
    for i in range(5):
        if i % 2:
            await trio.sleep(0.0007)
        await me.send(Part(data=b"%d" % i * _PART))
    await trio.sleep(0.0011)


@final
class PartsAnswer(Answer):
    """A body as it is, read as parts of one size."""

    def _read(self, data: Buffer) -> None:
        super()._read(data)
        while len(self.body) >= _PART:
            self.messages.append(fragment(self.body[:_PART], True))
            del self.body[:_PART]

    def _finish(self) -> None:
        assert not self.body, "half a part"


# -- one request, one body -------------------------------------------------------------------------------------------


def _unary(
    name: str,
    route: str,
    model: Callable[[Stage], Model],
    answer: Callable[[], Answer],
    *,
    http2: bool = False,
    **more: Any,
) -> Scenario:
    """A request whose answer comes piece by piece: of text in lines, or of parts."""
    text = model is generate

    async def asking(where: Peer | HTTP2Line, talk: Talk, **how: Any) -> None:
        said = f"{talk.name} ".encode() * {VICTIM: 150, NEXT: 1, FRESH: 2}.get(talk.name, 20)
        question = Question(path="", headers=_OCTETS, body=said, answer=answer)
        if text:
            question = replace(questions.lmi(said.decode(), stream=True, max_new_tokens=5), answer=answer)
        body = in_pieces(talk, question.body or b"", 3, said if text else fragment(said, True))
        await ask(where, talk, replace(question, path=route.format(talk.model)), body, **how)

    each = (_STREAM if http2 else _HTTP) + 2 * 8 * 150 + _PART
    settings: dict[str, Any] = {"memory": 2 * each, "buffer": 600} | more
    build, pace = (over_http2, 0.0003) if http2 else (over_http1, 0.0004)
    return build(name, asking, pace=pace, model=model, family=Family.TEXT if text else Family.PARTS, **settings)


# -- the forms of BiDi -----------------------------------------------------------------------------------------------

_SIGNER = sigv4.Credentials(access_key_id="AKIDEXAMPLE", secret_access_key="a secret of ours", region="eu-west-1")


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The files that the stories need, in a folder that lasts as long as the process."""
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


async def _talk_in_form(form: str, line: HTTP2Line, talk: Talk, parts: Sequence[tuple[bytes, bool]], **how: Any) -> None:
    question = conversation(talk)
    sign: Callable[[int, bytes], bytes] = lambda date, event: bytes(32)  # noqa: E731
    if form == "signed":
        target = (question.path + talk.query).encode()
        head = Head(method=b"POST", target=target, authority=b"a", headers=question.headers)
        given = sigv4.sign_request(head, _SIGNER, now=time.time(), payload=sigv4.STREAMING_EVENTS)
        assert given.events is not None
        question = replace(question, headers=(*question.headers, *given.headers))
        sign = given.events.sign
    elif form == "literal":
        headers = ((b"content-type", bidi.JSON_CONTENT_TYPE.encode()), *question.headers[1:])
        question = replace(question, headers=headers, answer=LiteralAnswer)

    def sealed(event: bytes = b"") -> bytes:
        date = int(time.time() * 1000)
        return b"".join(bidi.encode_envelope(event, date_ms=date, signature=sign(date, event)))

    def written(data: bytes, last: bool) -> bytes:
        told = data, bidi.DataType.BINARY, state_of(last)
        match form:
            case "literal":
                return b"".join(bidi.encode_literal_part(*told))
            case "json":
                return sealed(b"".join(bidi.encode_json_event(*told)))
            case _:
                return sealed(bidi.encode_request_event(*told))

    end = bytes if form == "literal" else sealed
    await bidi_talk(line, talk, parts, question=question, write=written, end=end, **how)


def _in_form(form: str, **more: Any) -> Scenario:
    # base64 is a third more, and the part that is put together from it is paid beside it
    settings: dict[str, Any] = {"memory": 3 * (_STREAM + 3 * 2600)} | more
    talk = partial(_talk_in_form, form)
    return bidi_scenario(f"bidi-{form}", echo, [10, 900, 2600, 5], talk=talk, **settings)


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
        if request.head.method == b"POST":
            await _invocation(stage, peer, request)
        elif not request.head.upgrade:
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
        talk.take(fragment(body, True))
        stage.point(talk)
        await peer.send(Response(stream=1, status=200, headers=_OCTETS))
        for i in range(5):
            await trio.sleep(0.0003)
            stage.point(talk)
            talk.say(fragment(b"%d" % i * _PART, True))
            await peer.send(Data(stream=1, buffers=(b"%d" % i * _PART,)))
        await peer.send(End(stream=1))
        while not isinstance(await peer.next_event(), ConnectionEnd):
            pass


async def _upgraded(peer: Peer, request: Request, *fields: tuple[bytes, bytes]) -> tuple[Peer, WebSocketConnection]:
    """The WebSocket that the request asks for."""
    await peer.send(Response(stream=1, status=101, headers=[*accept_headers(request.head), *fields]))
    assert isinstance(peer.machine, HTTP1Connection)
    machine = WebSocketConnection(Role.SERVER)
    machine.receive_data(peer.machine.switch())
    return Peer(peer.transport, machine), machine


async def _container_echo(stage: Stage, peer: Peer, request: Request) -> None:
    peer, machine = await _upgraded(peer, request)
    with stage.call(request.head.target.partition(b"?")[2].decode()) as talk:
        while True:
            match await peer.next_event():
                case Frame() as frame:
                    stage.point(talk)
                    machine.credit(len(frame.data))
                    talk.take(fragment(frame.data, frame.fin))
                    talk.say(fragment(frame.data, frame.fin))
                    await peer.send(frame)
                case Close():
                    await peer.flush()
                case ConnectionEnd():
                    return


def _behind_bridge() -> Scenario:
    found = bidi_scenario("bridge", echo, [10, 900, 2600, 5], memory=3 * (_STREAM + 2600), neighbour=True)
    return replace(found, served=_bridged)


async def _late_answer(stage: Stage, peer: Peer, request: Request) -> None:
    """A container that is told the end of the input, and only then answers, one frame after the other, after a while."""
    end = end_of_input(request.head.headers)
    assert end is not None
    peer, machine = await _upgraded(peer, request, (END_OF_INPUT, end))
    with stage.call(request.head.target.partition(b"?")[2].decode()) as talk:
        frames: list[Frame] = []
        while not isinstance(event := await peer.next_event(), Close | ConnectionEnd):
            if isinstance(event, Frame):
                stage.point(talk)
                machine.credit(len(event.data))
                if event.data == end:
                    break
                talk.take(fragment(event.data, event.fin))
                frames.append(event)
        else:
            await peer.flush()
            return
        for frame in frames:
            await trio.sleep(0.002)
            stage.point(talk)
            talk.say(fragment(frame.data, frame.fin))
            await peer.send(frame)
        await peer.send(Close())
        while not isinstance(await peer.next_event(), Close | ConnectionEnd):
            pass


async def _whole_talk(line: HTTP2Line, talk: Talk, parts: Sequence[tuple[bytes, bool]], **how: Any) -> None:
    """A conversation whose last part ends its message: the container cannot be told the end in the middle of one."""
    await bidi_talk(line, talk, [*parts[:-1], (parts[-1][0], True)], **how)


def _late_behind_bridge() -> Scenario:
    """The client has ended its input, and the session waits for the container's answer."""
    found = bidi_scenario("bridge-late", echo, [10, 900, 2600], memory=3 * (_STREAM + 2600), talk=_whole_talk)
    return replace(found, served=partial(_bridged, talk=_late_answer))


# -- models that come and go -----------------------------------------------------------------------------------------


async def _ask(peer: Peer, talk: Talk, method: bytes, path: str, body: bytes = b"", headers: Headers = ()) -> bytes:
    """One request on an HTTP/1.1 connection; the body of its answer."""

    async def content() -> AsyncGenerator[Buffer, None]:
        for at in range(0, len(body), 20):
            await trio.sleep(0.0017)  # some of it comes when the model is there
            yield body[at : at + 20]

    talk.ask(body)
    talk.take(body)
    question = Question(path=path, headers=headers, body=body, answer=Answer)
    return bytes((await ask(peer, talk, question, content, pace=0.0, method=method)).body)


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

    await together(
        _one_of_model(stage, VICTIM, b"POST", "/models", _load("a")),
        _alone(stage, f"{NEIGHBOUR}-b", b"POST", "/models", _load("b")),
        late(),
    )


async def _one_of_model(stage: Stage, name: str, method: bytes, path: str, body: bytes = b"", headers: Headers = ()) -> None:
    """Sends one request for a talk of the model "m", on a connection of its own."""
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
        async with http2_line(stage, talk.line) as line:
            await bidi_talk(line, talk, numbered(talk.name, sizes), pace=0.0003)

    async def unload() -> None:
        await trio.sleep(0.0008)
        await _one_of_model(stage, VICTIM, b"DELETE", "/models/a")

    await together(session(_library_talk(stage, NEIGHBOUR), 0, [10, 700, 20]), session(queued, 0.0004, [10]), unload())
    queued.asked = queued.taken = Messages()  # it may be told that the model is gone


def _library_talk(stage: Stage, name: str) -> Talk:
    """A talk with a loaded model, which remembers nothing: it sends back what it is sent."""
    talk = stage.talk(name, model="a")
    talk.taken, talk.said = talk.asked, talk.heard
    return talk


async def _using(stage: Stage) -> None:
    """The first use of a model, and another's beside it."""
    await together(
        _one_of_model(stage, VICTIM, b"POST", "/endpoints/many/invocations", b"one " * 50, _target("a")),
        _alone(stage, NEIGHBOUR, b"POST", "/endpoints/many/invocations", b"two", _target("b")),
        _alone(stage, f"{NEIGHBOUR}-a", b"POST", "/endpoints/many/invocations", b"three", _target("a")),
    )


def _target(model: str) -> Headers:
    return [*_OCTETS, (b"x-amzn-sagemaker-target-model", f"{model}.tar.gz".encode())]


def _scenarios() -> list[Scenario]:
    streamed_lines, streamed_parts = partial(WithinEvents, Lines), partial(WithinEvents, PartsAnswer)
    at_any_path = replace(_SMALL, bidi=BidiConfig(default_model="m"))
    path, others = "/any/path.of/theirs", {"other": [30, 30], "memory": 2 * (_HTTP + 4000)}
    stream, invoke = "/endpoints/{}/invocations-response-stream", "/endpoints/{}/invocations"
    signed = replace(_SMALL, sagemaker=replace(_SMALL.sagemaker, sigv4=SigV4Config(credentials=_path("credentials"))))
    bridge_invoke = _unary("bridge-invoke", stream, answer, streamed_parts)
    return [
        _unary("stream", stream, generate, streamed_lines),
        _unary("stream-h2", stream, answer, streamed_parts, http2=True),
        _unary("invoke", invoke, answer, PartsAnswer, cuts=True),
        _unary("invoke-h2", invoke, generate, Lines, http2=True),
        _unary("container", "/models/{}/invoke", answer, PartsAnswer, cuts=True),
        _unary("container-h2", "/models/{}/invoke", answer, PartsAnswer, http2=True, cuts=True),
        _in_form("json"),
        _in_form("literal"),
        _in_form("signed", config=signed),
        _in_form("padded", config=replace(_SMALL, bidi=replace(_SMALL.bidi, padding=64))),
        # a path that a client has made up: the default model's
        websocket_scenario("anywhere", [10, 900, 1800, 1500], path=path, config=at_any_path, **others),
        _behind_bridge(),
        _late_behind_bridge(),
        # clients of the container's WebSocket that say when there is no more input, and then wait for the answer
        websocket_scenario("ended", [10, 900, 1800], ends=True, memory=2 * (_HTTP + 4000)),
        replace(bridge_invoke, served=_bridged),
        _models("load", _loading),
        _models("unload", _unloading, without=["memory"]),  # which would hit the load before it
        _models("first-use", _using),
    ]


SAGEMAKER: dict[str, Scenario] = {scenario.name: scenario for scenario in _scenarios()}
