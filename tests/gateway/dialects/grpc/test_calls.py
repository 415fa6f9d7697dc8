"""gRPC's unary calls over HTTP/2: what the head and the framing may say, the codes of all that goes wrong, and ModelInfer."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from gateway.config import AccessConfig, Config, DrainConfig
from gateway.keys import line_of
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Part, Tensor
from models.session import Session
from models.spec import ModelSpec, TensorSpec
from protocols.events import ConnectionEnd, Data, End, Head, Headers, Request, Response
from protocols.floods import GRPC_FIELDS, SMALL_CALL
from protocols.grpc import v2_tables as tables
from protocols.grpc.framing import PREFIX, encode_prefix, frame
from protocols.grpc.heads import call_head
from protocols.grpc.protobuf import encode_field, encode_varint
from protocols.grpc.status import StatusCode
from protocols.v2.response import V2Answer
from tests.gateway.dialects.grpc.by_hand import (
    OK,
    SERVICE,
    ByHand,
    Status,
    announced,
    answered,
    asked,
    call,
    infer,
    numbers,
    request,
)
from tests.gateway.promises import House, KiB, Line, Probe, at_once, limits, serving, silent
from tests.protocols.grpc.messages import REQUEST

INTERNAL, UNIMPLEMENTED, INVALID = StatusCode.INTERNAL, StatusCode.UNIMPLEMENTED, StatusCode.INVALID_ARGUMENT
EXHAUSTED, UNAVAILABLE, TOO_LATE = StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED
WIRE = "grpcinfer-http2"


class Model:
    """Answers 2 x; keeps what it was told of its calls, and fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.requests: list[InferRequest] = []
        self.fails: Exception | None = None
        self.bad: Any = None

    async def __call__(self, session: Session[InferRequest, InferResponse]) -> None:
        self.calls.append(session.call)
        wanted = await session.receive()
        self.requests.append(wanted)
        if self.fails is not None:
            raise self.fails
        await session.send(self.bad or InferResponse(outputs=[Tensor(name="y", data=2 * wanted["x"])]))

    def spec(self, name: str = "m", **options: Any) -> ModelSpec:
        return spec_of(self, name, family=Family.TENSOR, **options)


@asynccontextmanager
async def house_of(model: Model, *more: ModelSpec, config: Config | None = None) -> AsyncIterator[House]:
    async with serving(model.spec(), *more, config=config) as house:
        yield house


async def well(house: House, line: Line | None = None) -> None:
    """A call that is as it should be is answered."""
    answer = await infer(house, request("m", 4), **({"line": line} if line else {}))
    assert isinstance(answer, V2Answer), answer
    assert numbers(answer) == [8]


def refused(answer: Any, code: StatusCode, *says: str) -> None:
    """It was, in one head, and in such words."""
    assert isinstance(answer, Status), answer
    assert (answer.code, answer.alone) == (code, True), answer
    for word in says:
        assert word in answer.text


async def posted(
    line: Line, path: str, headers: Headers, *, method: bytes = b"POST", body: bytes = b""
) -> tuple[int, dict[bytes, bytes], bytes]:
    """A request with just these fields; status, fields and body of its answer."""
    stream = line.next_stream()
    head = Head(method=method, target=path.encode(), authority=b"localhost", headers=headers)
    await line.send(
        Request(stream=stream, head=head), *([Data(stream=stream, buffers=(body,))] if body else []), End(stream=stream)
    )
    return await line.peer.read_answer(stream)


GRPC = (b"content-type", b"application/grpc")
INFER = f"/{SERVICE}/ModelInfer"


# -- the head ----------------------------------------------------------------------------------------------------------


