"""What became of every exchange in a drain: for people, for programs, and for who asks why a stream was cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import final

import msgspec

from gateway.core.exchange import Exchange
from gateway.errors import Ending

_CUT = (Ending.DRAINED, Ending.LOST)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CutExchange:
    """An exchange that was still live at the deadline of a drain, and was ended by it."""

    id: str
    wire: str
    dialect: str
    model: str
    ending: str
    """`drained` where the client was told so, `transport-lost` where it did not take even that."""
    age: float
    """Seconds from its request to the deadline."""
    bytes_in: int
    bytes_out: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """What became of the exchanges that were live when the drain began."""

    live: int
    endings: dict[str, int]
    """How many had each ending."""
    seconds: float
    clean: bool
    """Whether all of them ended by themselves before the deadline."""
    finished: int = 0
    """How many ended by themselves, whatever their ending."""
    refused: int = 0
    """How many requests came during the drain and were told to go elsewhere: they are not among the others."""
    cut: tuple[CutExchange, ...] = field(default=())
    """The rest, the oldest first."""

    def to_json(self) -> bytes:
        """One line."""
        return msgspec.json.encode(self)


def report_of(
    live: Collection[Exchange], late: Iterable[Exchange], *, deadline: float, seconds: float, refused: int
) -> DrainReport:
    """The report of a drain that is over: each of `live` has its ending. `late` are those that were live at the `deadline`,
    on Trio's clock."""
    late = set(late)
    cut = sorted((exchange for exchange in live if exchange in late and exchange.ending in _CUT), key=lambda e: e.started_at)
    return DrainReport(
        live=len(live),
        endings=dict(Counter(exchange.ending.value for exchange in live if exchange.ending is not None)),
        seconds=round(seconds, 3),
        clean=not late,
        finished=len(live) - len(cut),
        refused=refused,
        cut=tuple([_row(exchange, deadline) for exchange in cut]),
    )


def _row(exchange: Exchange, deadline: float) -> CutExchange:
    assert exchange.ending is not None
    return CutExchange(
        id=exchange.id,
        wire=exchange.wire.name,
        dialect=exchange.dialect,
        model=exchange.model,
        ending=exchange.ending.value,
        age=round(deadline - exchange.started_at, 3),
        bytes_in=exchange.bytes_in,
        bytes_out=exchange.outbound.bytes_out,
    )
