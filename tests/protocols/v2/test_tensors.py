"""Tensors to and from bytes: exact, bounded, without copies, and nothing guessed."""

from __future__ import annotations

import json
import math
import struct
from contextlib import suppress
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.v2 import tensors as tensors_module
from protocols.v2.tensors import (
    DATATYPES,
    Array,
    BytesData,
    V2Error,
    check_shape,
    decode_binary,
    encode_binary,
    from_json,
    show,
    to_json,
)

FIXED = [name for name in DATATYPES if name != "BYTES"]
FLOATS = ["FP16", "BF16", "FP32", "FP64"]
INTEGERS = [name for name, dtype in DATATYPES.items() if dtype.kind in "iu"]


def refusal(call: Any, *args: Any, status: int = 400, **kwargs: Any) -> str:
    with pytest.raises(V2Error) as caught:
        call(*args, **kwargs)
    assert caught.value.status == status
    assert json.loads(caught.value.error_body()) == {"error": caught.value.message}
    return caught.value.message


def decode(datatype: str, shape: tuple[int, ...], data: bytes | bytearray) -> Array:
    array = decode_binary(datatype, shape, memoryview(data), "x")
    return array.array() if isinstance(array, BytesData) else array


@np.errstate(invalid="ignore")  # signalling NaN
def same(left: Array, right: Array) -> bool:
    """Equal to the bit, but for NaN, which is equal to NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype.kind == "O":
        return bool((left == right).all())
    # tobytes tells 0.0 from -0.0
    return left.tobytes() == right.tobytes() or bool(((left == right) | ((left != left) & (right != right))).all())


# Binary


@pytest.mark.parametrize("datatype", FIXED)
def test_a_binary_tensor_is_a_read_only_view_of_the_body(datatype: str) -> None:
    body = bytearray(b"head" + bytes([1, 0] * 24))
    array = decode_binary(datatype, (48 // DATATYPES[datatype].itemsize,), memoryview(body)[4:], "x")
    assert array.dtype == DATATYPES[datatype]
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))
    assert not array.flags.writeable
    with pytest.raises(ValueError):
        array[0] = 0


def test_a_view_of_immutable_bytes_is_not_a_copy_either() -> None:
    body = bytes(64)
    assert np.shares_memory(decode("FP32", (4, 4), body), np.frombuffer(body, np.uint8))


def test_binary_data_is_little_endian_and_row_major() -> None:
    array = decode("UINT16", (2, 2), b"\x01\x00\x02\x00\x03\x00\x00\x04")
    assert array.tolist() == [[1, 2], [3, 1024]]
    assert decode("FP16", (2,), b"\x00\x3c\x00\xc0").tolist() == [1.0, -2.0]
    assert decode("BF16", (2,), b"\x80\x3f\x00\xc0").astype(float).tolist() == [1.0, -2.0]


@pytest.mark.parametrize("datatype", FIXED)
def test_size_must_be_shape_times_element(datatype: str) -> None:
    size = 6 * DATATYPES[datatype].itemsize
    assert decode(datatype, (3, 2), bytes(size)).shape == (3, 2)
    for wrong in (size - 1, size + 1, 0, size * 2):
        assert (
            refusal(decode, datatype, (3, 2), bytes(wrong))
            == f"tensor 'x': {datatype} [3, 2] takes {size} bytes, got {wrong}"
        )


@pytest.mark.parametrize("shape", [(2**40,), (2**62, 2**62), (10**300,) * 16, (2**32, 2**32)])
@pytest.mark.parametrize("datatype", [*FIXED, "BYTES"])
def test_a_shape_beyond_the_bytes_present_allocates_nothing(datatype: str, shape: tuple[int, ...]) -> None:
    assert len(refusal(decode, datatype, shape, bytes(4))) < 250
    assert len(refusal(from_json, datatype, shape, [1], "x")) < 250


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4), (1000, 0)])
def test_an_empty_tensor_keeps_its_shape(datatype: str, shape: tuple[int, ...]) -> None:
    assert decode(datatype, shape, b"").shape == shape
    assert from_json(datatype, shape, [], "x").shape == shape
    assert encode_binary(decode(datatype, shape, b""), datatype) == []
    assert to_json(decode(datatype, shape, b""), datatype) == b"[]"


def test_an_empty_tensor_may_not_have_dimensions_that_numpy_cannot_hold() -> None:
    for shape in [(0, 2**62, 2**62), (0, 2**63), (0, 2**61)]:
        assert "too large" in refusal(decode, "FP32", shape, b"")
        assert "too large" in refusal(from_json, "BYTES", shape, [], "x")


def test_a_tensor_of_rank_0_has_one_element() -> None:
    assert decode("INT8", (), b"\x05").shape == ()
    assert from_json("INT8", (), [5], "x").tolist() == 5
    assert to_json(np.array(5, np.int8), "INT8") == b"[5]"


def test_any_byte_but_0_is_true() -> None:
    array = decode("BOOL", (4,), b"\x00\x01\x02\xff")
    assert array.tolist() == [False, True, True, True]
    assert int(array.sum()) == 3
    assert not array.flags.writeable
    assert encode_binary(array, "BOOL") == [b"\x00\x01\x01\x01"]


def prefixed(*items: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


def test_bytes_are_elements_with_a_length_in_front() -> None:
    array = decode("BYTES", (2, 2), prefixed(b"a", b"", b"\xff\x00", b"xyz"))
    assert array.tolist() == [[b"a", b""], [b"\xff\x00", b"xyz"]]
    assert array.dtype == object
    assert not array.flags.writeable


@pytest.mark.parametrize("cut", range(1, len(prefixed(b"ab", b"", b"c"))))
def test_bytes_cut_anywhere_are_refused(cut: int) -> None:
    whole = prefixed(b"ab", b"", b"c")
    refusal(decode, "BYTES", (3,), whole[:cut])
    assert decode("BYTES", (3,), whole).tolist() == [b"ab", b"", b"c"]


def test_each_fault_of_bytes_has_its_own_text() -> None:
    assert "element 1 of 2 has 9 bytes, only 3 are left" in refusal(
        decode, "BYTES", (2,), prefixed(b"") + b"\x09\x00\x00\x00abc"
    )
    assert "element 1 of 2 is cut off" in refusal(decode, "BYTES", (2,), prefixed(b"abcd") + b"\x01\x00")
    assert "1 bytes are left after the last of 1 elements" in refusal(decode, "BYTES", (1,), prefixed(b"a") + b"\x00")
    assert "has 3 elements" in refusal(decode, "BYTES", (3,), prefixed(b"a"))
    assert "4294967295 bytes" in refusal(decode, "BYTES", (1,), b"\xff\xff\xff\xff")


def lazy(shape: tuple[int, ...], data: bytes | bytearray) -> BytesData:
    found = decode_binary("BYTES", shape, memoryview(data), "x")
    assert isinstance(found, BytesData)
    return found


ALIKE, UNLIKE = (b"abc", b"de\xff", b"\0\0\0"), (b"a", b"", b"de\xff")


@pytest.mark.parametrize("items", [ALIKE, UNLIKE, (b"", b"", b""), (b"x" * 300, b"y" * 300, b"z" * 300)])
def test_bytes_become_objects_when_somebody_looks(items: tuple[bytes, ...]) -> None:
    body = bytearray(b"head" + prefixed(*items))
    tensor = lazy((3, 1), memoryview(body)[4:])
    assert (tensor.shape, tensor.size, tensor.dtype) == ((3, 1), 3, np.dtype(object))
    assert tensor._array is None
    array = tensor.array()
    assert array.tolist() == [[item] for item in items]
    assert all(type(item) is bytes for item in array.reshape(-1))
    assert tensor.array() is array
    assert not array.flags.writeable


@pytest.mark.parametrize("items", [ALIKE, UNLIKE, ()])
def test_bytes_that_nobody_looked_at_leave_as_they_came(items: tuple[bytes, ...]) -> None:
    body = bytearray(prefixed(*items))
    tensor = lazy((len(items),), body)
    buffers = encode_binary(tensor, "BYTES")
    assert b"".join(buffers) == body
    assert all(np.shares_memory(np.frombuffer(buffer, np.uint8), np.frombuffer(body, np.uint8)) for buffer in buffers)
    assert len(buffers) == (len(items) > 0)
    assert tensor._array is None
    assert "float32, got an array of object" in refusal(encode_binary, tensor, "FP32", status=500)
    assert "float32, got an array of object" in refusal(to_json, tensor, "FP32", status=500)


def test_bytes_that_nobody_looked_at_are_written_as_text_too() -> None:
    assert to_json(lazy((2, 1), prefixed("é".encode(), b"")), "BYTES") == '["é",""]'.encode()
    assert "binary_data" in refusal(to_json, lazy((3,), prefixed(*ALIKE)), "BYTES")


@pytest.mark.parametrize("items", [ALIKE, UNLIKE])
def test_bytes_are_checked_before_anything_is_made_of_them(items: tuple[bytes, ...]) -> None:
    whole = prefixed(*items)
    for at in range(0, len(whole), 1):
        for value in (0, 1, 4, 255):
            data = bytearray(whole)
            data[at] = value
            expected: list[bytes] | None = []
            start = 0
            while start < len(data) and expected is not None:
                length = int.from_bytes(data[start : start + 4], "little")
                start += 4 + length
                expected = [*expected, bytes(data[start - length : start])] if start <= len(data) else None
            if expected is None or len(expected) != 3:
                refusal(decode, "BYTES", (3,), data)
            else:
                assert decode("BYTES", (3,), data).tolist() == expected


@pytest.mark.parametrize("datatype", FIXED)
def test_an_array_leaves_as_its_own_memory(datatype: str) -> None:
    array = np.zeros((3, 4), DATATYPES[datatype])
    (buffer,) = encode_binary(array, datatype)
    assert isinstance(buffer, memoryview)
    assert (buffer.format, buffer.ndim, len(buffer)) == ("B", 1, array.nbytes)
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)


@pytest.mark.parametrize("datatype", FIXED)
def test_an_array_in_another_order_leaves_as_a_copy_of_the_right_one(datatype: str) -> None:
    array = np.arange(24).reshape(4, 6).astype(DATATYPES[datatype])
    for view in (array.T, array[:, ::2], np.asfortranarray(array), array[::-1]):
        (buffer,) = encode_binary(view, datatype)
        assert same(decode(datatype, view.shape, bytearray(buffer)), np.array(view, order="C"))


@pytest.mark.parametrize("datatype", ["UINT16", "INT32", "FP16", "FP32", "FP64"])
def test_a_big_endian_array_is_turned_around(datatype: str) -> None:
    array = np.array([1, 2, 300], DATATYPES[datatype])
    assert encode_binary(array.astype(array.dtype.newbyteorder(">")), datatype) == encode_binary(array, datatype)
    assert to_json(array.astype(array.dtype.newbyteorder(">")), datatype) == to_json(array, datatype)


def test_a_read_only_array_is_written_without_a_copy() -> None:
    array = decode("FP32", (4,), bytes(16))
    (buffer,) = encode_binary(array, "FP32")
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)


@pytest.mark.parametrize(
    "array", [np.array([b"a", "é", b""], object), np.array(["a", "é", ""]), np.array([b"a", "é".encode(), b""])]
)
def test_arrays_of_text_leave_as_bytes(array: Array) -> None:
    assert encode_binary(array, "BYTES") == [prefixed(b"a", "é".encode(), b"")]
    assert json.loads(to_json(array, "BYTES")) == ["a", "é", ""]


def test_an_element_is_shorter_than_its_length_field_can_say() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 2**32

    assert "got 4294967296" in refusal(encode_binary, np.array([Huge()], object), "BYTES", status=500)


@pytest.mark.parametrize("datatype", FIXED)
def test_an_array_of_any_layout_is_written_as_json(datatype: str) -> None:
    array = np.arange(24).reshape(4, 6).astype(DATATYPES[datatype])
    odd = np.frombuffer(b"x" + array.tobytes(), array.dtype, offset=1).reshape(4, 6)
    for view in (array, array.T, array[:, ::2], np.asfortranarray(array), array[::-1], array.view(Derived), odd, odd.T):
        expected = [float(value) for value in np.array(view, order="C").reshape(-1)]
        assert [float(value) for value in json.loads(to_json(view, datatype))] == expected


def test_what_is_given_to_orjson_lies_as_it_takes_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Array] = []
    monkeypatch.setattr(tensors_module, "_dumps", lambda array, *_: given.append(array))
    array = np.frombuffer(b"x" + bytes(16), np.float32, offset=1)
    assert not array.flags.aligned
    to_json(array, "FP32")
    to_json(array[::2], "FP32")
    assert all(array.flags.aligned and array.flags.c_contiguous for array in given)


class Derived(np.ndarray[Any, Any]):
    """A subclass of arrays that a model may give, as numpy's memmap is one."""


