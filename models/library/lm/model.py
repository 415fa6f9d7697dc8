"""A real but small language model: a 5-gram with modified Kneser-Ney smoothing, in numpy, on byte-pair tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt
import trio
from msgspec import structs

from models.library.lm.output import Output, top_tokens
from models.library.lm.parameters import check, delay_seconds, settled
from models.library.lm.sampling import BadSequences, Chooser, Floats, Integers, Processors
from models.library.lm.search import BeamSearch
from models.library.lm.tokenizer import EOS, TextStream, Tokenizer, pieces
from models.messages import Finish, FinishReason, GenerationParameters, Prompt, Token
from models.session import Session

Choose: TypeAlias = Callable[[Floats], int]

TABLES = Path(__file__).parents[1] / "data" / "lm.npz"
PARAMETERS = frozenset(
    (
        "do_sample", "seed", "temperature", "repetition_penalty", "top_k", "top_p", "min_p", "typical_p",
        "presence_penalty", "frequency_penalty", "logit_bias", "max_new_tokens", "limited", "min_length", "ignore_eos_token",
        "stop_sequences", "stop_token_ids", "include_stop_str_in_output", "bad_sequences", "n", "best_of", "num_beams",
        "length_penalty", "early_stopping", "truncate", "skip_special_tokens", "spaces_between_special_tokens",
        "decoder_input_details", "top_n_tokens", "logprobs", "prompt_logprobs",
    )
)  # fmt: skip
"""The parameters that it acts on: all except those that only concern the form of the answer."""

# A piece has at most 24 characters, which are merged in well under 0.1 ms; most pieces are one look-up in a cache.
_PIECES_PER_CHECKPOINT = 256
# A token takes from 0.06 ms, greedy, to some 0.5 ms with every parameter; a piece of a search takes up to 0.2 ms.
_TOKENS_PER_CHECKPOINT = 8
_PIECES_OF_SEARCH_PER_CHECKPOINT = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The n-grams of one length, as children of their first n - 1 tokens.

    The children of context `c` are the rows `start[c]` to `start[c + 1]`: `token` (ascending in each context) and `gain`,
    the discounted share of the context's count. `rest[c]` is the mass that the discount leaves for the shorter context.
    """

    start: npt.NDArray[np.int32]
    token: npt.NDArray[np.uint16]
    gain: Floats
    rest: Floats

    def find(self, context: int, token: int) -> int | None:
        """The row of context + token, which is the number of this context on the next level."""
        first, end = self.start[context], self.start[context + 1]
        row = int(first + self.token[first:end].searchsorted(np.uint16(token)))
        return row if row < end and self.token[row] == token else None


def level(fanout: Integers, token: npt.NDArray[np.uint16], count: Integers, discounts: Floats) -> Level:
    """Makes a level of stored counts. `fanout` has the number of children of each context, `discounts` the amounts
    subtracted from the counts 0, 1, 2 and all above (modified Kneser-Ney: Chen and Goodman 1998)."""
    start = np.concatenate(([0], np.cumsum(fanout, dtype=np.int32)), dtype=np.int32)
    context = np.repeat(np.arange(len(fanout)), fanout)
    total = np.bincount(context, weights=count, minlength=len(fanout))
    gain = (count - discounts[np.minimum(count, 3)]) / total[context]
    rest: Floats = 1.0 - np.bincount(context, weights=gain, minlength=len(fanout)).astype(np.float64)
    return Level(start=start, token=token, gain=gain, rest=rest)


