"""InnerCall: one of several calls of models in one exchange, each with its own slot, time and ending."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, final

import trio

from gateway.core.exchange import allowed_priority
from gateway.core.time_limits import TimeLimits
from gateway.errors import DeadlineExceeded, Ending, GatewayError

if TYPE_CHECKING:
    from gateway.core.exchange import Exchange
    from gateway.keys import Key
    from gateway.party import Party


@final
class InnerCall:
    """What a worker knows of such a call, whose messages share the body and the answer of its exchange.

    Its work is inside of a scope, which is cancelled when it is interrupted or its time is over, until `model_over`: then it
    alone ends, and `interruption_or_deadline` says why. The exchange's own end is that of all of them. What it holds is paid
    from the exchange's account, until `close`.
    """

    __slots__ = (
        "_cancelled_at", "_give_back_made", "_limits", "_number", "_over", "_paid", "_scope", "bytes_in", "cancelled",
        "copied", "ending", "exchange", "had_slot", "held", "incident", "interruption", "permit", "priority",
        "stopped_by",
    )  # fmt: skip

    had_slot: bool
    """True once it has, or had, a slot of its model; not set before."""
    stopped_by: str
    """`gateway` where it has stopped the model before that had returned; not set otherwise."""

    def __init__(self, exchange: Exchange, number: int, size: int, scope: trio.CancelScope) -> None:
        """The call's request, which is its `number`th, has so many bytes; the scope may be that of calls before it, if none
        has cancelled it. Overloaded where there is no room for them."""
        self.exchange, self._number, self._scope = exchange, number, scope
        self.permit: Key | None = exchange.permit
        self.priority = exchange.priority
        self.bytes_in = self.held = size
        self.copied = 0
        self.incident = ""
        self.ending: Ending | None = None
        """Its own, once that is decided."""
        self.interruption: GatewayError | None = None
        self._over = False
        self.cancelled = False
        """True where its scope is, by it or, as is known after `model_over`, by its time: then that must be left."""
        self._limits: TimeLimits | None = None
        self._cancelled_at: float | None = None
        self._give_back_made: Callable[[], None] | None = None
        exchange.reserve(size)
        self._paid = size  # for its message, until `close`

    @property
    def id(self) -> str:
        """Its own, which the exchange's begins."""
        return f"{self.exchange.id}.{self._number}"

    @property
    def instance(self) -> int:
        """The number of the process of its model that was called: its exchange's, of which that is told."""
        return self.exchange.instance

    @instance.setter
    def instance(self, number: int) -> None:
        self.exchange.instance = number

    def model_over(self) -> None:
        """Nothing interrupts it any more."""
        self._over = True
        if self._limits is not None:
            self._scope.deadline = math.inf
            self.cancelled = self._scope.cancel_called

    def close(self) -> None:
        """It is over: what was held for it is given back."""
        if self._give_back_made is not None:
            self.making(0)
        if self._paid:
            self.exchange.unreserve(self._paid)
            self._paid = 0

    def making(self, n: int) -> None:
        """Objects that take n bytes are made of its request, or for its answers: they count until `close`, or until another
        number is said. Overloaded where the budget has no room."""
        if self._give_back_made is not None:
            self._give_back_made()
            self._give_back_made = None
        if n:
            self._give_back_made = self.exchange.reserve_objects(n)

    # -- what a worker asks of its callers -----------------------------------------------------------------------------

    @property
    def key(self) -> Party | None:
        return self.exchange.key

    @property
    def party(self) -> Party:
        return self.exchange.party

    @property
    def gone(self) -> bool:
        return self.exchange.gone

    @property
    def deadline(self) -> float:
        return self.exchange.deadline if self._limits is None else min(self._limits.deadline, self.exchange.deadline)

    @property
    def cancelled_at(self) -> float | None:
        if self._cancelled_at is not None:
            return self._cancelled_at
        limits = self._limits
        return limits.deadline if limits and limits.deadline <= trio.current_time() else self.exchange.cancelled_at

    @property
    def interruption_or_deadline(self) -> GatewayError:
        """What its work was cancelled for."""
        if self.interruption is not None:
            return self.interruption
        if self._limits is not None and self._limits.deadline <= self.exchange.deadline:
            return DeadlineExceeded(self._limits.over())
        return self.exchange.interruption_or_deadline

    def silence(self, now: float) -> float:
        """All of its request is here: it is for its model to speak."""
        return 0.0

    def interrupt(self, error: GatewayError) -> None:
        """Stops its work; the first error is its ending."""
        if self.interruption is None and not self._over:
            self.interruption, self._cancelled_at = error, trio.current_time()
            self.cancelled = True
            self._scope.cancel()

    def limit_time(self, seconds: float, setting: str, *, said: float | None = None) -> None:
        """It ends with DeadlineExceeded, which names the setting, that many seconds from now; what was said before holds no
        longer. `said`: the seconds that the error names, where they began before."""
        if self._limits is None:
            self._limits = TimeLimits()
        self._limits.limit_time(seconds, setting, said)
        self._scope.deadline = self._limits.deadline

    def ask_priority(self, priority: int) -> None:
        """The level at which it waits for a slot, 0 where it does not say: no better one than its key may ask for."""
        self.priority = allowed_priority(self.permit, priority)

    def reserve_objects(self, n: int) -> Callable[[], None]:
        return self.exchange.reserve_objects(n)

    def slot_wait_began(self) -> None:
        """Others of its exchange may go on meanwhile: that waits for nothing."""

    def slot_wait_over(self) -> None:
        """See `slot_wait_began`."""
