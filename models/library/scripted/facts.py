"""Puts together the keywords of several JSON schemas that hold for one value: its types, limits, items and properties."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, final

from models.library.scripted.schemas import TYPES, Schema, Schemas, exact, prefix_of, rest_of, same

_HINTS: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "required", "patternProperties", "minProperties", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "contains"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_ORDER = ("string", "number", "boolean", "object", "array", "null")
_CANDIDATES = 24


@final
class Facts:
    """The facts of some schemas without choices, which all hold for one value. `conflict` is the keyword that no value
    meets; empty if none is seen."""

    def __init__(self, parts: Sequence[Mapping[str, Any]], schemas: Schemas) -> None:
        self.parts, self._schemas = parts, schemas
        self.conflict = ""
        self.integers = False
        self.types = set(_ORDER)
        for part in self._with("type"):
            self._type(part["type"])
        self.literals = self._literals()
        if not self.types:
            self.conflict = "type"
        elif self.literals == []:
            self.conflict = "enum"

    def _with(self, keyword: str) -> Iterator[Mapping[str, Any]]:
        return (part for part in self.parts if keyword in part)

    def _type(self, given: str | Sequence[str]) -> None:
        names = {given} if isinstance(given, str) else set(given)
        self.integers |= "integer" in names and "number" not in names
        self.types &= names | ({"number"} if "integer" in names else set())

    def _literals(self) -> list[Any] | None:
        """The values of `const` and `enum`; None if there is neither."""
        found: list[Any] | None = None
        for part in self.parts:
            for values in ([part["const"]] if "const" in part else None, part.get("enum")):
                if values is None:
                    continue
                self._schemas.failed = "enum"
                self._schemas.work.spend(len(values) * len(found or [0]))
                found = list(values) if found is None else [v for v in found if any(same(v, other) for other in values)]
        return found

    def in_order(self, *, simple: bool) -> list[str]:
        """The types, the best first: those that the keywords are about, and null last. `simple`: arrays and objects are
        last."""
        hinted = {kind for kind, words in _HINTS.items() if any(word in part for part in self.parts for word in words)}
        named = [
            "number" if name == "integer" else name
            for part in self._with("type")
            for name in ([part["type"]] if isinstance(part["type"], str) else part["type"])
        ]

        def rank(kind: str) -> tuple[bool, bool, bool, int]:
            place = named.index(kind) if kind in named else len(TYPES) + _ORDER.index(kind)
            return simple and kind in ("array", "object"), kind == "null", kind not in hinted, place

        return sorted(self.types, key=rank)

    @property
    def limit(self) -> str:
        """The first keyword that limits numbers."""
        return next((word for word in _HINTS["number"] if any(word in part for part in self.parts)), "type")

    def least(self, keyword: str) -> int:
        """The largest of the schemas' values of a keyword such as `minItems`; 0 without one."""
        return max([int(part[keyword]) for part in self._with(keyword)], default=0)

    def most(self, keyword: str) -> float:
        """The smallest of the schemas' values of a keyword such as `maxItems`; infinite without one."""
        return min([int(part[keyword]) for part in self._with(keyword)], default=math.inf)

    def texts(self, keyword: str) -> list[str]:
        """The different values of a keyword such as `pattern`."""
        return list(dict.fromkeys(part[keyword] for part in self._with(keyword) if isinstance(part[keyword], str)))

    def examples(self) -> Iterator[Any]:
        """Yields the values that the schemas themselves give as examples, and defaults that are not empty."""
        for part in self.parts:
            if isinstance(part.get("examples"), list | tuple):
                yield from part["examples"][:3]
            if part.get("default") not in (None, "", [], {}, ()):
                yield part["default"]

    def item(self, index: int) -> list[Schema]:
        """The schemas of the item of an array in this place."""
        found: list[Schema] = []
        self._schemas.work.spend(len(self.parts))
        for part in self.parts:
            prefix, rest = prefix_of(part), rest_of(part)
            if index < len(prefix):
                found.append(prefix[index])
            elif rest is not None:
                found.append(rest)
            if "contains" in part and index < part.get("minContains", 1):
                found.append(part["contains"])
        for part in self._with("unevaluatedItems"):
            inside = self._inside(part)
            if not any(index < len(prefix_of(one)) or rest_of(one) is not None for one in inside):
                found.append(part["unevaluatedItems"])
        return found

    def _inside(self, part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The parts that stand in a part, or are that part: its `unevaluated` keywords see no others."""
        inside = self._schemas.inside(part)
        self._schemas.work.spend(len(self.parts))
        return [one for one in self.parts if id(one) in inside]

    def property(self, name: str) -> list[Schema]:
        """The schemas of the property of an object with this name."""
        self._schemas.work.spend(len(self.parts))
        own = {id(part): list(self._schemas.of_property(part, name)) for part in self.parts}
        found = [schema for schemas in own.values() for schema in schemas]
        for part in self._with("unevaluatedProperties"):
            if not any(own[id(one)] for one in self._inside(part)):
                found.append(part["unevaluatedProperties"])
        return found

    def required(self) -> list[str]:
        """The names of the properties that an object must have, in the order of `properties`."""
        wanted = {name: None for part in self._with("required") for name in part["required"]}
        todo = list(wanted)
        for name in todo:
            for part in self._with("dependentRequired"):
                new = [other for other in part["dependentRequired"].get(name, ()) if other not in wanted]
                wanted.update(dict.fromkeys(new))
                todo += new
        declared = [name for name in self.declared() if name in wanted]
        return list(dict.fromkeys([*declared, *wanted]))

    def declared(self) -> Iterable[str]:
        """The names in `properties`."""
        return dict.fromkeys(name for part in self._with("properties") for name in part["properties"])

    def dependents(self, name: str) -> list[Schema]:
        """The schemas that hold for an object which has this property."""
        return [inner for p in self._with("dependentSchemas") if (inner := p["dependentSchemas"].get(name)) is not None]

    def depends(self, name: str) -> bool:
        """True if an object with this property must meet more."""
        return any(name in part[word] for word in ("dependentSchemas", "dependentRequired") for part in self._with(word))

    def numbers(self) -> Iterator[int | float]:
        """Yields some numbers within the limits, those near 1 first. They are not checked."""
        low, above = self._bound("minimum", "exclusiveMinimum", max)
        high, below = self._bound("maximum", "exclusiveMaximum", min)
        steps = [exact(part["multipleOf"]) for part in self._with("multipleOf")]
        step = _common_multiple([*steps, Fraction(1)] if self.integers or not steps else steps)
        for k in _near_one(low, above, high, below, step):
            yield from _number(k * step)
        if steps or self.integers:
            return
        if low is not None and high is not None:
            yield from _number((low + high) / 2)
            yield from _number(low + (high - low) / 3)
        for bound, direction in ((low, 1), (high, -1)):
            if bound is not None:
                yield from _number(bound)
                yield from _number(bound + Fraction(direction, 2))
                yield from (math.nextafter(number, direction * math.inf) for number in _floats(bound))
        yield 0.5

    def _bound(self, inclusive: str, exclusive: str, closest: Any) -> tuple[Fraction | None, bool]:
        """The closest limit, and True if a number must lie beyond it."""
        found = [(exact(part[word]), word == exclusive) for word in (inclusive, exclusive) for part in self._with(word)]
        if not found:
            return None, False
        bound = closest(limit for limit, _ in found)
        return bound, any(outside for limit, outside in found if limit == bound)


def _common_multiple(steps: Sequence[Fraction]) -> Fraction:
    shared = math.lcm(*[step.denominator for step in steps])
    return Fraction(math.lcm(*[int(step * shared) for step in steps]), shared)


def _near_one(low: Fraction | None, above: bool, high: Fraction | None, below: bool, step: Fraction) -> Iterator[int]:
    """Yields the factors of a step that lie within limits, those near 1 first."""
    first = None if low is None else math.ceil(low / step)
    last = None if high is None else math.floor(high / step)
    if above and low is not None and first is not None and first * step == low:
        first += 1
    if below and high is not None and last is not None and last * step == high:
        last -= 1
    begin = max(1, first) if first is not None else 1
    begin = min(begin, last) if last is not None else begin
    for distance in range(_CANDIDATES):
        for k in {begin + distance: None, begin - distance: None}:
            if (first is None or k >= first) and (last is None or k <= last):
                yield k


def _number(value: Fraction) -> Iterator[int | float]:
    if value.denominator == 1:
        yield int(value)
    else:
        yield from _floats(value)


def _floats(value: Fraction) -> Iterator[float]:
    try:
        yield float(value)
    except OverflowError:
        return
