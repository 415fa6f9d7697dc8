"""No line of the log has a client's secret: the answer names the client's mistake, and the log does not quote it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from hpack import Encoder

from gateway.config import Config, ListenConfig
from gateway.gateway import Gateway
from gateway.untrusted_text import unquoted
from protocols.http2.frames import Kind
from tests.gateway.operator.operators import Operator, operated
from tests.gateway.promises import Probe, answering

SECRET = "hunter2"
PATH = "/predictions/probe"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

PING, PONG = (bytes((0, 0, 8, 6, flags, 0, 0, 0, 0)) + b"answered" for flags in (0, 1))


def frame(kind: Kind, flags: int, payload: bytes) -> bytes:
    """One of stream 1."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags, 0, 0, 0, 1)) + payload


@asynccontextmanager
async def called(data: bytes) -> AsyncIterator[trio.SocketStream]:
    """A connection of a client that has said this."""
    async with operated(Probe(answering).spec("lmi-http1"), port=-1) as gateway:
        stream = await trio.open_tcp_stream("127.0.0.1", gateway.port)
        async with stream:
            await stream.send_all(data)
            yield stream


async def said_wrong(data: bytes, caplog: Any) -> bytes:
    """Sends these bytes and ends the output. Returns the answer; the log must have a protocol error without the secret."""
    caplog.set_level(logging.DEBUG, "gateway")
    async with called(data) as stream:
        await stream.send_eof()
        told = b"".join([piece async for piece in stream])
    reasons = [record.__dict__["reason"] for record in caplog.records if record.message == "protocol error"]
    assert reasons
    assert all(reasons)
    for record in caplog.records:
        assert SECRET not in repr(record.__dict__), record.__dict__
    return told


@pytest.mark.parametrize(
    "wrong",
    [
        "GET /?key=hunter2 HTTP/1.1\r\nhost: x\r\nx: \x1b\r\n\r\n",
        "GET /#hunter2 HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET ?key=hunter2 HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET http://hunter2@x/ HTTP/1.1\r\nhost: x\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: me:hunter2@x\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: x\r\nexpect: hunter2'\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: hunter2\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: \"'hunter2\r\n\r\n",
        "hunter2 / HTTP/1.1\r\nhost: x\r\n\r\n",
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nhunter2\r\n",
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nhunter2\r\n\r\n",
    ],
)
async def test_an_error_of_http1_is_told_and_what_it_quotes_is_not_logged(wrong: str, caplog: Any) -> None:
    told = await said_wrong(wrong.encode(), caplog)
    assert told.startswith(b"HTTP/1.1 4") or told.startswith(b"HTTP/1.1 5")


@pytest.mark.parametrize(
    "fields",
    [
        [("x", "hunter2\n")],
        [("x", "hunter2 ")],
        [("te", "hunter2")],
        [("connection", "hunter2")],
        [("content-length", "hunter2")],
        [(":hunter2", "x")],
        [("Hunter2".swapcase(), "x")],
    ],
)
async def test_an_error_of_http2_quotes_nothing_in_the_log(fields: list[tuple[str, str]], caplog: Any) -> None:
    head = [(":method", "GET"), (":scheme", "http"), (":authority", "x"), (":path", "/?key=hunter2"), *fields]
    caplog.set_level(logging.DEBUG, "gateway")
    async with called(PREFACE + frame(Kind.HEADERS, 5, Encoder().encode(head)) + PING) as stream:
        came = b""
        while PONG not in came and (piece := await stream.receive_some()):
            came += piece
    for record in caplog.records:
        assert SECRET not in repr(record.__dict__).lower(), record.__dict__


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("method: unknown: b'EV!L'", "method: unknown: ..."),
        ("""b"it's" and b'a "b"\\'c' end""", "... and ... end"),
        ("cut: b'hunter2", "cut: ..."),
        ("cut: b'hunter2\\", "cut: ..."),
        ("bytearray(b'x'), and a verb'", "bytearray(...), and a verb'"),
        ("nothing's quoted", "nothing's quoted"),
    ],
)
def test_bytes_are_taken_out_of_a_text_however_they_are_quoted(text: str, left: str) -> None:
    assert unquoted(text) == left


async def test_what_is_asked_of_the_operator_plane_cannot_forge_a_line_of_any_handler(caplog: Any) -> None:
    caplog.set_level(logging.INFO, "gateway")
    operator = Operator(Gateway(Config(listen=ListenConfig(port=-1))))
    for host in ("127.0.0.1", "evil.example"):
        answer = await operator.ask("POST", "/models/a\x1b[31m\u202eb/reload", host=host)
        assert answer.status in (403, 404)
    said = [record.__dict__ for record in caplog.records if record.name == "gateway.operator"]
    assert [("model" in fields, "path" in fields) for fields in said] == [(True, False), (False, True)]
    for fields in said:
        assert str(fields.get("model") or fields["path"]).isprintable()
