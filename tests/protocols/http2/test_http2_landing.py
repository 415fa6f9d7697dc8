"""Payload that lands: copied to memory of the consumer's, whatever the frames are like that it comes in, and forgotten in time."""

from __future__ import annotations

from typing import Any

import pytest

from protocols.buffers import ByteBudget
from protocols.events import Data, End, NoRoom, Reset
from protocols.http2.connection import HTTP2Limits
from protocols.http2.frames import FRAME_HEAD, RUN, Kind
from protocols.http2.windows import FLOOR, LANDING
from tests.protocols.http2.http2_helpers import END_STREAM, PADDED, POST, ByHand, Pair, body, data, frame, pull

WORDS = b"all that I have to say is here, piece by piece"


def landing(n: int = len(WORDS), *, payload_path: bool = True, length: int | None = None) -> tuple[ByHand, bytearray]:
    """A server whose stream 1 lands in the memory."""
    client, memory = ByHand(payload_path=payload_path), bytearray(n)
    said = () if length is None else ((b"content-length", b"%d" % length),)
    client.says(client.head(1, (*POST, *said)))
    assert client.server.land(1, memoryview(memory))
    return client, memory


def forgotten(memory: bytearray) -> bool:
    """True if no view of the memory is left: with one it could not grow."""
    try:
        memory.append(0)
    except BufferError:
        return False
    return True


