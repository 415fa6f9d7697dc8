"""The same bytes through our machine and through plain wsproto, and pairs of our own ends, over random traffic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from wsproto import events as ws
from wsproto.connection import Connection, ConnectionState, ConnectionType

from protocols.errors import RemoteProtocolError
from protocols.events import Close, Frame, Opcode, Ping, Pong, Signal
from protocols.roles import Role
from protocols.websocket.connection import LARGE, Received, WebSocketConnection, WebSocketLimits
from protocols.websocket.frames import MASKED, mask, write_header

few = settings(max_examples=60)
many = settings(max_examples=300)

SIZES = [0, 1, 5, 125, 126, 127, 599, 600, 601, 4095, 4096, 16384, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE + 3]
CODES = [1000, 1001, 1009, 1011, 3000, 4999]


def of_size(n: int) -> bytes:
    return (bytes(range(251)) * (n // 251 + 1))[:n]


payloads = st.binary(max_size=20) | st.text(max_size=12).map(str.encode) | st.sampled_from(SIZES).map(of_size)
pings = st.builds(Ping, data=st.binary(max_size=125))
closes = st.builds(Close, code=st.sampled_from(CODES), reason=st.text(max_size=20)) | st.just(Close(code=None))


@st.composite
def traffic(draw: st.DrawFn) -> list[Frame | Ping | Close]:
    """Messages cut into frames anywhere, also inside a character, with pings between; a Close perhaps."""
    out: list[Frame | Ping | Close] = []
    for _ in range(draw(st.integers(0, 4))):
        opcode = draw(st.sampled_from([Opcode.TEXT, Opcode.BINARY]))
        parts = draw(st.lists(payloads, min_size=1, max_size=4))
        for i, data in enumerate(parts):
            out += draw(st.lists(pings, max_size=2))
            out.append(Frame(opcode=Opcode.CONTINUATION if i else opcode, fin=i == len(parts) - 1, data=data))
    return [*out, draw(closes)] if draw(st.booleans()) else out


def ours(role: Role, limits: WebSocketLimits | None = None) -> WebSocketConnection:
    keys = itertools.count(1)
    source = (lambda: next(keys).to_bytes(4, "little")) if role is Role.CLIENT else None
    return WebSocketConnection(role, limits or WebSocketLimits(), mask=source)


def theirs(role: Role) -> Connection:
    return Connection(ConnectionType.SERVER if role is Role.SERVER else ConnectionType.CLIENT)


def other(role: Role) -> Role:
    return Role.CLIENT if role is Role.SERVER else Role.SERVER


def feed(machine: WebSocketConnection, data: bytes) -> Iterator[Received]:
    """As a driver does: straight into a large frame where one is under way, and everything pulled."""
    view = memoryview(data)
    while view:
        buffer = machine.get_buffer()
        if buffer is None:
            machine.receive_data(view)
            view = view[:0]
        else:
            n = min(len(buffer), len(view))
            buffer[:n] = view[:n]
            machine.buffer_updated(n)
            view = view[n:]
        while not isinstance(event := machine.next_event(), Signal):
            yield event


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` in pieces of the given sizes, again and again."""
    out, sizes = [], itertools.cycle(cuts)
    while data:
        n = next(sizes)
        out.append(data[:n])
        data = data[n:]
    return out


cut_sizes = st.lists(st.sampled_from([1, 2, 3, 7, 100, 1000, 4096, 65536, 10**6]), min_size=1, max_size=5).filter(
    lambda sizes: max(sizes) >= 1000
)


