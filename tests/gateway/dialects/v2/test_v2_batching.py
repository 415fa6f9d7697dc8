"""Requests of many clients in one call of the model: on every wire, and what statistics and the configuration say of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

import numpy as np
import pytest
import trio
from numpy.typing import NDArray
from trio.testing import MockClock

from gateway import client
from gateway.catalog.factories import load_spec
from gateway.config import BatchingConfig, Config, ModelConfig
from gateway.config.load import load
from gateway.config.problem import ConfigError
from gateway.errors import TransportLost
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Tensor
from models.spec import Batching, ModelSpec, RestartPolicy, Shape, TensorSpec, declare
from protocols.events import Close, Frame, Opcode
from tests.gateway.promises import House, Line, serving

PATH = "/v2/models/m/infer"
X = TensorSpec(name="x", datatype="FP32", shape=(2,))


class Gated:
    """Doubles x, one call at a time as it is let go."""

    def __init__(self) -> None:
        self.calls: list[list[float]] = []
        self.go = trio.Event()

    async def __call__(self, request: InferRequest) -> InferResponse:
        x = request["x"]
        self.calls.append([float(row[0]) for row in x])
        await self.go.wait()
        if (x < 0).any():
            raise ModelError("no negative numbers", status=422)
        return InferResponse(outputs=(Tensor(name="y", data=x * 2),))

    def spec(self, batching: Batching | None = None, **fields: Any) -> ModelSpec:
        return spec_of(self, "m", inputs=(X,), max_batch_size=8, batching=batching or Batching(), **fields)


def asked(*values: float, **request: Any) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(values), 2], "data": [[value, value] for value in values]}
    return json.dumps({"inputs": [tensor], **request}).encode()


@dataclass
class Crowd:
    """Clients of a house, each on a wire of its own."""

    house: House
    nursery: trio.Nursery
    http2: Line
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)

    async def comes(self, name: str, body: bytes, wire: str = "http1") -> Any:
        """A client asks; what comes back is the line that it left by."""
        if wire == "websocket":
            line = await self.house.socket(PATH)
            self.nursery.start_soon(self._converse, name, line, body)
        else:
            line = self.house.line("http1") if wire == "http1" else self.http2
            self.nursery.start_soon(self._post, name, line, body)
        await self.house.still()
        return line

    async def _post(self, name: str, line: Line, body: bytes) -> None:
        stream = line.next_stream()
        await line.send(*client.post(stream, PATH, body))
        with suppress(TransportLost):  # it has left
            status, _, said = await line.peer.read_answer(stream)
            self.answers[name] = status, json.loads(said)

    async def _converse(self, name: str, line: Line, body: bytes) -> None:
        with suppress(TransportLost):  # it has left
            await line.send(Frame(opcode=Opcode.TEXT, fin=True, data=body))
            frame = await line.event(1)
            if isinstance(frame, Frame):
                said = json.loads(frame.data)
                self.answers[name] = 500 if "error" in said else 200, said
                await line.peer.send(Close(code=1000))

    def values(self, name: str) -> list[float]:
        status, said = self.answers[name]
        assert status == 200, said
        (output,) = said["outputs"]
        assert output["shape"] == [len(output["data"]) // 2, 2]
        return output["data"][::2]  # type: ignore[no-any-return]

    async def stats(self) -> Any:
        _, _, body = await self.house.ask("/v2/models/m/stats", None, method=b"GET")
        (told,) = json.loads(body)["model_stats"]
        return told


@asynccontextmanager
async def crowd(*specs: ModelSpec, config: Config | None = None) -> AsyncIterator[Crowd]:
    async with serving(*specs, config=config) as house, trio.open_nursery() as nursery:
        yield Crowd(house, nursery, house.line("http1"))
        await house.still()
        nursery.cancel_scope.cancel()


async def test_clients_of_every_wire_are_in_one_batch_and_each_has_its_own_answer(autojump_clock: Any) -> None:
    model = Gated()
    async with crowd(model.spec()) as clients:
        await clients.comes("busy", asked(9))
        await clients.comes("one", asked(1, id="first"))
        await clients.comes("two", asked(2, 3), "http2")
        await clients.comes("three", asked(4, id="third"), "websocket")
        model.go.set()
        await clients.house.still()
        assert model.calls == [[9], [1, 2, 3, 4]]
        assert [clients.values(name) for name in ("busy", "one", "two", "three")] == [[18], [2], [4, 6], [8]]
        assert [clients.answers[name][1].get("id") for name in ("one", "two", "three")] == ["first", None, "third"]


async def test_statistics_tell_calls_of_the_model_apart_from_requests(autojump_clock: Any) -> None:
    model = Gated()
    async with crowd(model.spec()) as clients:
        await clients.comes("a", asked(9))
        for name, wire in (("b", "http1"), ("c", "websocket"), ("d", "http1")):
            await clients.comes(name, asked(1, 2), wire)
        model.go.set()
        await clients.house.still()
        told = await clients.stats()
        assert (told["inference_count"], told["execution_count"]) == (7, 2)
        assert [(b["batch_size"], b["compute_infer"]["count"]) for b in told["batch_stats"]] == [(1, 1), (6, 1)]
        parts = told["inference_stats"]
        assert parts["success"]["count"] == 4
        assert parts["success"]["ns"] == sum(
            parts[part]["ns"] for part in ("queue", "compute_input", "compute_infer", "compute_output")
        )
        assert parts["queue"]["ns"] > 0
        assert sum(b["compute_infer"]["ns"] for b in told["batch_stats"]) < parts["compute_infer"]["ns"]
        assert told["transfer"]["copied_bytes"] >= 6 * 8


async def test_a_bad_request_fails_alone_and_one_that_leaves_is_missed_by_nobody(autojump_clock: Any) -> None:
    model = Gated()
    async with crowd(model.spec()) as clients:
        await clients.comes("busy", asked(9))
        await clients.comes("good", asked(1))
        await clients.comes("bad", asked(-1))
        leaving = await clients.comes("gone", asked(5))
        await clients.comes("session", asked(-3), "websocket")
        leaving.peer.close()
        await clients.house.still()
        model.go.set()
        await clients.house.still()
        assert model.calls == [[9], [1, -1, -3], [1], [-1], [-3]]
        assert clients.values("good") == [2]
        assert clients.answers["bad"] == (422, {"error": "no negative numbers"})
        assert clients.answers["session"] == (500, {"error": "no negative numbers"})
        assert clients.house.gateway.counts().slots_in_use == 0
        told = (await clients.stats())["inference_stats"]
        assert [told[what]["count"] for what in ("success", "fail", "cancel")] == [2, 3, 1]


@pytest.mark.parametrize("wire", ["http1", "websocket"])
async def test_a_deadline_that_passes_in_the_queue_is_the_answer(wire: str, autojump_clock: Any) -> None:
    model = Gated()
    async with crowd(model.spec()) as clients:
        await clients.comes("busy", asked(9))
        await clients.comes("late", asked(1, parameters={"timeout": 2_000_000}), wire)
        await clients.comes("patient", asked(2, parameters={"timeout": 60_000_000}), wire)
        await trio.sleep(5)
        status, said = clients.answers["late"]
        assert status == (504 if wire == "http1" else 500)
        assert "2 s" in said["error"]
        assert "parameter timeout of the request" in said["error"]
        model.go.set()
        await trio.sleep(1)
        assert model.calls == [[9], [2]]  # and timeouts make no buckets of their own
        assert clients.values("patient") == [4]


async def test_a_drain_lets_the_batch_finish(autojump_clock: Any) -> None:
    model = Gated()
    async with crowd(model.spec()) as clients:
        await clients.comes("a", asked(1))
        await clients.comes("b", asked(2))
        clients.house.gateway.begin_drain()
        await trio.sleep(1)
        model.go.set()
        await clients.house.still()
        assert [clients.values(name) for name in "ab"] == [[2], [4]]


async def test_a_crash_of_the_model_ends_its_batch_and_what_waits_and_it_starts_anew(autojump_clock: Any) -> None:
    model, crash = Gated(), trio.Event()

    @asynccontextmanager
    async def loader() -> AsyncIterator[Any]:
        async def fail() -> None:
            await crash.wait()
            raise ZeroDivisionError

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            yield model
            nursery.cancel_scope.cancel()

    policy = RestartPolicy(backoff=1)
    spec = spec_of(loader, "m", family=Family.TENSOR, max_batch_size=8, batching=Batching(), restart=policy)
    async with crowd(spec) as clients:
        for name in "abc":
            await clients.comes(name, asked(1))
        crash.set()
        await clients.house.still()
        assert {status for status, _ in clients.answers.values()} == {503}
        crash = trio.Event()
        await trio.sleep(2)
        model.go.set()
        await clients.comes("again", asked(4))
        assert clients.values("again") == [8]
        assert model.calls == [[1], [4]]


async def test_a_batch_whose_model_gives_too_few_rows_is_the_models_error(autojump_clock: Any) -> None:
    async def cut(request: InferRequest) -> InferResponse:
        await trio.sleep(1)
        return InferResponse(outputs=(Tensor(name="y", data=request["x"][:1]),))

    async with crowd(spec_of(cut, "m", max_batch_size=8, batching=Batching())) as clients:
        await clients.comes("fits", asked(1))
        for name in "ab":
            await clients.comes(name, asked(2))
        await trio.sleep(5)
        assert clients.values("fits") == [1]
        said = "model 'm' was called with 2 rows, and gave output 'y' with shape [1, 2]: expected 2 rows, one for each (max_batch_size)"
        assert clients.answers["a"] == clients.answers["b"] == (500, {"error": said})


class Leaver(trio.abc.Instrument):
    """Closes a client's connection at the start of the nth step of any task after it has come."""

    def __init__(self, at: int) -> None:
        self.left, self.line = at, cast("Line | None", None)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.line is not None:
            self.left -= 1
            if self.left == 0:
                self.line.peer.close()


