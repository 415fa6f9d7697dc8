"""WebSocket clients that offer subprotocols: each has the one that the model speaks, or does what it does without one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.interop.conftest import absent
from tests.interop.servers import Server, serving
from tests.node import node_program

SETTINGS = '[models.echo]\nfactory = "models.library.echo:Echo"\nsubprotocols = ["v1.echo", "v2.echo"]'
PATH = "/models/echo/invocations-bidirectional-stream"
SPOKEN, FOREIGN = ["other", "v2.echo", "v1.echo"], ["other"]

NODE_WS = """
const WebSocket = require("ws");
const [url, offers] = [process.argv[2], JSON.parse(process.argv[3])];
const socket = new WebSocket(url, offers);
socket.on("error", (e) => { console.log(JSON.stringify({failed: e.message})); process.exit(0); });
socket.on("open", () => socket.send("hello"));
socket.on("message", (data) => {
  console.log(JSON.stringify({chosen: socket.protocol, echoed: String(data)}));
  process.exit(0);
});
"""
UNDICI = """
const { WebSocket } = require("undici");
const [url, offers] = [process.argv[2], JSON.parse(process.argv[3])];
const socket = new WebSocket(url, offers);
socket.onerror = (e) => { console.log(JSON.stringify({failed: String(e.error ?? e.message)})); process.exit(0); };
socket.onopen = () => socket.send("hello");
socket.onmessage = (e) => {
  console.log(JSON.stringify({chosen: socket.protocol, echoed: e.data}));
  process.exit(0);
};
"""


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("subprotocols"), "served.py", [SETTINGS]) as server:
        yield server


def of_node(echo: Server, package: str, program: str, offers: list[str]) -> dict[str, Any]:
    node = node_program()
    if node is None:
        absent("node")
    assert node is not None
    found = subprocess.run([node, "-e", f"require({package!r})"], capture_output=True, timeout=60)
    if found.returncode:
        absent(package)
    url = f"{echo.url.replace('http', 'ws')}{PATH}"
    run = subprocess.run([node, "-", url, json.dumps(offers)], input=program, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    told: dict[str, Any] = json.loads(run.stdout)
    return told


@pytest.mark.parametrize(("package", "program"), [("ws", NODE_WS), ("undici", UNDICI)])
def test_a_client_of_node_has_the_first_of_its_offers_that_the_model_speaks(
    echo: Server, package: str, program: str
) -> None:
    assert of_node(echo, package, program, SPOKEN) == {"chosen": "v2.echo", "echoed": "hello"}
    assert of_node(echo, package, program, []) == {"chosen": "", "echoed": "hello"}
    assert "failed" in of_node(echo, package, program, FOREIGN)  # as browsers do


def test_websocket_client_has_the_first_of_its_offers_that_the_model_speaks(
    echo: Server, needs: Callable[[str, str], Any]
) -> None:
    websocket = needs("websocket-client", "websocket")
    url = f"{echo.url.replace('http', 'ws')}{PATH}"
    for offers, chosen in ((SPOKEN, "v2.echo"), ([], None)):
        socket = websocket.create_connection(url, subprotocols=offers, timeout=60)
        assert socket.getsubprotocol() == chosen
        socket.send("hello")
        assert socket.recv() == "hello"
        socket.close()
    with pytest.raises(websocket.WebSocketException):
        websocket.create_connection(url, subprotocols=FOREIGN, timeout=60)


def test_websockets_has_the_first_of_its_offers_that_the_model_speaks_and_goes_on_without_one(
    echo: Server, needs: Callable[[str, str], Any]
) -> None:
    websockets = needs("websockets", "websockets.sync.client")
    for offers, chosen in ((SPOKEN, "v2.echo"), (FOREIGN, None)):
        with websockets.connect(f"{echo.url.replace('http', 'ws')}{PATH}", subprotocols=offers) as socket:
            assert socket.subprotocol == chosen
            socket.send("hello")
            assert socket.recv(60) == "hello"
