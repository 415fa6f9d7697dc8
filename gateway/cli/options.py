"""The options that set the configuration: before a command, or after one that takes a configuration."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, final

import click

from gateway.cli.shadowing import check_directory
from gateway.config.fields import SETTINGS
from gateway.config.load import Resolved, resolve
from gateway.config.show import written
from gateway.config.text import dotted
from gateway.config.tree import Unit

F = TypeVar("F", bound=Callable[..., Any])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    """A flag that stands for `--set KEY=VALUE`."""

    name: str
    key: str
    metavar: str
    help: str

    @property
    def parameter(self) -> str:
        return self.name[2:].replace("-", "_")


_FLAGS = (
    _Flag(
        name="--host",
        key="listen.host",
        metavar="HOST",
        help="Address to listen on; :: for every one, unix:/PATH for a socket.",
    ),
    _Flag(name="--port", key="listen.port", metavar="PORT", help="Port in clear; 0 for a free one, -1 for none."),
    _Flag(name="--tls-port", key="listen.tls_port", metavar="PORT", help="Port for TLS, opened where TLS is on."),
    _Flag(name="--tls-cert", key="tls.cert", metavar="FILE", help="PEM certificate chain: turns TLS on."),
    _Flag(name="--tls-key", key="tls.key", metavar="FILE", help="PEM private key of the certificate."),
    _Flag(name="--tls-dev", key="tls.dev", metavar="", help="TLS with a certificate made for localhost."),
    _Flag(
        name="--processes",
        key="listen.processes",
        metavar="N",
        help="Processes that share the ports, each with all models; 0 for one a core.",
    ),
    _Flag(name="--log-level", key="log.level", metavar="LEVEL", help="Least severity that is logged"),
    _Flag(name="--log-format", key="log.format", metavar="FORMAT", help="Form of the log"),
)
NAMES = frozenset({"--config", "--model", "--set", *(flag.name for flag in _FLAGS)})
"""The names of all options of the configuration."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The values of the options of the configuration."""

    file: Path | None = None
    overrides: Mapping[str, str]
    flags: Mapping[str, str]
    """The option behind each override."""
    sources: tuple[str, ...] = ()
    """Files of Python code, each with one model to serve. Only `named` imports them, which runs their code."""

    @classmethod
    def of(
        cls, file: Path | None, models: tuple[str, ...], settings: tuple[str, ...], flags: Mapping[str, Any]
    ) -> CommandLine:
        """Reads the values of the options from click. click.UsageError for an option without a value, and for a setting that
        is set twice."""
        pairs: list[tuple[str, str, str]] = []
        for flag in _FLAGS:
            value = flags[flag.parameter]
            if value not in (None, False):
                pairs.append((flag.key, "true" if value is True else value, flag.name))
        sources = [text for text in models if text.endswith(".py") and "=" not in text]
        pairs += [_model_pair(text) for text in models if text not in sources]
        for text in settings:
            key, found, value = text.partition("=")
            if not found:
                raise click.UsageError(f"--set takes SECTION.KEY=VALUE, such as limits.body=64MiB, not {text[:100]!r}")
            pairs.append((key.strip(), value.strip(), f"--set {key.strip()}"))
        given = cls(file=file, overrides={}, flags={}, sources=tuple(sources))
        for key, value, source in pairs:
            given = given.joined(cls(overrides={key: value}, flags={key: source}))
        return given

    def joined(self, other: CommandLine) -> CommandLine:
        """The options of both together. click.UsageError for a setting that both set."""
        if self.file is not None and other.file is not None:
            raise click.UsageError(f"--config is given twice: {self.file} and {other.file}")
        for key in other.overrides:
            if key in self.overrides:
                raise click.UsageError(f"{key} is set twice: by {self.flags[key]} and by {other.flags[key]}")
        return replace(
            self,
            file=self.file or other.file,
            overrides={**self.overrides, **other.overrides},
            flags={**self.flags, **other.flags},
            sources=(*self.sources, *other.sources),
        )

    def named(self) -> CommandLine:
        """These options, with the model of each file named as in its code. ConfigError for a file with no model or
        several."""
        if not self.sources:
            return self
        check_directory()  # before anything of the gateway's own packages is imported
        from gateway.cli.start.found import one_model_of

        given = replace(self, sources=())
        for source in self.sources:
            key, value, _ = _model_pair(one_model_of(source))
            given = given.joined(CommandLine(overrides={key: value}, flags={key: f"--model {source}"}))
        return given

    @property
    def anything(self) -> bool:
        """True if any of the options was given."""
        return bool(self.overrides or self.file or self.sources)

    def resolve(self) -> Resolved:
        """The configuration from the file, the environment and these options. ConfigError if it is invalid."""
        given = self.named()
        return resolve(file=given.file, environ=os.environ, overrides=given.overrides, flags=given.flags)


def _model_pair(text: str) -> tuple[str, str, str]:
    """The setting, its value and the flag for NAME=MODULE:ATTR or MODULE:ATTR. Without NAME, the model has the attribute's
    name. click.UsageError for any other text."""
    name, found, factory = text.partition("=")
    if not found:
        factory = text
        name = text.partition(":")[2].partition(".")[0]
    if not (name and (found or text.partition(":")[0])):
        raise click.UsageError(
            f"--model takes NAME=MODULE:ATTR, MODULE:ATTR or FILE.py, such as chat=app:generate, not {text[:100]!r}"
        )
    return dotted(("models", name, "factory")), factory, f"--model {name}"


def options(function: F) -> F:
    """Adds the options to a command, which gets `file`, `models` and `settings`, and each flag by its name."""
    model, each = "Serve a model, or the one of FILE.py; may be repeated.", "Any setting; may be repeated."
    function = click.option("--set", "settings", multiple=True, metavar="SECTION.KEY=VALUE", help=each)(function)
    function = click.option("--model", "models", multiple=True, metavar="[NAME=]MODULE:ATTR", help=model)(function)
    for flag in reversed(_FLAGS):
        setting = SETTINGS[tuple(flag.key.split("."))]
        if setting.unit is Unit.FLAG:
            function = click.option(flag.name, is_flag=True, help=flag.help)(function)
            continue
        text = f"{flag.help}: {', '.join(setting.choices)}." if setting.choices else flag.help
        default = f"  [default: {str(written(setting.unit, setting.default)).strip(chr(34)) or 'none'}]"
        function = click.option(flag.name, metavar=flag.metavar, help=text + default)(function)
    file = click.Path(path_type=Path)
    return click.option("--config", "file", type=file, metavar="FILE", help="TOML file with settings.")(function)


def configured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a command take the options too. It is called with the options before the command and its own, joined."""

    @options
    @click.pass_obj
    @functools.wraps(function)
    def command(before: CommandLine, /, file: Any, models: Any, settings: Any, **others: Any) -> Any:
        flags = {flag.parameter: others.pop(flag.parameter) for flag in _FLAGS}
        return function(before.joined(CommandLine.of(file, models, settings, flags)), **others)

    return command
