"""The parts that all v2 calls share: models by route, requests and replies, and errors in v2's form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, final

import trio

from gateway.codecs.tensors import SHORT, outputs_of, signature_of
from gateway.codecs.threads import LONG, codec, long_codec, run_in_codec_thread
from gateway.codecs.turns import Stage, codec_turns
from gateway.core.exchange import Exchange
from gateway.dialects.answers import JSON as JSON
from gateway.dialects.answers import EventStreams, refusal_headers
from gateway.dialects.inner_call import InnerCall
from gateway.dialects.model_choice import ModelChoice
from gateway.errors import BadRequest, GatewayError, ModelFailed, NotFound
from gateway.workers.slot import Slot
from gateway.workers.worker import Worker
from models.adapt import AT_ONCE
from models.blocking import json_turn
from models.messages import Family, InferResponse
from protocols import v2
from protocols.floods import HEAVY_JSON
from protocols.json.text import Census, census_of, find

_TENSOR = Family.TENSOR  # a name, as it is looked up for each request
OBJECT = 64
"""Bytes of memory that an element of BYTES takes beside its content."""
_PLENTY = 4
"""The part of all memory that may be in use for a long text to be paid for by its length alone. One is read at a time."""
_LOOKED_THROUGH = 64 * 1024  # bytes of the longest head that is searched for words on the loop
_LOOKED_AT = (b'"BYTES"', b'"BOOL"', b"\\")  # an escape may hide either


@final
class V2Calls:
    """Finds models, and reads and writes their inference requests and replies."""

    def __init__(self, models: ModelChoice, streams: EventStreams) -> None:
        self.models, self.streams, self._workers = models, streams, models.workers
        limits = models.config.limits
        self.body = limits.body
        self.bounds = v2.V2Limits(
            json=limits.json,
            text=limits.text_json,
            depth=limits.json_depth,
            containers=limits.json_containers,
            values=limits.json_values,
            tensors=limits.tensors,
            dims=limits.tensor_dims,
            elements=limits.bytes_elements,
        )
        apart = models.config.listen.processes != 1
        self._in_process = replace(self.bounds, sequences=False) if apart else self.bounds

    def worker(self, exchange: Exchange, name: str, version: str, infers: bool = False) -> Worker:
        """The model of a route, of any family, noted on the exchange. NotFound for an unknown model or version. With
        `infers` it must also be a tensor model, otherwise BadRequest, and take calls, otherwise Unavailable."""
        worker = self._workers.get(name)
        if worker is None:
            seen = ", ".join(sorted(self.models.seen_by(exchange.permit)))
            raise NotFound(f"unknown model {name[:100]!r}; there are: {seen[:1000] or 'none'}")
        if exchange.permit is not None:
            self.models.check(exchange.permit, name)
        if version and version != worker.spec.version:
            raise NotFound(f"model {name!r} has no version {version[:20]!r}, only {worker.spec.version!r}")
        exchange.model = worker.name
        if infers:
            if worker.spec.family is not _TENSOR:
                raise BadRequest(
                    f"model {worker.name!r} speaks {worker.spec.family.value} and cannot answer with tensors: "
                    f"ask /v2/models/{worker.name}/generate"
                )
            if not worker.slots.open:
                worker.check_ready(exchange)
        return worker

    def is_decoupled(self, name: str) -> bool:
        """True if the model gives any number of responses to a request, as text models do."""
        worker = self._workers.get(name)
        return worker is not None and (worker.spec.decoupled or worker.spec.family is not _TENSOR)

    def header_length(self, exchange: Exchange) -> int | None:
        """The length in bytes of the JSON in a body, by the request's head; None if it has none. BadRequest for an invalid
        length."""
        length = exchange.fields.get(v2.IHCL)
        if length is None:
            return None
        twice = len(exchange.fields) != len(exchange.request.headers)  # it, or another field
        lengths = exchange.header_values(v2.IHCL) if twice else (length,)
        try:
            return v2.parse_header_length(lengths)
        except v2.V2Error as e:
            raise BadRequest(e.message, status=e.status) from None

    def bounds_of(self, worker: Worker) -> v2.V2Limits:
        """The limits of a model's requests. They exclude sequences if each of several fronts runs the model itself: the
        requests of a sequence could then reach different instances."""
        model = self.models.config.models.get(worker.name)
        return self.bounds if model is not None and model.process.wanted else self._in_process

    def codec_of(self, worker: Worker) -> v2.InferCodec:
        """The codec of a model's calls."""
        infer: v2.InferCodec | None = worker.tensor_codec
        if infer is None:
            infer = worker.tensor_codec = v2.InferCodec(
                signature_of(worker.spec), version=worker.spec.version, limits=self.bounds_of(worker)
            )
        return infer

    async def read_long(
        self, exchange: Exchange, infer: v2.InferCodec, body: memoryview, header_length: int | None
    ) -> v2.V2Request:
        """Calls `infer.parse`, in a thread if that would block the loop. V2Error; Overloaded if the budget has no room for
        the elements of BYTES that the JSON may have."""
        return await self.parsed(
            exchange, body[:header_length], _elements(body, header_length), partial(infer.parse, body, header_length)
        )

    async def parsed(
        self,
        exchange: Exchange,
        text: memoryview,
        size: int,
        parse: Callable[[], v2.V2Request],
        *,
        named: bool = True,
    ) -> v2.V2Request:
        """Calls `parse` for a request whose JSON is `text`, in a thread if that would block the loop. Objects made of
        strings are paid for: before, as many as there may be, and then as many as there are. `named` False: the JSON has no
        datatypes, so any element may be a string."""
        owner = exchange.owner
        if len(text) <= SHORT:
            return await codec(size, parse, owner, Stage.READ)
        if len(text) <= LONG:
            strings, cost = await codec(len(text), partial(self._cost, text, named=named), owner, Stage.READ)
            at_once = strings <= AT_ONCE and cost <= HEAVY_JSON and size <= LONG
            return await self._paid(
                exchange, text, cost, lambda: codec(size, parse, owner) if at_once else long_codec(parse, owner)
            )
        async with codec_turns().in_thread(owner, Stage.READ), json_turn():
            most = self._most(len(text))
            if exchange.account.used + most <= exchange.account.limit // _PLENTY:  # a census would cost more than it saves
                return await self._paid(exchange, text, most, partial(run_in_codec_thread, parse))
            _, cost = await run_in_codec_thread(partial(self._cost, text, named=named))
            return await self._paid(exchange, text, cost, partial(run_in_codec_thread, parse))

    async def _paid(
        self, exchange: Exchange, text: memoryview, cost: int, parse: Callable[[], Coroutine[Any, Any, v2.V2Request]]
    ) -> v2.V2Request:
        exchange.making(cost)
        try:
            request = await parse()
            exchange.making(_made_of(request, len(text)))
        except BaseException:
            exchange.making(0)
            raise
        return request

    def _cost(self, text: memoryview, *, named: bool) -> tuple[int, int]:
        """The most elements of BYTES that a request's JSON may have, and the most bytes of memory that reading it takes: for
        its values and, if those are over their limit, for the arrays that are made of its numbers directly."""
        bounds, census = self.bounds, census_of(text)
        may_be_bytes = not named or find(text, b'"BYTES"') >= 0 or find(text, b"\\u") >= 0  # an escape may hide it
        strings = 1 + census.commas if may_be_bytes else 0
        cost = OBJECT * min(strings, bounds.elements) + len(text) if strings else 0
        if census.values <= bounds.values:
            return strings, cost + census.cost
        most = Census(objects=bounds.containers, commas=bounds.values).cost
        return strings, cost + min(most, census.cost) + 8 * census.commas

    def _most(self, length: int) -> int:
        """The most that `_cost` can be for a JSON text of that length."""
        bounds = self.bounds
        values = min(Census(objects=bounds.containers, commas=bounds.values).cost, Census(objects=length).cost)
        return OBJECT * min(length, bounds.elements) + length + values + 8 * length

    async def write_long(
        self,
        exchange: Exchange,
        infer: v2.InferCodec,
        outputs: list[v2.V2Tensor],
        request: v2.V2Request,
        id: str,
        parameters: v2.Parameters,
    ) -> v2.V2Reply:
        """Calls `infer.render`, in a thread if that would block the loop. V2Error; Overloaded if the budget has no room to
        write the elements of BYTES."""
        with writing(exchange, outputs):
            return await codec(_written(outputs, request), partial(infer.render, outputs, request, id, parameters))

    async def read(self, exchange: Exchange, worker: Worker, body: memoryview, header_length: int | None) -> v2.V2Request:
        """Reads the request in a whole body. V2Error; Overloaded as for `read_long`."""
        infer = self.codec_of(worker)
        if len(body) <= SHORT:
            return infer.parse(body, header_length)
        return await self.read_long(exchange, infer, body, header_length)

    async def write(self, exchange: Exchange, worker: Worker, response: InferResponse, request: v2.V2Request) -> v2.V2Reply:
        """Writes the reply to a request from the model's response. V2Error; Overloaded as for `write_long`."""
        infer = self.codec_of(worker)
        outputs, size = outputs_of(response)
        parameters = dict(response.parameters) if response.parameters else v2.NO_PARAMETERS
        if size <= SHORT:
            return infer.render(outputs, request, response.id, parameters)
        return await self.write_long(exchange, infer, outputs, request, response.id, parameters)