@pytest.mark.parametrize("wire", ["http1", "websocket"])
def test_a_client_that_leaves_at_any_step_leaves_nothing_and_is_missed_by_nobody(wire: str) -> None:
    async def story(leaver: Leaver) -> None:
        model = Gated()
        async with crowd(model.spec()) as clients:
            await clients.comes("busy", asked(9))
            trio.lowlevel.add_instrument(leaver)
            leaver.line = await clients.comes("victim", asked(1), wire)
            await clients.comes("bad", asked(-2), "http2")
            await clients.comes("good", asked(3))
            model.go.set()
            await clients.house.still()
            trio.lowlevel.remove_instrument(leaver)
            assert [clients.values(name) for name in ("busy", "good")] == [[18], [6]]
            assert clients.answers["bad"] == (422, {"error": "no negative numbers"})
            if "victim" in clients.answers:
                assert clients.values("victim") == [2]
            assert clients.house.gateway.counts().slots_in_use == 0
            leaver.line.peer.close()

    for at in range(1, 400):
        leaver = Leaver(at)
        trio.run(story, leaver, clock=MockClock(autojump_threshold=0))
        if leaver.left > 0:
            return
    raise AssertionError("the story is longer than that")


# -- how it is said


@declare(max_batch_size=4, batching=Batching(max_delay=0.25, preferred=(4, 2)))
def double(x: Annotated[NDArray[np.float32], Shape(2)]) -> NDArray[np.float32]:
    return x * 2


