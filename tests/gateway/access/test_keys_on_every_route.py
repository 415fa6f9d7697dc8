"""The rule for routes, on each row that there is and on every wire: no key, a wrong one, not this model or scope, too many."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.core.exchange import Exchange
from gateway.core.route import WEBSOCKET, Needs, Row
from gateway.serving.access import ClientAccess
from protocols.events import Head, Request, Response
from tests.gateway.access.asked import (
    BEARER,
    KEY,
    NO_KEY,
    NOT_IN_SCOPE,
    NOT_THIS_MODEL,
    TOO_MANY,
    WIRES,
    WRONG,
    WRONG_KEY,
    alice,
    asking,
    asks,
    config,
    keys_of,
    path_of,
    rows,
    said,
)

ROWS = rows()
EVERY_WIRE = pytest.mark.parametrize("wire", WIRES)
WRONG_ONE = ((b"authorization", b"Bearer " + WRONG.encode()),)
_SERVICE, _HEALTH = "/inference.GRPCInferenceService", "/grpc.health.v1.Health"
OPEN_TO_GRPC = {f"{_SERVICE}/ServerLive", f"{_SERVICE}/ServerReady", f"{_HEALTH}/Check", f"{_HEALTH}/Watch"}
OPEN = {"/ping", "/health", "/v2/health/live", "/v2/health/ready", *OPEN_TO_GRPC}
NO_MESSAGE = b"13"
"""gRPC's code for a call that was let in, and has no message."""


async def door_is_closed(wire: str, file: str) -> int:
    """Asks for each row without a key and with a wrong one; how many of them that were. AssertionError where one opens."""
    asked = 0
    async with asking(wire, config(file)) as (gateway, ask):
        for row in ROWS:
            if not asks(wire, row):
                continue
            asked += 1
            answered = await ask(row.method, path_of(row))
            wrong = await ask(row.method, path_of(row), WRONG_ONE)
            if row.path in OPEN:
                assert answered[0] == wrong[0] == 200
                assert answered[1].get(b"grpc-status", NO_MESSAGE) == wrong[1].get(b"grpc-status", NO_MESSAGE) == NO_MESSAGE
                continue
            missing = said(row, answered, NO_KEY)
            assert missing == "this server needs a key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            assert said(row, wrong, WRONG_KEY) == "the key is unknown or has expired"
            if answered[0] == 401:
                assert answered[1][b"www-authenticate"] == b'Bearer realm="everywire"'
        assert gateway.budget.used == 0
        assert gateway.access.refusals["missing-key"] == gateway.access.refusals["wrong-key"] > 0
    return asked


@EVERY_WIRE
async def test_no_row_answers_who_shows_no_key_or_a_wrong_one_but_health(wire: str, tmp_path: Path) -> None:
    asked = await door_is_closed(wire, keys_of(tmp_path, alice()))
    assert asked == sum(asks(wire, row) for row in ROWS) > 40


@EVERY_WIRE
async def test_a_wire_that_does_not_ask_the_door_is_found(wire: str, tmp_path: Path, monkeypatch: Any) -> None:
    look, weak = ClientAccess.look, {"asgi/1.1": "http/1.1", "asgi/2": "http/2", "http1": "http/1.1", "http2": "http/2"}

    def planted(self: ClientAccess, exchange: Exchange, *arguments: Any) -> Any:
        return None if exchange.wire.name == weak[wire] else look(self, exchange, *arguments)

    monkeypatch.setattr(ClientAccess, "look", planted)
    with pytest.raises((AssertionError, ExceptionGroup)) as raised:
        await door_is_closed(wire, keys_of(tmp_path, alice()))
    assert isinstance(raised.value, AssertionError) or raised.group_contains(AssertionError)


@EVERY_WIRE
async def test_the_right_key_opens_each_row(wire: str, tmp_path: Path) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice("scope=control")))) as (gateway, ask):
        for row in ROWS:
            if asks(wire, row):
                status, headers, body = await ask(row.method, path_of(row), BEARER)
                assert status not in (401, 403, 421, 429), (row, body)
                assert headers.get(b"grpc-status") not in (b"7", b"8", b"16"), row
        assert not any(gateway.access.refusals.values())


