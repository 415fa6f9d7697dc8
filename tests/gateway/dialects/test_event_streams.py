"""Event streams on every wire: a client that reads `text/*` without a charset as Latin-1 gets the texts that were sent."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from email.message import Message
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from models.adapt import spec_of
from models.messages import Family, Prompt, Token
from models.session import Session
from tests.gateway.dialects.text.test_lmi_forms import KINDS, ask, lmi, parts_of, text_spec
from tests.gateway.operator.test_operator_events import reading
from tests.gateway.promises import serving

CONTENT_TYPE = "text/event-stream; charset=utf-8"
WORDS = "Å…\u0085 é"
"""The second byte of `Å` in UTF-8 is 0x85, which Latin-1 has as a line end."""


async def speaks(session: Session[Prompt, Any]) -> None:
    await session.receive()
    await session.send(Token(text=WORDS, id=1, log_prob=-0.5))


async def speaks_in_arrays(x: npt.NDArray[np.int64]) -> AsyncIterator[npt.NDArray[np.object_]]:
    yield np.array([WORDS], object)


def said(messages: Any) -> str:
    return str(messages[-1].content)


_CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 1}
_TEXT = {"inputs": "x", "stream": True, "parameters": {"max_new_tokens": 1}}
_TENSORS = {"inputs": [{"name": "x", "datatype": "INT64", "shape": [1], "data": [1]}]}
_SSE, _TGI = {"output_formatter": "sse"}, {"output_formatter": "sse", "tgi_compat": True}

WIRES: Mapping[str, tuple[str, Any, Mapping[str, Any]]] = {
    # name: (path, request, settings of the section `lmi`)
    "chat": ("/v1/chat/completions", _CHAT, {}),
    "completions": ("/v1/completions", {"model": "m", "prompt": "x", "stream": True, "max_tokens": 1}, {}),
    "LMI": ("/predictions/m", _TEXT, _SSE),
    "LMI at /invocations": ("/invocations", _TEXT, _SSE),
    "TGI": ("/invocations", _TEXT, _TGI),
    "multi-model": ("/models/m/invoke", _TEXT, _SSE),
    "InvokeEndpoint": ("/endpoints/m/invocations", _TEXT, _SSE),
    "response stream": ("/endpoints/m/invocations-response-stream", _TEXT, _SSE),
    "generate_stream": ("/v2/models/m/generate_stream", {"text_input": "x", "max_tokens": 1}, {}),
    "generate_stream of tensors": ("/v2/models/t/generate_stream", {"x": [1]}, {}),
    "infer_stream": ("/v2/models/t/infer_stream", _TENSORS, {}),
}


def as_requests_reads(content_type: str, body: bytes) -> list[str]:
    """The lines of an answer by the rules of Python's `requests`, with `decode_unicode`."""
    head = Message()
    head["content-type"] = content_type
    assert head.get_content_type() == "text/event-stream"
    return body.decode(head.get_content_charset("iso-8859-1")).splitlines()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wire", WIRES)
async def test_a_client_that_goes_by_the_charset_reads_what_was_sent(wire: str, kind: str) -> None:
    path, request, configured = WIRES[wire]
    text = text_spec(speaks, chat_template=said)
    async with serving(text, spec_of(speaks_in_arrays, "t", family=Family.TENSOR), config=lmi(**configured)) as house:
        status, headers, body = await ask(house, path, request, kind=kind)
    assert status == 200, body
    content_type = headers["content-type"]
    if path.endswith("-response-stream"):
        content_type, body = headers["x-amzn-sagemaker-content-type"], b"".join(parts_of(body))
    assert content_type == CONTENT_TYPE
    lines = [line.removeprefix("data: ") for line in as_requests_reads(content_type, body) if line]
    texts = [json.dumps(json.loads(line), ensure_ascii=False) for line in lines if line != "[DONE]"]
    assert json.dumps(WORDS, ensure_ascii=False)[1:-1] in "".join(texts)


async def test_the_operators_events_have_it_too(autojump_clock: Any) -> None:
    async with serving(text_spec(speaks)) as house, reading(house.gateway) as reader:
        assert reader.headers[b"content-type"] == CONTENT_TYPE.encode()
