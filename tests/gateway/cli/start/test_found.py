"""The models of a file: what it defines and can be served, found without calling anything of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.cli.start.found import models_of, one_model_of
from gateway.config.problem import ConfigError

EVERY_SHAPE = """
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import trio

from models.adapt import spec_of
from models.library.echo import Echo
from models.messages import Prompt, Token
from models.session import Session


class Chat:
    async def __call__(self, prompt: Prompt) -> AsyncIterator[str]:
        yield "x"


class Alone:
    async def __call__(self, prompt: Prompt) -> AsyncIterator[str]:
        yield "x"


class Needs:
    def __init__(self, path: str) -> None: ...

    async def __call__(self, prompt: Prompt) -> AsyncIterator[str]:
        yield "x"


@dataclasses.dataclass
class Data:
    x: int = 3


chat = Chat()
_hidden = Chat()


async def shout(prompt: str) -> AsyncIterator[str]:
    yield prompt


def scale(x: np.ndarray) -> np.ndarray:
    return x * 2


def main():
    raise SystemExit("it was called")


def make() -> Alone:
    raise SystemExit("it was called")


def helper(x, y):
    return 1


async def duplex(session: Session[Prompt, Token]) -> None: ...


@asynccontextmanager
async def load(size: int = 8) -> AsyncIterator[Callable[[Session[Prompt, Token]], Awaitable[None]]]:
    yield duplex


named = spec_of(shout, "named")
NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Makes a file of the working directory, of a name that no other test has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)

    def make(code: str, name: str = "found_here.py") -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
        return name

    yield make
    for name in set(sys.modules) - before:
        if name.startswith("found_"):
            del sys.modules[name]


def message_of(file: str) -> str:
    with pytest.raises(ConfigError) as caught:
        one_model_of(file)
    return str(caught.value)


def test_each_shape_of_a_model_is_found_and_nothing_else(file: Callable[[str], str]) -> None:
    names = ["Alone", "chat", "shout", "scale", "make", "duplex", "load", "named"]
    assert models_of(file(EVERY_SHAPE)) == [f"found_here:{name}" for name in names]


def test_one_model_is_named_as_it_is_and_of_two_one_must_be(file: Callable[[str], str]) -> None:
    one = "def chat(prompt: str) -> str: ...\n"
    assert one_model_of(file(one)) == "found_here:chat"
    assert one_model_of(file(one, "found_folder/found_in.py")) == "found_folder.found_in:chat"
    two = file(one + "def scale(prompt: str) -> str: ...\n", "found_two.py")
    assert message_of(two) == "found_two.py has two models: chat, scale. Name one: --model found_two:chat"


def test_a_file_without_a_model_says_what_is_missing(file: Callable[[str], str]) -> None:
    said = message_of(file("def chat(prompt): ...", "found_bare.py"))
    assert said.startswith("found_bare.py has no model: chat: annotate 'prompt' with Prompt, str, ")
    said = message_of(file("x = 1", "found_none.py"))
    assert (
        said
        == "found_none.py has no model: it defines no function whose first parameter is annotated, such as prompt: Prompt"
    )


def test_a_file_that_cannot_be_imported_says_why(file: Callable[[str], str], tmp_path: Path) -> None:
    assert message_of("found_no.py") == "found_no.py: no such file"
    assert message_of(file("x = (", "found_half.py")).startswith("found_half.py: cannot import 'found_half': SyntaxError: ")
    assert "ZeroDivisionError" in message_of(file("1 / 0", "found_raises.py"))
    assert (
        message_of(file("", "found-dash.py"))
        == "found-dash.py: 'found-dash' cannot be the name of a Python module: rename it"
    )
    assert "Python has another module called 'json'" in message_of(file("", "json.py"))
    assert message_of(__file__) == f"{__file__} is not below {tmp_path}: start in its folder"
