"""The next caller for a slot: by level, by what its party holds, by its wait; and no party holds more than its share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from gateway.party import Party
from gateway.workers import slot_queue
from gateway.workers.slot_queue import SlotQueue, places_of


class Waiting:
    """A queue, and the tasks of callers who wait in it, by name: `a1` is the first of party a."""

    def __init__(self, nursery: trio.Nursery, queue: SlotQueue) -> None:
        self._nursery, self.queue = nursery, queue
        self.parties: dict[str, Party] = {}
        self.served: list[str] = []
        self._scopes: dict[str, trio.CancelScope] = {}

    def party(self, name: str) -> Party:
        return self.parties.setdefault(name[0], Party(name[0]))

    async def wait(self, name: str, level: int = 8, held: int = 0) -> None:
        scope = self._scopes[name] = trio.CancelScope()

        async def task() -> None:
            with scope:
                await self.queue.wait(self.party(name), level, held)
                self.served.append(name)

        self._nursery.start_soon(task)
        await trio.testing.wait_all_tasks_blocked()

    async def leave(self, name: str) -> None:
        self._scopes[name].cancel()
        await trio.testing.wait_all_tasks_blocked()

    async def next(self) -> str | None:
        """Wakes the next caller. Returns its name; None if no caller may have a slot."""
        if self.queue.next_held is None:
            return None
        self.queue.wake()
        await trio.testing.wait_all_tasks_blocked()
        return self.served[-1]


@pytest.mark.parametrize(
    ("places", "percent", "most"),
    [
        (1, 90, 1),
        (2, 90, 1),
        (3, 90, 2),
        (10, 90, 9),
        (64, 90, 58),
        (64, 50, 32),
        (5, 1, 1),
        (0, 90, 0),
        (2, 99, 1),
        (2, 100, 2),
    ],
)
def test_a_share_is_rounded_up_and_never_all_but_where_that_is_what_it_says(places: int, percent: int, most: int) -> None:
    assert places_of(places, percent) == most


# each served one gives its slot back before the next is served, or keeps it
ROWS = [
    ("the order of arrival, where each is a party", "a1 b1 c1 d1", {}, False, "a1 b1 c1 d1"),
    ("the order of arrival, where all are one", "a1 a2 a3", {}, False, "a1 a2 a3"),
    ("parties take turns, whoever came with more", "a1 a2 a3 b1 b2 c1", {}, False, "a1 b1 c1 a2 b2 a3"),
    ("one that comes late is not behind all of another's", "a1 a2 a3 a4 b1", {}, False, "a1 b1 a2 a3 a4"),
    ("who has fewest goes first, however late", "a1 b1 c1", {"a": 2, "b": 1}, False, "c1 b1 a1"),
    ("what is given counts", "a1 a2 a3 b1 c1", {"b": 1}, True, "a1 c1 b1 a2 a3"),
    ("a lower number goes before a party that has none", "b1 a1:1 a2:1", {"a": 5}, False, "a1 a2 b1"),
    ("within each level parties take turns", "a1:2 a2:2 b1:2 b2:1 a3:1", {}, False, "b2 a3 a1 b1 a2"),
]


@pytest.mark.parametrize(("about", "arrive", "used", "keep", "served"), ROWS, ids=[row[0] for row in ROWS])
async def test_who_is_next(about: str, arrive: str, used: dict[str, int], keep: bool, served: str) -> None:
    async with trio.open_nursery() as nursery:
        waiting = Waiting(nursery, SlotQueue(100, 100))
        for name, n in used.items():
            for _ in range(n):
                waiting.queue.take(waiting.party(name))
        for name in arrive.split():
            caller, _, level = name.partition(":")
            await waiting.wait(caller, int(level or 8))
        for _ in served.split():
            caller = await waiting.next()
            assert caller is not None
            if not keep:
                waiting.queue.give_back(waiting.party(caller))
        assert waiting.served == served.split()
        assert len(waiting.queue) == 0


async def test_a_party_that_has_its_share_is_passed_over_until_it_gives_one_back() -> None:
    async with trio.open_nursery() as nursery:
        waiting = Waiting(nursery, SlotQueue(4, 100, 75))
        for name in ("a1", "a2", "a3", "a4", "a5:1", "b1"):
            caller, _, level = name.partition(":")
            await waiting.wait(caller, int(level or 8))
        assert [await waiting.next() for _ in range(5)] == ["a5", "b1", "a1", "a2", None]
        a, b = waiting.party("a"), waiting.party("b")
        assert (waiting.queue.used_by(a), waiting.queue.may_take(a), waiting.queue.may_take(b)) == (3, False, True)
        assert (waiting.queue.wanted, waiting.queue.wanted_of) == (0, {a: 2})
        waiting.queue.give_back(b)
        assert await waiting.next() is None
        waiting.queue.give_back(a)
        assert [await waiting.next(), await waiting.next()] == ["a3", None]
        waiting.queue.give_back(a)
        assert await waiting.next() == "a4"


async def test_a_key_may_say_less_and_not_more() -> None:
    queue = SlotQueue(10, 10, 50)
    less, more = Party("less", share=20), Party("more", share=100)
    for party, most in ((less, 2), (more, 5)):
        for _ in range(most):
            assert queue.may_take(party)
            queue.take(party)
        assert not queue.may_take(party)
    async with trio.open_nursery() as nursery:
        for n in range(3):
            assert queue.may_wait(less) is (n < 2)
            nursery.start_soon(queue.wait, less, 8)
            await trio.testing.wait_all_tasks_blocked()
        assert not queue.may_wait(less)
        assert queue.may_wait(Party("other"))
        nursery.cancel_scope.cancel()


class Naive:
    """The rule, looked up from the beginning each time."""

    def __init__(self, slots: int, percent: int) -> None:
        self.used: dict[str, int] = {}
        self.most = places_of(slots, percent)
        self.lines: dict[tuple[int, str], list[str]] = {}
        self.since: dict[tuple[int, str], int] = {}
        self._now = 0

    def now(self) -> int:
        self._now += 1
        return self._now

    def wait(self, name: str, level: int) -> None:
        line = self.lines.setdefault((level, name[0]), [])
        if not line:
            self.since[level, name[0]] = self.now()
        line.append(name)

    def leave(self, name: str) -> None:
        for line in self.lines.values():
            if name in line:
                line.remove(name)

    def next(self) -> str | None:
        may = [key for key, line in self.lines.items() if line and self.used.get(key[1], 0) < self.most]
        if not may:
            return None
        chosen = min(may, key=lambda key: (key[0], self.used.get(key[1], 0), self.since[key]))
        self.since[chosen] = self.now()
        self.used[chosen[1]] = self.used.get(chosen[1], 0) + 1
        return self.lines[chosen].pop(0)


@given(
    st.integers(1, 6),
    st.sampled_from([50, 90, 100]),
    st.lists(st.tuples(st.sampled_from("wwwwnnnggl"), st.integers(0, 5), st.sampled_from([1, 8, 8, 8])), max_size=60),
)
def test_it_is_what_the_rule_says_whatever_happens(slots: int, percent: int, steps: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        async with trio.open_nursery() as nursery:
            waiting, naive = Waiting(nursery, SlotQueue(slots, 100, percent)), Naive(slots, percent)
            there: list[str] = []
            for number, (act, which, level) in enumerate(steps):
                party = "abcdef"[which]
                if act == "w":
                    there.append(name := f"{party}{number}")
                    naive.wait(name, level)
                    await waiting.wait(name, level)
                elif act == "n":
                    expected = naive.next()
                    assert await waiting.next() == expected
                    if expected is not None:
                        there.remove(expected)
                elif act == "g" and naive.used.get(party):
                    naive.used[party] -= 1
                    waiting.queue.give_back(waiting.party(party))
                elif act == "l" and there:
                    naive.leave(name := there.pop(which % len(there)))
                    await waiting.leave(name)
                assert len(waiting.queue) == len(there)
                assert all(waiting.queue.used_by(waiting.party(name)) == n for name, n in naive.used.items())
                blocked = waiting.queue.wanted_of
                assert waiting.queue.wanted + sum(blocked.values()) == len(there)
            for name in there:
                await waiting.leave(name)
            for party, n in naive.used.items():
                for _ in range(n):
                    waiting.queue.give_back(waiting.party(party))
            assert waiting.queue._used == waiting.queue._members == {}
            assert not waiting.queue._levels

    trio.run(play)


@contextmanager
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """How many entries of a level are looked at."""
    seen: list[Any] = []
    means = slot_queue._Level._means

    def counted(self: Any, entry: Any) -> bool:
        seen.append(entry)
        return means(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(slot_queue._Level, "_means", counted)
        yield seen


@pytest.mark.parametrize("parties", [1, 100, 3000])
async def test_a_wake_does_not_look_at_all_who_wait(parties: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, callers, served = SlotQueue(10_000, 10_000), [Party(str(n)) for n in range(parties)], list[Party]()

    async def caller(party: Party) -> None:
        await queue.wait(party, 8)
        served.append(party)

    async with trio.open_nursery() as nursery:
        for n in range(3000):
            nursery.start_soon(caller, callers[n % parties])
        await trio.testing.wait_all_tasks_blocked()
        with looks(monkeypatch) as seen:
            for n in range(3000):
                queue.wake()
                if n % 2:
                    await trio.testing.wait_all_tasks_blocked()
                    queue.give_back(served[-1])
            assert len(seen) < 6 * 3000
