"""Reads the PROXY protocol, versions 1 and 2: the header that a TCP proxy sends before its client's first byte.

The specification is HAProxy's `doc/proxy-protocol.txt`; section numbers below are its. It requires a receiver to know
whether a header comes. `ProxyReceiver` detects it instead. Use it only for peers that are known to be proxies: any other
peer could claim any address.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Literal, TypeAlias, final

import msgspec

from protocols.errors import RemoteProtocolError
from protocols.events import NEED_DATA, Buffer, Signal

SIGNATURE_1 = b"PROXY "
SIGNATURE_2 = b"\r\n\r\n\x00\r\nQUIT\n"
_LINE = 107  # section 2.1: bytes, CRLF included
_FIXED = 16  # section 2.2: signature, version and command, family and transport, length
LONGEST = _FIXED + 0xFFFF
"""The size of the longest possible header, in bytes."""

Endpoint: TypeAlias = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int] | bytes
"""An address and a port, or the path of a Unix socket. The path of an abstract socket begins with a zero byte."""

# section 2.2, by family: the sizes of one address and of one port, in bytes
_SIZES = {1: (4, 2), 2: (16, 2), 3: (108, 0)}
_UNSPECIFIED, _STREAM, _TRANSPORTS = 0, 1, 2
# no leading zero in a number (section 2.1); `ipaddress` checks the addresses itself
_PORT = r"(0|[1-9][0-9]{0,4})"
_TCP = re.compile(rf"PROXY TCP([46]) ([0-9A-Fa-f:.]+) ([0-9A-Fa-f:.]+) {_PORT} {_PORT}")


@final
class ProxyHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a connection, or its absence."""

    version: Literal[0, 1, 2]
    """0: the connection has no header."""
    source: Endpoint | None = None
    """The client. None if the client is the connection's own peer: the proxy speaks for itself (LOCAL, such as a health
    check), or knows no address (UNKNOWN, or no stream)."""
    destination: Endpoint | None = None
    """The address that the client connected to. None if `source` is None."""


@final
class ProxyReceiver:
    """The beginning of a connection whose peer may send a PROXY header.

    Pass the received bytes to `receive_data`, in any pieces, and call `next_event` until it returns a ProxyHeader. `rest`
    then holds the bytes behind the header, which are all bytes if there is no header. TLVs and their checksum are skipped.
    """

    def __init__(self, at_most: int = LONGEST) -> None:
        """`at_most` is the largest header, in bytes, and bounds the memory."""
        self._at_most = at_most
        self._received = bytearray()
        self._ended = False
        self._header: ProxyHeader | None = None
        self._size = 0

    @property
    def begun(self) -> bool:
        """True if a part of the header has come, but not all of it."""
        return self._header is None and bool(self._received)

    @property
    def rest(self) -> bytes:
        """The bytes behind the header."""
        return bytes(self._received[self._size :]) if self._header is not None else b""

    def receive_data(self, data: Buffer) -> None:
        """Takes bytes from the peer."""
        self._received += data

    def receive_eof(self) -> None:
        """Tells that the peer sends nothing more."""
        self._ended = True

    def next_event(self) -> ProxyHeader | Signal:
        """The header, the same at each later call; NEED_DATA until it is complete. RemoteProtocolError if it is malformed,
        too large, or cut off: close the connection then."""
        if self._header is None:
            found = self._found()
            if found is None:
                return NEED_DATA
            self._header, self._size = found
        return self._header

    def _found(self) -> tuple[ProxyHeader, int] | None:
        """The header and its size, if all of it is here."""
        data = self._received
        for signature, read in ((SIGNATURE_1, self._line), (SIGNATURE_2, self._binary)):
            if data[: len(signature)] == signature[: len(data)]:
                found = read() if len(data) >= len(signature) else None
                if found is None and self._ended:
                    if len(data) >= len(signature):
                        raise RemoteProtocolError(f"the PROXY header was cut off after {len(data)} bytes")
                    break
                return found
        return ProxyHeader(version=0), 0

    # -- version 1 -------------------------------------------------------------------------------------------------

    def _line(self) -> tuple[ProxyHeader, int] | None:
        end = self._received.find(b"\r\n", 0, _LINE)
        if end < 0:
            if len(self._received) >= _LINE:
                raise RemoteProtocolError(f"PROXY header, version 1: no CRLF in its first {_LINE} bytes")
            return None
        line = bytes(self._received[:end])
        return _read_line(line), end + 2

    # -- version 2 -------------------------------------------------------------------------------------------------

    def _binary(self) -> tuple[ProxyHeader, int] | None:
        data = self._received
        if len(data) < _FIXED:
            return None
        version, command = divmod(data[12], 16)
        if version != 2 or command > 1:
            raise RemoteProtocolError(f"PROXY header: expected version 2, LOCAL or PROXY (0x20, 0x21), got {data[12]:#04x}")
        size = _FIXED + int.from_bytes(data[14:16], "big")
        if size > self._at_most:
            raise RemoteProtocolError(f"PROXY header of {size} bytes: more than {self._at_most} (limits.head)")
        local = command == 0  # the rest of such a header has no meaning
        family, transport = divmod(data[13], 16)
        if not local and (family > max(_SIZES) or transport > _TRANSPORTS):
            raise RemoteProtocolError(f"PROXY header: no family and transport are {data[13]:#04x}")
        address, port = _SIZES.get(family, (0, 0))
        known = not local and family != _UNSPECIFIED and transport == _STREAM
        if known and size < _FIXED + 2 * (address + port):
            raise RemoteProtocolError(
                f"PROXY header: addresses of family {family} have {2 * (address + port)} bytes, got {size - _FIXED}"
            )
        if len(data) < size:
            return None
        if not known:
            return ProxyHeader(version=2), size
        block = bytes(data[_FIXED:size])
        ports = block[2 * address : 2 * (address + port)]
        source = _endpoint(block[:address], ports[:port])
        return ProxyHeader(version=2, source=source, destination=_endpoint(block[address : 2 * address], ports[port:])), size


def _read_line(line: bytes) -> ProxyHeader:
    if re.match(rb"PROXY UNKNOWN(?: |\Z)", line):
        return ProxyHeader(version=1)
    found = _TCP.fullmatch(line.decode("latin-1"))
    if found is None:
        raise RemoteProtocolError(
            f"PROXY header, version 1: expected TCP4, TCP6 or UNKNOWN and its fields, got {line[:107]!r}"
        )
    kind = ipaddress.IPv4Address if found[1] == "4" else ipaddress.IPv6Address
    try:
        source, destination = (kind(found[2]), int(found[4])), (kind(found[3]), int(found[5]))
    except ValueError:
        raise RemoteProtocolError(f"PROXY header, version 1: no addresses of TCP{found[1]} in {line!r}") from None
    if max(source[1], destination[1]) > 0xFFFF:
        raise RemoteProtocolError(f"PROXY header, version 1: a port is from 0 to 65535, got {line!r}")
    return ProxyHeader(version=1, source=source, destination=destination)


def _endpoint(address: bytes, port: bytes) -> Endpoint:
    if port:
        return ipaddress.ip_address(address), int.from_bytes(port, "big")
    end = address.find(b"\0", 1)
    return (address if end < 0 else address[:end]).rstrip(b"\0") if address[:1] == b"\0" else address.partition(b"\0")[0]
