"""The workers of a gateway: started in order, stopped in reverse, each failing alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import trio

from gateway.workers.worker import State, Worker
from models.spec import ModelSpec


@final
class Supervisor:
    """Runs a worker per model. One that cannot load or keeps crashing is given up; the others never notice."""

    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        self.workers: dict[str, Worker] = {}
        for spec in specs:
            if spec.name in self.workers:
                raise ValueError(f"two models are named {spec.name!r}: give one another name")
            self.workers[spec.name] = Worker(spec)
        self._begun: list[Worker] = []

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled or every worker was stopped. Started when the first load of each model is decided."""
        async with trio.open_nursery() as nursery:
            for worker in self.workers.values():
                nursery.start_soon(worker.run)
                self._begun.append(worker)
                await worker.first_load()
            task_status.started()

    async def stop(self) -> None:
        """Unloads every model, the last started first, and waits for each. Those that wait to be started never are."""
        for worker in reversed(self.workers.values()):
            worker.stop()
            if worker in self._begun:
                await worker.stopped.wait()

    @property
    def loading(self) -> list[str]:
        """Models whose first load is not decided yet."""
        return [w.name for w in self.workers.values() if w.state is State.LOADING]
