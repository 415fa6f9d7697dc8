"""Chooses the next token of a sequence: changes scores, excludes tokens, and draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from models.continuations import Matcher
from models.library.lm.tokenizer import EOS, Tokenizer
from models.messages import GenerationParameters, utf8

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.integer[Any]]

# These tokens include the drawn one nine times in ten, and are found in a tenth of the time that sorting all takes.
_FEW = 256


def best(scores: Floats, count: int) -> Integers:
    """The ids of the `count` highest scores, the best first. Equal scores are ordered by id, so that a seed gives the same
    text everywhere."""
    if count >= len(scores):
        return np.argsort(-scores, kind="stable")
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    ids = np.flatnonzero(scores >= least)
    return ids[np.argsort(-scores[ids], kind="stable")[:count]]


def random_of(seed: int | None, sequence: int) -> np.random.Generator:
    """The random numbers of one sequence of a request. Those of the first equal those of a request for a single sequence."""
    if seed is None:
        return np.random.Generator(np.random.PCG64())
    # A SeedSequence accepts no negative seed, but a client may send any integer, so it counts modulo 2**64.
    key = (sequence,) if sequence else ()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed % 2**64, spawn_key=key)))


@final
class BadSequences:
    """Finds the tokens that would complete a text that must not be generated.

    A text is searched as UTF-8 bytes in the bytes of the generated tokens, across their borders; the prompt is not searched.
    (A replacement character that only represents invalid bytes is therefore not found.)
    """

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._matchers: list[Matcher] = []
        self._words: list[bytes] = []
        self._whole: set[int] = set()
        for text in texts:
            self.add(text)

    def __len__(self) -> int:
        return len(self._words)

    def add(self, text: str) -> None:
        """Adds a text. It searches the whole vocabulary, which takes a fraction of a millisecond."""
        word = utf8(text)
        self._words.append(word)
        self._matchers.append(Matcher(word))
        self._whole.update(self._tokenizer.containing(word))

    def forbidden(self, matched: Sequence[int]) -> list[int]:
        """The tokens that complete a text after an output whose end matches this much of each."""
        tokens = [*self._whole]
        for word, matcher, length in zip(self._words, self._matchers, matched, strict=True):
            for begun in matcher.lengths(length):
                tokens += self._tokenizer.beginning_with(word[begun:])
        return tokens

    def after(self, matched: Sequence[int], token: int) -> list[int]:
        """How much of each text the end of the output matches after this token, which must not be forbidden."""
        lengths = [*matched]
        for byte in self._tokenizer.bytes_of(token):
            for index, matcher in enumerate(self._matchers):
                lengths[index] = matcher.step(lengths[index], byte)
        return lengths


@final
class Processors:
    """Changes the scores of one sequence's next token, in this order: `logit_bias`; then `min_length`, `ignore_eos_token`
    and `bad_sequences`, which exclude tokens; `repetition_penalty`, for tokens in the prompt and the output;
    `presence_penalty` and `frequency_penalty`, for tokens in the output."""

    __slots__ = ("_bad", "_bias", "_biased", "_counts", "_length", "_matched", "_parameters", "_seen", "active")

    def __init__(self, parameters: GenerationParameters, vocabulary: int, prompt: Sequence[int], bad: BadSequences) -> None:
        self._parameters = parameters
        self._bias = np.array([*parameters.logit_bias.values()], dtype=np.float64)
        self._biased = np.array([*parameters.logit_bias], dtype=np.intp)
        self._bad, self._matched = bad, [0] * len(bad)
        self._length = 0
        self._seen: npt.NDArray[np.bool_] | None = None
        if parameters.repetition_penalty != 1:
            self._seen = np.zeros(vocabulary, dtype=np.bool_)
            self._seen[np.asarray(prompt, dtype=np.intp)] = True
        self._counts: npt.NDArray[np.uint32] | None = None
        if parameters.presence_penalty or parameters.frequency_penalty:
            self._counts = np.zeros(vocabulary, dtype=np.uint32)
        self.active = bool(
            len(self._biased) or parameters.ignore_eos_token or parameters.min_length or len(bad)
            or self._seen is not None or self._counts is not None
        )  # fmt: skip
        """True if there is anything to change."""

    def fork(self) -> Processors:
        """A copy in the same state, for another sequence."""
        copy = object.__new__(Processors)
        for name in Processors.__slots__:
            setattr(copy, name, getattr(self, name))
        copy._seen = None if self._seen is None else self._seen.copy()
        copy._counts = None if self._counts is None else self._counts.copy()
        return copy

    def __call__(self, log_probs: Floats) -> Floats:
        """The scores, in a new array if anything is changed. An excluded token has minus infinity."""
        if not self.active:
            return log_probs
        parameters = self._parameters
        # A logit has no natural zero, but the penalty, a division, needs one: it is the score of the least probable token.
        scores: Floats = log_probs - np.min(log_probs)
        if len(self._biased):
            scores[self._biased] += self._bias
        if parameters.ignore_eos_token or self._length < parameters.min_length:
            scores[EOS] = -math.inf
        if len(self._bad):
            scores[self._bad.forbidden(self._matched)] = -math.inf
        if self._seen is not None:
            old, penalty = scores[self._seen], parameters.repetition_penalty
            scores[self._seen] = np.where(old < 0, old * penalty, old / penalty)
        if self._counts is not None:
            scores -= parameters.presence_penalty * (self._counts > 0) + parameters.frequency_penalty * self._counts
        return scores

    def log_probs(self, log_probs: Floats) -> Floats:
        """The logarithms of the probabilities of the scores: they sum to 1 again."""
        if not self.active:
            return log_probs
        scores = self(log_probs)
        scores -= np.max(scores)
        scores -= math.log(np.exp(scores).sum())
        return scores

    def took(self, token: int) -> None:
        """Tells that the sequence continues with this token."""
        if not self.active:
            return
        self._length += 1
        if len(self._bad):
            self._matched = self._bad.after(self._matched, token)
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1


@final
class Chooser:
    """Chooses the next token of a sequence: the one with the highest score, or a drawn one.

    For a draw, after the processors: `temperature`, then `top_k`, `top_p`, `min_p` and `typical_p`, each applied to the
    tokens that the one before has left.
    """

    def __init__(self, parameters: GenerationParameters, processors: Processors, sequence: int = 0) -> None:
        self._parameters = parameters
        self._processors = processors
        self._random: np.random.Generator | None = None
        if parameters.do_sample and parameters.temperature > 0:
            self._random = random_of(parameters.seed, sequence)

    def __call__(self, log_probs: Floats) -> int:
        scores = self._processors(log_probs)
        # 1 - random() is above 0 and at most 1, so a weight of 0 is never drawn
        token = (
            int(np.argmax(scores)) if self._random is None else drawn(scores, self._parameters, 1 - self._random.random())
        )
        self._processors.took(token)
        return token


def drawn(scores: Floats, parameters: GenerationParameters, share: float) -> int:
    """The token at `share` of the mass of `choices`; `share` must be above 0 and at most 1."""
    if parameters.top_k <= 0 and parameters.typical_p == 1 and len(scores) > _FEW:
        token = _drawn_of_few(scores, parameters, share)
        if token is not None:
            return token
    order, weights = choices(scores, parameters)
    cumulative = np.cumsum(weights)
    return int(order[np.searchsorted(cumulative, share * cumulative[-1])])


def _drawn_of_few(scores: Floats, parameters: GenerationParameters, share: float) -> int | None:
    """The result of `drawn` if it is among the most probable tokens, as it nearly always is: sorting all tokens is most of
    the cost of a draw. None if it is not."""
    order = best(scores, _FEW)
    with np.errstate(over="ignore", under="ignore"):
        every = np.exp((scores - scores[order[0]]) / parameters.temperature)
    weights, kept, mass = every[order], _FEW, every.sum()
    cumulative = np.cumsum(weights)
    if parameters.top_p < 1:
        kept = 1 + int(np.searchsorted(cumulative, parameters.top_p * mass))
        if kept > _FEW:
            return None
        mass = cumulative[kept - 1]
    if parameters.min_p > 0:
        probable = int(np.count_nonzero(weights[:kept] >= parameters.min_p * weights[0]))
        if probable == _FEW:
            return None
        kept, mass = probable, cumulative[probable - 1]
    at = int(np.searchsorted(cumulative[:kept], share * mass))
    return int(order[at]) if at < kept else None


def choices(scores: Floats, parameters: GenerationParameters) -> tuple[Integers, Floats]:
    """The tokens that may be drawn, the most probable first, and their weights: probabilities up to a factor."""
    order = best(scores, parameters.top_k if parameters.top_k > 0 else len(scores))
    with np.errstate(over="ignore", under="ignore"):  # a very low temperature leaves the others nothing
        weights: Floats = np.exp((scores[order] - scores[order[0]]) / parameters.temperature)
    if parameters.top_p < 1:
        weights = weights[: _reaching(weights, parameters.top_p)]
    if parameters.min_p > 0:
        weights = weights[weights >= parameters.min_p * weights[0]]
    order = order[: len(weights)]
    if parameters.typical_p < 1:
        kept = _typical(weights[weights > 0], parameters.typical_p)
        order, weights = order[kept], weights[kept]
    return order, weights


def _reaching(weights: Floats, share: float) -> int:
    """How many, from the first, have this share of the whole mass: at least one."""
    cumulative = np.cumsum(weights)
    return min(len(weights), 1 + int(np.searchsorted(cumulative, share * cumulative[-1])))


def _typical(weights: Floats, share: float) -> Integers:
    """The indexes of the tokens with this share of the mass whose surprise is nearest to the entropy (Meister and others
    2022)."""
    probabilities = weights / weights.sum()
    surprise = -np.log(probabilities)
    nearest = np.argsort(np.abs(surprise - (probabilities * surprise).sum()), kind="stable")
    return np.sort(nearest[: _reaching(weights[nearest], share)])
