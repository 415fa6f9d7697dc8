"""A model of the repository is loaded anew from its folder, once its files have changed, while it serves."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.catalog.load_unload import ModelControl
from gateway.client import post
from gateway.config import Config, LMIConfig, RepositoryConfig, V2Config
from gateway.errors import BadModel, Conflict, GatewayError, InsufficientStorage, LoadFailed, NotFound, Unavailable
from gateway.testing import MemoryGateway, memory_gateway
from models.messages import Part
from protocols.events import Data, End
from tests.gateway.catalog.test_repository import GATES, Place, asking, place, until
from tests.gateway.catalog.test_repository import houses as houses
from tests.gateway.workers.test_worker import outcome

KiB = 1024
PATIENCE = 60.0
STREAM = """
import trio

async def model(part: bytes):
    for number in range(1000):
        yield b"{version} "
        await trio.sleep(0.1)
"""


def change(at: Place, name: str, *, memory: str = "", code: str = "") -> None:
    """Other files in a folder."""
    folder = at.path / name
    (folder / "note").write_text(str(random.random()))
    if memory:
        (folder / "model.toml").write_text(f'memory = "{memory}"\n')
    if code:
        (folder / "model.py").write_text(code)


def control_of(at: Place) -> ModelControl:
    return ModelControl(at.supervisor, at.repository, at.repository._limits, LMIConfig())


async def failure(call: Callable[[], Awaitable[Any]]) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await call()
    return caught.value


# -- over the wire ---------------------------------------------------------------------------------------------------


async def load(served: MemoryGateway, name: str) -> tuple[int, bytes]:
    peer = served.http1()
    await peer.send(*post(1, f"/v2/repository/models/{name}/load", b""))
    status, _, body = await peer.read_answer(1)
    return status, body


WHILE_IT_IS_READ = """
from pathlib import Path
note = Path(__file__).parent / "note"
if {changes}:
    note.write_text("another")
