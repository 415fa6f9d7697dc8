"""Health is asked for by grpcio on a Unix socket, Envoy, HAProxy, and as kubelet and a load balancer do."""

from __future__ import annotations

import csv
import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import absent
from tests.interop.grpc_frames import HEALTH, SERVICE
from tests.interop.replicas import ask, until
from tests.interop.test_listening import COMMAND, Start, ended
from tests.interop.test_listening import folder as folder
from tests.interop.test_listening import start as start
from tests.interop.test_process import PATIENCE, logged
from tests.ports import free_port

NAMES = ["--set", 'access.hosts=["models.example"]']
POD, KUBELET = "10.0.0.7:8080", "kube-probe/1.33"
SERVING = b"\x08\x01"
CLUSTER = "grpcroute/default/models/rule/0"
ENVOY = """
admin: {address: {socket_address: {address: 127.0.0.1, port_value: %(admin)d}}}
static_resources:
  clusters:
    - name: %(cluster)s
      type: STATIC
      connect_timeout: 5s
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config: {http2_protocol_options: {}}
      health_checks:
        - {timeout: 5s, interval: 1s, no_traffic_interval: 1s, unhealthy_threshold: 1, healthy_threshold: 1, grpc_health_check: {}}
      load_assignment:
        cluster_name: %(cluster)s
        endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %(port)d}}}}]}]
"""
HAPROXY = """
global
    stats socket %(folder)s/stats
defaults
    mode http
    timeout connect 5s
    timeout server 30s
backend models
    %(check)s
    server one 127.0.0.1:%(port)d check proto h2 inter 1s rise 1 fall 1
"""


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        absent(name)
    assert path is not None
    return path


@pytest.fixture
def grpcio(needs: Callable[[str, str], Any]) -> Any:
    return needs("grpcio", "grpc")


def served(start: Start, *flags: str) -> tuple[subprocess.Popen[str], int]:
    """A server that is ready, and its port."""
    process = start([*COMMAND, "--port", "0", *flags])
    port = int(logged(process, "serving")["at"][0].rpartition(":")[2])
    until(lambda: ask(port, "GET", "/ping", Host="models.example")[0] == 200, "the server is ready")
    return process, port


def exchanges(process: subprocess.Popen[str]) -> list[str]:
    """The paths in the access lines of a server that ends now."""
    assert ended(process) == 0
    assert process.stderr is not None
    return [record["path"] for line in process.stderr if (record := json.loads(line))["event"] == "exchange"]


@pytest.mark.parametrize("form", ["unix:{}", "unix://{}", "unix:{} named by its path"])
def test_grpcio_calls_a_unix_socket_by_each_form_of_its_name(grpcio: Any, start: Start, folder: Path, form: str) -> None:
    path = folder / "s.sock"
    served(start, "--set", f'listen.host=["127.0.0.1", "unix:{path}"]')
    # other clients than C-core name the path itself, which grpcio does where it is told to
    options = [("grpc.default_authority", str(path))] if form.endswith("path") else []
    with grpcio.insecure_channel(form.split()[0].format(path), options=options) as channel:
        assert channel.unary_unary(f"{HEALTH}/Check")(b"", timeout=PATIENCE) == SERVING
        assert b"everywire" in channel.unary_unary(f"{SERVICE}/ServerMetadata")(b"", timeout=PATIENCE)
        watched = channel.unary_stream(f"{HEALTH}/Watch")(b"", timeout=PATIENCE)
        assert next(watched) == SERVING
        watched.cancel()


@pytest.mark.parametrize("names", [[], NAMES])
def test_envoys_health_checks_name_a_cluster_with_slashes(start: Start, folder: Path, names: list[str]) -> None:
    envoy = program("envoy")
    process, port = served(start, *names)
    admin = free_port()
    (folder / "envoy.yaml").write_text(ENVOY % {"admin": admin, "cluster": CLUSTER, "port": port})
    command = [envoy, "-c", "envoy.yaml", "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
    proxy = start(command)

    def judged() -> bytes:
        try:
            return ask(admin, "GET", f"/stats?filter=cluster.{CLUSTER}.health_check.(success|failure)$")[1]
        except OSError:
            return b""

    said = until(lambda: (now := judged()) and b"success: 0" not in now.replace(b"failure: 0", b"") and now, "a check")
    assert b"health_check.failure: 0" in said
    assert f"{CLUSTER}::127.0.0.1:{port}::health_flags::healthy" in ask(admin, "GET", "/clusters")[1].decode()
    proxy.kill()
    assert exchanges(process) == []


@pytest.mark.parametrize(
    ("names", "check"),
    [([], "option httpchk"), ([], "option httpchk GET /v2/health/ready"), (NAMES, "option httpchk GET /v2/health/ready"),
     (NAMES, "option httpchk GET /ping")],
)  # fmt: skip
def test_haproxys_checks_over_http2_name_no_server(start: Start, folder: Path, names: list[str], check: str) -> None:
    haproxy = program("haproxy")
    _, port = served(start, *names)
    (folder / "haproxy.cfg").write_text(HAPROXY % {"folder": folder, "check": check, "port": port})
    start([haproxy, "-db", "-f", "haproxy.cfg"])

    def judged() -> str:
        """The result of its last check, such as L7OK or L7STS; empty before."""
        try:
            with socket.socket(socket.AF_UNIX) as asked:
                asked.connect(str(folder / "stats"))
                asked.sendall(b"show stat\n")
                told = b"".join(iter(lambda: asked.recv(65536), b"")).decode()
        except OSError:
            return ""
        (row,) = [row for row in csv.DictReader(told.removeprefix("# ").splitlines()) if row["svname"] == "one"]
        return "" if row["check_status"].startswith(("INI", "* ")) else f"{row['check_status']} {row['check_code']}"

    # the default check is OPTIONS /
    assert until(judged, "a check") == ("L7OK 204" if check == "option httpchk" else "L7OK 200")


def test_kubelets_probes_name_the_pod(grpcio: Any, start: Start) -> None:
    process, port = served(start, *NAMES)
    for path in ("/ping", "/health", "/v2/health/live", "/v2/health/ready"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        fields = {"Host": POD, "User-Agent": KUBELET, "Accept": "*/*", "Connection": "close"}
        connection.request("GET", path, headers=fields)
        assert connection.getresponse().status == 200
        connection.close()
    options = [("grpc.default_authority", POD), ("grpc.primary_user_agent", KUBELET)]
    with grpcio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        assert channel.unary_unary(f"{HEALTH}/Check")(b"", timeout=PATIENCE) == SERVING
        with pytest.raises(grpcio.RpcError) as told:
            channel.unary_unary(f"{SERVICE}/ServerMetadata")(b"", timeout=PATIENCE)
        assert "access.hosts" in told.value.details()
    assert exchanges(process) == [f"{SERVICE}/ServerMetadata"]


def test_a_load_balancers_own_method_is_unknown_and_with_keys_unauthenticated(
    grpcio: Any, start: Start, folder: Path
) -> None:
    keys = folder / "keys"
    keys.write_text("")
    keys.chmod(0o600)
    for flags, code in (([], "UNIMPLEMENTED"), (["--set", f"access.keys_file={keys}"], "UNAUTHENTICATED")):
        _, port = served(start, *flags)
        with grpcio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpcio.RpcError) as told:
                channel.unary_unary("/AWS.ALB/healthcheck")(b"", timeout=PATIENCE)
            assert told.value.code().name == code
            assert channel.unary_unary(f"{HEALTH}/Check")(b"", timeout=PATIENCE) == SERVING
