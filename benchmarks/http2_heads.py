"""The cost of HTTP/2 in the server machine alone: CPU microseconds of heads, frames and whole unary exchanges.

    python -m benchmarks.http2_heads

No sockets: a client's bytes are made beforehand, then fed to `HTTP2Connection` and, for comparison, to a plain h2
connection. Clients differ in how their heads are compressed, so three are imitated: one whose heads are equal to the
byte (nghttp2, h2load), one that writes a changing field out in full (nghttp2 with content-length), and one that puts
each new value into HPACK's table (Python's hpack). Best of several rounds, in process CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived
from hpack import Encoder, NeverIndexedHeaderTuple

from protocols.events import NEED_DATA, Data, Headers, Response
from protocols.http2.connection import HTTP2Connection
from protocols.http2.frames import PREFACE
from protocols.roles import Role

ROUNDS = 5
COUNT = 1000
SMALL, PIECE = bytes(181), bytes(1024)
REQUEST = (
    (b":path", b"/v2/models/identity/infer"), (b":scheme", b"http"), (b":authority", b"127.0.0.1:8080"),
    (b":method", b"POST"), (b"user-agent", b"h2load nghttp2/1.52.0"), (b"content-length", b"181"),
    (b"inference-header-content-length", b"117"), (b"content-type", b"application/octet-stream"),
)  # fmt: skip
ANSWER = (
    (b"content-type", b"application/octet-stream"), (b"inference-header-content-length", b"104"),
    (b"content-length", b"168"), (b"x-request-id", b"8f14e45f-ceea-467f-9c1b-2f5d6b7a8c9d"),
)  # fmt: skip

TRAILERS = ((b"grpc-status", b"0"),)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def heads(changing: str) -> Iterator[bytes]:
    """Yields the header blocks of one client, with a field that changes in the named way, or none that changes."""
    encoder, n = Encoder(), 0
    while True:
        n += 1
        fields: list[tuple[bytes, bytes]] = list(REQUEST)
        if changing == "literal":
            fields.append(NeverIndexedHeaderTuple(b"x-request-id", b"%08d" % n))
        elif changing == "indexed":
            fields.append((b"x-request-id", b"%08d" % n))
        yield encoder.encode(fields)


def requests(changing: str, body: bytes) -> list[tuple[int, bytes]]:
    """Whole requests with their stream numbers; the first two fill the tables."""
    blocks = heads(changing)
    return [
        (stream, frame(1, 0x4, stream, next(blocks)) + frame(0, 0x1, stream, body)) for stream in range(1, 2 * COUNT + 4, 2)
    ]


WIDE = (2**30).to_bytes(4)
OPENING = PREFACE + frame(4, 0, 0, b"\0\x04" + WIDE) + frame(4, 1, 0, b"") + frame(8, 0, 0, WIDE)
"""SETTINGS and WINDOW_UPDATE of a client whose windows never make the server wait."""
OPEN = frame(1, 0x4, 1, Encoder().encode([field for field in REQUEST if field[0] != b"content-length"]))


class Ours:
    """The gateway's machine, driven as the gateway drives it."""

    def __init__(self) -> None:
        self.machine = HTTP2Connection(Role.SERVER)
        self.receive(OPENING)
        self.write()

    def receive(self, data: bytes) -> None:
        machine = self.machine
        machine.receive_data(data)
        while (event := machine.next_event()) is not NEED_DATA:
            if isinstance(event, Data):
                machine.credit(event.stream, len(event.buffers[0]))

    def answer(self, stream: int, trailers: Headers) -> None:
        self.machine.respond(stream, 200, ANSWER, (SMALL,), trailers)
        self.write()

    def start(self, stream: int) -> None:
        self.machine.send(Response(stream=stream, status=200, headers=ANSWER))

    def push(self, stream: int) -> None:
        self.machine.send_data(stream, (PIECE,))
        self.write()

    def write(self) -> None:
        if self.machine.data_to_send(65_536):
            self.machine.data_sent()


class Plain:
    """A server of h2 alone."""

    def __init__(self) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.h2.initiate_connection()
        self.receive(OPENING)
        self.h2.data_to_send()

    def receive(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, DataReceived):
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)

    def answer(self, stream: int, trailers: Headers) -> None:
        self.h2.send_headers(stream, [(b":status", b"200"), *ANSWER])
        self.h2.send_data(stream, SMALL, end_stream=not trailers)
        if trailers:
            self.h2.send_headers(stream, trailers, end_stream=True)
        self.h2.data_to_send()

    def start(self, stream: int) -> None:
        self.h2.send_headers(stream, [(b":status", b"200"), *ANSWER])

    def push(self, stream: int) -> None:
        self.h2.send_data(stream, PIECE)
        self.h2.data_to_send()


Server = Ours | Plain
Work = Callable[[Server], float]


def exchange(changing: str, *, receiving: bool, answering: bool, trailers: Headers = ()) -> Work:
    """CPU microseconds per exchange, of receiving it, answering it or both."""
    written = requests(changing, SMALL)

    def work(server: Server) -> float:
        spent = 0.0
        for number, (stream, data) in enumerate(written):
            started = time.process_time_ns()
            server.receive(data)
            received = time.process_time_ns()
            server.answer(stream, trailers)
            answered = time.process_time_ns()
            if number >= 2:
                spent += (received - started) * receiving + (answered - received) * answering
        return spent / COUNT / 1e3

    return work


def payload_in(together: int) -> Work:
    """CPU microseconds per DATA frame of 1 KiB, with `together` frames in a read."""
    data = frame(0, 0, 1, PIECE) * together

    def work(server: Server) -> float:
        server.receive(OPEN)
        return timed(lambda: server.receive(data)) / together

    return work


def payload_out(server: Server) -> float:
    """CPU microseconds per piece of 1 KiB that is written by itself."""
    server.receive(OPEN)
    server.start(1)
    return timed(lambda: server.push(1))


def timed(step: Callable[[], None]) -> float:
    started = time.process_time_ns()
    for _ in range(COUNT):
        step()
    return (time.process_time_ns() - started) / COUNT / 1e3


WORK: dict[str, Work] = {
    "request in, equal heads": exchange("", receiving=True, answering=False),
    "request in, a literal changes": exchange("literal", receiving=True, answering=False),
    "request in, the table changes": exchange("indexed", receiving=True, answering=False),
    "answer out": exchange("", receiving=False, answering=True),
    "unary exchange": exchange("", receiving=True, answering=True),
    "unary exchange with trailers": exchange("", receiving=True, answering=True, trailers=TRAILERS),
    "DATA in, 1 a read": payload_in(1),
    "DATA in, 32 a read": payload_in(32),
    "DATA out, 1 a write": payload_out,
}


def main() -> None:
    print(f"{'CPU us of each':>32} {'everywire':>10} {'h2':>10}")
    for name, work in WORK.items():
        ours = min(work(Ours()) for _ in range(ROUNDS))
        plain = min(work(Plain()) for _ in range(ROUNDS))
        print(f"{name:>32} {ours:10.1f} {plain:10.1f}")


if __name__ == "__main__":
    main()
