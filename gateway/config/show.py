"""A configuration for a reader: every setting with its value and its source, as TOML or for a program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.config.fields import SETTINGS, template
from gateway.config.load import Resolved
from gateway.config.share import DIVIDED, processes_of, share_of
from gateway.config.text import Key, dotted, plain, toml, without_secrets, written_size
from gateway.config.tree import Config, TensorConfig, Unit

DEFAULT = "default"
"""The source of a value that nobody set."""


def to_toml(resolved: Resolved, *, changed: bool = False, masked: bool = False) -> str:
    """The whole configuration as TOML, each set value with its source; `load` reads it back to the same. If `changed` is
    true, only values that were set. If `masked` is true, secrets are hidden and cannot be read back; their lines have a
    note."""
    sections: dict[Key, list[str]] = {}
    for path, value in _each(resolved.config, ()):
        source = resolved.sources.get(dotted(path), "")
        if changed and not source:
            continue
        setting = SETTINGS.get(template(path))
        shown = without_secrets(path, value) if masked else value
        if shown != value:
            source = f"{source}, masked: --show-secrets shows it"
        source = "; ".join(filter(None, (source, _of_each(path, value, resolved.config))))
        note = f"  # {plain(source)}" if source else ""
        if value is None and setting is not None:
            line = f"# {dotted(path[-1:])}: {setting.computed}"
        else:
            line = f"{dotted(path[-1:])} = {written(setting.unit, shown) if setting else toml(shown)}{note}"
        sections.setdefault(path[:-1], []).append(line)
    return "\n".join("\n".join([f"[{dotted(section)}]", *lines, ""]) for section, lines in sections.items())


def to_comments(said: Iterable[tuple[Key, Any, str]], *, masked: bool = False) -> str:
    """Values from other files, each with its file, as comments of TOML: they are not part of the configuration."""
    lines = []
    for path, value, source in said:
        shown = without_secrets(path, value) if masked else value
        lines.append(f"# {dotted(path)} = {toml(shown)}  # {plain(source)}\n")
    return "".join(lines)


def to_json(
    resolved: Resolved, said: Iterable[tuple[Key, Any, str]] = (), *, changed: bool = False, masked: bool = False
) -> dict[str, Any]:
    """The whole configuration for a program, by the keys of the settings. Each has a `value`: bytes for a size, seconds for
    a duration, null for the model's own. Each has a `source`, "default" if nobody set it. `said` has the values of other
    files."""
    told: dict[str, Any] = {}
    for path, value in _each(resolved.config, ()):
        source = resolved.sources.get(dotted(path), DEFAULT)
        if changed and source == DEFAULT:
            continue
        setting = SETTINGS.get(template(path))
        if setting is not None and setting.unit is Unit.TENSORS and value is not None:
            value = _tables(value)
        told[dotted(path)] = _entry(path, value, source, masked)
        if path in DIVIDED and (n := processes_of(resolved.config)) != 1:
            told[dotted(path)]["each_process"] = share_of(value, n)
    for path, value, source in said:
        told[dotted(path)] = _entry(path, value, source, masked)
    return told


def _entry(path: Key, value: Any, source: str, masked: bool) -> dict[str, Any]:
    return {"value": _plain(without_secrets(path, value) if masked else value), "source": source}


def _each(section: Any, prefix: Key) -> Iterator[tuple[Key, Any]]:
    """Every value of a section, with its path; each option of a model is one."""
    for field in dataclasses.fields(section):
        path, value = (*prefix, field.name), getattr(section, field.name)
        items = {(*path, name): item for name, item in value.items()} if isinstance(value, dict) else {path: value}
        for key, item in items.items():
            if dataclasses.is_dataclass(item):
                yield from _each(item, key)
            else:
                yield key, item


def _of_each(path: Key, value: Any, config: Config) -> str:
    """One process's share of a value that several processes share, in words; empty if there is one process."""
    if path not in DIVIDED or (n := processes_of(config)) == 1:
        return ""
    return f"each of {n} processes has {written(SETTINGS[path].unit, share_of(value, n)).strip(chr(34))}"


def written(unit: Unit, value: Any) -> str:
    """A value as TOML, a size with the largest binary unit that divides it."""
    if unit is Unit.TENSORS:
        value = _tables(value)
    return written_size(value) if unit is Unit.BYTES else toml(value)


def _tables(tensors: tuple[TensorConfig, ...]) -> list[dict[str, Any]]:
    fields = dataclasses.fields(TensorConfig)
    return [{f.name: v for f in fields if (v := getattr(tensor, f.name)) != f.default} for tensor in tensors]


def _plain(value: Any) -> Any:
    """A value in JSON's types. Dates and times of TOML become text, and so do numbers that JSON lacks."""
    match value:
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return toml(value)
        case None | bool() | str() | int() | float():
            return value
        case _:
            return str(value.isoformat())
