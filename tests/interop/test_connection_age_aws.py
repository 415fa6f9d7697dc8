"""The AWS SDK for Python before two gateways behind one address: what `limits.connection_age` does to its sessions.

Its client has one connection, and keeps to it while that is open. After a GOAWAY it sends no new session, and opens no other
connection before the gateway has closed this one. If no session is open, the gateway closes it two round trips after the GOAWAY,
and the client moves by itself. If one is open, it continues, and a new session needs a new client.
"""

from __future__ import annotations

import asyncio
import importlib
import re
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest

from tests.interop import aws
from tests.interop.aws import QUIET, Client, client, run
from tests.interop.balancer import Balancer
from tests.interop.servers import Server
from tests.ports import free_port

pytestmark = QUIET
AGE = 2.0
REFUSED = ("AWS_ERROR_HTTP_GOAWAY_RECEIVED", "AWS_ERROR_HTTP_CONNECTION_CLOSED")
ANSWERED: list[tuple[bytes, ...]] = []
"""The parts of each session whose client has its whole answer."""
_FORGOTTEN = 10.0  # seconds; the SDK waits for ever for a session whose stream it has made, not begun, when a GOAWAY comes


@contextmanager
def balanced(folder: Path, *, signed: bool, age: float = AGE) -> Iterator[tuple[Balancer, Server]]:
    """The balancer, and how to reach it. In the end no session was cut by a server, and each that reached one was answered."""
    ANSWERED.clear()
    with ExitStack() as stack:
        servers, planes = [], []
        for name in ("one", "two"):
            (folder / name).mkdir()
            planes.append(free_port())
            settings = [f"limits = {{ connection_age = {age} }}", f"metrics = {{ port = {planes[-1]} }}"]
            servers.append(stack.enter_context(aws.serving(folder / name, folder / "tls", signed, settings)))
        balancer = Balancer(servers, tls=True)
        stack.callback(balancer.close)
        yield balancer, replace(servers[0], tls_port=balancer.port)
        # the SDK has sent nothing of the sessions that it forgets
        assert sum(map(endings, planes), Counter[str]()) == Counter(complete=len(ANSWERED))


def endings(port: int) -> Counter[str]:
    """The number of a server's exchanges by ending."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        counted = re.findall(
            r'^everywire_exchanges_total\{.*?ending="([^"]+)".*\} (\S+)$', answer.read().decode(), re.MULTILINE
        )
    return sum((Counter({ending: int(float(n))}) for ending, n in counted), Counter[str]())


async def talk(made: Client, *parts: bytes) -> bool:
    """A session, each part of which comes back. False if the SDK has sent nothing of it because of a GOAWAY: it reports an
    error, or forgets the session."""
    try:
        async with asyncio.timeout(_FORGOTTEN):
            answers = await made.talk("echo", *parts)
    except TimeoutError:
        return False
    except importlib.import_module("smithy_core.exceptions").SmithyError as e:
        if any(name in str(e) for name in REFUSED):
            return False
        raise
    assert answers == [*parts]
    ANSWERED.append(parts)
    return True


@final
class Moving:
    """A client that is made anew when the SDK says that its connection has been sent elsewhere, as the documentation says.
    The old one stays until its sessions are over."""

    def __init__(self, address: Server, stack: AsyncExitStack) -> None:
        self._address, self._stack = address, stack
        self.client: Client | None = None
        self.made = 0

    async def talk(self, *parts: bytes) -> None:
        while True:
            used = self.client
            if used is None:
                used = self.client = await self._stack.enter_async_context(client(self._address))
                self.made += 1
            if await talk(used, *parts):
                return
            if self.client is used:
                self.client = None


def test_what_is_open_goes_on_and_what_begins_is_refused_by_the_sdk_itself(sdk: Any, signed: bool, tmp_path: Path) -> None:
    async def story(balancer: Balancer, address: Server) -> None:
        async with client(address) as first, client(address) as second:
            stream = await first.call("echo")
            await stream.send(b"first")
            assert await stream.answer() == b"first"
            assert balancer.taken == [0]
            began = time.monotonic()
            while await talk(first, b"again"):
                assert time.monotonic() - began < 10 * AGE
            # as long as the stream lasts: not even a connection is opened
            for number in range(10):
                await stream.send(b"%d" % number)
                assert await stream.answer() == b"%d" % number
                assert not await talk(first, b"never sent")
            assert balancer.taken == [0]
            # another client is at the second gateway at once
            assert await talk(second, b"elsewhere")
            assert balancer.taken == [0, 1]
            await stream.end()
            assert await stream.rest() == []
            ANSWERED.append((b"first",))
            # the first gateway closes the connection now, and then the first client moves too
            while not await talk(first, b"elsewhere"):
                assert time.monotonic() - began < 20 * AGE
            assert balancer.taken == [0, 1, 1]

    with balanced(tmp_path, signed=signed) as (balancer, address):
        run(story(balancer, address))


def test_a_client_whose_sessions_have_pauses_moves_within_the_age_by_itself(sdk: Any, tmp_path: Path) -> None:
    async def story(balancer: Balancer, address: Server) -> None:
        async with client(address) as made:
            began, refused = time.monotonic(), 0
            while time.monotonic() < began + 3 * AGE or 1 not in balancer.taken:
                refused += not await talk(made, b"one", b"two")
                await asyncio.sleep(0.05)
            # a session that begins within the round trip of the GOAWAY, and nothing of it is sent
            assert refused <= 1
        assert balancer.taken[0] == 0
        assert 1 in balancer.taken

    with balanced(tmp_path, signed=False) as (balancer, address):
        run(story(balancer, address))


@pytest.mark.parametrize("ages", [3, pytest.param(150, marks=pytest.mark.soak)])
def test_with_new_clients_sessions_move_within_the_age_and_none_is_cut(sdk: Any, tmp_path: Path, ages: int) -> None:
    async def story(balancer: Balancer, address: Server) -> None:
        async with AsyncExitStack() as stack:
            moving = Moving(address, stack)
            until = time.monotonic() + ages * AGE

            async def one_after_the_other(name: str) -> int:
                number = 0
                while time.monotonic() < until or number <= 10:
                    parts = [f"{name}, session {number}, part {part}".encode() for part in range(3)]
                    await moving.talk(*parts)
                    number += 1
                return number

            numbers = await asyncio.gather(*(one_after_the_other(f"task {task}") for task in range(8)))
            assert min(numbers) > 10
            assert sum(numbers) == len(ANSWERED)
            assert moving.made >= 2
        assert balancer.taken[0] == 0
        assert len(balancer.taken) >= 2

    with balanced(tmp_path, signed=False) as (balancer, address):
        run(story(balancer, address))


def test_without_an_age_every_session_stays_at_the_first_gateway(sdk: Any, tmp_path: Path) -> None:
    async def story(balancer: Balancer, address: Server) -> None:
        async with client(address) as made:
            until = time.monotonic() + 2 * AGE
            while time.monotonic() < until:
                assert await talk(made, b"one", b"two")
        assert balancer.taken == [0]

    with balanced(tmp_path, signed=False, age=0) as (balancer, address):
        run(story(balancer, address))
