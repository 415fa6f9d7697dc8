"""The operator plane of several fronts, and every wire over them, as programs: curl asks, and a WebSocket of our own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway import client
from tests.gateway.fronts.served import APP, Server, calling, port_of, served, until, who

pytestmark = pytest.mark.programs
PLANE = ("--set", "operator.port=0")
WHO = '{"inputs": "who"}'


async def curl(*arguments: str) -> str:
    command = ["curl", "-sS", "--max-time", "20", *arguments]
    done = await trio.to_thread.run_sync(partial(subprocess.run, command, capture_output=True, text=True))
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@asynccontextmanager
async def operated(folder: Path, *flags: str) -> AsyncIterator[tuple[Server, int, str]]:
    """A server, its port, and the URL of its plane."""
    async with served(folder, *PLANE, *flags) as server:
        port = await server.port()
        yield server, port, (await server.logged("operator plane"))["at"]


async def asked(port: int, times: int) -> None:
    for _ in range(times):
        async with calling(port) as caller:
            await who(caller)


def counted(metrics: str, name: str, *labels: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(name) and all(label in line for label in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def test_metrics_are_what_clients_counted_also_after_the_fronts_were_replaced(tmp_path: Path) -> None:
    async with operated(tmp_path) as (server, port, plane):
        await asked(port, 7)
        metrics = await curl(f"{plane}/metrics")
        assert counted(metrics, "everywire_exchanges_total", 'model="who"', 'ending="complete"') == 7
        assert counted(metrics, "everywire_exchange_duration_seconds_count", 'model="who"') == 7
        assert counted(metrics, "everywire_build_info") == 1
        assert counted(metrics, "everywire_fronts") == 2
        samples = [line.rpartition(" ")[0] for line in metrics.splitlines() if not line.startswith("#")]
        assert len(set(samples)) == len(samples)
        assert "front=" not in metrics
        stats = json.loads(await curl(f"{plane}/stats"))
        assert stats["models"]["who"]["endings"] == {"complete": 7}
        assert stats["address"] == [f"http://127.0.0.1:{port}"]
        server.process.send_signal(signal.SIGHUP)
        await server.logged("fronts replaced")
        await asked(port, 3)
        metrics = await curl(f"{plane}/metrics")
        assert counted(metrics, "everywire_exchanges_total", 'model="who"', 'ending="complete"') == 10
        assert json.loads(await curl(f"{plane}/stats"))["models"]["who"]["endings"] == {"complete": 10}
        points: list[Any] = []
        while not points or points[-1]["models"]["who"]["endings"] != {"complete": 10}:
            points = json.loads(await curl(f"{plane}/history"))["points"]


async def test_models_streams_and_the_log_are_those_of_all(tmp_path: Path) -> None:
    async with operated(tmp_path, "--set", "models.who.capacity=3") as (server, port, plane):
        assert json.loads(await curl(f"{plane}/health/ready"))["ready"] is True
        (row,) = [model for model in json.loads(await curl(f"{plane}/models"))["models"] if model["name"] == "who"]
        assert (row["state"], row["capacity"]) == ("ready", 6)
        async with calling(port) as one, calling(port) as other:
            for caller in (one, other):
                await caller.stream.send_all(
                    b"POST /predictions/slow HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n"
                    b'{"inputs": "100000"}'
                )
            streams: dict[str, Any] = {}
            while streams.get("live") != 2:
                streams = json.loads(await curl(f"{plane}/streams"))
            assert [view["model"] for view in streams["streams"]] == ["slow", "slow"]
            assert streams["connections"] == 2
            assert [hop["name"] for hop in streams["streams"][0]["hops"]] == ["received", "queued", "socket"]
            for view in streams["streams"]:
                told = json.loads(await curl("-X", "POST", f"{plane}/streams/{view['id']}/end"))
                assert told["id"] == view["id"]
            while json.loads(await curl(f"{plane}/streams"))["live"]:
                pass
            assert json.loads(await curl(f"{plane}/stats"))["models"]["slow"]["endings"] == {"ended-by-operator": 2}
            missing = json.loads(await curl("-X", "POST", f"{plane}/streams/none/end"))
            assert missing["code"] == "NotFound"
        for _ in range(4):
            await curl(
                "-d", '{"inputs": "no number"}', "-H", "content-type: application/json", f"127.0.0.1:{port}/predictions/slow"
            )
        (group,) = json.loads(await curl(f"{plane}/incidents"))["incidents"]
        assert (group["type"], group["count"], len(set(group["numbers"]))) == ("ValueError", 4, 4)
        for number in group["numbers"]:
            assert "int(prompt.text)" in json.loads(await curl(f"{plane}/incidents/{number}"))["traceback"]
        put = ("-X", "PUT", "-H", "content-type: application/json", "-d", '{"level": "error"}')
        assert json.loads(await curl(*put, f"{plane}/log")) == {"level": "error"}
        written = len(server.all("exchange"))
        await asked(port, 4)
        assert len(server.all("exchange")) == written


async def test_events_are_those_of_all_and_a_dead_front_closes_its_streams(tmp_path: Path) -> None:
    async with operated(tmp_path) as (server, port, plane):
        file = tmp_path / "events"
        command = ["curl", "-sSN", "--max-time", "60", "-o", str(file), f"{plane}/streams/events?interval=0.1"]
        reader = subprocess.Popen(command)  # noqa: ASYNC220
        try:

            def ids(event: str) -> list[str]:
                text = file.read_text() if file.exists() else ""
                return re.findall(rf'event: {event}\ndata: {{"id":"(\w+)"', text)

            async with calling(port) as one, calling(port) as other:
                for caller in (one, other):
                    await caller.stream.send_all(
                        b"POST /predictions/slow HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                        b'content-length: 20\r\n\r\n{"inputs": "100000"}'
                    )
                await until(lambda: len(ids("opened")) == 2)
                (server.process.send_signal)(signal.SIGCONT)
                victim = min(server.fronts)
                await trio.to_thread.run_sync(partial(subprocess.run, ["kill", "-KILL", str(victim)]))
                await until(lambda: len(ids("closed")) == 1)
                assert set(ids("closed")) < set(ids("opened"))
                assert file.read_text().count("event: models") >= 1
        finally:
            reader.kill()
            reader.wait()


async def test_a_model_is_reloaded_in_all_fronts_and_none_is_loaded_in_one(tmp_path: Path) -> None:
    async with operated(tmp_path) as (server, _, plane):
        view = json.loads(await curl("-X", "POST", f"{plane}/models/who/reload"))
        assert view["state"] == "ready"
        assert "send SIGHUP" in view["code"]
        assert {record["front"] for record in server.all("model reloaded")} == {0, 1}
        refused = json.loads(await curl("-X", "POST", f"{plane}/models/who/load"))
        assert refused["code"] == "Conflict"
        assert "listen.processes = 2" in refused["error"]
        missing = json.loads(await curl("-X", "POST", f"{plane}/models/none/reload"))
        assert missing["code"] == "NotFound"


async def test_a_drain_by_the_plane_answers_with_the_sum(tmp_path: Path) -> None:
    async with operated(tmp_path) as (server, _, plane):
        told = json.loads(await curl("-X", "POST", "-d", '{"wait": true}', f"{plane}/drain"))
        assert told["draining"] is True
        assert told["report"]["clean"] is True
        assert await server.ended() == 0


async def test_the_plane_has_one_token_for_all(tmp_path: Path) -> None:
    token = "a-token-of-sixteen-or-more"
    async with operated(tmp_path, "--set", f"operator.token={token}") as (_, _, plane):
        assert json.loads(await curl(f"{plane}/models"))["code"] == "Unauthorized"
        assert len(json.loads(await curl("-H", f"authorization: Bearer {token}", f"{plane}/models"))["models"]) == 2


async def test_http2_tls_and_a_unix_socket_work_over_all_fronts(tmp_path: Path) -> None:
    path, tls = tmp_path / "s", ("--tls-dev", "--tls-port", "0", "--set", f"tls.dev_dir={tmp_path}/tls")
    async with served(tmp_path, "--host", f'["127.0.0.1", "unix:{path}"]', *tls) as server:
        post = ("-H", "content-type: application/json", "-d", WHO)
        plain, secure = await server.port(), await server.port("https://")
        ways: list[tuple[str, ...]] = [
            ("--http2-prior-knowledge", f"http://127.0.0.1:{plain}/predictions/who"),
            ("--http2", "--cacert", f"{tmp_path}/tls/ca.pem", f"https://localhost:{secure}/predictions/who"),
            ("--http1.1", "--cacert", f"{tmp_path}/tls/ca.pem", f"https://localhost:{secure}/predictions/who"),
            ("--unix-socket", str(path), "http://localhost/predictions/who"),
        ]
        for way in ways:
            answers = [json.loads(await curl(*post, *way))["generated_text"] for _ in range(4)]
            assert {int(answer.split()[0]) for answer in answers} <= server.fronts
            assert len(set(answers)) == 2
        assert await server.drained() == 0
        assert not path.exists()


async def test_a_websocket_stays_with_its_front_and_hears_of_a_drain(tmp_path: Path) -> None:
    flags = ("--model", "echo=models.library.echo:Echo", "--set", "bidi.default_model=echo", "--set", "drain.timeout=1s")
    async with served(tmp_path, *flags) as server:
        async with client.connect("127.0.0.1", await server.port()) as transport:
            peer = await client.websocket(transport, "/invocations-bidirectional-stream")
            server.process.send_signal(signal.SIGTERM)
            while type(event := await peer.next_event()).__name__ not in ("Close", "ConnectionEnd"):
                pass
            assert getattr(event, "code", None) == 1001
        assert await server.ended() == 3


async def test_addresses_of_systemd_and_a_taken_port_are_told_as_ever(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        port = port_of((await server.logged("serving"))["at"][0])
        (tmp_path / "other").mkdir()
        async with served(tmp_path / "other", "--port", str(port)) as second:
            assert await second.ended() == 1
            assert "--port sets another" in (await second.logged("cannot serve"))["reason"]
            assert not second.all("front started")


SILENT = """

async def silent(prompt: Prompt) -> AsyncIterator[str]:
    yield "one"
    await trio.sleep_forever()
"""


@pytest.mark.parametrize("apart", ["false", "true"])
async def test_a_model_that_says_nothing_behind_fronts_is_named_by_their_parent(tmp_path: Path, apart: str) -> None:
    settings = ("--model", "app:silent", "--set", "models.silent.stall_timeout=6")
    flags = (*PLANE, *settings, "--set", f"models.silent.process.enabled={apart}")
    async with served(tmp_path, *flags, app=APP + SILENT) as server:
        port, plane = await server.port(), (await server.logged("operator plane"))["at"]
        ask = f"http://127.0.0.1:{port}/predictions/silent"
        told = list[str]()
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                told.append(await curl("-H", "content-type: application/json", "-d", '{"inputs": "x", "stream": true}', ask))

            nursery.start_soon(call)
            sentences = set[str]()
            while not told:
                sentences.add(json.loads(await curl(f"{plane}/stats"))["verdict"]["sentence"])
                await trio.sleep(0.2)
        assert "stall_timeout" in told[0]
        assert any(re.fullmatch(r"silent has sent nothing for \S+ s, at \S+/app.py:\d+ in silent", one) for one in sentences)
