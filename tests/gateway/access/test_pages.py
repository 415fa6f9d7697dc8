"""Browsers: what a page of another site may ask, the names that the server answers to, and what CORS says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.config import AccessConfig, Config, LimitsConfig, ListenConfig
from gateway.core.route import WEBSOCKET, Needs
from gateway.serving.pages import Pages, is_preflight
from protocols.events import Head, Headers
from tests.gateway.access.asked import BEARER, KEY, WIRES, alice, asking, asks, config, keys_of, path_of, rows, said

EVERY_WIRE = pytest.mark.parametrize("wire", WIRES)
ROWS = rows()
ROOT = Path(__file__).parents[3]
JSON = (b"content-type", b"application/json")
EVIL = (b"origin", b"https://evil.example")
OWN = (b"origin", b"http://localhost")
APP = (b"origin", b"https://app.example")
FORBIDDEN = {"http": 403, "grpc": 7, "aws": (403, "AccessDeniedException")}
WRONG_HOST = {"http": 421, "grpc": 3, "aws": (421, "MisdirectedRequest")}
NO_MEDIA = {"http": 415, "aws": (415, "UnsupportedMediaType")}


def origins(*listed: str, **more: Any) -> Config:
    return config(origins=listed, **more)


@EVERY_WIRE
async def test_a_page_of_another_site_changes_nothing_and_opens_no_websocket(wire: str, tmp_path: Path) -> None:
    """With a right key too, on every row there is."""
    for chosen in (config(), config(keys_of(tmp_path, alice("scope=control")), origins=("https://app.example",))):
        async with asking(wire, chosen) as (gateway, ask):
            asked = 0
            for row in ROWS:
                if not asks(wire, row) or row.method == "GET":
                    continue
                for foreign in (
                    EVIL,
                    (b"origin", b"null"),
                    (b"sec-fetch-site", b"cross-site"),
                    (b"sec-fetch-site", b"same-site"),
                ):
                    text = said(row, await ask(row.method, path_of(row), (*BEARER, foreign, JSON)), FORBIDDEN)
                    assert "a page of another site may not ask for this" in text
                    asked += 1
            assert gateway.access.refusals["origin"] == asked > 80
            assert (await ask("POST", "/none", (*BEARER, EVIL, JSON)))[0] == 403
            assert (await ask("GET", "/v2", (*BEARER, EVIL)))[0] == 200  # which the browser does not let it read


@EVERY_WIRE
async def test_a_page_manages_models_with_json_alone_which_costs_it_a_preflight(wire: str) -> None:
    async with asking(wire, config()) as (gateway, ask):
        # no page speaks gRPC
        managing = [row for row in ROWS if row.needs is Needs.CONTROL and row.method != "GET" and row.kind is None]
        assert len(managing) > 12
        for row in managing:
            for page in (OWN, (b"sec-fetch-site", b"same-origin")):
                for kind in (
                    (),
                    ((b"content-type", b"text/plain"),),
                    ((b"content-type", b"application/x-www-form-urlencoded"),),
                ):
                    said(row, await ask(row.method, path_of(row), (page, *kind), b"{}"), NO_MEDIA)
                kind = ((b"content-type", b"application/JSON; charset=utf-8"),)
                assert (await ask(row.method, path_of(row), (page, *kind), b"{}"))[0] not in (403, 415)
            # curl says that it is a form
            form = ((b"content-type", b"application/x-www-form-urlencoded"), (b"sec-fetch-site", b"none"))
            for fields in ((), form[:1], form):
                assert (await ask(row.method, path_of(row), fields, b"{}"))[0] not in (403, 415)
        assert gateway.access.refusals["content-type"] == len(managing) * 6


@EVERY_WIRE
async def test_a_page_of_this_site_or_of_a_listed_one_calls_models(wire: str) -> None:
    async with asking(wire, origins("https://app.example", "http://localhost:3000")) as (_, ask):
        for page in (
            OWN,
            APP,
            (b"origin", b"http://localhost:3000"),
            (b"origin", b"http://localhost:80"),
            (b"origin", b"HTTPS://App.Example"),
        ):
            status, headers, body = await ask("POST", "/v1/completions", (page, JSON), b'{"model":"lm","prompt":"x"}')
            assert status == 200, (page, body)
            listed = page not in (OWN, (b"origin", b"http://localhost:80"))
            assert headers.get(b"access-control-allow-origin") == (page[1] if listed else None)
        for page in (
            (b"origin", b"https://localhost.example"),
            (b"origin", b"http://localhost:8080"),
            (b"origin", b"https://app.example:444"),
        ):
            assert (await ask("POST", "/v1/completions", (page, JSON), b"{}"))[0] == 403
        if wire in ("http1", "asgi/1.1"):
            for page, status in ((OWN, 101), (APP, 101), (EVIL, 403), ((b"sec-fetch-site", b"none"), 101)):
                assert (await ask(WEBSOCKET, "/v2/models/id/infer", (page,)))[0] == status


@EVERY_WIRE
async def test_without_origins_no_answer_speaks_of_cors(wire: str) -> None:
    async with asking(wire, config()) as (_, ask):
        preflight = (APP, (b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"content-type"))
        for method, path, fields in (
            ("GET", "/v2", (APP,)), ("OPTIONS", "/v2/models/id/infer", preflight), ("POST", "/none", (APP,)), ("GET", "/none", ()),
        ):  # fmt: skip
            _, headers, _ = await ask(method, path, fields)
            assert not [name for name in headers if name.startswith(b"access-control")]
            assert b"vary" not in headers


@EVERY_WIRE
async def test_cors_names_the_one_origin_and_never_credentials(wire: str, tmp_path: Path) -> None:
    file = keys_of(tmp_path, alice())
    for listed in (("https://app.example",), ("*",)):
        async with asking(wire, config(file, origins=listed)) as (_, ask):
            preflight = (
                APP,
                (b"access-control-request-method", b"POST"),
                (b"access-control-request-headers", b"authorization"),
            )
            status, headers, body = await ask("OPTIONS", "/v2/models/id/infer", preflight)  # without a key, as browsers ask
            assert (status, body) == (204, b"")
            assert headers[b"access-control-allow-origin"] == b"https://app.example"
            assert headers[b"access-control-allow-methods"] == b"OPTIONS, POST"
            assert headers[b"access-control-max-age"] == b"600"
            assert headers[b"vary"] == b"origin"
            assert headers[b"access-control-allow-headers"] == b"authorization"
            # each answer that a page may have to read, the refusals too
            for method, path, fields, expected in (
                ("GET", "/v2", BEARER, 200), ("GET", "/v2", (), 401), ("GET", "/none", BEARER, 404), ("POST", "/v2", BEARER, 405),
                ("POST", "/v2/models/id/infer", (*BEARER, JSON), 400), ("POST", "/v2/repository/index", (*BEARER, JSON), 403),
            ):  # fmt: skip
                status, headers, _ = await ask(method, path, (APP, *fields), b"{}" if method == "POST" else b"")
                assert (status, headers[b"access-control-allow-origin"]) == (expected, b"https://app.example")
                exposed = headers[b"access-control-expose-headers"].split(b", ")
                assert {b"x-request-id", b"x-client-request-id", b"retry-after"} <= set(exposed)
                assert b"access-control-allow-credentials" not in headers
            nobody = (EVIL if listed != ("*",) else (b"origin", b"null"), *preflight[1:])
            status, headers, _ = await ask("OPTIONS", "/v2/models/id/infer", nobody)
            assert (status, headers[b"vary"]) == (204, b"origin")
            assert not [name for name in headers if name.startswith(b"access-control")]
            assert (await ask("GET", "/v2", BEARER))[1][b"vary"] == b"origin"  # for caches, who is no page too


PREFLIGHT = (APP, (b"access-control-request-method", b"POST"))
CORS = b"access-control-"


@EVERY_WIRE
async def test_a_preflight_allows_the_fields_that_it_asks_for(wire: str) -> None:
    """Also those of OpenAI's client, of the AWS SDK and of the page itself: nobody can list them."""
    names = b"amz-sdk-invocation-id,amz-sdk-request,authorization,content-type,x-amz-user-agent,x-my-own,x-stainless-os"
    async with asking(wire, origins("https://app.example")) as (_, ask):
        for asked in (names, names.replace(b",", b", ")):
            fields = (*PREFLIGHT, (b"access-control-request-headers", asked))
            status, headers, _ = await ask("OPTIONS", "/v1/chat/completions", fields)
            assert status == 204
            assert headers[b"access-control-allow-headers"].replace(b" ", b"") == names
        _, headers, _ = await ask("OPTIONS", "/v1/chat/completions", PREFLIGHT)
        assert b"access-control-allow-headers" not in headers
        fields = (*PREFLIGHT, (b"access-control-request-headers", b'x-a, x b, x(c), "x-d", , x-\xe9, X-A, x-a'))
        _, headers, _ = await ask("OPTIONS", "/v1/chat/completions", fields)
        assert headers[b"access-control-allow-headers"] == b"x-a, X-A"
        fields = (EVIL, *PREFLIGHT[1:], (b"access-control-request-headers", b"x-a"))
        _, headers, _ = await ask("OPTIONS", "/v1/chat/completions", fields)
        assert not [name for name in headers if name.startswith(CORS)]


