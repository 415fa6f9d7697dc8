"""A container asked over HTTP: invocations, health, and what a gateway makes of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.client import Peer
from gateway.containers.connection import ContainerLimits
from gateway.containers.model import container_spec
from gateway.net.transport import Transport
from gateway.testing import memory_gateway
from models.errors import ModelError
from models.messages import Family, PartKind
from models.session import Call, Session
from protocols.events import Close, ConnectionEnd, Data, End, Headers, Request, Response
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from tests.gateway.containers.containers import (
    Client,
    Containers,
    containers,
    continuation,
    echo,
    http,
    part,
    read_request,
    text,
    told,
    websocket,
)

UTF8, BINARY = PartKind.UTF8, PartKind.BINARY
KIB = 1024


async def failure(found: Containers, client: Client, **call: Any) -> ModelError:
    with pytest.raises(ModelError) as raised:
        await found.call(client, **call)
    assert found.all_closed
    return raised.value


# -- invocations -----------------------------------------------------------------------------------------------------


async def test_an_invocation_is_a_post_with_the_one_parts_bytes_and_an_answer_part_by_part() -> None:
    seen: list[tuple[Request, bytes]] = []
    headers = {
        "authorization": "secret",
        "content-type": "text/csv",
        "accept": "*/*",
        "x-amzn-sagemaker-accept": "application/jsonlines",
        "x-amzn-sagemaker-custom-attributes": "c",
        "x-amzn-sagemaker-target-model": "m.tar.gz",
        "x-amzn-sagemaker-inference-id": "i",
        "x-amzn-sagemaker-session-id": "NEW_SESSION",
        "x-amzn-sagemaker-enable-explanations": "no",
    }
    answer: Headers = [
        (b"content-type", b"application/jsonlines"),
        (b"x-amzn-sagemaker-custom-attributes", b"back"),
        (b"x-amzn-sagemaker-new-session-id", b"s; Expires=2030"),
        (b"set-cookie", b"a=b"),
    ]
    client = Client(part(b"1,2\n" * 50_000))
    async with containers(http((200, answer, [b"one\n", b"two\n"]), seen=seen)) as found:
        await found.call(client, id="r-2", headers=headers, parameters={"unary": True})
        assert found.all_closed
    [(request, body)] = seen
    assert (request.head.method, request.head.target, body) == (b"POST", b"/invocations", b"1,2\n" * 50_000)
    assert dict(request.head.headers) == {
        b"content-length": b"200000",
        b"content-type": b"text/csv",
        b"accept": b"application/jsonlines",
        b"accept-encoding": b"identity",
        b"x-amzn-sagemaker-custom-attributes": b"c",
        b"x-amzn-sagemaker-target-model": b"m.tar.gz",
        b"x-amzn-sagemaker-inference-id": b"i",
        b"x-amzn-sagemaker-session-id": b"NEW_SESSION",
        b"x-amzn-sagemaker-request-id": b"r-2",
    }
    assert told(client) == [(b"one\n", BINARY, True), (b"two\n", BINARY, True)]
    assert client.accepted == 1
    assert client.reply == {
        "content-type": "application/jsonlines",
        "x-amzn-sagemaker-custom-attributes": "back",
        "x-amzn-sagemaker-new-session-id": "s; Expires=2030",
    }


async def test_an_invocation_without_a_part_has_an_empty_body_and_an_empty_answer_no_part() -> None:
    seen: list[tuple[Request, bytes]] = []
    client = Client()
    async with containers(http((200, [(b"content-length", b"0")], []), seen=seen)) as found:
        await found.call(client, parameters={"unary": True})
    assert seen[0][1] == b""
    assert (client.sent, client.accepted) == ([], 1)


@pytest.mark.parametrize("status", [400, 413, 503])
async def test_an_error_of_the_container_is_its_status_and_words(status: int) -> None:
    client = Client(part(b"x" * 300_000))
    async with containers(http((status, [], [b"bad ", b"input"]))) as found:
        error = await failure(found, client, parameters={"unary": True})
    assert (error.message, error.code, error.status) == ("bad input", "ModelError", status)
    assert client.accepted == 0


async def test_a_container_that_refuses_before_it_has_read_the_body_is_heard() -> None:
    async def serve(transport: Transport) -> None:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        await peer.next_event()
        await peer.send(Response(stream=1, status=413), Data(stream=1, buffers=(b"too large",)))
        await wait_all_tasks_blocked()

    async with containers(serve, capacity=KIB) as found:
        error = await failure(found, Client(part(bytes(100 * KIB))), parameters={"unary": True})
    assert (error.message, error.status) == ("too large", 413)


@pytest.mark.parametrize(
    "answer",
    [
        [(b"content-encoding", b"gzip")],
        [(b"content-encoding", b"identity, BR")],
        [(b"content-encoding", b"identity"), (b"content-encoding", b"zstd")],
    ],
)
async def test_an_answer_that_is_encoded_though_nobody_asked_for_it_is_refused_by_name(answer: Headers) -> None:
    client = Client(part(b"x"))
    async with containers(http((200, [*answer, (b"content-type", b"application/json")], [b"\x1f\x8b"]))) as found:
        error = await failure(found, client, parameters={"unary": True})
    coding = answer[-1][1].split()[-1].decode().lower()
    assert (error.code, error.status, client.accepted, client.sent) == ("ModelError", 502, 0, [])
    assert f"content-encoding {coding!r}" in error.message


async def test_identity_is_no_encoding() -> None:
    client = Client(part(b"x"))
    async with containers(http((200, [(b"content-encoding", b"identity")], [b"yes"]))) as found:
        await found.call(client, parameters={"unary": True})
    assert [p.data for p in client.sent] == [b"yes"]


@pytest.mark.parametrize("unary", [True, False])
async def test_a_refusal_whose_words_are_encoded_is_told_without_them(unary: bool) -> None:
    async with containers(http((418, [(b"content-encoding", b"gzip")], [b"\x1f\x8b\0\0"]))) as found:
        error = await failure(found, Client(part(b"x")), parameters={"unary": unary})
    assert (error.message, error.status) == ("the container answered 418", 418)


async def test_an_invocation_that_hangs_is_given_up_before_the_head_and_in_the_middle(autojump_clock: MockClock) -> None:
    async def silent(transport: Transport) -> None:
        await trio.sleep_forever()

    async def stuck(transport: Transport) -> None:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        await read_request(peer)
        await trio.sleep(59)
        await peer.send(Response(stream=1, status=200), Data(stream=1, buffers=(b"first",)))
        await trio.sleep_forever()

    for serve, sent, seconds in ((silent, [], 60), (stuck, [b"first"], 59 + 60)):
        client, began = Client(part(b"x")), trio.current_time()
        async with containers(serve) as found:
            error = await failure(found, client, parameters={"unary": True})
        assert (error.code, error.status) == ("ModelInvocationTimeExceeded", 504)
        assert "60 s (invocation_timeout)" in error.message
        assert [p.data for p in client.sent] == sent
        assert trio.current_time() - began == pytest.approx(seconds)


@pytest.mark.parametrize("unary", [True, False])
async def test_heads_of_1xx_in_place_of_an_answer_are_a_broken_stream(unary: bool) -> None:
    async def serve(transport: Transport) -> None:
        while True:
            if not transport.try_send([b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10]):
                await transport.wait_writable()

    async with containers(serve) as found:
        error = await failure(found, Client(part(b"x")), parameters={"unary": unary})
    assert error.status == 502
    assert "more than 32 heads of status 1xx, the last of 103" in error.message


async def test_a_few_heads_of_1xx_before_an_answer_are_passed_over() -> None:
    async def serve(transport: Transport) -> None:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        request, _ = await read_request(peer)
        for _ in range(32):
            await peer.send(Response(stream=request.stream, status=103))
        await peer.send(Response(stream=request.stream, status=200), Data(stream=1, buffers=(b"a",)), End(stream=1))

    client = Client(part(b"x"))
    async with containers(serve) as found:
        await found.call(client, parameters={"unary": True})
    assert [p.data for p in client.sent] == [b"a"]


async def test_a_slow_client_is_not_a_slow_container(autojump_clock: MockClock) -> None:
    client = Client(part(b"x"), room=0)
    async with containers(http((200, [], [b"a", b"b"]))) as found, trio.open_nursery() as nursery:

        async def run() -> None:
            await found.call(client, parameters={"unary": True})

        nursery.start_soon(run)
        await trio.sleep(1000)
        client.read()
    assert [p.data for p in client.sent] == [b"a", b"b"]


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"100")]])
async def test_an_answer_cut_in_the_middle_is_a_broken_stream(headers: Headers) -> None:
    cut: Any = None
    client = Client(part(b"x"))
    async with containers(http((200, headers, [b"half", cut]))) as found:
        error = await failure(found, client, parameters={"unary": True})
    assert (error.code, error.status) == ("StreamBroken", 502)
    assert [p.data for p in client.sent] == [b"half"]


async def test_a_container_that_leaves_before_its_answer_is_a_broken_stream_and_is_not_asked_again() -> None:
    async def serve(transport: Transport) -> None:
        await read_request(Peer(transport, HTTP1Connection(Role.SERVER)))

    client = Client(part(b"x"))
    async with containers(serve) as found:
        error = await failure(found, client, parameters={"unary": True})
        assert len(found.dialled) == 1
    assert (error.code, error.status, client.accepted) == ("StreamBroken", 502, 0)


async def test_a_client_that_stops_reading_stops_the_answer() -> None:
    sent = 0

    async def serve(transport: Transport) -> None:
        nonlocal sent
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        await read_request(peer)
        await peer.send(Response(stream=1, status=200))
        for _ in range(100):
            await peer.send(Data(stream=1, buffers=(bytes(10 * KIB),)))
            sent += 1

    client = Client(part(b"x"), room=1)
    async with containers(serve) as found, trio.open_nursery() as nursery:

        async def run() -> None:
            with pytest.raises(ModelError):  # the answer has no end
                await found.call(client, parameters={"unary": True})

        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        assert sent * 10 <= 10 + 64 * 3
        client.read()
    assert sent == 100


# -- health and the model in service ---------------------------------------------------------------------------------

SPLIT = "€".encode()
OK: tuple[int, Headers, list[bytes]] = (200, [(b"content-length", b"0")], [])
DOWN: tuple[int, Headers, list[bytes]] = (503, [(b"content-length", b"0")], [])


async def test_loading_waits_until_ping_answers_200(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[Request, bytes]] = []
    hangs = 2
    answer = http(DOWN, DOWN, OK, seen=seen)

    async def serve(transport: Transport) -> None:
        nonlocal hangs
        if hangs:
            hangs -= 1
            await trio.sleep_forever()
        await answer(transport)

    caplog.set_level(logging.INFO, "gateway.bridge")
    async with containers(serve) as found:
        spec = container_spec("ws://container:8080", name="m", dial=found.dial)
        assert (spec.family, spec.accepts, spec.load_timeout) == (Family.PARTS, True, 480)
        async with spec.load():
            assert trio.current_time() == pytest.approx(2 * (2 + 1) + 2 * 1)
        assert found.all_closed
    assert [(r.head.method, r.head.target) for r, _ in seen] == [(b"GET", b"/ping")] * 3
    assert [r.reason for r in caplog.records] == [  # type: ignore[attr-defined]
        "the container did not answer within 2 s (health_timeout)",
        "the container answered 503 to GET /ping",
    ]


async def test_a_container_that_stays_unhealthy_ends_its_worker(autojump_clock: MockClock) -> None:
    async with containers(http(OK, DOWN, DOWN, OK, DOWN)) as found:
        limits = ContainerLimits(health_failures=3)
        spec = container_spec("ws://container:8080", name="m", limits=limits, dial=found.dial)
        with pytest.raises(ExceptionGroup) as raised:
            async with spec.load():
                await trio.sleep_forever()
        assert found.all_closed
    assert "failed 3 times in a row (health_failures)" in str(raised.value.exceptions[0])
    assert trio.current_time() == pytest.approx(10 * 6)


async def test_a_container_that_talks_to_a_session_is_not_gone_though_ping_fails(autojump_clock: MockClock) -> None:
    async def chatty(peer: Peer) -> None:
        for _ in range(100):
            await trio.sleep(5)
            await peer.send(text(b"still here"))
        await trio.sleep_forever()

    async def serve(transport: Transport) -> None:
        await (http(OK) if len(found.dialled) == 1 else websocket(chatty) if len(found.dialled) == 2 else http(DOWN))(
            transport
        )

    client = Client(ended=False)
    async with containers(serve) as found:
        spec = container_spec("ws://container:8080", name="m", dial=found.dial)

        async def live() -> None:
            async with spec.load() as model:
                await model(Session(client, Call()))

        with pytest.raises(ExceptionGroup):
            await live()
    assert len(client.sent) == 100
    assert trio.current_time() == pytest.approx(500 + 60, abs=10)


async def test_the_watch_can_be_off(autojump_clock: MockClock) -> None:
    async with containers(http(OK, DOWN)) as found:
        limits = ContainerLimits(health_interval=0)
        async with container_spec("ws://container:8080", name="m", limits=limits, dial=found.dial).load():
            await trio.sleep(10_000)
        assert len(found.dialled) == 1


async def test_a_gateway_serves_a_container_as_its_own_model() -> None:
    async def serve(transport: Transport) -> None:
        await (http(OK) if len(found.dialled) == 1 else websocket(echo))(transport)

    async with containers(serve) as found:
        spec = container_spec("ws://container:8080", name="m", dial=found.dial)
        async with memory_gateway([spec]) as gateway:
            peer = await gateway.websocket()
            await peer.send(text(SPLIT[:1], fin=False), continuation(SPLIT[1:]))
            assert [await peer.next_event(), await peer.next_event()] == [
                text(SPLIT[:1], fin=False),
                continuation(SPLIT[1:]),
            ]
            await peer.send(Close())
            while not isinstance(await peer.next_event(), ConnectionEnd):
                pass
            peer.close()
        assert found.all_closed