@final
class Timeout:
    """The time limit that a request sets by its parameter `timeout`, as in Triton: in microseconds, from when the request
    was read."""

    __slots__ = ("seconds", "until")

    NAME = "parameter timeout of the request"

    def __init__(self, microseconds: int) -> None:
        self.seconds = microseconds / 1e6
        self.until = trio.current_time() + self.seconds

    def apply(self, exchange: Exchange | InnerCall) -> None:
        """Ends the exchange at the limit with DeadlineExceeded, which names the parameter, unless an earlier deadline holds.
        Called again inside the slot, where the model's own timeout begins."""
        if self.until < exchange.deadline:
            exchange.limit_time(self.until - trio.current_time(), self.NAME, said=self.seconds)


def timeout_of(parameters: Mapping[str, Any]) -> Timeout | None:
    """The request's time limit; None if the parameter is absent or 0. V2Error if it is not a number of microseconds."""
    value = parameters.get("timeout")
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 2**63:
        raise v2.V2Error(f"{Timeout.NAME} must be a whole number of microseconds, 0 for none, got {str(value)[:40]!r}")
    return Timeout(value) if value else None


def schedule(exchange: Exchange | InnerCall, parameters: Mapping[str, Any]) -> Timeout | None:
    """Applies the parameters `priority` and `timeout` of a request, as in Triton. Sets the exchange's priority (1 is first,
    0 is no change) and returns `timeout_of`. V2Error for an invalid number."""
    value = parameters.get("priority")
    if value is not None:
        if type(value) is not int or not 0 <= value < 2**64:
            raise v2.V2Error(
                f"parameter priority of the request must be a whole number, 0 for none, got {str(value)[:40]!r}"
            )
        exchange.ask_priority(value or exchange.priority)
        permit = exchange.permit
        if permit is not None and 0 < value < permit.priority and isinstance(parameters, dict):
            parameters["priority"] = permit.priority  # as a model that batches requests reads it too
    return timeout_of(parameters)


