"""The plugin in a pytest of its own: alone, and beside another that takes every async test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.programs

STORY = """
import pytest, trio

async def tell(prompt: str):
    for word in prompt.split():
        yield word + " "
        await trio.sleep(30)

async def test_it_tells(serve, clock):
    async with serve(tell) as served:
        assert (await served.client().lmi("one two", stream=True, max_new_tokens=9)).messages == ["one ", "two "]
        assert trio.current_time() == clock.current_time() >= 60

class TestOfAClass:
    def setup_method(self):
        self.word = "hello "

    @pytest.mark.gateway
    async def test_has_its_instance(self, tmp_path):
        await trio.sleep(1)
        assert (self.word, tmp_path.is_dir()) == ("hello ", True)

ran = []

@pytest.mark.gateway(seeds=[3, 5])
@pytest.mark.parametrize("case", ["a", "b"])
async def test_chance_is_the_seeds(case, seed):
    order = []
    async def one(i):
        await trio.sleep(1)
        order.append(i)
    async with trio.open_nursery() as nursery:
        for i in range(20):
            nursery.start_soon(one, i)
    ran.append((case, seed, order))

def test_of_both_cases_and_seeds():
    assert sorted((case, seed) for case, seed, _ in ran) == [("a", 3), ("a", 5), ("b", 3), ("b", 5)]
    orders = {(case, seed): order for case, seed, order in ran}
    assert orders["a", 3] == orders["b", 3] != orders["a", 5]
"""

SCRIPTED = """
import json, threading, urllib.request
import pytest

used = []

def ask(model, text):
    body = {"model": model.name, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(model.base_url + "/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def test_two_servers(scripted_model):
    used.append(scripted_model(["one"]))
    used.append(scripted_model())
    assert ask(used[0], "two") == "one"
    assert "two" in ask(used[1], "two")
    assert [len(model.prompts) for model in used] == [1, 1]

def test_they_are_gone():
    for model in used:
        with pytest.raises(OSError):
            ask(model, "two")
    assert not [thread for thread in threading.enumerate() if "loopback" in thread.name]

@pytest.mark.gateway
async def test_beside_a_gateway_in_memory(scripted_model, serve):
    assert ask(scripted_model(["three"]), "x") == "three"

def test_a_bad_turn(scripted_model):
    with pytest.raises(TypeError, match="turn 1: expected str"):
        scripted_model([7])
"""

FAILING = """
import pytest, trio

async def tell(prompt: str):
    yield prompt

@pytest.mark.gateway(seeds=4)
@pytest.mark.parametrize("word", ["left", "right"])
async def test_of_luck(serve, seed, word):
    async with serve(tell) as served:
        assert (await served.client("http2").lmi(word)).text == word
        assert (seed, word) != (2, "left"), "no luck"

@pytest.mark.gateway(timeout=60)
async def test_that_waits():
    await trio.sleep_forever()

async def test_that_leaves_something(serve):
    async with serve(tell) as served:
        assert served.gateway.budget.try_reserve(7)
"""


def run(folder: Path, *arguments: str, story: str, settings: str = "") -> tuple[int, str]:
    """Runs pytest with the plugin installed as the wheel installs it. Returns its exit status and output."""
    (folder / "pyproject.toml").write_text(f'[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n{settings}\n')
    (folder / "test_story.py").write_text(story)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    site = folder / "site" / "everywire-0.dist-info"
    site.mkdir(parents=True, exist_ok=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: everywire\nVersion: 0\n")
    (site / "entry_points.txt").write_text("[pytest11]\n" + "".join(f"{n} = {at}\n" for n, at in points.items()))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments], cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{folder / 'site'}", "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_it_needs_no_other_plugin(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-p", "no:trio", "-p", "no:anyio", story=STORY)
    assert (code, "7 passed" in said) == (0, True), said


def test_beside_pytest_trio_each_has_its_own_tests(tmp_path: Path) -> None:
    pytest.importorskip("pytest_trio")
    theirs = "\nasync def test_of_theirs(nursery, autojump_clock):\n    await trio.sleep(99)\n"
    code, said = run(tmp_path, story=STORY + theirs, settings="trio_mode = true")
    assert (code, "8 passed" in said) == (0, True), said


def test_a_scripted_model_is_served_for_a_test_of_any_kind(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-p", "no:trio", story=SCRIPTED)
    assert (code, "4 passed" in said) == (0, True), said


def test_async_tests_of_nobody_are_left_alone(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-p", "no:trio", "-p", "no:anyio", story="async def test_of_nobody():\n    pass\n")
    assert code == 1
    assert "async def functions are not natively supported" in said


def test_a_failure_tells_how_to_see_it_again(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-p", "no:trio", story=FAILING)
    assert (code, "3 failed, 7 passed" in said) == (1, True), said
    assert "AssertionError: no luck" in said
    assert "ExceptionGroup" not in said
    assert "the test was not over after 60 s of its clock" in said
    assert "after the last client left there are 7 bytes of the budget" in said
    (again,) = re.findall(r"to see it again: pytest (.*of_luck.*)", said)
    assert again == "'test_story.py::test_of_luck[left]' --gateway-seed 2"
    _, once_more = run(tmp_path, "-p", "no:trio", "test_story.py::test_of_luck", "--gateway-seed", "2", story=FAILING)
    assert "1 failed, 1 passed" in once_more
    _, more = run(tmp_path, "-p", "no:trio", "-k", "of_luck", "--gateway-seeds", "2", story=FAILING)
    assert "4 passed" in more
    code, refused = run(tmp_path, "-p", "no:trio", "--gateway-seeds", "0", story=FAILING)
    assert (code, "--gateway-seeds takes a number above 0, not 0" in refused) == (4, True), refused
