"""One client connection on the gateway's own machines and transports: for the demo, for tests, and for full control.

Nothing is read unless the caller asks for it: a slow or silent client is one that does not ask.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, final

import trio

from gateway.addresses import UNIX
from gateway.errors import TransportLost
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import SocketTransport, Transport
from protocols.errors import RemoteProtocolError
from protocols.events import TURN, Buffer, ConnectionEnd, Data, End, Head, Headers, Request, Reset, Response, Sent, Signal
from protocols.floods import INTERIM_HEADS
from protocols.http1.connection import HTTP1Connection
from protocols.http2.connection import HTTP2Connection
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection
from protocols.websocket.handshake import check_response, end_of_input, offered_end_of_input, request_headers
from protocols.websocket.limits import WebSocketLimits

_STEPS = 32  # events and receives without a checkpoint
_LARGEST_FRAME = 1024**3  # bytes: an answer of tensors is one frame


class Machine(Protocol):
    """The methods that the three transport machines share."""

    def receive_data(self, data: Buffer) -> None: ...
    def receive_eof(self) -> None: ...
    def next_event(self) -> Any: ...
    def send(self, event: Any) -> None: ...
    def data_to_send(self, at_most: int) -> list[Buffer]: ...
    def data_sent(self) -> Sent: ...


@final
class UpgradeRefused(TransportLost):
    """Raised if the server answered the handshake of a WebSocket with another `status` than 101, and with this `body`."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the upgrade was refused: {status}")
        self.status, self.body = status, body


@final
class Peer:
    """One client connection: a machine and a transport.

    `send` queues and writes. `next_event` returns the machine's next event, and reads only if there is none. One task may
    send while another receives.
    """

    def __init__(self, transport: Transport, machine: Machine) -> None:
        self.transport, self.machine = transport, machine
        self._buffer = memoryview(bytearray(65536))
        self._writing = trio.Lock()
        self._rest = memoryview(b"")  # the unwritten end of the machine's last bytes
        self._given = False
        self._received = trio.lowlevel.ParkingLot()
        self._ended = False  # the server has closed its side
        self._steps = 0  # events and receives since the last checkpoint, or a few more
        self._interim = 0  # heads of status 1xx in a row
        self.end_of_input: bytes | None = None
        """The text that a WebSocket's server takes for the end of the input; None if it has named none."""
        self.subprotocol: bytes | None = None
        """The subprotocol that the server has chosen; None if it has chosen none."""

    @property
    def over(self) -> bool:
        """True if no more requests can be answered here: the server has ended the connection, or announced that it will."""
        return self._ended or getattr(self.machine, "must_close", False)

    async def send(self, *events: Any) -> None:
        """Queues the events and writes what the peer's windows allow."""
        for event in events:
            self.machine.send(event)
        await self.flush()

    async def flush(self) -> None:
        """Writes the bytes that the machine has ready. If it is cancelled, nothing is lost: the next call goes on there."""
        async with self._writing:
            while not self._write():
                await self.transport.wait_writable()

    def _write(self) -> bool:
        """Writes without waiting. True if nothing is left to write."""
        while True:
            if not self._rest and not self.transport.pending:
                if self._given:
                    self.machine.data_sent()
                buffers = self.machine.data_to_send(65536)
                self._rest, self._given = memoryview(b"".join(buffers)), bool(buffers)
                if not buffers:
                    return True
            n = self.transport.try_send([self._rest] if self._rest else [])
            self._rest = self._rest[n:]
            if not n and (self._rest or self.transport.pending):
                return False

    async def next_event(self) -> Any:
        """The next event; ConnectionEnd at the end of the stream. It also writes the bytes that are ready, but never waits
        to write alone: two ends with full buffers would wait for each other. A server that takes no more bytes may still
        have sent its reason, so a failed write does not end the reading. RemoteProtocolError also for a server that sends
        INTERIM_HEADS of status 1xx in place of an answer.

        Other tasks run, and deadlines hold, also while the server sends without a pause."""
        self._steps += 1
        if self._steps > _STEPS:
            await self._let_others_run()
        while isinstance(event := self.machine.next_event(), Signal):
            if event is TURN:
                await trio.lowlevel.checkpoint()
                continue
            try:
                written = self._writing.locked() or self._write()
            except TransportLost:
                written = True
            n = self.transport.try_receive_into(self._buffer)
            if n is None:
                await (self.transport.wait_readable() if written else self._wait_either())
            elif n == 0:
                self._ended = True
                self.machine.receive_eof()
            else:
                self.machine.receive_data(self._buffer[:n])
            self._received.unpark_all()
            self._steps += 1
            if self._steps > _STEPS:
                await self._let_others_run()
        if type(event) is Response:
            self._interim = self._interim + 1 if event.status < 200 and event.status != 101 else 0
            if self._interim > INTERIM_HEADS:
                raise RemoteProtocolError(f"more than {INTERIM_HEADS} heads of status 1xx, the last of {event.status}")
        return event

    async def _let_others_run(self) -> None:
        self._steps = 0
        await trio.lowlevel.checkpoint()

    async def wait_room(self, stream: int) -> None:
        """Waits until the stream may queue more bytes. Another task must be receiving, as that reads the window updates."""
        machine: Any = self.machine
        await self.flush()
        while machine.room(stream) <= 0:
            await self._received.park()
            await self.flush()

    async def _wait_either(self) -> None:
        async with self._writing, trio.open_nursery() as nursery:

            async def one(wait: Callable[[], Awaitable[None]]) -> None:
                with suppress(TransportLost):  # the next read or write raises it
                    await wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(one, self.transport.wait_readable)
            nursery.start_soon(one, self.transport.wait_writable)

    def credit(self, data: Data) -> None:
        """Gives back the window of consumed data; it goes out with the next write."""
        self.machine.credit(data.stream, data.nbytes)  # type: ignore[attr-defined]

    async def read_answer(self, stream: int) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers and whole body of the answer on one stream; TransportLost if it is cut off."""
        status, headers, body = 0, {}, bytearray()
        while True:
            event = await self.next_event()
            match event:
                case Response() if event.stream == stream and event.status >= 200:
                    status, headers = event.status, dict(event.headers)
                case Data():
                    self.credit(event)
                    if event.stream == stream:
                        body += event.buffers[0]
                case End() if event.stream == stream:
                    return status, headers, bytes(body)
                case Reset() if event.stream == stream:
                    raise TransportLost(f"the stream was reset with code {event.code}")
                case ConnectionEnd():
                    raise TransportLost("the connection ended before the answer was complete")

    def close(self) -> None:
        """Closes the connection at once, also if requests are under way."""
        self.transport.close()


def http1(transport: Transport) -> Peer:
    """A client connection of HTTP/1.1."""
    return Peer(transport, HTTP1Connection(Role.CLIENT))


def http2(transport: Transport) -> Peer:
    """A client connection of HTTP/2, in clear text with prior knowledge."""
    return Peer(transport, HTTP2Connection(Role.CLIENT))


async def websocket(transport: Transport, path: str, *, authority: bytes = b"localhost", headers: Headers = ()) -> Peer:
    """Opens a WebSocket and returns its connection after the handshake. UpgradeRefused, a TransportLost, if the server
    refuses. The handshake offers a text for the end of input, and the subprotocols in `headers`; `Peer.end_of_input` and
    `Peer.subprotocol` have the server's choices."""
    handshake, key, offered = http1(transport), secrets.token_bytes(16), offered_end_of_input(secrets.token_bytes(16))
    await handshake.send(
        Request(
            stream=1,
            head=Head(
                method=b"GET",
                target=path.encode(),
                authority=authority,
                headers=[*request_headers(key), offered, *headers],
            ),
        ),
        End(stream=1),
    )
    response = await handshake.next_event()
    if not isinstance(response, Response):
        raise TransportLost(f"the upgrade was refused: {response}")
    if response.status != 101:
        raise UpgradeRefused(response.status, await _said(handshake))
    offers = [offer for name, value in headers if name == b"sec-websocket-protocol" for offer in value.split(b",")]
    subprotocol = check_response(key, response, subprotocols=[offer.strip(b" \t") for offer in offers])
    assert isinstance(handshake.machine, HTTP1Connection)
    machine = WebSocketConnection(Role.CLIENT, WebSocketLimits(part=_LARGEST_FRAME), mask=lambda: secrets.token_bytes(4))
    machine.receive_data(handshake.machine.switch())
    peer = Peer(transport, machine)
    peer.subprotocol = subprotocol
    peer.end_of_input = end_of_input(response.headers)
    return peer


