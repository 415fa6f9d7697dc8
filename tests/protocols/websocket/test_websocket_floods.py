"""Floods over WebSocket: frames that count, legal peers at the margins that are never judged, and how it gives up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as of_examples
from hypothesis import strategies as st

from protocols.errors import RemoteProtocolError
from protocols.events import NEED_DATA, Frame, Opcode, Ping
from protocols.floods import Flood, FloodPolicy
from protocols.roles import Role
from protocols.websocket.connection import WebSocketConnection, WebSocketLimits
from protocols.websocket.floods import WEBSOCKET_FLOODS, FrameCounters

TEXT, BINARY, CONTINUATION = Opcode.TEXT, Opcode.BINARY, Opcode.CONTINUATION


def masked(first: int, payload: bytes = b"") -> bytes:
    """A client's frame with a key of noughts."""
    n = len(payload)
    size = bytes((0x80 | n,)) if n < 126 else b"\xfe" + n.to_bytes(2)
    return bytes((first,)) + size + bytes(4) + payload


PING, PONG = masked(0x89, b"?"), masked(0x8A)


def begins(payload: bytes) -> bytes:
    return masked(0x02, payload)


def goes_on(payload: bytes, *, fin: bool = False) -> bytes:
    return masked(0x80 if fin else 0x00, payload)


class Driver:
    """Drives a server as a wire does, and asks the policy after every few events."""

    def __init__(self, *, payload_path: bool = True) -> None:
        self.machine = WebSocketConnection(Role.SERVER, payload_path=payload_path)
        self.policy: FloodPolicy[FrameCounters] = FloodPolicy(WEBSOCKET_FLOODS, 0.0)
        self.now, self.frames = 0.0, 0
        self.flood: Flood | None = None

    def waits(self, seconds: float) -> None:
        """Lets time pass. A wire ticks each second; here only the last tick is made."""
        self.now += seconds
        self.policy.tick(self.machine.flood_counters(self.frames), self.now)

    def says(self, *written: bytes, pieces: list[int] | None = None) -> None:
        whole = b"".join(written)
        for n in pieces or []:
            self._take(whole[:n])
            whole = whole[n:]
        self._take(whole)

    def _take(self, received: bytes) -> None:
        if self.flood is not None:
            return
        self.machine.receive_data(received)
        number = 0
        while (event := self.machine.next_event()) is not NEED_DATA:
            self.frames += isinstance(event, Frame)
            number += 1
            if not number % 8:
                self._ask()
                if self.flood is not None:
                    return
        self._ask()
        while self.machine.data_to_send():
            self.machine.data_sent()

    def _ask(self) -> None:
        self.flood = self.policy.judge(self.machine.flood_counters(self.frames), self.now)


both_paths = pytest.mark.parametrize("payload_path", [True, False])


@both_paths
def test_pings_and_pongs_that_answer_nothing_are_control(payload_path: bool) -> None:
    driver = Driver(payload_path=payload_path)
    driver.machine.send(Ping())
    driver.says(PING, PONG, PING, PONG, PONG)
    assert driver.machine.counters.control == 4, "one of the Pongs answers"


@both_paths
def test_frames_without_payload_that_end_nothing_are_hollow_and_small_ones_are_a_row(payload_path: bool) -> None:
    driver = Driver(payload_path=payload_path)
    driver.says(begins(b""), goes_on(b""), goes_on(b"x" * 15), goes_on(b"", fin=True))
    counters = driver.machine.counters
    assert (counters.hollow, counters.row, counters.longest_row) == (2, 3, 3)
    driver.says(begins(b"x" * 15), goes_on(b"x" * 16), goes_on(b"x"), goes_on(b"", fin=True), masked(0x82, b""))
    assert (counters.hollow, counters.row, counters.longest_row) == (2, 1, 3)
    driver.says(begins(b"x"))
    driver.says(PING)
    driver.says(goes_on(b"x"))
    assert counters.row == 2, "a Ping in between ends no row"
    assert driver.machine.flood_counters(7).payload == 15 + 15 + 16 + 1 + 1 + 1
    assert counters.frames == 7


