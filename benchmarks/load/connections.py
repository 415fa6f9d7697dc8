"""The client's side of each wire: prebuilt bytes out, and of what comes in only what must be counted."""

from __future__ import annotations

import re
from collections import deque
from typing import Protocol

from hpack import Decoder, Encoder

from benchmarks import requests
from benchmarks.load.plan import Kind, Plan

_STATUS = b"HTTP/1.1 200"
_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_WINDOW = 2**31 - 1
_REFILL = 2**24
_MESSAGE_HEAD = 5
"""Bytes before a gRPC message: a flag, and its length."""


class LoadError(Exception):
    """The server did something else than answer; the text says what."""


class Connection(Protocol):
    """One connection, its handshake done: `out` is what it wants written next, and `take` counts what was read."""

    out: bytes | memoryview

    def take(self, data: bytes) -> int:
        """Reads `data` and queues what follows from it; how many units it completed."""
        ...


class Unary:
    """One request after the other."""

    def __init__(self, plan: Plan) -> None:
        self.out: bytes | memoryview = plan.message
        self._request = plan.message
        self._missing = 0
        self._begun = b""

    def take(self, data: bytes) -> int:
        if not self._missing:
            data, self._begun = self._begun + data, b""
            end = data.find(_HEAD_END)
            if end < 0:
                self._begun = data
                return 0
            _check_status(data[: len(_STATUS)], data)
            self._missing = end + 4 + _content_length(data, end)
        self._missing -= len(data)
        if self._missing > 0:
            return 0
        if self._missing:
            raise LoadError(f"an answer is {-self._missing} bytes longer than its content-length says")
        self.out = self._request
        return 1


class Streams:
    """Requests on the streams of one HTTP/2 connection, one in flight for each of `streams`. The windows are wide enough for
    every answer; a stream's end is one."""

    def __init__(self, plan: Plan) -> None:
        encoder = Encoder()
        self._body = plan.message
        first, self._head = encoder.encode(plan.head), encoder.encode(plan.head)
        self._stream, self._buffer, self._decoder = 1, b"", Decoder()
        self.out: bytes | memoryview = (
            _opening() + self._asked(first) + b"".join(self._asked(self._head) for _ in range(plan.streams - 1))
        )

    def _asked(self, head: bytes) -> bytes:
        stream, self._stream = self._stream, self._stream + 2
        return frame(1, 4, stream, head) + frame(0, 1, stream, self._body)

    def take(self, data: bytes) -> int:
        buffer = self._buffer + data if self._buffer else data
        out: list[bytes | memoryview] = [self.out] if self.out else []
        at, end, units = 0, len(buffer), 0
        while end - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            if end - at < 9 + size:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            if kind == 1:
                _check_field(self._decoder, buffer[at + 9 : at + 9 + size])
            elif kind:
                _control(kind, flags, int.from_bytes(buffer[at + 5 : at + 9], "big"), buffer[at + 9 : at + 9 + size], out)
            if kind < 2 and flags & 1:
                units += 1
                out.append(self._asked(self._head))
            at += 9 + size
        self._buffer = buffer[at:]
        self.out = b"".join(out)
        return units


class Tokens:
    """One stream of tokens after the other. Every token's line holds two braces, and nothing else has one, so that
    cuts between reads cannot hide a token."""

    _END = b"\r\n0\r\n\r\n"

    def __init__(self, plan: Plan) -> None:
        self.out: bytes | memoryview = plan.message
        self._request = plan.message
        self._braces = 0
        self._start = self._tail = b""

    def take(self, data: bytes) -> int:
        if len(self._start) < len(_STATUS):
            self._start += data[: len(_STATUS) - len(self._start)]
            _check_status(self._start, data)
        braces = self._braces + data.count(b"{")
        self._braces = braces & 1
        self._tail = data[-7:] if len(data) >= 7 else (self._tail + data)[-7:]
        if self._tail == self._END:
            self._start = self._tail = b""
            self.out = self._request
        return braces >> 1


class Frames:
    """Echoes of one length: a byte count is all there is to read. The first one is compared."""

    def __init__(self, plan: Plan) -> None:
        self._run = memoryview(plan.message * plan.in_flight)
        self._message, self._answer = len(plan.message), plan.answer
        self._expected: bytes | None = requests.answer_frame(requests.PIECE)
        self._first = b""
        self._rest = 0
        self.out: bytes | memoryview = self._run

    def take(self, data: bytes) -> int:
        if self._expected is not None:
            self._check(data, self._expected)
        done, self._rest = divmod(self._rest + len(data), self._answer)
        if done:
            again = self._run[: done * self._message]
            self.out = b"".join((self.out, again)) if self.out else again
        return done

    def _check(self, data: bytes, expected: bytes) -> None:
        self._first = (self._first + data)[: len(expected)]
        if not expected.startswith(self._first):
            raise LoadError(f"the first echo is another: it begins {self._first[:40]!r}")
        if len(self._first) == len(expected):
            self._expected = None


