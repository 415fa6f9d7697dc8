"""Problems of a configuration, and ConfigError, which reports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a configuration. Fields that do not apply are empty."""

    text: str
    """All of it in one line, for the operator."""
    where: str = ""
    """The place of the value: a file with its line, a variable, a flag."""
    key: str = ""
    """The setting, as a file or `--set` would write it."""
    expected: str = ""
    got: str = ""
    suggestion: str = ""
    """The setting, the section or the choice that was probably meant."""


class ConfigError(Exception):
    """The configuration cannot be used. The text is one line for the operator: the source, the setting, the expected value
    and the given one. If there are several problems, it has the first one and the number of others."""

    def __init__(self, problem: str | Problem, *others: Problem) -> None:
        first = Problem(text=problem) if isinstance(problem, str) else problem
        super().__init__(first.text + (f" (and {len(others)} more: `everywire config check` has all)" if others else ""))
        self.problems = (first, *others)


class FolderMissing(ConfigError):
    """The folder of the model to be served does not exist."""
