"""Metrics on a port of their own: they and health are all that it knows, and who hangs on it hurts nobody."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.config import Config, DrainConfig, ListenConfig, MetricsConfig, OperatorConfig
from gateway.config.exposure import warnings
from gateway.config.load import load
from gateway.config.problem import ConfigError
from gateway.gateway import Gateway
from gateway.operator.operations import OPERATIONS
from gateway.telemetry.metrics import Scrapes
from models.adapt import spec_of
from models.messages import Prompt
from protocols.floods import METRICS_BYTES
from tests.gateway.operator.operators import curl
from tests.gateway.promises import Probe, answering, pausing
from tests.ports import free_port

TOKEN, OPERATORS = "scrape-me-with-this", "correct-horse-battery"
HEALTH = ("/v2/health/live", "/v2/health/ready", "/ping", "/health")


async def until(holds: Callable[[], bool]) -> None:
    """Lets sockets and tasks run until it is so."""
    while not holds():
        await wait_all_tasks_blocked(0.001)


@asynccontextmanager
async def scraped(*models: Any, config: Config | None = None, **metrics: Any) -> AsyncIterator[Gateway]:
    """A gateway on free ports of this machine, with its metrics on one more; cancelled at the end where it has not drained."""
    chosen = replace(config or Config(), listen=ListenConfig(port=0), metrics=MetricsConfig(**{"port": 0, **metrics}))
    gateway = Gateway(chosen, models)
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        yield gateway
        nursery.cancel_scope.cancel()


def ready_probe() -> Probe:
    probe = Probe(answering)
    probe.go.set()
    return probe


async def test_it_knows_metrics_and_health_and_nothing_else() -> None:
    async with scraped(ready_probe().spec("lmi-http1")) as gateway:
        port = gateway.metrics_port
        assert port not in (0, gateway.port, gateway.operator_port)
        assert (await curl(gateway.port, "POST", "/predictions/probe", b'{"inputs": "x"}')).status == 200
        told = await curl(port, "GET", "/metrics")
        assert told.status == 200
        assert b'everywire_exchanges_total{dialect="lmi",ending="complete",model="probe",wire="http/1.1"} 1.0' in told.body
        assert b"everywire_model_slots_in_use" in told.body
        assert b"everywire_model_queued" in told.body
        for path in HEALTH:
            assert (await curl(port, "GET", path)).status == 200
        paths = [
            path.replace("{name}", "probe") for operation in OPERATIONS for path in operation.paths if path != "/metrics"
        ]
        for path in (*paths, "/predictions/probe", "/v2/models/probe/infer"):
            for method in ("GET", "POST", "PUT"):
                assert (await curl(port, method, path)).status == 404, (method, path)
        for path in ("/metrics", *HEALTH):
            assert (await curl(port, "POST", path)).status == 405
        assert (await curl(gateway.port, "GET", "/metrics")).status == 404


async def test_a_websocket_is_answered_as_any_other_request() -> None:
    asked = (
        b"GET /ping HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"
    )
    async with scraped() as gateway, await trio.open_tcp_stream("127.0.0.1", gateway.metrics_port) as stream:
        await stream.send_all(asked)
        assert (await stream.receive_some(65536)).startswith(b"HTTP/1.1 200 ")


async def test_a_connection_that_has_sent_too_much_is_over() -> None:
    asked = b"GET /nowhere HTTP/1.1\r\nhost: a\r\nx-long: %b\r\n\r\n" % (b"x" * 8000)
    async with scraped() as gateway, await trio.open_tcp_stream("127.0.0.1", gateway.metrics_port) as stream:
        told, more = b"", b"begun"
        while more:
            await stream.send_all(asked)
            more = await stream.receive_some(65536)
            while more and not more.endswith(b"}"):  # head and body come apart
                more += await stream.receive_some(65536)
            told += more
        assert told.count(b"HTTP/1.1 404 ") == METRICS_BYTES // len(asked) + 1


async def test_scrapes_that_wait_share_the_next_text_and_none_is_older_than_its_request() -> None:
    begun, go, texts = 0, trio.Event(), list[bytes]()

    async def make(accept: str) -> tuple[str, bytes]:
        nonlocal begun
        begun += 1
        number = begun
        await go.wait()
        return "text/plain", b"%d" % number

    scrapes = Scrapes(make)

    async def scrape(accept: str = "text/plain") -> None:
        texts.append((await scrapes.text(accept))[1])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(scrape)
        await wait_all_tasks_blocked()
        for _ in range(50):  # the first has begun: these want another
            nursery.start_soon(scrape)
        await wait_all_tasks_blocked()
        nursery.start_soon(scrape, "application/openmetrics-text; version=1.0.0")
        await wait_all_tasks_blocked()
        go.set()
    assert begun == 3
    assert texts == [b"1", *[b"2"] * 50, b"3"]


async def test_a_scrape_whose_client_leaves_is_made_by_the_next() -> None:
    texts = list[bytes]()

    async def make(accept: str) -> tuple[str, bytes]:
        await trio.sleep(0.01)
        return "text/plain", b"made"

    scrapes, leaving = Scrapes(make), trio.CancelScope()

    async def scrape(scope: trio.CancelScope) -> None:
        with scope:
            texts.append((await scrapes.text(""))[1])

    async with trio.open_nursery() as nursery:
        for scope in (leaving, trio.CancelScope()):
            nursery.start_soon(scrape, scope)
        await trio.lowlevel.checkpoint()
        leaving.cancel()
    assert texts == [b"made"]


async def test_formats_are_those_of_the_operator_plane() -> None:
    config = Config(operator=OperatorConfig(port=0))
    async with scraped(config=config) as gateway:
        for accept in ("", "*/*", "application/openmetrics-text; version=1.0.0", "text/plain; version=0.0.4"):
            one, other = [
                await curl(port, "GET", "/metrics", accept=accept) for port in (gateway.metrics_port, gateway.operator_port)
            ]
            assert one.headers["content-type"] == other.headers["content-type"]
            assert one.body.endswith(b"# EOF\n") == other.body.endswith(b"# EOF\n") == ("openmetrics" in accept)


async def test_without_a_port_there_is_none() -> None:
    async with scraped(port=-1) as gateway:
        assert gateway.metrics_port == 0


async def test_a_token_of_its_own_opens_metrics_and_nothing_of_the_operators(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# the scraper's\n{TOKEN}\n")
    config = Config(operator=OperatorConfig(port=0, token=OPERATORS))
    async with scraped(config=config, token_file=str(file)) as gateway:
        refused = await curl(gateway.metrics_port, "GET", "/metrics")
        assert (refused.status, refused.headers["www-authenticate"]) == (401, 'bearer realm="everywire metrics"')
        assert "metrics.token_file" in refused.json["error"]
        for wrong in (OPERATORS, TOKEN + "x", ""):
            assert (await curl(gateway.metrics_port, "GET", "/metrics", authorization=f"Bearer {wrong}")).status == 401
        assert (await curl(gateway.metrics_port, "GET", "/metrics", authorization=f"Bearer {TOKEN}")).status == 200
        for path in HEALTH:
            assert (await curl(gateway.metrics_port, "GET", path)).status == 200
        assert (await curl(gateway.operator_port, "GET", "/metrics", authorization=f"Bearer {TOKEN}")).status == 401


async def test_a_token_that_is_changed_holds_within_a_second(tmp_path: Path, mock_clock: MockClock) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKEN)
    async with scraped(token_file=str(file)) as gateway:
        file.write_text(TOKEN * 2)
        mock_clock.jump(1)
        await wait_all_tasks_blocked(0.01)
        assert (await curl(gateway.metrics_port, "GET", "/metrics", authorization=f"Bearer {TOKEN}")).status == 401
        assert (await curl(gateway.metrics_port, "GET", "/metrics", authorization=f"Bearer {TOKEN * 2}")).status == 200


async def test_wrong_tokens_end_the_server_at_its_start() -> None:
    gateway = Gateway(Config(listen=ListenConfig(port=0), metrics=MetricsConfig(port=0, token_file="/nowhere/at/all")))
    with pytest.raises(ConfigError, match=r"metrics\.token_file: '/nowhere/at/all' cannot be read"):
        await gateway.serve()


async def test_it_is_there_before_the_models_are_and_tells_no_reasons() -> None:
    class Slow:
        def __init__(self) -> None:
            self.go = trio.Event()

        @asynccontextmanager
        async def load(self) -> AsyncIterator[Any]:
            await self.go.wait()

            async def answer(prompt: Prompt) -> AsyncIterator[str]:
                yield prompt.text

            yield answer

    slow = Slow()

    async def never(prompt: Prompt) -> AsyncIterator[str]:
        yield prompt.text

    spec = replace(spec_of(never, "slow"), load=slow.load)
    gateway = Gateway(Config(listen=ListenConfig(port=0), metrics=MetricsConfig(port=0)), [spec])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.serve)
        await until(lambda: bool(gateway.metrics_port))
        for path in HEALTH[1:]:
            answer = await curl(gateway.metrics_port, "GET", path)
            assert (answer.status, answer.json) == (503, {"ready": False})
        assert (await curl(gateway.metrics_port, "GET", "/v2/health/live")).json == {"live": True}
        told = await curl(gateway.metrics_port, "GET", "/metrics")
        assert b'everywire_model_state{model="slow",state="loading"} 1.0' in told.body
        slow.go.set()
        await until(lambda: not gateway.unready)
        assert (await curl(gateway.metrics_port, "GET", "/ping")).json == {"ready": True}
        nursery.cancel_scope.cancel()


async def test_it_stays_until_the_end_of_a_drain() -> None:
    probe = Probe(pausing)
    async with scraped(probe.spec("lmi-http1"), config=Config(drain=DrainConfig(timeout=60))) as gateway:
        port = gateway.metrics_port
        body = b'{"inputs": "x", "stream": true, "parameters": {"max_new_tokens": 65536}}'
        async with trio.open_nursery() as nursery:
            nursery.start_soon(curl, gateway.port, "POST", "/predictions/probe", body)
            await until(lambda: probe.sent == 3)
            gateway.begin_drain()
            await until(lambda: gateway.draining)
            assert (await curl(port, "GET", "/v2/health/ready")).status == 503
            assert b'everywire_model_slots_in_use{model="probe"} 1.0' in (await curl(port, "GET", "/metrics")).body
            probe.go.set()
        await gateway.stopped()
        assert gateway.metrics_port == 0


async def test_scrapers_that_hang_keep_nobody_out_for_long(mock_clock: MockClock) -> None:
    """As many connections as the port takes have begun a request and stop there. Models answer all the while, and the port
    answers again when the time of these connections is over."""
    async with scraped(ready_probe().spec("lmi-http1")) as gateway:
        hanging = [await trio.open_tcp_stream("127.0.0.1", gateway.metrics_port) for _ in range(100)]
        for stream in hanging:
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nho")
        await wait_all_tasks_blocked(0.01)
        assert (await curl(gateway.port, "POST", "/predictions/probe", b'{"inputs": "x"}')).status == 200
        answers = []

        async def scrape() -> None:
            answers.append(await curl(gateway.metrics_port, "GET", "/metrics"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(scrape)
            await wait_all_tasks_blocked(0.01)
            assert answers == []
            for _ in range(10):
                mock_clock.jump(1)
                await wait_all_tasks_blocked(0.01)
            assert [answer.status for answer in answers] == [200]
        for stream in hanging:
            await trio.aclose_forcefully(stream)


async def test_a_port_that_is_taken_stops_no_model_and_is_tried_again(caplog: Any, mock_clock: MockClock) -> None:
    caplog.set_level(logging.INFO, "gateway")
    port = free_port()
    listener = (await trio.open_tcp_listeners(port, host="127.0.0.1"))[0]
    async with listener, scraped(ready_probe().spec("lmi-http1"), port=port) as gateway:
        (said,) = [record for record in caplog.records if "does not listen" in record.message]
        assert said.message == "the metrics listener does not listen: models are served without it"
        assert "metrics.port sets another" in said.__dict__["reason"]
        assert (await curl(gateway.port, "POST", "/predictions/probe", b'{"inputs": "x"}')).status == 200
        await listener.aclose()
        mock_clock.jump(1)
        await wait_all_tasks_blocked(0.01)
        assert gateway.metrics_port == port


async def test_a_page_of_a_browser_does_not_reach_it_on_this_machine() -> None:
    async def called(port: int, name: str) -> bytes:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(f"GET /metrics HTTP/1.1\r\nhost: {name}:{port}\r\nconnection: close\r\n\r\n".encode())
            return b"".join([piece async for piece in stream])

    async with scraped() as gateway:
        refused = await called(gateway.metrics_port, "rebound.example")
        assert refused.startswith(b"HTTP/1.1 403 ")
        assert b"operator" not in refused
    async with scraped(host="0.0.0.0") as gateway:  # there a scraper calls it as it likes
        assert (await called(gateway.metrics_port, "everywire.svc")).startswith(b"HTTP/1.1 200 ")


def test_a_port_that_others_reach_is_a_warning_unless_it_asks_for_a_token() -> None:
    def said(**metrics: Any) -> list[str]:
        return [event for event, _ in warnings(Config(metrics=MetricsConfig(**metrics)), {})]

    assert said(port=9090, host="0.0.0.0") == ["everybody who reaches metrics.port may read the metrics"]
    for nothing in ({"host": "0.0.0.0"}, {"port": 9090}, {"port": 9090, "host": "::", "token_file": "tokens"}):
        assert said(**nothing) == []


def test_it_needs_a_port_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"operator\.port .*and metrics\.port .*are both 9090"):
        load(file=None, environ={}, overrides={"operator.port": "9090", "metrics.port": "9090"})
    with pytest.raises(ConfigError, match=r"metrics\.host .*an address or a host name"):
        load(file=None, environ={}, overrides={"metrics.host": "unix:/run/metrics"})
