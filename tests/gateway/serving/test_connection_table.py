"""Limits of connections: near the limit, idle ones are closed; at the limit, a new one is refused in its wire's form."""

from __future__ import annotations

import ssl
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway import client
from gateway.config import AccessConfig, Config, LimitsConfig, ListenConfig
from gateway.core.server import Server
from gateway.errors import Closing
from gateway.gateway import Gateway
from gateway.net.transport import MemoryTransport, memory_pair
from gateway.serving import lobby
from gateway.serving.connection_table import ConnectionTable
from gateway.testing.stories.talk import Leave
from protocols.events import ConnectionEnd, End
from protocols.http2.frames import PREFACE, Code
from tests.gateway.promises import House, KiB, Line, Probe, Tap, at_once, limits, raw, serving, silent

REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable"
TLS: Any = object()
"""Stands for a context that nobody comes to use."""


def arrive(house: House, tls: ssl.SSLContext | None = None) -> MemoryTransport:
    """A connection that a listener has accepted, by its client's end."""
    ours, theirs = memory_pair(64 * KiB)
    edges = house.memory._edges
    house.gateway.acceptor.accepted(theirs if edges is None else edges.watchable(theirs), tls)  # type: ignore[arg-type]
    return ours


async def asked(house: House, transport: str) -> Line:
    """A connection that has had one exchange, and stays open."""
    tap = Tap(arrive(house))
    line = Line(client.http1(tap) if transport == "http1" else client.http2(tap), tap)
    house.lines.append(line)
    await line.send(raw(1, b"GET", "/v2/health/live"), End(stream=1))
    assert (await line.peer.read_answer(1))[0] == 200
    await house.still()
    return line


async def read(transport: MemoryTransport, within: float = 10.0) -> bytes:
    """All that comes until the end of the stream."""
    said, buffer = b"", memoryview(bytearray(64 * KiB))
    with trio.fail_after(within):
        while (n := transport.try_receive_into(buffer)) != 0:
            if n is None:
                await transport.wait_readable()
            else:
                said += bytes(buffer[:n])
    return said


def closed(transport: MemoryTransport) -> bool:
    return transport.hung_up()


def ended(house: House) -> dict[str, int]:
    """How many connections the server has ended, and why."""
    return {why.value: n for why, n in house.gateway.server.endings_of_connections.items() if n}


# -- the idle go ---------------------------------------------------------------------------------------------------------


async def test_from_ninety_percent_on_each_arrival_closes_an_idle_one_in_its_wires_words(autojump_clock: MockClock) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=limits(connections=10)) as house:
        said_nothing = arrive(house)
        await trio.sleep(1)
        begun = arrive(house)  # which has sent a part of its first request
        begun.try_send([REQUEST[:20]])
        await trio.sleep(1)
        lines = []
        for transport in ("http1", "http2", "http1"):
            lines.append(await asked(house, transport))
            await trio.sleep(1)
        busy = [await house.call("json-http1", line=Line(client.http1(tap := Tap(arrive(house))), tap)) for _ in range(4)]
        await trio.sleep(2)
        assert house.gateway.acceptor.table.taken == 9
        order = [said_nothing, begun, *(line.transport.below for line in lines)]
        for n in range(5):
            assert [closed(transport) for transport in order] == [True] * n + [False] * (5 - n)
            arrive(house).try_send([b"G"])
            await house.still()
            assert house.gateway.acceptor.table.taken == 9
        assert all(map(closed, order))
        assert ended(house) == {"evicted": 5}
        assert await read(begun) == b""
        await lines[1].over()
        assert [goaway.code for goaway in lines[1].goaways] == [Code.NO_ERROR]
        assert house.endings == {"complete": 3}  # nobody who had an exchange
        for call in busy:
            await call.leave(Leave.CLOSE)
        house.gateway.acceptor.disconnect()


async def test_nobody_goes_within_a_second_nor_while_it_has_an_exchange(autojump_clock: MockClock) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=limits(connections=10)) as house:
        line = await asked(house, "http1")
        await trio.sleep(0.5)
        young = [arrive(house) for _ in range(8)]
        await house.still()
        arrive(house)
        await house.still()
        assert not any(map(closed, young))
        assert ended(house) == {}
        await trio.sleep(0.7)
        arrive(house)
        await house.still()
        assert [closed(one) for one in (line.transport.below, *young)].count(True) == 1  # the one that is old enough
        assert closed(line.transport.below)
        house.gateway.acceptor.disconnect()


