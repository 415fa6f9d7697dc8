"""The gateway under hypercorn: the faults that gateway.hypercorn repairs, beside hypercorn's own server, and limits of both.
If the test of a limit fails, docs/reference/asgi.md may promise more."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import hypercorn.trio
import pytest
import trio
from hypercorn.config import Config as ServerConfig
from hyperframe.frame import PriorityFrame

import gateway.hypercorn
from gateway import client
from gateway.asgi import ASGIApp
from gateway.client import Peer, post
from gateway.config import Config, DrainConfig, LimitsConfig, ListenConfig
from gateway.core.exchange import Exchange
from gateway.core.route import Row
from gateway.gateway import Gateway
from models.adapt import spec_of
from models.messages import Part, Prompt, Token
from models.session import Session
from protocols.aws.bidi import Completion, DataType, encode_request_part
from protocols.errors import RemoteProtocolError
from protocols.events import ConnectionEnd, Data, End, GoAway, Reset, Response

PIECE = 1000
PIECES = 2000
EVENTS = [(b"content-type", b"application/vnd.amazon.eventstream")]
told = 0

REPAIRED, OWN = gateway.hypercorn.serve, hypercorn.trio.serve
BOTH = pytest.mark.parametrize("serve", [REPAIRED, OWN], ids=["repaired", "own"])
Serve = Callable[..., Awaitable[None]]


async def cut(part: Part) -> AsyncIterator[bytes]:
    """A body that fails in its middle."""
    yield bytes(PIECE)
    await trio.sleep(0.2)
    raise RuntimeError("secret")


async def paused(part: Part) -> AsyncIterator[bytes]:
    """A body that stops in its middle."""
    yield bytes(PIECE)
    await trio.sleep_forever()


async def endless(prompt: Prompt) -> AsyncIterator[Token]:
    """Two megabytes of tokens."""
    global told
    for told in range(PIECES):
        yield Token(text="x" * PIECE, id=told)


async def silent(prompt: Prompt) -> str:
    """Never answers."""
    await trio.sleep_forever()
    return ""


async def deaf(session: Session[Part, Part]) -> None:
    """Answers, and takes nothing."""
    session.accept()
    await trio.sleep_forever()


async def brief(session: Session[Part, Part]) -> None:
    """Answers without a look at its input."""
    await session.send(Part(data=b"enough"))


async def hello(prompt: Prompt) -> str:
    return "hello"


MODELS = [cut, paused, endless, silent, brief, hello, spec_of(deaf, "deaf", accepts=True)]


async def early(scope: Any, receive: Any, send: Any) -> None:
    """An application that is not the gateway, and answers before it has the request's body."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"early"})
    elif scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})


@asynccontextmanager
async def served(serve: Serve, app: Any, **settings: Any) -> AsyncIterator[int]:
    """The application under hypercorn, and its port."""
    server = ServerConfig()
    server.bind, server.errorlog = ["127.0.0.1:0"], None
    for name, value in settings.items():
        setattr(server, name, value)
    stop = trio.Event()
    with trio.fail_after(120):
        async with trio.open_nursery() as nursery:
            (where,) = await nursery.start(partial(serve, app, server, shutdown_trigger=stop.wait))
            yield int(where.rpartition(":")[2])
            stop.set()


@asynccontextmanager
async def mounted(serve: Serve = REPAIRED, **settings: Any) -> AsyncIterator[tuple[Gateway, int]]:
    """A gateway under hypercorn, and its port; at the end nothing is left."""
    config = Config(listen=ListenConfig(port=-1), drain=DrainConfig(timeout=60), limits=LimitsConfig(write_stall=60))
    gateway = Gateway(config, MODELS)
    async with served(serve, ASGIApp(gateway), **settings) as port:
        yield gateway, port
    counts = gateway.counts()
    assert (counts.connections, counts.exchanges, counts.bytes_reserved, counts.slots_in_use) == (0, 0, 0, 0)


@asynccontextmanager
async def http2(port: int) -> AsyncIterator[Peer]:
    async with client.connect("127.0.0.1", port) as transport:
        yield client.http2(transport)


def question(text: str = "x", **parameters: Any) -> bytes:
    return json.dumps({"inputs": text, **parameters}).encode()


