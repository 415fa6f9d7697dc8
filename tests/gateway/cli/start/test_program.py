"""`gateway.run`: three lines serve a model, Ctrl-C drains and ends them, and the exit status says how."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gateway
from gateway.cli.start import program
from gateway.config import Config, DrainConfig, ListenConfig

PATIENCE = 60.0
APP = """
import trio

async def shout(prompt: str) -> str:
    return prompt.upper()

async def slow(prompt: str):
    yield "begun "
    await trio.sleep_forever()
"""
EMBED = "import gateway\nfrom app import shout\ngateway.run(models=[shout], port=0)\nprint('the end')\n"
CUT = """
import gateway
from app import slow
from gateway import Config, DrainConfig
gateway.run([slow], port=0, config=Config(drain=DrainConfig(timeout=0)))
"""


@contextmanager
def running(folder: Path, code: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The program, and where it serves."""
    (folder / "app.py").write_text(APP)
    (folder / "embed.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, "embed.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        yield process, next(said["at"][0] for line in process.stderr if (said := json.loads(line))["event"] == "serving")
    finally:
        process.kill()
        process.communicate()


def asked(url: str, **body: Any) -> Any:
    data = json.dumps({"inputs": "hello", **body}).encode()
    return urllib.request.urlopen(urllib.request.Request(f"{url}/invocations", data), timeout=PATIENCE)


@pytest.mark.programs
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_the_program_goes_on_to_its_end(number: signal.Signals, tmp_path: Path) -> None:
    with running(tmp_path, EMBED) as (process, url):
        with asked(url) as answer:
            assert json.load(answer) == {"generated_text": "HELLO"}
        process.send_signal(number)
        said, log = process.communicate(timeout=PATIENCE)
        assert (process.returncode, said) == (0, "the end\n")
        assert "Traceback" not in log


@pytest.mark.programs
def test_a_stream_that_was_cut_is_the_status(tmp_path: Path) -> None:
    with running(tmp_path, CUT) as (process, url), asked(url, stream=True) as answer:
        assert b"begun" in answer.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 3


@pytest.mark.programs
def test_a_port_that_is_taken_is_the_status(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (tmp_path / "embed.py").write_text(EMBED.replace("port=0", f"port={taken.getsockname()[1]}"))
        done = subprocess.run([sys.executable, "embed.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Address already in use" in done.stderr


def test_the_port_comes_before_the_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[Config, list[Any]]] = []
    monkeypatch.setattr(program, "serve", lambda config, models, **_: served.append((config, models)))
    config = Config(listen=ListenConfig(port=1, host="::1"), drain=DrainConfig(timeout=9))
    gateway.run(models=(APP,), port=2, config=config)
    gateway.run(config=config)
    (first, models), (second, none) = served
    assert (first.listen, first.drain, models) == (ListenConfig(port=2, host="::1"), config.drain, [APP])
    assert (second, none) == (config, [])
