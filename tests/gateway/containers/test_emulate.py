"""`everywire emulate sagemaker` up to where it serves: its settings, its errors, and what it tells."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from gateway.cli.main import program
from gateway.config.load import PREFIX, resolve
from gateway.config.problem import ConfigError
from gateway.containers.connection import ContainerLimits
from gateway.containers.emulate import CLEAR_PORT, Emulation

ROOT = Path(__file__).resolve().parents[3]
URL = "ws://127.0.0.1:8080"


class Ports(NamedTuple):
    port: int
    tls_port: int
    addresses: tuple[str, ...] = ()


def emulation(
    container: str = URL, endpoint: str = "chat", *, set: Mapping[str, Any] | None = None, **how: Any
) -> Emulation:
    resolved = resolve(file=None, environ={}, overrides=set or {})
    return Emulation(resolved, container, endpoint, limits=ContainerLimits(), **how)


@pytest.fixture(autouse=True)
def _nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith((PREFIX, "SAGEMAKER_"))]:
        monkeypatch.delenv(name)


def failure(*arguments: str) -> str:
    result = CliRunner().invoke(program, ["emulate", "sagemaker", *arguments])
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    return line.removeprefix("Error: ")


def test_unless_told_otherwise_it_leaves_the_containers_port_and_speaks_tls() -> None:
    config = emulation().config
    assert (config.listen.port, config.tls.dev) == (CLEAR_PORT, True)
    told = emulation(set={"listen.port": 0, "tls.dev_dir": "here"}).config
    assert (told.listen.port, told.tls.dev, told.tls.dev_dir) == (0, True, "here")
    own = emulation(set={"tls.cert": "c.pem", "tls.key": "k.pem"}).config
    assert (own.tls.dev, own.tls.cert) == (False, "c.pem")


def test_it_tells_clients_of_the_ports_that_are_open() -> None:
    told = emulation(path="v1").advice(Ports(4001, 4002), "/ca.pem").splitlines()
    assert told == [
        "Endpoint 'chat' is the container at ws://127.0.0.1:8080/v1.",
        "AWS SDK (bidirectional): endpoint_uri https://localhost:4002, and SSL_CERT_FILE=/ca.pem in its environment.",
        "boto3 and the AWS CLI: endpoint_url http://localhost:4001.",
        "Any region and any credentials will do.",
    ]
    closed = emulation(set={"sagemaker.sigv4.credentials": "keys"}).advice(Ports(0, 0), "").splitlines()
    assert closed == [f"Endpoint 'chat' is the container at {URL}.", "Credentials must be those of keys."]


def test_it_tells_clients_the_address_that_it_listens_at() -> None:
    told = emulation(set={"listen.host": "192.0.2.7"}).advice(Ports(4001, 4002), "")
    assert "endpoint_uri https://192.0.2.7:4002." in told
    assert "endpoint_url http://192.0.2.7:4001." in told
    assert (
        json.loads(emulation(set={"listen.host": "2001:db8::7"}).told(Ports(4001, 0), ""))["url"]
        == "http://[2001:db8::7]:4001"
    )
    for host in ("0.0.0.0", "::", "::1", "localhost"):
        assert "endpoint_url http://localhost:4001." in emulation(set={"listen.host": host}).advice(Ports(4001, 0), "")
    unix = emulation(set={"listen.host": "unix:/run/s"}).advice(Ports(0, 0, ("unix:/run/s",)), "")
    assert "curl: --unix-socket /run/s." in unix.splitlines()


def test_it_tells_a_program_the_same_on_one_line() -> None:
    assert json.loads(emulation().told(Ports(4001, 4002), "/ca.pem")) == {
        "endpoint": "chat", "container": URL, "url": "http://localhost:4001", "tls_url": "https://localhost:4002",
        "ca": "/ca.pem", "credentials": "",
    }  # fmt: skip
    closed = json.loads(emulation().told(Ports(0, 4002), ""))
    assert (closed["url"], closed["ca"]) == ("", "")


def test_an_endpoint_that_no_client_can_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--endpoint: EndpointName must match .*, got 'a b'"):
        emulation(endpoint="a b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--container'."),
        (["--container", "chat"], "--container: container URL: expected ws://host:port, or wss, http or https, got 'chat'"),
        (["--container", URL, "--half-close-quiet", "x"], "--half-close-quiet must be a duration such as 1s, not 'x'"),
        (["--container", URL, "--ca", "ca.pem"], "a CA is for wss:// and https://: this container is called without TLS"),
        (["--container", URL, "--limit", "x"], "--limit takes NAME=VALUE, such as connect_timeout=250ms, not 'x'"),
        (["--container", URL, "--limit", "part=0"], "--limit: part must be a whole number, such as 5 or 64KiB, not '0'"),
        (
            ["--container", URL, "--limit", "half_close_quiet=2"],
            "--limit: half_close_quiet has a flag of its own, --half-close-quiet",
        ),
        (["--container", URL, "--limit", "part=1", "--limit", "part=2"], "--limit: part is set twice"),
    ],
)
def test_a_wrong_option_is_one_clear_line(arguments: list[str], message: str) -> None:
    assert failure(*arguments) == message


def started(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gateway", *flags, "emulate", "sagemaker", "--container", "ws://127.0.0.1:1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.programs
def test_as_a_process_it_tells_its_ports_while_it_waits_for_the_container_and_ends_at_ctrl_c() -> None:
    with started("--port", "0", "--tls-port", "0") as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(4)]
            assert ":0" not in "".join(lines)
            assert "https://localhost:" in lines[1]
            process.send_signal(signal.SIGINT)
            said, log = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, said) == (0, "")
    assert '"event": "drained"' in log
    assert '"event": "serving"' not in log


@pytest.mark.programs
@pytest.mark.parametrize("flag", ["--port", "--tls-port"])
def test_a_port_that_is_taken_is_told_with_the_flag_that_sets_another_and_nothing_is_advised(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started(flag, str(port), "--tls-port" if flag == "--port" else "--port", "0") as process:
            said, log = process.communicate(timeout=120)
    assert (process.returncode, said) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in log
    assert f"or {flag} sets another" in log
