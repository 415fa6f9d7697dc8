"""Party: a key, a certificate or a connection, to which shared slots, memory and queue places are charged."""

from __future__ import annotations

import math
from typing import final
from weakref import WeakValueDictionary

from protocols.buffers import ByteBudget


@final
class MemoryAccount:
    """The account of one party with the byte budget: reserves bytes and counts those held.

    While at most `plenty` bytes of the budget are in use, every party gets all that it asks for. Above that, a party
    with its share or more gets nothing; others get what the budget has left.
    """

    __slots__ = ("_budget", "_plenty", "held", "share")

    def __init__(self, budget: ByteBudget, *, plenty: int, share: int) -> None:
        """`plenty`: the bytes of the budget that may be in use before shares count. `share`: the bytes from which on a party
        gets no more then."""
        self._budget, self._plenty = budget, plenty
        self.share = share
        self.held = 0
        """The bytes that the party holds."""

    @property
    def limit(self) -> int:
        """The most bytes that all parties together may hold."""
        return self._budget.limit

    @property
    def used(self) -> int:
        """The bytes that all parties together hold."""
        return self._budget.used

    def try_reserve(self, n: int) -> bool:
        """Takes n bytes if the party may have them. If not, takes none and returns False."""
        budget = self._budget
        used = budget.used + n
        if used > self._plenty:
            if self.held >= self.share or not budget.try_reserve(n):
                budget.wanted = self
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
        """True if the party's share alone keeps it from n more bytes, also while the budget has room."""
        return self.held >= self.share and self._budget.used + n > self._plenty

    def of(self, party: Party) -> MemoryAccount:
        """Returns that party's account with the same budget. The first call makes it."""
        account = party.account
        if account is None:
            account = party.account = MemoryAccount(self._budget, plenty=self._plenty, share=self.share)
        return account

    def hand_over(self, n: int, other: MemoryAccount) -> None:
        """Moves n held bytes to the other account, whatever its share."""
        self.held -= n
        other.held += n


@final
class Quota:
    """The limits of one key: exchanges at once, and per second by a token bucket of twice the rate, full at the start."""

    __slots__ = ("_at", "_left", "at_once", "rate", "running")

    def __init__(self) -> None:
        self.running = 0
        """The exchanges that run now."""
        self.at_once, self.rate = 0, 0.0
        """The most exchanges that may run at once, and that may begin per second; 0: any number."""
        self._left = self._at = 0.0

    def set(self, at_once: int, rate: float) -> None:
        """Sets the limits from now on. Exchanges that run already count too."""
        if rate != self.rate:
            self._left, self._at = max(2 * rate, 1.0), -math.inf
        self.at_once, self.rate = at_once, rate

    def wait(self, now: float) -> float:
        """Counts one exchange against the rate if it may begin now, and returns 0. If not, returns the seconds to wait.
        `now` is on Trio's clock."""
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
    """A user of shared slots, memory and queues. Parties are compared by identity: two connections are two parties, and all
    connections of one key, or of one certificate's subject, are one."""

    __slots__ = ("__weakref__", "account", "name", "quota", "share")

    def __init__(self, name: str, *, share: int | None = None) -> None:
        self.name = name
        """The name for logs and errors: of the key, the certificate's subject, or the peer's address."""
        self.share = share
        """The percentage of each model's slots and queue that it may hold; None: by the model's settings."""
        self.quota: Quota | None = None
        """The limits of its key; None if it has no key."""
        self.account: MemoryAccount | None = None
        """Its account with the byte budget; None until it is first asked for (`Server.account_of`)."""


@final
class Parties:
    """The parties of keys, certificates and peers. Each is kept while something refers to it."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[str, str], Party] = WeakValueDictionary()

    def of_certificate(self, subject: str) -> Party:
        """Returns the party of all clients with a certificate of this subject."""
        return self._of("certificate", subject)

    def of_key(self, name: str) -> Party:
        """Returns the party of all clients with a key of this name."""
        return self._of("key", name)

    def of_peer(self, peer: str) -> Party:
        """Returns the party of all requests with this peer, for ASGI servers, which tell of a connection no more."""
        return self._of("peer", peer)

    def _of(self, kind: str, name: str) -> Party:
        party = self._known.get((kind, name))
        if party is None:
            party = self._known[kind, name] = Party(name)
        return party
