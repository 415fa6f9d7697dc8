"""Characters of a text whose tokens are bytes: whole, in every cut, with stop sequences, and after a `send` that was none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.continuations import Continuations
from models.messages import Finish, FinishReason, GenerationParameters, Token, utf8


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """The bytes in pieces, none of them empty."""
    at = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


def told(tokens: Sequence[Token], **parameters: Any) -> tuple[list[str], str]:
    """The text shown with each token, and the text left when the model has returned."""
    given_: dict[str, Any] = {"max_new_tokens": 1000, "include_stop_str_in_output": False, **parameters}
    text = Continuations(GenerationParameters(**given_))
    shown = []
    for token in tokens:
        if text.passes(token):
            taken = text.take(token)
            assert isinstance(taken, Token)
            shown.append(taken.text)
            assert text.held(0) <= 3 + max([len(stop) for stop in parameters.get("stop_sequences", ())], default=0)
    return shown, "".join(rest for _, rest in text.rests())


CUTS = st.lists(st.integers(0, 1000), max_size=20)
TEXTS = st.text("aé€😀́", max_size=12)


@given(st.text(max_size=20) | TEXTS, CUTS)
def test_a_text_is_whole_in_whatever_bytes_its_tokens_are(text: str, places: list[int]) -> None:
    text = utf8(text).decode()
    shown, rest = told([Token(text="?", data=piece) for piece in cut(utf8(text), places)])
    assert ("".join(shown), rest) == (text, "")


@given(st.binary(max_size=20), CUTS)
def test_what_is_no_text_is_the_same_in_every_cut(data: bytes, places: list[int]) -> None:
    shown, rest = told([Token(text="", data=piece) for piece in cut(data, places)])
    assert "".join(shown) + rest == data.decode(errors="replace")


@given(TEXTS, st.text("aé€😀", min_size=1, max_size=3), CUTS)
def test_a_stop_sequence_is_met_in_the_decoded_text(text: str, stop: str, places: list[int]) -> None:
    shown, rest = told([Token(text="", data=piece) for piece in cut(utf8(text), places)], stop_sequences=(stop,))
    assert "".join(shown) + rest == text.partition(stop)[0]


def test_a_character_comes_with_the_token_that_finishes_it() -> None:
    assert told([Token(text="", data=bytes([byte])) for byte in "a😀b".encode()]) == (["a", "", "", "", "😀", "b"], "")


def test_an_unfinished_character_is_shown_at_the_end_whichever_end_that_is() -> None:
    half = Token(text="", data=b"\xc3")
    assert told([half]) == ([""], "\ufffd")
    assert told([half], max_new_tokens=1) == (["\ufffd"], "")
    assert told([Token(text="", data=b"\xc3", finish=FinishReason.EOS_TOKEN)]) == (["\ufffd"], "")
    finished = Continuations(GenerationParameters())
    finished.take(half)
    finished.take(Finish(reason=FinishReason.EOS_TOKEN))
    assert (finished.rest(0), finished.rest(0)) == ("\ufffd", "")


def test_a_token_without_bytes_goes_on_where_those_before_it_have_stopped() -> None:
    half, text, end = Token(text="", data=b"\xc3"), Token(text="x"), Token(text="", special=True)
    assert told([half, text]) == (["", "\ufffdx"], "")
    assert told([half, end, Token(text="", data=b"\xa9")]) == (["", "", "é"], "")


def test_each_sequence_has_characters_of_its_own() -> None:
    tokens = [Token(text="", data=bytes([byte]), sequence=n) for pair in zip("é".encode(), "ü".encode(), strict=True)
              for n, byte in enumerate(pair)]  # fmt: skip
    assert told(tokens, n=2) == (["", "", "é", "ü"], "")


def test_a_token_that_was_not_sent_is_as_if_it_had_not_come() -> None:
    text = Continuations(GenerationParameters(stop_sequences=("éa",), include_stop_str_in_output=False))
    first, second = Token(text="", data=b"\xc3"), Token(text="", data=b"\xa9")
    for token in (first, second):
        held = text.held_of(0)
        before = text.held(0)
        text.undo(text.take(token), held)
        assert text.held(0) == before
        text.take(token)
    assert (text.held(0), text.rest(0)) == (1, "é")


def test_a_model_that_ends_its_texts_itself_decodes_them_too() -> None:
    text = Continuations(GenerationParameters(), own_stops=True)
    for token in (Token(text="", data=b"\xc3"), Token(text="é", data=b"\xa9")):
        assert text.take(token) is token
    assert (text.rest(0), text.judges) == ("", False)


def test_a_text_without_bytes_costs_no_decoding() -> None:
    text = Continuations(GenerationParameters())
    token = Token(text="é")
    assert text.take(token) is token
    assert not text.judges


@pytest.mark.parametrize(
    "last", [Finish(reason=FinishReason.EOS_TOKEN), Token(text="é", finish=FinishReason.EOS_TOKEN), None]
)
def test_what_comes_after_the_end_of_a_text_is_judged(last: Token | Finish | None) -> None:
    text = Continuations(GenerationParameters())
    text.take(Token(text="é"))
    if last is None:
        text.stop()
    else:
        text.take(last)
    assert text.judges
    assert not text.passes(Token(text="more"))


def test_a_stop_sequence_is_named_for_a_model_that_leaves_it_out_only_if_it_must_have_been_that_one() -> None:
    for parameters, stop in (
        ({"stop_sequences": ("END",)}, "END"),
        ({"stop_sequences": ("END", "FIN")}, ""),
        ({"stop_sequences": ("END",), "stop_token_ids": (7,)}, ""),
    ):
        for message in (
            Token(text="a", finish=FinishReason.STOP_SEQUENCE),
            Finish(reason=FinishReason.STOP_SEQUENCE),
        ):
            text = Continuations(GenerationParameters(**parameters), own_stops=True)  # type: ignore[arg-type]
            assert text.take(message).stop == stop
