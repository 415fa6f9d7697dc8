"""Answers of OpenAI's API: chat completions and completions, whole or as a stream of chunks, and lists of models."""

from __future__ import annotations

import abc
import codecs
import enum
import json
import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias, final

import msgspec
from msgspec.json import encode

from protocols.errors import LocalProtocolError
from protocols.events import Buffer
from protocols.json.lines import unbroken
from protocols.lmi.errors import error_body, json_string
from protocols.openai.errors import OpenAIError
from protocols.openai.request import ChatRequest, CompletionRequest
from protocols.sse import CONTENT_TYPE

MiB = 1024 * 1024

_DONE = b"data: [DONE]\n\n"
_NULL = b"null"
_EMPTY = b'""'
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNLIKELY = -9999.0  # the API's value for every log-probability below it, as JSON has no infinity; of a chat also if unknown
_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}

_Columns: TypeAlias = Sequence[bytes]
"""The report of one token or several: an item for each array of the log-probabilities."""


class Top(Protocol):
    """One of the most probable tokens of a step."""

    @property
    def id(self) -> int: ...

    @property
    def text(self) -> str: ...

    @property
    def log_prob(self) -> float | None: ...

    @property
    def data(self) -> bytes: ...


class ChatForm(enum.Enum):
    """The form of an answer to a chat; the values of the last two are those of LMI's `option.output_formatter`."""

    OPENAI = "openai"
    """A document, or SSE if a stream is requested."""
    JSON_CHAT = "json_chat"
    """LMI's document, even if a stream is requested: it has no `model`, and LMI's reasons for the end."""
    JSONLINES_CHAT = "jsonlines_chat"
    """LMI's stream, even if none is requested: one chunk on each line, without `model`, usage and `[DONE]`. The reason for
    the end is LMI's too. It is in the chunk of the last token if that token is marked as the last."""


@final
class _Notation(msgspec.Struct, frozen=True):
    """JSON as OpenAI writes it or, if `spaced`, with Python's spaces, as LMI's formatters send it."""

    spaced: bool

    def spell(self, structure: bytes) -> bytes:
        """Adds the spaces to JSON that was written without any, and whose strings hold no comma or colon."""
        return structure.replace(b",", b", ").replace(b":", b": ") if self.spaced else structure

    def dump(self, value: object) -> bytes:
        return unbroken(json.dumps(value, ensure_ascii=False).encode() if self.spaced else encode(value))


class _Text:
    """A text that grows by the bytes of its tokens."""

    __slots__ = ("columns", "length", "unfinished")

    def __init__(self, columns: int) -> None:
        self.length = 0  # characters of the tokens' text
        self.unfinished = b""  # the first bytes of its next character
        self.columns = [bytearray() for _ in range(columns)]

    def advance(self, data: bytes) -> None:
        """Counts the characters that these bytes finish."""
        data = self.unfinished + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self.unfinished = data[used:]
        self.length += len(text)


@final
class _Echo(_Text):
    """The report of a prompt that is echoed."""

    __slots__ = ("_ready", "offsets")

    def __init__(self, columns: int) -> None:
        super().__init__(columns)
        self.offsets = array("Q")  # those of its tokens, in their own text
        self._ready = False

    def told(self, prompt: str, truncated: bool) -> Sequence[bytearray]:
        """The report, once all tokens have come. Those of a truncated prompt are its last ones."""
        if not self._ready:
            before = max(0, len(prompt) - self.length) if truncated else 0
            self.columns[0] += b",".join([b"%d" % (before + offset) for offset in self.offsets])
            self.offsets, self._ready = array("Q"), True
        return self.columns


@final
class _Choice(_Text):
    """The state of one of the texts of an answer."""

    __slots__ = ("begun", "in_bytes", "index", "lead", "reason", "role", "text", "tokens")

    def __init__(self, index: int, columns: int) -> None:
        super().__init__(columns)
        self.index = index
        self.begun = False
        self.lead = b""  # the bytes before the text, in a chunk with nothing but text
        self.role = b""  # the members beside the text in the next chunk
        self.reason = ""
        self.tokens = 0
        self.in_bytes = False  # True if a token of it came with its own bytes
        self.text = bytearray()  # escaped, so that nothing is left to encode at the end


