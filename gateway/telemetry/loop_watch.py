"""Notices when the event loop is late, while that lasts, and names the work that keeps it: its kind, and whose it is.

The loop stamps the time ten times a second, by its coarse timer. A thread wakes about as often and checks only that stamp.
If the stamp is late, the thread reads the stack of the loop's thread every few milliseconds until it is in time again. It
finds the task of the step, its model and its work, and counts the time by that work: many short steps count as a long one
does. A step that releases the interpreter (`time.sleep`, a read, a loop in Python) is logged while it lasts. A C call that
holds the interpreter stops this thread too: it is logged afterwards, with the line at which the loop goes on.

If the loop's thread has used little CPU, it waited for the interpreter, and the stacks of other threads tell for whom. If
it waited for a CPU, nobody is blamed.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import NamedTuple, TypeAlias, final

import trio

from gateway.core.runner import Runner
from models.blocking import caught
from models.tracebacks.parked import author_of, local, place_of

log = logging.getLogger("gateway")

PULSE = 0.1
"""Seconds between two stamps of the loop."""
LATE = 0.05
"""Seconds by which a stamp is late before anybody looks for the reason."""
_AGAIN = 0.05  # seconds after which a loop that is blocked is looked at again, to tell one step from many
_PAUSE = 0.01  # seconds between two looks at a loop that is late
_DEAR = 10  # a pause is at least this many times as long as the look before it has taken
_STARVED = 0.001  # seconds without a CPU: less is no reason for anything
_HELD = 0.1  # seconds: a thread that wakes less late than this was only waiting for its turn of the interpreter
_QUIET = 10.0  # seconds between two lines about one model
_GROWN = 10.0  # a block is logged again when it lasts this many times as long
_STACK = 12  # the most lines of a stack
_RECENT = 60.0  # seconds for which `Blocks.recent` has the works
_EPISODES = 1024  # the most works that it has
_OTHER_THREADS = 64  # the most threads whose stacks are read
_EXCHANGES, _IN_THREAD = Runner._run.__code__, caught.__code__

Whose: TypeAlias = "Callable[[trio.lowlevel.Task], tuple[str, str]]"
"""Returns the model that a task works for, and the id of its exchange; empty texts if there is none."""


class Work(NamedTuple):
    """A kind of work, and the peer or model for which it is done."""

    kind: str
    """One of few texts, such as `TLS records`; empty if it is not known."""
    whose: str
    """An address without a port, the name of a model, or the authority of a container; empty if nobody is known."""


UNKNOWN = Work("", "")
NO_CPU = Work("wait for a CPU", "")
"""No work: the loop could run, and had no CPU."""
MODEL_CODE = "model code"
"""The kind of a model author's own code; `whose` is the model."""

Names: TypeAlias = "Callable[[trio.lowlevel.Task | None, list[FrameType]], Work]"
"""Returns the work of a stack, the innermost frame first, and of the task that it belongs to, if one is known."""


@final
@dataclass(slots=True)
class Blocks:
    """The number of steps that blocked the loop, and their seconds, by model (an empty name: the gateway's own code); and
    the seconds for which the loop was late, by work."""

    count: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    late: dict[str, float] = field(default_factory=dict)
    """Seconds by kind of work; an empty kind is not known."""
    _recent: deque[tuple[float, Work, float]] = field(default_factory=lambda: deque(maxlen=_EPISODES))

    def add(self, spent: Mapping[Work, float], queued: float) -> None:
        """Counts the time for which the loop was late just now; `queued` is the part of it in which it waited for a CPU."""
        now, total = time.monotonic(), sum(spent.values())
        if not total:
            return
        waited = min(queued, total)
        for work, seconds in (*((work, n * (1 - waited / total)) for work, n in spent.items()), (NO_CPU, waited)):
            self.late[work.kind] = self.late.get(work.kind, 0.0) + seconds
            self._recent.append((now, work, seconds))

    def recent(self) -> dict[Work, float]:
        """Seconds for which the loop was late in the last minute, by work. May be called in any thread."""
        since, sums = time.monotonic() - _RECENT, dict[Work, float]()
        for at, work, seconds in list(self._recent):
            if at >= since:
                sums[work] = sums.get(work, 0.0) + seconds
        return sums


