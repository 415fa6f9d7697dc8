"""Models at run time: loading, unloading, eviction and the budget; and that nothing of a model is left when it is gone."""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gateway.catalog.entry import GRACE
from gateway.catalog.holdings import ABANDONED
from gateway.catalog.limits import RepositoryLimits
from gateway.catalog.loader import IMPORTS
from gateway.catalog.repository import LoadedModel, Repository
from gateway.config import Config, DrainConfig, EndpointConfig, ModelConfig, RepositoryConfig, SageMakerConfig
from gateway.errors import (
    BadModel,
    BadRequest,
    Conflict,
    GatewayError,
    InsufficientStorage,
    LoadFailed,
    NotFound,
    Overloaded,
    Unavailable,
    WorkerLost,
)
from gateway.serving import drain
from gateway.workers.states import State
from gateway.workers.supervisor import Supervisor
from gateway.workers.worker import Worker
from models.blocking import run_step
from models.messages import Family, InferRequest, Part, Tensor
from models.session import Session
from models.spec import ModelSpec, RestartPolicy
from tests.gateway.promises import Probe, serving, silent
from tests.gateway.workers.test_worker import Caller, House, forever, outcome
from tests.models.channels import MemoryChannel

PATIENCE = 60.0
HOUSES: dict[str, House] = {}
OPTIONS: dict[str, dict[str, Any]] = {}
GATES: dict[str, tuple[threading.Event, threading.Event]] = {}
MODEL = "from tests.gateway.catalog.test_repository import spec_of_house\nmodel = spec_of_house(__file__)\n"
KiB = 1024


def spec_of_house(file: str) -> ModelSpec:
    """The spec that a model.py of these tests defines; waits if its model has a gate."""
    name = Path(file).parent.name
    if name in GATES:
        entered, leave = GATES[name]
        entered.set()
        assert leave.wait(PATIENCE)
    return HOUSES[name].spec(**OPTIONS[name])


class Place:
    """The folders of a test, and the repository that loads from them."""

    def __init__(
        self, path: Path, limits: RepositoryLimits, configured: list[ModelSpec], resident: Callable[[], int]
    ) -> None:
        self.path = path
        self.supervisor = Supervisor(configured)
        self.repository = Repository(self.supervisor, limits, resident=resident)

    def folder(self, name: str, house: House | None = None, *, memory: str = "", code: str = MODEL, **options: Any) -> str:
        folder = self.path / name
        folder.mkdir()
        (folder / "model.py").write_text(code)
        if memory:
            (folder / "model.toml").write_text(f'memory = "{memory}"\n')
        HOUSES[name] = house or House()
        OPTIONS[name] = {"restart": RestartPolicy(intensity=1, backoff=1.0), **options}
        return str(folder)

    def table(self, name: str, rows: Any, *, memory: str = "0") -> str:
        """A folder without code: a model of the library's with its file."""
        folder = self.path / name
        folder.mkdir()
        np.save(folder / "rows.npy", rows)
        (folder / "model.toml").write_text(
            f'factory = "models.library.lookup:Lookup"\nmemory = "{memory}"\noptions = {{ table = "rows.npy" }}\n'
        )
        return str(folder)

    def gate(self, name: str) -> tuple[threading.Event, threading.Event]:
        """model.py of this folder says when it runs, and runs on when it is let."""
        GATES[name] = threading.Event(), threading.Event()
        return GATES[name]

    async def load(self, *names: str, **options: Any) -> None:
        for name in names:
            await self.repository.load(name, self.folder(name, **options))

    def worker(self, name: str) -> Worker:
        return self.supervisor.workers[name]

    def check_nothing_left(self) -> None:
        assert (self.repository.names, self.repository.used, self.repository.list()) == ([], 0, [])
        assert [name for name in sys.modules if name.startswith("everywire_model_")] == []


@pytest.fixture(autouse=True)
def houses() -> Iterator[None]:
    yield
    for entered, leave in GATES.values():
        entered.set()
        leave.set()
    for table in (HOUSES, OPTIONS, GATES):
        table.clear()


@asynccontextmanager
async def place(
    path: Path,
    *,
    configured: list[ModelSpec] | None = None,
    resident: Callable[[], int] = lambda: 0,
    **limits: Any,
) -> AsyncIterator[Place]:
    limits = {"roots": (str(path),), "code_roots": (str(path),), "unload_timeout": 20.0, **limits}
    made = Place(path, RepositoryLimits(**limits), configured or [], resident)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.supervisor.run)
        yield made
        await made.supervisor.stop()
    made.check_nothing_left()


async def until(true: Callable[[], object]) -> None:
    """Returns when something is so that threads bring about."""
    with trio.fail_after(PATIENCE):
        while not true():
            await trio.lowlevel.checkpoint()


class Asked:
    """Somebody who asks for something, may leave, and keeps what came of it."""

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self.ask, self.scope, self.over = ask, trio.CancelScope(), trio.Event()
        self.outcome: Any = "nothing yet"

    async def run(self) -> None:
        try:
            with self.scope:
                self.outcome = await self.ask()
            if self.scope.cancelled_caught:
                self.outcome = "left"
        except GatewayError as e:
            self.outcome = e
        finally:
            self.over.set()


@asynccontextmanager
async def asking(*asks: Callable[[], Awaitable[Any]]) -> AsyncIterator[list[Asked]]:
    asked = [Asked(ask) for ask in asks]
    async with trio.open_nursery() as nursery:
        for one in asked:
            nursery.start_soon(one.run)
        yield asked


# -- load, list, get, unload -----------------------------------------------------------------------------------------


