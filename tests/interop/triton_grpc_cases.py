"""Calls of gRPC that Triton and we are asked alike, and what of an answer must be equal."""

from __future__ import annotations

import gzip
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h2.errors
import numpy as np

from protocols.grpc import v2_tables as tables
from protocols.grpc.protobuf import MessageType, encode_field, encode_varint
from protocols.grpc.status import StatusCode
from tests.interop.grpc_frames import HEALTH, SERVICE, Frames, prefixed
from tests.interop.grpc_frames import Answer as Received
from tests.interop.served_v2 import DATATYPES, DECLARED
from tests.interop.triton_cases import DTYPES, FP32, SAMPLES, WORDS, Answer, packed
from tests.protocols.grpc.messages import REQUEST, RESPONSE, STREAM_RESPONSE, split

INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
NOTHING = MessageType("Nothing", {})
"""The type of answers whose messages are only counted."""
_LATER = 10.0
"""Seconds that what comes later may take."""
_COUNTED = "model_stats.batch_stats.batch_size"
"""A member of the statistics of a model that was called."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call. `body` is what its stream carries,
    and `turns` what follows: each piece when the ones before it are answered, by a
    message each. `reads` says what the messages of its answer are. `only` are the members that are compared, `members` says
    that their names are and not their values, and `later` one that a server may have a moment after the call that it tells of:
    the case is asked again until it is there; `exact` compares also what the answer's head says. `take` ends a call after so
    many messages; `pings` come before it, and so does the call `first`, for what is told only of a model that was called:
    Triton's process may just have been started again."""

    name: str
    path: str = INFER
    body: bytes | None = None
    turns: Sequence[bytes] = ()
    fields: Mapping[str, str | None] = field(default_factory=dict)
    reads: MessageType = RESPONSE
    only: Sequence[str] = ()
    members: bool = False
    later: str = ""
    exact: bool = False
    take: int = 0
    pings: int = 0
    first: Case | None = None


def ask(at: str, case: Case) -> Answer:
    """Makes a call to the server at `at`, on a connection of its own, and takes the answer apart."""
    if case.first is not None:
        _asked(at, case.first)
    until = time.monotonic() + _LATER
    while True:
        answer = _asked(at, case)
        told = answer.get("message", {}).get("members", ())
        if not case.later or case.later in told or time.monotonic() > until:
            return answer
        time.sleep(0.05)  # nobody tells when statistics change


def _asked(at: str, case: Case) -> Answer:
    host, _, port = at.partition(":")
    with Frames(host, int(port), lenient=True) as frames:
        try:
            frames.ping(case.pings)
            stream = frames.open(case.path, case.body, case.fields, end=not case.turns)
            for number, turn in enumerate(case.turns, 1):
                frames.message_or_end(stream, number - 1)
                if not frames.answers[stream].over:
                    frames.send(stream, turn, end=number == len(case.turns))
            if case.take:
                frames.message_or_end(stream, case.take - 1)
                if not frames.answers[stream].over:
                    frames.reset(stream)
                    received = frames.answers[stream]
                    return {"status": "under way"} | _messages(case, received)
            received = frames.answer(stream)
        except (AssertionError, OSError):
            return {"status": "closed", "goodbye": [h2.errors.ErrorCodes(error).name for error, _ in frames.going]}
        answer: dict[str, Any] = {"status": _status(received)}
        if not answer["status"][0].isdigit():
            return answer | {"connection": _goes_on(frames)}
        if answer["status"] != "0 OK":
            # `alone`: clients retry (gRFC A6) only after an error in one head.
            answer["error"] = "in one head" if received.alone else "behind messages"
            answer["said"] = (received.head if received.alone else received.trailers).get("grpc-message", "")
            if not answer["said"]:
                answer["error"] += ", without a text"
        if case.exact:
            names = ("content-type", "grpc-encoding", "grpc-accept-encoding", "content-length")
            answer |= {name: (received.head.get(name) or "absent").replace(" ", "") for name in names}
        return answer | _messages(case, received) | {"connection": _goes_on(frames)}


def _status(received: Received) -> str:
    said = received.head if received.alone else received.trailers
    if "grpc-status" in said:
        code = int(said["grpc-status"])
        return f"{code} {StatusCode(code).name}"
    if received.reset is not None:
        return f"reset {h2.errors.ErrorCodes(received.reset).name}"
    return f"HTTP {received.head.get(':status')}"


def _goes_on(frames: Frames) -> str:
    try:
        return "goes on" if _status(frames.call(f"{SERVICE}/ServerLive", prefixed(b""))) == "0 OK" else "refuses"
    except (AssertionError, OSError):
        return "ends"


def _messages(case: Case, received: Received) -> dict[str, Any]:
    messages = received.messages
    if case.reads is NOTHING:
        return {"messages": len(messages)}
    told = [_told(case, case.reads.read(message)) for message in messages]
    if case.reads is STREAM_RESPONSE:
        return {f"message {number}": message for number, message in enumerate(told)}
    assert len(told) <= 1, f"{case.name}: {len(told)} messages"
    return {"message": told[0]} if told else {}


