"""The version of the installed distribution."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def version() -> str:
    """Returns the version, such as 0.1.0; "0+source" if the packages run from their sources without being installed."""
    try:
        return importlib.metadata.version("everywire")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
