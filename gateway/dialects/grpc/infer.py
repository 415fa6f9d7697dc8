"""ModelInfer: one request of tensors and one reply, as gRPC."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from time import perf_counter_ns
from typing import Any, final

from gateway.codecs.tensors import SHORT
from gateway.codecs.threads import FREE, LONG, codec, run_in_codec_thread
from gateway.codecs.turns import Stage, codec_turns
from gateway.core.exchange import Exchange
from gateway.core.route import Row
from gateway.dialects.call import session_of
from gateway.dialects.grpc.calls import Calls, reply, rows_of
from gateway.dialects.grpc.status import CallRefused
from gateway.dialects.grpc.text import output_of, read_text
from gateway.dialects.inner_call import InnerCall
from gateway.dialects.v2.channels import one_response
from gateway.dialects.v2.requests import Timeout, V2Calls, batch_of, error_of, schedule, slot_within, weight_of, writing
from gateway.dialects.v2.text import WholeText
from gateway.errors import BadRequest
from gateway.workers.worker import Worker
from models.messages import Family
from protocols.events import Buffer
from protocols.grpc.heads import CallHead
from protocols.grpc.protobuf import ProtobufError
from protocols.grpc.status import StatusCode
from protocols.grpc.v2_messages import InferCall, InferRequestReader, InferResponseWriter, read_names, size_of
from protocols.v2.metadata import ModelSignature
from protocols.v2.tensors import NO_PARAMETERS, Parameters, V2Error, V2Tensor

_TENSOR = Family.TENSOR
_TOP = 1024  # fields of its own that a message has, at most, if it is measured on the loop
_AT_ONCE = 256 * 1024  # bytes, of fields that are few, which are read on the loop
_WEIGHT = 8  # a field of two bytes takes as long to read as sixteen bytes of JSON
SERVICE = "inference.GRPCInferenceService"


@final
class InferMessages:
    """Reads inference requests of gRPC and writes the answers to them."""

    def __init__(self, tensors: V2Calls) -> None:
        self.tensors = tensors
        self._reader = InferRequestReader(tensors.bounds)
        self._writers: dict[str, tuple[ModelSignature, InferResponseWriter]] = {}

    async def read(self, exchange: Exchange | InnerCall, message: Buffer) -> InferCall:
        """Reads the request in a message, in a thread if that would block the loop. Its memory is paid for before. V2Error;
        CallRefused if the message cannot be read; Overloaded."""
        reader = self._reader
        try:
            if len(message) <= FREE:
                return reader.read(message)
            if (call := reader.planned(message)) is not None:
                return call
            owner = (exchange if isinstance(exchange, Exchange) else exchange.exchange).owner
            size = size_of(message, _TOP)
            if size is not None and (work := size.described + size.tensors) <= _AT_ONCE:
                exchange.making(size.cost)
                parts = await codec(min(_WEIGHT * work, LONG), partial(reader.parts_at_once, message), owner, Stage.READ)
                if parts is not None:
                    exchange.making(parts.cost)
                    return await codec(parts.work, partial(reader.call, parts), owner)
            async with codec_turns().in_thread(owner, Stage.READ):
                size = size or await run_in_codec_thread(partial(size_of, message))
                if size is not None:
                    exchange.making(size.cost)
                parts = await run_in_codec_thread(partial(reader.parts, message))
                exchange.making(parts.cost)
                return await run_in_codec_thread(partial(reader.call, parts))
        except ProtobufError as e:
            raise CallRefused.of(e) from None

    def names_of(self, message: Buffer) -> tuple[str, str, str]:
        """The model, version and id that a refused request names; empty if the message cannot be read."""
        try:
            return read_names(message)
        except ProtobufError:
            return "", "", ""

    def model_of(self, exchange: Exchange, call: InferCall) -> Worker:
        """The model that a request names: a tensor model, or one that can answer as a text model. NotFound, BadRequest,
        Unavailable; V2Error for a request that does not fit the model."""
        worker = self.tensors.worker(exchange, call.model_name, call.model_version)
        self.tensors.bounds_of(worker).check_sequence(call.request.parameters)
        if worker.spec.family is not _TENSOR:
            self.tensors.models.check_family(worker, Family.TEXT, "gRPC but by text_input")
        if not worker.slots.open:
            worker.check_ready(exchange)
        if worker.spec.family is _TENSOR:
            call.check(self.tensors.codec_of(worker).signature)
        return worker

    def writer_of(self, worker: Worker) -> InferResponseWriter:
        """The writer of the model's answers."""
        signature = self.tensors.codec_of(worker).signature
        known = self._writers.get(worker.name)
        if known is None or known[0] is not signature:
            known = self._writers[worker.name] = signature, InferResponseWriter(signature, version=worker.spec.version)
        return known[1]

    async def write(
        self,
        exchange: Exchange,
        worker: Worker,
        call: InferCall,
        outputs: list[V2Tensor],
        size: int,
        id: str,
        parameters: Parameters,
    ) -> list[Buffer]:
        """Writes the ModelInferResponse with these outputs, of `size` elements in all, in a thread if that would block the
        loop. V2Error; Overloaded."""
        writer = self.writer_of(worker)
        if size <= SHORT:
            return writer.render(outputs, call.request, id, parameters)
        with writing(exchange, outputs):
            return await codec(
                weight_of([tensor for tensor in outputs if tensor.datatype in ("BOOL", "BYTES")]),
                partial(writer.render, outputs, call.request, id, parameters),
            )


