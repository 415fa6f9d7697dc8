"""The events of the transport machines, in either role: reports of what came, and commands to send.

They are msgspec Structs because a machine makes one for each frame and piece: a frozen dataclass costs ten times as much.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeAlias, final

import msgspec

Buffer: TypeAlias = bytes | bytearray | memoryview
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]


class Signal(enum.Enum):
    """The answer of `next_event` when it has no event."""

    NEED_DATA = enum.auto()
    """Feed more bytes with `receive_data` (or `receive_eof`)."""

    PAUSED = enum.auto()
    """Bytes are waiting, but they belong to a message that may not start yet (HTTP/1.1: our answer to the
    previous request is not complete). Sending makes progress possible again."""

    TURN = enum.auto()
    """Many frames were read that make no event, and more may be here: call again after other work that is due. HTTP/2 alone
    gives this, because its peer can send such frames without end. Nothing is lost."""


NEED_DATA = Signal.NEED_DATA
PAUSED = Signal.PAUSED
TURN = Signal.TURN


@final
class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a request. `headers` have lower-case names, keep their order, and hold no pseudo-header and no connection
    field. `target` is in origin-form, path and query as sent. `content_length` is None if the head has no length. While a
    client repeats the same head, each received request has the same object: a caller may cache what it derives from it."""

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

    fields: dict[bytes, bytes] = {}
    """The first field of each name: made of `headers`, whatever is given. It is no property with a cache, which would take
    300 bytes more of each connection that waits."""

    def __post_init__(self) -> None:
        # reversed: the first field of a name is set last, and wins
        msgspec.structs.force_setattr(self, "fields", dict(reversed(self.headers)))


@final
class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request begins. `body` is for received requests only: the whole body, if it is already here and needs no credit. No
    Data and no End follow then. None: they follow."""

    stream: int
    head: Head
    body: bytes | None = None


@final
class Response(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A response head; a 1xx status is an interim one. `content-length` in `headers` decides the framing: if it is present,
    the body has that many bytes; if not, it is chunked (HTTP/1.1) or ends with END_STREAM (HTTP/2)."""

    stream: int
    status: int
    headers: Headers = ()


@final
class Data(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A piece of a body. A received one has one buffer. A sent one has any number: they are written in order as one piece
    (one HTTP/1.1 chunk), and by reference, so their memory must not change until it is written."""

    stream: int
    buffers: tuple[Buffer, ...]

    @property
    def nbytes(self) -> int:
        return sum(memoryview(b).nbytes for b in self.buffers)


@final
class End(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The body is complete. Every message ends with exactly one End, also a message without a body. The exception is a
    Request that brings its whole body."""

    stream: int
    trailers: Headers = ()


@final
class Reset(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One stream ends abruptly; `code` is an HTTP/2 error code. HTTP/1.1 has no reset: its connection ends instead."""

    stream: int
    code: int = 0


@final
class Refused(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A received request that must not reach a handler but can be answered: send a Response with `status`. `method` and
    `headers` are as they came, for an answer in the form that its client reads."""

    stream: int
    status: int
    message: str
    method: bytes = b""
    headers: Headers = ()


@final
class NoRoom(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """HTTP/2: the byte budget has no room for n bytes that came on the stream. They and all later input of the stream are
    dropped, credited, and not reported. The stream stays open: its server must end it."""

    stream: int
    n: int


@final
class GoAway(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """No new requests. Received: the peer opens none. Sent: streams above `last_stream` are refused, the others finish."""

    code: int = 0
    last_stream: int = 2**31 - 1
    debug: bytes = b""


@final
class ConnectionEnd(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The peer closed its side properly: nothing more will be received."""


class Opcode(enum.IntEnum):
    """RFC 6455 section 5.2, the data opcodes."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2


@final
class Frame(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One WebSocket data frame, exactly as on the wire: never merged, never split, never re-encoded."""

    opcode: Opcode
    fin: bool
    data: Buffer


@final
class Close(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A WebSocket Close frame. `code` is None if the frame has no body."""

    code: int | None = 1000
    reason: str = ""


@final
class Ping(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A WebSocket Ping. The machine answers a received one itself."""

    data: bytes = b""


@final
class Pong(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A WebSocket Pong, as received."""

    data: bytes = b""


Event: TypeAlias = Request | Response | Data | End | Reset | Refused | NoRoom | GoAway | ConnectionEnd
FrameEvent: TypeAlias = Frame | Close | Ping | Pong


@final
class Sent(msgspec.Struct):
    """The effect of written bytes: `data_sent` returns it once the buffers of `data_to_send` are with the kernel."""

    room: list[int] = []  # a Struct copies it
    """Streams whose queue became shorter."""

    ended: list[int] = []
    """Streams whose last byte (END_STREAM, last chunk, RST_STREAM) is written."""
