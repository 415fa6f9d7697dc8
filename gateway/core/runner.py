"""Runs exchanges in tasks: decides which runs next, which task may write, and when connections have their turns.

The ten rules of the data path:

1. One task leads (the Leader/Followers pattern, POSA 2). It waits until connections are ready, tells them, and itself runs
   the exchanges that begin thereby. Starting or waking a task costs as much as parsing a small request.
2. An exchange that waits keeps its task. The leader whose exchange waits promotes a follower, so reading never waits for a
   model. Among many tasks, an exchange whose announced body has yet to come has none: it begins when the body is here.
3. A connection has no task. It is called when its transport is ready, and when it has asked for a turn; it never waits.
4. Only the connection writes to its transport, and only in its turn. An exchange queues its answer with the wire; all that
   was queued in one round leaves in one write.
5. Work waits before it sends: first `wait_room`, which can be cancelled, then `push`, which cannot.
6. Credit goes back when bytes are consumed: when `receive` returns them, or when they are in the buffer of a whole body. It
   never goes back because bytes have arrived.
7. The byte budget pays for bytes before they are kept in memory. If it has no room, the exchange is refused. A small body
   that came with its head is kept, and paid, once its work or its answer waits; most are answered at once.
8. An exchange has one ending, and the first decision stays. The ending is decided when the kernel has taken the last byte of
   the answer, not when that byte is queued.
9. Connections, exchanges and the leader have turns, which are bounded in time. A connection works for at most 2 ms, whatever
   it has received. An exchange sends for at most 1 ms. The leader works for at most 5 ms before it asks the kernel for news
   and lets others run. A connection whose last turn was not enough is heavy: it comes after all others, and its exchanges
   do too.
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
from gateway.core.turn import NOBODY, Turn
from gateway.doorbell import Doorbell
from gateway.errors import GatewayError
from gateway.histogram import Histogram
from gateway.net.readiness import ReadinessSource
from gateway.net.tables import shrunk

log = logging.getLogger("gateway")

T = TypeVar("T")

# -- Trio's private names ------------------------------------------------------------------------------------------------
# A task runs one exchange after another, so it must see whether a model has left a scope open, and close it. Trio has no
# public name for either. These are all of its private names that we use.

_PRIVATE = ("_cancel_status", "_child_nurseries", "_activate_cancel_status")
for _name in _PRIVATE:
    if not hasattr(trio.lowlevel.Task, _name):  # pragma: no cover
        raise ImportError(
            f"Trio {trio.__version__} has no Task.{_name}, which gateway/core/runner.py needs: use another Trio"
        )

scope_of: Callable[[trio.lowlevel.Task], Any] = attrgetter("_cancel_status")
"""The innermost scope of a task, as Trio keeps it."""


def close_left_open(task: trio.lowlevel.Task, innermost: Any) -> None:
    """Makes the scope `innermost` the innermost one again, after a model left a scope of its own open. An async generator
    that is abandoned inside a timeout does that. The open scope would cancel the next exchange in this task, and Trio raises
    an error in the code that leaves an outer scope first, which is this module. The task must not be used again: that
    generator may be closed later, and change the task's scopes."""
    log.warning("a model has left a cancel scope or a nursery open")
    for nursery in task.child_nurseries:
        nursery.cancel_scope.cancel()
    task._child_nurseries.clear()
    task._activate_cancel_status(innermost)


# -- the tasks -----------------------------------------------------------------------------------------------------------

_NAME = f"{__name__}.Runner._run"
_current_task = trio.lowlevel.current_task
_MOST_IDLE = 256  # tasks that wait for work; more than that end
_MANY = 512  # tasks; beyond, an exchange begins when its body has
_MOST_HANDED_OUT = 64  # exchanges, at most, that get tasks of their own after exchanges of the leader have waited
_LEAST_GIVEN = 4  # tasks that may start together, at least, however long others have to wait for them
_BEGIN_AT_ONCE = 64  # exchanges that begin between two checks for ready connections
_OWNERS_AT_ONCE = 32  # ready connections that the leader calls before it runs their new exchanges and writes their output
_TURN_SECONDS = 0.005  # seconds that the leader works before other tasks have their turn
_NOW = math.inf  # for a begin from which no turn is counted
_LOOK = 4  # connections that are called, or have their turns, between two looks at the clock
_TURNS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class HasTurns(Protocol):
    """A connection that puts work off until others had their turns."""

    heavy: bool
    """True while its last turn was not enough for it."""

    def turn(self) -> None:
        """Does the work that was put off."""
        ...


