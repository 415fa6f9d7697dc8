"""Arrays of numbers straight from JSON text: each number what the rules make of it, or left to them."""

from __future__ import annotations

import json
import math
import tracemalloc
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import simdjson
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.json.strict import JSONError, loads
from protocols.v2 import numbers as json_numbers
from protocols.v2.numbers import FAST_FROM, read_numbers
from protocols.v2.tensors import DATATYPES, Array, V2Error, from_json

NUMERIC = [name for name in DATATYPES if name not in ("BOOL", "BYTES")]
MANY = 3000  # numbers of which the text is large, whatever they are


def read(text: bytes, datatype: str, shape: tuple[int, ...]) -> Array | None:
    """Reads the text where it stands in another, whose brackets are not its own."""
    return read_numbers(b"[[1]" + text + b"]]", 4, 4 + len(text), datatype, shape)


def by_the_rules(text: bytes, datatype: str, shape: tuple[int, ...]) -> Array | None:
    try:
        return from_json(datatype, shape, loads(text, allow_nonfinite=True), "x")
    except (V2Error, JSONError):
        return None


def said(array: Array | None) -> Any:
    return array if array is None else (array.dtype, array.shape, array.tobytes(), array.flags.writeable)


def flat(numbers: list[str]) -> bytes:
    return b"[" + ",".join(numbers).encode() + b"]"


# Numbers that are read


@pytest.mark.parametrize("datatype", NUMERIC)
@pytest.mark.parametrize("count", [1, 3, 1000, 30_000])
def test_numbers_flat_and_nested_are_what_the_rules_make_of_them(datatype: str, count: int) -> None:
    numbers = [str(n * 37 % 127) if DATATYPES[datatype].kind in "iu" else repr((n * 37 % 1001) / 16) for n in range(count)]
    text = flat(numbers)
    assert said(read(text, datatype, (count,))) == said(by_the_rules(text, datatype, (count,)))
    for shape in ((count, 1), (1, count), (1, 1, count), (count, 1, 1)):
        nested = json.dumps(np.array(numbers, object).reshape(shape).tolist()).replace('"', "").encode()
        assert said(read(nested, datatype, shape)) == said(by_the_rules(nested, datatype, shape))
        assert said(read(text, datatype, shape)) == said(by_the_rules(text, datatype, shape))


def test_the_whole_range_of_integers_is_exact() -> None:
    for datatype in NUMERIC[:8]:
        info = np.iinfo(DATATYPES[datatype])
        for padding in (0, MANY):
            numbers = [str(info.min), *(["1"] * padding), str(info.max)]
            array = read(flat(numbers), datatype, (len(numbers),))
            assert array is not None
            assert (int(array[0]), int(array[-1])) == (info.min, info.max)
            for wrong in (info.min - 1, info.max + 1):
                assert read(flat([*numbers[:-1], str(wrong)]), datatype, (len(numbers),)) is None


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "BF16"])
def test_null_and_nan_are_nan_for_floats(datatype: str) -> None:
    for padding in (0, MANY):
        numbers = ["null", *(["0.5"] * padding), "NaN", "-0.0"]
        array = read(flat(numbers), datatype, (len(numbers),))
        assert said(array) == said(by_the_rules(flat(numbers), datatype, (len(numbers),)))
        assert array is not None
        assert read(flat(numbers), "INT64", (len(numbers),)) is None


def test_random_doubles_are_read_exactly_from_their_shortest_text() -> None:
    bits = np.random.default_rng(11).integers(0, 2**64, 6000, dtype=np.uint64)
    subnormal = bits[:2000] >> np.uint64(12)
    for values in (bits.view(np.float64), subnormal.view(np.float64), bits.view(np.float32)):
        values = values[np.isfinite(values)].astype(np.float64)
        array = read(flat(list(map(repr, values.tolist()))), "FP64", values.shape)
        assert array is not None
        assert array.tobytes() == values.tobytes()


def halfway(value: float, digits: int) -> str:
    """The decimal between a double and the next, cut to so many digits."""
    with localcontext() as context:
        context.prec = 1200
        middle = (Decimal(value) + Decimal(math.nextafter(value, math.inf))) / 2
        return f"{middle:.{digits - 1}e}"


def test_numbers_halfway_between_doubles_are_rounded_as_python_does() -> None:
    values = [*(10.0**power for power in range(-320, 300, 7)), 2.2250738585072014e-308, 5e-324, 1.7e308, 9007199254740992.0]
    for digits in (19, 20, 25, 50, 380):
        texts = [halfway(value, digits) for value in values] * 3
        for padding in (0, MANY):  # few numbers of these, and few among many others
            array = read(
                flat([*texts[: 2 if padding else None], *(["0.5"] * padding)]),
                "FP64",
                (padding + len(texts[: 2 if padding else None]),),
            )
            assert array is not None
            assert [float(text) for text in texts[: 2 if padding else None]] == array[: len(array) - padding].tolist()


