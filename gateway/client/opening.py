"""Connects a client to a URL: with TLS for https, and with HTTP/2 or HTTP/1.1."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from gateway.addresses import UNIX
from gateway.client.connection import dial, http1, http2
from gateway.client.conversations import Client
from gateway.errors import TransportLost

_PORTS = {"http": 80, "https": 443}


@asynccontextmanager
async def open_client(
    url: str, *, tls: ssl.SSLContext | None = None, prior_knowledge: bool = False
) -> AsyncIterator[Client]:
    """Opens one connection to the gateway at `url`, and closes it at the end of the block.

    The URL is, for example, `http://localhost:8080`, `https://host/prefix` if the gateway is mounted below a path, or
    `unix:/run/everywire.sock` for a Unix socket in clear text. The caller sets deadlines with Trio's scopes.

    Over https, the context's ALPN chooses the protocol: by default it offers HTTP/2 and HTTP/1.1 and trusts the system's
    authorities (`gateway.net.tls_context.client_context(ca)` trusts your own). Over http, the client speaks HTTP/1.1, or
    HTTP/2 with `prior_knowledge`; bidirectional streams need HTTP/2. Over https, `prior_knowledge` requires HTTP/2.
    ValueError for an invalid URL, OSError if the connection is not accepted, `gateway.errors.TransportLost` if TLS fails or
    does not agree on a required HTTP/2.
    """
    client = await connected(url, tls=tls, prior_knowledge=prior_knowledge)
    try:
        yield client
    finally:
        client.close()


async def connected(url: str, *, tls: ssl.SSLContext | None = None, prior_knowledge: bool = False) -> Client:
    """Opens a connection like `open_client`; the caller closes it."""
    at = url if url.startswith(UNIX) else ""
    parts = urlsplit("http://localhost" if at else url)
    if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{url!r} is no URL of a server: expected http://HOST[:PORT][/PREFIX], or https")
    if parts.scheme == "http":
        tls = None
    elif tls is None:
        tls = ssl.create_default_context()
        tls.set_alpn_protocols(["h2", "http/1.1"])
    transport = await dial(at or parts.hostname, parts.port or _PORTS[parts.scheme], tls=tls)
    if tls is not None and prior_knowledge and transport.alpn != "h2":
        transport.close()
        raise TransportLost(f"{url} does not speak HTTP/2 over TLS")
    peer = http2(transport) if transport.alpn == "h2" or prior_knowledge else http1(transport)
    prefix = parts.path.rstrip("/")
    return Client(peer, authority=parts.netloc.encode(), scheme=parts.scheme.encode(), prefix=prefix)
