"""The paths and queries of WebSockets: none reaches another model than it names, and OpenAI's paths reach none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway import client
from gateway.config import BidiConfig, Config, EndpointConfig, ListenConfig, VariantConfig, WebSocketConfig
from gateway.config.exposure import warnings
from gateway.config.load import load, resolve
from gateway.containers.connection import ContainerLimits
from gateway.containers.emulate import Emulation
from gateway.gateway import Gateway
from models.messages import Part
from models.session import Session
from protocols.events import End, Frame
from tests.gateway.promises import House, Probe, raw, serving, silent
from tests.gateway.wires.test_asgi import HANDSHAKE, Server, served

REFUSED = {"websocket.http.response": {}}
ONE = Config(bidi=BidiConfig(default_model="one"))

OF_OPENAI = [
    "/v1",
    "/v1/",
    "/v1/realtime",
    "/v1/realtime?model=one",
    "/v1/realtime?intent=transcription",
    "/v1/responses",
    "/v1/responses/x",
    "/v1/live/beta",
    "/v1/realtime/translations",
    "/v1/realtime/calls?call_id=1",
    "/v1/chat/completions",
    "/v1/completions?model=two",
    "/v1/models",
    "/v1/models/one",
    "//v1/realtime",
    "/v1//realtime",
    "///v1",
    "/v1%2Frealtime",
    "/%76%31/realtime",
    "/%2Fv1/realtime",
    "/./v1/realtime",
    "/x/../v1/realtime",
    "/x/..%2fv1/realtime",
    "/v1/invocations-bidirectional-stream",
    "/endpoints/one/openai",
    "/endpoints/one/openai/v1/realtime?model=one",
    "/endpoints/nobody/openai/v1/chat/completions",
    "//endpoints//one//openai/x",
    "/endpoints/one%2Fopenai",
    "/endpoints/one/inference-components/two/openai",
    "/endpoints/one/inference-components/two/openai/v1/realtime",
]


def two_models() -> list[Any]:
    return [Probe(says_its_name, name).spec("websocket") for name in ("one", "two")]


async def says_its_name(probe: Probe, session: Session[Any, Any]) -> None:
    await session.send(Part(data=session.call.model.encode()))


async def asked(house: House, path: str) -> tuple[int, bytes]:
    """The status and the first frame of a WebSocket, or the body of its refusal."""
    try:
        peer = await client.websocket(house.line("http1").transport, path)
    except client.UpgradeRefused as e:
        return e.status, e.body
    frame = await peer.next_event()
    assert isinstance(frame, Frame)
    peer.close()
    return 101, bytes(frame.data)


def openais(answer: tuple[int, bytes]) -> tuple[str, str]:
    status, body = answer
    assert status == 404
    error = json.loads(body)["error"]
    assert (error["type"], error["param"]) == ("not_found_error", None)
    return error["code"], error["message"]


@pytest.mark.parametrize("any_path", ["outside-v1", "none", True, False])
@pytest.mark.parametrize("path", OF_OPENAI)
async def test_a_websocket_at_openais_paths_reaches_no_model(path: str, any_path: Any, autojump_clock: Any) -> None:
    config = Config(bidi=BidiConfig(default_model="one"), websocket=WebSocketConfig(any_path=any_path))
    async with serving(*two_models(), config=config) as house:
        code, message = openais(await asked(house, path))
        assert (code, "websocket.any_path" in message) == ("unknown_url", True)
        assert (await asked(house, "/invocations-bidirectional-stream")) == (101, b"one")


@pytest.mark.parametrize(
    "path", ["/v1/realtime?model=three", "/v1//responses?x&model=three&y=1", "/endpoints/one/openai?model=three"]
)
async def test_at_openais_paths_a_model_that_is_not_there_is_told(path: str, autojump_clock: Any) -> None:
    async with serving(*two_models(), config=ONE) as house:
        assert openais(await asked(house, path))[0] == "model_not_found"


@pytest.mark.parametrize(
    "path", ["/v1/realtime", "//v1/responses", "/endpoints/probe/openai/v1/realtime", "/v1/chat/completions"]
)
async def test_mounted_in_an_asgi_server_openais_paths_reach_no_model_either(path: str) -> None:
    async with served(Probe(silent).spec("websocket")) as (app, calls):
        server = Server(app, type="websocket", path="/p" + path, root_path="/p", headers=HANDSHAKE, extensions=REFUSED)
        server.give({"type": "websocket.connect"})
        calls.start_soon(server.run)
        await server.over.wait()
        assert (server.told[0]["type"], server.told[0]["status"]) == ("websocket.http.response.start", 404)
        assert json.loads(server.answer[1])["error"]["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("path", "model"),
    [
        ("/live", "one"),
        ("/live?model=", "one"),
        ("/live?models=two&remodel=three", "one"),
        ("/live?a=b" + "&a=b" * 98 + "&model=two", "two"),
        ("/v10/realtime", "one"),
        ("/V1/realtime", "one"),
        ("/x/v1/realtime", "one"),
        ("/live?model=two", "two"),
        ("/live?a&model=two&model=two", "two"),
        ("/live?mode%6c=two", "two"),
        ("/invocations-bidirectional-stream?model=two", "two"),
        ("/models/two/invocations-bidirectional-stream", "two"),
        ("/models/two/invocations-bidirectional-stream?model=two", "two"),
        ("/models/two/live", "two"),
        ("/models//two/live", "two"),
        ("/models/tw%6F", "two"),
        ("/v2/models/two", "two"),
        ("/v2/models/two/versions/1", "two"),
        ("/predictions/two", "two"),
        ("/endpoints/two/invocations", "two"),
        ("/endpoints/e/live", "two"),
        ("/endpoints/e/live?model=two", "two"),
    ],
)
async def test_the_model_that_a_websocket_names_is_the_one_that_answers(path: str, model: str, autojump_clock: Any) -> None:
    endpoint = EndpointConfig(variants={"v": VariantConfig(model="two")})
    config = Config(bidi=BidiConfig(default_model="one"), endpoints={"e": endpoint})
    async with serving(*two_models(), config=config) as house:
        assert (await asked(house, path)) == (101, model.encode())


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("/live?model=three", 404, "no model 'three'"),
        ("/invocations-bidirectional-stream?model=three", 404, "no model 'three'"),
        ("/models/three/live", 404, "no model 'three'"),
        ("/v2/models/three/x", 404, "no model 'three'"),
        ("/predictions/three", 404, "no model 'three'"),
        ("/endpoints/three/invocations", 404, "no endpoint 'three'"),
        ("/live?model=one&model=two", 400, "two models, 'one' and 'two'"),
        ("/live?model=two" + "&a=b" * 100, 400, "the query has more than 100 members"),
        ("/live?model=two" + "&" * 100, 400, "the query has more than 100 members"),
        ("/models/one/live?model=two", 400, "the path names the model 'one', and the query 'two'"),
        ("/endpoints/one/live?model=two", 400, "the path names the model 'one', and the query 'two'"),
    ],
)
async def test_a_websocket_that_names_no_model_of_ours_reaches_none(
    path: str, status: int, told: str, autojump_clock: Any
) -> None:
    async with serving(*two_models(), config=ONE) as house:
        got, body = await asked(house, path)
        assert got == status
        assert told in json.loads(body)["error"]


async def test_where_callers_choose_path_and_query_both_are_the_models(autojump_clock: Any) -> None:
    config = Config(bidi=BidiConfig(default_model="one"), websocket=WebSocketConfig(any_path="all"))
    async with serving(*two_models(), config=config) as house:
        for path in [*OF_OPENAI, "/live?model=three", "/models/three/live", "/endpoints/two/x", "/x?model=a&model=b"]:
            assert (await asked(house, path)) == (101, b"one"), path
        two = "/models/two/invocations-bidirectional-stream"
        assert (await asked(house, f"{two}?model=one")) == (101, b"two")


async def test_on_the_bidi_port_the_caller_chooses_and_beside_it_not() -> None:
    gateway = Gateway(Config(listen=ListenConfig(port=0, bidi_port=0)), two_models()[:1])
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        with trio.fail_after(60):
            async with client.connect("127.0.0.1", gateway.bidi_port) as transport:
                peer = await client.websocket(transport, "/v1/realtime?model=three")
                frame = await peer.next_event()
                assert isinstance(frame, Frame)
                assert frame.data == b"one"
            async with client.connect("127.0.0.1", gateway.port) as transport:
                with pytest.raises(client.UpgradeRefused) as caught:
                    await client.websocket(transport, "/v1/realtime")
                assert caught.value.status == 404
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("opened_by", ["websocket.any_path", "listen.bidi_port", "SAGEMAKER_BIND_TO_PORT"])
async def test_through_the_emulator_a_caller_of_sagemaker_reaches_its_container_at_v1_realtime(
    opened_by: str, tmp_path: Path
) -> None:
    overrides: dict[str, Any] = {"listen.port": 0, "listen.host": "127.0.0.1"}
    overrides |= {"websocket.any_path": "all"} if opened_by == "websocket.any_path" else {}
    overrides |= {"listen.bidi_port": 0} if opened_by == "listen.bidi_port" else {}
    environ = {opened_by: "8080"} if opened_by.isupper() else {}
    calls: list[tuple[str, str]] = []

    async def looks(probe: Probe, session: Session[Any, Any]) -> None:
        calls.append((session.call.path, session.call.query))
        await session.send(Part(data=b"at realtime"))

    container = Gateway(load(file=None, environ=environ, overrides=overrides), [Probe(looks, "mine").spec("websocket")])
    async with trio.open_nursery() as nursery:
        await nursery.start(container.serve)
        url = f"ws://127.0.0.1:{container.bidi_port or container.port}"
        resolved = resolve(file=None, environ={}, overrides={"tls.dev_dir": str(tmp_path)})
        emulation = Emulation(resolved, url, "chat", limits=ContainerLimits())
        front = Gateway(Config(listen=ListenConfig(port=0)), emulation.models)
        await nursery.start(front.serve)
        headers = [
            (b"x-amzn-sagemaker-model-invocation-path", b"v1/realtime"),
            (b"x-amzn-sagemaker-model-query-string", b"model=whose"),
        ]
        with trio.fail_after(60):
            async with client.connect("127.0.0.1", front.port) as transport:
                peer = client.http2(transport)
                path = "/endpoints/chat/invocations-bidirectional-stream"
                peer.machine.send(raw(1, b"POST", path, headers=headers))
                peer.machine.send(End(stream=1))
                status, _, body = await peer.read_answer(1)
        assert (status, b"at realtime" in body) == (200, True)
        assert calls == [("/v1/realtime", "model=whose")]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True), ("false", False), ('"outside-v1"', "outside-v1"), ('"all"', "all"), ('"none"', "none"),
    ],
)  # fmt: skip
def test_the_setting_is_written_as_a_word_or_as_the_flag_that_it_was(written: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "everywire.toml"
    file.write_text(f"[websocket]\nany_path = {written}\n")
    text = written.strip('"')
    for config in (
        load(file=file, environ={}, overrides={}),
        load(file=None, environ={"EVERYWIRE_WEBSOCKET__ANY_PATH": text}, overrides={}),
        load(file=None, environ={}, overrides={"websocket.any_path": text}),
        load(file=file, environ={"SAGEMAKER_BIND_TO_PORT": "8080"}, overrides={}),
    ):
        assert config.websocket.any_path == value
        assert type(config.websocket.any_path) is type(value)
        events = [event for event, _ in warnings(config, {"SAGEMAKER_BIND_TO_PORT": "8080"})]
        assert [event for event in events if "any_path" in event] == (
            ["websocket.any_path = true leaves the paths of /v1 out"] if value is True else []
        )


def test_sagemakers_container_answers_at_every_path_unless_it_says_otherwise() -> None:
    assert Config().websocket.any_path == "outside-v1"
    environ = {"SAGEMAKER_BIND_TO_PORT": "8080"}
    resolved = resolve(file=None, environ=environ, overrides={})
    assert (resolved.config.websocket.any_path, resolved.sources["websocket.any_path"]) == ("all", "SAGEMAKER_BIND_TO_PORT")
    assert load(file=None, environ={"SAGEMAKER_MULTI_MODEL": "true"}, overrides={}).websocket.any_path == "outside-v1"