@EVERY_WIRE
async def test_a_preflight_may_ask_for_64_fields_in_4_kib(wire: str) -> None:
    async with asking(wire, origins("https://app.example")) as (_, ask):
        for asked, allowed in (
            ([b"x-%d" % n for n in range(64)], 64),
            ([b"x-%d" % n for n in range(65)], 64),
            ([b"x-%061d" % n for n in range(62)], 62),
            ([b"x-%096d" % n for n in range(64)], 41),  # 99 bytes each with the comma
            ([b"x" * 4097], 0),
        ):
            fields = (*PREFLIGHT, (b"access-control-request-headers", b",".join(asked)))
            status, headers, _ = await ask("OPTIONS", "/v1/chat/completions", fields)
            assert status == 204
            given = headers.get(b"access-control-allow-headers", b"")
            assert given.split(b", ") == asked[:allowed] if allowed else not given


@EVERY_WIRE
async def test_a_preflight_is_answered_so_that_the_page_can_read_why_its_request_is_refused(wire: str) -> None:
    """A browser sends no request whose preflight is refused, and tells the page nothing."""
    async with asking(wire, origins("https://app.example", hosts=("models.example",))) as (gateway, ask):
        for path, method in (("/none", b"POST"), ("/v1/models", b"PUT"), ("/v1/completions", b"POST"), ("/ping", b"GET")):
            preflight = (APP, (b"access-control-request-method", method), (b"access-control-request-headers", b"x-a"))
            status, headers, body = await ask("OPTIONS", path, preflight)  # by a name that is not in access.hosts, too
            assert (status, body, headers[b"access-control-allow-headers"]) == (204, b"", b"x-a")
            assert method in headers[b"access-control-allow-methods"].split(b", ")
            assert (await ask("OPTIONS", path, (EVIL, *preflight[1:])))[0] in (404, 421)
        gateway.server.draining, gateway.server.draining_since = True, 0.0
        assert (await ask("OPTIONS", "/v1/completions", preflight))[0] == 204
        gateway.server.draining = False
    async with asking(wire, origins("https://app.example")) as (_, ask):
        assert (await ask("OPTIONS", "/none", (EVIL, *PREFLIGHT[1:])))[0] == 404
        assert (await ask("OPTIONS", "/none", (APP,)))[0] == 404


