"""LMI answers for text generation, rolling batch: token by token as json, jsonlines or SSE."""

from __future__ import annotations

import math
from typing import Any, final

from msgspec.json import encode

from protocols import strict_json
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Headers
from protocols.lmi_errors import LMIError, generation_error_body, json_string
from protocols.lmi_request import Formatter, TextRequest

MiB = 1024 * 1024

# The bytes are those of Python's json with ", ", ": " and no ASCII escapes, which is what LMI's formatters send.
_TOKEN = b'{"id": %d, "text": %b, "log_prob": %b%b'
_PLAIN, _SPECIAL = b"}", b', "special_token": true}'
_END_OF_SEQUENCE = b'{"id": 0, "text": "", "log_prob": 0.0, "special_token": true}'
_FRAMES = {
    Formatter.JSON: ("application/json", b"", b""),
    Formatter.JSONLINES: ("application/jsonlines", b'{"token": ', b"}\n"),
    # The schema's examples print `data:`, its TGI section and the implementation `data: `; clients take both.
    Formatter.SSE: ("text/event-stream", b'data: {"token": ', b"}\n\n"),
}
_LINES = {formatter: before + _TOKEN + after for formatter, (_, before, after) in _FRAMES.items()}

# LMI's own values, with the semicolon and the UTC that RFC 9111 and RFC 9110 would write otherwise: a cache takes an
# Expires that it cannot read for one in the past, and `private` still stands for itself.
_HEADERS: Headers = (
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"pragma", b"no-cache"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
)


def response_headers() -> Headers:
    """The headers that every LMI answer carries, whatever its status; `content-type` and `x-request-id` are not here."""
    return _HEADERS


def _number(log_prob: float | None) -> bytes:
    """A float as Python writes it, and null where JSON has no number."""
    # Both write the shortest digits that read back as the same double; msgspec does in a quarter of the time, but
    # its exponents differ from Python's, and so does where they begin.
    if type(log_prob) is float and (-1e16 < log_prob <= -1e-4 or log_prob == 0.0):
        return encode(log_prob)
    if log_prob is None or not math.isfinite(log_prob):
        return b"null"
    # float.__repr__ and float(): a numpy scalar must not print as np.float64(...).
    return float.__repr__(float(log_prob)).encode()


