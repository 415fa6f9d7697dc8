"""Each exchange's access line says where its time went: every moment from its head to its ending is in one part."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway import client
from gateway.client import post
from gateway.client.conversations import Client, Conversation, SocketConversation
from gateway.client.questions import Question, infer, lmi
from gateway.config import Config, DrainConfig, ListenConfig
from gateway.errors import TransportLost
from gateway.gateway import Gateway
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.messages import Part, Prompt, Token
from models.session import Session
from protocols.events import Data

PARTS = ("ms_begin", "ms_slot", "ms_input", "ms_room", "ms_model", "ms_flush")
KiB = 1024
X = {"x": np.zeros(4, np.float32)}

Lines = list[dict[str, Any]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The access lines of a test, each checked as it is written."""
    written: Lines = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = dict(record.__dict__)
            assert abs(sum(line[part] for part in PARTS) - line["ms"]) < 1
            assert all(line[part] >= 0 for part in PARTS)
            written.append(line)

    logger, kept = logging.getLogger("gateway.exchange"), Kept()
    before = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield written
    logger.removeHandler(kept)
    logger.setLevel(before)


def spent(line: dict[str, Any]) -> dict[str, float]:
    """The parts that are a second or more, in seconds: nothing of these stories is shorter."""
    return {part[3:]: round(line[part] / 1000, 2) for part in PARTS if line[part] >= 500}


# -- models ------------------------------------------------------------------------------------------------------------


async def three_seconds(x: np.ndarray) -> np.ndarray:
    await trio.sleep(3)
    return x


async def five_tokens(prompt: Prompt) -> AsyncIterator[Token]:
    for number in range(5):
        await trio.sleep(1)
        yield Token(text="word", id=number)


async def echo(part: Part) -> Part:
    await trio.sleep(1)
    return part


async def flood(prompt: Prompt) -> AsyncIterator[Token]:
    for number in range(2000):
        yield Token(text="x" * 100, id=number)


async def large(x: np.ndarray) -> np.ndarray:
    return np.zeros(200 * KiB, np.float32)


async def both_ways(session: Session[Part, Part]) -> None:
    """Reads and writes at once."""

    async def read() -> None:
        async for _ in session:
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        while True:
            await session.send(Part(data=bytes(10 * KiB)))


async def tidies_up(prompt: Prompt) -> AsyncIterator[Token]:
    yield Token(text="word")
    with trio.CancelScope(shield=True):
        await trio.sleep(10)


# -- the model's time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_unary_call_is_its_models(wire: str, lines: Lines, autojump_clock: Any) -> None:
    async with memory_gateway([three_seconds]) as house:
        answer = await house.client(wire).infer(X, "three_seconds")
        assert answer.complete
    (line,) = lines
    assert spent(line) == {"model": 3}
    assert (line["items_in"], line["items_out"], line["ms_first"]) == (1, 1, line["ms"])
    assert (line["ending"], line["bytes_out"]) == ("complete", answer.received)


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_stream_tells_when_its_first_item_left(wire: str, lines: Lines, autojump_clock: Any) -> None:
    async with memory_gateway([five_tokens]) as house:
        answer = await house.client(wire).lmi("x", "five_tokens", stream=True)
        assert answer.text == "word" * 5
    (line,) = lines
    assert spent(line) == {"model": 5}
    assert round(line["ms_first"]) == 1000
    assert (line["items_in"], line["items_out"], line["bytes_out"]) == (1, 5, answer.received)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 34, 65, 66, 67, 1000])
async def test_every_token_is_counted_once(tokens: int, stream: bool, lines: Lines, autojump_clock: Any) -> None:
    async def fast(prompt: Prompt) -> AsyncIterator[Token]:
        for number in range(tokens):
            yield Token(text="x" * (number % 300), id=number)

    async with memory_gateway([fast], capacity=1000) as house:
        answer = await house.client().lmi("x", "fast", stream=stream, max_new_tokens=tokens)
        assert answer.complete
    assert [line["items_out"] for line in lines] == [tokens]


