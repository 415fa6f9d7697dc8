"""Finds models that are READY and say nothing: ends their sessions after `stall_timeout`, and tells where their code waits.

Nothing is noted while a model sends. The coarse timer looks now and then at numbers that calls have anyway, and where those
stand still, at the stacks of the calls' tasks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final
from uuid import uuid4

import trio

from gateway.config.text import text_without_secrets
from gateway.errors import ModelStalled
from gateway.untrusted_text import escape
from gateway.workers.caller import Caller
from gateway.workers.failures import LastError
from gateway.workers.worker import Worker
from models.continuations import Continuations
from models.tracebacks.frames import ToldElsewhere
from models.tracebacks.parked import Parked, local, parked, stacks_of, thread_frames

log = logging.getLogger("gateway.worker")

RECENT = 60.0
"""Seconds for which a session is told about after its end; and from so long a silence on before it, or from half of
`stall_timeout`."""
_LOOKS = 60  # the looks at a session in the time of `stall_timeout`
_TICK = 1.0
_AT_LEAST = 10.0  # seconds from one look to the next, at most: there may be a new model
_ENDED = 64  # the most sessions that are told about after their end
_PLACE = 300  # characters of a place
_CALL = Worker.call.__code__


class Sign(NamedTuple):
    """The part of a call that can be seen without its model's help."""

    task: trio.lowlevel.Task | None
    """The task of its exchange."""
    held: bool
    """True if the model can say nothing now: its client does not read, or its session ends."""
    asks: bool
    """True if it waits for its client to send."""
    sent: int
    """Changes with each message that the model has sent."""
    taken: object
    """Changes with each message that it has taken, and with each wait for the client to send."""
    alone: bool
    """True if all messages of its exchange are this call's. False: `sent` and `taken` may be those of other calls."""


@final
class StalledModel(NamedTuple):
    """The sessions of one model that say nothing, or have said nothing until their end."""

    model: str
    live: int
    """Sessions that are silent now."""
    ended: int
    """Sessions that were ended for that in the last minute."""
    seconds: float
    """The longest silence of a live one, or else of an ended one."""
    limit: float
    """The model's `stall_timeout`."""
    at: str
    """The author's line at which that session waits, or waited; empty if it is not known."""
    stream: str
    """The id of that session."""


@final
class _Silent:
    """A call since its last sign of life."""

    __slots__ = ("number", "place", "sent", "since", "taken")

    def __init__(self, sign: Sign, number: int, now: float) -> None:
        self.sent, self.taken, self.number, self.since = sign.sent, sign.taken, number, now
        self.place = Parked()


@final
class _Ended(NamedTuple):
    worker: Worker
    at: float
    seconds: float
    place: str
    stream: str


