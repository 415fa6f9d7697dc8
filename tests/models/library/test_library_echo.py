"""The echo model: parts come back as they were."""

from __future__ import annotations

from models.library.echo import Echo
from models.messages import Part, PartKind
from models.session import Session
from tests.models.library.library_session import Tape, converse, stalled

PARTS = (Part(data=b"one"), Part(data=b"\xff", kind=PartKind.UTF8, last=False), Part(data=memoryview(b"")))


async def test_each_part_comes_back_as_the_very_same_part() -> None:
    assert all(sent is part for sent, part in zip(await converse(Echo(), *PARTS), PARTS, strict=True))


async def test_a_part_comes_back_before_the_next_is_taken() -> None:
    tape = Tape(PARTS)
    await Echo()(Session(tape))
    assert [way for way, _ in tape.log] == ["in", "out"] * 3


async def test_a_client_that_stops_reading_stops_the_echo_from_taking_more() -> None:
    tape = await stalled(Echo(), *PARTS, room=1)
    assert [way for way, _ in tape.log] == ["in", "out", "in"]