# -- the client's time ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def talking(house: MemoryGateway, wire: str, model: str) -> AsyncIterator[Conversation | SocketConversation]:
    if wire == "websocket":
        yield await house.conversation(model)
    else:
        yield await house.client("http2").bidi(model)


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_a_client_that_speaks_slowly_is_waited_for(wire: str, lines: Lines, autojump_clock: Any) -> None:
    async with memory_gateway([echo]) as house, talking(house, wire, "echo") as talk:
        for _ in range(3):
            await trio.sleep(2)
            await talk.send(b"part")
            assert await talk.receive() is not None
        if isinstance(talk, Conversation):
            await trio.sleep(2)
            await talk.end()
            assert (await talk.rest()).complete
        else:
            await trio.sleep(2)
            await talk.close()
            assert await talk.receive() is None
        await wait_all_tasks_blocked()
    (line,) = lines
    assert spent(line) == {"input": 8, "model": 3}
    assert (line["items_in"], line["items_out"]) == (3, 3)
    assert round(line["ms_first"]) == 3000


@pytest.mark.parametrize("split", [1, 100, 3000])
async def test_parts_are_counted_however_they_arrive(split: int, lines: Lines, autojump_clock: Any) -> None:
    async def swallow(session: Session[Part, Part]) -> None:
        async for _ in session:
            pass

    async with memory_gateway([swallow], capacity=split) as house:
        talk = await house.client("http2").bidi("swallow")
        for number in range(20):
            await talk.send(b"x" * (50 * number))
        await talk.end()
        await talk.rest()
    assert [line["items_in"] for line in lines] == [20]


async def test_an_upload_that_takes_its_time_is_the_clients(lines: Lines, autojump_clock: Any) -> None:
    asked = infer(X, "three_seconds")
    body = asked.body
    assert body is not None
    async with memory_gateway([three_seconds]) as house:
        peer = house.http1()
        (head, _data, end) = post(1, asked.path, body, asked.headers)
        await peer.send(head)
        for piece in (body[:10], body[10:20], body[20:]):
            await trio.sleep(2)
            await peer.send(Data(stream=1, buffers=(piece,)))
        await peer.send(end)
        status, _, _ = await peer.read_answer(1)
        assert status == 200
    assert [spent(line) for line in lines] == [{"input": 6, "model": 3}]


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_client_that_reads_slowly_is_waited_for(wire: str, lines: Lines, autojump_clock: Any) -> None:
    async with memory_gateway([flood], capacity=32 * KiB) as house:
        talk = house.client(wire).about(lmi("x", "flood", stream=True, max_new_tokens=2000))
        await talk.begin()
        await trio.sleep(7)
        assert len((await talk.rest()).messages) == 2000
    (line,) = lines
    assert spent(line) == {"room": 7}
    assert line["ms_first"] < 1
    assert line["items_out"] == 2000


async def test_a_model_that_works_after_it_was_held_back_has_its_own_time(lines: Lines, autojump_clock: Any) -> None:
    async def bursts(session: Session[Part, Part]) -> None:
        for _ in range(2):
            for _ in range(20):
                await session.send(Part(data=bytes(10 * KiB)))
            await trio.sleep(3)

    async with memory_gateway([bursts], capacity=32 * KiB) as house:
        talk = await house.client("http2").bidi("bursts")
        await trio.sleep(2)
        await talk.rest()
    (line,) = lines
    assert spent(line) == {"room": 2, "model": 6}
    assert line["items_out"] == 40


