"""v2's generate and generate_stream: JSON objects whose members are tensors by name, or a text and its continuation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, final

import msgspec
import trio

from gateway.dialects.base import NO_PARAMETERS, codec, reply_headers, reply_of, session_of
from gateway.dialects.compression import compressed
from gateway.dialects.text_calls import prompt_of
from gateway.dialects.v2_calls import JSON, V2Calls, error_of, outputs_of, schedule, slot_within
from gateway.dialects.v2_channels import EVENTS, OneResponse, StreamChannel, WholeRequest, check_response
from gateway.errors import ModelFailed
from gateway.exchange import Exchange
from gateway.workers.worker import Slot, Worker
from models.messages import Family, Finish, InferResponse, Prompt, Token
from models.session import Channel
from models.utf8 import utf8
from protocols import lmi, v2, v2_generate
from protocols.events import Buffer
from protocols.v2_body import read_string

_MOST = 16 * 1024 * 1024  # bytes of a text that is kept until it is whole


@final
class GenerateDialect:
    """Answers requests of Triton's generate extension: models of tensors by their inputs' names, models of text, and what
    converts to them, by `text_input`."""

    def __init__(self, calls: V2Calls) -> None:
        self._calls = calls

    async def generate(self, exchange: Exchange, name: str, version: str = "") -> None:
        """POST /v2/models/{name}[/versions/{version}]/generate: exactly one response."""
        await self._answer(exchange, name, version, streams=False)

    async def generate_stream(self, exchange: Exchange, name: str, version: str = "") -> None:
        """POST /v2/models/{name}[/versions/{version}]/generate_stream: a server-sent event for each response, and for each
        token of a text. The status is that of the first."""
        await self._answer(exchange, name, version, streams=True)

    async def _answer(self, exchange: Exchange, name: str, version: str, *, streams: bool) -> None:
        calls = self._calls
        worker = calls.worker(exchange, name, version)
        tensors = worker.spec.family is Family.TENSOR
        if not tensors:
            calls.models.check_family(worker, Family.TEXT, "generate")
        worker.check_ready()
        body = await exchange.receive_body(min(calls.bounds.json, calls.body), setting="limits.json")
        arrived = perf_counter_ns()
        try:
            if tensors:
                read = partial(v2_generate.read_generate, body, calls.codec_of(worker).signature, calls.bounds)
                await self._tensors(exchange, worker, await codec(len(body), read), arrived, streams=streams)
            else:
                asked = await codec(len(body), partial(_read_text, body, calls.bounds))
                await self._text(exchange, worker, asked, streams=streams)
        except v2.V2Error as e:
            raise error_of(e) from None

    async def _tensors(
        self, exchange: Exchange, worker: Worker, request: v2.V2Request, arrived: int, *, streams: bool
    ) -> None:
        within, source = schedule(exchange, request.parameters), WholeRequest(exchange, request)
        if streams:
            channel = StreamChannel(exchange, worker, source, EVENTS, partial(_event, worker, request))
            slot = await slot_within(exchange, worker, within, request, arrived)
            await _stream(exchange, worker, channel, slot, Family.TENSOR, request.parameters)
            return
        one = OneResponse(exchange, worker, source)
        with await slot_within(exchange, worker, within, request, arrived):
            await worker.call(session_of(exchange, worker, one, parameters=request.parameters), exchange, Family.TENSOR)
            text = await _rendered(worker, request, one.response())
        await self._respond(exchange, text)

    async def _text(self, exchange: Exchange, worker: Worker, asked: _TextAsked, *, streams: bool) -> None:
        within, kept = schedule(exchange, asked.given), _TextChannel(exchange, worker, asked)
        if streams:
            channel = StreamChannel(exchange, worker, kept, EVENTS, kept.event)
            slot = await slot_within(exchange, worker, within)
            await _stream(exchange, worker, channel, slot, Family.TEXT, NO_PARAMETERS)
            return
        with await slot_within(exchange, worker, within):
            await worker.call(session_of(exchange, worker, kept), exchange, Family.TEXT)
        await self._respond(exchange, kept.reply_with(b"".join(kept.kept).decode()))

    async def _respond(self, exchange: Exchange, text: bytes) -> None:
        level = self._calls.models.config.v2.compression
        headers, buffers = await compressed(exchange, [JSON, *reply_headers(exchange)], [text], level)
        exchange.respond(200, headers, *buffers)


async def _stream(
    exchange: Exchange,
    worker: Worker,
    channel: StreamChannel,
    slot: Slot,
    family: Family,
    parameters: Mapping[str, Any],
) -> None:
    with slot:
        await channel.call(session_of(exchange, worker, channel, parameters=parameters), family)
    channel.finish()


async def _event(worker: Worker, request: v2.V2Request, response: InferResponse) -> Sequence[Buffer]:
    check_response(response)
    try:
        return EVENTS.wrap(await _rendered(worker, request, response), ())
    except v2.V2Error as e:
        raise error_of(e) from None


async def _rendered(worker: Worker, request: v2.V2Request, response: InferResponse) -> bytes:
    outputs, size = outputs_of(response)
    spec = worker.spec
    return await codec(
        size,
        partial(
            v2_generate.render_generate, spec.name, spec.version, outputs, request, response.id, dict(response.parameters)
        ),
    )


class _TextAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a model of text."""

    prompt: Prompt
    id: str
    given: Mapping[str, Any]
    """Its parameters."""