# Texts that are left to the rules


WRONG = ["true", "false", '"1"', "{}", "[1]", "[]", "", "01", "+1", "1.", ".5", "-", "1 2", "1\x00", "1e400", "Infinity", "-NaN", "1NaN", "nullnull", "0x1", "1]", "]", "\xff"]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("padding", [1, MANY])
def test_what_is_no_plain_number_is_left_wherever_it_stands(wrong: str, padding: int) -> None:
    for place in (0, padding // 2, padding):
        numbers = ["1"] * padding
        numbers.insert(place, wrong)
        text = b"[" + ",".join(numbers).encode("latin-1") + b"]"
        for datatype in ("FP32", "INT64"):
            assert read(text, datatype, (padding + 1,)) is None
            assert read(text, datatype, (padding + 1, 1)) is None


def test_text_is_no_number_beside_null_either() -> None:
    assert by_the_rules(b'["1.5",null]', "FP64", (2,)) is None
    assert read(b'["1.5",null]', "FP64", (2,)) is None


@pytest.mark.parametrize("datatype", NUMERIC[:8])
@pytest.mark.parametrize("wrong", ["1.0", "1e1", "1.5", "18446744073709551616", "-9223372036854775809", "null"])
def test_what_an_integer_may_not_be_or_not_at_once_is_left(datatype: str, wrong: str) -> None:
    for padding in (0, MANY):
        assert read(flat([wrong, *(["1"] * padding)]), datatype, (padding + 1,)) is None


@pytest.mark.parametrize(("datatype", "largest", "beyond"), [
    ("FP16", "65519.99", "65520"), ("BF16", "3.38953139e38", "3.4e38"), ("FP32", "3.4028235677973365e38", "3.4028235677973366e38"),
])  # fmt: skip
def test_a_number_beyond_the_largest_is_left_and_not_infinity(datatype: str, largest: str, beyond: str) -> None:
    for padding in (0, MANY):
        numbers = [largest, "-" + largest, *(["0.5"] * padding)]
        assert said(read(flat(numbers), datatype, (padding + 2,))) == said(
            by_the_rules(flat(numbers), datatype, (padding + 2,))
        )
        for wrong in (beyond, "-" + beyond):
            assert read(flat([*numbers, wrong]), datatype, (padding + 3,)) is None


@pytest.mark.parametrize("size", [400, 401])
def test_a_number_has_400_characters_at_most(size: int) -> None:
    for padding in (0, MANY, 40_000):
        text = flat([*(["1.25"] * padding), "7." + "0" * (size - 2)])
        assert (read(text, "FP64", (padding + 1,)) is None) == (size > 400)


def test_another_count_than_that_of_the_shape_is_left() -> None:
    for count in (1, MANY, 40_000):
        text = flat(["1"] * count)
        for shape in ((count + 1,), (count - 1,), (count * 2,), (0,), (2**40,), (2**62, 2**62), (0, count)):
            assert read(text, "FP32", shape) is None
    assert read(b"[1,]", "FP32", (1,)) is None
    assert read(b"[ ]", "FP32", (1,)) is None
    assert read(b"[5]", "FP32", ()) is not None


@pytest.mark.parametrize("piece", [0, 1, 2, 3])
def test_a_comma_that_ends_a_piece_is_not_one_too_many(piece: int) -> None:
    # Numbers of which the commas fall on each place around the end of the first 64 KiB.
    numbers = [*(["12"] * 30_000)]
    numbers[0] = "1" * (1 + piece)
    for text in (flat(numbers), flat(numbers)[:-1] + b",]", flat([*numbers[:100], "", *numbers[100:]])):
        for shape in ((30_000,), (30_001,)):
            assert said(read(text, "FP64", shape)) == said(by_the_rules(text, "FP64", shape))


def test_a_last_piece_of_nothing_but_spaces_is_no_piece() -> None:
    text = b"[" + b"1," * 32_500 + b" " * 2000 + b"]"
    for datatype in ("FP32", "INT8"):
        assert read(text, datatype, (32_500,)) is None
        assert read(text.replace(b", ", b"  "), datatype, (32_500,)) is not None


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (b"[1[,2],[3,4]]", (2, 2)), (b"[[1,2]3,[,4]]", (2, 2)), (b"[[1,2],[3,]4]", (2, 2)), (b"[[,1 2],[3,4]]", (2, 2)), (b"[1 [,2],[3,4]]", (2, 2)),
        (b"[[1,2],[3,4] 5]", (2, 2)), (b"[[1],[2,3,4]]", (2, 2)), (b"[[1,2,3,4]]", (2, 2)), (b"[[1],[2],[3],[4]]", (2, 2)), (b"[[[1,2],[3,4]]]", (2, 2)),
        (b"[[1,2],3,4]", (2, 2)), (b"[1,[2,3],4]", (2, 2)), (b"[[1,2],[3,4]", (2, 2)), (b"[[1,2][3,4]]", (2, 2)), (b"[[1,2,3,4]]", (4,)), (b"[[1]]", ()),
        (b"[[]1,[]2]", (2, 1)), (b"[]1[]", (1,)), (b"[[[1]]]", (1, 1)),
    ],
)  # fmt: skip
def test_brackets_stand_as_the_shape_says(text: bytes, shape: tuple[int, ...]) -> None:
    assert by_the_rules(text, "FP32", shape) is None
    assert read(text, "FP32", shape) is None
    assert read(text.replace(b",", b" ,\n"), "FP32", shape) is None


