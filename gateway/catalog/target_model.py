"""What X-Amzn-SageMaker-Target-Model stands for: a folder below the endpoint's models, and the name it is loaded by."""

from __future__ import annotations

import hashlib
import re

from gateway.errors import BadRequest

_SHOWN = 100


def model_url(prefix: str, target: str) -> str:
    """The folder of a target model: SageMaker unpacks an archive into a folder, so `.tar.gz` at the end is left out.
    BadRequest for a name that leaves the prefix by its words, and for one with segments that say nothing: each folder has
    one name, or it would be loaded once for each. Who opens the folder looks at links."""
    relative = re.sub(r"\.tar\.gz$", "", target)
    if "\0" in relative or not {"", ".", ".."}.isdisjoint(relative.split("/")):
        raise BadRequest(
            "X-Amzn-SageMaker-Target-Model must be a path below the endpoint's models, without empty segments, . and .., "
            f"got {target[:_SHOWN]!r}"
        )
    return f"{prefix.rstrip('/')}/{relative}"


def model_name(url: str) -> str:
    """The platform's names are opaque: a digest makes this one unique, and the folder's own name tells people what it is."""
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", url.rpartition("/")[2])[:64]
    return f"{words}-{hashlib.sha256(url.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"
