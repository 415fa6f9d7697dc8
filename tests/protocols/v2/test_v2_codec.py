"""The codec of one model answers as `parse_infer` and `render_infer` do, and remembers little."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocols.v2 import (
    NO_PARAMETERS,
    InferCodec,
    ModelSignature,
    TensorSpec,
    V2Error,
    V2Limits,
    V2Request,
    V2Tensor,
    WantedOutput,
    render_infer,
    typed_request,
)
from protocols.v2 import codec as v2_codec
from protocols.v2 import numbers as json_numbers
from protocols.v2.numbers import apart_from_numbers
from protocols.v2.tensors import DATATYPES
from tests.protocols.v2.grammar.v2_outcome import described, outcome, parse_both_ways

ANY = ModelSignature(name="m")
ONE = ModelSignature(
    name="m",
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1,)),),
)
BATCHED = ModelSignature(name="m", inputs=(TensorSpec(name="x", datatype="FP32", shape=(4,)),), max_batch_size=2)
USUAL = V2Limits()
TIGHT = V2Limits(json=220, depth=4, tensors=1, dims=2)


def head(*inputs: dict[str, Any], **members: Any) -> bytes:
    return json.dumps({"inputs": inputs, **members}).encode()


def entry(
    size: float | None = 16, shape: Any = (1, 4), datatype: str = "FP32", name: str = "x", **members: Any
) -> dict[str, Any]:
    parameters = {} if size is None else {"parameters": {"binary_data_size": size}}
    return {"name": name, "datatype": datatype, "shape": shape, **parameters, **members}


def agree(body: bytes, length: int | None, signature: ModelSignature = ANY, limits: V2Limits = USUAL) -> Any:
    """Returns the outcome of a body by the rules, and checks that the codec has the same, the first time and later."""
    expected = outcome(parse_both_ways, body, length, signature, limits)
    codec = InferCodec(signature, limits=limits)
    for _ in range(3):
        assert outcome(codec.parse, body, length) == expected
    return expected


DATA = np.arange(4, dtype=np.float32).tobytes()
BINARY = head(entry(), outputs=[{"name": "y", "parameters": {"binary_data": True}}])


# Bodies for the typed reader, and bodies for the rules


@pytest.mark.parametrize(
    "members",
    [{}, {"id": "7"}, {"id": ""}, {"model_name": "m"}, {"parameters": {"binary_data_output": True, "k": 1.5}}, {"outputs": []}, {"outputs": [{"name": "y"}]}, {"parameters": {}}],
)  # fmt: skip
def test_the_common_shape_is_read_by_the_typed_reader(members: dict[str, Any]) -> None:
    for tensor, data in ((entry(), DATA), (entry(None, data=[1, 2.5, -3, 0]), b""), (entry(None, data=[[1, 2, 3, 4]]), b"")):
        body = head(tensor, **members)
        assert typed_request.read_typed(body, memoryview(data), ONE) is not None
        assert described(parse_both_ways(body + data, len(body), ONE)) == agree(body + data, len(body), ONE)


@pytest.mark.parametrize(
    "body",
    [
        head(entry(), id=None), head(entry(), extra=1), head(entry(extra=1)), head(entry(), id=5), head(entry(), entry()),
        head(entry(shape=[1.0, 4])), head(entry(shape=[True, 4])), head(entry(shape=[-1, 4])), head(entry(15)), head(entry(17)),
        head(entry(name="")), head(entry(datatype="fp32")), head(entry(data=[1])), head(entry(True)), head(entry(16.0)), head(entry(None)),
        head(entry(), outputs=[{"name": ""}]), head(entry(), outputs=[{"name": "y"}] * 2), head(entry(), outputs=[{"name": "z"}]),
        head(entry(), outputs=[{"name": "y", "parameters": {"binary_data": 1}}]),
        head(entry(), outputs=[{"name": "y", "parameters": {"classification": 1}}]), head(entry(), parameters={"triton_x": 1}),
        head(entry(), parameters={"binary_data_output": "true"}), head(entry(parameters={"shared_memory_region": "r"})), head(),
        BINARY[:-1], BINARY + b" x", b"\xef\xbb\xbf" + BINARY, BINARY.replace(b'"x"', b'"\xff"'), BINARY.replace(b'"shape"', b'"shape": [1], "shape"'),
        BINARY.replace(b'"shape"', b'"sh\\u0061pe": [1, 4], "shape"'), BINARY.replace(b"true", b"true, \"binary_data\": true"),
        head(entry(name="x" * 3, shape=[4])), head(entry(shape=[2, 2])), head(entry(name="\u00e9")),
    ],
)  # fmt: skip
def test_what_is_unusual_is_left_to_the_rules(body: bytes) -> None:
    assert typed_request.read_typed(body, memoryview(DATA), ONE) is None
    agree(body + DATA, len(body), ONE)


@pytest.mark.parametrize("data", [[1, None, 3, 4], [1, True, 3, 4], [1, "2", 3, 4], [1, 2, 3], [[1, 2], [3, 4]], [1e39, 0, 0, 0], [float("nan"), 1, 2, 3], [[[1, 2, 3, 4]]], [1, [2, 3], 4], {}, 5])  # fmt: skip
def test_unusual_data_is_left_to_the_rules(data: Any) -> None:
    body = head(entry(None, data=data))
    assert typed_request.read_typed(body, None, ONE) is None
    agree(body, None, ONE)


def test_limits_hold_for_the_typed_reader_too() -> None:
    body = head(entry(None, data=[1, 2, 3, 4]))
    assert typed_request.read_typed(body, None, ONE, V2Limits(depth=5, tensors=1, dims=2)) is not None
    for limits in (V2Limits(depth=4), V2Limits(tensors=0), V2Limits(dims=1)):
        assert typed_request.read_typed(body, None, ONE, limits) is None
        agree(body, None, ONE, limits)
    for length in (None, len(body)):
        agree(body, length, ONE, V2Limits(json=len(body)))
        agree(body, length, ONE, V2Limits(json=len(body) - 1))
    for size in (400, 401):
        long = head(entry(None, data=[1, 2, 3, 4])).replace(b"[1, 2,", b"[1, 2." + b"0" * (size - 2) + b",")
        assert (typed_request.read_typed(long, None, ONE) is None) == (size > 400)
        agree(long, None, ONE)


def test_a_raw_request_goes_to_the_rules() -> None:
    agree(DATA, 0, ModelSignature(name="m", inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1,)),)))
    agree(DATA, 0, ANY)


# Remembered heads


def test_a_head_that_was_seen_reads_the_bytes_that_came_with_it() -> None:
    codec = InferCodec(ONE)
    for value in (1.0, 2.0, 3.0):
        body = bytearray(BINARY + np.full(4, value, np.float32).tobytes())
        request = codec.parse(body, len(BINARY))
        array = request.inputs[0].array
        assert array.tolist() == [[value] * 4]
        assert not array.flags.writeable
        assert np.shares_memory(array, np.frombuffer(body, np.uint8))
        assert request.outputs == (WantedOutput(name="y", binary=True),)
    assert codec._plans.keys() == {BINARY}


@pytest.mark.parametrize("length", [len(BINARY) - 1, len(BINARY) + 1, len(BINARY) + 16, len(BINARY) + 17, None])
def test_a_head_that_was_seen_excuses_nothing_of_its_body(length: int | None) -> None:
    codec = InferCodec(ONE)
    codec.parse(BINARY + DATA, len(BINARY))
    for body in (BINARY, BINARY + DATA[:-1], BINARY + DATA, BINARY + DATA + b"x"):
        assert outcome(codec.parse, body, length) == outcome(parse_both_ways, body, length, ONE)
        assert outcome(codec.parse, body, len(BINARY)) == outcome(parse_both_ways, body, len(BINARY), ONE)


@pytest.mark.parametrize(
    "body",
    [
        head(entry(), id="7"), head(entry(), parameters={"k": 1}), head(entry(None, parameters={"binary_data_size": 16, "k": 1})),
        head(entry(datatype="BYTES", shape=[2], size=16)), head(entry(datatype="BOOL", shape=[16])),
        head(entry(None, data=[1, 2, 3, 4], name="a"), entry()), head(entry(name="n" * 1024)), head(entry(), id="7", unknown=1),
    ],
)  # fmt: skip
def test_what_is_a_clients_own_or_must_be_looked_at_is_not_remembered(body: bytes) -> None:
    codec = InferCodec(ANY)
    outcome(codec.parse, body + DATA, len(body))
    assert not codec._plans
    agree(body + DATA, len(body))


def test_a_request_that_is_refused_is_refused_again() -> None:
    assert isinstance(agree(head(entry(12)) + DATA[:12], len(head(entry(12)))), tuple)


def test_each_memo_is_bounded() -> None:
    codec = InferCodec(ANY)
    for n in range(3 * v2_codec._KEPT):
        body = head(entry(name=str(n)))
        request = codec.parse(body + DATA, len(body))
        codec.render([V2Tensor(name=str(n), datatype="FP32", array=request.inputs[0].array)], request)
        assert len(codec._plans) <= v2_codec._KEPT
        assert len(codec._openings) <= v2_codec._KEPT
    codec._openings.clear()
    codec.render([V2Tensor(name="n" * 1024, datatype="FP32", array=np.zeros(1, np.float32))], V2Request())
    assert not codec._openings


# Any request


SCALARS: st.SearchStrategy[Any] = st.sampled_from([1, "a:b", True, 1.5, None])
SHAPES = st.sampled_from([(), (0,), (4,), (1, 4), (2, 2), (1, 2, 2), (4, 1), (0, 3)])


@st.composite
def entries(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    name, datatype, shape = draw(st.sampled_from(["x", "y:0", "é"])), draw(st.sampled_from(list(DATATYPES))), draw(SHAPES)
    members: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
    parameters: dict[str, Any] = draw(
        st.dictionaries(st.sampled_from(["k", "binary_data", "classification"]), SCALARS, max_size=1)
    )
    data = b""
    if draw(st.booleans()):
        size = math.prod(shape) * (DATATYPES[datatype].itemsize if datatype != "BYTES" else 4)
        data = bytes(
            draw(st.integers(0, 2)) * (at % 4 == 0 and datatype != "BYTES")
            for at in range(size + draw(st.sampled_from([0] * 8 + [1])))
        )
        parameters["binary_data_size"] = len(data)
    else:
        numbers = (
            st.integers(-3, 300)
            | st.floats(-4, 4)
            | st.sampled_from([2**63, 10**40, 1e39, 2.0, None, True, "a", float("nan")])
        )
        values = draw(
            st.lists(
                st.integers(0, 1) if draw(st.booleans()) else numbers, min_size=math.prod(shape), max_size=math.prod(shape)
            )
        )
        nested = np.array(values, object).reshape(shape).tolist() if len(shape) > 1 and draw(st.booleans()) else values
        members["data"] = nested
    empty = draw(st.booleans())
    if parameters or empty:
        members["parameters"] = parameters
    return members, data


MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["", "7", "a:b", None, 5]),
        "model_name": st.just("m"),
        "parameters": st.sampled_from([{}, {"binary_data_output": True}, {"binary_data_output": False, "k": 1}, {"triton_x": 1}, None]),
        "outputs": st.lists(st.sampled_from([{"name": "y"}, {"name": "z", "parameters": {"binary_data": False}}, {"name": "y:0", "parameters": {}}]), max_size=2),
        "more": st.just({}),
    },
)  # fmt: skip
EDITS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), st.sampled_from([b"", b" ", b'"', b",", b":", b"{", b"]", b"1", b"e9", b'"id":"q",', b'"name":"x",', b"\\u0061", b"\xff"])), max_size=1)  # fmt: skip


@settings(max_examples=500)
@given(
    st.lists(entries(), max_size=3),
    MEMBERS,
    EDITS,
    st.sampled_from([0, 0, 0, None, 1]),
    st.sampled_from([ANY, ANY, ONE, BATCHED]),
    st.sampled_from([V2Limits(), V2Limits(), TIGHT]),
)
@example([({"name": "x", "datatype": "FP32", "shape": (1, 4), "data": [1, 2, 3, 4]}, b"")], {}, [], None, ONE, V2Limits())
def test_the_codec_and_the_rules_agree_on_any_request(
    inputs: list[tuple[dict[str, Any], bytes]],
    members: dict[str, Any],
    edits: list[tuple[int, int, bytes]],
    off: int | None,
    signature: ModelSignature,
    limits: V2Limits,
) -> None:
    text = head(*(members for members, _ in inputs), **members)
    for at, drop, piece in edits:
        text = text[:at] + piece + text[at + drop :]
    data = b"".join(data for _, data in inputs)
    agree(text + data, None if off is None else len(text) + off, signature, limits)


# Large requests


def large(numbers: list[str], datatype: str = "FP32", more: str = "", shape: Any = None) -> bytes:
    return f'{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape or [len(numbers)]},"data":[{",".join(numbers)}]}}]{more}}}'.encode()


MORE = ["", ',"id":"7"', ',"parameters":{"data":"data"}', ',"outputs":[{"name":"data"}]', ',"model_name":"m"']
PLAIN = ["0.5"] * 1500


@pytest.mark.parametrize("more", MORE)
def test_the_numbers_of_a_large_request_are_read_apart_from_it(more: str) -> None:
    for datatype, numbers in (
        ("FP32", PLAIN),
        ("INT64", ["-7"] * 1500),
        ("FP16", [*PLAIN, "null"]),
        ("BF16", [*PLAIN, "NaN"]),
    ):
        for body in (large(numbers, datatype, more), large(numbers, datatype, more).replace(b'"data":', b'"data" :\n ')):
            assert len(body) > typed_request.LARGE
            assert typed_request.read_typed(body, None, ANY) is not None
            agree(body, None)
            agree(body, len(body))


@pytest.mark.parametrize("number", ["1e300", "4e-324"])
def test_a_large_request_holds_few_floats_for_the_decoder_that_is_slow_with_some(number: str) -> None:
    most = typed_request._LARGEST_HEAD
    apart = apart_from_numbers(large([number] * 9000, "FP64"), 256, most)
    assert apart is not None
    assert len(apart.beside) < 100
    many = ",".join(f'"{n}":{number}' for n in range(2000))
    assert apart_from_numbers(large(PLAIN, more=f',"parameters":{{{many}}}'), 256, most) is None
    agree(large(PLAIN, more=f',"parameters":{{{many}}}'), None)


def test_a_text_that_says_data_everywhere_is_not_looked_through_to_its_end() -> None:
    often = json_numbers._ELSEWHERE
    for times, there in ((often, True), (often + 1, False)):
        text = b'{"inputs":[{"data":[1,2]}],"x":[%b]}' % b",".join([b'"data"'] * times)
        assert (apart_from_numbers(text, 256) is not None) is there


@pytest.mark.parametrize(
    "wrong",
    [
        large([*PLAIN, "true"]), large([*PLAIN, "1e39"]), large([*PLAIN, '"a"']), large([*PLAIN, "1.0"], "INT8"), large([*PLAIN, "1", "]"]),
        large([*PLAIN, "-9223372036854775809"], "INT64"), large(PLAIN, shape=[1499]), large(PLAIN, shape=[2, 750]), large(PLAIN, shape=[1.0, 1500]),
        large(PLAIN, "BYTES"), large(PLAIN, more=',"id":5'), large(PLAIN, more=',"data":[1]'), large(PLAIN, more=',"parameters":{"data":[1,2]}'),
        large(PLAIN)[:-1], large(PLAIN) + b"x", large(PLAIN) + b'"data":[1]', large(PLAIN).replace(b'"data"', b'"d\\u0061ta"'), large(PLAIN).replace(b'"x"', b'"\xff"'),
        large(PLAIN).replace(b'"data"', b'"data":[1,2],"data"'), large(PLAIN).replace(b'"data"', b'"data":0e-000,"data"'), large(PLAIN).replace(b'"x"', b'"0e-000"'),
        large(PLAIN).replace(b'"x"', b'"\\"data\\":[1]"'), large(PLAIN).replace(b'"x"', b'"data"'), large(PLAIN).replace(b'"data":[', b'"data":["'),
        large(PLAIN).replace(b'"name":"x"', b'"name":"x","parameters":{"k":1},"name":"y"'), large(PLAIN).replace(b'[0.5,', b"[[[[[0.5]]]],"),
        large([*PLAIN, "2." + "0" * 399]), large(PLAIN, more=',"id":"' + " " * 5000 + '"'), b'{"inputs":' + b'[{"data":[1]},' * 300 + large(PLAIN),
        large(["[1,2]"] * 1500, shape=[1500, 2]), large(["[1[,2]"] * 1500, shape=[1500, 2]), large(["[1,2]"] * 1500, shape=[3000]),
    ],
)  # fmt: skip
def test_what_is_odd_in_a_large_request_is_what_the_rules_make_of_it(wrong: bytes) -> None:
    for limits in (USUAL, V2Limits(depth=5), V2Limits(depth=4), V2Limits(tensors=1), TIGHT):
        agree(wrong, None, limits=limits)


def test_what_is_nested_too_deep_is_refused_in_a_large_request_too() -> None:
    body = large(["[[0.5]]"] * 900, shape=[900, 1, 1])
    assert typed_request.read_typed(body, None, ANY, V2Limits(depth=6)) is not None
    assert typed_request.read_typed(body, None, ANY, V2Limits(depth=5)) is None
    for depth in (4, 5, 6):
        agree(body, None, limits=V2Limits(depth=depth))


def test_no_more_data_are_taken_out_than_there_may_be_inputs() -> None:
    text = large(["1"]) * 3
    apart = apart_from_numbers(text, 3)
    assert apart is not None
    assert apart.asked_for(3)
    assert apart_from_numbers(text, 2) is None


def test_a_mark_is_not_taken_for_another() -> None:
    # A mark stands for data that were taken out of a text. The text may have the same characters itself.
    one = '{"name":"%s","datatype":"FP32","shape":[%d],"data":%s}'
    big = "[" + ",".join(PLAIN) + "]"
    for mark in ("0e-000", "0e-001", "0e-00", "0", "0e-0000"):
        for inputs in (
            (one % ("a", 1, mark), one % ("b", 1500, big)),
            (one % ("a", 1500, big), one % ("b", 1, mark)),
            (one % (mark, 1500, big), one % ("b", 1, "[1]")),
        ):
            agree(('{"inputs":[' + ",".join(inputs) + "]}").encode(), None)


ODD = ["null", "NaN", "Infinity", "true", '"1"', "1.0", "1e5", "-0", "1e39", "65520", "18446744073709551616", "-9223372036854775809", "255", "[1]", "", "01", "1 2", "1e400", "]", "}"]  # fmt: skip


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["FP32", "FP64", "FP16", "BF16", "INT8", "INT64", "UINT64", "BOOL"]),
            st.sampled_from([(3,), (600,), (2, 450), (900, 1), (1, 300, 2)]),
            st.sampled_from(["1", "-0.5", "0.1234567890123456", "1e-7", "7", "0"]),
            st.lists(st.tuples(st.integers(0, 899), st.sampled_from(ODD)), max_size=1),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([*MORE, ',"data":[1]']),
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 2), st.sampled_from(["", '"', "]", "[", ",", "}", " ", '"data":[', "0e-000"])), max_size=1),
    st.sampled_from([USUAL, USUAL, V2Limits(depth=5), V2Limits(tensors=2)]),
)  # fmt: skip
def test_the_codec_and_the_rules_agree_on_any_large_request(
    inputs: list[tuple[str, tuple[int, ...], str, list[tuple[int, str]], bool]],
    more: str,
    edits: list[tuple[int, int, str]],
    limits: V2Limits,
) -> None:
    entries = []
    for index, (datatype, shape, number, odd, nested) in enumerate(inputs):
        numbers = np.full(math.prod(shape), number, object)
        for at, text in odd:
            numbers[at % numbers.size] = text
        data = (
            json.dumps((numbers.reshape(shape) if nested else numbers).tolist())
            .replace('\\"', "'")
            .replace('"', "")
            .replace("'", '"')
        )
        entries.append(f'{{"name":"{index}","datatype":"{datatype}","shape":{list(shape)},"data":{data}}}')
    text = '{"inputs":[' + ",".join(entries) + "]" + more + "}"
    for at, drop, piece in edits:
        text = text[:at] + piece + text[at + drop :]
    agree(text.encode(), None, limits=limits)


# Copies


def test_copied_bytes_are_counted() -> None:
    def copied(body: bytes, length: int | None, signature: ModelSignature = ANY) -> int:
        codec = InferCodec(signature)
        counts = {parse_both_ways(body, length, signature).copied, *(codec.parse(body, length).copied for _ in range(4))}
        (count,) = counts
        return count

    assert copied(BINARY + DATA, len(BINARY)) == 0
    text = head(entry(None, data=[1, 2, 3, 4]))
    assert copied(text, None) == copied(text, len(text)) == len(text)
    assert copied(large(PLAIN), None) == len(large(PLAIN))
    mixed = head(entry(None, data=[1, 2, 3, 4], name="a"), entry(None, data=[1, 2, 3, 4], name="b"), entry())
    assert copied(mixed + DATA, len(mixed)) == len(mixed)
    boolean = head(entry(4, shape=[4], datatype="BOOL"))
    assert copied(boolean + b"\0\1\1\0", len(boolean)) == 0
    assert copied(boolean + b"\0\1\2\0", len(boolean)) == 4
    text_or_bytes = head(entry(8, shape=[2], datatype="BYTES"), entry(0, shape=[0], name="none"))
    assert copied(text_or_bytes + bytes(8), len(text_or_bytes)) == 0
    for datatype, body, expected in (("FP32", DATA, 0), ("BOOL", b"\1\2", 2), ("BYTES", b"abc", 3)):
        spec = TensorSpec(name="x", datatype=datatype, shape=(1,) if datatype == "BYTES" else (-1,))
        assert copied(body, 0, ModelSignature(name="m", inputs=(spec,))) == expected


# Replies


def reply(call: Any, *arguments: Any) -> Any:
    try:
        rendered = call(*arguments)
    except V2Error as error:
        return (error.status, error.message)
    return (rendered.headers, [bytes(buffer) for buffer in rendered.buffers])


@st.composite
def outputs(draw: st.DrawFn) -> V2Tensor:
    name, datatype, shape = draw(st.sampled_from(["y", "z", 'q"é'])), draw(st.sampled_from(list(DATATYPES))), draw(SHAPES)
    dtype = DATATYPES[draw(st.sampled_from([datatype] * 9 + ["FP64"]))]
    if dtype.kind == "O":
        array = np.empty(math.prod(shape), object)
        array[:] = draw(st.lists(st.sampled_from([b"", b"ab", b"\xff", "é"]), min_size=array.size, max_size=array.size))
    else:
        array = np.array(
            draw(st.lists(st.floats(0, 100, width=16), min_size=math.prod(shape), max_size=math.prod(shape)))
        ).astype(dtype)
    array = array.reshape(shape)
    if draw(st.booleans()):
        array = array.T
    if draw(st.booleans()) and array.dtype.kind in "iuf":
        array = array.astype(array.dtype.newbyteorder())
    return V2Tensor(
        name=name, datatype=datatype, array=array, parameters=draw(st.sampled_from([NO_PARAMETERS, {}, {"k": 1}]))
    )


REQUESTS = st.builds(
    V2Request,
    id=st.sampled_from(["", "7", 'q"é']),
    outputs=st.lists(st.builds(WantedOutput, name=st.sampled_from(["y", "z"]), binary=st.sampled_from([None, True, False])), max_size=2, unique_by=lambda o: o.name).map(tuple),
    binary_default=st.booleans(),
)  # fmt: skip


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.lists(outputs(), max_size=2, unique_by=lambda t: t.name), REQUESTS), min_size=1, max_size=4),
    st.sampled_from(["", "1"]),
    st.sampled_from(["", "", "mine", "\ud800", 5]),
    st.sampled_from([NO_PARAMETERS, {}, {"k": 1.5}, {"bad": object()}]),
    st.sampled_from([ANY, ONE]),
)
def test_the_codec_and_the_rules_agree_on_any_reply(
    calls: list[tuple[list[V2Tensor], V2Request]], version: str, id: Any, parameters: Any, signature: ModelSignature
) -> None:
    codec = InferCodec(signature, version=version)
    for tensors, request in calls * 2:
        expected = reply(render_infer, signature.name, version, tensors, request, id, parameters, signature)
        assert reply(codec.render, tensors, request, id, parameters) == expected


def test_a_name_that_is_no_string_is_not_taken_for_another() -> None:
    codec = InferCodec(ANY)
    names: list[Any] = [1, True, 1.0, "1"]
    for name in names * 2:
        tensors = [V2Tensor(name=name, datatype="INT8", array=np.zeros(1, np.int8))]
        assert reply(codec.render, tensors, V2Request()) == reply(render_infer, "m", "", tensors, V2Request())


def test_binary_outputs_leave_as_the_models_memory() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    rendered = InferCodec(ANY).render([V2Tensor(name="y", datatype="FP32", array=array)], V2Request(binary_default=True))
    assert np.shares_memory(np.frombuffer(rendered.buffers[1], np.uint8), array)
    assert [name for name, _ in rendered.form] == [b"content-type", b"inference-header-content-length"]
    assert [name for name, _ in rendered.headers] == [*(name for name, _ in rendered.form), b"content-length"]


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [1, 2, 3, "4"]], ids=["typed", "by the rules"])
def test_a_request_of_a_sequence_is_refused_where_those_cannot_be_kept_together(data: list[Any]) -> None:
    apart, together = InferCodec(ONE, limits=V2Limits(sequences=False)), InferCodec(ONE)

    def body(sequence: Any, numbers: list[Any]) -> bytes:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": numbers}
        return head(tensor, parameters={"sequence_id": sequence})

    for none in (0, ""):
        assert apart.parse(body(none, [1, 2, 3, 4]), None).inputs
    assert together.parse(body(7, [1, 2, 3, 4]), None).parameters == {"sequence_id": 7}
    with pytest.raises(V2Error, match=r"sequence_id of the request is 7, and this server has several") as caught:
        apart.parse(body(7, data), None)
    assert caught.value.status == 400
