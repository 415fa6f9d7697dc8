"""What a peer has begun on an HTTP/2 connection and not ended, and since when."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Part(enum.Enum):
    """What is not whole."""

    SETTINGS = enum.auto()
    """The first frame, or before it the preface."""
    HEAD = enum.auto()
    """A header block, in whatever frames."""
    FRAME = enum.auto()
    """The nine bytes before a frame."""
    PAYLOAD = enum.auto()
    """Of any other frame."""


class Unfinished(NamedTuple):
    """What has begun and is not whole."""

    what: Part
    since: float
    """The machine's time at which it began."""
    nbytes: int = 0
    """What is there of a frame, but for its head."""
