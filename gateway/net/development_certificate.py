"""Makes the development certificate: a server certificate for this machine alone, and the CA that signs it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.config.problem import ConfigError

CA_LIFE = timedelta(days=365)
SERVER_LIFE = timedelta(days=30)
RENEW_BEFORE = timedelta(days=1)
_SKEW = timedelta(minutes=5)
_NAMES = (
    x509.DNSName("localhost"),
    x509.IPAddress(IPv4Address("127.0.0.1")),
    x509.IPAddress(IPv6Address("::1")),
)
_ONLY = (
    x509.DNSName("localhost"),
    x509.IPAddress(IPv4Network("127.0.0.1/32")),
    x509.IPAddress(IPv6Network("::1/128")),
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DevelopmentCertificate:
    """The files of the development certificate. A client with `SSL_CERT_FILE={ca}` trusts the server."""

    ca: Path
    cert: Path
    """The server's certificate."""
    key: Path
    expires: datetime
    """The time at which the server's certificate expires, in UTC."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def default_directory(environ: Mapping[str, str]) -> Path:
    """Returns `everywire/tls` in the user's cache directory (XDG_CACHE_HOME, else ~/.cache). ConfigError if there is no home
    directory."""
    cache = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "everywire" / "tls"
    try:
        return Path.home() / ".cache" / "everywire" / "tls"
    except RuntimeError:
        raise ConfigError("tls.dev_dir must be set: this user has no home directory to keep a certificate in") from None


def ensure(directory: Path, *, now: datetime) -> DevelopmentCertificate:
    """Returns the development certificate in `directory`. If its files are missing, broken, or valid for less than another
    day, new ones are made. `now` is a time with a zone.

    The server's certificate is for localhost, 127.0.0.1 and ::1, and is valid for 30 days. Its CA is valid for a year, so
    that a client needs a new `ca.pem` only once a year. The CA can sign for those three names alone. Only their owner can
    read the keys. A file is replaced at once, never in parts, and a lock keeps two processes from writing at the same
    time. ConfigError if the directory cannot be used.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(directory):
            return _ensure(directory, now)
    except OSError as error:
        raise ConfigError(f"tls.dev_dir: cannot keep a certificate in {directory}: {error.strerror}") from None


def _ensure(directory: Path, now: datetime) -> DevelopmentCertificate:
    ca_cert, ca_key = directory / "ca.pem", directory / "ca-key.pem"
    cert, key = directory / "server.pem", directory / "server-key.pem"
    ca = _read(ca_cert, ca_key)
    if ca is None or not _lasts(ca, now):
        ca = _make_ca(now)
        _write(ca_key, _key_pem(ca.key), 0o600)
        _write(ca_cert, _cert_pem(ca.cert), 0o644)
    server = _read(cert, key)
    if server is None or not _lasts(server, now) or not _serves(server, ca):
        server = _make_server(ca, now)
        _write(key, _key_pem(server.key), 0o600)
        _write(cert, _cert_pem(server.cert), 0o644)
    return DevelopmentCertificate(ca=ca_cert, cert=cert, key=key, expires=server.cert.not_valid_after_utc)


# ---- certificates ----


def _make_ca(now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named("everywire development CA")
    builder = (
        _builder(name, name, key.public_key(), now, now + CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True), critical=True)
        .add_extension(x509.NameConstraints(permitted_subtrees=_ONLY, excluded_subtrees=None), critical=True)
    )
    return _Pair(cert=builder.sign(key, hashes.SHA256()), key=key)


def _make_server(ca: _Pair, now: datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(now + SERVER_LIFE, ca.cert.not_valid_after_utc)
    builder = (
        _builder(_named("everywire development server"), ca.cert.subject, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(key_cert_sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_NAMES), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()), critical=False)
    )
    return _Pair(cert=builder.sign(ca.key, hashes.SHA256()), key=key)


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        # A client whose clock is a little behind can use the certificate at once.
        .not_valid_before(now - _SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, key_cert_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not key_cert_sign,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _lasts(pair: _Pair, now: datetime) -> bool:
    return pair.cert.not_valid_before_utc <= now and now + RENEW_BEFORE < pair.cert.not_valid_after_utc


def _serves(server: _Pair, ca: _Pair) -> bool:
    try:
        server.cert.verify_directly_issued_by(ca.cert)
        names = server.cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return False
    return set(names) >= set(_NAMES)


# ---- files ----


def _read(cert_file: Path, key_file: Path) -> _Pair | None:
    """Reads a certificate and its key. None if one is missing or broken, or they do not belong together."""
    try:
        cert = x509.load_pem_x509_certificate(cert_file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        return None
    return _Pair(cert=cert, key=key)


def _write(file: Path, content: bytes, mode: int) -> None:
    # mkstemp creates the file with mode 0600: others can never read a key.
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(descriptor, "wb") as temporary:
            temporary.write(content)
            os.fchmod(descriptor, mode)
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cert_pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