async def test_a_model_is_loaded_answers_and_is_unloaded(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        url = at.folder("b", memory="64 KiB")
        loaded = await at.repository.load("m", url)
        assert (loaded.name, loaded.url, loaded.memory) == ("m", url, 64 * KiB)
        assert await outcome(at.worker("m"), Part(data=b"x")) == "complete"
        await at.load("a", memory="1 KiB")
        assert [model.name for model in at.repository.list()] == ["a", "m"]
        assert (at.repository.get("m"), at.repository.used) == (loaded, 65 * KiB)
        await at.repository.unload("m")
        assert HOUSES["b"].diary == ["load", "unload", "unloaded"]
        assert (list(at.supervisor.workers), at.repository.used) == (["a"], KiB)
        with pytest.raises(NotFound, match="no model 'm' is loaded"):
            at.repository.get("m")
        await at.repository.load("m", url)


async def test_a_name_that_is_taken_is_refused_at_once_in_every_state(tmp_path: Path, mock_clock: MockClock) -> None:
    house = House()
    house.before = trio.sleep_forever
    configured = House().spec(name="fixed")
    async with place(tmp_path, configured=[configured]) as at:
        url = at.folder("a", house)
        async with asking(lambda: at.repository.load("a", url)) as (first,):
            await until(lambda: house.diary)
            assert (at.repository.list(), list(at.supervisor.workers)) == ([], ["fixed"])
            with pytest.raises(Conflict, match="model 'a' is being loaded"):
                await at.repository.load("a", url)
            with pytest.raises(Conflict, match="is being loaded"):
                await at.repository.unload("a")
            with pytest.raises(NotFound):
                at.repository.get("a")
            first.scope.cancel()
        house.before = None
        await at.repository.load("a", url)
        with pytest.raises(Conflict, match="is loaded already"):
            await at.repository.load("a", url)
        house.after = trio.sleep_forever
        async with asking(lambda: at.repository.unload("a"), lambda: at.repository.unload("a")) as both:
            await wait_all_tasks_blocked()
            with pytest.raises(Conflict, match="still being unloaded"):
                await at.repository.load("a", url)
            mock_clock.jump(6)
        assert [one.outcome for one in both] == [None, None]
        with pytest.raises(NotFound):
            await at.repository.unload("a")
        for act in (lambda: at.repository.load("fixed", url), lambda: at.repository.unload("fixed")):
            with pytest.raises(Conflict, match="in the server's configuration"):
                await act()
        assert at.worker("fixed").ready


@pytest.mark.parametrize("name", ["", "x" * 1025, "a\nb", "\udc80"])
async def test_a_name_that_cannot_be_said_is_refused(tmp_path: Path, name: str) -> None:
    async with place(tmp_path) as at:
        with pytest.raises(BadRequest, match="a model's name must be 1 to 1024 printable characters"):
            await at.repository.load(name, str(tmp_path))


async def test_nothing_is_loaded_where_nothing_runs(tmp_path: Path) -> None:
    repository = Repository(Supervisor([]), RepositoryLimits())
    with pytest.raises(Unavailable, match="loads no models now"):
        await repository.load("a", "/a")
    assert repository.names == []


# -- loads that fail -------------------------------------------------------------------------------------------------


RAISING = """
from contextlib import asynccontextmanager
from collections.abc import AsyncIterator, Awaitable, Callable
from models.session import Session
from models.messages import Part

@asynccontextmanager
async def model() -> AsyncIterator[Callable[[Session[Part, Part]], Awaitable[None]]]:
    raise {error}
    yield
"""


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("1 / 0", LoadFailed, r"ZeroDivisionError: division by zero \(.*/bad/model.py, line 1\)"),
        ("import sys; sys.exit(3)", LoadFailed, "SystemExit: 3"),
        ("def f(:", LoadFailed, r"SyntaxError: .*\(model.py, line 1\)"),
        ("import no_such_module_x", LoadFailed, "ModuleNotFoundError: No module named 'no_such_module_x'"),
        ("import helper", LoadFailed, "import a file beside model.py as: from . import helper"),
        ("raise MemoryError", InsufficientStorage, "model.py ran out of memory"),
        ("_x = 1", BadModel, "it defines nothing public"),
        (RAISING.format(error="OSError('no weights')"), LoadFailed, r"OSError: no weights \(.*/bad/model.py, line 9\)"),
        ("raise OSError('at s3://user:letmein@weights')", LoadFailed, r"OSError: at s3://(?!.*letmein)"),
        (RAISING.format(error="SystemExit(3)"), LoadFailed, "SystemExit: 3"),
        (RAISING.format(error="ExceptionGroup('g', [MemoryError()])"), InsufficientStorage, "ran out of memory"),
        (RAISING.format(error="BaseExceptionGroup('g', [SystemExit(), OSError()])"), LoadFailed, "BaseExceptionGroup: g"),
    ],
)
async def test_a_load_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, code: str, kind: type[GatewayError], text: str
) -> None:
    async with place(tmp_path) as at:
        await at.load("good")
        url = at.folder("bad", code=code)
        (tmp_path / "bad" / "helper.py").write_text("")
        for _ in range(2):
            with pytest.raises(kind, match=text) as caught:
                await at.repository.load("bad", url)
            assert len(caught.value.message) < 1000
            assert (at.repository.names, list(at.supervisor.workers)) == (["good"], ["good"])
        assert await outcome(at.worker("good")) == "complete"