async def test_an_answer_is_a_head_a_message_and_the_status_behind_it() -> None:
    async with house_of(Model()) as house:
        line = house.line("http2")
        made = ByHand(line, "ModelInfer")
        await made.open()
        await made.say(request("m", 4, id="7"))
        await made.end()
        event = await line.event(made.stream)
        assert isinstance(event, Response)
        fields = dict(event.headers)
        assert (event.status, fields[b"content-type"]) == (200, b"application/grpc")
        assert fields[b"grpc-accept-encoding"] == b"identity,deflate,gzip"
        assert not fields.keys() & {b"content-length", b"grpc-status", b"grpc-encoding"}
        assert isinstance(await line.event(made.stream), Data)
        end = await line.event(made.stream)
        assert isinstance(end, End)
        assert list(end.trailers) == [(b"grpc-status", b"0")]
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize(
    "path", [f"/{SERVICE}/Nothing", "/inference.Other/ModelInfer", "/x", "/", "/v2/models/m/infer", f"{INFER}/", "/ping"]
)
async def test_whatever_the_path_a_call_is_refused_in_grpcs_words(path: str) -> None:
    async with house_of(Model()) as house:
        line = house.line("http2")
        status, fields, body = await posted(line, path, [GRPC], body=request("m", 1))
        assert (status, fields[b"grpc-status"], body) == (200, b"12", b"")
        assert path.encode() in fields[b"grpc-message"]
        await well(house, line)


@pytest.mark.parametrize("method", [b"GET", b"PUT", b"DELETE"])
async def test_a_call_is_made_by_post(method: bytes) -> None:
    async with house_of(Model()) as house:
        status, fields, _ = await posted(house.line("http2"), INFER, [GRPC], method=method)
        assert (status, fields[b"grpc-status"]) == (200, b"12")
        assert b"POST" in fields[b"grpc-message"]
        status, fields, body = await posted(house.line("http2"), INFER, [], method=method)  # a browser, say
        assert (status, fields[b"allow"], b"not allowed here" in body) == (405, b"OPTIONS, POST", True)


@pytest.mark.parametrize("kind", [b"application/grpc-web", b"application/grpcx", b"application/json", b"text/plain"])
async def test_another_content_type_is_answered_by_http(kind: bytes) -> None:
    async with house_of(Model()) as house:
        status, fields, body = await posted(house.line("http2"), INFER, [(b"content-type", kind)], body=request("m", 1))
        assert (status, b"grpc-status" in fields) == (415, False)
        assert b"application/grpc" in body


@pytest.mark.parametrize(
    "fields",
    [
        [(b"content-type", b"application/grpc+proto")],
        [(b"content-type", b"application/grpc;charset=utf-8")],
        [(b"content-type", b"Application/GRPC")],
        [GRPC, (b"te", b"trailers")],
        [GRPC, (b"grpc-encoding", b"identity")],
        [GRPC, (b"some-bin", b"this is no base64!")],
        [GRPC, (b"grpc-accept-encoding", b"snappy,gzip")],
        [GRPC, (b"grpc-timeout", b"99999999H")],
    ],
)
async def test_a_head_may_say_that(fields: Headers) -> None:
    async with house_of(Model()) as house:
        status, said, body = await posted(house.line("http2"), INFER, fields, body=request("m", 4))
        assert (status, said[b"content-type"]) == (200, b"application/grpc")
        assert body[5:].endswith(np.int64(8).tobytes())


@pytest.mark.parametrize(
    ("field", "code", "says"),
    [
        ((b"grpc-encoding", b"snappy"), b"12", b"snappy"),
        ((b"grpc-timeout", b"1"), b"13", b"grpc-timeout"),
        ((b"grpc-timeout", b"123456789S"), b"13", b"grpc-timeout"),
        ((b"grpc-timeout", b"-1S"), b"13", b"grpc-timeout"),
        ((b"grpc-timeout", b"0m"), b"4", b"no time is left"),
        ((b"grpc-timeout", b"1n"), b"4", b"no time is left"),
        ((b"grpc-timeout", b"9u"), b"4", b"no time is left"),
    ],
)
async def test_a_head_must_not_say_that_and_no_model_is_called(field: tuple[bytes, bytes], code: bytes, says: bytes) -> None:
    model = Model()
    async with house_of(model) as house:
        line = house.line("http2")
        for _ in range(2):  # a refusal is not kept for the next call with this head
            status, fields, _ = await posted(line, INFER, [GRPC, field], body=request("m", 1))
            assert (status, fields[b"grpc-status"]) == (200, code)
            assert says in fields[b"grpc-message"]
            assert fields[b"grpc-accept-encoding"] == b"identity,deflate,gzip"
        assert model.calls == []
        await well(house, line)


