"""TLS as a transport, by ssl.MemoryBIO: it runs in the connection's reader and writer, without a task of its own."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence
from typing import final

import trio

from gateway.errors import TransportLost
from gateway.net.transport import Transport, front
from protocols.events import Buffer

_CHUNK = 65536
_RECORD = 16384
_LAST_WORDS = 1.0  # seconds that a failed handshake waits for the client to leave
_UNTRUSTED = "the client does not trust the server's certificate: it needs the CA's certificate"
_CAUSES = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client has shown no certificate, and one is required (tls.client_ca)",
    "HTTP_REQUEST": "the client sent HTTP without TLS to the TLS port",
    "WRONG_VERSION_NUMBER": "the client sent no TLS, or a PROXY header before it (listen.trusted_proxies)",
    "UNSUPPORTED_PROTOCOL": "the client does not support TLS 1.2 or later",
    "NO_SHARED_CIPHER": "the client offers no cipher with forward secrecy and AEAD",
    "TLSV1_ALERT_UNKNOWN_CA": _UNTRUSTED,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _UNTRUSTED,
    "SSLV3_ALERT_BAD_CERTIFICATE": _UNTRUSTED,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client finds that the server's certificate is not valid now",
}
"""The causes of failed handshakes of a server, by OpenSSL's reason."""
_CAUSES_OF_A_CLIENT = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server requires a client certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "the server does not trust the client's certificate",
}
"""The causes of failed handshakes of a client, by OpenSSL's reason."""


@final
class TLSTransport:
    """Encrypts over another transport.

    `handshake` must be called first. A plaintext byte counts as sent once it is encrypted. `pending` is true while
    encrypted bytes still wait for the transport below.
    """

    short_is_dry = False  # a read returns one record at most

    def __init__(
        self,
        below: Transport,
        context: ssl.SSLContext,
        *,
        server_side: bool = True,
        hostname: str | None = None,
        received: bytes = b"",
    ) -> None:
        """`received`: bytes that were already read from the transport below."""
        self._below = below
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._incoming.write(received)
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=hostname)
        self._scratch = memoryview(bytearray(_CHUNK))
        self._unsent: memoryview = memoryview(b"")
        self._ahead: memoryview = memoryview(b"")  # received before `send_eof`
        self._maybe_more = False
        self._below_eof = self._ending = False
        self._server_side = server_side
        self.peer = below.peer
        self.alpn = ""

    async def handshake(self) -> None:
        """Completes the handshake. TransportLost if it fails or the peer leaves."""
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
                await self._say_why()
                raise TransportLost(f"TLS handshake failed: {self._why(e)}") from e
            else:
                break
        await self._flush()
        self.alpn = self._tls.selected_alpn_protocol() or ""
        self._maybe_more = True

    def peer_certificate(self) -> bytes:
        """Returns the peer's verified certificate, in DER; empty if the peer showed none or was not asked for one."""
        return self._tls.getpeercert(binary_form=True) or b""

    def _why(self, error: ssl.SSLError) -> str:
        """Returns OpenSSL's reason, with its cause in plain words if there is an entry for it."""
        if isinstance(error, ssl.SSLCertVerificationError):
            setting = " (tls.client_ca)" if self._server_side else ""
            return f"{error.reason}: the peer's certificate is refused: {error.verify_message}{setting}"
        cause = (_CAUSES if self._server_side else _CAUSES_OF_A_CLIENT).get(error.reason)
        return f"{error.reason}: {cause}" if cause else error.reason

    async def _say_why(self) -> None:
        """Sends the alert, and gives the client time to read it. In TLS 1.3 a client has often sent its request before the
        server refuses its certificate. Closing with those bytes unread makes the kernel send RST, which destroys the
        alert."""
        with trio.move_on_after(_LAST_WORDS), contextlib.suppress(TransportLost):
            await self._flush()
            if self._server_side:
                self._below.send_eof()
                while self._below.try_receive_into(self._scratch) != 0:
                    await self._below.wait_readable()

    async def _flush(self) -> None:
        self._push()
        while self.pending:
            await self._below.wait_writable()
            self._push()

    def _pull(self) -> bool:
        """Moves received bytes into the TLS object. True if there were any."""
        if self._below_eof:
            return False
        n = self._below.try_receive_into(self._scratch)
        if n is None:
            return False
        if n == 0:
            # a missing close_notify is no error here: every wire above frames its end, and sees a truncation itself
            self._below_eof = True
            return False
        self._incoming.write(self._scratch[:n])
        return True

    def _push(self) -> bool:
        """Moves encrypted bytes to the transport below. True when none are left."""
        while True:
            if not self._unsent and self._outgoing.pending:
                self._unsent = memoryview(self._outgoing.read())
            if not self._unsent:
                if self._ending:
                    self._ending = False
                    self._below.send_eof()
                return True
            n = self._below.try_send([self._unsent])
            if not n:
                return False
            self._unsent = self._unsent[n:]

    @property
    def pending(self) -> bool:
        return bool(self._unsent) or self._outgoing.pending > 0 or self._below.pending

    def try_receive_into(self, buffer: memoryview) -> int | None:
        if self._ahead:
            n = min(len(self._ahead), len(buffer))
            buffer[:n] = self._ahead[:n]
            self._ahead = self._ahead[n:]
            return n
        while True:
            try:
                n = self._tls.read(len(buffer), buffer)  # type: ignore[assignment]  # typeshed: an int with a buffer
            except ssl.SSLWantReadError:
                if self._pull():
                    continue
                self._maybe_more = False
                if self._below_eof:
                    return 0
                self._push()
                return None
            except ssl.SSLZeroReturnError:
                return 0
            except ssl.SSLError as e:
                self._push()
                raise TransportLost(f"TLS failed: {self._why(e)}") from e
            self._maybe_more = True
            return n

    def try_send(self, buffers: Sequence[Buffer]) -> int:
        if not self._push():
            return 0
        if not buffers:
            return 0
        try:
            if len(buffers) > 1 and len(buffers[0]) < _RECORD:
                data = b"".join(front(buffers, 4 * _RECORD))
                n = self._tls.write(data)
            else:
                n = self._tls.write(memoryview(buffers[0])[: 4 * _RECORD])
        except ssl.SSLError as e:
            raise TransportLost(f"TLS failed: {e.reason}") from e
        self._push()
        return n

    async def wait_readable(self) -> None:
        if self._ahead or self._maybe_more or self._below_eof:
            await trio.lowlevel.checkpoint()
        else:
            await self._below.wait_readable()

    async def wait_writable(self) -> None:
        await self._below.wait_writable()

    def unsent(self) -> tuple[int, int] | None:
        return self._below.unsent()

    def hung_up(self) -> bool:
        return self._below.hung_up()

    def send_eof(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # sends our close_notify; the peer's is not waited for
            self._read_ahead()
            self._tls.unwrap()
        self._ending = True
        with contextlib.suppress(TransportLost):
            self._push()

    def _read_ahead(self) -> None:
        # with data unread, unwrap fails, and so does every later read (OpenSSL 3.0)
        ahead = bytearray(self._ahead)
        with contextlib.suppress(ssl.SSLWantReadError):
            while data := self._tls.read(_CHUNK):
                ahead += data
        self._ahead = memoryview(ahead)

    def close(self) -> None:
        self._below.close()
