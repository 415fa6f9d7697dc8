"""The cancel sweep: every scenario is interrupted at each of its steps, and after every run the invariants must hold.

`python -m tests.gateway.sweep --seeds N` runs all of it; a failure prints how to run that one again.
"""

from __future__ import annotations

import argparse
import functools
import ssl
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Any, final

import outcome
import trio
import trio.testing

from gateway.config import TLSConfig
from gateway.core.connection import Connection
from gateway.core.exchange import Exchange
from gateway.errors import DeadlineExceeded, Ending, TransportLost
from gateway.gateway import Gateway
from gateway.net.readiness import Poller
from gateway.net.tls_context import client_context, development_certificate, server_context
from gateway.net.transport import MemoryTransport, memory_pair
from gateway.telemetry.account import PARTS, Account, account_of
from gateway.telemetry.observer import Observer
from gateway.testing import MemoryEdges, MemoryProcess, seeded
from gateway.testing.log_capture import brief, errors_logged
from gateway.testing.stories.talk import Talk, View, named
from gateway.wires.http2 import HTTP2Wire
from gateway.workers.states import State
from protocols.http2.connection import HTTP2Connection
from tests.gateway.sweep_batched import BATCHED
from tests.gateway.sweep_grpc import GRPC
from tests.gateway.sweep_processes import PROCESSES
from tests.gateway.sweep_sagemaker import SAGEMAKER
from tests.gateway.sweep_scenarios import FRESH, ONE_OF_EACH, VICTIM, Scenario, Stage, serve
from tests.gateway.sweep_text import TEXT
from tests.gateway.sweep_v2 import V2
from tests.gateway.ways import DRIVERS, serves

SCENARIOS: dict[str, Scenario] = {**ONE_OF_EACH, **V2, **GRPC, **SAGEMAKER, **TEXT, **BATCHED, **PROCESSES}

_END = 30.0
"""Virtual seconds after which a run counts as hanging."""
_BUSY = 2000
"""Steps of one task without any virtual time after which it counts as spinning."""
_OWN = ("Acceptor._turns", "Runner._run", "MemoryProcess._run", "Instances.keep")
"""Tasks whose steps, and those of the tasks that they start, count as the victim's, as those of its connection do."""
_LOADED = (
    *("load.<locals>.crash", "RollingBatch.run", "Batcher._alarm", "Instances.keep", "MemoryProcess._run", "Child._read"),
    *("MemoryProcess.read_output", "Instance._write", "Instance._watch_exit", "Instance._watch_loop", "Child._write"),
)
"""The tasks of a model that is loaded: one that was loaded again has others."""
_STEP_SECONDS = 0.0023
"""Seconds that a blocking step takes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A fault: the act that cancels, when it is possible, and the endings that it may cause."""

    name: str
    ready: Callable[[Run], bool]
    """True if there is something to cancel: only such steps are counted."""
    fire: Callable[[Run], None]
    spares: Callable[[Run, Talk], bool]
    """True if an exchange must not notice."""
    endings: frozenset[Ending]
    """The endings that the victim may have, besides COMPLETE."""
    wires: frozenset[str] = frozenset({"http/1.1", "http/2", "websocket"})
    embedded: bool = False
    """The connections are streams and tasks of an embedder, not the gateway's own; with a leader, only the victim's is."""
    fatal: bool = False
    """True if the fault ends the gateway."""
    anybody: bool = False
    """True if the fault may hit any one exchange."""
    within: float = 0.1
    """Virtual seconds in which everything must be over; nothing here has to wait for the coarse timer."""
    logs: frozenset[str] = frozenset()
    """Errors that the log may name."""
    process: bool = False
    """True if the fault befalls a process of the first model."""
    then: tuple[int, Target] | None = None
    """A second target, which is cancelled this number of steps later if it is ready then."""


class Spinning(Exception):
    """Thrown into a task that will not stop."""


@final
class Budget:
    """The gateway's byte budget, which may refuse the n-th time that it is asked."""

    def __init__(self, limit: int, fired: Callable[[], None]) -> None:
        self.limit, self._fired = limit, fired
        self.used = self.high_water = self.asked = self.refuse_at = 0
        self.wanted: object = None

    def try_reserve(self, n: int) -> bool:
        self.asked += 1
        if self.asked == self.refuse_at:
            self._fired()
            return False
        self.used += n
        self.high_water = max(self.high_water, self.used)
        return True

    def release(self, n: int) -> None:
        assert 0 <= n <= self.used, f"released {n} bytes of {self.used} held"
        self.used -= n