async def test_who_still_waits_when_the_model_has_returned_keeps_nobody_waiting(lines: Lines, autojump_clock: Any) -> None:
    @asynccontextmanager
    async def load() -> AsyncIterator[Callable[[Session[Part, Part]], Awaitable[None]]]:
        async with trio.open_nursery() as background:

            async def hear(session: Session[Part, Part]) -> None:
                with suppress(trio.EndOfChannel):
                    await session.receive()

            async def model(session: Session[Part, Part]) -> None:
                background.start_soon(hear, session)
                await trio.sleep(1)
                await session.send(Part(data=bytes(200 * KiB)))

            yield model
            background.cancel_scope.cancel()

    async with memory_gateway([spec_of(load, "left")], capacity=32 * KiB) as house:
        talk = await house.client("http2").bidi("left")
        await trio.sleep(8)
        await talk.rest()
    assert [spent(line) for line in lines] == [{"input": 1, "flush": 7}]


async def test_an_answer_that_is_said_and_not_read_is_being_flushed(lines: Lines, autojump_clock: Any) -> None:
    async with memory_gateway([large], capacity=32 * KiB) as house:
        talk = house.client("http1").about(infer(X, "large"))
        await talk.begin()
        await trio.sleep(7)
        assert (await talk.rest()).complete
    assert [spent(line) for line in lines] == [{"flush": 7}]


async def test_a_moment_in_which_both_directions_wait_counts_once_for_who_does_not_read(
    lines: Lines, autojump_clock: Any
) -> None:
    async with memory_gateway([both_ways], capacity=32 * KiB) as house:
        talk = await house.conversation("both_ways")
        await trio.sleep(5)
        await talk.send(b"part")
        await trio.sleep(4)
        await talk.close()
        talk.peer.close()
        await wait_all_tasks_blocked()
    (line,) = lines
    assert spent(line) == {"room": 9}
    assert line["items_in"] == 1


async def test_an_asgi_servers_waits_are_its_clients(lines: Lines, autojump_clock: Any) -> None:
    asked = infer(X, "three_seconds")
    body = asked.body
    assert body is not None
    scope = {
        "type": "http", "method": "POST", "path": asked.path, "query_string": b"", "http_version": "1.1",
        "headers": [*asked.headers, (b"content-length", b"%d" % len(body))],
    }  # fmt: skip
    pieces = [body[:10], body[10:]]

    async def receive() -> dict[str, Any]:
        if not pieces:
            await trio.sleep_forever()
        await trio.sleep(2)
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        await trio.sleep(1)

    async with memory_gateway([three_seconds]) as house:
        await house.gateway.serve_asgi(scope, receive, send)
    assert [spent(line) for line in lines] == [{"input": 4, "model": 3, "flush": 2}]


# -- the gateway's time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_the_queue_of_a_model_is_told_apart(wire: str, lines: Lines, autojump_clock: Any) -> None:
    async with memory_gateway([spec_of(three_seconds, capacity=1, queue=8)]) as house, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(house.client(wire).infer, X, "three_seconds")
    assert [spent(line) for line in lines] == [{"model": 3}, {"slot": 3, "model": 3}, {"slot": 6, "model": 3}]


async def said(house: MemoryGateway, data: bytes) -> bytes:
    """Sends these bytes alone. Returns all that arrives until the connection ends, or for 20 s."""
    transport, heard, buffer = house.connect(), bytearray(), memoryview(bytearray(64 * KiB))
    assert transport.try_send([data]) == len(data)
    with trio.move_on_after(20):
        while (n := transport.try_receive_into(buffer)) != 0:
            if n is None:
                await transport.wait_readable()
            else:
                heard += buffer[:n]
    return bytes(heard)


async def test_a_request_behind_another_on_its_connection_has_not_begun(lines: Lines, autojump_clock: Any) -> None:
    async with memory_gateway([three_seconds]) as house:
        body = infer(X, "three_seconds", binary=False).body
        assert body is not None
        head = b"POST /v2/models/three_seconds/infer HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
        assert (await said(house, 2 * (head + body))).count(b"HTTP/1.1 200") == 2
    assert [spent(line) for line in lines] == [{"model": 3}, {"begin": 3, "model": 3}]


