"""Prometheus itself scrapes the port for metrics, and answers what an autoscaler asks of it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.interop.conftest import absent
from tests.interop.servers import ROOT
from tests.interop.test_listening import COMMAND, Start, ended
from tests.interop.test_listening import folder as folder
from tests.interop.test_listening import start as start
from tests.interop.test_process import PATIENCE, logged
from tests.ports import free_port

TOKEN = "what-the-scraper-shows"
APP = """\
from collections.abc import AsyncIterator

import trio

from models.messages import Prompt


async def stays(prompt: Prompt) -> AsyncIterator[str]:
    yield prompt.text
    if prompt.text == "stay":
        await trio.sleep_forever()
"""
SCRAPE = """\
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: everywire
    authorization: {{credentials_file: tokens}}
    static_configs: [{{targets: ["127.0.0.1:{port}"], labels: {{namespace: NAMESPACE, pod: everywire-0}}}}]
"""
# The query that the reference gives for an autoscaler.
WANTED = "sum(everywire_model_slots_in_use + everywire_model_queued)"
COMPONENTS = ROOT / "deploy/kubernetes/components"


def of_the_manifests() -> list[str]:
    """The query of KEDA's manifest, and that of prometheus-adapter for one pod."""
    keda = yaml.safe_load((COMPONENTS / "keda/scaled-object.yaml").read_text(encoding="utf-8"))
    (trigger,) = keda["spec"]["triggers"]
    adapter = yaml.safe_load((COMPONENTS / "hpa/prometheus-adapter.yaml").read_text(encoding="utf-8"))
    (rule,) = adapter["rules"]["custom"]
    matchers = 'namespace="NAMESPACE",pod=~"everywire-0"'
    return [
        trigger["metadata"]["query"],
        rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", matchers),
    ]


@pytest.fixture(scope="session")
def prometheus() -> str:
    """The path of Prometheus."""
    path = shutil.which("prometheus")
    if path is None:
        absent("prometheus")
    assert path is not None
    return path


def ask(port: int, query: str) -> float | None:
    """The one number that a query gives now; None where there is none yet."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:  # it is not there yet
        return None
    return float(found[0]["value"][1]) if found else None


def until(port: int, query: str, number: float) -> None:
    """Asks until that is the answer."""
    until = time.monotonic() + PATIENCE
    while (last := ask(port, query)) != number:
        assert time.monotonic() < until, f"{query} is {last}"
        time.sleep(0.2)


def call(port: int, text: str) -> socket.socket:
    body = json.dumps({"inputs": text, "stream": True}).encode()
    sock = socket.create_connection(("127.0.0.1", port))
    head = f"POST /predictions/stays HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    return sock


def test_prometheus_has_what_clients_made_and_an_autoscaler_its_number(prometheus: str, start: Start, folder: Path) -> None:
    (folder / "app.py").write_text(APP)
    (folder / "tokens").write_text(TOKEN)
    flags = ["metrics.port=0", "metrics.token_file=tokens", "models.stays.capacity=1", "drain.timeout=0"]
    process = start(
        [*COMMAND, "--port", "0", "--model", "stays=app:stays", *[part for flag in flags for part in ("--set", flag)]]
    )
    listens = logged(process, "metrics listener")
    assert listens["token"] == "demanded"
    port = int(logged(process, "serving")["at"][0].rpartition(":")[2])
    (folder / "prometheus.yml").write_text(SCRAPE.format(port=listens["at"].rpartition(":")[2]))
    asked = free_port()
    scraper = start(
        [prometheus, "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{asked}"]
    )
    with ExitStack() as calls:
        for _ in range(5):
            with call(port, "go") as sock:
                while sock.recv(4096):
                    pass
        until(asked, 'everywire_exchanges_total{model="stays",ending="complete"}', 5)
        until(asked, 'up{job="everywire"}', 1)
        until(asked, WANTED, 0)
        for _ in range(3):  # one runs, and two wait for its place
            calls.enter_context(call(port, "stay"))
        until(asked, WANTED, 3)
        for query in of_the_manifests():
            until(asked, query, 3)
        until(asked, "sum(everywire_model_slots_in_use)", 1)
        scraper.terminate()
        assert scraper.wait(PATIENCE) == 0
        assert ended(process) == 3


def test_prometheus_without_the_token_has_nothing(prometheus: str, start: Start, folder: Path) -> None:
    (folder / "tokens").write_text(TOKEN)
    process = start([*COMMAND, "--port", "0", "--set", "metrics.port=0", "--set", "metrics.token_file=tokens"])
    port = logged(process, "metrics listener")["at"].rpartition(":")[2]
    (folder / "prometheus.yml").write_text(SCRAPE.replace("tokens", "wrong").format(port=port))
    (folder / "wrong").write_text(TOKEN[:-1])
    asked = free_port()
    scraper: subprocess.Popen[str] = start(
        [prometheus, "--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{asked}"]
    )
    until(asked, 'up{job="everywire"}', 0)
    assert logged(process, "metrics request refused")["reason"] == "a wrong token"
    scraper.terminate()
    assert scraper.wait(PATIENCE) == 0
    assert ended(process) == 0
