"""A small transformer with a cache for each sequence, in numpy: the library's model on a rolling batch."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import trio
from msgspec import structs

from models.blocking import run_step
from models.library.lm import model
from models.library.lm.network import Cache, Floats, Network
from models.library.lm.output import Output, top_tokens
from models.library.lm.parameters import check, settled
from models.library.lm.sampling import BadSequences, Chooser, Processors
from models.library.lm.tokenizer import EOS, TextStream, Tokenizer
from models.messages import Finish, FinishReason, Prompt, Token
from models.rolling import AHEAD, MAX_BATCH, MAX_SEQUENCES, PREFILL_BUDGET, Advanced, RollingBatch, rolling

WEIGHTS = Path(__file__).parents[1] / "data" / "tlm.npz"
PARAMETERS = model.PARAMETERS - {"best_of", "num_beams", "length_penalty", "early_stopping"}
"""The parameters that it acts on: those of the n-gram model without those that compare complete sequences."""


@final
class Continuation:
    """The state of one sequence: the rest of its prompt, its cache, the chooser and the output of its tokens."""

    __slots__ = (
        "cache", "choose", "feed", "number", "output", "pending", "prefix", "prompt_tokens", "reported", "skip_special",
        "top", "wanted",
    )  # fmt: skip

    def __init__(
        self, prompt: Prompt, number: int, ids: Sequence[int], reach: int, tokenizer: Tokenizer, processors: Processors
    ) -> None:
        parameters = prompt.parameters
        self.prompt_tokens = len(ids)
        self.number, self.wanted = number, parameters.max_new_tokens
        self.skip_special = parameters.skip_special_tokens
        self.top = max(parameters.top_n_tokens, parameters.logprobs or 0)
        self.reported: int | None = None
        """The number of most probable tokens to report in each place of the prompt. None: the prompt is not reported."""
        if number == 0 and (parameters.decoder_input_details or parameters.prompt_logprobs is not None):
            self.reported = parameters.prompt_logprobs or 0
        every = [EOS, *ids]
        # tokens farther back make no difference, and are taken in only if they must be reported
        self.feed = deque(every if self.reported is not None else every[-reach:])
        """Tokens that the network has not taken in. A step takes the last of them."""
        self.pending = len(self.feed) - 1 if self.wanted or self.reported is not None else 0
        self.cache: Cache | None = None
        self.choose = Chooser(parameters, processors, number)
        self.output = Output(tokenizer, parameters)
        self.prefix: TextStream | None = None
        """The text of the prompt so far, while the prompt is reported."""


@final
class TransformerModel:
    """Continues prompts in the style of the Python standard library's documentation strings, with one pass over all
    sequences for each token (a `models.rolling.StepModel`).

    `log_prob` is the natural logarithm of the model's own probability for the token, before temperature, penalties and
    filters. Scores and choices are those of `models.library.lm`, and a seed always gives the same text, whatever else is in
    the batch.
    """

    parameters: ClassVar[frozenset[str]] = PARAMETERS

    def __init__(self, tokenizer: Tokenizer, network: Network) -> None:
        self.tokenizer, self.network = tokenizer, network
        self.caches = 0
        """The number of sequences that have a cache now."""

    @classmethod
    def load(cls, path: Path | str | None = None) -> TransformerModel:
        """Reads the weights that `scripts/train_tlm.py` wrote; without a path, those of the package."""
        with np.load(WEIGHTS if path is None else path, allow_pickle=False) as weights:
            tokenizer = Tokenizer((int(left), int(right)) for left, right in weights["merges"])
            return cls(tokenizer, Network(weights))

    def count_tokens(self, text: str) -> int:
        """The number of a prompt's tokens."""
        return len(self.tokenizer.encode(text))

    def open(self, prompt: Prompt) -> list[Continuation]:
        """Opens `n` sequences. ModelError (status 424) for a parameter outside its range."""
        prompt = structs.replace(prompt, parameters=settled(prompt.parameters))
        parameters = prompt.parameters
        check(structs.replace(parameters, best_of=1, num_beams=1), len(self.tokenizer))
        ids = self.tokenizer.encode(prompt.text)
        if parameters.truncate is not None:
            ids = ids[-parameters.truncate :]
        bad = BadSequences(self.tokenizer, parameters.bad_sequences)
        processors = Processors(parameters, len(self.tokenizer), ids, bad)
        return [
            Continuation(prompt, number, ids, self.network.reach, self.tokenizer, processors.fork())
            for number in range(parameters.n)
        ]

    def prefill(self, sequence: Continuation, at_most: int) -> list[Token]:
        """Takes in at most `at_most` of the prompt's tokens, and reports them if requested."""
        cache, told = self._cache(sequence), []
        while at_most and sequence.pending:
            count = min(at_most, sequence.pending, self.network.window)
            piece = [sequence.feed.popleft() for _ in range(count)]
            sequence.pending -= count
            at_most -= count
            if sequence.reported is None:
                self.network.take([cache] * count, piece)
            else:
                log_probs = self.network.log_probs([cache] * count, piece)
                told += self._prompt_tokens(sequence, [*piece[1:], sequence.feed[0]], log_probs)
        return told

    def step(self, sequences: Sequence[Continuation]) -> list[Advanced]:
        """Makes one token of each sequence."""
        stepped = [sequence for sequence in sequences if sequence.wanted]
        made = iter(())
        if stepped:
            tokens = [sequence.feed.popleft() for sequence in stepped]
            made = iter(self.network.log_probs([self._cache(sequence) for sequence in stepped], tokens))
        return [self._next(sequence, next(made)) if sequence.wanted else self._nothing(sequence) for sequence in sequences]

    def close(self, sequence: Continuation) -> None:
        """Frees its cache."""
        self.caches -= sequence.cache is not None
        sequence.cache = None

    def _cache(self, sequence: Continuation) -> Cache:
        if sequence.cache is None:
            sequence.cache = self.network.cache()
            self.caches += 1
        return sequence.cache

    def _next(self, sequence: Continuation, row: Floats) -> Token:
        log_probs = row.astype(np.float64)
        token = sequence.choose(log_probs)
        sequence.feed.append(token)
        text, finish = sequence.output.add(token)
        return Token(
            text=text,
            id=token,
            log_prob=float(log_probs[token]),
            special=token == EOS,
            finish=finish,
            data=self.tokenizer.bytes_of(token),
            stop=sequence.output.stop,
            top=top_tokens(self.tokenizer, log_probs, sequence.top, skip_special=sequence.skip_special),
            sequence=sequence.number,
        )

    def _nothing(self, sequence: Continuation) -> Finish:
        return Finish(reason=FinishReason.LENGTH, sequence=sequence.number)

    def _prompt_tokens(self, sequence: Continuation, ids: Sequence[int], log_probs: Floats) -> list[Token]:
        """The network's predictions for these tokens of the prompt before it took them in. It has none for the first
        token."""
        told = []
        for token, row in zip(ids, log_probs.astype(np.float64), strict=True):
            first = sequence.prefix is None
            prefix = sequence.prefix = sequence.prefix or TextStream(self.tokenizer)
            told.append(
                Token(
                    text=prefix.feed(token),
                    id=token,
                    log_prob=None if first else float(row[token]),
                    prefill=True,
                    data=self.tokenizer.bytes_of(token),
                    top=() if first else top_tokens(self.tokenizer, row, sequence.reported or 0),
                )
            )
        return told


@asynccontextmanager
async def load(
    path: str | None = None,
    *,
    max_batch: int = MAX_BATCH,
    max_sequences: int = MAX_SEQUENCES,
    prefill_budget: int = PREFILL_BUDGET,
    ahead: int = AHEAD,
) -> AsyncIterator[RollingBatch[Continuation]]:
    """Runs the model on a rolling batch; it is loaded in a thread. The options are those of `models.rolling.rolling`."""
    model = await run_step(partial(TransformerModel.load, path), limiter=trio.CapacityLimiter(1))
    async with rolling(
        model, max_batch=max_batch, max_sequences=max_sequences, prefill_budget=prefill_budget, ahead=ahead
    ) as batch:
        yield batch
