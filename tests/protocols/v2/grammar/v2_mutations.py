"""Faults that break an inference request (v2) on purpose, each with the words that must be in its refusal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from tests.protocols.v2.grammar.v2_grammar import (
    INTEGERS,
    SIZES,
    Answer,
    Case,
    Choices,
    Draft,
    Either,
    Input,
    Model,
    Obj,
    Raw,
    Refusal,
    Wire,
    bounds,
    draft_of,
    due_of,
    framed,
    nested,
    output_of,
    shown,
    sibling,
    written,
)

HEADER = "Inference-Header-Content-Length"
BROKEN = ("JSON", "UTF-8", "nested", "number")
"""The alternatives for the error about a text that ends too early or too late."""

OnDraft: TypeAlias = Callable[[Choices, Draft], Refusal | None]
OnWire: TypeAlias = Callable[[Choices, Draft, Wire], Refusal | None]

DRAFTS: dict[str, OnDraft] = {}
"""Faults by name that change the draft before it is written. They return None if the draft has nothing to change."""
WIRES: dict[str, OnWire] = {}
"""Faults by name that change the written bytes."""
KINDS: list[str] = []
"""The names of all faults."""
BEYOND_THE_CODEC = frozenset(("a wrong timeout",))
"""Faults that the codec does not check, because it has no clock."""


def case_of(c: Choices, model: Model, kind: str = "") -> Case:
    """A request to the model: of that kind where it can be, else of any, half of them valid."""
    draft = draft_of(c, model)
    due = due_of(draft)
    wire = written(draft)
    before = (sibling(draft),) if draft.raw is None and c.chance(30) else ()
    valid = Case(model, wire, due, "valid" if isinstance(due, Answer) else "an output that cannot be given", before)
    if isinstance(due, Refusal) or (not kind and not c.chance(50)):  # an error may be about either of two faults
        return valid
    before = (wire,)
    if not kind and c.chance(10):
        return Case(model, _noisy(c, wire), Either(), "noise", before)
    for name in (kind,) if kind else [c.of(KINDS) for _ in range(8)]:
        if name in DRAFTS:
            refusal = DRAFTS[name](c, draft) if draft.raw is None else None
            broken = written(draft) if refusal else wire
        else:
            broken = Wire(wire.text, wire.data, list(wire.lengths))
            refusal = WIRES[name](c, draft, broken)
        if refusal:
            return Case(model, broken, refusal, name, before)
    return valid


def _noisy(c: Choices, wire: Wire) -> Wire:
    """A few bytes changed, left out, put in or said again, somewhere."""
    text, data = bytearray(wire.text), bytearray(wire.data)
    for _ in range(c.of((1, 2, 3))):
        part = data if not text or (data and c.chance(20)) else text
        at = c.below(len(part) + 1)
        match c.below(4):
            case 0:
                part[at : at + 1] = c.octets(1)
            case 1:
                del part[at : at + 1 + c.below(8)]
            case 2:
                part[at:at] = c.of(
                    (
                        b'"',
                        b"[",
                        b"]",
                        b"{",
                        b"}",
                        b",",
                        b":",
                        b"0",
                        b"9",
                        b"-",
                        b"e9",
                        b" ",
                        b"\\",
                        b"null",
                        b"NaN",
                        b"[1]",
                        b'"a":1,',
                    )
                )
            case _:
                part[at:at] = part[at : at + 1 + c.below(40)]
    fits = [b"%d" % len(text)] if wire.lengths and not c.chance(20) else wire.lengths
    return Wire(bytes(text), bytes(data), list(fits))


def on_draft(change: OnDraft) -> OnDraft:
    DRAFTS[change.__name__.replace("_", " ")] = change
    return change


def on_wire(change: OnWire) -> OnWire:
    WIRES[change.__name__.replace("_", " ")] = change
    return change


NO_STRING: tuple[Any, ...] = (None, 5, True, [], Obj(), 1.5, Raw("NaN"))
NO_OBJECT: tuple[Any, ...] = ("x", 5, True, [], [Obj()], 0)
NO_ARRAY: tuple[Any, ...] = ("x", 5, True, Obj(), 1.5, Raw("Infinity"))


def _one(c: Choices, draft: Draft, want: Callable[[Input], bool] = lambda tensor: True) -> Input | None:
    found = [tensor for tensor in draft.inputs if want(tensor)]
    return c.of(found) if found else None


def _is_json(tensor: Input) -> bool:
    return tensor.texts is not None


def _is_binary(tensor: Input) -> bool:
    return tensor.texts is None


def _has_json(tensor: Input) -> bool:
    return bool(tensor.texts)


# The request's own members


@on_draft
def no_inputs(c: Choices, draft: Draft) -> Refusal | None:
    if c.chance(50):
        draft.head.drop("inputs")
    else:
        draft.head.set("inputs", c.of((None, *NO_ARRAY)))
    return Refusal(("inputs",))


@on_draft
def an_input_that_is_no_object(c: Choices, draft: Draft) -> Refusal | None:
    entries = list(draft.head.get("inputs"))
    entries.insert(c.below(len(entries) + 1), c.of((None, "x", 5, [], True)))
    draft.head.set("inputs", entries)
    return Refusal(("inputs",))


@on_draft
def a_wrong_id(c: Choices, draft: Draft) -> Refusal | None:
    draft.head.set("id", c.of((5, True, [], Obj(), 1.5)))
    return Refusal(("id ",))


@on_draft
def wrong_parameters(c: Choices, draft: Draft) -> Refusal | None:
    draft.head.set("parameters", c.of(NO_OBJECT))
    return Refusal(("parameters",))


@on_draft
def a_nested_parameter(c: Choices, draft: Draft) -> Refusal | None:
    parameters = draft.head.get("parameters") or Obj()
    key = c.of(("bad", "é", "sequence_id", "priority", "timeout"))
    parameters.set(key, c.of((None, [], Obj(), [1], Raw("NaN"), Raw("-Infinity"), Obj([("a", 1)]))))
    draft.head.set("parameters", parameters)
    return Refusal((shown(key),))


@on_draft
def a_reserved_parameter(c: Choices, draft: Draft) -> Refusal | None:
    parameters = draft.head.get("parameters") or Obj()
    key = c.of(("triton_enable_empty_final_response", "triton_", "triton_final_response"))
    parameters.set(key, c.of((True, 1, "x")))
    draft.head.set("parameters", parameters)
    return Refusal((shown(key),))


@on_draft
def a_wrong_timeout(c: Choices, draft: Draft) -> Refusal | None:
    parameters = draft.head.get("parameters") or Obj()
    parameters.set("timeout", c.of((-1, "1", 1.5, True, 2**63, "", False, -(2**70), Raw("1e6"))))
    draft.head.set("parameters", parameters)
    return Refusal(("timeout",))


@on_draft
def a_wrong_form_of_all_outputs(c: Choices, draft: Draft) -> Refusal | None:
    parameters = draft.head.get("parameters") or Obj()
    parameters.set("binary_data_output", c.of((1, 0, "true", "", 1.0, None, [], Obj())))
    draft.head.set("parameters", parameters)
    return Refusal(("binary_data_output",))


# Outputs


@on_draft
def outputs_that_are_no_array(c: Choices, draft: Draft) -> Refusal | None:
    draft.head.set("outputs", c.of(NO_ARRAY))
    return Refusal(("outputs",))


@on_draft
def an_output_that_is_no_object(c: Choices, draft: Draft) -> Refusal | None:
    entries = list(draft.head.get("outputs") or [])
    entries.insert(c.below(len(entries) + 1), c.of((None, "y", 5, [], Obj(), Obj([("name", c.of(("", *NO_STRING)))]))))
    draft.head.set("outputs", entries)
    return Refusal(("outputs",))


@on_draft
def an_unknown_output(c: Choices, draft: Draft) -> Refusal | None:
    name = c.of(("nowhere", "OUTPUT77", "outputs", "unknown é"))
    entries = list(draft.head.get("outputs") or [])
    entries.insert(c.below(len(entries) + 1), Obj([("name", name)]))
    draft.head.set("outputs", entries)
    return Refusal((name[:8], "output"))


@on_draft
def an_output_twice(c: Choices, draft: Draft) -> Refusal | None:
    if not draft.inputs:
        return None
    name = output_of(c.of(draft.inputs).name)
    entries = [entry for entry in draft.head.get("outputs") or [] if entry.get("name") != name]
    for _ in range(2):
        entries.insert(c.below(len(entries) + 1), Obj([("name", name)]))
    draft.head.set("outputs", entries)
    return Refusal((shown(name), "outputs"))


@on_draft
def a_wrong_form_of_an_output(c: Choices, draft: Draft) -> Refusal | None:
    if not draft.outputs:
        return None
    name, _ = c.of(draft.outputs)
    entry = next(entry for entry in draft.head.get("outputs") if entry.get("name") == name)
    entry.set("parameters", Obj([("binary_data", c.of((1, 0, "true", 1.0, None, [], Raw("NaN"))))]))
    return Refusal((shown(name), "binary_data"))


@on_draft
def a_wrong_number_of_classes(c: Choices, draft: Draft) -> Refusal | None:
    if not draft.outputs:
        return None
    name, _ = c.of(draft.outputs)
    entry = next(entry for entry in draft.head.get("outputs") if entry.get("name") == name)
    entry.set("parameters", Obj([("classification", c.of((-1, "1", 1.5, True, 1.0, None, [], Raw("NaN"))))]))
    return Refusal((shown(name), "classification"))


@on_draft
def wrong_parameters_of_an_output(c: Choices, draft: Draft) -> Refusal | None:
    if not draft.outputs:
        return None
    name, _ = c.of(draft.outputs)
    entry = next(entry for entry in draft.head.get("outputs") if entry.get("name") == name)
    entry.set("parameters", c.of(NO_OBJECT))
    return Refusal((shown(name), "parameters"))


# Members of an input


@on_draft
def an_input_without_a_name(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    if c.chance(30):
        tensor.entry.drop("name")
    else:
        tensor.entry.set("name", c.of(("", *NO_STRING)))
    return Refusal(("inputs", "name"))


@on_draft
def a_wrong_datatype(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    if c.chance(20):
        tensor.entry.drop("datatype")
    else:
        own = tensor.datatype
        tensor.entry.set("datatype", c.of((own.lower(), "", "FLOAT", own + " ", "STRING", "FP8", "TYPE_FP32", *NO_STRING)))
    return Refusal((tensor.shown, "datatype"))


@on_draft
def no_shape(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    if c.chance(20):
        tensor.entry.drop("shape")
    else:
        tensor.entry.set("shape", c.of((None, 4, "[1]", Obj(), True, 1.5)))
    return Refusal((tensor.shown, "shape"))


@on_draft
def a_wrong_dimension(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    shape: list[Any] = list(tensor.shape)
    bad = c.of((-1, -5, 1.0, "1", True, None, [], [1], Obj(), -(2**63), Raw("1e0"), Raw("2.5"), Raw("NaN")))
    if shape and c.chance(60):
        shape[c.below(len(shape))] = bad
    else:
        shape.insert(c.below(len(shape) + 1), bad)
    tensor.entry.set("shape", shape)
    return Refusal((tensor.shown, "dimension"))


@on_draft
def another_shape(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    shape = list(tensor.shape)
    size = c.of((7, 2, 0, 1, 6, 2**31, 2**32 + 1, 2**40, 2**63, 2**64, 10**30, 10**300))
    if shape and c.chance(70):
        shape[c.below(len(shape))] = size
    else:
        shape.insert(c.below(len(shape) + 1), size)
    if math.prod(shape) == math.prod(tensor.shape):
        return None
    tensor.entry.set("shape", shape)
    return Refusal((tensor.shown,))


@on_draft
def dimensions_that_overflow(c: Choices, draft: Draft) -> Refusal | None:
    """Products that are the right number modulo 2**64, as in Triton's own tests."""
    if (tensor := _one(c, draft)) is None:
        return None
    shapes = [2**4, 2**60 + 2], [2**2, 2**60 + 2], [2**32, 2**32], [2**63, 2], [2**62, 2**62, 2**62], [2**40]
    tensor.entry.set("shape", c.of(shapes))
    return Refusal((tensor.shown,))


