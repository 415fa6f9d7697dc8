"""Any order of legal acts on a client and a server: the ledgers agree with h2 after each, and no byte is lost or invented."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from protocols.buffers import ByteBudget
from protocols.errors import LocalProtocolError
from protocols.events import Data, End, Event, Head, NoRoom, Request, Reset, Response, Signal
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.http2.windows import FLOOR, STEP
from protocols.roles import Role
from tests.protocols.http2.http2_helpers import check, told

LIMITS = HTTP2Limits(
    streams=5, initial_window=3000, max_window=12_000, send_buffer=8000, connection_send_buffer=16_000, output=100_000,
    linger=10_000,
)  # fmt: skip
SIZES = st.sampled_from([0, 1, 10, 749, 750, 3000, 5000, 20_000])


class Side:
    """One end, what it has told the other on each stream, and what it has heard."""

    def __init__(self, role: Role) -> None:
        self.budget = ByteBudget(40_000)
        self.machine = HTTP2Connection(role, LIMITS, budget=self.budget)
        self.said: dict[int, bytearray] = {}
        self.heard: dict[int, bytearray] = {}
        self.ended_by_us: set[int] = set()
        self.over: dict[int, type[Event]] = {}
        self.dropped: set[int] = set()
        self.wire = bytearray()

    def say(self, stream: int, n: int) -> None:
        payload = bytes((stream + i) % 251 for i in range(len(self.said[stream]), len(self.said[stream]) + n))
        self.machine.send(Data(stream=stream, buffers=(payload[: n // 2], payload[n // 2 :])))
        self.said[stream] += payload

    def write(self, at_most: int) -> None:
        buffers = self.machine.data_to_send(at_most)
        for buffer in buffers:
            self.wire += buffer
        if buffers:
            self.machine.data_sent()

    def hear(self, data: bytes) -> None:
        self.machine.receive_data(data)
        while not isinstance(event := told(self.machine), Signal):
            check(self.machine)
            match event:
                case Request(stream=stream) | Response(stream=stream):
                    self.heard.setdefault(stream, bytearray())
                    self.said.setdefault(stream, bytearray())
                case Data(stream=stream, buffers=(buffer,)):
                    assert stream not in self.over, "nothing after the end"
                    assert stream not in self.dropped
                    self.heard[stream] += buffer
                case End(stream=stream):
                    assert stream not in self.over
                    self.over[stream] = End
                case NoRoom(stream=stream):
                    assert stream not in self.dropped
                    self.dropped.add(stream)
                case Reset(stream=stream):
                    assert self.over.get(stream) is not Reset
                    self.over[stream] = Reset

    def may_send(self, stream: int) -> bool:
        return self.machine.is_open(stream) and stream not in self.ended_by_us


class Exchanges(RuleBasedStateMachine):
    streams: Bundle[int] = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.client, self.server = Side(Role.CLIENT), Side(Role.SERVER)
        self.sides = {"client": self.client, "server": self.server}

    who = st.sampled_from(["client", "server"])

    @rule(target=streams)
    def request(self) -> int:
        machine = self.client.machine
        stream = machine.next_stream
        if machine.can_open:
            machine.send(Request(stream=stream, head=Head(method=b"POST", target=b"/", authority=b"h")))
            self.client.said[stream] = bytearray()
            self.client.heard[stream] = bytearray()
        return stream

    @rule(stream=streams, who=who, n=SIZES)
    def say(self, stream: int, who: str, n: int) -> None:
        side = self.sides[who]
        try:
            side.say(stream, n)
        except (LocalProtocolError, KeyError):
            headless = who == "server" and stream in side.said
            assert headless or not side.may_send(stream)

    @rule(stream=streams)
    def respond(self, stream: int) -> None:
        try:
            self.server.machine.send(Response(stream=stream, status=200))
        except LocalProtocolError as error:
            assert not self.server.may_send(stream) or "already has" in str(error)  # noqa: PT017 (legal either way)

    @rule(stream=streams, who=who, trailers=st.sampled_from([(), ((b"t", b"1"),)]))
    def end(self, stream: int, who: str, trailers: tuple[tuple[bytes, bytes], ...]) -> None:
        side = self.sides[who]
        try:
            side.machine.send(End(stream=stream, trailers=trailers))
        except LocalProtocolError:
            return
        side.ended_by_us.add(stream)

    @rule(stream=streams, who=who)
    def reset(self, stream: int, who: str) -> None:
        side = self.sides[who]
        if side.machine.is_open(stream):
            side.machine.send(Reset(stream=stream, code=8))
            side.over[stream] = Reset
            assert not side.machine.is_open(stream)

    @rule(stream=streams, who=who, part=st.sampled_from([0.1, 0.5, 1.0]))
    def take(self, stream: int, who: str, part: float) -> None:
        machine = self.sides[who].machine
        ledger = machine.windows().get(stream)
        if ledger is not None:
            machine.credit(stream, int(ledger.unread * part))

    @rule(stream=streams, who=who)
    def drop(self, stream: int, who: str) -> None:
        side = self.sides[who]
        if stream in side.machine.windows():
            side.dropped.add(stream)
        side.machine.drop(stream)

    @rule(stream=streams, who=who, n=st.sampled_from([1, 700, 3000, 100_000]))
    def land(self, stream: int, who: str, n: int) -> None:
        self.sides[who].machine.land(stream, memoryview(bytearray(n)))

    @rule(who=who)
    def tick(self, who: str) -> None:
        self.sides[who].machine.tick()

    @rule(who=who)
    def trim(self, who: str) -> None:
        machine = self.sides[who].machine
        machine.trim()
        for stream, ledger in machine.windows().items():
            if stream and not ledger.unread:
                assert machine.reserved(stream) <= FLOOR + max(0, ledger.granted - LIMITS.initial_window)

    @rule(who=who, at_most=st.sampled_from([10, 100, 5000, 100_000]), n=st.sampled_from([1, 50, 3000, 100_000]))
    def move(self, who: str, at_most: int, n: int) -> None:
        side, other = self.sides[who], self.sides["server" if who == "client" else "client"]
        side.write(at_most)
        moved = bytes(side.wire[:n])
        del side.wire[:n]
        other.hear(moved)

    @invariant()
    def agree(self) -> None:
        for side, other in ((self.client, self.server), (self.server, self.client)):
            check(side.machine)
            for stream, heard in side.heard.items():
                assert other.said.get(stream, b"")[: len(heard)] == heard
            assert side.budget.used >= side.machine.unconsumed
            assert side.budget.used == sum(map(side.machine.reserved, side.machine.windows()))
            for stream, ledger in side.machine.windows().items():
                if stream:
                    grown = max(0, ledger.granted - LIMITS.initial_window)
                    assert ledger.unread <= side.machine.reserved(stream) <= ledger.unread + FLOOR + STEP + grown
            assert side.machine.lingering <= 2
            assert side.machine.open_streams == sum(side.machine.is_open(stream) for stream in side.machine.windows())
            for stream in side.machine.windows():
                assert 0 <= side.machine.room(stream) <= LIMITS.send_buffer

    def teardown(self) -> None:
        """Everybody ends what is open and reads on: all bytes arrive, both ends become idle and owe the budget nothing."""
        rounds = 0
        while not self.settled:
            rounds += 1
            assert rounds < 400, "something stands still"
            for side in (self.client, self.server):
                for stream in set(side.machine.windows()) - {0}:
                    side.machine.credit(stream, side.machine.windows()[stream].unread)
            for stream in set(self.server.machine.windows()) - {0}:
                if self.server.may_send(stream):
                    self.respond(stream)
                    self.end(stream, "server", ())
            for stream in set(self.client.machine.windows()) - {0}:
                if self.client.may_send(stream) and stream in self.client.over:
                    self.end(stream, "client", ())
            self.server.machine.tick()
            for who in ("client", "server"):
                self.move(who, 100_000, 10**7)
            self.agree()
        for side, other in ((self.client, self.server), (self.server, self.client)):
            assert set(side.machine.windows()) == {0}
            assert side.budget.used == 0
            for stream, how in side.over.items():
                if how is End and stream not in side.dropped:
                    assert side.heard[stream] == other.said[stream]

    @property
    def settled(self) -> bool:
        sides = (self.client, self.server)
        return all(side.machine.idle and not side.machine.unconsumed and not side.wire for side in sides)


TestExchanges = Exchanges.TestCase
TestExchanges.settings = settings(max_examples=60, stateful_step_count=40)
