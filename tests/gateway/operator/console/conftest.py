"""A browser, the console in it, and axe-core; what is missing skips the tests by its name."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.vendored import fetched
from tests.gateway.operator.console.served import PATIENCE, Server

AXE = ("axe-core", "4.14.1", "axe.min.js", "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c")
# A free port may be one that browsers refuse, because another protocol has it.
_PORTS = "--explicitly-allowed-ports=1719,1720,1723,2049,3659,4045,4190,5060,5061,6000,6566,6665,6666,6667,6668,6669,6679,6697,10080"
# A violation of the policy is written to the console of the page, and fails its test.
_WATCH = """addEventListener("securitypolicyviolation", event => console.error("policy: " + event.violatedDirective + " " + event.blockedURI))"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", type=Path, help="a folder for pictures of the console, such as docs/pictures")


def pytest_itemcollected(item: pytest.Item) -> None:
    if Path(__file__).parent in item.path.parents:
        item.add_marker("programs")


def absent(name: str) -> None:
    """Skips what needs this, or fails it where the environment was made for it."""
    if name in os.environ.get("EVERYWIRE_REQUIRE", "").split(","):
        pytest.fail(f"{name} is required here and is not there")
    pytest.skip(f"{name} is not there")


def _of_functions(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Playwright's wait, which takes functions alone: an expression is evaluated again at each look, and all but the first
    are refused by the console's policy, so a test with one passes for as long as it comes late.
    """

    def waits(function: str, **options: Any) -> Any:
        assert "=>" in function.partition("\n")[0], f"not a function: {function}"
        return wait(function, **options)

    return waits


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The system's browser, without a window."""
    path = shutil.which("chromium")
    if path is None:
        absent("chromium")
    try:
        api = importlib.import_module("playwright.sync_api")
    except ImportError:
        absent("playwright")
    with api.sync_playwright() as playwright:
        fake = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]  # a microphone that beeps
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", _PORTS, *fake])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of axe-core, as its package has it."""
    package, version, member, digest = AXE
    try:
        body = fetched(package, version, [member])[member]
    except OSError:
        absent("axe-core")
    assert hashlib.sha256(body).hexdigest() == digest
    return body.decode()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers; each takes settings."""
    started: list[Server] = []

    def begin(*settings: str) -> Server:
        server = Server(tmp_path, *settings)
        started.append(server)
        server.start()
        return server

    yield begin
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def console(chromium: Any) -> Callable[..., Any]:
    """Opens the page of a server; at the end of the block nothing was said on its console, and no policy was violated."""

    @contextmanager
    def opened(
        server: Server, screen: str = "", *, width: int = 1280, scheme: str = "light", expect: str = "live", said: int = 0
    ) -> Iterator[Any]:
        context = chromium.new_context(
            viewport={"width": width, "height": 844 if width < 500 else 800}, color_scheme=scheme, has_touch=width < 500
        )
        context.set_default_timeout(PATIENCE * 1000)
        context.add_init_script(_WATCH)
        page, heard = context.new_page(), list[str]()
        page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.wait_for_function = _of_functions(page.wait_for_function)
        page.goto(server.url + screen)
        page.wait_for_selector(f"[data-phase={expect}]")
        yield page
        context.close()
        # a browser itself reports answers that are errors, and servers that are gone
        assert [text for text in heard if "Failed to load resource" not in text] == []

    return opened
