"""Listening sockets: opened together, accepted in bursts, paused when descriptors run short."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import final

import trio

log = logging.getLogger("gateway.listener")

_BURST = 64
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_ABORTED = {errno.ECONNABORTED, errno.EPERM, errno.EPROTO}


@final
class Listener:
    """One listening TCP socket."""

    def __init__(self, host: str, port: int, *, backlog: int, setting: str = "listen.port or --port") -> None:
        """Binds at once; OSError names the address where that fails, and the setting."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as e:
            why = os.strerror(e.errno) if e.errno else str(e)
            raise OSError(e.errno, f"cannot listen on {host} port {port}: {why}; {setting} sets another") from e
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]

    async def accept(self, serve: Callable[[socket.socket], None], may_accept: Callable[[], bool]) -> None:
        """Hands each new connection to `serve` until cancelled or closed. Pauses while `may_accept` says no, and, with
        growing patience, while the system has no descriptor left."""
        pause = 0.1
        while True:
            try:
                await trio.lowlevel.wait_readable(self._sock)
            except trio.ClosedResourceError:
                return
            for _ in range(_BURST):
                if not may_accept():
                    await trio.sleep(0.1)
                    break
                try:
                    sock, _address = self._sock.accept()
                except BlockingIOError:
                    break
                except OSError as e:
                    if e.errno in _ABORTED:
                        continue
                    if e.errno not in _SHORT:
                        return
                    log.warning("accept paused", extra={"reason": e.strerror, "seconds": pause})
                    await trio.sleep(pause)
                    pause = min(pause * 2, 1.0)
                    break
                pause = 0.1
                serve(sock)

    def close(self) -> None:
        """Stops listening; connections that were accepted go on."""
        if self._sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()
