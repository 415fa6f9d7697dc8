"""The standalone server in several processes: the program of the parent, and that of each front."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import trio

from gateway.catalog.process_model import process_spec
from gateway.cli.options import CommandLine
from gateway.cli.serve import (
    CUT,
    SIGNALS,
    has_terminal,
    make_gateway,
    obey,
    prepare_memory,
    remind,
    tell,
    told,
    until_signalled,
)
from gateway.config import Config
from gateway.config.agreement import has_plane
from gateway.config.load import resolve
from gateway.config.problem import ConfigError
from gateway.config.share import configuration_of_each
from gateway.config.text import dotted
from gateway.fronts.front import Front, begin_with, failed
from gateway.fronts.messages import Begin
from gateway.fronts.owned import owned_specs
from gateway.fronts.parent import CommandLine as Given
from gateway.fronts.parent import Parent
from gateway.fronts.shared import SharedModels
from gateway.gateway import Gateway
from gateway.net.tls_context import development_certificate
from gateway.telemetry.logging_setup import configure, flush, has_terminal_log, say, speaking_for_python
from gateway.telemetry.span_export import exporting
from models.errors import contain_interrupts

log = logging.getLogger("gateway")


Beside: TypeAlias = Callable[[Parent], Coroutine[Any, Any, None]]
"""A task that runs beside a parent as long as the parent serves."""


def run_fronts(
    config: Config, given: CommandLine, processes: int, *, sources: tuple[str, ...] = (), beside: Beside | None = None
) -> int:
    """Serves with `processes` fronts until SIGTERM or SIGINT has drained all; returns the exit codes of `cli.serve.run`.
    SIGHUP replaces each front by a new one, which reads code and configuration again. Each front also serves the models that
    it finds in the files `sources`."""
    configure(config.log)
    with speaking_for_python():
        if config.tls.dev:
            development_certificate(config.tls)  # here, as otherwise each front would make one
        tell(config, sources)
        file = None if given.file is None else str(given.file)
        command_line = (file, dict(given.overrides), dict(given.flags), sources)
        code = until_signalled(partial(_serve, config, processes, command_line, beside))
    flush()
    return code


async def _serve(
    config: Config, processes: int, command_line: Given, beside: Beside | None, early: list[int], tied: bool
) -> int:
    contain_interrupts()
    parent = Parent(config, processes, command_line, owned_specs(config) if processes > 1 else ())
    with (
        trio.open_signal_receiver(*SIGNALS) as signals,
        trio.open_signal_receiver(signal.SIGHUP) as hangups,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey, signals, parent)
            nursery.start_soon(_replace, hangups, parent, tied)
            if beside is not None:
                nursery.start_soon(beside, parent)
            if early:
                parent.begin_drain()
            try:
                async with _operated(parent, nursery):
                    await parent.serve()
            finally:
                code = told(parent.report, parent.config.drain.report) or CUT * bool(parent.lost)
            nursery.cancel_scope.cancel()
    return code


@asynccontextmanager
async def _operated(parent: Parent, nursery: trio.Nursery) -> AsyncIterator[None]:
    """Runs the parent's operator plane and its port for metrics, if they are configured, around the block: they open before
    the first front starts, and close last."""
    config = parent.config
    if not has_plane(config.operator) and config.metrics.port < 0:
        yield
        return
    from gateway.fronts.answers import ParentAnswers  # imported late: most servers have no plane
    from gateway.operator.plane import operating_by, telling_metrics_by

    answers = ParentAnswers(parent)
    nursery.start_soon(answers.watch)
    async with AsyncExitStack() as planes:
        if has_plane(config.operator):
            await planes.enter_async_context(operating_by(answers))
        if config.metrics.port >= 0:
            await planes.enter_async_context(telling_metrics_by(answers))
        yield


async def _replace(hangups: object, parent: Parent, tied: bool) -> None:
    """Replaces the fronts on SIGHUP; drains instead if the signal came because the terminal has closed."""
    async for _ in hangups:  # type: ignore[attr-defined]
        if tied and not has_terminal():
            log.info("the terminal is gone")
            parent.begin_drain()
        else:
            log.info("signal", extra={"signal": "SIGHUP"})
            parent.replace()


def serve_as_front(control: socket.socket) -> int:
    """Serves the connections that the parent at the other end hands over, until the parent has drained this front. Returns
    the exit status: 0 then, 1 if it cannot serve, 2 if its configuration is invalid."""
    begin, handed = begin_with(control)
    file = None if begin.file is None else Path(begin.file)
    try:
        if begin.sources:
            sys.dont_write_bytecode = True  # stale bytecode would hide a file's second change within a second
        overrides = {**begin.overrides, **_factories(begin.sources)}
        resolved = resolve(file=file, environ=os.environ, overrides=overrides, flags=begin.flags)
        config = configuration_of_each(resolved.config, begin.processes)
        configure(config.log, front=begin.number if begin.processes > 1 else None)
        prepare_memory(config)
        with speaking_for_python(), exporting(config.tracing) if config.tracing.enabled else nullcontext():
            shared = SharedModels(begin, handed)
            processes = shared.describe if begin.processes > 1 else process_spec
            gateway = make_gateway(config, ports=begin.ports, processes=processes)
            front = Front(gateway, begin.number, control, handed, shared, serves=partial(_greet, gateway, begin))
            code = 0 if trio.run(front.run) else 1
    except ConfigError as e:
        failed(control, str(e), configuration=True)
        code = 2
    except Exception as e:  # the import runs the user's own code, which may raise anything
        log.exception("a front cannot serve")
        failed(control, f"{type(e).__name__}: {e}", configuration=False)
        code = 1
    flush()
    return code


def _factories(sources: Sequence[str]) -> dict[str, str]:
    """The settings for the models in these files, by key. ConfigError for a file without a model."""
    if not sources:
        return {}
    from gateway.cli.start.found import models_of

    found = [factory for source in sources for factory in models_of(source)]
    return {dotted(("models", factory.partition(":")[2], "factory")): factory for factory in found}


def _greet(gateway: Gateway, begin: Begin) -> None:
    """Prints the start block or, without a terminal, logs the reminder about signatures. Only the first front does."""
    if not begin.first:
        return
    if not has_terminal_log():
        remind(gateway.config)
        return
    from gateway.cli.start.block import DEVELOPMENT, start_block

    say(start_block(gateway, DEVELOPMENT if begin.sources else (), plane_port=gateway.config.operator.port))
