"""The flood limits of WebSocket: cheap input that costs the gateway work, how it is counted, and how much is allowed."""

from __future__ import annotations

from typing import final

import msgspec

from protocols.floods import Allowance, Allowances

TINY = 16
"""Bytes of payload: a frame with less, and without FIN, counts towards a row."""


@final
class FrameCounters(msgspec.Struct, gc=False):
    """The input since the connection began. The machine counts it, except for numbers that its driver has."""

    total: int = 0
    control: int = 0
    hollow: int = 0
    row: int = 0
    """Tiny frames in the current row, each without FIN."""
    longest_row: int = 0
    row_ends_at: int = 0
    """The received payload up to and including the last frame of the row, in bytes."""
    payload: int = 0
    """Payload bytes of received data frames, as of the last request for the counters."""
    frames: int = 0
    """Data frames in both directions; the driver sets it."""


NOTHING_COUNTED = FrameCounters()
"""Those of each connection until something counts; never changed."""

WEBSOCKET_FLOODS: Allowances[FrameCounters] = Allowances(
    (
        Allowance(
            kind="control",
            counts="Ping; Pong that answers nothing",
            count=lambda counters: counters.control,
            burst=100,
            rate=10,
            earned_by="1 for each 16 data frames, either way",
            earned=lambda counters: counters.frames // 16,
        ),
        Allowance(
            kind="hollow",
            counts="a data frame without payload that does not end its message",
            count=lambda counters: counters.hollow,
            burst=200,
            rate=100,
            earned_by="1 for each KiB of payload received",
            earned=lambda counters: counters.payload // 1024,
            in_a_row=1024,
            longest=lambda counters: counters.longest_row,
        ),
    )
)
"""The allowances of one peer. `[websocket.floods]` can set other bursts and rates. Frames of less than 16 bytes and without
FIN make a row."""
