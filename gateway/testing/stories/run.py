"""Runs a simulation under one seed, and checks invariants after the steps of its tasks."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, final

import outcome
import trio
from trio.testing import MockClock

from gateway.core.connection import Connection
from gateway.core.exchange import Exchange
from gateway.errors import Ending
from gateway.gateway import Gateway
from gateway.net.readiness import Poller
from gateway.net.transport import MemoryTransport, memory_pair
from gateway.testing.invariants import broken_ledgers, left_over
from gateway.testing.log_capture import brief, errors_logged
from gateway.testing.memory import MemoryEdges
from gateway.testing.network import Link
from gateway.testing.processes import MemoryProcess
from gateway.testing.seeding import seeded
from gateway.testing.stories.hostile import DRAINED, ENDS, UNANSWERED, Hostile
from gateway.testing.stories.lines import Line
from gateway.testing.stories.models import Cast, PlannedTalk
from gateway.testing.stories.plan import CALM, HostilePlan, LinePlan, Mishap, Plan, Swizzle, plan
from gateway.testing.stories.talk import Deceit, View
from gateway.wires.http2 import HTTP2Wire
from gateway.workers.states import State
from protocols.http2.connection import HTTP2Connection

_END = 400.0
"""Virtual seconds after which a run counts as hanging."""
_SPIN = 100_000
"""Steps of one task without virtual time after which it counts as spinning."""
_LOOK = 8
"""Steps between two checks of the ledgers."""
_STILL = 1.0
"""Virtual seconds within which a call must move if only the gateway delays it."""
_QUIET = 45.0
"""Virtual seconds after the last client within which all is over: the longest stall of a network, and every timeout."""
_OUTLIVE = 1.5
"""Virtual seconds that a session may outlive its worker: the clean-up of models takes less."""
_GRACE = 5.0
"""Virtual seconds of a drain beyond its deadline, for goodbyes and the clean-up of models."""
_LOGGED = (
    *("model raised", "model crashed", "model given up", "model stopped late"),
    *("instance killed", "instance ended", "instance given up"),
)
"""Errors that the faults of models log."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a run. `trace` is the hash of all steps and events: it is the same in each run of a seed."""

    seed: int
    problems: tuple[str, ...]
    trace: str
    steps: int
    seconds: float
    """Virtual seconds of the run."""
    calls: int
    endings: dict[str, int]
    lines: tuple[str, ...]
    """The trace, or its last lines."""


def run_seed(seed: int, *, keep: int | None = 40, hub: bool = Poller.available) -> Outcome:
    """Runs the plan of a seed. `keep` is the number of last lines of the trace to keep; None: all."""
    return run_plan(plan(seed, hub=hub), keep=keep)


def run_plan(chosen: Plan, *, keep: int | None = 40) -> Outcome:
    """Runs a plan."""
    with seeded(chosen.seed), errors_logged() as logged, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = Simulation(chosen, keep)
        try:
            trio.run(run.main, clock=MockClock(autojump_threshold=0), instruments=[run])
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            run.report(f"8: {brief(e)} came out")
        run.check()
    for record in logged:
        if record.getMessage() not in _LOGGED:
            error = record.exc_info[1] if record.exc_info else None
            run.report(f"8: logged: {record.getMessage()}: {brief(error) if error else ''}")
    for warning in warned:
        run.report(f"3: warning: {warning.message}")
    return run.outcome()