class AsStream(trio.abc.Stream):
    """The server's end as an embedder's stream."""

    def __init__(self, below: MemoryTransport) -> None:
        self.below = below

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        rest = memoryview(data)
        try:
            while rest:
                n = self.below.try_send([rest])
                rest = rest[n:]
                if rest:
                    await self.below.wait_writable()
        except TransportLost as e:
            raise trio.BrokenResourceError from e

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        buffer = memoryview(bytearray(max_bytes or 65536))
        try:
            while (n := self.below.try_receive_into(buffer)) is None:
                await self.below.wait_readable()
        except TransportLost as e:
            raise trio.BrokenResourceError from e
        return bytes(buffer[:n])

    async def wait_send_all_might_not_block(self) -> None:
        await self.below.wait_writable()

    async def aclose(self) -> None:
        self.below.close()
        await trio.lowlevel.checkpoint()


@functools.cache
def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's and a client's, made once."""
    with tempfile.TemporaryDirectory() as folder:
        config = TLSConfig(dev=True, dev_dir=folder)
        return server_context(config), client_context(development_certificate(config).ca)


@final
class Recorder:
    """The gateway's observer, with a count of each exchange's endings."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.refused = observer.refused
        self.accounts: dict[Exchange, Account] = {}
        self.endings_of: dict[Exchange, list[Ending]] = {}
        self.by_talk: dict[str, Exchange] = {}
        self.closed_at: dict[str, float] = {}

    @property
    def live(self) -> set[Exchange]:
        return self._observer.live

    @property
    def endings(self) -> Any:
        return self._observer.endings

    def opened(self, exchange: Exchange) -> None:
        self._observer.opened(exchange)
        self.endings_of[exchange] = []
        self.by_talk[named(exchange.query.decode())] = exchange

    def closed(self, exchange: Exchange) -> None:
        assert exchange.ending is not None
        self.endings_of[exchange].append(exchange.ending)
        self.closed_at[named(exchange.query.decode())] = exchange.owner.clock()
        self.accounts[exchange] = account_of(exchange)
        if len(self.endings_of[exchange]) == 1:
            self._observer.closed(exchange)

    def ending(self, talk: Talk) -> Ending | None:
        exchange = self.by_talk.get(talk.name)
        return None if exchange is None else exchange.ending


