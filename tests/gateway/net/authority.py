"""A certificate authority for tests: certificates of servers and clients, as files."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gateway.net.tls_context import client_context

DAY = timedelta(days=1)
LOCAL: Sequence[x509.GeneralName] = (x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1")))


@dataclass(frozen=True)
class Pair:
    """A certificate and its key."""

    cert: Path
    key: Path

    def put(self, other: Pair) -> None:
        """Takes the place of another's files, each replaced whole, as whoever deploys certificates does it."""
        for ours, theirs in ((self.cert, other.cert), (self.key, other.key)):
            beside = theirs.with_suffix(".new")
            beside.write_bytes(ours.read_bytes())
            beside.replace(theirs)


class Authority:
    """Signs with a key of its own; `file` is what is to be trusted."""

    def __init__(self, folder: Path, name: str = "a test's CA") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / "ca.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self._name, self._name, self._key.public_key(), -DAY, 10 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        _write(self.file, builder.sign(self._key, hashes.SHA256()))

    def issue(
        self,
        name: str,
        names: Sequence[x509.GeneralName] = LOCAL,
        *,
        begins: timedelta = -DAY,
        ends: timedelta = DAY,
    ) -> Pair:
        """A certificate for `name`, valid between two times from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        organization = x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Example")
        subject = x509.Name([organization, x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, self._name, key.public_key(), begins, ends)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}-key.pem")
        _write(pair.cert, builder.sign(self._key, hashes.SHA256()))
        pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
        return pair

    def client(self, pair: Pair | None = None, *, alpn: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext:
        """The context of a client that trusts this authority, and shows a certificate."""
        context = client_context(self.file, alpn=alpn)
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return context


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begins: timedelta, ends: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(now + begins).not_valid_after(now + ends)


def _write(file: Path, certificate: x509.Certificate) -> None:
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