class _Ordered(dict[Any, None]):
    """A set in order of insertion, in place of the gateway's sets that are iterated."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    def remove(self, item: Any) -> None:
        del self[item]


@final
class Simulation(trio.abc.Instrument):
    """One run."""

    def __init__(self, chosen: Plan, keep: int | None) -> None:
        self.plan = chosen
        self.problems: list[str] = []
        self._hash, self._lines = hashlib.blake2b(digest_size=8), deque[str](maxlen=keep)
        self.steps, self._now = 0, 0.0
        self._spun: Counter[Any] = Counter()
        self.cast = Cast(chosen, self.report, self.tell)
        self.gateway = Gateway(chosen.config, self.cast.specs(), wall_clock=lambda: self._now)
        self._edges = MemoryEdges() if chosen.hub else None
        self.gateway.acceptor.poller = Poller(self._edges) if self._edges is not None else None
        self._order()
        self._lines_of: dict[str, Line] = {}
        self._ends: dict[Line, MemoryTransport] = {}
        self._root: trio.Nursery
        self._exchanges: dict[Exchange, list[Ending]] = {}
        self._hostile: list[Hostile] = []
        self.draining_at: float | None = None
        self._stopped_at: float | None = None
        self._crashed: dict[str, float] = {}
        self.cast.lost = self._lost
        self._bereft: list[tuple[float, str, list[Exchange]]] = []

    def _order(self) -> None:
        """Replaces the gateway's sets: their order depends on addresses, which no seed decides."""
        gateway: Any = self.gateway
        gateway.server.connections, gateway.acceptor.arriving, live = _Ordered(), _Ordered(), _Ordered()
        gateway.observer.live = live
        for worker in gateway.supervisor.workers.values():
            worker.slots.live, worker.slots.waiting = _Ordered(), _Ordered()
        self._closed = gateway.server.exchange_closed
        self._opened = live.add
        gateway.server.exchange_opened, gateway.server.exchange_closed = self._exchange_opened, self._exchange_closed

    # -- the trace -----------------------------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """One line of the trace."""
        line = f"{self._now:10.5f} {self.steps:7d} {text}"
        self._hash.update(line.encode())
        self._lines.append(line)

    def report(self, problem: str) -> None:
        """An invariant does not hold; its number is first."""
        if len(self.problems) < 10 and problem not in self.problems:
            self.problems.append(problem)
            self.tell(f"PROBLEM {problem}")

    def outcome(self) -> Outcome:
        endings = Counter(str(e.value) for ended in self._exchanges.values() for e in ended[:1])
        return Outcome(
            seed=self.plan.seed, problems=tuple(self.problems), trace=self._hash.hexdigest(), steps=self.steps,
            seconds=round(self._now, 3), calls=len(self._exchanges), endings=dict(sorted(endings.items())),
            lines=tuple(self._lines),
        )  # fmt: skip

    # -- exchanges -----------------------------------------------------------------------------------------------------

    def _exchange_opened(self, exchange: Exchange) -> None:
        self._opened(exchange)
        self._exchanges[exchange] = []
        talk = self.cast.named(exchange.query.decode())
        if talk is None:
            return  # it belongs to a hostile client
        if talk.exchange is not None:
            self.report(f"1: {talk.name}: its request arrived twice")
        talk.exchange, talk.opened_at = exchange, self._now
        self.tell(f"{talk.name} opens")

    def _exchange_closed(self, exchange: Exchange) -> None:
        endings = self._exchanges[exchange]
        assert exchange.ending is not None
        endings.append(exchange.ending)
        talk = self.cast.named(exchange.query.decode())
        self.tell(f"{talk.name if talk else exchange.id} ends: {exchange.ending.value}")
        if len(endings) == 1:
            self._closed(exchange)
        if exchange.held:
            self.report(f"5: {exchange.query.decode()}: closed, and holds {exchange.held} bytes")

    # -- the instrument ------------------------------------------------------------------------------------------------

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1
        now = trio.current_time()
        if now > self._now:
            self._now = now
            self._spun.clear()
            self._watch(now)
        self._hash.update(task.name.encode())
        self._spun[task] += 1
        if self._spun[task] == _SPIN:
            self.report(f"11: {task.name} spins")
            task._next_send = outcome.Error(RuntimeError("it spins"))

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.steps % _LOOK == 0 and len(self.problems) < 10:
            for broken in broken_ledgers(self.gateway):
                self.report(f"4: {broken} after a step of {task.name}")

    def _watch(self, now: float) -> None:
        """Checks that calls move if only the gateway delays them, and that no session outlives its worker."""
        self._watch_workers(now)
        for talk in self.cast.talks.values():
            if talk.view is not View.PENDING or talk.exchange is None or talk.left:
                continue
            progress = talk.progress
            if progress != talk.moved or not self._runnable(talk):
                talk.moved, talk.moved_at = progress, now
            elif now - talk.moved_at > _STILL:
                self.report(f"11: {talk.name} has not moved since {talk.moved_at:.3f}")
                talk.moved_at = now

    def _watch_workers(self, now: float) -> None:
        for name, worker in self.gateway.supervisor.workers.items():
            crashed = worker.crashes[-1] if worker.crashes else 0.0
            if crashed > self._crashed.get(name, 0.0):
                self._crashed[name] = crashed
                self._bereft.append((now + _OUTLIVE, name, [one for one in worker.slots.live if isinstance(one, Exchange)]))
        while self._bereft and self._bereft[0][0] < now:
            _, name, sessions = self._bereft.pop(0)
            worker = self.gateway.supervisor.workers[name]
            if left := [exchange.query.decode() for exchange in sessions if exchange in worker.slots.live]:
                self.report(f"7: {', '.join(left)} outlived the worker of {name}")

    def _lost(self, process: MemoryProcess, talks: list[PlannedTalk]) -> None:
        """Notes the calls that a process has ended with. The gateway may learn of that later than its stream ends."""
        exchanges = [talk.exchange for talk in talks if talk.exchange is not None]
        self._bereft.append((trio.current_time() + _OUTLIVE, process.plan.name, exchanges))

    def _runnable(self, talk: PlannedTalk) -> bool:
        line = self._lines_of[talk.name]
        if not talk.plan.calm or not line.plan.calm or line.link is not None or self.draining_at is not None:
            return False
        worker = self.gateway.supervisor.workers.get(talk.plan.model)
        if worker is None or not talk.plan.model.endswith(CALM):
            return False
        # another call whose answer is not read may block the connection
        if any(not other.plan.calm for other in line.talks):
            return False
        if talk.begun > 0:
            return True
        assert talk.exchange is not None
        return worker.state is State.READY and worker.slots.in_use < self.plan.slots and worker.slots.room_for(talk.exchange)

    # -- the run -------------------------------------------------------------------------------------------------------

    async def main(self) -> None:
        """Runs the whole plan, and then checks what is left."""
        with trio.move_on_after(_END) as scope:
            async with trio.open_nursery() as self._root:
                await self._root.start(self._serve)
                async with trio.open_nursery() as clients, trio.open_nursery() as chaos:
                    for line in self.plan.lines:
                        clients.start_soon(self._connect(line).run)
                    for hostile in self.plan.hostile:
                        clients.start_soon(self._attacked, hostile)
                    chaos.start_soon(self._crash)
                    for mishap in self.plan.mishaps:
                        chaos.start_soon(self._befall, mishap)
                    for swizzle in self.plan.swizzles:
                        chaos.start_soon(self._swizzle, swizzle)
                    chaos.start_soon(self._drain)
                self.tell("all clients are gone")
                await self._until_quiet()
                self._root.cancel_scope.cancel()
        for process in self.cast.processes:
            if process.alive:
                self.report(f"3: process {process.plan.number} of {process.plan.name} outlived the gateway")
        if scope.cancelled_caught:
            pending = [talk.name for talk in self.cast.talks.values() if talk.view is View.PENDING and not talk.unopened]
            self.report(f"11: it hangs; pending: {pending}, left: {left_over(self.gateway)}")

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        await self.gateway.serve(task_status=task_status)
        self._stopped_at = trio.current_time()
        self.tell("the gateway has stopped")

    def _connect(self, chosen: LinePlan) -> Line:
        link = Link(chosen.network, self.plan.capacity) if chosen.network is not None else None
        ours, theirs = memory_pair(self.plan.capacity) if link is None else (link.client, link.server)
        talks = [self.cast.talks[talk.name] for talk in chosen.talks]
        line = Line(chosen, talks, ours, link, self.plan.seed, self._survived)
        self._ends[line] = theirs
        for talk in talks:
            self._lines_of[talk.name] = line
        if link is not None:
            self._root.start_soon(link.run)
        self._root.start_soon(self._attach, theirs)
        return line

    async def _attacked(self, chosen: HostilePlan) -> None:
        ours, theirs = memory_pair(self.plan.capacity)
        self._root.start_soon(self._attach, theirs)
        hostile = Hostile(chosen, ours)
        self._hostile.append(hostile)
        await hostile.run()
        self.tell(f"{chosen.name} ({chosen.hostility.value}, {chosen.transport}) is ended by {hostile.ended}")

    def _survived(self, line: Line, client: HTTP2Connection) -> None:
        """Checks that both ends of an idle connection agree on its window, and that the whole window is free."""
        found = [c for c in self.gateway.server.connections if isinstance(c, Connection) and self._serves(c, line)]
        if not found or not isinstance(found[0].wire, HTTP2Wire) or found[0].exchanges:
            return  # a model in its clean-up has not read all that it was sent
        server = found[0].wire._machine
        heard = all(talk.view is View.COMPLETE for talk in line.talks)  # otherwise a client has not credited unread bytes
        for here, there, whose in ((server, client, "server"), (client, server, "client"))[: 1 + heard]:
            windows, allowed = here.windows(), there._h2.outbound_flow_control_window
            kept = windows.keys() - {0, *server._lingering}
            if kept or windows[0].unread or windows[0].available != allowed:
                self.report(f"4: {line.plan.name} at rest: the {whose}'s windows are {windows}, {allowed} may be sent")

    def _serves(self, connection: Connection, line: Line) -> bool:
        below: Any = connection.transport
        return getattr(below, "below", below) is self._ends[line]

    async def _attach(self, theirs: MemoryTransport) -> None:
        if self.gateway.acceptor.nursery is None:
            theirs.close()
        elif self._edges is not None:
            await self.gateway.acceptor.serve_watchable(self._edges.watchable(theirs))
        else:
            await self.gateway.acceptor.serve_transport(theirs)

    async def _crash(self) -> None:
        for at, model in self.plan.crashes:
            await trio.sleep_until(at)
            self.tell(f"{model} crashes")
            self.cast.crashes[model].ring()

    async def _befall(self, mishap: Mishap) -> None:
        if mishap.at is not None:
            await trio.sleep_until(mishap.at)
            self.cast.befalls(mishap)

    async def _swizzle(self, swizzle: Swizzle) -> None:
        links = {line.plan.name: line.link for line in self._lines_of.values()}
        await trio.sleep_until(swizzle.at)
        for pause, name in swizzle.stop:
            await trio.sleep(pause)
            self.tell(f"{name} is clogged")
            if (link := links[name]) is not None:
                link.clog()
        for pause, name in swizzle.go:
            await trio.sleep(pause)
            self.tell(f"{name} is let go")
            if (link := links[name]) is not None:
                link.unclog()

    async def _drain(self) -> None:
        if self.plan.drain_at > _END:
            return
        await trio.sleep_until(self.plan.drain_at)
        self.draining_at = trio.current_time()
        self.tell("drain")
        self.gateway.begin_drain()
        drain = self.plan.config.drain
        grace = _GRACE + self.plan.unloading + 0.1
        with trio.move_on_after(drain.delay + drain.timeout + 0.01):
            await self.gateway.stopped()
        for exchange in self.gateway.observer.live:
            if exchange.interruption is None and exchange.outbound.finishing is None and exchange.ending is None:
                self.report(f"9: {exchange.query.decode()}: the drain's deadline is over, and nobody has told it")
        with trio.move_on_after(grace) as scope:
            await self.gateway.stopped()
        if scope.cancelled_caught:
            allowed = drain.delay + drain.timeout + grace
            self.report(f"9: the drain is not over after {allowed:g} s; left: {left_over(self.gateway)}")

    async def _until_quiet(self) -> None:
        with trio.move_on_after(_QUIET):
            while left_over(self.gateway):  # noqa: ASYNC110  # there is no event for it
                await trio.sleep(0.05)
        for name, worker in self.gateway.supervisor.workers.items():
            for one in self.gateway.models[name].instances if worker.ready else ():
                if one.sessions:
                    self.report(f"3: {one.sessions} sessions are left in process {one.number} of {name}")
        if self.gateway.acceptor.nursery is not None and (left := left_over(self.gateway)):
            names = [talk.name for talk in self.cast.talks.values() if talk.begun > talk.over]
            self.report(f"3: {_QUIET:g} s after the last client there are {', '.join(left)}; models of {names}")

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks the invariants at the end of a run. Their numbers are those of the fault model."""
        for exchange, endings in self._exchanges.items():
            if len(endings) != 1:
                self.report(f"2: {exchange.query.decode()} ended {len(endings)} times: {[e.value for e in endings]}")
        for talk in self.cast.talks.values():
            if talk.name in self._lines_of:
                self._check(talk)
        for hostile in self._hostile:
            owed = ENDS[hostile.plan.hostility, hostile.plan.transport]
            drained = self.draining_at is not None and hostile.ended in DRAINED
            pinged = self.plan.config.websocket.ping_interval > 0
            unanswered = pinged and (hostile.plan.hostility, hostile.plan.transport, hostile.ended) == UNANSWERED
            if hostile.ended != owed and not (drained or unanswered):
                self.report(f"7: {hostile.plan.name}: ended by {hostile.ended}, which should be {owed}")
        budget = self.gateway.budget
        if budget.used:
            self.report(f"5: {budget.used} bytes of the budget are in use for ever")
        if budget.high_water > budget.limit:
            self.report(f"5: {budget.high_water} bytes were in use, {budget.limit} are allowed")
        report = self.gateway.drain_report
        drained = self.draining_at is not None and self._stopped_at is not None
        if drained and (report is None or sum(report.endings.values()) != report.live):
            self.report(f"9: the drain reports {report}")

    def _check(self, talk: PlannedTalk) -> None:
        line, exchange, plan_ = self._lines_of[talk.name], talk.exchange, talk.plan
        ending = exchange.ending if exchange is not None else None
        if talk.begun > 1 or talk.begun != talk.over:
            self.report(f"3: {talk.name}: its model was called {talk.begun} times and ended {talk.over} times")
        if talk.begun and self.draining_at is not None and talk.opened_at > self.draining_at:
            self.report(f"9: {talk.name}: began {talk.opened_at:.3f}, after the drain at {self.draining_at:.3f}")
        if talk.unopened and exchange is None:
            if plan_.calm and line.plan.calm and not self._may_be_refused(talk, line):
                self.report(f"7: {talk.name}: could not be asked")
            return
        disturbed = line.disturbed or talk.left or line.plan.cut
        lost = exchange is None and talk.view is View.CUT and self._may_be_refused(talk, line)
        if not lost and not _agree(ending, talk, disturbed, exchange):
            self.report(
                f"2: {talk.name}: the exchange's ending is {ending and ending.value}, the client's view {talk.view.value}, "
                f"left={talk.left}, disturbed={disturbed}"
            )
        if ending is Ending.COMPLETE and talk.view is View.COMPLETE and talk.heard.data != talk.said.data and not talk.lies:
            self.report(
                f"1: {talk.name}: complete, and the client heard {len(talk.heard.data)} of {len(talk.said.data)} bytes"
            )
        if ending is Ending.COMPLETE and exchange is not None and exchange.outbound.finishing is not ending:
            self.report(f"2: {talk.name}: complete, and its answer was never whole")
        if talk.gave_up and plan_.calm and line.plan.calm and plan_.model.endswith(CALM):
            self.report(f"11: {talk.name}: its client gave up after {plan_.patience:g} s")
        calm = plan_.calm and line.plan.calm and not disturbed
        if calm and ending is not Ending.COMPLETE and not self._may_be_refused(talk, line):
            self.report(f"7: {talk.name}: ended with {ending and ending.value}, and nothing had been done to it")
        alone = line.link is None and line.plan.calm and all(other.plan.calm for other in line.talks)
        if alone and not disturbed and ending is Ending.LOST and exchange is not None:
            self.report(f"9: {talk.name}: its connection was let fall, and it would have heard an ending")
        # a call that goes on after an error ends well, even if its client has disconnected
        answered = not plan_.form.goes_on or talk.view is View.COMPLETE or bool(talk.said.data)
        nonsense = plan_.deceit in (Deceit.MODEL, Deceit.BODY) and plan_.form.kind != "parts"
        if nonsense and ending is Ending.COMPLETE and answered:
            self.report(f"2: {talk.name}: nonsense was answered")

    def _may_be_refused(self, talk: PlannedTalk, line: Line) -> bool:
        """True if something outside the call may have ended it."""
        if line.plan.transport == "http1" and any(t.view is not View.COMPLETE for t in line.talks[: line.talks.index(talk)]):
            return True  # HTTP/1.1 may not survive an error
        crashing = not talk.plan.model.endswith(CALM)
        return crashing or self.plan.tight or self.draining_at is not None


def _agree(ending: Ending | None, talk: PlannedTalk, disturbed: bool, exchange: Exchange | None) -> bool:
    """True if the client's view of the end agrees with the ending of the exchange."""
    match talk.view:
        case View.PENDING:
            return talk.left
        case View.COMPLETE:
            if ending is Ending.COMPLETE:
                return True
            # the client may have read all before the gateway learnt that the transport is gone
            return disturbed and exchange is not None and exchange.outbound.finishing is Ending.COMPLETE
        case View.ERROR if ending is Ending.COMPLETE:
            return talk.plan.form.goes_on
        case View.ERROR:
            return ending not in (Ending.LOST, Ending.CANCELLED) or disturbed
        case View.CUT:
            if disturbed or ending in (None, Ending.LOST, Ending.CANCELLED):
                return disturbed or ending is Ending.LOST
            return talk.plan.form.cuts and ending is not Ending.COMPLETE
