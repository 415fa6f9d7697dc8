"""The environment of a model's process, and the line of its crash, found in its output."""

from __future__ import annotations

import logging
import os
import sys
import threading

import pytest
import trio

from gateway.instances.spawn import CrashOutput, Exit, ProcessPlan, environment_of, innermost_line

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def plan(**said: object) -> ProcessPlan:
    return ProcessPlan(**{"name": "chat", "number": 1, "threads_each": 2, **said})


def threads(environment: dict[str, str]) -> list[str]:
    return [environment[name] for name in THREADS]


def test_our_environment_is_its_own_without_what_is_the_gateways() -> None:
    own = {"HOME": "/root", "EVERYWIRE_OPERATOR_TOKEN": "secret", "EVERYWIRE_INSTANCE": "7"}
    assert environment_of(plan(), own) == {**dict.fromkeys(THREADS, "2"), "HOME": "/root", "EVERYWIRE_INSTANCE": "1"}


def test_threads_are_shared_where_nobody_says() -> None:
    assert threads(environment_of(plan(), {})) == ["2"] * 4
    assert threads(environment_of(plan(threads_each=0), {})) == ["1"] * 4


def test_what_is_said_more_specially_holds() -> None:
    own = {"OMP_NUM_THREADS": "9", "CUDA_VISIBLE_DEVICES": "all", "LANG": "C"}
    assert threads(environment_of(plan(), own)) == ["9", "2", "2", "2"]
    assert threads(environment_of(plan(cpu_threads=4), own)) == ["4"] * 4
    environment = {"MKL_NUM_THREADS": "5", "LANG": "de"}
    said = environment_of(plan(cpu_threads=4, device="0", environment=environment), own)
    assert (threads(said), said["CUDA_VISIBLE_DEVICES"], said["LANG"]) == (["4", "4", "5", "4"], "0", "de")
    assert environment_of(plan(device="0", environment={"CUDA_VISIBLE_DEVICES": "3"}), own)["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_device_has_the_variable_of_its_maker() -> None:
    said = environment_of(plan(device="1", device_variable="ROCR_VISIBLE_DEVICES"), {})
    assert said["ROCR_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in said


def test_the_instance_is_always_told() -> None:
    said = environment_of(plan(environment={"EVERYWIRE_INSTANCE": "9", "EVERYWIRE_LOG_LEVEL": "debug"}), {})
    assert (said["EVERYWIRE_INSTANCE"], said["EVERYWIRE_LOG_LEVEL"]) == ("1", "debug")


def test_our_folders_come_before_those_of_our_environment_and_after_those_that_are_named() -> None:
    own = {"PYTHONPATH": os.pathsep.join(["/own", "/app", ""])}
    path = ["/app", "/everywire"]
    assert environment_of(plan(), own)["PYTHONPATH"] == os.pathsep.join(["/own", "/app", ""])
    assert environment_of(plan(), own, path)["PYTHONPATH"] == os.pathsep.join(["/app", "/everywire", "/own"])
    named = plan(environment={"PYTHONPATH": "/named"})
    assert environment_of(named, own, path)["PYTHONPATH"] == os.pathsep.join(["/named", "/app", "/everywire"])
    assert environment_of(plan(), {}, path)["PYTHONPATH"] == os.pathsep.join(path)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Exit(signal=11), "SIGSEGV"),
        (Exit(signal=9), "SIGKILL"),
        (Exit(signal=40), "signal 40"),
        (Exit(code=3), "exit status 3"),
        (Exit(), "unknown exit status"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="signals have other numbers")
def test_an_exit_says_how_it_was(end: Exit, text: str) -> None:
    assert str(end) == text


DUMP = """\
INFO: loading
Fatal Python error: Segmentation fault

Thread 0x00007f2a527f46c0 (most recent call first):
  File "/lib/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2a51ff36c0 (most recent call first):
  File "/srv/my app.py", line 12 in step
  File "/lib/threading.py", line 982 in run

Extension modules: numpy.core._multiarray_umath (total: 1)
"""


@pytest.mark.parametrize(
    ("tail", "line"),
    [
        (DUMP, "/srv/my app.py line 12"),
        (DUMP.replace("Current thread 0x00007f2a51ff36c0", "Stack"), "/srv/my app.py line 12"),
        (DUMP.replace("first):\n  File", "first):\n  Garbage-collecting\n  File"), "/srv/my app.py line 12"),
        (DUMP.replace("6c0 (most", "6c0 [worker] (most"), "/srv/my app.py line 12"),
        (DUMP + DUMP.replace("line 12", "line 14"), "/srv/my app.py line 14"),
        (DUMP.replace("Current thread", "Thread"), ""),
        (DUMP.replace('  File "/srv/my app.py", line 12 in step\n', "  <no Python frame>\n"), ""),
        (DUMP[: DUMP.index("app.py")], ""),
        (DUMP[DUMP.index("Thread") :], ""),  # dumped by the model, perhaps, and it lived on
        ("Traceback (most recent call last):\n", ""),
        ("", ""),
    ],
)
def test_the_innermost_line_is_that_of_the_thread_at_fault(tail: str, line: str) -> None:
    assert innermost_line(tail) == line


def test_of_a_crash_the_lines_of_the_author_are_shown() -> None:
    trio_line = f'  File "{trio.__file__}", line 211 in _work'
    dump = DUMP.replace('  File "/lib/threading.py", line 982 in run', trio_line)
    dump = dump.replace('  File "/lib/threading.py"', '  File "/srv/other.py"')
    crash = CrashOutput()
    shown = [line for line in dump.splitlines() if line and crash.level("stderr", line) != logging.DEBUG]
    assert shown == [
        "INFO: loading",
        "Fatal Python error: Segmentation fault",
        "Current thread 0x00007f2a51ff36c0 (most recent call first):",
        '  File "/srv/my app.py", line 12 in step',
    ]
    assert crash.level("stderr", "INFO: another line") == logging.INFO


def test_the_place_of_a_crash_is_the_authors_line() -> None:
    within = f'  File "{trio.__file__}", line 9 in get_events\n'
    assert innermost_line(DUMP.replace('  File "/srv', f'{within}  File "/srv')) == "/srv/my app.py line 12"
    alone = DUMP.replace('  File "/srv/my app.py", line 12 in step\n', within).replace(
        "/lib/threading.py", threading.__file__
    )
    assert innermost_line(alone) == f"{trio.__file__} line 9"


def test_a_stack_that_the_model_prints_itself_is_shown_whole() -> None:
    crash = CrashOutput()
    assert not any(
        crash.level("stderr", line) == logging.DEBUG for line in DUMP.replace("Fatal Python error", "Stack").splitlines()
    )
