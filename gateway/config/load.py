"""Loads the configuration: defaults, then a TOML file, the environment and flags, each value with its source."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import msgspec

from gateway.addresses import is_network
from gateway.config.agreement import contradictions, open_ports
from gateway.config.environment import container_defaults, option_defaults, unserved_options, wrong_ports
from gateway.config.exposure import wrong_access
from gateway.config.fields import MOST, NAMES, OPEN, SECTIONS, SETTINGS, Setting, spelt, template
from gateway.config.problem import ConfigError, Problem
from gateway.config.text import Key, dotted, parse_duration, parse_size, plain, read_toml, show, toml_value, without_secrets
from gateway.config.tree import Config, ModelConfig, TensorConfig, Unit

# A statement is read again with each line that it goes on for; one that is longer is not worth that.
_LONGEST = 200
_FILE_BYTES = 1024**2


def lines_of(text: str) -> dict[Key, int]:
    """The line, counted from 1, on which each key and each table of a TOML document first appears. Lines after a value of
    more than 200 lines are unknown."""
    found: dict[Key, int] = {}
    table: Key = ()
    statement: list[str] = []
    first = 1
    for number, line in enumerate(text.split("\n"), 1):
        if not statement:
            first = number
        statement.append(line)
        try:
            said = tomllib.loads("\n".join(statement) + "\n")
        except tomllib.TOMLDecodeError:  # it goes on in the next line
            if len(statement) > _LONGEST:
                break
            continue
        if statement[0].lstrip().startswith("["):
            *_, table = _keys(said, ())
            found.setdefault(table, first)
        else:
            for path in _keys(said, table):
                found.setdefault(path, first)
        statement = []
    return found


def _keys(value: dict[str, Any], prefix: Key) -> Iterator[Key]:
    for name, inner in value.items():
        path = (*prefix, name)
        yield path
        if isinstance(inner, dict):
            yield from _keys(inner, path)


PREFIX = "EVERYWIRE_"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration, and the source of each value that is not a default, by the setting's dotted key."""

    config: Config
    sources: Mapping[str, str]


def load(*, file: Path | None, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> Config:
    """The configuration: defaults, then `file` (TOML), then `environ` (`EVERYWIRE_SECTION__KEY`), then `overrides` (dotted
    keys, as in `models."my.model".capacity`).

    Text from the environment or an override is read as its setting's type. The variables of a SageMaker container, and LMI's
    OPTION_*, set only values that none of these sets. Raises ConfigError for a file that cannot be read, an unknown key, a
    value of the wrong type or out of its range, and values that contradict one another.
    """
    return resolve(file=file, environ=environ, overrides=overrides).config


def resolve(
    *,
    file: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, Any],
    flags: Mapping[str, str] | None = None,
) -> Resolved:
    """As `load`, and tells the sources too. `flags` names the flag behind an override, `--set KEY` where it does not.

    Every value is looked at before ConfigError is raised, which then has all problems; what is missing is looked for
    outside of what is wrong, and contradictions where nothing else is.
    """
    values = _Values()
    if file is not None:
        with values.kept():
            values.read(file)
    for name in sorted(environ):
        if name.startswith(PREFIX) and not _service_link(name, environ[name]):
            with values.kept():
                values.put(_environment_path(name), environ[name], name, text=True)
    for key, value in overrides.items():
        source = (flags or {}).get(key, f"--set {key}")
        with values.kept():
            values.put(_override_path(key, source), value, source, text=isinstance(value, str))
    values.wrong.extend(unserved_options(environ))
    for path, value, name in (*container_defaults(environ), *option_defaults(environ)):
        if path not in values:
            with values.kept():
                values.put(path, value, name, text=True)
    values.wrong.extend(values.missing())
    if values.wrong:
        raise ConfigError(*values.wrong)
    resolved = values.resolved()
    disagreement = [
        *contradictions(resolved.config, values.where),
        *wrong_ports(environ, open_ports(resolved.config), values.where),
        *wrong_access(resolved.config, environ, values.where),
    ]
    if disagreement:
        raise ConfigError(*(replace(p, where=p.where or values.source(p.key)) for p in disagreement))
    return resolved


