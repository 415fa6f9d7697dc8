"""Follows the tutorial word for word."""

from pathlib import Path

import pytest

from tests.docs.pages import Reader, blocks, lacking, skip_or_fail

PAGE = "docs/tutorial/first-model.md"


@pytest.mark.pages
def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    skip_or_fail(lacking(blocks(PAGE)))
    with Reader(tmp_path) as reader:
        reader.follow(blocks(PAGE))