@EVERY_WIRE
async def test_a_page_can_read_every_refusal(wire: str) -> None:
    chosen = origins("https://app.example", hosts=("models.example",))
    async with asking(wire, chosen) as (_, ask):
        status, headers, _ = await ask("POST", "/v1/completions", (APP, JSON), b"{}")
        assert (status, headers[b"access-control-allow-origin"]) == (421, b"https://app.example")
        assert not [name for name in (await ask("POST", "/v1/completions", (EVIL, JSON), b"{}"))[1] if name.startswith(CORS)]
    chosen = replace(origins("https://app.example"), limits=LimitsConfig(body=1024, text_json=1024, total_bytes=1 << 20))
    async with asking(wire, chosen) as (gateway, ask):
        for path, body, expected in (("/v1/completions", bytes(2000), 413), ("/v1/completions", b"{", 400)):
            status, headers, _ = await ask("POST", path, (APP, JSON), body)
            assert (status, headers[b"access-control-allow-origin"]) == (expected, b"https://app.example")
        gateway.server.draining, gateway.server.draining_since = True, 0.0
        status, headers, _ = await ask("POST", "/v1/completions", (APP, JSON), b"{}")
        assert (status, headers[b"access-control-allow-origin"]) == (503, b"https://app.example")


async def test_all_fields_that_the_gateway_sends_under_its_own_name_are_exposed() -> None:
    """CORS has no wildcard for them."""
    sent = set[str]()
    for file in [*ROOT.glob("gateway/**/*.py"), *ROOT.glob("protocols/**/*.py")]:
        if file.name != "pages.py":
            sent |= set(re.findall(r"\bx-everywire-[a-z-]+[a-z]\b", file.read_text(encoding="utf-8")))
    async with asking("http1", origins("https://app.example")) as (_, ask):
        _, headers, _ = await ask("GET", "/ping", (APP,))
    exposed = headers[b"access-control-expose-headers"].decode().split(", ")
    assert sent
    assert sent == {name for name in exposed if name.startswith("x-everywire-")}


