"""v2's management calls over the wire: models that come and go, one truth on every wire, the log, and what there is not."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.catalog import load_unload
from gateway.catalog.load_unload import STANDINGS
from gateway.config import Config, EndpointConfig, RepositoryConfig, SageMakerConfig, V2Config, VariantConfig
from gateway.dialects.v2.repository import _changed
from gateway.errors import BadRequest
from gateway.workers.states import State
from models.adapt import spec_of
from models.blocking import _holder
from models.messages import Family
from models.spec import ModelSpec, RestartPolicy
from protocols.v2.repository import LogChange
from tests.gateway.dialects.aws.test_mme_api import folder
from tests.gateway.promises import House, Probe, answering, pausing, serving, silent
from tests.gateway.workers.test_worker import House as Loader

# without roots no thread looks into them, so that a mocked clock stands still
CONTROL = Config(v2=V2Config(model_control=True), repository=RepositoryConfig(roots=()))
POLICY = RestartPolicy(intensity=1, period=1000.0, backoff=5.0)

Answer = tuple[int, Any]


async def post(house: House, path: str, body: Any = None) -> Answer:
    said = b"" if body is None else json.dumps(body).encode()
    status, headers, answer = await house.ask("/v2" + path, said)
    assert headers["content-type"] == "application/json"
    return status, json.loads(answer)


async def get(house: House, path: str) -> Answer:
    status, headers, answer = await house.ask(path, None, method=b"GET")
    assert headers["content-type"] == "application/json"
    return status, json.loads(answer)


async def load(house: House, name: str, **body: Any) -> Answer:
    return await post(house, f"/repository/models/{name}/load", body or None)


async def unload(house: House, name: str, **body: Any) -> Answer:
    return await post(house, f"/repository/models/{name}/unload", body or None)


async def index(house: House, **body: Any) -> dict[str, tuple[str, str]]:
    status, entries = await post(house, "/repository/index", body or None)
    assert status == 200
    return {entry["name"]: (entry["state"], entry["reason"]) for entry in entries}


READY = ("READY", "")


def loaded_by(loader: Loader, name: str = "m", **options: Any) -> ModelSpec:
    return loader.spec(**{"name": name, "family": Family.PARTS, "restart": POLICY, **options})


@asynccontextmanager
async def run_in_codec_thread(house: House, *calls: Callable[[], Any]) -> AsyncIterator[list[Answer]]:
    """Calls that are under way while the block runs; their answers, in the order in which they came."""
    answers: list[Answer] = []

    async def keep(call: Callable[[], Any]) -> None:
        answers.append(await call())

    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(keep, call)
            await house.still()
        yield answers


# -- a model of the configuration


async def test_an_unloaded_model_is_gone_on_every_wire_and_back_after_a_load(autojump_clock: Any) -> None:
    probe = Probe(pausing, "m")
    probe.go.set()
    config = replace(
        CONTROL,
        sagemaker=SageMakerConfig(multi_model=True),
        endpoints={"other": EndpointConfig(variants={"v": VariantConfig(model="m")})},
    )
    wires = ("bidi", "websocket", "container-http1", "mme-http2", "streamparts-http1", "invokeparts-http2")
    async with serving(probe.spec("bidi"), config=config) as house:
        for _ in range(2):
            for wire in wires:
                _, over = await (await house.call(wire, "m")).rest()
                assert over.how == "complete", wire
            assert await index(house) == {"m": READY}
            assert (await get(house, "/v2/models"))[1] == {"models": ["m"]}
            assert await unload(house, "m") == (200, {"name": "m", "unload": True})

            assert await index(house) == {"m": ("UNAVAILABLE", "unloaded")}
            assert await index(house, ready=True) == {}
            assert (await get(house, "/v2/models"))[1] == {"models": []}
            missed = {"status": "Unhealthy", "reason": "was unloaded, and no model is ready"}
            assert (await get(house, "/ping")) == (503, {"m": missed})
            for path in ("", "/ready", "/stats", "/config", "/versions/1/ready"):
                assert (await get(house, "/v2/models/m" + path))[0] == 404
            assert (await house.ask("/v2/models/m/infer", b"{}"))[0] == 404
            assert (await house.ask("/models/m/invoke", b"x"))[0] == 404
            assert (await house.ask("/predictions/m", b"{}"))[0] == 404
            assert (await house.ask("/endpoints/m/invocations", b"x"))[0] == 400
            assert (await house.ask("/endpoints/other/invocations", b"x"))[0] == 400
            _, over = await (await house.call("bidi", "m")).rest()
            assert over.how != "complete"
            assert (await get(house, "/v2/health/ready"))[0] == 503  # there is nobody else

            assert await load(house, "m") == (200, {"name": "m", "load": True})


async def test_a_load_starts_with_a_clean_state_and_clean_counts(autojump_clock: Any) -> None:
    loader = Loader(Probe(answering, "m"))
    loader.model.go.set()  # type: ignore[attr-defined]
    async with serving(loaded_by(loader), config=CONTROL) as house:
        assert (await (await house.call("container-http1", "m")).rest())[1].how == "complete"
        assert (await get(house, "/v2/models/m/stats"))[1]["model_stats"][0]["execution_count"] == 1
        await unload(house, "m")
        assert loader.diary == ["load", "unload", "unloaded"]
        assert (await load(house, "m"))[0] == 200
        assert loader.loads == 2
        assert (await get(house, "/v2/models/m/stats"))[1]["model_stats"][0]["execution_count"] == 0
        # it is a model of the configuration as it was before: a crash is one of its worker's, and 409 what names it
        loader.crash.set()
        await house.still()
        assert (await get(house, "/v2/models/m/ready")) == (503, {"name": "m", "ready": False})
        await trio.sleep(6)
        assert await index(house) == {"m": READY}


async def test_what_is_ready_or_unknown_is_as_it_was(autojump_clock: Any) -> None:
    loader = Loader()
    async with serving(loaded_by(loader), config=CONTROL) as house:
        assert (await load(house, "m"))[0] == 200
        assert loader.loads == 1
        assert await unload(house, "nobody") == (200, {"name": "nobody", "unload": True})
        for _ in range(2):
            assert (await unload(house, "m", parameters={"unload_dependents": True}))[0] == 200
        status, body = await load(house, "nobody")
        assert (status, "no model 'nobody'" in body["error"], "repository.roots" in body["error"]) == (404, True, True)
        assert (await load(house, "m"))[0] == 200  # the ledger counts its task


async def test_sessions_have_their_time_and_then_their_ending(autojump_clock: Any) -> None:
    config = replace(CONTROL, repository=RepositoryConfig(roots=(), unload_timeout=20.0))
    probe = Probe(answering, "m")
    async with serving(probe.spec("bidi"), config=config) as house:
        call = await house.call("container-http1", "m")
        await house.still()
        async with run_in_codec_thread(house, lambda: unload(house, "m"), lambda: unload(house, "m")) as answers:
            assert await index(house) == {"m": ("UNLOADING", "")}
            status, body = await load(house, "m")
            assert (status, "still being unloaded" in body["error"]) == (409, True)
            assert (await house.ask("/models/m/invoke", b"x"))[0] == 404
            assert answers == []
            probe.go.set()
            assert (await call.rest())[1].how == "complete"
        assert [status for status, _ in answers] == [200, 200]
        await load(house, "m")
        probe.go = trio.Event()
        call = await house.call("container-http1", "m")
        await house.still()
        began = trio.current_time()
        assert (await unload(house, "m"))[0] == 200
        assert trio.current_time() - began == 20
        assert (await call.rest())[1].code == "503"
        assert (await load(house, "m"))[0] == 200  # the ledger counts its task


async def test_a_load_under_way_is_told_of_and_given_up_with_its_caller(autojump_clock: Any) -> None:
    loader, go = Loader(), trio.Event()
    async with serving(loaded_by(loader), Probe(silent, "other").spec("bidi"), config=CONTROL) as house:
        await unload(house, "m")
        loader.before = go.wait
        line = house.line("http1")
        await line.send(*house.posted(1, "/v2/repository/models/m/load", b""))
        await house.still()
        assert (await index(house))["m"] == ("LOADING", "")
        for call in (load, unload):
            status, body = await call(house, "m")
            assert (status, "is being loaded" in body["error"]) == (409, True)
        assert (await get(house, "/v2/health/ready"))[0] == 200  # the others live
        assert (await get(house, "/v2/models/m/ready"))[0] == 404
        line.peer.close()
        await house.still()
        assert loader.diary[-3:] == ["load", "unload", "unloaded"]
        assert (await index(house))["m"] == ("UNAVAILABLE", "unloaded")
        assert (await get(house, "/v2/health/ready"))[0] == 200
        go.set()
        assert (await load(house, "m"))[0] == 200
        assert (await index(house))["m"] == READY


async def test_an_unload_goes_on_without_its_caller(autojump_clock: Any) -> None:
    probe = Probe(answering, "m")
    async with serving(probe.spec("bidi"), config=CONTROL) as house:
        call = await house.call("container-http1", "m")
        await house.still()
        line = house.line("http1")
        await line.send(*house.posted(1, "/v2/repository/models/m/unload", b""))
        await house.still()
        line.peer.close()
        await house.still()
        assert await index(house) == {"m": ("UNLOADING", "")}
        probe.go.set()
        assert (await call.rest())[1].how == "complete"
        await house.still()
        assert await index(house) == {"m": ("UNAVAILABLE", "unloaded")}
        assert (await load(house, "m"))[0] == 200  # the ledger counts its task


async def test_a_model_that_was_given_up_is_started_again(autojump_clock: Any) -> None:
    loader = Loader()
    async with serving(loaded_by(loader), config=CONTROL) as house:
        for _ in range(2):
            loader.crash.set()
            await trio.sleep(6)
        assert await index(house) == {"m": STANDINGS_OF[State.FAILED]}
        assert (await load(house, "m"))[0] == 200
        assert await index(house) == {"m": READY}
        # with a fresh restart policy: one crash is one again
        loader.crash.set()
        await trio.sleep(6)
        assert await index(house) == {"m": READY}
        loader.crash.set()
        await trio.sleep(6)
        assert await index(house) == {"m": STANDINGS_OF[State.FAILED]}
        assert (await get(house, "/ping")) == (503, {"m": {"status": "FAILED", "reason": "was given up"}})
        assert (await unload(house, "m"))[0] == 200
        assert await index(house) == {"m": STANDINGS_OF[State.STOPPED]}
        assert (await load(house, "m"))[0] == 200  # the ledger counts its task


async def test_a_load_does_not_wait_for_the_restart_of_a_model_that_crashed(autojump_clock: Any) -> None:
    loader = Loader()
    async with serving(loaded_by(loader), config=CONTROL) as house:
        loader.crash.set()
        await house.still()
        assert await index(house) == {"m": STANDINGS_OF[State.RESTARTING]}
        began = trio.current_time()
        assert (await load(house, "m"))[0] == 200
        assert trio.current_time() == began
        await trio.sleep(10)
        assert loader.loads == 2


async def test_a_load_that_raises_says_so_and_leaves_nothing(autojump_clock: Any) -> None:
    loader = Loader()
    async with serving(loaded_by(loader), config=CONTROL) as house:
        await unload(house, "m")

        async def fail() -> None:
            raise OSError("no weights")

        loader.before = fail
        status, body = await load(house, "m")
        assert (status, body) == (500, {"error": "model 'm' cannot be loaded: OSError: no weights"})
        assert await index(house) == {"m": ("UNAVAILABLE", "it could not be loaded; the log says why")}
        loader.before = None
        assert (await load(house, "m"))[0] == 200


async def test_there_are_never_two_of_a_model(autojump_clock: Any) -> None:
    """The clean-up of one that crashed lasts, and whoever asked for the next has left meanwhile."""
    loader, go = Loader(), trio.Event()
    async with serving(loaded_by(loader), config=CONTROL) as house:
        loader.after = go.wait
        loader.crash.set()
        await house.still()
        line = house.line("http1")
        await line.send(*house.posted(1, "/v2/repository/models/m/load", b""))
        await house.still()
        assert (await load(house, "m"))[0] == 409
        line.peer.close()
        await house.still()
        for _ in range(2):
            status, body = await load(house, "m")
            assert (status, "is there already" in body["error"]) == (409, True)
        go.set()
        await house.still()
        assert (await load(house, "m"))[0] == 200
        assert loader.diary == ["load", "unload", "unloaded", "load"]


async def test_a_thread_that_does_not_end_keeps_the_name(autojump_clock: Any) -> None:
    holders: list[Any] = []

    async def leaves_a_thread(session: Any) -> None:
        holder = _holder.get()
        assert holder is not None
        holder.hold()
        holders.append(holder)

    model = spec_of(leaves_a_thread, "m", family=Family.PARTS)
    config = replace(CONTROL, repository=RepositoryConfig(roots=(), unload_timeout=20.0))
    async with serving(model, config=config) as house:
        assert (await house.ask("/models/m/invoke", b"x"))[0] == 200
        for _ in range(2):
            status, body = await unload(house, "m")
            assert (status, "a thread of it does not end" in body["error"]) == (503, True)
            assert (await load(house, "m"))[0] == 409
            assert await index(house) == {"m": ("UNLOADING", "")}
        holders.pop().release()
        await house.still()
        assert (await unload(house, "m"))[0] == 200
        assert (await load(house, "m"))[0] == 200


async def test_a_drain_takes_what_is_on_its_way_with_it(autojump_clock: Any) -> None:
    probe, loader = Probe(silent, "m"), Loader()
    async with serving(probe.spec("bidi"), loaded_by(loader, "n"), config=CONTROL) as house:
        await unload(house, "n")
        call = await house.call("container-http1", "m")
        await house.still()
        loader.before = trio.sleep_forever
        async with run_in_codec_thread(house, lambda: unload(house, "m"), lambda: load(house, "n")) as answers:
            report = await house.gateway.drain()
        assert not report.clean
        assert [status for status, _ in answers] == [503, 503]
        assert (await call.rest())[1].code == "503"
        assert loader.diary[-2:] == ["unload", "unloaded"]


# -- names of states

STANDINGS_OF = {state: (standing.value, reason) for state, (standing, reason) in STANDINGS.items()}
TABLE = [
    # the worker, /v2/models/m/ready, the word of /ping, the index
    (State.LOADING, 503, "PENDING", "LOADING"),
    (State.READY, 200, "Healthy", "READY"),
    (State.DRAINING, 503, "Unhealthy", "UNLOADING"),
    (State.RESTARTING, 503, "Unhealthy", "UNAVAILABLE"),
    (State.FAILED, 503, "FAILED", "UNAVAILABLE"),
    (State.ENDED, 503, "ENDED", "UNAVAILABLE"),
    (State.STOPPED, 503, "Unhealthy", "UNAVAILABLE"),
]


@pytest.mark.parametrize(("state", "ready", "ping", "standing"), TABLE)
async def test_every_state_of_a_worker_has_its_word(state: State, ready: int, ping: str, standing: str) -> None:
    async with serving(Probe(silent, "m").spec("bidi"), config=CONTROL) as house:
        worker = house.gateway.supervisor.workers["m"]
        worker.life.state, before = state, worker.life.state
        assert (await get(house, "/v2/models/m/ready")) == (ready, {"name": "m", "ready": ready == 200})
        assert (await get(house, "/ping"))[1]["m"]["status"] == ping
        assert await index(house) == {"m": (standing, STANDINGS[state][1])}
        worker.life.state = before


def test_the_table_has_every_state() -> None:
    assert {state for state, *_ in TABLE} == set(STANDINGS) == set(State)


# -- folders


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        folder(tmp_path, name, 'factory = "identity"\nmemory = 1000\n')
    folder(tmp_path, "broken", 'factory = "nothing"\n')
    folder(tmp_path, ".hidden", 'factory = "echo"\n')
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "models" / "file").write_text("x")
    return tmp_path / "models"


def rooted(root: Path, **more: Any) -> Config:
    return replace(CONTROL, repository=RepositoryConfig(roots=(str(root / "none"), str(root))), **more)


async def test_what_leads_out_of_the_roots_is_not_listed_and_no_error_tells_where_they_are(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    folder(elsewhere, "secret", 'factory = "echo"\n')
    (root / "out").symlink_to(elsewhere / "models" / "secret")
    (root / "in").symlink_to(root / "a")
    async with serving(Probe(silent, "m").spec("bidi"), config=rooted(root)) as house:
        assert sorted(await index(house)) == ["a", "b", "broken", "in", "m"]
        for name in ("out", "broken"):
            status, body = await load(house, name)
            assert status >= 400
            assert str(root.parent) not in body["error"]
            assert f"the folder of model '{name}'" in body["error"]


async def test_folders_are_models_by_their_names(root: Path) -> None:
    config = rooted(root, sagemaker=SageMakerConfig(multi_model=True))
    there = dict.fromkeys(("a", "b", "broken"), ("UNAVAILABLE", "not loaded"))
    async with serving(Probe(silent, "m").spec("bidi"), config=config) as house:
        assert await index(house) == {**there, "m": READY}
        assert (await load(house, "a")) == (200, {"name": "a", "load": True})
        assert await index(house) == {**there, "a": READY, "m": READY}
        assert await index(house, ready=True) == {"a": READY, "m": READY}
        assert (await load(house, "a"))[0] == 200
        # the multi-model API and v2 share one truth
        assert (await get(house, "/models"))[1] == {"models": [{"modelName": "a", "modelUrl": str(root / "a")}]}
        tensor = {"name": "x", "datatype": "INT64", "shape": [1], "data": [7]}
        assert (await post(house, "/models/a/infer", {"inputs": [tensor]}))[0] == 200
        told = (await get(house, "/v2/models/a/stats"))[1]["model_stats"][0]
        assert told["memory_usage"] == [{"type": "CPU", "id": 0, "byte_size": 1000}]
        assert (await unload(house, "a"))[0] == 200
        assert await index(house) == {**there, "m": READY}
        assert (await get(house, "/models"))[1] == {"models": []}
        await house.ask("/models", json.dumps({"model_name": "of-mme", "url": str(root / "b")}).encode())
        assert (await index(house))["of-mme"] == READY
        assert (await unload(house, "of-mme"))[0] == 200


async def test_a_model_that_was_loaded_while_its_folder_was_looked_for_stays_as_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, loaded, find = threading.Event(), threading.Event(), load_unload._find

    def slow(name: str, roots: Iterable[str]) -> str:
        looking.set()
        loaded.wait(60)
        return find(name, roots)

    async with serving(config=rooted(root)) as house:
        monkeypatch.setattr(load_unload, "_find", slow)
        async with run_in_codec_thread(house, partial(load, house, "a")) as answers:
            await trio.to_thread.run_sync(looking.wait)
            monkeypatch.setattr(load_unload, "_find", find)
            assert (await load(house, "a"))[0] == 200
            loaded.set()
        assert answers == [(200, {"name": "a", "load": True})]


@pytest.mark.parametrize(
    ("name", "status"),
    [("broken", 400), ("empty", 400), ("file", 404), ("none", 404), ("..", 404), (".hidden", 404), ("%2e%2e%2fmodels%2fa", 404), ("a%00", 404), ("%ff", 404), ("x" * 300, 404)],
)  # fmt: skip
async def test_what_is_no_model_is_not_loaded(root: Path, name: str, status: int) -> None:
    async with serving(config=rooted(root)) as house:
        answered, body = await load(house, name)
        assert answered == status
        assert body["error"]
        assert house.gateway.repository.names == []


async def test_a_folder_never_takes_the_name_of_a_configured_model(root: Path) -> None:
    config = rooted(root, sagemaker=SageMakerConfig(multi_model=True))
    async with serving(Probe(silent, "a").spec("bidi"), config=config) as house:
        await unload(house, "a")
        asked = json.dumps({"model_name": "a", "url": str(root / "a")}).encode()
        assert (await house.ask("/models", asked))[0] == 409
        assert (await house.ask("/models/a", None, method=b"DELETE"))[0] == 409
        assert (await load(house, "a"))[0] == 200
        assert (await get(house, "/models"))[1] == {"models": []}


# -- requests


async def test_without_model_control_nothing_changes_and_the_setting_is_named() -> None:
    async with serving(Probe(silent, "m").spec("bidi")) as house:
        for path in ("/repository/models/m/load", "/repository/x/models/m/unload", "/logging"):
            status, body = await post(house, path, {})
            assert (status, "v2.model_control" in body["error"]) == (403, True)
        assert await index(house) == {"m": READY}
        assert (await get(house, "/v2/logging"))[0] == 200


async def test_there_is_one_repository_whatever_it_is_called() -> None:
    async with serving(Probe(silent, "m").spec("bidi"), config=CONTROL) as house:
        assert (await post(house, "/repository/x/index"))[1] == (await post(house, "/repository/index"))[1]
        assert (await post(house, "/repository/x/models/m/unload"))[0] == 200
        assert (await post(house, "/repository/x/models/m/load"))[0] == 200


@pytest.mark.parametrize("parameters", [{"config": "{}"}, {"file:1/model.onnx": "QUI="}])
async def test_overrides_of_a_models_files_are_refused_by_name(parameters: dict[str, str]) -> None:
    async with serving(Probe(silent, "m").spec("bidi"), config=CONTROL) as house:
        status, body = await load(house, "m", parameters=parameters)
        assert (status, next(iter(parameters)) in body["error"]) == (400, True)


@pytest.mark.parametrize("path", ["/repository/index", "/repository/models/m/load", "/logging"])
@pytest.mark.parametrize(("body", "status"), [(b"{", 400), (b"[]", 400), (b"x" * 70_000, 413)])
async def test_bodies_are_checked(path: str, body: bytes, status: int) -> None:
    async with serving(Probe(silent, "m").spec("bidi"), config=CONTROL) as house:
        answered, headers, answer = await house.ask("/v2" + path, body)
        assert (answered, headers["content-type"], list(json.loads(answer))) == (status, "application/json", ["error"])


# -- the log


@pytest.fixture
def level() -> Iterator[None]:
    logger = logging.getLogger("gateway")
    before = logger.level
    yield
    logger.setLevel(before)


SETTINGS = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "ISO8601",
}


async def test_the_log_says_and_takes_its_level(level: None) -> None:
    logger = logging.getLogger("gateway")
    logger.setLevel(logging.INFO)
    async with serving(Probe(silent, "m").spec("bidi"), config=CONTROL) as house:
        assert await get(house, "/v2/logging") == (200, SETTINGS)
        for change, now, number in (
            ({"log_verbose_level": 3}, {"log_verbose_level": 1}, logging.DEBUG),
            ({"log_info": False}, {"log_info": False}, logging.WARNING),
            ({"log_error": False}, {"log_info": False, "log_warning": False, "log_error": False}, logging.CRITICAL),
            ({"log_info": True, "log_file": None, "log_format": "ISO8601"}, {}, logging.INFO),
            ({}, {}, logging.INFO),
        ):
            assert await post(house, "/logging", change) == (200, SETTINGS | now)
            assert logger.level == number


@pytest.mark.parametrize("change", [{"log_file": "/tmp/x"}, {"log_format": "default"}, {"log_info": True, "log_error": False}, {"log_verbose_level": 1, "log_warning": False}, {"log_color": 1}])  # fmt: skip
async def test_what_the_log_cannot_do_is_refused_by_name(change: dict[str, Any], level: None) -> None:
    async with serving(Probe(silent, "m").spec("bidi"), config=CONTROL) as house:
        before = logging.getLogger("gateway").level
        status, body = await post(house, "/logging", change)
        assert status == 400
        assert all(name in body["error"] for name in change)
        assert logging.getLogger("gateway").level == before


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        (LogChange(log_verbose_level=0), logging.INFO, logging.INFO),
        (LogChange(log_verbose_level=0), logging.DEBUG, logging.INFO),
        (LogChange(log_warning=True), logging.INFO, logging.INFO),
        (LogChange(log_warning=True), logging.CRITICAL, logging.WARNING),
        (LogChange(log_info=False, log_warning=True), logging.ERROR, logging.WARNING),
        (LogChange(log_info=False, log_warning=True), logging.DEBUG, logging.WARNING),
        (LogChange(log_verbose_level=1, log_info=True, log_error=True), logging.ERROR, logging.DEBUG),
    ],
)
def test_one_level_stands_for_all_severities(change: LogChange, before: int, after: int) -> None:
    assert _changed(change, before) == after


def test_a_hole_in_what_is_logged_is_refused() -> None:
    with pytest.raises(BadRequest, match="log_info is on and log_error is off"):
        _changed(LogChange(log_info=True, log_error=False), logging.INFO)


# -- unsupported calls


@pytest.mark.parametrize("kind", ["system", "cuda"])
async def test_there_is_no_shared_memory(kind: str) -> None:
    async with serving(Probe(silent, "m").spec("bidi")) as house:
        for region in ("", "/region/some"):
            assert await get(house, f"/v2/{kind}sharedmemory{region}/status") == (200, [])
            assert await post(house, f"/{kind}sharedmemory{region}/unregister") == (200, {})
        status, body = await post(house, f"/{kind}sharedmemory/region/some/register", {"key": "/k"})
        assert (status, "shared memory" in body["error"]) == (400, True)


async def test_there_is_no_tracing() -> None:
    async with serving(Probe(silent, "m").spec("bidi")) as house:
        for path in ("/v2/trace/setting", "/v2/models/m/trace/setting"):
            assert (await get(house, path))[0] == 404
            assert (await house.ask(path, b"{}"))[0] == 404


async def test_the_extensions_are_those_that_there_are() -> None:
    async with serving(Probe(silent, "m").spec("bidi")) as house:
        extensions = (await get(house, "/v2"))[1]["extensions"]
        assert {"statistics", "logging", "model_repository", "model_configuration", "binary_tensor_data"} <= set(extensions)
        assert not {"trace", "system_shared_memory", "cuda_shared_memory", "sequence"} & set(extensions)
