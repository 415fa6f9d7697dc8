"""Whole v2 bodies: the published examples, raw requests, round trips between our client and server, garbage."""

from __future__ import annotations

import json
import math
import struct
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.events import Buffer
from protocols.v2 import (
    ModelSignature,
    TensorSpec,
    V2Error,
    V2Request,
    V2Tensor,
    WantedOutput,
    decode_infer_reply,
    encode_infer_request,
    parse_header_length,
    render_infer,
)
from protocols.v2.tensors import DATATYPES, Array
from tests.protocols.v2.grammar.v2_outcome import parse_both_ways

ANY = ModelSignature(name="m")


def tensor(name: str, datatype: str, data: Any) -> V2Tensor:
    return V2Tensor(name=name, datatype=datatype, array=np.asarray(data, DATATYPES[datatype]))


def joined(buffers: list[Buffer]) -> bytes:
    return b"".join(map(bytes, buffers))


def serve(headers: list[tuple[bytes, bytes]], buffers: list[Buffer], signature: ModelSignature = ANY) -> V2Request:
    """The request as a server sees it."""
    assert dict(headers)[b"content-length"] == b"%d" % len(joined(buffers))
    length = parse_header_length([value for name, value in headers if name == b"inference-header-content-length"])
    return parse_both_ways(joined(buffers), length, signature)


# The published examples


KSERVE_REQUEST = b"""{
  "model_name" : "mymodel",
  "inputs" : [
    {"name" : "input0", "shape" : [ 2, 2 ], "datatype" : "FP16", "parameters" : {"binary_data_size" : %d}},
    {"name" : "input1", "shape" : [ 2, 2 ], "datatype" : "UINT32", "data": [[1, 2], [3, 4]]},
    {"name" : "input2", "shape" : [ 3 ], "datatype" : "BOOL", "parameters" : {"binary_data_size" : 3}}
  ],
  "outputs" : [
    {"name" : "output0", "parameters" : {"binary_data" : true}},
    {"name" : "output1"}
  ]
}"""
HALVES = np.array([[1.1, 2.22], [3.345, 4.34343]], np.float16)


def test_the_mixed_request_of_kserve_with_its_size_corrected() -> None:
    head = KSERVE_REQUEST % 8
    request = parse_both_ways(head + HALVES.tobytes() + b"\1\0\1", len(head), ANY)
    halves, integers, booleans = (t.array for t in request.inputs)
    assert (halves == HALVES).all()
    assert integers.tolist() == [[1, 2], [3, 4]]
    assert booleans.tolist() == [True, False, True]
    assert request.outputs == (WantedOutput(name="output0", binary=True), WantedOutput(name="output1"))
    assert not request.binary_default


def test_the_mixed_request_of_kserve_as_printed_contradicts_itself() -> None:
    # It says 16 bytes for FP16 [2, 2], which takes 8. Its Content-Length (19 more than the JSON) has the same slip.
    head = KSERVE_REQUEST % 16
    with pytest.raises(V2Error, match=r"input 'input0': FP16 \[2, 2\] takes 8 bytes, got binary_data_size 16") as caught:
        parse_both_ways(head + bytes(19), len(head), ANY)
    assert caught.value.status == 400


def test_the_reply_to_the_mixed_request_of_kserve() -> None:
    # Printed: 16 bytes for FP16 [3, 2], which takes 12, and nested data, which real servers write flat. We add the
    # model's name, without which KServe's own client fails.
    head = KSERVE_REQUEST % 8
    request = parse_both_ways(head + bytes(8 + 3), len(head), ANY)
    outputs = [tensor("output0", "FP16", np.zeros((3, 2))), tensor("output1", "FP32", [[1.203, 5.403], [3.434, 34.234]])]
    reply = render_infer("mymodel", "1", outputs, request)
    assert joined(reply.buffers) == (
        b'{"model_name":"mymodel","model_version":"1","outputs":['
        b'{"name":"output0","datatype":"FP16","shape":[3,2],"parameters":{"binary_data_size":12}},'
        b'{"name":"output1","datatype":"FP32","shape":[2,2],"data":[1.203,5.403,3.434,34.234]}]}' + bytes(12)
    )
    assert reply.headers == [
        (b"content-type", b"application/octet-stream"),
        (b"inference-header-content-length", b"229"),
        (b"content-length", b"241"),
    ]


