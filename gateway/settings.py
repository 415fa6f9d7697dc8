"""Loads the configuration: defaults, then a TOML file, the environment and flags, each value with its source."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import math
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import msgspec

from gateway.config import Config

PREFIX = "EVERYWIRE_"
SAGEMAKER_PORT = "SAGEMAKER_BIND_TO_PORT"
_MODEL = ("models", "*")
_OPTIONS = ("models", "*", "options")
_PORT = ("listen", "port")
_SHOWN = 100

Key: TypeAlias = tuple[str, ...]


class ConfigError(Exception):
    """The configuration cannot be used. The text is one line for the operator: the source, the setting, what was
    expected and what came."""


class Unit(enum.Enum):
    """What a setting's value is, and so how it may be written."""

    TEXT = "text"
    FLAG = "flag"
    CHOICE = "choice"
    COUNT = "count"
    BYTES = "bytes"
    SECONDS = "seconds"
    TABLE = "table"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of the schema. In `path`, `*` stands for a model's name."""

    path: Key
    unit: Unit
    default: Any
    """None where the setting is required."""
    computed: str = ""
    """What the default is on any machine, where `default` is what it is on this one."""
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = math.inf
    above: bool = False
    """`low` itself is too low."""
    pattern: str = ""
    wanted: str = ""
    """The values that `pattern` allows, in words."""

    @property
    def key(self) -> str:
        return dotted(self.path)

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
            case Unit.BYTES:
                return f'a number of bytes{self._range}, such as 65536, "64 KiB" or "1GiB"'
            case Unit.SECONDS:
                return f'a duration{self._range}, such as 30, "500ms" or "5min"'
            case Unit.TABLE:
                return "a table"

    @property
    def _range(self) -> str:
        if self.above:
            return f" above {self.low:g}"
        return f", at least {self.low:g}" if self.high >= _MOST else f" from {self.low:g} to {self.high:.0f}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration, and where each value that is not a default was set, by the setting's dotted key."""

    config: Config
    sources: Mapping[str, str]


# What the types of the schema do not say. A count is from 1 and a duration above 0 where nothing else is said.
_MOST = 2**63 - 1
_BYTES = frozenset({
    "limits.request_line", "limits.head", "limits.body", "limits.total_bytes", "limits.json", "limits.body_rate",
    "limits.chunk_line", "limits.chunk_extensions", "limits.trailers", "limits.read_ahead", "limits.send_buffer",
    "limits.connection_send_buffer", "limits.body_pool", "limits.unsent", "limits.part", "limits.event_headers",
    "limits.checkpoint_bytes",
    "http2.initial_window", "http2.max_window", "http2.frame_size", "websocket.part",
})  # fmt: skip
_MAY_BE_ZERO = frozenset({
    "limits.chunk_extensions", "limits.trailers", "limits.trailer_fields", "limits.write_stall",
    "limits.body_pool", "limits.unsent", "limits.descriptors_reserved", "http2.continuations",
    "websocket.ping_interval", "drain.delay", "drain.timeout",
    "models.*.queue", "models.*.timeout", "models.*.restart.intensity", "models.*.restart.backoff",
    "models.*.restart.backoff_max",
})  # fmt: skip
_RANGES = {
    "listen.port": (-1, 65535),
    "listen.tls_port": (-1, 65535),
    "listen.backlog": (1, 65535),
    # RFC 9113 section 6.5.2, and 6.9.1 for the windows.
    "http2.initial_window": (0, 2**31 - 1),
    "http2.max_window": (1, 2**31 - 1),
    "http2.frame_size": (2**14, 2**24 - 1),
    "http2.streams": (1, 2**31 - 1),
    "limits.memory_refuse": (1, 100),
    "limits.memory_reset": (1, 100),
}
_PATTERNS = {
    "listen.host": (r"\S+", 'an address or a host name ("0.0.0.0" for every IPv4 address, "::" for IPv6 too)'),
    "websocket.path": (r"/[!-~]*", "a path that begins with /"),
    "models.*.factory": (r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", '"module:attribute"'),
}
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def _settings(section: type[Any], prefix: Key) -> Iterator[Setting]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        path = (*prefix, field.name)
        hint: Any = hints[field.name]
        arguments = typing.get_args(hint)
        if _is_section(hint):
            yield from _settings(hint, path)
        elif typing.get_origin(hint) is dict and _is_section(arguments[1]):
            yield from _settings(arguments[1], (*path, "*"))
        else:
            yield _setting(path, hint, field)


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _setting(path: Key, hint: Any, field: dataclasses.Field[Any]) -> Setting:
    key = dotted(path)
    default, computed = field.default, ""
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
        computed = getattr(field.default_factory, "__name__", "").strip("_").replace("_", " ") if hint is int else ""
    low, high = _RANGES.get(key, (0 if key in _MAY_BE_ZERO else 1, _MOST))
    pattern, wanted = _PATTERNS.get(key, ("", ""))
    setting = Setting(
        path=path,
        unit=Unit.TEXT,
        default=None if default is dataclasses.MISSING else default,
        computed=computed,
        low=low,
        high=high,
        pattern=pattern,
        wanted=wanted,
    )
    if typing.get_origin(hint) is Literal:
        return dataclasses.replace(setting, unit=Unit.CHOICE, choices=typing.get_args(hint))
    if typing.get_origin(hint) is dict:
        return dataclasses.replace(setting, unit=Unit.TABLE)
    if hint is bool:
        return dataclasses.replace(setting, unit=Unit.FLAG)
    if hint is int:
        return dataclasses.replace(setting, unit=Unit.BYTES if key in _BYTES else Unit.COUNT)
    if hint is float:
        return dataclasses.replace(setting, unit=Unit.SECONDS, low=0, above=key not in _MAY_BE_ZERO)
    return setting


def dotted(path: Key) -> str:
    """The key of a setting as a file or `--set` would write it: a name with other characters is quoted."""
    return ".".join(name if name == "*" or re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name) for name in path)


