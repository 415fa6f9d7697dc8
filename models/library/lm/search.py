"""Beam search: finds the most probable sequences by following several at once."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from models.library.lm.output import Output
from models.library.lm.sampling import Processors, best
from models.messages import FinishReason, GenerationParameters

Floats: TypeAlias = npt.NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Beam:
    """A sequence that the search follows: its tokens, and the sum of their log-probabilities."""

    ids: array[int]
    score: float
    processors: Processors
    output: Output

    def then(self, token: int, score: float) -> tuple[Beam, FinishReason | None]:
        """The beam with one more token, and the reason if it is complete."""
        processors, output = self.processors.fork(), self.output.fork()
        processors.took(token)
        _, finish = output.add(token)
        ids = self.ids + array("H", (token,))
        return Beam(ids=ids, score=score, processors=processors, output=output), finish


@final
class BeamSearch:
    """Follows `num_beams` sequences, as transformers' BeamSearchScorer does.

    Each step extends every beam by every token, and keeps the `num_beams` best by the sum of log-probabilities (of the
    processed scores). A candidate that ends (by the end of sequence or a stop) and is among the `num_beams` best is
    complete. It leaves the beams, and its final score is its sum divided by its number of tokens (the last included) to the
    power of `length_penalty`. The `num_beams` best complete sequences are kept. The search is over

    - with `early_stopping`, as soon as there are that many,
    - without it, when there are that many and no beam, at its current length, has a better score than the worst of them,
    - or at `max_new_tokens`, when the beams are complete too.
    """

    def __init__(
        self,
        parameters: GenerationParameters,
        processors: Processors,
        output: Output,
        after: Callable[[Sequence[int]], Floats],
    ) -> None:
        """`after` gives the log-probabilities of all tokens after the prompt and these ids."""
        self._parameters = parameters
        self._after = after
        self._beams = [Beam(ids=array("H"), score=0.0, processors=processors, output=output)]
        self._complete: list[tuple[float, array[int]]] = []

    def steps(self) -> Iterator[None]:
        """Searches. It yields after each small piece of work, so that others can run."""
        for _ in range(self._parameters.max_new_tokens):
            totals = []
            for beam in self._beams:
                totals.append(beam.score + beam.processors.log_probs(self._after(beam.ids)))
                yield
            yield from self._advance(totals)
            if self._over():
                return
        for beam in self._beams:
            self._add(beam)

    def best(self) -> list[array[int]]:
        """The tokens of the complete sequences, the best first."""
        return [ids for _, ids in self._complete]

    def _advance(self, totals: Sequence[Floats]) -> Iterator[None]:
        width, beams = self._parameters.num_beams, []
        for rank, (index, token, score) in enumerate(ranked(totals, 2 * width)):
            beam, finish = self._beams[index].then(token, score)
            if finish is None or finish is FinishReason.LENGTH:
                beams.append(beam)
                if len(beams) == width:
                    break
            elif rank < width:
                self._add(beam)
            yield
        self._beams = beams

    def _add(self, beam: Beam) -> None:
        self._complete.append((self._final(beam), beam.ids))
        self._complete.sort(key=lambda found: -found[0])
        del self._complete[self._parameters.num_beams :]

    def _final(self, beam: Beam) -> float:
        return float(beam.score / len(beam.ids) ** self._parameters.length_penalty)

    def _over(self) -> bool:
        if not self._beams:
            return True
        if len(self._complete) < self._parameters.num_beams:
            return False
        return self._parameters.early_stopping or self._complete[-1][0] >= self._final(self._beams[0])


def ranked(totals: Sequence[Floats], few: int) -> Iterator[tuple[int, int, float]]:
    """Yields every row and column with its total, the highest first, except those of minus infinity.

    Sorting all of them would be most of a step's cost, and the first `few` are nearly always enough.
    """
    done, size = 0, sum(map(len, totals))
    while done < size:
        columns = [best(total, few) for total in totals]
        rows = np.repeat(np.arange(len(totals)), [len(ids) for ids in columns])
        scores = np.concatenate([total[ids] for total, ids in zip(totals, columns, strict=True)])
        tokens = np.concatenate(columns)
        for at in np.argsort(-scores, kind="stable")[done:few].tolist():
            if scores[at] == -math.inf:
                return
            yield int(rows[at]), int(tokens[at]), float(scores[at])
        done, few = few, few * 4
