"""Folders with another version of this repository: one that is there, or a worktree of a commit while it is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.servers import ROOT

RELEASE = Path(__file__).parent / "release.json"
"""The last release. Its commit is what counts: a clone need not have the tag."""
PRODUCT = ("gateway", "models", "protocols")
"""The folders of the product, which a checkout has."""
_OF_A_HOOK = frozenset({"GIT_COMMON_DIR", "GIT_DIR", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_WORK_TREE"})
EXPECTED = "a folder with a checkout, a commit, a tag or a branch of this repository, or `release`"


class CheckoutError(Exception):
    """A name leads to no checkout; the text is one line, which says what was expected."""


@contextmanager
def checkout(name: str) -> Iterator[Path]:
    """The folder of a version, for the length of the block. A folder is taken as it is. For a commit, git makes a worktree
    among temporary files, which is removed when the block is left, however it is left. CheckoutError if there is none."""
    if name not in ("", "release") and Path(name).is_dir():
        yield _checked(Path(name).resolve(), name)
        return
    commit = commit_of(name)
    with tempfile.TemporaryDirectory(prefix="everywire-against-") as parent:
        folder = Path(parent) / "checkout"
        try:
            _git(ROOT, "worktree", "add", "--quiet", "--detach", str(folder), commit)
            yield _checked(folder, name)
        finally:
            # git removes the entry of a worktree without a folder, and refuses one whose files are not all there yet; the
            # second --force is for an entry that is locked because git was stopped while it wrote the files
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(CheckoutError):
                _git(ROOT, "worktree", "remove", "--force", "--force", str(folder))


def commit_of(name: str) -> str:
    """The whole name of the commit that git knows by this name. CheckoutError if there is none."""
    tag, commit = release()
    asked = commit if name == "release" else name
    with suppress(CheckoutError):
        if not asked.startswith("-"):  # git would read an option
            return _git(ROOT, "rev-parse", "--quiet", "--verify", f"{asked}^{{commit}}")
    try:
        shallow = _git(ROOT, "rev-parse", "--is-shallow-repository") == "true"
    except CheckoutError as error:
        raise CheckoutError(f"expected {EXPECTED}, got {name[:100]!r}; {error}") from None
    missing = "this clone is shallow: `git fetch --unshallow` brings its history" if shallow else "`git fetch` brings news"
    if name == "release":
        raise CheckoutError(f"the commit {commit} of the release {tag} is not in this clone; {missing}")
    raise CheckoutError(f"expected {EXPECTED}, got {name[:100]!r}, which git does not know; {missing}")


def release() -> tuple[str, str]:
    """The tag and the commit of the last release."""
    last = json.loads(RELEASE.read_text(encoding="utf-8"))
    return last["tag"], last["commit"]


def version(folder: Path) -> str:
    """The commit of a checkout in few letters, and whether its product has other changes; empty where git knows none."""
    try:
        commit = _git(folder, "rev-parse", "--short=8", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--", *PRODUCT)
    except CheckoutError:
        return ""
    return f"{commit} and changes" if changed else commit


def _checked(folder: Path, name: str) -> Path:
    if not (folder / "gateway" / "__main__.py").is_file():
        raise CheckoutError(f"expected {EXPECTED}, got {name[:100]!r}, which has no gateway/__main__.py")
    return folder


def _git(folder: Path, *arguments: str) -> str:
    # a hook's variables lead elsewhere, and the repository's own hooks have no part in this
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "-c", f"core.hooksPath={os.devnull}", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise CheckoutError(f"git cannot be started: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise CheckoutError(f"git {' '.join(arguments[:2])} failed: {said[-1]}")
    return done.stdout.strip()
