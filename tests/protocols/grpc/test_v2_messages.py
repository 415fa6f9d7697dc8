"""ModelInferRequest and its answers: golden bytes, the decisions row by row, plans, and no copies."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.events import Buffer
from protocols.floods import GRPC_AT_ONCE, GRPC_FIELDS, GRPC_NAME
from protocols.grpc.protobuf import ProtobufError, encode_field, encode_varint
from protocols.grpc.v2_client import (
    read_infer_response,
    read_streamed_response,
    render_infer_request,
)
from protocols.grpc.v2_fields import KEPT_ENTRIES
from protocols.grpc.v2_messages import (
    InferCall,
    InferRequestReader,
    InferResponseWriter,
    read_names,
    render_stream_error,
    size_of,
)
from protocols.v2 import (
    NO_PARAMETERS,
    BytesData,
    ModelSignature,
    TensorSpec,
    V2Error,
    V2Limits,
    V2Request,
    V2Tensor,
    WantedOutput,
)
from protocols.v2.tensors import DATATYPES, Array
from tests.protocols.grpc import messages as tables

ANY = ModelSignature(name="m")
ONE = ModelSignature(
    name="m",
    inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 4)),),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1,)),),
)
DATA = np.arange(4, dtype="<f4")
RAW = DATA.tobytes()
GOLDEN = bytes.fromhex(
    "0a016d"  # model_name "m"
    "120131"  # model_version "1"
    "1a0137"  # id "7"
    "2209 0a016b 1204 1a02c3a9"  # parameters {"k": string_param "é"}
    "2a0d 0a0178 1204 46503332 1a02 0104"  # inputs: "x", FP32, [1, 4]
    "3203 0a0179"  # outputs: "y"
    "3a10 00000000 0000803f 00000040 00004040"  # raw_input_contents
)
ANSWER = bytes.fromhex(
    "0a016d"  # model_name
    "120131"  # model_version
    "1a0137"  # id
    "2a0d 0a0179 1204 46503332 1a02 0104"  # outputs
    "3210 00000000 0000803f 00000040 00004040"  # raw_output_contents
)
ENTRY = {"name": "x", "datatype": "FP32", "shape": [1, 4]}


def joined(buffers: list[Buffer]) -> bytes:
    return b"".join(map(bytes, buffers))


def message(*inputs: dict[str, Any], raw: Any = (), **fields: Any) -> bytes:
    return tables.REQUEST.write({"model_name": "m", "inputs": inputs, "raw_input_contents": raw, **fields})


def read(data: bytes, limits: V2Limits | None = None) -> InferCall:
    reader = InferRequestReader() if limits is None else InferRequestReader(limits)
    return reader.read(data)


def refusal(data: bytes, limits: V2Limits | None = None) -> str:
    with pytest.raises(V2Error) as caught:
        read(data, limits)
    assert caught.value.status == 400
    return caught.value.message


def typed(datatype: str, shape: list[int], **contents: Any) -> bytes:
    return message({"name": "x", "datatype": datatype, "shape": shape, "contents": contents})


def only(data: bytes) -> Array:
    (tensor,) = read(data).request.inputs
    return tensor.elements


def tensor(array: Any, datatype: str = "FP32", name: str = "y", **more: Any) -> V2Tensor:
    return V2Tensor(name=name, datatype=datatype, array=np.asarray(array, DATATYPES[datatype]), **more)


# Golden bytes


def test_a_request_is_read() -> None:
    call = read(GOLDEN)
    assert (call.model_name, call.model_version, call.typed, call.empty_final) == ("m", "1", False, False)
    request = call.request
    assert (request.id, request.parameters, request.copied) == ("7", {"k": "é"}, 0)
    (given,) = request.inputs
    assert (given.name, given.datatype, given.array.shape, given.parameters) == ("x", "FP32", (1, 4), NO_PARAMETERS)
    assert given.elements.tolist() == [[0, 1, 2, 3]]
    assert request.outputs == (WantedOutput(name="y"),)
    assert request.wants_binary("y")


def test_a_client_writes_the_same_request() -> None:
    inputs = [tensor(DATA.reshape(1, 4), name="x")]
    outputs = [WantedOutput(name="y")]
    buffers = render_infer_request("m", inputs, model_version="1", id="7", parameters={"k": "é"}, outputs=outputs)
    assert joined(buffers) == GOLDEN


def test_an_answer_is_written_and_read() -> None:
    writer = InferResponseWriter(ANY, version="1")
    buffers = writer.render([tensor(DATA.reshape(1, 4))], V2Request(id="7"))
    assert joined(buffers) == ANSWER
    answer = read_infer_response(ANSWER)
    assert (answer.model_name, answer.model_version, answer.id, answer.parameters) == ("m", "1", "7", NO_PARAMETERS)
    assert answer["y"].elements.tolist() == [[0, 1, 2, 3]]


def test_every_truncation_is_refused_or_a_request_of_fewer_fields() -> None:
    reader = InferRequestReader()
    reader.read(GOLDEN)
    whole = message(ENTRY, raw=[RAW])
    reader.read(whole)
    for data in (GOLDEN, whole, ANSWER):
        for size in range(len(data)):
            for call in (reader.read, read_infer_response, read_streamed_response):
                try:
                    got = call(data[:size])
                except (ProtobufError, V2Error):
                    continue
                assert not isinstance(got, InferCall) or not got.request.inputs


@given(st.binary(max_size=120))
@settings(max_examples=100)
def test_garbage_is_read_or_refused(data: bytes) -> None:
    for given_ in (data, GOLDEN[:14] + data, GOLDEN + data):
        for call in (read, read_infer_response, read_streamed_response):
            with suppress(ProtobufError, V2Error):
                call(given_)


# The decisions: raw contents


def test_fewer_raw_contents_name_the_input() -> None:
    said = refusal(message(ENTRY, {**ENTRY, "name": "z"}, raw=[RAW]))
    assert said == "input 'z' has no entry in raw_input_contents: 2 inputs, got 1 entries"


def test_more_raw_contents_are_refused() -> None:
    assert refusal(message(ENTRY, raw=[RAW, RAW])) == "raw_input_contents has 2 entries for 1 inputs"
    assert refusal(message(raw=[RAW])) == "raw_input_contents has 1 entries for 0 inputs"


@pytest.mark.parametrize("where", ["x", "z"])
def test_raw_and_typed_contents_exclude_each_other(where: str) -> None:
    entries = [
        {**ENTRY, "name": name} | ({"contents": {"fp32_contents": [0.0] * 4}} if name == where else {})
        for name in ("x", "z")
    ]
    said = refusal(message(*entries, raw=[RAW, RAW]))
    assert said == f"input '{where}' has contents, and there are raw_input_contents: a message has one or the other"


def test_raw_contents_of_the_wrong_size_say_what_was_expected() -> None:
    assert refusal(message(ENTRY, raw=[RAW[:-1]])) == "tensor 'x': FP32 [1, 4] takes 16 bytes, got 15"


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_floats_of_16_bits_are_exact_when_raw(datatype: str) -> None:
    array = np.array([0.1, -2.5, np.inf], DATATYPES[datatype])
    data = message({"name": "x", "datatype": datatype, "shape": [3]}, raw=[array.tobytes()])
    assert only(data).tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\x05\0\0\0a", "tensor 'x': element 0 of 1 has 5 bytes, only 1 are left"),
        (b"\x01\0\0\0ab", "tensor 'x': 1 bytes are left after the last of 1 elements"),
        (b"\x01\0\0", "tensor 'x': BYTES [1] has 1 elements, each with a length of 4 bytes, got 3 bytes"),
    ],
)
def test_raw_bytes_are_whole(raw: bytes, said: str) -> None:
    assert refusal(message({"name": "x", "datatype": "BYTES", "shape": [1]}, raw=[raw])) == said


def test_bytes_need_not_be_text_in_either_form() -> None:
    raw = struct.pack("<I", 2) + b"\xff\0"
    data = message({"name": "x", "datatype": "BYTES", "shape": [1]}, raw=[raw])
    (given_,) = read(data).request.inputs
    assert type(given_.array) is BytesData
    assert given_.elements.tolist() == [b"\xff\0"]
    assert only(typed("BYTES", [2], bytes_contents=[b"\xff\0", b""])).tolist() == [b"\xff\0", b""]


def test_a_boolean_that_is_not_1_is_true() -> None:
    data = message({"name": "x", "datatype": "BOOL", "shape": [3]}, raw=[b"\x02\x00\x01"])
    assert only(data).tobytes() == b"\x01\x00\x01"
    assert read(data).request.copied == 3
    entry = encode_field(1, b"x") + encode_field(2, b"BOOL") + encode_field(3, b"\x03")
    varints = encode_field(5, encode_field(1, bytes.fromhex("ac020001")))
    assert only(encode_field(5, entry + varints)).tobytes() == b"\x01\x00\x01"


@pytest.mark.parametrize("shape", [[2**62, 4], [2**32, 2**31], [2**63 - 1] * 16])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "INT8"])
@pytest.mark.parametrize("raw", [[], [b""]])
def test_sizes_are_compared_before_anything_is_made(shape: list[int], datatype: str, raw: list[bytes]) -> None:
    said = refusal(message({"name": "x", "datatype": datatype, "shape": shape}, raw=raw))
    assert "'x'" in said


@pytest.mark.parametrize("raw", [[], [b""]])
def test_a_shape_with_a_zero_is_bounded_too(raw: list[bytes]) -> None:
    assert "is too large" in refusal(message({"name": "x", "datatype": "FP32", "shape": [0, 2**62, 4]}, raw=raw))
    assert only(message({"name": "x", "datatype": "FP32", "shape": [0, 4]}, raw=raw)).shape == (0, 4)


def test_an_empty_tensor_has_its_raw_entry() -> None:
    empty = {"name": "e", "datatype": "BYTES", "shape": [0]}
    call = read(message(empty, ENTRY, raw=[b"", RAW]))
    assert [given_.array.shape for given_ in call.request.inputs] == [(0,), (1, 4)]


def test_rank_0_is_one_element() -> None:
    assert only(message({"name": "x", "datatype": "FP32", "shape": []}, raw=[RAW[:4]])).shape == ()


@pytest.mark.parametrize("raw", [[], [RAW]])
def test_a_negative_dimension_is_refused(raw: list[bytes]) -> None:
    said = refusal(message({**ENTRY, "shape": [-1, 4]}, raw=raw))
    assert said == "tensor 'x': a dimension must be a non-negative integer, got -1"


@pytest.mark.parametrize("shape", [[1] * 17, [1] * 400])
def test_dimensions_are_bounded_packed_and_not(shape: list[int]) -> None:
    assert refusal(message({**ENTRY, "shape": shape}, raw=[RAW])).startswith("tensor 'x': at most 16 dimensions, got ")
    entry = b"".join([encode_field(1, b"x"), encode_field(2, b"FP32"), b"\x18\x01" * len(shape)])
    assert refusal(encode_field(5, entry)).startswith("tensor 'x': at most 16 dimensions, got ")


@pytest.mark.parametrize("datatype", ["", "fp32", "FP8", "é"])
def test_an_unknown_datatype_is_refused(datatype: str) -> None:
    said = refusal(message({**ENTRY, "datatype": datatype}, raw=[RAW]))
    assert said.startswith("input 'x': datatype must be one of BOOL, ")
    assert said.endswith(f"got {datatype!r}")


# The decisions: typed contents

TYPED: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [True, False, True]),
    "INT8": ("int_contents", [-128, 0, 127]), "INT16": ("int_contents", [-(2**15), 5, 2**15 - 1]),
    "INT32": ("int_contents", [-(2**31), -1, 2**31 - 1]), "INT64": ("int64_contents", [-(2**63), 1, 2**63 - 1]),
    "UINT8": ("uint_contents", [0, 127, 255]), "UINT16": ("uint_contents", [0, 128, 65535]),
    "UINT32": ("uint_contents", [0, 1, 2**32 - 1]), "UINT64": ("uint64_contents", [0, 2**63, 2**64 - 1]),
    "FP32": ("fp32_contents", [0.5, -0.0, float("inf")]), "FP64": ("fp64_contents", [0.1, -1e300, 0.0]),
    "BYTES": ("bytes_contents", [b"", b"a" * 300, b"\xff"]),
}  # fmt: skip


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_are_exact_in_every_form(datatype: str) -> None:
    field, values = TYPED[datatype]
    packed = typed(datatype, [3], **{field: values})
    array = only(packed)
    assert array.tolist() == values
    assert array.dtype == DATATYPES[datatype]
    assert not array.flags.writeable
    assert read(packed).typed
    (inputs,) = [piece for piece in tables.split(packed) if piece[0] == 0x2A]

    class Loose:
        random = staticmethod(lambda: 0.0)

    assert only(b"\x0a\x01m" + tables.loosened(inputs, Loose())).tolist() == values  # type: ignore[arg-type]
    # the request of our own client is read as well
    wanted = tensor(values if datatype != "BYTES" else np.array(values, object), datatype, "x")
    assert only(joined(render_infer_request("m", [wanted], typed=True))).tolist() == values


@pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT64", "BOOL", "FP32", "BYTES", "UINT8"])
def test_many_typed_elements_are_read_in_steps(datatype: str) -> None:
    count = 150_000
    if datatype == "BYTES":
        array = np.empty(count, object)
        array[:] = [b"%d" % index for index in range(count)]
    elif datatype == "BOOL":
        array = np.arange(count) % 3 == 0
    else:
        scale = 1 if datatype == "UINT8" else 2**16 if datatype == "INT32" else 2**46
        array = (np.arange(count, dtype=np.int64) * scale % (200 if datatype == "UINT8" else 2**62)).astype(
            DATATYPES[datatype]
        )
    data = joined(render_infer_request("m", [V2Tensor(name="x", datatype=datatype, array=array)], typed=True))
    assert (only(data) == array).all()


@pytest.mark.parametrize(
    ("datatype", "value", "rule"),
    [
        ("INT8", 300, "INT8 takes whole numbers from -128 to 127, got 300 at element 1"),
        ("INT8", -129, "INT8 takes whole numbers from -128 to 127, got -129 at element 1"),
        ("INT16", 2**15, "INT16 takes whole numbers from -32768 to 32767, got 32768 at element 1"),
        ("UINT8", 256, "UINT8 takes whole numbers from 0 to 255, got 256 at element 1"),
        ("UINT16", 2**32 - 1, "UINT16 takes whole numbers from 0 to 65535, got 4294967295 at element 1"),
    ],
)
def test_small_integers_are_not_cut(datatype: str, value: int, rule: str) -> None:
    field = TYPED[datatype][0]
    assert refusal(typed(datatype, [2], **{field: [1, value]})) == f"tensor 'x': {rule}"


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_floats_of_16_bits_have_no_contents(datatype: str) -> None:
    said = f"tensor 'x': contents have no field for {datatype}: send it raw"
    assert refusal(typed(datatype, [1], fp32_contents=[1.0])) == said
    assert refusal(typed(datatype, [1])) == said
    with pytest.raises(V2Error, match="contents have no field for"):
        render_infer_request("m", [tensor([1], datatype)], typed=True)


def test_contents_of_another_type_or_of_two_are_refused() -> None:
    assert refusal(typed("FP32", [1], fp64_contents=[1.0])) == "tensor 'x': FP32 takes fp32_contents, got fp64_contents"
    assert (
        refusal(typed("INT64", [1], int64_contents=[1], int_contents=[1]))
        == "tensor 'x': INT64 takes int64_contents, got int_contents"
    )


def test_contents_of_another_count_are_refused() -> None:
    assert refusal(typed("FP32", [2], fp32_contents=[1.0])) == "tensor 'x': shape [2] takes 2 values, fp32_contents has 1"
    assert (
        refusal(typed("BYTES", [1], bytes_contents=[b"", b""]))
        == "tensor 'x': shape [1] takes 1 values, bytes_contents has 2"
    )
    assert refusal(typed("INT32", [2])) == "tensor 'x': shape [2] takes 2 values, int_contents has 0"
    assert refusal(message(ENTRY)) == "tensor 'x': shape [1, 4] takes 4 values, fp32_contents has 0"


def test_contents_in_parts_are_merged() -> None:
    head = encode_field(1, b"x") + encode_field(2, b"INT32") + encode_field(3, b"\x05")
    parts = b"".join(
        encode_field(5, part) for part in (bytes.fromhex("12020102"), b"", bytes.fromhex("1003"), bytes.fromhex("12020405"))
    )
    assert only(encode_field(5, head + parts)).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "contents",
    ["1201 80", "120b ffffffffffffffffffff01", "3203 000000", "3a04 00000000", "1280", "120301", "13"],
)
def test_contents_that_are_no_message_are_malformed(contents: str) -> None:
    entry = (
        encode_field(1, b"x")
        + encode_field(2, b"INT32")
        + encode_field(3, b"\x01")
        + encode_field(5, bytes.fromhex(contents))
    )
    with pytest.raises(ProtobufError):
        read(encode_field(5, entry))


def test_a_long_varint_is_found_wherever_it_is() -> None:
    for before in (0, 65_520, 65_535, 65_536):
        packed = b"\x01" * before + b"\xff" * 10 + b"\x01"
        entry = encode_field(1, b"x") + encode_field(2, b"INT64") + encode_field(5, encode_field(3, packed))
        with pytest.raises(ProtobufError, match="more than ten bytes"):
            read(encode_field(5, entry))


# The decisions: names, parameters and outputs


def test_names_are_there_once() -> None:
    assert refusal(message({**ENTRY, "name": ""}, raw=[RAW])) == "inputs[0] has no name"
    assert refusal(message(ENTRY, ENTRY, raw=[RAW, RAW])) == "inputs has 'x' twice"
    assert refusal(message(outputs=[{"name": "y"}, {"name": "y"}])) == "outputs has 'y' twice"
    assert refusal(message(outputs=[{}])) == "outputs[0] has no name"


def test_what_the_model_declares_is_checked_by_name() -> None:
    with pytest.raises(V2Error, match="unknown input 'z', missing input 'x': model 'm' takes 'x'"):
        read(message({**ENTRY, "name": "z"}, raw=[RAW])).check(ONE)
    with pytest.raises(V2Error, match="unknown output 'z': model 'm' gives 'y'"):
        read(message(ENTRY, raw=[RAW], outputs=[{"name": "z"}])).check(ONE)
    read(message(ENTRY, raw=[RAW], outputs=[{"name": "y"}])).check(ONE)


@pytest.mark.parametrize("place", ["request", "input", "output"])
def test_a_parameter_without_a_value_is_refused(place: str) -> None:
    empty = {"parameters": {"k": {}}}
    data = {
        "request": message(**empty),
        "input": message({**ENTRY, **empty}, raw=[RAW]),
        "output": message(outputs=[{"name": "y", **empty}]),
    }[place]
    assert refusal(data).startswith("parameter 'k' of ")


@pytest.mark.parametrize(
    ("choice", "value"),
    [("bool_param", False), ("int64_param", -3), ("string_param", "é"), ("double_param", 0.5), ("uint64_param", 2**64 - 1)],
)
def test_parameters_of_each_type_are_read(choice: str, value: Any) -> None:
    call = read(message(parameters={"k": {choice: value}}))
    assert call.request.parameters == {"k": value}
    assert type(call.request.parameters["k"]) is type(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_parameter_is_finite(value: float) -> None:
    assert refusal(message(parameters={"k": {"double_param": value}})).startswith("parameter 'k' of the request must be")


def test_a_request_of_a_sequence_is_refused_where_those_cannot_be_kept_together() -> None:
    asked = message(parameters={"sequence_id": {"int64_param": 7}})
    assert read(asked).request.parameters == {"sequence_id": 7}
    assert refusal(asked, V2Limits(sequences=False)).startswith("parameter sequence_id of the request is 7")


def test_names_of_triton_are_reserved() -> None:
    said = refusal(message(parameters={"triton_x": {"bool_param": True}}))
    assert said == "parameter 'triton_x' of the request: names that begin with triton_ are reserved"


def test_an_empty_final_response_may_be_asked_for() -> None:
    name = "triton_enable_empty_final_response"
    call = read(message(parameters={name: {"bool_param": True}}))
    assert call.empty_final
    assert not call.request.parameters
    assert refusal(message(parameters={name: {"int64_param": 1}})) == f"{name} of the request must be true or false, got 1"


def test_parameters_of_the_transfer_are_ignored() -> None:
    sized = {**ENTRY, "parameters": {"binary_data_size": {"int64_param": 3}}}
    data = message(
        sized,
        raw=[RAW],
        parameters={"binary_data_output": {"bool_param": False}},
        outputs=[{"name": "y", "parameters": {"binary_data": {"bool_param": False}}}],
    )
    request = read(data).request
    assert not request.parameters
    assert not request.inputs[0].parameters
    assert request.wants_binary("y")


@pytest.mark.parametrize("place", ["input", "output"])
def test_there_is_no_shared_memory(place: str) -> None:
    region = {"parameters": {"shared_memory_region": {"string_param": "r"}}}
    data = message({**ENTRY, **region}, raw=[RAW]) if place == "input" else message(outputs=[{"name": "x", **region}])
    assert refusal(data) == f"{place} 'x' has the parameter shared_memory_region, of an extension that is not implemented"


def test_classification_is_a_number_of_classes() -> None:
    def asked(value: Any) -> bytes:
        return message(outputs=[{"name": "y", "parameters": {"classification": value}}])

    assert read(asked({"int64_param": 3})).request.outputs == (WantedOutput(name="y", classification=3),)
    for value in ({"int64_param": -1}, {"bool_param": True}, {"double_param": 1.0}):
        assert refusal(asked(value)).startswith("classification of output 'y' must be a number of classes, got ")
    request = read(asked({"int64_param": 2})).request
    answer = read_infer_response(joined(InferResponseWriter(ANY).render([tensor([3, 9, 5])], request)))
    assert answer["y"].elements.tolist() == [b"9.000000:1", b"5.000000:2"]


# Limits


def test_the_limits_of_requests_hold() -> None:
    limits = V2Limits(tensors=2, dims=2, elements=3)
    entries = [{**ENTRY, "name": str(index)} for index in range(3)]
    assert refusal(message(*entries), limits) == "inputs has at most 2 entries (limits.tensors), got more"
    assert (
        refusal(message(outputs=[{"name": "a"}] * 3), limits) == "outputs has at most 2 entries (limits.tensors), got more"
    )
    assert refusal(message(raw=[b""] * 3), limits) == "raw_input_contents has more than 2 entries (limits.tensors)"
    assert "limits.bytes_elements" in refusal(typed("BYTES", [4], bytes_contents=[b""] * 4), limits)


@pytest.mark.parametrize(
    "part",
    [
        encode_field(4, b"\x0a\x01k\x12\x02\x08\x01"),  # a parameter
        encode_field(1, b"m"),
        b"\x48\x00",  # an unknown field
        encode_field(5, encode_field(5, b"\x10\x01" * 4)),  # numbers that are not packed
        encode_field(5, encode_field(5, b"\x42\x00" * 4)),  # elements of BYTES
        encode_field(6, b"\x48\x00" * 4),
    ],
)
def test_the_fields_of_a_message_are_counted(part: bytes) -> None:
    with pytest.raises(ProtobufError, match="too many fields"):
        read(part * 21, V2Limits(values=20))


# No copies


def test_raw_tensors_are_views_of_the_message() -> None:
    data = message(ENTRY, raw=[RAW])
    for given_ in (data, bytearray(data), memoryview(data)):
        reader = InferRequestReader()
        for _ in range(2):
            array = reader.read(given_).request.inputs[0].elements
            assert np.shares_memory(array, np.frombuffer(given_, np.uint8))
            assert not array.flags.writeable


def test_packed_floats_are_views_of_the_message() -> None:
    data = typed("FP32", [4], fp32_contents=[1.0] * 4)
    call = read(data)
    assert np.shares_memory(call.request.inputs[0].elements, np.frombuffer(data, np.uint8))
    assert call.request.copied == 0
    assert read(typed("INT32", [4], int_contents=[1] * 4)).request.copied == 16


@pytest.mark.parametrize("typed", [False, True])
def test_large_outputs_leave_as_they_are(typed: bool) -> None:
    array = np.ones(5000, "<f4")
    for buffers in (
        InferResponseWriter(ANY).render([tensor(array)], V2Request(), typed=typed),
        render_infer_request("m", [tensor(array)], typed=typed),
    ):
        assert any(np.shares_memory(np.frombuffer(buffer, np.uint8), array) for buffer in buffers)


# Plans


def kept(*heads: bytes, **options: Any) -> InferRequestReader:
    reader = InferRequestReader(**options)
    for data in heads:
        assert reader.read(data).plan is None
    return reader


@pytest.mark.parametrize("id", ["", "7", "a-long-id-" * 5])
def test_a_request_that_differs_in_data_and_id_is_read_by_its_plan(id: str) -> None:
    first = message(ENTRY, {**ENTRY, "name": "z", "datatype": "INT64"}, raw=[RAW, RAW * 2], outputs=[{"name": "y"}])
    reader = kept(first)
    other = message(
        ENTRY, {**ENTRY, "name": "z", "datatype": "INT64"}, raw=[RAW[::-1], RAW[::-1] * 2], outputs=[{"name": "y"}], id=id
    )
    call = reader.read(other)
    assert call.plan is not None
    plain = read(other)
    assert call.request.id == plain.request.id == id
    assert call.request.outputs == plain.request.outputs
    assert (call.model_name, call.model_version, call.typed) == (plain.model_name, plain.model_version, plain.typed)
    for ours, theirs in zip(call.request.inputs, plain.request.inputs, strict=True):
        assert (ours.name, ours.datatype, ours.array.shape) == (theirs.name, theirs.datatype, theirs.array.shape)
        assert ours.elements.tobytes() == theirs.elements.tobytes()


@pytest.mark.parametrize(
    "data",
    [
        message(ENTRY, raw=[RAW], parameters={"k": {"bool_param": True}}),
        message({**ENTRY, "parameters": {"k": {"bool_param": True}}}, raw=[RAW]),
        message({"name": "x", "datatype": "BOOL", "shape": [2]}, raw=[b"\0\1"]),
        message({"name": "x", "datatype": "BYTES", "shape": [1]}, raw=[b"\0\0\0\0"]),
        message({"name": "x", "datatype": "FP32", "shape": [0]}, raw=[b""]),
        message(ENTRY, raw=[RAW]) + encode_field(3, b"7"),  # the id behind the data
        message(ENTRY, raw=[RAW]) + encode_field(9, b"7"),
        message(ENTRY, raw=[RAW], id="7") + encode_field(3, b"8"),
        encode_field(3, b"8") + message(ENTRY, raw=[RAW]),
        encode_field(7, RAW) + message(ENTRY),  # the data before the rest
        message({**ENTRY, "name": "n" * 1025}, raw=[RAW]),
        message(ENTRY, raw=[RAW], id="i" * 200),
        typed("FP32", [1], fp32_contents=[0.5]),
        message(),
    ],
)  # fmt: skip
def test_others_have_no_plan(data: bytes) -> None:
    reader = kept(data)
    assert reader.read(data).plan is None


def test_a_message_with_the_same_beginning_that_is_another_is_read_as_such() -> None:
    first = message(ENTRY, {**ENTRY, "name": "z"}, raw=[RAW, RAW])
    reader = kept(first)
    head = first[: -2 * len(RAW) - 2]
    other = head + RAW + encode_field(100, b"1234567890123")[:1] + b"\x07" + first[-len(RAW) :]
    assert len(other) == len(first)
    with pytest.raises((ProtobufError, V2Error)):
        reader.read(other)


def test_the_id_of_a_plan_is_text() -> None:
    reader = kept(message(ENTRY, raw=[RAW], id="77"))
    assert reader.read(message(ENTRY, raw=[RAW], id="78")).request.id == "78"
    broken = message(ENTRY, raw=[RAW], id="77").replace(b"77", b"7\xff")
    with pytest.raises(ProtobufError, match="not UTF-8"):
        reader.read(broken)


def test_a_plan_is_checked_once_for_each_signature() -> None:
    reader = kept(message(ENTRY, raw=[RAW]))
    call = reader.read(message(ENTRY, raw=[RAW]))
    call.check(ONE)
    assert call.plan is not None
    assert call.plan.checked is ONE
    call.check(ONE)
    other = ModelSignature(name="m", inputs=(TensorSpec(name="x", datatype="INT8", shape=(4,)),))
    for _ in range(2):
        with pytest.raises(V2Error, match="datatype must be INT8, got FP32"):
            reader.read(message(ENTRY, raw=[RAW])).check(other)


def test_plans_are_few() -> None:
    reader = InferRequestReader()
    for index in range(1000):
        reader.read(message({**ENTRY, "name": str(index)}, raw=[RAW]))
        reader.read(message({"name": "x", "datatype": "UINT8", "shape": [index + 1]}, raw=[bytes(index + 1)]))
    assert len(reader._plans) <= KEPT_ENTRIES
    assert len(reader._lengths) <= KEPT_ENTRIES
    assert all(len(lengths) <= 4 for lengths in reader._lengths.values())


# Answers


def test_an_answer_has_one_raw_entry_for_each_output() -> None:
    outputs = [tensor([], name="a"), tensor([1], name="b"), tensor(np.array([], object), "BYTES", "c")]
    data = tables.RESPONSE.read(joined(InferResponseWriter(ANY).render(outputs, V2Request())))
    assert data["raw_output_contents"] == [b"", RAW[4:8], b""]


def test_a_typed_answer_is_raw_where_an_output_has_no_contents() -> None:
    writer = InferResponseWriter(ANY)
    both = [tensor([1], name="a"), tensor([1], "FP16", "b")]
    data = tables.RESPONSE.read(joined(writer.render(both, V2Request(), typed=True)))
    assert len(data["raw_output_contents"]) == 2
    data = tables.RESPONSE.read(joined(writer.render(both[:1], V2Request(), typed=True)))
    assert data["raw_output_contents"] == []
    assert data["outputs"][0]["contents"]["fp32_contents"] == [1.0]


def test_outputs_come_in_the_order_requested() -> None:
    request = V2Request(outputs=(WantedOutput(name="b"), WantedOutput(name="a")))
    outputs = [tensor([1], name="a"), tensor([2], name="b"), tensor([3], name="c")]
    answer = read_infer_response(joined(InferResponseWriter(ANY).render(outputs, request)))
    assert [output.name for output in answer.outputs] == ["b", "a"]
    assert joined(InferResponseWriter(ANY).render(outputs, request)) == joined(
        InferResponseWriter(ANY).render(outputs, request)
    )


def test_what_a_model_may_not_give_is_its_fault() -> None:
    writer = InferResponseWriter(ONE)
    for outputs, said in (
        ([tensor([1], name="z")], "is not one that it declares"),
        ([tensor([1], "FP64")], "is declared as FP32"),
        (
            [V2Tensor(name="y", datatype="FP32", array=np.ones(1, "<i4"))],
            "datatype FP32 holds float32, got an array of int32",
        ),
    ):
        with pytest.raises(V2Error, match=said) as caught:
            writer.render(outputs, V2Request())
        assert caught.value.status == 500
    for parameters in ({"k": None}, {"k": 2**64}, {"k": "\ud800"}, {"k": [1]}):
        with pytest.raises(V2Error, match="parameter 'k' of the response"):
            writer.render([tensor([1])], V2Request(), parameters=parameters)
    with pytest.raises(V2Error, match="a tensor has a name"):
        InferResponseWriter(ANY).render([tensor([1], name="")], V2Request())


def test_parameters_keep_their_types() -> None:
    parameters = {"b": True, "i": -1, "u": 2**63, "d": 1.0, "s": "", "n": np.float32(0.5)}
    answer = read_infer_response(joined(InferResponseWriter(ANY).render([], V2Request(), parameters=parameters)))
    assert repr(answer.parameters) == "{'b': True, 'i': -1, 'u': 9223372036854775808, 'd': 1.0, 's': '', 'n': 0.5}"


@pytest.mark.parametrize("final", [False, True])
def test_a_stream_says_which_response_is_the_last(final: bool) -> None:
    data = joined(InferResponseWriter(ANY, version="1").render_streamed([tensor([1])], V2Request(id="7"), final=final))
    got = read_streamed_response(data)
    assert (got.error, got.final, got.answer.id) == ("", final, "7")
    assert got.answer["y"].elements.tolist() == [1]
    assert tables.STREAM_RESPONSE.read(data)["infer_response"]["parameters"] == {
        "triton_final_response": {"bool_param": final}
    }


def test_the_empty_final_response_has_no_outputs() -> None:
    data = InferResponseWriter(ANY, version="1").render_end(V2Request(id="7"))
    assert data == bytes.fromhex("1226 0a016d 120131 1a0137 221b 0a15") + b"triton_final_response" + bytes.fromhex(
        "12020801"
    )
    assert read_streamed_response(data).final


def test_an_error_of_a_stream_has_the_id_and_is_final() -> None:
    got = read_streamed_response(render_stream_error("no model 'é'", "7", model_name="m"))
    assert (got.error, got.answer.id, got.answer.model_name, got.final) == ("no model 'é'", "7", "m", True)
    assert read_streamed_response(render_stream_error("\ud800")).error == "?"


def test_a_response_in_parts_is_merged() -> None:
    parts = b"".join(encode_field(2, piece) for piece in tables.split(ANSWER))
    assert read_streamed_response(parts).answer["y"].elements.tolist() == [[0, 1, 2, 3]]
    with pytest.raises(ProtobufError, match="more than 1000 parts"):
        read_streamed_response(b"\x12\x00" * 1001)


def test_a_server_may_say_nothing_of_the_end() -> None:
    assert read_streamed_response(encode_field(2, ANSWER)).final is None
    assert read_streamed_response(b"").answer.outputs == ()


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name not in ("FP16", "BF16")])
def test_typed_answers_are_read(datatype: str) -> None:
    field, values = TYPED[datatype]
    given_ = tensor(values if datatype != "BYTES" else np.array(values, object), datatype)
    data = joined(InferResponseWriter(ANY).render([given_], V2Request(), typed=True))
    assert tables.RESPONSE.read(data)["outputs"][0]["contents"][field] == values
    assert read_infer_response(data)["y"].elements.tolist() == values


def test_outputs_that_cannot_be_are_refused() -> None:
    entry = {"name": "y", "datatype": "FP32", "shape": [2]}
    data = tables.RESPONSE.write({"outputs": [entry], "raw_output_contents": [b""]})
    with pytest.raises(V2Error, match="FP32 \\[2\\] takes 8 bytes, got 0"):
        read_infer_response(data)
    data = tables.RESPONSE.write({"outputs": [entry], "raw_output_contents": [b"", b""]})
    with pytest.raises(V2Error, match="raw_output_contents has 2 entries for 1 outputs"):
        read_infer_response(data)


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_a_name_or_an_id_that_is_no_text_is_the_models_fault(name: str) -> None:
    writer = InferResponseWriter(ANY)
    with pytest.raises(V2Error, match="a tensor") as caught:
        writer.render([tensor([1], name=name)], V2Request(), typed=True)
    assert caught.value.status == 500
    with pytest.raises(V2Error, match="id is text as UTF-8"):
        writer.render([tensor([1])], V2Request(), "\ud800")


def test_a_client_asks_for_classes() -> None:
    wanted = WantedOutput(name="y", classification=3)
    call = read(joined(render_infer_request("m", [tensor([1], name="x")], outputs=[wanted], parameters={"k": 1})))
    assert call.request.outputs == (wanted,)
    assert call.request.parameters == {"k": 1}


def test_answers_have_a_bound_on_raw_contents() -> None:
    with pytest.raises(V2Error, match="raw_output_contents has more than 256 entries"):
        read_infer_response(b"\x32\x00" * 257, V2Limits())


@pytest.mark.parametrize("position", [0, 70_000, 149_999])
def test_a_number_out_of_range_is_found_among_many(position: int) -> None:
    numbers = np.full(150_000, 100, "<i4")
    numbers[position] = -129
    entry = {"name": "x", "datatype": "INT8", "shape": [150_000], "contents": {"int_contents": numbers.tolist()}}
    said = refusal(message(entry))
    assert said == f"tensor 'x': INT8 takes whole numbers from -128 to 127, got -129 at element {position}"


def test_typed_bytes_may_be_none() -> None:
    assert only(typed("BYTES", [0, 3])).shape == (0, 3)
    assert joined(render_infer_request("m", [tensor(np.empty(0, object), "BYTES", "x")], typed=True)).endswith(b"\x2a\x00")


def test_two_plans_of_one_size_are_told_apart() -> None:
    first = message(ENTRY, raw=[RAW])
    longer = message({**ENTRY, "name": "xx", "shape": [3]}, raw=[RAW[:12]])
    same = message({**ENTRY, "name": "x" * 4, "shape": [4]}, raw=[RAW[:16]])
    reader = kept(first, longer, same)
    for data in (first, longer, same):
        call = reader.read(data)
        assert call.plan is not None
        assert call.request.inputs[0].name == read(data).request.inputs[0].name


def test_an_id_behind_where_a_plan_ends_is_read_by_the_rules() -> None:
    whole = message({**ENTRY, "shape": [50]}, raw=[bytes(200)])
    reader = kept(whole)
    name = encode_field(1, b"m" * 100)
    with pytest.raises(ProtobufError, match="number 0"):
        reader.read(name + encode_field(3, b"7") + bytes(len(whole) - len(name)))


def test_a_model_with_a_long_name_is_read() -> None:
    data = tables.REQUEST.write({"model_name": "m" * 130, "id": "7", "inputs": [ENTRY], "raw_input_contents": [RAW]})
    reader = kept(data, data)
    assert (reader.read(data).model_name, reader.read(data).request.id) == ("m" * 130, "7")


def test_unpacked_and_packed_contents_of_one_number_go_together() -> None:
    entry = encode_field(1, b"x") + encode_field(2, b"INT64") + encode_field(3, b"\xd2\x01")
    packed = encode_field(3, b"\x01" * 200)
    assert only(encode_field(5, entry + encode_field(5, packed + b"\x18\x02" * 10))).tolist() == [1] * 200 + [2] * 10


def test_an_output_has_its_parameters() -> None:
    output = tensor([1], parameters={"k": "v"})
    for typed in (False, True):
        answer = read_infer_response(joined(InferResponseWriter(ANY).render([output], V2Request(), typed=typed)))
        assert answer["y"].parameters == {"k": "v"}
        assert answer["y"].elements.tolist() == [1]


@pytest.mark.parametrize("size", [127, 128, 70_000])
def test_contents_that_end_within_a_varint_are_malformed(size: int) -> None:
    entry = encode_field(1, b"x") + encode_field(2, b"INT64") + encode_field(5, encode_field(3, b"\x01" * size + b"\x80"))
    with pytest.raises(ProtobufError, match="cut off"):
        read(encode_field(5, entry))


# Many fields


def over(data: bytes) -> str:
    """The error of a message that has too many fields."""
    with pytest.raises(ProtobufError) as caught:
        read(data)
    assert caught.value.over_limit
    return str(caught.value)


def test_the_contents_of_tensors_may_have_more_fields_than_all_else() -> None:
    many = GRPC_FIELDS + 1
    contents = encode_field(5, b"\x10\x01" * many)
    tensor = encode_field(5, encode_field(1, b"x") + encode_field(2, b"INT32") + b"\x18" + encode_varint(many) + contents)
    assert only(tensor).tolist() == [1] * many
    assert over(b"\x48\x00" * many).endswith(f"more than {GRPC_FIELDS} beside the contents of tensors")
    entries = b"".join(encode_field(4, encode_field(1, b"%d" % n)) for n in range(many // 2 + 1))
    assert "too many fields" in over(entries)
    assert "too many fields" in over(encode_field(5, entries))


def test_a_message_is_read_at_once_if_that_is_quick() -> None:
    reader, few, many = InferRequestReader(), GRPC_AT_ONCE - 1, GRPC_AT_ONCE + 1
    for part in (b"\x48\x00", encode_field(1, b"m")):
        assert reader.parts_at_once(part * few) is not None
        assert reader.parts_at_once(part * many) is None
    for part in (b"\x10\x01", b"\x42\x00", encode_field(2, b"\xff\x01" * 2)):
        assert reader.parts_at_once(encode_field(5, encode_field(5, part * many))) is None
    # Short packed fields are read number by number: a few of them are as slow as many fields.
    pieces = encode_field(2, b"\xff\x01" * 63) * 20
    assert reader.parts_at_once(encode_field(5, encode_field(5, pieces))) is None
    assert reader.parts_at_once(encode_field(5, encode_field(5, encode_field(2, b"\xff\x01" * 100_000)))) is not None
    with pytest.raises(ProtobufError):
        reader.parts_at_once(b"\x0a")


def test_a_message_is_measured_without_its_raw_data() -> None:
    assert size_of(GOLDEN) == (1 + 1 + 1 + 9 + 3, 13)
    assert size_of(message(ENTRY, raw=[RAW * 1000])) == size_of(message(ENTRY, raw=[RAW]))
    assert size_of(b"\x48\x00" * 20, 20) == (0, 0)
    assert size_of(b"\x48\x00" * 21, 20) is None
    with pytest.raises(ProtobufError):
        size_of(b"\x0a")


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (lambda name: encode_field(1, name), "model_name"),
        (lambda name: encode_field(2, name), "model_version"),
        (lambda name: encode_field(3, name), "id"),
        (lambda name: encode_field(5, encode_field(1, name)), "a tensor's name"),
        (lambda name: encode_field(5, encode_field(2, name)), "a datatype"),
        (lambda name: encode_field(6, encode_field(1, name)), "an output's name"),
    ],
)
def test_a_name_has_a_bound(part: Any, what: str) -> None:
    said = refusal(part(b"x" * (GRPC_NAME + 1)))
    assert said == f"{what} has at most {GRPC_NAME} bytes, got {GRPC_NAME + 1}"
    with suppress(V2Error):  # for another reason
        read(part(b"x" * GRPC_NAME))


def test_the_dimensions_of_a_tensor_are_counted_over_all_its_fields() -> None:
    shape = b"\x1a\x01\x01" * 600
    assert "dimensions" in refusal(encode_field(5, encode_field(1, b"x") + encode_field(2, b"FP32") + shape))


def test_the_names_of_a_refused_request_are_looked_for_in_a_part_of_it() -> None:
    assert read_names(encode_field(1, b"m") + b"\x48\x00" * 2_000_000) == ("m", "", "")
    assert read_names(b"\x48\x00" * 2_000_000 + encode_field(1, b"m")) == ("", "", "")
    assert read_names(encode_field(1, b"x" * (GRPC_NAME + 1)) + encode_field(3, b"7")) == ("", "", "7")
