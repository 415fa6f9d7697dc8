"""Triton's generate: members to tensors and parameters, outputs to members, and one error for each thing that is wrong."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import v2
from protocols.v2.generate import members_of, read_generate, read_object, render_generate
from protocols.v2.tensors import V2Error, V2Tensor


def spec(name: str, datatype: str, *shape: int, **options: Any) -> v2.TensorSpec:
    return v2.TensorSpec(name=name, datatype=datatype, shape=shape, **options)


# qa/L0_http/generate_models/mock_llm of Triton's own tests
LLM = v2.ModelSignature(
    name="llm",
    inputs=(
        spec("PROMPT", "BYTES", 1),
        spec("STREAM", "BOOL", 1),
        spec("input_ids", "INT64", -1, optional=True),
    ),
    outputs=(spec("TEXT", "BYTES", 1),),
)
ANY = v2.ModelSignature(name="any")


def read(members: Any, signature: v2.ModelSignature = LLM) -> v2.V2Request:
    return read_generate(json.dumps(members).encode(), signature)


def tensors_of(request: v2.V2Request) -> dict[str, tuple[str, tuple[int, ...], Any]]:
    return {t.name: (t.datatype, t.array.shape, t.elements.tolist()) for t in request.inputs}


def test_members_of_the_names_of_inputs_are_tensors_and_the_others_parameters() -> None:
    request = read({"PROMPT": "hello", "STREAM": False, "input_ids": [100, 200], "id": "42", "temperature": 0.5})
    assert tensors_of(request) == {
        "PROMPT": ("BYTES", (1,), [b"hello"]),
        "STREAM": ("BOOL", (1,), [False]),
        "input_ids": ("INT64", (2,), [100, 200]),
    }
    assert (request.id, request.parameters, request.outputs, request.binary_default) == (
        "42",
        {"temperature": 0.5},
        (),
        False,
    )


def test_parameters_may_stand_in_an_object_of_their_own_and_inputs_too() -> None:
    request = read({"PROMPT": ["hello"], "parameters": {"STREAM": True, "temperature": 0, "echo": True, "x": "y"}})
    assert tensors_of(request)["STREAM"] == ("BOOL", (1,), [True])
    assert request.parameters == {"temperature": 0, "echo": True, "x": "y"}


@pytest.mark.parametrize("id", ["", None])
def test_an_empty_id_is_none(id: Any) -> None:
    assert read({"PROMPT": "hello", "STREAM": False, "id": id}).id == ""


@pytest.mark.parametrize(
    ("shape", "value", "batch", "completed"),
    [
        ((-1,), 5, 0, (1,)),
        ((-1,), [5, 6], 0, (2,)),
        ((-1,), [], 0, (0,)),
        ((1, -1), [5, 6], 0, (1, 2)),
        ((-1, -1), [5, 6, 7], 0, (1, 3)),
        ((-1, 2), [5, 6, 7, 8], 0, (2, 2)),
        ((-1, 2, -1), [1, 2, 3, 4], 0, (1, 2, 2)),
        ((2, 2), [5, 6, 7, 8], 0, (2, 2)),
        ((2, 2), [[5, 6], [7, 8]], 0, (2, 2)),
        ((-1, -1), [[5, 6], [7, 8]], 0, (2, 2)),
        ((), 5, 0, ()),
        ((2, 0), [], 0, (2, 0)),
        ((-1,), [5, 6], 4, (1, 2)),
        ((1,), 5, 4, (1, 1)),
        ((1,), [5, 6], 4, (2, 1)),
        ((-1,), [[5], [6]], 4, (2, 1)),
    ],
)
def test_values_fill_the_declared_shape_from_its_inner_end(
    shape: tuple[int, ...], value: Any, batch: int, completed: tuple[int, ...]
) -> None:
    signature = v2.ModelSignature(name="m", inputs=(spec("x", "INT32", *shape),), max_batch_size=batch)
    (tensor,) = read({"x": value}, signature).inputs
    assert tensor.array.shape == completed
    assert tensor.elements.ravel().tolist() == np.ravel(value).tolist()


@pytest.mark.parametrize(
    ("shape", "value"),
    [
        ((2,), 1),
        ((2,), [1, 2, 3]),
        ((-1, 2), [1, 2, 3]),
        ((), [1, 2]),
        ((2, 0), [1]),
        ((0,), 1),
        ((2, 2), [[1, 2], [3]]),
        ((2, 2), [[1, 2, 3, 4]]),
        ((4,), [[1, 2], [3, 4]]),
    ],
)
def test_values_that_do_not_fill_the_shape_are_refused(shape: tuple[int, ...], value: Any) -> None:
    with pytest.raises(V2Error, match="'x'"):
        read({"x": value}, v2.ModelSignature(name="m", inputs=(spec("x", "INT32", *shape),)))


@pytest.mark.parametrize(
    ("value", "datatype", "shape"),
    [
        (5, "INT64", (1,)),
        ([1, 2.5], "FP64", (2,)),
        ([1.0, None], "FP64", (2,)),
        (True, "BOOL", (1,)),
        ("a", "BYTES", (1,)),
        ([["a", "b"]], "BYTES", (1, 2)),
        ([], "FP64", (0,)),
        ([[1], [2]], "INT64", (2, 1)),
    ],
)
def test_without_a_declaration_the_values_say_what_they_are(value: Any, datatype: str, shape: tuple[int, ...]) -> None:
    open_input = v2.TensorSpec(name="x", datatype="", shape=None)
    for signature in (ANY, v2.ModelSignature(name="m", inputs=(open_input,))):
        (tensor,) = read({"x": value, "parameters": {"a": 1}}, signature).inputs
        assert (tensor.datatype, tensor.array.shape) == (datatype, shape)


@pytest.mark.parametrize("value", [[1, "a"], [1, True], ["a", None], {}, [{}], [[1], 2], [1, [2]], 2**63, [[1, 2], [3]]])
def test_without_a_declaration_mixed_values_are_refused(value: Any) -> None:
    with pytest.raises(V2Error, match="'x'"):
        read({"x": value}, ANY)


def test_of_an_undeclared_model_parameters_are_parameters_and_no_arrays() -> None:
    request = read({"x": 1, "parameters": {"a": 1}}, ANY)
    assert ([t.name for t in request.inputs], request.parameters) == (["x"], {"a": 1})
    with pytest.raises(V2Error, match="'a'"):
        read({"x": 1, "parameters": {"a": [1]}}, ANY)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "empty"),
        (b"[]", "object"),
        (b"{", "JSON"),
        (b'{"PROMPT":"\xff"}', "UTF-8"),
        (b'{"PROMPT":"a","PROMPT":"b","STREAM":true}', "'PROMPT'"),
        (b'{"PROMPT":"a","STREAM":true,"parameters":{"PROMPT":"b"}}', "'PROMPT'"),
        (b'{"PROMPT":"a","STREAM":true,"a":1,"parameters":{"a":1}}', "'a'"),
        (b'{"PROMPT":"a","STREAM":true,"parameters":{"a":1,"a":2}}', "'a'"),
        (b'{"PROMPT":"a"}', "'STREAM'"),
        (b'{"abc":123}', "'PROMPT'"),
        (b'{"PROMPT":123,"STREAM":false}', "'PROMPT'"),
        (b'{"PROMPT":"a","STREAM":"false"}', "'STREAM'"),
        (b'{"PROMPT":{},"STREAM":false}', "'PROMPT'"),
        (b'{"PROMPT":null,"STREAM":false}', "'PROMPT'"),
        (b'{"PROMPT":"a","STREAM":true,"a":{}}', "'a'"),
        (b'{"PROMPT":"a","STREAM":true,"a":[1]}', "'a'"),
        (b'{"PROMPT":"a","STREAM":true,"a":null}', "'a'"),
        (b'{"PROMPT":"a","STREAM":true,"a":NaN}', "'a'"),
        (b'{"PROMPT":"a","STREAM":true,"triton_a":1}', "'triton_a'"),
        (b'{"PROMPT":"a","STREAM":true,"parameters":[]}', "parameters"),
        (b'{"PROMPT":"a","STREAM":true,"id":7}', "id"),
        (b'{"PROMPT":"a","STREAM":true,"input_ids":[1.5]}', "'input_ids'"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, word: str) -> None:
    with pytest.raises(V2Error) as refused:
        read_generate(body, LLM)
    assert refused.value.status == 400
    assert word in refused.value.message


def test_json_above_its_limit_has_a_status_of_its_own() -> None:
    read_object(b'{"a": 1}', v2.V2Limits(text=8))
    with pytest.raises(V2Error, match=r"limits\.text_json") as refused:
        read_object(b'{"a": 1} ', v2.V2Limits(text=8))
    assert refused.value.status == 413


def test_there_are_at_most_so_many_inputs_and_dimensions() -> None:
    body = json.dumps({str(n): n for n in range(4)}).encode()
    assert len(read_generate(body, ANY, v2.V2Limits(tensors=4)).inputs) == 4
    with pytest.raises(V2Error, match=r"limits\.tensors"):
        read_generate(body, ANY, v2.V2Limits(tensors=3))
    with pytest.raises(V2Error, match="dimensions"):
        read_generate(b'{"x":[[[1]]]}', ANY, v2.V2Limits(dims=2))


def test_members_come_in_order_and_say_where_they_stood() -> None:
    head = {"id": "7", "a": 1, "parameters": {"b": 2}, "c": 3}
    assert list(members_of(head)) == [("a", 1, False), ("c", 3, False), ("b", 2, True)]


def render(*outputs: V2Tensor, id: str = "", response_id: str = "", **parameters: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(render_generate("m", "1", outputs, v2.V2Request(id=id), response_id, parameters))
    return found


def output(name: str, array: Any, datatype: str) -> V2Tensor:
    return V2Tensor(name=name, datatype=datatype, array=array)


def test_outputs_are_members_and_one_element_is_a_value() -> None:
    assert render(
        output("TEXT", np.array([b"hi"], object), "BYTES"),
        output("scores", np.array([[0.1, 2]], np.float32), "FP32"),
        output("n", np.array([[7]]), "INT64"),
        output("ok", np.array(True), "BOOL"),
        output("none", np.zeros((0, 3)), "FP64"),
        output("nan", np.array([math.nan]), "FP64"),
    ) == {
        "model_name": "m",
        "model_version": "1",
        "TEXT": "hi",
        "scores": [0.1, 2],
        "n": 7,
        "ok": True,
        "none": [],
        "nan": None,
    }


def test_the_id_of_the_request_is_echoed_unless_the_model_has_another() -> None:
    assert "id" not in render()
    assert render(id="42")["id"] == "42"
    assert render(id="42", response_id="43")["id"] == "43"


def test_the_responses_parameters_are_members_too() -> None:
    assert render(output("y", np.array([1]), "INT64"), confidence=0.5) | {} == {
        "model_name": "m", "model_version": "1", "confidence": 0.5, "y": 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["model_name", "id", "error", "y"])
def test_two_members_of_one_name_are_the_models_error(name: str) -> None:
    with pytest.raises(V2Error, match="already") as refused:
        render(output("y", np.array([1]), "INT64"), output(name, np.array([1]), "INT64"))
    assert refused.value.status == 500


def test_what_json_cannot_carry_is_named() -> None:
    with pytest.raises(V2Error, match="'y'") as refused:
        render(output("y", np.array([b"\xff"], object), "BYTES"))
    assert refused.value.status == 400


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "PROMPT", "STREAM", "parameters", "x"]), inner),
    max_leaves=12))  # fmt: skip
def test_any_json_is_a_request_or_an_error(value: Any) -> None:
    for signature in (LLM, ANY):
        try:
            request = read(value, signature)
        except V2Error as e:
            assert e.status == 400  # noqa: PT017
        else:
            assert isinstance(value, dict)
            assert {tensor.name for tensor in request.inputs} <= {"PROMPT", "STREAM", "x"}
