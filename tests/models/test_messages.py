"""The values that models receive and send: fixed once made, compared by what they say, arrays by what they are."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from models.messages import (
    Finish,
    FinishReason,
    GenerationParameters,
    InferRequest,
    InferResponse,
    Part,
    PartKind,
    Prompt,
    Tensor,
    Token,
    datatype_of,
)
from models.session import Call

ROW = np.arange(3, dtype=np.float32)
MAKERS = [
    lambda: GenerationParameters(top_k=3),
    lambda: Prompt(text="a"),
    lambda: Token(text="a", id=1, log_prob=-0.5),
    lambda: Finish(reason=FinishReason.LENGTH),
    lambda: Part(data=b"a", kind=PartKind.UTF8),
    lambda: Call(id="a"),
    lambda: Tensor(name="x", data=ROW),
    lambda: InferRequest(inputs=()),
    lambda: InferResponse(outputs=()),
]
HOLDING_ARRAYS = (Tensor, InferRequest, InferResponse)


@pytest.mark.parametrize("make", MAKERS)
def test_a_message_cannot_be_changed_and_takes_no_other_attribute(make: Any) -> None:
    message = make()
    for name in (*message.__struct_fields__, "other"):
        with pytest.raises(AttributeError):
            setattr(message, name, "changed")
    with pytest.raises(TypeError):
        type(message)(*(getattr(message, name) for name in message.__struct_fields__))


@pytest.mark.parametrize("make", MAKERS)
def test_messages_are_equal_by_what_they_say_and_those_of_arrays_only_to_themselves(make: Any) -> None:
    message, other = make(), make()
    assert (message == other) == (not isinstance(message, HOLDING_ARRAYS))
    assert message == message  # the array inside cannot be compared for a truth


@pytest.mark.parametrize(
    ("message", "changed"),
    [(Token(text="a"), Token(text="b")), (Part(data=b"a"), Part(data=b"b")), (Prompt(text="a"), Prompt(text="b"))],
)
def test_a_changed_copy_is_another_message(message: Any, changed: Any) -> None:
    name = message.__struct_fields__[0]
    assert msgspec.structs.replace(message, **{name: getattr(changed, name)}) == changed != message


def test_values_and_holders_of_arrays_can_be_kept_in_a_set() -> None:
    assert len({Token(text="a"), Token(text="a"), Finish(reason=FinishReason.LENGTH), Part(data=b"a")}) == 3
    tensor, twin = Tensor(name="x", data=ROW), Tensor(name="x", data=ROW)
    assert len({tensor, tensor, twin, InferRequest(inputs=(tensor,)), InferResponse(outputs=(tensor,))}) == 4


def test_nobody_can_change_the_defaults_of_everybody() -> None:
    prompt = Prompt(text="a")
    for mapping in (prompt.parameters.extra, Call().headers, Call().parameters, Tensor(name="x", data=ROW).parameters):
        assert mapping == {}
        with pytest.raises(TypeError):
            mapping["a"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [
        ("?", "BOOL"), ("u1", "UINT8"), ("u2", "UINT16"), ("u4", "UINT32"), ("u8", "UINT64"),
        ("i1", "INT8"), ("i2", "INT16"), ("i4", "INT32"), ("i8", "INT64"), (">i8", "INT64"),
        ("f2", "FP16"), ("f4", "FP32"), ("f8", "FP64"), (ml_dtypes.bfloat16, "BF16"),
        ("O", "BYTES"), ("S3", "BYTES"), ("U3", "BYTES"),
    ],
)  # fmt: skip
def test_a_tensor_knows_the_datatype_of_its_array(dtype: Any, datatype: str) -> None:
    data = np.zeros(2, dtype)
    assert (datatype_of(data.dtype), Tensor(name="x", data=data).datatype) == (datatype, datatype)
    assert Tensor(name="x", data=data, datatype="given").datatype == "given"


@pytest.mark.parametrize("dtype", ["c8", "M8[s]", "m8[s]", "V2", [("a", "i4")], ml_dtypes.float8_e4m3fn])
def test_an_array_that_v2_cannot_carry_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match="no v2 datatype"):
        Tensor(name="x", data=np.zeros(2, dtype))


def test_a_request_gives_its_inputs_by_name() -> None:
    request = InferRequest(inputs=(Tensor(name="x", data=ROW),))
    assert request["x"] is ROW
    assert request.inputs[0].shape == (3,)
    with pytest.raises(KeyError, match="no input 'y'; there are: x"):
        request["y"]
