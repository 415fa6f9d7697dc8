"""A gateway that serves over TLS, and a client's connection to it, for the tests of certificates."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from gateway.config import Config, ListenConfig, TLSConfig
from gateway.gateway import Gateway
from models.adapt import spec_of

Stream = trio.SSLStream[trio.SocketStream]


@asynccontextmanager
async def serving(tls: TLSConfig, *models: Any) -> AsyncIterator[Gateway]:
    gateway = Gateway(Config(listen=ListenConfig(port=-1, tls_port=0), tls=tls), [spec_of(model) for model in models])
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(gateway.serve)
            yield gateway
            nursery.cancel_scope.cancel()


async def secured(gateway: Gateway, context: ssl.SSLContext) -> Stream:
    """A connection whose handshake is still to come."""
    stream = await trio.open_tcp_stream("127.0.0.1", gateway.tls_port)
    return trio.SSLStream(stream, context, server_hostname="localhost", https_compatible=True)


async def connect(gateway: Gateway, context: ssl.SSLContext) -> Stream:
    stream = await secured(gateway, context)
    await stream.do_handshake()
    return stream
