"""JSON Schema (draft 2020-12): reads a schema's keywords and references, and checks values against it, in bounded work.

Formats are not checked, and neither are the content of strings and keywords that the draft does not have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, TypeAlias, final
from urllib.parse import unquote

from models.library.scripted.patterns import Automaton, CannotMake, Work

Schema: TypeAlias = Mapping[str, Any] | bool
Evaluated: TypeAlias = tuple[frozenset[str], float]
"""The properties of an object, and the number of an array's first items, that a schema has looked at. They are what the
keywords `unevaluatedProperties` and `unevaluatedItems` ask for."""

TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
_NOTHING: Evaluated = frozenset(), 0
_ALL = math.inf


def kind_of(value: Any) -> str:
    """The JSON type of a value; `number` for integers too."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"


def same(one: Any, other: Any) -> bool:
    """True if two values are equal in JSON: 1 is 1.0, and neither is True."""
    kind = kind_of(one)
    if kind != kind_of(other):
        return False
    if kind == "array":
        return len(one) == len(other) and all(map(same, one, other))
    if kind == "object":
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return bool(one == other)


def is_integer(value: Any) -> bool:
    """True for the numbers without a fraction, such as 1.0."""
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def exact(number: float) -> Fraction:
    """The number as its decimal text says it: 0.1 is a tenth."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


def is_multiple(value: float, step: float) -> bool:
    """True if a value is a multiple of a step, both by their decimal texts and as computers divide."""
    if exact(value) % exact(step):
        return False
    if isinstance(value, int) and isinstance(step, int):
        return True
    try:
        return (value / step).is_integer()
    except OverflowError:
        return False


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _is_count(value: Any) -> bool:
    return _is_number(value) and is_integer(value) and value >= 0


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _is_list(value: Any, of: Callable[[Any], bool] = lambda item: True) -> bool:
    return isinstance(value, list | tuple) and all(map(of, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_table(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(map(of, value.values()))


_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (lambda v: v in TYPES if isinstance(v, str) else _is_list(v, lambda name: name in TYPES), "one or more types"),
    "enum": (_is_list, "a list"),
    "multipleOf": (lambda v: _is_number(v) and v > 0, "a number above 0"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_is_number, "a number")),
    **dict.fromkeys(
        (
            "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
        ),
        (_is_count, "a number of at least 0"),
    ),
    **dict.fromkeys(("pattern", "$ref", "$dynamicRef"), (_is_text, "a text")),
    "required": (lambda v: _is_list(v, _is_text), "a list of names"),
    "dependentRequired": (lambda v: _is_table(v, lambda names: _is_list(names, _is_text)), "lists of names"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), (lambda v: _is_list(v, _is_schema) and len(v) > 0, "a list of schemas")),
    "prefixItems": (lambda v: _is_list(v, _is_schema), "a list of schemas"),
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentSchemas"), (lambda v: _is_table(v, _is_schema), "schemas by name")
    ),
    "items": (lambda v: _is_schema(v) or _is_list(v, _is_schema), "a schema"),
    **dict.fromkeys(
        (
            "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems", "propertyNames",
            "contains", "not", "if", "then", "else",
        ),
        (_is_schema, "a schema"),
    ),
    "uniqueItems": (lambda v: isinstance(v, bool), "true or false"),
}  # fmt: skip
"""The keywords, each with the test of its value, and its form in words."""


def prefix_of(schema: Mapping[str, Any]) -> Sequence[Schema]:
    """The schemas of an array's first items. A list of `items`, as in earlier drafts, is one too."""
    items = schema.get("items")
    found: Sequence[Schema] = items if isinstance(items, list | tuple) else schema.get("prefixItems", ())
    return found


def rest_of(schema: Mapping[str, Any]) -> Schema | None:
    """The schema of the items behind the first ones; None if there is none."""
    items = schema.get("items")
    found: Schema | None = schema.get("additionalItems") if isinstance(items, list | tuple) else items
    return found


