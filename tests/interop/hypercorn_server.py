"""The gateway as an ASGI application under hypercorn, in place of its own listeners: `python hypercorn_server.py --config FILE serve`
takes the same file, and says where it serves as the standalone server does."""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio
from hypercorn.config import Config as ServerConfig

from gateway.asgi import ASGIApp
from gateway.cli.serve import make_gateway
from gateway.config.load import resolve
from gateway.hypercorn import serve
from gateway.net.tls_context import development_certificate
from gateway.telemetry.logging_setup import configure

log = logging.getLogger("gateway")


async def main(file: Path) -> None:
    config = resolve(file=file, environ={}, overrides={}).config
    configure(config.log)
    gateway = make_gateway(replace(config, listen=replace(config.listen, port=-1, tls_port=-1)))
    server = ServerConfig()
    server.errorlog = None
    server.bind, server.insecure_bind = ["127.0.0.1:0"], ["127.0.0.1:0"]
    development_certificate(config.tls)
    folder = Path(config.tls.dev_dir)
    server.certfile, server.keyfile = str(folder / "server.pem"), str(folder / "server-key.pem")
    server.h2_max_concurrent_streams = 1000
    with trio.open_signal_receiver(signal.SIGTERM) as signals:

        async def drained() -> None:
            await anext(aiter(signals))
            await gateway.drain()

        async with trio.open_nursery() as nursery:
            where = await nursery.start(partial(serve, ASGIApp(gateway), server, shutdown_trigger=drained))
            log.info("serving", extra={"at": where})
    report = gateway.drain_report
    sys.exit(3 if report is not None and report.cut else 0)


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[2]))
