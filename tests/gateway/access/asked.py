"""One request for each row that a gateway has, on each of its wires, and how each API refuses a caller without access."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import trio

from gateway.config import (
    AccessConfig,
    BidiConfig,
    Config,
    EndpointConfig,
    ListenConfig,
    RepositoryConfig,
    SageMakerConfig,
    V2Config,
    VariantConfig,
)
from gateway.core.route import WEBSOCKET, Row
from gateway.gateway import Gateway
from gateway.keys import line_of
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.library.echo import Echo
from models.library.tensors import identity
from models.messages import Family, Prompt, Token
from models.session import Session
from models.spec import ModelSpec
from protocols.events import Data, End, Head, Headers, Request, Response
from protocols.grpc.status import decode_text
from protocols.websocket import handshake
from tests.gateway.wires.test_asgi import Server, served

KEY, OTHER = "ew_" + "k" * 43, "ew_" + "o" * 43
WRONG = "ew_" + "w" * 43
BEARER: Headers = ((b"authorization", b"Bearer " + KEY.encode()),)
WIRES = ("http1", "http2", "asgi/1.1", "asgi/2")
_OF_GRPC = ("/inference.", "/grpc.")

Answered: TypeAlias = tuple[int, dict[bytes, bytes], bytes]
Ask: TypeAlias = Callable[..., Any]


def keys_of(folder: Path, *lines: str) -> str:
    """A file of keys: each line is what follows KEY's name, or a whole line of its own."""
    file = folder / "keys"
    file.write_text("".join(f"{line}\n" for line in lines))
    file.chmod(0o600)
    return str(file)


def alice(*attributes: str, key: str = KEY) -> str:
    return line_of("alice", key, attributes)


def config(file: str = "", **access: Any) -> Config:
    """All there is to be asked for is there: management, and an endpoint with variants."""
    return Config(
        listen=ListenConfig(port=-1),
        access=AccessConfig(keys_file=file, **access),
        v2=V2Config(model_control=True),
        sagemaker=SageMakerConfig(multi_model=True, default_model="echo"),
        repository=RepositoryConfig(roots=("/nowhere",)),
        bidi=BidiConfig(default_model="echo"),
        endpoints={"both": EndpointConfig(variants={"a": VariantConfig(model="echo"), "b": VariantConfig(model="lm")})},
    )


async def _text(session: Session[Prompt, Token]) -> None:
    await session.receive()
    await session.send(Token(text="x"))


def models() -> list[ModelSpec]:
    return [
        spec_of(_text, "lm", family=Family.TEXT),
        spec_of(identity, "id", family=Family.TENSOR),
        spec_of(Echo(), "echo"),
    ]


def rows() -> list[Row]:
    """Every route that there can be."""
    return Gateway(config(), models()).router.rows


def path_of(row: Row) -> str:
    """A path that this row answers."""
    if row.path == "*":
        return "/any/path"
    name = "lm" if "generate" in row.path or row.dialect in ("openai", "lmi") else "id" if row.dialect == "v2" else "echo"
    given = {"{name}": name, "{model}": name, "{version}": "1", "{repository}": "r", "{region}": "shared"}
    given |= dict.fromkeys(("{endpoint}", "{component}"), "echo")
    path = row.path
    for captured, value in given.items():
        path = path.replace(captured, value)
    return path


def ids(row: Row) -> str:
    return f"{row.method} {row.path}"


# -- asking ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def asking(wire: str, chosen: Config, **how: Any) -> AsyncIterator[tuple[Gateway, Ask]]:
    """A gateway, and `await ask(method, path, headers, body)` on one wire, each time on a new connection."""
    if wire.startswith("asgi"):
        async with served(*models(), config=chosen) as (app, calls):

            async def call(method: str, path: str, headers: Headers = (), body: bytes = b"") -> Answered:
                socket = method == WEBSOCKET
                target, _, query = path.partition("?")
                fields = [(b"host", b"localhost"), *headers]
                server = Server(
                    app,
                    type="websocket" if socket else "http",
                    method="GET" if socket else method,
                    path=target,
                    query_string=query.encode(),
                    http_version=wire.rpartition("/")[2],
                    headers=[*fields, *(handshake.request_headers(bytes(16)) if socket else ())],
                    extensions={"websocket.http.response": {}},
                )
                if socket:
                    server.give({"type": "websocket.connect"})
                else:
                    server.body(body)
                calls.start_soon(server.run)
                while not server.told:
                    await trio.testing.wait_all_tasks_blocked()
                if server.told[0]["type"] == "websocket.accept":
                    server.give({"type": "websocket.disconnect", "code": 1000})
                    accepted = server.told[0]
                    chosen = accepted.get("subprotocol")
                    protocol = {b"sec-websocket-protocol": chosen.encode()} if chosen else {}
                    return 101, {**dict(accepted["headers"]), **protocol}, b""
                await server.over.wait()
                head, *pieces = server.told
                return head["status"], dict(head["headers"]), b"".join(piece.get("body", b"") for piece in pieces)

            yield app.gateway, call
        return
    async with memory_gateway(models(), chosen, **how) as memory:

        async def ask(method: str, path: str, headers: Headers = (), body: bytes = b"", peer: Any = None) -> Answered:
            socket, own = method == WEBSOCKET, peer is None
            peer = peer or (memory.http1() if wire == "http1" or socket else memory.http2())
            stream = getattr(peer, "asked", -1) + 2
            peer.asked = stream
            fields = [*headers, *(handshake.request_headers(bytes(16)) if socket else ())]
            if path.startswith(_OF_GRPC):  # gRPC needs its own content type, whatever the caller gave
                fields = [
                    *(field for field in fields if field[0] != b"content-type"),
                    (b"content-type", b"application/grpc"),
                ]
            length = None if socket or method in ("GET", "HEAD") else len(body)
            if length is not None:
                fields.append((b"content-length", b"%d" % length))
            head = Head(
                method=b"GET" if socket else method.encode(),
                target=path.encode(),
                authority=b"localhost",
                headers=fields,
                content_length=length,
            )
            if wire == "http1" or socket:
                stream = 1 + stream // 2
            await peer.send(Request(stream=stream, head=head), *([Data(stream=stream, buffers=(body,))] if body else ()))
            if peer.machine is not None:
                await peer.send(End(stream=stream))
            if socket:
                event = await peer.next_event()
                assert isinstance(event, Response)
                if event.status == 101:
                    peer.close()
                    return 101, dict(event.headers), b""
                body = b""
                while not isinstance(more := await peer.next_event(), End):
                    if isinstance(more, Data):
                        body += b"".join(bytes(piece) for piece in more.buffers)
                peer.close()
                return event.status, dict(event.headers), body
            answered: Answered = await peer.read_answer(stream)
            if own:
                peer.close()
            return answered

        ask.memory = memory  # type: ignore[attr-defined]
        yield memory.gateway, ask


