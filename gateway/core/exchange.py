"""One request and its answer, whatever the wire: bytes with credit, reserve then commit, and exactly one ending."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, final

import msgspec
import trio

from gateway.core.inbound import PIECE, Inbound
from gateway.core.memory import no_bytes
from gateway.core.outbound import Outbound
from gateway.core.time_limits import TimeLimits
from gateway.core.turn import Turn
from gateway.core.waits import SLOT, Waits
from gateway.errors import (
    DeadlineExceeded,
    Ending,
    GatewayError,
)
from gateway.party import MemoryAccount
from models.blocking import detached
from protocols.events import Head, Request

if TYPE_CHECKING:
    from gateway.core.contracts import Owner, Wire
    from gateway.keys import Key
    from gateway.party import Party
    from protocols.buffers import Budget

_FOREVER = float("inf")
_LEVELS, _DEFAULT_LEVEL = 16, 8  # priority levels, as in `gateway.workers.slots`


def allowed_priority(permit: Key | None, priority: int) -> int:
    """Returns the level at which a request waits for a slot if it asks for `priority` (0: for none): at best the key's."""
    if permit is not None and (priority if 0 < priority <= _LEVELS else _DEFAULT_LEVEL) < permit.priority:
        return permit.priority
    return priority


@final
class Exchange:
    """A request, its body as it arrives, and the answer as it leaves.

    Inbound: `body` if all of it came with the head, else `inbound`.
    Outbound: `outbound`, which names the ending that its last byte stands for. The ending is decided when the kernel has
    that byte, or earlier by the event that cuts the exchange off. The first decision stays.

    A cancel scope surrounds the work, from `begin` to `leave_scope`. It is cancelled when the client is gone (`gone`:
    nothing more can be sent) and when the exchange is interrupted (deadline, drain, a lost worker: an ending must still be
    sent).
    """

    __slots__ = (
        "_cancelled_at", "_made", "_objects", "_returned", "_scope", "account", "arrived_at", "awaited", "began_at",
        "body", "bytes_in", "cancelled", "copied", "deadline", "dialect", "ending", "fail", "fields", "gone", "had_slot",
        "id", "inbound", "incident", "instance", "interruption", "key", "left_at", "model", "outbound", "own_status",
        "owner", "parts_in", "permit", "priority", "probe", "queued_until", "reply", "request", "reserved", "started_at",
        "stopped_by", "stream", "time_limits", "waits", "wire", "words",
    )  # fmt: skip

    account: Budget
    """The budget that pays for what it holds: its party's."""
    request: Head
    """The head of the request; another one once the body was inflated."""
    fields: dict[bytes, bytes]
    """The first field of each (lower-case) name."""
    inbound: Inbound | None
    """Its body as it arrives. None once the exchange is over, and if the body came whole with the head, until
    `open_inbound`."""
    body: bytes | None
    """All of its body, until it is taken; None if it did not come with the head."""
    key: Party | None
    """The party of its request's key, set by `count_for`; None if the request has no key."""
    permit: Key | None
    """The rights of its key; None if it has no key: then nothing is forbidden."""
    deadline: float
    """The deadline by `time_limits`, on Trio's clock; infinite if there is none."""
    words: Callable[[Exchange, GatewayError], None] | None
    """Answers an error in its dialect's format: commits and finishes the exchange."""
    fail: Callable[[GatewayError], None] | None
    """Does the same, for a dialect that needs more than the exchange for it; takes precedence."""
    reply: dict[str, str] | None
    """Header fields that the model wants in the head of its answer, by lower-case name."""
    priority: int
    """The priority level at which it waits for a slot (`gateway.workers.slots`); 0: the request asks for none."""
    copied: int
    """Bytes that were copied or inflated on their way into the buffer that `receive_body` or `whole_body` returned."""
    reserved: int
    """Bytes of the budget that pay for the whole body."""
    began_at: float
    """When its work began, on Trio's clock, like all times here; not set before."""
    left_at: float
    """When its task was done with it; not set before."""
    waits: Waits | None
    """The waits of its tasks; None if none has waited."""
    instance: int
    """The number of the model's process that was called last; not set if none was."""
    stopped_by: str
    """`gateway` if the gateway stopped the model before it returned, because the text was complete; not set otherwise."""
    parts_in: int
    """Messages that were taken out of its body, if its dialect counts them; not set otherwise."""
    had_slot: bool
    """True once it has, or had, a slot of its model; not set before."""
    queued_until: float
    """When its wait for a slot was over; not set if it has not waited for one."""
    own_status: int
    """The status of its answer, if its dialect has one beside HTTP's; not set otherwise."""
    awaited: Callable[[], str]
    """Returns what its model waits for, for the error that its time is over; not set if the model has not told."""

    def __init__(self, owner: Owner, wire: Wire, request: Request, id: str, now: float) -> None:
        self.owner = owner
        self.account = owner.budget
        self.wire = wire
        head, body = request.head, request.body
        self.request = head
        self.fields = head.fields
        self.id = id
        self.stream = stream = request.stream
        self.outbound = Outbound(self, owner, wire, stream, now)
        self.inbound = Inbound(self, wire) if body is None else None
        self.body = body
        self.key = self.permit = self.words = self.fail = self.reply = self.waits = None
        self._scope: trio.CancelScope | None = None
        self.ending: Ending | None = None
        self.interruption: GatewayError | None = None
        self.deadline = _FOREVER
        self.time_limits: TimeLimits | None = None
        self.model = self.dialect = self.incident = ""
        self.bytes_in = self.priority = self.copied = self.reserved = 0
        self.started_at = self.arrived_at = now
        self.gone = self.cancelled = self._returned = self.probe = False  # `probe`: its row is one of health
        self._objects = self._made = 0  # bytes for objects of its body or answer; the part that `making` counts
        if body:
            self.bytes_in = len(body)

    @property
    def party(self) -> Party:
        """The party that it counts for: its key's, or else its connection's."""
        return self.key or self.owner.party

    def count_for(self, key: Party) -> None:
        """Makes the exchange count for the party of its request's key. To be called before the work begins: what the
        exchange holds by then counts for the key too."""
        self.key, before = key, self.account
        if isinstance(before, MemoryAccount) and (after := before.of(self.party)) is not before:
            self.account = after
            before.hand_over(self.held + self.wire.charge(self.stream, after), after)

    # -- the request ---------------------------------------------------------------------------------------------

    @property
    def path(self) -> bytes:
        """The target's path, as it was sent. It is computed at each call: only new routes need it."""
        return self.request.target.partition(b"?")[0]

    @property
    def query(self) -> bytes:
        """The target's query, behind the first question mark."""
        return self.request.target.partition(b"?")[2]

    def header(self, name: bytes) -> bytes | None:
        """The first field of that (lower-case) name."""
        return self.fields.get(name)

    def may_ask(self, model: str) -> bool:
        """True if it has no key, or its key reaches a model of this name."""
        return self.permit is None or self.permit.reaches(model)

    def ask_priority(self, priority: int) -> None:
        """Sets the level at which it waits for a slot (0: it asks for none), at best what its key allows."""
        self.priority = allowed_priority(self.permit, priority)

    def header_values(self, name: bytes) -> list[bytes]:
        """All fields of that (lower-case) name."""
        first = self.header(name)
        if first is None:
            return []
        if len(self.fields) == len(self.request.headers):
            return [first]
        return [value for key, value in self.request.headers if key == name]

    @property
    def waits_for(self) -> str:
        """The wait of its own task on the wire. `end`: the answer is complete, and the client has yet to take the last of
        it. `room`: the client does not read. `input`: the client does not send. Empty: none of these."""
        if self.outbound.finishing is not None:
            return "end"
        if self.outbound.waits:
            return "room"
        return "input" if self.inbound is not None and self.inbound.waits else ""

    # -- the body, if it came with the head --------------------------------------------------------------------------

    @property
    def input_ended(self) -> bool:
        """True if all of the body has arrived."""
        inbound = self.inbound
        return inbound is None or inbound.input_ended

    def open_inbound(self) -> Inbound:
        """Returns its body to be received piece by piece, also if all of it came with the head."""
        inbound = self.inbound
        if inbound is None:
            self.pay()
            body, self.body = self.body or b"", None
            inbound = self.inbound = Inbound(self, self.wire, body, self.reserved if body else 0)
            if body:
                self.reserved = 0
        return inbound

    def pay(self) -> None:
        """Pays for the body that came with the head, because it is kept: its work waits, or its answer does. Most are
        answered at once, and never paid. Interrupts the exchange if the budget has no room."""
        if self.bytes_in and not self.reserved and self.inbound is None:
            if self.account.try_reserve(n := self.bytes_in + PIECE):
                self.reserved = n
            else:
                self.body = self.body and b""
                self.interrupt(no_bytes(self.account, n))

    # -- causes of its ending ----------------------------------------------------------------------------------------

    def answer_written(self) -> None:
        """The kernel has the last byte of the answer: decides the ending that this byte stands for."""
        self._settle(self.outbound.finishing or Ending.COMPLETE)

    def peer_gone(self, ending: Ending) -> None:
        """Ends the exchange because the client or the connection is gone. Cancels the model at once."""
        self.gone, self.outbound.open = True, False
        self.outbound.drop_pieces()
        self._settle(ending)
        self._cancel()

    def interrupt(self, error: GatewayError) -> None:
        """Stops the work; the error becomes the exchange's ending. The first interruption stays."""
        if self.interruption is None and self.outbound.finishing is None and self.ending is None:
            self.interruption = error
            self._cancel()

    def _cancel(self) -> None:
        if not self.cancelled:
            self.cancelled, self._cancelled_at = True, self.owner.clock()
        if self._scope is not None:
            self.outbound.turn.spend()
            self._scope.cancel()
        elif self.inbound is not None:
            self.inbound.wake_reader(self._cancelled_at)  # if it rests

    def switch(self, wire: Wire) -> None:
        """Makes another wire carry the exchange: its connection has accepted the upgrade."""
        self.wire = self.outbound.wire = self.open_inbound().wire = wire

    @property
    def turn(self) -> Turn:
        """The turn of the task that does its work."""
        return self.outbound.turn

    # -- the scope around its work ---------------------------------------------------------------------------------

    def begin(self, scope: trio.CancelScope, turn: Turn, now: float) -> None:
        """Begins its work, inside this scope, which only the exchange cancels, and with the turn of this task."""
        self._scope, self.began_at = scope, now
        self.outbound.turn = turn
        turn.start(self.outbound, now)
        if self.deadline < _FOREVER:
            scope.deadline = self.deadline
        if self.cancelled:
            turn.spend()
            scope.cancel()

    @property
    def cancelled_at(self) -> float | None:
        """When the work was told to stop, or its deadline passed, on Trio's clock; None if neither has happened."""
        if self.cancelled:
            return self._cancelled_at
        return self.deadline if self.deadline <= self.owner.clock() else None

    def leave_scope(self) -> bool:
        """Gives the scope back to its task. True if it was cancelled: the work was told to stop, or its deadline is over."""
        scope, self._scope = self._scope, None
        if scope is None:
            return False
        if self.deadline < _FOREVER:
            over = scope.cancel_called  # which also compares the deadline with the clock
            scope.deadline = _FOREVER
            return over
        return self.cancelled

    # -- how long it may last ------------------------------------------------------------------------------------------

    def limit_time(self, seconds: float, setting: str, *, said: float | None = None) -> None:
        """Ends the exchange with DeadlineExceeded, which names the setting, `seconds` from now. It replaces earlier limits,
        except that of `limit_call`. `said`: the seconds that the error names, if they began earlier."""
        limits = self._limits()
        limits.limit_time(seconds, setting, said)
        self._set_deadline(limits.deadline)

    def limit_call(self, seconds: float, name: str) -> None:
        """Sets a deadline that later calls of `limit_time` cannot extend: the earliest one holds. The error gives `name` as
        the limit."""
        limits = self._limits()
        limits.limit_call(seconds, name)
        self._set_deadline(limits.deadline)

    def limit_silence(self, seconds: float, setting: str) -> None:
        """Ends the exchange with DeadlineExceeded, which names the setting, when neither side has moved a byte for
        `seconds`, to within the coarse timer's second."""
        self._limits().silence = seconds, setting

    def _limits(self) -> TimeLimits:
        limits = self.time_limits
        if limits is None:
            limits = self.time_limits = TimeLimits()
        return limits

    def _set_deadline(self, until: float) -> None:
        self.deadline = until
        if self._scope is not None:
            self._scope.deadline = until

    def check_stamps(self, now: float) -> None:
        """Interrupts a session that is silent for too long, and a whole body, or a message that has begun, that is silent or
        slower than `limits.body_rate`. Between messages a stream may be as slow as it likes. Called by the coarse timer."""
        limits, inbound = self.time_limits, self.inbound
        if limits is not None and (said := limits.silent(now - max(self.arrived_at, self.outbound.sent_at))) is not None:
            self.interrupt(self._too_late(said))
        if inbound is not None and (error := inbound.too_slow(now)) is not None:
            self.interrupt(error)

    @property
    def interruption_or_deadline(self) -> GatewayError:
        """The error for which its work was cancelled."""
        return self.interruption or self._too_late(self._limits().over())

    def _too_late(self, message: str) -> DeadlineExceeded:
        awaited: Callable[[], str] | None = getattr(self, "awaited", None)
        return DeadlineExceeded(message if awaited is None else f"{message}: {awaited()}")

    # -- waiting times: only a task that parks pays for their measurement ---------------------------------------------------

    def parks_for(self, what: int) -> None:
        """A task of the exchange waits from now on: for `SLOT`, `INPUT` or `ROOM` of `gateway.core.waits`."""
        waits = self.waits
        if waits is None:
            self.waits = waits = Waits()
        waits.begin(what, self.owner.clock())

    def has_waited(self, what: int, now: float | None = None) -> None:
        """The task got it, or no longer waits. After the exchange's own task is done, waits are no longer counted."""
        if self.waits is not None and not self._returned:
            self.waits.over(what, self.owner.clock() if now is None else now)

    def slot_wait_began(self) -> None:
        """A task of the exchange waits for a slot of its model, until `slot_wait_over`."""
        self.parks_for(SLOT)

    def slot_wait_over(self) -> None:
        self.queued_until = self.owner.clock()
        self.has_waited(SLOT, self.queued_until)

    def silence(self, now: float) -> float:
        """Seconds, since it got its slot, without a byte either way. 0 if the client cannot change that: it has sent all, or
        has yet to take queued bytes, or its model has input to answer."""
        waits, outbound = self.waits_for, self.outbound
        if self.input_ended or waits in ("room", "end") or not self.wire.empty(self.stream):
            return 0.0
        if waits != "input" and self.bytes_in and (outbound.first_at is None or self.arrived_at >= outbound.sent_at):
            return 0.0
        return now - max(self.arrived_at, outbound.sent_at, getattr(self, "queued_until", 0.0))

    # -- memory ----------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes of the budget that this exchange holds."""
        inbound, own = self.inbound, self.reserved + self.outbound.charged + self._objects
        return own if inbound is None else own + inbound.held + inbound.assembly

    @property
    def held_with_wire(self) -> int:
        """`held`, and what its wire holds for it: unread bytes of HTTP/2, or the large frame under way of a WebSocket."""
        return self.held + self.wire.reserved(self.stream)

    def reserve(self, n: int) -> None:
        """Pays for n bytes of its body. Raises Overloaded if the budget has no room."""
        if not self.account.try_reserve(n):
            raise no_bytes(self.account, n)
        self.reserved += n

    def unreserve(self, n: int) -> None:
        """Gives back n bytes that `reserve` took."""
        self.account.release(n)
        self.reserved -= n

    def making(self, n: int) -> None:
        """Pays for objects of n bytes that are made of the request's text, or for its answer. They count until the
        exchange's end, or until the next call. Raises Overloaded if the budget has no room."""
        extra = n - self._made
        if extra > 0 and not self.account.try_reserve(extra):
            raise no_bytes(self.account, extra)
        if extra < 0:
            self.account.release(-extra)
        self._objects += extra
        self._made = n

    def reserve_objects(self, n: int) -> Callable[[], None]:
        """Pays for n bytes of objects that are made of received bytes. Returns the function that gives them back: a thread
        that works with them may outlive the exchange. Raises Overloaded if the budget has no room."""
        budget, left = self.account, n
        if not budget.try_reserve(n):
            raise no_bytes(budget, n)
        self._objects += n

        def give_back() -> None:
            nonlocal left
            budget.release(left)
            self._objects -= left
            left = 0

        return give_back

    # -- errors --------------------------------------------------------------------------------------------------------

    def claim(self, dialect: str, refuse: Callable[[Exchange, GatewayError], None]) -> None:
        """Gives the exchange to another dialect than its route names, chosen by the body or the model. `refuse` answers
        errors in that dialect's format."""
        self.dialect, self.words, self.fail = dialect, refuse, None

    def answer_error(self, error: GatewayError) -> None:
        """Answers with an error in the dialect's format, and finishes the exchange: this is its one ending."""
        if self.fail is not None:
            self.fail(error)
        elif self.words is not None:
            self.words(self, error)
        else:
            self.answer_plain_error(error)

    def answer_plain_error(self, error: GatewayError) -> None:
        """Answers with an error in the plain format, for exchanges that no dialect has taken."""
        headers = [(b"content-type", b"application/json"), *error.headers, *error.retry]
        self.outbound.respond(error.status, headers, msgspec.json.encode({"error": error.message}), ending=error.ending)

    # -- the end ---------------------------------------------------------------------------------------------------

    def work_done(self) -> None:
        """Called when the exchange's task is done with it: credits and drops unread input, and gives back what was held."""
        if self._returned:
            return
        self._returned = True
        self.left_at = self.owner.clock()
        try:
            if self.inbound is not None:
                self.inbound.close()
            else:
                self.body = None  # if it was not taken
            self.wire.release(self.stream)
        finally:
            if self.ending is not None:
                self._close()

    def _settle(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
            if self.outbound.charged:
                self.outbound.uncharge()
            if self._returned:
                self._close()
            else:  # from now on the waits of its task no longer count
                if self.waits is None:
                    self.waits = Waits()
                self.waits.end(self.owner.clock())

    def _close(self) -> None:
        """Closes the exchange: it has its ending, and its task is done with it."""
        self.fail = None  # it refers to the exchange: a cycle would keep both until the GC runs
        if self.interruption is not None:
            detached(self.interruption)  # if it was raised in the exchange's own task, its frames refer to the exchange
        if self._made:
            self.making(0)
        if reserved := self.reserved:
            # The body's memory counts until the answer is written, which may consist of views of the body.
            self.reserved = 0
            self.account.release(reserved)
        self.owner.exchange_closed(self)
        # Inbound and Outbound refer to this exchange: a cycle would keep all three until the GC runs.
        self.inbound, self.outbound.open = None, False
        del self.outbound.exchange