@final
class Stalls:
    """The silent sessions of a gateway's models.

    A session is looked at each second, or in sixtieths of `stall_timeout` if those are longer. Its clock begins anew with
    each message that its model sends or takes. It stands while the model waits for its client: in `receive`, or because the
    client does not read. If a model runs in a process, it waits in `receive` if it has taken all messages that are here.

    The calls of one gRPC stream share its counts. A text model's messages are counted for each call apart; any response of
    a tensor model to that stream counts for all of its calls.
    """

    def __init__(self, workers: Mapping[str, Worker], sign: Callable[[Caller], Sign]) -> None:
        self._workers, self._sign = workers, sign
        self.due = 0.0
        """When the next look is due, on Trio's clock."""
        self._due: dict[str, float] = {}  # by the name of the model
        self._silent: dict[Worker, dict[str, _Silent]] = {}  # by the caller's id: a caller may end meanwhile
        self._ended: deque[_Ended] = deque(maxlen=_ENDED)
        self.sought: dict[Worker, Caller] = {}
        """The calls that are silent longest, of models in processes: `locate` asks for their places."""

    # -- the coarse timer --------------------------------------------------------------------------------------------

    def look(self, now: float) -> Iterator[None]:
        """Looks at the sessions of the models that are due. It yields after each session, so that other tasks can run in
        between."""
        there = [*self._workers.values()]
        self._silent = {worker: silent for worker, silent in self._silent.items() if worker in there}
        dues = {worker.name: self._due.get(worker.name, now) for worker in there}
        for worker in there:
            limit = worker.spec.longest_stall
            if not limit:
                del dues[worker.name]
            elif now >= dues[worker.name]:
                dues[worker.name] = now + max(limit / _LOOKS, _TICK) - _TICK / 2
                yield from self._look_at(worker, limit, now)
        self._due = dues
        self.due = min([now + _AT_LEAST, *dues.values()])

    def _look_at(self, worker: Worker, limit: float, now: float) -> Iterator[None]:
        slots = worker.slots
        before, silent = self._silent.get(worker, {}), dict[str, _Silent]()
        look = _Look(worker, self._sign)
        longest: tuple[float, Caller, _Silent] | None = None
        callers = [*slots.live]
        while callers:
            caller = callers.pop()
            if caller in slots.live and caller not in slots.waiting and caller.cancelled_at is None:
                sign, found = self._sign(caller), before.get(caller.id)
                if found is None:
                    found = _Silent(sign, 0, now)
                elif look.alive(caller, sign, found):
                    found.since = now
                silent[caller.id] = found
                seconds = now - found.since
                if seconds >= limit:
                    del silent[caller.id]
                    self._end(worker, caller, seconds, found.place if look.elsewhere else look.place(caller, sign))
                elif seconds >= min(RECENT, limit / 2) and (longest is None or seconds > longest[0]):
                    longest = seconds, caller, found
            del caller  # it may end before the rest are looked at, and must not be kept until then
            yield
        self._silent[worker] = silent
        self.sought.pop(worker, None)
        if longest is not None:
            _, caller, found = longest
            if look.elsewhere:
                self.sought[worker] = caller
            else:
                found.place = look.place(caller, self._sign(caller))

    async def locate(self) -> None:
        """Asks the processes of models where the code of the longest silent sessions waits. Several may run at once."""
        sought, self.sought = self.sought, {}
        for worker, caller in sought.items():
            found = self._silent.get(worker, {}).get(caller.id)
            ask = getattr(worker.model, "__model_place__", None)
            if found is not None and ask is not None and (place := await ask(caller)) is not None:
                found.place = Parked(escape(text_without_secrets(place.at))[:_PLACE], text_without_secrets(place.stack))

    def _end(self, worker: Worker, caller: Caller, seconds: float, place: Parked) -> None:
        """Ends a session, and reports it as an incident of its model."""
        name, limit = worker.name, worker.spec.longest_stall
        said = f"model {name!r} has sent nothing for {limit:g} s (models.{name}.stall_timeout)"
        error = ModelStalled(said)
        if place.stack:
            error.add_note(ToldElsewhere(f"The session waits here:\n{place.stack}\nModelStalled: {said}"))
        incident = caller.incident = uuid4().hex[:12]
        at = f", at {place.at}" if place.at else ""
        now = trio.current_time()
        worker.last_error = LastError(error=f"ModelStalled: {said}{at}"[:_PLACE], incident=incident, at=now)
        self._ended.append(_Ended(worker, now, seconds, place.at, caller.id))
        if worker.log_limits.allows("model stalled", level=logging.ERROR):
            log.error(
                "model stalled",
                extra={"model": name, "id": caller.id, "incident": incident, "seconds": round(seconds, 1), "at": place.at},
                exc_info=error if place.stack else None,
            )
        worker.explain(error, incident, caller.id, said)
        caller.interrupt(error)

    # -- for the verdict ---------------------------------------------------------------------------------------------

    def recent(self) -> list[StalledModel]:
        """The models with sessions that have been silent for a minute, or for half of `stall_timeout`; or that have ended so
        in the last minute."""
        now = trio.current_time()
        while self._ended and now - self._ended[0].at > RECENT:
            self._ended.popleft()
        found = list[StalledModel]()
        for worker in self._workers.values():
            limit = worker.spec.longest_stall
            ended = [one for one in self._ended if one.worker is worker]
            least = min(RECENT, limit / 2)
            silent = {id: one for id, one in self._silent.get(worker, {}).items() if limit and now - one.since >= least}
            if silent:  # some may have ended since the look
                silent = {caller.id: silent[caller.id] for caller in worker.slots.live if caller.id in silent}
            live = [(now - one.since, id, one.place.at) for id, one in silent.items()]
            if live:
                seconds, id, at = max(live)
                at = at or next((place for *_, place in live if place), "")
            elif ended:
                seconds, id, at = ended[-1].seconds, ended[-1].stream, ended[-1].place
            else:
                continue
            found.append(StalledModel(worker.name, len(live), len(ended), seconds, limit, at, id))
        return found


