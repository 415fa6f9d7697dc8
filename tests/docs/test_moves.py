"""The pages for those who come from another server: both sides of each example run, and the same requests have the same answers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, Block, Reader, blocks, commands, skip_or_fail
from tests.docs.test_numbers import NAMES
from tests.interop.triton import wheel
from tests.ports import free_port

MOVES = [
    "docs/move/djl-tgi.md",
    "docs/move/fastapi.md",
    "docs/move/kserve-mlserver.md",
    "docs/move/litserve.md",
    "docs/move/torchserve-mms.md",
    "docs/move/triton.md",
]
EXAMPLE = "A worked example"
OPTIONAL = {"id", "parameters", "model_version"}
"""Members of a v2 answer that a server may leave out or choose freely."""


def has(module: str) -> Callable[[], bool]:
    return lambda: importlib.util.find_spec(module) is not None


# The packages that an example needs beside this project, by name, with a function that returns True if it is installed.
NEEDS: dict[tuple[str, str], dict[str, Callable[[], bool]]] = {
    ("docs/move/fastapi.md", EXAMPLE): {"fastapi": has("fastapi"), "uvicorn": has("uvicorn")},
    ("docs/move/litserve.md", EXAMPLE): {"litserve": has("litserve")},
    ("docs/move/kserve-mlserver.md", f"{EXAMPLE}: KServe"): {"kserve": has("kserve")},
    ("docs/move/kserve-mlserver.md", f"{EXAMPLE}: MLServer"): {"mlserver": lambda: shutil.which("mlserver") is not None},
    ("docs/move/triton.md", EXAMPLE): {"nvidia-pytriton": lambda: wheel() is not None},
}


def examples() -> list[tuple[str, str]]:
    """Each page with the heading of each of its examples."""
    sections = [(page, block.section) for page in MOVES for block in blocks(page) if block.section.startswith(EXAMPLE)]
    return list(dict.fromkeys(sections))


def section(page: str, name: str) -> list[Block]:
    return [block for block in blocks(page) if block.section == name]


class PatientReader(Reader):
    """A reader who waits until the other server takes connections: some say that they listen before they do."""

    def type(self, command: str, expected: str, line: int) -> None:
        super().type(command, expected, line)
        deadline = time.monotonic() + 30
        while command.endswith(" &"):
            try:
                socket.create_connection(("127.0.0.1", int(self.ports["8000"])), timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, f"line {line}: nothing listens\n{self._beside[-1].output}"
                time.sleep(0.05)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with PatientReader(tmp_path) as reader:
        ports = {f"MLSERVER_{name}_PORT": str(free_port()) for name in ("GRPC", "METRICS")}
        reader.environ = {**reader.environ, **ports, "PYTHONWARNINGS": "ignore"}  # the peers', which they have
        yield reader


def tritonserver(reader: Reader) -> None:
    """Puts the server of nvidia-pytriton's wheel where a reader has `tritonserver`, with the interpreter of these tests and
    ports that are free."""
    files = wheel()
    if files is None:
        return
    programs, backend = reader.folder / "programs", reader.folder / "backends" / "python"
    programs.mkdir()
    shutil.copytree(files / "backends" / "python", backend)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(files / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    libraries = os.pathsep.join([str(files.parents[1] / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR") or ""])
    given = [
        *("--backend-directory", str(backend.parent), "--http-address", "127.0.0.1", "--http-port", reader.ports["8000"]),
        *("--allow-grpc", "false", "--allow-metrics", "false", "--exit-timeout-secs", "5"),
        *("--backend-config", f"python,shm-region-prefix-name=everywire-{os.getpid()}-"),
    ]
    program = programs / "tritonserver"
    program.write_text(
        f"#!/bin/sh\nunset PYTHONPATH\nLD_LIBRARY_PATH={shlex.quote(libraries)} "
        f'exec {shlex.quote(str(files / "bin" / "tritonserver"))} {shlex.join(given)} "$@"\n'
    )
    program.chmod(0o755)
    reader.environ["PATH"] = os.pathsep.join([reader.environ["PATH"], str(programs)])


@pytest.mark.pages
@pytest.mark.parametrize(("page", "name"), examples())
def test_both_sides_answer_the_same_request_alike(page: str, name: str, reader: Reader) -> None:
    skip_or_fail([need for need, is_here in NEEDS.get((page, name), {}).items() if not is_here()])
    tritonserver(reader)
    followed = section(page, name)
    reader.follow(followed)
    there, here = requests(followed, "8000"), requests(followed, "8080")
    assert there or page not in {page for page, _ in NEEDS}, "nobody was asked there"
    for command in there:
        same = [other for other in here if other.replace("8080", "8000") == command]
        assert same, f"not asked here: {command}"
        assert answer(reader, command) == answer(reader, same[0])


BASE_HANDLER = """
class BaseHandler:  # as ts.torch_handler.base_handler has it
    def initialize(self, context):
        self.initialized, self.folder = True, context.system_properties["model_dir"]

    def handle(self, data, context):
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))
"""
DERIVED = """
from handler_of_torchserve import BaseHandler


