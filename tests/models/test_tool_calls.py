"""Pieces of tool calls and thinking between a model and its wires: what counts, what ends, and what is shown where."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.continuations import Continuations, spoken
from models.errors import ModelError
from models.messages import Finish, FinishReason, GenerationParameters, Token, ToolCall

PIECE = ToolCall(name="f", arguments="{", text="<call>")


def texts(**parameters: Any) -> Continuations:
    return Continuations(GenerationParameters(**{"max_new_tokens": 100, **parameters}))


def take(text: Continuations, message: Any) -> Any:
    assert text.passes(message)
    return text.take(message)


def test_a_piece_of_a_call_counts_as_many_tokens_as_it_says() -> None:
    text = texts(max_new_tokens=4)
    assert take(text, ToolCall(tokens=3)).finish is None
    assert take(text, ToolCall(tokens=0)).finish is None
    assert take(text, PIECE).finish is FinishReason.LENGTH
    assert (text.complete, text.stopped) == (True, True)


def test_a_model_ends_its_text_with_a_piece() -> None:
    text = texts()
    ended = ToolCall(finish=FinishReason.TOOL_CALLS)
    assert take(text, ended) is ended
    assert (text.complete, text.stopped) == (True, False)
    assert not text.passes(PIECE)


def test_text_that_may_begin_a_stop_sequence_is_shown_before_a_call() -> None:
    text = texts(stop_sequences=("END",), include_stop_str_in_output=False)
    assert take(text, Token(text="so E")).text == "so "
    assert text.held(0) == 1
    assert text.rest(0) == "E"
    take(text, PIECE)
    assert take(text, Token(text="ND")).text == "ND"  # the call stands between


def test_thinking_is_counted_and_no_stop_sequence_is_met_in_it() -> None:
    text = texts(max_new_tokens=3, stop_sequences=("END",))
    text.shows_thinking = True
    thought = take(text, Token(text="END", thinking=True))
    assert (thought.text, thought.finish) == ("END", None)
    assert take(text, Token(text="EN")).finish is None
    last = take(text, Token(text="D!", thinking=True))
    assert (last.text, last.finish) == ("D!", FinishReason.LENGTH)


def test_thinking_has_no_text_where_it_has_no_place() -> None:
    thought = take(texts(), Token(text="hm", data=b"hm", thinking=True))
    assert (thought.text, thought.data, thought.special, thought.thinking) == ("", b"", True, True)


@given(st.text("aé€😀", max_size=8), st.lists(st.integers(0, 40), max_size=6))
def test_characters_of_thinking_are_whole_in_every_cut(thought: str, places: list[int]) -> None:
    data = thought.encode()
    at = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    text = texts()
    text.shows_thinking = True
    shown = [take(text, Token(text="?", data=data[a:b], thinking=True)).text for a, b in itertools.pairwise(at)]
    assert "".join(shown) == thought
    assert take(text, Token(text="so")).text == "so"


def test_what_was_not_sent_is_taken_back() -> None:
    text = texts(max_new_tokens=4)
    held = text.held_of(0)
    taken = take(text, ToolCall(tokens=4))
    assert text.complete
    text.undo(taken, held)
    assert not text.complete
    assert take(text, ToolCall(tokens=3)).finish is None


def test_after_the_end_a_model_that_goes_on_calling_is_stopped() -> None:
    text = texts()
    take(text, Finish(reason=FinishReason.EOS_TOKEN))
    for _ in range(20):
        assert not text.passes(PIECE)
    assert text.stopped


def test_a_wire_can_end_a_text_itself() -> None:
    text = texts(n=2)
    take(text, PIECE)
    text.cut(0)
    assert (text.complete, text.stopped) == (False, False)
    assert not text.passes(PIECE)
    take(text, ToolCall(sequence=1))
    text.cut(1)
    assert (text.complete, text.stopped) == (True, True)


def test_where_calls_have_no_place_their_text_is_shown() -> None:
    said = spoken(ToolCall(text="<call>", sequence=1, prompt_tokens=3, finish=FinishReason.LENGTH))
    assert said == Token(text="<call>", sequence=1, prompt_tokens=3, finish=FinishReason.LENGTH)
    assert spoken(ToolCall(text="<call>", tokens=0)).text == ""  # type: ignore[union-attr]  # tokens have said it
    with pytest.raises(ModelError, match="no other place for it") as caught:
        spoken(ToolCall(name="f"))
    assert (caught.value.status, caught.value.code) == (500, "UnexpectedToolCall")
