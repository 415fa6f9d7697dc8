"""A model that is ready and says nothing is noticed: its session ends after `stall_timeout`, and the verdict names its line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.client import post
from gateway.config import Config, LimitsConfig, LMIConfig, WebSocketConfig
from gateway.gateway import Gateway
from gateway.testing import in_memory_processes, memory_gateway
from gateway.testing.stories.talk import Leave
from models.adapt import spec_of
from models.messages import Family
from models.rolling import RollingBatch, rolling
from models.session import Session
from tests.gateway.dialects.grpc.by_hand import ByHand
from tests.gateway.dialects.grpc.test_text import asking, text_of
from tests.gateway.operator.operators import Operator
from tests.gateway.promises import STREAMS, UNARY, WIRE, DuplexCall, Probe, counting, echoing, serving
from tests.gateway.workers.test_stuck_threads import Gates, Rounds, answer, passes, prompt, returned, worker_of
from tests.models.steps import Counting

QUIET = Config(websocket=WebSocketConfig(ping_interval=0), limits=LimitsConfig(write_stall=1e6))
"""No client here reads while it waits, so none would answer a Ping."""
SAID = "model 'probe' has sent nothing for 10 s (models.probe.stall_timeout)"
IN_THIS_PROCESS = [name for name in (*STREAMS, *UNARY) if name != "bridge"]
DUPLEX = ("bidi", "bidi-json", "websocket")


async def mute(probe: Probe, session: Session[Any, Any]) -> None:
    """Takes the request, and says nothing until it is told to go."""
    await probe.take(session)
    await probe.go.wait()


async def halting(probe: Probe, session: Session[Any, Any]) -> None:
    """Says three numbers, and then nothing until it is told to go."""
    await probe.take(session)
    await probe.say(session, 3)
    await probe.go.wait()


async def slow(probe: Probe, session: Session[Any, Any]) -> None:
    """Says a number each eight seconds."""
    await probe.take(session)
    for _ in range(5):
        await trio.sleep(8)
        await probe.say(session)


async def fanning(probe: Probe, session: Session[Any, Any]) -> None:
    """Takes the request, and works on it in a task of its own."""
    await probe.take(session)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe.go.wait)
        nursery.start_soon(waiting, probe)


async def waiting(probe: Probe) -> None:
    await probe.go.wait()


def place(function: Any, text: str = "go.wait()") -> str:
    """The line of a function that has this text, as the verdict names it."""
    code = getattr(function, "__wrapped__", function).__code__
    with open(code.co_filename) as file:
        lines = file.read().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if n > code.co_firstlineno and text in line)
    return f"{code.co_filename}:{number} in {code.co_name}"


async def verdict(gateway: Gateway) -> Any:
    return (await Operator(gateway).get("/stats"))["verdict"]


# -- endings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", IN_THIS_PROCESS)
async def test_a_model_that_never_says_a_word_ends_its_session(wire: str, autojump_clock: MockClock) -> None:
    probe, kind = Probe(mute), WIRE[wire]
    async with serving(probe.spec(wire, stall_timeout=10), config=QUIET, wire=wire) as house:
        call = await house.call(wire)
        began = trio.current_time()
        await trio.sleep(9.5)
        assert probe.live == 1
        _, over = await call.rest()
        assert trio.current_time() - began <= 12.5
        if not kind.accepted and not kind.apart:
            assert (over.how, over.code) == ("refused", "424" if kind.blames else kind.code("504"))
            assert SAID in over.text
        await house.still()
        assert (probe.live, house.endings) == (0, kind.ended("model-error"))


@pytest.mark.parametrize("wire", [name for name in STREAMS if name in IN_THIS_PROCESS and name not in DUPLEX])
async def test_a_model_that_says_nothing_more_ends_its_session_in_band(wire: str, autojump_clock: MockClock) -> None:
    probe, kind = Probe(halting), WIRE[wire]
    async with serving(probe.spec(wire, stall_timeout=10), config=QUIET, wire=wire) as house:
        call = await house.call(wire)
        if isinstance(call, DuplexCall):
            await call.say()
        assert await call.take(3) == [0, 1, 2]
        _, over = await call.rest()
        how, code = kind.expected()
        assert (over.how, over.code) == (how, code or over.code)
        assert how == "cut" or SAID in over.text
        await house.still()
        assert (probe.live, house.endings) == (0, kind.ended("model-error"))


@pytest.mark.parametrize("wire", [name for name in IN_THIS_PROCESS if name not in DUPLEX])
async def test_a_model_that_is_slow_but_speaks_is_let_be(wire: str, autojump_clock: MockClock) -> None:
    probe, kind = Probe(slow), WIRE[wire]
    if kind.family is Family.TENSOR and not kind.streams:
        pytest.skip("it has one answer")
    async with serving(probe.spec(wire, stall_timeout=10), config=QUIET, wire=wire) as house:
        call = await house.call(wire)
        await trio.sleep(45)
        await house.still()
        assert probe.returned == 1
        if kind.duplex or kind.apart:
            await call.leave(Leave.CLOSE)
        else:
            assert (await call.rest())[1].how == "complete"


async def test_a_deadline_that_comes_first_is_the_ending(autojump_clock: MockClock) -> None:
    probe = Probe(mute)
    async with serving(probe.spec("lmi-http1", stall_timeout=10, timeout=5)) as house:
        _, over = await (await house.call("lmi-http1")).rest()
        assert (over.code, "models.probe.timeout" in over.text) == ("504", True)
        await house.still()
        assert house.endings == {"deadline": 1}


async def test_the_slot_of_a_model_that_does_not_stop_follows_stop_within(autojump_clock: MockClock) -> None:
    async def stubborn(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.take(session)
        with trio.CancelScope(shield=True):
            await probe.go.wait()

    probe = Probe(stubborn)
    async with serving(probe.spec("lmi-http1", stall_timeout=10, stop_within=2)) as house:
        call = await house.call("lmi-http1")
        await trio.sleep(20)
        assert house.gateway.models["probe"].stuck == 1
        probe.go.set()
        await call.rest()
        await house.still()
        assert house.gateway.models["probe"].stuck == 0


# -- time that does not count ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["lmi-http1", "lmi-http2", "bidi", "websocket", "grpcstream-http2"])
async def test_a_client_that_does_not_read_holds_its_model_and_is_no_silence_of_it(
    wire: str, autojump_clock: MockClock
) -> None:
    probe = Probe(counting)
    async with serving(probe.spec(wire, stall_timeout=10), config=QUIET, wire=wire) as house:
        call = await house.call(wire)
        await trio.sleep(100)
        sent = probe.sent
        assert (probe.live, house.endings) == (1, {})
        assert await call.take(10) == [*range(10)]
        await trio.sleep(100)
        assert probe.sent >= sent
        assert probe.live == 1
        await call.leave(Leave.CLOSE)


@pytest.mark.parametrize("wire", DUPLEX)
async def test_a_model_that_waits_for_its_client_is_not_silent(wire: str, autojump_clock: MockClock) -> None:
    probe = Probe(echoing)
    async with serving(probe.spec(wire, stall_timeout=10), config=QUIET, wire=wire) as house:
        call = await house.call(wire)
        assert isinstance(call, DuplexCall)
        for number in range(3):
            await trio.sleep(30)
            await call.say()
            assert await call.next() == number
        probe.script = mute
        assert (probe.live, house.endings) == (1, {})
        await call.leave(Leave.CLOSE)


async def test_the_clock_begins_when_the_client_has_spoken(autojump_clock: MockClock) -> None:
    async def hears_one(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.hear(session)
        await probe.go.wait()

    probe = Probe(hears_one)
    async with serving(probe.spec("bidi", stall_timeout=10), config=QUIET) as house:
        call = await house.call("bidi")
        assert isinstance(call, DuplexCall)
        await trio.sleep(30)
        await call.say()
        began = trio.current_time()
        _, over = await call.rest()
        assert (SAID in over.text, over.code) == (True, "ModelStreamError")
        assert 10 <= trio.current_time() - began <= 12.5


async def test_the_queue_for_a_slot_does_not_count(autojump_clock: MockClock) -> None:
    probe = Probe(slow)
    async with serving(probe.spec("lmi-http1", stall_timeout=10, capacity=1)) as house:
        first, second = [await house.call("lmi-http1") for _ in range(2)]
        await trio.sleep(30)
        assert (probe.calls, house.gateway.models["probe"].queued) == (1, 1)
        assert (await first.rest())[1].how == "complete"
        assert (await second.rest())[1].how == "complete"


async def test_a_text_model_may_be_silent_for_ten_minutes_and_any_other_for_ever(autojump_clock: MockClock) -> None:
    probes = {wire: Probe(mute, name) for name, wire in (("text", "lmi-http1"), ("parts", "streamparts-http1"))}
    text = probes["lmi-http1"].spec("lmi-http1")
    assert [text.longest_stall, probes["streamparts-http1"].spec("streamparts-http1").longest_stall] == [600, 0]
    assert probes["lmi-http1"].spec("lmi-http1", stall_timeout=0).longest_stall == 0
    with pytest.raises(ValueError, match="stall_timeout must be at least 0, or None, not -1"):
        probes["lmi-http1"].spec("lmi-http1", stall_timeout=-1)
    async with serving(text) as house:
        call = await house.call("lmi-http1", "text")
        await trio.sleep(599)
        assert probes["lmi-http1"].live == 1
        _, over = await call.rest()
        assert trio.current_time() < 622
        assert "(models.text.stall_timeout)" in over.text


# -- text of many forms -------------------------------------------------------------------------------------------------------


async def numbers(prompt: str) -> AsyncIterator[str]:
    """Eight numbers, five seconds apart; if it is to hang, only two."""
    for number in range(8):
        await trio.sleep(1e6 if prompt == "hang" and number == 2 else 5)
        yield f"{number} "


async def test_a_text_that_is_collected_counts_by_its_tokens(autojump_clock: MockClock) -> None:
    async with memory_gateway([spec_of(numbers, "text", stall_timeout=10)]) as memory:
        for prompt, status in (("go", 200), ("hang", 504)):
            peer = memory.http1()
            await peer.send(*post(1, "/v2/models/text/generate", json.dumps({"text_input": prompt}).encode()))
            assert (await peer.read_answer(1))[0] == status


async def test_a_call_that_hangs_is_found_beside_others_of_its_stream(autojump_clock: MockClock) -> None:
    async with serving(spec_of(numbers, "text", stall_timeout=10)) as house:
        call = await ByHand(house.line("http2")).open()
        for prompt in ("hang", "go"):
            await call.say(asking(prompt, "text", id=prompt, stream=np.array([True])))
        heard: dict[str, list[str]] = {"hang": [], "go": []}
        for _ in range(11):
            found = await call.response()
            heard[found.answer.id if found.answer.outputs else "hang"].append(found.error or text_of(found.answer))
        assert [len(heard["go"]), heard["hang"][:2], len(heard["hang"])] == [8, ["0 ", "1 "], 3]
        assert "(models.text.stall_timeout)" in heard["hang"][2]
        await call.end()
        await call.rest()


async def test_the_prompts_of_one_batch_are_silent_together(autojump_clock: MockClock) -> None:
    config = Config(lmi=LMIConfig(rolling_batch="disable"))
    async with memory_gateway([spec_of(numbers, "text", stall_timeout=10)], config) as memory:
        peer = memory.http1()
        await peer.send(*post(1, "/invocations", json.dumps({"inputs": ["hang", "go"]}).encode()))
        status, _, body = await peer.read_answer(1)
        assert (status, trio.current_time() >= 50) == (504, True)
        assert b"stall_timeout" in body


# -- batches and threads ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gates() -> Iterator[Gates]:
    gates = Gates()
    yield gates
    gates.leave.set()


async def test_a_sequence_whose_client_does_not_read_is_not_ended(mock_clock: MockClock) -> None:
    config = Config(limits=LimitsConfig(send_buffer=4096, write_stall=1e6))

    @asynccontextmanager
    async def load() -> AsyncIterator[RollingBatch[Any]]:
        async with rolling(Counting(), blocking=False) as batch:
            yield batch

    async with memory_gateway([spec_of(load, "batch", stall_timeout=10)], config, capacity=4096) as memory:
        peer = memory.http1()
        asked = {"inputs": "x", "parameters": {"max_new_tokens": 60_000}, "stream": True}
        await peer.send(*post(1, "/predictions/batch", json.dumps(asked).encode()))
        await wait_all_tasks_blocked()
        await passes(mock_clock, 50)
        assert (memory.gateway.counts().slots_in_use, memory.gateway.counts().endings) == (1, {})
        peer.close()
        await wait_all_tasks_blocked()


async def test_a_round_that_hangs_ends_its_sequences_and_is_named(gates: Gates, mock_clock: MockClock) -> None:
    async with serving(Rounds(gates).spec(stall_timeout=20), wire="json-http1") as house:
        line = await prompt(house, "stuck", 9)
        await gates.wait_entered()
        await passes(mock_clock, 15)
        told = await verdict(house.gateway)
        assert (told["kind"], told["model"]) == ("stalled", "m")
        assert told["sentence"].startswith("m has sent nothing for 1")
        assert "/test_stuck_threads.py:" in told["sentence"]
        assert told["sentence"].endswith(" in block_here")
        await passes(mock_clock, 8)
        assert (await answer(line))[0] == 504
        assert house.endings == {"model-error": 1}
        gates.leave.set()
        await returned(worker_of(house))


async def test_a_step_that_blocks_its_thread_is_named(gates: Gates, mock_clock: MockClock) -> None:
    def speaks(prompt: str) -> Iterator[str]:
        yield "one "
        gates.block_here()

    async with serving(spec_of(speaks, "m", stall_timeout=20)) as house:
        line = await prompt(house, "x", 9)
        await gates.wait_entered()
        await passes(mock_clock, 15)
        assert f" in {gates.block_here.__name__}" in (await verdict(house.gateway))["sentence"]
        await passes(mock_clock, 8)
        assert (await answer(line))[0] == 504
        gates.leave.set()
        await returned(worker_of(house))


# -- the verdict --------------------------------------------------------------------------------------------------------------


async def test_the_verdict_names_the_model_its_silence_and_its_line_before_the_end_and_after(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    probe = Probe(halting)
    async with serving(probe.spec("lmi-http1", stall_timeout=600), config=QUIET) as house:
        call = await house.call("lmi-http1")
        await call.take(3)
        await trio.sleep(45)
        assert (await verdict(house.gateway))["kind"] == "healthy"
        await trio.sleep(300)
        told = await verdict(house.gateway)
        assert (told["kind"], told["level"], told["model"]) == ("stalled", "bad", "probe")
        at = place(halting)
        assert told["sentence"] in (f"probe has sent nothing for {minutes} min, at {at}" for minutes in (5, 6))
        (id,) = [exchange.id for exchange in house.gateway.live]
        assert told["detail"] == (
            f"1 stream is silent, {id} longest; models.probe.stall_timeout ends it after 10 min. "
            "probe has 1 of 64 slots, 0 queued."
        )
        _, over = await call.rest()
        assert "stall_timeout" in over.text
        (record,) = [record for record in caplog.records if record.getMessage() == "model stalled"]
        assert (record.model, record.id, record.at) == ("probe", id, at)  # type: ignore[attr-defined]
        told = await verdict(house.gateway)
        assert told["sentence"] == f"probe sent nothing for 10 min, at {at}"
        assert told["incident"] == record.incident  # type: ignore[attr-defined]
        assert f"1 stream ended in the last minute (models.probe.stall_timeout), {id} last." in told["detail"]
        await trio.sleep(61)
        assert (await verdict(house.gateway))["kind"] != "stalled"


async def test_a_model_that_speaks_again_is_no_longer_named(autojump_clock: MockClock) -> None:
    probe = Probe(halting)
    async with serving(probe.spec("lmi-http1", stall_timeout=20), config=QUIET) as house:
        call = await house.call("lmi-http1")
        await call.take(3)
        await trio.sleep(15)
        assert (await verdict(house.gateway))["kind"] == "stalled"
        probe.go.set()
        assert (await call.rest())[1].how == "complete"
        await trio.sleep(2)
        assert (await verdict(house.gateway))["kind"] == "healthy"


async def test_a_task_of_the_models_own_nursery_is_named(autojump_clock: MockClock) -> None:
    probe = Probe(fanning)
    async with serving(probe.spec("lmi-http1", stall_timeout=20), config=QUIET) as house:
        call = await house.call("lmi-http1")
        await trio.sleep(15)
        assert (await verdict(house.gateway))["sentence"].endswith(f", at {place(waiting)}")
        await call.rest()


async def test_a_queue_that_is_full_of_silence_is_told_with_its_cause(autojump_clock: MockClock) -> None:
    probe = Probe(mute)
    spec = probe.spec("lmi-http1", stall_timeout=200, capacity=1, queue=0)
    async with serving(spec, config=QUIET) as house:
        call = await house.call("lmi-http1")
        await trio.sleep(70)
        for _ in range(3):
            assert (await (await house.call("lmi-http1")).rest())[1].how == "refused"
        told = await verdict(house.gateway)
        assert told["kind"] == "refusing"
        assert f"probe has sent nothing for 69 s, at {place(mute)}." in told["detail"]
        await call.leave(Leave.CLOSE)


# -- processes ----------------------------------------------------------------------------------------------------------------


async def test_a_model_in_a_process_is_noticed_as_well(autojump_clock: MockClock) -> None:
    probe = Probe(halting)
    async with serving(in_memory_processes(probe.spec("lmi-http1", stall_timeout=20))[0], config=QUIET) as house:
        call = await house.call("lmi-http1")
        await call.take(3)
        await trio.sleep(15)
        assert (await verdict(house.gateway))["sentence"].endswith(f", at {place(halting)}")
        _, over = await call.rest()
        assert "(models.probe.stall_timeout)" in over.text
        await house.still()
        assert (probe.live, house.endings) == (0, {"model-error": 1})


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_a_model_in_a_process_waits_for_its_client_once_it_has_taken_all(wire: str, autojump_clock: MockClock) -> None:
    probe = Probe(echoing)
    async with serving(in_memory_processes(probe.spec(wire, stall_timeout=10))[0], config=QUIET) as house:
        call = await house.call(wire)
        assert isinstance(call, DuplexCall)
        for number in range(3):
            await trio.sleep(30)
            await call.say()
            assert await call.next() == number
        await trio.sleep(30)
        assert house.endings == {}
        await call.leave(Leave.CLOSE)
        await house.still()


async def test_a_model_in_a_process_that_does_not_answer_its_client_is_ended(autojump_clock: MockClock) -> None:
    async def hears_one(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.hear(session)
        await probe.go.wait()

    probe = Probe(hears_one)
    async with serving(in_memory_processes(probe.spec("bidi", stall_timeout=10))[0], config=QUIET) as house:
        call = await house.call("bidi")
        assert isinstance(call, DuplexCall)
        await trio.sleep(30)
        await call.say()
        began = trio.current_time()
        _, over = await call.rest()
        assert (SAID in over.text, over.code) == (True, "ModelStreamError")
        assert 10 <= trio.current_time() - began <= 12.5
