"""One look at connections and live exchanges: how many there are, what they wait for, what they hold."""

from __future__ import annotations

from collections import Counter
from typing import final

from gateway.addresses import split_port
from gateway.core.connection import ConnectionWire
from gateway.core.exchange import Exchange
from gateway.core.waits import INPUT, ROOM, SLOT
from gateway.telemetry.observer import peer_of
from gateway.wires.asgi import ASGICall

WAITING = {SLOT: "slot", INPUT: "input", ROOM: "room"}
"""The part of the time that each wait is."""


LOOKED_AT_ONCE = 256
"""Connections, or exchanges, that are looked at before others have their turn."""


@final
class PeerWaits:
    """The live streams of one address."""

    __slots__ = ("input", "room", "slots", "streams")

    def __init__(self) -> None:
        self.streams = 0
        """Those that have waited for it."""
        self.input = self.room = 0.0
        """Seconds for which they have waited for it to send, and to read."""
        self.slots = 0
        """Slots that are held now by those that wait for it to read."""


@final
class LiveLook:
    """Sums of what it is shown."""

    def __init__(self) -> None:
        self.live = Counter[str]()
        """Exchanges by wire."""
        self.waiting = Counter[tuple[str, str]]()
        """Those that wait, by wire and part."""
        self.connections = Counter[str]()
        """By wire."""
        self.held = Counter[str](received=0, bodies=0, assembling=0, large=0, send=0)
        """Bytes, by where they are."""
        self.blocked = Counter[str]()
        """Exchanges whose model waits for a client that does not read, by model: each holds a slot."""
        self.peers: dict[str, PeerWaits] = {}
        """Those that were waited for, by address without a port."""

    def see_wire(self, wire: ConnectionWire | ASGICall) -> None:
        """One connection."""
        self.connections[wire.name] += 1
        received, send = wire.held()
        held = self.held
        held["received"] += received
        held["send"] += send

    def see(self, exchange: Exchange) -> None:
        """One live exchange."""
        wire, waits = exchange.wire.name, exchange.waits
        self.live[wire] += 1
        if waits is not None and (what := waits.what):
            self.waiting[wire, WAITING[what]] += 1
            if what == ROOM and exchange.model:
                self.blocked[exchange.model] += 1
        bodies, assembling, large = exchange.held_in_memory
        held = self.held
        held["bodies"] += bodies
        held["assembling"] += assembling
        held["large"] += large

    def see_peer(self, exchange: Exchange) -> None:
        """Adds the client that one live exchange has waited for, beside what `see` sees of it."""
        waits = exchange.waits
        if waits is None:
            return
        seconds = waits.so_far(exchange.owner.clock())
        input, room = seconds[INPUT], seconds[ROOM]
        if not input and not room:
            return
        address, _ = split_port(peer_of(exchange))
        peer = self.peers.get(address)
        if peer is None:
            peer = self.peers[address] = PeerWaits()
        peer.streams += 1
        peer.input += input
        peer.room += room
        if waits.what == ROOM and exchange.model:
            peer.slots += 1
