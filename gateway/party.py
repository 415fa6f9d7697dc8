"""Party: whom all that is shared is counted for, a key, a certificate or else a connection, and what memory it holds."""

from __future__ import annotations

import math
from typing import final
from weakref import WeakValueDictionary

from protocols.buffers import ByteBudget


@final
class MemoryAccount:
    """The bytes that one party holds of the byte budget. The party reserves and releases through it.

    While less than half of the budget is in use, any party may take any number. Above that, a party that holds its share
    or more gets no more, and the others do as long as the budget has room.
    """

    __slots__ = ("_budget", "_plenty", "held", "share")

    def __init__(self, budget: ByteBudget, *, plenty: int, share: int) -> None:
        """`plenty` is how much of the budget may be in use without a look at who holds it, `share` what one party may hold
        above that. Both are bytes."""
        self._budget, self._plenty = budget, plenty
        self.share = share
        self.held = 0
        """Bytes."""

    @property
    def limit(self) -> int:
        """The bytes that all parties together may hold."""
        return self._budget.limit

    @property
    def used(self) -> int:
        """The bytes that all parties together hold."""
        return self._budget.used

    def try_reserve(self, n: int) -> bool:
        """Takes n bytes if the party may have them; False, and nothing taken, if not."""
        budget = self._budget
        used = budget.used + n
        if used > self._plenty:
            if self.held >= self.share or not budget.try_reserve(n):
                return False
        else:
            budget.used = used
            if used > budget.high_water:
                budget.high_water = used
        self.held += n
        return True

    def release(self, n: int) -> None:
        """Gives n bytes back. Giving back more than was taken is a bug in the caller and raises AssertionError."""
        budget = self._budget
        assert 0 <= n <= self.held, f"released {n} bytes of {self.held} held"
        self.held -= n
        budget.used -= n

    def has_its_share(self, n: int = 0) -> bool:
        """True if the party is refused n bytes more because others need them, even where the budget has room."""
        return self.held >= self.share and self._budget.used + n > self._plenty

    def of(self, party: Party) -> MemoryAccount:
        """The account of that party in the same budget."""
        account = party.account
        if account is None:
            account = party.account = MemoryAccount(self._budget, plenty=self._plenty, share=self.share)
        return account

    def hand_over(self, n: int, other: MemoryAccount) -> None:
        """Moves n of the bytes that this account holds to `other`, whatever its share."""
        self.held -= n
        other.held += n


@final
class Quota:
    """How much one key may have at once, and in a second: a bucket of twice the rate, which is full at its begin."""

    __slots__ = ("_at", "_left", "at_once", "rate", "running")

    def __init__(self) -> None:
        self.running = 0
        """Exchanges that have begun and are not over."""
        self.at_once, self.rate = 0, 0.0
        """How many may run, and begin in a second; 0: any number."""
        self._left = self._at = 0.0

    def set(self, at_once: int, rate: float) -> None:
        """Sets both limits from now on, also for exchanges that run already."""
        if rate != self.rate:
            self._left, self._at = max(2 * rate, 1.0), -math.inf
        self.at_once, self.rate = at_once, rate

    def wait(self, now: float) -> float:
        """Seconds until one more may begin by the rate, 0 where one has by this call; `now` is on Trio's clock."""
        rate = self.rate
        if not rate:
            return 0.0
        left = min(self._left + (now - self._at) * rate, max(2 * rate, 1.0))
        self._at = now
        if left < 1.0:
            self._left = left
            return (1.0 - left) / rate
        self._left = left - 1.0
        return 0.0


@final
class Party:
    """One of those who share slots, memory and queues. It is told apart by identity: two connections are two parties,
    and all connections of one key, or of one certificate's subject, are one."""

    __slots__ = ("__weakref__", "account", "name", "quota", "share")

    def __init__(self, name: str, *, share: int | None = None) -> None:
        self.name = name
        """For logs and errors: the name of the key, the certificate's subject, or the peer's address."""
        self.share = share
        """Percent of the slots and of the queue of each model that it may hold; None: as the model's settings say."""
        self.quota: Quota | None = None
        """The limits of a key at once and per second; None for a party without a key."""
        self.account: MemoryAccount | None = None
        """Its bytes of the byte budget, once it has asked for any: `Server.account_of`."""


@final
class Parties:
    """The parties that have a name which outlives a connection, for as long as somebody knows them."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[str, str], Party] = WeakValueDictionary()

    def of_certificate(self, subject: str) -> Party:
        """That of all who show a certificate of this subject."""
        return self._of("certificate", subject)

    def of_key(self, name: str) -> Party:
        """That of all who show a key of this name."""
        return self._of("key", name)

    def of_peer(self, peer: str) -> Party:
        """That of all requests of a connection which another server holds, and of which it says no more than its peer."""
        return self._of("peer", peer)

    def _of(self, kind: str, name: str) -> Party:
        party = self._known.get((kind, name))
        if party is None:
            party = self._known[kind, name] = Party(name)
        return party
