"""LMI answers for text generation, rolling batch: token by token as json, jsonlines or SSE, in LMI's or TGI's form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol, final

from msgspec.json import encode

from protocols import strict_json
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import Buffer, Headers
from protocols.lmi.errors import ErrorType, LMIError, generation_error_body, json_string
from protocols.lmi.request import Formatter, TextRequest
from protocols.lmi.tgi import TGIForm

MiB = 1024 * 1024

# The bytes are those of Python's json with ", ", ": " and no ASCII escapes, which is what LMI's formatters send.
_TOKEN = b'{"id": %d, "text": %b, "log_prob": %b%b'
_PLAIN, _SPECIAL = b"}", b', "special_token": true}'
_EMPTY = b'""'
_FOLD = 64  # texts of tokens that are kept apart before they are put together
_FRAMES = {
    Formatter.JSON: ("application/json", b"", b""),
    Formatter.JSONLINES: ("application/jsonlines", b"", b"\n"),
    # The schema's examples print `data:`, its TGI section and the implementation `data: `; clients take both.
    Formatter.SSE: ("text/event-stream", b"data: ", b"\n\n"),
}
_LINES = {
    formatter: b"" if formatter is Formatter.JSON else before + b'{"token": {"id": %d, "text": %b, "log_prob": %b}}' + after
    for formatter, (_, before, after) in _FRAMES.items()
}

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


class TopToken(Protocol):
    """One of the most probable tokens of a step, as `models.messages.TopToken` is."""

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
    """How an answer is written in LMI's own form: the counterpart of `TGIForm`, which says what each member is for."""

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


_SEPARATOR = b", "  # before each item that is kept, the first too, which costs less than to ask whether it is


def _items(kept: bytearray) -> Buffer:
    return memoryview(kept)[len(_SEPARATOR) :]


@final
class _Continuation:
    """What one sequence has come to, escaped, so that the end has nothing left to encode."""

    __slots__ = ("count", "reason", "text", "tokens", "top")

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""
        self.text = bytearray()
        self.tokens = bytearray()
        self.top = bytearray()