@few
@given(role=st.sampled_from(Role), events=traffic(), cuts=cut_sizes, at_most=st.sampled_from([333, 5000, 65536, 10**7]))
def test_two_ends_of_ours_pass_every_frame_on_byte_for_byte(
    role: Role, events: list[Frame | Ping | Close], cuts: list[int], at_most: int
) -> None:
    sender, receiver = ours(role), ours(other(role))
    wire = b""
    for event in events:
        sender.send(event)
    while buffers := sender.data_to_send(at_most):
        wire += b"".join(buffers)
        sender.data_sent()
    heard = [event for chunk in chunks(wire, cuts) for event in feed(receiver, chunk)]
    assert heard == events

    taken = sum(len(event.data) for event in events if isinstance(event, Frame))
    assert receiver.unconsumed == taken
    receiver.credit(taken)

    # The answers: a Pong for each Ping, and the Close again.
    answers = list(feed(sender, b"".join(receiver.data_to_send(1 << 30))))
    receiver.data_sent()
    pongs = [Pong(data=event.data) for event in events if isinstance(event, Ping)]
    assert answers == pongs + [event for event in events if isinstance(event, Close)]
    assert sender.closed == receiver.closed == any(isinstance(event, Close) for event in events)


@dataclass
class Heard:
    """The events at one end, in a form in which both libraries can be compared: messages when complete, with the
    control frames in their places, and the code of the violation that ended it."""

    events: list[object] = field(default_factory=list)
    violation: int | None = None
    partial: bytes = field(default=b"", compare=False)
    over: bool = field(default=False, compare=False)

    def data(self, data: bytes, complete: bool, text: bool) -> None:
        self.partial += data
        if complete:
            self.events.append(("text" if text else "binary", self.partial))
            self.partial = b""


def heard_by_us(machine: WebSocketConnection, pieces: list[bytes]) -> Heard:
    heard, text = Heard(), False
    try:
        for piece in pieces:
            for event in feed(machine, piece):
                match event:
                    case Frame(opcode=opcode, fin=fin, data=data):
                        text = opcode is Opcode.TEXT or (opcode is Opcode.CONTINUATION and text)
                        heard.data(bytes(data), fin, text)
                    case _:
                        heard.events.append(event)
    except RemoteProtocolError as error:
        heard.violation = error.wire_code
    return heard


def heard_by_wsproto(connection: Connection, pieces: list[bytes], answers: list[bytes]) -> Heard:
    heard = Heard()
    for piece in pieces:
        if heard.over:
            break
        connection.receive_data(piece)
        for event in connection.events():
            match event:
                case ws.TextMessage() | ws.BytesMessage():
                    data = event.data.encode() if isinstance(event, ws.TextMessage) else bytes(event.data)
                    heard.data(data, event.message_finished, isinstance(event, ws.TextMessage))
                case ws.Ping():
                    heard.events.append(Ping(data=bytes(event.payload)))
                    answers.append(connection.send(event.response()))
                case ws.Pong():
                    heard.events.append(Pong(data=bytes(event.payload)))
                case ws.CloseConnection():
                    heard.over = True
                    if connection.state is ConnectionState.OPEN:
                        heard.violation = int(event.code)
                    else:
                        code = None if event.code == 1005 else int(event.code)
                        heard.events.append(Close(code=code, reason=event.reason or ""))
                    answers.append(connection.send(event.response()))
    return heard


def wire_frame(first: int, payload: bytes, masked: bool, form: int) -> bytes:
    """A frame, right or wrong: `form` is 0 for the shortest form of the length, else the length's own bytes."""
    head = write_header(first, len(payload), MASKED if masked else 0)
    if form:
        head = bytes([first, MASKED * masked | (126 if form == 2 else 127)]) + len(payload).to_bytes(form, "big")
    key = b"\x01\x80\xff\x33"
    return head + key + mask(payload, key) if masked else head + payload


good_firsts = st.sampled_from([0x00, 0x80, 0x01, 0x81, 0x02, 0x82, 0x89, 0x8A])
control_payloads = (
    st.binary(max_size=130)
    | st.builds(lambda code, reason: code.to_bytes(2, "big") + reason, st.integers(990, 5010), st.binary(max_size=8))
    | st.builds(
        lambda code, reason: code.to_bytes(2, "big") + reason, st.sampled_from(CODES), st.text(max_size=8).map(str.encode)
    )
)


