"""The console's pure functions by table, and its figures and its verdict beside what the test itself has sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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

_CHAT = {"name": "chat", "capacity": 64, "slots_in_use": 58, "slots_blocked": 47, "queued": 0, "state": "ready"}
_SLOW = {"name": "slow", "capacity": 8, "slots_in_use": 8, "slots_blocked": 0, "queued": 11, "state": "ready"}
_FLAKY = {**_CHAT, "name": "flaky", "last_error": {"error": "ValueError: no", "incident": "2baa", "ago": 1}}
_PEER = {"address": "10.4.7.31", "streams": 47, "room": 94, "input": 0, "slots": 47}
_SENDER = {"address": "10.4.9.2", "streams": 3, "room": 0, "input": 50, "slots": 0}


def did(**changes: Any) -> dict[str, Any]:
    """The counters of a model over the minute."""
    none = {"ended": 0, "failed": 0, "refused": 0, "items_in": 0, "items_out": 0, "spent": {}}
    return none | changes


def minute(*models: tuple[dict[str, Any], dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """A minute of these models: `summary` of figures.mjs, but for its function."""
    by_model = {status["name"]: change for status, change in models}
    spent: dict[str, float] = {}
    for change in by_model.values():
        for part, seconds in change["spent"].items():
            spent[part] = spent.get(part, 0) + seconds
    total = {key: sum(change[key] for change in by_model.values()) for key in ("ended", "failed", "refused", "items_out")}
    told = {
        "seconds": 60, "ready": True, "reasons": [], "draining": False, "models": [status for status, _ in models], "peers": [],
        "live": 3, "ever": 1000, "total": {**total, "spent": spent}, "byModel": by_model, "refusals": {}, "refused": 0,
        "lag99": 0.002, "model": "chat",
    }  # fmt: skip
    return told | changes


_BUSY = (_CHAT, did(ended=600, spent={"model": 100}))
VERDICTS = {
    "not ready": (minute(_BUSY, ready=False, reasons=["chat: loading"]), "unready", "Not ready: chat: loading"),
    "draining": (minute(_BUSY, draining=True, ready=False), "draining", "Draining: new requests are refused."),
    "nothing yet": (minute((_CHAT, did()), ever=0, live=0), "empty", "Ready. Nothing has called yet."),
    "refusing": (
        minute((_SLOW, did(ended=100, refused=12, spent={"room": 90})), refusals={"queue-full": 12}, refused=12),
        "refusing", "Refusing: queue of slow is full (12 %)",
    ),
    "one in a hundred is not yet refusing": (
        minute((_CHAT, did(ended=600, refused=6)), refusals={"rate": 6}, refused=6), "healthy", "Healthy: 10 requests/s, p99 of chat 12.0 s, 1.0 % refused",
    ),
    "readers": (
        minute((_CHAT, did(ended=10, spent={"room": 48, "model": 30, "slot": 22})), peers=[_SENDER, _PEER]),
        "readers", "Slow readers: 48 % of exchange time in the last minute went to clients that do not read.",
    ),
    "full": (
        minute(_BUSY, (_SLOW, did(ended=10, spent={"slot": 58, "model": 40}))),
        "full", "slow is full: 8 of 8 slots, 11 queued, 5.8 s for a slot",
    ),
    "failing": (minute(_BUSY, (_FLAKY, did(ended=100, failed=38))), "failing", "flaky fails 38 % of its requests"),
    "a failure in fifty is not yet failing": (minute((_CHAT, did(ended=50, failed=2))), "healthy", "Healthy: 0.8 requests/s, p99 of chat 12.0 s, no refusals"),
    "lag": (minute(_BUSY, lag99=0.05), "lag", "Something blocks the event loop"),
    "senders": (minute((_CHAT, did(ended=10, spent={"input": 50, "model": 50})), peers=[_SENDER]), "senders", "Clients send slowly"),
    "a duplex model waits for its client": (
        minute(({**_CHAT, "family": "parts"}, did(ended=1, spent={"input": 50, "model": 50}))), "healthy", "Healthy: 0.02 requests/s, p99 of chat 12.0 s, no refusals",
    ),
    "too little to tell": (minute((_CHAT, did(ended=6, spent={"room": 0.5}))), "healthy", "Healthy: 0.1 requests/s, p99 of chat 12.0 s, no refusals"),
    "quiet": (minute((_CHAT, did())), "healthy", "Healthy: no request has ended in the last minute"),
}  # fmt: skip


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


@pytest.mark.parametrize(("given", "rule", "title"), VERDICTS.values(), ids=VERDICTS)
def test_one_sentence_names_the_culprit(page: Any, given: dict[str, Any], rule: str, title: str) -> None:
    told = page.evaluate(
        """async given => (await import("/console/verdict.mjs")).verdict({...given, quantiles: () => ({duration99: 12})})""",
        given,
    )
    assert (told["rule"], told["title"].replace("\u00a0", " ")) == (rule, title)


def test_slow_readers_are_named_with_what_they_hold(page: Any) -> None:
    given, _, _ = VERDICTS["readers"]
    told = page.evaluate("""async given => (await import("/console/verdict.mjs")).verdict(given).detail""", given)
    text = "".join(piece if isinstance(piece, str) else piece["text"] for piece in told).replace("\u00a0", " ")
    assert text == (
        "One address, 10.4.7.31, accounts for 100 % of what live streams wait: 47 streams that hold 47 slots."
        " 47 of the 64 slots of chat are held by clients that do not read."
    )
    assert {"text": "10.4.7.31", "href": "#/streams?peer=10.4.7.31"} in told


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
            const {summary} = await import("/console/figures.mjs"); const f = summary(state.points, state.stats, state.models, false, "");
            return [[f.total.ended, f.total.failed, f.total.items_out], f.seconds]; }""")
        assert told[:2] == [25, 5]
        assert 200 <= told[2] <= 200 + 3 * (2 * served + 2)
        row = page.inner_text("tbody tr:has-text('flaky')")
        assert "100\u00a0%" in row