@final
class TextEncoder:
    """The bytes of one answer, in the request's formatter: `prefill` and `token` for each token, then `finish`, or
    `error` where it fails. Exactly one of them ends the answer; what is called after it gives no bytes more.

    A stream's last line carries `generated_text`, and `details` if asked for. It is the line of the last token where
    that is known (the token says `finish`, or is number `max_new_tokens`); otherwise `finish` writes one more line
    with an empty special token, which is not counted. What is kept for the last line or the document (the text, the
    prompt's tokens and, in a json answer with details, every token) is bounded by `max_text` bytes, as they will be
    written.
    """

    __slots__ = (
        "_after",
        "_before",
        "_ended",
        "_held",
        "_keeps_tokens",
        "_last",
        "_line",
        "_max",
        "_prefill",
        "_reason",
        "_request",
        "_text",
        "_tokens",
        "content_type",
        "finished",
        "generated_tokens",
        "streaming",
    )

    def __init__(self, request: TextRequest, *, max_text: int = 16 * MiB) -> None:
        self.content_type, self._before, self._after = _FRAMES[request.formatter]
        self._line = _LINES[request.formatter]
        self.streaming = request.formatter is not Formatter.JSON
        """Whether `token` gives bytes, so that the head must be sent before the generation is complete."""
        self.generated_tokens = 0
        self.finished = False
        """The reason of the end is known: no token may follow. A json answer still needs its `finish`."""
        self._request = request
        self._keeps_tokens = request.parameters.details and not self.streaming
        self._last = request.parameters.max_new_tokens
        self._max = max_text
        self._held = 0
        self._text = bytearray()  # escaped, so that the end has nothing left to encode
        self._tokens = bytearray()
        self._prefill = bytearray()
        self._reason = ""
        self._ended = False

    def prefill(self, id: int, text: str, log_prob: float | None) -> None:
        """A token of the prompt, in order. Kept only if the request asks for details and decoder_input_details.
        LMIError above `max_text`, and nothing kept."""
        if self._request.parameters.details and self._request.parameters.decoder_input_details:
            token = _TOKEN % (id, json_string(text), _number(log_prob), _PLAIN)
            held = self._held + len(token) + 2
            if held > self._max:
                raise self._too_long()
            self._held = held
            self._prefill += b", " + token if self._prefill else token

    def token(self, id: int, text: str, log_prob: float | None, special: bool = False, finish: str | None = None) -> bytes:
        """One generated token: its line or event, or nothing for json. A `log_prob` that is not finite becomes null.

        `finish` ("length", "eos_token", "stop_sequence") says that it is the last, and why. Raises LMIError above
        `max_text`, and the token counts for nothing: send `error` then. A token after the last is the caller's
        mistake, LocalProtocolError.
        """
        if self.finished:
            raise LocalProtocolError(f"a token after the last of a generation that ended with {self._reason!r}")
        quoted = json_string(text)
        size = len(quoted) - 2
        line = kept = b""
        if self.streaming:
            line = self._line % (id, quoted, _number(log_prob), _SPECIAL if special else _PLAIN)
        elif self._keeps_tokens:
            kept = _TOKEN % (id, quoted, _number(log_prob), _SPECIAL if special else _PLAIN)
            size += len(kept) + 2
        held = self._held + size
        if held > self._max:
            raise self._too_long()
        self._held = held
        self._text += quoted[1:-1]
        self.generated_tokens += 1
        if kept:
            self._tokens += b", " + kept if self._tokens else kept
        if finish is None:
            if self.generated_tokens != self._last:
                return line
            finish = "length"
        self.finished, self._reason = True, finish
        return self._last_line(line.removesuffix(self._after)) if self.streaming else b""

    def finish(self, reason: str) -> bytes:
        """Completes the answer: json's document; the last line of a stream whose last token did not say that it was.
        A reason that a token has given (or `max_new_tokens`) stands: every formatter reports the same one."""
        if self._ended:
            return b""
        if not self.finished:
            self.finished, self._reason = True, reason
        if self.streaming:
            return self._last_line(self._before + _END_OF_SEQUENCE)
        self._ended = True
        return b"".join((b"{", *self._result(), b"}"))

    def error(self, message: str) -> bytes:
        """Ends a stream whose generation failed with the schema's last line, framed like every other and with the
        message as `error_msg` in its token. For json the whole body, of an answer with status 424."""
        if self._ended:
            return b""
        self._ended = self.finished = True
        self._reason = "error"
        if not self.streaming:
            return generation_error_body(message)
        return b"".join(
            (
                self._before,
                b'{"id": -1, "text": "", "log_prob": -1, "special_token": true, "error_msg": ',
                json_string(message),
                b'}, "generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null}',
                self._after,
            )
        )

    def _too_long(self) -> LMIError:
        return LMIError(
            f"answer: its text and details are at most {self._max} bytes (max_text), the next token would exceed them"
        )

    def _last_line(self, line: bytes) -> bytes:
        self._ended = True
        return b"".join((line, b", ", *self._result(), self._after))

    def _result(self) -> list[Buffer]:
        """The keys that complete an answer, as pieces: the text may be long."""
        asked, inputs = self._request.parameters, json_string(self._request.inputs)
        prompt = inputs[1:-1] if asked.return_full_text else b""
        pieces: list[Buffer] = [b'"generated_text": "', prompt, self._text, b'"']
        if asked.details:
            head = b', "details": {"finish_reason": %b, "generated_tokens": %d, "inputs": '
            pieces += [head % (json_string(self._reason), self.generated_tokens), inputs]
            if self._keeps_tokens:
                pieces += [b', "tokens": [', self._tokens, b"]"]
            if asked.decoder_input_details:
                pieces += [b', "prefill": [', self._prefill, b"]"]
            pieces.append(b"}")
        return pieces


def parse_stream_line(line: Buffer) -> dict[str, Any]:
    """The object of one line of a stream, with or without `data:` before it. RemoteProtocolError if it is none."""
    text = bytes(line).strip().removeprefix(b"data:")
    try:
        document = strict_json.loads(text, what="a line of the stream")
    except strict_json.JSONError as error:
        raise RemoteProtocolError(error.message) from None
    if not isinstance(document, dict):
        raise RemoteProtocolError("a line of the stream is JSON, but not an object")
    return document