def test_the_second_request_of_kserve_without_its_trailing_comma() -> None:
    body = (
        b'{"model_name": "my_model", "inputs": [{"name": "input_tensor", "datatype": "FP32", "shape": [1, 2], '
        b'"data": [[32.045, 399.043]]%s}], "parameters": {"binary_data_output": true}}'
    )
    request = parse_both_ways(body % b"", None, ANY)
    assert request.binary_default
    assert request.parameters == {}
    reply = render_infer("m", "", [tensor("output_tensor1", "FP32", np.ones((2, 2)))], request)
    assert json.loads(bytes(reply.buffers[0]))["outputs"][0]["parameters"] == {"binary_data_size": 16}  # printed: 32
    with pytest.raises(V2Error, match=r"not JSON: .* trailing comma in object"):
        parse_both_ways(body % b",", None, ANY)


def test_the_request_of_triton() -> None:
    head = (
        b'{"model_name":"mymodel","inputs":[{"name":"input0","shape":[2,2],"datatype":"UINT32","parameters":{"binary_data_size":16}},'
        b'{"name":"input1","shape":[3],"datatype":"BOOL","parameters":{"binary_data_size":3}}],'
        b'"outputs":[{"name":"output0","parameters":{"binary_data":true}}]}'
    )
    request = parse_both_ways(head + struct.pack("<4I", 1, 2, 3, 4) + b"\1\0\1", len(head), ANY)
    assert request.inputs[0].array.tolist() == [[1, 2], [3, 4]]
    reply = render_infer("mymodel", "1", [tensor("output0", "FP32", np.zeros((3, 2)))], request)
    assert json.loads(bytes(reply.buffers[0]))["outputs"] == [
        {"name": "output0", "shape": [3, 2], "datatype": "FP32", "parameters": {"binary_data_size": 24}}
    ]
    assert sum(map(len, reply.buffers[1:])) == 24


# Raw binary requests


def raw(shape: tuple[int, ...], body: bytes, datatype: str = "FP32", batch: int = 0) -> Array:
    signature = ModelSignature(
        name="m", inputs=(TensorSpec(name="x", datatype=datatype, shape=shape),), max_batch_size=batch
    )
    request = parse_both_ways(body, 0, signature)
    assert (request.id, request.outputs, request.binary_default) == ("", (), True)
    assert [t.name for t in request.inputs] == ["x"]
    return request.inputs[0].array


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [((4,), 16, (4,)), ((2, 2), 16, (2, 2)), ((-1,), 32, (8,)), ((-1, 2), 16, (2, 2)), ((2, -1, 2), 48, (2, 3, 2)), ((), 4, ()), ((0,), 0, (0,)), ((-1,), 0, (0,)), ((-1, 2), 0, (0, 2)), ((-1, 0), 0, (0, 0))],
)  # fmt: skip
def test_the_shape_of_a_raw_request_follows_from_its_size(
    shape: tuple[int, ...], size: int, expected: tuple[int, ...]
) -> None:
    array = raw(shape, bytes(size))
    assert array.shape == expected
    assert not array.flags.writeable
    assert raw(shape, bytes(size), batch=8).shape == (1, *expected)


