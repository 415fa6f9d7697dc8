"""InvokeEndpoint and its streaming sibling: heads by the published rules, errors as clients raise them, golden messages."""

import json
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.aws import invoke
from protocols.aws.bidi import END, PayloadPart, ResponseDecoder, StreamFailure
from protocols.aws.eventstream import LARGE, MAX_PAYLOAD
from protocols.aws.invoke import (
    CLOSED_SESSION_ID,
    CUSTOM_ATTRIBUTES,
    MODEL_INVOCATION_TIME_EXCEEDED,
    NEW_SESSION_ID,
    PART_SIZE,
    STREAM_BROKEN,
    InvokeErrorType,
    InvokeInputError,
    InvokeOperation,
    InvokeRequest,
    ReplyError,
    binary_json_content_type,
    encode_internal_stream_failure,
    encode_model_stream_error,
    encode_payload_part,
    error_response,
    json_header_size,
    read_request,
    response_headers,
    split_body,
)
from protocols.errors import LocalProtocolError

INVOKE = InvokeOperation.INVOKE_ENDPOINT
STREAM = InvokeOperation.INVOKE_ENDPOINT_WITH_RESPONSE_STREAM
X = "x-amzn-sagemaker-"
ALL = {
    "content-type": "text/csv",
    "accept": "application/json",
    X + "accept": "application/jsonlines",
    X + "custom-attributes": "trace=1; c000b4f9",
    X + "target-model": "a/b.tar.gz",
    X + "target-variant": "blue",
    X + "target-container-hostname": "second",
    X + "inference-id": "req 1",
    X + "enable-explanations": "`[0]>=0.8`",
    X + "inference-component": "part--1",
    X + "session-id": "s-1",
    X + "prefix-aware-id": "p!1",
    X + "model-invocation-path": "another/operation",
}
TRITON = "application/vnd.sagemaker-triton.binary+json"


def read(headers=(), operation=INVOKE, endpoint="demo"):
    return read_request(operation, endpoint, dict(headers))


# ---- the request head


def test_an_invocation_asks_for_all_that_its_operation_has():
    assert read(ALL) == InvokeRequest(
        operation=INVOKE,
        endpoint="demo",
        content_type="text/csv",
        accept="application/json",
        custom_attributes="trace=1; c000b4f9",
        target_model="a/b.tar.gz",
        target_variant="blue",
        target_container_hostname="second",
        inference_id="req 1",
        enable_explanations="`[0]>=0.8`",
        inference_component="part--1",
        session_id="s-1",
        prefix_aware_id="p!1",
    )


def test_a_response_stream_has_an_accept_of_its_own_and_no_target_model_and_no_explanations():
    assert read(ALL, STREAM) == InvokeRequest(
        operation=STREAM,
        endpoint="demo",
        content_type="text/csv",
        accept="application/jsonlines",
        custom_attributes="trace=1; c000b4f9",
        target_variant="blue",
        target_container_hostname="second",
        inference_id="req 1",
        inference_component="part--1",
        session_id="s-1",
        prefix_aware_id="p!1",
    )


@pytest.mark.parametrize("operation", InvokeOperation)
def test_no_headers_and_empty_headers_ask_for_nothing(operation):
    nothing = InvokeRequest(operation=operation, endpoint="demo")
    assert read({}, operation) == read(dict.fromkeys(ALL, ""), operation) == nothing


def test_a_header_that_the_operation_has_not_is_ignored_whatever_it_says():
    foreign = {X + "target-model": " \x00", X + "enable-explanations": "x" * 65, "accept": "é"}
    assert read(foreign, STREAM) == read({}, STREAM)
    assert read({X + "accept": "é"}, INVOKE) == read({}, INVOKE)


def test_only_an_invocation_asks_for_a_new_session():
    new = {X + "session-id": "NEW_SESSION"}
    assert read(new).session_id == "NEW_SESSION"
    with pytest.raises(InvokeInputError, match="SessionId must match"):
        read(new, STREAM)


