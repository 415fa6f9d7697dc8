"""The server's process and its signals."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PATIENCE = 30.0
UPGRADE = (
    b"GET /invocations-bidirectional-stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def start(folder: Path, *flags: str, model: str = "echo=models.library.echo:Echo") -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "gateway", "--port", "0", "--model", model, *flags, "serve"]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)


def logged(process: "subprocess.Popen[str]", event: str) -> dict[str, Any]:
    """The next record of that event."""
    assert process.stderr is not None
    for line in process.stderr:
        record: dict[str, Any] = json.loads(line)
        if record["event"] == event:
            return record
    raise AssertionError(f"no {event!r} in the log")


def hurried(process: "subprocess.Popen[str]") -> int:
    """Its exit status, with SIGTERM after SIGTERM until it is gone."""
    for _ in range(5000):
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(0.002)
        except subprocess.TimeoutExpired:
            continue
        assert process.stderr is not None
        process.stderr.close()
        return status
    process.kill()
    raise AssertionError("it does not end")


def test_signals_that_come_again_and_again_do_not_make_a_killed_end_of_a_clean_one(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if '"serving"' in line:
            break
    assert hurried(process) == 0


def test_the_exit_code_and_the_report_say_whether_a_stream_was_cut(tmp_path: Path) -> None:
    process = start(tmp_path, "--set", "drain.timeout=0", "--set", "drain.report=report.json")
    try:
        where = logged(process, "serving")["at"][0].rpartition(":")
        with socket.create_connection(("127.0.0.1", int(where[2])), PATIENCE) as client:
            client.sendall(UPGRADE)
            assert client.recv(4096).startswith(b"HTTP/1.1 101 ")
            process.send_signal(signal.SIGTERM)
            told = logged(process, "drain report")
            assert process.wait(PATIENCE) == 3
        (row,) = told["cut"]
        assert (row["wire"], row["model"], row["ending"]) == ("websocket", "echo", "drained")
        written = (tmp_path / "report.json").read_text()
        assert written.endswith("}\n")
        assert {key: told[key] for key in json.loads(written)} == json.loads(written)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_a_model_that_nothing_goes_on_without_ends_the_process_with_1(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from contextlib import asynccontextmanager\n\n\n"
        "@asynccontextmanager\nasync def load():\n    raise OSError('no weights')\n    yield\n"
    )
    (tmp_path / "everywire.toml").write_text(
        '[models.broken]\nfactory = "broken:spec"\n[models.broken.restart]\nintensity = 0\nescalate = true\n'
    )
    with (tmp_path / "broken.py").open("a") as file:
        file.write(
            "\n\nfrom models.messages import Family\nfrom models.spec import ModelSpec\n"
            "spec = ModelSpec(name='broken', family=Family.PARTS, load=load)\n"
        )
    process = start(tmp_path, "--config", "everywire.toml")
    try:
        assert logged(process, "a model was given up: draining")["setting"] == "models.broken.restart.escalate"
        assert "OSError: no weights" in logged(process, "cannot serve")["reason"]
        assert process.wait(PATIENCE) == 1
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
