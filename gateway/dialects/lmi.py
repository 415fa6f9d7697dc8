"""LMI text generation at /invocations and /predictions/{model}: json, jsonlines and SSE."""

from __future__ import annotations

from typing import Any, final

import trio

from gateway.dialects.base import Models, Wrapping, codec, reply_headers, reply_of, session_of, text_header
from gateway.errors import Ending, GatewayError, ModelCrashed, ModelFailed
from gateway.exchange import Exchange
from gateway.workers.worker import Worker
from models.messages import Family, Finish, FinishReason, GenerationParameters, Prompt, Token
from models.session import Channel
from protocols import lmi

_JSON = (b"content-type", b"application/json")
# An estimate of a token's line beside its text: keys, numbers and framing.
_LINE = 96


@final
class LMIDialect:
    """Serves text generation as LMI's rolling batch does."""

    def __init__(self, models: Models) -> None:
        self._models = models
        name = models.config.lmi.output_formatter
        self._formatter = lmi.Formatter(name) if name else None

    async def predictions(self, exchange: Exchange, name: str) -> None:
        """POST /predictions/{name}."""
        exchange.take("lmi", refuse)
        limits = self._models.config.limits
        worker = self._models.named(name, Family.TEXT, "lmi")
        exchange.model = worker.name
        worker.check_ready()
        body = await exchange.receive_body(min(limits.json, limits.body), setting="limits.json")
        await self.generate(exchange, worker, body)

    async def generate(self, exchange: Exchange, worker: Worker, body: memoryview, wrapping: Wrapping | None = None) -> None:
        """Answers a request of the schema, whatever its route. `wrapping` takes the answer in place of the exchange,
        and then says the errors too."""
        limits = self._models.config.limits
        answer = exchange if wrapping is None else wrapping
        try:
            request = await codec(
                len(body),
                lambda: lmi.parse_request(
                    body,
                    text_header(exchange, b"content-type"),
                    configured=self._formatter,
                    json_limit=limits.json,
                    depth=limits.json_depth,
                ),
            )
        except lmi.LMIError as e:
            answer.respond(e.status, [_JSON, *lmi.response_headers()], e.body(), ending=Ending.REFUSED)
            return
        channel = _TextChannel(exchange, request, answer)
        if wrapping is None:
            exchange.fail = channel.fail
        else:
            wrapping.in_band = channel.error_line
        with await worker.slot(exchange):
            await worker.call(session_of(exchange, worker, channel), exchange, Family.TEXT)
        channel.finish()


def read_prompt(data: bytes) -> Prompt:
    """A prompt as a part carries it: an LMI request object, or the plain text itself."""
    from models.errors import ModelError

    try:
        kind = "application/json" if data.lstrip()[:1] == b"{" else "text/plain"
        return prompt_of(lmi.parse_request(data, kind))
    except lmi.LMIError as e:
        raise ModelError(e.message, code="BadPrompt", status=400) from None


def prompt_of(request: lmi.TextRequest) -> Prompt:
    """The model's view of a request."""
    p = request.parameters
    return Prompt(
        text=request.inputs,
        parameters=GenerationParameters(
            do_sample=p.do_sample,
            seed=p.seed,
            temperature=p.temperature,
            repetition_penalty=p.repetition_penalty,
            top_k=p.top_k,
            top_p=p.top_p,
            max_new_tokens=p.max_new_tokens,
            details=p.details,
            return_full_text=p.return_full_text,
            stop_sequences=p.stop_sequences,
            decoder_input_details=p.decoder_input_details,
            extra=p.extra,
        ),
    )


@final
class _TextChannel(Channel[Prompt, Any]):
    """One prompt in; tokens out, each its own line or event, the first one carrying the head."""

    def __init__(self, exchange: Exchange, request: lmi.TextRequest, answer: Exchange | Wrapping) -> None:
        self._exchange, self._request, self._answer = exchange, request, answer
        self._encoder = lmi.TextEncoder(request)
        self.exhausted = False
        self._reason: FinishReason | None = None
        self.complete = False

    async def receive(self) -> Prompt:
        await self._exchange.turn()
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        return prompt_of(self._request)

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    async def send(self, message: Token | Finish, /) -> None:
        answer, encoder = self._answer, self._encoder
        if self.complete:
            raise trio.ClosedResourceError("the answer is complete")
        if not isinstance(message, Token):
            if not isinstance(message, Finish):
                raise TypeError(f"a text call is answered with Token and Finish, not {type(message).__name__}")
            self._reason = message.reason
            self.complete = True
            return
        await answer.wait_room(len(message.text) + _LINE if encoder.streaming else 0)
        try:
            if message.prefill:
                encoder.prefill(message.id, message.text, message.log_prob)
                return
            finish = message.finish
            reason = None if finish is None else finish.value
            line = encoder.token(message.id, message.text, message.log_prob, message.special, reason)
        except lmi.LMIError as e:
            raise ModelFailed(e.message, code="TooLong", status=e.status) from None
        if line:
            if not self._exchange.status:
                self._start()
            answer.push(line)
        if encoder.finished:
            self.complete = True
            if encoder.streaming:
                answer.finish()

    def _start(self) -> None:
        content_type = (b"content-type", self._encoder.content_type.encode())
        self._answer.start(200, [content_type, *lmi.response_headers(), *reply_headers(self._exchange)])

    def finish(self) -> None:
        """The model has returned: the document, or the last line where it is not out yet."""
        exchange, answer, encoder = self._exchange, self._answer, self._encoder
        if exchange.finishing is not None:
            return
        line = encoder.finish((self._reason or FinishReason.EOS_TOKEN).value)
        if encoder.streaming:
            if not exchange.status:
                self._start()
            answer.push(line)
            answer.finish()
        else:
            answer.respond(200, [_JSON, *lmi.response_headers(), *reply_headers(exchange)], line)

    def fail(self, error: GatewayError) -> None:
        """Before the head: an HTTP status. In mid-stream: the schema's last line, then a whole end of the body."""
        if self._exchange.status:
            self._exchange.push(self.error_line(error))
            self._exchange.finish(error.ending)
        else:
            refuse(self._exchange, error)

    def error_line(self, error: GatewayError) -> bytes:
        """The last line of a stream that failed."""
        return self._encoder.error(error.message)


def refuse(exchange: Exchange, error: GatewayError) -> None:
    """Says an error that comes before the head in LMI's words."""
    if isinstance(error, ModelFailed | ModelCrashed):
        status = error.status if isinstance(error, ModelFailed) else 424
        body = lmi.generation_error_body(error.message, status)
    else:
        status, body = error.status, lmi.error_body(error.message, error.status)
    headers = [_JSON, *lmi.response_headers(), *error.headers]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    exchange.respond(status, headers, body, ending=error.ending)