@EVERY_WIRE
async def test_what_is_nowhere_is_not_told_to_who_has_no_key(wire: str, tmp_path: Path) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice()))) as (_, ask):
        for method, path in (
            ("GET", "/none"),
            ("POST", "/v1/none"),
            ("PUT", "/v2"),
            ("OPTIONS", "/v2"),
            ("GET", "/endpoints/x"),
        ):
            assert (await ask(method, path))[0] == 401
            assert (await ask(method, path, BEARER))[0] in (404, 405, 204)
        body = (await ask("POST", "/v1/none"))[2]
        assert b"invalid_api_key" in body  # in the words of its API


@EVERY_WIRE
async def test_a_key_that_may_call_models_manages_none(wire: str, tmp_path: Path) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice()))) as (gateway, ask):
        managing = [row for row in ROWS if row.needs is Needs.CONTROL and asks(wire, row)]
        for row in managing:
            text = said(row, await ask(row.method, path_of(row), BEARER), NOT_IN_SCOPE)
            assert text == "this key may call models but not manage them: that needs scope=control"
        assert gateway.access.refusals["scope"] == len(managing)
    paths = {row.path for row in managing}
    for part in ("load", "unload", "/v2/logging", "sharedmemory", "/v2/repository/index", "/models"):
        assert any(part in path for path in paths), part


@EVERY_WIRE
async def test_a_row_of_a_model_that_the_key_does_not_reach_is_refused_whether_it_is_there_or_not(
    wire: str, tmp_path: Path
) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice("models=other-*", "scope=control")))) as (_, ask):
        named = [row for row in ROWS if any(one in row.path for one in ("{name}", "{model}", "{endpoint}"))]
        for row in named:
            if asks(wire, row) and (row.dialect != "bidi" or "2" in wire):
                for path in (
                    path_of(row),
                    path_of(row).replace("/echo", "/none").replace("/id", "/none").replace("/lm", "/none"),
                ):
                    answered = await ask(row.method, path, BEARER)
                    if WEBSOCKET not in row.method or row.refuse is not None:
                        assert b"other" not in answered[2]
                    said(row, answered, NOT_THIS_MODEL)
    assert len(named) > 20


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (("POST", "/invocations", b"x"), 403),
        (("POST", "/invocations?model_name=id", b"{}"), 403),
        (("POST", "/v1/chat/completions", b'{"model":"id","messages":[]}'), 404),
        (("POST", "/v1/completions", b'{"model":"none","prompt":"x"}'), 404),
        (("POST", "/endpoints/both/invocations", b"x"), 403),
        (("POST", "/models", b'{"model_name":"id","url":"/nowhere/id"}'), 403),
        ((WEBSOCKET, "/invocations-bidirectional-stream", b""), 403),
        ((WEBSOCKET, "/any", b""), 403),
    ],
)
async def test_a_model_that_is_chosen_in_another_way_has_to_be_the_keys_too(
    call: tuple[str, str, bytes], status: int, tmp_path: Path
) -> None:
    method, path, body = call
    async with asking("http1", config(keys_of(tmp_path, alice("models=lm", "scope=control")))) as (gateway, ask):
        answered = await ask(method, path, BEARER, body)
        assert answered[0] == status, answered
        assert gateway.access.refusals["model"] == (0 if b"none" in body else 1)


async def test_a_request_that_names_no_model_has_the_only_one_that_its_key_reaches(tmp_path: Path) -> None:
    file = keys_of(tmp_path, alice("models=lm"))
    async with asking("http1", config(file)) as (_, ask):
        status, _, body = await ask("POST", "/v1/completions", BEARER, b'{"model":"tgi","prompt":"x"}')
        assert status == 200, body
        target = (b"x-amzn-sagemaker-target-variant", b"b")
        assert (await ask("POST", "/endpoints/both/invocations", (*BEARER, target), b'{"inputs":"x"}'))[0] == 200


