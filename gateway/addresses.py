"""Addresses: the places to listen at, as the configuration writes them, and those of sockets, as URLs and the log do."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, final

from gateway.untrusted_text import escape

if TYPE_CHECKING:
    import trio

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

UNIX = "unix:"
"""Prefix of the path of a Unix socket."""
TRUSTED_UNIX = "unix"
"""Name of every Unix socket in a list of networks."""


@final
@dataclass(frozen=True, slots=True)
class Host:
    """A name or an address, with the ports that are configured beside it."""

    name: str


@final
@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A socket in the file system, in clear or behind TLS."""

    path: str
    tls: bool = False


@final
@dataclass(frozen=True, slots=True)
class Passed:
    """Sockets that systemd, or a program of its protocol, has opened for this process: those of a name, or all of them."""

    name: str
    tls: bool = False


Place: TypeAlias = Host | UnixSocket | Passed


def places_of(said: str | Iterable[str]) -> list[Place]:
    """The places that a setting such as `listen.host` says, which is one of them or a list."""
    return [_place(text) for text in ([said] if isinstance(said, str) else said)]


def _place(text: str) -> Place:
    kind, colon, rest = text.partition(":")
    match kind:
        case "unix" | "unix+tls" if colon:
            return UnixSocket(rest, tls=kind != "unix")
        case "systemd" | "systemd+tls":
            return Passed(rest, tls=kind != "systemd")
        case _:
            return Host(text)


def url_host(host: str) -> str:
    """A host as a URL has it: an IPv6 address in brackets (RFC 3986 section 3.2.2)."""
    return f"[{host}]" if ":" in host else host


def reached_at(said: str | Iterable[str], port: int, *, scheme: str = "http") -> str:
    """The URL, or `unix:PATH`, by which a program on this machine reaches what listens in clear at the first of these places
    that can be told; empty where none can: sockets that systemd passes, and a port that is not above 0."""
    for place in places_of(said):
        match place:
            case Host(name) if port > 0:
                name = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(name, name)
                return f"{scheme}://{url_host(name)}:{port}"
            case UnixSocket(path, tls=False):
                return f"{UNIX}{path}"
            case _:
                pass
    return ""


def written(name: object) -> str:
    """The name of a socket, as `getsockname` or `getpeername` gives it, for the log: `127.0.0.1:8080`, `[::1]:8080`,
    `unix:/path`. An IPv4 client of a socket for both families has its IPv4 address. The name of a Unix socket may be any
    bytes: those that cannot be printed are escaped."""
    if not isinstance(name, tuple):
        path = os.fsdecode(name) if isinstance(name, bytes | str) else ""
        return f"{UNIX}{escape(path.replace(chr(0), '@', 1))}"
    return written_ip(name[0], name[1])


def written_ip(host: str, port: int | None) -> str:
    """An IP address and its port as URLs write them; `port` None: the address alone."""
    if ":" in host:
        address = ip_address(host)
        host = host if address is None else str(address)
    return url_host(host) if port is None else f"{url_host(host)}:{port}"


def split_port(text: str) -> tuple[str, int | None]:
    """An address that `written` or `written_ip` has made, without brackets, and its port."""
    host, colon, port = text.rpartition(":")
    if text.startswith(UNIX) or not colon or not port.isdecimal():
        return text.strip("[]"), None
    return host.strip("[]"), int(port)


def ip_address(text: str) -> IPAddress | None:
    """The address that a text is, an IPv4 address mapped into IPv6 (RFC 4291 section 2.5.5.2) as what it stands for; None
    where it is none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_network(text: str) -> bool:
    """True if `listen.trusted_proxies` may list this text."""
    if text == TRUSTED_UNIX:
        return True
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def peer_of(sock: socket.socket | trio.socket.SocketType) -> str:
    """The address of a socket's peer, for the log. A client of a Unix socket has none of its own: it is that of the socket
    that it came to. Empty where it has left."""
    try:
        name = sock.getpeername()
        if not isinstance(name, tuple) and not name:
            name = sock.getsockname()
    except OSError:
        return ""
    return written(name)
