"""A container behind the bridge: parts and frames one for one, who waits for whom, and every way to end."""

from __future__ import annotations

import errno
import gc
import re
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.client import Peer
from gateway.containers.connection import ContainerLimits, container_address
from gateway.containers.model import container_spec
from gateway.errors import BadRequest, Overloaded, TransportLost
from gateway.net.transport import Transport
from gateway.testing import memory_gateway
from models.errors import ModelError
from models.messages import PartKind
from protocols.buffers import ByteBudget
from protocols.events import Close, Data, Frame, Ping, Pong, Request, Response
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from tests.gateway.containers.containers import (
    Client,
    Containers,
    binary,
    containers,
    continuation,
    echo,
    http,
    part,
    read_frames,
    read_request,
    sends,
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


async def unanswered(found: Containers, client: Client) -> None:
    """A session with a container that only reads: it may have had an answer, and that must be said."""
    error = await failure(found, client)
    assert (error.code, error.status) == ("StreamBroken", 504)
    assert error.message.startswith("the container at container:8080 sent nothing after the client's last part")


# -- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "path"),
    [
        ("ws://127.0.0.1:8080", "127.0.0.1", 8080, False, "invocations-bidirectional-stream"),
        ("http://box:1/", "box", 1, False, "invocations-bidirectional-stream"),
        ("ws://local:8081/invoke-bidi-stream", "local", 8081, False, "invoke-bidi-stream"),
        ("ws://box", "box", 8080, False, "invocations-bidirectional-stream"),
        ("wss://box/a/b%20c", "box", 443, True, "a/b%20c"),
        ("https://[::1]:8443/x", "::1", 8443, True, "x"),
    ],
)
def test_one_url_says_where_both_the_websocket_and_http_are(url: str, host: str, port: int, tls: bool, path: str) -> None:
    address = container_address(url)
    assert (address.host, address.port, address.tls, address.path) == (host, port, tls, path)


def test_an_ipv6_authority_has_its_brackets() -> None:
    assert container_address("ws://[::1]:8080").authority == "[::1]:8080"


@pytest.mark.parametrize(
    "url",
    ["", "box:8080", "ftp://box", "ws://", "ws://box:x", "ws://box:99999", "ws://u:p@box", "ws://box/?a=b", "ws://b/ü"],
)
def test_what_is_no_containers_url_is_a_value_error_that_quotes_it(url: str) -> None:
    with pytest.raises(ValueError, match="container URL"):
        container_address(url)


# -- the handshake ---------------------------------------------------------------------------------------------------


async def test_the_container_sees_the_path_the_query_and_the_headers_that_are_its_business(
    autojump_clock: MockClock,
) -> None:
    seen: list[Request] = []
    headers = {
        "authorization": "AWS4-HMAC-SHA256 secret",
        "cookie": "a=b",
        "x-amz-date": "now",
        "content-type": "application/vnd.amazon.eventstream",
        "accept": "*/*",
        "x-amzn-sagemaker-custom-attributes": "c=1",
        "x-amzn-sagemaker-inference-id": "i",
        "x-amzn-sagemaker-session-id": "",
        "x-amzn-sagemaker-target-variant": "v",
    }
    async with containers(websocket(echo, seen=seen)) as found:
        call: dict[str, Any] = {"id": "r-1", "headers": headers, "query": "a=%2Fb&c=%7e"}
        await found.call(Client(), **call)
        await found.call(Client(), **call, parameters={"invocation_path": "v1/listen.ws"})
    assert [r.head.target for r in seen] == [
        b"/invocations-bidirectional-stream?a=%2Fb&c=%7e",
        b"/v1/listen.ws?a=%2Fb&c=%7e",
    ]
    assert seen[0].head.authority == b"container:8080"
    ours = {name: value for name, value in seen[0].head.headers if not name.startswith(b"sec-websocket-")}
    assert re.fullmatch(rb"end-of-input-[0-9a-f]{32}", ours.pop(b"x-everywire-end-of-input"))
    assert ours == {
        b"content-type": b"application/vnd.amazon.eventstream",
        b"accept": b"*/*",
        b"x-amzn-sagemaker-custom-attributes": b"c=1",
        b"x-amzn-sagemaker-inference-id": b"i",
        b"x-amzn-sagemaker-request-id": b"r-1",
    }


@pytest.mark.parametrize("path", ["..", "a/../b", "./a", "a/.", "/a", "a//b", "a?b", "a b", "a\n", "%2e%2e"])
async def test_a_path_that_could_leave_its_place_never_reaches_the_container(path: str) -> None:
    async with containers(websocket(echo)) as found:
        with pytest.raises(BadRequest, match="invocation path"):
            await found.call(Client(), parameters={"invocation_path": path})
        assert not found.dialled