raise RuntimeError("half of a model")
"""


@pytest.mark.parametrize(("changes", "status"), [(True, 409), (False, 500)])
async def test_a_folder_that_is_replaced_while_it_is_loaded_is_a_conflict(
    changes: bool, status: int, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.py").write_text(WHILE_IT_IS_READ.format(changes=changes))
    config = Config(
        repository=RepositoryConfig(roots=(str(tmp_path),), code=(str(tmp_path),)), v2=V2Config(model_control=True)
    )
    async with memory_gateway(config=config) as served:
        found, body = await load(served, "m")
        assert found == status, body
        assert (b"has changed while it was read; load it again" in body) is changes
        (folder / "model.py").write_text("async def model(part: bytes):\n    yield part\n")
        assert (await load(served, "m"))[0] == 200


async def test_a_folder_whose_link_is_gone_when_it_is_followed_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    (tmp_path / "m").mkdir()
    monkeypatch.setattr("gateway.catalog.loader.find_folder", gone)
    config = Config(
        repository=RepositoryConfig(roots=(str(tmp_path),), code=(str(tmp_path),)), v2=V2Config(model_control=True)
    )
    async with memory_gateway(config=config) as served:
        status, body = await load(served, "m")
        assert status == 409
        assert b"has changed while it was read" in body


async def begin(served: MemoryGateway) -> Any:
    peer = served.http1()
    await peer.send(*post(1, "/models/m/invoke", b"x"))
    return peer


async def hear(peer: Any, words: int = 0) -> bytes:
    """Reads an answer up to this number of words; with 0, to its end."""
    heard = b""
    while not words or heard.count(b" ") < words:
        match await peer.next_event():
            case Data(buffers=buffers):
                heard += b"".join(bytes(buffer) for buffer in buffers)
            case End():
                break
    return heard


async def test_old_streams_end_on_the_old_version_and_new_calls_are_the_new_ones(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.py").write_text(STREAM.format(version="one").replace("1000", "8"))
    repository = RepositoryConfig(roots=(str(tmp_path),), code=(str(tmp_path),))
    async with memory_gateway([], Config(repository=repository, v2=V2Config(model_control=True))) as served:
        assert (await load(served, "m"))[0] == 200
        old = await begin(served)
        assert await hear(old, 1) == b"one "
        assert (await load(served, "m"))[0] == 200  # nothing has changed
        (folder / "model.py").write_text(STREAM.format(version="two").replace("1000", "3"))
        assert (await load(served, "m"))[0] == 200
        assert await hear(await begin(served)) == b"two " * 3
        assert await hear(old) == b"one " * 7
        (folder / "model.py").write_text("this is no Python")
        status, body = await load(served, "m")
        assert (status, b"the folder of model 'm'" in body) == (500, True), body
        assert await hear(await begin(served)) == b"two " * 3
        await served.gateway.control.unload("m")
        assert [name for name in sys.modules if name.startswith("everywire_model_")] == []


# -- the repository --------------------------------------------------------------------------------------------------


async def test_a_folder_whose_files_are_as_they_were_is_not_loaded_again(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        await at.load("a", memory="1 KiB")
        control, worker = control_of(at), at.worker("a")
        await control.load("a")
        assert at.worker("a") is worker
        change(at, "a")
        await control.load("a")
        assert at.worker("a") is not worker
        worker = at.worker("a")
        (at.path / "a" / "note").unlink()
        await control.load("a")
        assert at.worker("a") is not worker
        await at.repository.unload("a")


async def test_both_versions_count_while_both_are_there(tmp_path: Path) -> None:
    async with place(tmp_path, memory=10 * KiB) as at:
        await at.load("a", memory="4 KiB")
        entered, leave = at.gate("a")
        async with asking(lambda: at.repository.reload("a")) as (asked,):
            await until(entered.is_set)
            assert (at.repository.used, at.worker("a").ready) == (8 * KiB, True)
            assert await outcome(at.worker("a"), Part(data=b"x")) == "complete"
            error = await failure(lambda: at.repository.reload("a"))
            assert (type(error), error.message) == (Conflict, "model 'a' is being reloaded")
            leave.set()
        assert asked.outcome.memory == 4 * KiB
        await until(lambda: at.repository.used == 4 * KiB)
        change(at, "a", memory="7 KiB")
        worker = at.worker("a")
        assert isinstance(await failure(lambda: at.repository.reload("a")), InsufficientStorage)
        assert (at.worker("a") is worker, at.repository.used, worker.ready) == (True, 4 * KiB, True)
        await at.repository.unload("a")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("raise OSError('no weights')", LoadFailed),
        ("x = 1", BadModel),
        ("def model(text: str) -> str:\n    return text\n", Conflict),
    ],
)
async def test_a_new_version_that_cannot_be_is_told_and_the_old_one_serves_on(
    tmp_path: Path, code: str, kind: type[GatewayError]
) -> None:
    async with place(tmp_path) as at:
        await at.load("a", memory="1 KiB")
        worker = at.worker("a")
        change(at, "a", code=code)
        assert type(await failure(lambda: at.repository.reload("a"))) is kind
        assert (at.worker("a") is worker, at.repository.used, at.repository.names) == (True, KiB, ["a"])
        assert await outcome(worker, Part(data=b"x")) == "complete"
        await at.repository.unload("a")


async def test_a_caller_who_leaves_has_given_the_new_version_up(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        await at.load("a")
        worker = at.worker("a")
        entered, leave = at.gate("a")
        async with asking(lambda: at.repository.reload("a")) as (asked,):
            await until(entered.is_set)
            asked.scope.cancel()
            leave.set()
        assert (asked.outcome, at.worker("a") is worker) == ("left", True)
        await at.repository.unload("a")


async def test_an_unload_takes_the_new_version_and_what_is_left_of_old_ones_with_it(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        await at.load("a")
        entered, leave = at.gate("a")
        async with asking(lambda: at.repository.reload("a")) as (reloading,):
            await until(entered.is_set)
            async with asking(lambda: at.repository.unload("a")):
                await reloading.over.wait()
                leave.set()
        assert isinstance(reloading.outcome, Unavailable)
        assert (at.repository.names, at.repository.used) == ([], 0)


async def test_what_is_not_there_is_not_reloaded(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        assert isinstance(await failure(lambda: at.repository.reload("a")), NotFound)
        GATES["a"] = threading.Event(), threading.Event()
        entered, leave = GATES["a"]
        url = at.folder("a")
        async with asking(lambda: at.repository.load("a", url)) as (_,):
            await until(entered.is_set)
            assert isinstance(await failure(lambda: at.repository.reload("a")), Conflict)
            leave.set()
        await at.repository.unload("a")


async def test_whoever_holds_the_old_version_is_not_robbed_of_the_new_one(tmp_path: Path) -> None:
    """It has chosen the one, and no slot yet: it is sent on to the other, which must be there then."""
    async with place(tmp_path, memory=10 * KiB) as at:
        one, other = at.folder("a", memory="4 KiB"), at.folder("b", memory="8 KiB")
        async with at.repository.in_use("a", one) as worker:
            await at.repository.reload("a")
            assert worker.successor is at.worker("a")
            async with asking(lambda: entered_and_left(at, other)) as (asked,):
                await asked.over.wait()
            assert isinstance(asked.outcome, GatewayError)
            assert await outcome(worker, Part(data=b"x")) == "complete"
        async with at.repository.in_use("b", other):
            assert at.repository.names == ["b"]
        await at.repository.unload("b")


async def entered_and_left(at: Place, url: str) -> None:
    async with at.repository.in_use("b", url):
        raise AssertionError("there is no place for it")


async def test_two_reloads_leave_the_streams_of_both_old_versions_alone(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.py").write_text(STREAM.format(version="0").replace("1000", "12"))
    repository = RepositoryConfig(roots=(str(tmp_path),), code=(str(tmp_path),))
    async with memory_gateway([], Config(repository=repository, v2=V2Config(model_control=True))) as served:
        assert (await load(served, "m"))[0] == 200
        streams = []
        for version in range(3):
            streams.append(await begin(served))
            assert await hear(streams[-1], 1) == b"%d " % version
            (folder / "model.py").write_text(STREAM.format(version=version + 1).replace("1000", f"{12 - 4 * version}"))
            os.utime(folder / "model.py", ns=(version, version))
            assert (await load(served, "m"))[0] == 200
        heard = [await hear(stream) for stream in streams]
        assert heard == [b"0 " * 11, b"1 " * 11, b"2 " * 7]
        await served.gateway.control.unload("m")


async def test_the_gateway_reloads_a_folder_whether_it_has_changed_or_not(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.py").write_text(STREAM.format(version="one"))
    repository = RepositoryConfig(roots=(str(tmp_path),), code=(str(tmp_path),))
    async with memory_gateway([], Config(repository=repository)) as served:
        gateway = served.gateway
        await gateway.repository.load("m", str(folder))
        worker = gateway.supervisor.workers["m"]
        assert (await gateway.reload("m")).ready
        assert gateway.supervisor.workers["m"] is not worker
        with pytest.raises(Conflict, match="only its folder can change it"):
            await gateway.reload("m", worker.spec)
        with trio.fail_after(PATIENCE):
            await gateway.repository.unload("m")
