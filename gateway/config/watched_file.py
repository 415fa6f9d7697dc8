"""WatchedFile: a small file that is read when the server starts, and again after it has changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import final


@final
class WatchedFile:
    """A file by its path. The reader keeps its content. An invalid file is not read again until it changes."""

    def __init__(self, path: str, largest: int) -> None:
        """Reads return at most `largest` bytes and one more, which shows that the file is too large."""
        self.path = path
        self._largest = largest
        self._stamp: tuple[int, ...] = ()

    @property
    def changed(self) -> bool:
        """True if the file was changed, created or removed since `read`."""
        return self._look() != self._stamp

    @property
    def read_by_others(self) -> bool:
        """True if the file's mode lets its group or everybody read it."""
        try:
            return bool(stat.S_IMODE(os.stat(self.path).st_mode) & (stat.S_IRGRP | stat.S_IROTH))
        except OSError:
            return False

    def read(self) -> bytes:
        """The content of the file now. Raises OSError."""
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
