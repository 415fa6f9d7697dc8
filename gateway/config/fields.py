"""Reads from the tree of `gateway.config` each setting's path, unit, allowed values and meaning in words."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, final

from msgspec.inspect import BoolType, DictType, IntType, LiteralType, Metadata, StrType, type_info

from gateway.config.text import Key, dotted
from gateway.config.tree import Config, Unit

MOST = 2**63 - 1
"""The upper bound of settings without their own: the largest number that TOML can write."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The rule for the names of a table's sections, such as the models."""

    of: str
    """The thing that is named, with its article."""
    placeholder: str
    """Stands for such a name in a text."""
    pattern: str
    wanted: str
    """The names that `pattern` allows, in words."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of the schema. In `path`, `*` stands for a name, such as a model's."""

    path: Key
    unit: Unit
    type: Any
    """The field's annotation, without the None that leaves the value to the model."""
    default: Any
    """None if there is none."""
    computed: str = ""
    """The default in words, if `default` is only its value on this machine, or None."""
    choices: tuple[str, ...] = ()
    was_flag: bool = False
    """True and false are allowed too, for files that were written when it was a flag."""
    low: float = 0
    high: float = MOST
    above: bool = False
    """`low` itself is too low."""
    pattern: str = ""
    wanted: str = ""
    """The values that `pattern` allows, in words; of VARIABLES, the names."""

    @property
    def key(self) -> str:
        return dotted(self.path)

    @property
    def required(self) -> bool:
        return self.default is None and not self.computed

    @property
    def expected(self) -> str:
        """The values that are allowed, in words that continue "must be"."""
        match self.unit:
            case Unit.TEXT:
                return self.wanted or "a string"
            case Unit.FLAG:
                return "true or false"
            case Unit.CHOICE:
                return "one of " + ", ".join(choice or '""' for choice in self.choices)
            case Unit.COUNT:
                return f"a whole number{self._range}"
            case Unit.NUMBER:
                return f"a number{self._range}"
            case Unit.BYTES:
                return f'a number of bytes{self._range}, such as 65536, "64 KiB" or "1GiB"'
            case Unit.SECONDS:
                return f'a duration{self._range}, such as 30, "500ms" or "5min"'
            case Unit.PATHS:
                return 'a list of paths, such as ["/srv/models", "more"]'
            case Unit.TEXTS:
                return self.wanted or 'a list of strings, such as ["one", "two"]'
            case Unit.ADDRESSES:
                return f"{self.wanted}, or a list of them"
            case Unit.NETWORKS:
                return 'a list of addresses, networks and "unix", such as ["10.0.0.0/8", "::1"]'
            case Unit.COUNTS:
                return f"a list of whole numbers{self._range}, such as [4, 8]"
            case Unit.TENSORS:
                return 'a list of tensors, such as [{name = "x", datatype = "FP32", shape = [-1, 4]}]'
            case Unit.VARIABLES:
                return 'a table of strings, such as {TOKENIZERS_PARALLELISM = "false"}'
            case Unit.TABLE:
                return "a table"

    @property
    def _range(self) -> str:
        if self.above:
            return f" above {self.low:g}"
        return f", at least {self.low:g}" if self.high >= MOST else f" from {self.low:g} to {self.high:.0f}"


def settings_of(section: type[Any], prefix: Key = ()) -> Iterator[Setting]:
    """Every setting of a section and of those inside it, in its order."""
    hints = typing.get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        path, hint = (*prefix, field.name), hints[field.name]
        arguments = typing.get_args(hint)
        if _is_section(hint):
            yield from settings_of(hint, path)
        elif typing.get_origin(hint) is dict and _is_section(arguments[1]):
            yield from settings_of(arguments[1], (*path, "*"))
        elif type(None) in arguments:
            (hint,) = (one for one in arguments if one is not type(None))
            setting = _setting(section, path, hint, field)
            yield dataclasses.replace(setting, computed=setting.computed or "the model's own")
        else:
            yield _setting(section, path, hint, field)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


