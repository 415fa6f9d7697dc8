"""uvicorn serves a FastAPI application on asyncio's event loop, and a gateway listens beside it, as a guest in that loop.

    python under_uvicorn.py [PORT [GATEWAY_PORT]]
    curl localhost:8090/known
    curl -N localhost:8080/invocations -d '{"inputs": "one two three", "stream": true}'

uvicorn does not run on Trio, so the gateway cannot be mounted in its application: it has its own port, and its own wires
there. The application's lifespan starts the gateway. SIGTERM or Ctrl-C ends uvicorn, whose end drains the gateway.
`beside_asyncio.py` has the function that makes Trio a guest, and a model that calls asyncio's objects.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
import uvicorn
from beside_asyncio import trio_in_asyncio
from fastapi import FastAPI

from gateway.config import Config, DrainConfig, ListenConfig
from gateway.gateway import Gateway
from models.messages import Prompt


async def speak(prompt: Prompt) -> AsyncIterator[str]:
    """The prompt's words, one every tenth of a second."""
    for word in prompt.text.split():
        await trio.sleep(0.1)
        yield word + " "


def application(gateway: Gateway) -> FastAPI:
    """A route that reports on the gateway, which lives as long as the application does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        started: asyncio.Future[trio.lowlevel.TrioToken] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(trio_in_asyncio(serve, gateway, started))
        await asyncio.wait((started, serving), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await serving  # raises the reason why it could not start
        yield
        started.result().run_sync_soon(gateway.begin_drain)
        await serving

    app = FastAPI(lifespan=lifespan)

    @app.get("/known")
    async def known() -> dict[str, str]:
        return {name: status.state.value for name, status in gateway.models.items()}

    return app


async def serve(gateway: Gateway, started: asyncio.Future[trio.lowlevel.TrioToken]) -> None:
    """Serves until the gateway has drained."""
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        print(f"listening on http://127.0.0.1:{gateway.port}", flush=True)
        started.set_result(trio.lowlevel.current_trio_token())
    report = gateway.drain_report
    print(f"drained: {report.endings if report else {}}", flush=True)


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8090
    gateway_port = int(sys.argv[2]) if len(sys.argv) > 2 else 8080
    config = Config(listen=ListenConfig(host="127.0.0.1", port=gateway_port), drain=DrainConfig(timeout=10))
    uvicorn.run(application(Gateway(config, models=[speak])), host="127.0.0.1", port=port, log_level="warning")
