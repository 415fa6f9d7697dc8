"""A long JSON text is read in pieces as a short one is at once; and what it may have, and what that costs, is counted first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocols.json import strict
from protocols.json import text as json_text
from protocols.json.strict import JSONError, loads
from protocols.json.text import census_of, close_census_of, find, has_long_number, has_run, inside_strings
from tests.protocols.json.test_strict_json import EDITS, JSON_VALUES, edited, refusal


@contextmanager
def in_pieces(size: int, marks: int = 3) -> Iterator[None]:
    """Texts are read in pieces of so few bytes, and of so few brackets and commas."""
    with (
        mock.patch.multiple(strict, _SHORT=-1, _ALWAYS_AT_ONCE=-1, _AT_ONCE=size, _MARKS_AT_ONCE=marks, STEP=size),
        mock.patch.object(json_text, "STEP", size + 1),
    ):
        yield


def outcome(text: bytes, **options: Any) -> tuple[bool, str]:
    try:
        return True, repr(loads(text, **options))
    except JSONError as error:
        return False, error.message


@settings(max_examples=150, deadline=None)
@given(JSON_VALUES, EDITS, st.booleans(), st.booleans(), st.booleans(), st.integers(1, 9))
@example({"a": [1, 2, 3, 4, 5], "b": {"a": [[], [], [], []]}}, [], True, False, False, 4)
def test_pieces_make_the_value_that_the_whole_is(
    value: Any, edits: list[tuple[str, int, bytes]], ascii_only: bool, nonfinite: bool, duplicates: bool, size: int
) -> None:
    text = edited(json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass"), edits)
    options = {"depth": 8, "allow_nonfinite": nonfinite, "duplicates": duplicates}
    good, said = outcome(text, **options)
    with in_pieces(size):
        read, found = outcome(text, **options)
    assert read is good, (text, said, found)
    assert not good or found == said


@pytest.mark.parametrize(
    "text",
    [
        b'[1,2,3,4,5,6,,7]', b'{"a":[1,2,3,4,5] "b"}', b'[{"a":1 "b":2},1,2,3]', b"[[1],[2,3,4]]   y", b'{"a":[1]}]', b"[1,2,3,{]",
        b'{"aaaaaaaaaaaa":-[1,2,3,4,5]}', b"[1,2,3,4,01,5,6]", b'["\xff",1,2,3,4,5]', b"[0,1,2,3,[4,5,6,7", b'{"a":1,"b":[2,3,4,5},"c":6}',
    ],
)  # fmt: skip
def test_a_mistake_is_told_where_it_is_in_the_whole(text: bytes) -> None:
    said = refusal(text)
    with in_pieces(4):
        assert refusal(text) == said


@pytest.mark.parametrize(
    "text", [b'{"k":1,"b":2,"c":3,"d":4,"k":5}', b'[[1,2,3],{"k":[1,2,3,4],"k":[1,2,3,4]}]', b'[1,2,3,4,{"k":1,"k":2}]']
)
def test_a_key_that_is_there_twice_is_found_in_any_two_pieces(text: bytes) -> None:
    with in_pieces(4):
        assert refusal(text, duplicates=False) == "body has an object with two members 'k'"
        assert "is not JSON" in refusal(text[:-1] + b",]", duplicates=False)  # which is said of what is JSON
        assert loads(text) == json.loads(text)


def test_a_hook_sees_the_floats_of_all_pieces() -> None:
    with in_pieces(4):
        assert loads(b'[1.5,2,[3.25,4,5,6],"7.5"]', float_hook=str) == ["1.5", 2, ["3.25", 4, 5, 6], "7.5"]


def test_no_decoder_sees_more_than_some_milliseconds_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    real = orjson.loads

    def watched(text: bytes) -> Any:
        seen.append((len(text), census_of(text).values))
        return real(text)

    monkeypatch.setattr(strict.orjson, "loads", watched)
    rows = b",".join([b'{"a":["b",1.5]}'] * 30_000)
    read = loads(b'{"rows":[%b],"text":"%b"}' % (rows, b"x" * 3_000_000), duplicates=False)
    assert read["rows"] == [{"a": ["b", 1.5]}] * 30_000
    assert len(read["text"]) == 3_000_000
    assert max(values for _, values in seen) <= strict._MARKS_AT_ONCE
    assert max(size for size, values in seen if values > 1) <= 2 * json_text.STEP
    assert len(seen) > 2


# -- limits of a text


@pytest.mark.parametrize("text", [b"[" + b",".join([b"[]"] * 99) + b"]", b"[" + b",".join([b'{"a":{}}'] * 49) + b", {}]"])
def test_arrays_and_objects_are_counted_to_the_exact_limit(text: bytes) -> None:
    assert loads(text, containers=100) == json.loads(text)
    for more in (text.replace(b"[", b"[[],", 1), b'{"ignored":%b}' % text):
        assert refusal(more, containers=100) == "body has more than 100 arrays and objects (limits.json_containers)"


@pytest.mark.parametrize("value", [b"1", b'"a,[{"', b"null", b"[]", b'"\\",[\\\\"'])
def test_values_are_counted_to_the_exact_limit(value: bytes) -> None:
    text = b"[" + b",".join([value] * 50) + b"]"  # 49 commas, 1 bracket and those of the values
    values = 50 + 50 * (value == b"[]")
    assert loads(text, values=values) == json.loads(text)
    assert refusal(text, values=values - 1) == f"body has more than {values - 1} values (limits.json_values)"


def test_what_is_in_strings_counts_for_nothing() -> None:
    text = json.dumps(["[{," * 500, '"' * 50, "\\" * 51]).encode()
    assert census_of(text).values > 1000
    assert close_census_of(text) == json_text.Census(arrays=1, commas=2)
    assert loads(text, containers=1, values=3) == json.loads(text)


@pytest.mark.parametrize("text", [b"[" * 70 + b"]" * 70, b"[[[[],[],[],[]]]]"])
def test_a_text_that_is_deep_and_not_dense_is_called_deep(text: bytes) -> None:
    assert refusal(text, depth=3) == "body is nested deeper than 3 arrays and objects"


# -- looking through it in steps


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([b'"', b"\\", b"[", b",", b"a"]), max_size=40).map(b"".join), st.integers(1, 9))
def test_strings_are_told_alike_in_steps_of_any_size(text: bytes, size: int) -> None:
    inside, escaped, expected = False, False, []
    for byte in text:  # a backslash escapes wherever it stands, as it does in strings
        quote = byte == ord('"') and not escaped
        inside ^= quote
        expected.append(inside)
        escaped = byte == ord("\\") and not escaped
    with mock.patch.object(json_text, "STEP", size):
        assert inside_strings(text).tolist() == expected


class Counted(bytes):
    """A text that knows how many of its bytes were copied out of it."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.copied += len(found)
        return found


def test_all_places_of_a_text_are_found_in_one_pass() -> None:
    text, at, places = Counted(b'"data",' * 20_000), 0, 0
    while (at := find(text, b'"data"', at) + 1) > 0:
        places += 1
    assert places == 20_000
    assert text.copied < 300 * places  # a whole step each would be 70,000


@pytest.mark.parametrize("size", [3, 400, 401, 1000])
@pytest.mark.parametrize("place", [0, 1, 399, 400, 401, 777])
def test_what_lies_across_two_steps_is_found(size: int, place: int) -> None:
    number, text = b"1" * 401, bytearray(b" " * 2000)
    text[place : place + len(number)] = number
    with mock.patch.object(json_text, "STEP", size):
        assert find(bytes(text), b"1 ") == place + 400
        assert find(bytes(text), b"2") == -1
        assert has_run(bytes(text), 401, digits=True)
        assert not has_run(bytes(text), 402, digits=False)
        assert has_long_number(bytes(text))
        text[place + 200] = ord(",")
        assert not has_long_number(bytes(text))
