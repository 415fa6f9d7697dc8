"""The common part of the answers to chats and to prompts: choices that begin, grow and finish, whole or as chunks."""

from __future__ import annotations

import abc
import codecs
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, final

import msgspec
from msgspec.json import encode

from protocols.errors import LocalProtocolError
from protocols.events import Buffer
from protocols.json.lines import unbroken
from protocols.lmi.errors import error_body, json_string
from protocols.openai.beside import Beside
from protocols.openai.errors import OpenAIError
from protocols.openai.request import ChatRequest, CompletionRequest
from protocols.sse import CONTENT_TYPE

MiB = 1024 * 1024

_DONE = b"data: [DONE]\n\n"
NULL = b"null"
EMPTY = b'""'
_USAGE = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d%b}'
_SURROGATE = re.compile("[\ud800-\udfff]")
UNLIKELY = -9999.0  # the API's value for every log-probability below it, as JSON has no infinity; of a chat also if unknown
_REASONS = {"eos_token": "stop", "stop_sequence": "stop", "tool_calls": "stop"}
_LMI_REASONS = {"tool_calls": "eos_token"}
CALLED: Mapping[str, str] = {"eos_token": "tool_calls", "stop_sequence": "stop"}
"""The words for the ends of a text that has calls of tools, where they are not the reason itself."""

Columns: TypeAlias = Sequence[bytes]
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


@final
class Notation(msgspec.Struct, frozen=True):
    """JSON as OpenAI writes it or, if `spaced`, with Python's spaces, as LMI's formatters send it."""

    spaced: bool

    def spell(self, structure: bytes) -> bytes:
        """Adds the spaces to JSON that was written without any, and whose strings hold no comma or colon."""
        return structure.replace(b",", b", ").replace(b":", b": ") if self.spaced else structure

    def dump(self, value: object) -> bytes:
        return unbroken(json.dumps(value, ensure_ascii=False).encode() if self.spaced else encode(value))


NOTATIONS = Notation(False), Notation(True)


class ChoiceText:
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
class Choice(ChoiceText):
    """The state of one of the texts of an answer."""

    __slots__ = ("begun", "beside", "in_bytes", "index", "lead", "reason", "reasons", "role", "text", "tokens")

    def __init__(self, index: int, columns: int, reasons: Mapping[str, str]) -> None:
        super().__init__(columns)
        self.index = index
        self.reasons = reasons  # the answer's words for the reasons of the end
        self.beside: Beside | None = None
        self.begun = False
        self.lead = b""  # the bytes before the text, in a chunk with nothing but text
        self.role = b""  # the members beside the text in the next chunk
        self.reason = ""
        self.tokens = 0
        self.in_bytes = False  # True if a token of it came with its own bytes
        self.text = bytearray()  # escaped, so that nothing is left to encode at the end


