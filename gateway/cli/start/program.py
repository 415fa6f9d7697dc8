"""`gateway.run`: a program of a few lines that serves models, with the signals and the exit status of the command."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gateway.cli.serve import run as serve
from gateway.cli.start.block import start_block
from gateway.config import Config


def run(models: Iterable[Any] = (), *, port: int | None = None, config: Config | None = None) -> None:
    """Serves `models`, beside those that `config` names, until Ctrl-C or SIGTERM has drained it. `models` are what
    `models.adapt.spec_of` takes; without any the library's are served. `port` comes before that of `config`.

    It returns when every stream has ended by itself. Otherwise SystemExit ends the program with the status of the command
    `everywire`: 1 if it could not start, or not go on without a model; 3 if a stream was cut at the deadline of the drain.
    ConfigError for a configuration that cannot be, TypeError for what is no model.

    It sets up the log, on standard error, and takes SIGINT, SIGTERM and SIGHUP for itself: call it once, in the main
    thread, as the last thing that a program does. A program that goes on has a Gateway in its own nursery instead."""
    config = config or Config()
    if port is not None:
        config = replace(config, listen=replace(config.listen, port=port))
    if status := serve(config, list(models), greeting=start_block):
        raise SystemExit(status)
