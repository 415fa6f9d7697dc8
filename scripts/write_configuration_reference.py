"""Writes docs/reference/configuration.md from the schema: `python scripts/write_configuration_reference.py`."""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "configuration.md"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from gateway.config import Config  # noqa: E402
from gateway.settings import PREFIX, SAGEMAKER_PORT, SETTINGS, Setting, Unit, written  # noqa: E402

_INTRODUCTION = f"""\
<!-- Written by scripts/write_configuration_reference.py from gateway/config.py. Do not edit. -->

# Configuration

Every setting, with its default. A setting has one name in four places; a later place overrides an earlier one:

| place | `limits.head` is written |
| --- | --- |
| a TOML file (`--config FILE`) | `head = "64 KiB"` under `[limits]` |
| the environment | `{PREFIX}LIMITS__HEAD=64KiB` |
| the command line | `--set limits.head=64KiB` |
| a program | `Config(limits=LimitsConfig(head=65536))` |

Some settings have a flag of their own, such as `--port`: `everywire --help` lists them. `{SAGEMAKER_PORT}` sets
`listen.port` where nothing else does.

- **Sizes** are bytes: a whole number, or a string with a unit, `"64 KiB"`, `"1GiB"` (powers of 1024) or `"64 kB"`,
  `"1GB"` (powers of 1000).
- **Durations** are seconds: a number, or a string with a unit, `"500ms"`, `"30s"`, `"5min"` or `"1h"`.
- The environment's sections and keys are in capitals or not; the names of models and of their options are taken as
  written. There and with `--set`, a model's option is read as TOML where it is TOML, else as the text itself.
- Relative file names are relative to the working directory.

A name that is no setting, a value of another type and a value out of its range stop the program, with the place and the
name in the message. `everywire config` prints what is in force, and where each value was set.
"""


def page() -> str:
    """The whole page."""
    sections = dict.fromkeys(setting.path[:-1] for setting in SETTINGS.values())
    return "\n".join([_INTRODUCTION, *map(_section, sections)])


def _section(path: tuple[str, ...]) -> str:
    cls: Any = Config
    for name in path:
        cls = typing.get_args(cls)[1] if name == "*" else typing.get_type_hints(cls)[name]
    helps = _helps(cls)
    rows = [_row(setting, helps) for setting in SETTINGS.values() if setting.path[:-1] == path]
    heading = f"## [{'.'.join(path).replace('*', 'NAME')}]"
    table = ["| setting | default | values | meaning |", "| --- | --- | --- | --- |", *rows]
    return "\n".join([heading, "", inspect.cleandoc(cls.__doc__), "", *table, ""])


def _row(setting: Setting, helps: dict[str, str]) -> str:
    name = setting.path[-1]
    values = setting.expected.partition(", such as")[0].replace('""', "empty").replace("|", "\\|")
    return f"| `{name}` | {_default(setting)} | {values} | {helps.get(name, '')} |"


def _default(setting: Setting) -> str:
    if setting.computed:
        return f"a {setting.computed}"
    if setting.default is None:
        return "required"
    if setting.unit is Unit.SECONDS:
        return f"`{setting.default:g}`"
    if setting.default in ("", {}):
        return "empty"
    return f"`{written(setting.unit, setting.default)}`"


def _helps(cls: type[Any]) -> dict[str, str]:
    """The string below each field, which Python itself does not keep."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
