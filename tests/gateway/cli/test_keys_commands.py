"""`everywire keys`: a key is printed once, its line is the file's, and a file is judged line by line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.main import program
from gateway.keys import read_keys

KEY = "ew_" + "k" * 43


def run(*arguments: str, said: str | bytes = "") -> Result:
    return CliRunner().invoke(program, ["keys", *arguments], input=said)


def test_a_new_key_is_on_standard_output_and_its_line_on_standard_error() -> None:
    result = run("new", "alice", "models=chat,embed-*", "rate=20")
    assert result.exit_code == 0
    key, line = result.stdout.removesuffix("\n"), result.stderr
    assert key not in line
    (found,) = read_keys(line.encode())
    assert (found.name, found.models, found.rate) == ("alice", ("chat", "embed-*"), 20)
    assert read_keys(line.encode()).find(key.encode(), 0) == found


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_line_of_a_key_that_somebody_has(end: str) -> None:
    result = run("digest", "ops", "scope=control", said=f"{KEY}{end}")
    assert result.exit_code == 0
    assert KEY not in result.output
    assert read_keys(result.stdout.encode()).find(KEY.encode(), 0) is not None


@pytest.mark.parametrize(
    ("arguments", "said", "why"),
    [
        (("new", "a b"), "", "the name must be"),
        (("new", "alice", "rate=x"), "", "rate must be a number above 0"),
        (("digest", "alice"), "short", "a key is ew_ and 43 characters"),
        (("digest", "alice"), f"{KEY}\n{KEY}", "a key is ew_ and 43 characters"),
    ],
)
def test_what_can_be_no_key_is_one_line_and_the_status_2(arguments: tuple[str, ...], said: str, why: str) -> None:
    result = run(*arguments, said=said)
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr
    assert KEY not in result.stderr


def test_a_file_is_judged_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(run("new", "alice").stderr + run("new", "alice").stderr + run("new", "bob").stderr)
    os.chmod(file, 0o600)
    result = run("check", str(file))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "3 keys of 2 names\n", "")
    os.chmod(file, 0o640)
    assert "its mode lets others read it" in run("check", str(file)).stderr
    with file.open("a") as more:
        more.write(f"carol {KEY}\ndave\n")
    result = run("check", str(file))
    assert (result.exit_code, result.stdout) == (1, "")
    assert [line.partition(": ")[2][:7] for line in result.stderr.splitlines()] == ["line 4:", "line 5:"]
    assert KEY not in result.stderr


def test_a_configuration_with_a_wrong_file_is_found_before_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "keys"
    file.write_text("alice\n")
    result = CliRunner().invoke(program, ["config", "check", "--set", f"access.keys_file={file}"])
    assert result.exit_code != 0
    assert "access.keys_file" in result.output
    assert "line 1: the digest" in result.output
