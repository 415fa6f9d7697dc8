"""OpenAI's API on text models: chat completions, completions, and the list of models."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, final

import trio

from gateway.config import LMIConfig
from gateway.dialects.base import JSON, Wrapping, codec, refusal_headers, reply_headers, reply_of, session_of
from gateway.dialects.text_calls import LINE, TextCalls, chat_prompt, not_supported, prompt_of, unsupported
from gateway.errors import BadRequest, Ending, GatewayError, ModelCrashed, ModelFailed, NotFound, Overloaded
from gateway.exchange import Exchange
from gateway.version import version
from gateway.workers.worker import Worker
from models.chat import ChatMessage
from models.convert import convertible
from models.messages import Family, Finish, FinishReason, Prompt, Token
from models.session import Channel, Session
from protocols import lmi, openai

_ANY = ("", "tgi", "dummy")
"""What a request calls its model that means whichever there is: clients that must name one say this (text-generation,
huggingface_hub)."""
_FORMS = {form.value: form for form in openai.ChatForm if form is not openai.ChatForm.OPENAI}


@final
class OpenAIDialect:
    """Serves OpenAI's clients."""

    def __init__(self, calls: TextCalls) -> None:
        self._calls, self._models = calls, calls.models
        self._since = int(time.time())
        self._fingerprint = f"everywire-{version()}"

    # -- routes ------------------------------------------------------------------------------------------------------

    async def chat_completions(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        exchange.take("openai", refuse)
        document, size = await self._document(exchange)
        try:
            worker = self._worker(exchange, document)
        except openai.OpenAIError as e:
            _refuse_request(exchange, e)
            return
        await self.chat(exchange, worker, document, size, self._calls.options(worker))

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        exchange.take("openai", refuse)
        document, size = await self._document(exchange)
        try:
            worker = self._worker(exchange, document)
            options = self._calls.options(worker)
            read = partial(openai.parse_completion, document, max_tokens=self._models.config.openai.max_tokens)
            request = await codec(size, read)
            _check_supported(worker, request, options)
        except openai.OpenAIError as e:
            _refuse_request(exchange, e)
            return
        encoder = openai.CompletionEncoder(
            request,
            id=f"cmpl-{exchange.id}",
            created=int(time.time()),
            model=request.model or worker.name,
            max_text=options.max_text,
        )
        prompts = [prompt_of(text, request.parameters) for text in request.prompts]
        await _Answer(exchange, encoder, exchange, echo=request.echo).run(worker, prompts, request.n)

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models: those that can answer here."""
        exchange.take("openai", refuse)
        speakers = [w.name for w in self._models.workers.values() if convertible(w.spec.family, Family.TEXT)]
        exchange.respond(200, [JSON], openai.models_body([(name, self._since) for name in sorted(speakers)]))

    async def model(self, exchange: Exchange, name: str) -> None:
        """GET /v1/models/{name}."""
        exchange.take("openai", refuse)
        worker = self._models.named(name, Family.TEXT, "openai")
        exchange.respond(200, [JSON], openai.model_body(worker.name, created=self._since))

    # -- a chat, at these routes and at LMI's ------------------------------------------------------------------------

    async def chat(
        self,
        exchange: Exchange,
        worker: Worker,
        document: dict[str, Any],
        size: int,
        options: LMIConfig,
        wrapping: Wrapping | None = None,
    ) -> None:
        """Answers a request that has `messages`, which came as `size` bytes. `wrapping` takes the answer in place of the
        exchange, and then says the errors too."""
        if wrapping is None and exchange.dialect != "openai":
            exchange.words = refuse
        answer = exchange if wrapping is None else wrapping
        try:
            # at OpenAI's own routes its own clients ask
            form = openai.ChatForm.OPENAI if exchange.dialect == "openai" else _form_of(options)
            usual = form is openai.ChatForm.OPENAI
            most = self._models.config.openai.max_tokens if usual else lmi.Parameters().max_new_tokens
            request, messages = await codec(size, partial(_read_chat, document, most))
            _check_supported(worker, request, options)
        except openai.OpenAIError as e:
            _refuse_request(answer, e)
            return
        encoder = openai.ChatEncoder(
            request,
            id=f"chatcmpl-{exchange.id}",
            created=int(time.time()),
            model=request.model or worker.name,
            form=form,
            fingerprint=self._fingerprint,
            max_text=options.max_text,
        )
        shown = _Answer(exchange, encoder, answer)
        prompt = prompt_of(await chat_prompt(exchange, worker, messages, size), request.parameters)
        await shown.run(worker, [prompt], request.n)

    async def _document(self, exchange: Exchange) -> tuple[dict[str, Any], int]:
        """The request's document, and how many bytes it was."""
        limits = self._models.config.limits
        body = await exchange.receive_body(min(limits.json, limits.body), setting="limits.json")
        try:
            document = await codec(
                len(body),
                lambda: lmi.read_document(body, "application/json", json_limit=limits.json, depth=limits.json_depth),
            )
            return document, len(body)
        except lmi.LMIError as e:
            raise BadRequest(e.message) from None

    def _worker(self, exchange: Exchange, document: dict[str, Any]) -> Worker:
        """The model that the request means. OpenAIError, which names the member, where it is none that could answer."""
        name = openai.model_of(document)
        try:
            if name in self._models.workers:
                worker = self._models.named(name, Family.TEXT, "openai")
            elif name in _ANY:
                worker = self._models.unnamed(self._models.config.openai.default_model, Family.TEXT, "openai")
            else:
                raise NotFound(f"no model {name[:100]!r}; GET /v1/models lists those that there are")
        except BadRequest as e:
            raise openai.OpenAIError(e.message, param="model") from None
        exchange.model = worker.name
        worker.check_ready()
        return worker


@final
class _Answer:
    """One request's choices, and how they leave."""

    def __init__(
        self,
        exchange: Exchange,
        encoder: openai.ChatEncoder | openai.CompletionEncoder,
        answer: Exchange | Wrapping,
        *,
        echo: bool = False,
    ) -> None:
        self.exchange, self.encoder, self.answer, self.echo = exchange, encoder, answer, echo
        if isinstance(answer, Exchange):
            exchange.fail = self._fail
        else:
            answer.in_band(self._error_event)

    async def run(self, worker: Worker, prompts: list[Prompt], n: int) -> None:
        """Runs the model for one prompt after another, within one slot, and ends the answer."""
        exchange, counts = self.exchange, list[int]()
        with await worker.slot(exchange):
            for place, prompt in enumerate(prompts):
                channel = _ChoicesChannel(self, prompt, place, n)
                channel.session = session = session_of(exchange, worker, channel)
                try:
                    await worker.call(session, exchange, Family.TEXT)
                finally:
                    channel.session = None  # they know each other: a cycle would keep the request
                if session.prompt_tokens is not None:
                    counts.append(session.prompt_tokens)
        if len(counts) == len(prompts):  # of some alone would be the count of none
            self.encoder.prompt_tokens = sum(counts)
        self._finish()

    async def room(self, size: int, others: int) -> None:
        """Waits until a chunk with so much text, and with so many tokens beside its own, may leave."""
        await self.answer.wait_room(size + 2 * LINE * (1 + others) if self.encoder.streaming else 0)

    def put(self, chunk: bytes) -> None:
        """Sends what there is room for."""
        if chunk:
            self._start()
            self.answer.push(chunk)

    def _start(self) -> None:
        if not self.exchange.status:
            head = [(b"content-type", self.encoder.content_type.encode()), (b"cache-control", b"no-cache")]
            self.answer.start(200, [*head, *reply_headers(self.exchange)])

    def _finish(self) -> None:
        if self.exchange.finishing is not None:
            return
        encoder = self.encoder
        try:
            rest = encoder.end() if encoder.streaming else encoder.document()
        except openai.OpenAIError as e:
            raise _too_long(e) from None
        if not encoder.streaming:
            self.answer.respond(200, [JSON, *reply_headers(self.exchange)], rest)
            return
        self._start()
        if rest:
            self.answer.push(rest)
        self.answer.finish()

    def _fail(self, error: GatewayError) -> None:
        """Before the head an HTTP status; in mid-stream an event that clients raise, then a whole end of the body."""
        if self.exchange.status:
            self.exchange.push(self._error_event(error))
            self.exchange.finish(error.ending)
        else:
            refuse(self.exchange, error)

    def _error_event(self, error: GatewayError) -> bytes:
        return self.encoder.error(error.message, _status(error))


@final
class _ChoicesChannel(Channel[Prompt, Any]):
    """One prompt in; the tokens of its choices out."""

    def __init__(self, answer: _Answer, prompt: Prompt, place: int, n: int) -> None:
        self._answer, self._prompt, self._place, self._n = answer, prompt, place, n
        self.session: Session[Any, Any] | None = None
        """Who knows how many tokens the prompt has, where a token says it."""
        self._counts = [0] * n
        self._open = n
        self._overrun = False
        self.exhausted = False

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._answer.exchange)

    @property
    def complete(self) -> bool:
        """Whether each choice has its last token, or the model has gone on after that of all that it has begun."""
        return not self._open or self._overrun

    async def receive(self) -> Prompt:
        await self._answer.exchange.turn()
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        return self._prompt

    async def send(self, message: Token | Finish, /) -> None:
        if not self._open:
            raise trio.ClosedResourceError("the answer is complete")
        answer, encoder = self._answer, self._answer.encoder
        if not isinstance(message, Token):
            if not isinstance(message, Finish):
                raise TypeError(f"a text call is answered with Token and Finish, not {type(message).__name__}")
            await answer.room(self._echoed(message.sequence), 0)
            if message.prompt_tokens is not None:
                self._count_prompt(message.prompt_tokens)
            try:
                self._close(message.sequence, message.reason)
            except openai.OpenAIError as e:
                raise _too_long(e) from None
            return
        await answer.room(len(message.text) + self._echoed(message.sequence), len(message.top))
        if message.prompt_tokens is not None:
            self._count_prompt(message.prompt_tokens)
        sequence = message.sequence
        if not 0 <= sequence < self._n:
            return  # nobody asked for it
        try:
            if message.prefill:
                encoder.prefill(message.id, message.text, message.log_prob, self._place)
                return
            count = self._counts[sequence]
            if count < 0:
                self._overrun = max(self._counts) <= 0
                raise trio.ClosedResourceError(f"sequence {sequence} is complete")
            self._counts[sequence] = count + 1
            finish = message.finish
            if finish is None and count + 1 == self._prompt.parameters.max_new_tokens:
                finish = FinishReason.LENGTH
            if finish is not None:
                self._counts[sequence], self._open = -1, self._open - 1
            chunk = encoder.token(
                message.id,
                message.text,
                message.log_prob,
                message.special,
                None if finish is None else finish.value,
                message.top,
                self._place * self._n + sequence,
            )
        except openai.OpenAIError as e:
            raise _too_long(e) from None
        answer.put(chunk)

    def _count_prompt(self, count: int) -> None:
        assert self.session is not None
        self.session.prompt_tokens = count

    def _echoed(self, sequence: int) -> int:
        """Characters of the prompt that the first chunk of a choice has before its own."""
        begins = self._answer.echo and 0 <= sequence < self._n and not self._counts[sequence]
        return len(self._prompt.text) if begins else 0

    def _close(self, sequence: int, reason: FinishReason) -> None:
        if 0 <= sequence < self._n and self._counts[sequence] >= 0:
            self._counts[sequence], self._open = -1, self._open - 1
            self._answer.put(self._answer.encoder.finish(reason.value, self._place * self._n + sequence))


