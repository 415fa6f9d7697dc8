"""Answers of chat completions: a document, a stream of chunks, or one of LMI's two forms."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import final

from protocols.errors import LocalProtocolError
from protocols.lmi.errors import json_string
from protocols.openai.answer import (
    CALLED,
    NOTATIONS,
    UNLIKELY,
    AnswerEncoder,
    Choice,
    Columns,
    MiB,
    Top,
    clean,
    json_number,
    shown,
)
from protocols.openai.beside import Beside
from protocols.openai.request import ChatRequest


class ChatForm(enum.Enum):
    """The form of an answer to a chat; the values of the last two are those of LMI's `option.output_formatter`."""

    OPENAI = "openai"
    """A document, or SSE if a stream is requested."""
    JSON_CHAT = "json_chat"
    """LMI's document, even if a stream is requested: it has no `model`, and LMI's reasons for the end."""
    JSONLINES_CHAT = "jsonlines_chat"
    """LMI's stream, even if none is requested: one chunk on each line, without `model`, usage and `[DONE]`. The reason for
    the end is LMI's too. It is in the chunk of the last token if that token is marked as the last."""


def _parts(lmi: bool, streaming: bool) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """The bytes before the text, the index, the members of a choice, its log-probabilities and its reason."""
    spell = NOTATIONS[lmi].spell
    said, members = (b'"content":', b',"delta":{') if streaming else (b'"role":"assistant","content":', b',"message":{')
    return spell(said), spell(b'{"index":'), spell(members), spell(b'},"logprobs":'), spell(b',"finish_reason":')


_PARTS = {(lmi, streaming): _parts(lmi, streaming) for lmi in (False, True) for streaming in (False, True)}


@final
class ChatEncoder(AnswerEncoder):
    """Makes the bytes of one answer to a chat. Call `prefill` and `token` for each token, `finish` for choices whose last
    token was not marked, then `end` of a stream or `document`; or `error` if the generation fails.

    `id`, `created` (seconds since 1970) and `model` are members of the answer. `prompt_tokens` is the number of the prompt's
    tokens, if it is known. `fingerprint` names the server of the model: text-generation refuses an answer without one. The
    first chunk of each choice of a stream has the role, the last one the reason. The data that a document keeps (texts,
    thinking, calls, log-probabilities) are bounded by `max_text` bytes as they will be written; a stream keeps nothing.

    `thought` takes the tokens of thinking, which is shown apart from the text: not at all unless `show_thinking`, and never
    in LMI's forms. `call` takes the pieces of calls of tools, which LMI's forms do not have. `make_id` makes the id of
    a call that comes without one. By default it follows from `id`, which has to be another one for each answer.
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
        make_id: Callable[[], str] | None = None,
        show_thinking: bool = True,
    ) -> None:
        lmi = form is not ChatForm.OPENAI
        streaming = form is ChatForm.JSONLINES_CHAT if lmi else request.stream
        head: dict[str, object] = {
            "id": id,
            "object": "chat.completion.chunk" if streaming else "chat.completion",
            "created": created,
        }
        named = {"model": clean(model)} | ({"system_fingerprint": fingerprint} if fingerprint else {})
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
        self._make_id = make_id
        self._shows_thinking = show_thinking and not lmi
        self._top = request.top_logprobs
        self._said, before, to_said, to_log_probs, to_reason = _PARTS[lmi, streaming]
        self._surround(before, to_said, to_log_probs, to_reason, b"}")

    def call(
        self,
        index: int,
        id: str,
        name: str,
        arguments: str,
        *,
        sequence: int = 0,
        finish: str | None = None,
        tokens: int = 1,
    ) -> bytes:
        """Takes a piece of a call of a tool. Returns its chunk, or nothing for a document or a piece that says nothing.

        `index` tells the calls of a choice apart. The first piece of each has the `name`, and its `id` unless it is to be
        made; those of later pieces are passed over. `arguments` is a part of the arguments' JSON text, and is copied; if all
        parts are empty, the text is `{}`. On the wire calls are numbered in the order in which they begin. `tokens` are
        counted. A choice with calls that ends by itself ends with the reason "tool_calls".

        `finish` and the errors are those of `token`. OpenAIError with the code `bad_tool_call` for a first piece without a
        name, an index below 0, and more than 1,024 calls of a choice. LocalProtocolError in LMI's forms.
        """
        if self._lmi:
            raise LocalProtocolError("LMI's forms of a chat have no place for calls of tools")
        choice = self._growing(sequence)
        beside = choice.beside or Beside()
        call, head = beside.call(index, id, name, partial(self._id_of, choice))
        piece = json_string(arguments)[1:-1]
        if not self.streaming:
            self._hold(len(head) + len(piece))
            call.whole += head + piece
        beside.calls[index] = call
        call.empty = call.empty and not piece
        choice.beside, choice.reasons = beside, CALLED
        started = b"" if choice.begun else self._begin(choice)
        choice.tokens += tokens
        if self.streaming and (head or piece):
            started += self._chunk(choice, call.delta(head, piece))
        return started if finish is None else started + self._close(choice, finish)

    def _id_of(self, choice: Choice, number: int) -> str:
        """An id for a call."""
        if self._make_id is not None:
            return self._make_id()
        # no chance in here: the head tells this answer from all others
        return f"call_{sha256(b'%b %d %d' % (self._head, choice.index, number)).hexdigest()[:24]}"

    def _begin(self, choice: Choice) -> bytes:
        choice.begun = True
        if not self.streaming:
            return b""
        if self._lmi:  # in the chunk of the first token's text
            choice.role = b', "role": "assistant"'
            return b""
        return b"".join(self._pieces(choice, (b'"role":"assistant","content":""',), ()))

    def _report(self, id: int, text: str, data: bytes, log_prob: float | None, top: Sequence[Top], offset: int) -> Columns:
        most = [_token(shown(other), other.data, other.log_prob) for other in top[: self._top]]
        return (self._notation.dump({**_token(text, data, log_prob), "top_logprobs": most}),)


def _token(text: str, data: bytes, log_prob: float | None) -> dict[str, object]:
    """The report of a token. `bytes` is null if the token has no text and its bytes are unknown. The value of an unknown
    log-probability is a number, which the API's schema requires ("-9999.0 is used to signify that the token is very
    unlikely")."""
    token, number = clean(text), json_number(log_prob)
    number = UNLIKELY if number is None else number
    return {"token": token, "logprob": number, "bytes": list(data or token.encode()) or None}
