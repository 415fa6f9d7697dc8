"""The machine that gives connections to fronts: balance, acknowledgements, fronts that die, are silent or are full."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fronts.handover import AHEAD, SILENT, Handover


def handover(*fronts: int) -> Handover[str]:
    made = Handover[str]()
    for front in fronts:
        made.add(front)
    return made


def assigned(made: Handover[str], now: float = 0.0) -> list[tuple[int, int, str]]:
    return list(made.assign(now))


def put(made: Handover[str], *connections: str, now: float = 0.0) -> list[tuple[int, int, str]]:
    for connection in connections:
        made.put(connection)
    return assigned(made, now)


def test_forty_connections_are_ten_for_each_of_four() -> None:
    made = handover(1, 2, 3, 4)
    given = put(made, *map(str, range(40)))
    assert Counter(front for front, _, _ in given) == {1: 10, 2: 10, 3: 10, 4: 10}


def test_the_front_with_the_fewest_gets_the_next_also_after_others_have_left_it() -> None:
    made = handover(1, 2)
    given = put(made, *"abcd")
    for front in (1, 2):
        made.heard(front, [number for at, number, _ in given if at == front], [], 2, 0.0)
    made.heard(2, [], [], 0, 0.0)  # its clients have gone
    assert [front for front, _, _ in put(made, *"efg")] == [2, 2, 1]


def test_a_connection_is_kept_until_its_front_has_acknowledged_it() -> None:
    made = handover(1)
    ((front, number, _),) = put(made, "a")
    assert made.held == 1
    assert not made.idle(1)
    assert made.heard(front, [number], [], 1, 0.0) == ["a"]
    assert made.held == 0
    assert made.open(1) == 1


def test_what_a_dead_front_has_not_acknowledged_goes_to_others_in_order_and_before_what_came_later() -> None:
    made = handover(1)
    first = put(made, "a", "b", "c")
    made.heard(1, [first[0][1]], [], 1, 0.0)
    made.put("d")
    made.remove(1)
    assert assigned(made) == []  # they wait
    made.add(2)
    assert [(front, connection) for front, _, connection in assigned(made)] == [(2, "b"), (2, "c"), (2, "d")]


def test_a_silent_front_gets_no_more_until_it_acknowledges() -> None:
    made = handover(1, 2)
    (mute, number, _), (other, its, _) = put(made, "a", "b")
    made.heard(other, [its], [], 1, 0.0)
    late = SILENT + 0.1
    assert {front for front, _, _ in put(made, *"cdef", now=late)} == {other}
    made.heard(mute, [number], [], 1, late)
    assert [front for front, _, _ in put(made, "g", now=late)] == [mute]


NONE = frozenset[str]()


def test_while_no_front_is_ready_all_get_connections_and_from_the_first_ready_one_on_only_ready_ones() -> None:
    made = Handover[str]()
    for front in (1, 2, 3):
        made.add(front, ready=False, missed=frozenset({"chat"}))
    assert {front for front, _, _ in put(made, *"abc")} == {1, 2, 3}
    made.add(2, ready=True)
    assert {front for front, _, _ in put(made, *"defg")} == {2}
    made.add(3, ready=True)
    assert set(made.chosen) == {2, 3}
    made.remove(2)
    assert {front for front, _, _ in assigned(made)} == {3}  # those that 2 had not acknowledged too
    made.add(3, ready=False, missed=frozenset({"chat"}))  # it was given up there
    assert set(made.chosen) == {1, 3}


def test_a_model_that_one_front_serves_is_not_missing_where_the_next_connection_goes() -> None:
    made = handover(1, 2)  # ready, as one that is not required is no reason to wait
    made.add(1, missed=frozenset({"big", "small"}))
    made.add(2, missed=frozenset({"big", "small"}))
    made.add(1, missed=frozenset({"big"}))
    assert made.chosen == [1]
    made.add(2, missed=frozenset({"small"}))  # it has the other one: who has been served by 1 goes on there
    assert made.chosen == [1]
    made.add(2, missed=NONE)
    assert made.chosen == [2]
    made.add(1, missed=NONE)
    assert made.chosen == [1, 2]


def test_a_model_that_all_fronts_have_lost_is_served_where_it_is_back_first() -> None:
    made = handover(1, 2)
    for front in (1, 2):
        made.add(front, missed=frozenset({"chat"}))
    assert made.chosen == [1, 2]
    made.add(2, missed=NONE)
    assert made.chosen == [2]


def test_connections_wait_for_the_ready_front_and_while_it_is_paused() -> None:
    made = handover(1)
    made.add(2, ready=False)
    ((_, number, _),) = put(made, "a")
    assert put(made, "b", now=SILENT + 0.1) == []  # a silent ready front, and one that would refuse
    made.heard(1, [number], [], 1, SILENT + 0.2)
    made.paused = True
    assert assigned(made) == []
    made.paused = False
    assert [(front, connection) for front, _, connection in assigned(made)] == [(1, "b")]


def test_a_front_that_rests_is_not_silent() -> None:
    made = handover(1)
    assert [front for front, _, _ in put(made, "a", now=100.0)] == [1]


def test_a_front_has_no_more_ahead_than_is_allowed_and_the_rest_waits() -> None:
    made = handover(1)
    assert len(put(made, *map(str, range(AHEAD + 5)))) == AHEAD
    assert made.held == AHEAD + 5


def test_a_front_without_descriptors_gives_connections_back_and_gets_none_for_a_while() -> None:
    made = handover(1, 2)
    (short, number, _), (other, its, _) = put(made, "a", "b")
    made.heard(other, [its], [], 1, 0.0)
    assert made.heard(short, [], [number], 0, 0.0) == []
    assert [(front, connection) for front, _, connection in assigned(made, 0.0)] == [(other, "a")]
    assert [front for front, _, _ in put(made, "c", now=SILENT)] == [short]


def test_a_retired_front_gets_none_and_may_still_acknowledge() -> None:
    made = handover(1, 2)
    given = put(made, "a", "b")
    made.retire(1)
    assert [front for front, _, _ in put(made, "c", "d")] == [2, 2]
    assert made.heard(1, [given[0][1]], [], 1, 0.0) == ["a"]


@pytest.mark.parametrize(("numbers", "lacking", "open"), [([99], [], 1), ([1, 1], [], 1), ([1], [1], 1), ([1], [], -1)])
def test_a_front_that_acknowledges_what_it_was_not_given_is_found_out(
    numbers: list[int], lacking: list[int], open: int
) -> None:
    made = handover(1)
    assert put(made, "a") == [(1, 1, "a")]
    with pytest.raises(ValueError, match="not given"):
        made.heard(1, numbers, lacking, open, 0.0)
    assert made.held == 1


def test_all_that_is_kept_can_be_dropped() -> None:
    made = handover(1)
    put(made, "a")
    made.retire(1)
    made.put("b")
    assert sorted(made.drop()) == ["a", "b"]
    assert made.held == 0


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["put", "ack", "lack", "die", "add", "assign"]), max_size=60))
def test_no_connection_is_lost_or_in_two_places_whatever_happens(steps: list[str]) -> None:
    made, alive, owned, sent, now = handover(1), [1], set[str](), dict[int, dict[int, str]](), 0.0
    put_in = 0
    for step in steps:
        now += 0.3
        if step == "put":
            made.put(str(put_in))
            put_in += 1
        elif step == "add":
            alive.append(len(alive) + 100 + put_in)
            made.add(alive[-1])
        elif step == "assign":
            for front, number, connection in made.assign(now):
                assert front in alive
                sent.setdefault(front, {})[number] = connection
        elif alive and (front := alive[-1]) is not None:
            on_its_way = sent.setdefault(front, {})
            if step == "die":
                made.remove(alive.pop())
                del sent[front]
            elif step == "ack":
                owned.update(made.heard(front, list(on_its_way), [], len(on_its_way), now))
                on_its_way.clear()
            else:
                made.heard(front, [], list(on_its_way), 0, now)
                on_its_way.clear()
    left = made.drop()
    assert sorted([*left, *owned], key=int) == [str(n) for n in range(put_in)]
