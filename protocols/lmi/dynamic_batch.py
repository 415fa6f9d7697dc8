"""LMI's dynamic batch: several prompts in one request, and one text for each of them in the answer."""

from __future__ import annotations

from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from types import MappingProxyType
from typing import Any, final

import msgspec

from protocols.errors import LocalProtocolError
from protocols.events import Buffer
from protocols.lmi.errors import LMIError, json_string
from protocols.lmi.parameters import Parameters, SamplingRule, Table, check_one_sequence, read_parameters, refuse
from protocols.lmi.request import TEXT_JSON, parameters_of, read_document, stream_of

MiB = 1024 * 1024
MAX_PROMPTS = 64
"""The default limit of prompts in one request: each is a separate generation."""


@final
class DynamicRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts, at least one, with the same parameters for all. `given` has the parameters that the request itself names
    (`read_parameters`)."""

    inputs: tuple[str, ...]
    parameters: Parameters = Parameters()
    given: Mapping[str, str] = MappingProxyType({})


def parse_dynamic(
    body: Buffer,
    content_type: str,
    *,
    streaming: bool = False,
    max_prompts: int = MAX_PROMPTS,
    table: Table = Table.VLLM,
    rule: SamplingRule = SamplingRule.V0_31,
    json_limit: int = TEXT_JSON,
    depth: int = 64,
) -> DynamicRequest:
    """Reads a body with `protocols.lmi.request.read_document` and `parse_dynamic_document`. `text/plain` is one prompt."""
    document = read_document(body, content_type, json_limit=json_limit, depth=depth)
    return parse_dynamic_document(document, streaming=streaming, max_prompts=max_prompts, table=table, rule=rule)


def parse_dynamic_document(
    document: Mapping[str, Any],
    *,
    streaming: bool = False,
    max_prompts: int = MAX_PROMPTS,
    table: Table = Table.VLLM,
    rule: SamplingRule = SamplingRule.V0_31,
) -> DynamicRequest:
    """Reads a request of a dynamic batch: `inputs` is a prompt or an array of prompts, and `parameters` hold for all of
    them.

    `streaming` is the server's option enable_streaming; the request's own `stream` is checked and then ignored. The answer
    has one text for each prompt: without a stream, `best_of` and `num_beams` choose it. `n` must be 1. LMIError for a
    request that cannot be served; answer it with `dynamic_error_body`.
    """
    inputs = _prompts(document.get("inputs"), max_prompts)
    stream_of(document)
    parameters, given = read_parameters(parameters_of(document), table=table, rule=rule)
    if streaming:
        check_one_sequence(parameters, given, "in a stream")
    if "n" in given:
        if parameters.n > 1:
            refuse("parameters.n", "1 in a dynamic batch", parameters.n)
    else:
        parameters = msgspec.structs.replace(parameters, n=1)
    return DynamicRequest(inputs=inputs, parameters=parameters, given=given)


def _prompts(inputs: object, most: int) -> tuple[str, ...]:
    prompts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(prompts, list) or not prompts:
        refuse("inputs", "a non-empty string, or an array of them", inputs, stage="payload")
    if len(prompts) > most:
        refuse("inputs", f"at most {most} prompts (max_prompts)", prompts, stage="payload")
    for at, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt:
            where = "inputs" if isinstance(inputs, str) else f"inputs[{at}]"
            refuse(where, "a non-empty string", prompt, stage="payload")
    return tuple(prompts)


def dynamic_error_body(message: str, code: int = 424) -> bytes:
    """The `application/json` body of an error answer with the HTTP status `code`, byte for byte as LMI prints it."""
    return b'{\n  "code":%d,\n  "message":"invoke handler failure",\n  "error":%b\n}' % (code, json_string(message))


@final
class DynamicEncoder:
    """Makes the bytes of one answer. Call `token` for each token of each prompt, in any order of prompts, and `end` for a
    prompt that has no more; then `finish`, or `error` if a prompt fails. One of these two ends the answer; later calls give
    no bytes.

    Without `streaming` the answer is one document, an array with an object for each prompt. With it the answer is lines with
    one entry for each prompt: the token that it has made since the last line, or "". A line is complete as soon as every
    active prompt has a token on it, so prompts in step make the lines of LMI. A prompt that is ahead of the others completes
    it too, with its next token. `flush` gives an incomplete line: call it when no token is ready. The kept text is bounded
    by `max_text` bytes, as it will be written.
    """

    __slots__ = (
        "_active",
        "_closed",
        "_held",
        "_left",
        "_line",
        "_max",
        "_missing",
        "_request",
        "_texts",
        "content_type",
        "streaming",
    )

    def __init__(self, request: DynamicRequest, *, streaming: bool, max_text: int = 16 * MiB) -> None:
        count = len(request.inputs)
        self.content_type = "application/jsonlines" if streaming else "application/json"
        self.streaming = streaming
        """True if there are bytes before `finish`, so that the head must be sent before the generation is complete."""
        self._request = request
        self._max = max_text
        self._held = 0
        self._closed = False
        self._active = count
        self._left = [request.parameters.max_new_tokens] * count  # tokens that a prompt may still have; 0: it has ended
        self._texts = [bytearray() for _ in range(count)]  # escaped; a stream keeps only its current line
        self._line: list[bytes | None] = [None] * count
        self._missing = count  # active prompts without an entry on the line

    @property
    def finished(self) -> bool:
        """True if every prompt has ended: no token may follow. The answer still needs its `finish`."""
        return not self._active

    def ended(self, prompt: int) -> bool:
        """True if this prompt has had its last token, by its own word or as number `max_new_tokens`."""
        return not self._left[prompt]

    def token(self, prompt: int, text: str, last: bool = False) -> bytes:
        """Takes one token of this prompt; `last` is True for its last. Returns the lines that it completes, or nothing
        without streaming. LMIError above `max_text`, and the token does not count: call `error` then. LocalProtocolError for
        a token after the prompt's last."""
        if self._closed:
            return b""
        if self.ended(prompt):
            raise LocalProtocolError(f"a token after the last of prompt {prompt}")
        quoted = _ascii(text) if self.streaming else json_string(text)
        size, ahead = len(quoted) - 2, self._line[prompt] is not None
        if size + (0 if ahead else self._held) > self._max:
            raise LMIError(f"answer: its texts are at most {self._max} bytes (max_text), the next token would exceed them")
        before = self.flush() if ahead else b""
        self._held += size
        self._left[prompt] -= 1
        if self.streaming:
            self._line[prompt] = quoted
            self._missing -= 1
        else:
            self._texts[prompt] += quoted[1:-1]
        if last or self.ended(prompt):
            self._left[prompt] = 0
            self._active -= 1
        return before if self._missing else before + self.flush()

    def end(self, prompt: int, rest: str = "") -> bytes:
        """Ends this prompt. Returns the line that waited only for it, if there is one. Repeated calls are harmless. `rest`
        is text of no token, held back until the end was known: LMIError above `max_text`."""
        if self._closed or self.ended(prompt):
            return b""
        if rest:
            self._left[prompt] = 1  # `rest` is handled like a last token
            return self.token(prompt, rest, last=True)
        self._left[prompt] = 0
        self._active -= 1
        self._missing -= self._line[prompt] is None
        return b"" if self._missing else self.flush()

    def flush(self) -> bytes:
        """The line of the tokens that are not sent yet; empty if there are none."""
        if self._closed or self._line.count(None) == len(self._line):
            return b""
        line = b'{"outputs": [%b]}\n' % b", ".join([b'""' if entry is None else entry for entry in self._line])
        self._line = [None] * len(self._line)
        self._missing = self._active
        self._held = 0
        return line

    def finish(self) -> bytes:
        """Completes the answer: the document, or the unsent line of a stream, which has no line that marks its end."""
        if self._closed:
            return b""
        rest = self.flush() if self.streaming else self._document()
        self._closed = True
        return rest

    def error(self, message: str) -> bytes:
        """Ends an answer that failed. In a stream: the unsent line, and a last line with the error's object. LMI itself just
        stops there, as if the answer were complete. Without a stream: the whole body of an answer with status 424."""
        if self._closed:
            return b""
        if not self.streaming:
            self._closed = True
            return dynamic_error_body(message)
        rest = self.flush()
        self._closed = True
        return rest + b'{"code": 424, "message": "invoke handler failure", "error": %b}\n' % _ascii(message)

    def _document(self) -> bytes:
        pieces: list[Buffer] = []
        for prompt, text in zip(self._request.inputs, self._texts, strict=True):
            begin = json_string(prompt)[1:-1] if self._request.parameters.return_full_text else b""
            pieces += [b",\n" if pieces else b"[\n", b'  {\n    "generated_text":"', begin, text, b'"\n  }']
        return b"".join([*pieces, b"\n]"])


def _ascii(text: str) -> bytes:
    """A JSON string as `json.dumps` writes it by default. A lone surrogate, which strict readers refuse, becomes U+FFFD."""
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return encode_basestring_ascii(text).encode()
