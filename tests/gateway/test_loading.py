"""From the configuration to a ModelSpec: which number holds, and a container of another machine as a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.bridge import CAPACITY
from gateway.config import ModelConfig
from gateway.container_client import ContainerLimits, container_limits
from gateway.loading import load_spec
from gateway.settings import ConfigError, load
from models.messages import Family
from models.spec import Model, ModelSpec

NUMBERS = ("capacity", "queue", "timeout", "load_timeout")


@asynccontextmanager
async def _load() -> AsyncIterator[Model]:
    raise AssertionError("nobody loads it here")
    yield


own = ModelSpec(name="own", family=Family.PARTS, load=_load, capacity=7, queue=8, timeout=9.0, load_timeout=10.0)


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
    page = (Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").read_text()
    rows = {row.split("|")[1].strip(" `"): row for row in page.splitlines() if "| the model's own |" in row}
    assert list(rows) == list(NUMBERS)
    for name, number in zip(NUMBERS, numbers("plain"), strict=True):
        assert f"{number:g}" in rows[name]


# ---- a container ----


def container(file: Path, options: str, more: str = "") -> ModelSpec:
    file.write_text(f'[models.remote]\nfactory = "gateway.bridge:container"\noptions = {options}\n{more}')
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
        ('{ url = "ws://a", urk = 1 }', "'urk' is no limit of a container; there are: part, read_ahead"),
        ('{ url = "ws://a", ca = "ca.pem" }', "a CA is for wss:// and https://: this container is called in clear"),
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
    assert str(raised.value).startswith(f"models.remote: gateway.bridge:container: {message}")


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
