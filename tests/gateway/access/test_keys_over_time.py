"""Keys come and go while the server runs: another file, a date that has passed, and what goes on for a while."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway import client
from gateway.client import Peer, post
from gateway.config.problem import ConfigError
from gateway.errors import Ending
from gateway.gateway import Gateway
from gateway.keys import line_of
from gateway.testing import MemoryGateway, memory_gateway
from models.adapt import spec_of
from models.messages import Family, Prompt, Token
from models.session import Session
from protocols.events import Close, Data, End, Head, Request, Response
from tests.gateway.access.asked import BEARER, KEY, OTHER, alice, config, keys_of, models

DAY = 86400.0
NEW_YEAR = 1798761600.0  # 2027-01-01T00:00:00Z


@asynccontextmanager
async def served(file: str, *specs: Any, **access: Any) -> AsyncIterator[MemoryGateway]:
    """A gateway whose wall clock is Trio's, from the last hour of 2026 on."""
    async with memory_gateway(
        [*models(), *specs], config(file, **access), wall_clock=lambda: NEW_YEAR - 3600 + trio.current_time()
    ) as memory:
        yield memory


async def status(peer: Peer, stream: int, key: str = KEY, path: str = "/v2") -> int:
    head = Head(
        method=b"GET", target=path.encode(), authority=b"localhost", headers=((b"authorization", b"Bearer " + key.encode()),)
    )
    await peer.send(Request(stream=stream, head=head), End(stream=stream))
    return (await peer.read_answer(stream))[0]


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_key_that_is_gone_opens_no_more_on_a_connection_that_is_kept(
    wire: str, tmp_path: Path, autojump_clock: Any, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    file = keys_of(tmp_path, alice(), alice(key=OTHER))
    async with served(file) as memory:
        peer = memory.http1() if wire == "http1" else memory.http2()
        stream = iter(range(1, 100) if wire == "http1" else range(1, 100, 2))
        for _ in range(3):
            assert await status(peer, next(stream)) == 200
        keys_of(tmp_path, alice(key=OTHER))
        await trio.sleep(1.5)
        assert await status(peer, next(stream)) == 401
        assert await status(peer, next(stream), OTHER) == 200
        keys_of(tmp_path, alice(), "# and more")
        await trio.sleep(1.5)
        assert await status(peer, next(stream)) == 200
        assert await status(peer, next(stream), OTHER) == 401
    assert [record.__dict__["keys"] for record in caplog.records if record.message == "keys were read again"] == [1, 1]


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_key_opens_until_its_date_is_over_on_a_kept_connection_too(
    wire: str, tmp_path: Path, autojump_clock: Any
) -> None:
    async with served(keys_of(tmp_path, alice("expires=2026-12-31"))) as memory:
        kept = memory.http1() if wire == "http1" else memory.http2()
        assert await status(kept, 1) == 200
        await trio.sleep(3590)
        kept = memory.http1() if wire == "http1" else memory.http2()
        assert await status(kept, 1) == 200
        await trio.sleep(12)
        assert await status(kept, 3 if wire == "http2" else 2) == 401
        assert await status(memory.http1(), 1) == 401


def spoil(file: Path, data: bytes) -> None:
    file.write_bytes(data)


@pytest.mark.parametrize("spoiled", [b"alice\n", b"\xff", None, b"#" * 2_000_000])
async def test_a_file_that_is_spoiled_leaves_the_keys_that_there_were_and_the_log_says_why_once(
    spoiled: bytes | None, tmp_path: Path, autojump_clock: Any, caplog: Any
) -> None:
    file = Path(keys_of(tmp_path, alice()))
    async with served(str(file)) as memory:
        peer = memory.http1()
        assert await status(peer, 1) == 200
        if spoiled is None:
            os.unlink(file)
        else:
            spoil(file, spoiled)
        await trio.sleep(5)
        assert await status(peer, 2) == 200
        errors = [record for record in caplog.records if record.levelname == "ERROR"]
        assert [record.message for record in errors] == ["keys cannot be read: the keys read last stay valid"]
        keys_of(tmp_path, alice(key=OTHER))
        await trio.sleep(1.5)
        assert await status(peer, 3) == 401
        assert await status(peer, 4, OTHER) == 200


async def test_an_empty_file_locks_everybody_out_and_the_log_says_so(
    tmp_path: Path, autojump_clock: Any, caplog: Any
) -> None:
    file = Path(keys_of(tmp_path, alice()))
    async with served(str(file)) as memory:
        spoil(file, b"# nobody\n")
        await trio.sleep(1.5)
        assert await status(memory.http1(), 1) == 401
    assert "the key file has no valid key" in {record.message for record in caplog.records}


async def hold(session: Session[Prompt, Token]) -> None:
    await session.receive()
    await session.send(Token(text="x"))
    await trio.sleep_forever()


def held() -> Any:
    return spec_of(hold, "held", family=Family.TEXT)


@pytest.mark.parametrize("grace", [30.0, 0.0])
@pytest.mark.parametrize("how", ["gone", "over"])
async def test_what_a_key_has_begun_goes_on_for_the_grace_and_then_ends_in_its_own_words(
    grace: float, how: str, tmp_path: Path, autojump_clock: Any
) -> None:
    attributes = ["expires=2026-12-31"] if how == "over" else []
    ended: list[tuple[str, Ending | None]] = []
    async with served(keys_of(tmp_path, alice(*attributes), alice(key=OTHER)), held(), grace=grace) as memory:
        with memory.gateway.watched(lambda e: ended.append((e.key.name if e.key else "", e.ending))):
            if how == "over":
                await trio.sleep(3598)
            peers = []
            for key in (KEY, OTHER):
                peer = memory.http1()
                fields = ((b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json"))
                await peer.send(*post(1, "/v2/models/held/generate_stream", b'{"text_input":"x"}', fields))
                event = await peer.next_event()
                assert isinstance(event, Response)
                assert event.status == 200
                peers.append(peer)
            socket = await websocket(memory)
            if how == "gone":
                keys_of(tmp_path, alice(key=OTHER))
            await trio.sleep(max(grace - 1, 0))
            assert len(memory.gateway.live) == 3
            quota = memory.gateway.server.parties.of_key("alice").quota
            assert quota is not None
            assert quota.running == 3
            await trio.sleep(5)
            assert len(memory.gateway.live) == 1  # the other key of the same name is there still
            assert quota.running == 1
            said = b""
            while not isinstance(event := await peers[0].next_event(), End):
                if isinstance(event, Data):
                    said += b"".join(bytes(piece) for piece in event.buffers)
            assert b"the key is unknown or has expired" in said
            closed = await socket.next_event()
            while not isinstance(closed, Close):
                closed = await socket.next_event()
            assert (closed.code, closed.reason) == (1008, "the key is unknown or has expired")
            for peer in (*peers, socket):
                peer.close()
            await trio.testing.wait_all_tasks_blocked()
    assert ended[:2] == [("alice", Ending.REFUSED)] * 2


async def websocket(memory: MemoryGateway) -> Peer:
    return await client.websocket(memory.connect(), "/models/echo/invocations-bidirectional-stream", headers=BEARER)


async def test_places_in_flight_are_given_back_at_the_end_whatever_that_is(tmp_path: Path, autojump_clock: Any) -> None:
    async with served(keys_of(tmp_path, alice("in_flight=2")), held()) as memory:
        quota = memory.gateway.server.parties.of_key("alice").quota
        assert quota is not None
        for leave in range(3):
            peers = [memory.http1() for _ in range(2)]
            fields = (*BEARER, (b"content-type", b"application/json"))
            for peer in peers:
                await peer.send(*post(1, "/v2/models/held/generate_stream", b'{"text_input":"x"}', fields))
                await peer.next_event()
            assert await status(memory.http1(), 1) == 429
            assert quota.running == 2, leave
            for peer in peers:
                peer.close()
            await trio.testing.wait_all_tasks_blocked()
            assert quota.running == 0
        assert await status(memory.http1(), 1) == 200
        await trio.testing.wait_all_tasks_blocked()
        assert quota.running == 0
        assert memory.gateway.access.endings["alice", Ending.CANCELLED] == 6


async def test_a_model_is_told_whose_call_it_is_and_the_keys_best_level_is_the_best(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    async def look(session: Session[Any, Any]) -> None:
        seen.append((session.party, session.call.party))
        await session.receive()
        await session.send(Token(text="x"))

    chosen = config(keys_of(tmp_path, alice("priority=3"), line_of("bob", OTHER, ["priority=12"])))
    chosen = replace(chosen, admission=replace(chosen.admission, priority_header="x-priority"))
    levels: list[int] = []
    async with memory_gateway([*models(), spec_of(look, "look", family=Family.TEXT)], chosen) as memory:
        with memory.gateway.watched(lambda exchange: levels.append(exchange.priority)):
            for key, asked in ((KEY, b"1"), (KEY, b"3"), (KEY, b"9"), (KEY, b""), (OTHER, b""), (OTHER, b"13")):
                fields = [(b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
                peer = memory.http1()
                asking = [*fields, (b"x-priority", asked)] if asked else fields
                await peer.send(*post(1, "/predictions/look", b'{"inputs":"x"}', asking))
                assert (await peer.read_answer(1))[0] == 200
                peer.close()
            await trio.testing.wait_all_tasks_blocked()
    assert levels == [3, 3, 9, 0, 12, 13]
    assert seen == [("alice", "alice")] * 4 + [("bob", "bob")] * 2


# -- at the start


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "No such file"), ("alice\n", "line 1: the digest"), ("a sha256:0 rate=x\n", "line 1: the digest")],
)
def test_a_file_that_cannot_be_used_is_no_configuration(tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"^access\.keys_file: ") as raised:
        Gateway(config(str(file)), models())
    assert why in str(raised.value)


def test_a_file_that_others_may_read_is_told(tmp_path: Path, caplog: Any) -> None:
    file = keys_of(tmp_path, alice())
    Gateway(config(file), models())
    assert caplog.records == []
    os.chmod(file, 0o644)
    Gateway(config(file), models())
    assert [record.message for record in caplog.records] == ["the key file is readable by other users"]


async def test_what_gives_no_credentials_to_models_gives_none_that_has_opened_the_door(tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []

    async def look(session: Session[Any, Any]) -> None:
        seen.append(dict(session.call.headers))
        await session.receive()
        await session.send(Token(text="x"))

    chosen = config(keys_of(tmp_path, alice()), pass_credentials=True)
    own = (b"authorization", b"Bearer the-models-own")
    async with memory_gateway([*models(), spec_of(look, "look", family=Family.TEXT)], chosen) as memory:
        for fields in (BEARER, ((b"x-api-key", KEY.encode()), own)):
            peer = memory.http1()
            said = (*fields, (b"cookie", b"a=b"), (b"content-type", b"application/json"))
            await peer.send(*post(1, "/predictions/look", b'{"inputs":"x"}', said))
            assert (await peer.read_answer(1))[0] == 200
            peer.close()
    assert [headers.get("authorization") for headers in seen] == [None, "Bearer the-models-own"]
    assert all(headers["cookie"] == "a=b" for headers in seen)
    assert KEY not in repr(seen)
