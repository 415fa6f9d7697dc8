"""Silence: a comment goes into each event stream that has been silent for `sse.silence`, so that no proxy gives it up."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import final

import trio

from gateway.core.contracts import TURN_SECONDS
from gateway.core.time_limits import TimeLimits
from gateway.dialects.answers import EventAnswer, EventStreams
from gateway.errors import GatewayError
from protocols.sse import COMMENT

_PART = 20  # a comment is late by at most so many parts of the silence, half of what is promised
_SHORTEST = 0.005  # seconds between two looks, however short the silence is


@final
class Silence:
    """Looks over all event streams together: a stream has no timer of its own, and its tokens cost nothing more.

    A comment leaves between two events. It sends the head if that is not out yet, so what fails after it is an error in the
    stream. It takes no room from the model, and it waits while bytes of the stream are unsent or the client's window is
    closed. Only bytes count, whatever the model does meanwhile.
    """

    def __init__(self, streams: EventStreams, seconds: float) -> None:
        """`seconds`: the silence after which a stream gets a comment; 0: it gets none."""
        self._since = streams.since
        self._seconds, self._step = seconds, max(seconds / _PART, _SHORTEST)
        self.due = -math.inf if seconds else math.inf
        """When it is to look next, on Trio's clock."""

    async def look(self, sleep_until: Callable[[float], Awaitable[None]]) -> None:
        """Sends the comments that are due. Thousands of streams may be silent at once, so other tasks run after each turn of
        this, while it sleeps."""
        began = trio.current_time()
        due = began + self._seconds  # a stream that begins from now on is due no earlier
        waiting, until = list(self._since), began + TURN_SECONDS
        while waiting:
            stream = waiting.pop()
            if (since := self._since.get(stream)) is not None:
                due = min(due, self._look_at(stream, since))
            del stream  # it may end before the rest are looked at, and must not be kept until then
            if trio.current_time() > until:
                await sleep_until(trio.current_time() + TURN_SECONDS)
                until = trio.current_time() + TURN_SECONDS
        self.due = max(due, began + self._step)

    def _look_at(self, stream: EventAnswer, since: float) -> float:
        """Sends a comment if one is due. Returns when the stream is to be looked at again. `since`: when it got its slot, or
        its last comment."""
        exchange = stream.exchange
        outbound, now = exchange.outbound, exchange.owner.clock()
        due = max(since, outbound.sent_at) + self._seconds
        # An interrupted answer ends with an error, which has an HTTP status of its own if the head is not out.
        if due > now or exchange.cancelled or exchange.deadline <= now or not outbound.at_rest:
            return due
        self._since[stream] = now
        limits = exchange.time_limits
        if limits is None:
            limits = exchange.time_limits = TimeLimits()
        limits.said = outbound.bytes_out, limits.said_at(outbound.bytes_out, outbound.sent_at)
        try:
            if not outbound.status:
                stream.start()
            outbound.comment(COMMENT)
        except GatewayError as e:  # the head that the model wants cannot be sent
            exchange.interrupt(e)
        except Exception as e:
            exchange.owner.failed(e)
        return now + self._seconds
