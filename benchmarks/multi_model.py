"""Calls many models from many callers at once, with a budget that holds few: `python -m benchmarks.multi_model`."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, final

import click
import numpy as np

ROOT = Path(__file__).parent.parent
KiB, MiB = 1024, 1024**2
_PATIENCE = 60.0
_ATTEMPTS = 300
_COLUMNS = 8
_POLL_EVERY = 25
_PAGE = 7
_GROWTH = 1.1
"""The most resident memory at the end, as a multiple of that after the warm-up."""


class WalkError(Exception):
    """Raised if a walk finds a wrong answer or state; the text describes it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a walk. `size` is the bytes of each model's table, and the memory that the model declares."""

    models: int = 200
    fit: int = 20
    size: int = 4 * MiB
    workers: int = 16
    calls: int = 6000
    warm_up: int = 1500
    seed: int = 1
    exponent: float = 0.9
    """The exponent of the models' popularity: the frequency of rank r is 1 / r to this power."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a walk, in bytes and seconds."""

    side: str
    calls: int
    seconds: float
    loads: int
    evictions: int
    conflicts: int
    """Answers 409, to a second load of the same model."""
    full: int
    """Answers 507."""
    retries: int
    """Invocations of a model that had just been unloaded."""
    memory_peak: int
    base: int
    peak: int
    end: int


# ---- the models


def make_models(folder: Path, plan: Plan) -> None:
    """Makes a folder for each model, with a table whose numbers each identify the model and the row."""
    for number in range(plan.models):
        model = folder / name_of(number)
        model.mkdir()
        rows = plan.size // (8 * _COLUMNS)
        cells = np.arange(rows * _COLUMNS, dtype=np.int64).reshape(rows, _COLUMNS)
        np.save(model / "rows.npy", cells + (number << 40))
        (model / "model.toml").write_text(
            f'factory = "models.library.lookup:Lookup"\noptions = {{ table = "rows.npy" }}\nmemory = {plan.size}\n'
        )


def name_of(number: int) -> str:
    return f"model-{number:04}"


def _question(row: int) -> bytes:
    tensor = {"name": "INDEX", "datatype": "INT64", "shape": [1], "data": [row]}
    return json.dumps({"inputs": [tensor]}).encode()


def _check_answer(body: bytes, number: int, row: int) -> None:
    data = json.loads(body)["outputs"][0]["data"]
    if data != [(number << 40) + row * _COLUMNS + column for column in range(_COLUMNS)]:
        raise WalkError(f"{name_of(number)}, row {row}: the answer is another's: {str(data)[:200]}")


# ---- the server


