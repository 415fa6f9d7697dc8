"""Reads images and manifests as a platform does, and runs a container's command as a process of this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
_PATIENCE = 120


class Image:
    """The last stage of a Dockerfile: the instructions, in order, and what they mean for who runs the image."""

    def __init__(self, file: Path) -> None:
        text = re.sub(r"^\s*#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
        instructions = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
        last = max(i for i, (word, _) in enumerate(instructions) if word == "FROM")
        self.base, self.instructions = instructions[last][1], [(word, rest) for word, rest in instructions[last + 1 :]]

    def all(self, word: str) -> list[str]:
        """The arguments of each instruction with that word."""
        return [rest for found, rest in self.instructions if found == word]

    def one(self, word: str) -> str:
        """The arguments of the only instruction with that word."""
        (rest,) = self.all(word)
        return rest

    @property
    def labels(self) -> dict[str, str]:
        pairs = [pair.partition("=") for rest in self.all("LABEL") for pair in shlex.split(rest)]
        return {key: value for key, _, value in pairs}

    @property
    def environ(self) -> dict[str, str]:
        pairs = [pair.partition("=") for rest in self.all("ENV") for pair in shlex.split(rest)]
        return {key: value for key, _, value in pairs}

    def command(self, arguments: Sequence[str] = ()) -> list[str]:
        """The process that `docker run IMAGE ARGUMENTS` starts."""
        return [*json.loads(self.one("ENTRYPOINT")), *(arguments or json.loads(self.one("CMD")))]


class Container:
    """A container's command as a process, without the container: in an empty folder, and with no settings for the gateway
    but those of the platform."""

    def __init__(
        self, command: Sequence[str], folder: Path, environ: Mapping[str, str], *, port: int, within: Sequence[str] = ()
    ) -> None:
        """`within` is a command that runs the container's command in a world of its own, by exec."""
        assert command[0] == "python", "the image has it on its PATH"
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("EVERYWIRE_", "SAGEMAKER_", "OPTION_", "COV_"))
        }
        self.port = port
        self._process = subprocess.Popen(
            [*within, sys.executable, *command[1:]], cwd=folder, env={**inherited, "PYTHONPATH": str(ROOT), **environ},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._log = self._process.stdout
        self._deadline = threading.Timer(_PATIENCE, self._process.kill)
        self._deadline.start()

    def __enter__(self) -> Container:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._deadline.cancel()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def await_event(self, event: str) -> dict[str, Any]:
        """The next line of the log that tells of this event. AssertionError, with the log, where it ends before."""
        said = ""
        for line in self._log:
            said += line
            if line.startswith("{") and (entry := json.loads(line)).get("event") == event:
                return dict(entry)
        raise AssertionError(f"it ended without {event!r}:\n{said}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """SIGTERM, as every platform sends it first."""
        self._process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """The exit code."""
        self._log.read()  # a full pipe would hold it up
        return self._process.wait()

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and body, on a connection of its own."""
        connection = self.connect()
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def in_force(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings that a container's command would serve with."""
    inherited = {"PYTHONPATH": str(ROOT), "PATH": os.environ.get("PATH", "")}
    done = subprocess.run(
        [sys.executable, *command[1:], "config"],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return tomllib.loads(done.stdout)
