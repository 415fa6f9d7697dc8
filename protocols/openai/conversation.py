"""Conversations of OpenAI's API: messages with their parts, calls of tools and results, and the tools that may be called."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, final, get_args

import msgspec

from protocols.json.schema import LARGEST, is_larger
from protocols.openai.errors import OpenAIError
from protocols.openai.members import boolean, error, get, object_of, refuse_value, string

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
_ROLES: tuple[Role, ...] = get_args(Role)
MAX_TOOLS = 256
"""The most tools of a request."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}").fullmatch
_DATA = re.compile(r"data:([A-Za-z0-9.+-]{1,64}/[A-Za-z0-9.+-]{1,64})(?:;[^,;]{1,64}){0,4};base64,").match
_CHOICES = ("auto", "none", "required")


@final
class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A call of a tool in a history."""

    id: str
    name: str
    arguments: str
    """A JSON text, as the client sent it."""


@final
class TextPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Text in a message of several parts."""

    text: str


@final
class MediaPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An image or a sound in a message. Its bytes are still the base64 that the client sent: those who decode them pay for
    the memory first."""

    kind: Literal["image", "sound"]
    base64: str
    type: str
    """The media type of an image, the format of a sound."""
    detail: str = "auto"
    path: str = ""
    """The member that has the base64."""


MessagePart: TypeAlias = TextPart | MediaPart


@final
class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message of a conversation. `content` is its text: that of all its parts, one after another, and empty if an
    assistant's is null."""

    role: Role
    content: str
    name: str = ""
    tool_calls: tuple[Call, ...] = ()
    tool_call_id: str = ""
    thinking: str = ""
    parts: tuple[MessagePart, ...] = ()