@on_draft
def too_many_dimensions(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    tensor.entry.set("shape", [1] * c.of((17, 40, 1000)) + list(tensor.shape))
    return Refusal((tensor.shown, "dimensions"))


@on_draft
def wrong_parameters_of_an_input(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    tensor.entry.set("parameters", c.of(NO_OBJECT))
    return Refusal((tensor.shown, "parameters"))


@on_draft
def a_nested_parameter_of_an_input(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    parameters = tensor.entry.get("parameters") or Obj()
    parameters.set("bad", c.of((None, [], Obj(), Raw("Infinity"))))
    tensor.entry.set("parameters", parameters)
    return Refusal((tensor.shown, "bad"))


@on_draft
def shared_memory(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    key = c.of(("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"))
    value = "r" if key.endswith("region") else 4
    tensor.entry.set("parameters", Obj([*(tensor.entry.get("parameters") or ()), (key, value)]))
    return Refusal((tensor.shown, key))


@on_draft
def neither_data_nor_a_size(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    tensor.entry.drop("parameters")
    tensor.data = b""
    if c.chance(50):
        tensor.entry.set("data", None)
    else:
        tensor.entry.drop("data")
    return Refusal((tensor.shown, "data", "binary_data_size"))


@on_draft
def both_data_and_a_size(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    if tensor.texts is None:
        tensor.entry.set("data", c.of(([], [1], "", Obj(), 5)))
    else:
        tensor.entry.set("parameters", Obj([("binary_data_size", c.of((0, 4, 16)))]))
    return Refusal((tensor.shown, "data", "binary_data_size"))


# Data in JSON


@on_draft
def data_that_are_no_array(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft, _is_json)) is None:
        return None
    tensor.entry.set("data", c.of(NO_ARRAY))
    return Refusal((tensor.shown, "data"))


@on_draft
def another_number_of_values(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft, _is_json)) is None:
        return None
    values = tensor.values()
    if values and c.chance(50):
        del values[c.below(len(values))]
    else:
        values.insert(c.below(len(values) + 1), values[0] if values else 1)
    tensor.entry.set("data", values)
    return Refusal((tensor.shown, "data"))


@on_draft
def data_nested_otherwise(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft, _has_json)) is None:
        return None
    values, shape = tensor.values(), tensor.shape
    rows = nested(values, shape)
    match c.below(4):
        case 0:
            rows = [rows]
        case 1 if shape != (len(values), 1):
            rows = [[value] for value in values]
        case 2 if len(shape) > 1:
            rows[c.below(len(rows))] = []
        case 3 if len(shape) > 1:
            rows[c.below(len(rows))].append(c.of((values[0], [], [values[0]])))
        case _ if len(shape) < 2 or len(values) > shape[0]:
            at = c.below(len(values))
            rows = [*values[:at], [values[at]], *values[at + 1 :]]
        case _:
            return None
    tensor.entry.set("data", rows)
    return Refusal((tensor.shown,))


@on_draft
def ragged_data_with_the_right_count(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft, lambda t: bool(t.texts) and len(t.shape) > 1 and t.shape[0] > 1)) is None:
        return None
    rows = nested(tensor.values(), tensor.shape)
    rows[0] = [*rows[0], rows[1][0]]
    rows[1] = rows[1][1:]
    tensor.entry.set("data", rows)
    return Refusal((tensor.shown,))


def wrong_elements(datatype: str) -> tuple[Any, ...]:
    """JSON values that are no elements of the datatype."""
    if datatype == "BYTES":
        return (1, None, True, 1.5, Obj(), Raw("NaN"), 0)
    if datatype == "BOOL":
        return (2, "true", None, -1, 0.5, Obj(), "", "1", Raw("Infinity"), 2**70)
    if datatype in INTEGERS:
        low, high = bounds(datatype)
        return (
            high + 1, low - 1, 1.5, True, "1", None, Obj(), Raw("NaN"), Raw("1e400"), 10**30, -(10**30), Raw("-Infinity"), False, 2**64, -(2**63) - 1,
            Raw("1e30"), Raw("0.1"),
        )  # fmt: skip
    beyond = {
        "FP16": ("65520", "65520.0", "1e5", "1e300"),
        "BF16": ("3.3999e38", "1e39", "1e300"),
        "FP32": ("3.4028236e38", "1e39", "-1e300", str(2**128)),
        "FP64": (str(2**1024),),
    }[datatype]
    return ("1", True, Obj(), "NaN", False, "", *map(Raw, ("1e400", "-1e400", "1" + "0" * 310)), *map(Raw, beyond))


@on_draft
def a_wrong_element(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft, _has_json)) is None:
        return None
    values = tensor.values()
    bad = c.of(wrong_elements(tensor.datatype))
    values[c.below(len(values))] = bad
    tensor.entry.set("data", nested(values, tensor.shape) if c.chance(40) else values)
    # no double holds 1e400: the JSON reader refuses it as a number, whatever its datatype
    return Refusal((("number", "range"),)) if isinstance(bad, Raw) and bad.endswith("e400") else Refusal((tensor.shown,))


# Binary data


@on_draft
def a_wrong_size(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft, _is_binary)) is None:
        return None
    size = len(tensor.data)
    bad = c.of((str(size), -1, True, float(size), 2**63, -(2**70), 1.5, "", Raw("1e0")))
    tensor.entry.set("parameters", Obj([("binary_data_size", bad)]))
    return Refusal((tensor.shown, "binary_data_size"))


