"""The queue for a model's slots: the tasks that wait at each level, the slots of each party, and the next task."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import final

import trio

from gateway.party import Party

LEVELS = 16
"""The number of priority levels. Level 1 is served first."""
DEFAULT_LEVEL = 8
"""The level of a request without a priority."""
_STALE = 64  # stale entries that a heap may have, beyond as many as are valid


def level_of(priority: int) -> int:
    """Returns the level of a request's priority. Values outside 1 to 16 count as the default, as in Triton for values
    beyond a model's levels."""
    return priority if 1 <= priority <= LEVELS else DEFAULT_LEVEL


def places_of(places: int, percent: int) -> int:
    """Returns how many of `places` one party may hold: `percent` of them, rounded up. Below 100 percent that is never all,
    if there are two or more."""
    return places if places < 2 or percent >= 100 else min(-(-places * percent // 100), places - 1)


@final
class _Line:
    """The tasks of one party that wait at one level."""

    __slots__ = ("level", "member", "since", "waiting")

    def __init__(self, level: int, member: _Member, since: int) -> None:
        self.level, self.member = level, member
        self.since = since
        """The arrival number at which the party began to wait here, or was served last."""
        self.waiting: dict[trio.lowlevel.Task, int] = {}  # tasks, and the bytes that each holds

    def __lt__(self, _: object) -> bool:
        return False  # two entries of the same rank belong to the same line


@final
class _Member:
    """A party of which at least one task waits."""

    __slots__ = ("lines", "most", "party", "used", "waiting")

    def __init__(self, party: Party, used: int, most: int) -> None:
        self.party, self.used, self.most = party, used, most
        """The slots that the party has, and the most that it may have."""
        self.waiting = 0
        self.lines: dict[int, _Line] = {}


@final
class _Level:
    """The lines of one level, as a heap by rank. A line has an entry for each rank that it has had; only the last one is
    valid. A line whose party has all slots that it may have has no valid entry."""

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
    """Tasks that wait for a slot, and the number of slots of each party while these are counted.

    The next task is of the lowest level; there, of the party with the fewest slots in use; of those, the party that was
    served longest ago, or has waited longest without being served; and of that party, the task that came first. A party
    that has its share is passed over. There is no ageing: while tasks of a lower level come faster than slots, the others
    wait.
    """

    __slots__ = ("_arrivals", "_levels", "_members", "_most", "_n", "_percent", "_places", "_slots", "_used")

    def __init__(self, slots: int, places: int = 0, percent: int = 100) -> None:
        """One party may hold `percent` of the slots, and of the `places` in this queue, as `places_of` counts them."""
        self._slots, self._places, self._percent = slots, places, percent
        self._most = places_of(slots, percent)
        self._levels: dict[int, _Level] = {}
        self._used: dict[Party, int] = {}  # parties that have slots
        self._members: dict[Party, _Member] = {}  # parties of which tasks wait
        self._arrivals = count()
        self._n = 0

    def __len__(self) -> int:
        return self._n

    # -- the slots of parties ----------------------------------------------------------------------------------------

    def used_by(self, party: Party) -> int:
        """Returns the number of slots that a party has."""
        return self._used.get(party, 0)

    @property
    def used(self) -> int:
        """The number of slots that all parties have."""
        return sum(self._used.values())

    def waiting_of(self, party: Party) -> int:
        """Returns the number of tasks of a party that wait."""
        member = self._members.get(party)
        return 0 if member is None else member.waiting

    def may_take(self, party: Party) -> bool:
        """True if a party has less than its share of the slots."""
        return self._used.get(party, 0) < self._most_of(party)

    def may_wait(self, party: Party) -> bool:
        """True if a party has less than its share of the places in the queue."""
        member = self._members.get(party)
        return member is None or member.waiting < places_of(self._places, self._share(party))

    def take(self, party: Party) -> None:
        """Counts one more slot of a party."""
        used = self._used[party] = self._used.get(party, 0) + 1
        if self._members and (member := self._members.get(party)) is not None:
            self._moved(member, used)

    def give_back(self, party: Party) -> None:
        """Counts one slot less of a party."""
        used = self._used.pop(party) - 1
        if used:
            self._used[party] = used
        if self._members and (member := self._members.get(party)) is not None:
            self._moved(member, used)

    def forget(self) -> None:
        """Forgets the slots of all parties, because they are no longer counted. No task may wait."""
        assert not self._n
        self._used.clear()

    @property
    def wanted(self) -> int:
        """The number of waiting tasks that any free slot would serve: their party has less than its share."""
        return sum(member.waiting for member in self._members.values() if member.used < member.most)

    @property
    def wanted_of(self) -> dict[Party, int]:
        """The number of waiting tasks of each party that has its whole share. They wait for a slot of their own party."""
        return {party: m.waiting for party, m in self._members.items() if m.waiting and m.used >= m.most}

    def _share(self, party: Party) -> int:
        return self._percent if party.share is None else min(party.share, self._percent)

    def _most_of(self, party: Party) -> int:
        return self._most if party.share is None else places_of(self._slots, self._share(party))

    def _moved(self, member: _Member, used: int) -> None:
        """Ranks the lines of a party anew, after its number of slots has changed."""
        member.used = used
        if used < member.most:
            for line in member.lines.values():
                self._levels[line.level].push(line)

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def wait(self, party: Party, level: int, held: int = 0) -> None:
        """Waits in the queue until `wake` chooses this task. If it is cancelled, the task has left the queue. `held` is the
        number of bytes for `next_held`."""
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
        """The bytes that the next task holds; None if no waiting task may have a free slot."""
        return None if (line := self._next()) is None else next(iter(line.waiting.values()))

    def wake(self) -> None:
        """Wakes the next task and counts a slot for its party. There must be a task that may have a slot."""
        line = self._next()
        assert line is not None, "no task waits that may have a slot"
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