@final
class ModelInferDialect:
    """Answers ModelInfer."""

    def __init__(self, calls: Calls, messages: InferMessages) -> None:
        self._calls, self._messages = calls, messages

    def rows(self) -> list[Row]:
        """Its one method."""
        return rows_of(SERVICE, {"ModelInfer": self.infer})

    def infer(self, exchange: Exchange, call: CallHead) -> Coroutine[Any, Any, None]:
        """/inference.GRPCInferenceService/ModelInfer."""
        calls = self._calls
        calls.begin(exchange, call)
        return self._answer(exchange, call, calls.body(exchange))

    async def _answer(self, exchange: Exchange, call: CallHead, body: Buffer | None) -> None:
        messages, calls = self._messages, self._calls
        message = None if body is None else calls.plain(body)
        if message is None:
            message = await calls.message(exchange, call, body)
        arrived = perf_counter_ns()
        try:
            asked = await messages.read(exchange, message)
            worker = messages.model_of(exchange, asked)
            request = asked.request
            timeout = schedule(exchange, request.parameters) if request.parameters else None
        except V2Error as e:
            raise error_of(e) from None
        if worker.spec.family is not _TENSOR:
            await self._text(exchange, worker, asked, timeout)
            return
        if worker.spec.decoupled:
            raise CallRefused(
                StatusCode.UNIMPLEMENTED,
                f"model {worker.name!r} gives any number of responses to a request: call ModelStreamInfer",
            )
        slot, unary, response = await one_response(exchange, exchange, worker, request, timeout)
        try:
            parameters = dict(response.parameters) if response.parameters else NO_PARAMETERS
            buffers = await messages.write(exchange, worker, asked, unary.outputs, unary.size, response.id, parameters)
        except BaseException as e:
            slot.unanswered(e)
            if isinstance(e, V2Error):
                raise error_of(e) from None
            raise
        slot.answered(arrived, batch_of(worker, request) if worker.spec.max_batch_size else 1, request.copied)
        reply(exchange, buffers)

    async def _text(self, exchange: Exchange, worker: Worker, asked: InferCall, within: Timeout | None) -> None:
        """Calls a text model and answers with its whole text."""
        messages = self._messages
        try:
            call = await read_text(exchange, asked, worker, messages.tensors)
        except V2Error as e:
            raise error_of(e) from None
        if call.streams:
            raise BadRequest("input 'stream': true asks for any number of responses to a request: call ModelStreamInfer")
        kept = WholeText(exchange, worker, call.asked.prompt)
        with await slot_within(exchange, worker, within):
            await worker.call(session_of(exchange, worker, kept), exchange, Family.TEXT)
        reply(exchange, messages.writer_of(worker).render([output_of(call.asked.whole(kept.whole()))], asked.request))
