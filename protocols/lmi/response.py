"""LMI answers for text generation (rolling batch): token by token as json, jsonlines or SSE, in LMI's or TGI's form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

from msgspec.json import Encoder

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Headers
from protocols.json import strict
from protocols.lmi.errors import ErrorType, LMIError, generation_error_body, json_string
from protocols.lmi.request import Formatter, TextRequest
from protocols.lmi.tgi import TGIForm
from protocols.sse import CONTENT_TYPE

MiB = 1024 * 1024

# The bytes are those of Python's json with ", ", ": " and no ASCII escapes, as LMI's formatters send them.
_TOKEN = b'{"id": %d, "text": %b, "log_prob": %b%b'
_PLAIN, _SPECIAL = b"}", b', "special_token": true}'
_EMPTY = b'""'
_encode = Encoder().encode  # cheaper than msgspec's function, which makes an encoder each time
_FOLD = 64  # texts of tokens that are kept before they are joined
_FRAMES = {
    Formatter.JSON: ("application/json", b"", b""),
    Formatter.JSONLINES: ("application/jsonlines", b"", b"\n"),
    # The schema's examples print `data:`; its TGI section and the implementation `data: `. Clients accept both.
    Formatter.SSE: (CONTENT_TYPE, b"data: ", b"\n\n"),
}
_LINES = {
    formatter: b"" if formatter is Formatter.JSON else before + b'{"token": {"id": %d, "text": %b, "log_prob": %b}}' + after
    for formatter, (_, before, after) in _FRAMES.items()
}

# LMI's own values, semicolon and UTC included. RFC 9111 and RFC 9110 have other forms, but a cache takes an Expires that it
# cannot parse for one in the past, and `private` is still understood.
_HEADERS: Headers = (
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"pragma", b"no-cache"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
)


def response_headers() -> Headers:
    """The headers of every LMI answer, whatever its status, without `content-type` and `x-request-id`."""
    return _HEADERS


def _number(log_prob: float | None) -> bytes:
    """A float as Python writes it, or null if JSON has no such number."""
    # Both write the shortest digits that read back as the same double. msgspec takes a quarter of the time, but its
    # exponents differ from Python's, and begin at other magnitudes.
    if type(log_prob) is float and (-1e16 < log_prob <= -1e-4 or log_prob == 0.0):
        return _encode(log_prob)
    if log_prob is None or not math.isfinite(log_prob):
        return b"null"
    # float.__repr__ and float(): a numpy scalar must not print as np.float64(...).
    return float.__repr__(float(log_prob)).encode()


class TopToken(Protocol):
    """One of the most probable tokens of a step: the interface of `models.messages.TopToken`."""

    @property
    def id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def log_prob(self) -> float | None: ...
    @property
    def special(self) -> bool: ...


@final
class _LMIForm:
    """LMI's own form: the counterpart of `TGIForm`, which documents the members."""

    opening, closing = b"", b""
    absent_details = b""
    event_end = b"}"
    empty_prefill = False

    def token(self, id: int, text: bytes, log_prob: bytes, special: bool) -> bytes:
        return _TOKEN % (id, text, log_prob, _SPECIAL if special else _PLAIN)

    def last(self, text: bytes) -> bytes:
        return _TOKEN % (0, text, b"0.0", _SPECIAL if text == _EMPTY else _PLAIN)

    def prompt_token(self, id: int, text: bytes, log_prob: bytes) -> bytes:
        return _TOKEN % (id, text, log_prob, _PLAIN)

    def event(self, index: int, token: bytes, top: bytes) -> bytes:
        return b'{"token": ' + token

    def facts(self, seed: int | None, prompt_tokens: int, streaming: bool) -> bytes:
        return b""

    def failure(self, message: str, kind: ErrorType) -> bytes:
        return (
            b'{"token": {"id": -1, "text": "", "log_prob": -1, "special_token": true, "error_msg": %b}, "generated_text": '
            b'"", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null}}' % json_string(message)
        )

    def failure_body(self, message: str, kind: ErrorType) -> bytes:
        return generation_error_body(message)


_LMI, _TGI = _LMIForm(), TGIForm()


_SEPARATOR = b", "  # before every item, also the first: a check for the first would cost more


def _items(kept: bytearray) -> Buffer:
    return memoryview(kept)[len(_SEPARATOR) :]


@final
class _Continuation:
    """The state of one sequence, already escaped, so that nothing is left to encode at the end."""

    __slots__ = ("count", "reason", "text", "tokens", "top")

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""
        self.text = bytearray()
        self.tokens = bytearray()
        self.top = bytearray()


