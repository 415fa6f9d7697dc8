"""Watches the blocking steps of a model in its process: those that run too long, or on after the end of their session."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import FrameType
from typing import NoReturn, final

import msgspec
import trio

from gateway.instances.messages import Ended, Load, Message, Stuck
from models.blocking import BackgroundSteps, Step, StepHolder, running_loop, stack_of
from models.tracebacks.parked import thread_frames

log = logging.getLogger("gateway.worker")

_PRECISION = 0.05  # the least seconds between two checks


@final
class StepWatch:
    """The step threads of one process, and its stuck sessions.

    A session that is asked to stop has half of `stop_within` for that. Then StepCancelled is raised in the Python code
    of its steps. If it still runs after the other half, or if a step runs longer than `step_timeout`, the session is stuck,
    and the gateway is told. Its threads are replaced, for at most `stuck_limit` sessions at once."""

    def __init__(self, load: Load, post: Callable[[Message], None]) -> None:
        """`post` sends a message to the gateway that owns the process."""
        self._load, self._post, self._loop = load, post, running_loop()
        self.limiter = trio.CapacityLimiter(load.threads)
        """The limiter of the step threads: those of `load`, and one more for each replaced thread."""
        self._running: dict[Step, StepHolder] = {}
        self._spare = set[Step]()
        """Steps whose threads are replaced."""
        self._stopping: dict[SessionSteps, float] = {}
        """Sessions that were asked to stop, and the time of that."""
        self._interrupted = set[SessionSteps]()
        self._stuck = set[StepHolder]()

    def begin(self, step: Step, holder: StepHolder) -> None:
        self._running[step] = holder

    def end(self, step: Step) -> None:
        del self._running[step]
        if step in self._spare:
            self._spare.remove(step)
            if step.limiter is not None:
                step.limiter.total_tokens -= 1

    def stop(self, steps: SessionSteps) -> None:
        """Begins the time that a session has to stop."""
        if self._load.stop_within:
            self._stopping.setdefault(steps, self._loop.current_time())

    def over(self, holder: StepHolder) -> None:
        """Forgets a holder whose steps have all returned."""
        if isinstance(holder, SessionSteps):
            self._stopping.pop(holder, None)
            self._interrupted.discard(holder)
        self._stuck.discard(holder)

    def frames_of(self, holder: StepHolder | None) -> list[list[FrameType]]:
        """The frames of the running steps of a session; with None, those of the model's own work."""
        own = [
            step for step, owner in self._running.items() if (owner if isinstance(owner, SessionSteps) else None) is holder
        ]
        return [thread_frames(step.thread) for step in own]

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Checks the running steps for the length of a block."""
        if self._load.step_timeout or self._load.stop_within:
            async with self._loop.beside(self._run):
                yield
        else:
            yield

    async def _run(self) -> NoReturn:
        timeout, half = self._load.step_timeout or math.inf, (self._load.stop_within or math.inf) / 2
        while True:
            now = self._loop.current_time()
            # a step or a stop that begins during the sleep is not due before its end
            due = [now + min(timeout, half), *self._look_at_steps(now, timeout), *self._look_at_sessions(now, half)]
            await self._loop.sleep(max(min(due) - now, _PRECISION))

    def _look_at_steps(self, now: float, timeout: float) -> list[float]:
        due = []
        for step, holder in [*self._running.items()]:
            if holder not in self._stuck:
                if now < step.began + timeout:
                    due.append(step.began + timeout)
                else:
                    step.token.cancel()
                    self._stick(holder, step=True)
        return due

    def _look_at_sessions(self, now: float, half: float) -> list[float]:
        due = []
        for steps, since in [*self._stopping.items()]:
            if now < since + half:
                due.append(since + half)
                continue
            if steps not in self._interrupted:
                self._interrupted.add(steps)
                for step in self._steps_of(steps):
                    step.interrupt()
            if steps not in self._stuck:
                if now < since + 2 * half:
                    due.append(since + 2 * half)
                else:
                    self._stick(steps, step=False)
        return due

    def _steps_of(self, holder: StepHolder) -> list[Step]:
        return [step for step, owner in self._running.items() if owner is holder]

    def _stick(self, holder: StepHolder, *, step: bool) -> None:
        replaced = len(self._stuck) < self._load.stuck_limit
        self._stuck.add(holder)
        steps = self._steps_of(holder)
        stack = stack_of(steps)
        if replaced:
            for one in steps:
                self._spare.add(one)
                if one.limiter is not None:
                    one.limiter.total_tokens += 1
                    self._loop.more_places(one.limiter)
        if isinstance(holder, SessionSteps):
            holder.post(Stuck(holder.number, step, stack, replaced))
            if not replaced and holder.post != self._post:
                self._post(Stuck(0, step, stack, replaced))
        else:
            why = f"a step of the model's own work ran longer than {self._load.step_timeout:g} s"
            log.error("model is stuck: %s\n%s", why, stack)
            holder.interrupt(why)


@final
class SessionSteps(StepHolder):
    """The blocking steps of a session. The session is over when the model has returned and all steps have."""

    __slots__ = ("_ended", "_holds", "_watch", "number", "post")

    def __init__(self, watch: StepWatch, number: int, post: Callable[[Message], None]) -> None:
        """`post` sends a message to the gateway that opened the session."""
        self._watch, self.number, self.post = watch, number, post
        self._holds = 0
        self._ended: Ended | None = None

    @property
    def limiter(self) -> trio.CapacityLimiter:
        return self._watch.limiter

    def hold(self, *, stopping: bool = True) -> None:
        self._holds += 1

    def release(self) -> None:
        self._holds -= 1
        self._look()

    def begin(self, step: Step) -> None:
        self._holds += 1
        self._watch.begin(step, self)

    def end(self, step: Step) -> None:
        self._watch.end(step)
        self.release()

    def background(self, stuck: Callable[[str], None]) -> StepHolder:
        return BackgroundSteps(self._watch, stuck)

    def end_with(self, ended: Ended) -> None:
        """Reports that the model has returned from the session, or raised. If steps still run and the session was not
        cancelled, it is reported at once, and again when they have returned."""
        if self._holds:
            self._watch.stop(self)
            if ended.kind != "cancelled":
                self.post(msgspec.structs.replace(ended, lingers=True))
                ended = Ended(self.number)
        self._ended = ended
        self._look()

    def _look(self) -> None:
        if self._ended is not None and not self._holds:
            ended, self._ended = self._ended, None
            self._watch.over(self)
            self.post(ended)
