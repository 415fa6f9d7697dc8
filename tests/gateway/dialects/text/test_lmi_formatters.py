"""Models with formatters of their own, through the whole gateway: their input, their output and their errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.config import Config, RepositoryConfig, SageMakerConfig
from gateway.instances.messages import MESSAGES_AHEAD
from gateway.testing import in_memory_processes
from models.errors import ModelError
from models.formatters import Input, TextGenerationOutput, TextInput
from models.messages import Finish, FinishReason, Prompt, Token
from models.session import Session
from models.spec import ModelSpec
from protocols.aws import bidi
from tests.gateway.dialects.text.test_lmi_forms import (
    AT_EACH_ROUTE,
    KINDS,
    LMI_HEADERS,
    ROUTES,
    STREAM,
    ask,
    lmi,
    parts_of,
    text_spec,
)
from tests.gateway.promises import CANCELLED, DATE, House, KiB, at_once
from tests.gateway.promises import serving as serving_here

SECRET = "the author's own business"
LINES = "<Deep \n Léarning\n >\n"
"""The output of `marks` for the two words and the end of the sequence."""


_in_processes = False


@pytest.fixture(autouse=True, params=["here", "there"])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each story is told of models here and in processes."""
    global _in_processes
    _in_processes = request.param == "there"
    yield request.param
    _in_processes = False


def serving(*specs: ModelSpec, **options: Any) -> AbstractAsyncContextManager[House]:
    """A gateway with these models, in processes where the test is about those."""
    return serving_here(*map(placed, specs), **options)


def placed(spec: ModelSpec) -> ModelSpec:
    return in_memory_processes(spec, instances=2)[0] if _in_processes else spec


async def thread_back(house: House) -> None:
    """Waits until the thread of a formatter has returned, and whoever has waited for it is gone."""
    for line in house.lines:
        line.peer.close()
    with trio.fail_after(100):
        while await house._busy_tasks() != house._tasks:  # noqa: ASYNC110
            await trio.sleep(0.01)


def marks(output: TextGenerationOutput) -> str:
    """Each token on a line, the first after "<", the last before ">"."""
    token, first, last = output.sequences[output.best_sequence_index].get_next_token()
    return f"{'<' if first else ' '}{token.text}{'>' if last else ''}\n"


class Spoken(TextInput):
    """A request with attributes of its author's."""

    def __init__(self, text: str, voice: str, **options: Any) -> None:
        super().__init__(text, **options)
        self.voice = voice

    def __len__(self) -> int:
        return 0  # however little it may seem to be


def reads(item: Input, **keywords: Any) -> TextInput:
    """Requests of the form VOICE:TEXT."""
    voice, _, text = item.as_text().partition(":")
    return Spoken(text, voice, parameters={"max_new_tokens": 2})


def voiced(output: TextGenerationOutput) -> str:
    assert isinstance(output.input, Spoken)
    return f"{output.input.voice}/{marks(output)}"


# -- golden bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "route"), AT_EACH_ROUTE)
async def test_an_output_formatter_writes_each_token(kind: str, route: str, autojump_clock: Any) -> None:
    for stream in (False, True):
        async with serving(text_spec(output_formatter=marks)) as house:
            status, headers, body = await ask(house, route, {"inputs": "How", "stream": stream}, kind=kind)
            assert (status, body.decode()) == (200, LINES)
            if not route.startswith("/endpoints/"):
                assert {name: headers.get(name) for name in LMI_HEADERS} == LMI_HEADERS
                assert "content-type" not in headers  # LMI sets none: spec section 1.2
            assert house.endings == {"complete": 1}


@pytest.mark.parametrize("kind", KINDS)
async def test_over_the_platforms_stream_each_text_is_a_part(kind: str, autojump_clock: Any) -> None:
    async with serving(text_spec(output_formatter=marks)) as house:
        status, _, body = await ask(house, STREAM, {"inputs": "How"}, kind=kind)
        assert (status, [part.decode() for part in parts_of(body)]) == (200, LINES.splitlines(keepends=True))


