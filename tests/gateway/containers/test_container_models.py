"""A multi-model container behind the platform's front: loaded on first use, unloaded for others. Most containers here are
this gateway too, whose own API is tested elsewhere; others answer as no honest one would."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway import client
from gateway.client import Peer
from gateway.config import Config, RepositoryConfig, SageMakerConfig
from gateway.containers import multi_model
from gateway.containers.connection import ContainerLimits, NoAnswer
from gateway.containers.model import Bridge, container_spec
from gateway.containers.multi_model import ContainerModels
from gateway.errors import GatewayError
from gateway.net.transport import Transport
from gateway.testing import MemoryGateway, memory_gateway
from models.errors import ModelError
from models.session import Call, Session
from protocols.http1.connection import HTTP1Connection
from protocols.roles import Role
from tests.gateway.containers.containers import Client, containers, part, read_request

CODE = """
import trio
from models.messages import Part
from models.session import Session

async def model(session: Session[Part, Part]) -> None:
    async for part in session:
        if bytes(part.data) == b"wait":
            await trio.sleep_forever()
        await session.send(Part(data=b"{name} of " + bytes(part.data)))
"""


def folders(at: Path, *names: str) -> str:
    """Models that need 100 bytes each."""
    for name in names:
        (at / name).mkdir(parents=True)
        (at / name / "model.toml").write_text("memory = 100\n")
        (at / name / "model.py").write_text(CODE.replace("{name}", name))
    return str(at)


async def until(so: Callable[[], bool]) -> None:
    """Gives everybody turns, threads too, until it is so."""
    with trio.fail_after(60):
        while not so():
            await trio.to_thread.run_sync(lambda: None)


@dataclass
class Front:
    """The platform's front and the container behind it."""

    front: MemoryGateway
    container: MemoryGateway

    async def invoke(self, target: str, body: bytes = b"x") -> tuple[int, Any]:
        headers = [(b"x-amzn-sagemaker-target-model", target.encode())] if target else []
        peer = self.front.http1()
        await peer.send(*client.post(1, "/endpoints/many/invocations", body, headers))
        status, _, answer = await peer.read_answer(1)
        peer.close()
        return status, json.loads(answer) if status >= 400 else answer

    @property
    def loaded(self) -> list[str]:
        return sorted(Path(model.url).name for model in self.container.gateway.repository.list())


@asynccontextmanager
async def fronted(root: str, *, memory: int = 250) -> AsyncIterator[Front]:
    config = Config(
        sagemaker=SageMakerConfig(multi_model=True),
        repository=RepositoryConfig(roots=(root,), code=(root,), memory=memory),
    )
    async with memory_gateway(config=config) as container:

        async def dial() -> Transport:
            await trio.lowlevel.checkpoint()
            return container.connect()

        limits = ContainerLimits(health_interval=0)
        spec = container_spec("http://container", name="many", limits=limits, models=root, dial=dial)
        async with memory_gateway([spec]) as front:
            yield Front(front, container)


async def test_a_model_is_loaded_when_it_is_asked_for_first(tmp_path: Path) -> None:
    async with fronted(folders(tmp_path, "a", "b")) as many:
        assert many.loaded == []
        assert await many.invoke("a") == (200, b"a of x")
        assert await many.invoke("a.tar.gz") == (200, b"a of x")
        assert many.loaded == ["a"]


async def test_the_least_recently_used_goes_where_the_container_has_no_memory(tmp_path: Path) -> None:
    async with fronted(folders(tmp_path, "a", "b", "c")) as many:
        for target in ("a", "b", "a", "c"):
            assert await many.invoke(target) == (200, f"{target} of x".encode())
        assert many.loaded == ["a", "c"]
        assert await many.invoke("b") == (200, b"b of x")
        assert many.loaded == ["b", "c"]


async def test_one_that_is_in_use_is_not_unloaded(tmp_path: Path) -> None:
    async with fronted(folders(tmp_path, "a", "b"), memory=150) as many:
        peer = many.front.http1()
        headers = [(b"x-amzn-sagemaker-target-model", b"a")]
        await peer.send(*client.post(1, "/endpoints/many/invocations", b"wait", headers))
        await until(lambda: many.container.gateway.counts().slots_in_use == 1)
        status, error = await many.invoke("b")
        assert (status, error["OriginalStatusCode"]) == (424, 507)
        peer.close()
        await until(lambda: not many.front.gateway.counts().exchanges)
        assert await many.invoke("b") == (200, b"b of x")