async def test_a_call_over_http1_is_told_what_it_needs() -> None:
    async with house_of(Model()) as house:
        _, fields, _ = await house.ask(INFER, request("m", 1), ("content-type", "application/grpc"))
        assert (fields["grpc-status"], "gRPC needs HTTP/2" in fields["grpc-message"]) == ("12", True)


@pytest.mark.parametrize("authority", [b"/run/s.sock", b"route/default/models/0", b"%2Frun%2Fs.sock", b"10.0.0.7:8080"])
async def test_a_call_may_name_the_server_as_its_client_likes(authority: bytes) -> None:
    async with house_of(Model()) as house:
        answer = await infer(house, request("m", 4), authority=authority)
        assert isinstance(answer, V2Answer), answer


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ([(b"x-large", b"x" * 40_000)], EXHAUSTED, "(limits.head)"),
        ([(b"x%d" % n, b"") for n in range(200)], EXHAUSTED, "the limit is 100 (limits.fields)"),
        ([(b"content-length", b"x")], INTERNAL, "content-length"),
    ],
)
async def test_a_head_that_no_handler_may_see_ends_its_call_alone_in_grpcs_words(
    fields: Headers, code: StatusCode, says: str
) -> None:
    async with house_of(Model()) as house:
        line = house.line("http2")
        other = await ByHand(line, "ModelInfer").open()
        made = ByHand(line, "ModelInfer")
        bare = [field for field in call_head(SERVICE, "ModelInfer", authority=b"x").headers if field[0] != b"content-length"]
        with pytest.MonkeyPatch.context() as patch:  # our own machine refuses to send some of it
            patch.setattr("protocols.http2.heads.check_fields", lambda given: given)
            line.peer.machine._h2.config.validate_outbound_headers = False  # type: ignore[union-attr]
            head = Head(method=b"POST", target=INFER.encode(), authority=b"x", headers=(*bare, *fields))
            patch.setattr("protocols.http2.heads.content_length", lambda _: None)
            await line.send(Request(stream=made.stream, head=head))
        refused(await answered(made), code, says)
        await other.say(request("m", 4))
        await other.end()
        assert isinstance(await answered(other), bytes)


async def test_a_connection_that_must_go_over_its_heads_says_which_setting() -> None:
    async with house_of(Model()) as house:
        line = house.line("http2")
        await ByHand(line, "ModelInfer").open((b"x-large", b"x" * 100_000))
        await line.over()
        (goaway,) = line.goaways
        assert (goaway.code, b"limits.head" in goaway.debug) == (11, True)


# -- the message -------------------------------------------------------------------------------------------------------

ONE = request("m", 1)


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (b"", INTERNAL, "this one had none"),
        (ONE[:3], INTERNAL, "inside a message's prefix"),
        (ONE[:-1], INTERNAL, "inside a message"),
        (ONE + ONE, UNIMPLEMENTED, "second"),
        (ONE + b"\0", UNIMPLEMENTED, "second"),
        (b"\x01" + ONE[1:], INTERNAL, "grpc-encoding"),
        (b"\x02" + ONE[1:], INTERNAL, "compressed flag"),
        (encode_prefix(2) + b"\xff\xff", INTERNAL, "cannot be read"),
        (encode_prefix(4) + b"\x0a\x02\xff\xfe", INTERNAL, "cannot be read"),
    ],
)
@pytest.mark.parametrize("step", [1, 1000])
async def test_what_is_not_one_message_is_refused_and_the_connection_goes_on(
    body: bytes, code: StatusCode, says: str, step: int
) -> None:
    model = Model()
    async with house_of(model) as house:
        line = house.line("http2")
        made = ByHand(line, "ModelInfer")
        await made.open()
        for at in range(0, len(body), step):
            await made.say(body[at : at + step])
            if step == 1:
                await house.still()
        await made.end()
        refused(await answered(made), code, says)
        assert model.calls == []
        await well(house, line)


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_a_message_may_be_cut_anywhere(step: int) -> None:
    async with house_of(Model()) as house:
        made = ByHand(house.line("http2"), "ModelInfer")
        await made.open()
        body = request("m", 4)
        for at in range(0, len(body), step):
            await made.say(body[at : at + step])
            await house.still()
        await made.end()
        assert isinstance(await answered(made), bytes)