async def rest(peer: Peer, stream: int = 1) -> list[Any]:
    """The events of an answer up to its end."""
    events: list[Any] = []
    while not (events and isinstance(events[-1], End | Reset | ConnectionEnd)):
        event = await peer.next_event()
        if isinstance(event, Data):
            peer.credit(event)
        if isinstance(event, ConnectionEnd) or getattr(event, "stream", 0) == stream:
            events.append(event)
    return events


async def answers(peer: Peer, stream: int) -> None:
    """The connection serves another request."""
    await peer.send(*post(stream, "/predictions/hello", question()))
    with trio.fail_after(60):
        head, *_, last = await rest(peer, stream)
    assert (head.status, type(last)) == (200, End)


# -- the end of a connection with an exception -------------------------------------------------------------------------


async def end_early(peer: Peer) -> None:
    """DATA after the end of an answer."""
    await peer.send(*post(1, "/", None))
    assert isinstance((await rest(peer))[-1], End)
    await peer.send(Data(stream=1, buffers=(b"more",)))


async def prioritize(peer: Peer) -> None:
    """A thousand PRIORITY frames and one."""
    await peer.send()
    frames = b"".join(PriorityFrame(stream_id=2 * n + 1, depends_on=0, stream_weight=16).serialize() for n in range(1, 1002))
    while frames:
        frames = frames[peer.transport.try_send([frames]) :]
        await peer.transport.wait_writable()


ATTACKS = pytest.mark.parametrize("attack", [end_early, prioritize])


@ATTACKS
async def test_hypercorn_alone_is_ended_by_one_client_with_every_other_connection(attack: Any) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(Exception), flatten_subgroups=True, allow_unwrapped=True) as ended:
        async with served(OWN, early) as port, http2(port) as peer:
            await attack(peer)
            await trio.sleep_forever()
    assert "KeyError" in repr(ended.value) or "TooManyStreams" in repr(ended.value)


@ATTACKS
async def test_repaired_not_even_the_connection_ends(attack: Any) -> None:
    async with served(REPAIRED, early) as port, http2(port) as peer:
        await attack(peer)
        await peer.send(*post(3, "/", b""))
        head, *_, last = await rest(peer, 3)
        assert (head.status, type(last)) == (200, End)


async def test_repaired_an_exception_in_a_connection_ends_that_one_alone_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise ArithmeticError("a fault nobody thought of")

    async with mounted() as (_, port), http2(port) as first, http2(port) as second:
        await answers(first, 1)
        await answers(second, 1)
        with monkeypatch.context() as broken, caplog.at_level(logging.ERROR, "gateway.connection"):
            broken.setattr(gateway.hypercorn._HTTP2, "_create_stream", fail)
            await first.send(*post(3, "/predictions/hello", question()))
            while not isinstance(await first.next_event(), ConnectionEnd):
                pass
        # nothing tells: its client sees the end first
        while not (records := [record for record in caplog.records if record.name == "gateway.connection"]):  # noqa: ASYNC110
            await trio.sleep(0.01)
        (record,) = records
        assert record.exc_info is not None
        assert "a fault nobody thought of" in "".join(traceback.format_exception(record.exc_info[1]))
        await answers(second, 3)


# -- streams that end out of turn --------------------------------------------------------------------------------------


async def test_over_http1_a_body_that_cannot_be_completed_ends_with_its_connection() -> None:
    async with mounted() as (_, port), client.connect("127.0.0.1", port) as transport:
        peer = client.http1(transport)
        await peer.send(*post(1, "/models/cut/invoke", b"x"))
        with pytest.raises(RemoteProtocolError, match="in the middle of a message"):
            await rest(peer)


async def test_over_http2_a_body_that_cannot_be_completed_is_reset() -> None:
    async with mounted() as (gateway, port), http2(port) as peer:
        await peer.send(*post(1, "/models/cut/invoke", b"x"))
        last = (await rest(peer))[-1]
        assert (type(last), last.code) == (Reset, 2)
        assert gateway.counts().endings == {"model-error": 1}
        await answers(peer, 3)


async def test_over_http2_of_hypercorn_alone_its_client_waits_for_an_end_that_never_comes() -> None:
    async with mounted(OWN) as (gateway, port), http2(port) as peer:
        await peer.send(*post(1, "/models/cut/invoke", b"x"))
        while not gateway.counts().endings:  # noqa: ASYNC110  # nothing tells
            await trio.sleep(0.01)
        with trio.move_on_after(2) as patience:
            await rest(peer)
        assert patience.cancelled_caught
        assert gateway.counts().endings == {"model-error": 1}


