"""Conversations of OpenAI's API with tools and media: what a declared feature lets through, and how a refusal names it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.openai import Call, ChatRequest, MediaPart, Message, OpenAIError, TextPart, Tool, parse_chat

ALL = ("tools", "tool_choice", "parallel_tools", "images", "audio")
WEATHER = {"name": "weather", "description": "Tells it", "parameters": {"type": "object", "properties": {"city": {}}}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "time", "strict": True}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "K\\u00f6ln"}'}}
USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}


def chat(*messages: Any, features: tuple[str, ...] = ALL, **members: Any) -> ChatRequest:
    return parse_chat({"messages": [*messages] or [USER], **members}, features=features, model="m")


def refused(*messages: Any, features: tuple[str, ...] = ALL, **members: Any) -> str:
    with pytest.raises(OpenAIError) as caught:
        chat(*messages, features=features, **members)
    assert caught.value.status == 400
    assert caught.value.param == caught.value.message.partition(":")[0]
    return caught.value.message


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


# -- tools


def test_tools_come_as_their_client_wrote_them() -> None:
    asked = chat(tools=TOOLS)
    assert asked.tools == (
        Tool(name="weather", description="Tells it", parameters=WEATHER["parameters"]),  # type: ignore[arg-type]
        Tool(name="time", strict=True),
    )
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("auto", True)


def test_a_model_without_tools_gets_none() -> None:
    assert chat(tools=TOOLS, features=()).tools == ()


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, "auto"), ("auto", "auto"), ("none", "none"), ("required", "required"),
        ({"type": "function", "function": {"name": "time"}}, "time"),
    ],
)  # fmt: skip
def test_a_choice_is_a_word_or_the_name_of_a_tool(choice: object, read: str) -> None:
    assert chat(tools=TOOLS, tool_choice=choice).tool_choice == read


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "tools: expected an array, got an object"),
        ([7], "tools[0]: expected an object, got 7"),
        ([{"type": "custom"}], "tools[0].type: expected function, got the string 'custom'"),
        ([{"type": "function"}], "tools[0].function: expected an object, got nothing"),
        ([*TOOLS, {"type": "function", "function": {}}], "tools[2].function.name: expected a string, got nothing"),
        (
            [{"type": "function", "function": {"name": "a b"}}],
            "tools[0].function.name: expected 1 to 128 letters, digits, '.', '_' and '-', got the string 'a b'",
        ),
        ([{"type": "function", "function": {"name": "a", "parameters": "x"}}],
         "tools[0].function.parameters: expected an object, got the string 'x'"),
        ([{"type": "function", "function": {"name": "a", "strict": "x"}}],
         "tools[0].function.strict: expected true or false, got the string 'x'"),
        ([TOOLS[0], TOOLS[0]], "tools[1].function.name: expected a name of its own, got 'weather' again"),
        ([TOOLS[0]] * 257, "tools: expected at most 256, got 257"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"x": "y" * 262_144}}}],
         "tools[0].function.parameters: expected a schema of at most 262144 characters"),
    ],
)  # fmt: skip
def test_a_tool_that_is_none_is_refused_by_its_path(tools: object, message: str) -> None:
    assert refused(tools=tools) == message


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            "any",
            "tool_choice: expected one of auto, none, required, or an object that names a function, got the string 'any'",
        ),
        (7, "tool_choice: expected an object, got 7"),
        ({"type": "allowed_tools"}, "tool_choice.type: expected function, got the string 'allowed_tools'"),
        ({"type": "function"}, "tool_choice.function: expected an object, got nothing"),
        (
            {"type": "function", "function": {"name": "no"}},
            "tool_choice.function.name: expected the name of one of the tools (weather, time), got the string 'no'",
        ),
    ],
)
def test_a_choice_that_is_none_is_refused(choice: object, message: str) -> None:
    assert refused(tools=TOOLS, tool_choice=choice) == message


# -- histories


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": "Let me see."}])
def test_a_history_has_calls_and_their_results(content: dict[str, Any]) -> None:
    called = {"role": "assistant", "tool_calls": [CALL], **content}
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "18 C"}]}
    assert chat(USER, called, result).messages[1:] == (
        Message(
            role="assistant",
            content=content.get("content") or "",
            tool_calls=(Call(id="call_1", name="weather", arguments='{"city": "K\\u00f6ln"}'),),  # never written anew
            parts=(TextPart(text="Let me see."),) if content.get("content") else (),
        ),
        Message(role="tool", content="18 C", tool_call_id="call_1", parts=(TextPart(text="18 C"),)),
    )


@pytest.mark.parametrize("member", ["reasoning_content", "reasoning"])
def test_thinking_that_comes_back_is_read_by_either_name(member: str) -> None:
    assert chat(USER, {"role": "assistant", "content": "a", member: "hm"}).messages[1].thinking == "hm"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "tool", "content": "x", "tool_call_id": "c"}],
         "messages[0].tool_call_id: expected the id of a call before it (none), got 'c'"),
        ([{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "x"}],
         "messages[1].tool_call_id: expected the id of a call before it (call_1), got ''"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}],
         "messages[0].tool_calls: expected in a message of the assistant alone, got one of role user"),
        ([{"role": "assistant", "tool_calls": CALL}], "messages[0].tool_calls: expected an array of calls, got an object"),
        ([{"role": "assistant", "tool_calls": [CALL, CALL]}],
         "messages[0].tool_calls[1].id: expected an id that no other call has, got the string 'call_1'"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}],
         "messages[0].tool_calls[0].type: expected function, got the string 'custom'"),
        ([{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": ""}}]}],
         "messages[0].tool_calls[0].function.name: expected 1 to 128 letters, digits, '.', '_' and '-', got an empty string"),
        ([{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}],
         "messages[0].tool_calls[0].function.arguments: expected a string, got an object"),
        ([{"role": "assistant", "function_call": {}}], "messages[0].function_call: not offered"),
    ],
)  # fmt: skip
def test_a_history_that_does_not_fit_is_refused_by_its_path(messages: list[Any], message: str) -> None:
    assert refused(*messages) == message


def test_a_history_of_calls_needs_a_model_with_tools() -> None:
    called = {"role": "assistant", "tool_calls": [CALL]}
    assert refused(called, features=()) == "messages[0].tool_calls: model 'm' does not declare tools"
    result = {"role": "tool", "tool_call_id": "call_1", "content": "x"}
    assert refused(result, features=("images",)) == "messages[0].role: model 'm' does not declare tools"


# -- media


def test_parts_keep_their_order_and_their_bytes() -> None:
    text = {"type": "text", "text": "What is it?"}
    (message,) = chat(user(IMAGE, text, SOUND)).messages
    assert message == Message(
        role="user",
        content="What is it?",
        parts=(
            MediaPart(kind="image", base64="iVBO", type="image/png", path="messages[0].content[0].image_url.url"),
            TextPart(text="What is it?"),
            MediaPart(kind="sound", base64="UklG", type="wav", path="messages[0].content[2].input_audio.data"),
        ),
    )


def test_a_model_without_media_has_no_parts() -> None:
    assert chat(user({"type": "text", "text": "a"}), features=("tools",)).messages[0].parts == ()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}},
         "messages[0].content[0].image_url.url: expected a data: URL in base64; this server fetches nothing, got the string "
         "'http://x/y.png'"),
        ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
         "messages[0].content[0].image_url: expected an object, got the string 'data:image/png;base64,AAAA'"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "best"}},
         "messages[0].content[0].image_url.detail: expected auto, low or high, got the string 'best'"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA"}},
         "messages[0].content[0].input_audio.format: expected a string, got nothing"),
        ({"type": "file", "file": {}},
         "messages[0].content[0].type: expected one of text, image_url, input_audio, got the string 'file'"),
    ],
)  # fmt: skip
def test_media_that_cannot_be_had_is_refused_by_its_path(part: Any, message: str) -> None:
    assert refused(user(part)) == message


@pytest.mark.parametrize(("part", "feature"), [(IMAGE, "images"), (SOUND, "audio")])
def test_media_needs_a_model_that_declares_it(part: Any, feature: str) -> None:
    features = tuple(name for name in ALL if name != feature)
    assert refused(user(part), features=features) == f"messages[0].content[0].type: model 'm' does not declare {feature}"


# -- anything

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["id", "type", "function", "name", "arguments", "text", "url", "image_url", "role", "content"]),
        inner | st.sampled_from(["function", "text", "image_url", "assistant", "tool"]),
    ),
    max_leaves=8,
)  # fmt: skip


def fault(document: Any) -> OpenAIError | None:
    try:
        parse_chat(document, features=ALL)
    except OpenAIError as e:
        return e
    return None


@given(_JSON, _JSON, _JSON, _JSON)
def test_anything_is_read_or_refused_with_a_path(messages: Any, tools: Any, choice: Any, calls: Any) -> None:
    said = [{"role": "assistant", "content": "a", "tool_calls": calls}]
    for document in (
        {"messages": messages},
        {"messages": said},
        {"messages": [USER], "tools": tools, "tool_choice": choice},
    ):
        if (error := fault(document)) is not None:
            assert error.status == 400
            assert error.param is not None
            assert error.message.startswith(f"{error.param}: ")
