"""The standalone server: a gateway with logs, signals and exit codes."""

from __future__ import annotations

import gc
import logging
import signal
from dataclasses import replace

import trio

from gateway.config import Config
from gateway.gateway import Gateway
from gateway.loading import library_specs
from gateway.logging_setup import configure

log = logging.getLogger("gateway")


def run(config: Config) -> int:
    """Serves until SIGTERM or SIGINT has drained it; 0 then, 1 where it could not start (the log says why)."""
    configure(config.log)
    code = 1
    try:
        code = trio.run(_serve, config)
    except* OSError as group:
        for error in group.exceptions:
            log.error("cannot serve", extra={"reason": str(error)})
    return code


async def _serve(config: Config) -> int:
    gateway = make_gateway(config)
    async with trio.open_nursery() as nursery:
        # signals first: one that comes while models load must not be lost
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            nursery.start_soon(_obey, signals, gateway)
            await nursery.start(gateway.serve)
            host = config.listen.host
            where = [f"http://{host}:{gateway.port}"] if gateway.port else []
            where += [f"https://{host}:{gateway.tls_port}"] if gateway.tls_port else []
            log.info("serving", extra={"at": where, "models": sorted(gateway.supervisor.workers)})
            # what is here now stays: the collector need not look at all of it again and again
            gc.collect()
            gc.freeze()
            await gateway.stopped()
            nursery.cancel_scope.cancel()
    return 0


def make_gateway(config: Config) -> Gateway:
    """A gateway of the configured models; of the library's where none is configured."""
    if config.models:
        return Gateway(config)
    log.info("no model is configured: serving the library models", extra={"hint": "--model NAME=module:attribute"})
    if not config.bidi.default_model:
        config = replace(config, bidi=replace(config.bidi, default_model="echo"))
    return Gateway(config, library_specs())


async def _obey(signals: object, gateway: Gateway) -> None:
    first = True
    async for number in signals:  # type: ignore[attr-defined]
        log.info("signal", extra={"signal": signal.Signals(number).name})
        if first:
            first = False
            gateway.begin_drain()
        else:
            gateway.hurry()
