"""A connection misses no byte, no end and no room, with every source that tells it when its transport is ready."""

from __future__ import annotations

import hashlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.config import TLSConfig
from gateway.errors import Ending
from gateway.net.readiness import Poller
from gateway.net.tls_context import client_context, development_certificate, server_context
from tests.gateway.net.told import KiB, MiB, Straddling, pattern, reset, secured, served, serving, tcp_pair, unix_pair, until


@pytest.fixture(params=["polled", "waited"], name="source")
def _source(request: pytest.FixtureRequest) -> str:
    """The kinds of `gateway.net.readiness`."""
    if request.param == "polled" and not Poller.available:
        pytest.skip("needs epoll")
    return str(request.param)


@pytest.fixture(params=[unix_pair, tcp_pair], ids=["unix", "tcp"], name="pair")
def _pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = request.param()
    yield ours, theirs
    ours.close()
    theirs.close()


# -- reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 64 * KiB - 1, 64 * KiB, 100_000])
@pytest.mark.parametrize("registered", [True, False])
async def test_data_and_the_end_in_one_edge_are_read_to_the_end(source: str, pair: Any, size: int, registered: bool) -> None:
    ours, theirs = pair
    async with serving(source) as server:
        if registered:
            wire = served(server, ours)
            await wait_all_tasks_blocked()
        theirs.sendall(b"x" * size)
        theirs.close()
        if not registered:
            wire = served(server, ours)
        await until(lambda: wire.eof)
        assert len(wire.received) == size


async def test_each_message_is_read_when_it_comes_and_the_end_alone_too(source: str, pair: Any) -> None:
    ours, theirs = pair
    async with serving(source) as server:
        wire = served(server, ours)
        for n in range(1, 30):
            theirs.sendall(b"message!")
            await until(lambda: len(wire.received) == 8 * n)  # noqa: B023
            await wait_all_tasks_blocked()
        theirs.shutdown(socket.SHUT_WR)
        await until(lambda: wire.eof)


async def test_what_arrives_while_reading_is_paused_is_read_when_it_goes_on(source: str, pair: Any) -> None:
    ours, theirs = pair
    async with serving(source) as server:
        wire = served(server, ours)
        for n in range(1, 4):
            wire.may = False
            theirs.sendall(b"early")
            await wait_all_tasks_blocked()
            assert len(wire.received) == 5 * (n - 1)
            wire.may = True
            wire.connection.read_more()
            server.write()
            await until(lambda: len(wire.received) == 5 * n)  # noqa: B023


async def test_the_end_that_comes_while_reading_is_paused_is_read_after_the_data(source: str, pair: Any) -> None:
    ours, theirs = pair
    async with serving(source) as server:
        wire = served(server, ours)
        await wait_all_tasks_blocked()
        wire.may = False
        theirs.sendall(b"bye")
        await wait_all_tasks_blocked()
        theirs.close()
        await wait_all_tasks_blocked()
        assert (bytes(wire.received), wire.eof) == (b"", False)
        wire.may = True
        wire.connection.read_more()
        server.write()
        assert bytes(wire.received) == b"bye"
        assert wire.eof or source == "waited", "an edge has told of the end; who waits looks once more"
        await until(lambda: wire.eof)


async def test_much_more_than_one_read_is_read_without_another_edge(source: str, pair: Any) -> None:
    ours, theirs = pair
    theirs.setblocking(False)
    async with serving(source) as server:
        wire = served(server, ours)
        sent = 0
        while sent < 4 * MiB:
            try:
                sent += theirs.send(b"y" * MiB)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(theirs)
        await until(lambda: len(wire.received) == sent)


async def test_urgent_data_does_not_hide_what_comes_behind_it(source: str) -> None:
    """A receive stops short at the mark; the urgent byte itself is not in the stream."""
    ours, theirs = tcp_pair()
    async with serving(source) as server:
        wire = served(server, ours)
        for n in range(1, 4):
            await wait_all_tasks_blocked()
            theirs.sendall(b"before")
            theirs.send(b"!", socket.MSG_OOB)
            theirs.sendall(b"after")
            await until(lambda: len(wire.received) == 11 * n)  # noqa: B023
        assert bytes(wire.received) == b"beforeafter" * 3
    theirs.close()


async def test_a_reset_ends_the_connection(source: str) -> None:
    ours, theirs = tcp_pair()
    async with serving(source) as server:
        wire = served(server, ours)
        await wait_all_tasks_blocked()
        theirs.sendall(b"x")
        reset(theirs)
        await until(lambda: wire.closed)
        assert wire.connection._lost is Ending.CANCELLED
        assert server.connections == set()
        assert server.hub is None or server.hub._owners == {}


async def test_one_that_has_said_everything_hears_what_still_comes_and_the_end_of_it(source: str, pair: Any) -> None:
    ours, theirs = pair
    async with serving(source) as server:
        wire = served(server, ours)
        wire.over = True
        wire.connection.output_ready()
        server.write()
        for _ in range(3):
            await wait_all_tasks_blocked()
            theirs.sendall(b"late")
        await wait_all_tasks_blocked()
        assert not wire.closed
        theirs.close()
        await until(lambda: wire.closed)
        assert not wire.received


async def test_a_connection_that_is_over_is_told_nothing_more(source: str, pair: Any) -> None:
    async with serving(source) as server:
        wire = served(server, pair[0])
        await wait_all_tasks_blocked()
        assert server.telling == 1
        wire.connection.lost()
        await until(lambda: server.telling == 0)


