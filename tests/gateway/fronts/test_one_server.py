"""Several fronts are one server for a client: none refuses what another has served, at the start, after SIGHUP or a crash."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, final

import pytest
import trio

from gateway import client
from gateway.errors import TransportLost
from protocols.events import ConnectionEnd, Data, End, GoAway, Head, Request, Response
from tests.gateway.fronts.served import Caller, Lost, Server, calling, served, until, who
from tests.gateway.fronts.test_fronts_operated import curl
from tests.ports import free_port

pytestmark = pytest.mark.programs
APP = """
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from models.messages import Prompt


def taken(name: str) -> bool:
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


async def ends() -> None:
    while not Path(f"end{os.getpid()}").exists():
        await trio.sleep(0.01)
    raise OSError("its device is gone")


@asynccontextmanager
async def who() -> AsyncIterator[Callable[[Prompt], Awaitable[str]]]:
    number = next(n for n in itertools.count() if taken(f"load{n}"))
    while not Path(f"go{number}").exists():
        await trio.sleep(0.005)

    async def answer(prompt: Prompt) -> str:
        return f"{os.getpid()} 1"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends)
        yield answer
        nursery.cancel_scope.cancel()


async def slow(prompt: Prompt) -> str:
    return ""
"""
CALL = ("POST", "/predictions/who", b'{"inputs": "who"}')
QUESTIONS = (("GET", "/ping", b""), CALL, ("GET", "/v2/health/ready", b""))
LOADS = [pytest.param(600, id="600 requests"), pytest.param(10_000, marks=pytest.mark.soak, id="10000 requests")]


@final
class Watch:
    """Clients that ask one server about its health and call its model, and when each was refused or served."""

    def __init__(self, port: int, questions: Sequence[tuple[str, str, bytes]]) -> None:
        self._port, self._questions = port, questions
        self.refused, self.served = list[float](), list[float]()
        """When the refused requests began, and when the answers to the others came. The first request of a connection began
        as that was opened: its front was chosen then."""
        self.lost = list[str]()
        """The connections that ended before an answer: the protocol, and the error."""

    @property
    def count(self) -> int:
        """How many answers have come."""
        return len(self.refused) + len(self.served)

    @property
    def turned_back(self) -> int:
        """How many requests were refused that had begun after another was served."""
        first = min(self.served, default=float("inf"))
        return sum(began > first for began in self.refused)

    async def ask_on_new_connections(self) -> None:
        """Asks for ever, each time on a new connection."""
        for question in itertools.cycle(self._questions):
            began = trio.current_time()
            async with calling(self._port) as caller:
                await self._ask(caller, began, *question)

    async def ask_on_one_connection(self) -> None:
        """Asks for ever, on a connection as long as it may, then on the next."""
        questions = itertools.cycle(self._questions)
        while True:
            began = trio.current_time()
            async with calling(self._port) as caller:
                while not caller.closing and await self._ask(caller, began, *next(questions)):
                    began = trio.current_time()

    async def ask_over_http2(self) -> None:
        """Asks for ever over HTTP/2, on a connection until the server says GOAWAY, then on the next."""
        questions = itertools.cycle(self._questions)
        while True:
            began = trio.current_time()
            async with client.connect("127.0.0.1", self._port) as transport:
                peer, streams = client.http2(transport), itertools.count(1, 2)
                while await self._ask_over(peer, began, _asking(next(streams), *next(questions))):
                    began = trio.current_time()

    async def _ask_over(self, peer: client.Peer, began: float, asking: Sequence[Any]) -> bool:
        """Asks once over HTTP/2; False if the connection takes no more."""
        status, goes_on = 0, True
        try:
            await peer.send(*asking)
            while type(event := await peer.next_event()) not in (End, ConnectionEnd):
                if type(event) is Response:
                    status = event.status
                elif type(event) is Data:
                    peer.credit(event)
                goes_on &= type(event) is not GoAway
        except TransportLost as e:
            self.lost.append(f"HTTP/2: {e}")
            return False
        if not status:
            self.lost.append(f"HTTP/2: {event}")
            return False
        self._note(began, status)
        return goes_on

    async def _ask(self, caller: Caller, began: float, method: str, path: str, body: bytes) -> bool:
        """Asks once; False if the connection has ended without an answer."""
        try:
            status, _ = await caller.ask(path, body, method=method)
        except Lost as e:
            self.lost.append(f"HTTP/1.1: {e}")
            return False
        self._note(began, status)
        return True

    def _note(self, began: float, status: int) -> None:
        if status == 200:
            self.served.append(trio.current_time())
        else:
            assert status in (429, 503), status
            self.refused.append(began)


def _asking(stream: int, method: str, path: str, body: bytes) -> Sequence[Any]:
    if method == "POST":
        return client.post(stream, path, body, [(b"content-type", b"application/json")])
    head = Head(method=method.encode(), target=path.encode(), authority=b"localhost", scheme=b"http", headers=[])
    return [Request(stream=stream, head=head), End(stream=stream)]


@asynccontextmanager
async def watched(port: int, *questions: tuple[str, str, bytes]) -> AsyncIterator[Watch]:
    """Five clients that ask while the block runs, by default all QUESTIONS. The server must listen."""
    watch = Watch(port, questions or QUESTIONS)
    async with trio.open_nursery() as nursery:
        for ask in (watch.ask_on_new_connections, watch.ask_on_one_connection):
            nursery.start_soon(ask)
            nursery.start_soon(ask)
        nursery.start_soon(watch.ask_over_http2)
        yield watch
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def listening(folder: Path, *flags: str, app: str = APP) -> AsyncIterator[tuple[Server, int]]:
    """A server with two fronts that accepts, and its port."""
    port = free_port()
    alone = ("--set", "models.slow.required=false")  # health and calls depend on `who` alone
    async with served(folder, "--port", str(port), *alone, *flags, app=app, patience=600.0) as server:
        while True:
            try:
                async with calling(port) as caller:
                    assert (await caller.ask("/v2/health/live", method="GET"))[0] == 200
                    break
            except OSError:
                await trio.sleep(0.01)
        yield server, port


def allow(folder: Path, *loads: int) -> None:
    """Lets these loads of the model end."""
    for number in loads:
        (folder / f"go{number}").touch()


async def asked(watch: Watch, requests: int) -> None:
    """Waits until so many more answers have come."""
    enough = watch.count + requests
    await until(lambda: watch.count >= enough)


@pytest.mark.parametrize("requests", LOADS)
async def test_answers_change_once_while_one_front_is_slow_to_load(tmp_path: Path, requests: int) -> None:
    async with listening(tmp_path) as (server, port), watched(port) as watch:
        await asked(watch, requests // 4)
        assert not watch.served
        allow(tmp_path, 0)
        await until(lambda: bool(watch.served))
        await asked(watch, requests // 2)
        assert not server.all("serving")
        allow(tmp_path, 1)
        await server.logged("serving")
        await asked(watch, requests // 4)
        assert (watch.turned_back, watch.lost) == (0, [])


async def test_both_fronts_serve_once_both_are_ready(tmp_path: Path) -> None:
    async with listening(tmp_path) as (server, port), AsyncExitStack() as stack:
        waiting, *later = [await stack.enter_async_context(calling(port)) for _ in range(5)]  # before any front is ready
        for caller in later:  # some at each front: once they are answered, it has the one before them too
            assert (await caller.ask("/v2/health/live", method="GET"))[0] == 200
            assert caller.closing
        allow(tmp_path, 0, 1)
        await server.logged("serving")
        assert (await who(waiting))[0] in server.fronts
        assert waiting.closing  # its front was chosen before any was ready
        callers = [await stack.enter_async_context(calling(port)) for _ in range(20)]
        assert {(await who(caller))[0] for caller in callers} == server.fronts
        assert not any(caller.closing for caller in callers)


@pytest.mark.parametrize("requests", LOADS)
async def test_none_is_refused_while_sighup_replaces_ready_fronts_by_slow_ones(tmp_path: Path, requests: int) -> None:
    allow(tmp_path, 0, 1)
    async with listening(tmp_path) as (server, port):
        await server.logged("serving")
        async with watched(port) as watch:
            server.process.send_signal(signal.SIGHUP)
            for load in (2, 3):
                await until(lambda load=load: (tmp_path / f"load{load}").exists())  # type: ignore[misc]
                await asked(watch, requests // 4)
                allow(tmp_path, load)
            await server.logged("fronts replaced")
            await asked(watch, requests // 2)
            assert (watch.refused, watch.lost) == ([], [])


@pytest.mark.parametrize("requests", LOADS)
async def test_answers_change_once_when_sighup_replaces_fronts_that_gave_their_model_up(
    tmp_path: Path, requests: int
) -> None:
    broken = APP.replace("    number = next", '    raise OSError("no weights")\n    number = next')
    async with listening(tmp_path, "--set", "models.who.restart.intensity=0", app=broken) as (server, port):
        await server.logged("serving")
        async with watched(port) as watch:
            await asked(watch, requests // 4)
            assert not watch.served
            (tmp_path / "app.py").write_text(APP)
            server.process.send_signal(signal.SIGHUP)
            await until((tmp_path / "load0").exists)
            await asked(watch, requests // 4)
            assert not watch.served
            allow(tmp_path, 0)
            await until((tmp_path / "load1").exists)
            await until(lambda: bool(watch.served))
            await asked(watch, requests // 4)
            allow(tmp_path, 1)
            await server.logged("fronts replaced")
            await asked(watch, requests // 4)
            assert watch.turned_back == 0


@pytest.mark.parametrize("requests", LOADS)
async def test_after_a_crash_of_one_of_two_ready_fronts_none_is_refused(tmp_path: Path, requests: int) -> None:
    allow(tmp_path, 0, 1)
    async with listening(tmp_path) as (server, port):
        await server.logged("serving")
        async with calling(port) as one, calling(port) as other, watched(port) as watch:
            dead = (await who(one))[0]
            assert dead != (await who(other))[0]
            await asked(watch, requests // 4)
            os.kill(dead, signal.SIGKILL)
            with pytest.raises(Lost):
                await who(one)
            await until((tmp_path / "load2").exists)
            await asked(watch, requests // 2)
            assert (await who(other))[0] in server.fronts
            allow(tmp_path, 2)
            await asked(watch, requests // 4)
            assert watch.refused == []
            assert len(watch.lost) <= 5  # each client's at most, if the dead front had it


async def test_after_a_crash_of_both_fronts_the_server_is_alive_and_refuses_until_one_is_ready(tmp_path: Path) -> None:
    allow(tmp_path, 0, 1)
    async with listening(tmp_path) as (server, port):
        await server.logged("serving")
        for pid in server.fronts:
            os.kill(pid, signal.SIGKILL)
        for path, status in (("/v2/health/live", 200), ("/ping", 503)):
            async with calling(port) as caller:
                assert (await caller.ask(path, method="GET"))[0] == status
        await until((tmp_path / "load3").exists)
        async with watched(port) as watch:
            await asked(watch, 100)
            assert not watch.served
            allow(tmp_path, 3)
            await until(lambda: bool(watch.served))
            await asked(watch, 100)
            assert (watch.turned_back, watch.lost) == (0, [])


@pytest.mark.parametrize("requests", LOADS)
async def test_a_model_in_shared_processes_answers_for_all_fronts_from_its_first_answer_on(
    tmp_path: Path, requests: int
) -> None:
    async with listening(tmp_path, "--set", "models.who.process.enabled=true") as (_, port):
        async with watched(port) as watch:
            await asked(watch, requests // 4)
            assert not watch.served
            allow(tmp_path, 0)
            await until(lambda: bool(watch.served))
            await asked(watch, requests // 4)
            assert watch.turned_back == 0
        async with calling(port) as caller:
            process = (await who(caller))[0]
        os.kill(process, signal.SIGKILL)
        await until((tmp_path / "load1").exists)
        async with watched(port, CALL) as watch:
            await asked(watch, requests // 4)
            assert not watch.served
            allow(tmp_path, 1)
            await until(lambda: bool(watch.served))
            await asked(watch, requests // 4)
            assert watch.turned_back == 0


async def test_a_front_whose_model_is_given_up_gets_no_more_while_another_is_ready(tmp_path: Path) -> None:
    allow(tmp_path, 0, 1)
    flags = ("--set", "models.who.restart.intensity=0", "--set", "operator.port=0")
    async with listening(tmp_path, *flags) as (server, port):
        await server.logged("serving")
        plane = (await server.logged("operator plane"))["at"]
        async with calling(port) as one, calling(port) as other:
            lame, well = (await who(one))[0], (await who(other))[0]
            (tmp_path / f"end{lame}").touch()
            await until(lambda: any(r["event"] == "model given up" for r in server.records))
            health: dict[str, Any] = {"reasons": []}
            while not health["reasons"]:
                health = json.loads(await curl(f"{plane}/health/ready"))
            assert health["ready"] is True
            (reason,) = health["reasons"]
            assert reason.startswith("front ")
            assert "who" in reason
            assert "its device is gone" in reason
            async with watched(port) as watch:
                await asked(watch, 100)
                assert watch.refused == []
            assert (await one.ask("/ping", method="GET"))[0] == 503
            assert one.closing  # so that its client comes to the other front
            assert (await who(other))[0] == well
            assert not other.closing


async def test_the_plane_is_ready_with_the_first_front_and_names_the_others(tmp_path: Path) -> None:
    async with listening(tmp_path, "--set", "operator.port=0") as (server, port):
        plane = (await server.logged("operator plane"))["at"]
        before = json.loads(await curl(f"{plane}/health/ready"))
        assert before["ready"] is False
        assert before["reasons"] == ["model 'who' is loading"]  # as of one server
        allow(tmp_path, 0)
        async with watched(port) as watch:
            await until(lambda: bool(watch.served))
        health = json.loads(await curl(f"{plane}/health/ready"))
        assert health["ready"] is True
        assert {reason.partition(":")[0] for reason in health["reasons"]} in ({"front 0"}, {"front 1"})
        stats = json.loads(await curl(f"{plane}/stats"))
        assert (stats["ready"], stats["reasons"]) == (True, health["reasons"])
        assert "everywire_fronts 1.0" in await curl(f"{plane}/metrics")
        allow(tmp_path, 1)
        await server.logged("serving")
        assert json.loads(await curl(f"{plane}/health/ready")) == {"ready": True, "reasons": []}


async def test_fronts_fail_their_health_checks_together_when_a_drain_begins(tmp_path: Path) -> None:
    allow(tmp_path, 0, 1)
    async with listening(tmp_path, "--set", "drain.delay=2s") as (server, port):
        await server.logged("serving")
        failed = list[bool]()
        server.process.send_signal(signal.SIGTERM)
        with trio.move_on_after(1.0):
            while True:
                async with calling(port) as caller:
                    failed.append((await caller.ask("/ping", method="GET"))[0] == 503)
        assert True in failed
        assert failed == sorted(failed)
        assert await server.drained() in (0, 3)
