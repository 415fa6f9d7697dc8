"""Refuses to start if Python code in the working directory has the name of one of the gateway's packages."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder
from pathlib import Path

from gateway.config.problem import ConfigError

PACKAGES = ("gateway", "models", "protocols")


def check_directory() -> None:
    """Raises ConfigError if Python code in the working directory has the name of one of the gateway's packages."""
    message = check_shadowing(Path.cwd(), Path(__file__).resolve().parents[2])
    if message:
        raise ConfigError(message)


def check_shadowing(cwd: Path, package_dir: Path) -> str | None:
    """The error text if Python code in `cwd` has the name of one of the gateway's packages, which are in `package_dir`: one
    would be imported in place of the other. None if nothing conflicts; a folder without Python code does not."""
    if cwd.resolve() == package_dir.resolve():
        return None
    for name in PACKAGES:
        spec = PathFinder.find_spec(name, [str(cwd)])
        if spec is None:
            continue
        file = cwd / f"{name}.py"
        if spec.origin is None and not any((cwd / name).glob("*.py")):
            continue
        theirs = file if spec.origin == str(file) else cwd / name
        return (
            f"{theirs}{'' if theirs == file else os.sep} and everywire's own package {name!r} have the same name, so that "
            "one would be imported in place of the other: rename yours, or start in another directory"
        )
    return None
