"""Parts of an exchange's time, once it is over or so far: each moment is in exactly one part, and they add up."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import msgspec

from gateway.errors import Ending

if TYPE_CHECKING:
    from gateway.core.exchange import Exchange


PARTS = ("begin", "slot", "input", "room", "flush", "model")
"""Parts of an Account: together they are its wall time."""

_NONE = (0.0, 0.0, 0.0)
_UNSAID = (Ending.CANCELLED, Ending.LOST)


@final
class Account(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange in figures, once it is over or so far. Times are seconds; `begin`, `slot`, `input`, `room`, `model` and
    `flush` are together `wall`."""

    wall: float
    """From the receipt of its head to its ending."""
    begin: float
    """From its head to the begin of its work: behind the requests before it on its connection, or for its turn on the event
    loop."""
    slot: float
    """In the model's queue, for a slot."""
    input: float
    """For the client to send, with nothing left to write that it does not take."""
    room: float
    """For the client to read: what it has not taken fills its queue."""
    model: float
    """All that is in no other part: the model, what reads its input and writes its output, and the event loop's delay."""
    flush: float
    """From the end of its work until the last byte of its answer was with the kernel."""
    first: float | None
    """From its head until the first item had left; None where none has."""
    items_in: int
    """Messages of the client's that were taken: frames of a WebSocket, parts of an event stream, else the body as one."""
    items_out: int
    """Messages of the model's that had room in the answer: tokens, parts, responses; 1 for a whole answer of one message."""
    bytes_in: int
    bytes_out: int
    stopped_by: str = ""
    """`gateway` where it has stopped the model, as a text had its number of tokens or a stop sequence; empty where the
    model has returned by itself, or its client left."""

    @property
    def gap(self) -> float | None:
        """The mean time between two items: from when the first had left to the ending, over the items but one. None where
        there were not two."""
        return None if self.first is None or self.items_out < 2 else (self.wall - self.first) / (self.items_out - 1)


def account_so_far(exchange: Exchange, now: float) -> Account:
    """The account of a live exchange, as it would be if it were over now. Nothing of the exchange changes."""
    waits, outbound = exchange.waits, exchange.outbound
    ended = now if waits is None or waits.ended_at is None else waits.ended_at
    left = min(getattr(exchange, "left_at", ended), ended)
    seconds = _NONE if waits is None else waits.so_far(left)
    return _account(exchange, ended, left, seconds, outbound.items_out, outbound.first_at, "")


def account_of(exchange: Exchange) -> Account:
    """The account of an exchange that has its ending and whose task is done with it."""
    ending, waits, outbound = exchange.ending, exchange.waits, exchange.outbound
    ended = left = None if waits is None else waits.ended_at
    if ended is None or left is None:
        ended, left = exchange.owner.clock(), exchange.left_at
        if waits is not None:
            waits.stop(left)
    items_out, first_at = outbound.items_out, outbound.first_at
    if not items_out and outbound.bytes_out and ending is Ending.COMPLETE and outbound.status < 400:
        items_out = 1
    if first_at is None and outbound.bytes_out and ending not in _UNSAID:
        first_at = ended  # it left whole
    seconds = _NONE if waits is None else (waits.slot, waits.input, waits.room)
    return _account(exchange, ended, left, seconds, items_out, first_at, getattr(exchange, "stopped_by", ""))


def _account(
    exchange: Exchange,
    ended: float,
    left: float,
    seconds: tuple[float, float, float],
    items_out: int,
    first_at: float | None,
    stopped_by: str,
) -> Account:
    began, bytes_in = exchange.started_at, exchange.bytes_in
    # If the server ended the exchange or the client left before its turn came, there was nothing but its begin.
    begin = min(getattr(exchange, "began_at", left), left) - began
    slot, input, room = seconds
    wall, flush = ended - began, ended - left
    if exchange.wire.name == "websocket":
        items_in = 0 if exchange.inbound is None else exchange.inbound.received
    else:
        items_in = getattr(exchange, "parts_in", 1 if bytes_in else 0)
    return Account(
        wall=wall,
        begin=begin,
        slot=slot,
        input=input,
        room=room,
        model=max(wall - begin - slot - input - room - flush, 0.0),
        flush=flush,
        first=None if first_at is None or not items_out else min(first_at, ended) - began,
        items_in=items_in,
        items_out=items_out,
        bytes_in=bytes_in,
        bytes_out=exchange.outbound.bytes_out,
        stopped_by=stopped_by,
    )
