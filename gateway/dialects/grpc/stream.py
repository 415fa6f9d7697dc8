"""ModelStreamInfer: many requests to many models in one call, each with its own slot and ending.

One of the call's tasks leads, as one of the server's does (`gateway.core.runner`): it reads one message after the other,
each a request, and calls the model itself. If a request waits, it keeps its task, and another task leads. Requests to models
with one response are answered, or refused, in the order in which they came; those to decoupled models as their models send.

Before its first message a stream has no tasks of its own: the task of its exchange waits. Between two messages it keeps its
tasks, but among many streams one that is quiet gives them up, and waits as before its first message: `_Crowd`.

All requests share one answer. Each waits for its turn to write, and then for room in the stream's window: a client that does
not read stops all its models. At most `v2.stream_requests` requests are under way; the client's window closes behind them.

An invalid request is answered by an error message, and the stream goes on. Bytes that are no message end the stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeAlias, final

import trio

from gateway.codecs.tensors import SHORT, check_response, outputs_of, request_of
from gateway.codecs.threads import codec
from gateway.core.exchange import Exchange
from gateway.core.route import Row
from gateway.core.runner import close_left_open, resumed, scope_of
from gateway.core.turn import SENT
from gateway.dialects.answers import reply_of
from gateway.dialects.call import session_of
from gateway.dialects.grpc.calls import Calls, Incoming, end_stream, rows_of, start_stream
from gateway.dialects.grpc.infer import SERVICE, InferMessages
from gateway.dialects.grpc.status import CallRefused
from gateway.dialects.grpc.text import output_of, read_text
from gateway.dialects.inner_call import InnerCall
from gateway.dialects.v2.channels import fixed, one_response
from gateway.dialects.v2.requests import Timeout, batch_of, error_of, schedule, slot_within
from gateway.dialects.v2.text import AfterPrompt, EachToken, WholeText
from gateway.errors import GatewayError
from gateway.telemetry.observer import log_failure
from gateway.workers.worker import Worker
from models.messages import Family, InferRequest, InferResponse
from protocols.events import Buffer
from protocols.grpc.framing import frame
from protocols.grpc.heads import CallHead
from protocols.grpc.v2_messages import InferCall, render_stream_error
from protocols.v2.tensors import NO_PARAMETERS, V2Error, V2Tensor

_TENSOR = Family.TENSOR
_AS_STATUS = b"triton_grpc_error"
_MOST_READY = 256  # streams that may keep their tasks while they are quiet
_LOOKS = 4  # streams that are looked at together
_QUIET = 0.25  # seconds after its last byte from which a stream is quiet
_Names: TypeAlias = tuple[str, str, str]  # the model, version and id that a refusal names


@final
class ModelStreamDialect:
    """Answers ModelStreamInfer."""

    def __init__(self, calls: Calls, messages: InferMessages, at_once: int) -> None:
        """At most `at_once` requests of one stream are under way."""
        self._calls, self._messages, self._at_once = calls, messages, at_once
        self._crowd = _Crowd()

    def rows(self) -> list[Row]:
        """Its one method."""
        return rows_of(SERVICE, {"ModelStreamInfer": self.stream})

    async def stream(self, exchange: Exchange, call: CallHead) -> None:
        """/inference.GRPCInferenceService/ModelStreamInfer. Ends when the client sends no more and all is answered. If the
        client leaves, all of its models are cancelled at once. With the metadata `triton_grpc_error: true`, the first
        request that fails ends the stream with its status."""
        self._calls.begin(exchange, call)
        incoming = Incoming(exchange, call, self._calls.limit)
        ended = False
        while not ended and (first := await incoming.next()) is not None:  # while it waits here, it has no tasks of its own
            stream = _Stream(exchange, incoming, first, self._messages, self._crowd, self._at_once)
            del first  # the stream may outlive it
            ended = await stream.serve()
            del stream
        end_stream(exchange)


@final
class _Answered:
    """The end of a request's answer: the next request in order waits for it."""

    __slots__ = ("_event", "over")

    def __init__(self, *, over: bool = False) -> None:
        self.over = over
        self._event: trio.Event | None = None

    async def wait(self) -> None:
        """Returns once the answer has ended."""
        if not self.over:
            self._event = trio.Event()
            await self._event.wait()

    def set(self) -> None:
        """Called when the answer has ended."""
        self.over = True
        if self._event is not None:
            self._event.set()


