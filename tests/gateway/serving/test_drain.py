"""An honest drain: refused from the first moment, goodbye on every wire, finished by the deadline, and a true report."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from gateway.config import Config, DrainConfig, LimitsConfig, ListenConfig, SSEConfig
from gateway.gateway import Gateway
from gateway.net.readiness import Poller
from gateway.serving.drain import DrainReport
from gateway.testing import MemoryEdges, MemoryGateway
from gateway.testing.stories.talk import Leave
from models.adapt import spec_of
from models.messages import Prompt
from models.spec import Model, ModelSpec, RestartPolicy
from protocols.events import ConnectionEnd, Data, End, Reset
from tests.gateway import ways
from tests.gateway.promises import (
    STREAMS,
    UNARY,
    WIRE,
    WIRES,
    House,
    KiB,
    Line,
    Over,
    Probe,
    answering,
    at_once,
    configured,
    counting,
    pausing,
    raw,
    serving,
    silent,
    tasks,
)

TIMEOUT, GRACE, TICK = DrainConfig().timeout, 5.0, 1.0


@asynccontextmanager
async def draining(house: House) -> AsyncIterator[list[DrainReport]]:
    """A drain that has begun; at the end of the block it is over, and its report is in the list."""
    reports: list[DrainReport] = []

    async def drain() -> None:
        reports.append(await house.gateway.drain())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain)
        await house.still()
        yield reports


def delay(seconds: float, **other: Any) -> Config:
    return Config(drain=DrainConfig(delay=seconds, **other))


async def get(line: Line, path: str) -> tuple[int, bytes]:
    stream = line.next_stream()
    await line.send(raw(stream, b"GET", path), End(stream=stream))
    status, _, body = await line.peer.read_answer(stream)
    return status, body


async def test_an_idle_gateway_drains_at_once(autojump_clock: Any) -> None:
    async with serving() as house:
        with at_once():
            report = await house.gateway.drain()
        assert report == DrainReport(live=0, endings={}, seconds=0, clean=True)


READY = [
    ("/ping", b'{"probe":{"status":"Healthy","reason":"draining"}}'),
    ("/v2/health/ready", b'{"ready":false,"reasons":["draining"]}'),
    ("/v2/models/probe/ready", b'{"name":"probe","ready":false}'),
]


@pytest.mark.parametrize(("path", "words"), READY)
@pytest.mark.parametrize("transport", ["http1", "http2"])
async def test_readiness_is_off_from_the_first_moment_also_on_kept_connections(
    transport: str, path: str, words: bytes, autojump_clock: Any
) -> None:
    async with serving(Probe(silent).spec("v2-http1"), config=delay(5)) as house:
        kept = house.line(transport)
        assert (await get(kept, path))[0] == 200
        async with draining(house):
            with at_once():
                assert await get(kept, path) == (503, words)
                assert await get(house.line(transport), path) == (503, words)  # the listeners are still open
                assert await get(house.line(transport), "/v2/health/live") == (200, b'{"live":true}')


@pytest.mark.parametrize("wire", WIRES)
async def test_new_work_is_refused_from_the_first_moment(wire: str, autojump_clock: Any) -> None:
    probe = Probe(silent)
    async with serving(probe.spec(wire), config=delay(5), wire=wire) as house:
        async with draining(house):
            with at_once():
                if WIRE[wire].transport == "websocket":
                    with pytest.raises(Exception, match="503"):
                        await house.call(wire)
                else:
                    _, over = await (await house.call(wire)).rest()
                    assert (over.how, over.code) == ("refused", WIRE[wire].code("503"))
        assert probe.calls == 0
        assert house.endings == {"refused": 1}


async def test_idle_connections_are_closed(autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec("bidi")) as house:
        idle = [house.line("http1"), house.line("http2")]
        for line in idle:
            assert await get(line, "/v2/health/ready") == (200, b'{"ready":true}')
        live = await house.call("bidi")
        await house.still()
        async with draining(house) as reports:
            for line in idle:
                assert isinstance(await line.event(99), ConnectionEnd)
            assert not reports
            probe.go.set()
            assert await live.rest() == ([0], Over("complete"))
            await live.line.over()
        assert reports[0].seconds < 5


@pytest.mark.parametrize("wire", STREAMS)
async def test_live_streams_finish_and_the_drain_ends_with_them(wire: str, autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec(wire), wire=wire) as house:
        calls = [await house.call(wire) for _ in range(3)]
        for call in calls:
            await call.take(3)
        async with draining(house) as reports:
            await trio.sleep(10)
            assert probe.live == 3
            probe.go.set()
            for call in calls:
                numbers, over = await call.rest()
                assert (len(numbers), over.how) == (3, "complete")
                await call.line.over()
        (report,) = reports
        assert (report.live, report.endings, report.clean) == (3, {"complete": 3}, True)
        assert report.seconds < 10 + GRACE


@pytest.mark.parametrize("wire", UNARY)
async def test_live_unary_calls_finish(wire: str, autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        async with draining(house) as reports:
            probe.go.set()
            _, over = await call.rest()
            assert over.how == "complete"
            await call.line.over()
        assert (reports[0].endings, reports[0].clean) == ({"complete": 1}, True)
        assert reports[0].seconds < GRACE


async def test_http1_says_close_on_the_answer_under_way(autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec("json-http1")) as house:
        call = await house.call("json-http1")
        await house.still()
        async with draining(house):
            probe.go.set()
            await call.rest()
            assert b"connection: close" in call.line.transport.read
            assert isinstance(await call.line.event(99), ConnectionEnd)


@pytest.mark.parametrize("answers", [True, False])
async def test_http2_says_goaway_twice_the_second_time_when_its_ping_is_answered(answers: bool, autojump_clock: Any) -> None:
    probe = Probe(answering)
    async with serving(probe.spec("bidi")) as house:
        line = house.line("http2")
        call = await house.call("bidi", line=line)
        await line.read()
        async with draining(house):
            if not answers:  # then it is a tick later
                await trio.sleep(3 * TICK)
            await line.read()
            assert [(g.code, g.last_stream) for g in line.goaways] == [(0, 2**31 - 1), (0, call.stream)]
            probe.go.set()
            assert await call.rest() == ([0], Over("complete"))
            await line.over()


@pytest.mark.parametrize("wire", STREAMS)
async def test_at_the_deadline_the_rest_get_their_ending_in_band(wire: str, autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec(wire), wire=wire) as house:
        calls = [await house.call(wire) for _ in range(2)]
        for call in calls:
            await call.take(3)
        began = trio.current_time()
        async with draining(house) as reports:
            for call in calls:
                numbers, over = await call.rest()
                how, code = WIRE[wire].expected(lost=True)
                assert (numbers, over.how) == ([], how)
                if how == "error":
                    assert "drain" in over.text
                    assert over.code == (WIRE[wire].drained or code)
                await call.line.over()
        assert TIMEOUT <= trio.current_time() - began < TIMEOUT + GRACE
        (report,) = reports
        assert (report.live, report.endings, report.clean) == (2, {"drained": 2}, False)
        assert probe.live == 0


@pytest.mark.parametrize("wire", [w for w in WIRES if not WIRE[w].accepted])
async def test_at_the_deadline_a_call_without_an_answer_is_refused_as_retryable(wire: str, autojump_clock: Any) -> None:
    config = Config(sse=SSEConfig(silence=0))  # a comment would be an answer
    async with serving(Probe(silent).spec(wire), config=config, wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        async with draining(house) as reports:
            _, over = await call.rest()
            assert (over.how, over.code) == ("refused", WIRE[wire].code("503"))
            if not (WIRE[wire].blames or WIRE[wire].grpc):  # the other wires' clients go by the error's name or code
                assert call.headers[b"retry-after"] == b"1"
            await call.line.over()
        assert reports[0].endings == {"drained": 1}


@pytest.mark.parametrize("wire", STREAMS)
async def test_a_second_signal_makes_the_deadline_now(wire: str, autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec(wire), config=delay(60), wire=wire) as house:
        call = await house.call(wire)
        await call.take(3)
        async with draining(house) as reports:
            await trio.sleep(2)
            with at_once():
                house.gateway.hurry()
                _, over = await call.rest()
            assert over.how == WIRE[wire].expected()[0]
            await call.line.over()
        assert reports[0].endings == {"drained": 1}
        assert reports[0].seconds < 2 + GRACE


@pytest.mark.parametrize("transport", ["http1", "http2"])
async def test_a_client_that_goes_on_sending_has_half_a_second_for_its_goodbye(transport: str, autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("v2-http1"), config=Config(drain=DrainConfig(timeout=2))) as house:
        line = house.line(transport)
        await line.send(raw(line.next_stream(), b"POST", "/v2/models/probe/infer", content_length=100))
        await house.still()
        async with draining(house) as reports:
            pass  # it neither reads nor closes
        (report,) = reports
        assert report.endings == {"drained": 1}
        assert 2 <= report.seconds < 3


@pytest.mark.parametrize("wire", STREAMS)
async def test_a_client_that_reads_nothing_cannot_hold_the_drain(wire: str, autojump_clock: Any) -> None:
    probe, other = Probe(counting), Probe(pausing, "other")
    config = Config(drain=DrainConfig(timeout=10))
    async with serving(probe.spec(wire), other.spec(wire), config=config, wire=wire) as house:
        await house.call(wire)
        await house.still()
        reader = await house.call(wire, "other")
        await reader.take(3)
        async with draining(house) as reports:
            _, over = await reader.rest()
            assert over.how == WIRE[wire].expected()[0]
        (report,) = reports
        if wire.endswith("http1") and WIRE[wire].in_band == "cut":  # its last word waits for no reader
            assert report.endings == {"drained": 2}
        else:
            assert report.endings == {"drained": 1, "transport-lost": 1}
        assert 10 <= report.seconds <= 10 + GRACE


async def test_a_websocket_client_that_never_answers_the_close_cannot_hold_the_drain(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("websocket")) as house:
        await house.call("websocket")
        await house.still()
        async with draining(house) as reports:
            pass
        assert reports[0].endings == {"drained": 1}
        assert reports[0].seconds <= TIMEOUT + GRACE


@pytest.mark.parametrize("transport", ["http1", "http2"])
@pytest.mark.parametrize("length", [100 * KiB, None])
async def test_an_upload_under_way_is_ended_at_the_deadline(transport: str, length: int | None, autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("v2-http1"), config=Config(drain=DrainConfig(timeout=10))) as house:
        line = house.line(transport)
        head = raw(1, b"POST", "/v2/models/probe/infer", content_length=length)
        await line.send(head, Data(stream=1, buffers=(bytes(KiB),)))
        await house.still()
        async with draining(house) as reports:
            assert (await line.peer.read_answer(1))[0] == 503
            line.peer.close()
        assert reports[0].endings == {"drained": 1}


@pytest.mark.parametrize(
    "wire",
    ["lmi-http1", "v2-http2", "bidi", "streamparts-http1", "container-http2", "bidi-signed", "inferstream-http2"],
)
async def test_calls_that_wait_for_a_slot_are_ended_at_the_deadline(wire: str, autojump_clock: Any) -> None:
    probe = Probe(silent)
    # than a session may be silent while others wait for its slot
    shorter = Config(drain=DrainConfig(timeout=10))
    async with serving(probe.spec(wire, capacity=1), wire=wire, config=shorter) as house:
        first = await house.call(wire)
        await house.still()
        waiting = await house.call(wire)
        await house.still()
        async with draining(house) as reports:
            for call in (first, waiting):
                _, over = await call.rest()
                assert over.how in ("refused", "error")
                await call.line.over()
        assert probe.calls == 1
        assert reports[0].endings == {"drained": 2}


@pytest.mark.parametrize(
    "said", [b"", b"GET /pi", b"PRI * HTTP/2.0\r\n", b"GET /ping HTTP/1.1\r\nhost: x\r\n"], ids=["-", "GET", "PRI", "head"]
)
async def test_connections_that_have_not_asked_anything_yet_do_not_hold_the_drain(said: bytes, autojump_clock: Any) -> None:
    async with serving() as house:
        line = house.line("http1")
        if said:
            line.transport.try_send([said])
        await house.still()
        report = await house.gateway.drain()
        assert report.seconds <= GRACE
        await line.over_raw()


@pytest.mark.parametrize("transport", ["http1", "http2"])
async def test_a_connection_that_comes_during_the_delay_is_served_its_refusals_and_closed(
    transport: str, autojump_clock: Any
) -> None:
    probe = Probe(answering)
    async with serving(probe.spec("bidi"), config=delay(5)) as house:
        live = await house.call("bidi")
        await house.still()
        async with draining(house) as reports:
            line = house.line(transport)
            assert (await get(line, "/v2/models/probe"))[0] == 503
            assert isinstance(await line.event(99), ConnectionEnd)
            await trio.sleep(6)
            probe.go.set()
            assert await live.rest() == ([0], Over("complete"))
            await live.line.over()
        assert reports[0].clean
        assert reports[0].seconds < 6 + GRACE


async def test_a_reset_stream_in_a_drain_is_reported_as_what_it_was(autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec("bidi")) as house:
        line = house.line("http2")
        leaving, staying = await house.call("bidi", line=line), await house.call("bidi", line=line)
        for call in (leaving, staying):
            await call.take(3)
        async with draining(house) as reports:
            await line.send(Reset(stream=leaving.stream, code=8))
            await trio.sleep(1)
            probe.go.set()
            assert (await staying.rest())[1] == Over("complete")
            await line.over()
        assert reports[0].endings == {"cancelled-by-client": 1, "complete": 1}


async def test_models_are_unloaded_after_the_last_session(autojump_clock: Any) -> None:
    log: list[str] = []
    probe = Probe(pausing)

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        log.append("load")
        try:
            yield probe
        finally:
            log.append(f"unload with {probe.live} live")

    probe.speak("bidi")
    async with serving(ModelSpec(name="probe", family=probe.family, load=load)) as house:
        call = await house.call("bidi")
        await call.take(3)
        async with draining(house):
            probe.go.set()
            await call.rest()
            await call.line.over()
        assert log == ["load", "unload with 0 live"]


async def test_a_blocking_step_cannot_hold_the_drain_of_its_wire() -> None:
    began, go = threading.Event(), threading.Event()

    def step(prompt: Prompt) -> str:
        began.set()
        go.wait(60)
        return "late"

    async with serving(spec_of(step, "probe"), config=Config(drain=DrainConfig(timeout=0))) as house:  # on a real clock
        call = await house.call("lmi-http1")
        await trio.to_thread.run_sync(began.wait, 60)
        async with draining(house) as reports:
            _, over = await call.rest()
            assert (over.how, over.code) == ("refused", "503")
            call.line.peer.close()
            go.set()
        assert reports[0].endings == {"drained": 1}
        with trio.fail_after(60):
            while house.gateway.counts().slots_in_use:
                await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("state", ["loading", "restarting", "failed", "unloading for ever"])
async def test_a_drain_ends_by_its_deadline_whatever_state_a_model_is_in(state: str, autojump_clock: Any) -> None:
    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        if state == "loading":
            await trio.sleep_forever()
        if state in ("restarting", "failed"):
            raise RuntimeError("no weights")
        try:
            yield Probe(silent)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(3)  # a clean-up with patience of its own

    policy = RestartPolicy(intensity=0 if state == "failed" else 100, backoff=1000, backoff_max=1000)
    spec = ModelSpec(name="probe", family=WIRE["bidi"].family, load=load, restart=policy)
    gateway = Gateway(Config(listen=ListenConfig(port=-1)), [spec, Probe(silent, "other").spec("bidi")])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.serve)
        await trio.sleep(5)
        with trio.fail_after(GRACE + 5):
            report = await gateway.drain()
        assert report.clean


@pytest.mark.parametrize("driver", ways.DRIVERS)
@pytest.mark.parametrize("wire", [w for w in WIRES if w != "bridge"])
async def test_a_gateway_that_is_cancelled_ends_everything_at_once(wire: str, driver: str, autojump_clock: Any) -> None:
    probe = Probe(silent)
    gateway = Gateway(configured(wire, Config(listen=ListenConfig(port=-1))), [probe.spec(wire)])
    edges = MemoryEdges() if driver == "leader" else None
    gateway.acceptor.poller = edges and Poller(edges)
    before = await tasks()
    async with trio.open_nursery() as nursery, trio.open_nursery() as connections:
        await nursery.start(gateway.serve)
        house = House(MemoryGateway(gateway, connections, 64 * KiB, edges))
        await house.call(wire)
        await house.still()
        assert probe.live == 1
        with at_once():
            nursery.cancel_scope.cancel()
            await gateway.stopped()
    assert (probe.live, probe.stopped) == (0, 1)
    counts = gateway.counts()
    assert (counts.connections, counts.exchanges, counts.bytes_reserved, counts.slots_in_use) == (0, 0, 0, 0)
    assert counts.endings == {"transport-lost": 1}
    assert await tasks() == before


@pytest.mark.parametrize("wire", STREAMS)
async def test_the_report_has_a_row_for_each_stream_that_was_cut_and_counts_the_rest(wire: str, autojump_clock: Any) -> None:
    probe, other = Probe(pausing), Probe(pausing, "other")
    config = Config(drain=DrainConfig(delay=1, timeout=10))
    async with serving(probe.spec(wire), other.spec(wire), config=config, wire=wire) as house:
        finishing, cut = await house.call(wire, "other"), await house.call(wire)
        for call in (finishing, cut):
            await call.take(3)
        await trio.sleep(5)
        assert house.gateway.drain_report is None
        async with draining(house) as reports:
            assert (await get(house.line("http1"), "/v2/models/probe"))[0] == 503
            other.go.set()
            assert (await finishing.rest())[1].how == "complete"
            for call in (finishing, cut):
                await call.rest()
                await call.line.over()
        (report,) = reports
        assert house.gateway.drain_report == report
        assert (report.live, report.finished, report.refused, report.clean) == (2, 1, 1, False)
        assert report.endings == {"complete": 1, "drained": 1}
        (row,) = report.cut
        assert (row.model, row.ending, row.age) == ("probe", "drained", 16.0)
        assert row.wire == {"http1": "http/1.1", "http2": "http/2", "websocket": "websocket"}[WIRE[wire].transport]
        assert row.dialect
        assert row.bytes_out > 3 * 8
        told = json.loads(report.to_json())
        assert b"\n" not in report.to_json()
        assert told["cut"] == [
            {
                "id": row.id, "wire": row.wire, "dialect": row.dialect, "model": "probe", "ending": "drained", "age": 16.0,
                "bytes_in": row.bytes_in, "bytes_out": row.bytes_out,
            }
        ]  # fmt: skip
        assert told["endings"] == report.endings


@pytest.mark.parametrize("wire", ["lmi-http2", "bidi", "websocket"])
async def test_a_client_that_takes_not_even_its_ending_has_a_row_too(wire: str, autojump_clock: Any) -> None:
    async with serving(Probe(counting).spec(wire), config=Config(drain=DrainConfig(timeout=10)), wire=wire) as house:
        await house.call(wire)
        await house.still()
        report = await house.gateway.drain()
        assert [(row.ending, row.age) for row in report.cut] == [("transport-lost", 10.0)]
        assert (report.live, report.finished) == (1, 0)


async def test_a_client_that_left_during_the_drain_was_not_cut(autojump_clock: Any) -> None:
    async with serving(Probe(pausing).spec("lmi-http1")) as house:
        call = await house.call("lmi-http1")
        await call.take(3)
        async with draining(house) as reports:
            await call.leave(Leave.CLOSE)
        assert (reports[0].endings, reports[0].finished, reports[0].cut) == ({"cancelled-by-client": 1}, 1, ())


async def test_a_client_that_was_given_up_before_the_deadline_was_not_cut_by_the_drain(autojump_clock: Any) -> None:
    config = Config(limits=LimitsConfig(write_stall=3), drain=DrainConfig(timeout=30))
    async with serving(Probe(counting).spec("lmi-http2"), config=config) as house:
        await house.call("lmi-http2")
        await house.still()
        report = await house.gateway.drain()
        assert (report.endings, report.finished, report.cut) == ({"transport-lost": 1}, 1, ())
        assert report.clean


async def test_begin_drain_is_idempotent_and_drain_may_be_called_again(autojump_clock: Any) -> None:
    async with serving() as house:
        house.gateway.begin_drain()
        house.gateway.begin_drain()
        report = await house.gateway.drain()
        assert await house.gateway.drain() == report
