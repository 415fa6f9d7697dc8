"""The pictures of the console that the documentation shows: drawn with `--pictures docs/pictures`, and small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.operator.console.served import ROOT, Server, until

FOLDER = ROOT / "docs" / "pictures"
MOST = 420_000  # bytes of all of them
PICTURES = {
    "console-overview": ("#/", 1280, 780, "light"),
    "console-phone": ("#/", 390, 844, "dark"),
    "console-streams": ("#/streams", 1280, 560, "dark"),
    "console-playground": ("#/playground/lm", 1280, 680, "light"),
}
"""Each its screen, width, height and colours. None shows a path of the machine."""
SECONDS = 70  # a load of so many seconds comes before them


def test_the_pictures_are_drawn(start: Callable[..., Server], console: Any, request: pytest.FixtureRequest) -> None:
    folder: Path | None = request.config.getoption("--pictures", None)
    if folder is None:
        pytest.skip("--pictures names no folder")
    folder.mkdir(parents=True, exist_ok=True)
    server = start("limits.write_stall=0", "models.lm.factory=models.library.lm:LanguageModel.load")
    with server.clients() as clients:
        for _ in range(14):
            clients.deaf("big", "x")
        for _ in range(4):
            clients.reader("slow", "60000 0.1")
        for _ in range(9):
            clients.reader("chat", "60000 0.05")

        def late() -> bool:
            server.call("chat", "40 0.01")
            server.call("flaky", "CUDA error: an illegal memory access was encountered")
            return bool(server.ask("GET", "/stats")[1]["uptime"] > SECONDS)

        until(late, "a minute of load", within=3 * SECONDS)
        for name, (screen, width, height, scheme) in PICTURES.items():
            with console(server, screen, width=width, scheme=scheme) as page:
                if "playground" in screen:
                    page.fill("input[max='262144']", "60")
                    page.fill("input[placeholder=greedy]", "0.8")
                    page.click("button:has-text('Run')")
                    page.wait_for_selector("[data-play=ending]")
                else:
                    page.wait_for_selector("tbody tr")
                if "streams" in screen:
                    page.click("tbody tr:has-text('room') >> nth=0 >> button[aria-expanded]")
                    page.wait_for_selector(".more svg")
                page.wait_for_selector("[data-rule=readers], h1:not(:text-is('Overview'))", state="attached")
                page.screenshot(path=folder / f"{name}.png", clip={"x": 0, "y": 0, "width": width, "height": height})


def test_the_pictures_are_there_and_small() -> None:
    assert {path.stem for path in FOLDER.glob("console-*.png")} == PICTURES.keys()
    assert sum(path.stat().st_size for path in FOLDER.glob("console-*.png")) <= MOST
