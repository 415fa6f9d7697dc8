"""Signature Version 4 on the platform's routes: the known credentials, and the checks of head, body and events."""

from __future__ import annotations

import configparser
import hashlib
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import final

from gateway.codecs.threads import run_in_codec_thread
from gateway.config import SigV4Config
from gateway.config.problem import ConfigError
from gateway.core.exchange import Exchange
from gateway.credentials import is_signed
from gateway.errors import (
    Forbidden,
    GatewayError,
    NotPermitted,
    TooManyRequests,
    Unauthenticated,
    UnsupportedType,
    WrongHost,
)
from protocols.aws import bidi
from protocols.aws.sigv4 import ErrorCode, Payload, SigV4Error, VerifiedHead, Verifier
from protocols.events import Buffer, Headers

log = logging.getLogger("gateway")

_LONG = 1024 * 1024  # bytes of the smallest body that is hashed in a thread: hashing it takes about 1 ms


@final
class Signatures:
    """Verifies the signatures of requests if credentials are configured; otherwise lets every request pass.

    `now` is the wall clock, in seconds since 1970: signatures carry its time.
    """

    def __init__(self, config: SigV4Config, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._verifier: Verifier | None = None
        if config.credentials:
            keys = read_credentials(Path(config.credentials))
            self._verifier = Verifier(keys, region=config.region, skew=config.skew)

    @property
    def on(self) -> bool:
        """True if signatures are verified."""
        return self._verifier is not None

    def claim(self, exchange: Exchange, *, streaming: bool = False) -> VerifiedHead | None:
        """Verifies the head. None if signatures are off, and for an unsigned request that a key, a client certificate or the
        operator plane let in. `streaming`: the body is an event stream, signed event by event. Forbidden if AWS would refuse
        the request."""
        if self._verifier is None:
            return None
        owner = exchange.owner
        if exchange.permit is not None or owner.client_certificate is not None or owner.by_operator:
            signed = any(is_signed(value) for value in exchange.header_values(b"authorization"))
            if not signed:
                return None
        try:
            return self._verifier.verify_head(exchange.request, now=self._now(), streaming=streaming)
        except SigV4Error as e:
            raise Forbidden(str(e), code=e.code, status=e.status) from None

    async def check_body(self, claim: VerifiedHead | None, body: memoryview) -> None:
        """Verifies a whole body against the head that `claim` returned. Forbidden if it does not match."""
        if claim is None or claim.payload is not Payload.HASH:
            return
        digest = _digest(body) if len(body) < _LONG else await run_in_codec_thread(partial(_digest, body))
        try:
            claim.verify_body(digest)
        except SigV4Error as e:
            raise Forbidden(str(e), code=e.code, status=e.status) from None

    def events(self, claim: VerifiedHead | None) -> Callable[[int, bytes, Buffer], None] | None:
        """The function that a decoder calls with the date, signature and payload of each event of the stream. It raises
        Forbidden. None if `claim` is None."""
        if claim is None:
            return None
        verifier, now = claim.events(), self._now

        def verify(date_ms: int, signature: bytes, payload: Buffer) -> None:
            try:
                verifier.verify(date_ms, signature, payload, now=now())
            except SigV4Error as e:
                raise Forbidden(str(e), code=e.code, status=e.status) from None

        return verify


def forbidden_of(error: GatewayError) -> Forbidden | None:
    """The error with the code that every AWS service has for it, if it refuses the caller; None for any other error. For a
    missing or unknown key it has AWS's status too."""
    match error:
        case Forbidden():
            return error
        case Unauthenticated():
            code = ErrorCode.MISSING_TOKEN if error.missing else ErrorCode.UNRECOGNIZED_CLIENT
            return Forbidden(error.message, code=code)
        case NotPermitted():
            return Forbidden(error.message, code="AccessDeniedException")
        case TooManyRequests():
            return Forbidden(error.message, code="ThrottlingException", status=error.status)
        case WrongHost() | UnsupportedType():
            return Forbidden(error.message, code=error.code, status=error.status)
        case _:
            return None


def refusal(error: Forbidden) -> tuple[int, Headers, bytes]:
    """Status, headers and body of the answer. The wire adds the Date, by which a client corrects its clock."""
    return bidi.signature_error_body(error.status, error.code, error.message)


def _digest(body: memoryview) -> bytes:
    return hashlib.sha256(body).digest()


def read_credentials(file: Path) -> dict[str, str]:
    """The secrets by access key id, of all profiles in a file in the form of ~/.aws/credentials. ConfigError if the file
    cannot be read or has no profiles, a profile lacks one of its two keys, or two profiles give one id different secrets."""
    setting = "sagemaker.sigv4.credentials"
    parser = configparser.RawConfigParser(default_section="")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{setting}: {file} cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{setting}: {file} is not UTF-8 text (at byte {e.start})") from None
    try:
        parser.read_string(text)
    except configparser.Error as e:  # its text would show lines of the file
        line = getattr(e, "lineno", 0) or next((at for at, _ in getattr(e, "errors", [])), 0)
        where = f", line {line}" if line else ""
        raise ConfigError(f"{setting}: {file}{where}: {type(e).__name__}: profiles are written [name]") from None
    keys: dict[str, str] = {}
    for profile in parser.sections():
        values = [parser.get(profile, name, fallback="") for name in ("aws_access_key_id", "aws_secret_access_key")]
        if not all(values):
            raise ConfigError(
                f"{setting}: {file}: profile {profile[:100]!r} needs aws_access_key_id and aws_secret_access_key"
            )
        if keys.setdefault(values[0], values[1]) != values[1]:
            raise ConfigError(f"{setting}: {file}: two profiles have one access key id and two secrets")
    if not keys:
        raise ConfigError(f"{setting}: {file} has no profile with aws_access_key_id and aws_secret_access_key")
    return keys
