"""One call of an ASGI application as a wire: an exchange between the messages of the server's `receive` and `send`."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final
from urllib.parse import quote, unquote

import msgspec
import trio

from gateway.addresses import written_ip
from gateway.core.contracts import LAST_WORD, Hop
from gateway.core.exchange import Exchange
from gateway.doorbell import Doorbell
from gateway.errors import Drained, Ending, SlowReader
from gateway.party import Party
from gateway.untrusted_text import escape
from protocols.events import Buffer, Frame, Head, Headers, Opcode, Request

if TYPE_CHECKING:
    from gateway.core.server import Server
    from models.session import ClientCertificate
    from protocols.buffers import Budget

log = logging.getLogger("gateway.connection")

Scope: TypeAlias = Mapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]

_WRITE_AT_MOST = 256 * 1024
_LINGER_SECONDS, _LINGER_BYTES = 30.0, 1024 * 1024 * 1024
_LAST_WORDS = 1.0  # seconds that a whole answer has once the server says that the client is gone
_HANDSHAKE = {b"connection", b"upgrade", b"sec-websocket-accept", b"sec-websocket-protocol"}
"""Fields that the server itself sends in the head that accepts a WebSocket."""
_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_PLAIN = "/:@!$&'()*+,;=~[]"  # characters that need no quotes in a path, or in an absolute target (RFC 3986)
EARLY_END = "everywire.early_end"
"""The extension of a server whose HTTP/2 lets an answer end before its request does."""


class AnswerCut(Exception):
    """Raised out of the application if an answer that has begun cannot be completed: ASGI has no message for that. The
    server decides what the client then sees."""


@final
class ASGICall:
    """Drives one HTTP request or one WebSocket that an ASGI server (ASGI 3.0) has accepted.

    It calls the server's `receive` only while less than `limits.read_ahead` waits here, and awaits its `send` before it
    takes more than `limits.send_buffer` from the model. So backpressure reaches as far as the server carries it. The
    answer's last byte counts as written when `send` has returned.
    """

    windowed, exclusive = False, False

    def __init__(self, server: Server, scope: Scope, *, by_operator: bool = False) -> None:
        """`by_operator`: it has come by the operator plane, which has checked who asks."""
        self.server, self.by_operator = server, by_operator
        self.limits, self.pool, self.clock = server.limits, server.pool, server.clock
        self.door, self.log_limits = server.door, server.log_limits
        self._socket = scope["type"] == "websocket"
        self._http2 = str(scope.get("http_version", "1.1")).startswith("2")
        self.prefix = prefix_of(scope)
        self.name = "websocket" if self._socket else "http/2" if self._http2 else "http/1.1"
        client = scope.get("client")
        # Some servers take the host from a field of the request, without checking it.
        self.peer = escape(written_ip(*client)) if client else ""
        self.proxies = None if server.proxies is None or not server.proxies.includes(self.peer) else server.proxies
        self.party = server.parties.of_peer(self.peer) if self.peer else Party("")
        """The party that its exchange counts for: the peer that the server names, or else the call itself."""
        self.budget = server.account_of(self.party)
        extensions = scope.get("extensions") or {}
        self._can_refuse = "websocket.http.response" in extensions
        self._lingers = self._http2 and EARLY_END not in extensions
        self.last_received = self.last_sent = self.clock()
        self._unread = 0  # bytes that the exchange has not taken
        self._queue: deque[tuple[Message | None, Buffer]] = deque()  # pieces of the body have no message of their own
        self._queued = 0
        self._text: list[Buffer] = []  # frames of a message under way
        self._kind = Opcode.BINARY
        self._bell, self._more, self._arrived = Doorbell(), Doorbell(), Doorbell()
        self.output_ready = self._bell.ring
        self._blocked_since: float | None = None
        self._scope = trio.CancelScope()
        self._cut = self._over = False
        self.exchange = Exchange(self, self, Request(stream=1, head=head_of(scope)), server.new_id(), self.last_received)
        self._takes_trailers = "http.response.trailers" in extensions and _asks_for_trailers(self.exchange)
        self._tells_trailers = False  # true once the server was told that trailers follow the body

    client_certificate: ClientCertificate | None = None
    """Always None: only the server that ends TLS can verify a certificate, and what a scope says of one is ignored."""
    routed: Any = None
    heavy = on_bidi_port = False
    strangers = 0

    def dismiss(self) -> None:
        """Does nothing: the connection belongs to the ASGI server."""

    # -- life ------------------------------------------------------------------------------------------------------

    async def run(self, receive: Receive, send: Send) -> None:
        """Serves the call to its end. Raises AnswerCut if its answer cannot be completed."""
        exchange, failure = self.exchange, None
        self.server.exchange_opened(exchange)
        self.server.run_exchange(exchange)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read, receive)
                    try:
                        await self._write(send)
                    except Exception as e:  # the server's way to say that the client is gone
                        failure = e
                    nursery.cancel_scope.cancel()
        finally:
            self.lost(Ending.CANCELLED if failure is not None else Ending.LOST)
        if failure is not None:
            log.debug("transport lost", extra={"peer": self.peer, "reason": str(failure)[:300]})
        if self._cut:
            raise AnswerCut(f"exchange {exchange.id} ended as {exchange.ending and exchange.ending.value}")

    def lost(self, ending: Ending = Ending.LOST) -> None:
        """Ends the call: nothing more can be sent."""
        if not self._over:
            self._over = True
            self._queue.clear()
            if self.exchange.ending is None:  # else its answer is whole, and its model may still tidy up
                self.exchange.peer_gone(ending)
            self._scope.cancel()

    def failed(self, error: Exception) -> None:
        if self.server.log_limits.allows("connection failed", level=logging.ERROR):
            log.error("connection failed", extra={"peer": self.peer}, exc_info=error)
        self._cut = True
        self.lost()

    def turn(self) -> None:
        """Does nothing: a call puts no work off."""

    def tick(self, now: float) -> None:
        """Called by the server's coarse timer: checks for a stalled write."""
        stall = self.limits.write_stall
        if stall and self._blocked_since is not None and now - self._blocked_since > stall:
            self._stalled(stall, now - self._blocked_since)

    def _stalled(self, stall: float, waited: float) -> None:
        """Stops the model, which queues an error behind what is queued already. If the server does not take that within
        `LAST_WORD` either, cuts the answer off."""
        told = self.exchange.interruption is not None
        if not told:
            facts = {"peer": self.peer, "seconds": stall, "setting": "limits.write_stall"}
            self.server.log_limits.write(log, "write stalled", facts)
            self.exchange.interrupt(SlowReader(stall))
        if waited > stall + LAST_WORD or (not told and self.exchange.outbound.finishing is not None):
            self._cut = True
            self.lost()

    def drain(self) -> None:
        """Does nothing: the ASGI server, which owns the connection, tells the client."""

    def drain_now(self) -> None:
        self.exchange.interrupt(Drained("the server is shutting down and its drain deadline (drain.timeout) has passed"))

    def exchange_closed(self, exchange: Exchange) -> None:
        self.server.exchange_closed(exchange)
        self.server.connection_closed(self)

    # -- receiving -------------------------------------------------------------------------------------------------

    async def _read(self, receive: Receive) -> None:
        exchange, inbound, ahead = self.exchange, self.exchange.open_inbound(), self.limits.read_ahead
        while True:
            while self._unread + inbound.waiting >= ahead and not exchange.gone:
                await self._more.wait()
            message = await receive()
            self.last_received = now = self.clock()
            match message["type"]:
                case "http.request":
                    body = message.get("body", b"")
                    if body:
                        self._unread += len(body)
                        inbound.feed(body, len(body), now)
                    if not message.get("more_body", False):
                        inbound.feed_end()
                    self._arrived.wake()
                case "websocket.receive":
                    data = message.get("bytes")
                    opcode = Opcode.TEXT if data is None else Opcode.BINARY
                    if data is None:
                        data = message["text"].encode()
                    self._unread += len(data)
                    inbound.feed(Frame(opcode=opcode, fin=True, data=data), len(data), now)
                case "http.disconnect" | "websocket.disconnect":
                    if exchange.outbound.finishing is None:
                        self.lost(Ending.CANCELLED)
                    else:  # its last message may be the reason, or never be taken
                        self._scope.deadline = now + _LAST_WORDS
                    return
                case _:
                    pass  # "websocket.connect"

    def credit(self, stream: int, n: int) -> None:
        self._unread -= n
        self._more.ring()

    def proceed(self, stream: int) -> None:
        """Does nothing: the server sends 100 when it is asked for the body."""

    def land(self, stream: int, buffer: memoryview) -> None:
        return None

    def reserved(self, stream: int) -> int:
        return 0

    def charge(self, stream: int, account: Budget) -> int:
        return 0

    def release(self, stream: int) -> None:
        self._more.ring()

    def held(self) -> tuple[int, int]:
        """Returns bytes that were received and its exchange has not taken, and bytes that wait to be written."""
        return self._unread, self._queued

    def hops(self, stream: int) -> list[Hop]:
        limits = self.limits
        return [Hop("received", self._unread, limits.read_ahead), Hop("queued", self._queued, limits.send_buffer)]

    # -- sending ---------------------------------------------------------------------------------------------------

    async def _write(self, send: Send) -> None:
        exchange = self.exchange
        while not self._over:
            while not self._queue:
                if exchange.ending is not None:
                    return
                await self._bell.wait()
            if self._lingers and exchange.outbound.finishing is not None and not exchange.input_ended and self._ends_early():
                await self._swallow()
            message, size = self._next()
            self._blocked_since = self.clock()
            await send(message)
            self._blocked_since, self.last_sent = None, self.clock()
            self._queued -= size
            if exchange.outbound.finishing is not None and not self._queue:
                exchange.answer_written()
            elif size:
                exchange.outbound.room_changed()

    def _ends_early(self) -> bool:
        """True if the next message ends the answer, or is of a refusal, which makes the client stop sending."""
        message, _ = self._queue[0]
        return self.exchange.outbound.status >= 400 or (message is not None and message.get("more_body") is False)

    async def _swallow(self) -> None:
        """Waits, within bounds, for the end of the input before a refusal or the end of an answer is sent.

        An HTTP/2 client may go on sending after the end of its answer: hypercorn (0.18) then ends its process, with every
        other client's connection. Or the client stops in the middle when it sees a refusal: hypercorn then ends the
        connection."""
        began, most = self.exchange.bytes_in, _LINGER_BYTES
        with trio.move_on_after(_LINGER_SECONDS):
            while not self.exchange.input_ended and self.exchange.bytes_in - began < most:
                await self._arrived.wait()

    def _next(self) -> tuple[Message, int]:
        """Returns the next message for the server, and how many bytes of room that makes. Pieces that are ready become one
        message."""
        message, first = self._queue.popleft()
        if message is not None:
            return message, len(first)
        pieces, size = [first], len(first)
        while self._queue and size < _WRITE_AT_MOST and self._queue[0][0] is None:
            piece = self._queue.popleft()[1]
            pieces.append(piece)
            size += len(piece)
        body = b"".join(pieces)
        last = self._queue[0][0] if self._queue else None
        if last is not None and last.get("body") == b"" and (self.exchange.input_ended or not self._lingers):
            self._queue.popleft()
            return {**last, "body": body}, size
        kind = "websocket.http.response.body" if self._socket else "http.response.body"
        return {"type": kind, "body": body, "more_body": True}, size

    def _tell(self, message: Message, data: Buffer = b"") -> None:
        """Queues a message. `data` is the part of it that took room."""
        if not self._over:
            self._queue.append((message, data))
            self.output_ready()

    def room(self, stream: int) -> int:
        return self.limits.send_buffer - self._queued

    def empty(self, stream: int) -> bool:
        return not self._queued

    def takes(self, stream: int) -> bool:
        return not self._queue and self._blocked_since is None and self.empty(stream)

    def start(self, stream: int, status: int, headers: Headers, trailers: bool) -> None:
        if status == 101:
            chosen = next((value.decode() for name, value in headers if name == b"sec-websocket-protocol"), None)
            fields = [(name, value) for name, value in headers if name not in _HANDSHAKE]
            self._tell({"type": "websocket.accept", "subprotocol": chosen, "headers": fields})
        elif not self._socket:
            self._tells_trailers = trailers and self._takes_trailers
            said = {"trailers": True} if self._tells_trailers else {}
            fields = [*headers, *self.server.date.beside]
            self._tell({"type": "http.response.start", "status": status, "headers": fields, **said})
        elif self._can_refuse:
            fields = [*headers, *self.server.date.beside]
            self._tell({"type": "websocket.http.response.start", "status": status, "headers": fields})

    def push(self, stream: int, buffers: Sequence[Buffer]) -> None:
        if self._socket and not self._can_refuse:
            return  # the server sends 403 without a body
        if not self._over:
            self._queue.extend((None, buffer) for buffer in buffers)
            self._queued += sum(map(len, buffers))
            self.output_ready()

    def push_pieces(self, stream: int, pieces: Sequence[bytes]) -> None:
        self.push(stream, pieces)

    def push_frame(self, stream: int, opcode: Opcode, fin: bool, buffers: Sequence[Buffer]) -> None:
        """Queues a WebSocket message with its last frame, because ASGI has only whole messages."""
        if self._over:
            return
        if opcode is not Opcode.CONTINUATION:
            self._kind = opcode
        self._text.extend(buffers)
        self._queued += sum(map(len, buffers))
        if not fin:
            return
        data = b"".join(self._text)
        self._text = []
        if self._kind is Opcode.TEXT:
            try:
                self._tell({"type": "websocket.send", "text": data.decode()}, data)
            except UnicodeDecodeError:
                self._tell({"type": "websocket.close", "code": 1007, "reason": "a text part that is not UTF-8"})
        else:
            self._tell({"type": "websocket.send", "bytes": data}, data)

    def finish(self, stream: int, code: int, reason: str, trailers: Headers) -> None:
        if not self._socket:
            self._tell({"type": "http.response.body", "body": b"", "more_body": False})
            if self._tells_trailers:
                self._tell({"type": "http.response.trailers", "headers": [*trailers], "more_trailers": False})
        elif self.exchange.outbound.status == 101 or not self._can_refuse:
            self._tell({"type": "websocket.close", "code": code, "reason": reason})
        else:
            self._tell({"type": "websocket.http.response.body", "body": b"", "more_body": False})

    def respond(
        self,
        stream: int,
        status: int,
        headers: Headers,
        length: int | None,
        fresh: Headers,
        buffers: Sequence[Buffer],
        trailers: Headers,
    ) -> None:
        declared = () if length is None else ((b"content-length", b"%d" % length),)
        self.start(stream, status, [*headers, *declared, *fresh], bool(trailers))
        if buffers:
            self.push(stream, buffers)
        self.finish(stream, 1000, "", trailers)

    def reset(self, stream: int, ending: Ending) -> None:
        if self._socket and self.exchange.outbound.status == 101:
            self._tell({"type": "websocket.close", "code": 1011, "reason": ""})
        else:
            self._cut = True
            self.lost(ending)


