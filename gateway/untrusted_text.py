"""Makes text from peers safe for one line of a log or a terminal."""

from __future__ import annotations

import re

# bytes as `repr` writes them; in a text that was cut they may have no end, or end within an escape
_BYTES = re.compile(r"""\bb(?:'(?:[^'\\]|\\.)*(?:'|\\?\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z))""")


def escape(text: str) -> str:
    """Returns the text with each unprintable character (control, line separator, direction mark) as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def unquoted(text: str) -> str:
    """Returns the text of an error with `...` for each bytes literal that it quotes. A peer has sent those bytes, and the
    log must not keep queries, fields or bodies."""
    return _BYTES.sub("...", text)