@final
class TextEncoder:
    """Makes the bytes of one answer in the request's formatter and form. Call `prefill` and `token` for each token, then
    `finish`, or `error` if the generation fails. One of these two ends the answer; later calls give no bytes.

    A stream's last line has `generated_text`, and `details` if requested. It is the line of the last token if that is known:
    if the token has `finish`, or is number `max_new_tokens`. Otherwise `finish` writes one more line with an empty special
    token, which is not counted.

    The document of a request for several sequences (`n`, `best_of` or `num_beams` above 1) always has details, and in them
    the sequences other than 0, which is the best one. Their tokens come in any order. A stream has sequence 0 alone; tokens
    of other sequences are ignored.

    The data kept for the last line or the document are bounded by `max_text` bytes in total, as they will be written: texts,
    the prompt's tokens, requested top tokens, all tokens of a json answer with details, and the prompt data that each
    further sequence repeats.
    """

    __slots__ = (
        "_after",
        "_before",
        "_best",
        "_details",
        "_ended",
        "_form",
        "_keeps_prefill",
        "_keeps_tokens",
        "_keeps_top",
        "_last",
        "_limit",
        "_line",
        "_max",
        "_most",
        "_others",
        "_plain",
        "_prefill",
        "_repeated",
        "_request",
        "_rest",
        "_room",
        "_texts",
        "_wants_top",
        "content_type",
        "finished",
        "prompt_tokens",
        "several",
        "streaming",
    )

    def __init__(self, request: TextRequest, *, max_text: int = 16 * MiB) -> None:
        asked = request.parameters
        self.content_type, self._before, self._after = _FRAMES[request.formatter]
        self._line = _LINES[request.formatter]
        self.streaming = request.formatter is not Formatter.JSON
        """True if `token` gives bytes, so that the head must be sent before the generation is complete."""
        self.finished = False
        """True if the reason of the end is known: no token may follow. A json answer still needs its `finish`. An answer
        with several sequences is not finished before `finish`, because more sequences may begin."""
        self._request = request
        self._form: _LMIForm | TGIForm = _TGI if request.tgi else _LMI
        self._limit = max(asked.n, asked.best_of, asked.num_beams)
        self.several = self._limit > 1 and not self.streaming
        """True if the answer has the sequences beside 0: their tokens may still come after the last one of 0."""
        self._details = asked.details or self.several
        self._keeps_tokens = self._details and not self.streaming
        self._keeps_prefill = self._details and asked.decoder_input_details
        self._keeps_top = self._details and asked.top_n_tokens > 0
        self._wants_top = self._keeps_top or (request.tgi and self.streaming and asked.top_n_tokens > 0)
        # True while `_plain_token` may be called: a token is LMI's line, or no line, and only its text is kept, as for most
        # answers. False once the answer is finished.
        self._plain = not (request.tgi or self._keeps_tokens or self._keeps_top)
        self._last = asked.max_new_tokens
        self._max = self._room = max_text
        self._best = _Continuation()
        self._texts: list[str] = []
        self._most = 0
        self._fold()
        self._others: dict[int, _Continuation] = {}
        # The bytes that a document repeats for each further sequence.
        self._repeated = len(json_string(request.inputs)) - 2 if self.several and asked.return_full_text else 0
        self._rest = _EMPTY
        self._prefill = bytearray()
        self.prompt_tokens = 0
        """The tokens of the prompt, for TGI's `input_length`: those given to `prefill`, or the value set here. 0:
        unknown."""
        self._ended = False

    @property
    def line(self) -> Callable[[int, str, float | None], bytes] | None:
        """The quickest function that makes a token's line from its id, text and log-probability: `token` for a token of
        sequence 0 that is neither special nor known to be the last. It stays the same for the whole answer, and must not be
        called once that is `finished`. None if a line has more members, if there are no lines, or if more than the text is
        kept."""
        return self._plain_token if self._plain and self.streaming else None

    @property
    def generated_tokens(self) -> int:
        """The number of tokens of sequence 0 so far."""
        return self._best.count + len(self._texts)

    def prefill(self, id: int, text: str, log_prob: float | None) -> None:
        """Takes a token of the prompt, in order. It is kept only if the request asks for details and decoder_input_details.
        LMIError above `max_text`, and the token is not kept."""
        if self._keeps_prefill:
            item = _SEPARATOR + self._form.prompt_token(id, json_string(text), _number(log_prob))
            self._hold(len(item) * (1 + len(self._others)))
            self._repeated += len(item)
            self._prefill += item
        self.prompt_tokens += 1

    def token(
        self,
        id: int,
        text: str,
        log_prob: float | None,
        special: bool = False,
        finish: str | None = None,
        top: Sequence[TopToken] = (),
        sequence: int = 0,
    ) -> bytes:
        """Takes one generated token. Returns its line or event, or nothing for json. A `log_prob` that is not finite becomes
        null.

        `finish` ("length", "eos_token", "stop_sequence") marks the last token of its sequence and gives the reason. `top`
        has the most probable tokens of its step, the best first; they are left out unless the request asks for them.

        LMIError above `max_text`, or for a sequence beyond the requested number, and the token does not count: call `error`
        then. LocalProtocolError for a token after the last.
        """
        if self._plain and finish is None and not (special or sequence):
            return self._plain_token(id, text, log_prob)
        return self._token(id, text, log_prob, special, finish, top, sequence)

    def _plain_token(self, id: int, text: str, log_prob: float | None) -> bytes:
        """Does `token` in the fewest steps, if `_plain` is true and the token has no further data."""
        try:
            quoted = _encode(text) if text.isascii() else json_string(text)
        except TypeError:  # a subclass of str, such as numpy's
            quoted = json_string(text)
        line = self._line
        if line:
            if type(log_prob) is float and log_prob <= -1e-4 and log_prob > -1e16:  # the quick case of `_number`, inlined
                line = line % (id, quoted, _encode(log_prob))
            else:
                line = line % (id, quoted, _number(log_prob))
        room = self._room + (2 - len(quoted))
        if room < 0:
            raise self._too_long()
        self._room = room
        texts = self._texts
        texts.append(text)
        if len(texts) != self._most:
            return line
        self._fold()
        if self._best.count != self._last:
            return line
        self._end(self._best, "length")
        return self._last_line(line.removesuffix(b"}" + self._after)) if line else b""

    def _fold(self) -> None:
        """Adds the texts of plain tokens to sequence 0. It is called again after `_most` tokens."""
        best, texts = self._best, self._texts
        if texts:
            best.text += json_string("".join(texts))[1:-1]
            best.count += len(texts)
            texts.clear()
        rest = self._last - best.count
        self._most = rest if 0 < rest < _FOLD else _FOLD

    def _token(
        self,
        id: int,
        text: str,
        log_prob: float | None,
        special: bool,
        finish: str | None,
        top: Sequence[TopToken],
        sequence: int,
    ) -> bytes:
        """Does `token` in full."""
        self._fold()
        into = self._continuation(sequence) if sequence else self._best
        if into is None:
            return b""
        if self.finished or into.reason:
            reason = into.reason or self._best.reason
            raise LocalProtocolError(f"a token after the last of a generation that ended with {reason!r}")
        form, quoted = self._form, json_string(text)
        token = form.token(id, quoted, _number(log_prob), special)
        tops = self._array(top) if self._wants_top else b""
        size = len(quoted) - 2
        if self._keeps_tokens:
            size += len(token) + len(_SEPARATOR)
        if self._keeps_top:
            size += len(tops) + len(_SEPARATOR)
        if sequence:
            self._hold(size + self._beginning(sequence))
            self._others[sequence] = into
        else:
            self._hold(size)
        into.text += quoted[1:-1]
        into.count += 1
        self._most -= 1  # fewer tokens are left than `_fold` has counted
        if self._keeps_tokens:
            into.tokens += _SEPARATOR + token
        if self._keeps_top:
            into.top += _SEPARATOR + tops
        event = self._before + form.event(into.count, token, tops) if self.streaming else b""
        if finish is None:
            if into.count != self._last:
                return event and event + form.event_end + self._after
            finish = "length"
        self._end(into, finish)
        return event and self._last_line(event)

    def rest(self, text: str, sequence: int = 0) -> None:
        """Takes text of a sequence that belongs to no token, because it was held back until the end was known. It is added
        to the texts and, in a stream, to the line of `finish`, which must come next. LMIError as from `token`."""
        if not text or self._ended:
            return
        self._fold()
        into = self._continuation(sequence) if sequence else self._best
        if into is None or into.reason:
            return
        quoted = json_string(text)
        self._hold(len(quoted) - 2)
        into.text += quoted[1:-1]
        if not sequence:
            self._rest = quoted

    def finish(self, reason: str, sequence: int = 0) -> bytes:
        """Completes the answer: json's document, or the last line of a stream whose last token was not marked. If a token or
        `max_new_tokens` has given a reason, that one stands: every formatter reports the same.

        For a `sequence` other than 0 it gives the reason of that sequence's end, and returns no bytes: 0 must be finished
        last. A sequence without a reason has ended with "eos_token". LMIError as from `token`, and the reason is not taken
        then.
        """
        if self._ended:
            return b""
        self._fold()
        if sequence:
            if (other := self._continuation(sequence)) is not None:
                self._hold(self._beginning(sequence))
                self._others[sequence] = other
                other.reason = other.reason or reason
            return b""
        self._best.reason = self._best.reason or reason
        self._stop()
        form = self._form
        if self.streaming:
            return self._last_line(self._before + form.event(self._best.count + 1, form.last(self._rest), b""))
        self._ended = True
        return b"".join((form.opening, b"{", *self._result(), b"}", form.closing))

    def error(self, message: str, *, kind: ErrorType = "generation") -> bytes:
        """Ends a stream whose generation failed, with one more line or event. In LMI's form it is the schema's last line
        with the message as `error_msg` in its token; in TGI's it is the object with the `kind`. For json it is the whole
        body of an answer with status 424."""
        if self._ended:
            return b""
        self._ended = True
        self._stop()
        self._best.reason = "error"
        if not self.streaming:
            return self._form.failure_body(message, kind)
        return self._before + self._form.failure(message, kind) + self._after

    def _continuation(self, sequence: int) -> _Continuation | None:
        """The state of a sequence other than 0: a new one if nothing is held for it. None if the sequence is not in this
        answer."""
        if not 0 < sequence < self._limit:
            expected = f"0 to {self._limit - 1} (n, best_of, num_beams)" if self._limit > 1 else "0, the only one"
            raise LMIError(f"answer: expected a token of sequence {expected}, got one of {sequence}")
        return (self._others.get(sequence) or _Continuation()) if self.several else None

    def _beginning(self, sequence: int) -> int:
        """The bytes that beginning a sequence takes; 0 if it has begun."""
        return 0 if sequence in self._others else self._repeated

    def _hold(self, size: int) -> None:
        """Takes `size` bytes of the limit. LMIError, and none taken, if there are not enough left."""
        room = self._room - size
        if room < 0:
            raise self._too_long()
        self._room = room

    def _too_long(self) -> LMIError:
        return LMIError(
            f"answer: its text and details are at most {self._max} bytes (max_text), the next token would exceed them"
        )

    def _end(self, continuation: _Continuation, reason: str) -> None:
        continuation.reason = reason
        if not self.several:
            self._stop()

    def _stop(self) -> None:
        self.finished, self._plain = True, False

    def _last_line(self, line: bytes) -> bytes:
        self._ended = True
        return b"".join((line, b", ", *self._result(), b"}", self._after))

    def _result(self) -> list[Buffer]:
        """The keys that complete an answer, as pieces, because the texts may be long."""
        inputs = json_string(self._request.inputs)
        prompt = inputs[1:-1] if self._request.parameters.return_full_text else b""
        pieces: list[Buffer] = [b'"generated_text": "', prompt, self._best.text, b'"']
        if self._details:
            return [*pieces, b', "details": {', *self._details_of_best(inputs, prompt), b"}"]
        return [*pieces, self._form.absent_details] if self.streaming else pieces

    def _details_of_best(self, inputs: bytes, prompt: bytes) -> list[Buffer]:
        best = self._best
        if not self.several:
            return [self._account(best), b', "inputs": ', inputs, *self._lists(best)]
        pieces: list[Buffer] = [b'"inputs": ', inputs, b", ", self._account(best), *self._lists(best)]
        if self._others:
            before = b', "best_of_sequences": ['
            for _, other in sorted(self._others.items()):
                pieces += [before, b"{", self._account(other), *self._lists(other)]
                pieces += [b', "generated_text": "', prompt, other.text, b'"}']
                before = b", "
            pieces.append(b"]")
        return pieces

    def _account(self, continuation: _Continuation) -> bytes:
        """The first keys of every sequence."""
        reason = json_string(continuation.reason or "eos_token")
        facts = self._form.facts(self._request.parameters.seed, self.prompt_tokens, self.streaming)
        return b'"finish_reason": %b, "generated_tokens": %d%b' % (reason, continuation.count, facts)

    def _lists(self, continuation: _Continuation) -> list[Buffer]:
        pieces: list[Buffer] = []
        if self._keeps_tokens:
            pieces += [b', "tokens": [', _items(continuation.tokens), b"]"]
        if self._keeps_prefill or (self._keeps_tokens and self._form.empty_prefill):
            pieces += [b', "prefill": [', _items(self._prefill), b"]"]
        if self._keeps_top:
            pieces += [b', "top_tokens": [', _items(continuation.top), b"]"]
        return pieces

    def _array(self, tokens: Sequence[TopToken]) -> bytes:
        token = self._form.token
        items = (token(t.id, json_string(t.text), _number(t.log_prob), t.special) for t in tokens)
        return b"[" + b", ".join(items) + b"]"


def parse_stream_line(line: Buffer) -> dict[str, Any]:
    """The object of one line of a stream, with or without `data:` before it. RemoteProtocolError if there is none."""
    text = bytes(line).strip().removeprefix(b"data:")
    try:
        document = strict.loads(text, what="a line of the stream", containers=len(text), values=len(text))
    except strict.JSONError as error:
        raise RemoteProtocolError(error.message) from None
    if not isinstance(document, dict):
        raise RemoteProtocolError("a line of the stream is JSON, but not an object")
    return document
