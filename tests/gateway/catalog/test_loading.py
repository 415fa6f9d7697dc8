"""From the configuration to a ModelSpec: which number holds, and a container of another machine as a model."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gateway.catalog.factories import load_spec
from gateway.config import BatchingConfig, ModelConfig, RestartConfig, TensorConfig
from gateway.config.load import load
from gateway.config.problem import ConfigError
from gateway.containers.connection import ContainerLimits, container_limits
from gateway.containers.model import CAPACITY
from models.messages import Family
from models.spec import Model, ModelSpec, Restart, RestartPolicy, TensorSpec, declare

NUMBERS = ("capacity", "queue", "timeout", "load_timeout")


@asynccontextmanager
async def _load() -> AsyncIterator[Model]:
    raise AssertionError("nobody loads it here")
    yield


own = ModelSpec(name="own", family=Family.PARTS, load=_load, capacity=7, queue=8, timeout=9.0, load_timeout=10.0)

patient = replace(own, restart=RestartPolicy(kind=Restart.TRANSIENT, intensity=9, backoff_max=60.0))


def gives(capacity: int = 3) -> Any:
    """A factory of a ModelSpec."""
    return ModelSpec(name="given", family=Family.PARTS, load=_load, capacity=capacity)


async def plain(text: str) -> str:
    return text


def numbers(factory: str, **settings: Any) -> list[float]:
    spec = load_spec("m", ModelConfig(factory=f"{__name__}:{factory}", **settings))
    return [getattr(spec, name) for name in NUMBERS]


def test_what_the_configuration_does_not_set_a_spec_says_itself() -> None:
    assert numbers("own") == [7, 8, 9.0, 10.0]
    assert numbers("gives") == [3, 1000, 0.0, 240.0]
    assert numbers("gives", options={"capacity": 5}) == [5, 1000, 0.0, 240.0]


def test_what_the_configuration_sets_holds_also_where_it_is_the_usual_number() -> None:
    assert numbers("own", capacity=64, timeout=0.0) == [64, 8, 0.0, 10.0]
    assert numbers("own", queue=0, load_timeout=240.0) == [7, 0, 9.0, 240.0]


def test_a_model_that_says_nothing_has_the_numbers_of_the_reference() -> None:
    assert numbers("plain") == [64, 1000, 0.0, 240.0]
    page = (Path(__file__).parents[3] / "docs" / "reference" / "configuration-models.md").read_text()
    rows = {row.split("|")[1].strip(" `"): row for row in page.splitlines() if "| the model's own |" in row}
    batching = {field.name for field in fields(BatchingConfig)}
    others = {"inputs", "outputs", "max_batch_size", "warmup", "queue_timeout", "queue_bytes", "body_bytes"}
    others |= {"party_share", "idle_when_wanted", "subprotocols", "context", "features", "served_names"}
    blocking = {"threads", "step_timeout", "stall_timeout", "stop_within", "stuck_limit"}
    restart = {field.name for field in fields(RestartConfig)}
    assert set(rows) == {*NUMBERS, *others, *blocking, *batching, *restart, "version", "memory", "required"}
    for name, number in zip(NUMBERS, numbers("plain"), strict=True):
        assert f"{number:g}" in rows[name]


def test_when_a_model_is_loaded_again_a_spec_says_itself_where_the_configuration_does_not() -> None:
    policy = load_spec("m", ModelConfig(factory=f"{__name__}:patient")).restart
    assert policy == RestartPolicy(kind=Restart.TRANSIENT, intensity=9, backoff_max=60.0)
    config = RestartConfig(kind="permanent", backoff=7.0)
    policy = load_spec("m", ModelConfig(factory=f"{__name__}:patient", restart=config)).restart
    assert policy == RestartPolicy(kind=Restart.PERMANENT, intensity=9, backoff=7.0, backoff_max=60.0)
    with pytest.raises(ConfigError, match=r"restart\.backoff is 7, more than restart\.backoff_max, 5"):
        load_spec("m", ModelConfig(factory=f"{__name__}:own", restart=config))


def test_all_of_a_spec_is_said_in_a_configuration_or_by_code_alone_for_a_reason() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "models.md").read_text()
    (table,) = re.findall(r"Only code can set\sthese:\n\n(.*?)(?=\n\n)", page, re.DOTALL)
    code = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    configured = {field.name for field in fields(ModelConfig)} - {"factory", "options"}
    configured.remove("process")  # a model's own code cannot choose where it runs
    assert {field.name for field in fields(ModelSpec)} == configured | code | {"name"}
    assert not configured & code


# ---- tensors ----


class Scaler:
    outputs = (TensorSpec(name="OUTPUT0", datatype="FP32"),)
    max_batch_size = 4

    def __init__(self, by: float = 1.0) -> None:
        self.by = by

    def __call__(self, x: npt.NDArray[np.float32]) -> Any:
        return x * self.by


@declare(outputs=[TensorSpec(name="scaled")])
def makes_scaler(by: float = 2.0) -> Scaler:
    return Scaler(by)


@asynccontextmanager
async def loads_scaler(by: float = 2.0) -> AsyncIterator[Scaler]:
    yield Scaler(by)


def shifted(x: npt.NDArray[np.float32], by: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
    return x if by is None else x + by


def all_optional(x: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
    return np.zeros(1, np.float32) if x is None else x


X = (TensorSpec(name="x", datatype="FP32"),)


@pytest.mark.parametrize("options", [{}, {"by": 3.0}])
@pytest.mark.parametrize("factory", ["Scaler", "makes_scaler", "loads_scaler"])
def test_what_a_class_declares_is_in_the_spec_before_anything_is_made(factory: str, options: dict[str, Any]) -> None:
    spec = load_spec("m", ModelConfig(factory=f"{__name__}:{factory}", options=options))
    assert (spec.inputs, spec.max_batch_size) == (X, 4)
    assert [t.name for t in spec.outputs or ()] == ["scaled" if factory == "makes_scaler" else "OUTPUT0"]


def test_the_configuration_declares_over_what_the_code_says() -> None:
    other = (TensorConfig(name="x", datatype="FP64", shape=(2,), labels=("a",)),)
    spec = load_spec("m", ModelConfig(factory=f"{__name__}:Scaler", inputs=other, max_batch_size=0))
    assert spec.inputs == (TensorSpec(name="x", datatype="FP64", shape=(2,), labels=("a",)),)
    assert (spec.outputs, spec.max_batch_size) == (Scaler.outputs, 0)


@pytest.mark.parametrize(
    ("factory", "inputs", "said"),
    [
        ("plain", [TensorConfig(name="x")], "model 'm': a text model has no tensors to declare"),
        ("Scaler", [TensorConfig(name="x", datatype="FLOAT")], "tensor 'x': datatype must be one of BOOL, .* got 'FLOAT'"),
        ("Scaler", [TensorConfig(name="x", shape=(-2,))], r"tensor 'x': a dimension is a size, or -1 for any, got \(-2,\)"),
        ("Scaler", [TensorConfig(name="x")] * 2, "model 'm': two inputs have the name 'x'"),
        ("Scaler", [TensorConfig(name="y")], "inputs: the names must be those that the model's code has, x, got y"),
        ("Scaler", [], "inputs: the names must be those that the model's code has, x, got none"),
    ],
)
def test_tensors_that_cannot_be_are_a_mistake_in_the_configuration(
    factory: str, inputs: list[TensorConfig], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"models\.m: .*:{factory}: {said}"):
        load_spec("m", ModelConfig(factory=f"{__name__}:{factory}", inputs=tuple(inputs)))


def test_the_configuration_may_leave_out_what_is_optional() -> None:
    def names(*tensors: str) -> list[str]:
        told = tuple([TensorConfig(name=name) for name in tensors])
        spec = load_spec("m", ModelConfig(factory=f"{__name__}:shifted", inputs=told))
        return [tensor.name for tensor in spec.inputs or ()]

    assert names("x") == ["x"]
    assert names("by", "x") == ["by", "x"]
    with pytest.raises(ConfigError, match="has, x, by, got by"):
        names("by")


def test_a_function_whose_arrays_all_have_defaults_is_told_that_it_was_taken_for_a_factory() -> None:
    with pytest.raises(ConfigError, match="it was called to make a model, for it needs no argument: array"):
        load_spec("m", ModelConfig(factory=f"{__name__}:all_optional"))


# ---- a container ----


def container(file: Path, options: str, more: str = "") -> ModelSpec:
    file.write_text(f'[models.remote]\nfactory = "gateway.containers.model:container"\noptions = {options}\n{more}')
    return load_spec("remote", load(file=file, environ={}, overrides={}).models["remote"])


def test_a_container_keeps_its_eight_minutes_and_its_sessions_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    spec = container(tmp_path / "a.toml", '{ url = "ws://127.0.0.1:8081/x" }')
    assert (spec.name, spec.family, spec.accepts, spec.platform) == ("remote", Family.PARTS, True, "container")
    assert (spec.capacity, spec.load_timeout) == (CAPACITY, 480.0)
    told = container(tmp_path / "b.toml", '{ url = "ws://a", healthy_within = "1min" }', "capacity = 4\nload_timeout = 240")
    assert (told.capacity, told.load_timeout) == (4, 240.0)
    assert container(tmp_path / "c.toml", '{ url = "ws://a", healthy_within = "1min" }').load_timeout == 60.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('{ url = "chat" }', "container URL: expected ws://host:port, or wss, http or https, got 'chat'"),
        ("{ url = 1 }", "url, ca and models must be strings"),
        ('{ url = "ws://a", urk = 1 }', "'urk' is not a limit of a container; there are: part, read_ahead"),
        ('{ url = "ws://a", ca = "ca.pem" }', "a CA is for wss:// and https://: this container is called without TLS"),
        ('{ url = "wss://a", ca = "/none.pem" }', "/none.pem cannot be used as a CA"),
        (
            '{ url = "ws://a", connect_timeout = "soon" }',
            "connect_timeout must be a duration, such as 500ms or 30, not 'soon'",
        ),
        ("{ }", "missing a required argument: 'url'"),
    ],
)
def test_a_wrong_option_of_a_container_is_one_line_that_names_the_model(tmp_path: Path, options: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        container(tmp_path / "a.toml", options)
    assert str(raised.value).startswith(f"models.remote: gateway.containers.model:container: {message}")


def test_limits_are_numbers_or_text_with_a_unit() -> None:
    given = {
        "part": "64 KiB",
        "pings_unanswered": "3",
        "connect_timeout": "250ms",
        "health_timeout": 1,
        "half_close_quiet": 0,
    }
    assert container_limits(given) == ContainerLimits(
        part=65536, pings_unanswered=3, connect_timeout=0.25, health_timeout=1.0, half_close_quiet=0.0
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("part", 0), ("part", 1.5), ("part", -1), ("part", "many"), ("part", True), ("part", None), ("unsent", -1),
        ("connect_timeout", 0), ("connect_timeout", -1), ("connect_timeout", float("inf")), ("connect_timeout", "nan"),
        ("ping_interval", -0.1), ("ping_interval", []), ("connect_timeout", 10**400),
    ],
)  # fmt: skip
def test_a_limit_that_is_none_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be a"):
        container_limits({name: value})


def needs(path: str, other: int = 3, *, a_long_name: bool = False) -> ModelSpec:
    return own


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {},
            "missing a required argument: 'path'. Give --set models.m.options.path=VALUE, or in a file below [models.m]: "
            "options = {path = VALUE}. Other options: other, a_long_name",
        ),
        ({"path": "x", "pth": 1}, "got an unexpected keyword argument 'pth'. Its options: path, other, a_long_name"),
    ],
)
def test_a_missing_option_is_named_with_the_way_to_give_it(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_spec("m", ModelConfig(factory=f"{__name__}:needs", options=options))
    assert str(raised.value) == f"models.m: {__name__}:needs: {said}"


def test_no_option_is_cut_from_the_message_about_a_model_of_the_library() -> None:
    with pytest.raises(ConfigError, match=r"--set models\.m\.options\.path=VALUE.*, prefill_chunk, trust_remote_code$"):
        load_spec("m", ModelConfig(factory="models.backends.transformers:load"))
