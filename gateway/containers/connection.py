"""The wire client of the bridge: finds and dials a model container, asks it over HTTP, and upgrades to a WebSocket."""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final
from urllib.parse import urlsplit

import trio
from msgspec import ValidationError

from gateway import client
from gateway.client import Peer
from gateway.config.fields import settings_of
from gateway.config.load import converted
from gateway.config.problem import ConfigError
from gateway.config.text import parse_duration, parse_size, text_without_secrets
from gateway.config.tree import Bytes, BytesOrOff, Count, Seconds, SecondsOrOff, Unit
from gateway.errors import BadRequest, TransportLost
from gateway.log_limits import LogLimits
from gateway.net.tls_context import client_context
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import SocketTransport, Transport
from gateway.telemetry.trace_fields import trace_fields
from models.errors import ModelError
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Data, End, Head, Headers, Request, Response
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection, WebSocketLimits
from protocols.websocket.frames import FrameMemory
from protocols.websocket.handshake import check_response, end_of_input, offered_end_of_input, request_headers

Dial: TypeAlias = Callable[[], Awaitable[Transport]]
"""Opens a connection to the container. Raises OSError or TransportLost. If it is cancelled, nothing stays open."""

AS_IT_IS = (b"accept-encoding", b"identity")
"""A header for each request whose answer is read: the client would not learn of a content encoding."""

DEFAULT_PATH = "invocations-bidirectional-stream"
"""The default path of a container's WebSocket, if neither the URL nor the request has one (container contract, GA)."""

BAD_GATEWAY, GATEWAY_TIMEOUT = 502, 504
"""The status codes of errors for which the container gave none."""

_KIB = 1024
_DEFAULT_PORT = {False: 8080, True: 443}  # without TLS, the port of the container contract; with TLS, that of https
_SCHEMES = {"ws": False, "http": False, "wss": True, "https": True}
# characters that end the path of a request target, or mean something else in it
_NOT_IN_PATH = re.compile(r"[^!-~]|[?#]")
# seconds for the text of a refusal, which is only for information
_TEXT_SECONDS = 2.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """The limits of the bridge to one container. The values are bytes, seconds and counts."""

    part: Bytes = 16 * _KIB * _KIB
    """The most payload bytes of one frame from the container. A larger frame ends its session."""
    read_ahead: Bytes = 256 * _KIB
    """The bytes of frames that are read from the container ahead of a slow client, for each session. The frame that
    exceeds the limit is still read: a session holds at most `read_ahead`, one frame of `part` bytes, and 128 KiB of one
    receive. All of it counts towards `limits.total_bytes` of the gateway. An invocation holds one receive, 64 KiB."""
    unsent: BytesOrOff = 128 * _KIB
    """The bytes that the kernel buffers for a container that does not read (TCP_NOTSENT_LOWAT); 0: the system's default."""
    error_text: Bytes = 4 * _KIB
    """The bytes of the container's text that a refusal passes on to the client."""
    connect_timeout: Seconds = 10.0
    """Seconds from the first packet to the answer to the handshake. The contract gives the container 250 ms."""
    half_close_quiet: SecondsOrOff = math.inf
    """Seconds without a frame from the container after which Close is sent, once the client's input has ended. It is for a
    container that neither names an end of input nor closes its sessions itself. It must be longer than any answer takes:
    most WebSocket libraries answer a Close by themselves, and the rest of the answer is lost. 0 sends Close behind the
    last part, for a container that finishes its answers before it answers a Close. Infinite, the default, never sends it:
    the session lasts until the container closes it, or its time is over."""
    half_close_timeout: Seconds = 60.0
    """Seconds without a frame after our Close within which the container must send its own."""
    ping_interval: SecondsOrOff = 60.0
    """Seconds between Pings; 0: none are sent."""
    pings_unanswered: Count = 5
    """The session ends after this many Pings in a row without a byte from the container."""
    invocation_timeout: Seconds = 60.0
    """Seconds to the head of the answer to /invocations, and then between two pieces of the answer."""
    model_load_timeout: Seconds = 480.0
    """Seconds for one load of a multi-model container's model: POST /models, and unloads that make room for it."""
    model_unload_timeout: Seconds = 360.0
    """Seconds for one DELETE /models/{name}, which ends the model's running calls."""
    health_timeout: Seconds = 2.0
    """Seconds for one GET /ping."""
    health_interval: SecondsOrOff = 10.0
    """Seconds between two GET /ping while the model is ready; 0: none are sent."""
    health_failures: Count = 6
    """The container counts as gone after this many failed GET /ping in a row, without a byte from it on any session."""
    healthy_within: Seconds = 480.0
    """Seconds from the start of loading to the first 200."""


