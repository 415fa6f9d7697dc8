"""TLS as a transport, by ssl.MemoryBIO: it runs in the connection's reader and writer, without a task of its own.

A record without payload costs its peer 22 bytes, and us the work of a record or, for a KeyUpdate, of new keys: OpenSSL reads
as many of them as it has, in one call. So the records that came are counted here, by their headers (RFC 8446 section 5.1);
OpenSSL gets a few at a time, and those that gave no payload have an allowance.
"""

from __future__ import annotations

import contextlib
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from typing import final

import trio

from gateway.errors import TransportFlooded, TransportLost
from gateway.net.transport import Transport, front
from protocols.events import Buffer
from protocols.floods import HANDSHAKE_RECORDS, TLS_FLOODS, FloodPolicy, RecordCounts

_CHUNK = 65536
_RECORD = 16384
_HEADER = 5  # bytes of a record before its own
_BEGINS = b"\x16\x03"  # a record of the handshake, and the first byte of its version
_HELLO = 2048  # bytes of the first record, at most, that are waited for: with keys of ML-KEM it has some 1,800
_AT_ONCE = 16  # records that OpenSSL gets in one go: as many KeyUpdates cost some 0.4 ms
_length = struct.Struct(">H").unpack_from
_LAST_WORDS = 1.0  # seconds that a failed handshake waits for the client to leave
_LEFT = "the peer left during the TLS handshake"
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


_threads = threading.local()


def _shared_scratch() -> memoryview:
    """Memory to receive records, of all the connections of this thread: each is done with it before another receives."""
    scratch: memoryview | None = getattr(_threads, "scratch", None)
    if scratch is None:
        scratch = _threads.scratch = memoryview(bytearray(_CHUNK))
    return scratch


_shared_scratch()  # the thread that imports this runs the loop of most servers: it has its memory before the first client


async def first_record(below: Transport, received: bytes = b"") -> bytes:
    """Returns the first bytes of a client, for `TLSTransport`; `received` were read before. They are its whole first record,
    or show that this is none or a long one. Until then the client costs these bytes, and no memory of OpenSSL's.
    TransportLost if it leaves."""
    while not _may_begin(received):
        n = below.try_receive_into(_shared_scratch())
        if n is None:
            await below.wait_readable()
        elif n == 0:
            raise TransportLost(_LEFT)
        else:
            received += bytes(_shared_scratch()[:n])
    return received


