"""Access to the management of a gateway: by token if one is required; if not, pages in a browser are refused."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.config import Config, ListenConfig, OperatorConfig
from gateway.config.problem import ConfigError
from gateway.gateway import Gateway
from gateway.operator.app import operator_app
from tests.gateway.operator.operators import Operator

TOKEN, OTHER = "correct-horse-battery", "staple-of-our-own"


def plane(**chosen: Any) -> Operator:
    return Operator(Gateway(Config(listen=ListenConfig(port=-1), operator=OperatorConfig(**chosen))))


async def a_second_later(operator: Operator) -> None:
    """The timer of its gateway, which does not run here, has looked at the files."""
    assert operator.gateway is not None
    await operator.gateway.timer.read_changed()


def bearer(token: str) -> str:
    return f"Bearer {token}"


# -- tokens


@pytest.mark.parametrize(
    ("method", "target"), [("GET", "/models"), ("POST", "/drain"), ("PUT", "/log"), ("GET", "/streams")]
)
async def test_where_a_token_is_set_nothing_is_told_or_done_without_it(method: str, target: str, caplog: Any) -> None:
    operator = plane(token=TOKEN)
    for sent, said in (
        ({}, "no token"),
        ({"authorization": bearer(TOKEN + "x")}, "a wrong token"),
        ({"authorization": bearer(TOKEN[:-1])}, "a wrong token"),
        ({"authorization": f"Basic {TOKEN}"}, "a wrong token"),
        ({"authorization": bearer("")}, "a wrong token"),
        ({"authorization": "Bearer \u00e9"}, "a wrong token"),
    ):
        answer = await operator.ask(method, target, **sent)
        assert answer.status == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json["error"].startswith(f"{said}: send `Authorization: Bearer TOKEN`")
    assert not any(TOKEN in repr(record.__dict__) for record in caplog.records)
    assert [record.__dict__["reason"] for record in caplog.records] == ["no token", *["a wrong token"] * 5]


async def test_callers_that_are_refused_write_few_lines_and_a_sum(autojump_clock: MockClock, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "gateway")
    operator = plane(token=TOKEN)
    for _ in range(50):
        assert (await operator.ask("GET", "/metrics")).status == 401
    assert len(caplog.records) == 20
    await trio.sleep(10)
    assert operator.gateway is not None
    for look in operator.gateway.timer.beside:
        await look()
    assert [(r.of, r.count, r.levelname) for r in caplog.records[20:]] == [("operator request refused", 30, "WARNING")]


async def test_callers_that_are_let_in_write_few_lines_too(autojump_clock: MockClock, caplog: Any) -> None:
    operator = plane(token=TOKEN)
    caplog.set_level(logging.INFO, "gateway")
    for _ in range(50):
        await operator.ask("POST", "/streams/nothing/end", authorization=bearer(TOKEN))
    assert [record.getMessage() for record in caplog.records] == ["operator request"] * 20


@pytest.mark.parametrize("sent", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN}"])
async def test_a_token_opens(sent: str) -> None:
    assert await plane(token=TOKEN).get("/log", authorization=sent)


async def test_health_has_no_token_and_says_why_only_to_who_has_one() -> None:
    operator = plane(token=TOKEN)
    assert (await operator.ask("GET", "/health/live")).json == {"live": True}
    assert (await operator.ask("GET", "/health/ready")).json == {"ready": False}
    told = await operator.ask("GET", "/health/ready", authorization=bearer(TOKEN))
    assert told.json == {"ready": False, "reasons": ["nothing is served yet"]}


async def test_who_has_a_token_may_call_the_server_as_he_likes_and_from_a_page() -> None:
    operator = plane(token=TOKEN)
    sent = {"authorization": bearer(TOKEN), "host": "models.example", "origin": "https://console.example"}
    assert (await operator.ask("PUT", "/log", {"level": "info"}, **sent)).status == 200


async def test_each_token_of_a_file_opens_and_the_file_is_read_again_when_it_has_changed(
    tmp_path: Path, caplog: Any
) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# ours\n{TOKEN}\n\n")
    operator = plane(token_file=str(file))
    assert await operator.get("/log", authorization=bearer(TOKEN))
    file.write_text(f"{OTHER}\r\n{TOKEN}x\n")
    await a_second_later(operator)
    for token, status in ((OTHER, 200), (f"{TOKEN}x", 200), (TOKEN, 401), ("# ours", 401)):
        assert (await operator.ask("GET", "/log", authorization=bearer(token))).status == status


@pytest.mark.parametrize("spoiled", ["", "# none\n", "short\n", "with a space in it\n", None, "x" * 70_000])
async def test_a_file_that_is_spoiled_later_opens_to_nobody_else(tmp_path: Path, spoiled: str | None, caplog: Any) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKEN)
    operator = plane(token_file=str(file))
    if spoiled is None:
        file.unlink()
    else:
        file.write_text(spoiled)
        os.utime(file, ns=(1, 1))
    await a_second_later(operator)
    assert (await operator.ask("GET", "/log")).status == 401
    assert (await operator.ask("GET", "/log", authorization=bearer(spoiled or "x"))).status == 401
    assert await operator.get("/log", authorization=bearer(TOKEN))
    assert "operator tokens cannot be read: the tokens read last stay valid" in {record.message for record in caplog.records}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "tokens' cannot be read: No such file"),
        ("", "has no token: write one a line"),
        ("short", "has a token that is not 16 or more"),
    ],
)
def test_a_file_without_tokens_is_no_configuration(tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    gateway = Gateway(Config(listen=ListenConfig(port=-1), operator=OperatorConfig(token_file=str(file))))
    with pytest.raises(ConfigError, match=r"operator\.token_file: ") as raised:
        operator_app(gateway)
    assert why in str(raised.value)


def test_an_embedder_is_told_too_that_everyone_could_reach_it() -> None:
    with pytest.raises(ConfigError, match=r"operator\.host is '0\.0\.0\.0'.*no token is demanded"):
        Gateway(Config(operator=OperatorConfig(host="0.0.0.0", port=0)))


# -- browsers


async def test_a_rebound_name_learns_nothing_from_health_either(caplog: Any) -> None:
    operator = plane()
    assert (await operator.ask("GET", "/health/ready")).json == {"ready": False, "reasons": ["nothing is served yet"]}
    assert (await operator.ask("GET", "/health/ready", host="evil.example")).json == {"ready": False}
    assert caplog.records == []


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:9000",
        "localhost:9000",
        "LocalHost",
        "[::1]:9000",
        "10.0.0.7:1",
        "ops.internal",
        "box:9000",
        "localhost.",
    ],
)
async def test_it_is_called_by_an_address_localhost_or_a_name_of_the_configuration(host: str) -> None:
    assert await plane(host="localhost", hosts=("ops.internal", "Box")).get("/log", host=host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example:9000", "localhost.evil.example", "", "user@localhost", "[::1", "127.0.0.1 x"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_rebound_name_is_refused(method: str, host: str) -> None:
    answer = await plane().ask(method, "/drain", host=host)
    assert answer.status == 403
    assert "operator.hosts" in answer.json["error"]


FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "http://127.0.0.1:8000"},  # another port is another site
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://["},
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
]


@pytest.mark.parametrize("sent", FOREIGN)
async def test_a_page_of_another_site_changes_nothing(sent: dict[str, str]) -> None:
    operator = plane()
    for method, target in (("POST", "/drain"), ("POST", "/models/x/unload"), ("PUT", "/log")):
        answer = await operator.ask(method, target, **sent)
        assert (answer.status, answer.json["error"]) == (403, "a page of another site may not change anything here")


@pytest.mark.parametrize("sent", [{}, {"origin": "http://127.0.0.1:9000"}, {"sec_fetch_site": "same-origin"}])
async def test_its_own_page_and_programs_may(sent: dict[str, str]) -> None:
    assert (await plane().ask("PUT", "/log", {"level": "info"}, **sent)).status == 200


async def test_no_answer_says_that_another_site_may_read_it() -> None:
    answer = await plane().ask("GET", "/log", origin="https://evil.example")
    assert not any(name.startswith("access-control") for name in answer.headers)