async def test_a_first_load_that_fails_is_not_tried_again_but_a_later_crash_is(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    house = House()

    async def fail() -> None:
        raise OSError("no weights")

    async with place(tmp_path) as at:
        house.before = fail
        url = at.folder("a", house)
        with pytest.raises(LoadFailed, match="OSError: no weights"):
            await at.repository.load("a", url)
        mock_clock.jump(100)
        await wait_all_tasks_blocked()
        assert house.loads == 1
        house.before = None
        await at.repository.load("a", url)
        house.crash.set()
        await wait_all_tasks_blocked()
        assert at.worker("a").state is State.RESTARTING
        assert [model.name for model in at.repository.list()] == ["a"]
        mock_clock.jump(1.1)
        await wait_all_tasks_blocked()
        assert (at.worker("a").ready, house.loads) == (True, 3)


async def test_a_model_that_is_given_up_is_gone_and_can_be_loaded_again(tmp_path: Path) -> None:
    house = House()
    async with place(tmp_path) as at:
        url = at.folder("a", house, restart=RestartPolicy(intensity=0))
        await at.repository.load("a", url)
        house.crash.set()
        await until(lambda: not at.repository.names)
        assert at.supervisor.workers == {}
        await at.repository.load("a", url)
        assert await outcome(at.worker("a")) == "complete"


async def test_a_load_that_is_too_slow_is_ended_by_its_timeout_though_a_thread_keeps_the_name(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with place(tmp_path, defaults=ModelConfig(factory="", load_timeout=30.0)) as at:
        url, (entered, leave) = at.folder("a"), at.gate("a")
        async with asking(lambda: at.repository.load("a", url)) as (asked,):
            await until(entered.is_set)
            mock_clock.jump(30)
            await wait_all_tasks_blocked()
            mock_clock.jump(GRACE)
            await asked.over.wait()
        assert isinstance(asked.outcome, LoadFailed)
        assert "took longer than 30 s" in asked.outcome.message
        with pytest.raises(Conflict, match="still being unloaded"):
            await at.repository.load("a", url)
        leave.set()
        await until(lambda: not at.repository.names)


# -- loads that are given up -----------------------------------------------------------------------------------------


async def test_a_caller_who_leaves_gives_the_load_up_and_waits_for_its_clean_up(tmp_path: Path) -> None:
    house, cleaned = House(), trio.Event()
    house.before = trio.sleep_forever

    async def clean_up() -> None:
        with trio.CancelScope(shield=True):
            await cleaned.wait()

    house.after = clean_up
    async with place(tmp_path) as at:
        url = at.folder("a", house)
        async with asking(lambda: at.repository.load("a", url)) as (asked,):
            await until(lambda: house.diary)
            asked.scope.cancel()
            await wait_all_tasks_blocked()
            assert (house.diary, asked.over.is_set()) == (["load", "unload"], False)
            with pytest.raises(Conflict, match="still being unloaded"):
                await at.repository.load("a", url)
            cleaned.set()
            await asked.over.wait()
            assert (asked.outcome, at.repository.names) == ("left", [])


async def test_a_thread_that_imports_keeps_the_name_and_nobody_waits_for_it_for_long(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with place(tmp_path) as at:
        await at.load("other")
        url, (entered, leave) = at.folder("a", memory="1 KiB"), at.gate("a")
        async with asking(lambda: at.repository.load("a", url)) as (asked,):
            await until(entered.is_set)
            assert await outcome(at.worker("other"), Part(data=b"x")) == "complete", "a load is nobody else's delay"
            asked.scope.cancel()
            await wait_all_tasks_blocked()
            assert not asked.over.is_set()
            mock_clock.jump(GRACE)
            await asked.over.wait()
        assert at.repository.names == ["a", "other"]
        assert at.repository.used > KiB
        leave.set()
        await until(lambda: at.repository.names == ["other"])
        assert [n for n in sys.modules if n.startswith("everywire_model_")] == [at_module("other")]
        await at.repository.load("a", url)


def at_module(name: str) -> str:
    """The module of a model that is loaded."""
    (found,) = [
        n for n, m in sys.modules.items() if n.startswith("everywire_model_") and Path(str(m.__file__)).parent.name == name
    ]
    return found


# -- threads that do not return --------------------------------------------------------------------------------------


@asynccontextmanager
async def hung(at: Place, *names: str, clock: MockClock) -> AsyncIterator[None]:
    """Loads whose callers have left and whose model.py does not return; it does at the end of the block."""
    urls, gates = {name: at.folder(name, memory="1 KiB") for name in names}, {name: at.gate(name) for name in names}
    for name in names:
        async with asking(lambda: at.repository.load(name, urls[name])) as (asked,):  # noqa: B023  # used up in this round
            await until(gates[name][0].is_set)
            asked.scope.cancel()
            await wait_all_tasks_blocked()
            clock.jump(GRACE)
        assert asked.outcome == "left"
    yield
    for _, leave in gates.values():
        leave.set()
    await until(lambda: not set(names) & set(at.repository.names))


async def test_a_thread_that_was_given_up_keeps_no_place_of_those_that_load(tmp_path: Path, mock_clock: MockClock) -> None:
    async with place(tmp_path) as at, hung(at, *(f"h{n}" for n in range(IMPORTS)), clock=mock_clock):
        assert (await at.repository.load("a", at.folder("a"))).name == "a"
        assert await outcome(at.worker("a")) == "complete"


async def test_code_is_refused_at_once_where_too_many_threads_stay_and_folders_without_are_not(
    tmp_path: Path, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with place(tmp_path) as at:
        names, url = [f"h{n}" for n in range(ABANDONED)], at.folder("a")
        async with hung(at, *names, clock=mock_clock):
            for ask in (lambda: at.repository.load("a", url), lambda: call(at, "a", url)):
                with pytest.raises(Unavailable, match="it has code, and 16 threads of loads that were given up do not end"):
                    await ask()
            assert HOUSES["a"].diary == []
            await at.repository.load("t", at.table("t", np.arange(3)))
            assert await row(at.worker("t"), 2) == 2
            told = [record for record in caplog.records if record.message == "a thread of a model does not end"]
            assert [vars(record)["model"] for record in told] == names
        await at.repository.load("a", url)


async def test_a_folder_without_code_waits_for_none(tmp_path: Path) -> None:
    names = [f"h{n}" for n in range(IMPORTS + 1)]
    async with place(tmp_path) as at:
        urls, gates = [at.folder(name) for name in names], [at.gate(name) for name in names]
        async with asking(*[partial(at.repository.load, *each) for each in zip(names, urls, strict=True)]):
            await until(lambda: sum(entered.is_set() for entered, _ in gates) == IMPORTS)
            with trio.move_on_after(PATIENCE / 2) as waited:
                await at.repository.load("t", at.table("t", np.arange(3)))
            for _, leave in gates:
                leave.set()
        assert not waited.cancelled_caught


async def test_the_time_of_a_models_code_begins_when_it_does(tmp_path: Path, mock_clock: MockClock) -> None:
    names = [f"h{n}" for n in range(IMPORTS)]
    async with place(tmp_path, defaults=ModelConfig(factory="", load_timeout=30.0)) as at:
        gates, urls = [at.gate(name) for name in names], [at.folder(name) for name in names]
        last, late = at.gate("last"), at.folder("last")
        async with asking(*[partial(at.repository.load, *each) for each in zip(names, urls, strict=True)]) as first:
            await until(lambda: all(entered.is_set() for entered, _ in gates))
            mock_clock.jump(20)
            async with asking(lambda: at.repository.load("last", late)) as (asked,):
                await until(lambda: at.repository.loader.imports.statistics().tasks_waiting)
                mock_clock.jump(10)
                await until(last[0].is_set)
                mock_clock.jump(25)
                await wait_all_tasks_blocked()
                assert not asked.over.is_set()
                last[1].set()
            assert isinstance(asked.outcome, LoadedModel)
        assert all("its code took longer than 30 s" in one.outcome.message for one in first)
        for _, leave in gates:
            leave.set()
        await until(lambda: at.repository.names == ["last"])


async def test_code_that_never_began_is_not_what_took_too_long(tmp_path: Path, mock_clock: MockClock) -> None:
    names = [f"h{n}" for n in range(IMPORTS)]
    async with place(tmp_path, defaults=ModelConfig(factory="", load_timeout=30.0)) as at:
        gates, urls = [at.gate(name) for name in names], [at.folder(name) for name in names]
        url = at.folder("last")
        async with asking(*[partial(at.repository.load, *each) for each in zip(names, urls, strict=True)]):
            await until(lambda: all(entered.is_set() for entered, _ in gates))
            async with asking(lambda: at.repository.load("last", url)) as (asked,):
                await until(lambda: at.repository.loader.imports.statistics().tasks_waiting)
                for name in names:
                    at.repository.holdings.entries[name].load_scope.deadline = 1000.0
                mock_clock.jump(30)
            assert isinstance(asked.outcome, Unavailable)
            assert "the code of other models, which runs first, took longer than 30 s" in asked.outcome.message
            for _, leave in gates:
                leave.set()


async def test_a_factory_that_does_not_return_keeps_no_thread_of_anybody_elses(tmp_path: Path) -> None:
    code = (
        "from tests.gateway.catalog.test_repository import GATES\nclass Model:\n"
        "    def __init__(self):\n        GATES['a'][0].set()\n        GATES['a'][1].wait(60)\n"
        "    def __call__(self, text: str) -> str:\n        return text\n"
    )
    async with place(tmp_path) as at:
        url, (entered, leave) = at.folder("a", code=code), at.gate("a")
        async with asking(lambda: at.repository.load("a", url)):
            await until(entered.is_set)
            assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
            leave.set()


async def test_who_wants_a_model_of_which_a_thread_stays_is_told_so_and_others_do_not_wait_for_its_place(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with place(tmp_path, memory=2 * KiB) as at:
        used, other = at.folder("used", memory="1 KiB"), at.folder("other", memory="1 KiB")
        async with at.repository.in_use("used", used), hung(at, "h", clock=mock_clock):
            with pytest.raises(Unavailable, match="'h' is out of service, and cannot be loaded again before a thread"):
                await call(at, "h", str(tmp_path / "h"))
            with pytest.raises(Overloaded, match="all of them in use, or held by threads that do not end; try again later"):
                await call(at, "other", other)
            async with asking(lambda: at.repository.unload("h")) as (unload,):
                await wait_all_tasks_blocked()
                mock_clock.jump(GRACE)
            assert "a thread of it does not end: it holds its memory" in unload.outcome.message
        assert await call(at, "other", other) == "complete"


# -- the budget ------------------------------------------------------------------------------------------------------


async def test_a_model_that_does_not_fit_is_refused_before_its_code_runs(tmp_path: Path) -> None:
    async with place(tmp_path, memory=100 * KiB) as at:
        await at.load("a", "b", memory="40 KiB")
        url = at.folder("c", memory="21 KiB", code="raise SystemExit")
        with pytest.raises(InsufficientStorage) as caught:
            await at.repository.load("c", url)
        assert caught.value.status == 507
        assert caught.value.message == "model 'c' needs 21504 bytes, and 81920 of 102400 are in use (repository.memory)"
        await at.load("d", memory="20 KiB")
        assert at.repository.used == 100 * KiB
        await at.repository.unload("a")
        await at.load("e", memory="40 KiB")


async def test_a_model_more_than_may_be_is_refused(tmp_path: Path) -> None:
    async with place(tmp_path, models=2) as at:
        await at.load("a", "b")
        with pytest.raises(InsufficientStorage, match=r"2 models are loaded, which is the limit \(repository.models\)"):
            await at.load("c")


async def test_a_need_that_only_the_code_declares_is_reserved_in_place_of_the_estimate(tmp_path: Path) -> None:
    async with place(tmp_path, memory=100 * KiB) as at:
        await at.load("a", memory="60 KiB")
        url = at.folder("b")
        OPTIONS["b"]["memory"] = 41 * KiB
        with pytest.raises(InsufficientStorage, match="needs 41984 bytes"):
            await at.repository.load("b", url)
        assert HOUSES["b"].diary == []
        OPTIONS["b"]["memory"] = 40 * KiB
        assert (await at.repository.load("b", url)).memory == 40 * KiB


async def test_an_undeclared_need_is_what_the_process_grew_by_where_that_is_more_than_the_files(tmp_path: Path) -> None:
    sizes = [0]

    async def grow() -> None:
        sizes[0] += 50 * KiB

    async with place(tmp_path, memory=100 * KiB, resident=lambda: sizes[0]) as at:
        house = House()
        house.before = grow
        url = at.folder("a", house)
        (tmp_path / "a" / "weights").write_bytes(bytes(10 * KiB))
        assert (await at.repository.load("a", url)).memory == 50 * KiB
        hungry = House()
        hungry.before = grow
        declared = at.folder("b", hungry, memory="20 KiB")
        assert (await at.repository.load("b", declared)).memory == 20 * KiB
        large = House()
        large.before = grow
        with pytest.raises(InsufficientStorage, match="model 'c' needs 51200 bytes"):
            await at.repository.load("c", at.folder("c", large))
        assert large.diary == ["load", "unload", "unloaded"]
        assert at.repository.used == 70 * KiB


async def test_growth_while_another_model_came_is_nobodys(tmp_path: Path) -> None:
    sizes = [0]
    house = House()
    async with place(tmp_path, resident=lambda: sizes[0]) as at:

        async def grow() -> None:
            sizes[0] += 50 * KiB
            await at.load("b", memory="1 KiB")

        house.before = grow
        assert (await at.repository.load("a", at.folder("a", house))).memory < KiB


async def test_files_are_the_estimate_where_nothing_is_declared(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        url = at.folder("a")
        (tmp_path / "a" / "weights").write_bytes(bytes(100_000))
        (tmp_path / "a" / "again").symlink_to("weights")
        size = 100_000 + (tmp_path / "a" / "model.py").stat().st_size
        assert (await at.repository.load("a", url)).memory == size * 6 // 5


# -- unloading -------------------------------------------------------------------------------------------------------


async def test_an_unload_answers_the_queue_at_once_and_waits_for_those_that_run(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        await at.repository.load("a", at.folder("a", House(forever), capacity=1))
        worker, running, waiting = at.worker("a"), Caller(), Caller()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.call, worker)
            await running.called.wait()
            nursery.start_soon(waiting.call, worker)
            await wait_all_tasks_blocked()
            async with asking(lambda: at.repository.unload("a")) as (unload,):
                await waiting.ended.wait()
                assert isinstance(waiting.outcome, Unavailable)
                await wait_all_tasks_blocked()
                assert (running.ended.is_set(), unload.over.is_set(), at.supervisor.workers) == (False, False, {})
                assert isinstance(await outcome(worker), Unavailable)
                running.leave()
                await unload.over.wait()
                assert (running.ended.is_set(), unload.outcome) == (True, None)


async def test_those_that_run_longer_than_the_timeout_end_as_lost_before_the_unload_does(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    over: list[str] = []

    async def model(_: Session[Part, Part]) -> None:
        try:
            await trio.sleep_forever()
        finally:
            over.append("session")

    async with place(tmp_path) as at:
        await at.repository.load("a", at.folder("a", House(model)))
        caller = Caller()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller.call, at.worker("a"))
            await caller.called.wait()
            async with asking(lambda: at.repository.unload("a")) as (unload,):
                await wait_all_tasks_blocked()
                mock_clock.jump(19.9)
                await wait_all_tasks_blocked()
                assert over == []
                mock_clock.jump(0.2)
                await unload.over.wait()
                over.append("unload")
        assert isinstance(caller.outcome, WorkerLost)
        assert over == ["session", "unload"]


async def test_a_crash_while_it_drains_ends_its_sessions_and_is_no_new_start(tmp_path: Path) -> None:
    house = House(forever)
    async with place(tmp_path) as at:
        await at.repository.load("a", at.folder("a", house))
        caller = Caller()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller.call, at.worker("a"))
            await caller.called.wait()
            async with asking(lambda: at.repository.unload("a")):
                await wait_all_tasks_blocked()
                house.crash.set()
        assert isinstance(caller.outcome, WorkerLost)
        assert (house.loads, at.repository.names) == (1, [])


async def test_who_leaves_an_unload_leaves_nothing_half_done(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        await at.load("a")
        async with asking(lambda: at.repository.unload("a")) as (unload,):
            await wait_all_tasks_blocked()
            unload.scope.cancel()
        await until(lambda: not at.repository.names)
        assert HOUSES["a"].diary == ["load", "unload", "unloaded"]


async def test_a_thread_that_does_not_return_is_told_and_keeps_name_and_memory(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    entered, leave = threading.Event(), threading.Event()

    async def model(_: Session[Part, Part]) -> None:
        def step() -> None:
            entered.set()
            leave.wait(PATIENCE)

        await run_step(step)

    async with place(tmp_path) as at:
        await at.repository.load("a", at.folder("a", House(model), memory="1 KiB"))
        caller = Caller()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller.call, at.worker("a"))
            await until(entered.is_set)
            async with asking(lambda: at.repository.unload("a")) as (unload,):
                for _ in range(8):
                    await wait_all_tasks_blocked()
                    mock_clock.jump(5)
                await unload.over.wait()
        assert isinstance(unload.outcome, Unavailable)
        assert "a thread of it does not end" in unload.outcome.message
        assert (at.repository.names, at.repository.used, at.repository.list()) == (["a"], KiB, [])
        leave.set()
        await until(lambda: not at.repository.names)


async def test_the_models_memory_is_back_though_somebody_still_knows_its_worker(tmp_path: Path) -> None:
    code = "class Weights:\n    pass\nweights = Weights()\nasync def model(data: bytes) -> bytes:\n    weights\n    return data\n"
    async with place(tmp_path) as at:
        await at.repository.load("a", at.folder("a", code=code))
        worker, module = at.worker("a"), sys.modules[at_module("a")]
        weights = weakref.ref(module.weights)
        del module
        gc.disable()
        try:
            await at.repository.unload("a")
            assert weights() is None
        finally:
            gc.enable()
        with pytest.raises(NotFound):
            worker.check_ready(Caller().exchange)


# -- in use: loaded on demand ----------------------------------------------------------------------------------------


async def call(at: Place, name: str, url: str, *messages: Part) -> Any:
    async with at.repository.in_use(name, url) as worker:
        return await outcome(worker, *messages)


async def test_concurrent_first_uses_share_one_load(tmp_path: Path) -> None:
    house, go = House(), trio.Event()
    house.before = go.wait
    async with place(tmp_path) as at:
        url = at.folder("a", house)
        async with asking(*[lambda: call(at, "a", url)] * 5) as callers:
            await until(lambda: house.diary)
            callers[0].scope.cancel()
            await callers[0].over.wait()
            go.set()
        assert [c.outcome for c in callers] == ["left", *["complete"] * 4]
        assert house.diary == ["load"]


async def test_the_last_who_leaves_gives_the_shared_load_up(tmp_path: Path) -> None:
    house = House()
    house.before = trio.sleep_forever
    async with place(tmp_path) as at:
        url = at.folder("a", house)
        async with asking(*[lambda: call(at, "a", url)] * 2) as (first, second):
            await until(lambda: house.diary)
            first.scope.cancel()
            await first.over.wait()
            assert house.diary == ["load"]
            second.scope.cancel()
            await second.over.wait()
            assert (house.diary, at.repository.names) == (["load", "unload", "unloaded"], [])


async def test_a_shared_load_that_fails_is_told_to_each(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        url, (entered, leave) = at.folder("a", code=MODEL + "1 / 0\n"), at.gate("a")
        async with asking(*[lambda: call(at, "a", url)] * 3) as callers:
            await until(entered.is_set)
            leave.set()
        assert all(isinstance(c.outcome, LoadFailed) for c in callers)
        assert len({id(c.outcome) for c in callers}) == 3


async def test_the_least_recently_used_go_first_and_those_in_use_never(tmp_path: Path) -> None:
    async with place(tmp_path, memory=30 * KiB) as at:
        urls = {name: at.folder(name, memory="10 KiB") for name in "abcde"}
        for name in "abca":
            await call(at, name, urls[name])
        await call(at, "d", urls["d"])
        assert at.repository.names == ["a", "c", "d"]
        async with at.repository.in_use("a", urls["a"]), at.repository.in_use("c", urls["c"]):
            await call(at, "e", urls["e"])
            assert at.repository.names == ["a", "c", "e"]
            async with at.repository.in_use("e", urls["e"]):
                with pytest.raises(Overloaded, match="needs 10240 bytes, and 30720 of 30720"):
                    await call(at, "b", urls["b"])
        await call(at, "b", urls["b"])
        assert at.repository.names == ["b", "c", "e"], "a was taken first, so it is the one used longest ago"


async def test_a_live_session_of_another_route_keeps_a_model_too(tmp_path: Path) -> None:
    async with place(tmp_path, models=1) as at:
        await at.repository.load("a", at.folder("a", House(forever)))
        other, caller = at.folder("b"), Caller()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(caller.call, at.worker("a"))
            await caller.called.wait()
            with pytest.raises(Overloaded):
                await call(at, "b", other)
            caller.leave()
        assert await call(at, "b", other) == "complete"
        assert at.repository.names == ["b"]


async def test_several_go_for_one_that_is_large_and_none_for_one_that_never_fits(tmp_path: Path) -> None:
    async with place(tmp_path, memory=30 * KiB) as at:
        await at.load("a", "b", "c", memory="10 KiB")
        with pytest.raises(InsufficientStorage):
            await call(at, "e", at.folder("e", memory="31 KiB"))
        assert at.repository.names == ["a", "b", "c"]
        await call(at, "d", at.folder("d", memory="20 KiB"))
        assert at.repository.names == ["c", "d"]


async def test_memory_that_runs_out_in_a_load_is_sought_from_others(tmp_path: Path) -> None:
    house = House()

    async def hungry() -> None:
        if len(at.repository.names) > 2:
            raise MemoryError

    house.before = hungry
    async with place(tmp_path) as at:
        await at.load("a", "b", "c")
        assert await call(at, "d", at.folder("d", house)) == "complete"
        assert at.repository.names == ["c", "d"]
        assert house.loads == 3


@pytest.mark.parametrize("name", ["a", "b"])
async def test_one_that_is_being_unloaded_is_waited_for_by_those_who_want_it_or_its_place(tmp_path: Path, name: str) -> None:
    house, go = House(), trio.Event()

    async def slow() -> None:
        with trio.CancelScope(shield=True):
            await go.wait()

    house.after = slow
    async with place(tmp_path, models=1) as at:
        urls = {"a": at.folder("a", house), "b": at.folder("b")}
        await at.repository.load("a", urls["a"])
        async with asking(lambda: at.repository.unload("a")) as (unload,):
            await until(lambda: house.diary[-1] == "unload")
            async with asking(lambda: call(at, name, urls[name])) as (asked,):
                await wait_all_tasks_blocked()
                assert (unload.over.is_set(), asked.over.is_set()) == (False, False)
                go.set()
        assert (unload.outcome, asked.outcome) == (None, "complete")


@pytest.mark.parametrize("sooner", ["the other one", "one that was in use"])
async def test_the_place_of_whichever_goes_first_is_taken(tmp_path: Path, sooner: str) -> None:
    going: dict[str, trio.Event] = {name: trio.Event() for name in "ab"}

    def slow(name: str) -> House:
        house = House()

        async def after() -> None:
            with trio.CancelScope(shield=True):
                await going[name].wait()

        house.after = after
        return house

    async with place(tmp_path, models=3) as at:
        urls = {name: at.folder(name, slow(name) if name in going else None) for name in ("a", "b", "used", "c")}
        for name in going:
            await at.repository.load(name, urls[name])
        leave = trio.Event()

        async def use() -> None:
            async with at.repository.in_use("used", urls["used"]):
                await leave.wait()

        unloads = [partial(at.repository.unload, name) for name in going]
        async with asking(use, *unloads):
            await until(lambda: "used" in at.supervisor.workers and len(at.supervisor.workers) == 1)
            async with asking(lambda: call(at, "c", urls["c"])) as (asked,):
                await until(lambda: at.repository.holdings.moved.statistics().tasks_waiting)
                if sooner == "the other one":
                    going["b"].set()
                else:
                    leave.set()
                with trio.move_on_after(PATIENCE / 2):
                    await asked.over.wait()
                came, names = asked.outcome, at.repository.names
                for event in (leave, *going.values()):
                    event.set()
        assert came == "complete"
        assert names == (["a", "c", "used"] if sooner == "the other one" else ["a", "b", "c"])


async def test_an_endless_session_keeps_its_models_place_and_whoever_wants_it_is_told_at_once(tmp_path: Path) -> None:
    async with place(tmp_path, memory=KiB) as at:
        urls = {name: at.folder(name, House(forever), memory="1 KiB") for name in "ab"}
        caller = Caller()

        async def stream() -> None:
            async with at.repository.in_use("a", urls["a"]) as worker:
                await caller.call(worker)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream)
            await caller.called.wait()
            for _ in range(3):
                with pytest.raises(Overloaded, match="all of them in use; try again later"):
                    await call(at, "b", urls["b"])
            assert (caller.ended.is_set(), at.repository.names) == (False, ["a"])
            caller.leave()


MISTAKES = {
    "nothing": {},
    "toml": {"model.toml": "capcity = 1"},
    "library": {"model.toml": "factory = 'ehco'"},
    "options": {"model.toml": "factory = 'lm'\noptions = { path = 'nothing' }"},
    "missing": {"model.toml": "factory = 'models.library.lookup:Lookup'\noptions = { table = 'model.toml' }"},
    "raises": {"model.py": "raise OSError(2, 'no such file', __file__)"},
    "quoted'": {"model.py": "raise OSError(2, 'no such file', __file__)"},
    "syntax": {"model.py": "def f(:"},
    "factory": {"model.py": "def model():\n    open(__file__ + 'x')"},
    "default": {"model.py": "class M:\n  def __init__(self, a, b=__file__): ...\n  def __call__(self, x: str) -> str: ..."},
    "two": {"model.py": "def one(): ...\ndef two(): ..."},
    "memory": {"model.py": "raise MemoryError"},
    "long" * 50: {"model.py": "open(__file__ + 'x')"},
}


@pytest.mark.parametrize("name", ["none", "out", *MISTAKES])
async def test_who_did_not_name_the_url_hears_the_folder_in_his_own_words_and_the_log_has_the_path(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.repository")
    folder = tmp_path / name
    if name in MISTAKES:
        folder.mkdir()
        for file, text in MISTAKES[name].items():
            (folder / file).write_text(text)
    elif name == "out":
        folder.symlink_to("/etc")
    async with place(tmp_path) as at:
        with pytest.raises(GatewayError) as caught:
            async with at.repository.in_use("m", str(folder), shown=f"{name}.tar.gz"):
                pass
        assert str(tmp_path) not in caught.value.message
        assert "gateway/" not in caught.value.message
        assert name[:90] in caught.value.message
        (record,) = [r for r in caplog.records if r.message == "model not loaded"]
        assert vars(record)["url"] == str(folder)


async def test_each_who_shares_a_load_hears_of_its_failure_in_his_own_words(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        url, (entered, leave) = at.folder("a", code=MODEL + "1 / 0\n"), at.gate("a")

        async def use(shown: str) -> None:
            async with at.repository.in_use("a", url, shown=shown):
                raise AssertionError

        async with asking(lambda: at.repository.load("a", url)) as (first,):
            await until(entered.is_set)
            async with asking(lambda: use("mine"), lambda: use("yours")) as others:
                await wait_all_tasks_blocked()
                leave.set()
        told = [one.outcome.message.rpartition("(")[2] for one in (first, *others)]
        assert told == [f"{url}/model.py, line 3)", "mine/model.py, line 3)", "yours/model.py, line 3)"]


async def test_one_name_has_one_url(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        await at.load("a")
        with pytest.raises(Conflict, match="model 'a' is loaded already from another url"):
            await call(at, "a", at.folder("b"))


async def test_two_hundred_models_of_which_twenty_fit_answer_every_call(tmp_path: Path) -> None:
    async with place(tmp_path, memory=20 * KiB) as at:
        urls = {f"m{n}": at.table(f"m{n}", np.array([n]), memory="1 KiB") for n in range(200)}
        chance, answers, most = random.Random(5), 0, 0

        async def client(names: list[str]) -> None:
            nonlocal answers, most
            for name in names:
                async with at.repository.in_use(name, urls[name]) as worker:
                    assert await row(worker, 0) == int(name[1:])
                answers, most = answers + 1, max(most, at.repository.used)

        names = [*urls, *(chance.choice(list(urls)) for _ in range(200))]
        chance.shuffle(names)
        async with trio.open_nursery() as nursery:
            for n in range(8):
                nursery.start_soon(client, names[n::8])
        assert answers == 400
        assert (most, len(at.repository.list())) == (20 * KiB, 20)


async def row(worker: Worker, index: int) -> Any:
    """The row of a table at an index."""
    caller: Any = Caller()
    caller.channel = MemoryChannel(InferRequest(inputs=(Tensor(name="INDEX", data=np.array(index)),)))
    await caller.call(worker, Family.TENSOR)
    return caller.channel.sent[0].outputs[0].data


async def test_the_memory_of_a_library_model_is_back_without_the_garbage_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[weakref.ref[Any]] = []
    load = np.load

    def noted(*arguments: Any, **options: Any) -> Any:
        table = load(*arguments, **options)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr(np, "load", noted)
    async with place(tmp_path) as at:
        url = at.table("a", np.arange(1000))
        gc.disable()
        try:
            assert (await at.repository.load("a", url)).memory >= 8000 * 6 // 5
            assert await row(at.worker("a"), 7) == 7
            assert tables[0]() is not None
            await at.repository.unload("a")
            assert tables[0]() is None
        finally:
            gc.enable()


# -- the end of the server -------------------------------------------------------------------------------------------


async def test_models_of_run_time_stop_with_the_others_the_last_first(tmp_path: Path) -> None:
    order: list[str] = []

    def house(name: str) -> House:
        made = House()

        async def after() -> None:
            order.append(name)

        made.after = after
        return made

    async with place(tmp_path, configured=[house("fixed").spec(name="fixed")]) as at:
        for name in ("a", "b", "c"):
            await at.repository.load(name, at.folder(name, house(name)))
        await at.repository.unload("b")
    assert order == ["b", "c", "a", "fixed"]


async def test_a_server_that_stops_gives_up_its_loads_and_waits_for_no_import(tmp_path: Path) -> None:
    house = House()
    house.before = trio.sleep_forever
    async with place(tmp_path) as at:
        slow, stuck, (entered, leave) = at.folder("slow", house), at.folder("stuck"), at.gate("stuck")
        async with asking(lambda: at.repository.load("slow", slow), lambda: at.repository.load("stuck", stuck)) as asked:
            await until(lambda: house.diary and entered.is_set())
            await at.supervisor.stop()
            for one in asked:
                await one.over.wait()
        assert all(isinstance(one.outcome, Unavailable) for one in asked)
        with pytest.raises(Unavailable):
            await at.repository.load("late", slow)
        leave.set()
        await until(lambda: trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0)


@pytest.mark.parametrize("begun", [True, False])
async def test_a_supervisor_that_is_cancelled_leaves_no_name(tmp_path: Path, begun: bool) -> None:
    async with place(tmp_path) as at:
        await at.load("a")
        supervisor = at.supervisor
        assert supervisor._nursery is not None
        if begun:
            caller = Caller()
            at.folder("b")
            async with asking(lambda: at.repository.load("b", str(tmp_path / "b")), lambda: caller.call(at.worker("a"))):
                supervisor._nursery.cancel_scope.cancel()
        else:
            supervisor._nursery.cancel_scope.cancel()
            await until(lambda: not at.repository.names)


def test_who_gives_a_load_up_in_a_drain_has_time_left_for_his_goodbye() -> None:
    assert 2 * GRACE < drain._GRACE


@pytest.mark.parametrize("route", ["/models", "/endpoints/many/invocations"])
async def test_a_client_whose_load_a_drain_ends_is_told_so_though_its_thread_stays(
    tmp_path: Path, route: str, mock_clock: MockClock
) -> None:
    root, (entered, leave) = str(tmp_path), GATES.setdefault("a", (threading.Event(), threading.Event()))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.py").write_text(MODEL)
    HOUSES["a"], OPTIONS["a"] = House(), {}
    config = Config(
        sagemaker=SageMakerConfig(multi_model=True),
        repository=RepositoryConfig(roots=(root,), code=(root,)),
        endpoints={"many": EndpointConfig(models=root)},
        drain=DrainConfig(timeout=2.0),
    )
    body = json.dumps({"model_name": "a", "url": f"{root}/a"}).encode()
    async with serving(Probe(silent).spec("bidi"), config=config) as house:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await house.ask(route, body, ("x-amzn-sagemaker-target-model", "a")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(entered.is_set)
            nursery.start_soon(house.gateway.drain)
            for _ in range(40):
                await wait_all_tasks_blocked()
                mock_clock.jump(0.25)
        ((status, _, said),) = answers
        assert (status, b"drain.timeout" in said) == (503, True)
        assert house.endings["drained"] == 1
        leave.set()
        await until(lambda: not house.gateway.repository.names)


# -- cancelled at every step -----------------------------------------------------------------------------------------


class _CancelAt(trio.abc.Instrument):
    """Cancels a scope after the n-th step of any task."""

    def __init__(self, scope: trio.CancelScope, step: int) -> None:
        self._scope, self._left = scope, step

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if self._left == 0:
            self._scope.cancel()

    @property
    def fired(self) -> bool:
        return self._left <= 0


async def swept(act: Callable[[], Awaitable[Any]], step: int) -> tuple[bool, bool]:
    """Two flags: the act reached the step, and it was cancelled there."""
    with trio.CancelScope() as scope:
        instrument = _CancelAt(scope, step)
        trio.lowlevel.add_instrument(instrument)
        try:
            await act()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return instrument.fired, scope.cancelled_caught


@pytest.mark.parametrize("fails", [False, True])
async def test_a_load_that_is_cancelled_at_any_step_is_whole_or_gone(tmp_path: Path, fails: bool) -> None:
    async with place(tmp_path) as at:
        url = at.folder("a", code=MODEL + ("1 / 0\n" if fails else ""))

        async def load() -> None:
            try:
                await at.repository.load("a", url)
            except LoadFailed:
                assert fails

        cancelled = 0
        for step in range(1, 500):
            fired, caught = await swept(load, step)
            cancelled += caught
            assert at.repository.names == ([] if caught or fails else ["a"])
            if at.repository.names:
                assert await outcome(at.worker("a")) == "complete"
                await at.repository.unload("a")
            at.check_nothing_left()
            if not fired:
                break
        assert not fired
        assert cancelled >= 3


async def test_an_unload_that_is_cancelled_at_any_step_goes_on_to_its_end(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        url = at.folder("a")
        for step in range(1, 500):
            await at.repository.load("a", url)
            fired, _ = await swept(lambda: at.repository.unload("a"), step)
            await until(lambda: not at.repository.names)
            at.check_nothing_left()
            if not fired:
                break
        assert step > 3
        diary = HOUSES["a"].diary
        assert diary.count("load") == diary.count("unloaded") == step


async def test_a_use_that_is_cancelled_at_any_step_holds_nothing_and_another_goes_on(tmp_path: Path) -> None:
    async with place(tmp_path, models=1) as at:
        urls = {name: at.folder(name) for name in "ab"}
        for step in range(1, 500):
            await call(at, "b", urls["b"])

            async def use() -> None:
                await call(at, "a", urls["a"])

            async with asking(lambda: call(at, "a", urls["a"])) as (other,):
                fired, _ = await swept(use, step)
            assert other.outcome == "complete"
            assert at.repository.holdings.entries["a"].idle
            if not fired:
                break
        assert not fired
        await at.repository.unload("a")
        at.check_nothing_left()


async def test_a_supervisor_that_is_cancelled_at_any_step_of_a_load_leaves_nothing(tmp_path: Path) -> None:
    for step in range(1, 500):
        fired = False
        at = Place(tmp_path, RepositoryLimits(roots=(str(tmp_path),), code_roots=(str(tmp_path),)), [], lambda: 0)
        url = str(tmp_path / "a") if step > 1 else at.folder("a")
        async with trio.open_nursery() as nursery:
            await nursery.start(at.supervisor.run)
            instrument = _CancelAt(nursery.cancel_scope, step)
            async with asking(lambda: at.repository.load("a", url)) as (asked,):  # noqa: B023  # used up in this round
                trio.lowlevel.add_instrument(instrument)
                await asked.over.wait()
            fired = instrument.fired
            trio.lowlevel.remove_instrument(instrument)
            nursery.cancel_scope.cancel()
        assert (at.repository.names, at.repository.used) == ([], 0)
        if not fired:
            break
    assert not fired
