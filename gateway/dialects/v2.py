"""The Open Inference Protocol, v2: health, metadata and infer, with JSON and binary tensors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import final

import trio

from gateway.dialects.base import Models, Wrapping, codec, reply_headers, reply_of, session_of
from gateway.dialects.management import ManagementDialect
from gateway.errors import BadRequest, Ending, GatewayError, ModelFailed, NotFound
from gateway.exchange import Exchange
from gateway.workers.worker import Worker
from models.messages import Family, InferRequest, InferResponse, Tensor
from models.spec import TensorSpec
from protocols import v2
from protocols.events import Headers

_JSON = (b"content-type", b"application/json")
_SHORT = 16 * 1024  # bytes or numbers that are never too long for a codec's step, whatever they are
_EXTENSIONS = ("binary_tensor_data", "parameters")


@final
class V2Dialect:
    """Serves tensors to tritonclient, KServe's client, perf_analyzer and curl."""

    def __init__(self, models: Models, management: ManagementDialect, *, name: str, version: str) -> None:
        self._models, self._management = models, management
        self._metadata = v2.server_metadata(name, version, _EXTENSIONS)
        limits = models.config.limits
        self._body = limits.body
        self._bounds = v2.V2Limits(
            json=limits.json, depth=limits.json_depth, tensors=limits.tensors, dims=limits.tensor_dims
        )
        self._codecs: dict[str, tuple[Worker, v2.InferCodec]] = {}

    async def live(self, exchange: Exchange) -> None:
        """GET /v2/health/live: true while the process answers."""
        self._reply(exchange, 200, v2.live_body(True))

    async def ready(self, exchange: Exchange) -> None:
        """GET /v2/health/ready: 503 while models load and from the first moment of a drain."""
        ready = self._management.ready
        self._reply(exchange, 200 if ready else 503, v2.ready_body(ready))

    async def server(self, exchange: Exchange) -> None:
        """GET /v2."""
        self._reply(exchange, 200, self._metadata)

    async def model(self, exchange: Exchange, name: str, version: str = "") -> None:
        """GET /v2/models/{name}[/versions/{version}]."""
        worker = self._worker(exchange, name, version)
        self._reply(exchange, 200, v2.model_metadata(_signature(worker)))

    async def config(self, exchange: Exchange, name: str, version: str = "") -> None:
        """GET /v2/models/{name}[/versions/{version}]/config: what Triton's clients ask before they measure."""
        worker = self._worker(exchange, name, version)
        self._reply(exchange, 200, v2.model_config(_signature(worker)))

    async def model_ready(self, exchange: Exchange, name: str, version: str = "") -> None:
        """GET /v2/models/{name}[/versions/{version}]/ready."""
        worker = self._worker(exchange, name, version)
        ready = worker.ready and not self._management.draining
        self._reply(exchange, 200 if ready else 503, v2.model_ready(worker.name, ready))

    def infer(self, exchange: Exchange, name: str, version: str = "") -> Awaitable[None]:
        """POST /v2/models/{name}[/versions/{version}]/infer."""
        worker = self._worker(exchange, name, version)
        if worker.spec.family is not Family.TENSOR:
            self._models.named(name, Family.TENSOR, "v2")  # BadRequest where it cannot answer
        worker.check_ready()
        lengths = exchange.header_values(v2.IHCL)
        header_length = None
        if lengths:
            try:
                header_length = v2.parse_header_length(lengths)
            except v2.V2Error as e:
                raise BadRequest(e.message, status=e.status) from None
        body = exchange.whole_body(self._body)
        if body is None:
            return self._receive_and_answer(exchange, worker, header_length)
        return self.answer(exchange, worker, body, header_length)  # not awaited here: that would be a frame more for each

    async def _receive_and_answer(self, exchange: Exchange, worker: Worker, header_length: int | None) -> None:
        body = await exchange.receive_body(self._body, setting="limits.body")
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
        known = self._codecs.get(worker.name)
        infer = known[1] if known is not None and known[0] is worker else self._codec(worker)
        try:
            if len(body) <= _SHORT:
                request = infer.parse(body, header_length)
            else:
                size = _elements(body, header_length)
                request = await codec(size, partial(infer.parse, body, header_length))
        except v2.V2Error as e:
            _refuse(wrapping or exchange, e)
            return
        channel = _InferChannel(exchange, request)
        with worker.free_slot(exchange) or await worker.slot(exchange):
            session = session_of(exchange, worker, channel, parameters=request.parameters)
            await worker.call(session, exchange, Family.TENSOR)
        response = channel.response
        if response is None:
            raise ModelFailed(f"model {worker.name!r} returned without an answer", code="NoAnswer", status=500)
        outputs, size = [], 0
        for t in response.outputs:
            data, parameters = t.data, dict(t.parameters) if t.parameters else v2.NO_PARAMETERS
            outputs.append(v2.V2Tensor(name=t.name, datatype=t.datatype, array=data, parameters=parameters))
            size += data.size
        parameters = dict(response.parameters) if response.parameters else v2.NO_PARAMETERS
        try:
            if size <= _SHORT:
                reply = infer.render(outputs, request, response.id, parameters)
            else:
                size = _written(outputs, request)
                reply = await codec(size, partial(infer.render, outputs, request, response.id, parameters))
        except v2.V2Error as e:
            _refuse(wrapping or exchange, e)
            return
        if wrapping is None and form is None and exchange.reply is None:
            exchange.respond(200, reply.form, *reply.buffers)
        else:
            headers = [*(form(reply.form) if form else reply.form), *reply_headers(exchange)]
            (wrapping or exchange).respond(200, headers, *reply.buffers)

    def _codec(self, worker: Worker) -> v2.InferCodec:
        """Made at a model's first request: models come and go."""
        for name, (other, _) in list(self._codecs.items()):
            if self._models.workers.get(name) is not other:
                del self._codecs[name]
        infer = v2.InferCodec(_signature(worker), version=worker.spec.version, limits=self._bounds)
        self._codecs[worker.name] = worker, infer
        return infer

    def _worker(self, exchange: Exchange, name: str, version: str) -> Worker:
        exchange.take("v2", refuse)
        worker = self._models.workers.get(name)
        if worker is None:
            raise NotFound(f"unknown model {name[:100]!r}; there are: {', '.join(sorted(self._models.workers)) or 'none'}")
        if version and version != worker.spec.version:
            raise NotFound(f"model {name!r} has no version {version[:20]!r}, only {worker.spec.version!r}")
        exchange.model = worker.name
        return worker

    def _reply(self, exchange: Exchange, status: int, body: bytes) -> None:
        exchange.dialect = "v2"
        exchange.respond(status, [_JSON], body)


