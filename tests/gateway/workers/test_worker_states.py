"""The table of a worker's states is what a worker does: each transition in it happens, and no other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.workers.states import TRANSITIONS, State
from gateway.workers.worker import Worker
from models.messages import Family, Part
from models.session import Session
from models.spec import Model, ModelSpec, Restart, RestartPolicy

Step = tuple[State, State]


async def silent(_: Session[Part, Part]) -> None:
    """A model that says nothing."""


async def lived(kind: Restart, *plans: str, stop_in: State) -> list[Step]:
    """The changes of state of a worker whose loads go as planned, one after the other, and that is stopped where it stays in
    `stop_in`. A load hangs, fails, works, and then crashes or ends by itself; the last plan is for all further ones."""
    planned = iter(plans)
    plan = ""

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        nonlocal plan
        plan = next(planned, plan)
        if plan == "hangs":
            await trio.sleep_forever()
        if plan == "fails":
            raise OSError("no weights")
        async with trio.open_nursery() as nursery:

            async def end() -> None:
                await trio.sleep(1)
                if plan == "crashes":
                    raise ZeroDivisionError
                nursery.cancel_scope.cancel()

            if plan in ("crashes", "ends"):
                nursery.start_soon(end)
            yield silent
            nursery.cancel_scope.cancel()

    steps: list[Step] = []
    before = State.LOADING

    def changed(worker: Worker) -> None:
        nonlocal before
        steps.append((before, worker.state))
        before = worker.state

    policy = RestartPolicy(kind=kind, backoff=3.0, backoff_max=3.0, jitter=0.0)
    worker = Worker(ModelSpec(name="m", family=Family.PARTS, load=load, restart=policy), changed=changed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        await wait_all_tasks_blocked()
        for _ in range(10):  # more than any of them takes until it stays where it is
            if plan != plans[-1] or worker.state is not stop_in:
                await trio.sleep(2)
        worker.stop()
    return steps


LIVES = [
    (Restart.PERMANENT, ["works"], State.READY),
    (Restart.PERMANENT, ["hangs"], State.LOADING),
    (Restart.PERMANENT, ["crashes", "works"], State.READY),
    (Restart.PERMANENT, ["fails"], State.RESTARTING),
    (Restart.TEMPORARY, ["fails"], State.FAILED),
    (Restart.TEMPORARY, ["crashes"], State.FAILED),
    (Restart.TRANSIENT, ["ends"], State.ENDED),
]


async def test_every_transition_of_the_table_happens_and_no_other(autojump_clock: MockClock) -> None:
    happened: set[Step] = set()
    for kind, plans, stop_in in LIVES:
        steps = await lived(kind, *plans, stop_in=stop_in)
        assert steps[-1][1] is State.STOPPED
        happened.update(steps)
    assert happened == {(start, end) for start, ends in TRANSITIONS.items() for end in ends}


def test_a_change_that_is_not_in_the_table_is_a_bug_that_shows() -> None:
    worker = Worker(ModelSpec(name="m", family=Family.PARTS, load=lambda: pytest.fail("it is not loaded")))
    with pytest.raises(AssertionError, match=r"State\.LOADING does not become State\.ENDED"):
        worker.life.enter(State.ENDED)