def test_an_array_of_another_type_is_not_cast() -> None:
    for write in (encode_binary, to_json):
        assert refusal(write, np.zeros(2), "FP32", status=500) == "datatype FP32 holds float32, got an array of float64"
        refusal(write, np.zeros(2, np.uint16), "BF16", status=500)
        refusal(write, np.zeros(2, "V2"), "BF16", status=500)
        refusal(write, np.array([1, 2], object), "INT64", status=500)
        assert "got an element of int" in refusal(write, np.array([b"a", 1], object), "BYTES", status=500)
        assert "surrogate" in refusal(write, np.array(["\ud800"], object), "BYTES", status=500)
        assert "no datatype 'float32'" in refusal(write, np.zeros(2, np.float32), "float32", status=500)


# JSON in


def test_data_is_flat_or_nested_as_the_shape_is() -> None:
    expected = [[[1, 2]], [[3, 4]]]
    for data in ([1, 2, 3, 4], expected):
        array = from_json("INT32", (2, 1, 2), data, "x")
        assert array.tolist() == expected
        assert not array.flags.writeable


@pytest.mark.parametrize(
    "data",
    [[[1], [2, 3, 4]], [[1, 2], [3], [4]], [[1, 2], 3, 4], [1, [2, 3], 4], [1, [2], 3, 4], [[[1, 2], [3, 4]]], [[1, 2, 3, 4]], [[1], [2], [3], [4]], [[[1], [2]], [[3], [4]]], [[], [1, 2, 3, 4]]],
)  # fmt: skip
def test_ragged_data_and_data_of_another_shape_are_refused_though_the_count_is_right(data: list[Any]) -> None:
    refusal(from_json, "FP32", (2, 2), data, "x")


