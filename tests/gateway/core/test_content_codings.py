"""Bodies with a content coding: the content that the handler gets, refusals, and the memory and copies on the way."""

import errno
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.client import Peer, post
from gateway.codecs import threads
from gateway.config import Config, LimitsConfig, SageMakerConfig
from gateway.core.exchange import Exchange
from gateway.core.memory import BodyPool
from gateway.core.route import Row
from gateway.core.whole_body import receive_body
from gateway.dialects.compression import compressed
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.library.echo import Echo
from models.library.tensors import identity
from models.messages import Family, Part
from models.session import Session
from protocols.events import Buffer, Data, End, Head, Headers, Request, Response

KiB, MiB = 1024, 1024**2
TEXT = b"some text, some more text, and more of it. " * 50
HARD = np.random.default_rng(1).bytes(MiB)  # no coding makes it smaller
# Without the time, where such bytes are a parameter: they are in the names of the tests, the same ones in every process.
CODED: dict[bytes, Callable[[bytes], bytes]] = {b"gzip": partial(gzip.compress, mtime=0), b"deflate": zlib.compress}
GZIP, DEFLATE = (b"content-encoding", b"gzip"), (b"content-encoding", b"deflate")
BUDGET = 64 * MiB


@dataclass
class Bodies:
    """A gateway with a route that takes whole bodies, and what it got."""

    served: MemoryGateway
    got: list[bytes] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)

    async def ask(self, peer: Peer, body: bytes, *headers: tuple[bytes, bytes]) -> tuple[int, dict[bytes, bytes], bytes]:
        await peer.send(*post(1, "/body", body, headers))
        return await peer.read_answer(1)

    @property
    def held(self) -> int:
        return self.served.gateway.budget.used


@asynccontextmanager
async def bodies(limit: int = BUDGET, total: int = BUDGET, **how: Any) -> AsyncIterator[Bodies]:
    async def take(exchange: Exchange) -> None:
        there.exchanges.append(exchange)
        body = await receive_body(exchange, limit, setting="the.limit", **how)
        there.got.append(bytes(body))
        exchange.outbound.respond(200, [], b"%d" % len(body))

    async with memory_gateway([], Config(limits=LimitsConfig(total_bytes=total))) as served:
        served.gateway.router.add(Row("POST", "/body", take))
        there = Bodies(served)
        yield there
        await wait_all_tasks_blocked()
        assert there.held == 0


def connect(there: Bodies, wire: str) -> Peer:
    return there.served.http1() if wire == "http1" else there.served.http2()


async def send_in_pieces(peer: Peer, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    """A byte at a time, of a length that nobody says: chunks over HTTP/1.1, frames over HTTP/2."""
    await peer.send(*post(1, "/body", None, headers))
    for byte in body:
        await peer.send(Data(stream=1, buffers=(bytes([byte]),)))
    await peer.send(End(stream=1))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Awaitable[None]]]:
    """Functions for the test to add: each next step in a codec thread first takes one and awaits it."""
    before: list[Callable[[], Awaitable[None]]] = []

    async def run_in_codec_thread(call: Callable[[], Any]) -> Any:
        if before:
            await before.pop(0)()
        return await threads.run_in_codec_thread(call)

    monkeypatch.setattr("gateway.core.whole_body.run_in_codec_thread", run_in_codec_thread)
    monkeypatch.setattr("gateway.dialects.compression.run_in_codec_thread", run_in_codec_thread)
    return before


# -- arriving content --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["http1", "http2"])
@pytest.mark.parametrize("coding", CODED)
@pytest.mark.parametrize("content", [b"", b"x", TEXT, bytes(5 * MiB) + HARD], ids=len)
async def test_the_content_of_a_coded_body_arrives(wire: str, coding: bytes, content: bytes) -> None:
    async with bodies() as there:
        peer = connect(there, wire)
        status, _, answer = await there.ask(peer, CODED[coding](content), (b"content-encoding", coding.upper()))
        assert (status, answer) == (200, b"%d" % len(content))
        assert there.got == [content]
        peer.close()


