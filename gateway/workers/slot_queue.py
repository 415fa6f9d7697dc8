"""The queue for a model's slots: who waits at which level, what each party has, and so who is next."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import final

import trio

from gateway.party import Party

LEVELS = 16
"""Levels of priority: 1 is served first."""
DEFAULT_LEVEL = 8
"""That of a request that does not say."""
_STALE = 64  # entries of a heap that may mean nobody any more, beside as many as mean somebody


def level_of(priority: int) -> int:
    """The level that a request's priority means: out of 1 to 16 it is the default, as Triton has it for what a model's
    levels do not reach."""
    return priority if 1 <= priority <= LEVELS else DEFAULT_LEVEL


def places_of(places: int, percent: int) -> int:
    """How many of so many places one party may hold: its percentage, rounded up, and never all where there are two or more;
    but all where that is what 100 percent says."""
    return places if places < 2 or percent >= 100 else min(-(-places * percent // 100), places - 1)


@final
class _Line:
    """Those of one party that wait at one level."""

    __slots__ = ("level", "member", "since", "waiting")

    def __init__(self, level: int, member: _Member, since: int) -> None:
        self.level, self.member = level, member
        self.since = since
        """Since when the party waits here: since it was served last, or has had somebody waiting."""
        self.waiting: dict[trio.lowlevel.Task, int] = {}  # with what each holds

    def __lt__(self, _: object) -> bool:
        return False  # two entries of one rank are one line's


@final
class _Member:
    """A party, while somebody of it waits."""

    __slots__ = ("lines", "most", "party", "used", "waiting")

    def __init__(self, party: Party, used: int, most: int) -> None:
        self.party, self.used, self.most = party, used, most
        """The slots that it has, and may have."""
        self.waiting = 0
        self.lines: dict[int, _Line] = {}


@final
class _Level:
    """The lines of one level, the next one first. A line has an entry for each rank it has had: those of former ones mean
    nobody. One whose party has all that it may have has none."""

    __slots__ = ("heap", "lines")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, _Line]] = []
        self.lines = 0

    def push(self, line: _Line) -> None:
        heap = self.heap
        if len(heap) > 2 * self.lines + _STALE:
            heap[:] = [entry for entry in heap if self._means(entry)]
            heapify(heap)
        heappush(heap, (line.member.used, line.since, line))

    def first(self) -> _Line | None:
        heap = self.heap
        while heap:
            if self._means(heap[0]):
                return heap[0][2]
            heappop(heap)
        return None

    def _means(self, entry: tuple[int, int, _Line]) -> bool:
        used, since, line = entry
        return bool(line.waiting) and line.since == since and line.member.used == used


@final
class SlotQueue:
    """Tasks that wait for a slot, and how many slots each party has, from when these are counted.

    Who is next: of the lowest level the party with the fewest slots in use, of these the one that waits longest, since it
    was served last or has had somebody waiting; and of a party who came first. A party that has its share is passed over.
    There is no ageing: as long as those of a lower number come faster than slots, the others wait.
    """

    __slots__ = ("_arrivals", "_levels", "_members", "_most", "_n", "_percent", "_places", "_slots", "_used")

    def __init__(self, slots: int, places: int = 0, percent: int = 100) -> None:
        """`percent` of the slots, and of the places here, are what one party may hold: as `places_of` counts them."""
        self._slots, self._places, self._percent = slots, places, percent
        self._most = places_of(slots, percent)
        self._levels: dict[int, _Level] = {}
        self._used: dict[Party, int] = {}  # of those who have some
        self._members: dict[Party, _Member] = {}  # of those who wait
        self._arrivals = count()
        self._n = 0

    def __len__(self) -> int:
        return self._n

    # -- what parties have -------------------------------------------------------------------------------------------

    def used_by(self, party: Party) -> int:
        """The slots that it has."""
        return self._used.get(party, 0)

    def waiting_of(self, party: Party) -> int:
        """How many of it wait."""
        member = self._members.get(party)
        return 0 if member is None else member.waiting

    def may_take(self, party: Party) -> bool:
        """Whether it has less than its share of the slots."""
        return self._used.get(party, 0) < self._most_of(party)

    def may_wait(self, party: Party) -> bool:
        """Whether it has less than its share of the places."""
        member = self._members.get(party)
        return member is None or member.waiting < places_of(self._places, self._share(party))

    def take(self, party: Party) -> None:
        """It has one slot more."""
        used = self._used[party] = self._used.get(party, 0) + 1
        if self._members and (member := self._members.get(party)) is not None:
            self._moved(member, used)

    def give_back(self, party: Party) -> None:
        """It has one less."""
        used = self._used.pop(party) - 1
        if used:
            self._used[party] = used
        if self._members and (member := self._members.get(party)) is not None:
            self._moved(member, used)

    def forget(self) -> None:
        """Slots are not counted from now on; nobody may wait."""
        assert not self._n
        self._used.clear()

    @property
    def wanted(self) -> int:
        """How many wait for no more than that a slot is free."""
        return sum(member.waiting for member in self._members.values() if member.used < member.most)

    @property
    def wanted_of(self) -> dict[Party, int]:
        """How many of a party wait for it to give back one of its own slots, of which it has all that it may have."""
        return {party: m.waiting for party, m in self._members.items() if m.waiting and m.used >= m.most}

    def _share(self, party: Party) -> int:
        return self._percent if party.share is None else min(party.share, self._percent)

    def _most_of(self, party: Party) -> int:
        return self._most if party.share is None else places_of(self._slots, self._share(party))

    def _moved(self, member: _Member, used: int) -> None:
        """It has another number of slots: its lines have another rank."""
        member.used = used
        if used < member.most:
            for line in member.lines.values():
                self._levels[line.level].push(line)

    # -- who waits -----------------------------------------------------------------------------------------------------

    async def wait(self, party: Party, level: int, held: int = 0) -> None:
        """Returns when this task is the one that `wake` means. Cancelled, it has left the queue. `held` is what
        `next_held` says of it."""
        task = trio.lowlevel.current_task()
        member = self._members.get(party)
        if member is None:
            member = self._members[party] = _Member(party, self._used.get(party, 0), self._most_of(party))
        line = member.lines.get(level) or self._new_line(member, level)
        line.waiting[task] = held
        member.waiting += 1
        self._n += 1

        def leave(_: object) -> trio.lowlevel.Abort:
            self._remove(line, task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(leave)

    def _new_line(self, member: _Member, level: int) -> _Line:
        line = member.lines[level] = _Line(level, member, next(self._arrivals))
        found = self._levels.get(level)
        if found is None:
            found = self._levels[level] = _Level()
        found.lines += 1
        if member.used < member.most:
            found.push(line)
        return line

    @property
    def next_held(self) -> int | None:
        """What who is next holds; None where nobody waits who may have a slot that is free."""
        return None if (line := self._next()) is None else next(iter(line.waiting.values()))

    def wake(self) -> None:
        """Wakes who is next, whose party has one slot more; there must be somebody."""
        line = self._next()
        assert line is not None, "somebody waits who may have a slot"
        task = next(iter(line.waiting))
        line.since = next(self._arrivals)
        self._remove(line, task)
        self.take(line.member.party)
        trio.lowlevel.reschedule(task)

    def _next(self) -> _Line | None:
        levels = self._levels
        for level in levels if len(levels) < 2 else sorted(levels):
            if (line := levels[level].first()) is not None:
                return line
        return None

    def _remove(self, line: _Line, task: trio.lowlevel.Task) -> None:
        del line.waiting[task]
        self._n -= 1
        member = line.member
        member.waiting -= 1
        if line.waiting:
            return
        del member.lines[line.level]
        level = self._levels[line.level]
        level.lines -= 1
        if not level.lines:
            del self._levels[line.level]
        if not member.lines:
            del self._members[member.party]