@BOTH
async def test_an_answer_over_http2_comes_while_its_request_goes_on(serve: Serve) -> None:
    """Its end waits under hypercorn alone, which would not survive what the client may still send."""
    async with mounted(serve) as (_, port), http2(port) as peer:
        await peer.send(*post(1, "/endpoints/brief/invocations-bidirectional-stream", None, EVENTS))
        assert (await peer.next_event()).status == 200
        came = b""
        while b"enough" not in came:
            event = await peer.next_event()
            came += bytes(event.buffers[0])
            peer.credit(event)
        with trio.move_on_after(1 if serve is OWN else 60) as patience:
            assert isinstance((await rest(peer))[-1], End)
        assert patience.cancelled_caught == (serve is OWN)
        await peer.send(Data(stream=1, buffers=(b"more",)), End(stream=1))
        await answers(peer, 3)


@BOTH
@pytest.mark.parametrize("fields", [[], [(b"te", b"trailers")]], ids=["no te", "te"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("body", [b"hello", b""])
async def test_trailers_come_over_http2_where_the_request_says_so(
    serve: Serve, fields: Any, whole: bool, body: bytes
) -> None:
    trailers = ((b"grpc-status", b"0"),)

    async def ended(exchange: Exchange) -> None:
        if whole:
            exchange.outbound.respond(200, [], body, trailers=trailers)
        else:
            exchange.outbound.start(200, [], trailers=True)
            exchange.outbound.push(body)
            exchange.outbound.finish(trailers=trailers)

    async def plain(exchange: Exchange) -> None:
        exchange.outbound.start(200, [])
        exchange.outbound.finish()

    async with mounted(serve) as (gateway, port), http2(port) as peer:
        gateway.router.add(Row("POST", "/ended", ended))
        gateway.router.add(Row("POST", "/plain", plain))
        await peer.send(*post(1, "/ended", b"x", fields))
        events = await rest(peer)
        assert b"".join(bytes(event.buffers[0]) for event in events if isinstance(event, Data)) == body
        assert events[-1] == End(stream=1, trailers=trailers if fields else ())
        await peer.send(*post(3, "/plain", b"x", fields))
        assert (await rest(peer, 3))[-1] == End(stream=3)
    assert gateway.counts().endings == {"complete": 2}


@BOTH
async def test_a_refusal_over_http2_comes_at_once_or_after_the_upload(serve: Serve) -> None:
    async with mounted(serve) as (_, port), http2(port) as peer:
        await peer.send(*post(1, "/predictions/nobody", None), Data(stream=1, buffers=(b"{",)))
        with trio.move_on_after(1 if serve is OWN else 60) as patience:
            assert (await rest(peer))[0].status == 404
        assert patience.cancelled_caught == (serve is OWN)
        await peer.send(Data(stream=1, buffers=(b"}",)), End(stream=1))
        if serve is OWN:
            assert (await rest(peer))[0].status == 404
        await answers(peer, 3)


async def test_a_client_that_resets_its_stream_stops_its_model() -> None:
    async with mounted() as (gateway, port), http2(port) as peer:
        await peer.send(*post(1, "/models/paused/invoke", b"x"))
        while not isinstance(await peer.next_event(), Data):
            pass
        await peer.send(Reset(stream=1, code=8))
        while not gateway.counts().endings:  # noqa: ASYNC110  # nothing tells
            await trio.sleep(0.01)
        assert gateway.counts().endings == {"cancelled-by-client": 1}


async def test_repaired_a_thousand_streams_that_are_reset_leave_nothing_behind() -> None:
    async with mounted(keep_alive_max_requests=10_000) as (gateway, port), http2(port) as peer:
        for number in range(1100):
            stream = 2 * number + 1
            await peer.send(*post(stream, "/predictions/silent", question()), Reset(stream=stream, code=8))
        await answers(peer, 2201)
        while gateway.counts().exchanges:  # noqa: ASYNC110  # nothing tells
            await trio.sleep(0.01)


# -- backpressure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "serve", "stops"),
    [("http1", REPAIRED, True), ("http2", REPAIRED, True), ("http1", OWN, True), ("http2", OWN, False)],
)
async def test_a_reader_that_stops_stops_its_model_but_over_http2_of_hypercorn_alone(
    kind: str, serve: Serve, stops: bool
) -> None:
    global told
    told = 0
    async with mounted(serve) as (_, port), client.connect("127.0.0.1", port) as transport:
        peer = getattr(client, kind)(transport)
        asked = question(stream=True, parameters={"max_new_tokens": 10_000})
        await peer.send(*post(1, "/predictions/endless", asked))
        assert isinstance(await peer.next_event(), Response) or kind == "http2"
        with trio.move_on_after(1 if stops else 60):
            while told < PIECES - 1:  # noqa: ASYNC110  # nothing tells when it does not come to that
                await trio.sleep(0.05)
        assert (told < PIECES - 1) == stops


async def test_repaired_a_reader_that_stops_stops_its_model_within_the_buffers_and_gets_all_when_it_goes_on() -> None:
    global told
    told = 0
    async with mounted() as (_, port), http2(port) as peer:
        asked = question(stream=True, parameters={"max_new_tokens": 10_000})
        await peer.send(*post(1, "/predictions/endless", asked))
        await trio.sleep(0.5)
        assert told * PIECE < 300 * 1024  # the window, hypercorn's buffer, one message on its way, and the send buffer
        events = await rest(peer)
        assert isinstance(events[-1], End)
        assert b"".join(bytes(e.buffers[0]) for e in events if isinstance(e, Data)).count(b"\n") == PIECES + 1


async def test_one_stream_that_is_not_read_holds_up_what_else_its_connection_sends() -> None:
    async with mounted() as (gateway, port), http2(port) as peer:
        await peer.send(*post(1, "/endpoints/deaf/invocations-bidirectional-stream", None, EVENTS))
        assert isinstance(await peer.next_event(), Response)
        piece = b"".join(encode_request_part(bytes(16 * 1024), DataType.BINARY, Completion.COMPLETE, date_ms=0))
        await peer.send(*(Data(stream=1, buffers=(piece,)) for _ in range(60)))
        with trio.move_on_after(1):
            await peer.next_event()  # writes as windows open
        await peer.send(*post(3, "/predictions/hello", question()))
        with trio.move_on_after(1) as patience:
            await rest(peer, 3)
        assert patience.cancelled_caught
        gateway.begin_drain()
        gateway.hurry()


# -- ends of connections and of the server -----------------------------------------------------------------------------


async def test_repaired_a_connection_that_has_had_its_requests_says_goodbye_and_ends_with_the_last_answer() -> None:
    async with mounted(keep_alive_max_requests=3) as (_, port), http2(port) as peer:
        await peer.send(*post(1, "/predictions/silent", question()))
        for stream in (3, 5, 7):
            await peer.send(*post(stream, "/predictions/hello", question()))
        ends: dict[int, Any] = {}
        goodbye = None
        while len(ends) < 3:
            match event := await peer.next_event():
                case End() | Reset():
                    ends[event.stream] = event
                case GoAway():
                    goodbye = event
        assert goodbye is not None
        assert (goodbye.last_stream, goodbye.code) == (5, 0)
        assert (type(ends[3]), type(ends[5]), type(ends[7]), ends[7].code) == (End, End, Reset, 7)
        await peer.send(Reset(stream=1, code=8))
        assert isinstance((await rest(peer))[-1], ConnectionEnd)


async def test_after_so_many_requests_hypercorn_alone_answers_nothing_of_what_its_connection_carries() -> None:
    async with mounted(OWN, keep_alive_max_requests=3) as (_, port), http2(port) as peer:
        for stream in (1, 3, 5, 7, 9):
            await peer.send(*post(stream, "/predictions/hello", question()))
        ended = set()
        with trio.move_on_after(2):
            while not isinstance(event := await peer.next_event(), ConnectionEnd):
                if isinstance(event, End):
                    ended.add(event.stream)
        assert len(ended) < 5


async def test_a_gateway_that_drains_before_hypercorn_ends_loses_no_stream() -> None:
    async with mounted() as (gateway, port), http2(port) as peer:
        await peer.send(*post(1, "/predictions/endless", question(stream=True, parameters={"max_new_tokens": 10_000})))
        assert isinstance(await peer.next_event(), Response)
        gateway.begin_drain()
        events = await rest(peer)
        assert isinstance(events[-1], End)
