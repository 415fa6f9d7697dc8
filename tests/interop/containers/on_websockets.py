"""A container on the `websockets` library; by its path a session does another thing, the wrong ones among them."""

import asyncio
import json
import sys
from contextlib import suppress
from http import HTTPStatus

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response


async def echo(socket: ServerConnection) -> None:
    """Whole messages, as most containers read and write them."""
    async for message in socket:
        if isinstance(message, str) and message.startswith("close "):
            _, code, reason = message.split(" ", 2)
            await socket.close(int(code), reason)
        await socket.send(message)


async def tell(socket: ServerConnection) -> None:
    """Sends the target and headers of the platform's request, then echoes like `echo`."""
    request = socket.request
    assert request is not None
    headers = {name.lower(): value for name, value in request.headers.raw_items()}
    await socket.send(json.dumps({"target": request.path, "headers": headers}))
    await echo(socket)


async def fragments(socket: ServerConnection) -> None:
    """Gives each message back in the fragments it came in; the library ends it with an empty one."""
    while True:
        pieces = [piece async for piece in socket.recv_streaming(decode=False)]
        await socket.send(pieces, text=True)


async def thoughtful(socket: ServerConnection) -> None:
    """Thinks about each message for a while; those that come meanwhile wait."""
    async for message in socket:
        await asyncio.sleep(0.2)
        await socket.send(message)


async def slow(socket: ServerConnection) -> None:
    """Thinks for longer than any silence that could be taken for an end."""
    async for message in socket:
        await asyncio.sleep(10)
        await socket.send(message)


async def silent(socket: ServerConnection) -> None:
    """Reads everything, answers nothing, and ends when it is closed."""
    async for _ in socket:
        pass


async def crash(socket: ServerConnection) -> None:
    """A bug: the library logs it and says 1011."""
    await socket.send("before")
    await socket.recv()
    raise RuntimeError("a bug of the container")


async def flood(socket: ServerConnection) -> None:
    """Sends as long as anyone takes it, and prints how much that was, in MiB."""
    sent = 0
    while True:
        for _ in range(16):
            await socket.send(bytes(65536))
        sent += 1
        print(sent, flush=True)


async def deaf(socket: ServerConnection) -> None:
    """Reads no message: the library reads a few, and then no more from the socket."""
    await socket.send("here")
    await asyncio.Event().wait()


SESSIONS = {f.__name__: f for f in (echo, tell, fragments, thoughtful, slow, silent, crash, flood, deaf)}


async def handle(socket: ServerConnection) -> None:
    request = socket.request
    assert request is not None
    session = SESSIONS.get(request.path.partition("?")[0].split("/")[1], echo)
    with suppress(ConnectionClosed):
        await session(socket)


async def before_the_handshake(socket: ServerConnection, request: Request) -> Response | None:
    """The library answers GET alone: /invocations, which is a POST, is not for it."""
    match request.path.partition("?")[0]:
        case "/ping":
            return socket.respond(HTTPStatus.OK, "")
        case "/refuse":
            return socket.respond(HTTPStatus.FORBIDDEN, "this model is not for you")
        case "/hang":
            await asyncio.Event().wait()
    return None


async def main(port: int) -> None:
    async with serve(handle, "127.0.0.1", port, process_request=before_the_handshake, max_size=2**25) as server:
        print(f"listening {server.sockets[0].getsockname()[1]}", flush=True)
        await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
