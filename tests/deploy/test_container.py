"""The image's Dockerfile, and its command run as SageMaker runs it. No image is built here."""

import ctypes.util
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gateway.config.environment import MODEL_FOLDER
from tests.deploy import read_only
from tests.deploy.platforms import ROOT, Container, Image, in_force
from tests.docs.pages import skip_or_fail
from tests.ports import free_port

IMAGE_FILE = ROOT / "deploy" / "Dockerfile"
IMAGE = Image(IMAGE_FILE)
KILLED_AFTER = 30
"""Seconds from SageMaker's SIGTERM to its SIGKILL."""

# streams one word, and the other when it is told to
CODE = """
import os
from collections.abc import Iterator

from models.messages import Prompt


def model(prompt: Prompt) -> Iterator[str]:
    yield prompt.text.upper()
    with open(os.environ["GO"]) as go:
        yield go.readline()
"""


def test_it_says_what_it_can_to_sagemaker() -> None:
    capability = "com.amazonaws.sagemaker.capabilities"
    assert IMAGE.labels == {f"{capability}.bidirectional-streaming": "true", f"{capability}.accept-bind-to-port": "true"}


def test_it_is_small_and_nobody_is_root_in_it() -> None:
    assert IMAGE.base == "python:3.12-slim"
    words = [word for word, _ in IMAGE.instructions]
    user, _, group = IMAGE.one("USER").partition(":")
    assert int(user) > 0 < int(group), "a number: Kubernetes cannot look into the image for a name"
    assert "RUN" not in words[words.index("USER") :], "what is installed belongs to root"


def test_its_allocator_is_installed_and_named_once() -> None:
    assert IMAGE.environ.keys() == {"LD_PRELOAD", "PYTHONMALLOC", "MALLOC_CONF"}
    library = IMAGE.environ["LD_PRELOAD"]
    assert "/" not in library, "the folder has the architecture's name"
    (install,) = [rest for rest in IMAGE.all("RUN") if "apt-get install" in rest]
    assert f" {library.partition('.')[0]}{library.rpartition('.')[2]} " in install
    assert IMAGE_FILE.read_text(encoding="utf-8").count(library) == 1


@pytest.mark.programs
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another")
def test_its_allocator_takes_all_of_pythons_memory_and_its_options(tmp_path: Path) -> None:
    library = IMAGE.environ["LD_PRELOAD"]
    if ctypes.util.find_library(library.partition(".")[0].removeprefix("lib")) != library:
        pytest.skip(f"not here: {library}")
    # CPython counts blocks of its own arenas alone.
    asked = (
        "import ctypes, json, sys, time; n, v = ctypes.c_size_t(1), ctypes.c_bool(); "
        "ctypes.CDLL(None).mallctl(b'opt.background_thread', ctypes.byref(v), ctypes.byref(n), None, 0); "
        "print(json.dumps({'event': 'asked', 'blocks': sys.getallocatedblocks(), 'thread': v.value}))"
    )
    with Container(["python", "-c", asked], tmp_path, IMAGE.environ, port=0) as container:
        told = container.await_event("asked")
        assert (told["blocks"], told["thread"]) == (0, True)
        assert container.ended() == 0


def test_signals_reach_the_gateway_and_not_a_shell() -> None:
    assert IMAGE.one("STOPSIGNAL") == "SIGTERM"
    assert IMAGE.command() == IMAGE.command(["serve"]) == ["python", "-m", "gateway", "serve"]
    assert not IMAGE.all("SHELL")


@pytest.mark.programs
def test_it_listens_where_the_platforms_call_and_ends_before_it_is_killed() -> None:
    assert any(f"mkdir -p {MODEL_FOLDER} " in rest for rest in IMAGE.all("RUN"))
    assert not [name for name in IMAGE.environ if name.startswith("EVERYWIRE_")], "it would override a file of the operator"
    # This variable stands for a platform, as that folder does.
    chosen = in_force(IMAGE.command()[:-1], {"SAGEMAKER_BIND_TO_PORT": IMAGE.one("EXPOSE")})
    assert chosen["listen"]["host"] == "0.0.0.0"
    assert chosen["listen"]["port"] == int(IMAGE.one("EXPOSE")) == 8080
    assert seconds(chosen["drain"]["delay"]) + seconds(chosen["drain"]["timeout"]) < KILLED_AFTER


def seconds(duration: str | float) -> float:
    return float(str(duration).removesuffix("s"))


def test_the_build_sees_what_the_wheel_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    target = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    licences = [file for file in project["project"]["license-files"] if "/" not in file]
    needed = {"pyproject.toml", project["project"]["readme"], *licences, *target["packages"]}
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines.index("*") < min(i for i, line in enumerate(lines) if line.startswith("!"))
    assert lets_in() == needed
    assert "deploy" not in target["packages"]


