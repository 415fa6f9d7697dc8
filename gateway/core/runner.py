"""The tasks that exchanges run in: which of them runs next, who may write now, and when connections have their turns.

The ten rules of the data path:

1. One task leads (the Leader/Followers pattern, POSA 2). It waits until connections are ready, tells them, and itself runs
   the exchanges that begin thereby. Starting or waking a task costs as much as parsing a small request.
2. An exchange that waits keeps its task. The leader whose exchange waits promotes a follower, so nobody who reads ever waits
   for a model.
3. A connection has no task. It is called when its transport is ready, and when it has asked for a turn; it never waits.
4. Only the connection writes to its transport, and only in its turn. An exchange queues its answer with the wire; all that
   was queued in one round leaves in one write.
5. Work waits before it speaks: first `wait_room`, which can be cancelled, then `push`, which cannot.
6. Credit goes back when bytes are consumed: when `receive` returns them, or when they are in the buffer of a whole body. It
   never goes back because bytes have arrived.
7. The byte budget pays for whatever waits in memory before it is kept there. Without room the exchange is refused.
8. An exchange has one ending, and the first decision stays. The return receipt of its last byte is that the kernel has taken
   it: then, and not when it is queued, the ending is decided.
9. Work is shared out in turns of time: a connection works for two milliseconds at most, whatever it has received, an
   exchange sends for one, and the leader works for five before it asks the kernel for news and lets others run. Small
   requests go first: a connection whose last turn was not enough for it, which is then heavy, comes after all others,
   and so do its exchanges.
10. An error stays where it belongs. An error in the work is the exchange's ending; an error outside of it ends the
    connection; neither ends the server.
"""

from __future__ import annotations

import contextvars
import logging
import math
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from operator import attrgetter
from typing import Any, Protocol, TypeVar, final

import trio

from gateway.core.exchange import Exchange
from gateway.core.turn import Turn
from gateway.doorbell import Doorbell
from gateway.errors import GatewayError
from gateway.histogram import Histogram
from gateway.net.readiness import ReadinessSource

log = logging.getLogger("gateway")

T = TypeVar("T")

# -- Trio's private names ------------------------------------------------------------------------------------------------
# A task runs one exchange after another, so it must see whether a model has left a scope open, and close it. Trio has no
# public word for either. These are all of its private names that we use.

_PRIVATE = ("_cancel_status", "_child_nurseries", "_activate_cancel_status")
for _name in _PRIVATE:
    if not hasattr(trio.lowlevel.Task, _name):  # pragma: no cover
        raise ImportError(
            f"Trio {trio.__version__} has no Task.{_name}, which gateway/core/runner.py needs: use another Trio"
        )

scope_of: Callable[[trio.lowlevel.Task], Any] = attrgetter("_cancel_status")
"""The innermost scope of a task, as Trio keeps it."""


def close_left_open(task: trio.lowlevel.Task, innermost: Any) -> None:
    """Makes a scope the innermost one again: a model has left one of its own open, as an async generator does that is given
    up inside of a timeout. It would cancel whatever comes next in this task, and Trio makes whoever leaves an outer scope
    first, which is us, pay for it. The task must not be used again: that generator may still be closed one day, and change
    it."""
    log.warning("a model has left a cancel scope or a nursery open")
    for nursery in task.child_nurseries:
        nursery.cancel_scope.cancel()
    task._child_nurseries.clear()
    task._activate_cancel_status(innermost)


# -- the tasks -----------------------------------------------------------------------------------------------------------