@pytest.mark.parametrize("wire", ["http1", "http2"])
@pytest.mark.parametrize("coding", CODED)
async def test_a_coded_body_arrives_byte_by_byte(wire: str, coding: bytes) -> None:
    async with bodies() as there:
        peer = connect(there, wire)
        await send_in_pieces(peer, CODED[coding](TEXT), (b"content-encoding", coding))
        assert (await peer.read_answer(1))[0] == 200
        assert there.got == [TEXT]
        peer.close()


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_two_codings_and_several_members_come_off(wire: str) -> None:
    async with bodies() as there:
        peer = connect(there, wire)
        body = zlib.compress(gzip.compress(TEXT) + gzip.compress(b"the end"))
        assert (await there.ask(peer, body, (b"content-encoding", b"x-gzip"), DEFLATE))[0] == 200
        assert there.got == [TEXT + b"the end"]
        peer.close()


@pytest.mark.parametrize("value", [b"identity", b"", b" , Identity"])
async def test_identity_is_no_coding(value: bytes) -> None:
    async with bodies() as there:
        peer = there.served.http1()
        assert (await there.ask(peer, TEXT, (b"content-encoding", value)))[0] == 200
        assert there.got == [TEXT]
        peer.close()


async def test_who_expects_100_continue_is_told_to_send_its_coded_body() -> None:
    async with bodies() as there:
        peer, body = there.served.http1(), gzip.compress(TEXT)
        head = Request(
            stream=1,
            head=Head(
                method=b"POST",
                target=b"/body",
                authority=b"localhost",
                headers=[GZIP, (b"expect", b"100-continue"), (b"content-length", b"%d" % len(body))],
                content_length=len(body),
            ),
        )
        await peer.send(head)
        assert (await peer.next_event()).status == 100
        await peer.send(Data(stream=1, buffers=(body,)), End(stream=1))
        assert (await peer.read_answer(1))[0] == 200
        assert there.got == [TEXT]
        peer.close()


async def test_who_reads_the_request_afterwards_sees_the_content_alone() -> None:
    calls = []

    async def seer(session: Session[Part, Part]) -> None:
        part = await session.receive()
        calls.append((bytes(part.data), dict(session.call.headers)))
        await session.send(Part(data=b"seen"))

    async with memory_gateway([spec_of(Echo(), "echo"), spec_of(seer, "seer", family=Family.PARTS)]) as served:
        peer = served.http1()
        await peer.send(*post(1, "/models/seer/invoke", gzip.compress(TEXT), [GZIP, (b"x-other", b"1")]))
        assert (await peer.read_answer(1))[2] == b"seen"
        ((content, headers),) = calls
        assert content == TEXT
        assert "content-encoding" not in headers
        assert "content-length" not in headers
        assert headers["x-other"] == "1"
        peer.close()


# -- refused bodies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", CODED)
async def test_a_body_that_is_cut_at_any_byte_is_a_bad_request(coding: bytes) -> None:
    body = CODED[coding](b"a little")
    async with bodies() as there:
        for at in range(len(body)):
            peer = there.served.http1()
            status, _, answer = await there.ask(peer, body[:at], (b"content-encoding", coding))
            assert (status, json.loads(answer)) == (
                400,
                {"error": f"the {coding.decode()} body is cut off after {at} bytes"},
            )
            peer.close()
        assert there.got == []


@pytest.mark.parametrize("body", [b"{}", bytes(100_000), gzip.compress(TEXT) + b"more", HARD], ids=len)
@pytest.mark.parametrize("header", [GZIP, DEFLATE])
async def test_garbage_is_a_bad_request(body: bytes, header: tuple[bytes, bytes]) -> None:
    async with bodies() as there:
        peer = there.served.http2()
        status, _, answer = await there.ask(peer, body, header)
        assert status == 400
        assert "body is damaged" in json.loads(answer)["error"]
        assert there.got == []
        peer.close()


