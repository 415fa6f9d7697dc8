"""Sums of one look at connections and live exchanges: their numbers, waits and held memory."""

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
"""The part of an exchange's time in which each wait is counted."""


LOOKED_AT_ONCE = 256
"""The most connections, or exchanges, that are looked at before other tasks run."""


@final
class PeerWaits:
    """The live streams of one address."""

    __slots__ = ("input", "room", "slots", "streams")

    def __init__(self) -> None:
        self.streams = 0
        """The streams that have waited for the client."""
        self.input = self.room = 0.0
        """The seconds for which they have waited for the client to send, and to read."""
        self.slots = 0
        """The slots held now by streams that wait for the client to read."""


@final
class LiveLook:
    """Sums of the connections and exchanges that it has seen."""

    def __init__(self) -> None:
        self.live = Counter[str]()
        """Live exchanges, by wire."""
        self.waiting = Counter[tuple[str, str]]()
        """Exchanges that wait, by wire and part."""
        self.connections = Counter[str]()
        """Open connections, by wire."""
        self.held = Counter[str](received=0, bodies=0, assembling=0, large=0, send=0)
        """Held bytes, by place."""
        self.blocked = Counter[str]()
        """Exchanges whose model waits for the client to read, by model. Each holds a slot."""
        self.peers: dict[str, PeerWaits] = {}
        """Clients that streams have waited for, by address without a port."""

    def see_wire(self, wire: ConnectionWire | ASGICall) -> None:
        """Adds one connection."""
        self.connections[wire.name] += 1
        received, send = wire.held()
        held = self.held
        held["received"] += received
        held["send"] += send

    def see(self, exchange: Exchange) -> None:
        """Adds one live exchange."""
        wire, waits = exchange.wire.name, exchange.waits
        self.live[wire] += 1
        if waits is not None and (what := waits.what):
            self.waiting[wire, WAITING[what]] += 1
            if what == ROOM and exchange.model:
                self.blocked[exchange.model] += 1
        inbound, large = exchange.inbound, exchange.outbound.charged
        arrived, assembling = (0, 0) if inbound is None else (inbound.held, inbound.assembly)
        bodies = exchange.held - arrived - assembling - large
        held = self.held
        held["bodies"] += bodies
        held["assembling"] += assembling
        held["large"] += large

    def see_peer(self, exchange: Exchange) -> None:
        """Adds one live exchange to the waits of its client. `see` does not."""
        waits = exchange.waits
        if waits is None:
            return
        _, input, room = waits.so_far(exchange.owner.clock())
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
