"""JSON lines: one JSON text a line, each ended by LF, in both directions."""

from __future__ import annotations

from typing import final

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA, Buffer, Signal

MAX_LINE = 32 * 1024 * 1024
"""The decoder's default bound: twice the text that one generation may have (16 MiB), which the last line repeats."""
# What is below U+0020 JSON escapes itself.
_LINE_ENDS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))


def unbroken(json: bytes) -> bytes:
    """JSON, which is in UTF-8, with escapes for the line ends of Unicode that its strings have: clients that read a stream
    by lines as Python's `str` has them (httpx, and huggingface_hub with it) would take one line for two."""
    if json.isascii():
        return json
    for line_end, escape in _LINE_ENDS:
        if line_end in json:
            json = json.replace(line_end, escape)
    return json


def encode_line(data: bytes) -> bytes:
    """The line of one serialized JSON text. LocalProtocolError if it holds a line break, as pretty-printed JSON does."""
    if b"\n" in data or not data:
        raise LocalProtocolError("a JSON line holds one JSON text without line breaks: serialize it without indentation")
    return data + b"\n"


@final
class LineDecoder:
    """The lines of a JSON lines body, whatever pieces it arrives in.

    `next_event` gives each without its line end and without white space around it; blank lines are skipped. What
    follows the last LF is given after `receive_eof`. A line above `max_line` bytes raises RemoteProtocolError, from
    then on at each call.
    """

    __slots__ = ("_at", "_buffer", "_eof", "_max", "_scanned")

    def __init__(self, *, max_line: int = MAX_LINE) -> None:
        self._max = max_line
        self._buffer = bytearray()
        self._at = 0  # where the next line starts
        self._scanned = 0  # up to where there is no LF
        self._eof = False

    def receive_data(self, data: Buffer) -> None:
        """Stores bytes. Call `next_event` until NEED_DATA before storing more: that is what bounds the memory."""
        self._buffer += data

    def receive_eof(self) -> None:
        """The body is complete: bytes without a line end are the last line."""
        self._eof = True

    def next_event(self) -> bytes | Signal:
        """The next line that is not blank, or NEED_DATA; after `receive_eof` NEED_DATA means that there is no more."""
        while (stop := self._line_end()) is not None:
            if stop - self._at > self._max:
                raise RemoteProtocolError(f"a JSON line is at most {self._max} bytes (max_line), got {stop - self._at}")
            line = bytes(self._buffer[self._at : stop]).strip(b" \t\r")
            self._at = min(stop + 1, len(self._buffer))
            if line:
                return line
        return NEED_DATA

    def _line_end(self) -> int | None:
        """Where the next line stops: at its LF, at the end of the body, or already because it is too long."""
        buffer = self._buffer
        stop = buffer.find(b"\n", max(self._at, self._scanned))
        if stop >= 0:
            return stop
        del buffer[: self._at]
        self._at, self._scanned = 0, len(buffer)
        return len(buffer) if len(buffer) > self._max or (self._eof and buffer) else None
