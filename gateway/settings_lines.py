"""The line of a TOML file on which each key is set, which Python's reader of TOML does not tell."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from gateway.settings_text import Key

# A statement is read again with each line that it goes on for; one that is longer is not worth that.
_LONGEST = 200


def lines_of(text: str) -> dict[Key, int]:
    """The line, counted from 1, on which each key and each table of a document comes first. The document is TOML. Behind a
    value of more than 200 lines nothing is told."""
    found: dict[Key, int] = {}
    table: Key = ()
    statement: list[str] = []
    first = 1
    for number, line in enumerate(text.split("\n"), 1):
        if not statement:
            first = number
        statement.append(line)
        try:
            said = tomllib.loads("\n".join(statement) + "\n")
        except tomllib.TOMLDecodeError:  # it goes on in the next line
            if len(statement) > _LONGEST:
                break
            continue
        if statement[0].lstrip().startswith("["):
            *_, table = _keys(said, ())
            found.setdefault(table, first)
        else:
            for path in _keys(said, table):
                found.setdefault(path, first)
        statement = []
    return found


def _keys(value: dict[str, Any], prefix: Key) -> Iterator[Key]:
    for name, inner in value.items():
        path = (*prefix, name)
        yield path
        if isinstance(inner, dict):
            yield from _keys(inner, path)
