"""Conversations as prompts: the template of models that have none of their own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import msgspec
import pytest

from models.chat import ChatMessage, Conversation, apply_template, plain_template
from models.errors import ModelError
from models.messages import ResponseFormat, ToolCall, ToolSpec


def test_a_conversation_is_a_line_for_each_speaker_and_the_beginning_of_the_next() -> None:
    messages = [
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="Hi"),
        ChatMessage(role="assistant", content="Hello."),
        ChatMessage(role="user", content="Who are you?"),
    ]
    assert plain_template(messages) == "Be brief.\nUser: Hi\nAssistant: Hello.\nUser: Who are you?\nAssistant:"


def test_who_has_a_name_speaks_under_it() -> None:
    messages = [ChatMessage(role="user", content="Hi", name="Ada"), ChatMessage(role="tool", content="42")]
    assert plain_template(messages) == "Ada: Hi\nTool: 42\nAssistant:"


def test_what_developers_say_has_no_speaker_as_systems_have_none() -> None:
    assert plain_template([ChatMessage(role="developer", content="Be kind.", name="dev")]) == "Be kind.\nAssistant:"


def test_no_messages_are_the_assistants_beginning_alone() -> None:
    assert plain_template([]) == "Assistant:"


# -- calls of tools

CALLED = ChatMessage(role="assistant", content="", tool_calls=(ToolCall(id="1", name="f", arguments='{"a": 1}'),))
RESULT = ChatMessage(role="tool", content="42", tool_call_id="1")


def test_a_call_and_its_result_are_lines() -> None:
    said = [CALLED, RESULT, ChatMessage(role="assistant", content="So.", tool_calls=(ToolCall(id="2", name="g"),))]
    assert plain_template(said) == 'Assistant called f({"a": 1})\nf: 42\nAssistant: So.\nAssistant called g({})\nAssistant:'


def test_a_beginning_is_the_end_of_the_prompt() -> None:
    said = [ChatMessage(role="user", content="Hi"), ChatMessage(role="assistant", content="Well")]
    assert plain_template(said, add_generation_prompt=False) == "User: Hi\nAssistant: Well"


# -- the call of a template

HI = (ChatMessage(role="user", content="Hi"),)
TOOL = ToolSpec(name="f")
FORMAT = ResponseFormat(kind="json_object")
EVERYTHING = Conversation(
    messages=HI, tools=(TOOL,), tool_choice="f", response_format=FORMAT, effort="low", thinking=True, prefill=True
)


def test_a_template_gets_what_it_has_parameters_for() -> None:
    got: dict[str, Any] = {}

    def template(
        messages: Any, tools: Any, tool_choice: Any = "", *, response_format: Any, effort: Any, thinking: Any,
        add_generation_prompt: Any,
    ) -> str:  # fmt: skip
        got.update(locals())
        return "text"

    assert apply_template(template, EVERYTHING) == "text"
    assert {name: value for name, value in got.items() if name != "got"} == {
        "messages": HI, "tools": (TOOL,), "tool_choice": "f", "response_format": FORMAT, "effort": "low", "thinking": True,
        "add_generation_prompt": False,
    }  # fmt: skip


def test_a_template_of_messages_alone_goes_on_as_it_is() -> None:
    assert apply_template(lambda messages: messages[0].content, EVERYTHING) == "Hi"
    assert apply_template(str, Conversation(messages=())) == "()"  # no signature tells what it takes


class Model:
    def chat_template(self, messages: Any, tools: Any = (), style: str = "") -> str:
        return f"{len(messages)} {len(tools)} {style}"


def test_a_method_is_a_template_and_objects_do_not_share_it() -> None:
    for tools in ((), (TOOL,)):
        said = Conversation(messages=HI, tools=tools, template={"style": "short"})
        assert apply_template(Model().chat_template, said) == f"1 {len(tools)} short"


@pytest.mark.parametrize("name", ["colour", "tools", "messages", "self", "add_generation_prompt"])
def test_a_value_that_the_template_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"chat_template_kwargs.{name}: expected a value that .* takes .style.") as caught:
        apply_template(Model().chat_template, Conversation(messages=HI, template={name: 1}))
    assert caught.value.status == 400


def test_a_template_that_takes_more_gets_any_other_name() -> None:
    def template(messages: Any, **more: Any) -> str:
        return str(more)

    said = msgspec.structs.replace(EVERYTHING, template={"colour": 1})
    assert apply_template(template, said) == "{'colour': 1}"  # no keyword of the gateway's without its parameter
    with pytest.raises(ModelError, match=r"kwargs\.tools"):
        apply_template(template, msgspec.structs.replace(EVERYTHING, template={"tools": 1}))
    with pytest.raises(ModelError, match=r"kwargs\.messages"):
        apply_template(template, msgspec.structs.replace(EVERYTHING, template={"messages": 1}))


def test_a_template_that_is_gone_is_not_kept() -> None:
    def made() -> Any:
        return lambda messages, tools=(): "x"

    template = made()
    apply_template(template, EVERYTHING)
    gone = weakref.ref(template)
    del template
    gc.collect()
    assert gone() is None
