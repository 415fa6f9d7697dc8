"""Plain English: the findings in docstrings, comments and pages only become fewer. And the checker finds what it should."""

from pathlib import Path

import pytest

from tests.docs import english


@pytest.mark.sweep
def test_findings_only_become_fewer() -> None:
    more, fewer = english.differences(english.frozen(), english.counted(english.files()))
    assert not more, "more than before; `python -m tests.docs.english PATH` shows them: " + "; ".join(more)
    assert not fewer, "fewer than before: run `python -m tests.docs.english --shrink`: " + "; ".join(fewer)


def found(text: str, name: str, folder: Path) -> list[tuple[int, str]]:
    """The line and the rule of each finding in a file with this text."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return [(finding.line, finding.rule) for finding in english.findings(file)]


@pytest.mark.parametrize(
    "sentence",
    [
        "What a peer may do.",
        "Who waits for the slot.",
        "Whether it can be called.",
        "Whoever asks is answered.",
        "Where it is full, calls are refused.",
        "Of the two, the second wins.",
        "The same for a stream.",
        "The same, without a body.",
        "A sentence first. What comes is read.",
    ],
)
def test_a_clause_that_stands_for_a_noun_is_found(sentence: str, tmp_path: Path) -> None:
    assert found(f'"""{sentence}"""\n', "a.py", tmp_path) == [(1, "opening")]
    assert found(f"x = 1\n# {sentence[0].lower()}{sentence[1:]}\n", "b.py", tmp_path) == [(2, "opening")]
    assert found(f"A page.\n\n{sentence}\n", "c.md", tmp_path) == [(3, "opening")]


@pytest.mark.parametrize(
    "sentence",
    [
        "If the queue is full, the gateway answers 503.",
        "What does it cost?",
        "The same model answers.",
        "Of course it does.",
        "True if the model knows what it does.",
        "Says where it is.",
        "When the peer closes, the stream ends.",
        "Takes the bytes, e.g. What comes.",
        "None are left out: members that are None.",
        "This helps those who ask.",
    ],
)
def test_a_sound_sentence_is_not_found(sentence: str, tmp_path: Path) -> None:
    assert found(f'"""{sentence}"""\n\nx = 1  # {sentence}\n', "a.py", tmp_path) == []
    assert found(f"# Heading\n\n{sentence}\n", "b.md", tmp_path) == []


@pytest.mark.parametrize(
    "phrase",
    ["as good as absent", "the latter", "he waits", "of his own", "does so", "is seen to", "that is none", "by its own"],
)
def test_a_banned_phrase_is_found(phrase: str, tmp_path: Path) -> None:
    assert found(f'"""A token, {phrase}."""\n', "a.py", tmp_path) == [(1, "phrase")]
    assert found(f"A token, {phrase}.\n", "b.md", tmp_path) == [(1, "phrase")]


def test_docstrings_of_attributes_and_comments_beside_code_are_read(tmp_path: Path) -> None:
    program = '''
class Queue:
    """A queue."""

    limit = 8
    """What it holds."""

    def put(self) -> None:
        if self.limit:
            text = "# what is in a string is no comment"  # whether it has room
        else:
            text = """What is no docstring is not read."""
'''
    assert found(program, "a.py", tmp_path) == [(6, "opening"), (10, "opening")]


def test_a_comment_of_several_lines_is_one_text(tmp_path: Path) -> None:
    assert found("# The limit says\n# what it holds.\n", "a.py", tmp_path) == []
    assert found("x = 1  # the limit\n# what it holds\n", "b.py", tmp_path) == [(2, "opening")]
    assert found("# noqa: E501\n# type: ignore\n", "c.py", tmp_path) == []


def test_a_long_sentence_is_found_in_pages_alone(tmp_path: Path) -> None:
    longest = " ".join(["word"] * english.LONGEST)
    assert found(f"{longest}.\n\n{longest} more.\n", "a.md", tmp_path) == [(3, "long")]
    assert found(f"| a | b |\n| --- | --- |\n| one | {longest} more |\n", "b.md", tmp_path) == [(3, "long")]
    assert found(f"- {longest}\n- {longest}\n", "c.md", tmp_path) == []
    assert found(f"{longest} in 2026-11-22. {longest}\n", "f.md", tmp_path) == [(1, "long")]
    assert found(f"[{longest}](https://example.com/{'-'.join(longest.split())}) `{longest}`.\n", "d.md", tmp_path) == [
        (1, "long")
    ]
    assert found(f'"""{longest} more."""\n', "e.py", tmp_path) == []


def test_code_in_pages_is_not_read(tmp_path: Path) -> None:
    assert found("```text\nWhat is code.\n```\n\n<!-- What is hidden. -->\n\n    What is set.\n", "a.md", tmp_path) == []
    assert found('"""Runs:\n\n    What is code.\n\n>>> What is an example.\n"""\n', "b.py", tmp_path) == []
    assert found("The words `what is code. Who knows` are code.\n", "c.md", tmp_path) == []


def test_quotations_and_fragments_in_cells_are_not_read(tmp_path: Path) -> None:
    assert found(
        "> What somebody said.\n\n| what it is | a |\n| --- | --- |\n| the same | What is it. |\n", "a.md", tmp_path
    ) == [(5, "opening")]


def test_counts_above_and_below_the_frozen_ones_are_told() -> None:
    kept = {"a.py": {"opening": 2, "phrase": 1}, "gone.py": {"opening": 1}}
    more, fewer = english.differences(kept, {"a.py": {"opening": 3}, "new.py": {"phrase": 1}})
    assert more == ["a.py: opening: 3, frozen 2", "new.py: phrase: 1, frozen 0"]
    assert fewer == ["a.py: phrase: 0, frozen 1", "gone.py: opening: 0, frozen 1"]


def test_shrinking_raises_no_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(english, "FROZEN", tmp_path / "english.json")
    monkeypatch.setattr(english, "counted", lambda _: {"a.py": {"opening": 5, "phrase": 1}, "b.py": {"opening": 1}})
    for option, kept in [
        ("--shrink", {"a.py": {"opening": 2, "phrase": 1}}),
        ("--freeze", {"a.py": {"opening": 5, "phrase": 1}, "b.py": {"opening": 1}}),
    ]:
        english.write({"a.py": {"opening": 2, "phrase": 3}, "gone.py": {"opening": 1}})
        monkeypatch.setattr("sys.argv", ["english", option])
        english.main()
        assert english.frozen() == kept