def _told(case: Case, message: Mapping[str, Any]) -> dict[str, Any]:
    if case.reads is RESPONSE:
        return _inferred(message)
    if case.reads is STREAM_RESPONSE:
        return {"error_message": bool(message["error_message"])} | _inferred(
            message.get("infer_response", RESPONSE.read(b""))
        )
    if case.members:
        return {"members": sorted(set(_members_of(message)))}
    if case.reads is tables.MODEL_STATISTICS[1]:
        return {"models": sorted(model["name"] for model in message["model_stats"] if model["name"] in DECLARED)}
    if case.only:
        message = {name: message.get(name) for name in case.only}
    if case.reads is tables.REPOSITORY_INDEX[1]:
        return {model["name"]: model for model in message["models"] if model["name"] in DECLARED}
    return dict(message)


def _members_of(value: Any, at: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            if isinstance(one, str):
                yield one
            yield from _members_of(one, at)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield f"{at}{name}"
            yield from _members_of(one, f"{at}{name}.")


def _inferred(message: Mapping[str, Any]) -> dict[str, Any]:
    """A ModelInferResponse: the data of each output at its place, whichever form that has."""
    told = {name: message[name] for name in ("model_name", "model_version", "id", "parameters")}
    raw = message["raw_output_contents"]
    told["outputs"] = [output["name"] for output in message["outputs"]]
    for number, output in enumerate(message["outputs"]):
        datatype = output["datatype"]
        told[output["name"]] = entry = {"datatype": datatype, "shape": output["shape"], "form": "raw"}
        if number < len(raw):
            data = raw[number]
            entry["bytes"] = data.decode("latin-1") if datatype == "BYTES" else data.hex() if len(data) < 1000 else len(data)
        else:
            entry["form"] = "no data" if "contents" not in output else "contents"
        if output["parameters"]:
            entry["parameters"] = output["parameters"]
    if len(raw) > len(message["outputs"]):
        told["raw contents"] = len(raw)
    return told


# ---- the calls

NUMBERS_IN: Mapping[str, str] = {
    "BOOL": "bool_contents", "INT64": "int64_contents", "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip
"""The field of typed contents for each datatype that has one of its own but BYTES."""


def tensor(name: str, datatype: str, shape: Sequence[int], **more: Any) -> dict[str, Any]:
    """An input; `contents` and `parameters` as the table of messages has them."""
    return {"name": name, "datatype": datatype, "shape": list(shape), **more}


def one(datatype: str, shape: Sequence[int], **more: Any) -> list[dict[str, Any]]:
    return [tensor("INPUT0", datatype, shape, **more)]


def request(model: str, inputs: Sequence[Mapping[str, Any]], raw: Sequence[bytes] = (), **more: Any) -> bytes:
    """A ModelInferRequest."""
    return REQUEST.write({"model_name": model, "inputs": inputs, "raw_input_contents": raw, **more})


def infer(
    name: str,
    model: str,
    inputs: Sequence[Mapping[str, Any]],
    raw: Sequence[bytes] = (),
    *,
    exact: bool = False,
    **more: Any,
) -> Case:
    return Case(name=name, body=prefixed(request(model, inputs, raw, **more)), exact=exact)


def stream(name: str, *requests: bytes, **fields: str) -> Case:
    """A stream that carries these requests, each when the one before it is answered, and has its end behind them."""
    first, *others = map(prefixed, requests)
    return Case(name=f"stream: {name}", path=STREAM, body=first, turns=others, reads=STREAM_RESPONSE, fields=fields)


def at_once(name: str, *requests: bytes) -> Case:
    """A stream that carries these requests at once."""
    return Case(name=f"stream: {name}", path=STREAM, body=b"".join(map(prefixed, requests)), reads=STREAM_RESPONSE)


def control(name: str, method: str, values: Mapping[str, Any] | None = None, **more: Any) -> Case:
    """A call of another method."""
    path = method if method.startswith("/") else f"{SERVICE}/{method}"
    asked, told = tables.METHODS[path]
    return Case(name=name, path=path, body=prefixed(asked.write(values or {})), reads=told, **more)


def output(name: str, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


def integer(value: int) -> dict[str, int]:
    return {"int64_param": value}


GOOD = request("identity_fp32", one("FP32", [4]), [FP32])
ASKED = prefixed(GOOD)
MIXED = [tensor("a", "FP16", [2, 2]), tensor("b", "UINT32", [2, 2]), tensor("c", "BOOL", [3])]
MIXED_RAW = [
    np.array([1.1, 2.22, 3.345, 4.34343], np.float16).tobytes(), np.array([1, 2, 3, 4], np.uint32).tobytes(), b"\1\0\1"
]  # fmt: skip


def _datatypes() -> Iterator[Case]:
    for datatype in DATATYPES:
        model = f"identity_{datatype.lower()}"
        if datatype == "BYTES":
            words = [word.encode() for word in WORDS]
            raw, contents = packed(*words), {"bytes_contents": words}
        else:
            values = SAMPLES[datatype]
            raw = np.array(values, DTYPES[datatype]).tobytes()
            contents = {NUMBERS_IN.get(datatype, "fp32_contents"): list(values)}
        yield infer(f"{datatype} raw", model, one(datatype, [3]), [raw])
        yield infer(f"{datatype} typed", model, one(datatype, [3], contents=contents))
        yield infer(f"{datatype} of no elements, raw", model, one(datatype, [0]), [b""])
        yield infer(f"{datatype} of no elements, typed", model, one(datatype, [0], contents={}))
        yield infer(f"{datatype} of no elements, without data", model, one(datatype, [0]))
        yield infer(f"{datatype} raw, one byte less", model, one(datatype, [3]), [raw[:-1]])
        yield infer(f"{datatype} raw, one byte more", model, one(datatype, [3]), [raw + b"\0"])
        yield stream(f"{datatype} raw", request(model, one(datatype, [3]), [raw], id="1"))
    for datatype, value in [("INT8", 300), ("INT16", 70_000), ("INT8", -129)]:
        contents = {"int_contents": [value]}
        yield infer(f"{datatype} is given {value}", f"identity_{datatype.lower()}", one(datatype, [1], contents=contents))
    for datatype, value in [("UINT8", 300), ("UINT16", 70_000)]:
        contents = {"uint_contents": [value]}
        yield infer(f"{datatype} is given {value}", f"identity_{datatype.lower()}", one(datatype, [1], contents=contents))
    yield infer("BYTES that are not UTF-8, raw", "identity_bytes", one("BYTES", [1]), [packed(b"\xff\0\xfe")])
    yield infer(
        "BYTES that are not UTF-8, typed", "identity_bytes", one("BYTES", [1], contents={"bytes_contents": [b"\xff\0\xfe"]})
    )
    for name, body, count in [
        ("a prefix is cut", packed(b"a") + b"\1\0", 2), ("a length is past the end", b"\5\0\0\0ab", 1),
        ("more elements than the shape", packed(b"a", b"b"), 1), ("fewer elements than the shape", packed(b"a"), 2),
        ("spare bytes", packed(b"a") + b"x", 1), ("no elements", b"", 1),
    ]:  # fmt: skip
        yield infer(f"BYTES raw: {name}", "identity_bytes", one("BYTES", [count]), [body])
    for name, count in [("more", 1), ("fewer", 3)]:
        contents = {"bytes_contents": [b"a", b"b"]}
        yield infer(
            f"BYTES typed: {name} elements than the shape", "identity_bytes", one("BYTES", [count], contents=contents)
        )
    yield infer("BOOL bytes 2 and 255", "identity_bool", one("BOOL", [2]), [b"\2\xff"])


def _tensors() -> Iterator[Case]:
    fp32 = "identity_fp32"
    typed = {"fp32_contents": [1.0, 2.0, 3.0, 4.0]}
    yield infer("fewer raw contents than inputs", "mixed", MIXED, MIXED_RAW[:2])
    yield infer("more raw contents than inputs", fp32, one("FP32", [4]), [FP32, FP32])
    yield infer("neither raw nor typed", fp32, one("FP32", [4]))
    yield infer("raw and typed for one input", fp32, one("FP32", [4], contents=typed), [FP32])
    yield infer(
        "raw and typed for different inputs", "plain",
        [tensor("a", "INT32", [2, 2], contents={"int_contents": [1, 2, 3, 4]}), tensor("b", "BOOL", [1])], [b"\1"],
    )  # fmt: skip
    yield infer("raw, and empty contents", fp32, one("FP32", [4], contents={}), [FP32])
    yield infer("typed in several inputs", "plain", [
        tensor("a", "INT32", [2, 2], contents={"int_contents": [1, 2, 3, 4]}),
        tensor("b", "BOOL", [1], contents={"bool_contents": [True]})
    ])  # fmt: skip
    yield infer("contents of another type", fp32, one("FP32", [4], contents={"int_contents": [1, 2, 3, 4]}))
    yield infer("contents of a wider type", fp32, one("FP32", [4], contents={"fp64_contents": [1.0, 2.0, 3.0, 4.0]}))
    yield infer("contents of two types", fp32, one("FP32", [4], contents={**typed, "int_contents": [1]}))
    yield infer("contents that are too few", fp32, one("FP32", [4], contents={"fp32_contents": [1.0]}))
    yield infer("contents that are too many", fp32, one("FP32", [2], contents=typed))
    yield infer("contents that are empty", fp32, one("FP32", [4], contents={}))
    for name, shape in [
        ("a dimension of -1", [-1]), ("a dimension of -4", [-4]), ("rank 0", []), ("another rank than the model's", [2, 2]),
    ]:  # fmt: skip
        yield infer(f"shape: {name}", fp32, one("FP32", shape), [FP32])
    yield infer("shape: another size than the model's", "fixed", one("FP32", [4, 1]), [FP32])
    yield infer("shape: a dimension of 0 beside others", "open", one("FP32", [0, 3]), [b""])
    for name, datatype in [
        ("in lower case", "fp32"),
        ("unknown", "FP8"),
        ("empty", ""),
        ("another than the model's", "INT32"),
    ]:
        yield infer(f"datatype: {name}", fp32, one(datatype, [4]), [FP32])
    yield infer("inputs in another order", "mixed", MIXED[::-1], MIXED_RAW[::-1])
    yield infer("an input twice", "mixed", [*MIXED, MIXED[0]], [*MIXED_RAW, MIXED_RAW[0]])
    yield infer("a missing input", "mixed", MIXED[:2], MIXED_RAW[:2])
    yield infer("an unknown input", "mixed", [*MIXED, tensor("d", "FP32", [1])], [*MIXED_RAW, FP32[:4]])
    yield infer(
        "an unknown input in place of one", "mixed", [*MIXED[:2], tensor("d", "FP32", [1])], [*MIXED_RAW[:2], FP32[:4]]
    )
    yield infer("an input without a name", fp32, [tensor("", "FP32", [4])], [FP32])
    yield infer("no inputs", "mixed", [])
    yield infer("a batch", "batching", one("FP32", [2, 2]), [FP32])
    yield infer("a batch above the model's", "batching", one("FP32", [5, 2]), [bytes(40)])
    yield infer("a batch that is missing", "batching", one("FP32", [2]), [FP32[:8]])
    yield infer("a message above 4 MiB", fp32, one("FP32", [1_200_000]), [bytes(4_800_000)])
    yield infer("a message above the limit here", fp32, one("FP32", [4_200_000]), [bytes(16_800_000)])
    # outputs
    yield infer("all outputs", "mixed", MIXED, MIXED_RAW)
    yield infer("outputs that are listed", "mixed", MIXED, MIXED_RAW, outputs=[output("A"), output("B")])
    yield infer("outputs in another order", "mixed", MIXED, MIXED_RAW, outputs=[output("C"), output("B")])
    yield infer("an output twice", "mixed", MIXED, MIXED_RAW, outputs=[output("B"), output("B")])
    yield infer("an unknown output", "mixed", MIXED, MIXED_RAW, outputs=[output("B"), output("D")])
    yield infer("an output without a name", "mixed", MIXED, MIXED_RAW, outputs=[output("")])
    scores = struct.pack("<4f", 0.25, 4, 0.5, 2)
    asked: Sequence[tuple[str, Mapping[str, Any]]] = [
        ("1", integer(1)), ("2", integer(2)), ("0", integer(0)), ("more than there are", integer(9)),
        ("negative", integer(-1)),
        ("a string", {"string_param": "2"}), ("a double", {"double_param": 2.0}), ("uint64", {"uint64_param": 2}),
        ("without a value", {}),
    ]  # fmt: skip
    for name, value in asked:
        wanted = [output("OUTPUT0", classification=value)]
        yield infer(f"classification: {name}", "labelled", one("FP32", [4]), [scores], outputs=wanted)
    wanted = [output("OUTPUT0", classification=integer(2))]
    yield infer("classification without labels", fp32, one("FP32", [4]), [scores], outputs=wanted)
    yield infer("classification of equal values", "labelled", one("FP32", [4]), [FP32[:4] * 4], outputs=wanted)
    yield infer(
        "classification of integers", "identity_int32", one("INT32", [3]), [struct.pack("<3i", 3, 9, 5)], outputs=wanted
    )
    yield infer(
        "classification of a batch", "batching", one("FP32", [2, 2]), [struct.pack("<4f", 1, 2, 4, 3)], outputs=wanted
    )


def _members() -> Iterator[Case]:
    good, fp32 = one("FP32", [1], contents={"fp32_contents": [1.0]}), "identity_fp32"
    yield infer("an id", fp32, good, id="a b ü")
    yield infer("an id that is long", fp32, good, id="x" * 10_000)
    yield infer("a version", fp32, good, model_version="1")
    yield infer("an unknown version", fp32, good, model_version="9")
    yield infer("a version that is no number", fp32, good, model_version="one")
    yield infer("a version below 0", fp32, good, model_version="-1")
    yield infer("an unknown model", "nobody", good)
    yield infer("no model", "", good)
    on = {"bool_param": True}
    parameters: Sequence[tuple[str, Mapping[str, Any]]] = [
        ("of each type", {"a": {"string_param": "x"}, "b": integer(7), "c": on, "e": {"double_param": 0.5}}),
        ("uint64", {"a": {"uint64_param": 7}}),
        ("a double", {"a": {"double_param": 1.0}}),
        ("without a value", {"a": {}}),
        ("a reserved one", {"triton_x": integer(1)}),
        ("triton_enable_empty_final_response", {"triton_enable_empty_final_response": {"bool_param": True}}),
        ("triton_enable_empty_final_response of another type", {"triton_enable_empty_final_response": integer(1)}),
        ("of a sequence", {"sequence_id": integer(7), "sequence_start": on, "sequence_end": on}),
        ("a sequence_id of text", {"sequence_id": {"string_param": "seven"}}),
        ("a sequence_id of bool", {"sequence_id": {"bool_param": True}}),
        ("a sequence_start of int64", {"sequence_start": integer(1)}),
        ("priority and timeout", {"priority": integer(1), "timeout": integer(5_000_000)}),
        ("priority and timeout of uint64", {"priority": {"uint64_param": 1}, "timeout": {"uint64_param": 5_000_000}}),
        ("a timeout of text", {"timeout": {"string_param": "soon"}}),
        ("a timeout of double", {"timeout": {"double_param": 1.5}}),
        ("a priority of bool", {"priority": {"bool_param": True}}),
        ("a negative priority", {"priority": integer(-1)}),
        ("of HTTP's bodies", {"binary_data_output": {"bool_param": True}}),
    ]  # fmt: skip
    for name, values in parameters:
        yield infer(f"parameters: {name}", "said", good, parameters=values)
    sizes: Sequence[tuple[str, Mapping[str, Any]]] = [
        ("its own", {"mine": integer(1)}), ("without a value", {"mine": {}}),
        ("binary_data_size", {"binary_data_size": integer(3)}),
        ("shared_memory_region", {"shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": integer(4)}),
    ]  # fmt: skip
    for name, values in sizes:
        yield infer(f"parameters of an input: {name}", fp32, one("FP32", [1], parameters=values), [FP32[:4]])
        yield infer(f"parameters of an output: {name}", fp32, good, outputs=[output("OUTPUT0", **values)])
    yield infer(
        "shared memory for an input, which has no data", fp32,
        one("FP32", [1], parameters={"shared_memory_region": {"string_param": "r"}, "shared_memory_byte_size": integer(4)}),
    )  # fmt: skip
    yield infer("the model refuses", "failing", good)
    yield Case(name="a decoupled model", body=prefixed(number("counting", 2)))
    yield infer("the head of an answer", fp32, good, exact=True)
    yield infer("the head of an error", "nobody", good, exact=True)


def _wire() -> Iterator[Case]:
    def call(name: str, body: bytes | None = ASKED, path: str = INFER, **fields: str | None) -> Case:
        head = {f":{n[1:]}" if n.startswith("_") else n.replace("_", "-"): value for n, value in fields.items()}
        return Case(name=name, path=path, body=body, fields=head)

    for name, path in [
        ("method", f"{SERVICE}/Nothing"), ("service", "/inference.Other/ModelInfer"), ("path", "/nothing"),
        ("method, with a slash", f"{INFER}/"),
    ]:  # fmt: skip
        yield call(f"an unknown {name}", path=path)
    for kind in (
        "application/grpc+proto",
        "application/grpc;charset=utf-8",
        "application/grpc-web",
        "application/grpcx",
        "application/json",
    ):
        yield call(f"content-type: {kind}", content_type=kind)
    yield call("content-type is missing", content_type=None)
    yield call("te is missing", te=None)
    yield call("te: gzip", te="gzip")
    for method in ("GET", "PUT"):
        yield call(f"by {method}", _method=method)
    # messages
    yield call("no message", None)
    yield call("a cut prefix", ASKED[:3])
    yield call("a prefix alone", ASKED[:5])
    yield call("a cut message", ASKED[:-1])
    yield call("two messages", ASKED + ASKED)
    yield call("a message and a byte", ASKED + b"\0")
    yield call("flag 1 without an encoding", prefixed(GOOD, 1))
    yield call("flag 1 with identity", prefixed(GOOD, 1), grpc_encoding="identity")
    for encoding, squeeze in (("gzip", lambda data: gzip.compress(data, mtime=0)), ("deflate", zlib.compress)):
        yield call(f"{encoding}", prefixed(squeeze(GOOD), 1), grpc_encoding=encoding)
        yield call(f"{encoding}, a message as it is", ASKED, grpc_encoding=encoding)
        yield call(f"{encoding}, damaged", prefixed(b"damaged", 1), grpc_encoding=encoding)
        yield call(f"{encoding}, cut", prefixed(squeeze(GOOD)[:-3], 1), grpc_encoding=encoding)
        yield call(f"{encoding}, and more behind it", prefixed(squeeze(GOOD) + b"more", 1), grpc_encoding=encoding)
    yield call("deflate without zlib's head", prefixed(zlib.compress(GOOD)[2:-4], 1), grpc_encoding="deflate")
    yield call("encoding: snappy", prefixed(GOOD, 1), grpc_encoding="snappy")
    yield call("encoding: snappy, a message as it is", ASKED, grpc_encoding="snappy")
    yield call("encoding: GZIP", prefixed(gzip.compress(GOOD, mtime=0), 1), grpc_encoding="GZIP")
    yield call("gzip is accepted", ASKED, grpc_accept_encoding="gzip")
    # time
    for timeout in ("1", "S", "123456789S", "1x", "-1S", "1.5S", "1 S", "0S", "0n", "1S", "99999999H"):
        yield call(f"grpc-timeout: {timeout}", grpc_timeout=timeout)
    yield Case(
        name="grpc-timeout: over while the model works",
        body=prefixed(number("delayed", 500)),
        fields={"grpc-timeout": "100m"},
    )
    # metadata
    yield call("metadata", x_text="one", x_data_bin="AAH/")
    yield call("binary metadata without padding", x_data_bin="AAE")
    yield call("binary metadata that is no base64", x_data_bin="%")
    yield call("the answer is compressed if that is asked for", grpc_internal_encoding_request="gzip")
    # protobuf
    yield call("bytes that are no protobuf", prefixed(b"\xff\xff\xff"))
    yield call("a length past the end", prefixed(GOOD + b"\x0a\x7f"))
    yield call("an empty message", prefixed(b""))
    yield call("text that is not UTF-8", prefixed(encode_field(1, b"\xff")))
    yield call("a key that is not UTF-8", prefixed(GOOD + encode_field(4, encode_field(1, b"\xff"))))
    yield call("fields in another order", prefixed(b"".join(reversed(split(GOOD)))))
    unknown = (
        encode_varint(100 << 3)
        + b"\1"
        + encode_varint(101 << 3 | 1)
        + bytes(8)
        + encode_field(102, b"x")
        + encode_varint(103 << 3 | 5)
        + bytes(4)
    )
    yield call("unknown fields", prefixed(unknown + GOOD + unknown))
    yield call("a field of another wire type", prefixed(GOOD + encode_varint(3 << 3) + b"\1"))
    yield call("an unknown group", prefixed(GOOD + encode_varint(100 << 3 | 3) + encode_varint(100 << 3 | 4)))
    yield call("a group that is not closed", prefixed(GOOD + encode_varint(100 << 3 | 3)))
    yield call("wire type 6", prefixed(GOOD + encode_varint(100 << 3 | 6)))
    yield call("field number 0", prefixed(GOOD + b"\0\0"))
    yield call("a varint of eleven bytes", prefixed(GOOD + encode_varint(100 << 3) + b"\xff" * 10 + b"\1"))
    yield call("a text twice", prefixed(encode_field(1, b"nobody") + GOOD))
    shape = encode_field(5, encode_field(1, b"INPUT0") + encode_field(2, b"FP32") + b"\x18\x02" + encode_field(3, b"\x02"))
    yield call("a shape in pieces", prefixed(encode_field(1, b"open") + shape + encode_field(7, FP32)))
    parts = [encode_field(5, struct.pack("<Bf", 6 << 3 | 5, value)) for value in (1.0, 2.0)]
    pieces = encode_field(5, encode_field(1, b"INPUT0") + encode_field(2, b"FP32") + b"\x18\x02" + b"".join(parts))
    yield call("contents in pieces, not packed", prefixed(encode_field(1, b"identity_fp32") + pieces))
    yield Case(name="pings without a call", body=ASKED, pings=6)


def _control() -> Iterator[Case]:
    live = tables.SERVER_LIVE[1]
    yield control("live", "ServerLive")
    yield Case(
        name="live, asked by fields that it has not", path=f"{SERVICE}/ServerLive", body=prefixed(b"\x08\1"), reads=live
    )
    yield control("ready", "ServerReady")
    for name, values in [
        ("a model", {"name": "fixed"}), ("a version", {"name": "fixed", "version": "1"}),
        ("an unknown model", {"name": "nobody"}),
        ("an unknown version", {"name": "fixed", "version": "9"}),
        ("a version that is no number", {"name": "fixed", "version": "one"}),
        ("no name", {}),
    ]:  # fmt: skip
        yield control(f"ready: {name}", "ModelReady", values)
        yield control(f"metadata: {name}", "ModelMetadata", values)
        yield control(f"config: {name}", "ModelConfig", values)
        called = {"first": infer("a call", "fixed", one("FP32", [2, 2]), [FP32]), "later": _COUNTED}
        told = called if values.get("name") == "fixed" and values.get("version", "1") == "1" else {}
        yield control(f"statistics: {name}", "ModelStatistics", values, members=name != "no name", **told)
    yield control("metadata: several tensors", "ModelMetadata", {"name": "mixed"})
    yield control("metadata: a batching model", "ModelMetadata", {"name": "batching"})
    for name in ("batching", "counting"):
        yield control(f"config of {name}", "ModelConfig", {"name": name})
    yield control("metadata of the server", "ServerMetadata", only=("extensions",), members=True)
    yield control("the index of models", "RepositoryIndex")
    yield control("the index of ready models", "RepositoryIndex", {"ready": True})
    yield control("the index of a repository", "RepositoryIndex", {"repository_name": "other"})
    yield control("load of an unknown model", "RepositoryModelLoad", {"model_name": "nobody"})
    yield control("load of no model", "RepositoryModelLoad")
    yield control("load from a repository", "RepositoryModelLoad", {"repository_name": "other", "model_name": "fixed"})
    yield control("unload of an unknown model", "RepositoryModelUnload", {"model_name": "nobody"})
    yield control("unload from a repository", "RepositoryModelUnload", {"repository_name": "other", "model_name": "nobody"})
    yield control(
        "a load with an unknown parameter",
        "RepositoryModelLoad",
        {"model_name": "fixed", "parameters": {"x": {"string_param": "y"}}},
    )
    for kind in ("System", "Cuda"):
        yield control(f"{kind}: regions", f"{kind}SharedMemoryStatus")
        yield control(f"{kind}: an unknown region", f"{kind}SharedMemoryStatus", {"name": "r"})
        yield control(f"{kind}: register", f"{kind}SharedMemoryRegister", {"name": "r", "byte_size": 4})
        yield control(f"{kind}: unregister", f"{kind}SharedMemoryUnregister")
        yield control(f"{kind}: unregister an unknown region", f"{kind}SharedMemoryUnregister", {"name": "r"})
    yield control("trace settings", "TraceSetting", members=True)
    yield control("log settings", "LogSettings", members=True)
    yield control("log settings: an unknown one", "LogSettings", {"settings": {"x": {"bool_param": True}}}, members=True)
    yield control(
        "log settings: another type", "LogSettings", {"settings": {"log_verbose_level": {"string_param": "x"}}}, members=True
    )
    check, watch = f"{HEALTH}/Check", f"{HEALTH}/Watch"
    yield control("health", check)
    yield control("health of the service", check, {"service": "inference.GRPCInferenceService"})
    yield control("health of another service", check, {"service": "other.Service"})
    yield control("health, watched", watch, take=1)
    yield Case(name="reflection", path=REFLECTION, body=prefixed(encode_field(7, b"*")), reads=NOTHING)
    for method in ("ServerLive", "ModelReady", "ModelMetadata", "RepositoryIndex"):
        path = f"{SERVICE}/{method}"
        yield Case(name=f"{method} without a message", path=path, reads=tables.METHODS[path][1])
        yield Case(
            name=f"{method} of bytes that are no protobuf",
            path=path,
            body=prefixed(b"\xff\xff"),
            reads=tables.METHODS[path][1],
        )
        yield Case(name=f"{method} with two messages", path=path, body=prefixed(b"") * 2, reads=tables.METHODS[path][1])
    # from here on the server is not ready
    yield control("unload of a model", "RepositoryModelUnload", {"model_name": "plain"})
    yield control("ready: a model that is unloaded", "ModelReady", {"name": "plain"})
    yield control("metadata: a model that is unloaded", "ModelMetadata", {"name": "plain"})
    yield infer("a model that is unloaded", "plain", [])


def plain(id: str = "", model: str = "identity_fp32", **more: Any) -> bytes:
    """A request of one FP32."""
    return request(model, one("FP32", [1]), [FP32[:4]], id=id, **more)


def number(model: str, value: int, id: str = "", **more: Any) -> bytes:
    """A request of one INT32."""
    return request(model, one("INT32", [1]), [struct.pack("<i", value)], id=id, **more)


def _streams() -> Iterator[Case]:
    final = {"triton_enable_empty_final_response": {"bool_param": True}}
    off = {"triton_enable_empty_final_response": {"bool_param": False}}
    bad = request("identity_fp32", one("FP32", [2]), [FP32], id="bad")
    yield Case(name="stream: no request", path=STREAM, body=b"", reads=STREAM_RESPONSE)
    yield Case(name="stream: no request, by the head alone", path=STREAM, reads=STREAM_RESPONSE)
    yield stream("one request", plain("1"))
    yield stream("a request without an id", plain())
    yield stream("typed", request("identity_fp32", one("FP32", [1], contents={"fp32_contents": [1.0]}), id="1"))
    yield at_once("several requests", *(plain(str(n)) for n in range(5)))
    yield at_once("several with one id", *(plain("same") for n in range(2)))
    yield at_once("a slow one first", number("delayed", 300, "slow"), plain("fast"))
    yield stream("outputs in another order", request("mixed", MIXED, MIXED_RAW, outputs=[output("C"), output("A")], id="1"))
    yield stream("a version", plain("1", model_version="1"))
    yield stream("an empty final response of a model that is not decoupled", plain("1", parameters=final))
    yield stream("parameters", plain("1", "said", parameters={"a": integer(7)}))
    # decoupled
    for many in (0, 1, 3):
        yield stream(f"{many} responses", number("counting", many, "n"))
        yield stream(f"{many} responses and an empty one", number("counting", many, "n", parameters=final))
    yield stream("responses without an empty one, as asked", number("counting", 2, "n", parameters=off))
    yield stream("responses without an id", number("counting", 2, parameters=final))
    yield stream("responses and then an error", number("counting", -2, "n"))
    yield stream("responses and then an error, with an empty one", number("counting", -2, "n", parameters=final))
    # errors
    yield stream("an unknown model", plain("1", model="nobody"))
    yield stream("an unknown model, and then a request", plain("1", model="nobody"), plain("2"))
    yield stream("an unknown model, without an id", plain(model="nobody"))
    yield stream("an unknown version", plain("1", model_version="9"), plain("2"))
    yield stream("a version that is no number", plain("1", model_version="one"), plain("2"))
    yield stream("a wrong tensor, and then a request", bad, plain("2"))
    yield stream("a wrong tensor of a decoupled model", request("counting", one("INT32", [2]), [bytes(8)], id="1"))
    yield stream("a missing input", request("mixed", MIXED[:1], MIXED_RAW[:1], id="1"), plain("2"))
    yield stream("an unknown output", plain("1", outputs=[output("B")]), plain("2"))
    yield stream("a reserved parameter", plain("1", parameters={"triton_x": integer(1)}), plain("2"))
    yield stream("fewer raw contents than inputs", request("mixed", MIXED, MIXED_RAW[:1], id="1"), plain("2"))
    yield stream("an empty message", b"", plain("2"))
    yield stream("the model refuses", plain("1", model="failing"), plain("2"))
    yield at_once("an error behind a slow one", number("delayed", 300, "slow"), plain("1", model="failing"))
    for name, requests in [
        ("the model refuses", (plain("1", model="failing"),)), ("an unknown model", (plain("1", model="nobody"),)),
        ("a wrong tensor", (bad,)),
        ("nothing wrong", (plain("1"),)),
        ("the second one", (plain("1"), plain("2", model="failing"))),
    ]:  # fmt: skip
        yield stream(f"errors as statuses: {name}", *requests, triton_grpc_error="true")
    yield stream("errors as messages", plain("1", model="failing"), plain("2"), triton_grpc_error="false")

    # the wire
    def body(name: str, sent: bytes, **fields: str) -> Case:
        head = {name.replace("_", "-"): value for name, value in fields.items()}
        return Case(name=f"stream: {name}", path=STREAM, body=sent, reads=STREAM_RESPONSE, fields=head)

    yield body("bytes that are no protobuf", prefixed(b"\xff\xff"))
    yield stream("bytes that are no protobuf behind a request", plain("1"), b"\xff\xff")
    yield body("a cut message", ASKED[:-1])
    yield body("a cut prefix", ASKED[:3])
    yield body("flag 1 without an encoding", prefixed(plain("1"), 1))
    yield body("gzip", prefixed(gzip.compress(plain("1"), mtime=0), 1), grpc_encoding="gzip")
    yield body("gzip, damaged", prefixed(b"damaged", 1), grpc_encoding="gzip")
    yield body("encoding: snappy", prefixed(plain("1")), grpc_encoding="snappy")
    yield body("grpc-timeout: 0S", prefixed(plain("1")), grpc_timeout="0S")
    yield body("grpc-timeout: 1x", prefixed(plain("1")), grpc_timeout="1x")
    yield body("grpc-timeout: over while a model works", prefixed(number("delayed", 500, "1")), grpc_timeout="100m")


def _loads() -> Iterator[Case]:
    """Cases that come long after the unload: Triton reports its end too early, and a load meanwhile may end its process."""
    yield control(
        "statistics: a decoupled model",
        "ModelStatistics",
        {"name": "counting"},
        members=True,
        first=stream("a call", number("counting", 1, "1")),
        later=_COUNTED,
    )
    yield control("load of a model", "RepositoryModelLoad", {"model_name": "plain"})
    yield control("ready: a model that is loaded", "ModelReady", {"name": "plain"})


def _alone() -> Iterator[Case]:
    yield Case(name="grpc-timeout: 1n", body=ASKED, fields={"grpc-timeout": "1n"})
    yield stream(
        "errors as statuses: a model that fails after responses", number("counting", -2, "n"), triton_grpc_error="true"
    )
    for flag in (2, 255):
        yield Case(name=f"flag {flag}", body=prefixed(GOOD, flag))
        yield Case(name=f"stream: flag {flag}", path=STREAM, body=prefixed(plain("1"), flag), reads=STREAM_RESPONSE)
    yield infer("a shape of -2 by -2", "open", one("FP32", [-2, -2]), [FP32])
    yield infer("a shape whose product wraps to 16 bytes", "open", one("FP32", [2**2, 2**62 + 1]), [FP32])
    yield infer("a shape of 2**62 by 4 without data", "open", one("FP32", [2**62, 4]), [b""])
    yield infer("a shape of 2**32 by 2**31 without data", "open", one("FP32", [2**32, 2**31]), [b""])
    yield infer("a shape of 2**62 by 4 without data, typed", "open", one("FP32", [2**62, 4], contents={}))
    yield at_once("decoupled ones side by side", *(number("counting", 4, f"n{n}") for n in range(3)))
    yield at_once("models of both kinds", number("counting", 3, "n"), plain("a"), plain("b"))
    yield at_once("a decoupled one behind a slow one", number("delayed", 300, "slow"), number("counting", 2, "n"))
    yield infer(
        "classification of BYTES", "identity_bytes", one("BYTES", [1]), [packed(b"a")],
        outputs=[output("OUTPUT0", classification=integer(1))]
    )  # fmt: skip


_ALL = (_datatypes, _tensors, _members, _wire, _control, _streams, _loads)
CASES: Mapping[str, Case] = {c.name: c for make in _ALL for c in make()}

ALONE: Mapping[str, Case] = {c.name: c for c in _alone()}
"""Calls that are sent to us alone: some end Triton's process, or that of its Python backend,
always or now and then; others it
answers now so, now otherwise."""
