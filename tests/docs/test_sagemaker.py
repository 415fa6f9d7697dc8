"""Follows the pages about SageMaker: each section is a task of its own. A section whose client is absent is skipped."""

from pathlib import Path

import pytest

from tests.docs.pages import Reader, blocks, lacking, skip_or_fail

PAGES = [*blocks("docs/howto/sagemaker.md"), *blocks("docs/howto/sagemaker-container.md")]


@pytest.mark.pages
@pytest.mark.parametrize("section", dict.fromkeys(block.section for block in PAGES))
def test_the_task_is_done_as_it_is_written(section: str, tmp_path: Path) -> None:
    followed = [block for block in PAGES if block.section == section]
    skip_or_fail(lacking(followed))
    with Reader(tmp_path) as reader:
        reader.follow(followed)
