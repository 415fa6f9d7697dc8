"""The console's pure functions by table, and its figures and the verdict beside what the test itself has sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.operator.stats import StatsView
from gateway.operator.verdict import verdict
from gateway.operator.views import ModelView
from tests.gateway.operator.console.served import Server, until

UNITS = [
    ("count", [None, 0, 7, 812, 999.6, 2200, 51_000, 2_100_000], ["–", "0", "7", "812", "1.0 k", "2.2 k", "51 k", "2.1 M"]),
    ("rate", [None, 0, 0.001, 0.05, 4.12, 111.2, 2200], ["–", "0", "0.00", "0.05", "4.1", "111", "2.2 k"]),
    ("bytes", [None, 0, 46, 1023, 1024, 285_696, 24_222_106, 6_319_128_576],
     ["–", "0 B", "46 B", "1023 B", "1 KiB", "279 KiB", "23.1 MiB", "5.9 GiB"]),
    ("duration", [None, 0, 0.0042, 0.0704, 0.9996, 5.84, 38.5, 59.96, 252, 3900, 273_600],
     ["–", "0 ms", "4.2 ms", "70 ms", "1.0 s", "5.8 s", "38.5 s", "1m 00s", "4m 12s", "1h 05m", "3d 4h"]),
    ("roughly", [None, 12, 120, 7200, 259_200], ["–", "12 s", "2 min", "2 h", "3 d"]),
    ("share", [None, 0, 0.01, 0.0994, 0.0996, 0.484, 1], ["–", "0 %", "1.0 %", "9.9 %", "10 %", "48 %", "100 %"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def page(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A page of a server of its own, whose modules are called."""
    server = Server(tmp_path_factory.mktemp("pure"))
    try:
        server.start()
        context = chromium.new_context()
        opened = context.new_page()
        opened.goto(server.url)
        yield opened
        context.close()
    finally:
        server.stop()


@pytest.mark.parametrize(("name", "given", "expected"), UNITS, ids=[name for name, _, _ in UNITS])
def test_numbers_are_written_as_people_read_them(page: Any, name: str, given: list[Any], expected: list[str]) -> None:
    call = "async ([name, given]) => { const units = await import('/console/units.mjs'); return given.map(units[name]); }"
    assert [text.replace("\u00a0", " ") for text in page.evaluate(call, [name, given])] == expected


def test_a_quantile_is_found_within_its_bucket(page: Any) -> None:
    call = """async () => { const {quantile} = await import("/console/figures.mjs"), bounds = [1, 2, 4];
        return [[[0, 10, 0, 0], .5], [[5, 5, 0, 0], .5], [[0, 0, 0, 3], .99], [[0, 0, 0, 0], .5], [[1], .5]].map(([b, q]) => quantile(b, bounds, q)); }"""
    assert page.evaluate(call) == [1.5, 1, 4, None, 0.5]


def test_points_are_two_seconds_apart_and_bounded(page: Any) -> None:
    call = """async () => { const {appended, KEPT} = await import("/console/figures.mjs"); let points = [];
        for (let at = 1; at <= 1000; at++) points = appended(points, {at}); return [points.map(point => point.at), KEPT]; }"""
    at, kept = page.evaluate(call)
    assert at[-3:] in ([996, 998, 1000], [997, 999, 1000])
    assert len(at) <= kept + 1


# -- beside a load


def figure(page: Any, name: str) -> str:
    """One of the six numbers with what stands below it."""
    text: str = page.inner_text(f".number:has([data-figure='{name}'])")
    return text.replace("\u00a0", " ")


def test_each_number_is_what_was_sent(start: Callable[..., Server], console: Any) -> None:
    server = start()
    with server.clients() as clients, console(server) as page:
        for _ in range(20):
            server.call("chat", "10 0")
        for _ in range(5):
            server.call("flaky", "no")
        for _ in range(3):
            clients.reader("chat", "60000 0.5")
        page.wait_for_function(
            """() => document.querySelector("main").innerText.replaceAll("\\u00a0", " ").includes("28 since start")"""
        )
        assert "5 failed" in figure(page, "Errors")
        assert "20 %" in figure(page, "Errors")
        assert page.inner_text("[data-figure='Live streams']") == "3"
        told, served = page.evaluate("""async () => { const {state} = await import("/console/state.mjs");
            const {summary} = await import("/console/figures.mjs"); const f = summary(state.points, state.stats, "");
            return [[f.total.ended, f.total.failed, f.total.items_out], f.seconds]; }""")
        assert told[:2] == [25, 5]
        assert 200 <= told[2] <= 200 + 3 * (2 * served + 2)
        row = page.inner_text("tbody tr:has-text('flaky')")
        assert "100\u00a0%" in row


