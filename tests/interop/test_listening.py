"""Addresses that a server listens at, as curl, systemd and the gateway's own commands find them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.interop.servers import ROOT
from tests.interop.test_process import PATIENCE, logged

Start = Callable[..., "subprocess.Popen[str]"]
COMMAND = [sys.executable, "-m", "gateway", "--model", "echo=models.library.echo:Echo"]
# As systemd does (sd_listen_fds(3)): the first socket is descriptor 3, and LISTEN_PID is who gets them.
PASS = """
import os, sys
numbers = [int(number) for number in sys.argv[1].split(",")]
for n, number in enumerate(numbers):
    os.dup2(number, 3 + n)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a path that is short enough for a Unix socket."""
    return tmp_path_factory.mktemp("u")


def environment(**more: str) -> dict[str, str]:
    there = {k: v for k, v in os.environ.items() if not k.startswith(("EVERYWIRE_", "LISTEN_"))}
    return {**there, "PYTHONPATH": str(ROOT), **more}


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a program that ends with the test."""
    with ExitStack() as stack:

        def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
            options = {"env": environment(), **options}
            process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, **options)
            assert process.stderr is not None
            stack.callback(process.stderr.close)
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.kill)
            return process

        yield start


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE, env=environment()).stdout


def ended(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE)


@contextmanager
def listening(*families: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                socket.create_server(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family)
            )
            for family in families
        ]


def passing(sockets: list[socket.socket], names: str, *flags: str) -> dict[str, Any]:
    """Arguments that start a server which finds these sockets at the descriptors from 3 on."""
    numbers = [sock.fileno() for sock in sockets]
    assert min(numbers) >= 3 + len(numbers)
    command = [sys.executable, "-c", PASS, ",".join(map(str, numbers)), *COMMAND, *flags]
    env = environment(LISTEN_FDS=str(len(sockets)), LISTEN_FDNAMES=names)
    return {"command": command, "env": env, "pass_fds": numbers}


def test_a_unix_socket_is_called_by_curl_and_by_us_and_is_gone_at_the_end(curl: str, start: Start, folder: Path) -> None:
    served, managed = folder / "served", folder / "managed"
    flags = ["--host", f"unix:{served}", "--set", "listen.unix_mode=666", "--set", f"operator.host=unix:{managed}"]
    process = start([*COMMAND, *flags])
    assert logged(process, "operator plane")["at"] == f"unix:{managed}"
    assert logged(process, "serving")["at"] == [f"unix:{served}"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (served, managed)] == [0o666, 0o600]
    answer = run(curl, "-sS", "--unix-socket", str(served), "http://localhost/invocations", "-d", "hello")
    assert answer == "hello"
    assert logged(process, "exchange")["peer"] == f"unix:{served}"
    assert "hi" in run(*COMMAND, *flags, "call", "echo", "--wire", "invoke", "hi")
    assert run(*COMMAND, "call", "echo", "--url", f"unix:{served}", "--wire", "websocket", "hi").strip() == "hi"
    (model,) = run(*COMMAND, *flags, "models", "list", "--json").splitlines()
    assert json.loads(model)["state"] == "ready"
    drained = run(*COMMAND, "models", "drain", "--url", f"unix:{managed}")
    assert drained.startswith("drained in ")
    assert process.wait(PATIENCE) == 0
    assert list(folder.iterdir()) == []


def test_who_was_killed_left_a_file_that_the_next_one_replaces(start: Start, folder: Path) -> None:
    command = [*COMMAND, "--host", f"unix:{folder}/s"]
    first = start(command)
    logged(first, "serving")
    second = start(command)
    assert "another process listens on it" in logged(second, "cannot serve")["reason"]
    assert second.wait(PATIENCE) == 1
    first.kill()
    first.wait(PATIENCE)
    assert (folder / "s").is_socket()
    third = start(command)
    assert logged(third, "serving")["at"] == [f"unix:{folder}/s"]
    assert ended(third) == 0


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_every_address_is_called_by_both_families(curl: str, start: Start) -> None:
    process = start([*COMMAND, "--host", "::", "--port", "0"])
    (at,) = logged(process, "serving")["at"]
    scheme, _, port = at.rpartition(":")
    assert scheme == "http://[::]"
    for host, peer in (("127.0.0.1", "127.0.0.1:"), ("[::1]", "[::1]:")):
        assert run(curl, "-sS", f"http://{host}:{port}/v2", "-o", "/dev/null", "-w", "%{http_code}") == "200"
        assert logged(process, "exchange")["peer"].startswith(peer)
    assert ended(process) == 0