async def test_byte_by_byte_over_http1(autojump_clock: Any) -> None:
    async with serving(text_spec(output_formatter=marks)) as house:
        line = house.line("http1")
        await ask(house, "/predictions/m", {"inputs": "How", "parameters": {"max_new_tokens": 1}}, line=line)
        assert bytes(line.transport.read) == (
            b"HTTP/1.1 200 OK\r\ncache-control: no-cache; no-store, must-revalidate, private\r\npragma: no-cache\r\n"
            b"expires: Thu, 01 Jan 1970 00:00:00 UTC\r\nx-accel-buffering: no\r\nx-request-id: boot1\r\n"
            + DATE
            + b"transfer-encoding: chunked\r\n\r\n"
            b"8\r\n<Deep >\n\r\n0\r\n\r\n"
        )


@pytest.mark.parametrize("route", [*ROUTES, STREAM])
async def test_an_input_formatter_reads_the_body_whatever_it_is(route: str) -> None:
    async with serving(text_spec(input_formatter=reads, output_formatter=voiced)) as house:
        status, _, body = await ask(house, route, b"alto:How", ("content-type", "audio/x-words"))
        body = b"".join(parts_of(body)) if route is STREAM else body
        assert (status, body.decode()) == (200, "alto/<Deep \nalto/ Léarning>\n")
        assert house.endings == {"complete": 1}


# -- input of formatters -----------------------------------------------------------------------------------------------


async def test_an_input_formatter_sees_the_request_and_how_the_model_is_served() -> None:
    seen: list[Any] = []

    def formatter(item: Input, **keywords: Any) -> TextInput:
        seen.append((item.as_json(), item.get_property("X-Color"), item.get_property("none"), keywords))
        return TextInput("x", {"max_new_tokens": 1}, stream=False)

    spec = text_spec(input_formatter=formatter, options={"voice": "alto"})
    async with serving(spec) as house:
        _, headers, body = await ask(house, "/predictions/m", {"messages": []}, ("x-color", "red"))
        assert (headers["content-type"], body) == ("application/json", b'{"generated_text": "Deep "}')
        assert seen == [({"messages": []}, "red", None, {"model_name": "m", "configs": {"voice": "alto"}})]


@pytest.mark.parametrize(
    ("made", "content_type"),
    [
        (TextInput("x"), "application/jsonlines"),
        (TextInput("x", stream=False), "application/json"),
        (TextInput("x", output_formatter="sse"), "text/event-stream; charset=utf-8"),
        (TextInput("x", output_formatter="what?", stream=False), "application/json"),
        (TextInput("x", None, stream=False), "application/json"),
    ],
)
async def test_without_an_output_formatter_the_answer_has_a_form_of_the_schema(made: TextInput, content_type: str) -> None:
    async with serving(text_spec(input_formatter=lambda item, **_: made)) as house:
        status, headers, _ = await ask(house, "/predictions/m", b"")
        assert (status, headers["content-type"]) == (200, content_type)


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, "<Deep >\n"),
        ("what?", "<Deep >\n"),
        ("json", '{"generated_text": "Deep "}'),
        (lambda output: "mine", "mine"),
    ],
)
async def test_a_request_may_have_a_form_of_its_own(chosen: Any, expected: str) -> None:
    def formatter(item: Input, **_: Any) -> TextInput:
        return TextInput("x", {"max_new_tokens": 1}, output_formatter=chosen)

    async with serving(text_spec(input_formatter=formatter, output_formatter=marks)) as house:
        _, _, body = await ask(house, "/predictions/m", b"")
        assert body.decode() == expected


@dataclass
class Dictated(TextInput):
    """A request whose `__init__` is its own."""

    input_text: str = "x"
    voice: str = ""


async def test_a_request_may_be_a_dataclass_and_its_lists_tuples() -> None:
    def formatter(item: Input, **_: Any) -> TextInput:
        made = Dictated(voice=item.as_text())
        made.parameters = {"stop": ("é",), "stop_token_ids": ()}
        return made

    def writes(output: TextGenerationOutput) -> str:
        assert isinstance(output.input, Dictated)
        assert output.input.request_id
        return f"{output.input.voice} {marks(output)}"

    async with serving(text_spec(input_formatter=formatter, output_formatter=writes)) as house:
        _, _, body = await ask(house, "/predictions/m", b"deep")
        assert body.decode().startswith("deep <")


