"""Statistics: every call of a model is counted once, on any wire, as what became of it, and its times add up."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
import trio

from gateway.client import post
from gateway.testing.stories.talk import Leave
from gateway.workers.statistics import ModelStatistics
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Tensor
from models.session import Session
from models.spec import ModelSpec, RestartPolicy, TensorSpec
from tests.gateway.promises import UNARY, WIRE, WIRES, House, Probe, answering, pausing, serving, silent
from tests.gateway.workers.test_worker import House as Loader

PATH = "/v2/models/probe/infer"


def wanted(*numbers: float, name: str = "x", **request: Any) -> bytes:
    tensor = {"name": name, "datatype": "FP32", "shape": [len(numbers)], "data": numbers}
    return json.dumps({"inputs": [tensor], **request}).encode()


async def stats(house: House, of: str = "/probe") -> Any:
    """The /stats document of one model."""
    status, headers, body = await house.ask(f"/v2/models{of}/stats", None, method=b"GET")
    assert (status, headers["content-type"]) == (200, "application/json")
    (told,) = json.loads(body)["model_stats"]
    return told


async def counts(house: House) -> tuple[int, int, int]:
    """Successes, failures, and those of them that were cancelled; and that it all adds up."""
    told = await stats(house)
    parts = told["inference_stats"]
    for part in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert parts[part]["count"] == parts["success"]["count"]
    assert parts["success"]["ns"] == sum(
        parts[part]["ns"] for part in ("queue", "compute_input", "compute_infer", "compute_output")
    )
    assert parts["cache_hit"] == parts["cache_miss"] == {"count": 0, "ns": 0}
    assert told["execution_count"] == parts["success"]["count"]
    assert sum(b["compute_infer"]["count"] for b in told["batch_stats"]) == told["execution_count"]
    assert sum(b["compute_infer"]["ns"] for b in told["batch_stats"]) == parts["compute_infer"]["ns"]
    assert parts["cancel"]["count"] <= parts["fail"]["count"]
    assert parts["cancel"]["ns"] <= parts["fail"]["ns"]
    return parts["success"]["count"], parts["fail"]["count"], parts["cancel"]["count"]


# -- every wire


@pytest.mark.parametrize("wire", WIRES)
async def test_a_call_that_is_answered_is_one_success(wire: str, autojump_clock: Any) -> None:
    probe = Probe(answering if wire in UNARY else pausing)
    probe.go.set()
    async with serving(probe.spec(wire), wire=wire) as house:
        for number in (1, 2):
            call = await house.call(wire)
            _, over = await call.rest()
            assert over.how == "complete"
            await house.still()
            told = await stats(house)
            assert await counts(house) == (number, 0, 0)
            assert told["inference_count"] == number


@pytest.mark.parametrize("wire", WIRES)
async def test_a_call_whose_client_leaves_is_one_that_was_cancelled(wire: str, autojump_clock: Any) -> None:
    probe = Probe(silent)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        await call.leave(Leave.RESET)
        await house.still()
        assert await counts(house) == (0, 1, 1)
        assert (await stats(house))["last_inference"] > 0


async def crashing(probe: Probe, session: Session[Any, Any]) -> None:
    await probe.take(session)
    raise ZeroDivisionError


@pytest.mark.parametrize("wire", WIRES)
async def test_a_call_whose_model_raises_is_one_that_failed(wire: str, autojump_clock: Any) -> None:
    probe = Probe(crashing)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        assert await counts(house) == (0, 1, 0)
        await call.leave(Leave.STREAM if WIRE[wire].transport == "websocket" else Leave.RESET)


# -- v2


async def twice(session: Session[InferRequest, InferResponse]) -> None:
    """Doubles x; raises for negative numbers, says nothing for none, and what JSON cannot carry for 13."""
    x = (await session.receive())["x"]
    if (x < 0).any():
        raise ModelError("no negative numbers", status=422)
    if 13 in x:
        await session.send(InferResponse(outputs=(Tensor(name="y", data=np.array([b"\xff"], object)),)))
    elif x.size:
        await session.send(InferResponse(outputs=(Tensor(name="y", data=x * 2),)))


def doubling(**options: Any) -> ModelSpec:
    return spec_of(twice, "probe", family=Family.TENSOR, **options)


async def test_all_calls_are_successes_or_failures_and_a_refused_request_is_no_call() -> None:
    bodies = {
        200: wanted(1, 2),
        422: wanted(-1),  # the model's own error
        500: wanted(),  # no answer at all
        400: wanted(13),  # an answer that cannot be said
    }
    async with serving(doubling()) as house:
        for n, (status, body) in enumerate(bodies.items()):
            assert (await house.ask(PATH, body))[0] == status
            assert await counts(house) == (1, n, 0)
        for body in (b"{", wanted(1, parameters={"triton_x": 1})):
            assert (await house.ask(PATH, body))[0] == 400
        assert (await house.ask("/v2/models/probe/versions/7/infer", wanted(1)))[0] == 404
        assert await counts(house) == (1, 3, 0)


async def test_every_member_that_perf_analyzer_reads_is_there() -> None:
    before = time.time_ns() // 1_000_000
    async with serving(doubling()) as house:
        assert (await stats(house))["last_inference"] == 0
        await house.ask(PATH, wanted(1))
        told = await stats(house)
        assert before <= told["last_inference"] <= time.time_ns() // 1_000_000
        assert (told["name"], told["version"], told["inference_count"], told["execution_count"]) == ("probe", "1", 1, 1)
        assert (told["response_stats"], told["memory_usage"]) == ({}, [])
        assert [batch["batch_size"] for batch in told["batch_stats"]] == [1]
        for name in ("success", "compute_input", "compute_infer", "compute_output"):
            assert told["inference_stats"][name]["count"] == 1
            assert told["inference_stats"][name]["ns"] > 0


async def test_the_time_in_the_queue_is_the_queues(autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec("v2-http2", capacity=1)) as house:
        first = await house.call("v2-http2")
        await house.still()
        second = await house.call("v2-http2")
        await house.still()
        assert probe.live == 1
        probe.go.set()
        for call in (first, second):
            await call.rest()
        assert await counts(house) == (2, 0, 0)
        assert (await stats(house))["inference_stats"]["queue"]["ns"] > 0


async def test_who_leaves_the_queue_was_cancelled_and_who_finds_it_full_has_failed(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("v2-http1", capacity=1, queue=1)) as house:
        running = await house.call("v2-http1")
        waiting = await house.call("v2-http1")
        await house.still()
        full = await house.call("v2-http1")
        assert (await full.rest())[1].code == "503"
        assert await counts(house) == (0, 1, 0)
        await waiting.leave(Leave.RESET)
        await house.still()
        assert await counts(house) == (0, 2, 1)
        await running.leave(Leave.RESET)
        await house.still()
        assert await counts(house) == (0, 3, 2)


async def test_a_deadline_is_a_failure_of_nobodys_leaving(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("v2-http1", timeout=5)) as house:
        call = await house.call("v2-http1")
        assert (await call.rest())[1].code == "504"
        assert await counts(house) == (0, 1, 0)


async def test_each_item_of_a_batch_is_an_inference() -> None:
    spec = TensorSpec(name="x", datatype="FP32", shape=())
    model = doubling(inputs=(spec,), outputs=None, max_batch_size=8)
    async with serving(model) as house:
        for size in (1, 3, 3, 8):
            assert (await house.ask(PATH, wanted(*range(1, 1 + size))))[0] == 200
        told = await stats(house)
        assert await counts(house) == (4, 0, 0)
        assert (told["inference_count"], told["execution_count"]) == (15, 4)
        for path, body in (
            ("generate", {"x": [1, 2, 3]}),
            ("generate_stream", {"x": [1, 2]}),
            ("infer_stream", wanted(1, 2)),
        ):
            asked = body if isinstance(body, bytes) else json.dumps(body).encode()
            assert (await house.ask(f"/v2/models/probe/{path}", asked))[0] == 200
        assert await counts(house) == (7, 0, 0)
        told = await stats(house)
        sizes = [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in told["batch_stats"]]
        assert sizes == [(1, 1), (2, 2), (3, 3), (8, 1)]
        assert told["inference_stats"]["compute_input"]["ns"] > 0
        assert told["transfer"]["received_bytes"] > 0
        places = {place: responses["success"]["count"] for place, responses in told["response_stats"].items()}
        assert places == {"0": 2}


@pytest.mark.parametrize("path", ["infer_stream", "generate_stream"])
async def test_a_response_that_its_client_did_not_wait_for_is_cancelled(path: str) -> None:
    async def once(session: Session[InferRequest, InferResponse]) -> None:
        await session.receive()
        await session.send(InferResponse(outputs=(Tensor(name="y", data=np.zeros(1)),)))
        await trio.sleep_forever()

    async with serving(spec_of(once, "probe")) as house:
        line = house.line("http1")
        body = wanted(1) if path == "infer_stream" else b'{"x": 1}'
        await line.send(*post(line.next_stream(), f"/v2/models/probe/{path}", body))
        await house.still()
        line.peer.close()
        await house.still()
        told = (await stats(house))["response_stats"]
        places = {place: [told[place][what]["count"] for what in ("success", "fail", "cancel")] for place in told}
        assert places == {"0": [1, 0, 0], "1": [0, 0, 1]}
        assert await counts(house) == (0, 1, 1)


async def test_binary_tensors_are_views_of_the_bytes_received_and_json_is_converted() -> None:
    async with serving(doubling()) as house:
        body = wanted(1, 2)
        await house.ask(PATH, body)
        told = (await stats(house))["transfer"]
        assert told["received_bytes"] == len(body)
        assert told["copied_bytes"] >= len(body)
        data = np.ones(300_000, np.float32).tobytes()
        tensor = {"name": "x", "datatype": "FP32", "shape": [300_000], "parameters": {"binary_data_size": len(data)}}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        status, _, _ = await house.ask(PATH, head + data, ("inference-header-content-length", str(len(head))))
        assert status == 200
        then = (await stats(house))["transfer"]
        assert then["received_bytes"] == told["received_bytes"] + len(head) + len(data)
        # only bytes that did not land in place are copied: the tensor is a view
        assert then["copied_bytes"] - told["copied_bytes"] < 2 * (len(head) + len(data))


async def test_all_models_are_told_by_name_and_others_not_at_all() -> None:
    async with serving(doubling(), Probe(silent, "another").spec("lmi-http1")) as house:
        await house.ask(PATH, wanted(1))
        _, _, body = await house.ask("/v2/models/stats", None, method=b"GET")
        told = json.loads(body)["model_stats"]
        assert [(m["name"], m["inference_count"]) for m in told] == [("another", 0), ("probe", 1)]
        assert (await stats(house, "/probe/versions/1"))["inference_count"] == 1
        for of in ("/nobody", "/probe/versions/2"):
            status, _, body = await house.ask(f"/v2/models{of}/stats", None, method=b"GET")
            assert (status, list(json.loads(body))) == (404, ["error"])


async def test_a_crash_of_the_worker_ends_its_calls_and_not_its_counts(autojump_clock: Any) -> None:
    probe = Probe(silent)
    loader = Loader(probe)
    spec = loader.spec(name="probe", family=Family.TENSOR, restart=RestartPolicy(backoff=1.0))
    probe.speak("v2-http1")
    async with serving(spec) as house:
        call = await house.call("v2-http1")
        await house.still()
        loader.crash.set()
        assert (await call.rest())[1].code == "503"
        await trio.sleep(2)
        assert await counts(house) == (0, 1, 0)
        assert loader.loads == 2


# -- the counters


def test_sizes_beyond_a_thousand_are_counted_but_not_told_apart() -> None:
    statistics = ModelStatistics()
    for size in range(2, 2000):
        statistics.success(0, 1, 1, 2, 3, size)
    statistics.success(0, 1, 1, 2, 3)
    assert statistics.succeeded == 1999
    assert statistics.inferences == sum(range(1, 2000))
    told = statistics.by_size
    assert list(told) == list(range(1, 1026))
    assert {batches.count for batches in told.values()} == {1}
    assert len(statistics.batches) == 1025  # the rest of them is one more


def test_empty_batches_come_before_those_of_one() -> None:
    statistics = ModelStatistics()
    for size in (1, 0):
        statistics.success(1, 1, 1, 6, 6, size)
    assert (list(statistics.by_size), statistics.inferences) == ([0, 1], 1)


def test_responses_are_told_apart_by_their_place_up_to_a_bound() -> None:
    statistics = ModelStatistics()
    for place in range(200):
        statistics.response(place, 10, 1)
    statistics.no_response(3, 7, cancelled=True)
    statistics.no_response(3, 5, cancelled=False)
    statistics.no_response(500, 5, cancelled=False)
    assert list(statistics.responses) == list(range(128))
    third = statistics.responses[3]
    assert (third.succeeded, third.infer, third.output) == (1, 10, 1)
    assert (third.cancelled, third.cancelled_ns, third.failed, third.failed_ns) == (1, 7, 1, 5)
