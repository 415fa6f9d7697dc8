"""The page that is read when something is wrong: each text that it shows is what the program says when it is made to."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from prometheus_client import CollectorRegistry
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.catalog.factories import load_spec
from gateway.cli.shadowing import check_shadowing
from gateway.client import UpgradeRefused, post, websocket
from gateway.client.conversations import SocketConversation
from gateway.client.questions import lmi
from gateway.config import Config, DrainConfig, LimitsConfig, ListenConfig, ModelConfig, OperatorConfig, WebSocketConfig
from gateway.config.problem import ConfigError
from gateway.errors import TransportLost
from gateway.gateway import Gateway
from gateway.telemetry.metrics import exposition
from gateway.testing import memory_gateway
from gateway.workers.states import State
from models.adapt import spec_of
from models.messages import Family, Part, Prompt
from models.session import Session
from models.spec import ModelSpec
from tests.docs.pages import ROOT, Block, Reader, skip_or_fail
from tests.docs.pages import _same as same
from tests.gateway.operator.operators import Operator

PAGE = "docs/howto/troubleshoot.md"
ELSEWHERE = {
    "curl": "a program",
    "x-accel-buffering: no": "test_every_token_leaves_by_itself_and_a_proxy_is_asked_not_to_gather",
    "stop_sequences": "test_a_text_that_may_be_a_stop_sequence_is_held_back",
    "event loop blocked": "tests/gateway/telemetry/test_loop_watch.py",
    "model given up": "test_a_model_that_fails_slowly_is_loaded_again_for_ever",
    "its process ended (SIGKILL)": "docs/howto/processes.md",
    "everywire_reserved_bytes": "test_a_body_is_counted_while_it_is_held",
    "limits.total_bytes": "a setting",
    "drained": "test_what_a_drain_cuts_is_drained_in_the_log",
}
"""Entries of the first columns that are no texts of answers: the test that makes them, or a description."""


def shown() -> list[str]:
    """The texts in the first columns of the page's tables."""
    cells = re.findall(r"^\| (.*?) \|", (ROOT / PAGE).read_text(encoding="utf-8"), re.MULTILINE)
    spans = [span for cell in cells for span in re.findall(r"`` (.+?) ``|`([^`]+)`", cell)]
    return [wide or narrow for wide, narrow in spans]


# -- models that do what makes it


async def waiting(prompt: Prompt) -> str:
    await trio.sleep_forever()
    return ""


async def endless(prompt: Prompt) -> AsyncIterator[str]:
    while True:
        yield "word " * 100


async def on_asyncio(prompt: Prompt) -> str:
    await asyncio.sleep(1)
    return ""


async def holding(x: np.ndarray) -> np.ndarray:
    await trio.sleep_forever()
    return x


async def failing(session: Session[Part, Part]) -> None:
    await session.receive()
    raise KeyError("a bug")


async def listening(session: Session[Part, Part]) -> None:
    async for _ in session:
        pass


@asynccontextmanager
async def broken() -> AsyncIterator[Any]:
    await trio.sleep(5)
    raise RuntimeError("no weights")
    yield waiting


@asynccontextmanager
async def broken_at_once() -> AsyncIterator[Any]:
    raise RuntimeError("no weights")
    yield waiting


def loading(loader: Any) -> ModelSpec:
    return spec_of(loader, "chat", family=Family.TEXT)


# -- the texts of answers


def error_of(body: Any) -> str:
    said = json.loads(bytes(body))
    return str(said.get("error") or said["message"])


async def answered(spec: ModelSpec, *, after: float = 0, model: str = "chat") -> str:
    async with memory_gateway([spec]) as house:
        await trio.sleep(after)
        return error_of((await house.client().lmi("x", model)).body)


async def refused(spec: ModelSpec, *streams: int) -> str:
    """The error of the last of a client's requests, while those before it run or wait."""
    async with memory_gateway([spec]) as house:
        peer = house.http2()
        for stream in streams:
            await peer.send(*post(stream, "/predictions/chat", lmi("x").body))
            await wait_all_tasks_blocked()
        status, _, body = await peer.read_answer(streams[-1])
        assert status == 503
        return error_of(body)


