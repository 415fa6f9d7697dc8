"""Addresses: reads the places to listen on from the configuration, and writes those of sockets for URLs and the log."""

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
"""The prefix of a Unix socket's path."""
TRUSTED_UNIX = "unix"
"""The word for every Unix socket in a list of networks."""


@final
@dataclass(frozen=True, slots=True)
class Host:
    """A host's name or address. Its ports are separate settings."""

    name: str


@final
@dataclass(frozen=True, slots=True)
class UnixSocket:
    """A socket in the file system, with or without TLS."""

    path: str
    tls: bool = False


@final
@dataclass(frozen=True, slots=True)
class Passed:
    """Sockets that systemd, or a program with its protocol, has opened for this process. An empty name: all of them."""

    name: str
    tls: bool = False


Place: TypeAlias = Host | UnixSocket | Passed


def places_of(said: str | Iterable[str]) -> list[Place]:
    """Returns the places of a setting such as `listen.host`, which is one text or a list."""
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
    """Returns a host as URLs write it: an IPv6 address is in brackets (RFC 3986 section 3.2.2)."""
    return f"[{host}]" if ":" in host else host


def reached_at(said: str | Iterable[str], port: int, *, scheme: str = "http") -> str:
    """Returns the URL, or `unix:PATH`, by which a program on this machine reaches a plain listener of these places: the
    first whose address is known. Empty if there is none: sockets of systemd, and ports not above 0, are unknown."""
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
    """Writes the name of a socket, from `getsockname` or `getpeername`, for the log: `127.0.0.1:8080`, `[::1]:8080`,
    `unix:/path`. An IPv4 client of a socket for both families has its IPv4 address. A Unix socket's name may have any
    bytes: unprintable characters are escaped."""
    if not isinstance(name, tuple):
        path = os.fsdecode(name) if isinstance(name, bytes | str) else ""
        return f"{UNIX}{escape(path.replace(chr(0), '@', 1))}"
    return written_ip(name[0], name[1])


def written_ip(host: str, port: int | None) -> str:
    """Writes an IP address and its port as URLs do. If `port` is None, the address alone."""
    if ":" in host:
        address = ip_address(host)
        host = host if address is None else str(address)
    return url_host(host) if port is None else f"{url_host(host)}:{port}"


def split_port(text: str) -> tuple[str, int | None]:
    """Splits an address that `written` or `written_ip` has made into the host, without brackets, and the port. The port is
    None if there is none."""
    host, colon, port = text.rpartition(":")
    if text.startswith(UNIX) or not colon or not port.isdecimal():
        return text.strip("[]"), None
    return host.strip("[]"), int(port)


def ip_address(text: str) -> IPAddress | None:
    """Reads an IP address. An IPv4 address mapped into IPv6 (RFC 4291 section 2.5.5.2) becomes IPv4. None if the text is
    not an address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_network(text: str) -> bool:
    """True if the text is valid in `listen.trusted_proxies`."""
    if text == TRUSTED_UNIX:
        return True
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def peer_of(sock: socket.socket | trio.socket.SocketType) -> str:
    """Returns the address of a socket's peer, for the log. A client of a Unix socket has no address: the result is that of
    the listening socket. Empty if the peer has left."""
    try:
        name = sock.getpeername()
        if not isinstance(name, tuple) and not name:
            name = sock.getsockname()
    except OSError:
        return ""
    return written(name)
