"""A thousand clients of a real server that each want 100 MB and read nothing: its memory grows by what the documentation
says of one, a thousand times."""

from __future__ import annotations

import json
import re
import resource
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from gateway.client import post
from gateway.config import LimitsConfig
from gateway.config.text import parse_size
from protocols.aws import bidi
from protocols.events import Data, End
from protocols.http1.connection import HTTP1Connection
from protocols.http2.connection import HTTP2Connection
from protocols.roles import Role
from protocols.websocket.handshake import request_headers
from tests.interop.servers import ROOT, Server, serving

CLIENTS, WARM = 1000, 50
PATIENCE = 120.0
MODELS = ("parts", "tokens", "state")
SETTINGS = [
    "limits = { write_stall = 0 }",  # they stay as long as the test does
    *(f'[models.{name}]\nfactory = "served_stalled:{name}"\ncapacity = {CLIENTS}' for name in MODELS),
]


def lines() -> bytes:
    """OpenAI's events over HTTP/1.1."""
    asked = {"model": "tokens", "prompt": "x", "stream": True, "max_tokens": 65536}
    return said(HTTP1Connection(Role.CLIENT), *post(1, "/v1/completions", json.dumps(asked).encode()))


def events() -> bytes:
    """SageMaker's events over HTTP/2."""
    path, fields = "/endpoints/parts/invocations-bidirectional-stream", [(b"content-type", bidi.CONTENT_TYPE.encode())]
    (head,) = post(1, path, None, fields)
    body = (*bidi.encode_request_part(b"much", date_ms=0), *bidi.encode_request_end(date_ms=0))
    return said(HTTP2Connection(Role.CLIENT), head, Data(stream=1, buffers=body), End(stream=1))


def frames() -> bytes:
    """A WebSocket."""
    fields = b"".join(b"%s: %s\r\n" % field for field in request_headers(bytes(16)))
    head = b"GET /models/parts/invocations-bidirectional-stream HTTP/1.1\r\nhost: localhost\r\n" + fields + b"\r\n"
    return head + b"\x82\x84" + bytes(4) + b"much"


def said(machine: Any, *told: Any) -> bytes:
    for event in told:
        machine.send(event)
    return b"".join(machine.data_to_send(2**20))


OPENINGS = {"HTTP/1.1": lines, "HTTP/2": events, "a WebSocket": frames}


def documented(what: str) -> int:
    """The bytes of a row of the table of docs/reference/admission.md."""
    page = (ROOT / "docs/reference/admission.md").read_text(encoding="utf-8")
    (size,) = re.findall(rf"^\| {re.escape(what)} \| (\d+ KiB) \|", page, re.MULTILINE)
    return parse_size(size)


def test_the_documented_send_buffer_is_the_one_that_is_set() -> None:
    assert documented("its send buffer") == LimitsConfig().send_buffer


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_a_thousand_clients_that_read_nothing_cost_a_send_buffer_and_a_connection_each(tmp_path: Path) -> None:
    with descriptors(CLIENTS + 200), serving(tmp_path, "served_stalled.py", SETTINGS) as server:
        with clients(server, WARM):
            stalled(server, WARM)
        stalled(server, 0)
        before = resident(server.pid)
        with clients(server, CLIENTS):
            told = stalled(server, CLIENTS)
            grown = resident(server.pid) - before
            assert told >= CLIENTS * LimitsConfig().send_buffer // 2, "the models did begin"
            each = [documented(f"its connection, with one exchange, over {wire}") for wire in OPENINGS]
            assert grown <= CLIENTS * (documented("its send buffer") + sum(each) / len(each))


@contextmanager
def descriptors(wanted: int) -> Iterator[None]:
    """So many files may be open, here and in what is started here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{wanted} files may not be open here: ulimit -Hn is {hard}")
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def clients(server: Server, number: int) -> Iterator[None]:
    """So many clients that have asked; their kernels take little, and they read nothing."""
    with ExitStack() as open_ones:
        for _, opening in zip(range(number), cycle(OPENINGS.values()), strict=False):
            client = open_ones.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((server.host, server.port))
            client.sendall(opening())
        yield


def stalled(server: Server, number: int) -> int:
    """Waits until so many sessions are there and none goes on; what they all were told."""
    until, last = time.monotonic() + PATIENCE, -1
    while time.monotonic() < until:
        with urllib.request.urlopen(f"{server.url}/endpoints/state/invocations", b"?", PATIENCE) as answer:
            state = json.load(answer)
        if state["waiting"] == number and state["told"] == last:
            return last
        last = state["told"]
        time.sleep(0.05)
    raise AssertionError(f"{state['waiting']} wait, {number} were to")


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)[0]) * 1024
