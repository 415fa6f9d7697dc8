"""A model that says nothing in a process of its own ends its session, and the verdict names the line there."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from gateway.config import ModelConfig
from tests.gateway.instances import test_asyncio_models as on_asyncio
from tests.gateway.instances.test_process_models import begin, serving, there, until
from tests.gateway.operator.operators import Operator

pytestmark = pytest.mark.programs


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
async def test_a_silent_process_is_noticed_and_its_line_named(loop: str) -> None:
    config: ModelConfig = (there if loop == "trio" else on_asyncio.model)("mute", stall_timeout=4)
    async with serving(m=config) as memory:
        operator = Operator(memory.gateway)
        client, conversation = await begin(memory, "x")
        assert await conversation.receive() == "one "
        told: dict[str, Any] = {}

        async def named() -> bool:
            told.update((await operator.get("/stats"))["verdict"])
            return told["kind"] == "stalled" and ", at " in told["sentence"]

        while not await named():  # noqa: ASYNC110
            await trio.sleep(0.05)
        file = "process_models.py" if loop == "trio" else "asyncio_models.py"
        assert f"/{file}:" in told["sentence"]
        assert told["sentence"].endswith(" in mute")
        answer = await conversation.rest()
        assert "(models.m.stall_timeout)" in answer.error
        await until(lambda: memory.gateway.counts().slots_in_use == 0)
        assert memory.gateway.counts().endings == {"model-error": 1}
        client.close()