@pytest.mark.parametrize(
    ("header", "member", "longest", "letter"),
    [
        ("content-type", "ContentType", 1024, "a"),
        ("accept", "Accept", 1024, "a"),
        (X + "custom-attributes", "CustomAttributes", 1024, "a"),
        (X + "target-model", "TargetModel", 1024, "/"),
        (X + "target-variant", "TargetVariant", 63, "a"),
        (X + "target-container-hostname", "TargetContainerHostname", 63, "a"),
        (X + "inference-id", "InferenceId", 64, "~"),
        (X + "enable-explanations", "EnableExplanations", 64, "é"),
        (X + "inference-component", "InferenceComponentName", 63, "a"),
        (X + "session-id", "SessionId", 256, "a"),
        (X + "prefix-aware-id", "PrefixAwareId", 64, "~"),
    ],
)
def test_a_member_has_its_length_and_not_one_character_more(header, member, longest, letter):
    assert letter * longest in vars_of(read({header: letter * longest}))
    with pytest.raises(InvokeInputError, match=f"^{member} has at most {longest} characters, got {longest + 1}"):
        read({header: letter * (longest + 1)})


def vars_of(request):
    return [getattr(request, name) for name in InvokeRequest.__dataclass_fields__]


NAMES = ["a", "7", "a-b", "a--b", "x" * 63]
NO_NAMES = ["-", "-a", "a-", "a_b", "a.b", "a b", "a\n", "é", "a/b"]
CASES = {
    "content-type": (["text/plain; charset=utf-8", "\x00\x7f", "a\r\nb"], ["\x80", "é", "\u2028"]),
    X + "custom-attributes": (["\x00\x7f"], ["\x80"]),
    X + "target-variant": (NAMES, NO_NAMES),
    X + "target-container-hostname": (NAMES, NO_NAMES),
    # one published pattern, in Java's words: \S is all but six characters, \p{Print} is ASCII with the space
    X + "target-model": (
        ["a b", "../x", "éa", "\x01", "\x85a", "\u00a0"],
        [" a", "\ta", "\x0ba", "aé", "a\n", "a\t", "a\x7f"],
    ),
    X + "inference-id": (["~ "], ["\na"]),
    X + "prefix-aware-id": (["~ "], ["\ra"]),
    X + "enable-explanations": (["\x00 é\t"], ["a\nb", "\r", "\x85", "\u2028", "\u2029"]),
    X + "inference-component": (["a", "a-b", "a---b"], ["-a", "a-", "a\n", "a_b"]),
    X + "session-id": (["NEW_SESSION", "a-b"], ["NEW_SESSION\n", "new_session", "a-", "xNEW_SESSION"]),
}


@pytest.mark.parametrize(("header", "value"), [(h, v) for h, (good, _) in CASES.items() for v in good])
def test_what_the_published_pattern_admits_is_taken_as_it_came(header, value):
    assert value in vars_of(read({header: value}))


@pytest.mark.parametrize(("header", "value"), [(h, v) for h, (_, bad) in CASES.items() for v in bad])
def test_what_the_published_pattern_does_not_admit_as_a_whole_is_refused(header, value):
    with pytest.raises(InvokeInputError, match=r"^[A-Z][A-Za-z]+ must match .+ as a whole"):
        read({header: value})


@pytest.mark.parametrize("endpoint", ["", *NO_NAMES, "a" * 64])
def test_a_name_that_no_endpoint_can_have_is_refused(endpoint):
    with pytest.raises(InvokeInputError, match="EndpointName "):
        read(endpoint=endpoint)


def test_a_refusal_says_which_rule_and_a_little_of_what_came():
    with pytest.raises(InvokeInputError) as caught:
        read({X + "target-variant": "-" + "a" * 62})
    assert (
        str(caught.value) == f"TargetVariant must match ^[a-zA-Z0-9](-*[a-zA-Z0-9])* as a whole, it does not: '-{'a' * 62}'"
    )
    assert (caught.value.status, caught.value.errortype) == (400, InvokeErrorType.VALIDATION_ERROR)
    with pytest.raises(InvokeInputError) as caught:
        read({X + "session-id": "s" * 300})
    assert str(caught.value) == f"SessionId has at most 256 characters, got 300: '{'s' * 64}'..."


