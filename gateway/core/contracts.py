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
    from gateway.net.proxies import TrustedProxies
    from gateway.party import Party
    from models.session import ClientCertificate
    from protocols.buffers import Budget
    from protocols.events import Buffer, Head, Headers, Opcode

FRAMING = 20
"""Bytes of framing, at most, around one message of a wire that is `exclusive`."""
LANDED = 256 * 1024
"""Bytes of a body, at most, that land where it will stay before its exchange hears of them; at first as many as it has
heard of."""
TURN_SECONDS = 0.002
"""Seconds of one turn of a connection, for bytes that it has received; the rest waits for its next turn."""
EVENTS_A_LOOK = 8
"""Events that it hands on between two looks at the clock."""
REQUESTS_AT_ONCE = 8
"""Requests that are one turn of a connection which has not used up its last one; the turn ends with the next that begins.
The cost of a request shows only when it runs, and the first turns of many connections come one after the other."""
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
    """With how many it is full."""


class Wire(Protocol):
    """The calls that an exchange makes of its connection. Every call is synchronous and commits. None may fail because of
    the peer: when the peer is gone they do nothing, and the exchange has been told."""

    name: str
    windowed: bool
    """True if the wire has a receive window per stream, paid from the budget by its machine."""
    exclusive: bool
    """True if only the exchange's own pushes make its room smaller, each message by at most `FRAMING` bytes more than it
    has. Pieces of such an answer wait in its Outbound, and the wire asks for them (`take_pieces`) when it writes."""

    def credit(self, stream: int, n: int) -> None: ...
    def proceed(self, stream: int) -> None: ...
    def room(self, stream: int) -> int: ...
    def empty(self, stream: int) -> bool: ...
    def start(self, stream: int, status: int, headers: Headers, trailers: bool) -> None:
        """The head of an answer, or an interim one; `trailers` where the answer will end with some, which an ASGI server has
        to know by now."""
        ...

    def push(self, stream: int, buffers: Sequence[Buffer]) -> None: ...
    def push_pieces(self, stream: int, pieces: Sequence[bytes]) -> None:
        """`push` of each."""
        ...

    def push_frame(self, stream: int, opcode: Opcode, fin: bool, buffers: Sequence[Buffer]) -> None: ...
    def finish(self, stream: int, code: int, reason: str, trailers: Headers) -> None:
        """Ends an answer that has begun. `code` and `reason` are for a WebSocket only. `trailers` are fields behind the
        body, and the last of them is the last byte of the answer. HTTP/2 always carries them. HTTP/1.1 does if the body
        is chunked and the request has said `te: trailers` (RFC 9110 section 6.5.1, RFC 9112 section 7.1.2). An ASGI
        server carries them where the request asks for them too, the server offers `http.response.trailers`, and `start` has
        named them. Elsewhere they are dropped, as HTTP allows, so a caller that does not know its wire must not depend on
        them; a WebSocket has none. LocalProtocolError, and nothing is done, for fields that the wire's machine cannot carry
        there; an ASGI server judges for itself."""
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
        """`start`, `push` if there are buffers, and `finish`, as one write where the client takes that. Without buffers it
        is one HEADERS frame of HTTP/2, which ends the stream and has the trailers among its fields.

        The head says `headers`, a content-length of `length` unless that is None, and `fresh`, which has what else differs
        with each answer: a tuple of `headers` may be kept in the form that goes out. There are no `trailers` where there is
        a length, for HTTP/1.1 has none then."""
        ...

    def reset(self, stream: int, ending: Ending) -> None: ...
    def land(self, stream: int, buffer: memoryview) -> int | None:
        """The rest of the body comes into `buffer`, and the Exchange is fed views of that. The number says how often each
        byte is copied on its way there; None where this wire does no such thing, or nothing is to come."""
        ...

    def hops(self, stream: int) -> list[Hop]:
        """The places of this wire that hold bytes of the exchange now, in order from the model to the client."""
        ...

    def reserved(self, stream: int) -> int:
        """Bytes of the budget that the wire itself holds for the exchange."""
        ...

    def charge(self, stream: int, account: Budget) -> int:
        """That account pays for these from now on. Says how many are reserved already, which the caller hands over."""
        ...

    def release(self, stream: int) -> None: ...
    def dismiss(self) -> None:
        """Takes no further request: the connection ends when those that it has are answered. Does nothing where the
        connection belongs to an ASGI server."""
        ...


class Owner(Protocol):
    """Keeps count of exchanges: a connection, or a call of an ASGI server."""

    peer: str
    proxies: TrustedProxies | None
    """Proxies that may name clients in requests; None: no field is believed."""

    limits: LimitsConfig
    pool: BodyPool
    last_sent: float
    """When bytes were last taken by the transport, on Trio's clock."""

    heavy: bool
    """True if its last turn was not enough for it: it comes after all others, and so do its exchanges."""

    routed: tuple[Head, Any, Any] | None
    """The last head whose route was found, that `gateway.core.route.Route`, and what was decided of who asks, where that was
    anything: for the dispatcher alone."""
    strangers: int
    """Its requests that were refused for want of a right key."""
    by_operator: bool
    """True if its requests come by the operator plane, which has checked who asks: no key or signature is looked for."""

    @property
    def door(self) -> Door:
        """Decides which fields of a request models see."""
        ...

    @property
    def budget(self) -> Budget:
        """The account of its party, which reserves bytes of the byte budget."""
        ...

    @property
    def party(self) -> Party:
        """The party that its exchanges are counted for, unless they show a key."""
        ...

    @property
    def client_certificate(self) -> ClientCertificate | None:
        """The client's verified certificate; None where there is none."""
        ...

    def clock(self) -> float: ...
    def output_ready(self) -> None:
        """The wire has something to write, or will find it in an Outbound when it writes."""
        ...

    def exchange_closed(self, exchange: Any) -> None:
        """An Exchange has its ending, and its task is done with it."""
        ...

    def failed(self, error: Exception) -> None:
        """Ends the connection for an error outside of the exchange's own work."""
        ...


class Sink(Protocol):
    """Takes a body, in place of a task that receives it piece by piece."""

    landed: int | None
    """The answer of `Wire.land` for `place`; None where the bytes that are taken are elsewhere."""

    def place(self) -> memoryview | None:
        """The memory that the wire may receive the rest into; None where that is not known, or there is none."""
        ...

    def take(self, item: Buffer, n: int, /) -> None:
        """The next n bytes, in `item` or in `place`."""
        ...


class Answered(Protocol):
    """The answer to a body, as far as the body needs to know it."""

    status: int
    turn: Turn


class Stream(Protocol):
    """An exchange, as far as its two directions need to know it."""

    id: str
    stream: int
    owner: Owner
    account: Budget
    """The account that pays for the bytes that it holds."""
    request: Head
    fields: dict[bytes, bytes]
    gone: bool
    """The client is gone, or the connection: nothing more can be said."""
    cancelled: bool
    """Its work was told to stop."""
    bytes_in: int
    copied: int
    reserved: int
    """The whole body, paid from the budget."""
    started_at: float
    arrived_at: float

    @property
    def outbound(self) -> Answered: ...
    def reserve(self, n: int) -> None: ...
    def interrupt(self, error: GatewayError) -> None: ...
    def parks_for(self, what: int) -> None:
        """A task of its own waits from now on for one of `gateway.core.waits`'s things."""
        ...

    def has_waited(self, what: int, now: float | None = None) -> None:
        """It has it, or waits no longer."""
        ...
