"""A real language model that is small: a 5-gram with modified Kneser-Ney smoothing, in numpy, on byte-pair tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import trio

from models.errors import ModelError
from models.library.lm_tokenizer import EOS, TextStream, Tokenizer, pieces
from models.messages import Finish, FinishReason, GenerationParameters, Prompt, Token
from models.session import Session

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.integer[Any]]

TABLES = Path(__file__).with_name("data") / "lm.npz"
MAX_DELAY_MS = 10_000
MAX_STOPS = 64
MAX_STOP_LENGTH = 1000
# A piece is at most 24 characters, merged in well under 0.1 ms; usually it is one look-up in a cache.
_PIECES_PER_CHECKPOINT = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The n-grams of one length as children of their first n - 1 tokens.

    The children of context `c` are the rows `start[c]` to `start[c + 1]`: `token` (ascending in each context) and
    `gain`, the discounted share of the context's count. `rest[c]` is what the discount left for the shorter context.
    """

    start: npt.NDArray[np.int32]
    token: npt.NDArray[np.uint16]
    gain: Floats
    rest: Floats

    def find(self, context: int, token: int) -> int | None:
        """The row of context + token, which is its context number on the next level."""
        first, end = self.start[context], self.start[context + 1]
        row = int(first + self.token[first:end].searchsorted(np.uint16(token)))
        return row if row < end and self.token[row] == token else None


def level(fanout: Integers, token: npt.NDArray[np.uint16], count: Integers, discounts: Floats) -> Level:
    """Makes a level of stored counts: `fanout` says how many children each context has, `discounts` what is taken
    from the counts 0, 1, 2 and from all above (modified Kneser-Ney: Chen and Goodman 1998)."""
    start = np.concatenate(([0], np.cumsum(fanout, dtype=np.int32)), dtype=np.int32)
    context = np.repeat(np.arange(len(fanout)), fanout)
    total = np.bincount(context, weights=count, minlength=len(fanout))
    gain = (count - discounts[np.minimum(count, 3)]) / total[context]
    rest: Floats = 1.0 - np.bincount(context, weights=gain, minlength=len(fanout)).astype(np.float64)
    return Level(start=start, token=token, gain=gain, rest=rest)


@final
class LanguageModel:
    """Continues prompts (family TEXT) in the manner of the Python standard library's documentation strings.

    One token costs a fraction of a millisecond, so it computes in the event loop and awaits every `send`: a client
    that stops reading stops it at the next token. `log_prob` is the natural logarithm of the probability that the
    model itself gives the token, before temperature, penalty and filters.
    """

    def __init__(self, tokenizer: Tokenizer, unigrams: Floats, levels: Sequence[Level]) -> None:
        self.tokenizer = tokenizer
        self._unigrams = unigrams
        self._levels = levels

    @classmethod
    def load(cls, path: Path | str | None = None) -> LanguageModel:
        """Reads the tables that `scripts/train_lm.py` wrote; without a path the ones that are shipped."""
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
                break  # a context that was never seen has no longer one that was
            at = self._levels[length - 1]
            first, end = at.start[row], at.start[row + 1]
            probabilities *= at.rest[row]
            probabilities[at.token[first:end]] += at.gain[first:end]
        return np.log(probabilities)

    def _context(self, ids: Sequence[int]) -> int | None:
        """The number of this context on its level, None if the training text never went on after it."""
        row = ids[0]
        for at, token in zip(self._levels, ids[1:], strict=False):
            found = at.find(row, token)
            if found is None:
                return None
            row = found
        return row

    def generate(self, prompt_ids: Sequence[int], parameters: GenerationParameters) -> Iterator[Token]:
        """The continuation, token by token; the last says why it is the last. Nothing where `max_new_tokens` is 0.

        `do_sample` False takes the most probable token. The order is that of transformers: repetition penalty (over
        prompt and output), temperature, top_k, top_p. Temperature 0 is greedy; top_k below 1 and top_p 1 are off. The
        same seed gives the same text. A text that ends by a stop sequence includes it. With the extra parameter
        `ignore_eos` (vLLM's name) the end of sequence is never chosen. ModelError (status 424) for a parameter outside
        its range.
        """
        check(parameters)
        choose = Chooser(parameters, len(self.tokenizer), prompt_ids)
        stops = Stops(parameters.stop_sequences)
        text = TextStream(self.tokenizer)
        context = [EOS, *prompt_ids[-len(self._levels) :]]
        for number in range(1, parameters.max_new_tokens + 1):
            log_probs = self.next_log_probs(context)
            token = choose(log_probs)
            context = [*context[-len(self._levels) :], token]
            added = text.feed(token)
            finish: FinishReason | None = None
            if token == EOS:
                finish = FinishReason.EOS_TOKEN
            elif stops.met(added):
                finish = FinishReason.STOP_SEQUENCE
            elif number == parameters.max_new_tokens:
                finish = FinishReason.LENGTH
            if finish is not None:
                added += text.rest()
            yield Token(text=added, id=token, log_prob=float(log_probs[token]), special=token == EOS, finish=finish)
            if finish is not None:
                return

    def prefill(self, prompt_ids: Sequence[int]) -> Iterator[Token]:
        """The prompt's own tokens, as `decoder_input_details` asks for them: the first has no log-probability."""
        text = TextStream(self.tokenizer)
        for index, token in enumerate(prompt_ids):
            context = [EOS, *prompt_ids[max(0, index - len(self._levels)) : index]]
            yield Token(
                text=text.feed(token),
                id=token,
                log_prob=float(self.next_log_probs(context)[token]) if index else None,
                prefill=True,
            )

    async def __call__(self, session: Session[Prompt, Token | Finish]) -> None:
        """Continues each prompt, one after another, until the end of input.

        The extra parameter `delay_ms` (0 to 10000) pauses before each token but the first, to let a person watch a
        stream. A prompt with a parameter outside its range ends the session with ModelError (status 424), before
        anything is sent for it.
        """
        async for prompt in session:
            parameters = prompt.parameters
            check(parameters)
            delay = delay_seconds(parameters)
            ids = await self._encode(prompt.text)
            if parameters.decoder_input_details:
                for token in self.prefill(ids):
                    await session.send(token)
            if parameters.max_new_tokens == 0:
                await session.send(Finish(reason=FinishReason.LENGTH))
            for number, token in enumerate(self.generate(ids, parameters)):
                if number and delay:
                    await trio.sleep(delay)
                await session.send(token)

    async def _encode(self, text: str) -> array[int]:
        """Encodes compactly and with a checkpoint now and then: a prompt may be as large as the gateway lets it be."""
        ids = array("H")
        for number, piece in enumerate(pieces(text)):
            if number % _PIECES_PER_CHECKPOINT == 0:
                await trio.lowlevel.checkpoint()
            ids.extend(self.tokenizer.encode_piece(piece))
        return ids


