"""The scripted model: what it says by itself to tools, formats and thinking, and how it follows a script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing
from msgspec import structs

from gateway.catalog.factories import load_spec
from gateway.config import ModelConfig
from gateway.testing import memory_gateway
from models.adapt import adapt, spec_of
from models.errors import ModelError
from models.library.scripted import Scripted
from models.messages import (
    TEXT_FEATURES,
    ChatMessage,
    Family,
    Finish,
    FinishReason,
    GenerationParameters,
    Image,
    Prompt,
    ResponseFormat,
    Sound,
    Token,
    ToolCall,
    ToolSpec,
)
from models.session import Session
from tests.models.library.library_session import Tape, converse, stalled

WEATHER = ToolSpec(
    name="weather",
    description="Tells the weather",
    parameters={"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 2}}, "required": ["city"]},
)  # fmt: skip
TIME = ToolSpec(name="time")
TOOLS = (WEATHER, TIME)
CALLED = ChatMessage(
    role="assistant", content="", tool_calls=(ToolCall(id="a1", name="weather", arguments='{"city": "Rome"}'),)
)


def user(text: str, **more: Any) -> ChatMessage:
    return ChatMessage(role="user", content=text, **more)


def chat(*messages: ChatMessage, **more: Any) -> Prompt:
    return Prompt(text="", messages=messages, **more)


async def said(prompt: Prompt, model: Scripted | None = None) -> list[Any]:
    return await converse(adapt(model or Scripted())[0], prompt)


def text(messages: Sequence[Any], thinking: bool = False) -> str:
    return "".join(m.text for m in messages if isinstance(m, Token) and m.thinking is thinking)


def calls(messages: Sequence[Any]) -> list[tuple[str, Any]]:
    """The calls as a client puts them together."""
    found: dict[int, list[str]] = {}
    for message in messages:
        if isinstance(message, ToolCall):
            assert bool(message.name) == (message.index not in found)
            found.setdefault(message.index, [message.name, ""])[1] += message.arguments
    assert list(found) == list(range(len(found)))
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


async def test_it_repeats_the_last_user_message_word_by_word() -> None:
    tokens = await said(chat(user("one"), ChatMessage(role="assistant", content="1"), user("two  words")))
    assert [token.text for token in tokens] == ["You", " said:", " ", "two", "  words"]
    assert [token.id for token in tokens] == [0, 1, 2, 3, 4]


async def test_a_text_without_a_chat_is_repeated_too() -> None:
    assert text(await said(Prompt(text="once upon"))) == "You said: once upon"
    assert text(await said(Prompt(text=""))) == "You said: "


async def test_it_takes_a_long_text_in_pieces_and_stops_with_its_client() -> None:
    tape = await stalled(adapt(Scripted())[0], Prompt(text="word " * 1_000_000), room=3)
    assert len(tape.sent) == 3
    assert all(len(token.text) <= 64 for token in await said(Prompt(text=" " * 500 + "x" * 500)))


async def test_it_says_which_images_sounds_and_adapter_it_got() -> None:
    parts = Image(data=b"12", media_type="image/png"), Sound(data=b"123", format="wav")
    assert text(await said(chat(user("look", parts=parts), adapter="french"))) == (
        "(french) You said: look I see an image: image/png, 2 bytes. I hear a sound: wav, 3 bytes."
    )


async def test_it_calls_the_tools_that_the_user_names_or_else_the_first() -> None:
    arguments = {"city": "text", "days": 2}
    assert calls(await said(chat(user("hello"), tools=TOOLS))) == [("weather", arguments)]
    assert calls(await said(chat(user("what time is it?"), tools=TOOLS))) == [("time", {})]
    both = chat(user("time and weather"), tools=TOOLS)
    assert calls(await said(both)) == [("weather", arguments), ("time", {})]
    assert calls(await said(structs.replace(both, parallel_tools=False))) == [("weather", arguments)]


async def test_arguments_come_in_pieces_that_are_counted_and_told_as_text() -> None:
    pieces = await said(chat(user("weather"), tools=TOOLS))
    assert len(pieces) > 5
    assert "".join(piece.text for piece in pieces) == 'weather({"city": "text", "days": 2})'
    assert {piece.tokens for piece in pieces} == {1}
    assert {piece.id for piece in pieces} == {""}


async def test_a_choice_of_tools_is_obeyed() -> None:
    prompt = chat(user("weather"), CALLED, ChatMessage(role="tool", content="sun", tool_call_id="a1"), tools=TOOLS)
    assert calls(await said(structs.replace(prompt, tool_choice="time"))) == [("time", {})]
    assert [name for name, _ in calls(await said(structs.replace(prompt, tool_choice="required")))] == ["weather"]
    assert calls(await said(structs.replace(chat(user("weather"), tools=TOOLS), tool_choice="none"))) == []
    with pytest.raises(ModelError, match="tool_choice: expected a tool's name, got 'maps'"):
        await said(structs.replace(prompt, tool_choice="maps"))


async def test_after_results_it_quotes_them() -> None:
    first = ChatMessage(role="tool", content="it is sunny", tool_call_id="a1")
    second = ChatMessage(role="tool", content="no such city", tool_call_id="b", is_error=True)
    assert text(await said(chat(user("weather"), CALLED, first, tools=TOOLS))) == "weather says: it is sunny"
    answer = await said(chat(user("weather"), CALLED, first, second, tools=TOOLS))
    assert text(answer) == "weather says: it is sunny tool failed: no such city"
    assert calls(answer) == []


async def test_a_tool_whose_arguments_cannot_be_made_is_a_bad_request() -> None:
    tool = ToolSpec(name="bad", parameters={"type": "object", "properties": {"a": {"pattern": "(?=a)"}}, "required": ["a"]})
    with pytest.raises(
        ModelError, match=r"^tools: bad: parameters: pattern: '\(\?=a\)': assert is not supported$"
    ) as caught:
        await said(chat(user("x"), tools=(tool,)))
    assert (caught.value.status, caught.value.code) == (400, "ValidationError")
    with pytest.raises(ModelError, match="type: no document found"):
        await said(chat(user("x"), tools=(ToolSpec(name="t", parameters={"type": "string"}),)))


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (ResponseFormat(kind="json_schema", schema=WEATHER.parameters), '{"city": "text", "days": 2}'),
        (ResponseFormat(kind="json_schema", schema={"const": "\ud800é"}), '"\\ud800\\u00e9"'),
        (ResponseFormat(kind="json_object"), '{"answer": "is it blue or grün?"}'),
        (ResponseFormat(kind="choice", choices=("red", "blue")), "blue"),
        (ResponseFormat(kind="choice", choices=("pink", "black")), "pink"),
        (ResponseFormat(kind="regex", pattern=r"\d{3}-[A-Z]*"), "000-"),
        (ResponseFormat(kind="regex", pattern="a*"), "a"),
        (ResponseFormat(kind="regex", pattern="^$"), ""),
    ],
)
async def test_a_format_is_kept_from_the_first_character_to_the_last(form: ResponseFormat, answer: str) -> None:
    asked = chat(user("is it blue or grün?"), response_format=form, tools=TOOLS, thinking=True)
    messages = await said(asked)
    assert text(messages) == answer
    assert calls(messages) == []
    assert text(messages, thinking=True).endswith(f"The answer is in the format {form.kind}.")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (ResponseFormat(kind="json_schema", schema={"enum": []}), "response_format: schema: enum: no document found"),
        (ResponseFormat(kind="json_schema", schema=False), "response_format: schema: false: no document found"),
        (ResponseFormat(kind="regex", pattern="(?=a)"), r"response_format: regex: '\(\?=a\)': assert is not supported"),
        (ResponseFormat(kind="regex", pattern="[^\\s\\S]"), "response_format: regex: no text matches"),
        (ResponseFormat(kind="choice"), "response_format: choice is not supported"),
        (ResponseFormat(kind="grammar", pattern="x"), "response_format: grammar is not supported"),
    ],
)
async def test_a_format_that_it_cannot_keep_is_a_bad_request(form: ResponseFormat, why: str) -> None:
    with pytest.raises(ModelError, match=why) as caught:
        await said(chat(user("x"), response_format=form))
    assert caught.value.status == 400


async def test_a_demanded_call_comes_before_a_format() -> None:
    prompt = chat(user("x"), tools=TOOLS, tool_choice="time", response_format=ResponseFormat(kind="json_object"))
    assert calls(await said(prompt)) == [("time", {})]


@pytest.mark.parametrize(
    ("asked", "thinks"),
    [
        ({}, False),
        ({"thinking": True}, True),
        ({"effort": "low"}, True),
        ({"effort": "none"}, False),
        ({"effort": "high", "thinking": False}, False),
    ],
)
async def test_it_thinks_first_if_it_is_asked_to(asked: dict[str, Any], thinks: bool) -> None:
    messages = await said(chat(user("hello"), **asked))
    assert text(messages, thinking=True) == ("The conversation has 1 message. I answer in words." if thinks else "")
    assert text(messages) == "You said: hello"
    assert [token.thinking for token in messages] == sorted((token.thinking for token in messages), reverse=True)


async def test_it_keeps_to_the_budget_of_thinking() -> None:
    messages = await said(chat(user("weather"), tools=TOOLS, thinking=True, thinking_budget=3))
    assert text(messages, thinking=True) == "The conversation has"
    assert len(calls(messages)) == 1


@pytest.mark.parametrize(
    ("begun", "rest"), [("You sa", "id: go on"), ("You said: go on", ""), ("No", "You said: go on"), ("", "You said: go on")]
)
async def test_it_continues_what_the_client_has_begun(begun: str, rest: str) -> None:
    prompt = chat(user("go on"), ChatMessage(role="assistant", content=begun), prefill=True)
    assert text(await said(prompt)) == rest


async def test_a_delay_comes_before_each_message(autojump_clock: trio.testing.MockClock) -> None:
    await said(Prompt(text="x", parameters=GenerationParameters(extra={"delay_ms": 2500})))
    assert trio.current_time() == 10


def test_it_declares_all_features_but_grammars() -> None:
    assert TEXT_FEATURES - Scripted.features == {"grammar"}
    assert "n" not in Scripted.parameters
    assert adapt(Scripted())[1] is Family.TEXT


def test_its_template_has_the_tools_and_the_values_of_the_client() -> None:
    model = Scripted()
    lines = model.chat_template((user("hi"), CALLED), tools=TOOLS, style="short").splitlines()
    assert lines == [
        "style: short", "Tool weather(city, days): Tells the weather", "Tool time()",
        "User: hi", 'Assistant called weather({"city": "Rome"})', "Assistant:",
    ]  # fmt: skip
    begun = (user("hi"), ChatMessage(role="assistant", content="Hel"))
    assert model.chat_template(begun, add_generation_prompt=False) == "User: hi\nAssistant: Hel"
    assert model.count_tokens("User: hi\nAssistant:") == 3


# -- scripts -----------------------------------------------------------------------------------------------------------

CALL = {"name": "weather", "arguments": {"city": "Oslo"}, "id": "c1"}


async def test_a_script_has_a_turn_for_each_answer_of_the_conversation() -> None:
    model = Scripted([["I look. ", CALL, {"name": "time", "arguments": "[ ]"}], "It rains in Oslo."])
    first = await said(chat(user("weather?")), model)
    assert text(first) == "I look. "
    assert calls(first) == [("weather", {"city": "Oslo"}), ("time", [])]
    assert [(m.id, m.name) for m in first if isinstance(m, ToolCall) and m.name] == [("c1", "weather"), ("", "time")]
    result = ChatMessage(role="tool", content="rain", tool_call_id="c1")
    assert text(await said(chat(user("weather?"), CALLED, result), model)) == "It rains in Oslo."
    with pytest.raises(ModelError, match="the script has 2 turns, and this conversation has 2 answers already"):
        await said(chat(user("weather?"), CALLED, result, ChatMessage(role="assistant", content="x"), user("?")), model)


async def test_a_beginning_by_the_client_is_no_answer_yet() -> None:
    prompt = chat(user("x"), ChatMessage(role="assistant", content="The"), prefill=True)
    assert text(await said(prompt, Scripted([" end"]))) == " end"


async def test_messages_of_a_turn_are_sent_as_they_are() -> None:
    turn = [
        {"thinking": "hm, hm"},
        Token(text="x", id=7, log_prob=-1.5),
        ToolCall(index=2, name="f"),
        CALL,
        Finish(reason=FinishReason.LENGTH),
    ]
    messages = await said(Prompt(text=""), Scripted([turn]))
    assert text(messages, thinking=True) == "hm, hm"
    assert messages[2:4] == [turn[1], turn[2]]
    assert messages[4].index == 3
    assert messages[-1] == Finish(reason=FinishReason.LENGTH)


async def test_a_turn_may_be_a_function_of_the_prompt() -> None:
    async def later(prompt: Prompt) -> str:
        await trio.lowlevel.checkpoint()
        return f"later, {prompt.messages[-1].content}"

    def overloaded(prompt: Prompt) -> str:
        raise ModelError("try again", status=503)

    model = Scripted(
        [lambda prompt: [CALL] if prompt.tools else "no tools", later, overloaded, lambda prompt: 7], remember=2
    )
    answer = ChatMessage(role="assistant", content="")
    assert text(await said(chat(user("x")), model)) == "no tools"
    assert calls(await said(chat(user("x"), tools=TOOLS), model)) == [("weather", {"city": "Oslo"})]
    assert text(await said(chat(answer, user("you")), model)) == "later, you"
    with pytest.raises(ModelError, match="try again"):
        await said(chat(answer, answer, user("x")), model)
    with pytest.raises(TypeError, match=r"the function of turn 4: expected str, Token, .* got int"):
        await said(chat(answer, answer, answer), model)
    assert [len(prompt.messages) for prompt in model.prompts] == [3, 3]


@pytest.mark.parametrize(
    ("turns", "why"),
    [
        ("hello", "turns: expected a list of turns, got str"),
        ([7], "turn 1: expected str, Token, ToolCall, Finish, dict"),
        (["x", {"arguments": {}}], "turn 2: thinking, and the name and id of a call, are texts"),
        (
            [{"name": "f", "argument": {}}],
            "turn 1: a dict has name, arguments and id of a call, or thinking; got 'argument'",
        ),
        ([{"name": "f", "arguments": 7}], "turn 1: arguments are a dict or a JSON text, got int"),
        ([{"name": 7}], "are texts, got {'name': 7}"),
    ],
)
def test_a_turn_that_is_none_is_refused_at_once(turns: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        Scripted(turns)


async def test_an_empty_script_says_so() -> None:
    with pytest.raises(ModelError, match="the script has 0 turns"):
        await said(Prompt(text="x"), Scripted([]))


async def test_a_configuration_gives_a_script() -> None:
    options = {"turns": ["Hello.", [{"name": "weather", "arguments": {"city": "Oslo"}}]]}
    spec = load_spec("agent", ModelConfig(factory="models.library.scripted:Scripted", options=options))
    async with spec.load() as model:
        tape = Tape([chat(user("x")), chat(user("x"), CALLED)])
        await model(Session(tape))
    assert text(tape.sent) == "Hello."
    assert calls(tape.sent) == [("weather", {"city": "Oslo"})]


async def test_a_gateway_serves_it() -> None:
    async with memory_gateway([spec_of(Scripted(), "scripted")], check=True) as served:
        client = served.client()
        assert (await client.lmi("one two", max_new_tokens=9)).text == "You said: one two"
        assert (await client.lmi("one two", stream=True, max_new_tokens=4)).messages == ["You", " said:", " ", "one"]