@both_paths
def test_what_one_connection_counts_is_not_counted_for_another(payload_path: bool) -> None:
    one, other = Driver(payload_path=payload_path), Driver(payload_path=payload_path)
    assert one.machine.flood_counters(7) == other.machine.flood_counters(8) == FrameCounters()
    one.says(PING, begins(b""))
    assert one.machine.flood_counters(9) == FrameCounters(total=2, control=1, hollow=1, row=1, longest_row=1, frames=9)
    assert other.machine.flood_counters(8) == FrameCounters()


@both_paths
@pytest.mark.parametrize(
    ("kind", "burst", "written"),
    [
        ("control", 100, PING * 250),
        ("control", 100, PONG * 250),
        ("hollow", 200, begins(b"") + goes_on(b"") * 450),
        ("hollow", 1024, begins(b"abc") + goes_on(b"abc") * 1100),
        ("hollow", 200, (begins(b"") + goes_on(b"", fin=True)) * 450),
    ],
)
@of_examples(max_examples=20)
@given(pieces=st.lists(st.integers(1, 500), max_size=20), quiet=st.sampled_from([0.0, 3600.0]))
def test_a_flood_is_judged_within_twice_its_burst_however_it_is_cut(
    kind: str, burst: int, written: bytes, payload_path: bool, pieces: list[int], quiet: float
) -> None:
    driver = Driver(payload_path=payload_path)
    driver.waits(quiet)
    driver.says(written, pieces=pieces)
    assert driver.flood is not None
    assert driver.flood.kind == kind
    counters = driver.machine.counters
    assert burst <= max(counters.control, counters.hollow, counters.longest_row) <= burst + 8


@pytest.mark.sweep
@both_paths
@of_examples(max_examples=30)
@given(
    rounds=st.lists(
        st.tuples(
            st.sampled_from(["pings each second", "earned pings", "tunnel after sleep", "fragments", "empty messages"]),
            st.lists(st.integers(1, 300), max_size=5),
            st.sampled_from([1.0, 1.0, 3600.0]),
        ),
        max_size=40,
    )
)
def test_a_legal_peer_is_never_judged(payload_path: bool, rounds: list[tuple[str, list[int], float]]) -> None:
    driver = Driver(payload_path=payload_path)
    for habit, pieces, pause in rounds:
        driver.waits(pause)
        match habit:
            case "pings each second":
                driver.says(PING, PONG, pieces=pieces)
            case "earned pings":
                driver.says(*([masked(0x82, b"x")] * 16 + [PING]) * 20, pieces=pieces)
            case "tunnel after sleep":
                driver.waits(10)
                driver.says(PING * 90, pieces=pieces)
            case "fragments":
                driver.says(begins(b"x"), goes_on(b"y") * 1000, goes_on(b"", fin=True), pieces=pieces)
            case _:
                driver.says(masked(0x82) * 500, pieces=pieces)
        assert driver.flood is None


def test_what_is_given_up_says_close_behind_the_frame_that_has_begun() -> None:
    machine = WebSocketConnection(Role.SERVER)
    for _ in range(3):
        machine.send(Frame(opcode=BINARY, fin=True, data=bytes(5000)))
    begun = b"".join(machine.data_to_send(1000))
    machine.receive_data(PING + begins(b"x"))
    machine.next_event()
    machine.data_sent()
    machine.give_up(1008, "too many control frames (websocket.floods)")
    rest = b"".join(machine.data_to_send(2**20))
    machine.data_sent()
    reason = b"too many control frames (websocket.floods)"
    close = bytes((0x88, 2 + len(reason))) + (1008).to_bytes(2) + reason
    assert begun + rest == b"\x82\x7e" + (5000).to_bytes(2) + bytes(5000) + close
    assert machine.room() == machine.limits.send_buffer
    with pytest.raises(RemoteProtocolError, match="too many control"):
        machine.next_event()
    machine.receive_data(PING)
    assert machine.unread == 0
    machine.give_up(1008, "again")
    assert machine.data_to_send() == []


def test_a_connection_that_is_closing_is_given_up_without_another_close() -> None:
    machine = WebSocketConnection(Role.SERVER, WebSocketLimits())
    machine.receive_data(masked(0x88))
    machine.next_event()
    machine.give_up(1008, "why")
    assert b"".join(machine.data_to_send()) == b"\x88\x00"
