"""The bidirectional stream in its three forms and on its two wires: heads, forms, padding, paths, and limits of time."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import trio

from gateway import client
from gateway.config import BidiConfig, Config, ListenConfig, SageMakerConfig, WebSocketConfig
from gateway.config.problem import ConfigError
from gateway.errors import TransportLost
from gateway.gateway import Gateway
from gateway.testing.stories.talk import Leave
from models.errors import ModelError
from models.messages import Part, PartKind
from models.session import Session
from protocols.aws import bidi
from protocols.events import Close, Data, End, Frame, Opcode, Reset, Response
from protocols.websocket.handshake import request_headers
from tests.gateway.promises import (
    DUPLEX,
    NOW,
    PADDING,
    DuplexCall,
    EventsCall,
    House,
    Over,
    Probe,
    at_once,
    echoing,
    raw,
    serving,
    silent,
)

PATH = "/endpoints/probe/invocations-bidirectional-stream"
GA, LITERAL = bidi.CONTENT_TYPE, bidi.JSON_CONTENT_TYPE
EVENT_FORMS = ["bidi", "bidi-json", "bidi-literal", "bidi-padded"]


async def echo(probe: Probe, session: Session[Any, Any]) -> None:
    """Sends back what comes, as it comes."""
    async for part in session:
        await session.send(part)


async def opened(house: House, *headers: tuple[str, str], path: str = PATH, body: bytes | None = None) -> Any:
    """The first event of an answer to a BiDi request, and its line."""
    line = house.line("http2")
    fields = [(name.encode(), value.encode()) for name, value in headers]
    await line.send(raw(1, b"POST", path, headers=fields))
    if body is not None:
        await line.send(*([Data(stream=1, buffers=(body,))] if body else []), End(stream=1))
    await line.read()
    return line


async def answer(line: Any) -> tuple[int, dict[str, str], bytes]:
    """All of an answer."""
    head = await line.event(1)
    assert isinstance(head, Response)
    body = bytearray()
    while isinstance(event := await line.event(1), Data):
        line.peer.credit(event)
        body += event.buffers[0]
    assert isinstance(event, End)
    return head.status, {name.decode(): value.decode() for name, value in head.headers}, bytes(body)


# -- forms -----------------------------------------------------------------------------------------------------------


IN_FORM = {
    "ga": (GA, b"".join(bidi.encode_request_part(b"hi", bidi.DataType.UTF8, bidi.Completion.PARTIAL, date_ms=0))),
    "literal": (LITERAL, b'{"PayloadPart": {"Bytes": "aGk=", "DataType": "UTF8", "CompletionState": "PARTIAL"}}'),
    "alias": (LITERAL, b'{"PayloadPart": {"Bytes": "aGk=", "DataType": "UTF8", "CompletionStatus": "PARTIAL"}}'),
    "padded": (LITERAL, b'{"PayloadPart": {"Bytes": "aGk=", "DataType": "UTF8", "CompletionState": "PARTIAL", "P": "abc"}}'),
    "sniffed": ("", b'\n{"PayloadPart": {"Bytes": "aGk=", "DataType": "UTF8", "CompletionState": "PARTIAL"}}'),
}


@pytest.mark.parametrize("form", IN_FORM)
async def test_a_part_is_the_same_in_every_form_and_answered_in_its_own(form: str, autojump_clock: Any) -> None:
    seen: list[Part] = []

    async def model(probe: Probe, session: Session[Any, Any]) -> None:
        async for part in session:
            seen.append(part)
            await session.send(part)

    kind, body = IN_FORM[form]
    async with serving(Probe(model).spec("bidi")) as house:
        line = await opened(house, *([("content-type", kind)] if kind else []), body=body)
        status, headers, answered = await answer(line)
        assert status == 200
        (part,) = seen
        assert (bytes(part.data), part.kind, part.last) == (b"hi", PartKind.UTF8, False)
        if form == "ga":
            assert headers["content-type"] == GA
            assert answered == b"".join(bidi.encode_part(b"hi", bidi.DataType.UTF8, bidi.Completion.PARTIAL))
        else:
            assert headers["content-type"] == LITERAL
            expected = {"Bytes": "aGk=", "DataType": "UTF8", "CompletionState": "PARTIAL"}
            assert json.loads(answered) == {"PayloadPart": expected}
            assert answered.endswith(b"\n")


async def test_json_events_are_answered_with_json_events(autojump_clock: Any) -> None:
    event = b"".join(bidi.encode_json_event(b"hi", bidi.DataType.UTF8, bidi.Completion.PARTIAL))
    async with serving(Probe(echo).spec("bidi")) as house:
        for sent in (event, b"".join(bidi.encode_envelope(event, date_ms=0))):
            line = await opened(house, ("content-type", GA), body=sent)
            status, headers, answered = await answer(line)
            assert (status, headers["content-type"], answered) == (200, GA, event)


@pytest.mark.parametrize(("kind", "fault"), [(GA, "ga"), (LITERAL, "literal")])
async def test_the_head_goes_out_before_the_first_part(kind: str, fault: str, autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi")) as house:
        house.gateway.server.new_id = iter(["boot1"]).__next__
        with at_once():
            line = await opened(house, ("content-type", kind))
            head = await line.event(1)
        assert isinstance(head, Response)
        assert [*head.headers] == [
            (b"content-type", kind.encode()),
            (b"x-amzn-invoked-production-variant", b"AllTraffic"),
            (b"x-amzn-requestid", b"boot1"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", b"boot1"),
            (b"x-content-type-options", b"nosniff"),
            (b"date", NOW),
        ]
        line.peer.close()


async def test_without_a_content_type_the_head_waits_for_the_first_byte(autojump_clock: Any) -> None:
    async with serving(Probe(echo).spec("bidi")) as house:
        line = await opened(house)
        assert not line._kept.get(1)
        await line.send(Data(stream=1, buffers=(b"{",)))
        await line.read()
        assert dict((await line.event(1)).headers)[b"content-type"] == LITERAL.encode()
        line.peer.close()


@pytest.mark.parametrize("wire", ["bidi", "bidi-json", "bidi-literal"])
async def test_what_is_no_part_is_said_in_band_and_ends_the_stream(wire: str, autojump_clock: Any) -> None:
    async with serving(Probe(echoing).spec(wire)) as house:
        call = await house.call(wire)
        assert isinstance(call, EventsCall)
        await call.say()
        assert await call.next() == 0
        await call.line.send(Data(stream=1, buffers=(b"\xff" * 40,)))
        _, over = await call.rest()
        assert (over.how, over.code) == ("error", "InternalStreamFailure")
        assert "bad event stream" in over.text
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize("wire", [*EVENT_FORMS, "bidi-signed"])
async def test_an_answer_that_ends_early_is_whole_and_then_a_reset_without_an_error(wire: str, autojump_clock: Any) -> None:
    async def enough(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        await probe.say(session)

    async with serving(Probe(enough).spec(wire), wire=wire) as house:
        call = await house.call(wire)
        assert await call.rest() == ([0], Over("complete"))
        await call.line.read()
        assert await call.line.event(1) == Reset(stream=1, code=0)
        assert house.endings == {"complete": 1}


# -- refused heads -----------------------------------------------------------------------------------------------------

REFUSED = [
    ("content-type", "text/plain", "content-type"),
    (bidi.TARGET_VARIANT, "no!", "TargetVariant"),
    (bidi.TARGET_VARIANT, "a" * 64, "TargetVariant"),
    (bidi.TARGET_VARIANT, "other", "variant"),
    (bidi.MODEL_INVOCATION_PATH, "/a", "ModelInvocationPath"),
    (bidi.MODEL_INVOCATION_PATH, "a" * 101, "ModelInvocationPath"),
    (bidi.MODEL_QUERY_STRING, "a", "ModelQueryString"),
    (bidi.MODEL_QUERY_STRING, "a=b&", "ModelQueryString"),
    (bidi.MODEL_QUERY_STRING, "a=" + "b" * 2047, "ModelQueryString"),
]


@pytest.mark.parametrize(("name", "value", "member"), REFUSED)
async def test_a_header_against_its_pattern_is_an_error_before_the_head(
    name: str, value: str, member: str, autojump_clock: Any
) -> None:
    probe = Probe(silent)
    async with serving(probe.spec("bidi")) as house:
        given = {"content-type": GA} | {name: value}
        with at_once():
            status, headers, body = await answer(await opened(house, *given.items()))
        assert (status, headers["x-amzn-errortype"]) == (400, "InputValidationError")
        assert member in json.loads(body)["Message"]
        assert (probe.calls, house.endings) == (0, {"refused": 1})


@pytest.mark.parametrize("path", [PATH, PATH + "?"])
async def test_path_and_query_reach_the_model_and_empty_ones_are_absent(path: str, autojump_clock: Any) -> None:
    calls: list[tuple[str, str, Any]] = []

    async def looks(probe: Probe, session: Session[Any, Any]) -> None:
        calls.append((session.call.path, session.call.query, session.call.parameters.get("invocation_path")))

    async with serving(Probe(looks).spec("bidi")) as house:
        for where, query in [("v1/../a.b", "x=%2F&y-1=a~b"), ("", "")]:
            given = {"content-type": GA, bidi.MODEL_INVOCATION_PATH: where, bidi.MODEL_QUERY_STRING: query}
            assert (await answer(await opened(house, *given.items(), path=path, body=b"")))[0] == 200
        assert calls == [("v1/../a.b", "x=%2F&y-1=a~b", "v1/../a.b"), (PATH, "", None)]


async def test_http1_cannot_carry_it(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi")) as house:
        status, headers, body = await house.ask(PATH, b"", ("content-type", GA))
        assert (status, headers["x-amzn-errortype"]) == (400, "InputValidationError")
        assert "HTTP/2" in json.loads(body)["Message"]


# -- padding -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [GA, "json", LITERAL])
async def test_padding_varies_within_its_bound_and_the_bytes_do_not(form: str, autojump_clock: Any) -> None:
    # GA: the header P; in JSON: the member P
    asked = {
        GA: b"".join(bidi.encode_request_part(b"token", date_ms=0)),
        "json": b"".join(bidi.encode_json_event(b"token")),
        LITERAL: b"".join(bidi.encode_literal_part(b"token")),
    }[form]
    config = Config(bidi=BidiConfig(padding=PADDING))
    async with serving(Probe(echo).spec("bidi"), config=config) as house:
        kind = LITERAL if form == LITERAL else GA
        _, _, body = await answer(await opened(house, ("content-type", kind), body=asked * 300))
        if form == LITERAL:
            lines = [json.loads(line)["PayloadPart"] for line in body.splitlines()]
            assert {line["Bytes"] for line in lines} == {"dG9rZW4="}
            sizes = [len(line.get("P", "")) for line in lines]
        else:
            decoder, sizes = bidi.ResponseDecoder(), []
            encoder = bidi.ENCODERS[bidi.Form.JSON_EVENTS if form == "json" else bidi.Form.EVENT_STREAM]
            least = len(b"".join(encoder.part(b"token", bidi.DataType.BINARY)))
            while body:
                size = int.from_bytes(body[:4], "big")
                decoder.receive_data(body[:size])
                part = decoder.next_event()
                assert isinstance(part, bidi.PayloadPart)
                assert part.data == b"token"
                sizes.append(size - least)
                body = body[size:]
        assert len(sizes) == 300
        assert min(sizes) >= 0
        assert max(sizes) <= PADDING + 16  # the name of the field
        assert len(set(sizes)) > PADDING // 2


async def test_no_padding_where_none_is_configured(autojump_clock: Any) -> None:
    asked = b"".join(bidi.encode_request_part(b"token", padding="abc", date_ms=0))
    async with serving(Probe(echo).spec("bidi")) as house:
        _, _, body = await answer(await opened(house, ("content-type", GA), body=asked * 10))
        assert body == b"".join(bidi.encode_part(b"token", bidi.DataType.BINARY, bidi.Completion.COMPLETE)) * 10


# -- time --------------------------------------------------------------------------------------------------------------

TICK = 1.0


@pytest.mark.parametrize("wire", DUPLEX)
async def test_a_session_without_a_part_in_either_direction_ends_in_band(wire: str, autojump_clock: Any) -> None:
    probe = Probe(echoing)
    config = Config(bidi=BidiConfig(idle_timeout=10), websocket=WebSocketConfig(ping_interval=0))
    async with serving(probe.spec(wire), config=config, wire=wire) as house:
        call = await house.call(wire)
        assert isinstance(call, DuplexCall)
        for number in range(4):  # parts keep it alive
            await trio.sleep(7)
            await call.say()
            assert await call.next() == number
        began = trio.current_time()
        _, over = await call.rest()
        assert 10 <= trio.current_time() - began <= 10 + 2 * TICK
        assert (over.how, over.code) == ("error", "1011" if wire.startswith("websocket") else "ModelStreamError")
        assert "bidi.idle_timeout" in over.text
        assert house.endings == {"deadline": 1}
        await house.still()
        assert probe.live == 0


@pytest.mark.parametrize("wire", DUPLEX)
async def test_a_session_has_its_time_however_busy_it_is(wire: str, autojump_clock: Any) -> None:
    async def ticking(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        while True:
            await probe.say(session)
            await trio.sleep(1)

    config = Config(bidi=BidiConfig(session_timeout=5))
    async with serving(Probe(ticking).spec(wire), config=config, wire=wire) as house:
        call = await house.call(wire)
        began = trio.current_time()
        numbers, over = await call.rest()
        assert trio.current_time() - began == 5
        assert numbers in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])
        assert (over.how, over.code) == ("error", "1011" if wire.startswith("websocket") else "ModelStreamError")
        assert "bidi.session_timeout" in over.text


async def test_a_models_own_timeout_stands_in_place_of_the_sessions(autojump_clock: Any) -> None:
    config = Config(bidi=BidiConfig(session_timeout=5))
    async with serving(Probe(silent).spec("bidi", timeout=20), config=config) as house:
        call = await house.call("bidi")
        began = trio.current_time()
        _, over = await call.rest()
        assert (trio.current_time() - began, "models.probe.timeout" in over.text) == (20, True)


# -- any path ----------------------------------------------------------------------------------------------------------


async def upgraded(house: House, path: str) -> client.Peer:
    return await client.websocket(house.line("http1").transport, path)


async def refused(house: House, path: str) -> tuple[int, bytes]:
    line = house.line("http1")
    headers = [h for h in request_headers(bytes(16)) if h[0] not in (b"upgrade", b"connection")]
    await line.send(raw(1, b"GET", path, headers=headers, upgrade=b"websocket"))
    status, _, body = await line.peer.read_answer(1)
    return status, body


@pytest.mark.parametrize(
    "path", ["/", "/x", "/a/b.c/../d", "/invocations", "/ping", "/models", "/endpoints/probe/invocations", "/%2e?q=%20&q"]
)
async def test_a_websocket_is_answered_at_any_path_which_the_model_sees(path: str, autojump_clock: Any) -> None:
    calls: list[tuple[str, str, Any]] = []

    async def looks(probe: Probe, session: Session[Any, Any]) -> None:
        calls.append((session.call.path, session.call.query, session.call.parameters["invocation_path"]))
        await session.send(Part(data=b"00000001"))

    async with serving(Probe(looks).spec("websocket")) as house:
        peer = await upgraded(house, path)
        assert isinstance(await peer.next_event(), Frame)
        assert isinstance(await peer.next_event(), Close)
        await peer.flush()
        where, _, query = path.partition("?")
        assert calls == [(where, query, where[1:])]


@pytest.mark.parametrize("path", ["/x", "/invocations"])
async def test_without_any_path_only_the_configured_one_is_a_websocket(path: str, autojump_clock: Any) -> None:
    config = Config(websocket=WebSocketConfig(any_path=False, path="/talk"))
    async with serving(Probe(silent).spec("websocket"), config=config) as house:
        assert (await refused(house, path))[0] in (400, 404)
        (await upgraded(house, "/talk")).close()
        (await upgraded(house, "/models/probe/talk")).close()
        assert (await refused(house, "/models/none/talk"))[0] == 404


async def test_of_two_models_the_default_answers_and_without_one_nobody(autojump_clock: Any) -> None:
    specs = [Probe(silent, name).spec("websocket") for name in ("one", "two")]
    async with serving(*specs) as house:
        status, body = await refused(house, "/x")
        assert (status, b"one, two" in body) == (400, True)
    two = Probe(silent, "two")
    config = Config(bidi=BidiConfig(default_model="two"))
    async with serving(specs[0], two.spec("websocket"), config=config) as house:
        peer = await upgraded(house, "/x")
        await house.still()
        assert two.live == 1
        peer.close()


async def test_the_bidi_port_is_a_second_listener() -> None:
    async def greets(probe: Probe, session: Session[Any, Any]) -> None:
        await session.send(Part(data=b"hello"))

    gateway = Gateway(Config(listen=ListenConfig(port=0, bidi_port=0)), [Probe(greets).spec("websocket")])
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        assert gateway.bidi_port not in (0, gateway.port)
        with trio.fail_after(60):
            for port in (gateway.bidi_port, gateway.port):
                async with client.connect("127.0.0.1", port) as transport:
                    peer = await client.websocket(transport, "/invoke-bidi-stream")
                    frame = await peer.next_event()
                    assert isinstance(frame, Frame)
                    assert frame.data == b"hello"
        nursery.cancel_scope.cancel()


# -- fragments ---------------------------------------------------------------------------------------------------------


async def test_parts_and_frames_are_one_to_one_and_a_split_character_stays_split(autojump_clock: Any) -> None:
    euro = "€".encode()
    sent = [
        Frame(opcode=Opcode.TEXT, fin=False, data=euro[:1]),
        Frame(opcode=Opcode.CONTINUATION, fin=False, data=b""),
        Frame(opcode=Opcode.CONTINUATION, fin=True, data=euro[1:]),
        Frame(opcode=Opcode.BINARY, fin=True, data=b"\0"),
        Frame(opcode=Opcode.TEXT, fin=True, data=b""),
    ]
    async with serving(Probe(echo).spec("websocket")) as house:
        call = await house.call("websocket")
        await call.line.send(*sent)
        heard = [await call.line.event(1) for _ in sent]
        assert [(f.opcode, f.fin, bytes(f.data)) for f in heard] == [(f.opcode, f.fin, bytes(f.data)) for f in sent]
        await call.leave(Leave.STREAM)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ModelError("too loud", code="Loud", status=400), "1011"), (RuntimeError("x"), "1011"), (None, "1000")],
)
async def test_a_websockets_close_says_how_it_ended(error: Exception | None, code: str, autojump_clock: Any) -> None:
    async def model(probe: Probe, session: Session[Any, Any]) -> None:
        if error is not None:
            raise error

    async with serving(replace(Probe(model).spec("websocket"))) as house:
        _, over = await (await house.call("websocket")).rest()
        assert over.code == code


async def test_an_upgrade_that_breaks_the_handshake_is_refused_with_a_reason(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("websocket")) as house:
        line = house.line("http1")
        headers = [(b"sec-websocket-key", b"short"), (b"sec-websocket-version", b"13")]
        await line.send(raw(1, b"GET", "/anything", headers=headers, upgrade=b"websocket"))
        assert (await line.peer.read_answer(1))[0] == 400
        with pytest.raises(TransportLost):
            await client.websocket(house.line("http1").transport, "/models/none/invocations-bidirectional-stream")


# -- failures that a model cannot hide, and waits that end -------------------------------------------------------------


@pytest.mark.parametrize("wire", ["bidi", "bidi-json", "bidi-literal"])
async def test_a_model_that_swallows_a_broken_input_does_not_make_it_whole(wire: str, autojump_clock: Any) -> None:
    async def sloppy(probe: Probe, session: Session[Any, Any]) -> None:
        try:
            async for _ in session:
                await probe.say(session)
        except Exception:
            await probe.say(session)

    async with serving(Probe(sloppy).spec(wire)) as house:
        call = await house.call(wire)
        assert isinstance(call, EventsCall)
        await call.say()
        assert await call.next() == 0
        await call.line.send(Data(stream=1, buffers=(b"\xff" * 40,)))
        _, over = await call.rest()
        assert (over.how, over.code) == ("error", "InternalStreamFailure")
        assert house.endings == {"refused": 1}


async def test_a_session_that_waits_for_a_slot_is_answered_in_the_end(autojump_clock: Any) -> None:
    config = Config(bidi=BidiConfig(session_timeout=5))
    spec = replace(Probe(silent).spec("bidi"), capacity=1, timeout=100.0)
    async with serving(spec, config=config) as house:
        first = await house.call("bidi")
        await house.still()
        began = trio.current_time()
        status, _, body = await house.ask(PATH, b"", ("content-type", GA), line=house.line("http2"))
        assert (status, trio.current_time() - began) == (503, 5)
        assert "bidi.session_timeout" in json.loads(body)["Message"]
        await first.leave(Leave.RESET)
        await house.still()


NUMBER = np.frombuffer(b"00000042", np.uint8)
ARRAYS = [NUMBER.view(np.int64)[0], np.asfortranarray(NUMBER.view(np.int16).reshape(2, 2)), np.repeat(NUMBER, 2)[::2]]


@pytest.mark.parametrize("array", ARRAYS, ids=["0-d", "columns", "strided"])
@pytest.mark.parametrize("wire", DUPLEX)
async def test_a_part_is_its_bytes_whatever_array_they_are_in(wire: str, array: Any, autojump_clock: Any) -> None:
    async def arrays(probe: Probe, session: Session[Any, Any]) -> None:
        await session.receive()
        await session.send(Part(data=memoryview(np.asarray(array))))

    async with serving(Probe(arrays).spec(wire), wire=wire) as house:
        call = await house.call(wire)
        assert isinstance(call, DuplexCall)
        await call.say()
        assert await call.next() == 42


@pytest.mark.parametrize("name", ["x-amzn-sagemaker-target-variant", "content-type", "x-amzn-sagemaker-model-query-string"])
async def test_a_header_that_is_there_twice_is_refused(name: str, autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi")) as house:
        line = await opened(house, ("content-type", GA), (name, "a=b"), (name, "a=c"), body=b"")
        status, headers, body = await answer(line)
        assert (status, headers["x-amzn-errortype"]) == (400, "InputValidationError")
        assert f"{name} is there twice" in json.loads(body)["Message"]


@pytest.mark.parametrize("wrong", [(5, "c", 424), ("m", 5, 424), ("m", "c", "424"), (None, "c", 424)])
def test_a_models_error_is_made_of_the_right_things(wrong: Any) -> None:
    message, code, status = wrong
    with pytest.raises(TypeError, match="ModelError takes"):
        ModelError(message, code=code, status=status)


def test_a_variant_that_no_header_can_carry_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"sagemaker\.variant"):
        Gateway(Config(sagemaker=SageMakerConfig(variant="a\r\nb")))


async def test_large_steps_of_ours_do_not_wait_for_threads_that_models_hold() -> None:
    limiter = trio.to_thread.current_default_thread_limiter()
    async with serving(Probe(echo).spec("bidi")) as house:
        for held in range(int(limiter.total_tokens)):
            limiter.acquire_on_behalf_of_nowait(held)
        try:
            large = b"".join(bidi.encode_request_part(bytes(3 * 1024 * 1024), date_ms=0))
            with trio.fail_after(60):
                status, _, body = await house.ask(PATH, large, ("content-type", GA), line=house.line("http2"))
            assert (status, len(body) > 3 * 1024 * 1024) == (200, True)
        finally:
            for held in range(int(limiter.total_tokens)):
                limiter.release_on_behalf_of(held)
