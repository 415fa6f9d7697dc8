"""Documents for JSON schemas: a validator of other authors finds each of them valid, and hostile schemas end soon."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from models.library.scripted.documents import MAX_SIZE, document_of
from models.library.scripted.patterns import CannotMake
from models.library.scripted.schemas import Schemas, Work
from tests.models.library.schemas_by_chance import Maker, value_by_chance


def made(schema: Any) -> Any:
    """The document as a client reads it."""
    return json.loads(json.dumps(document_of(schema)))


def is_valid(schema: Any, value: Any) -> bool:
    return bool(Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize("hundred", range(10))
def test_a_thousand_schemas_have_valid_documents(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        schema = Maker(seed).document()
        assert is_valid(schema, made(schema)), seed


def test_the_schemas_by_chance_have_every_keyword() -> None:
    seen: set[str] = set()

    def look(schema: Any) -> None:
        if isinstance(schema, dict):
            seen.update(schema)
            for inner in schema.values():
                look(inner)
        elif isinstance(schema, list):
            for inner in schema:
                look(inner)

    for seed in range(1000):
        look(Maker(seed).document())
    assert seen >= {
        "$ref", "$defs", "allOf", "anyOf", "oneOf", "type", "const", "enum", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "format", "prefixItems", "items", "minItems",
        "maxItems", "unevaluatedItems", "properties", "required", "patternProperties", "additionalProperties",
        "unevaluatedProperties", "minProperties", "maxProperties", "dependentSchemas",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_the_check_of_values_is_that_of_the_validator(seed: int) -> None:
    """Its values are seldom those that the schema is made for, so about half of them are invalid."""
    rng = random.Random(seed)
    schema = Maker(seed).document()
    for _ in range(30):
        value = value_by_chance(rng, rng.randint(0, 3))
        assert Schemas(schema, Work(100_000)).holds(value, schema) == is_valid(schema, value)


NODE = {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value", "next"]}
LIST = {
    "$defs": {
        "node": {
            **NODE,
            "properties": {**NODE["properties"], "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        }
    }
}


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        (True, "text"),
        ({"type": "integer"}, 1),
        ({"type": ["null", "boolean"]}, True),
        ({"const": {"a": [1.5, None]}}, {"a": [1.5, None]}),
        ({"type": "string", "format": "date-time"}, "2026-01-31T12:00:00Z"),
        ({"type": "string", "minLength": 6}, "textte"),
        ({"type": "string", "examples": ["Paris"]}, "Paris"),
        ({"type": "number", "exclusiveMinimum": 1.2, "exclusiveMaximum": 1.3}, 1.25),
        ({"type": "number", "multipleOf": 0.1, "minimum": 0.25, "maximum": 0.45}, 0.4),
        ({"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}], "minimum": 1}, 12),
        ({"allOf": [{"pattern": "^a"}, {"pattern": "z$"}], "type": "string", "minLength": 4}, "aaaz"),
        ({"type": "array", "prefixItems": [{"const": 1}, {"type": "string"}], "items": False}, [1, "text"]),
        ({"items": [{"const": 1}], "additionalItems": {"const": 2}, "minItems": 3}, [1, 2, 2]),
        ({"type": "object", "properties": {"b": {}, "a": {"type": "null"}}}, {"b": "text", "a": None}),
        ({"minProperties": 2, "patternProperties": {"^x-": {"type": "null"}}, "additionalProperties": False}, {"x-": None, "x-a": None}),
        ({**LIST, "$ref": "#/$defs/node"}, {"value": 1, "next": None}),
        ({"type": "array", "items": {"$ref": "#"}}, []),
        ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "const": 7}}}, 7),
        ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 7}}}, 7),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, 0.5),
        ({"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}], "type": "integer"}, 3),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"a": "text"}),
        ({"required": ["a"], "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": "text", "b": "text"}),
    ],
)  # fmt: skip
def test_a_document_is_plain(schema: Any, document: Any) -> None:
    assert made(schema) == document


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True, "minItems": 5, "items": {"type": "integer", "maximum": 7}},
        {"type": "array", "contains": {"const": 5}, "minContains": 2},
        {"required": ["a"], "dependentRequired": {"a": ["b"], "b": ["c"]}},
        {"minProperties": 2, "propertyNames": {"pattern": "^[A-Z]+$"}},
        {
            "type": "object",
            "if": {"required": ["a"]},
            "then": {"required": ["b"]},
            "required": ["a"],
            "properties": {"b": {}},
        },
    ],
)
def test_some_schemas_that_a_format_may_not_have_work_for_the_arguments_of_tools(schema: Any) -> None:
    assert is_valid(schema, made(schema))


PAIRS: dict[str, Any] = {
    "$ref": "#/$defs/0",
    "$defs": {
        **{str(n): {"type": "array", "items": {"$ref": f"#/$defs/{n + 1}"}, "minItems": 2} for n in range(30)},
        "30": {"type": "null"},
    },
}


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (False, "false: no document found"),
        ({"enum": []}, "enum: no document found"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "type: no document found"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum: no document found"),
        ({"type": "string", "minLength": 5, "maxLength": 4}, "minLength: no document found"),
        ({"type": "string", "minLength": 20_000}, "minLength: no document found"),
        ({"type": "array", "minItems": 10**9}, "minItems: no document found"),
        ({"minProperties": 10**9, "type": "object"}, "minProperties: no document found"),
        ({"properties": {"a": False}, "required": ["a"], "type": "object"}, "false: no document found"),
        ({"$ref": "#"}, "$ref: a schema refers to itself for the same value"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "$ref: no document found"),
        ({"$ref": "#/$defs/none"}, "$ref: the schema has no '#/$defs/none'"),
        ({"$ref": "https://example.com/"}, "$ref: expected a reference that begins with #"),
        ({"type": "strin"}, "type: expected one or more types, got 'strin'"),
        ({"minimum": True}, "minimum: expected a number, got 'True'"),
        ({"properties": {"a": {"required": "a"}}}, "required: expected a list of names"),
        ({"type": "string", "pattern": "(?!a)"}, "pattern: '(?!a)': assert not is not supported"),
        ({"patternProperties": {"(?=a)": {}}, "required": ["a"], "type": "object"}, "patternProperties: '(?=a)'"),
        ({"anyOf": [{"$id": "https://example.com/"}]}, "$id: a schema inside another cannot have it"),
        (PAIRS, f"a document larger than {MAX_SIZE}: no document found"),
        (nested(200), "a document of more than 64 levels"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_by_its_keyword(schema: Any, said: str) -> None:
    with pytest.raises(CannotMake) as caught:
        document_of(schema)
    assert str(caught.value).startswith(said)


HOSTILE: list[Any] = [
    {"allOf": [{"anyOf": [{"const": n}, {"multipleOf": n + 1, "type": "integer"}]} for n in range(1, 60)], "maximum": 10**9},
    {"allOf": [{"oneOf": [{"minimum": n}, {"maximum": n}]} for n in range(200)], "type": "integer"},
    {"$defs": {str(n): {"properties": {str(m): {"$ref": f"#/$defs/{m}"} for m in range(40)}, "required": [str((n * 7 + m) % 40) for m in range(3)]} for n in range(40)}, "$ref": "#/$defs/0", "type": "object"},
    {"required": [f"a{n}" for n in range(4000)], "patternProperties": {f"(a+)+{n}$": {} for n in range(100)}, "type": "object"},
    {"type": "string", "allOf": [{"pattern": f"(a|b|ab){{1,20}}{n}.*"} for n in range(20)]},
    {"type": "array", "uniqueItems": True, "minItems": 4000, "items": {"enum": list(range(4000))}},
    {"type": "array", "minItems": 900, "items": {"type": "string", "minLength": 9000}},
    {"enum": [[n] * 100 for n in range(2000)], "allOf": [{"enum": [[-n] * 100 for n in range(1, 2000)]}]},
    {"anyOf": [{"anyOf": [{"anyOf": [{"type": "string", "minLength": 9}] * 20}] * 20}] * 20, "maxLength": 8, "type": "string"},
]  # fmt: skip


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_schemas_end_after_a_bounded_number_of_steps(schema: Any) -> None:
    with suppress(CannotMake):
        assert is_valid(schema, made(schema))


def test_the_same_schema_gives_the_same_document() -> None:
    first, second = ([json.dumps(document_of(Maker(seed).document())) for seed in range(50)] for _ in range(2))
    assert first == second
