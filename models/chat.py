"""Conversations: the default template, which makes a prompt of their messages."""

from __future__ import annotations

from collections.abc import Sequence

from models.messages.conversation import ChatMessage

__all__ = ["ChatMessage", "plain_template"]


def plain_template(messages: Sequence[ChatMessage]) -> str:
    """The prompt for a model without its own chat format. Each message is a line: a system message as it is, any other after
    its speaker's name. A call of a tool is a line `Assistant called NAME(ARGUMENTS)`, its result one of `NAME: text`. The
    prompt ends with the beginning of the assistant's next line."""
    called = {call.id: call.name for message in messages for call in message.tool_calls}
    lines = [line for message in messages for line in _lines(message, called)]
    return "\n".join([*lines, "Assistant:"])


def _lines(message: ChatMessage, called: dict[str, str]) -> list[str]:
    if message.role in ("system", "developer"):
        return [message.content]
    name = called.get(message.tool_call_id, "") if message.role == "tool" else ""
    lines = [f"Assistant called {call.name}({call.arguments or '{}'})" for call in message.tool_calls]
    if message.content or not lines:
        lines.insert(0, f"{name or message.name or message.role.capitalize()}: {message.content}")
    return lines