@pytest.mark.parametrize("wire", ["http1", "http2"])
@pytest.mark.parametrize("limit", [1000, MiB])
async def test_the_limit_is_the_last_size_of_the_content_that_passes(wire: str, limit: int) -> None:
    async with bodies(limit) as there:
        peer = connect(there, wire)
        assert (await there.ask(peer, gzip.compress(bytes(limit)), GZIP))[0] == 200
        peer.close()
        peer = connect(there, wire)
        status, _, answer = await there.ask(peer, gzip.compress(bytes(limit + 1)), GZIP)
        assert status == 413
        assert json.loads(answer) == {"error": f"the gzip body inflates to more than {limit} bytes (the.limit)"}
        assert [len(body) for body in there.got] == [limit]
        peer.close()


async def test_the_coded_body_is_within_the_limit_too() -> None:
    body = gzip.compress(HARD[:2000])
    async with bodies(len(body) - 1) as there:
        peer = there.served.http1()
        status, _, answer = await there.ask(peer, body, GZIP)
        assert (status, b"the.limit" in answer) == (413, True)
        peer.close()
        peer = there.served.http2()
        await send_in_pieces(peer, body, GZIP)
        status, _, answer = await peer.read_answer(1)
        assert (status, b"the.limit" in answer) == (413, True)
        peer.close()


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """A gibibyte of zeros."""
    return gzip.compress(bytes(16 * MiB), 9) * 64


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_bomb_is_refused_with_bounded_memory(wire: str, bomb: bytes) -> None:
    assert len(bomb) <= MiB
    async with bodies(MiB) as there:
        peer = connect(there, wire)
        status, _, answer = await there.ask(peer, bomb, GZIP)
        assert (status, b"the.limit" in answer) == (413, True)
        assert there.served.gateway.budget.high_water <= 3 * MiB  # the body, its content, and what the wire read ahead
        peer.close()


async def test_content_for_which_there_is_no_memory_is_refused_for_now() -> None:
    async with bodies(BUDGET, 4 * MiB) as there:
        peer = there.served.http1()
        status, _, answer = await there.ask(peer, gzip.compress(bytes(8 * MiB)), GZIP)
        assert (status, b"limits.total_bytes" in answer) == (503, True)
        assert there.served.gateway.budget.high_water <= 4 * MiB
        peer.close()


@pytest.mark.parametrize("path", ["/body", "/v2/models/identity/infer", "/models/echo/invoke", "/predictions/lm", "/models"])
@pytest.mark.parametrize("value", [b"br", b"gzip, gzip, gzip"])
async def test_an_unknown_coding_is_told_which_are_known(path: str, value: bytes) -> None:
    async def lm(session: Session[Any, Any]) -> None:
        raise AssertionError("it is not called")

    specs = [spec_of(identity, "identity"), spec_of(Echo(), "echo"), spec_of(lm, "lm", family=Family.TEXT)]
    async with memory_gateway(specs, Config(sagemaker=SageMakerConfig(multi_model=True))) as served:
        served.gateway.router.add(Row("POST", "/body", partial(receive_body, limit=100, setting="the.limit")))
        peer = served.http1()
        headers = [(b"content-encoding", value), (b"expect", b"100-continue"), (b"content-length", b"5")]
        head = Request(
            stream=1,
            head=Head(method=b"POST", target=path.encode(), authority=b"localhost", headers=headers, content_length=5),
        )
        await peer.send(head)
        answer = await peer.next_event()
        assert isinstance(answer, Response)
        assert (answer.status, dict(answer.headers)[b"accept-encoding"]) == (415, b"gzip, deflate")
        peer.close()
        await wait_all_tasks_blocked()
        assert served.gateway.budget.used == 0


@pytest.mark.parametrize("value", [b"gzip", b"br"])
async def test_who_needs_the_bytes_as_sent_takes_no_coding(value: bytes) -> None:
    async with bodies(as_sent=True) as there:
        peer = there.served.http1()
        status, headers, answer = await there.ask(peer, gzip.compress(TEXT), (b"content-encoding", value))
        assert (status, headers[b"accept-encoding"]) == (415, b"identity")
        assert f"content-encoding {value.decode()!r} is not accepted: send the body as it is" in json.loads(answer)["error"]
        peer.close()


