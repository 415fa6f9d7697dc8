"""One request and its answer, whatever the wire: bytes with credit, reserve then commit, and exactly one ending."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, final

import msgspec
import trio

from gateway.codecs.threads import run_in_codec_thread
from gateway.core.memory import GrowingBody, no_bytes
from gateway.core.outbound import Outbound
from gateway.core.turn import NO_TURN, Turn
from gateway.core.waits import INPUT, SLOT, Waits
from gateway.errors import (
    BadRequest,
    DeadlineExceeded,
    Ending,
    GatewayError,
    SlowUpload,
    TooLarge,
    UnsupportedEncoding,
)
from models.blocking import detached, throw
from protocols.content_coding import Coding, Inflater, parse_content_encoding
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer, Frame, Request

if TYPE_CHECKING:
    from gateway.core.contracts import Owner, Wire

# A body of known length is paid for as it arrives, in steps of this many bytes.
_BODY_STEP = 1024 * 1024
# A body is inflated in steps: a few short ones here, which is all that most bodies need, then long ones in a thread.
_SHORT_STEP, _SHORT_STEPS = 64 * 1024, 4
# What a piece that waits costs beside its bytes, for its objects and its place: without it, empty frames would be free.
_PIECE = 128
_SMALL = 512
_FOREVER = float("inf")
_NOTHING: list[Buffer | Frame] = []  # which nobody changes


@final
class _Gathering:
    """A whole body on its way into one buffer."""

    __slots__ = ("error", "filled", "growing", "landed", "limit", "setting", "sink")

    def __init__(self, limit: int, setting: str, sink: memoryview | None) -> None:
        """`sink` is its buffer where its length is known."""
        self.limit, self.setting, self.sink = limit, setting, sink
        self.growing = bytearray()  # the buffer where it is not
        self.filled = 0
        self.landed = False  # the wire itself receives into the sink
        self.error: GatewayError | None = None

    def take_error(self) -> GatewayError:
        """The error, to be raised, which is forgotten here: its traceback will know the gathering task and the body."""
        error, self.error = self.error, None
        assert error is not None
        return error


@final
class Exchange:
    """A request, its body as it arrives, and the answer as it leaves.

    Inbound: `receive` takes a piece and gives its credit back; a cancelled `receive` has taken nothing.
    Outbound: `outbound`, which names the ending that its last byte stands for. The ending is decided when that byte is with
    the kernel, or earlier by whatever cuts the exchange off. The first decision stays.

    A cancel scope surrounds the work, from `begin` to `leave_scope`. It is cancelled when the client is gone (`gone`:
    nothing can be said to it any more) and when the exchange is interrupted (deadline, drain, a lost worker: an ending
    must still be said).
    """

    __slots__ = (
        "_assembly",
        "_cancelled",
        "_cancelled_at",
        "_ceiling",
        "_consumed",
        "_gathering",
        "_held",
        "_inbox",
        "_made",
        "_objects",
        "_outbox",
        "_reader",
        "_received",
        "_reserved",
        "_returned",
        "_scope",
        "allowed",
        "allowed_by",
        "arrived_at",
        "awaited",
        "began_at",
        "bytes_in",
        "copied",
        "deadline",
        "dialect",
        "ending",
        "fail",
        "fields",
        "gone",
        "id",
        "incident",
        "input_ended",
        "interruption",
        "left_at",
        "model",
        "outbound",
        "owner",
        "parts_in",
        "priority",
        "reply",
        "request",
        "route",
        "silence",
        "started_at",
        "stopped_by",
        "stream",
        "turn",
        "waits",
        "wire",
        "words",
    )  # fmt: skip

    fields: dict[bytes, bytes]
    """The first field of each (lower-case) name."""
    route: tuple[Callable[..., Coroutine[Any, Any, None]], dict[str, Any]] | None
    """Who answers it, and with what arguments."""
    began_at: float
    """When its work began, on Trio's clock, like all of these; not set before."""
    left_at: float
    """When its task was done with it; not set before."""
    waits: Waits | None
    """What it has waited for; None where it has not."""
    stopped_by: str
    """`gateway` where it has stopped the model before that had returned, as the text had all that was asked for; not set
    otherwise."""
    parts_in: int
    """Messages that were taken out of its body, where its dialect counts them; not set otherwise."""
    awaited: Callable[[], str]
    """Says for whom its model waits, for an error that its time is over; not set where the model has not said."""

    def __init__(
        self,
        owner: Owner,
        wire: Wire,
        request: Request,
        id: str,
        now: float,
        like: Exchange | None = None,
        stream: int = 0,
        body: bytes | None = None,
    ) -> None:
        """`like` is one whose request had the same head: what was found out from that is not looked for again. `body` is all
        of its body where that came with the head, on a wire without windows that wants no credit for it: as with `feed` and
        `feed_end`."""
        self.owner = owner
        self.wire = wire
        self.request = request
        self.id = id
        self.stream = stream or request.stream
        if like is not None and like.request is request:  # one whose body was inflated has another request since
            self.fields = like.fields
            self.route = like.route
        else:
            self.fields = owner.fields(request.headers)
            self.route = None
        self.outbound = Outbound(self, owner, wire, self.stream, now)
        self.turn: Turn = NO_TURN
        self._received = 0
        self._scope: trio.CancelScope | None = None
        self._cancelled = False
        self.ending: Ending | None = None
        self.interruption: GatewayError | None = None
        self.allowed = self.deadline = _FOREVER
        """Seconds, and the moment on Trio's clock; infinite where there is none."""
        self.allowed_by = ""
        self._ceiling: tuple[float, float, str] | None = None  # the earliest deadline, the seconds and the name of its limit
        self.words: Callable[[Exchange, GatewayError], None] | None = None
        """How the dialect that has taken it says an error before the head; it commits and finishes the exchange."""
        self.fail: Callable[[GatewayError], None] | None = None
        """The same, for what is under way: it comes before `words`."""
        self.model = self.dialect = self.incident = ""
        self.silence: tuple[float, str] | None = None
        self.reply: dict[str, str] | None = None
        """Header fields that the model wants in the head of its answer, by lower-case name."""
        self.bytes_in = 0
        self.priority = 0
        """The level at which it waits for a slot, where the request says so: `gateway.workers.slots`."""
        self.copied = 0
        """Bytes of the body that were copied or inflated, each time they were, on their way into the one buffer that
        `receive_body` or `whole_body` has given; what lands there costs nothing."""
        self.started_at = self.arrived_at = now
        self.waits = None
        self._inbox = self._outbox = _NOTHING  # what has come; the same, the next one last: what the work takes from
        self._held = 0  # what the inbox costs, paid from the budget on wires without windows
        self.input_ended = False
        """Whether the body has arrived to its end."""
        self.gone = self._returned = self._consumed = False
        self._reader: trio.lowlevel.Task | None = None  # waits for input
        self._gathering: _Gathering | None = None
        self._reserved = 0  # the whole body, paid from the budget
        self._assembly = 0  # a message under way in a decoder, likewise
        self._made = 0  # the part of `_objects` for objects made of its own JSON, or to be made for its answer
        self._objects = 0  # objects made of its bytes one by one, likewise
        if body is not None:
            self._consumed = self.input_ended = True
            if body:
                self.bytes_in = n = len(body)
                cost = n + _PIECE
                if owner.budget.try_reserve(cost):
                    self._held = cost
                    self._inbox = [body]
                else:
                    self.interrupt(no_bytes(owner.budget, cost))

    # -- what the request says -----------------------------------------------------------------------------------

    @property
    def path(self) -> bytes:
        """Of the target, as it was sent; looked for where a route is new, not for each request."""
        return self.request.target.partition(b"?")[0]

    @property
    def query(self) -> bytes:
        """What is behind the target's first question mark."""
        return self.request.target.partition(b"?")[2]

    def header(self, name: bytes) -> bytes | None:
        """The first field of that (lower-case) name."""
        return self.fields.get(name)

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
        """What its own task waits for on the wire: `end` where all is said, and the client has yet to take the last of it;
        `room` where the client does not read, `input` where it does not send; empty where it is none of these."""
        if self.outbound.finishing is not None:
            return "end"
        if self.outbound.waits:
            return "room"
        return "" if self._reader is None else "input"

    # -- inbound: called by the wire -------------------------------------------------------------------------------

    def feed(self, item: Buffer | Frame, n: int, now: float) -> None:
        """A piece of the body, n bytes that the wire wants credit for."""
        self.bytes_in += n
        self.arrived_at = now
        if self._returned:
            self.wire.credit(self.stream, n)
        elif self._gathering is not None:
            assert not isinstance(item, Frame)
            self._collect(self._gathering, item, n)
        else:
            if self.wire.windowed:
                # the window bounds bytes alone: small pieces are put together, or each would hold thirty times its size
                last = self._inbox[-1] if n < _SMALL and self._inbox else None
                if last is not None:
                    assert not isinstance(last, Frame)
                    assert not isinstance(item, Frame)
                    if len(last) < _SMALL:
                        self._inbox[-1] = whole = b"".join((last, item))
                        self.copied += len(whole)
                        return
            else:
                cost = n + _PIECE
                if not self.owner.budget.try_reserve(cost):
                    self.wire.credit(self.stream, n)
                    self.interrupt(no_bytes(self.owner.budget, cost))
                    return
                self._held += cost
            if self._inbox is _NOTHING:
                self._inbox = [item]
            else:
                self._inbox.append(item)
            if self._reader is not None:
                self._wake_reader(now)

    def _credit(self, n: int) -> None:
        if not self._consumed:
            self.wire.credit(self.stream, n)

    @property
    def waiting(self) -> int:
        """What the pieces that nobody has taken yet cost beside their bytes."""
        return _PIECE * (len(self._inbox) + len(self._outbox))

    def feed_end(self) -> None:
        """The body is complete."""
        self.input_ended = True
        if self._reader is not None:
            self._wake_reader(self.owner.clock())

    def answer_written(self) -> None:
        """The last byte of our ending is with the kernel."""
        self._settle(self.outbound.finishing or Ending.COMPLETE)

    def peer_gone(self, ending: Ending) -> None:
        """The client is gone, or the connection: nothing more can be said. Cancels the model at once."""
        self.gone, self.outbound.open = True, False
        self._settle(ending)
        self._cancel()

    def limit_time(self, seconds: float, setting: str) -> None:
        """The exchange ends with DeadlineExceeded, which names the setting, that many seconds from now; what was said before
        holds no longer, apart from `limit_call`."""
        until = trio.current_time() + seconds
        if self._ceiling is not None and self._ceiling[0] <= until:
            until, seconds, setting = self._ceiling
        self.deadline, self.allowed, self.allowed_by = until, seconds, setting
        if self._scope is not None:
            self._scope.deadline = until

    def limit_call(self, seconds: float, name: str) -> None:
        """The same, whatever limits are said later: the earliest deadline holds. `name` says whose limit it is."""
        until = trio.current_time() + seconds
        if self._ceiling is None or until < self._ceiling[0]:
            self._ceiling = until, seconds, name
            if until < self.deadline:
                self.limit_time(seconds, name)

    def interrupt(self, error: GatewayError) -> None:
        """Stops the work; the error becomes the exchange's honest ending. The first interruption stays."""
        if self.interruption is None and self.outbound.finishing is None and self.ending is None:
            self.interruption = error
            self._cancel()

    def _cancel(self) -> None:
        if not self._cancelled:
            self._cancelled, self._cancelled_at = True, self.owner.clock()
        if self._scope is not None:
            self.turn.spend()
            self._scope.cancel()

    def switch(self, wire: Wire) -> None:
        """The connection has accepted its upgrade: another wire carries it from now on."""
        self.wire = self.outbound.wire = wire

    # -- the scope around its work ---------------------------------------------------------------------------------

    def begin(self, scope: trio.CancelScope, turn: Turn) -> None:
        """Its work begins, inside this scope, which nobody else cancels, and by the turns of this task."""
        self._scope, self.turn, outbound, owner = scope, turn, self.outbound, self.owner
        outbound.turn = turn
        self.began_at = now = owner.clock()
        turn.start(outbound, now, owner.clock, owner.limits.checkpoint_bytes)
        if self.deadline < _FOREVER:
            scope.deadline = self.deadline
        if self._cancelled:
            turn.spend()
            scope.cancel()

    @property
    def cancelled_at(self) -> float | None:
        """When the work was told to stop, or its time was over, on Trio's clock; None: neither was so."""
        if self._cancelled:
            return self._cancelled_at
        return self.deadline if self.deadline <= self.owner.clock() else None

    def leave_scope(self) -> bool:
        """Its work is over: the scope is somebody else's. True where it was cancelled: the work was told to stop, or its
        time is over."""
        scope, self._scope = self._scope, None
        if scope is None:
            return False
        self.turn.end()
        if self.deadline < _FOREVER:
            over = scope.cancel_called  # which looks at the clock too
            scope.deadline = _FOREVER
            return over
        return self._cancelled

    # -- inbound: called by the exchange's own task ----------------------------------------------------------------

    async def receive(self) -> Buffer | Frame | None:
        """The next piece of the body, None at its end (again and again). Its credit goes back to the peer with the
        return: call this when the consumer wants bytes, not before."""
        if self.request.expects_continue and not self.bytes_in and not self.outbound.status:
            self.wire.proceed(self.stream)
        turn = self.turn
        self._received += 1
        if turn.over():
            await turn.renew()
        while not (outbox := self._outbox):
            if self._inbox:
                self._outbox, self._inbox = self._inbox, _NOTHING
                self._outbox.reverse()
            elif self.input_ended:
                self._uncount()
                return None
            elif self._returned:
                self._uncount()
                raise trio.ClosedResourceError("the exchange has ended")
            else:
                assert self._reader is None, "one task waits for input"
                self._reader = trio.lowlevel.current_task()
                self.parks_for(INPUT)
                await trio.lowlevel.wait_task_rescheduled(self._reader_cancelled)
                turn.begin()
        item = outbox.pop()
        n = len(item.data) if type(item) is Frame else len(item)
        turn.bytes -= n
        wire = self.wire
        if not wire.windowed:
            cost = n + _PIECE
            self._held -= cost
            self.owner.budget.release(cost)
        if not self._consumed:
            wire.credit(self.stream, n)
        return item

    def _uncount(self) -> None:
        self._received -= 1
        self.turn.received -= 1

    async def _wait_input(self) -> None:
        assert self._reader is None, "one task waits for input"
        self._reader = trio.lowlevel.current_task()
        self.parks_for(INPUT)
        await trio.lowlevel.wait_task_rescheduled(self._reader_cancelled)
        self.turn.begin()

    def _wake_reader(self, now: float) -> None:
        """The wait is over since then, whenever its task has its turn."""
        reader, self._reader = self._reader, None
        assert reader is not None
        self.has_waited(INPUT, now)
        trio.lowlevel.reschedule(reader)

    def _reader_cancelled(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        self._uncount()
        self.has_waited(INPUT)
        return trio.lowlevel.Abort.SUCCEEDED

    # -- where its time goes: asked where a task parks, never on its way -------------------------------------------------

    def parks_for(self, what: int) -> None:
        """A task of its own waits from now on for one of `gateway.core.waits`'s things."""
        self.waits = waits = self.waits or Waits()
        waits.begin(what, self.owner.clock())

    def has_waited(self, what: int, now: float | None = None) -> None:
        """It has it, or waits no longer. Who still waits when the exchange's own task is done keeps nobody waiting."""
        if self.waits is not None and not self._returned:
            self.waits.over(what, self.owner.clock() if now is None else now)

    def slot_wait_began(self) -> None:
        """A task of its own waits for a slot of its model, until `slot_wait_over`."""
        self.parks_for(SLOT)

    def slot_wait_over(self) -> None:
        self.has_waited(SLOT)

    @property
    def frames_in(self) -> int:
        """Of a WebSocket: frames that were taken."""
        return self._received

    async def receive_body(self, limit: int, *, setting: str, as_sent: bool = False) -> memoryview:
        """The whole body in one buffer: its memory is reserved before it is taken and its credit returned as the
        bytes land there. Of one with a content coding, the content: both within the limit, both paid for while both are
        there; the request then says nothing of the coding any more. `as_sent`: such a body is refused, as where its very
        bytes are signed.

        Raises TooLarge before reading where Content-Length says so, at the limit otherwise, Overloaded where the byte
        budget has no room, UnsupportedEncoding before reading for a coding that is unknown, and BadRequest for data that
        are damaged. One call for an exchange, instead of `receive`.
        """
        whole = self.whole_body(limit)
        if whole is not None:
            return memoryview(whole)
        codings = self._codings(as_sent)
        if self._cancelled:
            await trio.lowlevel.checkpoint()
        length = self.request.content_length
        if length is not None:
            if length > limit:
                raise _too_large(length, limit, setting)
            if length:
                # what is only announced holds no more than a step of the budget, and no memory that was not there
                self._reserve(min(length, _BODY_STEP))
                gathering = _Gathering(limit, setting, self.owner.pool.take(length, self.started_at))
            else:
                gathering = _Gathering(limit, setting, memoryview(b""))
        else:
            gathering = _Gathering(limit, setting, None)
        self._gathering = gathering
        waiting, self._inbox = self._inbox, _NOTHING
        for item in waiting:
            assert not isinstance(item, Frame)
            if not self.wire.windowed:
                self._held -= len(item) + _PIECE
                self.owner.budget.release(len(item) + _PIECE)
            self._collect(gathering, item, len(item))
        sink = gathering.sink
        if sink is not None and gathering.filled < len(sink):
            gathering.landed = self.wire.land(self.stream, sink[gathering.filled :])
        if self.request.expects_continue and not self.bytes_in and not self.outbound.status:
            self.wire.proceed(self.stream)
        while not self.input_ended and gathering.error is None:
            await self._wait_input()
        if gathering.error is not None:
            self._gathering = None
            throw(gathering.take_error())
        body = sink if sink is not None else memoryview(gathering.growing)
        self._gathering = None
        return await self._inflated(body, codings, limit, setting) if codings else body

    def _codings(self, as_sent: bool) -> tuple[Coding, ...]:
        try:
            codings = parse_content_encoding(self.header_values(b"content-encoding"))
        except RemoteProtocolError as e:
            if not as_sent:
                raise UnsupportedEncoding(str(e)) from None
        else:
            if not (as_sent and codings):
                return codings
        encoding = self.header(b"content-encoding") or b""
        raise UnsupportedEncoding(
            f"content-encoding {encoding[:40].decode('latin-1')!r} is not accepted: send the body as it is",
            accepted=b"identity",
        )

    async def _inflated(self, body: memoryview, codings: tuple[Coding, ...], limit: int, setting: str) -> memoryview:
        """The content of a body that is all here. Each step is paid for before it is made, and the body until the last."""
        inflater, out, sent, steps = Inflater(codings, limit=limit), GrowingBody(limit), self._reserved, 0
        inflater.feed(body)
        try:
            while not inflater.hungry:
                steps += 1
                short = steps <= _SHORT_STEPS
                step = min(_SHORT_STEP if short else _BODY_STEP, max(limit - out.size, 1))
                self._reserve(step)
                if short:
                    _inflate(inflater, out, step)
                else:
                    await run_in_codec_thread(partial(_inflate, inflater, out, step))
                self._unreserve(self._reserved - sent - out.size)
            inflater.finish()
        except BaseException as e:
            out.clear()  # the error knows it, by its traceback, until it is said
            if isinstance(e, RemoteProtocolError):
                raise TooLarge(f"{e} ({setting})") if e.status == 413 else BadRequest(str(e)) from None
            raise
        self._unreserve(sent)
        self.copied += out.size
        # who reads the request from now on sees a body that is what it was made of
        gone = (b"content-encoding", b"content-length")
        self.request = msgspec.structs.replace(
            self.request, headers=[field for field in self.request.headers if field[0] not in gone]
        )
        self.fields = self.owner.fields(self.request.headers)
        return out.view()

    def whole_body(self, limit: int) -> Buffer | None:
        """What `receive_body` returns a view of, if all of it is here already, in one piece, within the limit and without a
        content coding. What paid for it in the inbox pays for it from now on."""
        inbox = self._inbox
        if self._consumed and inbox and not self._cancelled and b"content-encoding" not in self.fields:
            (body,) = inbox  # it came with the head, and is of the length that says
            assert type(body) is bytes
            n = len(body)
            if n > limit:
                return None
            self._reserved, self._held, self._inbox = self._held, 0, _NOTHING
            self.copied += n
            return body
        if len(inbox) != 1 or not self.input_ended or self._cancelled or self._outbox:
            return None
        whole = inbox[0]
        if type(whole) is Frame:
            return None
        n = len(whole)
        if n > limit or n != self.request.content_length or b"content-encoding" in self.fields:
            return None
        if self.wire.windowed:
            self._reserve(n)
        self._credit(n)
        self._reserved += self._held  # which is nothing on a wire with windows
        self._held = 0
        self._inbox = _NOTHING
        self.copied += n
        return whole

    def _collect(self, gathering: _Gathering, item: Buffer, n: int) -> None:
        sink = gathering.sink
        if gathering.error is not None:
            pass
        elif sink is not None:
            filled = gathering.filled
            if not gathering.landed:
                sink[filled : filled + n] = item
                self.copied += 2 * n  # out of what the wire received into, and from there
            gathering.filled = filled = filled + n
            missing = filled - self._reserved
            if missing > 0:
                step = max(missing, min(_BODY_STEP, len(sink) - self._reserved))
                if self.owner.budget.try_reserve(step):
                    self._reserved += step
                else:
                    self._refuse_body(gathering, no_bytes(self.owner.budget, step))
        else:
            growing = gathering.growing
            if len(growing) + n > gathering.limit:
                self._refuse_body(gathering, _too_large(len(growing) + n, gathering.limit, gathering.setting))
            elif not self.owner.budget.try_reserve(n):
                self._refuse_body(gathering, no_bytes(self.owner.budget, n))
            else:
                self._reserved += n
                growing += item
                self.copied += 2 * n
        self._credit(n)

    def _refuse_body(self, gathering: _Gathering, error: GatewayError) -> None:
        gathering.error = error
        if self._reader is not None:
            self._wake_reader(self.arrived_at)

    def limit_silence(self, seconds: float, setting: str) -> None:
        """The exchange ends with DeadlineExceeded, which names the setting, when neither side has moved a byte for that
        many seconds, to within the coarse timer's second."""
        self.silence = seconds, setting

    def check_stamps(self, now: float) -> None:
        """What the coarse timer asks: interrupts a session that is silent for longer than it may, a whole body that fell
        silent, and one that stays slower than `limits.body_rate`. Parts of a stream may be as slow as they like."""
        if self.silence is not None:
            seconds, setting = self.silence
            if now - max(self.arrived_at, self.outbound.sent_at) > seconds:
                self.interrupt(self._too_late(f"no part in either direction for {seconds:g} s ({setting})"))
        if self.input_ended or self._returned or self._gathering is None:
            return
        limits, waited, lasted = self.owner.limits, now - self.arrived_at, now - self.started_at
        if waited > limits.body_silence:
            self.interrupt(SlowUpload(f"no byte of the body for {waited:.0f} s (limits.body_silence)"))
        elif lasted > limits.body_silence and self.bytes_in < limits.body_rate * lasted:
            self.interrupt(
                SlowUpload(f"{self.bytes_in} bytes of the body in {lasted:.0f} s: less than limits.body_rate allows")
            )

    @property
    def held(self) -> int:
        """Bytes of the budget that this exchange holds."""
        return self._held + self._reserved + self.outbound.charged + self._assembly + self._objects

    @property
    def held_in_memory(self) -> tuple[int, int, int]:
        """Bytes of `held` by use: its whole body and objects made of it, a message that is being put together, and one on
        its way that is larger than the queue."""
        return self._reserved + self._objects, self._assembly, self.outbound.charged

    def _reserve(self, n: int) -> None:
        if not self.owner.budget.try_reserve(n):
            raise no_bytes(self.owner.budget, n)
        self._reserved += n

    def _unreserve(self, n: int) -> None:
        self.owner.budget.release(n)
        self._reserved -= n

    # -- outbound --------------------------------------------------------------------------------------------------

    def claim(self, dialect: str, refuse: Callable[[Exchange, GatewayError], None]) -> None:
        """A dialect has it, which says in its own words what goes wrong before the head."""
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

    def assembling(self, n: int) -> None:
        """A message of n bytes is being put together from pieces: its memory is reserved once, before it is taken.
        Overloaded where the budget has no room."""
        if n > self._assembly:
            extra = n - self._assembly
            if not self.owner.budget.try_reserve(extra):
                raise no_bytes(self.owner.budget, extra)
            self._assembly = n

    def assembled(self) -> None:
        """That message was taken."""
        if self._assembly:
            self.owner.budget.release(self._assembly)
            self._assembly = 0

    def making(self, n: int) -> None:
        """Objects that take n bytes are made of the request's text, or for its answer: they count until its end, or until
        another number is said. Overloaded where the budget has no room."""
        extra = n - self._made
        if extra > 0 and not self.owner.budget.try_reserve(extra):
            raise no_bytes(self.owner.budget, extra)
        if extra < 0:
            self.owner.budget.release(-extra)
        self._objects += extra
        self._made = n

    def reserve_objects(self, n: int) -> Callable[[], None]:
        """Counts n bytes of objects that are made of what this exchange has received, until what this returns is called: a
        thread that is at work with them may outlive the exchange. Overloaded where the budget has no room."""
        budget, left = self.owner.budget, n
        if not budget.try_reserve(n):
            raise no_bytes(budget, n)
        self._objects += n

        def give_back() -> None:
            nonlocal left
            budget.release(left)
            self._objects -= left
            left = 0

        return give_back

    # -- the end ---------------------------------------------------------------------------------------------------

    @property
    def interruption_or_deadline(self) -> GatewayError:
        return self.interruption or self._too_late(f"the session's {self.allowed:g} s are over ({self.allowed_by})")

    def _too_late(self, message: str) -> DeadlineExceeded:
        awaited: Callable[[], str] | None = getattr(self, "awaited", None)
        return DeadlineExceeded(message if awaited is None else f"{message}: {awaited()}")

    def work_done(self) -> None:
        """The exchange's task is done with it: unread input is credited and dropped, what was held is given back."""
        if self._returned:
            return
        self._returned = True
        self.left_at = self.owner.clock()
        try:
            if self._outbox or self._inbox or self._assembly:
                self._give_back()
            self._gathering = None
            self.wire.release(self.stream)
        finally:
            if self.ending is not None:
                self._close()

    def _give_back(self) -> None:
        unread = 0
        for item in (*self._outbox, *self._inbox):
            unread += len(item.data) if isinstance(item, Frame) else len(item)
        self._outbox = self._inbox = _NOTHING
        if self._held:
            self.owner.budget.release(self._held)
            self._held = 0
        if self._assembly:
            self.assembled()
        if unread:
            self._credit(unread)

    def _settle(self, ending: Ending) -> None:
        if self.ending is None:
            self.ending = ending
            if self.outbound.charged:
                self.outbound.uncharge()
            if self._returned:
                self._close()
            else:  # what its task does from now on is no part of it
                if self.waits is None:
                    self.waits = Waits()
                self.waits.end(self.owner.clock())

    def _close(self) -> None:
        """It has its ending, and its task is done with it."""
        self.fail = None  # it knows the exchange: a cycle would keep both until the collector comes by
        if self.interruption is not None:
            detached(self.interruption)  # if it was raised in the exchange's own task, its frames know the exchange
        owner = self.owner
        if self._made:
            self.making(0)
        if reserved := self._reserved:
            # the body's memory counts until the answer, which may be views of it, is written
            self._reserved = 0
            owner.budget.release(reserved)
        owner.exchange_closed(self)
        self.outbound.close()


def _inflate(inflater: Inflater, out: GrowingBody, at_most: int) -> None:
    made = bytearray()
    inflater.inflate_into(made, at_most)
    out.append(made)


def _too_large(n: int, limit: int, setting: str) -> TooLarge:
    return TooLarge(f"the body of {n} bytes is over the limit of {limit} bytes ({setting})")
