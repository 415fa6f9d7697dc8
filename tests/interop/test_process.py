"""The server's process and its signals."""

import json
import os
import pty
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.net.authority import Authority, Pair

PATIENCE = 120.0
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


def ended(process: "subprocess.Popen[str]") -> int:
    """Its exit status after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE)


def left(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


def shown(address: tuple[str, int], context: ssl.SSLContext) -> str:
    """The common name of the certificate that is served."""
    with socket.create_connection(address, PATIENCE) as sock, context.wrap_socket(sock, server_hostname="localhost") as tls:
        subject: Any = (tls.getpeercert() or {})["subject"]
        return str(dict(pair for (pair,) in subject)["commonName"])


def test_sighup_reloads_the_certificate_and_a_broken_one_is_told_in_the_log(tmp_path: Path) -> None:
    ca = Authority(tmp_path / "ca")
    served = Pair(tmp_path / "served.pem", tmp_path / "served-key.pem")
    ca.issue("first").put(served)
    files = ("--tls-cert", str(served.cert), "--tls-key", str(served.key), "--tls-port", "0")
    process = start(tmp_path, *files, "--set", "tls.reload_interval=0")
    try:
        address = "127.0.0.1", int(logged(process, "serving")["at"][-1].rpartition(":")[2])
        assert shown(address, ca.client()) == "first"
        ca.issue("second").put(served)
        process.send_signal(signal.SIGHUP)
        assert logged(process, "certificate loaded")["subject"] == "CN=second,O=Example"
        assert shown(address, ca.client()) == "second"
        served.key.write_bytes(b"")
        process.send_signal(signal.SIGHUP)
        told = logged(process, "the certificate cannot be reloaded: the previous one stays in use")
        assert told["level"] == "error"
        assert told["reason"] == f"tls.key: {served.key} holds no PEM private key"
        assert shown(address, ca.client()) == "second"
        assert ended(process) == 0
    finally:
        left(process)


def test_sighup_without_tls_ends_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        logged(process, "serving")
        process.send_signal(signal.SIGHUP)
        assert logged(process, "signal")["hint"] == "it reloads the certificate, and TLS is not served"
        assert ended(process) == 0
    finally:
        left(process)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_drains_the_server_unless_it_is_to_outlive_it(tmp_path: Path, ignored: bool) -> None:
    """`ignored` is what nohup does."""
    ours, theirs = pty.openpty()

    def attach() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(theirs), os.O_RDWR))  # the first terminal of a session is the one that controls it
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)  # this test run may have another

    command = [sys.executable, "-m", "gateway", "--port", "0", "--log-format", "json", "serve"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=theirs, stderr=subprocess.PIPE, text=True, preexec_fn=attach, pass_fds=(theirs,)
    )
    try:
        logged(process, "serving")
        os.close(theirs)
        os.close(ours)
        if ignored:
            process.send_signal(signal.SIGHUP)
            logged(process, "signal")
            assert ended(process) == 0
        else:
            logged(process, "the terminal is gone")
            assert process.wait(PATIENCE) == 0
    finally:
        left(process)
