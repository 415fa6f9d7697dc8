"""HTTP/1.1 as its connection sees it: requests in turn, reuse after errors, and early answers that can be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from gateway.config import Config, LimitsConfig
from gateway.core.connection import Connection
from gateway.core.exchange import Exchange
from gateway.core.route import Row
from gateway.core.whole_body import receive_body
from gateway.net.transport import MemoryTransport
from protocols.events import ConnectionEnd, Data, End
from tests.gateway.promises import (
    KiB,
    Line,
    Over,
    Probe,
    answering,
    at_once,
    counting,
    limits,
    pausing,
    raw,
    serving,
    silent,
)


def wire_bytes(path: str, body: bytes = b"", *headers: str) -> bytes:
    """A request as its bytes."""
    method = "POST" if body else "GET"
    lines = [f"{method} {path} HTTP/1.1", "host: x", *headers, *([f"content-length: {len(body)}"] if body else [])]
    return "\r\n".join([*lines, "", ""]).encode() + body


def asks(model: str, upto: int) -> bytes:
    """An LMI stream's request as its bytes."""
    asked = {"inputs": "x", "stream": True, "parameters": {"max_new_tokens": upto}}
    return wire_bytes(f"/predictions/{model}", json.dumps(asked).encode())


async def answers(line: Line, n: int) -> list[tuple[int, bytes]]:
    """The next n answers as a plain reader sees them: status and body."""
    found: list[tuple[int, bytes]] = []
    received = bytearray()
    buffer = memoryview(bytearray(64 * KiB))
    while len(found) < n:
        head, separator, rest = bytes(received).partition(b"\r\n\r\n")
        if separator:
            fields = dict(f.lower().split(": ", 1) for f in head.decode().split("\r\n")[1:])
            body: bytes | None = None
            if "content-length" in fields:
                length = int(fields["content-length"])
                body, left = (rest[:length], rest[length:]) if len(rest) >= length else (None, b"")
            elif b"\r\n0\r\n\r\n" in rest or rest.startswith(b"0\r\n\r\n"):
                body, _, left = rest.partition(b"0\r\n\r\n")
            if body is not None:
                found.append((int(head.split()[1]), body))
                received[:] = left
                continue
        received += await some(line, buffer)
    assert not received
    return found


async def some(line: Line, buffer: memoryview) -> bytes:
    while (n := line.transport.try_receive_into(buffer)) is None:
        await line.transport.wait_readable()
    assert n, "the connection ended"
    return bytes(buffer[:n])


async def test_pipelined_requests_are_answered_in_order(autojump_clock: Any) -> None:
    slow, quick = Probe(answering, "slow"), Probe(answering, "quick")
    quick.go.set()
    async with serving(slow.spec("lmi-http1"), quick.spec("lmi-http1")) as house:
        line = house.line("http1")
        line.transport.try_send([asks("slow", 5) + wire_bytes("/ping") + asks("quick", 5) + wire_bytes("/none")])
        await house.still()
        assert (slow.live, quick.calls) == (1, 0)  # each in its turn
        slow.go.set()
        with at_once():
            found = await answers(line, 4)
        assert [status for status, _ in found] == [200, 200, 200, 404]
        assert house.endings == {"complete": 3, "refused": 1}


async def test_a_pipelined_answer_larger_than_what_is_left_of_the_queue_still_comes(autojump_clock: Any) -> None:
    # the second answer's first message does not fit beside the first answer, which a slow client has not taken yet
    async def large(probe: Probe, session: Any) -> None:
        await probe.take(session)
        await session.send(probe.message(0))

    first, second = Probe(large, "first"), Probe(large, "second")
    small = 1500
    config = Config(limits=LimitsConfig(send_buffer=small))
    async with serving(first.spec("lmi-http1"), second.spec("lmi-http1"), config=config, capacity=100) as house:
        line = house.line("http1")
        for request in (asks("first", 1), asks("second", 1)):
            while request:
                request = request[line.transport.try_send([request]) :]
                await house.still()
        assert (first.returned, second.calls) == (1, 1)
        assert [status for status, _ in await answers(line, 2)] == [200, 200]
        assert house.endings == {"complete": 2}