_MOST_IDLE = 256  # tasks that wait for work; more than that end
_MOST_HANDED_OUT = 64  # exchanges, at most, that get tasks of their own after the leader's have waited
_LEAST_GIVEN = 4  # such tasks that start together, at least, however long others have to wait for them
_BEGIN_AT_ONCE = 64  # exchanges that begin between two looks at what is ready
_OWNERS_AT_ONCE = 32  # owners that the leader tells before what begins thereby runs, and what they have to write is written
_TURN_SECONDS = 0.005  # seconds that the leader works before other tasks have their turn
_NOW = math.inf  # other tasks have just had it
_LOOK = 4  # connections that are told, or have their turns, between two looks at the clock
_TURNS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class HasTurns(Protocol):
    """A connection, which puts off what it does until others had their turn."""

    heavy: bool
    """True while its last turn was not enough for it."""

    def turn(self) -> None:
        """Does the work that was put off."""
        ...


@final
class RunnerTask:
    """One task, the exchange it has, and the scope around its work."""

    __slots__ = ("cancel_status", "context", "exchange", "leads", "scope", "since", "spoilt", "task", "turn")

    def __init__(self, exchange: Exchange | None) -> None:
        self.exchange = exchange
        self.leads = exchange is None
        self.since = _NOW
        self.spoilt = False
        self.task = trio.lowlevel.current_task()
        self.turn = Turn(self.task)
        self.context = self.task.context.copy()
        self.scope: trio.CancelScope

    def entered(self) -> None:
        """The scope is the innermost one of the task."""
        self.cancel_status = scope_of(self.task)

    def tidy(self) -> None:
        """See `close_left_open`."""
        close_left_open(self.task, self.cancel_status)
        self.spoilt = True


