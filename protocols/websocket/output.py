"""The sending end of a WebSocket: frames in their order, the Pongs that go ahead of them, and what is written next."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Literal

from protocols.errors import LocalProtocolError
from protocols.events import Buffer, Sent

STREAM: Literal[1] = 1
"""The stream id in `Sent`: a WebSocket connection is one stream."""

BY_REFERENCE = 4096
"""Below this a copy costs less than one more buffer in the list that the kernel is given."""


class FrameQueue:
    """What a connection has to send: whole frames, each in pieces, the last of them a Close."""

    __slots__ = ("_given", "_large", "_outbox", "_pongs", "_queued", "_rest", "close_sent")

    def __init__(self) -> None:
        # Frames in pieces, of which no byte has been given out; then the pieces, last one first, of one that has begun.
        self._outbox: list[tuple[Buffer, ...]] = []
        self._rest: list[Buffer] = []
        self._large = False
        self._pongs: list[bytes] = []
        self._queued = 0
        self._given = 0
        self.close_sent = False
        """Our Close is queued; no further frame can be."""

    def _push(self, *pieces: Buffer) -> None:
        # An empty piece could be left over alone, and be given out as if it were something.
        self._outbox.append(tuple(filter(len, pieces)))
        self._queued += sum(map(len, pieces))
        self._large = self._large or max(map(len, pieces)) >= BY_REFERENCE

    def _push_pong(self, frame: bytes) -> None:
        """Each Ping has a Pong of its own, though one for the latest would do (RFC 6455 section 5.5.3): a peer may tell
        times by them. How many wait is for whoever reads the transport to bound."""
        self._pongs.append(frame)
        self._queued += len(frame)

    def _push_close(self, frame: bytes) -> None:
        self._push(frame)
        self.close_sent = True

    def drop_waiting(self) -> None:
        """Drops the frames of which no byte has been given out."""
        self._outbox.clear()
        self._pongs.clear()
        self._queued = self._given + sum(map(len, self._rest))

    def data_to_send(self, at_most: int = 65536) -> list[Buffer]:
        """At most `at_most` bytes to write, in order; empty when nothing waits. Small buffers come as one.

        They stay queued until `data_sent`, which must come before the next call. Pongs go ahead of every frame of
        which no byte has been given out.
        """
        if self._given:
            raise LocalProtocolError("data_to_send before data_sent for the buffers given out last")
        outbox = self._outbox
        if self._rest or self._pongs or self._queued > at_most:
            return _together(self._cut(at_most))
        if not outbox:
            return []
        self._given = self._queued
        pieces = outbox[0] if len(outbox) == 1 else chain.from_iterable(outbox)
        buffers: list[Buffer] = _together(pieces) if self._large else [b"".join(pieces)]
        outbox.clear()
        self._large = False
        return buffers

    def _cut(self, at_most: int) -> list[Buffer]:
        """The pieces of what goes first, the last one cut so that they are `at_most` bytes."""
        pieces: list[Buffer] = []
        rest, begun = self._rest, 0
        while (left := at_most - self._given) > 0:
            if not rest:
                if self._pongs:
                    rest.extend(reversed(self._pongs))
                    self._pongs.clear()
                elif begun < len(self._outbox):
                    rest.extend(reversed(self._outbox[begun]))
                    begun += 1
                else:
                    break
            piece = rest.pop()
            if len(piece) > left:
                view = memoryview(piece)
                rest.append(view[left:])
                piece = view[:left]
            self._given += len(piece)
            pieces.append(piece)
        del self._outbox[:begun]
        return pieces

    def data_sent(self) -> Sent:
        """What `data_to_send` gave out last is with the kernel. `ended` names the stream when our Close was its end."""
        if not self._given:
            return Sent()
        self._queued -= self._given
        self._given = 0
        ended = self.close_sent and not self._queued
        return Sent(room=[STREAM], ended=[STREAM] if ended else [])


def _together(pieces: Iterable[Buffer]) -> list[Buffer]:
    """The pieces in order, small neighbours as one."""
    out: list[Buffer] = []
    small: list[Buffer] = []
    for piece in pieces:
        if len(piece) < BY_REFERENCE:
            small.append(piece)
            continue
        if small:
            out.append(b"".join(small))
            small.clear()
        out.append(piece)
    if small:
        out.append(b"".join(small))
    return out
