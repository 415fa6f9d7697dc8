"""v2's generate and generate_stream: JSON objects with tensors by name, or with a text and its continuation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, final

import msgspec

from gateway.codecs.tensors import check_response, outputs_of
from gateway.codecs.threads import codec
from gateway.config import LimitsConfig
from gateway.core.exchange import Exchange
from gateway.core.route import Row
from gateway.core.whole_body import receive_body
from gateway.dialects.answers import JSON, reply_headers
from gateway.dialects.call import NO_PARAMETERS, session_of
from gateway.dialects.compression import compressed
from gateway.dialects.json_bodies import read_json
from gateway.dialects.text.requests import OnePrompt, tell_passed
from gateway.dialects.v2.channels import EVENTS, StreamChannel, StreamedResponses, UnaryCall
from gateway.dialects.v2.operations import rows_of
from gateway.dialects.v2.requests import V2Calls, error_of, schedule, slot_within, weight_of, writing
from gateway.dialects.v2.text import TextAsked, WholeText, size_of, taken, text_asked, with_room
from gateway.workers.slot import Slot
from gateway.workers.worker import Worker
from models.messages import Family, Finish, InferResponse, Prompt, Token, ToolCall, utf8
from models.session import Session
from protocols import v2
from protocols.events import Buffer
from protocols.v2 import generate
from protocols.v2.body import read_string


@final
class GenerateDialect:
    """Answers requests of Triton's generate extension: for tensor models by the names of their inputs, for text models, and
    models that convert to them, by `text_input`."""

    def __init__(self, calls: V2Calls) -> None:
        self._calls = calls

    def rows(self) -> list[Row]:
        """Its routes."""
        return rows_of({"generate": self.generate, "generate_stream": self.generate_stream})

    async def generate(self, exchange: Exchange, name: str, version: str = "") -> None:
        """POST /v2/models/{name}[/versions/{version}]/generate: exactly one response."""
        await self._answer(exchange, name, version, streams=False)

    async def generate_stream(self, exchange: Exchange, name: str, version: str = "") -> None:
        """POST /v2/models/{name}[/versions/{version}]/generate_stream: a server-sent event for each response, or for each
        token of a text. The first one decides the status."""
        await self._answer(exchange, name, version, streams=True)

    async def _answer(self, exchange: Exchange, name: str, version: str, *, streams: bool) -> None:
        calls = self._calls
        worker = calls.worker(exchange, name, version)
        tensors = worker.spec.family is Family.TENSOR
        if not tensors:
            calls.models.check_family(worker, Family.TEXT, "generate")
        worker.check_ready(exchange)
        body = await receive_body(exchange, min(calls.bounds.text, calls.body), setting="limits.text_json")
        arrived = perf_counter_ns()
        try:
            if tensors:
                read = partial(generate.read_generate, body, calls.codec_of(worker).signature, calls.bounds_of(worker))
                request = await calls.parsed(exchange, body, len(body), read, named=False)
                await self._tensors(exchange, worker, request, arrived, streams=streams)
            else:
                read_text = partial(_read_text, body, calls.bounds_of(worker), worker, calls.models.config.limits)
                asked = await read_json(exchange, body, calls.models.config.limits, read_text)
                await self._text(exchange, worker, await with_room(exchange, worker, asked), streams=streams)
        except v2.V2Error as e:
            raise error_of(e) from None

    async def _tensors(
        self, exchange: Exchange, worker: Worker, request: v2.V2Request, arrived: int, *, streams: bool
    ) -> None:
        within = schedule(exchange, request.parameters)
        if streams:
            channel = StreamChannel(exchange, worker, request, EVENTS, partial(_event, exchange, worker, request))
            slot = await slot_within(exchange, worker, within, request, arrived)
            await self._stream(exchange, worker, channel, slot, Family.TENSOR, request.parameters)
            return
        with await slot_within(exchange, worker, within, request, arrived):
            call = UnaryCall(exchange, worker, request)
            await worker.call(call, exchange, Family.TENSOR)
            if call.response is None:
                raise call.failure()
            text = await _rendered(exchange, worker, request, call.response, call.outputs)
        await self._respond(exchange, text)

    async def _text(self, exchange: Exchange, worker: Worker, asked: TextAsked, *, streams: bool) -> None:
        tell_passed(exchange, worker, asked.unknown)
        within, reply = schedule(exchange, asked.given), partial(_text_reply, worker, asked)
        if streams:
            channel = (_EventsAfterPrompt if asked.with_prompt else _TextEvents)(exchange, worker, asked.prompt, reply)
            slot = await slot_within(exchange, worker, within)
            await self._stream(exchange, worker, channel, slot, Family.TEXT, NO_PARAMETERS)
            return
        kept = WholeText(exchange, worker, asked.prompt)
        with await slot_within(exchange, worker, within):
            await worker.call(session_of(exchange, worker, kept), exchange, Family.TEXT)
        await self._respond(exchange, await _whole(exchange, asked.whole(kept.whole()), reply))

    async def _respond(self, exchange: Exchange, text: bytes) -> None:
        level = self._calls.models.config.v2.compression
        headers, buffers = await compressed(exchange, [JSON, *reply_headers(exchange)], [text], level)
        exchange.outbound.respond(200, headers, *buffers)

    async def _stream(
        self,
        exchange: Exchange,
        worker: Worker,
        channel: StreamChannel | _TextEvents,
        slot: Slot,
        family: Family,
        parameters: Mapping[str, Any],
    ) -> None:
        since = self._calls.streams.since
        with slot:
            since[channel] = exchange.owner.clock()  # `watched`, without the cost of a block
            try:
                await channel.call(session_of(exchange, worker, channel, parameters=parameters), family)
            finally:
                del since[channel]
        channel.finish()


async def _event(exchange: Exchange, worker: Worker, request: v2.V2Request, response: InferResponse) -> Sequence[Buffer]:
    check_response(response)
    try:
        outputs, _ = outputs_of(response)
        return EVENTS.wrap(await _rendered(exchange, worker, request, response, outputs), ())
    except v2.V2Error as e:
        raise error_of(e) from None


async def _rendered(
    exchange: Exchange, worker: Worker, request: v2.V2Request, response: InferResponse, outputs: list[v2.V2Tensor]
) -> bytes:
    spec, infer = worker.spec, worker.tensor_codec
    assert isinstance(infer, v2.InferCodec)  # it has read the request
    v2.check_outputs(outputs, infer.signature, request)
    parameters = dict(response.parameters)
    render = partial(generate.render_generate, spec.name, spec.version, outputs, request, response.id, parameters)
    with writing(exchange, outputs):
        return await codec(weight_of(outputs), render)


def _read_text(body: memoryview, limits: v2.V2Limits, worker: Worker, bounds: LimitsConfig) -> TextAsked:
    """Reads a request to a text model. Its parameters are Triton's or LMI's, in `parameters` or beside it. V2Error."""
    head = generate.read_object(body, limits)
    text, id = head.get("text_input"), read_string(head, "id")
    if type(text) is not str or not text:
        raise v2.V2Error("text_input must be a string that is not empty")
    given = {name: value for name, value, _ in generate.members_of(head) if name != "text_input"}
    return text_asked(text, given, id, worker, bounds, limits)


async def _whole(exchange: Exchange, text: bytes, reply: Callable[[str], bytes]) -> bytes:
    return await codec(len(text), partial(_decoded, reply, text), exchange.owner)


def _decoded(reply: Callable[[str], bytes], text: bytes) -> bytes:
    return reply(text.decode())


def _text_reply(worker: Worker, asked: TextAsked, text: str) -> bytes:
    """The JSON of a reply with this text."""
    spec = worker.spec
    reply = generate.GenerateReply(model_name=spec.name, model_version=spec.version, text_output=text, id=asked.id)
    return msgspec.json.encode(reply)


class _TextEvents(StreamedResponses):
    """The channel of one prompt: each token is an event."""

    def __init__(self, exchange: Exchange, worker: Worker, prompt: Prompt, reply: Callable[[str], bytes]) -> None:
        super().__init__(exchange, worker, EVENTS)
        self._prompt = OnePrompt(exchange, worker, prompt)
        self._reply_with, self.text = reply, self._prompt.text

    @property
    def complete(self) -> bool:
        return self.text.complete

    @property
    def exhausted(self) -> bool:
        return self._prompt.exhausted

    async def receive(self) -> Prompt:
        return await self._prompt.receive()

    async def send(self, message: Token | ToolCall | Finish, /) -> None:
        made, text = perf_counter_ns(), self.text
        if not text.passes(message):
            await text.drop()
            return
        outbound, size = self._outbound, size_of(text, message)
        if not outbound.try_room(size):
            await outbound.wait_room(size)
        said = taken(text, message)
        if said is not None:
            self.put(self._event_of(said), made)
        text.sent()

    def finish(self) -> None:
        for _, text in self.text.rests():
            self.put(self._event_of(text), perf_counter_ns())
        super().finish()

    def _event_of(self, text: str) -> Sequence[Buffer]:
        return EVENTS.wrap(self._reply_with(utf8(text).decode()), ())


@final
class _EventsAfterPrompt(_TextEvents):
    """The channel of one prompt whose first event is the prompt. It leaves with the first token, so that a model that fails
    before decides the status."""

    def __init__(self, exchange: Exchange, worker: Worker, prompt: Prompt, reply: Callable[[str], bytes]) -> None:
        super().__init__(exchange, worker, prompt, reply)
        self._lead = prompt.text

    async def send(self, message: Token | ToolCall | Finish, /) -> None:
        if self._lead and not (type(message) is Token and message.prefill):
            await self._say_prompt()
        await super().send(message)

    async def call(self, session: Session[Any, Any], family: Family) -> None:
        await super().call(session, family)
        if self._lead:
            await self._say_prompt()

    async def _say_prompt(self) -> None:
        made = perf_counter_ns()
        event = await codec(len(self._lead), partial(self._event_of, self._lead), self._exchange.owner)
        await self._outbound.wait_room(sum(map(len, event)))
        self.put(event, made)
        self._lead = ""