def test_nested_data_may_be_empty() -> None:
    assert from_json("FP32", (2, 0), [[], []], "x").shape == (2, 0)
    refusal(from_json, "FP32", (2, 0), [[], [], []], "x")
    refusal(from_json, "FP32", (0,), [[]], "x")
    refusal(from_json, "FP32", (), [[1]], "x")


@pytest.mark.parametrize("data", [None, 5, "ab", {}, True, 1.5])
def test_data_must_be_an_array(data: object) -> None:
    refusal(from_json, "BYTES", (1,), data, "x")


def test_the_count_of_values_must_be_that_of_the_shape() -> None:
    assert refusal(from_json, "FP32", (2, 2), [1, 2, 3], "x") == "tensor 'x': shape [2, 2] takes 4 values, data has 3"
    refusal(from_json, "FP32", (2, 2), [1, 2, 3, 4, 5], "x")
    refusal(from_json, "FP32", (1,), [], "x")


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_are_exact_in_their_whole_range_and_refused_outside(datatype: str) -> None:
    info = np.iinfo(DATATYPES[datatype])
    low, high = int(info.min), int(info.max)
    assert from_json(datatype, (3,), [low, 0, high], "x").tolist() == [low, 0, high]
    assert to_json(np.array([low, high], DATATYPES[datatype]), datatype) == b"[%d,%d]" % (low, high)
    for wrong in (low - 1, high + 1, 10**300, -(10**300), 1e300):
        message = refusal(from_json, datatype, (2,), [0, wrong], "x")
        assert f"{datatype} takes whole numbers from {low} to {high}" in message
        assert message.endswith("at element 1")


