"""JSON from strangers: what is read, what is refused, and that the fast reader agrees with a slow and plain one."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocols.json.strict import JSONError, is_plain, loads


def refusal(text: bytes, **options: Any) -> str:
    with pytest.raises(JSONError) as caught:
        loads(text, **options)
    assert str(caught.value) == caught.value.message
    return caught.value.message


def test_every_kind_of_buffer_reads_alike() -> None:
    text = b'{"a": [1, 2.5, true, null, "\xc3\xa9"]}'
    expected = {"a": [1, 2.5, True, None, "é"]}
    assert loads(text) == loads(bytearray(text)) == loads(memoryview(text)) == expected
    assert loads(memoryview(b"xx" + text)[2:]) == expected


def test_a_byte_order_mark_is_skipped_once() -> None:
    assert loads(b"\xef\xbb\xbf[1]") == [1]
    refusal(b"\xef\xbb\xbf\xef\xbb\xbf[1]")


@pytest.mark.parametrize("text", [b"", b"  \n", b"\xef\xbb\xbf"])
def test_an_empty_text_is_called_empty(text: bytes) -> None:
    assert refusal(text, what="the head") == "the head is empty where JSON was expected"


@pytest.mark.parametrize(
    "text",
    [b"{", b'{"a":1,}', b"[1,]", b"01", b"1.", b".5", b"+1", b"tru", b"{} x", b"[1]\x00", b"{1:2}", b"'a'", b'"a\nb"', b'"\\x"', b"/**/1"],
)  # fmt: skip
def test_what_is_not_json_is_refused(text: bytes) -> None:
    assert refusal(text, what="the head").startswith("the head is not JSON: ")


@pytest.mark.parametrize(
    "text", [b'"\xff"', b'"\xed\xa0\x80"', b'{"\xc0\x80":1}', b'"\xf4\x90\x80\x80"', '"é"'.encode("latin-1")]
)
def test_text_that_is_not_utf_8_is_refused(text: bytes) -> None:
    assert refusal(text) == "body is not UTF-8"


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-32-be"])
def test_no_other_encoding_is_guessed(codec: str) -> None:
    refusal('{"a": 1}'.encode(codec))


@pytest.mark.parametrize("text", [rb'"\ud800"', rb'"\udc00"', rb'"\ud800\u0041"', rb'{"\udfff": 1}', rb'["\ud800", NaN]'])
def test_a_surrogate_without_its_pair_is_refused(text: bytes) -> None:
    refusal(text, allow_nonfinite=True)
    assert loads(rb'"\ud83d\ude00"') == "😀"


@pytest.mark.parametrize("number", [2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**399, 9007199254740993])
def test_integers_are_exact_whatever_their_size(number: int) -> None:
    assert loads(b"%d" % number) == number


@pytest.mark.parametrize(
    "text", [b"1e400", b"-1e400", b"1.7976931348623159e308", b"1" * 310 + b".0", b"[1e99999999999999999999]"]
)
def test_a_number_beyond_the_doubles_is_refused(text: bytes) -> None:
    refusal(text)
    refusal(b"[NaN," + text + b"]", allow_nonfinite=True)


@pytest.mark.parametrize("pattern", [b"%s", b"[1, 2, %s]", b'{"a":"x","b":%s}', b" " * 17 + b"[%s]", b"[%s, NaN]"])
def test_a_number_has_at_most_400_characters(pattern: bytes) -> None:
    for number in (b"1" * 400, b"-" + b"1" * 399, b"0." + b"3" * 398, b"1." + b"0" * 394 + b"e+10"):
        loads(pattern.replace(b"%s", number), allow_nonfinite=True)
        longer = number.replace(b"e", b"0e") if b"e" in number else number + b"0"
        message = refusal(pattern.replace(b"%s", longer), allow_nonfinite=True)
        assert message == "body holds a number of more than 400 characters"


@pytest.mark.parametrize("shift", range(7))
def test_a_long_number_is_found_wherever_it_begins(shift: int) -> None:
    refusal(b" " * shift + b"1" * 401)


@pytest.mark.parametrize("place", [0, 199, 200, 20_000, 39_999])
@pytest.mark.parametrize("separator", [b",", b" , ", b",\n" + b" " * 30])
def test_a_long_number_is_found_in_a_large_text(place: int, separator: bytes) -> None:
    numbers = [b"1.25"] * 40_000
    assert loads(b"[" + separator.join(numbers) + b"]") == [1.25] * 40_000
    for size in (400, 401):
        numbers[place] = b"7." + b"0" * (size - 2)
        text = b"[" + separator.join(numbers) + b"]"
        if size == 400:
            assert loads(text)[place] == 7
        else:
            assert "more than 400 characters" in refusal(text)


def test_a_large_text_without_commas_is_looked_at_more_closely() -> None:
    assert loads(b'["' + b"1" * 100_000 + b'"]') == ["1" * 100_000]
    assert loads(b"[" + b" " * 100_000 + b"1]") == [1]


@pytest.mark.parametrize("keys", [(b"a", b"b"), (b"a", b"a")])
def test_equal_keys_are_found_in_a_large_text(keys: tuple[bytes, bytes]) -> None:
    text = b'{"data": [%b], "%b": 1, "%b": 2}' % (b", ".join([b"1.5"] * 40_000), *keys)
    if keys[0] == keys[1]:
        assert "two members 'a'" in refusal(text, duplicates=False)
    else:
        assert len(loads(text, duplicates=False)) == 3


def test_a_large_text_nested_too_deep_is_refused() -> None:
    flat = b", ".join([b"[1]"] * 10_000)
    assert len(loads(nested(1, flat), depth=2)) == 10_000
    refusal(nested(2, flat), depth=2)


@pytest.mark.parametrize(
    ("text", "members", "plain"),
    [
        (b'{"a": 1, "b": {"c": 2}}', 3, True), (b'{"a": 1, "a": 1}', 1, False), (b'{"a": "x:y"}', 1, True), (b'{"a": ":"}', 1, False),
        (b'{"a": ":", "b" :1}', 2, False), (rb'{"a": "\":", "a":1}', 1, False), (b'{"a":' + b" " * 500 + b"1}", 1, True),
        (b'{"a":' + b"1" * 401 + b"}", 1, False), (b'{"a":[' + b"1," * 9000 + b"1]}", 1, True),
    ],
)  # fmt: skip
def test_a_text_is_plain_only_where_that_is_certain(text: bytes, members: int, plain: bool) -> None:
    assert is_plain(text, members) is plain


def test_a_long_run_of_digits_in_a_string_is_no_number() -> None:
    assert loads(b'["\\"' + b"1" * 5000 + b'"]') == ['"' + "1" * 5000]


def nested(depth: int, inner: bytes = b"") -> bytes:
    return b"[" * depth + inner + b"]" * depth


def test_depth_is_counted_to_the_exact_limit() -> None:
    assert loads(nested(64)) is not None
    assert refusal(nested(65)) == "body is nested deeper than 64 arrays and objects"
    assert loads(b'{"a":' * 3 + b"1" + b"}" * 3, depth=3) == {"a": {"a": {"a": 1}}}
    refusal(b'{"a":' * 4 + b"1" + b"}" * 4, depth=3)
    refusal(b'[{"a":' * 2 + b"1" + b"}]" * 2, depth=3)


def test_many_flat_brackets_are_not_deep() -> None:
    assert loads(b"[" + b",".join([b"[]"] * 1000) + b"]", depth=2) == [[]] * 1000
    assert loads(b"[" + b",".join([b'{"a":[1]}'] * 100) + b"]", depth=3) == [{"a": [1]}] * 100


def test_depth_is_carried_past_any_number_of_brackets() -> None:
    flat = b",".join([b"[]"] * 70_000)
    assert loads(nested(3, flat), depth=4) is not None
    refusal(nested(4, flat), depth=4)
    refusal(nested(3, flat + b",[[]]"), depth=4)


def test_brackets_in_strings_do_not_count_either_way() -> None:
    opening = rb'"[[[[[[[[[[\"{{{{\\"'
    assert loads(nested(5, opening), depth=5) == [[[[[json.loads(opening)]]]]]
    hiding = b'["]", ' * 6 + b"1" + b"]" * 6
    refusal(hiding, depth=5)
    refusal(hiding.replace(b'"]"', rb'"\\", "]\"", "]"'), depth=5)


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 100_000, nested(100_000), b"]" * 100_000, b"[]" * 100_000, b'["' * 1001]
)
def test_a_bracket_bomb_is_refused_before_it_can_recurse(text: bytes) -> None:
    refusal(text)
    refusal(text, allow_nonfinite=True, duplicates=False)


def test_a_depth_beyond_what_the_interpreter_bears_is_refused_too() -> None:
    assert refusal(nested(50_000), depth=100_000) == "body is nested too deep to be read"


def test_nonfinite_literals_need_permission() -> None:
    text = b'{"x": [NaN, Infinity, -Infinity, 1, "NaN", "-Infinity \\" NaN"]}'
    refusal(text)
    values = loads(text, allow_nonfinite=True)["x"]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1, "NaN", '-Infinity " NaN']


@pytest.mark.parametrize(
    "text",
    [b"-NaN", b"+Infinity", b"nan", b"--Infinity", b"[NaN", b"NaN1", b"1NaN", b"{NaN:1}", b"InfNaNinity", b"[NaN,]", b'["NaN]', b'[NaN,"\xff"]'],
)  # fmt: skip
def test_permission_for_nonfinite_literals_allows_nothing_else(text: bytes) -> None:
    refusal(text, allow_nonfinite=True)


def test_the_last_of_equal_keys_wins_unless_they_are_refused() -> None:
    text = b'{"a": {"b": 1, "b": 2}}'
    assert loads(text) == {"a": {"b": 2}}
    assert refusal(text, duplicates=False) == "body has an object with two members 'b'"


@pytest.mark.parametrize(
    "text",
    [
        rb'{"a": 1, "\u0061": 2}',
        b'{"a": ":", "b" :1, "b"\n:2}',
        b'{"urn:x": "y:z", "urn:x":"y:z"}',
        b'[1, [2, [{"k": [], "k": []}]]]',
        b'{"x": "colons: : : {", "y": 1, "y": 2}',
        b'{"x": [1, 2, 3, {"y": 1, "y": 1}], "z": {}}',
        b'{"n": NaN, "n": NaN}',
        b'{"first": {"k": 1}, "a": 1, "a": 2}',
    ],
)
def test_equal_keys_are_found_however_they_hide(text: bytes) -> None:
    assert "two members" in refusal(text, duplicates=False, allow_nonfinite=True)


def test_a_long_duplicate_key_is_echoed_shortened() -> None:
    for letter in (b"k", "\U000e0001".encode()):
        key = b'"' + letter * 10_000 + b'"'
        assert len(refusal(b"{" + key + b":1," + key + b":2}", duplicates=False)) < 200


def test_equal_keys_of_different_objects_are_fine() -> None:
    for text in (
        b'[{"a": 1}, {"a": {"a": ":", ":": "a"}}]',
        b'{"id": "urn:x", "a" : {"a" :1}}',
        rb'{"a": "\":\\", "b": " :"}',
    ):
        assert loads(text, duplicates=False) == json.loads(text)


def reference(text: bytes, *, depth: int, allow_nonfinite: bool, duplicates: bool) -> Any:
    """The same rules written without any care for speed; ValueError for a refusal."""

    def number(literal: str) -> Any:
        if len(literal) > 400:
            raise ValueError(literal)
        return int(literal) if re.fullmatch(r"-?\d+", literal) else finite(float(literal))

    def finite(value: float) -> float:
        if math.isinf(value):
            raise ValueError(value)
        return value

    def constant(literal: str) -> float:
        if not allow_nonfinite:
            raise ValueError(literal)
        return float(literal)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if not duplicates and len(dict(items)) < len(items):
            raise ValueError(items)
        return dict(items)

    decoded = text.removeprefix(b"\xef\xbb\xbf").decode()
    value = json.loads(decoded, parse_int=number, parse_float=number, parse_constant=constant, object_pairs_hook=pairs)
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate ends here
    if depth_of(decoded) > depth:
        raise ValueError("deep")
    return value


def depth_of(text: str) -> int:
    depth = deepest = 0
    for bracket in re.findall(r"[][{}]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.sampled_from('a:{}[]",\\éN\x00\ud83d'), max_size=6) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b", "a:", "{", "NaN"]), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "repeat"]),
        st.integers(0, 200),
        st.sampled_from([
            b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u", b"\\ud800", b"-", b"1", b"1e999", b"e", b".", b"NaN", b"Infinity", b"\xff",
            b"\xef\xbb\xbf", b"\n", b"\x00", b'"a":1', b'"a":1,"a":2', b"0" * 401, b"[[[[[",
        ]),
    ),
    max_size=3,
)  # fmt: skip


def edited(text: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for kind, position, piece in edits:
        at = position % (len(text) + 1)
        match kind:
            case "insert":
                text = text[:at] + piece + text[at:]
            case "delete":
                text = text[:at] + text[at + 1 :]
            case "repeat":
                text = text[:at] + text[at : at + 5] + text[at:]
    return text


@settings(max_examples=600)
@given(JSON_VALUES, EDITS, st.booleans(), st.booleans(), st.booleans(), st.integers(1, 6))
@example([], [("insert", 0, b'{"a":1,"a":2}')], False, False, False, 3)
@example({"a": [float("nan")]}, [], True, False, True, 2)
def test_the_fast_reader_and_a_plain_one_agree(
    value: Any, edits: list[tuple[str, int, bytes]], ascii_only: bool, nonfinite: bool, duplicates: bool, depth: int
) -> None:
    text = edited(json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass"), edits)
    try:
        expected = reference(text, depth=depth, allow_nonfinite=nonfinite, duplicates=duplicates)
    except (ValueError, RecursionError):
        for large in (b"", b" " * 1100):
            refusal(text + large, depth=depth, allow_nonfinite=nonfinite, duplicates=duplicates)
    else:
        for large in (b"", b" " * 1100):
            read = loads(text + large, depth=depth, allow_nonfinite=nonfinite, duplicates=duplicates)
            assert repr(read) == repr(expected)  # tells 1 from 1.0 and True, 0.0 from -0.0, NaN from NaN not


@settings(max_examples=300)
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 25))
def test_floats_are_the_nearest_doubles(value: float, digits: int) -> None:
    for text in (repr(value), f"{value:.{digits}e}"):
        if not math.isinf(float(text)):
            assert repr(loads(text.encode())) == repr(float(text) if re.search("[.e]", text) else int(text))


SLOW = ["1e300", "1e-320", "1.7976931348623157e308", "4e-324", "2.2250738585072011360e-308"]


@pytest.mark.parametrize("number", SLOW)
def test_the_floats_of_a_large_text_are_read_by_what_is_slow_with_none(number: str) -> None:
    # msgspec takes 8 us for each of these, 150 times what it takes for others: a body of them would stop the process.
    decoders: list[Any] = []

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and isinstance(decoder := argument.__self__, msgspec.json.Decoder):
            decoders.append(decoder)

    many = ", ".join([number] * 1000)
    for text in (f"[{many}]", f"[{many}, {2**70}]", f"[{many}, NaN]", f"[{many}, Infinity, {2**70}]"):
        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            values = loads(text.encode(), allow_nonfinite=True)
        finally:
            sys.setprofile(before)
        assert repr(values) == repr(json.loads(text))
    assert decoders
    assert all(decoder.float_hook for decoder in decoders)


@pytest.mark.parametrize("size", [0, 2000])
def test_a_float_beyond_the_doubles_is_refused_in_any_text(size: int) -> None:
    for text in ("[1e400]", "[-1e400]", "[1.7976931348623159e308]", "[NaN, 1e400]", "[-Infinity, 1e309]"):
        padded = text.replace("[", "[" + "0.5, " * size).encode()
        assert "Number out of range" in refusal(padded, allow_nonfinite=True)
    assert loads(b"[" + b"0.5," * size + b"1.7976931348623157e308]")[-1] == 1.7976931348623157e308
    assert loads(b"[" + b"0.5," * size + b"NaN," + b"1" * 400 + b"]", allow_nonfinite=True)[-1] == int("1" * 400)


@settings(max_examples=300)
@given(st.binary(max_size=80), st.booleans(), st.booleans())
def test_garbage_raises_nothing_but_json_errors(data: bytes, nonfinite: bool, duplicates: bool) -> None:
    with suppress(JSONError):
        loads(data, allow_nonfinite=nonfinite, duplicates=duplicates)
