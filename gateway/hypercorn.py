"""hypercorn's server for Trio, with fixes for clients that could end it: use `serve` in place of `hypercorn.trio.serve`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from types import FunctionType
from typing import Any, TypeVar, final

import trio
from h2.errors import ErrorCodes
from h2.events import Event, PriorityUpdated, RequestReceived, StreamReset
from h2.exceptions import ProtocolError
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.events import Event as HypercornEvent
from hypercorn.protocol import ProtocolWrapper
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response, StreamClosed
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, BUFFER_LOW_WATER, BufferCompleteError, H2Protocol, StreamBuffer
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio import run
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.utils import wrap_app
from hyperframe.frame import GoAwayFrame
from priority.priority import DeadlockError, MissingStreamError

from gateway.wires.asgi import EARLY_END, Receive, Scope, Send

log = logging.getLogger("gateway.connection")

F = TypeVar("F", bound=Callable[..., Any])


async def serve(
    app: Callable[..., Any],
    config: Config,
    *,
    shutdown_trigger: Callable[..., Awaitable[None]] | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves any ASGI application as `hypercorn.trio.serve` (0.18) does. `task_status` gets the addresses that it serves.

    These differences keep clients from ending the server, filling its memory, or waiting for ever:

    - An exception in a connection is logged by `gateway.connection`, and ends that connection alone.
    - HTTP/2: DATA after the end of an answer is dropped. PRIORITY is ignored (RFC 9113 section 5.3.2). `send` waits while
      32 KiB of its stream wait for the client's window. An incomplete answer is reset. A stream that is reset leaves nothing
      behind. A connection that has had `keep_alive_max_requests` requests ends when those are answered.

    docs/reference/asgi.md lists hypercorn's remaining limits.
    """

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        if "extensions" in scope:
            scope = {**scope, "extensions": {**scope["extensions"], EARLY_END: {}}}
        await app(scope, receive, send)

    wrapped = wrap_app(told, config.wsgi_max_body_size, "asgi")
    await _worker_serve(wrapped, config, shutdown_trigger=shutdown_trigger, task_status=task_status)


def _with(function: F, **names: object) -> F:
    """Copies a function with other globals. hypercorn finds its classes by its modules' globals alone, and those modules
    must not change for other users of hypercorn in the process."""
    assert isinstance(function, FunctionType)
    made = FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made  # type: ignore[return-value]


class _Ended:
    """Replaces a stream whose answer is over: drops the events that the client still sends."""

    idle = True

    async def handle(self, event: StreamEvent) -> None:
        pass


class _Streams(dict[int, Any]):
    """The streams of a connection."""

    def __missing__(self, stream_id: int) -> _Ended:
        return _Ended()


class _Buffer(StreamBuffer):
    """The bytes that wait for a stream's window. `push` waits while it is full."""

    async def push(self, data: bytes) -> None:
        if self._complete:
            raise BufferCompleteError
        self.buffer.extend(data)
        await self._is_empty.clear()
        while len(self.buffer) >= BUFFER_HIGH_WATER:
            await self._paused.clear()
            await self._paused.wait()

    async def pop(self, max_length: int) -> bytes:
        data = bytes(memoryview(self.buffer)[:max_length])
        del self.buffer[:max_length]
        if len(self.buffer) < BUFFER_LOW_WATER:
            await self._paused.set()
        if not self.buffer:
            await self._is_empty.set()
        return data