async def _said(refused: Peer) -> bytes:
    """The body of a refusal, as far as it came if it is cut off."""
    body = bytearray()
    with suppress(TransportLost, RemoteProtocolError):
        while isinstance(event := await refused.next_event(), Data):
            body += event.buffers[0]
            refused.credit(event)
    return bytes(body)


def post(
    stream: int,
    path: str,
    body: bytes | None,
    headers: Headers = (),
    *,
    authority: bytes = b"localhost",
    scheme: bytes = b"http",
    declares: bool = True,
) -> Sequence[Any]:
    """The events of a POST: head, body and end; only the head if `body` is None. `declares` False: the head has no
    content-length."""
    length = len(body) if declares and body is not None else None
    head = Head(
        method=b"POST",
        target=path.encode(),
        authority=authority,
        scheme=scheme,
        headers=[*headers, *([(b"content-length", b"%d" % length)] if length is not None else [])],
        content_length=length,
    )
    request = Request(stream=stream, head=head)
    if body is None:
        return [request]
    return [request, *([Data(stream=stream, buffers=(body,))] if body else []), End(stream=stream)]


async def dial(host: str, port: int, *, tls: ssl.SSLContext | None = None) -> Transport:
    """Opens a TCP connection, or one to a Unix socket if the host is `unix:PATH`; with TLS if a context is given. The caller
    closes it. OSError if the connection is not accepted, TransportLost if TLS fails. A cancelled call leaves nothing
    open."""
    if host.startswith(UNIX):
        stream = await trio.open_unix_socket(host.removeprefix(UNIX))
    else:
        stream = await trio.open_tcp_stream(host, port)
    # The stdlib socket below Trio's, as the transports here wait with trio.lowlevel themselves.
    sock = _detached(stream)
    try:
        transport: Transport = SocketTransport(sock)
    except BaseException:
        sock.close()
        raise
    try:
        if tls is not None:
            secure = TLSTransport(transport, tls, server_side=False, hostname=host)
            transport = secure
            await secure.handshake()
    except BaseException:
        transport.close()
        raise
    return transport


@asynccontextmanager
async def connect(host: str, port: int, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Transport]:
    """Opens a connection like `dial`, and closes it at the end of the block."""
    transport = await dial(host, port, tls=tls)
    try:
        yield transport
    finally:
        transport.close()


def _detached(stream: trio.SocketStream) -> Any:
    import socket

    return socket.socket(fileno=stream.socket.detach())