@pytest.mark.parametrize(("name", "deflate"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
@pytest.mark.parametrize("size", [1, 100_000])
async def test_a_message_may_be_compressed(name: bytes, deflate: Any, size: int) -> None:
    async with house_of(Model()) as house:
        message = deflate(request("m", *range(size))[5:])
        answer = await infer(house, encode_prefix(len(message), compressed=True) + message, (b"grpc-encoding", name))
        assert isinstance(answer, V2Answer), answer
        assert numbers(answer) == list(range(0, 2 * size, 2))
        await house.still()
        assert house.gateway.budget.used == 0
        answer = await infer(house, request("m", 4), (b"grpc-encoding", name))  # which need not be
        assert isinstance(answer, V2Answer), answer


@pytest.mark.parametrize("damage", [lambda data: data[:-4], lambda data: b"x" + data[1:], lambda data: data + b"x"])
async def test_a_damaged_compression_is_refused(damage: Any) -> None:
    async with house_of(Model()) as house:
        message = damage(gzip.compress(request("m", 1)[5:]))
        body = encode_prefix(len(message), compressed=True) + message
        refused(await infer(house, body, (b"grpc-encoding", b"gzip")), INTERNAL, "compressed")


async def test_a_message_over_the_limit_is_refused_by_its_prefix() -> None:
    async with house_of(Model(), config=limits(body=10 * KiB)) as house:
        line = house.line("http2")
        made = ByHand(line, "ModelInfer")
        await made.open()
        await made.say(announced(10 * KiB + 1))  # and nothing of it
        refused(await answered(made), EXHAUSTED, "10241 bytes", "10240 bytes (limits.body)")
        assert house.gateway.budget.used == 0
        message = gzip.compress(bytes(1024 * KiB))
        body = encode_prefix(len(message), compressed=True) + message
        refused(await infer(house, body, (b"grpc-encoding", b"gzip"), line=line), EXHAUSTED, "limits.body")
        await well(house, line)


async def test_a_message_that_is_announced_and_never_comes_is_not_waited_for(autojump_clock: Any) -> None:
    async with house_of(Model()) as house:
        made = ByHand(house.line("http2"), "ModelInfer")
        await made.open()
        await made.say(announced(1000) + b"x")
        refused(await answered(made), TOO_LATE, "limits.body_silence")
        assert trio.current_time() < 40


async def test_a_message_that_is_larger_than_all_memory_is_refused_by_its_prefix() -> None:
    async with house_of(Model(), config=limits(total_bytes=100 * KiB, body=1024 * KiB)) as house:
        made = ByHand(house.line("http2"), "ModelInfer")
        await made.open()
        await made.say(announced(1000 * KiB))
        refused(await answered(made), UNAVAILABLE, "limits.total_bytes")


# -- codes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ModelError("no such voice"), INTERNAL, "no such voice"),
        (ModelError("no such voice", status=400), INVALID, "no such voice"),
        (ModelError("who?", status=401), StatusCode.UNAUTHENTICATED, "who?"),
        (ModelError("not you", status=403), StatusCode.PERMISSION_DENIED, "not you"),
        (ModelError("no such voice", status=404), StatusCode.NOT_FOUND, "no such voice"),
        (ModelError("twice", status=409), StatusCode.FAILED_PRECONDITION, "twice"),
        (ModelError("too long", status=413), EXHAUSTED, "too long"),
        (ModelError("a teapot", status=418), INVALID, "a teapot"),
        (ModelError("later", status=429), EXHAUSTED, "later"),
        (ModelError("mine", status=500), INTERNAL, "mine"),
        (ModelError("later", status=503), UNAVAILABLE, "later"),
        (ModelError("caf\u00e9 100% \n"), INTERNAL, "caf\u00e9 100% \n"),
        (RuntimeError("secret"), INTERNAL, "incident"),
        (MemoryError("secret"), EXHAUSTED, "memory"),
    ],
)
async def test_the_code_of_a_models_error(error: Exception, code: StatusCode, says: str) -> None:
    model = Model()
    model.fails = error
    async with house_of(model) as house:
        answer = await infer(house, request("m", 1))
        refused(answer, code, says)
        assert isinstance(answer, Status)
        assert "secret" not in answer.text
        assert house.endings == {"model-error": 1}