SETTINGS: Mapping[Key, Setting] = {setting.path: setting for setting in _settings(Config, ())}
"""Every setting of the schema, in its order."""

_SECTIONS = {path[:n] for path in SETTINGS for n in range(1, len(path))}


def load(*, file: Path | None, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> Config:
    """The configuration: defaults, then `file` (TOML), then `environ` (`EVERYWIRE_SECTION__KEY`), then `overrides`
    (dotted keys, as in `models."my.model".capacity`).

    Text from the environment or an override is read as its setting's type. `SAGEMAKER_BIND_TO_PORT` sets
    `listen.port` where nothing else does. Raises ConfigError for a file that cannot be read, a key that is no
    setting, a value of the wrong type or out of its range, and values that contradict one another.
    """
    return resolve(file=file, environ=environ, overrides=overrides).config


def resolve(
    *,
    file: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, Any],
    flags: Mapping[str, str] | None = None,
) -> Resolved:
    """As `load`, and tells the sources too. `flags` names the flag behind an override, `--set KEY` where it does not."""
    values = _Values()
    if file is not None:
        for path, value in _leaves(_read(file), ()):
            values.put(path, value, str(file), text=False)
    for name in sorted(environ):
        if name.startswith(PREFIX) and not _service_link(name, environ[name]):
            values.put(_environment_path(name), environ[name], name, text=True)
    for key, value in overrides.items():
        source = (flags or {}).get(key, f"--set {key}")
        values.put(_override_path(key, source), value, source, text=isinstance(value, str))
    if environ.get(SAGEMAKER_PORT) and _PORT not in values:
        values.put(_PORT, environ[SAGEMAKER_PORT], SAGEMAKER_PORT, text=True)
    return values.resolved()


