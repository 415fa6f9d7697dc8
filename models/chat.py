"""Conversations: the messages of a chat, and the default template that makes a prompt of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, final

import msgspec

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]


@final
class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message of a conversation. `content` is its text: for a message in several parts, all of their texts joined."""

    role: Role
    content: str
    name: str = ""
    """The speaker, if several have the same role."""


def plain_template(messages: Sequence[ChatMessage]) -> str:
    """The prompt for a model without its own chat format. Each message is a line: a system message as it is, any other after
    its speaker's name. The prompt ends with the beginning of the assistant's next line."""
    lines = [_line(message) for message in messages]
    return "\n".join([*lines, "Assistant:"])


def _line(message: ChatMessage) -> str:
    if message.role in ("system", "developer"):
        return message.content
    speaker = message.name or message.role.capitalize()
    return f"{speaker}: {message.content}"