@pytest.mark.parametrize(
    ("shape", "size"), [((4,), 12), ((4,), 20), ((4,), 0), ((-1,), 7), ((-1, 2), 12), ((0,), 4), ((-1, 0), 4), ((), 8)]
)
def test_a_raw_request_of_another_size_is_refused(shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(V2Error, match=r"takes .* bytes, got"):
        raw(shape, bytes(size))


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_a_raw_request_of_any_fixed_datatype_is_a_view(datatype: str) -> None:
    body = bytes(DATATYPES[datatype].itemsize * 3)
    assert np.shares_memory(raw((-1,), body, datatype), np.frombuffer(body, np.uint8))


@pytest.mark.parametrize("body", [b"427", b"", b"\3\0\0\0abc", b"\xff"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_raw_request_of_bytes_is_the_element_itself(body: bytes, shape: tuple[int, ...]) -> None:
    assert raw(shape, body, "BYTES").shape == shape
    assert raw(shape, body, "BYTES").reshape(-1).tolist() == [body]
    assert raw(shape, body, "BYTES", batch=2).shape == (1, *shape)


@pytest.mark.parametrize("shape", [(-1,), (2,), (0,), (1, -1)])
def test_a_raw_request_of_bytes_is_one_element_only(shape: tuple[int, ...]) -> None:
    with pytest.raises(V2Error, match="one BYTES element"):
        raw(shape, b"abc", "BYTES")


def test_a_raw_request_leaves_one_dimension_open_at_most() -> None:
    with pytest.raises(V2Error, match=r"one open dimension, but input 'x' has \[-1, -1\]"):
        raw((-1, -1), bytes(16))


@pytest.mark.parametrize("count", [None, 0, 2, 3])
def test_a_raw_request_needs_one_declared_input(count: int | None) -> None:
    specs = None if count is None else tuple(TensorSpec(name=str(n), datatype="FP32", shape=(1,)) for n in range(count))
    with pytest.raises(V2Error, match="one declared input"):
        parse_both_ways(bytes(4), 0, ModelSignature(name="m", inputs=specs))


# Replies


def test_a_reply_without_a_binary_byte_is_plain_json() -> None:
    for outputs, request in (
        ([tensor("y", "INT8", [1])], V2Request()),
        ([tensor("y", "INT8", [])], V2Request(binary_default=True)),
        ([], V2Request(binary_default=True)),
    ):
        reply = render_infer("m", "1", outputs, request)
        assert reply.headers == [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(reply.buffers[0]))]
        assert len(reply.buffers) == 1
    assert b'"parameters":{"binary_data_size":0}' in bytes(
        render_infer("m", "1", [tensor("y", "INT8", [])], request).buffers[0]
    )


def test_binary_outputs_leave_as_the_models_memory() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    reply = render_infer("m", "1", [V2Tensor(name="y", datatype="FP32", array=array)], V2Request(binary_default=True))
    assert np.shares_memory(np.frombuffer(reply.buffers[1], np.uint8), array)


def test_binary_inputs_are_views_of_the_body() -> None:
    _, buffers = encode_infer_request([tensor("a", "INT8", [1, 2, 3]), tensor("b", "FP64", [1.5])])
    body = bytearray(joined(buffers))
    request = parse_both_ways(body, len(buffers[0]), ANY)
    for view in request.inputs:
        assert np.shares_memory(view.array, np.frombuffer(body, np.uint8))
        assert not view.array.flags.writeable
    assert request.inputs[1].array.tolist() == [1.5]  # though it begins at an odd address


def test_a_declared_output_that_the_model_did_not_give_is_the_servers_fault() -> None:
    signature = ModelSignature(name="m", outputs=(TensorSpec(name="y", datatype="FP32", shape=(1,)),))
    with pytest.raises(V2Error, match=r"output 'y'.* gave none") as caught:
        render_infer("m", "1", [], V2Request(outputs=(WantedOutput(name="y"),)), signature=signature)
    assert caught.value.status == 500


@pytest.mark.parametrize("value", [object(), "\ud800", {1, object()}])
def test_a_parameter_that_json_cannot_express_is_the_servers_fault(value: Any) -> None:
    with pytest.raises(V2Error) as caught:
        render_infer("m", "1", [], V2Request(), "", {"p": value})
    assert caught.value.status == 500


def test_numpy_scalars_and_read_only_mappings_are_fine_as_parameters() -> None:
    inner = V2Tensor(name="y", datatype="INT8", array=np.zeros(1, np.int8), parameters=MappingProxyType({"n": np.int64(3)}))
    body = json.loads(bytes(render_infer("m", "1", [inner], V2Request(), "", {"f": np.float32(0.5)}).buffers[0]))
    assert (body["parameters"], body["outputs"][0]["parameters"]) == ({"f": 0.5}, {"n": 3})


def test_the_models_own_id_goes_before_that_of_the_request() -> None:
    assert b'"id":"mine"' in bytes(render_infer("m", "1", [], V2Request(id="theirs"), "mine").buffers[0])


def test_an_array_that_is_not_what_its_datatype_says_is_the_servers_fault() -> None:
    wrong = V2Tensor(name="y", datatype="FP32", array=np.zeros(2))
    for binary in (True, False):
        with pytest.raises(V2Error, match="tensor 'y': datatype FP32 holds float32, got an array of float64") as caught:
            render_infer("m", "1", [wrong], V2Request(binary_default=binary))
        assert caught.value.status == 500


# Our client and our server


def test_what_the_client_asks_for_reaches_the_server() -> None:
    headers, buffers = encode_infer_request(
        [tensor("a", "FP32", [[1, 2]]), tensor("b", "BYTES", [b"x"])],
        id="7",
        parameters={"k": 1},
        outputs=[WantedOutput(name="p"), WantedOutput(name="q", binary=False)],
        binary_data_output=True,
    )
    request = serve(headers, buffers)
    assert (request.id, request.parameters, request.binary_default) == ("7", {"k": 1}, True)
    assert request.outputs == (WantedOutput(name="p"), WantedOutput(name="q", binary=False))
    assert [t.elements.tolist() for t in request.inputs] == [[[1, 2]], [b"x"]]


def test_a_json_request_has_no_binary_header() -> None:
    headers, buffers = encode_infer_request([tensor("a", "FP32", [1, 2])], binary=False)
    assert headers[0] == (b"content-type", b"application/json")
    assert joined(buffers) == b'{"inputs":[{"name":"a","datatype":"FP32","shape":[2],"data":[1.0,2.0]}]}'


def test_the_client_reads_what_the_server_wrote() -> None:
    outputs = [tensor("p", "FP16", [[1, 2]]), tensor("q", "BYTES", ["é".encode()]), tensor("r", "INT64", [])]
    request = V2Request(id="7", outputs=(WantedOutput(name="q", binary=False), WantedOutput(name="p", binary=True)))
    reply = render_infer("m", "2", outputs, request, "", {"cost": 3})
    answer = decode_infer_reply(reply.headers, joined(reply.buffers))
    assert (answer.model_name, answer.model_version, answer.id, answer.parameters) == ("m", "2", "7", {"cost": 3})
    assert [out.name for out in answer.outputs] == ["q", "p"]
    assert answer["p"].array.tolist() == [[1, 2]]
    assert answer["q"].array.tolist() == ["é".encode()]
    with pytest.raises(KeyError, match="no output 'r'"):
        answer["r"]


def test_the_client_raises_the_servers_error_with_its_status() -> None:
    for body in (V2Error("no such model").error_body(), b'{"error":"no such model"}'):
        with pytest.raises(V2Error, match="no such model") as caught:
            decode_infer_reply([(b"content-type", b"application/json")], body, status=404)
        assert caught.value.status == 404


def test_the_client_refuses_a_reply_that_is_none() -> None:
    for body in (b"", b"<html>", b"[]", b"{}", b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1]}]}'):
        with pytest.raises(V2Error):
            decode_infer_reply([], body)


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def v2_tensors(draw: st.DrawFn) -> V2Tensor:
    name = draw(st.text(min_size=1, max_size=4).filter(lambda text: text.isprintable()))
    datatype = draw(st.sampled_from(list(DATATYPES)))
    shape = draw(SHAPES)
    count = math.prod(shape)
    if datatype == "BYTES":
        array = np.empty(count, object)
        array[:] = draw(st.lists(st.text(max_size=4).map(str.encode), min_size=count, max_size=count))
    else:
        array = np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), DATATYPES[datatype])
    return V2Tensor(name=name, datatype=datatype, array=array.reshape(shape))


