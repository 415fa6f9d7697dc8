"""Trusted proxies and the clients behind them: PROXY headers of connections, forwarded fields of requests."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import final

from gateway.addresses import TRUSTED_UNIX, UNIX, IPAddress, ip_address, split_port, written, written_ip
from gateway.errors import TransportLost
from gateway.net.transport import Transport
from gateway.untrusted_text import unquoted
from protocols.errors import RemoteProtocolError
from protocols.events import Signal
from protocols.proxy import ProxyHeader, ProxyReceiver


@final
class TrustedProxies:
    """The proxies of `listen.trusted_proxies`."""

    def __init__(self, listed: Iterable[str]) -> None:
        """`listed` has addresses, networks, and `unix` for every Unix socket. ValueError for any other text."""
        named = set(listed)
        self._unix = TRUSTED_UNIX in named
        networks = [_network(text) for text in sorted(named - {TRUSTED_UNIX})]
        self._networks = {version: [net for net in networks if net.version == version] for version in (4, 6)}

    def includes(self, peer: str) -> bool:
        """True if a connection's peer is a trusted proxy. `peer` is the transport's text for it."""
        if peer.startswith(UNIX):
            return self._unix
        address = ip_address(split_port(peer)[0])
        return address is not None and self.trusts(address)

    def trusts(self, address: IPAddress) -> bool:
        """True if this is the address of a trusted proxy."""
        return any(address in network for network in self._networks[address.version])

    async def greeted(self, transport: Transport, receiver: ProxyReceiver) -> TrustedProxies | None:
        """Reads the PROXY header that a trusted proxy may have sent. If there is one, `transport.peer` becomes the client
        that it names. The receiver keeps the bytes behind it. Returns the proxies that may name clients in requests: these,
        or None if that client is not one of them. TransportLost for a malformed header, or if the peer leaves first."""
        buffer = memoryview(bytearray(4096))
        while isinstance(header := _next(receiver), Signal):
            n = transport.try_receive_into(buffer)
            if n is None:
                await transport.wait_readable()
            elif n:
                receiver.receive_data(buffer[:n])
            else:
                receiver.receive_eof()
        if header.source is None:
            return self
        if isinstance(header.source, bytes):  # a Unix socket of the proxy's machine
            transport.peer = written(header.source)
            return None
        address, port = header.source
        transport.peer = written_ip(str(address), port)
        return self if self.includes(transport.peer) else None


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """Reads a network. One of IPv4 addresses mapped into IPv6 becomes the IPv4 network, as the addresses of peers do."""
    network = ipaddress.ip_network(text)
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    return network if mapped is None or network.prefixlen < 96 else ipaddress.ip_network((mapped, network.prefixlen - 96))


def _next(receiver: ProxyReceiver) -> ProxyHeader | Signal:
    try:
        return receiver.next_event()
    except RemoteProtocolError as e:
        raise TransportLost(f"malformed PROXY header: {unquoted(str(e))[:300]}") from None
