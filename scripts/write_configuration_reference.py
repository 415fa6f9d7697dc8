"""Writes docs/reference/configuration.md and its JSON schema: `python scripts/write_configuration_reference.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "configuration.md"
SCHEMA = ROOT / "docs" / "reference" / "everywire.schema.json"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from gateway.config.environment import CONTAINER_DEFAULTS, MODEL_FOLDER, MODEL_FOLDERS, SAFE_PORT_RANGE, VARIABLES  # noqa: E402
from gateway.config.fields import SETTINGS, Setting, section_help, setting_help, spelt  # noqa: E402
from gateway.config.load import PREFIX  # noqa: E402
from gateway.config.schema import json_schema  # noqa: E402
from gateway.config.show import written  # noqa: E402
from gateway.config.tree import Unit  # noqa: E402

_VARIABLES = "\n".join(f"- `{name}` sets `{spelt(path)}`." for name, path in VARIABLES.items())
_CONTAINER = " and ".join(f"`{spelt(path)}` is `{value}`" for path, value in CONTAINER_DEFAULTS.items())
_INTRODUCTION = f"""\
<!-- Written by scripts/write_configuration_reference.py from gateway/config/tree.py. Do not edit. -->

# Configuration

Every setting, with its default. A setting has one name in four places; a later place overrides an earlier one:

| place | `limits.head` is written |
| --- | --- |
| a TOML file (`--config FILE`) | `head = "64 KiB"` under `[limits]` |
| the environment | `{PREFIX}LIMITS__HEAD=64KiB` |
| the command line | `--set limits.head=64KiB` |
| a program | `Config(limits=LimitsConfig(head=65536))` |

Some settings have a flag of their own, such as `--port`: `everywire --help` lists them.

- **Sizes** are bytes: a whole number, or a string with a unit, `"64 KiB"`, `"1GiB"` (powers of 1024) or `"64 kB"`,
  `"1GB"` (powers of 1000).
- **Durations** are seconds: a number, or a string with a unit, `"500ms"`, `"30s"`, `"5min"` or `"1h"`.
- **Lists of paths** are arrays of strings; in the environment and with `--set` also `/one:/two`.
- **Other lists** are TOML's everywhere.
- The environment's sections and keys are in capitals or not; the names of models, of their options and of their processes'
  variables, of endpoints and of variants are taken as written. There and with `--set`, a model's option is read as TOML
  where it is TOML, else as the text itself. A variable of its processes is always the text itself.
- Relative file names are relative to the working directory.

A name that is no setting, a value of another type and a value out of its range stop the program, with the place and the
name in the message. `everywire config check` names all that is wrong, and `everywire config show` prints what is in force,
and where each value was set: [Configure the gateway](../howto/configure.md). The same settings as a
[JSON schema](everywire.schema.json), for editors, are printed by `everywire config schema`.

## In a SageMaker container

The variables that SageMaker gives to a container set what nothing else sets:

{_VARIABLES}
- `{SAFE_PORT_RANGE}`, such as `9000-9999` with both ends, sets nothing: every port that is opened beside
  `listen.port` must be in it.
- If one of them is set, or a folder `{MODEL_FOLDER}` or `{MODEL_FOLDERS}` exists, {_CONTAINER}: SageMaker calls
  from outside the container, and kills it 30 s after SIGTERM.

An empty variable is one that is not set.
"""


def page() -> str:
    """The whole page."""
    sections = dict.fromkeys(setting.path[:-1] for setting in SETTINGS.values())
    return "\n".join([_INTRODUCTION, *map(_section, sections)])


def schema() -> str:
    """The whole file beside it, as `everywire config schema` prints it."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _section(path: tuple[str, ...]) -> str:
    rows = [_row(setting) for setting in SETTINGS.values() if setting.path[:-1] == path]
    table = ["| setting | default | values | meaning |", "| --- | --- | --- | --- |", *rows]
    return "\n".join([f"## [{spelt(path)}]", "", section_help(path), "", *table, ""])


def _row(setting: Setting) -> str:
    name = setting.path[-1]
    values = setting.expected.partition(", such as")[0].replace('""', "empty").replace("|", "\\|")
    return f"| `{name}` | {_default(setting)} | {values} | {setting_help(setting.path)} |"


def _default(setting: Setting) -> str:
    if setting.computed:
        return setting.computed
    if setting.default is None:
        return "required"
    if setting.unit in (Unit.SECONDS, Unit.NUMBER):
        return f"`{setting.default:g}`"
    if setting.default in ("", {}, ()):
        return "empty"
    return f"`{written(setting.unit, setting.default)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
