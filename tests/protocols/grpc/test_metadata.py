"""Timeouts, content types and custom metadata, both ways."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import LocalProtocolError
from protocols.grpc.metadata import (
    MAX_TIMEOUT,
    Metadata,
    decode_metadata,
    encode_metadata,
    encode_timeout,
    is_grpc,
    parse_timeout,
)
from protocols.grpc.status import GRPCError, StatusCode

# ---- content type


@pytest.mark.parametrize(
    ("value", "grpc"),
    [
        (b"application/grpc", True),
        (b"application/grpc+proto", True),
        (b"application/grpc+", True),
        (b"application/grpc;charset=utf-8", True),
        (b"Application/GRPC+Proto", True),
        (b"", False),
        (b"application/grp", False),
        (b"application/grpc-web", False),
        (b"application/grpc-web+proto", False),
        (b"application/grpcx", False),
        (b"application/grpc x", False),
        (b"application/json", False),
        (b" application/grpc", False),
    ],
)
def test_the_content_type_of_grpc_ends_or_goes_on_with_plus_or_semicolon(value: bytes, grpc: bool) -> None:
    assert is_grpc(value) is grpc


# ---- timeout


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1H", 3600.0),
        (b"2M", 120.0),
        (b"3S", 3.0),
        (b"4m", 0.004),
        (b"5u", 0.000005),
        (b"6n", 0.000000006),
        (b"100m", 0.1),
        (b"00000001S", 1.0),
        (b"99999999H", MAX_TIMEOUT),
        (b"0S", 0.0),
        (b"0n", 0.0),
    ],
)
def test_a_timeout_is_digits_and_a_unit(value: bytes, seconds: float) -> None:
    assert parse_timeout(value) == seconds


@pytest.mark.parametrize(
    "value",
    [b"", b"5", b"S", b"5s", b"5h", b"-1S", b"+1S", b"1.5S", b" 1S", b"1 S", b"1S ", b"1S\n", b"123456789n", b"1SS", b"\xff", b"9" * 5000],
)  # fmt: skip
def test_a_malformed_timeout_is_internal_with_the_field_and_what_came(value: bytes) -> None:
    with pytest.raises(GRPCError) as caught:
        parse_timeout(value)
    assert caught.value.code is StatusCode.INTERNAL
    assert caught.value.message == (
        f"grpc-timeout: expected 1 to 8 digits and one of H, M, S, m, u, n, got {value[:40].decode('latin-1')!r}"
    )


@pytest.mark.parametrize(
    ("seconds", "value"),
    [
        (5, b"5S"),
        (60, b"1M"),
        (7200, b"2H"),
        (0.1, b"100m"),
        (0.067, b"67m"),  # 67000000.00000001 ns
        (1.1, b"1100m"),
        (0.25, b"250m"),
        (0.000_001_5, b"1500n"),
        (0.123_456_789, b"123457u"),  # 9 digits of nanoseconds do not fit: rounded up
        (1e-9, b"1n"),
        (1.01e-9, b"2n"),
        (1e-12, b"1n"),
        (1e-300, b"1n"),
        (0, b"1n"),
        (-5, b"1n"),
        (MAX_TIMEOUT, b"99999999H"),
        (MAX_TIMEOUT - 1, b"99999999H"),
        (1e300, b"99999999H"),
        (float("inf"), b"99999999H"),
    ],
)
def test_a_timeout_is_written_short(seconds: float, value: bytes) -> None:
    assert encode_timeout(seconds) == value


@given(st.floats(-9, 11.5).map(lambda exponent: 10**exponent))
@settings(max_examples=100)
def test_a_timeout_comes_back_and_is_never_shorter(seconds: float) -> None:
    value = encode_timeout(seconds)
    assert len(value) <= 9
    # A unit is used only from 100,000 of it on, where the next finer unit needs a ninth digit.
    # Differences below a thousandth of a nanosecond are rounding errors of floats.
    assert seconds * (1 - 1e-12) - 1e-12 <= parse_timeout(value) <= seconds * (1 + 1e-5) + 1e-9


# ---- metadata


def test_what_the_protocol_and_http_give_a_meaning_is_no_metadata() -> None:
    fields = [
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
        (b"content-length", b"5"),
        (b"host", b"here"),
        (b"grpc-timeout", b"1S"),
        (b"grpc-encoding", b"gzip"),
        (b"grpc-accept-encoding", b"gzip"),
        (b"grpc-message-type", b"x"),
        (b"grpc-status", b"0"),
        (b"grpc-message", b"x"),
        (b"user-agent", b"grpc-python/1.85"),
        (b"triton_grpc_error", b"true"),
        (b"grpc-previous-rpc-attempts", b"2"),
        (b"a", b"1"),
        (b"a", b""),
    ]
    assert decode_metadata(fields) == (
        ("user-agent", "grpc-python/1.85"),
        ("triton_grpc_error", "true"),
        ("grpc-previous-rpc-attempts", "2"),
        ("a", "1"),
        ("a", ""),
    )


def test_white_space_at_the_ends_of_a_text_is_no_part_of_it() -> None:
    assert decode_metadata([(b"a", b" \t\v x \f")]) == (("a", "x"),)


@pytest.mark.parametrize(
    ("value", "values"),
    [
        (b"", [b""]),
        (b"YQ==", [b"a"]),
        (b"YQ", [b"a"]),
        (b"YWI=", [b"ab"]),
        (b"YWJj", [b"abc"]),
        (b"YQ,YWI=, YWJj", [b"a", b"ab", b"abc"]),
        (b"YQ==,,YQ", [b"a", b"", b"a"]),
        (b"/+/+", [b"\xff\xef\xfe"]),
        (b"Y", []),
        (b"YQ=", [b"a"]),
        (b"YQ===", []),
        (b"YQ==YQ==", []),
        (b"=YQ=", []),
        (b"not base64!", []),
        (b"_-_-", []),
        (b"\xff", []),
        (b"Y,YQ", [b"a"]),
    ],
)
def test_a_binary_value_is_base64_padded_or_not_and_what_is_not_is_left_out(value: bytes, values: list[bytes]) -> None:
    assert decode_metadata([(b"x-bin", value)]) == tuple(("x-bin", one) for one in values)


def test_metadata_is_written_with_base64_that_is_not_padded() -> None:
    metadata = [("a", "text"), ("b-bin", b"a"), ("b-bin", b""), ("a", "")]
    assert encode_metadata(metadata) == ((b"a", b"text"), (b"b-bin", b"YQ"), (b"b-bin", b""), (b"a", b""))


NAMES = st.text("abcxyz019-_.", min_size=1, max_size=12)
METADATA = st.lists(
    st.one_of(
        st.tuples(
            NAMES.filter(lambda name: not name.endswith("-bin")),
            st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=20).map(
                lambda text: text.strip(" \t")
            ),
        ),
        st.tuples(NAMES.map(lambda name: name + "-bin"), st.binary(max_size=20)),
    ),
    max_size=6,
)


@given(METADATA)
@settings(max_examples=100)
def test_metadata_comes_back(metadata: Metadata) -> None:
    assert decode_metadata(encode_metadata(metadata)) == tuple(metadata)


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b-bin", b"!x"]), st.binary(max_size=20)), max_size=4))
@settings(max_examples=100)
def test_any_field_value_is_read_and_what_is_read_can_be_sent_back(fields: list[tuple[bytes, bytes]]) -> None:
    sound = [(name, value.translate(None, b"\0\r\n")) for name, value in fields]
    received = decode_metadata(sound)
    assert decode_metadata(encode_metadata(received)) == received
    decode_metadata(fields)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("", "x", "'' is no lower-case field name"),
        ("A", "x", "'A' is no lower-case field name"),
        (":path", "x", "is no lower-case field name"),
        ("a b", "x", "is no lower-case field name"),
        ("für", "x", "is no lower-case field name"),
        ("a\n", "x", "is no lower-case field name"),
        ("grpc-status", "0", "grpc-status has a meaning in gRPC or HTTP"),
        ("content-length", "0", "has a meaning"),
        ("te", "trailers", "has a meaning"),
        ("a-bin", "text", "metadata a-bin: expected bytes, got str"),
        ("a", b"bytes", "metadata a: expected str, got bytes"),
        ("a", "line\nbreak", "cannot be a field value"),
        ("a", "\0", "cannot be a field value"),
        ("a", " x", "cannot be a field value"),
        ("a", "x\t", "cannot be a field value"),
        ("a", "\u20ac", "cannot be a field value"),
    ],
)
def test_metadata_that_no_field_can_carry_is_our_mistake(name: str, value: str | bytes, complaint: str) -> None:
    with pytest.raises(LocalProtocolError, match=complaint):
        encode_metadata([("fine", "x"), (name, value)])
