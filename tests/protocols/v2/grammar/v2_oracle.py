"""Checks that an answer to an inference request (v2) is the one that is due, with the standard library alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tests.protocols.v2.grammar.v2_grammar import SIZES, Answer, Case, Either, Refusal, Wanted, framed, pack, unpack

IHCL = b"inference-header-content-length"


class Wrong(AssertionError):
    """An answer that is not due, and why."""


def check(case: Case, status: int, headers: Mapping[bytes, bytes], body: bytes) -> None:
    """Raises Wrong unless this answers the case."""
    match case.due:
        case Refusal():
            _check_refusal(case.due, status, headers, body)
        case Answer():
            _check_answer(case, case.due, status, headers, body)
        case Either() if status == 200:
            _need(_json(body[: int(headers.get(IHCL, len(body)))])["model_name"] == case.model.name, body[:300])
        case Either():
            _check_refusal(Refusal(()), status, headers, body)


def _need(true: bool, *what: object) -> None:
    if not true:
        raise Wrong(" ".join(str(part)[:400] for part in what))


def _check_refusal(due: Refusal, status: int, headers: Mapping[bytes, bytes], body: bytes) -> None:
    _need(status == due.status, "status", status, "instead of", due.status, "for", due.words, body)
    _need(headers[b"content-type"] == b"application/json", "an error of type", headers[b"content-type"])
    said = _json(body)
    _need(type(said) is dict and list(said) == ["error"] and type(said["error"]) is str, "no error but", body)
    text = said["error"]
    _need(len(text) < 1000, "an error of", len(text), "characters")
    for word in due.words:
        ways = (word,) if isinstance(word, str) else word
        _need(any(way in text for way in ways), "the error does not name", ways, ":", text)


def _check_answer(case: Case, due: Answer, status: int, headers: Mapping[bytes, bytes], body: bytes) -> None:
    _need(status == 200, "status", status, body[:300])
    length = headers.get(IHCL)
    at = len(body) if length is None else int(length)
    _need(0 < at <= len(body), "a head of", at, "bytes of", len(body))
    head = _json(body[:at])
    binary_bytes = len(body) - at
    octets = b"application/octet-stream" if binary_bytes else b"application/json"
    _need(headers[b"content-type"] == octets, "type", headers[b"content-type"], "with", binary_bytes, "bytes")
    _need((length is not None) == bool(binary_bytes), IHCL, length, "with", binary_bytes, "bytes")
    named = {key: head.pop(key, None) for key in ("model_name", "id", "model_version", "outputs")}
    _need(not head, "members", list(head))
    _need(named["model_name"] == case.model.name, "model_name", named["model_name"])
    _need(named["model_version"] in ("1", None), "model_version", named["model_version"])
    _need(named["id"] == (due.id or None), "id", named["id"], "instead of", due.id)
    outputs = named["outputs"]
    names = [wanted.name for wanted in due.outputs]
    _need([o["name"] for o in outputs] == names, "outputs", [o["name"] for o in outputs], "instead of", names)
    for wanted, entry in zip(due.outputs, outputs, strict=True):
        at += _check_output(wanted, entry, body, at)
    _need(at == len(body), len(body) - at, "bytes too many")


def _check_output(wanted: Wanted, entry: dict[str, Any], body: bytes, at: int) -> int:
    """The bytes of binary data that the output has."""
    form = {"parameters"} if wanted.binary else {"data"}
    _need(entry.keys() == {"name", "datatype", "shape"} | form, wanted.name, "has", list(entry))
    _need(entry["datatype"] == wanted.datatype, wanted.name, "is", entry["datatype"])
    _need(entry["shape"] == list(wanted.shape), wanted.name, "has shape", entry["shape"], "instead of", wanted.shape)
    if not wanted.binary:
        _check_data(wanted, entry["data"])
        return 0
    _need(list(entry["parameters"]) == ["binary_data_size"], wanted.name, "has parameters", entry["parameters"])
    size: int = entry["parameters"]["binary_data_size"]
    data = body[at : at + size]
    expected = framed(wanted.elements) if wanted.datatype == "BYTES" else b"".join(wanted.elements)
    if wanted.datatype == "BOOL":
        data, expected = bytes(map(bool, data)), bytes(map(bool, expected))
    if data != expected and not wanted.sent_binary and wanted.datatype in ("FP16", "FP32", "FP64", "BF16"):
        width = SIZES[wanted.datatype]
        _need(len(data) == len(expected), wanted.name, "has", len(data), "bytes instead of", len(expected))
        for index, element in enumerate(wanted.elements):
            _need(_same(wanted.datatype, data[index * width :][:width], element), wanted.name, index, "of", wanted.elements)
        return size
    _need(data == expected, wanted.name, "has", data[:100].hex(), "instead of", expected[:100].hex())
    return size


def _same(datatype: str, got: bytes, element: bytes) -> bool:
    return got == element or (math.isnan(unpack(datatype, got)) and math.isnan(unpack(datatype, element)))


def _check_data(wanted: Wanted, data: Any) -> None:
    _need(type(data) is list and len(data) == len(wanted.elements), wanted.name, "has not", len(wanted.elements), "values")
    for index, (value, element) in enumerate(zip(data, wanted.elements, strict=True)):
        if not _says(wanted.datatype, value, element):
            raise Wrong(f"{wanted.name} has {value!r} at {index} instead of {wanted.datatype} {element!r}")


def _says(datatype: str, value: Any, element: bytes) -> bool:
    """True if a JSON value stands for these bytes."""
    if datatype == "BYTES":
        return type(value) is str and value.encode() == element
    if datatype == "BOOL":
        return value is (element != b"\0")
    number = unpack(datatype, element)
    if not math.isfinite(number):
        return value is None
    if type(number) is int:
        return type(value) is int and value == number
    return type(value) in (int, float) and pack(datatype, value) == element


def _json(text: bytes) -> Any:
    """One JSON text by the letter: UTF-8, no NaN, no member twice."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _need(len(dict(pairs)) == len(pairs), "a member twice in", text[:300])
        return dict(pairs)

    try:
        return json.loads(text.decode(), parse_constant=_no_constant, object_pairs_hook=members)
    except ValueError as error:
        raise Wrong(f"not JSON: {error}: {text[:200]!r}") from None


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} in JSON")