@final
@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the loop's thread."""

    task: trio.lowlevel.Task | None
    model: str
    exchange: str
    at: str
    stack: list[str]
    work: Work


@final
class _Episode:
    """A time for which the loop is late, and the works that were seen in it."""

    __slots__ = ("at", "cpu", "last", "spent")

    def __init__(self, due: float, cpu: float) -> None:
        self.at, self.cpu = due, cpu  # the end of what is counted, and the CPU time of the loop's thread at the last look
        self.spent: dict[Work, float] = {}
        self.last = UNKNOWN

    def blame(self, work: Work) -> None:
        self.last = work

    def until(self, now: float) -> None:
        self.spent[self.last] = self.spent.get(self.last, 0.0) + max(now - self.at, 0.0)
        self.at = max(now, self.at)

    @property
    def main(self) -> Work:
        """The work that took at least half of the time, or else its kind alone, or nothing."""
        half, kinds = sum(self.spent.values()) / 2, dict[str, float]()
        for work, seconds in self.spent.items():
            kinds[work.kind] = kinds.get(work.kind, 0.0) + seconds
            if seconds >= half:
                return work
        kind = max(kinds, key=lambda kind: kinds[kind], default="")
        return Work(kind, "") if kind and kinds[kind] >= half else UNKNOWN


