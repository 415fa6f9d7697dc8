"""The contents of a certificate: its names, its dates, and its identity."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from gateway.config.problem import ConfigError
from models.session import ClientCertificate

# The kinds of names of RFC 5280 section 4.2.1.6 that text has a form for, with the words that OpenSSL has for them.
_KINDS: tuple[tuple[type[x509.GeneralName], str], ...] = (
    (x509.DNSName, "DNS"),
    (x509.UniformResourceIdentifier, "URI"),
    (x509.RFC822Name, "email"),
    (x509.IPAddress, "IP"),
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The certificate that new connections are shown."""

    subject: str
    """As RFC 4514 writes it."""
    names: tuple[str, ...]
    """The names that it is valid for, each with its kind: `DNS:example.org`, `IP:127.0.0.1`."""
    begins: datetime
    expires: datetime
    serial: str
    """Hexadecimal."""
    fingerprint: str
    """SHA-256 of the certificate, hexadecimal."""


def read_served(file: Path) -> Certificate:
    """Reads the first certificate of a PEM file. ConfigError where there is none."""
    try:
        found = x509.load_pem_x509_certificates(file.read_bytes())[0]
        return Certificate(
            subject=found.subject.rfc4514_string(),
            names=_names(found),
            begins=found.not_valid_before_utc,
            expires=found.not_valid_after_utc,
            serial=f"{found.serial_number:x}",
            fingerprint=_fingerprint(found.public_bytes(serialization.Encoding.DER)),
        )
    except (OSError, ValueError, x509.InvalidVersion) as error:
        raise ConfigError(f"tls.cert: {file} cannot be read: {error}") from None


def read_client(der: bytes) -> ClientCertificate:
    """Reads a verified certificate. If `cryptography` cannot read it, though OpenSSL could, the result has only the
    fingerprint."""
    try:
        found = x509.load_der_x509_certificate(der)
        return ClientCertificate(
            subject=found.subject.rfc4514_string(),
            issuer=found.issuer.rfc4514_string(),
            names=_names(found),
            serial=f"{found.serial_number:x}",
            fingerprint=_fingerprint(der),
        )
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        return ClientCertificate(fingerprint=_fingerprint(der))


def _names(certificate: x509.Certificate) -> tuple[str, ...]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(f"{word}:{name.value}" for name in names for kind, word in _KINDS if isinstance(name, kind))


def _fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()
