"""The answers to calls of gRPC that differ from Triton 2.51's, and why: data for the test and the table in the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.interop.served_v2 import DATATYPES
from tests.interop.triton_differences import Pair


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A row of the table. `cases` are the calls that show it, by their names in triton_grpc_cases.py, each with what differs; `alone`
    those that are not sent to Triton, with our status; `tests` the functions that show it beside them."""

    asked: str
    triton: str
    here: str
    why: str
    cases: Mapping[str, Pair] = field(default_factory=dict)
    alone: Mapping[str, str] = field(default_factory=dict)
    tests: Sequence[str] = ()


def _all(theirs: str, ours: str, *cases: str) -> dict[str, Pair]:
    return dict.fromkeys(cases, (theirs, ours))


_OK, _RESET = "0 OK", "reset INTERNAL_ERROR"
_INVALID, _NOT_FOUND, _INTERNAL, _UNIMPLEMENTED, _LATE, _EXHAUSTED, _UNKNOWN = (
    f"{code}, in one head"
    for code in (
        "3 INVALID_ARGUMENT", "5 NOT_FOUND", "13 INTERNAL", "12 UNIMPLEMENTED",
        "4 DEADLINE_EXCEEDED", "8 RESOURCE_EXHAUSTED", "2 UNKNOWN"
    )
)  # fmt: skip
_FINAL = "parameters triton_final_response"
_TRUE = "{'bool_param': True}"


def _refused(model: str, version: str = "") -> Pair:
    """The first message of a stream whose request is refused: ours names the model and its version, and is the last one."""
    theirs, ours = (["message 0 model_name "], [f"message 0 model_name {model}"]) if model else ([], [])
    if version:
        theirs, ours = [*theirs, "message 0 model_version "], [*ours, f"message 0 model_version {version}"]
    return "; ".join([*theirs, f"message 0 {_FINAL} absent"]), "; ".join([*ours, f"message 0 {_FINAL} {_TRUE}"])


