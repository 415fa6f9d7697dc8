"""Errors of OpenAI's API: the object, and what each status is called."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.openai import OpenAIError


def test_an_error_is_an_object_with_its_four_members_in_one_named_error() -> None:
    # openai-python, types/shared/error_object.py: code, message, param, type; the client reads them from `error`.
    error = OpenAIError('top_p: expected a number, got the string "a"', param="top_p")
    assert error.status == 400
    assert error.body() == (
        b'{"error":{"message":"top_p: expected a number, got the string \\"a\\"","type":"invalid_request_error",'
        b'"param":"top_p","code":null}}'
    )


@pytest.mark.parametrize(
    ("status", "type", "code"),
    [
        (400, "invalid_request_error", None),
        (401, "authentication_error", "invalid_api_key"),
        (403, "permission_error", None),
        (404, "not_found_error", "model_not_found"),
        (405, "invalid_request_error", None),
        (408, "timeout_error", "timeout"),
        (409, "conflict_error", None),
        (413, "invalid_request_error", "request_too_large"),
        (422, "invalid_request_error", None),
        (424, "server_error", "model_error"),
        (429, "rate_limit_error", "overloaded"),
        (500, "server_error", None),
        (502, "server_error", None),
        (503, "server_error", "unavailable"),
        (504, "timeout_error", "timeout"),
        (507, "server_error", "insufficient_storage"),
    ],
)
def test_each_status_has_a_type_and_maybe_a_code(status: int, type: str, code: str | None) -> None:
    error = OpenAIError.of_status(status, "why", param="model")
    assert (error.status, error.type, error.code) == (status, type, code)
    assert json.loads(error.body()) == {"error": {"message": "why", "type": type, "param": "model", "code": code}}


@given(st.text(st.characters()))
def test_any_message_makes_an_object_in_utf_8(message: str) -> None:
    said = json.loads(OpenAIError(message).body().decode())["error"]["message"]
    assert said == message.encode("utf-16", "surrogatepass").decode("utf-16", "replace") or "\ufffd" in said
