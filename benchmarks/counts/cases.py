"""The workloads that are counted: the models, the bytes of the client, and how many units are one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

from benchmarks import requests
from benchmarks.alone.everywire_tokens import SECONDS, paced, tokens
from benchmarks.load.plan import Kind, Plan
from gateway.testing.processes import in_memory_processes
from gateway.testing.seeding import STEP_SECONDS
from models.adapt import spec_of
from models.library.echo import Echo
from models.library.tensors import identity

_TOKENS = 32
_GROWN = 256


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload. A step is what its client sends and waits for at once; the client takes one step after the other."""

    name: str
    what: str
    unit: str
    kind: Kind
    models: Callable[[], list[Any]]
    message: Callable[[int], bytes]
    """The message for that many units: a token's request asks for as many, all others are of one."""
    head: tuple[tuple[bytes, bytes], ...] = ()
    answer: int = 0
    warm: int = 8
    """Steps before those that are counted."""
    steps: int = 16
    each: int = 1
    """Units of a step."""
    fresh: bool = False
    """True if each step opens a connection and keeps it: its units are silent streams."""
    in_flight: int = 1
    """Messages under way where the growth of a unit is measured."""
    size: int = _GROWN
    """Units of one stream or connection, of which eightfold is measured as well. 0: growth is not measured."""
    pace: float = STEP_SECONDS
    """Seconds that the mocked clock goes on when there is nothing to read: until a token is due, or a thread's work done."""
    sockets: bool = True
    """True if system calls are counted: the model is in the gateway's process."""

    @property
    def units(self) -> int:
        """The units that are counted."""
        return self.steps * self.each

    def plan(self, units: int | None = None, *, in_flight: int = 1) -> Plan:
        """The plan of a client whose tokens' requests ask for that many units."""
        return Plan(
            kind=self.kind,
            port=0,
            server=0,
            message=self.message(self.each if units is None else units),
            head=self.head,
            answer=self.answer,
            streams=self.each if self.kind is Kind.DUPLEX else 1,
            in_flight=in_flight,
            seconds=0.0,
        )


def _identity() -> list[Any]:
    return [spec_of(identity, "identity")]


def _echo() -> list[Any]:
    return [spec_of(Echo(), "echo")]


def _elsewhere(specs: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    return lambda: [in_memory_processes(spec)[0] for spec in specs()]


_FRAME = requests.frame(requests.PIECE)
_ECHO = len(requests.answer_frame(requests.PIECE))
_MESSAGE = requests.duplex_message()
_ANSWER = len(requests.duplex_answer())
_FIELDS, _BODY = requests.infer_stream(16)
_CALL = requests.call_message(16)
_WEBSOCKET = Case(
    name="websocket", what="1 KiB there and back over a WebSocket", unit="message", kind=Kind.FRAMES, models=_echo,
    message=lambda units: _FRAME, answer=_ECHO, in_flight=32, size=512,
)  # fmt: skip
_DUPLEX = Case(
    name="duplex", what="a 1 KiB event-stream message and its echo over HTTP/2", unit="message", kind=Kind.DUPLEX,
    models=_echo, message=lambda units: _MESSAGE, head=requests.DUPLEX_HEAD, answer=_ANSWER, in_flight=32, size=512,
)  # fmt: skip
_BINARY = Case(
    name="unary-binary", what="v2 infer, FP32 [1, 16] binary", unit="request", kind=Kind.UNARY, models=_identity,
    message=lambda units: requests.infer_binary(16),
)  # fmt: skip

CASES = {
    case.name: case
    for case in (
        _BINARY,
        Case(
            name="json-small", what="v2 infer, FP32 [1, 16] as JSON", unit="request", kind=Kind.UNARY, models=_identity,
            message=lambda units: requests.infer_json(16),
        ),
        Case(
            name="json-large", what="v2 infer, FP32 [1000, 100] as JSON", unit="request", kind=Kind.UNARY, models=_identity,
            message=lambda units: requests.infer_json(100, rows=1000), warm=2, steps=2, size=4,
        ),
        Case(
            name="lines", what="JSON lines, as fast as the client reads", unit="token", kind=Kind.TOKENS,
            models=lambda: [spec_of(tokens, "tokens")], message=requests.generate, warm=2, steps=4, each=_TOKENS, size=1024,
        ),
        Case(
            name="sse-paced", what="server-sent events, a token every 20 ms", unit="token", kind=Kind.TOKENS,
            models=lambda: [spec_of(paced, "paced")], message=lambda units: requests.events(units, "paced"),
            warm=2, steps=4, each=_TOKENS, pace=SECONDS,
        ),
        _DUPLEX,
        _WEBSOCKET,
        Case(
            name="http2-unary", what="unary-binary over HTTP/2", unit="request", kind=Kind.STREAMS, models=_identity,
            message=lambda units: _BODY, head=_FIELDS,
        ),
        Case(
            name="grpc-unary", what="ModelInfer, FP32 [1, 16] raw", unit="call", kind=Kind.STREAMS, models=_identity,
            message=lambda units: _CALL, head=requests.call_head("ModelInfer"),
        ),
        Case(
            name="grpc-stream", what="a request of ModelStreamInfer and its answer", unit="message", kind=Kind.DUPLEX,
            models=_identity, message=lambda units: _CALL, head=requests.call_head("ModelStreamInfer"), in_flight=4,
        ),
        replace(
            _WEBSOCKET, name="process-part", what="websocket, the model in a process", models=_elsewhere(_echo),
            sockets=False,
        ),
        replace(
            _BINARY, name="process-tensor", what="unary-binary, the model in a process", models=_elsewhere(_identity),
            sockets=False,
        ),
        replace(
            _WEBSOCKET, name="idle-websocket", what="a WebSocket from its handshake to its silence", unit="stream",
            fresh=True, size=0,
        ),
        replace(
            _DUPLEX, name="idle-http2", what="8 streams on a new connection, from their heads to their silence",
            unit="stream", warm=2, steps=4, each=8, fresh=True, size=0,
        ),
    )
}  # fmt: skip
"""By name, in the order in which they are printed."""
