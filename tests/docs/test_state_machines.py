"""The diagrams of states show what the machines do today, and the explorer misses nothing that a machine can do."""

from __future__ import annotations

import pytest

from gateway.workers.states import TRANSITIONS, State
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.http1.reader import Reading, Writing
from scripts.explored import Input, NotNow, View, Who, explore
from scripts.explored_machines import machines
from scripts.write_state_diagrams import DIAGRAMS, worker_transitions, written


def test_the_pages_and_their_diagrams_are_current() -> None:
    texts = written()
    assert {path.name for path in DIAGRAMS.glob("*.svg")} == {path.name for path in texts if path.suffix == ".svg"}
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, "run scripts/write_state_diagrams.py"


def test_every_state_that_http1_names_is_drawn() -> None:
    views = {view.name: set(view.states) for machine in machines() for view in machine.views}
    reading = views["http1-server-reading"] | views["http1-client-reading"]
    assert reading | {"END"} == {state.name for state in Reading}  # END is never seen: its event is given out at once
    writing = views["http1-server-writing"] | views["http1-client-writing"]
    assert writing == {state.name for state in Writing}


def test_the_table_of_a_worker_speaks_of_every_state() -> None:
    assert TRANSITIONS.keys() == set(State)
    assert {t.start for t in worker_transitions()} == {state.value for state in State} - {"stopped"}


class Lamp:
    """A lamp with a button and a fuse, that burns out at the third time."""

    def __init__(self) -> None:
        self.lit, self.times, self.fused = False, 0, False

    def press(self) -> None:
        if self.fused:
            raise LocalProtocolError("no current")
        self.lit = not self.lit and self.times < 3
        self.times += self.lit

    def surge(self) -> None:
        if self.fused:
            raise NotNow
        self.fused, self.lit = True, False
        raise RemoteProtocolError("too much")


LAMP = [
    Input(name="press", who=Who.WE, do=Lamp.press),
    Input(name="surge", who=Who.PEER, do=Lamp.surge),
]


def lamp_of(lamp: Lamp) -> str:
    return "fused" if lamp.fused else "lit" if lamp.lit else "dark"


def view(*states: str) -> View[Lamp]:
    return View(name="lamp", title="A lamp", states=dict.fromkeys(states, ""), tells=(Who.WE, Who.PEER), of=lamp_of)


def test_all_that_a_machine_can_do_is_found() -> None:
    found = explore(Lamp, LAMP, lambda lamp: (lamp.lit, lamp.times, lamp.fused), [view("dark", "lit", "fused")])["lamp"]
    assert [(t.start, t.end, t.who, t.inputs) for t in found.transitions] == [
        ("dark", "lit", "sent", ("press",)),
        ("dark", "fused", "received", ("a protocol error",)),
        ("lit", "dark", "sent", ("press",)),
        ("lit", "fused", "received", ("a protocol error",)),
    ]
    assert found.may_send == {"dark": ["press"], "lit": ["press"], "fused": []}
    assert found.never == {"dark": ["surge"], "lit": ["surge"], "fused": []}
    assert found.situations == 7 + 4  # lit and dark at each time but the first, dark before, and fused after each time


@pytest.mark.parametrize(
    ("states", "said"), [(["dark", "lit"], "no state of it"), (["dark", "lit", "fused", "broken"], "cannot be reached")]
)
def test_a_state_that_is_missing_or_never_reached_is_a_mistake(states: list[str], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        explore(Lamp, LAMP, lambda lamp: (lamp.lit, lamp.times, lamp.fused), [view(*states)])
