"""Requests that Triton and we are asked alike, and what of an answer must be equal."""

from __future__ import annotations

import gzip
import http.client
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from tests.interop.served_v2 import DECLARED, NUMBERS

Answer = Mapping[str, Any]
"""The compared aspects of an answer, by name."""

DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "FP16": np.float16, "BF16": ml_dtypes.bfloat16, "FP32": np.float32, "FP64": np.float64,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request. `chunks` sends the body in chunks of that many bytes. `exact` compares too what otherwise is free: the very
    text of the outputs' data, the media type of an error. `only` are the members of the reply that are compared, `keys` says that
    their names are and not their values."""

    name: str
    path: str
    body: bytes = b""
    headers: Sequence[tuple[str, str]] = ()
    method: str = "POST"
    chunks: int = 0
    exact: bool = False
    only: Sequence[str] = ()
    keys: bool = False


def ask(at: str, case: Case) -> Answer:
    """Sends a case to the server at `at`, on a connection of its own, and takes the answer apart."""
    host, _, port = at.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    try:
        connection.putrequest(case.method, case.path, skip_accept_encoding=True)
        for name, value in case.headers:
            connection.putheader(name, value)
        if case.chunks:
            connection.putheader("Transfer-Encoding", "chunked")
            cut = [case.body[at : at + case.chunks] for at in range(0, len(case.body), case.chunks)]
            connection.endheaders(iter(cut), encode_chunked=True)
        else:
            connection.putheader("Content-Length", str(len(case.body)))
            connection.endheaders(case.body)
        response = connection.getresponse()
        body = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()
    answer: dict[str, Any] = {"status": response.status}
    coding = headers.get("content-encoding")
    if coding is not None:
        answer["content-encoding"] = coding
        body = gzip.decompress(body) if coding == "gzip" else zlib.decompress(body)
    if response.status != 200:
        if case.exact:
            answer |= {"content-type": headers.get("content-type"), "Allow": headers.get("allow")}
        if response.status >= 400 and case.method != "HEAD":
            answer["error"] = _error(body)
        return answer | {"said": body[:300].decode("utf-8", "replace")}
    return answer | _reply(case, headers, body)


def _error(body: bytes) -> str:
    try:
        return "JSON" if isinstance(json.loads(body)["error"], str) else "JSON of another form"
    except (ValueError, KeyError, TypeError):
        return "text"


def _reply(case: Case, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    length = headers.get("inference-header-content-length")
    head, rest = (body, b"") if length is None else (body[: int(length)], body[int(length) :])
    kept: dict[str, Any] = {"content-type": headers.get("content-type"), "header length": length is not None}
    if not head:
        return kept
    if headers["content-type"].startswith("text/event-stream"):
        return kept | {"events": [json.loads(event.removeprefix(b"data: ")) for event in head.split(b"\n\n") if event]}
    try:
        reply: Any = json.loads(head)
    except ValueError:
        return kept | {"JSON": "invalid"}
    if case.keys:
        return kept | {"members": sorted(set(_members_of(reply)))}
    if isinstance(reply, list):
        return kept | {e["name"]: {k: v for k, v in e.items() if v} for e in reply if e["name"] in DECLARED}
    if case.only:
        return kept | {name: reply.get(name) for name in case.only}
    if "outputs" not in reply or "inputs" in reply:
        return kept | dict(reply)
    kept |= {name: value for name, value in reply.items() if name != "outputs"}
    kept["outputs"] = [output["name"] for output in reply["outputs"]]
    for output in reply["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        parameters = dict(output.get("parameters", {}))
        size = parameters.pop("binary_data_size", None)
        if size is not None:
            data, rest = rest[:size], rest[size:]
            assert len(data) == size, f"{case.name}: {size} bytes of {name} are promised, {len(data)} are there"
        else:
            data = bytes_of(datatype, output["data"])
        kept[name] = {"form": "JSON" if size is None else "binary", "datatype": datatype, "shape": shape}
        kept[name]["bytes"] = data.decode("latin-1") if datatype == "BYTES" else data.hex()
        if parameters:
            kept[name]["parameters"] = parameters
        if case.exact and size is None:
            kept[name]["text"] = head.decode()[head.decode().index('"data":') + 7 :].rstrip("]}") + "]"
    assert not rest, f"{case.name}: {len(rest)} bytes too many"
    return kept


def _members_of(value: Any, at: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for e in value:
            yield from _members_of(e, at)
    elif isinstance(value, dict):
        for name, e in value.items():
            yield f"{at}{name}"
            yield from _members_of(e, f"{at}{name}.")


def bytes_of(datatype: str, data: Sequence[Any]) -> bytes:
    """The binary form of a tensor's JSON data, flat or nested; null is NaN."""
    flat = list(_flat(data))
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(e.encode())) + e.encode() for e in flat)
    if datatype in ("FP16", "BF16", "FP32", "FP64"):
        return np.array([float("nan") if e is None else e for e in flat], np.float64).astype(DTYPES[datatype]).tobytes()
    return np.array(flat, DTYPES[datatype]).tobytes()


