"""Relays one session over a container's WebSocket: parts to frames, and frames to parts."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import final

import trio

from gateway.containers.connection import BAD_GATEWAY, GATEWAY_TIMEOUT, Container
from gateway.core.memory import no_bytes
from gateway.doorbell import Doorbell
from gateway.errors import BadRequest, Overloaded, TransportLost
from gateway.net.transport import Transport
from models.errors import ModelError
from models.messages import Part, PartKind
from models.session import Session
from protocols.aws.invoke import STREAM_BROKEN
from protocols.buffers import Budget, ByteBudget, untouched
from protocols.errors import RemoteProtocolError
from protocols.events import NEED_DATA, Close, ConnectionEnd, Frame, Opcode, Ping
from protocols.floods import FloodPolicy
from protocols.websocket.connection import WebSocketConnection
from protocols.websocket.floods import WEBSOCKET_FLOODS
from protocols.websocket.frames import FrameMemory

log = logging.getLogger("gateway.bridge")

_NORMAL, _GOING_AWAY, _POLICY_VIOLATION, _TRY_AGAIN = 1000, 1001, 1008, 1013  # RFC 6455 section 7.4.1 and the IANA registry
_CLEAN = (_NORMAL, None)
_OPCODE = {PartKind.UTF8: Opcode.TEXT, PartKind.BINARY: Opcode.BINARY}
_UTF8, _BINARY = PartKind.UTF8, PartKind.BINARY
_TEXT, _CONTINUATION = Opcode.TEXT, Opcode.CONTINUATION
# Bytes of the objects of a held frame, beside its payload. Without them, empty frames would cost nothing.
_FRAME = 128
# A checkpoint comes after so many frames; a receive counts as several.
_FRAMES_AT_ONCE, _RECEIVED = 64, 16
_WRITE_AT_MOST = 65536
_NO_BOUND = 2**63
# Seconds of waiting for a container that cannot learn of the end of the input, before it is logged.
_SAID_AFTER = 10.0
_WITHOUT_CLOSE = "the container ended the connection without a Close"
_REMEDY = "let it say Close when it has answered, or name its end of input in X-Everywire-End-Of-Input"


@final
class Holding(FrameMemory):
    """The bytes that one session's relay holds. They are paid from the byte budget before memory is taken. Without a budget,
    as in a session without an exchange, there is no limit."""

    def __init__(self, budget: Budget | None) -> None:
        self._budget = budget or ByteBudget(_NO_BOUND)
        self._paid = 0
        self.landing = 0
        """Bytes that are paid for a large frame that is being received. They do not count in `pay`."""
        self.refusal: Overloaded | None = None
        """The error of `allocate` or `pay_landing`; None if they have not failed."""

    def pay(self, n: int) -> None:
        """Pays for `n` bytes in total, which may be more or less than before. Overloaded if the budget has no room; then
        nothing changes."""
        more = n + self.landing - self._paid
        if more < 0:
            self._budget.release(-more)
        elif not self._budget.try_reserve(more):
            raise no_bytes(self._budget, more)
        self._paid += more

    def allocate(self, n: int) -> memoryview | None:
        """Returns the memory of a large frame, which `pay_landing` pays for; None if it exceeds the whole budget."""
        if n > self._budget.limit:
            self.refusal = no_bytes(self._budget, n)
            return None
        return untouched(n)

    def pay_landing(self, n: int) -> bool:
        """Pays for `n` more bytes of that frame; False if the budget has no room."""
        if not self._budget.try_reserve(n):
            self.refusal = no_bytes(self._budget, n)
            return False
        self._paid += n
        self.landing += n
        return True


@final
class Relay:
    """Moves one session's parts to a container and its frames back, one for one and unchanged.

    Flow control: the relay takes a part from the session when the container's socket has taken the previous one. A
    container that stops reading therefore stops its client. The relay reads a frame while the session has less than
    `read_ahead` bytes of frames to take. A client that stops reading therefore stops its container. It reads ahead because
    Pings and Close stand behind the frames: a container with unanswered Pings would give up a client that is only slow.

    All held bytes are paid from the byte budget of the session's wire. They are the received bytes (at most `read_ahead`,
    one more frame, and the rest of one receive) and the part that the container has not taken. If the budget has no room,
    the session ends with Overloaded.

    The end: the container's Close, or the end of its connection, reaches the session after all earlier frames. A WebSocket
    has no message for the end of the input alone. If the container has named a text for it in its handshake, it gets that
    text as a last message. Otherwise the relay waits until the container sends Close or the session's time is over. Only if
    `half_close_quiet` is set, the relay sends Close 1000 after that silence. This is a guess: most libraries drop what they
    still have to send when a Close arrives. If such a Close may have cost an answer, the session ends with an error.
    """

    def __init__(
        self,
        container: Container,
        transport: Transport,
        machine: WebSocketConnection,
        holding: Holding,
        end: bytes | None = None,
    ) -> None:
        """`holding` allocates the memory of the machine's large frames. `end` is the text that the container has named for
        the end of the input; default None: it has named none."""
        self._container, self._limits = container, container.limits
        self._transport, self._machine, self._holding = transport, machine, holding
        self._end_of_input = end
        self._owing = False  # no complete message came since the last complete part
        self._in_message = False  # the last received frame has no FIN
        self._unfinished = False  # the input has ended in the middle of a message
        self._guessed = False  # our Close was sent, though the container may still have had an answer
        self._scope = trio.CancelScope()
        self._error: Exception | None = None
        self._floods = FloodPolicy(WEBSOCKET_FLOODS, trio.current_time())
        self._relayed = 0  # data frames, both ways
        self._held = 0  # bytes of frames that the session has not taken
        self._unsent = 0  # bytes of the part that the container has not taken
        self._frames: deque[Frame] = deque()
        self._arrived, self._room = Doorbell(), Doorbell()
        self._over = False  # no more frames come from the container
        self._verdict: ModelError | None = None  # the error of that end; None if it is a good one
        self._last_frame = 0.0
        self._silent = False  # no byte was received since the last Ping
        self._rest = memoryview(b"")  # the unsent rest of the machine's last output
        self._given = self._blocked = self._lost = False
        self._full, self._drained = Doorbell(), Doorbell()

    async def run(self, session: Session[Part, Part]) -> None:
        """Runs until the container has sent Close and the session has every frame. ModelError for any other end; its code is
        the number of the Close, or StreamBroken. Overloaded if the byte budget has no room. Errors of the session are raised
        unchanged."""
        try:
            self._pay()  # frames may have arrived with the handshake's answer
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                for task in (self._read, self._write_rest, self._keep_alive):
                    nursery.start_soon(task)
                for side in (self._forward, self._deliver):
                    nursery.start_soon(self._until_it_raises, side, session)
        finally:
            self._leave()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = self._verdict = None  # it refers to this frame, and the cycle would keep the session's memory

    async def _until_it_raises(
        self, side: Callable[[Session[Part, Part]], Awaitable[None]], session: Session[Part, Part]
    ) -> None:
        try:
            await side(session)
        except Exception as e:
            self._end(e)

    def _end(self, error: Exception | None = None) -> None:
        """Ends the session. Only the first call counts."""
        if not self._scope.cancel_called:
            self._error = error
            self._scope.cancel()

    def _leave(self) -> None:
        # no waiting here, whatever ended the session: the container gets only what the socket takes at once
        if self._machine.is_open:
            self._machine.send(Close(code=_TRY_AGAIN if isinstance(self._error, Overloaded) else _GOING_AWAY))
        self._write()
        self._transport.send_eof()
        self._machine.close()
        self._frames.clear()
        self._holding.landing = 0
        self._holding.pay(0)

    def _pay(self, more: int = 0) -> None:
        """Pays for all held bytes, and for `more` that are about to be."""
        self._holding.pay(self._machine.unread + self._held + self._unsent + more)

    # -- from the container ------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """The only reader of the socket."""
        try:
            await self._read_frames()
        except TransportLost as e:
            self._verdict = _broken(_WITHOUT_CLOSE if e.left else f"the connection to the container was lost: {e}")
        except RemoteProtocolError as e:
            self._write()
            if self._holding.refusal is not None:
                self._end(self._holding.refusal)
            self._verdict = _broken(f"the container broke the protocol: {e}")
        except Overloaded as e:
            self._end(e)
        if self._holding.landing:  # the connection ended in the middle of a frame, so nothing can be sent either
            self._machine.close()
            self._holding.landing = self._unsent = 0
            self._pay()
        self._over = True
        self._arrived.wake()

    async def _read_frames(self) -> None:
        machine, turn = self._machine, 0
        while True:
            if turn >= _FRAMES_AT_ONCE:
                await trio.lowlevel.checkpoint()
                turn = 0
            while self._held >= self._limits.read_ahead:
                await self._room.wait()
            event = machine.next_event()
            turn += 1
            if machine.counters.total >= self._floods.due and self._flooded():
                return
            if type(event) is Frame:
                self._relayed += 1
                self._held += len(event.data) + _FRAME
                self._holding.landing = 0  # a large frame counts in `_held` now
                self._pay()
                self._last_frame = trio.current_time()
                self._in_message = not event.fin
                if event.fin:
                    self._owing = False
                self._frames.append(event)
                self._arrived.wake()
            elif event is NEED_DATA:
                if self._receive():
                    turn += _RECEIVED
                else:
                    self._pay()  # less than before, after control frames
                    await self._transport.wait_readable()
                    turn = 0
            elif type(event) is Close:
                self._verdict = self._meaning_of(event)
                self._write()  # the echo
                return
            elif type(event) is ConnectionEnd:
                self._verdict = _broken(_WITHOUT_CLOSE)
                return
            elif type(event) is Ping:
                self._write()

    def _flooded(self) -> bool:
        """True if the container floods us, by the limits that clients have. Then only its session is ended."""
        flood = self._floods.judge(self._machine.flood_counters(self._relayed), trio.current_time())
        if flood is None:
            return False
        self._machine.give_up(_POLICY_VIOLATION, f"too many {flood.kind} frames")
        self._write()
        facts = {"container": self._container.address.authority, "kind": flood.kind, "count": flood.count}
        self._log("flood", {**facts, "seconds": round(flood.seconds, 3)}, logging.WARNING)
        self._verdict = _broken(f"{self._named} sent too many {flood.kind} frames")  # after the frames before them
        return True

    def _log(self, event: str, facts: Mapping[str, object], level: int = logging.INFO) -> None:
        limits = self._container.log_limits
        limits.tick(trio.current_time())  # there is no timer for it
        limits.write(log, event, facts, level)

    def _meaning_of(self, close: Close) -> ModelError | None:
        """Returns the error that the container's Close means; None for a good end."""
        if close.code not in _CLEAN:
            return _closed(close)
        if self._in_message and not self._unfinished:  # after an incomplete input, the answer may be incomplete too
            return _broken(f"{self._named} closed the session in the middle of a message")
        if self._guessed and self._owing:
            quiet = self._limits.half_close_quiet
            return _broken(
                f"{self._named} sent nothing after the client's last part, neither for {quiet:g} s (half_close_quiet) nor "
                f"between our Close and its own: an answer may be lost; {_REMEDY}, or set a longer half_close_quiet",
                status=GATEWAY_TIMEOUT,
            )
        return None

    def _receive(self) -> bool:
        """Receives once without waiting. False if nothing had arrived."""
        machine, scratch = self._machine, self._container.scratch
        buffer = machine.get_buffer()
        n = self._transport.try_receive_into(scratch if buffer is None else buffer)
        if n is None:
            return False
        self._silent, self._container.heard = False, True
        if not n:
            machine.receive_eof()
        elif buffer is None:
            self._pay(n)
            machine.receive_data(scratch[:n])
        else:
            machine.buffer_updated(n)
            self._last_frame = trio.current_time()
        return True

    async def _deliver(self, session: Session[Part, Part]) -> None:
        frames, kind = self._frames, _BINARY
        while True:
            while frames:
                frame = frames.popleft()
                if frame.opcode is not _CONTINUATION:
                    kind = _UTF8 if frame.opcode is _TEXT else _BINARY
                await session.send(Part(data=frame.data, kind=kind, last=frame.fin))
                n = len(frame.data)
                del frame  # it may be large, and the wait for the next one long
                self._machine.credit(n)
                self._held -= n + _FRAME
                self._pay()
                self._room.wake()
            if self._over:
                self._end(self._verdict)
            await self._arrived.wait()

    # -- to the container --------------------------------------------------------------------------------------------

    async def _forward(self, session: Session[Part, Part]) -> None:
        machine, continuing = self._machine, False
        while True:
            while self._blocked:
                await self._drained.wait()
            if self._lost or not machine.is_open:
                return  # the reading task finds the reason
            try:
                part = await session.receive()
            except trio.EndOfChannel:
                break
            if machine.is_open:
                opcode = _CONTINUATION if continuing else _OPCODE[part.kind]
                self._unsent = memoryview(part.data).nbytes  # because masking copies a part
                self._pay()
                machine.send_frame(opcode, part.last, (part.data,))
                self._relayed += 1
                continuing = not part.last
                self._owing = self._owing or part.last
                del part
                self._write()
        await self._end_input(session, in_message=continuing)

    async def _end_input(self, session: Session[Part, Part], *, in_message: bool) -> None:
        machine, limits = self._machine, self._limits
        self._unfinished = in_message
        awaits = getattr(session.channel, "awaits", None)
        if awaits is not None:
            awaits(self._awaited)
        if self._end_of_input is not None:
            if in_message:
                raise BadRequest("the input ended in the middle of a message: its last part must not be PARTIAL")
            if machine.is_open:
                self._unsent = len(self._end_of_input)
                self._pay()
                machine.send_frame(_TEXT, True, (self._end_of_input,))
                self._write()
            return
        if limits.half_close_quiet == math.inf:
            await trio.sleep(_SAID_AFTER)
            extra = {"container": self._container.address.authority, "session": session.id, "setting": "half_close_quiet"}
            self._log("the client has ended its input, the container cannot be told: waiting for its Close", extra)
            return
        await self._quiet_for(limits.half_close_quiet)
        if machine.is_open:
            self._guessed = True
            machine.send(Close(code=_NORMAL))
            self._write()
        allowed = limits.half_close_timeout
        await self._quiet_for(allowed)
        error = f"sent neither frames nor its Close for {allowed:g} s after ours (half_close_timeout)"
        self._end(_broken(f"{self._named} {error}", status=GATEWAY_TIMEOUT))

    @property
    def _named(self) -> str:
        return f"the container at {self._container.address.authority}"

    def _awaited(self) -> str:
        """Returns the text for an error that comes during the wait for the container."""
        if self._owing:
            said = f"{self._named} has sent nothing since the client's last part"
        else:
            said = f"{self._named} has not closed the session since the client ended its input"
        return said if self._end_of_input is not None else f"{said}; {_REMEDY}, or set half_close_quiet"

    async def _quiet_for(self, seconds: float) -> None:
        """Waits until the container has sent nothing for `seconds`. Time in which a slow client holds frames does not
        count."""
        since = trio.current_time()
        while trio.current_time() < since + seconds:
            await trio.sleep_until(since + seconds)
            since = trio.current_time() if self._held or self._over else max(since, self._last_frame)

    def _write(self) -> None:
        """Writes as much as the socket takes at once; another task waits to write the rest."""
        try:
            if not self._lost and not self._flush():
                self._blocked = True
                self._full.wake()
                return
        except TransportLost:
            self._lost = True
        if self._blocked:
            self._blocked = False
            self._drained.wake()

    def _flush(self) -> bool:
        """Writes without waiting. True if the kernel has taken all of the machine's output."""
        machine, transport = self._machine, self._transport
        while True:
            while self._rest or transport.pending:
                n = transport.try_send([self._rest] if self._rest else ())
                self._rest = self._rest[n:]
                if not n and (self._rest or transport.pending):
                    return False
            if self._given:
                machine.data_sent()
            buffers = machine.data_to_send(_WRITE_AT_MOST)
            self._given = bool(buffers)
            if not buffers:
                if self._unsent:
                    self._unsent = 0
                    self._pay()
                return True
            self._rest = memoryview(b"".join(buffers))

    async def _write_rest(self) -> None:
        while True:
            while not self._blocked:
                await self._full.wait()
            try:
                await self._transport.wait_writable()
            except TransportLost:
                self._lost = True
            self._write()

    # -- time --------------------------------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        """Sends Pings as the platform does. Any received byte counts as a Pong; while nothing is read, none is expected."""
        limits, unanswered = self._limits, 0
        while limits.ping_interval:
            await trio.sleep(limits.ping_interval)
            if not self._machine.is_open:
                return  # `half_close_timeout` limits the time after our Close
            if not self._silent or self._held >= limits.read_ahead:
                unanswered = 0
            if unanswered >= limits.pings_unanswered:
                error = f"the container left {unanswered} Pings in a row unanswered (pings_unanswered)"
                self._end(_broken(error, status=GATEWAY_TIMEOUT))
                return
            if not self._blocked:  # otherwise a Ping would only wait behind the other bytes
                self._machine.send(Ping())
                self._write()
            self._silent = True
            unanswered += 1


def _broken(message: str, *, status: int = BAD_GATEWAY) -> ModelError:
    return ModelError(message, code=STREAM_BROKEN, status=status)


def _closed(event: Close) -> ModelError:
    return ModelError(
        event.reason or f"the container closed the session with code {event.code}",
        code=str(event.code),
        status=BAD_GATEWAY,
    )