@EVERY_WIRE
async def test_a_stream_has_the_fields_of_cors_on_its_head(wire: str) -> None:
    async with asking(wire, origins("https://app.example")) as (_, ask):
        asked = b'{"model":"lm","prompt":"x","stream":true}'
        status, headers, _ = await ask("POST", "/v1/completions", (APP, JSON), asked)
        assert (status, headers[b"access-control-allow-origin"]) == (200, b"https://app.example")


@EVERY_WIRE
async def test_only_a_host_that_is_listed_is_answered(wire: str) -> None:
    async with asking(wire, config(hosts=("models.example", "localhost"))) as (_, ask):
        assert (await ask("GET", "/ping"))[0] == 200
    async with asking(wire, config(hosts=("models.example", "[::1]"))) as (gateway, ask):
        health = 0
        for row in ROWS:
            if asks(wire, row):
                answer = await ask(row.method, path_of(row))
                if row.needs is Needs.NOTHING:
                    assert (answer[0], answer[1].get(b"grpc-status", b"13")) == (200, b"13")  # it lacks a message
                    health += 1
                    continue
                text = said(row, answer, WRONG_HOST)
                assert text == "this server is not called 'localhost' (access.hosts)"
        assert health == (8 if wire == "http2" else 4)
        assert (await ask("GET", "/none"))[0] == 421
        assert gateway.access.refusals["host"] > 40


@EVERY_WIRE
async def test_each_answer_says_that_it_is_what_it_says(wire: str, tmp_path: Path) -> None:
    async with asking(wire, config(keys_of(tmp_path, alice()))) as (_, ask):
        for method, path, fields in (
            ("GET", "/ping", ()), ("GET", "/", BEARER), ("GET", "/", (*BEARER, (b"accept", b"text/html"))), ("GET", "/none", BEARER),
            ("GET", "/v2", ()), ("OPTIONS", "/v2", BEARER), ("POST", "/v1/completions", (*BEARER, JSON)), ("HEAD", "/v2", BEARER),
        ):  # fmt: skip
            _, headers, _ = await ask(method, path, fields, b'{"model":"lm","prompt":"x"}' if method == "POST" else b"")
            assert headers[b"x-content-type-options"] == b"nosniff"


