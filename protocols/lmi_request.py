"""LMI requests for text generation, rolling batch: what the body says, checked."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, final

import msgspec

from protocols import strict_json
from protocols.events import Buffer
from protocols.lmi_errors import LMIError, Stage

MiB = 1024 * 1024


class Formatter(enum.Enum):
    """The form of an answer; the value is what `output_formatter` says."""

    JSON = "json"
    """One document, when the generation is complete."""
    JSONLINES = "jsonlines"
    """One object a line, one line a token."""
    SSE = "sse"
    """The same objects, one event a token."""


_FORMATTERS: Mapping[str, Formatter] = {f.value: f for f in Formatter}


@final
class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """The schema's common parameters with its defaults, and `extra` for every other one, unchecked and as it came.

    `do_sample` is 0.31's: false, or absent, means greedy whatever `temperature` says. `seed` None means: choose one.
    `top_k` 0 is off, and so is the -1 that some backends write, which is read as 0.
    """

    do_sample: bool = False
    seed: int | None = None
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 30
    details: bool = False
    return_full_text: bool = False
    stop_sequences: tuple[str, ...] = ()
    decoder_input_details: bool = False
    extra: Mapping[str, Any] = {}  # a Struct copies it


@final
class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. `stream` is what the client asked for, `formatter` what it gets."""

    inputs: str
    parameters: Parameters = Parameters()
    stream: bool = False
    formatter: Formatter = Formatter.JSON


def parse_request(
    body: Buffer,
    content_type: str,
    *,
    configured: Formatter | None = None,
    json_limit: int = 64 * MiB,
    depth: int = 64,
) -> TextRequest:
    """Reads the body of an invocation; LMIError, of stage "payload" or "parameters", for one that cannot be served.

    `text/plain` is the prompt itself. Everything else is read as JSON whatever it is called, because `curl -d` calls
    it a form. The formatter is the one in `parameters.output_formatter`, else `configured` (the server's option),
    else jsonlines where `stream` is true, else json; a name it does not know is passed over. `stream` at the top level
    overwrites `parameters.stream`, also by its absence. A null parameter is an absent one.
    """
    document = _document(body, content_type, json_limit, depth)
    if document.get("messages") is not None:
        raise LMIError("messages: chat is not offered at this route; send the prompt in inputs", stage="payload")
    inputs = document.get("inputs")
    if not isinstance(inputs, str) or not inputs:
        _refuse("inputs", "a non-empty string", inputs, stage="payload")
    given = document.get("parameters", {})
    if not isinstance(given, dict):
        _refuse("parameters", "an object", given, stage="payload")
    stream = document.get("stream")
    if stream is not None and not isinstance(stream, bool):
        _refuse("stream", "true or false", stream, stage="payload")
    asked = given.get("output_formatter")
    formatter = _FORMATTERS.get(asked, configured) if isinstance(asked, str) else configured
    if formatter is None:
        formatter = Formatter.JSONLINES if stream else Formatter.JSON
    return TextRequest(inputs=inputs, parameters=_parameters(given), stream=bool(stream), formatter=formatter)


def _document(body: Buffer, content_type: str, json_limit: int, depth: int) -> dict[str, Any]:
    size = memoryview(body).nbytes
    if size > json_limit:
        raise LMIError(f"body: at most {json_limit} bytes (limits.json), got {size}", stage="payload")
    media_type = content_type.partition(";")[0].strip().lower()
    if not size:
        return {"inputs": ""}
    if media_type == "text/plain":
        try:
            return {"inputs": str(body, "utf-8")}
        except UnicodeDecodeError as error:
            raise LMIError(f"body: expected UTF-8, the byte at {error.start} is not", stage="payload") from None
    try:
        document = strict_json.loads(body, depth=depth)
    except strict_json.JSONError as error:
        known = media_type in ("", "application/json")
        hint = "" if known else f" (Content-Type {media_type[:80]!r}: send application/json or text/plain)"
        raise LMIError(f"{error.message}{hint}", stage="payload") from None
    if not isinstance(document, dict):
        _refuse("body", "an object", document, stage="payload")
    return document


def _parameters(given: Mapping[str, Any]) -> Parameters:
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in given.items():
        if value is None or name in ("stream", "output_formatter"):
            continue
        if (read := _READERS.get(name)) is None:
            extra[name] = value
        else:
            values[name] = read(f"parameters.{name}", value)
    return Parameters(**values, extra=extra)


def _refuse(name: str, expected: str, value: object, *, stage: Stage = "parameters") -> NoReturn:
    raise LMIError(f"{name}: expected {expected}, got {_shown(value)}", stage=stage)


def _shown(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)[:40]
        case str():
            return f"the string {value[:40]!r}" if value else "an empty string"
        case list():
            return f"an array of {len(value)}"
        case _:
            return "an object"


def _integer_in(value: object, low: int, high: int) -> int | None:
    """The integer that a JSON number is, if it is one in the range: 10.0 and 1e1 are 10 (RFC 8259 knows one kind)."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high else None


def _boolean(name: str, value: object) -> bool:
    return value if isinstance(value, bool) else _refuse(name, "true or false", value)


def _real(expected: str, legal: Callable[[float], bool]) -> Callable[[str, object], float]:
    def read(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            _refuse(name, expected, value)
        try:
            number = float(value)
        except OverflowError:  # an integer beyond a double's range
            number = math.inf
        return number if math.isfinite(number) and legal(number) else _refuse(name, expected, value)

    return read


def _seed(name: str, value: object) -> int:
    number = int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value) else value
    # What torch's manual_seed takes.
    seed = _integer_in(number, -(2**63), 2**64 - 1)
    return _refuse(name, "an integer of 64 bits", value) if seed is None else seed


def _top_k(name: str, value: object) -> int:
    top_k = _integer_in(value, -1, 2**31 - 1)
    return _refuse(name, "-1 or 0 (off), or an integer from 1 to 2147483647", value) if top_k is None else max(top_k, 0)


def _max_new_tokens(name: str, value: object) -> int:
    number = _integer_in(value, 1, 2**31 - 1)
    return _refuse(name, "an integer from 1 to 2147483647", value) if number is None else number


def _stop_sequences(name: str, value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > 64:
        _refuse(name, "at most 64 strings", value)
    for string in strings:
        if not isinstance(string, str) or not string:
            _refuse(name, "non-empty strings", string)
    return tuple(strings)


# The ranges are vLLM's, which the schema leaves to the backend.
_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "do_sample": _boolean,
    "seed": _seed,
    "temperature": _real("a number >= 0", lambda v: v >= 0),
    "repetition_penalty": _real("a number > 0", lambda v: v > 0),
    "top_k": _top_k,
    "top_p": _real("a number > 0 and <= 1", lambda v: 0 < v <= 1),
    "max_new_tokens": _max_new_tokens,
    "details": _boolean,
    "return_full_text": _boolean,
    "stop_sequences": _stop_sequences,
    "decoder_input_details": _boolean,
}