_NOW = _Answered(over=True)


@final
class _Request:
    """One of the stream's requests under way."""

    __slots__ = ("after", "arrived", "asked", "before", "buffers", "error", "inner", "names", "within", "worker")

    def __init__(self, inner: InnerCall, arrived: int) -> None:
        self.inner, self.arrived = inner, arrived
        self.before = self.after = _NOW
        """For requests that are answered in order: the end that this one waits for, and its own end."""
        self.asked: InferCall
        """The message as it was read; not set if the request is refused."""
        self.worker: Worker | None = None
        self.within: Timeout | None = None
        self.names: _Names | None = None
        """The names that the answer repeats; None: those of `asked`."""
        self.error: GatewayError | None = None
        """The error that the request ends with; None if it has not failed."""
        self.buffers: Sequence[Buffer] = ()
        """The rest of the answer; empty if there is none."""


@final
class _Task:
    """One of the stream's tasks, its request, and the scope around the request."""

    __slots__ = ("cancel_status", "context", "leads", "request", "scope", "task")

    def __init__(self) -> None:
        self.task, self.context = trio.lowlevel.current_task(), copy_context()
        self.leads = True
        self.request: _Request | None = None
        self.scope: trio.CancelScope
        self.cancel_status: object

    def tidy(self) -> None:
        """Called after a model has returned: if the model left a scope open, the task is not used again."""
        if scope_of(self.task) is not self.cancel_status:
            close_left_open(self.task, self.cancel_status)
            self.leads = False


@final
class _Crowd:
    """The streams that have tasks of their own.

    They keep them between two messages: to begin and end tasks costs as much as a small request. But while there are more
    than `_MOST_READY`, those that are quiet give them up: each costs memory, and each full run of the garbage collector
    looks at all of their objects, while every client waits.
    """

    def __init__(self) -> None:
        self._streams: OrderedDict[_Stream, None] = OrderedDict()  # in the order in which they are looked at

    def enter(self, stream: _Stream) -> None:
        """Called when the stream begins tasks."""
        self._streams[stream] = None
        self.thin_out()

    def leave(self, stream: _Stream) -> None:
        """Called when they are over."""
        del self._streams[stream]
        if not len(self._streams) % 256:
            self._streams = self._streams.copy()  # smaller: a dict that many have left keeps their room

    def thin_out(self) -> None:
        """Makes quiet streams rest if there are too many. It looks at a few, so it is called whenever a stream begins tasks,
        and when a request that has waited is over."""
        for _ in range(_LOOKS):
            if len(self._streams) <= _MOST_READY:
                return
            stream = next(iter(self._streams))
            self._streams.move_to_end(stream)
            stream.rest()