# -- the rules by themselves


def exchange(method: str = "POST", authority: str = "localhost", upgrade: bytes = b"", *headers: tuple[bytes, bytes]) -> Any:
    head = Head(method=method.encode(), target=b"/", authority=authority.encode(), headers=headers, upgrade=upgrade)
    return SimpleNamespace(
        request=head,
        fields=head.fields,
        header=head.fields.get,
        header_values=lambda name: [value for key, value in headers if key == name],
    )


def page(host: str, origin: str | None = None, *, hosts: tuple[str, ...] = (), listen: str = "127.0.0.1") -> bool:
    """True if a page may post to the server as `host`; by default its own page."""
    chosen = Config(listen=ListenConfig(host=listen), access=AccessConfig(hosts=hosts))
    return Pages(chosen).may_ask(exchange("POST", host, b"", (b"origin", (origin or f"http://{host}").encode())))


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:8080", "10.0.0.7"])
def test_on_loopback_a_page_calls_the_server_by_an_address_or_localhost(host: str) -> None:
    assert page(host)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", ""]
)
def test_on_loopback_a_name_that_somebody_gave_this_machine_is_not_its_own(host: str) -> None:
    assert not page(host)
    assert page(host, listen="0.0.0.0") is bool(host)
    if host:
        assert page(host, hosts=(host.partition(":")[0],))


def test_a_same_origin_request_without_an_origin_is_believed_where_the_host_may_be_called() -> None:
    for host, expected in (("localhost", True), ("evil.example", False)):
        asked = exchange("POST", host, b"", (b"sec-fetch-site", b"same-origin"))
        assert Pages(Config()).may_ask(asked) is expected


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://a", "a", True),
        ("http://a:80", "a", True),
        ("http://a", "a:80", True),
        ("https://a", "a:443", True),
        ("https://a", "a", True),  # TLS may end before us
        ("ws://a:8080", "a:8080", True),
        ("http://[::1]:1", "[::1]:1", True),
        ("http://a:81", "a", False),
        ("http://a", "a:81", False),
        ("https://a", "a:80", False),
        ("http://a.b", "a", False),
        ("http://a/", "a", False),
        ("http://x@a", "a", False),
        ("a", "a", False),
        ("null", "null", False),
        ("", "", False),
        ("http://", "", False),
    ],
)
def test_an_origin_is_the_servers_own_by_host_and_port(origin: str, host: str, same: bool) -> None:
    assert page(host, origin, listen="0.0.0.0") is same


def test_two_origins_have_to_be_allowed_both() -> None:
    rules = Pages(Config(listen=ListenConfig(host="0.0.0.0")))
    own, foreign = (b"origin", b"http://localhost"), (b"origin", b"http://evil.example")
    assert rules.may_ask(exchange("POST", "localhost", b"", own, own))
    assert not rules.may_ask(exchange("POST", "localhost", b"", own, foreign))


def test_a_preflight_is_options_with_an_origin_and_a_method_asked_for() -> None:
    wanted: Headers = ((b"origin", b"http://a"), (b"access-control-request-method", b"PUT"))
    assert is_preflight(exchange("OPTIONS", "a", b"", *wanted))
    assert not is_preflight(exchange("POST", "a", b"", *wanted))
    assert not is_preflight(exchange("OPTIONS", "a", b"", wanted[0]))
    assert not is_preflight(exchange("OPTIONS", "a", b"", wanted[1]))


async def test_a_client_that_is_no_browser_notices_nothing_of_keys_beside_pages(tmp_path: Path) -> None:
    chosen = replace(config(keys_of(tmp_path, alice())), listen=ListenConfig(port=-1, host="0.0.0.0"))
    async with asking("http1", chosen) as (gateway, ask):
        assert (await ask("GET", "/v2", ((b"x-api-key", KEY.encode()),)))[0] == 200
        assert not any(gateway.access.refusals.values())
