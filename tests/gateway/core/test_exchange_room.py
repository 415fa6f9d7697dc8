"""An exchange that need not ask its wire for room before each message lets in exactly what one that asks does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import trio

from gateway.config import LimitsConfig
from gateway.core.exchange import Exchange
from gateway.core.turn import Turn
from gateway.errors import Ending
from protocols.buffers import ByteBudget
from protocols.errors import LocalProtocolError
from protocols.events import Buffer, End, Headers, Request, Response
from protocols.http1.connection import HTTP1Connection, HTTP1Limits
from protocols.roles import Role


class Wire:
    """An HTTP/1.1 answer whose bytes leave when the test decides. It is both the wire and the exchange's owner."""

    name, windowed, peer, last_sent, pool = "http/1.1", False, "test", 0.0, None

    def __init__(self, exclusive: bool, send_buffer: int, headers: Headers | None = ()) -> None:
        """`headers` None: its answer has not begun."""
        self.exclusive = exclusive
        self.machine = HTTP1Connection(Role.SERVER, HTTP1Limits(send_buffer=send_buffer))
        self.machine.receive_data(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        request: Any = self.machine.next_event()
        assert type(request) is Request
        self.machine.next_event()
        self.limits, self.budget = LimitsConfig(checkpoint_bytes=6000, send_buffer=send_buffer), ByteBudget(1 << 20)
        self.now, self.asked, self.told = 0.0, 0, 0
        self.exchange = Exchange(self, self, request, "x", 0.0)  # type: ignore[arg-type]
        self.exchange.begin(trio.CancelScope(), Turn(), 0.0)
        if headers is not None:
            self.exchange.outbound.start(200, headers)

    def clock(self) -> float:
        return self.now

    def room(self, stream: int) -> int:
        self.asked += 1
        return self.machine.room(1)

    def empty(self, stream: int) -> bool:
        return self.machine.room(1) >= self.limits.send_buffer

    def takes(self, stream: int) -> bool:
        return self.empty(stream)

    def start(self, stream: int, status: int, headers: Headers, trailers: bool) -> None:
        self.machine.send(Response(stream=1, status=status, headers=headers))

    def push(self, stream: int, buffers: Sequence[Buffer]) -> None:
        self.machine.send_data(1, buffers)

    def push_pieces(self, stream: int, pieces: Sequence[bytes]) -> None:
        self.machine.send_pieces(1, pieces)

    def output_ready(self) -> None:
        self.told += 1

    def finish(self, stream: int, code: int, reason: str, trailers: Headers) -> None:
        self.machine.send(End(stream=1))

    def reset(self, stream: int, ending: Ending) -> None: ...

    def left(self) -> int:
        """The room behind all that was said, the pieces that waited among it."""
        self.machine.send_pieces(1, self.exchange.outbound.take_pieces())
        return self.machine.room(1)

    def write(self) -> bytes:
        self.machine.send_pieces(1, self.exchange.outbound.take_pieces())
        written = b"".join(self.machine.data_to_send(1 << 20))
        self.machine.data_sent()
        self.exchange.outbound.room_changed()
        return written


@pytest.mark.parametrize("send_buffer", [100, 1000, 4096, 65536])
async def test_the_same_messages_are_let_in_at_once_and_the_same_bytes_leave(send_buffer: int) -> None:
    chance = random.Random(send_buffer)
    shy, asking = Wire(True, send_buffer), Wire(False, send_buffer)
    both = shy, asking
    let_in = 0
    for number in range(5000):
        n = chance.choice((1, 60, 120, 120, 120, 300, 511, 700))
        answers = {wire.exchange.outbound.try_room(n) for wire in both}
        assert len(answers) == 1
        if answers.pop():
            let_in += 1
            size = max(1, n - chance.randrange(10))
            for wire in both:
                wire.exchange.outbound.push_piece(b"x" * size)
            if chance.random() < 0.05:
                for wire in both:
                    wire.exchange.outbound.push(b"y" * size)
                    wire.exchange.outbound.push(b"z" * 30_000)
        else:
            if n > shy.left():
                assert shy.write() == asking.write()
            for wire in both:
                await wire.exchange.outbound.wait_room(n)
        if chance.random() < 0.1:
            assert shy.write() == asking.write()
        for wire in both:
            wire.now += 0.0001 if number % 1000 < 500 else 0.0
    assert shy.write() == asking.write()
    assert let_in > 1000
    if send_buffer == 65536:
        assert shy.asked < asking.asked / 4


@pytest.mark.parametrize("end", ["finish", "abort", "cut"])
async def test_nothing_more_is_let_in_at_once_after_the_end(end: str) -> None:
    wire = Wire(True, 65536)
    exchange = wire.exchange
    for _ in range(3):
        assert exchange.outbound.try_room(100)
        exchange.outbound.push_piece(b"x" * 100)
    match end:
        case "finish":
            exchange.outbound.finish()
        case "abort":
            exchange.outbound.abort(Ending.LOST)
        case _:
            exchange.peer_gone(Ending.CANCELLED)
    assert not exchange.outbound.try_room(1)


@pytest.mark.parametrize("how", ["push_piece", "push"])
async def test_the_shortest_messages_fill_the_room_and_no_more(how: str) -> None:
    """Their framing is most of what they take."""
    for send_buffer in range(2000, 3000, 20):
        wire = Wire(True, send_buffer)
        exchange = wire.exchange
        push = getattr(exchange.outbound, how)
        while wire.left() > 0:
            if not exchange.outbound.try_room(1):
                await exchange.outbound.wait_room(1)  # a checkpoint was due
            for _ in range(1 if how == "push_piece" else 9):
                push(b"x")
        assert not exchange.outbound.try_room(1)
        assert exchange.outbound.bytes_out == wire.write().count(b"\r\nx\r\n")


def said(wire: Wire, *pieces: bytes) -> None:
    for piece in pieces:
        assert wire.exchange.outbound.try_room(len(piece))
        wire.exchange.outbound.push_piece(piece)


def test_pieces_wait_until_the_wire_writes_and_it_is_told_once_for_each_write() -> None:
    wire = Wire(True, 65536)
    wire.write()
    for telling in (1, 2):
        said(wire, b"a", b"bc", b"d")
        assert wire.told == telling
        assert wire.exchange.outbound.pieces == [b"a", b"bc", b"d"]
        assert wire.write() == b"1\r\na\r\n2\r\nbc\r\n1\r\nd\r\n"
        assert not wire.exchange.outbound.pieces


def test_whatever_else_is_said_leaves_behind_the_pieces() -> None:
    wire = Wire(True, 65536)
    wire.write()
    said(wire, b"a", b"b")
    wire.exchange.outbound.push(b"c", b"d")
    said(wire, b"e")
    wire.exchange.outbound.finish()
    assert wire.write() == b"1\r\na\r\n1\r\nb\r\n2\r\ncd\r\n1\r\ne\r\n0\r\n\r\n"


def test_on_a_wire_that_others_share_no_piece_waits() -> None:
    wire = Wire(False, 65536)
    wire.write()
    said(wire, b"a", b"b")
    assert not wire.exchange.outbound.pieces
    assert wire.write() == b"1\r\na\r\n1\r\nb\r\n"


@pytest.mark.parametrize("end", ["abort", "cut"])
def test_pieces_that_nobody_will_read_are_dropped(end: str) -> None:
    wire = Wire(True, 65536)
    wire.write()
    said(wire, b"a", b"b")
    if end == "abort":
        wire.exchange.outbound.abort(Ending.LOST)
    else:
        wire.exchange.peer_gone(Ending.CANCELLED)
    assert not wire.exchange.outbound.pieces
    assert wire.write() == b""


@pytest.mark.parametrize("next", ["push", "finish"])
def test_pieces_that_are_longer_than_the_head_has_declared_show_where_something_comes_behind_them(next: str) -> None:
    wire = Wire(True, 65536, [(b"content-length", b"3")])
    wire.write()
    said(wire, b"ab", b"cd")
    act = wire.exchange.outbound.finish if next == "finish" else partial(wire.exchange.outbound.push, b"e")
    with pytest.raises(LocalProtocolError, match="2 bytes of body, the head leaves 1"):
        act()
    assert wire.exchange.outbound.finishing is None, "another ending may be said"
    assert wire.write() == b"ab"


@pytest.mark.parametrize("next", ["start", "respond"])
def test_pieces_before_the_head_show_when_a_head_comes(next: str) -> None:
    wire = Wire(True, 65536, None)
    said(wire, b"a")
    with pytest.raises(LocalProtocolError, match="needs a head first"):
        getattr(wire.exchange.outbound, next)(200, [])


async def test_a_message_that_waits_for_its_turn_waits_for_room_behind_the_pieces_too(autojump_clock: Any) -> None:
    wire = Wire(True, 1000)
    wire.write()
    said(wire, b"x" * 600)
    wire.now += 1.0
    assert not wire.exchange.outbound.try_room(500), "its turn is over, so nobody has looked for room"
    with trio.move_on_after(1) as scope:
        await wire.exchange.outbound.wait_room(500)
    assert scope.cancelled_caught
    wire.write()
    await wire.exchange.outbound.wait_room(500)