@pytest.mark.parametrize(
    "bad", [object(), InferResponse(outputs=[]), InferResponse(outputs=[Tensor(name="z", data=np.zeros(1))])]
)
async def test_a_bad_answer_is_the_servers_fault(bad: Any) -> None:
    model = Model()
    model.bad = bad
    async with serving(model.spec(outputs=[TensorSpec(name="y", datatype="INT64", shape=(-1,))])) as house:
        refused(await infer(house, request("m", 1)), INTERNAL)


async def test_the_time_of_the_call_and_that_of_the_model(autojump_clock: Any) -> None:
    probe = Probe(silent, "m")
    async with serving(probe.spec(WIRE, timeout=5), Model().spec("other")) as house:
        for within, says, seconds in ((3, "grpc-timeout", 3), (30, "models.m.timeout", 5), (None, "models.m.timeout", 5)):
            began = trio.current_time()
            refused(await infer(house, request("m", 1), within=within), TOO_LATE, says)
            assert trio.current_time() - began == seconds
            assert probe.live == 0
        asked_for = await infer(house, request("m", 1, parameters={"timeout": 2_000_000}), within=30)
        refused(asked_for, TOO_LATE, "parameter timeout")
        assert house.endings == {"deadline": 4}


async def test_the_time_of_a_call_counts_while_its_message_comes(autojump_clock: Any) -> None:
    async with house_of(Model()) as house:
        made = ByHand(house.line("http2"), "ModelInfer")
        await made.open(within=3)
        await made.say(announced(1000) + b"x")
        refused(await answered(made), TOO_LATE, "grpc-timeout")
        assert trio.current_time() == pytest.approx(3)


async def test_a_queue_that_is_full_and_a_model_that_was_given_up_are_unavailable(autojump_clock: Any) -> None:
    probe = Probe(silent, "m")
    async with serving(probe.spec(WIRE, capacity=1, queue=0)) as house:
        held = ByHand(house.line("http2"), "ModelInfer")
        await held.open()
        await held.say(request("m", 1))
        await held.end()
        await house.still()
        refused(await infer(house, request("m", 1)), UNAVAILABLE, "sessions run")
        await held.leave()


async def test_a_server_that_drains_sends_calls_elsewhere(autojump_clock: Any) -> None:
    model = Model()
    async with house_of(model, config=Config(drain=DrainConfig(delay=5))) as house:
        line = house.line("http2")
        await well(house, line)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.gateway.drain)
            await house.still()
            with at_once():
                refused(await infer(house, request("m", 1), line=line), UNAVAILABLE, "shutting down")
                told = await asked(house, "ServerLive", tables.SERVER_LIVE, line)
                assert told == {"live": True}
                told = await asked(house, "ServerReady", tables.SERVER_READY, line)
                assert not told["ready"]
        assert len(model.calls) == 1


