"""SIGTERM to a real server with a hundred live streams on four wires: what can finish does, the rest is told, and the report
says which was which."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from gateway import client
from gateway.client import Peer, post
from gateway.errors import TransportLost
from protocols.aws import bidi
from protocols.errors import RemoteProtocolError
from protocols.events import Close, ConnectionEnd, Data, End, Frame, Opcode, Reset, Response
from protocols.lmi.response import parse_stream_line

ROOT = Path(__file__).parents[2]
EACH = 25
"""Streams on each wire; every second one never ends by itself."""
FINITE, ENDLESS = (EACH + 1) // 2, EACH // 2

MODELS = '''
from collections.abc import AsyncIterator
from pathlib import Path

import trio

from models.messages import Part, Prompt


async def numbers(endless: bool) -> AsyncIterator[int]:
    """Ten of them, the last when there is a file `go`; or numbers for ever."""
    told = 0
    while endless or told < 10:
        while told == 9 and not endless and not Path("go").exists():
            await trio.sleep(0.01)
        yield told
        told += 1
        await trio.sleep(0.2 if endless else 0)


async def words(prompt: Prompt) -> AsyncIterator[str]:
    async for number in numbers(prompt.text == "endless"):
        yield f"{number} "


async def parts(part: Part) -> AsyncIterator[bytes]:
    async for number in numbers(bytes(part.data) == b"endless"):
        yield b"%d" % number
'''
CONFIG = """
listen = { port = 0 }
drain = { timeout = 600 }

[models.words]
factory = "streams:words"
capacity = 1000

