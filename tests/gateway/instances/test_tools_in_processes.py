"""The members of a request reach a model in a process of its own, on either loop; its calls and thinking come back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from gateway.config import ModelConfig, ProcessConfig
from gateway.testing import MemoryGateway
from models.errors import ModelError
from models.messages import ChatMessage, Prompt, ResponseFormat, Token, ToolCall
from protocols.events import Data, End
from tests.gateway.instances.test_process_models import serving
from tests.gateway.promises import raw

pytestmark = pytest.mark.programs

TOOL = {"type": "function", "function": {"name": "weather"}}
SEEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}


class Agent:
    """Calls the first tool; without tools it says what it has got."""

    features = frozenset({"tools", "json_schema", "thinking", "images", "template"})

    def chat_template(self, messages: Any, tools: Any = (), style: str = "") -> str:
        return f"{style}:{messages[-1].content}:{[tool.name for tool in tools]}"

    def check_format(self, format: ResponseFormat) -> None:
        assert isinstance(format.schema, dict)
        if "hard" in format.schema:
            raise ModelError("too hard")

    async def __call__(self, prompt: Prompt) -> AsyncIterator[Token | ToolCall]:
        yield Token(text="Hm.", thinking=True)
        if prompt.tools:
            yield ToolCall(id="c", name=prompt.tools[0].name, arguments='{"in": ')
            yield ToolCall(arguments='"Paris"}')
            return
        message = prompt.messages[-1]
        assert isinstance(message, ChatMessage)
        kinds = [type(part).__name__ for part in message.parts]
        wanted = None if prompt.response_format is None else prompt.response_format.schema
        yield Token(text=f"{prompt.text} {kinds} {wanted}")


async def asked(memory: MemoryGateway, *content: Any, **members: Any) -> tuple[int, Any]:
    peer = memory.http1()
    body = json.dumps({"messages": [{"role": "user", "content": [*content]}], **members}).encode()
    head = raw(1, b"POST", "/v1/chat/completions", content_length=len(body))
    await peer.send(head, Data(stream=1, buffers=(body,)), End(stream=1))
    status, _, answer = await peer.read_answer(1)
    return status, json.loads(answer)


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
async def test_a_model_in_a_process_has_all_features(loop: Literal["trio", "asyncio"]) -> None:
    text = {"type": "text", "text": "Hi"}
    model = ModelConfig(factory=f"{__name__}:Agent", process=ProcessConfig(enabled=True, loop=loop))
    async with serving(m=model) as memory:
        status, answer = await asked(memory, text, tools=[TOOL])
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "tool_calls")
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."
        assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"in": "Paris"}'}

        said = {"chat_template_kwargs": {"style": "short"}, "guided_json": {"not": {}}}  # the model judges it itself
        status, answer = await asked(memory, text, SEEN, **said)
        assert answer["choices"][0]["message"]["content"] == "short:Hi:[] ['Text', 'Image'] {'not': {}}"

        for members, param in (
            ({"guided_json": {"hard": 1}}, None),
            ({"guided_regex": "a"}, "guided_regex"),
            ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour"),
            ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ):
            status, answer = await asked(memory, text, **members)
            assert (status, answer["error"]["param"]) == (400, param)


async def test_features_of_the_configuration_take_the_place_of_the_models() -> None:
    process = ProcessConfig(enabled=True)
    async with serving(m=ModelConfig(factory=f"{__name__}:Agent", process=process, features=("json_schema",))) as memory:
        status, answer = await asked(memory, {"type": "text", "text": "Hi"}, tools=[TOOL])
        assert (status, answer["error"]["message"]) == (400, "tools: model 'm' does not declare tools")