# -- the ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "wire"),
    [
        ("model", "http1"),
        ("model", "http2"),
        ("input", "bidi"),
        ("input", "websocket"),
        ("room", "http1"),
        ("slot", "http1"),
    ],
)
async def test_what_a_client_that_leaves_has_waited_for_ends_then(
    where: str, wire: str, lines: Lines, autojump_clock: Any
) -> None:
    one = spec_of(three_seconds, "one", capacity=1)
    async with (
        memory_gateway([forever_text(), echo, flood, one], capacity=32 * KiB) as house,
        trio.open_nursery() as nursery,
    ):
        if where == "slot":
            nursery.start_soon(house.client().infer, X, "one")
            await wait_all_tasks_blocked()
        if where == "input":
            async with talking(house, wire, "echo") as talk:
                await trio.sleep(2.5)
                if isinstance(talk, Conversation):
                    talk.leave()
                    await talk._peer.flush()
                else:
                    talk.peer.close()
                await wait_all_tasks_blocked()
        else:
            question = {"model": lmi("x", "forever"), "room": lmi("x", "flood", stream=True, max_new_tokens=2000)}.get(
                where, infer(X, "one")
            )
            asking = house.client(wire)
            talk = asking.about(question)
            await talk.begin()
            await trio.sleep(2.5)
            talk.leave()
            with suppress(TransportLost):
                await asking.peer.flush()
            await wait_all_tasks_blocked()
    line = lines[0]
    assert (line["ending"], spent(line)) == ("cancelled-by-client", {where: 2.5})
    assert (line["ms_first"] is None) == (where != "room")


def forever_text() -> Any:
    async def forever(prompt: Prompt) -> AsyncIterator[Token]:
        await trio.sleep_forever()
        yield Token(text="")

    return forever


async def test_what_a_model_does_after_the_ending_is_no_part_of_the_exchange(lines: Lines, autojump_clock: Any) -> None:
    async with memory_gateway([tidies_up]) as house:
        talk = house.client("http1").about(lmi("x", "tidies_up", stream=True))
        await talk.begin()
        await talk.receive()
        await trio.sleep(2)
        talk.leave()
        await trio.sleep(20)
    (line,) = lines
    assert (line["ending"], spent(line)) == ("cancelled-by-client", {"model": 2})


@pytest.mark.parametrize("where", ["model", "slot", "input"])
async def test_a_deadline_ends_what_is_waited_for(where: str, lines: Lines, autojump_clock: Any) -> None:
    one = spec_of(three_seconds, "one", capacity=1)
    timeout = (b"x-request-timeout", b"2")
    async with memory_gateway([forever_text(), one]) as house, trio.open_nursery() as nursery:
        if where == "slot":
            nursery.start_soon(house.client().infer, X, "one")
            await wait_all_tasks_blocked()
        asked = lmi("x", "forever") if where == "model" else infer(X, "one")
        peer = house.http1()
        events = post(1, asked.path, asked.body, [*asked.headers, timeout])
        await peer.send(*(events[:1] if where == "input" else events))
        status, _, _ = await peer.read_answer(1)
        assert status == 504
    line = lines[0]
    assert (line["ending"], spent(line)) == ("deadline", {where: 2})
    assert (line["items_out"], line["ms_first"]) == (0, None)


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_a_drain_ends_what_is_waited_for(wire: str, lines: Lines, autojump_clock: Any) -> None:
    async with memory_gateway([echo], Config(drain=DrainConfig(timeout=3))) as house, talking(house, wire, "echo") as talk:
        await talk.send(b"part")
        assert await talk.receive() is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.gateway.drain)
            assert await talk.receive() is None
    (line,) = lines
    assert (line["ending"], spent(line)) == ("drained", {"input": 3, "model": 1})