@st.composite
def any_frame(draw: st.DrawFn, role: Role) -> bytes:
    first = draw(good_firsts | good_firsts | good_firsts | st.integers(0, 255))
    payload = draw(control_payloads if first & 0x08 else payloads)
    rightly_masked = role is Role.SERVER
    masked = draw(st.sampled_from([rightly_masked] * 20 + [not rightly_masked]))
    form = draw(st.sampled_from([0] * 20 + [2, 8]))
    return wire_frame(first, payload, masked, form if len(payload) < 65536 else 0)


@many
@given(data=st.data(), role=st.sampled_from(Role), cuts=cut_sizes)
def test_any_frames_are_heard_as_wsproto_hears_them(data: st.DataObject, role: Role, cuts: list[int]) -> None:
    wire = b"".join(data.draw(st.lists(any_frame(role), max_size=8)))
    answers: list[bytes] = []
    machine = ours(role, WebSocketLimits(check_utf8=True))
    expected = heard_by_wsproto(theirs(role), chunks(wire, cuts), answers)
    actual = heard_by_us(machine, chunks(wire, cuts))
    assert actual == expected

    # Our Close, in answer to theirs or to a violation, has wsproto's code.
    written = b"".join(machine.data_to_send(1 << 30))
    assert closes_in(written, other(role)) == closes_in(b"".join(answers), other(role))


def closes_in(wire: bytes, role: Role) -> list[int | None]:
    heard = heard_by_wsproto(theirs(role), [wire], [])
    assert heard.violation is None
    return [event.code for event in heard.events if isinstance(event, Close)]


@few
@given(role=st.sampled_from(Role), garbage=st.binary(max_size=300), cuts=cut_sizes)
def test_garbage_is_heard_as_wsproto_hears_it_and_leaks_no_other_error(role: Role, garbage: bytes, cuts: list[int]) -> None:
    actual = heard_by_us(ours(role, WebSocketLimits(check_utf8=True)), chunks(garbage, cuts))
    expected = heard_by_wsproto(theirs(role), chunks(garbage, cuts), [])
    assert actual.events == expected.events
    # We refuse a frame out of turn, too large or not UTF-8 by its header or whole; wsproto by its first or bad byte.
    if actual.violation != expected.violation:
        assert {actual.violation, expected.violation} <= {None, 1002, 1007, 1009}


@few
@given(role=st.sampled_from(Role), events=traffic())
def test_wsproto_understands_what_we_send(role: Role, events: list[Frame | Ping | Close]) -> None:
    machine = ours(role)
    for event in events:
        machine.send(event)
    wire = b"".join(machine.data_to_send(1 << 30))
    expected = heard_by_us(ours(other(role), WebSocketLimits(check_utf8=True)), [wire])
    assert heard_by_wsproto(theirs(other(role)), [wire], []) == expected


@few
@given(
    role=st.sampled_from(Role),
    messages=st.lists(st.tuples(st.text(max_size=200) | st.sampled_from(SIZES).map(of_size), st.booleans()), max_size=5),
    cuts=cut_sizes,
)
def test_we_understand_what_wsproto_sends(role: Role, messages: list[tuple[str | bytes, bool]], cuts: list[int]) -> None:
    sender, wire = theirs(role), b""
    expected: list[object] = []
    for message, split in messages:
        kind = ws.TextMessage if isinstance(message, str) else ws.BytesMessage
        middle = len(message) // 2 if split else 0
        if split:
            wire += sender.send(kind(data=message[:middle], message_finished=False))  # type: ignore[arg-type]
            wire += sender.send(ws.Ping(payload=b"?"))
            expected.append(Ping(data=b"?"))
        wire += sender.send(kind(data=message[middle:]))  # type: ignore[arg-type]
        expected.append(("text", message.encode()) if isinstance(message, str) else ("binary", message))
    wire += sender.send(ws.CloseConnection(code=1000, reason="done"))
    machine = ours(other(role))
    assert heard_by_us(machine, chunks(wire, cuts)).events == [*expected, Close(code=1000, reason="done")]
    sender.receive_data(b"".join(machine.data_to_send(1 << 30)))
    replies = list(sender.events())
    assert isinstance(replies[-1], ws.CloseConnection)
    assert sender.state is ConnectionState.CLOSED
