"""The slots of one model: the callers that have one, those that wait for one, and the share of each party."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns
from typing import final

import trio

from gateway.doorbell import Doorbell
from gateway.errors import OthersWait, Overloaded, Refusal, TooLarge, Unavailable
from gateway.party import Party
from gateway.workers.caller import Caller, CallSpans
from gateway.workers.slot import Slot
from gateway.workers.slot_queue import SlotQueue, level_of, places_of
from gateway.workers.states import Life
from gateway.workers.statistics import ModelStatistics
from gateway.workers.stuck import StuckWatch
from models.blocking import throw
from models.spec import ModelSpec


@final
class Slots:
    """The places of a model for concurrent calls, and the queue for them.

    One party holds at most its share of both. The slots of each party are counted only while so many are taken that a party
    could have its whole share, or a caller waits. Counting costs nothing while many are free.

    The slots are `open` while the model can be called. When they are closed, a caller without a slot goes to the slots of
    the `successor`, or gets an error. Slots keep only numbers of the spec, so that a reference to them does not keep the
    model alive.
    """

    __slots__ = (
        "_always",
        "_counting",
        "_idle_when_wanted",
        "_life",
        "_most_queued",
        "_most_queued_bytes",
        "_name",
        "_percent",
        "_queue_timeout",
        "_replaced",
        "_spans",
        "_special",
        "_stop_within",
        "_timeout",
        "_unwatched",
        "bodies",
        "body_bytes",
        "brink",
        "capacity",
        "free",
        "left",
        "lingering",
        "live",
        "most_bytes",
        "open",
        "queue",
        "queued_bytes",
        "statistics",
        "stuck",
        "successor",
        "waiting",
    )  # fmt: skip

    def __init__(self, spec: ModelSpec, life: Life, statistics: ModelStatistics, spans: CallSpans | None = None) -> None:
        self._name, self._life, self._spans, self.statistics = spec.name, life, spans, statistics
        self.open = False
        self.successor: Slots | None = None
        """The slots of the worker that took over in a reload; None if there was none."""
        self.capacity = self.free = spec.capacity
        self._replaced = set[Slot]()
        self._timeout, self._stop_within = spec.timeout, spec.stop_within
        self._special = bool(spec.timeout or spec.stop_within or spec.body_bytes)
        self._percent = spec.party_share
        self.queue = SlotQueue(spec.capacity, spec.queue, spec.party_share)
        self._unwatched = self.brink = spec.capacity - places_of(spec.capacity, spec.party_share)
        """`brink`: if at most so many slots are free, a party's share is checked before it takes one."""
        self._counting = False
        """True if `queue` counts the slots of each party. Then `brink` is the capacity, so that every call is counted."""
        self._always = False
        """True if counting never stops, because the share of some key is less than the model's."""
        self._most_queued, self._queue_timeout = spec.queue, spec.queue_timeout
        self._idle_when_wanted = spec.idle_when_wanted
        self.queued_bytes, self._most_queued_bytes = 0, spec.queue_bytes
        """Bytes of the budget that waiting callers hold, and the most that they may hold (0: no limit)."""
        self.most_bytes = spec.body_bytes
        """The bytes that the bodies of running sessions may hold together; 0: no limit."""
        self.bodies: dict[Slot, int] = {}
        """The bytes that the body of each running session holds. Empty if there is no limit."""
        self.body_bytes = 0
        """The sum of these, and of the bodies of sessions that were just admitted."""
        self.live: set[Caller] = set()
        """Callers that have a slot or wait for one."""
        self.waiting: set[Caller] = set()
        """Callers that wait for a slot."""
        self.lingering: set[Slot] = set()
        """Slots whose sessions are over while some of their steps go on."""
        self.left = Doorbell()
        """Rings when something has ended while the slots are closed."""
        self.stuck = StuckWatch(spec, self.left.ring)
        """Watches steps and sessions that do not come back."""

    @property
    def queued(self) -> int:
        """The number of callers that wait."""
        return len(self.queue)

    @property
    def in_use(self) -> int:
        """The number of taken slots, including stuck ones that were replaced."""
        return self.capacity - self.free + len(self._replaced)

    @property
    def balanced(self) -> bool:
        """True if the counted slots of all parties are the taken ones. True whenever tasks can observe it; for tests."""
        return not self._counting or self.queue.used == self.capacity - self.free

    # -- for callers of the model -----------------------------------------------------------------------------------

    def take_now(self, caller: Caller) -> Slot | None:
        """Does the same as `take` if a slot is free at once; otherwise None."""
        if not self.open:
            if self.successor is not None:
                return self.successor.take_now(caller)
            self._life.check()
        if (self.free <= self.brink or self.most_bytes or caller.key is not None) and not self._admits(caller):
            return None
        self.free -= 1
        self.live.add(caller)
        return self._slot(caller, held=self.most_bytes and caller.held) if self._special else Slot(self, caller)

    def _admits(self, caller: Caller) -> bool:
        """True if a free slot may go to the caller at once. Then the slot counts for its party, and the bytes for its
        body."""
        if not self._counting:
            if caller.key is not None and caller.key.share is not None:
                self._always = True
            if self._always or self.free <= self.brink:
                self._begin_counting()
        if not self._counting:
            return bool(self.free) and (not self.most_bytes or self._fits(caller.held))
        if not self.free or not self.queue.may_take(party := caller.party):
            return False
        if self.most_bytes and not self._fits(caller.held):
            return False
        self.queue.take(party)
        return True

    def _fits(self, held: int) -> bool:
        """True if `held` bytes are free for a body, and no caller waits that goes first. Then they are taken."""
        if self.queue.next_held is not None or self.body_bytes + held > self.most_bytes:
            return False
        self.body_bytes += held
        return True

    def room_for(self, caller: Caller) -> bool:
        """True if a slot is free and the caller's party has less than its share."""
        if not self._counting and self.free <= self.brink:
            self._begin_counting()
        return bool(self.free) and (not self._counting or self.queue.may_take(caller.party))

    # -- the slots of parties ----------------------------------------------------------------------------------------

    def _begin_counting(self) -> None:
        self._counting, self.brink = True, self.capacity
        for party in self._parties():
            self.queue.take(party)

    def _parties(self) -> Iterator[Party]:
        """Yields the party of each taken slot that was not replaced."""
        replaced = {slot.caller for slot in self._replaced}
        for caller in self.live:
            if caller not in self.waiting and caller not in replaced:
                yield caller.party
        for slot in self.lingering:
            if slot not in self._replaced:
                yield slot.caller.party

    def _count_less(self, caller: Caller) -> None:
        """Counts a slot less, which this caller had, and admits the next callers."""
        queue = self.queue
        queue.give_back(caller.party)
        if self.waiting:
            self._admit()
        elif 2 * self.free > self.capacity and not self._always:
            # only at half: right above the brink, almost every call would begin to count again
            self._counting, self.brink = False, self._unwatched
            queue.forget()

    def _slot(self, caller: Caller, asked: int = 0, *, held: int) -> Slot:
        if self._timeout:
            caller.limit_time(self._timeout, f"models.{self._name}.timeout")
        slot = Slot(self, caller, asked)
        if self._stop_within:
            slot.watched()
        if self.most_bytes:
            slot.weighed()
            self.bodies[slot] = held
        return slot

    async def take(self, caller: Caller) -> Slot:
        """Waits for a slot for one caller: `with await worker.slots.take(caller):`. Callers wait in the order of
        `caller.priority`, their party's use, and their arrival (`SlotQueue`). Overloaded at once if the queue is full, and
        after `queue_timeout`; DeadlineExceeded if the caller's time is over when its turn comes."""
        slot = self.take_now(caller)
        if slot is not None:
            return slot
        if self.successor is not None:
            return await self.successor.take(caller)
        asked = perf_counter_ns()
        self.live.add(caller)
        self.waiting.add(caller)
        try:
            held = await self._wait(caller)
        except BaseException:
            self.live.discard(caller)
            self.left.ring()
            now = perf_counter_ns()
            self.statistics.failure(now, now - asked, cancelled=caller.gone)
            raise
        finally:
            self.waiting.discard(caller)
            if self._spans is not None:
                self._spans.waited(self._name, asked)
        return self._slot(caller, asked, held=held)

    async def _wait(self, caller: Caller) -> int:
        """Waits for a slot. Returns the bytes that the caller held when it began to wait, which now count for its body."""
        held, limit, party = caller.held, self._queue_timeout, caller.party
        if not self._counting:
            self._begin_counting()
        self.check_queue(held, party)
        self.queued_bytes += held
        caller.slot_wait_began()
        try:
            if limit:
                with trio.move_on_after(limit) as scope:
                    await self.queue.wait(party, level_of(caller.priority), held)
                if scope.cancelled_caught:
                    why = f"no slot was free within {limit:g} s (models.{self._name}.queue_timeout)"
                    raise self._busy(why, Refusal.QUEUE_TIMEOUT)
            else:
                await self.queue.wait(party, level_of(caller.priority), held)
        except BaseException:
            if self.most_bytes:
                self._admit()  # the bodies behind it may be smaller
            raise
        finally:
            caller.slot_wait_over()
            self.queued_bytes -= held
        try:
            if trio.current_time() >= caller.deadline:
                throw(caller.interruption_or_deadline)  # its client no longer waits for the answer
            self.check_still_loaded()
        except BaseException:
            if self.most_bytes:
                self.body_bytes -= held
            self.released(caller)
            raise
        return held

    def check_room(self, caller: Caller) -> None:
        """Raises Overloaded if the caller could not even wait."""
        if not self.room_for(caller):
            self.check_queue(0, caller.party)

    def check_queue(self, held: int, party: Party) -> None:
        """Raises Overloaded if no more callers may wait, no more of this party, or none that holds `held` bytes. TooLarge if
        such a body can never run."""
        name, most = self._name, self.most_bytes
        if most and held > most:
            raise TooLarge(
                f"the body holds {held} bytes, and those of the sessions that run may hold {most} together "
                f"(models.{name}.body_bytes)"
            )
        if self.queued >= self._most_queued:
            if self.free and not self.queue.may_take(party):
                raise self._beyond_share(party)
            raise self._busy(
                f"{self.capacity} sessions run and {self.queued} wait (models.{name}.capacity, models.{name}.queue)"
            )
        if not self.queue.may_wait(party):
            raise self._beyond_share(party)
        if self._most_queued_bytes and self.queued_bytes + held > self._most_queued_bytes:
            raise self._busy(
                f"{self.queued} sessions wait with {self.queued_bytes} bytes, and there is no room for {held} more "
                f"(models.{name}.queue_bytes)"
            )

    def _beyond_share(self, party: Party) -> Overloaded:
        used, waiting = self.queue.used_by(party), self.queue.waiting_of(party)
        whose, share = f"models.{self._name}.party_share", self._percent
        if party.share is not None and party.share < share:
            whose, share = "share of its key", party.share
        return self._busy(
            f"this client has {used} of {self.capacity} slots and {waiting} of {self._most_queued} places in the queue, "
            f"and one party may have {share} percent of each ({whose})",
            Refusal.PARTY_SHARE,
        )

    def _busy(self, why: str, refusal: Refusal = Refusal.QUEUE) -> Overloaded:
        after = retry_estimate(self.queued, self.capacity, self.statistics.service)
        return Overloaded(f"model {self._name!r} is busy: {why}; try again later", retry_after=after, refusal=refusal)

    def check_still_loaded(self) -> None:
        """Raises Unavailable unless a caller that has a slot, or is just given one, can call the model."""
        if self.successor is None:
            self._life.check()
        elif not self._life.there:
            raise Unavailable(f"model {self._name!r} was reloaded, and its old version is gone; try again")

    # -- for ending slots, and for the worker ------------------------------------------------------------------------

    def released(self, caller: Caller) -> None:
        """Frees the slot of a caller whose session and steps are all over."""
        self.free += 1
        if self._counting:
            self._count_less(caller)
        if not self.open:
            self.left.ring()

    def _admit(self) -> None:
        """Gives free slots to the next callers while their bodies fit. No caller passes one whose body does not fit."""
        queue = self.queue
        while self.free and (held := queue.next_held) is not None:
            if self.most_bytes:
                if self.body_bytes + held > self.most_bytes:
                    return
                self.body_bytes += held
            self.free -= 1
            queue.wake()

    def body_gone(self, slot: Slot) -> None:
        """Frees the bytes of a session's body, of which nothing is left. Called only if bodies are bounded."""
        self.body_bytes -= self.bodies.pop(slot)

    def replaced(self, slot: Slot) -> None:
        """Adds a free slot in place of a stuck one."""
        self.released(slot.caller)
        self._replaced.add(slot)

    def replacement_back(self, slot: Slot) -> None:
        """Takes note that a replaced slot has ended. Its place was freed before."""
        self._replaced.discard(slot)
        if self.most_bytes:
            self._admit()
        self.left.ring()

    def tick(self, now: float) -> None:
        """Ends sessions that have been silent for too long (`idle_when_wanted`), the longest silent first: as many as there
        are callers that their slots would serve. The coarse timer calls this."""
        if not self.waiting or not (limit := self._idle_when_wanted):
            return
        held = [caller for caller in self.live if caller not in self.waiting]
        silent = [(silence, caller) for caller in held if (silence := caller.silence(now)) >= limit]
        if not silent:
            return
        silent.sort(key=lambda one: one[0], reverse=True)
        wanted, wanted_of = self.queue.wanted, self.queue.wanted_of
        why = f"others wait: no message in either direction for {limit:g} s (models.{self._name}.idle_when_wanted)"
        for _, caller in silent:
            if wanted > 0:
                wanted -= 1
            elif wanted_of and wanted_of.get(caller.party, 0) > 0:
                wanted_of[caller.party] -= 1
            else:
                continue
            if caller.cancelled_at is None:  # otherwise it ends already
                caller.interrupt(OthersWait(why))

    async def sessions_over(self) -> None:
        """Waits until no slot is in use and no thread of a session is left. Call it while the slots are closed."""
        while self.in_use or self.stuck.now:
            await self.left.wait()

    async def all_left(self) -> None:
        """Waits until no caller has a slot or waits for one, and no thread of a session is left. Call it while the slots
        are closed."""
        while self.in_use or self.live or self.stuck.now:
            await self.left.wait()


def retry_estimate(queued: int, capacity: int, service: float) -> float:
    """Estimates the seconds until a new request has a slot: (waiting + 1) / capacity * mean call time, from 1 to 60."""
    return min(max((queued + 1) / capacity * service, 1.0), 60.0)
