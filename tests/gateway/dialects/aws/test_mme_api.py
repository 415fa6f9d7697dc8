"""The multi-model container API and endpoints of many models, over the wire: decisions, texts, pages, and no husk."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.config import Config, EndpointConfig, RepositoryConfig, SageMakerConfig
from gateway.testing.stories.talk import Leave
from models.adapt import spec_of
from models.messages import Family, Part
from models.session import Session
from models.spec import ModelSpec
from tests.gateway.dialects.aws import test_mme_api as these
from tests.gateway.promises import House, Over, Probe, at_once, serving, silent

LOADS: dict[str, tuple[threading.Event, threading.Event]] = {}
"""By model: the event that its code sets when it runs, and the event that it then waits for."""
CALLS: dict[str, Gate] = {}
PATIENCE = 60.0
MODEL = "from tests.gateway.dialects.aws.test_mme_api import spec_of_folder\nmodel = spec_of_folder(__file__)\n"


class Gate:
    """A model whose calls wait to be let through."""

    def __init__(self) -> None:
        self.go, self.calls = trio.Event(), 0

    async def __call__(self, session: Session[Any, Any]) -> None:
        self.calls += 1
        await self.go.wait()
        await session.send(Part(data=b"done"))


def spec_of_folder(file: str) -> ModelSpec:
    """The spec that a model.py of these tests defines; it waits if LOADS has its name."""
    name = Path(file).parent.name
    if name in these.LOADS:
        entered, leave = these.LOADS[name]
        entered.set()
        assert leave.wait(PATIENCE)
    return spec_of(these.CALLS.setdefault(name, Gate()), name, family=Family.PARTS, capacity=1)


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """Three small models of the library's, one that is code, one that is broken, one that is too large."""
    for name in ("a", "b", "c", "d"):
        folder(tmp_path, name, 'factory = "echo"\nmemory = 1000\n')
    folder(tmp_path, "code", "memory = 1000\n", MODEL)
    folder(tmp_path, "broken", "memory = 1000\n", "raise RuntimeError('no weights')\n")
    folder(tmp_path, "large", 'factory = "echo"\nmemory = 1000000\n')
    yield tmp_path
    for _, leave in LOADS.values():
        leave.set()
    LOADS.clear()
    CALLS.clear()


@asynccontextmanager
async def loading(name: str) -> AsyncIterator[None]:
    """Inside the block the model's code runs; at its end it runs on."""
    entered, leave = LOADS[name]
    assert await trio.to_thread.run_sync(entered.wait, PATIENCE)
    yield
    leave.set()


def folder(root: Path, name: str, toml: str, code: str = "") -> None:
    made = root / "models" / name
    made.mkdir(parents=True)
    (made / "model.toml").write_text(toml)
    if code:
        (made / "model.py").write_text(code)


def many(root: Path, *, memory: int = 2500, models: int = 100, **more: Any) -> Config:
    models_in = str(root / "models")
    return Config(
        sagemaker=SageMakerConfig(multi_model=True),
        repository=RepositoryConfig(roots=(models_in,), code=(models_in,), memory=memory, models=models, **more),
        endpoints={"many": EndpointConfig(models=models_in)},
    )


Answer = tuple[int, Any]


async def load(house: House, root: Path, name: str, url: str = "") -> Answer:
    body = json.dumps({"model_name": name, "url": url or str(root / "models" / name)}).encode()
    return await api(house, "/models", body)


async def api(house: House, path: str, body: bytes = b"", method: bytes = b"POST") -> Answer:
    status, headers, answer = await house.ask(path, body, method=method)
    assert headers["content-type"] == "application/json"
    return status, json.loads(answer)


async def names(house: House) -> list[str]:
    status, page = await api(house, "/models", method=b"GET")
    assert status == 200
    return [model["modelName"] for model in page["models"]]


async def use(house: House, target: str, body: bytes = b"x") -> Answer:
    """Target-Model on the platform's side."""
    status, headers, answer = await house.ask("/endpoints/many/invocations", body, ("x-amzn-sagemaker-target-model", target))
    if status == 200:
        return status, answer
    return status, {"type": headers["x-amzn-errortype"]} | json.loads(answer)


