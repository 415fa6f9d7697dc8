"""LMI text generation at /invocations and /predictions/{model}: the rolling batch and TGI's form; passes on all others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, final

import msgspec

from gateway.codecs.prompts import prompt_of
from gateway.codecs.threads import codec
from gateway.config import LMIConfig
from gateway.core.exchange import Exchange
from gateway.core.outbound import Outbound
from gateway.core.route import Row
from gateway.core.whole_body import receive_body
from gateway.dialects.answers import JSON, Wrapping, reply_headers
from gateway.dialects.call import session_of, text_header
from gateway.dialects.model_choice import ModelChoice
from gateway.dialects.text.lmi_dynamic_batch import DynamicDialect
from gateway.dialects.text.lmi_errors import kind_of, refuse_as_lmi, refuse_as_tgi
from gateway.dialects.text.lmi_formatters import (
    Formats,
    FormattedAnswer,
    formatting_of,
    has_formatters,
    read_input,
    take_input,
)
from gateway.dialects.text.openai import OpenAIDialect
from gateway.dialects.text.requests import (
    LINE,
    OnePrompt,
    PromptReport,
    TextCalls,
    check_format,
    check_supported,
    decided_own,
    document_in,
    rule_of,
    table_of,
    tell_passed,
    within_ceiling,
    within_room,
)
from gateway.errors import (
    Ending,
    GatewayError,
    ModelFailed,
    WorkerLost,
)
from gateway.workers.worker import Worker
from models.continuations import spoken
from models.formatters import TextInput
from models.messages import Family, Finish, FinishReason, Token, ToolCall
from models.session import Session
from protocols import lmi
from protocols.sse import CONTENT_TYPE
from protocols.text_members import NOTHING, Decided

_EVENTS = lmi.Formatter.SSE
_CHAT_FORMATTERS = ("json_chat", "jsonlines_chat")


@final
class LMIDialect:
    """Serves text generation as LMI does."""

    def __init__(self, models: ModelChoice, calls: TextCalls, openai: OpenAIDialect) -> None:
        self._models, self._calls, self._openai = models, calls, openai
        self._dynamic = DynamicDialect(calls)

    def rows(self) -> list[Row]:
        """The one route. SageMaker's routes call `generate` for text models."""
        return [Row("POST", "/predictions/{name}", self.predictions, dialect="lmi", refuse=refuse_as_lmi)]

    async def predictions(self, exchange: Exchange, name: str) -> None:
        """POST /predictions/{name}."""
        limits = self._models.config.limits
        worker = self._models.named(exchange.permit, name, Family.TEXT, "lmi")
        exchange.model = worker.name
        self.take(exchange, worker)
        worker.check_ready(exchange, room=not exchange.input_ended)  # a body that is here chooses the error's form
        body = await receive_body(exchange, min(limits.text_json, limits.body), setting="limits.text_json")
        await self.generate(exchange, worker, body)

    def take(self, exchange: Exchange, worker: Worker) -> None:
        """Marks the exchange as LMI's: an error before the answer has TGI's form if the model does, otherwise LMI's."""
        exchange.claim("lmi", refuse_as_tgi if self._calls.options(worker).tgi_compat else refuse_as_lmi)

    async def generate(
        self,
        exchange: Exchange,
        worker: Worker,
        body: memoryview,
        wrapping: Wrapping | None = None,
        formatting: Formats | None = None,
    ) -> None:
        """Answers a request of the schema, whatever its route. `wrapping` takes the answer and the errors in place of the
        exchange. `formatting`: the model's own formatters, once they have begun with this request."""
        if formatting is None and has_formatters(worker):
            await self._generate_formatted(exchange, worker, body, wrapping)
            return
        limits, options = self._models.config.limits, self._calls.options(worker)
        answer = wrapping or exchange.outbound
        own = formatting is not None and worker.spec.input_formatter is not None
        said = NOTHING
        try:
            if formatting is not None and own:
                document = await read_input(exchange, worker, body, limits, formatting)
            else:
                document = await document_in(exchange, body, text_header(exchange, b"content-type"), limits)
                if lmi.is_chat(document):
                    await self._openai.chat(exchange, worker, document, len(body), options, wrapping)
                    return
                if options.rolling_batch == "disable":
                    await self._dynamic.generate(exchange, worker, document, len(body), options, wrapping)
                    return
            judge = None if own else worker
            request, said = await codec(len(body), partial(_parse, document, options, judge))
            parameters = document.get("parameters")
            del document  # with members that nothing reads
            if not own and not request.parameters.extra:
                exchange.making(0)
            check_supported(worker, request, options)
            request = within_ceiling(worker, limits, request)
        except lmi.LMIError as e:
            dynamic = options.rolling_batch == "disable" and not own
            body_of = lmi.dynamic_error_body(e.message, e.status) if dynamic else e.body(tgi=options.tgi_compat)
            answer.respond(e.status, [JSON, *lmi.response_headers()], body_of, ending=Ending.REFUSED)
            return
        except WorkerLost:  # the model's process died while it read the request
            if worker.successor is None:
                raise
        if said is not NOTHING:
            tell_passed(exchange, worker, said.unknown)
            await check_format(exchange, worker, said)
        if worker.context:
            within, _ = await within_room(exchange, worker, request.inputs, request.parameters)
            request = msgspec.structs.replace(request, parameters=within)
        if formatting is not None:
            if worker.successor is not None:  # a new version has replaced the model
                await self._generate_formatted(exchange, worker, body, wrapping)
                return
            if formatting.writes:
                if not own:
                    take_input(exchange, worker, formatting, TextInput(request.inputs, parameters, stream=request.stream))
                prompt = prompt_of(request.inputs, request.parameters, said)
                await FormattedAnswer(exchange, worker, prompt, formatting, answer, options).run()
                return
        channel = _TextChannel(exchange, request, answer, worker, options.max_text, said)
        if wrapping is None:
            exchange.fail = channel.fail
        else:
            wrapping.in_band(channel.error_line)
        with await worker.slots.take(exchange):
            session = session_of(exchange, worker, channel)
            if request.tgi:
                channel.asks = session
            if request.formatter is _EVENTS:
                await self._stream(channel, answer, worker.call(session, exchange, Family.TEXT))
            else:
                await worker.call(session, exchange, Family.TEXT)
        channel.finish()

    async def _stream(self, channel: _TextChannel, answer: Outbound | Wrapping, call: Awaitable[None]) -> None:
        with self._calls.streams.watched(channel, CONTENT_TYPE, answer):
            await call

    async def _generate_formatted(
        self, exchange: Exchange, worker: Worker, body: memoryview, wrapping: Wrapping | None
    ) -> None:
        while worker.successor is not None:
            worker = worker.successor
        with formatting_of(exchange, worker) as formatting:
            await self.generate(exchange, worker, body, wrapping, formatting)


