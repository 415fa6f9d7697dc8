"""The demo: serves the library models on loopback, calls them over real sockets, and prints the answers with their times."""

from __future__ import annotations

import importlib.resources
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, final

import numpy as np
import trio
import trio_websocket

from gateway import client
from gateway.catalog.factories import library_specs
from gateway.config import BidiConfig, Config, ListenConfig
from gateway.errors import TransportLost
from gateway.gateway import Gateway
from models.adapt import spec_of
from models.messages import Prompt, Token
from models.session import Session
from protocols import v2
from protocols.aws import bidi
from protocols.events import ConnectionEnd, Data, End, Headers, Response, Signal
from protocols.lmi import parse_stream_line
from protocols.sse import SSEDecoder

Echo = Callable[[str], None]
_HOST = "127.0.0.1"
_AUDIO_SPEED = 4  # times real time: fast enough to watch, slow enough to see events arrive while audio flows
_PART_SECONDS = 0.1
_RATE = 16000


@final
class Counter:
    """A text model that never ends by itself, and counts the tokens that it has sent."""

    def __init__(self) -> None:
        self.produced = 0
        self.stopped = trio.Event()

    async def __call__(self, session: Session[Prompt, Token]) -> None:
        await session.receive()
        self.produced, self.stopped = 0, trio.Event()
        try:
            while True:
                await session.send(Token(text=f" {self.produced}", id=self.produced))
                self.produced += 1
        finally:
            self.stopped.set()


def run(*, once: bool, port: int, echo: Echo) -> int:
    """Runs the tour. Returns 0 if every step worked; otherwise prints the reason and returns 1. Without `once`, the server
    then stays up until Ctrl-C."""
    logging.getLogger("gateway").setLevel(logging.WARNING)
    code = 1
    try:
        trio.run(_main, once, port, echo)
        code = 0
    except* KeyboardInterrupt:
        echo("stopped")
        code = 0
    except* (OSError, TransportLost, DemoFailed) as group:
        for error in group.exceptions:
            echo(f"the demo failed: {error}")
    return code


class DemoFailed(Exception):
    """Raised if a step got another result than expected."""


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise DemoFailed(what)


async def _main(once: bool, port: int, echo: Echo) -> None:
    began = time.perf_counter()
    counter = Counter()
    config = Config(listen=ListenConfig(host=_HOST, port=port), bidi=BidiConfig(default_model="echo"))
    gateway = Gateway(config, [*library_specs(), spec_of(counter, "counter")])
    async with trio.open_nursery() as nursery:
        echo("loading the library models ...")
        await nursery.start(gateway.serve)
        echo(f"serving {', '.join(sorted(gateway.supervisor.workers))} on http://{_HOST}:{gateway.port}  [{_since(began)}]")
        tour = Tour(gateway.port, counter, echo)
        for number, (title, step) in enumerate(tour.steps, 1):
            echo(f"\n{number}/{len(tour.steps)}  {title}")
            step_began = time.perf_counter()
            with trio.fail_after(30):
                await step()
            echo(f"     done in {_since(step_began)}")
        endings = gateway.counts().endings
        echo(f"\nall {len(tour.steps)} steps worked in {_since(began)}; how the exchanges ended, as the server saw it:")
        echo("  " + ", ".join(f"{n} {ending}" for ending, n in sorted(endings.items())))
        if not once:
            echo(_try_it(gateway.port))
            await trio.sleep_forever()
        gateway.begin_drain()


