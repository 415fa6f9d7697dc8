"""The messages of models of opaque parts."""

from __future__ import annotations

import enum
from typing import final

import msgspec


class PartKind(enum.Enum):
    """The declared type of a part's bytes. The bytes are not checked against it: UTF8 may be invalid."""

    UTF8 = "UTF8"
    BINARY = "BINARY"

    __hash__ = object.__hash__  # Enum's own hash is a Python call, and the kind of each part is looked up


@final
class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment of a message of bytes: one event on BiDi, one frame on WebSocket, never merged and never split.

    `last` is False if further parts continue this fragment (CompletionState PARTIAL, FIN clear).
    """

    data: bytes | bytearray | memoryview
    kind: PartKind = PartKind.BINARY
    last: bool = True
