"""Signature Version 4 on the platform's routes: whose keys are known, and what is verified when."""

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

_LONG = 1024 * 1024  # bytes that are hashed in a thread: a millisecond's worth of them


@final
class Signatures:
    """Verifies requests where credentials are configured, and lets everything pass where none are.

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
        """Whether signatures are looked at."""
        return self._verifier is not None

    def claim(self, exchange: Exchange, *, streaming: bool = False) -> VerifiedHead | None:
        """Verifies the head. None where signatures are off, and for a request without one that has come in by a key, a
        certificate or the operator plane. `streaming`: the body is an event stream, signed event by event. Forbidden where
        AWS would refuse it."""
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
        """Verifies a whole body against what `claim` gave."""
        if claim is None or claim.payload is not Payload.HASH:
            return
        digest = _digest(body) if len(body) < _LONG else await run_in_codec_thread(partial(_digest, body))
        try:
            claim.verify_body(digest)
        except SigV4Error as e:
            raise Forbidden(str(e), code=e.code, status=e.status) from None

    def events(self, claim: VerifiedHead | None) -> Callable[[int, bytes, Buffer], None] | None:
        """What a decoder calls for each event of the stream that `claim` opened: its date, signature and payload.
        Forbidden comes out of it. None where signatures are off."""
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
    """An error that says that who asks may not, in the names that every AWS service has for it; None for any other. Of a
    key that is missing or wrong it has the status too."""
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
    """Status, headers and body of the answer. The answer's Date, which is the wire's, is what a client sets its clock by."""
    return bidi.signature_error_body(error.status, error.code, error.message)


def _digest(body: memoryview) -> bytes:
    return hashlib.sha256(body).digest()


def read_credentials(file: Path) -> dict[str, str]:
    """Secrets by access key id, of all profiles in a file of the form of ~/.aws/credentials. ConfigError for a file that
    cannot be read, a profile that lacks one of its two keys, and a file without profiles."""
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
