"""LMI requests for text generation, rolling batch: what the body says, checked."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, final

import msgspec

from protocols import strict_json
from protocols.events import Buffer
from protocols.lmi.errors import LMIError
from protocols.lmi.parameters import Parameters, SamplingRule, Table, boolean, check_one_sequence, read_parameters, refuse

MiB = 1024 * 1024
TEXT_JSON: Final = 16 * MiB
"""Bytes of a request's body, where nobody says otherwise."""


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
class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. `stream` is what the client asked for, `formatter` what it gets, `tgi` whether in the words of Hugging
    Face's TGI. `given` are the parameters that the request names itself (`read_parameters`)."""

    inputs: str
    parameters: Parameters = Parameters()
    stream: bool = False
    formatter: Formatter = Formatter.JSON
    tgi: bool = False
    given: Mapping[str, str] = MappingProxyType({})


def parse_request(
    body: Buffer,
    content_type: str,
    *,
    configured: Formatter | None = None,
    tgi: bool = False,
    table: Table = Table.VLLM,
    rule: SamplingRule = SamplingRule.V0_31,
    json_limit: int = TEXT_JSON,
    depth: int = 64,
    containers: int = strict_json.CONTAINERS,
    values: int = strict_json.VALUES,
) -> TextRequest:
    """`read_document` and `parse_document` in one, for a route that offers no chat: one that asks for it is refused."""
    document = read_document(body, content_type, json_limit=json_limit, depth=depth, containers=containers, values=values)
    if is_chat(document):
        raise LMIError("messages: chat is not offered at this route; send the prompt in inputs", stage="payload")
    return parse_document(document, configured=configured, tgi=tgi, table=table, rule=rule)


def read_document(
    body: Buffer,
    content_type: str,
    *,
    json_limit: int = TEXT_JSON,
    depth: int = 64,
    containers: int = strict_json.CONTAINERS,
    values: int = strict_json.VALUES,
) -> dict[str, Any]:
    """The object that the body of an invocation is; LMIError of stage "payload" where it is none.

    `text/plain` is the prompt itself, and an empty body an empty one, which is refused later. Everything else is read
    as JSON whatever it is called, because `curl -d` calls it a form.
    """
    size = memoryview(body).nbytes
    if size > json_limit:
        raise LMIError(f"body: at most {json_limit} bytes (limits.text_json), got {size}", stage="payload")
    if not size:
        return {"inputs": ""}
    if is_text(content_type):
        try:
            return {"inputs": str(body, "utf-8")}
        except UnicodeDecodeError as error:
            raise LMIError(f"body: expected UTF-8, the byte at {error.start} is not", stage="payload") from None
    try:
        document = strict_json.loads(body, depth=depth, containers=containers, values=values)
    except strict_json.JSONError as error:
        media_type = _media_type(content_type)
        known = media_type in ("", "application/json")
        hint = "" if known else f" (Content-Type {media_type[:80]!r}: send application/json or text/plain)"
        raise LMIError(f"{error.message}{hint}", stage="payload") from None
    if not isinstance(document, dict):
        refuse("body", "an object", document, stage="payload")
    return document


def is_text(content_type: str) -> bool:
    """Whether a body of that type is the prompt itself, and no JSON."""
    return _media_type(content_type) == "text/plain"


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def is_chat(document: Mapping[str, Any]) -> bool:
    """Whether a request asks for a chat completion, which `messages` in it say, and not for this schema."""
    return document.get("messages") is not None


def parse_document(
    document: Mapping[str, Any],
    *,
    configured: Formatter | None = None,
    tgi: bool = False,
    table: Table = Table.VLLM,
    rule: SamplingRule = SamplingRule.V0_31,
) -> TextRequest:
    """Reads a request of this schema; LMIError, of stage "payload" or "parameters", for one that cannot be served.

    The formatter is the one in `parameters.output_formatter`, else `configured` (the server's option), else json where
    `stream` is not true, else jsonlines; a name that means nothing here is passed over. `stream` at the top level
    overwrites `parameters.stream`, also by its absence. A null parameter is an absent one.

    With `tgi` (the server's tgi_compat) an unnamed stream is SSE, and details are given unless they are refused. A
    stream has one sequence, whoever asked for several; and in TGI's words no tokens of the prompt, as TGI has it.
    """
    inputs = document.get("inputs")
    if not isinstance(inputs, str) or not inputs:
        refuse("inputs", "a non-empty string", inputs, stage="payload")
    asked = parameters_of(document)
    stream = stream_of(document)
    parameters, given = read_parameters(asked, table=table, rule=rule)
    formatter = _formatter(asked.get("output_formatter"), configured, stream=stream, tgi=tgi)
    if stream or formatter is not Formatter.JSON:
        _check_stream(parameters, given, tgi=tgi)
    if tgi and "details" not in given:
        parameters = msgspec.structs.replace(parameters, details=True)
    return TextRequest(inputs=inputs, parameters=parameters, stream=stream, formatter=formatter, tgi=tgi, given=given)


def parameters_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The object `parameters` of a request, not looked into. LMIError where it is something else, null included."""
    given = document.get("parameters", {})
    return given if isinstance(given, dict) else refuse("parameters", "an object", given, stage="payload")


def stream_of(document: Mapping[str, Any]) -> bool:
    """True if a request asks for a stream. LMIError for another value than true or false."""
    stream = document.get("stream")
    return stream is not None and boolean("stream", stream, stage="payload")


def _formatter(asked: str | None, configured: Formatter | None, *, stream: bool, tgi: bool) -> Formatter:
    if asked is not None and (named := _FORMATTERS.get(asked)):
        return named
    if configured is not None:
        return configured
    if not stream:
        return Formatter.JSON
    return Formatter.SSE if tgi else Formatter.JSONLINES


def _check_stream(parameters: Parameters, given: Collection[str], *, tgi: bool) -> None:
    check_one_sequence(parameters, given, "in a stream")
    if tgi and parameters.decoder_input_details:
        if "decoder_input_details" in given:
            refuse("parameters.decoder_input_details", "false in a stream of TGI's form", True)
        refuse("parameters.prompt_logprobs", "0 in a stream of TGI's form", parameters.prompt_logprobs)