def _flat(data: Any) -> Iterator[Any]:
    if isinstance(data, list):
        for e in data:
            yield from _flat(e)
    else:
        yield data


# ---- the requests


def tensor(name: str, datatype: str, shape: Any, data: Any = None, **parameters: Any) -> dict[str, Any]:
    """An input; `data` of bytes is binary, None is none at all."""
    made: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
    if isinstance(data, bytes):
        parameters = {"binary_data_size": len(data)} | parameters
        made["bytes"] = data
    elif data is not None:
        made["data"] = data
    if parameters:
        made["parameters"] = parameters
    return made


def infer(
    name: str,
    model: str,
    inputs: Sequence[Mapping[str, Any]],
    *,
    json_length: int | str | None = None,
    extra: bytes = b"",
    headers: Mapping[str, str] | None = None,
    at: str = "",
    exact: bool = False,
    chunks: int = 0,
    **members: Any,
) -> Case:
    """An inference request from inputs as `tensor` makes them. `json_length` overrides the header's true value, "" leaves it out; `extra` are bytes
    behind the last tensor."""
    request = {"inputs": [{k: v for k, v in i.items() if k != "bytes"} for i in inputs], **members}
    head = json.dumps(request).encode()
    binary = b"".join(i["bytes"] for i in inputs if "bytes" in i) + extra
    sent = dict(headers or {})
    if json_length is None and binary:
        json_length = len(head)
    if json_length not in (None, ""):
        sent["Inference-Header-Content-Length"] = str(json_length)
    path = f"/v2/models/{model}{at}/infer"
    return Case(name=name, path=path, body=head + binary, headers=(*sent.items(),), exact=exact, chunks=chunks)


def raw(name: str, model: str, body: bytes, **headers: str) -> Case:
    """A raw binary request."""
    return Case(
        name=name, path=f"/v2/models/{model}/infer", body=body,
        headers=(("Inference-Header-Content-Length", "0"), *((k.replace("_", "-"), v) for k, v in headers.items())),
    )  # fmt: skip


def text(name: str, model: str, body: str | bytes, **more: Any) -> Case:
    """A request whose JSON is written by hand."""
    return Case(name=name, path=f"/v2/models/{model}/infer", body=body.encode() if isinstance(body, str) else body, **more)


SAMPLES: Mapping[str, Sequence[Any]] = {
    "BOOL": [True, False, True],
    "UINT8": [0, 1, 255],
    "UINT16": [0, 1, 65535],
    "UINT32": [0, 1, 2**32 - 1],
    "UINT64": [0, 1, 2**64 - 1],
    "INT8": [-128, 0, 127],
    "INT16": [-32768, 0, 32767],
    "INT32": [-(2**31), 0, 2**31 - 1],
    "INT64": [-(2**63), 0, 2**63 - 1],
    "FP16": [0.5, -2.0, 65504.0],
    "BF16": [0.5, -2.0, 256.0],
    "FP32": [0.1, -2.5, 3.4028235e38],
    "FP64": [0.1, 1e300, 5e-324],
}
WORDS = ["one", "zwölf", ""]
BINARY_OUT: Mapping[str, Any] = {"parameters": {"binary_data_output": True}}
FP32 = struct.pack("<4f", 1, 2, 3, 4)


def one(datatype: str, shape: Any, data: Any = None, **parameters: Any) -> list[dict[str, Any]]:
    return [tensor("INPUT0", datatype, shape, data, **parameters)]


def output(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters} if parameters else {"name": name}


def packed(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(e)) + e for e in elements)


