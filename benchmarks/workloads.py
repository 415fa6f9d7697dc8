"""The workloads of the server benchmark: the load, the counted unit, and the compared servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from benchmarks import requests, servers
from benchmarks.load.plan import Kind, Measure, Plan
from benchmarks.servers import Program, Running

_FRAME = requests.frame(requests.PIECE)
_ECHO = len(requests.answer_frame(requests.PIECE))
_MESSAGE = requests.duplex_message()
_FIELDS, _BODY = requests.infer_stream(16)
_CALL = requests.call_message(16)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One workload. The first server is everywire, the second the floor that it is compared with."""

    name: str
    what: str
    unit: str
    kind: Kind
    servers: tuple[Program, ...]
    measure: Measure = Measure.CPU
    connections: int = 1
    streams: int = 1
    in_flight: int = 1
    message: Callable[[], bytes]
    head: tuple[tuple[bytes, bytes], ...] = ()
    """HTTP/2: the fields of each request."""
    at_least: float = 0.0
    """Seconds that a round must last, at least, to mean anything."""

    @property
    def figure(self) -> str:
        """The unit of the figure."""
        match self.measure:
            case Measure.CPU:
                return f"us/{self.unit}"
            case Measure.HELD:
                return f"KiB/{self.unit}"
            case Measure.STALLED:
                return "MiB grown"

    @property
    def repeatable(self) -> bool:
        """True if one server can be measured again. If its memory is measured, it cannot: it may keep what it grew by."""
        return self.measure is Measure.CPU

    def plan(self, server: Running, *, seconds: float, core: int | None) -> Plan:
        """The plan of the load client for one round against that server."""
        return Plan(
            kind=self.kind,
            measure=self.measure,
            port=server.port,
            server=server.pid,
            connections=self.connections,
            streams=self.streams,
            in_flight=self.in_flight,
            message=self.message(),
            head=self.head,
            answer=self._answer(server.program),
            seconds=max(seconds, self.at_least),
            ca=server.ca,
            core=core,
        )

    def _answer(self, program: Program) -> int:
        match self.kind:
            case Kind.FRAMES:
                return _ECHO
            case Kind.DUPLEX if self.head is not requests.DUPLEX_HEAD:
                return 0
            case Kind.DUPLEX if program.arguments in {ours.arguments for ours in servers.OURS}:
                return len(requests.duplex_answer())
            case Kind.DUPLEX:
                return len(_MESSAGE)
            case _:
                return 0