async def queue_is_full() -> str:
    return await refused(spec_of(waiting, "chat", capacity=1, queue=0), 1, 3)


async def queue_takes_too_long() -> str:
    return await refused(spec_of(waiting, "chat", capacity=1, queue_timeout=1, party_share=100), 1, 3)


async def share_is_held() -> str:
    return await refused(spec_of(waiting, "chat", capacity=2, queue=2, party_share=50), 1, 3, 5)


async def memory_is_full(party_share: int = 100, refuse: int = 75) -> str:
    limits = LimitsConfig(total_bytes=2**20, body=700_000, party_share=party_share, memory_refuse=refuse)
    config = Config(limits=limits)
    data = np.zeros(150_000, np.float32)
    async with memory_gateway([spec_of(holding, "chat")], config) as house, trio.open_nursery() as nursery:
        nursery.start_soon(house.client().infer, {"x": data}, "chat")
        await wait_all_tasks_blocked()
        answer = await house.client().infer({"x": data}, "chat")
        nursery.cancel_scope.cancel()
        return error_of(answer.body)
    raise AssertionError("the nursery has hidden an answer")


async def model_is_loading() -> str:
    return await answered(loading(broken), after=3)


async def model_is_restarting() -> str:
    return await answered(loading(broken))


async def model_was_given_up() -> str:
    return await answered(loading(broken_at_once), after=60)


async def server_drains() -> str:
    async with memory_gateway([spec_of(waiting, "chat")], Config(drain=DrainConfig(delay=5))) as house:
        house.gateway.begin_drain()
        return error_of((await house.client().lmi("x", "chat")).body)


async def no_such_model() -> str:
    return await answered(spec_of(waiting, "chat"), model="chatt")


async def other_family() -> str:
    async with memory_gateway([spec_of(waiting, "chat")]) as house:
        return error_of((await house.client().infer({"x": np.zeros(1)}, "chat")).body)


async def stands_still(model: Any, before: Any) -> str:
    """The state that the only live stream waits in; of two streams, that of the one that does not wait for the model."""
    async with memory_gateway([spec_of(model, "chat", capacity=1)]) as house:
        await before(house)
        await wait_all_tasks_blocked()
        streams = (await Operator(house.gateway).ask("GET", "/streams")).json["streams"]
        *others, last = sorted(str(one["waits_for"]) for one in streams)
        assert others in ([], ["model"])
        return last


async def one_asks(house: Any) -> None:
    await house.http1().send(*post(1, "/predictions/chat", lmi("x", stream=True, max_new_tokens=60000).body))


async def two_ask(house: Any) -> None:
    await one_asks(house)
    await wait_all_tasks_blocked()
    await one_asks(house)


async def one_is_silent(house: Any) -> None:
    house.kept = await house.conversation("chat")


async def gateway_on_asyncio(caplog: pytest.LogCaptureFixture) -> str:
    async with memory_gateway([spec_of(on_asyncio, "chat")]) as house:
        assert "incident" in error_of((await house.client().lmi("x", "chat")).body)
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.exc_info is not None
    return str(record.exc_info[1])


def package_is_shadowed(folder: Path) -> str:
    (folder / "models").mkdir()
    (folder / "models" / "mine.py").touch()
    said = check_shadowing(folder, ROOT)
    assert said is not None
    return said


async def port_is_taken() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gateway = Gateway(Config(listen=ListenConfig(port=taken.getsockname()[1])), [])
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(gateway.serve)
            except OSError as e:
                return str(e)
            nursery.cancel_scope.cancel()
    raise AssertionError("it listens")


