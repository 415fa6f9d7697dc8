"""LMI's routes for a model with its own formatters, `@input_formatter` and `@output_formatter`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, final

from gateway.codecs.formatting import Formatting, JSONBounds
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
from models.continuations import spoken
from models.errors import ModelError
from models.formatters import TextInput
from models.messages import Family, Finish, FinishReason, Prompt, Token, ToolCall, utf8
from protocols import lmi
from protocols.json.strict import cost_of

_LEADING = 64  # bytes in which JSON must begin, so that its cost is counted before it is read


class Formats(Protocol):
    """The `Formatting` of one request, called here or in the process that runs the model."""

    @property
    def writes(self) -> bool:
        """See `Formatting.writes`."""

    @property
    def instance(self) -> Any:
        """The process that the request must run in; None: any, or this one."""

    def read(
        self, content: bytes, fields: Mapping[str, str], bounds: JSONBounds, name: str, options: Mapping[str, str], /
    ) -> dict[str, Any]:
        """See `Formatting.read`."""

    def take(self, asked: TextInput) -> None:
        """See `Formatting.take`."""

    async def write(self, tokens: Sequence[Token]) -> str:
        """See `Formatting.write`."""

    def forget(self) -> None:
        """Called when the request is over."""


@final
class _Here:
    """A formatting whose functions are called in this process."""

    instance: Any = None

    def __init__(self, formatting: Formatting) -> None:
        self._formatting = formatting
        self.read, self.take = formatting.read, formatting.take

    @property
    def writes(self) -> bool:
        return self._formatting.writes

    async def write(self, tokens: Sequence[Token]) -> str:
        return self._formatting.write(tokens)

    def forget(self) -> None:
        """Does nothing: no other process holds the formatting."""


def has_formatters(worker: Worker) -> bool:
    """True if the model has a formatter of its own."""
    return worker.spec.input_formatter is not None or worker.spec.output_formatter is not None


@contextmanager
def formatting_of(exchange: Exchange, worker: Worker) -> Iterator[Formats]:
    """The formatting of one request, for the length of the block. Unavailable if the model takes no calls, WorkerLost if
    none of its processes runs."""
    worker.check_ready(exchange, room=False)
    elsewhere, spec = worker.formatting, worker.spec
    formatting: Formats = (
        _Here(Formatting(exchange.id, spec.input_formatter, spec.output_formatter))
        if elsewhere is None
        else elsewhere(exchange.id)
    )
    try:
        yield formatting
    finally:
        formatting.forget()


async def read_input(
    exchange: Exchange, worker: Worker, body: memoryview, limits: LimitsConfig, formatting: Formats
) -> dict[str, Any]:
    """The request of the schema that the model's input formatter makes of a body. It runs in a thread, which is abandoned if
    the client leaves. ModelFailed, ModelCrashed; Overloaded if the budget has no room for its objects."""
    bounds = JSONBounds(limits.json_depth, limits.json_containers, limits.json_values)
    cost = 0
    if bytes(body[:_LEADING]).lstrip()[:1] in (b"{", b"["):
        cost = await codec(len(body), partial(cost_of, body, containers=bounds.containers, values=bounds.values))
    fields = exchange.owner.door.fields(exchange.request.headers)

    def read() -> dict[str, Any]:
        return formatting.read(bytes(body), fields, bounds, worker.name, worker.spec.options)

    exchange.making(len(body) + cost)  # the body is copied, and the formatter may read its JSON
    try:
        return await worker.run_author_code(read)
    except BaseException as e:
        raised(exchange, worker, "input formatter", e)


def take_input(exchange: Exchange, worker: Worker, formatting: Formats, asked: TextInput) -> None:
    """Shows the request to the output formatter. ModelFailed if it cannot be sent to the process that runs the formatter."""
    try:
        formatting.take(asked)
    except ModelError as e:
        raised(exchange, worker, "output formatter", e)


@final
class FormattedAnswer:
    """The answer to one prompt, written by the model's output formatter."""

    def __init__(
        self,
        exchange: Exchange,
        worker: Worker,
        prompt: Prompt,
        formatting: Formats,
        answer: Outbound | Wrapping,
        options: LMIConfig,
    ) -> None:
        self._exchange, self._worker, self._answer, self._formatting = exchange, worker, answer, formatting
        self._channel = _FormattedChannel(self, exchange, worker, prompt, formatting.instance, options.max_text)

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
        """Sends a piece, for which there is room."""
        if piece:
            self._start()
            self._answer.push(piece)

    async def write(self, tokens: Sequence[Token]) -> str:
        """The formatter's text for one more token. ModelFailed, ModelCrashed."""
        try:
            return await self._formatting.write(tokens)
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
        """The error on a line of its own, whatever form the formatter writes."""
        return b"\n%b\n" % lmi.error_body(error.message)


@final
class _FormattedChannel(OnePrompt):
    """The channel of one prompt: each token goes through the formatter."""

    def __init__(
        self,
        answer: FormattedAnswer,
        exchange: Exchange,
        worker: Worker,
        prompt: Prompt,
        runs_in: Any,
        max_text: int,
    ) -> None:
        super().__init__(exchange, worker, prompt)
        self._answer, self._left = answer, max_text
        self.runs_in = runs_in
        """The process of the model that the session must run in; None: any."""
        self._prefill: list[Token] = []  # tokens of the prompt that the formatter has not seen yet
        self._over: dict[int, bool] = {}  # each sequence that has begun; True once it has ended

    async def send(self, message: Token | ToolCall | Finish, /) -> None:
        text, message = self.text, spoken(message)
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
            self._prefill.append(message)
        else:
            await self._add(message)
        text.sent()

    async def _add(self, token: Token) -> None:
        self._over[token.sequence] = token.finish is not None
        prefill, self._prefill = self._prefill, []
        piece = utf8(await self._answer.write([*prefill, token]))
        if len(piece) > LINE + len(token.text):  # there is room for so many
            await self._answer.room(len(piece))
        self._answer.put(piece)

    async def _end(self, number: int, reason: FinishReason, rest: str, stop: str = "") -> None:
        """Ends a sequence. If its last token had no `finish`, the formatter sees one more token, with the text that was held
        back."""
        if not self._over.get(number):
            await self._add(Token(text=rest, special=not rest, finish=reason, sequence=number, stop=stop))

    async def end(self) -> None:
        """Ends every sequence after the model has returned or was stopped."""
        for number in tuple(self._over) or (0,):
            await self._end(number, FinishReason.EOS_TOKEN, self.text.rest(number))