@final
class Run(trio.abc.Instrument):
    """One scenario, interrupted once or not at all."""

    def __init__(
        self,
        scenario: Scenario,
        target: Target,
        step: int,
        *,
        driver: str,
        every_task: bool = False,
        trace: bool = False,
    ) -> None:
        self.scenario, self.target, self.step, self.every_task = scenario, target, step, every_task
        self.problems: list[str] = []
        self.trace: list[tuple[str, float, int]] | None = [] if trace else None
        self.steps = 0
        self.fired_at: float | None = None
        self.stage = Stage(self.connect, self._check_survivor, self._fire)
        self.stage.rude = scenario.rude
        self._tls = tls_contexts() if scenario.tls else None
        self.stage.tls = self._tls and self._tls[1]
        self.gateway = Gateway(scenario.config, serve(self.stage, scenario))
        self.stage.repository = self.gateway.repository
        self.edges = MemoryEdges() if driver == "leader" else None
        self.gateway.acceptor.poller = self.edges and Poller(self.edges)
        server = self.gateway.server
        self.budget = server.budget = Budget(server.budget.limit, self._fire)  # type: ignore[assignment]
        server.plenty, server.share = -1, server.budget.limit  # so that it is asked for each byte
        self.recorder = Recorder(self.gateway.observer)
        server.exchange_opened, server.exchange_closed = self.recorder.opened, self.recorder.closed
        self.serving = trio.CancelScope()
        self.befallen: MemoryProcess | None = None
        self.embedder: dict[str, trio.CancelScope] = {}
        self.ours: dict[str, MemoryTransport] = {}
        self.theirs: dict[str, MemoryTransport] = {}
        self.tasks: set[trio.lowlevel.Task] = set()
        self.own: set[trio.lowlevel.Task] = set()
        """The server's tasks for the victim's connection, and those that write, lead and run exchanges for all."""
        self._owning = False
        self._root: trio.Nursery
        self._playing = False
        self._instant = 0.0
        self._steps_now: Counter[trio.lowlevel.Task] = Counter()

    # -- connections -----------------------------------------------------------------------------------------------

    def connect(self, line: str) -> MemoryTransport:
        """A client's end of a new connection; closed if the gateway takes none any more."""
        ours, theirs = self.ours[line], self.theirs[line] = memory_pair(self.scenario.buffer)
        nursery = self.gateway.acceptor.nursery
        self._owning = line == VICTIM
        if nursery is None or self.serving.cancel_called or self.gateway.shutdown.begun:
            theirs.close()
        elif self.target.embedded and (self.edges is None or self._owning):
            self._root.start_soon(self._embed, line, AsStream(theirs))
        elif self.edges is not None:
            nursery.start_soon(
                self.gateway.acceptor.serve_watchable, self.edges.watchable(theirs), self._tls and self._tls[0]
            )
        else:
            nursery.start_soon(self.gateway.acceptor.serve_transport, theirs, self._tls and self._tls[0])
        self._owning = False
        return ours

    async def _embed(self, line: str, stream: AsStream) -> None:
        with trio.CancelScope() as self.embedder[line]:
            await self.gateway.serve_stream(stream)

    def connection(self, line: str) -> Connection | None:
        """The server's side of a client's connection, None once it is no longer served."""
        ours = self.ours.get(line)
        return ours and next((c for c in self.gateway.server.connections if serves(c, ours)), None)

    @property
    def victim(self) -> Talk | None:
        return self.stage.talks.get(VICTIM)

    @property
    def exchange(self) -> Exchange | None:
        """The victim's exchange, None if it is not live."""
        exchange = self.recorder.by_talk.get(VICTIM)
        return exchange if exchange is not None and exchange in self.recorder.live else None

    # -- the instrument --------------------------------------------------------------------------------------------

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.tasks.add(task)
        parent = task.parent_nursery and task.parent_nursery.parent_task
        if self._owning or parent in self.own or task.name.endswith(_OWN):
            self.own.add(task)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self.tasks.discard(task)
        self.own.discard(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.trace is not None:
            self.trace.append((task.name, round(trio.current_time(), 6), len(self.recorder.endings_of)))
        self._stop_spinning(task)
        if self._playing and self.step and (self.every_task or task in self.own) and not self.stage.patient:
            self._count()

    def _count(self) -> None:
        target, then = self.target, self.target.then
        if self.fired_at is None:
            if target.ready(self):
                self.steps += 1
                if self.steps == self.step:
                    self._fire()
                    self._cancel(target)
        elif then is not None:
            self.steps += 1
            if self.steps == self.step + then[0] and then[1].ready(self):
                self._cancel(then[1])

    def _cancel(self, target: Target) -> None:
        try:
            target.fire(self)
        except Exception as e:
            self.problems.append(f"{target.name}: {e!r}")

    def _stop_spinning(self, task: trio.lowlevel.Task) -> None:
        if trio.current_time() > self._instant:
            self._instant = trio.current_time()
            self._steps_now.clear()
        self._steps_now[task] += 1
        if self._steps_now[task] == _BUSY:
            self.problems.append(f"11: {task.name} spins")
            task._next_send = outcome.Error(Spinning())

    def _fire(self) -> None:
        self.fired_at = trio.current_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._playing and len(self.problems) < 5:
            for connection in self.gateway.server.connections:
                if isinstance(connection.wire, HTTP2Wire):
                    self._check_windows(connection.wire._machine, task)
            victim = self.victim
            if victim is not None and len(victim.said.each) - len(victim.heard.each) > self.scenario.ahead:
                self.problems.append(f"6: {task.name}: said {victim.said} of which {victim.heard} are heard")

    def _check_windows(self, machine: HTTP2Connection, task: trio.lowlevel.Task) -> None:
        for stream, ledger in machine.windows().items():
            if ledger.available != ledger.library or ledger.unread < 0 or ledger.owed < 0:
                self.problems.append(f"4: window of stream {stream} is {ledger} after a step of {task.name}")

    def _check_survivor(self, line: str, client: HTTP2Connection) -> None:
        """The windows of an idle connection are whole, and its two ends agree on them. A stream may be there that was
        answered and that its client has neither ended nor reset."""
        connection = self.connection(line)
        if connection is None or not isinstance(connection.wire, HTTP2Wire) or client._control.nbytes:
            return  # the client has not said all: its end of a stream, cut off on the way, the server cannot know
        server = connection.wire._machine
        if server.must_close:
            return  # it has said its last GOAWAY, and reads no more
        quiet = {0, *server._lingering}
        for here, there in ((server, client), (client, server)):
            windows = here.windows()
            if (
                windows.keys() != quiet
                or windows[0].unread
                or windows[0].available != there._h2.outbound_flow_control_window
            ):
                whose = "server's" if here is server else "client's"
                self.problems.append(
                    f"4: on {line} at rest the {whose} windows are {windows}, "
                    f"the peer may send {there._h2.outbound_flow_control_window} bytes"
                )

    # -- the run ---------------------------------------------------------------------------------------------------

    async def main(self) -> None:
        """Plays the scenario, then looks whether everything is as it was before."""
        with trio.move_on_after(_END) as scope:
            async with trio.open_nursery() as self._root:
                self.stage.start_soon = self._root.start_soon
                await self._root.start(self._serve)
                before = set(self.tasks)
                await self._play()
                if self.fired_at is None or not self.target.fatal:
                    await self._play_again()
                await self._until_quiet(before)
                if self._drained:
                    with trio.move_on_after(self.target.within):
                        await self.gateway.stopped()
                self.serving.cancel()
        if scope.cancelled_caught:
            live = [(e.query.decode(), e.ending, e.outbound.finishing) for e in self.recorder.live]
            self.problems.append(f"11: it hangs; live: {live}, tasks: {sorted(t.name for t in self.tasks)}")

    async def _serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        with self.serving:
            await self.gateway.serve(task_status=task_status)

    async def _play(self) -> None:
        self._playing = True
        await self.scenario.play(self.stage)
        self._playing = False

    async def _play_again(self) -> None:
        """Checks that the worker still answers."""
        await trio.testing.wait_all_tasks_blocked()
        worker = self.gateway.supervisor.workers["m"]
        with trio.move_on_after(1.0):
            while worker.state is not State.READY or (self.befallen is not None and self.befallen.alive):  # noqa: ASYNC110
                await trio.sleep(0.01)
        if worker.state is not State.READY:
            self.problems.append(f"the worker is {worker.state} afterwards")
        self.stage.rude = False
        self.stage.raise_at = self.budget.refuse_at = -1
        await self.scenario.again(self.stage)

    async def _until_quiet(self, before: set[trio.lowlevel.Task]) -> None:
        began = trio.current_time()
        with trio.move_on_after(self.target.within):
            while not self._quiet(before):  # noqa: ASYNC110  # nothing tells when
                await trio.sleep(0.01)
        left = sorted(t.name.rpartition(".")[2] for t in self._left(before))
        counts = self.gateway.counts()
        expected = (0, 0, 0, 0)
        found = (counts.connections, counts.exchanges, counts.bytes_reserved, counts.slots_in_use)
        if found != expected or left:
            self.problems.append(
                f"3: {trio.current_time() - began:.2f} s after the last client left there are {found[0]} connections, "
                f"{found[1]} exchanges, {found[2]} bytes reserved, {found[3]} slots in use, tasks {left}"
            )

    def _quiet(self, before: set[trio.lowlevel.Task]) -> bool:
        counts = self.gateway.counts()
        busy = counts.connections or counts.exchanges or counts.bytes_reserved or counts.slots_in_use
        return not busy and not self._left(before)

    def _left(self, before: set[trio.lowlevel.Task]) -> list[trio.lowlevel.Task]:
        """Tasks that were not there before, without those of a worker that has restarted, those that wait for an
        exchange, and the leader."""
        left = [t for t in self.tasks - before - self.gateway.server.runner.resting if not t.name.endswith(_LOADED)]
        loaded, were = ([t for t in tasks if t.name.endswith(_LOADED)] for tasks in (self.tasks, before))
        if len(loaded) > len(were):
            left += loaded
        return left

    # -- the invariants --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks the invariants when the run is over. The numbers are those of the fault model."""
        problem = self.problems.append
        for talk in self.stage.talks.values():
            self._check_talk(talk)
        if self.target.anybody:
            hit = [t.name for t in self.stage.talks.values() if t.view is not View.COMPLETE and t.asked.each]
            if len(hit) > 1:
                problem(f"7: {' and '.join(hit)} were hit by one fault")
        for exchange, endings in self.recorder.endings_of.items():
            if len(endings) != 1:
                problem(f"2: the exchange {exchange.query.decode()} ended {len(endings)} times: {endings}")
        for exchange, account in self.recorder.accounts.items():
            if abs(sum(getattr(account, part) for part in PARTS) - account.wall) > 1e-6:
                problem(f"2: the time of the exchange {exchange.query.decode()} went nowhere, or twice: {account}")
        if self.gateway.repository.names:
            problem(f"3: the models {self.gateway.repository.names} are still there")
        used, high = self.gateway.budget.used, self.gateway.budget.high_water
        if used:
            problem(f"3: {used} bytes of the budget are still in use")
        if high > self.scenario.memory:
            problem(f"5: {high} bytes were in use, {self.scenario.memory} are the sum of the bounds")

        if self._drained:
            self._check_report()

    def _torn(self, talk: Talk) -> bool:
        """True if the whole answer was in a write that the transport had taken in part when it was lost, so that the client
        may have read to the answer's end. HTTP/2's machine counts a write as a whole. An embedder's stream reports nothing
        before it has taken all, which it may do while it is told to give up."""
        exchange = self.recorder.by_talk.get(talk.name)
        if exchange is None or exchange.outbound.finishing is not Ending.COMPLETE:
            return False
        if exchange.wire.name != "http/2" and not self.target.embedded:
            return False
        owner: Any = exchange.owner
        return talk.view is View.COMPLETE and owner.blocked and exchange.ending in (Ending.LOST, Ending.CANCELLED)

    @property
    def _drained(self) -> bool:
        """True if a drain began and nothing interrupted it."""
        return self.target.fire is _drain and self.target.then is None and self.fired_at is not None

    def _check_report(self) -> None:
        """Checks that the drain's report counts one ending for each live exchange, within the target's time."""
        report = self.gateway.drain_report
        if report is None or sum(report.endings.values()) != report.live or report.seconds > self.target.within:
            self.problems.append(f"9: the drain reports {report}")

    def _check_talk(self, talk: Talk) -> None:
        ending, problem = self.recorder.ending(talk), self.problems.append
        if not talk.asked.begin_with(talk.taken, strands=talk.strands):
            problem(f"1: {talk.name}: the model took {talk.taken} of {talk.asked}")
        if not talk.said.begin_with(talk.heard, strands=talk.strands):
            problem(f"1: {talk.name}: the client heard {talk.heard} of {talk.said}")
        if talk.begun > talk.calls or talk.begun != talk.over:
            problem(f"3: {talk.name}: the model was called {talk.begun} times and ended {talk.over} times")
        said = _agree(ending, talk) or (self.scenario.cuts and talk.view is View.CUT) or self._torn(talk)
        if not said:
            problem(f"2: {talk.name}: the exchange's ending is {ending}, the client's view is {talk.view}, left={talk.left}")
        if ending is Ending.COMPLETE and self.recorder.by_talk[talk.name].outbound.finishing is not ending:
            problem(f"2: {talk.name}: ended with {ending}, and its answer was never whole")
        if (
            ending is Ending.COMPLETE
            and talk.view is View.COMPLETE
            and not talk.heard.begin_with(talk.said, strands=talk.strands)
        ):
            problem(f"1: {talk.name}: complete, and the client heard {talk.heard} of {talk.said}")
        fired = self.fired_at
        if self.target.anybody:
            if ending is Ending.LOST:
                problem(f"7: {talk.name}: ended with {ending}")
        elif fired is None or talk.name == FRESH or (talk.name != VICTIM and self.target.spares(self, talk)):
            if ending is not Ending.COMPLETE and talk.asked.each:
                problem(f"7: {talk.name}: ended with {ending}, and nothing had been done to it")
        elif talk.name == VICTIM:
            rude = {Ending.MODEL_ERROR} if self.scenario.rude else set()
            if ending not in {None, Ending.COMPLETE} | self.target.endings | rude:
                problem(f"2: {talk.name}: ended with {ending}")
            late = self.recorder.closed_at.get(VICTIM, fired) - fired
            if late > self.target.within:
                problem(f"11: the victim ended {late:.2f} s after it was interrupted")


def _agree(ending: Ending | None, talk: Talk) -> bool:
    """True if the wire's end agrees with the exchange's ending."""
    match ending, talk.view:
        case _, View.PENDING:
            return ending is None
        case None, view:
            return view is View.CUT
        case Ending.COMPLETE, view:
            return view is View.COMPLETE or talk.left
        case Ending.LOST, view:
            return view is View.CUT
        case Ending.CANCELLED, view:
            return talk.left and view is View.CUT
        case _, view:
            return view is View.ERROR or talk.left


# -- targets -------------------------------------------------------------------------------------------------------


def _victim_talks(run: Run) -> bool:
    return run.victim is not None and run.victim.view is View.PENDING and VICTIM in run.ours


def _always(run: Run) -> bool:
    return True


def _other_line(run: Run, talk: Talk) -> bool:
    return talk.line != VICTIM


def _others(run: Run, talk: Talk) -> bool:
    return True


def _nobody(run: Run, talk: Talk) -> bool:
    return False


def _leave(how: Callable[[MemoryTransport], None]) -> Callable[[Run], None]:
    def fire(run: Run) -> None:
        for talk in run.stage.talks.values():
            if talk.line == VICTIM:
                talk.left = True
        how(run.ours[VICTIM])

    return fire


def _cancel_connection(run: Run) -> None:
    connection = run.connection(VICTIM)
    assert connection is not None
    connection.lost()


def _interrupt(run: Run) -> None:
    assert run.exchange is not None
    run.exchange.interrupt(DeadlineExceeded("the sweep says so"))


def _deadline(run: Run) -> None:
    assert run.exchange is not None
    run.exchange.limit_time(0, "the sweep")


def _drain(run: Run) -> None:
    run.gateway.begin_drain()
    run.gateway.hurry()


def _break_transport(run: Run) -> None:
    def fail(_: object) -> int:
        raise RuntimeError("broken by the sweep")

    theirs: Any = run.theirs[VICTIM]
    theirs.try_receive_into = theirs.try_send = fail
    theirs._eof = True  # wakes a waiting task as a kernel would: while the model pauses, nothing else would within 0.1 s
    theirs._readable.ring()


def _there(run: Run) -> MemoryProcess | None:
    """The process of the first model that the victim's call has begun in, or else any; None if it is not alive."""
    processes = run.stage.processes
    found = run.stage.there.get(VICTIM) or (processes and processes.last.get(0))
    return found if found is not None and found.alive else None


def _befall(what: Callable[[MemoryProcess], None]) -> Callable[[Run], None]:
    def fire(run: Run) -> None:
        run.befallen = process = _there(run)
        assert process is not None
        what(process)

    return fire


def _elsewhere(run: Run, talk: Talk) -> bool:
    there = run.stage.there.get(talk.name)
    return talk.model != "m" or (there is not None and there is not run.befallen)


def _is_live(run: Run) -> bool:
    return run.exchange is not None


_LEFT = frozenset({Ending.CANCELLED})
_LOST = frozenset({Ending.LOST})
_OF_AUTHORS = ("model", "chat template", "count_tokens", "input formatter", "output formatter")

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            name="close", ready=_victim_talks, fire=_leave(MemoryTransport.close), spares=_other_line, endings=_LEFT
        ),
        Target(
            name="close-embedded", ready=_victim_talks, fire=_leave(MemoryTransport.close), spares=_other_line,
            endings=_LEFT, embedded=True,
        ),
        Target(
            name="abort", ready=_victim_talks, fire=_leave(MemoryTransport.reset), spares=_other_line, endings=_LEFT
        ),
        Target(
            name="half-close", ready=_victim_talks, fire=_leave(MemoryTransport.send_eof), spares=_other_line, endings=_LEFT
        ),
        Target(
            name="reset",
            ready=lambda run: run.stage.can_leave and _victim_talks(run),
            fire=lambda run: run.stage.leave.ring(),
            spares=_others,
            endings=_LEFT,
            wires=frozenset({"http/2", "websocket"}),
        ),
        Target(
            name="serve", ready=_always, fire=lambda run: run.serving.cancel(), spares=_nobody,
            endings=_LOST | {Ending.MODEL_ERROR, Ending.REFUSED}, fatal=True,
        ),
        Target(
            name="serve-embedded", ready=_always, fire=lambda run: run.serving.cancel(), spares=_nobody,
            endings=_LOST | {Ending.MODEL_ERROR, Ending.REFUSED}, fatal=True, embedded=True,
        ),
        Target(
            name="connection", ready=lambda run: run.connection(VICTIM) is not None, fire=_cancel_connection,
            spares=_other_line, endings=_LOST,
        ),
        Target(
            name="embedder", ready=lambda run: VICTIM in run.embedder, fire=lambda run: run.embedder[VICTIM].cancel(),
            spares=_other_line, endings=_LOST, embedded=True,
        ),
        Target(
            name="transport", ready=lambda run: run.connection(VICTIM) is not None, fire=_break_transport,
            spares=_other_line, endings=_LOST, logs=frozenset({"connection failed"}),
        ),
        Target(
            name="interrupt", ready=_is_live, fire=_interrupt, spares=_others, endings=frozenset({Ending.DEADLINE})
        ),
        Target(
            name="interrupt-embedded", ready=_is_live, fire=_interrupt, spares=_others, embedded=True,
            endings=frozenset({Ending.DEADLINE}),
        ),
        Target(name="deadline", ready=_is_live, fire=_deadline, spares=_others, endings=frozenset({Ending.DEADLINE})),
        Target(
            name="drain", ready=_always, fire=_drain, spares=_nobody, fatal=True,
            endings=frozenset({Ending.DRAINED, Ending.REFUSED}),
        ),
        Target(
            name="drain-embedded", ready=_always, fire=_drain, spares=_nobody, fatal=True, embedded=True,
            endings=frozenset({Ending.DRAINED, Ending.REFUSED}),
            within=2.1,  # a stream cannot half-close, so a client that waits for the end waits for the linger
        ),
        Target(
            name="worker", ready=_always, fire=lambda run: run.stage.crash.ring(),
            spares=lambda run, talk: talk.model != "m", endings=frozenset({Ending.MODEL_ERROR, Ending.REFUSED}),
            logs=frozenset({"model crashed"}),
        ),
        *(
            Target(
                name=name, ready=lambda run: _there(run) is not None, fire=_befall(what), spares=_elsewhere, process=True,
                endings=frozenset({Ending.MODEL_ERROR, Ending.REFUSED}), logs=frozenset({"instance ended", "instance killed"}),
            )
            for name, what in (
                ("kill", MemoryProcess.kill), ("stop", MemoryProcess.stop), ("hang-up", MemoryProcess.hang_up),
                ("nonsense", lambda process: process.spoil(b"\0\0\0\1\xc1")),
            )
        ),
        Target(
            name="raise", ready=lambda run: False, fire=lambda run: None, spares=_others,
            endings=frozenset({Ending.MODEL_ERROR}), logs=frozenset(f"{what} raised" for what in _OF_AUTHORS) | {"model failed"},
        ),
        Target(
            name="memory", ready=lambda run: False, fire=lambda run: None, spares=_nobody, anybody=True,
            endings=frozenset({Ending.REFUSED}),
        ),
    )
}  # fmt: skip


