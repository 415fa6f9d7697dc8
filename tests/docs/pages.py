"""Reads a page as a user does: writes its files, types its commands, starts its servers, and compares what comes back."""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"# ([\w./-]+\.(?:py|toml|ini|pbtxt))\n")
# a program of ours serves until it is stopped; of the gateway's own commands only these do not
_SERVER = re.compile(
    r"(?:python -m gateway|^(?:\w+=\S+ )*everywire) (?!(?:.* )?(?:demo|config|models|simulate|call|keys|new|plan|top) )"
)
# The words that servers print when they listen: everywire, uvicorn, Triton, multi-model-server.
_READY = re.compile("serving(?! the library)|listening|Uvicorn running|Started HTTPService|Model server started")
_PATIENCE = 120
# The names of the programs that pages need, by the command that pages type.
_PROGRAMS = {"curl": "curl", "aws": "aws-cli", "openssl": "openssl", "grpcurl": "grpcurl"}


# Pages that a test of their own follows. Every other page that has files or commands is a story: `test_stories.py`.
FOLLOWED = {
    "README.md": "tests/docs/test_readme.py",
    "docs/tutorial/first-model.md": "tests/docs/test_tutorial.py",
    "docs/tutorial/test-your-model.md": "tests/docs/test_stories.py",
    "docs/howto/clients.md": "tests/docs/test_clients.py",
    "docs/howto/clients-aws.md": "tests/docs/test_clients.py",
    "docs/howto/clients-tensors.md": "tests/docs/test_clients.py",
    "docs/howto/clients-text.md": "tests/docs/test_clients.py",
    "docs/howto/deploy.md": "tests/deploy/test_manifests.py",
    "docs/howto/sagemaker.md": "tests/docs/test_sagemaker.py",
    "docs/howto/sagemaker-container.md": "tests/docs/test_sagemaker.py",
    "docs/move/djl-tgi.md": "tests/docs/test_moves.py",
    "docs/move/fastapi.md": "tests/docs/test_moves.py",
    "docs/move/kserve-mlserver.md": "tests/docs/test_moves.py",
    "docs/move/litserve.md": "tests/docs/test_moves.py",
    "docs/move/torchserve-mms.md": "tests/docs/test_moves.py",
    "docs/move/triton.md": "tests/docs/test_moves.py",
}
# for who changes the project: nobody types what they say without a checkout
OF_THE_PROJECT = ["CHANGELOG.md", "CONTRIBUTING.md"]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block: its language, its text, the heading above it and, from a comment right above it, the reason why it
    is not run: `<!-- not run: a figure -->`."""

    language: str
    text: str
    line: int
    section: str
    unrun: str = ""

    @property
    def file(self) -> str:
        """The name that its first line gives it, empty if none."""
        named = _NAMED.match(self.text)
        return named[1] if named else ""


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, which is named as from the root of the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        headings = re.findall(r"^##? (.*)$", _FENCE.sub("", text[: fence.start()]), re.MULTILINE)
        line = text.count("\n", 0, fence.start(2)) + 1
        said = re.search(r"<!-- not run: (.+) -->\n\Z", text[: fence.start()])
        found.append(Block(language=fence[1], text=fence[2], line=line, section=headings[-1], unrun=said[1] if said else ""))
    return found


def stories() -> list[str]:
    """The pages that are followed from their beginning to their end, each as one story."""
    return [page for page in PAGES if page not in FOLLOWED and any(map(is_followed, blocks(page)))]


def is_followed(block: Block) -> bool:
    """True if a reader acts on this block: writes a file, types a command or reads a log."""
    return not block.unrun and bool(block.file or block.language in ("console", "log"))


def words(page: str) -> int:
    """The words of a page outside its fenced blocks, with those of its tables; marks such as `|` and `-` are no words."""
    return len(re.findall(r"\S*\w\S*", _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))))


def namespace_of(page: str) -> dict[str, Any]:
    """All unnamed Python of the page in one namespace, compiled such that a traceback names the page's line."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.language == "python" and not block.file and not block.unrun:
            exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec"), namespace)
    return namespace