async def test_one_arrival_closes_thirty_two_at_most_and_all_are_looked_at_now_and_then(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    idle = ConnectionTable._idle

    def counted(table: ConnectionTable, now: float) -> Any:
        nonlocal looks
        looks += 1
        return idle(table, now)

    monkeypatch.setattr(ConnectionTable, "_idle", counted)
    async with serving(Probe(silent).spec("json-http1"), config=limits(connections=200)) as house:
        arrived = [arrive(house) for _ in range(179)]
        await trio.sleep(2)
        table = house.gateway.acceptor.table
        table._wary = 100  # as if many had been idle, and busy, before
        arrived.append(arrive(house))
        await house.still()
        assert (sum(map(closed, arrived)), table.taken, looks) == (32, 148, 1)
        for _ in range(100):
            arrive(house)
        await house.still()
        assert looks == 1
        assert table.evicted == set()
        house.gateway.acceptor.disconnect()


async def test_who_has_gone_since_the_last_look_makes_no_room_twice(autojump_clock: MockClock) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=limits(connections=10)) as house:
        lines = []
        for _ in range(9):
            lines.append(await asked(house, "http1"))
            await trio.sleep(0.1)
        await trio.sleep(1)
        arrive(house)  # all are looked at, and the first of them goes
        await house.still()
        lines[1].reset()  # the next one leaves by itself
        await house.still()
        last = [arrive(house), arrive(house)]
        await house.still()
        assert [closed(line.transport.below) for line in lines] == [True] * 3 + [False] * 6
        assert ended(house) == {"evicted": 2}
        assert not any(map(closed, last))
        house.gateway.acceptor.disconnect()


# -- nobody is idle ------------------------------------------------------------------------------------------------------


async def full(house: House) -> list[Any]:
    """Every place is taken by one that has an exchange."""
    calls = []
    while house.gateway.acceptor.table.taken < house.gateway.limits.connections:
        calls.append(await house.call("json-http1", line=Line(client.http1(tap := Tap(arrive(house))), tap)))
        await house.still()
    return calls


async def test_beyond_the_limit_each_wire_is_told_to_come_later(autojump_clock: MockClock) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=limits(connections=4)) as house:
        calls = await full(house)
        with at_once():
            http1 = arrive(house)
            http1.try_send([REQUEST[:30]])
            await house.still()
            assert not closed(http1)
            http1.try_send([REQUEST[30:]])
            await house.still()
            http1.send_eof()
            said = await read(http1)
            assert said.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n")
            assert said.endswith(b'{"error":"4 connections are open (limits.connections); try again later"}')

            tap = Tap(arrive(house))
            http2 = Line(client.http2(tap), tap)
            await http2.send(raw(1, b"GET", "/v2/health/live"), End(stream=1))
            await http2.over()
            (goaway,) = http2.goaways
            assert (goaway.code, goaway.last_stream) == (Code.ENHANCE_YOUR_CALM, 0)
            tap.close()

            assert await read(arrive(house, TLS)) == b""
            on_the_wrong_port = arrive(house)
            on_the_wrong_port.try_send([b"\x16\x03\x01\x02\x00\x01"])
            on_the_wrong_port.send_eof()
            assert await read(on_the_wrong_port) == b""
        began = trio.current_time()
        assert (await read(arrive(house))).startswith(b"HTTP/1.1 503 ")  # though it has said nothing
        assert trio.current_time() - began == lobby.PATIENCE
        begun = arrive(house)
        begun.try_send([PREFACE[:10]])
        assert (await read(begun)).startswith(b"HTTP/1.1 503 ")
        assert ended(house) == {"refused-at-limit": 6}
        assert not house.gateway.acceptor.lobby.guests
        for call in calls:
            await call.leave(Leave.CLOSE)


async def test_beyond_the_limit_an_allowed_page_can_read_that_it_may_come_later(autojump_clock: MockClock) -> None:
    config = replace(limits(connections=2), access=AccessConfig(origins=("https://app.example",)))
    async with serving(Probe(silent).spec("json-http1"), config=config) as house:
        calls = await full(house)

        async def said(method: bytes, *fields: bytes) -> tuple[bytes, bytes]:
            guest = arrive(house)
            guest.try_send([b"\r\n".join((method + b" /v1/completions HTTP/1.1", b"Host: a", *fields, b"", b""))])
            await house.still()
            guest.send_eof()
            line, _, rest = (await read(guest)).partition(b"\r\n")
            return line, rest

        app, evil = b"Origin: https://app.example", b"Origin: https://evil.example"
        preflight = (b"Access-Control-Request-Method: POST", b"Access-Control-Request-Headers: x-a")
        line, rest = await said(b"POST", app)
        assert (line, b"access-control-allow-origin: https://app.example\r\n" in rest) == (UNAVAILABLE, True)
        line, rest = await said(b"OPTIONS", app, *preflight)  # else the browser would not send the request itself
        assert line == b"HTTP/1.1 204 No Content"
        assert b"access-control-allow-headers: x-a\r\n" in rest
        for method, fields in ((b"POST", (evil,)), (b"OPTIONS", (evil, *preflight)), (b"POST", ())):
            line, rest = await said(method, *fields)
            assert (line, b"access-control" in rest) == (UNAVAILABLE, False)
        for call in calls:
            await call.leave(Leave.CLOSE)


