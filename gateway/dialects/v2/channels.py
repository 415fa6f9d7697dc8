"""The channels of v2's calls: requests go to a tensor model, and one response or a stream of responses comes back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, final

import trio

from gateway.codecs.tensors import check_response, outputs_of, request_of
from gateway.codecs.threads import run_in_codec_thread
from gateway.core.exchange import Exchange
from gateway.dialects.answers import reply_headers, reply_of
from gateway.dialects.call import call_of
from gateway.dialects.inner_call import InnerCall
from gateway.dialects.v2.requests import Timeout, V2Calls, error_of, refuse, slot_within
from gateway.errors import GatewayError, ModelFailed
from gateway.workers.slot import Slot
from gateway.workers.worker import Worker
from models.messages import Family, InferRequest, InferResponse
from models.session import Call, Channel, Session
from protocols import v2
from protocols.events import Buffer
from protocols.json.lines import unbroken
from protocols.sse import CONTENT_TYPE

_TENSOR = Family.TENSOR  # named once, as it is looked up for each request
_LONG = 2 * 1024 * 1024  # bytes above which copying would block the loop
_JOINED = 64 * 1024  # bytes of the longest text that is copied to leave in one buffer

Arriving = Callable[[], Awaitable[InferRequest]]
"""Returns the next piece of a request, until it has returned the last. Two tasks cannot wait in it."""


class _Requests:
    """The receiving side of a channel: one whole request, or its pieces as they arrive."""

    complete = False  # a model of tensors says by its return that there is no more
    exhausted: bool
    _exchange: Exchange
    _request: v2.V2Request
    _arriving: Arriving | None

    __slots__ = ()

    async def receive(self) -> InferRequest:
        if self.exhausted:
            await self._exchange.turn.checkpoint()
            raise trio.EndOfChannel
        request = request_of(self._request) if self._arriving is None else await self._arriving()
        self.exhausted = request.last  # type: ignore[misc]  # subclasses have the slot, as two bases cannot both have slots
        return request


@final
class UnaryCall(_Requests, Session[InferRequest, InferResponse]):
    """A call with one response, which is kept. To be cheap for small requests, the session is its own channel. It waits only
    for the pieces of a request that arrives in pieces; their source refuses a second receiver."""

    __slots__ = ("_arriving", "_exchange", "_given", "_request", "_worker", "exhausted", "outputs", "response", "size")

    response: InferResponse | None
    """The model's only response; None if it gave none or several. `outputs` and `size` are set together with it."""
    outputs: list[v2.V2Tensor]
    """The outputs of the response, as the codec takes them."""
    size: int
    """The number of their elements, as `outputs_of` counts them."""

    def __init__(self, exchange: Exchange, worker: Worker, request: v2.V2Request, arriving: Arriving | None = None) -> None:
        self._exchange, self._worker, self._request, self._arriving = exchange, worker, request, arriving
        self._call = self._reply = self._prompt_tokens = None
        self.deadline = exchange.deadline
        self.exhausted = self._given = False
        self.response = None

    @property
    def channel(self) -> Channel[InferRequest, InferResponse]:  # type: ignore[override]
        return self

    @property
    def call(self) -> Call:
        call = self._call
        if type(call) is not Call:
            call = self._call = call_of(self._exchange, self._worker, parameters=self._request.parameters)
        return call

    def _shared_reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    def accept(self) -> None:
        """Does nothing: the head goes out with the answer."""

    def __anext__(self) -> Coroutine[Any, Any, InferRequest]:
        if self.exhausted:
            raise StopAsyncIteration
        return self.receive()

    async def send(self, message: InferResponse) -> None:
        given: object = message
        if type(given) is not InferResponse:
            check_response(given)
        if self._given:
            self.response = None
            raise self.failure()
        self.outputs, self.size = outputs_of(message)  # so that the model sees its mistake
        self.response, self._given = message, True

    def failure(self) -> ModelFailed:
        """The error of a call without a `response`."""
        name = self._worker.name
        if not self._given:
            return ModelFailed(f"model {name!r} returned without an answer", code="NoAnswer", status=500)
        return ModelFailed(
            f"model {name!r} gave more than one response: ask for them at /infer_stream, or at /generate_stream",
            code="TooManyResponses",
            status=500,
        )


async def one_response(
    exchange: Exchange, caller: Exchange | InnerCall, worker: Worker, request: v2.V2Request, within: Timeout | None
) -> tuple[Slot, UnaryCall, InferResponse]:
    """Calls a model that gives one response, in a slot that is left on return. The caller writes the answer and then calls
    the slot's `answered` or `unanswered`. An error before that is counted here and raised."""
    slot = worker.slots.take_now(caller) if within is None else None  # most calls get a slot at once: one coroutine less
    if slot is None:
        slot = await slot_within(caller, worker, within)
    try:  # `with slot`, whose two calls stand apart: the answer is written between them
        call = UnaryCall(exchange, worker, request)
        call.deadline = caller.deadline
        await worker.call(call, caller, _TENSOR)
    except BaseException as e:
        slot.leave(stopped=True)
        slot.unanswered(e)
        raise
    slot.leave()
    response = call.response
    if response is None:
        slot.unanswered()
        raise call.failure()
    return slot, call, response