async def config_of(spec: ModelSpec) -> Any:
    async with serving(spec) as house:
        _, _, body = await house.ask("/v2/models/m/config", None, method=b"GET")
        return json.loads(body)


async def test_the_config_tells_how_requests_are_batched() -> None:
    assert (await config_of(spec_of(double, "m")))["dynamic_batching"] == {
        "preferred_batch_size": [2, 4],
        "max_queue_delay_microseconds": 250_000,
        "priority_levels": 0,
        "default_priority_level": 0,
    }
    levels = await config_of(spec_of(double, "m", batching=Batching(priority_levels=3)))
    assert levels["dynamic_batching"]["default_priority_level"] == 3
    assert "dynamic_batching" not in await config_of(spec_of(double, "m", batching=None))


FACTORY = f"{__name__}:double"
PLAIN = "models.library.tensors:identity"


@pytest.mark.parametrize(
    ("factory", "said", "meant"),
    [
        (FACTORY, {}, Batching(max_delay=0.25, preferred=(4, 2))),
        (FACTORY, {"instances": 2}, Batching(max_delay=0.25, preferred=(4, 2), instances=2)),
        (FACTORY, {"enabled": False}, None),
        (PLAIN, {}, None),
        (PLAIN, {"enabled": True}, Batching()),
        (PLAIN, {"max_delay": 0.5, "retry": False}, Batching(max_delay=0.5, retry=False)),
        (PLAIN, {"enabled": False, "max_delay": 0.5}, None),
    ],
)
def test_the_configuration_says_it_in_the_place_of_the_model(
    factory: str, said: dict[str, Any], meant: Batching | None
) -> None:
    config = ModelConfig(factory=factory, max_batch_size=8, batching=BatchingConfig(**said))
    assert load_spec("m", config).batching == meant


def test_a_file_has_all_of_it(tmp_path: Any) -> None:
    file = tmp_path / "everywire.toml"
    file.write_text(
        f"""
        [models.m]
        factory = "{PLAIN}"
        max_batch_size = 8
        inputs = [{{name = "x", datatype = "FP32", shape = [-1], pad = 0.5}}]
        outputs = [{{name = "y", datatype = "FP32", shape = [-1], like = "x"}}]
        [models.m.batching]
        max_delay = "5ms"
        preferred = [4, 8]
        pad_rows = true
        priority_levels = 2
        """
    )
    set_here = {"models.m.batching.instances": "2", "models.m.batching.preferred": "[2, 8]"}
    spec = load_spec("m", load(file=file, environ={}, overrides=set_here).models["m"])
    assert spec.batching == Batching(max_delay=0.005, preferred=(2, 8), pad_rows=True, priority_levels=2, instances=2)
    assert spec.inputs is not None
    assert spec.outputs is not None
    assert (spec.inputs[0].pad, spec.outputs[0].like) == (0.5, "x")


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("preferred = [0]", r"models.m.batching.preferred must be a list of whole numbers, at least 1, such as \[4, 8\]"),
        ("preferred = 4", "models.m.batching.preferred must be a list"),
        ("instances = 0", "models.m.batching.instances must be a whole number, at least 1"),
        ("preferred = [9]", "model 'm': batching.preferred has 9, above the max_batch_size of 8"),
        ("pad_rows = true", "pad_rows needs preferred"),
    ],
)
def test_what_cannot_be_meant_stops_the_start(said: str, error: str, tmp_path: Any) -> None:
    file = tmp_path / "everywire.toml"
    file.write_text(f'[models.m]\nfactory = "{PLAIN}"\nmax_batch_size = 8\n[models.m.batching]\n{said}')
    with pytest.raises(ConfigError, match=error):
        load_spec("m", load(file=file, environ={}, overrides={}).models["m"])
