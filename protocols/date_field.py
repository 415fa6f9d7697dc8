"""The Date field of answers (RFC 9110 section 6.6.1), and other fields that all answers have, as the heads need them."""

from __future__ import annotations

from typing import final

from protocols.events import Headers

_END = b"\r\n\r\n"


@final
class DateField:
    """The Date value of answers, shared by the connections of one server.

    A machine has no clock, so its driver calls `tell`, about once a second. Until the first call, and after
    `tell(b"")`, answers have no Date, as is right for a server without a clock.
    """

    __slots__ = ("beside", "beside_line", "end", "fields", "line", "value")

    def __init__(self, value: bytes = b"", *, beside: Headers = ()) -> None:
        """`value` is as for `tell`. `beside` are fields that every final head gets; no head may have them itself."""
        self.beside = beside
        """The fields that every final head gets besides Date."""
        self.beside_line = b"".join(b"%b: %b\r\n" % field for field in beside)
        """`beside` as lines of an HTTP/1.1 head."""
        self.tell(value)

    def tell(self, value: bytes) -> None:
        """Sets the Date of all final heads sent from now on. `value` is an HTTP-date (RFC 9110 section 5.6.7) such as
        b"Sun, 06 Nov 1994 08:49:37 GMT"; if it is empty, heads have no Date. A head that has its own date field keeps it."""
        self.value = value
        self.fields = (*self.beside, (b"date", value)) if value else self.beside
        """`beside` and the Date: the same object until the next call of `tell`."""
        self.line = (b"date: %b\r\n" % value if value else b"") + self.beside_line
        """The fields as lines of an HTTP/1.1 head."""
        self.end = b"\r\n%b\r\n" % self.line if self.line else _END
        """The end of an HTTP/1.1 head: the line end of its last line, the fields, and the empty line."""
