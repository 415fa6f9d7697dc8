"""Each decision of the v2 reference, in its order: the case, and what this server makes of it."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from protocols.events import Request
from protocols.v2 import (
    IHCL,
    InferCodec,
    ModelSignature,
    TensorSpec,
    V2Error,
    V2Limits,
    V2Reply,
    V2Request,
    V2Tensor,
    WantedOutput,
    id_of,
    parse_header_length,
    render_infer,
)
from protocols.v2.tensors import DATATYPES
from tests.protocols.http1.http1_helpers import server
from tests.protocols.v2.grammar.v2_outcome import parse_both_ways

ANY = ModelSignature(name="m")
ONE = ModelSignature(
    name="m", inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 2)),), outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1,)),)
)  # fmt: skip


def entry(datatype: str = "FP32", shape: Any = (2,), name: Any = "x", **members: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **members}


def binary(size: Any, datatype: str = "FP32", shape: Any = (2,), name: str = "x") -> dict[str, Any]:
    return entry(datatype, shape, name, parameters={"binary_data_size": size})


def request(*inputs: Any, **members: Any) -> bytes:
    return json.dumps({"inputs": inputs, **members}).encode()


def parse(head: bytes, data: bytes = b"", length: int | None = -1, signature: ModelSignature = ANY) -> V2Request:
    body, header_length = head + data, len(head) if length == -1 else length
    request, error = attempt(parse_both_ways, body, header_length, signature)
    again, same = attempt(InferCodec(signature).parse, body, header_length)
    if request is None or again is None:
        assert error is not None
        assert same is not None
        assert (same.status, same.message) == (error.status, error.message)
        raise error
    assert (again.id, again.outputs, again.binary_default) == (request.id, request.outputs, request.binary_default)
    return again


def attempt(read: Callable[..., V2Request], *arguments: Any) -> tuple[V2Request | None, V2Error | None]:
    try:
        return read(*arguments), None
    except V2Error as error:
        return None, error


def refusal(
    head: bytes, data: bytes = b"", length: int | None = -1, signature: ModelSignature = ANY, status: int = 400
) -> str:
    with pytest.raises(V2Error) as caught:
        parse(head, data, length, signature)
    assert caught.value.status == status
    return caught.value.message


def value(datatype: str, data: Any, shape: Any = (1,)) -> Any:
    """The elements that the model gets for `data`."""
    return parse(request(entry(datatype, shape, data=data))).inputs[0].array.tolist()


def reply(*outputs: V2Tensor, signature: ModelSignature = ANY, **asked: Any) -> dict[str, Any]:
    rendered = render_infer("m", "1", outputs, V2Request(**asked), signature=signature)
    return head_of(rendered)


def head_of(rendered: V2Reply) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(bytes(rendered.buffers[0]))
    return body


def output(array: Any, datatype: str = "FP32", name: str = "y") -> V2Tensor:
    return V2Tensor(name=name, datatype=datatype, array=np.asarray(array, DATATYPES[datatype]))


EIGHT = struct.pack("<2f", 1.5, -2.0)


# Inference-Header-Content-Length


@pytest.mark.parametrize("name", ["Inference-Header-Content-Length", "inference-header-content-length", "INFERENCE-HEADER-CONTENT-LENGTH"])  # fmt: skip
def test_header_name_in_any_case(name: str) -> None:
    machine = server(f"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\n{name}: 16\r\n\r\n".encode())
    received = machine.next_event()
    assert isinstance(received, Request)
    assert [value for name, value in received.head.headers if name == IHCL] == [b"16"]


def test_ihcl_above_the_body() -> None:
    assert "is 500, but the body has" in refusal(request(binary(8)), EIGHT, 500)


@pytest.mark.parametrize(
    "text", [b"-1", b"abc", b"", b"106xyz", b"106.0", b"+106", b" 106", b"1_0", "٣".encode(), b"0x10", b"106,106"]
)
def test_ihcl_that_is_not_digits_alone(text: bytes) -> None:
    with pytest.raises(V2Error, match="Inference-Header-Content-Length must be a number of bytes") as caught:
        parse_header_length([text])
    assert caught.value.status == 400


@pytest.mark.parametrize("text", [b"2147483648", b"99999999999", b"9" * 50, b"9" * 5000])
def test_ihcl_above_int32(text: bytes) -> None:
    with pytest.raises(V2Error) as caught:
        parse_header_length([text])
    assert len(caught.value.message) < 250


def test_ihcl_of_int32() -> None:
    assert parse_header_length([b"2147483647"]) == 2**31 - 1
    assert parse_header_length([b"0"]) == 0
    assert parse_header_length([]) is None


def test_ihcl_twice_is_refused_only_if_different() -> None:
    assert parse_header_length([b"16", b"16", b"016"]) == 16
    with pytest.raises(V2Error, match="twice with different values"):
        parse_header_length([b"16", b"17"])


def test_ihcl_missing_with_binary_declared_names_the_header() -> None:
    assert "'x' is binary, but Inference-Header-Content-Length is missing" in refusal(request(binary(8)), length=None)
    assert "but Inference-Header-Content-Length is missing" in refusal(request(binary(8)), EIGHT, None)
    assert "Inference" not in refusal(b"{}x", length=None)


@pytest.mark.parametrize("off", [-1, 1])
def test_ihcl_one_short_or_long(off: int) -> None:
    head = request(binary(8))
    refusal(head, EIGHT, len(head) + off)


def test_ihcl_on_pure_json_is_the_body() -> None:
    assert parse(request(entry(data=[1, 2]))).inputs[0].array.tolist() == [1, 2]
    assert parse(request(entry(data=[1, 2])), length=None).inputs[0].array.tolist() == [1, 2]


# Sizes


def test_extra_bytes_after_the_inputs() -> None:
    assert refusal(request(binary(8)), EIGHT + b"\0") == "the inputs take 8 bytes of binary data, but 9 follow the JSON"
    assert refusal(request(entry(data=[1, 2])), b"\0") == "the inputs take 0 bytes of binary data, but 1 follow the JSON"


def test_missing_bytes_of_the_inputs() -> None:
    head = request(binary(8), binary(8, name="z"))
    assert refusal(head, EIGHT + b"1234") == "input 'z' has 8 bytes of binary data, but only 4 are left in the body"


def test_size_that_is_not_shape_times_datatype() -> None:
    # KServe's published example: FP16 [2, 2] with 16 bytes.
    assert (
        refusal(request(binary(16, "FP16", (2, 2))), bytes(16))
        == "input 'x': FP16 [2, 2] takes 8 bytes, got binary_data_size 16"
    )


@pytest.mark.parametrize("size", [-1, "8", 8.0, True, None, 2**63, 2**70, [8], {}])
def test_binary_data_size_that_is_no_size(size: Any) -> None:
    assert "binary_data_size" in refusal(request(binary(size)), EIGHT)


def test_data_and_binary_data_size_both() -> None:
    both = entry(data=[1, 2], parameters={"binary_data_size": 8})
    assert refusal(request(both), EIGHT) == "input 'x' has both data and binary_data_size"


def test_neither_data_nor_binary_data_size() -> None:
    assert refusal(request(entry())) == "input 'x' has neither data nor binary_data_size"
    assert refusal(request(entry(data=None, parameters=None))) == "input 'x' has neither data nor binary_data_size"


# BYTES


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\2\0\0\0ab\1\0", "element 1 of 2 is cut off"),
        (b"\1\0\0\0a\2\0\0\0b", "element 1 of 2 has 2 bytes, only 1 are left"),
        (b"\5\0\0\0hello", "element 1 of 2 is cut off"),
        (b"\1\0\0\0", "has 2 elements"),
        (b"\1\0\0\0a\1\0\0\0b?", "1 bytes are left"),
    ],
)
def test_bytes_that_do_not_add_up(data: bytes, text: str) -> None:
    assert text in refusal(request(binary(len(data), "BYTES")), data)


def test_bytes_not_utf_8_in_and_out_as_binary_are_exact() -> None:
    data = b"\2\0\0\0\xff\0\0\0\0\0"
    tensor = parse(request(binary(len(data), "BYTES")), data).inputs[0]
    assert tensor.elements.tolist() == [b"\xff\0", b""]
    rendered = render_infer("m", "1", [tensor], V2Request(binary_default=True))
    assert bytes(rendered.buffers[1]) == data


def test_bytes_not_utf_8_out_as_json() -> None:
    with pytest.raises(V2Error, match=r"tensor 'y': .*ask for it with binary_data") as caught:
        reply(output([b"\xff"], "BYTES"))
    assert caught.value.status == 400


# Elements


def test_bool_bytes_2_and_255_are_true() -> None:
    array = parse(request(binary(3, "BOOL", (3,))), b"\x02\xff\x00").inputs[0].array
    assert array.tolist() == [True, True, False]
    assert int(array.sum()) == 2


def test_fp16_and_bf16_as_json() -> None:
    for datatype in ("FP16", "BF16"):
        assert value(datatype, [1.5, -2], [2]) == [1.5, -2]
        assert reply(output([1.5, -2], datatype))["outputs"][0]["data"] == [1.5, -2]
    assert reply(output([0.1], "FP16"))["outputs"][0]["data"] == [0.1]
    assert reply(output([3.14], "BF16"))["outputs"][0]["data"] == [3.14]


def test_bf16_as_binary() -> None:
    assert parse(request(binary(4, "BF16")), b"\x80\x3f\x00\xc0").inputs[0].array.astype(float).tolist() == [1, -2]


@pytest.mark.parametrize("datatype", DATATYPES)
def test_zero_size_tensor_in_both_forms(datatype: str) -> None:
    for tensor in (entry(datatype, (0, 2), data=[]), binary(0, datatype, (0, 2))):
        assert parse(request(tensor)).inputs[0].array.shape == (0, 2)
        assert parse(request(tensor), length=None).inputs[0].array.shape == (0, 2)


def test_rank_0_if_the_model_allows() -> None:
    assert value("FP32", [5], []) == 5
    scalar = ModelSignature(name="m", inputs=(TensorSpec(name="x", datatype="FP32", shape=()),))
    assert parse(request(binary(4, shape=())), b"\0\0\x80?", signature=scalar).inputs[0].array.shape == ()
    refusal(request(entry(shape=[], data=[5])), signature=ONE)


def test_flat_or_nested_data_in_and_flat_out() -> None:
    assert value("INT8", [1, 2, 3, 4], [2, 2]) == value("INT8", [[1, 2], [3, 4]], [2, 2]) == [[1, 2], [3, 4]]
    assert reply(output([[1, 2], [3, 4]], "INT8"))["outputs"][0]["data"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "data", [[[1], [2, 3, 4]], [[1, 2, 3, 4]], [1, 2, 3], [1, 2, 3, 4, 5], [[1, 2], [3, 4], [5, 6]], []]
)
def test_ragged_data_and_wrong_counts(data: Any) -> None:
    refusal(request(entry("INT8", [2, 2], data=data)))


@pytest.mark.parametrize("depth", [65, 1000, 50_000])
def test_nesting_depth(depth: int) -> None:
    head = b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":' + b"[" * depth + b"1" + b"]" * depth + b"}]}"
    assert "nested deeper than 64" in refusal(head)


@pytest.mark.parametrize("shape", [[2**40], [2**4, 2**60 + 2], [2**2, 2**60 + 2], [2**400] * 16])
def test_shape_product_overflow(shape: list[int]) -> None:
    refusal(request(entry(shape=shape, data=[1])))
    refusal(request(binary(4, shape=shape)), b"1234")
    refusal(request(binary(4, "BYTES", shape)), b"1234")


@pytest.mark.parametrize("dimension", [-1, "1", 1.0, 1.5, True, None, [1]])
def test_negative_string_or_fractional_dimension(dimension: Any) -> None:
    assert "dimension must be a non-negative integer" in refusal(request(entry(shape=[dimension], data=[1])))


def test_fp32_json_is_the_shortest_text_of_the_same_value() -> None:
    body = render_infer("m", "1", [output([0.1, 1.203])], V2Request()).buffers[0]
    assert b'"data":[0.1,1.203]' in bytes(body)


def test_int64_and_uint64_full_range_in_json() -> None:
    for datatype, extremes in (("INT64", [-(2**63), 2**63 - 1]), ("UINT64", [0, 2**64 - 1])):
        assert value(datatype, extremes, [2]) == extremes
        assert reply(output(extremes, datatype))["outputs"][0]["data"] == extremes


@pytest.mark.parametrize(
    ("datatype", "wrong"),
    [("INT8", 128), ("INT8", -129), ("UINT8", -1), ("UINT8", 256), ("UINT64", 2**64), ("INT64", 2**63)],
)
def test_integers_out_of_range(datatype: str, wrong: int) -> None:
    assert f"got {wrong} at element 0" in refusal(request(entry(datatype, [1], data=[wrong])))


@pytest.mark.parametrize("wrong", [1.5, True, "1"])
def test_what_is_no_integer(wrong: Any) -> None:
    refusal(request(entry("INT32", [1], data=[wrong])))
    assert value("INT32", [1.0]) == [1]


@pytest.mark.parametrize("wrong", [True, "1"])
def test_what_is_no_float(wrong: Any) -> None:
    refusal(request(entry("FP32", [1], data=[wrong])))


def test_bool_in_json() -> None:
    assert value("BOOL", [0, 1, True, False], [4]) == [False, True, True, False]
    for wrong in (2, "true"):
        refusal(request(entry("BOOL", [1], data=[wrong])))


def test_nan_and_infinity_in_json_in() -> None:
    assert b"NaN" in request(entry(data=[float("nan")]))
    assert str(value("FP32", [float("nan"), float("inf"), float("-inf"), None], [4])) == "[nan, inf, -inf, nan]"


def test_nan_and_infinity_in_json_out_are_null() -> None:
    assert reply(output([np.nan, np.inf, -np.inf, 1]))["outputs"][0]["data"] == [None, None, None, 1]


def test_1e400() -> None:
    refusal(request(entry(shape=[1], data=[0])).replace(b"[0]", b"[1e400]"))


# Names


def test_duplicate_input() -> None:
    assert refusal(request(entry(data=[1, 2]), entry(data=[1, 2]))) == "inputs has 'x' twice"


def test_duplicate_output() -> None:
    assert refusal(request(entry(data=[1, 2]), outputs=[{"name": "y"}, {"name": "y"}])) == "outputs has 'y' twice"


def test_duplicate_members_of_an_object() -> None:
    assert "two members 'shape'" in refusal(request(entry(data=[1, 2])).replace(b'"shape"', b'"shape": [1], "shape"'))


def test_missing_unknown_and_surplus_inputs() -> None:
    good = entry(shape=[1, 2], data=[1, 2])
    assert parse(request(good), signature=ONE).inputs[0].array.tolist() == [[1, 2]]
    assert refusal(request(), signature=ONE) == "missing input 'x': model 'm' takes 'x'"
    assert refusal(request(good, {**good, "name": "z"}), signature=ONE) == "unknown input 'z': model 'm' takes 'x'"
    assert (
        refusal(request({**good, "name": "X"}), signature=ONE) == "unknown input 'X', missing input 'x': model 'm' takes 'x'"
    )


def test_unknown_output() -> None:
    good = entry(shape=[1, 2], data=[1, 2])
    assert refusal(request(good, outputs=[{"name": "z"}]), signature=ONE) == "unknown output 'z': model 'm' gives 'y'"
    with pytest.raises(V2Error, match="unknown output 'z': the model gave 'y'") as caught:
        reply(output([1]), outputs=(WantedOutput(name="z"),))
    assert caught.value.status == 400


@pytest.mark.parametrize("datatype", ["fp32", "FLOAT", "", None, 5, "STRING", "FP8"])
def test_unknown_datatype(datatype: Any) -> None:
    assert "datatype must be one of BOOL, " in refusal(request(entry(datatype, data=[1, 2])))


def test_wrong_datatype_and_shape_for_the_model() -> None:
    assert (
        refusal(request(entry("FP64", [1, 2], data=[1, 2])), signature=ONE) == "input 'x': datatype must be FP32, got FP64"
    )
    for shape in ([2], [1, 2, 1], [2, 1]):
        assert "shape must be [-1, 2] (-1 is any), got" in refusal(request(entry(shape=shape, data=[1, 2])), signature=ONE)


# Forms of outputs


def forms(rendered: dict[str, Any]) -> dict[str, bool]:
    return {out["name"]: "data" not in out for out in rendered["outputs"]}


@pytest.mark.parametrize(("default", "own", "expected"), [
    (True, None, True), (True, False, False), (True, True, True), (False, None, False), (False, True, True), (False, False, False),
])  # fmt: skip
def test_binary_data_of_an_output_overrides_binary_data_output(default: bool, own: bool | None, expected: bool) -> None:
    wanted: Mapping[str, Any] = {"name": "y"} if own is None else {"name": "y", "parameters": {"binary_data": own}}
    head = request(entry(data=[1, 2]), parameters={"binary_data_output": default}, outputs=[wanted])
    parsed = parse(head)
    rendered = render_infer("m", "1", [output([1])], parsed)
    assert forms(head_of(rendered)) == {"y": expected}


@pytest.mark.parametrize("flag", ["true", 1, 0, None, {}, []])
def test_a_flag_that_is_not_a_boolean(flag: Any) -> None:
    assert "binary_data_output" in refusal(request(entry(data=[1, 2]), parameters={"binary_data_output": flag}))
    assert "binary_data" in refusal(
        request(entry(data=[1, 2]), outputs=[{"name": "y", "parameters": {"binary_data": flag}}])
    )


def test_order_of_outputs_is_that_of_the_request_or_of_the_model() -> None:
    outs = [output([1], name=name) for name in "abc"]
    assert list(forms(reply(*outs))) == ["a", "b", "c"]
    assert list(forms(reply(*outs, outputs=(WantedOutput(name="c"), WantedOutput(name="a"))))) == ["c", "a"]


# id, parameters, version


def test_id_is_echoed_and_none_is_invented() -> None:
    assert parse(request(entry(data=[1, 2]), id="7")).id == "7"
    assert reply(output([1]), id="7")["id"] == "7"
    for none in ({}, {"id": ""}, {"id": None}):
        assert parse(request(entry(data=[1, 2]), **none)).id == ""
    assert "id" not in reply(output([1]))


@pytest.mark.parametrize("wrong", [5, True, {}, ["a"]])
def test_id_that_is_not_a_string(wrong: Any) -> None:
    assert "id must be a string" in refusal(request(entry(data=[1, 2]), id=wrong))


def test_request_parameters_go_to_the_model_and_not_into_the_reply() -> None:
    given = {"sequence_id": 2**64 - 1, "sequence_start": True, "timeout": 1.5, "priority": "high", "custom": 0}
    parsed = parse(request(entry(data=[1, 2], parameters={"note": "n"}), parameters={**given, "binary_data_output": True}))
    assert parsed.parameters == given
    assert parsed.inputs[0].parameters == {"note": "n"}
    assert "parameters" not in head_of(render_infer("m", "1", [output([1])], parsed))


@pytest.mark.parametrize("wrong", [{"a": {}}, {"a": [1]}, {"a": None}, {"a": float("nan")}, {"a": float("inf")}, [], "x", 5])
def test_parameters_are_strings_numbers_and_booleans(wrong: Any) -> None:
    assert "the request must be" in refusal(request(entry(data=[1, 2]), parameters=wrong))
    assert "of input 'x' must be" in refusal(request(entry(data=[1, 2], parameters=wrong)))
    assert "of output 'y' must be" in refusal(request(entry(data=[1, 2]), outputs=[{"name": "y", "parameters": wrong}]))


def test_parameters_that_begin_with_triton_are_reserved() -> None:
    assert "reserved" in refusal(request(entry(data=[1, 2]), parameters={"triton_enable": True}))


def test_response_parameters_are_those_the_model_sets() -> None:
    tensor = V2Tensor(name="y", datatype="INT8", array=np.zeros(1, np.int8), parameters={"scale": 2})
    body = head_of(render_infer("m", "1", [tensor], V2Request(binary_default=True), "", {"cost": 1.5}))
    assert body["parameters"] == {"cost": 1.5}
    assert body["outputs"][0]["parameters"] == {"scale": 2, "binary_data_size": 1}


def test_model_version_is_a_string() -> None:
    body = reply(output([1]))
    assert (body["model_name"], body["model_version"]) == ("m", "1")


# Bodies


def test_empty_body_without_ihcl_is_no_raw_request() -> None:
    for signature in (ANY, ONE):
        assert refusal(b"", length=None, signature=signature) == "the request is empty where JSON was expected"


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"[]", b"null", b"5", b'"x"', b"{}", b'{"inputs":null}', b'{"inputs":{}}', b'{"inputs":[5]}', b"[" * 5],
)
def test_body_that_is_no_request(body: bytes) -> None:
    refusal(body, length=None)


def test_bom_is_skipped() -> None:
    assert parse(b"\xef\xbb\xbf" + request(entry(data=[1, 2])), length=None).inputs[0].name == "x"


@pytest.mark.parametrize("codec", ["utf-16", "latin-1"])
def test_invalid_utf_8_in_the_json(codec: str) -> None:
    refusal(json.dumps({"id": "é", "inputs": []}, ensure_ascii=False).encode(codec), length=None)


def test_members_that_the_schema_does_not_know_are_ignored() -> None:
    parsed = parse(
        request({**entry(data=[1, 2]), "extra": {}}, model_name="other", extra=[{}], outputs=None, id=None, parameters=None)
    )
    assert parsed.inputs[0].array.tolist() == [1, 2]


def test_trailing_comma_of_the_published_example() -> None:
    refusal(b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,2],"data":[[32.045,399.043]],}]}', length=None)


# Batching


BATCHED = ModelSignature(
    name="m",
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(2,)), TensorSpec(name="z", datatype="INT8", shape=())),
    max_batch_size=4,
)


@pytest.mark.parametrize(("left", "right", "text"), [
    (4, 4, None), (1, 1, None), (0, 0, None), (5, 5, "at most 4"), (2, 3, "got 3, and 2 for 'x'"),
])  # fmt: skip
def test_batch_comes_first_is_equal_and_bounded(left: int, right: int, text: str | None) -> None:
    head = request(entry(shape=[left, 2], data=[0] * left * 2), entry("INT8", [right], "z", data=[0] * right))
    if text is None:
        assert parse(head, signature=BATCHED).inputs[0].array.shape == (left, 2)
    else:
        assert text in refusal(head, signature=BATCHED)


def test_a_batching_model_takes_no_item_without_its_batch() -> None:
    refusal(request(entry(shape=[2], data=[0, 0]), entry("INT8", [], "z", data=[0])), signature=BATCHED)


# Extensions that are not here, and limits


def test_an_extension_that_would_change_the_answer_is_not_ignored() -> None:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    assert "parameter shared_memory_" in refusal(request(entry(parameters=region)))
    assert "parameter shared_memory_" in refusal(request(entry(data=[1, 2]), outputs=[{"name": "y", "parameters": region}]))


def test_json_limit_is_exact_and_413() -> None:
    head = request(entry(data=[1, 2]))
    for length in (None, len(head)):
        assert parse_both_ways(head, length, ANY, V2Limits(json=len(head))).inputs
        with pytest.raises(V2Error, match=rf"at most {len(head) - 1} bytes \(limits.json\), got {len(head)}") as caught:
            parse_both_ways(head, length, ANY, V2Limits(json=len(head) - 1))
        assert caught.value.status == 413
    big = request(binary(4000, shape=(1000,)))
    assert parse_both_ways(big + bytes(4000), len(big), ANY, V2Limits(json=len(big))).inputs


def test_tensor_and_dimension_limits_are_exact() -> None:
    def inputs(count: int) -> bytes:
        return request(*(entry("INT8", [1], str(n), data=[0]) for n in range(count)))

    assert len(parse(inputs(256)).inputs) == 256
    assert refusal(inputs(257)) == "inputs has at most 256 entries (limits.tensors), got 257"
    outputs = [{"name": str(n)} for n in range(257)]
    assert len(parse(request(entry(data=[1, 2]), outputs=outputs[:256])).outputs) == 256
    assert (
        refusal(request(entry(data=[1, 2]), outputs=outputs)) == "outputs has at most 256 entries (limits.tensors), got 257"
    )
    assert parse(request(entry(shape=[1] * 16, data=[0]))).inputs[0].array.ndim == 16
    assert "at most 16 dimensions, got 17" in refusal(request(entry(shape=[1] * 17, data=[0])))


@pytest.mark.parametrize("name", [None, 5, "", ["x"]])
def test_a_tensor_has_a_name(name: Any) -> None:
    assert "inputs[0] must be an object with a name" in refusal(request(entry(name=name, data=[1, 2])))
    assert "outputs[0] must be an object with a name" in refusal(request(entry(data=[1, 2]), outputs=[{"name": name}]))


@pytest.mark.parametrize("signature", [ANY, ONE])
def test_errors_echo_at_most_200_characters_of_the_request(signature: ModelSignature) -> None:
    long = "n" * 5000
    good = entry(name=long, data=[1, 2])
    for head in (
        request(entry(name=long)),
        request({**good, "parameters": {long: {}}}),
        request({**good, "parameters": long}),
        request(good, good),
        request(good, outputs=[{"name": long, "parameters": {"binary_data": long}}]),
        request({**good, "datatype": long}),
        request({**good, "shape": [long]}),
        request({**good, "data": [1, long]}),
        request(good, id=[long], parameters={"triton_" + long: 1}),
    ):
        assert refusal(head, signature=signature).count("n") < 230
    surplus = request(*(entry(name=f"{n}{long}", data=[1, 2]) for n in range(9)))
    assert refusal(surplus, signature=ONE).count("n") < 230


@pytest.mark.parametrize("count", [1, 600])  # few are read by one reader, many by another
@pytest.mark.parametrize(
    ("text", "nearest"),
    [("1.0039062500001", 1.0078125), ("1.00390625", 1.0), ("-1.0039062500001", -1.0078125), ("1.0117187499999", 1.0078125)],
)
def test_bf16_is_rounded_once(text: str, nearest: float, count: int) -> None:
    body = b'{"inputs":[{"name":"x","datatype":"BF16","shape":[%d],"data":[%b]}]}' % (
        count,
        b",".join([text.encode()] * count),
    )
    request = InferCodec(ModelSignature(name="m")).parse(body, None)
    assert set(request.inputs[0].elements.astype(np.float64).tolist()) == {nearest}


@pytest.mark.parametrize(
    ("shapes", "words"),
    [([[]], "input 'x0': shape must begin with the batch dimension, got []"), ([[3]], "the batch size is at most 2"),
     ([[1], [2]], "all inputs must have one batch size"), ([[2], [2, 5]], "")],
)  # fmt: skip
def test_batches_of_undeclared_inputs_are_checked_too(shapes: list[list[int]], words: str) -> None:
    inputs = [
        {"name": f"x{n}", "datatype": "INT32", "shape": shape, "data": [0] * math.prod(shape)}
        for n, shape in enumerate(shapes)
    ]
    codec = InferCodec(ModelSignature(name="m", max_batch_size=2))
    if words:
        with pytest.raises(V2Error, match=re.escape(words)):
            codec.parse(json.dumps({"inputs": inputs}).encode(), None)
    else:
        assert len(codec.parse(json.dumps({"inputs": inputs}).encode(), None).inputs) == len(shapes)


@pytest.mark.parametrize(
    ("name", "datatype", "array", "words"),
    [
        ("z", "FP32", np.zeros((1, 2), np.float32), "output 'z' of model 'm' is not one that it declares: 'y'"),
        ("y", "INT32", np.zeros((1, 2), np.int32), "output 'y' of model 'm' is declared as FP32, the model gave INT32"),
        ("y", "FP32", np.zeros((1, 3), np.float32), "output 'y' of model 'm': its shape must be [-1, 2] (-1 is any)"),
        ("y", "FP32", np.zeros(2, np.float32), "the model gave [2]"),
    ],
)
@pytest.mark.parametrize("asked", [(), (WantedOutput(name="y"),)])
def test_a_model_that_breaks_its_declaration_is_an_error_of_its_own(
    name: str, datatype: str, array: Any, words: str, asked: tuple[WantedOutput, ...]
) -> None:
    signature = ModelSignature(name="m", outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),))
    codec, request = InferCodec(signature), V2Request(outputs=asked)
    good = V2Tensor(name="y", datatype="FP32", array=np.zeros((1, 2), np.float32))
    assert b"data" in codec.render([good], request).buffers[0]
    with pytest.raises(V2Error, match=re.escape(words)) as error:
        codec.render([V2Tensor(name=name, datatype=datatype, array=array)], request)
    assert error.value.status == 500


@pytest.mark.parametrize("name", ["", 5, None, True])
def test_an_output_without_a_name_is_the_models_error(name: Any) -> None:
    codec, output = InferCodec(ANY), V2Tensor(name=name, datatype="FP32", array=np.zeros(1, np.float32))
    with pytest.raises(V2Error, match="a tensor has a name") as error:
        codec.render([output], V2Request())
    assert error.value.status == 500


@pytest.mark.parametrize("depth", [65, 1_500, 3_000, 100_000])
@pytest.mark.parametrize(
    "around",
    [
        '{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":%s}]}', '{"inputs":[],"parameters":{"p":%s}}', '{"inputs":%s}',
        '{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"d\\u0061ta":%s}]}', '{"inputs":[{"d\\u0061ta":%s}]}',
        '{"inputs":[],"id":%s}', '{"inputs":[{"name":"x","datatype":"FP32","shape":%s,"data":[1]}]}', '{"inputs":[],"more":%s}', "%s",
    ],
)  # fmt: skip
def test_nesting_is_refused_wherever_it_stands_and_however_deep_it_is(around: str, depth: int) -> None:
    codec = InferCodec(ANY)
    for inner in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        text = (around % inner).encode()
        for length in (None, len(text)):
            for _ in range(3):  # the codec reads a head that it has seen before in another way
                with pytest.raises(V2Error) as error:
                    codec.parse(text, length)
                assert error.value.status == 400
        assert id_of(text) == ""
