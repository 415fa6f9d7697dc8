"""hypercorn on Trio serves a Starlette application, with the gateway mounted in it: HTTP and WebSocket, of both.

    python under_starlette.py [PORT]
    curl localhost:8080/
    curl -N localhost:8080/inference/invocations -d '{"inputs": "one two three", "stream": true}'

The application's own routes are beside the mount, and its lifespan runs the gateway. SIGTERM or Ctrl-C drains the gateway
first, while hypercorn still carries its answers, and then ends hypercorn; a second one cuts the streams that still run.
"""

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio
from hypercorn.config import Config as ServerConfig
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

from gateway.asgi import ASGIApp
from gateway.config import Config, DrainConfig, ListenConfig
from gateway.gateway import Gateway
from gateway.hypercorn import serve
from models.messages import Part, Prompt

MOUNTED = "/inference"


async def speak(prompt: Prompt) -> AsyncIterator[str]:
    """The prompt's words, one every tenth of a second."""
    for word in prompt.text.split():
        await trio.sleep(0.1)
        yield word + " "


async def echo(part: Part) -> Part:
    """Returns each part, for the WebSocket."""
    return part


def application(gateway: Gateway) -> Starlette:
    """The application's own routes, and the gateway's below MOUNTED."""

    async def index(request: Request) -> JSONResponse:
        return JSONResponse({name: f"{MOUNTED}/v2/models/{name}" for name in gateway.models})

    async def shout(socket: WebSocket) -> None:
        await socket.accept()
        async for text in socket.iter_text():
            await socket.send_text(text.upper())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # A mounted application gets no lifespan events, so the outer application runs the gateway.
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve)
            yield
            await gateway.drain()  # returns at once if `obey` has drained it

    routes = [Route("/", index), WebSocketRoute("/shout", shout), Mount(MOUNTED, ASGIApp(gateway))]
    return Starlette(routes=routes, lifespan=lifespan)


async def main(port: int) -> None:
    gateway = Gateway(Config(listen=ListenConfig(port=-1), drain=DrainConfig(timeout=10)), models=[speak, echo])
    server = ServerConfig()
    server.bind = [f"127.0.0.1:{port}"]
    server.errorlog = None
    server.h2_max_concurrent_streams = 1000
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey, signals, gateway)
            # At its end hypercorn gives connections `graceful_timeout` seconds, too few for a stream: it ends last.
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