@final
class Schemas:
    """The schemas inside a document that is one, by their references; and the check of values.

    CannotMake for a keyword whose value has the wrong form, a reference that leads nowhere or out of the document, and more
    work than `work` allows. `failed` is the keyword at which the last check failed, or at which much work began.
    """

    def __init__(self, root: Schema, work: Work) -> None:
        self.root, self.work, self.failed = root, work, ""
        self._read: set[int] = set()
        self._inside: dict[int, frozenset[int]] = {}
        self._anchors: dict[str, Schema] | None = None
        self._automata: dict[str, Automaton] = {}
        self._running: set[tuple[int, int]] = set()
        self._known: dict[tuple[int, int], tuple[Any, Evaluated | None, str]] = {}
        """The results for arrays and objects, with each of them, so that its number stays its own."""

    def examine(self, schema: Mapping[str, Any]) -> None:
        """Checks the form of a schema's keywords, once."""
        if id(schema) in self._read:
            return
        self._read.add(id(schema))
        for keyword in schema.keys() & _FORMS.keys():
            fits, form = _FORMS[keyword]
            if not fits(schema[keyword]):
                raise CannotMake(f"{keyword}: expected {form}, got {str(schema[keyword])[:60]!r}")
        if "$id" in schema and schema is not self.root:
            raise CannotMake("$id: a schema inside another cannot have it")

    def automaton(self, pattern: str, keyword: str) -> Automaton:
        """The automaton of an expression."""
        if pattern not in self._automata:
            try:
                self._automata[pattern] = Automaton(pattern, within=True)
            except CannotMake as e:
                raise CannotMake(f"{keyword}: {e}") from None
        return self._automata[pattern]

    def resolve(self, keyword: str, reference: str) -> Schema:
        """The schema that a reference names: `#`, `#/` and a path, or `#` and an anchor."""
        pointer = unquote(reference[1:])
        found: Any = self.root
        if not reference.startswith("#"):
            raise CannotMake(f"{keyword}: expected a reference that begins with #, got {reference[:60]!r}")
        if pointer and not pointer.startswith("/"):
            found = self._anchor(pointer)
        for part in pointer.split("/")[1:]:
            self.work.spend()
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(part)
            elif isinstance(found, list | tuple):
                found = found[int(part)] if part.isdecimal() and len(part) < 9 and int(part) < len(found) else None
            else:
                found = None
        if not _is_schema(found):
            raise CannotMake(f"{keyword}: the schema has no {reference[:60]!r}")
        schema: Schema = found
        return schema

    def _anchor(self, name: str) -> Schema | None:
        if self._anchors is None:
            self._anchors = {}
            todo: list[Any] = [self.root]
            for inner in todo:
                self.work.spend()
                if isinstance(inner, Mapping):
                    for keyword in ("$anchor", "$dynamicAnchor"):
                        if isinstance(inner.get(keyword), str):
                            self._anchors.setdefault(inner[keyword], inner)
                    todo += inner.values()
                elif isinstance(inner, list | tuple):
                    todo += inner
        return self._anchors.get(name)

    def references(self, schema: Mapping[str, Any]) -> Iterator[Schema]:
        """Yields the schemas to which a schema refers."""
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                yield self.resolve(keyword, schema[keyword])

    def inside(self, schema: Mapping[str, Any]) -> frozenset[int]:
        """The ids of a schema and of those in it that are for the same value."""
        if (known := self._inside.get(id(schema))) is None:
            found, todo = {id(schema)}, [schema]
            for one in todo:
                self.work.spend()
                self.examine(one)
                nearby = [
                    *self.references(one),
                    *(inner for keyword in ("allOf", "anyOf", "oneOf") for inner in one.get(keyword, ())),
                    *(one[keyword] for keyword in ("if", "then", "else") if keyword in one),
                    *one.get("dependentSchemas", {}).values(),
                ]
                new = [inner for inner in nearby if isinstance(inner, Mapping) and id(inner) not in found]
                found.update(map(id, new))
                todo += new
            known = self._inside[id(schema)] = frozenset(found)
        return known

    def holds(self, value: Any, schema: Schema) -> bool:
        """True if a value is valid."""
        return self.check(value, schema) is not None

    def check(self, value: Any, schema: Schema) -> Evaluated | None:
        """Returns the parts of a valid value that the schema has looked at; None if the value is invalid."""
        self.work.spend()
        if isinstance(schema, bool):
            return _NOTHING if schema else self._no("false")
        key = id(schema), id(value)
        if key in self._known:
            _, found, self.failed = self._known[key]
            return found
        if key in self._running:
            raise CannotMake("$ref: a schema refers to itself for the same value")
        self.examine(schema)
        self._running.add(key)
        try:
            found = self._checked(value, schema)
        finally:
            self._running.discard(key)
        if isinstance(value, dict | list):
            self._known[key] = value, found, self.failed
        return found

    def _no(self, keyword: str) -> Evaluated | None:
        self.failed = keyword
        return None

    def _checked(self, value: Any, schema: Mapping[str, Any]) -> Evaluated | None:
        kind = kind_of(value)
        if (wrong := self._wrong_value(value, kind, schema)) is not None:
            return self._no(wrong)
        seen = self._in_place(value, kind, schema)
        if seen is None or kind not in ("array", "object"):
            return seen
        return self._array(value, schema, *seen) if kind == "array" else self._object(value, schema, *seen)

    def _wrong_value(self, value: Any, kind: str, schema: Mapping[str, Any]) -> str | None:
        """The keyword that a value fails by itself, whatever is inside it."""
        if "type" in schema:
            types = schema["type"] if isinstance(schema["type"], list | tuple) else (schema["type"],)
            if kind not in types and not (kind == "number" and "integer" in types and is_integer(value)):
                return "type"
        if "enum" in schema and not any(self._same(value, item) for item in schema["enum"]):
            return "enum"
        if "const" in schema and not self._same(value, schema["const"]):
            return "const"
        for keyword, fails in _LIMITS.get(kind, ()):
            if keyword in schema and fails(value, schema[keyword]):
                return keyword
        if kind == "string" and "pattern" in schema:
            return None if self.automaton(schema["pattern"], "pattern").matches(value, self.work) else "pattern"
        return None

    def _same(self, one: Any, other: Any) -> bool:
        self.work.spend()
        return same(one, other)

    def _in_place(self, value: Any, kind: str, schema: Mapping[str, Any]) -> Evaluated | None:
        """Applies the schemas that are for the value itself."""
        seen = [_NOTHING]

        def apply(inner: Schema) -> bool:
            if (found := self.check(value, inner)) is not None:
                seen.append(found)
            return found is not None

        if not all(map(apply, self.references(schema))):
            return None
        if not all(map(apply, schema.get("allOf", ()))):
            return None
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                count = sum([apply(inner) for inner in schema[keyword]])
                if not count or (keyword == "oneOf" and count > 1):
                    return self._no(keyword)
        if "not" in schema and self.holds(value, schema["not"]):
            return self._no("not")
        if "if" in schema:
            branch = "then" if apply(schema["if"]) else "else"
            if branch in schema and not apply(schema[branch]):
                return self._no(branch)
        if kind == "object":
            for name, inner in schema.get("dependentSchemas", {}).items():
                if name in value and not apply(inner):
                    return None
        return frozenset().union(*[names for names, _ in seen]), max(count for _, count in seen)

    def _array(
        self, value: Sequence[Any], schema: Mapping[str, Any], names: frozenset[str], seen: float
    ) -> Evaluated | None:
        prefix, rest = prefix_of(schema), rest_of(schema)
        if not all(map(self.holds, value, prefix)):
            return None
        seen = max(seen, min(len(prefix), len(value)))
        if rest is not None:
            if not all(self.holds(item, rest) for item in value[len(prefix) :]):
                return None
            seen = _ALL
        if "contains" in schema:
            found = sum(self.holds(item, schema["contains"]) for item in value)
            if not schema.get("minContains", 1) <= found <= schema.get("maxContains", _ALL):
                return self._no("contains")
        if schema.get("uniqueItems") and any(self._same(a, b) for i, a in enumerate(value) for b in value[:i]):
            return self._no("uniqueItems")
        if "unevaluatedItems" in schema and seen is not _ALL:
            if not all(self.holds(item, schema["unevaluatedItems"]) for item in value[int(seen) :]):
                return self._no("unevaluatedItems")
            seen = _ALL
        return names, seen

    def _object(
        self, value: Mapping[str, Any], schema: Mapping[str, Any], names: frozenset[str], seen: float
    ) -> Evaluated | None:
        if any(name not in value for name in schema.get("required", ())):
            return self._no("required")
        for name, others in schema.get("dependentRequired", {}).items():
            if name in value and any(other not in value for other in others):
                return self._no("dependentRequired")
        if "propertyNames" in schema and not all(self.holds(name, schema["propertyNames"]) for name in value):
            return self._no("propertyNames")
        done = set(names)
        for name, inner in value.items():
            own = list(self.of_property(schema, name))
            if not all(self.holds(inner, one) for one in own):
                return None
            if own:
                done.add(name)
        if "unevaluatedProperties" in schema:
            for name in value.keys() - done:
                if not self.holds(value[name], schema["unevaluatedProperties"]):
                    return self._no("unevaluatedProperties")
            done |= value.keys()
        return frozenset(done), seen

    def of_property(self, schema: Mapping[str, Any], name: str) -> Iterable[Schema]:
        """The schemas that a schema has for a property of this name."""
        found: list[Schema] = []
        if name in schema.get("properties", {}):
            found.append(schema["properties"][name])
        for pattern, inner in schema.get("patternProperties", {}).items():
            self.failed = "patternProperties"
            self.work.spend()
            if self.automaton(pattern, "patternProperties").matches(name, self.work):
                found.append(inner)
        if not found and "additionalProperties" in schema:
            found.append(schema["additionalProperties"])
        return found


_LIMITS: Mapping[str, Sequence[tuple[str, Callable[[Any, Any], bool]]]] = {
    "number": (
        ("minimum", lambda value, limit: value < limit),
        ("maximum", lambda value, limit: value > limit),
        ("exclusiveMinimum", lambda value, limit: value <= limit),
        ("exclusiveMaximum", lambda value, limit: value >= limit),
        ("multipleOf", lambda value, step: not is_multiple(value, step)),
    ),
    "string": (("minLength", lambda v, n: len(v) < n), ("maxLength", lambda v, n: len(v) > n)),
    "array": (("minItems", lambda v, n: len(v) < n), ("maxItems", lambda v, n: len(v) > n)),
    "object": (("minProperties", lambda v, n: len(v) < n), ("maxProperties", lambda v, n: len(v) > n)),
}
"""For each type, the keywords with a limit, and the functions that say if a value fails it."""
