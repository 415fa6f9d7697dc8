"""The interface of a place outside the gateway where an instance of a model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import trio

from gateway.instances.memory import SharedMemory
from gateway.instances.spawn import Exit, ProcessPlan, Said


class Elsewhere(Protocol):
    """A place outside the gateway where one instance of a model runs: a process of this machine (`spawn.Process`), an
    emulation in memory for tests (`gateway.testing`), or something on another machine.

    Sessions are messages over its one stream: they are opened, each side sends while it has credit, they are cancelled, and
    each ends once (`messages`, `pipe`). The place itself only starts and ends. After its start it sends `messages.Hello`,
    and then does what a `child.Child` does. It may end at any moment, by itself or by `kill`. Then its stream ends, `ended`
    returns how, and all open sessions are lost without a message. An `Instance` is the gateway's view of one place;
    `catalog.process_model.Instances` are all those of a model.
    """

    @property
    def plan(self) -> ProcessPlan:
        """The plan it was started by, with its model and its number."""

    @property
    def pid(self) -> int:
        """Its process id on the machine where it runs, for the log."""

    @property
    def tail(self) -> str:
        """The end of its stderr so far; complete once `ended` has returned."""

    @property
    def memory(self) -> SharedMemory | None:
        """The shared memory for large tensors and parts; None if all bytes go through the stream."""

    def stream(self) -> trio.abc.HalfCloseableStream:
        """Returns our end of its stream. May be called once."""

    async def ended(self) -> Exit:
        """Waits until it has ended, and returns how. Any number of tasks may wait; all get the same. A cancel changes
        nothing."""

    def kill(self) -> None:
        """Ends it at once, whatever it does. Does nothing if it has ended."""

    def close(self) -> None:
        """Kills it and frees everything, including our end of its stream. A second call does nothing."""

    async def read_output(self, said: Said) -> None:
        """Passes each line that it writes to `said`, until it has ended. One task must run this for its whole life."""

    def used(self) -> tuple[int, float]:
        """Returns its bytes of memory and its seconds of CPU; zeros if they are unknown."""


Start: TypeAlias = Callable[[ProcessPlan], Elsewhere]
"""Starts an instance by its plan and returns at once. OSError if it cannot be started."""