async def test_a_model_that_the_container_has_already_is_as_good(tmp_path: Path) -> None:
    root = folders(tmp_path, "a")
    async with fronted(root) as first:
        assert await first.invoke("a") == (200, b"a of x")
        container = first.container

        async def dial() -> Transport:
            await trio.lowlevel.checkpoint()
            return container.connect()

        spec = container_spec("http://c", name="many", models=root, dial=dial, limits=ContainerLimits(health_interval=0))
        async with memory_gateway([spec]) as another:
            assert await Front(another, container).invoke("a") == (200, b"a of x")


async def test_models_that_nobody_here_has_loaded_make_room_too(tmp_path: Path) -> None:
    root = folders(tmp_path, "a", "b", "c")
    async with fronted(root) as many:
        for name in ("a", "b"):
            await many.container.gateway.repository.load(f"somebodys-{name}", f"{root}/{name}")
        assert await many.invoke("c") == (200, b"c of x")
        assert "c" in many.loaded
        assert len(many.loaded) == 2


async def test_a_model_that_the_container_forgot_is_loaded_again(tmp_path: Path) -> None:
    async with fronted(folders(tmp_path, "a")) as many:
        assert await many.invoke("a") == (200, b"a of x")
        (model,) = many.container.gateway.repository.list()
        await many.container.gateway.repository.unload(model.name)
        assert await many.invoke("a") == (200, b"a of x")


async def test_what_cannot_be_loaded_is_told_in_the_containers_words(tmp_path: Path) -> None:
    async with fronted(folders(tmp_path, "a")) as many:
        status, error = await many.invoke("nobody")
        assert (status, error["OriginalStatusCode"]) == (424, 404)
        assert "there is no such folder" in error["OriginalMessage"]
        assert await many.invoke("a") == (200, b"a of x")


async def test_a_target_must_be_named_and_stay_below_the_models(tmp_path: Path) -> None:
    async with fronted(folders(tmp_path, "a")) as many:
        for target in ("", "../a", "/a"):
            status, error = await many.invoke(target)
            assert status == 400
            assert "Target-Model" in error["Message"]


async def test_many_who_want_one_model_at_once_load_it_once(tmp_path: Path) -> None:
    async with fronted(folders(tmp_path, "a")) as many, trio.open_nursery() as nursery:
        answers: list[Any] = []

        async def one() -> None:
            answers.append(await many.invoke("a"))

        for _ in range(10):
            nursery.start_soon(one)
        await until(lambda: len(answers) == 10)
        assert answers == [(200, b"a of x")] * 10


async def test_a_client_that_leaves_while_its_model_is_loaded_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    async with fronted(folders(tmp_path, "a", "b", "c")) as many:
        for step in range(1, 40):
            peer = many.front.http1()
            headers = [(b"x-amzn-sagemaker-target-model", b"abc"[step % 3 : step % 3 + 1])]
            await peer.send(*client.post(1, "/endpoints/many/invocations", b"x", headers))
            for _ in range(step):
                await trio.lowlevel.checkpoint()
            peer.close()
        with trio.fail_after(60):
            for target in "abc":
                answer = await many.invoke(target)
                while answer[0] == 424 and answer[1]["OriginalStatusCode"] == 507:  # two others are still being loaded
                    answer = await many.invoke(target)
                assert answer == (200, f"{target} of x".encode())
        await until(lambda: not many.front.gateway.counts().exchanges)
        assert many.front.gateway.counts().slots_in_use == 0


# -- containers that are slow, wrong or lie --------------------------------------------------------------------------

GIVEN = (200, b"")
FULL = (507, b"no memory")


class API:
    """A container whose answers to load, unload, list and invoke are these; an answer may be a function to await."""

    def __init__(
        self, *, load: Any = GIVEN, unload: Any = GIVEN, listed: Any = (200, b'{"models": []}'), invoke: Any = GIVEN
    ):
        self.load, self.unload, self.listed, self.invoke = load, unload, listed, invoke
        self.asked: list[tuple[str, str]] = []
        self.worker: Any = None

    async def __call__(self, transport: Transport) -> None:
        peer = Peer(transport, HTTP1Connection(Role.SERVER))
        request, body = await read_request(peer)
        path, _, _ = request.head.target.decode().partition("?")
        match request.head.method, path:
            case b"POST", "/models":
                what, name = "load", json.loads(body)["url"].rpartition("/")[2]
            case b"DELETE", _:
                what, name = "unload", path.split("/")[2].rpartition("-")[0] or path.split("/")[2]
            case b"GET", "/models":
                what, name = "listed", ""
            case _:
                what, name = "invoke", path.split("/")[2].rpartition("-")[0]
        self.asked.append((what, name))
        answer = getattr(self, what)
        if callable(answer):
            answer = await answer(name)
        status, said = answer
        # by hand, for our own machine would not write some of these statuses
        rest = memoryview(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(said), said))
        while rest:
            rest = rest[transport.try_send([rest]) :]
            await transport.wait_writable()

    def count(self, what: str) -> int:
        return sum(asked == what for asked, _ in self.asked)


