"""`GET /`: a short answer that says what this is and where to look, to programs and to people."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.client import Peer
from gateway.config import Config, ListenConfig
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.library.echo import Echo
from models.library.tensors import identity
from protocols.events import End, Head, Request
from tests.gateway.access.asked import BEARER, alice, asking, keys_of
from tests.gateway.access.asked import config as asked_for
from tests.gateway.wires.test_asgi import Server, served

WIRES = ["http1", "http2"]
FIREFOX = b"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
CHROMIUM = b"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8"
PROGRAMS = [b"", b"*/*", b"application/json", b"application/json, text/html;q=0.9", b"text/html;q=0", b"text/*"]
PEOPLE = [FIREFOX, CHROMIUM, b"text/html", b"TEXT/HTML;q=0.5", b"application/json;q=0.4, text/html;q=0.5"]


def connect(there: MemoryGateway, wire: str) -> Peer:
    return there.http1() if wire == "http1" else there.http2()


async def get(
    peer: Peer, path: str = "/", accept: bytes = b"", method: bytes = b"GET"
) -> tuple[int, dict[bytes, bytes], bytes]:
    headers = [(b"accept", accept)] if accept else []
    asked = Request(stream=1, head=Head(method=method, target=path.encode(), authority=b"localhost", headers=headers))
    await peer.send(asked, End(stream=1))
    answer = await peer.read_answer(1)
    peer.close()
    return answer


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("accept", PROGRAMS)
async def test_a_program_is_given_an_object(wire: str, accept: bytes) -> None:
    async with memory_gateway([spec_of(Echo(), "echo"), spec_of(identity, "id")]) as there:
        status, headers, body = await get(connect(there, wire), accept=accept)
        assert (status, headers[b"content-type"], headers[b"vary"]) == (200, b"application/json", b"accept")
        assert json.loads(body) == {
            "name": "everywire",
            "docs": "/v2/openapi.json",
            "models": ["echo", "id"],
            "try": ["GET /v2/health/ready", "GET /v2/models", "POST /models/echo/invoke"],
        }


@pytest.mark.parametrize("accept", PEOPLE)
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_a_browser_is_given_a_page(method: bytes, accept: bytes) -> None:
    async with memory_gateway([spec_of(Echo(), "echo")]) as there:
        status, headers, body = await get(there.http1(), "/?from=a-browser", accept, method)
        assert (status, headers[b"content-type"]) == (200, b"text/html; charset=utf-8")
        assert b"default-src 'none'" in headers[b"content-security-policy"]
        if method == b"HEAD":
            assert (body, int(headers[b"content-length"]) > 0) == (b"", True)
        else:
            assert body.startswith(b"<!doctype html>")
            assert b"<li>echo</li>" in body


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", ("localhost", "unix:/run/x.sock")])
async def test_it_is_there_wherever_the_server_listens(host: str | tuple[str, ...]) -> None:
    async with memory_gateway([spec_of(Echo(), "echo")], config=Config(listen=ListenConfig(host=host))) as there:
        status, _, body = await get(there.http1())
        assert (status, json.loads(body)["models"]) == (200, ["echo"])


async def test_it_names_the_models_that_the_caller_may_list_and_no_others(tmp_path: Path) -> None:
    file = keys_of(tmp_path, alice("models=e*"))
    async with asking("http1", asked_for(file)) as (_, ask):
        assert (await ask("GET", "/"))[0] == 401
        status, _, page = await ask("GET", "/", (*BEARER, (b"accept", FIREFOX)))
        assert (status, [name for name in (b"echo", b"id", b"lm") if b"<li>%b</li>" % name in page]) == (200, [b"echo"])
    async with asking("http1", asked_for(file, open=("metadata",))) as (_, ask):
        told, listed = [json.loads((await ask("GET", path))[2])["models"] for path in ("/", "/v2/models")]
        assert told == listed == ["echo", "id", "lm"]


async def test_what_it_names_is_there() -> None:
    async with memory_gateway([spec_of(identity, "id")]) as there:
        told = json.loads((await get(there.http1()))[2])
        for method, path in [("GET", told["docs"]), *(said.split() for said in told["try"])]:
            status, headers, _ = await get(there.http1(), path, method=b"OPTIONS")
            assert (status, method in headers[b"allow"].decode().split(", ")) == (204, True)


class Text(HTMLParser):
    """The text that a reader sees."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


async def test_a_models_name_is_text_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "<script>alert('1')</script>&amp;"
    async with memory_gateway([spec_of(Echo(), "echo")]) as there:
        workers = there.gateway.supervisor.workers
        monkeypatch.setattr(workers["echo"], "name", name)
        there.gateway.supervisor.workers[name] = workers.pop("echo")
        text = Text()
        text.feed((await get(there.http1(), accept=FIREFOX))[2].decode())
        there.gateway.supervisor.workers["echo"] = workers.pop(name)
    assert name in text.words
    assert "script" not in text.tags


async def test_it_is_there_without_a_model_and_while_the_server_drains(autojump_clock: Any) -> None:
    async with memory_gateway() as there:
        peer = there.http1()
        assert json.loads((await get(there.http1()))[2])["models"] == []
        there.gateway.server.draining, there.gateway.server.draining_since = True, 0.0
        assert (await get(peer))[0] == 200


@pytest.mark.parametrize("root", ["", "/ml"])
async def test_the_mounted_application_has_it_where_it_is_mounted(root: str) -> None:
    async with served(spec_of(Echo(), "echo"), config=Config(listen=ListenConfig(port=-1))) as (app, calls):
        for accept in (b"*/*", FIREFOX):
            headers = [(b"host", b"x"), (b"accept", accept)]
            server = Server(app, path=f"{root}/", root_path=root, method="GET", headers=headers)
            server.body(b"")
            with trio.fail_after(60):
                calls.start_soon(server.run)
                await server.over.wait()
            assert server.answer[0] == 200
            assert b"everywire" in server.answer[1]
