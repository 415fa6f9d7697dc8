"""Checks a configuration without serving it: its values, the files that they name, and the models."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gateway.config import Config
from gateway.config.agreement import has_plane
from gateway.config.fields import SETTINGS
from gateway.config.load import Resolved
from gateway.config.problem import ConfigError, Problem
from gateway.config.text import dotted


def problems_of(resolve: Callable[[], Resolved], *, models: bool) -> tuple[Problem, ...]:
    """The problems of the configuration that `resolve` returns, as far as they show without serving. If a value is invalid,
    only values are checked. Otherwise the files that they name are checked too and, with `models`, that each model's factory
    can be imported and its model served: that runs the code of those modules."""
    try:
        resolved = resolve()
    except ConfigError as error:
        return error.problems
    config = resolved.config
    found = [
        problem
        for check in (_certificates, _credentials, _keys, _tokens, _metrics_tokens, _report, _folder)
        for problem in _raised(check, config)
    ]
    if models:
        found += _models(config)
    return tuple(_placed(problem, resolved) for problem in found)


def _placed(problem: Problem, resolved: Resolved) -> Problem:
    """The problem with its key, which a text about a setting begins with, and the place that set it."""
    said = problem.text.partition(":")[0]
    key = problem.key or (said if tuple(said.split(".")) in SETTINGS else "")
    return dataclasses.replace(problem, key=key, where=problem.where or resolved.sources.get(key, ""))


def _raised(check: Callable[[Config], object], config: Config) -> Iterator[Problem]:
    try:
        check(config)
    except ConfigError as error:
        yield from error.problems


def _certificates(config: Config) -> None:
    from gateway.net.tls_context import server_context

    if config.tls.cert:
        server_context(config.tls)


def _credentials(config: Config) -> None:
    from gateway.dialects.aws.signatures import Signatures

    Signatures(config.sagemaker.sigv4)


def _keys(config: Config) -> None:
    if config.access.keys_file:
        from gateway.serving.access import read_key_file

        read_key_file(config.access)


def _folder(config: Config) -> None:
    from gateway.catalog.served_folder import folder_settings

    list(folder_settings(config))


def _tokens(config: Config) -> None:
    if has_plane(config.operator) and config.operator.token_file:
        from gateway.operator.access import Tokens

        Tokens(config.operator)


def _metrics_tokens(config: Config) -> None:
    if config.metrics.port >= 0 and config.metrics.token_file:
        from gateway.operator.access import Tokens

        Tokens(config.metrics)


def _report(config: Config) -> None:
    file = Path(config.drain.report)
    if config.drain.report and (file.is_dir() or not os.access(file.parent, os.W_OK | os.X_OK)):
        why = "is a folder" if file.is_dir() else f"cannot be written: {file.parent} is no folder that it can be made in"
        raise ConfigError(f"drain.report: {file} {why}")


def _models(config: Config) -> Iterator[Problem]:
    from gateway.catalog.factories import load_spec
    from gateway.cli.serve import make_gateway

    broken = False
    for name, model in config.models.items():
        try:
            load_spec(name, model)
        except Exception as error:  # the import runs the user's own code, which may raise anything
            broken = True
            key = dotted(("models", name, "factory"))
            yield dataclasses.replace(_told(name, error), key=key, got=model.factory)
    if not broken:
        # With one process: the values were checked for several processes before.
        yield from _raised(make_gateway, dataclasses.replace(config, listen=dataclasses.replace(config.listen, processes=1)))


def _told(name: str, error: Exception) -> Problem:
    if isinstance(error, ConfigError):
        return error.problems[0]
    return Problem(text=reason_of(name, error))


def reason_of(name: str, error: Exception) -> str:
    """The reason why a model cannot be loaded, in one line."""
    text = (str(error).splitlines() or ["no reason given"])[0][:200]
    if isinstance(error, ConfigError):
        return text
    return f"{dotted(('models', name))} cannot be loaded: {type(error).__name__}: {text}"


def as_json(problems: tuple[Problem, ...]) -> dict[str, Any]:
    """The result for a program: `ok`, and all fields of each problem."""
    return {"ok": not problems, "problems": [dataclasses.asdict(problem) for problem in problems]}
