"""The words that stories share: what was said is what is heard, in its order, and where it has strands in each of them."""

from __future__ import annotations

from contextlib import suppress

import pytest

from gateway.testing.stories.talk import Messages, Talk, fragment, named


def messages(*each: bytes) -> Messages:
    """Those, as one end remembers them."""
    kept = Messages()
    for message in each:
        kept.add(message)
    return kept


SAID = messages(b"one", b"two", b"three")


@pytest.mark.parametrize("heard", [(), (b"one",), (b"one", b"two", b"three")])
def test_who_has_heard_less_has_heard_the_beginning(heard: tuple[bytes, ...]) -> None:
    assert SAID.begin_with(messages(*heard))


@pytest.mark.parametrize(
    "heard", [(b"two",), (b"one", b"three"), (b"onetwo",), (b"one", b"one"), (b"one", b"two", b"three", b"four")]
)
def test_a_message_that_is_lost_joined_repeated_or_made_up_is_seen(heard: tuple[bytes, ...]) -> None:
    assert not SAID.begin_with(messages(*heard))


def test_strands_are_each_in_their_own_order() -> None:
    said = messages(b"a.0", b"b.0", b"a.1", b"b.1")
    assert said.begin_with(messages(b"b.0", b"b.1", b"a.0"), strands=True)
    assert not said.begin_with(messages(b"b.0", b"b.1", b"a.0"))
    for heard in ((b"a.1", b"a.0"), (b"b.1",), (b"a.0", b"a.0"), (b"c.0",)):
        assert not said.begin_with(messages(*heard), strands=True)


def test_a_part_that_others_continue_is_not_the_same_as_one_that_ends() -> None:
    assert fragment(b"part", True) != fragment(memoryview(b"part"), False)


def test_a_talk_is_known_by_its_query_and_counts_its_calls_to_their_end() -> None:
    told: list[str] = []
    talk = Talk("one", "line", "m", tell=told.append)
    assert named(talk.query[1:]) == "one"
    with suppress(ValueError), talk.call():
        assert (talk.begun, talk.over) == (1, 0)
        raise ValueError("raised")
    assert (talk.begun, talk.over) == (1, 1)
    assert told == ["one model begins", "one model ends"]
