"""The command `everywire new`: makes a folder with a model, its tests and its settings."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from gateway.cli.shadowing import PACKAGES
from gateway.config.problem import ConfigError

_MODELS = {"text": "shout", "chat": "chat", "tensor": "norms", "audio": "loudness", "rolling": "spell"}
"""The kinds, and the name of each kind's model."""
KINDS = tuple(_MODELS)

_SETTINGS = """\
# Serve it with `everywire --config everywire.toml`. Every setting is in docs/reference/configuration.md;
# `everywire config show --config everywire.toml` prints those in force.

[listen]
port = 8080

[operator]
port = 8090  # the console, for this machine alone

[models.{name}]
factory = "app:{name}"
capacity = 8  # sessions at once; more wait in a queue
"""


def make(folder: Path, kind: str) -> str:
    """Makes the files and returns the text of the next steps. ConfigError if the folder is not empty or cannot be made."""
    if folder.resolve().name in PACKAGES:
        raise ConfigError(f"{folder.name} is the name of a package of everywire's: choose another")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is not an empty folder: choose another name")
        folder.mkdir(parents=True, exist_ok=True)
        texts = files("gateway.cli.start") / "kinds" / kind
        for name in ("app.py", "test_app.py"):
            (folder / name).write_text((texts / f"{name}.txt").read_text(encoding="utf-8"), encoding="utf-8")
        (folder / "everywire.toml").write_text(_SETTINGS.format(name=_MODELS[kind]), encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{e.filename or folder} cannot be made: {e.strerror}") from None
    return _NEXT.format(folder=folder)


_NEXT = """\
Made app.py, test_app.py and everywire.toml in {folder}. Next, in that folder:

  everywire dev app.py
  python -m pytest        # pip install pytest, if it is missing
"""
