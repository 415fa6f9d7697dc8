"""Signature Version 4: what is signed verifies, and whatever is not as it was signed is refused with a reason."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protocols.aws.sigv4 import (
    STREAMING_EVENTS,
    UNSIGNED_PAYLOAD,
    Credentials,
    ErrorCode,
    EventSigner,
    EventVerifier,
    Payload,
    SigV4Error,
    VerifiedHead,
    Verifier,
    canonical_path,
    canonical_query,
    payload_hash,
    sign_request,
    timestamp,
)
from protocols.errors import LocalProtocolError
from protocols.events import Buffer, Head, Headers

NOW = 1795165142.0  # 2026-11-20T08:59:02Z
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
CREDENTIALS = Credentials(access_key_id="AKIDEXAMPLE", secret_access_key=SECRET, region="us-west-2")
VERIFIER = Verifier({"AKIDEXAMPLE": SECRET, "AKIDOTHER": "other"}, region="us-west-2")
BODY = b'{"inputs": 1}'

Edit = Callable[[bytes], bytes | None]


def request(
    *headers: tuple[bytes, bytes], target: bytes = b"/endpoints/e/invocations", authority: bytes = b"localhost:9448"
) -> Head:
    fields = headers or ((b"content-type", b"application/json"),)
    return Head(method=b"POST", target=target, authority=authority, headers=fields)


def with_headers(unsigned: Head, headers: Headers) -> Head:
    return Head(method=unsigned.method, target=unsigned.target, authority=unsigned.authority, headers=list(headers))


def signed(
    unsigned: Head | None = None,
    credentials: Credentials = CREDENTIALS,
    *,
    payload: str = payload_hash(BODY),
    declare: bool = True,
    now: float = NOW,
) -> Head:
    unsigned = unsigned or request()
    head = sign_request(unsigned, credentials, now=now, payload=payload, declare=declare)
    return with_headers(unsigned, (*unsigned.headers, *head.headers))


def edited(sent: Head, name: bytes, edit: Edit) -> Head:
    """The request with each value of that header put through `edit`, which drops it by giving None."""
    pairs = [(field, edit(value) if field == name else value) for field, value in sent.headers]
    return with_headers(sent, [(field, value) for field, value in pairs if value is not None])


def header(sent: Head, name: bytes) -> bytes:
    return dict(sent.headers)[name]


def refusal(sent: Head, *, verifier: Verifier = VERIFIER, now: float = NOW, streaming: bool = False) -> SigV4Error:
    with pytest.raises(SigV4Error) as caught:
        verifier.verify_head(sent, now=now, streaming=streaming)
    return caught.value


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def stream(now: float = NOW) -> tuple[EventSigner, EventVerifier]:
    unsigned = request()
    head = sign_request(unsigned, CREDENTIALS, now=now, payload=STREAMING_EVENTS)
    assert head.events is not None
    sent = with_headers(unsigned, (*unsigned.headers, *head.headers))
    return head.events, VERIFIER.verify_head(sent, now=now, streaming=True).events()


# ---- heads and bodies


def test_a_declared_hash_is_verified_with_the_head_and_the_body_against_it() -> None:
    head = VERIFIER.verify_head(signed(), now=NOW)
    assert (head.access_key_id, head.region, head.payload) == ("AKIDEXAMPLE", "us-west-2", Payload.HASH)
    head.verify_body(digest(BODY))
    with pytest.raises(SigV4Error, match="not the SHA-256 of the body that came"):
        head.verify_body(digest(BODY + b" "))


def test_without_a_declared_hash_the_signature_is_verified_with_the_body() -> None:
    wrong = edited(signed(declare=False), b"content-type", lambda _: b"text/plain")
    with pytest.raises(SigV4Error, match="does not match the signature you provided"):
        VERIFIER.verify_head(wrong, now=NOW).verify_body(digest(BODY))
    head = VERIFIER.verify_head(signed(declare=False), now=NOW)
    with pytest.raises(SigV4Error, match="does not match the signature you provided"):
        head.verify_body(digest(b""))
    head.verify_body(digest(BODY))


def test_a_declared_hash_is_refused_early_when_the_head_is_wrong() -> None:
    assert "does not match" in str(refusal(edited(signed(), b"content-type", lambda _: b"text/plain")))


def test_an_unsigned_payload_needs_leave() -> None:
    sent = signed(payload=UNSIGNED_PAYLOAD)
    assert "got 'UNSIGNED-PAYLOAD'" in str(refusal(sent))
    lenient = Verifier({"AKIDEXAMPLE": SECRET}, allow_unsigned_payload=True)
    for streaming in (False, True):
        head = lenient.verify_head(sent, now=NOW, streaming=streaming)
        assert head.payload is Payload.UNSIGNED
    assert refusal(edited(sent, b"content-type", lambda _: b"x"), verifier=lenient)


def test_the_kind_of_payload_must_be_that_of_the_operation() -> None:
    assert f"must be '{STREAMING_EVENTS}', got 'e3b0" in str(refusal(signed(payload=payload_hash()), streaming=True))
    assert f"must be '{STREAMING_EVENTS}', got no such header" in str(refusal(signed(declare=False), streaming=True))
    for value in (STREAMING_EVENTS, "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", payload_hash().upper(), ""):
        error = refusal(signed(payload=value))
        assert error.code is ErrorCode.INVALID_SIGNATURE
        assert "64 lower-case hex digits, or absent, got '" in str(error)


def test_what_a_payload_does_not_need_is_our_own_mistake() -> None:
    events = VERIFIER.verify_head(signed(payload=STREAMING_EVENTS), now=NOW, streaming=True)
    with pytest.raises(LocalProtocolError, match="payload is EVENTS"):
        events.verify_body(digest(b""))
    with pytest.raises(LocalProtocolError, match="payload is HASH"):
        VERIFIER.verify_head(signed(), now=NOW).events()


def test_a_session_token_is_signed_like_any_header_and_otherwise_ignored() -> None:
    credentials = Credentials(access_key_id="AKIDEXAMPLE", secret_access_key=SECRET, region="us-west-2", session_token="T")
    sent = signed(credentials=credentials)
    VERIFIER.verify_head(sent, now=NOW)
    assert "does not match" in str(refusal(edited(sent, b"x-amz-security-token", lambda _: b"U")))
    added = with_headers(signed(), (*signed().headers, (b"x-amz-security-token", b"T")))
    assert "'x-amz-security-token' must be a 'SignedHeader'" in str(refusal(added))


def test_any_region_will_do_when_none_is_demanded_and_few_keys_are_kept() -> None:
    anywhere = Verifier({"AKIDEXAMPLE": SECRET})
    for at in range(130):
        credentials = Credentials(access_key_id="AKIDEXAMPLE", secret_access_key=SECRET, region=f"place-{at}")
        assert anywhere.verify_head(signed(credentials=credentials), now=NOW).region == f"place-{at}"
        assert len(anywhere._derived) <= 64


def test_the_port_of_the_scheme_may_be_left_out_of_the_signed_host_and_no_other() -> None:
    for port, fine in ((b"443", True), (b"80", True), (b"8443", False), (b"", False)):
        unsigned = request(authority=b"localhost")
        sent = signed(unsigned)
        moved = Head(method=b"POST", target=sent.target, authority=b"localhost:" + port, headers=sent.headers)
        if fine:
            VERIFIER.verify_head(moved, now=NOW)
        else:
            refusal(moved)


def test_a_host_in_a_header_is_signed_where_the_client_has_no_authority() -> None:
    sent = signed(request((b"host", b"localhost:9448"), authority=b""))
    VERIFIER.verify_head(
        Head(method=b"POST", target=sent.target, authority=b"localhost:9448", headers=sent.headers), now=NOW
    )


# ---- refusals and their texts

INVALID, INCOMPLETE = ErrorCode.INVALID_SIGNATURE, ErrorCode.INCOMPLETE_SIGNATURE


def replaced(old: bytes, new: bytes) -> Edit:
    def edit(value: bytes) -> bytes:
        assert value.count(old) == 1
        return value.replace(old, new)

    return edit


REFUSED_AUTHORIZATIONS: list[tuple[Edit, ErrorCode, str]] = [
    (lambda _: None, ErrorCode.MISSING_TOKEN, "Missing Authentication Token"),
    (lambda _: b"", INCOMPLETE, "begin with 'AWS4-HMAC-SHA256 '"),
    (lambda _: b"Bearer abc", INCOMPLETE, "begin with"),
    (lambda _: b"\xff\xfe\x00", INCOMPLETE, "begin with"),
    (replaced(b"AWS4-HMAC-SHA256", b"AWS4-ECDSA-P256-SHA256"), INCOMPLETE, "begin with"),
    (lambda _: b"AWS4-HMAC-SHA256 ", INCOMPLETE, "each once"),
    (replaced(b"Signature=", b"Signature "), INCOMPLETE, "each once"),
    (lambda value: value + b", Region=us-west-2", INCOMPLETE, "each once"),
    (lambda value: value + b", Credential=a/b/c/d/e", INCOMPLETE, "each once"),
    (lambda value: value + b",", INCOMPLETE, "each once"),
    (lambda value: value[: value.index(b", Signature")], INCOMPLETE, "requires 'Signature' parameter"),
    (replaced(b"SignedHeaders=", b"Signature="), INCOMPLETE, "each once"),
    (replaced(b"/us-west-2", b""), INCOMPLETE, "five parts"),
    (replaced(b"us-west-2", b""), INCOMPLETE, "five parts"),
    (replaced(b"Credential=AKIDEXAMPLE/", b"Credential=/"), INCOMPLETE, "five parts"),
    (replaced(b"aws4_request", b"aws3_request"), INVALID, "terminator: 'aws4_request', not 'aws3_request'"),
    (replaced(b"/20261120/", b"/20261119/"), INVALID, "'20261119' != '20261120'"),
    (replaced(b"/sagemaker/", b"/s3/"), INVALID, "correct service: 'sagemaker', not 's3'"),
    (replaced(b"/us-west-2/", b"/us-east-1/"), INVALID, "valid region: 'us-west-2', not 'us-east-1'"),
    (replaced(b"AKIDEXAMPLE", b"AKIDNOBODY"), ErrorCode.UNRECOGNIZED_CLIENT, "invalid: no access key 'AKIDNOBODY'"),
    (replaced(b"AKIDEXAMPLE", b"AKIDOTHER"), INVALID, "does not match the signature"),
    (replaced(b"AKIDEXAMPLE", b"A/AKIDEXAMPLE"), ErrorCode.UNRECOGNIZED_CLIENT, "no access key 'A/AKIDEXAMPLE'"),
    (replaced(b";host", b";Host"), INCOMPLETE, "lower-case names, sorted"),
    (replaced(b"content-type;host", b"host;content-type"), INCOMPLETE, "lower-case names, sorted"),
    (replaced(b";host", b";host;host"), INCOMPLETE, "lower-case names, sorted"),
    (replaced(b";host", b";;host"), INCOMPLETE, "lower-case names, sorted"),
    (replaced(b";host", b";content-typf;host"), INVALID, "names 'content-typf', a header that the request does not have"),
    (replaced(b";host", b""), INVALID, "'host' must be a 'SignedHeader'"),
    (replaced(b";x-amz-date", b""), INVALID, "'x-amz-date' must be a 'SignedHeader'"),
    (replaced(b";x-amz-content-sha256", b""), INVALID, "'x-amz-content-sha256' must be a 'SignedHeader'"),
    (replaced(b"content-type;", b""), INVALID, "does not match the signature"),
    (lambda value: value[:-1], INCOMPLETE, "64 lower-case hex digits, got 63"),
    (lambda value: value + b"0", INCOMPLETE, "64 lower-case hex digits, got 65"),
    (lambda value: value[:-64] + b"A" * 64, INCOMPLETE, "64 lower-case hex digits, got 64"),
    (lambda value: value[:-64] + b"0" * 64, INVALID, "does not match the signature"),
]


@pytest.mark.parametrize("case", range(len(REFUSED_AUTHORIZATIONS)))
def test_each_fault_of_the_authorization_header_has_its_code_and_says_what_to_change(case: int) -> None:
    edit, code, text = REFUSED_AUTHORIZATIONS[case]
    sent = signed()
    error = refusal(edited(sent, b"authorization", edit))
    assert (error.code, error.status) == (code, 403)
    assert text in str(error)
    assert SECRET not in str(error)
    assert header(sent, b"authorization")[-64:].decode() not in str(error)


def test_spaces_between_the_parameters_and_their_order_do_not_matter() -> None:
    def turned(value: bytes) -> bytes:
        algorithm, _, rest = value.partition(b" ")
        return algorithm + b"  " + b",".join(reversed(rest.split(b", "))) + b" "

    VERIFIER.verify_head(edited(signed(), b"authorization", turned), now=NOW)


@pytest.mark.parametrize("name", [b"authorization", b"x-amz-date", b"x-amz-content-sha256"])
def test_a_header_that_decides_must_be_there_once(name: bytes) -> None:
    sent = signed()
    error = refusal(with_headers(sent, (*sent.headers, (name, header(sent, name)))))
    assert (error.code, str(error)) == (INCOMPLETE, f"{name.decode()} must be there once, not 2 times")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"20261120",
        b"2026-11-20T08:59:02Z",
        b"20261120T085902",
        b"20261120T085902Z\n0",
        b"20261320T085902Z",
        b"20260020T085902Z",
        b"20260229T085902Z",
        b"20261100T085902Z",
        b"20261131T085902Z",
        b"20261120T245902Z",
        b"20261120T086002Z",
        b"20261120T085960Z",
        b"00001120T085902Z",
        b"19691231T235959Z",
        "２0261120T085902Z".encode(),
        b"Fri, 20 Nov 2026 08:59:02 +0100",
        b"Fri, 20 Noo 2026 08:59:02 GMT",
        b"x" * 5000,
    ],
)
def test_a_date_that_is_none_is_refused(value: bytes) -> None:
    error = refusal(edited(signed(), b"x-amz-date", lambda _: value))
    assert error.code is INCOMPLETE
    assert "must be a UTC date such as" in str(error)
    assert len(str(error)) < 400


def test_a_request_without_any_date_is_refused() -> None:
    error = refusal(edited(signed(), b"x-amz-date", lambda _: None))
    assert (error.code, "'X-Amz-Date' or a 'Date'" in str(error)) == (INCOMPLETE, True)


def test_x_amz_date_goes_before_date() -> None:
    VERIFIER.verify_head(signed(request((b"date", b"Thu, 01 Jan 1970 00:00:00 GMT"))), now=NOW)


def test_an_http_date_of_the_wrong_day_is_not_in_scope() -> None:
    sent = edited(signed(), b"x-amz-date", lambda _: None)
    late = with_headers(sent, (*sent.headers, (b"date", b"Sat, 21 Nov 2026 08:59:02 GMT")))
    assert "'date' must be a 'SignedHeader'" in str(refusal(edited(late, b"authorization", replaced(b";x-amz-date", b""))))
    named = edited(
        late, b"authorization", lambda value: replaced(b";x-amz-date", b"")(value.replace(b";host", b";date;host"))
    )
    assert "'20261120' != '20261121'" in str(refusal(named))


@pytest.mark.parametrize("skew", [300.0, 0.0, 12.5])
def test_the_clock_may_be_off_by_the_skew_and_no_more(skew: float) -> None:
    verifier = Verifier({"AKIDEXAMPLE": SECRET}, skew=skew)
    for now in (NOW - skew, NOW, NOW + skew):
        verifier.verify_head(signed(), now=now)
    late, early = (
        refusal(signed(), verifier=verifier, now=NOW + skew + 0.25),
        refusal(signed(), verifier=verifier, now=NOW - skew - 0.25),
    )
    assert late.code is early.code is INVALID
    assert str(late).startswith("Signature expired: 20261120T085902Z is now earlier than ")
    assert f"behind the server's clock, the limit is {skew:g} s" in str(late)
    assert str(early).startswith("Signature not yet current: 20261120T085902Z is still later than ")
    assert f"ahead of the server's clock, the limit is {skew:g} s" in str(early)


def test_the_refusal_of_a_late_request_names_header_skew_and_limit() -> None:
    assert str(refusal(signed(), now=NOW + 3600)) == (
        "Signature expired: 20261120T085902Z is now earlier than 20261120T095402Z (20261120T095902Z - 300 s). "
        "x-amz-date is 3600.0 s behind the server's clock, the limit is 300 s"
    )


def test_a_long_value_is_not_echoed() -> None:
    for old, new in ((b"us-west-2", b"r" * 9000), (b"AKIDEXAMPLE", b"A" * 9000), (b";host", b";d" + b"x" * 9000 + b";host")):
        error = refusal(edited(signed(), b"authorization", replaced(old, new)))
        assert len(str(error)) < 300


def test_nothing_shows_a_secret() -> None:
    head = VERIFIER.verify_head(signed(), now=NOW)
    for shown in (CREDENTIALS, VERIFIER, head, head._proof):
        assert SECRET not in repr(shown)
        assert repr(head._proof.key) not in repr(shown)


# ---- the canonical request


@pytest.mark.parametrize(
    ("path", "canonical"),
    [
        (b"", "/"),
        (b"/", "/"),
        (b"*", "/%2A"),
        (b"/models/a%20b/invoke", "/models/a%2520b/invoke"),
        (b"/models/a%2Fb", "/models/a%252Fb"),
        (b"/a//b///c", "/a/b/c"),
        (b"/a/./b/../c/", "/a/c/"),
        (b"/../../a", "/a"),
        (b"/a/..", "/"),
        (b"/a/../", "/"),
        (b"/~-_.!$&'()*+,;=:@", "/~-_.%21%24%26%27%28%29%2A%2B%2C%3B%3D%3A%40"),
        (b"/\xe1\x88\xb4", "/%E1%88%B4"),
    ],
)
def test_a_path_is_normalised_and_encoded_once_more(path: bytes, canonical: str) -> None:
    assert canonical_path(path) == canonical


@pytest.mark.parametrize(
    ("query", "canonical"),
    [
        (b"", ""),
        (b"&&", ""),
        (b"a", "a="),
        (b"b=2&a=1", "a=1&b=2"),
        (b"a=2&a=1&a", "a=&a=1&a=2"),
        (b"a-=1&a=1", "a=1&a-=1"),
        (b"A=1&a=1&B=1", "A=1&B=1&a=1"),
        (b"a=b=c", "a=b%3Dc"),
        (b"a=%7e%41%2f ", "a=~A%2F%20"),
        (b"a=x+y", "a=x%2By"),
        (b"a=%zz%", "a=%25zz%25"),
        (b"\xff=\xe1\x88\xb4", "%FF=%E1%88%B4"),
    ],
)
def test_a_query_is_encoded_one_way_and_sorted(query: bytes, canonical: str) -> None:
    assert canonical_query(query) == canonical


def test_the_empty_query_of_the_sdk_is_none() -> None:
    sent = signed(request(target=b"/endpoints/e/invocations-bidirectional-stream"))
    asked = Head(method=b"POST", target=sent.target + b"?", authority=sent.authority, headers=sent.headers)
    VERIFIER.verify_head(asked, now=NOW)


@given(st.integers(min_value=0, max_value=253402300799))
@settings(max_examples=200)
def test_a_timestamp_is_that_of_the_calendar(seconds: int) -> None:
    expected = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    assert timestamp(seconds) == expected.strftime("%Y%m%dT%H%M%SZ").zfill(16)


def test_every_day_of_a_leap_century_is_that_of_the_calendar() -> None:
    day = datetime(1999, 12, 31, tzinfo=UTC)
    for _ in range(800):
        assert timestamp(int(day.timestamp()) + 86399) == day.strftime("%Y%m%dT235959Z")
        day += timedelta(days=1)


# ---- event streams


def test_a_stream_verifies_to_its_empty_end() -> None:
    signer, verifier = stream()
    payloads: list[Buffer] = [b"one", bytes(100_000), memoryview(b"three"), b""]
    for at, payload in enumerate(payloads):
        date_ms = int(NOW * 1000) + at
        verifier.verify(date_ms, signer.sign(date_ms, payload), payload, now=NOW)


def test_an_end_that_was_not_signed_in_the_chain_is_refused() -> None:
    signer, verifier = stream()
    date_ms = int(NOW * 1000)
    end = signer.sign(date_ms, b"")
    signer, _ = stream()
    verifier.verify(date_ms, signer.sign(date_ms, b"part"), b"part", now=NOW)
    with pytest.raises(SigV4Error, match="does not match :chunk-signature"):
        verifier.verify(date_ms, end, b"", now=NOW)
    verifier.verify(date_ms, signer.sign(date_ms, b""), b"", now=NOW)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_chunk_signature_has_32_bytes(size: int) -> None:
    _, verifier = stream()
    with pytest.raises(SigV4Error, match=f"must have 32 bytes, got {size}"):
        verifier.verify(int(NOW * 1000), bytes(size), b"", now=NOW)


def test_each_event_has_its_own_clock() -> None:
    signer, verifier = stream()
    hour_later = int((NOW + 3600) * 1000)
    verifier.verify(hour_later, signer.sign(hour_later, b"a"), b"a", now=NOW + 3600)
    for date_ms, text in ((hour_later - 300_001, "Signature expired"), (hour_later + 300_001, "not yet current")):
        other, verifier = stream()
        with pytest.raises(SigV4Error, match=f"{text}.* :date of the event is 300.0 s"):
            verifier.verify(date_ms, other.sign(date_ms, b""), b"", now=NOW + 3600)
    for date_ms in (hour_later - 300_000, hour_later + 300_000):
        other, verifier = stream()
        verifier.verify(date_ms, other.sign(date_ms, b""), b"", now=NOW + 3600)


@pytest.mark.parametrize("date_ms", [0, -1, -(2**63), 2**63 - 1])
def test_an_absurd_date_of_an_event_is_a_refusal(date_ms: int) -> None:
    _, verifier = stream()
    with pytest.raises(SigV4Error, match=":date of the event"):
        verifier.verify(date_ms, bytes(32), b"", now=NOW)


def test_a_stream_over_midnight_changes_its_key() -> None:
    midnight = 1795219200
    signer, verifier = stream(midnight - 1)
    for date_ms in (midnight * 1000 - 1, midnight * 1000, midnight * 1000 - 1):
        verifier.verify(date_ms, signer.sign(date_ms, b"x"), b"x", now=midnight)


def test_a_stream_of_another_request_is_refused() -> None:
    signer, _ = stream(NOW + 1)
    _, verifier = stream(NOW)
    with pytest.raises(SigV4Error):
        verifier.verify(int(NOW * 1000), signer.sign(int(NOW * 1000), b""), b"", now=NOW)


# ---- signing


def test_what_a_proxy_may_change_is_not_signed() -> None:
    sent = signed(request((b"user-agent", b"x"), (b"accept-encoding", b"gzip"), (b"x-amzn-trace-id", b"1"), (b"a", b"b")))
    assert b"SignedHeaders=a;host;x-amz-content-sha256;x-amz-date," in header(sent, b"authorization")


@pytest.mark.parametrize("name", [b"authorization", b"x-amz-date", b"x-amz-content-sha256", b"x-amz-security-token"])
def test_a_header_that_signing_adds_must_not_be_there(name: bytes) -> None:
    with pytest.raises(LocalProtocolError, match=f"{name.decode()} is for sign_request to add"):
        signed(request((name, b"x")))


def test_a_request_without_an_authority_cannot_be_signed() -> None:
    with pytest.raises(LocalProtocolError, match="needs an authority"):
        signed(request(authority=b""))


@pytest.mark.parametrize("payload", [STREAMING_EVENTS, UNSIGNED_PAYLOAD])
def test_a_payload_that_is_no_hash_must_be_declared(payload: str) -> None:
    with pytest.raises(LocalProtocolError, match="must be declared"):
        signed(payload=payload, declare=False)


def test_only_a_signed_event_stream_has_an_event_signer() -> None:
    assert sign_request(request(), CREDENTIALS, now=NOW, payload=payload_hash()).events is None


# ---- properties

VISIBLE = st.binary(max_size=20).map(lambda raw: bytes(33 + byte % 94 for byte in raw))
VALUES = st.lists(VISIBLE, max_size=3).map(b"  ".join)
NAMES = st.sampled_from([b"accept", b"content-type", b"x-amz-meta", b"x-amzn-sagemaker-inference-id", b"z"])
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=6)
TARGETS = st.lists(VISIBLE, min_size=1, max_size=4).map(lambda parts: b"/" + b"/".join(parts))
REQUESTS = st.builds(
    lambda method, target, authority, headers: Head(method=method, target=target, authority=authority, headers=headers),
    st.sampled_from([b"GET", b"POST", b"DELETE"]),
    TARGETS,
    st.sampled_from([b"h", b"localhost:8443", b"[::1]:9"]),
    HEADERS,
)


def meaning(sent: Head) -> tuple[object, ...]:
    """The parts of a request that its signature depends on: requests that are equal in them share a signature by design."""
    path, _, query = sent.target.partition(b"?")
    fields: dict[bytes, list[bytes]] = {}
    for name, value in sent.headers:
        fields.setdefault(name, []).append(b" ".join(value.split()))
    joined = {name: b",".join(values) for name, values in fields.items()}
    return sent.method, canonical_path(path), canonical_query(query), sent.authority, joined


def verified(sent: Head, body: bytes) -> VerifiedHead:
    head = VERIFIER.verify_head(sent, now=NOW)
    head.verify_body(digest(body))
    return head


@given(REQUESTS, st.binary(max_size=50), st.booleans())
@settings(max_examples=150)
def test_what_is_signed_verifies(unsigned: Head, body: bytes, declare: bool) -> None:
    verified(signed(unsigned, payload=payload_hash(body), declare=declare), body)


@given(REQUESTS, REQUESTS, st.booleans(), st.sampled_from(["method", "target", "authority", "headers"]))
@settings(max_examples=250)
def test_a_request_that_means_something_else_is_refused(one: Head, two: Head, declare: bool, part: str) -> None:
    sent = signed(one, declare=declare)
    changed = {name: getattr(sent, name) for name in ("method", "target", "authority", "headers")}
    if part == "headers":
        changed["headers"] = [*two.headers, *sent.headers[len(one.headers) :]]
        # A header more, which is not signed and need not be, changes nothing.
        known = {name for name, _ in one.headers}
        assume({name for name, _ in two.headers} <= known | {b"x-amz-meta"})
    else:
        changed[part] = getattr(two, part)
    other = Head(**changed)
    assume(meaning(other) != meaning(sent))
    with pytest.raises(SigV4Error):
        verified(other, BODY)


@given(st.binary(max_size=50), st.binary(max_size=50), st.booleans())
@settings(max_examples=50)
def test_another_body_is_refused(one: bytes, two: bytes, declare: bool) -> None:
    assume(one != two)
    with pytest.raises(SigV4Error):
        verified(signed(payload=payload_hash(one), declare=declare), two)


@given(st.lists(st.tuples(st.integers(-300_000, 300_000), st.binary(max_size=40)), max_size=6), st.data())
@settings(max_examples=100)
def test_a_chain_verifies_and_no_event_of_it_can_be_changed(events: list[tuple[int, bytes]], data: st.DataObject) -> None:
    signer, verifier = stream()
    for offset, payload in events:
        date_ms = int(NOW * 1000) + offset
        signature = signer.sign(date_ms, payload)
        other_date, other_payload = data.draw(st.tuples(st.integers(-300_000, 300_000), st.binary(max_size=40)))
        if (int(NOW * 1000) + other_date, other_payload) != (date_ms, payload):
            with pytest.raises(SigV4Error):
                verifier.verify(int(NOW * 1000) + other_date, signature, other_payload, now=NOW)
        verifier.verify(date_ms, signature, payload, now=NOW)


PIECES = st.sampled_from(
    [
        b"AWS4-HMAC-SHA256",
        b" ",
        b",",
        b"=",
        b";",
        b"/",
        b"Credential=",
        b"SignedHeaders=",
        b"Signature=",
        b"AKIDEXAMPLE/20261120/us-west-2/sagemaker/aws4_request",
        b"host;x-amz-date",
        b"0" * 64,
        b"\xff",
        b"%",
        b"\x00",
    ]
)


@given(st.one_of(st.binary(max_size=200), st.lists(PIECES, max_size=20).map(b"".join)))
@settings(max_examples=300)
def test_a_garbled_authorization_raises_nothing_but_a_refusal(value: bytes) -> None:
    refusal(edited(signed(), b"authorization", lambda _: value))


@given(
    st.binary(max_size=40),
    st.binary(max_size=20),
    st.lists(st.tuples(st.sampled_from([b"x-amz-date", b"date", b"x-amz-content-sha256", b"a"]), st.binary(max_size=30))),
    st.booleans(),
)
@settings(max_examples=200)
def test_a_garbled_request_raises_nothing_but_a_refusal(
    target: bytes, authority: bytes, headers: list[tuple[bytes, bytes]], streaming: bool
) -> None:
    said = (
        b"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261120/us-west-2/sagemaker/aws4_request, "
        b"SignedHeaders=a;host;x-amz-date, Signature=" + b"0" * 64
    )
    for extra in ([], [(b"x-amz-date", b"20261120T085902Z"), (b"a", b"")]):
        sent = Head(
            method=b"POST",
            target=target,
            authority=authority,
            headers=[*headers, *extra, (b"authorization", said)],
        )
        with pytest.raises(SigV4Error):
            VERIFIER.verify_head(sent, now=NOW, streaming=streaming).verify_body(digest(b""))
