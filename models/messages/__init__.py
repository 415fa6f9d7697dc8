"""The messages that models receive and send, in three families: text, tensors and opaque parts.

They are msgspec Structs, immutable and keyword-only, because one is made for each token, part and tensor: a frozen
dataclass costs ten times as much. `msgspec.structs.replace` makes a changed copy.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

from models.messages.conversation import ChatMessage, Image, MessagePart, Role, Sound, Text
from models.messages.parts import Part, PartKind
from models.messages.tensors import (
    DATATYPES,
    BytesTensor,
    Elements,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
    datatype_of,
)
from models.messages.text import Finish, GenerationParameters, Prompt, Token, TopToken, utf8
from models.messages.tools import TEXT_FEATURES, FinishReason, FormatKind, ResponseFormat, ToolCall, ToolSpec

__all__ = [
    "DATATYPES", "TEXT_FEATURES", "BytesTensor", "ChatMessage", "Elements", "Family", "Finish", "FinishReason", "FormatKind",
    "GenerationParameters", "Image", "Inbound", "InferRequest", "InferResponse", "Message", "MessagePart", "Outbound",
    "Parameter", "Part", "PartKind", "Prompt", "ResponseFormat", "Role", "Sound", "Tensor", "Text", "Token", "ToolCall",
    "ToolSpec", "TopToken", "datatype_of", "utf8",
]  # fmt: skip


class Family(enum.Enum):
    """The kind of messages of a model."""

    TEXT = "text"
    """Prompt in; any number of Tokens and ToolCalls, and one Finish, out."""
    TENSOR = "tensor"
    """InferRequest in, InferResponse out."""
    PARTS = "parts"
    """Part in, Part out."""


Inbound: TypeAlias = Prompt | InferRequest | Part
Outbound: TypeAlias = Token | ToolCall | Finish | InferResponse | Part
Message: TypeAlias = Inbound | Outbound
