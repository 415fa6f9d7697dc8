"""`everywire new`: each kind of folder has tests that pass and a model that serves; what is there already is left alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import program
from gateway.cli.start.new import KINDS
from tests.gateway.cli.start.terminal import PATIENCE

CALLS = {
    "text": (["shout", "hello wire"], "HELLO WIRE"),
    "chat": (["chat", "hello", "--wire", "openai"], "You said 'hello'"),
    "tensor": (["norms", "--tensor", "points=points.npy"], "OUTPUT0"),
    "audio": (["loudness", "--file", "app.py", "--wire", "bidi"], '"level"'),
    "rolling": (["spell", "hello"], "hello"),
}
POINTS = "import numpy; numpy.save('points.npy', numpy.ones((2, 3), numpy.float32))"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(program, ["new", *arguments])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_it_makes_three_short_files_and_says_what_is_next(kind: str, tmp_path: Path) -> None:
    result = run("mine", "--kind", kind)
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "Made app.py, test_app.py and everywire.toml in mine. Next, in that folder:",
        "",
        "  everywire dev app.py",
        "  python -m pytest        # pip install pytest, if it is missing",
    ]
    made = {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()}
    assert sorted(made) == ["app.py", "everywire.toml", "test_app.py"]
    assert {name: len(text.splitlines()) for name, text in made.items() if len(text.splitlines()) >= 30} == {}
    (name,) = tomllib.loads(made["everywire.toml"])["models"]
    assert f"def {name}(" in made["app.py"] or f"\n{name} = " in made["app.py"]


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "app.py").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        result = run(name)
        assert (result.exit_code, result.output) == (2, f"Error: {name} is not an empty folder: choose another name\n")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["app.py"]
    (tmp_path / "empty").mkdir()
    assert run("empty").exit_code == run("deep/er").exit_code == 0


def test_a_name_that_cannot_be_is_one_line() -> None:
    assert run("models").output == "Error: models is the name of a package of everywire's: choose another\n"
    assert run("x" * 300).output.endswith("cannot be made: File name too long\n")
    assert "new takes only its own options" in CliRunner().invoke(program, ["--port", "1", "new", "x"]).output


@pytest.mark.programs
@pytest.mark.parametrize("kind", KINDS)
def test_its_tests_pass_and_it_serves(kind: str, tmp_path: Path) -> None:
    run("mine", "--kind", kind)
    folder = tmp_path / "mine"
    environ = {**os.environ, "PYTEST_PLUGINS": "gateway.testing.pytest_plugin", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:trio"], cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert "2 passed" in tested.stdout, tested.stdout + tested.stderr
    command = [sys.executable, "-m", "gateway", "--config", "everywire.toml", "--port", "0", "--set", "operator.port=-1"]
    server = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(said["at"][0] for line in server.stderr if (said := json.loads(line))["event"] == "serving")
        subprocess.run([sys.executable, "-c", POINTS], cwd=folder, check=True)
        arguments, said = CALLS[kind]
        call = [sys.executable, "-m", "gateway", "call", "--url", url, *arguments]
        answer = subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
        assert (answer.returncode, said in answer.stdout) == (0, True), answer
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
    finally:
        server.kill()
        server.communicate()
