"""Admission: the queue for slots, its order and waits, the texts of refusals, and deadlines that requests bring along."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from gateway import client
from gateway.config import AdmissionConfig, Config, SageMakerConfig
from gateway.errors import DeadlineExceeded
from gateway.testing.stories.talk import Leave
from gateway.workers.slots import retry_estimate
from models.session import Session
from models.spec import ModelSpec
from protocols.events import Request
from tests.gateway.catalog.test_repository import swept
from tests.gateway.promises import WIRE, WIRES, House, Probe, answering, at_once, counting, raw, serving, silent
from tests.gateway.workers.test_supervision import refused
from tests.gateway.workers.test_worker import Caller, echo, running
from tests.gateway.workers.test_worker import House as Loader

BODY = json.dumps({"inputs": "x"}).encode()
TENSOR = {"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}
HEADER = Config(admission=AdmissionConfig(priority_header="X-Priority"))
OVERLOADED = [w for w in WIRES if w not in ("bridge", "websocket-anywhere")]


# -- the order of the queue ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "served"),
    [(HEADER, ["a", "first", "one", "two", "default", "high", "huge", "low"]), (Config(), None)],
    ids=["with the header's name", "without"],
)
async def test_slots_go_to_the_lowest_number_first_and_within_it_in_order(
    config: Config, served: list[str] | None, autojump_clock: MockClock
) -> None:
    order: list[str] = []
    probe, go = Probe(answering), trio.Event()

    async def script(_: Probe, session: Session[Any, Any]) -> None:
        order.append((await session.receive()).text)
        await go.wait()
        await probe.say(session)

    probe.script = script
    asked = [("a", 16), ("default", 0), ("low", 16), ("one", 2), ("two", 2), ("high", 8), ("huge", 17), ("first", 1)]
    async with serving(probe.spec("json-http1", capacity=1), config=config) as house:
        async with trio.open_nursery() as nursery:
            for text, priority in asked:
                fields = [("x-priority", str(priority))] if priority else []
                nursery.start_soon(house.ask, "/predictions/probe", json.dumps({"inputs": text}).encode(), *fields)
                await house.still()
            assert house.gateway.models["probe"].queued == 7
            go.set()
        assert order == (served or [text for text, _ in asked])


async def test_the_parameter_of_v2_is_a_priority_too(autojump_clock: MockClock) -> None:
    seen: list[Any] = []
    probe = Probe(answering)

    async def script(_: Probe, session: Session[Any, Any]) -> None:
        request = await session.receive()
        seen.append(request.parameters.get("priority"))
        await probe.go.wait()
        await probe.say(session)

    probe.script = script
    async with serving(probe.spec("v2-http1", capacity=1)) as house:
        async with trio.open_nursery() as nursery:
            for path, priority in (("infer", None), ("infer", 9), ("infer_stream", 2), ("infer", 1), ("infer", 2**63)):
                parameters = {} if priority is None else {"priority": priority}
                body = json.dumps({"inputs": [TENSOR], "parameters": parameters}).encode()
                nursery.start_soon(house.ask, f"/v2/models/probe/{path}", body)
                await house.still()
            probe.go.set()
        assert seen == [None, 1, 2, 2**63, 9]


@pytest.mark.parametrize("value", [-1, 1.5, True, "2", 2**64])
async def test_a_priority_that_is_none_is_named(value: Any, autojump_clock: MockClock) -> None:
    async with serving(Probe(silent).spec("v2-http1")) as house:
        for path in ("infer", "infer_stream"):
            body = {"inputs": [TENSOR], "parameters": {"priority": value}}
            status, _, said = await house.ask(f"/v2/models/probe/{path}", json.dumps(body).encode())
            assert (status, b"priority" in said) == (400, True)


async def test_a_client_that_leaves_its_level_changes_nobody_elses_turn(autojump_clock: MockClock) -> None:
    house = Loader(echo)
    async with running(house.spec(capacity=1)) as worker:
        callers = [Caller() for _ in range(4)]
        for caller, priority in zip(callers, (0, 3, 3, 9), strict=True):
            caller.exchange.priority = priority
        held = worker.slots.take_now(Caller().exchange)
        assert held is not None
        async with trio.open_nursery() as nursery:
            for caller in callers:
                nursery.start_soon(caller.call, worker)
                await trio.testing.wait_all_tasks_blocked()
            callers[1].leave()
            await callers[1].ended.wait()
            assert worker.slots.queued == 3
            with held:
                pass
        assert [caller.outcome for caller in callers] == ["complete", "left", "complete", "complete"]
        assert (worker.slots.queued, worker.slots.in_use) == (0, 0)


# -- how long, and how much ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", OVERLOADED)
async def test_who_waits_longer_than_the_queue_allows_is_refused_before_any_model(
    wire: str, autojump_clock: MockClock
) -> None:
    probe = Probe(silent)
    async with serving(probe.spec(wire, capacity=1, queue_timeout=3.0, timeout=500.0), wire=wire) as house:
        first = await house.call(wire)
        await house.still()
        began = trio.current_time()
        headers = await refused(house, wire)
        assert trio.current_time() - began == pytest.approx(3.0)
        assert headers.get("retry-after") == said(wire, "1")
        assert (probe.calls, house.gateway.models["probe"].queued) == (1, 0)
        await first.leave(Leave.STREAM if WIRE[wire].transport == "websocket" else Leave.CLOSE)


@pytest.mark.parametrize("wire", OVERLOADED)
async def test_where_the_queue_is_full_each_wire_refuses_at_once_with_an_estimate(
    wire: str, autojump_clock: MockClock
) -> None:
    probe = Probe(silent)
    async with serving(probe.spec(wire, capacity=2, queue=1), wire=wire) as house:
        calls = []
        for _ in range(3):
            if WIRE[wire].transport == "websocket" and len(calls) == 2:  # it waits for its 101
                calls.append(await waiting_socket(house, wire))
            else:
                calls.append(await house.call(wire))
            await house.still()
        house.gateway.supervisor.workers["probe"].statistics.success(0, 0, 0, 7_000_000_000, 7_000_000_000)
        with at_once():
            headers = await refused(house, wire)
        assert headers.get("retry-after") == said(wire, "7")  # two are to come before it, on two slots
        assert probe.calls == 2
        for line in house.lines:
            line.peer.close()
        await house.still()


def said(wire: str, seconds: str) -> str | None:
    """The `retry-after` of a refusal: these seconds; None over gRPC, whose code says only that a client may retry."""
    return None if WIRE[wire].grpc else seconds


async def waiting_socket(house: House, wire: str) -> None:
    path = "/v2/models/probe/infer" if wire == "v2session" else "/models/probe/invocations-bidirectional-stream"
    line = house.line("http1")
    fields = [(b"upgrade", b"websocket"), (b"connection", b"upgrade"), (b"sec-websocket-version", b"13")]
    await line.send(raw(1, b"GET", path, headers=[*fields, (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ==")]))


@pytest.mark.parametrize(
    ("queued", "capacity", "service", "seconds"),
    [(0, 1, 0.0, 1.0), (0, 1, 5.0, 5.0), (9, 2, 4.0, 20.0), (1000, 64, 0.01, 1.0), (1000, 1, 10.0, 60.0)],
)
def test_the_estimate_is_the_queues_and_bounded(queued: int, capacity: int, service: float, seconds: float) -> None:
    assert retry_estimate(queued, capacity, service) == seconds


@pytest.mark.parametrize("path", ["/predictions/probe", "/invocations", "/v2/models/probe/generate", "/v1/chat/completions"])
async def test_an_upload_is_refused_before_it_is_read_where_nobody_may_wait(path: str, autojump_clock: MockClock) -> None:
    async with serving(Probe(silent).spec("json-http1", capacity=1, queue=0)) as house:
        busy = await house.call("json-http1")
        await house.still()
        line = house.line("http2")
        with at_once():
            await line.send(raw(1, b"POST", path, headers=[(b"content-type", b"application/json")], content_length=1000))
            if path != "/v1/chat/completions":  # the body says which model
                status, headers, _ = await line.peer.read_answer(1)
                assert (status, headers[b"retry-after"]) == (503, b"1")
        await busy.leave(Leave.CLOSE)
        line.peer.close()


async def test_the_bodies_of_those_that_wait_are_bounded(autojump_clock: MockClock) -> None:
    probe = Probe(answering)
    body = json.dumps({"inputs": "x" * 4000}).encode()
    async with serving(probe.spec("json-http1", capacity=1, queue_bytes=10_000)) as house:
        answers: list[int] = []

        async def ask() -> None:
            answers.append((await house.ask("/predictions/probe", body))[0])

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
                await house.still()
            with at_once():
                status, headers, said = await house.ask("/predictions/probe", body)
            assert (status, headers["retry-after"], b"models.probe.queue_bytes" in said) == (503, "1", True)
            probe.go.set()
            await house.still()
            assert answers == [200] * 3
            probe.go = trio.Event()
            for _ in range(3):  # answered bodies no longer count
                nursery.start_soon(ask)
                await house.still()
            assert house.gateway.models["probe"].queued == 2
            small = json.dumps({"inputs": "x"}).encode()
            nursery.start_soon(house.ask, "/predictions/probe", small)
            await house.still()
            assert house.gateway.models["probe"].queued == 3
            probe.go.set()
        assert answers == [200] * 6
        assert (await house.ask("/predictions/probe", body))[0] == 200


async def test_the_bodies_of_those_that_run_are_bounded_and_nobody_goes_before_one_that_waits(
    autojump_clock: MockClock,
) -> None:
    probe = Probe(answering)
    body, small, large = (json.dumps({"inputs": "x" * size}).encode() for size in (4000, 1, 12_000))
    async with serving(probe.spec("json-http1", capacity=8, body_bytes=10_000)) as house:
        worker, answers = house.gateway.supervisor.workers["probe"], list[int]()

        async def ask(said: bytes) -> None:
            answers.append((await house.ask("/predictions/probe", said))[0])

        async with trio.open_nursery() as nursery:
            for number, said in enumerate((body, body, body, small)):
                nursery.start_soon(ask, said)
                await house.still()
                assert (worker.slots.in_use, worker.slots.queued) == (min(number + 1, 2), max(number - 1, 0))
            with at_once():
                status, _, text = await house.ask("/predictions/probe", large)
            assert (status, b"models.probe.body_bytes" in text) == (413, True)
            leaves = house.line("http1")
            await leaves.send(*client.post(leaves.next_stream(), "/predictions/probe", body))
            await house.still()
            assert worker.slots.queued == 3
            leaves.peer.close()
            await house.still()
            assert worker.slots.queued == 2
            probe.go.set()
        assert answers == [200] * 4
        assert (worker.slots.body_bytes, worker.slots.bodies, worker.slots.free) == (0, {}, 8)


async def test_one_that_leaves_the_queue_lets_a_smaller_one_behind_it_in(autojump_clock: MockClock) -> None:
    probe = Probe(answering)
    body, small = (json.dumps({"inputs": "x" * size}).encode() for size in (6000, 1))
    async with serving(probe.spec("json-http1", capacity=8, body_bytes=10_000)) as house:
        worker = house.gateway.supervisor.workers["probe"]
        lines = []
        for said in (body, body, small):
            lines.append(house.line("http1"))
            await lines[-1].send(*client.post(lines[-1].next_stream(), "/predictions/probe", said))
            await house.still()
        assert (worker.slots.in_use, worker.slots.queued) == (1, 2)
        lines[1].peer.close()
        await house.still()
        assert (worker.slots.in_use, worker.slots.queued) == (2, 0)
        lines[0].peer.close()  # its model is stopped with it
        lines[2].peer.close()
        await house.still()
        assert (worker.slots.body_bytes, worker.slots.bodies, worker.slots.free) == (0, {}, 8)


@pytest.mark.parametrize("limit", [0.0, 2.0])
@pytest.mark.parametrize("most", [0, 1000])
async def test_a_wait_that_is_cancelled_at_any_step_keeps_neither_slot_nor_place(
    limit: float, most: int, autojump_clock: MockClock
) -> None:
    house = Loader(echo)
    async with running(house.spec(capacity=1, queue_timeout=limit, queue_bytes=1000, body_bytes=most)) as worker:
        cancelled = 0
        for step in range(1, 100):
            held = worker.slots.take_now(Caller().exchange)
            assert held is not None

            async def act(held: Any = held) -> None:
                async with trio.open_nursery() as nursery:
                    for caller in (Caller(), Caller(), Caller()):
                        nursery.start_soon(caller.call, worker)
                    await trio.sleep(1.0)
                    with held:
                        pass

            fired, caught = await swept(act, step)
            if worker.slots.in_use:
                with held:
                    pass
            cancelled += caught
            assert worker.slots.balanced
            assert (
                worker.slots.queue.used,
                worker.slots.queued,
                worker.slots.in_use,
                worker.slots.live,
                worker.slots.queued_bytes,
            ) == (
                0,
                0,
                0,
                set(),
                0,
            )
            if not fired:
                break
        assert not fired
        assert cancelled >= 5


# -- deadlines of the client -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [
        ("x-request-timeout", "2", 2.0),
        ("x-request-timeout", "1.5", 1.5),
        ("x-request-timeout", "1500ms", 1.5),
        ("x-request-timeout", "3s", 3.0),
        ("grpc-timeout", "2S", 2.0),
        ("grpc-timeout", "1M", 60.0),
        ("grpc-timeout", "250m", 0.25),
        ("grpc-timeout", "99999999u", 99.999999),
    ],
)
async def test_a_request_says_how_long_it_may_take_and_its_model_sees_it(
    name: str, value: str, seconds: float, autojump_clock: MockClock
) -> None:
    left: list[float] = []

    async def script(_: Probe, session: Session[Any, Any]) -> None:
        left.append(session.deadline - trio.current_time())
        await trio.sleep_forever()

    async with serving(Probe(script).spec("json-http1", timeout=500.0)) as house:
        line = house.line("http1")
        for _ in range(2):  # the second has the head of the first, and is not read again
            began = trio.current_time()
            status, _, body = await house.ask("/predictions/probe", BODY, (name, value), line=line)
            assert (status, name.encode() in body) == (504, True)
            assert trio.current_time() - began == pytest.approx(seconds)
        assert left == pytest.approx([seconds, seconds])
        assert house.endings == {"deadline": 2}


@pytest.mark.parametrize("wire", ["bidi", "lmi-http2", "v2-http2", "inferstream-http2", "mme-http2", "invoke-http2"])
async def test_it_holds_on_every_wire(wire: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Probe(silent).spec(wire), wire=wire) as house:
        line = house.line("http2")
        send = line.send

        async def timed(*events: Any) -> None:
            first, *rest = events
            if isinstance(first, Request):
                head = first.head
                headers = [*head.headers, (b"x-request-timeout", b"5")]
                first = Request(stream=first.stream, head=msgspec.structs.replace(head, headers=headers))
            await send(first, *rest)

        monkeypatch.setattr(line, "send", timed)
        began = trio.current_time()
        call = await house.call(wire, line=line)
        await call.rest()
        assert trio.current_time() - began == pytest.approx(5.0)
        assert house.endings == {"deadline": 1}


@pytest.mark.parametrize(("own", "asked", "ends"), [(3.0, "5", 3.0), (5.0, "3", 3.0)])
async def test_the_smaller_of_the_models_timeout_and_the_clients_wins(
    own: float, asked: str, ends: float, autojump_clock: MockClock
) -> None:
    async with serving(Probe(silent).spec("json-http1", timeout=own)) as house:
        began = trio.current_time()
        status, _, body = await house.ask("/predictions/probe", BODY, ("x-request-timeout", asked))
        assert (status, trio.current_time() - began) == (504, pytest.approx(ends))
        assert (b"x-request-timeout of the request" if ends != own else b"models.probe.timeout") in body


async def test_a_deadline_that_passes_in_the_queue_is_told_before_the_model_is_called(autojump_clock: MockClock) -> None:
    probe = Probe(silent)
    async with serving(probe.spec("json-http1", capacity=1)) as house:
        busy = await house.call("json-http1")
        await house.still()
        status, _, body = await house.ask("/predictions/probe", BODY, ("x-request-timeout", "4"))
        assert (status, b"x-request-timeout of the request" in body, probe.calls) == (504, True, 1)
        status, _, body = await house.ask("/predictions/probe", BODY, ("x-request-timeout", "0"))
        assert (status, json.loads(body)["code"], probe.calls) == (504, 504, 1)
        assert trio.current_time() == pytest.approx(4.0)
        await busy.leave(Leave.CLOSE)


async def test_a_slot_that_comes_in_the_moment_of_the_deadline_starts_nothing(autojump_clock: MockClock) -> None:
    house = Loader(echo)
    async with running(house.spec(capacity=1)) as worker:
        first, second = Caller(), Caller()
        held = worker.slots.take_now(first.exchange)
        assert held is not None
        async with trio.open_nursery() as nursery:
            second.exchange.limit_call(5.0, "the client's word")
            nursery.start_soon(second.call, worker)
            await trio.testing.wait_all_tasks_blocked()
            second.exchange.deadline = trio.current_time()  # it is over, and nobody has been told yet
            with held:
                pass
        assert isinstance(second.outcome, DeadlineExceeded)
        assert not second.called.is_set()
        assert worker.slots.in_use == 0


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("x-request-timeout", "soon", "a number of seconds"),
        ("x-request-timeout", "-1", "a number of seconds"),
        ("x-request-timeout", "", "a number of seconds"),
        ("grpc-timeout", "5", "up to 8 digits and one of H, M, S, m, u, n"),
        ("x-priority", "high", "a whole number"),
    ],
)
async def test_what_is_no_time_or_priority_is_said_in_the_words_of_the_route(
    name: str, value: str, expected: str, autojump_clock: MockClock
) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=HEADER) as house:
        status, headers, body = await house.ask("/predictions/probe", BODY, (name, value))
        assert (status, json.loads(body)["code"]) == (400, 400)
        assert f"{name} must be {expected}" in json.loads(body)["error"]
        status, headers, body = await house.ask("/v2/models/probe/infer", b"{}", (name, value))
        assert (status, list(json.loads(body))) == (400, ["error"])
        status, headers, _ = await house.ask("/endpoints/probe/invocations", BODY, (name, value))
        assert (status, headers["x-amzn-errortype"]) == (400, "ValidationError")


async def test_no_header_is_looked_at_where_none_is_named(autojump_clock: MockClock) -> None:
    probe = Probe(answering)
    probe.go.set()
    async with serving(probe.spec("json-http1"), config=Config(admission=AdmissionConfig(timeout_headers=()))) as house:
        assert (await house.ask("/predictions/probe", BODY, ("x-request-timeout", "soon")))[0] == 200


@pytest.mark.parametrize(("path", "seconds"), [("invocations", 60.0), ("invocations-response-stream", 480.0)])
async def test_the_platforms_own_limits(path: str, seconds: float, autojump_clock: MockClock) -> None:
    config = Config(sagemaker=SageMakerConfig(invoke_timeout=60.0, stream_timeout=480.0))
    async with serving(Probe(counting).spec("json-http1"), Probe(silent, "slow").spec("json-http1"), config=config) as house:
        began = trio.current_time()
        status, headers, body = await house.ask(f"/endpoints/slow/{path}", BODY)
        assert (status, headers["x-amzn-errortype"]) == (424, "ModelError")
        assert b"_timeout" in body
        assert trio.current_time() - began == pytest.approx(seconds)


def test_a_spec_has_no_negative_bounds() -> None:
    async def nothing(session: Any) -> None: ...

    with pytest.raises(ValueError, match="queue_timeout and queue_bytes"):
        Probe(silent).spec("json-http1", queue_timeout=-1.0)
    assert ModelSpec.__dataclass_fields__["queue_bytes"].default == 0
