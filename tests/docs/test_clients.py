"""Follows the pages about clients, each section against one server. Skips a section whose client is not installed."""

from collections.abc import Iterator

import pytest

from tests.docs.pages import Reader, blocks, lacking, skip_or_fail

PAGES = ["docs/howto/clients.md", "docs/howto/clients-text.md", "docs/howto/clients-tensors.md", "docs/howto/clients-aws.md"]
PAGE = [block for page in PAGES for block in blocks(page)]
START = "Start a gateway"
SECTIONS = [section for section in dict.fromkeys(block.section for block in PAGE) if section != START]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with Reader(tmp_path_factory.mktemp("reader")) as reader:
        reader.follow([block for block in PAGE if block.section == START])
        yield reader


@pytest.mark.pages
@pytest.mark.parametrize("section", SECTIONS)
def test_the_section_works_as_it_is_written(section: str, reader: Reader) -> None:
    followed = [block for block in PAGE if block.section == section]
    skip_or_fail(lacking(followed))
    reader.follow(followed)
