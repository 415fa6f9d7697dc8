"""On every wire, the bytes reserved of the budget are at least those held, and not many more than those received."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, final

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.core.connection import Connection
from gateway.core.inbound import PIECE, Inbound
from gateway.party import MemoryAccount
from gateway.wires.http2 import HTTP2Wire
from models.blocking import codec_threads
from models.session import Session
from protocols.events import Data
from protocols.http2.windows import FLOOR, STEP, ReceiveWindows
from protocols.websocket.frames import LARGE, MASKED, write_header
from tests.gateway.promises import House, KiB, Line, Probe, limits, raw, serving

MiB = 1024 * KiB
LARGEST_STEP = MiB


async def still(house: House) -> None:
    """Everything has run as far as it can, in the codecs' threads too: what these are at work with is held until then."""
    await house.still()
    while codec_threads().borrowed_tokens:
        await trio.testing.wait_all_tasks_blocked(0.001)
    await house.still()


async def deaf(probe: Probe, session: Session[Any, Any]) -> None:
    """Takes nothing."""
    await probe.go.wait()


async def taking(probe: Probe, session: Session[Any, Any]) -> None:
    """Takes what comes, and keeps nothing."""
    async for part in session:
        del part


@final
class Client:
    """One that says what it was made for piece by piece."""

    def __init__(self, house: House, kind: str, size: int) -> None:
        self._house, self.kind, self._size = house, kind, size
        self.line: Line = house.line("http1" if kind == "body over HTTP/1.1" else "http2")
        self.sent = 0
        self.pieces = self._before = 0

    async def begin(self) -> None:
        """Announces everything, and sends none of it."""
        match self.kind:
            case "body over HTTP/1.1" | "body over HTTP/2":
                await self.line.send(raw(1, b"POST", "/v2/models/deaf-tensors/infer", content_length=self._size))
            case "events that nobody takes" | "events that are taken":
                name = "deaf-parts" if self.kind.startswith("events that nobody") else "taking-parts"
                self.call = await self._house.call("bidi", name, line=self.line)
                await still(self._house)
                self._before = self._arrived
                self._event = b"".join(self.call.framed(bytes(self._size)).buffers)  # type: ignore[attr-defined]
            case "frames that nobody takes" | "a large frame":
                self.call = await self._house.call("websocket", "deaf-parts")
                self.line = self.call.line
                if self.kind == "a large frame":
                    self._size += LARGE
                    self.line.transport.try_send([b"\x82\xff" + self._size.to_bytes(8, "big") + bytes(4)])

    async def say(self, n: int) -> None:
        """Sends `n` more bytes, or the rest if that is less."""
        n = min(n, self._size - self.sent)
        if not n:
            return
        self.pieces += 1
        match self.kind:
            case "body over HTTP/1.1" | "body over HTTP/2":
                await self.line.send(Data(stream=1, buffers=(bytes(n),)))
            case "events that nobody takes" | "events that are taken":
                piece = self._event[self.sent : self.sent + n]
                await self.line.send(Data(stream=self.call.stream, buffers=(piece,)))
            case "frames that nobody takes":
                n = min(n, 65_000)
                self.line.transport.try_send([write_header(0x82, n, MASKED) + bytes(4) + bytes(n)])
            case "a large frame":
                n = self.line.transport.try_send([bytes(n)])
        self.sent += n

    @property
    def _arrived(self) -> int:
        """Bytes of it that the server has: a window may hold the rest back."""
        here = sum(exchange.bytes_in for exchange in self._house.connection(self.line).exchanges.values())
        return max(0, here - self._before)

    @property
    def least(self) -> int:
        """The bytes of it that the server must hold."""
        match self.kind:
            case "events that are taken":
                return self._arrived if 64 * KiB < self._arrived < len(self._event) else 0
            case "body over HTTP/1.1" | "body over HTTP/2":
                return self._arrived if self.sent < self._size else 0
            case _:
                return self.sent

    @property
    def most(self) -> int:
        """The most that the server may have reserved for it: the bytes received, a stream's floor and a step ahead."""
        return self.sent + FLOOR + STEP + min(max(self.sent, STEP), LARGEST_STEP) + PIECE * self.pieces