@final
class TextEncoder:
    """The bytes of one answer, in the request's formatter and form: `prefill` and `token` for each token, then
    `finish`, or `error` where it fails. Exactly one of them ends the answer; what is called after it gives no bytes more.

    A stream's last line carries `generated_text`, and `details` if asked for. It is the line of the last token where
    that is known (the token says `finish`, or is number `max_new_tokens`); otherwise `finish` writes one more line
    with an empty special token, which is not counted.

    The document of a request for several sequences (`n`, `best_of` or `num_beams` above 1) has details always, and in
    them the sequences other than 0, which is the best one. Their tokens come in any order. A stream is of sequence 0
    alone: the others are passed over.

    What is kept for the last line or the document (texts, prompt's tokens, the most probable tokens that were asked for,
    in a json answer with details every token, and what each further sequence repeats of the prompt) is bounded by
    `max_text` bytes in all, as they will be written.
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
        """Whether `token` gives bytes, so that the head must be sent before the generation is complete."""
        self.finished = False
        """The reason of the end is known: no token may follow. A json answer still needs its `finish`. One of several
        sequences is not finished before that: nobody else knows whether more begin."""
        self._request = request
        self._form: _LMIForm | TGIForm = _TGI if request.tgi else _LMI
        self._limit = max(asked.n, asked.best_of, asked.num_beams)
        self.several = self._limit > 1 and not self.streaming
        """Whether the sequences beside 0 are in the answer: their tokens may still come when 0 has all of its own."""
        self._details = asked.details or self.several
        self._keeps_tokens = self._details and not self.streaming
        self._keeps_prefill = self._details and asked.decoder_input_details
        self._keeps_top = self._details and asked.top_n_tokens > 0
        self._wants_top = self._keeps_top or (request.tgi and self.streaming and asked.top_n_tokens > 0)
        # Whether `_plain_token` may be called: a token is a line of LMI's, or none, and nothing is kept but its text, as of
        # most answers. No longer once it is finished.
        self._plain = not (request.tgi or self._keeps_tokens or self._keeps_top)
        self._last = asked.max_new_tokens
        self._max = self._room = max_text
        self._best = _Continuation()
        self._texts: list[str] = []
        self._most = 0
        self._fold()
        self._others: dict[int, _Continuation] = {}
        # The bytes that a document has over again for each further sequence.
        self._repeated = len(json_string(request.inputs)) - 2 if self.several and asked.return_full_text else 0
        self._rest = _EMPTY
        self._prefill = bytearray()
        self.prompt_tokens = 0
        """The tokens of the prompt, for TGI's `input_length`: those given to `prefill`, or what is set; 0: nobody knows."""
        self._ended = False

    @property
    def line(self) -> Callable[[int, str, float | None], bytes] | None:
        """What makes a token's line of its id, text and log-probability in the fewest steps: `token`, of one that is not
        special, of sequence 0 and not said to be the last. It is fixed for the whole answer, and not to be called once that
        is `finished`. None where a line says more than that, where none is sent, or where more than the text is kept."""
        return self._plain_token if self._plain and self.streaming else None

    @property
    def generated_tokens(self) -> int:
        """The number of tokens so far, of sequence 0."""
        return self._best.count + len(self._texts)

    def prefill(self, id: int, text: str, log_prob: float | None) -> None:
        """A token of the prompt, in order. Kept only if the request asks for details and decoder_input_details.
        LMIError above `max_text`, and nothing kept."""
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
        """One generated token: its line or event, or nothing for json. A `log_prob` that is not finite becomes null.

        `finish` ("length", "eos_token", "stop_sequence") says that it is the last of its sequence, and why. `top` are the
        most probable tokens of its step, the best first; they are left out where the request does not ask for them.

        Raises LMIError above `max_text`, or for a sequence beyond the number asked for, and the token counts for nothing:
        send `error` then. A token after the last is the caller's mistake, LocalProtocolError.
        """
        if self._plain and finish is None and not (special or sequence):
            return self._plain_token(id, text, log_prob)
        return self._token(id, text, log_prob, special, finish, top, sequence)

    def _plain_token(self, id: int, text: str, log_prob: float | None) -> bytes:
        """`token` in the fewest steps, where `_plain` is true, for one of which nothing else is to be said."""
        quoted = encode_basestring(text).encode() if text.isascii() else json_string(text)  # a call cheaper, for most
        line = self._line
        if line:
            if type(log_prob) is float and -1e16 < log_prob <= -1e-4:  # as in `_number`, which most are spared
                line = line % (id, quoted, encode(log_prob))
            else:
                line = line % (id, quoted, _number(log_prob))
        room = self._room - len(quoted) + 2
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
        """Puts the texts that plain tokens have left into what sequence 0 has come to; again when there are `_most`."""
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
        """`token` in full."""
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
        self._most -= 1  # of those that `_fold` has found left
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
        """Text of a sequence that belongs to no token, since it was held back until the end was known: it is in the
        texts, and in a stream on the line of `finish`, which comes next. LMIError as from `token`."""
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
        """Completes the answer: json's document; the last line of a stream whose last token did not say that it was.
        A reason that a token has given (or `max_new_tokens`) stands: every formatter reports the same one.

        For another `sequence` than 0 it says why that one has ended, and gives no bytes: 0 is finished last. One of
        which nobody says why has ended with "eos_token". LMIError as from `token`, and nothing is said then.
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
        """Ends a stream whose generation failed, by a line or event framed like every other: in LMI's form the schema's
        last line with the message as `error_msg` in its token, in TGI's the object that names the `kind`. For json the
        whole body, of an answer with status 424."""
        if self._ended:
            return b""
        self._ended = True
        self._stop()
        self._best.reason = "error"
        if not self.streaming:
            return self._form.failure_body(message, kind)
        return self._before + self._form.failure(message, kind) + self._after

    def _continuation(self, sequence: int) -> _Continuation | None:
        """What another sequence than 0 has come to, which is new where nothing is held for it. None: it is not
        in this answer."""
        if not 0 < sequence < self._limit:
            expected = f"0 to {self._limit - 1} (n, best_of, num_beams)" if self._limit > 1 else "0, the only one"
            raise LMIError(f"answer: expected a token of sequence {expected}, got one of {sequence}")
        return (self._others.get(sequence) or _Continuation()) if self.several else None

    def _beginning(self, sequence: int) -> int:
        """The bytes that it takes to begin a sequence; none if it has begun."""
        return 0 if sequence in self._others else self._repeated

    def _hold(self, size: int) -> None:
        """Takes so many bytes of the bound; LMIError if there are not so many left, and none taken."""
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
        """The keys that complete an answer, as pieces: the texts may be long."""
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
        """What is said of every sequence, first."""
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
    """The object of one line of a stream, with or without `data:` before it. RemoteProtocolError if it is none."""
    text = bytes(line).strip().removeprefix(b"data:")
    try:
        document = strict_json.loads(text, what="a line of the stream")
    except strict_json.JSONError as error:
        raise RemoteProtocolError(error.message) from None
    if not isinstance(document, dict):
        raise RemoteProtocolError("a line of the stream is JSON, but not an object")
    return document