def _datatypes() -> Iterator[Case]:
    for datatype in NUMBERS:
        model, values = f"identity_{datatype.lower()}", SAMPLES[datatype]
        binary = np.array(values, DTYPES[datatype]).tobytes()
        yield infer(f"{datatype} binary, out binary", model, one(datatype, [3], binary), **BINARY_OUT)
        yield infer(f"{datatype} binary, out JSON", model, one(datatype, [3], binary))
        yield infer(f"{datatype} JSON, out binary", model, one(datatype, [3], values), **BINARY_OUT)
        yield infer(f"{datatype} JSON, out JSON", model, one(datatype, [3], values))
        yield raw(f"{datatype} raw", model, binary)
        yield infer(f"{datatype} of no elements, binary", model, one(datatype, [0], b""), **BINARY_OUT)
        yield infer(f"{datatype} of no elements, JSON", model, one(datatype, [0], []))
    elements = packed(*(w.encode() for w in WORDS))
    yield infer("BYTES binary, out binary", "identity_bytes", one("BYTES", [3], elements), **BINARY_OUT)
    yield infer("BYTES binary, out JSON", "identity_bytes", one("BYTES", [3], elements))
    yield infer("BYTES JSON, out binary", "identity_bytes", one("BYTES", [3], WORDS), **BINARY_OUT)
    yield infer("BYTES JSON, out JSON", "identity_bytes", one("BYTES", [3], WORDS))
    yield infer("BYTES of no elements, binary", "identity_bytes", one("BYTES", [0], b""), **BINARY_OUT)
    yield infer("BYTES of no elements, JSON", "identity_bytes", one("BYTES", [0], []))
    yield infer(
        "BYTES that are not UTF-8, out binary", "identity_bytes", one("BYTES", [1], packed(b"\xff\x00\xfe")), **BINARY_OUT
    )
    yield infer("BYTES that are not UTF-8, out JSON", "identity_bytes", one("BYTES", [1], packed(b"\xff\x00\xfe")))
    yield infer(
        "BYTES with a zero byte, out binary", "identity_bytes", one("BYTES", [2], packed(b"a\x00", b"\x00")), **BINARY_OUT
    )
    yield raw("BYTES raw is the element itself", "one_bytes", b"\x03\x00\x00\x00abc")
    yield raw("BYTES raw, empty", "one_bytes", b"")
    yield raw("BYTES raw of a variable dimension", "identity_bytes", packed(b"a"))


