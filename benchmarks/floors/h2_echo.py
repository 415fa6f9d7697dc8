"""The same echo by h2: what an HTTP/2 stream costs with the library's own objects and nothing around them.

python -m benchmarks.floors.h2_echo PORT
"""

from __future__ import annotations

import socket

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived

from benchmarks.floors.sockets import read, serve, write


async def connection(sock: socket.socket) -> None:
    library = H2Connection(H2Configuration(client_side=False, header_encoding=None))
    library.initiate_connection()
    while True:
        if out := library.data_to_send():
            await write(sock, out)
        data = await read(sock)
        if not data:
            return
        for event in library.receive_data(data):
            match event:
                case RequestReceived():
                    assert event.stream_id is not None
                    library.send_headers(event.stream_id, [(b":status", b"200")])
                case DataReceived():
                    assert event.stream_id is not None
                    assert event.data is not None
                    assert event.flow_controlled_length is not None
                    library.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    library.send_data(event.stream_id, event.data)


if __name__ == "__main__":
    serve(connection)
