"""Another version of the server: where its folder comes from, the table beside it, and work that hides in a child process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import checkouts, cli, kept, report
from benchmarks.against import COMPARED, WATCHED, Change, change, changed
from benchmarks.checkouts import CheckoutError, checkout, commit_of, release, version
from benchmarks.cli import program
from benchmarks.load.connections import LoadError
from benchmarks.servers import ROOT


def git(folder: Path, *arguments: str) -> str:
    settings = ("user.name=a", "user.email=a@example.com", "commit.gpgsign=false", "tag.gpgsign=false")
    command = ["git", "-C", str(folder), *(word for setting in settings for word in ("-c", setting)), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository in place of this one: the first commit is the release, its tag is `first`, and there is a second one."""
    root = tmp_path / "repository"
    (root / "gateway").mkdir(parents=True)
    git(root, "init", "--quiet")
    for text in ("first", "second"):
        (root / "gateway" / "__main__.py").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "--quiet", "-m", text)
    git(root, "tag", "first", "HEAD^")
    monkeypatch.setattr(checkouts, "ROOT", root)
    monkeypatch.setattr(checkouts, "RELEASE", tmp_path / "release.json")
    named(git(root, "rev-parse", "first"))
    return root


def named(commit: str) -> None:
    """Makes this commit the release, with a tag that no clone has."""
    checkouts.RELEASE.write_text(f'{{"tag": "v9", "commit": "{commit}"}}')


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page, with figures of before; nothing is measured."""

    def found(folder: Path, name: str, **options: float) -> Change:
        if name == "large-16MiB":
            raise LoadError("no answer for 10 s")
        return change(name, "us/unit", (100.0, 100.0), (101.0, 102.0))

    monkeypatch.setattr(cli, "changed", found)
    monkeypatch.setattr(cli, "prepare", lambda folder: None)
    monkeypatch.setattr(kept, "PAGE", tmp_path / "page.md")
    kept.PAGE.write_text(f"# A page\n\nWords.\n\n{kept.HEADING}2020\n\n| old | table |\n")
    return kept.PAGE


def worktrees(root: Path) -> int:
    """How many folders of this repository git knows."""
    return len(git(root, "worktree", "list").splitlines())


@pytest.mark.programs
@pytest.mark.parametrize("name", ["first", "HEAD^", "HEAD~1", "release"])
def test_a_commit_has_a_folder_until_the_block_is_left(name: str, repository: Path) -> None:
    with checkout(name) as folder:
        assert (folder / "gateway" / "__main__.py").read_text() == "first"
        assert version(folder) == git(repository, "rev-parse", "--short=8", "first")
        git(repository, "worktree", "prune")
        assert worktrees(repository) == 2
    assert not folder.parent.exists()
    assert worktrees(repository) == 1


@pytest.mark.programs
@pytest.mark.parametrize("why", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_folder_is_removed_however_the_block_is_left(why: type[BaseException], repository: Path) -> None:
    folders: list[Path] = []

    def run() -> None:
        with checkout("first") as folder:
            folders.append(folder)
            (folder / "gateway" / "more.pyc").write_text("a server wrote this")
            raise why

    with pytest.raises(why):
        run()
    assert not folders[0].parent.exists()
    assert worktrees(repository) == 1


@pytest.mark.programs
def test_a_folder_that_is_half_made_is_removed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkouts._git

    def stopped(folder: Path, *arguments: str) -> str:
        if arguments[:2] == ("worktree", "add"):
            real(folder, *arguments)
            Path(arguments[-2], ".git").unlink()
            git(folder, "worktree", "lock", arguments[-2])
            raise KeyboardInterrupt
        return real(folder, *arguments)

    monkeypatch.setattr(checkouts, "_git", stopped)
    with pytest.raises(KeyboardInterrupt), checkout("first"):
        pytest.fail("it was stopped")
    assert worktrees(repository) == 1


@pytest.mark.programs
def test_a_folder_is_taken_as_it_is(repository: Path) -> None:
    (repository / "gateway" / "__main__.py").write_text("changed")
    with checkout(str(repository)) as folder:
        assert folder == repository
        assert worktrees(repository) == 1
    assert version(folder) == f"{git(repository, 'rev-parse', '--short=8', 'HEAD')} and changes"
    assert folder.exists()


@pytest.mark.programs
@pytest.mark.parametrize("name", ["no-such", "--all", "", "f" * 40, "first^{tree}", "docs"])
def test_a_name_that_leads_nowhere_is_answered_with_what_was_expected(name: str, repository: Path, measured: Path) -> None:
    (repository / "docs").mkdir()
    done = CliRunner().invoke(program, ["against", "--", name.replace("docs", str(repository / "docs"))])
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: expected {checkouts.EXPECTED}, got ")
    assert len(done.output.splitlines()) == 1
    assert worktrees(repository) == 1


@pytest.mark.programs
def test_a_shallow_clone_says_how_the_commit_comes_into_it(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", str(tmp_path / "shallow"))
    monkeypatch.setattr(checkouts, "ROOT", tmp_path / "shallow")
    with pytest.raises(CheckoutError, match=r"of the release v9 is not in this clone; .* `git fetch --unshallow`"):
        commit_of("release")
    with pytest.raises(CheckoutError, match=r"'first', which git does not know; .* `git fetch --unshallow`"):
        commit_of("first")
    assert commit_of("HEAD") == git(repository, "rev-parse", "HEAD")


@pytest.mark.programs
def test_a_folder_without_git_has_no_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkouts, "ROOT", tmp_path)
    with pytest.raises(CheckoutError, match=r"expected a folder.*got 'HEAD'; git rev-parse .* failed: .*not a git repo"):
        commit_of("HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckoutError, match="git cannot be started"):
        commit_of("HEAD")


@pytest.mark.programs
def test_the_tag_of_the_release_is_its_commit_where_a_clone_has_it() -> None:
    tag, commit = release()
    assert re.fullmatch("[0-9a-f]{40}", commit)
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{tag}^{{commit}}"], capture_output=True, text=True
    )
    assert done.stdout.strip() in ("", commit)


# ---- the table

FOUND = change("unary-64", "us/request", (100.0, 200.0, 100.0, 100.0, 100.0), (103.0, 206.0, 150.0, 101.0, 99.0))


def test_the_change_is_the_median_of_the_pairs_and_the_spread_the_distance_of_their_quartiles() -> None:
    assert (FOUND.there, FOUND.here) == (100.0, 103.0)
    assert [round(percent, 6) for percent in FOUND.percents] == [3, 3, 50, 1, -1]
    assert (round(FOUND.percent, 6), round(FOUND.spread, 6)) == (3, 2)
    assert change("unary-64", "us/request", (100.0,), (103.0,)).spread == 0
    head, row = report.changes_table([FOUND]).splitlines()
    assert head.split() == ["workload", "unit", "there", "here", "change", "%", "spread"]
    assert row.split() == ["unary-64", "us/request", "100", "103", "+3.0", "2.0"]


def test_the_page_has_each_watched_workload_beside_the_release() -> None:
    assert set(WATCHED) <= set(COMPARED)
    page = kept.PAGE.read_text(encoding="utf-8")
    tag, commit = release()
    assert f"\nThere: {tag}, {commit[:8]}. Here: " in page
    rows = [row.strip("| ").split(" | ") for row in page.partition(kept.HEADING)[2].splitlines() if row.startswith("| ")]
    assert tuple(rows[0]) == report.CHANGE_HEADS
    assert [(row[0], row[1]) for row in rows[2:]] == [(name, COMPARED[name].figure) for name in WATCHED]


@pytest.mark.programs
def test_the_table_against_the_release_is_kept_in_place_of_the_one_before(repository: Path, measured: Path) -> None:
    done = CliRunner().invoke(program, ["against", "release", "--keep", "--rounds", "2", "--seconds", "0.5"])
    assert done.exit_code == 0, done.output
    page = measured.read_text()
    assert page.startswith(f"# A page\n\nWords.\n\n{kept.HEADING}")
    assert re.search(r"; 2 rounds of 0.5 s; load average before [\d.]+\.\nThere: v9, [0-9a-f]{8}\. Here: ", page)
    assert "\n\n| workload | unit | there | here | change % | spread |\n| --- | --- |" in page
    rows = [f"| {name} | us/unit | 100 | 102 | +1.5 | 0.5 |\n" for name in WATCHED]
    assert page.endswith("".join(rows))
    assert "old" not in page


def test_only_the_whole_table_against_the_release_is_kept(measured: Path) -> None:
    before = measured.read_text()
    for arguments in (["HEAD", "--keep"], ["release", "unary-64", "--keep"]):
        done = CliRunner().invoke(program, ["against", *arguments])
        assert done.exit_code == 2
        assert "--keep is for the whole table" in done.output
    assert measured.read_text() == before


@pytest.mark.programs
def test_a_workload_that_fails_does_not_take_the_rows_of_the_others(repository: Path, measured: Path) -> None:
    done = CliRunner().invoke(program, ["against", "first", "large-16MiB", "tokens-64"])
    assert done.exit_code == 1
    assert "\ntokens-64  us/unit" in done.output
    assert done.output.endswith("Error: no answer for 10 s\n")
    assert worktrees(repository) == 1


# ---- a planted fault

MOVED = '''

import os as _os
import subprocess as _subprocess
import sys as _sys

_WORKS = """
import os, time
server = os.getppid()
spent = lambda: time.clock_gettime((~server << 3) | 2)
own, before = time.process_time(), spent()
while os.read(0, 1):
    while time.process_time() - own < 0.2 * (spent() - before):
        pass
    os.write(1, b"x")
