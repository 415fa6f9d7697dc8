"""TLS handshakes that stop: beyond a number, those that wait the longest for their client are ended, and no other."""

from __future__ import annotations

import logging
import ssl
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.config import Config, TLSConfig
from gateway.net.readiness import Poller
from gateway.net.tls_context import client_context, development_certificate, server_context
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import memory_pair
from gateway.serving import handshakes
from gateway.testing import MemoryGateway, memory_gateway
from protocols.floods import HANDSHAKE_PATIENCE as PATIENCE

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]
MOST = 4
_PIECE = 60  # bytes of a client in one receive: each of its messages takes two or more
REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module", name="contexts")
def _contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    config = TLSConfig(dev=True, dev_dir=str(tmp_path_factory.mktemp("tls")))
    return server_context(config), client_context(development_certificate(config).ca, alpn=("http/1.1",))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKES", MOST)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.skipif(not Poller.available, reason="no epoll"))])
def hub(request: pytest.FixtureRequest) -> bool:
    """True: a poller tells of the connections; False: two tasks wait for each."""
    return bool(request.param)


@final
class Client:
    """A client whose bytes its owner carries: it takes no step by itself."""

    def __init__(self, house: House, capacity: int = 65536) -> None:
        self.line, theirs = memory_pair(capacity)
        edges = house.memory._edges
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = house.contexts[1].wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")
        accepted = theirs if edges is None else edges.watchable(theirs)
        house.memory.gateway.acceptor.accepted(accepted, house.contexts[0])  # type: ignore[arg-type]

    @property
    def ended(self) -> bool:
        return self.line.hung_up()

    def step(self) -> bool:
        """Reads what has come, and says what follows. True once the handshake is complete."""
        self._receive()
        try:
            self._tls.do_handshake()
            return True
        except ssl.SSLWantReadError:
            return False
        finally:
            self._send()

    def _receive(self) -> None:
        buffer = memoryview(bytearray(65536))
        while n := self.line.try_receive_into(buffer):
            self._incoming.write(buffer[:n])

    def _send(self, most: int = 65536) -> None:
        while most and (said := self._outgoing.read(min(most, _PIECE))):
            assert self.line.try_send([said]) == len(said)
            most -= len(said)

    def begin(self, most: int = 65536) -> None:
        """Says its first message, or its first bytes."""
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.do_handshake()
        self._send(most)

    def ask(self) -> None:
        self._tls.write(REQUEST)
        self._send()

    def answer(self) -> bytes:
        self._receive()
        return self._tls.read(65536)


@final
class House:
    """A gateway in memory, its contexts, and what it has counted and logged."""

    def __init__(self, memory: MemoryGateway, contexts: Contexts, caplog: pytest.LogCaptureFixture) -> None:
        self.memory, self.contexts, self._records = memory, contexts, caplog.records

    async def stalled(self, most: int = 65536) -> Client:
        """A client that says its first message or its first bytes, and then nothing."""
        client = Client(self)
        client.begin(most)
        await wait_all_tasks_blocked()
        return client

    def reasons(self) -> list[str]:
        return [record.__dict__["reason"] for record in self._records if record.message == "connection not established"]

    def counted(self) -> dict[str, int]:
        return {why.value: n for why, n in self.memory.gateway.server.endings_of_connections.items() if n}


@asynccontextmanager
async def serving(contexts: Contexts, caplog: pytest.LogCaptureFixture, *, hub: bool) -> AsyncIterator[House]:
    caplog.set_level(logging.INFO, "gateway")
    with trio.fail_after(600):
        async with memory_gateway((), Config(), hub=hub, check=True) as memory:
            yield House(memory, contexts, caplog)
            await wait_all_tasks_blocked()
            memory.gateway.acceptor.disconnect()


async def test_where_too_many_wait_the_one_that_waits_the_longest_is_ended_counted_and_logged(
    contexts: Contexts, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock, *, hub: bool
) -> None:
    async with serving(contexts, caplog, hub=hub) as house:
        waiting = []
        for _ in range(MOST):
            waiting.append(await house.stalled())
            await trio.sleep(PATIENCE)
        assert not any(client.ended for client in waiting)
        for n in range(MOST):
            new = await house.stalled()
            assert [client.ended for client in waiting] == [True] * (n + 1) + [False] * (MOST - n - 1)
            assert not new.ended
        assert house.counted() == {"evicted": MOST}
        assert house.reasons() == ["more than 4 TLS handshakes waited for their clients, and this one the longest"] * MOST


