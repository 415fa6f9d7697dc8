"""Follows the page about clients, each section against one server; a section whose client is absent is skipped."""

from collections.abc import Iterator

import pytest

from tests.docs.pages import Reader, blocks, lacking, skip_or_fail

PAGE = blocks("docs/howto/clients.md")
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
