"""The command `everywire dev`: serves the models of a file, anew each time the file or code that it imports changes."""

from __future__ import annotations

import ast
import logging
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import trio

from gateway.cli.fronts import run_fronts
from gateway.cli.options import CommandLine
from gateway.cli.serve import CUT
from gateway.cli.start.found import module_of
from gateway.config.problem import ConfigError
from gateway.config.share import processes_of
from gateway.fronts.link import FrontLink
from gateway.fronts.parent import Parent

log = logging.getLogger("gateway.dev")

_LOOK = 0.5
"""Seconds between two looks at the files. A change is served once it is older than this: editors write in several steps."""
_MOST = 1000  # files that are watched, at most
_CONSOLE = 8090

Stamps = Mapping[Path, "tuple[int, int] | None"]
"""The modification time in ns and the size of each file; None if it is gone."""


def run_dev(given: CommandLine, file: str) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit code, which is 0 also if a stream was cut. ConfigError for a file
    that cannot be served. If it cannot be served after a change, the log shows why, and the old code serves on."""
    if sys.platform != "linux":
        raise ConfigError(f"everywire dev needs Linux; elsewhere: everywire --model {file}, and start it again")
    module_of(file)
    said = given.resolve().sources
    unsaid = {key: value for key, value in _usual().items() if key not in said}
    given = given.joined(CommandLine(overrides=unsaid, flags=dict.fromkeys(unsaid, "everywire dev")))
    config = given.resolve().config
    logging.getLogger("gateway.fronts").setLevel(logging.WARNING)  # messages about processes say nothing to this user
    files = Files(Path(file), Path.cwd(), *([] if given.file is None else [given.file]))
    code = run_fronts(config, given, processes_of(config), sources=(file,), beside=partial(_watch, files))
    return 0 if code == CUT else code


def _usual() -> dict[str, str]:
    """The settings whose defaults are others for this command."""
    return {"log.format": "text", "drain.timeout": "0", "operator.port": str(_free(_CONSOLE))}


def _free(port: int) -> int:
    """The port if it is free on this machine, otherwise another free one."""
    try:
        with socket.create_server(("127.0.0.1", port)) as sock:
            found: int = sock.getsockname()[1]
            return found
    except OSError:
        return _free(0)


async def _watch(files: Files, parent: Parent) -> None:
    """Replaces the fronts each time the files have changed and then stayed the same between two looks."""
    served = before = files.stamps()
    serving: FrontLink | None = None
    while True:
        await trio.sleep(_LOOK)
        front = parent.current.get(0)
        if front is not None and front is not serving and front.taking and front.serving is not None:
            if serving is not None:
                log.info("serving anew", extra={"models": front.serving.models})
            serving = front
        now = files.stamps()
        if now == before != served:
            changed = [path for path in now if now[path] != served.get(path, now[path])]
            log.info("changed", extra={"files": [files.name(path) for path in changed]})
            served = now
            parent.replace()
        before = now


class Files:
    """The watched files: one of Python code, those that it imports from the folder, and others."""

    def __init__(self, file: Path, folder: Path, *others: Path) -> None:
        self._file, self._folder, self._others = file.resolve(), folder.resolve(), [path.resolve() for path in others]
        self._imported: dict[Path, tuple[tuple[int, int] | None, list[Path]]] = {}

    def name(self, path: Path) -> str:
        """The file's path as the log shows it: relative to the folder if the file is in it."""
        return str(path.relative_to(self._folder)) if path.is_relative_to(self._folder) else str(path)

    def stamps(self) -> Stamps:
        """The current stamps of all watched files."""
        found: dict[Path, tuple[int, int] | None] = {path: _stamp(path) for path in self._others}
        left = [self._file]
        while left and len(found) < _MOST:
            path = left.pop()
            if path not in found:
                found[path] = _stamp(path)
                left += self._imports(path, found[path])
        return found

    def _imports(self, path: Path, stamp: tuple[int, int] | None) -> list[Path]:
        """The files that a file imports. If it cannot be read or parsed, those that it imported before."""
        known, imported = self._imported.get(path, (None, []))
        if stamp is not None and stamp != known:
            with suppress(OSError, SyntaxError, ValueError):
                imported = list(self._found_in(ast.parse(path.read_bytes())))
            self._imported[path] = stamp, imported
        return imported

    def _found_in(self, tree: ast.AST) -> Iterator[Path]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._modules(alias.name)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from self._modules(node.module)
                for alias in node.names:
                    yield from self._modules(f"{node.module}.{alias.name}")

    def _modules(self, name: str) -> Iterator[Path]:
        """The files of a module and of the packages around it that are in the folder."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = self._folder.joinpath(*parts[:end])
            for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
                if file.is_file():
                    yield file


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
