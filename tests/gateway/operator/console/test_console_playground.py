"""The playground in a browser: text token by token, Stop, a form of tensors, audio of a file and a microphone."""

from __future__ import annotations

import json
import math
import os
import shlex
import struct
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.operator.console.served import FINDINGS, ROOT, Server, until
from tests.gateway.operator.console.test_console_screens import fits

LIBRARY = (
    "models.add_sub.factory=models.library.tensors:add_sub",
    "models.speech.factory=models.library.speech:SpeechSegmenter",
    "models.deaf.factory=console_app:deaf",
)
TOKEN = "correct-horse-battery"
RUN, STOP = "button:has-text('Run')", "button:text-is('Stop')"


def figure(page: Any, name: str) -> str:
    return str(page.inner_text(f"[data-play={name}]"))


def answer(page: Any) -> str:
    return str(page.inner_text(".answer"))


def comes(page: Any, text: str) -> None:
    page.wait_for_function("text => document.querySelector('.answer')?.textContent.includes(text)", arg=text)


def prompted(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.click(RUN)


def events(server: Server, model: str) -> list[str]:
    """The endings of a model's exchanges, by the log."""
    lines = [json.loads(line) for line in server.log.splitlines()]
    return [line["ending"] for line in lines if line.get("model") == model and "ending" in line]


def test_text_streams_token_by_token_with_the_parts_of_its_call(start: Callable[..., Server], console: Any) -> None:
    server = start()
    with console(server, "#/playground/chat") as page:
        prompted(page, "6 0.4")
        comes(page, "1 ")
        assert "5 " not in answer(page)
        assert page.is_disabled(RUN)
        comes(page, "5 ")
        page.wait_for_selector("[data-play=ending]:text-is('complete')")
        assert answer(page).split() == ["0", "1", "2", "3", "4", "5"]
        assert figure(page, "items").startswith("6")
        assert 1 < float(figure(page, "rate")) < 4
        assert "model" in page.inner_text("section[aria-label=Answer] .legend")
        assert events(server, "chat") == ["complete"]
        page.focus("#prompt")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("section[aria-label=Answer] small:has-text('complete')")
        until(lambda: events(server, "chat") == ["complete"] * 2, "a second call, by the keyboard")


def test_stop_cancels_the_model(start: Callable[..., Server], console: Any) -> None:
    server = start()
    with console(server, "#/playground/chat") as page:
        prompted(page, "64 0.2")
        comes(page, "1 ")
        page.click(STOP)
        page.wait_for_selector("[data-play=ending]:text-is('cancelled-by-client')")
        until(lambda: events(server, "chat") == ["cancelled-by-client"], "the ending in the log")
        assert page.is_enabled(RUN)


def test_what_the_model_raises_and_the_server_refuses_is_said(start: Callable[..., Server], console: Any) -> None:
    server = start()
    with console(server, "#/playground/flaky") as page:
        prompted(page, "no more weights")
        assert "incident" in page.inner_text("section[aria-label=Answer] .refused")
        page.select_option("#playing", "chat")
        page.fill("input[placeholder=greedy]", "-0")
        page.fill("input[max='262144']", "65536")
        server.ask("POST", "/models/chat/unload")
        page.wait_for_selector("text=There is no model")


def test_the_same_call_is_one_that_works(start: Callable[..., Server], console: Any, tmp_path: Path) -> None:
    server = start(*LIBRARY)
    with console(server, "#/playground/chat") as page:
        page.fill("#prompt", "3 0.01")
        page.wait_for_selector(f".example:has-text('127.0.0.1:{server.port}')")
        for name in ("curl", "Python", "everywire call"):
            page.click(f".tab:text-is('{name}')")
            page.wait_for_selector(f".example[aria-label$='{name}']")
            text = page.inner_text(".example")
            if name == "Python":
                command = [sys.executable, "-c", text]
            else:
                command = ["sh", "-c", text.replace("everywire call", f"{shlex.quote(sys.executable)} -m gateway call")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
            assert "1 " in done.stdout, (name, done)
        page.click(".tab:text-is('openai')")
        page.wait_for_selector(".example[aria-label$=openai]")
        compile(page.inner_text(".example"), "openai", "exec")


def test_tensors_are_checked_before_they_are_sent(start: Callable[..., Server], console: Any) -> None:
    server = start(*LIBRARY, "models.pairs.factory=console_app:pairs")
    with console(server, "#/playground/pairs") as page:
        wrong = {
            "[1, 2]": "expected shape [-1, 2], got [2]",
            "[[1, 2, 3]]": "expected shape [-1, 2], got [1, 3]",
            "[[1, 2], [3]]": "one length",
            '[["a", "b"]]': "expected numbers",
            "[[1.5, 2]]": "whole numbers from -128 to 127 (INT8), got 1.5",
            "[[1, 200]]": "got 200",
            "nothing": "rows in JSON",
        }
        for rows, said in wrong.items():
            page.fill("#rows-rows", rows)
            page.wait_for_selector(f".refused:has-text('{said}')")
            assert page.is_disabled(RUN)
            page.focus("#rows-rows")
            page.keyboard.press("Control+Enter")
        page.fill("#rows-rows", "[[1, 2], [-3, 4], [5, 6]]")
        page.click(RUN)
        comes(page, "rows INT8 [3, 2]\n[[1,2],[-3,4],[5,6]]")
        until(
            lambda: events(server, "pairs").count("complete") == 2,
            "the metadata and one call, and nothing of what was wrong",
        )
        assert len(events(server, "pairs")) == 2


def test_the_librarys_tensor_model_is_called_by_a_file_and_rows(
    start: Callable[..., Server], console: Any, tmp_path: Path
) -> None:
    server = start(*LIBRARY)
    with console(server, "#/playground/add_sub") as page:
        file = tmp_path / "rows.json"
        file.write_text("[[5, 6]]")
        page.set_input_files("input[type=file] >> nth=0", file)
        page.fill("#rows-INPUT1", "[[1, 2]]")
        page.select_option("select[aria-label='Datatype of INPUT0']", "INT64")
        page.click(RUN)
        page.wait_for_selector("section[aria-label=Answer] .refused:has-text('INPUT')")
        page.select_option("select[aria-label='Datatype of INPUT1']", "INT64")
        page.click(RUN)
        comes(page, "OUTPUT0 INT64 [1, 2]\n[[6,8]]")
        assert "OUTPUT1 INT64 [1, 2]\n[[4,4]]" in answer(page)


def recorded(path: Path, seconds: float, rate: int = 16_000) -> Path:
    """A WAV file with a second of speech, as the library's model sees it, in the middle of silence."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        for n in range(int(seconds * rate)):
            loud = 1 <= n / rate < 2 and (n // (rate // 10)) % 3
            file.writeframesraw(struct.pack("<h", int(9000 * math.sin(n / 5) * (1 + (n // 800) % 3)) if loud else n % 3))
    return path


def test_a_wav_file_reaches_the_model_and_its_answer_comes_to_the_end(
    start: Callable[..., Server], console: Any, tmp_path: Path
) -> None:
    server = start(*LIBRARY, f"operator.token={TOKEN}")
    with console(server, "#/playground/speech", expect="locked") as page:
        page.fill("#token", TOKEN)
        page.keyboard.press("Enter")
        page.set_input_files("#wav", recorded(tmp_path / "speech.wav", 3))
        page.click("button:has-text('Send the file')")
        comes(page, '"audio_seconds":3.0')
        page.wait_for_selector("section[aria-label=Answer] small:has-text('complete')")
        assert '"segments"' in answer(page)
        page.wait_for_selector("[data-play=ending]:text-is('complete')")
        until(lambda: events(server, "speech") == ["complete"], "its ending")
        page.set_input_files("#wav", recorded(tmp_path / "other.wav", 1, rate=8000))
        page.click("button:has-text('Send the file')")
        assert "16000" in page.inner_text("section[aria-label=Answer] .refused")
    assert TOKEN not in server.log


def test_a_microphone_reaches_the_model(start: Callable[..., Server], console: Any) -> None:
    server = start(*LIBRARY)
    with console(server, "#/playground/speech") as page:
        page.click("#microphone:has-text('Speak')")
        page.wait_for_selector(".fact:has-text('Sent'):has-text('KiB')")
        page.click("#microphone:has-text('End of speech')")
        comes(page, '"event":"end"')
        seconds = json.loads(answer(page).strip().splitlines()[-1])["audio_seconds"]
        assert seconds >= 0.1  # one frame at least
        until(lambda: events(server, "speech") == ["complete"], "its ending")


def test_a_model_that_does_not_take_the_audio_stops_the_page(
    start: Callable[..., Server], console: Any, tmp_path: Path
) -> None:
    server = start(*LIBRARY)
    file = tmp_path / "long.wav"
    file.write_bytes(os.urandom(32 * 1024 * 1024))  # which no compression makes small
    with console(server, "#/playground/deaf") as page:
        page.set_input_files("#wav", file)
        page.click("button:has-text('Send the file')")
        page.wait_for_function(
            "() => /Held by the browser: (6[4-9]|[7-9][0-9])/.test(document.querySelector('main').innerText)"
        )

        def waits() -> bool:
            """True if nothing more was sent while the page was drawn some dozen times."""
            sent = page.inner_text(".fact:has-text('Sent')")
            page.wait_for_timeout(300)
            return bool(page.inner_text(".fact:has-text('Sent')") == sent)

        until(waits, "a page that waits")
        assert "MiB" in page.inner_text(".fact:has-text('Not sent yet')")
        page.click(STOP)
        page.wait_for_selector("section[aria-label=Answer] small:has-text('stopped')")
        until(lambda: server.ask("GET", "/streams")[1]["live"] == 0, "a model that is free again")


def test_without_https_or_localhost_a_wav_file_is_offered_alone(start: Callable[..., Server], console: Any) -> None:
    server = start(*LIBRARY)
    with console(server) as page:
        page.evaluate("Object.defineProperty(window, 'isSecureContext', {value: false})")
        page.evaluate("location.hash = '#/playground/speech'")
        assert "HTTPS or localhost" in page.inner_text("[data-play=no-microphone]")
        assert page.locator("#microphone").count() == 0
        assert page.locator("#wav").count() == 1


def test_with_several_fronts_it_says_that_it_is_off(start: Callable[..., Server], console: Any) -> None:
    server = start("listen.processes=2")
    with console(server, "#/playground") as page:
        page.wait_for_selector("h2:text-is('No playground')")
        assert "listen.processes" in page.inner_text("main")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_and_fits(start: Callable[..., Server], console: Any, axe: str, scheme: str, width: int) -> None:
    server = start(*LIBRARY)
    with console(server, "#/playground/chat", width=width, scheme=scheme) as page:
        page.evaluate(axe)
        prompted(page, "3 0.01")
        page.wait_for_selector("[data-play=ending]")
        for name, ready in (("chat", ".example"), ("add_sub", "#rows-INPUT0"), ("speech", "#microphone")):
            page.evaluate("at => { location.hash = at; }", f"#/playground/{name}")
            page.wait_for_selector(ready)
            page.wait_for_function("() => getComputedStyle(document.querySelector('.note')).flexGrow === '1'")
            assert fits(page), name
            assert page.evaluate(FINDINGS) == [], name
            if width < 500:
                small = page.evaluate("""[...document.querySelectorAll("main button, main select, main textarea")]
                    .filter(one => one.getBoundingClientRect().height < 43.5).map(one => one.outerHTML)""")
                assert small == [], name
