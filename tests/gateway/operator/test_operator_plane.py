"""The operator plane's own port: it is there first and last, and nothing that happens on it reaches the data plane."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import pytest
import trio
from hypercorn.protocol.h11 import H11Protocol
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.config import Config, DrainConfig, LimitsConfig, ListenConfig, OperatorConfig
from gateway.config.problem import ConfigError
from gateway.gateway import Gateway
from gateway.net.listeners import Listener
from gateway.operator.app import operator_app
from gateway.operator.plane import operating
from tests.gateway.catalog.test_repository import swept
from tests.gateway.operator.operators import curl, operated
from tests.gateway.promises import Probe, answering, pausing, silent
from tests.ports import free_port

TOKEN = "correct-horse-battery"
ASK = b'{"inputs": "x", "stream": true, "parameters": {"max_new_tokens": 65536}}'


async def called(gateway: Gateway) -> trio.SocketStream:
    """A call of the model that has begun."""
    stream = await trio.open_tcp_stream("127.0.0.1", gateway.port)
    head = f"POST /predictions/probe HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(ASK)}\r\n\r\n"
    await stream.send_all(head.encode() + ASK)
    return stream


async def until(holds: Any) -> None:
    """Lets sockets and tasks run until it is so."""
    while not holds():
        await wait_all_tasks_blocked(0.001)


async def test_it_has_a_port_of_its_own_which_demands_the_token() -> None:
    async with operated(Probe(silent).spec("lmi-http1"), token=TOKEN) as gateway:
        assert gateway.operator_port not in (0, gateway.port)
        assert (await curl(gateway.operator_port, "GET", "/health/ready")).json == {"ready": True}
        assert (await curl(gateway.operator_port, "GET", "/models")).status == 401
        told = await curl(gateway.operator_port, "GET", "/models/probe", authorization=f"Bearer {TOKEN}")
        assert told.json["state"] == "ready"
        assert "server" not in told.headers
        assert (await curl(gateway.port, "GET", "/models", authorization=f"Bearer {TOKEN}")).status == 404


async def test_without_a_port_there_is_none() -> None:
    async with operated(Probe(silent).spec("lmi-http1"), port=-1) as gateway:
        assert gateway.operator_port == 0
        assert (await curl(gateway.port, "GET", "/health/live")).status == 404


async def test_a_port_that_is_taken_stops_no_model_and_is_tried_again(caplog: Any, mock_clock: MockClock) -> None:
    caplog.set_level(logging.INFO, "gateway")
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as other:
        probe = Probe(answering)
        probe.go.set()
        async with operated(probe.spec("lmi-http1"), port=port) as gateway:
            assert gateway.operator_port == 0
            (said,) = [r for r in caplog.records if r.message.startswith("the operator plane does not listen")]
            assert f"127.0.0.1:{port}: Address already in use; operator.port sets another" in said.__dict__["reason"]
            assert (await curl(gateway.port, "POST", "/predictions/probe", b'{"inputs": "x"}')).status == 200
            mock_clock.jump(1)
            await wait_all_tasks_blocked()
            assert [r.__dict__["again_in"] for r in caplog.records if r.message == said.message] == [1, 2]
            other.close()
            mock_clock.jump(2)
            await wait_all_tasks_blocked()
            assert gateway.operator_port == port
            assert (await curl(port, "GET", "/health/live")).status == 200


async def test_a_plane_that_fails_begins_anew_and_models_do_not_notice(
    caplog: Any, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    accept, failures = Listener.accept, [RuntimeError("a bug of ours")]

    async def fails(listener: Listener, *arguments: Any) -> None:
        if listener.port == gateway.operator_port and failures:
            await trio.lowlevel.checkpoint()
            raise failures.pop()
        await accept(listener, *arguments)

    monkeypatch.setattr(Listener, "accept", fails)
    probe = Probe(answering)
    probe.go.set()
    gateway = Gateway(Config(listen=ListenConfig(port=0), operator=OperatorConfig(port=0)), [probe.spec("lmi-http1")])
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        await wait_all_tasks_blocked()
        assert gateway.operator_port == 0
        (said,) = [record for record in caplog.records if record.message == "the operator plane failed, and begins anew"]
        assert said.exc_info
        assert (await curl(gateway.port, "POST", "/predictions/probe", b'{"inputs": "x"}')).status == 200
        mock_clock.jump(1)
        await wait_all_tasks_blocked()
        assert (await curl(gateway.operator_port, "GET", "/health/live")).status == 200
        nursery.cancel_scope.cancel()


async def test_a_connection_that_cannot_even_begin_is_one_line_of_the_log(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operated(Probe(silent).spec("lmi-http1")) as gateway:
        with monkeypatch.context() as broken:
            broken.setattr("gateway.operator.plane._Stream", None)
            async with await trio.open_tcp_stream("127.0.0.1", gateway.operator_port) as stream:
                assert await stream.receive_some() == b""
        assert "a connection of the operator plane failed" in [record.message for record in caplog.records]
        assert (await curl(gateway.operator_port, "GET", "/health/live")).status == 200


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
H2C = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


async def test_the_preface_of_http2_is_refused(caplog: Any) -> None:
    async with operated(Probe(silent).spec("lmi-http1")) as gateway:
        async with await trio.open_tcp_stream("127.0.0.1", gateway.operator_port) as stream:
            await stream.send_all(PREFACE)
            said = b"".join([piece async for piece in stream])
        assert said.startswith(b"HTTP/1.1 505 ")
        assert said.count(b"HTTP/") == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_request_that_asks_for_h2c_is_answered_as_any_other() -> None:
    asked = b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n" + H2C + b"\r\n"
    async with (
        operated(Probe(silent).spec("lmi-http1")) as gateway,
        await trio.open_tcp_stream("127.0.0.1", gateway.operator_port) as stream,
    ):
        await stream.send_all(asked)
        assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 200 ")


async def test_what_breaks_in_a_connection_breaks_that_one_alone(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Probe(pausing)
    async with operated(probe.spec("lmi-http1")) as gateway:
        live = await called(gateway)
        await until(lambda: probe.sent == 3)
        kept = await trio.open_tcp_stream("127.0.0.1", gateway.operator_port)
        with monkeypatch.context() as broken:
            broken.setattr(H11Protocol, "handle", _breaking)
            for _ in range(3):
                async with await trio.open_tcp_stream("127.0.0.1", gateway.operator_port) as stream:
                    await stream.send_all(b"GET /models HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    assert await stream.receive_some() == b""
        failed = [record for record in caplog.records if record.message == "connection failed"]
        assert [record.__dict__["server"] for record in failed] == ["hypercorn"] * 3
        await kept.send_all(b"GET /models/probe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        async with kept:
            answer = b"".join([piece async for piece in kept])
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["slots_in_use"] == 1
        probe.go.set()
        async with live:
            whole = b"".join([piece async for piece in live])
        assert b"00000005" in whole


async def _breaking(self: H11Protocol, event: Any) -> None:
    raise RuntimeError("a bug of hypercorn's")


async def test_it_stays_through_a_drain_and_goes_last(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "gateway")
    probe, diary = Probe(pausing), list[str]()
    spec = probe.spec("lmi-http1")
    port = free_port()
    async with operated(spec, port=port, config=Config(drain=DrainConfig(timeout=60))) as gateway:
        live = await called(gateway)
        await until(lambda: probe.sent == 3)
        async with trio.open_nursery() as nursery:

            async def drain() -> None:
                answer = await curl(port, "POST", "/drain", b'{"wait": true}')
                diary.append("told")
                assert answer.json["report"]["endings"] == {"complete": 1}

            nursery.start_soon(drain)
            await until(lambda: gateway.draining)
            ready = await curl(port, "GET", "/health/ready")
            assert (ready.status, ready.json["reasons"]) == (503, ["draining"])
            assert (await curl(port, "GET", "/streams")).json["live"] == 1
            probe.go.set()
            async with live:
                async for _ in live:
                    pass
            await gateway.stopped()
            diary.append("over")
        assert diary == ["told", "over"]
        assert gateway.operator_port == 0
        with pytest.raises(OSError, match=r"refused|all attempts"):
            await trio.open_tcp_stream("127.0.0.1", port)


async def test_a_client_that_stops_reading_keeps_nobody_at_the_end(caplog: Any, mock_clock: MockClock) -> None:
    caplog.set_level(logging.INFO, "gateway")
    async with operated(Probe(silent).spec("lmi-http1")) as gateway:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", gateway.operator_port))
        with sock:
            sock.setblocking(False)
            asked = b"GET /models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1000
            for _ in range(200):  # until neither side takes more: hypercorn waits for this reader
                await wait_all_tasks_blocked(0.005)
                try:
                    sock.send(asked)
                except BlockingIOError:
                    break
            else:
                pytest.fail("the plane reads on for a client that does not")
            gateway.begin_drain()
            await wait_all_tasks_blocked(0.01)
            assert not gateway.over
            mock_clock.jump(1.5)
            await wait_all_tasks_blocked(0.01)
            assert not gateway.over
            assert [record.message for record in caplog.records].count("operator plane") == 1  # it does not listen anew
            mock_clock.jump(0.5)
            await gateway.stopped()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel does not end it")
async def test_a_client_that_stops_reading_is_ended_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Any]()
    wrapped = trio.socket.from_stdlib_socket

    def seen(sock: socket.socket) -> Any:
        asked.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        return wrapped(sock)

    async with operated(Probe(silent).spec("lmi-http1"), config=Config(limits=LimitsConfig(write_stall=7))) as gateway:
        monkeypatch.setattr(trio.socket, "from_stdlib_socket", seen)
        assert (await curl(gateway.operator_port, "GET", "/health/live")).status == 200
    assert asked == [7000]


async def test_wrong_tokens_end_the_server_at_its_start() -> None:
    gateway = Gateway(Config(listen=ListenConfig(port=0), operator=OperatorConfig(port=0, token_file="/nowhere/at/all")))
    with pytest.raises(ConfigError, match=r"operator\.token_file"):
        await gateway.serve()


def test_the_application_is_made_without_a_port() -> None:
    assert operator_app(Gateway(Config())).routes


async def test_the_event_stream_goes_on_through_a_drain_and_ends_with_its_report() -> None:
    async with operated(Probe(silent).spec("lmi-http1"), config=Config(drain=DrainConfig(timeout=0))) as gateway:
        live = await called(gateway)
        await until(lambda: gateway.counts().exchanges)
        stream = await trio.open_tcp_stream("127.0.0.1", gateway.operator_port)
        async with live, stream:
            await stream.send_all(b"GET /streams/events HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            came = await stream.receive_some()
            while b"event: opened" not in came:
                came += await stream.receive_some()
            gateway.begin_drain()
            async for piece in live:
                assert piece
            async for piece in stream:
                came += piece
        names = [line.removeprefix(b"event: ") for line in came.split(b"\n") if line.startswith(b"event: ")]
        assert [name for name in names if name not in (b"models", b"stats", b"draining")] == [
            b"opened",
            b"closed",
            b"drained",
        ]
        assert came.endswith(b"0\r\n\r\n")


async def test_a_plane_that_is_cancelled_at_any_step_leaves_no_socket() -> None:
    port = free_port()
    gateway = Gateway(Config(operator=OperatorConfig(port=port)))
    cancelled = 0

    async def operate() -> None:
        async with operating(gateway):
            assert (await curl(gateway.operator_port, "GET", "/health/live")).status == 200

    for step in range(1, 500):
        fired, caught = await swept(operate, step)
        cancelled += caught
        assert gateway.operator_port == 0
        socket.create_server(("127.0.0.1", port)).close()
        if not fired:
            break
    assert not fired
    assert cancelled >= 20
