"""What of a WebSocket costs a peer little and us something: how it is counted, and how much of each kind is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from protocols.floods import Allowance, Allowances

TINY = 16
"""Bytes of payload: a frame with less that does not end its message is one of a row."""


@final
@dataclass(slots=True)
class FrameCounters:
    """What came since the connection began: the machine counts it, but for what its driver knows already."""

    total: int = 0
    control: int = 0
    hollow: int = 0
    row: int = 0
    """Tiny frames in a row now, each without FIN."""
    longest_row: int = 0
    row_ends_at: int = 0
    """Bytes of payload that had come with the last of the row."""
    payload: int = 0
    """Bytes of data frames received, when it was asked for."""
    frames: int = 0
    """Data frames in both directions: the driver says so."""


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
"""What one peer may do. The bursts and rates are those of `[websocket.floods]` unless it is set. In a row are frames of less
than 16 bytes without FIN."""