@final
class RunnerTask:
    """One task, the exchange it has, and the scope around its work."""

    __slots__ = ("cancel_status", "exchange", "leads", "scope", "since", "spoilt", "task", "turn")

    scope: trio.CancelScope
    cancel_status: Any
    """The scope as Trio keeps it: the innermost one of the task while its work begins, and again when it is over."""

    def __init__(self, exchange: Exchange | None) -> None:
        self.exchange = exchange
        self.leads = exchange is None
        self.since = _NOW
        self.spoilt = False
        self.task = _current_task()
        self.turn = Turn(self.task)

    def tidy(self) -> None:
        """Closes scopes that a model has left open: `close_left_open`."""
        close_left_open(self.task, self.cancel_status)
        self.spoilt = True


@final
class Runner:
    """Runs each exchange in a task that it has to itself, with a cancel scope and context variables of its own.

    The leader is `_run_leader`; `_promote_follower` makes another task lead.

    `work` does the work of an exchange. `blame` turns an exception of that into the error for the client. `conclude` sends
    the error, or, if the scope was cancelled, the reason for that. `blame` and `conclude` contain every exception.

    The leader also gives turns to connections that have put work off: after it has run the exchanges that began, and before
    it waits for news. If there is no leader, the task of `turns` does it.

    No connection or exchange can keep the leader busy for long. It works in rounds, each of a bounded number of exchanges
    and of 5 ms, and asks for news of all connections in every round, even while it has other work. There are two lists, of
    light and of heavy connections, like the new and old flows of RFC 8290 section 5. All light ones come first. Then the
    heavy ones follow, one after the other, until the time is over or a light one is due. The exchanges that begin are in two
    lists as well. If the light ones fill every round, one heavy exchange runs in each of them.
    """

    def __init__(
        self,
        work: Callable[[Exchange], Coroutine[Any, Any, None]],
        blame: Callable[[Exchange, Exception], GatewayError],
        conclude: Callable[[Exchange, GatewayError | None], None],
    ) -> None:
        self.work, self._blame, self._conclude = work, blame, conclude
        self.leading = False
        """True while the leader works; it then writes what is put off before it waits."""
        self._idle: list[RunnerTask] = []
        self._places: dict[trio.lowlevel.Task, RunnerTask] = {}
        self._nursery: trio.Nursery
        self._readiness: ReadinessSource | None = None
        self._telling = False
        self._begun: deque[Exchange] = deque()
        self._begun_heavy: deque[Exchange] = deque()
        self._resting: set[Exchange] = set()  # their work has not begun, as their bodies have not
        self._handed_out = self._own_tasks_left = 0
        self._given_at_once = _MOST_HANDED_OUT  # tasks that may start together so that others run within a turn's time
        self._others = 0.0  # seconds that other tasks ran between the last two rounds
        self._due: list[HasTurns] = []
        self._due_heavy: deque[HasTurns] = deque()
        self.turn_times = Histogram(_TURNS)
        """Seconds that the leader worked each time before others ran."""
        self._bell = Doorbell()
        self._now: Callable[[], float] = trio.current_time

    @property
    def idle(self) -> int:
        """Tasks that wait for an exchange."""
        return len(self._idle)

    def exchange_of(self, task: trio.lowlevel.Task) -> Exchange | None:
        """Returns the exchange that runs in this task; None for other tasks. May be called in any thread."""
        place = self._places.get(task)
        return None if place is None else place.exchange

    def begin(self, nursery: trio.Nursery, readiness: ReadinessSource | None) -> None:
        """Makes its tasks live in this nursery. One of them leads, if there is a `readiness` to wait for."""
        self._nursery, self._readiness = nursery, readiness
        self._now = trio.lowlevel.current_clock().current_time
        self._context = contextvars.copy_context()
        if readiness is not None:
            self._start(None)

    @property
    def resting(self) -> set[trio.lowlevel.Task]:
        """The tasks that have no exchange: those that wait for one, and the one that leads."""
        leads = [place.task for place in self._places.values() if place.leads and place.exchange is None]
        return {*(place.task for place in self._idle), *leads[:1]}

    def rest(self) -> None:
        """Gives back the room of its tables that is empty now."""
        self._places = shrunk(self._places)
        if not self._resting:
            self._resting = set()

    def start(self, exchange: Exchange) -> None:
        """Makes the exchange run when it is its turn."""
        if self._telling:
            (self._begun_heavy if exchange.owner.heavy else self._begun).append(exchange)
        else:
            self._give(exchange)

    def _give(self, exchange: Exchange | None) -> None:
        """Gives the exchange to another task; None: that task leads."""
        if self._idle:
            place = self._idle.pop()
            place.exchange = exchange
            place.leads = exchange is None
            trio.lowlevel.reschedule(place.task)
        else:
            self._start(exchange)

    def _start(self, exchange: Exchange | None) -> None:
        """Starts a task that has the exchange; None: that leads. Among many tasks, an exchange whose body has not come rests
        instead: it holds less than half of the memory, and the garbage collector has less to look at."""
        if len(self._places) > _MANY and exchange is not None and (body := exchange.inbound) is not None and body.rest():
            self._resting.add(exchange)
            return
        # In our context: the task outlives this call, which may come from an embedder's own context. The name is one object
        # for all tasks: Trio would make one for each.
        self._context.run(self._nursery.start_soon, self._run, exchange, name=_NAME)  # type: ignore[arg-type]  # it takes `name`

    def start_again(self, exchange: Exchange) -> None:
        """Makes an exchange that rests run when it is its turn."""
        if exchange in self._resting:  # else the server has ended
            self._resting.discard(exchange)
            self.start(exchange)

    async def _run(self, exchange: Exchange | None) -> None:
        place = RunnerTask(exchange)
        del exchange  # the task outlives it
        self._places[place.task] = place
        try:
            while True:
                # A scope is used until it is cancelled, because entering one costs time.
                with trio.CancelScope() as place.scope:
                    place.cancel_status = scope_of(place.task)
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
            place.turn.start(NOBODY, 0.0)
            place.turn.task = None  # the task's context may refer to the turn: a cycle would keep the last exchange's memory

    async def _serve(self, place: RunnerTask) -> bool:
        """Leads, and runs one exchange after another. True when the scope of one was cancelled, False when this task is
        not needed."""
        while True:
            exchange = place.exchange
            if exchange is not None:
                exchange.begin(place.scope, place.turn, self._now())
                error = None
                work: Coroutine[Any, Any, None] | None = None
                try:
                    work = self.work(exchange)
                    waits = work.send(None)
                except StopIteration:  # it did not wait
                    pass
                except Exception as e:
                    error = self._blame(exchange, e)
                else:
                    if exchange.inbound is None:
                        exchange.pay()
                    waits = resumed(work, waits, place.turn)  # in place of its first trap, which this frame would keep
                    try:
                        await waits
                    except Exception as e:
                        error = self._blame(exchange, e)
                finally:
                    work = waits = None
                    if scope_of(place.task) is not place.cancel_status:
                        self._tidy(place)
                if exchange.leave_scope():
                    error = None  # its traceback refers to this frame: a cycle would keep the exchange's memory
                    return True
                self._done(place, error)
                error = exchange = None  # the error's traceback refers to this frame, and the task outlives the exchange
            # Only a task that was woken to lead does: after an exchange that waited, the exchange's context is still set.
            if place.leads and self._readiness is not None and await self._run_leader(place, self._readiness):
                return True
            if place.spoilt or len(self._idle) >= _MOST_IDLE:
                return False
            await self._wait(place)

    async def _run_leader(self, place: RunnerTask, readiness: ReadinessSource) -> bool:
        """Calls ready connections and runs the exchanges that begin, until one of these has waited and is over. True if its
        scope was cancelled, whichever task leads by then."""
        now = trio.lowlevel.current_clock().current_time
        task, begun, heavy, work_of = place.task, self._begun, self._begun_heavy, self.work
        scope, turn, innermost = place.scope, place.turn, place.cancel_status
        exchange: Exchange | None = None
        at = now()  # when the last exchange was left, or the last look at the clock
        began, left, given = min(place.since, at), _BEGIN_AT_ONCE, 0
        place.since = _NOW
        if at - began > _TURN_SECONDS:
            await trio.lowlevel.checkpoint()
            began = at = now()
        before = task.context
        while place.leads:
            if left and (begun or heavy):
                exchange = begun.popleft() if begun else heavy.popleft()
                left -= 1
                if exchange.gone:  # its client left: a client that opens and resets must not cost a task each time
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
                exchange.begin(scope, turn, at)
                error = None
                task.context = self._context.copy()  # with variables of its own
                try:
                    work = work_of(exchange)
                    waits: Any = task.context.run(work.send, None)
                except StopIteration:  # like most, it did not wait: no task was needed
                    task.context = before
                except Exception as e:
                    task.context = before
                    error = self._blame(exchange, e)
                else:
                    exchange.pay()
                    self._promote_follower(place)
                    waits = resumed(work, waits, turn)
                    try:
                        await waits
                    except Exception as e:
                        error = self._blame(exchange, e)
                finally:
                    if task._cancel_status is not innermost:  # `scope_of`, without the call
                        self._tidy(place)
                if exchange.leave_scope():
                    error = None  # its traceback refers to this frame: a cycle would keep the exchange's memory
                    if place.leads:  # it was cancelled and has not waited: others have not had their turn since `began`
                        place.since = began
                    return True
                if error is None and exchange.outbound.finishing is not None:  # like most: `_done`, without the call
                    place.exchange = None
                    try:
                        exchange.work_done()
                    except Exception as e:
                        exchange.owner.failed(e)
                else:
                    self._done(place, error)
                    error = None  # its traceback refers to this frame: a cycle would keep the exchange's memory
                at = exchange.left_at
                if place.leads:
                    self._handed_out = 0
                if at - began <= _TURN_SECONDS or not place.leads:
                    continue
            crowded = bool(begun)
            self._telling = True  # exchanges that begin meanwhile run in this task
            try:
                # Answers that leave one after the other wake a client once.
                busy = self.write()
                if busy or begun or heavy:  # it will not wait for news
                    readiness.look()
                if told := readiness.tell(_LOOK):
                    busy = True
                    while not told % _LOOK and told < _OWNERS_AT_ONCE and now() - began <= _TURN_SECONDS:
                        told += readiness.tell(_LOOK) or 1  # 1 ends the loop: no more are ready
            finally:
                self._telling = False
            left = _BEGIN_AT_ONCE
            if heavy and crowded:  # else light exchanges could fill every round
                begun.appendleft(heavy.popleft())
            if busy or begun or heavy:
                at = now()
                if at - began > _TURN_SECONDS or given >= self._given_at_once:
                    self.turn_times.observe(at - began)
                    await self._let_others_run(given)
                    began = at = now()
                    given = 0
            else:
                self.leading = False
                exchange = None  # drops the last one: it may be long until the next
                turn.start(NOBODY, 0.0)
                self.turn_times.observe(now() - began)
                await readiness.wait()
                self.leading = True
                began = at = now()
                given = 0
        return False

    async def _let_others_run(self, given: int) -> None:
        """Does a checkpoint. All tasks that were started run before the leader does: if that takes longer than a turn, fewer
        start together next time."""
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
        """Gives the connection a turn, with all others that are due by then: output leaves together."""
        (self._due_heavy if connection.heavy else self._due).append(connection)
        if not self.leading:
            self._bell.wake()

    def write(self) -> bool:
        """Gives the connections that are due their turns, in the calling task. True if some are still due. The heavy ones
        come after all others, and only while no exchange of theirs waits to begin: their turns would begin more."""
        due, heavy = self._due, self._due_heavy
        if not (due or heavy):
            return False
        if due:
            self._due, at, left = [], 0, _LOOK
            began = self._now() if len(due) > _LOOK else _NOW
            for connection in due:
                if connection.heavy:
                    heavy.append(connection)
                else:
                    connection.turn()
                left -= 1
                if not left:
                    at, left = at + _LOOK, _LOOK
                    if self._now() - began > _TURN_SECONDS:
                        self._due[:0] = due[at:]
                        break
        if heavy and not self._begun_heavy:
            # The work that a turn causes in other tasks, such as the ends of all exchanges of a client that leaves, shows
            # only when those run: their time counts for this turn.
            until, self._others = self._now() + _TURN_SECONDS - self._others, 0.0
            for _ in range(len(heavy)):
                heavy.popleft().turn()
                if self._due or self._now() > until:
                    break
        return bool(self._due or heavy)

    async def turns(self) -> None:
        """Gives connections their turns while no task leads. It runs in one task, woken once for all connections that are
        due, and starts tasks, a bounded number at once, for the exchanges that begin."""
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
                if heavy and crowded:  # as in `_run_leader`
                    begun.appendleft(heavy.popleft())
                while (begun or heavy) and given < self._given_at_once:
                    exchange = begun.popleft() if begun else heavy.popleft()
                    if exchange.gone:
                        self._returned(exchange)
                    else:
                        given += 1
                        self._give(exchange)
                    del exchange
                if again or begun or heavy:  # more work is due, and other tasks must have their turn first
                    await self._let_others_run(given)
        finally:
            self._return_begun()

    # -- tasks -------------------------------------------------------------------------------------------------------

    def _promote_follower(self, place: RunnerTask) -> None:
        """Makes another task lead, because the leader's exchange waits. The next exchanges will probably wait as well, and
        all others wait for each new leader. So the next exchanges get tasks of their own: more each time this happens."""
        place.leads = False
        self._handed_out = self._own_tasks_left = min(2 * self._handed_out + 1, _MOST_HANDED_OUT)
        self._give(None)

    def _tidy(self, place: RunnerTask) -> None:
        place.tidy()
        if place.leads:
            self._promote_follower(place)

    def _done(self, place: RunnerTask, error: GatewayError | None) -> None:
        """Concludes the task's exchange, whose work is over."""
        exchange, place.exchange = place.exchange, None
        assert exchange is not None
        if exchange.outbound.finishing is None:  # else its end is queued already
            self._conclude(exchange, error)
        self._returned(exchange)

    def _returned(self, exchange: Exchange) -> None:
        try:
            exchange.work_done()
        except Exception as e:
            exchange.owner.failed(e)

    def _return_begun(self) -> None:
        """Ends the exchanges that got no task: the server ends."""
        for begun in (self._begun, self._begun_heavy):
            while begun:
                self._returned(begun.popleft())
        resting, self._resting = self._resting, set()
        for exchange in resting:
            self._returned(exchange)

    async def _wait(self, place: RunnerTask) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._idle.remove(place)
            return trio.lowlevel.Abort.SUCCEEDED

        place.task.context = self._context.copy()  # from the next step on: models must not see each other's variables
        place.turn.start(NOBODY, 0.0)
        self._idle.append(place)
        await trio.lowlevel.wait_task_rescheduled(abort)


@types.coroutine
def resumed(work: Coroutine[Any, Any, T], trap: Any, turn: Turn) -> Generator[Any, Any, T]:
    """Awaits work that has begun to wait, for this `trap`; after each of its waits a new turn begins."""
    step: Callable[[Any], Any]
    value: Any
    while True:
        try:
            value = yield trap
        except BaseException as e:
            value, step = e, work.throw
        else:
            step = work.send
        turn.begin()
        try:
            trap = step(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        finally:
            # The traceback of a raised outcome refers to this frame: a cycle would keep the model's memory. And the next
            # wait may be long.
            del value, step