def described(tensors: tuple[V2Tensor, ...]) -> list[tuple[str, str, tuple[int, ...], Any]]:
    return [(t.name, t.datatype, t.array.shape, t.elements.tolist()) for t in tensors]


@settings(max_examples=150)
@given(st.lists(v2_tensors(), max_size=4, unique_by=lambda t: t.name), st.booleans(), st.text(max_size=5), st.data())
def test_requests_and_replies_round_trip(tensors: list[V2Tensor], binary: bool, id: str, data: st.DataObject) -> None:
    wanted = [WantedOutput(name=t.name, binary=data.draw(st.sampled_from([None, True, False]))) for t in tensors]
    headers, buffers = encode_infer_request(tensors, id=id, outputs=wanted, binary=binary, binary_data_output=binary)
    request = serve(headers, buffers)
    assert described(request.inputs) == described(tuple(tensors))
    assert (request.id, request.outputs) == (id, tuple(wanted))
    reply = render_infer("m", "1", request.inputs, request)
    answer = decode_infer_reply(reply.headers, joined(reply.buffers))
    assert described(answer.outputs) == described(tuple(tensors))
    assert answer.id == id
    binaries = [out.binary if out.binary is not None else binary for out in wanted]
    sizes = ["data" not in out for out in json.loads(bytes(reply.buffers[0]))["outputs"]]
    assert sizes == binaries