def _bodies() -> Iterator[Case]:
    fp32 = "identity_fp32"
    good = one("FP32", [4], FP32)
    head = len(json.dumps({"inputs": [{k: v for k, v in good[0].items() if k != "bytes"}]}))
    mixed = [
        tensor("a", "FP16", [2, 2], np.array([1.1, 2.22, 3.345, 4.34343], np.float16).tobytes()),
        tensor("b", "UINT32", [2, 2], [[1, 2], [3, 4]]),
        tensor("c", "BOOL", [3], b"\1\0\1"),
    ]
    both: dict[str, Any] = {"outputs": [output("A", binary_data=True), output("B")]}
    yield infer("mixed JSON and binary inputs", "mixed", mixed, **both)
    yield infer("inputs in another order", "mixed", mixed[::-1], **both)
    yield infer(
        "the extension's own sizes", "mixed", [mixed[0] | {"parameters": {"binary_data_size": 16}}, *mixed[1:]], **both
    )
    yield infer("outputs in another order", "mixed", mixed, outputs=[output("C"), output("B")])
    yield infer("an output twice", "mixed", mixed, outputs=[output("B"), output("B")])
    yield infer("an unknown output", "mixed", mixed, outputs=[output("B"), output("D")])
    yield infer("outputs is empty", "mixed", mixed, outputs=[], **BINARY_OUT)
    yield infer("an input twice", "mixed", [*mixed, mixed[0]], **both)
    yield infer("a missing input", "mixed", mixed[:2], **both)
    yield infer("an unknown input", "mixed", [*mixed, tensor("d", "FP32", [1], [1.0])], **both)
    yield infer("an unknown input in place of one", "mixed", [*mixed[:2], tensor("d", "FP32", [1], [1.0])], **both)
    yield infer("no inputs", "mixed", [], **both)
    yield infer(
        "binary_data false under binary_data_output true",
        fp32,
        good,
        outputs=[output("OUTPUT0", binary_data=False)],
        **BINARY_OUT,
    )
    yield infer(
        "binary_data_output true and a listed output that says nothing",
        fp32,
        good,
        outputs=[output("OUTPUT0")],
        **BINARY_OUT,
    )
    yield infer("binary_data_output is a string", fp32, good, parameters={"binary_data_output": "true"})
    yield infer("binary_data is 1", fp32, good, outputs=[output("OUTPUT0", binary_data=1)])
    # the end of the JSON
    yield infer(
        "the header's name in lower case", fp32, good, json_length="", headers={"inference-header-content-length": str(head)}
    )
    yield infer(
        "the header is the whole body of JSON",
        fp32,
        one("FP32", [1], [1.0]),
        json_length=len(json.dumps({"inputs": one("FP32", [1], [1.0])})),
    )
    for value in (
        "abc",
        "-1",
        f"{head}xyz",
        f"{head}.0",
        f"+{head}",
        "99999999999",
        str(head + 17),
        str(head - 1),
        str(head + 1),
    ):
        what = (
            value.replace(str(head + 17), "more than the body")
            .replace(str(head - 1), "one less")
            .replace(str(head + 1), "one more")
            .replace(str(head), "N")
        )
        yield infer(f"the header is {what}", fp32, good, json_length=value)
    yield infer("the header is missing", fp32, good, json_length="")
    yield infer("bytes left over", fp32, good, extra=b"1234")
    yield infer("more bytes declared than there are", fp32, one("FP32", [4], FP32, binary_data_size=20))
    sizes: Sequence[tuple[str, Any]] = [
        ("negative", -16),
        ("a string", "16"),
        ("a fraction", 16.0),
        ("true", True),
        ("null", None),
        ("beyond 64 bits", 2**63),
    ]
    for name, value in sizes:
        yield infer(f"binary_data_size is {name}", fp32, one("FP32", [4], FP32, binary_data_size=value))
    yield infer("fewer bytes than the shape takes", fp32, one("FP32", [4], FP32[:12]))
    yield infer("more bytes than the shape takes", fp32, one("FP32", [2], FP32))
    yield infer("data and binary_data_size", fp32, [good[0] | {"data": [1.0, 2.0, 3.0, 4.0]}])
    yield infer("neither data nor binary_data_size", fp32, one("FP32", [4]))
    # BYTES
    for name, body, count in [
        ("a prefix is cut", packed(b"a") + b"\1\0", 2), ("a length is past the end", b"\5\0\0\0ab", 1),
        ("more elements than the shape", packed(b"a", b"b"), 1), ("fewer elements than the shape", packed(b"a"), 2),
        ("spare bytes", packed(b"a") + b"x", 1),
    ]:  # fmt: skip
        yield infer(f"BYTES: {name}", "identity_bytes", one("BYTES", [count], body))
    yield infer("BOOL bytes 2 and 255, out JSON", "identity_bool", one("BOOL", [2], b"\2\xff"))
    yield infer("BOOL bytes 2 and 255, out binary", "identity_bool", one("BOOL", [2], b"\2\xff"), **BINARY_OUT)
    # raw
    yield raw("raw, one variable dimension", "columns", bytes(24))
    yield raw("raw, bytes that no shape has", "columns", bytes(20))
    yield raw("raw, fixed shape", "fixed", FP32)
    yield raw("raw, fixed shape, one byte less", "fixed", FP32[:-1])
    yield raw("raw, two variable dimensions", "open", FP32)
    yield raw("raw, several inputs", "mixed", FP32)
    yield raw("raw, a batching model", "batching", FP32[:8])
    yield raw("raw, no bytes", fp32, b"")
    yield raw("raw, gzip", fp32, gzip.compress(FP32, mtime=0), Content_Encoding="gzip")
    # the JSON
    yield Case(name="an empty body without the header", path=f"/v2/models/{fp32}/infer")
    whole = json.dumps({"inputs": one("FP32", [1], [1.0])})
    yield text("JSON that is cut", fp32, whole[:-2])
    yield text("text after the JSON", fp32, whole + " x")
    yield text("a trailing comma", fp32, whole.replace("]}]}", "],}]}"))
    yield text("a byte order mark", fp32, b"\xef\xbb\xbf" + whole.encode())
    yield text("invalid UTF-8 in the id", fp32, whole[:-1].encode() + b', "id": "\xff"}')
    yield text(
        "invalid UTF-8 in BYTES",
        "identity_bytes",
        b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1],"data":["\xff"]}]}',
    )
    yield text("a member twice", fp32, whole[:-1] + ', "id": "1", "id": "2"}')
    yield text("a list in place of the object", fp32, "[1]")
    yield text("inputs is an object", fp32, '{"inputs": {}}')
    yield text("inputs is missing", fp32, "{}")
    yield text("an input is a number", fp32, '{"inputs": [1]}')
    yield infer(
        "unknown members", fp32, [one("FP32", [1], [1.0])[0] | {"comment": "x"}], model_name="other", model_version="7"
    )
    yield text(
        "250,000 numbers where a member is not known", fp32, '{"ready": [[' + ",".join("1" * 250_000) + "]]," + whole[1:]
    )


