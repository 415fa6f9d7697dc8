"""What an HTTP/2 connection has yet to write: control frames in their order, payload by stream and by reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import final

from protocols.errors import LocalProtocolError
from protocols.events import Buffer

OWN_BUFFER = 4096
"""From this size on a piece of payload is handed out by reference; below it a copy costs less than a buffer."""


@final
class ControlQueue:
    """Frames that go out before any payload, first in first out."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._frames: deque[tuple[bytes, int]] = deque()

    def put(self, frames: bytes, ends: int = 0) -> None:
        """Queues whole frames; `ends` names the stream whose last byte of ours they hold."""
        self.nbytes += len(frames)
        self._frames.append((frames, ends))

    def take(self, at_most: int) -> tuple[bytes, int]:
        """The next bytes, at most so many, and the stream that is ended by them (0: none)."""
        frames, ends = self._frames.popleft()
        if len(frames) > at_most:
            self._frames.appendleft((frames[at_most:], ends))
            frames, ends = frames[:at_most], 0
        self.nbytes -= len(frames)
        return frames, ends

    def clear(self) -> None:
        """Drops what is queued."""
        self.nbytes = 0
        self._frames.clear()


@final
class PayloadQueue:
    """The payload of one stream, in pieces of the caller's memory."""

    __slots__ = ("_pieces", "leaving", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes that wait."""
        self.leaving = 0
        """Bytes that were handed out and are not yet written."""
        self._pieces: deque[bytes | memoryview] = deque()

    def put(self, pieces: Iterable[bytes | memoryview]) -> int:
        """Queues flat pieces and says how many bytes they are."""
        before = self.nbytes
        for piece in pieces:
            self._pieces.append(piece)
            self.nbytes += len(piece)
        return self.nbytes - before

    def take(self, n: int) -> list[bytes | memoryview]:
        """The first n bytes, which must be there; they count as leaving from now on."""
        self.nbytes -= n
        self.leaving += n
        taken: list[bytes | memoryview] = []
        while n:
            piece = self._pieces.popleft()
            if len(piece) > n:
                view = memoryview(piece)
                self._pieces.appendleft(view[n:])
                piece = view[:n]
            taken.append(piece)
            n -= len(piece)
        return taken

    def discard(self) -> int:
        """Drops what waits and says how many bytes that were."""
        dropped, self.nbytes = self.nbytes, 0
        self._pieces.clear()
        return dropped


@final
class Gather:
    """A list of buffers to write in which small neighbours are joined and large ones stay what they are."""

    __slots__ = ("_buffers", "_small", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._buffers: list[Buffer] = []
        self._small: list[bytes | memoryview] = []

    def add(self, piece: bytes | memoryview) -> None:
        """Appends a flat piece."""
        self.nbytes += len(piece)
        if len(piece) < OWN_BUFFER:
            self._small.append(piece)
        else:
            self._flush()
            self._buffers.append(piece)

    def buffers(self) -> list[Buffer]:
        """Everything that was added, in order."""
        self._flush()
        return self._buffers

    def _flush(self) -> None:
        if self._small:
            self._buffers.append(b"".join(self._small))
            self._small.clear()


def flat_views(buffers: Iterable[Buffer]) -> list[bytes | memoryview]:
    """The buffers, bytes as they are and the rest as views of plain bytes, without the empty ones; LocalProtocolError for
    memory with gaps."""
    views: list[bytes | memoryview] = []
    for buffer in buffers:
        if type(buffer) is bytes:
            if buffer:
                views.append(buffer)
            continue
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise LocalProtocolError("a payload buffer must be contiguous")
        if view.nbytes:
            views.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
    return views
