"""Finds what is stuck in a model: blocking steps over their time, and sessions that go on after their end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol, final

import trio

from gateway.workers.stop_times import StopTimes
from models.blocking import Step, StepHolder, stack_of
from models.spec import Model, ModelSpec

log = logging.getLogger("gateway.worker")

_THREADS = 64  # the most threads of a model whose spec does not set `threads`


class TooManyStuck(RuntimeError):
    """More sessions of a model are stuck than `stuck_limit`. It is a crash of the model."""


class Stopping(Protocol):
    """A session that may have been told to stop."""

    def stopping_since(self) -> float | None:
        """Returns the time at which the session was told to stop, on Trio's clock; None if it was not."""


@final
@dataclass(frozen=True, slots=True)
class _Stuck:
    since: float
    replaced: bool


@final
class StuckWatch:
    """The step threads of one worker's model, through all its loads, and the stuck ones.

    A step that runs longer than `step_timeout` is stuck, and so is a session that has not stopped `stop_within` after its
    end. It is logged once, with its stack. Its session is ended and its token cancelled. Its slot and its thread are
    replaced, for at most `stuck_limit` sessions at once; one more is a crash of the model. The model therefore never has
    more threads than `threads` plus `stuck_limit`. When a stuck one returns, its replacement is taken back.

    If the model runs in processes, each process watches its own threads and sessions and applies `stuck_limit`. It reports
    each stuck session by `stuck_elsewhere`, and one too many ends that process.

    No task waits here: `tick` compares times.
    """

    def __init__(self, spec: ModelSpec, returned: Callable[[], None]) -> None:
        """`returned` is called when a stuck session or step has returned."""
        self._name, self._limit, self._returned = spec.name, spec.stuck_limit, returned
        self._timeout, self._within = spec.step_timeout, spec.stop_within
        self.limiter = trio.CapacityLimiter(spec.threads or min(spec.capacity, _THREADS))
        """The limiter of the step threads: those of the spec, and one more for each replaced thread."""
        self.stopping = StopTimes(spec.stop_within)
        self.total = 0
        """The number of sessions that were stuck so far."""
        self._running: dict[Step, StepHolder] = {}
        self._spare: set[Step] = set()
        """Steps whose threads are replaced."""
        self._watched: dict[StepHolder, Stopping] = {}
        self._breached: set[StepHolder] = set()
        self._stuck: dict[StepHolder, _Stuck] = {}
        self._why, self._beyond = "", trio.Event()
        self._elsewhere = False

    @property
    def now(self) -> int:
        """The number of sessions that are stuck now."""
        return len(self._stuck)

    @property
    def running(self) -> list[tuple[Step, StepHolder]]:
        """The steps that run or wait for their thread, each with its holder."""
        return [*self._running.items()]

    # -- steps and sessions ------------------------------------------------------------------------------------------

    def begin(self, step: Step, holder: StepHolder) -> None:
        self._running[step] = holder

    def end(self, step: Step) -> None:
        del self._running[step]
        if step in self._spare:
            self._spare.remove(step)
            if step.limiter is not None:
                step.limiter.total_tokens -= 1

    def watch(self, holder: StepHolder, session: Stopping) -> None:
        """Watches that a session stops in time, until `over`."""
        self._watched[holder] = session

    def over(self, holder: StepHolder) -> bool:
        """Forgets a holder of which nothing is left. True if its slot was replaced meanwhile."""
        self._watched.pop(holder, None)
        self._breached.discard(holder)
        stuck = self._stuck.pop(holder, None)
        if stuck is None:
            return False
        log.warning(
            "a stuck step or session has returned",
            extra={
                "model": self._name,
                "seconds": round(trio.current_time() - stuck.since, 3),
                "stuck": self.now,
                "replacement": "taken back" if stuck.replaced else "none",
            },
        )
        self._returned()
        return stuck.replaced

    def stopped(self, holder: StepHolder, seconds: float) -> None:
        """Records a session of which nothing is left, `seconds` after it was told to stop."""
        self.stopping.stopped(seconds)
        if self.stopping.breaks(seconds) and holder not in self._breached:
            self._breach(holder, seconds)

    # -- the coarse timer --------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Checks the running steps and the watched sessions."""
        if self._timeout:
            for step, holder in list(self._running.items()):
                if now - step.began > self._timeout and holder not in self._stuck:
                    step.token.cancel()
                    self._stick(holder, self._too_long, now)
        if self._within:
            for holder, session in list(self._watched.items()):
                since = session.stopping_since()
                if since is None or not self.stopping.breaks(now - since):
                    continue
                if holder not in self._breached:
                    self._breached.add(holder)
                    why = self._breach(holder, now - since)
                    if holder not in self._stuck and not self._elsewhere:
                        self._stick(holder, why, now)

    def stuck_elsewhere(self, holder: StepHolder, *, step: bool, stack: str, replaced: bool) -> None:
        """Records a session that is stuck in a process of the model, for `StepHolder.stuck_there`."""
        if holder not in self._stuck:
            late = f"model {self._name!r} had not stopped within {self._within:g} s (models.{self._name}.stop_within)"
            self._told(holder, self._too_long if step else late, trio.current_time(), stack, replaced)

    @property
    def _too_long(self) -> str:
        return f"a step of model {self._name!r} ran longer than {self._timeout:g} s (models.{self._name}.step_timeout)"

    def _breach(self, holder: StepHolder, seconds: float) -> str:
        self.stopping.breaches += 1
        why = (
            f"model {self._name!r} had not stopped {seconds:.3g} s after the end of its session: the limit is "
            f"{self._within:g} s (models.{self._name}.stop_within)"
        )
        log.error("model stopped late", extra={"model": self._name, "reason": why, "breaches": self.stopping.breaches})
        return why

    def _stick(self, holder: StepHolder, why: str, now: float) -> None:
        replaced = self.now < self._limit
        steps = [step for step, owner in self._running.items() if owner is holder]
        if replaced:
            for step in steps:
                self._spare.add(step)
                if step.limiter is not None:
                    step.limiter.total_tokens += 1
        self._told(holder, why, now, stack_of(steps), replaced)
        if not replaced:
            self._why = f"{self.now} sessions are stuck, above {self._limit} (models.{self._name}.stuck_limit); {why}"
            self._beyond.set()

    def _told(self, holder: StepHolder, why: str, now: float, stack: str, replaced: bool) -> None:
        self._stuck[holder] = _Stuck(now, replaced)
        self.total += 1
        log.error(
            "model is stuck",
            extra={"model": self._name, "reason": why, "stuck": self.now, "replaced": replaced, "stack": stack},
        )
        holder.interrupt(why)
        if replaced:
            holder.replace()

    # -- the end of the model ----------------------------------------------------------------------------------------

    def around(self, loading: AbstractAsyncContextManager[Model]) -> AbstractAsyncContextManager[Model]:
        """Wraps the context of a loaded model. It raises TooManyStuck if more sessions are stuck than `stuck_limit`."""
        return self._guarded(loading) if self._timeout or self._within else loading

    @asynccontextmanager
    async def _guarded(self, loading: AbstractAsyncContextManager[Model]) -> AsyncIterator[Model]:
        self._beyond = trio.Event()
        async with loading as model, trio.open_nursery() as nursery:
            nursery.start_soon(self._escalate)
            self._elsewhere = any(True for _ in getattr(model, "__model_instances__", ()))
            yield model
            nursery.cancel_scope.cancel()

    async def _escalate(self) -> None:
        await self._beyond.wait()
        raise TooManyStuck(self._why)
