"""A balancer of connections in front of two servers, for what becomes of clients when a second server is there."""

from __future__ import annotations

import selectors
import socket
import threading
from typing import Any

from tests.interop.grpc_frames import PATIENCE
from tests.interop.servers import Server


class Balancer:
    """One address in front of two servers: a new connection goes to the first one, every later one to the second, as where
    the second has just been started."""

    def __init__(self, servers: list[Server], *, tls: bool) -> None:
        self._ports = [server.tls_port if tls else server.port for server in servers]
        self.ca = servers[0].ca
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.taken: list[int] = []
        """Which server each connection went to."""
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._over:
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listener:
                    self._open()
                else:
                    self._forward(key.fileobj, key.data)
        for sock in self._sockets:
            sock.close()
        self._selector.close()

    def _open(self) -> None:
        client, _ = self._listener.accept()
        number = min(1, len(self.taken))
        self.taken.append(number)
        server = socket.create_connection(("127.0.0.1", self._ports[number]))
        self._sockets += [client, server]
        self._selector.register(client, selectors.EVENT_READ, server)
        self._selector.register(server, selectors.EVENT_READ, client)

    def _forward(self, one: Any, other: socket.socket) -> None:
        try:
            if data := one.recv(65536):
                other.sendall(data)
                return
            other.shutdown(socket.SHUT_WR)
        except OSError:  # one of them is gone: the other is told by its own end
            pass
        self._selector.unregister(one)

    def close(self) -> None:
        self._over = True
        self._thread.join(PATIENCE)
        self._listener.close()
