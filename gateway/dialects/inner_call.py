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
    """One of several calls of models in one exchange, as a worker sees it. Its messages share its exchange's body and
    answer.

    The call works inside a scope. Until `model_over`, the scope is cancelled when the call is interrupted or its time is
    over: then this call alone ends, and `interruption_or_deadline` says why. If the exchange ends, all its calls end. The
    exchange's account pays for the call's memory until `close`.
    """

    __slots__ = (
        "_cancelled_at", "_give_back_made", "_limits", "_number", "_over", "_paid", "_scope", "bytes_in", "cancelled",
        "copied", "ending", "exchange", "held", "incident", "interruption", "permit", "priority",
        "stopped_by",
    )  # fmt: skip

    stopped_by: str
    """`gateway` if the gateway has stopped the model before the model returned; not set otherwise."""

    def __init__(self, exchange: Exchange, number: int, size: int, scope: trio.CancelScope) -> None:
        """The exchange's `number`th call, with a request of `size` bytes. Earlier calls may have used the scope, if none has
        cancelled it. Overloaded if the budget has no room for the bytes."""
        self.exchange, self._number, self._scope = exchange, number, scope
        self.permit: Key | None = exchange.permit
        self.priority = exchange.priority
        self.bytes_in = self.held = size
        self.copied = 0
        self.incident = ""
        self.ending: Ending | None = None
        """The call's own ending, once it is known."""
        self.interruption: GatewayError | None = None
        self._over = False
        self.cancelled = False
        """True if the scope is cancelled, and must be left: by `interrupt` or, known only after `model_over`, by the time
        limit."""
        self._limits: TimeLimits | None = None
        self._cancelled_at: float | None = None
        self._give_back_made: Callable[[], None] | None = None
        exchange.reserve(size)
        self._paid = size  # for its message, until `close`

    @property
    def id(self) -> str:
        """The call's id: the exchange's, a dot and the call's number."""
        return f"{self.exchange.id}.{self._number}"

    @property
    def had_slot(self) -> bool:
        """True once a call of the exchange has, or had, a slot of its model; not set before. It is kept on the exchange,
        whose line is written then."""
        return self.exchange.had_slot

    @had_slot.setter
    def had_slot(self, had: bool) -> None:
        self.exchange.had_slot = had

    @property
    def instance(self) -> int:
        """The number of the model's process that was called. It is kept on the exchange, which reports it."""
        return self.exchange.instance

    @instance.setter
    def instance(self, number: int) -> None:
        self.exchange.instance = number

    def model_over(self) -> None:
        """Called when the model is done with the call: from now on nothing interrupts the call."""
        self._over = True
        if self._limits is not None:
            self._scope.deadline = math.inf
            self.cancelled = self._scope.cancel_called

    def close(self) -> None:
        """Ends the call and gives back all memory that was paid for it."""
        if self._give_back_made is not None:
            self.making(0)
        if self._paid:
            self.exchange.unreserve(self._paid)
            self._paid = 0

    def making(self, n: int) -> None:
        """Pays for objects of n bytes that are made of the request or for the answer, in place of those that the call before
        paid for. They count until `close`. Overloaded if the budget has no room."""
        if self._give_back_made is not None:
            self._give_back_made()
            self._give_back_made = None
        if n:
            self._give_back_made = self.exchange.reserve_objects(n)

    # -- for the worker ------------------------------------------------------------------------------------------------

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
        """The error for which the call was cancelled."""
        if self.interruption is not None:
            return self.interruption
        if self._limits is not None and self._limits.deadline <= self.exchange.deadline:
            return DeadlineExceeded(self._limits.over())
        return self.exchange.interruption_or_deadline

    def silence(self, now: float) -> float:
        """0: all of the request is here, so the client owes nothing."""
        return 0.0

    def interrupt(self, error: GatewayError) -> None:
        """Cancels the call; the first error decides its ending."""
        if self.interruption is None and not self._over:
            self.interruption, self._cancelled_at = error, trio.current_time()
            self.cancelled = True
            self._scope.cancel()

    def limit_time(self, seconds: float, setting: str, *, said: float | None = None) -> None:
        """Ends the call with DeadlineExceeded, which names the setting, that many seconds from now. This replaces an earlier
        limit. `said`: the seconds that the error names, if they began earlier."""
        if self._limits is None:
            self._limits = TimeLimits()
        self._limits.limit_time(seconds, setting, said)
        self._scope.deadline = self._limits.deadline

    def ask_priority(self, priority: int) -> None:
        """Sets the level at which the call waits for a slot, 0 for none; the call's key limits it."""
        self.priority = allowed_priority(self.permit, priority)

    def reserve_objects(self, n: int) -> Callable[[], None]:
        return self.exchange.reserve_objects(n)

    def slot_wait_began(self) -> None:
        """Does nothing: other calls of the exchange may go on while this one waits for a slot."""

    def slot_wait_over(self) -> None:
        """See `slot_wait_began`."""
