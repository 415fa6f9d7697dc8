"""Reads certificates: their subject, names, dates, serial number and fingerprint."""

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

# The kinds of names in RFC 5280 section 4.2.1.6 that can be written as text, with OpenSSL's word for each.
_KINDS: tuple[tuple[type[x509.GeneralName], str], ...] = (
    (x509.DNSName, "DNS"),
    (x509.UniformResourceIdentifier, "URI"),
    (x509.RFC822Name, "email"),
    (x509.IPAddress, "IP"),
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The certificate that the server shows to new connections."""

    subject: str
    """The subject, in the form of RFC 4514."""
    names: tuple[str, ...]
    """The names it is valid for, each with its kind: `DNS:example.org`, `IP:127.0.0.1`."""
    begins: datetime
    expires: datetime
    serial: str
    """The serial number, hexadecimal."""
    fingerprint: str
    """SHA-256 of the certificate, hexadecimal."""


def read_served(file: Path) -> Certificate:
    """Reads the first certificate of a PEM file. ConfigError if it cannot be read."""
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
    """Reads a client's certificate that OpenSSL has verified. If `cryptography` cannot read it, the result has the
    fingerprint alone."""
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
