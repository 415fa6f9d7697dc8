"""`served_names` of a configuration: what they may be, what they replace, and that no two models have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.catalog.factories import load_spec
from gateway.config import Config, ModelConfig
from gateway.config.load import load
from gateway.config.problem import ConfigError
from models.adapt import spec_of
from models.messages import Prompt
from tests.gateway.config.test_settings import problems


async def says(prompt: Prompt) -> str:
    return "x"


named = spec_of(says, "named", served_names=("from/code",))


def served(names: tuple[str, ...] | None) -> tuple[str, ...]:
    return load_spec("m", ModelConfig(factory=f"{__name__}:named", served_names=names)).served_names


def test_the_configuration_replaces_the_names_of_the_code() -> None:
    assert served(None) == ("from/code",)
    assert served(()) == ()
    assert served(("org/set:1", "b")) == ("org/set:1", "b")


def configured(**models: Any) -> Config:
    text = "".join(f"[models.{name}]\nfactory = 'echo'\nserved_names = {names}\n" for name, names in models.items())
    file = Path("everywire.toml")
    file.write_text(text)
    return load(file=file, environ={}, overrides={})


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_are_any_printable_text() -> None:
    names = ("org/llama-3.1:8b", "a b", "ünï", "x" * 256)
    assert configured(m=[*names]).models["m"].served_names == names


@pytest.mark.parametrize("bad", ["''", "'a', 3", "'" + "x" * 257 + "'", '"a\\nb"', '"\\u007f"', '"\\u0085"'])
def test_other_texts_are_refused_by_the_name_of_the_setting(bad: str) -> None:
    with pytest.raises(
        ConfigError, match=r"models\.m\.served_names must be a list of names, such as .* printable characters"
    ):
        configured(m=f"[{bad}]")


@pytest.mark.parametrize("bad", ["\u200b", "\u2028", "\u00a0", "\ud800", "\ue000"])
def test_a_text_that_shows_nothing_is_refused_too(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"models\.m: .*: served_names: each is 1 to 256 printable characters"):
        served((f"a{bad}",))


def test_two_models_of_one_name_are_told_with_their_places(directory: Path) -> None:
    found = problems(
        "[models.a]\nfactory = 'lm'\nserved_names = ['x', 'a']\n"
        "[models.b]\nfactory = 'lm'\nserved_names = ['y', 'x']\n"
        "[models.c]\nfactory = 'lm'\nserved_names = ['a']\n"
    )
    assert [(one.where, one.key, one.got) for one in found] == [
        ("everywire.toml:6", "models.b.served_names", "x"),
        ("everywire.toml:9", "models.c.served_names", "a"),
    ]
    assert "models.a.served_names" in found[0].text
    assert "models.b.served_names" in found[0].text
    assert "models.c.served_names" in found[1].text
    assert "the name of another model, models.a" in found[1].text
