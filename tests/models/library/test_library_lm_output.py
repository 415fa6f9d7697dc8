"""The end of the language model's text: stops across every border, text that is held back, special tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.continuations import Matcher
from models.library.lm.model import LanguageModel
from models.library.lm.output import Output
from models.library.lm.tokenizer import EOS
from models.messages import FinishReason, GenerationParameters, Token

MODEL = LanguageModel.load()
SERVER = MODEL.encode("The server")
ENDING = MODEL.encode("It was generated with gencodec")


def generate(ids: list[int] = SERVER, **parameters: Any) -> list[Token]:
    return list(MODEL.generate(ids, GenerationParameters(**parameters)))


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


# Matching


@given(st.text("ab", min_size=1, max_size=6), st.text("ab", max_size=20))
def test_a_matcher_knows_every_beginning_of_its_word_that_the_text_ends_with(word: str, text: str) -> None:
    matcher, matched = Matcher(word), 0
    for end in range(1, len(text) + 1):
        matched = matcher.step(matched, text[end - 1])
        expected = [size for size in range(len(word), 0, -1) if text[:end].endswith(word[:size])]
        assert list(matcher.lengths(matched)) == expected
        if matched == len(word):
            return


# Through the model


@pytest.mark.parametrize("start", range(0, 40, 5))
@pytest.mark.parametrize("length", [1, 2, 4, 9, 17])
def test_the_text_of_tokens_ends_before_or_with_a_stop_anywhere(start: int, length: int) -> None:
    free = text_of(generate())
    stop = free[start : start + length]
    first = free.index(stop)
    without = generate(stop_sequences=("never seen\0", stop), include_stop_str_in_output=False)
    included = generate(stop_sequences=("never seen\0", stop))
    assert text_of(without) == free[:first]
    assert text_of(included) == free[: first + length]
    assert without[-1].finish is included[-1].finish is FinishReason.STOP_SEQUENCE
    assert [token.id for token in without] == [token.id for token in included]


def test_what_was_held_back_comes_with_the_next_token_if_it_is_no_stop() -> None:
    free = generate()
    stop = free[4].text + "\0"
    held = generate(stop_sequences=(stop,), include_stop_str_in_output=False)
    assert (held[4].text, held[5].text) == ("", free[4].text + free[5].text)
    assert text_of(held) == text_of(free)


def test_what_is_held_back_at_the_greatest_length_comes_with_the_last_token() -> None:
    free = generate(max_new_tokens=6)
    stop = free[4].text + free[5].text + "\0"
    held = generate(max_new_tokens=6, stop_sequences=(stop,), include_stop_str_in_output=False)
    assert (held[4].text, held[5].text) == ("", free[4].text + free[5].text)
    assert held[5].finish is FinishReason.LENGTH


def test_what_is_held_back_at_the_end_of_sequence_comes_with_it() -> None:
    free = generate(ENDING, max_new_tokens=60)
    stop = free[-2].text + "\0"
    held = generate(ENDING, max_new_tokens=60, stop_sequences=(stop,), include_stop_str_in_output=False)
    assert held[-2].text == ""
    assert (held[-1].id, held[-1].text, held[-1].finish) == (EOS, free[-2].text, FinishReason.EOS_TOKEN)


def output(**parameters: Any) -> Output:
    return Output(MODEL.tokenizer, GenerationParameters(**parameters))


def test_a_stop_is_seen_in_the_replacement_character_that_ends_a_text() -> None:
    first, second, _ = (byte + 1 for byte in "日".encode())
    ends = output(stop_sequences=("\ufffd",), include_stop_str_in_output=False, max_new_tokens=2)
    assert ends.add(first) == ("", None)
    assert ends.add(second) == ("", FinishReason.STOP_SEQUENCE)


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_token_ends_the_text_and_is_in_it_like_a_stop_sequence(include: bool) -> None:
    free = generate()
    place = next(index for index in range(3, 30) if free[index].id not in [token.id for token in free[:index]])
    stopped = generate(stop_token_ids=(4095, free[place].id), include_stop_str_in_output=include)
    assert [token.id for token in stopped] == [token.id for token in free[: place + 1]]
    assert stopped[-1].finish is FinishReason.STOP_SEQUENCE
    assert text_of(stopped) == text_of(free[: place + include])


def test_a_stop_token_that_is_left_out_leaves_an_unfinished_character_unfinished() -> None:
    first, second, third = (byte + 1 for byte in "日".encode())
    for include, text in ((False, "\ufffd"), (True, "日")):
        ends = output(stop_token_ids=(third,), include_stop_str_in_output=include)
        assert [ends.add(first), ends.add(second)] == [("", None)] * 2
        assert ends.add(third) == (text, FinishReason.STOP_SEQUENCE)


def test_the_end_of_sequence_among_the_stop_tokens_is_still_the_end_of_sequence() -> None:
    assert generate(ENDING, max_new_tokens=60, stop_token_ids=(EOS,))[-1].finish is FinishReason.EOS_TOKEN


@pytest.mark.parametrize(("spaces", "text"), [(True, " <eos>"), (False, "<eos>")])
def test_a_special_token_that_is_not_skipped_has_a_text_and_perhaps_a_space_before_it(spaces: bool, text: str) -> None:
    asked: dict[str, Any] = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
    last = generate(ENDING, max_new_tokens=60, **asked)[-1]
    assert (last.text, last.special, last.finish) == (text, True, FinishReason.EOS_TOKEN)
    (only,) = generate(logit_bias={EOS: 100.0}, **asked)
    assert only.text == "<eos>"
    stop = generate(ENDING, max_new_tokens=60)[-2].text + "\0"
    held = generate(ENDING, max_new_tokens=60, stop_sequences=(stop,), include_stop_str_in_output=False, **asked)
    assert held[-1].text == stop[:-1] + text


def test_a_fork_of_an_output_has_its_text_and_its_length() -> None:
    ids = MODEL.encode("naïve 日本")
    ends = output(stop_sequences=("e 日x",), include_stop_str_in_output=False, max_new_tokens=len(ids))
    added = ""
    for token in ids:
        fork = ends.fork()
        text, finish = ends.add(token)
        assert fork.add(token) == (text, finish)
        added += text
    assert finish is FinishReason.LENGTH
    assert added == "naïve 日本"