def asks(wire: str, row: Row) -> bool:
    """True if a wire carries requests of this row: WebSockets begin over HTTP/1.1 or ASGI, gRPC needs HTTP/2."""
    if row.kind is not None:
        return wire == "http2"
    return row.method != WEBSOCKET or wire in ("http1", "asgi/1.1")


# -- the refusal that each API gives -----------------------------------------------------------------------------------


def _json(body: bytes) -> Any:
    return json.loads(body)


def _plain(body: bytes, headers: Mapping[bytes, bytes], status: int) -> str:
    assert list(_json(body)) == ["error"]
    return str(_json(body)["error"])


def _openai(body: bytes, headers: Mapping[bytes, bytes], status: int) -> str:
    error = _json(body)["error"]
    kinds = {
        401: ("invalid_request_error", "invalid_api_key"),
        403: ("permission_error", None),
        404: ("not_found_error", "model_not_found"),
        421: ("invalid_request_error", None),
        429: ("rate_limit_error", "rate_limit_exceeded"),
    }
    assert (error["type"], error["code"]) == kinds[status]
    return str(error["message"])


def _lmi(body: bytes, headers: Mapping[bytes, bytes], status: int) -> str:
    said = _json(body)
    assert (said["code"], "error" in said) == (status, True)
    return str(said["error"])


def _mme(body: bytes, headers: Mapping[bytes, bytes], status: int) -> str:
    said = _json(body)
    assert (said["code"], list(said)) == (status, ["code", "type", "message"])
    return str(said["message"])


def _grpc(body: bytes, headers: Mapping[bytes, bytes], status: int) -> str:
    assert (status, body) == (200, b"")
    return decode_text(headers[b"grpc-message"])


def _aws(body: bytes, headers: Mapping[bytes, bytes], status: int) -> str:
    return str(_json(body)["message"])


WORDS: Mapping[str, Callable[[bytes, Mapping[bytes, bytes], int], str]] = {
    "": _plain,
    "gateway.dialects.v2.requests": _plain,
    "gateway.dialects.grpc.status": _grpc,
    "gateway.dialects.text.openai": _openai,
    "gateway.dialects.text.lmi_errors": _lmi,
    "gateway.dialects.aws.container": _mme,
    "gateway.dialects.aws.invoke": _aws,
    "gateway.dialects.aws.bidi": _aws,
}
"""By the module of a row's `refuse`: a new one must be put here."""


def said(row: Row, answered: Answered, statuses: Mapping[str, int | tuple[int, str]]) -> str:
    """The text of a refusal in the words of the row's API. `statuses` are those by what asks: `http`, and where another is
    said `openai`, `grpc` and `aws`, of which the last has its code."""
    status, headers, body = answered
    home = "" if row.refuse is None else row.refuse.__module__
    if WORDS[home] is _aws:
        expected, code = statuses["aws"]  # type: ignore[misc]
        assert (status, headers.get(b"x-amzn-errortype")) == (expected, code.encode()), (row, body)
    elif WORDS[home] is _grpc:
        assert headers[b"grpc-status"] == b"%d" % statuses["grpc"], (row, headers)
    else:
        expected = statuses.get("openai", statuses["http"]) if WORDS[home] is _openai else statuses["http"]
        assert status == expected, (row, status, body)
    assert headers[b"content-type"].startswith(b"application/")
    return WORDS[home](body, headers, status)


NO_KEY: Mapping[str, Any] = {"http": 401, "grpc": 16, "aws": (403, "MissingAuthenticationTokenException")}
WRONG_KEY: Mapping[str, Any] = {"http": 401, "grpc": 16, "aws": (403, "UnrecognizedClientException")}
NOT_THIS_MODEL: Mapping[str, Any] = {"http": 403, "openai": 404, "aws": (403, "AccessDeniedException")}
NOT_IN_SCOPE: Mapping[str, Any] = {"http": 403, "grpc": 7, "aws": (403, "AccessDeniedException")}
TOO_MANY: Mapping[str, Any] = {"http": 429, "grpc": 8, "aws": (429, "ThrottlingException")}
