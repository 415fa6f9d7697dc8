"""Java's properties format, read as `java.util.Properties.load` of Java 17 reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gateway.settings_text import show

_BLANK = " \t\f"
_PAIR = re.compile(r"(?s)((?:[^\\=: \t\f]|\\.)*)[ \t\f]*[=:]?[ \t\f]*(.*)")
_ESCAPE = re.compile(r"(?s)\\(u[0-9A-Fa-f]{4}|.)")
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(data: bytes | str) -> dict[str, str]:
    """The keys of a document with their values, the last one of each. Bytes are ISO-8859-1, as for `load(InputStream)`,
    where other characters are escaped; text is what `load(Reader)` is given. ValueError names the line of an escape that
    is none, which is all that can be wrong."""
    text = data.decode("latin-1") if isinstance(data, bytes) else data
    return dict(_pair(line, number) for number, line in _logical_lines(text))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are neither blank nor comments, each with those that continue it and the number of its first."""
    first, parts, continued = 0, list[str](), False
    # a terminator that is the last character of all ends no line that a backslash continues
    for number, natural in enumerate(re.split(r"\r\n|\r|\n", re.sub(r"(?<=\\)[\r\n]\Z", "", text)), 1):
        line = natural.lstrip(_BLANK)
        if not parts and (not line or line[0] in "#!"):
            continued = False
            continue
        first = first if parts else number
        continued = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        if piece := line[:-1] if continued else line:
            parts.append(piece)
        if not continued:
            yield first, "".join(parts)
            parts = []
    if continued:  # by nothing: the backslash counts for nothing, and even a line of it alone is one
        yield first, "".join(parts)


def _pair(line: str, number: int) -> tuple[str, str]:
    match = _PAIR.fullmatch(line)
    assert match is not None  # whatever the line is: nothing in the pattern must be there, and `.` is any character
    key, value = (_unescaped(part, number) for part in match.groups())
    return key, value


def _unescaped(text: str, number: int) -> str:
    if "\\" not in text:
        return text

    def plain(match: re.Match[str]) -> str:
        escape = match[1]
        if escape == "u":
            came = text[match.start() : match.start() + 6]
            raise ValueError(f"line {number}: \\u must be followed by four hexadecimal digits, not {show(came)}")
        return chr(int(escape[1:], 16)) if len(escape) > 1 else _ESCAPED.get(escape, escape)

    # characters beyond U+FFFF are escaped as the two halves that UTF-16 has of them
    halves = _ESCAPE.sub(plain, text)
    return halves.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
