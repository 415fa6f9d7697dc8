"""A stream that is silent: a comment now and then keeps it alive on its way, and is nothing that a client takes for an event."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway import client
from gateway.config import Config, LimitsConfig, SSEConfig
from gateway.operator.views import view_of_stream
from gateway.telemetry.account import account_so_far
from models.adapt import spec_of
from models.messages import Family, Prompt, Token
from models.session import Session
from models.spec import ModelSpec
from protocols.events import ConnectionEnd, Data, End, Reset, Response
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.roles import Role
from protocols.sse import SSEDecoder
from tests.gateway.dialects.test_event_streams import said
from tests.gateway.dialects.text.test_lmi_forms import KINDS, lmi, text_spec
from tests.gateway.promises import House, Line, serving
from tests.gateway.ways import DRIVERS
from tests.gateway.wires.test_asgi import NO_PORT, Server, served

SILENCE = SSEConfig().silence
LATE = SILENCE / 10
COMMENT = b":\n"

_CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
_TEXT = {"inputs": "x", "stream": True}
_SSE, _TGI = {"output_formatter": "sse"}, {"output_formatter": "sse", "tgi_compat": True}

WIRES: Mapping[str, tuple[str, Any, Mapping[str, Any]]] = {
    # name: (path, request, settings of the section `lmi`)
    "chat": ("/v1/chat/completions", _CHAT, {}),
    "completions": ("/v1/completions", {"model": "m", "prompt": "x", "stream": True}, {}),
    "LMI": ("/predictions/m", _TEXT, _SSE),
    "LMI at /invocations": ("/invocations", _TEXT, _SSE),
    "chat at /invocations": ("/invocations", _CHAT, {}),
    "TGI": ("/invocations", _TEXT, _TGI),
    "multi-model": ("/models/m/invoke", _TEXT, _SSE),
    "InvokeEndpoint": ("/endpoints/m/invocations", _TEXT, _SSE),
    "TGI by InvokeEndpoint": ("/endpoints/m/invocations", _TEXT, _TGI),
    "chat by InvokeEndpoint": ("/endpoints/m/invocations", _CHAT, {}),
    "generate_stream": ("/v2/models/m/generate_stream", {"text_input": "x"}, {}),
    "generate_stream of tensors": ("/v2/models/t/generate_stream", {"x": [1]}, {}),
}
FORMS = ("chat", "completions", "LMI", "TGI", "InvokeEndpoint", "generate_stream")
"""One of each form."""
OTHERS: Mapping[str, tuple[str, Any, Mapping[str, Any]]] = {
    "JSON lines": ("/predictions/m", _TEXT, {}),
    "chat in JSON lines": ("/invocations", _CHAT, {"output_formatter": "jsonlines_chat"}),
    "lines of a dynamic batch": (
        "/invocations",
        {"inputs": ["x", "y"]},
        {"rolling_batch": "disable", "enable_streaming": True},
    ),
    "JSON": ("/predictions/m", {"inputs": "x"}, {}),
    "a chat's document": ("/v1/chat/completions", {**_CHAT, "stream": False}, {}),
    "response stream": ("/endpoints/m/invocations-response-stream", _TEXT, _SSE),
    "response stream of a chat": ("/endpoints/m/invocations-response-stream", _CHAT, {}),
    "generate": ("/v2/models/m/generate", {"text_input": "x"}, {}),
    "infer": ("/v2/models/t/infer", {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [1]}]}, {}),
}


@dataclass
class Heard:
    """An answer as its client has it, each piece of the body with the time at which it came."""

    head: Response | None = None
    head_at: float = -1.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    over: Any = None

    @property
    def status(self) -> int:
        return 0 if self.head is None else self.head.status

    @property
    def fields(self) -> dict[bytes, bytes]:
        return {} if self.head is None else dict(self.head.headers)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def comments(self) -> list[float]:
        return [at for at, piece in self.pieces if piece == COMMENT]

    @property
    def events(self) -> list[Any]:
        decoder = SSEDecoder()
        decoder.receive_data(self.body)
        found: list[Any] = []
        while hasattr(event := decoder.next_event(), "data"):
            found.append(event)
        assert not decoder.begun
        return [event.data if event.data == b"[DONE]" else json.loads(event.data) for event in found]

    async def listen(self, line: Line, stream: int) -> None:
        """Reads to the end, crediting as it goes."""
        while self.over is None:
            match await line.event(stream):
                case Response() as head:
                    self.head, self.head_at = head, trio.current_time()
                case Data() as data:
                    line.peer.credit(data)
                    self.pieces.append((trio.current_time(), b"".join(map(bytes, data.buffers))))
                case (End() | Reset() | ConnectionEnd()) as over:
                    self.over = over


async def asked(house: House, path: str, request: Any, *, line: Line | str = "http1", headers: Any = ()) -> tuple[Line, int]:
    """The connection and the stream of a request that is written."""
    line = house.line(line) if isinstance(line, str) else line
    stream = line.next_stream()
    fields = [(b"content-type", b"application/json"), *headers]
    await line.send(*client.post(stream, path, json.dumps(request).encode(), fields))
    return line, stream


@asynccontextmanager
async def hearing(house: House, path: str, request: Any, **options: Any) -> AsyncIterator[Heard]:
    """A client that listens; at the end of the block its answer is over."""
    heard = Heard()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heard.listen, *await asked(house, path, request, **options))
        yield heard


def models(*pauses: float, **options: Any) -> tuple[ModelSpec, ModelSpec]:
    """A text model and a tensor model that pause before each of their messages."""

    async def speaks(session: Session[Prompt, Any]) -> None:
        await session.receive()
        for number, pause in enumerate(pauses):
            await trio.sleep(pause)
            await session.send(Token(text=f"w{number} ", id=number, log_prob=-0.5))

    async def counts(x: npt.NDArray[np.int64]) -> AsyncIterator[npt.NDArray[np.int64]]:
        for pause in pauses:
            await trio.sleep(pause)
            yield x

    return text_spec(speaks, chat_template=said, **options), spec_of(counts, "t", family=Family.TENSOR, **options)


def configured(settings: Mapping[str, Any], **sections: Any) -> Config:
    return replace(lmi(**settings), **sections)


def are_due(times: Sequence[float], silence: float, *last_bytes: float) -> None:
    """Checks that each comment came `silence` after the last byte before it, and at most a tenth later."""
    assert len(times) == len(last_bytes), times
    for at, before in zip(times, last_bytes, strict=True):
        assert silence <= at - before <= silence * 1.1


# -- a client's view -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", WIRES)
async def test_a_model_that_thinks_before_and_between_its_tokens_is_heard_of(
    wire: str, kind: str, driver: str, autojump_clock: Any
) -> None:
    path, request, settings = WIRES[wire]
    async with serving(*models(40, 1, 20, 1), config=configured(settings), driver=driver) as house:
        began = trio.current_time()
        async with hearing(house, path, request, line=kind) as heard:
            pass
        first, second, third = heard.comments
        are_due([first, second, third], SILENCE, began, first, began + 41)
        assert (heard.status, heard.head_at) == (200, first)
        assert heard.fields[b"content-type"] == b"text/event-stream; charset=utf-8"
        if not path.startswith("/endpoints"):
            assert heard.fields[b"x-accel-buffering"] == b"no"
        assert isinstance(heard.over, End)
        assert house.endings == {"complete": 1}
    async with serving(*models(0, 0, 0, 0), config=configured(settings), driver=driver) as house:
        async with hearing(house, path, request, line=kind) as at_once:
            pass
        assert at_once.comments == []
    # between two events, and never with a blank line of its own
    for piece in (heard.body, at_once.body):
        assert b":\n\n" not in piece
    for (_, before), (_, piece) in zip(heard.pieces, heard.pieces[1:], strict=False):
        assert piece != COMMENT or before == COMMENT or before.endswith(b"\n\n")
    assert [ids_aside(event) for event in heard.events] == [ids_aside(event) for event in at_once.events]
    assert len(heard.events) >= 4


def ids_aside(event: Any) -> Any:
    return {k: v for k, v in event.items() if k not in ("id", "created")} if isinstance(event, dict) else event


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", OTHERS)
async def test_what_is_no_stream_of_events_is_as_silent_as_it_was(wire: str, kind: str, autojump_clock: Any) -> None:
    path, request, settings = OTHERS[wire]
    async with serving(*models(100), config=configured(settings)) as house:
        began = trio.current_time()
        async with hearing(house, path, request, line=kind) as heard:
            await trio.sleep(99)
            assert (heard.status, heard.pieces) == (0, [])
        assert (heard.status, heard.head_at, heard.comments) == (200, began + 100, [])


@pytest.mark.parametrize("seconds", [0, 1, 4, 50])
async def test_the_silence_is_a_setting(seconds: float, autojump_clock: Any) -> None:
    path, request, settings = WIRES["LMI"]
    async with serving(*models(60), config=configured(settings, sse=SSEConfig(silence=seconds))) as house:
        began = trio.current_time()
        async with hearing(house, path, request) as heard:
            pass
    times = heard.comments
    assert len(times) == (0 if not seconds else 1 if seconds == 50 else pytest.approx(60 / seconds, rel=0.1))
    are_due(times, seconds, *([began, *times][: len(times)]))


async def test_a_stream_whose_client_would_take_it_compressed_is_sent_as_it_is(autojump_clock: Any) -> None:
    for wire in FORMS:
        path, request, settings = WIRES[wire]
        async with serving(*models(20), config=configured(settings)) as house:
            async with hearing(house, path, request, headers=[(b"accept-encoding", b"gzip, deflate")]) as heard:
                pass
            assert b"content-encoding" not in heard.fields
            assert len(heard.comments) == 1
            assert heard.events


# -- the slot, and errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", FORMS)
async def test_nothing_leaves_while_a_call_waits_for_a_slot(wire: str, autojump_clock: Any) -> None:
    path, request, settings = WIRES[wire]
    async with serving(*models(50, capacity=1, queue_timeout=60), config=configured(settings)) as house:
        async with hearing(house, path, request) as first:
            await house.still()
            began = trio.current_time()
            async with hearing(house, path, request) as second:
                await house.still()
                async with hearing(house, path, request) as third:
                    await trio.sleep(49)
                    assert (first.status, second.status, third.status) == (200, 0, 0)
        assert second.comments[0] - began == pytest.approx(50 + SILENCE, abs=LATE)  # from when it had its slot
        assert third.status in (424, 429, 503)
        assert third.head_at == began + 60
        assert COMMENT not in third.body


def failing(after: float) -> ModelSpec:
    async def fails(session: Session[Prompt, Any]) -> None:
        await session.receive()
        await trio.sleep(after)
        raise RuntimeError("no weights")

    return text_spec(fails, chat_template=said)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", FORMS)
async def test_what_fails_before_the_first_comment_has_a_status_and_what_fails_after_it_is_an_event(
    wire: str, kind: str, autojump_clock: Any
) -> None:
    path, request, settings = WIRES[wire]
    async with serving(failing(14.9), config=configured(settings)) as house:
        async with hearing(house, path, request, line=kind) as heard:
            pass
        assert heard.status in (424, 500)
        assert heard.comments == []
        assert house.endings == {"model-error": 1}
    async with serving(failing(20), config=configured(settings)) as house:
        async with hearing(house, path, request, line=kind) as heard:
            pass
        assert (heard.status, len(heard.comments)) == (200, 1)
        (event,) = heard.events  # and no [DONE]
        assert "incident" in json.dumps(event)
        assert isinstance(heard.over, End)
        assert house.endings == {"model-error": 1}


async def test_what_ends_in_the_moment_in_which_a_comment_is_due_has_its_status(autojump_clock: Any) -> None:
    path, request, settings = WIRES["chat"]
    async with serving(*models(100, timeout=SILENCE), config=configured(settings)) as house:
        async with hearing(house, path, request) as heard:
            pass
        assert (heard.status, heard.comments) == (504, [])


async def test_a_head_that_cannot_be_sent_is_the_error_of_its_model(autojump_clock: Any) -> None:
    async def replies(session: Session[Prompt, Any]) -> None:
        await session.receive()
        session.reply["x-amzn-sagemaker-custom-attributes"] = "x" * 1025
        await trio.sleep(100)

    path, request, settings = WIRES["InvokeEndpoint"]
    async with serving(text_spec(replies), config=configured(settings)) as house:
        async with hearing(house, path, request) as heard:
            pass
        assert (heard.status, heard.comments) == (424, [])
        assert b"custom-attributes" in heard.body.lower()
        assert heard.head_at < 20
        assert house.endings == {"model-error": 1}


async def test_a_model_must_still_report_its_prompt_after_a_comment(autojump_clock: Any) -> None:
    path, request, settings = WIRES["LMI"]
    details = {"parameters": {"details": True, "decoder_input_details": True}}
    async with serving(*models(20, 0), config=configured(settings)) as house:
        async with hearing(house, path, {**request, **details}) as heard:
            pass
        (event,) = heard.events
        assert "has not reported the tokens of its prompt" in event["token"]["error_msg"]


@pytest.mark.parametrize("counts", [True, False])
async def test_the_head_of_a_comment_knows_whether_the_prompt_will_be_counted(counts: bool, mock_clock: MockClock) -> None:
    more: dict[str, Any] = {"count_tokens": lambda text: 7} if counts else {}
    path, request, settings = WIRES["chat"]
    async with serving(models(20)[0], text_spec(silent_once, "n", **more), config=configured(settings)) as house:
        asks = {**request, "model": "n", "stream_options": {"include_usage": True}}
        async with hearing(house, path, asks) as heard:
            for seconds in (SILENCE, 5):
                await house.still()
                mock_clock.jump(seconds)
        assert len(heard.comments) == 1
        assert (heard.fields.get(b"x-everywire-usage") is None) == counts
        assert heard.events[-2]["usage"]["prompt_tokens"] == 7 * counts


async def silent_once(session: Session[Prompt, Any]) -> None:
    await session.receive()
    await trio.sleep(20)
    await session.send(Token(text="x", id=1))


# -- credit ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", FORMS)
async def test_a_client_that_reads_nothing_gets_no_comment_and_one_that_reads_again_gets_them(
    wire: str, kind: str, driver: str, autojump_clock: Any
) -> None:
    sent: list[int] = []

    async def floods(session: Session[Prompt, Any]) -> None:
        await session.receive()
        while trio.current_time() < began + 100:  # it stands in `send` till then
            await session.send(Token(text="x" * 1000, id=1))
            sent.append(1)
        await trio.sleep(40)

    path, request, settings = WIRES[wire]
    most = {"max_tokens": 1000} if "model" in request else {"parameters": {"max_new_tokens": 1000}}
    request = {**request, **most}
    config = configured(settings, limits=LimitsConfig(write_stall=0))
    async with serving(text_spec(floods, chat_template=said), config=config, capacity=4096, driver=driver) as house:
        began = trio.current_time()
        line, stream = await asked(house, path, request, line=kind)
        await wait_all_tasks_blocked()
        made, held = len(sent), house.gateway.counts().bytes_reserved
        await trio.sleep(100)
        assert (len(sent), house.gateway.counts().bytes_reserved) == (made, held)
        heard = Heard()
        await heard.listen(line, stream)
        assert all(at >= began + 100 + SILENCE for at in heard.comments)
        assert len(heard.comments) == 2
        assert heard.body.count(COMMENT) == 2
        assert heard.events


async def test_while_a_window_is_closed_nothing_leaves_or_waits(autojump_clock: Any) -> None:
    path, request, settings = WIRES["generate_stream"]
    async with serving(*models(0), config=configured(settings)) as house:
        async with hearing(house, path, request, line="http2") as heard:
            pass
        window = len(heard.body)
    async with serving(*models(0, 60), config=configured(settings)) as house:
        line = house.line("http2")
        line.peer.machine = line.machine = HTTP2Connection(Role.CLIENT, HTTP2Limits(initial_window=window))
        line, stream = await asked(house, path, request, line=line)
        data = await line.data(stream)
        assert len(data.buffers[0]) == window
        await trio.sleep(40)
        (connection,) = house.gateway.server.connections
        assert connection.wire.held()[1] == 0  # type: ignore[attr-defined]
        await line.read()
        began = trio.current_time()
        line.peer.credit(data)
        await line.peer.flush()
        heard = Heard()
        await heard.listen(line, stream)
        assert heard.pieces[0][1] == COMMENT  # it is due, so it comes with the next look
        assert heard.pieces[0][0] - began <= LATE / 2
        assert isinstance(heard.over, End)


async def test_bytes_that_the_kernel_still_holds_are_not_sent(autojump_clock: Any) -> None:
    path, request, settings = WIRES["chat"]
    async with serving(*models(0, 60), config=configured(settings)) as house:
        held = 100
        async with hearing(house, path, request) as heard:
            await house.still()
            (connection,) = house.gateway.server.connections
            connection.transport.unsent = lambda: (held, 4096)  # type: ignore[attr-defined]
            await trio.sleep(40)
            assert heard.comments == []
            held = 0
            await trio.sleep(LATE / 2)
            assert len(heard.comments) == 1


async def test_comments_are_nothing_that_is_counted(autojump_clock: Any) -> None:
    path, request, settings = WIRES["chat"]
    async with serving(*models(100, 20), config=configured(settings)) as house:
        async with hearing(house, path, request) as heard:
            await trio.sleep(90)
            assert len(heard.comments) == 5
            (exchange,) = house.gateway.observer.live
            now = trio.current_time()
            shown = view_of_stream(exchange, now, "model")
            assert (shown.bytes_out, shown.items_out, shown.idle, shown.waited) == (0, 0, 90.0, 90.0)
            assert account_so_far(exchange, now).first is None
            await trio.sleep(11)
            assert account_so_far(exchange, trio.current_time()).first == 100.0
        assert exchange.outbound.bytes_out == len(heard.body) - len(heard.comments) * len(COMMENT)


async def test_behind_an_asgi_server_it_is_the_same(autojump_clock: Any) -> None:
    path, request, _ = WIRES["chat"]
    config = Config(listen=NO_PORT, limits=LimitsConfig(write_stall=0))
    async with served(*models(40, 0), config=config) as (app, calls):
        server = Server(app, path=path)
        server.body(json.dumps(request).encode())
        calls.start_soon(server.run)
        await trio.sleep(SILENCE + LATE)
        head, comment = server.told
        assert (head["type"], head["status"]) == ("http.response.start", 200)
        assert (comment["body"], comment["more_body"]) == (COMMENT, True)
        server.takes = trio.Event()  # the server takes one more message, and does not come back
        await trio.sleep(60)
        server.takes.set()
        await server.over.wait()
        _, body = server.answer
        assert body.startswith(COMMENT + COMMENT + b"data: ")
        assert body.count(COMMENT) == 2


# -- many ------------------------------------------------------------------------------------------------------------------


async def test_one_task_looks_over_all_streams_and_each_gets_its_comments_in_time(autojump_clock: Any) -> None:
    path, request, settings = WIRES["LMI"]
    living = {}
    for seconds in (0, SILENCE):
        config = configured(settings, sse=SSEConfig(silence=seconds))
        async with serving(*models(70, capacity=100), config=config) as house:
            heards: list[tuple[float, Heard]] = []
            async with trio.open_nursery() as nursery:
                for number in range(60):
                    line, stream = await asked(house, path, request)
                    heards.append((trio.current_time(), Heard()))
                    nursery.start_soon(heards[-1][1].listen, line, stream)
                    await trio.sleep(0.37 + number % 7 / 100)
                living[seconds] = trio.lowlevel.current_statistics().tasks_living
            assert house.endings == {"complete": 60}
        for began, heard in heards:
            times = heard.comments
            are_due(times, seconds, *([began, *times][: len(times)]))
            assert len(times) == (4 if seconds else 0)
    assert living[0] == living[SILENCE]
