"""Opens the ports of a configuration, and tells their numbers and addresses."""

from __future__ import annotations

from typing import final

import msgspec

from gateway.config import Config
from gateway.net.listeners import Listener, Port, Rules, open_listeners

_BESIDE = ("listen.bidi_port", "listen.grpc_port")  # additional ports


@final
class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """The ports on which a server listens; 0: none. If systemd has passed several sockets, the port of the first."""

    port: int = 0
    tls_port: int = 0
    bidi_port: int = 0
    grpc_port: int = 0
    addresses: tuple[str, ...] = ()
    """The URLs of all listeners."""


def open_ports(config: Config) -> tuple[list[Listener], Ports]:
    """Opens the ports of the `listen` settings. Raises CannotListen if one cannot be opened; none then stays open."""
    listen, secure = config.listen, bool(config.tls.cert or config.tls.dev)
    ports = [
        Port(number=listen.port, setting="listen.port or --port"),
        Port(number=listen.bidi_port, setting="listen.bidi_port"),
        Port(number=listen.grpc_port, setting="listen.grpc_port"),
        Port(number=listen.tls_port if secure else -1, setting="listen.tls_port or --tls-port", tls=True),
    ]
    rules = Rules(backlog=listen.backlog, keepalive=listen.tcp_keepalive, unix_mode=int(listen.unix_mode, 8))
    opened = open_listeners(listen.host, [port for port in ports if port.number >= 0], rules)
    beside = {listener.setting: listener.port for listener in reversed(opened) if listener.setting in _BESIDE}
    bidi_port, grpc_port = (beside.get(setting, 0) for setting in _BESIDE)
    mine = [listener for listener in opened if listener.port and listener.setting not in _BESIDE]
    return opened, Ports(
        port=next((listener.port for listener in mine if not listener.tls), 0),
        tls_port=next((listener.port for listener in mine if listener.tls), 0),
        bidi_port=bidi_port,
        grpc_port=grpc_port,
        addresses=tuple([listener.url for listener in opened]),
    )