def test_tls_on_a_unix_socket(curl: str, start: Start, folder: Path) -> None:
    hosts = ["--set", f'listen.host=["unix+tls:{folder}/s", "unix:{folder}/clear"]']
    process = start([*COMMAND, *hosts, "--tls-dev", "--set", f"tls.dev_dir={folder}/tls"])
    assert logged(process, "serving")["at"] == [f"unix+tls:{folder}/s", f"unix:{folder}/clear"]
    command = [
        curl,
        "-sS",
        "--cacert",
        f"{folder}/tls/ca.pem",
        "--unix-socket",
        f"{folder}/s",
        "https://localhost/invocations",
    ]
    assert run(*command, "-d", "hello") == "hello"
    assert run(curl, "-sS", "--unix-socket", f"{folder}/clear", "http://localhost/invocations", "-d", "hello") == "hello"
    assert ended(process) == 0


def test_sockets_that_systemd_passes_are_listened_on_by_name(curl: str, start: Start, folder: Path) -> None:
    with listening(*[socket.AF_INET] * 3) as sockets:
        ports = [sock.getsockname()[1] for sock in sockets]
        hosts = f'listen.host=["systemd:http", "systemd+tls:https", "unix:{folder}/s"]'
        flags = ["--set", hosts, "--set", "operator.host=systemd:plane", "--set", "operator.open=true"]
        tls = ["--tls-dev", "--set", f"tls.dev_dir={folder}/tls"]
        process = start(**passing(sockets, "http:https:plane", *flags, *tls))
        assert logged(process, "operator plane")["at"] == f"http://127.0.0.1:{ports[2]}"
        assert logged(process, "serving")["at"] == [
            f"http://127.0.0.1:{ports[0]}", f"https://127.0.0.1:{ports[1]}", f"unix:{folder}/s",
        ]  # fmt: skip
        assert run(curl, "-sS", f"http://127.0.0.1:{ports[0]}/invocations", "-d", "hello") == "hello"
        url = f"https://localhost:{ports[1]}/invocations"
        assert run(curl, "-sS", "-4", "--cacert", f"{folder}/tls/ca.pem", url, "-d", "hello") == "hello"
        assert json.loads(run(curl, "-sS", f"http://127.0.0.1:{ports[2]}/health/ready"))["ready"]
        assert ended(process) == 0


def test_who_comes_while_the_server_is_started_anew_waits_for_it(start: Start) -> None:
    with listening(socket.AF_INET) as sockets:
        address = sockets[0].getsockname()
        first = start(**passing(sockets, "http", "--host", "systemd"))
        assert logged(first, "serving")["at"] == [f"http://127.0.0.1:{address[1]}"]
        assert ended(first) == 0
        with socket.create_connection(address, PATIENCE) as client:
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            second = start(**passing(sockets, "http", "--host", "systemd"))
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert ended(second) == 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("stream", "does not listen: the .socket unit needs Accept=no"),
        ("datagram", "is not a stream socket: the .socket unit needs ListenStream="),
        ("file", "is not a socket: "),
    ],
)
def test_what_is_passed_and_is_no_socket_that_listens_is_named(start: Start, folder: Path, kind: str, why: str) -> None:
    (folder / "file").touch()
    with ExitStack() as stack:
        if kind == "file":
            passed: Any = stack.enter_context((folder / "file").open("rb"))
        else:
            passed = stack.enter_context(socket.socket(type=socket.SOCK_STREAM if kind == "stream" else socket.SOCK_DGRAM))
        process = start(**passing([passed], "x", "--host", "systemd:x"))
        reason = logged(process, "cannot serve")["reason"]
    assert reason.startswith("cannot listen on systemd:x (listen.host or --host): descriptor 3 ('x') ")
    assert why in reason
    assert process.wait(PATIENCE) == 1


def test_systemds_own_tool_starts_it_with_the_first_client(curl: str, start: Start) -> None:
    tool = shutil.which("systemd-socket-activate")
    if tool is None:
        pytest.skip("systemd-socket-activate is not installed")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    flags = ["-l", f"127.0.0.1:{port}", "--fdname=http", f"--setenv=PYTHONPATH={ROOT}"]
    process = start([tool, *flags, *COMMAND, "--host", "systemd:http"])
    assert process.stderr is not None
    assert "Listening on " in process.stderr.readline()
    assert json.loads(run(curl, "-sS", f"http://127.0.0.1:{port}/v2/health/live")) == {"live": True}
    assert ended(process) == 0
