"""Lobby: whoever comes when every place is taken is told so, as their wire says it, and keeps nothing."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import final

import msgspec
import trio

from gateway.errors import TransportLost, spread_over
from gateway.net.transport import Transport
from protocols.http2.frames import FRAME_HEAD, PREFACE, Code, Kind

log = logging.getLogger("gateway")

GUESTS = 64
"""Those that are waited for at once, at most, until they have said what they ask. Each has a descriptor, which is not one of
`limits.connections`."""
PATIENCE = 1.0
"""Seconds that each of them has for that, and to read the answer."""
_HEAD = 16 * 1024  # bytes of a head that are waited for
_TLS = 22  # RFC 8446 section 5.1: the first byte of a ClientHello's record


@final
class Lobby:
    """Refuses connections beyond the limit. One of HTTP/1.1 is answered 503 once its head is there, one of HTTP/2 with
    GOAWAY. A TLS connection is closed at once, as its handshake would cost more than a connection that is served. If
    too many wait already, the answer does not wait for a head."""

    def __init__(self, most: int = GUESTS, chance: Callable[[], float] = random.random) -> None:
        """`most` are waited for at once. `chance` gives numbers from 0 to 1: who comes back when."""
        self._most, self._chance = most, chance
        self.guests: set[trio.CancelScope] = set()
        """One for each that is here."""

    def refuse(self, nursery: trio.Nursery, transport: Transport, why: str, *, secure: bool = False) -> None:
        """Takes the connection, whose transport it closes; `why` is for the peer. Waits for nothing: it is said in a task of
        this nursery."""
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
                await _say(transport, self._http1(why), wait=False)  # it has said nothing
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
        return b"" if received[0] == _TLS else self._http1(why)

    def _http1(self, why: str) -> bytes:
        body = msgspec.json.encode({"error": f"{why}; try again later"})
        return (
            b"HTTP/1.1 503 Service Unavailable\r\nretry-after: %d\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (spread_over(1, self._chance()), len(body), body)
        )

    def close(self) -> None:
        """Everybody goes."""
        for guest in self.guests:
            guest.cancel()


async def _head(transport: Transport) -> bytes | None:
    """The bytes of the peer up to its head's end, or as many as tell its wire; None if it leaves."""
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
    """The answer is short: what a kernel does not take of it at once is for nobody. Then the peer may read it: closing over
    bytes that nobody has read would take it from it."""
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
    """RFC 9113: SETTINGS, with which a connection begins (section 3.4), and GOAWAY (section 6.8): no request was taken."""
    last_word = bytes(4) + Code.ENHANCE_YOUR_CALM.to_bytes(4, "big") + why.encode()
    return b"".join(
        [FRAME_HEAD.pack(Kind.SETTINGS, 0, 0), FRAME_HEAD.pack(len(last_word) << 8 | Kind.GOAWAY, 0, 0), last_word]
    )
