"""Texts for regular expressions: the scripted model never runs a client's expression, and its search is bounded."""

from __future__ import annotations

import math
import re

import pytest

from models.library.scripted.patterns import MAX_STATES, Automaton, CannotMake, Work, text_of

PATTERNS = [
    "", "abc", "a|b", "[^a-z]", r"\d{3}-\d{4}", r"(\d{3}-)?\d{4}", "a{2,}", "a{2,5}?b*", "(ab|cd)+", r"[\w.+-]+@\w+\.com", ".",
    r"\S\s\S", r"\W\D", "(?i)yes", "(?i:Y)es", "(?s).", "(?x) a b", "(?:ab){0,3}c", r"(?P<name>x)y", "^(a|b)$", r"\Aab\Z", "é+",
    r"\bcat\b", r"\Bat", "(a+)+$", ".{0,1000}x", "[^\\d\\s]{4}", "(|a)b", r"x\.y", "[]-a]", r"[\u00e0-\u00ff]",
]  # fmt: skip


def made(
    *patterns: str, within: bool = False, shortest: int = 0, longest: float = math.inf, steps: int = 100_000
) -> str | None:
    work = Work(steps)
    return text_of([Automaton(pattern, within=within) for pattern in patterns], shortest, longest, work)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_text_matches_and_is_as_short_as_can_be(pattern: str) -> None:
    text = made(pattern)
    if text is None:
        assert not any(re.fullmatch(pattern, other) for other in ("at", "ab", "a", ""))
    else:
        assert re.fullmatch(pattern, text)
        assert not text or made(pattern, longest=len(text) - 1) is None


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shortest", [0, 3, 9])
def test_a_text_around_a_match_has_the_length_that_is_wanted(pattern: str, shortest: int) -> None:
    text = made(pattern, within=True, shortest=shortest, longest=shortest + 12)
    if text is not None:
        assert re.search(pattern, text)
        assert shortest <= len(text) <= shortest + 12
    else:
        assert pattern.startswith(("^", r"\A"))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("text", ["", "a", "ab", "555-1234", "yes", "a cat", "cat", "x.y", "\n", "aaab", "me@example.com"])
def test_a_text_matches_as_in_python(pattern: str, text: str) -> None:
    assert Automaton(pattern, within=True).matches(text, Work(10_000)) == bool(re.search(pattern.replace("$", r"\Z"), text))


def test_several_expressions_are_met_together() -> None:
    assert made("^a", "z$", "m.m", within=True) == "amamz"
    assert made("^a", "^b", within=True) is None


def test_expressions_that_take_python_for_ever_take_few_steps() -> None:
    automaton = Automaton("^(a+)+$", within=True)
    assert not automaton.matches("a" * 1000 + "b", Work(100_000))
    assert not Automaton("(a|a)*b").matches("a" * 1000, Work(100_000))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(?=a)b", "assert is not supported"),
        (r"(a)\1", "groupref is not supported"),
        ("(?m)^a", "the flags m and L are not supported"),
        ("a++", "possessive repeat is not supported"),
        ("(", "missing ), unterminated subpattern"),
        (r"\p{L}", "bad escape"),
        ("a{5000}", f"it has more than {MAX_STATES} states"),
        ("((a{1,64}){1,64}){64}", "states"),
        ("a{" + "9" * 5000 + "}", "Exceeds the limit"),
        ("(" * 3000 + ")" * 3000, "RecursionError"),
        ("a" * 10_001, "it has more than 10000 characters"),
    ],
)
def test_an_expression_that_it_cannot_follow_is_refused(pattern: str, said: str) -> None:
    with pytest.raises(CannotMake) as caught:
        made(pattern)
    text = str(caught.value)
    assert said in text or "recursion" in text
    assert len(text) < 200


def test_a_search_ends_at_its_limit() -> None:
    alternatives = "|".join("ab"[i % 2] + "." * (i % 7 + 2) for i in range(60))
    with pytest.raises(CannotMake, match="it takes more than 20000 steps"):
        made(f"({alternatives})*x", f"({alternatives})*y", steps=20_000)


def test_a_shortened_repetition_does_not_say_that_a_text_is_wrong() -> None:
    automaton = Automaton("^a{0,500}$", within=True)
    assert automaton.matches("a" * 100, Work(100_000))
    with pytest.raises(CannotMake, match="repetitions are too long"):
        automaton.matches("a" * 400, Work(100_000))
