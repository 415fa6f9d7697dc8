"""Floods over HTTP/2: frames that count, legal peers at the margins that are never judged, and how the machine gives up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import settings as of_examples
from hypothesis import strategies as st

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import End, Head, Refused, Request, Reset, Response, Signal
from protocols.floods import Flood, FloodPolicy
from protocols.http2.connection import HTTP2Connection, HTTP2Limits
from protocols.http2.floods import HTTP2_FLOODS, FloodCounters
from protocols.http2.frames import Code, Kind
from protocols.http2.unfinished import Part, Unfinished
from protocols.roles import Role
from tests.protocols.http2.http2_helpers import (
    END_HEADERS,
    END_STREAM,
    GET,
    PADDED,
    POST,
    ByHand,
    check,
    data,
    frame,
    frames,
    output,
    pull,
    settings,
    take,
)

PING = frame(Kind.PING, 0, 0, bytes(8))
WIDE = (settings({4: 2**31 - 1}), frame(Kind.WINDOW_UPDATE, 0, 0, (2**30).to_bytes(4)))


def rst(stream: int, code: int = 8) -> bytes:
    return frame(Kind.RST_STREAM, 0, stream, code.to_bytes(4))


def window(stream: int, n: int = 1) -> bytes:
    return frame(Kind.WINDOW_UPDATE, 0, stream, n.to_bytes(4))


def answer(server: HTTP2Connection, stream: int, body: bytes = b"") -> None:
    server.respond(stream, 200, (), (body,) if body else ())


def counted(client: ByHand, completed: int = 0) -> dict[str, int]:
    """The counts against the peer that are not 0, except waste."""
    counters = client.server.flood_counters(completed)
    return {row.kind: n for row in HTTP2_FLOODS if (n := row.count(counters)) and row.kind != "waste"}


def fresh(limits: HTTP2Limits | None = None, *, payload_path: bool = True) -> ByHand:
    """A client after its SETTINGS, which are not counted any more."""
    client = ByHand(limits or HTTP2Limits(), payload_path=payload_path)
    client.server.counters.settings = client.server.counters.waste = 0
    return client


# -- frames that count, and frames that do not


def test_a_cancel_counts_where_its_stream_is_young_and_its_answer_is_not_whole() -> None:
    client = fresh()
    client.says(client.head(1, GET, END_STREAM), client.head(3, GET, END_STREAM), client.head(5, POST))
    client.server.now = 0.9
    client.says(rst(1))
    assert counted(client) == {"reset": 1}
    client.server.now = 1.0
    client.says(rst(3))
    assert counted(client) == {"reset": 1}, "the second had its time"
    answer(client.server, 5)
    output(client.server)
    assert client.says(rst(5, 0)) == []
    assert counted(client) == {"reset": 1}


def test_each_stream_error_counts_whatever_frame_made_it() -> None:
    client = fresh()
    broken = (
        lambda n: (client.head(n, GET, END_STREAM), data(n, b"more")),
        lambda n: (client.head(n), window(n, 2**31 - 1)),
        lambda n: (client.head(n, (*POST, (b"content-length", b"3"))), data(n, b"more")),
        lambda n: (client.head(n, (*POST, (b"content-length", b"3"))), data(n, b"m", END_STREAM)),
        lambda n: (client.head(n, (*POST, (b"Upper", b"x"))),),
        lambda n: (client.head(n), client.head(n, ((b":path", b"/"),), END_STREAM)),
    )
    for number, each in enumerate(broken):
        output(client.server)
        client.says(*each(2 * number + 1))
        assert [f.kind for f in frames(output(client.server)) if f.kind == Kind.RST_STREAM] == [Kind.RST_STREAM]
        assert client.server.counters.resets == number + 1


def test_frames_that_h2_answers_by_itself_count_as_stream_errors() -> None:
    """A head on a stream that its own sender has reset: RFC 9113 section 5.1 makes it a stream error each time."""
    client = fresh()
    client.says(client.head(1, GET, END_STREAM))
    client.server.now = 5.0
    client.says(rst(1))
    for n in range(1, 4):
        assert client.says(client.head(1, GET, END_STREAM)) == []
        assert frames(output(client.server))[-1].kind == Kind.RST_STREAM
        assert counted(client) == {"reset": n}


def test_a_head_that_is_refused_before_it_is_an_exchange_counts() -> None:
    client = fresh()
    (event,) = client.says(client.head(1, (*POST, *((b"x", b"y"),) * 101)))
    assert isinstance(event, Refused)
    assert counted(client) == {"reset": 1}


def test_what_is_under_way_when_we_reset_a_stream_is_free_for_two_seconds() -> None:
    client = fresh()
    client.says(client.head(1))
    client.server.send(Reset(stream=1, code=2))
    output(client.server)
    client.server.now = 2.0
    client.says(data(1, b"late"), data(1, b""), client.head(1, ((b"t", b"1"),), END_STREAM), rst(1))
    assert counted(client) == {}
    client.says(rst(1))
    assert counted(client) == {"priority": 1}, "nobody resets a stream twice"
    client.server.now = 3.0
    before = client.server.counters.waste
    client.says(data(1, b"later"), data(1, b""))
    assert counted(client) == {"priority": 1, "empty": 1}
    assert client.server.counters.waste == before + 9 + 5 + 9
    counters = client.server.flood_counters(0)
    assert counters.payload_in - counters.late == 0, "it earns nothing either"
    check(client.server)


def test_streams_beyond_the_limit_count_once_our_settings_are_acknowledged() -> None:
    client = ByHand(HTTP2Limits(streams=1), ready=False)
    client.says(client.OPENING[0], settings(), *(client.head(n, POST) for n in (1, 3)))
    assert client.server.counters.refused == 0
    client.says(frame(Kind.SETTINGS, 1), client.head(5, POST), client.head(7, POST))
    assert client.server.counters.refused == 2
    client.server.shutdown(last=True)
    client.says(rst(1))
    client.says(client.head(9, POST))
    assert client.server.counters.refused == 2, "a goodbye is not the peer's doing"


def test_settings_count_more_where_they_change_the_windows_of_many_streams() -> None:
    client = fresh()
    client.says(*(client.head(n, POST) for n in range(1, 500, 2)))
    client.says(settings({3: 7}), settings({4: 65_535}))
    assert counted(client)["settings"] == 2
    client.says(settings({4: 70_000}))
    assert counted(client)["settings"] == 2 + 3


def test_empty_data_counts_in_all_and_in_a_row() -> None:
    client = fresh()
    client.says(client.head(1), client.head(3))
    for stream in (1, 3, 1, 3, 1):
        client.says(data(stream, b""))
    client.says(data(1, b"x"), data(1, bytes([3]) + bytes(3), PADDED), data(1, b"", END_STREAM))
    counters = client.server.flood_counters(0)
    assert (counters.empty_data, counters.empty_row, counters.fed) == (6, 3, 1)


def test_what_says_nothing_counts_as_priority() -> None:
    client = fresh()
    client.says(
        frame(Kind.PRIORITY, 0, 1, bytes(4) + b"\0"), *(frame(kind, 0, 0, b"") for kind in (0x10, 0xA, 0xC, 0xBE)),
        frame(Kind.PING, 1, 0, bytes(8)), frame(Kind.SETTINGS, 1), frame(Kind.GOAWAY, 0, 0, bytes(8)),
    )  # fmt: skip
    assert counted(client) == {"priority": 8}
    waste = client.server.counters.waste
    assert waste == 9 * 8 + 5 + 8 + 8


def test_an_acknowledgement_of_our_own_ping_is_free_once() -> None:
    from protocols.events import Ping

    client = fresh()
    client.server.send(Ping(data=bytes(8)))
    client.says(frame(Kind.PING, 1, 0, bytes(8)), frame(Kind.PING, 1, 0, bytes(8)))
    assert counted(client) == {"priority": 1}


def test_our_data_is_cramped_where_the_peers_window_cuts_it_short() -> None:
    client = ByHand(ready=False)
    client.says(client.OPENING[0], settings({4: 100}), frame(Kind.SETTINGS, 1), client.head(1, GET, END_STREAM))
    output(client.server)
    answer(client.server, 1, bytes(1000))
    output(client.server)
    assert client.server.counters.cramped == 1
    client.says(window(1, 255))
    output(client.server)
    client.says(window(1, 256))
    output(client.server)
    assert client.server.counters.cramped == 2
    client.says(window(1, 10_000))
    assert frames(output(client.server))[-1].flags == END_STREAM
    assert client.server.counters.cramped == 2


def test_a_write_that_we_cut_short_is_not_cramped() -> None:
    client = fresh()
    client.says(*WIDE, client.head(1, GET, END_STREAM))
    output(client.server)
    answer(client.server, 1, bytes(1000))
    take(client.server, 20_000)
    client.says(client.head(3, GET, END_STREAM))
    answer(client.server, 3, bytes(1000))
    while client.server.has_output:
        take(client.server, 109)
    assert client.server.counters.cramped == 0


@pytest.mark.parametrize("payload_path", [True, False])
def test_work_is_derived_from_what_is_kept(payload_path: bool) -> None:
    client = fresh(payload_path=payload_path)
    client.says(*WIDE)
    for number in range(20):
        stream = 2 * number + 1
        client.says(client.head(stream), data(stream, bytes(1000)), data(stream, bytes(2000), END_STREAM))
        client.server.credit(stream, 3000)
        answer(client.server, stream, bytes(20_000))
        output(client.server)
    counters = client.server.flood_counters(20)
    assert (counters.payload_in, counters.payload_out) == (60_000, 400_000)
    assert (counters.opened, counters.data_sent, counters.heads_sent, counters.completed) == (20, 40, 20, 20)


# -- judged peers


class Driver:
    """Drives a server as a wire does: sets its clock before each receipt, and asks the policy at each signal."""

    def __init__(self, *, payload_path: bool = True, limits: HTTP2Limits | None = None) -> None:
        self.client = ByHand(limits or HTTP2Limits(), ready=False, payload_path=payload_path)
        self.server = self.client.server
        self.policy: FloodPolicy[FloodCounters] = FloodPolicy(HTTP2_FLOODS, 0.0)
        self.now = 0.0
        self.completed = 0
        self.body = b"answer"
        self.answers = True
        self.flood: Flood | None = None
        self.says(*ByHand.OPENING)

    def waits(self, seconds: float) -> None:
        """Lets time pass. A wire ticks each second; here only the last tick is made."""
        self.now += seconds
        if self.flood is None:
            self.flood = self.policy.tick(self.server.flood_counters(self.completed), self.now)

    def says(self, *written: bytes, pieces: Iterable[int] = ()) -> None:
        whole = b"".join(written)
        for n in pieces:
            self._take(whole[:n])
            whole = whole[n:]
        self._take(whole)

    def _take(self, received: bytes) -> None:
        if self.flood is not None or not received:
            return
        self.server.now = self.now
        self.server.receive_data(received)
        for number in itertools.count(1):
            event = self.server.next_event()
            if isinstance(event, Signal) or not number % 8:
                self.flood = self.policy.judge(self.server.flood_counters(self.completed), self.now)
                if event is Signal.NEED_DATA or self.flood is not None:
                    break
            if isinstance(event, Request) and self.answers:
                answer(self.server, event.stream, self.body)
                self.completed += 1
        output(self.server)


def head(driver: Driver, number: int, ended: bool = True) -> bytes:
    return driver.client.head(2 * number + 1, GET if ended else POST, END_STREAM if ended else 0)


FLOODS: dict[str, tuple[int, Callable[[Driver, int], bytes]]] = {
    "reset": (200, lambda driver, n: head(driver, n) + rst(2 * n + 1)),
    "ping": (200, lambda driver, n: PING),
    "settings": (50, lambda driver, n: settings()),
    "empty": (200, lambda driver, n: head(driver, n, ended=False) + data(2 * n + 1, b"") * 5),
    "window": (500, lambda driver, n: window(0)),
    "priority": (500, lambda driver, n: frame(Kind.PRIORITY, 0, 1, bytes(5))),
}


@pytest.mark.parametrize("payload_path", [True, False])
@pytest.mark.parametrize("kind", FLOODS)
@of_examples(max_examples=30)
@given(chunks=st.lists(st.integers(1, 4000), max_size=30), quiet=st.sampled_from([0.0, 5.0, 3600.0]))
def test_a_flood_is_judged_within_twice_its_burst_however_it_is_cut(
    kind: str, payload_path: bool, chunks: list[int], quiet: float
) -> None:
    burst, make = FLOODS[kind]
    driver = Driver(payload_path=payload_path)
    driver.answers = False
    driver.waits(quiet)
    driver.says(b"".join(make(driver, n) for n in range(min(400, 2 * burst))), pieces=chunks)
    if kind in ("window", "priority"):
        driver.says(b"".join(make(driver, n) for n in range(burst)))
    assert driver.flood is not None
    assert driver.flood.kind == kind
    assert burst <= driver.flood.count <= burst + 40


def test_refused_and_cramped_floods_are_judged() -> None:
    driver = Driver(limits=HTTP2Limits(streams=1))
    driver.answers = False
    driver.says(b"".join(head(driver, n, ended=False) for n in range(2100)))
    assert driver.flood is not None
    assert (driver.flood.kind, driver.flood.count > 2000) == ("refused", True)
    driver = Driver()
    driver.says(settings({4: 1}))
    driver.body = bytes(2000)
    driver.says(head(driver, 0))
    for _ in range(1500):
        driver.says(window(1, 1))
    assert driver.flood is not None
    assert driver.flood.kind == "cramped"


def test_waste_is_the_net_below_all() -> None:
    driver = Driver()
    driver.now = 1.0
    for _ in range(6000):
        driver.now += 0.05
        driver.says(frame(0xBE, 0, 0, bytes(16_000)))
        if driver.flood is not None:
            break
    assert driver.flood is not None
    assert driver.flood.kind == "waste"


clocks = st.sampled_from([0.0, 0.0, 0.001, 0.02, 1.0, 3600.0])
cuts = st.lists(st.integers(1, 3000), max_size=8)


def pings_for_each_frame_of_ours(driver: Driver, n: int) -> bytes:
    return head(driver, n) + PING


def windows_for_each_data(driver: Driver, n: int) -> bytes:
    return head(driver, n) + window(0) + window(0)


def as_many_complete_as_are_cancelled(driver: Driver, n: int) -> bytes:
    return head(driver, 2 * n) + driver.client.head(4 * n + 3, POST) + rst(4 * n + 3)


def priority_updates(driver: Driver, n: int) -> bytes:
    return head(driver, n) + frame(0x10, 0, 0, bytes(8))


def empty_between_payload(driver: Driver, n: int) -> bytes:
    stream = 2 * n + 1
    return head(driver, n, ended=False) + (data(stream, b"x") + data(stream, b"")) * 3 + data(stream, b"", END_STREAM)


def nothing_but_heads(driver: Driver, n: int) -> bytes:
    return head(driver, n)


MARGINS = [
    pings_for_each_frame_of_ours, windows_for_each_data, as_many_complete_as_are_cancelled, priority_updates,
    empty_between_payload, nothing_but_heads,
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("payload_path", [True, False])
@pytest.mark.parametrize("margin", MARGINS)
@of_examples(max_examples=30)
@given(rounds=st.lists(st.tuples(st.integers(1, 60), clocks, cuts), min_size=1, max_size=12))
def test_a_legal_peer_at_its_margin_is_never_judged(
    margin: Callable[[Driver, int], bytes], payload_path: bool, rounds: list[tuple[int, float, list[int]]]
) -> None:
    driver, done = Driver(payload_path=payload_path), 0
    driver.says(*WIDE)
    for n, pause, pieces in rounds:
        driver.waits(pause)
        # a client reacts to an answer after its request, and the driver answers each request at once
        written = [margin(driver, done + i) for i in range(n)]
        if margin is as_many_complete_as_are_cancelled:
            driver.answers = True
        for each in written:
            driver.says(each, pieces=[piece % (len(each) + 1) for piece in pieces])
        done += n
        assert driver.flood is None
    assert driver.server.counters.refused == 0


@pytest.mark.sweep
@of_examples(max_examples=30)
@given(
    st.lists(st.sampled_from(MARGINS[:2] + MARGINS[3:]), min_size=1, max_size=60),
    st.lists(clocks, min_size=60, max_size=60),
)
def test_legal_habits_may_be_mixed(margins: list[Callable[[Driver, int], bytes]], pauses: list[float]) -> None:
    driver = Driver()
    driver.says(*WIDE)
    for n, (margin, pause) in enumerate(zip(margins * 10, pauses * 10, strict=False)):
        driver.waits(pause)
        driver.says(margin(driver, n))
        assert driver.flood is None


def test_who_leaves_a_thousand_old_sessions_at_once_is_not_judged() -> None:
    driver = Driver()
    driver.answers = False
    driver.says(*(head(driver, n, ended=False) for n in range(1000)))
    driver.waits(60.0)
    driver.says(*(rst(2 * n + 1) for n in range(1000)))
    assert driver.flood is None
    assert driver.server.counters.resets == 0


def test_a_page_that_is_left_is_not_a_flood() -> None:
    driver = Driver()
    driver.answers = False
    driver.says(*WIDE, *(frame(Kind.PRIORITY, 0, 3 + 2 * n, bytes(5)) for n in range(5)))
    for page in range(4):
        driver.says(*(head(driver, 50 * page + n) + frame(0x10, 0, 0, bytes(8)) for n in range(50)))
        driver.says(*(rst(2 * (50 * page + n) + 1) for n in range(50)))
        driver.waits(2.0)
        assert driver.flood is None


def test_a_grpc_channel_that_probes_its_bandwidth_is_not_a_flood() -> None:
    driver = Driver()
    driver.body = bytes(60_000)
    driver.says(*WIDE)
    for n in range(1000):
        driver.says(head(driver, n), PING, *([settings({4: 2**20 + n})] if n < 15 else []), window(0, 60_000))
        driver.now += 0.001
        assert driver.flood is None


def test_a_reader_with_small_windows_is_not_a_flood() -> None:
    driver = Driver()
    driver.says(settings({4: 1024}))
    driver.body = bytes(40_000)
    for n in range(50):
        driver.says(head(driver, n))
        for _ in range(39):
            driver.says(window(2 * n + 1, 1024), window(0, 1024))
        driver.now += 0.01
    assert driver.flood is None
    assert driver.server.counters.cramped == 0


# -- the end of one that is given up


def test_what_is_given_up_says_goaway_ahead_of_all_that_waits() -> None:
    client = ByHand(HTTP2Limits(output=100))
    client.says(client.head(1, GET, END_STREAM), *[PING] * 50)
    assert client.server.choked
    answer(client.server, 1, bytes(100_000))
    assert len(take(client.server, 20)[0]) == 20, "one answer, and the beginning of the second"
    client.server.give_up(Code.ENHANCE_YOUR_CALM, "too many ping frames (http2.floods)")
    rest = output(client.server)
    size = 9 + 8 + len("too many ping frames (http2.floods)")
    assert 0 < len(rest) - size < 4 * 17, "what had begun, and no more"
    (goaway,) = frames(rest[-size:])
    assert goaway.kind == Kind.GOAWAY
    assert goaway.payload == (1).to_bytes(4) + (11).to_bytes(4) + b"too many ping frames (http2.floods)"
    assert client.server.must_close
    client.server.receive_data(PING * 10)
    with pytest.raises(RemoteProtocolError, match="too many ping"):
        client.server.next_event()
    with pytest.raises(LocalProtocolError):
        client.server.send(End(stream=1))
    client.server.give_up(Code.NO_ERROR, "again")
    assert not client.server.has_output


def test_what_was_handed_out_is_still_written_before_the_goaway() -> None:
    client = ByHand()
    client.says(*WIDE, client.head(1, GET, END_STREAM))
    output(client.server)
    client.server.send(Response(stream=1, status=200))
    client.server.send_data(1, (bytes(50_000),))
    written = b"".join(client.server.data_to_send(30_000))
    client.server.give_up(Code.ENHANCE_YOUR_CALM, "why")
    client.server.data_sent()
    assert [f.kind for f in frames(written + output(client.server))][-1] == Kind.GOAWAY
    assert client.server.open_streams == 0
    check(client.server)


# -- unfinished input


def begun(*written: bytes, at: float = 5.0) -> Unfinished | None:
    """Returns what a server waits for, its opening done: all pieces but the last arrive at 1.0, the last one at `at`."""
    client = ByHand()
    for piece in written[:-1]:
        client.server.now = 1.0
        client.says(piece)
    client.server.now = at
    client.says(written[-1])
    client.server.now = 100.0
    pull(client.server)
    return client.server.waits_for


def test_the_first_settings_are_waited_for() -> None:
    machine = HTTP2Connection(Role.SERVER, now=3.0)
    assert machine.waits_for == Unfinished(Part.SETTINGS, 3.0)
    machine.now = 9.0
    machine.receive_data(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings()[:5])
    pull(machine)
    assert machine.waits_for == Unfinished(Part.SETTINGS, 3.0)
    machine.receive_data(settings()[5:])
    pull(machine)
    assert machine.waits_for is None


def test_a_header_block_is_waited_for_from_its_first_frame_on() -> None:
    block = ByHand().block(GET)
    first = frame(Kind.HEADERS, END_STREAM, 1, block[:1])
    drips = [frame(Kind.CONTINUATION, 0, 1, block[n : n + 1]) for n in range(1, 4)]
    assert begun(first, *drips) == Unfinished(Part.HEAD, 1.0)
    assert begun(first, *drips, frame(Kind.CONTINUATION, END_HEADERS, 1, block[4:])) is None
    assert begun(frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, block)[:15]) == Unfinished(Part.HEAD, 5.0, 6)


def test_a_frame_is_waited_for_from_its_first_byte_on() -> None:
    opened = ByHand().head(1)
    assert begun(opened, PING[:3], PING[3:8]) == Unfinished(Part.FRAME, 1.0)
    assert begun(opened, data(1, bytes(100))[:20], bytes(30)) == Unfinished(Part.PAYLOAD, 1.0, 41)
    assert begun(opened + data(1, bytes(100)) + data(1, bytes(100))[:20]) == Unfinished(Part.PAYLOAD, 5.0, 11)
    assert begun(opened, data(1, bytes(100))[:20], bytes(89) + data(1, bytes(7))[:10]) == Unfinished(Part.PAYLOAD, 5.0, 1)
    assert begun(opened, data(1, bytes(100))[:20], bytes(89)) is None


def test_only_a_whole_ping_is_remembered() -> None:
    client = ByHand()
    client.server.now = 1.0
    client.says(PING[:16])
    assert client.server.pinged_at is None
    client.server.now = 2.0
    client.says(PING[16:], frame(Kind.PING, 1, 0, bytes(8)))
    assert client.server.pinged_at == 2.0


def test_a_client_counts_and_waits_too() -> None:
    machine = HTTP2Connection(Role.CLIENT, now=1.0)
    assert machine.waits_for == Unfinished(Part.SETTINGS, 1.0)
    machine.send(Request(stream=1, head=Head(method=b"GET", target=b"/", authority=b"a")))
    machine.receive_data(settings() + PING * 3)
    pull(machine)
    assert machine.waits_for is None
    assert (machine.counters.pings, machine.counters.settings) == (3, 1)