@on_draft
def another_size(c: Choices, draft: Draft) -> Refusal | None:
    """The size of the data is wrong for the shape or, for BYTES, for the elements. The body may have that size or not."""
    if (tensor := _one(c, draft, _is_binary)) is None:
        return None
    size = len(tensor.data)
    other = c.of((size + 1, max(size - 1, 0), size + 4, 0, size * 2, 2**31, 2**62, 2**63 - 1))
    if other == size:
        return None
    tensor.entry.set("parameters", Obj([("binary_data_size", other)]))
    if other < 2 * size + 8 and c.chance(50):
        tensor.data = tensor.data.ljust(other, b"\0")[:other]
        if tensor.datatype != "BYTES" or other == size:
            return Refusal((tensor.shown, "binary_data_size"))
    if not written(draft).data and other:  # then the header is not there either
        return Refusal(((tensor.shown, HEADER),))
    return Refusal((tensor.shown,))


@on_draft
def bytes_with_a_wrong_length(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft, lambda t: t.texts is None and t.datatype == "BYTES" and bool(t.elements))) is None:
        return None
    data = bytearray(framed(tensor.elements))
    which = c.below(len(tensor.elements))
    at = len(framed(tensor.elements[:which]))
    length = len(tensor.elements[which])
    match c.below(4):
        case 0:
            data[at : at + 4] = c.of((2**32 - 1, len(data), 2**31)).to_bytes(4, "little")
        case 1 if which == len(tensor.elements) - 1 and length:
            data[at : at + 4] = c.of((length - 1, 0)).to_bytes(4, "little")
        case 2:
            data[at : at + 4] = length.to_bytes(4, "big") if length else b"\0\0\0\1"
        case _:
            data = data[: at + c.below(4)]
    tensor.data = bytes(data)
    tensor.entry.set("parameters", Obj([("binary_data_size", len(data))]))
    return Refusal((tensor.shown,))


