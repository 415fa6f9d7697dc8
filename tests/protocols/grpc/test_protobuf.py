"""The wire format of proto3: golden bytes of protobuf.dev, every rule of a reader, and nothing but ProtobufError for garbage."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.grpc.protobuf import (
    FieldType,
    MessageType,
    ProtobufError,
    Room,
    encode_field,
    encode_varint,
    fields,
    read_varint,
    to_signed,
)

INNER = MessageType(
    "Inner", {1: FieldType("a", "int32"), 2: FieldType("b", "string"), 3: FieldType("c", "int64", repeated=True)}
)
ALL = MessageType(
    "All",
    {
        1: FieldType("flag", "bool"),
        2: FieldType("small", "int32"),
        3: FieldType("large", "int64"),
        4: FieldType("count", "uint32"),
        5: FieldType("size", "uint64"),
        6: FieldType("single", "float"),
        7: FieldType("double", "double"),
        8: FieldType("text", "string"),
        9: FieldType("data", "bytes"),
        10: FieldType("kind", "enum"),
        11: FieldType("numbers", "int32", repeated=True),
        12: FieldType("texts", "string", repeated=True),
        13: FieldType("inner", INNER),
        14: FieldType("inners", INNER, repeated=True),
        15: FieldType("map", INNER, key="string"),
        16: FieldType("counts", "uint32", key="int64"),
        17: FieldType("either", "string", oneof="choice"),
        18: FieldType("other", INNER, oneof="choice"),
        19: FieldType("doubles", "double", repeated=True),
        20: FieldType("bools", "bool", repeated=True),
    },
)
VALUES: dict[str, Any] = {
    "flag": True, "small": -2, "large": -(2**63), "count": 2**32 - 1, "size": 2**64 - 1, "single": 0.5, "double": -0.0, "text": "é",
    "data": b"\xff", "kind": 3, "numbers": [1, -1, 300], "texts": ["", "b"], "inner": {"a": 1, "b": "", "c": []},
    "inners": [{"a": 0, "b": "", "c": []}, {"a": 0, "b": "x", "c": [1, 2]}], "map": {"": {"a": 7, "b": "", "c": []}},
    "counts": {-1: 0, 5: 6}, "other": {"a": 0, "b": "", "c": []}, "doubles": [1.0, math.inf], "bools": [True, False],
}  # fmt: skip
DEFAULTS = ALL.read(b"")


def read(hexed: str, table: MessageType = ALL) -> dict[str, Any]:
    """The fields of a message that are not the default."""
    found = table.read(bytes.fromhex(hexed)).items()
    return {name: value for name, value in found if repr(value) != repr(DEFAULTS.get(name))}  # -0.0 is not the default


def refusal(hexed: str, table: MessageType = ALL) -> str:
    with pytest.raises(ProtobufError) as caught:
        table.read(bytes.fromhex(hexed))
    return str(caught.value)


# Golden bytes


def test_the_examples_of_the_encoding_guide() -> None:
    assert INNER.read(bytes.fromhex("089601")) == {"a": 150, "b": "", "c": []}
    assert INNER.write({"a": 150}) == bytes.fromhex("089601")
    assert INNER.write({"b": "testing"}) == bytes.fromhex("120774657374696e67")
    assert INNER.write({"c": [3, 270, 86942]}) == bytes.fromhex("1a06038e029ea705")
    assert INNER.write({"a": -2}) == bytes.fromhex("08feffffffffffffffff01")
    assert INNER.read(bytes.fromhex("08feffffffffffffffff01"))["a"] == -2


@pytest.mark.parametrize(
    ("values", "wire"),
    [
        ({"single": 1.5}, "350000c03f"),
        ({"double": -0.0}, "390000000000000080"),
        ({"inner": {}}, "6a00"),
        ({"inners": [{}, {"a": 1}]}, "720072020801"),
        ({"map": {"k": {"a": 1}}}, "7a070a016b12020801"),
        ({"counts": {5: 0}}, "8201020805"),
        ({"either": ""}, "8a0100"),
        ({"texts": ["", "b"]}, "6200620162"),
        ({"bools": [True, False]}, "a201020100"),
    ],
)
def test_each_form_has_its_bytes(values: dict[str, Any], wire: str) -> None:
    assert ALL.write(values).hex() == wire
    assert ALL.write(read(wire)).hex() == wire


def test_what_is_written_reads_back() -> None:
    assert ALL.read(ALL.write(VALUES)) == VALUES
    assert ALL.read(memoryview(ALL.write(VALUES))) == VALUES


def test_defaults_are_not_on_the_wire_and_none_is_absence() -> None:
    assert ALL.write(DEFAULTS) == b""
    assert ALL.write({"inner": None, "text": None}) == b""
    assert "inner" not in DEFAULTS
    assert "either" not in DEFAULTS


# The rules of a reader


@pytest.mark.parametrize(
    ("wire", "values"),
    [
        ("10011002", {"small": 2}),  # the last value of a singular field wins
        ("6a0208016a0212006a041a020102", {"inner": {"a": 1, "b": "", "c": [1, 2]}}),  # singular messages merge
        ("5801580258ffffffffffffffffff01", {"numbers": [1, 2, -1]}),  # not packed
        ("5a0101580258035a020405", {"numbers": [1, 2, 3, 4, 5]}),  # in pieces of both kinds
        ("5a00", {}),
        ("42016142016208011a00", {"text": "b", "flag": True}),  # any order; field 3 of another wire type is skipped
        ("080008ffffffffffffffffff01", {"flag": True}),
        ("0882808080808080808000", {"flag": True}),  # a varint need not be as short as it can be
        ("1085808080 10", {"small": 5}),  # an int32 takes the low 32 bits
        ("10ffffffff0f", {"small": -1}),
        ("208580808010", {"count": 5}),
        ("28ffffffffffffffffff7f", {"size": 2**64 - 1}),  # a varint of ten bytes gives 64 bits
        ("50feffffffffffffffff01", {"kind": -2}),  # enums are open
        ("8a01016192010208019a0100", {"other": {"a": 1, "b": "", "c": []}}),  # the last member of a oneof
        ("92010208018a0101619201021000", {"other": {"a": 0, "b": "", "c": []}}),  # a member that was replaced does not merge
        ("920102080192010312016292 0100", {"other": {"a": 1, "b": "b", "c": []}}),
        ("7a00", {"map": {"": {"a": 0, "b": "", "c": []}}}),  # an entry without key and value
        ("7a050a016b1a007a030a016b", {"map": {"k": {"a": 0, "b": "", "c": []}}}),
        ("7a0b120208010a016b12020802", {"map": {"k": {"a": 2, "b": "", "c": []}}}),  # value before key, twice
        ("82010410010801820104080110 02", {"counts": {1: 2}}),  # the last value of a key wins
        ("a00601a10601020304050607 08a2060161a50601020304", {}),  # unknown fields of each wire type
        ("0d010203040801", {"flag": True}),  # a known number of another wire type
    ],
)
def test_a_reader_keeps_the_rules(wire: str, values: dict[str, Any]) -> None:
    assert read(wire) == values


@pytest.mark.parametrize(
    ("wire", "said"),
    [
        ("08", "a varint is cut off"),
        ("0880", "a varint is cut off"),
        ("88", "a varint is cut off"),
        ("08ffffffffffffffffffff01", "a varint has more than ten bytes"),
        ("42", "a varint is cut off"),
        ("420561", "field 8 has 5 bytes, only 1 are left of its message"),
        ("42ffffffff0f", "a length is at most 2147483647, got 4294967295"),
        ("42ffffffff07", "field 8 has 2147483647 bytes, only 0 are left of its message"),
        ("35000000", "field 6 has 4 bytes, only 3 are left of its message"),
        ("3900", "field 7 has 8 bytes, only 1 are left of its message"),
        ("0001", "a field has the number 0"),
        ("80000001", "a field has the number 0"),
        ("888080808000 01", "a tag is a number of 32 bits in at most five bytes"),
        ("888080808010 01", "a tag is a number of 32 bits in at most five bytes"),
        ("0b0c", "field 1 has the wire type 3, which proto3 does not have"),
        ("0c", "field 1 has the wire type 4, which proto3 does not have"),
        ("0e", "field 1 has the wire type 6, which proto3 does not have"),
        ("a706", "field 100 has the wire type 7, which proto3 does not have"),
        ("4201ff", "a string is not UTF-8"),
        ("4203eda080", "a string is not UTF-8"),  # a surrogate
        ("5a0180", "a varint is cut off"),
        ("9a0104 00000000", "packed numbers of 8 bytes have 4 bytes"),
        ("6a0312056100", "field 2 has 5 bytes, only 1 are left of its message"),  # past the end of its own message
    ],
)
def test_what_is_no_message_is_refused(wire: str, said: str) -> None:
    assert refusal(wire) == said


def test_every_truncation_is_a_message_of_fewer_fields_or_refused() -> None:
    data = ALL.write(VALUES)
    ends = {0} | {end for _, _, end in fields(memoryview(data), Room(10**6))}
    for size in range(len(data)):
        if size in ends:
            ALL.read(data[:size])
        else:
            with pytest.raises(ProtobufError):
                ALL.read(data[:size])


def test_values_are_counted_before_they_are_made() -> None:
    assert len(ALL.read(b"\x5a\x05" + bytes(5), values=6)["numbers"]) == 5
    for wire in ("5a06000000000000", "62006200620062006200 6200", "7200" * 6, "7a00" * 6, "5800" * 6):
        with pytest.raises(ProtobufError, match="too many fields"):
            ALL.read(bytes.fromhex(wire), values=5)


def test_messages_are_nested_to_a_bound() -> None:
    table = MessageType("Tree", {2: FieldType("value", "int32")})
    table = MessageType("Tree", {1: FieldType("child", table), 2: FieldType("value", "int32")})
    table._by_tag[0x0A] = (FieldType("child", table), False)  # a message within itself
    data = b""
    for _ in range(100):
        data = encode_field(1, data)
    table.read(data)
    with pytest.raises(ProtobufError, match="nested deeper than 100"):
        table.read(encode_field(1, data))


# Writing


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nothing": 1}, "All has no field 'nothing'"),
        ({"small": 2**31}, "All.small is int32, which 2147483648 does not fit"),
        ({"count": -1}, "All.count is uint32, which -1 does not fit"),
        ({"size": 2**64}, "All.size is uint64"),
        ({"large": "1"}, "All.large is int64, which '1' does not fit"),
        ({"text": b"a"}, "All.text is string"),
        ({"text": "\ud800"}, "All.text is string"),
        ({"data": "a"}, "All.data is bytes"),
        ({"single": 1e300}, "All.single is float"),
        ({"double": "x"}, "All.double is double"),
        ({"inner": {"a": 2**40}}, "Inner.a is int32"),
        ({"map": {1: {}}}, "All.map.key is string"),
    ],
)
def test_a_value_that_does_not_fit_is_an_error(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        ALL.write(values)
    assert str(caught.value).startswith(said)


@given(st.integers(min_value=0, max_value=2**64 - 1))
@settings(max_examples=100)
def test_varints_read_back(value: int) -> None:
    wire = encode_varint(value)
    assert read_varint(wire, 0) == (value, len(wire))
    assert len(wire) == max(1, (value.bit_length() + 6) // 7)
    assert to_signed(value) % 2**64 == value


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_garbage_is_a_message_or_a_protobuf_error(data: bytes) -> None:
    try:
        found = ALL.read(data)
    except ProtobufError:
        return
    ALL.write(found)


def test_a_table_says_which_message_it_is() -> None:
    assert repr(INNER) == "<message Inner>"
