"""Settings from the environment of SageMaker's and LMI's containers: defaults, ports, and OPTION_* as settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.config.agreement import Where
from gateway.config.problem import Problem
from gateway.config.text import Key, show

BIND_TO_PORT = "SAGEMAKER_BIND_TO_PORT"
MULTI_MODEL = "SAGEMAKER_MULTI_MODEL"
SAFE_PORT_RANGE = "SAGEMAKER_SAFE_PORT_RANGE"

# Each of these is SageMaker's alone. AWS_CONTAINER_CREDENTIALS_RELATIVE_URI is not: every task of ECS with a role has it.
_SIGNS = (BIND_TO_PORT, MULTI_MODEL, SAFE_PORT_RANGE)

MODEL_FOLDER, MODEL_FOLDERS = Path("/opt/ml/model"), Path("/opt/ml/models")
"""The folders of a container's model, or models, in SageMaker. They exist even if no variable is set."""

VARIABLES: Mapping[str, Key] = {BIND_TO_PORT: ("listen", "port"), MULTI_MODEL: ("sagemaker", "multi_model")}
"""The setting that each variable gives."""

CONTAINER_DEFAULTS: Mapping[Key, str] = {
    # SageMaker calls from outside the container,
    ("listen", "host"): "0.0.0.0",
    # and kills it 30 s after SIGTERM.
    ("drain", "timeout"): "20",
}
"""Defaults if one of SageMaker's variables is set or one of its folders exists."""


PLATFORM_DEFAULTS: Mapping[Key, str] = {
    # SageMaker's callers choose the path and the query of a WebSocket.
    ("websocket", "any_path"): "all",
}
"""Defaults if SageMaker chooses the port: then it is the only caller."""


def container_defaults(environ: Mapping[str, str]) -> Iterator[tuple[Key, str, str]]:
    """Each setting that the environment gives a default, as text, and the name of the variable or folder that does. An
    empty variable is unset."""
    for variable, path in VARIABLES.items():
        if value := environ.get(variable):
            yield path, value, variable
    if environ.get(BIND_TO_PORT):
        for path, value in PLATFORM_DEFAULTS.items():
            yield path, value, BIND_TO_PORT
    if sign := sign_of(environ):
        for path, value in CONTAINER_DEFAULTS.items():
            yield path, value, sign


def sign_of(environ: Mapping[str, str]) -> str:
    """The variable or the folder that marks a SageMaker container; empty if there is none."""
    folders = (str(folder) for folder in (MODEL_FOLDER, MODEL_FOLDERS) if folder.is_dir())
    return next((name for name in _SIGNS if environ.get(name)), "") or next(folders, "")


def wrong_ports(environ: Mapping[str, str], ports: Mapping[str, int], where: Where) -> Iterator[Problem]:
    """Each port, other than SageMaker's own, outside the range that the environment allows, or the range itself if it is
    invalid."""
    text = environ.get(SAFE_PORT_RANGE, "")
    if not text:
        return
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text.strip())
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= low <= high <= 65535:
        expected = "two ports, the lower one first, such as 9000-9999"
        yield Problem(
            text=f"{SAFE_PORT_RANGE} must be {expected}, not {show(text)}",
            where=SAFE_PORT_RANGE,
            expected=expected,
            got=show(text),
        )
        return
    for key, port in ports.items():
        if key != "listen.port" and not low <= port <= high:
            yield Problem(
                text=f"{where(key)} is {port}, outside {SAFE_PORT_RANGE}, which is {low}-{high}: SageMaker allows no other "
                "port beside listen.port; -1 opens none",
                key=key,
                expected=f"a port from {low} to {high}, or -1",
                got=str(port),
            )


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
    """Each variable that asks for something that is not served."""
    variables = _variables(environ)
    for option, reason in UNSERVED.items():
        if is_true(text := environ.get(variables.get(option, ""), "")):
            name, got = variables[option], show(text)
            yield Problem(text=f"{name} must be false, not {got}: {reason}", where=name, expected="false", got=got)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable of each option."""
    return {name.removeprefix(PREFIX).lower(): name for name in sorted(environ) if name.startswith(PREFIX)}


def in_our_words(options: Mapping[str, str]) -> dict[str, str]:
    """LMI's options that are settings, with their values in the settings' form; an empty one is not set."""
    said = {option: text for option in OPTIONS if (text := options.get(option, "").strip())}
    if said.get("enable_streaming") == "huggingface":  # which of its streamers LMI is to use
        said["enable_streaming"] = "true"
    if said.get("rolling_batch") == "disable" and is_true(options.get("async_mode", "")):
        said["rolling_batch"] = "auto"  # LMI 0.33: the batch is then vLLM's own, in the place of LMI's, and no dynamic one
    return said


def is_true(text: str) -> bool:
    """True if an option is set to true."""
    return text.strip().lower() in ("true", "1")
