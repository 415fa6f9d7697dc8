"""LMI's own options, `option.X` in a file and OPTION_X in the environment: those that are settings here, and their words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.settings_schema import Problem
from gateway.settings_text import Key, show

PREFIX = "OPTION_"

OPTIONS: Mapping[str, Key] = {
    name: ("lmi", name) for name in ("output_formatter", "tgi_compat", "rolling_batch", "enable_streaming")
}
"""The setting that each option gives."""

UNSERVED: Mapping[str, str] = {"bedrock_compat": "the schema that it asks for is not served here"}
"""The options that may not be true, with the reason: clients would get another answer than they were promised."""


def option_defaults(environ: Mapping[str, str]) -> Iterator[tuple[Key, str, str]]:
    """Each setting that the environment gives a default, as text, and the name of the variable that does. An empty variable
    is unset."""
    variables = _variables(environ)
    for option, text in in_our_words({option: environ[name] for option, name in variables.items()}).items():
        yield OPTIONS[option], text, variables[option]


def unserved_options(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Each variable that asks for what is not served."""
    variables = _variables(environ)
    for option, reason in UNSERVED.items():
        if is_true(text := environ.get(variables.get(option, ""), "")):
            name, got = variables[option], show(text)
            yield Problem(text=f"{name} must be false, not {got}: {reason}", where=name, expected="false", got=got)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable of each option."""
    return {name.removeprefix(PREFIX).lower(): name for name in sorted(environ) if name.startswith(PREFIX)}


def in_our_words(options: Mapping[str, str]) -> dict[str, str]:
    """Those of LMI's options that are settings, with their values as the settings have them; an empty one is not set."""
    said = {option: text for option in OPTIONS if (text := options.get(option, "").strip())}
    if said.get("enable_streaming") == "huggingface":  # which of its streamers LMI is to use
        said["enable_streaming"] = "true"
    if said.get("rolling_batch") == "disable" and is_true(options.get("async_mode", "")):
        said["rolling_batch"] = "auto"  # LMI 0.33: the batch is then vLLM's own, in the place of LMI's, and no dynamic one
    return said


def is_true(text: str) -> bool:
    """Whether an option is set to true."""
    return text.strip().lower() in ("true", "1")