@asynccontextmanager
async def served(api: API, **limits: Any) -> AsyncIterator[Callable[..., Awaitable[int]]]:
    """A function that invokes a target of that container and returns 200, or the status of the error."""
    async with containers(api, ContainerLimits(health_interval=0, **limits)) as found, trio.open_nursery() as nursery:
        api.worker = await nursery.start(_work)
        bridge = Bridge(found.container, ContainerModels(found.container, "/m", api.worker))

        async def invoke(target: str) -> int:
            session = Session(
                Client(part(b"x")),
                Call(parameters={"unary": True}, headers={"x-amzn-sagemaker-target-model": target}),
            )
            try:
                await bridge(session)
            except (ModelError, GatewayError) as e:
                return e.status
            return 200

        yield invoke
        nursery.cancel_scope.cancel()


async def _work(task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """The worker's nursery: it may end before its callers do."""
    async with trio.open_nursery() as nursery:
        task_status.started(nursery)
        await trio.sleep_forever()


async def hang(_: str) -> Any:
    await trio.sleep_forever()


@pytest.mark.parametrize(("status", "told"), [(302, 502), (600, 502), (999, 502), (404, 404), (503, 503)])
async def test_whatever_status_a_load_is_answered_with_is_an_error_of_its_own_caller(status: int, told: int) -> None:
    api = API(load=(status, b""))
    async with served(api) as invoke:
        assert await invoke("a") == told
        api.load = GIVEN
        assert await invoke("a") == 200


@pytest.mark.parametrize("status", [302, 600, 999, 404, 503])
async def test_whatever_status_an_unload_is_answered_with_the_container_goes_on_serving(status: int) -> None:
    api = API(unload=(status, b""))
    async with served(api) as invoke:
        assert await invoke("a") == 200
        api.load = FULL
        assert await invoke("b") == 507
        assert ("unload", "a") in api.asked
        assert await invoke("a") == (507 if status == 404 else 200)


async def test_a_model_that_loads_and_is_never_there_is_asked_for_twice() -> None:
    api = API(invoke=(404, b"who?"))
    async with served(api) as invoke:
        assert await invoke("a") == 404
    assert api.asked == [("load", "a"), ("invoke", "a")] * 2


async def test_an_invocation_that_never_has_memory_costs_a_few_other_models_and_not_all() -> None:
    api = API()
    async with served(api) as invoke:
        for i in range(30):
            assert await invoke(f"m{i}") == 200
        api.invoke = FULL
        assert await invoke("m29") == 507
    assert api.count("unload") == 8


@pytest.mark.parametrize(
    "listed",
    [
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"no json",
        b'{"models": [{"modelName": 5}]}',
        b'{"models": [{"modelName": "\\ud800"}]}',
        b'{"models": [{"modelName": ""}, {"modelName": ".."}, {"modelName": "' + b"x" * 5000 + b'"}]}',
        b'{"models": [], "nextPageToken": "again"}',
        b'{"models": [], "nextPageToken": "' + b"x" * 500_000 + b'"}',
        b'{"models": [' + b",".join(b'{"modelName": "m-%d"}' % i for i in range(20_000)) + b"]}",
    ],
)
async def test_a_container_without_memory_whose_list_is_no_help_is_507_in_bounded_requests(listed: bytes) -> None:
    api = API(load=FULL, listed=(200, listed))
    async with served(api) as invoke:
        assert await invoke("a") == 507
        api.load = GIVEN
        assert await invoke("a") == 200
    assert api.count("listed") <= 100
    assert api.count("unload") <= 1000


async def test_a_model_that_cannot_be_unloaded_is_left_alone_for_another(autojump_clock: MockClock) -> None:
    api = API(unload=(500, b"busy"))
    async with served(api) as invoke:
        for target in "abc":
            assert await invoke(target) == 200
        api.load = FULL
        for _ in range(3):  # each was tried once; not again and again
            assert await invoke("d") == 507
        assert [name for what, name in api.asked if what == "unload"] == ["a", "b", "c"]
        await trio.sleep(61)
        api.unload = GIVEN
        assert await invoke("d") == 507
        assert api.count("unload") == 6


async def test_an_unload_that_hangs_holds_up_neither_the_next_nor_the_models_in_use(autojump_clock: MockClock) -> None:
    api, full = API(), True

    async def unload(name: str) -> Any:
        nonlocal full
        if name == "a":
            await trio.sleep_forever()
        full = False
        return GIVEN

    async def load(_: str) -> Any:
        return FULL if full else GIVEN

    async with served(api) as invoke:
        for target in "abc":
            assert await invoke(target) == 200
        api.load, api.unload = load, unload
        with trio.fail_after(30):
            assert await invoke("d") == 200
            assert await invoke("c") == 200
    assert [name for what, name in api.asked if what == "unload"] == ["a", "b"]


async def test_when_every_unload_hangs_the_load_is_507_within_its_time(autojump_clock: MockClock) -> None:
    api = API(unload=hang)
    async with served(api, model_load_timeout=100) as invoke:
        for i in range(10):
            assert await invoke(f"m{i}") == 200
        api.load = FULL
        with trio.fail_after(101):
            assert await invoke("new") == 507
    assert api.count("unload") == 4


async def test_loads_that_their_callers_left_are_bounded(autojump_clock: MockClock) -> None:
    api = API(load=hang)
    async with served(api, model_load_timeout=100) as invoke:
        for i in range(70):
            with trio.move_on_after(0.1):
                await invoke(f"m{i}")
        assert api.count("load") == 64
        assert await invoke("new") == 503
        await trio.sleep(101)
        api.load = GIVEN
        assert await invoke("new") == 200


async def test_a_load_that_is_not_answered_is_504_and_the_model_can_be_tried_again(autojump_clock: MockClock) -> None:
    api = API(load=hang)
    async with served(api, model_load_timeout=100) as invoke:
        assert await invoke("a") == 504
        api.load = GIVEN
        assert await invoke("a") == 200


async def test_an_answer_that_stops_after_its_head_is_504_too(autojump_clock: MockClock) -> None:
    async def stuck(transport: Transport) -> None:
        await read_request(Peer(transport, HTTP1Connection(Role.SERVER)))
        transport.try_send([b"HTTP/1.1 500 X\r\ncontent-length: 5\r\n\r\nwhy"])
        await trio.sleep_forever()

    async with containers(stuck) as found, trio.open_nursery() as nursery:
        models = ContainerModels(found.container, "/m", nursery)
        with pytest.raises(NoAnswer) as raised:
            async with models.in_use("a"):
                pass
        nursery.cancel_scope.cancel()
    assert (raised.value.status, "model_load_timeout" in raised.value.message) == (504, True)


async def test_who_waits_for_room_when_the_worker_ends_is_told_so_too(autojump_clock: MockClock) -> None:
    api, told = API(unload=hang), []
    async with served(api) as invoke, trio.open_nursery() as callers:
        for target in "ab":
            assert await invoke(target) == 200
        api.invoke = FULL

        async def one() -> None:
            told.append(await invoke("a"))

        callers.start_soon(one)
        await wait_all_tasks_blocked()
        assert api.count("unload") == 1
        api.worker.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert told == [503]


async def test_who_waits_for_a_load_when_the_worker_ends_is_told_so(autojump_clock: MockClock) -> None:
    api, told = API(load=hang), []
    async with served(api) as invoke, trio.open_nursery() as callers:

        async def one(target: str) -> None:
            told.append(await invoke(target))

        for target in "aab":
            callers.start_soon(one, target)
        await wait_all_tasks_blocked()
        api.worker.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert told == [503, 503, 503]
        assert await invoke("c") == 503


async def test_a_container_that_takes_any_name_is_not_remembered_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_model, "_REMEMBERED", 5)
    api = API()
    async with containers(api) as found, trio.open_nursery() as nursery:
        models = ContainerModels(found.container, "/m", nursery)
        for i in range(20):
            async with models.in_use(f"m{i}"):
                assert len(models._models) <= 5
        assert api.count("load") == 20
        nursery.cancel_scope.cancel()


async def test_two_who_need_room_wait_for_what_is_leaving_already() -> None:
    """The one idle model goes for both; what it leaves is enough for one."""
    api, gone, go = API(), False, trio.Event()

    async def unload(_: str) -> Any:
        nonlocal gone
        await go.wait()
        gone = True
        return GIVEN

    async def load(name: str) -> Any:
        nonlocal gone
        if gone:
            gone = False
            return GIVEN
        return FULL

    told: list[int] = []
    async with served(api) as invoke, trio.open_nursery() as callers:
        assert await invoke("a") == 200
        api.load, api.unload = load, unload

        async def one(target: str) -> None:
            told.append(await invoke(target))

        for target in "bc":
            callers.start_soon(one, target)
        await wait_all_tasks_blocked()
        go.set()
    assert sorted(told) in ([200, 200], [200, 507])
