"""OpenAI's API on text models: chat completions, completions, and the list of models."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, final

import msgspec

from gateway.codecs.prompts import prompt_of
from gateway.codecs.threads import codec
from gateway.config import LimitsConfig, LMIConfig
from gateway.core.exchange import Exchange
from gateway.core.outbound import Outbound
from gateway.core.route import Needs, Row
from gateway.core.whole_body import receive_body
from gateway.dialects.answers import JSON, EventStreams, Wrapping, refusal_headers, reply_headers
from gateway.dialects.call import session_of
from gateway.dialects.text.conversation import chat_prompt_of, conversation_of
from gateway.dialects.text.requests import (
    LINE,
    Asked,
    OnePrompt,
    PromptReport,
    TextCalls,
    chat_prompt,
    check_format,
    count_tokens,
    decided,
    document_in,
    lists,
    not_supported,
    tell_passed,
    unreported,
    unsupported,
    within_ceiling,
    within_room,
)
from gateway.errors import (
    BadRequest,
    Ending,
    GatewayError,
    ModelCrashed,
    ModelFailed,
    ModelStalled,
    NoSuchPath,
    NotFound,
    NotPermitted,
    Overloaded,
    TooManyRequests,
    Unauthenticated,
)
from gateway.version import version
from gateway.workers.worker import Worker
from models.continuations import spoken
from models.convert import convertible
from models.messages import Family, Finish, FinishReason, Prompt, Token, ToolCall
from models.session import Session
from protocols import lmi, openai, text_members
from protocols.sse import CONTENT_TYPE

_ANY = ("", "tgi", "dummy")
"""Names of models that count as no name. Clients that must name a model send them (text-generation, huggingface_hub)."""
_PROMPTS_NOT_COUNTED = (b"x-everywire-usage", b"completion-only")
_UNCACHED = (b"cache-control", b"no-cache")
_EVENTS, _LINES = (((b"content-type", kind), _UNCACHED) for kind in (CONTENT_TYPE.encode(), b"application/jsonlines"))
_FORMS = {form.value: form for form in openai.ChatForm if form is not openai.ChatForm.OPENAI}


@final
class OpenAIDialect:
    """Serves OpenAI's clients."""

    def __init__(self, calls: TextCalls) -> None:
        self._calls, self._models, self._streams = calls, calls.models, calls.streams
        self._since = int(time.time())
        self._fingerprint = f"everywire-{version()}"

    # -- routes ------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """The routes. Every path below /v1 is OpenAI's, and has its errors."""
        row = partial(Row, dialect="openai", refuse=refuse, under="/v1")
        return [
            row("POST", "/v1/chat/completions", self.chat_completions),
            row("POST", "/v1/completions", self.completions),
            row("GET", "/v1/models", self.models, needs=Needs.METADATA),
            # not `name`, which a key is asked for before the handler is: only that knows whose the served names are
            row("GET", "/v1/models/{model}", self.model, needs=Needs.METADATA, slashes=True),
        ]

    async def chat_completions(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions."""
        document, size = await self._document(exchange)
        try:
            worker = self._worker(exchange, document)
        except openai.OpenAIError as e:
            _refuse_request(exchange.outbound, e)
            return
        await self.chat(exchange, worker, document, size, self._calls.options(worker))

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        document, size = await self._document(exchange)
        try:
            worker = self._worker(exchange, document)
            options = self._calls.options(worker)
            read = partial(_read_completion, worker, document, self._models.config.openai.max_tokens)
            request, said = await codec(size, read)
            del document, read
            if not request.parameters.extra:
                exchange.making(0)
            _check_supported(worker, request, options)
            request = _within_ceiling(worker, self._models.config.limits, request)
        except openai.OpenAIError as e:
            _refuse_request(exchange.outbound, e)
            return
        tell_passed(exchange, worker, said.unknown)
        encoder = openai.CompletionEncoder(
            request,
            id=f"cmpl-{exchange.id}",
            created=int(time.time()),
            model=request.model or worker.name,
            max_text=options.max_text,
        )
        prompts = [prompt_of(text, request.parameters, said) for text in request.prompts]
        answer = _Answer(exchange, encoder, exchange.outbound, request, worker, self._streams)
        await check_format(exchange, worker, said)
        await answer.run(prompts)

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models: the models that can answer as text models, by each of their names."""
        seen = self._models.seen_by(exchange.permit)
        named = {**seen, **{name: worker for name, worker in self._models.served.items() if worker.name in seen}}
        speakers = {name: w for name, w in named.items() if convertible(w.spec.family, Family.TEXT)}
        body = openai.models_body(
            [(name, self._since) for name in sorted(speakers)],
            contexts={name: worker.context for name, worker in speakers.items()},
            roots={name: worker.name for name, worker in speakers.items() if name != worker.name},
        )
        exchange.outbound.respond(200, [JSON], body)

    async def model(self, exchange: Exchange, model: str) -> None:
        """GET /v1/models/{model}, for a model of any family."""
        worker = self._models.called(exchange.permit, model)
        root = "" if model == worker.name else worker.name
        body = openai.model_body(model, created=self._since, context=worker.context, root=root)
        exchange.outbound.respond(200, [JSON], body)

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
        """Answers a request that has `messages`, which came as `size` bytes. `wrapping` takes the answer and the errors in
        place of the exchange."""
        if wrapping is None and exchange.dialect != "openai":
            exchange.words = refuse
        answer = wrapping or exchange.outbound
        give_back: Callable[[], None] | None = None
        try:
            # OpenAI's own routes always answer in its form; `output_formatter` holds at LMI's.
            form = openai.ChatForm.OPENAI if exchange.dialect == "openai" else _form_of(options)
            usual = form is openai.ChatForm.OPENAI
            most = self._models.config.openai.max_tokens if usual else lmi.Parameters().max_new_tokens
            request, decided = await codec(size, partial(_read_chat, worker, document, most))
            if not usual and request.tools:
                raise openai.OpenAIError(f"tools: not offered by {options.output_formatter}", param="tools")
            _check_supported(worker, request, options)
            request = _within_ceiling(worker, self._models.config.limits, request)
            if request.media:
                give_back = exchange.reserve_objects(request.media // 4 * 3)
            said = await codec(request.media, partial(conversation_of, worker, request, decided))
            tell_passed(exchange, worker, decided.unknown)
            encoder = openai.ChatEncoder(
                request,
                id=f"chatcmpl-{exchange.id}",
                created=int(time.time()),
                model=request.model or worker.name,
                form=form,
                fingerprint=self._fingerprint,
                max_text=options.max_text,
                show_thinking=usual and request.include_reasoning,
            )
            shown = _Answer(exchange, encoder, answer, request, worker, self._streams)
            prompt = chat_prompt_of(await chat_prompt(exchange, worker, said, size), request, said, decided)
            await check_format(exchange, worker, decided)
            await shown.run([prompt])
        except openai.OpenAIError as e:
            _refuse_request(answer, e)
        finally:
            if give_back is not None:
                give_back()

    async def _document(self, exchange: Exchange) -> tuple[dict[str, Any], int]:
        """The request's document, and the size of its body in bytes."""
        limits = self._models.config.limits
        body = await receive_body(exchange, min(limits.text_json, limits.body), setting="limits.text_json")
        try:
            return await document_in(exchange, body, "application/json", limits), len(body)
        except lmi.LMIError as e:
            raise BadRequest(e.message) from None

    def _worker(self, exchange: Exchange, document: dict[str, Any]) -> Worker:
        """The model that the request names, or the default. OpenAIError, which names the member, if it cannot answer;
        NotFound for an unknown model."""
        name, permit = openai.model_of(document), exchange.permit
        try:
            if name in self._models.workers:
                worker = self._models.named(permit, name, Family.TEXT, "openai")
            elif (served := self._models.by_served_name(permit, name)) is not None:
                self._models.check_family(served, Family.TEXT, "openai")
                worker = served
            elif name in _ANY:
                worker = self._models.unnamed(permit, self._models.config.openai.default_model, Family.TEXT, "openai")
            else:
                raise NotFound(_unknown(name))
        except BadRequest as e:
            raise openai.OpenAIError(e.message, param="model") from None
        exchange.model = worker.name
        worker.check_ready(exchange)
        return worker


@final
class _Answer:
    """The answer to one request: runs the model for its choices and sends them."""

    def __init__(
        self,
        exchange: Exchange,
        encoder: openai.ChatEncoder | openai.CompletionEncoder,
        answer: Outbound | Wrapping,
        request: openai.ChatRequest | openai.CompletionRequest,
        worker: Worker,
        streams: EventStreams,
    ) -> None:
        self.exchange, self.encoder, self.answer, self.worker = exchange, encoder, answer, worker
        self.request, self._streams = request, streams
        chat = request if type(encoder) is openai.ChatEncoder and type(request) is openai.ChatRequest else None
        self.calls = chat if chat is not None and chat.tools and chat.tool_choice != "none" else None
        """The request, if the model may call tools."""
        self.shows_thinking = chat is not None and chat.include_reasoning
        self._counts: list[int | None] = []
        """The number of tokens of each prompt that was begun; None: unknown."""
        self._asking: _ChoicesChannel | None = None
        self._text_member = "messages" if isinstance(request, openai.ChatRequest) else "prompt"
        self._reported = isinstance(request, openai.CompletionRequest) and request.shows_prompt
        if isinstance(answer, Outbound):
            exchange.fail = self._fail
        else:
            answer.in_band(self._error_event)

    async def run(self, prompts: list[Prompt]) -> None:
        """Calls the model for one prompt after the other, within one slot, and ends the answer. A model that makes one
        sequence of a prompt is called once for each choice."""
        exchange, worker, n = self.exchange, self.worker, self.request.n
        tells, calls = self.encoder.tells_usage, 1 if n == 1 or lists(worker, "n") else n
        kind = self.encoder.content_type
        with await worker.slots.take(exchange), self._streams.watched(self, kind, self.answer):
            for place, prompt in enumerate(prompts):
                self._counts.append(None)
                if worker.context:
                    parameters, self._counts[-1] = await within_room(exchange, worker, prompt.text, prompt.parameters)
                    prompt = msgspec.structs.replace(prompt, parameters=parameters)
                for number in range(calls):
                    one = prompt if calls == 1 else _one_of(prompt, number)
                    report = PromptReport(worker, "echo") if self._reported and not number else None
                    self._asking = channel = _ChoicesChannel(self, one, place, place * n + number, report)
                    channel.counted = self._counts[-1]
                    channel.session = session_of(exchange, worker, channel)
                    channel.counter = partial(count_tokens, exchange, worker, prompt.text) if tells else None
                    try:
                        await worker.call(channel.session, exchange, Family.TEXT)
                        channel.check_report(None)
                        await channel.count()
                        self.reckon()
                    finally:
                        self._asking = channel.session = None  # they know each other: a cycle would keep the request
                    channel.end()
                    if calls > 1:  # the next choice begins only now
                        self.put(self.encoder.finish_by_itself(place * n + number))
        self._finish()

    def reckon(self) -> None:
        """Updates the usage by the counts of the prompts' tokens that are known now."""
        if (channel := self._asking) is not None:
            self._counts[-1] = channel.prompt_tokens
        known = [count for count in self._counts if count is not None]
        # The sum is unknown unless each count is known.
        self.encoder.prompt_tokens = sum(known) if len(known) == len(self._counts) else 0

    async def room(self, size: int, others: int) -> None:
        """Waits for room for a chunk with `size` bytes of text and `others` alternative tokens."""
        await self.answer.wait_room(size + 2 * LINE * (1 + others) if self.encoder.streaming else 0)

    def put(self, chunk: bytes) -> None:
        """Sends a chunk, for which there is room."""
        if chunk:
            if not self.exchange.outbound.status:
                self.start()
            self.answer.push(chunk)

    def start(self) -> None:
        """Sends the head of a stream, before its first event."""
        form = _EVENTS if self.encoder.content_type == CONTENT_TYPE else _LINES
        self.answer.start(200, [*form, *self._more_fields()])

    def _more_fields(self) -> list[tuple[bytes, bytes]]:
        """More fields of the head, one of them if the usage leaves the prompts' tokens out."""
        fields = reply_headers(self.exchange)
        if self.encoder.tells_usage:
            self.reckon()
            if None in self._counts and not (self._asking and self._asking.will_count):
                fields.append(_PROMPTS_NOT_COUNTED)
        return fields

    def _finish(self) -> None:
        if self.exchange.outbound.finishing is not None:
            return
        encoder = self.encoder
        try:
            rest = encoder.end() if encoder.streaming else encoder.document()
        except openai.OpenAIError as e:
            raise _too_long(e) from None
        if not encoder.streaming:
            self.answer.respond(200, [JSON, *self._more_fields()], rest)
            return
        if not self.exchange.outbound.status:
            self.start()
        if rest:
            self.answer.push(rest)
        self.answer.finish()

    def _fail(self, error: GatewayError) -> None:
        """Answers an HTTP status before the head. After it, writes an event that clients raise, and ends the body whole."""
        if self.exchange.outbound.status:
            self.exchange.outbound.push(self._error_event(error))
            self.exchange.outbound.finish(error.ending)
        else:
            _refuse(self.exchange, error, self._error_of(error))

    def _error_event(self, error: GatewayError) -> bytes:
        return self.encoder.error(self._error_of(error))

    def _error_of(self, error: GatewayError) -> openai.OpenAIError:
        """The error in OpenAI's form, with the member of the request that the model blames."""
        said = _error_of(error)
        if isinstance(error, ModelFailed) and error.request_to_blame:
            name = error.message.partition(":")[0]
            given = self.request.given
            named = name if name in given.values() else given.get(name)
            said.param = self._text_member if error.too_long else named
        elif isinstance(error, ModelFailed) and error.code == "BadTemplateValue":
            said.param = error.message.partition(":")[0]
        return said


@final
class _ChoicesChannel(OnePrompt):
    """The channel of one prompt: the tokens of its choices come out."""

    def __init__(self, answer: _Answer, prompt: Prompt, place: int, first: int, report: PromptReport | None) -> None:
        super().__init__(answer.exchange, answer.worker, prompt, report)
        self._answer, self._place, self._first = answer, place, first
        self.text.shows_thinking = answer.shows_thinking
        self._called: dict[int, int] = {}
        """The index of the first call of each sequence that has one."""
        self.session: Session[Any, Any] | None = None
        """The session, which keeps the number of the prompt's tokens once a token has reported it."""
        self.counter: Callable[[], Awaitable[int | None]] | None = None
        """Counts the prompt's tokens; None if the answer has no usage, or once it was called."""
        self._prefilled = 0
        self.counted: int | None = None
        """The number of the prompt's tokens by the model's `count_tokens`, once it was called."""

    async def send(self, message: Token | ToolCall | Finish, /) -> None:
        answer, encoder, text = self._answer, self._answer.encoder, self.text
        if self._report is not None:
            self.check_report(message)
        passes = text.passes(message)
        if message.prompt_tokens is not None:
            self._count_prompt(message.prompt_tokens)
        if not passes:
            await text.drop()
            return
        if self.counter is not None and encoder.streaming:
            await self._count_before(message)
        sequence = message.sequence
        choice = self._first + sequence
        if type(message) is not Token:
            if type(message) is ToolCall and answer.calls is not None:
                await self._send_call(message, choice, answer.calls)
                return
            message = spoken(message)
        if type(message) is Finish:
            await answer.room(encoder.lead(choice) + text.held(sequence), 0)
        elif message.prefill:
            await answer.room(0, 0)
        else:
            size = encoder.lead(choice) + text.held(sequence)
            await answer.room(size + len(message.text) + len(message.data), len(message.top))
        said, message = message, text.take(message)
        try:
            if type(message) is Finish:
                rest = encoder.rest(text.rest(sequence), choice)
                if message.completion_tokens is not None:
                    encoder.count(message.completion_tokens, choice)
                answer.put(rest + encoder.finish(message.reason.value, choice))
                return
            if message.prefill:
                self._prefilled += 1
                encoder.prefill(message.id, message.text, message.log_prob, self._place, message.top, message.data)
                return
            reason = None if message.finish is None else message.finish.value
            if message.thinking:
                answer.put(encoder.thought(message.id, message.text, message.log_prob, reason, choice))
                text.sent()
                return
            # A token that now shows text held back by earlier ones had no bytes of its own: its bytes are empty then.
            unchanged = type(said) is Token and message.text == said.text
            chunk = encoder.token(
                message.id,
                message.text,
                message.log_prob,
                message.special,
                reason,
                message.top,
                choice,
                message.data or (None if unchanged else b""),
            )
        except openai.OpenAIError as e:
            raise _too_long(e) from None
        answer.put(chunk)
        text.sent()

    async def _send_call(self, call: ToolCall, choice: int, request: openai.ChatRequest) -> None:
        """Sends a piece of a call. If the client takes one call at most, the text ends before the second."""
        answer, encoder, text = self._answer, self._answer.encoder, self.text
        assert isinstance(encoder, openai.ChatEncoder)
        size = encoder.lead(choice) + text.held(call.sequence) + len(call.arguments) + len(call.name) + len(call.id)
        await answer.room(size, 0)
        if self._called.setdefault(call.sequence, call.index) != call.index and not request.parallel_tool_calls:
            if "parallel_tools" in answer.worker.features:
                message = f"model {answer.worker.name!r} has called a second tool, and parallel_tool_calls is false"
                raise ModelFailed(message, code="UnexpectedToolCall", status=500)
            answer.put(encoder.finish(FinishReason.TOOL_CALLS.value, choice))
            text.cut(call.sequence)
            return
        taken = text.take(call)
        reason = None if taken.finish is None else taken.finish.value
        try:
            rest = encoder.rest(text.rest(call.sequence), choice)
            piece = encoder.call(
                call.index, call.id, call.name, call.arguments, sequence=choice, finish=reason, tokens=call.tokens
            )
        except openai.OpenAIError as e:
            raise _too_long(e) from None
        answer.put(rest + piece)
        text.sent()

    @property
    def prompt_tokens(self) -> int | None:
        """The number of the prompt's tokens: the one that the model has set, otherwise that of the prompt tokens it has
        sent, otherwise the result of its `count_tokens`; None if unknown."""
        said = None if self.session is None else self.session.prompt_tokens
        return said if said is not None else self._prefilled or self.counted

    @property
    def will_count(self) -> bool:
        """True if `count` has yet to count the prompt's tokens: a comment may send the head before."""
        return self.counter is not None and self._answer.worker.said("count_tokens") is not None

    async def count(self) -> None:
        """Counts the prompt's tokens, if the answer has usage and the model has not reported their number."""
        if (counter := self.counter) is not None:
            self.counter = None
            if self.prompt_tokens is None:
                self.counted = await counter()

    async def _count_before(self, message: Token | ToolCall | Finish) -> None:
        """Counts the prompt's tokens before the first chunk, whose head shows whether the usage has them."""
        if message.prompt_tokens is None and not (isinstance(message, Token) and message.prefill):
            await self.count()
            self._answer.reckon()

    def _count_prompt(self, count: int) -> None:
        assert self.session is not None
        self.session.prompt_tokens = count
        self._answer.reckon()

    def end(self) -> None:
        """Sends text that was held back, after the model has returned or was stopped."""
        answer = self._answer
        try:
            for sequence, text in self.text.rests():
                answer.put(answer.encoder.rest(text, self._first + sequence))
        except openai.OpenAIError as e:
            raise _too_long(e) from None


def refuse(exchange: Exchange, error: GatewayError) -> None:
    """Answers an error before the head in OpenAI's form. Overload is 429, as its clients retry that."""
    _refuse(exchange, error, _error_of(error))


def _refuse(exchange: Exchange, error: GatewayError, said: openai.OpenAIError) -> None:
    exchange.outbound.respond(said.status, refusal_headers(error), said.body(), ending=error.ending)


def _unknown(model: str) -> str:
    return f"no model {model[:100]!r}; GET /v1/models lists those that there are"


def _error_of(error: GatewayError) -> openai.OpenAIError:
    match error:
        case NoSuchPath():
            return openai.OpenAIError(error.message, 404, "not_found_error", code="unknown_url")
        case Unauthenticated():
            return openai.OpenAIError(error.message, 401, code="invalid_api_key")
        case NotPermitted(model=str(model)):  # like an unknown model
            return openai.OpenAIError.of_status(404, _unknown(model))
        case TooManyRequests():
            return openai.OpenAIError(error.message, 429, "rate_limit_error", code="rate_limit_exceeded")
        case ModelFailed() if error.request_to_blame:
            return openai.OpenAIError(error.message, code="context_length_exceeded" if error.too_long else None)
        case ModelStalled():
            return openai.OpenAIError(error.message, error.status, "timeout_error", code=error.code)
        case Overloaded():
            return openai.OpenAIError.of_status(429, error.message)
        case ModelCrashed():
            return openai.OpenAIError.of_status(500, error.message)
        case _:
            return openai.OpenAIError.of_status(error.status, error.message)


def _too_long(error: openai.OpenAIError) -> ModelFailed:
    return ModelFailed(error.message, code="TooLong" if error.code == "answer_too_long" else "BadAnswer", status=500)


def _read_chat(worker: Worker, document: dict[str, Any], max_tokens: int) -> tuple[openai.ChatRequest, text_members.Decided]:
    """The request, and the judgement on its members."""
    features = worker.features
    request, said = _decided(
        worker, openai.parse_chat(document, max_tokens=max_tokens, features=features, model=worker.name), "chat"
    )
    if said.prefill and request.messages[-1].role != "assistant":
        asked = "continue_final_message" if document.get("continue_final_message") else "add_generation_prompt"
        role = request.messages[-1].role
        message = (
            f"{asked}: expected the last message to be the assistant's, which is to be continued, got one of role {role}"
        )
        raise openai.OpenAIError(message, param=asked)
    return request, said


def _read_completion(
    worker: Worker, document: dict[str, Any], max_tokens: int
) -> tuple[openai.CompletionRequest, text_members.Decided]:
    """The request, and the judgement on its members."""
    return _decided(worker, openai.parse_completion(document, max_tokens=max_tokens), "completions")


def _decided(worker: Worker, request: Asked, form: text_members.Form) -> tuple[Asked, text_members.Decided]:
    """The request with what its model gets, and the judgement on its members. OpenAIError names one that is refused."""
    try:
        return decided(worker, request, form)
    except text_members.MemberRefused as e:
        raise openai.OpenAIError(e.message, param=e.path) from None


def _check_supported(worker: Worker, request: openai.ChatRequest | openai.CompletionRequest, options: LMIConfig) -> None:
    """Raises OpenAIError, which names the member, for a parameter that the model does not support, and for the tokens of a
    prompt that it does not report."""
    if name := unsupported(worker, request.parameters, request.given, options):
        raise openai.OpenAIError(f"{name}: {not_supported(worker)}", param=name)
    parameters = request.parameters
    for name, more in (("best_of", parameters.best_of > request.n), ("num_beams", parameters.num_beams > 1)):
        if more and not lists(worker, name):
            said = request.given.get(name, name)
            message = (
                f"{said}: expected at most n ({request.n}), as model {worker.name!r} does not list {name} in its parameters"
            )
            raise openai.OpenAIError(message, param=said)
    shown = isinstance(request, openai.CompletionRequest) and request.shows_prompt
    if shown and (why := unreported(worker, request.parameters.prompt_logprobs or 0)):
        raise openai.OpenAIError(f"echo: {why}", param="echo")


def _within_ceiling(worker: Worker, limits: LimitsConfig, request: Asked) -> Asked:
    """The request with its number of tokens within the ceiling. OpenAIError, which names the member, if it asks for more."""
    try:
        return within_ceiling(worker, limits, request)
    except lmi.LMIError as e:
        raise openai.OpenAIError(e.message.removeprefix("parameters."), param=request.given["max_new_tokens"]) from None


def _refuse_request(answer: Outbound | Wrapping, error: openai.OpenAIError) -> None:
    answer.respond(error.status, [JSON], error.body(), ending=Ending.REFUSED)


def _form_of(options: LMIConfig) -> openai.ChatForm:
    return _FORMS.get(options.output_formatter, openai.ChatForm.OPENAI)


def _one_of(prompt: Prompt, number: int) -> Prompt:
    """The prompt for one of several choices: the seeds of all differ, and the prompt's tokens are reported once."""
    given = prompt.parameters
    changed: dict[str, Any] = {"n": 1, "best_of": 1}
    if number:
        changed |= {"seed": None if given.seed is None else given.seed + number}
        changed |= {"decoder_input_details": False, "prompt_logprobs": None}
    return msgspec.structs.replace(prompt, parameters=msgspec.structs.replace(given, **changed))