def name_is_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "app.py").write_text("async def chat(prompt: str) -> str:\n    return prompt\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(ConfigError) as refused:
        load_spec("chat", ModelConfig(factory="app:chatt"))
    return f"{refused.value}"


async def not_ready() -> str:
    async with memory_gateway([loading(broken)]) as house:
        (reason,) = house.gateway.unready
        return reason.partition(": RuntimeError")[0]


async def plane_says(method: str, *, token: str = "", **headers: str) -> str:
    gateway = Gateway(Config(listen=ListenConfig(port=-1), operator=OperatorConfig(token=token)))
    answer = await Operator(gateway).ask(method, "/drain", **headers)
    assert answer.status == (401 if token else 403)
    return str(answer.json["error"])


async def drain_cuts() -> str:
    code, reason = await closed(spec_of(listening, "chat"), lambda house: house.gateway.begin_drain(1))
    assert code == 1001
    return reason


async def closed(
    spec: ModelSpec, after: Callable[[Any], object] = lambda house: None, config: Config | None = None
) -> tuple[int | None, str]:
    """The Close of a WebSocket that has sent a message."""
    async with memory_gateway([spec], config) as house:
        call: SocketConversation = await house.conversation("chat")
        await call.send("x")
        await wait_all_tasks_blocked()
        after(house)
        assert await call.receive() is None
        return call.code, call.reason


async def session_fails() -> str:
    code, reason = await closed(spec_of(failing, "chat"))
    assert code == 1011
    return reason


async def session_is_too_long() -> str:
    code, reason = await closed(spec_of(listening, "chat", timeout=1))
    assert code == 1011
    return reason


async def others_wait() -> str:
    async with trio.open_nursery() as nursery:

        def another(house: Any) -> None:
            nursery.start_soon(house.conversation, "chat")

        config = Config(websocket=WebSocketConfig(ping_interval=0))
        code, reason = await closed(spec_of(listening, "chat", capacity=1), another, config)
        nursery.cancel_scope.cancel()
    assert code == 1013
    return reason


async def model_is_silent() -> str:
    return await answered(spec_of(waiting, "chat", stall_timeout=10))


SAID: dict[str, Callable[[], Awaitable[str]]] = {
    "model 'chat' is busy: 1 sessions run and 0 wait (models.chat.capacity, models.chat.queue); try again later": queue_is_full,
    "model 'chat' is busy: no slot was free within 1 s (models.chat.queue_timeout); try again later": queue_takes_too_long,
    "model 'chat' is busy: this client has 1 of 2 slots and 1 of 2 places in the queue, and one party may have 50 percent of "
    "each (models.chat.party_share); try again later": share_is_held,
    "no memory for ... bytes: ... of ... bytes are in use (limits.total_bytes); try again later": memory_is_full,
    "no memory for ... bytes: ... of ... bytes are in use (limits.total_bytes), ... of them for this client: while more than half "
    "are in use, a client that holds limits.party_share percent gets no more; try again later": lambda: memory_is_full(12),
    "... of ... bytes are in use (limits.total_bytes): above 50 percent (limits.memory_refuse) nothing new begins; try again "
    "later": lambda: memory_is_full(refuse=50),
    "model 'chat' is loading; try again": model_is_loading,
    "model 'chat' is restarting; try again": model_is_restarting,
    "model 'chat' is unavailable: it crashed too often; the log says why": model_was_given_up,
    "the server is shutting down; try another": server_drains,
    "model 'chat' has sent nothing for 10 s (models.chat.stall_timeout)": model_is_silent,
    "no model 'chatt'; there are: chat": no_such_model,
    "model 'chat' speaks text and cannot answer with tensors: ask /v2/models/chat/generate": other_family,
    "room": lambda: stands_still(endless, one_asks),
    "slot": lambda: stands_still(waiting, two_ask),
    "model": lambda: stands_still(waiting, one_asks),
    "input": lambda: stands_still(listening, one_is_silent),
    "cannot listen on 127.0.0.1:...: Address already in use; listen.port or --port sets another": port_is_taken,
    "model 'chat' could not be loaded, and is tried again": not_ready,
    "this server is not called 'gateway.example': use an address or localhost, or set operator.hosts": lambda: plane_says(
        "GET", host="gateway.example"
    ),
    "a page of another site may not change anything here": lambda: plane_says("POST", origin="https://other.example"),
    "no token: send `Authorization: Bearer TOKEN` with the server's operator.token, or one of operator.token_file": (
        lambda: plane_says("GET", token="correct-horse-battery")
    ),
    "the server is shutting down and its drain deadline (drain.timeout) has passed": drain_cuts,
    "the model failed; incident ... in the server's log": session_fails,
    "the session's 1 s are over (models.chat.timeout)": session_is_too_long,
    "others wait: no message in either direction for 30 s (models.chat.idle_when_wanted)": others_wait,
}
FOUND = {
    "no running event loop",
    ".../models/ and everywire's own package 'models' have the same name, so that one would be imported in place of the other: "
    "rename yours, or start in another directory",
    "models.chat.factory: 'app' has no 'chatt'; it has: chat",
}
"""Those that need a fixture, in the tests below."""


@pytest.mark.parametrize("text", SAID)
async def test_what_the_page_shows_is_what_is_said(text: str, autojump_clock: MockClock) -> None:
    came = await SAID[text]()
    assert same(text, came), came


async def test_a_model_for_asyncio_says_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert await gateway_on_asyncio(caplog) in FOUND


def test_a_hidden_package_is_named(tmp_path: Path) -> None:
    came = package_is_shadowed(tmp_path)
    assert any(same(text, came) for text in FOUND), came


def test_a_wrong_name_is_answered_with_the_right_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_is_wrong(tmp_path, monkeypatch) in FOUND


def test_the_page_shows_no_other_text() -> None:
    assert sorted(set(shown())) == sorted({*SAID, *FOUND, *ELSEWHERE})
    assert [
        where for where in ELSEWHERE.values() if not (where in globals() or " " in where or (ROOT / where).exists())
    ] == []


# -- rows that show no text


async def test_every_token_leaves_by_itself_and_a_proxy_is_asked_not_to_gather(autojump_clock: MockClock) -> None:
    async def paced(prompt: Prompt) -> AsyncIterator[str]:
        for _ in range(3):
            yield "word "
            await trio.sleep(10)

    async with memory_gateway([spec_of(paced, "chat")]) as house:
        async with house.client().stream(lmi("x", "chat", stream=True)) as call:
            came = [(trio.current_time(), token) async for token in call]
        assert [token for _, token in came] == ["word "] * 3
        assert [at - came[0][0] for at, _ in came] == [0, 10, 20]
        assert (b"x-accel-buffering", b"no") in call.answer.headers


GATHERED = """# app.py
import os
from collections.abc import AsyncIterator

import trio

from models.messages import Prompt


async def told(prompt: Prompt) -> AsyncIterator[str]:
    patience, file = prompt.text.split()
    for number in ("one ", "two "):  # the first comes with the head
        yield number
        await trio.sleep(0.2)
    with trio.move_on_after(float(patience)) as scope:
        while not os.path.exists(file):
            await trio.sleep(0.01)
    yield "late" if scope.cancelled_caught else "seen"
"""


@pytest.mark.programs
@pytest.mark.parametrize(("path", "patience", "last"), [("/", 60, "seen"), ("/gathers/", 1, "late")])
def test_nginx_passes_tokens_on_unless_it_is_told_to_ignore_what_the_gateway_asks(
    path: str, patience: int, last: str, tmp_path: Path
) -> None:
    """It asks in HTTP/1.0 unless its file says otherwise, where nothing tells it where a piece of the answer ends."""
    skip_or_fail([] if shutil.which("nginx") else ["nginx"])
    with Reader(tmp_path) as reader:
        reader.follow([Block(language="python", text=GATHERED, line=0, section="")])
        reader.type("python -m gateway --model told=app:told", "", 0)
        folders = " ".join(f"{n}_temp_path {tmp_path}/{n};" for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        to = f"proxy_pass http://127.0.0.1:{reader.ports['8080']}/;"
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; pid {tmp_path}/pid; error_log stderr; events {{}} http {{ access_log off; {folders} server {{"
            f"listen 127.0.0.1:{reader.ports['8090']}; location / {{ {to} }}"
            f"location /gathers/ {{ proxy_ignore_headers X-Accel-Buffering; {to} }} }} }}"
        )
        nginx = subprocess.Popen(["nginx", "-c", tmp_path / "nginx.conf", "-p", tmp_path], stderr=subprocess.PIPE)
        try:
            url = f"http://127.0.0.1:{reader.ports['8090']}{path}predictions/told"
            asked = json.dumps({"inputs": f"{patience} {tmp_path}/seen", "stream": True}).encode()
            with opened(urllib.request.Request(url, asked)) as answer:
                _, second = answer.readline(), answer.readline()
                (tmp_path / "seen").touch()
                *_, end = answer.readlines()
            assert json.loads(second)["token"]["text"] == "two "
            assert json.loads(end)["generated_text"] == f"one two {last}"
        finally:
            nginx.terminate()
            nginx.communicate()


def opened(request: urllib.request.Request) -> Any:
    """The answer, as soon as the proxy listens."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return urllib.request.urlopen(request, timeout=60)
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


async def test_a_text_that_may_be_a_stop_sequence_is_held_back(autojump_clock: MockClock) -> None:
    async def spelled(prompt: Prompt) -> AsyncIterator[str]:
        for character in "ab":
            yield character
            await trio.sleep(10)

    async with memory_gateway([spec_of(spelled, "chat")]) as house:
        asked = lmi("x", "chat", stream=True, stop_sequences=["abc"], include_stop_str_in_output=False)
        async with house.client().stream(asked) as call:
            assert "".join([token async for token in call]) == "ab"
        assert trio.current_time() >= 20


async def test_a_model_that_fails_slowly_is_loaded_again_for_ever(autojump_clock: MockClock, caplog: Any) -> None:
    async with memory_gateway([loading(broken)]) as house:
        await trio.sleep(3600)
        status = house.gateway.models["chat"]
        assert status.state is not State.FAILED
        assert status.restarts > 100
    async with memory_gateway([loading(broken_at_once)]) as house:
        await trio.sleep(60)
        assert house.gateway.models["chat"].state is State.FAILED
    assert [record.getMessage() for record in caplog.records].count("model given up") == 1


async def test_a_body_is_counted_while_it_is_held(autojump_clock: MockClock) -> None:
    def reserved(registry: CollectorRegistry) -> float:
        found = re.search(rb"^everywire_reserved_bytes\S* ([\d.e+]+)$", exposition(registry)[1], re.MULTILINE)
        assert found is not None
        return float(found[1])

    async with memory_gateway([spec_of(holding, "chat")]) as house:
        with trio.move_on_after(1):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(house.client().infer, {"x": np.zeros(100_000, np.float32)}, "chat")
                await wait_all_tasks_blocked()
                assert reserved(house.gateway.registry) > 400_000
        await house.check_nothing_left()
        assert reserved(house.gateway.registry) == 0


async def test_what_a_drain_cuts_is_drained_in_the_log(autojump_clock: MockClock, caplog: Any) -> None:
    caplog.set_level("INFO", "gateway.exchange")
    await drain_cuts()
    (record,) = [record for record in caplog.records if record.name == "gateway.exchange"]
    assert record.ending == "drained"


async def test_a_connection_that_ends_without_a_close_is_what_libraries_call_1006(autojump_clock: MockClock) -> None:
    async with memory_gateway([spec_of(listening, "chat")]) as house:
        link = house.link()
        call = SocketConversation(await websocket(link.client, "/models/chat/invocations-bidirectional-stream"))
        link.cut()
        with pytest.raises(TransportLost, match="without a Close"):
            await call.receive()
        assert call.code is None


async def test_a_websocket_that_finds_no_slot_is_refused_before_it_begins(autojump_clock: MockClock) -> None:
    async with memory_gateway([spec_of(listening, "chat", capacity=1, queue=0)]) as house:
        first = await house.conversation("chat")
        with pytest.raises(UpgradeRefused) as refused:
            await house.conversation("chat")
        assert refused.value.status == 503
        await first.close()
