"""The gateway as an ASGI application: for hypercorn[trio], alone or mounted beside other applications."""

from __future__ import annotations

import logging
from typing import final

import trio

from gateway.gateway import Gateway
from gateway.wires.asgi import Receive, Scope, Send, refuse_asgi

log = logging.getLogger("gateway")

NOT_ON_TRIO = (
    "the gateway needs a server that runs on Trio, and this one does not: use hypercorn with --worker-class trio, or "
    "gateway.hypercorn.serve (docs/reference/asgi.md); examples/under_uvicorn.py starts a gateway beside uvicorn"
)
"""The reason why nothing is served on asyncio, and the remedy."""


@final
class ASGIApp:
    """Serves a gateway's routes, models and dialects on the connections of an ASGI 3.0 server.

        app = ASGIApp(Gateway(Config(listen=ListenConfig(port=-1)), models=[shout]))

    The server must run on Trio; on another event loop its startup fails, and calls get 503. If this is the server's only
    application, it runs `gateway.serve` from the server's lifespan startup to its shutdown, which drains. Mounted in another
    application, it gets no lifespan events: that application must run `gateway.serve`. While `gateway.serve` does not run,
    the answer is 503.

    ASGI cannot express everything that the gateway's own listeners do: docs/reference/asgi.md lists the differences.
    `wires.asgi.AnswerCut` tells the server of an answer that cannot be completed.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._told = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan" if not _on_trio():
                await receive()  # "lifespan.startup"
                await send({"type": "lifespan.startup.failed", "message": NOT_ON_TRIO})
            case "http" | "websocket" if not _on_trio():
                if not self._told:
                    self._told = True
                    log.error(NOT_ON_TRIO)
                await refuse_asgi(scope, receive, send, NOT_ON_TRIO)
            case "lifespan":
                await self._live(receive, send)
            case "http" | "websocket":
                await self.gateway.serve_asgi(scope, receive, send)
            case other:
                raise ValueError(f"unknown type of ASGI scope: {str(other)[:50]!r}")

    async def _live(self, receive: Receive, send: Send) -> None:
        """Runs the gateway from the server's startup to its shutdown."""
        assert (await receive())["type"] == "lifespan.startup"
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(self.gateway.serve)
            except Exception as e:
                await send({"type": "lifespan.startup.failed", "message": f"{type(e).__name__}: {e}"[:500]})
                return
            await send({"type": "lifespan.startup.complete"})
            assert (await receive())["type"] == "lifespan.shutdown"
            await self.gateway.drain()
        await send({"type": "lifespan.shutdown.complete"})


def _on_trio() -> bool:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True
