"""Follows the page about SageMaker: each section is a task of its own; one whose client is absent is skipped."""

from pathlib import Path

import pytest

from tests.docs.pages import Reader, blocks, lacking, skip_or_fail

PAGE = blocks("docs/howto/sagemaker.md")


@pytest.mark.pages
@pytest.mark.parametrize("section", dict.fromkeys(block.section for block in PAGE))
def test_the_task_is_done_as_it_is_written(section: str, tmp_path: Path) -> None:
    followed = [block for block in PAGE if block.section == section]
    skip_or_fail(lacking(followed))
    with Reader(tmp_path) as reader:
        reader.follow(followed)
