"""Models in processes that several fronts share, as programs: who ends with whom, what comes again, and what is left."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.gateway.fronts.served import APP, Caller, Load, Lost, Server, alive, calling, served, until, who
from tests.gateway.fronts.test_fronts_operated import counted, curl

pytestmark = pytest.mark.programs
SHARED = ("--set", "models.who.process.enabled=true", "--set", "models.slow.process.instances=2")
PLANE = ("--set", "operator.port=0")
MODEL_OF_SEQUENCES = """
import numpy as np

from models.messages import InferRequest, InferResponse, Tensor
from models.spec import declare


@declare()
def steps(request: InferRequest) -> InferResponse:
    return InferResponse(outputs=(Tensor(name="pid", data=np.array([os.getpid()], np.int64), datatype="INT64"),))
"""
MODEL_WITH_FORMATTERS = """
from models.adapt import spec_of
from models.errors import ModelError
from models.formatters import TextInput


def reads(item, **keywords):
    asked = item.as_json()
    if "voice" not in asked:
        raise ModelError("voice: expected one", status=400)
    made = TextInput(asked["text"], {"max_new_tokens": 9})
    made.voice, made.pid = asked["voice"], os.getpid()
    return made


def writes(output):
    token, first, last = output.sequences[0].get_next_token()
    said = f"{output.input.pid} " if first else ""
    return said + (f"{output.input.voice}:{token.text} " if token.text else "") + (str(os.getpid()) if last else "")


async def words(prompt: Prompt) -> AsyncIterator[str]:
    for word in prompt.text.split():
        yield f"{word}@{os.getpid()}"


speaks = spec_of(words, input_formatter=reads, output_formatter=writes)
"""
STUCK = """
import time


async def who(prompt: Prompt) -> str:
    print("on the loop", flush=True)
    time.sleep(1000)
    return ""
"""


@asynccontextmanager
async def shared(folder: Path, *flags: str, app: str = APP) -> AsyncIterator[tuple[Server, int]]:
    """A server of two fronts, whose models run in processes that they share: one of `who`, two of `slow`."""
    async with served(folder, *SHARED, *flags, app=app) as server:
        yield server, await server.port()
        processes = pids_of(server, "who") | pids_of(server, "slow")
    await until(lambda: not any(map(alive, processes)))


def pids_of(server: Server, model: str) -> set[int]:
    """All processes that a model ever had."""
    return {record["pid"] for record in server.all("instance ready") if record["model"] == model}


async def pid_of_who(port: int) -> int:
    async with calling(port) as caller:
        return (await who(caller))[0]


class Stream:
    """A stream of `slow`: a token each 50 ms, which says the process."""

    def __init__(self, caller: Caller) -> None:
        self.caller, self.heard, self.lost = caller, b"", False

    @classmethod
    async def begin(cls, caller: Caller, tokens: int = 60_000) -> Stream:
        body = json.dumps({"inputs": str(tokens), "stream": True, "parameters": {"max_new_tokens": tokens}}).encode()
        head = f"POST /predictions/slow HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        await caller.stream.send_all(head.encode() + b"\r\n\r\n" + body)
        stream = cls(caller)
        while stream.pid is None:
            await stream.more()
            assert stream.heard.startswith(b"HTTP/1.1 200 "), stream.heard
        return stream

    async def more(self) -> None:
        data = await self.caller.stream.receive_some(65536)
        self.lost = not data
        self.heard += data
        if not data:
            raise Lost("it has ended")

    @property
    def pid(self) -> int | None:
        """The process that runs it."""
        found = re.search(rb'"text": ?"(\d+) "', self.heard)
        return int(found[1]) if found else None

    @property
    def tokens(self) -> int:
        """How many have come."""
        return self.heard.count(b'"text"')

    async def goes_on(self) -> None:
        """Two more tokens come."""
        wanted = self.tokens + 2
        while self.tokens < wanted:
            await self.more()


async def streams(stack: AsyncExitStack, port: int, count: int) -> list[Stream]:
    return [await Stream.begin(await stack.enter_async_context(calling(port))) for _ in range(count)]


async def streams_in(processes: set[int], stack: AsyncExitStack, port: int, count: int) -> list[Stream]:
    """That many streams, in each of these processes and no other. A front has calls as soon as it has a link to one process:
    streams that begin before the next link is there are closed, and others begun."""
    while True:
        async with AsyncExitStack() as some:
            begun = await streams(some, port, count)
            if (found := {stream.pid for stream in begun}) == processes:
                stack.push_async_callback(some.pop_all().aclose)
                return begun
            assert found < processes


SERVED = (
    APP
    + """