async def test_a_server_without_memory_refuses_new_calls_before_they_are_read() -> None:
    async with house_of(Model(), config=limits(total_bytes=1024 * KiB)) as house:
        budget = house.gateway.budget
        assert budget.try_reserve(900 * KiB)
        refused(await infer(house, request("m", 1)), UNAVAILABLE, "limits.memory_refuse")
        budget.release(900 * KiB)
        await well(house)


async def test_a_key_is_missing_wrong_of_another_model_or_used_too_often(tmp_path: Path) -> None:
    key = "ew_" + "k" * 43
    file = tmp_path / "keys"
    file.write_text(line_of("alice", key, ("models=m", "in_flight=1")) + "\n")
    file.chmod(0o600)
    probe = Probe(silent, "m")
    other = Model().spec("other")
    shown = (b"authorization", b"Bearer " + key.encode())
    async with serving(probe.spec(WIRE), other, config=Config(access=AccessConfig(keys_file=str(file)))) as house:
        refused(await infer(house, request("m", 1)), StatusCode.UNAUTHENTICATED, "needs a key")
        wrong = (b"authorization", b"Bearer ew_" + b"w" * 43)
        refused(await infer(house, request("m", 1), wrong), StatusCode.UNAUTHENTICATED, "key is unknown")
        refused(await infer(house, request("other", 1), shown), StatusCode.PERMISSION_DENIED, "other")
        line = house.line("http2")
        held = await ByHand(line, "ModelInfer").open(shown)
        await held.say(request("m", 1))
        await held.end()
        await house.still()
        refused(await infer(house, request("m", 1), shown, line=line), EXHAUSTED)
        stream = await ByHand(line).open(shown)  # a stream is one exchange
        ended = await stream.next()
        assert isinstance(ended, Status)
        assert ended.code is EXHAUSTED
        await held.leave()
        await house.still()
        stream = await ByHand(line).open(shown)
        await stream.ask("other", 1, id="7")
        found = await stream.response()
        assert (found.answer.id, "other" in found.error) == ("7", True)
        await stream.end()
        assert await stream.rest() == ([], OK)
        forbidden = await call(house, "RepositoryModelLoad", b"", shown, line=line)
        refused(forbidden, StatusCode.PERMISSION_DENIED)


# -- ModelInfer --------------------------------------------------------------------------------------------------------


async def text(part: Part) -> bytes:
    return b""


def declared(model: Model) -> ModelSpec:
    """The model, with its input and output declared."""
    x = TensorSpec(name="x", datatype="INT64", shape=(-1,))
    return model.spec("declared", inputs=[x], outputs=[TensorSpec(name="y", datatype="INT64", shape=(-1,))])


X = {"name": "x", "datatype": "INT64", "shape": [1]}
RAW = np.int64(4).tobytes()