KINDS = {
    "body over HTTP/1.1": 3 * MiB,
    "body over HTTP/2": 3 * MiB,
    "events that nobody takes": 50 * KiB,
    "events that are taken": 3 * MiB,
    "frames that nobody takes": 200 * KiB,
    "a large frame": 3 * MiB,
}
CLIENTS = st.lists(
    st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), st.integers(1, KINDS[kind]))),
    min_size=1,
    max_size=4,
)
STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([1, 100, 5000, 16_384, 60_000, 300_000]) | st.integers(1, 60_000)),
    max_size=12,
)


async def story(clients: list[tuple[str, int]], steps: list[tuple[int, int]]) -> None:
    """Everybody says something, bit by bit; the ledger is read after each."""
    parts, takers, tensors = Probe(deaf, "deaf-parts"), Probe(taking, "taking-parts"), Probe(deaf, "deaf-tensors")
    specs = parts.spec("bidi"), takers.spec("bidi"), tensors.spec("v2-http1")
    async with serving(*specs, config=limits(total_bytes=1024 * MiB)) as house:
        talking = [Client(house, kind, size) for kind, size in clients]
        for client in talking:
            await client.begin()
            await still(house)
        check(house, talking)
        for who, n in steps:
            client = talking[who % len(talking)]
            with trio.move_on_after(1):  # a window is closed, or a pipe is full
                await client.say(n)
            await still(house)
            check(house, talking)
        accounts = [house.connection(client.line).budget for client in talking]
        for client in talking:
            client.line.peer.close()
        await still(house)
        assert house.gateway.budget.used == 0, "nobody is left"
        assert not any(account.held for account in accounts)


def check(house: House, clients: list[Client]) -> None:
    used = house.gateway.budget.used
    grown = 0
    for connection in house.gateway.server.connections:
        wire = getattr(connection, "wire", None)
        if isinstance(wire, HTTP2Wire):
            for stream, ledger in wire._machine.windows().items():
                grown += max(0, ledger.granted - 64 * KiB) if stream else 0
    least, most = sum(client.least for client in clients), sum(client.most for client in clients) + grown
    assert least <= used <= most, [(client.kind, client.sent) for client in clients]
    held: dict[int, int] = {}
    for connection in house.gateway.server.connections:
        assert isinstance(connection, Connection)
        account = connection.budget
        held[id(account)] = account.held
    assert sum(held.values()) == used, "every byte is somebody's"


def tell(clients: list[tuple[str, int]], steps: list[tuple[int, int]]) -> None:
    gc.disable()
    try:
        trio.run(story, clients, steps, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        gc.enable()


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(CLIENTS, STEPS)
@example([("body over HTTP/1.1", 416_477)], [(0, 300_000), (0, 300_000)])  # is read in a thread when it is whole
def test_reserved_is_what_is_held_and_a_step_ahead(clients: list[tuple[str, int]], steps: list[tuple[int, int]]) -> None:
    tell(clients, steps)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_only_announced_takes_no_more_than_its_stream(kind: str) -> None:
    tell([(kind, KINDS[kind])] * 3, [])


def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message is paid for when it says how long it is."""
    monkeypatch.setattr("gateway.core.inbound.ahead", lambda arrived, length: length)
    monkeypatch.setattr("protocols.websocket.connection.ahead", lambda arrived, length: length)


def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is paid for when it is granted."""
    plain = ReceiveWindows.open

    def open_whole(self: ReceiveWindows, granted: int) -> Any:
        window = plain(self, granted)
        if window is not None and self.pay(window, granted):
            window.base = window.reserved
        return window

    monkeypatch.setattr(ReceiveWindows, "open", open_whole)


def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of an assembled message are never given back."""
    monkeypatch.setattr(Inbound, "assembled", lambda self: None)


def unpaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unread bytes cost nothing."""
    monkeypatch.setattr(ReceiveWindows, "pay", lambda self, window, unread: True)


def nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes given back to the budget are still counted for their party."""
    monkeypatch.setattr(MemoryAccount, "release", lambda self, n: self._budget.release(n))


LONG = [(0, 30_000)] * 12
WEAK: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, list[tuple[int, int]]]] = {
    announced: ("events that are taken", LONG),
    windows: ("events that nobody takes", []),
    forgotten: ("events that are taken", LONG),
    unpaid: ("events that nobody takes", LONG),
    nobodys: ("frames that nobody takes", LONG),
}


@pytest.mark.parametrize("planted", WEAK, ids=lambda planted: planted.__name__)
def test_a_planted_weakness_is_found(planted: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch)
    kind, steps = WEAK[planted]
    with pytest.raises(AssertionError):
        tell([(kind, KINDS[kind])], steps)
