"""Holds the README to what it says: short programs that run."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Reader, blocks, code_lines, lacking, skip_or_fail

PAGE = blocks("README.md")
FILES = {block.file: block.text for block in PAGE if block.file}


def test_the_first_thing_is_how_to_start() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines[:5] == [
        "# everywire",
        "",
        "    pip install . && python -m gateway demo",
        "    pip install '.[test]' && pytest",
        "",
    ]


@pytest.mark.parametrize(("file", "at_most"), [("app.py", 10), ("embed.py", 3)])
def test_the_programs_are_short(file: str, at_most: int) -> None:
    assert 0 < len(code_lines(FILES[file])) <= at_most


@pytest.mark.pages
def test_the_model_is_served_and_embedded_as_it_is_written(tmp_path: Path) -> None:
    skip_or_fail(lacking(PAGE))
    with Reader(tmp_path) as reader:
        reader.follow(PAGE)
        reader.type(  # the embedded one is what is running now
            """curl localhost:8080/invocations -d '{"inputs": "hello every wire"}'""",
            '{"generated_text": "HELLO EVERY WIRE "}',
            0,
        )
