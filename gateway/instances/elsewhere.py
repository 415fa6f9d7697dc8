"""A model elsewhere: what its instances ask of the place that one of them runs at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import trio

from gateway.instances.memory import SharedMemory
from gateway.instances.spawn import Exit, ProcessPlan, Said


class Elsewhere(Protocol):
    """A place outside of the gateway that a model runs at, from its start to its end: a process of this machine
    (`spawn.Process`), one that tests play in memory (`gateway.testing`), or something on another machine.

    All that is said of sessions is in messages over its one stream: they are opened, each side sends while it has credit,
    they are cancelled, and each ends once (`messages`, `pipe`). So a place itself has only a life. It starts, says
    `messages.Hello`, and does what a `child.Child` does. It may end at any moment, by itself or by `kill`; then its stream
    ends, `ended` says how it ended, and every session that was open is lost, without a word of its own. An `Instance` is one
    of them as the gateway calls it, and `catalog.process_model.Instances` are all those of a model.
    """

    @property
    def plan(self) -> ProcessPlan:
        """What it is to be: its model, its number."""

    @property
    def pid(self) -> int:
        """What it is called where it runs, for the log."""

    @property
    def tail(self) -> str:
        """The end of what it has written to stderr; when `ended` has returned, the last of all."""

    @property
    def memory(self) -> SharedMemory | None:
        """What large tensors and parts go through; None where all goes through the stream."""

    def stream(self) -> trio.abc.HalfCloseableStream:
        """Our end of its stream, for whoever serves it, once."""

    async def ended(self) -> Exit:
        """Waits until it has ended, and says how: any number of tasks may, each hears the same. A cancel changes nothing."""

    def kill(self) -> None:
        """Ends it, whatever it does. Nothing where it has ended."""

    def close(self) -> None:
        """Kills it and gives everything back, our end of its stream included. A second call does nothing."""

    async def read_output(self, said: Said) -> None:
        """Tells each line that it writes, until it has ended. One task has to, while it runs."""

    def used(self) -> tuple[int, float]:
        """The bytes of memory that it has, and the seconds of CPU that it has used; noughts where that cannot be known."""


Start: TypeAlias = Callable[[ProcessPlan], Elsewhere]
"""Starts one. It returns at once; OSError where it cannot."""