# Faults against the declarations of the model


@on_draft
def a_missing_input(c: Choices, draft: Draft) -> Refusal | None:
    required = {spec.name for spec in draft.model.inputs or () if not spec.optional}
    if (tensor := _one(c, draft, lambda t: t.name in required)) is None:
        return None
    draft.inputs.remove(tensor)
    draft.head.set("inputs", [entry for entry in draft.head.get("inputs") if entry is not tensor.entry])
    return Refusal((tensor.shown,))


@on_draft
def a_surplus_input(c: Choices, draft: Draft) -> Refusal | None:
    if draft.model.inputs is None:
        return None
    entry = Obj([("name", "surplus"), ("datatype", "FP32"), ("shape", [1]), ("data", [1])])
    entries = list(draft.head.get("inputs"))
    entries.insert(c.below(len(entries) + 1), entry)
    draft.head.set("inputs", entries)
    return Refusal(("surplus",))


@on_draft
def a_renamed_input(c: Choices, draft: Draft) -> Refusal | None:
    if draft.model.inputs is None or (tensor := _one(c, draft)) is None:
        return None
    name = c.of((tensor.name + "0", tensor.name + " ", "renamed", tensor.name.swapcase() + "_"))
    tensor.entry.set("name", name)
    return Refusal((shown(name),))


