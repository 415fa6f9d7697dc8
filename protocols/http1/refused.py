"""Reads, out of a request head that is refused, the fields that its answer depends on."""

from __future__ import annotations

import re
from typing import final

from protocols.events import Buffer

_LINE = re.compile(
    rb"\r\n(origin|access-control-request-(?:method|headers)|x-(?:client-)?request-id):[ \t]*([\t -~\x80-\xff]*)(?=\r\n)",
    re.IGNORECASE,
)
_LONGEST = 8 * 1024  # bytes of a line that is kept until it is complete; a longer one is not one of these fields
_MOST = 16  # fields that are kept


@final
class RefusedHead:
    """Reads the fields of CORS (Fetch section 3.3) and the client's id of a head that is malformed or too large.

    Browsers write `Origin` behind the fields of the page, so it may stand beyond the limit for which the head is refused.
    Only the last line is kept between two calls: no more memory is needed however long the head is."""

    __slots__ = ("_tail", "headers", "over", "size")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        """The fields so far, with lower-case names."""
        self.over = False
        """True once the empty line behind the head has come."""
        self.size = 0
        """Bytes that were fed."""
        self._tail = b""

    def feed(self, data: Buffer) -> None:
        """Takes the next bytes of the head. Bytes behind its empty line are ignored."""
        if self.over:
            return
        self.size += len(data)
        text = self._tail + bytes(data)
        end = text.find(b"\r\n\r\n")
        if end >= 0:
            text, self.over = text[: end + 2], True
        for name, value in _LINE.findall(text):
            if len(self.headers) < _MOST:
                self.headers.append((name.lower(), value.rstrip(b" \t")))
        last = text.rfind(b"\r\n")
        self._tail = text[-3:] if last < 0 or len(text) - last > _LONGEST else text[last:]
