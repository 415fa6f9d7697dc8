"""WatchedFile: a small file that is read when the server starts, and again once it has changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import final


@final
class WatchedFile:
    """A file by its path. What it holds is its reader's to keep, and what was wrong with it is not read a second time."""

    def __init__(self, path: str, largest: int) -> None:
        """Of more than `largest` bytes not all are read, and one more: enough to tell."""
        self.path = path
        self._largest = largest
        self._stamp: tuple[int, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether it is another than `read` has read, or is there again, or no more."""
        return self._look() != self._stamp

    @property
    def read_by_others(self) -> bool:
        """Whether its mode lets everybody, or its group, read it."""
        try:
            return bool(stat.S_IMODE(os.stat(self.path).st_mode) & (stat.S_IRGRP | stat.S_IROTH))
        except OSError:
            return False

    def read(self) -> bytes:
        """What it holds now. OSError."""
        self._stamp = self._look()  # before: what changes meanwhile has changed since
        with Path(self.path).open("rb") as file:
            return file.read(self._largest + 1)

    def _look(self) -> tuple[int, ...]:
        try:
            found = os.stat(self.path)
        except OSError as error:
            return (error.errno or 0,)
        # the time of its last change of any kind too: its mode may have been all that was wrong
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
