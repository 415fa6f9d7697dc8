"""InvokeEndpoint, its response stream and a container's invocations, byte by byte: heads, bodies, errors and limits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gateway.config import Config, ListenConfig, SageMakerConfig
from gateway.gateway import Gateway
from gateway.testing import MemoryGateway
from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Part, PartKind, Tensor, Token
from models.session import Session
from models.spec import Model, ModelSpec
from protocols.aws import bidi
from tests.gateway.promises import DATE, House, KiB, Over, Probe, at_once, pausing, raw, serving, silent

JSON = ("content-type", "application/json")
ASKED = json.dumps({"inputs": "x", "parameters": {"max_new_tokens": 2}}).encode()
STREAMED = json.dumps({"inputs": "x", "stream": True, "parameters": {"max_new_tokens": 2}}).encode()
INVOKE, STREAM = "/endpoints/probe/invocations", "/endpoints/probe/invocations-response-stream"
ATTRIBUTES, NEW_SESSION = "x-amzn-sagemaker-custom-attributes", "x-amzn-sagemaker-new-session-id"


async def two_tokens(probe: Probe, session: Session[Any, Any]) -> None:
    session.reply[ATTRIBUTES] = "a=b"
    await session.receive()
    await session.send(Token(text="hi", id=1))
    await session.send(Token(text=" ho", id=2))


async def wraps(probe: Probe, session: Session[Any, Any]) -> None:
    part = await session.receive()
    probe.asked = part.kind is PartKind.UTF8
    told = {"content-type": "audio/wav", ATTRIBUTES: "k=v", NEW_SESSION: "s; Expires=2026-01-01T00:00:00Z"}
    session.reply.update(told)
    await session.send(Part(data=b"<" + bytes(part.data)))
    await session.send(Part(data=b">"))


async def refuses(probe: Probe, session: Session[Any, Any]) -> None:
    raise ModelError("no such voice", code="Voice", status=422)


# -- golden bytes ------------------------------------------------------------------------------------------------------


async def said(house: House, path: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    """All bytes of an answer over HTTP/1.1. Ids are counted from 1."""
    house.gateway.server.new_id = iter(["boot1"]).__next__
    line = house.line("http1")
    await house.ask(path, body, *headers, line=line)
    return bytes(line.transport.read)


LINES = (
    b'34\r\n{"token": {"id": 1, "text": "hi", "log_prob": 0.0}}\n\r\n'
    b'50\r\n{"token": {"id": 2, "text": " ho", "log_prob": 0.0}, "generated_text": "hi ho"}\n\r\n0\r\n\r\n'
)
EVENTS = (
    b"9d\r\n\x00\x00\x00\x9d\x00\x00\x00Y^\x03\xd5\x98\r:message-type\x07\x00\x05event\x0b:event-type\x07\x00\x0bPayloadPart"
    b'\r:content-type\x07\x00\x18application/octet-stream{"token": {"id": 1, "text": "hi", "log_prob": 0.0}}\n\xd29\xb2S\r\n'
    b"b9\r\n\x00\x00\x00\xb9\x00\x00\x00YjB\\\\\r:message-type\x07\x00\x05event\x0b:event-type\x07\x00\x0bPayloadPart"
    b'\r:content-type\x07\x00\x18application/octet-stream{"token": {"id": 2, "text": " ho", "log_prob": 0.0}, '
    b'"generated_text": "hi ho"}\n\xbd\xf5\xd3>\r\n0\r\n\r\n'
)
VARIANT = b"x-amzn-invoked-production-variant: AllTraffic\r\nx-amzn-requestid: boot1\r\n"


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (
            INVOKE,
            ASKED,
            b"content-type: application/json\r\nx-amzn-sagemaker-custom-attributes: a=b\r\n"
            + VARIANT
            + b"content-length: 27\r\n"
            b"x-request-id: boot1\r\n" + DATE + b'\r\n{"generated_text": "hi ho"}',
        ),
        (
            INVOKE,
            STREAMED,
            b"content-type: application/jsonlines\r\nx-amzn-sagemaker-custom-attributes: a=b\r\n"
            + VARIANT
            + b"x-accel-buffering: no\r\nx-request-id: boot1\r\n"
            + DATE
            + b"transfer-encoding: chunked\r\n\r\n"
            + LINES,
        ),
        (
            STREAM,
            STREAMED,
            b"content-type: application/vnd.amazon.eventstream\r\nx-amzn-sagemaker-content-type: application/jsonlines\r\n"
            b"x-amzn-sagemaker-custom-attributes: a=b\r\n"
            + VARIANT
            + b"x-accel-buffering: no\r\nx-request-id: boot1\r\n"
            + DATE
            + b"transfer-encoding: chunked\r\n\r\n"
            + EVENTS,
        ),
    ],
    ids=["invoke", "invoke-lines", "stream"],
)
async def test_text_byte_by_byte(path: str, body: bytes, answer: bytes, autojump_clock: Any) -> None:
    async with serving(Probe(two_tokens).spec("lmi-http1")) as house:
        assert await said(house, path, body, JSON) == b"HTTP/1.1 200 OK\r\n" + answer


CHUNKS = (
    b"x-accel-buffering: no\r\nx-request-id: boot1\r\n"
    + DATE
    + b"transfer-encoding: chunked\r\n\r\n3\r\n<in\r\n1\r\n>\r\n0\r\n\r\n"
)
SESSION = b"x-amzn-sagemaker-new-session-id: s; Expires=2026-01-01T00:00:00Z\r\n"
OWN = b"x-amzn-sagemaker-custom-attributes: k=v\r\n"


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (INVOKE, b"content-type: audio/wav\r\n" + SESSION + OWN + VARIANT + CHUNKS),
        ("/models/probe/invoke", b"content-type: audio/wav\r\n" + OWN + SESSION + CHUNKS),
        ("/invocations", b"content-type: audio/wav\r\n" + OWN + SESSION + CHUNKS),
        ("/invocations?model_name=probe", b"content-type: audio/wav\r\n" + OWN + SESSION + CHUNKS),
    ],
)
async def test_parts_byte_by_byte_with_what_the_model_says_in_the_head(
    path: str, answer: bytes, autojump_clock: Any
) -> None:
    async with serving(Probe(wraps).spec("bidi")) as house:
        assert await said(house, path, b"in") == b"HTTP/1.1 200 OK\r\n" + answer


@pytest.mark.parametrize("path", [INVOKE, STREAM])
async def test_a_models_error_byte_by_byte(path: str, autojump_clock: Any) -> None:
    async with serving(Probe(refuses).spec("bidi")) as house:
        assert await said(house, path, b"in") == (
            b"HTTP/1.1 424 Failed Dependency\r\ncontent-type: application/json\r\nx-amzn-errortype: ModelError\r\n"
            b"x-amzn-requestid: boot1\r\ncontent-length: 158\r\nx-request-id: boot1\r\n" + DATE + b"\r\n"
            b'{"Message":"Received client error (422) from probe with message \'no such voice\'",'
            b'"OriginalStatusCode":422,"OriginalMessage":"no such voice","LogStreamArn":""}'
        )
        assert await said(house, "/models/probe/invoke", b"in") == (
            b"HTTP/1.1 422 Unprocessable Content\r\ncontent-type: application/json\r\ncontent-length: 67\r\n"
            b"x-request-id: boot1\r\n" + DATE + b'\r\n{"code":422,"type":"BadRequestException","message":"no such voice"}'
        )


# -- bodies of each family ---------------------------------------------------------------------------------------------


async def doubles(probe: Probe, session: Session[InferRequest, InferResponse]) -> None:
    request = await session.receive()
    await session.send(InferResponse(outputs=(Tensor(name="y", data=request["x"] * 2),)))


HEAD = (
    b'{"inputs":[{"name":"x","shape":[2],"datatype":"INT32","parameters":{"binary_data_size":8}}],'
    b'"parameters":{"binary_data_output":true}}'
)
BINARY = HEAD + np.array([3, 4], np.int32).tobytes()
TRITON = "application/vnd.sagemaker-triton.binary+json;json-header-size="


def parts_of(body: bytes) -> list[bytes]:
    """The PayloadParts of a response stream."""
    decoder, parts = bidi.ResponseDecoder(), []
    decoder.receive_data(body)
    while isinstance(part := decoder.next_event(), bidi.PayloadPart):
        parts.append(bytes(part.data))
    return parts


@pytest.mark.parametrize("path", [INVOKE, "/models/probe/invoke", "/invocations", STREAM])
async def test_tensors_say_where_their_json_ends_in_the_content_type(path: str, autojump_clock: Any) -> None:
    async with serving(Probe(doubles).spec("v2-http1")) as house:
        status, headers, body = await house.ask(path, BINARY, ("content-type", f"{TRITON}{len(HEAD)}"))
        name = "content-type"
        if path is STREAM:
            name, body = "x-amzn-sagemaker-content-type", b"".join(parts_of(body))
        assert (status, headers[name].startswith(TRITON)) == (200, True)
        size = int(headers[name].removeprefix(TRITON))
        assert json.loads(body[:size])["outputs"][0]["name"] == "y"
        assert body[size:] == np.array([6, 8], np.int32).tobytes()


@pytest.mark.parametrize("size", ["x", "1", "99999", ""])
async def test_a_json_header_size_that_is_wrong_is_the_models_400(size: str, autojump_clock: Any) -> None:
    async with serving(Probe(doubles).spec("v2-http1")) as house:
        status, headers, body = await house.ask(INVOKE, BINARY, ("content-type", TRITON + size))
        assert (status, headers["x-amzn-errortype"], json.loads(body)["OriginalStatusCode"]) == (424, "ModelError", 400)
        assert (await house.ask("/models/probe/invoke", BINARY, ("content-type", TRITON + size)))[0] == 400


@pytest.mark.parametrize(
    ("kind", "text"), [("text/plain", True), ("application/json", True), ("audio/wav", False), ("", False)]
)
async def test_a_body_is_one_part_whose_kind_is_in_the_content_type(kind: str, text: bool, autojump_clock: Any) -> None:
    probe = Probe(wraps)
    async with serving(probe.spec("bidi")) as house:
        assert (await house.ask(INVOKE, b"in", *([("content-type", kind)] if kind else [])))[2] == b"<in>"
        assert probe.asked is text


@pytest.mark.parametrize("path", [INVOKE, "/models/probe/invoke", "/invocations"])
@pytest.mark.parametrize("kind", PartKind)
async def test_an_answer_without_a_content_type_has_that_of_its_first_part(
    path: str, kind: PartKind, autojump_clock: Any
) -> None:
    async def model(probe: Probe, session: Session[Any, Any]) -> None:
        await session.send(Part(data=b"x", kind=kind))

    async with serving(Probe(model).spec("bidi")) as house:
        expected = "text/plain; charset=utf-8" if kind is PartKind.UTF8 else "application/octet-stream"
        assert (await house.ask(path, b""))[1]["content-type"] == expected


async def test_an_empty_answer_is_an_answer(autojump_clock: Any) -> None:
    async def nothing(probe: Probe, session: Session[Any, Any]) -> None:
        await session.send(Part(data=b""))

    async with serving(Probe(nothing).spec("bidi")) as house:
        for path in (INVOKE, STREAM, "/models/probe/invoke"):
            status, _, body = await house.ask(path, b"")
            assert (status, body) == (200, b"")


@pytest.mark.parametrize("size", [1, 64 * KiB - 1, 64 * KiB, 64 * KiB + 1, 200 * KiB])
async def test_a_large_piece_is_several_parts_and_none_is_empty(size: int, autojump_clock: Any) -> None:
    async def one(probe: Probe, session: Session[Any, Any]) -> None:
        await session.send(Part(data=memoryview(np.arange(size, dtype=np.uint8))))

    async with serving(Probe(one).spec("bidi")) as house:
        parts = parts_of((await house.ask(STREAM, b""))[2])
        assert [len(part) for part in parts] == [min(64 * KiB, size - at) for at in range(0, size, 64 * KiB)]
        assert b"".join(parts) == np.arange(size, dtype=np.uint8).tobytes()


async def test_tokens_leave_one_by_one(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("stream-http1")) as house:
        call = await house.call("stream-http1")
        with at_once():
            assert await call.take(3) == [0, 1, 2]
        assert probe.live == 1
        probe.go.set()
        assert await call.rest() == ([3, 4, 5], Over("complete"))


# -- a model's headers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (ATTRIBUTES, "é"),
        (ATTRIBUTES, "a" * 1025),
        (NEW_SESSION, "no expiry"),
        ("x-amzn-sagemaker-closed-session-id", "not an id!"),
    ],
)
async def test_a_header_that_the_platform_cannot_carry_is_the_models_error(
    name: str, value: str, autojump_clock: Any
) -> None:
    async def model(probe: Probe, session: Session[Any, Any]) -> None:
        session.reply[name] = value
        await session.send(Part(data=b"x"))

    async with serving(Probe(model).spec("bidi")) as house:
        status, headers, body = await house.ask(INVOKE, b"")
        assert (status, headers["x-amzn-errortype"]) == (424, "ModelError")
        assert name in json.loads(body)["OriginalMessage"]
        status, headers, _ = await house.ask("/models/probe/invoke", b"")
        assert status == 200  # a container passes on what a header can hold, and no more
        assert headers.get(name, value) == value


@pytest.mark.parametrize("value", ["a\r\nx: y", "é", "a" * 1025])
@pytest.mark.parametrize("path", [INVOKE, STREAM, "/models/probe/invoke", "/invocations"])
async def test_a_content_type_that_is_none_is_left_out(path: str, value: str, autojump_clock: Any) -> None:
    async def model(probe: Probe, session: Session[Any, Any]) -> None:
        session.reply["content-type"] = value
        await session.send(Part(data=b"x"))

    async with serving(Probe(model).spec("bidi")) as house:
        status, headers, _ = await house.ask(path, b"")
        name = "x-amzn-sagemaker-content-type" if path is STREAM else "content-type"
        assert (status, headers[name]) == (200, "application/octet-stream")
        assert "x" not in headers


@pytest.mark.parametrize("path", [INVOKE, STREAM, "/models/probe/invoke", "/invocations", "/predictions/probe"])
async def test_what_is_set_after_the_head_is_ignored(path: str, autojump_clock: Any) -> None:
    async def model(probe: Probe, session: Session[Any, Any]) -> None:
        await session.receive()
        await session.send(Token(text="a", id=1))
        await trio.lowlevel.checkpoint()
        session.reply[ATTRIBUTES] = "too late"
        session.accept()
        await session.send(Token(text="b", id=2))

    async with serving(Probe(model).spec("lmi-http1")) as house:
        status, headers, _ = await house.ask(path, STREAMED, JSON)
        assert (status, ATTRIBUTES in headers) == (200, False)


# -- refusals ----------------------------------------------------------------------------------------------------------

LONG = "a" * 1025
VALIDATED = [
    (INVOKE, "x-amzn-sagemaker-target-variant", "no!", "TargetVariant"),
    (INVOKE, "x-amzn-sagemaker-target-variant", "other", "variant"),
    (INVOKE, "x-amzn-sagemaker-custom-attributes", LONG, "CustomAttributes"),
    (INVOKE, "x-amzn-sagemaker-inference-id", "i" * 65, "InferenceId"),
    (INVOKE, "x-amzn-sagemaker-inference-component", "-", "InferenceComponentName"),
    (INVOKE, "x-amzn-sagemaker-target-container-hostname", "a.b", "TargetContainerHostname"),
    (INVOKE, "x-amzn-sagemaker-session-id", "a_b", "SessionId"),
    (INVOKE, "x-amzn-sagemaker-enable-explanations", "e" * 65, "EnableExplanations"),
    (INVOKE, "x-amzn-sagemaker-target-model", "m.tar.gz", "Target-Model"),
    (INVOKE, "accept", LONG, "Accept"),
    (INVOKE, "content-type", LONG, "ContentType"),
    (STREAM, "x-amzn-sagemaker-session-id", "NEW_SESSION", "SessionId"),
    (STREAM, "x-amzn-sagemaker-accept", LONG, "Accept"),
]


@pytest.mark.parametrize(("path", "name", "value", "member"), VALIDATED, ids=[f"{p}-{n}" for p, n, *_ in VALIDATED])
@pytest.mark.parametrize("kind", ["http1", "http2"])
async def test_a_header_against_its_pattern_is_a_validation_error(
    kind: str, path: str, name: str, value: str, member: str, autojump_clock: Any
) -> None:
    probe = Probe(silent)
    async with serving(probe.spec("bidi")) as house:
        with at_once():
            status, headers, body = await house.ask(path, b"x", (name, value), line=house.line(kind))
        assert (status, headers["x-amzn-errortype"]) == (400, "ValidationError")
        assert member in json.loads(body)["Message"]
        assert len(body) < 400
        assert (probe.calls, house.endings) == (0, {"refused": 1})


@pytest.mark.parametrize("endpoint", ["none", "-", "a" * 64, "%20", "%00"])
async def test_an_endpoint_that_there_is_not(endpoint: str, autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi")) as house:
        status, headers, body = await house.ask(f"/endpoints/{endpoint}/invocations", b"x")
        assert (status, headers["x-amzn-errortype"]) == (400, "ValidationError")
        assert set(json.loads(body)) == {"Message"}


async def test_a_header_that_its_operation_has_not_is_ignored(autojump_clock: Any) -> None:
    async with serving(Probe(wraps).spec("bidi")) as house:
        assert (await house.ask(STREAM, b"x", ("x-amzn-sagemaker-target-model", "../../etc")))[0] == 200


@pytest.mark.parametrize("size", [99, 100, 101])
@pytest.mark.parametrize("kind", ["http1", "http2"])
@pytest.mark.parametrize("path", [INVOKE, STREAM])
async def test_a_body_may_have_as_much_as_sagemaker_body_says(size: int, path: str, kind: str, autojump_clock: Any) -> None:
    config = Config(sagemaker=SageMakerConfig(body=100))
    async with serving(Probe(wraps).spec("bidi"), config=config) as house:
        status, headers, body = await house.ask(path, bytes(size), line=house.line(kind))
        if size <= 100:
            assert status == 200
        else:
            assert (status, headers["x-amzn-errortype"]) == (400, "ValidationError")
            assert "sagemaker.body" in json.loads(body)["Message"]


async def test_a_container_has_the_bodies_limit_and_not_the_platforms(autojump_clock: Any) -> None:
    config = Config(sagemaker=SageMakerConfig(body=100))
    config = replace(config, limits=replace(config.limits, body=1000))
    async with serving(Probe(wraps).spec("bidi"), config=config) as house:
        assert (await house.ask("/models/probe/invoke", bytes(1000)))[0] == 200
        status, _, body = await house.ask("/models/probe/invoke", bytes(1001))
        assert (status, b"limits.body" in body) == (413, True)


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        (INVOKE, 424, "ModelError"),
        (STREAM, 424, "ModelError"),
        ("/models/probe/invoke", 507, "InsufficientStorageException"),
        ("/invocations", 507, "InsufficientStorageException"),
    ],
)
async def test_a_model_that_runs_out_of_memory(path: str, status: int, kind: str, autojump_clock: Any) -> None:
    async def greedy(probe: Probe, session: Session[Any, Any]) -> None:
        raise MemoryError

    async with serving(Probe(greedy).spec("bidi")) as house:
        answered, headers, body = await house.ask(path, b"x")
        said = json.loads(body)
        assert answered == status
        if status == 424:
            assert (headers["x-amzn-errortype"], said["OriginalStatusCode"]) == (kind, 507)
        else:
            assert (said["type"], headers["retry-after"]) == (kind, "1")
        assert house.endings == {"model-error": 1}


async def test_a_model_that_loads_is_not_ready(autojump_clock: Any) -> None:
    loaded = trio.Event()

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        await loaded.wait()
        yield Probe(wraps)

    config = Config(listen=ListenConfig(port=-1))
    gateway = Gateway(config, [ModelSpec(name="probe", family=Family.PARTS, load=load)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.serve)
        await wait_all_tasks_blocked()
        house = House(MemoryGateway(gateway, nursery, 65536))
        status, headers, _ = await house.ask(INVOKE, b"x")
        assert (status, headers["x-amzn-errortype"]) == (429, "ModelNotReadyException")
        assert (await house.ask("/models/probe/invoke", b"x"))[0] == 503
        loaded.set()
        await wait_all_tasks_blocked()
        assert (await house.ask(INVOKE, b"x"))[0] == 200
        nursery.cancel_scope.cancel()


# -- models that take their sessions themselves -------------------------------------------------------------------------


async def takes_later(probe: Probe, session: Session[Any, Any]) -> None:
    """Accepts when told to, or refuses."""
    await probe.go.wait()
    if probe.sent:
        raise ModelError("not today", code="Busy", status=429)
    session.reply[ATTRIBUTES] = "mine"
    session.accept()
    session.accept()
    await probe.say(session)


ACCEPTING = ["invokeparts-http1", "streamparts-http2", "container-http1", "mme-http2"]


@pytest.mark.parametrize("wire", [*ACCEPTING, "bidi", "bidi-json", "bidi-literal"])
async def test_a_model_that_accepts_by_itself_can_refuse_with_its_own_status(wire: str, autojump_clock: Any) -> None:
    probe = Probe(takes_later)
    async with serving(replace(probe.spec(wire), accepts=True), wire=wire) as house:
        call = await house.call(wire)
        await call.line.read()
        assert b"200" not in call.line.transport.read[:20], "the head is the model's to send"
        probe.sent = 1
        probe.go.set()
        _, over = await call.rest()
        assert over.how == "refused"
        document = json.loads(over.text)
        if wire in ("container-http1", "mme-http2"):
            assert (over.code, document["message"]) == ("429", "not today")
        else:
            assert call.headers[b"x-amzn-errortype"] == b"ModelError"
            assert (over.code, document["OriginalStatusCode"], document["OriginalMessage"]) == ("424", 429, "not today")
        assert house.endings == {"model-error": 1}


@pytest.mark.parametrize("wire", [*ACCEPTING, "bidi", "bidi-json", "bidi-literal"])
async def test_a_model_that_accepts_by_itself_sends_the_head_when_it_does(wire: str, autojump_clock: Any) -> None:
    probe = Probe(takes_later)
    async with serving(replace(probe.spec(wire), accepts=True), wire=wire) as house:
        call = await house.call(wire)
        probe.go.set()
        assert await call.rest() == ([0], Over("complete"))
        assert call.status == 200
        if wire in ACCEPTING:
            assert call.headers[ATTRIBUTES.encode()] == b"mine"


async def test_a_websocket_is_refused_before_its_handshake_by_a_model_that_accepts_by_itself(autojump_clock: Any) -> None:
    probe = Probe(takes_later)
    probe.sent = 1
    probe.go.set()
    upgrade = [(b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ=="), (b"sec-websocket-version", b"13")]
    async with serving(replace(probe.spec("websocket"), accepts=True)) as house:
        line = house.line("http1")
        await line.send(
            raw(1, b"GET", "/models/probe/invocations-bidirectional-stream", headers=upgrade, upgrade=b"websocket")
        )
        status, _, body = await line.peer.read_answer(1)
        assert (status, b"not today" in body) == (429, True)
        assert house.endings == {"model-error": 1}


@pytest.mark.parametrize("wire", ["bidi", "websocket", "streamparts-http1", "container-http1"])
async def test_a_model_that_accepts_by_itself_and_returns_has_accepted(wire: str, autojump_clock: Any) -> None:
    async def mute(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)

    async with serving(replace(Probe(mute).spec(wire), accepts=True)) as house:
        numbers, over = await (await house.call(wire)).rest()
        assert (numbers, over.how) == ([], "complete")


async def test_a_model_sees_the_headers_of_its_caller(autojump_clock: Any) -> None:
    seen: list[dict[str, str]] = []

    async def looks(probe: Probe, session: Session[Any, Any]) -> None:
        seen.append(dict(session.call.headers))
        assert session.call.parameters == {"unary": True}

    asked = {
        "accept": "audio/wav",
        ATTRIBUTES: "c000b4f9-df62-4c85-a0bf-7c525f9104a4",
        "x-amzn-sagemaker-inference-id": "some id",
        "x-amzn-sagemaker-session-id": "abc",
    }
    async with serving(Probe(looks).spec("bidi")) as house:
        for path in (INVOKE, STREAM, "/models/probe/invoke"):
            assert (await house.ask(path, b"x", *asked.items()))[0] == 200
            assert asked.items() <= seen.pop().items()
