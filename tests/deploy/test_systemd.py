"""The units for systemd: what they say fits the gateway, and its command runs with a socket as systemd passes it."""

from __future__ import annotations

import configparser
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from gateway.cli.options import CommandLine
from gateway.config import Config
from gateway.config.text import parse_duration
from tests.deploy.platforms import ROOT

UNITS = ROOT / "deploy" / "systemd"
REFUSED, CUT = "2", "3"
"""Exit statuses of the gateway."""


class Unit(configparser.ConfigParser):
    """A unit file: its keys have capitals."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit(name: str) -> Unit:
    parser = Unit(interpolation=None, delimiters=["="], comment_prefixes=["#"])
    parser.read_string((UNITS / name).read_text(encoding="utf-8"))
    return parser


SOCKET, SERVICE = unit("everywire.socket")["Socket"], unit("everywire.service")["Service"]


def test_the_service_asks_for_the_socket_by_its_name() -> None:
    command = shlex.split(SERVICE["ExecStart"])
    host = command[command.index("--host") + 1]
    assert host == f"systemd:{SOCKET['FileDescriptorName']}"
    assert CommandLine.of(None, (), (), {**dict.fromkeys(FLAGS), "host": host}).resolve().config.listen.host == host
    assert command[1:3] == ["-m", "gateway"]
    assert SOCKET.get("Accept", "no") == "no"


FLAGS = ("host", "port", "tls_port", "tls_cert", "tls_key", "tls_dev", "processes", "log_level", "log_format")


def test_its_times_leave_a_drain_its_own() -> None:
    drain = Config().drain
    assert parse_duration(SERVICE["TimeoutStopSec"]) > drain.delay + drain.timeout
    assert SERVICE["KillMode"] == "mixed", "SIGTERM is the server's, which ends its children itself"
    assert SERVICE["SuccessExitStatus"] == CUT
    assert SERVICE["RestartPreventExitStatus"] == REFUSED


def test_it_may_have_as_many_clients_as_the_gateway_takes() -> None:
    limits = Config().limits
    assert int(SERVICE["LimitNOFILE"]) > limits.connections + limits.descriptors_reserved
    assert int(SOCKET["Backlog"]) == Config().listen.backlog


@pytest.mark.programs
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    for name in ("everywire.socket", "everywire.service"):
        text = (UNITS / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("/opt/everywire/bin/python", "/bin/true"), encoding="utf-8")
    files = [str(tmp_path / name) for name in ("everywire.socket", "everywire.service")]
    done = subprocess.run([tool, "verify", "--man=no", *files], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_its_address_is_of_both_families() -> None:
    host, _, port = SOCKET["ListenStream"].rpartition(":")
    assert (host, SOCKET["BindIPv6Only"]) == ("[::]", "both")
    assert socket.inet_pton(socket.AF_INET6, host.strip("[]"))
    assert int(port) == Config().listen.port
