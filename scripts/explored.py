"""Explores a machine: gives it every input in every state that can be reached, breadth first."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from protocols.errors import LocalProtocolError, RemoteProtocolError

M = TypeVar("M")


class Who(enum.Enum):
    """The side that makes an input."""

    PEER = "received"
    WE = "sent"
    TIME = "neither"


class NotNow(Exception):
    """Raised for an input that has no meaning in the machine's state: nothing is learnt from it."""


@dataclass(frozen=True, kw_only=True)
class Input(Generic[M]):
    """Something that can happen to a machine. `do` raises LocalProtocolError if the machine refuses it, RemoteProtocolError
    if it is the peer's mistake."""

    name: str
    who: Who
    do: Callable[[M], None]


@dataclass(frozen=True, kw_only=True)
class View(Generic[M]):
    """One question about a machine, whose answers are the states of a diagram."""

    name: str
    title: str
    states: Mapping[str, str]
    """The states with their meanings, in the order of the diagram; the first is the initial state."""
    of: Callable[[M], str]
    tells: tuple[Who, ...]
    """The sides whose inputs the states decide on: which ones may be sent in each, and which the peer may not send."""


@dataclass(frozen=True, order=True, kw_only=True)
class Transition:
    """`inputs` lead from one state to another, sorted as the inputs are declared; `who` makes them."""

    start: str
    end: str
    who: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of exploring a view."""

    transitions: Sequence[Transition]
    may_send: Mapping[str, Sequence[str]]
    """The inputs of the machine's own side that each state accepts, at least sometimes."""
    never: Mapping[str, Sequence[str]]
    """The inputs that the peer may never send in each state: they were its mistake each time."""
    situations: int
    """The number of situations of the machine that were told apart."""


def explore(
    make: Callable[[], M], inputs: Sequence[Input[M]], key: Callable[[M], Hashable], views: Sequence[View[M]]
) -> dict[str, Found]:
    """Gives every input to the machine in each situation that can be reached. Situations with equal `key` are the same.
    To reach a situation, a new machine gets the inputs of the shortest way there, so no machine is copied."""

    def after(path: Sequence[Input[M]]) -> M:
        machine = make()
        for step in path:
            step_of(machine, step)
        return machine

    steps: dict[str, dict[tuple[str, str, Who], dict[str, None]]] = {view.name: {} for view in views}
    accepted: dict[str, dict[str, set[str]]] = {view.name: {} for view in views}
    outcomes: dict[str, dict[tuple[str, str], set[bool]]] = {view.name: {} for view in views}
    known: set[Hashable] = {key(make())}
    frontier: list[tuple[Input[M], ...]] = [()]
    while frontier:
        path = frontier.pop(0)
        for given in inputs:
            machine = after(path)
            before = [view.of(machine) for view in views]
            try:
                legal = step_of(machine, given)
            except (NotNow, LocalProtocolError):
                continue
            for view, start in zip(views, before, strict=True):
                end = view.of(machine)
                if start not in view.states or end not in view.states:
                    raise AssertionError(f"{view.name}: {start} or {end} is no state of it")
                if given.who is Who.WE:
                    accepted[view.name].setdefault(start, set()).add(given.name)
                if given.who is Who.PEER:
                    outcomes[view.name].setdefault((start, given.name), set()).add(legal)
                if start != end:
                    name = given.name if legal else "a protocol error"
                    steps[view.name].setdefault((start, end, given.who), {})[name] = None
            if (reached := key(machine)) not in known:
                known.add(reached)
                frontier.append((*path, given))
    return {
        view.name: _found(view, inputs, steps[view.name], accepted[view.name], outcomes[view.name], len(known))
        for view in views
    }


def step_of(machine: M, given: Input[M]) -> bool:
    """Gives an input to the machine. False if it was the peer's mistake."""
    try:
        given.do(machine)
    except RemoteProtocolError:
        return False
    return True


def _found(
    view: View[M],
    inputs: Sequence[Input[M]],
    steps: Mapping[tuple[str, str, Who], Mapping[str, None]],
    accepted: Mapping[str, set[str]],
    outcomes: Mapping[tuple[str, str], set[bool]],
    situations: int,
) -> Found:
    order = {given.name: at for at, given in enumerate(inputs)} | {"a protocol error": len(inputs)}
    place = {state: at for at, state in enumerate(view.states)}
    who = {member: at for at, member in enumerate(Who)}
    transitions = [
        Transition(start=start, end=end, who=by.value, inputs=tuple(sorted(names, key=order.__getitem__)))
        for (start, end, by), names in sorted(
            steps.items(), key=lambda item: (place[item[0][0]], place[item[0][1]], who[item[0][2]])
        )
    ]
    seen = {start for start, _ in outcomes} | set(accepted) | {t.end for t in transitions} | {t.start for t in transitions}
    if missing := set(view.states) - seen:
        raise AssertionError(f"{view.name}: {sorted(missing)} cannot be reached")
    return Found(
        transitions=transitions,
        may_send={state: sorted(accepted.get(state, ()), key=order.__getitem__) for state in view.states},
        never={state: [i.name for i in inputs if outcomes.get((state, i.name)) == {False}] for state in view.states},
        situations=situations,
    )
