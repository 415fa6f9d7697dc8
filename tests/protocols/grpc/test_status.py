"""Status codes, `grpc-message` both ways, and the tables of clients."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.grpc.status import (
    MAX_MESSAGE,
    GRPCError,
    StatusCode,
    code_of_http_status,
    code_of_reset,
    decode_text,
    encode_text,
    parse_code,
)


def test_the_codes_are_the_seventeen_of_statuscodes() -> None:
    assert [code.name for code in StatusCode] == [
        "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
        "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
        "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
    ]  # fmt: skip
    assert [int(code) for code in StatusCode] == list(range(17))


def test_an_error_can_be_raised_again() -> None:
    error = GRPCError(StatusCode.NOT_FOUND, "no model")
    again = error.again()
    assert again is not error
    assert (again.code, again.message, str(again)) == (StatusCode.NOT_FOUND, "no model", "no model")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", b""),
        ("plain text, \"quoted\" ~!", b"plain text, \"quoted\" ~!"),
        ("100 %", b"100 %25"),
        ("a\nb\r\0\x7f\t", b"a%0Ab%0D%00%7F%09"),
        ("für", b"f%C3%BCr"),
        ("\U0001f600", b"%F0%9F%98%80"),
        ("  two  spaces ", b"%20%20two  spaces%20"),  # RFC 9113 section 8.2.1: no space at an end of a value
        ("   ", b"%20%20%20"),
    ],
)  # fmt: skip
def test_a_message_is_utf8_and_percent_encoded(text: str, value: bytes) -> None:
    assert encode_text(text) == value
    assert decode_text(value) == text


def test_a_lone_surrogate_does_not_break_a_message() -> None:
    assert encode_text("a\udcffb") == b"a?b"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"%c3%bc", "ü"),
        (b"%", "%"),
        (b"100%", "100%"),
        (b"%4", "%4"),
        (b"%zz%41", "%zzA"),
        (b"%%41", "%A"),
        (b"%FF%41", "\ufffdA"),
        (b"%E2%82", "\ufffd"),
        (b"\xc3\xbc", "ü"),  # bytes that should have been encoded
        (b"\xff", "\ufffd"),
    ],
)
def test_an_invalid_message_is_decoded_as_far_as_it_goes(value: bytes, text: str) -> None:
    assert decode_text(value) == text


@given(st.text(max_size=50))
@settings(max_examples=100)
def test_a_message_comes_back_and_is_a_field_value_on_its_way(text: str) -> None:
    value = encode_text(text)
    assert all(0x20 <= byte <= 0x7E for byte in value)
    assert value == value.strip()
    assert decode_text(value) == text.encode("utf-8", "replace").decode()


@given(st.binary(max_size=50))
@settings(max_examples=50)
def test_any_bytes_are_a_message(value: bytes) -> None:
    decode_text(value)


@pytest.mark.parametrize("character", ["a", "%", "ü", "€", "\U0001f600", " ", "a "])
@pytest.mark.parametrize("shift", range(12))
def test_a_long_message_is_cut_after_a_whole_character(character: str, shift: int) -> None:
    text = "x" * shift + character * 5000
    value = encode_text(text)
    assert MAX_MESSAGE - 16 <= len(value) <= MAX_MESSAGE or character == " "
    kept = decode_text(value).removesuffix("...")
    assert decode_text(value).endswith("...")
    assert text.startswith(kept)


def test_the_longest_message_is_not_cut() -> None:
    assert encode_text("x" * MAX_MESSAGE) == b"x" * MAX_MESSAGE
    assert encode_text("x" * (MAX_MESSAGE + 1)) == b"x" * (MAX_MESSAGE - 3) + b"..."


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"0", StatusCode.OK),
        (b"16", StatusCode.UNAUTHENTICATED),
        (b"05", StatusCode.NOT_FOUND),
        (b"17", StatusCode.UNKNOWN),
        (b"", StatusCode.UNKNOWN),
        (b"-1", StatusCode.UNKNOWN),
        (b"5 ", StatusCode.UNKNOWN),
        (b"NOT_FOUND", StatusCode.UNKNOWN),
        (b"9" * 10_000, StatusCode.UNKNOWN),
    ],
)
def test_a_status_without_a_name_is_unknown(value: bytes, code: StatusCode) -> None:
    assert parse_code(value) is code


HTTP = {
    400: "INTERNAL", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "UNIMPLEMENTED", 429: "UNAVAILABLE",
    431: "INTERNAL", 502: "UNAVAILABLE", 503: "UNAVAILABLE", 504: "UNAVAILABLE",
}  # fmt: skip


def test_each_http_status_has_the_code_of_the_table_and_others_are_unknown() -> None:
    assert {status: code_of_http_status(status).name for status in HTTP} == HTTP
    assert {code_of_http_status(status) for status in range(100, 600) if status not in HTTP} == {StatusCode.UNKNOWN}


def test_each_reset_has_the_code_of_the_table_and_others_are_unknown() -> None:
    names = [code_of_reset(code).name for code in range(14)]
    assert names == [*["INTERNAL"] * 5, "UNKNOWN", "INTERNAL", "UNAVAILABLE", "CANCELLED", "INTERNAL", "INTERNAL",
                     "RESOURCE_EXHAUSTED", "PERMISSION_DENIED", "UNKNOWN"]  # fmt: skip