async def test_an_output_formatter_sees_the_request_and_all_tokens_up_to_now(autojump_clock: Any) -> None:
    seen: list[Any] = []

    def formatter(output: TextGenerationOutput) -> str:
        sequence, asked = output.sequences[0], output.input
        tokens = [token.id for token in sequence.tokens]
        seen.append((tokens, round(sequence.cumulative_log_prob, 2), sequence.finish_reason, output.finished))
        assert (output.request_id, asked.request_id, asked.input_text, asked.stream) == ("boot1", "boot1", "How", True)
        assert dict(asked.parameters) == {"decoder_input_details": True, "max_new_tokens": 2, "mine": [1]}
        assert [token.text for token in output.prompt_tokens_details] == ["Ho", "w"]
        assert sequence.has_next_token()
        assert sequence.get_next_token()[0].id == tokens[-1]
        assert not sequence.has_next_token()
        return "."

    async with serving(text_spec(output_formatter=formatter)) as house:
        parameters = {"decoder_input_details": True, "max_new_tokens": 2, "mine": [1]}
        _, _, body = await ask(house, "/predictions/m", {"inputs": "How", "stream": True, "parameters": parameters})
        assert body == b".."
        assert seen == [([304], -0.05, None, False), ([304, 11157], -1.3, "length", True)]


async def test_several_sequences_are_told_apart(autojump_clock: Any) -> None:
    def formatter(output: TextGenerationOutput) -> str:
        for number, sequence in output.sequences.items():
            if sequence.has_next_token():
                token, first, last = sequence.get_next_token()
                return f"{number}{token.id}{'<' * first}{'>' * last}{'!' * output.finished} "
        raise AssertionError("called for nothing")

    async with serving(text_spec(output_formatter=formatter)) as house:
        _, _, body = await ask(house, "/predictions/m", {"inputs": "How", "parameters": {"n": 2, "max_new_tokens": 2}})
        assert body == b"0304< 11304< 011157> 112157>! "


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("finish", "<a\n >\n stop_sequence"),
        ("return", "<a\n >\n eos_token"),
        ("last", "<a\n b>\n stop_sequence"),
        ("endless", "<a\n c\n c>\n length"),
        ("nothing", "<>\n eos_token"),
    ],
)
async def test_the_last_token_is_told_as_such_however_the_model_ends(says: str, expected: str, autojump_clock: Any) -> None:
    outputs: list[TextGenerationOutput] = []

    def formatter(output: TextGenerationOutput) -> str:
        outputs.append(output)
        return marks(output)

    async def model(session: Session[Prompt, Any]) -> None:
        await session.receive()
        if says == "nothing":
            return
        await session.send(Token(text="a"))
        if says == "finish":
            await session.send(Finish(reason=FinishReason.STOP_SEQUENCE))
        elif says == "last":
            await session.send(Token(text="b", finish=FinishReason.STOP_SEQUENCE))
        while says != "return":
            await session.send(Token(text="c"))

    async with serving(text_spec(model, output_formatter=formatter)) as house:
        status, _, body = await ask(house, "/predictions/m", {"inputs": "x", "parameters": {"max_new_tokens": 3}})
        assert (status, f"{body.decode()} {outputs[-1].sequences[0].finish_reason}") == (200, expected)
        assert house.endings == {"complete": 1}


async def test_a_model_that_knows_of_one_sequence_alone_is_stopped_at_its_last_token(autojump_clock: Any) -> None:
    async def endless(session: Session[Prompt, Any]) -> None:
        await session.receive()
        while True:
            await session.send(Token(text="a"))

    async with serving(text_spec(endless, output_formatter=marks)) as house:
        asked = {"inputs": "x", "parameters": {"n": 2, "max_new_tokens": 2}}
        _, _, body = await ask(house, "/predictions/m", asked)
        assert (body, house.endings) == (b"<a\n a>\n", {"complete": 1})


