"""Answers that end with trailers, or have no body, on each wire: the clients that get them, and the end of the exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from gateway.core.exchange import Exchange
from gateway.core.route import WEBSOCKET, Row
from gateway.dialects.answers import accepted_handshake
from gateway.errors import Ending
from gateway.wires.asgi import AnswerCut
from protocols.errors import LocalProtocolError
from protocols.events import Close, Data, End, Reset, Response
from protocols.http2.frames import Kind
from tests.gateway.promises import CANCELLED, House, KiB, Line, at_once, raw, serving
from tests.gateway.wires.test_asgi import FINAL, Server, served

HEAD, TRAILERS = ((b"content-type", b"application/grpc"),), ((b"grpc-status", b"0"), (b"grpc-message", b"fine"))
TE = (b"te", b"trailers")
Said = Callable[[Exchange], None]


def whole(exchange: Exchange) -> None:
    exchange.outbound.respond(200, HEAD, b"hel", b"lo", trailers=TRAILERS)


def begun(exchange: Exchange) -> None:
    exchange.outbound.start(200, HEAD, trailers=True)
    exchange.outbound.push(b"hel", b"lo")
    exchange.outbound.finish(trailers=TRAILERS)


def alone(exchange: Exchange) -> None:
    exchange.outbound.respond(200, (*HEAD, *TRAILERS), trailers=())


def bodiless(exchange: Exchange) -> None:
    exchange.outbound.respond(200, HEAD, trailers=TRAILERS)


both_ways = pytest.mark.parametrize("said", [whole, begun])


def add(house: House, said: Said, method: str = "POST") -> list[Exchange]:
    """Adds a route that answers with `said`. Returns the list of its exchanges."""
    exchanges: list[Exchange] = []

    async def answer(exchange: Exchange) -> None:
        exchanges.append(exchange)
        said(exchange)

    house.gateway.router.add(Row(method, "/said", answer))
    return exchanges


async def ask(house: House, line: Line, *fields: tuple[bytes, bytes], method: bytes = b"POST") -> list[Any]:
    """Asks for it, and reads the whole answer: its head, its body, and its end."""
    stream = line.next_stream()
    await line.send(raw(stream, method, "/said", headers=fields, content_length=0), End(stream=stream))
    head = await line.event(stream)
    assert isinstance(head, Response)
    assert dict(head.headers)[b"x-request-id"]
    body = b""
    while isinstance(event := await line.event(stream), Data):
        body += b"".join(event.buffers)
    return [head, body, event]


# -- clients that get them ---------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("fields", [(), (TE,)], ids=["no te", "te"])
async def test_http2_has_them_always(said: Said, fields: tuple[Any, ...], autojump_clock: Any) -> None:
    async with serving() as house:
        add(house, said)
        line = house.line("http2")
        head, body, end = await ask(house, line, *fields)
        assert (head.status, body, end) == (200, b"hello", End(stream=1, trailers=TRAILERS))
        assert b"content-length" not in dict(head.headers)
        await house.still()
        assert house.endings == {"complete": 1}


@both_ways
@pytest.mark.parametrize(
    ("te", "taken"),
    [
        (b"", False),
        (b"trailers", True),
        (b"deflate;q=0.5, Trailers", True),
        (b"deflate", False),
        (b"trailers;q=1", False),
    ],
)
async def test_http11_has_them_where_the_request_says_so(said: Said, te: bytes, taken: bool, autojump_clock: Any) -> None:
    async with serving() as house:
        add(house, said)
        line = house.line("http1")
        for stream in (1, 2, 3):  # the head is known from the second on
            head, body, end = await ask(house, line, *[(b"te", te), (b"connection", b"te")][: 2 * bool(te)])
            assert (head.status, body, end) == (200, b"hello", End(stream=stream, trailers=TRAILERS if taken else ()))
        head, body, end = await ask(house, line, (b"x", b"another"))
        assert end == End(stream=4), "what one request says is nothing to the next"
        await house.still()
        assert house.endings == {"complete": 4}


@both_ways
async def test_http11_has_them_chunked_behind_the_last_chunk(said: Said, autojump_clock: Any) -> None:
    async with serving() as house:
        add(house, said)
        line = house.line("http1")
        await ask(house, line, TE)
        head, _, body = bytes(line.transport.read).partition(b"\r\n\r\n")
        assert b"\r\ntransfer-encoding: chunked" in head
        assert body == b"5\r\nhello\r\n0\r\ngrpc-status: 0\r\ngrpc-message: fine\r\n\r\n"


@both_ways
async def test_an_answer_without_chunks_goes_without_them(said: Said, autojump_clock: Any) -> None:
    async with serving() as house:
        add(house, said)
        line = house.line("http1")
        line.transport.try_send([b"POST /said HTTP/1.0\r\nte: trailers\r\ncontent-length: 0\r\n\r\n"])
        await line.over_raw()
        assert bytes(line.transport.read).endswith(b"\r\n\r\nhello")
        await house.still()
        assert house.endings == {"complete": 1}


async def test_a_declared_length_keeps_its_answer_from_having_them_over_http11(autojump_clock: Any) -> None:
    def declared(exchange: Exchange) -> None:
        exchange.outbound.start(200, [(b"content-length", b"5")])
        exchange.outbound.push(b"hello")
        exchange.outbound.finish(trailers=TRAILERS)

    async with serving() as house:
        add(house, declared)
        assert (await ask(house, house.line("http1"), TE))[1:] == [b"hello", End(stream=1)]
        assert (await ask(house, house.line("http2"), TE))[1:] == [b"hello", End(stream=1, trailers=TRAILERS)]
        await house.still()


OFFERED = {"http.response.trailers": {}}
TOLD = {"type": "http.response.trailers", "headers": [*TRAILERS], "more_trailers": False}


@both_ways
@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("te", [b"trailers", b"deflate, trailers", b"", b"deflate"])
async def test_an_asgi_server_is_told_them_where_it_offers_that_and_the_request_says_so(
    said: Said, offered: bool, te: bytes
) -> None:
    async with served() as (app, calls):
        gateway: Any = app.gateway
        gateway.router.add(Row("POST", "/said", runs(said)))
        fields = [(b"host", b"localhost"), (b"te", te)][: 1 + bool(te)]
        server = Server(app, path="/said", headers=fields, extensions=OFFERED if offered else {})
        server.body(b"")
        calls.start_soon(server.run)
        await server.over.wait()
        taken = offered and b"trailers" in te
        assert server.told[0].get("trailers", False) is taken
        assert b"".join(message.get("body", b"") for message in server.told[1:]) == b"hello"
        assert server.told[-1 - taken]["more_body"] is False
        assert server.told[-taken:] == [TOLD] * taken if taken else True
        assert gateway.counts().endings == {"complete": 1}


async def test_an_asgi_server_waits_for_no_trailers_that_were_not_named() -> None:
    def unnamed(exchange: Exchange) -> None:
        exchange.outbound.start(200, [])
        exchange.outbound.push(b"hello")
        exchange.outbound.finish(trailers=TRAILERS)

    async with served() as (app, calls):
        gateway: Any = app.gateway
        for path, said in (("/unnamed", unnamed), ("/empty", answered(200))):
            gateway.router.add(Row("POST", path, runs(said)))
            server = Server(app, path=path, headers=[(b"host", b"localhost"), TE], extensions=OFFERED)
            server.body(b"")
            calls.start_soon(server.run)
            await server.over.wait()
            assert "trailers" not in server.told[0]
            assert server.answer == (200, b"hello" if said is unnamed else b"")


async def test_a_websocket_has_none(autojump_clock: Any) -> None:
    async def goodbye(exchange: Exchange) -> None:
        exchange.outbound.start(101, accepted_handshake(exchange))
        exchange.outbound.finish(trailers=TRAILERS, code=1001, reason="bye")

    async with serving() as house:
        house.gateway.router.add(Row(WEBSOCKET, "/said", goodbye))
        line = await house.socket("/said")
        assert await line.event(1) == Close(code=1001, reason="bye")
        await house.still()
        assert house.endings == {"complete": 1}


def runs(said: Said) -> Any:
    async def answer(exchange: Exchange) -> None:
        said(exchange)

    return answer


# -- answers without a body --------------------------------------------------------------------------------------------


def answered(status: int) -> Said:
    return lambda exchange: exchange.outbound.respond(status, [(b"x", b"y")])


@pytest.mark.parametrize(
    ("said", "method", "length"),
    [
        (alone, b"POST", None),
        (lambda exchange: exchange.outbound.respond(200, HEAD, trailers=()), b"POST", None),
        (answered(200), b"POST", b"0"),
        (answered(204), b"POST", None),
        (answered(304), b"GET", None),
        (answered(404), b"POST", b"0"),
        (lambda exchange: exchange.outbound.respond(200, [], b"hello"), b"HEAD", b"5"),
    ],
    ids=["trailers in the head", "no trailers", "200", "204", "304", "404", "HEAD"],
)
async def test_an_answer_without_a_body_is_one_frame_of_http2(
    said: Said, method: bytes, length: bytes | None, autojump_clock: Any
) -> None:
    async with serving() as house:
        add(house, said, "GET" if method == b"HEAD" else method.decode())
        for wire in ("http2", "http1"):
            line = house.line(wire)
            head, body, end = await ask(house, line, TE, method=method)
            assert (body, end) == (b"", End(stream=1))
            assert dict(head.headers).get(b"content-length") == length
            if wire == "http2":
                assert [kind for kind, stream in written(line) if stream == 1] == [Kind.HEADERS]
        await house.still()
        assert house.endings == {"complete": 2}


def written(line: Line) -> list[tuple[Kind, int]]:
    """Kind and stream of the frames that the client has read."""
    data, found = bytes(line.transport.read), []
    while data:
        n = int.from_bytes(data[:3])
        found.append((Kind(data[3]), int.from_bytes(data[5:9])))
        data = data[9 + n :]
    return found


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_what_may_be_asked_is_a_head_alone(wire: str, autojump_clock: Any) -> None:
    async with serving() as house:
        line = house.line(wire)
        await line.send(raw(1, b"OPTIONS", "/ping"), End(stream=1))
        head = await line.event(1)
        assert head.status == 204
        assert {b"content-length", b"transfer-encoding"}.isdisjoint(dict(head.headers))
        assert dict(head.headers)[b"allow"]
        assert await line.event(1) == End(stream=1)


@pytest.mark.parametrize("said", [alone, bodiless])
async def test_trailers_without_a_body_are_in_the_one_head_of_http2(said: Said, autojump_clock: Any) -> None:
    async with serving() as house:
        add(house, said)
        line = house.line("http2")
        head, body, end = await ask(house, line, TE)
        assert set(head.headers) > {*HEAD, *TRAILERS}
        assert (body, end) == (b"", End(stream=1))
        assert [kind for kind, stream in written(line) if stream == 1] == [Kind.HEADERS]


async def test_trailers_without_a_body_stay_trailers_elsewhere(autojump_clock: Any) -> None:
    async with serving() as house:
        add(house, bodiless)
        head, body, end = await ask(house, house.line("http1"), TE)
        assert not {*TRAILERS} & {*head.headers}
        assert (body, end) == (b"", End(stream=1, trailers=TRAILERS))
    async with served() as (app, calls):
        gateway: Any = app.gateway
        gateway.router.add(Row("POST", "/said", runs(bodiless)))
        server = Server(app, path="/said", headers=[(b"host", b"localhost"), TE], extensions=OFFERED)
        server.body(b"")
        calls.start_soon(server.run)
        await server.over.wait()
        assert server.told[0]["trailers"] is True
        assert server.told[1:] == [FINAL, TOLD]


@both_ways
async def test_head_data_and_trailers_leave_in_one_write(said: Said, autojump_clock: Any) -> None:
    async with serving() as house:
        add(house, said)
        line = house.line("http2")
        await ask(house, line)
        assert [kind for kind, stream in written(line) if stream == 1] == [Kind.HEADERS, Kind.DATA, Kind.HEADERS]
        transport: Any = line.transport
        assert not transport.below._inbox


# -- when the exchange is over -----------------------------------------------------------------------------------------


@both_ways
async def test_the_ending_waits_until_the_kernel_has_the_trailers(said: Said, autojump_clock: Any) -> None:
    def long(exchange: Exchange) -> None:
        exchange.outbound.start(200, HEAD)
        exchange.outbound.push(bytes(40 * KiB))
        exchange.outbound.finish(trailers=((b"t", b"z" * 30_000),))

    async with serving(capacity=40 * KiB) as house:
        exchanges = add(house, long)
        for wire in ("http1", "http2"):
            line = house.line(wire)
            stream = line.next_stream()
            await line.send(raw(stream, b"POST", "/said", headers=(TE,), content_length=0), End(stream=stream))
            await house.still()
            exchange = exchanges.pop()
            assert (exchange.outbound.finishing, exchange.ending) == (Ending.COMPLETE, None)
            taken, buffer = 0, memoryview(bytearray(1000))
            while exchange.ending is None:
                n = line.transport.try_receive_into(buffer)
                assert n, "there is more to be read until the exchange is over"
                taken += n
                await house.still()
            assert taken > 30_000, "the kernel had only what it holds"
            assert exchange.ending is Ending.COMPLETE
            line.peer.close()
        await house.still()


async def test_trailers_wait_for_the_window_of_their_stream(autojump_clock: Any) -> None:
    async with serving() as house:
        exchanges = add(house, lambda e: e.outbound.respond(200, HEAD, bytes(300 * KiB), trailers=TRAILERS))
        line = house.line("http2")
        await line.send(raw(1, b"POST", "/said", content_length=0), End(stream=1))
        await house.still()
        (exchange,) = exchanges
        assert (exchange.outbound.finishing, exchange.ending) == (Ending.COMPLETE, None)
        with at_once():
            assert isinstance(await line.event(1), Response)
            while isinstance(event := await line.event(1), Data):
                line.machine.credit(1, event.nbytes)
                await line.send()
        assert event == End(stream=1, trailers=TRAILERS)
        await house.still()
        assert exchange.ending is Ending.COMPLETE


@pytest.mark.parametrize("how", ["reset", "gone", "interrupted"])
async def test_a_client_that_leaves_before_its_trailers_has_cancelled(how: str, autojump_clock: Any) -> None:
    async with serving() as house:
        exchanges = add(house, lambda e: e.outbound.respond(200, HEAD, bytes(300 * KiB), trailers=TRAILERS))
        line = house.line("http2")
        await line.send(raw(1, b"POST", "/said", content_length=0), End(stream=1))
        await house.still()
        (exchange,) = exchanges
        exchange.interrupt(AssertionError("nobody hears it"))  # type: ignore[arg-type]
        assert exchange.interruption is None, "all is said"
        if how == "reset":
            await line.send(Reset(stream=1, code=8))
        elif how == "gone":
            line.reset()
        else:
            exchange.peer_gone(Ending.CANCELLED)
            await line.send(Reset(stream=1, code=8))
        await house.still()
        assert exchange.ending is Ending.CANCELLED
        assert house.endings == CANCELLED


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_trailers_for_a_client_that_is_gone_are_dropped_and_after_the_end_an_error(
    wire: str, autojump_clock: Any
) -> None:
    go, done = trio.Event(), trio.Event()

    async def late(exchange: Exchange) -> None:
        exchange.outbound.start(200, HEAD)
        with trio.CancelScope(shield=True):
            await go.wait()
        exchange.outbound.push(b"x")
        exchange.outbound.finish(trailers=TRAILERS)
        assert exchange.outbound.finishing is None
        done.set()

    async def twice(exchange: Exchange) -> None:
        whole(exchange)
        for act in (exchange.outbound.finish, lambda **more: exchange.outbound.respond(200, HEAD, **more)):
            with pytest.raises(trio.ClosedResourceError):
                act(trailers=TRAILERS)

    async with serving() as house:
        house.gateway.router.add(Row("POST", "/late", late))
        house.gateway.router.add(Row("POST", "/said", twice))
        line = house.line(wire)
        await line.send(raw(1, b"POST", "/late", headers=(TE,), content_length=0), End(stream=1))
        await house.still()
        line.reset()
        await house.still()
        go.set()
        await done.wait()
        await house.still()
        assert house.endings == CANCELLED
        assert (await ask(house, house.line(wire), TE))[2].trailers == TRAILERS
        await house.still()


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_an_answer_that_is_aborted_has_no_trailers(wire: str, autojump_clock: Any) -> None:
    def aborted(exchange: Exchange) -> None:
        exchange.outbound.start(200, HEAD)
        exchange.outbound.push(b"x")
        exchange.outbound.abort(Ending.MODEL_ERROR)

    async with serving() as house:
        add(house, aborted)
        line = house.line(wire)
        await line.send(raw(1, b"POST", "/said", headers=(TE,), content_length=0), End(stream=1))
        await line.read()
        while isinstance(event := await line.event(1), Response | Data):
            pass
        assert not isinstance(event, End)
        await house.still()


@pytest.mark.parametrize("wire", ["http1", "http2"])
@pytest.mark.parametrize("wrong", [(b"connection", b"close"), (b"A b", b""), (b"x", b"a\nb")], ids=repr)
async def test_trailers_that_cannot_be_said_end_nothing_and_another_end_may_be_said(
    wire: str, wrong: tuple[bytes, bytes], autojump_clock: Any
) -> None:
    def corrected(exchange: Exchange) -> None:
        outbound = exchange.outbound
        outbound.start(200, HEAD)
        outbound.push(b"hello")
        with pytest.raises(LocalProtocolError):
            outbound.finish(trailers=(*TRAILERS, wrong))
        assert (outbound.finishing, outbound.open) == (None, True)
        outbound.finish(trailers=TRAILERS)

    async with serving() as house:
        add(house, corrected)
        assert (await ask(house, house.line(wire), TE))[1:] == [b"hello", End(stream=1, trailers=TRAILERS)]
        await house.still()
        assert house.endings == {"complete": 1}


async def test_a_whole_answer_of_http2_that_cannot_be_said_has_not_begun(autojump_clock: Any) -> None:
    def corrected(exchange: Exchange) -> None:
        with pytest.raises(LocalProtocolError):
            exchange.outbound.respond(200, HEAD, b"hello", trailers=((b":status", b"200"),))
        exchange.outbound.respond(500, HEAD, trailers=())

    async with serving() as house:
        add(house, corrected)
        head, body, end = await ask(house, house.line("http2"))
        assert (head.status, body, end) == (500, b"", End(stream=1))
        await house.still()


async def test_an_asgi_answer_is_over_when_the_server_has_taken_the_trailers(autojump_clock: Any) -> None:
    async with served() as (app, calls):
        gateway: Any = app.gateway
        gateway.router.add(Row("POST", "/said", runs(whole)))
        server = Server(app, path="/said", headers=[(b"host", b"localhost"), TE], extensions=OFFERED)
        take = server._send

        async def slow(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.trailers":
                assert gateway.counts().endings == {}
                await trio.sleep(1)
                assert gateway.counts().endings == {}
            await take(message)

        server._send = slow  # type: ignore[method-assign]
        server.body(b"")
        calls.start_soon(server.run)
        await server.over.wait()
        assert server.told[-1] == TOLD
        assert gateway.counts().endings == {"complete": 1}


async def test_an_asgi_answer_that_is_cut_off_has_no_trailers(autojump_clock: Any) -> None:
    def aborted(exchange: Exchange) -> None:
        exchange.outbound.start(200, HEAD)
        exchange.outbound.abort(Ending.MODEL_ERROR)

    async with served() as (app, calls):
        gateway: Any = app.gateway
        gateway.router.add(Row("POST", "/said", runs(aborted)))
        server = Server(app, path="/said", headers=[(b"host", b"localhost"), TE], extensions=OFFERED)
        server.body(b"")
        calls.start_soon(server.run)
        await server.over.wait()
        assert isinstance(server.error, AnswerCut)
        assert TOLD not in server.told