def test_custom_attributes_are_sensitive_and_not_told_to_a_log():
    for value in ("secret-é", "secret" * 200):
        with pytest.raises(InvokeInputError) as caught:
            read({X + "custom-attributes": value})
        assert "secret" not in str(caught.value)


@settings(max_examples=100)
@given(
    st.sampled_from(InvokeOperation),
    st.text(max_size=70),
    st.dictionaries(st.sampled_from(list(ALL)), st.text(max_size=300)),
)
def test_no_head_breaks_the_reader(operation, endpoint, headers):
    try:
        request = read_request(operation, endpoint, headers)
    except InvokeInputError:
        pass
    else:
        told = set(vars_of(request)) - {None, operation}
        assert told <= {endpoint, *headers.values()}


def test_long_runs_of_dashes_are_read_in_linear_time():
    with pytest.raises(InvokeInputError):
        read({X + "session-id": "a" + "-" * 255})
    with pytest.raises(InvokeInputError):
        read({X + "session-id": "a-" * 128})


# ---- the response head


def test_the_head_of_an_invocation_tells_all_that_the_model_says():
    reply = {
        "content-type": "text/csv",
        CUSTOM_ATTRIBUTES: "a=1",
        NEW_SESSION_ID: "s-1; Expires=2030-01-31T00:00:00Z",
        CLOSED_SESSION_ID: "s-0",
        "set-cookie": "no header of this operation",
    }
    assert response_headers(INVOKE, reply, content_type="x/y", variant="blue", request_id="r-1") == [
        (b"content-type", b"text/csv"),
        (b"x-amzn-sagemaker-new-session-id", b"s-1; Expires=2030-01-31T00:00:00Z"),
        (b"x-amzn-sagemaker-closed-session-id", b"s-0"),
        (b"x-amzn-sagemaker-custom-attributes", b"a=1"),
        (b"x-amzn-invoked-production-variant", b"blue"),
        (b"x-amzn-requestid", b"r-1"),
    ]


def test_the_head_of_a_stream_has_the_models_content_type_beside_the_event_streams():
    reply = {CUSTOM_ATTRIBUTES: "a=1", NEW_SESSION_ID: "not of this operation"}
    assert response_headers(STREAM, reply, content_type="application/jsonlines") == [
        (b"content-type", b"application/vnd.amazon.eventstream"),
        (b"x-amzn-sagemaker-content-type", b"application/jsonlines"),
        (b"x-amzn-sagemaker-custom-attributes", b"a=1"),
    ]


def test_white_space_around_a_value_is_no_part_of_it_and_a_value_of_nothing_else_is_left_out():
    assert response_headers(INVOKE, {CUSTOM_ATTRIBUTES: "\t a\tb "}, content_type=" x/y") == [
        (b"content-type", b"x/y"),
        (b"x-amzn-sagemaker-custom-attributes", b"a\tb"),
    ]
    assert response_headers(INVOKE, {CUSTOM_ATTRIBUTES: " \t"}, content_type="") == []


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("a\r\nset-cookie: x", "printable ASCII, the model gave U.000D at position 1"),
        ("a\n", "printable ASCII, the model gave U.000A at position 1"),
        ("\x00", "printable ASCII, the model gave U.0000 at position 0"),
        ("a=é", "printable ASCII, the model gave U.00E9 at position 2"),
        ("\x7f", "printable ASCII, the model gave U.007F at position 0"),
        ("\ud800", "printable ASCII, the model gave U.D800 at position 0"),
        ("x" * 1025, "at most 1024 characters, the model gave 1025"),
    ],
)
@pytest.mark.parametrize("header", ["content-type", CUSTOM_ATTRIBUTES])
@pytest.mark.parametrize("operation", InvokeOperation)
def test_a_value_that_is_no_header_is_the_models_error_and_never_a_header(operation, header, value, told):
    with pytest.raises(ReplyError, match=told) as caught:
        response_headers(operation, {header: value}, content_type="x/y")
    assert (caught.value.status, caught.value.errortype) == (424, InvokeErrorType.MODEL_ERROR)


