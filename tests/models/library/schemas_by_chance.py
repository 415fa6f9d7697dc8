"""Schemas by chance: each accepts a value that is chosen first, so that there is a document for every one of them."""

from __future__ import annotations

import random
import re
from typing import Any

from jsonschema import Draft202012Validator

PATTERNS = (
    (r"^[A-Z]{2}-\d{3}$", "AB-123"), (r"\d+", "x42"), (r"^(red|green|blue)$", "green"), (r"^a.*z$", "a to z"),
    (r"^[^@\s]+@[^@\s]+\.[a-z]{2,}$", "me@example.org"), (r"\bword\b", "a word"), (r"^(\w+ ?){2,5}$", "some more words"),
    (r"(?i)^yes|no$", "YES"), (r"^.{3,40}$", "anything"), (r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}$", "01234567-89ab-cdef-0123"),
)  # fmt: skip
NAMES = ("id", "name", "tags", "x-a", "x-b", "count", "ok", "next", "größe")


def value_by_chance(rng: random.Random, depth: int = 0) -> Any:
    kinds = ["null", "boolean", "integer", "number", "string", "pattern"] + ["array", "object", "object"] * (depth < 4)
    match rng.choice(kinds) if depth else "object":
        case "null":
            return None
        case "boolean":
            return rng.random() < 0.5
        case "integer":
            return rng.randint(-1000, 1000)
        case "number":
            return rng.choice([0.5, -2.25, 1e-3, 12.75, 1e6, 3.0, 0.3])
        case "string":
            return "".join(rng.choice('abc XYZ é日"\\\n') for _ in range(rng.randint(0, 12)))
        case "pattern":
            return rng.choice(PATTERNS)[1]
        case "array":
            return [value_by_chance(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {name: value_by_chance(rng, depth + 1) for name in rng.sample(NAMES, rng.randint(0, 4))}


class Maker:
    """Makes a schema around a value. Schemas that it refers to are in `defs`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.defs: dict[str, Any] = {}

    def document(self) -> dict[str, Any]:
        schema = self.around(value_by_chance(self.rng))
        schema = {"allOf": [schema]} if isinstance(schema, bool) else schema
        return {**schema, "$defs": self.defs} if self.defs else schema

    def likely(self, chance: float = 0.3) -> bool:
        return self.rng.random() < chance

    def around(self, value: Any, depth: int = 0) -> Any:
        if self.likely(0.03):
            return True
        if self.likely(0.05):
            return {}
        if depth > 8:
            return {"type": self.type_of(value)}
        schema = self.direct(value, depth)
        match self.rng.randint(0, 11):
            case 0:
                return {"allOf": [schema, self.direct(value, depth + 1)]}
            case 1:
                return self.shuffled("anyOf", schema, [self.around(value_by_chance(self.rng, 2), depth + 3)])
            case 2:
                return self.shuffled("oneOf", schema, [d for d in self.decoys(depth) if not self.accepts(d, value)])
            case 3:
                name = f"d{len(self.defs)}"
                self.defs[name] = True
                self.defs[name] = schema
                return {"$ref": f"#/$defs/{name}", "title": "a reference"}
            case 4 if isinstance(value, dict):
                name = f"d{len(self.defs)}"  # recursive
                self.defs[name] = True
                inner = {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}]}
                self.defs[name] = self.with_property(schema, inner)
                return {"$ref": f"#/$defs/{name}"} if self.accepts({"$ref": f"#/$defs/{name}"}, value) else schema
            case 5 if isinstance(schema, dict):
                return {**schema, "anyOf": [self.direct(value, depth + 2), False]}
        return schema

    def with_property(self, schema: dict[str, Any], inner: Any) -> dict[str, Any]:
        return {**schema, "properties": {"child": inner, **schema.get("properties", {})}}

    def shuffled(self, keyword: str, schema: Any, others: list[Any]) -> dict[str, Any]:
        branches = [schema, *others]
        self.rng.shuffle(branches)
        return {keyword: branches}

    def decoys(self, depth: int) -> list[Any]:
        return [self.around(value_by_chance(self.rng, 2), depth + 3) for _ in range(self.rng.randint(1, 3))] + [False]

    def accepts(self, schema: Any, value: Any) -> bool:
        whole = schema if isinstance(schema, bool) else {**schema, "$defs": self.defs}
        return Draft202012Validator(whole).is_valid(value)

    def type_of(self, value: Any) -> Any:
        kinds = {
            type(None): "null",
            bool: "boolean",
            str: "string",
            list: "array",
            dict: "object",
            float: "number",
            int: "integer",
        }
        kind = kinds[type(value)]
        return [kind, self.rng.choice([k for k in ("null", "boolean", "array") if k != kind])] if self.likely(0.15) else kind

    def direct(self, value: Any, depth: int) -> dict[str, Any]:
        """A schema by the value's own keywords."""
        if self.likely(0.06):
            return {"const": value}
        if self.likely(0.06):
            return {"enum": [value_by_chance(self.rng, 3), value, value_by_chance(self.rng, 3)]}
        schema: dict[str, Any] = {} if self.likely(0.1) else {"type": self.type_of(value)}
        match value:
            case bool() | None:
                pass
            case int() | float():
                self.number(schema, value)
            case str():
                self.string(schema, value)
            case list():
                self.array(schema, value, depth)
            case dict():
                self.object(schema, value, depth)
        return schema

    def number(self, schema: dict[str, Any], value: float) -> None:
        distance = self.rng.choice([0, 0.01, 1, 50])
        if self.likely():
            schema["minimum"] = value - distance
        elif self.likely():
            schema["exclusiveMinimum"] = value - distance - 0.5
        if self.likely():
            schema["maximum"] = value + distance
        elif self.likely():
            schema["exclusiveMaximum"] = value + distance + 0.5
        if isinstance(value, int) and self.likely():
            schema["multipleOf"] = self.rng.choice([n for n in (1, 2, 3, 5, 7, 0.5, 0.25) if value % n == 0])

    def string(self, schema: dict[str, Any], value: str) -> None:
        if self.likely():
            schema["minLength"] = max(0, len(value) - self.rng.randint(0, 3))
        if self.likely():
            schema["maxLength"] = len(value) + self.rng.randint(0, 9)
        if fitting := [pattern for pattern, _ in PATTERNS if re.search(pattern.replace("$", r"\Z"), value, re.ASCII)]:
            schema["pattern"] = self.rng.choice(fitting)
        if self.likely(0.1):
            schema["format"] = self.rng.choice(["date", "email", "unknown"])

    def array(self, schema: dict[str, Any], value: list[Any], depth: int) -> None:
        first = self.rng.randint(0, len(value)) if self.likely(0.5) else 0
        if first:
            schema["prefixItems"] = [self.around(item, depth + 1) for item in value[:first]]
        rest = [self.around(item, depth + 1) for item in value[first:]]
        if rest:
            schema["items"] = {"anyOf": rest}
        elif self.likely():
            schema[self.rng.choice(["items", "unevaluatedItems"])] = False
        if self.likely(0.4):
            schema["minItems"] = max(0, len(value) - self.rng.randint(0, 1))
        if self.likely(0.4):
            schema["maxItems"] = len(value) + self.rng.randint(0, 2)

    def object(self, schema: dict[str, Any], value: dict[str, Any], depth: int) -> None:
        named = [name for name in value if self.likely(0.8)]
        schema["properties"] = {name: self.around(value[name], depth + 1) for name in named}
        schema["required"] = [name for name in value if self.likely(0.6)]
        if self.likely(0.2):
            schema["patternProperties"] = {
                "^x-": {"anyOf": [self.around(v, depth + 1) for n, v in value.items() if n.startswith("x-")] or [True]}
            }
        covered = set(named) | {name for name in value if name.startswith("x-") and "patternProperties" in schema}
        others = [self.around(item, depth + 1) for name, item in value.items() if name not in covered]
        if self.likely(0.5):
            keyword = self.rng.choice(["additionalProperties", "unevaluatedProperties"])
            schema[keyword] = {"anyOf": others} if others else False
        if self.likely(0.2):
            schema["minProperties"] = max(0, len(value) - self.rng.randint(0, 1))
        if self.likely(0.2):
            schema["maxProperties"] = len(value) + self.rng.randint(0, 2)
        if value and self.likely(0.1):
            schema["dependentSchemas"] = {self.rng.choice(list(value)): {"minProperties": 1}}
