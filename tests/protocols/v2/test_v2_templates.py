"""A request that differs from an earlier one in its numbers alone is read by it, and means what the rules make of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocols.v2 import InferCodec, ModelSignature, TensorSpec, V2Limits
from protocols.v2 import codec as v2_codec
from protocols.v2 import numbers as v2_numbers
from protocols.v2 import plans as v2_plans
from tests.protocols.v2.grammar.v2_outcome import described, outcome, parse_both_ways

ANY = ModelSignature(name="m")
ONE = ModelSignature(name="m", inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),))
KINDS = ["FP32", "FP64", "FP16", "INT8", "INT64", "UINT8", "UINT64", "BF16", "BOOL", "BYTES"]


def body(data: bytes, datatype: str = "FP32", shape: bytes = b"[1,4]", more: bytes = b"") -> bytes:
    return b'{"inputs":[{"name":"x","datatype":"%b","shape":%b,"data":%b}]%b}' % (datatype.encode(), shape, data, more)


def learned(text: bytes, signature: ModelSignature = ANY, limits: V2Limits | None = None) -> InferCodec:
    """A codec that has seen the text twice."""
    codec = InferCodec(signature, limits=limits or V2Limits())
    for _ in range(2):
        outcome(codec.parse, text, None)
    return codec


def templates(codec: InferCodec) -> list[v2_plans.Plan]:
    return [plan for plan in codec._texts.values() if plan is not None]


def agree(codec: InferCodec, text: bytes, signature: ModelSignature = ANY, limits: V2Limits | None = None) -> Any:
    expected = outcome(parse_both_ways, text, None, signature, limits or V2Limits())
    for _ in range(3):
        assert outcome(codec.parse, text, None) == expected
    return expected


@pytest.mark.parametrize(
    "more",
    [b"", b',"outputs":[{"name":"y","parameters":{"binary_data":true}}]', b',"parameters":{"binary_data_output":true}'],
)
@pytest.mark.parametrize("shape", [b"[1,4]", b"[4]", b"[2, 2]", b"[1,1,4]"])
def test_the_third_request_is_read_by_what_the_first_two_showed(shape: bytes, more: bytes) -> None:
    codec = learned(body(b"[1,2,3,4]", shape=shape, more=more))
    (template,) = templates(codec)
    other = body(b"[ 0.5,-0.0, 1e-3,\n16777217 ]", shape=shape, more=more)
    read = template.read_text(other)
    assert read is not None
    assert described(read) == agree(codec, other)


def test_rows_are_read_too_where_they_are_nested_as_the_shape_says() -> None:
    codec = learned(body(b"[[1,2],[3,4]]", shape=b"[2,2]"))
    (template,) = templates(codec)
    for data, readable in ((b"[[5,6],[7,8]]", True), (b"[5,6,7,8]", True), (b"[[5,6,7,8]]", False), (b"[5,[6,7,8]]", False)):
        text = body(data, shape=b"[2,2]")
        assert (template.read_text(text) is not None) == readable
        agree(codec, text)


def test_several_inputs_have_their_numbers_in_their_own_places() -> None:
    one = '{"inputs":[{"name":"a","shape":[2],"datatype":"INT64","data":[1,2]},{"name":"b","data":[[3.5]],"shape":[1,1],"datatype":"FP64"}]}'
    codec = learned(one.encode())
    (template,) = templates(codec)
    other = one.replace("[1,2]", "[-9, 8]").replace("[[3.5]]", "[7]").encode()
    read = template.read_text(other)
    assert read is not None
    assert [tensor.array.tolist() for tensor in read.inputs] == [[-9, 8], [[7.0]]]
    agree(codec, other)
    for text in (one.replace("[1,2]", "[1,2],[1,2]"), one.replace('"b"', '"a"'), one.replace("[1,2]", "[1.5,2]")):
        agree(codec, text.encode())


@pytest.mark.parametrize(
    "data",
    [b"[1,2,3]", b"[1,2,3,4,5]", b"[]", b"[1,2,3,4", b"1,2,3,4]", b"[1,2,3,4,]", b"[1,,3,4]", b"[1 2 3 4]", b"[1,2,3,null]", b"[1,2,3,NaN]",
     b"[1,2,3,-Infinity]", b"[1,2,3,true]", b'[1,2,3,"4"]', b"[1,2,3,{}]", b"[[1,2,3,4]]", b"[[1,2],[3,4]]", b"[[[1,2,3,4]]]", b"[1,2,3,4]]", b"[1,2],[3,4]",
     b"[01,2,3,4]", b"[1.,2,3,4]", b"[.5,2,3,4]", b"[+1,2,3,4]", b"[1e39,2,3,4]", b"[1e400,2,3,4]", b"[3.4028235677973366e38,2,3,4]", b"[3.4028235677973365e38,2,3,4]",
     b"[0x1,2,3,4]", b"[1e5,2,3,4]", b"[1,2,3,4]\xff", b"[1,2,3,\xff]", b"\xef\xbb\xbf[1,2,3,4]", b"[1,2,3,4]}", b'[1,2,3,4],"data":[5,6,7,8]',
     b'[1,2,3,4],"d\\u0061ta":[5,6,7,8]', b'[1,2,3,4],"shape":[4]', b"5", b"null", b'"[1,2,3,4]"', b'[1,2,3,4]},{"name":"y","datatype":"FP32","shape":[1],"data":[5]',
     b"[" + b"9" * 5000 + b",2,3,4]", b"[-1" + b"0" * 38 + b",2,3,4]", b"[" * 5000, b"[1,2,3,4" + b"]" * 5000],
)  # fmt: skip
def test_unusual_data_is_what_the_rules_make_of_it(data: bytes) -> None:
    for first in (b"[1,2,3,4]", b"[[1,2,3,4]]"):
        agree(learned(body(first)), body(data))


@pytest.mark.parametrize("digits", [395, 399, 400, 401, 402])
def test_a_number_may_have_400_characters_and_no_more(digits: int) -> None:
    codec = learned(body(b"[1,2,3,4]"))
    number = b"2." + b"0" * (digits - 2)
    result = agree(codec, body(b"[1,2,3,%b]" % number))
    assert (result[0] == 400) == (digits > 400)
    assert isinstance(agree(codec, body(b"[1,2,3," + b" " * 500 + b"4]"))[2], list)


def test_the_limit_of_json_is_that_of_each_text() -> None:
    text = body(b"[1,2,3,4]")
    limits = V2Limits(json=len(text))
    codec = learned(text, limits=limits)
    assert templates(codec)
    agree(codec, text, limits=limits)
    assert agree(codec, body(b"[1,2,3,40]"), limits=limits)[0] == 413


def test_text_around_the_data_that_differs_in_one_byte_is_read_anew() -> None:
    text = body(b"[1,2,3,4]", more=b',"outputs":[{"name":"y"}]')
    codec = learned(text)
    data = text.index(b"[1,2,3,4]")
    for at in range(len(text)):
        if not data <= at < data + 9:
            for piece in (b"", b" ", b'"', b"5"):
                agree(codec, text[:at] + piece + text[at + 1 :])
        agree(codec, text[:at])


@pytest.mark.parametrize("tail", [b" ", b"x", b"}", b"{}", b"\x00", b"\xff", b',"id":"7"}'])
def test_a_text_ends_where_the_earlier_one_did(tail: bytes) -> None:
    text = body(b"[1,2,3,4]")
    for wrong in (text + tail, text[:-1] + tail, text + tail + text[-3:]):
        agree(learned(text), wrong)


def test_a_text_that_breaks_off_is_not_read_for_its_length() -> None:
    codec = learned(body(b"[1,2,3,4]", more=b" " * 300))
    (template,) = templates(codec)
    after = template.numbers[0][-1]
    for length in range(len(after) - 3, len(after) + 2):
        agree(codec, (template.before + b"[1,2,3,4]").ljust(length) + b"x")


@pytest.mark.parametrize(
    "text",
    [
        # the same array as a shape, in names, behind escapes, and under the name of another member
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[2,2]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}',
        b'{"inputs":[{"name":"[1]","datatype":"FP32","shape":[1,1],"data":[1]}]}',
        b'{"inputs":[{"name":"\\"data\\":[1]","datatype":"FP32","data":[1],"shape":[1,1]}]}',
        b'{"inputs":[{"name":"\\\\","datatype":"FP32","shape":[1,1],"data":[1]}],"outputs":[{"name":"[1]"},{"name":"\\"data\\":[1]"}]}',
        b'{"model_name":"data","inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}]}',
        b'{"model_name":"data","inputs":[{"name":"[1]","datatype":"FP32","shape":[1,1],"data":[1]}]}',
        b'{"model_name":"data","inputs":[{"data":[1.0],"name":"data","datatype":"FP32","shape":[1]}]}',
        b'{"outputs":[{"name":"data"},{"name":"[1.0]"}],"inputs":[{"d\\u0061ta":[1.0],"name":"x","datatype":"FP32","shape":[1]}]}',
        b'{"inputs":[{"data":[1.0],"name":"a","datatype":"FP32","shape":[1]},{"data":[1.0],"name":"b","datatype":"FP32","shape":[1]}]}',
        b'{"inputs":[{"name":"a[5]","shape":[5],"datatype":"INT8","data":[1,2,3,4,5]},{"name":"b","shape":[1],"data":[5],"datatype":"INT8"}]}',
    ],
)
def test_the_place_of_the_data_is_proved_and_not_guessed(text: bytes) -> None:
    codec = learned(text)
    for template in templates(codec):
        read = template.read_text(text)
        assert read is not None
        assert described(read) == outcome(parse_both_ways, text, None, ANY)
    for old in (b"[1]", b"[1.0]", b"[2,2]", b"[2]", b"[5]"):
        for new in (b"[1]", b"[7]", b"[7.5]", b"[3,4]", b"[-0]"):
            at = text.find(old)
            while at >= 0:
                agree(codec, text[:at] + new + text[at + len(old) :])
                at = text.find(old, at + 1)


@pytest.mark.parametrize(
    "text",
    [
        body(b"[1,2,3,4]", more=b',"id":"secret"'), body(b"[1,2,3,4]", more=b',"parameters":{"secret":1}'), body(b"[1,2,3,4],\"parameters\":{\"secret\":1}"),
        b'{"parameters":{"secret":1},' + body(b"[1,2,3,4]")[1:], b'{"id":"secret",' + body(b"[1,2,3,4]")[1:], b'{"secret":1,' + body(b"[1,2,3,4]")[1:],
        b'{"outputs":[{"name":"y","parameters":{"secret":1}}],' + body(b"[1,2,3,4]")[1:],
        b'{"outputs":[{"name":"y","parameters":{"binary_data":true,"secret":1}}],' + body(b"[1,2,3,4]")[1:],
        body(b"[1,2,3,4]").replace(b'"shape"', b'"parameters":{"secret":1},"shape"'),
        body(b'["secret","b","c","d"]', "BYTES"), body(b'[1,2,3,4],"name":"secret"'),
    ],
)  # fmt: skip
def test_what_is_a_clients_own_leaves_no_trace(text: bytes) -> None:
    codec = learned(text)
    assert not codec._texts
    agree(codec, text)


def test_what_is_remembered_is_bounded() -> None:
    codec = InferCodec(ANY)
    for n in range(3 * v2_codec._KEPT):
        for _ in range(2):
            codec.parse(body(b"[1,2,3,4]").replace(b'"x"', b'"x%d"' % n), None)
        assert len(codec._texts) <= v2_codec._KEPT
    for long in (body(b"[1,2,3,4]").replace(b'"x"', b'"%b"' % (b"x" * 1024)), body(b"[1,2,3,4]", more=b" " * 1024)):
        assert not templates(learned(long))
    many = body(b"[%b]" % b",".join([b"0"] * 4097), shape=b"[4097]")
    assert not templates(learned(many))
    assert not templates(learned(body(b"[]", shape=b"[0]")))


def test_two_requests_that_are_alike_before_their_data_do_not_disturb_each_other() -> None:
    texts = [b'{"inputs":[{"data":[1,2],"name":"%b","datatype":"FP32","shape":[2]}]}' % name for name in (b"a", b"b")]
    codec = InferCodec(ANY)
    for text in texts * 4:
        assert outcome(codec.parse, text, None) == outcome(parse_both_ways, text, None, ANY)


def test_many_numbers_in_a_short_text_are_read_by_a_plan_too_and_unusual_ones_by_the_rules() -> None:
    shape = b"[700]"
    text = body(b"[%b]" % b",".join([b"1.5"] * 700), shape=shape)
    assert v2_numbers.FAST_FROM < len(text) <= v2_plans.LONGEST_TEXT
    codec = learned(text)
    (plan,) = templates(codec)
    for number, readable in ((b"2.5", True), (b"-1", True), (b"NaN", True), (b'"a"', False), (b"1e999", False)):
        other = text.replace(b"1.5", number, 1)
        assert (plan.read_text(other) is not None) == readable
        agree(codec, other)


def test_a_longer_text_has_no_plan_and_is_read_as_ever() -> None:
    longest = v2_plans.LONGEST_TEXT
    text = body(b"[1,2,3,4]")
    for size, remembered in ((longest, 1), (longest + 1, 0)):
        padded = text.replace(b"[1,2,3,4]", b"[1,2,3,4%b]" % (b" " * (size - len(text))))
        codec = learned(padded)
        assert len(templates(codec)) == remembered
        agree(codec, padded)


NUMBERS = st.one_of(
    st.integers(-300, 300).map(str),
    st.integers().map(str),
    st.sampled_from([-(2**63) - 1, -(2**63), 2**63, 2**64 - 1, 2**64, 2**24 + 1, 2**53 + 1, 65504, 65520, 10**38, 10**39, 10**400]).map(str),
    st.floats(width=32).map(repr),
    st.floats().map(repr),
    st.sampled_from(["-0", "-0.0", "0e0", "1E5", "1.0", "1e+2", "2.5e-7", "1e-400", "65519.99", "1.00000005960464477540", "null", "true", "NaN", "-Infinity", "", "1.", "-", "[1]", '"1"']),
)  # fmt: skip
SPACES = st.sampled_from(["", "", "", " ", "\n", "\t ", "\r", "\x00"])
FIRSTS = ["[1, 2, 3, 4]", "[[1, 2, 3, 4]]"]


@settings(max_examples=600)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(FIRSTS),
    st.lists(st.tuples(SPACES, NUMBERS), min_size=3, max_size=5)
    | st.lists(st.tuples(SPACES, NUMBERS), min_size=4, max_size=4),
    st.sampled_from([("[", "]"), ("[", "]"), ("[[", "]]"), ("[ [", "] ]"), ("[", ""), ("", "]")]),
    st.lists(st.tuples(st.integers(0, 140), st.integers(0, 3), st.sampled_from([b"", b"]", b"[", b",", b'"', b"1", b"}", b'"data":[5],', b"\\u0061"])), max_size=1),
    st.sampled_from([ANY, ONE]),
)  # fmt: skip
@example("FP16", FIRSTS[0], [("", "65519.99")] * 4, ("[", "]"), [], ANY)
def test_templates_and_the_rules_agree_on_any_numbers(
    datatype: str,
    first: str,
    numbers: list[tuple[str, str]],
    brackets: tuple[str, str],
    edits: list[tuple[int, int, bytes]],
    signature: ModelSignature,
) -> None:
    codec = learned(body(first.encode(), datatype), signature)
    data = brackets[0] + ",".join(space + number for space, number in numbers) + brackets[1]
    text = body(data.encode(), datatype)
    for at, drop, piece in edits:
        text = text[:at] + piece + text[at + drop :]
    agree(codec, text, signature)


def test_a_template_reads_what_json_writers_write() -> None:
    for separators in ((",", ":"), (", ", ": ")):
        entry = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0.1, 2, -3.25, 1e-7]}
        text = json.dumps({"inputs": [entry], "outputs": [{"name": "y"}]}, separators=separators).encode()
        (template,) = templates(learned(text))
        assert template.read_text(text) is not None