def written(**fields: Any) -> bytes:
    """A ModelInferRequest of these fields, in its frame."""
    return b"".join(frame((REQUEST.write({"model_name": "m", "inputs": [X], "raw_input_contents": [RAW], **fields}),)))


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"model_name": "nobody"}, StatusCode.NOT_FOUND, "unknown model 'nobody'; there are: "),
        ({"model_name": ""}, StatusCode.NOT_FOUND, "unknown model"),
        ({"model_version": "2"}, StatusCode.NOT_FOUND, "no version '2'"),
        ({"model_version": "latest"}, StatusCode.NOT_FOUND, "no version 'latest'"),
        ({"model_name": "parts"}, INVALID, "asked by an input 'text_input'"),
        ({"model_name": "many"}, UNIMPLEMENTED, "ModelStreamInfer"),
        ({"raw_input_contents": []}, INVALID, "x"),
        ({"raw_input_contents": [RAW, RAW]}, INVALID, "raw_input_contents"),
        ({"raw_input_contents": [RAW[1:]]}, INVALID, "x"),
        ({"inputs": [{**X, "contents": {"int64_contents": [4]}}]}, INVALID, "contents"),
        ({"inputs": [{**X, "shape": [2**62, 4]}]}, INVALID, "x"),
        ({"inputs": [{**X, "shape": [-1]}]}, INVALID, "x"),
        ({"inputs": [{**X, "datatype": "int64"}]}, INVALID, "int64"),
        ({"inputs": [X, X], "raw_input_contents": [RAW, RAW]}, INVALID, "x"),
        (
            {"inputs": [{**X, "parameters": {"shared_memory_region": {"string_param": "r"}}}]},
            INVALID,
            "shared_memory_region",
        ),
        ({"parameters": {"timeout": {"string_param": "1"}}}, INVALID, "timeout"),
        ({"parameters": {"priority": {"bool_param": True}}}, INVALID, "priority"),
        ({"parameters": {"triton_x": {"bool_param": True}}}, INVALID, "triton_"),
        ({"parameters": {"x": {}}}, INVALID, "x"),
        ({"model_name": "declared", "inputs": [{**X, "name": "z"}]}, INVALID, "z"),
        ({"model_name": "declared", "inputs": [], "raw_input_contents": []}, INVALID, "x"),
        ({"model_name": "declared", "outputs": [{"name": "z"}]}, INVALID, "z"),
        ({"outputs": [{"name": "z"}]}, INVALID, "z"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, INVALID, "y"),
    ],
)
async def test_a_request_that_no_model_can_have_is_refused_and_says_why(
    fields: dict[str, Any], code: StatusCode, says: str
) -> None:
    model, many = Model(), Probe(silent, "many")
    more = declared(model), many.spec("grpcstream-http2"), spec_of(text, "parts", family=Family.PARTS)
    async with house_of(model, *more) as house:
        line = house.line("http2")
        refused(await infer(house, written(**fields), line=line), code, says)
        assert many.calls == 0
        assert not model.calls or "outputs" in fields  # one that declares nothing is asked first
        await well(house, line)


async def test_an_answer_names_the_model_its_version_and_the_id_of_its_request() -> None:
    async with house_of(Model()) as house:
        answer = await infer(house, request("m", 4, id="seven"))
        assert isinstance(answer, V2Answer)
        assert (answer.model_name, answer.model_version, answer.id, numbers(answer)) == ("m", "1", "seven", [8])
        answer = await infer(house, written(model_version="1"))
        assert isinstance(answer, V2Answer)
        assert (answer.id, numbers(answer)) == ("", [8])


async def test_a_typed_request_is_answered() -> None:
    async with house_of(Model()) as house:
        answer = await infer(house, request("m", 4, 5, typed=True))
        assert isinstance(answer, V2Answer)
        assert numbers(answer) == [8, 10]


async def several(session: Session[InferRequest, InferResponse]) -> None:
    """One output for each letter."""
    await session.receive()
    await session.send(InferResponse(outputs=[Tensor(name=c, data=np.array([n])) for n, c in enumerate("abc")]))


@pytest.mark.parametrize(("wanted", "came"), [("", "abc"), ("ca", "ca"), ("b", "b")])
async def test_outputs_are_those_that_were_asked_for_in_their_order(wanted: str, came: str) -> None:
    async with serving(spec_of(several, "m", family=Family.TENSOR)) as house:
        answer = await infer(house, written(outputs=[{"name": name} for name in wanted]))
        assert isinstance(answer, V2Answer)
        assert [output.name for output in answer.outputs] == list(came)
        assert numbers(answer) == ["abc".index(name) for name in came]


async def test_a_model_sees_the_parameters_and_the_metadata_of_its_call() -> None:
    model = Model()
    async with house_of(model) as house:
        given = {
            "flag": {"bool_param": True},
            "count": {"int64_param": -3},
            "name": {"string_param": "n"},
            "share": {"double_param": 0.5},
            "priority": {"uint64_param": 2},
        }
        await infer(house, written(parameters=given), (b"tenant", b"ours"))
        (seen,) = model.calls
        assert dict(seen.parameters) == {"flag": True, "count": -3, "name": "n", "share": 0.5, "priority": 2}
        assert (seen.headers["tenant"], seen.path, seen.model, seen.dialect) == ("ours", INFER, "m", "grpc")