@on_draft
def an_input_twice(c: Choices, draft: Draft) -> Refusal | None:
    if (tensor := _one(c, draft)) is None:
        return None
    tensor = draft.inputs[-1] if tensor.data else tensor  # its bytes come twice, one after the other
    entries = list(draft.head.get("inputs"))
    entries.append(tensor.entry)
    draft.head.set("inputs", entries)
    draft.inputs.append(tensor)
    return Refusal((tensor.shown, "inputs"))


@on_draft
def another_datatype(c: Choices, draft: Draft) -> Refusal | None:
    """The datatype is not the declared one. The data are valid for it."""
    specs = {spec.name: spec for spec in draft.model.inputs or () if spec.datatype}
    if (tensor := _one(c, draft, lambda t: t.name in specs and t.datatype not in ("BOOL", "BYTES"))) is None:
        return None
    other = c.of([name for name in SIZES if name != tensor.datatype])
    count = math.prod(tensor.shape)
    tensor.entry.set("datatype", other)
    if tensor.texts is None:
        tensor.data = bytes(count * SIZES[other])
        tensor.entry.set("parameters", Obj([("binary_data_size", len(tensor.data))]))
    else:
        tensor.entry.set("data", [0] * count)
    return Refusal((tensor.shown, "datatype"))


@on_draft
def a_shape_that_is_not_declared(c: Choices, draft: Draft) -> Refusal | None:
    """The shape has as many elements, but one dimension more."""
    specs = {spec.name for spec in draft.model.inputs or () if spec.shape is not None}
    if (tensor := _one(c, draft, lambda t: t.name in specs and len(t.shape) < 16)) is None:
        return None
    shape = [*tensor.shape, 1]
    tensor.entry.set("shape", shape)
    if tensor.texts is not None:
        tensor.entry.set("data", tensor.values())
    return Refusal((tensor.shown, "shape"))