def test_a_value_of_1024_characters_goes_out():
    longest = "x" * 1024
    assert (CUSTOM_ATTRIBUTES.encode(), longest.encode()) in response_headers(
        STREAM, {CUSTOM_ATTRIBUTES: longest}, content_type=""
    )


@pytest.mark.parametrize(
    "reply",
    [
        {NEW_SESSION_ID: "s-1"},
        {NEW_SESSION_ID: "s-1; Expires=tomorrow"},
        {NEW_SESSION_ID: "s-1; Expires=2030-01-31T00:00:00Z; more"},
        {NEW_SESSION_ID: "x" * 257},
        {CLOSED_SESSION_ID: "a_b"},
        {CLOSED_SESSION_ID: "x" * 257},
    ],
)
def test_a_session_id_that_no_client_could_send_back_is_the_models_error(reply):
    with pytest.raises(ReplyError, match="session-id "):
        response_headers(INVOKE, reply, content_type="x/y")


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(["content-type", CUSTOM_ATTRIBUTES, NEW_SESSION_ID, CLOSED_SESSION_ID]), st.text()))
def test_whatever_a_model_says_only_whole_fields_go_out(reply):
    for operation in InvokeOperation:
        try:
            headers = response_headers(operation, reply, content_type="x/y")
        except ReplyError:
            continue
        allowed = set(string.printable.encode()) - set(b"\r\n\x0b\x0c")
        assert all(set(value) <= allowed and value == value.strip() for _, value in headers)


# ---- errors


def test_an_error_is_a_json_body_with_its_name_in_a_header():
    status, headers, body = error_response(
        InvokeErrorType.MODEL_ERROR,
        "it failed",
        original_status=500,
        original_message="boom é",
        log_stream_arn="arn:aws:logs",
    )
    assert status == 424
    assert body == (
        '{"Message":"it failed","OriginalStatusCode":500,"OriginalMessage":"boom é","LogStreamArn":"arn:aws:logs"}'.encode()
    )
    assert headers == (
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-amzn-errortype", b"ModelError"),
    )


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("ValidationError", 400),
        ("ModelError", 424),
        ("ModelNotReadyException", 429),
        ("InternalFailure", 500),
        ("ServiceUnavailable", 503),
        ("InternalDependencyException", 530),
    ],
)
def test_every_error_has_its_published_name_and_status(name, status):
    got, headers, body = error_response(InvokeErrorType(name), "m")
    assert (got, dict(headers)[b"x-amzn-errortype"], body) == (status, name.encode(), b'{"Message":"m"}')


def test_there_is_always_a_message_and_an_empty_original_one_is_said():
    _, _, body = error_response(InvokeErrorType.MODEL_ERROR, "", original_status=500, original_message="")
    assert json.loads(body) == {"Message": "", "OriginalStatusCode": 500, "OriginalMessage": ""}


def test_a_text_has_2048_characters_at_most_and_shows_where_it_was_cut():
    _, _, whole = error_response(InvokeErrorType.INTERNAL_FAILURE, "é" * 2048)
    _, _, cut = error_response(InvokeErrorType.MODEL_ERROR, "é" * 2049, original_message="x" * 10**6)
    assert json.loads(whole) == {"Message": "é" * 2048}
    assert json.loads(cut) == {"Message": "é" * 2045 + "...", "OriginalMessage": "x" * 2045 + "..."}


def test_a_lone_surrogate_in_a_text_becomes_a_question_mark():
    _, _, body = error_response(InvokeErrorType.MODEL_ERROR, "a\ud800", original_message="\udfff")
    assert json.loads(body) == {"Message": "a?", "OriginalMessage": "?"}
    assert b'"a?"' in b"".join(encode_model_stream_error("a\ud800", "X"))