def _may_begin(received: bytes) -> bool:
    if not _BEGINS.startswith(received[: len(_BEGINS)]):
        return True  # OpenSSL says what it is
    if len(received) < _HEADER:
        return False
    end: int = _HEADER + _length(received, 3)[0]
    return end <= len(received) or end > _HELLO


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
        self._rest = memoryview(received)  # received, and not given to OpenSSL yet
        self._record_ends = 0  # the place in `_rest` where the record ends of which OpenSSL has a part
        self._hollow = 0  # whole records that OpenSSL got, less the reads that gave payload
        self._counts = RecordCounts()
        self._policy: FloodPolicy[RecordCounts] | None = None  # none until a record came without payload
        self.behind = False
        """True if the last receive found no payload in what it took: there may be more."""
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side, server_hostname=hostname)
        self._scratch = _shared_scratch()
        self._unsent: memoryview = memoryview(b"")
        self._ahead: memoryview = memoryview(b"")  # received before `send_eof`
        self._maybe_more = False
        self._below_eof = self._ending = False
        self._server_side = server_side
        self.peer = below.peer
        self.alpn = ""

    async def handshake(self, answered: Callable[[], None] | None = None) -> None:
        """Completes the handshake. TransportLost if it fails or the peer leaves. `answered` is called whenever there is an
        answer for the peer, and then the peer is waited for."""
        if self._rest:
            self._give()  # before anybody else's turn, so that the peer has its answer at once
        try:
            while not self._shaken():
                if answered is not None and self._outgoing.pending:
                    answered()
                await self._flush()
                if self._pull():
                    if self._hollow > HANDSHAKE_RECORDS:
                        raise TransportLost(f"more than {HANDSHAKE_RECORDS} records in a TLS handshake")
                    await trio.lowlevel.checkpoint()
                else:
                    await self._below.wait_readable()
                    if not self._pull() and self._below_eof:
                        raise TransportLost(_LEFT)
        except ssl.SSLError as e:
            await self._say_why()
            raise TransportLost(f"TLS handshake failed: {self._why(e)}") from e
        await self._flush()
        self.alpn = self._tls.selected_alpn_protocol() or ""
        self._hollow, self._maybe_more = 0, True

    def _shaken(self) -> bool:
        """Goes on with the handshake. True if it is complete, False if it needs bytes of the peer."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:  # nobody waits in this block: its traceback keeps OpenSSL's objects
            return False
        return True

    def abandon(self) -> None:
        """Gives OpenSSL's memory back, if the handshake waits for bytes of the peer. The task that waits must be cancelled
        at once; after that only `close` may be called."""
        if not self.pending:
            del self._tls, self._incoming, self._outgoing

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
        """Gives OpenSSL some records of what has come, whole or the first part. True if there was something to give."""
        if self._rest:
            return self._pull_behind()
        if self._below_eof:
            return False
        scratch = self._scratch
        n = self._below.try_receive_into(scratch)
        if not n:
            # a missing close_notify is no error here: every wire above frames its end, and sees a truncation itself
            self._below_eof = n == 0
            return False
        if not self._record_ends and n > _HEADER and n == _HEADER + _length(scratch, 3)[0]:  # one whole record: most are
            self._incoming.write(scratch[:n])
            self._hollow += 1
        else:
            self._rest = scratch[:n]
            self._give()
            if self._rest:
                self._own_rest()
        return True

    def _pull_behind(self) -> bool:
        """Does what `_pull` does, behind bytes that have come before."""
        if self._give():
            return True
        kept = len(self._rest)  # less than a header, whose end is to come
        self._scratch[:kept] = self._rest
        n = None if self._below_eof else self._below.try_receive_into(self._scratch[kept:])
        if not n:
            self._below_eof |= n == 0
            return False
        self._rest = self._scratch[: kept + n]
        self._give()
        if self._rest:
            self._own_rest()
        return True

    def _own_rest(self) -> None:
        """Copies what is left, which few reads leave, out of the memory that others use next."""
        self._rest = memoryview(bytes(self._rest))

    def _give(self) -> bool:
        rest, end = self._rest, self._record_ends
        size = len(rest)
        whole = int(0 < end <= size)
        while whole < _AT_ONCE and end + _HEADER <= size:
            end += _HEADER + _length(rest, end + 3)[0]
            whole += end <= size
        here = min(end, size)
        if not here:
            return False
        self._incoming.write(rest[:here])
        self._rest, self._record_ends = rest[here:], end - here
        self._hollow += whole
        return True

    def _judge(self) -> None:
        """Counts the records that OpenSSL got and that gave no payload. TransportFlooded if they are too many."""
        hollow, self._hollow = self._hollow, 0
        if hollow < 0:  # one record took several reads
            return
        counts, now = self._counts, trio.current_time()
        if self._policy is None:
            self._policy = FloodPolicy(TLS_FLOODS, now)
        self._policy.tick(counts, now)  # none came since the last: nothing else calls it once a second
        counts.total += hollow
        if flood := self._policy.judge(counts, now):
            raise TransportFlooded(flood, "TLS records without payload")

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
        try:
            try:
                n = self._tls.read(len(buffer), buffer)  # type: ignore[assignment]  # typeshed: an int with a buffer
            except ssl.SSLWantReadError:
                if self._hollow:
                    self._judge()
                if not self._pull():
                    self._maybe_more = self.behind = False
                    if self._below_eof:
                        return 0
                    self._push()
                    return None
                n = self._tls.read(len(buffer), buffer)  # type: ignore[assignment]
        except ssl.SSLWantReadError:  # a part of a record, or records without payload: enough for one turn
            if self._hollow:
                self._judge()
            self._maybe_more = self.behind = True
            self._push()
            return None
        except ssl.SSLZeroReturnError:
            return 0
        except ssl.SSLError as e:
            self._push()
            raise TransportLost(f"TLS failed: {self._why(e)}") from e
        self._hollow -= 1
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

    def receivable(self) -> bool:
        behind = self._ahead or self._maybe_more or self._below_eof or self._incoming.pending
        return bool(behind) or self._below.receivable()

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
