"""The codec of v2 against a grammar of whole requests: each gets the answer that is due, in whatever way it is read."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.protocols.v2.grammar.v2_grammar import (
    CHOICES,
    DATATYPES,
    Answer,
    Case,
    Choices,
    Draft,
    Model,
    Obj,
    Raw,
    Refusal,
    Style,
    Wanted,
    Wire,
    choices,
    classified,
    draft_of,
    models,
    one_of,
    pack,
)
from tests.protocols.v2.grammar.v2_mutations import BEYOND_THE_CODEC, KINDS, case_of, wrong_elements
from tests.protocols.v2.grammar.v2_oracle import IHCL, Wrong, check
from tests.protocols.v2.grammar.v2_ways import CodecServer

SERVED = models(Choices(random.Random(1).randbytes(6000)), 40)
JSON = {b"content-type": b"application/json"}


def cases(seed: str, count: int, kind: str = "") -> list[Case]:
    found = []
    for number in range(count):
        c = Choices(random.Random(f"{seed} {number}").randbytes(CHOICES))
        found.append(case_of(c, one_of(c, SERVED), kind))
    return found


@settings(max_examples=300, derandomize=True, database=None)
@given(choices())
def test_every_request_gets_what_is_due(c: Choices) -> None:
    CodecServer().check(case_of(c, one_of(c, SERVED)))


def test_a_codec_that_has_seen_many_requests_answers_as_a_new_one() -> None:
    server = CodecServer()
    for case in cases("many", 500):
        server.check(case)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BEYOND_THE_CODEC])
def test_what_is_wrong_is_named(kind: str) -> None:
    server = CodecServer()
    made = [case for case in cases(kind, 60, kind) if case.kind == kind][:8]
    assert made
    for case in made:
        assert isinstance(case.due, Refusal)
        server.check(case)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_a_value_that_is_no_element_of_the_datatype_is_named_among_few_and_among_many(datatype: str) -> None:
    server = CodecServer()
    good = "" if datatype == "BYTES" else 1
    for bad in wrong_elements(datatype):
        word = ("number", "range") if isinstance(bad, Raw) and bad.endswith("e400") else "'x'"
        for count in (2, 3000):
            values = [good] * (count - 1) + [bad]
            entry = Obj([("name", "x"), ("datatype", datatype), ("shape", [count]), ("data", values)])
            wire = Wire(Style().text(Obj([("inputs", [entry])])).encode(), b"", [])
            server.check(Case(Model(), wire, Refusal((word,)), "a wrong element"))


# The grammar itself


def drafts(count: int) -> list[Draft]:
    found = []
    for number in range(count):
        c = Choices(random.Random(number).randbytes(CHOICES))
        found.append(draft_of(c, one_of(c, SERVED)))
    return found


def test_the_simplest_request_is_simple() -> None:
    case = case_of(Choices(b""), Model())
    assert case.kind == "valid"
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [0.0, 0.0]}
    assert json.loads(case.wire.body) == {"inputs": [entry]}


def test_requests_are_of_all_kinds() -> None:
    tensors = [tensor for draft in drafts(2500) for tensor in draft.inputs]
    for binary in (True, False):
        assert {tensor.datatype for tensor in tensors if (tensor.texts is None) == binary} == set(DATATYPES)
    assert {len(tensor.shape) for tensor in tensors} >= {0, 1, 2, 3, 4, 16}
    assert {0, 1, 2100, 4096, 4097} <= {len(tensor.elements) for tensor in tensors}
    mixed = [{tensor.texts is None for tensor in draft.inputs} for draft in drafts(500)]
    assert {True, False} in mixed
    assert any(draft.raw is not None for draft in drafts(100))


def test_models_declare_all_that_can_be_declared() -> None:
    declared = [spec for model in SERVED for spec in model.inputs or ()]
    assert any(spec.shape is None for spec in declared)
    assert any(not spec.datatype for spec in declared)
    assert any(spec.optional for spec in declared)
    assert any(spec.shape == () for spec in declared)
    assert any(model.max_batch_size for model in SERVED)
    assert any(model.inputs is not None and model.outputs is None for model in SERVED)


def test_the_largest_values_are_found_as_one_would_by_hand() -> None:
    numbers = [pack("FP32", number) for number in (1.0, 3.0, math.nan, -math.inf, 0.5, 0.5)]
    assert classified("FP32", (2, 3), numbers, 2) == ((2, 2), [b"3.000000:1", b"1.000000:0", b"0.500000:1", b"0.500000:2"])
    assert classified("INT8", (), [b"\xff"], 5) == ((1,), [b"-1:0"])


# The oracle itself: it must not be content with everything

REPLY = {
    "model_name": "undeclared",
    "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [2], "data": [0.0, 0.0]}],
}


def due() -> Case:
    return case_of(Choices(b""), Model())


def test_the_oracle_takes_the_reply_that_is_due() -> None:
    check(due(), 200, JSON, json.dumps(REPLY).encode())


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("OUTPUT0", "INPUT0"), ("FP32", "FP64"), ("[2]", "[1, 2]"), ("[0.0, 0.0]", "[0.0, -0.0]"), ("[0.0, 0.0]", "[0.0]"), ("[0.0, 0.0]", "[0.0, NaN]"),
        ("[0.0, 0.0]", "[0.0, null]"), ("[0.0, 0.0]", "[0.0, false]"), ("[0.0, 0.0]", "[[0.0], [0.0]]"), ("undeclared", "another"), ('"outputs"', '"id": "", "outputs"'),
        ('"outputs"', '"more": 1, "outputs"'), ('"shape"', '"parameters": {}, "shape"'), ('"shape"', '"shape": [3], "shape"'), ("}]}", "}]"), ('"outputs"', '"parameters": {}, "outputs"'),
    ],
)  # fmt: skip
def test_the_oracle_takes_no_other_reply(was: str, now: str) -> None:
    text = json.dumps(REPLY)
    assert was in text
    with pytest.raises(Wrong):
        check(due(), 200, JSON, text.replace(was, now, 1).encode())


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (500, JSON, {"error": "field"}), (200, JSON, {"error": "field"}), (400, JSON, {"error": "something is wrong"}), (400, JSON, {"error": ["field"]}),
        (400, JSON, {"error": "field", "more": 1}), (400, JSON, {"detail": "field"}), (400, {b"content-type": b"text/plain"}, {"error": "field"}),
        (400, JSON, {"error": "field" * 1000}),
    ],
)  # fmt: skip
def test_the_oracle_takes_no_other_refusal(status: int, headers: dict[bytes, bytes], body: object) -> None:
    refused = replace(due(), due=Refusal(("field",)))
    check(refused, 400, JSON, b'{"error": "the field is wrong"}')
    with pytest.raises(Wrong):
        check(refused, status, headers, json.dumps(body).encode())


@pytest.mark.parametrize("at", [0, 7, 8])
def test_the_oracle_compares_binary_outputs_by_their_bytes(at: int) -> None:
    wanted = Wanted("OUTPUT0", "FP32", (2,), [b"\0\1\2\3", b"\0\0\xc0\x7f"], binary=True, sent_binary=True)
    case = replace(due(), due=Answer("", (wanted,)))
    entry = {"name": "OUTPUT0", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}
    head = json.dumps({"model_name": "undeclared", "outputs": [entry]}).encode()
    headers = {b"content-type": b"application/octet-stream", IHCL: b"%d" % len(head)}
    data = bytearray(b"".join(wanted.elements))
    check(case, 200, headers, head + data)
    data[at:] = bytes([*data[at : at + 1], 1]) if at == 8 else bytes([data[at] ^ 1, *data[at + 1 :]])
    with pytest.raises(Wrong):
        check(case, 200, headers, head + data)
