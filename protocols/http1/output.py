"""The sending side of an HTTP/1.1 connection: joins small buffers, passes large ones by reference, and tracks endings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat

from protocols.errors import LocalProtocolError
from protocols.events import Buffer, Sent
from protocols.http1.body import LARGE


class _ChunkLines(dict[int, bytes]):
    """The first lines of chunks that go out joined, by their size. Those of usual tokens are kept."""

    def __missing__(self, size: int) -> bytes:
        if 0 < size < LARGE:  # a chunk of size 0 would be the last (RFC 9112 section 7.1)
            return b"%x\r\n" % size
        raise KeyError(size)


_line_of = _ChunkLines((size, b"%x\r\n" % size) for size in range(1, 512)).__getitem__


class Output:
    """The output queue of a connection: buffers in the order they are written, each of one stream."""

    __slots__ = ("_answer", "_answer_stream", "_buffers", "_ends", "_flight", "_sent", "queued", "stream")

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._flight = 0  # bytes given out and not confirmed
        self._sent = 0  # bytes handed to the kernel since the beginning
        self._ends: list[tuple[int, int]] = []  # (position of its last byte, stream)
        # The size and stream of a whole answer that was queued into an empty queue, until it is sent. It ends before
        # everything in `_ends`.
        self._answer = self._answer_stream = 0
        self.queued = 0
        """Bytes queued and not yet handed to the kernel."""
        self.stream = 0
        """The current stream, or the last one; 0 before the first."""

    def _put(self, buffer: Buffer) -> None:
        """Queues a buffer whose len() counts bytes."""
        self._buffers.append(buffer)
        self.queued += len(buffer)

    def _put_all(self, buffers: Iterable[Buffer]) -> None:
        """Queues the buffers that are not empty."""
        for buffer in buffers:
            if buffer:
                self._put(buffer)

    def _clear_output(self) -> None:
        """Drops all output."""
        self._buffers.clear()
        self._ends.clear()
        self._flight = self._answer = self.queued = 0

    def _put_behind(self, answer: bytes) -> None:
        """Queues the whole answer of the current stream, behind other output."""
        self._put(answer)
        self._put_end()

    def _put_end(self) -> None:
        """Marks the end of the current stream: all its bytes are queued."""
        self._ends.append((self._sent + self.queued, self.stream))

    def data_to_send(self, at_most: int) -> list[Buffer]:
        """The next buffers to write, about `at_most` bytes: small ones are joined and never split. [] if there are none.
        Confirm them with `data_sent` before the next call."""
        if self._flight:
            raise LocalProtocolError("data_to_send: what it gave last was not confirmed with data_sent")
        queue, queued = self._buffers, self.queued
        if queued < LARGE and queued <= at_most:  # a small answer, whole
            self._flight = queued
            self._buffers = []
            return queue if len(queue) < 2 else [b"".join(queue)]
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

    def answer_sent(self) -> int:
        """Confirms that exactly the bytes that `respond` returned were written, without `data_to_send`. Returns their
        stream. 0, and nothing confirmed, if `data_to_send` gave something or there is no such answer."""
        size = self._answer
        if not size or self._flight:
            return 0
        self._answer = 0
        self._sent += size
        self.queued -= size
        del self._buffers[0]
        return self._answer_stream

    def data_sent(self) -> Sent:
        """Confirms that the buffers of `data_to_send` are with the kernel. Call it also after []: an End that adds no bytes
        (declared length, or a body that ends with the connection) is reported only here."""
        flight, ends, start = self._flight, self._ends, self._sent
        if self._answer:
            ends.insert(0, (start + self._answer, self._answer_stream))
            self._answer = 0
        self._sent = now = start + flight
        self.queued -= flight
        self._flight = 0
        if not ends:
            return Sent([self.stream], []) if flight else Sent()
        end, stream = ends[0]
        if flight and end == now:  # the usual case: one answer, to its end
            del ends[0]
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
                room.append(self.stream)  # output behind the last end
        if ended:
            del ends[: len(ended)]
        return Sent(room, ended)


def bytes_view(buffer: memoryview) -> memoryview:
    """The same memory, with a len() that counts bytes. LocalProtocolError if it is not contiguous."""
    if not buffer.c_contiguous:
        raise LocalProtocolError("buffer: expected contiguous memory")
    if buffer.ndim == 1 and buffer.itemsize == 1:
        return buffer
    return buffer.cast("B") if buffer.nbytes else memoryview(b"")


def chunks_of(pieces: Sequence[bytes]) -> bytes:
    """The pieces as one chunk each, without bytecode for each piece. KeyError if a piece is empty, or of LARGE bytes or
    more."""
    chunks = zip(map(_line_of, map(len, pieces)), pieces, repeat(b"\r\n"), strict=False)
    return b"".join(chain.from_iterable(chunks))


def _join(crumbs: list[Buffer], buffers: list[Buffer]) -> None:
    if crumbs:
        buffers.append(crumbs[0] if len(crumbs) == 1 else b"".join(crumbs))
        crumbs.clear()