@final
class Tour:
    """The steps of the tour; each has its own client."""

    def __init__(self, port: int, counter: Counter, echo: Echo) -> None:
        self._port, self._counter, self._echo = port, counter, echo
        self._audio = (importlib.resources.files("models.library") / "data" / "speech.wav").read_bytes()
        self.steps = (
            ("text: LMI server-sent events over HTTP/1.1", self._text),
            ("speech: a WAV over SageMaker BiDi, HTTP/2 event stream", self._speech_http2),
            ("speech: the same WAV over the container's WebSocket", self._speech_websocket),
            ("tensors: v2 infer with binary tensors", self._tensors),
            ("a slow client stops its model", self._slow),
            ("a client that leaves cancels its model", self._leave),
        )

    @asynccontextmanager
    async def _http1(self) -> AsyncIterator[client.Peer]:
        async with client.connect(_HOST, self._port) as transport:
            yield client.http1(transport)

    async def _text(self) -> None:
        body = {
            "inputs": "Return a new",
            "parameters": {
                "max_new_tokens": 48, "do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 7,
                "output_formatter": "sse", "details": True, "delay_ms": 20,
            },
        }  # fmt: skip
        async with self._http1() as peer:
            began = time.perf_counter()
            await peer.send(*client.post(1, "/predictions/lm", json.dumps(body).encode(), _JSON))
            decoder, first, tokens, text = SSEDecoder(), 0.0, 0, ""
            last: dict[str, Any] = {}
            while True:
                event = await peer.next_event()
                if isinstance(event, Response):
                    _check(event.status == 200, f"status {event.status}")
                elif isinstance(event, Data):
                    peer.credit(event)
                    decoder.receive_data(event.buffers[0])
                    while not isinstance(message := decoder.next_event(), Signal):
                        last = parse_stream_line(message.data)
                        first = first or time.perf_counter() - began
                        tokens += 1
                        text += last["token"]["text"]
                elif isinstance(event, End):
                    break
        self._echo(f'     "{body["inputs"]}{text}"')
        took = time.perf_counter() - began
        self._echo(
            f"     {tokens} tokens, the first after {first * 1000:.1f} ms, {tokens / took:.0f} tokens/s; "
            f"finish reason {last['details']['finish_reason']}"
        )

    def _parts(self) -> list[bytes]:
        size = int(_RATE * _PART_SECONDS) * 2
        return [self._audio[i : i + size] for i in range(0, len(self._audio), size)]

    def _show(self, sent: int, event: dict[str, Any]) -> None:
        streamed = sent * _PART_SECONDS
        facts = ", ".join(f"{k} {v}" for k, v in event.items() if k != "event")
        self._echo(f"     after {streamed:4.1f} s of audio: {event['event']}: {facts}")

    async def _speech_http2(self) -> None:
        parts, sent, seen = self._parts(), 0, 0
        async with client.connect(_HOST, self._port) as transport:
            peer = client.http2(transport)
            await peer.send(*client.post(1, "/endpoints/speech/invocations-bidirectional-stream", None, _EVENTS))

            async def talk() -> None:
                nonlocal sent
                now = int(time.time() * 1000)
                for part in parts:
                    event = bidi.encode_request_part(part, bidi.DataType.BINARY, bidi.Completion.COMPLETE, date_ms=now)
                    await peer.send(Data(stream=1, buffers=tuple(event)))
                    sent += 1
                    await trio.sleep(_PART_SECONDS / _AUDIO_SPEED)
                await peer.send(Data(stream=1, buffers=tuple(bidi.encode_request_end(date_ms=now))), End(stream=1))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(talk)
                decoder = bidi.ResponseDecoder()
                while True:
                    event = await peer.next_event()
                    if isinstance(event, Response):
                        _check(event.status == 200, f"status {event.status}")
                    elif isinstance(event, Data):
                        decoder.receive_data(event.buffers[0])
                        peer.credit(event)
                        while isinstance(part := decoder.next_event(), bidi.PayloadPart):
                            seen += 1
                            self._show(sent, json.loads(bytes(part.data)))
                    elif isinstance(event, End | ConnectionEnd):
                        break
        _check(seen > 2, "no speech was found")

    async def _speech_websocket(self) -> None:
        # trio-websocket, a client of another project: the container's path works with existing clients.
        url = f"ws://{_HOST}:{self._port}/models/speech/invocations-bidirectional-stream"
        sent = seen = 0
        async with trio_websocket.open_websocket_url(url) as socket:

            async def listen() -> None:
                nonlocal seen
                while True:
                    try:
                        message = await socket.get_message()
                    except trio_websocket.ConnectionClosed:
                        return
                    seen += 1
                    self._show(sent, json.loads(message))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                for part in self._parts():
                    await socket.send_message(part)
                    sent += 1
                    await trio.sleep(_PART_SECONDS / _AUDIO_SPEED)
                await trio.sleep(0.1)
                await socket.aclose()
        _check(seen > 1, "no speech was found")

    async def _tensors(self) -> None:
        large = np.arange(1024 * 1024, dtype=np.float32).reshape(1024, 1024)
        a, b = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 3, np.int32)
        calls: dict[str, dict[str, Any]] = {"add_sub": {"INPUT0": a, "INPUT1": b}, "identity": {"INPUT0": large}}
        async with self._http1() as peer:
            for stream, (model, arrays) in enumerate(calls.items(), 1):
                tensors = tuple(v2.V2Tensor(name=k, datatype=_DATATYPE[x.dtype.str], array=x) for k, x in arrays.items())
                headers, buffers = v2.encode_infer_request(tensors, binary_data_output=True)
                began = time.perf_counter()
                await peer.send(*client.post(stream, f"/v2/models/{model}/infer", b"".join(buffers), _no_length(headers)))
                status, reply_headers, body = await peer.read_answer(stream)
                took = (time.perf_counter() - began) * 1000
                _check(status == 200, f"status {status}: {body[:200]!r}")
                outputs = {t.name: t.elements for t in v2.decode_infer_reply(list(reply_headers.items()), body).outputs}
                if model == "add_sub":
                    _check(bool((outputs["OUTPUT0"] == a + b).all() and (outputs["OUTPUT1"] == a - b).all()), "wrong sums")
                    self._echo(
                        f"     add_sub: {a[0, :4]}... +- 3 -> {outputs['OUTPUT0'][0, :4]}..., {outputs['OUTPUT1'][0, :4]}..."
                    )
                else:
                    _check(bool((outputs["OUTPUT0"] == large).all()), "the identity came back changed")
                    self._echo(f"     identity: {large.nbytes >> 20} MiB there and back unchanged in {took:.1f} ms")

    async def _endless(self, peer: client.Peer) -> None:
        body = {"inputs": "count", "parameters": {"max_new_tokens": 65536}, "stream": True}
        await peer.send(*client.post(1, "/predictions/counter", json.dumps(body).encode(), _JSON))
        event = await peer.next_event()
        _check(isinstance(event, Response) and event.status == 200, f"unexpected answer {event}")

    async def _settled(self) -> int:
        """Waits until the model stands still; returns the number of tokens that it has produced."""
        while True:
            before = self._counter.produced
            await trio.sleep(0.1)
            if before == self._counter.produced:
                return before

    async def _slow(self) -> None:
        async with self._http1() as peer:
            await self._endless(peer)
            self._echo("     the client has asked for 1,000,000,000 tokens and reads nothing ...")
            stopped = await self._settled()
            self._echo(f"     the model stands still after {stopped} tokens: the sockets and its 64 KiB queue are full")
            read = 0
            while read < 2_000_000:
                event = await peer.next_event()
                read += event.nbytes
                peer.credit(event)
            again = await self._settled()
            self._echo(f"     the client reads {read} bytes: the model goes on to {again} and stands still again")
            _check(again > stopped, "the model did not go on")
        with trio.fail_after(5):
            await self._counter.stopped.wait()

    async def _leave(self) -> None:
        async with self._http1() as peer:
            await self._endless(peer)
            for _ in range(20):
                peer.credit(await peer.next_event())
            began = time.perf_counter()
            peer.close()
            with trio.fail_after(5):
                await self._counter.stopped.wait()
            self._echo(f"     the client left after 20 reads; its model was cancelled {_since(began)} later")


_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", bidi.CONTENT_TYPE.encode())]
_DATATYPE = {"<i4": "INT32", "<f4": "FP32"}


def _no_length(headers: Headers) -> Headers:
    return [(k, v) for k, v in headers if k != b"content-length"]


def _since(began: float) -> str:
    seconds = time.perf_counter() - began
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _try_it(port: int) -> str:
    at = f"http://{_HOST}:{port}"
    return f"""
The server stays up; Ctrl-C ends it. Try:

  curl -N {at}/invocations -d '{{"inputs": "The file", "stream": true, "parameters": {{"delay_ms": 50}}}}'
  curl -N {at}/predictions/lm -d '{{"inputs": "The", "parameters": {{"output_formatter": "sse", "do_sample": true}}}}'
  curl {at}/v2/models/add_sub/infer -d '{{"inputs": [
      {{"name": "INPUT0", "datatype": "INT32", "shape": [1, 4], "data": [1, 2, 3, 4]}},
      {{"name": "INPUT1", "datatype": "INT32", "shape": [1, 4], "data": [5, 6, 7, 8]}}]}}'
  curl {at}/v2/models/add_sub
  curl {at}/ping
"""
