"""A server with several fronts as a program, its log, and a client that counts the outcome of each request."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, final

import trio

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0
APP = """
import os
from collections.abc import AsyncIterator

import trio

from models.messages import Prompt

VERSION = "1"


async def who(prompt: Prompt) -> str:
    return f"{os.getpid()} {VERSION}"


async def slow(prompt: Prompt) -> AsyncIterator[str]:
    for n in range(int(prompt.text)):
        yield f"{os.getpid()} "
        await trio.sleep(0.05)
"""
MODELS = tuple(part for name in ("who", "slow") for part in ("--model", f"{name}=app:{name}"))


@final
class Server:
    """The program, and what it has logged."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.records = process, list[dict[str, Any]]()
        self._more = trio.lowlevel.ParkingLot()

    async def read(self) -> None:
        """Reads the log until it ends. Every line is a whole record, except a last line of the program, `Error: ...`."""
        assert self.process.stderr is not None
        stream, rest = trio.lowlevel.FdStream(os.dup(self.process.stderr.fileno())), b""
        async with stream:
            async for data in stream:
                *lines, rest = (rest + data).split(b"\n")
                self.records += [
                    {"event": line.decode()} if line.startswith(b"Error: ") else json.loads(line) for line in lines
                ]
                self._more.unpark_all()
        self.records.append({"event": "the end of the log"})
        self._more.unpark_all()

    async def logged(self, event: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        """Waits for the `count`th record of an event with these fields, and returns it."""
        while True:
            found = [r for r in self.records if r["event"] == event and fields.items() <= r.items()]
            if len(found) >= count:
                return found[count - 1]
            assert self.records[-1:] != [{"event": "the end of the log"}], f"no {event}: {self.records[-8:]}"
            await self._more.park()

    def all(self, event: str) -> list[dict[str, Any]]:
        """The records of an event so far."""
        return [record for record in self.records if record["event"] == event]

    async def port(self, scheme: str = "http://") -> int:
        """Waits until the server serves, and returns its port."""
        return port_of(next(at for at in (await self.logged("serving"))["at"] if at.startswith(scheme)))

    @property
    def fronts(self) -> set[int]:
        """The processes that it has started and that have not ended."""
        ended = {record["pid"] for record in self.all("front ended")}
        return {record["pid"] for record in self.all("front started")} - ended

    async def ended(self) -> int:
        """Waits until the program has ended, and returns its exit status."""
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode

    async def drained(self, number: int = signal.SIGTERM) -> int:
        """Ends the program by a signal, and returns its exit status."""
        self.process.send_signal(number)
        return await self.ended()


@asynccontextmanager
async def served(
    folder: Path, *flags: str, processes: int = 2, app: str = APP, patience: float = PATIENCE
) -> AsyncIterator[Server]:
    """A server of `app` that ends with the block. The block has `patience` seconds. At its end none of the fronts is alive."""
    (folder / "app.py").write_text(app)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERYWIRE_")} | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "gateway",
        "--processes",
        str(processes),
        *MODELS,
        *(() if "--port" in flags else ("--port", "0")),
        *flags,
    ]
    process = subprocess.Popen(  # noqa: ASYNC220
        command,
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
    )
    server = Server(process)
    assert process.stderr is not None
    try:
        with process.stderr, trio.fail_after(patience):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.read)
                yield server
                process.kill()
                await server.ended()
                await until(lambda: not any(alive(record["pid"]) for record in server.all("front started")))
                nursery.cancel_scope.cancel()
    finally:
        process.kill()
        process.wait()


async def until(holds: Callable[[], bool]) -> None:
    """Waits for this to hold."""
    while not holds():  # noqa: ASYNC110  # it is the kernel's, or a log's
        await trio.sleep(0.01)


def alive(pid: int) -> bool:
    """True while the process exists and is no zombie."""
    try:
        return not re.search(r"^State:\s+[ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return False


def port_of(url: str) -> int:
    """The port of a URL."""
    return int(url.rpartition(":")[2])


class Lost(Exception):
    """A connection ended before its answer was whole."""


@final
class Caller:
    """One connection of HTTP/1.1 for many requests."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream, self._rest = stream, b""
        self.answered = self.closing = False
        """`answered`: True once the head of an answer is here. `closing`: True if the last answer ends the connection."""

    async def ask(self, path: str, body: bytes = b"", *, method: str = "POST") -> tuple[int, bytes]:
        """Returns the status and the body. Raises Lost if the connection ends before."""
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        try:
            await self.stream.send_all(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            return await self._answer()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as e:
            raise Lost(str(e)) from None

    async def _answer(self) -> tuple[int, bytes]:
        head = (await self._until(b"\r\n\r\n")).lower()
        self.answered = True
        status = int(head.split(b" ")[1])
        self.closing = b"connection: close" in head
        if found := re.search(rb"content-length: (\d+)", head):
            return status, await self._exactly(int(found[1]))
        whole = b""
        while size := int(await self._until(b"\r\n"), 16):
            whole += (await self._exactly(size + 2))[:-2]
        await self._exactly(2)
        return status, whole

    async def _until(self, end: bytes) -> bytes:
        while end not in self._rest:
            await self._more()
        found, _, self._rest = self._rest.partition(end)
        return found

    async def _exactly(self, size: int) -> bytes:
        while len(self._rest) < size:
            await self._more()
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    async def _more(self) -> None:
        if not (data := await self.stream.receive_some(65536)):
            raise Lost("it has ended")
        self._rest += data


@asynccontextmanager
async def calling(port: int) -> AsyncIterator[Caller]:
    """A connection."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        yield Caller(stream)


def text_of(body: bytes) -> str:
    """The text that a model of text has generated."""
    return str(json.loads(body)["generated_text"])


async def who(caller: Caller) -> tuple[int, str]:
    """The process that answers, and the version of its code."""
    status, body = await caller.ask("/predictions/who", b'{"inputs": "who"}')
    assert status == 200, body
    pid, version = text_of(body).split()
    return int(pid), version


@final
class Load:
    """A client that asks again and again, on a new connection each time or, if `keep`, on the same as long as it may."""

    def __init__(self, port: int, *, keep: bool) -> None:
        self._port, self._keep = port, keep
        self.came_of = Counter[str]()
        """The number of requests by outcome: the version that `who` answered, or the type and text of the error."""
        self.pids = Counter[int]()

    async def run(self) -> None:
        """Asks until it is cancelled."""
        while True:
            try:
                async with calling(self._port) as caller:
                    while True:
                        pid, version = await who(caller)
                        self.came_of[version] += 1
                        self.pids[pid] += 1
                        if caller.closing or not self._keep:
                            break
            except (Lost, OSError) as e:
                self.came_of[f"{type(e).__name__}: {e}"] += 1
