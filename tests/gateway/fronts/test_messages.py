"""Messages between a parent and a front: frames whole and cut anywhere, and bytes that are no frames."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.catalog.processes.linked import ModelNews, Offer
from gateway.fronts.messages import (
    LARGEST,
    Begin,
    CannotServe,
    Command,
    ControlFrames,
    FrontListens,
    FrontState,
    Handed,
    Heard,
    KillWanted,
    LetGo,
    LinkWanted,
    Message,
    Over,
    Reply,
    Serving,
    SharedBegin,
    SharedNews,
    Taken,
    frame_of,
    handed_of,
    packet_of,
    said_of,
)
from gateway.fronts.sums import Family, Sample
from gateway.serving.drain import DrainReport
from gateway.serving.ports import Ports

SAID: list[Message] = [
    Begin(0, 2, Ports(), None, {}, {}, shared=[SharedBegin("chat", 1, {"family": "text"}, 2, 2**20)]),
    Begin(1, 2, Ports(port=8080, addresses=("http://127.0.0.1:8080",)), None, {"a.b": "c"}, {"a.b": "--set a.b"}),
    Command(3, "drain", 1.5),
    FrontListens(),
    Serving(["chat"]),
    FrontState(2, ("model 'chat' is loading",), frozenset({"chat"})),
    Heard(2),
    CannotServe("no weights", configuration=False),
    Reply(3, {"a": [1, None]}),
    SharedNews(ModelNews("chat", 2, [Offer(7, 0, 4711), Offer(5, 1, 4700, 2.5)], 1, "it ended", over=False, given_up=[3])),
    KillWanted(7, "its loop is silent"),
    LetGo(7),
    Over(
        DrainReport(live=1, endings={"complete": 1}, seconds=0.5, clean=True),
        [Family("calls", "Calls.", "counter", [Sample("calls_total", {"model": "a"}, 2.0)])],
    ),
]


@given(st.lists(st.sampled_from(SAID), max_size=6), st.lists(st.integers(1, 40), min_size=1))
def test_messages_arrive_as_they_were_said_however_they_are_cut(said: list[Message], cuts: list[int]) -> None:
    data, frames, heard, at = b"".join(map(frame_of, said)), ControlFrames(), list[Message](), 0
    for n in range(len(data)):
        size = cuts[n % len(cuts)]
        heard += frames.feed(data[at : at + size])
        at += size
    assert heard == said


@pytest.mark.parametrize(
    "data",
    [(LARGEST + 1).to_bytes(4, "big"), b"\0\0\0\1\xc1", b"\0\0\0\2\x91\x63", b"\0\0\0\4\x93\x07\xa1a"],
    ids=["a frame that is too large", "no message pack", "a tag that nobody has", "a field of another type"],
)
def test_what_is_no_message_is_a_valueerror(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(ControlFrames().feed(data))


def test_packets_come_back_as_they_were() -> None:
    handed = [Handed(1, tls=False), Handed(2, tls=True)]
    assert handed_of(packet_of(handed)) == handed
    assert said_of(packet_of(Taken([1], [2], 7))) == Taken([1], [2], 7)
    assert said_of(packet_of(LinkWanted(7))) == LinkWanted(7)
    with pytest.raises(ValueError, match=r"."):
        said_of(b"\x91\xa1a")
