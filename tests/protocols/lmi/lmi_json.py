"""JSON as LMI's answers are written: Python's, but for the line ends of Unicode."""

from __future__ import annotations

import json
from typing import Any


def dumped(value: Any, **options: Any) -> str:
    """Returns the text of json.dumps without ASCII escapes, except those for U+0085, U+2028 and U+2029."""
    text = json.dumps(value, ensure_ascii=False, **options)
    for code in (0x85, 0x2028, 0x2029):
        text = text.replace(chr(code), f"\\u{code:04x}")
    return text
