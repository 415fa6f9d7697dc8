"""The standalone server's span export: the configuration, the OTEL_* variables, and the time limit of the last export."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest

from gateway.config import TracingConfig
from gateway.config.problem import ConfigError
from gateway.telemetry import span_export
from tests.docs.pages import skip_or_fail

# A server that is asked once, by a client in a thread of its own, and then told to end.
SERVER = """
import http.client, os, signal, sys, threading
from opentelemetry import trace
from gateway.config import Config, ListenConfig, LogConfig, TracingConfig
from gateway.cli.serve import run
from models.messages import Prompt

def shout(prompt: Prompt):
    with trace.get_tracer("the model's own").start_as_current_span("own"):
        yield prompt.text.upper()

def ask(gateway):
    def client():
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port)
        for _ in range(100):
            connection.request("POST", "/predictions/shout", b'{"inputs": "a"}', {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            if answer.status == 200:
                break
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=client).start()

tracing = TracingConfig(enabled=True, exporter=sys.argv[1], flush_timeout=float(sys.argv[2]), service_name="configured")
config = Config(listen=ListenConfig(port=0), log=LogConfig(format="json"), tracing=tracing)
sys.exit(run(config, [shout], listening=ask))
"""


def serve(exporter: str = "console", flush: float = 30.0, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-c", SERVER, exporter, str(flush)],
        capture_output=True, text=True, timeout=120, env={**inherited, **environment},
    )  # fmt: skip


def spans_of(output: str) -> list[dict[str, Any]]:
    """The spans that the SDK's console exporter has written, one JSON object after the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(output.rstrip()):
        span, at = decoder.raw_decode(output, at)
        found.append(span)
        while at < len(output) and output[at].isspace():
            at += 1
    return found


@pytest.mark.programs
def test_the_server_and_its_models_export_by_one_provider() -> None:
    ran = serve()
    assert ran.returncode == 0, ran.stderr
    spans = {span["name"]: span for span in spans_of(ran.stdout)}
    assert {"POST /predictions/{name}", "model shout", "own"} <= spans.keys()
    assert spans["own"]["parent_id"] == spans["model shout"]["context"]["span_id"]
    assert spans["model shout"]["parent_id"] == spans["POST /predictions/{name}"]["context"]["span_id"]
    assert spans["own"]["resource"]["attributes"]["service.name"] == "configured"


@pytest.mark.programs
def test_the_variables_come_before_the_configuration() -> None:
    ran = serve("otlp", OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="said", OTEL_TRACES_SAMPLER="always_on")
    assert ran.returncode == 0, ran.stderr
    assert {span["resource"]["attributes"]["service.name"] for span in spans_of(ran.stdout)} == {"said"}
    ran = serve(OTEL_TRACES_SAMPLER="always_off")
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    ran = serve(OTEL_TRACES_EXPORTER="none")
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "nobody"}, "'nobody', which OTEL_TRACES_EXPORTER names"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "pigeon"},
            "OTEL_EXPORTER_OTLP_PROTOCOL must be one of http/protobuf, grpc, not 'pigeon'",
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "pip install opentelemetry-exporter-otlp-proto-grpc"),
        ({}, "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"),
    ],
)
def test_what_cannot_be_exported_by_is_a_mistake_of_the_configuration(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(span_export, "entry_points", lambda **_: [])
    with pytest.raises(ConfigError, match=said), span_export.exporting(TracingConfig(enabled=True)):
        pass


def installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except PackageNotFoundError:
        return False


@pytest.fixture(name="collector")
def _collector() -> Iterator[tuple[str, list[str]]]:
    """A collector that takes what it is sent and never answers."""
    paths: list[str] = []
    gone = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            paths.append(self.path)
            gone.wait()

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    gone.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.programs
def test_a_collector_that_does_not_answer_does_not_keep_the_server(collector: tuple[str, list[str]]) -> None:
    skip_or_fail([name for name in ["opentelemetry-exporter-otlp-proto-http"] if not installed(name)])
    url, paths = collector
    ran = serve("otlp", 0.5, OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_EXPORTER_OTLP_TIMEOUT="600")
    assert ran.returncode == 0, ran.stderr
    assert set(paths) == {"/v1/traces"}
    assert "tracing.flush_timeout" in ran.stderr
