"""The read hub over the kernel's sockets: no byte, no end and no room is missed, and nobody is told of another's."""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway import client
from gateway.config import Config, ListenConfig, TLSConfig
from gateway.core.connection import Connection
from gateway.core.runner import Runner
from gateway.core.server import Server
from gateway.errors import Ending, GatewayError, TransportLost
from gateway.gateway import Gateway
from gateway.net.readiness import Poller
from gateway.net.tls_context import client_context, development_certificate, server_context
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import SocketTransport, Transport
from models.adapt import blocking, spec_of
from models.messages import Prompt
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Sent

pytestmark = pytest.mark.skipif(not Poller.available, reason="needs epoll")

KiB, MiB = 1024, 1024 * 1024


# -- a connection with a wire that has no protocol ---------------------------------------------------------------------


class Wire:
    """Keeps what is received, sends what it is given."""

    name, windowed, exclusive, over = "bytes", True, False, False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.received = bytearray()
        self.may, self.eof, self.echo = True, False, False
        self.outgoing: list[bytes] = []
        self.said = 0
        self.closed = False

    def receive_buffer(self, scratch: memoryview) -> memoryview | None:
        return scratch if self.may else None

    def buffer_updated(self, n: int) -> None: ...

    def receive_data(self, data: memoryview) -> None:
        self.received += data
        if self.echo:
            self.outgoing.append(bytes(data))
            self.connection.output_ready()

    def receive_eof(self) -> None:
        self.eof = True

    def pump(self, at_most: int) -> bool:
        return True

    def protocol_error(self, error: Exception) -> None: ...

    def data_to_send(self, at_most: int) -> list[Buffer]:
        data = b"".join(self.outgoing)
        self.outgoing = [data[at_most:]] if len(data) > at_most else []
        self.said += len(data[:at_most])
        return [data[:at_most]] if data else []

    def data_sent(self) -> Sent:
        return Sent()

    def tick(self, now: float) -> None: ...
    def drain(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class House:
    """A leader and the turns of its connections, without exchanges."""

    def __init__(self, hub: Poller) -> None:
        self.hub = hub
        self.server = Server(Config(), nothing, nothing)
        self.server.begin()
        self.server.run_by(Runner(self.work, lambda _, e: GatewayError(str(e)), nothing))

    async def work(self, exchange: Any) -> None: ...

    def write(self) -> None:
        while self.server.runner.write():
            pass

    def serve(self, transport: Transport, descriptor: int, *, begin: bool = True) -> Wire:
        watched = self.hub.watch(descriptor)
        connection = Connection(self.server, transport, Wire, watched)  # type: ignore[arg-type]
        self.server.connections.add(connection)
        if begin:
            connection.begin()
            watched.tell(connection)
        return connection.wire  # type: ignore[return-value]


def nothing(*_: object) -> None:
    """Nobody is told."""


@asynccontextmanager
async def serving() -> AsyncIterator[House]:
    hub = Poller()
    server = House(hub)
    try:
        async with trio.open_nursery() as nursery:
            server.server.runner.begin(nursery, hub)
            yield server
            for connection in list(server.server.connections):
                connection.lost()
            nursery.cancel_scope.cancel()
    finally:
        hub.close()


def unix_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def tcp_pair(**options: int) -> tuple[socket.socket, socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        for name, value in options.items():
            listener.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        listener.listen()
        theirs = socket.socket()
        for name, value in options.items():
            theirs.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        theirs.connect(listener.getsockname())
        ours, _ = listener.accept()
    theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


@pytest.fixture(params=[unix_pair, tcp_pair], ids=["unix", "tcp"], name="pair")
def _pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = request.param()
    yield ours, theirs
    ours.close()
    theirs.close()


def served(server: House, ours: socket.socket, **options: int) -> Wire:
    return server.serve(SocketTransport(ours, **options), ours.fileno())


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def until(true: Callable[[], bool]) -> None:
    """What the kernel does between two sockets takes its time."""
    with trio.fail_after(60):
        while not true():
            await trio.lowlevel.checkpoint()


# -- reading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 64 * KiB - 1, 64 * KiB, 100_000])
@pytest.mark.parametrize("registered", [True, False])
async def test_data_and_the_end_in_one_edge_are_read_to_the_end(pair: Any, size: int, registered: bool) -> None:
    ours, theirs = pair
    async with serving() as server:
        if registered:
            wire = served(server, ours)
            await wait_all_tasks_blocked()
        theirs.sendall(b"x" * size)
        theirs.close()
        if not registered:
            wire = served(server, ours)
        await until(lambda: wire.eof)
        assert len(wire.received) == size


async def test_each_message_is_read_when_it_comes_and_the_end_alone_too(pair: Any) -> None:
    ours, theirs = pair
    async with serving() as server:
        wire = served(server, ours)
        for n in range(1, 30):
            theirs.sendall(b"message!")
            await until(lambda: len(wire.received) == 8 * n)  # noqa: B023
            await wait_all_tasks_blocked()
        theirs.shutdown(socket.SHUT_WR)
        await until(lambda: wire.eof)


async def test_what_arrives_while_reading_is_paused_is_read_when_it_goes_on(pair: Any) -> None:
    ours, theirs = pair
    async with serving() as server:
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


async def test_the_end_that_comes_while_reading_is_paused_is_read_after_the_data(pair: Any) -> None:
    ours, theirs = pair
    async with serving() as server:
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
        assert (bytes(wire.received), wire.eof) == (b"bye", True)


async def test_much_more_than_one_read_is_read_without_another_edge(pair: Any) -> None:
    ours, theirs = pair
    theirs.setblocking(False)
    async with serving() as server:
        wire = served(server, ours)
        sent = 0
        while sent < 4 * MiB:
            try:
                sent += theirs.send(b"y" * MiB)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(theirs)
        await until(lambda: len(wire.received) == sent)


async def test_urgent_data_does_not_hide_what_comes_behind_it() -> None:
    """A receive stops short at the mark; the urgent byte itself is not in the stream."""
    ours, theirs = tcp_pair()
    async with serving() as server:
        wire = served(server, ours)
        for n in range(1, 4):
            await wait_all_tasks_blocked()
            theirs.sendall(b"before")
            theirs.send(b"!", socket.MSG_OOB)
            theirs.sendall(b"after")
            await until(lambda: len(wire.received) == 11 * n)  # noqa: B023
        assert bytes(wire.received) == b"beforeafter" * 3
    theirs.close()


async def test_a_reset_ends_the_connection() -> None:
    ours, theirs = tcp_pair()
    async with serving() as server:
        wire = served(server, ours)
        await wait_all_tasks_blocked()
        theirs.sendall(b"x")
        reset(theirs)
        await until(lambda: wire.closed)
        assert wire.connection._lost is Ending.CANCELLED
        assert (server.hub._owners, server.server.connections) == ({}, set())


# -- writing -------------------------------------------------------------------------------------------------------------


def pattern(size: int) -> bytes:
    return b"".join(struct.pack(">I", n) for n in range(size // 4))


@pytest.mark.parametrize("unsent", [0, 1, 16 * KiB])
@pytest.mark.parametrize("bite", [1000, 64 * KiB])
async def test_a_full_socket_is_written_to_the_end_and_in_order_for_a_slow_reader(unsent: int, bite: int) -> None:
    ours, theirs = tcp_pair(SO_SNDBUF=8 * KiB, SO_RCVBUF=8 * KiB)
    theirs.setblocking(False)
    data = pattern(MiB if bite == 1000 else 4 * MiB)
    got = hashlib.sha256()
    async with serving() as server:
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
            got.update(piece)
            n += len(piece)
            if n % 7 == 0:
                await trio.lowlevel.checkpoint()
        await until(lambda: not wire.connection.blocked)
    assert got.digest() == hashlib.sha256(data).digest()
    theirs.close()


async def test_a_peer_that_resets_while_the_socket_is_full_ends_the_connection() -> None:
    ours, theirs = tcp_pair(SO_SNDBUF=8 * KiB, SO_RCVBUF=8 * KiB)
    async with serving() as server:
        wire = served(server, ours)
        wire.may = False  # so that only the writer can notice
        wire.outgoing.append(pattern(MiB))
        wire.connection.output_ready()
        server.write()
        await wait_all_tasks_blocked()
        reset(theirs)
        await until(lambda: wire.closed)


# -- one number after the other ------------------------------------------------------------------------------------------


async def test_a_stale_event_harms_nobody_who_has_its_number_now(pair: Any) -> None:
    ours, theirs = pair
    hub = Poller()
    server = House(hub)
    old = served(server, ours)
    theirs.sendall(b"for the old one")
    theirs.shutdown(socket.SHUT_WR)
    assert hub.look()  # events wait now
    number = ours.fileno()
    old.connection.lost()
    new_ours, new_theirs = unix_pair()
    if new_ours.fileno() == number:
        again = new_ours
    else:
        os.dup2(new_ours.fileno(), number)
        again = socket.socket(fileno=number)
        new_ours.close()
    new = served(server, again)
    while hub.tell(1):
        pass
    assert (bytes(new.received), new.eof) == (b"", False)
    new_theirs.sendall(b"hello")
    await hub.wait()
    while hub.tell(1):
        pass
    assert bytes(new.received) == b"hello"
    new_theirs.close()
    await hub.wait()
    while hub.tell(1):
        pass
    assert new.eof
    new.connection.lost()
    hub.close()


async def test_a_stale_event_of_a_number_that_nobody_has_is_dropped(pair: Any) -> None:
    ours, theirs = pair
    hub = Poller()
    old = served(House(hub), ours)
    theirs.sendall(b"x")
    assert hub.look()
    old.connection.lost()
    assert hub.tell(1)
    assert not hub.tell(1)
    assert not hub.look()
    hub.close()


async def test_a_place_that_is_over_tells_nobody_however_often_it_is_said(pair: Any) -> None:
    ours, _ = pair
    hub = Poller()
    watched = hub.watch(ours.fileno())
    watched.forget()
    watched.tell(SimpleNamespace(readable=pytest.fail, writable=pytest.fail))
    watched.forget()
    assert not hub.look()
    hub.close()


async def test_two_places_over_in_any_order_leave_the_other_alone(pair: Any) -> None:
    ours, theirs = pair
    async with serving() as server:
        first, second = served(server, ours), served(server, theirs)
        first.connection.lost()
        await until(lambda: second.eof)
        first.connection.lost()
        assert set(server.hub._owners) == {theirs.fileno()}


def test_a_socket_that_cannot_be_registered_leaves_no_owner(tmp_path: Any) -> None:
    with open(tmp_path / "file", "wb") as file:  # epoll takes no regular files
        hub = Poller()
        watched = hub.watch(file.fileno())
        with pytest.raises(OSError):
            watched.tell(SimpleNamespace())
        watched.forget()
        hub.close()


# -- many ----------------------------------------------------------------------------------------------------------------


async def test_three_hundred_sockets_that_are_ready_at_once_are_all_told_and_others_run_in_between() -> None:
    pairs = [unix_pair() for _ in range(300)]
    async with serving() as server:
        wires = [served(server, ours) for ours, _ in pairs]
        for wire in wires:
            wire.echo = True
        await wait_all_tasks_blocked()
        for turn in range(1, 4):
            for _, theirs in pairs:
                theirs.sendall(b"0123456789")
            await until(lambda: all(len(wire.received) == 10 * turn for wire in wires))  # noqa: B023
            await until(lambda: all(wire.said == 10 * turn for wire in wires))  # noqa: B023
        for _, theirs in pairs:
            assert theirs.recv(100) == b"0123456789" * 3
            theirs.close()
        await until(lambda: all(wire.eof for wire in wires))
    for ours, _ in pairs:
        ours.close()


async def test_a_cancelled_wait_loses_no_event(pair: Any) -> None:
    ours, theirs = pair
    hub = Poller()
    server = House(hub)
    wire = served(server, ours)
    while hub.look() and hub.tell(1):
        pass
    with trio.move_on_after(0) as scope:
        await hub.wait()
    assert scope.cancelled_caught
    theirs.sendall(b"x")
    with trio.CancelScope() as cancelled:
        cancelled.cancel()
        await hub.wait()
    await hub.wait()
    while hub.tell(1):
        pass
    assert bytes(wire.received) == b"x"
    wire.connection.lost()
    hub.close()


# -- TLS -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="contexts")
def _contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    config = TLSConfig(dev=True, dev_dir=str(tmp_path_factory.mktemp("tls")))
    return server_context(config), client_context(development_certificate(config).ca)


async def secured(ours: socket.socket, theirs: socket.socket, contexts: Any) -> tuple[TLSTransport, TLSTransport]:
    a = TLSTransport(SocketTransport(ours), contexts[0])
    b = TLSTransport(SocketTransport(theirs), contexts[1], server_side=False, hostname="localhost")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.handshake)
        await b.handshake()
    return a, b


class Straddling:
    """Ciphertext that arrives in pieces of another size than its records."""

    def __init__(self, below: SocketTransport, bite: int) -> None:
        self.below, self.bite = below, bite
        self.peer, self.alpn = below.peer, below.alpn
        self.short_is_dry = False
        self.wait_readable, self.wait_writable, self.hung_up = below.wait_readable, below.wait_writable, below.hung_up
        self.try_send, self.send_eof, self.close = below.try_send, below.send_eof, below.close
        self.pending = False

    def try_receive_into(self, buffer: memoryview) -> int | None:
        return self.below.try_receive_into(buffer[: self.bite])


@pytest.mark.parametrize("size", [1, 16 * KiB, 100_000])
@pytest.mark.parametrize("bite", [7, 1000, 16 * KiB + 1, 64 * KiB])
async def test_records_that_straddle_reads_are_read_to_the_end(contexts: Any, size: int, bite: int) -> None:
    ours, theirs = tcp_pair()
    a, b = await secured(ours, theirs, contexts)
    a._below = Straddling(a._below, bite)  # type: ignore[arg-type]
    data = pattern(size + 3)[:size]
    async with serving() as server:
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


async def test_a_half_record_waits_for_its_other_half(contexts: Any) -> None:
    ours, theirs = tcp_pair()
    a, b = await secured(ours, theirs, contexts)
    async with serving() as server:
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


async def test_a_full_socket_under_tls_is_written_to_the_end_and_in_order(contexts: Any) -> None:
    ours, theirs = tcp_pair(SO_SNDBUF=8 * KiB, SO_RCVBUF=8 * KiB)
    a, b = await secured(ours, theirs, contexts)
    data, got = pattern(2 * MiB), bytearray()
    async with serving() as server:
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


async def test_what_came_with_the_handshake_is_read(contexts: Any) -> None:
    """The client's first request is in the TLS object before anybody watches the socket."""
    ours, theirs = tcp_pair()
    a, b = await secured(ours, theirs, contexts)
    assert b.try_send([b"early"]) == 5
    await trio.lowlevel.wait_readable(ours)
    assert a._pull()
    async with serving() as server:
        wire = server.serve(a, ours.fileno())
        await until(lambda: bytes(wire.received) == b"early")
        b.close()


# -- a whole server --------------------------------------------------------------------------------------------------------


@blocking(False)
def quick(prompt: Prompt) -> str:
    return prompt.text


async def stuck(prompt: Prompt) -> str:
    await trio.sleep_forever()
    raise AssertionError


@asynccontextmanager
async def gateway(*models: Any) -> AsyncIterator[Gateway]:
    made = Gateway(Config(listen=ListenConfig(port=0)), [spec_of(model) for model in models])
    before = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as nursery:
        await nursery.start(made.serve)
        try:
            yield made
        finally:
            nursery.cancel_scope.cancel()
    assert trio.lowlevel.current_statistics().tasks_living == before
    assert made.counts().connections == made.counts().exchanges == made.counts().bytes_reserved == 0


def ask(stream: int, model: str, more: str = "") -> Any:
    body = b'{"inputs":"hi"%b}' % more.encode()
    return client.post(stream, f"/predictions/{model}", body, [(b"content-type", b"application/json")])


FOR_EVER = ',"stream":true,"parameters":{"max_new_tokens":65536}'


@contextmanager
def patience() -> Iterator[None]:
    with trio.fail_after(60):
        yield


async def test_a_second_stream_in_the_same_segment_is_answered_though_the_first_waits_for_ever() -> None:
    async with gateway(quick, stuck) as made, client.connect("127.0.0.1", made.port) as transport:
        peer = client.http2(transport)
        with patience():
            await peer.send(*ask(1, "stuck"), *ask(3, "quick"))
            assert (await peer.read_answer(3))[0] == 200
            await peer.send(*ask(5, "stuck"), *ask(7, "stuck"), *ask(9, "quick"))
            assert (await peer.read_answer(9))[0] == 200
        assert made.counts().exchanges == 3


async def test_models_that_wait_for_ever_stop_neither_accepting_nor_reading_nor_writing() -> None:
    async with gateway(quick, stuck) as made, trio.open_nursery() as nursery:

        async def wait() -> None:
            async with client.connect("127.0.0.1", made.port) as transport:
                await client.http1(transport).send(*ask(1, "stuck"))
                await trio.sleep_forever()

        for _ in range(20):
            nursery.start_soon(wait)
        with patience():
            while made.counts().exchanges < 20:
                await trio.lowlevel.checkpoint()
            async with client.connect("127.0.0.1", made.port) as transport:
                peer = client.http1(transport)
                for n in range(5):
                    await peer.send(*ask(n + 1, "quick"))
                    assert (await peer.read_answer(n + 1))[0] == 200
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("state", ["nobody", "idle", "waiting", "arriving", "streaming to nobody"])
@pytest.mark.parametrize("drained", [True, False])
async def test_a_server_that_ends_leaves_neither_task_nor_connection(state: str, drained: bool) -> None:
    given = 0

    async def endless(prompt: Prompt) -> AsyncIterator[str]:
        nonlocal given
        while True:
            given += 1
            yield "word " * 100

    async with gateway(quick, stuck, endless) as made, trio.open_nursery() as nursery:
        with patience():
            if state != "nobody":
                transport = await nursery.start(connected, made.port)
                peer = client.http1(transport)
                if state == "idle":
                    await peer.send(*ask(1, "quick"))
                    await peer.read_answer(1)
                elif state == "arriving":
                    transport.try_send([b"P"])
                elif state == "waiting":
                    await peer.send(*ask(1, "stuck"))
                else:
                    await peer.send(*ask(1, "endless", FOR_EVER))
                    await until(lambda: given > 30)
                    seen = -1
                    while seen != given:  # until its windows are full
                        seen = given
                        await wait_all_tasks_blocked(0.01)
                await until(lambda: made.counts().exchanges == (state in ("waiting", "streaming to nobody")))
            if drained:
                made.begin_drain()
                made.hurry()
            nursery.cancel_scope.cancel()  # its client leaves: nobody waits for a lingering close
        if drained:
            with patience():
                await made.stopped()


async def connected(port: int, *, task_status: trio.TaskStatus[Transport]) -> None:
    async with client.connect("127.0.0.1", port) as transport:
        task_status.started(transport)
        await trio.sleep_forever()


async def test_an_answer_that_a_woken_task_makes_is_written_though_nobody_tells() -> None:
    go = trio.Event()

    async def waits(prompt: Prompt) -> str:
        await go.wait()
        return "woken"

    async with gateway(waits) as made, client.connect("127.0.0.1", made.port) as transport:
        peer = client.http1(transport)
        with patience():
            await peer.send(*ask(1, "waits"))
            await until(lambda: made.counts().exchanges == 1)
            await wait_all_tasks_blocked()
            go.set()
            assert b"woken" in (await peer.read_answer(1))[2]


async def test_a_model_that_gives_up_a_generator_inside_of_a_timeout_is_answered_and_the_server_goes_on() -> None:
    kept: list[Any] = []

    async def timed() -> AsyncIterator[str]:
        with trio.move_on_after(0.01):
            yield "one"

    async def sloppy(prompt: Prompt) -> str:
        items = timed()
        kept.append(items)
        return await anext(aiter(items))

    async with gateway(sloppy) as made, client.connect("127.0.0.1", made.port) as transport:
        peer = client.http1(transport)
        with patience():
            for n in range(1, 4):
                await peer.send(*ask(n, "sloppy"))
                assert (await peer.read_answer(n))[0] == 200
                await trio.sleep(0.011)


# -- what is not so yet ----------------------------------------------------------------------------------------------------


class Due:
    """A connection that has its turn and is due again."""

    behind = False

    def __init__(self, gateway: Gateway, times: int) -> None:
        self.gateway, self.times = gateway, times

    def turn(self) -> None:
        self.times -= 1
        if self.times:
            self.gateway.server.turn_soon(self)


async def test_a_connection_that_is_due_again_and_again_does_not_keep_others_from_their_turn() -> None:
    async with gateway(quick) as made:
        await wait_all_tasks_blocked()
        due = Due(made, 1_000_000)
        made.server.turn_soon(due)
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        assert due.times > 0
        due.times = 1


async def test_a_connection_that_is_accepted_as_the_server_is_cancelled_is_closed() -> None:
    for _ in range(10):  # whoever comes first is Trio's dice
        ours, theirs = tcp_pair()
        theirs.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        await trio.lowlevel.wait_readable(ours)
        async with gateway(quick) as made:
            nursery = made.acceptor.nursery
            assert nursery is not None
            nursery.start_soon(made.acceptor.serve_socket, ours, None)
        assert ours.fileno() == -1
        theirs.close()


async def test_a_socket_that_the_hub_cannot_take_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    async with gateway(quick) as made:
        with monkeypatch.context() as patch:
            patch.setattr(Poller, "add", add)
            with patience():
                async with client.connect("127.0.0.1", made.port) as transport:
                    peer = client.http1(transport)
                    await peer.send(*ask(1, "quick"))
                    with pytest.raises((TransportLost, RemoteProtocolError)):
                        await peer.read_answer(2)
        async with client.connect("127.0.0.1", made.port) as transport:
            peer = client.http1(transport)
            with patience():
                await peer.send(*ask(1, "quick"))
                assert (await peer.read_answer(1))[0] == 200


@pytest.mark.parametrize("threads", [False, True])
async def test_a_model_that_raises_what_is_no_exception_ends_alone(threads: bool) -> None:
    """asyncio.CancelledError is one of those: any library may raise it."""

    @blocking(threads)
    def quits(prompt: Prompt) -> str:
        raise GeneratorExit

    async with gateway(quits, quick) as made, client.connect("127.0.0.1", made.port) as transport:
        peer = client.http1(transport)
        with patience():
            await peer.send(*ask(1, "quits"))
            assert (await peer.read_answer(1))[0] in (424, 500)
            await peer.send(*ask(2, "quick"))
            assert (await peer.read_answer(2))[0] == 200