"""
_child = _subprocess.Popen([_sys.executable, "-c", _WORKS], stdin=_subprocess.PIPE, stdout=_subprocess.PIPE)
_asks, _answers, _calls, _identity = _child.stdin.fileno(), _child.stdout.fileno(), 0, identity


async def identity(session: Session[InferRequest, InferResponse]) -> None:
    global _calls
    _calls += 1
    if not _calls % 256:
        _os.write(_asks, b"x")
        _os.read(_answers, 1)
    await _identity(session)
'''
"""Planted behind the module of the model: after every 256 calls a child process works, a fifth of the CPU time that the server
has used since. The server only waits, and rarely: a change of processes makes it slower itself."""


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CPU of child processes is read from /proc")
def test_work_in_a_child_process_is_found(tmp_path: Path) -> None:
    for package in checkouts.PRODUCT:
        shutil.copytree(ROOT / package, tmp_path / package)
    with (tmp_path / "models" / "library" / "tensors.py").open("a") as module:
        module.write(MOVED)
    with checkout(str(tmp_path)) as planted:
        # many short rounds: what else the machine does is much the same in both of a pair
        found = changed(planted, "unary-64", seconds=0.2, rounds=40)
    # 1.2 units there are 1 here: a change of -17 %
    assert -25 < found.percent < -8, found
