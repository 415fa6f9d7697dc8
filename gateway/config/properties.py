"""Reads a model's serving.properties, which LMI's containers have beside the model, and applies the keys that have an effect
here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import msgspec

from gateway.config.environment import OPTIONS, UNSERVED, in_our_words, is_true
from gateway.config.fields import SETTINGS
from gateway.config.load import converted
from gateway.config.problem import ConfigError
from gateway.config.text import show
from gateway.config.tree import LMIConfig, MiB

_BLANK = " \t\f"
_PAIR = re.compile(r"(?s)((?:[^\\=: \t\f]|\\.)*)[ \t\f]*[=:]?[ \t\f]*(.*)")
_ESCAPE = re.compile(r"(?s)\\(u[0-9A-Fa-f]{4}|.)")
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(data: bytes | str) -> dict[str, str]:
    """The keys of a document with their values; of a repeated key the last value. Bytes are ISO-8859-1 with escapes for
    other characters, as for `load(InputStream)`; text is as for `load(Reader)`. ValueError names the line of an invalid
    escape, the only possible error."""
    text = data.decode("latin-1") if isinstance(data, bytes) else data
    return dict(_pair(line, number) for number, line in _logical_lines(text))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that are neither blank nor comments, each with those that continue it and the number of its first."""
    first, parts, continued = 0, list[str](), False
    # a terminator that is the last character of all ends no line that a backslash continues
    for number, natural in enumerate(re.split(r"\r\n|\r|\n", re.sub(r"(?<=\\)[\r\n]\Z", "", text)), 1):
        line = natural.lstrip(_BLANK)
        if not parts and (not line or line[0] in "#!"):
            continued = False
            continue
        first = first if parts else number
        continued = (len(line) - len(line.rstrip("\\"))) % 2 == 1
        if piece := line[:-1] if continued else line:
            parts.append(piece)
        if not continued:
            yield first, "".join(parts)
            parts = []
    if continued:  # by nothing: the backslash counts for nothing, and even a line of it alone is one
        yield first, "".join(parts)


def _pair(line: str, number: int) -> tuple[str, str]:
    match = _PAIR.fullmatch(line)
    assert match is not None  # it matches any line: each part is optional, and `.` is any character
    key, value = (_unescaped(part, number) for part in match.groups())
    return key, value


def _unescaped(text: str, number: int) -> str:
    if "\\" not in text:
        return text

    def plain(match: re.Match[str]) -> str:
        escape = match[1]
        if escape == "u":
            came = text[match.start() : match.start() + 6]
            raise ValueError(f"line {number}: \\u must be followed by four hexadecimal digits, not {show(came)}")
        return chr(int(escape[1:], 16)) if len(escape) > 1 else _ESCAPED.get(escape, escape)

    # characters beyond U+FFFF are escaped as the two halves that UTF-16 has of them
    halves = _ESCAPE.sub(plain, text)
    return halves.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


FILE = "serving.properties"
_OPTION = "option."
_MOST = 2**31 - 1  # an int of Java


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Number:
    """A whole number about how a model is served."""

    key: str
    """The equivalent key of model.toml."""
    low: int = 1
    scale: int = 1


NUMBERS: Mapping[str, _Number] = {
    "job_queue_size": _Number(key="queue"),
    "required_memory_mb": _Number(key="memory", low=0, scale=MiB),
    "option.max_rolling_batch_size": _Number(key="capacity"),
    "option.model_loading_timeout": _Number(key="load_timeout"),
}

KNOWN = frozenset({*NUMBERS, *(_OPTION + name for name in (*OPTIONS, *UNSERVED, "async_mode"))})
"""The keys that have an effect; all others are allowed and ignored."""


_OWN = frozenset(key.removeprefix(_OPTION) for key in KNOWN if key.startswith(_OPTION))
_ALIKE = 0.88  # one letter too many, missing or wrong; `max_rolling_batch_prefill_tokens`, which is LMI's, is not


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServingProperties:
    """The content of a serving.properties."""

    options: Mapping[str, str]
    """X for each `option.X`, in lower case, with its unchanged value."""
    served: Mapping[str, Any]
    """How the model is served, by the keys of model.toml."""
    ignored: tuple[str, ...]
    """The keys without effect here."""


def read_properties(data: bytes) -> ServingProperties:
    """Reads a serving.properties. A mistake raises ValueError, which names the line, or ConfigError, which names the key,
    the expected value and the given one."""
    properties = {_named(key): value for key, value in parse_properties(data).items()}
    options = {key.removeprefix(_OPTION): value for key, value in properties.items() if key.startswith(_OPTION)}
    text_options(LMIConfig(), options)
    return ServingProperties(
        options=options,
        served={n.key: _number(key, n, text) for key, n in NUMBERS.items() if (text := properties.get(key, "").strip())},
        ignored=tuple(key for key in properties if key not in KNOWN),
    )


def _named(key: str) -> str:
    """Option names in lower case: OPTION_ENTRYPOINT of the environment cannot express option.entryPoint."""
    return key.lower() if key.startswith(_OPTION) else key


def _number(key: str, number: _Number, text: str) -> int:
    value = int(text) if re.fullmatch(r"[0-9]{1,10}", text) else -1
    if not number.low <= value <= _MOST:
        raise ConfigError(f"{key} must be a whole number from {number.low} to {_MOST}, not {show(text)}")
    return value * number.scale


def text_options(config: LMIConfig, options: Mapping[str, str]) -> LMIConfig:
    """The server's section, overridden by a model's own options: `output_formatter`, `tgi_compat`, `rolling_batch`,
    `enable_streaming` (`huggingface` is true), by their names in lower case. An empty option is not set.

    ConfigError names the key for an invalid value, for an option whose effect is not served, and for an unknown option whose
    name is close to one of these. Other keys are the model's own.
    """
    for option, reason in UNSERVED.items():
        if is_true(options.get(option, "")):
            raise ConfigError(f"{_OPTION}{option} must be false, not {show(options[option])}: {reason}")
    for option in options:
        if option not in _OWN and (near := difflib.get_close_matches(option, _OWN, 1, _ALIKE)):
            raise ConfigError(f"there is no {_OPTION}{show(option)[1:-1]}: did you mean {_OPTION}{near[0]}?")
    said: dict[str, Any] = {option: _value(option, text) for option, text in in_our_words(options).items()}
    return replace(config, **said) if said else config


def _value(option: str, text: str) -> str | bool:
    setting = SETTINGS[OPTIONS[option]]
    try:
        value: str | bool = converted(setting, text, text=True)  # text, as in the environment
    except msgspec.ValidationError:
        expected = setting.expected.replace('"", ', "")  # an empty option is not set
        raise ConfigError(f"{_OPTION}{option} must be {expected}, not {show(text)}") from None
    return value