SCENARIOS: dict[str, tuple[Callable[[Server, Any], object], str, str]] = {
    "slow reader": (lambda server, clients: [clients.deaf("big", "x") for _ in range(4)], "readers", "#/streams?peer=127.0.0.1"),
    "slow sender": (lambda server, clients: [clients.slow_sender("chat") for _ in range(4)], "senders", "#/streams?peer=127.0.0.1"),
    "full queue": (lambda server, clients: [clients.reader("slow", "600 0.1") for _ in range(6)], "full", "#/models/slow"),
    "slow model": (lambda server, clients: [server.call("chat", "2 1") for _ in range(2)], "healthy", "#/models/chat"),
}  # fmt: skip


@pytest.mark.parametrize(("load", "kind", "link"), SCENARIOS.values(), ids=SCENARIOS)
def test_the_verdict_names_the_culprit_of_a_real_load(
    start: Callable[..., Server], console: Any, load: Callable[[Server, Any], object], kind: str, link: str
) -> None:
    server = start()
    with server.clients() as clients, console(server) as page:
        load(server, clients)
        until(lambda: kind_without_lag(server) == kind, f"the verdict {kind}")
        # Other programs may delay the event loop of this machine, and then the server blames that.
        page.wait_for_selector(f".verdict:is([data-rule={kind}], [data-rule=blocked], [data-rule=busy])")
        shown, told, seen = page.evaluate("""async () => { const {state} = await import("/console/state.mjs");
            const card = document.querySelector("[aria-label=Verdict]"), shown = card.querySelector(".verdict");
            return [[shown.dataset.rule, shown.textContent], state.stats.verdict, [...card.querySelectorAll("a")].map(a => a.hash)]; }""")
        assert shown == [told["kind"], told["sentence"]]
        assert told["kind"] in ("blocked", "busy") or link in seen


def kind_without_lag(server: Server) -> str:
    """The verdict of now on a machine whose other programs delay no event loop."""
    stats = msgspec.convert(server.ask("GET", "/stats")[1], StatsView)
    models = msgspec.convert(server.ask("GET", "/models")[1]["models"], list[ModelView])
    lag = msgspec.structs.replace(stats.lag, buckets=[0] * len(stats.lag.buckets))
    return verdict(None, msgspec.structs.replace(stats, lag=lag), stats.uptime, models).kind


def test_a_thousand_streams_are_counted_and_the_longest_waiting_are_shown(
    start: Callable[..., Server], console: Any
) -> None:
    server = start("models.chat.capacity=2000")
    with server.clients() as clients, console(server) as page:
        clients.readers(1100, "chat", "60000 1")
        until(lambda: server.ask("GET", "/streams?limit=1")[1]["live"] == 1100, "1,100 live streams")
        page.goto(server.url + "#/streams")
        page.wait_for_selector("text=1100 live, 100 shown of the 1.0\u00a0k that have waited longest")
        assert page.locator("tbody tr").count() == 100
        page.click("text=Show 100 more")
        page.wait_for_selector("tbody tr >> nth=199")
        # The rows that are shown are bounded, and so are those that are kept.
        session = page.context.new_cdp_session(page)

        def heap() -> int:
            """The least of several looks: one collection leaves what only its end, or the page's next second, lets go."""
            sizes: list[int] = []
            for _ in range(5):
                session.send("HeapProfiler.collectGarbage")
                sizes.append(int(session.send("Runtime.getHeapUsage")["usedSize"]))
                page.wait_for_timeout(300)
            return min(sizes)

        before, seen = heap(), server.ask("GET", "/stats")[1]["uptime"]
        until(lambda: server.ask("GET", "/stats")[1]["uptime"] > seen + 12, "twelve seconds of the server")
        assert heap() - before < 3_000_000
