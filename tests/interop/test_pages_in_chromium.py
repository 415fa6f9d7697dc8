"""Pages in Chromium that call models by OpenAI's JavaScript client, langchain.js, the AWS SDK and `fetch`, as npm bundles them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.operator.console.conftest import chromium as chromium
from tests.interop.conftest import absent
from tests.interop.replicas import Nginx
from tests.interop.test_listening import Start, ended
from tests.interop.test_listening import folder as folder
from tests.interop.test_listening import start as start
from tests.interop.test_process import PATIENCE, logged
from tests.interop.test_proxies import TRUST, asked, behind_nginx
from tests.interop.test_proxies import program as program

HERE = Path(__file__).parent / "pages"
MODELS = """
from collections.abc import AsyncIterator

from models.messages import Prompt


async def lm(prompt: Prompt) -> AsyncIterator[str]:
    for word in ("never ", "gonna ", "give"):
        yield word
"""
TEXT = "never gonna give"
PAGE = "<!doctype html><meta charset=utf-8><title>a page</title><script type=module src=bundle.js></script>"
CLIENTS = ("openai4", "openai5", "aws", "langchain", "fetch")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a page, and the clients that npm and esbuild have bundled for it."""
    npm = shutil.which("npm")
    if npm is None:
        absent("npm")
    assert npm is not None
    work = tmp_path_factory.mktemp("page")
    for name in ("package.json", "clients.mjs"):
        shutil.copy(HERE / name, work)
    installed = subprocess.run(
        [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=work, capture_output=True
    )
    if installed.returncode:
        print(installed.stderr.decode(errors="replace"), file=sys.stderr)
        absent("npm")
    site = work / "site"
    site.mkdir()
    command = [
        "clients.mjs",
        "--bundle",
        "--format=esm",
        "--platform=browser",
        f"--outfile={site}/bundle.js",
        "--log-level=error",
    ]
    subprocess.run([str(work / "node_modules" / ".bin" / "esbuild"), *command], cwd=work, check=True, timeout=PATIENCE)
    (site / "index.html").write_text(PAGE)
    return site


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def origins(site: Path) -> Iterator[tuple[str, str]]:
    """Two sites that have the page."""
    with serving(site) as one, serving(site) as other:
        yield one, other


@contextmanager
def serving(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def opened(chromium: Any, url: str) -> Iterator[Any]:
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE * 1000)
    try:
        page = context.new_page()
        page.goto(f"{url}/index.html")
        page.wait_for_function("globalThis.call", timeout=20_000)
        yield page
    finally:
        context.close()


def served(start: Start, folder: Path, *flags: str) -> tuple[subprocess.Popen[str], list[str]]:
    (folder / "page_models.py").write_text(MODELS)
    models = ("--model", "lm=page_models:lm", "--model", "echo=models.library.echo:Echo")
    process = start([sys.executable, "-m", "gateway", *models, *flags])
    at: list[str] = logged(process, "serving")["at"]
    return process, at


def calls(page: Any, base: str, client: str, model: str = "lm") -> dict[str, Any]:
    """The result of a client in the page."""
    result: dict[str, Any] = page.evaluate("([client, base, model]) => call(client, base, model)", [client, base, model])
    return result


def holds(client: str, result: dict[str, Any]) -> None:
    """The client has read a whole answer, a stream, and the fields that it reads."""
    assert "error" not in result, result
    assert TEXT in result["text"]
    if client in ("openai4", "openai5", "langchain"):
        assert result["streamed"] == TEXT
    if client == "aws":
        assert all(word in result["streamed"] for word in TEXT.split())
    if client != "langchain":
        assert result["id"]
    if client in ("openai4", "openai5", "fetch"):
        assert result["own"] == "of-a-page"


def test_a_page_of_an_allowed_origin_calls_with_every_client_and_a_foreign_one_with_none(
    chromium: Any, origins: tuple[str, str], start: Start, folder: Path
) -> None:
    allowed, foreign = origins
    process, (url,) = served(start, folder, "--port", "0", "--set", f'access.origins=["{allowed}"]')
    with opened(chromium, allowed) as page, opened(chromium, foreign) as stranger:
        for client in CLIENTS:
            holds(client, calls(page, url, client))
            told = calls(stranger, url, client)
            assert "error" in told, told
            assert told["status"] is None  # the page learns nothing
    assert ended(process) == 0


def test_a_page_of_an_allowed_origin_can_read_why_it_is_refused(
    chromium: Any, origins: tuple[str, str], start: Start, folder: Path
) -> None:
    allowed, foreign = origins
    process, (url,) = served(start, folder, "--port", "0", "--set", f'access.origins=["{allowed}"]')
    with opened(chromium, allowed) as page, opened(chromium, foreign) as stranger:
        for client, status in (("openai4", 404), ("openai5", 404), ("langchain", 404), ("aws", 400)):
            told = calls(page, url, client, "nobody")
            assert (told["status"], "nobody" in told["message"]) == (status, True), told
        for path, method, size, status, said in (
            ("/v1/completions", "POST", 0, 400, "prompt"),
            ("/none", "POST", 0, 404, "no such path"),
            ("/v1/models", "PUT", 0, 405, "PUT"),
            ("/v1/completions", "POST", 40_000, 431, "head"),
            ("/v1/completions", "POST", 60_000, 431, "head"),
            ("/" + "x" * 10_000, "POST", 0, 414, "first line"),
        ):
            asked = [url + path, method, {"X-My-Own": "1"}, size]
            told = page.evaluate("request => refused(...request)", asked)
            assert told is not None, (path, method, size)
            assert (told[0], said in told[1]) == (status, True), told
            assert stranger.evaluate("request => refused(...request)", asked) is None
    assert ended(process) == 0


@pytest.mark.parametrize("file", ["nginx.conf", "nginx-replicas.conf"])
def test_a_page_behind_nginx_calls_the_server_that_it_came_from(
    chromium: Any, site: Path, start: Start, folder: Path, curl: str, program: Callable[[str], str], file: str
) -> None:
    """At a port that is neither 80 nor 443, and without a setting: a page of the same host's other port is foreign."""
    there = (
        "    location / {",
        f"    location /page/ {{ alias {site}/; types {{ text/html html; text/javascript js; }} }}\n\n    location / {{",
    )
    if file == "nginx.conf":
        process, _ = served(start, folder, *TRUST, "--set", f"listen.host=unix:{folder}/s")
        nginx, port = behind_nginx(start, folder, program("nginx"), f"unix:{folder}/s", there)
        close = partial(ended, nginx)
    else:
        process, (url,) = served(start, folder, *TRUST, "--port", "0")
        front = Nginx(program("nginx"), folder, [Listed(url.removeprefix("http://"))], there)  # type: ignore[list-item]
        port, close = front.port, front.close  # type: ignore[assignment]
    asked(curl, port)
    with (
        serving(site) as foreign,
        opened(chromium, f"http://127.0.0.1:{port}/page") as page,
        opened(chromium, foreign) as stranger,
    ):
        base = f"127.0.0.1:{port}"
        for client in CLIENTS:
            holds(client, calls(page, f"http://{base}", client))
            assert "error" in calls(stranger, f"http://{base}", client)
        path = "/models/echo/invocations-bidirectional-stream"
        assert page.evaluate("url => socket(url)", f"ws://{base}{path}") == "hello"
        assert stranger.evaluate("url => socket(url)", f"ws://{base}{path}") is None
    close()
    assert ended(process) == 0


class Listed:
    """A gateway in nginx's list."""

    def __init__(self, at: str) -> None:
        self.at = at
