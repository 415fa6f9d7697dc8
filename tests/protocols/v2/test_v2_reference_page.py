"""Runs the program of docs/reference/v2.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from protocols.v2 import ModelSignature, V2Error
from tests.protocols.v2.grammar.v2_outcome import parse_both_ways

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "v2.md"


@pytest.fixture
def page() -> dict[str, Any]:
    program: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(block, program)
    return program


def test_the_server_and_the_client_of_the_page_understand_each_other(page: dict[str, Any]) -> None:
    assert page["status"] == 200
    assert page["reply"].model_name == "double"


def test_the_server_of_the_page_answers_a_bad_request_with_its_reason(page: dict[str, Any]) -> None:
    status, _, buffers = page["answer"]([], b'{"inputs": []}')
    assert (status, buffers) == (400, [b"{\"error\":\"missing input 'x': model 'double' takes 'x'\"}"])


def test_the_error_that_the_page_quotes_is_the_one_there_is() -> None:
    head = b'{"inputs":[{"name":"a","datatype":"FP16","shape":[2,2],"parameters":{"binary_data_size":16}}]}'
    with pytest.raises(V2Error) as caught:
        parse_both_ways(head + bytes(16), len(head), ModelSignature(name="m"))
    assert f"`{caught.value.message}`" in " ".join(PAGE.read_text().split())
