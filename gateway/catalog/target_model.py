"""Turns X-Amzn-SageMaker-Target-Model into a folder below the endpoint's models and the name that it is loaded by."""

from __future__ import annotations

import hashlib
import re

from gateway.errors import BadRequest

_SHOWN = 100


def model_url(prefix: str, target: str) -> str:
    """Returns the folder of a target model. SageMaker unpacks an archive into a folder, so a final `.tar.gz` is left out.
    BadRequest for a name with an empty segment, "." or "..": it could leave the prefix, or load one folder under two names.
    Symbolic links are checked later, when the folder is opened."""
    relative = re.sub(r"\.tar\.gz$", "", target)
    if "\0" in relative or not {"", ".", ".."}.isdisjoint(relative.split("/")):
        raise BadRequest(
            "X-Amzn-SageMaker-Target-Model must be a path below the endpoint's models, without empty segments, . and .., "
            f"got {target[:_SHOWN]!r}"
        )
    return f"{prefix.rstrip('/')}/{relative}"


def model_name(url: str) -> str:
    """Returns the name of a target model: the name of its folder, for people, and a digest of the url, which makes it
    unique."""
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", url.rpartition("/")[2])[:64]
    return f"{words}-{hashlib.sha256(url.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"
