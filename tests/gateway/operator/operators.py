"""Callers of the operator plane: the application alone, without a socket, and plain HTTP/1.1 over one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import trio
from starlette.types import ASGIApp, Message

from gateway.config import Config, ListenConfig, OperatorConfig
from gateway.gateway import Gateway
from gateway.operator.app import operator_app

TOKEN = "a token of our own"  # which has spaces, so that nothing takes it


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Operator:
    """Asks an application as an ASGI server would, from a browserless client on this machine."""

    def __init__(self, app: ASGIApp | Gateway, **headers: str) -> None:
        self.gateway = app if isinstance(app, Gateway) else None
        self.app = operator_app(app) if isinstance(app, Gateway) else app
        self.headers = {"host": "127.0.0.1:9000", **headers}

    def scope(self, method: str, target: str, headers: dict[str, str]) -> dict[str, Any]:
        path, _, query = target.partition("?")
        fields = {**self.headers, **headers}
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "scheme": "http",
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()],
            "client": ("127.0.0.1", 4711), "server": ("127.0.0.1", 9000),
        }  # fmt: skip

    async def ask(self, method: str, target: str, body: Any = b"", **headers: str) -> Answer:
        """One request and its whole answer. A body that is no bytes is JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
        told: list[Message] = []

        async def receive() -> Message:
            if not given:
                await trio.sleep_forever()
            return given.pop()

        async def send(message: Message) -> None:
            await trio.lowlevel.checkpoint()
            told.append(message)

        await self.app(self.scope(method, target, headers), receive, send)
        assert told[-1].get("more_body", False) is False
        fields = {name.decode(): value.decode() for name, value in told[0]["headers"]}
        return Answer(told[0]["status"], fields, b"".join(message["body"] for message in told[1:]))

    async def get(self, target: str, **headers: str) -> Any:
        """The JSON of an answer that is 200."""
        answer = await self.ask("GET", target, **headers)
        assert answer.status == 200, answer
        return answer.json


async def curl(port: int, method: str, path: str, body: bytes = b"", *, host: str = "127.0.0.1", **headers: str) -> Answer:
    """One request over a connection of its own, to its end."""
    fields = {"host": f"{host}:{port}", "connection": "close", "content-length": str(len(body)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    stream = await trio.open_tcp_stream(host, port)
    async with stream:
        await stream.send_all(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        came = b"".join([piece async for piece in stream])
    top, _, answered = came.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    named = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(status.split(" ")[1]), named, answered)


@asynccontextmanager
async def operated(*models: Any, config: Config | None = None, **operator: Any) -> AsyncIterator[Gateway]:
    """A gateway on free ports of this machine, with its operator plane; cancelled at the end where it has not drained."""
    chosen = replace(
        config or Config(), listen=ListenConfig(port=0), operator=OperatorConfig(**{"port": 0, **operator})
    )  # fmt: skip
    gateway = Gateway(chosen, models)
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        yield gateway
        nursery.cancel_scope.cancel()
