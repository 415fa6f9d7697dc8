"""Lobby: refuses connections that come when every place is taken, each as its wire does."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import final

import msgspec
import trio

from gateway.core.server import allows_request
from gateway.errors import TransportLost, spread_over
from gateway.net.transport import Transport
from protocols.events import Headers
from protocols.http1.refused import RefusedHead
from protocols.http2.frames import FRAME_HEAD, PREFACE, Code, Kind

log = logging.getLogger("gateway")

GUESTS = 64
"""Connections in the lobby, at most, that wait for a head at once. Each takes a descriptor that `limits.connections` does
not count."""
PATIENCE = 1.0
"""Seconds that each of them has to send its head and read the answer."""
_HEAD = 16 * 1024  # bytes of a head that are waited for
_TLS = 22  # RFC 8446 section 5.1: the first byte of a ClientHello's record


@final
class Lobby:
    """Refuses connections for which there is no place. HTTP/1.1 is answered 503 once a head has arrived, HTTP/2 by GOAWAY.
    TLS is closed without an answer, because a handshake would cost more than serving a connection that has a place. If the
    lobby is full, 503 is sent at once, without waiting for a head."""

    def __init__(
        self,
        most: int = GUESTS,
        chance: Callable[[], float] = random.random,
        beside: Callable[[bytes, Headers], Headers] = lambda method, headers: (),
    ) -> None:
        """`most` connections may wait at once. `chance` returns numbers from 0 to 1, which spread `Retry-After`. `beside`
        returns the fields to add to the answer to a request with this method and these headers, for pages."""
        self._most, self._chance, self._beside = most, chance, beside
        self.guests: set[trio.CancelScope] = set()
        """A scope for each connection in the lobby."""

    def refuse(self, nursery: trio.Nursery, transport: Transport, why: str, *, secure: bool = False) -> None:
        """Refuses the connection and closes its transport; `why` is for the peer. It does not wait: the answer is sent in a
        task of this nursery."""
        if secure:
            transport.close()
        elif len(self.guests) >= self._most:
            with suppress(TransportLost):
                transport.try_send([self._http1(why)])
            transport.close()
        else:
            guest = trio.CancelScope()
            self.guests.add(guest)
            nursery.start_soon(self._serve, guest, transport, why)

    async def _serve(self, guest: trio.CancelScope, transport: Transport, why: str) -> None:
        try:
            with guest:
                with trio.move_on_after(PATIENCE):
                    received = await _head(transport)
                    if received is None:
                        return
                    await _say(transport, self._answer(received, why))
                    return
                await _say(transport, self._http1(why), wait=False)  # no head has arrived in time
        except TransportLost:
            pass
        except Exception:
            log.exception("connection failed", extra={"peer": transport.peer})
        finally:
            self.guests.discard(guest)
            transport.close()

    def _answer(self, received: bytes, why: str) -> bytes:
        if received.startswith(PREFACE):
            return _http2(why)
        return b"" if received[0] == _TLS else self._http1(why, received)

    def _http1(self, why: str, received: bytes = b"") -> bytes:
        head = RefusedHead()
        head.feed(received)
        fields = self._beside(received.partition(b" ")[0], head.headers)
        beside = b"".join(b"%b: %b\r\n" % field for field in fields)
        if allows_request(fields):  # the request itself then gets the 503, which its page can read
            return b"HTTP/1.1 204 No Content\r\nconnection: close\r\n%b\r\n" % beside
        body = msgspec.json.encode({"error": f"{why}; try again later"})
        return (
            b"HTTP/1.1 503 Service Unavailable\r\nretry-after: %d\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"%bcontent-length: %d\r\n\r\n%b" % (spread_over(1, self._chance()), beside, len(body), body)
        )

    def close(self) -> None:
        """Closes all connections in the lobby."""
        for guest in self.guests:
            guest.cancel()


async def _head(transport: Transport) -> bytes | None:
    """Receives up to a head's end, or as much as shows HTTP/2 or TLS; None if the peer leaves."""
    received, buffer = b"", memoryview(bytearray(4096))
    while len(received) < _HEAD:
        n = transport.try_receive_into(buffer)
        if n is None:
            await transport.wait_readable()
            continue
        if n == 0:
            return None
        received += bytes(buffer[:n])
        if received.startswith(PREFACE) or received[0] == _TLS:
            break
        if b"\n\r\n" in received and not PREFACE.startswith(received):
            break
    return received


async def _say(transport: Transport, answer: bytes, *, wait: bool = True) -> None:
    """Sends the short answer; bytes that the kernel does not take at once are dropped. Then receives for a while, so that
    the peer can read the answer: closing over unread bytes would destroy it."""
    if answer:
        transport.try_send([answer])
    transport.send_eof()
    buffer, left = memoryview(bytearray(4096)), _HEAD
    while wait and left > 0 and (n := transport.try_receive_into(buffer)) != 0:
        if n is None:
            await transport.wait_readable()
        else:
            left -= n


def _http2(why: str) -> bytes:
    """Makes the frames that refuse an HTTP/2 connection (RFC 9113): SETTINGS, with which it begins (section 3.4), and
    GOAWAY (section 6.8), which says that no request was processed."""
    last_word = bytes(4) + Code.ENHANCE_YOUR_CALM.to_bytes(4, "big") + why.encode()
    return b"".join(
        [FRAME_HEAD.pack(Kind.SETTINGS, 0, 0), FRAME_HEAD.pack(len(last_word) << 8 | Kind.GOAWAY, 0, 0), last_word]
    )
