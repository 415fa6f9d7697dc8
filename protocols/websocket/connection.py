"""The WebSocket machine: data frames byte for byte, everything else by wsproto (RFC 6455).

Two quick ways end here, behind the same calls. Data frames that are here whole, and about which no limit and no check of
UTF-8 asks anything, come straight from the inbox: 2.2 us for one of 1 KiB, where the general way takes 3.1 and wsproto's
frames 17.5. A server's one buffer is queued as it is: 1.0 us, against 2.8 for a payload in pieces and 4.2 by wsproto.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, assert_never, final

from wsproto.frame_protocol import CloseReason

from protocols.buffers import ahead
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
    Signal,
)
from protocols.roles import Role
from protocols.websocket.control import Control, ControlFrame, Violation, checked_close, control_frames, rekeyed
from protocols.websocket.floods import TINY, FrameCounters
from protocols.websocket.frames import (
    CONTINUING,
    FIN,
    LARGE,
    MASKED,
    OPENING,
    Landing,
    NextBytes,
    Run,
    flat,
    mask,
    read_clear,
    read_header,
    read_masked,
    unmask,
    write_header,
)
from protocols.websocket.library import WsprotoPath
from protocols.websocket.limits import DEFAULT_LIMITS, WebSocketLimits
from protocols.websocket.message import IncomingMessage
from protocols.websocket.output import BY_REFERENCE, FrameQueue

__all__ = ["LARGE", "Received", "WebSocketConnection", "WebSocketLimits"]

_CONTINUATION = Opcode.CONTINUATION
_OPCODES = (Opcode.CONTINUATION, Opcode.TEXT, Opcode.BINARY)
_END = ConnectionEnd()


def _has_room(n: int) -> bool:
    return True


Received: TypeAlias = FrameEvent | ConnectionEnd | Signal


@final
class WebSocketConnection(FrameQueue):
    """One end of an open WebSocket, after the handshake and without extensions.

    Feed it with `receive_data` (or `get_buffer` and `buffer_updated`) and `receive_eof`, pull with `next_event`; give
    out what `data_to_send` holds and say `data_sent`. Frames are neither merged nor split nor looked into: each data
    frame on the wire is one Frame, and control frames between the fragments of a message come in their place.

    Each Ping is answered, in order, and Close is echoed by the machine; both are reported too. When the peer breaks the
    protocol, `next_event` raises RemoteProtocolError with the close code as `wire_code`, then and at each later call; the
    Close that says so is in the output, unless ours was there before.

    `mask` gives four unpredictable bytes for each frame that a client sends (RFC 6455 section 5.3); the client role
    demands it. `allocate` is asked once for the memory of each frame of LARGE bytes or more, after the limits, and should
    take no more than the address space: where it gives None, no such frame can be had, and the connection ends with code
    1009. `pay` is asked for that memory in steps, as bytes arrive that need it; where it says False, with code 1013.

    `payload_path=False` sends data frames, too, through wsproto (`WsprotoPath`): the same events, errors and bytes for many
    times the cost; payloads are then queued by copy. So it is also where wsproto is not as the payload path needs it, of
    which a warning tells.
    """

    __slots__ = (
        "_allocate", "_at", "_control", "_credited", "_eof", "_error", "_inbox", "_landing", "_legal", "_library", "_mask",
        "_masked", "_message", "_most", "_pay", "_pongs_due", "_read", "_ready", "_sending_message", "_sends_plain",
        "_straight", "close_code", "close_received", "counters", "limits", "received", "role",
    )  # fmt: skip

    def __init__(
        self,
        role: Role,
        limits: WebSocketLimits = DEFAULT_LIMITS,
        *,
        mask: Callable[[], bytes] | None = None,
        allocate: Callable[[int], bytearray | memoryview | None] = bytearray,
        pay: Callable[[int], bool] = _has_room,
        payload_path: bool = True,
    ) -> None:
        if role is Role.CLIENT and mask is None:
            raise LocalProtocolError("mask: the client role needs a source of masking keys")
        super().__init__()
        self.role = role
        self.limits = limits
        self.close_code: int | None = None
        """The connection's close code as RFC 6455 section 7.1.5 has it: the one received, 1005 for a Close without one,
        1006 when the end came without a Close or by a violation; None before all this."""
        self.close_received = False
        self.received = 0
        """Payload bytes given out in Frames."""
        self._credited = 0
        self.counters = FrameCounters()
        self._pongs_due = 0

        self._masked = role is Role.SERVER
        self._mask = mask if role is Role.CLIENT else None
        self._allocate, self._pay = allocate, pay
        library: WsprotoPath | None = None
        control: Control | WsprotoPath | None = control_frames().get(role) if payload_path else None
        if control is None:
            control = library = WsprotoPath(role)
        self._library, self._control = library, control
        self._error: RemoteProtocolError | None = None
        self._eof = False

        # bytes as long as one read holds whole frames, a bytearray once another had to be added.
        self._inbox: bytes | bytearray = b""
        self._at = 0
        self._ready: Run = []
        """Frames decoded ahead, as many as came together; their bytes are unread until they are given out."""
        self._read = read_masked if role is Role.SERVER else read_clear
        self._legal = OPENING
        plain = library is None and not limits.check_utf8 and limits.message is limits.fragments is None
        self._most = min(limits.part, LARGE - 1) if plain else -1
        self._straight = plain
        """Data frames of at most `_most` bytes need no look at anything but the inbox."""
        self._landing: Landing | None = None
        self._message = IncomingMessage(limits, library)

        self._sending_message = False
        self._sends_plain = library is None and self._mask is None

    # Receiving

    def receive_data(self, data: Buffer) -> None:
        """Stores what was read. Bytes after the peer's Close or violation are dropped: nobody will look at them."""
        inbox = self._inbox
        if self._straight and not inbox:
            self._inbox = bytes(data)
            return
        if self._eof:
            raise LocalProtocolError("receive_data after receive_eof")
        if self.close_received or self._error is not None:
            return
        if not isinstance(inbox, bytearray):
            self._inbox = inbox = bytearray(inbox)
        if self._at:
            del inbox[: self._at]
            self._at = 0
        inbox += data

    def close(self) -> None:
        """The transport is gone: gives up what is held for it, in both directions, the memory of a frame under way
        included."""
        self.receive_eof()
        self._landing = None
        self._consume(len(self._inbox))
        self._ready.clear()
        self._outbox.clear()
        self._rest.clear()
        self._pay = _has_room  # who paid may know this machine, and is let go

    def receive_eof(self) -> None:
        """The peer closed its side of the transport. What came before is still to be pulled."""
        self._eof = True
        self._straight = False

    def get_buffer(self) -> memoryview | None:
        """Where the next bytes from the transport belong, when they are the rest of a large frame and of nothing else;
        then they need no `receive_data`. None at all other times."""
        landing = self._landing
        if landing is None or landing.filled == landing.paid or self.unread or self._eof:
            return None
        return landing.rest

    def buffer_updated(self, n: int) -> None:
        """The first n bytes of what `get_buffer` gave are filled. `next_event` is due, also where the frame is not whole."""
        if self._landing is None or (offered := self.get_buffer()) is None or not 0 <= n <= len(offered):
            raise LocalProtocolError(f"buffer_updated: {n} bytes that get_buffer did not offer")
        self._landing.advance(n)

    @property
    def unread(self) -> int:
        """Bytes received that wait for `next_event`. A large frame under way is not among them: its memory is
        paid for beside them, and it must be read to its end before it can be given out. Smaller frames are:
        a bound on `unread` below LARGE and a header would never let one of them complete."""
        return len(self._inbox) - self._at

    @property
    def under_way(self) -> int | None:
        """Bytes that are here of a frame that is not whole, the header of a large one apart; None where none has begun. Once
        `next_event` has said NEED_DATA."""
        if self._landing is None:
            return self.unread or None
        return self._landing.filled + self.unread

    def next_event(self) -> Received:
        """The next Frame, Ping, Pong or Close; NEED_DATA; or, when the transport has ended, ConnectionEnd again and
        again. After Close only these two come. Raises RemoteProtocolError, again and again, once the peer has
        broken the protocol or a limit."""
        if self._ready:
            return self._next_ready()
        if self._straight:
            if not self._inbox:
                return NEED_DATA
            found = self._read(self._inbox, self._at, self._legal, self._most)
            if type(found) is Frame:
                self._inbox, self._at = b"", 0
                if found.fin:
                    self._legal = OPENING
                else:
                    self._legal = CONTINUING
                    self._count_unended(found)
                self.received += len(found.data)
                return found
            if found:
                self._legal = OPENING if found[0][0].fin else CONTINUING
                self._ready = found
                return self._next_ready()
        return self._next_unusual()

    def _next_ready(self) -> Frame:
        frame, size = self._ready.pop()
        self._at = at = self._at + size
        if at == len(self._inbox):
            self._inbox, self._at = b"", 0
        if not frame.fin:
            self._count_unended(frame)
        self.received += len(frame.data)
        return frame

    def _count_unended(self, frame: Frame) -> None:
        """A frame is given out that does not end its message."""
        n = len(frame.data)
        if n < TINY:
            counters = self.counters
            counters.total += 1
            if not n:
                counters.hollow += 1
            # whatever came between, a frame that ends a message too, has brought payload or begun another message
            again = frame.opcode is _CONTINUATION and self.received == counters.row_ends_at
            counters.row = counters.row + 1 if again else 1
            counters.row_ends_at = self.received + n
            if counters.row > counters.longest_row:
                counters.longest_row = counters.row

    def flood_counters(self, frames: int) -> FrameCounters:
        """What a `FloodPolicy` is asked about. `frames`: data frames that came and went so far, which the driver knows."""
        self.counters.frames = frames
        self.counters.payload = self.received
        return self.counters

    def _next_unusual(self) -> Received:
        if self._error is not None:
            raise self._error.again()
        try:
            event = self._next_frame() if self._landing is None else self._land(self._landing)
        except Violation as violation:
            self._error = self._broken(violation)
        else:
            if event is NEED_DATA and self._eof:
                if self.close_code is None:
                    self.close_code = CloseReason.ABNORMAL_CLOSURE.value
                return _END
            return event
        raise self._error.again()

    def _next_frame(self) -> Received:
        inbox, at, library = self._inbox, self._at, self._library
        header = read_header(inbox, at, self._masked) if library is None else library.read_header(inbox, at)
        if header is NextBytes.MORE:
            return NEED_DATA
        if header is NextBytes.OTHER:
            return self._next_control()
        length, start = header
        first = inbox[at]
        opcode, fin = _OPCODES[first & 3], first >= FIN
        self._message.check(opcode, fin, length, due=self._legal is CONTINUING)
        if length >= LARGE:
            return self._start_landing(opcode, fin, length, start)
        end = start + length
        if end > len(inbox):
            return NEED_DATA
        if library is not None:
            payload = library.payload(inbox, at, end)
        elif self._masked:
            payload = unmask(inbox, start, end)
        else:
            payload = bytes(inbox[start:end])
        self._consume(end)
        return self._frame(opcode, fin, payload)

    def _start_landing(self, opcode: Opcode, fin: bool, length: int, start: int) -> Received:
        memory = self._allocate(length)
        if memory is None:
            raise Violation(CloseReason.MESSAGE_TOO_BIG, f"a frame of {length} bytes never fits (limits.total_bytes)")
        header = self._inbox[self._at : start]
        if self._library is not None:
            landing = self._library.landing(opcode, fin, header, memory)
        else:
            landing = Landing(opcode, fin, bytes(header[-4:]) if self._masked else None, memory)
        self._landing, self._straight = landing, False
        self._consume(start)
        return self._land(landing)

    def _land(self, landing: Landing) -> Received:
        n = min(self.unread, landing.missing)
        arrived = landing.filled + n
        if arrived >= landing.paid and arrived and (due := ahead(arrived, len(landing.buffer)) - landing.paid):
            if not self._pay(due):
                length = len(landing.buffer)
                raise Violation(CloseReason.TRY_AGAIN_LATER, f"no memory for a frame of {length} bytes (limits.total_bytes)")
            landing.paid += due
        if n:
            with memoryview(self._inbox) as inbox:
                landing.rest[:n] = inbox[self._at : self._at + n]
            self._consume(self._at + n)
            landing.advance(n)
        if landing.missing:
            return NEED_DATA
        self._landing, self._straight = None, self._most >= 0 and not self._eof
        return self._frame(landing.opcode, landing.fin, landing.buffer)

    def _frame(self, opcode: Opcode, fin: bool, payload: bytes | bytearray | memoryview) -> Frame:
        self._message.add(opcode, fin, payload)
        self._legal = OPENING if fin else CONTINUING
        frame = Frame(opcode=opcode, fin=fin, data=payload)
        if not fin:
            self._count_unended(frame)
        self.received += len(payload)
        return frame

    def _consume(self, end: int) -> None:
        if end == len(self._inbox):
            self._inbox, end = b"", 0
        self._at = end

    def _next_control(self) -> Received:
        """A control frame or, of a malformed header, more than wsproto needs to refuse it."""
        inbox, at = self._inbox, self._at
        end = at + 2 + (4 if inbox[at + 1] & MASKED else 0) + (inbox[at + 1] & 0x7F)
        event = self._control.read(bytes(inbox[at:end]))
        match event:
            case None:
                return NEED_DATA
            case Close(code=code):
                self.close_received, self._straight = True, False
                self.close_code = CloseReason.NO_STATUS_RCVD.value if code is None else code
                end = len(inbox)
                if not self.close_sent:
                    self._push_close(self._controlled(event))
            case Ping(data=data):
                self._count_control()
                if not self.close_sent:
                    self._push_pong(self._controlled(Pong(data=data)))
            case Pong():
                if self._pongs_due:
                    self._pongs_due -= 1
                else:
                    self._count_control()
        self._consume(end)
        return event

    def _broken(self, violation: Violation) -> RemoteProtocolError:
        if not self.close_sent:
            self._push_close(self._controlled(Close(code=violation.code, reason=violation.reason)))
        self.close_code = CloseReason.ABNORMAL_CLOSURE.value
        self._landing, self._straight = None, False
        self._consume(len(self._inbox))
        return RemoteProtocolError(f"WebSocket: {violation.reason}", wire_code=int(violation.code))

    def _count_control(self) -> None:
        self.counters.control += 1
        self.counters.total += 1

    def give_up(self, code: int, reason: str) -> None:
        """Ends the connection for what its peer does, though it is not against the protocol: a Close goes behind the frame
        that has begun to be written, the others that wait are dropped, and nothing more is read. From then on all is as
        after a RemoteProtocolError."""
        if self._error is None and not self.close_received:
            self.drop_waiting()
            self._ready.clear()
            self._error = self._broken(Violation(code, reason))

    @property
    def unconsumed(self) -> int:
        """Payload bytes given out in Frames and not yet credited."""
        return self.received - self._credited

    @property
    def choked(self) -> bool:
        """Whether more Pongs wait than `limits.pongs`: the peer makes us answer and does not read. Whoever reads the
        transport stops until this is False again."""
        return len(self._pongs) > self.limits.pongs

    def credit(self, n: int) -> None:
        """The consumer took n payload bytes. WebSocket has no window, so this only moves `unconsumed`: whoever reads
        the transport stops while that and `unread` are large."""
        if not 0 <= n <= self.received - self._credited:
            raise LocalProtocolError(f"credit: {n} bytes, of {self.unconsumed} given out")
        self._credited += n

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
                self._push(self._controlled(event))
                self._pongs_due += 1
            case Close():
                self._demand_open("Close")
                self._push_close(self._controlled(checked_close(event)))
            case _:
                assert_never(event)

    def send_frame(self, opcode: Opcode, fin: bool, buffers: Sequence[Buffer]) -> None:
        """Queues `buffers`, in order, as one data frame. Raises as `send` does.

        A server's payload of 4 KiB or more is queued by reference: its memory must not change until it is written. A
        client's is copied as it is masked.
        """
        if self.close_sent or self._eof:
            self._demand_open("Frame")
        if (opcode is _CONTINUATION) is not self._sending_message:
            due = "is due" if self._sending_message else "is not due"
            raise LocalProtocolError(f"a continuation {due}, cannot send a frame with opcode {opcode:d}")
        self._sending_message = not fin
        first = opcode | FIN if fin else opcode
        if len(buffers) == 1 and type(data := buffers[0]) is bytes and data and self._sends_plain:
            head = write_header(first, len(data), 0)
            self._outbox.append((head, data))
            self._queued += len(head) + len(data)
            if len(data) >= BY_REFERENCE:
                self._large = True
            return
        parts = [part for buffer in buffers if len(part := flat(buffer))]
        length = sum(map(len, parts))
        if self._library is not None:
            self._push(self._with_own_key(self._library.write_frame(opcode, fin, b"".join(parts))))
        elif self._mask is not None:
            key = self._mask()
            self._push(write_header(first, length, MASKED) + key, mask(b"".join(parts), key))
        elif length < BY_REFERENCE:
            self._push(write_header(first, length, 0), *map(bytes, parts))
        else:
            self._push(write_header(first, length, 0), *parts)

    def room(self) -> int:
        """Bytes that may still be queued: the limit send_buffer less what is queued or given out and not yet written,
        and never below 0. Nothing is refused for lack of room; to wait for it is the caller's part."""
        room = self.limits.send_buffer - self._queued
        return room if room > 0 else 0

    def _demand_open(self, what: str) -> None:
        if not self.is_open:
            why = "our Close is queued" if self.close_sent else "the transport has ended"
            raise LocalProtocolError(f"cannot send a {what}: {why}")

    def _controlled(self, event: ControlFrame) -> bytes:
        return self._with_own_key(self._control.write(event))

    def _with_own_key(self, frame: bytes) -> bytes:
        return frame if self._mask is None else rekeyed(frame, self._mask())
