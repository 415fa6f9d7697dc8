"""The vocabulary of the transport machines: what they report and what they are told to send, in either role.

They are msgspec Structs, which cost a tenth of a frozen dataclass to make: one is made for each frame and piece.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias, final

import msgspec

Buffer: TypeAlias = bytes | bytearray | memoryview
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


class Signal(enum.Enum):
    """What `next_event` says when there is no event to give."""

    NEED_DATA = enum.auto()
    """Feed more bytes with `receive_data` (or `receive_eof`)."""

    PAUSED = enum.auto()
    """Bytes are waiting, but they belong to a message that may not start yet (HTTP/1.1: our answer to the
    previous request is not complete). Sending makes progress possible again."""

    TURN = enum.auto()
    """Many frames that were here made no event, and there may be more: ask again, after whatever else is due (HTTP/2, whose
    peer can send such frames without end). Nothing is lost."""


NEED_DATA = Signal.NEED_DATA
PAUSED = Signal.PAUSED
TURN = Signal.TURN


@final
class Head(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What a request says before its body. `headers` have lower-case names, keep their order, hold no pseudo-header and no
    connection field; `target` is origin-form, path and query as sent; `content_length` is None where the head does not
    tell. Received, it is the same object for as long as a client repeats itself: what was found out from it may be kept
    beside it."""

    method: bytes
    target: bytes
    headers: Headers = ()
    authority: bytes = b""
    scheme: bytes = b"http"
    version: bytes = b"1.1"
    content_length: int | None = None
    expects_continue: bool = False
    upgrade: bytes = b""
    """The lower-case protocol of a well-formed HTTP/1.1 Upgrade, such as b"websocket"; else empty."""

    @cached_property
    def fields(self) -> dict[bytes, bytes]:
        """The first field of each name."""
        return dict(reversed(self.headers))  # in this order the first one of a name is the one that stays


@final
class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request begins. `body` is received only: all of it, where it is here already and wants no credit. Nothing else is
    here then, and neither a Data nor an End follows. None: they do."""

    stream: int
    head: Head
    body: bytes | None = None


@final
class Response(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A response head; a 1xx status is an interim one. Framing follows `content-length` in `headers`: present means
    that many bytes, absent means chunked (HTTP/1.1) or until END_STREAM (HTTP/2)."""

    stream: int
    status: int
    headers: Headers = ()


@final
class Data(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A piece of a body. Received: one buffer. Sent: any number, written in order as one piece (one HTTP/1.1 chunk)
    and by reference: their memory must not change until it is written."""

    stream: int
    buffers: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        return sum(memoryview(b).nbytes for b in self.buffers)


@final
class End(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The body is complete. Every message ends with exactly one, also one without a body, but for a Request that says all of
    its body itself."""

    stream: int
    trailers: Headers = ()


@final
class Reset(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One stream ends abruptly; `code` is an HTTP/2 error code. HTTP/1.1 has no such thing: there the connection ends."""

    stream: int
    code: int = 0


@final
class Refused(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Received only: a request that must not reach a handler, but that can be answered: send a Response with `status`."""

    stream: int
    status: int
    message: str


@final
class NoRoom(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """HTTP/2: the byte budget has no room for n bytes that came on the stream. They are dropped, as is what still comes
    there, and credited; of the stream's input nothing is reported any more. It is open: whoever serves it ends it."""

    stream: int
    n: int


@final
class GoAway(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """No new requests. Received: the peer opens no more. Sent: streams above `last_stream` are refused, others finish."""

    code: int = 0
    last_stream: int = 2**31 - 1
    debug: bytes = b""


@final
class ConnectionEnd(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Received only: the peer closed its side, in order; nothing more will be received."""


class Opcode(enum.IntEnum):
    """RFC 6455 section 5.2, the data opcodes."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2


@final
class Frame(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One WebSocket data frame, byte for byte as it is on the wire: never merged, never split, never re-encoded."""

    opcode: Opcode
    fin: bool
    data: Buffer


@final
class Close(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A WebSocket Close frame; `code` is None for one without a body."""

    code: int | None = 1000
    reason: str = ""


@final
class Ping(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A WebSocket Ping. A received one is answered by the machine itself."""

    data: bytes = b""


@final
class Pong(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A WebSocket Pong, as received."""

    data: bytes = b""


Event: TypeAlias = Request | Response | Data | End | Reset | Refused | NoRoom | GoAway | ConnectionEnd
FrameEvent: TypeAlias = Frame | Close | Ping | Pong


@final
class Sent(msgspec.Struct):
    """What leaving bytes have changed: `data_sent` returns it once the buffers of `data_to_send` are with the kernel."""

    room: list[int] = []  # a Struct copies it
    """Streams whose queue became shorter."""

    ended: list[int] = []
    """Streams of which the last byte of our ending (END_STREAM, last chunk, RST_STREAM) is written."""
