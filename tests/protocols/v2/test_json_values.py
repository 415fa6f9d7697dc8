"""JSON requests of v2 with more values than a text may have: the numbers of tensors are outside of that count."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.v2 import ModelSignature, V2Error, V2Limits, V2Request, numbers, parse_infer
from protocols.v2.body import split_body
from protocols.v2.request import parse_by_rules
from protocols.v2.streamed_request import PieceReader

ANY = ModelSignature(name="m")
FEW = V2Limits(values=40, containers=12)
MANY = V2Limits()


def body_of(data: str, shape: list[int], datatype: str = "FP32", *, inside: str = "", outside: str = "") -> bytes:
    entry = f'{{"name":"a","datatype":"{datatype}","shape":{json.dumps(shape)},"data":{data}{inside}}}'
    return f'{{"inputs":[{entry}]{outside}}}'.encode()


def outcome(body: bytes, limits: V2Limits) -> tuple[str, Any]:
    try:
        (tensor,) = parse_by_rules(body, None, ANY, limits).inputs
    except V2Error as error:
        return "refused", error.message
    return "read", (tensor.elements.dtype, tensor.elements.shape, tensor.elements.tobytes())


WRITTEN = ["1", "0", "-7", "2.5", "1.0", "null", "NaN", "true", "false", "1e300", "Infinity", "300", "18446744073709551615", "1" * 30, '"x"', "[]", "1 2", "-", "\u00e9"]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(WRITTEN[:5]), min_size=60, max_size=60),
    st.lists(st.tuples(st.integers(0, 59), st.sampled_from(WRITTEN)), max_size=2),
    st.sampled_from(["FP32", "FP16", "BF16", "FP64", "INT8", "INT64", "UINT64", "BOOL"]),
    st.sampled_from([[60], [12, 5], [2, 3, 10], [1, 60], [60, 1, 1], [59], [61], [0], [5, 12]]),
    st.sampled_from([[], [5], [10, 3], [60], [1, 1]]),
    st.sampled_from(["", ', "more": null', ', "parameters": null']),
    st.integers(40, 90),
)
def test_data_beyond_the_count_are_what_they_are_within_it(
    written: list[str],
    odd: list[tuple[int, str]],
    datatype: str,
    shape: list[int],
    nested: list[int],
    inside: str,
    piece: int,
) -> None:
    for place, text in odd:
        written[place] = text
    rows = written
    for size in nested:
        rows = [f"[{','.join(rows[at : at + size])}]" for at in range(0, len(rows), size)]
    body = body_of(f"[{', '.join(rows)}]", shape, datatype, inside=inside)
    with np.errstate(all="ignore"):
        expected = outcome(body, MANY)
        with mock.patch.multiple(numbers, _PIECE=piece, _BLOCK=16):
            found = outcome(body, FEW)
    # data that are nested otherwise, and wrong besides, are refused for the one or for the other
    plain = not {'"x"', "[]"} & set(written) and "an array of" not in expected[1] and not nested
    if expected[0] == "refused" and not (plain and "at element" in expected[1]):
        assert found[0] == "refused", (body, expected)
    else:
        assert found == expected, body


@pytest.mark.parametrize(
    ("data", "shape", "said"),
    [
        ("[{}]".format(",".join(["1"] * 50)), [49], "tensor 'a': shape [49] takes 49 values, data has 50"),
        ("[{}, 2.5]".format(",".join(["1"] * 49)), [50], "tensor 'a': INT32 takes whole numbers from -2147483648 to 2147483647, those with a point or an exponent below 2**53, got 2.5 at element 49"),
        ("[{}]".format(",".join(["[1]"] * 50)), [25, 2], "tensor 'a': data is no JSON array of numbers, or nested otherwise than shape [25, 2]"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_many_numbers_is_said(data: str, shape: list[int], said: str) -> None:
    assert outcome(body_of(data, shape, "INT32", inside=',"x":1'), FEW) == ("refused", said)


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[],"data":[%b]}',  # numbers of no tensor
        b'{"inputs":[{"name":"a","datatype":"FP32","shape":[50],"parameters":{"data":[%b]},"data":[1]}]}',
        b'{"inputs":[{"name":"a","datatype":"FP32","shape":[50],"x\\"data":[%b]}]}',
        b'{"ignored":[%b],"inputs":[{"name":"a","datatype":"FP32","shape":[1],"data":[1]}]}',
    ],
)
def test_numbers_that_are_no_input_s_count(text: bytes) -> None:
    said = "the request has more than 40 values (limits.json_values)"
    assert outcome(text % b",".join([b"1"] * 50), FEW) == ("refused", said)


@pytest.mark.parametrize("behind", ["1", "0", ".5", "e1", " 1", "-1"])
def test_a_number_behind_the_data_is_no_part_of_what_stands_for_them(behind: str) -> None:
    body = body_of("[{}]{}".format(",".join(["1"] * 50), behind), [50])
    kind, said = outcome(body, FEW)
    assert kind == "refused"
    assert "is not JSON" in said


def test_a_text_that_has_the_mark_itself_is_counted_whole() -> None:
    body = body_of("[{}]".format(",".join(["1"] * 50)), [50], outside=',"parameters":{"x":0e-00000000000}')
    assert outcome(body, FEW) == ("refused", "the request has more than 40 values (limits.json_values)")


def test_many_numbers_are_read_from_a_head_before_pieces_too() -> None:
    head = body_of("[{}]".format(",".join(["1.5"] * 50)), [50], inside=',"parameters":null')
    reader = PieceReader(len(head), len(head), ANY, FEW)
    reader.receive_data(head)
    assert isinstance(reader.head(), V2Request)
    read, _ = split_body(head, None, FEW, "the request")
    assert read["inputs"][0]["data"].read("FP32", (50,), "a").tolist() == [1.5] * 50


@pytest.mark.parametrize(
    "shape", [[8_000], [8_000, 1], [1, 8_000, 1], [2, 4_000], [4_000, 2], [20, 20, 20], [1, 1, 1, 8_000]]
)
@pytest.mark.parametrize("inside", ["", ',"parameters":null'])
def test_numbers_of_any_shape_are_outside_of_the_count(shape: list[int], inside: str) -> None:
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) / 4
    body = body_of(json.dumps(values.tolist()), shape, inside=inside)
    (tensor,) = parse_infer(body, None, ANY, replace(FEW, values=100, containers=20)).inputs
    assert np.array_equal(tensor.elements, values)
