"""ModelStreamInfer: many requests of many models in one call, each with its own slot and ending, answered as they go.

The task of the exchange reads: one message after the other, each of which is read as a request, and has then a task of its
own, in which its model is called. Requests of models with one response are answered, or refused, in the order in which they
came; those of decoupled models as their models speak. All share one answer: who has something to say waits for the others
to have said theirs, and then for room in the window of the stream, so that a client that does not read stops each of its
models. At most `v2.stream_requests` are under way; the client's window closes behind them.

What is wrong with one request is a message of the stream, which goes on; what cannot be read as a message ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeAlias, final

import trio

from gateway.codecs.tensors import SHORT, check_response, outputs_of, request_of
from gateway.codecs.threads import codec
from gateway.core.exchange import Exchange
from gateway.core.route import Row
from gateway.dialects.answers import reply_of
from gateway.dialects.call import session_of
from gateway.dialects.grpc.calls import Calls, Incoming, end_stream, rows_of, start_stream
from gateway.dialects.grpc.infer import SERVICE, InferMessages
from gateway.dialects.grpc.status import CallRefused
from gateway.dialects.inner_call import InnerCall
from gateway.dialects.v2.channels import UnaryCall, fixed
from gateway.dialects.v2.requests import Timeout, error_of, schedule, slot_within
from gateway.errors import GatewayError
from gateway.telemetry.observer import log_failure
from gateway.workers.worker import Worker
from models.messages import Family, InferRequest, InferResponse
from protocols.events import Buffer
from protocols.grpc.framing import frame
from protocols.grpc.heads import CallHead
from protocols.grpc.v2_messages import InferCall, render_stream_error
from protocols.v2.tensors import NO_PARAMETERS, V2Error

_TENSOR = Family.TENSOR
_AS_STATUS = b"triton_grpc_error"
_NOW = trio.Event()
_NOW.set()
_Names: TypeAlias = tuple[str, str, str]  # what a refusal names: model, version and id


@final
class ModelStreamDialect:
    """Answers ModelStreamInfer."""

    def __init__(self, calls: Calls, messages: InferMessages, at_once: int) -> None:
        """`at_once` requests of one stream may be under way."""
        self._calls, self._messages, self._at_once = calls, messages, at_once

    def rows(self) -> list[Row]:
        """Its one method."""
        return rows_of(SERVICE, {"ModelStreamInfer": self.stream})

    async def stream(self, exchange: Exchange, call: CallHead) -> None:
        """/inference.GRPCInferenceService/ModelStreamInfer. Over when the client sends no more and all is answered; when it
        leaves, all of its models are cancelled at once. With the metadata `triton_grpc_error: true` the first error of a
        request ends the stream with its status."""
        self._calls.begin(exchange, call)
        stream = _Stream(exchange, call, self._calls.limit, self._messages, self._at_once)
        await stream.serve()
        end_stream(exchange)


@final
class _Stream:
    """One such call."""

    def __init__(self, exchange: Exchange, call: CallHead, limit: int, messages: InferMessages, at_once: int) -> None:
        self._exchange, self._messages = exchange, messages
        self._incoming = Incoming(exchange, call, limit)
        self._as_status = exchange.fields.get(_AS_STATUS, b"").lower() == b"true"
        self._places = trio.Semaphore(at_once, max_value=at_once)
        self._speaking = trio.Lock()
        self._answered = _NOW  # what is before the next request, of those that are answered in order
        self._error: Exception | None = None
        self._nursery: trio.Nursery

    async def serve(self) -> None:
        """Reads requests until the client sends no more, and returns when all are answered."""
        error: BaseException | None = None
        try:
            async with trio.open_nursery() as self._nursery:
                await self._read()
        except BaseExceptionGroup as group:
            error = _the_one(group)
        finally:
            del self._nursery
        if error is None or isinstance(error, Exception):
            error = self._error or error
        self._error = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it knows this frame

    def _stop(self, error: Exception) -> None:
        """The stream ends with this, and with it all that is under way."""
        if self._error is None:
            self._error = error
        self._nursery.cancel_scope.cancel()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            await self._places.acquire()
            message = await self._incoming.next()
            if message is None:
                return
            await self._begin(message)

    async def _begin(self, message: memoryview) -> None:
        """The request in a message begins, or is refused."""
        exchange, messages, arrived = self._exchange, self._messages, perf_counter_ns()
        self._incoming.taken()  # it is paid for by its call from now on
        inner = InnerCall(exchange, self._incoming.count, len(message))
        try:
            asked = await messages.read(inner, message)
            worker = messages.model_of(exchange, asked)
            within = schedule(inner, asked.request.parameters) if asked.request.parameters else None
        except (GatewayError, V2Error) as e:
            error = error_of(e) if isinstance(e, V2Error) else e
            if isinstance(error, CallRefused):  # what follows cannot be trusted
                inner.close()
                raise
            names = messages.names_of(message)
            before, after = self._answered, trio.Event()
            if messages.tensors.is_decoupled(names[0]):
                before = _NOW
            else:
                self._answered = after
            self._nursery.start_soon(self._refuse, inner, names, error, before, after)
            return
        except BaseException:
            inner.close()
            raise
        if worker.spec.decoupled:
            self._nursery.start_soon(self._decoupled, inner, asked, worker, within)
        else:
            before, self._answered = self._answered, trio.Event()
            self._nursery.start_soon(self._in_order, inner, asked, worker, within, arrived, before, self._answered)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _refuse(
        self, inner: InnerCall, names: _Names, error: GatewayError, before: trio.Event, after: trio.Event
    ) -> None:
        """A request that no model is called for. Its client may know by the order alone which one it was."""
        try:
            await before.wait()
            await self._say_error(names, error)
        except Exception as e:
            self._stop(e)
        finally:
            after.set()
            self._over(inner)

    async def _in_order(
        self,
        inner: InnerCall,
        asked: InferCall,
        worker: Worker,
        within: Timeout | None,
        arrived: int,
        before: trio.Event,
        after: trio.Event,
    ) -> None:
        """A request with one response, which is said when those before it are."""
        error: GatewayError | None = None
        buffers: Sequence[Buffer] = ()
        try:
            try:
                with inner.scope:
                    buffers = await self._one(inner, asked, worker, within, arrived)
                if inner.scope.cancelled_caught:
                    error = inner.interruption_or_deadline
                if error is None and not before.is_set():
                    inner.making(sum(map(len, buffers)))  # it waits in memory, in the place of what was made of its request
            except GatewayError as e:
                error = e
            await before.wait()
            if error is None:
                await self._say(buffers)
            else:
                log_failure(self._exchange, error)
                await self._say_error(_names(asked), error)
        except Exception as e:
            self._stop(e)
        finally:
            del error, buffers
            after.set()
            self._over(inner)

    async def _one(
        self, inner: InnerCall, asked: InferCall, worker: Worker, within: Timeout | None, arrived: int
    ) -> Sequence[Buffer]:
        """The one response of a model."""
        exchange, request = self._exchange, asked.request
        with await slot_within(inner, worker, within, request, arrived):
            unary = UnaryCall(exchange, worker, request)
            unary.deadline = inner.deadline
            await worker.call(unary, inner, _TENSOR)
            if unary.response is None:
                raise unary.failure()
            return await self._rendered(asked, worker, unary.response, final=True)

    async def _decoupled(self, inner: InnerCall, asked: InferCall, worker: Worker, within: Timeout | None) -> None:
        """A request with any number of responses, each of which is said when its model sends it."""
        error: GatewayError | None = None
        try:
            try:
                with inner.scope, await slot_within(inner, worker, within):
                    channel = _Responses(self._exchange, partial(self._send, asked, worker), asked)
                    session = session_of(self._exchange, worker, channel, parameters=asked.request.parameters)
                    session.deadline = inner.deadline
                    await worker.call(session, inner, _TENSOR)
                if inner.scope.cancelled_caught:
                    error = inner.interruption_or_deadline
            except GatewayError as e:
                error = e
            if error is not None:
                log_failure(self._exchange, error)
                await self._say_error(_names(asked), error)
            elif asked.empty_final:
                await self._say(frame((self._messages.writer_of(worker).render_end(asked.request),)))
        except Exception as e:
            self._stop(e)
        finally:
            del error
            self._over(inner)

    async def _send(self, asked: InferCall, worker: Worker, response: InferResponse) -> None:
        check_response(response)
        await self._say(await self._rendered(asked, worker, response, final=False))

    async def _rendered(self, asked: InferCall, worker: Worker, response: InferResponse, *, final: bool) -> Sequence[Buffer]:
        """A response as a message, which no model changes any more."""
        outputs, size = outputs_of(response)
        parameters = dict(response.parameters) if response.parameters else NO_PARAMETERS
        render = partial(
            self._messages.writer_of(worker).render_streamed, outputs, asked.request, response.id, parameters, final=final
        )
        try:
            buffers = render() if size <= SHORT else await codec(size, render)
        except V2Error as e:
            raise error_of(e) from None
        return frame(await fixed(buffers))

    async def _say(self, buffers: Sequence[Buffer]) -> None:
        """Sends a message when it has its turn and there is room for it."""
        outbound = self._exchange.outbound
        try:
            self._speaking.acquire_nowait()
        except trio.WouldBlock:
            await self._speaking.acquire()
        try:
            await outbound.wait_room(sum(map(len, buffers)))
            if not outbound.status:
                start_stream(self._exchange)
            outbound.push(*buffers)
        finally:
            self._speaking.release()

    async def _say_error(self, names: _Names, error: GatewayError) -> None:
        """Tells that a request, which has named these, has failed, and goes on; or ends the stream, where that is wanted."""
        if self._as_status:
            self._stop(error)
            return
        model, version, id = names
        await self._say(frame((render_stream_error(error.message, id, model_name=model, model_version=version),)))

    def _over(self, inner: InnerCall) -> None:
        inner.close()
        self._places.release()


@final
class _Responses:
    """One request in; responses out."""

    complete = False  # a model of tensors says by its return that there is no more

    __slots__ = ("_asked", "_exchange", "_send", "_taken")

    def __init__(self, exchange: Exchange, send: Any, asked: InferCall) -> None:
        self._exchange, self._send, self._asked, self._taken = exchange, send, asked, False

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    async def receive(self) -> InferRequest:
        await trio.lowlevel.checkpoint()
        if self._taken:
            raise trio.EndOfChannel
        self._taken = True
        return request_of(self._asked.request)

    async def send(self, message: Any, /) -> None:
        await self._send(message)


def _names(asked: InferCall) -> _Names:
    """As `InferMessages.names_of`."""
    return asked.model_name, asked.model_version, asked.request.id


def _the_one(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What a stream ends of: its cancellation, whatever came with that, else an error of those that came together."""
    failed, others = group.split(Exception)
    if failed is None or others is not None:
        return others or group
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
