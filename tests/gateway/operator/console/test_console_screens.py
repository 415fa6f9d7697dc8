"""Each screen of the console, light and dark, wide and narrow: readable, accessible, and whatever a peer says is text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.operator.console.served import FINDINGS, Server, until

SCREENS = {
    "overview": "#/",
    "models": "#/models/slow",
    "streams": "#/streams",
    "incidents": "#/incidents",
    "drain": "#/drain",
}
HOSTILE = "<img src=x onerror=alert(1)> \u202e\u05d0\u05d1 " + "A" * 10_000


def turn(page: Any, screen: str) -> None:
    """Goes to a screen, and lets it be drawn."""
    frame = "new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
    page.evaluate(f"async at => {{ location.hash = at; await {frame}; await {frame}; }}", screen)


def fits(page: Any) -> bool:
    """True if nothing makes the page scroll sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth === innerWidth")) or _outside(page)


def _outside(page: Any) -> bool:
    """False, and says what is outside."""
    print(
        page.evaluate("""[...document.querySelectorAll("*")].map(one => [one.getBoundingClientRect().right, one.outerHTML.slice(0, 200)])
        .filter(([right]) => right > innerWidth)""")
    )
    return False


@pytest.fixture
def busy(start: Callable[..., Server]) -> Any:
    """A server with something on each screen."""
    server = start()
    with server.clients() as clients:
        for _ in range(12):
            server.call("flaky", "CUDA error: an illegal memory access was encountered")
        for _ in range(3):
            server.call("chat", "20 0.001")
        for _ in range(5):
            clients.deaf("big", "x")
        for _ in range(5):
            clients.reader("slow", "600 0.1")
        for _ in range(6):
            clients.reader("chat", "6000 0.05")
        clients.slow_sender("chat")
        until(lambda: server.ask("GET", "/streams")[1]["live"] == 17, "17 live streams")
        yield server


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_screen_is_accessible_and_fits(busy: Server, console: Any, axe: str, scheme: str, width: int) -> None:
    with console(busy, width=width, scheme=scheme) as page:
        page.evaluate(axe)
        for name, screen in SCREENS.items():
            turn(page, screen)
            assert page.text_content("h1") == name.capitalize()
            if name == "streams":
                page.wait_for_selector("tbody tr")
                page.click("tbody tr >> nth=0 >> button[aria-expanded]")
                page.wait_for_selector(".more svg")
            if name == "incidents":
                page.wait_for_selector("pre")
            if name == "overview":
                page.wait_for_selector("[data-rule]:not([data-rule=empty])")
            assert fits(page), name
            assert page.evaluate(FINDINGS) == [], name
            assert page.locator("h1").count() == 1
            if width < 500:
                small = page.evaluate("""[...document.querySelectorAll(".tabs a, main button:not(.link, .sort), main select")]
                    .filter(one => one.getBoundingClientRect().height < 43.5).map(one => one.outerHTML)""")
                assert small == [], name


@pytest.mark.parametrize("width", [1280, 390])
def test_whatever_a_peer_or_a_model_says_is_text_and_stays_inside(
    start: Callable[..., Server], console: Any, width: int
) -> None:
    server = start()
    server.call("flaky", HOSTILE)
    with server.clients() as clients, console(server, width=width) as page:
        clients.deaf("big?x=<img/src=x/onerror=alert(1)>" + "A" * 3000, "x")
        until(lambda: server.ask("GET", "/streams")[1]["live"] == 1, "one live stream")
        for screen in SCREENS.values():
            turn(page, screen)
            assert page.locator("img").count() == 0
            assert fits(page), screen
        turn(page, "#/incidents")
        page.wait_for_selector("pre")
        assert "<img src=x onerror=alert(1)>" in page.inner_text("pre")
        # names of models are of the operator, and the plane would not take these: the page takes whatever it is told
        page.evaluate(
            """async text => {
                const {state, changed} = await import("/console/state.mjs");
                state.paused = true;
                state.models = [{...state.models[0], name: text, reason: text, state: text}];
                state.stats.peers = [{address: text, streams: 1, room: 9, input: 0, slots: 1}];
                const row = (await (await fetch("streams")).json()).streams[0];
                Object.assign(state.streams, {rows: [{...row, model: text, path: text, peer: text}], live: 1, matched: 1});
                changed();
            }""",
            HOSTILE,
        )
        for screen in ("#/", "#/models", "#/streams"):
            turn(page, screen)
            assert "<img src=x" in page.inner_text("main")
            assert page.locator("img").count() == 0
            assert fits(page), screen


def test_the_search_finds_a_stream_by_the_id_that_its_client_has_given_it(
    start: Callable[..., Server], console: Any
) -> None:
    server = start()
    with server.clients() as clients:
        clients.deaf("big", "x", "X-Request-Id: 6b1f3d1e-MINE")
        clients.deaf("big", "x", "X-Request-Id: another")
        until(lambda: server.ask("GET", "/streams")[1]["live"] == 2, "two live streams")
        (mine,) = [row["id"] for row in server.ask("GET", "/streams")[1]["streams"] if row["client_request_id"] != "another"]
        with console(server, "#/streams") as page:
            page.fill("#search", "1e-mine")
            page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
            page.click(f"text={mine}")
            page.wait_for_selector("tr.more >> text=6b1f3d1e-MINE")


def test_before_the_first_call_it_says_how_to_make_one(start: Callable[..., Server], console: Any, axe: str) -> None:
    server = start()
    with console(server) as page:
        page.wait_for_selector("[data-rule=empty]")
        assert f"curl -N http://127.0.0.1:{server.port}/predictions/" in page.inner_text("pre")
        page.evaluate(axe)
        assert page.evaluate(FINDINGS) == []
        page.goto(server.url + "#/streams")
        page.wait_for_selector("text=No stream is live")
        page.goto(server.url + "#/incidents")
        page.wait_for_selector("h2:text-is('No incidents')")
