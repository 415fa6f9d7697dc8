"""Stop sequences: where a text ends, and what is held back of it, however it is cut into tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.continuations import Stops, _Words

TEXTS = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def end_of(text: str, stops: list[str], *, included: bool, first: int = 0) -> tuple[str, str | None]:
    """The text up to its end, found by `str` alone, and the stop sequence that ends it: the one that is complete first, the
    longest of those. None is complete within the `first` characters."""
    for end in range(first + 1, len(text) + 1):
        if met := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(met, key=len)
            return text[: end if included else end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], *, included: bool) -> tuple[str, str | None]:
    watch, shown = Stops(stops, included=included), ""
    for piece in pieces:
        shown += watch.feed(piece)
        if watch.met is not None:
            assert (watch.rest(), watch.feed("more")) == ("", "")
    return shown + watch.rest(), watch.met


def every_cut(text: str) -> Iterator[list[str]]:
    for borders in itertools.product((False, True), repeat=len(text) - 1):
        places = [0, *(place for place, cut in enumerate(borders, 1) if cut), len(text)]
        yield [text[first:end] for first, end in itertools.pairwise(places)]


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(min(edge, len(text)) for edge in at), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("xxabcxx", ["abc"], "xx"),
        ("xabcy", ["abc", "ab"], "x"),  # the one that is complete first
        ("xabcd", ["c", "abc"], "x"),  # the longest of those that are complete at once
        ("aabaaaab", ["aaab"], "aaba"),
        ("xabcd", ["bcd", "c"], "xab"),
        ("xabcd", ["cde", "abx"], "xabcd"),
        ("ababab", ["abac"], "ababab"),
        ("日本語日", ["本語"], "日"),
        ("aaaaa", ["aaa", "aa"], ""),
    ],
)
def test_a_text_ends_at_its_stop_in_every_way_to_cut_it(text: str, stops: list[str], before: str, included: bool) -> None:
    expected = end_of(text, stops, included=included)
    assert end_of(text, stops, included=False)[0] == before
    for pieces in every_cut(text):
        assert run(pieces, stops, included=included) == expected


@settings(max_examples=300)
@given(TEXTS, STOPS, st.lists(st.integers(0, 14), max_size=8), st.booleans())
def test_any_text_ends_where_a_naive_search_finds_its_stop(
    text: str, stops: list[str], at: list[int], included: bool
) -> None:
    assert run(cut(text, at), stops, included=included) == end_of(text, stops, included=included)


@settings(max_examples=300)
@given(TEXTS, STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop(text: str, stops: list[str]) -> None:
    watch, shown = Stops(stops, included=False), ""
    for end, character in enumerate(text, 1):
        shown += watch.feed(character)
        if watch.met is not None:
            return
        held = max(size for stop in stops for size in range(len(stop)) if text[:end].endswith(stop[:size]))
        assert shown == text[: end - held]
        assert watch.held == held


@given(TEXTS, STOPS)
def test_nothing_is_held_back_of_a_text_that_includes_its_stop(text: str, stops: list[str]) -> None:
    watch = Stops(stops, included=True)
    for character in text:
        if watch.met is None:
            assert (watch.feed(character), watch.held) == (character, 0)


@settings(max_examples=300)
@given(TEXTS, TEXTS, STOPS, st.booleans())
def test_a_stop_that_is_complete_in_what_is_ignored_is_not_met_but_may_begin_there(
    first: str, then: str, stops: list[str], included: bool
) -> None:
    watch = Stops(stops, included=included)
    shown = "".join([watch.feed(character, ignore=True) for character in first])
    assert watch.met is None
    shown += watch.feed(then) + watch.rest()
    assert (shown, watch.met) == end_of(first + then, stops, included=included, first=len(first))


def test_held_text_comes_as_soon_as_it_begins_no_stop() -> None:
    watch = Stops(["\n\nUser:"], included=False)
    assert [watch.feed(piece) for piece in ("Hi\n", "\nUs", "e", "d\n", "!")] == ["Hi", "", "", "\n\nUsed", "\n!"]


def test_a_fork_goes_its_own_way() -> None:
    watch = Stops(["abc"], included=False)
    assert watch.feed("xab") == "x"
    fork = watch.fork()
    assert (fork.feed("c"), fork.met) == ("", "abc")
    assert (watch.feed("d"), watch.met) == ("abd", None)


def test_an_empty_stop_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        Stops(["a", ""], included=True)


def test_a_long_stop_sequence_costs_a_step_a_character() -> None:
    watch = Stops(["a" * 1_000_000 + "b"], included=False)
    assert watch.feed("a" * 20_000) == ""
    assert watch.feed("c") == "a" * 20_000 + "c"


def test_many_stop_sequences_with_one_beginning_cost_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, step = 0, _Words.step

    def counted(words: _Words, place: int, character: str) -> int:
        nonlocal steps
        steps += 1
        return step(words, place, character)

    monkeypatch.setattr(_Words, "step", counted)
    watch = Stops(["a" * (n + 1) + "b" for n in range(64)] + ["a" * 4000 + "c"], included=False)
    assert watch.feed("a" * 4000) == ""
    assert (watch.feed("b"), watch.met) == ("a" * 3936, "a" * 64 + "b")
    assert steps == 4001


@settings(max_examples=300)
@given(st.text("ab", min_size=200, max_size=400), st.lists(st.text("ab", min_size=6, max_size=40), min_size=8, max_size=64))
def test_many_long_stop_sequences_end_a_text_where_a_naive_search_finds_them(text: str, stops: list[str]) -> None:
    assert run([text[:150], *text[150:160], text[160:]], stops, included=False) == end_of(text, stops, included=False)