@EVERY_WIRE
async def test_listings_have_what_the_key_reaches(wire: str, tmp_path: Path) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice("models=lm,e*o", "scope=control")))) as (_, ask):
        for method, path in (
            ("GET", "/"),
            ("GET", "/v1/models"),
            ("GET", "/v2/models"),
            ("GET", "/v2/models/stats"),
            ("POST", "/v2/repository/index"),
        ):
            status, _, body = await ask(method, path, BEARER)
            body = body.replace(b'"id":', b"")  # which is what OpenAI calls a name
            assert (status, b'"lm"' in body, b'"id"' in body) == (200, True, False), (path, body)
        missing = await ask("POST", "/v2/models/lm/versions/7/infer", BEARER, b"{}")
        unknown = await ask("GET", "/v2/models/enoo", BEARER)
        assert (missing[0], unknown[0], b"id" in unknown[2].partition(b"there are")[2]) == (404, 404, False)


@EVERY_WIRE
@pytest.mark.parametrize("limit", ["rate=1", "in_flight=1"])
async def test_too_many_is_said_on_each_row(wire: str, limit: str, tmp_path: Path, autojump_clock: Any) -> None:
    asked = [row for row in ROWS if asks(wire, row) and row.path not in OPEN]
    async with asking(wire, config(keys_of(tmp_path, alice("scope=control", limit)))) as (gateway, ask):
        gateway.server.chance = lambda: 0.0
        quota = gateway.server.parties.of_key("alice").quota
        assert quota is not None
        if limit == "rate=1":
            for _ in range(2):  # twice the rate at once
                assert (await ask("GET", "/v2", BEARER))[0] == 200
        else:
            quota.running += 1
        for row in asked:
            answered = await ask(row.method, path_of(row), BEARER)
            assert limit in said(row, answered, TOO_MANY)
            assert row.kind is not None or answered[1][b"retry-after"] == b"1"
        assert quota.running == (0 if limit == "rate=1" else 1)
        quota.running = 0
        await trio.sleep(1)
        assert (await ask("GET", "/v2", BEARER))[0] == 200
        assert gateway.access.refusals["rate" if limit == "rate=1" else "in-flight"] == len(asked)


WAYS: dict[str, Callable[[str], Any]] = {
    "bearer": lambda key: [(b"authorization", f"bearer  {key}".encode())],
    "x-api-key": lambda key: [(b"x-api-key", key.encode())],
    "basic": lambda key: [(b"authorization", b"Basic " + _base64(f"anybody:{key}"))],
    "twice the same": lambda key: [(b"authorization", f"Bearer {key}".encode()), (b"x-api-key", key.encode())],
}


def _base64(text: str) -> bytes:
    import base64

    return base64.b64encode(text.encode())


@EVERY_WIRE
@pytest.mark.parametrize("way", WAYS)
async def test_a_key_comes_in_one_of_these_ways(wire: str, way: str, tmp_path: Path) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice()))) as (_, ask):
        assert (await ask("GET", "/v2", WAYS[way](KEY)))[0] == 200
        assert (await ask("GET", "/v2", WAYS[way](WRONG)))[0] == 401
        assert (await ask("GET", f"/v2?api_key={KEY}"))[0] == 401
        status, _, body = await ask("GET", "/v2", [*WAYS[way](KEY), (b"x-api-key", WRONG.encode()), *WAYS[way](WRONG)])
        assert (status, b"two keys that differ" in body) == (400, True)


@pytest.mark.parametrize("wire", ["http1", "asgi/1.1"])
@pytest.mark.parametrize("path", ["/v2/models/id/infer", "/models/echo/invocations-bidirectional-stream", "/any"])
async def test_a_websocket_may_offer_its_key_as_a_subprotocol_and_the_real_one_is_answered(
    wire: str, path: str, tmp_path: Path
) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice()))) as (_, ask):
        for offers, chosen in (
            (f"everywire.key.{KEY}, real.v1, other", b"real.v1"),
            (f"real.v1,everywire.key.{KEY}", b"real.v1"),
            (f"everywire.key.{KEY}", None),
        ):
            status, headers, _ = await ask(WEBSOCKET, path, [(b"sec-websocket-protocol", offers.encode())])
            assert (status, headers.get(b"sec-websocket-protocol")) == (101, chosen)
        assert (await ask(WEBSOCKET, path, [(b"sec-websocket-protocol", b"real.v1")]))[0] == 401
        assert (await ask(WEBSOCKET, path, [(b"sec-websocket-protocol", f"everywire.key.{WRONG}".encode())]))[0] == 401