@final
class Chooser:
    """Picks the next token: greedy, or drawn after penalty, temperature, top_k and top_p."""

    def __init__(self, parameters: GenerationParameters, vocabulary: int, prompt_ids: Sequence[int]) -> None:
        self._parameters = parameters
        self._greedy = not parameters.do_sample or parameters.temperature == 0
        seed = parameters.seed
        # PCG64 takes no negative seed; any integer of the client shall do, so it counts modulo 2**64.
        self._random = np.random.Generator(np.random.PCG64(None if seed is None else seed % 2**64))
        self._seen = np.zeros(vocabulary, dtype=np.bool_)
        self._seen[np.asarray(prompt_ids, dtype=np.intp)] = True

    def __call__(self, log_probs: Floats) -> int:
        parameters = self._parameters
        # A logit has no zero of its own and the penalty, a division, needs one: it is the least probable token's.
        scores: Floats = log_probs - np.min(log_probs)
        np.divide(scores, parameters.repetition_penalty, out=scores, where=self._seen)
        if parameters.extra.get("ignore_eos"):
            scores[EOS] = -math.inf
        token = int(np.argmax(scores)) if self._greedy else self._draw(scores)
        self._seen[token] = True
        return token

    def _draw(self, scores: Floats) -> int:
        parameters = self._parameters
        # Most probable first; equal scores keep the order of ids, so that a seed means the same text everywhere.
        order = np.argsort(-scores, kind="stable")
        if parameters.top_k > 0:
            order = order[: parameters.top_k]
        with np.errstate(over="ignore", under="ignore"):  # a very low temperature leaves the others nothing
            weights = np.exp((scores[order] - scores[order[0]]) / parameters.temperature)
        cumulative = np.cumsum(weights)
        if parameters.top_p < 1:
            # The smallest set whose mass reaches top_p, and at least one token.
            cumulative = cumulative[: 1 + int(np.searchsorted(cumulative, parameters.top_p * cumulative[-1]))]
        # 1 - random() is above 0 and at most 1, so that a weight of 0 is never drawn.
        return int(order[np.searchsorted(cumulative, (1 - self._random.random()) * cumulative[-1])])


@final
class Stops:
    """Watches the output for the first stop sequence, across tokens, keeping no more text than a stop is long."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._keep = max((len(stop) for stop in stops), default=1) - 1
        self._tail = ""

    def met(self, added: str) -> bool:
        text = self._tail + added
        self._tail = text[max(0, len(text) - self._keep) :]
        return any(stop in text for stop in self._stops)


def check(parameters: GenerationParameters) -> None:
    """ModelError (status 424) names the first parameter outside its range."""
    given = parameters
    _require("temperature", given.temperature, "a finite number, at least 0", 0 <= given.temperature < math.inf)
    _require(
        "repetition_penalty", given.repetition_penalty, "a number from 0.01 to 100", 0.01 <= given.repetition_penalty <= 100
    )
    _require("top_p", given.top_p, "a number from 0 to 1", 0 <= given.top_p <= 1)
    _require("max_new_tokens", given.max_new_tokens, "at least 0", given.max_new_tokens >= 0)
    # Each token is searched for all of them, so that their number and length bound what a step costs.
    stops = given.stop_sequences
    few = len(stops) <= MAX_STOPS and all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops)
    _require("stop_sequences", stops, f"at most {MAX_STOPS}, of 1 to {MAX_STOP_LENGTH} characters each", few)
    ignore_eos = given.extra.get("ignore_eos", False)
    _require("ignore_eos", ignore_eos, "true or false", isinstance(ignore_eos, bool))


def delay_seconds(parameters: GenerationParameters) -> float:
    """The extra parameter `delay_ms` in seconds, 0 without it; ModelError (status 424) unless it is 0 to 10000."""
    delay = parameters.extra.get("delay_ms", 0)
    number = isinstance(delay, int | float) and not isinstance(delay, bool)
    _require("delay_ms", delay, f"a number from 0 to {MAX_DELAY_MS}", number and 0 <= delay <= MAX_DELAY_MS)
    return float(delay) / 1000


def _require(name: str, value: object, expected: str, holds: bool) -> None:
    if not holds:
        raise ModelError(f"{name}: expected {expected}, got {str(value)[:100]}", code="ValidationError", status=424)