# ---- the response stream


def received(*messages):
    decoder = ResponseDecoder()
    for buffers in messages:
        decoder.receive_data(b"".join(buffers))
    decoder.receive_eof()
    got = []
    while (event := decoder.next_event()) is not END:
        got.append(event)
    return got


def test_a_part_is_this_message():
    assert b"".join(encode_payload_part(b"Hi")) == bytes.fromhex(
        "0000006b00000059" + "99777065"
        "0d3a6d6573736167652d74797065" + "070005" + "6576656e74"
        "0b3a6576656e742d74797065" + "07000b" + "5061796c6f616450617274"
        "0d3a636f6e74656e742d74797065" + "070018" + "6170706c69636174696f6e2f6f637465742d73747265616d"
        "4869" + "e85a24c0"
    )  # fmt: skip


def test_a_models_error_and_the_platforms_are_these_messages():
    assert b"".join(encode_model_stream_error("late", MODEL_INVOCATION_TIME_EXCEEDED)).find(
        b'\x0d:message-type\x07\x00\x09exception\x0f:exception-type\x07\x00\x10ModelStreamError'
        b'\x0d:content-type\x07\x00\x10application/json{"Message":"late","ErrorCode":"ModelInvocationTimeExceeded"}'
    ) == 12  # fmt: skip
    assert b"".join(encode_internal_stream_failure("drain")).find(
        b'\x0d:message-type\x07\x00\x09exception\x0f:exception-type\x07\x00\x15InternalStreamFailure'
        b'\x0d:content-type\x07\x00\x10application/json{"Message":"drain"}'
    ) == 12  # fmt: skip


def test_a_client_reads_parts_and_then_the_one_failure():
    got = received(encode_payload_part(b"one\n"), encode_payload_part(b""), encode_model_stream_error("gone", STREAM_BROKEN))
    assert [e.data for e in got[:2]] == [b"one\n", b""]
    assert all(type(e) is PayloadPart and e.content_type == "application/octet-stream" for e in got[:2])
    assert got[2:] == [StreamFailure(exception_type="ModelStreamError", message="gone", code="StreamBroken")]
    assert received(encode_internal_stream_failure("x" * 3000)) == [
        StreamFailure(exception_type="InternalStreamFailure", message="x" * 2045 + "...")
    ]


def test_a_large_part_goes_by_reference_and_a_part_has_16_mib_at_most():
    data = bytearray(LARGE)
    assert encode_payload_part(data)[1] is data
    assert len(encode_payload_part(memoryview(data)[1:])) == 1
    with pytest.raises(LocalProtocolError, match=str(MAX_PAYLOAD)):
        encode_payload_part(bytes(MAX_PAYLOAD + 1))


