"""One request, or a few, for each route that calls a model: `lm` and `batch` of text, `id` of tensors, `echo` of parts."""

from __future__ import annotations

import json
from typing import Any

from protocols import v2

LONG = " ".join(["word"] * 1000)


def asked(path: str, body: Any, *headers: tuple[bytes, bytes]) -> tuple[str, bytes, tuple[tuple[bytes, bytes], ...]]:
    coded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return path, coded, headers or ((b"content-type", b"application/json"),)


def texts(**how: Any) -> dict[str, Any]:
    return {"inputs": LONG, "parameters": {"max_new_tokens": 2000}, **how}


def tensors(n: int = 2000) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, n], "data": [0.5] * n}]}


CHAT = {"messages": [{"role": "user", "content": LONG}], "model": "lm", "max_tokens": 2000}
COMPLETION = {"prompt": LONG, "model": "lm", "max_tokens": 2000}
BYTES = (b"content-type", b"application/octet-stream")
EVERY_ROUTE = {
    "infer": asked("/v2/models/id/infer", tensors()),
    "infer, version": asked("/v2/models/id/versions/1/infer", tensors()),
    "infer, binary": asked("/v2/models/id/infer", {**tensors(), "parameters": {"binary_data_output": True}}),
    "infer, small": asked("/v2/models/id/infer", tensors(1)),
    "infer_stream": asked("/v2/models/id/infer_stream", tensors()),
    "infer_stream, frames": asked("/v2/models/id/infer_stream", tensors(), (b"accept", v2.FRAMES.encode())),
    "generate": asked("/v2/models/lm/generate", {"text_input": LONG, "max_new_tokens": 2000}),
    "generate, tensors": asked("/v2/models/id/generate", {"x": [[0.5] * 2000]}),
    "generate_stream": asked("/v2/models/lm/generate_stream", {"text_input": LONG, "max_new_tokens": 2000}),
    "generate_stream, tensors": asked("/v2/models/id/generate_stream", {"x": [[0.5] * 2000]}),
    "invocations": asked("/invocations", texts()),
    "invocations, jsonlines": asked("/invocations", texts(stream=True)),
    "invoke, text": asked("/models/lm/invoke", texts()),
    "invoke, tensors": asked("/models/id/invoke", tensors()),
    "invoke, parts": asked("/models/echo/invoke", b"x" * 2000, BYTES),
    "predictions": asked("/predictions/lm", texts()),
    "predictions, jsonlines": asked("/predictions/lm", texts(stream=True)),
    "predictions, sse": asked("/predictions/lm", texts(output_formatter="sse", stream=True)),
    "predictions, batch": asked("/predictions/batch", {**texts(), "inputs": [LONG, LONG]}),
    "chat": asked("/v1/chat/completions", CHAT),
    "chat, stream": asked("/v1/chat/completions", {**CHAT, "stream": True}),
    "completions": asked("/v1/completions", COMPLETION),
    "completions, stream": asked("/v1/completions", {**COMPLETION, "stream": True}),
    "chat, endpoint": asked("/endpoints/lm/openai/v1/chat/completions", CHAT),
    "chat, component": asked("/endpoints/x/inference-components/lm/openai/v1/chat/completions", {**CHAT, "stream": True}),
    "platform": asked("/endpoints/echo/invocations", b"x" * 2000, BYTES),
    "platform, text": asked("/endpoints/lm/invocations", texts()),
    "platform, tensors": asked("/endpoints/id/invocations", tensors()),
    "response stream": asked("/endpoints/echo/invocations-response-stream", b"x" * 2000, BYTES),
    "response stream, text": asked("/endpoints/lm/invocations-response-stream", texts(stream=True)),
}
