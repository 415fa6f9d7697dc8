"""LMI's dynamic batch: several prompts in one request, generated side by side, with one text for each in the answer."""

from __future__ import annotations

from functools import partial
from typing import Any, final

import msgspec
import trio

from gateway.codecs.prompts import prompt_of
from gateway.codecs.threads import codec
from gateway.config import LMIConfig
from gateway.core.exchange import Exchange
from gateway.core.outbound import Outbound
from gateway.dialects.answers import JSON, Wrapping, reply_headers
from gateway.dialects.call import session_of
from gateway.dialects.text.lmi_errors import refuse_as_dynamic
from gateway.dialects.text.requests import (
    LINE,
    OnePrompt,
    TextCalls,
    check_format,
    check_supported,
    decided_own,
    rule_of,
    table_of,
    tell_passed,
    within_ceiling,
    within_room,
)
from gateway.doorbell import Doorbell
from gateway.errors import Ending, GatewayError, ModelFailed
from gateway.workers.worker import Worker
from models.continuations import spoken
from models.messages import Family, Finish, Prompt, Token, ToolCall
from protocols import lmi
from protocols.text_members import Decided

_PATIENCE = 2  # checkpoints for which a begun line waits for the tokens of the other prompts


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
        """Answers the request in a document, which came as `size` bytes. The prompts are generated side by side, within one
        slot."""
        answer = wrapping or exchange.outbound
        try:
            request, said = await codec(size, partial(_parse, document, options, worker))
            check_supported(worker, request, options)
            request = within_ceiling(worker, self._calls.models.config.limits, request)
        except lmi.LMIError as e:
            body = lmi.dynamic_error_body(e.message, e.status)
            answer.respond(e.status, [JSON, *lmi.response_headers()], body, ending=Ending.REFUSED)
            return
        tell_passed(exchange, worker, said.unknown)
        batch = _Batch(exchange, request, answer, options, said)
        if wrapping is None:
            exchange.fail = batch.fail
        else:
            wrapping.in_band(batch.error_line)
        with await worker.slots.take(exchange):
            await batch.run(worker)
        batch.finish()


def _parse(document: dict[str, Any], options: LMIConfig, worker: Worker) -> tuple[lmi.DynamicRequest, Decided]:
    """The request, and the judgement on its members."""
    request = lmi.parse_dynamic_document(
        document,
        streaming=options.enable_streaming,
        max_prompts=options.max_prompts,
        table=table_of(options),
        rule=rule_of(options),
    )
    return decided_own(worker, request, document)


@final
class _Batch:
    """The prompts of one request, and the answer that they share."""

    def __init__(
        self,
        exchange: Exchange,
        request: lmi.DynamicRequest,
        answer: Outbound | Wrapping,
        options: LMIConfig,
        said: Decided,
    ) -> None:
        self.exchange, self.request, self.answer, self._said = exchange, request, answer, said
        self.encoder = lmi.DynamicEncoder(request, streaming=options.enable_streaming, max_text=options.max_text)
        self._sending = trio.Lock()  # one prompt waits for room at a time
        self._begun = Doorbell()
        self._lines = 0

    async def run(self, worker: Worker) -> None:
        """Calls the model for each prompt, side by side. The first failure stops the others and is raised."""
        exchange, request = self.exchange, self.request
        prompts = [prompt_of(text, request.parameters, self._said) for text in request.inputs]
        await check_format(exchange, worker, self._said)
        if worker.context:
            for place, prompt in enumerate(prompts):
                parameters, _ = await within_room(exchange, worker, prompt.text, prompt.parameters)
                prompts[place] = msgspec.structs.replace(prompt, parameters=parameters)
        try:
            async with trio.open_nursery() as around:
                if self.encoder.streaming and len(self.request.inputs) > 1:
                    around.start_soon(self._complete_lines)
                async with trio.open_nursery() as nursery:
                    for place, prompt in enumerate(prompts):
                        channel = _PromptChannel(self, worker, place, prompt)
                        session = session_of(exchange, worker, channel)
                        nursery.start_soon(partial(self._run_one, channel, worker.call, session, exchange, Family.TEXT))
                around.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise _the_one(group) from None

    async def _run_one(self, channel: _PromptChannel, call: Any, *arguments: Any) -> None:
        await call(*arguments)
        await channel.end()

    async def put(self, make: Any, *arguments: Any, size: int = 0) -> bool:
        """Sends the bytes that `make` returns, once there is room for `size`. False if it returns none."""
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
        """Called when a line has a token, and others are still to complete it."""
        self._begun.ring()

    async def _complete_lines(self) -> None:
        """Sends a line that other prompts do not complete soon, so that no prompt waits for the slowest. A prompt with a
        token ready is before this task in the queue for the lock."""
        while True:
            await self._begun.wait()
            line = self._lines
            for _ in range(_PATIENCE):
                await trio.lowlevel.checkpoint()
            await self.put(self._rest_of, line)

    def _rest_of(self, line: int) -> bytes:
        if line == self._lines:
            return self.encoder.flush()
        self._begun.ring()  # another line may have begun by now
        return b""

    def _start(self) -> None:
        if not self.exchange.outbound.status:
            head = [(b"content-type", self.encoder.content_type.encode()), *lmi.response_headers()]
            self.answer.start(200, [*head, *reply_headers(self.exchange)])

    def finish(self) -> None:
        """Ends the answer after every prompt has ended."""
        if self.exchange.outbound.finishing is not None:
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
        """Answers an HTTP status before the head. After it, writes a last line and ends the body whole."""
        if self.exchange.outbound.status:
            self.exchange.outbound.push(self.error_line(error))
            self.exchange.outbound.finish(error.ending)
        else:
            refuse_as_dynamic(self.exchange, error)

    def error_line(self, error: GatewayError) -> bytes:
        """The last line of a stream that failed."""
        return self.encoder.error(error.message)


@final
class _PromptChannel(OnePrompt):
    """The channel of one prompt of a batch; its tokens go into the answer that all share."""

    def __init__(self, batch: _Batch, worker: Worker, place: int, prompt: Prompt) -> None:
        super().__init__(batch.exchange, worker, prompt)
        self._batch, self._place = batch, place

    async def receive(self) -> Prompt:
        await trio.lowlevel.checkpoint()  # always one, not only when the turn is over: prompts in step share lines
        return self.take()

    async def send(self, message: Token | ToolCall | Finish, /) -> None:
        text, batch, message = self.text, self._batch, spoken(message)
        if not text.passes(message):
            await text.drop()
        elif type(message) is Finish or message.prefill:  # the answer has no tokens of prompts
            await trio.lowlevel.checkpoint()
            text.take(message)
        else:
            size = text.held(0) + len(message.text) + len(message.data)
            if not await batch.put(self._line_of, message, size=size):
                batch.begun()
            text.sent()

    def _line_of(self, token: Token) -> bytes:
        taken = self.text.take(token)
        assert type(taken) is Token
        return self._batch.encoder.token(self._place, taken.text, taken.finish is not None)

    async def end(self) -> None:
        """Ends the prompt's text after the model has returned or was stopped."""
        await self._batch.put(self._last_line)

    def _last_line(self) -> bytes:
        return self._batch.encoder.end(self._place, self.text.rest(0))


def _the_one(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that the batch ends with: its cancellation if there is one, whatever its prompts raised then; otherwise
    the first failure."""
    cancelled, failed = group.split(trio.Cancelled)
    if not isinstance(failed, ExceptionGroup | None):
        return group
    if cancelled is not None or failed is None:
        return cancelled or group
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
