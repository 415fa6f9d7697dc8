"""AWS Signature Version 4, both sides: signed request heads, body hashes and the signature chain of event streams."""

from __future__ import annotations

import calendar
import enum
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise, product
from typing import Final, NamedTuple, TypeAlias, final
from urllib.parse import quote

from protocols.errors import LocalProtocolError, ProtocolError
from protocols.events import Buffer, Head, Headers

SERVICE: Final = "sagemaker"
"""The service name in the credential scope of every SageMaker runtime operation."""
STREAMING_EVENTS: Final = "STREAMING-AWS4-HMAC-SHA256-EVENTS"
"""The payload hash value of a body that is an event stream signed message by message."""
UNSIGNED_PAYLOAD: Final = "UNSIGNED-PAYLOAD"
"""The payload hash value of a body that nothing protects."""
SKEW: Final = 300.0
"""Seconds that a date may be off at AWS services: their refusals say "5 min."."""

_ALGORITHM = "AWS4-HMAC-SHA256"
_TERMINATOR = "aws4_request"
_PARAMETERS = ("Credential", "SignedHeaders", "Signature")
_DATE, _HASH, _TOKEN = b"x-amz-date", b"x-amz-content-sha256", b"x-amz-security-token"
_AUTHORIZATION = b"authorization"

_Fields: TypeAlias = dict[bytes, list[bytes]]
"""Header values by lower-case name, in the order of the wire."""


# ---- errors


class ErrorCode(enum.StrEnum):
    """The value of `x-amzn-errortype` for a refused signature. SageMaker has no names for these errors; the names are those
    of every AWS service with REST and JSON."""

    MISSING_TOKEN = "MissingAuthenticationTokenException"
    """There is no Authorization header."""
    INCOMPLETE_SIGNATURE = "IncompleteSignatureException"
    """The Authorization header or the date cannot be parsed."""
    UNRECOGNIZED_CLIENT = "UnrecognizedClientException"
    """The access key id is unknown."""
    INVALID_SIGNATURE = "InvalidSignatureException"
    """Everything else: scope, clock, headers that must be signed, payload hash, signature. SDKs correct their clock when
    they see this name, by the `date` header of the answer."""


@final
class SigV4Error(ProtocolError):
    """A request or an event that is not signed correctly. The text tells the client what to change. It never holds a secret,
    a signature or the Authorization header."""

    # MissingAuthenticationTokenException of the SageMaker runtime is a 403. AWS's lists of common errors have
    # IncompleteSignature with 400 for query services and with 403 for services that speak REST with JSON.
    status: Final = 403

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def _incomplete(message: str) -> SigV4Error:
    return SigV4Error(ErrorCode.INCOMPLETE_SIGNATURE, message)


def _invalid(message: str) -> SigV4Error:
    return SigV4Error(ErrorCode.INVALID_SIGNATURE, message)


def _mismatch() -> SigV4Error:
    return _invalid(
        "The request signature we calculated does not match the signature you provided. "
        "Check your AWS Secret Access Key and signing method."
    )


def _shown(value: bytes | str) -> str:
    text = value if isinstance(value, str) else value.decode("latin-1")
    return repr(text) if len(text) <= 64 else f"{text[:64]!r}..."


# ---- dates

_ISO_BASIC = re.compile(rb"(\d{4})(\d\d)(\d\d)T(\d\d)(\d\d)(\d\d)Z")
# Python's email.utils.formatdate, and so botocore, writes the second form for UTC.
_IMF_FIXDATE = re.compile(rb"[A-Z][a-z]{2}, (\d\d) ([A-Z][a-z]{2}) (\d{4}) (\d\d):(\d\d):(\d\d) (?:GMT|-0000)")
_MONTHS = {name: at for at, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}


def timestamp(seconds: int) -> str:
    """The time `seconds` after 1970-01-01T00:00Z in SigV4's form: 20261120T085902Z."""
    day, second = divmod(seconds, 86400)
    # Days to a Gregorian date, in eras of 400 years that begin on the 1st of March.
    era, of_era = divmod(day + 719468, 146097)
    year_of_era = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    year = year_of_era + era * 400 + (month <= 2)
    of_month = of_year - (153 * shifted + 2) // 5 + 1
    minute, second = divmod(second, 60)
    hour, minute = divmod(minute, 60)
    return f"{year:04}{month:02}{of_month:02}T{hour:02}{minute:02}{second:02}Z"