def _refuse(answer: Exchange | Wrapping, error: v2.V2Error) -> None:
    answer.respond(error.status, [_JSON], error.error_body(), ending=Ending.REFUSED)


def refuse(exchange: Exchange, error: GatewayError) -> None:
    """Says an error in v2's words."""
    headers: Headers = [_JSON, (b"retry-after", b"1")] if error.retryable else [_JSON]
    exchange.respond(error.status, headers, v2.V2Error(error.message).error_body(), ending=error.ending)


def _elements(body: memoryview, header_length: int | None) -> int:
    """How many bytes of a body are read one by one: binary numbers are views of it, JSON and BYTES are not."""
    if header_length is None or b'"BYTES"' in body[:header_length].tobytes():
        return len(body)
    return header_length


def _written(outputs: list[v2.V2Tensor], request: v2.V2Request) -> int:
    """How many elements of the outputs are written one by one."""
    return sum(t.array.size for t in outputs if t.datatype == "BYTES" or not request.wants_binary(t.name))


def _signature(worker: Worker) -> v2.ModelSignature:
    spec = worker.spec
    return v2.ModelSignature(
        name=spec.name,
        versions=(spec.version,),
        platform=spec.platform,
        inputs=_declared(spec.inputs),
        outputs=_declared(spec.outputs),
    )


def _declared(tensors: tuple[TensorSpec, ...] | None) -> tuple[v2.TensorSpec, ...] | None:
    if tensors is None:
        return None
    return tuple(v2.TensorSpec(name=t.name, datatype=t.datatype, shape=t.shape) for t in tensors)


@final
class _InferChannel:
    """One request in, one response out; the response completes the call."""

    __slots__ = ("_exchange", "_request", "exhausted", "response")

    def __init__(self, exchange: Exchange, request: v2.V2Request) -> None:
        self._exchange = exchange
        self._request: v2.V2Request | None = request
        self.exhausted = False
        self.response: InferResponse | None = None

    @property
    def complete(self) -> bool:
        return self.response is not None

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    async def receive(self) -> InferRequest:
        request, self._request = self._request, None
        if request is None:
            await self._exchange.turn()
            raise trio.EndOfChannel
        self.exhausted = True
        return InferRequest(
            inputs=tuple(
                [Tensor(name=t.name, datatype=t.datatype, data=t.array, parameters=t.parameters) for t in request.inputs]
            ),
            id=request.id,
            parameters=request.parameters,
            outputs=tuple([o.name for o in request.outputs]) if request.outputs else (),
        )

    async def send(self, message: InferResponse, /) -> None:
        if not isinstance(message, InferResponse):
            raise TypeError(f"an infer call is answered with InferResponse, not {type(message).__name__}")
        if self.response is not None:
            raise trio.ClosedResourceError("an infer call has one response")
        self.response = message