def refuse(exchange: Exchange, error: GatewayError) -> None:
    """Says an error that comes before the head in OpenAI's words. No room is 429, which its clients try again."""
    status = _status(error)
    body = openai.OpenAIError.of_status(status, error.message).body()
    exchange.respond(status, refusal_headers(error), body, ending=error.ending)


def _too_long(error: openai.OpenAIError) -> ModelFailed:
    return ModelFailed(error.message, code="TooLong", status=500)


def _status(error: GatewayError) -> int:
    if isinstance(error, Overloaded):
        return 429
    return 500 if isinstance(error, ModelCrashed) else error.status


def _read_chat(document: dict[str, Any], max_tokens: int) -> tuple[openai.ChatRequest, list[ChatMessage]]:
    """The request, and its messages as the model's template is given them."""
    request = openai.parse_chat(document, max_tokens=max_tokens)
    return request, [ChatMessage(role=m.role, content=m.content, name=m.name) for m in request.messages]


def _check_supported(worker: Worker, request: openai.ChatRequest | openai.CompletionRequest, options: LMIConfig) -> None:
    """OpenAIError, which names the member, for a parameter that the model says it does not support."""
    if name := unsupported(worker, request.parameters, request.given, options):
        raise openai.OpenAIError(f"{name}: {not_supported(worker)}", param=name)


def _refuse_request(answer: Exchange | Wrapping, error: openai.OpenAIError) -> None:
    answer.respond(error.status, [JSON], error.body(), ending=Ending.REFUSED)


def _form_of(options: LMIConfig) -> openai.ChatForm:
    return _FORMS.get(options.output_formatter, openai.ChatForm.OPENAI)
