"""A connection whose peer floods it, or leaves a message unfinished: its last answer, its log line and the counts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio

from gateway.config import Config, HTTP2Config, LimitsConfig, WebSocketConfig
from gateway.config.tree import HTTP2FloodsConfig, WebSocketFloodsConfig
from gateway.errors import Closing
from gateway.wires.floods import allowances_of
from models.session import Session
from protocols.floods import NEVER
from protocols.http2.floods import HTTP2_FLOODS
from protocols.http2.frames import Kind
from protocols.websocket.floods import WEBSOCKET_FLOODS
from tests.gateway.promises import House, Probe, Tap, serving, silent
from tests.protocols.http2.http2_helpers import END_STREAM, ByHand, data, frame, settings

PING = frame(Kind.PING, 0, 0, bytes(8))
PATH = b"/invocations-bidirectional-stream"
ASKED = ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"localhost"), (b":path", b"/endpoints/probe" + PATH))
NOBODY = (*ASKED[:3], (b":path", b"/none"))
CALM = 11


class RawClient:
    """Bytes by hand on a connection of a house, sent as far as it takes them."""

    def __init__(self, house: House, *, ready: bool = True) -> None:
        self.house, self.transport = house, Tap(house.memory.connect())
        self.hand = ByHand(ready=False)
        self.ended = False
        self.peer: Any = self.transport
        house.lines.append(self)  # type: ignore[arg-type]
        self._began = b"".join(ByHand.OPENING) if ready else b""

    async def say(self, *written: bytes) -> None:
        """Sends; what comes meanwhile is read. Returns where everything stands still, or the server has ended it."""
        due = memoryview(self._began + b"".join(written))
        self._began = b""
        while len(due) and not self.ended:
            try:
                n = self.transport.try_send([due[:20_000]])
            except Exception:
                self.ended = True
                break
            due = due[n:]
            before = len(self.transport.read)
            await self.house.still()
            self.hear()
            if not n and len(self.transport.read) == before:
                break
        await self.house.still()
        self.hear()

    def hear(self) -> None:
        buffer = memoryview(bytearray(65_536))
        try:
            while (n := self.transport.try_receive_into(buffer)) is not None:
                if not n:
                    self.ended = True
                    break
        except Exception:
            self.ended = True

    def goaway(self) -> tuple[int, int, bytes]:
        """The highest stream, the code and the debug data of the last frame, which is a GOAWAY."""
        heard = bytes(self.transport.read)
        at = 0
        last = (-1, b"")
        while at < len(heard):
            n = int.from_bytes(heard[at : at + 3])
            last = heard[at + 3], heard[at + 9 : at + 9 + n]
            at += 9 + n
        assert at == len(heard)
        kind, payload = last
        assert kind == Kind.GOAWAY
        return int.from_bytes(payload[:4]), int.from_bytes(payload[4:8]), payload[8:]

    def head(self, number: int, headers: Any = ASKED, *, end: bool = True) -> bytes:
        return self.hand.head(2 * number + 1, headers, END_STREAM if end else 0)


def resets(client: RawClient, n: int) -> bytes:
    return client.head(n) + frame(Kind.RST_STREAM, 0, 2 * n + 1, (8).to_bytes(4))


def broken_heads(client: RawClient, n: int) -> bytes:
    return client.head(n, (*ASKED, (b"Upper", b"x")))


def refused_heads(client: RawClient, n: int) -> bytes:
    return client.head(n, (*ASKED, *((b"x", b"y"),) * 101))


def empties(client: RawClient, n: int) -> bytes:
    return client.head(n, end=False) + data(2 * n + 1, b"") * 5


def empty_row(client: RawClient, n: int) -> bytes:
    return (client.head(0, end=False) if not n else b"") + data(1, b"")


FLOODS: dict[str, tuple[str, int, Callable[[RawClient, int], bytes]]] = {
    "rapid reset": ("reset", 600, resets),
    "streams that the client breaks": ("reset", 600, broken_heads),
    "heads refused as they come": ("reset", 600, refused_heads),
    "streams beyond the limit": ("refused", 3000, lambda client, n: client.head(n, end=False)),
    "ping": ("ping", 600, lambda client, n: PING),
    "settings": ("settings", 600, lambda client, n: settings({4: 65_535 + n % 2})),
    "empty data": ("empty", 200, empties),
    "empty data in a row": ("empty", 20, empty_row),
    "window updates": ("window", 1500, lambda client, n: frame(Kind.WINDOW_UPDATE, 0, 0, (1).to_bytes(4))),
    "priority": ("priority", 1500, lambda client, n: frame(Kind.PRIORITY, 0, 1, bytes(5))),
    "extensions": ("priority", 1500, lambda client, n: frame(0x10, 0, 0, bytes(4))),
    "acknowledgements of nothing": ("priority", 1500, lambda client, n: frame(Kind.PING, 1, 0, bytes(8))),
    "waste": ("waste", 600, lambda client, n: frame(0xBE, 0, 0, bytes(16_000))),
}


def flood_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage() == "flood"]


@pytest.mark.parametrize("what", FLOODS)
async def test_a_flood_is_told_to_calm_down_and_its_connection_ends(
    what: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kind, n, make = FLOODS[what]
    config = Config(http2=HTTP2Config(streams=100 if kind == "refused" else 1000))
    async with serving(Probe(silent).spec("bidi", capacity=5000), config=config) as house:
        neighbour = house.line("http2")
        await neighbour.ping()
        client = RawClient(house)
        began = trio.current_time()
        for at in range(0, n, 100):
            await client.say(b"".join(make(client, at + i) for i in range(min(100, n - at))))
        await trio.sleep(1.1)  # the kernel's part: the server swallows nothing more by then
        client.hear()
        assert client.ended
        _, code, said = client.goaway()
        assert (code, said) == (CALM, f"too many {kind} frames (http2.floods)".encode())
        server = house.gateway.server
        assert server.floods == {("http/2", kind): 1}
        assert server.endings_of_connections[Closing.FLOOD] == 1
        (line,) = flood_lines(caplog)
        assert (line.levelname, line.kind, line.wire) == ("WARNING", kind, "http/2")  # type: ignore[attr-defined]
        endings = house.endings
        assert sum(endings.values()) == endings.get("refused", 0) + endings.get("cancelled-by-client", 0)
        assert line.exchanges == endings.get("refused", 0)  # type: ignore[attr-defined]
        assert metrics(house)[f"everywire_floods_total {' '.join(sorted(('http/2', kind)))}"] == 1
        assert metrics(house)["everywire_ended_connections_total flood"] == 1
        assert trio.current_time() - began < 5
        await neighbour.ping()
        house.check_ledger()


def metrics(house: House) -> dict[str, Any]:
    """The samples, by name and labels."""
    return {
        f"{sample.name} {' '.join(sorted(sample.labels.values()))}": sample.value
        for family in house.gateway.registry.collect()
        for sample in family.samples
    }


async def test_our_own_frames_that_a_window_cuts_short_are_a_flood(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def talking(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.say(session, 5)
        await trio.sleep_forever()

    async with serving(Probe(talking).spec("bidi")) as house:
        client = RawClient(house)
        await client.say(settings({4: 0}), client.head(0))
        for _ in range(1100):
            await client.say(frame(Kind.WINDOW_UPDATE, 0, 1, (1).to_bytes(4)))
            if client.ended:
                break
        await trio.sleep(1.1)
        client.hear()
        assert house.gateway.server.floods == {("http/2", "cramped"): 1}


async def test_goaway_leaves_although_its_peer_reads_nothing_and_what_is_not_taken_is_dropped(autojump_clock: Any) -> None:
    """A peer that does not read is ended all the same, within a tick."""
    async with serving(Probe(silent).spec("bidi"), capacity=100) as house:
        client = RawClient(house)
        whole = b"".join(ByHand.OPENING) + PING * 1000
        for _ in range(300):
            sent = client.transport.try_send([whole])
            whole = whole[sent:]
            await house.still()
        assert house.gateway.server.floods == {("http/2", "ping"): 1}
        await trio.sleep(1.2)
        assert not house.gateway.server.connections


async def test_a_flood_after_its_end_is_not_swallowed_for_long(autojump_clock: Any) -> None:
    """Not the 64 MiB that an upload after its answer is worth: 256 KiB, or a tenth of a second."""
    async with serving(Probe(silent).spec("bidi")) as house:
        client = RawClient(house)
        await client.say(PING * 600)
        assert house.gateway.server.floods
        sent = 0
        for _ in range(100):
            try:
                sent += client.transport.try_send([bytes(20_000)])
            except Exception:
                break
            await house.still()
        assert sent <= 256 * 1024 + 2 * 64 * 1024
        assert not house.gateway.server.connections


async def test_who_turns_it_off_is_never_told(autojump_clock: Any) -> None:
    config = Config(http2=HTTP2Config(floods=HTTP2FloodsConfig(enabled=False)))
    async with serving(Probe(silent).spec("bidi"), config=config) as house:
        client = RawClient(house)
        await client.say(PING * 5000)
        assert not client.ended
        assert client.transport.read.count(frame(Kind.PING, 1, 0, bytes(8))) == 5000


def test_settings_are_those_of_the_tables() -> None:
    for table, section in ((HTTP2_FLOODS, HTTP2FloodsConfig()), (WEBSOCKET_FLOODS, WebSocketFloodsConfig())):
        made: Any = allowances_of(table, section, 2000)
        assert [(row.kind, row.burst, row.rate) for row in made] == [(row.kind, row.burst, row.rate) for row in table]
        assert {f"{row.kind}_{what}" for row in table for what in ("burst", "rate")} | {"enabled"} == {
            *section.__dataclass_fields__
        }
        disabled: Any = allowances_of(table, replace(section, enabled=False))
        assert not [*disabled]
        assert disabled.due == NEVER
    (refused,) = [row for row in allowances_of(HTTP2_FLOODS, HTTP2FloodsConfig(), 14) if row.kind == "refused"]
    assert refused.burst == 14
    assert NEVER > 2**60


# -- peers that do not flood


async def test_as_many_complete_calls_as_cancels_are_never_a_flood(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi", capacity=5000), config=Config()) as house:
        client = RawClient(house)
        await client.say(settings({4: 2**31 - 1}), frame(Kind.WINDOW_UPDATE, 0, 0, (2**30).to_bytes(4)))
        health = (*ASKED[:3], (b":path", b"/ping"))
        get = ((b":method", b"GET"), *health[1:])
        for n in range(800):
            await client.say(client.head(2 * n, get))
            await client.say(resets(client, 2 * n + 1))
        assert not client.ended
        assert house.gateway.server.floods == {}
        assert house.endings["complete"] == 800


# -- times


async def ends(client: RawClient, *, within: float, drip: bytes = b"", every: float = 1.0) -> float:
    """The seconds until the server ends the connection, while a byte of `drip` comes each `every` seconds."""
    began = trio.current_time()
    while not client.ended and trio.current_time() < began + within:
        await trio.sleep(every)
        if drip:
            await client.say(drip[:1])
            drip = drip[1:]
        client.hear()
    assert client.ended
    return trio.current_time() - began


@pytest.mark.parametrize(
    ("what", "written", "drip"),
    [
        ("the first SETTINGS", b"".join(ByHand.OPENING)[:24], b""),
        ("the first SETTINGS", b"".join(ByHand.OPENING)[:24], settings() * 3),
        ("the head of a frame", b"".join(ByHand.OPENING) + PING[:3], b""),
        ("the head of a frame", b"".join(ByHand.OPENING) + PING[:1], bytes(3)),
    ],
)
async def test_what_has_begun_must_come_in_time(what: str, written: bytes, drip: bytes, autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi"), config=Config(limits=LimitsConfig(head_timeout=8))) as house:
        client = RawClient(house, ready=False)
        await client.say(written)
        seconds = await ends(client, within=30, drip=drip, every=4.0)
        assert 8 <= seconds <= 12
        assert client.goaway()[1:] == (CALM, f"{what} took too long (limits.head_timeout)".encode())
        assert house.gateway.server.endings_of_connections[Closing.HEAD_TIMEOUT] == 1


async def test_a_header_block_must_be_whole_in_time_however_its_frames_drip(autojump_clock: Any) -> None:
    config = Config(limits=LimitsConfig(head_timeout=8), http2=HTTP2Config(continuations=100))
    async with serving(Probe(silent).spec("bidi"), config=config) as house:
        client = RawClient(house)
        block = client.hand.block(ASKED)
        await client.say(frame(Kind.HEADERS, END_STREAM, 1, block[:1]))
        began = trio.current_time()
        for n in range(1, 60):
            await trio.sleep(0.5)
            await client.say(frame(Kind.CONTINUATION, 0, 1, block[n : n + 1]))
            if client.ended:
                break
        assert 8 <= trio.current_time() - began <= 11
        assert client.goaway()[1:] == (CALM, b"a header block took too long (limits.head_timeout)")


@pytest.mark.parametrize(("every", "setting"), [(100.0, "limits.body_silence"), (5.0, "limits.body_rate")])
async def test_a_frame_must_come_like_a_body(every: float, setting: str, autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi")) as house:
        client = RawClient(house)
        await client.say(client.head(0, end=False), data(1, bytes(1000))[:20])
        await ends(client, within=130, drip=bytes(100), every=every)
        assert client.goaway()[1] == CALM
        assert setting.encode() in client.goaway()[2]
        assert house.gateway.server.endings_of_connections[Closing.STALLED] == 1
        assert house.endings == {"refused": 1}


async def test_a_body_that_comes_slowly_in_whole_frames_is_nobodys_business(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi")) as house:
        client = RawClient(house)
        await client.say(client.head(0, end=False))
        for _ in range(30):
            await trio.sleep(20)
            await client.say(data(1, b"x"))
        assert not client.ended
        client.transport.close()
        await house.still()


async def idles(house: House, every: float, written: bytes) -> float:
    """The seconds that a connection without requests lives, while these bytes come each `every` seconds."""
    client = RawClient(house)
    await client.say()
    began = trio.current_time()
    while not client.ended and trio.current_time() < began + 900:
        await trio.sleep(every)
        await client.say(written)
        client.hear()
    assert client.goaway()[1] == 0
    assert house.gateway.server.endings_of_connections[Closing.IDLE] == 1
    assert house.gateway.server.floods == {}
    return trio.current_time() - began


async def test_bytes_keep_no_connection(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi")) as house:
        assert 75 <= await idles(house, 5, frame(Kind.PRIORITY, 0, 1, bytes(5))) <= 85


async def test_half_a_ping_keeps_none_and_whole_ones_do_for_a_while(autojump_clock: Any) -> None:
    config = Config(http2=HTTP2Config(ping_life=300))
    async with serving(Probe(silent).spec("bidi"), config=config) as house:
        assert 300 <= await idles(house, 20, PING) <= 325
    async with serving(Probe(silent).spec("bidi"), config=Config(http2=HTTP2Config(ping_life=0))) as house:
        assert 75 <= await idles(house, 20, PING) <= 100


# -- WebSockets


def control(n: int) -> bytes:
    return bytes((0x89, 0x80 | 4)) + bytes(4) + n.to_bytes(4)


def hollow(first: bool, size: int = 0) -> bytes:
    return bytes((0x02 if first else 0x00, 0x80 | size)) + bytes(4 + size)


HANDSHAKE = (
    b"GET /models/probe/invocations-bidirectional-stream HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


async def socket(house: House) -> RawClient:
    client = RawClient(house, ready=False)
    await client.say(HANDSHAKE)
    assert client.transport.read.startswith(b"HTTP/1.1 101")
    client.transport.read.clear()
    return client


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("control", [control(n) for n in range(400)]),
        ("control", [b"\x8a\x80" + bytes(4)] * 400),
        ("hollow", [hollow(not n) for n in range(600)]),
        ("hollow", [hollow(not n, 3) for n in range(1500)]),
    ],
    ids=["ping", "pong", "hollow", "tiny"],
)
async def test_a_flood_on_a_websocket_is_closed_with_1008(
    kind: str, written: list[bytes], autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Probe(silent).spec("websocket")) as house:
        client = await socket(house)
        for at in range(0, len(written), 100):
            await client.say(*written[at : at + 100])
        await trio.sleep(1.1)
        client.hear()
        assert client.ended
        reason = f"too many {kind} frames (websocket.floods)".encode()
        assert client.transport.read.endswith(bytes((0x88, 2 + len(reason))) + (1008).to_bytes(2) + reason)
        assert house.gateway.server.floods == {("websocket", kind): 1}
        assert house.endings == {"refused": 1}
        assert len(flood_lines(caplog)) == 1


async def test_each_ping_within_the_allowance_has_its_pong_and_earns_its_place_by_frames(autojump_clock: Any) -> None:
    async def echo(probe: Probe, session: Session[Any, Any]) -> None:
        async for part in session:
            await session.send(part)

    async with serving(Probe(echo).spec("websocket")) as house:
        client = await socket(house)
        message = b"\x82\x81" + bytes(4) + b"x"
        for n in range(300):
            await client.say(*[message] * 8, control(n) if n % 2 else b"")
        assert not client.ended
        assert [client.transport.read.count(b"\x8a\x04" + n.to_bytes(4)) for n in range(1, 300, 2)] == [1] * 150
        client.transport.close()
        await house.still()


async def test_a_peer_that_pings_and_does_not_read_is_not_read(autojump_clock: Any) -> None:
    config = Config(websocket=WebSocketConfig(floods=WebSocketFloodsConfig(enabled=False)))
    async with serving(Probe(silent).spec("websocket"), config=config, capacity=1000) as house:
        client = await socket(house)
        sent, due = 0, b"".join(control(n) for n in range(20_000))
        for _ in range(2000):
            n = client.transport.try_send([due[sent : sent + 20_000]])
            sent += n
            await house.still()
            if not n:
                break
        assert sent < len(due) / 2
        (connection,) = house.gateway.server.connections
        assert connection.reading_paused  # type: ignore[attr-defined]
        await client.say(due[sent:])
        assert client.transport.read.count(b"\x8a\x04") == 20_000, "in the end each has its answer"
        client.transport.close()
        await house.still()
