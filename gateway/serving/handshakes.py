"""Handshakes: makes accepted connections secure, and bounds the TLS handshakes that wait for their clients."""

from __future__ import annotations

import ssl
from functools import partial
from itertools import islice
from typing import final

import trio

from gateway.core.server import Server
from gateway.errors import Closing, TransportLost
from gateway.net.tables import shrunk
from gateway.net.tls_transport import TLSTransport, first_record
from gateway.net.transport import Transport
from protocols.floods import HANDSHAKE_PATIENCE, HANDSHAKES

_LOOKS = 8  # handshakes, at most, that one arrival looks at: a poll of a socket each


@final
class _Handshake:
    """One that is under way."""

    __slots__ = ("ended", "scope", "secure", "since")

    def __init__(self, secure: TLSTransport, scope: trio.CancelScope, since: float) -> None:
        self.secure, self.scope, self.since, self.ended = secure, scope, since, False


@final
class Handshakes:
    """The TLS handshakes under way.

    A client pays for one with its first message, and the server with OpenSSL's memory until the client's next message. So
    at most `HANDSHAKES` may wait for their clients as long as they like. Beyond that, each that begins ends those that have
    waited the longest, if that is `HANDSHAKE_PATIENCE` at least and nothing of the client waits for us: on a busy loop its
    answer may have come long ago.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._waiting: dict[_Handshake, None] = {}  # the first has waited the longest

    async def secured(self, transport: Transport, context: ssl.SSLContext, received: bytes = b"") -> TLSTransport:
        """Completes the handshake of a new connection, of which `received` was already read. TransportLost if it fails, if
        the client leaves, if it takes longer than `limits.tls_handshake_timeout`, or if it was ended to make room."""
        one: _Handshake | None = None
        with trio.move_on_after(self._server.limits.tls_handshake_timeout) as scope:
            received = await first_record(transport, received)
            self._make_room()
            one = _Handshake(TLSTransport(transport, context, received=received), scope, trio.current_time())
            self._waiting[one] = None
            try:
                await one.secure.handshake(partial(self._answered, one))
                return one.secure
            finally:
                self._waiting.pop(one, None)
        if one is None or not one.ended:
            raise TransportLost("the TLS handshake took too long (limits.tls_handshake_timeout)")
        self._server.connection_ended(Closing.EVICTED)
        raise TransportLost(f"more than {HANDSHAKES} TLS handshakes waited for their clients, and this one the longest")

    def rest(self) -> None:
        """Gives back the room of its table that is empty now."""
        self._waiting = shrunk(self._waiting)

    def _answered(self, one: _Handshake) -> None:
        """The client has an answer, and is waited for from now on. Its bytes alone do not count: it could send them one by
        one."""
        if not one.ended:
            del self._waiting[one]
            self._wait(one)

    def _wait(self, one: _Handshake) -> None:
        one.since = trio.current_time()
        self._waiting[one] = None

    def _make_room(self) -> None:
        """Ends handshakes, so that there is room for one more."""
        waiting = self._waiting
        for one in list(islice(waiting, max(0, min(len(waiting) - HANDSHAKES + 1, _LOOKS)))):
            if trio.current_time() - one.since < HANDSHAKE_PATIENCE:
                return
            del waiting[one]
            if one.secure.receivable():
                self._wait(one)
            else:
                one.ended = True
                one.secure.abandon()  # its task may run much later
                one.scope.cancel()
