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
    """The payload of one stream, as views of the caller's memory."""

    __slots__ = ("_views", "leaving", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes that wait."""
        self.leaving = 0
        """Bytes that were handed out and are not yet written."""
        self._views: deque[memoryview] = deque()

    def put(self, views: Iterable[memoryview]) -> None:
        """Queues flat views."""
        for view in views:
            self._views.append(view)
            self.nbytes += view.nbytes

    def take(self, n: int) -> list[memoryview]:
        """The first n bytes, which must be there; they count as leaving from now on."""
        self.nbytes -= n
        self.leaving += n
        taken: list[memoryview] = []
        while n:
            view = self._views.popleft()
            if view.nbytes > n:
                self._views.appendleft(view[n:])
                view = view[:n]
            taken.append(view)
            n -= view.nbytes
        return taken

    def discard(self) -> int:
        """Drops what waits and says how many bytes that were."""
        dropped, self.nbytes = self.nbytes, 0
        self._views.clear()
        return dropped


@final
class Gather:
    """A list of buffers to write in which small neighbours are joined and large ones stay what they are."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._buffers: list[Buffer] = []
        self._small = bytearray()

    def add(self, piece: bytes | memoryview) -> None:
        """Appends a flat piece."""
        self.nbytes += len(piece)
        if len(piece) < OWN_BUFFER:
            self._small += piece
        else:
            self._flush()
            self._buffers.append(piece)

    def buffers(self) -> list[Buffer]:
        """Everything that was added, in order."""
        self._flush()
        return self._buffers

    def _flush(self) -> None:
        if self._small:
            self._buffers.append(bytes(self._small))
            self._small.clear()


def flat_views(buffers: Iterable[Buffer]) -> list[memoryview]:
    """Views of the buffers as plain bytes, without the empty ones; LocalProtocolError for memory with gaps."""
    views = []
    for buffer in buffers:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise LocalProtocolError("a payload buffer must be contiguous")
        if view.nbytes:
            views.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
    return views