@final
class Tool(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = MappingProxyType({})
    strict: bool = False


def read_messages(value: object, features: Collection[str], model: str) -> tuple[Message, ...]:
    """Reads the member `messages`. OpenAIError, of status 400, for one that is wrong, and for a part or a call that a model
    with these features does not read."""
    if not isinstance(value, list) or not value:
        refuse_value("messages", "an array of at least one message", value)
    reader = _Reader(features, model)
    return tuple([reader.message(f"messages[{at}]", message) for at, message in enumerate(value)])


def media_of(messages: tuple[Message, ...]) -> int:
    """The characters of base64 in all messages."""
    return sum([len(part.base64) for m in messages for part in m.parts if isinstance(part, MediaPart)])


@final
class _Reader:
    """Reads messages in their order: a result belongs to a call before it."""

    def __init__(self, features: Collection[str], model: str) -> None:
        self._features, self._model = features, f"model {model[:60]!r}"
        self._called: set[str] = set()
        self._in_parts = "images" in features or "audio" in features

    def message(self, name: str, value: object) -> Message:
        message = object_of(name, value)
        role = message.get("role")
        if role not in _ROLES:
            refuse_value(f"{name}.role", f"one of {', '.join(_ROLES)}", role)
        role = cast(Role, role)
        for feature in ("function_call", "audio"):
            if message.get(feature) is not None:
                raise error(f"{name}.{feature}", f"{name}.{feature}: not offered")
        said = {member: get(message, member, string, "", name) for member in ("name", "tool_call_id", "refusal")}
        calls = self._calls(f"{name}.tool_calls", message.get("tool_calls"), role)
        if role == "tool":
            self._check_result(name, said["tool_call_id"])
        content = message.get("content")
        parts = self._content(f"{name}.content", content, role == "assistant")
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        return Message(
            role=role,
            content=texts[0] if len(texts) == 1 else "".join(texts),
            name=said["name"],
            tool_calls=calls,
            tool_call_id=said["tool_call_id"] if role == "tool" else "",
            thinking=_thinking(name, message) if role == "assistant" else "",
            parts=tuple(parts) if self._in_parts else (),
        )

    def _check_result(self, name: str, id: str) -> None:
        self._check_declared("tools", f"{name}.role")
        if id not in self._called:
            there = ", ".join(sorted(self._called))[:200] or "none"
            raise error(f"{name}.tool_call_id", f"{name}.tool_call_id: expected the id of a call before it ({there}), "
                        f"got {id[:60]!r}")  # fmt: skip

    def _calls(self, name: str, value: object, role: Role) -> tuple[Call, ...]:
        if value is None or value == []:
            return ()
        if not isinstance(value, list):
            refuse_value(name, "an array of calls", value)
        if role != "assistant":
            raise error(name, f"{name}: expected in a message of the assistant alone, got one of role {role}")
        self._check_declared("tools", name)
        return tuple([self._call(f"{name}[{at}]", call) for at, call in enumerate(value)])

    def _call(self, name: str, value: object) -> Call:
        call = object_of(name, value)
        if call.get("type", "function") != "function":
            refuse_value(f"{name}.type", "function", call.get("type"))
        id = string(f"{name}.id", call.get("id"))
        if not id or id in self._called:
            refuse_value(f"{name}.id", "an id that no other call has", id)
        function = object_of(f"{name}.function", call.get("function"))
        called = string(f"{name}.function.name", function.get("name"))
        if not _NAME(called):
            refuse_value(f"{name}.function.name", "1 to 128 letters, digits, '.', '_' and '-'", called)
        self._called.add(id)
        return Call(id=id, name=called, arguments=get(function, "arguments", string, "", f"{name}.function"))

    def _content(self, name: str, value: object, may_be_null: bool) -> list[MessagePart]:
        if isinstance(value, str):
            return [TextPart(text=value)]
        if value is None and may_be_null:
            return []
        if not isinstance(value, list) or not value:
            refuse_value(name, "a string or an array of parts", value)
        return [self._part(f"{name}[{at}]", part) for at, part in enumerate(value)]

    def _part(self, name: str, value: object) -> MessagePart:
        part = object_of(name, value)
        match part.get("type"):
            case "text":
                return TextPart(text=string(f"{name}.text", part.get("text")))
            case "image_url":
                self._check_declared("images", f"{name}.type")
                return _image(f"{name}.image_url", object_of(f"{name}.image_url", part.get("image_url")))
            case "input_audio":
                self._check_declared("audio", f"{name}.type")
                return _sound(f"{name}.input_audio", object_of(f"{name}.input_audio", part.get("input_audio")))
            case other:
                refuse_value(f"{name}.type", "one of text, image_url, input_audio", other)

    def _check_declared(self, feature: str, path: str) -> None:
        if feature not in self._features:
            raise error(path, f"{path}: {self._model} does not declare {feature}")


def _thinking(name: str, message: dict[str, Any]) -> str:
    """The thinking of the assistant, by the name that vLLM or SGLang has for it. Clients send it back as it came."""
    for member in ("reasoning_content", "reasoning"):
        if text := get(message, member, string, "", name):
            return text
    return ""


def _image(name: str, said: dict[str, Any]) -> MediaPart:
    url = string(f"{name}.url", said.get("url"))
    found = _DATA(url[:512])
    if found is None:
        refuse_value(f"{name}.url", "a data: URL in base64; this server fetches nothing", url)
    detail = get(said, "detail", string, "auto", name)
    if detail not in ("auto", "low", "high", "original"):
        refuse_value(f"{name}.detail", "auto, low or high", detail)
    return MediaPart(kind="image", base64=url[found.end() :], type=found[1], detail=detail, path=f"{name}.url")


def _sound(name: str, said: dict[str, Any]) -> MediaPart:
    data, format = string(f"{name}.data", said.get("data")), string(f"{name}.format", said.get("format"))
    if not re.fullmatch(r"[A-Za-z0-9.+_-]{1,64}", format):
        refuse_value(f"{name}.format", "the name of a format, such as wav", format)
    return MediaPart(kind="sound", base64=data, type=format, path=f"{name}.data")


# --- tools


def read_tools(value: object) -> tuple[Tool, ...]:
    """Reads the member `tools`. OpenAIError, of status 400, names what is wrong."""
    if value is None:
        return ()
    if not isinstance(value, list):
        refuse_value("tools", "an array", value)
    if len(value) > MAX_TOOLS:
        raise error("tools", f"tools: expected at most {MAX_TOOLS}, got {len(value)}")
    tools = [_tool(f"tools[{at}]", tool) for at, tool in enumerate(value)]
    names = [tool.name for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            path = f"tools[{at}].function.name"
            raise error(path, f"{path}: expected a name of its own, got {name!r} again")
    return tuple(tools)


def _tool(path: str, value: object) -> Tool:
    tool = object_of(path, value)
    if tool.get("type") != "function":
        refuse_value(f"{path}.type", "function", tool.get("type"))
    path = f"{path}.function"
    function = object_of(path, tool.get("function"))
    name = string(f"{path}.name", function.get("name"))
    if not _NAME(name):
        refuse_value(f"{path}.name", "1 to 128 letters, digits, '.', '_' and '-'", name)
    parameters: dict[str, Any] = get(function, "parameters", object_of, {}, path)
    if is_larger(parameters):
        raise error(f"{path}.parameters", f"{path}.parameters: expected a schema of at most {LARGEST} characters")
    return Tool(
        name=name,
        description=get(function, "description", string, "", path),
        parameters=parameters,
        strict=get(function, "strict", boolean, False, path),
    )


def read_tool_choice(value: object, tools: tuple[Tool, ...]) -> str:
    """Reads the member `tool_choice`: `auto`, `none`, `required`, or the name of a tool. OpenAIError, of status 400, names
    what is wrong."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in _CHOICES:
            refuse_value("tool_choice", f"one of {', '.join(_CHOICES)}, or an object that names a function", value)
        return value
    choice = object_of("tool_choice", value)
    if choice.get("type") != "function":
        refuse_value("tool_choice.type", "function", choice.get("type"))
    function = object_of("tool_choice.function", choice.get("function"))
    path = "tool_choice.function.name"
    name = string(path, function.get("name"))
    if all(tool.name != name for tool in tools):
        there = ", ".join([tool.name for tool in tools])[:200] or "none"
        refuse_value(path, f"the name of one of the tools ({there})", name)
    if name in _CHOICES:
        raise OpenAIError(f"{path}: expected a name other than {name}, which is a choice", param=path)
    return name
