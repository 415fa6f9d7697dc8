"""Conversations on the way to a model: messages, tools and formats of a request as the model sees them."""

from __future__ import annotations

import binascii
from base64 import b64decode

import msgspec

from gateway.codecs.prompts import format_of, prompt_of
from gateway.workers.worker import Worker
from models.chat import Conversation
from models.messages import ChatMessage, Image, MessagePart, Prompt, Sound, Text, ToolCall, ToolSpec
from protocols import openai
from protocols.openai import MediaPart
from protocols.text_members import Decided


def conversation_of(worker: Worker, request: openai.ChatRequest, decided: Decided) -> Conversation:
    """The conversation of a request, with its images and sound decoded: the memory for them is paid for before, see
    `ChatRequest.media`. OpenAIError, of status 400, for those that are not base64."""
    # a model that declares `tool_choice` sees that tools are there which it may not call
    shown = request.tool_choice != "none" or "tool_choice" in worker.features
    tools = [
        ToolSpec(name=t.name, description=t.description, parameters=t.parameters, strict=t.strict) for t in request.tools
    ]
    return Conversation(
        messages=tuple([_message_of(message) for message in request.messages]),
        tools=tuple(tools) if shown else (),
        tool_choice=request.tool_choice,
        response_format=format_of(decided),
        effort=request.effort,
        prefill=decided.prefill,
        template=decided.template,
    )


def chat_prompt_of(text: str, request: openai.ChatRequest, said: Conversation, decided: Decided) -> Prompt:
    """The prompt of a conversation, of which the model's template has made this text."""
    return msgspec.structs.replace(
        prompt_of(text, request.parameters, decided),
        messages=said.messages,
        tools=said.tools,
        tool_choice=said.tool_choice,
        parallel_tools=request.parallel_tool_calls,
        effort=said.effort,
        prefill=said.prefill,
    )


def _message_of(message: openai.Message) -> ChatMessage:
    if not (message.tool_calls or message.tool_call_id or message.parts or message.thinking):
        return ChatMessage(role=message.role, content=message.content, name=message.name)
    return ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=tuple(
            [
                ToolCall(index=at, id=call.id, name=call.name, arguments=call.arguments)
                for at, call in enumerate(message.tool_calls)
            ]
        ),
        tool_call_id=message.tool_call_id,
        thinking=message.thinking,
        parts=tuple([_part_of(part) for part in message.parts]),
    )


def _part_of(part: openai.MessagePart) -> MessagePart:
    if not isinstance(part, MediaPart):
        return Text(text=part.text)
    try:
        data = b64decode(part.base64, validate=True)
    except (binascii.Error, ValueError):
        raise openai.OpenAIError(f"{part.path}: expected bytes in base64", param=part.path) from None
    if part.kind == "image":
        return Image(data=data, media_type=part.type, detail=part.detail)
    return Sound(data=data, format=part.type)
