"""The server's process and its signals."""

import signal
import subprocess
import sys
from pathlib import Path


def start(folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "gateway", "--port", "0", "--model", "echo=models.library.echo:Echo", "serve"]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)


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
