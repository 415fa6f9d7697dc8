"""A small body that comes with its head is paid from the budget only if it is kept: its work waits, or its answer does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from gateway.config import Config, LimitsConfig
from gateway.net.transport import MemoryTransport
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.messages import Part

SIZE = 1000


class Models:
    """Models that echo parts: one at once, one that waits for `go`."""

    def __init__(self) -> None:
        self.go = trio.Event()

    async def now(self, part: Part) -> Part:
        return part

    async def later(self, part: Part) -> Part:
        await self.go.wait()
        return part

    def serving(self, limits: LimitsConfig | None = None, **how: Any) -> Any:
        specs = [spec_of(self.now, "now"), spec_of(self.later, "later")]
        return memory_gateway(specs, Config(limits=limits or LimitsConfig()), check=True, **how)


def asking(model: str) -> bytes:
    head = b"POST /models/%b/invoke HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (model.encode(), SIZE)
    return head + bytes(SIZE)


async def asked(served: MemoryGateway, model: str, times: int = 2) -> MemoryTransport:
    """A client whose last request repeats the head of the first, so that its body comes with it."""
    client = served.connect()
    for _ in range(times - 1):
        client.try_send([asking("now").replace(b"now", model.encode())])
        await wait_all_tasks_blocked()
        answered(client)
    client.try_send([asking(model)])
    await wait_all_tasks_blocked()
    return client


def answered(client: MemoryTransport) -> bytes:
    buffer = memoryview(bytearray(65536))
    return bytes(buffer[: client.try_receive_into(buffer) or 0])


async def test_it_is_not_paid_if_it_is_answered_at_once() -> None:
    async with Models().serving() as served:
        client = await asked(served, "now")
        assert bytes(SIZE) in answered(client)
        served.gateway.budget.high_water = 0
        client.try_send([asking("now")])
        await wait_all_tasks_blocked()
        assert bytes(SIZE) in answered(client)
        assert served.gateway.budget.high_water == 0


async def test_it_is_paid_while_its_model_waits() -> None:
    models = Models()
    models.go.set()
    async with models.serving() as served:
        client = await asked(served, "later")
        answered(client)
        models.go = trio.Event()
        client.try_send([asking("later")])
        await wait_all_tasks_blocked()
        assert served.gateway.budget.used >= SIZE
        models.go.set()
        await wait_all_tasks_blocked()
        assert served.gateway.budget.used == 0
        assert bytes(SIZE) in answered(client)


async def test_it_is_paid_while_its_answer_waits_for_the_client() -> None:
    async with Models().serving(capacity=SIZE + 200) as served:
        client = await asked(served, "now", times=1)
        answered(client)
        client.try_send([asking("now")])
        await wait_all_tasks_blocked()
        client.try_send([asking("now")])  # before it has read the last answer
        await wait_all_tasks_blocked()
        assert served.gateway.budget.used >= SIZE
        while answered(client):
            await wait_all_tasks_blocked()
        assert served.gateway.budget.used == 0


async def test_it_is_refused_when_its_model_waits_and_the_budget_has_no_room() -> None:
    models = Models()
    models.go.set()
    async with models.serving(replace(LimitsConfig(), total_bytes=65536)) as served:
        client = await asked(served, "later")
        answered(client)
        models.go = trio.Event()
        budget = served.gateway.budget
        budget.used += (taken := budget.limit // 2)
        budget.limit, whole = taken + SIZE, budget.limit
        client.try_send([asking("later")])
        await wait_all_tasks_blocked()
        assert b" 503 " in answered(client)[:20]
        budget.used, budget.limit = budget.used - taken, whole