def _read_text(body: memoryview, limits: v2.V2Limits) -> _TextAsked:
    """As LMI reads its parameters, whether they stand in `parameters` or beside them. V2Error."""
    head = v2_generate.read_object(body, limits)
    text, id = head.get("text_input"), read_string(head, "id")
    if type(text) is not str or not text:
        raise v2.V2Error("text_input must be a string that is not empty")
    given = {name: value for name, value, _ in v2_generate.members_of(head) if name != "text_input"}
    try:
        request = lmi.parse_document({"inputs": text, "parameters": given})
        lmi.check_one_sequence(request.parameters, request.given, "here, where an answer is one text")
    except lmi.LMIError as e:
        raise v2.V2Error(e.message) from None
    return _TextAsked(prompt=prompt_of(request.inputs, request.parameters), id=id, given=given)


@final
class _TextChannel(Channel[Prompt, Any]):
    """One prompt in; tokens out, each an event, or kept until the text is whole."""

    def __init__(self, exchange: Exchange, worker: Worker, asked: _TextAsked) -> None:
        self._exchange, self._worker, self._asked = exchange, worker, asked
        self.exhausted = False
        self.kept: list[bytes] = []
        self._size = self._tokens = 0
        self._complete = False

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    async def receive(self) -> Any:
        await self._exchange.turn()
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        return self._asked.prompt

    async def send(self, message: Token | Finish, /) -> None:
        await self._exchange.turn()
        text = self._taken(message)
        if text is None:
            return
        self._size += len(text)
        if self._size > _MOST:
            raise ModelFailed(f"the text is over the limit of {_MOST} bytes", code="TooLong", status=500)
        self.kept.append(text)

    async def event(self, message: Any) -> Sequence[Buffer]:
        """A token as its event; nothing for what adds nothing to the text."""
        text = self._taken(message)
        return () if text is None else EVENTS.wrap(self.reply_with(text.decode()), ())

    def _taken(self, message: object) -> bytes | None:
        """The text that a message adds."""
        if self._complete:
            raise trio.ClosedResourceError("the text is complete")
        match message:
            case Finish():
                self._complete = True
            case Token(prefill=True):
                pass
            case Token():
                self._tokens += 1
                most = self._asked.prompt.parameters.max_new_tokens
                self._complete = message.finish is not None or self._tokens >= most
                return utf8(message.text)
            case _:
                raise TypeError(f"a text call is answered with Token and Finish, not {type(message).__name__}")
        return None

    def reply_with(self, text: str) -> bytes:
        """The JSON of a reply with this text."""
        spec = self._worker.spec
        reply = v2_generate.GenerateReply(
            model_name=spec.name, model_version=spec.version, text_output=text, id=self._asked.id
        )
        return msgspec.json.encode(reply)