def test_a_whole_float_is_an_integer_and_a_fraction_is_not() -> None:
    assert from_json("INT8", (3,), [1.0, -2.0, 3], "x").tolist() == [1, -2, 3]
    for wrong in (1.5, 128.0, math.nan, math.inf, 1e-300):
        refusal(from_json, "INT8", (1,), [wrong], "x")


def test_a_whole_float_is_an_integer_where_it_can_be_no_other() -> None:
    # 9007199254740993.0 is read as the double below it.
    assert from_json("INT64", (2,), [2.0**53 - 1, 1 - 2.0**53], "x").tolist() == [2**53 - 1, 1 - 2**53]
    for wrong in (float("9007199254740993.0"), -(2.0**53), 2.0**62, 1e300):
        message = refusal(from_json, "INT64", (2,), [1, wrong], "x")
        assert message.endswith(f", those with a point or an exponent below 2**53, got {wrong!r} at element 1")


@pytest.mark.parametrize("datatype", [*INTEGERS, *FLOATS])
@pytest.mark.parametrize("wrong", [True, "1", [], {}])
def test_only_numbers_are_numbers(datatype: str, wrong: object) -> None:
    message = refusal(from_json, datatype, (2,), [1, wrong], "x")
    assert f"got {show(wrong)} at element 1" in message