async def test_a_formatter_may_wait_with_its_text_and_a_model_says_what_it_is(autojump_clock: Any) -> None:
    def whole(output: TextGenerationOutput) -> str:
        return "".join(token.text for token in output.sequences[0].tokens) if output.finished else ""

    async def model(session: Session[Prompt, Any]) -> None:
        session.reply["content-type"] = "text/x-words"
        await session.receive()
        await session.send(Token(text="a\udcff"))
        await session.send(Token(text="b"))

    async with serving(text_spec(model, output_formatter=whole)) as house:
        _, headers, body = await ask(house, "/predictions/m", {"inputs": "x"})
        assert (headers["content-type"], body) == ("text/x-words", "a\ufffdb".encode())


async def test_a_text_far_longer_than_its_token_has_room_too(autojump_clock: Any) -> None:
    async with serving(text_spec(output_formatter=lambda output: "x" * 300_000), capacity=32 * KiB) as house:
        for kind in KINDS:
            _, _, body = await ask(house, "/predictions/m", {"inputs": "x"}, kind=kind)
            assert len(body) == 900_000


async def test_chats_and_other_wires_are_not_formatted(autojump_clock: Any) -> None:
    async with serving(text_spec(output_formatter=marks)) as house:
        _, _, body = await ask(house, "/invocations", {"messages": [{"role": "user", "content": "Hi"}]})
        assert json.loads(body)["choices"][0]["message"]["content"] == "Deep Léarning"
        _, _, body = await ask(house, "/v2/models/m/generate", {"text_input": "x"})
        assert json.loads(body)["text_output"] == "Deep Léarning"


# -- errors ------------------------------------------------------------------------------------------------------------


def raising(error: BaseException, after: int = 0) -> Callable[..., Any]:
    """A formatter that raises after `after` calls."""
    calls = iter(range(100))

    def formatter(*_: Any, **__: Any) -> Any:
        if next(calls) >= after:
            raise error
        return "."

    return formatter


ERRORS = [
    (ModelError("no such voice"), 424, "no such voice"),
    (ModelError("no such voice", code="Voice", status=422), 422, "no such voice"),
    (RuntimeError(SECRET), 424, "formatter failed; incident "),
    (SystemExit(3), 424, "formatter failed; incident "),
]


@pytest.mark.parametrize("which", ["input_formatter", "output_formatter"])
@pytest.mark.parametrize(("error", "status", "said"), ERRORS)
async def test_what_a_formatter_raises_is_an_answer_and_the_log_knows_the_rest(
    which: str, error: BaseException, status: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.worker")
    formatter: Any = {which: raising(error)}
    async with serving(text_spec(**formatter)) as house:
        for route in ROUTES[:3]:
            caplog.clear()
            got, headers, body = await ask(house, route, {"inputs": "x", "stream": True})
            document = json.loads(body)
            assert (got, headers["content-type"], document["code"]) == (status, "application/json", status)
            assert (said in document["error"], document["details"]["finish_reason"]) == (True, "error")
            assert SECRET.encode() not in body
            if isinstance(error, ModelError):
                (record,) = [record for record in caplog.records if record.message == "model failed"]
                assert vars(record)["reason"] == error.message
                continue
            (record,) = [record for record in caplog.records if record.message == f"{which.replace('_', ' ')} raised"]
            assert vars(record)["incident"] in document["error"]
            assert (vars(record)["model"], vars(record)["id"]) == ("m", "boot1")
            assert record.exc_info is not None
            if _in_processes:
                assert str(record.exc_info[1]) == f"{type(error).__name__}: {error}"
            else:
                assert record.exc_info[1] is error
        assert house.endings == {"model-error": 3}


@pytest.mark.parametrize("which", ["input_formatter", "output_formatter"])
async def test_the_platform_tells_it_as_its_models_error(which: str) -> None:
    formatter: Any = {which: raising(ModelError("no such voice", status=422))}
    async with serving(text_spec(**formatter)) as house:
        for route in (ROUTES[3], STREAM):
            status, headers, body = await ask(house, route, {"inputs": "x"})
            told = json.loads(body)
            assert (status, headers["x-amzn-errortype"]) == (424, "ModelError")
            assert (told["OriginalStatusCode"], told["OriginalMessage"]) == (422, "no such voice")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "the input formatter returned NoneType, not a TextInput"),
        ({"inputs": "x"}, "the input formatter returned dict, not a TextInput"),
        (TextInput(b"x"), "the input formatter gave an input_text of type bytes, not str"),  # type: ignore[arg-type]
        (TextInput("x", 3), "the input formatter gave parameters of type int, not a mapping"),  # type: ignore[arg-type]
        (
            TextInput("x", output_formatter=[]),  # type: ignore[arg-type]
            "the input formatter gave an output_formatter of type list, not str or a function",
        ),
    ],
)
async def test_what_an_input_formatter_must_return_is_told(made: Any, said: str) -> None:
    async with serving(text_spec(input_formatter=lambda item, **_: made)) as house:
        status, _, body = await ask(house, "/predictions/m", b"")
        assert (status, json.loads(body)["error"]) == (500, said)
        assert house.endings == {"model-error": 1}


