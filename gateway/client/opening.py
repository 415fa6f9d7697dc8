"""A client at a URL: connects, with TLS where the URL says so, and chooses HTTP/2 or HTTP/1.1."""

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
    """One connection to the gateway at `url`, such as `http://localhost:8080`, `https://host/prefix` where it is mounted
    below a path, or `unix:/run/everywire.sock` for a Unix socket in clear; closed at the end of the block. The caller
    sets deadlines, with Trio's scopes.

    Over https the context's ALPN decides: by default it offers HTTP/2 and HTTP/1.1 and trusts the system's authorities
    (`gateway.net.tls_context.client_context(ca)` trusts one of your own). Over http it speaks HTTP/1.1, or with
    `prior_knowledge` HTTP/2, which bidirectional streams need; over https that must then come about. ValueError for what is
    no such URL, OSError where nobody answers, `gateway.errors.TransportLost` where TLS fails.
    """
    client = await connected(url, tls=tls, prior_knowledge=prior_knowledge)
    try:
        yield client
    finally:
        client.close()


async def connected(url: str, *, tls: ssl.SSLContext | None = None, prior_knowledge: bool = False) -> Client:
    """The same, to be closed by the caller."""
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