async def test_the_lobby_is_small_and_whoever_finds_it_full_is_told_at_once(autojump_clock: MockClock) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=limits(connections=2)) as house:
        calls = await full(house)
        guests = [arrive(house) for _ in range(lobby.GUESTS)]
        await house.still()
        assert len(house.gateway.acceptor.lobby.guests) == lobby.GUESTS
        with at_once():
            for _ in range(200):
                assert (await read(arrive(house))).startswith(b"HTTP/1.1 503 ")
            assert not any(map(closed, guests))
        for guest in guests[:10]:
            guest.close()  # a guest that leaves makes room
        await house.still()
        assert len(house.gateway.acceptor.lobby.guests) == lobby.GUESTS - 10
        await trio.sleep(1.5)
        assert all(map(closed, guests))
        for call in calls:
            await call.leave(Leave.CLOSE)


async def test_a_drain_sends_the_guests_away(autojump_clock: MockClock) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=limits(connections=2)) as house:
        calls = await full(house)
        guest = arrive(house)
        await house.still()
        house.gateway.begin_drain(0)
        with at_once():
            await house.still()
            assert closed(guest)
        for call in calls:
            await call.leave(Leave.CLOSE)
        await house.gateway.stopped()


async def test_a_refused_one_costs_no_place_and_the_first_that_is_free_is_the_next_ones(autojump_clock: MockClock) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=limits(connections=2)) as house:
        calls = await full(house)
        for _ in range(10):
            arrive(house)
        await calls.pop().leave(Leave.CLOSE)
        await house.still()
        assert len(house.gateway.acceptor.lobby.guests) == 10
        await asked(house, "http2")
        await calls.pop().leave(Leave.CLOSE)
        await trio.sleep(lobby.PATIENCE)


# -- the rest of the bounds ----------------------------------------------------------------------------------------------


def nobody(*_: Any) -> None:
    raise AssertionError("no exchange")


@pytest.mark.parametrize(
    ("descriptors", "most", "spare", "setting"),
    [
        (None, 100, 64, "limits.connections"),
        (1000, 100, 64, "limits.connections"),
        (90, 26, 32, "limits.descriptors_reserved"),
    ],
)
async def test_where_descriptors_are_fewer_they_are_the_bound_and_their_reserve_pays_for_the_lobby(
    descriptors: int | None, most: int, spare: int, setting: str
) -> None:
    table = ConnectionTable(Server(limits(connections=100), nobody, nobody), set, descriptors)
    table.starting = most - 1
    assert table.refusal("127.0.0.1:1") is None
    table.starting = most
    said = table.refusal("127.0.0.1:1")
    assert said is not None
    assert said.startswith(f"{most} connections are open (")
    assert setting in said
    assert table.spare == spare


def test_connections_of_one_address_may_be_bounded() -> None:
    table = ConnectionTable(Server(limits(per_peer=2), nobody, nobody), set)
    over = [table.counted(peer) for peer in ("10.0.0.1:1", "10.0.0.1:2", "[::1]:1", "[::1]:2")]
    assert all(over)
    assert table.refusal("10.0.0.1:3") == "2 connections of this address are open (limits.per_peer)"
    assert table.refusal("[::1]:3") is not None
    assert table.refusal("10.0.0.2:1") is None
    assert over[0] is not None
    over[0]()
    assert table.refusal("10.0.0.1:3") is None
    for _ in range(5):  # a peer without an address is never counted
        assert table.counted("unix:/run/x") is None
        assert table.refusal("unix:/run/x") is None
    assert ConnectionTable(Server(Config(), nobody, nobody), set).counted("10.0.0.1:1") is None


async def test_an_address_with_all_its_connections_gets_another_when_one_is_closed() -> None:
    config = Config(listen=ListenConfig(port=0), limits=LimitsConfig(per_peer=2))
    gateway = Gateway(config, chance=lambda: 0.0)

    async def ask(stack: AsyncExitStack) -> client.Peer | None:
        peer = client.http1(await stack.enter_async_context(client.connect("127.0.0.1", gateway.port)))
        await peer.send(raw(1, b"GET", "/v2/health/live"), End(stream=1))
        status, headers, _ = await peer.read_answer(1)
        if status == 200:
            return peer
        assert (status, headers[b"retry-after"]) == (503, b"1")
        assert isinstance(await peer.next_event(), ConnectionEnd)
        return None

    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        with trio.fail_after(30):
            async with AsyncExitStack() as stack:
                first = await ask(stack)
                assert first
                assert await ask(stack)
                assert await ask(stack) is None
                first.close()
                while await ask(stack) is None:
                    await trio.lowlevel.checkpoint()
            assert gateway.server.endings_of_connections[Closing.REFUSED] >= 1
        nursery.cancel_scope.cancel()