_UNITS: Mapping[Any, Unit] = {
    StrType: Unit.TEXT,
    BoolType: Unit.FLAG,
    LiteralType: Unit.CHOICE,
    IntType: Unit.COUNT,
    DictType: Unit.TABLE,
}
"""The units of types whose annotations need not name one."""


def _setting(section: type[Any], path: Key, hint: Any, field: dataclasses.Field[Any]) -> Setting:
    info, extra = _said(hint)
    default, computed = field.default, extra.get("computed", "")
    if computed:  # from others
        default = getattr(section(), field.name)
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
        name = getattr(field.default_factory, "__name__", "").strip("_").replace("_", " ")
        computed = f"a {name}" if isinstance(info, IntType) else ""
    number = getattr(info, "item_type", info)
    low, above, high = (getattr(number, bound, None) for bound in ("ge", "gt", "le"))
    return Setting(
        path=path,
        unit=extra.get("unit") or _UNITS[type(info)],
        type=hint,
        default=None if default is dataclasses.MISSING else default,
        computed=computed,
        choices=_choices(hint),
        was_flag=extra.get("was_flag", False),
        low=(low if above is None else above) or 0,
        high=MOST if high is None else high,
        above=above is not None,
        pattern=extra.get("pattern", ""),
        wanted=extra.get("wanted", ""),
    )


def _choices(hint: Any) -> tuple[str, ...]:
    """The values of a Literal, in their order, also inside Annotated and a union."""
    inner = typing.get_args(hint)
    return inner if typing.get_origin(hint) is Literal else next(filter(None, map(_choices, inner)), ())


def _said(hint: Any) -> tuple[Any, dict[str, Any]]:
    """msgspec's reading of an annotation: the type with its range, and the fields that msgspec leaves to us."""
    info = type_info(hint)
    return (info.type, info.extra or {}) if isinstance(info, Metadata) else (info, {})


SETTINGS: Mapping[Key, Setting] = {setting.path: setting for setting in settings_of(Config)}
"""Every setting of the schema, in its order."""

SECTIONS = frozenset(path[:n] for path in SETTINGS for n in range(1, len(path)))
OPEN = frozenset(path for path, setting in SETTINGS.items() if setting.unit in (Unit.TABLE, Unit.VARIABLES))
"""The settings that are tables whose keys the operator names: the options of a model, and environment variables."""


def _hint(path: Key) -> Any:
    """The annotation at a path of the schema."""
    found: Any = Config
    for name in path:
        found = typing.get_args(found)[1] if name == "*" else typing.get_type_hints(found, include_extras=True)[name]
    return found


def _names(table: Key) -> Names:
    _, extra = _said(typing.get_args(_hint(table))[0])
    return Names(**extra)


_TABLES = dict.fromkeys(path[:n] for path in SETTINGS for n, part in enumerate(path) if part == "*")
NAMES: Mapping[Key, Names] = {table: _names(table) for table in _TABLES}
"""The tables whose sections the operator names."""


def template(path: Key) -> Key:
    """The path in the schema: `*` in the place of each name that the operator chose."""
    found: Key = ()
    for part in path:
        found = (*found, "*" if found in NAMES else part)
    return found


def spelt(path: Key) -> str:
    """A key for a reader: each `*` in it is a word in capitals."""
    return dotted(tuple(NAMES[template(path[:n])].placeholder if part == "*" else part for n, part in enumerate(path)))


def said_of(kind: type[Any], *sections: Any) -> dict[str, Any]:
    """The values that sections set of another package's class, by the names of its fields; None sets nothing."""
    names = {field.name for field in dataclasses.fields(kind)}
    said = {field.name: getattr(section, field.name) for section in sections for field in dataclasses.fields(section)}
    return {name: value for name, value in said.items() if name in names and value is not None}


def section_help(path: Key) -> str:
    """The description of a section, with the line breaks of the source."""
    return inspect.cleandoc(_section(path).__doc__ or "")


def setting_help(path: Key) -> str:
    """The description of a setting, on one line."""
    return _helps(path[:-1]).get(path[-1], "")


def _section(path: Key) -> type[Any]:
    """The class of a section, by its path in the schema; of a table of named ones, dict."""
    hint = _hint(path)
    section: type[Any] = typing.get_origin(hint) or hint
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
