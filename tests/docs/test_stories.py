"""Follows the pages that are one story each."""

from pathlib import Path

import pytest

from tests.docs.pages import Reader, blocks, lacking, skip_or_fail


def test_a_model_is_tested_with_no_other_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:trio -p no:anyio -p no:asyncio -p no:cacheprovider")
    page = "docs/tutorial/test-your-model.md"
    with Reader(tmp_path) as reader:
        reader.follow(blocks(page))


@pytest.mark.parametrize(
    "name",
    ["howto/client", "howto/models", "howto/embed", "howto/operate", "howto/trace", "howto/test-a-model", "reference/multi-model", "reference/websocket"],
)
def test_the_page_works_as_it_is_written(name: str, tmp_path: Path) -> None:
    page = f"docs/{name}.md"
    skip_or_fail(lacking(blocks(page)))
    with Reader(tmp_path) as reader:
        reader.follow(blocks(page))
