"""Readers of the server's answers to an attacker, one for each wire: they find how a connection was ended."""

from __future__ import annotations

import re
from collections import Counter
from typing import ClassVar, Protocol, final

from benchmarks.load.connections import frame

_STATUS = re.compile(rb"HTTP/1\.1 (\d\d\d) ")


class Ear(Protocol):
    """Takes what comes. `last` is the last word of the connection, such as `goaway 11`; `said` what stands with it."""

    last: str
    said: str
    counts: Counter[str]
    """All else, such as `rst 11` or `status 200`."""

    def take(self, data: bytes) -> None: ...


@final
class HTTP1Ear:
    """Statuses of answers. Heads are looked for, bodies are not read: no body may have a line that looks like a head's."""

    def __init__(self) -> None:
        self.last = self.said = ""
        self.counts: Counter[str] = Counter()
        self._tail = b""

    def take(self, data: bytes) -> None:
        data = self._tail + data
        end = 0
        for found in _STATUS.finditer(data):
            status = int(found[1])
            self.counts[f"status {status}"] += 1
            if status >= 400:
                self.last, self.said = f"status {status}", data[found.end() : found.end() + 200].decode("latin-1")
            end = found.end()
        self._tail = data[max(end, len(data) - 16) :]


class HTTP2Ear:
    """GOAWAY with its code and debug data; resets, and statuses that the static table has, are counted. `replies` is what a
    peer owes that wants to be taken for a good one."""

    _INDEXED: ClassVar[dict[int, int]] = {0x88: 200, 0x89: 204, 0x8A: 206, 0x8B: 304, 0x8C: 400, 0x8D: 404, 0x8E: 500}

    def __init__(self) -> None:
        self.last = self.said = ""
        self.counts: Counter[str] = Counter()
        self.answered = 0
        """Streams that the server has ended."""
        self.window = 0
        """Bytes by which it has widened the connection's window."""
        self._owed = b""
        self._buffer = bytearray()

    def replies(self) -> bytes:
        """ACKs of what has come since the last call."""
        owed, self._owed = self._owed, b""
        return owed

    def take(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 9:
            size, kind, flags = int.from_bytes(buffer[at : at + 3], "big"), buffer[at + 3], buffer[at + 4]
            if len(buffer) - at < 9 + size:
                break
            if kind == 8 and not any(buffer[at + 5 : at + 9]):
                self.window += int.from_bytes(buffer[at + 9 : at + 13], "big")
            self._frame(kind, flags, bytes(buffer[at + 9 : at + 9 + size]))
            at += 9 + size
        del buffer[:at]

    def _frame(self, kind: int, flags: int, payload: bytes) -> None:
        if kind in (0, 1):
            self.answered += flags & 1
        match kind:
            case 0:
                self.counts["data"] += 1
            case 1:
                first = next((byte for byte in payload[:1]), 0)
                self.counts[f"status {self._INDEXED.get(first, 'other')}"] += 1
            case 3:
                self.counts[f"rst {int.from_bytes(payload, 'big')}"] += 1
            case 4 if not flags & 1:
                self._owed += frame(4, 1, 0, b"")
            case 6 if not flags & 1:
                self._owed += frame(6, 1, 0, payload)
            case 7:
                self.last, self.said = (
                    f"goaway {int.from_bytes(payload[4:8], 'big')}",
                    payload[8:].decode("utf-8", "replace"),
                )


@final
class WebSocketEar:
    """The handshake's status, and then Close with its code and reason."""

    def __init__(self) -> None:
        self.last = self.said = ""
        self.counts: Counter[str] = Counter()
        self.open = False
        self._buffer = bytearray()

    def take(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        if not self.open:
            head, end, _ = bytes(buffer).partition(b"\r\n\r\n")
            if not end:
                return
            found = _STATUS.match(head)
            status = int(found[1]) if found else 0
            self.counts[f"status {status}"] += 1
            if status != 101:
                self.last, self.said = f"status {status}", bytes(buffer[len(head) + 4 :][:200]).decode("latin-1")
                del buffer[:]
                return
            self.open = True
            del buffer[: len(head) + 4]
        while (taken := self._frame(buffer)) is not None:
            del buffer[:taken]

    def _frame(self, buffer: bytearray) -> int | None:
        if len(buffer) < 2:
            return None
        opcode, size, at = buffer[0] & 15, buffer[1] & 127, 2
        if size >= 126:
            at = 4 if size == 126 else 10
            if len(buffer) < at:
                return None
            size = int.from_bytes(buffer[2:at], "big")
        if len(buffer) < at + size:
            return None
        if opcode == 8:
            code = int.from_bytes(buffer[at : at + 2], "big")
            self.last, self.said = f"close {code}", bytes(buffer[at + 2 : at + size]).decode("utf-8", "replace")
        self.counts[{8: "close", 9: "ping", 10: "pong"}.get(opcode, "data")] += 1
        return at + size
