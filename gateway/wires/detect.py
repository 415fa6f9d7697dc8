"""Detects the wire of a new connection: by ALPN over TLS, by the HTTP/2 preface in clear, HTTP/1.1 otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from gateway.core.connection import Connection, ConnectionWire
from gateway.errors import TransportLost
from gateway.log_limits import LogLimits
from gateway.net.transport import Transport
from gateway.wires.http1 import HTTP1Wire
from gateway.wires.http2 import HTTP2Wire
from protocols.proxy import SIGNATURE_1, SIGNATURE_2

log = logging.getLogger("gateway.connection")

_TLS_HANDSHAKE = 22  # RFC 8446 section 5.1: the first byte of a ClientHello's record
# RFC 9113 section 3.4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def sniff(
    transport: Transport, received: bytes = b"", *, secure: bool, log_limits: LogLimits
) -> tuple[Callable[[Connection], ConnectionWire], bytes]:
    """Returns a function that makes the connection's wire, and all bytes read so far, `received` included. Raises
    TransportLost if the peer leaves first."""
    scheme = b"https" if secure else b"http"
    if transport.alpn == "h2":
        return lambda connection: HTTP2Wire(connection, scheme=scheme), b""
    if transport.alpn:
        return lambda connection: HTTP1Wire(connection, scheme=scheme), b""
    buffer = memoryview(bytearray(4096))
    while True:
        if len(received) < len(_PREFACE) and _PREFACE.startswith(received):
            n = transport.try_receive_into(buffer)
            if n is None:
                await transport.wait_readable()
                continue
            if n == 0:
                raise TransportLost("the peer left before its first request", left=True)
            received += bytes(buffer[:n])
        if received[0] == _TLS_HANDSHAKE:
            raise TransportLost("the client spoke TLS on a port without TLS")
        if not _PREFACE.startswith(received[: len(_PREFACE)]):
            if received.startswith((SIGNATURE_1, SIGNATURE_2)):
                said = "PROXY header refused: the peer is not in listen.trusted_proxies"
                log_limits.write(log, said, {"peer": transport.peer, "setting": "listen.trusted_proxies"})
            return lambda connection: HTTP1Wire(connection, scheme=scheme), received
        if len(received) >= len(_PREFACE):
            return lambda connection: HTTP2Wire(connection, scheme=scheme), received
        await trio.lowlevel.checkpoint()