[models.parts]
factory = "streams:parts"
capacity = 1000
"""


class Server:
    """The process, where it listens, and what it has logged."""

    def __init__(self, folder: Path) -> None:
        (folder / "streams.py").write_text(MODELS)
        (folder / "everywire.toml").write_text(CONFIG)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "--config", "everywire.toml", "serve"],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.port = self._port()

    def __enter__(self) -> Server:
        return self

    def _port(self) -> int:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if '"serving"' in line:
                return int(json.loads(line)["at"][0].rpartition(":")[2])
        raise AssertionError("it does not serve")

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def ended(self) -> tuple[int, dict[str, Any]]:
        """Its exit status and what it reported of the drain."""
        assert self.process.stderr is not None
        lines = [json.loads(line) for line in self.process.stderr]
        (drained,) = [line for line in lines if line["event"] == "drained"]
        return self.process.wait(), drained


def kind(number: int) -> str:
    return "endless" if number % 2 else "finite"


class Wires:
    """The clients: each reads its stream to the end and counts what that was, by wire and kind."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.begun = 0
        self.all_begun, self.finite_over = trio.Event(), trio.Event()
        self.ends: Counter[tuple[str, str, str]] = Counter()

    def begin(self) -> None:
        self.begun += 1
        if self.begun == 4 * EACH:
            self.all_begun.set()

    def end(self, wire: str, what: str, how: str) -> None:
        self.ends[wire, what, how] += 1
        if sum(n for (_, kind, _), n in self.ends.items() if kind == "finite") == 4 * FINITE:
            self.finite_over.set()

    async def all(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(EACH):
                nursery.start_soon(self.http1, kind(number))
                nursery.start_soon(self.websocket, kind(number))
            nursery.start_soon(self.http2)
            nursery.start_soon(self.bidi)

    @staticmethod
    def asked(what: str) -> bytes:
        return json.dumps({"inputs": what, "stream": True, "parameters": {"max_new_tokens": 10_000}}).encode()

    async def http1(self, what: str) -> None:
        async with client.connect("127.0.0.1", self.port) as transport:
            peer = client.http1(transport)
            await peer.send(*post(1, "/predictions/words", self.asked(what)))
            await self.read_lines(peer, {1: what}, "http/1.1")

    async def http2(self) -> None:
        async with client.connect("127.0.0.1", self.port) as transport:
            peer = client.http2(transport)
            streams = {2 * number + 1: kind(number) for number in range(EACH)}
            for stream, what in streams.items():
                await peer.send(*post(stream, "/predictions/words", self.asked(what)))
            await self.read_lines(peer, streams, "http/2")

    async def read_lines(self, peer: Peer, streams: dict[int, str], wire: str) -> None:
        bodies: dict[int, bytearray] = {stream: bytearray() for stream in streams}
        left = dict(streams)
        while left:
            event = await peer.next_event()
            match event:
                case Response():
                    assert event.status == 200
                case Data():
                    peer.credit(event)
                    if not bodies[event.stream]:
                        self.begin()
                    bodies[event.stream] += event.buffers[0]
                case End():
                    last = parse_stream_line(bytes(bodies[event.stream]).splitlines()[-1])
                    how = "told" if "error_msg" in last["token"] else "complete" if "generated_text" in last else "silent"
                    self.end(wire, left.pop(event.stream), how)
                case Reset() | ConnectionEnd():
                    for what in left.values():
                        self.end(wire, what, "cut")
                    return

    async def websocket(self, what: str) -> None:
        async with client.connect("127.0.0.1", self.port) as transport:
            peer = await client.websocket(transport, "/models/parts/invocations-bidirectional-stream")
            await peer.send(Frame(opcode=Opcode.BINARY, fin=True, data=what.encode()))
            heard = 0
            while True:
                match await peer.next_event():
                    case Frame():
                        heard += 1
                        if heard == 1:
                            self.begin()
                        if what == "finite" and heard == 10:
                            await peer.send(Close())  # the session ends once the server has answered the Close
                            while not isinstance(await peer.next_event(), Close):
                                pass
                            self.end("websocket", what, "complete")
                            return
                    case Close(code=code):
                        await peer.flush()
                        self.end("websocket", what, "told" if code == 1001 else str(code))
                        return
                    case ConnectionEnd():
                        self.end("websocket", what, "cut")
                        return

    async def bidi(self) -> None:
        async with client.connect("127.0.0.1", self.port) as transport:
            peer = client.http2(transport)
            streams = {2 * number + 1: kind(number) for number in range(EACH)}
            for stream, what in streams.items():
                (head,) = post(
                    stream, "/endpoints/parts/invocations-bidirectional-stream", None,
                    [(b"content-type", bidi.CONTENT_TYPE.encode())],
                )  # fmt: skip
                said = (*bidi.encode_request_part(what.encode(), date_ms=0), *bidi.encode_request_end(date_ms=0))
                await peer.send(head, Data(stream=stream, buffers=said), End(stream=stream))
            decoders = {stream: bidi.ResponseDecoder() for stream in streams}
            told: dict[int, str] = {}
            heard: Counter[int] = Counter()
            left = dict(streams)
            while left:
                event = await peer.next_event()
                match event:
                    case Data(stream=stream):
                        peer.credit(event)
                        decoders[stream].receive_data(event.buffers[0])
                        while isinstance(got := decoders[stream].next_event(), bidi.PayloadPart | bidi.StreamFailure):
                            if isinstance(got, bidi.StreamFailure):
                                told[stream] = "told"
                            else:
                                heard[stream] += 1
                                if heard[stream] == 1:
                                    self.begin()
                    case End(stream=stream):
                        self.end("bidi", left.pop(stream), told.get(stream, "complete"))
                    case Reset() | ConnectionEnd():
                        for what in left.values():
                            self.end("bidi", what, "cut")
                        return


async def test_what_can_finish_finishes_and_what_cannot_is_told(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        wires = Wires(server.port)
        with trio.fail_after(120):
            async with client.connect("127.0.0.1", server.port) as kept:
                early = client.http1(kept)
                await early.send(*post(1, "/predictions/words", b'{"inputs": "x", "parameters": {"max_new_tokens": 1}}'))
                await early.read_answer(1)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wires.all)
                    await wires.all_begun.wait()
                    server.process.send_signal(signal.SIGTERM)
                    await refused(server.port)
                    await over(early)
                    (tmp_path / "go").touch()
                    await wires.finite_over.wait()
                    server.process.send_signal(signal.SIGTERM)  # nobody waits for what has no end
            status, drained = await trio.to_thread.run_sync(server.ended)
    expected: Counter[tuple[str, str, str]] = Counter()
    for wire in ("http/1.1", "http/2", "websocket", "bidi"):
        expected[wire, "finite", "complete"] = FINITE
        expected[wire, "endless", "told"] = ENDLESS
    assert wires.ends == expected
    assert status == 3  # streams were cut
    assert (drained["live"], drained["cut"]) == (4 * EACH, 4 * ENDLESS)
    assert drained["endings"]["drained"] == 4 * ENDLESS
    assert sum(drained["endings"].values()) == 4 * EACH


async def refused(port: int) -> None:
    """Returns when a new connection is."""
    while True:
        try:
            (await trio.open_tcp_stream("127.0.0.1", port)).socket.close()
        except OSError:
            return


async def over(peer: Peer) -> None:
    """A kept connection is closed, perhaps in the moment of its next request, or that is refused."""
    with suppress(TransportLost, RemoteProtocolError):
        await peer.send(*post(2, "/predictions/words", b'{"inputs": "x"}'))
        assert (await peer.read_answer(2))[0] == 503
