"""Server-Sent Events: an encoder for the server, a decoder for the client (WHATWG HTML section 9.2)."""

from __future__ import annotations

import re
from typing import final

import msgspec

from protocols.errors import RemoteProtocolError
from protocols.events import NEED_DATA, Buffer, Signal

MEDIA_TYPE = "text/event-stream"
CONTENT_TYPE = f"{MEDIA_TYPE}; charset=utf-8"
"""The content type of every answer of events. Events are UTF-8 in any case, but many HTTP clients read `text/*` without a
charset as Latin-1, and some of them then end a line at what was the second byte of a character."""
COMMENT = b":\n"
"""A comment, which clients skip. No blank line follows it: to some clients that is an event without data, which they cannot
read (openai-python, once an event had an id)."""

MAX_EVENT = 32 * 1024 * 1024
"""The decoder's default bound: twice the text of one generation (16 MiB), because the last event repeats the text."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


def encode_event(data: bytes) -> bytes:
    """One event: `data: `, the data, a blank line. Data of several lines becomes one `data:` line for each, which the client
    joins with LF again. Nothing needs escaping: any bytes may be sent, though clients read UTF-8."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(_LINE_END.split(data))
    return b"data: " + data + b"\n\n"


@final
class ServerSentEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event. `data` has its lines joined with LF. `event` is "message" if the server named no type. `id` is the last id
    of the stream: an event without an id inherits it."""

    data: bytes
    event: str = "message"
    id: str = ""


@final
class SSEDecoder:
    """Decodes a `text/event-stream` body, whatever pieces it arrives in.

    Lines end with CR, LF or CRLF. An event is returned at its blank line, without waiting for more. An event that the body
    leaves incomplete is dropped, as the standard requires. Comments, `retry`, unknown fields and a byte order mark at the
    start are skipped. A line, or the data of an event, above `max_event` bytes raises RemoteProtocolError, and so does each
    later call.
    """

    __slots__ = ("_after_cr", "_at", "_buffer", "_data", "_error", "_first", "_id", "_max", "_scanned", "_type")

    def __init__(self, *, max_event: int = MAX_EVENT) -> None:
        self._max = max_event
        self._buffer = bytearray()
        self._at = 0  # start of the next line
        self._scanned = 0  # before here there is no line end
        self._after_cr = False
        self._first = True
        self._data = bytearray()
        self._type = b""
        self._id = ""
        self._error: RemoteProtocolError | None = None

    def receive_data(self, data: Buffer) -> None:
        """Stores bytes. To bound the memory, call `next_event` until NEED_DATA before storing more."""
        self._buffer += data

    @property
    def begun(self) -> bool:
        """True if an event, or a line that is not a comment, has begun and not ended. If the body ends now, it was cut
        off."""
        line = bytes(self._buffer[self._at : self._at + len(_BOM) + 1])
        if self._first:
            line = b"" if _BOM.startswith(line) else line.removeprefix(_BOM)
        return bool(self._data or self._type) or (bool(line) and not line.startswith(b":"))

    def next_event(self) -> ServerSentEvent | Signal:
        """The next event, or NEED_DATA."""
        if self._error is not None:
            raise self._error.again()
        while (line := self._line()) is not None:
            if line:
                self._field(line)
            elif self._data:
                return self._dispatch()
            else:
                self._type = b""
        return NEED_DATA

    def _line(self) -> bytes | None:
        buffer = self._buffer
        if self._after_cr and self._at < len(buffer):
            self._after_cr = False
            self._at += buffer[self._at] == 0x0A  # the second half of a CRLF
        end = _LINE_END.search(buffer, max(self._at, self._scanned))
        if end is None:
            del buffer[: self._at]
            self._at, self._scanned = 0, len(buffer)
            self._check("line", len(buffer))
            return None
        start, stop = self._at, end.start()
        self._check("line", stop - start)
        self._at, self._after_cr = stop + 1, buffer[stop] == 0x0D
        line = bytes(buffer[start:stop])
        if self._first:
            self._first = False
            line = line.removeprefix(_BOM)
        return line

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._check("data", len(self._data) + len(value))
                self._data += value
                self._data += b"\n"
            case b"event":
                self._type = value
            case b"id" if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")

    def _dispatch(self) -> ServerSentEvent:
        event = self._type.decode("utf-8", "replace") or "message"
        data = bytes(self._data[:-1])
        self._data.clear()
        self._type = b""
        return ServerSentEvent(data=data, event=event, id=self._id)

    def _check(self, what: str, size: int) -> None:
        if size > self._max:
            self._error = RemoteProtocolError(
                f"the {what} of a server-sent event is at most {self._max} bytes (max_event), got {size}"
            )
            raise self._error.again()