@pytest.mark.parametrize(
    "call", [{"query": "a=ü"}, {"query": "\ud800"}, {"headers": {"accept": "a\r\nb: c"}}, {"headers": {"accept": "€"}}]
)
async def test_what_no_request_can_hold_is_the_clients_mistake(call: dict[str, Any]) -> None:
    async with containers(websocket(echo)) as found:
        with pytest.raises(BadRequest):
            await found.call(Client(), **call)
        assert found.all_closed


async def test_the_session_is_accepted_once_the_container_has_accepted_and_not_before() -> None:
    client, accepted_at_request = Client(ended=False), []
    go = trio.Event()

    async def serve(transport: Transport) -> None:
        accepted_at_request.append(client.accepted)
        await go.wait()
        await websocket(echo, headers=[(b"x-amzn-sagemaker-custom-attributes", b"trace=7")])(transport)

    async with containers(serve) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await wait_all_tasks_blocked()
        assert client.accepted == 0
        go.set()
        await wait_all_tasks_blocked()
        assert client.accepted == 1
        client.end()
    assert accepted_at_request == [0]
    assert client.reply == {"x-amzn-sagemaker-custom-attributes": "trace=7"}


@pytest.mark.parametrize(
    ("status", "body", "said", "as_status"),
    [
        (403, b"this model is \xe2\x82\xac 5", "this model is € 5", 403),
        (500, b"", "the container answered 500", 500),
        (429, b"\xff" + b"x" * 10_000, "\ufffd" + "x" * 4095, 429),
        (200, b"<html>", "the container answered 200", 502),
        (302, b"", "the container answered 302", 502),
    ],
)
async def test_a_refused_handshake_is_the_containers_own_status_and_words(
    status: int, body: bytes, said: str, as_status: int
) -> None:
    client = Client(part(b"never taken"))
    async with containers(http((status, [(b"content-length", b"%d" % len(body))], [body]))) as found:
        error = await failure(found, client)
    assert (error.message, error.code, error.status) == (said, "HandshakeFailed", as_status)
    assert (client.accepted, client.untaken) == (0, 1)


async def test_a_refusal_whose_text_does_not_end_is_passed_on_as_far_as_it_came(autojump_clock: MockClock) -> None:
    async def serve(transport: Transport) -> None:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        await read_request(peer)
        await peer.send(Response(stream=1, status=503), Data(stream=1, buffers=(b"loading",)))
        await trio.sleep_forever()

    async with containers(serve) as found:
        error = await failure(found, Client())
    assert (error.message, error.status) == ("loading", 503)


async def test_a_container_that_hangs_in_the_handshake_is_given_up_in_time(autojump_clock: MockClock) -> None:
    client = Client()

    async def serve(transport: Transport) -> None:
        await trio.sleep_forever()

    async with containers(serve, ContainerLimits(connect_timeout=7)) as found:
        error = await failure(found, client)
    assert (error.code, error.status, client.accepted) == ("HandshakeFailed", 504, 0)
    assert "7 s (connect_timeout)" in error.message
    assert trio.current_time() == pytest.approx(7)


async def test_a_container_that_cannot_be_dialled_is_502_and_one_that_does_not_accept_504(
    autojump_clock: MockClock,
) -> None:
    async def refused() -> Transport:
        raise OSError(errno.ECONNREFUSED, "Connection refused")

    for dial, status, words in ((refused, 502, "Connection refused"), (trio.sleep_forever, 504, "connect_timeout")):
        async with containers(websocket(echo)) as found:
            found.container._dial = dial
            error = await failure(found, Client())
        assert (error.code, error.status) == ("HandshakeFailed", status)
        assert words in error.message


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"what?\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-accept: bm8=\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    ],
)
async def test_an_answer_that_is_no_handshake_is_a_bad_gateway(answer: bytes) -> None:
    client = Client()

    async def serve(transport: Transport) -> None:
        await read_request(Peer(transport, HTTP1Connection(Role.SERVER)))
        if answer:
            transport.try_send([answer])

    async with containers(serve) as found:
        error = await failure(found, client)
    assert (error.code, error.status, client.accepted) == ("HandshakeFailed", 502, 0)


# -- parts and frames ------------------------------------------------------------------------------------------------

SPLIT = "€".encode()
FRAGMENTS = [
    (part(SPLIT[:1], kind=UTF8, last=False), text(SPLIT[:1], fin=False)),
    (part(SPLIT[1:2], kind=UTF8, last=False), continuation(SPLIT[1:2], fin=False)),
    (part(b"", kind=UTF8, last=False), continuation(b"", fin=False)),
    (part(SPLIT[2:], kind=UTF8), continuation(SPLIT[2:])),
    (part(b"\xff\xfe not UTF-8", kind=UTF8), text(b"\xff\xfe not UTF-8")),
    (part(b""), binary(b"")),
    (part(bytes(70_000), last=False), binary(bytes(70_000), fin=False)),
    (part(b"end"), continuation(b"end")),
]