@final
class _Stream:
    """A call of ModelStreamInfer while it has tasks of its own."""

    def __init__(
        self,
        exchange: Exchange,
        incoming: Incoming,
        first: memoryview,
        messages: InferMessages,
        crowd: _Crowd,
        at_once: int,
    ) -> None:
        self._exchange, self._incoming, self._messages, self._crowd = exchange, incoming, messages, crowd
        self._first: memoryview | None = first  # the message that is read and not answered yet
        self._as_status = exchange.fields.get(_AS_STATUS, b"").lower() == b"true"
        self._turn = exchange.outbound.turn
        self._places = self._at_once = at_once  # for further requests; only the leading task takes one
        self._vacant: trio.Event | None = None  # the leading task waits for a place
        self._followers: list[_Task] = []
        self._speaking: trio.Lock | None = None  # made for the first that waits for room
        self._answered = _NOW  # the end of the last request that is answered in order
        self._ended = False  # the client sends no more
        self._error: Exception | None = None
        self._nursery: trio.Nursery

    async def serve(self) -> bool:
        """Reads requests, and returns when all are answered: True if the client sends no more, False after `rest`."""
        error: BaseException | None = None
        self._crowd.enter(self)
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._run)  # not here: see `close_left_open`
        except BaseExceptionGroup as group:
            error = _the_one(group)
        finally:
            self._crowd.leave(self)
            del self._nursery
        if error is None or isinstance(error, Exception):
            error = self._error or error
        self._error = None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it knows this frame
        return self._ended

    def rest(self) -> None:
        """Ends the stream's tasks if it is quiet: no request is under way, and the client has sent nothing for a while. A
        message that has begun to arrive is kept."""
        exchange, inbound = self._exchange, self._exchange.inbound
        if self._places + 1 < self._at_once or inbound is None or not inbound.waits:
            return
        if exchange.owner.clock() - exchange.arrived_at > _QUIET:
            self._nursery.cancel_scope.cancel()

    def _stop(self, error: Exception) -> None:
        """Ends the stream with this error, and cancels all requests under way."""
        if self._error is None:
            self._error = error
        self._nursery.cancel_scope.cancel()

    # -- leading -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Leads, and again whenever the task is promoted. A scope serves until a request in it is cancelled: that request is
        answered outside of the scope."""
        me = _Task()
        try:
            while me.leads:
                with trio.CancelScope() as me.scope:
                    me.cancel_status = scope_of(me.task)
                    await self._lead(me)
                if (request := me.request) is not None:
                    if me.scope.cancelled_caught:
                        request.error = request.inner.interruption_or_deadline
                    await self._answer(request)
                    self._over(me)
                    await self._follow(me)
                del request
        finally:
            if me.request is not None:
                self._over(me)

    async def _lead(self, me: _Task) -> None:
        """Serves one request after the other. If a request waits, another task leads, and this one follows after it. Returns
        when the task is no longer needed, or a request has cancelled the scope."""
        while True:
            request = me.request = await self._next(me.scope)
            if request is None:
                return self._end(me)
            inner = request.inner
            context, waited = me.context.copy(), False  # so that no model sees the context variables of another
            try:
                trap = context.run((work := self._serve(me, request)).send, None)
            except StopIteration:
                pass
            else:
                waited = True
                self._promote_follower()
                me.task.context = context
                try:
                    await resumed(work, trap, self._turn)
                finally:
                    me.task.context = me.context
                    del trap
            finally:
                del work, context, request  # the task may outlive them
                me.tidy()
            if answered := not inner.cancelled:
                self._over(me)
            if not waited and not (me.leads and answered):
                self._promote_follower()
            if not answered:
                return
            if waited:
                await self._follow(me)
            if not me.leads:
                return

    def _promote_follower(self) -> None:
        if self._followers:
            trio.lowlevel.reschedule(self._followers.pop().task)
        else:
            self._nursery.start_soon(self._run)

    async def _follow(self, me: _Task) -> None:
        """Waits until the task is promoted or no longer needed; in the second case `leads` is False."""

        def abort(_: object) -> trio.lowlevel.Abort:
            self._followers.remove(me)
            return trio.lowlevel.Abort.SUCCEEDED

        self._crowd.thin_out()
        if self._ended:
            me.leads = False
        elif me.leads:
            self._followers.append(me)
            await trio.lowlevel.wait_task_rescheduled(abort)

    def _end(self, me: _Task) -> None:
        """Releases all followers: the client sends no more, so no task leads."""
        self._ended = True
        for follower in (me, *self._followers):
            follower.leads = False
        for follower in self._followers:
            trio.lowlevel.reschedule(follower.task)
        self._followers.clear()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _next(self, scope: trio.CancelScope) -> _Request | None:
        """The request in the next message, or its refusal; None where there are no more."""
        turn, messages = self._turn, self._messages
        if turn.left <= SENT or turn.over():  # here, as inside a request another task would be promoted
            await turn.renew()
        if not self._places:
            self._vacant = trio.Event()
            await self._vacant.wait()
        self._places -= 1
        if (message := self._first) is not None:
            self._first = None
        elif (message := await self._incoming.next()) is None:
            return None
        self._incoming.taken()  # from now on its call pays for it
        inner = InnerCall(self._exchange, self._incoming.count, len(message), scope)
        request = _Request(inner, perf_counter_ns())
        try:
            request.asked = asked = await messages.read(inner, message)
            request.worker = messages.model_of(self._exchange, asked)
            if asked.request.parameters:
                request.within = schedule(inner, asked.request.parameters)
        except (GatewayError, V2Error) as e:
            request.error, request.worker = error_of(e) if isinstance(e, V2Error) else e, None
            if isinstance(e, CallRefused):  # the messages after it cannot be trusted
                inner.close()
                raise
            # Its answer keeps its place: its client may match answers by order alone.
            request.names = messages.names_of(message)
        except BaseException:
            inner.close()
            raise
        name = request.names[0] if request.names else asked.model_name
        if not messages.tensors.is_decoupled(name):
            request.before = self._answered
            request.after = self._answered = _Answered()
        return request

    async def _serve(self, me: _Task, request: _Request) -> None:
        """Calls the model of a request and answers it. If the request's scope is cancelled, `_run` answers it."""
        worker, inner = request.worker, request.inner
        try:
            if worker is not None:
                try:
                    if worker.spec.family is not _TENSOR:
                        await self._text(request, worker)
                    elif worker.spec.decoupled:
                        await self._decoupled(request, worker)
                    else:
                        await self._one(request, worker)
                except GatewayError as e:
                    request.error = e
            me.tidy()
            inner.model_over()
            if not inner.cancelled:
                await self._answer(request)
        except Exception as e:
            self._stop(e)

    async def _answer(self, request: _Request) -> None:
        """Sends the rest of the answer, or the error, when it is the request's turn."""
        error, before = request.error, request.before
        try:
            if not before.over:
                if error is None:  # the answer waits in memory, and the objects of the request are gone
                    request.inner.making(sum(map(len, request.buffers)))
                await before.wait()
            if error is None:
                if request.buffers and not self._try_say(request.buffers):
                    await self._say(request.buffers)
            else:
                if request.worker is not None:
                    log_failure(self._exchange, error)
                await self._say_error(request.names or _names(request.asked), error)
        except Exception as e:
            self._stop(e)
        finally:
            del error

    def _over(self, me: _Task) -> None:
        request, me.request = me.request, None
        assert request is not None
        request.error = None  # it knows frames that know the request
        request.after.set()
        request.inner.close()
        self._places += 1
        if self._vacant is not None:
            self._vacant.set()

    # -- models --------------------------------------------------------------------------------------------------------

    async def _one(self, request: _Request, worker: Worker) -> None:
        """Calls a model that gives one response."""
        inner, asked = request.inner, request.asked
        slot, unary, response = await one_response(self._exchange, inner, worker, asked.request, request.within)
        try:
            request.buffers = await self._rendered(asked, worker, response, unary.outputs, unary.size, final=True)
        except BaseException as e:
            slot.unanswered(e)
            raise
        batch = batch_of(worker, asked.request) if worker.spec.max_batch_size else 1
        slot.answered(request.arrived, batch, asked.request.copied)

    async def _decoupled(self, request: _Request, worker: Worker) -> None:
        """Calls a model that gives any number of responses, and sends each at once."""
        inner, asked = request.inner, request.asked
        with await slot_within(inner, worker, request.within):
            channel = _Responses(self._exchange, partial(self._send, asked, worker), asked)
            session = session_of(self._exchange, worker, channel, parameters=asked.request.parameters)
            session.deadline = inner.deadline
            await worker.call(session, inner, _TENSOR)
        if asked.empty_final:
            request.buffers = self._end_of(asked, worker)

    async def _text(self, request: _Request, worker: Worker) -> None:
        """Calls a text model: a response for each token, or one with the whole text."""
        inner, asked = request.inner, request.asked
        try:
            call = await read_text(inner, asked, worker, self._messages.tensors)
        except V2Error as e:
            raise error_of(e) from None
        channel: EachToken | WholeText
        prompt, lead = call.asked.prompt, None
        if call.streams:
            response = partial(self._text_response, asked, worker)
            if call.asked.with_prompt:
                lead = AfterPrompt(prompt, self._speak, response)
                channel = EachToken(self._exchange, worker, prompt, lead.speak, response)
            else:
                channel = EachToken(self._exchange, worker, prompt, self._speak, response)
        else:
            channel = WholeText(self._exchange, worker, prompt)
        with await slot_within(inner, worker, request.within):
            session = session_of(self._exchange, worker, channel)
            session.deadline = inner.deadline
            await worker.call(session, inner, Family.TEXT)
        if type(channel) is WholeText:
            request.buffers = self._text_response(asked, worker, call.asked.whole(channel.whole()), final=True)
        else:
            await channel.finish()
            if lead is not None:
                await lead.finish()
            if asked.empty_final:
                request.buffers = self._end_of(asked, worker)

    def _text_response(self, asked: InferCall, worker: Worker, text: bytes, *, final: bool = False) -> Sequence[Buffer]:
        return frame(self._messages.writer_of(worker).render_streamed([output_of(text)], asked.request, final=final))

    def _end_of(self, asked: InferCall, worker: Worker) -> Sequence[Buffer]:
        """The message that ends a request with any number of responses."""
        return frame((self._messages.writer_of(worker).render_end(asked.request),))

    async def _send(self, asked: InferCall, worker: Worker, response: InferResponse) -> None:
        check_response(response)
        await self._say(await self._rendered(asked, worker, response, *outputs_of(response), final=False))

    async def _rendered(
        self, asked: InferCall, worker: Worker, response: InferResponse, outputs: list[V2Tensor], size: int, *, final: bool
    ) -> Sequence[Buffer]:
        """A response as a message. The model can no longer change its bytes."""
        parameters = dict(response.parameters) if response.parameters else NO_PARAMETERS
        render = self._messages.writer_of(worker).render_streamed
        try:
            if size <= SHORT:
                buffers = render(outputs, asked.request, response.id, parameters, final=final)
            else:
                buffers = await codec(size, partial(render, outputs, asked.request, response.id, parameters, final=final))
        except V2Error as e:
            raise error_of(e) from None
        framed = frame(buffers)
        return framed if len(framed) == 1 else await fixed(framed)

    # -- sending -------------------------------------------------------------------------------------------------------

    async def _say(self, buffers: Sequence[Buffer]) -> None:
        """Sends a message; waits for its turn and for room."""
        if not self._try_say(buffers):
            await self._speak(sum(map(len, buffers)), lambda: buffers)

    def _try_say(self, buffers: Sequence[Buffer]) -> bool:
        """Sends a message if no other one waits and there is room. False if it is not sent."""
        n = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        if (self._speaking is not None and self._speaking.locked()) or not self._exchange.outbound.try_room(n):
            return False
        self._push(buffers)
        return True

    async def _speak(self, n: int, make: Callable[[], Sequence[Buffer]]) -> None:
        if self._speaking is None:
            self._speaking = trio.Lock()
        async with self._speaking:
            await self._exchange.outbound.wait_room(n)
            self._push(make())

    def _push(self, buffers: Sequence[Buffer]) -> None:
        if not buffers:
            return
        outbound = self._exchange.outbound
        if not outbound.status:
            start_stream(self._exchange)
        outbound.push(*buffers)

    async def _say_error(self, names: _Names, error: GatewayError) -> None:
        """Sends the error of the request with these names, or ends the stream with it if the client has asked for that."""
        if self._as_status:
            self._stop(error)
            return
        model, version, id = names
        await self._say(frame((render_stream_error(error.message, id, model_name=model, model_version=version),)))


@final
class _Responses:
    """The channel of a decoupled model: one request in, responses out."""

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
    """The names of a request, in the form of `InferMessages.names_of`."""
    return asked.model_name, asked.model_version, asked.request.id


def _the_one(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that the stream ends with: whatever is not an Exception, such as its cancellation; otherwise one of the
    errors that came together."""
    failed, others = group.split(Exception)
    if failed is None or others is not None:
        return others or group
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
