"""LMI's routes of a model with formatters of its own: requests that its `@input_formatter` reads, answers that its
`@output_formatter` writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, final

import trio

from gateway.config import LMIConfig
from gateway.dialects.base import Wrapping, reply_headers, reply_of, reply_value, session_of
from gateway.dialects.lmi_refusals import refuse_as_lmi
from gateway.dialects.text_calls import LINE, prompt_of, raised
from gateway.errors import GatewayError, ModelFailed
from gateway.exchange import Exchange
from gateway.workers.worker import Worker
from models.formatters import Input, OutputFormatter, TextGenerationOutput, TextInput, TextSequence
from models.messages import Family, Finish, FinishReason, Prompt, Token
from models.session import Channel
from models.utf8 import utf8
from protocols import lmi

T = TypeVar("T")

_FORMS = frozenset(form.value for form in lmi.Formatter)


async def read_input(exchange: Exchange, worker: Worker, body: memoryview) -> TextInput:
    """What the model's own formatter makes of a request, in a thread, which is left to itself when the client leaves.
    ModelFailed, ModelCrashed."""
    formatter = worker.spec.input_formatter
    assert formatter is not None
    item = Input(bytes(body), {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.request.headers})
    read = partial(formatter, item, model_name=worker.name, configs=dict(worker.spec.options))
    try:
        found = await worker.aside(read)
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
    if isinstance(found.output_formatter, str):
        parameters["output_formatter"] = found.output_formatter
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
        answer: Exchange | Wrapping,
        options: LMIConfig,
    ) -> None:
        self._exchange, self._worker, self._answer = exchange, worker, answer
        asked.request_id = exchange.id
        self._channel = _FormattedChannel(self, request, asked, formatter, options.max_text)

    async def run(self) -> None:
        """Runs the model and ends the answer."""
        worker, exchange = self._worker, self._exchange
        if isinstance(self._answer, Exchange):
            exchange.fail = self._fail
        else:
            self._answer.in_band(self._error_line)
        with await worker.slot(exchange):
            await worker.call(session_of(exchange, worker, self._channel), exchange, Family.TEXT)
        if exchange.finishing is None:
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

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    async def turn(self) -> None:
        await self._exchange.turn()

    def call(self, formatter: Callable[[TextGenerationOutput], T], output: TextGenerationOutput) -> T:
        """What the formatter makes of a step. ModelFailed, ModelCrashed."""
        try:
            return formatter(output)
        except BaseException as e:
            raised(self._exchange, self._worker, "output formatter", e)

    def _start(self) -> None:
        exchange = self._exchange
        if not exchange.status:
            kind = reply_value(exchange, "content-type")  # LMI sets none: only the formatter knows what it writes
            head = [(b"content-type", kind.encode())] if kind else []
            self._answer.start(200, [*head, *lmi.response_headers(), *reply_headers(exchange)])

    def _fail(self, error: GatewayError) -> None:
        if self._exchange.status:
            self._exchange.push(self._error_line(error))
            self._exchange.finish(error.ending)
        else:
            refuse_as_lmi(self._exchange, error)

    def _error_line(self, error: GatewayError) -> bytes:
        """On a line of its own, whatever the formatter writes."""
        return b"\n%b\n" % lmi.error_body(error.message)


@final
class _FormattedChannel(Channel[Prompt, Any]):
    """One prompt in; tokens out, each through the formatter."""

    def __init__(
        self,
        answer: FormattedAnswer,
        request: lmi.TextRequest,
        asked: TextInput,
        formatter: OutputFormatter,
        max_text: int,
    ) -> None:
        self._answer, self._request, self._formatter, self._left = answer, request, formatter, max_text
        self._output = TextGenerationOutput(asked.request_id, asked)
        self._most = request.parameters.max_new_tokens
        self._overrun = False
        self.exhausted = False

    @property
    def reply(self) -> dict[str, str]:
        return self._answer.reply

    async def receive(self) -> Prompt:
        await self._answer.turn()
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        return prompt_of(self._request.inputs, self._request.parameters)

    @property
    def complete(self) -> bool:
        """Whether each sequence that was asked for has its last token, or the model has gone on after that of all that it
        has begun."""
        return self._overrun or (len(self._output.sequences) >= self._request.parameters.n and self._output.finished)

    async def send(self, message: Token | Finish, /) -> None:
        if self.complete:
            raise trio.ClosedResourceError("the answer is complete")
        text = message.text if isinstance(message, Token) else ""
        await self._answer.room(LINE + len(text))
        if not isinstance(message, Token | Finish):
            raise TypeError(f"a text call is answered with Token and Finish, not {type(message).__name__}")
        self._left -= len(utf8(text)) + LINE  # the formatter may look at all of them
        if self._left < 0:
            raise ModelFailed("the answer and its tokens are over the limit (lmi.max_text)", code="TooLong", status=424)
        if isinstance(message, Finish):
            await self._end(message.sequence, message.reason)
            return
        if message.prefill:
            self._output.prompt_tokens_details.append(message)
            return
        sequence = self._output.sequences.setdefault(message.sequence, TextSequence())
        if sequence.finish_reason is not None:
            self._overrun = self._output.finished
            raise trio.ClosedResourceError(f"sequence {message.sequence} is complete")
        finish = message.finish
        if finish is None and len(sequence.tokens) + 1 == self._most:
            finish = FinishReason.LENGTH
        await self._add(sequence, message, finish)

    async def _add(self, sequence: TextSequence, token: Token, finish: FinishReason | None) -> None:
        sequence.add(token, None if finish is None else finish.value)
        text = self._answer.call(self._formatter, self._output)
        if not isinstance(text, str):
            raise _wrong(f"the output formatter returned {type(text).__name__}, not str")
        piece = utf8(text)
        if len(piece) > LINE + len(token.text):  # there is room for so many
            await self._answer.room(len(piece))
        self._answer.put(piece)

    async def _end(self, number: int, reason: FinishReason) -> None:
        """A sequence is over whose last token did not say so: the formatter sees one more, which is empty."""
        sequence = self._output.sequences.setdefault(number, TextSequence())
        if sequence.finish_reason is None:
            await self._add(sequence, Token(text="", special=True, finish=reason, sequence=number), reason)

    async def end(self) -> None:
        """The model has returned."""
        for number in tuple(self._output.sequences) or (0,):
            await self._end(number, FinishReason.EOS_TOKEN)


def _wrong(message: str) -> ModelFailed:
    return ModelFailed(message, code="BadFormatter", status=500)
