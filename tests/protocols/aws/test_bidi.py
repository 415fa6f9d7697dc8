"""The bidirectional dialect: request heads, parts in their envelopes, responses and errors, against the real client's bytes."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.aws import bidi
from protocols.aws.bidi import (
    ENCODERS,
    END,
    ENVELOPE_OVERHEAD,
    MODEL_INVOCATION_PATH,
    MODEL_QUERY_STRING,
    TARGET_VARIANT,
    BidiErrorType,
    BidiInputError,
    BidiRequest,
    Completion,
    DataType,
    Form,
    PartDecoder,
    PayloadPart,
    ResponseDecoder,
    StreamFailure,
    encode_envelope,
    encode_internal_stream_failure,
    encode_model_stream_error,
    encode_part,
    encode_request_end,
    encode_request_event,
    encode_request_part,
    error_body,
    form_of,
    invoked_variant,
    sniff_form,
    validate_request,
)
from protocols.aws.eventstream import Decoder, Limits, Timestamp, encode_buffers
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA

CAPTURES = Path(__file__).parents[2] / "vectors" / "eventstream" / "captures"
BODY = (CAPTURES / "python-0.12.0-signed-request-body.bin").read_bytes()
CAPTURE = json.loads((CAPTURES / "python-0.12.0-signed-request.json").read_text())
CAPTURED_PARTS = [
    PayloadPart(
        data=base64.b64decode(told["payload_base64"]),
        data_type=DataType(told["headers"].get("DataType", "BINARY")),
        completion=Completion(told["headers"].get("CompletionState", "COMPLETE")),
        content_type=told["headers"].get(":content-type", ""),
    )
    for told in CAPTURE["messages"][:-1]
]
EVENT = {":message-type": "event", ":event-type": "PayloadPart"}
MIB_16 = 16 * 2**20


def joined(buffers):
    return b"".join(buffers)


def part(data, data_type=DataType.BINARY, completion=Completion.COMPLETE, content_type="application/octet-stream"):
    return PayloadPart(data=data, data_type=data_type, completion=completion, content_type=content_type)


def pull(decoder):
    step = decoder.next_part if isinstance(decoder, PartDecoder) else decoder.next_event
    got = []
    while (event := step()) is not NEED_DATA:
        got.append(event)
        if event is END:
            break
    return got


def received(data, decoder):
    decoder.receive_data(data)
    got = pull(decoder)
    decoder.receive_eof()
    return got + pull(decoder) if END not in got else got


def refused(data, complaint, decoder=None):
    decoder = decoder or PartDecoder()
    decoder.receive_data(data)
    with pytest.raises(RemoteProtocolError, match=complaint):
        pull(decoder)
    return decoder


def event(headers, payload=b""):
    return joined(encode_buffers(EVENT | headers, payload))


# ---- the request head


def test_the_head_of_the_real_client_is_understood():
    headers = dict(CAPTURE["request_headers"])
    assert validate_request("echo", headers) == BidiRequest(
        endpoint="echo", target_variant="canary", invocation_path="v1/listen", query_string="a=b&c=%20d"
    )


def test_absent_and_empty_headers_both_mean_absent():
    empty = {TARGET_VARIANT: "", MODEL_INVOCATION_PATH: "", MODEL_QUERY_STRING: ""}
    assert validate_request("e", {}) == validate_request("e", empty) == BidiRequest(endpoint="e")


FIELDS = {
    "EndpointName": lambda value: validate_request(value, {}).endpoint,
    "TargetVariant": lambda value: validate_request("e", {TARGET_VARIANT: value}).target_variant,
    "ModelInvocationPath": lambda value: validate_request("e", {MODEL_INVOCATION_PATH: value}).invocation_path,
    "ModelQueryString": lambda value: validate_request("e", {MODEL_QUERY_STRING: value}).query_string,
}
NAMES_RIGHT = ["a", "A-b", "a--b", "0", "x" * 63]
NAMES_WRONG = ["-a", "a-", "a_b", "a b", "a\n", "é", "a/b", "a%20", "x" * 64]


@pytest.mark.parametrize(
    ("member", "value"),
    [
        *[("EndpointName", v) for v in NAMES_RIGHT],
        *[("TargetVariant", v) for v in NAMES_RIGHT],
        *[("ModelInvocationPath", v) for v in ("a", "v1/listen", ".", "..", "../..", ".hidden/x", "A-b_.c", "x" * 100)],
        *[("ModelInvocationPath", v) for v in ("invocations-bidirectional-stream", "invoke-bidi-stream")],
        *[("ModelQueryString", v) for v in ("a=b", "a=b&c=%2F~._-", "0_-=%aF", "a=" + "x" * 2046)],
    ],
)
def test_a_value_that_fits_comes_back_untouched(member, value):
    assert FIELDS[member](value) == value


@pytest.mark.parametrize(
    ("member", "value"),
    [
        *[("EndpointName", v) for v in ["", *NAMES_WRONG]],
        *[("TargetVariant", v) for v in NAMES_WRONG],
        *[("ModelInvocationPath", v) for v in ("/a", "a/", "a//b", "a?b", "a b", "a\n", "%2e", "é", "x" * 101)],
        *[
            ("ModelQueryString", v)
            for v in ("a", "a=", "=b", "_a=b", "a=b&", "&a=b", "a=b&&c=d", "a=%2", "a=%zz", "a=b=c", "a=b\n", "a=+")
        ],
        ("ModelQueryString", "a=" + "x" * 2047),
    ],
)
def test_a_value_that_does_not_fit_is_a_400_that_names_the_member(member, value):
    with pytest.raises(BidiInputError, match=f"^{member} ") as caught:
        FIELDS[member](value)
    assert (caught.value.status, caught.value.errortype) == (400, "InputValidationError")
    assert value[:20] in str(caught.value).replace("\\n", "\n")


def test_the_message_of_a_refused_value_shows_the_rule_and_little_of_the_value():
    with pytest.raises(BidiInputError, match="at most 2048 characters, got 100000") as caught:
        validate_request("e", {MODEL_QUERY_STRING: "a=" + "s" * 99_998})
    assert len(str(caught.value)) < 200
    with pytest.raises(BidiInputError) as caught:
        validate_request("e", {MODEL_QUERY_STRING: "!" * 2048})
    assert str(caught.value).count("!") == 64
    with pytest.raises(BidiInputError) as caught:
        validate_request("bad_name", {})
    assert str(caught.value) == "EndpointName must match ^[a-zA-Z0-9](-*[a-zA-Z0-9])*$ as a whole, got 'bad_name'"


@pytest.mark.parametrize("member", sorted(FIELDS))
def test_no_pattern_takes_long_over_a_value_made_to_backtrack(member):
    for hostile in ("a" + "-" * 61 + "!", "a" * 62 + "!", "a/" * 49 + "!", "a=%20&" * 300 + "!", "a=" + "b" * 2000 + "!"):
        with pytest.raises(BidiInputError):
            FIELDS[member](hostile)


# ---- the form of the body, and the variant that answers


@pytest.mark.parametrize(
    ("content_type", "form"),
    [
        ("application/vnd.amazon.eventstream", Form.EVENT_STREAM),
        ("Application/VND.amazon.EventStream ; v=1", Form.EVENT_STREAM),
        ("application/json", Form.LITERAL),
        ("application/JSON;charset=utf-8", Form.LITERAL),
        ("", None),
        (None, None),
    ],
)
def test_the_content_type_names_the_form(content_type, form):
    assert form_of(content_type) is form


@pytest.mark.parametrize("content_type", ["application/octet-stream", "application/jsonlines", "json", ";", "x" * 5000])
def test_another_content_type_is_refused_by_a_text_that_names_both(content_type):
    with pytest.raises(BidiInputError, match=r"application/vnd\.amazon\.eventstream .* application/json") as caught:
        form_of(content_type)
    assert content_type[:64] in str(caught.value)
    assert len(str(caught.value)) < 200


def test_without_a_content_type_the_first_byte_names_the_form():
    # The seed shows no content-type.
    for first in (b"{", b" {", b"\r\n", b"\t", b"\xef\xbb\xbf{"):
        assert sniff_form(first) is Form.LITERAL
    for first in (BODY, b"\0", b"\x01\0\0\0", b"[", b"x", b""):
        assert sniff_form(first) is Form.EVENT_STREAM
    refused(b"[" + bytes(11), "prelude CRC")


def test_an_answer_has_the_content_type_of_its_form():
    assert [form.content_type for form in Form] == [
        "application/vnd.amazon.eventstream",
        "application/vnd.amazon.eventstream",
        "application/json",
    ]
    assert set(ENCODERS) == set(Form)


def test_the_variant_of_an_answer_is_ascii_of_at_most_1024_characters():
    for fits in ("", "AllTraffic", "~ any printed text!", "x" * 1024):
        assert invoked_variant(fits) == fits.encode()
    with pytest.raises(LocalProtocolError, match="at most 1024 characters, not 1025"):
        invoked_variant("x" * 1025)
    for wrong in ("é", "a\r\nset-cookie: x", "\0", "\x7f", "a\t"):
        with pytest.raises(LocalProtocolError, match="printable ASCII"):
            invoked_variant(wrong)


# ---- the request body


def test_the_body_of_the_real_client_is_five_parts_and_an_end():
    assert len(CAPTURED_PARTS) == 5
    decoder = PartDecoder()
    assert received(BODY, decoder) == [*CAPTURED_PARTS, END]
    assert (decoder.buffered, decoder.need) == (0, 0)


def test_the_body_of_the_real_client_cut_at_every_position_is_the_same():
    for cut in range(len(BODY)):
        decoder = PartDecoder()
        decoder.receive_data(BODY[:cut])
        first = pull(decoder)
        decoder.receive_data(BODY[cut:])
        assert first + pull(decoder) == [*CAPTURED_PARTS, END]
        decoder.receive_eof()


def test_the_body_of_the_real_client_byte_by_byte_is_the_same():
    decoder, got = PartDecoder(), []
    for n in range(len(BODY)):
        assert END not in got
        decoder.receive_data(BODY[n : n + 1])
        got += pull(decoder)
        assert decoder.buffered < max(12, decoder.need)
    assert got == [*CAPTURED_PARTS, END]


def test_our_client_writes_the_real_client_s_bytes():
    wire = b""
    for told, sent in zip(CAPTURE["messages"], [*CAPTURED_PARTS, None], strict=True):
        seal = {"date_ms": told["date_ms"], "signature": bytes.fromhex(told["chunk_signature"])}
        if sent is None:
            wire += joined(encode_request_end(**seal))
        else:
            data_type = DataType(told["headers"]["DataType"]) if "DataType" in told["headers"] else None
            completion = Completion(told["headers"]["CompletionState"]) if "CompletionState" in told["headers"] else None
            padding = told["headers"].get("P", "")
            wire += joined(encode_request_part(sent.data, data_type, completion, padding=padding, **seal))
    assert wire == BODY
    assert b"\x01P\x07" in wire


@given(
    st.lists(
        st.tuples(st.binary(max_size=300), st.sampled_from([None, *DataType]), st.sampled_from([None, *Completion])),
        max_size=5,
    ),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(min_size=32, max_size=32),
    st.integers(1, 400),
    st.booleans(),
)
@settings(max_examples=100)
def test_what_our_client_sends_our_server_receives(parts, date_ms, signature, size, sealed):
    seal = {"date_ms": date_ms, "signature": signature}
    wire = b"".join(joined(encode_request_part(*p, **seal)) if sealed else encode_request_event(*p) for p in parts)
    wire += joined(encode_request_end(**seal)) if sealed else b""
    decoder, got = PartDecoder(), []
    for at in range(0, len(wire), size):
        decoder.receive_data(wire[at : at + size])
        got += pull(decoder)
    decoder.receive_eof()
    got = [*(p for p in got if p is not END), decoder.next_part()]
    expected = [
        part(data, kind or DataType.BINARY, state or Completion.COMPLETE, "application/octet-stream" if data else "")
        for data, kind, state in parts
    ]
    assert got == [*expected, END]


def test_a_client_that_ends_without_the_empty_envelope_is_at_its_end_too():
    decoder = PartDecoder()
    assert received(joined(encode_request_part(b"x", date_ms=0)), decoder) == [part(b"x"), END]
    assert decoder.next_part() is END


def test_the_end_is_said_again_and_again():
    decoder = PartDecoder()
    decoder.receive_data(joined(encode_request_end(date_ms=0)))
    assert [decoder.next_part() for _ in range(3)] == [END, END, END]
    decoder.receive_eof()
    assert decoder.next_part() is END


def test_bytes_after_the_empty_envelope_are_an_error_however_they_come():
    end = joined(encode_request_end(date_ms=0))
    for early, late in ((end + b"x", b""), (end, b"x"), (end, end), (end + end, b"")):
        decoder = PartDecoder()
        decoder.receive_data(early)
        assert decoder.next_part() is END
        decoder.receive_data(late)
        for _ in range(2):
            with pytest.raises(RemoteProtocolError, match=f"{len(early + late) - len(end)} bytes after the end"):
                decoder.next_part()
    decoder = PartDecoder()
    decoder.receive_data(end + b"x")
    assert decoder.next_part() is END
    with pytest.raises(RemoteProtocolError, match="1 bytes after the end"):
        decoder.receive_eof()


def test_a_body_cut_inside_a_part_is_an_error_at_its_end():
    for cut in (5, 13, 80, 100):
        decoder = PartDecoder()
        decoder.receive_data(BODY[:cut])
        assert pull(decoder) == []
        with pytest.raises(RemoteProtocolError, match="ends inside a message"):
            decoder.receive_eof()


def test_envelopes_in_another_shape_are_opened_as_well():
    inner = encode_request_event(b"x")
    for headers in (
        {":chunk-signature": bytes(32), ":date": Timestamp(0)},
        {":date": Timestamp(0), ":chunk-signature": b"", "more": "x"},
    ):
        assert received(joined(encode_buffers(headers, inner)), PartDecoder()) == [part(b"x"), END]


@pytest.mark.parametrize(
    "headers",
    [
        {":date": Timestamp(0)},
        {":chunk-signature": bytes(32)},
        {":date": "2026", ":chunk-signature": bytes(32)},
        {":date": Timestamp(0), ":chunk-signature": "ab" * 32},
    ],
)
def test_half_an_envelope_is_refused(headers):
    refused(joined(encode_buffers(headers, encode_request_event(b"x"))), "needs :date .* and :chunk-signature")


@pytest.mark.parametrize("wrap", [lambda e: e, lambda e: joined(encode_envelope(e, date_ms=0))], ids=["bare", "enveloped"])
@pytest.mark.parametrize(
    ("headers", "complaint"),
    [
        ({}, ":message-type must be 'event', got no such header"),
        ({":message-type": "event"}, ":event-type must be 'PayloadPart', got no such header"),
        (
            {":message-type": "exception", ":exception-type": "ModelStreamError"},
            ":message-type must be 'event', got 'exception'",
        ),
        (
            {":message-type": "event", ":event-type": "initial-request"},
            ":event-type must be 'PayloadPart', got 'initial-request'",
        ),
        ({":message-type": "event", ":event-type": "Heartbeat"}, "got 'Heartbeat'"),
        ({":message-type": b"event", ":event-type": "PayloadPart"}, "got b'event'"),
        (EVENT | {"DataType": "utf8"}, "DataType must be 'UTF8' or 'BINARY', got 'utf8'"),
        (EVENT | {"DataType": ""}, "DataType must be 'UTF8' or 'BINARY', got ''"),
        (EVENT | {"DataType": True}, "DataType must be .* got True"),
        (EVENT | {"CompletionState": "DONE"}, "CompletionState must be 'PARTIAL' or 'COMPLETE', got 'DONE'"),
        (EVENT | {"CompletionStatus": "DONE"}, "CompletionState must be 'PARTIAL' or 'COMPLETE', got 'DONE'"),
        (
            EVENT | {"CompletionState": "PARTIAL", "CompletionStatus": "COMPLETE"},
            "is 'PARTIAL' and CompletionStatus is 'COMPLETE'",
        ),
    ],
)
def test_an_event_that_is_no_payload_part_is_refused(headers, complaint, wrap):
    decoder = refused(wrap(joined(encode_buffers(headers, b"x"))), complaint)
    decoder.receive_data(BODY)
    with pytest.raises(RemoteProtocolError, match=complaint):
        decoder.next_part()
    assert decoder.buffered == 0


def test_an_error_never_echoes_a_value_at_length():
    decoder = PartDecoder()
    decoder.receive_data(event({"DataType": "x" * 30_000}))
    with pytest.raises(RemoteProtocolError) as caught:
        decoder.next_part()
    assert len(str(caught.value)) < 200


def test_what_an_envelope_holds_must_be_one_message_that_fills_it():
    inner = encode_request_event(b"x")
    for wrong in (inner[:-1], inner + b"\0", inner + inner, b"\0"):
        refused(joined(encode_envelope(wrong, date_ms=0)), "bytes")
    damaged = bytearray(inner)
    damaged[-5] ^= 1
    refused(joined(encode_envelope(damaged, date_ms=0)), "message CRC")
    refused(joined(encode_envelope(joined(encode_envelope(inner, date_ms=0)), date_ms=0)), ":message-type must be 'event'")


def test_completion_status_is_read_as_completion_state():
    # The seed's text names the member CompletionStatus, its examples and the GA model CompletionState.
    for headers in ({"CompletionStatus": "PARTIAL"}, {"CompletionStatus": "PARTIAL", "CompletionState": "PARTIAL"}):
        assert received(event(headers, b"x"), PartDecoder()) == [
            part(b"x", completion=Completion.PARTIAL, content_type=""),
            END,
        ]


def test_padding_and_unknown_headers_are_dropped():
    assert received(event({"P": "x" * 1000, "New": Timestamp(0), ":content-type": b"?"}, b"x"), PartDecoder()) == [
        part(b"x", content_type=""),
        END,
    ]


# ---- signatures


class Recorder:
    """Believes everything but the message of one number."""

    def __init__(self, refuses=None, error=None):
        self.seen = []
        self.refuses, self.error = refuses, error or RemoteProtocolError("signature does not match")

    def __call__(self, date_ms, signature, payload):
        if len(self.seen) == self.refuses:
            raise self.error
        self.seen.append((date_ms, bytes(signature), bytes(payload)))


SEALS = [(told["date_ms"], bytes.fromhex(told["chunk_signature"])) for told in CAPTURE["messages"]]


@pytest.mark.parametrize("size", [1, 100, len(BODY)])
def test_every_envelope_is_verified_in_its_order_the_empty_one_too(size):
    for _ in range(2):  # with headers that were never seen, and with such as are known
        verify, got = Recorder(), []
        decoder = PartDecoder(verify=verify)
        for at in range(0, len(BODY), size):
            decoder.receive_data(BODY[at : at + size])
            got += pull(decoder)
        assert got == [*CAPTURED_PARTS, END]
        assert [seen[:2] for seen in verify.seen] == SEALS
        assert verify.seen[-1][2] == b""
        assert joined(b"".join(encode_envelope(p, date_ms=d, signature=s)) for d, s, p in verify.seen) == BODY


@pytest.mark.parametrize("number", range(6))
def test_what_was_not_verified_is_not_believed_and_ends_the_body(number):
    decoder = PartDecoder(verify=Recorder(refuses=number))
    decoder.receive_data(BODY)
    assert [decoder.next_part() for _ in range(number)] == CAPTURED_PARTS[:number]
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="signature does not match"):
            decoder.next_part()
    assert (decoder.buffered, decoder.need) == (0, 0)


def test_a_verification_comes_before_the_payload_is_looked_at():
    decoder = PartDecoder(verify=Recorder(refuses=0))
    decoder.receive_data(joined(encode_envelope(b"no event", date_ms=0)))
    with pytest.raises(RemoteProtocolError, match="signature does not match"):
        decoder.next_part()


def test_whatever_a_verification_raises_no_later_message_is_read():
    decoder = PartDecoder(verify=Recorder(refuses=1, error=KeyError("x")))
    decoder.receive_data(BODY)
    assert decoder.next_part() == CAPTURED_PARTS[0]
    with pytest.raises(KeyError):
        decoder.next_part()
    with pytest.raises(RemoteProtocolError, match="a signature was not verified"):
        decoder.next_part()


def test_where_signatures_are_verified_a_bare_event_is_refused():
    for payload in (b"x", bytes(20_000)):
        verify = Recorder()
        refused(encode_request_event(payload), "event without :date and :chunk-signature", PartDecoder(verify=verify))
        assert verify.seen == []


def test_a_signature_of_another_length_is_refused_where_it_matters():
    for signature in (b"", bytes(31), bytes(33)):
        wire = joined(encode_envelope(encode_request_event(b"x"), date_ms=0, signature=signature))
        assert received(wire, PartDecoder()) == [part(b"x"), END]
        refused(wire, f":chunk-signature must have 32 bytes, got {len(signature)}", PartDecoder(verify=Recorder()))


def test_verified_dates_before_1970_and_headers_in_another_order_are_told_as_they_are():
    verify = Recorder()
    decoder = PartDecoder(verify=verify)
    swapped = {":chunk-signature": bytes(range(32)), ":date": Timestamp(-5)}
    event = encode_request_event(b"x")
    for wire in (
        joined(encode_envelope(event, date_ms=-5, signature=bytes(range(32)))),
        joined(encode_buffers(swapped, event)),
    ):
        decoder.receive_data(wire)
        assert decoder.next_part() == part(b"x")
    assert verify.seen == [(-5, bytes(range(32)), event)] * 2


def test_an_end_without_the_empty_envelope_is_accepted_with_signatures_too():
    # SDKs before 0.5 leave it out.
    decoder = PartDecoder(verify=Recorder())
    assert received(joined(encode_request_part(b"x", date_ms=0)), decoder) == [part(b"x"), END]


# ---- memory and limits


def test_the_largest_part_of_the_real_client_passes_and_one_byte_more_does_not():
    # 16,777,111 bytes without event headers is what the SDK can send; its envelope then has 16,777,299.
    wire = joined(encode_request_part(bytes(16_777_111), date_ms=0))
    assert len(wire) == 16_777_299
    decoder = PartDecoder()
    view = memoryview(wire)
    for at in range(0, len(wire), 2**20):
        decoder.receive_data(view[at : at + 2**20])
        got = decoder.next_part()
        assert got is NEED_DATA or at + 2**20 > len(wire)
        assert decoder.need in (0, len(wire))
    assert got.data.nbytes == 16_777_111
    assert type(got.data) is memoryview
    assert got.data.readonly
    with pytest.raises(LocalProtocolError, match="at most 16777216 bytes, not 16777217"):
        encode_request_part(bytes(16_777_112), date_ms=0)


def test_the_limit_of_a_part_is_the_same_in_an_envelope_and_bare():
    fits, over = encode_request_event(bytes(900)), encode_request_event(bytes(901))
    for wrap in (lambda e: e, lambda e: joined(encode_envelope(e, date_ms=0))):
        assert received(wrap(fits), PartDecoder(len(fits))) == [part(bytes(900)), END]
    refused(over, f"event of {len(over)} bytes with its headers, the limit of a part is {len(fits)}", PartDecoder(len(fits)))
    envelope = joined(encode_envelope(over, date_ms=0))
    refused(
        envelope, f"message of {len(envelope)} bytes, the limit is {len(fits) + ENVELOPE_OVERHEAD}", PartDecoder(len(fits))
    )
    short = joined(encode_buffers({":date": Timestamp(0), ":chunk-signature": b""}, over))
    refused(short, "the limit of a part", PartDecoder(len(fits)))


def test_a_part_above_the_limit_is_refused_at_its_prelude():
    wire = joined(encode_request_part(bytes(100_000), date_ms=0))
    decoder = refused(wire[:12], "the limit is 65619", PartDecoder(65_536))
    assert (decoder.need, decoder.buffered) == (0, 0)


def test_the_header_limits_hold_inside_an_envelope():
    many = event({f"h{n}": True for n in range(20)}, b"x")
    for wire in (many, joined(encode_envelope(many, date_ms=0))):
        assert len(received(wire, PartDecoder(max_fields=22))) == 2
        refused(wire, "more than 21 header fields", PartDecoder(max_fields=21))
        refused(wire, "headers of .* the limit is 100", PartDecoder(max_headers=100))


@given(st.binary(max_size=200), st.sampled_from(["raw", "payload", "headers"]))
@settings(max_examples=200)
def test_garbage_is_refused_or_waited_for_and_nothing_else(garbage, place):
    wire = {
        "raw": lambda: garbage,
        "payload": lambda: joined(encode_envelope(garbage, date_ms=0)),
        "headers": lambda: event({"DataType": garbage, "CompletionState": garbage[1:]}),
    }[place]()
    for decoder in (PartDecoder(), ResponseDecoder()):
        decoder.receive_data(wire)
        try:
            pull(decoder)
            decoder.receive_eof()
        except RemoteProtocolError:
            pass
        else:
            assert decoder.buffered == 0


# ---- the response


def test_a_part_of_1024_bytes_is_1174_on_the_wire_and_these_bytes():
    (wire,) = encode_part(bytes(1024), DataType.BINARY, Completion.COMPLETE)
    assert len(wire) == 1174
    assert wire[:8] == (1174).to_bytes(4, "big") + (134).to_bytes(4, "big")
    assert wire[12:146] == (
        b"\x0d:message-type\x07\x00\x05event"
        b"\x0b:event-type\x07\x00\x0bPayloadPart"
        b"\x0d:content-type\x07\x00\x18application/octet-stream"
        b"\x08DataType\x07\x00\x06BINARY"
        b"\x0fCompletionState\x07\x00\x08COMPLETE"
    )
    assert wire[146:-4] == bytes(1024)
    assert len(encode_part(bytes(1024), DataType.UTF8)[0]) == 1172


@pytest.mark.parametrize("data", [b"", b"text", bytes(16_384)])
@pytest.mark.parametrize("data_type", [None, *DataType])
@pytest.mark.parametrize("completion", [None, *Completion])
def test_a_part_comes_back_as_it_was_sent(data, data_type, completion):
    buffers = encode_part(data, data_type, completion)
    assert received(joined(buffers), ResponseDecoder()) == [
        part(data, data_type or DataType.BINARY, completion or Completion.COMPLETE),
        END,
    ]
    assert (buffers[1] is data) if len(data) == 16_384 else len(buffers) == 1


def test_a_response_part_may_have_16_mib_and_no_more():
    (head, body, tail) = encode_part(bytes(MIB_16), DataType.BINARY)
    decoder = ResponseDecoder()
    for piece in (head, body, tail):
        decoder.receive_data(piece)
        got = decoder.next_event()
    assert got.data.nbytes == MIB_16
    with pytest.raises(LocalProtocolError, match="at most 16777216 bytes"):
        encode_part(bytes(MIB_16 + 1))


def headers_of(wire):
    decoder = Decoder()
    decoder.receive_data(wire)
    message = decoder.next_message()
    return list(message.headers.items()), json.loads(message.payload)


def test_a_model_stream_error_has_these_headers_and_members():
    assert headers_of(joined(encode_model_stream_error("out of memory", "StreamBroken"))) == (
        [(":message-type", "exception"), (":exception-type", "ModelStreamError"), (":content-type", "application/json")],
        {"Message": "out of memory", "ErrorCode": "StreamBroken"},
    )
    assert headers_of(joined(encode_model_stream_error("x")))[1] == {"Message": "x"}


def test_an_internal_stream_failure_has_these_headers_and_members():
    assert headers_of(joined(encode_internal_stream_failure("draining"))) == (
        [
            (":message-type", "exception"),
            (":exception-type", "InternalStreamFailure"),
            (":content-type", "application/json"),
        ],
        {"Message": "draining"},
    )


def test_parts_then_a_failure_then_the_end():
    wire = joined(encode_part(b"a", DataType.UTF8)) + joined(encode_model_stream_error("gone", "1011"))
    failure = StreamFailure(exception_type="ModelStreamError", message="gone", code="1011")
    for size in (1, 50, len(wire)):
        decoder, got = ResponseDecoder(), []
        for at in range(0, len(wire), size):
            decoder.receive_data(wire[at : at + size])
            got += pull(decoder)
        assert got[:2] == [part(b"a", DataType.UTF8), failure]
        assert decoder.next_event() is END
    decoder.receive_data(b"x")
    with pytest.raises(RemoteProtocolError, match="1 bytes after the end"):
        decoder.next_event()


def test_a_response_without_a_failure_ends_with_its_wire():
    decoder = ResponseDecoder()
    assert decoder.next_event() is NEED_DATA
    decoder.receive_eof()
    assert decoder.next_event() is END


def test_failures_of_other_servers_are_understood():
    def failure(headers, payload=b""):
        return received(joined(encode_buffers(headers, payload)), ResponseDecoder())[0]

    exception = {":message-type": "exception", ":exception-type": "Other"}
    assert failure(exception, b'{"message":"lost","More":[1]}') == StreamFailure(exception_type="Other")
    assert failure(exception, b'{"Message":null,"ErrorCode":"7"}') == StreamFailure(exception_type="Other", code="7")
    assert failure({":message-type": "error", ":error-code": "Throttled", ":error-message": "slow"}) == StreamFailure(
        exception_type="Throttled", message="slow"
    )


@pytest.mark.parametrize(
    ("headers", "payload", "complaint"),
    [
        ({":message-type": "exception"}, b"{}", ":exception-type must be a string, got no such header"),
        ({":message-type": "exception", ":exception-type": "E"}, b"", "must be a JSON object"),
        ({":message-type": "exception", ":exception-type": "E"}, b'{"Message":1}', "must be a JSON object"),
        ({":message-type": "exception", ":exception-type": "E"}, b'{"Message":"\xff"}', "must be a JSON object"),
        ({":message-type": "exception", ":exception-type": "E"}, b'{"x":' + b"[" * 100_000, "must be a JSON object"),
        (
            {":message-type": "error", ":error-code": "E", ":error-message": b"x"},
            b"",
            ":error-message must be a string, got b'x'",
        ),
        ({":message-type": "event", ":event-type": "initial-response"}, b"{}", "got 'initial-response'"),
        ({":message-type": "news"}, b"", ":message-type must be 'event', got 'news'"),
    ],
)
def test_a_response_that_breaks_the_dialect_is_refused_for_good(headers, payload, complaint):
    decoder = refused(joined(encode_buffers(headers, payload)), complaint, ResponseDecoder())
    with pytest.raises(RemoteProtocolError, match=complaint):
        decoder.next_event()


def test_a_response_keeps_its_own_limits():
    refused(joined(encode_part(bytes(1000))), "the limit is 500", ResponseDecoder(Limits(message=500)))


@pytest.mark.parametrize("data", [b"", b"text", bytes(16_384)])
def test_padding_stands_behind_the_other_headers_and_is_dropped_again(data):
    for padding in ("x", "é", "p" * 32_767):
        wire = joined(encode_part(data, DataType.UTF8, Completion.PARTIAL, padding=padding))
        plain = joined(encode_part(data, DataType.UTF8, Completion.PARTIAL))
        raw = padding.encode()
        assert len(wire) == len(plain) + 5 + len(raw)
        end = len(plain) - 4 - len(data)
        assert wire[12 : end + 5 + len(raw)] == plain[12:end] + b"\x01P\x07" + len(raw).to_bytes(2, "big") + raw
        assert received(wire, ResponseDecoder()) == [part(data, DataType.UTF8, Completion.PARTIAL), END]
    with pytest.raises(LocalProtocolError, match="at most 32767 bytes, not 32768"):
        encode_part(data, padding="p" * 32_768)


def test_padding_of_many_lengths_is_not_remembered():
    bidi._response_head.cache_clear()
    for n in range(1, 500):
        encode_part(bytes(n), padding="p" * n)
    assert bidi._response_head.cache_info().currsize == 0


# ---- errors before the stream


@pytest.mark.parametrize(
    ("errortype", "status"),
    [("InputValidationError", 400), ("ModelError", 424), ("InternalServerError", 500), ("ServiceUnavailableError", 503)],
)
def test_an_error_before_the_stream_has_its_status_its_type_and_its_text(errortype, status):
    got, headers, body = error_body(BidiErrorType(errortype), "no such endpoint: x")
    assert got == status
    assert dict(headers) == {
        b"content-type": b"application/json",
        b"content-length": str(len(body)).encode(),
        b"x-amzn-errortype": errortype.encode(),
    }
    assert json.loads(body) == {"Message": "no such endpoint: x"}


def test_a_model_error_carries_what_the_model_said():
    _, _, body = error_body(
        BidiErrorType.MODEL_ERROR,
        "the model failed",
        code="E1",
        original_status=507,
        original_message="no memory",
        log_stream_arn="arn:x",
    )
    assert json.loads(body) == {
        "Message": "the model failed",
        "ErrorCode": "E1",
        "OriginalStatusCode": 507,
        "OriginalMessage": "no memory",
        "LogStreamArn": "arn:x",
    }


def test_the_message_member_is_there_even_when_it_is_empty():
    assert json.loads(error_body(BidiErrorType.INTERNAL_SERVER_ERROR, "")[2]) == {"Message": ""}
    assert headers_of(joined(encode_internal_stream_failure("")))[1] == {"Message": ""}


def test_no_text_of_a_model_can_make_its_error_impossible_to_send():
    hostile = '\ud800\x00"é' + "x" * 100_000
    for body in (
        error_body(BidiErrorType.MODEL_ERROR, hostile, original_message=hostile)[2],
        joined(encode_model_stream_error(hostile, "\udfff")),
    ):
        assert b'\\u0000\\"\xc3\xa9' in body
        assert len(body) < 80_000


def test_the_example_of_the_reference_page_does_what_it_says():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "bidi.md").read_text()
    example = {}
    exec(page.split("```python\n")[1].split("```")[0], example)
    assert received(joined(example["answer"]), ResponseDecoder()) == [part(b"HELLO", DataType.UTF8), END]
