"""A multi-model container behind the platform's front: loaded on first use, unloaded for others. The container is this
gateway too, whose own API is tested elsewhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from gateway import client
from gateway.bridge import container_spec
from gateway.config import Config, RepositoryConfig, SageMakerConfig
from gateway.container_client import ContainerLimits
from gateway.testing import MemoryGateway, memory_gateway
from gateway.transport import Transport

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
    with trio.fail_after(10):
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
        for target in "abc":
            assert await many.invoke(target) == (200, f"{target} of x".encode())
        await until(lambda: not many.front.gateway.counts().exchanges)
        assert many.front.gateway.counts().slots_in_use == 0