async def test_what_an_output_formatter_must_return_is_told(autojump_clock: Any) -> None:
    async with serving(text_spec(output_formatter=lambda output: b"x")) as house:
        status, _, body = await ask(house, "/predictions/m", {"inputs": "x"})
        assert (status, json.loads(body)["error"]) == (500, "the output formatter returned bytes, not str")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (TextInput(""), "inputs: expected a non-empty string"),
        (TextInput("x", {"top_p": 7}), "parameters.top_p"),
        (TextInput("x", stream=3), "stream: expected true or false"),  # type: ignore[arg-type]
    ],
)
async def test_a_request_that_the_schema_does_not_have_is_refused_as_any_other(made: TextInput, said: str) -> None:
    for rolling_batch in ("auto", "disable"):
        async with serving(text_spec(input_formatter=lambda i, **_: made), config=lmi(rolling_batch=rolling_batch)) as house:
            status, _, body = await ask(house, "/predictions/m", b"")
            assert (status, json.loads(body)["code"], said in json.loads(body)["error"]) == (424, 424, True)
            assert house.endings == {"refused": 1}


@pytest.mark.parametrize(("body", "said"), [(b"\xff", "not UTF-8"), (b"{", "not JSON")])
async def test_a_body_that_a_formatter_cannot_read_is_424(body: bytes, said: str) -> None:
    def formatter(item: Input, **_: Any) -> TextInput:
        item.as_text()
        return TextInput(str(item.as_json()))

    async with serving(text_spec(input_formatter=formatter)) as house:
        status, _, answer = await ask(house, "/predictions/m", body)
        assert (status, said in json.loads(answer)["error"]) == (424, True)


@pytest.mark.parametrize(("error", "said"), [(error, said) for error, _, said in ERRORS])
@pytest.mark.parametrize(("kind", "route"), AT_EACH_ROUTE)
async def test_a_failure_in_mid_stream_has_a_line_of_its_own_and_a_whole_end(
    kind: str, route: str, error: BaseException, said: str, autojump_clock: Any
) -> None:
    async with serving(text_spec(output_formatter=raising(error, after=2))) as house:
        line = house.line(kind)
        status, _, body = await ask(house, route, {"inputs": "x"}, line=line)
        before, failure, after = body.split(b"\n")
        assert (status, before, after) == (200, b"..", b"")
        assert (json.loads(failure)["code"], said in json.loads(failure)["error"]) == (424, True)
        if kind == "http1":
            assert line.transport.read.endswith(b"\r\n0\r\n\r\n")
        assert house.endings == {"model-error": 1}


async def test_in_the_platforms_stream_a_failure_is_an_event(autojump_clock: Any) -> None:
    async with serving(text_spec(output_formatter=raising(ModelError("no such voice", code="Voice"), after=2))) as house:
        _, _, body = await ask(house, STREAM, {"inputs": "x"})
        decoder = bidi.ResponseDecoder()
        decoder.receive_data(body)
        events = [decoder.next_event() for _ in range(3)]
        assert [bytes(event.data) for event in events if isinstance(event, bidi.PayloadPart)] == [b".", b"."]
        assert isinstance(events[2], bidi.StreamFailure)
        assert (events[2].exception_type, events[2].message) == ("ModelStreamError", "no such voice")


async def test_a_formatter_that_fails_at_the_models_end_is_no_harm_to_others(autojump_clock: Any) -> None:
    async def one(session: Session[Prompt, Any]) -> None:
        await session.receive()
        await session.send(Token(text="a"))

    for error in (RuntimeError(SECRET), SystemExit(3)):
        async with serving(text_spec(one, output_formatter=raising(error, after=1))) as house:
            status, _, body = await ask(house, "/predictions/m", {"inputs": "x"})
            assert (status, body[:1], b"incident" in body) == (200, b".", True)
            assert (await ask(house, "/ping", b""))[0] == 405  # it still answers


