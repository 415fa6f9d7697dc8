"""v2 over a WebSocket: each message is one inference request, and each response leaves as soon as the model sends it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter_ns
from typing import final

import trio

from gateway.codecs.tensors import request_of
from gateway.codecs.threads import codec
from gateway.config import BidiConfig
from gateway.core.exchange import Exchange
from gateway.core.route import WEBSOCKET, Row
from gateway.dialects.answers import JSON, accepted_handshake, close, reply_of
from gateway.dialects.call import session_of
from gateway.dialects.v2.channels import replied
from gateway.dialects.v2.requests import Timeout, V2Calls, batch_of, refuse, timeout_of
from gateway.errors import (
    BadRequest,
    DeadlineExceeded,
    Ending,
    GatewayError,
    ModelCrashed,
    ModelFailed,
    ModelOutOfMemory,
    Overloaded,
    TooLarge,
)
from gateway.telemetry.observer import log_failure
from gateway.workers.slot import Slot
from gateway.workers.worker import Worker
from models.messages import Family, InferRequest, InferResponse
from models.session import Session
from protocols import v2
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Frame, Opcode
from protocols.websocket import handshake

_TEXT, _BINARY, _CONTINUATION = Opcode.TEXT, Opcode.BINARY, Opcode.CONTINUATION
_FOREVER = float("inf")
_OF_A_REQUEST = (ModelFailed, ModelCrashed, ModelOutOfMemory, BadRequest)
"""Errors that end the current request, but not the session."""


@final
class SessionDialect:
    """Serves sessions of inference requests."""

    def __init__(self, calls: V2Calls, config: BidiConfig) -> None:
        self._calls, self._config = calls, config

    def rows(self) -> list[Row]:
        """The upgrades at the paths of infer."""
        paths = ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer")
        return [Row(WEBSOCKET, path, self.session, dialect="v2", refuse=refuse) for path in paths]

    async def session(self, exchange: Exchange, name: str, version: str = "") -> None:
        """The WebSocket at /v2/models/{name}[/versions/{version}]/infer.

        A text message is a request in JSON, a binary one a request as a frame. The answer has the form of its request; it is
        a frame if the request asks for binary outputs. The session is one call of the model with many requests, and ends
        when the model returns. If a request is invalid or the model fails at it, the answer is a text message with `error`
        and the request's `id`. After a failure the model is called again, for the requests that follow.
        """
        worker = self._calls.worker(exchange, name, version, infers=True)
        try:
            accepted = accepted_handshake(exchange, worker.spec.subprotocols)
        except RemoteProtocolError as e:
            headers = [JSON, *handshake.refusal_headers(e)]
            exchange.outbound.respond(e.status, headers, v2.V2Error(str(e)).error_body(), ending=Ending.REFUSED)
            return
        config = self._config
        # A client waits for a slot at most as long as a session may last.
        exchange.limit_time(config.session_timeout, "bidi.session_timeout")
        with await worker.slots.take(exchange) as slot:
            slot.counts = False
            if not worker.spec.timeout:
                exchange.limit_time(config.session_timeout, "bidi.session_timeout")
            if config.idle_timeout:
                exchange.limit_silence(config.idle_timeout, "bidi.idle_timeout")
            channel = _SessionChannel(self._calls, exchange, worker, slot)
            exchange.words = close
            exchange.outbound.start(101, accepted)
            while not await channel.call():
                pass
        exchange.outbound.finish()


@final
class _SessionChannel:
    """The channel of a session: each message in is a request, and each response is a message out."""

    complete = False  # its model says by its return that there is no more

    def __init__(self, calls: V2Calls, exchange: Exchange, worker: Worker, slot: Slot) -> None:
        self._calls, self._exchange, self._worker, self._slot = calls, exchange, worker, slot
        self._inbound, self._outbound = exchange.open_inbound(), exchange.outbound
        self._opcode = _TEXT  # the arriving message's
        self._joined: bytearray | None = None  # the frames so far of an arriving message that has several
        self._fragmented = 0  # messages that had several frames
        self._inbound.under_way = self._under_way
        self._whole: memoryview | None = None  # a whole message that is not read yet
        self._refusal = b""  # the answer to an invalid request, until there is room for it
        self._asked: v2.V2Request | None = None  # the current request
        self._framed = False  # the current request came as a frame
        self._timeout: Timeout | None = None
        self._speaking = trio.Lock()  # a request may be refused while the model sends a response
        self._scope = trio.CancelScope()
        self._session: Session[InferRequest, InferResponse]
        self._since = 0

    @property
    def reply(self) -> dict[str, str]:
        return reply_of(self._exchange)

    async def call(self) -> bool:
        """Calls the model. True if it has returned; False if it failed at a request, whose client was told."""
        exchange, worker = self._exchange, self._worker
        self._over()
        self._begin()
        self._session = session_of(exchange, worker, self)
        error: GatewayError
        try:
            with trio.CancelScope() as self._scope:
                await worker.call(self._session, exchange, Family.TENSOR)
            if not self._scope.cancelled_caught:
                self._count()
                return True
            if self._timeout is None:
                return False  # the request had been answered when its time ran out
            error = DeadlineExceeded(f"the request's {self._timeout.seconds:g} s are over ({Timeout.NAME})")
        except _OF_A_REQUEST as e:
            error = e
        except BaseException:
            self._count(failed=True)
            raise
        finally:
            del self._session  # they know each other: a cycle would keep the exchange's memory
        asked = self._asked
        self._count(failed=True)
        try:
            if asked is None or exchange.interruption is not None:
                raise error  # no request can be answered, or the session ends
            log_failure(exchange, error)  # the session goes on, so nothing else logs it
            said = v2.failure_body(error.message, asked.id)
        finally:
            del error  # it knows this frame: a cycle would keep the exchange's memory
        await self._say(_TEXT, (said,))
        return False

    def _begin(self) -> None:
        self._asked, self._framed = None, False

    # -- requests --------------------------------------------------------------------------------------------------

    async def receive(self) -> InferRequest:
        exchange = self._exchange
        self._count()
        self._over()
        while True:
            if self._refusal:
                await self._say(_TEXT, (self._refusal,))
                self._refusal = b""
            whole = self._whole
            if whole is None:
                whole = await self._message()
            began = perf_counter_ns()
            text, header_length = whole, None
            try:
                if self._opcode is _BINARY:
                    frame = v2.split_frame(whole)
                    text, header_length = frame.body, frame.header_length
                request = await self._calls.read(exchange, self._worker, text, header_length)
                timeout = timeout_of(request.parameters)
            except v2.V2Error as e:
                text = text[:header_length]
                id = await codec(len(text), partial(v2.id_of, text, self._calls.bounds))
                self._refusal = v2.failure_body(e.message, id)
                self._whole = None
                self._inbound.assembled()
                continue
            self._whole = None
            self._session.deadline = exchange.deadline
            self._asked, self._framed, self._since = request, header_length is not None, began
            if timeout is not None:
                self._limit(timeout)
            return request_of(request)

    async def _message(self) -> memoryview:
        """The next message, whole. Its memory is paid for until the model asks for the next request. If this is cancelled,
        the frames received so far are kept."""
        limit = self._calls.body
        while True:
            frame = await self._inbound.receive()
            if frame is None:
                raise trio.EndOfChannel
            assert isinstance(frame, Frame)
            if frame.opcode is not _CONTINUATION:
                self._opcode = frame.opcode
            joined, data = self._joined, frame.data
            size = len(data) if joined is None else len(joined) + len(data)
            if size > limit:
                raise self._broken(TooLarge(f"a message of {size} bytes is over the limit of {limit} bytes (limits.body)"))
            try:
                self._inbound.assembling(size)
            except Overloaded as e:
                raise self._broken(e) from None
            if joined is not None:
                joined += data
            elif not frame.fin:
                self._joined = bytearray(data)
                self._fragmented += 1
            if frame.fin:
                self._joined = None
                self._whole = whole = memoryview(data if joined is None else joined).toreadonly()
                return whole

    def _under_way(self) -> tuple[object, int] | None:
        """The number of the message that has some of its frames here, and their bytes; None if there is none."""
        return None if self._joined is None else (self._fragmented, len(self._joined))

    def _broken(self, error: GatewayError) -> GatewayError:
        """Interrupts the exchange and returns the error to raise: a model that catches it and goes on is cancelled."""
        self._exchange.interrupt(error)
        return error

    def _limit(self, timeout: Timeout) -> None:
        self._timeout = timeout
        if timeout.until < self._exchange.deadline:
            self._scope.deadline = self._session.deadline = timeout.until

    def _over(self) -> None:
        """Called when the model is done with the current request: ends its time limit and gives back its memory."""
        self._timeout = None
        self._scope.deadline = _FOREVER
        self._exchange.making(0)
        if self._whole is None and self._joined is None:
            self._inbound.assembled()

    def _count(self, *, failed: bool = False) -> None:
        """Counts the current request in the model's statistics."""
        since, self._since = self._since, 0
        if since:
            now, statistics, queue = perf_counter_ns(), self._worker.statistics, self._slot.take_waited()
            if failed:
                statistics.failure(now, now - since, cancelled=self._exchange.gone)
            else:
                size = 1 if self._asked is None else batch_of(self._worker, self._asked)
                statistics.success(since, since, since + queue, now, now, size)

    # -- answers ---------------------------------------------------------------------------------------------------

    async def send(self, message: InferResponse, /) -> None:
        framed = self._framed
        text, *data = await replied(self._calls, self._exchange, self._worker, self._asked or v2.V2Request(), message)
        if framed or data:
            await self._say(_BINARY, v2.encode_frame(text, data))
        else:
            await self._say(_TEXT, (text,))

    async def _say(self, opcode: Opcode, buffers: Sequence[Buffer]) -> None:
        try:
            self._speaking.acquire_nowait()
        except trio.WouldBlock:
            await self._speaking.acquire()
        try:
            await self._outbound.wait_room(sum(map(len, buffers)))
            self._outbound.push_frame(opcode, True, *buffers)
        finally:
            self._speaking.release()
