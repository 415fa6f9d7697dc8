"""The playground of the operator plane: who may call models there, how many at once, and that a call is one like any other."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from starlette.types import ASGIApp, Message

from gateway.config import AccessConfig, Config, ListenConfig, OperatorConfig
from gateway.gateway import Gateway
from gateway.operator.access import Access
from gateway.operator.answers import GatewayAnswers
from gateway.operator.app import app_of, operator_app
from models.library.echo import Echo
from models.messages import Prompt, Token
from models.session import Session
from tests.gateway.access.asked import alice, keys_of
from tests.gateway.operator.operators import Operator

TOKEN = "correct-horse-battery"
TEXT = json.dumps({"inputs": "every wire", "stream": True}).encode()
PATH = "/play/predictions/shout"


async def shout(prompt: Prompt) -> AsyncIterator[str]:
    for word in prompt.text.split():
        yield word.upper() + " "


async def patient(prompt: Prompt) -> AsyncIterator[str]:
    yield "now "
    await trio.sleep_forever()


async def curious(session: Session[Prompt, Token]) -> None:
    """Says which fields of the request it sees."""
    async for _ in session:
        await session.send(Token(text=" ".join(session.call.headers)))


@asynccontextmanager
async def playing(config: Config | None = None, **operator: Any) -> AsyncIterator[tuple[Gateway, ASGIApp]]:
    """A gateway that serves, and its plane as an application."""
    chosen = replace(config or Config(), listen=ListenConfig(port=-1), operator=OperatorConfig(**operator))
    gateway = Gateway(chosen, models=[shout, patient, curious, Echo()])
    app = operator_app(gateway)
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        yield gateway, app
        nursery.cancel_scope.cancel()


class Call:
    """One call of an application, as an ASGI server makes it: what it is told, and what is told to it."""

    def __init__(self, nursery: trio.Nursery, app: ASGIApp, scope: dict[str, Any], *first: Message) -> None:
        self._give, given = trio.open_memory_channel[Message](100)
        take, self._told = trio.open_memory_channel[Message](100)
        for message in first:
            self._give.send_nowait(message)
        nursery.start_soon(app, scope, given.receive, take.send)

    async def told(self) -> Message:
        with trio.fail_after(5):
            message = await self._told.receive()
        return message

    def give(self, **message: Any) -> None:
        self._give.send_nowait(message)


def text_call(nursery: trio.Nursery, app: ASGIApp, model: str = "patient", **headers: str) -> Call:
    scope = Operator(app).scope("POST", f"/play/predictions/{model}", headers)
    return Call(nursery, app, scope, {"type": "http.request", "body": TEXT, "more_body": False})


def socket_call(nursery: trio.Nursery, app: ASGIApp, *offered: str, **headers: str) -> Call:
    path = "/play/models/Echo/invocations-bidirectional-stream"
    fields = {
        "connection": "upgrade", "upgrade": "websocket", "sec_websocket_version": "13",
        "sec_websocket_key": "dGhlIHNhbXBsZSBub25jZQ==", "sec_websocket_protocol": ", ".join(offered), **headers,
    }  # fmt: skip
    scope = {
        **Operator(app).scope("GET", path, fields),
        "type": "websocket",
        "scheme": "ws",
        "subprotocols": list(offered),
        "extensions": {"websocket.http.response": {}},
    }
    del scope["method"]
    return Call(nursery, app, scope, {"type": "websocket.connect"})


async def ticket(app: ASGIApp, **headers: str) -> str:
    answer = await Operator(app, **headers).ask("POST", "/play/ticket", {})
    assert answer.status == 200
    return f"everywire.ticket.{answer.json['ticket']}"


async def refused(call: Call) -> tuple[int, str]:
    """The status and the text with which a WebSocket is refused."""
    head, body = await call.told(), await call.told()
    assert head["type"] == "websocket.http.response.start"
    return head["status"], json.loads(body["body"])["error"]


async def test_a_call_is_answered_and_counted_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.exchange")
    async with playing() as (gateway, app):
        answer = await Operator(app).ask("POST", PATH, TEXT)
        assert answer.status == 200
        tokens = [json.loads(line)["token"]["text"] for line in answer.body.splitlines()]
        assert "".join(tokens) == "EVERY WIRE "
        assert gateway.counts().endings["complete"] == 1
        await trio.testing.wait_all_tasks_blocked()
        (line,) = [record for record in caplog.records if getattr(record, "model", "") == "shout"]
        assert (line.id, line.wire, line.dialect) == (answer.headers["x-request-id"], "http/1.1", "lmi")  # type: ignore[attr-defined]


async def test_a_browser_that_leaves_is_a_client_that_has_cancelled() -> None:
    async with playing() as (gateway, app), trio.open_nursery() as nursery:
        call = text_call(nursery, app)
        assert (await call.told())["status"] == 200
        assert b"now " in (await call.told())["body"]
        call.give(type="http.disconnect")
        with trio.fail_after(5):
            while gateway.live:
                await trio.testing.wait_all_tasks_blocked()
        assert gateway.counts().endings["cancelled-by-client"] == 1


async def test_it_wants_the_planes_token_and_no_key(tmp_path: Path) -> None:
    """The token stands above keys; and no model is shown it."""
    keys = Config(access=AccessConfig(keys_file=keys_of(tmp_path, alice())))
    async with playing(keys, token=TOKEN) as (_, app):
        assert (await Operator(app).ask("POST", PATH, TEXT)).status == 401
        assert (await Operator(app).ask("POST", "/play/ticket", {})).status == 401
        bearer = Operator(app, authorization=f"Bearer {TOKEN}")
        assert (await bearer.ask("POST", PATH, TEXT)).status == 200
        async with trio.open_nursery() as nursery:
            call = socket_call(nursery, app, "everywire.play", await ticket(app, authorization=f"Bearer {TOKEN}"))
            assert (await call.told())["type"] == "websocket.accept"
            call.give(type="websocket.disconnect", code=1000)


async def test_a_model_never_sees_the_token_nor_the_page() -> None:
    """Not even where credentials are passed on to models."""
    async with playing(Config(access=AccessConfig(pass_credentials=True)), token=TOKEN) as (_, app):
        page = {"authorization": f"Bearer {TOKEN}", "cookie": "a=b", "origin": "http://127.0.0.1:9000", "x_kept": "1"}
        seen = (await Operator(app, **page).ask("POST", "/play/predictions/curious", TEXT)).body.decode()
        assert "x-kept" in seen
        assert not [name for name in ("authorization", "cookie", "origin") if name in seen]


async def test_a_page_of_another_site_calls_nothing() -> None:
    async with playing(Config(access=AccessConfig(origins=("https://elsewhere.example",)))) as (_, app):
        elsewhere = {"origin": "https://elsewhere.example"}
        assert (await Operator(app, **elsewhere).ask("POST", PATH, TEXT)).status == 403
        assert (await Operator(app, **elsewhere).ask("POST", "/play/ticket", {})).status == 403
        assert (await Operator(app, host="rebound.example").ask("GET", "/play/v2")).status == 403
        seen = await Operator(app, **elsewhere).ask("GET", "/play/v2")
        assert not [name for name in seen.headers if name.startswith("access-control-")]
        async with trio.open_nursery() as nursery:
            call = socket_call(nursery, app, "everywire.play", await ticket(app), **elsewhere)
            assert (await refused(call))[0] == 403


async def test_a_ticket_opens_one_websocket() -> None:
    async with playing() as (gateway, app), trio.open_nursery() as nursery:
        word = await ticket(app)
        call = socket_call(nursery, app, "everywire.play", word)
        accepted = await call.told()
        assert (accepted["type"], accepted["subprotocol"]) == ("websocket.accept", "everywire.play")
        (stream,) = gateway.live
        assert json.loads((await call.told())["text"]) == {"stream": stream.id}
        call.give(type="websocket.receive", text="every wire")
        assert (await call.told())["text"] == "every wire"
        call.give(type="websocket.receive", text="everywire.play.end")
        assert (await call.told())["type"] == "websocket.close"
        status, said = await refused(socket_call(nursery, app, "everywire.play", word))
        assert (status, "POST /play/ticket" in said) == (401, True)


async def test_a_ticket_that_is_wrong_or_missing_or_old_opens_none(autojump_clock: Any) -> None:
    async with playing(token=TOKEN) as (_, app), trio.open_nursery() as nursery:
        word = await ticket(app, authorization=f"Bearer {TOKEN}")
        await trio.sleep(10.1)
        for offered in (["everywire.play", word], ["everywire.play"], ["everywire.ticket."], ["everywire.ticket.guess"]):
            assert (await refused(socket_call(nursery, app, *offered)))[0] == 401


async def test_tickets_are_bounded_and_make_room_as_they_grow_old(autojump_clock: Any) -> None:
    async with playing() as (_, app):
        for _ in range(16):
            await ticket(app)
        answer = await Operator(app).ask("POST", "/play/ticket", {})
        assert (answer.status, "16 tickets" in answer.json["error"]) == (429, True)
        await trio.sleep(10.1)
        await ticket(app)


async def test_the_fifth_at_once_is_refused_with_the_reason() -> None:
    async with playing() as (_, app), trio.open_nursery() as nursery:
        word = await ticket(app)
        calls = [text_call(nursery, app) for _ in range(4)]
        for call in calls:
            assert (await call.told())["status"] == 200
        for path in (PATH, "/play/ticket"):
            answer = await Operator(app).ask("POST", path, TEXT if path == PATH else {})
            assert (answer.status, answer.json["code"]) == (429, "TooManyRequests")
            assert "4 calls of the playground run" in answer.json["error"]
        assert (await refused(socket_call(nursery, app, "everywire.play", word)))[0] == 429
        calls[0].give(type="http.disconnect")
        with trio.fail_after(5):
            while (await Operator(app).ask("POST", PATH, TEXT)).status == 429:
                await trio.testing.wait_all_tasks_blocked()
        for call in calls[1:]:
            call.give(type="http.disconnect")


async def test_where_everybody_reaches_the_plane_without_a_token_there_is_none() -> None:
    async with playing(host="0.0.0.0", open=True) as (_, app):
        for method, path in (("POST", PATH), ("GET", "/play/v2"), ("POST", "/play/ticket")):
            answer = await Operator(app).ask(method, path, {} if method == "POST" else b"")
            assert (answer.status, "operator.token_file" in answer.json["error"]) == (404, True)
    async with playing(host="0.0.0.0", token=TOKEN) as (_, app):
        assert (await Operator(app, authorization=f"Bearer {TOKEN}").ask("POST", PATH, TEXT)).status == 200


async def test_where_the_process_of_the_plane_runs_no_models_it_says_so() -> None:
    answers = GatewayAnswers(Gateway(Config(listen=ListenConfig(port=-1)), models=[shout]))
    answers.play = None  # as a parent of several fronts has it
    app = app_of(answers, Access(OperatorConfig()))
    for method, path in (("POST", PATH), ("GET", "/play/v2"), ("POST", "/play/ticket")):
        answer = await Operator(app).ask(method, path, {} if method == "POST" else b"")
        assert (answer.status, "listen.processes" in answer.json["error"]) == (409, True)


async def test_the_gateway_that_does_not_serve_yet_says_so() -> None:
    app = operator_app(Gateway(Config(listen=ListenConfig(port=-1)), models=[shout]))
    answer = await Operator(app).ask("POST", PATH, TEXT)
    assert (answer.status, "not running" in answer.json["error"]) == (503, True)
