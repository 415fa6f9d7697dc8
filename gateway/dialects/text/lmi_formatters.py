"""LMI's routes of a model with formatters of its own, `@input_formatter` and `@output_formatter`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, final

from gateway.codecs.prompts import prompt_of
from gateway.codecs.threads import codec
from gateway.config import LimitsConfig, LMIConfig
from gateway.core.exchange import Exchange
from gateway.core.outbound import Outbound
from gateway.dialects.answers import Wrapping, reply_headers, reply_value
from gateway.dialects.call import session_of
from gateway.dialects.text.lmi_errors import refuse_as_lmi
from gateway.dialects.text.requests import LINE, OnePrompt, raised
from gateway.errors import GatewayError, ModelFailed
from gateway.workers.worker import Worker
from models.errors import ModelError
from models.formatters import Input, OutputFormatter, TextGenerationOutput, TextInput, TextSequence
from models.messages import Family, Finish, FinishReason, Prompt, Token, utf8
from protocols import lmi
from protocols.strict_json import JSONError, cost_of, loads

T = TypeVar("T")

_LEADING = 64  # bytes of white space before JSON, at most, where its cost is to be known
_FORMS = frozenset(form.value for form in lmi.Formatter)


async def read_input(exchange: Exchange, worker: Worker, body: memoryview, limits: LimitsConfig) -> TextInput:
    """What the model's own formatter makes of a request, in a thread, which is left to itself when the client leaves.
    ModelFailed, ModelCrashed; Overloaded where there is no memory for what it may make of it."""
    formatter = worker.spec.input_formatter
    assert formatter is not None
    fields, options = exchange.owner.door.fields(exchange.request.headers), dict(worker.spec.options)

    containers, values = limits.json_containers, limits.json_values
    cost = 0
    if bytes(body[:_LEADING]).lstrip()[:1] in (b"{", b"["):
        cost = await codec(len(body), partial(cost_of, body, containers=containers, values=values))

    def decode(content: bytes) -> Any:
        try:
            return loads(content, what="the body", depth=limits.json_depth, containers=containers, values=values)
        except JSONError as e:
            said = e.message
        if "(limits." in said:
            raise ModelError(said, code="BadInput", status=400)
        raise ModelError(said, code="BadInput", status=424)

    def read() -> Any:
        return formatter(Input(bytes(body), fields, decode=decode), model_name=worker.name, configs=options)

    exchange.making(len(body) + cost)  # it is copied there, and may be read
    try:
        found = await worker.run_author_code(read)
    except BaseException as e:
        raised(exchange, worker, "input formatter", e)
    if not isinstance(found, TextInput):
        raise _wrong(f"the input formatter returned {type(found).__name__}, not a TextInput")
    if not isinstance(found.input_text, str):
        raise _wrong(f"the input formatter gave an input_text of type {type(found.input_text).__name__}, not str")
    return found


def formatter_of(worker: Worker, asked: TextInput | None) -> OutputFormatter | None:
    """Who writes the answer: the function that the input formatter has chosen for this request, else the model's own; nobody
    where it has chosen one of the schema's forms by name."""
    chosen = None if asked is None else asked.output_formatter
    if callable(chosen):
        return chosen
    return None if isinstance(chosen, str) and chosen in _FORMS else worker.spec.output_formatter


def document_of(found: TextInput) -> dict[str, Any]:
    """The request of the schema that a formatter's is."""
    given: Any = found.parameters
    try:
        parameters = {} if given is None else dict(given)
    except (TypeError, ValueError):
        raise _wrong(f"the input formatter gave parameters of type {type(given).__name__}, not a mapping") from None
    chosen: Any = found.output_formatter
    if isinstance(chosen, str):
        parameters["output_formatter"] = chosen
    elif chosen is not None and not callable(chosen):
        raise _wrong(f"the input formatter gave an output_formatter of type {type(chosen).__name__}, not str or a function")
    return {"inputs": found.input_text, "stream": found.stream, "parameters": parameters}