@final
class _Values:
    """The values set so far: a later one replaces an earlier one, an option of a model joins the others."""

    def __init__(self) -> None:
        self._set: dict[Key, tuple[Any, str]] = {}
        self._models: dict[str, str] = {}

    def __contains__(self, path: Key) -> bool:
        return path in self._set

    def put(self, path: Key, value: Any, source: str, *, text: bool) -> None:
        template = _template(path)
        if path[0] == "models" and len(path) > 1:
            self._name_model(path[1], source)
        if template in _SECTIONS:
            self._put_section(path, value, source)
        elif template in SETTINGS:
            converted = _convert(SETTINGS[template], path, value, source, text=text)
            if template == _OPTIONS:
                for name, option in converted.items():
                    self._set[(*path, name)] = option, source
            else:
                self._set[path] = converted, source
        elif template[:3] == _OPTIONS and len(path) == 4:
            self._set[path] = _toml_value(_utf8(value, path, source)) if text else value, source
        else:
            raise ConfigError(f"{_plain(source)}: {_unknown(path, template)}")

    def _name_model(self, name: str, source: str) -> None:
        if not _MODEL_NAME.fullmatch(name):
            raise ConfigError(
                f"{_plain(source)}: {_show(name)} cannot be the name of a model: "
                "1 to 128 letters, digits, '.', '_' and '-', beginning with a letter, a digit or '_'"
            )
        self._models.setdefault(name, source)

    def _put_section(self, path: Key, value: Any, source: str) -> None:
        if value != {}:
            raise ConfigError(
                f"{_plain(source)}: {dotted(path)} is a section, and cannot be {_show(value)}: set {_inside(path)}"
            )

    def resolved(self) -> Resolved:
        for name, source in self._models.items():
            if ("models", name, "factory") not in self._set:
                raise ConfigError(f"{_plain(source)}: {self._no_factory(name)}")
        tree: dict[str, Any] = {}
        for path, (value, _) in self._set.items():
            node = tree
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = value
        sources = {dotted(path): source for path, (_, source) in self._set.items()}
        config = msgspec.convert(tree, Config)
        _agree(config, sources)
        return Resolved(config=config, sources=sources)

    def _no_factory(self, name: str) -> str:
        known = [path[1] for path in self._set if path[::2] == ("models", "factory")]
        near = difflib.get_close_matches(name.lower(), [other.lower() for other in known], 1)
        hint = next((f": did you mean {dotted(('models', other))}?" for other in known if [other.lower()] == near), "")
        return f'{dotted(("models", name))} has no factory = "module:attribute"{hint}'


def _template(path: Key) -> Key:
    return ("models", "*", *path[2:]) if path[0] == "models" and len(path) > 1 else path


def _inside(path: Key) -> str:
    if path == ("models",):
        return 'models.NAME.factory = "module:attribute"'
    first = next(s.path for s in SETTINGS.values() if s.path[: len(path)] == _template(path))
    return f"{dotted((*path, *first[len(path) :]))} and so on"


def _unknown(path: Key, template: Key) -> str:
    # A model's own name is right by definition; only what follows it can be misspelt.
    named = template[:2] == _MODEL
    known = [("models", path[1], *key[2:]) if named and key[:2] == _MODEL else key for key in SETTINGS]
    near = _nearest(path, known)
    hint = f": did you mean {dotted(near).replace('*', 'NAME')}?" if near else "; `everywire config` prints all there are"
    return f"{_show(dotted(path), quoted=False)} is not a setting{hint}"


def _nearest(path: Key, known: list[Key]) -> Key | None:
    """The setting that was meant: misspelt in its section, else in a misspelt section, else of another section."""
    siblings = {key[-1]: key for key in known if key[:-1] == path[:-1]}
    if near := difflib.get_close_matches(path[-1], siblings, 1):
        return siblings[near[0]]
    everywhere = {} if siblings else {dotted(key): key for key in known}
    if near := difflib.get_close_matches(dotted(path), everywhere, 1, 0.75):
        return everywhere[near[0]]
    return next((key for key in known if key[-1] == path[-1]), None)


# ---- sources ----


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{_plain(str(file))}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_plain(str(file))}: is not UTF-8 text (at byte {error.start})") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{_plain(str(file))}: is not TOML: {error}") from None


def _leaves(table: Mapping[str, Any], prefix: Key) -> Iterator[tuple[Key, Any]]:
    """Each value with its path; the tables inside a model's options are values."""
    for name, value in table.items():
        path = (*prefix, name)
        if isinstance(value, dict) and value and _template(path)[:-1] != _OPTIONS:
            yield from _leaves(value, path)
        else:
            yield path, value


