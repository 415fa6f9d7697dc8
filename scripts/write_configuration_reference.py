"""Writes docs/reference/configuration*.md and the JSON schema: `python scripts/write_configuration_reference.py`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "docs" / "reference" / "configuration.md"
SCHEMA = ROOT / "docs" / "reference" / "everywire.schema.json"

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from gateway.config.environment import (  # noqa: E402
    BIND_TO_PORT,
    CONTAINER_DEFAULTS,
    MODEL_FOLDER,
    MODEL_FOLDERS,
    PLATFORM_DEFAULTS,
    SAFE_PORT_RANGE,
    VARIABLES,
)
from gateway.config.fields import SETTINGS, Setting, section_help, setting_help, spelt  # noqa: E402
from gateway.config.load import PREFIX  # noqa: E402
from gateway.config.schema import json_schema  # noqa: E402
from gateway.config.show import written  # noqa: E402
from gateway.config.text import Key  # noqa: E402
from gateway.config.tree import Unit  # noqa: E402


@dataclass(frozen=True)
class Part:
    """One page of settings: the tables of the configuration whose names begin with one of `tables`."""

    name: str
    title: str
    about: str
    tables: tuple[str, ...]


PARTS = (
    Part(
        "configuration-listeners",
        "Settings: listeners, TLS and access",
        "Addresses, ports, certificates, and who may call.",
        ("listen", "tls", "access"),
    ),
    Part(
        "configuration-limits",
        "Settings: limits and times",
        "Bounds on sizes, memory and waits, deadlines of calls, and the shutdown.",
        ("limits", "admission", "drain"),
    ),
    Part(
        "configuration-wires",
        "Settings: HTTP/2, WebSocket and event streams",
        "Bounds of these wires, and their [flood limits](floods.md). `[limits]` has the bounds of all wires.",
        ("http2", "websocket", "sse"),
    ),
    Part(
        "configuration-models",
        "Settings: models and folders",
        "Models, their batches, restarts and processes, and the folders that models are loaded from.",
        ("models", "repository"),
    ),
    Part(
        "configuration-dialects",
        "Settings: dialects",
        "The APIs that clients speak: LMI, OpenAI, v2, and SageMaker with its endpoints.",
        ("lmi", "openai", "v2", "bidi", "sagemaker", "endpoints"),
    ),
    Part(
        "configuration-operating",
        "Settings: operator plane, metrics, log and traces",
        "Ports and outputs for those who run the gateway.",
        ("operator", "metrics", "log", "tracing"),
    ),
)

_MOST = 22  # settings in a line of the index
_COMMENT = "<!-- Written by scripts/write_configuration_reference.py from gateway/config/tree.py. Do not edit. -->"
_VARIABLES = "\n".join(f"- `{name}` sets `{spelt(path)}`." for name, path in VARIABLES.items())
_PLATFORM = " and ".join(f"`{spelt(path)}` is `{value}`" for path, value in PLATFORM_DEFAULTS.items())
_CONTAINER = " and ".join(f"`{spelt(path)}` is `{value}`" for path, value in CONTAINER_DEFAULTS.items())
_INDEX = f"""\
{_COMMENT}

# Configuration

A setting has one name in four places. A later place overrides an earlier one:

| place | example: `limits.head` |
| --- | --- |
| a TOML file (`--config FILE`) | `head = "64 KiB"` under `[limits]` |
| the environment | `{PREFIX}LIMITS__HEAD=64KiB` |
| the command line | `--set limits.head=64KiB` |
| a program | `Config(limits=LimitsConfig(head=65536))` |

Some settings have their own flag, such as `--port`: `everywire --help` lists them.

An unknown setting, a value of the wrong type and a value out of range stop the program with a message that names the place
and the setting. `everywire config check` lists all mistakes. `everywire config show` prints the values in force and the
source of each: [Configure the gateway](../howto/configure.md). `everywire config schema` prints the
[JSON schema](everywire.schema.json), for editors.

## How values are written

| value | form |
| --- | --- |
| size | a whole number of bytes, or a string: `"64 KiB"`, `"1GiB"` (powers of 1024), `"64 kB"`, `"1GB"` (of 1000) |
| duration | a number of seconds, or a string: `"500ms"`, `"30s"`, `"5min"`, `"1h"` |
| list of paths | a TOML array of strings; in the environment and with `--set` also `/one:/two` |
| other list | a TOML array everywhere |
| file name | relative names are relative to the working directory |

- The environment's section and key names may be in upper or lower case. Names that you chose are taken as written: models,
  their options, variables of their processes, endpoints and variants.
- In the environment and with `--set`, a model's option is read as TOML if it is valid TOML, else as text. A variable of its
  processes is always text.
- An empty variable counts as unset.

## In a SageMaker container

SageMaker's variables set values that no other place sets:

{_VARIABLES}
- If `{BIND_TO_PORT}` is set, {_PLATFORM}: SageMaker is then the only caller.
- `{SAFE_PORT_RANGE}`, such as `9000-9999` (inclusive), sets nothing: every open port besides `listen.port` must be in it.
- If one of them is set, or a folder `{MODEL_FOLDER}` or `{MODEL_FOLDERS}` exists, {_CONTAINER}.
  SageMaker calls from outside the container, and kills it 30 s after SIGTERM.

## All settings

Each table, the page that explains it, and its settings.

"""


def pages() -> dict[Path, str]:
    """Each page by its file: the index, and the settings by their tables."""
    found = {INDEX: _INDEX + "\n".join(_entry_of_index(part, path) for part in PARTS for path in _sections(part))}
    for part in PARTS:
        head = f"{_COMMENT}\n\n# {part.title}\n\n{part.about} [Configuration](configuration.md) lists all settings.\n"
        found[_file(part)] = "\n".join([head, *_tables(part)])
    return found


def schema() -> str:
    """The JSON schema, as `everywire config schema` prints it."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _file(part: Part) -> Path:
    return INDEX.with_name(f"{part.name}.md")


def _sections(part: Part) -> list[Key]:
    """The tables of a page, in the order of its list."""
    sections = dict.fromkeys(setting.path[:-1] for setting in SETTINGS.values())
    return [path for table in part.tables for path in sections if path[0] == table]


def _entry_of_index(part: Part, path: Key) -> str:
    """The heading of a table, a link to its page, and the names of its settings, in lines that are not too long."""
    names = [f"`{setting.path[-1]}`" for setting in SETTINGS.values() if setting.path[:-1] == path]
    lines = [", ".join(names[n : n + _MOST]) for n in range(0, len(names), _MOST)]
    link = f"[{part.title}]({part.name}.md#{_anchor(path)}):"
    return "\n".join([f"### [{spelt(path)}]", "", link, "", *(f"- {line}" for line in lines), ""])


def _anchor(path: Key) -> str:
    return re.sub(r"[^\w-]", "", spelt(path).lower())


def _tables(part: Part) -> list[str]:
    """The tables of a page. One with the rows of an earlier one only links it."""
    found: dict[tuple[str, ...], Key] = {}
    texts = []
    for path in _sections(part):
        rows = tuple(_row(setting) for setting in SETTINGS.values() if setting.path[:-1] == path)
        first = found.setdefault(rows, path)
        table = "\n".join(["| setting | default | values | meaning |", "| --- | --- | --- | --- |", *rows])
        same = f"The settings and defaults are those of [`[{spelt(first)}]`](#{_anchor(first)})."
        texts.append("\n".join([f"## [{spelt(path)}]", "", section_help(path), "", table if first == path else same, ""]))
    return texts


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
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
    SCHEMA.write_text(schema(), encoding="utf-8")