def test_null_is_nan_for_floats_and_nothing_else() -> None:
    for datatype in FLOATS:
        assert np.isnan(from_json(datatype, (2,), [None, 1], "x").astype(float)).tolist() == [True, False]
    for datatype in (*INTEGERS, "BOOL", "BYTES"):
        assert "got null at element 0" in refusal(from_json, datatype, (1,), [None], "x")


def test_bool_takes_true_false_0_and_1() -> None:
    assert from_json("BOOL", (4,), [True, False, 1, 0], "x").tolist() == [True, False, True, False]
    faults: list[object] = [2, -1, 1.0, "true", None, [], 10**300]
    for wrong in faults:
        refusal(from_json, "BOOL", (2,), [True, wrong], "x")


@pytest.mark.parametrize(("datatype", "largest", "beyond"), [
    ("FP16", 65504.0, 65520.0), ("BF16", 3.3895313892515355e38, 3.4e38),
    ("FP32", float(np.finfo(np.float32).max), 3.4028236e38), ("FP64", float(np.finfo(np.float64).max), 2**1024),
])  # fmt: skip
def test_a_number_beyond_the_largest_is_refused_and_not_infinity(datatype: str, largest: float, beyond: float) -> None:
    assert from_json(datatype, (2,), [largest, -largest], "x").astype(float).tolist() == [largest, -largest]
    for wrong in (beyond, -beyond, 10**400):
        assert "at element 1" in refusal(from_json, datatype, (3,), [1, wrong, wrong], "x")


def test_what_rounds_to_the_largest_number_is_that_number() -> None:
    assert from_json("FP16", (1,), [65519.9], "x").tolist() == [65504.0]
    assert "element 1" in refusal(from_json, "FP16", (2,), [65519.9, 65520], "x")


def test_infinities_that_json_did_name_are_read() -> None:
    for datatype in FLOATS:
        array = from_json(datatype, (3,), [math.inf, -math.inf, math.nan], "x").astype(float)
        assert (array[0], array[1], np.isnan(array[2])) == (math.inf, -math.inf, True)


def test_strings_become_bytes_in_utf_8() -> None:
    assert from_json("BYTES", (1, 3), ["", "é", "a\x00"], "x").tolist() == [[b"", "é".encode(), b"a\x00"]]
    for wrong in (1, True, None, ["a"], b"a"):
        refusal(from_json, "BYTES", (1,), [wrong], "x")
    assert "surrogate" in refusal(from_json, "BYTES", (1,), ["\ud800"], "x")


# JSON out