async def slot_within(
    exchange: Exchange | InnerCall,
    worker: Worker,
    within: Timeout | None,
    request: v2.V2Request | None = None,
    arrived: int = 0,
) -> Slot:
    """Takes a slot of the model for a request with this time limit. If `request` is given, the slot counts it in the model's
    statistics, with `arrived`, when reading it began (by `perf_counter_ns`)."""
    if within is None:
        slot = await worker.slots.take(exchange)
    else:
        within.apply(exchange)
        slot = await worker.slots.take(exchange)
        within.apply(exchange)
    if request is not None:
        slot.told = (arrived, batch_of(worker, request), request.copied)
    return slot


def batch_of(worker: Worker, request: v2.V2Request) -> int:
    """The number of inferences that a request has: its first input's batch size, or 1."""
    return request.inputs[0].array.shape[0] if worker.spec.max_batch_size and request.inputs else 1


def error_of(error: v2.V2Error) -> GatewayError:
    """The gateway's error for one that the codec raised: the client's mistake below status 500, the model's from there
    on."""
    if error.status < 500:
        return BadRequest(error.message, status=error.status)
    return ModelFailed(error.message, code="BadOutput", status=error.status)


@contextmanager
def writing(exchange: Exchange, outputs: Sequence[v2.V2Tensor]) -> Iterator[None]:
    """Pays from the budget, within the block, for the objects of BYTES elements in the outputs."""
    objects = sum(t.array.size for t in outputs if t.datatype == "BYTES" and type(t.array) is not v2.BytesData)
    give_back = exchange.reserve_objects(OBJECT * objects) if objects > AT_ONCE else None
    try:
        yield
    finally:
        if give_back is not None:
            give_back()


def weight_of(outputs: Sequence[v2.V2Tensor]) -> int:
    """The cost of writing outputs as text, where a number costs 1."""
    return sum(t.array.size * (OBJECT if t.datatype == "BYTES" else 1) for t in outputs)


def refuse(exchange: Exchange, error: GatewayError) -> None:
    """Answers an error before the head in v2's form."""
    exchange.outbound.respond(
        error.status, refusal_headers(error), v2.V2Error(error.message).error_body(), ending=error.ending
    )


def _elements(body: memoryview, header_length: int | None) -> int:
    """The number of a body's bytes that may be read one by one: JSON, BYTES and BOOL; binary numbers are views of the body.
    All of them for a raw request, which has no datatype."""
    if not header_length or header_length > _LOOKED_THROUGH:
        return len(body)
    head = body[:header_length].tobytes()
    return len(body) if any(word in head for word in _LOOKED_AT) else header_length


def _made_of(request: v2.V2Request, length: int) -> int:
    """The bytes of memory that a request made of JSON of that length takes: arrays of numbers, and objects of strings."""
    objects = numbers = 0
    for tensor in request.inputs:
        array = tensor.array
        if type(array) is v2.BytesData:
            continue
        if tensor.datatype == "BYTES":
            objects += array.size
        else:
            numbers += array.nbytes
    # Binary data are views of the body, and take nothing. In JSON, a number has at least two bytes.
    return min(numbers, 4 * length) + (OBJECT * objects + length if objects else 0)


def _written(outputs: list[v2.V2Tensor], request: v2.V2Request) -> int:
    """The weight of the outputs' elements that are written one by one or sorted."""
    if any(output.classification for output in request.outputs):
        return weight_of(outputs)
    return weight_of([t for t in outputs if not request.wants_binary(t.name) or not _leaves_as_it_is(t)])


def _leaves_as_it_is(output: v2.V2Tensor) -> bool:
    """True if the output's memory is its binary data already, without conversion."""
    array: Any = output.array
    if isinstance(array, v2.BytesData):
        return True
    return output.datatype != "BYTES" and bool(array.flags.c_contiguous and array.dtype.isnative)