_LIMITS = {setting.path[-1]: setting for setting in settings_of(ContainerLimits)}


def container_limits(given: Mapping[str, Any]) -> ContainerLimits:
    """Reads limits by name, as an operator writes them: numbers, or texts such as "500ms" or "64 KiB". ConfigError for an
    unknown name or an invalid value."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _LIMITS:
            raise ConfigError(f"{name[:100]!r} is not a limit of a container; there are: {', '.join(_LIMITS)}")
        seconds = _LIMITS[name].unit is Unit.SECONDS
        parse = parse_duration if seconds else parse_size  # a count too
        try:
            number = parse(value) if isinstance(value, str) else value
            found[name] = converted(_LIMITS[name], number, text=False)
        except (ValueError, OverflowError, ValidationError):
            wanted = "a duration, such as 500ms or 30" if seconds else "a whole number, such as 5 or 64KiB"
            raise ConfigError(f"{name} must be {wanted}, not {str(value)[:100]!r}") from None
    return ContainerLimits(**found)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerAddress:
    """The address of a container, for its WebSocket and its HTTP."""

    host: str
    port: int
    tls: bool
    path: str
    """The default path of the WebSocket, without the leading slash, for requests that name none."""

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def container_address(url: str) -> ContainerAddress:
    """Reads `ws://host:port/path`. http:// means the same; wss:// and https:// mean TLS. The default port is 8080, or 443
    with TLS; the default path is the contract's. ValueError for any other URL."""
    shown = repr(text_without_secrets(url)[:200])
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as e:
        raise ValueError(f"container URL: {text_without_secrets(str(e))}, in {shown}") from None
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise ValueError(f"container URL: expected ws://host:port, or wss, http or https, got {shown}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"container URL: expected no user, query or fragment, got {shown}")
    path = parts.path.removeprefix("/")
    if _NOT_IN_PATH.search(path):
        raise ValueError(f"container URL: expected a path of visible ASCII, got {path[:200]!r}")
    tls = _SCHEMES[parts.scheme]
    return ContainerAddress(host=parts.hostname, port=port or _DEFAULT_PORT[tls], tls=tls, path=path or DEFAULT_PATH)


def dialler(address: ContainerAddress, limits: ContainerLimits, *, ca: str = "") -> Dial:
    """Makes a function that connects over TCP, and with TLS if the address has it. The server's name is checked against the
    system's CAs, or against the file `ca` alone. ConfigError if that file cannot be used, or there is no TLS."""
    context: ssl.SSLContext | None = None
    if ca and not address.tls:
        raise ConfigError("a CA is for wss:// and https://: this container is called without TLS")
    if address.tls:
        context = client_context(Path(ca), alpn=["http/1.1"]) if ca else ssl.create_default_context()

    async def dial() -> Transport:
        stream = await trio.open_tcp_stream(address.host, address.port)
        transport = _own(stream, limits.unsent)
        if context is None:
            return transport
        try:
            secure = TLSTransport(transport, context, server_side=False, hostname=address.host)
            await secure.handshake()
        except BaseException:
            transport.close()
            raise
        return secure

    return dial


def _own(stream: trio.SocketStream, unsent: int) -> SocketTransport:
    """Makes a transport over the standard socket of a stream: transports wait with trio.lowlevel themselves."""
    its = stream.socket
    sock = socket.socket(its.family, its.type, its.proto, its.detach())
    try:
        return SocketTransport(sock, unsent=unsent)
    except BaseException:  # a connection that is reset already may refuse its options
        sock.close()
        raise


@final
class Within:
    """A deadline that begins now, and the words that name its seconds and its setting in an error."""

    def __init__(self, seconds: float, setting: str) -> None:
        self.deadline = trio.current_time() + seconds
        self.words = f"within {seconds:g} s ({setting})"


@final
class NoAnswer(Exception):
    """The container gave no valid answer. `status` takes the place of its status; `message` is for the client."""

    def __init__(self, message: str, *, status: int = BAD_GATEWAY) -> None:
        super().__init__(message)
        self.message, self.status = message, status


@final
class Container:
    """A client of one model container."""

    def __init__(self, address: ContainerAddress, limits: ContainerLimits, dial: Dial) -> None:
        self.address, self.limits = address, limits
        self._dial = dial
        self._authority = address.authority.encode()
        self._websocket_limits = WebSocketLimits(part=limits.part)
        self.log_limits = LogLimits(container=address.authority)
        """Limits how often log lines that sessions cause are written."""
        self.heard = False
        """True once a session has received bytes. The task that watches the container's health resets it."""
        self.scratch = memoryview(bytearray(64 * _KIB))
        """A buffer that all sessions receive into. A session must empty it before it waits."""

    @asynccontextmanager
    async def connect(self, within: Within) -> AsyncIterator[Transport]:
        """Yields a connection, which is closed at the end of the block. NoAnswer if there is none in time."""
        transport: Transport | None = None
        with trio.move_on_at(within.deadline):
            try:
                transport = await self._dial()
            except (OSError, TransportLost) as e:
                raise NoAnswer(f"cannot connect to the container at {self.address.authority}: {_reason(e)}") from e
        if transport is None:
            raise NoAnswer(f"the container did not accept a connection {within.words}", status=GATEWAY_TIMEOUT)
        try:
            yield transport
        finally:
            transport.close()

    async def ask(
        self, peer: Peer, method: bytes, target: bytes, headers: Headers, within: Within, body: Buffer | None = None
    ) -> Response:
        """Sends a request, in the trace of the current exchange. Returns the head of the final answer. NoAnswer if there is
        none in time; BadRequest for a target or a header that cannot be written."""
        length = None if body is None else memoryview(body).nbytes
        head = Head(
            method=method,
            target=target,
            authority=self._authority,
            headers=[*headers, *trace_fields()],
            content_length=length,
        )
        try:
            peer.machine.send(Request(stream=1, head=head))
        except LocalProtocolError as e:
            raise BadRequest(f"cannot ask the container: {e}") from None
        if body is not None and length:
            peer.machine.send(Data(stream=1, buffers=(body,)))
        peer.machine.send(End(stream=1))
        with trio.move_on_at(within.deadline):
            try:
                while True:
                    event = await peer.next_event()
                    if isinstance(event, Response) and (event.status >= 200 or event.status == 101):
                        return event
            except (TransportLost, RemoteProtocolError) as e:
                asked = f"{method.decode()} {target.partition(b'?')[0][:100].decode('latin-1')}"
                raise NoAnswer(f"the container gave no answer to {asked}: {_reason(e)}") from e
        raise NoAnswer(f"the container did not answer {within.words}", status=GATEWAY_TIMEOUT)

    async def ping(self) -> str:
        """Sends GET /ping. Returns the reason why the answer was not 200; empty if it was."""
        within = Within(self.limits.health_timeout, "health_timeout")
        try:
            async with self.connect(within) as transport:
                answer = await self.ask(client.http1(transport), b"GET", b"/ping", [(b"connection", b"close")], within)
        except NoAnswer as e:
            return e.message
        return "" if answer.status == 200 else f"the container answered {answer.status} to GET /ping"

    async def upgrade(
        self,
        transport: Transport,
        target: bytes,
        headers: Headers,
        within: Within,
        memory: FrameMemory,
        subprotocols: Sequence[bytes] = (),
    ) -> tuple[WebSocketConnection, Response, bytes | None]:
        """Upgrades a connection to a WebSocket, and offers `subprotocols`. Returns the WebSocket, the head of the answer,
        and the text that stands for the end of the input, if the container names one
        (`protocols.websocket.handshake.END_OF_INPUT`). Large frames are received into `memory`. NoAnswer if there was no
        valid answer; ModelError with the container's status and text if it refused."""
        peer, key = client.http1(transport), secrets.token_bytes(16)
        offered = offered_end_of_input(secrets.token_bytes(16))
        answer = await self.ask(
            peer, b"GET", target, [*headers, offered, *request_headers(key, subprotocols=subprotocols)], within
        )
        if answer.status != 101:
            raise await self.refusal(peer, answer, code="HandshakeFailed")
        try:
            check_response(key, answer, subprotocols=subprotocols)
            end = end_of_input(answer.headers)
        except RemoteProtocolError as e:
            raise NoAnswer(f"the container broke the WebSocket handshake: {e}") from e
        mask = partial(secrets.token_bytes, 4)
        machine = WebSocketConnection(Role.CLIENT, self._websocket_limits, mask=mask, memory=memory)
        assert isinstance(peer.machine, HTTP1Connection)
        machine.receive_data(peer.machine.switch())
        return machine, answer, end

    async def refusal(self, peer: Peer, answer: Response, *, code: str) -> ModelError:
        """Reads the container's refusal. The error has the container's text if its status is an error and the text is
        readable."""
        limit, text = self.limits.error_text, bytearray()
        if 400 <= answer.status <= 599 and not content_coding(answer):
            with trio.move_on_after(_TEXT_SECONDS), suppress(TransportLost, RemoteProtocolError):
                while len(text) < limit and (piece := await next_piece(peer)) is not None:
                    text += piece
        return refused(answer.status, text[:limit].decode(errors="replace"), code=code)


def refused(status: int, said: str, *, code: str, asked: str = "") -> ModelError:
    """Makes the error for a refusal: with the container's status and text if the status is an error, otherwise with 502 and
    a text of ours."""
    error = 400 <= status <= 599
    message = said if said and error else f"the container answered {status}{asked and f' to {asked}'}"
    return ModelError(message, code=code, status=status if error else BAD_GATEWAY)


def content_coding(answer: Response) -> str:
    """Returns the answer's content encodings (RFC 9110 section 8.4); empty if there are none."""
    values = [value for name, value in answer.headers if name == b"content-encoding"]
    codings = b",".join(values).decode("latin-1").lower().split(",")
    return ", ".join(coding for c in codings if (coding := c.strip()) not in ("", "identity"))


async def next_piece(peer: Peer) -> Buffer | None:
    """Waits for the next piece of the current answer; None at its end. TransportLost or RemoteProtocolError if the answer is
    cut off."""
    event = await peer.next_event()
    if isinstance(event, Data):
        peer.credit(event)
        return event.buffers[0]
    return None


def text_headers(headers: Sequence[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Encodes headers for an HTTP/1.1 machine. BadRequest for a text that no HTTP/1.1 header can hold."""
    try:
        return [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers]
    except UnicodeEncodeError as e:
        raise BadRequest(f"a header for the container: expected latin-1, got {e.object[:100]!r}") from None


def _reason(error: Exception) -> str:
    """Returns the reason of an error without the address: for an OSError of trio's, the text of the system's error."""
    if not isinstance(error, OSError):
        return str(error)
    cause: BaseException = error.__cause__ or error
    if isinstance(cause, BaseExceptionGroup):  # one error for each address of the name
        cause = cause.exceptions[0]
    number = getattr(cause, "errno", None) or 0
    return os.strerror(number) if number > 0 else str(cause)  # errors of name look-ups have negative numbers