@final
class FormattedAnswer:
    """One prompt's answer in the words of its model."""

    def __init__(
        self,
        exchange: Exchange,
        worker: Worker,
        request: lmi.TextRequest,
        asked: TextInput,
        formatter: OutputFormatter,
        answer: Outbound | Wrapping,
        options: LMIConfig,
    ) -> None:
        self._exchange, self._worker, self._answer = exchange, worker, answer
        asked.request_id = exchange.id
        prompt = prompt_of(request.inputs, request.parameters)
        self._channel = _FormattedChannel(self, exchange, worker, prompt, asked, formatter, options.max_text)

    async def run(self) -> None:
        """Runs the model and ends the answer."""
        worker, exchange = self._worker, self._exchange
        if isinstance(self._answer, Outbound):
            exchange.fail = self._fail
        else:
            self._answer.in_band(self._error_line)
        with await worker.slots.take(exchange):
            await worker.call(session_of(exchange, worker, self._channel), exchange, Family.TEXT)
        if exchange.outbound.finishing is None:
            await self._channel.end()
            self._start()
            self._answer.finish()

    async def room(self, size: int) -> None:
        await self._answer.wait_room(size)

    def put(self, piece: bytes) -> None:
        """Sends what there is room for."""
        if piece:
            self._start()
            self._answer.push(piece)

    def call(self, formatter: Callable[[TextGenerationOutput], T], output: TextGenerationOutput) -> T:
        """What the formatter makes of a step. ModelFailed, ModelCrashed."""
        try:
            return formatter(output)
        except BaseException as e:
            raised(self._exchange, self._worker, "output formatter", e)

    def _start(self) -> None:
        exchange = self._exchange
        if not exchange.outbound.status:
            kind = reply_value(exchange, "content-type")  # LMI sets none: only the formatter knows what it writes
            head = [(b"content-type", kind.encode())] if kind else []
            self._answer.start(200, [*head, *lmi.response_headers(), *reply_headers(exchange)])

    def _fail(self, error: GatewayError) -> None:
        if self._exchange.outbound.status:
            self._exchange.outbound.push(self._error_line(error))
            self._exchange.outbound.finish(error.ending)
        else:
            refuse_as_lmi(self._exchange, error)

    def _error_line(self, error: GatewayError) -> bytes:
        """On a line of its own, whatever the formatter writes."""
        return b"\n%b\n" % lmi.error_body(error.message)


@final
class _FormattedChannel(OnePrompt):
    """One prompt in; tokens out, each through the formatter."""

    def __init__(
        self,
        answer: FormattedAnswer,
        exchange: Exchange,
        worker: Worker,
        prompt: Prompt,
        asked: TextInput,
        formatter: OutputFormatter,
        max_text: int,
    ) -> None:
        super().__init__(exchange, worker, prompt)
        self._answer, self._formatter, self._left = answer, formatter, max_text
        self._output = TextGenerationOutput(asked.request_id, asked)

    async def send(self, message: Token | Finish, /) -> None:
        text = self.text
        if not text.passes(message):
            await text.drop()
            return
        said, data = (message.text, message.data) if type(message) is Token else ("", b"")
        await self._answer.room(LINE + text.held(message.sequence) + len(said) + len(data))
        self._left -= len(utf8(said)) + len(data) + LINE  # the formatter may look at all of them
        if self._left < 0:
            raise ModelFailed("the answer and its tokens are over the limit (lmi.max_text)", code="TooLong", status=424)
        message = text.take(message)
        if type(message) is Finish:
            await self._end(message.sequence, message.reason, text.rest(message.sequence), message.stop)
        elif message.prefill:
            self._output.prompt_tokens_details.append(message)
        else:
            await self._add(self._output.sequences.setdefault(message.sequence, TextSequence()), message)
        text.sent()

    async def _add(self, sequence: TextSequence, token: Token) -> None:
        sequence.add(token, None if token.finish is None else token.finish.value)
        text = self._answer.call(self._formatter, self._output)
        if not isinstance(text, str):
            raise _wrong(f"the output formatter returned {type(text).__name__}, not str")
        piece = utf8(text)
        if len(piece) > LINE + len(token.text):  # there is room for so many
            await self._answer.room(len(piece))
        self._answer.put(piece)

    async def _end(self, number: int, reason: FinishReason, rest: str, stop: str = "") -> None:
        """A sequence is over whose last token did not say so: the formatter sees one more, which has only what was held
        back."""
        sequence = self._output.sequences.setdefault(number, TextSequence())
        if sequence.finish_reason is None:
            await self._add(sequence, Token(text=rest, special=not rest, finish=reason, sequence=number, stop=stop))

    async def end(self) -> None:
        """The model has returned, or was stopped."""
        for number in tuple(self._output.sequences) or (0,):
            await self._end(number, FinishReason.EOS_TOKEN, self.text.rest(number))


def _wrong(message: str) -> ModelFailed:
    return ModelFailed(message, code="BadFormatter", status=500)