# The section of which a model.toml has a part alone: what whoever makes a model knows of it.
_PROCESS = "process"
_PROCESS_KEYS = (
    "instances", "devices", "cpu_threads", "loop", "memory_limit", "hang_timeout", "environment", "python",
)  # fmt: skip


def _is_the_folders(key: Key) -> bool:
    return key[0] != _PROCESS or key[1:2] == () or key[1] in _PROCESS_KEYS


def model_values(table: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The values of a model's table, whose keys are those of `[models.NAME]`, checked by the same rules: fields of a
    ModelConfig, but of `process` only the fields that the table sets. ConfigError names `source` and the key."""
    tree: dict[str, Any] = {"factory": ""}
    for path, value in _leaves(table, ("models", "NAME")):
        key, shape = path[2:], template(path)
        if shape in SETTINGS and not _is_the_folders(key):
            said = show(dotted(key), quoted=False)
            raise ConfigError(f"{plain(source)}: {said} cannot be set here: only in [repository.process]")
        if shape in SETTINGS:
            _branch(tree, key[:-1])[key[-1]] = _convert(SETTINGS[shape], key, value, source, text=False)
        elif shape[:-1] in OPEN:
            _branch(tree, key[:-1])[key[-1]] = _entry(SETTINGS[shape[:-1]], key, value, source, text=False)
        elif shape not in SECTIONS:
            names = [other[2 : len(path)] for other in SETTINGS if other[: len(path) - 1] == shape[:-1]]
            known = {dotted(other): None for other in names if _is_the_folders(other)}
            near = difflib.get_close_matches(dotted(key).lower(), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ConfigError(f"{plain(source)}: {show(dotted(key), quoted=False)} is not a key of it; {hint}")
        elif value != {}:
            raise ConfigError(f"{plain(source)}: {dotted(key)} must be a table, not {show(value)}")
    config = msgspec.convert(tree, ModelConfig)
    values = {name: getattr(config, name) for name in table}
    if _PROCESS in values:
        values[_PROCESS] = {name: getattr(config.process, name) for name in table[_PROCESS]}
    return values


@final
class _Values:
    """The values set so far: a later one replaces an earlier one, an option of a model joins the others."""

    def __init__(self) -> None:
        self._set: dict[Key, tuple[Any, str]] = {}
        self._names: dict[Key, str] = {}
        self._broken: list[Key] = []
        self.wrong: list[Problem] = []

    def __contains__(self, path: Key) -> bool:
        return path in self._set or path in self._broken

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps what is wrong inside, so that the rest is looked at too."""
        try:
            yield
        except ConfigError as error:
            self.wrong.extend(error.problems)

    def read(self, file: Path) -> None:
        """Puts what a TOML file says."""
        table, lines = _read(file)
        for path, value in _leaves(table, ()):
            source = f"{file}:{lines[path]}" if path in lines else str(file)
            with self.kept():
                self.put(path, value, source, text=False)

    def put(self, path: Key, value: Any, source: str, *, text: bool) -> None:
        self._broken.append(path)
        shape = template(path)
        self._name(path, shape, source)
        if shape in SECTIONS:
            self._put_section(path, value, source)
        elif shape in OPEN:
            setting = SETTINGS[shape]
            for name, item in _convert(setting, path, value, source, text=text).items():
                self._set[(*path, name)] = _entry(setting, (*path, name), item, source, text=False), source
        elif shape in SETTINGS:
            self._set[path] = _convert(SETTINGS[shape], path, value, source, text=text), source
        elif shape[:-1] in OPEN:
            self._set[path] = _entry(SETTINGS[shape[:-1]], path, value, source, text=text), source
        else:
            raise ConfigError(_unknown(path, shape, source))
        self._broken.pop()

    def _name(self, path: Key, shape: Key, source: str) -> None:
        """Keeps the names that the operator chose, each with where it came first: a section may hold no value."""
        for n, name in enumerate(path):
            names = NAMES.get(shape[:n])
            if names is None:
                continue
            if not re.fullmatch(names.pattern, name):
                raise ConfigError(
                    Problem(
                        text=f"{plain(source)}: {show(name)} cannot be the name of {names.of}: {names.wanted}",
                        where=source,
                        key=dotted(path[: n + 1]),
                        expected=names.wanted,
                        got=show(name),
                    )
                )
            self._names.setdefault(path[: n + 1], source)

    def _put_section(self, path: Key, value: Any, source: str) -> None:
        if value != {}:
            key, got, inside = dotted(path), show(without_secrets(path, value)), _inside(path)
            text = f"{plain(source)}: {key} is a section, and cannot be {got}: set {inside} and so on"
            raise ConfigError(Problem(text=text, where=source, key=key, expected="a section", got=got, suggestion=inside))

    def where(self, key: str) -> str:
        """A key with the source that set it, where one did."""
        source = self.source(key)
        return f"{key} ({plain(source)})" if source else key

    def source(self, key: str) -> str:
        """The source that set a key, or named a section first; empty where none did."""
        sources = {dotted(path): source for path, source in self._names.items()} | self._sources()
        return sources.get(key, "")

    def _sources(self) -> dict[str, str]:
        return {dotted(path): source for path, (_, source) in self._set.items()}

    def missing(self) -> Iterator[Problem]:
        """Required settings that are missing in a section that somebody named, unless something inside the section is
        wrong."""
        for path, source in self._names.items():
            if any(broken[: len(path)] == path for broken in self._broken):
                continue
            for setting in SETTINGS.values():
                if setting.required and setting.path[:-1] == template(path) and (*path, setting.path[-1]) not in self._set:
                    yield self._missing(path, setting, source)

    def _missing(self, path: Key, setting: Setting, source: str) -> Problem:
        """The environment is often written in capitals, which makes a new name of a known one."""
        name = setting.path[-1]
        known = {
            _chosen(other): other
            for other in self._names
            if template(other) == setting.path[:-1] and (*other, name) in self._set
        }
        near = [dotted(known[chosen]) for chosen in difflib.get_close_matches(_chosen(path), known, 1)]
        hint = f": did you mean {near[0]}?" if near else ""
        text = f"{plain(source)}: {dotted(path)} has no {name}, which must be {setting.expected}{hint}"
        key = dotted((*path, name))
        return Problem(text=text, where=source, key=key, expected=setting.expected, suggestion="".join(near))

    def resolved(self) -> Resolved:
        """The configuration. Nothing is wrong and nothing missing."""
        tree: dict[str, Any] = {}
        for path in self._names:
            _branch(tree, path)
        for path, (value, _) in self._set.items():
            _branch(tree, path[:-1])[path[-1]] = value
        return Resolved(config=msgspec.convert(tree, Config), sources=self._sources())


def _branch(tree: dict[str, Any], path: Key) -> dict[str, Any]:
    for part in path:
        tree = tree.setdefault(part, {})
    return tree


def _chosen(path: Key) -> str:
    return ".".join(part for part, shape in zip(path, template(path), strict=True) if shape == "*").lower()


def _inside(path: Key) -> str:
    shape = template(path)
    first = next(setting.path for setting in SETTINGS.values() if setting.path[: len(path)] == shape)
    return spelt((*path, *first[len(path) :]))


def _unknown(path: Key, shape: Key, source: str) -> Problem:
    # A name that the operator chose is right by definition; only what is around it can be misspelt.
    known = [
        tuple(path[n] if part == "*" and key[: n + 1] == shape[: n + 1] else part for n, part in enumerate(key))
        for key in SETTINGS
    ]
    near = _nearest(path, known)
    hint = f": did you mean {spelt(near)}?" if near else "; `everywire config` prints all there are"
    key = show(dotted(path), quoted=False)
    text = f"{plain(source)}: {key} is not a setting{hint}"
    return Problem(text=text, where=source, key=key, expected="a setting", suggestion=spelt(near) if near else "")


def _nearest(path: Key, known: list[Key]) -> Key | None:
    """The setting that was meant: misspelt in its section, else in a misspelt section, else the one of another section whose
    words it has, in whatever order and however they are joined: `tls.port` is `listen.tls_port`."""
    siblings = {key[-1]: key for key in known if key[:-1] == path[:-1]}
    if near := difflib.get_close_matches(path[-1], siblings, 1):
        return siblings[near[0]]
    everywhere = {} if siblings else {dotted(key): key for key in known}
    if near := difflib.get_close_matches(dotted(path), everywhere, 1, 0.75):
        return everywhere[near[0]]
    return _of_words(path, known) or next((key for key in known if key[-1] == path[-1]), None)


def _of_words(path: Key, known: list[Key]) -> Key | None:
    """The setting that has all these words and the fewest others; else one whose words are all among these, and most of them
    in the last part of the path."""
    said = _words(path)
    among = [(len(_words(key)), n, key) for n, key in enumerate(known) if said <= _words(key)]
    if among:
        return min(among)[2]
    last = _words(path[-1:])
    within = [(-len(_words(key) & last), n, key) for n, key in enumerate(known) if _words(key) <= said]
    return min(within)[2] if within else None


def _words(path: Key) -> set[str]:
    return set(re.split(r"[._-]", ".".join(path).lower()))


# ---- sources ----


def _read(file: Path) -> tuple[dict[str, Any], Mapping[Key, int]]:
    """The content of a file, and the line of each value."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_FILE_BYTES + 1)
        if len(data) <= _FILE_BYTES:
            text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
            return read_toml(text), lines_of(text)
        why = "is larger than 1 MiB"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 text (at byte {error.start})"
    except ValueError as error:
        why = f"is not TOML: {error}"
    raise ConfigError(Problem(text=f"{plain(str(file))}: {why}", where=str(file)))


def _leaves(table: Mapping[str, Any], prefix: Key) -> Iterator[tuple[Key, Any]]:
    """Each value with its path; the tables inside a model's options are values."""
    for name, value in table.items():
        path = (*prefix, name)
        if isinstance(value, dict) and value and template(path)[:-1] not in OPEN:
            yield from _leaves(value, path)
        else:
            yield path, value


def _environment_path(name: str) -> Key:
    """EVERYWIRE_LIMITS__HEAD is limits.head. Names, as of models and their options, are taken as they are written."""
    first, *rest = name.removeprefix(PREFIX).split("__")
    if not rest:
        spellings = {f"{PREFIX}{'__'.join(path).upper()}" for path in SETTINGS}
        near = [known for known in sorted(spellings) if known.replace("__", "_") == name.upper()]
        if not near and (first.lower(),) not in SECTIONS:
            meant = _of_words((first,), [path for path in SETTINGS if "*" not in path])
            near = [f"{PREFIX}{'__'.join(meant).upper()}"] if meant else []
        hint = f"did you mean {near[0]}?" if near else f"settings are named {PREFIX}SECTION__KEY"
        text = f"{plain(name)} is not a setting: {hint}"
        raise ConfigError(Problem(text=text, where=name, expected="a setting", suggestion="".join(near[:1])))
    path: Key = (first.lower(),)
    for part in rest:
        shape = template(path)
        chosen = shape in NAMES or any(shape[:n] in OPEN for n in range(len(shape) + 1))
        path = (*path, part if chosen else part.lower())
    return path


def _service_link(name: str, value: str) -> bool:
    """True if Kubernetes set this: a Service named everywire puts EVERYWIRE_PORT=tcp://... and the like into each pod."""
    return "__" not in name and bool(
        re.search(r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$", name)
        or (name.endswith("_PORT") and re.match(r"(tcp|udp|sctp)://", value))
    )


def _override_path(key: str, source: str) -> Key:
    node: Any
    try:
        node = read_toml(f"{key} = 0")
    except ValueError:
        node = {}
    path: list[str] = []
    while isinstance(node, dict) and len(node) == 1:
        ((name, node),) = node.items()
        path.append(name)
    if isinstance(node, dict):
        text = f"{plain(source)}: {show(key)} is not a key such as limits.head"
        raise ConfigError(Problem(text=text, where=source, expected="a key such as limits.head", got=show(key)))
    return tuple(path)


# ---- values ----


def _convert(setting: Setting, path: Key, value: Any, source: str, *, text: bool) -> Any:
    """The value as its setting has it."""
    try:
        return converted(setting, _utf8(value, path, source), text=text)
    except (ValueError, OverflowError, msgspec.ValidationError) as error:
        why = f": {error}" if setting.unit is Unit.TENSORS else ""
    near = difflib.get_close_matches(value.lower(), setting.choices, 1) if isinstance(value, str) else []
    raise _wrong(path, value, source, setting.expected, why, "".join(near))


def _entry(setting: Setting, path: Key, value: Any, source: str, *, text: bool) -> Any:
    """The value of one key in a table whose keys the operator names."""
    if setting.unit is Unit.TABLE:
        return toml_value(_utf8(value, path, source)) if text else value
    name, table = show(path[-1]), dotted(path[:-1])
    if not re.fullmatch(setting.pattern, path[-1]):
        line = f"{plain(source)}: {name} cannot be the name of a variable in {table}: {setting.wanted}"
        raise ConfigError(Problem(text=line, where=source, key=dotted(path), expected=setting.wanted, got=name))
    if not isinstance(value, str) or "\0" in value:  # the kernel would end the variable there
        raise _wrong(path, value, source, "a string without zero bytes")
    return _utf8(value, path, source)


def converted(setting: Setting, value: Any, *, text: bool) -> Any:
    """A value as the annotation of its setting has it; `text` is that of the environment or a flag. Raises ValueError,
    OverflowError or msgspec's ValidationError for what the setting cannot be."""
    match setting.unit:
        case Unit.BYTES if isinstance(value, str):
            value = parse_size(value)
        case Unit.SECONDS if isinstance(value, str):
            value = parse_duration(value)
        case Unit.SECONDS | Unit.NUMBER if type(value) is int:
            value = float(value)  # msgspec 0.20 breaks on an integer that no float can hold
        case Unit.PATHS if text and not value.lstrip().startswith("["):
            value = value.split(":") if value else []
        case Unit.ADDRESSES if text and not value.lstrip().startswith("["):
            pass  # it may look like TOML's: 1.5 is none of its numbers here
        case unit if text and unit in _TABLES_AND_LISTS:
            value = toml_value(value)
    # the entries of variables are looked at one by one
    kind = dict[str, Any] if setting.unit is Unit.VARIABLES else setting.type
    found = msgspec.convert(value, kind, strict=not (text and isinstance(value, str)))
    if not _fits(setting, found):
        raise ValueError
    if setting.unit is not Unit.TENSORS:
        return found
    known = [field.name for field in dataclasses.fields(TensorConfig)]
    if unknown := [name for table in value for name in table if name not in known]:
        raise ValueError(f"a tensor has {', '.join(known)}; not {show(unknown[0])}")
    return value  # the model judges the meaning of the tables


_TABLES_AND_LISTS = frozenset((
    Unit.PATHS, Unit.TEXTS, Unit.ADDRESSES, Unit.NETWORKS, Unit.COUNTS, Unit.TENSORS, Unit.VARIABLES, Unit.TABLE,
))  # fmt: skip


def _fits(setting: Setting, value: Any) -> bool:
    """True if a value of the right type and range is allowed by the setting's other rules."""
    match setting.unit:
        case Unit.COUNT | Unit.NUMBER | Unit.BYTES | Unit.SECONDS:
            return bool(value <= MOST)
        case Unit.COUNTS:
            return all(item <= MOST for item in value)
        case Unit.TEXT:
            return not setting.pattern or re.fullmatch(setting.pattern, value) is not None
        case Unit.ADDRESSES:
            places = (value,) if isinstance(value, str) else value
            return 0 < len(places) == len(set(places)) and all(re.fullmatch(setting.pattern, place) for place in places)
        case Unit.TEXTS if setting.pattern:
            return all(re.fullmatch(setting.pattern, item) for item in value)
        case Unit.NETWORKS:
            return all(map(is_network, value))
        case Unit.PATHS:
            return not any("\0" in path for path in value)
        case _:
            return True


def _utf8(value: Any, path: Key, source: str) -> Any:
    # The environment and the command line hand over bytes that are not UTF-8 as lone surrogates.
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise _wrong(path, value, source, "UTF-8 text")
    return value


def _wrong(path: Key, value: Any, source: str, expected: str, why: str = "", near: str = "") -> ConfigError:
    key, got = dotted(path), f"{show(without_secrets(path, value))}{why}"
    hint = f": did you mean {near}?" if near else ""
    line = f"{plain(source)}: {key} must be {expected}, not {got}{hint}"
    return ConfigError(Problem(text=line, where=source, key=key, expected=expected, got=got, suggestion=near))
