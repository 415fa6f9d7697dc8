"""Listening sockets: opened together, accepted in bursts, paused when descriptors run short."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import final

import trio

from gateway.addresses import UNIX, Host, Passed, UnixSocket, places_of, written
from gateway.log_limits import LogLimits
from gateway.net.listening_sockets import CannotListen, File, Port, Rules, passed_sockets, tcp_sockets, unix_socket

__all__ = ["CannotListen", "Listener", "Port", "Rules", "open_listeners"]

log = logging.getLogger("gateway.listener")

_BURST = 64
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_ABORTED = {errno.ECONNABORTED, errno.EPERM, errno.EPROTO}


def open_listeners(
    said: str | Iterable[str], ports: Iterable[Port], rules: Rules, environ: Mapping[str, str] = os.environ
) -> list[Listener]:
    """Opens all the sockets of a setting such as `listen.host`: each of its hosts at each of the ports, then its Unix
    sockets and those that systemd has passed by `environ`. CannotListen if one cannot be opened; then none is open."""
    places = places_of(said)
    hosts = [place.name for place in places if isinstance(place, Host)]
    with ExitStack() as opened:
        made: list[Listener] = []

        def keep(listener: Listener) -> None:
            opened.callback(listener.close)
            made.append(listener)

        for port in ports if hosts else ():
            for sock in tcp_sockets(hosts, port, rules):
                keep(Listener(sock, rules, tls=port.tls, setting=port.setting))
        for place in places:
            if isinstance(place, UnixSocket):
                sock, file = unix_socket(place, rules)
                keep(Listener(sock, rules, tls=place.tls, setting=rules.host_setting, file=file))
            elif isinstance(place, Passed):
                for sock in passed_sockets(place, rules, environ):
                    keep(Listener(sock, rules, tls=place.tls, setting=rules.host_setting))
        opened.pop_all()
    return made


@final
class Listener:
    """One listening socket."""

    def __init__(
        self,
        sock: socket.socket,
        rules: Rules,
        *,
        tls: bool = False,
        setting: str = "",
        file: File | None = None,
    ) -> None:
        """Owns the socket, which listens already, and `file`, the file of a Unix socket that this process has made."""
        sock.setblocking(False)
        self._sock, self._file = sock, file
        self.tls, self.setting = tls, setting
        name = sock.getsockname()
        internet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if rules.keepalive and internet:  # accepted sockets inherit the options
            for level, option, value in _probes(rules.keepalive):
                sock.setsockopt(level, option, value)
        self.port: int = name[1] if internet else 0
        """The port; 0 for a Unix socket."""
        scheme = f"http{'s' * tls}://" if internet else f"unix{'+tls' * tls}:"
        self.url: str = scheme + written(name).removeprefix(UNIX)
        """The address that it listens on: `http://[::1]:8080`, `unix:/path`."""

    async def accept(
        self,
        serve: Callable[[socket.socket], None],
        may_accept: Callable[[], bool],
        log_limits: LogLimits | None = None,
    ) -> None:
        """Hands each new connection to `serve` until cancelled or closed. Pauses while `may_accept` returns False, for 0.1 s
        each time. Also pauses while the system has no descriptor or memory left, for 0.1 s at first, 1 s at most."""
        pause = 0.1
        while self._sock.fileno() >= 0:  # it may be closed during a pause
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
                    if log_limits is None or log_limits.allows("accept paused", level=logging.WARNING):
                        log.warning("accept paused", extra={"reason": e.strerror, "seconds": pause})
                    await trio.sleep(pause)
                    pause = min(pause * 2, 1.0)
                    break
                pause = 0.1
                serve(sock)

    def close(self) -> None:
        """Stops listening; accepted connections go on. The file of a Unix socket is removed if it is still the one that this
        process made. A socket that systemd has passed stays open there. A second call does nothing."""
        if self._sock.fileno() >= 0:
            if self._file is not None:
                self._file.remove()
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()


def _probes(after: float) -> Iterator[tuple[int, int, int]]:
    """Yields the options of TCP keepalive that this system has."""
    yield socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
    told = {
        "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE": max(1, round(after)),  # the name on macOS
        "TCP_KEEPINTVL": 15,
        "TCP_KEEPCNT": 4,
    }
    for option, value in told.items():
        if hasattr(socket, option):
            yield socket.IPPROTO_TCP, getattr(socket, option), value