def test_a_float_is_its_shortest_text() -> None:
    assert to_json(np.array([0.1, 1 / 3, 1e-45, 3.4028235e38, 16777216, -0.0, 1e10], np.float32), "FP32") == (
        b"[0.1,0.33333334,1e-45,3.4028235e+38,16777216.0,-0.0,10000000000.0]"
    )
    assert to_json(np.array([0.1, 1e300]), "FP64") == b"[0.1,1e+300]"


@pytest.mark.parametrize("datatype", FLOATS)
def test_what_json_has_no_number_for_is_null(datatype: str) -> None:
    array = np.array([math.nan, math.inf, -math.inf, 1.0]).astype(DATATYPES[datatype])
    assert to_json(array, datatype) == b"[null,null,null,1.0]"
    assert to_json(np.tile(array, 100), datatype).count(b"null") == 300


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
@np.errstate(invalid="ignore", over="ignore")
def test_every_16_bit_float_is_the_shortest_text_that_reads_back_to_it(datatype: str) -> None:
    dtype = DATATYPES[datatype]
    array = np.arange(2**16, dtype=np.uint16).view(dtype)
    finite = array[np.isfinite(array.astype(np.float32))]
    written = to_json(finite, datatype)
    assert same(from_json(datatype, finite.shape, json.loads(written), "x"), finite)
    for value, text in zip(finite.astype(np.float64).tolist(), written[1:-1].split(b","), strict=True):
        digits = Decimal(text.decode()).normalize().as_tuple()
        if len(digits.digits) == 1:
            continue
        last = Decimal((0, digits.digits[:-1], int(digits.exponent) + 1))
        unit = Decimal((0, (1,), int(digits.exponent) + 1))
        for shorter in (last, last + unit):  # the two next numbers with one digit less
            assert np.float32(shorter).astype(dtype) != dtype.type(abs(value)), (text, shorter)


def test_16_bit_floats_of_any_layout_are_written_alike() -> None:
    for datatype in ("FP16", "BF16"):
        array = np.array([[0.1, -0.0, 1e-5], [3.14, 65504, 2.0]]).astype(DATATYPES[datatype])
        text = to_json(array, datatype)
        assert text.startswith(b"[0.1,-0.0,0.00001,3.14,"), text
        assert to_json(np.asfortranarray(array), datatype) == text
        assert to_json(array[:, ::-1], datatype) == to_json(np.ascontiguousarray(array[:, ::-1]), datatype)
        long = np.tile(array.ravel(), 20_000)
        assert to_json(long, datatype) == b"[%b]" % b",".join([text[1:-1]] * 20_000)
        assert to_json(array[:0], datatype) == b"[]"
    assert to_json(np.array([0.1], ">f2"), "FP16") == b"[0.1]"


