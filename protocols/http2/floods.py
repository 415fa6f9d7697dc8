"""The flood limits of HTTP/2: cheap input that costs the gateway work, how it is counted, and how much is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from protocols.floods import Allowance, Allowances

YOUNG = 1.0
"""Seconds: a reset by the peer counts as a flood only for a stream younger than this."""
LATE = 3.0
"""Seconds after our own RST_STREAM in which frames of that stream may still arrive: two, and one more because the driver
passes the time once a second."""
CRAMPED = 256
"""Bytes: a DATA frame that the peer's window cuts shorter than this is mostly overhead."""


@final
@dataclass(slots=True)
class FloodCounters:
    """The input since the connection began. The machine counts rare kinds as they come, and derives the others from its own
    state on request (`HTTP2Connection.flood_counters`)."""

    total: int = 0
    resets: int = 0
    refused: int = 0
    pings: int = 0
    settings: int = 0
    empty_data: int = 0
    empty_row: int = 0
    """The longest row of empty DATA frames on one stream."""
    window_updates: int = 0
    priority: int = 0
    cramped: int = 0
    waste: int = 0

    opened: int = 0
    """Streams of the peer that were accepted."""
    fed: int = 0
    """DATA frames with payload; several between two empty ones count once."""
    data_sent: int = 0
    """Our DATA frames with payload that the kernel has."""
    heads_sent: int = 0
    """Streams that we have ended: each had a HEADERS frame of ours."""
    late: int = 0
    """Flow-controlled bytes on streams that were over."""
    payload_in: int = 0
    payload_out: int = 0
    completed: int = 0
    """Exchanges that ended complete. The machine cannot know, so the driver sets it."""


HTTP2_FLOODS: Allowances[FloodCounters] = Allowances(
    (
        Allowance(
            kind="reset",
            counts="the client's RST_STREAM on a stream younger than 1 s whose answer is not whole. A stream error that is "
            "answered with RST_STREAM, whatever frame made it. A head that is refused with 4xx before it is an exchange",
            count=lambda counters: counters.resets,
            burst=200,
            rate=33,
            earned_by="1 for each exchange that ended complete, 200 in hand at most",
            earned=lambda counters: counters.completed,
            most_earned=200,
        ),
        Allowance(
            kind="refused",
            counts="a stream beyond `http2.streams`, after the client has acknowledged our SETTINGS",
            count=lambda counters: counters.refused,
            burst=2000,
            rate=100,
        ),
        Allowance(
            kind="ping",
            counts="PING without ACK",
            count=lambda counters: counters.pings,
            burst=200,
            rate=10,
            earned_by="2 for each HEADERS or DATA frame that we sent",
            earned=lambda counters: 2 * (counters.data_sent + counters.heads_sent),
        ),
        Allowance(
            kind="settings",
            counts="SETTINGS without ACK; 1 more for each 100 open streams where it changes their windows",
            count=lambda counters: counters.settings,
            burst=50,
            rate=1,
        ),
        Allowance(
            kind="empty",
            counts="DATA without payload and without END_STREAM, only padding included",
            count=lambda counters: counters.empty_data,
            burst=200,
            rate=20,
            earned_by="1 for each DATA frame with payload, either way",
            earned=lambda counters: max(counters.fed, counters.payload_in // 16_384) + counters.data_sent,
            in_a_row=10,
            longest=lambda counters: counters.empty_row,
        ),
        Allowance(
            kind="window",
            counts="WINDOW_UPDATE",
            count=lambda counters: counters.window_updates,
            burst=500,
            rate=10,
            earned_by="2 for each stream opened, 20 for each DATA frame that we sent",
            earned=lambda counters: 2 * counters.opened + 20 * counters.data_sent,
        ),
        Allowance(
            kind="priority",
            counts="PRIORITY, PRIORITY_UPDATE, ALTSVC, ORIGIN, unknown types; GOAWAY, an "
            "acknowledgement of nothing, RST_STREAM on a stream that is over",
            count=lambda counters: counters.priority,
            burst=500,
            rate=50,
            earned_by="2 for each stream opened",
            earned=lambda counters: 2 * counters.opened,
        ),
        Allowance(
            kind="cramped",
            counts="a DATA frame of ours of less than 256 bytes, made short by the client's window",
            count=lambda counters: counters.cramped,
            burst=1000,
            rate=100,
        ),
        Allowance(
            kind="waste",
            counts="a byte of a frame that is neither a head nor DATA, or of DATA 3 s and more after we reset its stream",
            count=lambda counters: counters.waste,
            burst=4 * 1024 * 1024,
            rate=16 * 1024,
            earned_by="16 for each byte of payload, either way",
            earned=lambda counters: 16 * (counters.payload_in - counters.late + counters.payload_out),
            in_bytes=True,
        ),
    )
)
"""The allowances of one peer. `[http2.floods]` can set other bursts and rates. By default the burst of `refused` is twice
`http2.streams`."""