DIFFERENCES: Sequence[Difference] = (
    # ---- the call
    Difference(
        asked="an unknown method or service",
        triton="12 without a text",
        here="12, naming it",
        why="the caller needs the reason",
        cases=_all(
            "error in one head, without a text",
            "error in one head",
            *(f"an unknown {name}" for name in ("method", "service", "path", "method, with a slash")),
        ),
    ),
    Difference(
        asked="another content type at a method's path, or none",
        triton="a stream reset; without a content type the call is taken",
        here="HTTP 415",
        why="required by PROTOCOL-HTTP2",
        cases={
            **_all(_RESET, "HTTP 415", *(f"content-type: application/{kind}" for kind in ("grpc-web", "grpcx", "json"))),
            "content-type is missing": (_OK, "HTTP 415"),
        },
    ),
    Difference(
        asked="no `te: trailers`",
        triton="2 UNKNOWN",
        here="taken",
        why="nothing depends on it, and some proxies drop it",
        cases={"te is missing": (_UNKNOWN, _OK)},
    ),
    Difference(
        asked="`te` of another value",
        triton="a stream reset, INTERNAL_ERROR",
        here="a stream reset, PROTOCOL_ERROR",
        why="it is malformed HTTP/2 (RFC 9113, 8.2.2)",
        cases={"te: gzip": (_RESET, "reset PROTOCOL_ERROR")},
    ),
    Difference(
        asked="a method other than POST",
        triton="2 UNKNOWN",
        here="12",
        why="there is no such call",
        cases=_all(_UNKNOWN, _UNIMPLEMENTED, "by GET", "by PUT"),
    ),
    Difference(
        asked="a second message of a unary call, or the beginning of one",
        triton="ignored",
        here="12",
        why="a request cardinality violation (statuscodes.md)",
        cases={
            **_all(_OK, _UNIMPLEMENTED, "two messages", "a message and a byte"),
            **_all(
                _OK,
                _UNIMPLEMENTED,
                *(f"{name} with two messages" for name in ("ServerLive", "ModelReady", "RepositoryIndex")),
            ),
            "ModelMetadata with two messages": (_NOT_FOUND, _UNIMPLEMENTED),
        },
    ),
    Difference(
        asked="a message flagged as compressed, without `grpc-encoding` or with `identity`",
        triton="taken as plain",
        here="13",
        why="required by compression.md",
        cases=_all(
            _OK, _INTERNAL, "flag 1 without an encoding", "flag 1 with identity", "stream: flag 1 without an encoding"
        ),
    ),
    Difference(
        asked="a message with a flag above 1",
        triton="13, or read as an empty message; in a stream, its end",
        here="13",
        why="a message that cannot be read must not look like another one",
        alone=dict.fromkeys(("flag 2", "flag 255", "stream: flag 2", "stream: flag 255"), "13 INTERNAL"),
    ),
    Difference(
        asked="an unknown `grpc-encoding`",
        triton="a stream reset",
        here="12, with `grpc-accept-encoding`",
        why="required by compression.md",
        cases=_all(
            _RESET, _UNIMPLEMENTED, "encoding: snappy", "encoding: snappy, a message as it is", "stream: encoding: snappy"
        ),
    ),
    Difference(
        asked="`grpc-encoding: GZIP`",
        triton="a stream reset",
        here="read",
        why="codings have no case (RFC 9110, 8.4.1)",
        cases={"encoding: GZIP": (_RESET, _OK)},
    ),
    Difference(
        asked="an error's head",
        triton="without `grpc-accept-encoding`",
        here="with it",
        why="one head for all answers",
        cases={"the head of an error": ("grpc-accept-encoding absent", "grpc-accept-encoding identity,deflate,gzip")},
    ),
    Difference(
        asked="a message over the limit",
        triton="no limit up to 2 GiB",
        here="8, before the message is read",
        why="memory is not taken for what is refused",
        cases={"a message above the limit here": (_OK, _EXHAUSTED)},
    ),
    Difference(
        asked="a `grpc-timeout` that is malformed",
        triton="a stream reset; nine digits and `1 S` are taken",
        here="13, with what is expected",
        why="a client reads a status, not a reset",
        cases={
            **_all(_RESET, _INTERNAL, *(f"grpc-timeout: {value}" for value in ("1", "S", "1x", "-1S", "1.5S"))),
            **_all(_OK, _INTERNAL, "grpc-timeout: 123456789S", "grpc-timeout: 1 S"),
            "stream: grpc-timeout: 1x": (_RESET, _INTERNAL),
        },
    ),
    Difference(
        asked="a `grpc-timeout` that is over before the head is read",
        triton="4, or the answer",
        here="4, without calling a model",
        why="the client no longer waits",
        alone={"grpc-timeout: 1n": "4 DEADLINE_EXCEEDED"},
    ),
    Difference(
        asked="binary metadata that is not base64",
        triton="a stream reset",
        here="left out",
        why="it cannot be decoded",
        cases={"binary metadata that is no base64": (_RESET, _OK)},
    ),
    Difference(
        asked="an unknown group (wire types 3 and 4)",
        triton="skipped",
        here="13",
        why="proto3 has none",
        cases={"an unknown group": (_OK, _INTERNAL)},
    ),
    Difference(
        asked="PINGs without a call",
        triton="GOAWAY `too_many_pings`",
        here="answered",
        why="only [floods](floods.md) are too many",
        cases={"pings without a call": ("closed", _OK)},
    ),
    # ---- tensors
    Difference(
        asked="more raw contents than inputs",
        triton="ignored",
        here="3",
        why="one of the two is a mistake",
        cases={"more raw contents than inputs": (_OK, _INVALID)},
    ),
    Difference(
        asked="an input of no elements with neither raw nor typed contents",
        triton="3",
        here="taken",
        why="nothing is missing; proto3 writes an empty list as nothing",
        cases=_all(_INVALID, _OK, *(f"{t} of no elements, without data" for t in DATATYPES if t not in ("FP16", "BF16"))),
    ),
    Difference(
        asked="FP16 and BF16 of no elements in typed contents",
        triton="taken",
        here="3",
        why="as with elements: typed contents have no field for them",
        cases=_all(_OK, _INVALID, "FP16 of no elements, typed", "BF16 of no elements, typed"),
    ),
    Difference(
        asked="typed numbers out of the range of INT8, INT16, UINT8, UINT16",
        triton="cut: 300 is 44",
        here="3, naming the element",
        why="another number would be a wrong answer",
        cases=_all(
            _OK,
            _INVALID,
            "INT8 is given 300",
            "INT8 is given -129",
            "INT16 is given 70000",
            "UINT8 is given 300",
            "UINT16 is given 70000",
        ),
    ),
    Difference(
        asked="raw BOOL bytes above 1",
        triton="passed through",
        here="1",
        why="other bytes are not BOOL, and numpy computes with them wrongly",
        cases={"BOOL bytes 2 and 255": ("message OUTPUT0 bytes 02ff", "message OUTPUT0 bytes 0101")},
    ),
    Difference(
        asked="a shape that its data cannot have: 2⁶² by 4 without data, -2 by -2, a product beyond 64 bits",
        triton="the Python backend's process ends, and 13 from then on",
        here="3",
        why="counts are compared before memory is taken",
        alone=dict.fromkeys(
            (
                "a shape of -2 by -2",
                "a shape whose product wraps to 16 bytes",
                "a shape of 2**62 by 4 without data",
                "a shape of 2**62 by 4 without data, typed",
                "a shape of 2**32 by 2**31 without data",
            ),
            "3 INVALID_ARGUMENT",
        ),
    ),
    Difference(
        asked="outputs in another order than the model's",
        triton="the model's order",
        here="the order asked for",
        why="so does KServe; clients go by name",
        cases={
            "outputs in another order": ("message outputs ['B', 'C']", "message outputs ['C', 'B']"),
            "stream: outputs in another order": ("message 0 outputs ['A', 'C']", "message 0 outputs ['C', 'A']"),
        },
    ),
    Difference(
        asked="an output twice",
        triton="once",
        here="3",
        why="so do Triton's later versions",
        cases={"an output twice": (_OK, _INVALID)},
    ),
    Difference(
        asked="`classification` of 0, or as uint64",
        triton="3",
        here="0 means no classes; uint64 is read",
        why="as over HTTP; a number is a number",
        cases=_all(_INVALID, _OK, "classification: 0", "classification: uint64"),
    ),
    Difference(
        asked="classification of BYTES",
        triton="the process ends",
        here="3",
        why="one request must not end a server",
        alone={"classification of BYTES": "3 INVALID_ARGUMENT"},
    ),
    # ---- parameters
    Difference(
        asked="parameters as uint64",
        triton="3",
        here="read",
        why="tritonclient sends `priority` and `timeout` so from 2.73 on",
        cases=_all(_INVALID, _OK, "parameters: uint64", "parameters: priority and timeout of uint64"),
    ),
    Difference(
        asked="`sequence_id`, `sequence_start`, `sequence_end`, `priority`, `timeout`",
        triton="its schedulers use them, and check their types; the model does not see them",
        here="the model sees them, of any type",
        why="a model may use its caller's parameters",
        cases={
            "parameters: of a sequence": (
                "message SAID bytes \x02\0\0\0{}",
                'message SAID bytes @\0\0\0{"sequence_end": true, "sequence_id": 7, "sequence_start": true}',
            ),
            "parameters: a sequence_id of text": (
                "message SAID bytes \x02\0\0\0{}",
                'message SAID bytes \x18\0\0\0{"sequence_id": "seven"}',
            ),
            "parameters: priority and timeout": (
                "message SAID bytes \x02\0\0\0{}",
                'message SAID bytes #\0\0\0{"priority": 1, "timeout": 5000000}',
            ),
            **_all(_INVALID, _OK, "parameters: a sequence_id of bool", "parameters: a sequence_start of int64"),
        },
    ),
    Difference(
        asked="parameters for bodies of HTTP, such as `binary_data_output` of a request",
        triton="passed to the model",
        here="ignored",
        why="they are about bodies of HTTP",
        cases={
            "parameters: of HTTP's bodies": (
                'message SAID bytes \x1c\0\0\0{"binary_data_output": true}',
                "message SAID bytes \x02\0\0\0{}",
            )
        },
    ),
    Difference(
        asked="a parameter of a tensor without a value",
        triton="ignored",
        here="3",
        why="as of a request",
        cases=_all(_OK, _INVALID, "parameters of an input: without a value", "parameters of an output: without a value"),
    ),
    Difference(
        asked="`shared_memory_region` of a tensor",
        triton="5 for an unknown region",
        here="3",
        why="there is no shared memory: see [v2](v2.md)",
        cases=_all(
            _NOT_FOUND,
            _INVALID,
            "parameters of an input: shared_memory_region",
            "parameters of an output: shared_memory_region",
            "shared memory for an input, which has no data",
        ),
    ),
    # ---- models and the server
    Difference(
        asked="a version that is not a number",
        triton="3",
        here="5; at ModelReady `ready` false",
        why="there is no such version, as any other unknown one",
        cases={
            **_all(_INVALID, _NOT_FOUND, "a version that is no number", "a version below 0"),
            **_all(
                _INVALID,
                _NOT_FOUND,
                *(f"{what}: a version that is no number" for what in ("metadata", "config", "statistics")),
            ),
            "ready: a version that is no number": (_INVALID, _OK),
            "stream: a version that is no number": _refused("identity_fp32", "one"),
        },
    ),
    Difference(
        asked="statistics of an unknown model or version",
        triton="3",
        here="5",
        why="as its metadata",
        cases=_all(_INVALID, _NOT_FOUND, "statistics: an unknown model", "statistics: an unknown version"),
    ),
    Difference(
        asked="a model's configuration",
        triton="`platform` is empty; `model_transaction_policy` of decoupled models only",
        here="`platform` as in the metadata; `model_transaction_policy` always",
        why="one word for one thing",
        cases={
            **_all(
                "message config platform ; message config model_transaction_policy absent",
                "message config platform python; message config model_transaction_policy {'decoupled': False}",
                "config: a model",
                "config: a version",
                "config of batching",
            ),
            "config of counting": ("message config platform ", "message config platform python"),
        },
    ),
    Difference(
        asked="the list of extensions in the server's metadata",
        triton="also shared memory, sequences, scheduling policy, tracing",
        here="without these",
        why="clients look for them",
        cases={
            "metadata of the server": (
                "also ['cuda_shared_memory', 'schedule_policy', 'sequence', 'system_shared_memory', 'trace']",
                "also []",
            )
        },
    ),
    Difference(
        asked="to load an unknown model",
        triton="13",
        here="5",
        why="the fault is the client's",
        cases=_all(_INTERNAL, _NOT_FOUND, "load of an unknown model", "load of no model"),
    ),
    Difference(
        asked="shared memory: the status of an unknown region; to register a region",
        triton="status: 5; register: 13 (system) or 3 (CUDA)",
        here="status: an empty answer; register: 12",
        why="there is no shared memory",
        cases={
            **_all(_NOT_FOUND, _OK, "System: an unknown region", "Cuda: an unknown region"),
            "System: register": (_INTERNAL, _UNIMPLEMENTED),
            "Cuda: register": (_INVALID, _UNIMPLEMENTED),
        },
    ),
    Difference(
        asked="trace settings",
        triton="read and changed",
        here="12",
        why="this server is traced by OpenTelemetry",
        cases={"trace settings": (_OK, _UNIMPLEMENTED)},
    ),
    Difference(
        asked="an unknown log setting",
        triton="ignored",
        here="3",
        why="a mistyped name must be noticed",
        cases={"log settings: an unknown one": (_OK, _INVALID)},
    ),
    Difference(
        asked="health: an unknown service; Watch",
        triton="unknown service: SERVING; Watch: 12",
        here="unknown service: 5; Watch: the status, and each change of it",
        why="required by health-checking.md",
        cases={
            "health of another service": (_OK, _NOT_FOUND),
            "health, watched": (f"{_UNIMPLEMENTED}, without a text", "under way"),
        },
    ),
    Difference(
        asked="server reflection",
        triton="12",
        here="answered",
        why="grpcurl and ghz ask for it",
        cases={"reflection": (f"{_UNIMPLEMENTED}, without a text", _OK)},
    ),
    # ---- streams
    Difference(
        asked="a request of a stream that is refused: an unknown model, a wrong tensor",
        triton="the message has the id alone",
        here="also the model's name and `triton_final_response` true",
        why="so do Triton's later versions; a client waits for no more",
        cases={
            **dict.fromkeys(
                (
                    "stream: an unknown model",
                    "stream: an unknown model, and then a request",
                    "stream: an unknown model, without an id",
                ),
                _refused("nobody"),
            ),
            "stream: an unknown version": _refused("identity_fp32", "9"),
            **dict.fromkeys(
                ("stream: a wrong tensor, and then a request", "stream: an unknown output", "stream: a reserved parameter"),
                _refused("identity_fp32"),
            ),
            **dict.fromkeys(("stream: a missing input", "stream: fewer raw contents than inputs"), _refused("mixed")),
            "stream: a wrong tensor of a decoupled model": _refused("counting"),
            "stream: an empty message": _refused(""),
        },
    ),
    Difference(
        asked="`triton_grpc_error: true`, and a request that is refused",
        triton="a message; only a model's error ends the stream",
        here="its status ends the stream",
        why="so do Triton's later versions",
        cases={
            "stream: errors as statuses: an unknown model": (_OK, _NOT_FOUND),
            "stream: errors as statuses: a wrong tensor": (_OK, _INVALID),
        },
    ),
    Difference(
        asked="`triton_grpc_error: true`, and a model that fails after responses",
        triton="sometimes a response before the error is lost",
        here="all responses, then the status",
        why="they were sent before it",
        alone={"stream: errors as statuses: a model that fails after responses": "3 INVALID_ARGUMENT"},
    ),
    Difference(
        asked="the empty response at a decoupled model's end",
        triton="without the model's version",
        here="with it",
        why="as every other response",
        cases={
            f"stream: {name}": (f"message {number} model_version ", f"message {number} model_version 1")
            for name, number in [
                ("0 responses and an empty one", 0),
                ("1 responses and an empty one", 1),
                ("3 responses and an empty one", 3),
                ("responses without an id", 2),
            ]
        },
    ),
    Difference(
        asked="a message of a stream that cannot be read, or is cut",
        triton="the end of the stream, and OK",
        here="13",
        why="a client whose requests are lost needs to know",
        cases={
            **_all(_OK, _INTERNAL, "stream: bytes that are no protobuf", "stream: a cut message", "stream: a cut prefix"),
            "stream: bytes that are no protobuf behind a request": (_OK, "13 INTERNAL, behind messages"),
        },
    ),
    Difference(
        asked="several requests of one stream at once, some of them of a decoupled model",
        triton="mostly answered; sometimes the process ends (`!byte_buffer->Valid()`)",
        here="answered",
        why="one client must not end a server",
        alone=dict.fromkeys(
            (
                "stream: decoupled ones side by side",
                "stream: models of both kinds",
                "stream: a decoupled one behind a slow one",
            ),
            _OK,
        ),
    ),
    Difference(
        asked="a client of a stream that does not read",
        triton="responses pile up in memory",
        here="its models wait",
        why="one client does not take the memory of others",
        tests=("test_a_client_that_does_not_read_stops_the_model_here",),
    ),
)

ANSWERS: Mapping[str, Pair] = {case: pair for difference in DIFFERENCES for case, pair in difference.cases.items()}
"""The differences, by the name of the case."""

ALONE_HERE: Mapping[str, str] = {case: status for difference in DIFFERENCES for case, status in difference.alone.items()}
"""The gateway's status for each call that is not sent to Triton."""


def table() -> str:
    """The table of docs/reference/grpc-differences.md."""
    rows = [f"| {d.asked} | {d.triton} | {d.here} |" for d in DIFFERENCES]
    return "\n".join(["| call | Triton | everywire |", "| --- | --- | --- |", *rows])