def test_singles_of_every_magnitude_are_written_as_numpy_writes_them() -> None:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    powers = np.repeat((2.0 ** np.arange(-149, 128)).astype(np.float32), 3)
    near = powers.view(np.uint32) + np.tile(np.array([-1, 0, 1]), len(powers) // 3).astype(np.uint32)
    decimals = (np.arange(20_000) / 1000).astype(np.float32)
    ordinary = (10 ** rng.uniform(-14, 8, 20_000)).astype(np.float32)
    for array in (bits, near.view(np.float32), decimals, -ordinary):
        finite = array[np.isfinite(array)]
        data = json.loads(to_json(finite, "FP32"))
        assert data == [float(text) for text in finite.astype("S24")]
        assert same(from_json("FP32", finite.shape, data, "x"), finite)


def test_a_signalling_nan_is_no_warning() -> None:
    array = np.full(200, 0x7F800001, np.uint32).view(np.float32)
    assert set(json.loads(to_json(array, "FP32"))) == {None}
    assert json.loads(to_json(array[:2], "FP32")) == [None, None]


def test_bytes_that_are_not_text_ask_for_binary_data() -> None:
    assert "binary_data" in refusal(to_json, np.array([b"\xff"], object), "BYTES")


# Shapes


@pytest.mark.parametrize("shape", [None, 3, "1", {}, [-1], ["1"], [1.0], [True], [None], [[1]], [1] * 17])
def test_a_shape_is_at_most_16_integers_from_0(shape: object) -> None:
    assert "'x'" in refusal(check_shape, shape, "x")
    assert check_shape([0, 1, 2**70], "x") == (0, 1, 2**70)
    assert check_shape([1] * 16, "x") == (1,) * 16
    assert check_shape([], "x") == ()


def test_an_error_repeats_little_of_what_came() -> None:
    long = "\U0010ffff" * 10_000
    for call in (
        lambda: check_shape(long, long),
        lambda: check_shape([long], long),
        lambda: from_json("FP32", (1,), [long], long),
        lambda: from_json("FP32", (10**4000,) * 3, [1], long),
        lambda: from_json("INT8", (1,), [10**4000], long),
        lambda: decode_binary("FP32", (10**4000,), memoryview(b""), long),
    ):
        assert len(refusal(call)) < 300


# Properties


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, *, text: bool = False) -> tuple[str, Array]:
    datatype = draw(st.sampled_from(list(DATATYPES)))
    shape = draw(SHAPES)
    count = math.prod(shape)
    if datatype == "BYTES":
        elements = st.text(max_size=5).map(str.encode) if text else st.binary(max_size=5)
        array = np.empty(count, object)
        array[:] = draw(st.lists(elements, min_size=count, max_size=count))
        return datatype, array.reshape(shape)
    size = count * DATATYPES[datatype].itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    array = np.frombuffer(bytes(byte & 1 for byte in data) if datatype == "BOOL" else data, DATATYPES[datatype])
    return datatype, array.reshape(shape)


@settings(max_examples=300)
@given(tensors())
def test_binary_data_round_trips_to_the_bit(tensor: tuple[str, Array]) -> None:
    datatype, array = tensor
    data = b"".join(encode_binary(array, datatype))
    again = decode(datatype, array.shape, data)
    assert same(again, array)
    assert b"".join(encode_binary(again, datatype)) == data


@settings(max_examples=300)
@given(tensors(text=True), st.booleans())
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # the test itself casts signalling NaN
def test_json_round_trips_but_for_infinity(tensor: tuple[str, Array], nest: bool) -> None:
    datatype, array = tensor
    if datatype in FLOATS:
        array = np.where(np.isinf(array.astype(np.float64)), np.array(1, array.dtype), array).reshape(array.shape)
    data = json.loads(to_json(array, datatype))
    if nest and array.ndim and array.size:
        data = np.array(data, object).reshape(array.shape).tolist()
    assert same(from_json(datatype, array.shape, data, "x"), array)


JSON_DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@settings(max_examples=400)
@given(st.sampled_from(list(DATATYPES)), SHAPES, JSON_DATA, st.binary(max_size=40))
def test_garbage_raises_nothing_but_v2_errors(datatype: str, shape: tuple[int, ...], data: Any, binary: bytes) -> None:
    with suppress(V2Error):
        assert from_json(datatype, shape, data, "x").shape == shape
    with suppress(V2Error):
        assert decode(datatype, shape, binary).shape == shape
    with suppress(V2Error):
        check_shape(data, "x")


# The fast ways


NUMBERS = st.integers(-300, 300) | st.floats(-300, 300) | st.sampled_from(
    [2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 10**400, 65519.9, 65520, 3.4e38, 3.4028236e38, 1e308, 1e-45, -0.0, 1.0, 255]
)  # fmt: skip