@pytest.mark.parametrize("capacity", [1, 7, 65536])
async def test_fragments_pass_byte_for_byte_in_both_directions(capacity: int) -> None:
    fragments = FRAGMENTS if capacity > 100 else FRAGMENTS[:6]
    got: list[Any] = []

    async def script(peer: Peer) -> None:
        for _, frame in fragments:
            got.append(await peer.next_event())
            await peer.send(frame)
        await echo(peer)

    client = Client(*(sent for sent, _ in fragments))
    async with containers(websocket(script), capacity=capacity) as found:
        await found.call(client)
    assert got == [frame for _, frame in fragments]
    assert told(client) == [(p.data, p.kind, p.last) for p, _ in fragments]


async def test_a_continuation_is_one_whatever_its_kind_says() -> None:
    got: list[Any] = []
    client = Client(part(b"a", kind=UTF8, last=False), part(b"b", kind=BINARY), part(b"c"))
    async with containers(websocket(lambda peer: read_frames(peer, into=got))) as found:
        await unanswered(found, client)
    assert got == [text(b"a", fin=False), continuation(b"b"), binary(b"c"), Close(code=1000)]


async def test_a_thousand_parts_go_and_come_in_order() -> None:
    client = Client(*(part(b"%d" % i, kind=UTF8) for i in range(1000)))
    async with containers(websocket(echo)) as found:
        await found.call(client)
    assert [p.data for p in client.sent] == [b"%d" % i for i in range(1000)]


async def test_a_frame_of_the_limit_passes_and_one_byte_more_ends_the_session() -> None:
    client = Client(ended=False)
    async with containers(websocket(sends(binary(bytes(100)), binary(bytes(101)))), ContainerLimits(part=100)) as found:
        error = await failure(found, client)
    assert [len(p.data) for p in client.sent] == [100]
    assert error.code == "StreamBroken"
    assert "101 bytes exceeds the limit part, 100" in error.message


async def test_the_container_hears_1009_for_a_frame_that_is_too_large() -> None:
    got: list[Any] = []

    async def script(peer: Peer) -> None:
        await peer.send(binary(bytes(101)))
        await read_frames(peer, into=got)

    async with containers(websocket(script), ContainerLimits(part=100)) as found:
        await failure(found, Client(ended=False))
        await wait_all_tasks_blocked()
    assert [event.code for event in got] == [1009]


# -- back pressure ---------------------------------------------------------------------------------------------------


async def test_a_client_that_stops_reading_stops_the_container_within_the_bound() -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        for _ in range(300):
            await peer.send(binary(bytes(10 * KIB)))
            sent += 1
        await peer.send(Close())
        await echo(peer)

    client = Client(ended=False, room=2)
    limits = ContainerLimits(read_ahead=64 * KIB)
    async with containers(websocket(script), limits, capacity=64 * KIB) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await wait_all_tasks_blocked()
        # read_ahead, one receive, what the connection holds, what the container has in hand
        assert sent * 10 <= 2 * 10 + 64 + 10 + 64 + 64 + 64
        before = sent
        client.read(10)
        await wait_all_tasks_blocked()
        assert 5 <= sent - before <= 20
        client.read()
    assert sent == 300
    assert len(client.sent) == 300


async def test_a_flood_of_empty_frames_is_bounded_too() -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        while True:
            await peer.send(binary(b""))
            sent += 1

    client = Client(ended=False, room=0)
    limits = ContainerLimits(read_ahead=64 * KIB)
    async with containers(websocket(script), limits, capacity=KIB) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await wait_all_tasks_blocked()
        assert sent < 64 * KIB / 128 + 2000
        nursery.cancel_scope.cancel()


async def test_what_is_held_for_a_slow_client_is_read_ahead_and_one_frame() -> None:
    """A frame is begun while less than `read_ahead` is held, and then it is whole: one, and not another under way."""
    large = binary(bytes(1000 * KIB))

    async def script(peer: Peer) -> None:
        await peer.send(binary(bytes(63 * KIB)), *[large] * 5, Close())
        await echo(peer)

    client = Client(ended=False, room=0)
    limits = ContainerLimits(read_ahead=64 * KIB)
    async with containers(websocket(script), limits) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await wait_all_tasks_blocked()
        assert 1063 * KIB <= client.budget.used <= 1064 * KIB
        client.read()
    assert len(client.sent) == 6
    assert client.budget.high_water <= (64 + 1000 + 128) * KIB