@final
class LanguageModel:
    """Continues prompts (family TEXT) in the style of the Python standard library's documentation strings.

    One token costs a fraction of a millisecond, so it computes on the event loop and awaits every `send`: a client that
    stops reading stops it at the next token. `log_prob` is the natural logarithm of the model's own probability for the
    token, before temperature, penalty and filters.
    """

    parameters = PARAMETERS | {"delay_ms"}

    def __init__(self, tokenizer: Tokenizer, unigrams: Floats, levels: Sequence[Level]) -> None:
        self.tokenizer = tokenizer
        self._unigrams = unigrams
        self._levels = levels

    @classmethod
    def load(cls, path: Path | str | None = None) -> LanguageModel:
        """Reads the tables that `scripts/train_lm.py` wrote; without a path, those of the package."""
        with np.load(TABLES if path is None else path, allow_pickle=False) as tables:
            tokenizer = Tokenizer((int(left), int(right)) for left, right in tables["merges"])
            discounts = tables["discounts"]
            root = level(
                np.array([len(tokenizer)]), np.arange(len(tokenizer), dtype=np.uint16), tables["count1"], discounts[0]
            )
            levels = [
                level(tables[f"fanout{n}"], tables[f"token{n}"], tables[f"count{n}"], discounts[n - 1])
                for n in range(2, len(discounts) + 1)
            ]
        return cls(tokenizer, root.gain + root.rest / len(tokenizer), levels)

    @property
    def order(self) -> int:
        """The length of the longest n-gram: `order` - 1 tokens of context count."""
        return len(self._levels) + 1

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids)

    def next_log_probs(self, context: Sequence[int]) -> Floats:
        """Natural log-probabilities of every token after these ids; their exponentials sum to 1.

        A text starts after EOS: begin the context with it where the text begins. Only the last `order` - 1 ids count;
        ValueError if one of them is outside the vocabulary.
        """
        recent = context[-len(self._levels) :]
        if not all(0 <= token < len(self.tokenizer) for token in recent):
            raise ValueError(f"context: expected token ids from 0 to {len(self.tokenizer) - 1}, got {list(recent)}")
        probabilities = self._unigrams.copy()
        for length in range(1, len(recent) + 1):
            row = self._context(recent[-length:])
            if row is None:
                break  # if a context was never seen, no longer one was
            at = self._levels[length - 1]
            first, end = at.start[row], at.start[row + 1]
            probabilities *= at.rest[row]
            probabilities[at.token[first:end]] += at.gain[first:end]
        return np.log(probabilities)

    def _context(self, ids: Sequence[int]) -> int | None:
        """The number of this context on its level; None if the training text has no continuation of it."""
        row = ids[0]
        for at, token in zip(self._levels, ids[1:], strict=False):
            found = at.find(row, token)
            if found is None:
                return None
            row = found
        return row

    def generate(self, prompt_ids: Sequence[int], parameters: GenerationParameters, sequence: int = 0) -> Iterator[Token]:
        """Yields the continuation, token by token; the last one has the reason. Nothing if `max_new_tokens` is 0.

        The scores are computed in this order: logit_bias; min_length, ignore_eos_token and bad_sequences, which exclude
        tokens; repetition_penalty (over prompt and output); presence_penalty and frequency_penalty (over the output). If
        `do_sample` is False, or the temperature 0, the token with the highest score is taken. Otherwise one is drawn after
        temperature, top_k (below 1: off), top_p, min_p and typical_p, in this order.

        The same seed gives the same text, and a different one for each `sequence`. Parameters that compare several sequences
        (n, best_of, num_beams) or concern the prompt (truncate, decoder_input_details, prompt_logprobs) are ignored here:
        the model handles them when it is called with a session. ModelError (status 424) for a parameter outside its range.
        """
        check(parameters, len(self.tokenizer))
        bad = BadSequences(self.tokenizer, parameters.bad_sequences)
        processors = Processors(parameters, len(self.tokenizer), prompt_ids, bad)
        return self._tokens(prompt_ids, parameters, Chooser(parameters, processors, sequence), sequence)

    def prefill(self, prompt_ids: Sequence[int], top: int = 0) -> Iterator[Token]:
        """Yields the prompt's own tokens, as `decoder_input_details` asks for them, each with the `top` most probable ones
        in its place. The first has neither a log-probability nor alternatives."""
        text = TextStream(self.tokenizer)
        for index, token in enumerate(prompt_ids):
            context = [EOS, *prompt_ids[max(0, index - len(self._levels)) : index]]
            log_probs = self.next_log_probs(context) if index else None
            yield Token(
                text=text.feed(token),
                id=token,
                log_prob=None if log_probs is None else float(log_probs[token]),
                prefill=True,
                data=self.tokenizer.bytes_of(token),
                top=() if log_probs is None else top_tokens(self.tokenizer, log_probs, top),
            )

    def count_tokens(self, text: str) -> int:
        """The number of a prompt's tokens."""
        return len(self.tokenizer.encode(text))

    async def __call__(self, session: Session[Prompt, Token | Finish]) -> None:
        """Continues each prompt, one after another, until the end of input.

        If there are several sequences without a search (`n`, and `best_of` no greater), their tokens are sent as they are
        made, one of each in turn. With a search (`best_of` greater than `n`, or `num_beams`), they are sent when it is over:
        the best sequence as a whole, then the next best.

        The extra parameter `delay_ms` (0 to 10000) pauses before each token but the first, so that a person can watch a
        stream. A prompt with a parameter outside its range ends the session with ModelError (status 424) before anything is
        sent for it.
        """
        async for prompt in session:
            parameters = settled(prompt.parameters)
            check(parameters, len(self.tokenizer))
            delay = delay_seconds(parameters)
            ids = await self._encode(prompt.text)
            if parameters.truncate is not None:
                ids = ids[-parameters.truncate :]
            session.prompt_tokens = len(ids)
            if parameters.decoder_input_details or parameters.prompt_logprobs is not None:
                for token in self.prefill(ids, parameters.prompt_logprobs or 0):
                    await session.send(token)
            if parameters.max_new_tokens == 0:
                for sequence in range(parameters.n):
                    await session.send(Finish(reason=FinishReason.LENGTH, sequence=sequence))
            else:
                await self._continue(session, ids, parameters, delay)

    async def _continue(
        self, session: Session[Prompt, Token | Finish], ids: Sequence[int], parameters: GenerationParameters, delay: float
    ) -> None:
        processors = Processors(parameters, len(self.tokenizer), ids, await self._bad(parameters))
        if parameters.num_beams > 1:
            found = await self._beams(ids, parameters, processors)
        elif parameters.best_of > parameters.n:
            found = await self._best(ids, parameters, processors)
        else:
            await _send(session, self._sequences(ids, parameters, processors), delay)
            return
        for sequence, chosen in enumerate(found[: parameters.n]):
            await _send(session, [self._told(ids, parameters, chosen, sequence)], delay)

    def _tokens(
        self, prompt_ids: Sequence[int], parameters: GenerationParameters, choose: Choose, sequence: int
    ) -> Iterator[Token]:
        if parameters.max_new_tokens == 0:
            return
        output = Output(self.tokenizer, parameters)
        top = max(parameters.top_n_tokens, parameters.logprobs or 0)
        context = [EOS, *prompt_ids[-len(self._levels) :]]
        finish: FinishReason | None = None
        while finish is None:
            log_probs = self.next_log_probs(context)
            token = choose(log_probs)
            context = [*context[-len(self._levels) :], token]
            text, finish = output.add(token)
            yield Token(
                text=text,
                id=token,
                log_prob=float(log_probs[token]),
                special=token == EOS,
                finish=finish,
                data=self.tokenizer.bytes_of(token),
                stop=output.stop,
                top=top_tokens(self.tokenizer, log_probs, top, skip_special=parameters.skip_special_tokens),
                sequence=sequence,
            )

    def _sequences(
        self, ids: Sequence[int], parameters: GenerationParameters, processors: Processors
    ) -> list[Iterator[Token]]:
        return [
            self._tokens(ids, parameters, Chooser(parameters, processors.fork(), sequence), sequence)
            for sequence in range(parameters.n)
        ]

    def _told(
        self, ids: Sequence[int], parameters: GenerationParameters, chosen: Iterable[int], sequence: int
    ) -> Iterator[Token]:
        """The messages of a found sequence, made again: a search keeps only its ids."""
        known = iter(chosen)
        return self._tokens(ids, parameters, lambda _: next(known), sequence)

    async def _best(self, ids: Sequence[int], parameters: GenerationParameters, processors: Processors) -> list[array[int]]:
        """The tokens of `best_of` sequences, the one with the highest sum of log-probabilities first."""
        found: list[tuple[float, array[int]]] = []
        bare = structs.replace(parameters, top_n_tokens=0, logprobs=None)
        for sequence in range(parameters.best_of):
            total, chosen = 0.0, array("H")
            for token in self._tokens(ids, bare, Chooser(parameters, processors.fork(), sequence), sequence):
                total += token.log_prob or 0.0
                chosen.append(token.id)
                if len(chosen) % _TOKENS_PER_CHECKPOINT == 0:
                    await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            found.append((total, chosen))
        found.sort(key=lambda one: -one[0])
        return [chosen for _, chosen in found]

    async def _beams(self, ids: Sequence[int], parameters: GenerationParameters, processors: Processors) -> list[array[int]]:
        recent = [EOS, *ids[-len(self._levels) :]]

        def after(made: Sequence[int]) -> Floats:
            return self.next_log_probs([*recent, *made[-len(self._levels) :]])

        search = BeamSearch(parameters, processors, Output(self.tokenizer, parameters), after)
        for number, _ in enumerate(search.steps()):
            if number % _PIECES_OF_SEARCH_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
        return search.best()

    async def _bad(self, parameters: GenerationParameters) -> BadSequences:
        bad = BadSequences(self.tokenizer)
        for text in parameters.bad_sequences:
            bad.add(text)
            await trio.lowlevel.checkpoint()
        return bad

    async def _encode(self, text: str) -> array[int]:
        """Encodes compactly and with regular checkpoints: a prompt may be as large as the gateway allows."""
        ids = array("H")
        for number, piece in enumerate(pieces(text)):
            if number % _PIECES_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            ids.extend(self.tokenizer.encode_piece(piece))
        return ids


async def _send(session: Session[Prompt, Token | Finish], streams: Sequence[Iterator[Token]], delay: float) -> None:
    """Sends one token of each stream in turn, with a pause between the turns."""
    began = False
    while streams:
        if began and delay:
            await trio.sleep(delay)
        began, unfinished = True, []
        for stream in streams:
            token = next(stream)
            await session.send(token)
            if token.finish is None:
                unfinished.append(stream)
        streams = unfinished
