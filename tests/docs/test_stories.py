"""Follows the pages that are one story each."""

from pathlib import Path

import pytest

from tests.docs.pages import Reader, blocks, lacking, skip_or_fail, stories


@pytest.mark.pages
def test_a_model_is_tested_with_no_other_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:trio -p no:anyio -p no:asyncio -p no:cacheprovider")
    page = "docs/tutorial/test-your-model.md"
    with Reader(tmp_path) as reader:
        reader.follow(blocks(page))


@pytest.mark.pages
@pytest.mark.parametrize("page", stories())
def test_the_page_works_as_it_is_written(page: str, tmp_path: Path) -> None:
    skip_or_fail(lacking(blocks(page)))
    with Reader(tmp_path) as reader:
        reader.follow(blocks(page))
