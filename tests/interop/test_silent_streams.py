"""A model that is silent for longer than a proxy is patient: behind nginx, HAProxy and Envoy its client has the token, by the
comments alone.

The proxies run by the files of `deploy/proxies`, whose patience is a minute here in place of an hour, and their models are silent
for a minute and a half. All times are a twentieth of that.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.interop.replicas import Envoy, Replica
from tests.interop.test_listening import COMMAND, Start, ended
from tests.interop.test_listening import folder as folder
from tests.interop.test_listening import start as start
from tests.interop.test_process import PATIENCE, logged
from tests.interop.test_proxies import asked, behind_nginx, deployed
from tests.interop.test_proxies import program as program
from tests.ports import free_port

PART = 20
PATIENT, SILENT, SILENCE = 60 / PART, 90 / PART, 15 / PART
"""Seconds for which a proxy waits, for which the model is silent, and after which the gateway sends a comment."""
MODEL = f"""
import trio

async def slow(prompt: str):
    for word in ("one", "two"):
        await trio.sleep({SILENT})
        yield word
"""
ASKED = '{"model": "slow", "prompt": "x", "stream": true}'


@contextmanager
def behind(proxy: str, start: Start, folder: Path, program: Callable[[str], str], port: int) -> Iterator[int]:
    """The port of a proxy before the gateway at `port`."""
    patient = f"{PATIENT * 1000:.0f}ms"
    found = program(proxy)
    with ExitStack() as stack:
        if proxy == "nginx":
            process, front = behind_nginx(
                start, folder, found, f"127.0.0.1:{port}", ("read_timeout 1h", f"read_timeout {patient}")
            )
            stack.callback(ended, process)
        elif proxy == "haproxy":
            front = free_port()
            config = deployed(
                "haproxy.cfg",
                bind=("bind :80", f"bind 127.0.0.1:{front}"),
                server=("10.0.0.5:8080", f"127.0.0.1:{port}"),
                patient=("1h", patient),
            )
            (folder / "haproxy.cfg").write_text(config)
            process = start([found, "-db", "-f", "haproxy.cfg"])
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.terminate)
        else:
            gateway = Replica("gateway", folder)
            gateway.port = port
            envoy = Envoy(found, folder, [gateway], ("stream_idle_timeout: 3600s", f"stream_idle_timeout: {PATIENT}s"))
            stack.callback(envoy.close)
            front = envoy.port
        yield front


def heard(curl: str, port: int, http: str) -> str:
    """The answer as its client has it when it ends, as it should or not."""
    asked(curl, port)  # it listens
    patient = ["--max-time", str(PATIENCE + 2 * SILENT)]
    command = [curl, "-s", "-N", http, *patient, "-H", "Content-Type: application/json", "-d", ASKED]
    return subprocess.run([*command, f"http://127.0.0.1:{port}/v1/completions"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("proxy", "http"),
    [
        ("nginx", "--http1.1"),  # to which it speaks HTTP/1.1 in any case
        ("haproxy", "--http1.1"),
        ("haproxy", "--http2-prior-knowledge"),
        ("envoy", "--http1.1"),
        ("envoy", "--http2-prior-knowledge"),
    ],
)
@pytest.mark.parametrize("comments", [True, False])
def test_a_model_that_is_silent_for_longer_than_a_proxy_is_patient(
    comments: bool, proxy: str, http: str, curl: str, start: Start, folder: Path, program: Callable[[str], str]
) -> None:
    (folder / "served_silent.py").write_text(MODEL)
    trust = ["--set", 'listen.trusted_proxies=["0.0.0.0/0"]', "--set", 'access.hosts=["127.0.0.1", "localhost"]']
    silence = ["--set", f"sse.silence={SILENCE if comments else 0}"]
    process = start([*COMMAND, "--model", "slow=served_silent:slow", "--port", "0", *trust, *silence])
    (url,) = logged(process, "serving")["at"]
    with behind(proxy, start, folder, program, int(url.rpartition(":")[2])) as front:
        body = heard(curl, front, http)
    if comments:
        assert body.count(":\n") - body.count(":\n\n") >= 2 * 4
        assert '"text":"one"' in body
        assert body.endswith("data: [DONE]\n\n")
    else:
        assert '"text":' not in body
    assert ended(process) == 0
