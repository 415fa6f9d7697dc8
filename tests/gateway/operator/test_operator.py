"""The operator plane tells what there is, and does what it is told: health, models, live streams, drain, the log."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import trio
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from gateway.config import Config, DrainConfig, ListenConfig, RepositoryConfig, SageMakerConfig, V2Config
from gateway.gateway import Gateway
from gateway.operator.app import operator_app
from gateway.testing.stories.talk import Leave
from models.adapt import spec_of
from models.messages import Family, Prompt
from models.session import Session
from models.spec import Model, ModelSpec, RestartPolicy
from tests.gateway.operator.operators import Operator
from tests.gateway.promises import Probe, answering, counting, deaf, serving, silent

# a clock that jumps would jump while a thread looks into folders
NO_PORT = Config(listen=ListenConfig(port=-1), repository=RepositoryConfig(roots=()))


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    ours = logging.getLogger("gateway")
    level = ours.level
    yield
    ours.setLevel(level)


# -- health


async def test_ready_says_why_not_until_the_models_are_loaded_and_from_the_first_moment_of_a_drain(
    autojump_clock: Any,
) -> None:
    gate = trio.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[Model]:
        await gate.wait()
        yield Probe(silent)

    spec = ModelSpec(name="slow", family=Family.TEXT, load=slow)
    gateway = Gateway(replace(NO_PORT, drain=DrainConfig(delay=5)), [spec])
    operator = Operator(gateway)
    told = [(await operator.ask("GET", "/health/ready")).json]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.serve)
        await trio.testing.wait_all_tasks_blocked()
        loading = await operator.ask("GET", "/health/ready")
        assert (loading.status, (await operator.ask("GET", "/health/live")).json) == (503, {"live": True})
        gate.set()
        await trio.testing.wait_all_tasks_blocked()
        ready = await operator.ask("GET", "/health/ready")
        assert (ready.status, ready.json) == (200, {"ready": True, "reasons": []})
        gateway.begin_drain()
        await trio.testing.wait_all_tasks_blocked()
        told += [loading.json, (await operator.ask("GET", "/health/ready")).json]
    assert told == [
        {"ready": False, "reasons": ["nothing is served yet"]},
        {"ready": False, "reasons": ["model 'slow' is loading"]},
        {"ready": False, "reasons": ["draining"]},
    ]


# -- models


async def crash(prompt: Prompt) -> str:
    raise ValueError("out of ideas")


async def test_a_model_says_where_it_is_and_what_went_wrong_last(autojump_clock: Any, caplog: Any) -> None:
    async with serving(spec_of(crash, "crash", capacity=3), config=NO_PORT) as house:
        operator = Operator(house.gateway)
        (model,) = (await operator.get("/models"))["models"]
        assert (model["name"], model["state"], model["capacity"], model["last_error"]) == ("crash", "ready", 3, None)
        await trio.sleep(10)
        status, _, _ = await house.ask("/predictions/crash", b'{"inputs": "x"}')
        assert status == 424
        await trio.sleep(2)
        model = await operator.get("/models/crash")
        assert (model["seconds"], model["slots_in_use"], model["queued"]) == (12, 0, 0)
        error = model["last_error"]
        assert (error["error"], error["ago"]) == ("ValueError: out of ideas", 2)
        assert error["incident"] in {record.__dict__.get("incident") for record in caplog.records}


async def test_a_worker_that_crashed_says_when_it_is_loaded_again(autojump_clock: Any, caplog: Any) -> None:
    bad, loads = trio.Event(), list[int]()

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        async with trio.open_nursery() as nursery:

            async def explode() -> None:
                await bad.wait()
                if loads:
                    await trio.sleep_forever()
                loads.append(1)
                raise RuntimeError("no more memory")

            nursery.start_soon(explode)
            yield Probe(silent)

    policy = RestartPolicy(backoff=3, backoff_max=3, jitter=0)
    gateway = Gateway(NO_PORT, [ModelSpec(name="bad", family=Family.TEXT, load=load, restart=policy)])
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        bad.set()
        await trio.sleep(1)
        model = await Operator(gateway).get("/models/bad")
        nursery.cancel_scope.cancel()
    assert (model["state"], model["restart_in"], model["crashes"]) == ("restarting", 2, 1)
    assert model["last_error"]["error"] == model["reason"] == "RuntimeError: no more memory"
    logged = [record.__dict__["incident"] for record in caplog.records if record.message == "model crashed"]
    assert logged == [model["last_error"]["incident"]]


async def test_models_are_unloaded_loaded_and_reloaded(autojump_clock: Any) -> None:
    async with serving(
        Probe(answering).spec("json-http1"), Probe(silent, "other").spec("json-http1"), config=NO_PORT
    ) as house:
        operator = Operator(house.gateway)
        unloaded = await operator.ask("POST", "/models/probe/unload")
        assert (unloaded.status, unloaded.json["state"]) == (200, "unloaded")
        assert "capacity" not in unloaded.json
        assert (await operator.get("/models/other"))["state"] == "ready"
        again = await operator.ask("POST", "/models/probe/reload")
        assert (again.status, again.json) == (404, {"error": "no model 'probe' is in service", "code": "NotFound"})
        loaded = await operator.ask("POST", "/models/probe/load", {})
        assert (loaded.status, loaded.json["state"]) == (200, "ready")
        old = house.gateway.supervisor.workers["probe"]
        reloaded = await operator.ask("POST", "/models/probe/reload", {"patience": 1})
        assert (reloaded.status, reloaded.json["state"]) == (200, "ready")
        assert "a changed file was not read" in reloaded.json["code"]
        assert "models.probe.process.enabled = true" in reloaded.json["code"]
        assert "code" not in (await operator.get("/models/probe"))
        assert house.gateway.supervisor.workers["probe"] is not old


async def test_a_reload_that_fails_says_why_and_the_old_version_serves_on(autojump_clock: Any, caplog: Any) -> None:
    loads = []

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        loads.append(1)
        if len(loads) > 1:
            raise OSError("no weights at s3://user:letmein@weights")
        yield Probe(answering)

    async with serving(ModelSpec(name="probe", family=Family.TEXT, load=load)) as house:
        operator = Operator(house.gateway)
        failed = await operator.ask("POST", "/models/probe/reload")
        assert failed.status == 500
        assert "the old one serves on: OSError: no weights at s3://" in failed.json["error"]
        assert "letmein" not in failed.json["error"]
        (incident,) = [r.__dict__["incident"] for r in caplog.records if r.message == "model not reloaded"]
        assert incident in failed.json["error"]
        assert (await operator.get("/models/probe"))["state"] == "ready"


NOT_SO = [
    ("POST", "/models/none/load", {}, 404, "no model 'none'"),
    ("POST", "/models/none/unload", {}, 404, "no model 'none'"),
    ("GET", "/models/none", b"", 404, "no model 'none'"),
    ("POST", "/models/probe/load", {"now": True}, 400, "unknown field `now`"),
    ("POST", "/models/probe/reload", {"patience": "1s"}, 400, "`$.patience`"),
    ("POST", "/models/probe/reload", {"patience": -1}, 400, "patience must be a number of seconds from 0, not -1"),
    ("POST", "/models/probe/load", b"{", 400, "the body: "),
    ("POST", "/models/probe/load", b"\xff", 400, "the body: "),
    ("POST", "/models/probe/load", b" " * 70_000, 413, "larger than 65536 bytes"),
    ("POST", "/drain", {"timeout": -1}, 400, "timeout must be"),
    ("PUT", "/log", {"level": "loud"}, 400, "'loud'"),
    ("PUT", "/log", b"", 400, "missing required field `level`"),
    ("GET", "/streams?limit=0", b"", 400, "limit must be a whole number from 1 to 1000, not '0'"),
    ("GET", "/streams?limit=1001", b"", 400, "limit must be a whole number from 1 to 1000, not '1001'"),
    ("GET", "/streams?sort=foo", b"", 400, "sort must be one of age, waited, not 'foo'"),
    (
        "GET",
        "/streams?waits_for=godot",
        b"",
        400,
        "waits_for must be one of slot, model, input, room, end, gateway, not 'godot'",
    ),
    ("GET", "/streams?limit=all", b"", 400, "limit must be"),
    ("DELETE", "/models", b"", 405, "DELETE is not allowed"),
    ("GET", "/predictions/probe", b"", 404, "no such path"),
]


@pytest.mark.parametrize(("method", "target", "body", "status", "text"), NOT_SO)
async def test_what_cannot_be_done_is_said_in_words(
    method: str, target: str, body: Any, status: int, text: str, autojump_clock: Any
) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=NO_PORT) as house:
        answer = await Operator(house.gateway).ask(method, target, body)
        assert answer.status == status
        assert text in answer.json["error"]
        assert (answer.headers["content-type"], answer.headers["cache-control"]) == ("application/json", "no-store")
        assert not house.gateway.draining


async def test_a_body_that_does_not_come_is_not_waited_for(autojump_clock: Any) -> None:
    operator, told = Operator(Gateway(NO_PORT)), list[Any]()

    async def send(message: Any) -> None:
        told.append(message)

    async def receive() -> Any:
        await trio.sleep(4)
        return {"type": "http.request", "body": b" ", "more_body": True}

    await operator.app(operator.scope("POST", "/drain", {}), receive, send)
    assert (trio.current_time(), told[0]["status"]) == (10, 408)


async def test_a_failure_of_the_plane_itself_is_an_incident(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Probe(silent).spec("json-http1")) as house:
        operator = Operator(house.gateway)

        def broken() -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(house.gateway, "counts", broken)
        told: list[Any] = []

        async def send(message: Any) -> None:
            told.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        with pytest.raises(RuntimeError, match="a bug"):  # which Starlette gives to its server's log
            await operator.app(operator.scope("GET", "/streams", {}), receive, send)
        monkeypatch.undo()
        (incident,) = [r.__dict__["incident"] for r in caplog.records if r.message == "operator request failed"]
        assert told[0]["status"] == 500
        assert incident.encode() in told[1]["body"]
        assert b"a bug" not in told[1]["body"]


# -- metrics


async def _saying(probe: Probe, session: Session[Any, Any]) -> None:
    await probe.take(session)
    await probe.say(session)


@pytest.mark.parametrize(
    ("accept", "parse", "type"),
    [
        ("", parse_text, "text/plain"),
        ("application/openmetrics-text; version=1.0.0", parse_openmetrics, "application/openmetrics-text"),
    ],
)
async def test_a_scrape_has_what_has_happened_since_the_server_began(
    accept: str, parse: Any, type: str, autojump_clock: Any
) -> None:
    async with serving(Probe(_saying).spec("json-http1"), config=NO_PORT) as house:
        operator = Operator(house.gateway)
        await (await house.call("json-http1")).rest()
        await house.still()
        answer = await operator.ask("GET", "/metrics", accept=accept)
        assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, type)
        samples = [s for family in parse(answer.body.decode()) for s in family.samples]
        ended = [s for s in samples if s.name == "everywire_exchanges_total" and s.value]
        assert [(s.labels["model"], s.labels["ending"], s.value) for s in ended] == [("probe", "complete", 1)]


# -- live streams


async def test_a_live_stream_says_what_it_waits_for(autojump_clock: Any) -> None:
    specs = [
        Probe(counting, "counting").spec("lmi-http1"),
        Probe(silent, "silent").spec("lmi-http1", capacity=1),
        Probe(deaf, "deaf").spec("bidi"),
        Probe(_hungry, "hungry").spec("bidi"),
    ]
    async with serving(*specs, wire="bidi") as house:
        operator = Operator(house.gateway)
        calls = [
            await house.call("lmi-http1", "counting"),
            await house.call("lmi-http1", "silent"),
            await house.call("lmi-http1", "silent"),
            await house.call("bidi", "deaf"),
            await house.call("bidi", "hungry"),
        ]
        await house.still()
        await trio.sleep(4)
        told = await operator.get("/streams")
        assert (told["live"], told["endings"]) == (5, {})
        said = sorted((s["model"], s["waits_for"]) for s in told["streams"])
        assert said == [
            ("counting", "room"), ("deaf", "model"), ("hungry", "input"), ("silent", "model"), ("silent", "slot"),
        ]  # fmt: skip
        (first,) = [stream for stream in told["streams"] if stream["model"] == "counting"]
        assert (first["wire"], first["dialect"], first["method"], first["path"]) == (
            "http/1.1", "lmi", "POST", "/predictions/counting",
        )  # fmt: skip
        assert first["age"] == 4
        assert first["bytes_out"] > 10_000
        assert "ending" not in first
        assert len((await operator.get("/streams?limit=2"))["streams"]) == 2
        for call in calls:
            await call.leave(Leave.RESET)
        await house.still()
        assert (await operator.get("/streams"))["live"] == 0


async def _hungry(probe: Probe, session: Session[Any, Any]) -> None:
    async for _ in session:
        pass


# -- the end


async def test_a_drain_is_begun_with_its_own_timeout_and_its_report_is_given(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=Config(drain=DrainConfig(timeout=500))) as house:
        operator = Operator(house.gateway)
        assert await operator.get("/drain") == {"draining": False, "report": None}
        await house.call("json-http1")
        await house.still()
        answer = await operator.ask("POST", "/drain", {"timeout": 7})
        assert (answer.status, answer.json) == (202, {"draining": True, "report": None})
        report = (await operator.ask("POST", "/drain", {"timeout": 100, "wait": True})).json["report"]
        assert report["live"] == 1
        assert [(row["ending"], row["age"]) for row in report["cut"]] == [("drained", 7)]
        assert await operator.get("/drain") == {"draining": True, "report": report}


async def test_a_later_call_shortens_a_drain(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=Config(drain=DrainConfig(timeout=500))) as house:
        operator = Operator(house.gateway)
        await house.call("json-http1")
        await house.still()
        assert (await operator.ask("POST", "/drain")).status == 202
        await trio.sleep(50)
        report = (await operator.ask("POST", "/drain", {"timeout": 0, "wait": True})).json["report"]
        assert [row["age"] for row in report["cut"]] == [50]


async def test_models_cannot_be_loaded_in_a_drain_and_what_is_live_is_still_told(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=Config(drain=DrainConfig(timeout=50))) as house:
        operator = Operator(house.gateway)
        await house.call("json-http1")
        await house.still()
        await operator.ask("POST", "/drain")
        await house.still()
        assert (await operator.get("/streams"))["live"] == 1
        await house.gateway.drain()
        answer = await operator.ask("POST", "/models/probe/load")
        assert answer.status == 503
        assert answer.headers["retry-after"]


# -- the log


async def test_the_level_of_the_log_is_shown_and_set() -> None:
    async with serving(Probe(silent).spec("json-http1")) as house:
        operator = Operator(house.gateway)
        assert (await operator.ask("PUT", "/log", {"level": "error"})).json == {"level": "error"}
        assert logging.getLogger("gateway.exchange").getEffectiveLevel() == logging.ERROR
        assert await operator.get("/log") == {"level": "error"}


# -- mounted, and nowhere else


async def test_what_changes_something_is_a_line_of_the_log(autojump_clock: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "gateway.operator")
    async with serving(Probe(silent).spec("json-http1"), config=NO_PORT) as house:
        operator = Operator(house.gateway)
        await operator.ask("POST", "/models/probe/reload")
        await operator.ask("PUT", "/log", {"level": "info"})
        await operator.ask("POST", "/drain", {"timeout": 1})
    said = [record.__dict__ for record in caplog.records if record.message == "operator request"]
    assert [(record["action"], record["peer"]) for record in said] == [
        ("reload", "127.0.0.1:4711"), ("log", "127.0.0.1:4711"), ("drain", "127.0.0.1:4711"),
    ]  # fmt: skip
    assert (said[0]["model"], said[1]["to"], said[2]["timeout"]) == ("probe", "info", 1)


async def test_it_can_be_mounted_below_a_path_of_another_application() -> None:
    async with serving(Probe(silent).spec("json-http1")) as house:
        operator = Operator(Starlette(routes=[Mount("/admin", operator_app(house.gateway))]))
        assert (await operator.get("/admin/models/probe"))["state"] == "ready"


def managed() -> list[tuple[str, str]]:
    """Every route of the plane: its method and a path."""
    gateway = Gateway(NO_PORT, [Probe(silent).spec("json-http1")])
    found = []
    for route in operator_app(gateway).routes:
        methods = sorted(route.methods or ()) if isinstance(route, Route) else ["POST"]
        path: str = route.path  # type: ignore[attr-defined]
        found += [(method, path.replace("{name:path}", "probe")) for method in methods]
    return found


DATA = {
    "alone": Config(),
    "v2 control": Config(v2=V2Config(model_control=True)),
    "multi-model": Config(sagemaker=SageMakerConfig(multi_model=True)),
}
OF_THE_CONTRACT = {"/models", "/models/probe"}
"""The paths that the multi-model API has too, where it is on, with answers of its own."""
ABSENT = [
    (data, method, path)
    for data in DATA
    for method, path in managed()
    if not (data == "multi-model" and path in OF_THE_CONTRACT)
    if path != "/"  # each port has its own
]


@pytest.mark.parametrize(("data", "method", "path"), ABSENT)
async def test_no_route_of_the_plane_is_on_the_data_port(data: str, method: str, path: str) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=DATA[data]) as house:
        status, _, _ = await house.ask(path, None if method in ("GET", "HEAD") else b"{}", method=method.encode())
        assert status == 404


@pytest.mark.parametrize("path", ["/models", "/v2/repository/models/probe/unload", "/v2/logging"])
async def test_what_manages_on_the_data_port_is_off_until_it_is_asked_for(path: str) -> None:
    async with serving(Probe(silent).spec("json-http1")) as house:
        status, _, said = await house.ask(path, b"{}")
        assert (status, b"v2.model_control" in said) == ((404, False) if path == "/models" else (403, True))
