"""OpenAI's API as a place: every answer below /v1 that is an error is OpenAI's object, also where nothing else is."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.config import Config, LimitsConfig, WebSocketConfig
from models.errors import ModelError
from models.messages import Prompt
from protocols.events import End, Request
from tests.gateway.dialects.text.test_lmi_forms import KINDS, ask, text_spec
from tests.gateway.promises import House, raw, serving

THERE = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/{model}"
NOWHERE = [
    "/v1",
    "/v1/",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/models/",
    "/v1/chat",
    "/v1/chat/completions/",
    "/v1/%63hat/completions",
    "/v1/audio/speech?voice=none",
]
METHODS = [b"GET", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"]


def error_of(answer: tuple[int, dict[str, str], bytes], status: int) -> dict[str, Any]:
    """The error that an answer is, whose shape is checked to the key."""
    got, headers, body = answer
    assert (got, headers["content-type"]) == (status, "application/json")
    document = json.loads(body)
    assert list(document) == ["error"]
    error: dict[str, Any] = document["error"]
    assert list(error) == ["message", "type", "param", "code"]
    return error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", NOWHERE)
async def test_a_path_that_is_not_there_names_those_that_are(path: str, kind: str, autojump_clock: Any) -> None:
    async with serving(text_spec()) as house:
        line = house.line(kind)
        for method in METHODS:
            error = error_of(await house.ask(path, b"", method=method, line=line), 404)
            assert (error["type"], error["code"], error["param"]) == ("not_found_error", "unknown_url", None)
            said = path.partition("?")[0]
            assert error["message"] == f"no such path: {said}; there are: {THERE}"


async def test_a_path_that_only_begins_alike_is_nobodys(autojump_clock: Any) -> None:
    async with serving(text_spec()) as house:
        for path in ("/v1x", "/v10", "/v2/no", "/no/v1/models"):
            status, _, body = await house.ask(path, b"")
            assert (status, json.loads(body)) == (404, {"error": f"no such path: {path}; GET / says what is here"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/m"])
async def test_another_method_is_told_which_there_are(path: str, kind: str, autojump_clock: Any) -> None:
    allowed = ("OPTIONS", "POST") if "completions" in path else ("GET", "HEAD", "OPTIONS")
    async with serving(text_spec()) as house:
        for method in METHODS:
            if method.decode() not in allowed:
                answer = await house.ask(path, b"", method=method, line=house.line(kind))
                assert error_of(answer, 405)["type"] == "invalid_request_error"
                assert answer[1]["allow"] == ", ".join(allowed)


async def upgraded(house: House, path: str) -> tuple[int, dict[str, str], bytes]:
    """The answer to a WebSocket handshake that comes to nothing."""
    line = house.line("http1")
    key = (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ==")
    head = raw(1, b"GET", path, headers=[key, (b"sec-websocket-version", b"13")]).head
    await line.send(Request(stream=1, head=replace(head, upgrade=b"websocket")), End(stream=1))
    status, headers, body = await line.peer.read_answer(1)
    return status, {name.decode(): value.decode() for name, value in headers.items()}, body


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/chat/completions"])
async def test_a_websocket_where_there_is_none(path: str, autojump_clock: Any) -> None:
    config = Config(websocket=WebSocketConfig(any_path=False))
    async with serving(text_spec(), config=config) as house:
        assert error_of(await upgraded(house, path), 404)["code"] == "unknown_url"


POSTS = pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])


@POSTS
@pytest.mark.parametrize(
    ("body", "coding", "status"),
    [
        (b"{", None, 400),
        (b"\xff\xfe", None, 400),
        (b"\xed\xa0\x80", None, 400),
        (b"[]", None, 400),
        (b"x" * 200, None, 413),
        (gzip.compress(b"x" * 2000, mtime=0), "gzip", 413),
        (b"{}", "br", 415),
        (b"no gzip", "gzip", 400),
    ],
)
async def test_a_body_that_cannot_be_read(
    path: str, body: bytes, coding: str | None, status: int, autojump_clock: Any
) -> None:
    async with serving(text_spec(), config=Config(limits=LimitsConfig(text_json=100))) as house:
        fields = [("content-type", "application/json"), *([("content-encoding", coding)] if coding else [])]
        for kind in KINDS:
            error = error_of(await ask(house, path, body, *fields, kind=kind), status)
            assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/v1/no-such"])
async def test_a_server_that_turns_everybody_away_says_so_in_the_same_words(path: str, autojump_clock: Any) -> None:
    async with serving(text_spec()) as house:
        budget = house.gateway.budget
        held = budget.limit * 4 // 5
        assert budget.try_reserve(held)
        known = path != "/v1/no-such"
        error = error_of(
            await house.ask(path, b"", method=b"GET" if path == "/v1/models" else b"POST"), 429 if known else 404
        )
        assert ("limits.total_bytes" in error["message"]) == known
        # a browser asks first, and must hear yes, so that the page can read the refusal
        asked = await house.ask(path, b"", method=b"OPTIONS")
        if known:
            assert asked[0] == 204
        else:
            error_of(asked, 404)
        budget.release(held)


async def test_a_model_whose_code_raises_in_the_words_of_every_status(autojump_clock: Any) -> None:
    async def fails(prompt: Prompt) -> str:
        raise ModelError("as asked", status=int(prompt.text))

    async with serving(text_spec(fails)) as house:
        for status in (400, 403, 409, 422, 424, 429, 500, 502, 503, 507):
            asked = {"prompt": str(status)}
            assert error_of(await ask(house, "/v1/completions", asked), status)["message"] == "as asked"
