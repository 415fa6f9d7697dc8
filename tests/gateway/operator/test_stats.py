"""The figures of the plane are what the load was, name who is slow, and are kept for ten minutes in bounded memory."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import trio
from msgspec import UNSET

from gateway.client.questions import lmi
from gateway.config import Config, LimitsConfig, ListenConfig
from gateway.gateway import Gateway
from gateway.operator.history import EVERY, KEPT_MODELS, KEPT_POINTS, History, HistoryView
from gateway.operator.stats import HistogramView, ModelStats, StatsView, VerdictView, check, counters_of, stats_of_all
from gateway.testing import memory_gateway
from gateway.version import version
from models.adapt import spec_of
from tests.gateway.operator.operators import Operator
from tests.gateway.operator.test_operator import NO_PORT
from tests.gateway.telemetry.test_tallies import X, echo, flood, wait, words

KiB = 1024


async def test_figures_are_those_of_the_load(autojump_clock: Any) -> None:
    config = Config(limits=LimitsConfig(total_bytes=1000 * KiB, body=100 * KiB, memory_refuse=80, memory_reset=90))
    async with memory_gateway([words, echo, spec_of(wait, capacity=1, queue=8)], config) as house:
        operator = Operator(house.gateway)
        before = await operator.get("/stats")
        assert (before["models"], before["ready"], before["reasons"]) == ({}, True, [])
        assert (before["version"], before["refusals"]["queue-full"]) == (version(), 0)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(house.client("http1").infer, X, "wait")
                nursery.start_soon(house.client("http2").lmi, "x", "words")
            await trio.sleep(2.5)
            now = await operator.get("/stats")
            assert now["live"] == {"http/1.1": 2, "http/2": 2} == now["connections"]
            assert now["waiting"] == {"http/1.1": {"slot": 1}}
            assert now["models"]["words"]["items_out"] == 2 * 2
            assert now["models"]["words"]["endings"] == {}
            assert now["models"]["wait"]["spent"]["slot"] == pytest.approx(2.5)
            memory = now["memory"]
            assert [memory[name] for name in ("limit", "refuse", "reset")] == [1000 * KiB, 800 * KiB, 900 * KiB]
            assert 0 < memory["process"] <= memory["process_limit"]
            assert set(memory["held"]) == {"received", "bodies", "assembling", "send", "large"}
        after = (await operator.get("/stats"))["models"]
        assert (after["words"]["endings"], after["words"]["items_out"]) == ({"complete": 2}, 2 * 8)
        assert sum(after["words"]["duration"]["buckets"]) == sum(after["words"]["first"]["buckets"]) == 2
        assert after["wait"]["spent"]["slot"] == pytest.approx(3)


async def test_the_address_of_slow_readers_is_named_with_the_slots_they_hold(autojump_clock: Any) -> None:
    async with memory_gateway([flood], capacity=KiB) as house:
        talks = [
            house.client(wire).about(lmi("x", "flood", stream=True, max_new_tokens=5000)) for wire in ("http1", "http2")
        ]
        for talk in talks:
            await talk.begin()
        await trio.sleep(30)
        told = await Operator(house.gateway).get("/stats")
        assert told["waiting"] == {"http/1.1": {"room": 1}, "http/2": {"room": 1}}
        (peer,) = told["peers"]
        assert (peer["streams"], peer["slots"], peer["room"], peer["input"]) == (2, 2, pytest.approx(60, rel=0.1), 0)
        for talk in talks:
            talk.leave()


async def test_a_plane_that_nobody_asks_keeps_no_history(autojump_clock: Any) -> None:
    async with memory_gateway([words], NO_PORT) as house:
        assert house.gateway.timer.beside == []
        await trio.sleep(10)
        Operator(house.gateway)
        assert len(house.gateway.timer.beside) == 2  # the history's, and that of lines that were left out


async def test_history_has_a_point_in_two_seconds_and_no_more_than_were_asked_for(autojump_clock: Any) -> None:
    async with memory_gateway([words], NO_PORT) as house:
        operator = Operator(house.gateway)
        await house.client().lmi("x", "words")
        await trio.sleep(100)
        told = await operator.get("/history")
        assert told["every"] == EVERY == 2
        assert len(told["points"]) == pytest.approx(100 / EVERY, abs=5)
        items = [point["models"].get("words", {"items_out": 0})["items_out"] for point in told["points"]]
        assert items == sorted(items)
        assert 0 < items[1] < items[-1] == 8
        msgspec.json.decode(msgspec.json.encode(told), type=HistoryView)


@pytest.mark.parametrize("seconds", ["0", "601", "nan", "x", ""])
async def test_seconds_of_history_are_in_bounds(seconds: str) -> None:
    answer = await Operator(Gateway(NO_PORT)).ask("GET", f"/history?seconds={seconds}")
    assert answer.status == 400
    assert answer.json["error"].startswith("seconds must be a number of seconds from 1 to 600, not ")


def counted(n: int) -> ModelStats:
    """Counters that are all others for each n."""
    long = HistogramView(buckets=[1_000_000 + n] * 18, seconds=1.0)
    spent = dict.fromkeys(("begin", "slot", "input", "room", "flush", "model"), 100_000.123 + n)
    return ModelStats(
        endings={"complete": 1_000_000 + n, "model-error": n}, items_in=n, items_out=10**9 + n, bytes_in=10**12 + n,
        bytes_out=10**12, spent=spent, duration=long, first=long, gap=HistogramView(buckets=[n] * 16, seconds=1.0),
    )  # fmt: skip


async def figures(*names: str, n: int = 0) -> StatsView:
    """Those of a gateway, with counters of these models."""
    view = msgspec.convert(await Operator(Gateway(Config(listen=ListenConfig(port=-1)))).get("/stats"), StatsView)
    return msgspec.structs.replace(view, models=dict.fromkeys(names, counted(n)), at=float(n), verdict=UNSET)


async def nothing() -> list[Any]:
    """No model is in service."""
    return []


async def test_all_who_read_share_one_look_a_second(autojump_clock: Any) -> None:
    view, looks = await figures("x"), 0

    async def stats() -> StatsView:
        nonlocal looks
        looks += 1
        await trio.sleep(0.05)
        return view

    history = History(stats, nothing)

    async def read() -> None:
        for _ in range(10):
            assert msgspec.structs.replace(await history.recent(), verdict=UNSET) == view
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(read)
    assert looks == pytest.approx(10, abs=2)


async def test_the_verdict_is_told_with_the_figures(autojump_clock: Any) -> None:
    async with memory_gateway([words, flood], capacity=KiB) as house:
        operator = Operator(house.gateway)
        assert (await operator.get("/stats"))["verdict"]["kind"] == "empty"
        talk = house.client("http1").about(lmi("x", "flood", stream=True, max_new_tokens=5000))
        await talk.begin()
        await trio.sleep(30)
        told = (await operator.get("/stats"))["verdict"]
        assert (told["kind"], told["model"]) == ("readers", "flood")
        assert told["sentence"].startswith("Slow readers: ")
        assert told["spent"]["room"] > 0.9 * sum(told["spent"].values())
        talk.leave()


async def test_the_verdict_is_on_the_last_minute(autojump_clock: Any) -> None:
    view, seconds, calls = await figures("chat"), itertools.count(1), itertools.chain([10**6], itertools.repeat(0))
    total = itertools.accumulate(calls)

    async def stats() -> StatsView:
        chat = msgspec.structs.replace(counted(0), endings={"complete": next(total)}, spent={"model": 1.0})
        return msgspec.structs.replace(view, ready=True, uptime=float(next(seconds)), models={"chat": chat})

    history, told = History(stats, nothing), []
    for _ in range(100):
        await history.second()
        judged = (await history.recent()).verdict
        assert isinstance(judged, VerdictView)
        told.append((judged.seconds, "requests/s" in judged.sentence))
        await trio.sleep(1)
    assert told[:60] == [(second, True) for second in range(1, 61)]
    assert {said for _, said in told[63:]} == {False}
    assert all(60 <= seconds < 60 + EVERY for seconds, _ in told[63:])


async def test_a_model_that_the_history_has_not_kept_is_no_news(autojump_clock: Any) -> None:
    view, uptime = await figures(*(f"model-{n}" for n in range(KEPT_MODELS + 1))), itertools.count(100, 100)

    async def stats() -> StatsView:
        return msgspec.structs.replace(view, ready=True, uptime=float(next(uptime)))

    history = History(stats, nothing)
    for _ in range(EVERY):
        await history.second()
    await trio.sleep(1)
    told = (await history.recent()).verdict
    assert isinstance(told, VerdictView)
    assert (told.sentence, told.seconds) == ("Healthy: no request has ended in the last minute", 100)


async def test_history_is_bounded_in_points_models_and_bytes(autojump_clock: Any) -> None:
    view = await figures(*(f"model-{n}" for n in range(KEPT_MODELS + 10)))
    numbers = itertools.count(1)

    async def stats() -> StatsView:
        n = next(numbers)
        return msgspec.structs.replace(view, at=2.0 * n, models=dict.fromkeys(view.models, counted(n)))

    history = History(stats, nothing)
    for _ in range(2 * (KEPT_POINTS + 10)):
        await history.second()
        await trio.sleep(1)
    told = msgspec.json.decode(history.json(600), type=HistoryView)
    assert len(told.points) == KEPT_POINTS
    assert {len(point.models) for point in told.points} == {KEPT_MODELS}
    assert history.held < KEPT_MODELS * 180_000
    assert len(msgspec.json.decode(history.json(20))["points"]) == 10


async def test_a_model_without_calls_takes_next_to_nothing_of_history() -> None:
    view = await figures("idle")

    async def stats() -> StatsView:
        return view

    history = History(stats, nothing)
    for _ in range(2 * KEPT_POINTS):
        await history.second()
    assert history.held < KEPT_POINTS * 300


async def test_figures_of_fronts_are_added_and_those_of_one_that_is_gone_stay_counted() -> None:
    one, other = await figures("chat", n=1), await figures("chat", "scale", n=2)
    live = msgspec.structs.replace(one, live={"http/2": 3}, waiting={"http/2": {"room": 2}})
    total = stats_of_all([live, other])
    assert total.models["chat"].endings == {"complete": 2_000_003, "model-error": 3}
    assert total.models["chat"].duration.buckets[0] == 2_000_003
    assert total.models["scale"] == other.models["scale"]
    assert (total.live, total.waiting) == ({"http/2": 3}, {"http/2": {"room": 2}})
    assert total.memory.limit == one.memory.limit + other.memory.limit
    left = stats_of_all([other, counters_of(live)])
    assert (left.models, left.live, left.memory.limit) == (total.models, {}, other.memory.limit)
    assert stats_of_all([]).models == {}


async def test_figures_that_another_process_has_made_up_are_refused() -> None:
    view = await figures("chat")
    check(view)
    model = msgspec.structs.replace(view.models["chat"], gap=HistogramView(buckets=[1], seconds=0.0))
    with pytest.raises(ValueError, match="1 buckets, not 16"):
        check(msgspec.structs.replace(view, models={"chat": model}))
    with pytest.raises(ValueError, match="0 buckets, not 12"):
        check(msgspec.structs.replace(view, lag=HistogramView(buckets=[], seconds=0.0)))
