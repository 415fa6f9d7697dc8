"""What the tree of `gateway.config` says of each setting: its path, its unit, what it may be, and what it means in words."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, final

from gateway.config.text import Key, dotted
from gateway.config.tree import Config, TensorConfig


class Unit(enum.Enum):
    """What a setting's value is, and so how it may be written."""

    TEXT = "text"
    FLAG = "flag"
    CHOICE = "choice"
    COUNT = "count"
    NUMBER = "number"
    BYTES = "bytes"
    SECONDS = "seconds"
    PATHS = "paths"
    TEXTS = "texts"
    ADDRESSES = "addresses"
    NETWORKS = "networks"
    COUNTS = "counts"
    TENSORS = "tensors"
    TABLE = "table"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What may name the sections of a table, such as the models."""

    of: str
    """What is named, with its article."""
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
    default: Any
    """None where there is none."""
    computed: str = ""
    """What the default is in words, where `default` is only what it is on this machine, or None."""
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
                return 'a list of strings, such as ["one", "two"]'
            case Unit.ADDRESSES:
                return f"{self.wanted}, or a list of them"
            case Unit.NETWORKS:
                return 'a list of addresses, networks and "unix", such as ["10.0.0.0/8", "::1"]'
            case Unit.COUNTS:
                return f"a list of whole numbers{self._range}, such as [4, 8]"
            case Unit.TENSORS:
                return 'a list of tensors, such as [{name = "x", datatype = "FP32", shape = [-1, 4]}]'
            case Unit.TABLE:
                return "a table"

    @property
    def _range(self) -> str:
        if self.above:
            return f" above {self.low:g}"
        return f", at least {self.low:g}" if self.high >= MOST else f" from {self.low:g} to {self.high:.0f}"


# ---- what the types do not say ----

# A count is from 1, a duration above 0 and a float a duration where nothing else is said.
MOST = 2**63 - 1
"""Of what has no bound of its own: what TOML can write."""
_BYTES = frozenset({
    "limits.request_line", "limits.head", "limits.body", "limits.total_bytes", "limits.json", "limits.body_rate",
    "limits.chunk_line", "limits.chunk_extensions", "limits.trailers", "limits.read_ahead", "limits.send_buffer",
    "limits.connection_send_buffer", "limits.body_pool", "limits.unsent", "limits.part", "limits.event_headers",
    "limits.checkpoint_bytes",
    "http2.initial_window", "http2.max_window", "http2.frame_size", "websocket.part", "sagemaker.body",
    "repository.memory", "lmi.max_text", "models.*.queue_bytes", "models.*.body_bytes",
    "models.*.memory",
})  # fmt: skip
_TEXTS = frozenset({"models.*.warmup", "admission.timeout_headers", "operator.hosts"})
_NETWORKS = frozenset({"listen.trusted_proxies"})
_NUMBERS = frozenset({"endpoints.*.variants.*.weight", "models.*.restart.jitter"})
_MAY_BE_ZERO = frozenset({
    "tls.reload_interval", "limits.chunk_extensions", "limits.trailers", "limits.trailer_fields", "limits.write_stall",
    "limits.body_pool", "limits.unsent", "limits.descriptors_reserved", "limits.max_new_tokens", "limits.loop_block",
    "http2.continuations",
    "websocket.ping_interval", "drain.delay", "drain.timeout", "bidi.idle_timeout", "repository.unload_timeout",
    "sagemaker.invoke_timeout", "sagemaker.stream_timeout", "models.*.queue_timeout", "models.*.queue_bytes",
    "models.*.body_bytes", "models.*.queue", "models.*.memory",
    "models.*.timeout", "models.*.max_batch_size", "models.*.restart.intensity",
    "models.*.step_timeout", "models.*.stop_within", "models.*.stuck_limit",
    "models.*.batching.max_delay", "models.*.batching.priority_levels", "models.*.batching.default_priority",
    "models.*.restart.backoff",
    "models.*.restart.backoff_max", "models.*.restart.jitter", "endpoints.*.variants.*.weight",
})  # fmt: skip
_RANGES = {
    "listen.port": (-1, 65535),
    "listen.tls_port": (-1, 65535),
    "listen.bidi_port": (-1, 65535),
    "listen.backlog": (1, 65535),
    "listen.tcp_keepalive": (0, 32767),
    "operator.port": (-1, 65535),
    # RFC 9113 section 6.5.2, and 6.9.1 for the windows.
    "http2.initial_window": (0, 2**31 - 1),
    "http2.max_window": (1, 2**31 - 1),
    "http2.frame_size": (2**14, 2**24 - 1),
    "http2.streams": (1, 2**31 - 1),
    "limits.memory_refuse": (1, 100),
    "limits.memory_reset": (1, 100),
    "bidi.padding": (0, 4096),
    "v2.compression": (0, 9),
    "models.*.restart.jitter": (0, 1),
    "openai.max_tokens": (1, 2**31 - 1),  # as max_new_tokens
}
_MODEL = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_MODEL_WANTED = "1 to 128 letters, digits, '.', '_' and '-', beginning with a letter, a digit or '_'"
# EndpointName and VariantName of the SageMaker API.
_SAGEMAKER = r"(?!.{64})[a-zA-Z0-9](-*[a-zA-Z0-9])*"
_SAGEMAKER_WANTED = "1 to 63 letters, digits and '-', neither beginning nor ending with '-'"
_HOST = r"(?!(?:unix|systemd)(?:\+tls)?(?::|$))[^\s/\[\],\"']+"
_HOST_WANTED = 'an address or a host name ("0.0.0.0" for every IPv4 address, "::" for IPv6 too), unix:/PATH or systemd:NAME'
_UNIX_MODE = (r"0?[0-7]{3}", 'three octal digits, such as "660"')
_PATTERNS = {
    "listen.host": (rf"{_HOST}|unix(\+tls)?:/[^\0]+|systemd(\+tls)?(:[!-9;-~]+)?", _HOST_WANTED),
    "operator.host": (rf"{_HOST}|unix:/[^\0]+|systemd(:[!-9;-~]+)?", _HOST_WANTED),
    "listen.unix_mode": _UNIX_MODE,
    "operator.unix_mode": _UNIX_MODE,
    "operator.token": (r"([!-~]{16,})?", "16 or more visible ASCII characters, or empty"),
    "admission.priority_header": (r"[!#$%&'*+.^_`|~0-9A-Za-z-]*", "the name of a header field, or empty"),
    "websocket.path": (r"/[!-~]*", "a path that begins with /"),
    "sagemaker.variant": (_SAGEMAKER, _SAGEMAKER_WANTED),
    "models.*.version": (r"[A-Za-z0-9._-]{1,64}", "1 to 64 letters, digits, '.', '_' and '-'"),
    "models.*.factory": (
        r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*|[^\W\d]\w*",
        '"module:attribute", or the name of a library model',
    ),
    "endpoints.*.variants.*.model": (_MODEL, "the name of a model"),
    "endpoints.*.models": (r"[^\0]*", "a path"),
    "repository.model": (r"(/[^\0]*)?", "an absolute path, or empty"),
    "repository.model_name": (_MODEL, _MODEL_WANTED),
}
NAMES: Mapping[Key, Names] = {
    ("models",): Names(of="a model", placeholder="NAME", pattern=_MODEL, wanted=_MODEL_WANTED),
    ("endpoints",): Names(of="an endpoint", placeholder="NAME", pattern=_SAGEMAKER, wanted=_SAGEMAKER_WANTED),
    ("endpoints", "*", "variants"): Names(
        of="a variant", placeholder="VARIANT", pattern=_SAGEMAKER, wanted=_SAGEMAKER_WANTED
    ),
}
"""The tables whose sections the operator names."""


# ---- the walk ----


def _settings(section: type[Any], prefix: Key) -> Iterator[Setting]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        path = (*prefix, field.name)
        hint: Any = hints[field.name]
        optional = type(None) in typing.get_args(hint)
        if optional:
            (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
        arguments = typing.get_args(hint)
        if _is_section(hint):
            yield from _settings(hint, path)
        elif typing.get_origin(hint) is dict and _is_section(arguments[1]):
            yield from _settings(arguments[1], (*path, "*"))
        else:
            setting = _setting(path, hint, field)
            yield dataclasses.replace(setting, computed="the model's own") if optional else setting


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _setting(path: Key, hint: Any, field: dataclasses.Field[Any]) -> Setting:
    key = dotted(path)
    default, computed = field.default, ""
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
        name = getattr(field.default_factory, "__name__", "").strip("_").replace("_", " ")
        computed = f"a {name}" if hint is int else ""
    low, high = _RANGES.get(key, (0 if key in _MAY_BE_ZERO else 1, MOST))
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
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return dataclasses.replace(setting, unit=Unit.CHOICE, choices=typing.get_args(hint))
    if typing.get_origin(hint) is dict:
        return dataclasses.replace(setting, unit=Unit.TABLE)
    if typing.get_origin(hint) is types.UnionType:
        return dataclasses.replace(setting, unit=Unit.ADDRESSES)
    if key in _NETWORKS:
        return dataclasses.replace(setting, unit=Unit.NETWORKS)
    if typing.get_origin(hint) is tuple:
        unit = {TensorConfig: Unit.TENSORS, int: Unit.COUNTS}.get(arguments[0], Unit.TEXTS if key in _TEXTS else Unit.PATHS)
        return dataclasses.replace(setting, unit=unit)
    if hint is bool:
        return dataclasses.replace(setting, unit=Unit.FLAG)
    if hint is int:
        return dataclasses.replace(setting, unit=Unit.BYTES if key in _BYTES else Unit.COUNT)
    if hint is float:
        unit = Unit.NUMBER if key in _NUMBERS else Unit.SECONDS
        return dataclasses.replace(setting, unit=unit, low=0, above=key not in _MAY_BE_ZERO)
    return setting


SETTINGS: Mapping[Key, Setting] = {setting.path: setting for setting in _settings(Config, ())}
"""Every setting of the schema, in its order."""

SECTIONS = frozenset(path[:n] for path in SETTINGS for n in range(1, len(path)))
OPEN = frozenset(path for path, setting in SETTINGS.items() if setting.unit is Unit.TABLE)
"""The settings that are tables of anything: the options of a model."""


def template(path: Key) -> Key:
    """The path in the schema: `*` in the place of each name that the operator chose."""
    found: Key = ()
    for part in path:
        found = (*found, "*" if found in NAMES else part)
    return found


def spelt(path: Key) -> str:
    """A key for a reader: each `*` in it is a word in capitals."""
    return dotted(tuple(NAMES[template(path[:n])].placeholder if part == "*" else part for n, part in enumerate(path)))


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