def test_a_shape_takes_no_memory_before_its_brackets_are_counted() -> None:
    text = b"[[1]," + b"1," * 50_000 + b"1]"
    tracemalloc.start()
    try:
        for shape in ((2**30, 1), (1, 2**30), (2**20, 2**20), (50_002, *[1] * 15)):
            assert read(text, "FP32", shape) is None
        assert tracemalloc.get_traced_memory()[1] < 5 * len(text)
    finally:
        tracemalloc.stop()


def test_datatypes_without_numbers_are_left() -> None:
    for datatype in ("BOOL", "BYTES"):
        assert read(b"[1]", datatype, (1,)) is None


# Costs


PARSER = simdjson.Parser


class Spy:
    """A parser that keeps what it was given."""

    given: list[bytes]

    def __init__(self) -> None:
        self.parser = PARSER()

    def parse(self, piece: bytes) -> Any:
        Spy.given.append(piece)
        return self.parser.parse(piece)


@pytest.fixture
def given_to_simdjson(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    Spy.given = []
    monkeypatch.setattr(json_numbers.simdjson, "Parser", Spy)
    monkeypatch.setattr(json_numbers, "_idle", [])
    return Spy.given


def test_numbers_that_some_readers_are_slow_with_do_not_go_to_those(given_to_simdjson: list[bytes]) -> None:
    for number in ("1e300", "1E300", "4e-324", halfway(2.2250738585072014e-308, 21)):
        assert read(flat([number] * MANY), "FP64", (MANY,)) is not None
    assert not given_to_simdjson
    assert read(flat([*(["0.25"] * 20_000), "1e-7"]), "FP64", (20_001,)) is not None
    assert [len(piece) > FAST_FROM for piece in given_to_simdjson] == [True, True]


def test_a_text_is_read_in_pieces_and_few_parsers_are_kept(given_to_simdjson: list[bytes]) -> None:
    for _ in range(10):
        assert read(flat(["0.125"] * 100_000), "FP32", (100_000,)) is not None
    assert len(json_numbers._idle) == 1
    assert read(b"[" + b"0.5," * 2000 + b" " * 100_000 + b"1]", "FP32", (2001,)) is None  # no comma ends a piece
    assert max(map(len, given_to_simdjson)) <= 2**16 + 2


NUMBERS = st.one_of(
    st.integers(-300, 300).map(str), st.integers().map(str), st.floats().map(repr), st.floats(width=32).map(repr),
    st.sampled_from(["-0", "-0.0", "0e0", "1E5", "1e-400", "65519.99", "65520", "1e39", "18446744073709551615", "-9223372036854775809", "null", "NaN", "Infinity", *WRONG]),
)  # fmt: skip


@settings(max_examples=400)
@given(
    st.sampled_from([*NUMERIC, "BOOL"]),
    st.lists(st.tuples(NUMBERS, st.sampled_from(["", "", " ", "\n", "\t\r"])), min_size=1, max_size=6),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([0, 0, 900]),
    st.integers(-1, 1),
)
def test_what_is_read_is_what_the_rules_make_of_it(
    datatype: str, numbers: list[tuple[str, str]], row: int | None, padding: int, off: int
) -> None:
    texts = [space + number for number, space in numbers] + ["1"] * padding
    if row is None:
        shape: tuple[int, ...] = (len(texts) + off * (off > 0 or len(texts) > 1),)
    else:
        shape = (len(texts) // row, row)
        texts = ["[" + ",".join(texts[at : at + row]) + "]" for at in range(0, len(texts), row)]
    text = b"[" + ",".join(texts).encode("latin-1") + b"]"
    array = read(text, datatype, shape)
    if array is not None:
        assert said(array) == said(by_the_rules(text, datatype, shape))