def _values() -> Iterator[Case]:
    fp32 = "identity_fp32"
    yield infer("nested data", "fixed", one("FP32", [2, 2], [[1.0, 2.0], [3.0, 4.0]]))
    yield infer("flat data", "fixed", one("FP32", [2, 2], [1.0, 2.0, 3.0, 4.0]))
    yield infer("ragged data with the right count", "fixed", one("FP32", [2, 2], [[1.0], [2.0, 3.0, 4.0]]))
    yield infer("data nested more deeply than the shape", fp32, one("FP32", [2], [[[1.0]], [[2.0]]]))
    yield infer("data is one number", fp32, one("FP32", [1], 1.0))
    yield infer("fewer values than the shape", fp32, one("FP32", [4], [1.0, 2.0]))
    yield infer("more values than the shape", fp32, one("FP32", [2], [1.0, 2.0, 3.0]))
    nested: Any = 1.0
    for _ in range(50):
        nested = [nested]
    yield infer("data nested 50 deep", fp32, one("FP32", [1], nested))
    for name, shape in [
        ("negative", [2, -5]), ("a string", ["4"]), ("a fraction", [4.0]), ("missing", None), ("a number", 4), ("null", [None]),
        ("its product is above 64 bits", [2**4, 2**60 + 2]), ("its product wraps to 16", [2**2, 2**62 + 4]),
    ]:  # fmt: skip
        inputs = one("FP32", shape, [1.0, 2.0, 3.0, 4.0])
        if shape is None:
            del inputs[0]["shape"]
        yield infer(f"shape: {name}", "open" if isinstance(shape, list) and len(shape) == 2 else fp32, inputs)
    yield infer("shape of another rank than the model's", fp32, one("FP32", [2, 2], FP32))
    yield infer("shape of another size than the model's", "fixed", one("FP32", [4, 1], FP32))
    yield infer("rank 0", fp32, one("FP32", [], [1.0]))
    yield infer("a dimension of 0 beside others", "open", one("FP32", [0, 3], b""), **BINARY_OUT)
    yield infer("a datatype in lower case", fp32, one("fp32", [4], FP32))
    yield infer("an unknown datatype", fp32, one("FP8", [4], FP32[:4]))
    yield infer("another datatype than the model's", fp32, one("INT32", [4], FP32))
    yield infer("the digits of a single", fp32, one("FP32", [1], [0.1]), exact=True)
    yield infer("the digits of a double", "identity_fp64", one("FP64", [1], [0.1]), exact=True)
    yield infer("NaN in JSON", fp32, one("FP32", [1], [float("nan")]), **BINARY_OUT)
    yield infer("Infinity in JSON", fp32, one("FP32", [2], [float("inf"), float("-inf")]), **BINARY_OUT)
    yield infer("null for a float", fp32, one("FP32", [1], [None]), **BINARY_OUT)
    yield infer("null for an integer", "identity_int32", one("INT32", [1], [None]))
    yield infer("NaN out, JSON", fp32, one("FP32", [1], np.array([np.nan], np.float32).tobytes()), exact=True)
    yield infer("Infinity out, JSON", fp32, one("FP32", [1], np.array([np.inf], np.float32).tobytes()), exact=True)
    yield text("1e400", "identity_fp64", '{"inputs":[{"name":"INPUT0","datatype":"FP64","shape":[1],"data":[1e400]}]}')
    yield infer("1e39 for a single", fp32, one("FP32", [1], [1e39]))
    yield infer("a whole number for a float", fp32, one("FP32", [1], [1]), **BINARY_OUT)
    for datatype, value, what in [
        ("INT8", 128, "128"), ("UINT8", -1, "-1"), ("UINT8", 256, "256"), ("INT16", 32768, "32768"), ("INT32", 2**31, "2**31"), ("UINT32", 2**32, "2**32"),
        ("INT64", 2**63, "2**63"), ("UINT64", 2**64, "2**64"), ("UINT64", -1, "-1"), ("INT32", 1.5, "1.5"), ("INT32", 1.0, "1.0"),
        ("INT32", True, "true"), ("INT32", "1", "a string"), ("FP32", "1", "a string"), ("FP32", True, "true"), ("BOOL", 1, "1"), ("BOOL", 2, "2"),
        ("BOOL", "true", "a string"), ("BYTES", 1, "1"), ("BYTES", None, "null"), ("BYTES", [], "an empty list"),
    ]:  # fmt: skip
        yield infer(f"{datatype} is given {what}", f"identity_{datatype.lower()}", one(datatype, [1], [value]), **BINARY_OUT)


