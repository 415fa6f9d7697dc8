"""Runs the code of docs/howto/use-a-machine-alone.md, and each test that the page writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.docs.pages import ROOT, namespace_of

PAGE = "docs/howto/use-a-machine-alone.md"
TESTS = {name: value for name, value in namespace_of(PAGE).items() if name.startswith("test_")}


def test_every_test_of_the_page_was_found() -> None:
    assert len(TESTS) == (ROOT / PAGE).read_text(encoding="utf-8").count("\ndef test_") == 5


@pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)
def test_the_page_is_true(test: Callable[[], None]) -> None:
    test()
