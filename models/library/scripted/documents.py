"""Makes a document that a JSON schema allows: candidates from its keywords, each checked against the whole of it.

The search is bounded: by steps, by the depth and the size of a document, and by the rule that a schema is not met again
inside its own value. So a recursive schema ends as soon as it can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, TypeAlias, final

from models.library.scripted.facts import Facts
from models.library.scripted.patterns import MAX_TEXT, CannotMake, Work, text_of
from models.library.scripted.schemas import Schema, Schemas, prefix_of, same

STEPS: Final = 50_000
"""The most steps of a search: about a tenth of a second of a core."""
MAX_DEPTH: Final = 64
MAX_SIZE: Final = 5_000
"""The most values and names in a document; each 16 characters of a text count as one more."""
_CANDIDATES = 24
_SHOWN = 3
"""Optional properties are shown to this depth,"""
_OPTIONAL = 200
"""and so many of them in all."""
_CHOICES = 64
_LENGTHS = 6
"""The most texts for a pattern, each longer than the one before."""

_WORDS = ("text", "word", "name", "other")
_FORMATS: Mapping[str, str] = {
    "date-time": "2026-01-31T12:00:00Z", "date": "2026-01-31", "time": "12:00:00Z", "duration": "PT1H",
    "email": "someone@example.com", "hostname": "example.com", "ipv4": "192.0.2.1", "ipv6": "2001:db8::1",
    "uri": "https://example.com/", "uuid": "00000000-0000-4000-8000-000000000000", "json-pointer": "/text", "regex": "text",
}  # fmt: skip
"""Texts in the formats that readers of a document often check. The check of a document passes formats over."""

_Parts: TypeAlias = tuple[Mapping[str, Any], ...]


def document_of(*schemas: Schema, steps: int = STEPS) -> Any:
    """A value that is valid by all the schemas; the same one each time. References are those of the first. CannotMake, with
    the keyword, if there is none, or none is found within the limits."""
    work = Work(steps)
    maker = _Maker(Schemas(schemas[0], work))
    try:
        found = next(maker.values(schemas), None)
        if found is not None and not all(maker.holds(found.value, schema) for schema in schemas):
            found = None
    except RecursionError:
        raise CannotMake(f"{maker.blamed}: it is nested too deeply") from None
    except CannotMake as e:
        if work.left < 0:
            raise CannotMake(f"{maker.blamed}: no document found: {e}") from None
        raise
    if found is None:
        raise CannotMake(f"{maker.blamed}: no document found that meets it with the rest of the schema")
    return found.value


class _Made(NamedTuple):
    value: Any
    size: int


@final
class _Found:
    """The values found so far for some schemas, and the search for more."""

    def __init__(self, search: Iterator[_Made]) -> None:
        self.values: list[_Made] = []
        self.search: Iterator[_Made] | None = search
        self.cut = False
        """True if the search left something out, since it was already on its way there."""


@final
class _Maker:
    def __init__(self, schemas: Schemas) -> None:
        self._schemas, self._work = schemas, schemas.work
        self._conflict = ""
        self._known: dict[frozenset[int], _Found] = {}
        self._path: set[frozenset[int]] = set()
        self._cuts = 0
        self._optional = _OPTIONAL
        self._required: dict[str, Schema] = {}

    @property
    def blamed(self) -> str:
        """The keyword that was last not met."""
        return self._conflict or self._schemas.failed or "schema"

    def holds(self, value: Any, schema: Schema) -> bool:
        """True if a value is valid."""
        return self._schemas.holds(value, schema)

    def _blame(self, keyword: str) -> None:
        self._conflict = keyword

    def values(self, schemas: Iterable[Schema]) -> Iterator[_Made]:
        """Yields valid values, the best first; the same ones for the same schemas."""
        parts = self._flat(schemas)
        if parts is None:
            return
        key = frozenset(map(id, parts))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _Found(islice(self._search(parts), _CANDIDATES))
        index = 0
        while index < len(found.values) or self._pull(key, found):
            yield found.values[index]
            index += 1

    def _pull(self, key: frozenset[int], found: _Found) -> bool:
        """Searches for one more value. False if there is none, also if this search is going on already: a value inside
        itself would only be a longer way to the same."""
        if key in self._path or len(self._path) >= MAX_DEPTH:
            self._cuts += 1
            self._blame("$ref" if key in self._path else f"a document of more than {MAX_DEPTH} levels")
            return False
        if found.search is None:
            return False
        cuts = self._cuts
        self._path.add(key)
        try:
            made = next(found.search, None)
        finally:
            self._path.discard(key)
        found.cut |= cuts != self._cuts
        if made is not None:
            found.values.append(made)
            return True
        found.search = None
        if found.cut and not found.values:
            self._known.pop(key, None)  # on another way there may be one
        return False

    def _flat(self, schemas: Iterable[Schema]) -> _Parts | None:
        """The schemas with all those that they refer to or consist of. None if one of them is false."""
        parts: dict[int, Mapping[str, Any]] = {}
        todo, seen = list(schemas), set[int]()
        for schema in todo:
            self._work.spend()
            if schema is False:
                self._blame("false")
                return None
            if schema is True or id(schema) in seen:
                continue
            assert isinstance(schema, Mapping)
            seen.add(id(schema))
            self._schemas.examine(schema)
            todo += [*self._schemas.references(schema), *schema.get("allOf", ())]
            if schema.keys() - {"$ref", "$dynamicRef", "allOf", "$defs"}:
                parts[id(schema)] = schema
        return tuple(parts.values())

    def _search(self, parts: _Parts) -> Iterator[_Made]:
        """Yields the values that are valid by all parts."""
        for chosen in self._chosen(parts, frozenset()):
            for made in self._candidates(chosen):
                self._work.spend()
                if made.size > MAX_SIZE:
                    self._blame(f"a document larger than {MAX_SIZE}")
                elif all(self._schemas.holds(made.value, part) for part in parts):
                    yield made
                else:
                    self._conflict = self._schemas.failed

    def _chosen(self, parts: _Parts, settled: frozenset[tuple[int, str]]) -> Iterator[_Parts]:
        """Yields the parts together with one branch of each `anyOf` and `oneOf` in them."""
        self._work.spend(len(parts))
        if (conflict := Facts(parts, self._schemas).conflict) or len(settled) > _CHOICES:
            return self._blame(conflict or "anyOf")
        points = ((part, keyword) for part in parts for keyword in ("anyOf", "oneOf") if keyword in part)
        for part, keyword in points:
            if (id(part), keyword) not in settled:
                for branch in part[keyword]:
                    more = self._flat([*parts, branch])
                    if more is not None:
                        yield from self._chosen(more, settled | {(id(part), keyword)})
                return None
        yield parts
        return None

    def _candidates(self, parts: _Parts) -> Iterator[_Made]:
        facts = Facts(parts, self._schemas)
        if facts.literals is not None:
            yield from (_Made(value, _size(value)) for value in facts.literals)
            return
        yield from (_Made(value, _size(value)) for value in facts.examples())
        for kind in facts.in_order(simple=len(self._path) > 2 * _SHOWN):
            match kind:
                case "null":
                    yield _Made(None, 1)
                case "boolean":
                    yield from (_Made(True, 1), _Made(False, 1))
                case "number":
                    self._blame(facts.limit)
                    yield from (_Made(number, _size(number)) for number in facts.numbers())
                case "string":
                    yield from (_Made(text, _size(text)) for text in self._strings(facts))
                case "array":
                    yield from self._arrays(facts)
                case "object":
                    yield from self._objects(facts, parts)

    def _strings(self, facts: Facts) -> Iterator[str]:
        shortest, longest = facts.least("minLength"), facts.most("maxLength")
        if shortest > min(longest, MAX_TEXT):
            return self._blame("minLength")
        yield from (_FORMATS[name] for name in facts.texts("format") if name in _FORMATS)
        if patterns := facts.texts("pattern"):
            automata = [self._schemas.automaton(pattern, "pattern") for pattern in patterns]
            length = shortest
            self._blame("pattern")
            for _ in range(_LENGTHS):
                if (text := text_of(automata, length, longest, self._work)) is None:
                    break
                yield text
                length = len(text) + 1
            return None
        for size in dict.fromkeys((4, shortest, shortest + 1, 2 * shortest + 4, int(min(longest, MAX_TEXT)))):
            if shortest <= size <= longest:
                for word in _WORDS:
                    yield (word * (size // len(word) + 1))[:size]
        for number in range(_CANDIDATES):
            text = f"text{number}" if longest > 5 else chr(97 + number)
            yield text.ljust(shortest, "x")
        return None

    def _arrays(self, facts: Facts) -> Iterator[_Made]:
        least, most = facts.least("minItems"), facts.most("maxItems")
        if least > min(most, MAX_SIZE):
            return self._blame("minItems")
        prefix = max([len(prefix_of(part)) for part in facts.parts], default=0)
        usual = max(prefix, 1) if len(self._path) <= 2 * _SHOWN else 0
        lengths = dict.fromkeys((int(min(max(least, usual), most)), least, *range(least + 1, least + 4)))
        unique = any(part.get("uniqueItems") for part in facts.parts)
        tried = set()
        for nth in range(_SHOWN):
            for length in lengths:
                items = self._items(facts, length, nth, unique)
                mark = nth, len(items)
                if len(items) < least and not self._conflict:
                    self._blame("uniqueItems" if unique else "minItems")
                if least <= len(items) <= most and mark not in tried:
                    tried.add(mark)
                    yield _Made([item.value for item in items], 1 + sum(item.size for item in items))
        return None

    def _items(self, facts: Facts, length: int, nth: int, unique: bool) -> list[_Made]:
        """The items of an array, each the nth of its values; fewer if one of them has none."""
        items: list[_Made] = []
        for index in range(length):
            self._work.spend()
            values = self.values(facts.item(index))
            if unique:
                values = self._unlike(items, values)
            if (item := _nth(values, nth)) is None:
                break
            items.append(item)
        return items

    def _unlike(self, items: Sequence[_Made], values: Iterable[_Made]) -> Iterator[_Made]:
        return (made for made in values if not any(self._same(made.value, item.value) for item in items))

    def _same(self, one: Any, other: Any) -> bool:
        self._work.spend()
        return same(one, other)

    def _objects(self, facts: Facts, parts: _Parts) -> Iterator[_Made]:
        required = facts.required()
        wanted = set(required)
        more = self._flat([*parts, *(schema for name in required for schema in facts.dependents(name))])
        if more is None:
            return
        if len(more) > len(parts):
            yield from self._objects_of(parts, more)
            return
        least, most = facts.least("minProperties"), facts.most("maxProperties")
        if len(required) > most or least > min(most, MAX_SIZE):
            return self._blame("maxProperties" if len(required) > most else "minProperties")
        optional = [name for name in facts.declared() if name not in wanted]
        free = [name for name in optional if not facts.depends(name)]
        shown = free if len(self._path) <= _SHOWN else []
        if any(_nth(self.values(facts.property(name)), 0) is None for name in required):
            return
        for names, nth in ((shown, 0), ([], 0), *(([name], 0) for name in free[:8]), ([], 1), ([], 2)):
            if (made := self._object(facts, required, names, least, most, nth)) is None:
                break
            yield made
        if least > len(required):
            for name in optional:
                if name not in free and (more := self._flat([*parts, self._requiring(name)])) is not None:
                    yield from self._objects_of(parts, more)
        return

    def _objects_of(self, parts: _Parts, more: _Parts) -> Iterator[_Made]:
        """Yields the objects of more parts, of which the choices in some are settled."""
        settled = frozenset((id(part), keyword) for part in parts for keyword in ("anyOf", "oneOf"))
        for chosen in self._chosen(more, settled):
            yield from self._objects(Facts(chosen, self._schemas), chosen)

    def _requiring(self, name: str) -> Schema:
        return self._required.setdefault(name, {"required": [name]})

    def _object(
        self, facts: Facts, required: Sequence[str], optional: Sequence[str], least: int, most: float, nth: int
    ) -> _Made | None:
        """An object with all required properties, and as many of the optional ones as may be, with others up to `least`.
        None if a property is missing then."""
        found: dict[str, _Made] = {}
        for name in required:
            if (made := _nth(self.values(facts.property(name)), nth)) is None:
                return None
            found[name] = made
        for name in optional:
            if len(found) < most and self._optional > 0 and (made := _nth(self.values(facts.property(name)), 0)) is not None:
                self._optional -= 1
                found[name] = made
        if len(found) < least:
            refused = 0
            for name in self._names(facts):
                if name not in found:
                    if (made := _nth(self.values(facts.property(name)), 0)) is not None:
                        found[name] = made
                    else:
                        refused += 1
                if len(found) >= least or refused > _CANDIDATES:
                    break
            if len(found) < least:
                self._blame("minProperties")
                return None
        value = {name: made.value for name, made in found.items()}
        return _Made(value, 1 + sum(_size(name) + made.size for name, made in found.items()))

    def _names(self, facts: Facts) -> Iterator[str]:
        """Yields names for the properties of an object that must have more of them."""
        yield from (name for name in facts.declared() if not facts.depends(name))
        allowed = [part["propertyNames"] for part in facts.parts if "propertyNames" in part]
        if allowed:
            yield from (made.value for made in self.values([*allowed, _NAME]))
            return
        for part in facts.parts:
            for pattern in part.get("patternProperties", {}):
                automaton, length = self._schemas.automaton(pattern, "patternProperties"), 0
                while length < _CANDIDATES and (name := text_of([automaton], length, math.inf, self._work)) is not None:
                    yield name
                    length = len(name) + 1
        for number in range(1, MAX_SIZE):
            self._work.spend()
            yield f"property{number}"


_NAME: Schema = {"type": "string"}


def _nth(values: Iterator[_Made], nth: int) -> _Made | None:
    """The value in this place; the last if there are fewer, and None if there are none."""
    taken = list(islice(values, nth + 1))
    return taken[-1] if taken else None


def _size(value: Any) -> int:
    """The size of a value: 1 for itself, each value and name in it, and for each 16 characters of a text."""
    match value:
        case str():
            return 1 + len(value) // 16
        case bool() | float() | None:
            return 1
        case int():
            return 1 + value.bit_length() // 64
        case Mapping():
            return 1 + sum(_size(name) + _size(inner) for name, inner in value.items())
        case _:
            return 1 + sum(map(_size, value))