async def test_a_transport_that_cannot_be_waited_for_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: object) -> None:
        raise OSError("no room for one more")

    ours, theirs = unix_pair()
    async with serving("waited") as server:
        monkeypatch.setattr("trio.lowlevel.wait_readable", refuse)
        wire = served(server, ours)
        await until(lambda: wire.closed)
        assert server.connections == set()
    theirs.close()


# -- writing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unsent", [0, 1, 16 * KiB])
@pytest.mark.parametrize("bite", [1000, 64 * KiB])
async def test_a_full_socket_is_written_to_the_end_and_in_order_for_a_slow_reader(
    source: str, unsent: int, bite: int
) -> None:
    ours, theirs = tcp_pair(SO_SNDBUF=8 * KiB, SO_RCVBUF=8 * KiB)
    theirs.setblocking(False)
    data = pattern(MiB if bite == 1000 else 4 * MiB)
    got = hashlib.sha256()
    async with serving(source) as server:
        wire = served(server, ours, unsent=unsent)
        wire.outgoing.append(data)
        wire.connection.output_ready()
        server.write()
        assert wire.connection.blocked
        n = 0
        while n < len(data):
            try:
                piece = theirs.recv(bite)
            except BlockingIOError:
                with trio.fail_after(60):
                    await trio.lowlevel.wait_readable(theirs)
                continue
            assert piece, f"ended after {n} of {len(data)} bytes"
            got.update(piece)
            n += len(piece)
            if n % 7 == 0:
                await trio.lowlevel.checkpoint()
        await until(lambda: not wire.connection.blocked)
    assert got.digest() == hashlib.sha256(data).digest()
    theirs.close()


async def test_a_peer_that_resets_while_the_socket_is_full_ends_the_connection(source: str) -> None:
    ours, theirs = tcp_pair(SO_SNDBUF=8 * KiB, SO_RCVBUF=8 * KiB)
    async with serving(source) as server:
        wire = served(server, ours)
        wire.may = False  # so that only the writer can notice
        wire.outgoing.append(pattern(MiB))
        wire.connection.output_ready()
        server.write()
        await wait_all_tasks_blocked()
        reset(theirs)
        await until(lambda: wire.closed)


# -- TLS -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="contexts")
def _contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    config = TLSConfig(dev=True, dev_dir=str(tmp_path_factory.mktemp("tls")))
    return server_context(config), client_context(development_certificate(config).ca)


@pytest.mark.parametrize("size", [1, 16 * KiB, 100_000])
@pytest.mark.parametrize("bite", [7, 1000, 16 * KiB + 1, 64 * KiB])
async def test_records_that_straddle_reads_are_read_to_the_end(source: str, contexts: Any, size: int, bite: int) -> None:
    ours, theirs = tcp_pair()
    a, b = await secured(ours, theirs, contexts)
    a._below = Straddling(a._below, bite)  # type: ignore[arg-type]
    data = pattern(size + 3)[:size]
    async with serving(source) as server:
        wire = server.serve(a, ours.fileno())
        sent = 0
        while sent < size or b.pending:
            n = b.try_send([data[sent:]] if sent < size else [])
            sent += n
            if not n:
                await b.wait_writable()
        await until(lambda: len(wire.received) == size)
        assert wire.received == data
        b.send_eof()
        b.close()
        await until(lambda: wire.eof)


async def test_a_half_record_waits_for_its_other_half(source: str, contexts: Any) -> None:
    ours, theirs = tcp_pair()
    a, b = await secured(ours, theirs, contexts)
    async with serving(source) as server:
        wire = server.serve(a, ours.fileno())
        b._tls.write(b"one record of one message")
        cipher = b._outgoing.read()
        for i, byte in enumerate(cipher):
            assert not wire.received
            theirs.send(bytes((byte,)))
            if i % 5 == 0:
                await wait_all_tasks_blocked()
        await until(lambda: bytes(wire.received) == b"one record of one message")
        b.close()


async def test_a_full_socket_under_tls_is_written_to_the_end_and_in_order(source: str, contexts: Any) -> None:
    ours, theirs = tcp_pair(SO_SNDBUF=8 * KiB, SO_RCVBUF=8 * KiB)
    a, b = await secured(ours, theirs, contexts)
    data, got = pattern(2 * MiB), bytearray()
    async with serving(source) as server:
        wire = server.serve(a, ours.fileno())
        wire.outgoing.append(data)
        wire.connection.output_ready()
        server.write()
        assert wire.connection.blocked
        buffer = memoryview(bytearray(10_000))
        while len(got) < len(data):
            n = b.try_receive_into(buffer)
            if n is None:
                with trio.fail_after(60):
                    await b.wait_readable()
            else:
                got += buffer[:n]
        assert got == data
        b.close()


async def test_what_came_with_the_handshake_is_read(source: str, contexts: Any) -> None:
    """The client's first request is in the TLS object before anybody watches the socket."""
    ours, theirs = tcp_pair()
    a, b = await secured(ours, theirs, contexts)
    assert b.try_send([b"early"]) == 5
    await trio.lowlevel.wait_readable(ours)
    assert a._pull()
    async with serving(source) as server:
        wire = server.serve(a, ours.fileno())
        await until(lambda: bytes(wire.received) == b"early")
        b.close()
