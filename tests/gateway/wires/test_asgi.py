"""The gateway as an ASGI application, driven by a server that is a script: what it is given, and what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.asgi import ASGIApp
from gateway.config import Config, DrainConfig, LimitsConfig, ListenConfig
from gateway.gateway import Gateway
from gateway.wires.asgi import EARLY_END, AnswerCut, head_of
from models.adapt import spec_of
from models.library.echo import Echo
from models.messages import Family, FinishReason, Part, PartKind, Token
from models.session import Session
from tests.gateway.promises import KiB, Probe, answering, at_once, counting, pausing, silent

NO_PORT = ListenConfig(port=-1)
FINAL = {"type": "http.response.body", "body": b"", "more_body": False}


class Server:
    """An ASGI server's side of one call: it gives the messages of the test, and takes messages only while `takes` is set."""

    def __init__(self, app: ASGIApp, **scope: Any) -> None:
        self.scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": "/",
            "query_string": b"", "root_path": "", "scheme": "http", "headers": [(b"host", b"localhost")],
            "client": ("10.0.0.1", 4711), "extensions": {}, **scope,
        }  # fmt: skip
        self.app = app
        self._give, self._given = trio.open_memory_channel[dict[str, Any]](1000)
        self.told: list[dict[str, Any]] = []
        self.takes = trio.Event()
        self.takes.set()
        self.over = trio.Event()
        self.error: Exception | None = None

    def give(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self._give.send_nowait(message)

    def body(self, data: bytes, *, more: bool = False) -> None:
        self.give({"type": "http.request", "body": data, "more_body": more})

    @property
    def waiting(self) -> int:
        """Messages that the application has not asked for."""
        return self._given.statistics().current_buffer_used

    async def _send(self, message: dict[str, Any]) -> None:
        await self.takes.wait()
        self.told.append(message)

    async def run(self) -> None:
        try:
            await self.app(self.scope, self._given.receive, self._send)
        except AnswerCut as e:
            self.error = e
        self.over.set()

    @property
    def answer(self) -> tuple[int, bytes]:
        """The status and the body of an answer that is whole."""
        assert self.told[-1].get("more_body") is False, self.told
        return self.told[0]["status"], b"".join(message["body"] for message in self.told[1:])


@asynccontextmanager
async def served(*models: Any, config: Config | None = None) -> AsyncIterator[tuple[ASGIApp, trio.Nursery]]:
    """A running gateway without a port; at the end nothing is left."""
    config = config or Config(listen=NO_PORT)
    gateway = Gateway(config, models)
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        async with trio.open_nursery() as calls:
            yield ASGIApp(gateway), calls
        await wait_all_tasks_blocked()
        counts = gateway.counts()
        assert (counts.connections, counts.exchanges, counts.bytes_reserved, counts.slots_in_use) == (0, 0, 0, 0)
        nursery.cancel_scope.cancel()


def lines(app: ASGIApp, **scope: Any) -> Server:
    server = Server(app, path="/predictions/probe", **scope)
    asked = {"inputs": "x", "stream": True, "parameters": {"max_new_tokens": 65536}}
    server.body(json.dumps(asked).encode())
    return server


async def test_an_answer_is_a_head_a_body_and_an_end() -> None:
    probe = Probe(answering)
    async with served(probe.spec("json-http1")) as (app, calls):
        server = lines(app)
        server.scope["headers"] = [*server.scope["headers"], (b"content-type", b"application/json")]
        calls.start_soon(server.run)
        await wait_all_tasks_blocked()
        assert server.told == []
        probe.go.set()
        await server.over.wait()
        head, *pieces = server.told
        assert (head["type"], head["status"]) == ("http.response.start", 200)
        assert dict(head["headers"])[b"x-request-id"]
        assert pieces[-1]["more_body"] is False
        assert b'"id": 0' in b"".join(piece["body"] for piece in pieces)


async def test_a_model_tidies_up_after_its_answer_is_whole(autojump_clock: Any) -> None:
    tidied = []

    async def tidy(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        await session.send(Token(text="last", finish=FinishReason.LENGTH))  # it ends its text itself, and so is not stopped
        await trio.sleep(1)
        tidied.append(trio.current_time())

    async with served(Probe(tidy).spec("lmi-http1")) as (app, calls):
        server = Server(app, path="/predictions/probe")
        server.body(b'{"inputs": "x", "stream": true, "parameters": {"max_new_tokens": 1}}')
        calls.start_soon(server.run)
        with at_once():
            await server.over.wait()
        assert server.answer[0] == 200
        await trio.sleep(2)
        assert len(tidied) == 1
        assert app.gateway.counts().endings == {"complete": 1}


async def test_a_server_that_takes_nothing_stops_the_model() -> None:
    probe = Probe(counting)
    async with served(probe.spec("lmi-http1")) as (app, calls):
        server = lines(app)
        server.takes = trio.Event()
        calls.start_soon(server.run)
        await wait_all_tasks_blocked()
        assert 60 <= probe.sent <= 70
        server.give({"type": "http.disconnect"})
        await server.over.wait()
        await wait_all_tasks_blocked()
        assert (probe.live, probe.stopped) == (0, 1)
        assert app.gateway.counts().endings == {"cancelled-by-client": 1}


async def test_a_model_that_takes_nothing_stops_the_reading() -> None:
    async def deaf(session: Session[Part, Part]) -> None:
        await trio.sleep_forever()

    config = Config(listen=NO_PORT, limits=LimitsConfig(read_ahead=64 * KiB))
    async with served(spec_of(deaf, "probe", family=Family.PARTS), config=config) as (app, calls):
        server = Server(app, type="websocket", path="/models/probe/invocations-bidirectional-stream", headers=HANDSHAKE)
        server.give({"type": "websocket.connect"})
        server.give(*({"type": "websocket.receive", "bytes": bytes(KiB)} for _ in range(500)))
        calls.start_soon(server.run)
        await wait_all_tasks_blocked()
        assert 430 <= server.waiting <= 450
        calls.cancel_scope.cancel()


async def test_a_client_that_leaves_cancels_its_model_and_nothing_is_said() -> None:
    probe = Probe(silent)
    async with served(probe.spec("lmi-http1")) as (app, calls):
        server = lines(app)
        calls.start_soon(server.run)
        await wait_all_tasks_blocked()
        assert probe.live == 1
        server.give({"type": "http.disconnect"})
        await server.over.wait()
        assert server.told == []
    assert probe.live == 0


async def test_a_send_that_raises_is_a_client_that_left() -> None:
    probe = Probe(counting)

    async def gone(message: dict[str, Any]) -> None:
        raise OSError("the client is gone")

    async with served(probe.spec("lmi-http1")) as (app, calls):
        server = lines(app)
        server._send = gone  # type: ignore[method-assign]
        calls.start_soon(server.run)
        await server.over.wait()
        await wait_all_tasks_blocked()
        assert probe.live == 0
        assert app.gateway.counts().endings == {"cancelled-by-client": 1}


async def test_a_call_that_the_server_cancels_takes_its_model_with_it() -> None:
    probe = Probe(counting)
    async with served(probe.spec("lmi-http1")) as (app, calls):
        server = lines(app)
        server.takes = trio.Event()
        calls.start_soon(server.run)
        await wait_all_tasks_blocked()
        calls.cancel_scope.cancel()
    assert (probe.live, probe.stopped) == (0, 1)


async def test_an_error_in_mid_stream_is_said_in_band_and_where_that_cannot_be_the_server_is_told() -> None:
    async def fail(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        await probe.say(session, 2)
        raise RuntimeError("secret")

    async with served(Probe(fail).spec("lmi-http1"), Probe(fail, "body").spec("container-http1")) as (app, calls):
        said = lines(app)
        cut = Server(app, path="/models/body/invoke")
        cut.body(b"00000000")
        for server in (said, cut):
            calls.start_soon(server.run)
            await server.over.wait()
        status, body = said.answer
        assert (status, said.error) == (200, None)
        assert b"incident" in body
        assert b"secret" not in body
        assert isinstance(cut.error, AnswerCut)
        assert app.gateway.counts().endings == {"model-error": 2}


async def test_a_body_of_many_pieces_and_no_length_is_whole_for_the_model() -> None:
    async with served(spec_of(Echo(), "probe")) as (app, calls):
        server = Server(app, path="/models/probe/invoke")
        for n in range(10):
            server.body(b"%d" % n * KiB, more=n < 9)
        calls.start_soon(server.run)
        await server.over.wait()
        assert server.answer == (200, b"".join(b"%d" % n * KiB for n in range(10)))


async def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    config = Config(listen=NO_PORT, limits=LimitsConfig(body=KiB))
    async with served(spec_of(Echo(), "probe"), config=config) as (app, calls):
        server = Server(app, path="/v2/models/probe/generate", headers=[(b"content-length", b"2000")])
        calls.start_soon(server.run)
        await server.over.wait()
        assert server.answer[0] == 413


@pytest.mark.parametrize("raw", [True, False])
async def test_its_paths_begin_where_it_is_mounted(raw: bool) -> None:
    async with served(spec_of(Echo(), "probe")) as (app, calls):
        mounted: dict[str, Any] = {"path": "/inference/v2/models/probe/ready", "root_path": "/inference", "method": "GET"}
        if raw:
            mounted["raw_path"] = mounted["path"].encode()
        server = Server(app, **mounted)
        server.body(b"")
        calls.start_soon(server.run)
        await server.over.wait()
        assert server.answer == (200, b'{"name":"probe","ready":true}')


async def test_where_it_is_mounted_is_found_however_the_client_has_quoted_it() -> None:
    async with served(spec_of(Echo(), "probe")) as (app, calls):
        mounted: dict[str, Any] = {"path": "/in ference/v2/models/probe/ready", "root_path": "/in ference", "method": "GET"}
        for raw in (b"/in%20ference/v2/models/probe/ready", b"/%69n%20ference/v2/models/probe/ready"):
            server = Server(app, **mounted, raw_path=raw)
            server.body(b"")
            calls.start_soon(server.run)
            await server.over.wait()
            assert server.answer == (200, b'{"name":"probe","ready":true}')


async def test_a_head_has_no_body() -> None:
    async with served(spec_of(Echo(), "probe")) as (app, calls):
        server = Server(app, path="/ping", method="HEAD")
        server.body(b"")
        calls.start_soon(server.run)
        await server.over.wait()
        assert server.answer == (200, b"")


HANDSHAKE = [(b"host", b"x"), (b"sec-websocket-key", b"AAAAAAAAAAAAAAAAAAAAAA=="), (b"sec-websocket-version", b"13")]


def socket(app: ASGIApp, name: str = "probe", **scope: Any) -> Server:
    path = f"/models/{name}/invocations-bidirectional-stream"
    server = Server(app, type="websocket", path=path, headers=HANDSHAKE, **scope)
    server.give({"type": "websocket.connect"})
    return server


async def test_a_websocket_is_accepted_answered_and_closed() -> None:
    async with served(spec_of(Echo(), "probe")) as (app, calls):
        server = socket(app)
        server.give({"type": "websocket.receive", "text": "hällo"}, {"type": "websocket.receive", "bytes": b"\xff"})
        calls.start_soon(server.run)
        await wait_all_tasks_blocked()
        accepted, *rest = server.told
        assert (accepted["type"], accepted["subprotocol"]) == ("websocket.accept", None)
        assert not {name for name, _ in accepted["headers"]} & {b"connection", b"upgrade", b"sec-websocket-accept"}
        assert rest == [{"type": "websocket.send", "text": "hällo"}, {"type": "websocket.send", "bytes": b"\xff"}]
        server.give({"type": "websocket.disconnect", "code": 1000})
        await server.over.wait()
        assert app.gateway.counts().endings == {"cancelled-by-client": 1}


async def test_parts_of_one_message_are_joined_and_text_that_is_none_closes() -> None:
    async def parts(session: Session[Part, Part]) -> None:
        for data, last in ((b"one ", False), (b"mess", False), (b"age", True), (b"\xff", True)):
            await session.send(Part(data=data, kind=PartKind.UTF8, last=last))

    async with served(spec_of(parts, "probe", family=Family.PARTS)) as (app, calls):
        server = socket(app)
        calls.start_soon(server.run)
        await server.over.wait()
        _, message, closed = server.told[:3]
        assert message == {"type": "websocket.send", "text": "one message"}
        assert (closed["type"], closed["code"]) == ("websocket.close", 1007)


async def test_a_message_larger_than_the_send_buffer_comes_after_text_of_several_bytes_a_character() -> None:
    async with served(spec_of(Echo(), "probe")) as (app, calls):
        server = socket(app)
        sent = [{"type": "websocket.receive", "text": "zwölf ✓"}, {"type": "websocket.receive", "bytes": bytes(100 * KiB)}]
        server.give(*sent)
        calls.start_soon(server.run)
        await wait_all_tasks_blocked()
        assert [message.get("text") or message.get("bytes") for message in server.told[1:]] == ["zwölf ✓", bytes(100 * KiB)]
        server.give({"type": "websocket.disconnect", "code": 1000})


async def test_over_http2_the_answer_waits_for_the_end_of_the_input(autojump_clock: Any) -> None:
    async with served(spec_of(Echo(), "probe")) as (app, calls):
        server = Server(app, path="/v2/models/nobody/infer", http_version="2")
        silent = Server(app, path="/v2/models/nobody/infer", http_version="2")
        for one in (server, silent):
            one.body(bytes(KiB), more=True)
            calls.start_soon(one.run)
        await wait_all_tasks_blocked()
        assert (server.told, app.gateway.counts().exchanges) == ([], 2)
        server.body(b"")
        with at_once():
            await server.over.wait()
        assert server.answer[0] == 404
        await silent.over.wait()
        assert silent.answer[0] == 404


async def test_over_http2_of_a_server_that_lets_an_answer_end_early_it_comes_at_once(autojump_clock: Any) -> None:
    async with served(spec_of(Echo(), "probe")) as (app, calls):
        server = Server(app, path="/v2/models/nobody/infer", http_version="2", extensions={EARLY_END: {}})
        server.body(bytes(KiB), more=True)
        calls.start_soon(server.run)
        with at_once():
            await server.over.wait()
        assert server.answer[0] == 404


async def test_over_http2_what_a_model_says_comes_at_once_and_only_its_end_waits(autojump_clock: Any) -> None:
    async def brief(session: Session[Part, Part]) -> None:
        await session.send(Part(data=b"enough"))

    async with served(spec_of(brief, "probe", family=Family.PARTS)) as (app, calls):
        content_type = (b"content-type", b"application/vnd.amazon.eventstream")
        path = "/endpoints/probe/invocations-bidirectional-stream"
        server = Server(app, path=path, http_version="2", headers=[content_type])
        calls.start_soon(server.run)
        await wait_all_tasks_blocked()
        assert server.told[0]["status"] == 200
        assert b"enough" in b"".join(message["body"] for message in server.told[1:])
        assert all(message["more_body"] for message in server.told[1:])
        server.body(b"")
        with at_once():
            await server.over.wait()
        assert server.told[-1] == FINAL


@pytest.mark.parametrize("extended", [True, False])
async def test_a_websocket_that_is_refused_says_why_where_the_server_can(extended: bool) -> None:
    async with served(spec_of(Echo(), "probe")) as (app, calls):
        server = socket(app, "nobody", extensions={"websocket.http.response": {}} if extended else {})
        calls.start_soon(server.run)
        await server.over.wait()
        if extended:
            assert (server.told[0]["type"], server.told[0]["status"]) == ("websocket.http.response.start", 404)
            assert b"nobody" in server.told[1]["body"]
            assert server.told[-1]["more_body"] is False
        else:
            assert [message["type"] for message in server.told] == ["websocket.close"]


async def test_at_the_drain_deadline_what_runs_gets_its_ending(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    config = Config(listen=NO_PORT, drain=DrainConfig(timeout=5))
    gateway = Gateway(config, [probe.spec("lmi-http1")])
    app = ASGIApp(gateway)
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        server = lines(app)
        nursery.start_soon(server.run)
        await wait_all_tasks_blocked()
        report = await gateway.drain()
        assert (report.endings, report.clean) == ({"drained": 1}, False)
        assert b"drain" in server.answer[1]
        after = lines(app)
        nursery.start_soon(after.run)
        await after.over.wait()
        assert after.answer[0] == 503


async def test_a_stalled_server_that_takes_again_is_told_why_the_answer_ends(autojump_clock: Any) -> None:
    probe = Probe(counting)
    async with served(probe.spec("lmi-http1")) as (app, calls):
        server = lines(app)
        server.takes = trio.Event()
        calls.start_soon(server.run)
        await trio.sleep(32)
        assert probe.live == 0
        server.takes.set()
        await server.over.wait()
        assert server.error is None
        assert b"(limits.write_stall)" in server.answer[1].splitlines()[-1]
        assert app.gateway.counts().endings == {"transport-lost": 1}


async def test_a_stalled_server_is_given_up(autojump_clock: Any) -> None:
    probe = Probe(counting)
    async with served(probe.spec("lmi-http1")) as (app, calls):
        server = lines(app)
        server.takes = trio.Event()
        calls.start_soon(server.run)
        await trio.sleep(32)
        assert (probe.live, server.over.is_set()) == (0, False)
        await server.over.wait()
        assert trio.current_time() < 38
        assert isinstance(server.error, AnswerCut)
        assert app.gateway.counts().endings == {"transport-lost": 1}


async def test_the_lifespan_of_the_server_is_that_of_the_gateway() -> None:
    app = ASGIApp(Gateway(Config(listen=NO_PORT), [spec_of(Echo(), "probe")]))
    server = Server(app, type="lifespan")
    server.give({"type": "lifespan.startup"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        await wait_all_tasks_blocked()
        assert server.told == [{"type": "lifespan.startup.complete"}]
        call = Server(app, path="/ping", method="GET")
        call.body(b"")
        await call.run()
        assert call.answer[0] == 200
        server.give({"type": "lifespan.shutdown"})
    assert server.told[1:] == [{"type": "lifespan.shutdown.complete"}]


async def test_a_gateway_that_cannot_start_says_why() -> None:
    app = ASGIApp(Gateway(Config(listen=ListenConfig(port=1, host="192.0.2.1"))))
    server = Server(app, type="lifespan")
    server.give({"type": "lifespan.startup"})
    await server.run()
    (failed,) = server.told
    assert failed["type"] == "lifespan.startup.failed"
    assert "listen" in failed["message"]


# -- refusals of servers and mounts that cannot work


REMEDY = "use hypercorn with --worker-class trio, or gateway.hypercorn.serve"
EXTENDED: dict[str, Any] = {"websocket.http.response": {}}


def on_asyncio(app: ASGIApp, scope: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the messages of the application for a server of asyncio that gives it these messages."""
    told: list[dict[str, Any]] = []
    given = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(given)

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    asyncio.run(app(scope, receive, send))
    return told


def test_on_another_loop_the_startup_fails_with_the_remedy() -> None:
    app = ASGIApp(Gateway(Config(listen=NO_PORT)))
    (failed,) = on_asyncio(app, {"type": "lifespan"}, {"type": "lifespan.startup"})
    assert (failed["type"], REMEDY in failed["message"]) == ("lifespan.startup.failed", True)


def test_on_another_loop_calls_are_refused_with_the_remedy_which_one_line_has(caplog: pytest.LogCaptureFixture) -> None:
    app = ASGIApp(Gateway(Config(listen=NO_PORT)))
    for _ in range(3):
        head, body = on_asyncio(app, {"type": "http", "path": "/ping", "headers": []})
        assert (head["status"], REMEDY in json.loads(body["body"])["error"]) == (503, True)
        socket = {"type": "websocket", "path": "/x", "headers": []}
        head, body = on_asyncio(app, {**socket, "extensions": EXTENDED}, {"type": "websocket.connect"})
        assert (head["type"], head["status"]) == ("websocket.http.response.start", 503)
        assert REMEDY in json.loads(body["body"])["error"]
        (closed,) = on_asyncio(app, socket, {"type": "websocket.connect"})
        assert (closed["type"], closed["code"]) == ("websocket.close", 1013)
        assert 0 < len(closed["reason"].encode()) <= 123
    (line,) = [record.getMessage() for record in caplog.records]
    assert REMEDY in line


async def test_mounted_without_a_lifespan_calls_are_refused_with_the_remedy_which_one_line_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = ASGIApp(Gateway(Config(listen=NO_PORT)))
    for _ in range(3):
        server = Server(app, path="/ping", method="GET")
        server.body(b"")
        await server.run()
        status, body = server.answer
        assert (status, "must run gateway.serve" in json.loads(body)["error"]) == (503, True)
        server = socket(app, extensions=EXTENDED)
        await server.run()
        assert (server.told[0]["type"], server.told[0]["status"]) == ("websocket.http.response.start", 503)
        server = socket(app)
        await server.run()
        assert [(message["type"], message["code"]) for message in server.told] == [("websocket.close", 1013)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "must run gateway.serve" in line


# -- the path at which clients see it


@pytest.mark.parametrize(
    ("root", "raw", "path"),
    [
        ("/p", b"/ping", b"/ping"),  # as hypercorn's root_path behind a proxy that removes it
        ("/p", b"/p/ping", b"/ping"),
        ("/p", b"/p", b"/"),
        ("/p", b"/p/", b"/"),
        ("/p/", b"/p/ping", b"/ping"),
        ("p", b"/p/ping", b"/ping"),
        ("/p", b"/p/p/ping", b"/p/ping"),
        ("/v2/models", b"/v2/models-x", b"/v2/models-x"),
        ("/a/b", b"/a/b/ping", b"/ping"),
        ("/a/b", b"/b/ping", b"/b/ping"),
        ("/a b", b"/%61%20b/v2/models/a%2Fb", b"/v2/models/a%2Fb"),
        ("/é", b"/%C3%A9/ping", b"/ping"),
        ("/", b"/ping", b"/ping"),
        ("", b"/p/ping", b"/p/ping"),
        ("", b"", b"/"),
        ("", b"*", b"*"),
        ("/p", b"*", b"*"),
    ],
)
async def test_a_path_begins_below_the_root_path_and_is_never_cut_within_a_segment(
    root: str, raw: bytes, path: bytes
) -> None:
    for raw_path in (raw, None):
        scope = Server(ASGIApp(Gateway(Config(listen=NO_PORT))), method="GET", root_path=root).scope
        scope |= {"path": unquote(raw.decode()), "query_string": b"a=/p"}
        if raw_path is not None:
            scope["raw_path"] = raw_path
        elif b"%2F" in raw:
            continue  # a server that does not say how the client has quoted it
        assert head_of(scope).target == path + b"?a=/p"


@pytest.mark.parametrize(
    ("app_root", "root", "raw", "path"),
    [
        ("/api", "/api/gw", b"/gw/ping", b"/ping"),
        ("/api", "/api/gw", b"/api/gw/ping", b"/ping"),
        ("/api", "/api/gw", b"/gwping", b"/gwping"),
        ("/api", "/api", b"/ping", b"/ping"),
        ("/api/v1", "/api/v1", b"/v1/models", b"/v1/models"),
        ("/api", "/api/a/b", b"/a/b", b"/"),
    ],
)
async def test_behind_a_proxy_that_removes_the_prefix_the_path_begins_below_the_mount(
    app_root: str, root: str, raw: bytes, path: bytes
) -> None:
    scope = Server(ASGIApp(Gateway(Config(listen=NO_PORT))), method="GET", root_path=root, app_root_path=app_root).scope
    assert head_of(scope | {"path": raw.decode(), "raw_path": raw}).target == path
    assert head_of(scope | {"path": raw.decode()}).target == path


@pytest.mark.parametrize(
    ("raw", "path", "authority"),
    [
        (b"http://there:81/ping", b"/ping", b"there:81"),
        (b"HTTPS://[::1]/v2/models", b"/v2/models", b"[::1]"),
        (b"http://there", b"/", b"there"),
        (b"http://there/", b"/", b"there"),
        (b"http://there/p/ping", b"/ping", b"there"),
        (b"/http://there/ping", b"/http://there/ping", b"localhost"),
    ],
)
async def test_an_absolute_target_is_its_path_and_its_host(raw: bytes, path: bytes, authority: bytes) -> None:
    server = Server(ASGIApp(Gateway(Config(listen=NO_PORT))), method="GET", root_path="/p")
    for more in ({"raw_path": raw}, {}):
        head = head_of(server.scope | {"path": unquote(raw.decode()), **more})
        assert (head.target, head.authority) == (path, authority)


async def test_links_and_the_openapi_document_have_the_root_path() -> None:
    async with served(spec_of(Echo(), "probe")) as (app, calls):

        async def document(path: str, root: str, accept: bytes = b"application/json") -> bytes:
            headers = [(b"host", b"localhost"), (b"accept", accept)]
            server = Server(app, path=path, root_path=root, method="GET", headers=headers)
            server.body(b"")
            calls.start_soon(server.run)
            await server.over.wait()
            assert server.answer[0] == 200
            return server.answer[1]

        index = json.loads(await document("/", "/api/a b/"))
        assert index["docs"] == "/api/a%20b/v2/openapi.json"
        assert index["try"][1:] == ["GET /api/a%20b/v2/models", "POST /api/a%20b/models/probe/invoke"]
        page = await document("/", "/api", b"text/html")
        assert b'<a href="/api/v2/models">/api/v2/models</a>' in page
        assert b'<a href="/api/v2/openapi.json">/api/v2/openapi.json</a>' in page
        assert json.loads(await document("/v2/openapi.json", "/api/a b"))["servers"] == [{"url": "/api/a%20b"}]
        assert "servers" not in json.loads(await document("/v2/openapi.json", ""))
