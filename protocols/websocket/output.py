"""The output queue of a WebSocket: frames in order, Pongs ahead of them, and the buffers to write next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal

from protocols.errors import LocalProtocolError
from protocols.events import Buffer, Sent

STREAM: Literal[1] = 1
"""The stream id in `Sent`: a WebSocket connection is one stream."""

BY_REFERENCE = 4096
"""Below this size, a copy costs less than one more buffer for the kernel."""


class FrameQueue:
    """The output of a connection: whole frames, each in pieces. The last one is a Close."""

    __slots__ = ("_given", "_large", "_outbox", "_pongs", "_queued", "_rest", "close_sent")

    def __init__(self) -> None:
        # Frames in pieces, not handed out; then the pieces, last one first, of the frame that is partly handed out.
        self._outbox: list[tuple[Buffer, ...]] = []
        self._rest: Sequence[Buffer] = ()
        self._large = False
        self._pongs: list[bytes] | tuple[()] = ()
        self._queued = 0
        self._given = 0
        self.close_sent = False
        """True if our Close is queued: no frame may follow it."""

    def _push(self, *pieces: Buffer) -> None:
        # An empty piece must not be left over alone, because it would be handed out like data.
        self._outbox.append(tuple(filter(len, pieces)))
        self._queued += sum(map(len, pieces))
        self._large = self._large or max(map(len, pieces)) >= BY_REFERENCE

    def _push_pong(self, frame: bytes) -> None:
        """Queues a Pong. Each Ping has its own, although RFC 6455 section 5.5.3 requires one for the latest only: a peer may
        measure times with them. The reader of the transport must bound their number."""
        if self._pongs:
            self._pongs.append(frame)
        else:
            self._pongs = [frame]
        self._queued += len(frame)

    def _push_close(self, frame: bytes) -> None:
        self._push(frame)
        self.close_sent = True

    def drop_waiting(self) -> None:
        """Drops the frames of which no byte has been handed out."""
        self._outbox.clear()
        self._pongs = ()
        self._queued = self._given + sum(map(len, self._rest))

    def data_to_send(self, at_most: int = 65536) -> list[Buffer]:
        """The next bytes to write, at most `at_most`, in order; empty if nothing waits. Small buffers are joined.

        They stay queued until `data_sent`, which must come before the next call. Pongs go ahead of every frame of which no
        byte has been handed out.
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
        """The first pieces to write. The last one is cut so that they have at most `at_most` bytes."""
        pieces: list[Buffer] = []
        rest, begun = [*self._rest], 0
        while (left := at_most - self._given) > 0:
            if not rest:
                if self._pongs:
                    rest.extend(reversed(self._pongs))
                    self._pongs = ()
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
        self._rest = rest or ()
        return pieces

    def data_sent(self) -> Sent:
        """Confirms that the last output of `data_to_send` is with the kernel. `ended` has the stream if our Close was its
        end."""
        if not self._given:
            return Sent()
        self._queued -= self._given
        self._given = 0
        ended = self.close_sent and not self._queued
        return Sent(room=[STREAM], ended=[STREAM] if ended else [])


def _together(pieces: Iterable[Buffer]) -> list[Buffer]:
    """The pieces in order, with small neighbors joined."""
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
