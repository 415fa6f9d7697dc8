"""The tokenizer: lossless, bounded, and never a piece of a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.library.lm.model import LanguageModel
from models.library.lm.tokenizer import EOS, TextStream, Tokenizer, pieces

TOKENIZER = LanguageModel.load().tokenizer
ANY_TEXT = st.text(max_size=60) | st.text(alphabet=" \n\t_'aé日🙂1", max_size=60)


@settings(max_examples=200)
@given(ANY_TEXT)
def test_every_text_comes_back_from_its_ids(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(EOS < token < len(TOKENIZER) for token in ids)


@settings(max_examples=200)
@given(ANY_TEXT)
def test_the_pieces_joined_are_the_text_and_each_is_short(text: str) -> None:
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert all(len(piece) <= 25 for piece in cut)


@settings(max_examples=100)
@given(ANY_TEXT)
def test_decoding_token_by_token_never_splits_a_character(text: str) -> None:
    stream = TextStream(TOKENIZER)
    added = [stream.feed(token) for token in TOKENIZER.encode(text)]
    assert "".join(added) == text
    assert stream.rest() == ""
    assert "\ufffd" not in "".join(added) or "\ufffd" in text


def test_an_unfinished_character_is_held_back_and_becomes_the_replacement_at_the_end() -> None:
    stream = TextStream(TOKENIZER)
    first, second, _ = (byte + 1 for byte in "日".encode())
    assert [stream.feed(first), stream.feed(second), stream.rest()] == ["", "", "\ufffd"]


def test_a_fork_holds_the_same_bytes_back_and_goes_its_own_way() -> None:
    stream = TextStream(TOKENIZER)
    first, second, third = (byte + 1 for byte in "日".encode())
    stream.feed(first)
    fork = stream.fork()
    assert [fork.feed(second), fork.feed(third), stream.rest()] == ["", "日", "\ufffd"]


@given(st.binary(min_size=1, max_size=3) | st.sampled_from([b" the", b"e", b"\xff", b" "]))
def test_tokens_are_found_by_the_bytes_they_contain_or_begin_with(part: bytes) -> None:
    every = {token: TOKENIZER.bytes_of(token) for token in range(len(TOKENIZER))}
    assert set(TOKENIZER.containing(part)) == {token for token, value in every.items() if part in value}
    assert set(TOKENIZER.beginning_with(part)) == {token for token, value in every.items() if value.startswith(part)}


def test_half_a_surrogate_pair_becomes_the_replacement_character() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"


def test_ids_that_are_no_utf8_decode_to_replacements() -> None:
    assert TOKENIZER.decode([0xFF + 1, EOS]) == "\ufffd"


def test_earlier_merges_go_first() -> None:
    a, b, c = (byte + 1 for byte in b"abc")
    assert Tokenizer([(b, c), (a, b)]).encode("abc") == [a, 257]
    assert Tokenizer([(a, b), (b, c)]).encode("abc") == [257, c]
    assert Tokenizer([(a, b), (257, c)]).encode("abc") == [258]


@pytest.mark.parametrize("word", ["the", " function", " returns", ".\n\n"[:1]])
def test_common_words_are_one_token(word: str) -> None:
    assert len(TOKENIZER.encode(word)) == 1
