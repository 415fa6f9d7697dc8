"""TLS 1.3 records as no library writes them, for a client that floods: KeyUpdates, empty records, any inner content."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path
from typing import final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

_APPLICATION_DATA, _HANDSHAKE = 23, 22


@final
class Records:
    """Writes the records of one side behind its handshake, from the secret that OpenSSL logged for it (RFC 8446 section 7).
    From then on the TLS object must not write."""

    def __init__(self, secret: bytes, cipher: str) -> None:
        self._hash: hashes.HashAlgorithm = hashes.SHA384() if cipher.endswith("SHA384") else hashes.SHA256()
        self._key_size = 32 if "AES_256" in cipher else 16
        self._use(secret)

    def _use(self, secret: bytes) -> None:
        self._secret, self._number = secret, 0
        self._key = AESGCM(self._expanded(b"key", self._key_size))
        self._iv = int.from_bytes(self._expanded(b"iv", 12))

    def _expanded(self, label: bytes, size: int) -> bytes:
        label = b"tls13 " + label
        info = size.to_bytes(2) + bytes([len(label)]) + label + b"\0"
        return HKDFExpand(algorithm=self._hash, length=size, info=info).derive(self._secret)

    def record(self, content: bytes, kind: int = _APPLICATION_DATA) -> bytes:
        """One encrypted record. Without content it is an empty one."""
        inner = content + bytes([kind])
        head = bytes([_APPLICATION_DATA, 3, 3]) + (len(inner) + 16).to_bytes(2)
        nonce = (self._iv ^ self._number).to_bytes(12)
        self._number += 1
        return head + self._key.encrypt(nonce, inner, head)

    def key_update(self, *, answered: bool = True) -> bytes:
        """A KeyUpdate, which asks for one in return if `answered`; the next records have the new keys."""
        record = self.record(bytes([24, 0, 0, 1, answered]), _HANDSHAKE)
        self._use(self._expanded(b"traffic upd", self._hash.digest_size))
        return record


@final
class ForgingClient:
    """A TLS 1.3 client without a socket: its owner carries the bytes."""

    def __init__(self, context: ssl.SSLContext, hostname: str = "localhost") -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "keys"
        context.keylog_filename = str(self._log)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=hostname)

    def shake_hands(self, received: bytes = b"") -> tuple[bool, bytes]:
        """Takes what the server said. Returns True when it is complete, and what to send."""
        self._in.write(received)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False, self._out.read()
        return True, self._out.read()

    def records(self) -> Records:
        """The writer of its records, once the handshake is complete."""
        lines = [line.split() for line in self._log.read_text().splitlines() if line.startswith("CLIENT_TRAFFIC_SECRET_0 ")]
        self.close()
        cipher = self._tls.cipher()
        assert cipher is not None
        return Records(bytes.fromhex(lines[-1][2]), cipher[0])

    def close(self) -> None:
        """Forgets its keys; called again, it does nothing."""
        self._folder.cleanup()