@pytest.mark.parametrize("size", [0, 1, PART_SIZE - 1, PART_SIZE, PART_SIZE + 1, 3 * PART_SIZE])
def test_a_body_is_split_into_parts_of_64_kib_without_a_copy(size):
    body = np.arange(size, dtype=np.uint8)
    parts = list(split_body(body.data))
    assert [len(p) for p in parts] == [PART_SIZE] * (size // PART_SIZE) + [size % PART_SIZE] * (size % PART_SIZE > 0)
    assert all(np.shares_memory(body, np.frombuffer(p, np.uint8)) for p in parts)
    assert b"".join(parts) == body.tobytes()
    assert [bytes(e.data) for e in received(*map(encode_payload_part, parts))] == [bytes(p) for p in parts]


@pytest.mark.parametrize(
    "body", [np.ones((3, 2), np.float32), np.float64(5), np.zeros((0, 3))], ids=["matrix", "scalar", "none"]
)
def test_a_body_of_any_shape_is_split_as_its_bytes(body):
    parts = list(split_body(np.asarray(body).data, at_most=7))
    assert b"".join(parts) == body.tobytes()
    assert all(0 < len(p) <= 7 for p in parts)


# ---- binary v2 bodies


@pytest.mark.parametrize(
    "parameters",
    [
        ";json-header-size=12",
        "; json-header-size=12",
        " ;\tJSON-Header-Size=12 ",
        ';json-header-size="12"',
        ';json-header-size="1\\2"',
        ";json-header-size=0012",
        '; charset=utf-8 ; note="a;json-header-size=9" ;; json-header-size=12;',
    ],
)
def test_the_header_size_is_found_however_the_parameter_is_written(parameters):
    assert json_header_size(TRITON + parameters, 12) == 12
    assert json_header_size(TRITON.upper() + parameters) == 12


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "application/octet-stream;json-header-size=12",
        TRITON + "x;json-header-size=12",
        "x;" + TRITON,
    ],
)
def test_another_content_type_has_no_header_size(content_type):
    assert json_header_size(content_type, 0) is None


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ("", "needs one parameter json-header-size, there is none"),
        (";", "there is none"),
        (";charset=utf-8", "there is none"),
        (";json-header-size=1;json-header-size=1", "it is there twice"),
        (";json-header-size=12;json-header-size=13", "it is there twice"),
        (';json-header-size=""', "got ''"),
        (";json-header-size=-1", "got '-1'"),
        (";json-header-size=+1", r"got '\+1'"),
        (";json-header-size=1_0", "got '1_0'"),
        (";json-header-size=0x10", "got '0x10'"),
        (";json-header-size=106xyz", "got '106xyz'"),
        (';json-header-size=" 12"', "got ' 12'"),
        (';json-header-size="١"', "got '١'"),
        (";json-header-size=2147483648", "up to 2147483647, got '2147483648'"),
        (f";json-header-size={'1' * 1000}", f"got '{'1' * 64}'$"),
        (";json-header-size=", "must be application/.*json-header-size=N, got "),
        (";json-header-size = 12", "must be application/.*json-header-size=N, got "),
        (";json-header-size", "must be application/.*json-header-size=N, got "),
        (';json-header-size="12', "must be application/.*json-header-size=N, got "),
        (";json-header-size=12 13", "must be application/.*json-header-size=N, got "),
        (';json-header-size="12"3', "must be application/.*json-header-size=N, got "),
        (";json-header-size=12,json", "must be application/.*json-header-size=N, got "),
        (";json-header-size=13", "json-header-size is 13, but the body has 12 bytes"),
    ],
)
def test_a_header_size_that_cannot_be_is_refused_by_name(parameters, told):
    with pytest.raises(InvokeInputError, match=told) as caught:
        json_header_size(TRITON + parameters, 12)
    assert "json-header-size" in str(caught.value)


def test_the_header_size_may_be_all_of_the_body_and_2_gib_less_one_where_its_length_is_not_known():
    assert json_header_size(f"{TRITON};json-header-size=0", 0) == 0
    assert json_header_size(f"{TRITON};json-header-size=2147483647") == 2147483647


def test_the_answers_content_type_is_the_text_that_clients_cut_at():
    assert binary_json_content_type(166) == "application/vnd.sagemaker-triton.binary+json;json-header-size=166"


@given(st.integers(0, 2**31 - 1))
def test_a_formatted_content_type_is_read_back(size):
    assert json_header_size(binary_json_content_type(size), size) == size


@settings(max_examples=200)
@given(st.text(alphabet=';="\\ \tjson-headriz12é,', max_size=40))
def test_no_parameters_break_the_reader(parameters):
    try:
        size = json_header_size(f"{TRITON};{parameters}", 100)
    except InvokeInputError:
        pass
    else:
        assert 0 <= size <= 100


def test_hostile_parameters_are_read_in_linear_time():
    for tail in ('"' + "\\" * 20_000, ";" * 20_000 + "x", " " * 20_000 + "x", ";a=" + "b" * 20_000 + "("):
        with pytest.raises(InvokeInputError):
            json_header_size(f"{TRITON};json-header-size={tail}")


def test_the_operations_are_told_apart_by_their_published_names():
    assert [op.value for op in invoke.InvokeOperation] == ["InvokeEndpoint", "InvokeEndpointWithResponseStream"]