async def test_the_platform_takes_no_coding_for_its_signatures_are_over_the_bytes() -> None:
    async with memory_gateway([spec_of(Echo(), "echo")]) as served:
        peer = served.http1()
        await peer.send(*post(1, "/endpoints/echo/invocations", gzip.compress(TEXT), [GZIP]))
        status, headers, answer = await peer.read_answer(1)
        assert (status, headers[b"x-amzn-errortype"]) == (400, b"ValidationError")
        assert b"content-encoding 'gzip' is not accepted" in answer
        peer.close()


# -- while it is inflated ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_client_that_leaves_stops_the_next_step(wire: str, steps: list[Callable[[], Awaitable[None]]]) -> None:
    async with bodies() as there:
        peer = connect(there, wire)
        held = []

        async def leave() -> None:
            held.append(there.held)
            peer.close()
            with trio.CancelScope(shield=True):  # it is noticed when this step ends, not in here
                await wait_all_tasks_blocked()

        async def too_late() -> None:
            raise AssertionError("it went on")

        steps += [trio.lowlevel.checkpoint, leave, too_late]
        await peer.send(*post(1, "/body", gzip.compress(bytes(16 * MiB)), [GZIP]))
        await wait_all_tasks_blocked()
        while steps != [too_late]:
            await wait_all_tasks_blocked(0.001)
        assert 2 * MiB <= held[0] <= 4 * MiB  # paid for step by step
        while there.held:
            await wait_all_tasks_blocked(0.001)
        assert there.got == []
        assert there.served.gateway.counts().endings == {"cancelled-by-client": 1}


async def test_others_go_on_meanwhile(steps: list[Callable[[], Awaitable[None]]]) -> None:
    async with bodies() as there:
        peer, other, go_on = there.served.http2(), there.served.http2(), trio.Event()
        steps.append(go_on.wait)
        await peer.send(*post(1, "/body", gzip.compress(bytes(2 * MiB)), [GZIP]))
        while steps:  # the body must arrive, and its short steps run on the loop, before the step in a thread
            await wait_all_tasks_blocked(0.001)
        assert (await there.ask(other, gzip.compress(TEXT), GZIP))[0] == 200  # short: no thread
        assert there.got == [TEXT]
        go_on.set()
        assert (await peer.read_answer(1))[0] == 200
        peer.close()
        other.close()


# -- copies and memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire", "body", "headers", "copied"),
    [
        ("http1", TEXT, [], len(TEXT)),
        ("http2", TEXT, [], len(TEXT)),
        ("http1", gzip.compress(TEXT, mtime=0), [GZIP], 2 * len(gzip.compress(TEXT)) + len(TEXT)),
        ("http2", gzip.compress(TEXT, mtime=0), [GZIP], 2 * len(gzip.compress(TEXT)) + len(TEXT)),
    ],
)
async def test_copied_bytes_are_counted(wire: str, body: bytes, headers: Headers, copied: int) -> None:
    async with bodies() as there:
        peer = connect(there, wire)
        assert (await there.ask(peer, body, *headers))[0] == 200
        assert there.exchanges[0].copied == copied
        peer.close()


