"""gRPC by hand: frames of HTTP/2 that h2 makes and reads, whatever they say, and messages of a few bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events

SERVICE = "/inference.GRPCInferenceService"
HEALTH = "/grpc.health.v1.Health"
PATIENCE = 60
NO_FIELDS: Mapping[str, str | None] = {}
_FRAME = 9  # the bytes before a frame's payload
_DATA, _HEADERS, _RST_STREAM, _GOAWAY = 0, 1, 3, 7
HEAD: Mapping[str, str] = {
    ":method": "POST", ":scheme": "http", ":path": "", ":authority": "localhost",
    "te": "trailers", "content-type": "application/grpc",
}  # fmt: skip


def prefixed(message: bytes, flag: int = 0) -> bytes:
    """A message with what stands before it."""
    return struct.pack(">BI", flag, len(message)) + message


def text_field(number: int, value: str | bytes) -> bytes:
    """A field of text, bytes or a message, of less than 16 KiB."""
    raw = value.encode() if isinstance(value, str) else value
    return bytes((number << 3 | 2, *([len(raw)] if len(raw) < 128 else [len(raw) & 127 | 128, len(raw) >> 7]))) + raw


def infer_request(model: str, text: str | bytes, id: str = "") -> bytes:
    """A ModelInferRequest with one element of BYTES."""
    raw = text.encode() if isinstance(text, str) else text
    tensor = text_field(1, "INPUT0") + text_field(2, "BYTES") + text_field(3, b"\x01")
    named = text_field(1, model) + (text_field(3, id) if id else b"")
    return named + text_field(5, tensor) + text_field(7, struct.pack("<I", len(raw)) + raw)


def infer_answer(message: bytes) -> str:
    """The element of BYTES in the raw contents that a ModelInferResponse ends with."""
    for at in range(len(message) - 4):
        (length,) = struct.unpack_from("<I", message, at)
        if at + 4 + length == len(message) and message[:1] == b"\x0a":
            return message[at + 4 :].decode()
    raise AssertionError(f"no text in {message!r}")


@dataclass
class Answer:
    """The answer on one stream."""

    head: dict[str, str] = field(default_factory=dict)
    alone: bool = False
    """The head had END_STREAM: with a status in it this is Trailers-Only."""
    body: bytes = b""
    trailers: dict[str, str] = field(default_factory=dict)
    reset: int | None = None
    over: bool = False

    @property
    def status(self) -> tuple[int, str]:
        """The status of gRPC, and its text as it was sent."""
        said = self.head if self.alone else self.trailers
        return int(said["grpc-status"]), said.get("grpc-message", "")

    @property
    def messages(self) -> list[bytes]:
        """All whole ones."""
        found, at = [], 0
        while at + 5 <= len(self.body):
            (length,) = struct.unpack_from(">I", self.body, at + 1)
            found.append(self.body[at + 5 : at + 5 + length])
            at += 5 + length
        return found


class Frames:
    """One connection."""

    def __init__(self, host: str, port: int, *, lenient: bool = False) -> None:
        """`lenient` takes what C-core's servers send and h2 ends a connection for: an error's head a second time, behind the end
        of its stream, and texts with spaces at their ends."""
        self._lenient = lenient
        self._socket = socket.create_connection((host, port), timeout=PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = h2.config.H2Configuration(
            header_encoding="utf-8",
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
            validate_inbound_headers=not lenient,
        )
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        self.answers: dict[int, Answer] = {}
        self.going: list[tuple[int, int]] = []
        """The error and the last stream of each GOAWAY."""
        self.pongs = 0
        self._received = bytearray()
        self.closed = False
        self._flush()

    def __enter__(self) -> Frames:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _flush(self) -> None:
        self._socket.sendall(self.h2.data_to_send())

    def open(
        self, path: str, body: bytes | None = None, fields: Mapping[str, str | None] = NO_FIELDS, *, end: bool = True
    ) -> int:
        """Begins a call; `fields` are those that its head has beside the usual ones, or in their place: None for one that
        is left out."""
        head: dict[str, str | None] = {**HEAD, ":path": path, **fields}
        stream: int = self.h2.get_next_available_stream_id()
        self.answers[stream] = Answer()
        self.h2.send_headers(stream, [(n, v) for n, v in head.items() if v is not None], end_stream=end and body is None)
        self._flush()
        if body is not None:
            self.send(stream, body, end=end)
        return stream

    def send(self, stream: int, body: bytes, *, end: bool = False) -> None:
        """Sends the next bytes of a call, in as many frames as it takes."""
        left = memoryview(body)
        while left:
            while not (window := self.h2.local_flow_control_window(stream)):
                self._read()
                if self.answers[stream].over:
                    return
            n = min(len(left), window, self.h2.max_outbound_frame_size)
            self.h2.send_data(stream, left[:n].tobytes())
            left = left[n:]
            self._flush()
        if end:
            self.h2.end_stream(stream)
            self._flush()

    def ping(self, many: int) -> None:
        """Returns when so many pings are answered, one after the other."""
        for _ in range(many):
            answered = self.pongs + 1
            self.h2.ping(b"everywir")
            self._flush()
            while self.pongs < answered:
                self._read()

    def reset(self, stream: int) -> None:
        """RST_STREAM with CANCEL."""
        self.h2.reset_stream(stream, 8)
        self._flush()

    def answer(self, stream: int) -> Answer:
        """Waits for the end of the stream and returns its answer."""
        while not self.answers[stream].over:
            self._read()
        return self.answers[stream]

    def message(self, stream: int, number: int) -> bytes:
        """A message of an answer, when it is there."""
        while len(self.answers[stream].messages) <= number:
            self._read()
        return self.answers[stream].messages[number]

    def message_or_end(self, stream: int, number: int) -> None:
        """Returns when a message of an answer is there, or the answer is over without it."""
        while len(self.answers[stream].messages) <= number and not self.answers[stream].over:
            self._read()

    def call(self, path: str, body: bytes | None, fields: Mapping[str, str | None] = NO_FIELDS) -> Answer:
        """Asks and reads the answer."""
        return self.answer(self.open(path, body, fields))

    def until_closed(self) -> None:
        """Returns when the server has ended the connection."""
        while not self.closed:
            self._read()

    def until_going(self, many: int = 1) -> None:
        """Returns when so many GOAWAYs have come."""
        while len(self.going) < many:
            self._read()

    def _read(self) -> None:
        if self.closed:
            raise AssertionError(f"the connection was closed after {self.going}")
        data = self._socket.recv(65536)
        if not data:
            self.closed = True
            return
        self._received += data
        while len(self._received) >= _FRAME:
            end = _FRAME + int.from_bytes(self._received[:3], "big")
            if len(self._received) < end:
                break
            frame = bytes(self._received[:end])
            del self._received[:end]
            if frame[3] == _GOAWAY:  # for h2 the connection would be dead, while its streams go on
                last, error = struct.unpack_from(">II", frame, _FRAME)
                self.going.append((error, last & 0x7FFFFFFF))
                continue
            if self._lenient and self._is_late(frame):
                continue
            for event in self.h2.receive_data(frame):
                self._take(event)
        self._flush()

    def _is_late(self, frame: bytes) -> bool:
        """True for a frame behind the end of its stream. Its fields are decoded, as later ones may refer to them."""
        answer = self.answers.get(int.from_bytes(frame[5:9], "big"))
        late = answer is not None and answer.over and frame[3] in (_DATA, _HEADERS, _RST_STREAM)
        if late and frame[3] == _HEADERS:
            self.h2.decoder.decode(frame[_FRAME:])
        return late

    def _take(self, event: Any) -> None:
        match event:
            case h2.events.ResponseReceived():
                answer = self.answers[event.stream_id]
                answer.head, answer.alone = _fields(event.headers), event.stream_ended is not None
            case h2.events.DataReceived():
                self.answers[event.stream_id].body += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.TrailersReceived():
                self.answers[event.stream_id].trailers = _fields(event.headers)
            case h2.events.StreamEnded():
                self.answers[event.stream_id].over = True
            case h2.events.StreamReset():
                answer = self.answers[event.stream_id]
                answer.reset, answer.over = int(event.error_code), True
            case h2.events.PingAckReceived():
                self.pongs += 1


def _fields(headers: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    return {str(name): str(value) for name, value in headers}
