"""Values as text and back: sizes, durations, TOML, dotted keys, and what an error shows of a value."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeAlias

Key: TypeAlias = tuple[str, ...]

_SHOWN = 100
_SCALES = {
    "": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_DURATIONS = {"": Decimal(1), "ms": Decimal("0.001"), "s": Decimal(1), "min": Decimal(60), "h": Decimal(3600)}
SIZE_UNITS, DURATION_UNITS = tuple(_SCALES), tuple(_DURATIONS)
"""In lower case, though the case of their letters says nothing; the empty one is meant without."""
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes from "65536", "64 KiB" (1024) or "64 kB" (1000); ValueError for anything else, and for part of a byte."""
    scaled = _scaled(text, {unit: Decimal(scale) for unit, scale in _SCALES.items()})
    if scaled != int(scaled):
        raise ValueError("not a whole number of bytes")
    return int(scaled)


def parse_duration(text: str) -> float:
    """Seconds from "30", "30s", "500ms", "5min" or "1h"; ValueError for anything else."""
    return float(_scaled(text, _DURATIONS))


def _scaled(text: str, scales: Mapping[str, Decimal]) -> Decimal:
    match = _QUANTITY.fullmatch(text.strip())
    scale = scales.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ValueError("not a number with a unit")
    return Decimal(match[1]) * scale


def written_size(size: int) -> str:
    """A size as TOML, with the largest binary unit that divides it; without one where it has more digits than
    `parse_size` reads."""
    for name in ("GiB", "MiB", "KiB"):
        if 0 < size < 10**15 and size % _SCALES[name.lower()] == 0:
            return f'"{size // _SCALES[name.lower()]} {name}"'
    return toml(size)


def toml_value(text: str) -> Any:
    """What TOML would read; the text itself where TOML reads nothing, so that a word needs no quotes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text


def toml(value: Any) -> str:
    """A value as TOML, on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case dict():
            return "{" + ", ".join(f"{dotted((name,))} = {toml(item)}" for name, item in value.items()) + "}"
        case int() | float():
            return repr(value)
        case _:
            return str(value.isoformat())


def dotted(path: Key) -> str:
    """The key of a setting as a file or `--set` would write it: a name with other characters is quoted."""
    return ".".join(name if name == "*" or re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name) for name in path)


def _string(text: str) -> str:
    # A JSON string is a TOML basic string, but for U+007F, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def plain(source: str) -> str:
    """The name of a source in an error: as it is where it can be printed."""
    return show(source, quoted=False)


def show(value: Any, *, quoted: bool = True) -> str:
    """A value in an error: on one line, and of bounded length."""
    if isinstance(value, bool):
        return "true" if value else "false"
    shown = ascii(value) if quoted or not str(value).isprintable() else str(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
