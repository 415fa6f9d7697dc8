"""The part of the protocol that a peer has begun on an HTTP/2 connection and not finished, and since when."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Part(enum.Enum):
    """The kind of the unfinished part."""

    SETTINGS = enum.auto()
    """The first SETTINGS frame, or the preface before it."""
    HEAD = enum.auto()
    """A header block, in any of its frames."""
    FRAME = enum.auto()
    """The nine bytes before a frame."""
    PAYLOAD = enum.auto()
    """The payload of any other frame."""


class Unfinished(NamedTuple):
    """A part that has begun and is not complete."""

    what: Part
    since: float
    """The machine's time when it began."""
    nbytes: int = 0
    """How many bytes of the frame are here, without its head."""
