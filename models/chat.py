"""Conversations: the messages of a chat, and the function that makes a text model's prompt of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, final

import msgspec

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]


@final
class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message of a conversation. `content` is its text: of a message in several parts, theirs, one after another."""

    role: Role
    content: str
    name: str = ""
    """Who says it, where several have one role."""


def plain_template(messages: Sequence[ChatMessage]) -> str:
    """The prompt of a model that knows no chat format of its own: what system messages say first, then a line for each
    speaker, and the beginning of the assistant's next one."""
    lines = [_line(message) for message in messages]
    return "\n".join([*lines, "Assistant:"])


def _line(message: ChatMessage) -> str:
    if message.role in ("system", "developer"):
        return message.content
    speaker = message.name or message.role.capitalize()
    return f"{speaker}: {message.content}"
