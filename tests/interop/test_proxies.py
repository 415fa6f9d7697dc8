"""A server behind proxies: curl as one that sends PROXY headers or forwarded fields, and HAProxy and nginx themselves."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import absent
from tests.interop.replicas import of_a_page
from tests.interop.servers import ROOT
from tests.interop.test_listening import COMMAND, Start, ended, run
from tests.interop.test_listening import folder as folder
from tests.interop.test_listening import start as start
from tests.interop.test_process import PATIENCE, logged
from tests.ports import free_port

TRUST = ["--set", 'listen.trusted_proxies=["127.0.0.1", "unix"]']
CLIENT = "203.0.113.7"


def served(start: Start, *flags: str) -> tuple[subprocess.Popen[str], list[str]]:
    process = start([*COMMAND, "--port", "0", *flags])
    return process, logged(process, "serving")["at"]


@pytest.mark.parametrize("http", ["--http1.1", "--http2-prior-knowledge"])
def test_curls_proxy_header_is_read_from_who_is_listed_alone(curl: str, start: Start, http: str) -> None:
    command = [curl, "-sS", "--haproxy-protocol", http, "-o", "/dev/null", "-w", "%{http_code} %{local_port}"]
    process, (url,) = served(start, *TRUST)
    status, port = run(*command, f"{url}/v2").split()
    assert (status, logged(process, "exchange")["peer"]) == ("200", f"127.0.0.1:{port}")
    assert ended(process) == 0
    process, (url,) = served(start, "--set", 'listen.trusted_proxies=["10.0.0.0/8"]')
    done = subprocess.run([*command, f"{url}/v2"], capture_output=True, text=True, timeout=PATIENCE)
    assert not done.stdout.startswith("200")
    assert logged(process, "PROXY header refused: the peer is not in listen.trusted_proxies")["peer"].startswith(
        "127.0.0.1:"
    )
    assert ended(process) == 0


def test_curls_proxy_header_comes_before_tls(curl: str, start: Start, folder: Path) -> None:
    process, at = served(start, *TRUST, "--tls-dev", "--tls-port", "0", "--set", f"tls.dev_dir={folder}/tls")
    port = at[-1].rpartition(":")[2]
    command = [curl, "-sS", "-4", "--haproxy-protocol", "--cacert", f"{folder}/tls/ca.pem", "-o", "/dev/null"]
    said = run(*command, "-w", "%{http_code} %{http_version} %{local_port}", f"https://localhost:{port}/v2")
    status, version, local = said.split()
    assert (status, version, logged(process, "exchange")["peer"]) == ("200", "2", f"127.0.0.1:{local}")
    assert ended(process) == 0


def test_forwarded_fields_are_read_over_tcp_and_over_a_unix_socket(curl: str, start: Start, folder: Path) -> None:
    path = folder / "s"
    process, at = served(start, *TRUST, "--set", f'listen.host=["127.0.0.1", "unix:{path}"]')
    for where in ([f"{at[0]}/v2"], ["--unix-socket", str(path), "http://localhost/v2"]):
        run(curl, "-sS", "-H", f"X-Forwarded-For: 6.6.6.6, {CLIENT}, 127.0.0.1", *where)
        assert logged(process, "exchange")["peer"] == CLIENT
        run(curl, "-sS", "-H", 'Forwarded: for="[2001:db8::7]:4711"', *where)
        assert logged(process, "exchange")["peer"] == "[2001:db8::7]:4711"
    assert ended(process) == 0


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    def find(name: str) -> str:
        path = shutil.which(name)
        if path is None:
            absent(name)
        assert path is not None
        return path

    return find


def deployed(name: str, **changes: tuple[str, str]) -> str:
    """A file of `deploy/proxies`, with another text in the place of some of its own."""
    text = (ROOT / "deploy" / "proxies" / name).read_text(encoding="utf-8")
    for was, now in changes.values():
        assert was in text
        text = text.replace(was, now)
    return text


@pytest.mark.parametrize("how", ["send-proxy-v2", "send-proxy", "option forwardfor"])
def test_behind_haproxy(curl: str, start: Start, folder: Path, program: Callable[[str], str], how: str) -> None:
    process, (url,) = served(start, *TRUST)
    front, by_field = free_port(), how.startswith("option")
    config = deployed(
        "haproxy.cfg",
        bind=("bind :80", f"bind 127.0.0.1:{front}"),
        server=("10.0.0.5:8080", url.removeprefix("http://")),
        sends=("send-proxy-v2", "" if by_field else how),
        mode=("mode tcp", f"mode http\n    {how}" if by_field else "mode tcp"),
    )
    (folder / "haproxy.cfg").write_text(config)
    haproxy = start([program("haproxy"), "-db", "-f", "haproxy.cfg"])
    status, port = asked(curl, front)
    peer = logged(process, "exchange")["peer"]
    assert (status, peer) == ("200", "127.0.0.1" if by_field else f"127.0.0.1:{port}")
    haproxy.terminate()
    haproxy.wait(PATIENCE)
    assert ended(process) == 0


def behind_nginx(
    start: Start, folder: Path, program: str, upstream: str, *changes: tuple[str, str]
) -> tuple[subprocess.Popen[str], int]:
    """nginx by `nginx.conf`, and its port."""
    front = free_port()
    server = deployed(
        "nginx.conf",
        listen=("listen 80", f"listen 127.0.0.1:{front}"),
        upstream=("server unix:/run/everywire/http.sock", f"server {upstream}"),
        **{str(n): change for n, change in enumerate(changes)},
    )
    folders = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{name}_temp_path {folder}/{name};" for name in folders)
    (folder / "nginx.conf").write_text(
        f"user root; daemon off; pid {folder}/pid; error_log stderr; events {{}}\nhttp {{ access_log off; {temporary}\n{server} }}"
    )
    return start([program, "-p", str(folder), "-c", f"{folder}/nginx.conf"]), front


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_behind_nginx(curl: str, start: Start, folder: Path, program: Callable[[str], str], over: str) -> None:
    process, at = served(start, *TRUST, "--set", f'listen.host=["127.0.0.1", "unix:{folder}/s"]')
    upstream = f"unix:{folder}/s" if over == "unix" else at[0].removeprefix("http://")
    nginx, front = behind_nginx(start, folder, program("nginx"), upstream)
    status, _ = asked(curl, front, "-H", f"X-Forwarded-For: {CLIENT}", "-H", "Forwarded: for=6.6.6.6")
    # nginx's own client is on this machine, and so a proxy that is listed: the walk goes through it
    assert (status, logged(process, "exchange")["peer"]) == ("200", CLIENT)
    assert ended(nginx) == 0
    assert ended(process) == 0


def test_a_page_behind_nginx_is_the_servers_own_at_its_own_port_alone(
    curl: str, start: Start, folder: Path, program: Callable[[str], str]
) -> None:
    process = start([*COMMAND, *TRUST, "--set", f"listen.host=unix:{folder}/s"])
    logged(process, "serving")
    nginx, front = behind_nginx(start, folder, program("nginx"), f"unix:{folder}/s")
    asked(curl, front)  # it listens
    for name in ("127.0.0.1", "models.example"):
        assert of_a_page(front, name, f"http://{name}:{front}") == (200, 101)
        assert of_a_page(front, name, f"http://{name}") == (403, 403)  # another site: that of port 80
        assert of_a_page(front, name, "https://evil.example") == (403, 403)
    assert ended(nginx) == 0
    assert ended(process) == 0


def asked(curl: str, port: int, *options: Any) -> tuple[str, str]:
    """The status, and the port that curl had."""
    patient = ["--retry", "30", "--retry-delay", "1", "--retry-connrefused"]
    command = [curl, "-s", *patient, "-w", "\n%{http_code} %{local_port}", *options]
    said = run(*command, f"http://127.0.0.1:{port}/v2")
    status, local = said.splitlines()[-1].split()
    return status, local