SCENARIOS: dict[str, tuple[Callable[[Server, Any], None], str, str]] = {
    "slow reader": (lambda server, clients: [clients.deaf("big", "x") for _ in range(4)], "readers", "big"),  # type: ignore[dict-item,return-value]
    "slow sender": (lambda server, clients: [clients.slow_sender("chat") for _ in range(4)], "senders", "127.0.0.1"),  # type: ignore[dict-item,return-value]
    "full queue": (lambda server, clients: [clients.reader("slow", "600 0.1") for _ in range(6)], "full", "slow"),  # type: ignore[dict-item,return-value]
    "slow model": (lambda server, clients: [server.call("chat", "2 1") for _ in range(2)], "healthy", "p99 of chat"),  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize(("load", "rule", "named"), SCENARIOS.values(), ids=SCENARIOS)
def test_the_verdict_names_the_culprit_of_a_real_load(
    start: Callable[..., Server], console: Any, load: Callable[[Server, Any], object], rule: str, named: str
) -> None:
    server = start()
    with server.clients() as clients, console(server) as page:
        load(server, clients)
        until(lambda: verdict_of(page)[0] == rule, f"the verdict {rule}")
        assert named in verdict_of(page)[1]


def verdict_of(page: Any) -> tuple[str, str]:
    """The rule and the words of what the page says now, on a machine whose other programs delay no event loop."""
    rule, words = page.evaluate("""async () => { const {state} = await import("/console/state.mjs");
        const {summary} = await import("/console/figures.mjs"), {verdict} = await import("/console/verdict.mjs");
        if (!state.stats || !state.models) return ["", ""];
        const told = verdict({...summary(state.points, state.stats, state.models, false, ""), lag99: null});
        return [told.rule, told.title + told.detail.map(piece => piece.text || piece).join("")]; }""")
    return rule, words


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
            session.send("HeapProfiler.collectGarbage")
            return int(session.send("Runtime.getHeapUsage")["usedSize"])

        before, seen = heap(), server.ask("GET", "/stats")[1]["uptime"]
        until(lambda: server.ask("GET", "/stats")[1]["uptime"] > seen + 12, "twelve seconds of the server")
        assert heap() - before < 3_000_000