@final
class Server:
    """The gateway's process."""

    def __init__(self, root: Path, memory: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.multi_model_server", str(root), str(memory)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.port = int(self.ledger()["port"])

    def ledger(self) -> dict[str, Any]:
        """The server's current holdings, as it reports them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("ledger\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise WalkError(f"the server has ended with status {self._process.wait()}")
        ledger: dict[str, Any] = json.loads(line)
        return ledger

    def stop(self) -> None:
        """Ends the server. WalkError if it does not end with status 0."""
        try:
            self._process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode:
            raise WalkError(f"the server has ended with status {self._process.returncode}")


@contextmanager
def _serving(root: Path, memory: int) -> Iterator[Server]:
    server = Server(root, memory)
    try:
        yield server
    finally:
        server.stop()


@final
class Caller:
    """One HTTP/1.1 connection, kept alive."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """Sends a request; returns the status and body of the answer."""
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            fields["content-type"] = "application/json"
        self._http.request(method, path, body, fields)
        answer = self._http.getresponse()
        return answer.status, answer.read()

    def models(self, limit: int = 100) -> list[str]:
        """The names on all pages of GET /models."""
        names: list[str] = []
        token = ""
        while True:
            status, body = self.ask("GET", f"/models?limit={limit}" + (f"&next_page_token={token}" if token else ""))
            page = json.loads(body)
            if status != 200 or len(page["models"]) > limit:
                raise WalkError(f"GET /models: {status} {body[:200]!r}")
            names += [model["modelName"] for model in page["models"]]
            token = page.get("nextPageToken", "")
            if not token:
                return names

    def close(self) -> None:
        self._http.close()


# ---- the callers


class Side(Protocol):
    """A way to call models that may not be loaded."""

    def call(self, caller: Caller, number: int, row: int) -> None:
        """Calls the model and checks the answer. WalkError if there is none, or a wrong one."""

    def unload_all(self, caller: Caller) -> None:
        """Leaves no model loaded."""


@final
class Endpoint:
    """SageMaker's callers, which name a model; the gateway loads and unloads."""

    def __init__(self, plan: Plan, root: Path) -> None:
        pass

    def call(self, caller: Caller, number: int, row: int) -> None:
        target = name_of(number) + ".tar.gz"
        status, body = caller.ask(
            "POST", "/endpoints/many/invocations", _question(row), X_Amzn_SageMaker_Target_Model=target
        )
        if status != 200:
            raise WalkError(f"{target}: {status} {body[:300]!r}")
        _check_answer(body, number, row)

    def unload_all(self, caller: Caller) -> None:
        for name in caller.models(_PAGE):
            _expect(caller, "DELETE", name, 200)


@final
class Platform:
    """SageMaker's platform in front of a container: it loads a model on its first use, calls it after 200 or 409, and
    unloads the least recently used after 507."""

    def __init__(self, plan: Plan, root: Path) -> None:
        self._plan, self._root, self._lock = plan, root, threading.Lock()
        self._loaded: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._loading: dict[int, threading.Event] = {}
        self._leaving: dict[int, threading.Event] = {}
        self.conflicts = self.full = self.retries = self.evictions = 0

    def call(self, caller: Caller, number: int, row: int) -> None:
        for _ in range(_ATTEMPTS):
            self._load(caller, number)
            status, body = caller.ask("POST", f"/models/{name_of(number)}/invoke", _question(row))
            match status:
                case 200:
                    _check_answer(body, number, row)
                    return
                case 404 | 503:  # it was unloaded between the look and the call
                    self.retries += 1
                    self._wait(self._leaving, number)
                case 507:
                    self._evict(caller)
                case _:
                    raise WalkError(f"invoke {name_of(number)}: {status} {body[:300]!r}")
        raise WalkError(f"{name_of(number)} gave no answer in {_ATTEMPTS} attempts")

    def _load(self, caller: Caller, number: int) -> None:
        load = json.dumps({"model_name": name_of(number), "url": str(self._root / name_of(number))}).encode()
        for _ in range(_ATTEMPTS):
            with self._lock:
                if number in self._loaded:
                    self._loaded.move_to_end(number)
                    return
                first = number not in self._loading
                if first:
                    self._loading[number] = threading.Event()
            # A second caller asks to load it too: the container must answer 409 at once.
            status, body = caller.ask("POST", "/models", load)
            with self._lock:
                if status == 200:
                    self._loaded[number] = None
                if first:
                    self._loading.pop(number).set()
            match status:
                case 200:
                    return
                case 409:
                    self.conflicts += 1
                    self._wait(self._loading, number)
                    self._wait(self._leaving, number)
                case 507:
                    self.full += 1
                    self._evict(caller)
                case _:
                    raise WalkError(f"load {name_of(number)}: {status} {body[:300]!r}")
        raise WalkError(f"{name_of(number)} was not loaded in {_ATTEMPTS} attempts")

    def _wait(self, events: dict[int, threading.Event], number: int) -> None:
        with self._lock:
            event = events.get(number)
        if event is not None and not event.wait(_PATIENCE):
            raise WalkError(f"{name_of(number)} is neither here nor gone")

    def _evict(self, caller: Caller) -> None:
        with self._lock:
            number = next(iter(self._loaded), None)
            if number is not None:
                del self._loaded[number]
                self._leaving[number] = threading.Event()
            leaving = next(iter(self._leaving), None)
        if number is not None:
            self._unload(caller, number)
        elif leaving is not None:
            self._wait(self._leaving, leaving)

    def _unload(self, caller: Caller, number: int) -> None:
        try:
            _expect(caller, "DELETE", name_of(number), 200)
            self.evictions += 1
        finally:
            with self._lock:
                self._leaving.pop(number).set()

    def unload_all(self, caller: Caller) -> None:
        """Checks that the container lists the models that this platform has loaded, and unloads them."""
        believed = sorted(name_of(number) for number in self._loaded)
        for limit in (_PAGE, 100):
            if caller.models(limit) != believed:
                raise WalkError(f"the container lists {caller.models(limit)}, loaded are {believed}")
        for number in range(self._plan.models):
            _expect(caller, "GET", name_of(number), 200 if number in self._loaded else 404)
        for name in believed:
            _expect(caller, "DELETE", name, 200)
            _expect(caller, "DELETE", name, 404)
        self._loaded.clear()


SIDES: dict[str, Callable[[Plan, Path], Side]] = {"container": Platform, "platform": Endpoint}


def _expect(caller: Caller, method: str, name: str, status: int) -> None:
    got, body = caller.ask(method, f"/models/{name}")
    if got != status:
        raise WalkError(f"{method} /models/{name}: expected {status}, got {got} {body[:300]!r}")


# ---- the walk


def walk(plan: Plan, side: str, folder: Path) -> Figures:
    """Makes the calls of the plan, after a warm-up, against its own server with the models in `folder`. WalkError if an
    answer is missing or wrong, the budget was exceeded, or anything is left at the end."""
    with _serving(folder, plan.fit * plan.size) as server:
        _Walk(replace(plan, calls=plan.warm_up), side, server, folder).run()
        base = server.ledger()
        walked = _Walk(replace(plan, seed=plan.seed + 1), side, server, folder)
        began = time.perf_counter()
        walked.run()
        seconds = time.perf_counter() - began
        end = server.ledger()
    for what in ("bytes", "memory", "taken", "workers", "slots", "exchanges"):
        if end[what]:
            raise WalkError(f"at the end there are {what}: {end[what]}")
    if set(end["endings"]) - {"complete", "refused"}:
        raise WalkError(f"calls have ended as {end['endings']}")
    if end["memory_peak"] > plan.fit * plan.size:
        raise WalkError(f"{end['memory_peak']} bytes were reserved, and the budget is {plan.fit * plan.size}")
    if end["resident"] > base["resident"] * _GROWTH:
        raise WalkError(f"{end['resident']} bytes are resident at the end, after the warm-up it was {base['resident']}")
    said = {what: end["told"].get(what, 0) - base["told"].get(what, 0) for what in ("model loaded", "model evicted")}
    platform = walked.side if isinstance(walked.side, Platform) else None
    return Figures(
        side=side,
        calls=plan.calls,
        seconds=seconds,
        loads=said["model loaded"],
        evictions=said["model evicted"] if platform is None else platform.evictions,
        conflicts=0 if platform is None else platform.conflicts,
        full=0 if platform is None else platform.full,
        retries=0 if platform is None else platform.retries,
        memory_peak=end["memory_peak"],
        base=base["resident"],
        peak=end["resident_peak"],
        end=end["resident"],
    )


@final
class _Walk:
    """Workers that call, each with its own connection and list of models."""

    def __init__(self, plan: Plan, side: str, server: Server, folder: Path) -> None:
        self._plan, self._server = plan, server
        self.side = SIDES[side](plan, folder)
        self._answers = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        plan = self._plan
        with ThreadPoolExecutor(plan.workers) as pool:
            for worker in [pool.submit(self._work, number) for number in range(plan.workers)]:
                worker.result()
        if self._answers != plan.calls:
            raise WalkError(f"{plan.calls} calls, and {self._answers} answers")
        with closing(Caller(self._server.port)) as caller:
            self.side.unload_all(caller)
            if listed := caller.models():
                raise WalkError(f"all models were unloaded, and these are listed: {listed}")
            for number in range(plan.models):
                _expect(caller, "GET", name_of(number), 404)
        self._wait_quiet()

    def _work(self, number: int) -> None:
        plan = self._plan
        with closing(Caller(self._server.port)) as caller:
            for turn, (model, row) in enumerate(_choices(plan, number)):
                self.side.call(caller, model, row)
                with self._lock:
                    self._answers += 1
                if turn % _POLL_EVERY == 0 and len(listed := caller.models()) > plan.fit:
                    raise WalkError(f"{len(listed)} models are loaded, and {plan.fit} fit")

    def _wait_quiet(self) -> None:
        """Waits until the server has noticed that all callers have left."""
        deadline = time.monotonic() + _PATIENCE
        while (ledger := self._server.ledger())["connections"] or ledger["exchanges"]:
            if time.monotonic() > deadline:
                raise WalkError(f"nobody calls, and the server holds {ledger}")
            time.sleep(0.01)


def _choices(plan: Plan, worker: int) -> Iterator[tuple[int, int]]:
    """Yields models and rows; the seed decides all of them."""
    weights = 1 / np.arange(1, plan.models + 1) ** plan.exponent
    popular = np.random.default_rng(plan.seed).permutation(plan.models)
    random = np.random.default_rng([plan.seed, worker])
    count = len(range(worker, plan.calls, plan.workers))
    ranks = random.choice(plan.models, count, p=weights / weights.sum())
    rows = random.integers(plan.size // (8 * _COLUMNS), size=count)
    return zip(popular[ranks].tolist(), rows.tolist(), strict=True)


# ---- the command


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--models", type=click.IntRange(1, 10_000), default=Plan().models, help="Models in the folder.")
@click.option("--fit", type=click.IntRange(1, 100), default=Plan().fit, help="Models that the budget holds.")
@click.option("--size", type=click.IntRange(1, 4096), default=Plan().size // KiB, help="KiB of each model.")
@click.option("--workers", type=click.IntRange(1, 256), default=Plan().workers, help="Calls at once.")
@click.option("--calls", type=click.IntRange(1), default=Plan().calls, help="Calls after the warm-up.")
@click.option("--seed", type=click.IntRange(0), default=Plan().seed, help="The same calls for the same seed.")
@click.option("--side", type=click.Choice(sorted(SIDES)), multiple=True, help="One of the two; both where none is named.")
def program(models: int, fit: int, size: int, workers: int, calls: int, seed: int, side: tuple[str, ...]) -> None:
    """Call many models with memory for few. On the side `platform`, the caller loads and unloads them, as SageMaker's
    platform does; on the other side, the caller names a model, and the gateway loads and unloads. Fails if an answer is
    missing or wrong, or anything is left at the end."""
    sides = side or tuple(sorted(SIDES))
    if "platform" in sides and fit <= workers:
        raise click.UsageError("--fit must be above --workers on the side `platform`: a model in use is not unloaded")
    plan = Plan(
        models=models, fit=fit, size=size * KiB, workers=workers, calls=calls, warm_up=max(calls // 4, workers), seed=seed
    )
    with tempfile.TemporaryDirectory(prefix="everywire-models-") as folder:
        make_models(Path(folder), plan)
        for name in sides:
            try:
                click.echo(report(walk(plan, name, Path(folder))))
            except WalkError as error:
                raise click.ClickException(f"{name}: {error}") from None


def report(figures: Figures) -> str:
    """A line to read."""
    rate = figures.calls / figures.seconds
    return (
        f"{figures.side}: {figures.calls} calls answered right in {figures.seconds:.1f} s ({rate:.0f}/s); "
        f"{figures.loads} loads, {figures.evictions} evictions, {figures.full} times full, {figures.conflicts} conflicts, "
        f"{figures.retries} retries; at most {figures.memory_peak / MiB:.0f} MiB of models; resident "
        f"{figures.base / MiB:.1f} MiB before, {figures.peak / MiB:.1f} at most, {figures.end / MiB:.1f} after"
    )


if __name__ == "__main__":
    program(prog_name="python -m benchmarks.multi_model")
