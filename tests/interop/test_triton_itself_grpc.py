"""The same calls of gRPC to Triton and to us: equal answers, or triton_grpc_differences.py says what differs and why."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from protocols.grpc import v2_tables as tables
from tests.interop.grpc_frames import SERVICE, Frames, prefixed
from tests.interop.servers import Server
from tests.interop.triton import Triton
from tests.interop.triton_cases import Answer
from tests.interop.triton_differences import differ
from tests.interop.triton_grpc_cases import ALONE, CASES, STREAM, Case, ask, number
from tests.interop.triton_grpc_differences import ALONE_HERE, ANSWERS, DIFFERENCES

TRIES = 5


@pytest.fixture(scope="session")
def answers(triton_itself: Triton, v2_server: Server) -> Mapping[str, tuple[Answer, Answer]]:
    """The answers of Triton and of the gateway to each case."""
    here = f"{v2_server.host}:{v2_server.port}"
    with ThreadPoolExecutor(1) as pool:
        ours = pool.submit(lambda: {name: ask(here, case) for name, case in CASES.items()})
        theirs = {name: asked_triton(triton_itself, case) for name, case in CASES.items()}
        return {name: (theirs[name], answer) for name, answer in ours.result().items()}


def asked_triton(triton: Triton, case: Case) -> Answer:
    """Triton's answer. Its process, which a stream of several requests ends now and then, is started again."""
    for _ in range(TRIES):
        answer = ask(triton.grpc, case)
        if answer["status"] != "closed" or case.pings or not triton.gone(10):
            return answer
        triton.start()
    raise AssertionError(f"Triton's process ends each time: {case.name}")


@pytest.mark.parametrize("name", CASES)
def test_we_answer_as_triton_does_but_where_we_say_why_not(answers: Mapping[str, tuple[Answer, Answer]], name: str) -> None:
    theirs, ours = answers[name]
    assert differ(theirs, ours) == ANSWERS.get(name), f"Triton: {theirs}\nhere: {ours}"


def test_every_error_of_ours_says_what_is_wrong(answers: Mapping[str, tuple[Answer, Answer]]) -> None:
    assert [name for name, (_, ours) in answers.items() if "error" in ours and not ours["said"]] == []


def test_no_call_of_ours_ends_its_connection(answers: Mapping[str, tuple[Answer, Answer]]) -> None:
    ended = {name: ours.get("connection") for name, (_, ours) in answers.items() if ours["status"] != "under way"}
    assert set(ended.values()) == {"goes on"}, ended


@pytest.mark.parametrize("case", ALONE.values(), ids=list(ALONE))
def test_what_triton_is_not_asked_is_answered_here(v2_server: Server, case: Case) -> None:
    assert ask(f"{v2_server.host}:{v2_server.port}", case)["status"] == ALONE_HERE[case.name]


def test_a_client_that_does_not_read_stops_the_model_here(triton_itself: Triton, v2_server: Server) -> None:
    assert sent_unread(triton_itself.grpc, 100, 20) == 100
    assert sent_unread(f"{v2_server.host}:{v2_server.port}", 100, 1) < 100


def sent_unread(at: str, many: int, seconds: float) -> int:
    """How many responses of 64 KiB, at most, a model sends in so many seconds to a client that does not read."""
    host, _, port = at.partition(":")
    with Frames(host, int(port), lenient=True) as silent:
        before = finished(at)
        silent.open(STREAM, prefixed(number("pieces", many)), end=False)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if finished(at) > before:
                return many
            time.sleep(0.05)  # nobody tells when statistics change
    return many - 1


def finished(at: str) -> int:
    """How many requests of `pieces` are answered."""
    host, _, port = at.partition(":")
    asked, told = tables.MODEL_STATISTICS
    with Frames(host, int(port), lenient=True) as frames:
        answer = frames.call(f"{SERVICE}/ModelStatistics", prefixed(asked.write({"name": "pieces"})))
    (model,) = told.read(answer.messages[0])["model_stats"]
    return int(model["inference_stats"].get("success", {"count": 0})["count"])


def test_every_difference_names_cases_that_are_asked() -> None:
    named = [case for difference in DIFFERENCES for case in (*difference.cases, *difference.alone)]
    assert len(set(named)) == len(named)
    assert set(named) <= CASES.keys() | ALONE.keys()
    assert ALONE.keys() == ALONE_HERE.keys()
    shown = [name for difference in DIFFERENCES for name in difference.tests]
    assert all(callable(getattr(sys.modules[__name__], name)) for name in shown)
    assert all(difference.cases or difference.alone or difference.tests for difference in DIFFERENCES)
