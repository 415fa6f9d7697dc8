"""Actions on the console: with the keyboard alone, never by Enter alone, and each has a line in the log of the server."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from tests.gateway.operator.console.served import Server, until


def focused(page: Any) -> str:
    return str(page.evaluate("document.activeElement.textContent"))


def press(page: Any, selector: str) -> None:
    """Enter on a control, as somebody does who has come to it by Tab."""
    page.focus(selector)
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")


def refrains(page: Any, selector: str) -> None:
    """Neither Enter at once nor Escape does anything, and the focus is where it was."""
    opener = page.text_content(selector)
    for key in ("Enter", "Escape"):
        press(page, selector)
        assert focused(page) == "Cancel"
        page.keyboard.press(key)
        page.wait_for_selector("dialog", state="detached")
        assert focused(page) == opener


def confirms(page: Any, selector: str) -> None:
    press(page, selector)
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.wait_for_selector("dialog", state="detached")


def logged(server: Server, action: str) -> Callable[[], bool]:
    return lambda: any('"operator request"' in line and f'"{action}"' in line for line in server.log.splitlines())


def test_a_model_is_reloaded_unloaded_and_loaded_again(start: Callable[..., Server], console: Any) -> None:
    server = start()
    with console(server, "#/models/chat") as page:
        reload, unload = "button:text-is('Reload…')", "button:text-is('Unload…')"
        page.wait_for_selector(reload)
        refrains(page, reload)
        assert not logged(server, "reload")()
        confirms(page, reload)
        until(logged(server, "reload"), "a line of the reload")
        press(page, unload)
        assert "0 sessions run and 0\u00a0requests wait" in page.inner_text("dialog")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")
        refrains(page, unload)
        confirms(page, unload)
        until(logged(server, "unload"), "a line of the unload")
        page.wait_for_selector("main .big .badge:has-text('unloaded')")
        confirms(page, "button:text-is('Load…')")
        until(logged(server, "load"), "a line of the load")
        page.wait_for_selector(reload)


def test_what_the_plane_refuses_is_said_beside_the_button(start: Callable[..., Server], console: Any) -> None:
    server = start()
    with console(server, "#/models/chat") as page:
        press(page, "button:text-is('Reload…')")
        server.ask("POST", "/models/chat/unload")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        refused = page.wait_for_selector("dialog .refused")
        assert "chat" in refused.inner_text()
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")


def test_a_stream_is_ended_and_its_client_is_told(start: Callable[..., Server], console: Any) -> None:
    server = start()
    with server.clients() as clients, console(server, "#/streams") as page:
        clients.reader("chat", "60000 0.5")
        end = "button[aria-label^='End stream']"
        page.wait_for_selector(end)
        refrains(page, end)
        confirms(page, end)
        until(logged(server, "end"), "a line of the end")
        page.wait_for_selector("text=No stream is live")
        until(lambda: "ended-by-operator" in server.log, "an access line with the ending")


def test_streams_are_chosen_by_the_address(start: Callable[..., Server], console: Any) -> None:
    server = start()
    with server.clients() as clients, console(server, "#/streams?model=slow") as page:
        clients.reader("chat", "60000 0.5")
        for _ in range(3):
            clients.reader("slow", "60000 0.5")
        page.wait_for_selector("tbody tr >> nth=2")
        assert page.locator("tbody tr").count() == 3
        page.select_option("label:has-text('Waits for') select", "slot")
        page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
        assert "waits_for=slot" in page.url
        page.fill("#search", "nothing like it")
        page.wait_for_selector("text=No live stream is like that")
        page.goto(server.url + "#/streams?sort=age&peer=127.0.0.1")
        page.wait_for_selector("th[aria-sort=descending]:has-text('Age')")
        page.wait_for_selector("tbody tr >> nth=3")


def test_a_drain_is_confirmed_with_a_word_and_its_report_stays(start: Callable[..., Server], console: Any) -> None:
    server = start("drain.timeout=3")
    with server.clients() as clients, console(server, "#/drain", expect="live") as page:
        clients.reader("chat", "60000 0.5")
        begin = "button:text-is('Drain…')"
        press(page, begin)
        assert page.evaluate("document.activeElement.id") == "word"
        page.keyboard.press("Enter")
        page.keyboard.type("drai")
        page.keyboard.press("Enter")
        assert page.locator("dialog[open] button.danger:disabled").count() == 1
        assert not logged(server, "drain")()
        page.keyboard.type("n")
        page.wait_for_selector("dialog[open] button.danger:not(:disabled)")
        page.keyboard.press("Enter")
        assert not logged(server, "drain")()
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        page.wait_for_selector("text=Draining: 1 of 1")
        until(logged(server, "drain"), "a line of the drain")
        page.goto(server.url + "#/")
        page.wait_for_selector("[data-rule=draining]")
        page.wait_for_selector("[data-phase=drained]")
        until(server.ended, "the server's end")
        page.evaluate("location.hash = '#/drain'")
        page.wait_for_selector("h2:has-text('Drained')")
        assert "Cut: 1" in page.inner_text("main").replace("\u00a0", " ")


def test_keys_turn_pages_and_none_does_while_somebody_types(start: Callable[..., Server], console: Any) -> None:
    server = start()
    with console(server) as page:
        for key, name in ("2", "Models"), ("3", "Streams"), ("4", "Incidents"), ("1", "Overview"):
            page.keyboard.press(key)
            page.wait_for_selector(f"h1:text-is('{name}')", state="attached")
        page.keyboard.press("/")
        page.wait_for_selector("#search:focus")
        page.keyboard.type("p2?")
        assert page.input_value("#search") == "p2?"
        assert page.get_attribute("[data-phase]", "data-phase") == "live"
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("p")
        page.wait_for_selector("[data-phase=paused]")
        page.keyboard.press("p")
        page.wait_for_selector("[data-phase=live]")
        page.keyboard.press("?")
        page.wait_for_selector("dialog[open]:has-text('Keys')")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog", state="detached")


def test_the_servers_end_by_a_signal_is_told_too(start: Callable[..., Server], console: Any) -> None:
    server = start()
    with console(server) as page:
        server.stop(signal.SIGTERM)
        page.wait_for_selector("[data-phase=drained]")
        assert "has drained and ended" in page.inner_text("main")
