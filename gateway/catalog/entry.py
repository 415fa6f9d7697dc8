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

# What a load that was given up has to end in before whoever gave it up goes on without it: only a thread lasts longer. In a
# drain it is part of the time that an exchange has for its goodbye, and must leave most of that.
GRACE = 1.5
# What an unload may take beyond `unload_timeout`: cancelled sessions, the clean-up of load(), both bounded by the worker.
UNLOAD_GRACE = 15.0
_numbers = itertools.count(1)


class EntryState(enum.Enum):
    """Where a model is on its way in and out, in words for who wants its name."""

    LOADING = "is being loaded"
    READY = "is loaded already"
    LEAVING = "is still being unloaded"


class LoadStep(enum.Enum):
    """What a load is at, and what it is to have taken too long for that."""

    READ = "its folder was not read within"
    WAIT = "the code of others is run before it, and was not over within"
    RUN = "its code took longer than"


@final
class Users:
    """Those who want a model to stay, whichever version of it they have chosen: they are sent on to the next."""

    count = 0


@final
class Entry(StepHolder):
    """A name that is taken, from the first moment of a load until nothing of the model is left."""

    def __init__(self, name: str, url: str, shown: str) -> None:
        self.name, self.url, self.shown = name, url, shown
        self.state = EntryState.LOADING
        self.module = f"everywire_model_{next(_numbers)}"
        self.folder, self.stamp = "", 0
        self.before: Entry | None = None
        """The version that this one is to replace."""
        self.worker: Worker | None = None
        self.error: GatewayError | None = None
        self.told = False
        """True if the load's worker has logged its error already."""
        self.reserved: int | None = None
        self.measured = 0
        self.has_cycles = True
        """Whether what it was made of may hold itself, so that only the garbage collector finds it: functions and the
        module that they are of do. What the library loads does not, unless it fails."""
        self.evicts = False
        """Whether somebody wants it so much that others may go for it."""
        self.patience = 0.0
        """Seconds that calls of the version before have to end."""
        self.evicted_for: Entry | None = None
        """Whose place this one's is to be."""
        self.waiters, self.users = 0, Users()
        self.load_scope, self.step = trio.CancelScope(), LoadStep.READ
        self.decided = trio.Event()
        """It is ready, or `error` says why not."""
        self.gone = trio.Event()
        self.stuck = False
        """All of it has left but a thread that does not return: nobody knows when it goes."""
        self.threads, self._bell = 0, Doorbell()
        """Those of its load that have not returned."""

    @property
    def idle(self) -> bool:
        if self.state is not EntryState.READY or self.users.count or self.waiters:
            return False
        return self.worker is not None and not self.worker.slots.live and not self.worker.slots.in_use

    # a holder of blocking steps: the name stays taken until the last thread of a load has returned

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
    """The same error without its traceback, whose frames would keep what the load had made."""
    return type(error)(error.message, status=error.status, retry_after=error.retry_after)
