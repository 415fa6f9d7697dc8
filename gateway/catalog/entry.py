"""The repository's record of one model, from the first moment of its load until nothing of it is left."""

from __future__ import annotations

import enum
import itertools
from typing import final

import trio

from gateway.doorbell import Doorbell
from gateway.errors import GatewayError
from gateway.workers.worker import Worker
from models.blocking import StepHolder

# Seconds that a caller waits for a load that it gave up; only a thread lasts longer. In a drain this is part of the time
# that an exchange has for its goodbye, and must leave most of that.
GRACE = 1.5
# Seconds beyond `unload_timeout` for cancelled sessions and the clean-up of load(); the worker bounds both.
UNLOAD_GRACE = 15.0
_numbers = itertools.count(1)


class EntryState(enum.Enum):
    """The phase of a model of the repository; its value continues an error that begins with the model's name."""

    LOADING = "is being loaded"
    READY = "is loaded already"
    LEAVING = "is still being unloaded"


class LoadStep(enum.Enum):
    """The step of a load that is timed; its value is the error when the step takes too long, before the seconds."""

    READ = "reading its folder took longer than"
    WAIT = "the code of other models, which runs first, took longer than"
    RUN = "its code took longer than"


@final
class Users:
    """The number of `in_use` blocks that keep a model loaded. All versions of the model share one count."""

    count = 0


@final
class Entry(StepHolder):
    """A taken name: from the first moment of a load until nothing of the model is left."""

    def __init__(self, name: str, url: str, shown: str) -> None:
        self.name, self.url, self.shown = name, url, shown
        self.state = EntryState.LOADING
        self.module = f"everywire_model_{next(_numbers)}"
        self.folder, self.stamp = "", 0
        self.before: Entry | None = None
        """The version that this one replaces when it is ready; None for a first load."""
        self.worker: Worker | None = None
        self.error: GatewayError | None = None
        self.told = False
        """True if the load's worker has logged its error already."""
        self.reserved: int | None = None
        self.measured = 0
        self.has_cycles = True
        """True if reference cycles may hold the model, so that only the garbage collector frees it. The functions of a
        model.py and their module form such cycles. Library models do not, unless they fail."""
        self.evicts = False
        """True if unused models may be unloaded to make room for this one."""
        self.patience = 0.0
        """Seconds that calls of the replaced version have to end."""
        self.evicted_for: Entry | None = None
        """The entry that this one was unloaded to make room for; None if it was not evicted."""
        self.waiters, self.users = 0, Users()
        self.load_scope, self.step = trio.CancelScope(), LoadStep.READ
        self.decided = trio.Event()
        """Set when the model is ready, or `error` says why it is not."""
        self.gone = trio.Event()
        self.stuck = False
        """True if only a thread that does not return is left of the model. When it ends is unknown."""
        self.threads, self._bell = 0, Doorbell()
        """Threads of the load that have not returned."""

    @property
    def idle(self) -> bool:
        """True if the model is ready, and no caller, session or slot uses it."""
        if self.state is not EntryState.READY or self.users.count or self.waiters:
            return False
        return self.worker is not None and not self.worker.slots.live and not self.worker.slots.in_use

    # StepHolder: the name stays taken until the last thread of a load has returned

    def hold(self, *, stopping: bool = True) -> None:
        self.threads += 1

    def release(self) -> None:
        self.threads -= 1
        self._bell.ring()

    async def quiet(self) -> None:
        """Returns when no session and no thread of this model runs any more."""
        if self.worker is not None:
            await self.worker.slots.all_left()
        while self.threads:
            await self._bell.wait()


def anew(error: GatewayError) -> GatewayError:
    """Returns a copy of the error without its traceback, whose frames would keep the failed model in memory."""
    return type(error)(error.message, status=error.status, retry_after=error.retry_after)