def _environment_path(name: str) -> Key:
    """EVERYWIRE_LIMITS__HEAD is limits.head. Names of models and of their options are taken as they are written."""
    first, *rest = name.removeprefix(PREFIX).split("__")
    section = first.lower()
    if not rest:
        spelt = {f"{PREFIX}{'__'.join(path).upper()}" for path in SETTINGS}
        near = [known for known in sorted(spelt) if known.replace("__", "_") == name.upper()]
        hint = f"did you mean {near[0]}?" if near else f"settings are named {PREFIX}SECTION__KEY"
        raise ConfigError(f"{_plain(name)} is not a setting: {hint}")
    if section != "models":
        return (section, *(part.lower() for part in rest))
    if len(rest) > 2 and rest[1].lower() == "options":
        return (section, rest[0], "options", *rest[2:])
    return (section, rest[0], *(part.lower() for part in rest[1:]))


def _service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set this: a Service named everywire puts EVERYWIRE_PORT=tcp://... and the like into each pod."""
    return "__" not in name and bool(
        re.search(r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$", name)
        or (name.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", value))
    )


def _override_path(key: str, source: str) -> Key:
    node: Any
    try:
        node = tomllib.loads(f"{key} = 0")
    except (tomllib.TOMLDecodeError, RecursionError):
        node = {}
    path: list[str] = []
    while isinstance(node, dict) and len(node) == 1:
        ((name, node),) = node.items()
        path.append(name)
    if isinstance(node, dict):
        raise ConfigError(f"{_plain(source)}: {_show(key)} is not a key such as limits.head")
    return tuple(path)


# ---- values ----


def _convert(setting: Setting, path: Key, value: Any, source: str, *, text: bool) -> Any:
    try:
        converted = _typed(setting, _utf8(value, path, source) if isinstance(value, str) else value, text=text)
    except (ValueError, OverflowError, msgspec.ValidationError):
        converted = None
    if converted is None or not _in_range(setting, converted):
        raise ConfigError(f"{_plain(source)}: {dotted(path)} must be {setting.expected}, not {_show(value)}")
    return converted


def _typed(setting: Setting, value: Any, *, text: bool) -> Any:
    match setting.unit:
        case Unit.BYTES:
            return parse_size(value) if isinstance(value, str) else msgspec.convert(value, int)
        case Unit.SECONDS:
            # float() first: msgspec 0.20 breaks on an integer that no float can hold.
            number = float(value) if type(value) is int else value
            return parse_duration(value) if isinstance(value, str) else msgspec.convert(number, float)
        case Unit.COUNT:
            return msgspec.convert(value, int, strict=not text)
        case Unit.FLAG:
            return msgspec.convert(value, bool, strict=not text)
        case Unit.TABLE:
            return msgspec.convert(_toml_value(value) if text else value, dict[str, Any])
        case Unit.TEXT | Unit.CHOICE:
            return msgspec.convert(value, str)


def _in_range(setting: Setting, value: Any) -> bool:
    match setting.unit:
        case Unit.COUNT | Unit.BYTES | Unit.SECONDS:
            if setting.above and value <= setting.low:
                return False
            return bool(setting.low <= value <= setting.high and math.isfinite(value))
        case Unit.CHOICE:
            return value in setting.choices
        case Unit.TEXT:
            return not setting.pattern or re.fullmatch(setting.pattern, value) is not None
        case _:
            return True


_SCALES = {
    "": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_DURATIONS = {"": Decimal(1), "ms": Decimal("0.001"), "s": Decimal(1), "min": Decimal(60), "h": Decimal(3600)}
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes from "65536", "64 KiB" (1024) or "64 kB" (1000); ValueError for anything else, and for part of a byte."""
    scaled = _scaled(text, {unit: Decimal(scale) for unit, scale in _SCALES.items()})
    if scaled != int(scaled):
        raise ValueError("not a whole number of bytes")
    return int(scaled)


def parse_duration(text: str) -> float:
    """Seconds from "30", "30s", "500ms", "5min" or "1h"; ValueError for anything else."""
    return float(_scaled(text, _DURATIONS))


def _scaled(text: str, scales: Mapping[str, Decimal]) -> Decimal:
    match = _QUANTITY.fullmatch(text.strip())
    scale = scales.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ValueError("not a number with a unit")
    return Decimal(match[1]) * scale


def _toml_value(text: str) -> Any:
    """What TOML would read; the text itself where TOML reads nothing, so that a word needs no quotes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return document["value"] if len(document) == 1 else text


def _utf8(value: str, path: Key, source: str) -> str:
    # The environment and the command line hand over bytes that are not UTF-8 as lone surrogates.
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{_plain(source)}: {dotted(path)} must be UTF-8 text, not {_show(value)}")
    return value


def _plain(source: str) -> str:
    return _show(source, quoted=False)


def _show(value: Any, *, quoted: bool = True) -> str:
    """A value in an error: on one line, and of bounded length."""
    if isinstance(value, bool):
        return "true" if value else "false"
    shown = ascii(value) if quoted or not str(value).isprintable() else str(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


# ---- agreement ----


def _agree(config: Config, sources: Mapping[str, str]) -> None:
    """Raises ConfigError where two values, each right alone, contradict one another."""
    listen, tls, http2, limits = config.listen, config.tls, config.http2, config.limits
    secure = tls.dev or tls.cert != ""

    def where(key: str) -> str:
        return f"{key} ({_plain(sources[key])})" if key in sources else key

    if (tls.cert == "") != (tls.key == ""):
        present, absent = ("tls.cert", "tls.key") if tls.cert else ("tls.key", "tls.cert")
        raise ConfigError(f"{where(present)} is set and {absent} is not: a certificate needs its key")
    if tls.dev and tls.cert:
        raise ConfigError(f"{where('tls.dev')} and {where('tls.cert')} are both set: choose one certificate")
    if secure and listen.port == listen.tls_port > 0:
        raise ConfigError(
            f"{where('listen.port')} and {where('listen.tls_port')} are both {listen.port}: TLS needs a port of its own"
        )
    if listen.port == -1 and not (secure and listen.tls_port != -1):
        raise ConfigError(f"{where('listen.port')} is -1 and TLS opens no port either: nothing would be served")
    ordered: list[tuple[str, float, str, float]] = [
        ("http2.initial_window", http2.initial_window, "http2.max_window", http2.max_window),
        ("limits.send_buffer", limits.send_buffer, "limits.connection_send_buffer", limits.connection_send_buffer),
    ]
    for name, model in config.models.items():
        restart = dotted(("models", name, "restart"))
        ordered.append((f"{restart}.backoff", model.restart.backoff, f"{restart}.backoff_max", model.restart.backoff_max))
    for lower, low, upper, high in ordered:
        if low > high:
            raise ConfigError(f"{where(lower)} is {low}, more than {where(upper)}, which is {high}")


# ---- printing ----


def to_toml(resolved: Resolved) -> str:
    """The whole configuration as TOML that `load` reads back to the same, each value that was set with its source."""
    sections: dict[Key, list[str]] = {}
    for path in _paths(resolved.config):
        value: Any = resolved.config
        for name in path:
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        setting = SETTINGS.get(_template(path))
        source = resolved.sources.get(dotted(path))
        note = f"  # {_plain(source)}" if source else ""
        line = f"{dotted(path[-1:])} = {written(setting.unit, value) if setting else _toml(value)}{note}"
        sections.setdefault(path[:-1], []).append(line)
    return "\n".join("\n".join([f"[{dotted(section)}]", *lines, ""]) for section, lines in sections.items())


def _paths(config: Config) -> Iterator[Key]:
    for path in SETTINGS:
        if path[:2] != _MODEL:
            yield path
    for name, model in config.models.items():
        for path in SETTINGS:
            if path == _OPTIONS:
                yield from (("models", name, "options", option) for option in model.options)
            elif path[:2] == _MODEL:
                yield ("models", name, *path[2:])


def written(unit: Unit, value: Any) -> str:
    """A value as TOML, a size with the largest binary unit that divides it."""
    if unit is Unit.BYTES and value > 0:
        for name in ("GiB", "MiB", "KiB"):
            if value % _SCALES[name.lower()] == 0:
                return f'"{value // _SCALES[name.lower()]} {name}"'
    return _toml(value)


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _string(value)
        case list():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            return "{" + ", ".join(f"{dotted((name,))} = {_toml(item)}" for name, item in value.items()) + "}"
        case int() | float():
            return repr(value)
        case _:
            return str(value.isoformat())


def _string(text: str) -> str:
    # A JSON string is a TOML basic string, but for U+007F, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
