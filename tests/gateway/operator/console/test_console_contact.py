"""How the console keeps contact with its server: stale, lost and live again, hidden, locked, and one reader too many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.gateway.operator.console.served import FINDINGS, Server, until

TOKEN = "correct-horse-battery"


def test_a_server_that_is_gone_is_missed_and_found_again(start: Callable[..., Server], console: Any, axe: str) -> None:
    server = start()
    server.call("chat", "3 0")
    with console(server, scheme="dark") as page:
        page.evaluate(axe)
        page.evaluate("window.same = true")
        server.stop()
        page.wait_for_selector("[data-phase=stale]")
        assert page.locator("main.dim").count() == 0
        page.wait_for_selector("[data-phase=lost]")
        told = page.inner_text("[role=alert]")
        assert "No contact with the server for" in told
        assert "What you see is from" in told
        assert page.locator("main.dim [data-figure=Requests]").count() == 1
        page.evaluate("Promise.all(document.getAnimations().map(one => one.finished))")
        assert page.evaluate(FINDINGS) == []
        server.start()
        # The page may have found the server by itself by now, and then it has no such button.
        page.evaluate("[...document.querySelectorAll('button')].find(one => one.textContent === 'Try now')?.click()")
        page.wait_for_selector("[data-phase=live]")
        page.wait_for_selector("[data-rule=empty]")  # another server, which nobody has called
        assert page.evaluate("window.same") is True
        server.call("chat", "3 0")
        page.wait_for_function("() => document.querySelector('main').innerText.includes('1 since start')")


def test_a_hidden_tab_reads_nothing(start: Callable[..., Server], console: Any) -> None:
    server = start()
    hide = """hidden => { Object.defineProperty(document, "hidden", {get: () => hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange")); }"""
    with console(server) as page, server.clients() as clients:
        for _ in range(7):
            clients.event_reader()
        assert server.ask("GET", "/streams/events")[0] == 503
        asked = list[str]()
        page.on("request", lambda request: asked.extend([request.url] if request.url.endswith("/events") else []))
        page.evaluate(hide, True)
        with server.clients() as others:  # its place is free
            until(lambda: _reads(others), "a place for another reader")
            seen = server.ask("GET", "/stats")[1]["uptime"]
            until(lambda: server.ask("GET", "/stats")[1]["uptime"] > seen + 3, "three seconds of the server")
        page.evaluate("0")  # events of requests come before this answer
        assert asked == []
        with page.expect_request("**/streams/events"):
            page.evaluate(hide, False)
        page.wait_for_selector("[data-phase=live]")


def _reads(clients: Any) -> bool:
    try:
        clients.event_reader()
    except AssertionError:
        return False
    return True


def test_with_eight_readers_it_asks_instead(start: Callable[..., Server], console: Any) -> None:
    server = start()
    server.call("chat", "3 0")
    with server.clients() as clients:
        for _ in range(8):
            clients.event_reader()
        with console(server, expect="polling") as page:
            assert "8 read the event stream already" in page.inner_text("main")
            page.wait_for_function("() => document.querySelector('main').innerText.includes('1 since start')")
            server.call("chat", "3 0")
            page.wait_for_function("() => document.querySelector('main').innerText.includes('2 since start')")
            page.goto(server.url + "#/streams")
            page.wait_for_selector("text=No stream is live")


def test_a_token_is_asked_for_and_kept_for_the_tab(start: Callable[..., Server], console: Any, axe: str) -> None:
    server = start(f"operator.token={TOKEN}")
    with console(server, width=390, expect="locked") as page:
        page.evaluate(axe)
        found = page.evaluate(
            "async () => (await axe.run(document, {resultTypes: ['violations']})).violations.map(one => one.id)"
        )
        assert found == []
        assert page.locator("text=does not know this token").count() == 0
        page.fill("#token", "a wrong token of ours")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=The server does not know this token.")
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector("[data-phase=live]")
        page.reload()
        page.wait_for_selector("[data-phase=live]")
        assert TOKEN not in page.content()