def test_all_frames_that_are_here_land_as_one() -> None:
    client, memory = landing()
    n = -(-len(WORDS) // RUN)
    pieces = [WORDS[at : at + n] for at in range(0, len(WORDS), n)]
    (event,) = client.says(b"".join(data(1, piece) for piece in pieces))
    assert isinstance(event, Data)
    assert event.buffers[0] == WORDS == memory
    assert client.server.unconsumed == len(WORDS)
    client.server.credit(1, len(WORDS))
    assert client.server.unconsumed == 0


@pytest.mark.parametrize("payload_path", [True, False])
@pytest.mark.parametrize("split", [1, 5, 9, 10, 100])
def test_it_lands_wherever_what_is_received_is_cut(payload_path: bool, split: int) -> None:
    client, memory = landing(payload_path=payload_path, length=len(WORDS))
    wire = data(1, WORDS[:20]) + data(1, WORDS[20:30]) + data(1, WORDS[30:], END_STREAM)
    events = client.says(*(wire[at : at + split] for at in range(0, len(wire), split)))
    assert body(events) == WORDS == memory
    assert events[-1] == End(stream=1)


@pytest.mark.parametrize(("length", "last"), [(100_000, END_STREAM), (100_000, 0), (None, END_STREAM)])
def test_no_frame_is_looked_at_more_than_a_few_times(length: int | None, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = landing(100_000, length=length)
    looked, unpack = 0, FRAME_HEAD.unpack_from

    class Counted:
        def unpack_from(self, buffer: bytes, at: int) -> tuple[Any, ...]:
            nonlocal looked
            looked += 1
            return unpack(buffer, at)

    monkeypatch.setattr("protocols.http2.frames.FRAME_HEAD", Counted())
    client.says(data(1, b"x") * 4999 + data(1, b"x", last))
    assert looked <= 2 * 5000


def test_padding_and_other_frames_come_between() -> None:
    client, memory = landing()
    padded = frame(Kind.DATA, PADDED, 1, b"\x03" + WORDS[10:20] + bytes(3))
    other = client.head(3) + data(3, b"other")
    events = client.says(data(1, WORDS[:10]) + padded + other + data(1, WORDS[20:]))
    assert body(events, 1) == WORDS == memory
    assert body(events, 3) == b"other"


def test_the_wrong_length_is_the_streams_error_after_what_was_right() -> None:
    client, _ = landing(length=len(WORDS))
    events = client.says(data(1, WORDS[:10]) + data(1, WORDS[10:20], END_STREAM))
    assert body(events) == WORDS[:10]
    assert events[-1] == Reset(stream=1, code=1)


def test_what_there_is_no_place_for_comes_as_without_one() -> None:
    client, memory = landing(10)
    events = client.says(data(1, WORDS[:8]) + data(1, WORDS[8:12]) + data(1, WORDS[12:]))
    assert body(events) == WORDS
    assert memory == WORDS[:8] + bytes(2)
    del events
    assert forgotten(memory)


def test_a_budget_without_room_is_said_and_nothing_lands_any_more() -> None:
    limits = HTTP2Limits(initial_window=100_000)
    client, memory = ByHand(limits, budget=ByteBudget(4096 + 16_384)), bytearray(100_000)
    client.says(client.head(1))
    client.server.land(1, memoryview(memory))
    events = client.says(data(1, b"x" * 16_384) + data(1, b"y" * 16_384))
    assert body(events) == b"x" * 16_384
    assert events[-1] == NoRoom(stream=1, n=16_384)
    assert b"y" not in memory


@pytest.mark.parametrize("how", ["full", "drop", "reset", "close"])
def test_the_memory_is_forgotten(how: str) -> None:
    client, memory = landing()
    client.says(data(1, WORDS[:10]))
    assert not forgotten(memory)
    if how == "full":
        client.says(data(1, WORDS[10:]))
    elif how == "drop":
        client.server.drop(1)
    elif how == "reset":
        client.says(frame(Kind.RST_STREAM, 0, 1, bytes(4)))
    else:
        client.server.close()
    assert forgotten(memory)


def test_a_window_that_grows_while_it_lands_reserves_nothing_for_that() -> None:
    limits, budget = HTTP2Limits(initial_window=1000, max_window=4000), ByteBudget(5000)
    client, memory = ByHand(limits, budget=budget), bytearray(3000)
    client.says(client.head(1))
    client.server.land(1, memoryview(memory))
    client.says(data(1, bytes(900)))
    client.server.credit(1, 900)
    client.says(data(1, bytes(1900)))
    client.server.credit(1, 1900)
    assert client.server.windows()[1].granted == 4000
    assert budget.used == FLOOR


def test_a_window_grows_further_while_it_lands() -> None:
    client = ByHand(HTTP2Limits(initial_window=1000, max_window=4000))
    client.says(client.head(1))
    client.server.land(1, memoryview(bytearray(50_000)))
    for n in (900, 1900, 3900, 7900, 15_900):
        client.says(data(1, bytes(n)))
        client.server.credit(1, n)
    assert client.server.windows()[1].granted == LANDING * 4000


def test_it_lands_while_it_has_a_place() -> None:
    client = ByHand()
    client.says(client.head(1) + client.head(3))
    server = client.server
    assert not server.lands
    server.land(1, memoryview(bytearray(10)))
    server.land(3, memoryview(bytearray(10)))
    client.says(data(3, bytes(10)))
    assert not server.lands, "by what came last"
    client.says(data(1, bytes(5)))
    assert server.lands
    server.drop(1)
    assert not server.lands


def test_a_stream_that_is_whole_dropped_or_unknown_does_not_land() -> None:
    client = ByHand()
    client.says(client.head(1, flags=END_STREAM), client.head(3))
    client.server.drop(3)
    memory = bytearray(1)
    assert not [stream for stream in (1, 3, 99) if client.server.land(stream, memoryview(memory))]
    assert forgotten(memory)


def test_an_answer_lands_too() -> None:
    pair = Pair()
    pair.request(1, b"")
    pair.flow()
    memory = bytearray(200_000)
    assert pair.client.land(1, memoryview(memory))
    pair.respond(1, bytes(range(200)) * 1000)
    pair.flow()
    pull(pair.client)
    while End(stream=1) not in pair.at_client:
        pair.client.credit(1, pair.client.windows()[1].unread)
        pair.flow()
    assert memory == bytes(range(200)) * 1000 == body(pair.at_client)
