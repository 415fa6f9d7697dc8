"""The standalone server in several processes: the parent's program, and what each front does."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import trio

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
from gateway.fronts.front import Front, begin_with, failed
from gateway.fronts.parent import Parent
from gateway.net.tls_context import development_certificate
from gateway.telemetry.logging_setup import configure, flush, speaking_for_python
from gateway.telemetry.span_export import exporting
from models.errors import contain_interrupts

log = logging.getLogger("gateway")


def run_fronts(config: Config, given: CommandLine, processes: int) -> int:
    """Serves with so many fronts until SIGTERM or SIGINT has drained all; the exit codes are those of `cli.serve.run`.
    SIGHUP replaces the fronts, each by one that reads code and configuration anew."""
    configure(config.log)
    with speaking_for_python():
        if config.tls.dev:
            development_certificate(config.tls)  # or each front would make one
        tell(config)
        remind(config)
        command_line = (None if given.file is None else str(given.file), dict(given.overrides), dict(given.flags))
        code = until_signalled(partial(_serve, Parent(config, processes, command_line)))
    flush()
    return code


async def _serve(parent: Parent, early: list[int], tied: bool) -> int:
    contain_interrupts()
    with (
        trio.open_signal_receiver(*SIGNALS) as signals,
        trio.open_signal_receiver(signal.SIGHUP) as hangups,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey, signals, parent)
            nursery.start_soon(_replace, hangups, parent, tied)
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
    """The parent's operator plane and its port for metrics, where there are to be any: they are there before the first front
    is, and go last."""
    config = parent.config
    if not has_plane(config.operator) and config.metrics.port < 0:
        yield
        return
    from gateway.fronts.answers import ParentAnswers  # whoever has none needs nothing of it
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
    """SIGHUP asks for new fronts; from a terminal that has closed it means the end."""
    async for _ in hangups:  # type: ignore[attr-defined]
        if tied and not has_terminal():
            log.info("the terminal is gone")
            parent.begin_drain()
        else:
            log.info("signal", extra={"signal": "SIGHUP"})
            parent.replace()


def serve_as_front(control: socket.socket) -> int:
    """Serves what the parent at the other end hands over, until that has drained it: 0 then, 1 where it could not."""
    begin, handed = begin_with(control)
    file = None if begin.file is None else Path(begin.file)
    try:
        resolved = resolve(file=file, environ=os.environ, overrides=begin.overrides, flags=begin.flags)
        config = configuration_of_each(resolved.config, begin.processes)
        configure(config.log, front=begin.number)
        prepare_memory(config)
        with speaking_for_python(), exporting(config.tracing) if config.tracing.enabled else nullcontext():
            front = Front(make_gateway(config, ports=begin.ports), begin.number, control, handed)
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
