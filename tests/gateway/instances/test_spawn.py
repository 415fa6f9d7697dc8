"""Processes that a model runs in: real ones, which crash, flood and have children."""

from __future__ import annotations

import errno
import inspect
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from gateway.instances.spawn import Exit, Process, ProcessPlan, innermost_line, supported
from tests.gateway.instances import child

pytestmark = [pytest.mark.programs, pytest.mark.skipif(bool(supported()), reason="the system has no pidfd")]

SOON = 30  # seconds: a bound, on whatever machine


def plan(**said: object) -> ProcessPlan:
    return ProcessPlan(**{"name": "chat", "number": 0, "module": "tests.gateway.instances.child", **said})


@asynccontextmanager
async def started(program: str, **said: object) -> AsyncIterator[Process]:
    process = Process.start(plan(**said), program)
    try:
        with trio.fail_after(SOON):
            yield process
    finally:
        process.close()


async def heard(process: Process) -> bytes:
    with trio.fail_after(SOON):
        await trio.lowlevel.wait_readable(process.socket)
    return process.socket.recv(4096)


async def until(so: Callable[[], bool]) -> None:
    with trio.fail_after(SOON):
        while not so():  # noqa: ASYNC110
            await trio.sleep(0.01)


def is_there(pid: int) -> bool:
    """True if the process exists, even as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def watched(*pids: int) -> Iterator[list[int]]:
    """Pidfds of processes that are not ours; killed at the end where they are still there."""
    pidfds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield pidfds
    finally:
        for pidfd in pidfds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], SOON)[0])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- start ---------------------------------------------------------------------------------------------------------


async def test_a_process_answers_over_its_socket() -> None:
    async with started("echo") as process:
        assert not process.socket.getblocking()
        assert not os.get_inheritable(process.socket.fileno())
        process.socket.send(b"hello")
        assert await heard(process) == b"hello"
        process.socket.close()  # the only end of its kind
        assert await process.ended() == Exit(code=0)


async def test_a_process_leads_a_session_and_has_no_stdin() -> None:
    async with started("tell", number=3) as process:
        pid = str(process.pid)
        assert (await heard(process)).decode().split("\n") == [str(os.getpid()), pid, pid, "/dev/null", "3"]


async def test_a_process_finds_modules_where_we_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('not the library')")
    (tmp_path / "authors.py").write_text("")
    monkeypatch.chdir(tmp_path)  # which is no folder of ours, and so none of its
    async with started("", module="authors") as process:
        assert await process.ended() == Exit(code=1)
    async with started("echo") as process:
        process.socket.close()
        assert await process.ended() == Exit(code=0)
    monkeypatch.syspath_prepend(tmp_path)
    async with started("", module="authors") as process:
        assert await process.ended() == Exit(code=0)


async def test_what_cannot_be_started_leaves_nothing() -> None:
    before = descriptors()
    with pytest.raises(FileNotFoundError):
        Process.start(plan(python="/no/such/python"))
    assert descriptors() == before


async def test_what_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def refuse(pid: int) -> int:
        seen.append(pid)
        raise OSError(errno.EMFILE, "too many")

    before = descriptors()
    monkeypatch.setattr("os.pidfd_open", refuse)
    with pytest.raises(OSError, match="too many"):
        Process.start(plan(), "hold_the_interpreter")
    assert descriptors() == before
    assert not is_there(seen[0])


# -- its end -------------------------------------------------------------------------------------------------------


async def test_a_process_that_is_killed_is_told_of_within_a_bound() -> None:
    async with started("hold_the_interpreter") as process:
        assert await heard(process) == b"holds"
        os.kill(process.pid, signal.SIGKILL)
        assert await process.ended() == Exit(signal=signal.SIGKILL)
        assert not is_there(process.pid)


async def test_a_process_that_leaves_has_a_status() -> None:
    async with started("leave") as process:
        assert str(await process.ended()) == "exit status 3"


@pytest.mark.parametrize("program", ["crash", "crash_in_thread"])
async def test_a_crash_names_signal_and_line(program: str) -> None:
    async with started(program) as process:
        assert str(await process.ended()) == "SIGSEGV"
        lines = inspect.getsource(child).splitlines()
        line = next(i for i, text in enumerate(lines, 1) if "the line that is asserted" in text)
        assert innermost_line(process.tail) == f"{child.__file__} line {line}"
        assert process.tail.startswith("soon\n")


async def test_any_number_may_wait_and_leave() -> None:
    told: list[Exit] = []

    async def wait(scope: trio.CancelScope) -> None:
        with scope:
            told.append(await process.ended())

    async with started("hold_the_interpreter") as process, trio.open_nursery() as nursery:
        scopes = [trio.CancelScope() for _ in range(20)]
        for scope in scopes:
            nursery.start_soon(wait, scope)
        await trio.testing.wait_all_tasks_blocked()
        for scope in scopes[:10]:  # the one that waits for the kernel is among them
            scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert told == []
        process.kill()
        await until(lambda: len(told) == 10)
        assert {*told, await process.ended()} == {Exit(signal=signal.SIGKILL)}


async def test_its_children_are_killed_with_it() -> None:
    async with started("have_children") as process:
        pids = map(int, (await heard(process)).split())
        with watched(*pids) as children:
            process.kill()
            process.kill()
            assert all(map(has_ended, children))
            assert await process.ended() == Exit(signal=signal.SIGKILL)


async def test_its_children_are_killed_when_it_ends_by_itself() -> None:
    async with started("have_children") as process:
        pids = map(int, (await heard(process)).split())
        with watched(*pids) as children:
            process.socket.send(b".")
            assert await process.ended() == Exit(code=0)
            assert all(map(has_ended, children))


async def test_a_number_that_is_not_its_own_any_more_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started("leave") as process:
        await process.ended()
        monkeypatch.setattr("os.killpg", lambda *_: pytest.fail("it is somebody else's"))
        process.kill()
        process.close()
        process.kill()
        assert str(await process.ended()) == "exit status 3"


async def test_a_process_that_another_has_waited_for_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started("leave") as process:
        os.waitpid(process.pid, 0)  # noqa: ASYNC222
        monkeypatch.setattr("os.killpg", lambda *_: pytest.fail("it is somebody else's"))
        process.kill()
        assert await process.ended() == Exit()


async def test_close_ends_it_and_whoever_waits() -> None:
    ends: list[Exit] = []

    async def wait() -> None:
        ends.append(await process.ended())

    async with started("hold_the_interpreter") as process, trio.open_nursery() as nursery:
        assert await heard(process) == b"holds"
        nursery.start_soon(process.read_output, lambda stream, line: None)
        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        process.close()
        process.close()
    assert ends == [Exit(signal=signal.SIGKILL)] * 2
    await until(lambda: not is_there(process.pid))


def test_close_needs_no_loop() -> None:
    process = Process.start(plan(), "echo")
    process.close()
    trio.run(until, lambda: not is_there(process.pid))


async def test_fifty_starts_leave_nothing() -> None:
    async def one() -> None:
        async with started("", python=program) as process:
            await process.read_output(lambda stream, line: None)
            assert await process.ended() == Exit(code=0)
            pids.append(process.pid)

    program, pids = shutil.which("true"), list[int]()
    await one()
    before = descriptors()
    for _ in range(5):
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(one)
    assert descriptors() == before
    assert not any(map(is_there, pids))


# -- output --------------------------------------------------------------------------------------------------------


async def test_output_comes_line_by_line() -> None:
    said: list[tuple[str, str]] = []
    async with started("say") as process, trio.open_nursery() as nursery:
        nursery.start_soon(process.read_output, lambda *told: said.append(told))
        await until(lambda: said == [("stdout", "hello")])
        process.socket.send(b".")
    out = [line for stream, line in said if stream == "stdout"]
    assert out == ["hello", "€" * 2730, "€" * 2270, "1 %", "2 %", "\ufffd\ufffd"]
    assert [line for stream, line in said if stream == "stderr"] == ["a mistake"]


async def test_a_flood_is_counted_and_holds_nobody() -> None:
    said: list[str] = []
    async with started("flood") as process, trio.open_nursery() as nursery:
        nursery.start_soon(process.read_output, lambda stream, line: said.append(line))
        assert await heard(process) == b"said"
        await until(lambda: "dropped" in said[-1])  # by itself, when the second is over
        process.socket.send(b".")
    lines = said.count("x")
    dropped = sum(int(line.split()[0]) for line in said if line.endswith(" lines dropped"))
    assert lines + dropped == 500_000
    assert lines >= 200
    assert said[:200] == ["x"] * 200


async def test_a_line_without_an_end_comes_in_parts() -> None:
    said: list[str] = []
    async with started("flood_of_one_line") as process:
        await process.read_output(lambda stream, line: said.append(line))
    assert said[:200] == ["x" * 8192] * 200
    assert "dropped" in said[-1]


async def test_last_words_are_there_whoever_keeps_the_stream() -> None:
    said: list[str] = []
    async with started("hand_output_on") as process, trio.open_nursery() as nursery:
        nursery.start_soon(process.read_output, lambda stream, line: said.append(line))
        with watched(int(await heard(process))):
            assert await process.ended() == Exit(code=0)
            assert said == ["last words"]
            assert process.tail == "last words\n"
            process.close()  # and the reader is done


# -- inside --------------------------------------------------------------------------------------------------------


async def test_a_process_ends_with_its_parent_whatever_call_it_is_in() -> None:
    async with started("middle") as process:
        with watched(int(await heard(process))) as (held,):
            assert not select.select([held], [], [], 0)[0]
            os.kill(process.pid, signal.SIGKILL)
            assert has_ended(held)


def test_a_process_whose_parent_is_gone_already_leaves() -> None:
    program = "from gateway.instances.spawn import bind_to_parent; bind_to_parent(1); print('lives')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")


async def test_a_process_hears_no_signals_and_those_that_it_starts_do() -> None:
    async with started("end_children") as process:
        assert await heard(process) == b"(-15, -15)"


async def test_memory_beyond_the_limit_is_an_error() -> None:
    async with started("allocate") as process:
        assert await heard(process) == b"MemoryError"


def test_another_system_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert supported() == ""
    monkeypatch.setattr("sys.platform", "darwin")
    assert supported() == "processes need Linux; leave `process` out"
