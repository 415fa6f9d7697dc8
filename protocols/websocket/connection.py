"""The WebSocket machine: data frames byte for byte, everything else through wsproto (RFC 6455).

It has two quick ways. Data frames that are whole, and that no limit and no check of UTF-8 concerns, come straight from the
input: 2.2 us for one of 1 KiB, 3.1 us in the general way, and 17.5 us with wsproto's frames. A server's single buffer is
queued as it is: 1.0 us, 2.8 us for a payload in pieces, and 4.2 us with wsproto.
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
from protocols.websocket.control import (
    Control,
    ControlFrame,
    Violation,
    checked_close,
    control_frames,
    read_control,
    rekeyed,
)
from protocols.websocket.floods import NOTHING_COUNTED, TINY, FrameCounters
from protocols.websocket.frames import (
    CONTINUING,
    FIN,
    LARGE,
    MASKED,
    OPENING,
    FrameMemory,
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
_SMALL = LARGE - 1
_NO_RUN: Run = []  # never changed
_UNBOUNDED = FrameMemory()


Received: TypeAlias = FrameEvent | ConnectionEnd | Signal


@final
class WebSocketConnection(FrameQueue):
    """One end of an open WebSocket, after the handshake and without extensions.

    Pass input to `receive_data` (or `get_buffer` and `buffer_updated`) and `receive_eof`, and take events from `next_event`.
    Write the buffers of `data_to_send` and confirm them with `data_sent`. Frames are not merged, split or inspected: each
    data frame on the wire is one Frame. Control frames between the fragments of a message come in their place.

    The machine answers each Ping, in order, and echoes Close; both are reported too. If the peer breaks the protocol,
    `next_event` raises RemoteProtocolError with the close code as `wire_code`, also at each later call. The Close with that
    code is in the output, unless our own Close was sent before.

    `mask` returns four unpredictable bytes for each frame that a client sends (RFC 6455 section 5.3); a client must have it.
    `memory` is asked once to allocate memory for each frame of LARGE bytes or more, after the limits. If it has none, the
    connection ends with code 1009. It is asked to pay for that memory in steps, as the bytes arrive. If it refuses, the
    connection ends with code 1013.

    With `payload_path=False`, data frames go through wsproto too (`WsprotoPath`): the same events, errors and bytes at many
    times the cost, and with payloads copied into the queue. This is also the way if wsproto does not behave as the payload
    path requires; a warning tells so.
    """

    __slots__ = (
        "_at", "_control", "_credited", "_eof", "_error", "_inbox", "_landing", "_legal", "_library", "_mask", "_masked",
        "_memory", "_message", "_most", "_pongs_due", "_read", "_ready", "_sending_message", "_sends_plain", "_straight",
        "close_code", "close_received", "counters", "limits", "received", "role",
    )  # fmt: skip

    def __init__(
        self,
        role: Role,
        limits: WebSocketLimits = DEFAULT_LIMITS,
        *,
        mask: Callable[[], bytes] | None = None,
        memory: FrameMemory = _UNBOUNDED,
        payload_path: bool = True,
    ) -> None:
        if role is Role.CLIENT and mask is None:
            raise LocalProtocolError("mask: the client role needs a source of masking keys")
        super().__init__()
        self.role = role
        self.limits = limits
        self.close_code: int | None = None
        """The close code by RFC 6455 section 7.1.5: the received one; 1005 for a Close without a code; 1006 if the
        connection ended without a Close or by a violation. None before."""
        self.close_received = False
        self.received = 0
        """Payload bytes given out in Frames."""
        self._credited = 0
        self.counters = NOTHING_COUNTED
        """Counts for a `FloodPolicy`: its own from the first frame on that counts."""
        self._pongs_due = 0

        self._masked = role is Role.SERVER
        self._mask = mask if role is Role.CLIENT else None
        self._memory = memory
        library: WsprotoPath | None = None
        control: Control | WsprotoPath | None = control_frames().get(role) if payload_path else None
        if control is None:
            control = library = WsprotoPath(role)
        self._library, self._control = library, control
        self._error: RemoteProtocolError | None = None
        self._eof = False

        # A bytes object while one read holds whole frames; a bytearray once more had to be appended.
        self._inbox: bytes | bytearray = b""
        self._at = 0
        self._ready: Run = _NO_RUN
        """Frames decoded ahead, because they came together. Their bytes are unread until they are given out."""
        self._read = read_masked if role is Role.SERVER else read_clear
        self._legal = OPENING
        plain = library is None and not limits.check_utf8 and limits.message is limits.fragments is None
        self._most = min(limits.part, _SMALL) if plain else -1
        self._straight = plain
        """True if data frames of at most `_most` bytes need no check beyond their bytes."""
        self._landing: Landing | None = None
        self._message: IncomingMessage | None = None  # made for the first frame that needs a check

        self._sending_message = False
        self._sends_plain = library is None and self._mask is None

    # Receiving

    def receive_data(self, data: Buffer) -> None:
        """Stores input. Bytes after the peer's Close or violation are dropped, because nothing will read them."""
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
        """Releases all that is held, in both directions and including the memory of an incomplete frame, because the
        transport is gone."""
        self.receive_eof()
        self._landing = None
        self._consume(len(self._inbox))
        self._ready, self._rest = _NO_RUN, ()
        self._outbox.clear()
        self._memory = _UNBOUNDED  # the other may refer to this machine: a cycle

    def receive_eof(self) -> None:
        """Tells that the peer closed its side of the transport. Earlier input must still be taken."""
        self._eof = True
        self._straight = False

    def get_buffer(self) -> memoryview | None:
        """The memory for the next bytes from the transport, if they can only be the rest of a large frame; they then need no
        `receive_data`. None at all other times."""
        landing = self._landing
        if landing is None or landing.filled == landing.paid or self.unread or self._eof:
            return None
        return landing.rest

    def buffer_updated(self, n: int) -> None:
        """Tells that the first n bytes of `get_buffer` are filled. Call `next_event` now, even if the frame is not whole."""
        if self._landing is None or (offered := self.get_buffer()) is None or not 0 <= n <= len(offered):
            raise LocalProtocolError(f"buffer_updated: {n} bytes that get_buffer did not offer")
        self._landing.advance(n)

    @property
    def unread(self) -> int:
        """Received bytes that wait for `next_event`. An incomplete large frame does not count: its memory is paid for
        separately, and it must be read to its end before it can be given out. Smaller incomplete frames count. A bound on
        `unread` must therefore not be below LARGE and a header, or some frames could never complete."""
        return len(self._inbox) - self._at

    @property
    def under_way(self) -> int | None:
        """The received bytes of an incomplete frame, without the header of a large one; None if no frame has begun. Valid
        once `next_event` has returned NEED_DATA."""
        if self._landing is None:
            return self.unread or None
        return self._landing.filled + self.unread

    def next_event(self) -> Received:
        """The next Frame, Ping, Pong or Close; NEED_DATA; or, after the end of the transport, ConnectionEnd at each call.
        After Close only the last two come. RemoteProtocolError, at each call, once the peer has broken the protocol or a
        limit."""
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
        """Counts a frame that does not end its message."""
        n = len(frame.data)
        if n < TINY:
            counters = self._own_counters()
            counters.total += 1
            if not n:
                counters.hollow += 1
            # Any frame in between, even one that ends a message, has brought payload or begun another message.
            again = frame.opcode is _CONTINUATION and self.received == counters.row_ends_at
            counters.row = counters.row + 1 if again else 1
            counters.row_ends_at = self.received + n
            if counters.row > counters.longest_row:
                counters.longest_row = counters.row

    def flood_counters(self, frames: int) -> FrameCounters:
        """The counters for a `FloodPolicy`. `frames` is the number of data frames in both directions, which the driver
        knows."""
        counters = self.counters
        if counters is not NOTHING_COUNTED:
            counters.frames, counters.payload = frames, self.received
        return counters

    def _own_counters(self) -> FrameCounters:
        if self.counters is NOTHING_COUNTED:
            self.counters = FrameCounters()
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
        message = self._message
        if message is None:
            message = self._message = IncomingMessage(self.limits, library)
        message.check(opcode, fin, length, due=self._legal is CONTINUING)
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
        memory = self._memory.allocate(length)
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
            if not self._memory.pay_landing(due):
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
        assert self._message is not None, "it has checked this frame"
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
        """Reads a control frame. If the header is malformed, it takes enough bytes for wsproto to refuse it."""
        inbox, at = self._inbox, self._at
        end = at + 2 + (4 if inbox[at + 1] & MASKED else 0) + (inbox[at + 1] & 0x7F)
        event = read_control(self._control, bytes(inbox[at:end]))
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
        counters = self._own_counters()
        counters.control += 1
        counters.total += 1

    def give_up(self, code: int, reason: str) -> None:
        """Ends the connection over behaviour that the protocol allows. A Close follows the frame that is partly written,
        other waiting frames are dropped, and nothing more is read. From then on the machine is as after a
        RemoteProtocolError."""
        if self._error is None and not self.close_received:
            self.drop_waiting()
            self._ready = _NO_RUN
            self._error = self._broken(Violation(code, reason))

    @property
    def unconsumed(self) -> int:
        """Payload bytes given out in Frames and not yet credited."""
        return self.received - self._credited

    @property
    def choked(self) -> bool:
        """True if more than `limits.pongs` Pongs wait: the peer makes us answer and does not read. The driver must stop
        reading from the transport until this is False again."""
        return len(self._pongs) > self.limits.pongs

    def credit(self, n: int) -> None:
        """Tells that the consumer took n payload bytes. WebSocket has no window, so this only changes `unconsumed`. The
        reader of the transport should stop while `unconsumed` and `unread` are large."""
        if not 0 <= n <= self.received - self._credited:
            raise LocalProtocolError(f"credit: {n} bytes, of {self.unconsumed} given out")
        self._credited += n

    # Sending

    @property
    def is_open(self) -> bool:
        """True if frames can be sent: no Close was queued or received, and the transport has not ended."""
        return not (self.close_sent or self.close_received or self._eof)

    @property
    def closed(self) -> bool:
        """True if a Close has gone each way; the server then closes the transport (section 7.1.1)."""
        return self.close_sent and self.close_received

    def send(self, event: Frame | Close | Ping) -> None:
        """Queues one frame. LocalProtocolError, and nothing queued, if the connection is closing, if the frame is a
        continuation and none is due or the reverse, if a Ping is longer than 125 bytes, or if a close code is not allowed.

        The data of a Frame must not change until it is written (`send_frame`). A Close is the last frame. A reason longer
        than 123 bytes of UTF-8 is cut at a character.
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
        """Queues `buffers`, in order, as one data frame. LocalProtocolError as from `send`.

        A server's payload of 4 KiB or more is queued by reference: its memory must not change until it is written. A
        client's is copied by masking.
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
        """Bytes that may still be queued: the limit send_buffer minus the bytes queued or handed out and not yet written, at
        least 0. The machine refuses nothing for lack of room; the caller must wait for it."""
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
