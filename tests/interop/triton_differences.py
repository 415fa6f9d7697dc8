"""The answers that differ from Triton 2.51's on purpose, and why: data for the test and the table in the docs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Pair = tuple[str, str]
"""The words of `differ` for Triton's answer and for the gateway's."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A row of the table. `cases` are the requests that show it, by the names that triton_cases.py gives them, each with what differs;
    `fatal` those that are not sent to Triton."""

    asked: str
    triton: str
    here: str
    why: str
    cases: Mapping[str, Pair] = field(default_factory=dict)
    fatal: Sequence[str] = ()


def differ(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Pair | None:
    """The difference between two answers, in few words for each; None if there is none."""
    if theirs["status"] != ours["status"]:
        return _status(theirs), _status(ours)
    aspects = [name for name in {**theirs, **ours} if name != "said" and theirs.get(name) != ours.get(name)]
    if not aspects:
        return None
    told = [_told(name, theirs.get(name), ours.get(name)) for name in aspects]
    return "; ".join(t for t, _ in told), "; ".join(o for _, o in told)


def _status(answer: Mapping[str, Any]) -> str:
    form = answer.get("error", "JSON")
    return f"{answer['status']}" if form in ("JSON", "") else f"{answer['status']}, {form}"


def _told(name: str, theirs: Any, ours: Any) -> Pair:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        inner = [
            _told(f"{name} {k}", theirs.get(k), ours.get(k)) for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)
        ]
        return "; ".join(t for t, _ in inner), "; ".join(o for _, o in inner)
    if isinstance(theirs, list) and isinstance(ours, list) and name.endswith("members"):
        return f"also {[e for e in theirs if e not in ours]}", f"also {[e for e in ours if e not in theirs]}"
    return f"{name} {_short(theirs)}", f"{name} {_short(ours)}"


def _short(value: Any) -> str:
    if value is None:
        return "absent"
    return str(value)


def _all(pair: Pair, *cases: str) -> dict[str, Pair]:
    return dict.fromkeys(cases, pair)


_FAULT, _TAKEN, _STRICT = ("500", "400"), ("400", "200"), ("200", "400")

DIFFERENCES: Sequence[Difference] = (
    # ---- the end of the JSON
    Difference(
        asked="`Inference-Header-Content-Length: 106xyz`, `106.0`, `+106`",
        triton="read as 106",
        here="400",
        why="a header of digits cannot be read in two ways by two servers",
        cases=_all(_STRICT, "the header is Nxyz", "the header is N.0", "the header is +N"),
    ),
    Difference(
        asked="`Inference-Header-Content-Length` twice, with different values",
        triton="the first counts",
        here="400",
        why="proxies may take the other",
        cases=_all(_STRICT, "the header twice, with two values"),
    ),
    Difference(
        asked="an empty body without that header",
        triton="a raw request of no elements",
        here="400",
        why="a client that lost its body needs to know",
        cases=_all(_STRICT, "an empty body without the header"),
    ),
    # ---- the JSON
    Difference(
        asked="JSON that is cut, followed by text, or has a trailing comma",
        triton="500",
        here="400",
        why="the fault is the client's",
        cases=_all(_FAULT, "JSON that is cut", "text after the JSON", "a trailing comma", "the header is one less"),
    ),
    Difference(
        asked="a member that is missing or of another type",
        triton="500",
        here="400, naming it",
        why="the fault is the client's",
        cases=_all(
            _FAULT,
            "a list in place of the object",
            "inputs is an object",
            "inputs is missing",
            "an id that is a number",
            "parameters is a list",
            "binary_data_output is a string",
            "binary_data is 1",
            "binary_data_size is negative",
            "binary_data_size is a string",
            "binary_data_size is a fraction",
            "binary_data_size is true",
            "binary_data_size is null",
            "shape: negative",
            "shape: a string",
            "shape: a fraction",
            "shape: missing",
            "shape: a number",
            "shape: null",
            "data is one number",
            "a timeout that is a string",
            "classification: a string",
            "classification: negative",
        ),
    ),
    Difference(
        asked="a member twice",
        triton="the first counts",
        here="400",
        why="others take the last",
        cases=_all(_STRICT, "a member twice"),
    ),
    Difference(
        asked="invalid UTF-8 in the JSON",
        triton="taken, and written into the reply",
        here="400",
        why="it is not JSON, and neither is the reply",
        cases=_all(_STRICT, "invalid UTF-8 in the id", "invalid UTF-8 in BYTES"),
    ),
    Difference(
        asked="`data` nested 50,000 deep",
        triton="the process ends",
        here="400 above 64 levels",
        why="one request must not end a server",
        fatal=["data nested 50,000 deep"],
    ),
    # ---- data
    Difference(
        asked="fewer or more values than the shape takes; a shape beyond 64 bits",
        triton="500",
        here="400, with both numbers",
        why="the fault is the client's",
        cases=_all(
            _FAULT,
            "fewer values than the shape",
            "more values than the shape",
            "shape: its product is above 64 bits",
            "shape: its product wraps to 16",
        ),
    ),
    Difference(
        asked="a shape of 2⁴⁰ with one value",
        triton="the process ends",
        here="400",
        why="counts are compared before memory is taken",
        fatal=["a shape of 2**40 with one value"],
    ),
    Difference(
        asked="data that is ragged, or nested otherwise than the shape, with the right count",
        triton="taken",
        here="400",
        why="it is mostly a mistake; flat data is taken",
        cases=_all(
            _STRICT, "ragged data with the right count", "data nested more deeply than the shape", "data nested 50 deep"
        ),
    ),
    Difference(
        asked="a whole number out of the datatype's range",
        triton="cut to its low bits (INT8 128 becomes -128), or 500",
        here="400, with the range",
        why="another number would be a wrong answer",
        cases=_all(
            _STRICT,
            "INT8 is given 128",
            "UINT8 is given 256",
            "INT16 is given 32768",
            "INT32 is given 2**31",
            "UINT32 is given 2**32",
        )
        | _all(_FAULT, "UINT8 is given -1", "INT64 is given 2**63", "UINT64 is given 2**64", "UINT64 is given -1"),
    ),
    Difference(
        asked="a number out of the range of its float: 1e39 for an FP32, 1e400",
        triton="infinity for 1e39; 500 for 1e400",
        here="400",
        why="another number would be a wrong answer",
        cases=_all(_STRICT, "1e39 for a single") | _all(_FAULT, "1e400"),
    ),
    Difference(
        asked='a value of another type: 1.5 or `true` for an INT32, `"1"` for a number, 1 for BYTES',
        triton="500",
        here="400, naming the element",
        why="the fault is the client's",
        cases=_all(
            _FAULT,
            "INT32 is given 1.5",
            "INT32 is given true",
            "INT32 is given a string",
            "FP32 is given a string",
            "FP32 is given true",
            "BOOL is given 2",
            "BOOL is given a string",
            "BYTES is given 1",
            "BYTES is given null",
            "null for an integer",
        ),
    ),
    Difference(
        asked="1.0 for an integer, 1 for a BOOL, `null` for a float",
        triton="500",
        here="read as 1, true and NaN",
        why="they have one meaning; KServe takes the first two as well",
        cases=_all(("500", "200"), "INT32 is given 1.0", "BOOL is given 1", "null for a float"),
    ),
    Difference(
        asked="FP16 and BF16 as JSON",
        triton="400",
        here="numbers, read and written",
        why="JSON carries each of them exactly",
        cases=_all(
            _TAKEN,
            *[
                f"{t} {how}"
                for t in ("FP16", "BF16")
                for how in ("binary, out JSON", "JSON, out binary", "JSON, out JSON", "of no elements, JSON")
            ],
        ),
    ),
    Difference(
        asked="binary BOOL bytes above 1",
        triton="passed through",
        here="1",
        why="other bytes are not BOOL, and numpy computes with them wrongly",
        cases={"BOOL bytes 2 and 255, out binary": ("OUTPUT0 bytes 02ff", "OUTPUT0 bytes 0101")},
    ),
    # ---- replies
    Difference(
        asked="an FP32 of 0.1, as JSON",
        triton="`0.10000000149011612`",
        here="`0.1`",
        why="the shortest text that reads back to the same FP32",
        cases={"the digits of a single": ("OUTPUT0 text [0.10000000149011612]", "OUTPUT0 text [0.1]")},
    ),
    Difference(
        asked="NaN and infinities, out as JSON",
        triton="`NaN`, `Infinity`",
        here="`null`",
        why="JSON has no such literals; both are read in requests",
        cases={
            "NaN out, JSON": ("OUTPUT0 text [NaN]", "OUTPUT0 text [null]"),
            "Infinity out, JSON": (
                "OUTPUT0 bytes 0000807f; OUTPUT0 text [Infinity]",
                "OUTPUT0 bytes 0000c07f; OUTPUT0 text [null]",
            ),
        },
    ),
    Difference(
        asked="BYTES that are not UTF-8, out as JSON",
        triton="raw bytes in the JSON",
        here="400, asking for `binary_data`",
        why="the reply would not be JSON",
        cases=_all(_STRICT, "BYTES that are not UTF-8, out JSON"),
    ),
    Difference(
        asked="outputs in another order than the model's",
        triton="the model's order",
        here="the order asked for",
        why="so does KServe; clients go by name",
        cases={"outputs in another order": ("outputs ['B', 'C']", "outputs ['C', 'B']")},
    ),
    Difference(
        asked="an output twice",
        triton="once",
        here="400",
        why="so do Triton's later versions",
        cases=_all(_STRICT, "an output twice"),
    ),
    Difference(
        asked="`binary_data_output` true, and an output listed without `binary_data`",
        triton="JSON",
        here="binary",
        why="the extension says that only `binary_data` overrides it",
        cases={
            "binary_data_output true and a listed output that says nothing": (
                "content-type application/json; header length False; OUTPUT0 form JSON",
                "content-type application/octet-stream; header length True; OUTPUT0 form binary",
            )
        },
    ),
    Difference(
        asked="`sequence_id`, `sequence_start`, `sequence_end`, `priority`, `timeout`",
        triton="its schedulers use them; the model does not see them",
        here="the model sees them, except `priority` and `timeout` if requests are [batched](v2.md#batching)",
        why="a model may use its caller's parameters",
        cases={
            "sequence parameters": (
                "SAID bytes \x02\0\0\0{}",
                'SAID bytes @\0\0\0{"sequence_end": true, "sequence_id": 7, "sequence_start": true}',
            ),
            "priority and timeout": ("SAID bytes \x02\0\0\0{}", 'SAID bytes #\0\0\0{"priority": 1, "timeout": 5000000}'),
        },
    ),
    # ---- HTTP
    Difference(
        asked="an error",
        triton="often `text/plain`; 405 without `Allow`",
        here="`application/json`; 405 with `Allow`",
        why="KServe's client shows only JSON; RFC 9110, 15.5.6",
        cases={
            "the media type of an error in the JSON": ("500", "400"),
            "the head of 405": (
                "content-type text/plain; Allow absent",
                "content-type application/json; Allow OPTIONS, POST",
            ),
        },
    ),
    Difference(
        asked="`Content-Encoding: GZIP`, `Accept-Encoding: GZIP`",
        triton="501; not compressed",
        here="read; compressed",
        why="codings have no case (RFC 9110, 8.4.1)",
        cases={
            "Content-Encoding: GZIP": ("501", "200"),
            "Accept-Encoding: GZIP": ("content-encoding absent", "content-encoding gzip"),
        },
    ),
    Difference(
        asked="another `Content-Encoding`",
        triton="501",
        here="415",
        why="RFC 9110, 8.4",
        cases={"Content-Encoding: br": ("501", "415")},
    ),
    Difference(
        asked="`Accept-Encoding: gzip` for a small reply",
        triton="compressed",
        here="uncompressed below 1 KiB",
        why="little or nothing would be saved",
        cases={"Accept-Encoding: gzip, a reply of few bytes": ("content-encoding gzip", "content-encoding absent")},
    ),
    Difference(
        asked="live, ready",
        triton="200 without a body",
        here='200 with `{"live": true}`, `{"ready": true}`',
        why="KServe's client reads it",
        cases={
            "live": ("content-type text/plain; live absent", "content-type application/json; live True"),
            "ready": ("content-type text/plain; ready absent", "content-type application/json; ready True"),
        }
        | _all(
            (
                "content-type text/plain; name absent; ready absent",
                "content-type application/json; name identity_fp32; ready True",
            ),
            "a model's ready",
            "a version's ready",
            "a query",
        ),
    ),
    Difference(
        asked="ready and statistics of an unknown model or version",
        triton="400",
        here="404",
        why="so do KServe and MLServer, and Triton's own metadata",
        cases=_all(
            ("400", "404"),
            "an unknown model's ready",
            "an unknown version's ready",
            "statistics of an unknown model",
            "statistics of an unknown version",
        ),
    ),
    Difference(
        asked="a model's name in percent-encoding",
        triton="unknown",
        here="decoded",
        why="tritonclient encodes it",
        cases=_all(_TAKEN, "a percent-encoded model name"),
    ),
    Difference(
        asked="HEAD",
        triton="405 with a body, which breaks the next answer on the connection",
        here="the head of GET",
        why="RFC 9110, 9.3.2",
        cases={"live by HEAD": ("405", "200")},
    ),
    Difference(
        asked="OPTIONS",
        triton="405",
        here="204, with Allow",
        why="RFC 9110, 9.3.7",
        cases={"infer by OPTIONS": ("405", "204")},
    ),
    # ---- extensions
    Difference(
        asked="a model's configuration",
        triton="`platform` is empty, `backend` says what runs it",
        here="`platform` as in the metadata",
        why="one word for one thing",
        cases=_all(("platform ", "platform python"), "config of a model", "config of a batching model"),
    ),
    Difference(
        asked="statistics",
        triton="no count of cancelled requests",
        here="`cancel` too, and `transfer`: bytes received and copied",
        why="clients that leave are noticed here",
        cases={
            "members of statistics": (
                "also []",
                "also ['model_stats.inference_stats.cancel', 'model_stats.inference_stats.cancel.count',"
                " 'model_stats.inference_stats.cancel.ns', 'model_stats.transfer', 'model_stats.transfer.copied_bytes',"
                " 'model_stats.transfer.received_bytes']",
            )
        },
    ),
    Difference(
        asked="the index of models",
        triton="`reason` only if there is one",
        here="`reason` always",
        why="the extension's schema has it",
        cases={
            "members of the index of models": ("also []", "also ['reason']"),
        },
    ),
    Difference(
        asked="to load an unknown model",
        triton="500",
        here="404",
        why="the fault is the client's",
        cases=_all(("500", "404"), "load of an unknown model"),
    ),
    Difference(
        asked="to unload an unknown model",
        triton="200 without a body",
        here='200 with `{"name": ..., "unload": true}`',
        why="as KServe",
        cases={"unload of an unknown model": ("name absent; unload absent", "name nobody; unload True")},
    ),
    Difference(
        asked="generate: invalid JSON, `parameters` that is not an object, a value of another type",
        triton="500",
        here="400",
        why="the fault is the client's",
        cases=_all(_FAULT, "generate: not JSON", "generate: parameters is a list", "generate: another type"),
    ),
    Difference(
        asked="generate: a nested array",
        triton="400",
        here="read",
        why="infer reads it",
        cases=_all(_TAKEN, "generate: a nested array"),
    ),
    Difference(
        asked="generate_stream: an error before the first event",
        triton="the error's status, and a body that is an event",
        here="the error's status, and a body in JSON",
        why="clients that see the status read JSON",
        cases={"generate_stream: the model refuses": ("error text", "error JSON")},
    ),
    Difference(
        asked="classification of BYTES",
        triton="the process ends",
        here="400",
        why="one request must not end a server",
        fatal=["classification of BYTES"],
    ),
)

ANSWERS: Mapping[str, Pair] = {case: pair for difference in DIFFERENCES for case, pair in difference.cases.items()}
"""The differences, by the name of the case."""


def table() -> str:
    """The table of docs/reference/v2-differences.md."""
    rows = [f"| {d.asked} | {d.triton} | {d.here} |" for d in DIFFERENCES]
    return "\n".join(["| request | Triton | everywire |", "| --- | --- | --- |", *rows])
