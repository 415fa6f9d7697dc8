"""The poller over real sockets that take one descriptor after another: no connection is told of another's events."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway import client
from gateway.config import Config, ListenConfig, TLSConfig
from gateway.errors import TransportLost
from gateway.gateway import Gateway
from gateway.net.readiness import Poller
from gateway.net.tls_context import client_context, development_certificate, server_context
from gateway.net.transport import SocketTransport, Transport
from models.adapt import blocking, spec_of
from models.messages import Prompt
from protocols.errors import RemoteProtocolError
from tests.gateway.net.told import House, served, serving, tcp_pair, unix_pair, until

pytestmark = pytest.mark.skipif(not Poller.available, reason="needs epoll")


@pytest.fixture(params=[unix_pair, tcp_pair], ids=["unix", "tcp"], name="pair")
def _pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = request.param()
    yield ours, theirs
    ours.close()
    theirs.close()


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
    assert not hub.tell(1)
    assert not hub.look()
    hub.close()


async def test_what_becomes_ready_while_others_are_told_comes_after_them_and_waits_for_no_further_event() -> None:
    hub = Poller()
    house, pairs = House(hub), [unix_pair() for _ in range(3)]
    told = [served(house, ours) for ours, _ in pairs]
    for _, theirs in pairs[:2]:
        theirs.sendall(b"1")
    assert hub.look()
    assert hub.tell(1) == 1
    for _, theirs in pairs:
        theirs.sendall(b"2")
    assert hub.look()  # while an event waits
    assert hub.tell(1) == 1
    assert [bytes(one.received) for one in told] == [b"1", b"12", b""]
    assert hub.tell(8) == 4  # the third, which could send, and those that came since, without another look
    assert [bytes(one.received) for one in told] == [b"12", b"12", b"2"]
    assert not hub.look()
    for one, (_, theirs) in zip(told, pairs, strict=True):
        one.connection.lost()
        theirs.close()
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


@pytest.fixture(scope="module", name="contexts")
def _contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    config = TLSConfig(dev=True, dev_dir=str(tmp_path_factory.mktemp("tls")))
    return server_context(config), client_context(development_certificate(config).ca)


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


# -- turns, cancellation and errors ----------------------------------------------------------------------------------------


class Due:
    """A connection that has its turn and is due again."""

    heavy = False

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
    for _ in range(10):  # Trio chooses at random which task runs first
        ours, theirs = tcp_pair()
        theirs.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        await trio.lowlevel.wait_readable(ours)
        async with gateway(quick) as made:
            made.acceptor.accepted(SocketTransport(ours))
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