_UNARY = (servers.EVERYWIRE, servers.HUB, servers.HTTP1)
_FRAMES = (servers.EVERYWIRE, servers.WEBSOCKET, servers.WSPROTO)
_DUPLEX = (servers.EVERYWIRE, servers.HTTP2, servers.H2)

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="unary-64",
            what="v2 infer, FP32 [1, 16] binary, 64 keep-alive connections, one request on each",
            unit="request",
            kind=Kind.UNARY,
            servers=_UNARY,
            connections=64,
            message=lambda: requests.infer_binary(16),
        ),
        Workload(
            name="unary-h2-64",
            what="the same over HTTP/2, 8 connections of 8 streams",
            unit="request",
            kind=Kind.STREAMS,
            servers=(servers.EVERYWIRE, servers.HTTP2),
            connections=8,
            streams=8,
            message=lambda: _BODY,
            head=_FIELDS,
        ),
        Workload(
            name="grpc-unary",
            what="ModelInfer, FP32 [1, 16] raw, 8 connections of 8 calls",
            unit="call",
            kind=Kind.STREAMS,
            servers=(servers.EVERYWIRE, servers.HTTP2),
            connections=8,
            streams=8,
            message=lambda: _CALL,
            head=requests.call_head("ModelInfer"),
        ),
        Workload(
            name="grpc-stream",
            what="ModelStreamInfer, FP32 [1, 16] raw, 8 connections of 8 streams, one message on each",
            unit="message",
            kind=Kind.DUPLEX,
            servers=(servers.EVERYWIRE, servers.HTTP2),
            connections=8,
            streams=8,
            message=lambda: _CALL,
            head=requests.call_head("ModelStreamInfer"),
        ),
        Workload(
            name="unary-json-16",
            what="v2 infer, FP32 [1, 16] as JSON, 16 keep-alive connections",
            unit="request",
            kind=Kind.UNARY,
            servers=_UNARY,
            connections=16,
            message=lambda: requests.infer_json(16),
        ),
        Workload(
            name="json-large",
            what="v2 infer, FP32 [1000, 100] as JSON, one connection",
            unit="request",
            kind=Kind.UNARY,
            servers=(servers.EVERYWIRE, servers.HTTP1),
            message=lambda: requests.infer_json(100, rows=1000),
            at_least=0.5,
        ),
        Workload(
            name="process-tensor",
            what="unary-64 with the model in a process of its own, beside our own without it",
            unit="request",
            kind=Kind.UNARY,
            servers=(servers.EVERYWIRE_PROCESS, servers.EVERYWIRE),
            connections=64,
            message=lambda: requests.infer_binary(16),
        ),
        Workload(
            name="tokens-64",
            what="JSON lines, 256 tokens an answer, a chunk for each, 64 connections",
            unit="token",
            kind=Kind.TOKENS,
            servers=(servers.EVERYWIRE, servers.HTTP1),
            connections=64,
            message=lambda: requests.generate(requests.TOKENS),
        ),
        Workload(
            name="paced-256",
            what="the same with tokens 20 ms apart, 256 connections, beside our own as fast as it can",
            unit="token",
            kind=Kind.TOKENS,
            servers=(servers.EVERYWIRE_PACED, servers.EVERYWIRE),
            connections=256,
            message=lambda: requests.generate(requests.TOKENS),
        ),
        Workload(
            name="websocket-256",
            what="1 KiB frames there and back, 256 WebSockets, one frame on each",
            unit="message",
            kind=Kind.FRAMES,
            servers=_FRAMES,
            connections=256,
            message=lambda: _FRAME,
        ),
        Workload(
            name="websocket-pipe",
            what="1 KiB frames there and back, one WebSocket, 128 in flight",
            unit="message",
            kind=Kind.FRAMES,
            servers=_FRAMES,
            in_flight=128,
            message=lambda: _FRAME,
        ),
        Workload(
            name="duplex-256",
            what="1 KiB event-stream messages over HTTP/2, 8 connections of 32 streams, one message on each",
            unit="message",
            kind=Kind.DUPLEX,
            servers=_DUPLEX,
            connections=8,
            streams=32,
            message=lambda: _MESSAGE,
            head=requests.DUPLEX_HEAD,
        ),
        Workload(
            name="duplex-pipe",
            what="the same on one stream, 128 in flight",
            unit="message",
            kind=Kind.DUPLEX,
            servers=_DUPLEX,
            in_flight=128,
            message=lambda: _MESSAGE,
            head=requests.DUPLEX_HEAD,
        ),
        Workload(
            name="duplex-pipe-tls",
            what="duplex-pipe behind TLS, beside our own without it",
            unit="message",
            kind=Kind.DUPLEX,
            servers=(servers.EVERYWIRE_TLS, servers.EVERYWIRE),
            in_flight=128,
            message=lambda: _MESSAGE,
            head=requests.DUPLEX_HEAD,
        ),
        Workload(
            name="large-16MiB",
            what="v2 infer, FP32 [1, 4194304] binary, 16 MiB each way, one connection",
            unit="request",
            kind=Kind.UNARY,
            servers=(servers.EVERYWIRE, servers.HTTP1),
            message=lambda: requests.infer_binary(4 * 2**20),
            at_least=1.0,
        ),
        Workload(
            name="idle-websockets",
            what="memory of a WebSocket that had one echo and is silent, over 1000 of them",
            unit="stream",
            kind=Kind.FRAMES,
            servers=_FRAMES,
            measure=Measure.HELD,
            connections=1000,
            message=lambda: _FRAME,
            at_least=0.5,
        ),
        Workload(
            name="idle-http2",
            what="memory of an HTTP/2 stream that had one echo and is silent, over 25 connections of 40",
            unit="stream",
            kind=Kind.DUPLEX,
            servers=(servers.EVERYWIRE, servers.HTTP2),
            measure=Measure.HELD,
            connections=25,
            streams=40,
            message=lambda: _MESSAGE,
            head=requests.DUPLEX_HEAD,
            at_least=0.5,
        ),
        Workload(
            name="slow-reader",
            what="growth of the server when one client asks for a billion tokens and reads none",
            unit="stream",
            kind=Kind.TOKENS,
            servers=(servers.EVERYWIRE, servers.HTTP1),
            measure=Measure.STALLED,
            message=lambda: requests.generate(10**9),
            at_least=3.0,
        ),
    )
}
