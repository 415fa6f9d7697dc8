"""Lookup: rows of a table by their numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import ModelError
from models.library import lookup
from models.library.lookup import Lookup
from models.messages import InferRequest, Tensor
from models.session import Session
from tests.models.channels import MemoryChannel


async def rows(model: Lookup, index: Any, name: str = "INDEX") -> Any:
    channel = MemoryChannel(InferRequest(inputs=(Tensor(name=name, data=np.asarray(index)),), id="7"))
    await model(Session(channel))
    (answer,) = channel.sent
    assert (answer.id, answer.outputs[0].name) == ("7", "ROWS")
    return answer.outputs[0].data


@pytest.fixture
def model(tmp_path: Path) -> Lookup:
    np.save(tmp_path / "t.npy", np.arange(12, dtype=">f4").reshape(4, 3))
    return Lookup(tmp_path / "t.npy")


async def test_each_number_is_answered_with_its_row(model: Lookup) -> None:
    assert (await rows(model, [[3, 0]])).tolist() == [[[9, 10, 11], [0, 1, 2]]]
    assert (await rows(model, np.uint8(2))).tolist() == [6, 7, 8]
    assert (await rows(model, np.zeros(0, dtype=np.int64))).shape == (0, 3)


@pytest.mark.parametrize(("index", "name"), [([4], "INDEX"), ([-1], "INDEX"), ([0.5], "INDEX"), ([0], "OTHER")])
async def test_what_is_no_row_is_refused(model: Lookup, index: Any, name: str) -> None:
    with pytest.raises(ModelError) as caught:
        await rows(model, index, name)
    assert caught.value.status == 400


async def test_an_answer_that_is_too_large_is_refused_before_it_is_made(
    model: Lookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "MAX_BYTES", 24)
    assert len(await rows(model, [0, 1])) == 2
    with pytest.raises(ModelError, match="3 rows are 36 bytes, and an answer at most 24"):
        await rows(model, [0, 1, 2])


@pytest.mark.parametrize("table", [np.array(3), np.array(["a"]), np.zeros(2, dtype=np.complex64)])
def test_what_is_no_table_of_numbers_is_refused(tmp_path: Path, table: Any) -> None:
    np.save(tmp_path / "t.npy", table)
    with pytest.raises(ValueError, match="a table has rows of numbers"):
        Lookup(tmp_path / "t.npy")
