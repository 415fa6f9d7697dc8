"""LMI's dynamic batch: several prompts in one request, generated side by side, one text for each in the answer."""

from __future__ import annotations

from functools import partial
from typing import Any, final

import trio

from gateway.config import LMIConfig
from gateway.dialects.base import JSON, Wrapping, codec, reply_headers, reply_of, session_of
from gateway.dialects.lmi_refusals import refuse_as_dynamic
from gateway.dialects.text_calls import LINE, TextCalls, check_supported, prompt_of, rule_of, table_of
from gateway.doorbell import Doorbell
from gateway.errors import Ending, GatewayError, ModelFailed
from gateway.exchange import Exchange
from gateway.workers.worker import Worker
from models.messages import Family, Finish, Prompt, Token
from models.session import Channel
from protocols import lmi

_PATIENCE = 2  # checkpoints in which the other prompts may bring a token for a line that has begun


@final
class DynamicDialect:
    """Serves the schema of `option.rolling_batch=disable`."""

    def __init__(self, calls: TextCalls) -> None:
        self._calls = calls

    async def generate(
        self,
        exchange: Exchange,
        worker: Worker,
        document: dict[str, Any],
        size: int,
        options: LMIConfig,
        wrapping: Wrapping | None,
    ) -> None:
        """Answers the request that a document is, which came as `size` bytes. The prompts are generated at once,
        within one slot."""
        answer = exchange if wrapping is None else wrapping
        try:
            read = partial(
                lmi.parse_dynamic_document,
                document,
                streaming=options.enable_streaming,
                max_prompts=options.max_prompts,
                table=table_of(options),
                rule=rule_of(options),
            )
            request = await codec(size, read)
            check_supported(worker, request.parameters, request.given, options)
        except lmi.LMIError as e:
            body = lmi.dynamic_error_body(e.message, e.status)
            answer.respond(e.status, [JSON, *lmi.response_headers()], body, ending=Ending.REFUSED)
            return
        batch = _Batch(exchange, request, answer, options)
        if wrapping is None:
            exchange.fail = batch.fail
        else:
            wrapping.in_band(batch.error_line)
        with await worker.slot(exchange):
            await batch.run(worker)
        batch.finish()


@final
class _Batch:
    """The prompts of one request, and the answer that they share."""

    def __init__(
        self, exchange: Exchange, request: lmi.DynamicRequest, answer: Exchange | Wrapping, options: LMIConfig
    ) -> None:
        self.exchange, self.request, self.answer = exchange, request, answer
        self.encoder = lmi.DynamicEncoder(request, streaming=options.enable_streaming, max_text=options.max_text)
        self._sending = trio.Lock()  # one of them waits for room at a time
        self._begun = Doorbell()
        self._lines = 0

    async def run(self, worker: Worker) -> None:
        """Runs the model for each prompt. The first failure is the answer's, and stops the others."""
        exchange = self.exchange
        try:
            async with trio.open_nursery() as around:
                if self.encoder.streaming and len(self.request.inputs) > 1:
                    around.start_soon(self._complete_lines)
                async with trio.open_nursery() as nursery:
                    for place in range(len(self.request.inputs)):
                        session = session_of(exchange, worker, _PromptChannel(self, place))
                        nursery.start_soon(partial(self._run_one, place, worker.call, session, exchange, Family.TEXT))
                around.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise _the_one(group) from None

    async def _run_one(self, place: int, call: Any, *arguments: Any) -> None:
        await call(*arguments)
        await self.put(self.encoder.end, place)

    async def put(self, make: Any, *arguments: Any, size: int = 0) -> bool:
        """Sends what the encoder makes, once there is room for so much. False where it makes nothing."""
        streaming = self.encoder.streaming
        async with self._sending:
            await self.answer.wait_room(size + LINE if streaming else 0)
            try:
                line = make(*arguments)
            except lmi.LMIError as e:
                raise ModelFailed(e.message, code="TooLong", status=e.status) from None
            if line:
                self._lines += 1
                self._start()
                self.answer.push(line)
            return bool(line)

    def begun(self) -> None:
        """There is a token on a line that others are still to complete."""
        self._begun.ring()

    async def _complete_lines(self) -> None:
        """Sends the tokens of a line whose other prompts have none ready, so that nobody waits for the slowest: who has one
        is before this in the queue for the lock."""
        while True:
            await self._begun.wait()
            line = self._lines
            for _ in range(_PATIENCE):
                await trio.lowlevel.checkpoint()
            await self.put(self._rest_of, line)

    def _rest_of(self, line: int) -> bytes:
        if line == self._lines:
            return self.encoder.flush()
        self._begun.ring()  # there may be another by now
        return b""

    def _start(self) -> None:
        if not self.exchange.status:
            head = [(b"content-type", self.encoder.content_type.encode()), *lmi.response_headers()]
            self.answer.start(200, [*head, *reply_headers(self.exchange)])

    def finish(self) -> None:
        """Every prompt has its end."""
        if self.exchange.finishing is not None:
            return
        rest = self.encoder.finish()
        if self.encoder.streaming:
            self._start()
            if rest:
                self.answer.push(rest)
            self.answer.finish()
        else:
            self.answer.respond(200, [JSON, *lmi.response_headers(), *reply_headers(self.exchange)], rest)

    def fail(self, error: GatewayError) -> None:
        """Before the head an HTTP status; in mid-stream a last line, then a whole end of the body."""
        if self.exchange.status:
            self.exchange.push(self.error_line(error))
            self.exchange.finish(error.ending)
        else:
            refuse_as_dynamic(self.exchange, error)

    def error_line(self, error: GatewayError) -> bytes:
        """The last line of a stream that failed."""
        return self.encoder.error(error.message)


@final
class _PromptChannel(Channel[Prompt, Any]):
    """One of the prompts in; its tokens out, to where those of the others go."""

    def __init__(self, batch: _Batch, place: int) -> None:
        self._batch, self._place = batch, place
        self.exhausted = self._complete = False

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._batch.exchange)

    @property
    def complete(self) -> bool:
        """Whether it has its last token."""
        return self._complete or self._batch.encoder.ended(self._place)

    async def receive(self) -> Prompt:
        await trio.lowlevel.checkpoint()
        if self.exhausted:
            raise trio.EndOfChannel
        self.exhausted = True
        request = self._batch.request
        return prompt_of(request.inputs[self._place], request.parameters)

    async def send(self, message: Token | Finish, /) -> None:
        if self.complete:
            raise trio.ClosedResourceError("the answer is complete")
        match message:
            case Token(prefill=False, sequence=0):
                last = message.finish is not None
                put = self._batch.encoder.token
                if not await self._batch.put(put, self._place, message.text, last, size=len(message.text)):
                    self._batch.begun()
            case Token():  # there is no place for prompts' tokens, nor for other sequences
                await trio.lowlevel.checkpoint()
            case Finish():
                await trio.lowlevel.checkpoint()
                self._complete = message.sequence == 0
            case _:
                raise TypeError(f"a text call is answered with Token and Finish, not {type(message).__name__}")


def _the_one(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a batch ends of: its cancellation, whatever its prompts raised on their way out, else the first failure."""
    cancelled, failed = group.split(trio.Cancelled)
    if not isinstance(failed, ExceptionGroup | None):
        return group
    if cancelled is not None or failed is None:
        return cancelled or group
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
