"""Text that came from somewhere else, for one line of a log or a terminal."""

from __future__ import annotations


def escape(text: str) -> str:
    """The text with each character that is not printable (control, line separator, direction mark) as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
