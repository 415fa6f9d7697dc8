"""Bodies of v2's management calls: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.v2.repository import (
    LoadReply,
    LoadRequest,
    LogChange,
    ModelIndexEntry,
    ModelIndexRequest,
    UnloadRequest,
    decode,
)
from protocols.v2.tensors import V2Error

KINDS = (ModelIndexRequest, LoadRequest, UnloadRequest, LogChange)


def refusal(body: Any, kind: Any) -> str:
    with pytest.raises(V2Error) as refused:
        decode(body if isinstance(body, bytes) else json.dumps(body).encode(), kind, "body")
    assert refused.value.status == 400
    return refused.value.message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [b"", b"{}", b" { }\n"])
def test_an_empty_body_says_what_an_empty_object_says(kind: Any, body: bytes) -> None:
    assert decode(body, kind, "body") == kind()


def test_what_tritonclient_sends_is_read() -> None:
    assert decode(b'{"ready": true}', ModelIndexRequest, "body").ready
    assert decode(b'{"parameters": {"unload_dependents": true}}', UnloadRequest, "body").parameters.unload_dependents
    assert decode(memoryview(b'{"log_verbose_level": 2, "log_info": null}'), LogChange, "body").log_verbose_level == 2
    assert decode(b'{"repository_name": "x"}', ModelIndexRequest, "body") == ModelIndexRequest()


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b"{", ModelIndexRequest, "body"),
        (b"\xff", ModelIndexRequest, "body"),
        (b"[]", ModelIndexRequest, "body: Expected `object`"),
        ({"ready": 1}, ModelIndexRequest, "$.ready"),
        ({"ready": None}, ModelIndexRequest, "$.ready"),
        (b'{"ready": true, "ready": false}', ModelIndexRequest, "ready"),
        (b"[" * 100 + b"]" * 100, ModelIndexRequest, "64"),
        ({"parameters": {"unload_dependents": "yes"}}, UnloadRequest, "$.parameters.unload_dependents"),
        ({"parameters": {"other": 1}}, UnloadRequest, "other"),
        ({"parameters": []}, LoadRequest, "$.parameters"),
        ({"parameters": {"config": "{}"}}, LoadRequest, "'config' is not accepted"),
        ({"parameters": {"file:1/model.onnx": "QUI="}}, LoadRequest, "'file:1/model.onnx' is not accepted"),
        ({"parameters": {"other": 1}}, LoadRequest, "other"),
        ({"log_info": 1}, LogChange, "$.log_info"),
        ({"log_verbose_level": -1}, LogChange, "$.log_verbose_level"),
        ({"log_verbose_level": True}, LogChange, "$.log_verbose_level"),
        ({"log_colour": True}, LogChange, "log_colour"),
    ],
)
def test_what_is_wrong_is_named(body: Any, kind: Any, words: str) -> None:
    assert words in refusal(body, kind)


def test_a_refusal_does_not_echo_long_names() -> None:
    assert len(refusal({"parameters": {"file:" + "x" * 5000: ""}}, LoadRequest)) < 300
    assert len(refusal({"x" * 5000: 1}, LogChange)) < 300


@given(st.binary(max_size=60) | st.recursive(st.none() | st.booleans() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.sampled_from(["parameters", "ready", "config", "log_info"]), s), max_leaves=6).map(lambda v: json.dumps(v).encode()), st.sampled_from(KINDS))  # fmt: skip
def test_any_body_is_read_or_refused(body: bytes, kind: Any) -> None:
    try:
        read = decode(body, kind, "body")
    except V2Error:
        assert refusal(body, kind).startswith("body")
    else:
        assert isinstance(read, kind)


def test_replies_have_the_members_of_their_peers() -> None:
    """KServe's reply to load; Triton's index, whose version is optional."""
    assert msgspec.json.encode(LoadReply(name="m")) == b'{"name":"m","load":true}'
    unknown = ModelIndexEntry(name="m", state="UNAVAILABLE", reason="not loaded")
    assert json.loads(msgspec.json.encode(unknown)) == {"name": "m", "state": "UNAVAILABLE", "reason": "not loaded"}
