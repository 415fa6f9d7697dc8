"""The standalone server: a gateway with logs, signals and exit codes."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio

from gateway.catalog.factories import DescribesProcesses, library_specs
from gateway.catalog.folder import make_spec
from gateway.catalog.process_memory import give_back_at_rest, return_large_blocks, settle, share_one_arena
from gateway.catalog.process_model import process_spec
from gateway.catalog.served_folder import read_served_folder, served_folder
from gateway.config import Config
from gateway.config.exposure import UNVERIFIED, verifies_nothing, warnings
from gateway.config.problem import ConfigError
from gateway.errors import GatewayError, ModelGivenUp
from gateway.gateway import Gateway
from gateway.net.tls_reload import tell_broken
from gateway.serving.drain import DrainReport
from gateway.serving.ports import Ports
from gateway.telemetry.logging_setup import configure, flush, has_terminal_log, say, speaking_for_python
from gateway.telemetry.span_export import exporting
from models.errors import contain_interrupts, leaves
from models.spec import ModelSpec

log = logging.getLogger("gateway")

CUT = 3  # the exit code if a drain cut a stream; 2 is an invalid command line
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_TERMINAL = "/dev/tty"


def run(
    config: Config,
    models: Sequence[Any] = (),
    *,
    listening: Callable[[Gateway], None] | None = None,
    greeting: Callable[[Gateway], str] | None = None,
) -> int:
    """Serves the configured models and these until SIGTERM or SIGINT has drained the server. Returns the exit code: 0 then,
    3 if a stream was cut at the deadline of the drain, 1 if the server could not start, or not go on without a model that
    was given up (the log has the reason).

    `listening` is called once the ports are open, before any model is ready. `greeting` makes the text that is printed once
    the server serves; it is called only if the log goes to a terminal. SIGHUP reloads the certificate. If the terminal that
    started the server has closed, SIGHUP drains it, unless the signal is ignored, as by nohup. For a process that ends with
    the server: those signals are ignored afterwards."""
    configure(config.log)
    with speaking_for_python():
        prepare_memory(config)
        with exporting(config.tracing) if config.tracing.enabled else nullcontext():
            code = until_signalled(partial(_serve, config, models, listening, greeting))
    flush()
    return code


def prepare_memory(config: Config) -> None:
    """Sets up the memory allocator for a configuration."""
    return_large_blocks()
    if config.sagemaker.multi_model or any(endpoint.models for endpoint in config.endpoints.values()):
        share_one_arena()  # otherwise the system does not get back all memory of an unloaded model


def until_signalled(serve: Callable[[Sequence[int], bool], Awaitable[int]]) -> int:
    """Runs `serve` on Trio and returns its exit code, or 1 if it could not serve. Its arguments are the signals that came
    before it had a receiver for them, and whether the process is tied to a terminal."""
    code, early = 1, list[int]()
    for number in SIGNALS:
        signal.signal(number, lambda number, _: early.append(number))
    ignored = signal.signal(signal.SIGHUP, lambda *_: None) == signal.SIG_IGN
    tied = not ignored and has_terminal()
    try:
        code = trio.run(serve, early, tied)
    except* (OSError, ModelGivenUp) as group:
        for error in leaves(group):
            log.error("cannot serve", extra={"reason": str(error)})
    finally:
        # Nothing is left for a signal to hurry: a second Ctrl-C must not kill a server that has ended cleanly.
        for number in (*SIGNALS, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    return code


def has_terminal() -> bool:
    """True if the process has a controlling terminal."""
    try:
        os.close(os.open(_TERMINAL, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


async def _serve(
    config: Config,
    models: Sequence[Any],
    listening: Callable[[Gateway], None] | None,
    greeting: Callable[[Gateway], str] | None,
    early: Sequence[int],
    tied: bool,
) -> int:
    contain_interrupts()  # a task receives SIGINT
    gateway = make_gateway(config, models)
    # Signals first: one that comes while models load must not be lost.
    with (
        trio.open_signal_receiver(*SIGNALS) as signals,
        trio.open_signal_receiver(signal.SIGHUP) as hangups,
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey, signals, gateway)
            nursery.start_soon(_reload, hangups, gateway, tied)
            if early:
                gateway.begin_drain()
            if listening is not None:
                nursery.start_soon(_announce, gateway, listening)
            await nursery.start(gateway.serve)
            if not gateway.draining:
                log.info("serving", extra={"at": gateway.addresses, "models": sorted(gateway.supervisor.workers)})
                if greeting is not None and has_terminal_log():
                    say(greeting(gateway))
                else:
                    remind(config)
            settle()
            nursery.start_soon(give_back_at_rest, gateway.rest)
            await gateway.stopped()
            nursery.cancel_scope.cancel()
    return told(gateway.drain_report, config.drain.report)


def told(report: DrainReport | None, file: str) -> int:
    """Logs the drain report and writes it to `file` if one is given. Returns the exit code: `CUT` if a stream was cut, else
    0."""
    if report is None:
        return 0
    log.info("drain report", extra=msgspec.to_builtins(report))
    if file:
        try:
            Path(file).write_bytes(report.to_json() + b"\n")
        except OSError as e:
            log.error("the drain report cannot be written", extra={"reason": str(e), "setting": "drain.report"})
    return CUT if report.cut else 0


async def _announce(gateway: Gateway, listening: Callable[[Gateway], None]) -> None:
    await gateway.listening()
    listening(gateway)


def make_gateway(
    config: Config,
    models: Sequence[Any] = (),
    ports: Ports | None = None,
    processes: DescribesProcesses = process_spec,
) -> Gateway:
    """Makes a gateway of these models, the configured ones, and that of a folder. If there are none, and clients cannot load
    any, it serves the library's. `ports` are those of a parent process, which has already logged the warnings about the
    configuration; `processes` gets from the parent the models that run in processes."""
    gateway = _gateway(config, models, ports, processes)
    if ports is None:
        tell(config, models)  # last: an invalid configuration is reported without warnings
    return gateway


def _gateway(config: Config, models: Sequence[Any], ports: Ports | None, processes: DescribesProcesses) -> Gateway:
    if path := served_folder(config, alone=not models):
        return Gateway(config, [*models, _model_of(config, path)], ports=ports, processes=processes)
    if config.models or models or config.sagemaker.multi_model:
        return Gateway(config, models, ports=ports, processes=processes)
    if not config.bidi.default_model:
        config = replace(config, bidi=replace(config.bidi, default_model="echo"))
    return Gateway(config, library_specs(), ports=ports)


def tell(config: Config, models: Sequence[Any] = ()) -> None:
    """Logs the warnings about a configuration, and a hint if no model is configured."""
    for event, fields in warnings(config, os.environ):
        log.warning(event, extra=fields)
    if not (config.models or models or config.sagemaker.multi_model or served_folder(config, alone=not models)):
        log.info("no model is configured: serving the library models", extra={"hint": "--model NAME=module:attribute"})


def remind(config: Config) -> None:
    """Logs that signatures are not verified, unless keys or certificates limit access."""
    if verifies_nothing(config):
        log.info(UNVERIFIED, extra={"setting": "sagemaker.sigv4.credentials"})


def _model_of(config: Config, path: str) -> ModelSpec:
    """Loads the model of the folder at a path. ConfigError if it cannot be served."""
    folder = read_served_folder(config, path)
    if folder.config.process.wanted and (n := config.listen.processes) != 1:
        said = "each process would start instances of its own; configure the model as models.NAME"
        raise ConfigError(f"repository.model: its model.toml has a process, and listen.processes is {n}: {said}")
    try:
        return make_spec(folder, config.repository.model_name, "everywire_model", config.repository.unload_timeout)
    except GatewayError as e:
        raise ConfigError(e.message) from None


async def _reload(hangups: object, gateway: Gateway, tied: bool) -> None:
    """Reloads the certificate on SIGHUP; drains instead if the signal came because the terminal has closed."""
    async for _ in hangups:  # type: ignore[attr-defined]
        if tied and not has_terminal():
            log.info("the terminal is gone")
            gateway.begin_drain()
        elif gateway.certificate is None:
            log.info("signal", extra={"signal": "SIGHUP", "hint": "it reloads the certificate, and TLS is not served"})
        else:
            log.info("signal", extra={"signal": "SIGHUP"})
            try:
                await gateway.reload_certificate()
            except Exception as error:  # the server goes on with the old certificate, whatever the file holds
                tell_broken(error)


class Drainable(Protocol):
    """A server that signals can end."""

    def begin_drain(self) -> None: ...
    def hurry(self) -> None: ...


async def obey(signals: object, server: Drainable) -> None:
    """Begins a drain on the first signal, and hurries it on each further one."""
    first = True
    async for number in signals:  # type: ignore[attr-defined]
        log.info("signal", extra={"signal": signal.Signals(number).name})
        if first:
            first = False
            server.begin_drain()
        else:
            server.hurry()