async def test_what_a_formatter_may_look_back_at_is_bounded(autojump_clock: Any) -> None:
    async def endless(session: Session[Prompt, Any]) -> None:
        await session.receive()
        while True:
            await session.send(Token(text="a" * 100))

    spec = text_spec(endless, output_formatter=lambda output: "")
    async with serving(spec, config=lmi(max_text=10_000)) as house:
        asked = {"inputs": "x", "parameters": {"max_new_tokens": 65536}}
        status, _, body = await ask(house, "/predictions/m", asked)
        assert (status, "lmi.max_text" in json.loads(body)["error"]) == (424, True)


async def test_what_is_no_failure_of_the_model_is_told_as_of_any_other(autojump_clock: Any) -> None:
    async def hangs(session: Session[Prompt, Any]) -> None:
        await trio.sleep_forever()

    spec = text_spec(hangs, output_formatter=marks, capacity=1, queue=0)
    async with serving(spec) as house:
        line = house.line("http1")
        await line.send(*house.posted(line.next_stream(), "/predictions/m", b'{"inputs":"x"}'))
        await house.still()
        status, headers, body = await ask(house, "/predictions/m", {"inputs": "x"})
        assert (status, headers["retry-after"], list(json.loads(body))) == (503, "1", ["error", "code"])
        line.peer.close()


async def test_no_memory_may_be_tried_again_later(autojump_clock: Any) -> None:
    async def hungry(session: Session[Prompt, Any]) -> None:
        raise MemoryError

    async with serving(text_spec(hungry, output_formatter=marks), text_spec(hungry, "plain")) as house:
        for name in ("m", "plain"):
            status, headers, _ = await ask(house, f"/predictions/{name}", {"inputs": "x"})
            assert (status, headers["retry-after"]) == (507, "1")


# -- the client --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [*ROUTES, STREAM])
async def test_a_client_that_leaves_cancels_the_model(route: str, autojump_clock: Any) -> None:
    live = 0

    async def hangs(session: Session[Prompt, Any]) -> None:
        nonlocal live
        live += 1
        try:
            await session.receive()
            await session.send(Token(text="a"))
            await trio.sleep_forever()
        finally:
            live -= 1

    async with serving(text_spec(hangs, output_formatter=marks)) as house:
        line = house.line("http2")
        await line.send(*house.posted(line.next_stream(), route, b'{"inputs":"x"}'))
        await house.still()
        assert live == 1
        with at_once():
            line.peer.close()
            await house.still()
            assert (live, house.endings) == (0, CANCELLED)


async def test_a_formatter_has_the_time_of_a_session(autojump_clock: Any) -> None:
    let_go = threading.Event()

    def hangs(item: Input, **keywords: Any) -> TextInput:
        let_go.wait(60)
        return TextInput("late")

    async with serving(text_spec(input_formatter=hangs, timeout=3.0)) as house:
        try:
            status, _, body = await ask(house, "/predictions/m", b"x")
            assert (status, "models.m.timeout" in json.loads(body)["error"]) == (504, True)
            assert (trio.current_time(), house.endings) == (3.0, {"deadline": 1})
        finally:
            let_go.set()
        await thread_back(house)