HEAD, DATA = (KSERVE_REQUEST % 8).decode(), HALVES.tobytes() + b"\1\0\1"
SIGNATURE = ModelSignature(
    name="m",
    inputs=(
        TensorSpec(name="input0", datatype="FP16", shape=(2, 2)),
        TensorSpec(name="input1", datatype="UINT32", shape=(-1, 2)),
        TensorSpec(name="input2", datatype="BOOL", shape=(-1,)),
    ),
)


def test_a_request_cut_anywhere_is_refused() -> None:
    whole = HEAD.encode() + DATA
    assert parse_both_ways(whole, len(HEAD), SIGNATURE).inputs
    for cut in range(len(whole)):
        for length in (len(HEAD), min(cut, len(HEAD)) or None, None):
            with pytest.raises(V2Error):
                parse_both_ways(whole[:cut], length, SIGNATURE)


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.integers(0, len(HEAD)), st.integers(0, 3), st.sampled_from(
        ["", "{", "}", "[", "]", '"', ",", ":", "null", "true", "-1", "1e400", "NaN", "[[[", "{}", '"x"', "9" * 30, '"data":[1],', '"parameters":{},', "\\ud800", "\x00"]
    )), max_size=3),
    st.binary(max_size=24) | st.just(DATA),
    st.sampled_from([-2, -1, 0, 1, None]),
    st.sampled_from([ANY, SIGNATURE]),
)  # fmt: skip
def test_garbage_raises_nothing_but_v2_errors(
    edits: list[tuple[int, int, str]], data: bytes, off: int | None, signature: ModelSignature
) -> None:
    head = HEAD
    for at, drop, piece in edits:
        head = head[:at] + piece + head[at + drop :]
    body = head.encode() + data
    length = None if off is None else max(len(head.encode()) + off, 0)
    with suppress(V2Error):
        request = parse_both_ways(body, length, signature)
        render_infer("m", "1", request.inputs, V2Request(binary_default=True))
    with suppress(V2Error):
        decode_infer_reply([] if length is None else [(b"inference-header-content-length", b"%d" % length)], body)


@settings(max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 60) | st.none(), st.binary(max_size=12))
def test_noise_raises_nothing_but_v2_errors(body: bytes, length: int | None, header: bytes) -> None:
    for signature in (ANY, SIGNATURE, ModelSignature(name="m", inputs=SIGNATURE.inputs and SIGNATURE.inputs[:1])):
        with suppress(V2Error):
            parse_both_ways(body, length, signature)
    with suppress(V2Error):
        parse_header_length([header])
