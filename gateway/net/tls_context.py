"""TLS contexts: for the gateway's listeners, and for a client that trusts one CA."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from gateway.config import TLSConfig
from gateway.config.problem import ConfigError
from gateway.net.development_certificate import DevelopmentCertificate, default_directory, ensure

ALPN = ("h2", "http/1.1")
# TLS 1.2: only ciphers with forward secrecy and AEAD (RFC 9113 section 9.2.2 forbids others to HTTP/2). TLS 1.3 has no
# others. Level 2, Python's default too: keys and signatures of at least 112 bits, so no RSA below 2048 and no SHA-1.
_CIPHERS = "@SECLEVEL=2:ECDHE+AESGCM:ECDHE+CHACHA20"
_NO_CERTIFICATE = {"NO_CERTIFICATE_OR_CRL_FOUND", "NO_START_LINE"}


def server_context(config: TLSConfig, *, now: datetime | None = None) -> ssl.SSLContext:
    """Makes a context for the listeners: TLS 1.2 and 1.3, ECDHE with AEAD, ALPN h2 and http/1.1 in this order, no
    compression and no renegotiation. The caller serves HTTP/1.1 to a client without ALPN, or with neither protocol.

    With `dev` the development certificate is made or renewed first, as of `now` (default: the current time). With
    `client_ca` the handshake fails for a client whose certificate is neither in the file nor signed by one in it.
    If a client certificate is required, it also fails for a client that shows none. ConfigError if TLS is off, if a file is
    missing, not PEM or encrypted, or if the key does not belong to the certificate.
    """
    if config.dev:
        made = development_certificate(config, now=now)
        cert, key = str(made.cert), str(made.key)
    elif config.cert:
        cert, key = config.cert, config.key
        _check_pair(cert, key)
    else:
        raise ConfigError("TLS is off: set tls.cert and tls.key, or tls.dev")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _common(context, ALPN)
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise ConfigError(f"tls.cert: {cert} cannot be served: {error.reason or error}") from None
    except OSError as error:
        raise ConfigError(f"tls.cert: {cert} and tls.key: {key} cannot be read: {error.strerror}") from None
    if config.client_ca:
        _ask_clients(context, config)
    return context


def _ask_clients(context: ssl.SSLContext, config: TLSConfig) -> None:
    try:
        context.load_verify_locations(config.client_ca)
    except ssl.SSLError as error:
        why = "holds no PEM certificate" if error.reason in _NO_CERTIFICATE else f"cannot be used: {error.reason or error}"
        raise ConfigError(f"tls.client_ca: {config.client_ca} {why}") from None
    except OSError as error:
        raise ConfigError(f"tls.client_ca: {config.client_ca} cannot be read: {error.strerror}") from None
    # a certificate in the file is trusted even if it is not self-signed and its issuer is absent
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    required = config.client_certificate == "required"
    context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL


def client_context(ca: Path, *, alpn: Sequence[str] = ALPN) -> ssl.SSLContext:
    """Makes a context for a client that trusts `ca` alone, checks the server's name, and offers `alpn`. ConfigError if the
    file is missing or is not PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _common(context, alpn)
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca} cannot be used as a CA: {error.strerror or error}") from None
    return context


def development_certificate(config: TLSConfig, *, now: datetime | None = None) -> DevelopmentCertificate:
    """Returns the certificate that `dev` serves, made or renewed if needed, for a caller that needs the path of its
    `ca.pem`. ConfigError if its directory cannot be used."""
    directory = Path(config.dev_dir) if config.dev_dir else default_directory(os.environ)
    return ensure(directory, now=now or datetime.now(UTC))


def _common(context: ssl.SSLContext, alpn: Sequence[str]) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(list(alpn))


def _check_pair(cert_file: str, key_file: str) -> None:
    """Checks that the key belongs to the certificate. ConfigError names the file, which OpenSSL's errors do not."""
    cert_pem, key_pem = _read("tls.cert", cert_file), _read("tls.key", key_file)
    try:
        cert = x509.load_pem_x509_certificates(cert_pem)[0]
        public = cert.public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise ConfigError(f"tls.cert: {cert_file} holds no PEM certificate") from None
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except TypeError:
        raise ConfigError(f"tls.key: {key_file} is encrypted: give a key without a passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"tls.key: {key_file} holds no PEM private key") from None
    if key.public_key() != public:
        raise ConfigError(f"tls.key: {key_file} is not the key of the first certificate in {cert_file}")


def _read(setting: str, file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: {file} cannot be read: {error.strerror}") from None