def _asks_for_trailers(exchange: Exchange) -> bool:
    """True if the client sends `te: trailers` (RFC 9110 section 10.1.4); without it hypercorn drops trailers too."""
    codings = b",".join(exchange.header_values(b"te")).lower().split(b",")
    return b"trailers" in [coding.strip() for coding in codings]


def prefix_of(scope: Scope) -> str:
    """Returns the path at which clients find the application, quoted and without a slash at its end."""
    root = scope.get("root_path", "").strip("/")
    return "/" + quote(root) if root else ""


def _path_of(scope: Scope) -> tuple[bytes, bytes]:
    """Returns the path below the place where the application is mounted, and the authority of an absolute target (RFC 9112
    section 3.2.2), which hypercorn hands on as a path.

    `root_path` is that place as clients see it. A proxy may have removed its beginning, the part that Starlette's
    `app_root_path` has: then the path still begins with the rest."""
    path: bytes = (scope.get("raw_path") or quote(scope["path"], safe=_PLAIN).encode()).partition(b"?")[0]
    named = b""
    if (absolute := _ABSOLUTE.fullmatch(path)) is not None:
        named, path = absolute[1], absolute[2]
    root: str = scope.get("root_path", "")
    for mounted in (root, root.removeprefix(scope.get("app_root_path", ""))):
        if (below := _below(path, mounted)) is not None:
            return below, named
    return path or b"/", named


