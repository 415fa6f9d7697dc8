"""What the settings mean, in the words of `gateway.config`: the docstring of a section, the string below a field."""

from __future__ import annotations

import ast
import inspect
import typing
from functools import cache
from typing import Any

from gateway.config import Config
from gateway.settings_text import Key


def section_help(path: Key) -> str:
    """What a section is about; its line breaks are those of the source."""
    return inspect.cleandoc(_section(path).__doc__ or "")


def setting_help(path: Key) -> str:
    """What a setting means, on one line."""
    return _helps(path[:-1]).get(path[-1], "")


def _section(path: Key) -> type[Any]:
    """The class of a section, by its path in the schema; of a table of named ones, dict."""
    found: Any = Config
    for name in path:
        found = typing.get_args(found)[1] if name == "*" else typing.get_type_hints(found)[name]
    section: type[Any] = typing.get_origin(found) or found
    return section


@cache
def _helps(path: Key) -> dict[str, str]:
    """The string below each field of a section, which Python itself does not keep."""
    (tree,) = ast.parse(inspect.getsource(_section(path))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found
