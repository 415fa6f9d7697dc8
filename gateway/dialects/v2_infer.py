"""The Open Inference Protocol's infer (v2): one request of tensors, one reply, as JSON or with binary tensors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from time import perf_counter_ns
from typing import Any, final

from gateway.dialects.base import Wrapping, reply_headers, reply_of, session_of
from gateway.dialects.compression import compressed
from gateway.dialects.v2_calls import JSON, SHORT, V2Calls, batch_of, outputs_of, timeout_of
from gateway.dialects.v2_channels import WholeRequest, check_response, no_answer, too_many
from gateway.dialects.v2_pieces import infer_in_pieces
from gateway.errors import Ending
from gateway.exchange import Exchange
from gateway.workers.worker import Worker
from models.messages import Family, InferResponse
from protocols import v2
from protocols.events import Headers


@final
class InferDialect:
    """Answers inference requests, at v2's own route and for the routes that carry v2 bodies."""

    def __init__(self, calls: V2Calls) -> None:
        self._calls = calls
        self._level = calls.models.config.v2.compression

    def infer(self, exchange: Exchange, name: str, version: str = "") -> Coroutine[Any, Any, None]:
        """POST /v2/models/{name}[/versions/{version}]/infer."""
        calls = self._calls
        worker = calls.tensor_worker(exchange, name, version)
        # asked for here: most requests have none, and each call counts
        header_length = None if exchange.header(v2.IHCL) is None else calls.header_length(exchange)
        if worker.spec.pieces and header_length:
            return infer_in_pieces(calls, exchange, worker, header_length)
        body = exchange.whole_body(calls.body)
        if body is None:
            return self._receive_and_answer(exchange, worker, header_length)
        return self.answer(exchange, worker, body, header_length)  # not awaited here: that would be a frame more for each

    async def _receive_and_answer(self, exchange: Exchange, worker: Worker, header_length: int | None) -> None:
        body = await exchange.receive_body(self._calls.body, setting="limits.body")
        await self.answer(exchange, worker, body, header_length)

    async def answer(
        self,
        exchange: Exchange,
        worker: Worker,
        body: memoryview,
        header_length: int | None,
        wrapping: Wrapping | None = None,
        *,
        form: Callable[[Headers], Headers] | None = None,
    ) -> None:
        """Answers the inference request in `body`, whatever its route. `wrapping` takes the answer in place of the
        exchange, and then says the errors too; `form` changes the head of a reply."""
        calls = self._calls
        infer: v2.InferCodec = worker.kept or calls.codec_of(worker)
        arrived = perf_counter_ns()
        try:
            if len(body) <= SHORT:
                request = infer.parse(body, header_length)
            else:
                request = await calls.read_long(infer, body, header_length)
            timeout = timeout_of(request.parameters) if request.parameters else None
        except v2.V2Error as e:
            _refuse(wrapping or exchange, e)
            return
        channel = _InferChannel(exchange, worker, request)
        if timeout is not None:
            timeout.apply(exchange)
        with worker.free_slot(exchange) or await worker.slot(exchange) as slot:
            if timeout is not None:
                timeout.apply(exchange)
            session = session_of(exchange, worker, channel, parameters=request.parameters)
            await worker.call(session, exchange, Family.TENSOR)
            slot.counts = False
        try:
            response = channel.response
            if response is None:
                raise no_answer(worker)
            if channel.more:
                raise too_many(worker)
            outputs, size = channel.outputs, channel.size
            parameters = dict(response.parameters) if response.parameters else v2.NO_PARAMETERS
            if size <= SHORT:
                reply = infer.render(outputs, request, response.id, parameters)
            else:
                reply = await calls.write_long(infer, outputs, request, response.id, parameters)
        except BaseException as e:
            slot.unanswered(e)
            if not isinstance(e, v2.V2Error):
                raise
            _refuse(wrapping or exchange, e)
            return
        slot.answered(arrived, batch_of(worker, request) if worker.spec.max_batch_size else 1, request.copied)
        headers = reply.form
        if form is not None or exchange.reply is not None:
            headers = [*(form(headers) if form else headers), *reply_headers(exchange)]
        if wrapping is not None:
            wrapping.respond(200, headers, *reply.buffers)
        elif self._level and exchange.header(b"accept-encoding") is not None:
            headers, buffers = await compressed(exchange, headers, reply.buffers, self._level)
            exchange.respond(200, headers, *buffers)
        else:
            exchange.respond(200, headers, *reply.buffers)


def _refuse(answer: Exchange | Wrapping, error: v2.V2Error) -> None:
    ending = Ending.REFUSED if error.status < 500 else Ending.MODEL_ERROR
    answer.respond(error.status, [JSON], error.error_body(), ending=ending)


@final
class _InferChannel(WholeRequest):
    """One request in, one response out: with OneResponse in one, as it is made for each small request."""

    __slots__ = ("_worker", "more", "outputs", "response", "size")

    def __init__(self, exchange: Exchange, worker: Worker, request: v2.V2Request) -> None:
        super().__init__(exchange, request)
        self._worker, self.more = worker, False
        self.response: InferResponse | None = None
        self.outputs: list[v2.V2Tensor]
        """Of the response, as the codec takes them, and their elements."""
        self.size: int

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    async def send(self, message: Any, /) -> None:
        if not isinstance(message, InferResponse):
            check_response(message)  # which says what it is not
        if self.response is not None:
            self.more = True
            raise too_many(self._worker)
        self.outputs, self.size = outputs_of(message)
        self.response = message
