"""Reads `bounds.txt`, and looks for what each of its rows names: a setting, a constant, a container, a wait or a cut."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from gateway.config.fields import SETTINGS
from tests.bounds.finding import Place, Site

TABLE = Path(__file__).parent / "bounds.txt"

GRAMMAR = """
BOUND is one of
  limits.body            a setting of gateway/config/tree.py; `*` stands for a name, as in models.*.queue
  :_READ                 a constant of the same module
  protocols.sse:MAX      a constant of another module, or a field of a class in it (module:Class.field)
  walks NAME             the finite container, or the number, that the loop uses up: NAME stands in the loop. What makes
                         it finite is said behind it, or is plain
  waits CALL             the loop awaits CALL in each turn: an event of our own side, or one of a peer that a deadline or
                         a limit ends, which is said behind it. Of a call: it is awaited, and takes one message
  cut [:100]             the call reads what is cut off so"""


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One row: what bounds the loops or calls of one kind in one function."""

    kind: str
    count: int
    bound: str
    why: str
    line: int


Rows = Mapping[str, Mapping[Place, Row]]


class TableError(Exception):
    """A line of the table cannot be read."""


def rows_of(text: str) -> Rows:
    """The rows of a table, by file and place."""
    found: dict[str, dict[Place, Row]] = {}
    file = ""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith(" "):
            file = line.strip()
            if file in found:
                raise TableError(f"line {number}: {file} is there twice")
            found[file] = {}
            continue
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) not in (3, 4) or not file:
            raise TableError(f"line {number}: expected FUNCTION | KIND | BOUND | WHY below the name of a file, got {line!r}")
        name, said, bound, why = (*cells, "")[:4]
        kind, _, count = said.partition(" x")
        if (name, kind) in found[file]:
            raise TableError(f"line {number}: {name} | {kind} is there twice")
        found[file][name, kind] = Row(kind, int(count or 1), bound, why, number)
    return found


@cache
def _settings() -> frozenset[str]:
    return frozenset(setting.key for setting in SETTINGS.values())


def _texts(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name | ast.Attribute | ast.Constant):
                yield ast.unparse(inner)
            elif isinstance(inner, ast.arg):
                yield inner.arg


def _awaited(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Await):
                for call in ast.walk(inner.value):
                    if isinstance(call, ast.Call):
                        yield ast.unparse(call.func)
            elif isinstance(inner, ast.AsyncFor):
                yield ast.unparse(inner.iter)


def _constant(module: str, name: str) -> str:
    try:
        at: object = importlib.import_module(module)
    except ImportError as error:
        return f"{module} cannot be imported: {error}"
    for part in name.split("."):
        fields = getattr(at, "__struct_fields__", ()) or getattr(at, "__dataclass_fields__", ())
        if part not in fields and not hasattr(at, part):
            return f"{module} has no {name}"
        at = getattr(at, part, None)
    return ""


def fault(module: str, site: Site, row: Row) -> str:
    """Tells why the bound of a row does not hold; empty if it names something that is there."""
    bound = row.bound
    form, _, name = bound.partition(" ")
    match form:
        case "walks":
            # a loop uses up what it names; what a call takes in may have its name anywhere in the function
            within = site.nodes if site.loop else [site.within]
            return "" if name in set(_texts(within)) else f"there is no {name!r} in it"
        case "waits":
            within = site.nodes if site.loop else [site.within]
            return "" if name in set(_awaited(within)) else f"it does not await {name!r}"
        case "owed":
            return ""
        case "cut":
            return "" if any(name in ast.unparse(node) for node in site.nodes) else f"it is not cut by {name}"
    if ":" in bound:
        home, _, name = bound.partition(":")
        if not re.fullmatch(r"[\w.]*:[\w.]+", bound):
            return f"{bound!r} is no constant"
        return _constant(home or module, name)
    if bound in _settings():
        return ""
    return f"{bound!r} is neither a setting nor another bound"


def faults(file: str, found: Mapping[Place, Site], rows: Mapping[Place, Row]) -> list[str]:
    """The work of a maintainer on a file, one line for each site or row."""
    told = []
    module = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    for place, site in found.items():
        name, kind = place
        times = f" x{site.count}" if site.count > 1 else ""
        row = rows.get(place)
        if row is None:
            told.append(f"{file}:{site.line} has no bound. Below `{file}` add:\n    {name} | {kind}{times} | BOUND | WHY")
        elif row.count != site.count:
            told.append(
                f"{file}:{site.line} {name} | {kind}: the table (line {row.line}) counts {row.count}, there are {site.count}"
            )
        elif wrong := fault(module, site, row):
            told.append(f"{file}:{site.line} {name} | {kind} | {row.bound} (line {row.line}): {wrong}")
    told += [
        f"{file} has no {name} | {kind} any more: take line {row.line} away"
        for (name, kind), row in rows.items()
        if (name, kind) not in found
    ]
    return told