class _Encoder(abc.ABC):
    """The common part of both APIs' answers: choices that begin, grow and finish, and counted tokens.

    A chunk and a choice of a document have the same parts. `_around` has the bytes before the index, before the choice's
    members (`_said` and its text), before its log-probabilities, before its reason, and after that.
    """

    _log_prob_arrays: tuple[bytes, ...]
    _reports_ends: bool
    """True if the log-probabilities also have the special tokens that have no text."""
    _said: bytes
    _around: tuple[bytes, bytes, bytes, bytes, bytes]
    _closing: tuple[bytes, ...]
    """The members beside the reason, in the chunk of a reason."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        head: Mapping[str, object],
        *,
        choices: int,
        log_probs: bool,
        streaming: bool,
        lmi: bool,
        prompt_tokens: int | None,
        max_text: int,
    ) -> None:
        self.streaming = streaming
        """True if `token` gives bytes, so that the head must be sent before the generation is complete."""
        self.prompt_tokens = prompt_tokens
        """The tokens of all prompts. None: the tokens given to `prefill` are counted; without any, the answer has 0. It may
        be set until the end."""
        self._request = request
        self._lmi = lmi
        self.continuous = streaming and not lmi and request.continuous_usage
        """True if each chunk counts the tokens so far."""
        self._notation = _Notation(lmi)
        self._head = self._notation.dump(head)[:-1]
        self._choices = [_Choice(index, len(self._log_prob_arrays)) for index in range(choices)]
        self._unfinished = choices
        self._log_probs = log_probs
        self._prefilled = 0
        self._max = max_text
        self._held = 0
        self._ended = False

    @property
    def finished(self) -> bool:
        """True if every requested choice is complete: no token may follow. The answer still needs its end."""
        return self._ended or not self._unfinished

    @property
    def tells_usage(self) -> bool:
        """True if the answer counts tokens: a document always does, a stream if it was requested."""
        return not self.streaming or self.continuous or (self._request.include_usage and not self._lmi)

    @property
    def generated_tokens(self) -> int:
        """The number of tokens of all choices, special ones included."""
        return sum([choice.tokens for choice in self._choices])

    @property
    def content_type(self) -> str:
        if not self.streaming:
            return "application/json"
        return "application/jsonlines" if self._lmi else CONTENT_TYPE

    def prefill(
        self,
        id: int,
        text: str,
        log_prob: float | None,
        prompt: int = 0,
        top: Sequence[Top] = (),
        data: bytes = b"",
    ) -> None:
        """Takes a token of a prompt, in order, before the first generated one; `top` and `data` are as those of `token`.
        OpenAIError above `max_text`."""
        self._prefilled += 1

    def lead(self, sequence: int) -> int:
        """About the bytes that a choice's first chunk has before those of its own token."""
        return 0

    def token(
        self,
        id: int,
        text: str,
        log_prob: float | None,
        special: bool = False,
        finish: str | None = None,
        top: Sequence[Top] = (),
        sequence: int = 0,
        data: bytes | None = None,
    ) -> bytes:
        """Takes one generated token. Returns its chunk, or nothing for a document. A special token without text is counted,
        and reported by completions alone; a token with neither text nor report has no chunk.

        `finish` ("length", "eos_token", "stop_sequence") marks the last token of its choice, `sequence`, and gives the
        reason. `top` has the most probable tokens of its step, the best first. `data` are the token's own bytes, if they are
        not `text` in UTF-8, and empty if all of its text is that of other tokens; the log-probabilities report them.
        OpenAIError above `max_text`, and the token does not count: call `error` then. LocalProtocolError for a token after
        the last, and for a choice that was not requested.
        """
        choice = self._choice(sequence)
        if choice.reason or self._ended:
            raise LocalProtocolError(f"a token after the last of sequence {sequence}")
        quoted = json_string(text) if text else _EMPTY
        started = b"" if choice.begun else self._begin(choice)
        columns: _Columns = ()
        choice.in_bytes = choice.in_bytes or bool(data)
        if self._log_probs and (text or not special or self._reports_ends):
            if data is not None:
                own, shown = data, data.decode(errors="replace")
            # its text is that of earlier tokens, which came with their own bytes and have reported them
            elif special and choice.in_bytes:
                own, shown = b"", ""
            else:
                own, shown = _clean(text).encode(), text
            if own or not special or self._reports_ends:
                columns = self._report(id, shown, own, log_prob, top, choice.length)
                choice.advance(own)
        if not self.streaming:
            self._keep(choice, quoted[1:-1], columns)
        choice.tokens += 1
        if finish is not None:
            return started + self._close(choice, finish, quoted, columns)
        if not self.streaming or (quoted == _EMPTY and not columns):
            return started
        return started + self._write(choice, quoted, columns)

    def rest(self, text: str, sequence: int = 0) -> bytes:
        """Takes text of a choice that belongs to no token, because it was held back until the end was known. Returns its
        chunk, or nothing for a document or an empty text. OpenAIError above `max_text`."""
        choice = self._choice(sequence)
        if not text or choice.reason or self._ended:
            return b""
        quoted = json_string(text)
        started = b"" if choice.begun else self._begin(choice)
        choice.length += len(text)
        if self.streaming:
            return started + self._write(choice, quoted, ())
        self._keep(choice, quoted[1:-1], ())
        return started

    def finish(self, reason: str, sequence: int = 0) -> bytes:
        """Completes a choice. Returns the chunk with the reason, or nothing for a document. The first reason stands."""
        choice = self._choice(sequence)
        if choice.reason or self._ended:
            return b""
        started = b"" if choice.begun else self._begin(choice)
        return started + self._close(choice, reason)

    def end(self) -> bytes:
        """Ends a stream. Returns the reasons of choices that are not finished yet ("length" after `max_new_tokens` tokens,
        else the end of the sequence), the usage if requested, and `[DONE]`. Nothing if the stream has ended.

        The first choice of each prompt is always there. Others are missing if a model makes fewer than requested, unless no
        token was requested.
        """
        if not self.streaming:
            raise LocalProtocolError("an answer that is no stream ends by its document")
        if self._ended:
            return b""
        reasons = self._finish_all()
        usage = self._usage() if self._request.include_usage and not self._lmi else b""
        self._ended = True  # only now: if making the end fails, `error` must still work
        if self._lmi:
            return reasons
        chunk = b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, usage) if usage else b""
        return b"".join((reasons, chunk, _DONE))

    def document(self) -> bytes:
        """The whole answer without a stream; its choices are finished as by `end`. Nothing if the answer has ended."""
        if self.streaming:
            raise LocalProtocolError("a stream ends by its end")
        if self._ended:
            return b""
        self._finish_all()
        self._ended = True
        spell = self._notation.spell
        pieces: list[Buffer] = [self._head, spell(b',"choices":[')]
        for choice in self._choices:
            if choice.begun:
                columns = choice.columns if self._log_probs else ()
                text = (self._said, b'"', choice.text, b'"')
                pieces += (*self._pieces(choice, text, columns, choice.reason), spell(b","))
        pieces[-1] = spell(b'],"usage":')  # in place of the last comma
        return b"".join((*pieces, self._usage(), b"}"))

    def error(self, error: str | OpenAIError, status: int | None = None) -> bytes:
        """Ends an answer that failed. Returns the event or line of a stream, after which no `[DONE]` may come, or the body
        of an answer with `status` (default 500, or 424 in LMI's forms). An OpenAIError is sent as it is, a text as the error
        of `OpenAIError.of_status`. Nothing if the answer has ended."""
        if self._ended:
            return b""
        self._ended = True
        if self._lmi:
            message, status = (error, status or 424) if isinstance(error, str) else (error.message, error.status)
            body = error_body(message, status)
            return body + b"\n" if self.streaming else body
        body = (OpenAIError.of_status(status or 500, error) if isinstance(error, str) else error).body()
        return b"data: %b\n\n" % body if self.streaming else body

    @abc.abstractmethod
    def _begin(self, choice: _Choice) -> bytes:
        """Begins a choice. Returns the chunk before that of its first token, if it has one."""

    @abc.abstractmethod
    def _report(self, id: int, text: str, data: bytes, log_prob: float | None, top: Sequence[Top], offset: int) -> _Columns:
        """The log-probabilities of a token. `offset` is its position in the text, in characters. `data` are its bytes, if
        they are not those of `text`."""

    def _surround(self, before: bytes, to_said: bytes, to_log_probs: bytes, to_reason: bytes, after: bytes) -> None:
        if self.streaming:
            event, end = (b"", b"\n") if self._lmi else (b"data: ", b"\n\n")
            # "All other chunks will also include a usage field, but with a null value."
            usage = b',"usage":null' if self._request.include_usage and not (self._lmi or self.continuous) else b""
            before = event + self._head + self._notation.spell(b',"choices":[') + before
            if not self.continuous:  # otherwise the rest differs from chunk to chunk
                after = b"%b]%b}%b" % (after, usage, end)
        self._around = before, to_said, to_log_probs, to_reason, after
        self._trail = to_log_probs + _NULL + to_reason + _NULL + after
        for choice in self._choices:
            choice.lead = b"%b%d%b%b" % (before, choice.index, to_said, self._said)

    def _choice(self, sequence: int) -> _Choice:
        if not 0 <= sequence < len(self._choices):
            raise LocalProtocolError(f"sequence {sequence} of an answer with {len(self._choices)} choices")
        return self._choices[sequence]

    def _keep(self, choice: _Choice, text: bytes, columns: _Columns) -> None:
        self._hold(len(text) + sum(map(len, columns)) + len(columns))
        choice.text += text
        self._append(choice.columns, columns)

    def _hold(self, size: int) -> None:
        if self._held + size > self._max:
            raise OpenAIError(
                f"answer: its text and details are at most {self._max} bytes (max_text), the next token would exceed them",
                500,
                "server_error",
                code="answer_too_long",
            )
        self._held += size

    def _close(self, choice: _Choice, reason: str, quoted: bytes = _EMPTY, columns: _Columns = ()) -> bytes:
        choice.reason = reason if self._lmi else _REASONS.get(reason, reason)
        self._unfinished -= 1
        if not self.streaming:
            return b""
        if self._lmi:
            return self._write(choice, quoted, columns, choice.reason)
        last = b"" if quoted == _EMPTY and not columns else self._write(choice, quoted, columns)
        return last + b"".join(self._pieces(choice, self._closing, (), choice.reason))

    def _finish_all(self) -> bytes:
        n, limit = self._request.n, self._request.parameters.max_new_tokens
        return b"".join(
            [
                self.finish("length" if choice.tokens == limit else "eos_token", choice.index)
                for choice in self._choices
                if choice.begun or choice.index % n == 0 or not limit
            ]
        )

    def _write(self, choice: _Choice, quoted: bytes, columns: _Columns, reason: str = "") -> bytes:
        role, choice.role = choice.role, b""
        if not columns and not reason and not self.continuous:
            return b"".join((choice.lead, quoted, role, self._trail))
        return b"".join(self._pieces(choice, (self._said, quoted, role), columns, reason))

    def _pieces(
        self, choice: _Choice, said: Sequence[Buffer], columns: Sequence[Buffer], reason: str = ""
    ) -> tuple[Buffer, ...]:
        before, to_said, to_log_probs, to_reason, after = self._around
        report = self._log_probs_of(columns) if columns else _NULL
        why = json_string(reason) if reason else _NULL
        if self.continuous:
            after = b'%b],"usage":%b}\n\n' % (after, self._usage())
        return before, b"%d" % choice.index, to_said, *said, to_log_probs, report, to_reason, why, after

    def _append(self, columns: Sequence[bytearray], items: _Columns) -> None:
        for column, item in zip(columns, items, strict=False):
            if column:
                column += self._notation.spell(b",")
            column += item

    def _log_probs_of(self, columns: Sequence[Buffer]) -> bytes:
        spell = self._notation.spell
        arrays = [
            b"".join((spell(b'"%b":' % name), b"[", items, b"]"))
            for name, items in zip(self._log_prob_arrays, columns, strict=True)
        ]
        return b"{%b}" % spell(b",").join(arrays)

    def _usage(self) -> bytes:
        # Always an object with numbers: clients add them up, and several fail at a null. 0 means that no one counted.
        prompts = self._prefilled if self.prompt_tokens is None else self.prompt_tokens
        made = self.generated_tokens
        return self._notation.dump({"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made})


@final
class ChatEncoder(_Encoder):
    """Makes the bytes of one answer to a chat. Call `prefill` and `token` for each token, `finish` for choices whose last
    token was not marked, then `end` of a stream or `document`; or `error` if the generation fails.

    `id`, `created` (seconds since 1970) and `model` are members of the answer. `prompt_tokens` is the number of the prompt's
    tokens, if it is known. `fingerprint` names the server of the model: text-generation refuses an answer without one. The
    first chunk of each choice of a stream has the role, the last one the reason. The data that a document keeps (texts,
    log-probabilities) are bounded by `max_text` bytes as they will be written; a stream keeps nothing.
    """

    _log_prob_arrays = (b"content",)
    _reports_ends = False
    _closing = ()

    def __init__(
        self,
        request: ChatRequest,
        *,
        id: str,
        created: int,
        model: str,
        form: ChatForm = ChatForm.OPENAI,
        fingerprint: str = "",
        prompt_tokens: int | None = None,
        max_text: int = 16 * MiB,
    ) -> None:
        lmi = form is not ChatForm.OPENAI
        streaming = form is ChatForm.JSONLINES_CHAT if lmi else request.stream
        head: dict[str, object] = {
            "id": id,
            "object": "chat.completion.chunk" if streaming else "chat.completion",
            "created": created,
        }
        named = {"model": _clean(model)} | ({"system_fingerprint": fingerprint} if fingerprint else {})
        super().__init__(
            request,
            head if lmi else {**head, **named},
            choices=request.n,
            log_probs=request.logprobs,
            streaming=streaming,
            lmi=lmi,
            prompt_tokens=prompt_tokens,
            max_text=max_text,
        )
        self._top = request.top_logprobs
        spell = self._notation.spell
        self._said = spell(b'"content":' if streaming else b'"role":"assistant","content":')
        to_said = spell(b',"delta":{' if streaming else b',"message":{')
        between = spell(b'},"logprobs":'), spell(b',"finish_reason":')
        self._surround(spell(b'{"index":'), to_said, *between, b"}")

    def _begin(self, choice: _Choice) -> bytes:
        choice.begun = True
        if not self.streaming:
            return b""
        if self._lmi:  # in the chunk of the first token's text
            choice.role = b', "role": "assistant"'
            return b""
        return b"".join(self._pieces(choice, (b'"role":"assistant","content":""',), ()))

    def _report(self, id: int, text: str, data: bytes, log_prob: float | None, top: Sequence[Top], offset: int) -> _Columns:
        most = [_token(_shown(other), other.data, other.log_prob) for other in top[: self._top]]
        return (self._notation.dump({**_token(text, data, log_prob), "top_logprobs": most}),)


@final
class CompletionEncoder(_Encoder):
    """Makes the bytes of one answer to prompts, as `ChatEncoder` does. The `sequence` of a token is the index of its choice,
    which is `p * n + s` for sequence `s` of prompt `p`.

    With `echo` each choice begins with its prompt, in a separate chunk. With `logprobs` too, it reports the prompt's tokens
    from `prefill`; they are bounded by `max_text` together with the data that a document keeps.

    The log-probabilities have one item for each token, special ones included: lm_eval leaves out the last one, which is the
    generated token, whatever it is.
    """

    _log_prob_arrays = (b"text_offset", b"token_logprobs", b"tokens", b"top_logprobs")
    _reports_ends = True
    _said = b'"text":'
    _closing = (b'"text":""',)

    def __init__(
        self,
        request: CompletionRequest,
        *,
        id: str,
        created: int,
        model: str,
        prompt_tokens: int | None = None,
        max_text: int = 16 * MiB,
    ) -> None:
        super().__init__(
            request,
            {"id": id, "object": "text_completion", "created": created, "model": _clean(model)},
            choices=len(request.prompts) * request.n,
            log_probs=request.logprobs is not None,
            streaming=request.stream,
            lmi=False,
            prompt_tokens=prompt_tokens,
            max_text=max_text,
        )
        self._prompts = request.prompts if request.echo else ()
        self._n = request.n
        self._top = request.logprobs or 0
        self._truncated = request.parameters.truncate is not None
        self._echoes = [_Echo(len(self._log_prob_arrays)) for _ in self._prompts if self._log_probs]
        self._surround(b'{"index":', b",", b',"logprobs":', b',"finish_reason":', b"}")

    def prefill(
        self,
        id: int,
        text: str,
        log_prob: float | None,
        prompt: int = 0,
        top: Sequence[Top] = (),
        data: bytes = b"",
    ) -> None:
        if self._echoes:
            echo = self._echoes[prompt]
            shown, own = (data.decode(errors="replace"), data) if data else (text, _clean(text).encode())
            offset, *columns = self._report(id, shown, own, log_prob, top, echo.length)
            self._hold(len(offset) + sum(map(len, columns)) + 1 + len(columns))
            echo.offsets.append(echo.length)
            self._append(echo.columns[1:], columns)
            echo.advance(own)
        super().prefill(id, text, log_prob, prompt, top, data)

    def lead(self, sequence: int) -> int:
        if not self._prompts or (choice := self._choice(sequence)).begun:
            return 0
        number = choice.index // self._n
        columns = self._echoes[number].columns if self._echoes else ()
        return len(self._prompts[number]) + sum(map(len, columns))

    def _begin(self, choice: _Choice) -> bytes:
        out = b""
        if self._prompts:
            number = choice.index // self._n
            text = self._prompts[number]
            prompt = json_string(text)
            columns = self._echoes[number].told(text, self._truncated) if self._log_probs else ()
            if self.streaming:
                out = b"".join(self._pieces(choice, (self._said, prompt), columns))
            else:
                self._keep(choice, prompt[1:-1], [bytes(column) for column in columns])
            choice.length = len(text)
        choice.begun = True
        return out

    def _report(self, id: int, text: str, data: bytes, log_prob: float | None, top: Sequence[Top], offset: int) -> _Columns:
        number, token = _number(log_prob), _clean(text)
        most: dict[str, float | None] = {}
        ids: dict[str, int] = {}
        for other in top[: self._top]:
            name, value = _clean(_shown(other)), _number(other.log_prob)
            if name == token and (other.id == id or value == number):
                most[token] = number  # the chosen one
            elif name != token and ids.setdefault(name, other.id) == other.id:
                most.setdefault(name, value)
            else:  # another token with the same text, under the name that vLLM can give it
                most.setdefault(f"token_id:{other.id}", value)
        # "The API will always return the logprob of the sampled token"; the first of a prompt has none.
        most.setdefault(token, number)
        tops = unbroken(encode(most)) if top or number is not None else _NULL
        return b"%d" % offset, encode(number), json_string(token), tops


def _token(text: str, data: bytes, log_prob: float | None) -> dict[str, object]:
    """The report of a token. `bytes` is null if the token has no text and its bytes are unknown. The value of an unknown
    log-probability is a number, which the API's schema requires ("-9999.0 is used to signify that the token is very
    unlikely")."""
    token, number = _clean(text), _number(log_prob)
    number = _UNLIKELY if number is None else number
    return {"token": token, "logprob": number, "bytes": list(data or token.encode()) or None}


def _shown(other: Top) -> str:
    """The text of an alternative: that of its own bytes if it has them, as of a chosen token."""
    return other.data.decode(errors="replace") if other.data else other.text


def _number(log_prob: float | None) -> float | None:
    if log_prob is None or math.isnan(log_prob) or log_prob == math.inf:
        return None
    return max(float(log_prob), _UNLIKELY)


def _clean(text: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot carry."""
    return _SURROGATE.sub("\ufffd", text)


def model_body(name: str, *, created: int, owned_by: str = "everywire", context: int = 0) -> bytes:
    """The body of `GET /v1/models/{model}`. `created` is in seconds since 1970. `context`: as in `models_body`."""
    return encode(_model(name, created, owned_by, context))


def models_body(
    models: Iterable[tuple[str, int]], *, owned_by: str = "everywire", contexts: Mapping[str, int] | None = None
) -> bytes:
    """The body of `GET /v1/models`, for names and their creation times. `contexts` has the most tokens of prompt and answer
    together by name: vLLM's `max_model_len`, which a model whose number is unknown (0) does not have."""
    told = {} if contexts is None else contexts
    return encode(
        {"object": "list", "data": [_model(name, created, owned_by, told.get(name, 0)) for name, created in models]}
    )


def _model(name: str, created: int, owned_by: str, context: int) -> dict[str, object]:
    model: dict[str, object] = {"id": _clean(name), "object": "model", "created": created, "owned_by": owned_by}
    return {**model, "max_model_len": context} if context else model
