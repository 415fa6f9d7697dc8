"""hypercorn on Trio serves a FastAPI application, with the gateway mounted in it.

    python under_fastapi.py [PORT]
    curl localhost:8080/known
    curl -N localhost:8080/inference/invocations -d '{"inputs": "one two three", "stream": true}'

FastAPI is built on Starlette, and `under_starlette.py` explains how the two end together. `async def` routes run on Trio
here, and `def` routes in threads, as everywhere. For uvicorn, whose event loop is asyncio's, see `under_uvicorn.py`.
"""

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio
from fastapi import FastAPI
from hypercorn.config import Config as ServerConfig

from gateway.asgi import ASGIApp
from gateway.config import Config, DrainConfig, ListenConfig
from gateway.gateway import Gateway
from gateway.hypercorn import serve
from models.messages import Prompt


async def speak(prompt: Prompt) -> AsyncIterator[str]:
    """The prompt's words, one every tenth of a second."""
    for word in prompt.text.split():
        await trio.sleep(0.1)
        yield word + " "


def application(gateway: Gateway) -> FastAPI:
    """The application's own routes, one of each kind, and the gateway's below /inference."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve)
            yield
            await gateway.drain()  # returns at once if `obey` has drained it

    app = FastAPI(lifespan=lifespan)

    @app.get("/known")
    async def known() -> dict[str, str]:
        return {name: status.state.value for name, status in gateway.models.items()}

    @app.get("/square")
    def square(number: int) -> int:
        return number**2

    app.mount("/inference", ASGIApp(gateway))
    return app


async def main(port: int) -> None:
    gateway = Gateway(Config(listen=ListenConfig(port=-1), drain=DrainConfig(timeout=10)), models=[speak])
    server = ServerConfig()
    server.bind = [f"127.0.0.1:{port}"]
    server.errorlog = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey, signals, gateway)
            where = await nursery.start(partial(serve, application(gateway), server, shutdown_trigger=gateway.stopped))
            print(f"listening on {where[0]}", flush=True)
            await gateway.stopped()
            nursery.cancel_scope.cancel()
    report = gateway.drain_report
    print(f"drained: {report.endings if report else {}}", flush=True)


async def obey(signals: AsyncIterator[int], gateway: Gateway) -> None:
    """Drains on the first signal, and hurries the drain on each further one."""
    await anext(signals)
    gateway.begin_drain()
    async for _ in signals:
        gateway.hurry()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 8080)
