"""JSON Schemas in requests: their size, and the keywords that no model here could hold an answer to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, final
from urllib.parse import unquote

LARGEST: Final = 256 * 1024
"""The most characters of a schema, about, as it is written in JSON."""
TYPES: Final = frozenset(("null", "boolean", "object", "array", "number", "integer", "string"))
REFUSED: Final = (
    "not", "if", "then", "else", "uniqueItems", "dependentRequired", "propertyNames", "contains",
)  # fmt: skip
"""Keywords that cannot be held while a text is generated."""

_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by any name
_ONE: Final = ("items", "additionalProperties", "additionalItems", "unevaluatedItems", "unevaluatedProperties")
_SEVERAL: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_$-]{1,60}").fullmatch


@final
class SchemaError(Exception):
    """A schema cannot be held. `below` is the path to the fault in it, such as `.properties.a.not`."""

    def __init__(self, below: str, message: str) -> None:
        super().__init__(message)
        self.below, self.message = below, message


def is_larger(value: object, most: int = LARGEST) -> bool:
    """True if a value read from JSON takes more than about `most` characters of JSON. It looks at no more than that."""
    size, left = 0, [value]
    while left:
        item = left.pop()
        size += 4
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, dict):
            size += sum(map(len, item)) + 4 * len(item)
            if size <= most:
                left += item.values()
        elif isinstance(item, list):
            size += 4 * len(item)
            if size <= most:
                left += item
        if size > most:
            return True
    return False


def check_schema(schema: dict[str, Any] | bool) -> None:
    """Raises SchemaError for a keyword of `REFUSED` that asks for something, a type that JSON does not have, and a reference
    that leads out of the schema, or nowhere. The schema must not be larger than `LARGEST`: the check looks at all of it."""
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        path, item = left.pop()
        if isinstance(item, bool):
            continue
        if not isinstance(item, dict):
            raise SchemaError(path, "expected a schema, which is an object, true or false")
        for keyword in REFUSED:
            if item.get(keyword) not in (None, False) or (keyword == "not" and keyword in item):
                raise SchemaError(f"{path}.{keyword}", "not offered, no answer can be held to it")
        _check_type(path, item.get("type"))
        if (reference := item.get("$ref")) is not None:
            _check_reference(path, reference, schema)
        left += _below(path, item)


def _below(path: str, item: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _ONE:
        if (one := item.get(keyword)) is not None and not isinstance(one, list):
            yield f"{path}.{keyword}", one
    for keyword in _SEVERAL:
        if isinstance(several := item.get(keyword), list):
            for at, one in enumerate(several):
                yield f"{path}.{keyword}[{at}]", one
        elif several is not None and keyword not in _ONE:
            raise SchemaError(f"{path}.{keyword}", "expected an array of schemas")
    for keyword in _NAMED:
        named = item.get(keyword)
        if isinstance(named, dict):
            for name, one in named.items():
                yield f"{path}.{keyword}{_step(name)}", one
        elif named is not None:
            raise SchemaError(f"{path}.{keyword}", "expected an object of schemas")


def _step(name: str) -> str:
    return f".{name}" if _PLAIN(name) else f"[{name[:60]!r}]"


def _check_type(path: str, types: object) -> None:
    if types is None:
        return
    for one in types if isinstance(types, list) else [types]:
        if not isinstance(one, str) or one not in TYPES:
            raise SchemaError(f"{path}.type", f"expected one of {', '.join(sorted(TYPES))}, or an array of them")


def _check_reference(path: str, reference: object, root: Any) -> None:
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise SchemaError(f"{path}.$ref", "expected a reference within the schema, which begins with #")
    if reference != "#" and not reference.startswith("#/"):
        return  # an anchor
    found = root
    for part in unquote(reference)[2:].split("/") if reference != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and len(name) < 10 and int(name) < len(found):
            found = found[int(name)]
        else:
            raise SchemaError(f"{path}.$ref", f"nothing is at {reference[:60]!r}")
    if not isinstance(found, dict | bool):
        raise SchemaError(f"{path}.$ref", f"no schema is at {reference[:60]!r}")
