"""Counters of ended and live exchanges, by wire, dialect and model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias, final

from gateway.core.exchange import Exchange
from gateway.errors import Ending
from gateway.histogram import Histogram
from gateway.net.tables import shrunk
from gateway.telemetry.account import PARTS, Account, account_of, account_so_far

LONG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Histogram bounds in seconds, for the duration of exchanges and the time to their first item."""
GAPS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Histogram bounds in seconds, for the time between two items."""
_AMOUNTS = ("bytes_in", "bytes_out", "items_in", "items_out")

TallyKey: TypeAlias = tuple[str, str, str]
"""Wire, dialect and model. The model's name is empty if it is not configured."""


@final
class Tally:
    """The counters of one wire, dialect and model. They never decrease."""

    __slots__ = ("bytes_in", "bytes_out", "duration", "endings", "first", "gap", "items_in", "items_out", "spent")

    def __init__(self) -> None:
        self.endings = dict.fromkeys(Ending, 0)
        """The number of each ending."""
        self.bytes_in = self.bytes_out = self.items_in = self.items_out = 0
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.duration, self.first, self.gap = Histogram(LONG), Histogram(LONG), Histogram(GAPS)
        """`duration` and `gap` count ended exchanges. `first` counts an exchange once its first item has left."""


@final
class _Counted:
    """The figures of a live exchange that a look has counted already."""

    __slots__ = ("first", *_AMOUNTS, *PARTS)

    def __init__(self) -> None:
        self.first = False
        for name in (*_AMOUNTS, *PARTS):
            setattr(self, name, 0)


@final
class Tallies:
    """Counts each exchange when it has ended. A look, such as a scrape, also counts live ones, as far as they have come.

    Between two looks a live exchange costs nothing. Figures counted at a look stay with the wire, dialect and model known
    then; if these become known later, the rest is counted there. So counters never decrease.
    """

    def __init__(
        self, live: Collection[Exchange], configured: Mapping[str, object], closed: Callable[[Exchange], None]
    ) -> None:
        """`live` are the live exchanges, `configured` the models that are counted by name. `closed` is called with each
        ended exchange after it was counted."""
        self._live, self._configured, self._closed = live, configured, closed
        self._counted: dict[Exchange, _Counted] = {}
        self.by_key: dict[TallyKey, Tally] = {}

    def exchange_closed(self, exchange: Exchange) -> None:
        """Counts an ended exchange, and calls `closed` with it."""
        tally, account, ending = self._tally_of(exchange), account_of(exchange), exchange.ending
        assert ending is not None
        tally.endings[ending] += 1
        tally.duration.observe(account.wall)
        if (gap := account.gap) is not None:
            tally.gap.observe(gap)
        if self._counted and (counted := self._counted.pop(exchange, None)) is not None:
            _count(tally, account, counted)
        else:
            tally.bytes_in += account.bytes_in
            tally.bytes_out += account.bytes_out
            tally.items_in += account.items_in
            tally.items_out += account.items_out
            spent = tally.spent
            spent["begin"] += account.begin
            spent["model"] += account.model
            spent["flush"] += account.flush
            if exchange.waits is not None:
                spent["slot"] += account.slot
                spent["input"] += account.input
                spent["room"] += account.room
            if account.first is not None:
                tally.first.observe(account.first)
        self._closed(exchange)

    def rest(self) -> None:
        """Gives back the room of its table that is empty now."""
        self._counted = shrunk(self._counted)

    def count_live(self) -> None:
        """Counts all live exchanges, as far as they have come."""
        for exchange in self._live:
            self.count_one(exchange)

    def count_one(self, exchange: Exchange) -> None:
        """Counts one live exchange, as far as it has come."""
        counted = self._counted.get(exchange)
        if counted is None:
            counted = self._counted[exchange] = _Counted()
        _count(self._tally_of(exchange), account_so_far(exchange, exchange.owner.clock()), counted)

    def _tally_of(self, exchange: Exchange) -> Tally:
        model = exchange.model
        key = exchange.wire.name, exchange.dialect, model if model in self._configured else ""
        tally = self.by_key.get(key)
        if tally is None:
            tally = self.by_key[key] = Tally()
        return tally


def _count(tally: Tally, account: Account, counted: _Counted) -> None:
    """Adds the growth since the last look. A look may count a wait as longer than it turns out, because it ends when its
    bytes came: the part grows again only when it has caught up."""
    for name in _AMOUNTS:
        now, before = getattr(account, name), getattr(counted, name)
        if now > before:
            setattr(counted, name, now)
            setattr(tally, name, getattr(tally, name) + now - before)
    spent = tally.spent
    for name in PARTS:
        now, before = getattr(account, name), getattr(counted, name)
        if now > before:
            setattr(counted, name, now)
            spent[name] += now - before
    if account.first is not None and not counted.first:
        counted.first = True
        tally.first.observe(account.first)
