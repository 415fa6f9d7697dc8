"""A container on uvicorn and Starlette: /ping, /invocations, and a WebSocket at every path."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

CUSTOM = "X-Amzn-SageMaker-Custom-Attributes"


async def ping(_request: Request) -> Response:
    return Response()


async def invocations(request: Request) -> Response:
    body = await request.body()
    told = {"content-type": request.headers.get("content-type"), "accept": request.headers.get("accept")}
    own = {CUSTOM: "answered=" + request.headers.get(CUSTOM, "")}
    match body.split(b" ")[0]:
        case b"fail":
            return PlainTextResponse("the model could not: " + body.decode(), int(body.split(b" ")[1]))
        case b"stream":
            return StreamingResponse(pieces(int(body.split(b" ")[1])), media_type="text/x-pieces", headers=own)
        case b"cut":
            return StreamingResponse(cut(), media_type="text/x-pieces")
        case b"tell":
            return Response(json.dumps(told), media_type="application/json", headers=own)
    return Response(body[::-1], media_type="application/x-reversed", headers=own)


async def pieces(n: int) -> AsyncIterator[bytes]:
    for i in range(n):
        yield b"piece %d\n" % i
        await asyncio.sleep(0)


async def cut() -> AsyncIterator[bytes]:
    yield b"the first half"
    await asyncio.sleep(0.05)
    raise RuntimeError("a bug of the container")


async def talk(socket: WebSocket) -> None:
    match socket.url.path.strip("/").split("/")[0]:
        case "refuse":
            await socket.send_denial_response(PlainTextResponse("this model is not for you", status_code=403))
            return
        case "tell":
            await socket.accept()
            headers = dict(socket.headers)
            await socket.send_text(json.dumps({"target": f"{socket.url.path}?{socket.url.query}", "headers": headers}))
        case "crash":
            await socket.accept()
            await socket.receive()
            raise RuntimeError("a bug of the container")
        case _:
            await socket.accept()
    while (message := await socket.receive())["type"] == "websocket.receive":
        if (text := message.get("text")) is not None:
            if text.startswith("close "):
                _, code, reason = text.split(" ", 2)
                await socket.close(int(code), reason)
                return
            await socket.send_text(text)
        else:
            await socket.send_bytes(message["bytes"])


app = Starlette(
    routes=[
        Route("/ping", ping),
        Route("/invocations", invocations, methods=["POST"]),
        WebSocketRoute("/{path:path}", talk),
    ]
)


class Server(uvicorn.Server):
    """Says where it listens."""

    async def startup(self, sockets=None) -> None:  # type: ignore[no-untyped-def]
        await super().startup(sockets)
        print(f"listening {self.servers[0].sockets[0].getsockname()[1]}", flush=True)


if __name__ == "__main__":
    config = uvicorn.Config(app, host="127.0.0.1", port=int(sys.argv[1]), ws_max_size=2**25, log_level="error")
    Server(config).run()
