"""Prints the adapter of this server for the side-by-side benchmark: `python -m benchmarks.adapter > gateway.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BODY = '{"inputs":"hello","parameters":{"max_new_tokens":%%(n)d,"delay_ms":%%(ms)d%s},"stream":true}'


def adapter() -> dict[str, object]:
    """One target, `gateway`, run by this interpreter from this checkout."""
    library = {
        "echo": "models.library.echo:Echo",
        "identity": "models.library.tensors:identity",
        "tokens": "benchmarks.target:tokens",
    }
    models = [argument for name, factory in library.items() for argument in ("--model", f"{name}={factory}")]
    capacity = [argument for name in library for argument in ("--set", f"models.{name}.capacity=20000")]
    lines = {"path": "/invocations", "kind": "lines", "headers": {}, "body": _BODY % ""}
    return {
        "cmd": [
            "{python}", "-m", "gateway", "--port", "{port}", "--log-level", "warning", *models, *capacity,
            "--set", "bidi.default_model=echo", "--set", "limits.connections=20000", "--set", "websocket.ping_interval=3600",
        ],
        "python": sys.executable,
        "venv": "",
        "cwd": str(ROOT),
        "ready": "/v2/health/ready",
        "env": {},
        "infer": {"path": "/v2/models/identity/infer", "binary": True, "json": True, "h2": True},
        "grpc": {"model": "identity", "port": 0, "stream": True},
        "stream": lines,
        "sse": {**lines, "kind": "sse", "body": _BODY % ',"output_formatter":"sse"'},
        "h2tokens": lines,
        "bidi": {
            "path": "/endpoints/echo/invocations-bidirectional-stream",
            "frame": "eventstream",
            "content_type": "application/vnd.amazon.eventstream",
            "reply_bytes": 1174,
        },
        "ws": "/invocations-bidirectional-stream",
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({"gateway": adapter()}, indent=2))