@pytest.mark.parametrize(
    ("begun", "paid"),
    [
        (b"\x82\x7f" + (1000 * KIB).to_bytes(8, "big"), 0),
        (b"\x82\x7f" + (1000 * KIB).to_bytes(8, "big") + bytes(50), 50 + 16 * KIB),
        (b"\x82\x7e\xff\xff" + bytes(999), 1003),
    ],
)
async def test_a_frame_under_way_is_paid_for(begun: bytes, paid: int) -> None:
    """A large one by steps, as it comes; a small one byte by byte."""

    async def script(peer: Peer) -> None:
        peer.transport.try_send([begun])
        await trio.sleep_forever()

    client = Client(ended=False)
    async with containers(websocket(script)) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await wait_all_tasks_blocked()
        assert client.budget.used == paid
        nursery.cancel_scope.cancel()


async def test_a_part_that_the_container_does_not_take_is_paid_for_until_it_does() -> None:
    go = trio.Event()

    async def script(peer: Peer) -> None:
        await go.wait()
        await echo(peer)

    client = Client(part(bytes(1000 * KIB)), part(bytes(1000 * KIB)), ended=False)
    async with containers(websocket(script)) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await wait_all_tasks_blocked()
        assert client.budget.used == 1000 * KIB
        go.set()
        await wait_all_tasks_blocked()
        assert client.budget.used == 0
        client.end()
    assert len(client.sent) == 2


async def test_a_frame_that_is_cut_off_holds_nothing_while_a_slow_client_takes_those_before_it() -> None:
    async def script(peer: Peer) -> None:
        await peer.send(binary(b"first"))
        peer.transport.try_send([b"\x82\x7f" + (1000 * KIB).to_bytes(8, "big")])

    client = Client(ended=False, room=0)
    async with containers(websocket(script)) as found, trio.open_nursery() as nursery:

        async def run() -> None:
            assert (await failure(found, client)).code == "StreamBroken"

        nursery.start_soon(run)
        await wait_all_tasks_blocked()
        assert client.budget.used < KIB
        client.read()
    assert [p.data for p in client.sent] == [b"first"]