def code_lines(program: str) -> list[str]:
    """The lines of a program that are neither blank nor a comment alone."""
    return [line for line in program.splitlines() if line.strip() and not line.strip().startswith("#")]


def commands(session: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block with the output that the page shows below it. A command goes on where a quote is
    open or its line ends with a backslash."""
    command, output = "", ""
    for line in session.splitlines():
        if command and (command.count("'") % 2 or command.endswith("\\")):
            command += "\n" + line
        elif line.startswith("$ ") or line == "^C":
            if command:
                yield command, output
            command, output = line.removeprefix("$ "), ""
        else:
            assert command, f"output without a command: {line}"
            output += line + "\n"
    if command:
        yield command, output


def lacking(section: list[Block]) -> list[str]:
    """The programs and modules that these blocks need and that are not here."""
    section = [block for block in section if not block.unrun]
    typed = "\n".join(c for b in section if b.language == "console" for c, _ in commands(b.text))
    modules = {m for b in section if b.language == "python" for m in re.findall(r"^(?:from|import) (\w+)", b.text, re.M)}
    if "tritonclient.grpc" in "".join(block.text for block in section):
        modules.add("grpc")  # without which that part of it cannot be imported
    own = {Path(b.file).stem for b in section}
    missing = [m for m in sorted(modules - own) if importlib.util.find_spec(m) is None]
    there = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for program, name in _PROGRAMS.items():
        if re.search(rf"(?:^|\s){program} ", typed) and shutil.which(program, path=there) is None:
            missing.append(name)
    return missing


def skip_or_fail(missing: list[str]) -> None:
    """Skips, naming what is missing; fails where the environment was made for it."""
    required = os.environ.get("EVERYWIRE_REQUIRE", "").split(",")
    for name in missing:
        if name in required or (name.startswith("aws_sdk") and "aws-sdk" in required):
            pytest.fail(f"{name} is required here and is not installed")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


class Reader:
    """Follows pages in a directory of its own, which is the home directory too.

    The ports of the pages, 8000, 8080, 8090, 8443 and 9090, stand for some that are free. A server runs until the next one is started,
    a line `^C` stops it, or the reader leaves; then it must have ended as a server does. One that is started with a `&` at
    the end of its line runs beside the others until the reader leaves.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {page: str(free_port()) for page in ("8000", "8080", "8090", "8443", "9090")}
        self.server: _Server | None = None
        self._beside: list[_Server] = []
        (folder / ".curlrc").write_text("silent\nshow-error\nmax-time = 120\n")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("EVERYWIRE_", "XDG_", "COV_"))}
        paths = [str(Path(sys.executable).parent), inherited.get("PATH", "")]
        self.environ = inherited | {
            "HOME": str(folder),
            "PATH": os.pathsep.join(paths),
            "PYTHONPATH": str(ROOT),
            "PYTEST_PLUGINS": "gateway.testing.pytest_plugin",  # as it is where the wheel is installed
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "EVERYWIRE_LISTEN__PORT": self.ports["8080"],
            "EVERYWIRE_LISTEN__TLS_PORT": self.ports["8443"],
        }

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        servers = [*self._beside, *([] if self.server is None else [self.server])]
        ended = [(server.stop(signal.SIGTERM), server.output) for server in reversed(servers)]
        if kind is None:
            for code, output in ended:
                assert code in (0, -signal.SIGTERM), f"the server ended with {code}:\n{output}"

    def follow(self, followed: list[Block]) -> None:
        """Does what the blocks say, in order. AssertionError, with the line of the page, where something else happens."""
        for block in followed:
            if block.unrun:
                continue
            if block.file:
                file = self.folder / block.file
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(self.ported(block.text))
            elif block.language == "console":
                for command, output in commands(block.text):
                    self.type(command, output, block.line)
            elif block.language == "log":
                assert self.server is not None, f"line {block.line}: no server has a log"
                self.server.await_lines(block.text, self)
            else:
                assert block.language != "python", f"line {block.line}: Python code needs a name, such as # app.py"

    def type(self, command: str, expected: str, line: int) -> None:
        """Runs one command and compares its output."""
        if command == "^C":
            assert self.server is not None
            code = self.server.stop(signal.SIGINT)
            assert code == 0, f"line {line}: the server ended with {code}"
            self.server.await_lines(expected, self)
            self.server = None
        elif command.endswith(" &"):
            self._beside.append(_Server(self, self.ported(command.removesuffix(" &"))))
            self._beside[-1].await_lines(expected, self)
        elif self._serves(command):
            if self.server is not None:
                self.server.stop(signal.SIGTERM)
            self.server = _Server(self, self.ported(command))
            self.server.await_lines(expected, self)
        else:
            done = subprocess.run(
                ["bash", "-c", self.ported(command)], cwd=self.folder, env=self.environ, timeout=_PATIENCE,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            came = self.as_printed(done.stdout)
            place = f"line {line}: {command}\n--- expected\n{expected}\n--- came (status {done.returncode})\n{came}"
            assert _same(expected, came), place
            assert expected.strip() or done.returncode == 0, place

    def _serves(self, command: str) -> bool:
        program = re.search(r"\bpython (\w+\.py)", command)
        if program is None:
            return bool(_SERVER.search(command + " "))
        return bool(
            re.search(r"gateway\.(?:serve|run\()|hypercorn|asyncio\.run\(serve\(", (self.folder / program[1]).read_text())
        )

    def ported(self, text: str) -> str:
        """The page's text with the ports that are free here."""
        return re.sub(r"\b(8000|8080|8090|8443|9090)\b", lambda port: self.ports[port[0]], text)

    def as_printed(self, text: str) -> str:
        """The output of a program here, with the ports of the page."""
        for printed, used in self.ports.items():
            text = re.sub(rf"\b{used}\b", printed, text)
        return text


class _Server:
    """A program that serves, and all that it says."""

    def __init__(self, reader: Reader, command: str) -> None:
        self._changed = threading.Condition()
        self.output, self._over = "", False
        # before a container of its own machine it has another port: `everywire emulate` chooses it
        clear = {"EVERYWIRE_LISTEN__PORT": reader.ports["8090"]} if " emulate " in command else {}
        self._process = subprocess.Popen(
            ["bash", "-c", "exec " + re.sub(r"^((?:\w+=\S+ )*)", r"env \1", command)], cwd=reader.folder,
            env=reader.environ | clear, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()
        self._await(lambda: re.search(_READY, self.output))

    def _listen(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            for line in stream:
                with self._changed:
                    self.output += line
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _await(self, holds: Any) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: holds() or self._over, _PATIENCE) and holds())

    def await_lines(self, expected: str, reader: Reader) -> None:
        """Waits until each line has been said, in this order."""

        def said() -> bool:
            lines = iter(reader.as_printed(self.output).splitlines())
            return all(any(_same(wanted, line) for line in lines) for wanted in expected.splitlines())

        assert self._await(said), f"expected\n{expected}\ncame\n{reader.as_printed(self.output)}"

    def stop(self, number: signal.Signals) -> int:
        """The exit status, after the signal; its own where it has ended before."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            code = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        with suppress(ProcessLookupError):  # LitServe leaves its workers, which hold the pipe
            os.killpg(self._process.pid, signal.SIGKILL)
        self._await(lambda: False)  # until all it said is read
        return code


def _same(expected: str, came: str) -> bool:
    """True if the output is as expected, where `...` stands for anything, as in a doctest."""
    return doctest.OutputChecker().check_output(f"\n{expected.strip()}\n", f"\n{came.strip()}\n", doctest.ELLIPSIS)
