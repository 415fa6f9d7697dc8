"""The wsproto library as our WebSocket machine uses it without its payload path: for every frame."""

from __future__ import annotations

from typing import final

from wsproto import frame_protocol

from protocols.events import Close, Opcode, Ping, Pong
from protocols.roles import Role
from protocols.websocket.control import ControlFrame, Violation, close_event
from protocols.websocket.frames import Landing, NextBytes

# two bytes, eight bytes of length, a masking key
_LONGEST_HEADER = 14


@final
class WsprotoPath:
    """One WebSocket by wsproto's frame objects alone: the reference for the machine's own path.

    wsproto's connection and its messages are not exact: they move bytes between text fragments if a character is split, and
    always refuse text that is not UTF-8. Its FrameDecoder returns frames as they are. Its MessageDecoder then decides
    whether a frame is in order and whether text is UTF-8; it gets the payload only for that, and its output is dropped. Text
    is sent as binary with the opcode changed afterwards: wsproto takes text as str, which cannot hold half a character.
    Control frames are FrameProtocol's, in both directions.
    """

    __slots__ = ("_begun", "_client", "_frames", "_messages")

    def __init__(self, role: Role) -> None:
        self._client = role is Role.CLIENT
        self._frames = frame_protocol.FrameProtocol(self._client, [])
        self._messages = frame_protocol.MessageDecoder()
        self._begun = False

    # Data frames received

    def read_header(self, buffer: bytes | bytearray, at: int) -> tuple[int, int] | NextBytes:
        """Reads as `frames.read_header`, except that NextBytes.OTHER means a control frame that is whole. Raises
        Violation."""
        decoder = self._decoder(buffer, at, at + _LONGEST_HEADER)
        have = len(decoder.buffer)
        try:
            decoder.parse_header()
        except frame_protocol.ParseFailed as error:
            raise Violation(error.code, str(error)) from None
        if decoder.header is None:
            return NextBytes.MORE
        length, start = decoder.header.payload_len, at + have - len(decoder.buffer)
        if not decoder.header.opcode.iscontrol():
            return length, start
        return NextBytes.OTHER if start + length <= len(buffer) else NextBytes.MORE

    def in_turn(self, opcode: Opcode, fin: bool) -> bool:
        """True if the frame with this header may come now. The same frame may be checked again until it is `complete`."""
        if not self._begun:
            try:
                self._message(opcode, b"", False, fin)
            except frame_protocol.ParseFailed:
                return False
            self._begun = True
        return True

    def payload(self, buffer: bytes | bytearray, at: int, end: int) -> bytes:
        """The payload of the whole data frame buffer[at:end]."""
        frame = self._decoder(buffer, at, end).process_buffer()
        assert frame is not None
        assert isinstance(frame.payload, bytes)
        return frame.payload

    def landing(self, opcode: Opcode, fin: bool, header: bytes | bytearray, memory: bytearray | memoryview) -> Landing:
        """The object that receives the payload of a large frame."""
        decoder = self._decoder(header, 0, len(header))
        decoder.parse_header()
        return LibraryLanding(opcode, fin, decoder, memory)

    def complete(self, fin: bool, text: bytes) -> bool:
        """Ends a frame that was `in_turn` and is whole. False if its message is text that is not UTF-8. `text` is its
        payload, or empty if UTF-8 is not checked."""
        self._begun = False
        try:
            self._message(Opcode.CONTINUATION, text, True, fin)
        except frame_protocol.ParseFailed:
            return False
        return True

    def _decoder(self, buffer: bytes | bytearray, at: int, end: int) -> frame_protocol.FrameDecoder:
        decoder = frame_protocol.FrameDecoder(self._client)
        decoder.receive_bytes(bytes(buffer[at:end]))
        return decoder

    def _message(self, opcode: Opcode, payload: bytes, whole: bool, fin: bool) -> None:
        self._messages.process_frame(frame_protocol.Frame(frame_protocol.Opcode(opcode), payload, whole, fin))

    # Everything else

    def read(self, data: bytes) -> ControlFrame | None:
        """Reads a control frame as `Control.read`, but only a whole one."""
        self._frames.receive_bytes(data)
        try:
            frame = next(self._frames.received_frames())
        except frame_protocol.ParseFailed as error:
            raise Violation(error.code, str(error)) from None
        match frame.opcode, frame.payload:
            case frame_protocol.Opcode.PING, bytes(payload):
                return Ping(data=payload)
            case frame_protocol.Opcode.PONG, bytes(payload):
                return Pong(data=payload)
            case _, (int(code), str(reason)):
                return close_event(code, reason)
        raise AssertionError(f"a control frame, not {frame.opcode!r}")

    def write(self, event: ControlFrame) -> bytes:
        """The bytes of a control frame. In a client's, wsproto chose the masking key."""
        match event:
            case Ping(data=data):
                return bytes(self._frames.ping(bytes(data)))
            case Pong(data=data):
                return bytes(self._frames.pong(bytes(data)))
            case Close(code=code, reason=reason):
                return bytes(self._frames.close(code, reason or None))

    def write_frame(self, opcode: Opcode, fin: bool, payload: bytes) -> bytes:
        """The bytes of a data frame. In a client's, wsproto chose the masking key."""
        frame = self._frames.send_data(payload, fin)
        if opcode is Opcode.TEXT:
            frame[0] += Opcode.TEXT - Opcode.BINARY
        return bytes(frame)


@final
class LibraryLanding(Landing):
    """A large frame that wsproto unmasks piece by piece as it arrives."""

    __slots__ = ("_decoder",)

    def __init__(
        self, opcode: Opcode, fin: bool, decoder: frame_protocol.FrameDecoder, buffer: bytearray | memoryview
    ) -> None:
        super().__init__(opcode, fin, None, buffer)
        self._decoder = decoder

    def advance(self, n: int) -> None:
        piece = self.rest[:n]
        self._decoder.receive_bytes(bytes(piece))
        while len(piece) and (frame := self._decoder.process_buffer()) is not None:
            assert isinstance(frame.payload, bytes)
            piece[: len(frame.payload)] = frame.payload
            piece = piece[len(frame.payload) :]
        super().advance(n)