async def test_a_formatter_that_hangs_holds_neither_its_client_nor_other_models() -> None:
    many = 20  # more than there are threads for codecs
    hanging, let_go = trio.Semaphore(0), threading.Event()

    def hangs(item: Input, **keywords: Any) -> TextInput:
        trio.from_thread.run_sync(hanging.release, trio_token=loop)
        let_go.wait(60)
        return TextInput("late")

    loop = trio.lowlevel.current_trio_token()
    spec = text_spec(input_formatter=hangs)
    async with serving(spec, text_spec(name="other", output_formatter=None)) as house:
        try:
            lines = [house.line("http1") for _ in range(many)]
            for line in lines:
                await line.send(*house.posted(line.next_stream(), "/predictions/m", b"x"))
            for _ in range(8):
                await hanging.acquire()
            long = {"inputs": "x" * 2**19, "parameters": {"max_new_tokens": 1}}  # which is read in a thread
            assert (await ask(house, "/predictions/other", long))[0] == 200
            for line in lines:
                line.peer.close()
            await house.still()
            assert house.endings == {"complete": 1, "cancelled-by-client": many}
        finally:
            let_go.set()
        await thread_back(house)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_does_not_read_stops_its_model_within_the_bound(kind: str, autojump_clock: Any) -> None:
    sent = 0

    async def counting(session: Session[Prompt, Any]) -> None:
        nonlocal sent
        await session.receive()
        while True:
            await session.send(Token(text="x"))
            sent += 1

    async with serving(text_spec(counting, output_formatter=lambda o: "x" * 1000), capacity=32 * KiB) as house:
        line = house.line(kind)
        asked = {"inputs": "x", "parameters": {"max_new_tokens": 65536}}
        await line.send(*house.posted(line.next_stream(), "/predictions/m", json.dumps(asked).encode()))
        await house.still()
        stopped = sent
        assert 60 <= stopped <= 110 + _in_processes * MESSAGES_AHEAD
        await trio.sleep(20)
        assert sent == stopped
        line.peer.close()


# -- while the model changes -------------------------------------------------------------------------------------------


async def test_a_request_that_is_read_while_its_model_is_reloaded_goes_to_the_new_one() -> None:
    reading, may_read, versions = trio.Event(), threading.Event(), iter("ab")

    def spec(version: str) -> ModelSpec:
        def formatter(item: Input, **_: Any) -> TextInput:
            if not reading.is_set():
                trio.from_thread.run_sync(reading.set, trio_token=loop)
                may_read.wait(60)
            return Spoken("x", version, parameters={"max_new_tokens": 1})

        return text_spec(input_formatter=formatter, output_formatter=voiced)

    loop = trio.lowlevel.current_trio_token()
    async with serving(spec(next(versions))) as house:
        answers = list[Any]()

        async def call() -> None:
            answers.append(await ask(house, "/predictions/m", b"x"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            await reading.wait()
            await house.gateway.reload("m", placed(spec(next(versions))), patience=0.0)
            may_read.set()
        assert [(status, body) for status, _, body in answers] == [(200, b"b/<Deep >\n")]
        await thread_back(house)


# -- a model folder ----------------------------------------------------------------------------------------------------

CODE = """
from models.errors import ModelError
from models.formatters import TextInput, input_formatter, output_formatter


class Spoken(TextInput):
    pass


@input_formatter
def reads(item, **keywords):
    asked = item.as_json()
    if "voice" not in asked:
        raise ModelError("voice: expected one", status=400)
    made = Spoken(asked["text"], {"max_new_tokens": 3, "seed": 1})
    made.voice = asked["voice"]
    return made


@output_formatter
def writes(output):
    token, first, last = output.sequences[0].get_next_token()
    return f"{output.input.voice} {token.id} {first} {last}\\n"
"""


@pytest.mark.parametrize("place", ["here"], indirect=True)
async def test_a_folder_of_a_library_model_and_formatters(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "lm"
    folder.mkdir()
    (folder / "model.toml").write_text('factory = "lm"\n')
    (folder / "model.py").write_text(CODE)
    root = str(tmp_path)
    config = Config(sagemaker=SageMakerConfig(multi_model=True), repository=RepositoryConfig(roots=(root,), code=(root,)))
    async with serving(config=config) as house:
        status, _, _ = await ask(house, "/models", {"model_name": "m", "url": str(folder)})
        assert status == 200
        for route in ("/models/m/invoke", "/predictions/m", "/endpoints/m/invocations"):
            status, _, body = await ask(house, route, {"text": "The", "voice": "alto"})
            lines = [line.split() for line in body.decode().splitlines()]
            assert (status, [(voice, *flags) for voice, _, *flags in lines]) == (
                200,
                [("alto", "True", "False"), ("alto", "False", "False"), ("alto", "False", "True")],
            )
        status, _, body = await ask(house, "/predictions/m", {"text": "The"})
        assert (status, json.loads(body)["error"]) == (400, "voice: expected one")
