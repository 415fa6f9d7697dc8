"""A container on trio-websocket, with its /ping by h11 on the same port."""

import json
import sys
from contextlib import suppress
from functools import partial

import h11
import trio
import trio_websocket


class Peeked(trio.abc.HalfCloseableStream):
    """A stream whose first bytes were read already."""

    def __init__(self, first: bytes, stream: trio.SocketStream) -> None:
        self._first, self._stream = first, stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        return bytes(await self._stream.receive_some(max_bytes))

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


async def answer(first: bytes, stream: trio.SocketStream) -> None:
    """One request over HTTP: 200 for /ping, 404 for anything else."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(first)
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await stream.receive_some())
    assert isinstance(event, h11.Request)
    status = 200 if event.target == b"/ping" else 404
    head = h11.Response(status_code=status, headers=[("content-length", "0"), ("connection", "close")])
    await stream.send_all((connection.send(head) or b"") + (connection.send(h11.EndOfMessage()) or b""))


async def talk(request: trio_websocket.WebSocketRequest) -> None:
    if request.path.startswith("/refuse"):
        await request.reject(403, body=b"this model is not for you")
        return
    socket = await request.accept()
    with suppress(trio_websocket.ConnectionClosed):
        if request.path.startswith("/tell"):
            headers = {k.decode(): v.decode() for k, v in request.headers}
            await socket.send_message(json.dumps({"target": request.path, "headers": headers}))
        while True:
            message = await socket.get_message()
            if isinstance(message, str) and message.startswith("close "):
                _, code, reason = message.split(" ", 2)
                await socket.aclose(int(code), reason)
            await socket.send_message(message)


async def serve(stream: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError, trio_websocket.ConnectionClosed):
        async with stream:
            first = b""
            while b"\r\n\r\n" not in first and (more := await stream.receive_some()):
                first += more
            if b"upgrade: websocket" not in first.lower():
                await answer(first, stream)
                return
            async with trio.open_nursery() as nursery:
                request = await trio_websocket.wrap_server_stream(nursery, Peeked(first, stream), max_message_size=2**25)
                await talk(request)
                nursery.cancel_scope.cancel()


async def main(port: int) -> None:
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, port, host="127.0.0.1"))
        print(f"listening {listeners[0].socket.getsockname()[1]}", flush=True)


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
