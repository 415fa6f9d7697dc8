"""JSON lines: one JSON text on each line, ended by LF, in both directions."""

from __future__ import annotations

from typing import final

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA, Buffer, Signal

MAX_LINE = 32 * 1024 * 1024
"""The decoder's default bound: twice the text of one generation (16 MiB), because the last line repeats the text."""
# JSON itself escapes all characters below U+0020.
_LINE_ENDS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))


def unbroken(json: bytes) -> bytes:
    """Escapes the line ends of Unicode inside the strings of a JSON text in UTF-8. Clients that split a stream with Python's
    `str.splitlines` (httpx, and through it huggingface_hub) would split such a line in two."""
    if json.isascii():
        return json
    for line_end, escape in _LINE_ENDS:
        if line_end in json:
            json = json.replace(line_end, escape)
    return json


def encode_line(data: bytes) -> bytes:
    """The line of one serialized JSON text. LocalProtocolError if it contains a line break, as pretty-printed JSON does."""
    if b"\n" in data or not data:
        raise LocalProtocolError("a JSON line holds one JSON text without line breaks: serialize it without indentation")
    return data + b"\n"


@final
class LineDecoder:
    """Decodes a JSON lines body, whatever pieces it arrives in.

    `next_event` returns each line without its line end and without white space around it, and skips blank lines. Text behind
    the last LF comes after `receive_eof`. A line above `max_line` bytes raises RemoteProtocolError, and so does each later
    call.
    """

    __slots__ = ("_at", "_buffer", "_eof", "_max", "_scanned")

    def __init__(self, *, max_line: int = MAX_LINE) -> None:
        self._max = max_line
        self._buffer = bytearray()
        self._at = 0  # start of the next line
        self._scanned = 0  # before here there is no LF
        self._eof = False

    def receive_data(self, data: Buffer) -> None:
        """Stores bytes. To bound the memory, call `next_event` until NEED_DATA before storing more."""
        self._buffer += data

    def receive_eof(self) -> None:
        """Tells that the body is complete: bytes without a line end are the last line."""
        self._eof = True

    def next_event(self) -> bytes | Signal:
        """The next line that is not blank, or NEED_DATA. After `receive_eof`, NEED_DATA means that no line is left."""
        while (stop := self._line_end()) is not None:
            if stop - self._at > self._max:
                raise RemoteProtocolError(f"a JSON line is at most {self._max} bytes (max_line), got {stop - self._at}")
            line = bytes(self._buffer[self._at : stop]).strip(b" \t\r")
            self._at = min(stop + 1, len(self._buffer))
            if line:
                return line
        return NEED_DATA

    def _line_end(self) -> int | None:
        """The end of the next line: its LF, the end of the body, or the end of the buffer if the line is already too
        long."""
        buffer = self._buffer
        stop = buffer.find(b"\n", max(self._at, self._scanned))
        if stop >= 0:
            return stop
        del buffer[: self._at]
        self._at, self._scanned = 0, len(buffer)
        return len(buffer) if len(buffer) > self._max or (self._eof and buffer) else None
