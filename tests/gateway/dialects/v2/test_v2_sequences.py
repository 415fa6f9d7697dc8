"""Requests of a sequence where several processes serve: only a model whose processes they share can have them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.config import Config, ListenConfig, ModelConfig, ProcessConfig
from gateway.dialects.answers import EventStreams
from gateway.dialects.v2.requests import V2Calls
from gateway.workers.worker import Worker
from protocols.v2.tensors import V2Error


@pytest.mark.parametrize(
    ("processes", "name", "taken"), [(1, "here", True), (2, "here", False), (2, "apart", True), (2, "of a program", False)]
)
def test_a_sequence_is_taken_where_all_of_it_comes_to_one_model(processes: int, name: str, taken: bool) -> None:
    models = {
        "here": ModelConfig(factory="app:f"),
        "apart": ModelConfig(factory="app:f", process=ProcessConfig(instances=2)),
    }
    config = Config(listen=ListenConfig(processes=processes), models=models)
    calls = V2Calls(cast(Any, SimpleNamespace(workers={}, config=config)), EventStreams())
    bounds = calls.bounds_of(cast(Worker, SimpleNamespace(name=name)))
    if taken:
        bounds.check_sequence({"sequence_id": 7})
    else:
        with pytest.raises(V2Error, match="of which each would see a part of the sequence"):
            bounds.check_sequence({"sequence_id": 7})
