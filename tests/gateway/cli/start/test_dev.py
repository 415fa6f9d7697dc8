"""`everywire dev`: a change is served at the same port, one that cannot be is not, and what is watched is what is imported."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from gateway.cli.start import dev
from gateway.cli.start.dev import Files
from gateway.config.exposure import UNVERIFIED
from tests.gateway.cli.start.terminal import PATIENCE, Terminal, everywire

APP = """
from words import answer


async def shout(prompt: str) -> str:
    return answer(prompt)
"""
TWO = "\n\nasync def whisper(prompt: str) -> str:\n    return prompt.lower()\n"
WORDS = "def answer(text):\n    return text.{}()\n"


class Edited:
    """A folder that is served, and changed as an editor does."""

    def __init__(self, folder: Path, terminal: Terminal) -> None:
        self._folder, self._terminal = folder, terminal
        text = terminal.until("Ctrl-C stops.")
        self.url = re.search(r"everywire \S+ at (\S+)", text)[1]  # type: ignore[index]
        self.console = re.search(r"Console: (\S+)", text)[1]  # type: ignore[index]
        self._changes = self._failures = 0

    def served(self, file: str, text: str) -> None:
        """The change is made, and served."""
        self._write(file, text)
        self._changes += 1
        self._terminal.until("serving anew models=", times=self._changes)

    def refused(self, file: str, text: str) -> str:
        """The change is made, and is not served: why."""
        self._write(file, text)
        self._failures += 1
        before, _, _ = self._terminal.until("the old ones stay", times=self._failures).rpartition("the old ones stay")
        return self._terminal.until("\n", times=before.count("\n") + 1)[len(before) :].splitlines()[0]

    def _write(self, file: str, text: str) -> None:
        (self._folder / f"{file}.new").write_text(text)
        os.replace(self._folder / f"{file}.new", self._folder / file)

    def ask(self, model: str = "shout") -> str:
        request = urllib.request.Request(f"{self.url}/predictions/{model}", b'{"inputs": "Every Wire"}')
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return str(json.load(answer)["generated_text"])


@pytest.mark.programs
def test_each_change_is_served_at_the_same_port_unless_it_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "words.py").write_text(WORDS.format("upper"))
    with everywire(tmp_path, "dev", "app.py", "--port", "0") as (terminal, process):
        edited = Edited(tmp_path, terminal)
        assert "Not for production" in terminal.text
        assert edited.ask() == "EVERY WIRE"
        edited.served("words.py", WORDS.format("lower"))
        assert edited.ask() == "every wire"
        edited.served("words.py", WORDS.format("title"))
        assert edited.ask() == "Every Wire"
        assert "SyntaxError: invalid syntax (words.py, line 1)" in edited.refused("words.py", "def answer(text: return")
        assert edited.ask() == "Every Wire"
        assert "ZeroDivisionError: division by zero" in edited.refused("words.py", "1 / 0")
        assert edited.ask() == "Every Wire"
        edited.served("words.py", WORDS.format("swapcase"))
        edited.served("app.py", APP + TWO)
        assert [edited.ask(), edited.ask("whisper")] == ["eVERY wIRE", "every wire"]
        with urllib.request.urlopen(f"{edited.console}/models", timeout=PATIENCE) as models:
            assert [model["name"] for model in json.load(models)["models"]] == ["shout", "whisper"]
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


@pytest.mark.programs
def test_a_file_that_cannot_be_served_from_the_start_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("def shout(prompt: str -> str")
    for file, said in [("app.py", "app.py: cannot import 'app': SyntaxError: "), ("no.py", "no.py: no such file")]:
        command = [sys.executable, "-m", "gateway", "dev", file, "--port", "0"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"Error: {said}")
        assert UNVERIFIED not in done.stderr


# -- watched files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "app.py": "import json, helper\nfrom parts import inner\nfrom parts.deep.far import thing\nimport trio",
        "helper.py": "def f():\n    import late\n",
        "late.py": "import app",
        "parts/__init__.py": "",
        "parts/inner.py": "",
        "parts/deep/far.py": "",
        "other.py": "",
        "everywire.toml": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


WATCHED = {"app.py", "helper.py", "late.py", "parts/__init__.py", "parts/inner.py", "parts/deep/far.py", "everywire.toml"}


def names_of(files: Files) -> set[str]:
    return {files.name(path) for path in files.stamps()}


def test_a_file_is_watched_with_what_it_imports_from_its_folder(folder: Path) -> None:
    assert names_of(Files(folder / "app.py", folder, folder / "everywire.toml")) == WATCHED


def test_a_file_that_is_broken_or_gone_is_watched_on(folder: Path) -> None:
    files = Files(folder / "app.py", folder, folder / "everywire.toml")
    before = files.stamps()
    (folder / "helper.py").write_text("def (")
    (folder / "late.py").unlink()
    now = files.stamps()
    assert names_of(files) == WATCHED
    changed = {files.name(path) for path in now if now[path] != before[path]}
    assert changed == {"helper.py", "late.py"}
    assert now[folder / "late.py"] is None


def test_the_console_has_a_port_of_its_own_where_the_usual_one_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert dev._free(port) not in (0, port)


def test_elsewhere_than_on_linux_it_says_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(dev.ConfigError, match=r"needs Linux; elsewhere: everywire --model app\.py"):
        dev.run_dev(None, "app.py")  # type: ignore[arg-type]
