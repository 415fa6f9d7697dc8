"""An embedder's stream reports a send only later: by then, a client that has its whole answer may have left."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.net.transport import MemoryTransport, memory_pair
from gateway.testing.stories.talk import Leave
from tests.gateway.promises import CANCELLED, LEAVES, WIRE, House, KiB, Probe, answering, at_once, counting, serving
from tests.gateway.sweep import AsStream

WIRES = ("lmi-http1", "lmi-http2", "bidi", "websocket", "json-http1", "v2-http2")
LEFT = [pytest.param(wire, how, id=f"{wire}-{name}") for wire in WIRES for name, how in LEAVES.items()]
LEFT.append(pytest.param("bidi", Leave.STREAM, id="bidi-reset"))


class TellsLate(AsStream):
    """Its bytes have arrived, and whatever comes of that has happened, before a send returns, or fails."""

    fails = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await super().send_all(data)
        await wait_all_tasks_blocked()
        if self.fails:
            raise trio.BrokenResourceError


async def told(house: House) -> None:
    """The stream has said all that it has to say."""
    for _ in range(8):
        await house.still()


class Embedder:
    """Serves a house's clients over streams of its own."""

    def __init__(self, house: House, nursery: trio.Nursery, stream: type[AsStream], capacity: int = 64 * KiB) -> None:
        self._house, self._nursery, self._stream, self._capacity = house, nursery, stream, capacity
        self.streams: list[AsStream] = []

    def connect(self) -> MemoryTransport:
        ours, theirs = memory_pair(self._capacity)
        self.streams.append(self._stream(theirs))
        self._nursery.start_soon(self._house.gateway.serve_stream, self.streams[-1])
        return ours


@pytest.mark.parametrize(("wire", "how"), LEFT)
async def test_a_client_that_leaves_with_its_whole_answer_has_had_it(
    wire: str, how: Leave, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec(wire), wire=wire) as house, trio.open_nursery() as nursery:
        monkeypatch.setattr(house.memory, "connect", Embedder(house, nursery, TellsLate).connect)
        call = await house.call(wire)
        _, over = await call.rest()
        assert over.how == "complete"
        assert house.endings == {}  # the stream has not yet returned from its last send
        await call.leave(how)
        await told(house)
        assert house.endings == {"complete": 1}
        house.check_ledger()
        call.line.peer.close()


@pytest.mark.parametrize("wire", WIRES)
async def test_one_whose_last_bytes_the_stream_could_not_send_has_left(
    wire: str, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe(answering)
    async with serving(probe.spec(wire), wire=wire) as house, trio.open_nursery() as nursery:
        embedder = Embedder(house, nursery, TellsLate)
        monkeypatch.setattr(house.memory, "connect", embedder.connect)
        call = await house.call(wire)
        await house.still()
        probe.go.set()
        (stream,) = embedder.streams
        assert isinstance(stream, TellsLate)
        stream.fails = True
        await call.rest()
        await call.leave(Leave.RESET)
        await told(house)
        assert house.endings == CANCELLED
        house.check_ledger()


@pytest.mark.parametrize("how", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("wire", [wire for wire in WIRES if WIRE[wire].streams])
async def test_one_that_leaves_in_mid_answer_cancels_its_model_at_once_whatever_is_being_sent(
    wire: str, how: Leave, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe(counting)
    async with serving(probe.spec(wire), wire=wire) as house, trio.open_nursery() as nursery:
        monkeypatch.setattr(house.memory, "connect", Embedder(house, nursery, AsStream, KiB).connect)
        call = await house.call(wire)
        await house.still()
        assert probe.live == 1  # it is stuck in its send, and the stream in its own
        with at_once():
            await call.leave(how)
            await house.still()
            assert (probe.live, house.endings) == (0, CANCELLED)
        house.check_ledger()
        call.line.peer.close()


class NeverTells(AsStream):
    """Its bytes have arrived, and no send returns."""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await super().send_all(data)
        await trio.sleep_forever()


@pytest.mark.parametrize("how", LEAVES.values(), ids=LEAVES)
async def test_a_stream_that_never_says_is_given_up_when_it_has_stalled(
    how: Leave, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("json-http1")) as house, trio.open_nursery() as nursery:
        monkeypatch.setattr(house.memory, "connect", Embedder(house, nursery, NeverTells).connect)
        call = await house.call("json-http1")
        _, over = await call.rest()
        assert over.how == "complete"
        await call.leave(how)
        stall = house.gateway.limits.write_stall
        await trio.sleep(stall - 2)
        assert house.endings == {}
        await trio.sleep(4)
        assert house.endings == {"transport-lost": 1}
        house.check_ledger()
        call.line.peer.close()


class Breaks(AsStream):
    """It fails as no stream should, when it is asked for bytes for the last time."""

    reads = 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self.reads -= 1
        if self.reads < 0:
            raise RuntimeError("a mistake of the embedder's")
        return await super().receive_some(max_bytes)


@pytest.mark.parametrize("reads", [0, 1])
async def test_a_stream_that_fails_in_a_way_of_its_own_ends_its_connection_and_nothing_else(
    reads: int, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(Probe(answering).spec("json-http1")) as house:
        ours, theirs = memory_pair()
        stream = Breaks(theirs)
        stream.reads = reads
        ours.try_send((b"GET /ping HTTP/1.1\r\nhost: everywire\r\n\r\n",))
        await house.gateway.serve_stream(stream)
        assert house.gateway.counts().connections == 0
        assert ours.hung_up()
    failures = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [(record.message, str(record.exc_info and record.exc_info[1])) for record in failures] == [
        ("connection failed", "a mistake of the embedder's")
    ]