@final
class _QueuedForCPU:
    """The time for which the calling thread could run and had no CPU: others had them, or the control group's limit was
    reached. It is Linux's own count (`schedstat`), which some kernels and sandboxes lack; then it stays 0."""

    def __init__(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def seconds(self) -> float:
        try:
            return int(os.pread(self._file, 100, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@final
class LoopWatch:
    """Watches one event loop from a thread, inside `watching`. It must be made and entered on that loop."""

    def __init__(
        self,
        limit: float,
        whose: Whose,
        blocks: Blocks,
        late: Callable[[float, bool], None] = lambda seconds, starved: None,
        names: Names = lambda task, frames: UNKNOWN,
    ) -> None:
        """`limit`: the seconds that a step may take. The thread calls `whose` and `names`, and counts longer steps, and the
        works of a loop that is late, in `blocks`. `late`: see `beat_until`."""
        self._late, self._names = late, names
        self._limit, self._whose, self._blocks = limit, whose, blocks
        self._least = min(limit, LATE)
        self._beat = self._waited = self._cpu = 0.0
        self._over = threading.Event()
        self._said: dict[tuple[str, str], float] = {}
        self._unsaid: dict[tuple[str, str], int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Runs the thread during the block."""
        self._loop, self._root = threading.get_ident(), trio.lowlevel.current_root_task()
        self._clock = time.pthread_getcpuclockid(self._loop) if hasattr(time, "pthread_getcpuclockid") else None
        self._queued = _QueuedForCPU()
        self._stamp()
        thread = threading.Thread(target=self._watch, name="everywire loop watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._queued.close()
            thread.join(_AGAIN)  # not longer: the thread may be inside a log handler of the embedder

    async def beat_until(self, due: float) -> None:
        """Sleeps until `due`, on Trio's clock, and stamps the time meanwhile. Calls `late` with the seconds by which each
        stamp was late, and with True if the loop's thread waited for a CPU for at least half of it."""
        while (now := trio.current_time()) < due:
            self._stamp()
            next_due = min(due, now + PULSE)
            await trio.sleep_until(next_due)
            late = trio.current_time() - next_due
            self._late(late, self._queued.seconds() - self._waited >= max(late / 2, _STARVED))
        self._stamp()

    def _stamp(self) -> None:
        self._waited, self._cpu = self._queued.seconds(), time.thread_time()
        self._beat = time.monotonic()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            now, collected = time.monotonic(), _collected()
            planned = max(self._beat + PULSE + self._least, now + self._least)
            if self._over.wait(planned - now):
                return
            beat = self._beat
            if time.monotonic() - beat - PULSE >= self._least:
                self._follow(beat, planned, collected)

    def _follow(self, beat: float, planned: float, collected: int) -> None:
        """Looks at a loop that is late until it is in time again, and counts the time by its work. Logs it if that takes as
        long as the limit."""
        due, waited, cpu = beat + PULSE, self._waited, self._cpu
        episode = _Episode(due, cpu)
        while True:
            step, pause = self._see(episode)
            # if this thread was kept from running too, it did not see the step
            held = episode.at - planned > max(self._limit / 2, _HELD)
            if held and _collected() != collected:
                step, cause = self._unnamed(step, UNKNOWN), "a garbage collection"
                episode.spent = {UNKNOWN: episode.at - due}
            else:
                cause = "the interpreter was held, or the process did not run" if held else "one step"
            if episode.at - due >= self._limit:
                if not held and not self._over.wait(_AGAIN) and self._beat == beat:
                    again, _ = self._see(episode)
                    if again.task is not step.task:
                        step, cause = self._unnamed(again, episode.main), "many steps"
                self._tell_until_over(step, cause, beat, episode)
                break
            collected, planned = _collected(), episode.at + pause
            if self._beat != beat or self._over.wait(pause):
                break
        if self._beat != beat:
            episode.until(self._beat)
        late, waited = episode.at - due, self._queued.seconds() - waited
        # the loop sleeps only until its timer is due: the rest of that time had the same share of waits for a CPU
        asleep = PULSE + late - waited - ((self._cpu_of_loop() or cpu) - cpu)
        self._blocks.add(episode.spent, waited * late / (late + min(max(PULSE - asleep, 0.0), PULSE)) if late else 0.0)

    def _tell_until_over(self, step: _Step, cause: str, beat: float, episode: _Episode) -> None:
        model, due = step.model, 0.0
        said = False
        while self._beat == beat or not due:
            lasts = time.monotonic() - beat - PULSE
            if lasts >= due:
                first, due = not due, lasts * _GROWN
                if not first or self._may_say(step):
                    said = True
                    self._say(step, cause, lasts)
            if self._over.wait(_PAUSE):
                break
            if self._beat == beat and self._over.wait(self._see(episode)[1] - _PAUSE):
                break
        seconds = max(self._beat - beat - PULSE, self._limit)
        count, sums = self._blocks.count, self._blocks.seconds
        sums[model] = sums.get(model, 0.0) + seconds
        count[model] = count.get(model, 0) + 1
        if said:
            facts = {"model": model, **_named(episode.main), "seconds": round(seconds, 3)}
            log.warning("event loop runs again", extra=facts)

    def _may_say(self, step: _Step) -> bool:
        now, of = time.monotonic(), (step.model, step.work.kind)
        if now - self._said.get(of, -_QUIET) < _QUIET:
            self._unsaid[of] = self._unsaid.get(of, 0) + 1
            return False
        self._said[of] = now
        return True

    def _say(self, step: _Step, cause: str, seconds: float) -> None:
        facts = {
            "model": step.model, "id": step.exchange, **_named(step.work), "seconds": round(seconds, 3), "cause": cause,
            "at": step.at,
        }  # fmt: skip
        if unsaid := self._unsaid.pop((step.model, step.work.kind), 0):
            facts["unreported"] = unsaid
        hint = "a plain def runs in a thread; an async def must await, or call trio.to_thread.run_sync"
        log.warning("event loop blocked", extra={**facts, "hint": hint if step.model else "", "stack": step.stack})

    def _see(self, episode: _Episode) -> tuple[_Step, float]:
        """Looks, and counts the time since the last look for the work that it sees. Returns the step, and the seconds until
        the next look."""
        began, now, cpu = time.thread_time(), time.monotonic(), self._cpu_of_loop()
        step = self._look(cpu is None or cpu - episode.cpu >= (now - episode.at) / 2)
        episode.blame(step.work)
        episode.until(now)
        episode.cpu = cpu or 0.0
        return step, max(_PAUSE, _DEAR * (time.thread_time() - began))

    def _cpu_of_loop(self) -> float | None:
        if self._clock is None:
            return None
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread is gone
            return None

    def _look(self, busy: bool = True) -> _Step:
        """Returns the step that the loop's thread runs now. Unless the thread is `busy`, it may wait for the interpreter:
        then the work is that of a thread which has it."""
        stacks = sys._current_frames()
        del stacks[threading.get_ident()]  # this frame: with it, all frames would live on until the garbage collector runs
        frames = _frames(stacks.get(self._loop))
        task, own = _task_of(self._root, frames)
        author = author_of(own)
        model, exchange = ("", "") if task is None else self._whose(task)
        stack = [place_of(frame) for frame in frames[:_STACK]]
        if author is not None and model:
            work = Work(MODEL_CODE, model)
        else:
            work = UNKNOWN if busy else self._work_of_threads(stacks)
            if work is UNKNOWN:
                work = self._names(task, own)
        return _Step(
            task=task,
            model=model if author is not None else "",  # the gateway's own work for a model does not count as the model's
            exchange=exchange,
            at=place_of(author) if author is not None else stack[0] if stack else "",
            stack=stack,
            work=work,
        )

    def _work_of_threads(self, stacks: Mapping[int, FrameType]) -> Work:
        """The work of the first thread beside the loop's that has any."""
        others = (frame for thread, frame in stacks.items() if thread != self._loop)
        for innermost in islice(others, _OTHER_THREADS):
            frames = _frames(innermost)
            outer = next((n for n, frame in enumerate(frames) if frame.f_code is _IN_THREAD), None)
            if outer is not None:
                work = self._names(_task_of_thread(frames[outer:]), frames[:outer])
                if work.kind:
                    return work
        return UNKNOWN

    def _unnamed(self, step: _Step, work: Work) -> _Step:
        return _Step(task=step.task, model="", exchange="", at=step.at, stack=step.stack, work=work)


def _named(work: Work) -> dict[str, str]:
    return {"work": work.kind, "peer": "" if work.kind == MODEL_CODE else work.whose}


def _frames(innermost: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    return frames


def _task_of_thread(frames: list[FrameType]) -> trio.lowlevel.Task | None:
    """Returns the task that waits for a thread of Trio's, by a variable of `trio.to_thread.run_sync`. None if Trio has
    another name for it by now."""
    for frame in frames:
        if (register := local(frame, "task_register")) is not None:
            return register[0] if isinstance(register, list) and register else None
    return None


def _collected() -> int:
    """Returns the number of full garbage collections so far."""
    return int(gc.get_stats()[2]["collections"])


def _task_of(root: trio.lowlevel.Task | None, frames: list[FrameType]) -> tuple[trio.lowlevel.Task | None, list[FrameType]]:
    """Returns the task that runs these frames, and those of them that are its own, the innermost first. None if no task
    does, or the loop goes on meanwhile."""
    for n, frame in enumerate(frames):
        if frame.f_code is _EXCHANGES and (place := local(frame, "place")) is not None:
            return place.task, frames[: n + 1]
    running, tasks = set(frames), [] if root is None else [root]
    try:
        while tasks:
            task = tasks.pop()
            outermost = getattr(task.coro, "cr_frame", None)
            if outermost in running:
                return task, frames[: frames.index(outermost) + 1]
            for nursery in list(task.child_nurseries):
                tasks += list(nursery.child_tasks)
    except RuntimeError:  # the set of tasks has changed: the loop goes on
        pass
    return None, []