@pytest.mark.parametrize("said", [True, False])
async def test_over_http2_each_byte_is_copied_twice(said: bool) -> None:
    async with bodies() as there:
        peer = there.served.http2()
        for event in post(1, "/body", bytes(8 * MiB) if said else None):
            await peer.send(event)
        if not said:
            await peer.send(Data(stream=1, buffers=(bytes(8 * MiB),)), End(stream=1))
        assert (await peer.read_answer(1))[0] == 200
        # a first read that is cut short leaves small pieces, which are put together while nobody takes them
        assert 0 <= there.exchanges[0].copied - 16 * MiB < 1024
        peer.close()


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_body_that_is_only_announced_has_no_memory(wire: str) -> None:
    async with bodies() as there:
        peer, pool = connect(there, wire), there.served.gateway.server.pool
        announced, body, end = post(1, "/body", bytes(8 * MiB))
        await peer.send(announced)
        await wait_all_tasks_blocked()
        assert there.exchanges
        if wire == "http2":  # over HTTP/1.1 it is where the next bytes are received into: one for a connection
            assert pool.lent_bytes == 0
        assert there.held < MiB
        await peer.send(body, end)
        assert (await peer.read_answer(1))[0] == 200
        peer.close()


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_memory_that_the_system_does_not_have_is_that_bodys_error_alone(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(pool: BodyPool, n: int, now: float) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(BodyPool, "take", take)
    async with bodies() as there:
        peer = connect(there, wire)
        announced, body, end = post(1, "/body", bytes(8 * MiB))
        await peer.send(announced)
        await wait_all_tasks_blocked()
        await peer.send(body, end)
        status, _, said = await peer.read_answer(1)
        assert (status, b"Cannot allocate memory" in said) == (503, True)
        if wire == "http2":
            await peer.send(*post(3, "/body", b"short"))
            assert (await peer.read_answer(3))[0] == 200
        peer.close()


async def test_what_lands_is_not_copied() -> None:
    async with bodies() as there:
        peer = there.served.http1()
        assert (await there.ask(peer, bytes(8 * MiB)))[0] == 200
        # only the bytes that came with the head or before the exchange's turn
        assert there.exchanges[0].copied <= 2 * LimitsConfig().read_ahead
        peer.close()


# -- replies -----------------------------------------------------------------------------------------------------------

JSON = (b"content-type", b"application/json")


@asynccontextmanager
async def replies(*buffers: Buffer, head: Headers = (JSON,), level: int = 1) -> AsyncIterator[MemoryGateway]:
    """A gateway whose route /reply answers with these."""

    async def reply(exchange: Exchange) -> None:
        headers, body = await compressed(exchange, head, buffers, level)
        exchange.outbound.respond(200, headers, *body)

    async with memory_gateway([], Config(limits=LimitsConfig(total_bytes=BUDGET))) as served:
        served.gateway.router.add(Row("POST", "/reply", reply))
        yield served
        await wait_all_tasks_blocked()
        assert served.gateway.budget.used == 0


async def reply(peer: Peer, *accepted: bytes) -> tuple[dict[bytes, bytes], bytes]:
    await peer.send(*post(1, "/reply", b"", [(b"accept-encoding", value) for value in accepted]))
    status, headers, body = await peer.read_answer(1)
    assert status == 200
    assert headers[b"content-length"] == b"%d" % len(body)
    peer.close()
    return headers, body


@pytest.mark.parametrize("wire", ["http1", "http2"])
@pytest.mark.parametrize("buffers", [[TEXT], [b'{"outputs":[]}', memoryview(TEXT), bytearray(3 * MiB)]], ids=len)
@pytest.mark.parametrize(("accepted", "decode"), [(b"gzip, deflate", gzip.decompress), (b"deflate", zlib.decompress)])
async def test_a_reply_is_coded_as_it_was_asked_for(
    wire: str, buffers: Sequence[Buffer], accepted: bytes, decode: Callable[[bytes], bytes]
) -> None:
    head = (JSON, (b"inference-header-content-length", b"14"))
    async with replies(*buffers, head=head) as served:
        headers, body = await reply(served.http1() if wire == "http1" else served.http2(), accepted)
        assert decode(body) == b"".join(buffers)
        assert headers[b"content-encoding"] == accepted.partition(b",")[0]
        assert headers[b"vary"] == b"accept-encoding"
        assert headers[b"inference-header-content-length"] == b"14"
        assert headers[b"content-type"] == b"application/json"


@pytest.mark.parametrize(
    ("accepted", "buffers", "how"),
    [
        ([], [TEXT], {}),
        ([b"identity"], [TEXT], {}),
        ([b"gzip;q=0", b"br"], [TEXT], {}),
        ([b"*"], [TEXT], {}),
        ([b"gzip"], [TEXT[:1023]], {}),
        ([b"gzip"], [], {}),
        ([b"gzip"], [TEXT], {"level": 0}),
        ([b"gzip"], [TEXT], {"head": [(b"content-type", b"text/event-stream; charset=utf-8")]}),
        ([b"gzip"], [HARD[:2000]], {}),
        ([b"gzip"], [HARD, bytes(2 * MiB)], {}),  # its beginning does not shrink, so the gateway gives up coding it
    ],
)
async def test_other_replies_are_left_as_they_are(accepted: list[bytes], buffers: list[Buffer], how: dict[str, Any]) -> None:
    async with replies(*buffers, **how) as served:
        headers, body = await reply(served.http1(), *accepted)
        assert body == b"".join(buffers)
        assert b"content-encoding" not in headers
        never = bool(how)  # these settings and types are never coded, so the reply does not vary
        assert headers.get(b"vary") == (None if never else b"accept-encoding")


async def test_a_reply_for_whose_coding_there_is_no_memory_leaves_as_it_is() -> None:
    async with replies(bytes(BUDGET + 1)) as served:
        headers, body = await reply(served.http1(), b"gzip")
        assert len(body) == BUDGET + 1
        assert b"content-encoding" not in headers


@pytest.mark.parametrize(("level", "in_a_thread"), [(1, False), (2, True), (9, True)])
async def test_a_short_reply_is_coded_on_the_loop_at_level_1_alone(
    steps: list[Callable[[], Awaitable[None]]], level: int, in_a_thread: bool
) -> None:
    async with replies(TEXT, level=level) as served:
        steps += [trio.lowlevel.checkpoint]
        headers, body = await reply(served.http1(), b"gzip")
        assert headers[b"content-encoding"] == b"gzip"
        assert gzip.decompress(body) == TEXT
        assert (not steps) is in_a_thread


async def test_a_client_that_leaves_stops_the_coding_of_its_reply(steps: list[Callable[[], Awaitable[None]]]) -> None:
    async with replies(bytes(16 * MiB)) as served:
        peer = served.http1()

        async def leave() -> None:
            assert served.gateway.budget.used >= 16 * MiB
            peer.close()
            with trio.CancelScope(shield=True):  # it is noticed when this step ends, not in here
                await wait_all_tasks_blocked()

        async def too_late() -> None:
            raise AssertionError("it went on")

        steps += [trio.lowlevel.checkpoint, leave, too_late]
        await peer.send(*post(1, "/reply", b"", [(b"accept-encoding", b"gzip")]))
        while served.gateway.counts().endings != {"cancelled-by-client": 1}:
            await wait_all_tasks_blocked(0.001)
        assert steps == [too_late]


# -- v2 ----------------------------------------------------------------------------------------------------------------


def request(array: np.ndarray[Any, Any]) -> tuple[bytes, Headers]:
    tensor = {
        "name": "INPUT0",
        "datatype": "FP32",
        "shape": list(array.shape),
        "parameters": {"binary_data_size": array.nbytes},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + array.tobytes(), [(b"inference-header-content-length", b"%d" % len(head))]


@pytest.mark.parametrize("coding", CODED)
@pytest.mark.parametrize("size", [4, 300_000])
async def test_the_length_of_the_json_counts_bytes_of_the_content(coding: bytes, size: int) -> None:
    array = np.arange(size, dtype=np.float32)
    body, headers = request(array)
    async with memory_gateway([spec_of(identity, "identity")]) as served:
        peer = served.http1()
        sent = [*headers, (b"content-encoding", coding)]
        await peer.send(*post(1, "/v2/models/identity/infer", CODED[coding](body), sent))
        status, said, answer = await peer.read_answer(1)
        assert status == 200
        np.testing.assert_array_equal(np.frombuffer(answer[int(said[b"inference-header-content-length"]) :], "<f4"), array)
        peer.close()
        await wait_all_tasks_blocked()
        assert served.gateway.budget.used == 0


async def test_no_model_sees_a_damaged_body() -> None:
    calls = []

    async def model(session: Session[Any, Any]) -> None:
        calls.append(await session.receive())

    body, headers = request(np.arange(4, dtype=np.float32))
    coded = gzip.compress(body)
    async with memory_gateway([spec_of(model, "model", family=Family.TENSOR)]) as served:
        for damaged in (body, b"", coded[:-1], coded[:20] + coded[21:], coded + b"\0"):
            peer = served.http1()
            await peer.send(*post(1, "/v2/models/model/infer", damaged, [*headers, GZIP]))
            status, said, answer = await peer.read_answer(1)
            assert (status, said[b"content-type"]) == (400, b"application/json")
            assert "the gzip body is" in json.loads(answer)["error"]
            peer.close()
    assert calls == []
