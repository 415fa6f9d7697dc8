"""Chats with tools, formats, thinking and media through the whole gateway: what a model gets, and what its answer shows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from models.errors import ModelError
from models.messages import (
    ChatMessage,
    Finish,
    FinishReason,
    Image,
    Prompt,
    ResponseFormat,
    Sound,
    Text,
    Token,
    ToolCall,
    ToolSpec,
)
from tests.gateway.dialects.text.test_lmi_forms import ask, lmi, text_spec
from tests.gateway.dialects.text.test_openai import CHAT, COMPLETIONS, SAID, events_in
from tests.gateway.promises import House, serving

ALL = frozenset(
    ("tools", "tool_choice", "parallel_tools", "json_object", "json_schema", "regex", "choice", "thinking", "images",
     "audio", "adapters", "prefill", "template")
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]
WEATHER = ToolSpec(name="weather", description="Tells it", parameters=SCHEMA)
TIME = ToolSpec(name="time")
PIECES = (
    ToolCall(id="call_a", name="weather", arguments='{"city": '),
    ToolCall(arguments='"Köln"}'),
    ToolCall(index=1, id="call_b", name="time", text="<time>"),
)


def saying(*messages: Any) -> tuple[Callable[[Prompt], AsyncIterator[Any]], list[Prompt]]:
    """A model that always says these messages, and the prompts that it gets."""
    seen: list[Prompt] = []

    async def model(prompt: Prompt) -> AsyncIterator[Any]:
        seen.append(prompt)
        for message in messages:
            yield message

    return model, seen


async def chat(house: House, path: str = CHAT, **members: Any) -> tuple[int, Any]:
    status, _, body = await ask(house, path, {**SAID, **members})
    return status, events_in(body) if members.get("stream") and status == 200 else json.loads(body)


def deltas(chunks: list[Any]) -> list[Any]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


# -- tools


async def test_calls_reach_the_client_whole(autojump_clock: Any) -> None:
    model, seen = saying(*PIECES)
    async with serving(text_spec(model, features=ALL)) as house:
        _, answer = await chat(house, tools=TOOLS)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"] == {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
                {"id": "call_b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
            ],
        }
        assert answer["usage"]["completion_tokens"] == 3
        assert (seen[0].tools, seen[0].tool_choice, seen[0].parallel_tools) == ((WEATHER, TIME), "auto", True)
        assert seen[0].messages == (ChatMessage(role="user", content="Hi", parts=(Text(text="Hi"),)),)
        assert house.endings == {"complete": 1}


async def test_calls_reach_the_client_piece_by_piece(autojump_clock: Any) -> None:
    model, _ = saying(Token(text="Let me see."), *PIECES)
    async with serving(text_spec(model, features=ALL)) as house:
        _, chunks = await chat(house, tools=TOOLS, stream=True, stream_options={"include_usage": True})
        first = {"index": 0, "id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
        second = {"index": 1, "id": "call_b", "type": "function", "function": {"name": "time", "arguments": ""}}
        assert deltas(chunks) == [
            {"role": "assistant", "content": ""},
            {"content": "Let me see."},
            {"tool_calls": [first]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"Köln"}'}}]},
            {"tool_calls": [second]},
            {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
            {},
        ]
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
        assert chunks[-1]["usage"]["completion_tokens"] == 4


async def test_a_history_of_calls_reaches_the_model_and_its_template(autojump_clock: Any) -> None:
    model, seen = saying("So.")
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{ "city":"Köln"}'}}
    history = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "x", "content": "18 C"},
    ]
    async with serving(text_spec(model, features=frozenset({"tools"}))) as house:
        _, answer = await chat(house, messages=history, tools=TOOLS)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "So."}
        called = ToolCall(id="x", name="weather", arguments='{ "city":"Köln"}')
        assert seen[0].messages == (
            ChatMessage(role="user", content="Weather?"),
            ChatMessage(role="assistant", content="", tool_calls=(called,), thinking="hm"),
            ChatMessage(role="tool", content="18 C", tool_call_id="x"),
        )
        assert seen[0].text == (
            'User: Weather?\nAssistant called weather({ "city":"Köln"})\nweather: 18 C\nAssistant:'
        )  # fmt: skip


async def test_tools_are_in_the_text_of_a_template_that_takes_them(autojump_clock: Any) -> None:
    model, seen = saying("x")
    with_tools = text_spec(
        model,
        "with",
        features=ALL,
        chat_template=lambda messages, tools, tool_choice: f"{tool_choice}: {[t.name for t in tools]}",
    )
    without = text_spec(model, "without", features=ALL, chat_template=lambda messages: messages[-1].content)
    async with serving(with_tools, without) as house:
        for choice, said in (("auto", "auto: ['weather', 'time']"), ("required", "required: ['weather', 'time']")):
            await chat(house, model="with", tools=TOOLS, tool_choice=choice)
            assert seen[-1].text == said
            await chat(house, model="without", tools=TOOLS, tool_choice=choice)
            assert seen[-1].text == "Hi"
            assert seen[-1].tools == (WEATHER, TIME)


@pytest.mark.parametrize(("features", "tools"), [({"tools"}, ()), ({"tools", "tool_choice"}, (WEATHER, TIME))])
async def test_tools_that_may_not_be_called(features: set[str], tools: Any, autojump_clock: Any) -> None:
    model, seen = saying("x")
    async with serving(text_spec(model, features=frozenset(features))) as house:
        status, _ = await chat(house, tools=TOOLS, tool_choice="none")
        assert (status, seen[0].tools, seen[0].tool_choice) == (200, tools, "none")


async def test_a_model_without_tools_takes_them_if_none_may_be_called(autojump_clock: Any) -> None:
    model, seen = saying("x")
    async with serving(text_spec(model)) as house:
        status, _ = await chat(house, tools=TOOLS, tool_choice="none")
        assert (status, seen[0].tools) == (200, ())


@pytest.mark.parametrize("members", [{}, {"tools": TOOLS, "tool_choice": "none"}])
@pytest.mark.parametrize("features", [frozenset(), ALL])
async def test_a_call_that_nobody_allowed_is_the_models_error(members: Any, features: Any, autojump_clock: Any) -> None:
    model, _ = saying(ToolCall(name="weather"))
    async with serving(text_spec(model, features=features)) as house:
        status, answer = await chat(house, **members)
        assert (status, "tool call" in answer["error"]["message"]) == (500, True)
        assert house.endings == {"model-error": 1}


async def test_who_takes_one_call_gets_one(autojump_clock: Any) -> None:
    model, seen = saying(*PIECES, Token(text="more"))
    one, strict = text_spec(model, "one", features=frozenset({"tools"})), text_spec(model, "strict", features=ALL)
    async with serving(one, strict) as house:
        for stream in (False, True):
            _, answer = await chat(house, model="one", tools=TOOLS, parallel_tool_calls=False, stream=stream)
            if stream:
                assert {c["index"] for d in deltas(answer) for c in d.get("tool_calls", ())} == {0}
                assert answer[-1]["choices"][0]["finish_reason"] == "tool_calls"
            else:
                assert [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["call_a"]
        assert not seen[0].parallel_tools
        status, answer = await chat(house, model="strict", tools=TOOLS, parallel_tool_calls=False)
        assert (status, "a second tool" in answer["error"]["message"]) == (500, True)
        assert house.endings == {"complete": 2, "model-error": 1}


async def test_one_call_may_have_any_index(autojump_clock: Any) -> None:
    model, _ = saying(ToolCall(index=3, id="c", name="time"), ToolCall(index=3, arguments="{}"))
    async with serving(text_spec(model, features=ALL)) as house:
        _, answer = await chat(house, tools=TOOLS, parallel_tool_calls=False)
        assert [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["c"]


async def test_a_call_that_is_cut_by_the_number_of_tokens(autojump_clock: Any) -> None:
    model, _ = saying(ToolCall(name="weather", arguments='{"city"', tokens=5), ToolCall(arguments=': "K"}'))
    async with serving(text_spec(model, features=ALL)) as house:
        _, answer = await chat(house, tools=TOOLS, max_tokens=5)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city"'


async def test_text_that_may_begin_a_stop_sequence_comes_before_a_call(autojump_clock: Any) -> None:
    model, _ = saying(Token(text="so E"), PIECES[0], Token(text="ND"))
    async with serving(text_spec(model, features=ALL)) as house:
        _, chunks = await chat(house, tools=TOOLS, stop="END", stream=True)
        said = [delta.get("content") or delta.get("tool_calls") for delta in deltas(chunks)]
        assert [word for word in said if isinstance(word, str)] == ["so ", "E", "ND"]
        assert isinstance(said[3], list)


async def test_each_choice_has_its_own_calls(autojump_clock: Any) -> None:
    model, _ = saying(PIECES[2])
    async with serving(text_spec(model, features=ALL)) as house:
        _, answer = await chat(house, tools=TOOLS, n=2)
        assert [c["message"]["tool_calls"][0]["id"] for c in answer["choices"]] == ["call_b", "call_b"]
        _, chunks = await chat(house, tools=TOOLS, n=2, stream=True)
        order = [(c["index"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"]]
        assert order == [(0, None)] * 3 + [(0, "tool_calls")] + [(1, None)] * 3 + [(1, "tool_calls")]


# -- refusals


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"adapters": ["fr"]}, "adapters"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
         "messages[0].content[0].type"),
    ],
)  # fmt: skip
async def test_what_a_model_does_not_declare_is_refused_by_name(members: Any, param: str, autojump_clock: Any) -> None:
    model, seen = saying("x")
    async with serving(text_spec(model)) as house:
        status, answer = await chat(house, **members)
        assert (status, answer["error"]["param"]) == (400, param)
        assert not seen
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize("formatter", ["json_chat", "jsonlines_chat"])
async def test_lmis_forms_of_a_chat_have_no_tools(formatter: str, autojump_clock: Any) -> None:
    model, _ = saying(PIECES[2])
    async with serving(text_spec(model, features=ALL), config=lmi(output_formatter=formatter)) as house:
        status, _, body = await ask(house, "/invocations", {**SAID, "tools": TOOLS})
        assert (status, json.loads(body)["error"]["param"]) == (400, "tools")
        status, _, body = await ask(house, "/invocations", SAID)
        assert (status, b"<time>" in body) == (200, True)  # the text of the call


@pytest.mark.parametrize("path", ["/invocations", "/predictions/m", "/v2/models/m/generate"])
async def test_wires_without_messages_have_no_tools(path: str, autojump_clock: Any) -> None:
    model, _ = saying(PIECES[2])
    async with serving(text_spec(model, features=ALL)) as house:
        name = "text_input" if path.startswith("/v2") else "inputs"
        parameters = {"tools": TOOLS}
        status, _, body = await ask(house, path, {name: "x", "parameters": parameters})
        assert status in (400, 424)
        assert b"expected messages" in body
        status, _, body = await ask(house, path, {name: "x"})
        assert (status, b"<time>" in body) == (200, True)


# -- formats

FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
FOUND = ResponseFormat(kind="json_schema", schema=SCHEMA, name="s", strict=True)
PLAIN = ResponseFormat(kind="json_schema", schema=SCHEMA)


@pytest.mark.parametrize(
    ("path", "document", "found"),
    [
        (CHAT, {**SAID, "response_format": FORMAT}, FOUND),
        (COMPLETIONS, {"prompt": "x", "response_format": FORMAT}, FOUND),
        ("/invocations", {**SAID, "response_format": FORMAT}, FOUND),
        ("/invocations", {"inputs": "x", "parameters": {"guided_json": SCHEMA}}, PLAIN),
        ("/invocations", {"inputs": "x", "parameters": {"response_format": FORMAT}}, FOUND),
        ("/v2/models/m/generate", {"text_input": "x", "guided_json": SCHEMA}, PLAIN),
        ("/v2/models/m/generate", {"text_input": "x", "parameters": {"grammar": {"type": "json", "value": SCHEMA}}}, PLAIN),
    ],
)
async def test_a_format_reaches_a_model_on_every_wire(path: str, document: Any, found: Any, autojump_clock: Any) -> None:
    model, seen = saying("{}")
    async with serving(text_spec(model, features=ALL)) as house:
        status, _, body = await ask(house, path, document)
        assert status == 200, body
        assert seen[0].response_format == found
        document = json.loads(json.dumps(document).replace('"properties"', '"not": {}, "properties"'))
        status, _, body = await ask(house, path, document)
        assert status in (400, 424)
        assert b"not: not offered, no answer can be held to it" in body


async def test_a_model_that_judges_formats_itself_is_asked() -> None:
    class Judge:
        features = ALL

        async def __call__(self, prompt: Prompt) -> AsyncIterator[str]:
            yield "{}"

        def check_format(self, format: ResponseFormat) -> None:
            if format.schema != SCHEMA:
                raise ModelError("too hard for me")

    async with serving(text_spec(Judge())) as house:
        for path, document in ((CHAT, SAID), (COMPLETIONS, {"prompt": "x"}), ("/invocations", {"inputs": "x"})):
            for schema, good in ((SCHEMA, True), ({"not": {}}, False)):
                asked = {"guided_json": schema}
                asked = {**document, **({"parameters": asked} if "inputs" in document else asked)}
                status, _, body = await ask(house, path, asked)
                assert (status == 200, b"too hard for me" in body) == (good, not good)
                assert status < 500


# -- thinking

THOUGHTS = (Token(text="Hm, ", thinking=True), Token(text="yes.", thinking=True), Token(text="42"))


async def test_thinking_is_apart_from_the_text(autojump_clock: Any) -> None:
    model, seen = saying(*THOUGHTS)
    async with serving(text_spec(model, features=ALL)) as house:
        _, answer = await chat(house, reasoning_effort="high")
        assert answer["choices"][0]["message"]["content"] == "42"
        assert answer["choices"][0]["message"]["reasoning_content"] == "Hm, yes."
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
        assert seen[0].effort == "high"
        _, chunks = await chat(house, stream=True, logprobs=True)
        shown = [delta for delta in deltas(chunks) if delta]
        assert shown[1:] == [{"reasoning_content": "Hm, "}, {"reasoning_content": "yes."}, {"content": "42"}]


async def test_thinking_that_nobody_wants_to_see_is_counted(autojump_clock: Any) -> None:
    model, _ = saying(*THOUGHTS)
    async with serving(text_spec(model, features=ALL)) as house:
        _, answer = await chat(house, include_reasoning=False)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "42"}
        assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/invocations", {"inputs": "x"}),
        ("/invocations", {"inputs": "x", "stream": True}),
        ("/v2/models/m/generate", {"text_input": "x"}),
        ("/v2/models/m/generate_stream", {"text_input": "x"}),
        (COMPLETIONS, {"prompt": "x"}),
        (COMPLETIONS, {"prompt": "x", "stream": True, "logprobs": 1}),
    ],
)
async def test_thinking_has_no_place_on_other_wires(path: str, document: Any, autojump_clock: Any) -> None:
    model, _ = saying(Token(text="So "), *THOUGHTS)
    async with serving(text_spec(model, features=ALL)) as house:
        status, _, body = await ask(house, path, document)
        assert status == 200
        assert b"42" in body
        assert b"Hm" not in body
        assert b"yes" not in body


async def test_a_stop_sequence_is_not_met_in_thinking(autojump_clock: Any) -> None:
    model, _ = saying(*THOUGHTS, Token(text=" yes, no"))
    async with serving(text_spec(model, features=ALL)) as house:
        _, answer = await chat(house, stop="yes")
        assert answer["choices"][0]["message"]["content"] == "42 "


async def test_a_model_may_count_its_tokens_itself(autojump_clock: Any) -> None:
    model, _ = saying(Token(text="a"), Finish(reason=FinishReason.EOS_TOKEN, completion_tokens=17))
    async with serving(text_spec(model)) as house:
        _, answer = await chat(house)
        assert answer["usage"]["completion_tokens"] == 17


# -- the rest of a request


async def test_media_reach_the_model_as_bytes(autojump_clock: Any) -> None:
    model, seen = saying("x")
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw==", "detail": "low"}},
        {"type": "text", "text": "What?"},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    ]
    async with serving(text_spec(model, features=ALL)) as house:
        status, answer = await chat(house, messages=[{"role": "user", "content": parts}])
        assert status == 200, answer
        assert seen[0].messages[0].parts == (
            Image(data=b"\x89PNG", media_type="image/png", detail="low"), Text(text="What?"), Sound(data=b"RIFF", format="wav"),
        )  # fmt: skip
        parts[0]["image_url"] = {"url": "data:image/png;base64,@@@"}
        status, answer = await chat(house, messages=[{"role": "user", "content": parts}])
        assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].image_url.url")


async def test_a_template_gets_what_the_client_gives_it(autojump_clock: Any) -> None:
    model, seen = saying("x")

    def template(messages: Any, style: str = "", effort: str = "") -> str:
        return f"{style} {effort} {messages[0].content}"

    async with serving(text_spec(model, features=ALL, chat_template=template)) as house:
        await chat(house, chat_template_kwargs={"style": "short"}, reasoning_effort="low", adapters=["fr"])
        assert (seen[0].text, seen[0].template, seen[0].adapter) == ("short low Hi", {"style": "short"}, "fr")
        status, answer = await chat(house, chat_template_kwargs={"colour": 1})
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs.colour")


async def test_an_answer_that_has_begun_is_continued(autojump_clock: Any) -> None:
    model, seen = saying("x")
    begun = [*SAID["messages"], {"role": "assistant", "content": "Well,"}]
    async with serving(text_spec(model, features=ALL)) as house:
        status, _ = await chat(house, messages=begun, continue_final_message=True, add_generation_prompt=False)
        assert (status, seen[0].text, seen[0].prefill) == (200, "User: Hi\nAssistant: Well,", True)
        status, answer = await chat(house, continue_final_message=True)
        assert (status, answer["error"]["param"]) == (400, "continue_final_message")


def test_a_feature_that_there_is_not_is_no_model() -> None:
    model, _ = saying("x")
    with pytest.raises(ValueError, match="got 'tolls'"):
        text_spec(model, features=frozenset({"tolls"}))
