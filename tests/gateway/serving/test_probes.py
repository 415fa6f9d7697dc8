"""Probes get health whoever they are, and leave no line or span. A path of other servers is answered with the right one."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.config import AccessConfig, Config, LogConfig, OperatorConfig
from protocols.events import End, Head, Headers, Request
from protocols.grpc.framing import frame
from tests.gateway.access.asked import BEARER, WIRES, alice, asking, config, keys_of
from tests.gateway.dialects.grpc.by_hand import ByHand
from tests.gateway.dialects.grpc.by_hand import call as grpc_call
from tests.gateway.promises import House, Probe, echoing, serving

EVERY_WIRE = pytest.mark.parametrize("wire", WIRES)
PATHS = ("/ping", "/health", "/v2/health/live", "/v2/health/ready")
METHODS = (("grpc.health.v1.Health", "Check"), ("inference.GRPCInferenceService", "ServerLive"),
           ("inference.GRPCInferenceService", "ServerReady"))  # fmt: skip
NAMED = Config(access=AccessConfig(hosts=("models.example",)))


async def probe_all(house: House, *fields: tuple[str, str]) -> None:
    """Asks for health in each way there is, as kubelet does: by the pod's address, and with no key."""
    for path in PATHS:
        for kind in ("http1", "http2"):
            assert (await house.ask(path, b"", *fields, method=b"GET", line=house.line(kind)))[0] == 200
    for service, method in METHODS:
        more = [(name.encode(), value.encode()) for name, value in fields]
        answer = await grpc_call(house, method, b"", *more, service=service, authority=b"10.0.0.7:8080")
        assert isinstance(answer, bytes), answer


# -- the name of the server ---------------------------------------------------------------------------------------------


async def test_probes_by_the_address_of_a_pod_are_answered_where_the_server_has_names(autojump_clock: Any) -> None:
    async with serving(Probe(echoing).spec("bidi"), config=NAMED) as house:
        await probe_all(house)
        made = await ByHand(house.line("http2"), "Watch", "grpc.health.v1.Health").open(authority=b"10.0.0.7:8080")
        await made.say(b"".join(frame((b"",))))
        await made.end()
        assert await made.message() == b"\x08\x01"
        await made.leave()
        # all else still wants the name
        for path in ("/v2", "/v2/models/probe/ready", "/", "/none"):
            assert (await house.ask(path, b"", method=b"GET"))[0] == 421


async def ask_namelessly(house: House, path: bytes, *fields: tuple[bytes, bytes]) -> int:
    """The status of a GET over HTTP/2 with neither :authority nor Host, as HAProxy's health checks are."""
    line = house.line("http2")
    stream = line.next_stream()
    with pytest.MonkeyPatch.context() as patch:
        line.peer.machine._h2.config.validate_outbound_headers = False  # type: ignore[union-attr]
        sent = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", path), *fields]
        patch.setattr("protocols.http2.connection.request_fields", lambda *_: sent)
        await line.send(Request(stream=stream, head=Head(method=b"GET", target=path)), End(stream=stream))
    status, _, _ = await line.peer.read_answer(stream)
    return int(status)


@pytest.mark.parametrize("fields", [(), ((b"te", b"trailers"),), ((b"user-agent", b"check"),)])
async def test_http2_without_a_name_for_the_server_is_answered_as_http10_is(fields: Headers, autojump_clock: Any) -> None:
    for chosen, other in ((Config(), 200), (NAMED, 421)):
        async with serving(Probe(echoing).spec("bidi"), config=chosen) as house:
            for path, status in ((b"/ping", 200), (b"/v2/health/ready", 200), (b"/v2", other)):
                assert await ask_namelessly(house, path, *fields) == status
                line = house.line("http1")
                line.transport.try_send([b"GET %b HTTP/1.0\r\n\r\n" % path])
                await line.over_raw()
                assert bytes(line.transport.read).startswith(b"HTTP/1.1 %d " % status)


# -- log and spans -----------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__["path"] for record in caplog.records if record.name == "gateway.exchange"]