@pytest.mark.parametrize("capacity", [1, 7, 60, *range(100, 320, 10), 1000])
async def test_whole_answers_arrive_whole_however_few_bytes_leave_at_once(capacity: int, autojump_clock: Any) -> None:
    slow, quick = Probe(answering, "slow"), Probe(answering, "quick")
    quick.go.set()
    async with serving(slow.spec("lmi-http1"), quick.spec("lmi-http1"), capacity=capacity) as house:
        line = house.line("http1")
        # some are answered at once, and others wait for bytes that a small transport has not taken yet
        request = wire_bytes("/ping") * 2 + asks("quick", 3) + wire_bytes("/none") + wire_bytes("/ping")
        while request:
            request = request[line.transport.try_send([request]) :]
            await house.still()
        found = await answers(line, 5)
        assert [status for status, _ in found] == [200, 200, 200, 404, 200]
        assert found[0] == found[1] == found[4]
        await house.still()
        assert house.endings == {"complete": 4, "refused": 1}


async def test_what_a_stream_says_before_the_answer_ahead_of_it_has_left_leaves_after_it(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("lmi-http1")) as house:
        line = house.line("http1")
        line.transport.try_send([wire_bytes("/ping")])
        await answers(line, 1)  # the connection has begun
        held: list[Connection] = []
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "turn", lambda connection: held.append(connection))
            line.transport.try_send([wire_bytes("/ping")])
            await house.still()
            line.transport.try_send([asks("probe", 6)])
            await house.still()
        (connection,) = held
        assert connection.whole_answer
        connection.turn()
        said = b""
        with at_once():
            while said.count(b"HTTP/1.1 200") < 2:
                said += await some(line, memoryview(bytearray(64 * KiB)))
        assert probe.live
        probe.go.set()
        await house.still()
        assert house.endings == {"complete": 3}


async def test_tokens_of_one_turn_leave_together_each_as_a_chunk(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("lmi-http1")) as house:
        line = house.line("http1")
        line.transport.try_send([asks("probe", 6)])
        await house.still()
        (connection,) = house.gateway.server.connections
        (exchange,) = connection.exchanges.values()
        assert not exchange.outbound.pieces, "what waited was taken when the wire wrote"
        writes = []
        with at_once():
            writes.append(await some(line, memoryview(bytearray(64 * KiB))))
            probe.go.set()
            await house.still()
            writes.append(await some(line, memoryview(bytearray(64 * KiB))))
        assert [write.count(b'"token"') for write in writes] == [3, 3]
        assert writes[1].count(b'\r\n{"token"') == 3


async def test_a_connection_holds_the_pieces_that_wait_too(autojump_clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go, end = trio.Event(), trio.Event()

    async def paused(exchange: Exchange) -> None:
        exchange.outbound.start(200, [])
        await go.wait()
        for piece in (b"ab", b"cd"):
            await exchange.outbound.wait_room(2)
            exchange.outbound.push_piece(piece)
        await end.wait()
        exchange.outbound.finish()

    async with serving() as house:
        house.gateway.router.add(Row("GET", "/paused", paused))
        house.line("http1").transport.try_send([wire_bytes("/paused")])
        await house.still()
        (connection,) = house.gateway.server.connections
        assert connection.wire.held() == (0, 0)
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "turn", lambda _: None)
            go.set()
            await house.still()
            assert connection.wire.held() == (0, 4)
        connection.turn()
        assert connection.wire.held() == (0, 0)
        end.set()
        await house.still()


