"""Listening sockets: opened together, accepted in bursts, paused when descriptors run short."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator
from typing import final

import trio

log = logging.getLogger("gateway.listener")

_BURST = 64
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_ABORTED = {errno.ECONNABORTED, errno.EPERM, errno.EPROTO}


@final
class CannotListen(OSError):
    """An address or a port cannot be listened on. The text is for the operator: which, why, and the setting of another."""

    def __str__(self) -> str:
        return str(self.strerror)


@final
class Listener:
    """One listening TCP socket."""

    def __init__(
        self, host: str, port: int, *, backlog: int, keepalive: float = 0.0, setting: str = "listen.port or --port"
    ) -> None:
        """Binds at once. CannotListen where that fails. `keepalive`: after so many seconds without a byte the kernel asks
        whether the client is still there; 0 for never."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as e:
            raise CannotListen(e.errno, f"cannot listen on {host} port {port}: {_why(e)}; {_advice(e, setting)}") from e
        self._sock.setblocking(False)
        if keepalive:  # what is accepted inherits it
            for level, option, value in _probes(keepalive):
                self._sock.setsockopt(level, option, value)
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


def _probes(after: float) -> Iterator[tuple[int, int, int]]:
    """The options of TCP keepalive that this system has."""
    yield socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
    told = {
        "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE": max(1, round(after)),  # as macOS calls it
        "TCP_KEEPINTVL": 15,
        "TCP_KEEPCNT": 4,
    }
    for option, value in told.items():
        if hasattr(socket, option):
            yield socket.IPPROTO_TCP, getattr(socket, option), value


def _why(error: OSError) -> str:
    # `create_server` puts the address behind its reason, and makes a plain OSError of the resolver's
    reason = (error.strerror or str(error)).partition(" (while")[0]
    return os.strerror(error.errno) if error.errno and error.errno > 0 else reason


def _advice(error: OSError, setting: str) -> str:
    if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:
        return "listen.host or --host sets an address of this machine"
    if error.errno == errno.EACCES:
        return f"a port below 1024 needs root or CAP_NET_BIND_SERVICE; {setting} sets another"
    return f"{setting} sets another"
