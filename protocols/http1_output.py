"""The queue of an HTTP/1.1 connection's output: what is joined, what goes by reference, and which answers have ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from protocols.errors import LocalProtocolError
from protocols.events import Buffer, Sent
from protocols.http1_input import LARGE


@final
class Output:
    """Buffers in the order they are written. `queued` counts their bytes until the kernel has them."""

    __slots__ = ("_buffers", "_ends", "_flight", "_sent", "queued")

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._flight = 0  # bytes given out and not confirmed
        self._sent = 0  # bytes the kernel has, ever
        self._ends: list[tuple[int, int]] = []  # (where its last byte is, stream)
        self.queued = 0

    def put(self, buffer: Buffer) -> None:
        """Queues a buffer whose len() counts bytes."""
        self._buffers.append(buffer)
        self.queued += len(buffer)

    def put_last(self, buffer: Buffer, stream: int) -> None:
        """Queues a buffer with which this stream ends."""
        self._buffers.append(buffer)
        self.queued += len(buffer)
        self._ends.append((self._sent + self.queued, stream))

    def put_all(self, buffers: Iterable[Buffer]) -> None:
        """Queues those that are not empty."""
        for buffer in buffers:
            if buffer:
                self.put(buffer)

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
        queue, queued = self._buffers, self.queued
        if queued < LARGE and queued <= at_most:  # a small answer, whole
            self._flight = queued
            if len(queue) > 1:
                joined: list[Buffer] = [b"".join(queue)]
                queue.clear()
                return joined
            self._buffers = []
            return queue
        buffers: list[Buffer] = []
        crumbs: list[Buffer] = []
        left, taken = at_most, 0
        for buffer in queue:
            if left <= 0:
                break
            size = len(buffer)
            if size < LARGE:
                crumbs.append(buffer)
            else:
                _join(crumbs, buffers)
                if size > left:
                    view = memoryview(buffer)
                    queue[taken] = view[left:]
                    buffers.append(view[:left])
                    left = 0
                    break
                buffers.append(buffer)
            left -= size
            taken += 1
        _join(crumbs, buffers)
        del queue[:taken]
        self._flight = at_most - left
        return buffers

    def confirm(self, current: int) -> Sent:
        """What `take` gave is with the kernel; bytes behind the last end are those of stream `current`."""
        flight, ends = self._flight, self._ends
        start, now = self._sent, self._sent + flight
        self._sent = now
        self._flight = 0
        self.queued -= flight
        if not ends:
            return Sent([current], []) if flight else Sent()
        if start < ends[0][0] == now:  # one answer, to its end
            stream = ends.pop(0)[1]
            return Sent([stream], [stream])
        room, ended = [], []
        for end, stream in ends:
            if start < end and start < now:
                room.append(stream)
            if end > now:
                break
            ended.append(stream)
            start = end
        else:
            if start < now:
                room.append(current)
        if ended:
            del ends[: len(ended)]
        return Sent(room, ended)


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
