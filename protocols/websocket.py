"""The WebSocket machine: data frames byte for byte, everything else by wsproto (RFC 6455)."""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Never, TypeAlias, assert_never, final

from wsproto import events as ws
from wsproto.connection import Connection, ConnectionType
from wsproto.frame_protocol import LOCAL_ONLY_CLOSE_REASONS, CloseReason

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import (
    NEED_DATA,
    Buffer,
    Close,
    ConnectionEnd,
    Frame,
    FrameEvent,
    Opcode,
    Ping,
    Pong,
    Sent,
    Signal,
)
from protocols.roles import Role
from protocols.websocket_frames import FIN, MASKED, Landing, Lane, flat, mask, read_header, write_header

STREAM: Literal[1] = 1
"""The stream id in `Sent`: a WebSocket connection is one stream."""

LARGE = 65536
"""Frames with a payload of this many bytes or more are received into memory of their own."""

# Below this a copy costs less than one more buffer in the list that the kernel is given.
_BY_REFERENCE = 4096

_OPCODES = (Opcode.CONTINUATION, Opcode.TEXT, Opcode.BINARY)
_END = ConnectionEnd()

Received: TypeAlias = FrameEvent | ConnectionEnd | Signal


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WebSocketLimits:
    """What one connection may cost, in bytes where nothing else is said. None means no limit."""

    part: int = 16 * 1024 * 1024
    """The payload of one frame received."""

    message: int | None = None
    """The sum over the fragments of one message received. Nothing holds them together here, so it is off by default."""

    fragments: int | None = None
    """Frames in one message received."""

    check_utf8: bool = False
    """Whether text messages received must be UTF-8; the check sees messages, not frames, and changes no byte."""

    send_buffer: int = 65536
    """What `room` starts from."""

    pings_burst: int = 20
    """Pings that the peer may send at once. The machine has no clock and only counts them (`pings_received`)."""

    pings_rate: float = 5.0
    """Pings a second that the peer may send, see `pings_burst`."""


_DEFAULT_LIMITS = WebSocketLimits()