async def test_nobody_is_ended_who_has_waited_a_short_time_and_a_crowd_goes_few_by_few(
    contexts: Contexts, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock, *, hub: bool
) -> None:
    async with serving(contexts, caplog, hub=hub) as house:
        crowd = [await house.stalled() for _ in range(30)]
        await trio.sleep(PATIENCE * 0.9)
        crowd.append(await house.stalled())
        assert not any(client.ended for client in crowd)
        await trio.sleep(PATIENCE * 0.2)
        crowd.append(await house.stalled())
        assert sum(client.ended for client in crowd) == handshakes._LOOKS
        for _ in range(10):
            crowd.append(await house.stalled())
        assert [client.ended for client in crowd] == [True] * 30 + [False] * 12


async def test_a_thousand_clients_at_once_are_served_though_the_server_reads_their_answers_late(
    contexts: Contexts, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock, *, hub: bool
) -> None:
    async with serving(contexts, caplog, hub=hub) as house:
        clients = [Client(house) for _ in range(1000)]
        for client in clients:
            client.begin()
        await wait_all_tasks_blocked()
        late = [Client(house) for _ in range(100)]
        for client in late:
            client.begin()
        assert all(client.step() for client in clients)  # their answers lie in the kernel
        autojump_clock.jump(2 * PATIENCE)
        await wait_all_tasks_blocked()
        assert all(client.step() for client in late)
        for client in clients + late:
            client.ask()
        await wait_all_tasks_blocked()
        assert all(client.answer().startswith(b"HTTP/1.1 200 ") for client in clients + late)
        assert house.counted() == {}


async def test_a_silent_connection_has_no_tls_object_nor_one_that_has_sent_a_part_of_its_first_message(
    contexts: Contexts,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    *,
    hub: bool,
) -> None:
    made: list[TLSTransport] = []
    init = TLSTransport.__init__

    def counted(transport: TLSTransport, *args: object, **options: object) -> None:
        init(transport, *args, **options)  # type: ignore[arg-type]
        made.append(transport)

    monkeypatch.setattr(TLSTransport, "__init__", counted)
    async with serving(contexts, caplog, hub=hub) as house:
        silent = [Client(house) for _ in range(20)]
        begun = [await house.stalled(most) for most in (1, 4, 5, 100)]
        await trio.sleep(2 * PATIENCE)
        assert made == []
        for n in range(MOST):
            await house.stalled()
            assert len(made) == n + 1
        assert house.counted() == {}  # the silent are no handshakes: they wait as long as all others may
        for client in begun:
            client._send()
            await wait_all_tasks_blocked()
            assert client.step()
        for client in silent:
            client.begin()
            await wait_all_tasks_blocked()
            assert client.step()
        assert len(made) == MOST + 24


async def test_whoever_sends_bytes_one_by_one_waits_no_shorter_than_one_that_sends_nothing(
    contexts: Contexts, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock, *, hub: bool
) -> None:
    async with serving(contexts, caplog, hub=hub) as house:
        dripping = await house.stalled()
        others = [await house.stalled() for _ in range(MOST - 1)]
        dripping.line.try_send([b"\x17\x03\x03\x01\x00"])  # the head of a record
        for _ in range(10):
            await trio.sleep(PATIENCE / 5)
            dripping.line.try_send([b"x"])
        await wait_all_tasks_blocked()
        await house.stalled()
        assert dripping.ended
        assert not any(client.ended for client in others)
        assert house.counted() == {"evicted": 1}


async def test_the_memory_of_an_ended_one_is_back_before_its_task_has_run(
    contexts: Contexts, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that is busy with thousands of first messages comes to that task when it has read them all."""
    gone = list[bool]()
    real: Callable[[TLSTransport], None] = TLSTransport.abandon

    def abandon(transport: TLSTransport) -> None:
        tls = weakref.ref(transport._tls)
        real(transport)
        gone.append(tls() is None)

    monkeypatch.setattr(TLSTransport, "abandon", abandon)
    async with serving(contexts, caplog, hub=False) as house:
        for _ in range(MOST):
            await house.stalled()
        await trio.sleep(PATIENCE)
        await house.stalled()
        assert gone == [True]


async def test_one_that_does_not_take_its_answer_is_ended_too(
    contexts: Contexts, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock, *, hub: bool
) -> None:
    async with serving(contexts, caplog, hub=hub) as house:
        clients = [Client(house, capacity=600) for _ in range(MOST)]
        for client in clients:
            client.begin()
        await trio.sleep(PATIENCE)
        for client in clients:
            client.line.try_receive_into(memoryview(bytearray(600)))  # there is room for more of it, at the last moment
        await house.stalled()
        assert sum(client.ended for client in clients) == 1
        assert house.counted() == {"evicted": 1}