def _seconds(value: bytes) -> int | None:
    """The seconds since 1970 of an ISO 8601 basic or an HTTP date; None if it is neither, or if the date does not exist."""
    if (found := _ISO_BASIC.fullmatch(value)) is not None:
        year, month, day, hour, minute, second = map(int, found.groups())
    elif (found := _IMF_FIXDATE.fullmatch(value)) is not None:
        year, month, day = int(found[3]), _MONTHS.get(found[2], 0), int(found[1])
        hour, minute, second = int(found[4]), int(found[5]), int(found[6])
    else:
        return None
    if year < 1970 or not 1 <= month <= 12 or not 1 <= day <= calendar.monthrange(year, month)[1]:
        return None
    if hour > 23 or minute > 59 or second > 59:
        return None
    return calendar.timegm((year, month, day, hour, minute, second))


def _check_skew(name: str, seconds: float, now: float, limit: float) -> None:
    behind = now - seconds
    if abs(behind) <= limit:
        return
    mine, theirs = timestamp(int(now // 1)), timestamp(int(seconds // 1))
    if behind > 0:
        bound = timestamp(int((now - limit) // 1))
        said = f"Signature expired: {theirs} is now earlier than {bound} ({mine} - {limit:g} s)"
    else:
        bound = timestamp(int((now + limit) // 1))
        said = f"Signature not yet current: {theirs} is still later than {bound} ({mine} + {limit:g} s)"
    side = "behind" if behind > 0 else "ahead of"
    raise _invalid(f"{said}. {name} is {abs(behind):.1f} s {side} the server's clock, the limit is {limit:g} s")


# ---- the canonical request


def canonical_path(path: bytes) -> str:
    """A path from the wire as SigV4 signs it for every service but S3: without dot segments and doubled slashes, and
    percent-encoded once more, so that `%20` becomes `%2520`. (botocore, aws-sdk-signers, awscrt and the JavaScript signer
    agree on this.)"""
    kept: list[bytes] = []
    for segment in path.split(b"/"):
        match segment:
            case b"" | b".":
                pass
            case b"..":
                del kept[-1:]
            case _:
                kept.append(segment)
    last = "/" if kept and path.endswith(b"/") else ""
    return f"/{quote(b'/'.join(kept))}{last}"


def canonical_query(query: bytes) -> str:
    """A query without its `?` as SigV4 signs it: each name and value in one canonical encoding, pairs sorted by name and
    then by value, and a `=` after a name without one. `+` is a plus, as in awscrt; other signers, and AWS's test suite of
    2011, read it as a space. SDKs send `%2B` and `%20`, which all signers treat alike."""
    recoded = _CODED.sub(lambda found: _RECODED[found[0]], query).decode()  # at once: a query may have a thousand pairs
    pairs = [pair.partition("=") for pair in recoded.split("&") if pair]
    return "&".join(
        [f"{name}={value}" for name, value in sorted([(name, value.replace("=", "%3D")) for name, _, value in pairs])]
    )


# A byte, or three that stand for one, whose canonical encoding differs or may differ. Neither `&` nor `=`: these divide.
_CODED = re.compile(rb"%[0-9A-Fa-f]{2}|[^0-9A-Za-z_.~&=-]")
_HEX = "0123456789abcdefABCDEF"
_RECODED = {bytes((byte,)): quote(bytes((byte,)), safe="").encode() for byte in range(256)} | {
    f"%{high}{low}".encode(): quote(bytes.fromhex(high + low), safe="").encode() for high, low in product(_HEX, repeat=2)
}


def _fields(headers: Headers) -> _Fields:
    fields: _Fields = {}
    for name, value in headers:
        fields.setdefault(name, []).append(value)
    return fields


def _canonical_head(request: Head, fields: _Fields, names: Sequence[bytes]) -> bytes:
    """The canonical request up to the payload hash, its last part. `fields` must have each of `names`."""
    path, _, query = request.target.partition(b"?")
    return b"\n".join(
        (
            request.method,
            canonical_path(path).encode(),
            canonical_query(query).encode(),
            *(name + b":" + b",".join(b" ".join(value.split()) for value in fields[name]) for name in names),
            b"",
            b";".join(names),
            b"",
        )
    )


class _Scope(NamedTuple):
    """The scope in which a signing key is valid."""

    date: str
    region: str
    service: str

    def __str__(self) -> str:
        return f"{self.date}/{self.region}/{self.service}/{_TERMINATOR}"


def _signing_key(secret: str, scope: _Scope) -> bytes:
    key = b"AWS4" + secret.encode()
    for part in (*scope, _TERMINATOR):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _sign(key: bytes, date: str, scope: _Scope, canonical: bytes) -> bytes:
    to_sign = f"{_ALGORITHM}\n{date}\n{scope}\n{sha256(canonical).hexdigest()}"
    return hmac.digest(key, to_sign.encode(), "sha256")


# ---- the chain of event signatures


class _Chain:
    """The common part of signer and verifier of events: the previous signature, and values that hold for a whole second."""

    __slots__ = ("_key", "_key_of", "_prefix", "_previous", "_region", "_second", "_service")

    def __init__(self, key_of: Callable[[_Scope], bytes], scope: _Scope, seed: bytes) -> None:
        self._key_of = key_of
        self._region, self._service = scope.region, scope.service
        self._previous = seed.hex()
        self._second = -1
        self._key = self._prefix = b""

    def next(self, date_ms: int, payload: Buffer) -> bytes:
        """The signature of the next event. Nothing changes until `advance` is called with it."""
        second = date_ms // 1000
        if second != self._second:
            self._turn(second)
        date = sha256(b"\x05:date\x08" + date_ms.to_bytes(8, "big", signed=True)).hexdigest()
        to_sign = f"{self._previous}\n{date}\n{sha256(payload).hexdigest()}"
        return hmac.digest(self._key, self._prefix + to_sign.encode(), "sha256")

    def advance(self, signature: bytes) -> None:
        self._previous = signature.hex()

    def _turn(self, second: int) -> None:
        # Key and date come from the event itself: a stream that runs over midnight changes its key.
        date = timestamp(second)
        scope = _Scope(date[:8], self._region, self._service)
        self._key = self._key_of(scope)
        self._prefix = f"{_ALGORITHM}-PAYLOAD\n{date}\n{scope}\n".encode()
        self._second = second


# ---- verifying


class Payload(enum.Enum):
    """The part of a request that must still be verified after its head."""

    HASH = enum.auto()
    """The body: hash it and call `verify_body`. Until then the request must have no effect."""
    EVENTS = enum.auto()
    """Each message of the event stream, with `events`."""
    UNSIGNED = enum.auto()
    """Nothing: the body may be anything."""


class _Authorization(NamedTuple):
    access_key_id: str
    scope: _Scope
    names: tuple[bytes, ...]
    signature: bytes


_HEX_DIGEST = re.compile("[0-9a-f]{64}")


def _parse_authorization(value: bytes) -> _Authorization:
    algorithm, _, rest = value.decode("latin-1").partition(" ")
    if algorithm != _ALGORITHM:
        raise _incomplete(f"Authorization must begin with '{_ALGORITHM} ', the one algorithm that is known here")
    found: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, text = part.strip(" \t").partition("=")
        if not equals or name not in _PARAMETERS or name in found:
            raise _incomplete(
                "Authorization must have Credential=, SignedHeaders= and Signature=, each once and nothing else"
            )
        found[name] = text
    for name in _PARAMETERS:
        if name not in found:
            raise _incomplete(f"Authorization header requires '{name}' parameter")
    access_key_id, scope = _parse_credential(found["Credential"])
    if not _HEX_DIGEST.fullmatch(found["Signature"]):
        raise _incomplete(f"Signature must be 64 lower-case hex digits, got {len(found['Signature'])} characters")
    names = _parse_names(found["SignedHeaders"])
    return _Authorization(access_key_id, scope, names, bytes.fromhex(found["Signature"]))


def _parse_credential(credential: str) -> tuple[str, _Scope]:
    parts = credential.rsplit("/", 4)
    if len(parts) != 5 or not all(parts):
        raise _incomplete(
            "Credential must have five parts with a slash between: access key id, date, region, service, 'aws4_request'"
        )
    access_key_id, date, region, service, terminator = parts
    if terminator != _TERMINATOR:
        raise _invalid(f"Credential should be scoped with a valid terminator: '{_TERMINATOR}', not {_shown(terminator)}")
    return access_key_id, _Scope(date, region, service)


def _parse_names(text: str) -> tuple[bytes, ...]:
    names = text.split(";")
    if not all(names) or text != text.lower() or any(a >= b for a, b in pairwise(names)):
        raise _incomplete("SignedHeaders must be lower-case names, sorted, each once, with a semicolon between")
    return tuple(name.encode("latin-1") for name in names)


def _check_signed(fields: _Fields, names: Iterable[bytes], date_name: bytes) -> None:
    """Checks that every signed name is there, and that the names required by AWS are signed: host, the date, every
    x-amz-*."""
    for name in names:
        if name not in fields:
            raise _invalid(f"SignedHeaders names {_shown(name)}, a header that the request does not have")
    needed = {b"host", date_name} | {name for name in fields if name.startswith(b"x-amz-")}
    for name in sorted(needed.difference(names)):
        raise _invalid(f"{_shown(name)} must be a 'SignedHeader' in the AWS Authorization: sign it, or do not send it")


def _single(fields: _Fields, name: bytes) -> bytes | None:
    values = fields.get(name)
    if values is None:
        return None
    if len(values) > 1:
        raise _incomplete(f"{name.decode()} must be there once, not {len(values)} times")
    return values[0].strip()


@final
@dataclass(frozen=True, slots=True)
class _Proof:
    """A signature, and the text that it must sign once the payload hash is known."""

    signature: bytes
    key: bytes = field(repr=False)
    date: str
    scope: _Scope
    heads: tuple[bytes, ...]
    """The canonical request without its hash, in each form that is accepted for this request."""

    def check(self, payload_hash: bytes) -> None:
        for head in self.heads:
            expected = _sign(self.key, self.date, self.scope, head + payload_hash)
            if hmac.compare_digest(expected, self.signature):
                return
        raise _mismatch()


@final
class Verifier:
    """Verifies requests against a fixed set of keys: `keys` maps access key ids to secrets.

    `region` is the one that requests must be signed for; if it is empty, any is accepted. `skew` is how many seconds a date,
    of the head or of an event, may be before or after `now`. With `allow_unsigned_payload` a client may leave its body
    unsigned. Any number of requests may share an instance: it keeps only derived keys, at most 64.
    """

    __slots__ = ("_allow_unsigned", "_derived", "_keys", "_region", "_service", "_skew")

    def __init__(
        self,
        keys: Mapping[str, str],
        *,
        region: str = "",
        service: str = SERVICE,
        skew: float = SKEW,
        allow_unsigned_payload: bool = False,
    ) -> None:
        self._keys = dict(keys)
        self._region = region
        self._service = service
        self._skew = skew
        self._allow_unsigned = allow_unsigned_payload
        self._derived: dict[tuple[str, _Scope], bytes] = {}

    def verify_head(self, request: Head, *, now: float, streaming: bool = False) -> VerifiedHead:
        """Checks everything that the head alone decides. `now` is in seconds since 1970. SigV4Error if anything is wrong.

        `streaming` is True if the operation's body is an event stream: it must then be signed message by message, otherwise
        as a whole. If the head declares the body's hash, its signature is checked here; if not, in
        `VerifiedHead.verify_body`. A header other than host, date and x-amz-* may be unsigned, as at AWS: do not trust it
        more than its sender.

        x-amz-security-token is signed like every x-amz-* header and otherwise ignored: the keys are static. The head is not
        bounded here: time and memory grow with its size, which the wire limits.
        """
        fields = _fields(request.headers)
        fields[b"host"] = [request.authority]  # a Host field of an HTTP/2 head has the same value, or the head is refused
        authorization = _single(fields, _AUTHORIZATION)
        if authorization is None:
            raise SigV4Error(
                ErrorCode.MISSING_TOKEN,
                "Missing Authentication Token: send an Authorization header with a Signature Version 4 of this request",
            )
        access_key_id, scope, names, signature = _parse_authorization(authorization)
        date_name = _DATE if _DATE in fields else b"date"
        seconds = self._date(fields, date_name)
        _check_signed(fields, names, date_name)
        date = timestamp(seconds)
        self._check_scope(scope, date)
        _check_skew(date_name.decode(), seconds, now, self._skew)
        payload, declared = self._payload(_single(fields, _HASH), streaming)
        key = self._key(access_key_id, scope)
        proof = _Proof(signature, key, date, scope, tuple(self._heads(request, fields, names)))
        if declared:
            proof.check(declared)
        return VerifiedHead(self, access_key_id, payload, declared, proof)

    def _date(self, fields: _Fields, name: bytes) -> int:
        value = _single(fields, name)
        if value is None:
            raise _incomplete("Authorization header requires existence of either a 'X-Amz-Date' or a 'Date' header")
        seconds = _seconds(value)
        if seconds is None:
            raise _incomplete(f"{name.decode()} must be a UTC date such as 20261120T085902Z, got {_shown(value)}")
        return seconds

    def _check_scope(self, scope: _Scope, date: str) -> None:
        if scope.date != date[:8]:
            raise _invalid(
                f"Date in Credential scope does not match that of the request: {_shown(scope.date)} != '{date[:8]}'"
            )
        if scope.service != self._service:
            raise _invalid(f"Credential should be scoped to correct service: '{self._service}', not {_shown(scope.service)}")
        if self._region and scope.region != self._region:
            raise _invalid(f"Credential should be scoped to a valid region: '{self._region}', not {_shown(scope.region)}")

    def _payload(self, declared: bytes | None, streaming: bool) -> tuple[Payload, bytes]:
        """The part that is left to verify, and the declared payload hash, or empty."""
        if declared is None and not streaming:
            return Payload.HASH, b""
        value = (declared or b"").decode("latin-1")
        if value == UNSIGNED_PAYLOAD and self._allow_unsigned:
            return Payload.UNSIGNED, value.encode()
        if streaming and value == STREAMING_EVENTS:
            return Payload.EVENTS, value.encode()
        if not streaming and _HEX_DIGEST.fullmatch(value):
            return Payload.HASH, value.encode()
        expected = f"'{STREAMING_EVENTS}'" if streaming else "the body's SHA-256 in 64 lower-case hex digits, or absent"
        got = "no such header" if declared is None else _shown(value)
        raise _invalid(f"x-amz-content-sha256 must be {expected}, got {got}")

    def _heads(self, request: Head, fields: _Fields, names: Sequence[bytes]) -> Iterable[bytes]:
        yield _canonical_head(request, fields, names)
        # AWS signers leave a scheme's default port out of the host that they sign, but some clients send it. Behind a proxy
        # that terminates TLS, the scheme here is not the client's, so either default port is accepted.
        host, colon, port = request.authority.rpartition(b":")
        if colon and port in (b"80", b"443"):
            yield _canonical_head(request, fields | {b"host": [host]}, names)

    def _key(self, access_key_id: str, scope: _Scope) -> bytes:
        key = self._derived.get((access_key_id, scope))
        if key is None:
            secret = self._keys.get(access_key_id)
            if secret is None:
                raise SigV4Error(
                    ErrorCode.UNRECOGNIZED_CLIENT,
                    f"The security token included in the request is invalid: no access key {_shown(access_key_id)} here",
                )
            if len(self._derived) >= 64:  # if we do not fix the region, a client chooses it
                self._derived.clear()
            key = self._derived[access_key_id, scope] = _signing_key(secret, scope)
        return key


@final
class VerifiedHead:
    """A request whose head is verified. `access_key_id` and `region` are those of the signature. `payload` tells which
    checks are left."""

    __slots__ = ("_declared", "_proof", "_verifier", "access_key_id", "payload", "region")

    def __init__(self, verifier: Verifier, access_key_id: str, payload: Payload, declared: bytes, proof: _Proof) -> None:
        self.access_key_id = access_key_id
        self.region = proof.scope.region
        self.payload = payload
        self._verifier = verifier
        self._declared = declared
        self._proof = proof

    def verify_body(self, digest: bytes) -> None:
        """For Payload.HASH: checks the SHA-256 of the whole body, 32 bytes. SigV4Error if another body was signed.
        LocalProtocolError for a payload of another kind."""
        if self.payload is not Payload.HASH:
            raise LocalProtocolError(f"the payload is {self.payload.name}, there is no hash of the body to verify")
        if not self._declared:
            self._proof.check(digest.hex().encode())
        elif not hmac.compare_digest(digest.hex().encode(), self._declared):
            raise _invalid("x-amz-content-sha256 is not the SHA-256 of the body that came: the body was changed on its way")

    def events(self) -> EventVerifier:
        """For Payload.EVENTS: the verifier of the body's messages, from the first. LocalProtocolError for a payload of
        another kind."""
        if self.payload is not Payload.EVENTS:
            raise LocalProtocolError(f"the payload is {self.payload.name}, its messages are not signed")
        verifier, access_key_id = self._verifier, self.access_key_id
        chain = _Chain(lambda scope: verifier._key(access_key_id, scope), self._proof.scope, self._proof.signature)
        return EventVerifier(chain, verifier._skew)


@final
class EventVerifier:
    """Verifies the messages of one event stream in order. Each signature covers the one before."""

    __slots__ = ("_chain", "_skew")

    def __init__(self, chain: _Chain, skew: float) -> None:
        self._chain = chain
        self._skew = skew

    def verify(self, date_ms: int, signature: bytes, payload: Buffer, *, now: float) -> None:
        """Checks the next message: its `:date` (milliseconds since 1970), the bytes of its `:chunk-signature` and its
        payload. The payload is the encoded event inside, or empty at the end of the stream. `now` is in seconds since 1970.

        SigV4Error if the message is changed, out of order or too old: the stream must end then. Hashing a payload takes
        about 1 ms for each MiB, in the calling thread.
        """
        if len(signature) != 32:
            raise _invalid(f":chunk-signature must have 32 bytes, got {len(signature)}")
        if not -self._skew <= now - date_ms / 1000 <= self._skew:
            _check_skew(":date of the event", date_ms / 1000, now, self._skew)
        if not hmac.compare_digest(self._chain.next(date_ms, payload), signature):
            raise _invalid(
                "The event signature we calculated does not match :chunk-signature. Check your AWS Secret Access Key, and "
                "that events are sent in the order in which they were signed"
            )
        self._chain.advance(signature)


# ---- signing

# Proxies change or add these, so AWS signers leave them out.
_NOT_SIGNED = frozenset(
    b"accept-encoding authorization connection expect keep-alive proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade user-agent x-amzn-trace-id".split()
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The key of a signer, and the region and service it signs for. `session_token` is empty for a static key."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    region: str
    service: str = SERVICE
    session_token: str = field(default="", repr=False)


def payload_hash(body: Buffer = b"") -> str:
    """The payload hash of a body that is sent as a whole."""
    return sha256(body).hexdigest()


def sign_request(request: Head, credentials: Credentials, *, now: float, payload: str, declare: bool = True) -> SignedHead:
    """Signs a complete head. Returns the headers that must be added to it.

    `payload` is a `payload_hash`, STREAMING_EVENTS or UNSIGNED_PAYLOAD. With `declare` it is also sent as
    x-amz-content-sha256, so that the server can refuse before it has the body; STREAMING_EVENTS and UNSIGNED_PAYLOAD require
    that. Headers that a proxy may change are not signed, nor are headers that are added later. LocalProtocolError if there
    is no authority, or if the head already has a header that signing adds.
    """
    if not declare and payload in (STREAMING_EVENTS, UNSIGNED_PAYLOAD):
        raise LocalProtocolError(f"{payload} must be declared, a server takes the body's own hash otherwise")
    date = timestamp(int(now // 1))
    scope = _Scope(date[:8], credentials.region, credentials.service)
    added = [(_DATE, date.encode())]
    if declare:
        added.append((_HASH, payload.encode()))
    if credentials.session_token:
        added.append((_TOKEN, credentials.session_token.encode()))
    fields = _fields(request.headers)
    for name in (_AUTHORIZATION, _DATE, _HASH, _TOKEN):
        if name in fields:
            raise LocalProtocolError(f"{name.decode()} is for sign_request to add")
    fields |= _fields(added)
    if request.authority:
        fields[b"host"] = [request.authority]
    if b"host" not in fields:
        raise LocalProtocolError("a request needs an authority to be signed")
    names = sorted(fields.keys() - _NOT_SIGNED)
    key = _signing_key(credentials.secret_access_key, scope)
    signature = _sign(key, date, scope, _canonical_head(request, fields, names) + payload.encode())
    said = (
        f"{_ALGORITHM} Credential={credentials.access_key_id}/{scope}, "
        f"SignedHeaders={b';'.join(names).decode()}, Signature={signature.hex()}"
    )
    events = None
    if payload == STREAMING_EVENTS:
        events = EventSigner(_Chain(lambda of: _signing_key(credentials.secret_access_key, of), scope, signature))
    return SignedHead((*added, (_AUTHORIZATION, said.encode())), events)


@final
@dataclass(frozen=True, slots=True)
class SignedHead:
    """The result of signing a head: the `headers` to add to it, and the signer of its `events`, from the first, if it was
    signed with STREAMING_EVENTS."""

    headers: Headers
    events: EventSigner | None


@final
class EventSigner:
    """Signs the messages of one event stream, in the order in which they are sent."""

    __slots__ = ("_chain",)

    def __init__(self, chain: _Chain) -> None:
        self._chain = chain

    def sign(self, date_ms: int, payload: Buffer) -> bytes:
        """The 32 bytes of `:chunk-signature` for the next message. `date_ms` is for its `:date`. `payload` is the encoded
        event, or empty for the message that ends the stream."""
        signature = self._chain.next(date_ms, payload)
        self._chain.advance(signature)
        return signature
