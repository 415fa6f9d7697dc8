"""The schema of the configuration's TOML as a JSON schema, for editors and for programs that write such files."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from gateway.config.fields import NAMES, SETTINGS, Setting, section_help, setting_help
from gateway.config.text import DURATION_UNITS, SIZE_UNITS, Key
from gateway.config.tree import TensorConfig, Unit

# The dialect that the TOML servers of editors read.
DIALECT = "http://json-schema.org/draft-07/schema#"
_TENSOR = "TensorConfig"
_REFERENCE = "#/definitions/{name}"


def json_schema() -> dict[str, Any]:
    """Every setting with its type, its default, its range and its meaning. A file that it refuses is invalid. A file that it
    accepts may still be invalid: a size or duration with a unit out of its range, or two values that contradict one
    another."""
    schema: dict[str, Any] = {
        "$schema": DIALECT,
        "title": "everywire.toml",
        **_table("The configuration of everywire."),
        "definitions": {_TENSOR: _tensor()},
    }
    for path, setting in SETTINGS.items():
        section = _section(schema, path[:-1])
        section["properties"][path[-1]] = _value(setting)
        if setting.required:
            section.setdefault("required", []).append(path[-1])
    return schema


def _section(node: dict[str, Any], path: Key) -> dict[str, Any]:
    """The table at a path, made if it is missing."""
    for n, name in enumerate(path):
        node = node["properties"].setdefault(name, _table("")) if name != "*" else _named(node, path[:n])
        node["description"] = node["description"] or " ".join(section_help(path[: n + 1]).split())
    return node


def _named(table: dict[str, Any], path: Key) -> dict[str, Any]:
    """The table that each name of a table of named ones stands for."""
    table["description"] = f"{NAMES[path].of[0].upper()}{NAMES[path].of[1:]} by each name: {NAMES[path].wanted}."
    found: dict[str, Any] = table.setdefault("patternProperties", {}).setdefault(_whole(NAMES[path].pattern), _table(""))
    return found


def _table(description: str) -> dict[str, Any]:
    return {"type": "object", "description": description, "properties": {}, "additionalProperties": False}


def _value(setting: Setting) -> dict[str, Any]:
    schema = _form(setting)
    said = [setting_help(setting.path), f"Must be {setting.expected}."]
    if setting.computed:
        said.append(f"Default: {setting.computed}.")
    elif setting.default is not None:
        schema["default"] = list(setting.default) if isinstance(setting.default, tuple) else setting.default
    return {"description": "\n".join(said), **schema}


def _form(setting: Setting) -> dict[str, Any]:
    """msgspec's schema of the type, with units, patterns and the order of choices, which msgspec does not know."""
    ((form,), _) = msgspec.json.schema_components([setting.type], ref_template=_REFERENCE)
    match setting.unit:
        case Unit.BYTES:
            return {"anyOf": [form, _quantity(SIZE_UNITS)]}
        case Unit.SECONDS:
            return {"anyOf": [form, _quantity(DURATION_UNITS)]}
        case Unit.CHOICE:
            of_strings = {"type": "string", "enum": list(setting.choices)}
            return {"anyOf": [of_strings, {"type": "boolean"}]} if setting.was_flag else of_strings
        case Unit.TEXT if setting.pattern:
            return {**form, "pattern": _whole(setting.pattern)}
        case Unit.ADDRESSES:
            one = {"type": "string", "pattern": _whole(setting.pattern)}
            return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1, "uniqueItems": True}]}
        case Unit.VARIABLES:
            return {**form, "propertyNames": {"pattern": _whole(setting.pattern)}}
        case _:
            return form


def _quantity(units: tuple[str, ...]) -> dict[str, str]:
    """A number with one of the units, in capitals or not."""
    either = "|".join("".join(f"[{letter.upper()}{letter}]" for letter in unit) for unit in units if unit)
    return {"type": "string", "pattern": rf"^\s*[0-9]{{1,15}}(\.[0-9]{{1,9}})? ?({either})?\s*$"}


def _whole(pattern: str) -> str:
    return f"^(?:{pattern})$"


def _tensor() -> dict[str, Any]:
    _, components = msgspec.json.schema_components([TensorConfig], ref_template=_REFERENCE)
    made: dict[str, Any] = components[_TENSOR]
    for field in dataclasses.fields(TensorConfig):
        made["properties"][field.name].pop("default", None)
    return {**made, "additionalProperties": False}
