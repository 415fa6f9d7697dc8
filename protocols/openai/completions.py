"""Answers of completions: a document, or a stream of chunks, with the prompt first where `echo` asks for it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import final

from msgspec.json import encode

from protocols.json.lines import unbroken
from protocols.lmi.errors import json_string
from protocols.openai.answer import NULL, AnswerEncoder, Choice, ChoiceText, Columns, MiB, Top, clean, json_number, shown
from protocols.openai.request import CompletionRequest


@final
class _Echo(ChoiceText):
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
class CompletionEncoder(AnswerEncoder):
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
            {"id": id, "object": "text_completion", "created": created, "model": clean(model)},
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
            shown, own = (data.decode(errors="replace"), data) if data else (text, clean(text).encode())
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

    def _begin(self, choice: Choice) -> bytes:
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

    def _report(self, id: int, text: str, data: bytes, log_prob: float | None, top: Sequence[Top], offset: int) -> Columns:
        number, token = json_number(log_prob), clean(text)
        most: dict[str, float | None] = {}
        ids: dict[str, int] = {}
        for other in top[: self._top]:
            name, value = clean(shown(other)), json_number(other.log_prob)
            if name == token and (other.id == id or value == number):
                most[token] = number  # the chosen one
            elif name != token and ids.setdefault(name, other.id) == other.id:
                most.setdefault(name, value)
            else:  # another token with the same text, under the name that vLLM can give it
                most.setdefault(f"token_id:{other.id}", value)
        # "The API will always return the logprob of the sampled token"; the first of a prompt has none.
        most.setdefault(token, number)
        tops = unbroken(encode(most)) if top or number is not None else NULL
        return b"%d" % offset, encode(number), json_string(token), tops