async def test_many_calls_share_a_connection_and_each_has_its_own_end() -> None:
    model = Model()
    async with house_of(model) as house:
        line = house.line("http2")
        made = [ByHand(line, "ModelInfer") for _ in range(20)]
        for n, one in enumerate(made):
            await one.open()
            await one.say(request("nobody" if n % 4 == 3 else "m", n, id=str(n)))
            await one.end()
        ends = Counter[str]()
        for one in reversed(made):
            answer = await answered(one)
            ends["answer" if isinstance(answer, bytes) else answer.code.name] += 1
        assert ends == {"answer": 15, "NOT_FOUND": 5}
        assert house.endings == {"complete": 15, "refused": 5}
        line.peer.close()
        await line.over()
        assert isinstance(await line.event(99), ConnectionEnd)


# -- how long a message may be to read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize(
    "path",
    [
        "grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch", f"{SERVICE}/ServerLive", f"{SERVICE}/ServerReady",
        f"{SERVICE}/ModelReady", f"{SERVICE}/ServerMetadata", f"{SERVICE}/ModelMetadata", f"{SERVICE}/ModelConfig",
        f"{SERVICE}/ModelStatistics", "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ],
)  # fmt: skip
async def test_a_call_that_only_names_something_has_a_small_message(path: str, coded: bool) -> None:
    async with house_of(Model()) as house:
        line = house.line("http2")
        for n in (SMALL_CALL + 2, 198_000):
            message = b"\x48\x00" * (n // 2)  # fields that nobody knows
            fields = [GRPC, (b"te", b"trailers")]
            if coded:
                message, fields = gzip.compress(message), [*fields, (b"grpc-encoding", b"gzip")]
            body = encode_prefix(len(message), compressed=coded) + message
            status, answered, said = await posted(line, f"/{path}", fields, body=body)
            assert (status, answered[b"grpc-status"], said) == (200, b"8", b"")
            assert b"4096 bytes" in answered[b"grpc-message"]
        await well(house, line)


@pytest.mark.parametrize("count", [900, 1_100, 9_000, 11_000, 400_000])
@pytest.mark.parametrize("part", [b"\x0a\x00", b"\x48\x00", b"\x22\x00"])
async def test_a_message_of_very_many_fields_is_refused_and_those_of_many_are_read(part: bytes, count: int) -> None:
    async with house_of(Model()) as house:
        line = house.line("http2")
        message = gzip.compress(part * count + request("m", 4)[PREFIX:])
        body = encode_prefix(len(message), compressed=True) + message
        fields = [GRPC, (b"te", b"trailers"), (b"grpc-encoding", b"gzip")]
        _, answered, _ = await posted(line, INFER, fields, body=body)
        if count > GRPC_FIELDS:
            assert answered[b"grpc-status"] == b"8"
            assert b"too many fields: more than 10000" in answered[b"grpc-message"]
        else:
            assert b"grpc-status" not in answered or answered[b"grpc-status"] in (b"0", b"3"), answered
        await well(house, line)
        await house.still()
        assert house.gateway.budget.used == 0


async def test_a_tensor_of_many_fields_is_paid_for_and_read_beside_others() -> None:
    count = 50_000
    async with house_of(Model()) as house:
        singles = (b"\x35" + np.float32(2).tobytes()) * count
        entry = encode_field(1, b"x") + encode_field(2, b"FP32") + b"\x18" + encode_varint(count) + encode_field(5, singles)
        answer = await infer(house, b"".join(map(bytes, frame((encode_field(1, b"m") + encode_field(5, entry),)))))
        assert isinstance(answer, V2Answer), answer
        assert numbers(answer) == [4] * count
        await house.still()
        assert house.gateway.budget.used == 0
