"""JSON Schemas in requests: keywords that no answer can be held to are found wherever a schema stands, and nowhere else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.json.schema import REFUSED, SchemaError, check_schema, is_larger

PLACES = (
    ("", lambda s: s), (".items", lambda s: {"items": s}), (".items[1]", lambda s: {"items": [{}, s]}),
    (".prefixItems[0]", lambda s: {"prefixItems": [s]}), (".anyOf[1]", lambda s: {"anyOf": [True, s]}),
    (".allOf[0]", lambda s: {"allOf": [s]}), (".oneOf[0]", lambda s: {"oneOf": [s]}),
    (".properties.a", lambda s: {"properties": {"a": s}}), (".properties['a b']", lambda s: {"properties": {"a b": s}}),
    (".patternProperties['^x']", lambda s: {"patternProperties": {"^x": s}}), (".$defs.d", lambda s: {"$defs": {"d": s}}),
    (".definitions.d", lambda s: {"definitions": {"d": s}}), (".additionalProperties", lambda s: {"additionalProperties": s}),
    (".properties.a.items.anyOf[0]", lambda s: {"properties": {"a": {"items": {"anyOf": [s]}}}}),
)  # fmt: skip
FAULTS = [*({name: {}} if name not in ("uniqueItems",) else {name: True} for name in REFUSED),
          {"type": "any"}, {"type": ["string", 7]}, {"$ref": "http://a"}, {"$ref": "#/$defs/no"}, {"$ref": 7}]  # fmt: skip


def fault(schema: Any) -> str | None:
    try:
        check_schema(schema)
    except SchemaError as e:
        return e.below
    return None


@pytest.mark.parametrize("wrong", FAULTS, ids=str)
@pytest.mark.parametrize(("place", "around"), PLACES, ids=[place for place, _ in PLACES])
def test_a_fault_is_found_at_its_place(place: str, around: Any, wrong: dict[str, Any]) -> None:
    assert fault(around({"type": "object"})) is None
    found = fault(around(wrong))
    assert found == f"{place}.{next(iter(wrong))}"


@pytest.mark.parametrize("name", REFUSED)
def test_a_property_may_have_any_name(name: str) -> None:
    schema = {"properties": {name: {"type": "string"}}, "required": [name], "enum": [{name: 1}], "default": {name: 1}}
    assert fault(schema) is None


def test_what_asks_for_nothing_is_let_through() -> None:
    assert fault({"uniqueItems": False, "if": None}) is None
    assert fault(True) is None
    assert fault(False) is None


def test_references_lead_within() -> None:
    schema = {"$defs": {"a/b": {"type": "null"}}, "list": [{"x": {}}], "anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/a~1b"}]}
    assert fault(schema) is None
    assert fault({**schema, "$ref": "#/list/0/x"}) is None
    assert fault({**schema, "$ref": "#/list/1"}) == ".$ref"
    assert fault({**schema, "$ref": "#/list"}) == ".$ref"  # a list is no schema
    assert fault({"$ref": "#anchor"}) is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["type", "items", "anyOf", "properties", "$ref", "not", "$defs", "prefixItems"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(_JSON)
def test_anything_is_a_schema_or_a_fault_with_a_path(value: Any) -> None:
    found = fault(value)
    assert found is None or found == "" or found.startswith((".", "["))


@given(_JSON, st.integers(0, 60))
def test_a_size_is_about_that_of_the_text(value: Any, most: int) -> None:
    size = len(json.dumps(value, ensure_ascii=False))
    if size > 8 * most + 64:
        assert is_larger(value, most)
    if size * 8 + 64 < most:
        assert not is_larger(value, most)


def test_a_large_value_is_seen_as_soon_as_it_is_large() -> None:
    assert is_larger(["x" * 100] * 5000)
    assert is_larger("x" * 300_000)
    assert not is_larger(["x" * 100] * 2000)
