"""The message that a WebSocket receives frame by frame: the order of its frames, its limits, and the check for UTF-8."""

from __future__ import annotations

from codecs import IncrementalDecoder, getincrementaldecoder
from typing import final

from wsproto.frame_protocol import CloseReason

from protocols.events import Opcode
from protocols.websocket.control import Violation
from protocols.websocket.frames import LARGE
from protocols.websocket.library import WsprotoPath
from protocols.websocket.limits import WebSocketLimits


@final
class IncomingMessage:
    """The sums over the fragments received so far. No fragment is held, except for a character that is split in two."""

    __slots__ = ("_decoder", "_fragments", "_library", "_limits", "_nbytes")

    def __init__(self, limits: WebSocketLimits, library: WsprotoPath | None) -> None:
        self._limits = limits
        self._library = library
        self._fragments = 0
        self._nbytes = 0
        self._decoder: IncrementalDecoder | None = None

    def check(self, opcode: Opcode, fin: bool, length: int, *, due: bool) -> None:
        """Checks a frame, of which the header must be here. `due` is True if a continuation must come next. Raises
        Violation. The same frame may be checked repeatedly until it is whole."""
        limits = self._limits
        in_turn = (opcode is Opcode.CONTINUATION) is due if self._library is None else self._library.in_turn(opcode, fin)
        if not in_turn:
            expected = "a continuation" if due else "a new message"
            raise Violation(CloseReason.PROTOCOL_ERROR, f"expected {expected}, got a frame with opcode {opcode:d}")
        if length > limits.part:
            reason = f"a frame of {length} bytes exceeds the limit part, {limits.part}"
        elif limits.message is not None and self._nbytes + length > limits.message:
            reason = f"the message exceeds the limit message, {limits.message} bytes"
        elif limits.fragments is not None and self._fragments >= limits.fragments:
            reason = f"the message exceeds the limit fragments, {limits.fragments}"
        else:
            return
        raise Violation(CloseReason.MESSAGE_TOO_BIG, reason)

    def add(self, opcode: Opcode, fin: bool, payload: bytes | bytearray | memoryview) -> None:
        """Counts a frame that is whole. Raises Violation if UTF-8 is checked and the text is not."""
        if not self._is_text(opcode, fin, payload):
            raise Violation(CloseReason.INVALID_FRAME_PAYLOAD_DATA, "a text message is not UTF-8")
        if fin:
            self._fragments = self._nbytes = 0
        else:
            self._fragments += 1
            self._nbytes += len(payload)

    def _is_text(self, opcode: Opcode, fin: bool, payload: bytes | bytearray | memoryview) -> bool:
        """False if UTF-8 is checked and the text is not."""
        check = self._limits.check_utf8
        if self._library is not None:
            return self._library.complete(fin, bytes(payload) if check else b"")
        if check and opcode is Opcode.TEXT:
            self._decoder = getincrementaldecoder("utf-8")()
        if self._decoder is None:
            return True
        try:
            for at in range(0, len(payload), LARGE):  # in pieces, because the decoded text of each is thrown away
                self._decoder.decode(payload[at : at + LARGE])
            if fin:
                self._decoder.decode(b"", True)
        except UnicodeDecodeError:
            return False
        if fin:
            self._decoder = None
        return True
