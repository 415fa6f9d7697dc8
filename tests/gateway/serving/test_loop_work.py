"""The watch of the loop names the work that a real stack shows, and whose it is: one row for each way to keep the loop."""

from __future__ import annotations

import ctypes
import gc
import gzip
import json
import logging
import socket
import sys
import threading
import tomllib
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import msgspec
import pytest
import trio

from gateway.client import post
from gateway.config import (
    Config,
    LimitsConfig,
    ListenConfig,
    MetricsConfig,
    OperatorConfig,
    RepositoryConfig,
    TLSConfig,
    V2Config,
)
from gateway.containers.model import container_spec
from gateway.core import exchange as exchange_module
from gateway.core.exchange import Exchange
from gateway.core.outbound import Outbound
from gateway.gateway import Gateway
from gateway.net.tls_context import client_context, development_certificate
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import Transport
from gateway.operator.access import Tokens
from gateway.operator.stats import StatsView
from gateway.operator.verdict import verdict
from gateway.serving.loop_work import CANCELLED, WORKS, LoopWork
from gateway.telemetry import loop_watch
from gateway.telemetry.loop_watch import MODEL_CODE, NO_CPU, UNKNOWN, Blocks, LoopWatch, Work, local
from gateway.telemetry.metrics import Metrics, exposition
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.library.tensors import identity
from models.messages import Prompt
from protocols import content_coding
from protocols.events import Data, End, Request, Reset
from protocols.grpc.framing import frame
from protocols.grpc.heads import call_head
from protocols.grpc.protobuf import Room
from protocols.http1.connection import HTTP1Connection
from protocols.json import strict
from tests.gateway.containers.test_bridge_tcp import OK
from tests.gateway.containers.test_bridge_tcp import serving as serving_container
from tests.gateway.operator.operators import Operator, curl
from tests.tls_records import ForgingClient

PATIENCE = 20.0
HOST = "127.0.0.1"