@EVERY_WIRE
async def test_health_is_open_and_more_where_that_is_said(wire: str, tmp_path: Path) -> None:
    opened = config(keys_of(tmp_path, alice()), open=("model-ready", "metadata"))
    async with asking(wire, opened) as (_, ask):
        for path in ("/ping", "/v2/health/live", "/v2/models/id/ready", "/v2", "/v2/models/id", "/v1/models"):
            assert (await ask("GET", path))[0] == (await ask("HEAD", path))[0] == 200
        for method, path in (("POST", "/v2/models/id/infer"), ("GET", "/v2/models/stats"), ("POST", "/ping")):
            assert (await ask(method, path))[0] == 401


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_connection_of_twenty_strangers_ends(wire: str, tmp_path: Path) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice()))) as (_, ask):
        memory = ask.memory
        peer = memory.http1() if wire == "http1" else memory.http2()
        for number in range(20):
            assert not peer.over, number
            assert (await ask("GET", "/v2", (), peer=peer))[0] == 401
        await trio.testing.wait_all_tasks_blocked()
        assert peer.over or peer.transport.hung_up()
        assert (await ask("GET", "/v2", BEARER))[0] == 200  # refusals close one connection and leave others alone


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_body_is_neither_asked_for_nor_paid_for_where_the_door_is_closed(wire: str, tmp_path: Path) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice()))) as (gateway, ask):
        peer = ask.memory.http1() if wire == "http1" else ask.memory.http2()
        before = gateway.budget.used
        fields = [(b"content-length", b"100000000"), (b"expect", b"100-continue")]
        head = Head(
            method=b"POST",
            target=b"/v2/models/id/infer",
            authority=b"localhost",
            headers=fields,
            content_length=100_000_000,
            expects_continue=True,
        )
        await peer.send(Request(stream=1, head=head))
        event = await peer.next_event()
        assert isinstance(event, Response)
        assert event.status == 401  # and not 100
        assert gateway.budget.used - before < 128 * 1024
        peer.close()


@EVERY_WIRE
async def test_nothing_of_a_key_is_told_but_its_name(wire: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    how: dict[str, Any] = {}
    spans = InMemorySpanExporter()
    if not wire.startswith("asgi"):
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(spans))
        how["tracer_provider"] = provider
    answers = []
    async with asking(wire, config(keys_of(tmp_path, alice("in_flight=5"))), **how) as (gateway, ask):
        for way in WAYS.values():
            for key in (KEY, WRONG):
                answers.append(await ask("GET", f"/v2?api_key={key}", way(key)))
                answers.append(await ask("POST", "/v2/models/none/infer", way(key), b"{}"))
        assert gateway.access.endings
        told = [repr(gateway.access.keys), repr(list(gateway.access.keys)), repr(gateway.config), repr(gateway.access)]
    told += [repr(answers), repr([record.__dict__ for record in caplog.records if record.name.startswith("gateway")])]
    told += [span.to_json() for span in spans.get_finished_spans()]
    for text in told:
        assert KEY not in text
        assert WRONG not in text
        assert _base64(f"anybody:{KEY}").decode() not in text
    lines = [record.__dict__ for record in caplog.records if record.name == "gateway.exchange"]
    assert {line.get("key") for line in lines} == {"alice", None}


def test_each_row_says_what_it_needs() -> None:
    """A new one is for callers with a key unless somebody thought of it: what is more open is named here."""
    open_rows = {(row.method, row.path) for row in ROWS if row.needs is Needs.NOTHING}
    of_http = {("GET", "/ping"), ("GET", "/health"), ("GET", "/v2/health/live"), ("GET", "/v2/health/ready")}
    assert open_rows == of_http | {("POST", path) for path in OPEN_TO_GRPC}
    signed = {row.path for row in ROWS if row.signed}
    assert signed == {row.path for row in ROWS if row.path.startswith("/endpoints/")}
    assert len(signed) == 5
    metadata: list[Row] = [row for row in ROWS if row.needs in (Needs.METADATA, Needs.MODEL_READY)]
    assert all(row.method == "GET" or row.kind is not None for row in metadata)