@on_draft
def a_batch_that_is_too_large(c: Choices, draft: Draft) -> Refusal | None:
    most = draft.model.max_batch_size
    if not most or not draft.inputs:
        return None
    size = most + c.of((1, 2, 100))
    if any(math.prod(tensor.shape[1:]) * size > 4000 for tensor in draft.inputs):
        return None
    changed = draft.inputs if len(draft.inputs) == 1 or c.chance(50) else [draft.inputs[-1]]
    for tensor in changed:
        shape = (size, *tensor.shape[1:])
        count = math.prod(shape)
        tensor.entry.set("shape", list(shape))
        if tensor.texts is None:
            tensor.data = bytes(count * SIZES.get(tensor.datatype, 4))
            tensor.entry.set("parameters", Obj([("binary_data_size", len(tensor.data))]))
        else:
            tensor.entry.set("data", ["" if tensor.datatype == "BYTES" else 0] * count)
    return Refusal(("batch size",))


# JSON


@on_draft
def a_member_twice(c: Choices, draft: Draft) -> Refusal | None:
    owners = [draft.head, *(tensor.entry for tensor in draft.inputs)]
    owners += [owner.get("parameters") for owner in owners if owner.get("parameters")]
    owner = c.of(owners)
    key, value = c.of(owner)
    owner.insert(c.below(len(owner) + 1), (key, c.of((value, None, 1))))
    return Refusal((shown(key), "two members"))


