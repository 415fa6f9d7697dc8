"""The queue of an HTTP/1.1 connection's output: what is joined, what goes by reference, and which answers have ended."""

from __future__ import annotations

from collections import deque
from typing import final

from protocols.errors import LocalProtocolError
from protocols.events import Buffer, Sent
from protocols.http1_input import LARGE


@final
class Output:
    """Buffers in the order they are written. `queued` counts their bytes until the kernel has them."""

    __slots__ = ("_buffers", "_ends", "_flight", "_sent", "queued")

    def __init__(self) -> None:
        self._buffers: deque[Buffer] = deque()
        self._flight = 0  # bytes given out and not confirmed
        self._sent = 0  # bytes the kernel has, ever
        self._ends: deque[tuple[int, int]] = deque()  # (where its last byte is, stream)
        self.queued = 0

    def put(self, buffer: Buffer) -> None:
        """Queues a buffer whose len() counts bytes."""
        self._buffers.append(buffer)
        self.queued += len(buffer)

    def clear(self) -> None:
        """Forgets everything."""
        self._buffers.clear()
        self._ends.clear()
        self._flight = self.queued = 0

    def end(self, stream: int) -> None:
        """Everything of this stream is queued."""
        self._ends.append((self._sent + self.queued, stream))

    def take(self, at_most: int) -> list[Buffer]:
        """The next buffers, about `at_most` bytes: runs of small ones are joined and never cut."""
        if self._flight:
            raise LocalProtocolError("data_to_send: what it gave last was not confirmed with data_sent")
        queue = self._buffers
        if self.queued < LARGE and self.queued <= at_most:  # a small answer, whole
            self._flight = self.queued
            crumbs = list(queue)
            queue.clear()
            return [b"".join(crumbs)] if len(crumbs) > 1 else crumbs
        buffers: list[Buffer] = []
        crumbs = []
        left = at_most
        while queue and left > 0:
            buffer = queue.popleft()
            if len(buffer) < LARGE:
                crumbs.append(buffer)
            else:
                _join(crumbs, buffers)
                if len(buffer) > left:
                    view = memoryview(buffer)
                    queue.appendleft(view[left:])
                    buffer = view[:left]
                buffers.append(buffer)
            left -= len(buffer)
        _join(crumbs, buffers)
        self._flight = at_most - left
        return buffers

    def confirm(self, current: int) -> Sent:
        """What `take` gave is with the kernel; bytes behind the last end are those of stream `current`."""
        sent = Sent()
        start, now = self._sent, self._sent + self._flight
        while self._ends:
            end, stream = self._ends[0]
            if start < end and start < now:
                sent.room.append(stream)
            if end > now:
                break
            sent.ended.append(stream)
            self._ends.popleft()
            start = end
        else:
            if start < now:
                sent.room.append(current)
        self._sent = now
        self.queued -= self._flight
        self._flight = 0
        return sent


def bytes_view(buffer: memoryview) -> memoryview:
    """The same memory, with a len() that counts bytes. Raises LocalProtocolError where it is not contiguous."""
    if not buffer.c_contiguous:
        raise LocalProtocolError("buffer: expected contiguous memory")
    if buffer.ndim == 1 and buffer.itemsize == 1:
        return buffer
    return buffer.cast("B") if buffer.nbytes else memoryview(b"")


def _join(crumbs: list[Buffer], buffers: list[Buffer]) -> None:
    if crumbs:
        buffers.append(crumbs[0] if len(crumbs) == 1 else b"".join(crumbs))
        crumbs.clear()
