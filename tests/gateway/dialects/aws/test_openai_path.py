"""OpenAI's clients at SageMaker's path: an endpoint, or a component, names the model; a container behind it gets the chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.client import Peer
from gateway.config import AccessConfig, Config, EndpointConfig, LimitsConfig, VariantConfig
from gateway.containers.model import container_spec
from gateway.net.transport import Transport
from models.adapt import spec_of
from models.messages import InferRequest, Part, Prompt
from protocols.events import Data, End, Request, Response
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from tests.gateway.access.asked import KEY, WRONG, alice, keys_of
from tests.gateway.containers.containers import Containers, containers, read_request
from tests.gateway.dialects.aws.test_signatures import on, signed
from tests.gateway.dialects.text.test_lmi_forms import KINDS, ask, text_spec
from tests.gateway.dialects.text.test_openai_paths import METHODS, error_of, upgraded
from tests.gateway.promises import House, serving

KiB = 1024
ENDPOINT = "/endpoints/m/openai/v1/chat/completions"
COMPONENT = "/endpoints/any/inference-components/m/openai/v1/chat/completions"
PATHS = pytest.mark.parametrize("path", [ENDPOINT, COMPONENT])
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


async def says(prompt: Prompt) -> AsyncIterator[str]:
    yield "Hello"
    yield " there"


def plain(body: bytes) -> bytes:
    """An answer without its times."""
    document = json.loads(body.removeprefix(b"data: ")) if body != b"data: [DONE]" else {}
    return json.dumps({**document, "created": 0}).encode()


@PATHS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_is_that_of_openais_own_path(path: str, kind: str, stream: bool, autojump_clock: Any) -> None:
    async with serving(text_spec(says)) as house:
        asked = {**HI, "model": "m", "stream": stream}
        status, headers, body = await ask(house, "/v1/chat/completions", asked, kind=kind)
        here = await ask(house, path, asked, kind=kind)
        assert (here[0], here[1]["content-type"]) == (status, headers["content-type"]) == (200, headers["content-type"])
        events = [answer.split(b"\n\n") if stream else [answer] for answer in (body, here[2])]
        assert [plain(event) for event in events[0] if event] == [plain(event) for event in events[1] if event]
        assert house.endings == {"complete": 2}


@PATHS
@pytest.mark.parametrize(
    ("sent", "echoed"), [({"model": "gpt-4o"}, "gpt-4o"), ({"model": "other"}, "other"), ({"model": ""}, "m"), ({}, "m")]
)
async def test_the_path_names_the_model_whatever_the_body_says(
    path: str, sent: dict[str, str], echoed: str, autojump_clock: Any
) -> None:
    async def other(prompt: Prompt) -> str:
        raise AssertionError("the path names another model")

    async with serving(text_spec(says), text_spec(other, "other")) as house:
        status, _, body = await ask(house, path, {**HI, **sent})
        document = json.loads(body)
        assert (status, document["model"]) == (200, echoed)
        assert document["choices"][0]["message"]["content"] == "Hello there"


async def test_an_endpoint_has_its_variants_here_too(autojump_clock: Any) -> None:
    def named(name: str) -> Any:
        async def model(prompt: Prompt) -> str:
            return name

        return text_spec(model, name)

    variants = {name: VariantConfig(model=name) for name in ("blue", "green")}
    config = Config(endpoints={"live": EndpointConfig(variants=variants)})
    path = "/endpoints/live/openai/v1/chat/completions"
    async with serving(named("blue"), named("green"), config=config) as house:

        async def said(*headers: tuple[str, str]) -> str:
            text: str = json.loads((await ask(house, path, HI, *headers))[2])["choices"][0]["message"]["content"]
            return text

        assert [await said() for _ in range(4)] == ["blue", "green", "blue", "green"]
        assert await said(("x-amzn-sagemaker-target-variant", "green")) == "green"
        refused = await ask(house, path, HI, ("x-amzn-sagemaker-target-variant", "grey"))
        assert "blue, green" in error_of(refused, 400)["message"]


async def tensors(request: InferRequest) -> Any:
    return {"y": np.zeros(1)}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "says_it"),
    [
        (ENDPOINT.replace("/m/", "/no/"), HI, 404, "model_not_found", "no endpoint 'no'; there are: m, t"),
        (COMPONENT.replace("/m/", "/no/"), HI, 404, "model_not_found", "no endpoint 'no'"),
        (ENDPOINT.replace("/m/", "/a_b/"), HI, 400, None, "EndpointName"),
        (ENDPOINT.replace("/m/", "/t/"), HI, 400, None, "speaks tensor"),
        (ENDPOINT, b"{", 400, None, "JSON"),
        (ENDPOINT, [], 400, None, "an object"),
        (ENDPOINT, {}, 400, None, "messages"),
        (ENDPOINT, {**HI, "model": 3}, 400, None, "model"),
        (ENDPOINT, {**HI, "temperature": 9}, 400, None, "temperature"),
        (ENDPOINT, {**HI, "user": "x" * 300}, 413, "request_too_large", "limits.text_json"),
    ],
)
async def test_errors_have_openais_form(
    path: str, body: Any, status: int, code: str | None, says_it: str, autojump_clock: Any
) -> None:
    config = Config(limits=LimitsConfig(text_json=200))
    async with serving(text_spec(says), spec_of(tensors, "t"), config=config) as house:
        for kind in KINDS:
            error = error_of(await ask(house, path, body, kind=kind), status)
            assert (error["code"], says_it in error["message"]) == (code, True)


NOWHERE = ["", "/", "/v1", "/v1/models", "/v1/completions", "/v1/chat/completions/", "/v1/responses?x=1", "/v2"]
BASES = {"/endpoints/m/openai": "/endpoints/{endpoint}", "/endpoints/m/inference-components/c/openai": "/endpoints/{endpoint}/inference-components/{component}"}  # fmt: skip


@pytest.mark.parametrize("below", NOWHERE)
@pytest.mark.parametrize(("base", "known"), BASES.items())
async def test_another_path_below_is_no_url_of_this_api(base: str, known: str, below: str, autojump_clock: Any) -> None:
    async with serving(text_spec(says)) as house:
        line, path = house.line("http1"), base + below
        for method in METHODS:
            error = error_of(await house.ask(path, b"", method=method, line=line), 404)
            assert (error["type"], error["code"]) == ("not_found_error", "unknown_url")
            there = f"there are: POST {known}/openai/v1/chat/completions"
            assert error["message"] == f"no such path: {path.partition('?')[0]}; {there}"


@PATHS
async def test_another_method_is_told_which_there_is_and_a_websocket_that_it_is_nowhere(
    path: str, autojump_clock: Any
) -> None:
    async with serving(text_spec(says)) as house:
        for method in (b"GET", b"PUT", b"DELETE"):
            answer = await house.ask(path, b"", method=method)
            assert (error_of(answer, 405)["type"], answer[1]["allow"]) == ("invalid_request_error", "OPTIONS, POST")
        assert error_of(await upgraded(house, path), 404)["code"] == "unknown_url"


async def test_a_path_that_only_begins_alike_is_nobodys(autojump_clock: Any) -> None:
    async with serving(text_spec(says)) as house:
        for path in ("/endpoints/m/openai2", "/endpoints/m/x/openai", "/x/endpoints/m/openai"):
            status, _, body = await house.ask(path, b"")
            assert (status, type(json.loads(body)["error"])) == (404, str)


@PATHS
async def test_a_bearer_is_looked_at_only_where_there_are_keys(path: str, tmp_path: Path, autojump_clock: Any) -> None:
    def bearer(key: str) -> tuple[str, str]:
        return ("authorization", f"Bearer {key}")

    async with serving(text_spec(says)) as house:
        for key in ("bedrock-api-key-of-sagemaker", "", KEY):
            assert (await ask(house, path, HI, bearer(key)))[0] == 200
    files = keys_of(tmp_path, alice("models=m"))
    other = path.replace("/m/", "/other/")
    async with serving(
        text_spec(says), text_spec(says, "other"), config=Config(access=AccessConfig(keys_file=files))
    ) as house:
        assert (await ask(house, path, HI, bearer(KEY)))[0] == 200
        assert error_of(await ask(house, path, HI, bearer(WRONG)), 401)["code"] == "invalid_api_key"
        assert error_of(await ask(house, path, HI), 401)["code"] == "invalid_api_key"
        assert error_of(await ask(house, other, HI, bearer(KEY)), 404)["code"] == "model_not_found"


@PATHS
async def test_where_signatures_are_verified_they_are_here_too(path: str) -> None:
    body = json.dumps(HI).encode()
    async with serving(text_spec(says), config=on()) as house:

        async def answered(request: Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
            line = house.line("http1")
            await line.send(request, Data(stream=1, buffers=(body,)), End(stream=1))
            status, headers, whole = await line.peer.read_answer(1)
            return status, {name.decode(): value.decode() for name, value in headers.items()}, whole

        assert (await answered(signed(path, body=body), body))[0] == 200
        other = body.replace(b"Hi", b"Ho")
        assert error_of(await answered(signed(path, body=body), other), 403)["type"] == "permission_error"
        assert error_of(await ask(house, path, HI, ("authorization", "Bearer x")), 403)["type"] == "permission_error"


# -- a container behind the gateway ------------------------------------------------------------------------------------

Answer = Callable[[Peer, str], Awaitable[None]]
OWN = {"error": {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}}


async def reply(peer: Peer, status: int, content_type: str, *pieces: bytes) -> None:
    await peer.send(Response(stream=1, status=status, headers=[(b"content-type", content_type.encode())]))
    for piece in pieces:
        await peer.send(Data(stream=1, buffers=(piece,)))
    await peer.send(End(stream=1))


@asynccontextmanager
async def behind(
    answer: Answer, seen: list[tuple[str, bytes, dict[bytes, bytes]]] | None = None
) -> AsyncIterator[tuple[House, Containers]]:
    """A gateway whose model `m` is a container; `answer` answers each call of it, and is told the path."""

    async def serve(transport: Transport) -> None:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        request, body = await read_request(peer)
        path = request.head.target.decode()
        if path == "/ping":
            await reply(peer, 200, "text/plain")
            return
        if seen is not None:
            seen.append((path, body, dict(request.head.headers)))
        await answer(peer, path)

    async with containers(serve) as found:
        spec = container_spec("ws://container:8080", name="m", dial=found.dial)
        async with serving(spec) as house:
            yield house, found


@PATHS
@pytest.mark.parametrize("kind", KINDS)
async def test_a_container_gets_the_chat_as_it_came_at_openais_path(path: str, kind: str) -> None:
    seen: list[tuple[str, bytes, dict[bytes, bytes]]] = []

    async def answer(peer: Peer, path: str) -> None:
        await reply(peer, 200, "application/json", b'{"id":', b'"1"}')

    asked = b' {"model": "", "messages": [], "anything": 1}'
    fields = [("content-type", "application/json"), ("authorization", "Bearer secret")]
    async with behind(answer, seen) as (house, _):
        status, headers, body = await house.ask(path, asked, *fields, line=house.line(kind))
        assert (status, headers["content-type"], body) == (200, "application/json", b'{"id":"1"}')
        assert house.endings == {"complete": 1}
    [(called, sent, given)] = seen
    assert (called, sent, given[b"content-type"]) == ("/v1/chat/completions", asked, b"application/json")
    assert b"authorization" not in given


async def test_a_container_without_that_path_gets_it_at_invocations() -> None:
    seen: list[tuple[str, bytes, dict[bytes, bytes]]] = []

    async def answer(peer: Peer, path: str) -> None:
        if path == "/invocations":
            await reply(peer, 200, "application/json", b"{}")
        else:
            await reply(peer, 404, "text/plain", b"not here")

    async with behind(answer, seen) as (house, found):
        assert (await ask(house, ENDPOINT, HI))[::2] == (200, b"{}")
        assert [(path, json.loads(body)) for path, body, _ in seen] == [("/v1/chat/completions", HI), ("/invocations", HI)]
        await house.still()
        assert found.all_closed
        assert house.gateway.budget.used == 0


@pytest.mark.parametrize(
    ("status", "text", "called", "error"),
    [
        (400, "bad input", 1, {"message": "bad input", "type": "invalid_request_error", "param": None, "code": None}),
        (503, "busy", 1, {"message": "busy", "type": "server_error", "param": None, "code": "unavailable"}),
        (404, "nothing", 2, {"message": "nothing", "type": "not_found_error", "param": None, "code": "model_not_found"}),
        (404, json.dumps(OWN), 2, {**OWN["error"], "code": "404"}),
        (422, '{"error": "text"}', 1, {"message": '{"error": "text"}', "type": "invalid_request_error", "param": None,
                                       "code": None}),
    ],
)  # fmt: skip
async def test_an_error_of_the_container_has_openais_form_and_is_its_own_if_it_has_that_already(
    status: int, text: str, called: int, error: dict[str, Any]
) -> None:
    seen: list[tuple[str, bytes, dict[bytes, bytes]]] = []

    async def answer(peer: Peer, path: str) -> None:
        await reply(peer, status, "application/json", text.encode())

    async with behind(answer, seen) as (house, _):
        assert error_of(await ask(house, ENDPOINT, HI), status) == error
        assert len(seen) == called


async def test_a_stream_of_the_container_comes_as_it_goes() -> None:
    go = trio.Event()

    async def answer(peer: Peer, path: str) -> None:
        await peer.send(Response(stream=1, status=200, headers=[(b"content-type", b"text/event-stream")]))
        await peer.send(Data(stream=1, buffers=(b"data: 1\n\n",)))
        await go.wait()
        await peer.send(Data(stream=1, buffers=(b"data: [DONE]\n\n",)), End(stream=1))

    async with behind(answer) as (house, _):
        line = house.line("http1")
        await line.send(*house.posted(1, ENDPOINT, json.dumps({**HI, "stream": True}).encode()))
        assert bytes((await line.data(1)).buffers[0]) == b"data: 1\n\n"
        go.set()
        assert bytes((await line.data(1)).buffers[0]) == b"data: [DONE]\n\n"


async def test_a_client_that_leaves_closes_the_containers_connection() -> None:
    async def answer(peer: Peer, path: str) -> None:
        await peer.send(Response(stream=1, status=200))
        await peer.send(Data(stream=1, buffers=(b"data: 1\n\n",)))
        await peer.next_event()  # until the gateway leaves

    async with behind(answer) as (house, found):
        line = house.line("http2")
        await line.send(*house.posted(1, ENDPOINT, json.dumps(HI).encode()))
        await line.data(1)
        assert not found.all_closed
        line.reset()
        await house.still()
        assert (found.all_closed, house.endings) == (True, {"cancelled-by-client": 1})


async def test_a_client_that_does_not_read_stops_the_container() -> None:
    sent = 0

    async def answer(peer: Peer, path: str) -> None:
        nonlocal sent
        await peer.send(Response(stream=1, status=200))
        while True:
            await peer.send(Data(stream=1, buffers=(bytes(16 * KiB),)))
            sent += 16 * KiB

    async with behind(answer) as (house, _):
        line = house.line("http2")
        await line.send(*house.posted(1, ENDPOINT, json.dumps(HI).encode()))
        await wait_all_tasks_blocked(0.01)
        held = sent
        assert 0 < held < 1024 * KiB
        await wait_all_tasks_blocked(0.01)
        assert sent == held
        line.reset()
        await house.still()


async def test_a_stream_that_is_cut_off_is_visibly_so() -> None:
    async def answer(peer: Peer, path: str) -> None:
        await peer.send(Response(stream=1, status=200))
        await peer.send(Data(stream=1, buffers=(b"data: 1\n\n",)))

    async with behind(answer) as (house, _):
        with pytest.raises(Exception, match=r"cut|reset|closed|ended"):
            await ask(house, ENDPOINT, HI)
        assert house.endings == {"model-error": 1}


async def test_a_model_of_parts_of_this_process_is_no_container_and_answers_as_text(autojump_clock: Any) -> None:
    def upper(part: Part) -> bytes:
        return bytes(part.data).upper()

    async with serving(spec_of(upper, "m", platform="container")) as house:
        status, _, body = await ask(house, ENDPOINT, HI)
        assert (status, "HI" in json.loads(body)["choices"][0]["message"]["content"]) == (200, True)
