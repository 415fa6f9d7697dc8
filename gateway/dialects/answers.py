"""Parts that all answers share: heads, refusals before them, a WebSocket's Close code for an error."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, final

from gateway.core.exchange import Exchange
from gateway.core.outbound import Outbound
from gateway.credentials import chosen_protocol
from gateway.errors import (
    BadRequest,
    Drained,
    Ending,
    GatewayError,
    NotPermitted,
    OthersWait,
    Overloaded,
    SlowReader,
    SlowUpload,
    TooLarge,
    TooManyRequests,
    Unauthenticated,
    Unavailable,
)
from protocols.aws import invoke
from protocols.events import Buffer, Headers
from protocols.sse import CONTENT_TYPE
from protocols.websocket import handshake

log = logging.getLogger("gateway.dialects")

# RFC 6455 section 7.4.1 and the IANA registry
_GOING_AWAY, _INVALID, _POLICY, _TOO_BIG, _INTERNAL, _TRY_AGAIN = 1001, 1007, 1008, 1009, 1011, 1013


def reply_of(exchange: Exchange) -> dict[str, str]:
    """The `reply` of a channel on this exchange: the header fields that its model sets."""
    if exchange.reply is None:
        exchange.reply = {}
    return exchange.reply


_FIELD_VALUE = re.compile(r"[\t -~]*")
_FIELD_LENGTH = 1024


def reply_value(exchange: Exchange, name: str, default: str = "") -> str:
    """The value that the model has set for a field of the head, without white space around it. The default if it has set
    none, or one that is no string, is over 1024 characters or has others than printable ASCII: that is logged."""
    value = default if exchange.reply is None else exchange.reply.get(name, default)
    if isinstance(value, str) and len(value) <= _FIELD_LENGTH and _FIELD_VALUE.fullmatch(value):
        return value.strip()
    said = "a model's header field was left out"
    facts = {"id": exchange.id, "model": exchange.model, "field": name}
    exchange.owner.log_limits.write(log, said, facts, logging.WARNING)
    return default


# The fields that a model may set beside its content type: SageMaker's names, of the container's head and of the platform's.
_PASSED = (invoke.CUSTOM_ATTRIBUTES, invoke.NEW_SESSION_ID, invoke.CLOSED_SESSION_ID)


def reply_headers(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """The fields that the model has put into its reply, beside the content type."""
    if not exchange.reply:
        return []
    return [(name.encode(), value.encode()) for name in _PASSED if (value := reply_value(exchange, name))]


JSON = (b"content-type", b"application/json")


def accepted_handshake(exchange: Exchange, spoken: Collection[str] = ()) -> Headers:
    """The fields that accept a WebSocket whose model speaks these subprotocols. RemoteProtocolError if the request is not a
    handshake."""
    request = exchange.request
    chosen = chosen_protocol(request.headers, spoken)
    return handshake.accept_headers(request, subprotocols=(chosen.encode(),) if chosen else ())


def refusal_headers(error: GatewayError) -> Headers:
    """The fields of an error that is the whole answer, in JSON: its own, and `retry-after` if a retry may help."""
    return (JSON, *error.headers, *error.retry)


class Wrapping(Protocol):
    """The place for an answer that another dialect puts into its own form: a dialect that is given one answers it instead of
    the exchange."""

    @property
    def verbatim(self) -> bool:
        """True if the bytes of the body reach the client as they are, without a form around them."""
        ...

    def in_band(self, says: Callable[[GatewayError], bytes]) -> None:
        """Called once the dialect can write an error into its body after the head: `says` makes the bytes."""
        ...

    async def wait_room(self, n: int = 1) -> None: ...
    def start(self, status: int, headers: Headers) -> None: ...
    def push(self, *buffers: Buffer) -> None: ...
    def finish(self, ending: Ending = Ending.COMPLETE) -> None: ...
    def respond(self, status: int, headers: Headers, *buffers: Buffer, ending: Ending = Ending.COMPLETE) -> None: ...


class EventAnswer(Protocol):
    """An answer of server-sent events."""

    @property
    def exchange(self) -> Exchange: ...
    def start(self) -> None:
        """Sends the head, before the first event."""
        ...


@final
class EventStreams:
    """The event streams that have their slots, for `Silence`. Enter `watched` with the slot: a call that waits for one keeps
    its HTTP status."""

    __slots__ = ("since",)

    def __init__(self) -> None:
        self.since: dict[EventAnswer, float] = {}
        """When each of them got its slot, or its last comment."""

    def watched(self, stream: EventAnswer, content_type: str, answer: Outbound | Wrapping) -> AbstractContextManager[None]:
        """The block in which an answer is one of them, if it is a stream of events that reaches the client as it is."""
        return _Watched(self.since, stream) if content_type == CONTENT_TYPE and answer.verbatim else _NOTHING


@final
class _Watched:
    __slots__ = ("_since", "_stream")

    def __init__(self, since: dict[EventAnswer, float], stream: EventAnswer) -> None:
        self._since, self._stream = since, stream

    def __enter__(self) -> None:
        stream = self._stream
        self._since[stream] = stream.exchange.owner.clock()

    def __exit__(self, *_: object) -> None:
        del self._since[self._stream]


_NOTHING = nullcontext()


def octets(data: Buffer) -> Buffer:
    """The bytes of a buffer of any format and shape. They are copied only if the buffer is not contiguous."""
    if type(data) is bytes:
        return data
    view = memoryview(data)
    if not view.c_contiguous:
        return view.tobytes()
    return view.cast("B") if view.nbytes else b""


def close(exchange: Exchange, error: GatewayError) -> None:
    """Ends a WebSocket with a Close. Its code says whose fault it was; its reason is the message, cut to 123 bytes."""
    match error:
        case Drained():
            code = _GOING_AWAY
        case Overloaded() | OthersWait() | Unavailable() | TooManyRequests():
            code = _TRY_AGAIN
        case BadRequest():
            code = _INVALID
        case TooLarge():
            code = _TOO_BIG
        case SlowReader() | SlowUpload() | Unauthenticated() | NotPermitted():
            code = _POLICY
        case _:
            code = _INTERNAL
    reason = error.message.encode()[:123].decode(errors="ignore")  # RFC 6455 section 5.5: 125 bytes with the code
    exchange.outbound.finish(error.ending, code=code, reason=reason)