@pytest.mark.parametrize("access", ["limited", "all", "none"])
async def test_probes_have_lines_in_the_log_where_all_exchanges_have(
    access: Any, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    async with serving(Probe(echoing).spec("bidi"), config=Config(log=LogConfig(access=access))) as house:
        await probe_all(house)
        for path in ("/v2", "/v2/models/probe/ready"):
            await house.ask(path, b"", method=b"GET")
    probes = [*PATHS, *PATHS, *(f"/{service}/{method}" for service, method in METHODS)]
    others = ["/v2", "/v2/models/probe/ready"]
    assert sorted(lines(caplog)) == sorted({"all": [*probes, *others], "limited": others, "none": []}[access])


SAMPLED, UNSAMPLED = (b"00-" + b"1" * 32 + b"-" + b"2" * 16 + flags for flags in (b"-01", b"-00"))


@pytest.mark.parametrize("wire", ["http1", "http2"])
@pytest.mark.parametrize(
    ("value", "sampled"), [(b"", False), (UNSAMPLED, False), (b"no such thing", False), (SAMPLED, True)]
)
async def test_a_probe_has_a_span_if_its_client_samples_it(value: bytes, sampled: bool, wire: str) -> None:
    provider, ended = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(ended))
    fields = [(b"traceparent", value)] if value else []
    async with asking(wire, config(), tracer_provider=provider) as (_, ask):
        for path in PATHS:
            assert (await ask("GET", path, fields))[0] == 200
        calls = METHODS if wire == "http2" else ()
        for service, method in calls:
            assert (await ask("POST", f"/{service}/{method}", fields, b"".join(frame((b"",)))))[0] == 200
        assert (await ask("GET", "/v2"))[0] == 200
    names = [f"GET {path}" for path in PATHS] + [f"POST /{service}/{method}" for service, method in calls]
    assert [span.name for span in ended.get_finished_spans()] == [*(names if sampled else ()), "GET /v2"]


# -- unknown paths -----------------------------------------------------------------------------------------------------


@EVERY_WIRE
async def test_health_is_what_ping_is(wire: str) -> None:
    async with asking(wire, config()) as (_, ask):
        ping, health = await ask("GET", "/ping"), await ask("GET", "/health")
        assert (ping[0], ping[2]) == (health[0], health[2]) == (200, health[2])
        assert (await ask("HEAD", "/health"))[0] == 200


OPENAI = ["message", "type", "param", "code"]


@EVERY_WIRE
@pytest.mark.parametrize(
    ("method", "path", "hint", "form"),
    [
        ("POST", "//v1/chat/completions", "did you mean POST /v1/chat/completions?", "openai"),
        ("POST", "/v1//chat///completions", "did you mean POST /v1/chat/completions?", "openai"),
        ("GET", "//v1/models", "did you mean GET /v1/models?", "openai"),
        ("POST", "//v1/chat/completion", "; there are: ", "openai"),
        ("POST", "//v2/models/lm/infer", "did you mean POST /v2/models/{name}/infer?", "plain"),
        ("POST", "/models//lm/invoke", "did you mean POST /models/{name}/invoke?", "lmi"),
        ("POST", "//invocations", "did you mean POST /invocations?", "lmi"),
        ("GET", "//ping", "did you mean GET /ping?", "plain"),
        ("GET", "//", "did you mean GET /?", "plain"),
        ("POST", "/chat/completions", "did you mean POST /v1/chat/completions?", "plain"),
        ("GET", "/openapi.json", "did you mean GET /v2/openapi.json?", "plain"),
        ("GET", "/healthz", "did you mean GET /health?", "plain"),
        ("GET", "/metrics", "which metrics.port opens", "plain"),
        ("GET", "//metrics", "which metrics.port opens", "plain"),
    ],
)
async def test_a_path_that_is_nearly_right_is_told_what_was_meant(
    wire: str, method: str, path: str, hint: str, form: str
) -> None:
    chosen = replace(config(), operator=OperatorConfig(port=0))
    async with asking(wire, chosen) as (_, ask):
        status, _, body = await ask(method, path, (), b"{}" if method == "POST" else b"")
        said = json.loads(body)
        text = said["error"]["message"] if form == "openai" else said.get("error") or said["message"]
        assert status == 404
        assert text.startswith(f"no such path: {path}")
        assert hint in text
        assert "127.0.0.1" not in text
        assert {"openai": list(said) == ["error"], "plain": list(said) == ["error"], "lmi": "code" in said}[form]
        assert form != "openai" or list(said["error"]) == OPENAI


@EVERY_WIRE
async def test_who_has_no_key_learns_of_no_path(wire: str, tmp_path: Any) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice()))) as (_, ask):
        for path in ("/metrics", "/openapi.json", "//v1/models"):
            status, _, body = await ask("GET", path)
            assert (status, b"did you mean" in body or b"metrics.port" in body) == (401, False)
            assert (await ask("GET", path, BEARER))[0] == 404
        status, _, body = await ask("GET", "//v1/models")
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
