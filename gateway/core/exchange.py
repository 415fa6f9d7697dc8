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
from protocols.events import Request

if TYPE_CHECKING:
    from gateway.core.contracts import Owner, Wire
    from gateway.keys import Key
    from gateway.party import Party

_FOREVER = float("inf")
_LEVELS, _DEFAULT_LEVEL = 16, 8  # levels of priority, as in `gateway.workers.slots`


def allowed_priority(permit: Key | None, priority: int) -> int:
    """The level at which somebody waits for a slot who asks for this one, 0 for none: no better one than the key has."""
    if permit is not None and (priority if 0 < priority <= _LEVELS else _DEFAULT_LEVEL) < permit.priority:
        return permit.priority
    return priority


@final
class Exchange:
    """A request, its body as it arrives, and the answer as it leaves.

    Inbound: `body` where all of it came with the head, else `inbound`.
    Outbound: `outbound`, which names the ending that its last byte stands for. The ending is decided when that byte is with
    the kernel, or earlier by whatever cuts the exchange off. The first decision stays.

    A cancel scope surrounds the work, from `begin` to `leave_scope`. It is cancelled when the client is gone (`gone`:
    nothing can be said to it any more) and when the exchange is interrupted (deadline, drain, a lost worker: an ending
    must still be said).
    """

    __slots__ = (
        "_cancelled_at", "_key", "_made", "_objects", "_returned", "_scope", "account", "arrived_at", "awaited", "began_at",
        "body", "bytes_in", "cancelled", "copied", "deadline", "dialect", "ending", "fail", "fields", "gone", "had_slot",
        "id", "inbound", "incident", "instance", "interruption", "left_at", "model", "outbound", "own_status", "owner",
        "parts_in", "permit", "priority", "queued_until", "reply", "request", "reserved", "started_at", "stopped_by",
        "stream", "time_limits", "waits", "wire", "words",
    )  # fmt: skip

    began_at: float
    """When its work began, on Trio's clock, like all of these; not set before."""
    left_at: float
    """When its task was done with it; not set before."""
    waits: Waits | None
    """The times that it has waited; None where it never has."""
    instance: int
    """The number of the process of its model that was called last; not set where none was."""
    stopped_by: str
    """`gateway` where it has stopped the model before that had returned, as the text had all that was asked for; not set
    otherwise."""
    parts_in: int
    """Messages that were taken out of its body, where its dialect counts them; not set otherwise."""
    had_slot: bool
    """True once it has, or had, a slot of its model; not set before."""
    queued_until: float
    """When its wait for a slot was over; not set where it has not waited for one."""
    own_status: int
    """That of its answer, where its dialect has one beside HTTP's; not set otherwise."""
    awaited: Callable[[], str]
    """Says for whom its model waits, for an error that its time is over; not set where the model has not said."""

    def __init__(self, owner: Owner, wire: Wire, request: Request, id: str, now: float) -> None:
        self.owner = owner
        self.account = account = owner.budget
        """The account of its party, which pays for the bytes that it holds."""
        self.wire = wire
        head, body = request.head, request.body
        self.request = head
        """The head of its request; another one once the body was inflated."""
        self.fields = head.fields
        """The first field of each (lower-case) name."""
        self.id = id
        self.stream = stream = request.stream
        self.outbound = Outbound(self, owner, wire, stream, now)
        self.inbound = Inbound(self, wire) if body is None else None
        """Its body as it arrives; None where it came whole with the head and nobody has asked for it piece by piece, and
        once the exchange is over."""
        self.body = body
        """All of its body, until somebody takes it; None where it did not come with the head."""
        self._key: Party | None = None
        self.permit: Key | None = None
        """The permissions of that key; None where there is no key, and the client may call everything."""
        self._scope: trio.CancelScope | None = None
        self.cancelled = False
        self.ending: Ending | None = None
        self.interruption: GatewayError | None = None
        self.deadline = _FOREVER
        """The moment, on Trio's clock, at which it is over by `time_limits`; infinite where there is none."""
        self.time_limits: TimeLimits | None = None
        self.words: Callable[[Exchange, GatewayError], None] | None = None
        """How its dialect says an error before the head; it commits and finishes the exchange."""
        self.fail: Callable[[GatewayError], None] | None = None
        """How its dialect says an error of the work under way; if set, it is used in place of `words`."""
        self.model = self.dialect = self.incident = ""
        self.reply: dict[str, str] | None = None
        """Header fields that the model wants in the head of its answer, by lower-case name."""
        self.bytes_in = 0
        self.priority = 0
        """The level at which it waits for a slot, where the request names one (`gateway.workers.slots`); default 0: none
        named."""
        self.copied = 0
        """Bytes of the body that were copied or inflated, each time they were, on their way into the one buffer that
        `receive_body` or `whole_body` has given; what lands there costs nothing."""
        self.started_at = self.arrived_at = now
        self.waits = None
        self.gone = self._returned = False
        self.reserved = 0
        """The whole body, paid from the budget."""
        self._made = 0  # the part of `_objects` for objects made of its own JSON, or to be made for its answer
        self._objects = 0  # objects made of its bytes one by one, likewise
        if body:
            self.bytes_in = n = len(body)
            if account.try_reserve(n + PIECE):
                self.reserved = n + PIECE
            else:
                self.body = b""
                self.interrupt(no_bytes(account, n + PIECE))

    @property
    def party(self) -> Party:
        """The party that it is counted for: that of its key, else that of its connection."""
        return self._key or self.owner.party

    @property
    def key(self) -> Party | None:
        """That of the key which its request has shown; None where it has shown none. To be said before its work begins: what
        it holds by then is counted for the key from then on."""
        return self._key

    @key.setter
    def key(self, key: Party | None) -> None:
        self._key, before = key, self.account
        if isinstance(before, MemoryAccount) and (after := before.of(self.party)) is not before:
            self.account = after
            before.hand_over(self.held + self.wire.charge(self.stream, after), after)

    # -- the request ---------------------------------------------------------------------------------------------

    @property
    def path(self) -> bytes:
        """The path of the target, as it was sent. Computed at each use: only a new route needs it."""
        return self.request.target.partition(b"?")[0]

    @property
    def query(self) -> bytes:
        """The part of the target behind its first question mark."""
        return self.request.target.partition(b"?")[2]

    def header(self, name: bytes) -> bytes | None:
        """The first field of that (lower-case) name."""
        return self.fields.get(name)

    def may_ask(self, model: str) -> bool:
        """True if its key reaches a model of this name, or it has no key."""
        permit = self.permit
        return permit is None or permit.reaches(model)

    def ask_priority(self, priority: int) -> None:
        """The level at which it waits for a slot, 0 where it does not say: no better one than its key may ask for."""
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
        """The step of the client that its own task waits for: `end` if all is said, and the client has yet to take the last
        of it; `room` if the client does not read; `input` if it does not send; empty if it is none of these."""
        if self.outbound.finishing is not None:
            return "end"
        if self.outbound.waits:
            return "room"
        return "input" if self.inbound is not None and self.inbound.waits else ""

    # -- the body, where it came with the head -----------------------------------------------------------------------

    @property
    def input_ended(self) -> bool:
        """True if the body has arrived to its end."""
        inbound = self.inbound
        return inbound is None or inbound.input_ended

    def open_inbound(self) -> Inbound:
        """Its body as it arrives; for those, too, to whom it does not matter that it is here already."""
        inbound = self.inbound
        if inbound is None:
            body, self.body = self.body or b"", None
            inbound = self.inbound = Inbound(self, self.wire, body, self.reserved if body else 0)
            if body:
                self.reserved = 0
        return inbound

    # -- its ending --------------------------------------------------------------------------------------------------

    def answer_written(self) -> None:
        """The last byte of our ending is with the kernel."""
        self._settle(self.outbound.finishing or Ending.COMPLETE)

    def peer_gone(self, ending: Ending) -> None:
        """The client is gone, or the connection: nothing more can be said. Cancels the model at once."""
        self.gone, self.outbound.open = True, False
        self.outbound.drop_pieces()
        self._settle(ending)
        self._cancel()

    def interrupt(self, error: GatewayError) -> None:
        """Stops the work; the error becomes the exchange's honest ending. The first interruption stays."""
        if self.interruption is None and self.outbound.finishing is None and self.ending is None:
            self.interruption = error
            self._cancel()

    def _cancel(self) -> None:
        if not self.cancelled:
            self.cancelled, self._cancelled_at = True, self.owner.clock()
        if self._scope is not None:
            self.outbound.turn.spend()
            self._scope.cancel()

    def switch(self, wire: Wire) -> None:
        """The connection has accepted its upgrade: another wire carries it from now on."""
        self.wire = self.outbound.wire = self.open_inbound().wire = wire

    @property
    def turn(self) -> Turn:
        """The turn of the task that its work is in."""
        return self.outbound.turn

    # -- the scope around its work ---------------------------------------------------------------------------------

    def begin(self, scope: trio.CancelScope, turn: Turn) -> None:
        """Its work begins, inside this scope, which nobody else cancels, and by the turns of this task."""
        outbound = self.outbound
        self._scope, outbound.turn = scope, turn
        self.began_at = now = self.owner.clock()
        turn.start(outbound, now)
        if self.deadline < _FOREVER:
            scope.deadline = self.deadline
        if self.cancelled:
            turn.spend()
            scope.cancel()

    @property
    def cancelled_at(self) -> float | None:
        """When the work was told to stop, or its time was over, on Trio's clock; None: neither was so."""
        if self.cancelled:
            return self._cancelled_at
        return self.deadline if self.deadline <= self.owner.clock() else None

    def leave_scope(self) -> bool:
        """Its work is over: the scope is somebody else's. True where it was cancelled: the work was told to stop, or its
        time is over."""
        scope, self._scope = self._scope, None
        if scope is None:
            return False
        if self.deadline < _FOREVER:
            over = scope.cancel_called  # which looks at the clock too
            scope.deadline = _FOREVER
            return over
        return self.cancelled

    # -- how long it may last ------------------------------------------------------------------------------------------

    def limit_time(self, seconds: float, setting: str, *, said: float | None = None) -> None:
        """The exchange ends with DeadlineExceeded, which names the setting, that many seconds from now; what was said before
        holds no longer, apart from `limit_call`. `said`: the seconds that the error names, where they began before."""
        limits = self._limits()
        limits.limit_time(seconds, setting, said)
        self._set_deadline(limits.deadline)

    def limit_call(self, seconds: float, name: str) -> None:
        """Sets a deadline that no later limit can extend: the earliest one holds. `name` says whose limit it is."""
        limits = self._limits()
        limits.limit_call(seconds, name)
        self._set_deadline(limits.deadline)

    def limit_silence(self, seconds: float, setting: str) -> None:
        """The exchange ends with DeadlineExceeded, which names the setting, when neither side has moved a byte for that
        many seconds, to within the coarse timer's second."""
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
        """Interrupts a session that is silent for longer than it may be, a whole body that fell silent, and one that stays
        slower than `limits.body_rate`. The coarse timer calls it. Parts of a stream may be as slow as they like."""
        limits, inbound = self.time_limits, self.inbound
        if limits is not None and (said := limits.silent(now - max(self.arrived_at, self.outbound.sent_at))) is not None:
            self.interrupt(self._too_late(said))
        if inbound is not None and (error := inbound.too_slow(now)) is not None:
            self.interrupt(error)

    @property
    def interruption_or_deadline(self) -> GatewayError:
        """The error that its work was cancelled for."""
        return self.interruption or self._too_late(self._limits().over())

    def _too_late(self, message: str) -> DeadlineExceeded:
        awaited: Callable[[], str] | None = getattr(self, "awaited", None)
        return DeadlineExceeded(message if awaited is None else f"{message}: {awaited()}")

    # -- its waits: counted where a task parks, at no cost elsewhere -----------------------------------------------------

    def parks_for(self, what: int) -> None:
        """A task of its own waits from now on for one of `gateway.core.waits`'s things."""
        self.waits = waits = self.waits or Waits()
        waits.begin(what, self.owner.clock())

    def has_waited(self, what: int, now: float | None = None) -> None:
        """A task has what it waited for, or waits no longer. Does nothing once the exchange's own task is done."""
        if self.waits is not None and not self._returned:
            self.waits.over(what, self.owner.clock() if now is None else now)

    def slot_wait_began(self) -> None:
        """A task of its own waits for a slot of its model, until `slot_wait_over`."""
        self.parks_for(SLOT)

    def slot_wait_over(self) -> None:
        self.queued_until = self.owner.clock()
        self.has_waited(SLOT, self.queued_until)

    def silence(self, now: float) -> float:
        """Seconds, since it had its slot, for which no byte has gone either way; 0 where that is not for the client to
        change: it has said all, or yet to take what was said, or its model has something of it to answer."""
        waits, outbound = self.waits_for, self.outbound
        if self.input_ended or waits in ("room", "end") or not self.wire.empty(self.stream):
            return 0.0
        if waits != "input" and self.bytes_in and (outbound.first_at is None or self.arrived_at >= outbound.sent_at):
            return 0.0
        return now - max(self.arrived_at, outbound.sent_at, getattr(self, "queued_until", 0.0))

    # -- its memory ------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Bytes of the budget that this exchange holds."""
        inbound, own = self.inbound, self.reserved + self.outbound.charged + self._objects
        return own if inbound is None else own + inbound.held + inbound.assembly

    @property
    def held_with_wire(self) -> int:
        """And with what its wire holds for it: of HTTP/2 what is unread, of a WebSocket a large frame under way."""
        return self.held + self.wire.reserved(self.stream)

    @property
    def held_in_memory(self) -> tuple[int, int, int]:
        """Bytes of `held` by use: its whole body and objects made of it, a message that is being put together, and one on
        its way that is larger than the queue."""
        assembly = 0 if self.inbound is None else self.inbound.assembly
        return self.reserved + self._objects, assembly, self.outbound.charged

    def reserve(self, n: int) -> None:
        """Pays for n bytes of its body. Overloaded where the budget has no room."""
        if not self.account.try_reserve(n):
            raise no_bytes(self.account, n)
        self.reserved += n

    def unreserve(self, n: int) -> None:
        """Gives so many back."""
        self.account.release(n)
        self.reserved -= n

    def making(self, n: int) -> None:
        """Objects that take n bytes are made of the request's text, or for its answer: they count until its end, or until
        another number is said. Overloaded where the budget has no room."""
        extra = n - self._made
        if extra > 0 and not self.account.try_reserve(extra):
            raise no_bytes(self.account, extra)
        if extra < 0:
            self.account.release(-extra)
        self._objects += extra
        self._made = n

    def reserve_objects(self, n: int) -> Callable[[], None]:
        """Counts n bytes of objects that are made of what this exchange has received, until what this returns is called: a
        thread that is at work with them may outlive the exchange. Overloaded where the budget has no room."""
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

    # -- its errors ----------------------------------------------------------------------------------------------------

    def claim(self, dialect: str, refuse: Callable[[Exchange, GatewayError], None]) -> None:
        """Another dialect has it than its route names: as the body or the model chose, and with its own words for errors."""
        self.dialect, self.words, self.fail = dialect, refuse, None

    def answer_error(self, error: GatewayError) -> None:
        """Says an error as its dialect does, and finishes the exchange: it is its one ending."""
        if self.fail is not None:
            self.fail(error)
        elif self.words is not None:
            self.words(self, error)
        else:
            self.answer_plain_error(error)

    def answer_plain_error(self, error: GatewayError) -> None:
        """The plain answer to an error, for exchanges that no dialect has taken."""
        headers = [(b"content-type", b"application/json"), *error.headers, *error.retry]
        self.outbound.respond(error.status, headers, msgspec.json.encode({"error": error.message}), ending=error.ending)

    # -- the end ---------------------------------------------------------------------------------------------------

    def work_done(self) -> None:
        """The exchange's task is done with it: unread input is credited and dropped, what was held is given back."""
        if self._returned:
            return
        self._returned = True
        self.left_at = self.owner.clock()
        try:
            if self.inbound is not None:
                self.inbound.close()
            elif self.body:  # nobody took it
                self.body = b""
                self.unreserve(self.reserved)
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
            else:  # the rest of its task is not counted
                if self.waits is None:
                    self.waits = Waits()
                self.waits.end(self.owner.clock())

    def _close(self) -> None:
        """It has its ending, and its task is done with it."""
        self.fail = None  # it knows the exchange: a cycle would keep both until the collector comes by
        if self.interruption is not None:
            detached(self.interruption)  # if it was raised in the exchange's own task, its frames know the exchange
        if self._made:
            self.making(0)
        if reserved := self.reserved:
            # the body's memory counts until the answer, which may be views of it, is written
            self.reserved = 0
            self.account.release(reserved)
        self.owner.exchange_closed(self)
        # its directions know this one: a cycle would keep all three until the collector comes by
        self.inbound, self.outbound.open = None, False
        del self.outbound.exchange