def _parse(document: dict[str, Any], options: LMIConfig, worker: Worker | None) -> tuple[lmi.TextRequest, Decided]:
    """The request, and the judgement on its members. `worker`: the model, unless its own formatter has read the
    members."""
    name = options.output_formatter
    configured = lmi.Formatter(name) if name and name not in _CHAT_FORMATTERS else None
    request = lmi.parse_document(
        document, configured=configured, tgi=options.tgi_compat, table=table_of(options), rule=rule_of(options)
    )
    if worker is None or not (request.parameters.extra or document.keys() - lmi.MEMBERS):
        return request, NOTHING
    return decided_own(worker, request, document)


@final
class _TextChannel(OnePrompt):
    """The channel of one prompt: each token is a line or an event of the answer, and the first one sends the head."""

    __slots__ = ("_answer", "_encoder", "_late", "_line", "_outbound", "_reason", "_request", "_rest", "asks")

    def __init__(
        self,
        exchange: Exchange,
        request: lmi.TextRequest,
        answer: Outbound | Wrapping,
        worker: Worker,
        max_text: int,
        said: Decided,
    ) -> None:
        report: PromptReport | None = None
        if request.parameters.decoder_input_details and (member := request.shows_prompt):
            report = PromptReport(worker, f"parameters.{member}")
        super().__init__(exchange, worker, prompt_of(request.inputs, request.parameters, said), report)
        self._request, self._answer, self._outbound = request, answer, exchange.outbound
        self.asks: Session[Any, Any] | None = None
        """The session, which keeps the number of the prompt's tokens; None if the answer does not need it, or has it."""
        self._encoder = lmi.TextEncoder(request, max_text=max_text)
        self._line: Callable[[int, str, float | None], bytes] | None = None
        """Makes the line of a plain token while `text` need not judge it; None until the first token is out."""
        self._reason = self._rest = ""
        self._late = False
        """True if a comment has sent the head and no token has come yet."""

    def try_send(self, message: object, /) -> bool:
        """Sends the most frequent message without waiting: a plain token in mid-stream. `text` need not judge it, as the
        encoder counts tokens too. False, and nothing is sent, for any other message and if there is no room."""
        line = self._line
        if type(message) is not Token or line is None or message.finish is not None:
            return False
        if message.special or message.prefill or message.thinking or message.sequence:
            return False
        if message.data and self.text.decodes:
            return False
        outbound = self._outbound
        text = message.text
        if not outbound.try_room(len(text) + LINE):
            return False
        try:
            piece = line(message.id, text, message.log_prob)
        except lmi.LMIError as e:
            raise _too_long(e) from None
        outbound.push_piece(piece)
        if self._encoder.finished:
            self._line = None
            self._end()
            self.text.stop()
        return True

    async def send(self, message: Token | ToolCall | Finish, /) -> None:
        if self.try_send(message):
            return
        text = self.text
        if self._report is not None:
            self.check_report(message)
        if not text.passes(message):
            await text.drop()
            return
        if type(message) is Token:
            await self._answer.wait_room(self._size(message))
        elif type(message) is Finish:
            await self._exchange.turn.checkpoint()
        else:
            message = spoken(message)
            await self._answer.wait_room(self._size(message))
        by = self._line is not None
        if by:  # tokens before it may have been sent by `try_send`
            text.went_by(self._encoder.generated_tokens)
        message = text.take(message)
        if text.judges:
            self._line = None
        try:
            if type(message) is Finish:
                self._finished(message)
            elif message.prefill:
                self._encoder.prefill(message.id, message.text, message.log_prob)
            else:
                self._put(message, by)
        except lmi.LMIError as e:
            raise _too_long(e) from None
        text.sent()

    def _put(self, token: Token, by: bool) -> None:
        encoder = self._encoder
        if self.asks is not None:
            self._count_prompt(self.asks, token)
        reason = None if token.finish is None else token.finish.value
        line = encoder.token(token.id, token.text, token.log_prob, token.special, reason, token.top, token.sequence)
        if by:
            self._outbound.push_piece(line)
        elif line:
            if self._late or not self._outbound.status:
                self._start()
            self._answer.push(line)
        if encoder.finished:
            self._end()

    def _size(self, token: Token) -> int:
        """About the bytes that the token adds to the answer now."""
        if not self._encoder.streaming:
            return 0
        return self.text.held(token.sequence) + len(token.text) + len(token.data) + LINE * (1 + len(token.top))

    def _end(self) -> None:
        """Ends a streamed answer after its last token."""
        if self._encoder.streaming:
            self._answer.finish()

    def _count_prompt(self, session: Session[Any, Any], message: Token | Finish) -> None:
        if message.prompt_tokens is not None:
            session.prompt_tokens = message.prompt_tokens
        if session.prompt_tokens is not None:
            self._encoder.prompt_tokens, self.asks = session.prompt_tokens, None

    def _finished(self, message: Finish) -> None:
        if self.asks is not None:
            self._count_prompt(self.asks, message)
        reason, rest = message.reason.value, self.text.rest(message.sequence)
        if message.sequence:
            self._encoder.rest(rest, message.sequence)
            self._encoder.finish(reason, message.sequence)
        else:
            self._reason, self._rest = reason, rest

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    def start(self) -> None:
        """Sends the head before the first token, which `text` must still see."""
        self._start()
        self._late, self._line = True, None

    def _start(self) -> None:
        if self._late:
            self._late = False
        else:
            content_type = (b"content-type", self._encoder.content_type.encode())
            self._answer.start(200, [content_type, *lmi.response_headers(), *reply_headers(self._exchange)])
        if self._answer is self._outbound and not self.text.judges:
            self._line = self._encoder.line

    def finish(self) -> None:
        """Ends the answer after the model has returned: writes the document, or the last line if it is not out yet."""
        if self._outbound.finishing is not None:
            return
        exchange, answer, encoder = self._exchange, self._answer, self._encoder
        if self._report is not None:
            self.check_report(None)
        try:
            for sequence, text in self.text.rests():
                encoder.rest(text, sequence)
            encoder.rest(self._rest)
        except lmi.LMIError as e:
            raise _too_long(e) from None
        line = encoder.finish(self._reason or FinishReason.EOS_TOKEN.value)
        if encoder.streaming:
            if not self._outbound.status:
                self._start()
            answer.push(line)
            answer.finish()
        else:
            answer.respond(200, [JSON, *lmi.response_headers(), *reply_headers(exchange)], line)

    def fail(self, error: GatewayError) -> None:
        """Answers an HTTP status before the head. After it, writes the schema's last line and ends the body whole."""
        if self._outbound.status:
            self._outbound.push(self.error_line(error))
            self._outbound.finish(error.ending)
        elif self._request.tgi:
            refuse_as_tgi(self._exchange, error)
        else:
            refuse_as_lmi(self._exchange, error)

    def error_line(self, error: GatewayError) -> bytes:
        """The last line of a stream that failed."""
        return self._encoder.error(error.message, kind=kind_of(error))


def _too_long(error: lmi.LMIError) -> ModelFailed:
    return ModelFailed(error.message, code="TooLong", status=error.status)
