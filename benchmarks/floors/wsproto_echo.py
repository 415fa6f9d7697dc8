"""The same echo by wsproto: what a WebSocket costs with the library's own objects and nothing around them.

python -m benchmarks.floors.wsproto_echo PORT
"""

from __future__ import annotations

import socket

from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage

from benchmarks.floors.sockets import read, serve, write
from benchmarks.floors.websocket import accept_upgrade


async def connection(sock: socket.socket) -> None:
    await accept_upgrade(sock)
    library = Connection(ConnectionType.SERVER)
    while data := await read(sock):
        library.receive_data(data)
        out = [library.send(BytesMessage(data=event.data)) for event in library.events() if isinstance(event, BytesMessage)]
        if out:
            await write(sock, b"".join(out))


if __name__ == "__main__":
    serve(connection)
