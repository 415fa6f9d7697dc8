"""Runs the code of docs/howto/use-a-machine-alone.md, and each test that the page writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "use-a-machine-alone.md"


def namespace_of(page: Path) -> dict[str, Any]:
    """All blocks of the page in one namespace, compiled such that a traceback names the page's line."""
    text, namespace = page.read_text(encoding="utf-8"), {"__name__": "page"}
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        above = text.count("\n", 0, block.start(1))
        exec(compile("\n" * above + block[1], str(page), "exec"), namespace)
    return namespace


TESTS = {name: value for name, value in namespace_of(PAGE).items() if name.startswith("test_")}


def test_every_test_of_the_page_was_found() -> None:
    assert len(TESTS) == PAGE.read_text(encoding="utf-8").count("\ndef test_") == 5


@pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)
def test_the_page_is_true(test: Callable[[], None]) -> None:
    test()
