"""Subprotocols of WebSockets: the first that a client offers and the model speaks is chosen, on every route."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio

from gateway import client
from gateway.catalog.process_model import described_fields, spec_of_fields
from gateway.client import Peer
from gateway.config import Config, ListenConfig, ModelConfig
from gateway.config.load import load
from gateway.config.problem import ConfigError
from gateway.containers.connection import ContainerLimits
from gateway.containers.model import container_spec
from gateway.gateway import Gateway
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.messages import Family, InferRequest, InferResponse, Part
from models.session import Session
from models.spec import ModelSpec
from protocols.events import Close, Frame
from tests.gateway.wires.test_asgi import HANDSHAKE, Server, served

SPOKEN = ("v2.speech", "v1.speech")
FIELD = b"sec-websocket-protocol"
OFFERS = [
    ([b"v1.speech"], "v1.speech"),
    ([b"v1.speech, v2.speech"], "v1.speech"),
    ([b"v2.speech,v1.speech"], "v2.speech"),
    ([b"other, v2.speech"], "v2.speech"),
    ([b"other", b"v1.speech , v2.speech"], "v1.speech"),
    ([b"other"], ""),
    ([b"V1.speech"], ""),
    ([b",, v1.speech,"], "v1.speech"),
    ([b"bad name, v1.speech"], "v1.speech"),
    ([b"everywire.key.abc, v1.speech"], "v1.speech"),
    ([b"everywire.key.abc, other"], ""),
    ([], ""),
]
CONTAINER, ANY, V2 = "/models/m/invocations-bidirectional-stream", "/live", "/v2/models/m/infer"


async def parts(session: Session[Part, Part]) -> None:
    await session.send(Part(data=session.call.subprotocol.encode() or b"none"))


async def tensors(session: Session[InferRequest, InferResponse]) -> None:
    assert session.call.subprotocol in ("", *SPOKEN)
    async for _ in session:
        pass


def model(path: str = CONTAINER, *spoken: str) -> ModelSpec:
    family, of = (Family.TENSOR, tensors) if path == V2 else (Family.PARTS, parts)
    return spec_of(of, "m", family=family, subprotocols=spoken or SPOKEN)


async def told(peer: Peer) -> str:
    frame = await peer.next_event()
    assert isinstance(frame, Frame)
    return "" if frame.data == b"none" else bytes(frame.data).decode()


@pytest.mark.parametrize(("offers", "chosen"), OFFERS)
@pytest.mark.parametrize("path", [CONTAINER, ANY, V2])
async def test_the_first_offer_that_the_model_speaks_is_chosen_and_told(path: str, offers: list[bytes], chosen: str) -> None:
    async with memory_gateway([model(path)]) as gateway:
        peer = await client.websocket(gateway.connect(), path, headers=[(FIELD, offer) for offer in offers])
        assert peer.subprotocol == (chosen.encode() or None)
        if path != V2:
            assert await told(peer) == chosen


@pytest.mark.parametrize(("offers", "chosen"), OFFERS)
async def test_mounted_in_an_asgi_server_it_is_chosen_and_told_alike(offers: list[bytes], chosen: str) -> None:
    async with served(model()) as (app, calls):
        fields = [*HANDSHAKE, *((FIELD, offer) for offer in offers)]
        server = Server(app, type="websocket", path=CONTAINER, headers=fields)
        server.give({"type": "websocket.connect"})
        calls.start_soon(server.run)
        await server.over.wait()
        accepted, answer = server.told[:2]
        assert (accepted["type"], accepted["subprotocol"]) == ("websocket.accept", chosen or None)
        assert answer["bytes"].decode() == (chosen or "none")


async def test_a_model_that_names_none_leaves_the_offers_alone_unless_one_is_a_key() -> None:
    async with memory_gateway([spec_of(parts, "m")]) as gateway:
        for offers, chosen in ((b"a, b", ""), (b"everywire.key.abc, a, b", "a"), (b"everywire.key.abc", "")):
            peer = await client.websocket(gateway.connect(), CONTAINER, headers=[(FIELD, offers)])
            assert (peer.subprotocol, await told(peer)) == (chosen.encode() or None, chosen)


@pytest.mark.parametrize(("offers", "chosen"), OFFERS)
async def test_a_container_behind_the_gateway_chooses_among_the_offers_of_the_client(
    offers: list[bytes], chosen: str
) -> None:
    container = Gateway(Config(listen=ListenConfig(port=0)), [model()])
    async with trio.open_nursery() as nursery:
        await nursery.start(container.serve)
        spec = container_spec(f"ws://127.0.0.1:{container.port}", name="front", limits=ContainerLimits())
        front = Gateway(Config(listen=ListenConfig(port=0)), [spec])
        await nursery.start(front.serve)
        with trio.fail_after(60):
            async with client.connect("127.0.0.1", front.port) as transport:
                fields = [(FIELD, offer) for offer in offers]
                shows_key = any(b"everywire.key." in offer for offer in offers)
                in_front = "other" if shows_key and not chosen else chosen  # the rule for browsers, of the front itself
                peer = await client.websocket(transport, "/invocations-bidirectional-stream", headers=fields)
                assert peer.subprotocol == (in_front.encode() or None)
                assert await told(peer) == chosen
        nursery.cancel_scope.cancel()


async def test_a_model_that_accepts_sessions_may_choose_one_of_the_offers_itself() -> None:
    async def accepts(session: Session[Part, Part]) -> None:
        session.reply["sec-websocket-protocol"] = session.call.query
        session.accept()

    async with memory_gateway([spec_of(accepts, "m", accepts=True, subprotocols=("a",))]) as gateway:
        for query, chosen in (("b", b"b"), ("c", b"a"), ("everywire.key.abc", b"a"), ("b%0d", b"a")):
            peer = await client.websocket(
                gateway.connect(), f"{CONTAINER}?{query}", headers=[(FIELD, b"everywire.key.abc, a, b")]
            )
            assert peer.subprotocol == chosen
            assert await peer.next_event() == Close(code=1000)


async def test_the_configuration_names_them_for_a_model_of_any_factory() -> None:
    chosen = {"models.m.factory": f"{__name__}:parts", "models.m.subprotocols": '["v9", "v8"]'}
    config = load(file=None, environ={}, overrides=chosen)
    assert config.models["m"] == ModelConfig(factory=f"{__name__}:parts", subprotocols=("v9", "v8"))
    gateway = Gateway(config)
    assert gateway.models.keys() == {"m"}
    async with memory_gateway(config=config) as inside:
        peer = await client.websocket(inside.connect(), CONTAINER, headers=[(FIELD, b"v8")])
        assert (peer.subprotocol, await told(peer)) == (b"v8", "v8")


@pytest.mark.parametrize("bad", ["", "a b", "a,b", "é", "everywire.key.x", "a" * 129, "a\n"])
def test_a_name_that_no_client_can_offer_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="subprotocols"):
        model(CONTAINER, bad, "good")
    overrides: dict[str, Any] = {"models.m.factory": "echo", "models.m.subprotocols": f"[{bad!r}]"}
    with pytest.raises(ConfigError, match="subprotocols must be a list of subprotocols"):
        load(file=None, environ={}, overrides=overrides)


def test_a_string_in_place_of_several_is_refused() -> None:
    with pytest.raises(ValueError, match="subprotocols are a tuple of strings, not 'chat'"):
        spec_of(parts, "m", subprotocols="chat")


def test_a_model_in_a_process_speaks_those_that_its_code_names() -> None:
    spec = model()
    described = msgspec.msgpack.decode(msgspec.msgpack.encode(described_fields(spec)))
    assert spec_of_fields("m", described, spec.load).subprotocols == SPOKEN