@contextmanager
def nothing_left(house: House) -> Iterator[None]:
    """Checks at its end that the repository holds neither a name nor a byte."""
    yield
    assert (house.gateway.repository.names, house.gateway.repository.used) == ([], 0)


# the clock is real in all of these: files are read in threads


async def test_a_model_comes_answers_and_goes(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        url = str(folders / "models" / "a")
        with nothing_left(house):
            assert await load(house, folders, "a") == (200, {"status": 'Model "a" registered'})
            assert await api(house, "/models/a", method=b"GET") == (200, {"modelName": "a", "modelUrl": url})
            assert await api(house, "/models", method=b"GET") == (200, {"models": [{"modelName": "a", "modelUrl": url}]})
            for path in ("/models/a/invoke", "/endpoints/a/invocations", "/invocations?model_name=a"):
                assert (await house.ask(path, b"said"))[::2] == (200, b"said")
            assert await api(house, "/models/a", method=b"DELETE") == (200, {"status": 'Model "a" unregistered'})
        assert (await house.ask("/models/a/invoke", b"said"))[0] == 404
        assert await names(house) == []


ERRORS = [
    ("DELETE", "/models/none", 404, "ModelNotFoundException", "no model 'none' is loaded"),
    ("GET", "/models/none", 404, "ModelNotFoundException", "no model 'none' is loaded"),
    ("POST", "/models/none/invoke", 404, "ModelNotFoundException", "no model 'none'; there are: "),
    ("GET", "/models/probe", 404, "ModelNotFoundException", "no model 'probe' is loaded"),
    ("DELETE", "/models/probe", 409, "ConflictStatusException", "in the server's configuration"),
]


@pytest.mark.parametrize(("method", "path", "status", "kind", "text"), ERRORS)
async def test_what_is_asked_of_a_model_that_is_not_loaded(
    method: str, path: str, status: int, kind: str, text: str, folders: Path
) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        answered, body = await api(house, path, method=method.encode())
        assert (answered, body["code"], body["type"]) == (status, status, kind)
        assert text in body["message"]


LOAD_ERRORS = [
    ("probe", "", 409, "in the server's configuration"),
    ("x", "none", 404, "there is no such folder"),
    ("x", "/etc", 400, "repository.roots"),
    ("x", "../../etc", 400, "repository.roots"),
    ("x", "link", 400, "repository.roots"),
    ("broken", "", 500, "no weights"),
    ("large", "", 507, "repository.memory"),
]


@pytest.mark.parametrize(("name", "url", "status", "text"), LOAD_ERRORS)
async def test_a_load_that_fails_says_why_and_leaves_nothing(
    name: str, url: str, status: int, text: str, folders: Path
) -> None:
    (folders / "models" / "link").symlink_to("/etc")
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        with nothing_left(house):
            where = url if url.startswith("/") else str(folders / "models" / (url or name))
            answered, body = await load(house, folders, name, where)
            assert (answered, body["code"]) == (status, status)
            assert text in body["message"]
        assert await names(house) == []
        assert (await load(house, folders, "a"))[0] == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"model_name": "a"}', b'{"model_name": "a/b", "url": "/x"}', b'{"model_name": 1, "url": "/x"}'],
)
async def test_a_body_that_is_no_load(body: bytes, folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        answered, said = await api(house, "/models", body)
        assert (answered, said["type"]) == (400, "BadRequestException")


async def test_the_second_loader_is_told_so_at_once_and_the_first_is_not_disturbed(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        answers: list[Answer] = []
        LOADS["code"] = threading.Event(), threading.Event()

        async def first() -> None:
            answers.append(await load(house, folders, "code"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            async with loading("code"):
                status, body = await load(house, folders, "code", str(folders / "models" / "b"))
                assert (status, body["type"]) == (409, "ConflictStatusException")
                assert body["message"] == "model 'code' is being loaded"
                assert not answers
        assert answers[0][0] == 200
        assert (await load(house, folders, "code"))[1]["message"] == "model 'code' is loaded already"


async def test_a_client_that_leaves_in_the_middle_of_a_load_gives_it_up(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        line = house.line("http1")
        LOADS["code"] = threading.Event(), threading.Event()
        body = json.dumps({"model_name": "code", "url": str(folders / "models" / "code")}).encode()
        await line.send(*house.posted(1, "/models", body))
        async with loading("code"):
            line.peer.close()
            await house.still()
            assert house.gateway.repository.names == ["code"]
        with trio.fail_after(PATIENCE), nothing_left(house):
            while house.gateway.repository.names:
                await trio.lowlevel.checkpoint()
        assert (await load(house, folders, "code"))[0] == 200


async def test_a_load_beyond_the_budget_is_refused_and_room_helps(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        for name in ("a", "b"):
            assert (await load(house, folders, name))[0] == 200
        status, body = await load(house, folders, "c")
        assert (status, body["type"]) == (507, "InsufficientStorageException")
        assert "needs 1000 bytes, and 2000 of 2500 are in use (repository.memory)" in body["message"]
        assert await names(house) == ["a", "b"]
        assert (await api(house, "/models/a", method=b"DELETE"))[0] == 200
        assert (await load(house, folders, "c"))[0] == 200


@pytest.mark.parametrize(("limit", "pages"), [(1, [1, 1, 1, 1]), (2, [2, 2]), (3, [3, 1]), (4, [4]), (100, [4])])
async def test_pages_end_with_the_last_model(limit: int, pages: list[int], folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders, memory=10_000)) as house:
        for name in "dbca":
            assert (await load(house, folders, name))[0] == 200
        seen, sizes, token = [], [], ""
        while True:
            _, page = await api(house, f"/models?limit={limit}&next_page_token={token}", method=b"GET")
            sizes.append(len(page["models"]))
            seen += [model["modelName"] for model in page["models"]]
            token = page.get("nextPageToken", "")
            if not token:
                break
        assert (seen, sizes) == (list("abcd"), pages)


async def test_a_query_with_too_many_members_is_refused(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        for path, method in (("/models?limit=1", b"GET"), ("/invocations?model_name=a", b"POST")):
            status, told = await api(house, path + "&a=b" * 100, method=method)
            assert (status, "100 members" in json.dumps(told)) == (400, True), path


async def test_an_unload_waits_for_the_invocation_under_way_and_answers_the_queued(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        assert (await load(house, folders, "code"))[0] == 200
        answers: dict[str, tuple[int, bytes]] = {}

        async def call(key: str, path: str, method: bytes = b"POST") -> None:
            status, _, body = await house.ask(path, b"", method=method)
            answers[key] = status, body

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, "first", "/models/code/invoke")
            while not CALLS["code"].calls:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(call, "queued", "/models/code/invoke")
            await house.still()
            nursery.start_soon(call, "unload", "/models/code", b"DELETE")
            await house.still()
            assert set(answers) == {"queued"}, "one answer, and the unload waits"
            assert answers["queued"][0] in (404, 503)
            assert (await house.ask("/models/code/invoke", b""))[0] == 404  # it is out of service at once
            assert (await load(house, folders, "code"))[1]["message"] == "model 'code' is still being unloaded"
            assert await names(house) == []
            CALLS["code"].go.set()
        assert answers["first"] == (200, b"done")
        assert answers["unload"][0] == 200
        assert (house.gateway.repository.names, house.gateway.repository.used) == ([], 0)


async def test_an_unload_ends_what_does_not_end_by_itself(folders: Path) -> None:
    config = many(folders, unload_timeout=0.01)
    async with serving(Probe(silent).spec("bidi"), config=config) as house:
        assert (await load(house, folders, "code"))[0] == 200
        ended: list[int] = []

        async def call() -> None:
            ended.append((await house.ask("/models/code/invoke", b""))[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            while not CALLS["code"].calls:
                await trio.lowlevel.checkpoint()
            with nothing_left(house):
                assert (await api(house, "/models/code", method=b"DELETE"))[0] == 200
        assert ended == [503]


async def test_a_client_that_leaves_in_the_middle_of_an_unload_does_not_stop_it(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        assert (await load(house, folders, "a"))[0] == 200
        line = house.line("http1")
        await line.send(*house.posted(1, "/models/a", b"", b"DELETE"))
        while await names(house):
            await trio.lowlevel.checkpoint()
        line.peer.close()
        with trio.fail_after(PATIENCE), nothing_left(house):
            while house.gateway.repository.names:
                await trio.lowlevel.checkpoint()


# -- models on their first use -------------------------------------------------------------------------------------------


async def test_a_target_model_is_loaded_on_its_first_use_and_the_least_used_goes(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        repository = house.gateway.repository
        for target in ("a", "b.tar.gz", "a.tar.gz", "c"):
            assert await use(house, target, target.encode()) == (200, target.encode())
        held = sorted(model.url.rpartition("/")[2] for model in repository.list())
        assert held == ["a", "c"]
        assert repository.used == 2000


async def test_first_uses_at_once_share_one_load(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        answers: list[Answer] = []

        async def call(n: int) -> None:
            answers.append(await use(house, "a", b"%d" % n))

        async with trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(call, n)
        assert sorted(answers) == [(200, b"%d" % n) for n in range(10)]
        assert len(house.gateway.repository.list()) == 1


@pytest.mark.parametrize(
    ("target", "status", "kind", "text"),
    [
        ("none", 400, "ValidationError", "there is no such folder"),
        ("../models/a", 400, "ValidationError", "a path below the endpoint's models"),
        ("/etc", 400, "ValidationError", "a path below the endpoint's models"),
        # one folder has one name, or each spelling of it would be a model of its own
        *[
            (t, 400, "ValidationError", "without empty segments")
            for t in ("a/", "./a", ".", "models//a", "a/.tar.gz", ".tar.gz")
        ],
        ("link", 400, "ValidationError", "repository.roots"),
        ("broken", 424, "ModelError", "no weights"),
        ("large", 424, "ModelError", "repository.memory"),
    ],
)
async def test_a_target_model_that_cannot_be_used(target: str, status: int, kind: str, text: str, folders: Path) -> None:
    (folders / "models" / "link").symlink_to("/etc")
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        with nothing_left(house):
            answered, body = await use(house, target)
            assert (answered, body["type"]) == (status, kind)
            assert text in body["Message"]
            assert str(folders) not in body["Message"], "a path of the server's is nothing to whoever named a target"
        if status == 424:
            assert body["OriginalStatusCode"] == (507 if target == "large" else 500)


async def test_a_model_in_use_is_not_evicted(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders, memory=1500)) as house:
        async with trio.open_nursery() as nursery:
            done: list[Answer] = []

            async def call() -> None:
                done.append(await use(house, "code"))

            nursery.start_soon(call)
            while "code" not in CALLS or not CALLS["code"].calls:
                await trio.lowlevel.checkpoint()
            status, body = await use(house, "a")
            assert status == 503
            assert "all of them in use; try again later" in body["Message"]
            CALLS["code"].go.set()
        assert done == [(200, b"done")]
        assert await use(house, "a", b"now") == (200, b"now")


async def test_an_endpoint_of_many_models_must_be_told_which(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        status, headers, body = await house.ask("/endpoints/many/invocations", b"x")
        assert (status, headers["x-amzn-errortype"]) == (400, "ValidationError")
        assert "Target-Model" in json.loads(body)["Message"]
        status, _, body = await house.ask("/endpoints/many/invocations-response-stream", b"x")
        assert (status, b"many models" in body) == (400, True)


async def test_without_multi_model_there_is_no_such_api(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("bidi")) as house:
        with at_once():
            assert (await house.ask("/models", b"{}"))[0] == 404
            assert (await house.ask("/models/probe", b"", method=b"DELETE"))[0] == 404


async def test_a_loaded_model_is_served_on_bidi_and_websocket_too(folders: Path) -> None:
    async with serving(Probe(silent).spec("bidi"), config=many(folders)) as house:
        assert (await load(house, folders, "a"))[0] == 200
        for wire in ("bidi", "websocket"):
            call = await house.call(wire, "a")
            await call.say(8)  # type: ignore[attr-defined]
            assert await call.next() == 0
            if wire == "bidi":
                await call.hush()  # type: ignore[attr-defined]
                assert await call.rest() == ([], Over("complete"))
            else:
                await call.leave(Leave.STREAM)
