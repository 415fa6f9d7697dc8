"""The gateway in real ASGI servers and frameworks: the paths that they hand on, and what it says where it cannot work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from starlette.applications import Starlette
from starlette.routing import Mount

import gateway.hypercorn
from gateway import client
from gateway.asgi import ASGIApp
from gateway.config import Config, ListenConfig
from gateway.gateway import Gateway
from models.adapt import spec_of
from models.library.echo import Echo
from protocols.events import Frame
from tests.interop.test_hypercorn import served

ROOT = Path(__file__).parents[2]
REMEDY = "use hypercorn with --worker-class trio, or gateway.hypercorn.serve"
LIFESPAN = "must run gateway.serve"


async def get(port: int, target: str) -> tuple[int, bytes]:
    """The answer to GET of a request target as it is written."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join([piece async for piece in stream])
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def talk(port: int, path: str) -> int:
    """101 if a WebSocket there echoes a part, else the status of its refusal."""
    async with client.connect("127.0.0.1", port) as transport:
        try:
            peer = await client.websocket(transport, path)
        except client.UpgradeRefused as e:
            return e.status
        await peer.send(Frame(opcode=2, fin=True, data=b"part"))
        frame = await peer.next_event()
        assert isinstance(frame, Frame)
        assert frame.data == b"part"
        return 101


def gateway_of_echo() -> Gateway:
    return Gateway(Config(listen=ListenConfig(port=-1)), models=[spec_of(Echo(), "echo")])


Needs = Callable[[str, str], Any]


def mounting(kind: str, gateway: Gateway, needs: Needs) -> Any:
    """An application with the gateway below /gw, behind a proxy that removes /api, or without one."""

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve)
            yield
            await gateway.drain()

    if kind == "starlette":
        return Starlette(lifespan=lifespan, routes=[Mount("/gw", ASGIApp(gateway))])
    fastapi = needs("fastapi", "fastapi")
    outer = fastapi.FastAPI(lifespan=lifespan, root_path="/api" if kind == "fastapi behind a proxy" else "")
    outer.mount("/gw", ASGIApp(gateway))
    return outer


async def test_under_hypercorn_with_a_root_path_each_path_is_found_once() -> None:
    async with served(gateway.hypercorn.serve, ASGIApp(gateway_of_echo()), root_path="/p") as port:
        for target in ("/ping", "/p/ping", f"http://127.0.0.1:{port}/ping", f"http://127.0.0.1:{port}/p/ping"):
            assert (await get(port, target))[0] == 200, target
        assert (await get(port, "/pping"))[0] == 404
        assert (await get(port, "/p/p/ping"))[0] == 404
        assert json.loads((await get(port, "/v2/openapi.json"))[1])["servers"] == [{"url": "/p"}]
        assert json.loads((await get(port, "/p"))[1])["docs"] == "/p/v2/openapi.json"
        for path in ("/models/echo/invocations-bidirectional-stream", "/p/invocations-bidirectional-stream"):
            assert await talk(port, path) == 101
        assert [await talk(port, path) for path in ("/v1/realtime", "/p/v1/realtime")] == [404, 404]


@pytest.mark.filterwarnings("ignore:The `root_path` parameter is deprecated")
@pytest.mark.parametrize("kind", ["starlette", "fastapi", "fastapi behind a proxy"])
async def test_mounted_under_hypercorn_each_path_is_found_below_the_mount(kind: str, needs: Needs) -> None:
    async with served(gateway.hypercorn.serve, mounting(kind, gateway_of_echo(), needs)) as port:
        removed = kind == "fastapi behind a proxy"
        at = "/api/gw" if removed else "/gw"
        for place in ("/gw", at):
            assert (await get(port, f"{place}/ping"))[0] == 200
            assert json.loads((await get(port, f"{place}/v2/openapi.json"))[1])["servers"] == [{"url": at}]
            assert json.loads((await get(port, f"{place}/"))[1])["try"][0] == f"GET {at}/v2/health/ready"
            assert await talk(port, f"{place}/models/echo/invocations-bidirectional-stream") == 101
            assert await talk(port, f"{place}/v1/realtime") == 404


async def test_mounted_under_hypercorn_without_a_lifespan_the_first_call_says_what_is_missing(needs: Needs) -> None:
    outer = needs("fastapi", "fastapi").FastAPI()
    outer.mount("/gw", ASGIApp(gateway_of_echo()))
    async with served(gateway.hypercorn.serve, outer) as port:
        status, body = await get(port, "/gw/ping")
        assert (status, LIFESPAN in json.loads(body)["error"]) == (503, True)
        assert await talk(port, "/gw/live") == 503


APP = """
from fastapi import FastAPI
from gateway.asgi import ASGIApp
from gateway.config import Config, ListenConfig
from gateway.gateway import Gateway
from models.library.echo import Echo

app = ASGIApp(Gateway(Config(listen=ListenConfig(port=-1)), models=[Echo()]))
outer = FastAPI()
outer.mount("/gw", app)
"""


@contextmanager
def program(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A server of asyncio as a user starts it."""
    (folder / "app.py").write_text(APP)
    with subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={"PYTHONPATH": f"{ROOT}:{folder}", "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.programs
@pytest.mark.parametrize("server", ["uvicorn --port 0", "hypercorn --bind 127.0.0.1:0"])
def test_a_server_of_asyncio_does_not_start_and_says_how_it_would(server: str, needs: Needs, tmp_path: Path) -> None:
    needs("fastapi", "fastapi")
    needs("uvicorn", "uvicorn")
    with program(tmp_path, *server.split(), "app:app") as process:
        said, _ = process.communicate(timeout=60)
    assert REMEDY in said  # hypercorn's own status is 0 even so


@pytest.mark.programs
async def test_mounted_in_a_server_of_asyncio_calls_are_refused_and_one_line_says_why(needs: Needs, tmp_path: Path) -> None:
    needs("fastapi", "fastapi")
    needs("uvicorn", "uvicorn")
    with program(tmp_path, "uvicorn", "--port", "0", "app:outer") as process:
        assert process.stdout is not None
        said = ""
        while (found := re.search(r"running on http://127.0.0.1:(\d+)", said)) is None:
            line = await trio.to_thread.run_sync(process.stdout.readline)
            assert line, said
            said += line
        port = int(found[1])
        for _ in range(2):
            status, body = await get(port, "/gw/ping")
            assert (status, REMEDY in json.loads(body)["error"]) == (503, True)
        assert (await get(port, "/openapi.json"))[0] == 200
        process.terminate()
        said += (await trio.to_thread.run_sync(process.communicate))[0]
    assert said.count(REMEDY) == 1