@pytest.mark.programs
def test_the_steps_of_its_build_make_an_image_that_serves_without_the_checkout(tmp_path: Path) -> None:
    """As far as no engine is needed: the steps that run in each stage, and the command in a root that has the outcome alone."""
    skip_or_fail([name for name in ("hatchling", "pip") if importlib.util.find_spec(name) is None])
    if why := read_only.lacking():
        pytest.skip(f"not here: {why}")
    source, dist, installed, root = (tmp_path / name for name in ("src", "dist", "installed", "root"))
    for folder in (source, installed, root):
        folder.mkdir()
    for name in lets_in():
        where = ROOT / name
        if where.is_dir():
            shutil.copytree(where, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(where, source)
    text = IMAGE_FILE.read_text(encoding="utf-8").replace("\\\n", " ")
    build, install = re.findall(r"^RUN (?:--mount=\S+ )?(pip .*)$", text, re.MULTILINE)
    # Nothing is downloaded: the index's packages are installed here already.
    places = {"/src": str(source), "/dist": str(dist)}
    for step, here in ((build, "--no-build-isolation"), (install, f"--no-deps --target {installed}")):
        words = [f"{places.get(word, word)}" for word in shlex.split(step.replace("/dist/*.whl", f"$(echo {dist}/*.whl)"))]
        command = " ".join([f'"{sys.executable}" -m', *words, here])
        subprocess.run(["sh", "-ec", command], check=True, capture_output=True, timeout=300)
    within = read_only.read_only(root, "64m", {"/opt/installed": installed}, checkout=False)
    asked = 'import json, gateway; print(json.dumps({"event": "imported", "file": gateway.__file__}))'
    environ = {"PYTHONPATH": "/opt/installed", "PYTHONDONTWRITEBYTECODE": "1"}
    with Container(["python", "-c", asked], tmp_path, environ, port=0, within=within) as container:
        assert container.await_event("imported")["file"] == "/opt/installed/gateway/__init__.py"
        assert container.ended() == 0
    port = free_port()
    environ |= {"SAGEMAKER_BIND_TO_PORT": str(port), "EVERYWIRE_LISTEN__HOST": "127.0.0.1"}
    with Container(IMAGE.command(["serve"]), tmp_path, environ, port=port, within=within) as container:
        container.await_event("serving")
        assert container.ask("GET", "/ping")[0] == 200
        container.terminate()
        assert container.ended() == 0


def lets_in() -> set[str]:
    """The paths that Dockerfile.dockerignore lets into the build."""
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    return {line[1:] for line in lines if line.startswith("!")}


@pytest.mark.programs
def test_a_container_of_sagemaker_answers_and_finishes_what_it_has_begun(tmp_path: Path) -> None:
    folder, work, go = tmp_path / "model", tmp_path / "work", tmp_path / "go"
    folder.mkdir()
    work.mkdir()
    os.mkfifo(go)
    (folder / "model.py").write_text(CODE)
    port = free_port()
    environ = {
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "EVERYWIRE_LISTEN__HOST": "127.0.0.1",
        "GO": str(go),
        # in the place of /opt/ml/model
        **{f"EVERYWIRE_REPOSITORY__{key}": str(folder) for key in ("ROOTS", "CODE", "MODEL")},
    }
    with open(go, "r+b", buffering=0) as told, Container(IMAGE.command(["serve"]), work, environ, port=port) as container:
        serving = container.await_event("serving")
        assert (serving["at"], serving["models"]) == ([f"http://127.0.0.1:{port}"], ["model"])
        status, health = container.ask("GET", "/ping")
        assert (status, json.loads(health)) == (200, {"model": {"status": "Healthy"}})

        caller = container.connect()
        caller.request("POST", "/invocations", json.dumps({"inputs": "one ", "stream": True}))
        answer = caller.getresponse()
        assert answer.status == 200
        text = json.loads(answer.readline())["token"]["text"]
        container.terminate()
        assert container.await_event("draining")["live"] == 1
        told.write(b"two\n")
        tokens = [json.loads(line) for line in answer.read().splitlines()]
        text += "".join(line["token"]["text"] for line in tokens)
        assert (text, tokens[-1]["generated_text"]) == ("ONE two\n", "ONE two\n")
        caller.close()
        report = container.await_event("drain report")
        assert (report["finished"], report["cut"], report["clean"]) == (1, [], True)
        assert container.ended() == 0


@pytest.mark.programs
def test_without_a_model_it_says_so_and_ends(tmp_path: Path) -> None:
    environ = {f"EVERYWIRE_REPOSITORY__{key}": str(tmp_path) for key in ("ROOTS", "MODEL")}
    with Container(IMAGE.command(["serve"]), tmp_path, environ, port=0) as container:
        with pytest.raises(AssertionError, match=r"holds neither model\.toml nor model\.py"):
            container.await_event("serving")
        assert container.ended() == 2