def _below(path: bytes, mounted: str) -> bytes | None:
    """Returns the path below a place, whose segments the client may have quoted in any way; None if it is elsewhere."""
    place = mounted.strip("/").split("/")
    segments = path.split(b"/")[1:]
    if place == [""] or [unquote(segment.decode("latin-1")) for segment in segments[: len(place)]] != place:
        return None
    return b"/" + b"/".join(segments[len(place) :])


def head_of(scope: Scope) -> Head:
    """Makes the request head of an ASGI scope; its path begins where the application is mounted."""
    path, named = _path_of(scope)
    query = scope.get("query_string", b"")
    headers = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
    fields = dict(reversed(headers))
    length = fields.get(b"content-length", b"")
    socket = scope["type"] == "websocket"
    return Head(
        method=b"GET" if socket else scope["method"].encode(),
        target=b"%b?%b" % (path, query) if query else path,
        headers=headers,
        authority=named or fields.get(b"host", b""),
        scheme=scope.get("scheme", "http").encode(),
        version=str(scope.get("http_version", "1.1")).encode(),
        content_length=int(length) if length.isdigit() else 0 if scope.get("method") in ("GET", "HEAD") else None,
        expects_continue=fields.get(b"expect", b"").lower() == b"100-continue",
        upgrade=b"websocket" if socket else b"",
    )


async def refuse_asgi(
    scope: Scope, receive: Receive, send: Send, why: str, *, retry_after: int = 0, beside: Headers = ()
) -> None:
    """Answers 503 with the reason, on any event loop. The reason is empty for the preflight of a page that may then read the
    refusal of its request. A WebSocket gets a 503 too if its server can send one; others send 403 without a text.
    `retry_after` is in seconds; 0: a retry does not help. `beside` are further fields."""
    kind = "http"
    if scope["type"] == "websocket":
        await receive()  # "websocket.connect"
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            reason = why.encode()[:123].decode(errors="ignore")  # RFC 6455 section 5.5: 125 bytes with the code
            await send({"type": "websocket.close", "code": 1013, "reason": reason})
            return
        kind = "websocket.http"
    status, body, headers = 204, b"", [*beside]
    if why:
        status, body = 503, msgspec.json.encode({"error": why})
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if why and retry_after:
        headers.append((b"retry-after", b"%d" % retry_after))
    await send({"type": f"{kind}.response.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body, "more_body": False})
