"""The answers that the reference quotes are those that the gateway gives, byte for byte but for line breaks, ids and times."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from gateway.client import post
from gateway.config import Config, LMIConfig
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.errors import ModelError
from models.library.tensors import add_sub
from models.messages import FinishReason, Prompt, Token, TopToken
from protocols.events import Data, End, Headers, Response
from tests.docs.pages import blocks

DEEP = [
    Token(text="Deep ", id=304, log_prob=-0.05),
    Token(text="Learning", id=11157, log_prob=-1.25, finish=FinishReason.LENGTH),
]
WORDS = {
    "What is": DEEP,
    "counted": [Token(text="Deep ", prompt_tokens=7), Token(text="Learning", finish=FinishReason.EOS_TOKEN)],
    "no end": [DEEP[0], Token(text="Learning", id=11157, log_prob=-1.25)],
    "a field": [Token(text="a "), Token(text="field", finish=FinishReason.EOS_TOKEN)],
    "a feast": [Token(text="a "), Token(text="fête"), Token(text="!", finish=FinishReason.EOS_TOKEN)],
    "dry": [DEEP[0]],
    "drier": [],
    "Deep Learning": [
        Token(text="Deep ", id=304, log_prob=None, prefill=True),
        Token(text="Learning", id=11157, log_prob=-1.25, prefill=True, top=(TopToken(text="Fun", id=512, log_prob=-0.5),)),
    ],
}


LISTED = ["temperature", "top_p", "n", "best_of", "decoder_input_details", "prompt_logprobs"]


async def lm(prompt: Prompt) -> AsyncIterator[Token]:
    name = prompt.text.removeprefix("User: ").removesuffix("\nAssistant:")  # the frame of a chat prompt
    for token in WORDS[name]:
        yield token
    if name in ("dry", "drier"):
        raise ModelError("the text ran dry")
    if prompt.parameters.best_of > 1:
        yield Token(text="Fun", id=512, log_prob=-2.5, finish=FinishReason.EOS_TOKEN, sequence=1)


async def answered(body: dict[str, Any], path: str = "/invocations", **lmi: Any) -> str:
    """The body of the answer, where `lmi` is configured."""
    spec = spec_of(lm, name="lm", parameters=LISTED)
    async with memory_gateway([spec], Config(lmi=LMIConfig(**lmi))) as served:
        return (await exchanged(served, path, json.dumps(body)))[1]


async def exchanged(served: MemoryGateway, path: str, body: str) -> tuple[Headers, str]:
    """The head's fields and the body of the answer to a POST."""
    client, text = served.http1(), b""
    fields: Headers = ()
    await client.send(*post(1, path, body.encode()))
    while type(event := await client.next_event()) is not End:
        if type(event) is Response:
            fields = event.headers
        elif type(event) is Data:
            text += b"".join(event.buffers)
    return fields, text.decode()


def squeezed(text: str) -> str:
    """Without what differs: white space, which breaks the page's lines, ids, the time, and the version."""
    text = re.sub(r"cmpl-[0-9a-f]+", "cmpl-", re.sub(r"everywire-[\w.]+", "everywire-", text))
    return re.sub(r"\s+", "", re.sub(r'"created": ?\d+', '"created":', text))


WHAT = {"inputs": "What is"}
DETAILS = {"parameters": {"details": True}}
STREAM = {"stream": True}
CHAT = {"messages": [{"role": "user", "content": "What is"}]}
V1 = "/v1/chat/completions"

SAMPLES: dict[str, list[tuple[dict[str, Any], str, dict[str, Any]]]] = {
    "docs/reference/lmi.md": [(WHAT | {"parameters": {"min_q": 1}}, "", {"unsupported": "refuse"})],
    "docs/reference/lmi-answers.md": [
        (WHAT, "", {}),
        (WHAT | DETAILS, "", {}),
        (WHAT | STREAM, "", {}),
        (WHAT | {"parameters": {"output_formatter": "sse"}}, "", {}),
        ({"inputs": "no end"} | STREAM, "", {}),
        (WHAT | {"parameters": {"best_of": 2, "do_sample": True}}, "", {}),
        (WHAT | DETAILS, "", {"tgi_compat": True}),
        (WHAT | STREAM | DETAILS, "", {"tgi_compat": True}),
        ({}, "", {}),
        (WHAT | {"parameters": {"top_p": 2}}, "", {}),
        ({"inputs": "dry"} | STREAM, "", {}),
        ({"inputs": "dry"} | STREAM, "", {"tgi_compat": True}),
        ({"inputs": ["What is", ""]}, "", {"rolling_batch": "disable"}),
        ({"inputs": ["What is", "dry"]}, "", {"rolling_batch": "disable", "enable_streaming": True}),
    ],
    "docs/reference/lmi-formatters.md": [
        ({"inputs": ["What is", "a field"]}, "", {"rolling_batch": "disable"}),
        ({"inputs": ["What is", "a feast"]}, "", {"rolling_batch": "disable", "enable_streaming": True}),
        (CHAT | {"max_tokens": 2}, "", {"output_formatter": "jsonlines_chat"}),
    ],
    "docs/reference/openai.md": [
        ({"messages": [{"role": "user", "content": "counted"}]}, V1, {}),
        ({"prompt": "counted"}, "/v1/completions", {}),
        ({"messages": [{"role": "user", "content": "counted"}], "stream": True}, V1, {}),
        (
            {
                "messages": [{"role": "user", "content": "counted"}],
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            V1,
            {},
        ),
        ({"prompt": "Deep Learning", "echo": True, "logprobs": 1, "max_tokens": 0}, "/v1/completions", {}),
        (CHAT | {"temperature": 3}, V1, {}),
        ({"messages": [{"role": "user", "content": "dry"}], "stream": True}, V1, {}),
    ],
}


@pytest.mark.parametrize("page", SAMPLES)
async def test_every_answer_that_the_page_quotes_is_given(page: str) -> None:
    given = [
        squeezed(await answered({"model": "lm"} | body if path else body, path or "/invocations", **lmi))
        for body, path, lmi in SAMPLES[page]
    ]
    quoted = [block for block in blocks(page) if not block.language]
    for block in quoted:
        for sample in re.split(r"^[A-D]  |\n\n", block.text, flags=re.MULTILINE):
            wanted = squeezed(sample)
            assert any(wanted in answer for answer in given), f"line {block.line}: nobody is answered {sample}"


async def ticks(x: np.ndarray[Any, Any]) -> AsyncIterator[dict[str, np.ndarray[Any, Any]]]:
    for number in range(2):
        yield {"n": np.array([number], np.int64)}


async def test_the_page_of_v2s_streams_quotes_what_is_sent() -> None:
    stream, generate = [block.text for block in blocks("docs/reference/v2-streams.md") if not block.language]
    async with memory_gateway([spec_of(ticks), spec_of(add_sub)]) as served:
        asked = json.dumps({"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [0]}]})
        head, body = await exchanged(served, "/v2/models/ticks/infer_stream", asked)
        quoted_head, _, quoted_body = stream.partition("\n\n")
        assert quoted_head == f"content-type: {dict(head)[b'content-type'].decode()}"
        assert body == quoted_body
        request, _, answer = generate.partition("\n\n")
        line, _, asked = request.partition("\n")
        assert (await exchanged(served, line.removeprefix("POST "), asked))[1] == answer.strip()
