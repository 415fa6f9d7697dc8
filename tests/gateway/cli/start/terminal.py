"""The program with a terminal for its standard error, as a user has it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 60.0


class Terminal:
    """The text that a program has written to its terminal."""

    def __init__(self, master: int) -> None:
        self._master, self.text = master, ""

    def until(self, wanted: str, *, times: int = 1) -> str:
        """Reads until `wanted` has come `times` times, and returns the whole text. AssertionError after PATIENCE seconds."""
        deadline = time.monotonic() + PATIENCE
        while self.text.count(wanted) < times:
            ready, _, _ = select.select([self._master], [], [], max(deadline - time.monotonic(), 0))
            assert ready, self.text
            self.text += os.read(self._master, 65536).decode().replace("\r\n", "\n")
        return self.text


@contextmanager
def everywire(folder: Path, *arguments: str) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """The program, with a terminal for its standard error alone."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "gateway", *arguments]
    process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stderr=slave, start_new_session=True)
    os.close(slave)
    try:
        yield Terminal(master), process
    finally:
        process.kill()
        process.wait()
        os.close(master)
