"""The interfaces of the core, as Protocols: what an exchange, its wire and its connection may ask of one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from gateway.config import LimitsConfig
    from gateway.core.memory import BodyPool
    from gateway.core.turn import Turn
    from gateway.credentials import Door
    from gateway.errors import Ending, GatewayError
    from gateway.log_limits import LogLimits
    from gateway.net.proxies import TrustedProxies
    from gateway.party import Party
    from models.session import ClientCertificate
    from protocols.buffers import Budget
    from protocols.events import Buffer, Head, Headers, Opcode

FRAMING = 20
"""Bytes of framing, at most, around one message of a wire that is `exclusive`."""
FEW = 4096
"""Bytes of a body that is not here yet: with these the work of an exchange that rests begins, and with more its body gets
memory to land in. For a byte that would be a page, and 1.2 KiB of objects."""
LANDED = 256 * 1024
"""Bytes of a body, at most, that land in its final buffer before its exchange is told of them; at first as many as it was
told of already."""
TURN_SECONDS = 0.002
"""Seconds that a connection may work in one turn on what it has received. The rest waits for its next turn."""
EVENTS_A_LOOK = 8
"""Events that a connection hands on between two looks at the clock."""
REQUESTS_AT_ONCE = 8
"""Requests in one turn of a connection that has not used up its last one; the turn ends with the next that begins.
Their cost shows only when they run, and the first turns of many connections come one after the other."""
LAST_WORD = 5.0
"""Seconds that a client has, after `limits.write_stall`, to read again and hear why its answer ends: what
`websocket.close_timeout` gives a Close. Meanwhile its model has stopped, and only what is queued is held."""


class Hop(NamedTuple):
    """A place on the way of an exchange's bytes."""

    name: str
    """`received` and not taken by the model; `queued` for the client; in its connection's `socket`, with what other streams
    have there; in the client's `window`, which it gives back when it reads."""
    held: int
    """Bytes that are there."""
    limit: int
    """Bytes with which the place is full."""


class Wire(Protocol):
    """The connection as an exchange sees it. Every call is synchronous and commits. No call fails because of the peer: if
    the peer is gone, calls do nothing, and the exchange has been told."""

    name: str
    windowed: bool
    """True if the wire has a receive window per stream, paid from the budget by its machine."""
    exclusive: bool
    """True if only the exchange's own pushes reduce its room, each message by its bytes and at most `FRAMING` more.
    Pieces of an answer then wait in its Outbound, and the wire takes them (`take_pieces`) when it writes."""

    def credit(self, stream: int, n: int) -> None: ...
    def proceed(self, stream: int) -> None: ...
    def room(self, stream: int) -> int: ...
    def empty(self, stream: int) -> bool: ...
    def takes(self, stream: int) -> bool:
        """True if all that was queued for the stream has left, and one byte more would, as far as is known: the client's
        window is open."""
        ...

    def start(self, stream: int, status: int, headers: Headers, trailers: bool) -> None:
        """Queues the head of an answer, or an interim one. `trailers` is true if the answer will end with trailers: an ASGI
        server must know that now."""
        ...

    def push(self, stream: int, buffers: Sequence[Buffer]) -> None: ...
    def push_pieces(self, stream: int, pieces: Sequence[bytes]) -> None:
        """Pushes each piece."""
        ...

    def push_frame(self, stream: int, opcode: Opcode, fin: bool, buffers: Sequence[Buffer]) -> None: ...
    def finish(self, stream: int, code: int, reason: str, trailers: Headers) -> None:
        """Ends an answer that has begun. `code` and `reason` are for a WebSocket only.

        `trailers` are fields behind the body, and the last of them is the last byte of the answer. HTTP/2 always carries
        them. HTTP/1.1 does if the body is chunked and the request has `te: trailers` (RFC 9110 section 6.5.1, RFC 9112
        section 7.1.2). A call of an ASGI server does if the request has `te: trailers`, the server offers
        `http.response.trailers`, and `start` announced them. Otherwise they are dropped, as HTTP allows, so a caller that
        does not know its wire must not depend on them. A WebSocket has none.

        Raises LocalProtocolError, and changes nothing, for fields that the machine cannot carry there; an ASGI server
        checks them itself."""
        ...

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
        """Does `start`, `push` if there are buffers, and `finish`, in one write if the client has room for it. Without
        buffers, HTTP/2 sends one HEADERS frame, which ends the stream and has the trailers among its fields.

        The head has `headers`, a content-length of `length` unless that is None, and `fresh`: the other fields that differ
        with each answer. A wire may keep a tuple of `headers` in encoded form. With a `length` there are no `trailers`,
        because HTTP/1.1 has none then."""
        ...

    def reset(self, stream: int, ending: Ending) -> None: ...
    def land(self, stream: int, buffer: memoryview) -> int | None:
        """Receives the rest of the body into `buffer`, and feeds the Exchange views of it. Returns how often each byte is
        copied on its way there; None if this wire cannot do that, or nothing more will come."""
        ...

    def hops(self, stream: int) -> list[Hop]:
        """The places of this wire that hold bytes of the exchange, in order from the model to the client."""
        ...

    def reserved(self, stream: int) -> int:
        """Bytes of the budget that the wire itself holds for the exchange."""
        ...

    def charge(self, stream: int, account: Budget) -> int:
        """Makes `account` pay for these bytes from now on. Returns how many are reserved already: the caller hands them
        over."""
        ...

    def release(self, stream: int) -> None: ...
    def dismiss(self) -> None:
        """Takes no further request: the connection ends when those that it has are answered. Does nothing in an ASGI
        server, which owns the connection."""
        ...