@pytest.mark.parametrize("size", [1, 10 * KIB, 70 * KIB])
async def test_a_session_for_whose_frames_there_is_no_memory_ends_at_once_and_says_so(size: int) -> None:
    got: list[Any] = []

    async def script(peer: Peer) -> None:
        peer.machine.send(binary(b"first"))
        for _ in range(100 * KIB // size):
            peer.machine.send(binary(bytes(size)))
        with suppress(TransportLost):
            await peer.flush()
        await read_frames(peer, into=got)

    client = Client(ended=False, room=0)
    client.budget = ByteBudget(60 * KIB)
    async with containers(websocket(script), capacity=40 * KIB) as found:
        words = r"no memory for \d+ bytes: \d+ of 61440 bytes are in use \(limits.total_bytes\)"
        with trio.fail_after(60), pytest.raises(Overloaded, match=words):
            await found.call(client)
        assert found.all_closed
        await wait_all_tasks_blocked()
    assert [event.code for event in got] == [1009 if size > 60 * KIB else 1013], "where it could never have had it"


async def test_a_session_for_whose_parts_there_is_no_memory_ends_too() -> None:
    got: list[Any] = []
    client = Client(part(bytes(50 * KIB)), part(bytes(70 * KIB)), ended=False)
    client.budget = ByteBudget(60 * KIB)
    async with containers(websocket(lambda peer: read_frames(peer, into=got))) as found:
        with pytest.raises(Overloaded, match="no memory for 71680 bytes"):
            await found.call(client)
        await wait_all_tasks_blocked()
    assert [type(event) for event in got] == [Frame, Close]
    assert got[1].code == 1013


async def test_all_that_many_sessions_take_for_slow_clients_is_reserved() -> None:
    """By the memory that is really allocated: frames on both sides of what lands in memory of its own."""
    frames = b"".join(bytes((0x82, 127)) + n.to_bytes(8, "big") + bytes(n) for n in (70 * KIB, 500 * KIB, 900 * KIB)) * 5

    async def serve(transport: Transport) -> None:
        def flood(peer: Peer) -> Any:
            return _send_all(peer.transport, frames)

        await (http((200, [(b"content-length", b"0")], [])) if len(found.dialled) == 1 else websocket(flood))(transport)

    async with containers(serve) as found:
        spec = container_spec("ws://container:8080", name="m", dial=found.dial)
        async with memory_gateway([spec]) as gateway:
            peers = [await gateway.websocket()]
            await wait_all_tasks_blocked()
            budget = gateway.gateway.budget
            gc.collect()
            tracemalloc.start()
            try:
                (before, _), reserved = tracemalloc.get_traced_memory(), budget.used
                peers += [await gateway.websocket() for _ in range(6)]
                await wait_all_tasks_blocked()
                taken, reserved = tracemalloc.get_traced_memory()[0] - before, budget.used - reserved
            finally:
                tracemalloc.stop()
            assert reserved > 6 * 500 * KIB
            # a session also has buffers of its connections and protocol machines, here on the container's side too
            assert taken < reserved + 6 * 400 * KIB
            for peer in peers:
                peer.close()
            await wait_all_tasks_blocked()
            assert budget.used == 0


async def _send_all(transport: Transport, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[transport.try_send([rest[: 16 * KIB]]) :]
        await transport.wait_writable()
    await trio.sleep_forever()


async def test_a_container_that_stops_reading_stops_its_client() -> None:
    go = trio.Event()
    got: list[Any] = []

    async def script(peer: Peer) -> None:
        await go.wait()
        await read_frames(peer, into=got)

    client = Client(*(part(bytes(10 * KIB)) for _ in range(300)))
    async with containers(websocket(script), capacity=64 * KIB) as found, trio.open_nursery() as nursery:
        nursery.start_soon(unanswered, found, client)
        await wait_all_tasks_blocked()
        assert (300 - client.untaken) * 10 <= 64 + 2 * 10 + 1
        go.set()
    assert len(got) == 301


async def test_a_ping_is_answered_while_the_client_takes_nothing() -> None:
    pongs: list[Any] = []

    async def script(peer: Peer) -> None:
        await peer.send(text(b"one"), text(b"two"), Ping(data=b"there?"))
        pongs.append(await peer.next_event())
        await echo(peer)

    client = Client(ended=False, room=0)
    async with containers(websocket(script)) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await wait_all_tasks_blocked()
        assert pongs == [Pong(data=b"there?")]
        assert not client.sent
        nursery.cancel_scope.cancel()


async def test_a_ping_is_answered_while_the_container_reads_no_further_part() -> None:
    """The answer goes ahead of the frames that wait."""
    go = trio.Event()
    got: list[Any] = []

    async def script(peer: Peer) -> None:
        await wait_all_tasks_blocked()
        await peer.send(Ping(data=b"there?"))
        await go.wait()
        await read_frames(peer, into=got)

    client = Client(part(bytes(300 * KIB)), part(bytes(300 * KIB)))
    async with containers(websocket(script), capacity=KIB) as found, trio.open_nursery() as nursery:
        nursery.start_soon(unanswered, found, client)
        await wait_all_tasks_blocked(0.01)
        go.set()
    assert sorted(type(event).__name__ for event in got) == ["Close", "Frame", "Frame", "Pong"]
    assert client.untaken == 0


@pytest.mark.parametrize(("kind", "event"), [("control", Ping()), ("control", Pong()), ("hollow", None)])
async def test_a_container_that_floods_ends_that_session_alone_with_502(
    kind: str, event: Ping | Pong | None, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[Any] = []
    first = True

    async def script(peer: Peer) -> None:
        nonlocal first
        if not first:
            return await echo(peer)
        first = False
        await peer.send(text(b"one"))
        for n in range(600):
            if isinstance(event, Pong):
                peer.machine._push(peer.machine._controlled(event))  # type: ignore[union-attr]
            else:
                peer.machine.send(event or (binary(b"", fin=False) if not n else continuation(b"", fin=False)))
        await read_frames(peer, into=got)

    flooded, other = Client(ended=False), Client(part(b"still here"), ended=False)
    async with containers(websocket(script)) as found, trio.open_nursery() as nursery:
        error = await failure(found, flooded)
        nursery.start_soon(found.call, other)
        await wait_all_tasks_blocked()
        assert [p.data for p in other.sent] == [b"still here"]
        nursery.cancel_scope.cancel()
    assert (error.status, error.message) == (502, f"the container at container:8080 sent too many {kind} frames")
    assert got[-1] == Close(code=1008, reason=f"too many {kind} frames")
    assert flooded.sent[0].data == b"one"
    (line,) = [record for record in caplog.records if record.getMessage() == "flood"]
    assert (line.levelname, line.kind, line.container) == ("WARNING", kind, "container:8080")  # type: ignore[attr-defined]


async def test_pings_within_the_allowance_let_others_have_their_turn() -> None:
    turns = 0

    async def script(peer: Peer) -> None:
        for n in range(5000):
            peer.machine.send(text(b"x") if n % 50 else Ping())
        await peer.send(Close())
        await echo(peer)

    async def bystander() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with containers(websocket(script)) as found, trio.open_nursery() as nursery:
        nursery.start_soon(bystander)
        await found.call(Client(ended=False))
        nursery.cancel_scope.cancel()
    assert turns > 5000 / 64


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("close", [Close(code=1000), Close(code=1000, reason="done"), Close(code=None)])
async def test_a_normal_close_is_a_clean_end_after_every_frame(close: Close) -> None:
    client = Client(ended=False)
    async with containers(websocket(sends(text(b"a"), text(b"b"), close))) as found:
        await found.call(client)
        assert found.all_closed
    assert [p.data for p in client.sent] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("close", "message", "code"),
    [
        (Close(code=1001), "the container closed the session with code 1001", "1001"),
        (Close(code=1008, reason="no such voice"), "no such voice", "1008"),
        (Close(code=1011, reason="out of memory €"), "out of memory €", "1011"),
        (Close(code=4000), "the container closed the session with code 4000", "4000"),
        (Close(code=1014, reason="no upstream"), "no upstream", "1014"),
    ],
)
@pytest.mark.parametrize("ended", [False, True])
async def test_any_other_close_is_a_model_error_after_every_frame(
    close: Close, message: str, code: str, ended: bool
) -> None:
    client = Client(ended=ended)
    async with containers(websocket(sends(text(b"a"), close))) as found:
        error = await failure(found, client)
    assert (error.message, error.code) == (message, code)
    assert [p.data for p in client.sent] == [b"a"]


async def test_a_slow_client_has_every_frame_before_the_error() -> None:
    client = Client(ended=False, room=0)
    outcome: list[ModelError] = []
    async with containers(websocket(sends(*[text(b"x")] * 50, Close(code=1011)))) as found:

        async def run() -> None:
            outcome.append(await failure(found, client))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_all_tasks_blocked()
            client.read(20)
            await wait_all_tasks_blocked()
            assert not outcome
            client.read()
    assert len(client.sent) == 50
    assert outcome[0].code == "1011"


async def leave(peer: Peer) -> None:
    """Ends the connection without a Close."""


async def reset(peer: Peer) -> None:
    """As a container that is killed."""
    peer.transport.reset()  # type: ignore[attr-defined]


async def violate(peer: Peer) -> None:
    peer.transport.try_send([b"\xff\xff\xff\xff"])
    await peer.next_event()


@pytest.mark.parametrize(
    ("end", "words"), [(leave, "without a Close"), (reset, "without a Close"), (violate, "broke the protocol: WebSocket:")]
)
async def test_an_end_without_a_close_is_a_broken_stream(end: Any, words: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.send(text(b"a"))
        await wait_all_tasks_blocked()
        await end(peer)

    client = Client(ended=False)
    async with containers(websocket(script)) as found:
        error = await failure(found, client)
    assert (error.code, words in error.message) == ("StreamBroken", True)
    assert [p.data for p in client.sent] == [b"a"]


@pytest.mark.parametrize("end", [leave, reset])
async def test_a_container_that_dies_while_parts_wait_for_it_ends_the_session(end: Any) -> None:
    async def script(peer: Peer) -> None:
        await wait_all_tasks_blocked()
        await end(peer)

    client = Client(*(part(bytes(10 * KIB)) for _ in range(100)), ended=False)
    async with containers(websocket(script), capacity=KIB) as found:
        error = await failure(found, client)
    assert error.code == "StreamBroken"
    assert client.untaken > 90


async def test_a_close_is_heard_though_parts_are_still_sent() -> None:
    """A container may say why and be gone while the client talks on."""

    async def script(peer: Peer) -> None:
        await peer.send(Close(code=1008, reason="quota"))

    client = Client(*(part(bytes(10 * KIB)) for _ in range(100)), ended=False)
    async with containers(websocket(script), capacity=KIB) as found:
        error = await failure(found, client)
    assert (error.message, error.code) == ("quota", "1008")


@pytest.mark.parametrize("waiting", [0, 100])
async def test_what_the_container_will_never_read_is_not_taken_from_its_client(waiting: int) -> None:
    go = trio.Event()

    async def script(peer: Peer) -> None:
        await peer.send(text(b"a"), Close())
        await go.wait()

    client = Client(*(part(bytes(10 * KIB)) for _ in range(waiting)), ended=False, room=0)
    async with containers(websocket(script), capacity=64) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await wait_all_tasks_blocked()
        go.set()
        await wait_all_tasks_blocked()
        for _ in range(100):
            client.feed(part(bytes(10 * KIB)))
        await wait_all_tasks_blocked()
        assert client.untaken >= waiting + 99
        client.read()
    assert len(client.sent) == 1


async def test_when_the_input_ends_the_container_hears_close_and_its_late_frames_still_come() -> None:
    got: list[Any] = []

    async def script(peer: Peer) -> None:
        got.append(await peer.next_event())
        while not isinstance(event := await peer.next_event(), Close):
            got.append(event)
        got.append(event)
        # late frames: our machine has echoed Close already and sends nothing more, so these are written by hand
        peer.transport.try_send([b"\x01\x01a", b"\x80\x01b", b"\x82\x01c"])
        await peer.flush()

    client = Client(part(b"last"))

    async def serve(transport: Transport) -> None:
        await websocket(script)(transport)

    async with containers(serve) as found:
        await found.call(client)
        assert found.all_closed
    assert got == [binary(b"last"), Close(code=1000)]
    assert told(client) == [(b"a", UTF8, False), (b"b", UTF8, True), (b"c", BINARY, True)]


async def deaf_after_close(peer: Peer, *, frames: int = 0, every: float = 1.0) -> None:
    """Never answers Close; sends late frames now and then, and nothing after them."""
    await peer.next_event()
    for _ in range(frames):
        await trio.sleep(every)
        peer.transport.try_send([b"\x81\x01a"])
    await trio.sleep_forever()


async def test_a_container_that_never_answers_our_close_is_given_up(autojump_clock: MockClock) -> None:
    client = Client()
    limits = ContainerLimits(half_close_timeout=60)
    async with containers(websocket(deaf_after_close), limits) as found:
        error = await failure(found, client)
    assert (error.code, error.status) == ("StreamBroken", 504)
    assert "60 s" in error.message
    assert trio.current_time() == pytest.approx(60)


async def test_late_frames_keep_a_half_closed_session_alive(autojump_clock: MockClock) -> None:
    client = Client()
    async with containers(websocket(lambda peer: deaf_after_close(peer, frames=10, every=50))) as found:
        error = await failure(found, client)
    assert error.code == "StreamBroken"
    assert len(client.sent) == 10
    assert trio.current_time() == pytest.approx(10 * 50 + 60)


async def test_close_can_wait_until_the_container_is_quiet(autojump_clock: MockClock) -> None:
    """For one whose library answers Close by itself, and drops what the container still had to say."""
    got: list[Any] = []

    async def thinking(peer: Peer) -> None:
        got.append(await peer.next_event())
        for _ in range(3):
            await trio.sleep(4)
            await peer.send(text(b"a"))
        await read_frames(peer, into=got)

    client = Client(part(b"last"))
    async with containers(websocket(thinking), quiet=5) as found:
        await found.call(client)
    assert len(client.sent) == 3
    assert got == [binary(b"last"), Close(code=1000)]
    assert trio.current_time() == pytest.approx(3 * 4 + 5)


async def test_a_slow_client_does_not_cost_the_container_its_time_after_close(autojump_clock: MockClock) -> None:
    client = Client(room=0)

    async def script(peer: Peer) -> None:
        await peer.send(text(b"a"))
        await echo(peer)

    async with containers(websocket(script)) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await trio.sleep(1000)
        client.read()
    assert len(client.sent) == 1


async def test_five_pings_unanswered_in_a_row_end_the_session(autojump_clock: MockClock) -> None:
    async def deaf(peer: Peer) -> None:
        await trio.sleep_forever()

    client = Client(ended=False)
    async with containers(websocket(deaf)) as found:
        error = await failure(found, client)
    assert (error.code, error.status) == ("StreamBroken", 504)
    assert "5 Pings" in error.message
    assert trio.current_time() == pytest.approx(360)


async def test_a_container_that_stopped_reading_and_says_nothing_is_found_out(autojump_clock: MockClock) -> None:
    async def deaf(peer: Peer) -> None:
        await trio.sleep_forever()

    client = Client(*(part(bytes(10 * KIB)) for _ in range(10)), ended=False)
    async with containers(websocket(deaf), capacity=KIB) as found:
        error = await failure(found, client)
    assert "5 Pings" in error.message


async def test_pings_that_are_answered_keep_a_quiet_session_for_hours(autojump_clock: MockClock) -> None:
    got: list[Any] = []
    client = Client(ended=False)
    async with containers(websocket(lambda peer: read_frames(peer, into=got))) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await trio.sleep(3600 * 2 + 1)
        client.end()
    assert got == [Ping()] * 120 + [Close(code=1000)]


async def test_four_pings_unanswered_and_one_byte_start_the_count_again(autojump_clock: MockClock) -> None:
    async def nearly_deaf(peer: Peer) -> None:
        for _ in range(5):
            await trio.sleep(250)
            peer.transport.try_send([b"\x8a\x00"])
        await trio.sleep_forever()

    async with containers(websocket(nearly_deaf)) as found:
        await failure(found, Client(ended=False))
    assert trio.current_time() > 5 * 250 + 5 * 60


async def test_a_reader_that_a_slow_client_stopped_counts_no_pings(autojump_clock: MockClock) -> None:
    async def flood(peer: Peer) -> None:
        for _ in range(100):
            await peer.send(binary(bytes(10 * KIB)))
        await peer.send(Close())
        await echo(peer)

    client = Client(ended=False, room=0)
    async with containers(websocket(flood)) as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.call, client)
        await trio.sleep(3600)
        client.read()
    assert len(client.sent) == 100


async def test_pings_do_not_pile_up_behind_parts_that_wait(autojump_clock: MockClock) -> None:
    """Container and client both stand still for hours, each with something to read."""
    got: list[Any] = []

    async def still(peer: Peer) -> None:
        await peer.send(binary(bytes(KIB)), binary(bytes(KIB)))
        await trio.sleep(3600 * 10)
        await read_frames(peer, into=got)

    client = Client(part(bytes(100 * KIB)), part(bytes(100 * KIB)), room=0)
    limits = ContainerLimits(read_ahead=KIB)
    async with containers(websocket(still), limits, capacity=3 * KIB) as found, trio.open_nursery() as nursery:
        nursery.start_soon(unanswered, found, client)
        await trio.sleep(3600 * 10 - 1)
        client.read()
    assert [type(event) for event in got if not isinstance(event, Ping)] == [Frame, Frame, Close]
    assert got.count(Ping()) <= 1


async def test_a_cancelled_session_says_1001_and_closes_at_once() -> None:
    got: list[Any] = []
    async with containers(websocket(lambda peer: read_frames(peer, into=got))) as found:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.call, Client(part(b"a"), ended=False))
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert found.all_closed
        await wait_all_tasks_blocked()
    assert got == [binary(b"a"), Close(code=1001)]


class Failing(Client):
    """A wire that breaks in mid-stream, with what a dialect raises."""

    async def receive(self) -> Any:
        await trio.lowlevel.checkpoint()
        raise BadRequest("bad event stream")


async def test_what_the_session_raises_comes_out_as_it_is() -> None:
    async with containers(websocket(echo)) as found:
        with pytest.raises(BadRequest, match="bad event stream"):
            await found.call(Failing())
        assert found.all_closed


# -- cancelled anywhere ----------------------------------------------------------------------------------------------


class CancelAt(trio.abc.Instrument):
    """Cancels a scope before the n-th step of any task, counted from when the scope was given."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.scope: trio.CancelScope | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.scope is not None:
            self.left -= 1
            if self.left == 0:
                self.scope.cancel()


async def invoke_streamed(client: Client, instrument: CancelAt) -> bool:
    pieces = [b"%d" % i * 300 for i in range(6)]
    async with containers(http((200, [], pieces)), capacity=500) as found:
        with trio.CancelScope() as instrument.scope:
            await found.call(client, parameters={"unary": True})
        instrument.scope = None
        assert found.all_closed
        data = b"".join(p.data for p in client.sent)
        assert b"".join(pieces).startswith(data)
        return data == b"".join(pieces)


async def stream_echoed(client: Client, instrument: CancelAt) -> bool:
    async with containers(websocket(echo), ContainerLimits(read_ahead=500), capacity=300) as found:
        with trio.CancelScope() as instrument.scope:
            await found.call(client)
        instrument.scope = None
        assert found.all_closed
        data = [p.data for p in client.sent]
        assert data == [b"%d" % i * 200 for i in range(len(data))]
        return len(data) == 8


async def stream_large(client: Client, instrument: CancelAt) -> bool:
    large = binary(bytes(70_000))
    async with containers(websocket(sends(large, large, Close())), capacity=20_000) as found:
        with trio.CancelScope() as instrument.scope:
            await found.call(client)
        instrument.scope = None
        assert found.all_closed
        assert all(p.data == large.data for p in client.sent)
        return len(client.sent) == 2


@pytest.mark.parametrize("scenario", [stream_echoed, stream_large, invoke_streamed])
def test_cancelled_at_any_step_messages_stay_a_prefix_and_nothing_stays_open(scenario: Any) -> None:
    at, whole = 0, False
    while not whole:
        at += 1
        instrument = CancelAt(at)
        client = Client(*(part(b"%d" % i * 200) for i in range(8)))
        whole = trio.run(scenario, client, instrument, instruments=[instrument], clock=MockClock(autojump_threshold=0))
        whole = whole and instrument.left > 0
    assert at > 10  # fewer than it takes in any order of the tasks
