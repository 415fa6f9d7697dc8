"""TLS contexts: what a server of ours offers, and a client that trusts one CA."""

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
# TLS 1.2: forward secrecy and AEAD alone (RFC 9113 section 9.2.2 forbids the rest to HTTP/2). TLS 1.3 has no other.
# Level 2, which is Python's default too: keys and signatures of at least 112 bits, so no RSA below 2048 and no SHA-1.
_CIPHERS = "@SECLEVEL=2:ECDHE+AESGCM:ECDHE+CHACHA20"
_NO_CERTIFICATE = {"NO_CERTIFICATE_OR_CRL_FOUND", "NO_START_LINE"}


def server_context(config: TLSConfig, *, now: datetime | None = None) -> ssl.SSLContext:
    """A context for the listeners: TLS 1.2 and 1.3, ECDHE with AEAD, ALPN h2 and http/1.1 in this order, no compression
    and no renegotiation. A client without ALPN, or with none of ours, is served HTTP/1.1 by the caller.

    With `dev` the development certificate is made or renewed first, as of `now` (the current time). With `client_ca` the
    handshake fails for a client whose certificate none of those in the file has signed, or, where one is required, that
    shows none. Raises ConfigError where TLS is off, a file is missing, is not PEM or is encrypted, or the key is not the
    certificate's.
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
    # a certificate in the file is trusted, whether or not a root above it is there
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    required = config.client_certificate == "required"
    context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL


def client_context(ca: Path, *, alpn: Sequence[str] = ALPN) -> ssl.SSLContext:
    """A context for a client that trusts `ca` alone, checks the server's name, and offers `alpn`. Raises ConfigError
    where the file is missing or is not PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _common(context, alpn)
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca} cannot be used as a CA: {error.strerror or error}") from None
    return context


def development_certificate(config: TLSConfig, *, now: datetime | None = None) -> DevelopmentCertificate:
    """The certificate that `dev` stands for, made or renewed where needed, for the caller who wants to say where its
    `ca.pem` is. Raises ConfigError where its directory cannot be used."""
    directory = Path(config.dev_dir) if config.dev_dir else default_directory(os.environ)
    return ensure(directory, now=now or datetime.now(UTC))


def _common(context: ssl.SSLContext, alpn: Sequence[str]) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(_CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(list(alpn))


def _check_pair(cert_file: str, key_file: str) -> None:
    """OpenSSL's own errors name no file; these do."""
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
