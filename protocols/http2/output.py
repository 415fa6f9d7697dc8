"""The output queues of an HTTP/2 connection: control frames in order, and payload by stream and by reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import final

from protocols.errors import LocalProtocolError
from protocols.events import Buffer
from protocols.http2.frames import END_STREAM, HEAD, Kind

_HEADERS = bytes((Kind.HEADERS,))
OWN_BUFFER = 4096
"""From this size on, payload is handed out by reference. Below it, a copy costs less than one more buffer."""


@final
class ControlQueue:
    """Frames that are written before any payload, first in, first out."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._frames: deque[tuple[bytes, int]] = deque()
        self._begun = False  # part of the first frames is handed out

    def put(self, frames: bytes, ends: int = 0) -> None:
        """Queues whole frames. `ends` is the stream whose last byte they hold, or 0."""
        self.nbytes += len(frames)
        self._frames.append((frames, ends))

    def take(self, at_most: int, out: list[bytes | memoryview], ended: list[int]) -> int:
        """Moves at most `at_most` bytes to `out`, and the streams that they end to `ended`. Returns the number of bytes."""
        waiting, left = self._frames, at_most
        if self.nbytes <= at_most:  # the usual case
            for frames, ends in waiting:
                out.append(frames)
                if ends:
                    ended.append(ends)
            n = self.nbytes
            self.clear()
            return n
        while waiting and left:
            frames, ends = waiting.popleft()
            self._begun = len(frames) > left
            if self._begun:
                waiting.appendleft((frames[left:], ends))
                frames, ends = frames[:left], 0
            left -= len(frames)
            out.append(frames)
            if ends:
                ended.append(ends)
        self.nbytes -= at_most - left
        return at_most - left

    def end_head(self, stream: int) -> bool:
        """Puts END_STREAM on the stream's head if it was queued last and none of it is handed out. False, and nothing
        changed, otherwise."""
        if not self._frames or (self._begun and len(self._frames) == 1):
            return False
        frames, _ = self._frames[-1]
        if frames[3:4] != _HEADERS or frames[5:HEAD] != stream.to_bytes(4):
            return False
        self._frames[-1] = b"%b%c%b" % (frames[:4], frames[4] | END_STREAM, frames[5:]), stream
        return True

    def clear(self) -> None:
        """Drops all queued frames."""
        self.nbytes, self._begun = 0, False
        self._frames.clear()

    def drop_rest(self) -> None:
        """Drops all queued frames except the rest of one that is partly handed out."""
        first = self._frames[0] if self._begun and self._frames else None
        self.clear()
        if first is not None:
            self.put(*first)
            self._begun = True


@final
class PayloadQueue:
    """The payload of one stream, in pieces of the caller's memory."""

    __slots__ = ("_pieces", "leaving", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        """Bytes that are queued."""
        self.leaving = 0
        """Bytes that were handed out and are not yet written."""
        self._pieces: deque[bytes | memoryview] | None = None
        """None for an idle stream: an empty deque takes more memory than everything else here."""

    def put(self, buffers: Sequence[Buffer]) -> int:
        """Queues the buffers and returns their size in bytes. Small bytes objects are joined: one piece is cheaper to keep.
        LocalProtocolError, and nothing queued, for memory that is not contiguous."""
        n = 0
        for buffer in buffers:
            if type(buffer) is not bytes:
                break
            n += len(buffer)
        else:
            if n < OWN_BUFFER:
                if n:
                    self.nbytes += n
                    piece = b"".join(buffers)
                    if self._pieces is None:
                        self._pieces = deque((piece,))
                    else:
                        self._pieces.append(piece)
                return n
        pieces = flat_views(buffers)
        if not pieces:
            return 0
        n = sum(map(len, pieces))
        self.nbytes += n
        if self._pieces is None:
            self._pieces = deque()
        self._pieces.extend(pieces)
        return n

    def take(self, n: int) -> Iterable[bytes | memoryview]:
        """Removes and returns the first n bytes, which must be queued. They count as leaving from now on."""
        self.leaving += n
        pieces = self._pieces
        assert pieces is not None, f"{n} bytes of an empty queue"
        if n == self.nbytes:
            self.nbytes, self._pieces = 0, None
            return pieces
        self.nbytes -= n
        taken: list[bytes | memoryview] = []
        while n:
            piece = pieces.popleft()
            if len(piece) > n:
                view = memoryview(piece)
                pieces.appendleft(view[n:])
                piece = view[:n]
            taken.append(piece)
            n -= len(piece)
        return taken

    def discard(self) -> int:
        """Drops the queued bytes and returns their number."""
        dropped, self.nbytes, self._pieces = self.nbytes, 0, None
        return dropped


def gathered(pieces: list[bytes | memoryview], n: int) -> list[Buffer]:
    """Buffers to write, made of flat pieces with n bytes in total: small neighbors are joined, large pieces stay as they
    are."""
    if n < OWN_BUFFER or max(map(len, pieces)) < OWN_BUFFER:
        return [b"".join(pieces)] if n else []
    found: list[Buffer] = []
    first = 0
    for at, piece in enumerate(pieces):
        if len(piece) >= OWN_BUFFER:
            if first < at:
                found.append(b"".join(pieces[first:at]))
            found.append(piece)
            first = at + 1
    if first < len(pieces):
        found.append(b"".join(pieces[first:]))
    return found


def flat_views(buffers: Iterable[Buffer]) -> list[bytes | memoryview]:
    """The buffers without the empty ones: bytes as they are, others as views of bytes. LocalProtocolError for memory that is
    not contiguous."""
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
