"""The messages of a conversation, as a model and its chat template get them."""

from __future__ import annotations

from typing import Literal, TypeAlias, final

import msgspec

from models.messages.tools import ToolCall

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]


@final
class Text(msgspec.Struct, frozen=True, kw_only=True, tag="text", gc=False):
    """A part of a message: text."""

    text: str


@final
class Image(msgspec.Struct, frozen=True, kw_only=True, tag="image", gc=False):
    """A part of a message: an image, in the bytes that the client sent; they are not decoded."""

    data: bytes
    media_type: str
    """Such as `image/png`, by the client's word."""
    detail: str = "auto"
    """The client's wish: `auto`, `low` or `high`."""


@final
class Sound(msgspec.Struct, frozen=True, kw_only=True, tag="sound", gc=False):
    """A part of a message: sound, in the bytes that the client sent; they are not decoded."""

    data: bytes
    format: str
    """Such as `wav` or `mp3`, by the client's word."""


MessagePart: TypeAlias = Text | Image | Sound


@final
class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message of a conversation. `content` is its text: for a message in several parts, all of their texts joined."""

    role: Role
    content: str
    name: str = ""
    """The speaker, if several have the same role."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of an assistant's message, each in one piece, with the ids and the arguments that the client sent."""
    tool_call_id: str = ""
    """The call whose result this message is; its role is `tool`."""
    is_error: bool = False
    """True for the result of a call that failed."""
    thinking: str = ""
    """The thinking of the assistant before this message, if the client sent it back."""
    parts: tuple[MessagePart, ...] = ()
    """The parts in their order, in each message that a model with the feature `images` or `audio` gets; otherwise empty."""