@on_draft
def deep_nesting(c: Choices, draft: Draft) -> Refusal | None:
    depth = c.of((70, 64, 1000, 20_000))
    begin, end = c.of((("[", "]"), ('{"a":', "}")))
    if (tensor := _one(c, draft, _is_json)) is not None and c.chance(60):
        tensor.entry.set("data", Raw("[" * depth + "]" * depth))
    else:
        draft.head.set("unknown", Raw(begin * depth + ("0" if end == "}" else "") + end * depth))
    return Refusal(("nested",))


@on_draft
def a_number_that_is_too_long(c: Choices, draft: Draft) -> Refusal | None:
    number = Raw("1" * 401 if c.chance(50) else "0." + "3" * c.of((399, 5000)))
    if (tensor := _one(c, draft, _has_json)) is not None and tensor.datatype not in ("BYTES", "BOOL") and c.chance(60):
        values = tensor.values()
        values[c.below(len(values))] = number
        tensor.entry.set("data", values)
    else:
        draft.head.set("unknown", number)
    return Refusal((("number", "range"),))


NO_JSON = (
    "+1", "01", ".5", "1.", "0x10", "1_000", "nan", "inf", "TRUE", "'x'", ",", "1e", "--1", "-", "-NaN", "+Infinity", "NaN1", "undefined", "/**/1",
    '"\\x"', '"\\u12"', '"\\ud800"', '"\\udc00\\ud800"', '"\n"', '"\t"', '"\0"', "1,,2", "[1,]", "{,}", '{"a"}', '{"a":}', "{1:2}", "[1 2]", "\0", "\x0c", "1\xa0",
    "NaN Infinity", "[NaN,]", "[Infinity}", '"', "]", "}", '{"a":1,}', "\\u0031", "\ufeff1", "None", "-Infinit", "nulll",
)  # fmt: skip


@on_draft
def what_is_no_json(c: Choices, draft: Draft) -> Refusal | None:
    bad = Raw(c.of(NO_JSON))
    if (tensor := _one(c, draft, _has_json)) is not None and c.chance(60):
        values = tensor.values()
        values[c.below(len(values))] = bad
        tensor.entry.set("data", values)
    else:
        draft.head.set("unknown", bad)
    # a string that does not end makes a number of the next one's text
    return Refusal((("JSON", "two members", "number", "nested"),))


