"""LMI requests for text generation (rolling batch): reads and checks the body."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, final

import msgspec

from protocols.events import Buffer
from protocols.json import strict
from protocols.lmi.errors import LMIError
from protocols.lmi.parameters import Parameters, SamplingRule, Table, boolean, check_one_sequence, read_parameters, refuse

MiB = 1024 * 1024
TEXT_JSON: Final = 16 * MiB
"""The default limit of a request's body, in bytes."""


MEMBERS: Final = frozenset(("inputs", "parameters", "stream", "messages"))
"""The members of a request that are read, beside those of `parameters`."""


class Formatter(enum.Enum):
    """The form of an answer; the values are those of `output_formatter`."""

    JSON = "json"
    """One document, when the generation is complete."""
    JSONLINES = "jsonlines"
    """One object for each token, each on its line."""
    SSE = "sse"
    """The same objects, one event for each token."""


_FORMATTERS: Mapping[str, Formatter] = {f.value: f for f in Formatter}


@final
class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. `stream` is what the client asked for, `formatter` the form it gets. `tgi` is True for the form of Hugging
    Face's TGI. `given` has the parameters that the request itself names (`read_parameters`)."""

    inputs: str
    parameters: Parameters = Parameters()
    stream: bool = False
    formatter: Formatter = Formatter.JSON
    tgi: bool = False
    given: Mapping[str, str] = MappingProxyType({})

    @property
    def shows_prompt(self) -> str:
        """The parameter by which the answer has the prompt's tokens, which it has only in its details; empty if it has
        none."""
        asked = self.parameters
        if not (asked.details or max(asked.n, asked.best_of, asked.num_beams) > 1) or not asked.decoder_input_details:
            return ""
        return "decoder_input_details" if "decoder_input_details" in self.given else "prompt_logprobs"


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
    containers: int = strict.CONTAINERS,
    values: int = strict.VALUES,
) -> TextRequest:
    """Reads a body with `read_document` and `parse_document`, for a route without chat: a chat request is refused."""
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
    containers: int = strict.CONTAINERS,
    values: int = strict.VALUES,
) -> dict[str, Any]:
    """The object in the body of an invocation. LMIError of stage "payload" if there is none.

    `text/plain` is the prompt itself. An empty body is an empty prompt, which is refused later. Any other body is read as
    JSON whatever its type, because `curl -d` declares a form.
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
        document = strict.loads(body, depth=depth, containers=containers, values=values)
    except strict.JSONError as error:
        media_type = _media_type(content_type)
        known = media_type in ("", "application/json")
        hint = "" if known else f" (Content-Type {media_type[:80]!r}: send application/json or text/plain)"
        raise LMIError(f"{error.message}{hint}", stage="payload") from None
    if not isinstance(document, dict):
        refuse("body", "an object", document, stage="payload")
    return document


def is_text(content_type: str) -> bool:
    """True if a body of that type is the prompt itself, and not JSON."""
    return _media_type(content_type) == "text/plain"


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def is_chat(document: Mapping[str, Any]) -> bool:
    """True if a request asks for a chat completion: it has `messages`."""
    return document.get("messages") is not None


def parse_document(
    document: Mapping[str, Any],
    *,
    configured: Formatter | None = None,
    tgi: bool = False,
    table: Table = Table.VLLM,
    rule: SamplingRule = SamplingRule.V0_31,
) -> TextRequest:
    """Reads a request of this schema. LMIError, of stage "payload" or "parameters", if it cannot be served.

    The formatter is that of `parameters.output_formatter`, else `configured` (the server's option), else json if `stream` is
    not true, else jsonlines. An unknown formatter name is ignored. `stream` at the top level overrides `parameters.stream`,
    even by its absence. A null parameter counts as absent.

    With `tgi` (the server's tgi_compat) a stream without a named form is SSE, and details are given unless they are refused.
    A stream has one sequence; asking for several is an error. In TGI's form a stream cannot have the prompt's tokens, as in
    TGI.
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
    """The `parameters` object of a request, unchecked. LMIError if it is anything else, null included."""
    given = document.get("parameters", {})
    return given if isinstance(given, dict) else refuse("parameters", "an object", given, stage="payload")


def stream_of(document: Mapping[str, Any]) -> bool:
    """True if a request asks for a stream. LMIError for a value other than true and false."""
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


def _check_stream(parameters: Parameters, given: Mapping[str, str], *, tgi: bool) -> None:
    check_one_sequence(parameters, given, "in a stream")
    if tgi and parameters.decoder_input_details:
        if "decoder_input_details" in given:
            refuse("parameters.decoder_input_details", "false in a stream of TGI's form", True)
        refuse("parameters.prompt_logprobs", "0 in a stream of TGI's form", parameters.prompt_logprobs)
