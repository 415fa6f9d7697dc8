"""Models written for asyncio in processes of their own, as their clients and operators see them: nothing is pretended."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from gateway.client import questions
from gateway.config import Config, ModelConfig, ProcessConfig, RestartConfig
from gateway.workers.states import State
from tests.gateway.instances.test_process_models import (
    QUICK,
    Diary,
    begin,
    children,
    descriptors,
    dialled,
    get,
    lmi,
    logged,
    pids,
    program,
    ready,
    serving,
    status,
    until,
)
from tests.gateway.instances.test_process_models import diary as diary

pytestmark = pytest.mark.programs

MODELS = "tests.gateway.instances.asyncio_models"
PATIENCE = 60


def model(attribute: str, *, process: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    """A model of `asyncio_models`."""
    settings.setdefault("restart", QUICK)
    section = ProcessConfig(loop="asyncio", **(process or {}))
    return ModelConfig(factory=f"{MODELS}:{attribute}", process=section, **settings)


# -- each shape of a model -------------------------------------------------------------------------------------------------


async def test_each_shape_of_a_model_answers() -> None:
    shapes = ("double", "halve", "words", "letters", "whole", "parrot", "Shouter", "engine", "batched")
    async with serving(**{shape: model(shape) for shape in shapes}) as memory:
        for name, factor in (("double", 2), ("halve", 0.5)):
            for binary in (True, False):
                answer = await memory.client().infer({"x": np.ones((2, 1), np.float32)}, name, binary=binary)
                assert answer.status == 200, answer.error
                assert (answer.messages[0]["OUTPUT0"].elements == factor).all()
        for name, said in (
            ("words", "the quick fox "), ("letters", "the quick fox"), ("whole", "the quick foxTHE QUICK FOX"),
            ("Shouter", "THE QUICK FOX!"), ("engine", "the quick fox "),
        ):  # fmt: skip
            for stream in (True, False):
                assert (await lmi(memory, "the quick fox", name, stream=stream)).text == said
        answer = await memory.client("http2").openai("hello you", "Shouter", max_tokens=5)
        assert (answer.text, json.loads(answer.body)["usage"]["prompt_tokens"]) == ("USER: HELLO YOU!", 3)
        too_long = await memory.client().openai("hello you and all the others", "Shouter")
        assert (too_long.status, "maximum context length is 6 tokens" in str(too_long.error)) == (400, True)
        socket = await memory.conversation("parrot")
        await socket.send(b"one")
        await socket.send(b"two")
        assert [await socket.receive() for _ in range(3)] == [b"hello", b"one", b"two"]
        await socket.end()
        assert await socket.receive() is None
        rows: list[Any] = []

        async def one() -> None:
            answer = await memory.client().infer({"x": np.ones((1, 1), np.float32)}, "batched")
            assert answer.status == 200, answer.error
            rows.extend(answer.messages[0]["OUTPUT0"].elements.tolist())

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(one)
        assert rows == [[8]] * 8


async def test_a_rolling_batch_is_refused_in_words() -> None:
    async with serving(m=model("counting", restart=RestartConfig(intensity=0))) as memory:
        await until(lambda: status(memory).state is State.FAILED)
        assert 'a rolling batch needs Trio: give its model loop = "trio"' in status(memory).last_error.error


async def test_tensors_of_16_mib_there_and_back() -> None:
    limits = replace(Config().limits, body=64 << 20)
    async with serving(Config(limits=limits), m=model("identity")) as memory:
        x = np.random.default_rng(1).random((2, 1 << 20), np.float64)
        answer = await memory.client("http2").infer({"x": x}, "m")
        assert answer.status == 200, answer.error
        assert (answer.messages[0]["x-back"].elements.reshape(x.shape) == x).all()


# -- how sessions and processes end ----------------------------------------------------------------------------------------


async def test_a_session_that_raises_or_exits_is_all_that_ends(diary: Diary) -> None:
    async with serving(m=model("Doomed", options={"diary": str(diary.path)})) as memory:
        (pid,) = await ready(memory)
        for what, text in {"exit 3": "incident", "raise": "incident", "error": "no such voice"}.items():
            before, after = await lmi(memory, f"before {what}"), await lmi(memory, f"now {what}")
            assert (before.status, after.status) == ({"error": 422}.get(what, 424), 200), before.error
            assert text in before.error
            assert text in after.error
        assert pids(memory) == [pid]
        assert {*await diary.says("called", 6)} == {"nobody"}, "context variables are the session's"


@pytest.mark.parametrize("what", ["segv", "kill"])
async def test_the_death_of_a_process_ends_its_sessions_and_nobody_elses(what: str, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    async with serving(m=model("Doomed"), other=model("ticking")) as memory:
        _, neighbour = await begin(memory, "x", "other")
        (old,) = await ready(memory)
        _, lost = await begin(memory, "now wait")
        assert await lost.receive() == str(old)
        assert "ended; try again" in (await lmi(memory, f"now {what}")).error
        assert "ended; try again" in (await lost.rest()).error
        await ready(memory, but=[old])
        assert (await neighbour.receive()).strip().isdecimal()
        neighbour.leave()
        assert {"segv": "SIGSEGV", "kill": "SIGKILL"}[what] in logged(caplog, "model crashed")[0].reason


@pytest.mark.parametrize("by", ["hang_timeout", "stop_within"])
async def test_a_model_that_blocks_its_loop_is_killed_told_of_and_started_again(by: str, diary: Diary, caplog: Any) -> None:
    hang: dict[str, Any] = {"process": {"hang_timeout": 0.5}} if by == "hang_timeout" else {"stop_within": 0.3}
    async with serving(m=model("Doomed", options={"diary": str(diary.path)}, **hang)) as memory:
        (old,) = await ready(memory)
        client, conversation = await begin(memory, "now block")
        await diary.says("blocks")
        if by == "hang_timeout":
            assert "try again" in (await conversation.rest()).error
        else:
            client.close()
        (killed,) = await until(lambda: logged(caplog, "instance killed"))
        assert (killed.pid, by in killed.reason) == (old, True)
        await ready(memory, but=[old])


async def test_background_work_that_raises_ends_the_model_as_its_loader_says(diary: Diary) -> None:
    async with serving(m=model("engine", options={"diary": str(diary.path)})) as memory:
        (old,) = await ready(memory)
        _, neighbour = await begin(memory, "a " * 10_000)
        assert await neighbour.receive() == "a "
        assert "try again" in (await lmi(memory, "break")).error
        assert "try again" in (await neighbour.rest()).error
        await ready(memory, but=[old])
        assert "AttributeError: 'NoneType' object has no attribute 'put_nowait'" in status(memory).last_error.error
        assert (await lmi(memory, "b c")).text == "b c "


async def test_what_a_model_prints_and_logs_and_what_nobody_looks_at_is_in_the_gateways_log(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    async with serving(m=model("Doomed")) as memory:
        (pid,) = await ready(memory)
        await lmi(memory, "now log")
        await lmi(memory, "now background")
        (line,) = await until(lambda: logged(caplog, "model output"))
        assert (line.stream, line.line, line.pid) == ("stdout", "printed it", pid)
        (record,) = logged(caplog, "warned of it")
        assert (record.name, record.model, record.instance, record.pid) == ("app.words", "m", 0, pid)
        (lost,) = await until(lambda: [one for one in caplog.records if one.name == "asyncio"])
        assert "ZeroDivisionError: nobody looks" in lost.getMessage()
        assert pids(memory) == [pid]


# -- cancel ----------------------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_or_whose_time_is_over_has_the_models_finally_run(diary: Diary) -> None:
    models = {
        "m": model("Doomed", options={"diary": str(diary.path)}, capacity=1),
        "brief": model("Doomed", options={"diary": str(diary.path)}, timeout=0.5),
    }
    async with serving(**models) as memory:
        client, conversation = await begin(memory, "now wait")
        await conversation.receive()
        client.close()
        assert await diary.says("finally") == ["CancelledError"]
        client, conversation = await begin(memory, "now wait", wire="http2")
        await conversation.receive()
        await conversation.abandon()
        await diary.says("finally", 2)
        assert (await lmi(memory, "before wait", "brief")).status == 504
        assert await diary.says("finally", 3) == ["CancelledError"] * 3


async def test_a_model_that_is_deaf_to_a_cancel_is_told_when_it_sends(diary: Diary) -> None:
    async with serving(m=model("Doomed", options={"diary": str(diary.path)}, capacity=1)) as memory:
        client, conversation = await begin(memory, "now deaf")
        await conversation.receive()
        await until(lambda: memory.gateway.counts().slots_in_use == 1)
        with trio.move_on_after(0.05):
            await trio.sleep_forever()  # until it sleeps
        client.close()
        await diary.says("goes")
        assert await diary.says("finally") == ["ClosedResourceError"]
        assert (await lmi(memory, "now")).text.endswith(" done")


async def test_an_engine_learns_that_a_client_has_left(diary: Diary) -> None:
    async with serving(m=model("engine", options={"diary": str(diary.path)})) as memory:
        client, conversation = await begin(memory, "a " * 10_000)
        await conversation.receive()
        client.close()
        assert await diary.says("left") == ["a 0"]


async def test_a_function_in_a_thread_keeps_its_slot_until_it_returns(diary: Diary, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with serving(m=model("Sitting", options={"diary": str(diary.path), "gate": str(gate)}, capacity=1)) as memory:
        client, _ = await begin(memory, "x")
        await diary.says("sits")
        client.close()
        await until(lambda: memory.gateway.counts().exchanges == 0)
        assert memory.gateway.counts().slots_in_use == 1
        _, waits = await begin(memory, "y")
        gate.touch()
        assert (await waits.rest()).text == "sat"
        await diary.says("rises", 2)


# -- backpressure ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "ahead"), [(1000, 16), (64 * 1024, 4)])
async def test_a_client_that_does_not_read_stops_the_model_in_its_process(size: int, ahead: int, tmp_path: Path) -> None:
    counts, capacity = tmp_path / "count", 32 * 1024

    def count() -> int:
        text = counts.read_text().split() if counts.exists() else []
        return int(text[0]) if text else 0

    config = Config()
    async with serving(config, capacity=capacity, m=model("Counter", options={"file": str(counts), "size": size})) as memory:
        socket = await memory.conversation("m")
        await until(count)
        last = -1
        while last != (last := count()):
            with trio.move_on_after(0.3):
                await trio.sleep_forever()
        # in flight, in the queue of the wire, one that waits for it, and what is ahead of it
        bound = (capacity + config.limits.send_buffer) // size + 2 + ahead
        assert last <= bound + 1, (last, bound)
        for number in range(last + 10):
            data = await socket.receive()
            assert data is not None
            assert int(data[:8]) == number
        socket.peer.close()
        await until(lambda: "over" in counts.read_text())


# -- coming and going ------------------------------------------------------------------------------------------------------


async def test_a_model_is_unloaded_with_its_loaders_exit_and_a_reload_starts_another(diary: Diary) -> None:
    async with serving(m=model("engine", options={"diary": str(diary.path)})) as memory:
        await memory.gateway.reload("m", patience=1)
        await until(lambda: diary.lines == ["loaded", "loaded", "unloaded"])
        with trio.fail_after(4):
            await memory.gateway.control.unload("m")
        assert diary.lines == ["loaded", "loaded", "unloaded", "unloaded"]


async def test_sessions_that_come_go_and_die_leave_nothing() -> None:
    chance = random.Random(7)
    async with serving(m=model("ticking", process={"instances": 2}, capacity=100)) as memory:
        await ready(memory, 2)

        async def some() -> None:
            for _ in range(10):
                client, conversation = await begin(memory, "x", wire=chance.choice(["http1", "http2"]))
                numbers = []
                for _ in range(chance.randrange(20)):
                    if (token := await conversation.receive()) is None:
                        break
                    numbers.append(int(token))
                assert numbers == list(range(len(numbers)))
                assert not conversation.answer.over or "try again" in conversation.answer.error
                client.close()

        async def twenty() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(some)

        await twenty()
        before, processes = descriptors(), children()
        for _ in range(3):
            both = await ready(memory, 2)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(twenty)
                for pid in both:
                    await trio.sleep(chance.uniform(0.05, 0.2))
                    os.kill(pid, signal.SIGKILL)
            await ready(memory, 2, but=both)
        await until(lambda: memory.gateway.counts().slots_in_use == 0)
        assert descriptors() <= before
        assert len(children()) == len(processes)
        assert (await get(memory, "/ping"))[0] == 200


async def test_sigterm_drains_the_sessions_and_leaves_the_loader(diary: Diary, tmp_path: Path) -> None:
    flags = [
        *("--model", f"m={MODELS}:engine", "--set", "models.m.process.loop=asyncio"),
        *("--set", f"models.m.options.diary={diary.path}", "--set", "drain.timeout=0.5"),
    ]
    with program(tmp_path, *flags) as (process, log):
        async with dialled(log) as client:
            conversation = client.about(questions.lmi("a " * 100_000, "m", stream=True, max_new_tokens=60_000))
            await conversation.begin()
            await conversation.receive()
            process.send_signal(signal.SIGTERM)
            await conversation.rest()
        with trio.fail_after(PATIENCE):
            assert await trio.to_thread.run_sync(process.wait) == 3
        assert diary.lines == ["loaded", "left a 0", "unloaded"]
        events = [line["event"] for line in log]
        assert "instance ended" not in events
        assert "instance killed" not in events