@final
class _Look:
    """One look at the sessions of a model."""

    def __init__(self, worker: Worker, sign: Callable[[Caller], Sign]) -> None:
        self._worker, self._sign = worker, sign
        self.elsewhere = any(True for _ in getattr(worker.model, "__model_instances__", ()))
        """True if the model runs in processes."""
        self._asking: set[object] | None = None
        self._counts: dict[trio.lowlevel.Task, dict[int, int]] = {}

    def alive(self, caller: Caller, sign: Sign, before: _Silent) -> bool:
        """True if the call has done something since the look before, or could not; notes what was seen."""
        sent, taken = before.sent != sign.sent, before.taken != sign.taken and not self.elsewhere
        before.sent, before.taken = sign.sent, sign.taken
        if sign.held or (sign.asks and self._may_wait(caller)) or (sign.alone and (sent or taken)):
            return True
        number = self._count(caller, sign)
        if number is None:
            return sent  # by one of the calls
        before.number, number = number, before.number
        return number != before.number

    def _may_wait(self, caller: Caller) -> bool:
        """True if a call whose client could send waits for that."""
        if not self.elsewhere:
            return True
        if self._asking is None:
            ask = getattr(self._worker.model, "__model_asking__", None)
            self._asking = set() if ask is None else ask()
        return caller in self._asking

    def _count(self, caller: Caller, sign: Sign) -> int | None:
        """The number of messages in a text that a model has sent, by the variables of its call; None if it is no text."""
        if sign.task is None:
            return None
        if (counts := self._counts.get(sign.task)) is None:
            counts = self._counts[sign.task] = {}
            try:
                for frame in (frame for frames in stacks_of(sign.task) for frame in frames if frame.f_code is _CALL):
                    text = local(frame, "text")
                    if isinstance(text, Continuations):
                        who = id(local(frame, "caller"))
                        counts[who] = counts.get(who, 0) + text.taken
            except Exception:  # an author's objects may do anything when they are looked at
                log.exception("the messages of a model cannot be counted", extra={"model": self._worker.name})
        return counts.get(id(caller))

    def place(self, caller: Caller, sign: Sign) -> Parked:
        """The place where the code of a session waits: in a thread, in a task of its own, or in the model's own work, which
        is that of a batch."""
        try:
            return parked(self._stacks(caller, sign))
        except Exception:  # an author's objects may do anything when they are looked at
            log.exception("the place of a session cannot be found", extra={"model": self._worker.name, "id": caller.id})
            return Parked()

    def _stacks(self, caller: Caller, sign: Sign) -> Iterator[list[Any]]:
        steps = self._worker.stuck.running
        yield from (thread_frames(step.thread) for step, holder in steps if getattr(holder, "caller", None) is caller)
        if sign.task is not None:
            stacks = [*stacks_of(sign.task)]
            own = [frames for frames in stacks if any(_is_call_of(caller, frame) for frame in frames)]
            yield from stacks if sign.alone else own
        yield from (thread_frames(step.thread) for step, holder in steps if getattr(holder, "caller", None) is None)
        if self._worker.task is not None:  # batches on the loop
            yield from (frames for frames in stacks_of(self._worker.task) if frames[-1:] and _is_batch(frames[-1]))


def _is_call_of(caller: Caller, frame: Any) -> bool:
    return frame.f_code is _CALL and local(frame, "caller") is caller


def _is_batch(outermost: Any) -> bool:
    """True for the outermost frame of a task of a batch, and not of the author's `load()`."""
    return str(outermost.f_globals.get("__name__", "")) in ("models.batching", "models.rolling")