@final
class Runner:
    """Runs each exchange in a task that it has for itself, with a cancel scope and context variables of its own.

    The leader is `_run_leader`; `_promote_follower` makes another task lead.

    `work` does what the exchange asks for; `blame` makes of what that raises, if it does, the error that is to be said;
    `conclude` says it, and that it was interrupted instead where its scope was cancelled. These two contain every exception.

    The leader also gives their turns to connections that have put something off, after what has begun and before it waits
    for news; where nobody leads, a task of its own does (`turns`).

    No task has the leader to itself: the leader works in rounds, each of a bounded number of exchanges and of five
    milliseconds. Every round asks for news of all the others, even if there is enough to do without. There are two lists, of
    light connections and of heavy ones, like the new and the old flows of RFC 8290 section 5: all of the light ones come
    first, then the heavy ones one after the other until the time is over or a light one is due. The exchanges that begin are
    in two lists as well. If the light ones alone fill every round, one of the heavy ones comes in between.
    """

    def __init__(
        self,
        work: Callable[[Exchange], Coroutine[Any, Any, None]],
        blame: Callable[[Exchange, Exception], GatewayError],
        conclude: Callable[[Exchange, GatewayError | None], None],
    ) -> None:
        self.work, self._blame, self._conclude = work, blame, conclude
        self.leading = False
        """True if the leader is at work: it writes what is put off before it waits."""
        self._idle: list[RunnerTask] = []
        self._places: dict[trio.lowlevel.Task, RunnerTask] = {}
        self._nursery: trio.Nursery
        self._readiness: ReadinessSource | None = None
        self._telling = False
        self._begun: deque[Exchange] = deque()
        self._begun_heavy: deque[Exchange] = deque()
        self._handed_out = self._own_tasks_left = 0
        self._given_at_once = _MOST_HANDED_OUT  # as many as have let others run again within a turn's time
        self._others = 0.0  # seconds that those who ran between the last two rounds have taken
        self._due: list[HasTurns] = []
        self._due_heavy: deque[HasTurns] = deque()
        self.turn_times = Histogram(_TURNS)
        """How long the leader worked each time before others ran."""
        self._bell = Doorbell()
        self._now: Callable[[], float] = trio.current_time

    @property
    def idle(self) -> int:
        """Tasks that wait for an exchange."""
        return len(self._idle)

    def exchange_of(self, task: trio.lowlevel.Task) -> Exchange | None:
        """The one that runs in this task; None for tasks of others. May be called in any thread."""
        place = self._places.get(task)
        return None if place is None else place.exchange

    def begin(self, nursery: trio.Nursery, readiness: ReadinessSource | None) -> None:
        """Tasks live in this nursery; one of them leads, where there is something to be told."""
        self._nursery, self._readiness = nursery, readiness
        self._now = trio.lowlevel.current_clock().current_time
        self._context = contextvars.copy_context()
        if readiness is not None:
            nursery.start_soon(self._run, None)

    @property
    def resting(self) -> set[trio.lowlevel.Task]:
        """The tasks that have no exchange: those that wait for one, and the one that leads."""
        leads = [place.task for place in self._places.values() if place.leads and place.exchange is None]
        return {*(place.task for place in self._idle), *leads[:1]}

    def start(self, exchange: Exchange) -> None:
        """The exchange runs when it is its turn."""
        if self._telling:
            (self._begun_heavy if exchange.owner.heavy else self._begun).append(exchange)
        else:
            self._give(exchange)

    def _give(self, exchange: Exchange | None) -> None:
        """To another task, as its work; None: to lead."""
        if self._idle:
            place = self._idle.pop()
            place.exchange, place.leads = exchange, exchange is None
            trio.lowlevel.reschedule(place.task)
        else:
            # in our context: the task stays, and whoever calls here may be a connection of an embedder's
            self._context.run(self._nursery.start_soon, self._run, exchange)

    async def _run(self, exchange: Exchange | None) -> None:
        place = RunnerTask(exchange)
        del exchange  # which this task outlives
        self._places[place.task] = place
        try:
            while True:
                # a scope is used until it is cancelled: entering one is not cheap either
                with trio.CancelScope() as place.scope:
                    place.entered()
                    if not await self._serve(place):
                        return
                assert place.exchange is not None
                self._done(place, place.exchange.interruption_or_deadline)
                if place.spoilt:
                    return
        except BaseException:  # the server ends
            if place.exchange is not None:
                place.exchange.leave_scope()
                self._returned(place.exchange)
            self._return_begun()
            raise
        finally:
            del self._places[place.task]
            place.turn.end()
            place.turn.task = None  # its context may know the turn: a cycle would keep the last exchange's memory

    async def _serve(self, place: RunnerTask) -> bool:
        """Leads, and runs one exchange after another. True when the scope of one was cancelled, False when this task is
        not needed."""
        while True:
            exchange = place.exchange
            if exchange is not None:
                exchange.begin(place.scope, place.turn)
                error = None
                work: Coroutine[Any, Any, None] | None = None
                try:
                    work = self.work(exchange)
                    trap = work.send(None)
                except StopIteration:  # it did not wait
                    pass
                except Exception as e:
                    error = self._blame(exchange, e)
                else:
                    try:
                        await resumed(work, trap, place.turn)
                    except Exception as e:
                        error = self._blame(exchange, e)
                finally:
                    work = trap = None
                    if scope_of(place.task) is not place.cancel_status:
                        self._tidy(place)
                if exchange.leave_scope():
                    error = None  # it knows this frame: a cycle would keep the exchange's memory
                    return True
                self._done(place, error)
                error = exchange = None  # the one knows this frame, and the task outlives the other
            # only who was woken for it: after an exchange that has waited, its context variables are still about
            if place.leads and self._readiness is not None and await self._run_leader(place, self._readiness):
                return True
            if place.spoilt or len(self._idle) >= _MOST_IDLE:
                return False
            await self._wait(place)

    async def _run_leader(self, place: RunnerTask, readiness: ReadinessSource) -> bool:
        """Tells who is ready, until one of the exchanges that begin thereby has waited and is over. True when its
        scope was cancelled, whoever leads by then."""
        now = trio.lowlevel.current_clock().current_time
        task, begun, heavy, work_of = place.task, self._begun, self._begun_heavy, self.work
        exchange: Exchange | None = None
        began, left, given = min(place.since, now()), _BEGIN_AT_ONCE, 0
        place.since = _NOW
        if now() - began > _TURN_SECONDS:
            await trio.lowlevel.checkpoint()
            began = now()
        while place.leads:
            if left and (begun or heavy):
                exchange = begun.popleft() if begun else heavy.popleft()
                left -= 1
                if exchange.gone:  # its client has left meanwhile, and whoever opens and resets may not have a task for each
                    self._returned(exchange)
                    continue
                if self._own_tasks_left:
                    self._own_tasks_left -= 1
                    given += 1
                    self._give(exchange)
                    if given >= self._given_at_once:
                        left = 0
                    continue
                place.exchange = exchange
                exchange.begin(place.scope, place.turn)
                error = None
                before, task.context = task.context, place.context.copy()  # with variables of its own
                try:
                    work = work_of(exchange)
                    trap = task.context.run(work.send, None)
                except StopIteration:  # it did not wait, as most do not: nothing was made to await it
                    task.context = before
                except Exception as e:
                    task.context = before
                    error = self._blame(exchange, e)
                else:
                    self._promote_follower(place)
                    try:
                        await resumed(work, trap, place.turn)
                    except Exception as e:
                        error = self._blame(exchange, e)
                finally:
                    if scope_of(task) is not place.cancel_status:
                        self._tidy(place)
                if exchange.leave_scope():
                    error = None  # it knows this frame: a cycle would keep the exchange's memory
                    if place.leads:  # it was cancelled and has not waited: the turn of the others is as due as before
                        place.since = began
                    return True
                if error is None and exchange.outbound.finishing is not None:  # as most: this is `_done`, without a call
                    place.exchange = None
                    try:
                        exchange.work_done()
                    except Exception as e:
                        exchange.owner.failed(e)
                else:
                    self._done(place, error)
                    error = None  # it knows this frame: a cycle would keep the exchange's memory
                if place.leads:
                    self._handed_out = 0
                if not place.leads or exchange.left_at - began <= _TURN_SECONDS:
                    continue
            crowded = bool(begun)
            self._telling = True  # exchanges that begin meanwhile are this task's
            try:
                # answers that leave one after the other wake a client once
                busy = self.write()
                if busy or begun or heavy:  # it will not wait for news
                    readiness.look()
                if told := readiness.tell(_LOOK):
                    busy = True
                    while not told % _LOOK and told < _OWNERS_AT_ONCE and now() - began <= _TURN_SECONDS:
                        told += readiness.tell(_LOOK) or 1  # 1 ends the loop where nothing was left to tell
            finally:
                self._telling = False
            left = _BEGIN_AT_ONCE
            if heavy and crowded:  # else those could have every round to themselves
                begun.appendleft(heavy.popleft())
            if busy or begun or heavy:
                spent = now() - began
                if spent > _TURN_SECONDS or given >= self._given_at_once:
                    self.turn_times.observe(spent)
                    await self._let_others_run(given)
                    began, given = now(), 0
            else:
                self.leading = False
                exchange = None  # the last one: it may be long until the next
                place.turn.end()
                self.turn_times.observe(now() - began)
                await readiness.wait()
                self.leading = True
                began, given = now(), 0
        return False

    async def _let_others_run(self, given: int) -> None:
        """A checkpoint. Tasks that were started run by it, all of them before the leader does: if that takes longer than a
        turn, fewer start together next time."""
        began = self._now()
        await trio.lowlevel.checkpoint()
        self._others = self._now() - began
        if given:
            if self._others > _TURN_SECONDS:
                self._given_at_once = max(given // 2, _LEAST_GIVEN)
            else:
                self._given_at_once = min(2 * self._given_at_once, _MOST_HANDED_OUT)

    # -- the turns of connections ----------------------------------------------------------------------------------------

    def turn_soon(self, connection: HasTurns) -> None:
        """The connection has its turn with all others that are due by then: what became ready until then leaves together."""
        (self._due_heavy if connection.heavy else self._due).append(connection)
        if not self.leading:
            self._bell.wake()

    def write(self) -> bool:
        """The turns of those that are due, by the task that made them so; True where some are due by then. The heavy ones
        come after all others, where none of their exchanges waits for its own turn: only what they have received makes
        more work."""
        due = self._due
        if due:
            self._due, number = [], 0
            began = self._now() if len(due) > _LOOK else 0.0
            for number, connection in enumerate(due, 1):
                if connection.heavy:
                    self._due_heavy.append(connection)
                else:
                    connection.turn()
                    if not number % _LOOK and number < len(due) and self._now() - began > _TURN_SECONDS:
                        break
            if number < len(due):
                self._due = due[number:] + self._due
        heavy = self._due_heavy
        if heavy and not self._begun_heavy:
            # a turn may make others run, such as the ends of all exchanges of a client that leaves: their time counts here
            until, self._others = self._now() + _TURN_SECONDS - self._others, 0.0
            for _ in range(len(heavy)):
                heavy.popleft().turn()
                if self._due or self._now() > until:
                    break
        return bool(self._due or heavy)

    async def turns(self) -> None:
        """One task, woken once for all connections that have something put off while nobody leads: it writes for those whose
        transport is not full, and starts tasks, a bounded number at once, for what their turns have begun."""
        begun, heavy = self._begun, self._begun_heavy
        try:
            while True:
                while not (self._due or self._due_heavy or begun or heavy):
                    await self._bell.wait()
                crowded = bool(begun)
                self._telling, given = True, 0
                try:
                    again = self.write()
                finally:
                    self._telling = False
                if heavy and crowded:  # as the leader does
                    begun.appendleft(heavy.popleft())
                while (begun or heavy) and given < self._given_at_once:
                    exchange = begun.popleft() if begun else heavy.popleft()
                    if exchange.gone:
                        self._returned(exchange)
                    else:
                        given += 1
                        self._give(exchange)
                    del exchange
                if again or begun or heavy:  # they are not alone
                    await self._let_others_run(given)
        finally:
            self._return_begun()

    # -- places ------------------------------------------------------------------------------------------------------

    def _promote_follower(self, place: RunnerTask) -> None:
        """Makes another task lead: the leader's exchange waits. The next exchanges will probably wait too, and each time the
        others would wait for a new leader, so they get tasks of their own: the more, the more often this happens in a
        row."""
        place.leads = False
        self._handed_out = self._own_tasks_left = min(2 * self._handed_out + 1, _MOST_HANDED_OUT)
        self._give(None)

    def _tidy(self, place: RunnerTask) -> None:
        place.tidy()
        if place.leads:
            self._promote_follower(place)

    def _done(self, place: RunnerTask, error: GatewayError | None) -> None:
        """Its exchange has left."""
        exchange, place.exchange = place.exchange, None
        assert exchange is not None
        if exchange.outbound.finishing is None:  # else there is nothing to be said
            self._conclude(exchange, error)
        self._returned(exchange)

    def _returned(self, exchange: Exchange) -> None:
        try:
            exchange.work_done()
        except Exception as e:
            exchange.owner.failed(e)

    def _return_begun(self) -> None:
        """The server ends: what has not had a task will have none."""
        for begun in (self._begun, self._begun_heavy):
            while begun:
                self._returned(begun.popleft())

    async def _wait(self, place: RunnerTask) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._idle.remove(place)
            return trio.lowlevel.Abort.SUCCEEDED

        place.task.context = place.context.copy()  # from the next step on: what one model has set is not another's
        place.turn.end()
        self._idle.append(place)
        await trio.lowlevel.wait_task_rescheduled(abort)


@types.coroutine
def resumed(work: Coroutine[Any, Any, T], trap: Any, turn: Turn) -> Generator[Any, Any, T]:
    """Awaits what has begun to wait, for this `trap`; after each of its waits there is a new turn."""
    step: Callable[[Any], Any]
    value: Any
    while True:
        try:
            value, step = (yield trap), work.send
        except BaseException as e:
            value, step = e, work.throw
        turn.begin()
        try:
            trap = step(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            value = None  # an outcome that was raised knows this frame: a cycle would keep the model's memory