@final
class WebSocketConnection:
    """One end of an open WebSocket, after the handshake and without extensions.

    Feed it with `receive_data` (or `get_buffer` and `buffer_updated`) and `receive_eof`, pull with `next_event`; give
    out what `data_to_send` holds and say `data_sent`. Frames are neither merged nor split nor looked into: each data
    frame on the wire is one Frame, and control frames between the fragments of a message come in their place.

    Pings are answered and Close is echoed by the machine; both are reported too. When the peer breaks the protocol,
    `next_event` raises RemoteProtocolError with the close code as `wire_code`, then and at each later call; the Close
    that says so is in the output, unless ours was there before.

    `mask` gives four unpredictable bytes for each frame that a client sends (RFC 6455 section 5.3); the client role
    demands it. `allocate` is asked once for the memory of each frame of LARGE bytes or more, after the limits; where it
    gives None, the connection ends with code 1013.
    """

    __slots__ = (
        "_allocate",
        "_at",
        "_at_boundary",
        "_authority",
        "_decoder",
        "_eof",
        "_error",
        "_fragments",
        "_given",
        "_inbox",
        "_landing",
        "_mask",
        "_masked",
        "_message_bytes",
        "_outbox",
        "_owed",
        "_pong",
        "_queued",
        "_sending_message",
        "close_code",
        "close_received",
        "close_sent",
        "limits",
        "pings_received",
        "role",
        "unconsumed",
    )

    def __init__(
        self,
        role: Role,
        limits: WebSocketLimits = _DEFAULT_LIMITS,
        *,
        mask: Callable[[], bytes] | None = None,
        allocate: Callable[[int], bytearray | memoryview | None] = bytearray,
    ) -> None:
        if role is Role.CLIENT and mask is None:
            raise LocalProtocolError("mask: the client role needs a source of masking keys")
        self.role = role
        self.limits = limits
        self.close_code: int | None = None
        """The connection's close code as RFC 6455 section 7.1.5 has it: the one received, 1005 for a Close without one,
        1006 when the end came without a Close or by a violation; None before all this."""
        self.close_sent = False
        """Our Close is queued; no further frame can be."""
        self.close_received = False
        self.pings_received = 0
        self.unconsumed = 0
        """Payload bytes given out in Frames and not yet credited."""

        self._masked = role is Role.SERVER
        self._mask = mask if role is Role.CLIENT else None
        self._allocate = allocate
        # wsproto's connection, made for the first frame that is its own: most idle connections never need one.
        self._authority: Connection | None = None
        self._error: RemoteProtocolError | None = None
        self._eof = False

        self._inbox = bytearray()
        self._at = 0
        self._owed = 0
        """Bytes of the frame under way that wsproto is still to see."""
        self._landing: Landing | None = None
        self._fragments = 0
        self._message_bytes = 0
        self._decoder: IncrementalDecoder | None = None

        # Each buffer with whether a frame ends with it: only there may a Pong be put in.
        self._outbox: deque[tuple[Buffer, bool]] = deque()
        self._at_boundary = True
        self._pong: bytes | None = None
        self._queued = 0
        self._given = 0
        self._sending_message = False

    # Receiving

    def receive_data(self, data: Buffer) -> None:
        """Stores what was read. Bytes after the peer's Close or violation are dropped: nobody will look at them."""
        if self._eof:
            raise LocalProtocolError("receive_data after receive_eof")
        if self.close_received or self._error is not None:
            return
        if self._at:
            del self._inbox[: self._at]
            self._at = 0
        self._inbox += data

    def close(self) -> None:
        """The transport is gone: gives up what is held for it, in both directions, the memory of a frame under way
        included."""
        self.receive_eof()
        self._landing = None
        self._inbox, self._at = bytearray(), 0
        self._outbox.clear()

    def receive_eof(self) -> None:
        """The peer closed its side of the transport. What came before is still to be pulled."""
        self._eof = True

    def get_buffer(self) -> memoryview | None:
        """Where the next bytes from the transport belong, when they are the rest of a large frame and of nothing else;
        then they need no `receive_data`. None at all other times."""
        if self._landing is None or not self._landing.missing or self.unread or self._eof:
            return None
        return self._landing.rest

    def buffer_updated(self, n: int) -> None:
        """The first n bytes of what `get_buffer` gave are filled."""
        if self._landing is None or self.get_buffer() is None or not 0 <= n <= self._landing.missing:
            raise LocalProtocolError(f"buffer_updated: {n} bytes that get_buffer did not offer")
        self._landing.advance(n)

    @property
    def unread(self) -> int:
        """Bytes received that wait for `next_event`. A large frame under way is not among them: its memory was
        accounted for by `allocate`, and it must be read to its end before it can be given out. Smaller frames are:
        a bound on `unread` below LARGE and a header would never let one of them complete."""
        return len(self._inbox) - self._at

    def next_event(self) -> Received:
        """The next Frame, Ping, Pong or Close; NEED_DATA; or, when the transport has ended, ConnectionEnd again and
        again. After Close only these two come. Raises RemoteProtocolError, again and again, once the peer has
        broken the protocol or a limit."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._owed:
            event = self._ask_authority()
        elif self._landing is not None:
            event = self._land(self._landing)
        else:
            event = self._next_frame()
        if event is NEED_DATA and self._eof:
            if self.close_code is None:
                self.close_code = CloseReason.ABNORMAL_CLOSURE.value
            return _END
        return event

    def _next_frame(self) -> Received:
        inbox, at = self._inbox, self._at
        header = read_header(inbox, at, self._masked)
        if header is Lane.MORE:
            return NEED_DATA
        first, second = inbox[at], inbox[at + 1]
        if header is Lane.OTHER:
            # A control frame whole; of a malformed header, more than wsproto needs to refuse it.
            self._owed = 2 + (4 if second & MASKED else 0) + (second & 0x7F)
            return self._ask_authority()
        length, start = header
        opcode, fin = _OPCODES[first & 3], first >= FIN
        self._check(opcode, length)
        if length >= LARGE:
            return self._start_landing(opcode, fin, length, start)
        end = start + length
        if end > len(inbox):
            return NEED_DATA
        payload = mask(inbox[start:end], inbox[start - 4 : start]) if self._masked else bytes(inbox[start:end])
        self._consume(end)
        return self._frame(opcode, fin, payload)

    def _check(self, opcode: Opcode, length: int) -> None:
        limits = self.limits
        if (opcode is Opcode.CONTINUATION) is not (self._fragments > 0):
            expected = "a continuation" if self._fragments else "a new message"
            self._fail(CloseReason.PROTOCOL_ERROR, f"expected {expected}, got a frame with opcode {opcode:d}")
        if length > limits.part:
            self._fail(CloseReason.MESSAGE_TOO_BIG, f"a frame of {length} bytes exceeds the limit part, {limits.part}")
        if limits.message is not None and self._message_bytes + length > limits.message:
            self._fail(CloseReason.MESSAGE_TOO_BIG, f"the message exceeds the limit message, {limits.message} bytes")
        if limits.fragments is not None and self._fragments >= limits.fragments:
            self._fail(CloseReason.MESSAGE_TOO_BIG, f"the message exceeds the limit fragments, {limits.fragments}")

    def _start_landing(self, opcode: Opcode, fin: bool, length: int, start: int) -> Received:
        memory = self._allocate(length)
        if memory is None:
            self._fail(CloseReason.TRY_AGAIN_LATER, f"no memory is free for a frame of {length} bytes")
        key = bytes(self._inbox[start - 4 : start]) if self._masked else None
        self._consume(start)
        self._landing = Landing(opcode, fin, key, memory)
        return self._land(self._landing)

    def _land(self, landing: Landing) -> Received:
        n = min(self.unread, landing.missing)
        if n:
            with memoryview(self._inbox) as inbox:
                landing.rest[:n] = inbox[self._at : self._at + n]
            self._consume(self._at + n)
            landing.advance(n)
        if landing.missing:
            return NEED_DATA
        self._landing = None
        return self._frame(landing.opcode, landing.fin, landing.buffer)

    def _frame(self, opcode: Opcode, fin: bool, payload: bytes | bytearray | memoryview) -> Frame:
        if self.limits.check_utf8:
            self._check_text(opcode, fin, payload)
        if fin:
            self._fragments = self._message_bytes = 0
        else:
            self._fragments += 1
            self._message_bytes += len(payload)
        self.unconsumed += len(payload)
        return Frame(opcode=opcode, fin=fin, data=payload)

    def _check_text(self, opcode: Opcode, fin: bool, payload: bytes | bytearray | memoryview) -> None:
        if opcode is Opcode.TEXT:
            self._decoder = getincrementaldecoder("utf-8")()
        if self._decoder is None:
            return
        try:
            self._decoder.decode(payload, fin)
        except UnicodeDecodeError:
            self._fail(CloseReason.INVALID_FRAME_PAYLOAD_DATA, "a text message is not UTF-8")
        if fin:
            self._decoder = None

    def _consume(self, end: int) -> None:
        if end == len(self._inbox):
            self._inbox.clear()
            end = 0
        self._at = end

    def _ask_authority(self) -> Received:
        authority = self._wsproto()
        before = authority.state
        end = min(self._at + self._owed, len(self._inbox))
        self._owed -= end - self._at
        authority.receive_data(bytes(self._inbox[self._at : end]))
        self._consume(end)
        for event in authority.events():
            match event:
                case ws.Ping(payload=payload):
                    self.pings_received += 1
                    if not self.close_sent:
                        self._answer(event.response())
                    return Ping(data=bytes(payload))
                case ws.Pong(payload=payload):
                    return Pong(data=bytes(payload))
                case ws.CloseConnection(code=code, reason=reason):
                    # A violation looks the same, but leaves the state as it was.
                    if authority.state is before:
                        self._fail(CloseReason(code), reason or "")
                    return self._closed_by_peer(event)
        return NEED_DATA

    def _closed_by_peer(self, event: ws.CloseConnection) -> Close:
        self.close_received = True
        self.close_code = int(event.code)
        self._consume(len(self._inbox))
        if not self.close_sent:
            self._queue_close(event.response())
        code = None if event.code == CloseReason.NO_STATUS_RCVD else int(event.code)
        return Close(code=code, reason=event.reason or "")

    def _fail(self, code: CloseReason, reason: str) -> Never:
        if not self.close_sent:
            self._queue_close(ws.CloseConnection(code=code, reason=reason))
        self.close_code = CloseReason.ABNORMAL_CLOSURE.value
        self._landing = None
        self._consume(len(self._inbox))
        self._error = RemoteProtocolError(f"WebSocket: {reason}", wire_code=code.value)
        raise self._error

    def credit(self, n: int) -> None:
        """The consumer took n payload bytes. WebSocket has no window, so this only moves `unconsumed`: whoever reads
        the transport stops while that and `unread` are large."""
        if not 0 <= n <= self.unconsumed:
            raise LocalProtocolError(f"credit: {n} bytes, of {self.unconsumed} given out")
        self.unconsumed -= n

    # Sending

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent: no Close was queued or received, and the transport has not ended."""
        return not (self.close_sent or self.close_received or self._eof)

    @property
    def closed(self) -> bool:
        """Whether both Closes have gone, each its way; then the server closes the transport (section 7.1.1)."""
        return self.close_sent and self.close_received

    def send(self, event: Frame | Close | Ping) -> None:
        """Queues one frame. Raises LocalProtocolError, and queues nothing, where the connection is closing, a
        continuation is due or is not, a Ping is longer than 125 bytes, or a close code may not be sent.

        The data of a Frame must not change until it is written (`send_frame`). A Close is the last frame; a reason
        longer than 123 bytes of UTF-8 is cut at a character.
        """
        match event:
            case Frame(opcode=opcode, fin=fin, data=data):
                self.send_frame(opcode, fin, (data,))
            case Ping(data=data):
                self._demand_open("Ping")
                if len(data) > 125:
                    raise LocalProtocolError(f"Ping: expected at most 125 bytes, got {len(data)}")
                self._push(self._control(ws.Ping(payload=data)))
            case Close():
                self._demand_open("Close")
                self._queue_close(_own_close(event))
            case _:
                assert_never(event)

    def send_frame(self, opcode: Opcode, fin: bool, buffers: Sequence[Buffer]) -> None:
        """Queues `buffers`, in order, as one data frame. Raises as `send` does.

        A server's payload of 4 KiB or more is queued by reference: its memory must not change until it is written. A
        client's is copied as it is masked.
        """
        self._demand_open("Frame")
        if (opcode is Opcode.CONTINUATION) is not self._sending_message:
            due = "is due" if self._sending_message else "is not due"
            raise LocalProtocolError(f"a continuation {due}, cannot send a frame with opcode {opcode:d}")
        parts = [part for buffer in buffers if len(part := flat(buffer))]
        length = sum(map(len, parts))
        first = opcode | FIN if fin else opcode
        if self._mask is not None:
            key = self._mask()
            head = write_header(first, length, MASKED) + key
            parts = [mask(b"".join(parts), key)]
        else:
            head = write_header(first, length, 0)
        self._sending_message = not fin
        if length < _BY_REFERENCE:
            self._push(b"".join((head, *parts)))
            return
        self._push(head, ends=False)
        for part in parts[:-1]:
            self._push(part, ends=False)
        self._push(parts[-1])

    def room(self) -> int:
        """Bytes that may still be queued: the limit send_buffer less what is queued or given out and not yet written,
        and never below 0. Nothing is refused for lack of room; to wait for it is the caller's part."""
        return max(0, self.limits.send_buffer - self._queued)

    def data_to_send(self, at_most: int = 65536) -> list[Buffer]:
        """At most `at_most` bytes to write, in order; empty when nothing waits. Small buffers come as one.

        They stay queued until `data_sent`, which must come before the next call. A Pong goes ahead of every frame of
        which no byte has been given out.
        """
        if self._given:
            raise LocalProtocolError("data_to_send before data_sent for the buffers given out last")
        out: list[Buffer] = []
        small: list[Buffer] = []
        while (left := at_most - self._given) > 0 and (taken := self._take(left)) is not None:
            self._given += len(taken)
            if len(taken) < _BY_REFERENCE:
                small.append(taken)
                continue
            if small:
                out.append(b"".join(small))
                small.clear()
            out.append(taken)
        if small:
            out.append(b"".join(small))
        return out

    def data_sent(self) -> Sent:
        """What `data_to_send` gave out last is with the kernel. `ended` names the stream when our Close was its end."""
        if not self._given:
            return Sent()
        self._queued -= self._given
        self._given = 0
        ended = self.close_sent and not self._queued
        return Sent(room=[STREAM], ended=[STREAM] if ended else [])

    def _take(self, at_most: int) -> Buffer | None:
        if self._pong is not None and self._at_boundary:
            self._outbox.appendleft((self._pong, True))
            self._pong = None
        if not self._outbox:
            return None
        buffer, ends = self._outbox.popleft()
        self._at_boundary = ends
        if len(buffer) > at_most:
            view = memoryview(buffer)
            self._outbox.appendleft((view[at_most:], ends))
            self._at_boundary = False
            return view[:at_most]
        return buffer

    def _demand_open(self, what: str) -> None:
        if not self.is_open:
            why = "our Close is queued" if self.close_sent else "the transport has ended"
            raise LocalProtocolError(f"cannot send a {what}: {why}")

    def _push(self, buffer: Buffer, *, ends: bool = True) -> None:
        self._outbox.append((buffer, ends))
        self._queued += len(buffer)

    def _answer(self, pong: ws.Pong) -> None:
        """One Pong, for the latest Ping, is enough where several wait (RFC 6455 section 5.5.3): pings cannot make the
        output grow."""
        if self._pong is not None:
            self._queued -= len(self._pong)
        self._pong = self._control(pong)
        self._queued += len(self._pong)

    def _queue_close(self, event: ws.CloseConnection) -> None:
        self._push(self._control(event))
        self.close_sent = True

    def _control(self, event: ws.Event) -> bytes:
        frame = bytes(self._wsproto().send(event))
        if self._mask is None:
            return frame
        # wsproto draws a masking key of its own; all randomness here comes from the caller.
        key = self._mask()
        return frame[:2] + key + mask(mask(frame[6:], frame[2:6]), key)

    def _wsproto(self) -> Connection:
        if self._authority is None:
            self._authority = Connection(ConnectionType.SERVER if self.role is Role.SERVER else ConnectionType.CLIENT)
        return self._authority


def _own_close(event: Close) -> ws.CloseConnection:
    """Checked here, as wsproto would quietly send 1000 for a code that may not be sent."""
    if event.code is None:
        if event.reason:
            raise LocalProtocolError("Close: a reason needs a code")
        return ws.CloseConnection(code=CloseReason.NO_STATUS_RCVD, reason=None)
    if not 3000 <= event.code <= 4999 and event.code not in _PROTOCOL_CODES:
        raise LocalProtocolError(f"Close: code {event.code} may not be sent (RFC 6455 section 7.4)")
    # A lone surrogate, as in the text of an exception about file names, has no UTF-8.
    return ws.CloseConnection(code=event.code, reason=event.reason.encode("utf-8", "replace").decode())


_PROTOCOL_CODES = frozenset(CloseReason) - frozenset(LOCAL_ONLY_CLOSE_REASONS)
