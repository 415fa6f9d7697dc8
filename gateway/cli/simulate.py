"""Plays many seeds, one after the other: prints progress, failures with the command that repeats them, and a summary."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import final

from gateway.testing.stories.run import Outcome, run_seed
from gateway.version import version

_PROGRESS = 5.0
"""Seconds between two lines of progress."""


@final
class Campaign:
    """Plays seeds and reports on them. `echo` takes a line of the report, `progress` a line of progress."""

    def __init__(
        self, echo: Callable[[str], None], progress: Callable[[str], None], *, trace: Path | None, as_json: bool, twice: bool
    ) -> None:
        """`trace`: a file for the whole trace of each seed. `twice`: play each seed again and require the same trace."""
        self._echo, self._progress, self._trace, self._json, self._twice = echo, progress, trace, as_json, twice
        self._failed: list[int] = []
        self._endings: Counter[str] = Counter()
        self._virtual, self._calls, self._runs = 0.0, 0, 0

    def run(self, seeds: range) -> int:
        """Plays the seeds. Returns the exit status: 0 if none failed, 1 if any did, 2 if the trace cannot be written."""
        began = told = time.monotonic()
        if self._trace is not None:
            try:
                self._trace.write_text("", encoding="utf-8")
            except OSError as e:
                self._progress(f"Error: --trace {self._trace} cannot be written: {e.strerror}")
                return 2
        for number, seed in enumerate(seeds, 1):
            self._play(seed)
            now = time.monotonic()
            if now - told > _PROGRESS:
                told = now
                rate = 60 * number / (now - began)
                self._progress(f"{number} of {len(seeds)} seeds, {len(self._failed)} failed, {rate:.0f} a minute")
        self._sum_up(len(seeds), time.monotonic() - began)
        return 1 if self._failed else 0

    def _play(self, seed: int) -> None:
        outcome = run_seed(seed, keep=None if self._trace is not None else 40)
        self._runs += 1
        problems = list(outcome.problems)
        if self._twice:
            again = run_seed(seed)
            self._runs += 1
            if again.trace != outcome.trace:
                problems.append(f"12: played again its trace is {again.trace}, it was {outcome.trace}")
        if self._trace is not None:
            with self._trace.open("a", encoding="utf-8") as file:
                file.write(f"seed {seed} trace {outcome.trace}\n" + "\n".join(outcome.lines) + "\n")
        self._endings.update(outcome.endings)
        self._virtual += outcome.seconds
        self._calls += outcome.calls
        if problems:
            self._failed.append(seed)
        if self._json:
            self._tell_json(outcome, problems)
        elif problems:
            self._tell_failure(outcome, problems)

    def _tell_json(self, outcome: Outcome, problems: list[str]) -> None:
        told = {
            "seed": outcome.seed, "trace": outcome.trace, "steps": outcome.steps, "virtual_seconds": outcome.seconds,
            "exchanges": outcome.calls, "endings": outcome.endings, "problems": problems,
        }  # fmt: skip
        self._echo(json.dumps(told))

    def _tell_failure(self, outcome: Outcome, problems: list[str]) -> None:
        self._echo(f"seed {outcome.seed} failed; again: python -m gateway simulate --seeds {outcome.seed}..{outcome.seed}")
        for problem in problems:
            self._echo(f"    {problem}")
        self._echo("  the end of its trace:")
        for line in outcome.lines[-15:]:
            self._echo(f"    {line}")

    def _sum_up(self, seeds: int, seconds: float) -> None:
        rate = 60 * self._runs / seconds if seconds else 0.0
        if self._json:
            told = {
                "version": version(), "seeds": seeds, "runs": self._runs, "failed": self._failed, "exchanges": self._calls,
                "endings": dict(sorted(self._endings.items())), "virtual_seconds": round(self._virtual, 1),
                "seconds": round(seconds, 1),
            }  # fmt: skip
            self._echo(json.dumps(told))
            return
        endings = ", ".join(f"{n} {name}" for name, n in self._endings.most_common())
        self._echo(f"{self._calls} exchanges in {self._virtual:.0f} s of their clock: {endings or 'none'}")
        failed = f"{len(self._failed)} failed: {', '.join(map(str, self._failed[:20]))}" if self._failed else "none failed"
        self._echo(f"{seeds} seeds, {failed}; {seconds:.0f} s, {rate:.0f} runs a minute")
