"""Several fronts as programs: balance, deaths, drains, replacements, and that nothing of a client is lost where it need not be."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from tests.gateway.fronts.served import APP, Caller, Load, Lost, alive, calling, served, until, who

pytestmark = pytest.mark.programs
NEEDS_WEIGHTS = """

class Weights:
    def __init__(self) -> None:
        raise OSError("no weights")

    async def __call__(self, prompt: Prompt) -> str:
        return ""


who = Weights
"""
ENDS_LATER = """
from contextlib import asynccontextmanager

from models.messages import Family
from models.spec import ModelSpec

asked = trio.Event()


async def answer(session):
    asked.set()


@asynccontextmanager
async def load():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        yield answer


async def end():
    await asked.wait()
    raise OSError("its time has come")


who = ModelSpec(name="who", family=Family.TEXT, load=load)
"""
STREAM = b'{"inputs": "100", "stream": true, "parameters": {"max_new_tokens": 100}}'


async def test_forty_connections_are_twenty_for_each_of_two(tmp_path: Path) -> None:
    async with served(tmp_path) as server, AsyncExitStack() as stack:
        port = await server.port()
        callers = [await stack.enter_async_context(calling(port)) for _ in range(40)]
        answered = Counter([(await who(caller))[0] for caller in callers])
        assert sorted(answered.values()) == [20, 20]
        assert set(answered) == server.fronts
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 40  # the parent has no copy of them


async def test_a_front_that_is_killed_takes_its_connections_alone_and_comes_again(tmp_path: Path) -> None:
    async with served(tmp_path) as server, AsyncExitStack() as stack:
        port, folder = await server.port(), f"/proc/{server.process.pid}/fd"
        descriptors = len(os.listdir(folder))
        callers = [await stack.enter_async_context(calling(port)) for _ in range(10)]
        of = [(await who(caller))[0] for caller in callers]
        async with trio.open_nursery() as nursery:
            load = Load(port, keep=False)
            nursery.start_soon(load.run)
            await until(lambda: load.came_of["1"] > 20)
            os.kill(of[0], signal.SIGKILL)
            await server.logged("front ended", pid=of[0])
            for caller, pid in zip(callers, of, strict=True):
                if pid == of[0]:
                    with pytest.raises(Lost):
                        await who(caller)
                else:
                    assert (await who(caller))[0] == pid
            await server.logged("front started", count=3)
            await until(lambda: len(set(load.pids) & server.fronts) == 2)
            nursery.cancel_scope.cancel()
        await until(lambda: len(os.listdir(folder)) == descriptors)  # nothing of the dead one is left in the parent
        assert sum(n for came, n in load.came_of.items() if came != "1") <= 1  # the one that it was serving when it died
        ended = await server.logged("front ended")
        assert ended["how"] == "SIGKILL"
        assert 5 <= ended["connections"] <= 8


async def test_a_front_that_ends_too_often_ends_the_server_with_1(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.port()
        for n in range(4):
            await server.logged("front started", count=2 + n)
            await until(lambda: len(server.fronts) == 2)
            os.kill(max(server.fronts, key=lambda pid: server_started(server, pid)), signal.SIGKILL)
            await server.logged("front ended", count=n + 1)
        assert await server.ended() == 1
        assert "given up" in server.all("cannot serve")[0]["reason"]


def server_started(server: object, pid: int) -> int:
    records = server.all("front started")  # type: ignore[attr-defined]
    return next(n for n, record in enumerate(records) if record["pid"] == pid)


async def test_sigterm_under_streams_over_both_loses_none_and_reports_the_sum(tmp_path: Path) -> None:
    async with served(tmp_path, "--set", "drain.report=report.json", "--set", "models.slow.capacity=200") as server:
        port, answers, callers = await server.port(), list[list[bytes]](), list[Caller]()

        async def stream() -> None:
            async with calling(port) as caller:
                callers.append(caller)
                status, body = await caller.ask("/predictions/slow", STREAM)
                assert status == 200
                answers.append(re.findall(rb'"text": ?"(\d+) "', body))

        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(stream)
            await until(lambda: sum(caller.answered for caller in callers) == 200)
            server.process.send_signal(signal.SIGTERM)
        assert await server.ended() == 0
        assert len({pid for answer in answers for pid in answer}) == 2
        assert {len(answer) for answer in answers} == {100}
        (report,) = server.all("drain report")
        assert (report["live"], report["finished"], report["clean"], report["cut"]) == (200, 200, True, [])
        assert report["endings"] == {"complete": 200}


async def test_a_stream_that_is_cut_by_the_drain_makes_it_3(tmp_path: Path) -> None:
    async with served(tmp_path, "--set", "drain.timeout=0") as server:
        port = await server.port()
        async with calling(port) as caller:
            body = b'{"inputs": "1000", "stream": true}'
            head = (
                b"POST /predictions/slow HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            await caller.stream.send_all(head % len(body) + body)
            assert b" 200 " in await caller.stream.receive_some()  # else the server could end before the stream begins
            assert await server.drained() == 3
        (report,) = server.all("drain report")
        assert [row["model"] for row in report["cut"]] == ["slow"]
        assert report["clean"] is False


async def who_else(port: int) -> int:
    async with calling(port) as caller:
        return (await who(caller))[0]


@pytest.mark.parametrize("keep", [False, True], ids=["a connection a request", "connections that stay"])
async def test_sighup_replaces_the_fronts_with_new_code_and_loses_nothing(tmp_path: Path, keep: bool) -> None:
    async with served(tmp_path) as server:
        load = Load(await server.port(), keep=keep)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(load.run)
            await until(lambda: load.came_of["1"] > 50 and len(load.pids) == 2)
            first = server.fronts
            (tmp_path / "app.py").write_text(APP.replace('VERSION = "1"', 'VERSION = "2"'))
            server.process.send_signal(signal.SIGHUP)
            await server.logged("fronts replaced")
            seen = load.came_of["2"]
            await until(lambda: load.came_of["2"] > seen + 50)
            nursery.cancel_scope.cancel()
        assert set(load.came_of) == {"1", "2"}
        assert len(server.fronts) == 2
        assert not server.fronts & first
        assert await server.drained() == 0


async def test_a_front_that_does_not_come_up_leaves_the_old_ones(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        port, first = await server.port(), server.fronts
        (tmp_path / "app.py").write_text("raise RuntimeError('half an edit')\n")
        server.process.send_signal(signal.SIGHUP)
        refused = await server.logged("a new process does not come up: the old ones stay")
        assert "half an edit" in refused["reason"]
        await server.logged("front ended")
        assert server.fronts == first
        assert await who_else(port) in first
        assert await server.drained() == 0


async def test_a_model_that_cannot_be_imported_ends_the_start(tmp_path: Path) -> None:
    async with served(tmp_path, app="raise RuntimeError('half an edit')\n") as server:
        assert await server.ended() == 2
        await server.logged("the end of the log")
        assert any("half an edit" in record["event"] for record in server.records)
        assert not any(map(alive, server.fronts))


async def test_a_front_that_is_silent_gets_no_more_until_it_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path) as server, AsyncExitStack() as stack:
        port = await server.port()
        mute, other = sorted(server.fronts)
        os.kill(mute, signal.SIGSTOP)
        await stack.enter_async_context(calling(port))  # one of these waits for it
        await stack.enter_async_context(calling(port))
        await trio.sleep(1.2)  # that is how long it may be silent
        assert {await who_else(port) for _ in range(8)} == {other}
        os.kill(mute, signal.SIGCONT)
        while await who_else(port) != mute:
            pass


async def test_the_end_of_the_parent_is_the_end_of_all(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        await server.port()
        fronts = server.fronts
        server.process.kill()
        await until(lambda: not any(map(alive, fronts)))


async def test_a_second_signal_hurries_all(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        port = await server.port()
        async with calling(port) as caller:
            await caller.stream.send_all(
                b'POST /predictions/slow HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n{"inputs": "100000"}'
            )
            await who_else(port)
            server.process.send_signal(signal.SIGTERM)
            await server.logged("draining", count=2)
            assert await server.drained() == 3


async def test_a_model_that_nothing_goes_on_without_ends_all_with_1(tmp_path: Path) -> None:
    flags = [f"models.who.restart.{setting}" for setting in ("intensity=0", "escalate=true")]
    async with served(tmp_path, "--set", flags[0], "--set", flags[1], app=APP + NEEDS_WEIGHTS) as server:
        assert await server.ended() == 1
        assert "no weights" in (await server.logged("cannot serve"))["reason"]
        assert (await server.logged("drain report"))["live"] == 0


async def test_a_model_that_is_given_up_later_ends_all_with_1(tmp_path: Path) -> None:
    flags = [f"models.who.restart.{setting}" for setting in ("intensity=0", "escalate=true")]
    async with served(tmp_path, "--set", flags[0], "--set", flags[1], app=APP + ENDS_LATER) as server:
        port = await server.port()
        async with calling(port) as caller:
            await caller.stream.send_all(
                b"POST /predictions/who HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"
                b'{"inputs": "x"}'
            )
            assert await server.ended() == 1
        assert "its time has come" in (await server.logged("cannot serve"))["reason"]
        assert len(server.all("drain report")) == 1


async def test_a_front_that_does_not_end_is_killed_and_that_is_3(tmp_path: Path) -> None:
    async with served(tmp_path, "--set", "drain.timeout=0") as server:
        await server.port()
        os.kill(min(server.fronts), signal.SIGSTOP)
        assert await server.drained() == 3
        await server.logged("a front does not drain: it is killed")
        assert (await server.logged("drain report"))["clean"] is False


async def test_what_a_front_counted_as_it_listened_is_whole_under_a_storm_of_connections(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        load = Load(await server.port(), keep=False)
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(load.run)
            await until(lambda: load.came_of["1"] > 1000)
            nursery.cancel_scope.cancel()
        assert set(load.came_of) == {"1"}
        one, other = load.pids.values()
        assert min(one, other) > 100, "each has its part, as large as the machine lets it be"
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 40


async def test_connections_on_their_way_to_a_front_that_dies_are_served_by_another(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        port = await server.port()
        mute, other = sorted(server.fronts)
        answered = list[int]()

        async def ask() -> None:
            answered.append(await who_else(port))

        os.kill(mute, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)
            await until(lambda: len(answered) == 4)  # the others wait for the one that is stopped
            os.kill(mute, signal.SIGKILL)
        assert answered == [other] * 8


async def test_what_a_front_has_no_descriptors_for_is_served_by_another(tmp_path: Path) -> None:
    async with served(tmp_path) as server, AsyncExitStack() as stack:
        port = await server.port()
        short, other = sorted(server.fronts)
        most = 1 + max(int(number) for number in os.listdir(f"/proc/{short}/fd"))
        resource.prlimit(short, resource.RLIMIT_NOFILE, (most + 5, most + 5))
        callers = [await stack.enter_async_context(calling(port)) for _ in range(40)]
        answered = Counter([(await who(caller))[0] for caller in callers])
        assert answered.total() == 40
        assert answered[other] > 30


async def test_a_front_that_is_killed_before_it_listens_ends_the_start_with_1(tmp_path: Path) -> None:
    async with served(tmp_path, app="import os\nimport signal\n\nos.kill(os.getpid(), signal.SIGKILL)\n") as server:
        assert await server.ended() == 1
        reason = (await server.logged("cannot serve"))["reason"]
        assert "does not come up: its process ended (SIGKILL)" in reason