class Lengths(BaseHandler):
    def preprocess(self, data):
        return [row["body"] for row in data]

    def inference(self, texts):
        return [f"{len(text)} in {self.folder}" for text in texts]

    def postprocess(self, found):
        return found
"""


def test_the_adapter_loads_a_class_that_derives_from_a_base_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "handler_of_torchserve.py").write_text(BASE_HANDLER)
    (tmp_path / "derived_handler.py").write_text(DERIVED)
    monkeypatch.syspath_prepend(tmp_path)
    (adapter,) = [block for block in section("docs/move/torchserve-mms.md", EXAMPLE) if block.file == "here.py"]
    page: dict[str, Any] = {"__name__": "here"}
    exec(adapter.text, page)
    handler = page["Handler"]("derived_handler", model_dir="weights")
    assert handler.answer(b"hello", {"content-type": "text/plain"}) == b"5 in weights"


@pytest.mark.pages
def test_multi_model_server_answers_as_the_adapter_does(reader: Reader) -> None:
    """It needs Java, and Python 3.10 or older, and so is rarely here."""
    server = shutil.which("multi-model-server")
    skip_or_fail([] if server else ["multi-model-server"])
    assert server is not None
    page = section("docs/move/torchserve-mms.md", EXAMPLE)
    (handler,) = [block for block in page if block.file == "service.py"]
    reader.follow(page)
    (reader.folder / "handler").mkdir()
    (reader.folder / "handler" / "service.py").write_text(handler.text)
    addresses = f"inference_address=http://127.0.0.1:8000\nmanagement_address=http://127.0.0.1:{free_port()}\n"
    (reader.folder / "config.properties").write_text(reader.ported(addresses) + "default_workers_per_model=1\n")
    reader.environ["PATH"] = os.pathsep.join([str(Path(server).parent), reader.environ["PATH"]])
    pack = "model-archiver --model-name measure --model-path handler --handler service:handle --runtime python"
    reader.type(f"mkdir store && {pack} --export-path store", "", 0)
    start = "multi-model-server --start --foreground --model-store store --mms-config config.properties"
    reader.type(f"{start} --models measure=measure.mar &", "", 0)
    (asked,) = requests(page, "8080")
    assert answer(reader, asked.replace("8080", "8000")) == answer(reader, asked)


def requests(followed: list[Block], port: str) -> list[str]:
    """The commands that call the server at that port of the page."""
    typed = [command for block in followed if block.language == "console" for command, _ in commands(block.text)]
    return [command for command in typed if f"curl localhost:{port}/" in command]


def answer(reader: Reader, command: str) -> Any:
    done = subprocess.run(
        ["bash", "-c", reader.ported(command)],
        cwd=reader.folder,
        env=reader.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    said = json.loads(done.stdout)
    if not isinstance(said, dict) or "outputs" not in said:
        return said
    outputs = [{k: v for k, v in output.items() if k not in OPTIONAL} for output in said["outputs"]]
    return {k: v for k, v in said.items() if k not in OPTIONAL} | {"outputs": outputs}


@pytest.mark.parametrize("page", MOVES)
def test_the_pages_have_the_same_parts(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [heading.partition(":")[0] for heading in dict.fromkeys(h.partition(":")[0] for h in headings)] == [
        "Concepts", "Configuration", EXAMPLE, "Features that you lose",
    ]  # fmt: skip
    assert 350 < len(text.split()) < 800
    for part in text.split("## ")[1:3]:
        assert re.search(r"^\|.*\| here \|$", part, re.MULTILINE)


@pytest.mark.parametrize("page", [*MOVES, "docs/howto/troubleshoot.md", "docs/tutorial/is-this-for-me.md"])
def test_every_setting_that_is_named_is_one(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    sections = "|".join(sorted({name.partition(".")[0] for name in NAMES} - {"models"}))
    named = re.findall(rf"`((?:{sections})\.[a-z_]+)(?: = [^`]*)?`", text)
    named += [f"models.*.{name}" for name in re.findall(r"`models\.(?:NAME|chat)\.([a-z_.]+)", text)]
    named += [f"models.*.process.{name}" for name in re.findall(r"`process\.([a-z_]+)`", text)]
    tables = {"models.*.restart", "models.*.process", "models.*.options", "repository.process"}
    assert [name for name in named if name not in NAMES and name not in tables] == []


@pytest.mark.parametrize(
    ("page", "pattern", "file"),
    [
        ("docs/move/litserve.md", r"LitServe ([\d.]+\d)", "tests/docs/requirements-moves.txt"),
        ("docs/move/kserve-mlserver.md", r"MLServer ([\d.]+\d)", "tests/docs/requirements-moves-mlserver.txt"),
        ("docs/move/kserve-mlserver.md", r"KServe ([\d.]+\d)", "tests/interop/requirements-kserve.txt"),
    ],
)
def test_a_version_that_a_page_names_is_the_one_that_is_installed_for_it(page: str, pattern: str, file: str) -> None:
    named = re.search(pattern, (ROOT / page).read_text(encoding="utf-8"))
    assert named is not None
    assert re.search(
        rf"^{pattern.partition(' ')[0].lower()}==({re.escape(named[1])})", (ROOT / file).read_text(), re.MULTILINE
    )