class _HTTP2(H2Protocol):
    _create_stream = _with(H2Protocol._create_stream, StreamBuffer=_Buffer)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.streams = _Streams()
        self._requests, self._leaving = 0, False

    async def _handle_events(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, PriorityUpdated):
                continue
            if isinstance(event, RequestReceived) and self._leaving:
                with suppress(ProtocolError):
                    self.connection.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
                continue
            await super()._handle_events([event])
            if isinstance(event, RequestReceived):
                await self._count(event.stream_id)
            elif isinstance(event, StreamReset):
                await self._forget(event.stream_id)
        await self._flush()
        await self._leave()

    async def _count(self, stream_id: int) -> None:
        """Counts a request. After `keep_alive_max_requests`, sends GOAWAY (RFC 9113 section 6.8); open streams go on. h2's
        own GOAWAY would end those too."""
        self._requests += 1
        self.keep_alive_requests = 0  # hypercorn's count, which would cut the connection
        if self._requests >= self.config.keep_alive_max_requests:
            self._leaving = True
            await self._flush()
            await self.send(RawData(GoAwayFrame(last_stream_id=stream_id).serialize()))

    async def _leave(self) -> None:
        if self._leaving and not (self.streams or self.stream_buffers or self.closed):
            await self.send(Closed())

    async def send_task(self) -> None:
        while not self.closed:
            try:
                stream_id = next(self.priority)
            except DeadlockError:
                await self._flush()
                await self.has_data.wait()
                await self.has_data.clear()
            else:
                await self._send_data(stream_id)

    async def stream_send(self, event: StreamEvent) -> None:
        if isinstance(event, Response):
            # `send_task` sends it: a client that sees a refusal may reset the stream, so head and body should go together
            fields = [(b":status", b"%d" % event.status_code), *event.headers, *self.config.response_headers("h2")]
            with suppress(ProtocolError):
                self.connection.send_headers(event.stream_id, fields)
            await self.has_data.set()
            return
        buffer = self.stream_buffers.get(event.stream_id)
        if isinstance(event, StreamClosed) and isinstance(buffer, _Buffer) and not buffer.complete:
            with suppress(ProtocolError):
                self.connection.reset_stream(event.stream_id, ErrorCodes.INTERNAL_ERROR)
            await self._forget(event.stream_id)
            await self._flush()
        await super().stream_send(event)
        await self._leave()

    async def _send_data(self, stream_id: int) -> None:
        buffer = self.stream_buffers.get(stream_id)
        try:
            if buffer is None:
                raise MissingStreamError
            window = self.connection.local_flow_control_window(stream_id)
            data = await buffer.pop(max(0, min(window, self.connection.max_outbound_frame_size)))
            if data:
                self.connection.send_data(stream_id, data)
            else:
                self.priority.block(stream_id)
            if buffer.complete:
                self.connection.end_stream(stream_id)
                await self._forget(stream_id)
            await self._flush()
            await self._leave()
        except (ProtocolError, MissingStreamError):  # the stream was closed meanwhile
            await self._forget(stream_id)

    async def _forget(self, stream_id: int) -> None:
        """Drops the bytes of a stream of which nothing is to be sent any more."""
        buffer = self.stream_buffers.pop(stream_id, None)
        if buffer is not None:
            await buffer.close()
        with suppress(MissingStreamError):
            self.priority.remove_stream(stream_id)


class _Protocol(ProtocolWrapper):
    __init__ = _with(ProtocolWrapper.__init__, H2Protocol=_HTTP2)
    handle = _with(ProtocolWrapper.handle, H2Protocol=_HTTP2)


class _Refused(Exception):
    """A request of another version was refused, and its connection closed."""


class _HTTP1(H11Protocol):
    """HTTP/1.1 alone. A request that asks for `h2c` is answered as if it had not (RFC 9110 section 7.8); the preface of
    HTTP/2 is refused, so that none of its frames is read."""

    websockets = True

    async def _check_protocol(self, event: Any) -> None:
        if event.http_version not in (b"1.0", b"1.1"):
            await self._send_error_response(505)
            await self.send(Closed())
            raise _Refused

    async def _create_stream(self, request: Any) -> None:
        if not self.websockets:
            fields = [(name, value) for name, value in request.headers if name != b"upgrade"]
            request = type(request)(
                method=request.method, target=request.target, headers=fields, http_version=request.http_version
            )  # fmt: skip
        await super()._create_stream(request)


class _HTTP1Only(_HTTP1):
    websockets = False


class _Protocol1(ProtocolWrapper):
    __init__ = _with(ProtocolWrapper.__init__, H11Protocol=_HTTP1)

    async def handle(self, event: HypercornEvent) -> None:
        with suppress(_Refused):
            await super().handle(event)


@final
class _Protocol1Only(_Protocol1):
    __init__ = _with(ProtocolWrapper.__init__, H11Protocol=_HTTP1Only)


class Connection(TCPServer):
    """One connection of `serve`, for callers that accept connections themselves."""

    _run = _with(TCPServer.run, ProtocolWrapper=_Protocol)

    async def run(self) -> None:
        """Serves the connection to its end. Its errors are logged, not raised. hypercorn shields its writes from
        cancellation: a write that waits for its peer ends when the stream's socket is closed."""
        try:
            await self._run()
        except BaseExceptionGroup as group:
            cancelled, errors = group.split(trio.Cancelled)
            if not isinstance(errors, ExceptionGroup):
                raise
            self._tell(errors)
            if cancelled is not None:
                try:
                    raise cancelled from None
                finally:
                    del cancelled, errors
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        log.error("connection failed", extra={"server": "hypercorn"}, exc_info=error)


@final
class HTTP1Connection(Connection):
    """One connection that knows HTTP/1.1 and WebSockets alone."""

    _run = _with(TCPServer.run, ProtocolWrapper=_Protocol1)


@final
class HTTP1OnlyConnection(Connection):
    """One connection that knows HTTP/1.1 alone: a request for a WebSocket is answered as any other."""

    _run = _with(TCPServer.run, ProtocolWrapper=_Protocol1Only)


_worker_serve = _with(run.worker_serve, TCPServer=Connection)