@settings(max_examples=400)
@given(st.sampled_from(list(DATATYPES)), st.lists(NUMBERS, max_size=6), st.sampled_from([None, 1, 2]), st.integers(0, 1))
def test_numbers_are_read_alike_whether_their_kind_was_seen_to_or_not(
    datatype: str, values: list[Any], row: int | None, off: int
) -> None:
    shape: tuple[int, ...] = (len(values) + off,)
    data: list[Any] = values
    if row is not None:
        shape = (len(values) // row, row)
        data = [values[at : at + row] for at in range(0, len(values), row)]
    found: list[object] = []
    for numbers in (False, True):
        try:
            array = from_json(datatype, shape, data, "x", numbers=numbers)
            found.append((array.dtype, array.shape, array.tobytes(), array.flags.writeable))
        except V2Error as error:
            found.append(error.message)
    assert found[0] == found[1]


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "INT32", "UINT64"])
def test_many_numbers_are_read_as_numpy_would(datatype: str) -> None:
    values: list[Any] = [(n * 37 % 1001) / (8 if datatype[0] == "F" else 1) for n in range(10_001)]
    if datatype[0] != "F":
        values = list(map(int, values))
    for numbers in (True, False):
        array = from_json(datatype, (73, 137), values, "x", numbers=numbers)
        assert same(array, np.array(values, DATATYPES[datatype]).reshape(73, 137))
        assert not array.flags.writeable
        assert "at element 10000" in refusal(from_json, datatype, (10_001,), [*values[:-1], 10**400], "x", numbers=numbers)


@pytest.mark.parametrize("wrong", [True, None, "1", [1]])
def test_packing_hides_no_wrong_element(wrong: object) -> None:
    for datatype in (*FLOATS, *INTEGERS):
        data = [1.0 if datatype in FLOATS else 1] * 5000
        if wrong is not None or datatype in INTEGERS:
            assert "at element 4999" in refusal(from_json, datatype, (5000,), [*data[:-1], wrong], "x")


def shortest(array: Array) -> list[Decimal | None]:
    """The decimals of the shortest texts of singles or halves, as numpy writes them; None for what JSON has no number for."""
    texts = array.astype("S24").tolist()
    return [Decimal(text.decode()) if np.isfinite(float(text)) else None for text in texts]


def written(array: Array, datatype: str) -> list[Decimal | None]:
    found: list[Decimal | None] = json.loads(to_json(array, datatype), parse_float=Decimal)
    return found


@settings(max_examples=400)
@given(
    st.sampled_from(["FP32", "FP16"]),
    st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 2**31, 0x7F800000, 0x7F800001, 0xFFC00000]), max_size=4),
    st.lists(st.integers(-(10**7), 10**7), max_size=4),
    st.integers(-12, 6),
    st.sampled_from([1, 20, 600]),
)
def test_singles_however_few_or_many_are_written_as_numpy_writes_them(
    datatype: str, bits: list[int], decimals: list[int], power: int, times: int
) -> None:
    with np.errstate(all="ignore"):
        values = np.concatenate([
            np.array(bits, np.uint32).view(np.float32),
            np.array([float(f"{decimal}e{power}") for decimal in decimals], np.float32),
        ]).astype(DATATYPES[datatype])  # fmt: skip
        expected = shortest(values)
    assert written(values, datatype) == expected
    assert written(np.tile(values, times), datatype) == expected * times


def test_singles_next_to_powers_of_two_and_ten_are_written_as_numpy_writes_them() -> None:
    decimals = np.array([float(f"1e{power}") for power in range(-46, 39)], np.float32).view(np.uint32)
    binaries = (2.0 ** np.arange(-149, 128)).astype(np.float32).view(np.uint32)
    for edges in (decimals, binaries):
        near = (edges.astype(np.int64)[:, None] + np.arange(-3, 4)).clip(0, 2**31).astype(np.uint32).reshape(-1)
        for singles in (near.view(np.float32), -near.view(np.float32)):
            assert written(singles, "FP32") == shortest(singles)


@pytest.mark.parametrize(
    "array", [np.array([[1.0, 2.0]]).view(np.matrix), np.ma.array([[1.0, 2.0]]), np.array([[1.0, 2.0]]).view(np.recarray)]
)
def test_an_array_of_another_class_is_written_as_what_it_holds(array: Array) -> None:
    assert to_json(array, "FP64") == b"[1.0,2.0]"
    assert b"".join(encode_binary(array, "FP64")) == struct.pack("<2d", 1, 2)


@pytest.mark.parametrize("write", [to_json, encode_binary])
def test_an_element_without_a_value_is_not_written(write: Any) -> None:
    assert "numpy.ma.filled" in refusal(write, np.ma.array([1.0, 2.0], mask=[False, True]), "FP64", status=500)