async def replied(
    calls: V2Calls, exchange: Exchange, worker: Worker, request: v2.V2Request, response: InferResponse
) -> list[Buffer]:
    """The JSON of a response, and its binary data. Memory of the model is used as it is only if it is read-only. Writable
    memory is copied: a model may reuse it for its next response before this one has left."""
    check_response(response)
    try:
        reply = await calls.write(exchange, worker, response, request)
    except v2.V2Error as e:
        raise error_of(e) from None
    return await fixed(reply.buffers)


async def fixed(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The bytes in buffers that no model can change: writable ones are copied."""
    if not any(type(piece) is memoryview and not piece.readonly for piece in buffers):
        return list(buffers)
    if sum(map(len, buffers)) > _LONG:
        return await run_in_codec_thread(partial(_fixed, buffers))
    return _fixed(buffers)


def _fixed(data: Sequence[Buffer]) -> list[Buffer]:
    return [bytes(piece) if type(piece) is memoryview and not piece.readonly else piece for piece in data]


@final
class StreamForm:
    """The form of responses in the body: its content type, and the function that wraps a response."""

    __slots__ = ("content_type", "wrap")

    def __init__(self, content_type: str, wrap: Callable[[Buffer, Sequence[Buffer]], Sequence[Buffer]]) -> None:
        self.content_type, self.wrap = content_type.encode(), wrap


def _event(text: Buffer, data: Sequence[Buffer] = ()) -> Sequence[Buffer]:
    """One server-sent event. The JSON has no line ends; Unicode's are escaped here, so it stays one line for every
    client."""
    assert not data
    if type(text) is bytes:
        text = unbroken(text)
    event = (b"data: ", text, b"\n\n")
    return (b"".join(event),) if len(text) <= _JOINED else event


EVENTS = StreamForm(CONTENT_TYPE, _event)
FRAMES = StreamForm(v2.FRAMES, v2.encode_frame)


class StreamedResponses:
    """The sending side of a stream: each response is an event or frame, and the first one sends the head."""

    __slots__ = ("_exchange", "_form", "_outbound", "_sent", "_since", "_worker")

    def __init__(self, exchange: Exchange, worker: Worker, form: StreamForm) -> None:
        self._exchange, self._worker = exchange, worker
        self._form, self._outbound = form, exchange.outbound
        self._sent = 0
        self._since = perf_counter_ns()  # when the last response was on its way

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    def put(self, buffers: Sequence[Buffer], made: int) -> None:
        """Sends a response, for which there is room. `made`: when its model sent it, by `perf_counter_ns`."""
        outbound = self._outbound
        if not outbound.status:
            self.start()
        outbound.push(*buffers)
        now = perf_counter_ns()
        self._worker.statistics.response(self._sent, made - self._since, now - made)
        self._sent, self._since = self._sent + 1, now

    def start(self) -> None:
        """Sends the head, before the first response."""
        exchange = self._exchange
        # a cache has no use for a stream, and a proxy that keeps it would hold it back
        fixed = ((b"content-type", self._form.content_type), (b"cache-control", b"no-cache"))
        exchange.outbound.start(200, [*fixed, *reply_headers(exchange)])

    async def call(self, session: Session[Any, Any], family: Family) -> None:
        """Calls the model, inside its slot. From here on, errors are written in the form of the stream."""
        exchange, worker = self._exchange, self._worker
        exchange.fail = self.fail
        try:
            await worker.call(session, exchange, family)
        except trio.Cancelled:
            if exchange.gone:
                worker.statistics.no_response(self._sent, perf_counter_ns() - self._since, cancelled=True)
            raise

    def finish(self) -> None:
        """Ends the answer after the model has returned."""
        if not self._outbound.status:
            self.start()
        self._outbound.finish()

    def fail(self, error: GatewayError) -> None:
        """Answers an HTTP status before the head. After it, writes the error as the last event or frame, and ends the body
        whole."""
        exchange = self._exchange
        self._worker.statistics.no_response(self._sent, perf_counter_ns() - self._since, cancelled=False)
        if exchange.outbound.status:
            exchange.outbound.push(*self._form.wrap(v2.failure_body(error.message), ()))
            exchange.outbound.finish(error.ending)
        else:
            refuse(exchange, error)


@final
class StreamChannel(_Requests, StreamedResponses):
    """The channel of a streamed call. `encode` makes the event or frame of a response; it raises TypeError for any other
    message."""

    __slots__ = ("_arriving", "_encode", "_request", "exhausted")

    def __init__(
        self,
        exchange: Exchange,
        worker: Worker,
        request: v2.V2Request,
        form: StreamForm,
        encode: Callable[[Any], Awaitable[Sequence[Buffer]]],
        arriving: Arriving | None = None,
    ) -> None:
        super().__init__(exchange, worker, form)
        self._request, self._arriving, self._encode = request, arriving, encode
        self.exhausted = False

    async def send(self, message: Any, /) -> None:
        made = perf_counter_ns()
        buffers = await self._encode(message)
        await self._outbound.wait_room(sum(map(len, buffers)))
        self.put(buffers, made)
