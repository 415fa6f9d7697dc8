"""A step model for tests of the rolling batch: its tokens are numbers, and it remembers all that it was asked."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, final

from models.messages import Finish, FinishReason, GenerationParameters, Prompt, Token
from models.rolling import Advanced


@final
class Counted:
    """A sequence: its prompt's text is its name, and its tokens are 0, 1, 2 ..."""

    def __init__(self, prompt: Prompt, number: int) -> None:
        parameters = prompt.parameters
        self.name = prompt.text if parameters.n == 1 else f"{prompt.text}{number}"
        self.number = number
        self.left = parameters.max_new_tokens
        self.prompt_tokens = self.pending = int(parameters.extra.get("tokens", 0))
        self.made = 0


@final
class Counting:
    """Counts for each sequence up to `max_new_tokens`; `extra` has how many `tokens` its prompt has."""

    parameters = frozenset({"max_new_tokens", "n"})

    def __init__(self) -> None:
        self.steps: list[str] = []
        """The names in each step, joined."""
        self.prefills: list[tuple[str, int]] = []
        self.rounds: list[int] = []
        """How many tokens had been prefilled, in all, at each step."""
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.threads: set[int] = set()
        self.fail: dict[str, Exception] = {}
        """The errors to raise or to give, each once, by call and sequence, such as `prefill a`."""
        self.inside = False
        """True while `prefill`, `step` or `close` runs. No two of them may run at the same time."""

    def open(self, prompt: Prompt) -> list[Counted]:
        self._raise(f"open {prompt.text}")
        self.opened.append(prompt.text)
        return [Counted(prompt, number) for number in range(prompt.parameters.n)]

    def prefill(self, sequence: Counted, at_most: int) -> Iterable[Token] | None:
        with self._alone():
            assert 0 < at_most <= sequence.pending
            self._raise(f"prefill {sequence.name}")
            self.prefills.append((sequence.name, at_most))
            sequence.pending -= at_most
        return None

    def step(self, sequences: Sequence[Counted]) -> list[Advanced]:
        with self._alone():
            self.steps.append("".join(sequence.name for sequence in sequences))
            self.rounds.append(sum(count for _, count in self.prefills))
            self._raise("step")
            return [self._next(sequence) for sequence in sequences]

    def close(self, sequence: Counted) -> None:
        with self._alone():
            self._raise(f"close {sequence.name}")
            self.closed.append(sequence.name)

    def of(self, name: str) -> int:
        """The number of steps in which the sequence has been."""
        return sum(name in step for step in self.steps)

    def _next(self, sequence: Counted) -> Advanced:
        assert not sequence.pending
        error = self.fail.pop(f"give {sequence.name}", None)
        if error is not None:
            return error
        number = sequence.made
        sequence.made += 1
        if sequence.left == 0:
            return Finish(reason=FinishReason.LENGTH, sequence=sequence.number)
        finish = FinishReason.LENGTH if sequence.made == sequence.left else None
        return Token(text=f"{number} ", id=number, finish=finish, sequence=sequence.number)

    def _raise(self, what: str) -> None:
        if error := self.fail.pop(what, None):
            raise error

    def _alone(self) -> _Alone:
        self.threads.add(threading.get_ident())
        return _Alone(self)


@final
class _Alone:
    def __init__(self, model: Counting) -> None:
        self._model = model

    def __enter__(self) -> None:
        assert not self._model.inside
        self._model.inside = True

    def __exit__(self, *_: Any) -> None:
        self._model.inside = False


def asking(name: str, tokens: int, *, prompt: int = 0, n: int = 1) -> Prompt:
    """A prompt of so many tokens that asks for so many."""
    return Prompt(text=name, parameters=GenerationParameters(max_new_tokens=tokens, n=n, extra={"tokens": prompt}))