from models.adapt import spec_of

who = spec_of(who, served_names=("org/who:1", "of-the-code"))
"""
)


@pytest.mark.parametrize(
    ("flags", "names"),
    [((), ["org/who:1", "of-the-code"]), (("--set", 'models.who.served_names=["gpt-4o"]'), ["gpt-4o"])],
)
async def test_each_front_finds_a_model_by_its_served_names(
    tmp_path: Path, flags: tuple[str, ...], names: list[str]
) -> None:
    async with shared(tmp_path, *flags, app=SERVED) as (server, port):
        heard = set()
        for name in names * 3:
            async with calling(port) as caller:
                status, body = await caller.ask("/v1/completions", json.dumps({"model": name, "prompt": "x"}).encode())
                assert (status, json.loads(body)["model"]) == (200, name)
                heard.add(int(json.loads(body)["choices"][0]["text"].split()[0]))
                status, body = await caller.ask(f"/v1/models/{name}", method="GET")
                assert (status, json.loads(body)["root"]) == (200, "who")
        assert heard == pids_of(server, "who")


async def test_two_fronts_have_the_same_processes_and_their_ends_and_starts(tmp_path: Path) -> None:
    async with shared(tmp_path) as (server, port), AsyncExitStack() as stack:
        assert len({await pid_of_who(port) for _ in range(4)}) == 1
        assert not pids_of(server, "who") & server.fronts
        live = await streams_in(pids_of(server, "slow"), stack, port, 4)
        victim = live[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        for stream in live:
            if stream.pid == victim:
                while b"WorkerLost" not in stream.heard and b"ended" not in stream.heard:
                    await stream.more()
            else:
                await stream.goes_on()
        ended = await server.logged("instance ended")
        assert (ended["pid"], ended["model"]) == (victim, "slow")
        assert len(server.all("instance ended")) == 1
        await until(lambda: len(pids_of(server, "slow")) == 3)
        left, again = pids_of(server, "slow") - {victim}, set[int | None]()
        while again != left:  # the fronts hear of the new one after the log does
            again |= {stream.pid for stream in await streams(stack, port, 6)}
            assert again <= left


async def test_a_front_that_is_killed_ends_its_own_sessions_and_no_process(tmp_path: Path) -> None:
    async with shared(tmp_path, *PLANE) as (server, port), AsyncExitStack() as stack:
        plane = (await server.logged("operator plane"))["at"]
        live = await streams(stack, port, 4)
        os.kill(min(server.fronts), signal.SIGKILL)
        await server.logged("front ended")
        lost = 0
        for stream in live:
            try:
                await stream.goes_on()
            except (Lost, trio.BrokenResourceError):
                lost += 1
        assert lost == 2
        await server.logged("front started", count=3)
        for _ in range(4):
            await pid_of_who(port)
        assert len(pids_of(server, "slow")) == 2  # and its sessions are over there

        async def sessions() -> int:
            return int(counted(await curl(f"{plane}/metrics"), "everywire_instance_sessions", 'model="slow"'))

        while await sessions() != 2:  # each look is a program's, which takes its time
            pass


async def test_the_plane_tells_of_each_process_once(tmp_path: Path) -> None:
    async with shared(tmp_path, *PLANE, "--set", "models.slow.capacity=5") as (server, port), AsyncExitStack() as stack:
        plane = (await server.logged("operator plane"))["at"]
        await streams(stack, port, 4)
        views = {view["name"]: view for view in json.loads(await curl(f"{plane}/models"))["models"]}
        slow = views["slow"]
        assert slow["capacity"] == 6  # three for each front
        assert [(one["number"], one["state"], one["sessions"]) for one in slow["instances"]] == [
            (0, "ready", 2),
            (1, "ready", 2),
        ]
        assert {one["pid"] for one in slow["instances"]} == pids_of(server, "slow")
        metrics = await curl(f"{plane}/metrics")
        assert counted(metrics, "everywire_instance_up", 'model="slow"') == 2
        assert counted(metrics, "everywire_instance_sessions", 'model="slow"') == 4
        assert counted(metrics, "everywire_instance_resident_bytes", 'model="who"') > 10e6
        samples = [line.rpartition(" ")[0] for line in metrics.splitlines() if not line.startswith("#")]
        assert len(set(samples)) == len(samples)


async def test_a_reload_is_one_of_all_fronts_and_streams_end_where_they_began(tmp_path: Path) -> None:
    async with shared(tmp_path, *PLANE) as (server, port), AsyncExitStack() as stack:
        plane, live = (await server.logged("operator plane"))["at"], await streams(stack, port, 2)
        (old,) = pids_of(server, "who")
        (tmp_path / "app.py").write_text(APP.replace('VERSION = "1"', 'VERSION = "2"'))
        for name in ("who", "slow"):
            view = json.loads(await curl("-X", "POST", f"{plane}/models/{name}/reload"))
            assert view["state"] == "ready"
            assert "code" not in view
        seen = {await who_says(port) for _ in range(6)}
        assert len(seen) == 1
        ((pid, version),) = seen
        assert pid != old
        assert version == "2"
        assert (await streams(stack, port, 1))[0].pid not in {stream.pid for stream in live}
        for stream in live:
            await stream.goes_on()
        await until(lambda: not alive(old))  # nobody had to do with it any more


async def who_says(port: int) -> tuple[int, str]:
    async with calling(port) as caller:
        return await who(caller)


async def test_a_reload_that_fails_leaves_the_old_processes(tmp_path: Path) -> None:
    async with shared(tmp_path, *PLANE) as (server, port):
        plane, old = (await server.logged("operator plane"))["at"], await pid_of_who(port)
        (tmp_path / "app.py").write_text("raise RuntimeError('half an edit')\n")
        refused = json.loads(await curl("-X", "POST", f"{plane}/models/who/reload"))
        assert "half an edit" in refused["error"]
        assert {await pid_of_who(port) for _ in range(4)} == {old}


async def test_a_process_is_replaced_for_all_fronts_and_its_streams_end_where_they_began(tmp_path: Path) -> None:
    async with shared(tmp_path, *PLANE) as (server, port), AsyncExitStack() as stack:
        plane = (await server.logged("operator plane"))["at"]
        live = await streams_in(pids_of(server, "slow"), stack, port, 4)

        async def restarted(number: int) -> dict[str, Any]:
            said: dict[str, Any] = json.loads(await curl("-X", "POST", f"{plane}/models/slow/instances/{number}/restart"))
            return said

        before = {one["number"]: one["pid"] for one in json.loads(await curl(f"{plane}/models/slow"))["instances"]}
        await restarted(0)
        (fresh,) = pids_of(server, "slow") - set(before.values())
        await streams_in({fresh, before[1]}, stack, port, 8)
        for stream in live:
            await stream.goes_on()
        assert alive(before[0])
        assert "7" in (await restarted(7))["error"]
        assert pids_of(server, "slow") == {*before.values(), fresh}
        for stream in live:
            if stream.pid == before[0]:
                await stream.caller.stream.aclose()
        await until(lambda: not alive(before[0]))  # no front has a session there any more


async def test_its_formatters_are_called_in_the_process_that_all_fronts_share(tmp_path: Path) -> None:
    flags = ("--model", "speaks=app:speaks", "--set", "models.speaks.process.instances=2")
    async with shared(tmp_path, *flags, app=APP + MODEL_WITH_FORMATTERS) as (server, port):
        asked, seen = json.dumps({"text": "a b", "voice": "alto"}).encode(), set[str]()
        for _ in range(8):  # four of each front
            async with calling(port) as caller:
                status, body = await caller.ask("/predictions/speaks", asked)
            assert status == 200, body
            begin, *words, end = body.decode().split()
            assert (words, end) == ([f"alto:a@{begin}", f"alto:b@{begin}"], begin)
            seen.add(begin)
        assert seen == set(map(str, pids_of(server, "speaks")))
        async with calling(port) as caller:
            status, body = await caller.ask("/predictions/speaks", b'{"text": "a"}')
        assert (status, b"voice: expected one" in body) == (400, True)


async def test_sighup_starts_processes_of_the_new_code_first_and_loses_nothing(tmp_path: Path) -> None:
    async with shared(tmp_path) as (server, port):
        load, old = Load(port, keep=True), pids_of(server, "who")
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(load.run)
            await until(lambda: load.came_of["1"] > 50)
            (tmp_path / "app.py").write_text(APP.replace('VERSION = "1"', 'VERSION = "2"'))
            server.process.send_signal(signal.SIGHUP)
            await server.logged("fronts replaced")
            seen = load.came_of["2"]
            await until(lambda: load.came_of["2"] > seen + 50)
            nursery.cancel_scope.cancel()
        assert set(load.came_of) == {"1", "2"}
        assert len(load.pids) == 2
        await until(lambda: not any(map(alive, old)))
        assert await server.drained() == 0


async def test_code_that_does_not_load_leaves_fronts_and_processes_at_sighup(tmp_path: Path) -> None:
    async with shared(tmp_path) as (server, port):
        first, old = server.fronts, await pid_of_who(port)
        (tmp_path / "app.py").write_text("raise RuntimeError('half an edit')\n")
        server.process.send_signal(signal.SIGHUP)
        refused = await server.logged("the processes of models do not come up: the old ones stay")
        assert "half an edit" in refused["reason"]
        assert server.fronts == first
        assert await pid_of_who(port) == old
        assert await server.drained() == 0


async def test_the_end_of_the_parent_is_the_end_of_the_processes(tmp_path: Path) -> None:
    async with shared(tmp_path) as (server, _):
        processes = server.fronts | pids_of(server, "who") | pids_of(server, "slow")
        server.process.kill()
        await until(lambda: not any(map(alive, processes)))


async def test_a_model_that_cannot_be_imported_ends_the_start_as_with_one_front(tmp_path: Path) -> None:
    async with served(tmp_path, *SHARED, app="raise RuntimeError('half an edit')\n") as server:
        assert await server.ended() == 2
        await server.logged("the end of the log")
        assert any("half an edit" in record["event"] for record in server.records)


async def test_all_fronts_find_the_process_of_a_sequence(tmp_path: Path) -> None:
    flags = ("--model", "steps=app:steps", "--set", "models.steps.process.instances=3")
    async with shared(tmp_path, *flags, app=APP + MODEL_OF_SEQUENCES) as (_, port):
        found = set[int]()
        for sequence in range(1, 13):
            answered = [await step(port, sequence, start=first) for first in (True, False, False)]
            assert len(set(answered)) == 1
            found.add(answered[0])
        assert len(found) > 1


async def step(port: int, sequence: int, *, start: bool) -> int:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
    asked: dict[str, Any] = {"inputs": [tensor], "parameters": {"sequence_id": sequence, "sequence_start": start}}
    async with calling(port) as caller:
        status, body = await caller.ask("/v2/models/steps/infer", json.dumps(asked).encode())
    assert status == 200, body
    return int(json.loads(body)["outputs"][0]["data"][0])


async def test_a_model_in_processes_that_nothing_goes_on_without_ends_all_with_1(tmp_path: Path) -> None:
    flags = [f"models.who.restart.{setting}" for setting in ("intensity=0", "escalate=true")]
    async with shared(tmp_path, "--set", flags[0], "--set", flags[1]) as (server, port):
        os.kill(await pid_of_who(port), signal.SIGKILL)
        assert await server.ended() == 1
        assert "SIGKILL" in (await server.logged("cannot serve"))["reason"]


async def test_a_process_that_is_stuck_is_killed_once_for_a_client_that_left(tmp_path: Path) -> None:
    flags = ("--set", "models.who.stop_within=0.3s")
    async with shared(tmp_path, *flags, app=APP + STUCK) as (server, port), calling(port) as caller:
        await caller.stream.send_all(
            b"POST /predictions/who HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"
            b'{"inputs": "x"}'
        )
        await server.logged("model output", line="on the loop")
        await caller.stream.aclose()
        killed = await server.logged("instance killed")
        assert "stop_within" in killed["reason"]
        await server.logged("instance ready", count=4)
        assert len(server.all("instance killed")) == 1