async def test_pieces_that_are_longer_than_their_head_has_declared_end_the_connection_that_writes_them(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def too_long(exchange: Exchange) -> None:
        outbound = exchange.outbound
        outbound.start(200, [(b"content-length", b"3")])
        for piece in (b"ab", b"cd"):
            await outbound.wait_room(2)
            outbound.push_piece(piece)
        await trio.sleep_forever()

    async with serving() as house:
        house.gateway.router.add(Row("GET", "/long", too_long))
        line, other = house.line("http1"), house.line("http1")
        line.transport.try_send([wire_bytes("/long")])
        await house.still()
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["connection failed"]
        assert house.endings == {"transport-lost": 1}
        other.transport.try_send([wire_bytes("/ping")])
        with at_once():
            assert [status for status, _ in await answers(other, 1)] == [200]


async def test_what_was_said_before_a_body_was_found_garbled_still_leaves(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def early(exchange: Exchange) -> None:
        exchange.outbound.start(200, [])
        for piece in (b"ab", b"cd"):
            await exchange.outbound.wait_room(2)
            exchange.outbound.push_piece(piece)
        await trio.sleep_forever()

    async with serving() as house:
        house.gateway.router.add(Row("GET", "/early", early))
        line = house.line("http1")
        line.transport.try_send([wire_bytes("/ping")])
        await answers(line, 1)  # the connection has begun
        held: list[Connection] = []
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "turn", lambda connection: held.append(connection))
            for sent in (wire_bytes("/early", b"", "transfer-encoding: chunked"), b"no chunk\r\n"):
                line.transport.try_send([sent])
                await house.still()
        held[0].turn()
        with at_once():
            said = await some(line, memoryview(bytearray(64 * KiB)))
        assert said.endswith(b"\r\n\r\n2\r\nab\r\n2\r\ncd\r\n")
        assert house.endings == {"complete": 1, "refused": 1}


async def test_a_request_that_is_found_garbled_before_the_answer_ahead_of_it_has_left_is_refused_behind_it(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as house:
        line = house.line("http1")
        held: list[Connection] = []
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "turn", lambda connection: held.append(connection))
            for piece in (wire_bytes("/ping"), b"GARBAGE\r\n\r\n"):
                line.transport.try_send([piece])
                await house.still()
        held[0].turn()
        assert [status for status, _ in await answers(line, 2)] == [200, 400]
        await line.over()
        assert house.endings == {"complete": 1}


async def test_a_garbled_request_behind_a_whole_answer_does_not_cut_it(autojump_clock: Any) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("lmi-http1"), capacity=100) as house:
        line = house.line("http1")
        request = asks("probe", 1)
        while request:
            request = request[line.transport.try_send([request]) :]
            await house.still()
        assert probe.returned == 1
        line.transport.try_send([b"GARBAGE\r\n\r\n"])
        await house.still()
        found = await answers(line, 2)
        assert [status for status, _ in found] == [200, 400]
        assert b"generated_text" in found[0][1]
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/none", b"{}", 404),
        ("/ping", b"{}", 405),
        ("/predictions/none", b"{}", 404),
        ("/predictions/probe", b"{", 424),
        ("/predictions/probe", b'{"inputs": "x", "parameters": {"temperature": -1}}', 424),
        ("/v2/models/probe/infer", b"{}", 400),
        ("/endpoints/probe/invocations-bidirectional-stream", b"x", 400),
    ],
)
async def test_a_connection_is_used_again_after_an_error_answer(
    path: str, body: bytes, status: int, autojump_clock: Any
) -> None:
    async with serving(Probe(answering).spec("lmi-http1")) as house:
        line = house.line("http1")
        with at_once():
            for _ in range(3):
                line.transport.try_send([wire_bytes(path, body)])
                assert [status for status, _ in await answers(line, 1)] == [status]
        line.transport.try_send([wire_bytes("/v2/health/live")])
        assert [status for status, _ in await answers(line, 1)] == [200]
        assert (house.connections, house.endings) == (1, {"refused": 3, "complete": 1})


@pytest.mark.parametrize(
    ("path", "length", "status"),
    [
        ("/predictions/probe", 100 * 1024 * KiB, 413),
        ("/none", 1024 * KiB, 404),
        ("/predictions/none", 1024 * KiB, 404),
        ("/predictions/probe", None, 413),
    ],
)
async def test_an_early_answer_is_readable_by_a_client_that_goes_on_uploading(
    path: str, length: int | None, status: int, autojump_clock: Any
) -> None:
    async with serving(Probe(silent).spec("lmi-http1"), config=limits(text_json=100 * KiB)) as house:
        line = house.line("http1")
        await line.send(raw(1, b"POST", path, content_length=length))
        for _ in range(40):  # it does not look for an answer yet
            await line.send(Data(stream=1, buffers=(bytes(16 * KiB),)))
        await house.still()
        found, _, body = await line.peer.read_answer(1)
        assert found == status
        assert b"error" in body
        await line.over()
        assert house.endings == {"refused": 1}


