"""Conversations: what a chat template gets, its call, and the default template."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import msgspec

from models.errors import ModelError
from models.messages import ChatMessage, ResponseFormat, ToolSpec

__all__ = ["ChatMessage", "Conversation", "apply_template", "plain_template"]


@final
class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A conversation to continue, and what else the request says about it. The fields are those of Prompt."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str = "auto"
    response_format: ResponseFormat | None = None
    effort: str = ""
    thinking: bool | None = None
    prefill: bool = False
    template: Mapping[str, Any] = MappingProxyType({})


_KEYWORDS: Mapping[str, Callable[[Conversation], object]] = {
    "tools": lambda said: said.tools,
    "tool_choice": lambda said: said.tool_choice,
    "response_format": lambda said: said.response_format,
    "effort": lambda said: said.effort,
    "thinking": lambda said: said.thinking,
    "add_generation_prompt": lambda said: not said.prefill,
}
_kept: weakref.WeakKeyDictionary[Any, _Signature] = weakref.WeakKeyDictionary()


@final
class _Signature(msgspec.Struct, frozen=True, gc=False):
    """The parameters of a template."""

    keywords: tuple[str, ...]
    """Those of `_KEYWORDS` that it has."""
    others: frozenset[str]
    takes_more: bool
    first: str = ""


def apply_template(template: Callable[..., Any], said: Conversation) -> Any:
    """Calls a chat template with the messages, and with each of these keywords for which it has a parameter of that name:
    `tools` (a tuple of ToolSpec), `tool_choice`, `response_format`, `effort`, `thinking`, and `add_generation_prompt`, which
    is False if the last message is to be continued. The client's own values (`Conversation.template`) are further keywords.
    Returns what the template returns. ModelError of status 400 for a value that the template does not take."""
    signature = _signature_of(template)
    keywords = {name: _KEYWORDS[name](said) for name in signature.keywords}
    for name, value in said.template.items():
        if name in _KEYWORDS or name == signature.first or not (signature.takes_more or name in signature.others):
            there = ", ".join(sorted(signature.others)) or "none"
            message = f"chat_template_kwargs.{name[:60]}: expected a value that the model's template takes ({there})"
            raise ModelError(message, code="BadTemplateValue", status=400)
        keywords[name] = value
    return template(said.messages, **keywords)


def _signature_of(template: Callable[..., Any]) -> _Signature:
    known: Any = getattr(template, "__func__", template)
    try:
        if (found := _kept.get(known)) is not None:
            return found
        found = _kept[known] = _read_signature(template)
    except TypeError:  # no weak reference leads to it
        return _read_signature(template)
    return found


def _read_signature(template: Callable[..., Any]) -> _Signature:
    try:
        parameters = list(inspect.signature(template).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return _Signature((), frozenset(), False)
    named = [p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    keywords = tuple([name for name in named if name in _KEYWORDS])
    more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    first = parameters[0].name if parameters else ""
    return _Signature(keywords, frozenset(named) - {*keywords, first}, more, first)


def plain_template(messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
    """The prompt for a model without its own chat format. Each message is a line: a system message as it is, any other after
    its speaker's name. A call of a tool is a line `Assistant called NAME(ARGUMENTS)`, its result one of `NAME: text`. The
    prompt ends with the beginning of the assistant's next line, unless `add_generation_prompt` is False: then with the last
    message."""
    called = {call.id: call.name for message in messages for call in message.tool_calls}
    lines = [line for message in messages for line in _lines(message, called)]
    return "\n".join([*lines, "Assistant:"] if add_generation_prompt else lines)


def _lines(message: ChatMessage, called: Mapping[str, str]) -> list[str]:
    if message.role in ("system", "developer"):
        return [message.content]
    name = called.get(message.tool_call_id, "") if message.role == "tool" else ""
    lines = [f"Assistant called {call.name}({call.arguments or '{}'})" for call in message.tool_calls]
    if message.content or not lines:
        lines.insert(0, f"{name or message.name or message.role.capitalize()}: {message.content}")
    return lines
