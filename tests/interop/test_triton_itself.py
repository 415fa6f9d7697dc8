"""The same requests to Triton itself and to us: equal answers but where triton_differences.py says otherwise, and why."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.interop.servers import Server
from tests.interop.triton import Triton
from tests.interop.triton_cases import CASES, FATAL, Answer, Case, ask
from tests.interop.triton_differences import ANSWERS, DIFFERENCES, differ


@pytest.fixture(scope="session")
def answers(triton_itself: Triton, v2_server: Server) -> Mapping[str, tuple[Answer, Answer]]:
    """The answers of Triton and of the gateway to each case."""
    here = f"{v2_server.host}:{v2_server.port}"
    with ThreadPoolExecutor(8) as pool:
        both = [(pool.submit(ask, triton_itself.http, case), pool.submit(ask, here, case)) for case in CASES.values()]
        return {name: (theirs.result(), ours.result()) for name, (theirs, ours) in zip(CASES, both, strict=True)}


@pytest.mark.parametrize("name", CASES)
def test_we_answer_as_triton_does_but_where_we_say_why_not(answers: Mapping[str, tuple[Answer, Answer]], name: str) -> None:
    theirs, ours = answers[name]
    assert differ(theirs, ours) == ANSWERS.get(name), f"Triton: {theirs}\nhere: {ours}"


def test_no_request_makes_us_answer_500(answers: Mapping[str, tuple[Answer, Answer]]) -> None:
    assert [name for name, (_, ours) in answers.items() if ours["status"] >= 500] == []


def test_every_error_of_ours_is_json(answers: Mapping[str, tuple[Answer, Answer]]) -> None:
    errors = {name: ours["error"] for name, (_, ours) in answers.items() if "error" in ours}
    assert {name: form for name, form in errors.items() if form != "JSON"} == {}


@pytest.mark.parametrize("case", FATAL.values(), ids=list(FATAL))
def test_what_ends_tritons_process_is_a_client_error_here(v2_server: Server, case: Case) -> None:
    answer = ask(f"{v2_server.host}:{v2_server.port}", case)
    assert (answer["status"], answer["error"]) == (400, "JSON")


def test_every_difference_names_cases_that_are_asked() -> None:
    named = [case for difference in DIFFERENCES for case in (*difference.cases, *difference.fatal)]
    assert len(set(named)) == len(named)
    assert set(named) <= CASES.keys() | FATAL.keys()
    assert FATAL.keys() <= set(named)
