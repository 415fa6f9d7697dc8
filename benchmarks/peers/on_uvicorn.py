"""The model `floods` as a streaming response of Starlette on uvicorn: python -m benchmarks.peers.on_uvicorn PORT."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.served import flood_events


async def completions(request: Request) -> Response:
    """Streams as many tokens as the request asks for."""
    tokens = (await request.json())["max_tokens"]

    async def events() -> AsyncIterator[bytes]:
        for event in flood_events(tokens):
            yield event

    return StreamingResponse(events(), media_type="text/event-stream")


async def health(request: Request) -> Response:
    return PlainTextResponse("ready")


if __name__ == "__main__":
    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=int(sys.argv[1]), log_level="error", backlog=4096)