class Looks:
    """Stops code for a look at its stack, and keeps the looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._watches = monkeypatch, list[LoopWatch]()
        self.seen: list[Work] = []
        watching = LoopWatch.watching

        def noted(watch: LoopWatch) -> Any:
            self._watches.append(watch)
            return watching(watch)

        monkeypatch.setattr(LoopWatch, "watching", noted)

    def stop_in(self, owner: Any, name: str, times: int = 1) -> None:
        """The first calls of the function stop until another thread has looked at the loop."""
        function = getattr(owner, name)

        def stopped(*arguments: Any, **named: Any) -> Any:
            if len(self.seen) < times:
                thread = threading.Thread(target=self._look, args=(threading.get_ident(),))
                thread.start()
                thread.join()
            return function(*arguments, **named)

        # not code of a model's author, as a test's own is
        stopped.__code__ = stopped.__code__.replace(co_filename=loop_watch.__file__)
        self._monkeypatch.setattr(owner, name, stopped)

    def _look(self, stopped: int) -> None:
        for watch in self._watches:
            self.seen.append(watch._look(busy=stopped == watch._loop).work)


@pytest.fixture(name="looks")
def _looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


async def quick(prompt: Prompt) -> str:
    return prompt.text


async def asleep(prompt: Prompt) -> str:
    await trio.sleep_forever()
    return ""


@asynccontextmanager
async def listening(*models: Any, **sections: Any) -> AsyncIterator[Gateway]:
    """A gateway on ports of this machine."""
    gateway = Gateway(Config(**{"listen": ListenConfig(port=0), **sections}), models)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve)
            yield gateway
            nursery.cancel_scope.cancel()


# -- TLS ---------------------------------------------------------------------------------------------------------------


def update_keys(port: int, ca: str, over: threading.Event) -> None:
    """A TLS client that sends KeyUpdates and reads nothing."""
    client = ForgingClient(client_context(ca))
    with socket.create_connection((HOST, port), timeout=PATIENCE) as sock:
        done, out = client.shake_hands()
        while not done:
            sock.sendall(out)
            done, out = client.shake_hands(sock.recv(65536))
        records = client.records()
        sock.sendall(out + b"".join(records.key_update() for _ in range(100)))
        over.wait(PATIENCE)


@asynccontextmanager
async def updating(tmp_path: Path, **sections: Any) -> AsyncIterator[Gateway]:
    """A gateway that has such a client."""
    tls, over = TLSConfig(dev=True, dev_dir=str(tmp_path)), threading.Event()
    ports = ListenConfig(port=-1, tls_port=0)
    async with listening(quick, listen=ports, tls=tls, **sections) as gateway, trio.open_nursery() as nursery:
        ca = development_certificate(tls).ca
        nursery.start_soon(trio.to_thread.run_sync, update_keys, gateway.tls_port, ca, over)
        try:
            yield gateway
        finally:
            over.set()


async def test_tls_records(looks: Looks, tmp_path: Path) -> None:
    looks.stop_in(TLSTransport, "_judge")
    async with updating(tmp_path):
        await until(lambda: looks.seen)
    assert set(looks.seen) == {("TLS records", HOST)}


async def until(so: Callable[[], object]) -> None:
    with trio.fail_after(PATIENCE):
        while not so():  # nothing tells when
            await trio.lowlevel.checkpoint()


# -- bodies ------------------------------------------------------------------------------------------------------------


async def call(memory: MemoryGateway, service: str, method: str, message: bytes) -> None:
    peer, head = memory.http2(), call_head(service, method, authority=b"localhost")
    await peer.send(Request(stream=1, head=head), Data(stream=1, buffers=frame((message,))), End(stream=1))
    with trio.fail_after(PATIENCE):
        await peer.read_answer(1)


@pytest.mark.parametrize("count", [1_500, 100_000], ids=["loop", "thread"])
async def test_grpc_fields(looks: Looks, count: int) -> None:
    looks.stop_in(Room, "take")
    async with memory_gateway([identity]) as memory:
        await call(memory, "inference.GRPCInferenceService", "ModelInfer", b"\x2a\x00" * count)
    assert looks.seen[0] == ("gRPC messages", "memory")


async def test_unknown_fields_of_a_health_check(looks: Looks) -> None:
    looks.stop_in(Room, "take")
    async with memory_gateway([identity]) as memory:
        await call(memory, "grpc.health.v1.Health", "Check", b"\x7a\x00" * 900)
    assert looks.seen[0] == ("gRPC messages", "memory")


@pytest.mark.parametrize("size", [1_000, 1_000_000], ids=["loop", "thread"])
async def test_json_bodies(looks: Looks, size: int) -> None:
    looks.stop_in(strict, "_check_bounds")
    async with memory_gateway([quick]) as memory:
        await memory.http1().send(*post(1, "/predictions/quick", json.dumps({"inputs": "x" * size}).encode()))
        await until(lambda: looks.seen)
    assert looks.seen[0] == ("JSON bodies", "memory")


async def test_compressed_bodies(looks: Looks) -> None:
    looks.stop_in(content_coding._Stage, "feed")
    async with memory_gateway([identity]) as memory:
        coded, fields = gzip.compress(bytes(100_000)), [(b"content-encoding", b"gzip")]
        await memory.http1().send(*post(1, "/v2/models/identity/infer", coded, fields))
        await until(lambda: looks.seen)
    assert looks.seen[0] == ("compressed bodies", "memory")


# -- others that are not clients of a model ------------------------------------------------------------------------------


async def test_heads_of_a_container(looks: Looks) -> None:
    async def serve(transport: Transport) -> None:
        while True:
            if not transport.try_send([b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10]):
                await transport.wait_writable()

    async with trio.open_nursery() as nursery:
        port = await serving_container(nursery, OK, serve)
        spec = container_spec(f"ws://{HOST}:{port}", name="c")
        async with memory_gateway([spec]) as memory:
            looks.stop_in(HTTP1Connection, "next_event", times=100)
            with trio.fail_after(PATIENCE):
                await memory.http1().send(*post(1, "/models/c/invoke", b"x"))
                await until(lambda: ("container answers", HOST) in looks.seen)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("owner", "name", "kind"),
    [(Metrics, "_blocked", "metrics scrapes"), (h11.Connection, "receive_data", "operator requests")],
)
async def test_scrapes(looks: Looks, owner: Any, name: str, kind: str) -> None:
    async with listening(quick, metrics=MetricsConfig(port=0)) as gateway:
        looks.stop_in(owner, name)
        assert (await curl(gateway.metrics_port, "GET", "/metrics")).status == 200
    assert looks.seen == [(kind, HOST)]


async def test_refused_calls_of_an_operator(looks: Looks) -> None:
    async with listening(quick, operator=OperatorConfig(port=0, token="correct-horse-battery")) as gateway:
        looks.stop_in(Tokens, "open")
        assert (await curl(gateway.operator_port, "GET", "/stats")).status == 401
    assert looks.seen == [("operator requests", HOST)]


@pytest.mark.parametrize(("owner", "name"), [(Outbound, "drop_pieces"), (Exchange, "work_done")], ids=["told", "unwound"])
async def test_cancelled_streams(looks: Looks, owner: Any, name: str) -> None:
    async with memory_gateway([asleep]) as memory:
        peer = memory.http2()
        await peer.send(*post(1, "/predictions/asleep", b'{"inputs": "x"}'))
        await until(lambda: memory.gateway.supervisor.workers["asleep"].slots.in_use)
        looks.stop_in(owner, name)
        await peer.send(Reset(stream=1, code=8))
        await until(lambda: looks.seen)
    assert looks.seen == [(CANCELLED, "memory")]


@pytest.mark.parametrize("parts", [1, 30])
async def test_a_model_toml(looks: Looks, tmp_path: Path, parts: int) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.toml").write_text(f"{'.'.join(['options', *['a'] * parts])} = 1")
    config = Config(repository=RepositoryConfig(roots=(str(tmp_path),)), v2=V2Config(model_control=True))
    async with memory_gateway([], config) as memory:
        looks.stop_in(tomllib, "loads")
        await memory.http1().send(*post(1, "/v2/repository/models/m/load", b""))
        await until(lambda: looks.seen)
    assert looks.seen == [("model.toml", "m")]


# -- a loop that is late -------------------------------------------------------------------------------------------------


class Told(logging.Handler):
    """Lines of the log about one work of the loop. A busy machine makes others."""

    def __init__(self) -> None:
        super().__init__()
        self.work = UNKNOWN
        self.blocked: list[Any] = []
        self.again: list[Any] = []
        self.named = threading.Event()

    def emit(self, record: Any) -> None:
        if (getattr(record, "work", ""), getattr(record, "peer", "")) != self.work:
            return
        if record.msg == "event loop blocked":
            self.blocked.append(record)
            self.named.set()
        elif record.msg == "event loop runs again":
            self.again.append(record)


@pytest.fixture(name="told")
def _told() -> Iterator[Told]:
    told = Told()
    logging.getLogger("gateway").addHandler(told)
    gc.disable()  # a collection would be taken for the cause, where the machine is slow enough
    yield told
    gc.enable()
    logging.getLogger("gateway").removeHandler(told)


def stuck(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wait: Callable[[], object]) -> None:
    """Calls of the function wait first."""
    function = getattr(owner, name)

    def waiting(*arguments: Any, **named: Any) -> Any:
        wait()
        return function(*arguments, **named)

    waiting.__code__ = waiting.__code__.replace(co_filename=loop_watch.__file__)
    monkeypatch.setattr(owner, name, waiting)


async def test_log_metric_and_verdict_name_the_work_of_a_peer_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, told: Told, tmp_path: Path
) -> None:
    told.work = Work("TLS records", HOST)
    stuck(monkeypatch, TLSTransport, "_judge", lambda: told.named.wait(PATIENCE))
    async with updating(tmp_path, limits=LimitsConfig(loop_block=0.5)) as gateway:
        registry, operator = gateway.registry, Operator(gateway)
        await until(lambda: told.again)
        assert told.blocked[0].seconds >= 0.5
        assert "gateway/net/tls_transport.py" in str(told.blocked[0].stack)
        await until(lambda: "TLS records" in gateway.timer.blocks.late)
        text = exposition(registry)[1].decode()
        (line,) = [line for line in text.splitlines() if line.startswith('everywire_loop_late_seconds_total{work="TLS')]
        assert float(line.rpartition(" ")[2]) > 0.1
        stats = await operator.get("/stats")
        assert told.work in [(one["work"], one["whose"]) for one in stats["late"]]
        # the verdict on a server that nobody has called does not blame
        figures = msgspec.structs.replace(msgspec.convert(stats, StatsView), live={"http/1.1": 1})
        said = verdict(None, figures, figures.uptime, [])
        assert (said.kind, said.peer) == ("blocked", HOST)
        assert said.sentence == f"The event loop is blocked: TLS records of {HOST}"


async def test_many_short_steps_are_counted_for_the_peer_that_causes_them(
    monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    told.work = Work(CANCELLED, "memory")
    async with memory_gateway([spec_of(asleep, capacity=64)], Config(limits=LimitsConfig(loop_block=0.3))) as memory:
        peer, blocks = memory.http2(), memory.gateway.timer.blocks
        for stream in range(1, 65, 2):
            await peer.send(*post(stream, "/predictions/asleep", b'{"inputs": "x"}'))
        await until(lambda: memory.gateway.supervisor.workers["asleep"].slots.in_use == 32)
        never = threading.Event()
        stuck(monkeypatch, Exchange, "work_done", lambda: never.wait(0.03))
        await peer.send(*(Reset(stream=stream, code=8) for stream in range(1, 65, 2)))  # one look at the client tells all
        await until(lambda: blocks.late.get(CANCELLED, 0.0) > 0.3)
        assert blocks.recent()[told.work] > 0.3
        await until(lambda: told.again)
        assert told.blocked[0].cause != "one step"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the C library is found by no name")
async def test_a_thread_that_holds_the_interpreter_is_named_and_not_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = ctypes.PyDLL(None).usleep
    async with memory_gateway([identity]) as memory:
        late = memory.gateway.timer.blocks.late
        loop, took = threading.get_ident(), Room.take

        def holds(room: Room, count: int) -> None:
            """Takes long in C, again and again: the watch, which waits for the interpreter too, sees some of it."""
            for _ in range(100):
                if threading.get_ident() != loop and not late.get("gRPC messages"):
                    holding(150_000)
            took(room, count)

        holds.__code__ = holds.__code__.replace(co_filename=loop_watch.__file__)
        monkeypatch.setattr(Room, "take", holds)
        await call(memory, "inference.GRPCInferenceService", "ModelInfer", b"\x2a\x00" * 100_000)
        await until(lambda: "gRPC messages" in late)
        assert ("gRPC messages", "memory") in memory.gateway.timer.blocks.recent()


def test_a_look_at_a_variable_keeps_its_value_no_longer_than_the_code_does() -> None:
    class Body:
        """A large one."""

    def read() -> tuple[Any, Any]:
        body, frame = Body(), sys._getframe()
        alive = weakref.ref(body)
        found = local(frame, "body") is body, local(frame, "len"), local(frame, "frame") is frame
        del body
        gc.collect()
        return found, alive()

    assert read() == ((True, None, True), None)


def test_an_exchange_that_is_being_made_is_nobodys_yet() -> None:
    found: dict[str, Any] = {"self": object.__new__(Exchange), "sys": sys}
    making = compile("def made(self):\n    return sys._getframe()\nframe = made(self)", exchange_module.__file__, "exec")
    exec(making, found)
    memory: Any = None  # without a task nothing looks at its tables
    assert LoopWork(memory, memory).of(None, [found["frame"]]) == Work("requests", "")


def test_waits_for_a_cpu_are_nobodys_work() -> None:
    blocks, work = Blocks(), Work("TLS records", HOST)
    blocks.add({work: 0.75, UNKNOWN: 0.25}, 0.6)
    assert blocks.late == pytest.approx({"TLS records": 0.3, "": 0.1, NO_CPU.kind: 0.6})
    assert blocks.recent() == pytest.approx({work: 0.3, UNKNOWN: 0.1, NO_CPU: 0.6})
    blocks.add({work: 1.0}, 5.0)
    assert blocks.late["TLS records"] == pytest.approx(0.3)


def test_each_work_of_the_page_is_one_that_is_known() -> None:
    page = Path("docs/reference/observability.md").read_text("utf-8")
    rows = page.partition("| `work` | what is done |")[2].partition("\n\n")[0].splitlines()[2:]
    named = [row.split("|")[1].strip().strip("`") for row in rows]
    assert named == [*(kind for kind, _ in WORKS), MODEL_CODE, NO_CPU.kind]