class Restarter(Protocol):
    """Runs the exchanges of a server."""

    def start_again(self, exchange: Any) -> None:
        """Makes an exchange that rests run."""
        ...


class HasRunner(Protocol):
    """A server, as bodies of its requests see it."""

    @property
    def runner(self) -> Restarter:
        """Runs its exchanges."""
        ...


class Owner(Protocol):
    """A connection, or a call of an ASGI server, as its exchanges see it."""

    @property
    def server(self) -> HasRunner:
        """The server that it belongs to."""
        ...

    peer: str
    proxies: TrustedProxies | None
    """Proxies that may name clients in requests; None: such fields are ignored."""

    limits: LimitsConfig
    pool: BodyPool
    last_sent: float
    """When the transport last took bytes, on Trio's clock."""

    @property
    def log_limits(self) -> LogLimits:
        """Limits how often log lines that peers cause are written."""
        ...

    heavy: bool
    """True if its last turn was not enough for it: it comes after all others, and its exchanges do too."""

    routed: Any
    """The last head with its route and access decision. Only the dispatcher uses it."""
    strangers: int
    """How many of its requests were refused because they had no valid key."""

    prefix: str
    """The path before each path of ours, as clients see them; empty, or without a slash at its end."""
    on_bidi_port: bool
    """True if its client has called `listen.bidi_port`."""
    by_operator: bool
    """True if its requests come by the operator plane, which has checked the client: no key or signature is asked for."""

    @property
    def door(self) -> Door:
        """Decides which fields of a request models see."""
        ...

    @property
    def budget(self) -> Budget:
        """Its party's account of the byte budget."""
        ...

    @property
    def party(self) -> Party:
        """The party that its exchanges count for, unless they have a key of their own."""
        ...

    @property
    def client_certificate(self) -> ClientCertificate | None:
        """The client's verified certificate; None if it has none."""
        ...

    def clock(self) -> float: ...
    def output_ready(self) -> None:
        """Called when the wire has something to write, or will find it in an Outbound when it writes."""
        ...

    def exchange_closed(self, exchange: Any) -> None:
        """Called when an Exchange has its ending, and its task is done with it."""
        ...

    def failed(self, error: Exception) -> None:
        """Called with an error outside of the exchange's own work: it ends the connection."""
        ...


class Sink(Protocol):
    """The destination of a whole body, in place of a task that receives it piece by piece."""

    landed: int | None
    """The answer of `Wire.land` for `place`; None if the bytes that are taken are elsewhere."""

    def place(self) -> memoryview | None:
        """Memory for the rest of the body; None if its length is not known, if nothing is left, and while only a few bytes
        have come."""
        ...

    def take(self, item: Buffer, n: int, /) -> None:
        """Takes the next n bytes, in `item` or in `place`."""
        ...


class Answered(Protocol):
    """An answer, as the body of its request sees it."""

    status: int
    turn: Turn


class Stream(Protocol):
    """An exchange, as its Inbound and Outbound see it."""

    id: str
    stream: int
    owner: Owner
    account: Budget
    """The budget that pays for what the exchange holds."""
    request: Head
    fields: dict[bytes, bytes]
    gone: bool
    """True if the client or the connection is gone: nothing more can be sent."""
    cancelled: bool
    """True if its work was told to stop."""
    bytes_in: int
    copied: int
    reserved: int
    """Bytes of the budget that pay for the whole body."""
    started_at: float
    arrived_at: float

    @property
    def outbound(self) -> Answered: ...
    def reserve(self, n: int) -> None: ...
    def interrupt(self, error: GatewayError) -> None: ...
    def parks_for(self, what: int) -> None:
        """A task of the exchange waits from now on: for `SLOT`, `INPUT` or `ROOM` of `gateway.core.waits`."""
        ...

    def has_waited(self, what: int, now: float | None = None) -> None:
        """The task got it, or no longer waits."""
        ...