async def test_a_refusal_has_a_line_too(lines: Lines, autojump_clock: Any) -> None:
    async with memory_gateway([spec_of(three_seconds, capacity=1, queue=0)]) as house, trio.open_nursery() as nursery:
        nursery.start_soon(house.client().infer, X, "three_seconds")
        await wait_all_tasks_blocked()
        assert (await house.client().infer(X, "three_seconds")).status == 503
        assert (await house.client().lmi("x", "nobody")).status == 404
    assert [(line["status"], spent(line), line["items_out"]) for line in lines[:2]] == [(503, {}, 0), (404, {}, 0)]


# -- text that peers choose ----------------------------------------------------------------------------------------------


async def test_nothing_that_a_peer_chooses_can_forge_a_line_or_fill_it(lines: Lines, autojump_clock: Any) -> None:
    name = b"%0A%1B%5B2J%E2%80%AE" + b"y" * 300
    async with memory_gateway([three_seconds]) as house:
        target = b"/v2/repository/models/" + name + b"/load?key=secret"
        await said(house, b"POST " + target + b" HTTP/1.1\r\nhost: a\r\nauthorization: secret\r\ncontent-length: 0\r\n\r\n")
        await said(house, b"DELETE /" + b"z" * 300 + b" HTTP/1.1\r\nhost: a\r\n\r\n")
    loading, asking = lines
    assert loading["model"].startswith(r"\n\x1b[2J\u202e" + "yyy")
    assert all(line[field].isprintable() for line in lines for field in ("model", "method", "path"))
    assert (len(loading["model"]), len(loading["path"]), len(asking["path"])) == (109, 200, 200)
    assert not any("secret" in str(value) for line in lines for value in line.values())


# -- a real clock ----------------------------------------------------------------------------------------------------------


async def test_under_load_the_parts_are_the_whole(lines: Lines) -> None:
    async def words(prompt: Prompt) -> AsyncIterator[Token]:
        for number in range(40):
            if number % 8 == 0:
                await trio.sleep(0.001)
            yield Token(text="word", id=number)

    async def small(x: np.ndarray) -> np.ndarray:
        return x

    async def repeat(part: Part) -> Part:
        return part

    models = [spec_of(words, capacity=8, queue=1000), spec_of(small, capacity=4, queue=1000), spec_of(repeat, capacity=100)]
    gateway = Gateway(Config(listen=ListenConfig(port=0)), models)

    async def asks(kind: str, question: Question) -> None:
        async with client.connect("127.0.0.1", gateway.port) as transport:
            peer = (client.http2 if kind == "http2" else client.http1)(transport)
            asking = Client(peer)
            for _ in range(5):
                assert (await asking.ask(question)).complete

    async def talks() -> None:
        async with client.connect("127.0.0.1", gateway.port) as transport:
            talk = SocketConversation(await client.websocket(transport, "/models/repeat/invocations-bidirectional-stream"))
            for _ in range(20):
                await talk.send(b"part")
                assert await talk.receive() == b"part"
            await talk.close()
            assert await talk.receive() is None

    async with trio.open_nursery() as server:
        await server.start(gateway.serve)
        async with trio.open_nursery() as nursery:
            for number in range(30):
                kind = ("http1", "http2")[number % 2]
                nursery.start_soon(asks, kind, lmi("x", "words", stream=True, max_new_tokens=40))
                nursery.start_soon(asks, kind, infer(X, "small"))
                nursery.start_soon(talks)
        await gateway.drain()
    assert len(lines) == 30 * 11
    streams = [line for line in lines if line["model"] == "words"]
    assert {(line["ending"], line["items_out"]) for line in streams} == {("complete", 40)}
    assert all(0 < line["ms_first"] <= line["ms"] for line in streams)
    assert any(line["ms_slot"] > 0 for line in streams)
    assert {line["items_in"] for line in lines if line["model"] == "repeat"} == {20}
