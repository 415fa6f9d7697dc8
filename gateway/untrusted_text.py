"""Text that came from somewhere else, for one line of a log or a terminal."""

from __future__ import annotations

import re

# as `repr` writes bytes; a text that was cut has perhaps no end of them, and half an escape
_BYTES = re.compile(r"""\bb(?:'(?:[^'\\]|\\.)*(?:'|\\?\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z))""")


def escape(text: str) -> str:
    """The text with each character that is not printable (control, line separator, direction mark) as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def unquoted(text: str) -> str:
    """The text of an error without the bytes that it quotes: `...` stands for them. They are what its peer has sent, and a
    log keeps nothing of queries, fields and bodies."""
    return _BYTES.sub("...", text)
