"""TLS as a transport: an ssl.MemoryBIO pump in the same reader and writer, with no task of its own."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence
from typing import final

import trio

from gateway.errors import TransportLost
from gateway.transport import Transport
from protocols.events import Buffer

_CHUNK = 65536
_RECORD = 16384


@final
class TLSTransport:
    """Encrypts over another transport.

    `handshake` comes first. A plaintext byte counts as sent when its ciphertext was produced; `pending` tells whether
    ciphertext still waits for the transport below.
    """

    def __init__(
        self, below: Transport, context: ssl.SSLContext, *, server_side: bool = True, hostname: str | None = None
    ) -> None:
        self._below = below
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=hostname)
        self._scratch = memoryview(bytearray(_CHUNK))
        self._unsent: memoryview = memoryview(b"")
        self._maybe_more = False
        self._below_eof = False
        self.peer = below.peer
        self.alpn = ""

    async def handshake(self) -> None:
        """Completes the handshake; TransportLost if the peer fails it."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                if not self._pull():
                    await self._below.wait_readable()
                    if not self._pull() and self._below_eof:
                        raise TransportLost("the peer left during the TLS handshake") from None
            except ssl.SSLError as e:
                self._push()
                raise TransportLost(f"TLS handshake failed: {e.reason}") from e
            else:
                break
        await self._flush()
        self.alpn = self._tls.selected_alpn_protocol() or ""
        self._maybe_more = True

    async def _flush(self) -> None:
        while not self._push():
            await self._below.wait_writable()

    def _pull(self) -> bool:
        """Moves what has arrived into the TLS object; whether anything did."""
        if self._below_eof:
            return False
        n = self._below.try_receive_into(self._scratch)
        if n is None:
            return False
        if n == 0:
            self._below_eof = True
            self._incoming.write_eof()
            return False
        self._incoming.write(self._scratch[:n])
        return True

    def _push(self) -> bool:
        """Moves ciphertext down; True when none is left."""
        while True:
            if not self._unsent and self._outgoing.pending:
                self._unsent = memoryview(self._outgoing.read())
            if not self._unsent:
                return True
            n = self._below.try_send([self._unsent])
            if not n:
                return False
            self._unsent = self._unsent[n:]

    @property
    def pending(self) -> bool:
        return bool(self._unsent) or self._outgoing.pending > 0

    def try_receive_into(self, buffer: memoryview) -> int | None:
        while True:
            try:
                n: int = self._tls.read(len(buffer), buffer)  # type: ignore[assignment]  # typeshed: an int with a buffer
            except ssl.SSLWantReadError:
                if self._pull():
                    continue
                self._maybe_more = False
                if self._below_eof:
                    return 0
                self._push()  # an answer of TLS itself, such as a key update's
                return None
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                # Truncation is not hidden: every wire above frames its own end.
                return 0
            except ssl.SSLError as e:
                self._push()
                raise TransportLost(f"TLS failed: {e.reason}") from e
            self._maybe_more = True
            return n

    def try_send(self, buffers: Sequence[Buffer]) -> int:
        if not self._push():
            return 0
        if not buffers:
            return 0
        try:
            if len(buffers) > 1 and len(buffers[0]) < _RECORD:
                data = b"".join(_front(buffers, 4 * _RECORD))
                n = self._tls.write(data)
            else:
                n = self._tls.write(memoryview(buffers[0])[: 4 * _RECORD])
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as e:
            raise TransportLost(f"TLS failed: {e.reason}") from e
        self._push()
        return n

    async def wait_readable(self) -> None:
        if self._maybe_more or self._below_eof:
            self._maybe_more = False
            await trio.lowlevel.checkpoint()
        else:
            await self._below.wait_readable()

    async def wait_writable(self) -> None:
        await self._below.wait_writable()

    def hung_up(self) -> bool:
        return self._below.hung_up()

    def send_eof(self) -> None:
        with contextlib.suppress(ssl.SSLError, ValueError):  # our close_notify is what counts, the peer's is not waited for
            self._tls.unwrap()
        try:
            self._push()
        except TransportLost:
            return
        self._below.send_eof()

    def close(self) -> None:
        self._below.close()


def _front(buffers: Sequence[Buffer], n: int) -> list[Buffer]:
    front: list[Buffer] = []
    for buffer in buffers:
        if n <= 0:
            break
        front.append(memoryview(buffer)[:n] if len(buffer) > n else buffer)
        n -= len(buffer)
    return front
