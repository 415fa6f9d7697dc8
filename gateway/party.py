"""Party: whoever asks, as all that is shared is counted: a key, a client's certificate, or else a connection."""

from __future__ import annotations

from typing import final
from weakref import WeakValueDictionary


@final
class Party:
    """One of those who share slots, memory and queues. It is told apart by identity: two connections are two parties,
    and all connections of one key, or of one certificate's subject, are one."""

    __slots__ = ("__weakref__", "name", "share")

    def __init__(self, name: str, *, share: int | None = None) -> None:
        self.name = name
        """For logs and errors: the name of the key, the certificate's subject, or the peer's address."""
        self.share = share
        """Percent of the slots and of the queue of each model that it may hold; None: as the model's settings say."""


@final
class Parties:
    """The parties that have a name which outlives a connection, for as long as somebody knows them."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[str, str], Party] = WeakValueDictionary()

    def of_certificate(self, subject: str) -> Party:
        """That of all who show a certificate of this subject."""
        return self._of("certificate", subject)

    def of_peer(self, peer: str) -> Party:
        """That of all requests of a connection which another server holds, and of which it says no more than its peer."""
        return self._of("peer", peer)

    def _of(self, kind: str, name: str) -> Party:
        party = self._known.get((kind, name))
        if party is None:
            party = self._known[kind, name] = Party(name)
        return party
