"""A tensor of BYTES is an array to its model, and nothing is made of it before it looks."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from models.messages import BytesTensor, InferRequest, Tensor


class Counted:
    """Elements that count how often they were asked for."""

    shape = (2,)

    def __init__(self) -> None:
        self.asked = 0
        self.made: npt.NDArray[Any] = np.array([b"a", b"bc"], object)

    def array(self) -> npt.NDArray[Any]:
        self.asked += 1
        return self.made


def test_the_elements_are_made_when_the_model_looks() -> None:
    elements = Counted()
    tensor = BytesTensor.of("x", elements, {"k": 1})
    assert isinstance(tensor, Tensor)
    assert (tensor.name, tensor.datatype, tensor.parameters, tensor.shape) == ("x", "BYTES", {"k": 1}, (2,))
    assert tensor.given is elements
    assert elements.asked == 0
    assert tensor.data is elements.made
    assert InferRequest(inputs=(tensor,))["x"] is elements.made


def test_a_changed_copy_still_holds_what_was_given() -> None:
    elements = Counted()
    renamed = msgspec.structs.replace(BytesTensor.of("x", elements), name="y")
    assert (renamed.name, renamed.given, elements.asked) == ("y", elements, 0)
    assert renamed.data is elements.made
    other = np.array([b"z"], object)
    replaced = msgspec.structs.replace(renamed, data=other)
    assert (replaced.shape, replaced.data is other, replaced.given is other) == ((1,), True, True)


def test_it_is_as_immutable_as_any_tensor() -> None:
    tensor = BytesTensor.of("x", Counted())
    for member in ("name", "data"):
        with pytest.raises(AttributeError):
            setattr(tensor, member, None)


def test_a_pattern_sees_its_array() -> None:
    elements = Counted()
    match BytesTensor.of("x", elements):
        case Tensor(name="x", data=data):
            assert data is elements.made
