"""The Open Inference Protocol's infer (v2): one request of tensors, one reply, as JSON or with binary tensors."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from time import perf_counter_ns
from typing import Any, final

from gateway.codecs.tensors import SHORT
from gateway.core.exchange import Exchange
from gateway.core.outbound import Outbound
from gateway.core.route import Row
from gateway.core.whole_body import receive_body, whole_body
from gateway.dialects.answers import JSON, Wrapping, reply_headers
from gateway.dialects.compression import compressed, varying
from gateway.dialects.v2.channels import one_response
from gateway.dialects.v2.operations import rows_of
from gateway.dialects.v2.requests import V2Calls, batch_of, error_of, schedule
from gateway.dialects.v2.streamed_request import infer_in_pieces
from gateway.errors import Ending
from gateway.workers.worker import Worker
from models.messages import Family
from protocols import v2
from protocols.events import Buffer, Headers

_TENSOR = Family.TENSOR  # a member of an enum costs three look-ups on each use


@final
class InferDialect:
    """Answers inference requests, at v2's own route and for other routes that carry v2 bodies."""

    def __init__(self, calls: V2Calls) -> None:
        self._calls = calls
        self._level = calls.models.config.v2.compression

    def rows(self) -> list[Row]:
        """Its one route."""
        return rows_of({"infer": self.infer})

    def infer(self, exchange: Exchange, name: str, version: str = "") -> Coroutine[Any, Any, None]:
        """POST /v2/models/{name}[/versions/{version}]/infer."""
        calls = self._calls
        worker = calls.worker(exchange, name, version, True)  # by its place: a named one costs as much as ten
        # Most requests have no such header: the check here saves them a call.
        header_length = calls.header_length(exchange) if v2.IHCL in exchange.fields else None
        if worker.spec.pieces and header_length:
            return infer_in_pieces(calls, exchange, worker, header_length)
        body = whole_body(exchange, calls.body)
        if body is None:
            return self._receive_and_answer(exchange, worker, header_length)
        return self.answer(exchange, worker, body, header_length)  # not awaited: one frame less for each request

    async def _receive_and_answer(self, exchange: Exchange, worker: Worker, header_length: int | None) -> None:
        worker.check_ready(exchange)
        body = await receive_body(exchange, self._calls.body, setting="limits.body", memory=worker.body_memory)
        await self.answer(exchange, worker, body, header_length)

    async def answer(
        self,
        exchange: Exchange,
        worker: Worker,
        body: Buffer,
        header_length: int | None,
        wrapping: Wrapping | None = None,
        form: Callable[[Headers], Headers] | None = None,
    ) -> None:
        """Answers the inference request in `body`, whatever its route. `wrapping` takes the answer and the errors in place
        of the exchange; `form` changes the head of a reply."""
        calls = self._calls
        infer: v2.InferCodec = worker.tensor_codec or calls.codec_of(worker)
        arrived = perf_counter_ns()
        try:
            if len(body) <= SHORT:
                request = infer.parse(body, header_length)
            else:
                request = await calls.read_long(exchange, infer, memoryview(body), header_length)
            timeout = schedule(exchange, request.parameters) if request.parameters else None
        except v2.V2Error as e:
            _refuse(wrapping or exchange.outbound, e)
            return
        slot, call, response = await one_response(exchange, exchange, worker, request, timeout)
        try:
            outputs, size = call.outputs, call.size
            parameters = dict(response.parameters) if response.parameters else v2.NO_PARAMETERS
            if size <= SHORT:
                reply = infer.render(outputs, request, response.id, parameters)
            else:
                reply = await calls.write_long(exchange, infer, outputs, request, response.id, parameters)
        except BaseException as e:
            slot.unanswered(e)
            if isinstance(e, v2.V2Error) and e.status >= 500:
                raise error_of(e) from None
            if not isinstance(e, v2.V2Error):
                raise
            _refuse(wrapping or exchange.outbound, e)
            return
        slot.answered(arrived, batch_of(worker, request) if worker.spec.max_batch_size else 1, request.copied)
        headers = reply.form
        if form is not None or exchange.reply is not None:
            headers = [*(form(headers) if form else headers), *reply_headers(exchange)]
        if wrapping is not None:
            wrapping.respond(200, headers, *reply.buffers)
        elif self._level and b"accept-encoding" in exchange.fields:
            headers, buffers = await compressed(exchange, headers, reply.buffers, self._level)
            exchange.outbound.respond_with(200, headers, buffers)
        else:
            exchange.outbound.respond_with(200, varying(headers) if self._level else headers, reply.buffers)


def _refuse(answer: Outbound | Wrapping, error: v2.V2Error) -> None:
    """Answers an error that the codec found."""
    answer.respond(error.status, [JSON], error.error_body(), ending=Ending.REFUSED)
