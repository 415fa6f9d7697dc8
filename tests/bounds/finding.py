"""Finds by AST what a peer can make long: each `while` and `async for`, and each call that takes a message in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, final

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Place: TypeAlias = tuple[str, str]
"""The qualified name of a function or class (`<module>` outside of all), and the kind of what is there."""

TAKES_IN = re.compile(r"next_event|read|read1|readline|readall|loads|decode|get_message|recv(_\w+)?|receive(_(?!eof$)\w+)?")
"""The names of calls that take a message in, or a part of one. `receive_eof` takes nothing."""


@final
@dataclass(slots=True)
class Site:
    """A loop, or all calls of one name in one function."""

    line: int
    nodes: list[ast.AST]
    within: ast.AST
    """The function, or the class or module."""
    loop: bool
    names: set[str] = field(default_factory=set)
    """For what is planted and asked in tests."""

    @property
    def count(self) -> int:
        return len(self.nodes)


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def _kind(node: ast.AST) -> str:
    match node:
        case ast.While():
            return "while"
        case ast.AsyncFor() | ast.comprehension(is_async=1):
            return "async for"
        case ast.Call() if TAKES_IN.fullmatch(_called(node)):
            return _called(node)
    return ""


def _places(tree: ast.Module) -> Iterator[tuple[str, str, ast.AST, ast.AST]]:
    """Yields the name of the function, the kind, the node and the function's node, in the order of the source."""

    def look(node: ast.AST, name: str, within: ast.AST) -> Iterator[tuple[str, str, ast.AST, ast.AST]]:
        for inner in ast.iter_child_nodes(node):
            if kind := _kind(inner):
                yield name or "<module>", kind, inner, within
            if isinstance(inner, Function | ast.ClassDef):
                yield from look(inner, f"{name}.{inner.name}".lstrip("."), inner)
            else:
                yield from look(inner, name, within)

    yield from look(tree, "", tree)


def sites(tree: ast.Module) -> dict[Place, Site]:
    """All sites of a file. The second loop of a kind in a function is `while 2`; calls of one name are one site."""
    found: dict[Place, Site] = {}
    loops: dict[Place, int] = {}
    for name, kind, node, within in _places(tree):
        if loop := not isinstance(node, ast.Call):
            number = loops[name, kind] = loops.get((name, kind), 0) + 1
            kind = kind if number == 1 else f"{kind} {number}"
        line = getattr(node, "lineno", getattr(within, "lineno", 1))
        site = found.setdefault((name, kind), Site(line, [], within, loop))
        site.nodes.append(node)
    return found
