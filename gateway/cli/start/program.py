"""The function `gateway.run`: serves models from a short program, with the signals and exit status of the command."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gateway.cli.serve import run as serve
from gateway.cli.start.block import start_block
from gateway.config import Config


def run(models: Iterable[Any] = (), *, port: int | None = None, config: Config | None = None) -> None:
    """Serves `models`, and those that `config` names, until Ctrl-C or SIGTERM has drained the server. Each of `models` is an
    object that `models.adapt.spec_of` takes; without any, the library's are served. `port` overrides that of `config`.

    Returns if every stream has ended by itself. Otherwise SystemExit ends the program with the exit status of `everywire`: 1
    if the server could not start, or not go on without a model; 3 if a stream was cut at the deadline of the drain.
    ConfigError for an invalid configuration, TypeError for an object that is not a model.

    Sets up the log, on standard error, and handles SIGINT, SIGTERM and SIGHUP: call it once, in the main thread, as the last
    step of a program. A program that goes on afterwards runs a Gateway in its own nursery instead."""
    config = config or Config()
    if port is not None:
        config = replace(config, listen=replace(config.listen, port=port))
    if status := serve(config, list(models), greeting=start_block):
        raise SystemExit(status)
