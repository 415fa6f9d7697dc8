"""Heads and trailers of both roles: what a server reads and answers, and what a client makes of an answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.content_coding import Coding
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Head, Headers, Response
from protocols.grpc.heads import (
    AnswerHead,
    CallStatus,
    answer_head,
    call_head,
    read_answer,
    read_call,
    read_path,
    read_trailers,
    trailers,
    trailers_only,
    unknown_method,
)
from protocols.grpc.status import GRPCError, StatusCode

PATH = b"/inference.GRPCInferenceService/ModelInfer"
GRPC = (b"content-type", b"application/grpc")


def head(*fields: tuple[bytes, bytes], target: bytes = PATH, method: bytes = b"POST") -> Head:
    return Head(method=method, target=target, headers=fields, version=b"2")


def response(*fields: tuple[bytes, bytes], status: int = 200) -> Response:
    return Response(stream=1, status=status, headers=fields)


def refused(request: Head) -> GRPCError:
    with pytest.raises(GRPCError) as caught:
        read_call(request)
    return caught.value


# ---- a server reads


def test_the_head_of_a_call_is_read() -> None:
    call = read_call(
        head(
            (b"grpc-timeout", b"250m"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc+proto"),
            (b"grpc-encoding", b"gzip"),
            (b"grpc-accept-encoding", b"identity, deflate"),
            (b"grpc-accept-encoding", b"gzip"),
            (b"user-agent", b"grpc-python-asyncio/1.85.1"),
            (b"triton_grpc_error", b"true"),
            (b"trace-bin", b"YQ,Yg"),
        )
    )
    assert (call.service, call.method) == ("inference.GRPCInferenceService", "ModelInfer")
    assert (call.timeout, call.encoding, call.accepts) == (0.25, Coding.GZIP, set(Coding))
    assert call.metadata == (
        ("user-agent", "grpc-python-asyncio/1.85.1"),
        ("triton_grpc_error", "true"),
        ("trace-bin", b"a"),
        ("trace-bin", b"b"),
    )


@pytest.mark.parametrize("te", [(), ((b"te", b"gzip"),)])
def test_a_call_needs_no_more_than_its_content_type_and_te_is_not_looked_at(te: Headers) -> None:
    call = read_call(head(GRPC, *te))
    assert (call.timeout, call.encoding, call.accepts, call.metadata) == (None, None, frozenset(), ())


@pytest.mark.parametrize("kind", [b"application/json", b"application/grpc-web", b"application/grpcx", b""])
def test_another_content_type_is_http_415(kind: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="content-type: expected application/grpc, got ") as caught:
        read_call(head((b"content-type", kind)))
    assert caught.value.status == 415
    with pytest.raises(RemoteProtocolError) as caught:
        read_call(head())
    assert caught.value.status == 415


@pytest.mark.parametrize("method", [b"GET", b"PUT", b"post", b"CONNECT"])
def test_another_method_than_post_is_http_405(method: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="the method POST, got") as caught:
        read_call(head(GRPC, method=method))
    assert caught.value.status == 405


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        (b"/a/b", ("a", "b")),
        (b"/a.B/c%20d?x=1", ("a.B", "c%20d?x=1")),
        (b"/a/b/c", ("a/b", "c")),
        (b"//a/b", ("/a", "b")),
        (b"/\xff/\xfe", ("\xff", "\xfe")),
    ],
)
def test_a_path_is_a_service_and_a_method_as_sent(target: bytes, parts: tuple[str, str]) -> None:
    assert read_path(target) == parts


@pytest.mark.parametrize("target", [b"", b"*", b"/", b"/a", b"//", b"/a/", b"//b", b"x/a/b", b"/" + b"x" * 10_000])
def test_a_path_without_service_and_method_is_unimplemented_and_named(target: bytes) -> None:
    error = refused(head(GRPC, target=target))
    assert error.code is StatusCode.UNIMPLEMENTED
    assert error.message == f"there is no method {target[:100].decode()!r}"


def test_an_unknown_method_is_named_in_one_trailers_only_head() -> None:
    error = unknown_method(b"/inference.GRPCInferenceService/Nothing")
    assert dict(trailers_only(error.code, error.message)) == {
        b"content-type": b"application/grpc",
        b"grpc-accept-encoding": b"identity,deflate,gzip",
        b"grpc-status": b"12",
        b"grpc-message": b"there is no method '/inference.GRPCInferenceService/Nothing'",
    }


def test_an_unknown_encoding_is_unimplemented_and_the_answer_names_ours() -> None:
    error = refused(head(GRPC, (b"grpc-encoding", b"snappy")))
    assert error.code is StatusCode.UNIMPLEMENTED
    assert (b"grpc-accept-encoding", b"identity,deflate,gzip") in trailers_only(error.code, error.message)
    assert read_call(head(GRPC, (b"grpc-encoding", b"identity"))).encoding is None


def test_a_malformed_timeout_is_internal() -> None:
    error = refused(head(GRPC, (b"grpc-timeout", b"soon")))
    assert error.code is StatusCode.INTERNAL
    assert "grpc-timeout" in error.message
    assert "'soon'" in error.message


def test_a_timeout_of_0_is_not_none() -> None:
    assert read_call(head(GRPC, (b"grpc-timeout", b"0S"))).timeout == 0.0


def test_a_binary_value_that_is_no_base64_does_not_end_the_call() -> None:
    assert read_call(head(GRPC, (b"x-bin", b"!"), (b"y-bin", b"YQ"))).metadata == (("y-bin", b"a"),)


NAMES = st.sampled_from([
    b"content-type", b"grpc-timeout", b"grpc-encoding", b"grpc-accept-encoding", b"grpc-status", b"grpc-message", b"x-bin", b"te",
])  # fmt: skip
VALUES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"application/grpc", b"1S", b"gzip", b"identity,gzip", b"0", b"5", b"%41", b"YQ", b"trailers"]),
)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


@given(FIELDS, st.one_of(st.just(PATH), st.binary(max_size=20)))
@settings(max_examples=100)
def test_any_fields_are_a_call_or_one_of_the_refusals(fields: list[tuple[bytes, bytes]], target: bytes) -> None:
    try:
        assert read_call(head(*fields, target=target)).metadata is not None
    except GRPCError as e:
        outcome: object = e.code
    except RemoteProtocolError as e:
        outcome = e.status
    else:
        outcome = None
    assert outcome in (None, 415, StatusCode.UNIMPLEMENTED, StatusCode.INTERNAL)


# ---- a server answers


def test_an_answer_is_a_head_and_trailers_that_are_the_same_objects_in_the_plain_case() -> None:
    assert answer_head() == (GRPC, (b"grpc-accept-encoding", b"identity,deflate,gzip"))
    assert trailers() == ((b"grpc-status", b"0"),)
    assert answer_head() is answer_head()
    assert trailers() is trailers()


def test_an_answer_with_all_that_it_may_have() -> None:
    assert answer_head(Coding.DEFLATE, [("a", "b")])[1:] == (
        (b"grpc-accept-encoding", b"identity,deflate,gzip"),
        (b"grpc-encoding", b"deflate"),
        (b"a", b"b"),
    )
    assert answer_head(metadata=[("a", "b")])[2:] == ((b"a", b"b"),)
    assert trailers(StatusCode.NOT_FOUND, "no model 'ü'", [("a-bin", b"b")]) == (
        (b"grpc-status", b"5"),
        (b"grpc-message", b"no model '%C3%BC'"),
        (b"a-bin", b"Yg"),
    )
    assert trailers_only(StatusCode.UNAVAILABLE)[2:] == ((b"grpc-status", b"14"),)
    assert trailers_only(StatusCode.OK, metadata=[("a", "b")])[2:] == ((b"grpc-status", b"0"), (b"a", b"b"))


# ---- a client asks


def test_a_request_has_the_fields_of_a_call_in_the_order_of_the_protocol() -> None:
    request = call_head(
        "inference.GRPCInferenceService",
        "ModelInfer",
        authority=b"here:8001",
        scheme=b"https",
        timeout=2.5,
        encoding=Coding.GZIP,
        user_agent=b"everywire/1",
        metadata=[("a", "b")],
    )
    assert (request.method, request.target, request.authority, request.scheme) == (b"POST", PATH, b"here:8001", b"https")
    assert request.headers == (
        (b"grpc-timeout", b"2500m"),
        (b"te", b"trailers"),
        GRPC,
        (b"grpc-encoding", b"gzip"),
        (b"grpc-accept-encoding", b"identity,deflate,gzip"),
        (b"user-agent", b"everywire/1"),
        (b"a", b"b"),
    )
    call = read_call(request)
    assert (call.service, call.method, call.timeout) == ("inference.GRPCInferenceService", "ModelInfer", 2.5)
    assert call.metadata == (("user-agent", "everywire/1"), ("a", "b"))
    assert [name for name, _ in call_head("a", "b", authority=b"x").headers] == [
        b"te",
        b"content-type",
        b"grpc-accept-encoding",
    ]


@pytest.mark.parametrize(("service", "method"), [("", "b"), ("a", ""), ("a b", "c"), ("ä", "b"), ("a", "b\n"), ("a\0", "b")])
def test_a_name_that_no_path_can_hold_is_our_mistake(service: str, method: str) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be the path of a gRPC method"):
        call_head(service, method, authority=b"x")


# ---- a client reads


def test_what_a_server_answers_a_client_reads() -> None:
    answer = read_answer(response(*answer_head(Coding.GZIP, [("a", "b"), ("c-bin", b"d")])))
    assert answer == AnswerHead(encoding=Coding.GZIP, metadata=(("a", "b"), ("c-bin", b"d")))
    assert read_answer(response(*answer_head())) == AnswerHead()
    ended = read_trailers(trailers(StatusCode.NOT_FOUND, "no model ü", [("e", "f")]))
    assert ended == CallStatus(code=StatusCode.NOT_FOUND, message="no model ü", metadata=(("e", "f"),))
    with pytest.raises(GRPCError, match="no model ü") as caught:
        ended.check()
    assert caught.value.code is StatusCode.NOT_FOUND
    read_trailers(trailers()).check()


def test_a_trailers_only_answer_ends_the_call_whatever_its_http_status() -> None:
    fields = trailers_only(StatusCode.UNAVAILABLE, "draining", [("a", "b")])
    for status in (200, 503, 404):
        answer = read_answer(response(*fields, status=status))
        assert answer.status == CallStatus(code=StatusCode.UNAVAILABLE, message="draining", metadata=(("a", "b"),))


@pytest.mark.parametrize(
    ("status", "code"),
    [(404, StatusCode.UNIMPLEMENTED), (503, StatusCode.UNAVAILABLE), (415, StatusCode.UNKNOWN), (204, StatusCode.UNKNOWN)],
)
def test_an_http_status_other_than_200_is_mapped_and_told(status: int, code: StatusCode) -> None:
    for fields in ((), (GRPC,), ((b"content-type", b"text/html"),)):
        ended = read_answer(response(*fields, status=status)).status
        assert ended == CallStatus(code=code, message=f"the answer has the HTTP status {status}")


@pytest.mark.parametrize("fields", [(), ((b"content-type", b"text/html"),), ((b"content-type", b"application/grpc-web"),)])
def test_another_content_type_is_unknown_and_told(fields: Headers) -> None:
    ended = read_answer(response(*fields)).status
    assert ended is not None
    assert ended.code is StatusCode.UNKNOWN
    assert ended.message.startswith("content-type: expected application/grpc, got ")


def test_an_unknown_encoding_of_an_answer_is_internal() -> None:
    ended = read_answer(response(GRPC, (b"grpc-encoding", b"snappy"))).status
    assert ended is not None
    assert ended.code is StatusCode.INTERNAL
    assert "grpc-encoding" in ended.message
    assert "'snappy'" in ended.message


@pytest.mark.parametrize("fields", [(), ((b"grpc-message", b"x"),), ((b"a", b"b"),)])
def test_an_answer_without_a_status_was_cut_off(fields: Headers) -> None:
    assert read_trailers(fields) == CallStatus(code=StatusCode.UNKNOWN, message="the answer ended without grpc-status")


def test_of_two_fields_with_one_name_the_first_counts() -> None:
    twice = [(b"grpc-encoding", b"gzip"), (b"grpc-encoding", b"deflate")]
    assert read_answer(response(GRPC, *twice)).encoding is Coding.GZIP
    assert read_call(head(GRPC, *twice)).encoding is Coding.GZIP
    assert read_trailers([(b"grpc-status", b"5"), (b"grpc-status", b"0")]).code is StatusCode.NOT_FOUND


@given(FIELDS, st.integers(200, 599))
@settings(max_examples=100)
def test_any_fields_are_an_answer_and_trailers(fields: list[tuple[bytes, bytes]], status: int) -> None:
    answer = read_answer(response(*fields, status=status))
    assert answer.status is not None or status == 200
    read_trailers(fields)