class AnswerEncoder(abc.ABC):
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
    _shows_thinking = False
    _thoughts = 0
    """The tokens of thinking."""

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
        self._notation = NOTATIONS[lmi]
        self._head = self._notation.dump(head)[:-1]
        columns = len(self._log_prob_arrays) if log_probs and not streaming else 0
        reasons = _LMI_REASONS if lmi else _REASONS
        self._choices = [Choice(index, columns, reasons) for index in range(choices)]
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

        `finish` ("length", "eos_token", "stop_sequence", "tool_calls") marks the last token of its choice, `sequence`, and
        gives the reason. `top` has the most probable tokens of its step, the best first. `data` are the token's own bytes,
        if they are not `text` in UTF-8, and empty if all of its text is that of other tokens; the log-probabilities report
        them. OpenAIError above `max_text`, and the token does not count: call `error` then. LocalProtocolError for a token
        after the last, and for a choice that was not requested.
        """
        choice = self._choice(sequence)
        if choice.reason or self._ended:
            raise LocalProtocolError(f"a token after the last of sequence {sequence}")
        quoted = json_string(text) if text else EMPTY
        started = b"" if choice.begun else self._begin(choice)
        columns: Columns = ()
        choice.in_bytes = choice.in_bytes or bool(data)
        if self._log_probs and (text or not special or self._reports_ends):
            if data is not None:
                own, shown = data, data.decode(errors="replace")
            # its text is that of earlier tokens, which came with their own bytes and have reported them
            elif special and choice.in_bytes:
                own, shown = b"", ""
            else:
                own, shown = clean(text).encode(), text
            if own or not special or self._reports_ends:
                columns = self._report(id, shown, own, log_prob, top, choice.length)
                choice.advance(own)
        if not self.streaming:
            self._keep(choice, quoted[1:-1], columns)
        choice.tokens += 1
        if finish is not None:
            return started + self._close(choice, finish, quoted, columns)
        if not self.streaming or (quoted == EMPTY and not columns):
            return started
        return started + self._write(choice, quoted, columns)

    def thought(self, id: int, text: str, log_prob: float | None, finish: str | None = None, sequence: int = 0) -> bytes:
        """Takes one token of what the model thinks before it answers: it is counted, and no log-probability reports it.
        Returns its chunk, if a stream shows thinking and the token has a text. `finish` and the errors are those of
        `token`."""
        choice = self._growing(sequence)
        quoted = json_string(text) if text and self._shows_thinking else b""
        started = b"" if choice.begun else self._begin(choice)
        if quoted and not self.streaming:
            self._hold(len(quoted) - 2)
            beside = choice.beside = choice.beside or Beside()
            beside.thinking += quoted[1:-1]
        choice.tokens += 1
        self._thoughts += 1
        if quoted and self.streaming:
            started += self._chunk(choice, b'"reasoning_content":' + quoted)
        return started if finish is None else started + self._close(choice, finish)

    def count(self, tokens: int, sequence: int = 0) -> None:
        """Sets the number of a choice's tokens, in place of those that were counted so far."""
        self._choice(sequence).tokens = tokens

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
                said: Sequence[Buffer] = (self._said, b'"', choice.text, b'"')
                if choice.beside is not None:
                    said = choice.beside.message(self._said, choice.text)
                pieces += (*self._pieces(choice, said, columns, choice.reason), spell(b","))
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
    def _begin(self, choice: Choice) -> bytes:
        """Begins a choice. Returns the chunk before that of its first token, if it has one."""

    @abc.abstractmethod
    def _report(self, id: int, text: str, data: bytes, log_prob: float | None, top: Sequence[Top], offset: int) -> Columns:
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
        self._trail = to_log_probs + NULL + to_reason + NULL + after
        if self.streaming:
            for choice in self._choices:
                choice.lead = b"%b%d%b%b" % (before, choice.index, to_said, self._said)

    def _choice(self, sequence: int) -> Choice:
        if not 0 <= sequence < len(self._choices):
            raise LocalProtocolError(f"sequence {sequence} of an answer with {len(self._choices)} choices")
        return self._choices[sequence]

    def _growing(self, sequence: int) -> Choice:
        """The choice, to which something may still come."""
        choice = self._choice(sequence)
        if choice.reason or self._ended:
            raise LocalProtocolError(f"a token after the last of sequence {sequence}")
        return choice

    def _keep(self, choice: Choice, text: bytes, columns: Columns) -> None:
        self._hold(len(text) + sum(map(len, columns)) + len(columns))
        choice.text += text
        if columns:
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

    def _close(self, choice: Choice, reason: str, quoted: bytes = EMPTY, columns: Columns = ()) -> bytes:
        choice.reason = choice.reasons.get(reason, reason)
        self._unfinished -= 1
        if not self.streaming:
            return b""
        if self._lmi:
            return self._write(choice, quoted, columns, choice.reason)
        last = b"" if quoted == EMPTY and not columns else self._write(choice, quoted, columns)
        if choice.beside is not None:
            last += b"".join([self._chunk(choice, member) for member in choice.beside.completed()])
        return last + b"".join(self._pieces(choice, self._closing, (), choice.reason))

    def finish_by_itself(self, sequence: int) -> bytes:
        """Completes a choice whose model has returned without a reason, as `end` does."""
        made, limit = self._choice(sequence).tokens, self._request.parameters.max_new_tokens
        return self.finish("length" if made >= limit else "eos_token", sequence)

    def _finish_all(self) -> bytes:
        n, limit = self._request.n, self._request.parameters.max_new_tokens
        return b"".join(
            [
                self.finish_by_itself(choice.index)
                for choice in self._choices
                if choice.begun or choice.index % n == 0 or not limit
            ]
        )

    def _write(self, choice: Choice, quoted: bytes, columns: Columns, reason: str = "") -> bytes:
        role, choice.role = choice.role, b""
        if not columns and not reason and not self.continuous:
            return b"".join((choice.lead, quoted, role, self._trail))
        return b"".join(self._pieces(choice, (self._said, quoted, role), columns, reason))

    def _pieces(
        self, choice: Choice, said: Sequence[Buffer], columns: Sequence[Buffer], reason: str = ""
    ) -> tuple[Buffer, ...]:
        before, to_said, to_log_probs, to_reason, after = self._around
        report = self._log_probs_of(columns) if columns else NULL
        why = json_string(reason) if reason else NULL
        if self.continuous:
            after = b'%b],"usage":%b}\n\n' % (after, self._usage())
        return before, b"%d" % choice.index, to_said, *said, to_log_probs, report, to_reason, why, after

    def _chunk(self, choice: Choice, member: bytes) -> bytes:
        """A chunk with a member that is not the text."""
        return b"".join(self._pieces(choice, (member,), ()))

    def _append(self, columns: Sequence[bytearray], items: Columns) -> None:
        comma = b", " if self._lmi else b","
        for column, item in zip(columns, items, strict=False):
            if column:
                column += comma
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
        details = b""
        if self._thoughts and not self._lmi:
            details = b',"completion_tokens_details":{"reasoning_tokens":%d}' % min(self._thoughts, made)
        return self._notation.spell(_USAGE % (prompts, made, prompts + made, details))


def shown(other: Top) -> str:
    """The text of an alternative: that of its own bytes if it has them, as of a chosen token."""
    return other.data.decode(errors="replace") if other.data else other.text


def json_number(log_prob: float | None) -> float | None:
    if log_prob is None or math.isnan(log_prob) or log_prob == math.inf:
        return None
    return max(float(log_prob), UNLIKELY)


def clean(text: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot carry."""
    return _SURROGATE.sub("\ufffd", text)