@on_wire
def invalid_utf8(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    bad = c.of((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xe2\x82", b"\xf4\x90\x80\x80", b"\x80", b"\xf8\x88\x80"))
    quotes = [at for at, code in enumerate(wire.text) if code == 0x22 and wire.text[at - 1 : at] != b"\\"]
    if not quotes or b"\\" in wire.text:  # behind an escaped quote, every second one is not a begin
        return None
    at = quotes[c.below(len(quotes) // 2) * 2] + 1
    wire.text = wire.text[:at] + bad + wire.text[at:]
    wire.lengths = [b"%d" % len(wire.text)] if wire.lengths else []
    return Refusal(("UTF-8",))


@on_wire
def truncated_json(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    text = wire.text.rstrip()
    if not text:
        return None
    wire.text, wire.data = text[: c.below(len(text))], b""
    wire.lengths = [b"%d" % len(wire.text)] if wire.lengths and wire.text else []
    return Refusal((BROKEN,))


@on_wire
def more_after_the_json(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    if not wire.text:
        return None
    wire.text += c.of((b"x", b"}", b" {}", b"\0", b",", b"1"))
    wire.lengths = [b"%d" % len(wire.text)] if wire.lengths else []
    return Refusal(("JSON",))


@on_wire
def another_json_value(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    wire.text = c.of((b"[]", b"5", b'"x"', b"null", b"true", b"NaN", b"[{}]", b"{}", b" ", b"", b"1.5", b"\xef\xbb\xbf"))
    wire.data = b""
    wire.lengths = [b"%d" % len(wire.text)] if wire.lengths and wire.text else []
    return Refusal((("JSON", "inputs"),))


# Inference-Header-Content-Length


@on_wire
def a_header_that_is_no_number(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    length = b"%d" % len(wire.text)
    wire.lengths = [c.of((b"abc", b"", b"-1", b"+" + length, length + b"xyz", length + b".0", b"0x10", length + b", " + length, b"1" * 21, b"99999999999", b"2147483648", b"\xb2", b"1_0"))]  # fmt: skip
    return Refusal((HEADER,))


@on_wire
def two_headers_that_differ(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    length = len(wire.text)
    wire.lengths = [b"%d" % length, c.of((b"%d" % (length + 1), b"0" if length else b"1", b"abc"))]
    if c.chance(50):
        wire.lengths.reverse()
    return Refusal((HEADER,))


@on_wire
def a_header_beyond_the_body(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    wire.lengths = [b"%d" % (len(wire.body) + c.of((1, 2, 100, 2**30)))]
    return Refusal((HEADER,))


@on_wire
def a_header_that_is_short(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    text = wire.text.rstrip()
    if not text:
        return None
    wire.lengths = [b"%d" % (len(text) - c.of((1, 2, 1 + c.below(len(text) - 1))) or 1)]
    return Refusal((BROKEN,))


@on_wire
def a_header_that_is_long(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    """The length of the JSON covers some bytes of the tensors too."""
    if not wire.text or not wire.data:
        return None
    more = 1 + c.below(len(wire.data))
    if wire.data[:more].strip(b" \t\r\n"):
        wire.lengths = [b"%d" % (len(wire.text) + more)]
        return Refusal((BROKEN,))
    return None


@on_wire
def no_header(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    if not wire.text or not wire.data.strip(b" \t\r\n"):
        return None
    wire.lengths = []
    # it is told by the word binary_data_size in the text, which nobody escapes
    return Refusal((BROKEN,)) if draft.style.escapes == "all" else Refusal((HEADER,))


@on_wire
def a_header_of_zero(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    """The request is a raw binary one, but the model does not have one declared input."""
    if draft.model.inputs is not None and len(draft.model.inputs) == 1:
        return None
    wire.lengths = [b"0"]
    return Refusal((HEADER, "raw"))


@on_wire
def surplus_bytes(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    if not wire.text:
        return None
    wire.lengths = [b"%d" % len(wire.text)]
    wire.data += c.of((b"\0", b" ", b"more", b"\0" * 100))
    return Refusal(("binary data",))


@on_wire
def missing_bytes(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    if not wire.text or not wire.data:
        return None
    wire.data = wire.data[: c.below(len(wire.data))]
    last = [tensor for tensor in draft.inputs if tensor.data]
    return Refusal((tuple(tensor.shown for tensor in last), "left in the body"))


# Raw binary requests


@on_wire
def a_raw_request_of_another_size(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    if draft.raw is None or draft.model.inputs is None:
        return None
    (spec,) = draft.model.inputs
    if spec.datatype in ("BYTES", "") or spec.shape is None:
        return None
    row = math.prod(size for size in spec.shape if size != -1) * SIZES[spec.datatype]
    more = c.of((1, 4, row + 1, 3))
    if -1 in spec.shape and more % row == 0:
        return None
    wire.data += bytes(more)
    return Refusal((shown(spec.name), "bytes"))


@on_wire
def a_raw_request_of_no_one_shape(c: Choices, draft: Draft, wire: Wire) -> Refusal | None:
    inputs = draft.model.inputs
    if inputs is None or len(inputs) != 1:
        return None
    (spec,) = inputs
    if not spec.datatype or spec.shape is None:
        pass
    elif spec.datatype == "BYTES":
        if -1 not in spec.shape and math.prod(spec.shape) == 1:
            return None
    elif spec.shape.count(-1) < 2:
        return None
    wire.text, wire.data, wire.lengths = b"", c.octets(8), [b"0"]
    return Refusal((shown(spec.name), "raw"))


KINDS.extend((*DRAFTS, *WIRES))