async def test_a_client_that_uploads_for_ever_after_its_answer_is_cut_off(autojump_clock: Any) -> None:
    async with serving() as house:
        line = house.line("http1")
        await line.send(raw(1, b"POST", "/none", content_length=2**40))
        sent = 0
        with trio.move_on_after(60):
            while sent < 100 * 1024 * KiB:
                try:
                    await line.send(Data(stream=1, buffers=(bytes(16 * KiB),)))
                except Exception:
                    break
                sent += 16 * KiB
        assert sent <= 65 * 1024 * KiB
        assert (house.connections, house.endings) == (0, {"refused": 1})


async def test_a_client_whose_upload_never_pauses_is_cut_off_as_well(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, poured, most = MemoryTransport.try_receive_into, 0, 100 * 1024 * KiB

    def pour(transport: MemoryTransport, buffer: memoryview) -> int | None:
        nonlocal poured
        n = receive(transport, buffer)
        if n is not None or transport is line.transport.below or poured > most:
            return n
        poured += len(buffer)
        return len(buffer)

    async with serving() as house:
        line = house.line("http1")
        await house.still()
        monkeypatch.setattr(MemoryTransport, "try_receive_into", pour)
        line.transport.try_send([wire_bytes("/none", b"", f"content-length: {2**40}")])
        await house.still()
        assert 0 < poured <= 65 * 1024 * KiB
        assert (house.connections, house.endings) == (0, {"refused": 1})


async def test_what_is_swallowed_after_an_answer_is_swallowed_in_turns(autojump_clock: Any) -> None:
    class Endless:
        """Always has more."""

        taken = 0

        def try_receive_into(self, buffer: memoryview) -> int:
            self.taken += 1
            assert self.taken < 10, "the others never have their turn"
            return len(buffer)

    async with serving() as house:
        line = house.line("http1")
        await line.send(raw(1, b"POST", "/none", content_length=2**40))
        await house.still()
        (connection,) = house.gateway.server.connections
        below, endless = connection.transport, Endless()
        connection.transport = endless  # type: ignore[assignment]
        connection.turn()
        connection.transport = below
        assert 0 < endless.taken < 10
        line.peer.close()
        await house.still()


async def test_a_stream_ends_whole_and_its_connection_serves_the_next(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    probe.go.set()
    async with serving(probe.spec("lmi-http1")) as house:
        line = house.line("http1")
        for number in range(3):
            call = await house.call("lmi-http1", line=line)
            assert await call.rest() == ([6 * number + i for i in range(6)], Over("complete"))
        assert (house.connections, house.endings) == (1, {"complete": 3})


async def test_a_head_request_has_a_head_only(autojump_clock: Any) -> None:
    async with serving() as house:
        line = house.line("http1")
        for stream in (1, 2):
            await line.send(raw(stream, b"HEAD", "/v2/health/live"), End(stream=stream))
            assert (await line.peer.read_answer(stream))[::2] == (200, b"")
        assert house.endings == {"complete": 2}


async def test_an_http10_client_gets_a_stream_that_ends_with_its_connection(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    probe.go.set()
    async with serving(probe.spec("lmi-http1")) as house:
        line = house.line("http1")
        line.transport.try_send([asks("probe", 6).replace(b"HTTP/1.1", b"HTTP/1.0")])
        await line.over_raw()
        head, _, body = bytes(line.transport.read).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert body.count(b"\n") == 6
        assert house.endings == {"complete": 1}


async def test_a_garbled_first_request_is_answered(autojump_clock: Any) -> None:
    async with serving() as house:
        line = house.line("http1")
        line.transport.try_send([b"GET / HTTP/9.9\r\n\r\n"])
        ((status, body),) = await answers(line, 1)
        assert (status, b"error" in body) == (505, True)
        await line.over_raw()
        await trio.sleep(3)  # it lingers for what the client may still be sending
        assert house.connections == 0


async def test_a_chunk_that_breaks_the_framing_is_a_bad_request(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("lmi-http1")) as house:
        line = house.line("http1")
        head = b"POST /predictions/probe HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        line.transport.try_send([head + b"5\r\nhello\r\nnonsense\r\n"])
        ((status, _),) = await answers(line, 1)
        assert status == 400
        await line.over_raw()
        assert house.endings == {"refused": 1}


async def test_the_limit_of_requests_is_said_on_the_last_one(autojump_clock: Any) -> None:
    async with serving(config=limits(requests_per_connection=3)) as house:
        line = house.line("http1")
        told = []
        for stream in (1, 2, 3):
            await line.send(raw(stream, b"GET", "/v2/health/live"), End(stream=stream))
            await line.peer.read_answer(stream)
            told.append(b"connection: close" in line.transport.read)
        assert told == [False, False, True]
        assert isinstance(await line.event(4), ConnectionEnd)


async def test_a_client_that_reads_nothing_does_not_hold_its_finished_model(autojump_clock: Any) -> None:
    # the worker's slot is free when the model has returned, though the answer is not written yet
    async def brief(probe: Probe, session: Any) -> None:
        await probe.take(session)
        await probe.say(session, 20)

    probe = Probe(brief)
    async with serving(probe.spec("lmi-http1", capacity=1), Probe(counting, "x").spec("bidi"), capacity=100) as house:
        call = await house.call("lmi-http1")
        await house.still()
        counts = house.gateway.counts()
        assert (counts.exchanges, counts.slots_in_use, probe.returned) == (1, 0, 1)
        assert await call.rest() == (list(range(20)), Over("complete"))


UPGRADES = [
    ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"),  # curl --http2
    ("Connection: upgrade, keep-alive, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB"),
    ("Connection: Upgrade", "Upgrade: TLS/1.0"),  # RFC 2817
    ("Connection: Upgrade", "Upgrade: HTTP/2.0"),
    ("Connection: Upgrade", "Upgrade: websocket-to-be"),
    ("Connection: Upgrade", "Upgrade: h2c, websocket"),
    ("Connection: Upgrade",),
]


@pytest.mark.parametrize("fields", UPGRADES, ids=lambda fields: fields[-1] if len(fields) < 3 else fields[0])
async def test_an_upgrade_that_is_not_served_is_ignored_and_the_connection_stays(
    fields: tuple[str, ...], autojump_clock: Any
) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("lmi-http1")) as house:
        line = house.line("http1")
        body = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 5}}).encode()
        requests = [wire_bytes("/ping", b"", *fields), wire_bytes("/none", b"", *fields)]
        requests += [wire_bytes("/predictions/probe", body, *fields), wire_bytes("/ping")]
        for request, status in zip(requests, (200, 404, 200, 200), strict=True):
            line.transport.try_send([request])
            with at_once():
                assert [found for found, _ in await answers(line, 1)] == [status]


async def test_what_reads_the_body_of_a_request_with_such_an_upgrade_finds_its_end(autojump_clock: Any) -> None:
    async with serving() as house:

        async def reading(exchange: Any) -> None:
            assert bytes(await receive_body(exchange, 10, setting="x")) == b""
            exchange.outbound.respond(200, [], b"all")

        house.gateway.router.add(Row("GET", "/read", reading))
        line = house.line("http1")
        line.transport.try_send([wire_bytes("/read", b"", *UPGRADES[0]) + wire_bytes("/read")])
        with at_once():
            assert await answers(line, 2) == [(200, b"all")] * 2


async def test_a_websocket_that_is_refused_ends_its_connection(autojump_clock: Any) -> None:
    async with serving() as house:
        line = house.line("http1")
        line.transport.try_send([wire_bytes("/ping", b"", "Connection: Upgrade", "Upgrade: websocket")])
        with at_once():
            assert [status for status, _ in await answers(line, 1)] == [400]
            assert b"connection: close" in bytes(line.transport.read)
