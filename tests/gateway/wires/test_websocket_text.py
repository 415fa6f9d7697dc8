"""Text over a WebSocket that is not UTF-8: passed on as it is, or refused where `websocket.check_utf8` asks for that."""

from __future__ import annotations

from typing import Any

import pytest
from trio.testing import wait_all_tasks_blocked

from gateway.client import Peer
from gateway.config import Config, WebSocketConfig
from gateway.errors import Ending
from gateway.testing import MemoryGateway, memory_gateway
from models.library.echo import Echo
from protocols.events import Close, Frame, Opcode, Ping, Pong

CHECKED = Config(websocket=WebSocketConfig(check_utf8=True))
FOUR = "𝄞".encode()
BROKEN = {
    "a byte that no character has": [b"a\xffb"],
    "a character cut off by the end of the message": [b"caf\xc3"],
    "one cut off by the end of its last fragment": [b"caf", b"\xe2\x82"],
    "a second half that is none": [b"\xe2\x82", b"\xff"],
    "an overlong form": [b"\xc0\xaf"],
    "half of a surrogate pair": [b"\xed\xa0\x80"],
    "beyond Unicode": [b"\xf4\x90\x80\x80"],
    "behind 100 KiB": [b"x" * 100_000 + b"\xff"],
    "within a large frame, at the edge of a piece of it": [b"x" * 65_535 + b"\xc3(" + b"x" * 1000],
}


def frames(*pieces: bytes, opcode: Opcode = Opcode.TEXT) -> list[Frame]:
    """One message, a fragment for each piece."""
    last = len(pieces) - 1
    return [
        Frame(opcode=opcode if at == 0 else Opcode.CONTINUATION, fin=at == last, data=data) for at, data in enumerate(pieces)
    ]


async def echoed(peer: Peer, sent: list[Frame]) -> None:
    """Each frame comes back as it went."""
    machine: Any = peer.machine
    for frame in sent:
        await peer.send(frame)
        event = await peer.next_event()
        assert isinstance(event, Frame)
        assert (event.opcode, event.fin, bytes(event.data)) == (frame.opcode, frame.fin, frame.data)
        machine.credit(len(event.data))


async def ending(served: MemoryGateway) -> dict[Ending, int]:
    await wait_all_tasks_blocked()
    return dict(served.gateway.observer.endings)


@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN)
async def test_text_that_is_not_utf8_reaches_the_model_unless_it_is_to_be_refused(pieces: list[bytes]) -> None:
    async with memory_gateway([Echo()]) as served:
        await echoed(await served.websocket(), frames(*pieces))


@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN)
async def test_text_that_is_not_utf8_is_refused_with_1007_where_that_is_asked(pieces: list[bytes]) -> None:
    """The refusal comes at the frame that breaks it; frames before it have passed."""
    async with memory_gateway([Echo()], CHECKED) as served:
        peer, neighbour = await served.websocket(), await served.websocket()
        sent = frames(*pieces)
        await echoed(peer, sent[:-1])
        await peer.send(sent[-1])
        closed = await peer.next_event()
        assert isinstance(closed, Close)
        assert (closed.code, closed.reason) == (1007, "a text message is not UTF-8")
        await peer.flush()
        assert await ending(served) == {Ending.REFUSED: 1}
        await echoed(neighbour, frames(b"goes on"))
        await served.check_nothing_left()


async def test_a_character_may_be_split_between_fragments_wherever_it_is_and_no_byte_changes() -> None:
    async with memory_gateway([Echo()], CHECKED) as served:
        peer = await served.websocket()
        for cut in range(1, 4):
            await echoed(peer, frames(b"a" + FOUR[:cut], FOUR[cut:] + b"b"))
        await echoed(peer, frames(*(FOUR[at : at + 1] for at in range(4))))
        await echoed(peer, frames(FOUR[:2], b"", FOUR[2:]))
        for shift in range(4):  # over the edge of the pieces in which a large frame is looked at
            await echoed(peer, frames(b"x" * (65_533 + shift) + FOUR * 10, FOUR))


async def test_a_ping_within_a_character_changes_nothing() -> None:
    async with memory_gateway([Echo()], CHECKED) as served:
        peer = await served.websocket()
        first, second = frames(FOUR[:2], FOUR[2:])
        await echoed(peer, [first])
        await peer.send(Ping(data=b"?"))
        assert await peer.next_event() == Pong(data=b"?")
        await echoed(peer, [second])


@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN)
async def test_bytes_are_never_looked_at(pieces: list[bytes]) -> None:
    async with memory_gateway([Echo()], CHECKED) as served:
        await echoed(await served.websocket(), frames(*pieces, opcode=Opcode.BINARY))


async def test_the_message_after_a_good_one_is_looked_at_anew() -> None:
    async with memory_gateway([Echo()], CHECKED) as served:
        peer = await served.websocket()
        await echoed(peer, frames(b"good"))
        await peer.send(*frames(b"\xff"))
        closed = await peer.next_event()
        assert isinstance(closed, Close)
        assert closed.code == 1007
