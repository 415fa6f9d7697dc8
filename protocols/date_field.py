"""The Date field of answers (RFC 9110 section 6.6.1), and what else all of them say, in the form that heads take it."""

from __future__ import annotations

from typing import final

from protocols.events import Headers

_END = b"\r\n\r\n"


@final
class DateField:
    """The date that answers are given, shared by the connections of one server.

    A machine has no clock: whoever drives it calls `tell`, and once a second is often enough. Until then, and after
    `tell(b"")`, answers have no Date, as is right for a server without a clock.
    """

    __slots__ = ("beside", "beside_line", "end", "fields", "line", "value")

    def __init__(self, value: bytes = b"", *, beside: Headers = ()) -> None:
        """`value` as for `tell`. `beside` are more fields that every final head has, and no head has itself."""
        self.beside = beside
        """Those."""
        self.beside_line = b"".join(b"%b: %b\r\n" % field for field in beside)
        """The same, as lines of an HTTP/1.1 head."""
        self.tell(value)

    def tell(self, value: bytes) -> None:
        """Final heads that are sent from now on say `value`, an HTTP-date (RFC 9110 section 5.6.7) such as
        b"Sun, 06 Nov 1994 08:49:37 GMT", unless their own fields have a date. Empty: they say none."""
        self.value = value
        self.fields = (*self.beside, (b"date", value)) if value else self.beside
        """These, and what is beside them: the same object until the next call."""
        self.line = (b"date: %b\r\n" % value if value else b"") + self.beside_line
        """The fields as lines of an HTTP/1.1 head."""
        self.end = b"\r\n%b\r\n" % self.line if self.line else _END
        """The end of an HTTP/1.1 head, from the end of its last line on."""