def _members() -> Iterator[Case]:
    good = one("FP32", [1], [1.0])
    yield infer("an id", "identity_fp32", good, id="a b ü")
    yield infer("an id that is empty", "identity_fp32", good, id="")
    yield infer("an id that is a number", "identity_fp32", good, id=7)
    yield infer("parameters reach the model", "said", good, parameters={"a": "x", "b": 7, "c": True})
    yield infer("a fraction as a parameter", "said", good, parameters={"a": 0.5})
    yield infer("a parameter that is an object", "said", good, parameters={"a": {"b": 1}})
    yield infer("a parameter that is null", "said", good, parameters={"a": None})
    yield infer("a reserved parameter", "said", good, parameters={"triton_x": 1})
    yield infer("parameters is a list", "said", good, parameters=[1])
    yield infer(
        "sequence parameters", "said", good, parameters={"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    )
    yield infer("priority and timeout", "said", good, parameters={"priority": 1, "timeout": 5_000_000})
    yield infer("a timeout that is a string", "said", good, parameters={"timeout": "soon"})
    yield infer("a parameter of an input", "identity_fp32", one("FP32", [1], [1.0], mine=1))
    yield infer("the model refuses", "failing", good)
    yield infer("a batch", "batching", one("FP32", [2, 2], FP32))
    yield infer("a batch above the model's", "batching", one("FP32", [5, 2], bytes(40)))
    yield infer("a batch that is missing", "batching", one("FP32", [2], FP32[:8]))


def _http() -> Iterator[Case]:
    good, fp32 = one("FP32", [4], FP32), "identity_fp32"
    plain = infer("", fp32, good, **BINARY_OUT)

    def sent(name: str, body: bytes, case: Case = plain, **headers: str) -> Case:
        more = [(name.replace("_", "-"), value) for name, value in headers.items()]
        return replace(case, name=name, body=body, headers=(*case.headers, *more))

    length = plain.headers[0][1]
    yield sent("the header twice, with one value", plain.body, Inference_Header_Content_Length=length)
    yield sent("the header twice, with two values", plain.body, Inference_Header_Content_Length="5")
    yield infer("one chunk for each byte", fp32, good, chunks=1, **BINARY_OUT)
    yield replace(raw("raw, in chunks", fp32, FP32), chunks=7)
    yield sent("Expect: 100-continue", plain.body, Expect="100-continue")
    yield infer("a version", fp32, good, at="/versions/1", **BINARY_OUT)
    yield infer("an unknown version", fp32, good, at="/versions/9")
    yield infer("an unknown model", "nobody", good)
    squeezed = gzip.compress(plain.body, mtime=0)
    bare = zlib.compressobj(wbits=-15)
    for name, body in [
        ("gzip", squeezed), ("deflate", zlib.compress(plain.body)), ("GZIP", squeezed), ("br", plain.body), ("identity", plain.body)
    ]:  # fmt: skip
        yield sent(f"Content-Encoding: {name}", body, Content_Encoding=name)
    yield sent("gzip that is none", plain.body, Content_Encoding="gzip")
    yield sent("gzip that is cut", squeezed[:-12], Content_Encoding="gzip")
    yield sent("deflate without zlib's head", bare.compress(plain.body) + bare.flush(), Content_Encoding="deflate")
    large = infer("", fp32, one("FP32", [4096], bytes(16384)), **BINARY_OUT)
    accepted = (
        "gzip",
        "deflate",
        "gzip, deflate",
        "deflate;q=1.0, gzip;q=0.5",
        "gzip;q=0",
        "*",
        "br",
        "identity",
        "GZIP",
        "",
    )
    for accept in accepted:
        yield sent(f"Accept-Encoding: {accept or 'empty'}", large.body, large, Accept_Encoding=accept)
    small = infer("", fp32, good, **BINARY_OUT)
    yield sent("Accept-Encoding: gzip, a reply of few bytes", small.body, small, Accept_Encoding="gzip")
    yield sent("Accept-Encoding: gzip, and an error", plain.body[:-1], Accept_Encoding="gzip")
    for kind in ("application/json", "application/octet-stream", "application/x-www-form-urlencoded", "text/plain"):
        yield sent(f"Content-Type: {kind}", plain.body, Content_Type=kind)
    for name, method, path in [
        ("live", "GET", "/v2/health/live"),
        ("ready", "GET", "/v2/health/ready"),
        ("a model's ready", "GET", f"/v2/models/{fp32}/ready"),
        ("a version's ready", "GET", f"/v2/models/{fp32}/versions/1/ready"),
        ("an unknown model's ready", "GET", "/v2/models/nobody/ready"),
        ("an unknown version's ready", "GET", f"/v2/models/{fp32}/versions/9/ready"),
        ("metadata of a model", "GET", f"/v2/models/{fp32}"),
        ("metadata of a version", "GET", f"/v2/models/{fp32}/versions/1"),
        ("metadata of a batching model", "GET", "/v2/models/batching"),
        ("metadata of several tensors", "GET", "/v2/models/mixed"),
        ("metadata of an unknown model", "GET", "/v2/models/nobody"),
        ("metadata of an unknown version", "GET", f"/v2/models/{fp32}/versions/9"),
        ("config of an unknown model", "GET", "/v2/models/nobody/config"),
        ("statistics of an unknown model", "GET", "/v2/models/nobody/stats"),
        ("statistics of an unknown version", "GET", f"/v2/models/{fp32}/versions/9/stats"),
        ("infer by GET", "GET", plain.path),
        ("infer by PUT", "PUT", plain.path),
        ("infer by OPTIONS", "OPTIONS", plain.path),
        ("live by HEAD", "HEAD", "/v2/health/live"),
        ("metadata by POST", "POST", f"/v2/models/{fp32}"),
        ("an unknown path", "GET", "/v2/nothing"),
        ("a percent-encoded model name", "GET", "/v2/models/identity%5Ffp32/ready"),
        ("a slash at the end", "GET", f"/v2/models/{fp32}/ready/"),
        ("a query", "GET", f"/v2/models/{fp32}/ready?a=b"),
        ("the index of models", "POST", "/v2/repository/index"),
        ("load of an unknown model", "POST", "/v2/repository/models/nobody/load"),
        ("unload of an unknown model", "POST", "/v2/repository/models/nobody/unload"),
        ("status of system shared memory", "GET", "/v2/systemsharedmemory/status"),
        ("status of CUDA shared memory", "GET", "/v2/cudasharedmemory/status"),
        ("unregister system shared memory", "POST", "/v2/systemsharedmemory/unregister"),
        ("unregister CUDA shared memory", "POST", "/v2/cudasharedmemory/unregister"),
    ]:
        yield Case(name=name, method=method, path=path)
    yield Case(name="the head of 405", method="GET", path=plain.path, exact=True)
    yield Case(name="the media type of an error in the JSON", path=plain.path, body=b"{", exact=True)
    yield Case(name="the media type of an unknown model's error", path="/v2/models/nobody", method="GET", exact=True)
    members = ("name", "platform", "max_batch_size")
    yield Case(name="config of a model", path=f"/v2/models/{fp32}/config", method="GET", only=members)
    yield Case(name="config of a batching model", path="/v2/models/batching/config", method="GET", only=members)
    yield Case(name="members of the server's metadata", path="/v2", method="GET", keys=True)
    yield Case(name="members of the index of models", path="/v2/repository/index", keys=True)
    yield Case(name="members of statistics", path=f"/v2/models/{fp32}/stats", method="GET", keys=True)
    yield Case(name="members of the log settings", path="/v2/logging", method="GET", keys=True)


def _generate() -> Iterator[Case]:
    def generate(name: str, model: str, body: Any, stream: str = "") -> Case:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Case(name=f"generate{stream}: {name}", path=f"/v2/models/{model}/generate{stream}", body=text)

    yield generate("a scalar", "identity_fp32", {"INPUT0": 1.5})
    yield generate("an array of one", "identity_fp32", {"INPUT0": [1.5]})
    yield generate("an array", "identity_fp32", {"INPUT0": [1.5, 2.5]})
    yield generate("no elements", "identity_fp32", {"INPUT0": []})
    yield generate("a text", "one_bytes", {"INPUT0": "zwölf"})
    yield generate("an id", "one_bytes", {"INPUT0": "a", "id": "7"})
    yield generate("an id that is empty", "one_bytes", {"INPUT0": "a", "id": ""})
    yield generate("a variable dimension takes the rest", "columns", {"INPUT0": [1, 2, 3, 4, 5, 6]})
    yield generate("an array that fits no shape", "columns", {"INPUT0": [1, 2, 3, 4]})
    yield generate("several inputs, fixed shapes", "plain", {"a": [1, 2, 3, 4], "b": True})
    yield generate("parameters at the top and in parameters", "said", {"INPUT0": 1, "x": "y", "parameters": {"z": 7}})
    yield generate("a nested array", "fixed", {"INPUT0": [[1, 2], [3, 4]]})
    yield generate("a missing input", "identity_fp32", {})
    yield generate("another type", "identity_int32", {"INPUT0": "x"})
    yield generate("an object as a parameter", "said", {"INPUT0": 1, "x": {"y": 1}})
    yield generate("a list as a parameter", "said", {"INPUT0": 1, "x": [1]})
    yield generate("parameters is a list", "said", {"INPUT0": 1, "parameters": [1]})
    yield generate("an input twice", "said", b'{"INPUT0": 1, "INPUT0": 2}')
    yield generate("not JSON", "said", b"{")
    yield generate("the model refuses", "failing", {"INPUT0": 1})
    yield generate("an unknown model", "nobody", {"INPUT0": 1})
    yield generate("a scalar", "identity_fp32", {"INPUT0": 1.5}, "_stream")
    yield generate("a text", "one_bytes", {"INPUT0": "zwölf", "id": "7"}, "_stream")
    yield generate("the model refuses", "failing", {"INPUT0": 1}, "_stream")
    yield generate("a missing input", "identity_fp32", {}, "_stream")
    yield generate("an unknown model", "nobody", {"INPUT0": 1}, "_stream")


def _classification() -> Iterator[Case]:
    scores = struct.pack("<4f", 0.25, 4, 0.5, 2)
    asked: Sequence[tuple[str, dict[str, Any]]] = [
        ("1", {"classification": 1}), ("2, binary", {"classification": 2, "binary_data": True}), ("0", {"classification": 0}),
        ("more than there are", {"classification": 9}), ("a string", {"classification": "2"}), ("negative", {"classification": -1}),
    ]  # fmt: skip
    for name, parameters in asked:
        yield infer(
            f"classification: {name}", "labelled", one("FP32", [4], scores), outputs=[output("OUTPUT0", **parameters)]
        )
    yield infer(
        "classification without labels",
        "identity_fp32",
        one("FP32", [4], scores),
        outputs=[output("OUTPUT0", classification=2)],
    )
    yield infer(
        "classification of equal values",
        "labelled",
        one("FP32", [4], [1.0] * 4),
        outputs=[output("OUTPUT0", classification=3)],
    )
    yield infer(
        "classification of integers",
        "identity_int32",
        one("INT32", [3], [3, 9, 5]),
        outputs=[output("OUTPUT0", classification=2)],
    )
    yield infer(
        "classification of a batch",
        "batching",
        one("FP32", [2, 2], [1.0, 2.0, 4.0, 3.0]),
        outputs=[output("OUTPUT0", classification=1)],
    )


def _fatal() -> Iterator[Case]:
    nested = b"[" * 50_000 + b"1" + b"]" * 50_000
    yield text(
        "data nested 50,000 deep",
        "identity_fp32",
        b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":' + nested + b"}]}",
    )
    yield infer("a shape of 2**40 with one value", "identity_fp32", one("FP32", [2**40], [1.0]))
    yield infer(
        "classification of BYTES", "identity_bytes", one("BYTES", [1], ["a"]), outputs=[output("OUTPUT0", classification=1)]
    )


_ALL = (_datatypes, _bodies, _values, _members, _http, _generate, _classification)
CASES: Mapping[str, Case] = {c.name: c for make in _ALL for c in make()}

FATAL: Mapping[str, Case] = {c.name: c for c in _fatal()}
"""Requests that end Triton's process: only we are asked."""