class Duplex:
    """Messages on the streams of one HTTP/2 connection, each in a DATA frame, as the server's windows let them."""

    def __init__(self, plan: Plan) -> None:
        ids = range(1, 2 * plan.streams, 2)
        self._message, self._answer = plan.message, plan.answer
        head = Encoder().encode(plan.head)
        self.out: bytes | memoryview = _opening() + b"".join(frame(1, 4, stream, head) for stream in ids)
        self._heads = {stream: frame(0, 0, stream, plan.message)[:9] for stream in ids}
        self._got = dict.fromkeys(ids, 0)
        self._room = dict.fromkeys(ids, 65_535)
        self._initial = self._shared = 65_535
        self._taken = dict.fromkeys((0, *ids), 0)
        self._due: deque[int] = deque(stream for stream in ids for _ in range(plan.in_flight))
        self._buffer = b""
        self._decoder = Decoder()

    def take(self, data: bytes) -> int:
        buffer = self._buffer + data if self._buffer else data
        out: list[bytes | memoryview] = [self.out] if self.out else []
        at, end, units, answer = 0, len(buffer), 0, self._answer
        while end - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            if end - at < 9 + size:
                break
            kind, stream = buffer[at + 3], int.from_bytes(buffer[at + 5 : at + 9], "big")
            if kind == 0:
                if buffer[at + 4] & 1:
                    raise LoadError(f"the server ended stream {stream}")
                if not answer:
                    answer = self._answer = _MESSAGE_HEAD + int.from_bytes(buffer[at + 10 : at + 14], "big")
                done, self._got[stream] = divmod(self._got[stream] + size, answer)
                units += done
                for _ in range(done):
                    self._due.append(stream)
                self._refill(0, size, out)
                self._refill(stream, size, out)
            else:
                self._other(kind, buffer[at + 4], stream, buffer[at + 9 : at + 9 + size], out)
            at += 9 + size
        self._buffer = buffer[at:]
        self._send(out)
        self.out = b"".join(out)
        return units

    def _refill(self, stream: int, size: int, out: list[bytes | memoryview]) -> None:
        self._taken[stream] += size
        if self._taken[stream] >= _REFILL:
            out.append(frame(8, 0, stream, self._taken[stream].to_bytes(4, "big")))
            self._taken[stream] = 0

    def _send(self, out: list[bytes | memoryview]) -> None:
        size = len(self._message)
        for _ in range(len(self._due)):
            if self._shared < size:
                return
            stream = self._due.popleft()
            if self._room[stream] < size:
                self._due.append(stream)
                continue
            self._room[stream] -= size
            self._shared -= size
            out += (self._heads[stream], self._message)

    def _other(self, kind: int, flags: int, stream: int, payload: bytes, out: list[bytes | memoryview]) -> None:
        match kind:
            case 1:
                _check_field(self._decoder, payload)
            case 8 if stream:
                self._room[stream] += int.from_bytes(payload, "big")
            case 8:
                self._shared += int.from_bytes(payload, "big")
            case _:
                if kind == 4 and not flags & 1:
                    self._settle(payload)
                _control(kind, flags, stream, payload, out)

    def _settle(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            if payload[at : at + 2] == b"\0\4":
                initial = int.from_bytes(payload[at + 2 : at + 6], "big")
                for stream in self._room:
                    self._room[stream] += initial - self._initial
                self._initial = initial


def _opening() -> bytes:
    """The preface, and windows as wide as they may be."""
    widen = (_WINDOW - 65_535).to_bytes(4, "big")
    settings = frame(4, 0, 0, b"\0\4" + _WINDOW.to_bytes(4, "big"))
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + frame(8, 0, 0, widen)


def _check_field(decoder: Decoder, block: bytes) -> None:
    fields = dict(decoder.decode(block, raw=True))
    status, code = fields.get(b":status"), fields.get(b"grpc-status", b"0")
    if code != b"0":
        raise LoadError(f"a call ended with code {code.decode()}: {fields.get(b'grpc-message')!r}")
    if status != b"200" and b"grpc-status" not in fields:
        raise LoadError(f"a stream was answered with status {status!r}")


def _control(kind: int, flags: int, stream: int, payload: bytes, out: list[bytes | memoryview]) -> None:
    """Answers what wants an answer."""
    match kind:
        case 3:
            raise LoadError(f"stream {stream} was reset with code {int.from_bytes(payload, 'big')}")
        case 4 if not flags & 1:
            out.append(frame(4, 1, 0, b""))
        case 6 if not flags & 1:
            out.append(frame(6, 1, 0, payload))
        case 7:
            raise LoadError(f"the server said goodbye with code {int.from_bytes(payload[4:8], 'big')}")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def connection(plan: Plan) -> Connection:
    """A connection for this plan, as it is after its handshake."""
    match plan.kind:
        case Kind.UNARY:
            return Unary(plan)
        case Kind.STREAMS:
            return Streams(plan)
        case Kind.TOKENS:
            return Tokens(plan)
        case Kind.FRAMES:
            return Frames(plan)
        case Kind.DUPLEX:
            return Duplex(plan)


def _check_status(start: bytes, shown: bytes) -> None:
    if not _STATUS.startswith(start):
        raise LoadError(f"expected an answer with status 200, got {shown[:200]!r}")


def _content_length(data: bytes, end: int) -> int:
    found = _LENGTH.search(data, 0, end)
    if found is None:
        raise LoadError(f"expected an answer with a content-length, got {data[:200]!r}")
    return int(found[1])