def followed_by(first: Target, gap: int, second: Target) -> Target:
    """Two cancellations in one run."""
    return replace(
        first,
        name=f"{first.name}+{second.name}",
        then=(gap, second),
        spares=lambda run, talk: first.spares(run, talk) and second.spares(run, talk),
        endings=first.endings | second.endings,
        wires=first.wires & second.wires,
        embedded=first.embedded or second.embedded,
        fatal=first.fatal or second.fatal,
        within=max(first.within, second.within),
        logs=first.logs | second.logs,
    )


def applies(scenario: Scenario, target: Target) -> bool:
    """True if a scenario can have this fault. An embedder's streams are decrypted already."""
    known = scenario.wire in target.wires and target.name.partition("+")[0] not in scenario.without
    return known and not (scenario.tls and target.embedded) and not (target.process and scenario.place is None)


# -- running -------------------------------------------------------------------------------------------------------


@final
@dataclass(slots=True)
class Result:
    """The result of one run."""

    fired: bool
    problems: list[str]
    trace: list[tuple[str, float, int]] | None


def run_once(
    scenario: Scenario,
    target: Target,
    seed: int,
    step: int,
    *,
    driver: str,
    every_task: bool = False,
    trace: bool = False,
) -> Result:
    """Makes one run, interrupted at that step; step 0 interrupts nothing."""
    seeds = seeded(seed, step=_STEP_SECONDS)
    with seeds, errors_logged() as logged, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = Run(scenario, target, step, driver=driver, every_task=every_task, trace=trace)
        match target.name:  # two that count by themselves
            case "raise":
                run.stage.raise_at, run.step = step, 0
            case "memory":
                run.budget.refuse_at, run.step = step, 0
        try:
            trio.run(run.main, clock=trio.testing.MockClock(autojump_threshold=0), instruments=[run])
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            run.problems.append(f"8: {brief(e)} came out")
        run.check()
    expected = target.logs | ({"model raised"} if scenario.rude else frozenset())
    for record in logged:
        if record.getMessage() not in expected:
            error = record.exc_info[1] if record.exc_info else None
            run.problems.append(f"8: logged: {record.getMessage()}: {brief(error) if error else ''}")
    run.problems += [f"warning: {w.message}" for w in warned]
    return Result(run.fired_at is not None, run.problems, run.trace)


