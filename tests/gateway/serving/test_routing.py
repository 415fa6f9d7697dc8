"""Routes: what OPTIONS, HEAD and a wrong method are told, on every wire, and that the connection stays usable."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.config import Config, SageMakerConfig, WebSocketConfig
from gateway.config.problem import ConfigError
from gateway.config.text import show
from gateway.core.exchange import Exchange
from gateway.core.route import WEBSOCKET, Row
from gateway.dialects.v2.requests import refuse
from gateway.gateway import Gateway
from gateway.serving.router import Router
from protocols.events import Data, End, Response
from tests.gateway.promises import Line, Probe, raw, serving, silent

TRANSPORTS = pytest.mark.parametrize("transport", ["http1", "http2"])
MULTI_MODEL = Config(sagemaker=SageMakerConfig(multi_model=True))


async def ask(line: Line, method: bytes, path: str) -> tuple[int, dict[bytes, bytes], bytes]:
    """One request; nothing may come after its answer."""
    stream = line.next_stream()
    headers = [(b"content-length", b"0")] if method == b"POST" else []
    await line.send(raw(stream, method, path, headers=headers, content_length=0 if headers else None), End(stream=stream))
    return await line.peer.read_answer(stream)


def house(config: Config | None = None) -> Any:
    return serving(Probe(silent).spec("v2-http1"), config=config)


# -- OPTIONS


@TRANSPORTS
@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/v2", "GET, HEAD, OPTIONS"),
        ("/v2/models/no-such-model", "GET, HEAD, OPTIONS"),
        ("/v2/models/probe/versions/1/infer", "OPTIONS, POST"),
        ("/v2/logging", "GET, HEAD, OPTIONS, POST"),
        ("/models/any", "DELETE, GET, HEAD, OPTIONS"),
        ("/invocations-bidirectional-stream", "GET, OPTIONS"),
        ("*", "DELETE, GET, HEAD, OPTIONS, POST"),
    ],
)
async def test_options_says_what_a_path_takes_and_has_no_body(transport: str, path: str, allow: str) -> None:
    async with house(MULTI_MODEL) as served:
        line = served.line(transport)
        for _ in range(2):
            status, headers, body = await ask(line, b"OPTIONS", path)
            assert (status, headers[b"allow"].decode(), body) == (204, allow, b"")
            assert b"content-length" not in headers  # RFC 9110 section 8.6
        assert (await ask(line, b"GET", "/v2"))[0] == 200


@TRANSPORTS
async def test_options_of_an_unknown_path_is_404(transport: str) -> None:
    async with house() as served:
        status, headers, body = await ask(served.line(transport), b"OPTIONS", "/v2/no/such/path")
        assert (status, b"allow" in headers) == (404, False)
        assert "no such path" in json.loads(body)["error"]


# -- HEAD


@TRANSPORTS
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2", 200),
        ("/v2/health/live", 200),
        ("/v2/models/probe", 200),
        ("/v2/models/probe/stats", 200),
        ("/v2/openapi.json", 200),
        ("/ping", 200),
        ("/v2/models/other", 404),
        ("/no/such/path", 404),
        ("/v2/models/probe/infer", 405),
        ("/v2/repository/index", 405),
    ],
)
async def test_head_says_the_length_of_what_it_leaves_out_and_the_connection_goes_on(
    transport: str, path: str, status: int
) -> None:
    async with house() as served:
        line = served.line(transport)
        stream = line.next_stream()
        await line.send(raw(stream, b"HEAD", path), End(stream=stream))
        seen = []
        while not isinstance(event := await line.peer.next_event(), End):
            if isinstance(event, Response | Data):
                seen.append(event)
        assert [type(event) for event in seen] == [Response]
        head = seen[0]
        assert isinstance(head, Response)
        assert head.status == status
        assert int(dict(head.headers)[b"content-length"]) > 0
        again, headers, body = await ask(line, b"GET", "/v2/health/live")
        assert (again, json.loads(body), len(body)) == (200, {"live": True}, int(headers[b"content-length"]))


# -- a method that a path does not take


@TRANSPORTS
@pytest.mark.parametrize(
    ("method", "path", "allow", "words"),
    [
        (b"POST", "/v2", "GET, HEAD, OPTIONS", {"error"}),
        (b"DELETE", "/v2/models/probe/infer", "OPTIONS, POST", {"error"}),
        (b"GET", "/v2/repository/models/probe/load", "OPTIONS, POST", {"error"}),
        (b"PUT", "/v2/logging", "GET, HEAD, OPTIONS, POST", {"error"}),
        (b"POST", "/v2/systemsharedmemory/status", "GET, HEAD, OPTIONS", {"error"}),
        (b"GET", "/models/probe/invoke", "OPTIONS, POST", {"code", "type", "message"}),
        (b"GET", "/endpoints/probe/invocations", "OPTIONS, POST", {"error"}),
        (b"GET", "/invocations", "OPTIONS, POST", {"error", "code"}),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones_in_the_words_of_the_path(
    transport: str, method: bytes, path: str, allow: str, words: set[str]
) -> None:
    async with house(MULTI_MODEL) as served:
        line = served.line(transport)
        status, headers, body = await ask(line, method, path)
        assert (status, headers[b"allow"].decode()) == (405, allow)
        assert headers[b"content-type"] == b"application/json"
        assert json.loads(body).keys() >= words
        assert f"{method.decode()} is not allowed here, only {allow}" in body.decode()
        assert (await ask(line, b"GET", "/v2"))[0] == 200


async def test_a_path_that_is_only_a_websocket_asks_for_the_upgrade() -> None:
    async with serving(Probe(silent, "parts").spec("bidi")) as served:
        status, _, body = await ask(served.line("http1"), b"GET", "/invocations-bidirectional-stream")
        assert (status, "WebSocket" in json.loads(body)["error"]) == (426, True)


def test_every_handler_of_v2_refuses_in_its_own_words() -> None:
    rows = [row for row in Gateway().router.rows if row.path.startswith("/v2")]
    assert len(rows) > 30
    for row in rows:
        assert (row.dialect, row.refuse) == ("v2", refuse), row


def test_every_row_of_other_apis_refuses_in_words_of_its_own() -> None:
    plain = {row.path for row in Gateway(MULTI_MODEL).router.rows if row.refuse is None}
    websocket = Config().websocket.path
    assert plain == {"/", "/ping", "/health", "*", websocket, "/models/{name}" + websocket}


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/ping"), ("POST", "/v2/models/{name}/infer"), (WEBSOCKET, "/v2/models/{name}/infer"), (WEBSOCKET, "*")],
)
def test_two_rows_of_one_method_and_path_are_a_mistake(method: str, path: str) -> None:
    rows = Gateway().router.rows
    with pytest.raises(ConfigError, match=f"two routes answer {re.escape(f'{method} {path}')}"):
        Router([*rows, Row(method, path, silence)])


@given(path=st.text("/{}:ab1*.%", max_size=8).map("/".__add__))
@example("/{a}/{a}")
@example("/{1}")
@example("/{name}")
def test_any_path_of_the_websocket_is_found_or_refused_by_the_name_of_its_setting(path: str) -> None:
    config = Config(websocket=WebSocketConfig(path=path))
    if "{" in path or "}" in path:
        expected = f"websocket.path must be a path that begins with /, without {{ and }}, not {show(path)}"
        with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
            Gateway(config)
    else:
        router = Gateway(config).router
        for asked in (path, f"/models/m{path}"):
            assert router.path_at(asked.encode()) in (path, "/models/{name}" + path)


async def silence(exchange: Exchange) -> None:
    """Answers nothing."""


def test_every_handler_takes_what_its_path_captures_and_a_single_segment_as_its_first_argument() -> None:
    seen = 0
    for row in Gateway(MULTI_MODEL).router.rows:
        captured = re.findall(r"{(\w+)}", row.path)
        first, *taken = inspect.signature(row.handler).parameters.values()
        names = [parameter.name for parameter in taken]
        assert first.name == "exchange"
        assert set(captured) <= set(names), row
        if len(captured) == 1:  # the gateway passes it by position
            seen += 1
            assert (captured[0], taken[0].kind) == (names[0], taken[0].POSITIONAL_OR_KEYWORD), row
    assert seen > 15