@final
@dataclass(slots=True)
class Swept:
    """The findings of a sweep."""

    runs: int = 0
    failures: list[tuple[int, list[str]]] = field(default_factory=list)
    """Steps, and the problems at each."""


def sweep(
    scenario: Scenario,
    target: Target,
    seed: int,
    *,
    driver: str,
    steps: Iterable[int] | None = None,
    every_task: bool = False,
    most: int = 5,
) -> Swept:
    """Interrupts the scenario at these steps, or at every one, until it ends before the next of them, or until there are
    `most` failures. Steps are those of the victim's connection, or of every task."""
    swept = Swept()
    for step in steps or count(1):
        result = run_once(scenario, target, seed, step, driver=driver, every_task=every_task)
        swept.runs += 1
        if result.problems:
            swept.failures.append((step, result.problems))
        if not result.fired or len(swept.failures) == most:
            break
    return swept


def _command() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gateway.sweep", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, from 0")
    parser.add_argument("--seed", type=int, help="this seed alone")
    parser.add_argument("--step", type=int, help="this step alone")
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--every-task", action="store_true", help="count the clients' steps and the neighbours' too")
    parser.add_argument("--then", choices=set(TARGETS) - {"raise", "memory"}, help="cancel this too")
    parser.add_argument("--gap", type=int, default=3, help="so many steps later")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append")
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--driver", choices=DRIVERS, action="append", help="both, where none is named")
    options = parser.parse_args()
    seeds = range(options.seeds) if options.seed is None else [options.seed]
    runs = failed = 0
    began = time.perf_counter()
    for driver, scenario, target in product(
        options.driver or DRIVERS,
        (SCENARIOS[name] for name in options.scenario or SCENARIOS),
        (TARGETS[name] for name in options.target or TARGETS),
    ):
        if options.then is not None:
            target = followed_by(target, options.gap, TARGETS[options.then])
        if not applies(scenario, target):
            continue
        for seed in seeds:
            if options.step is not None:
                result = run_once(scenario, target, seed, options.step, driver=driver, every_task=options.every_task)
                swept = Swept(1, [(options.step, result.problems)] if result.problems else [])
            else:
                swept = sweep(
                    scenario, target, seed, driver=driver, steps=count(1, options.stride), every_task=options.every_task
                )
            runs += swept.runs
            failed += len(swept.failures)
            for step, problems in swept.failures:
                print(f"--driver {driver} --scenario {scenario.name} --target {target.name} --seed {seed} --step {step}")
                for problem in problems:
                    print(f"    {problem}")
    seconds = time.perf_counter() - began
    print(f"{runs} runs, {failed} failures, {seconds:.0f} s, {runs / seconds:.0f} runs a second")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_command())
