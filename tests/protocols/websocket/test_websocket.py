"""The WebSocket machine: golden bytes, every split, each rule at its boundary, and both ledgers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA, Close, ConnectionEnd, Frame, Opcode, Ping, Pong, Sent, Signal
from protocols.roles import Role
from protocols.websocket.connection import LARGE, Received, WebSocketConnection, WebSocketLimits
from protocols.websocket.frames import MASKED, mask, write_header
from tests.protocols.websocket.websocket_paths import Memory

TEXT, BINARY, CONTINUATION = Opcode.TEXT, Opcode.BINARY, Opcode.CONTINUATION
KEY = b"\x37\xfa\x21\x3d"
HELLO = Frame(opcode=TEXT, fin=True, data=b"Hello")


def server(**limits: int | bool | None) -> WebSocketConnection:
    return WebSocketConnection(Role.SERVER, WebSocketLimits(**limits))  # type: ignore[arg-type]


def client(**limits: int | bool | None) -> WebSocketConnection:
    return WebSocketConnection(Role.CLIENT, WebSocketLimits(**limits), mask=lambda: KEY)  # type: ignore[arg-type]


def from_client(first: int, payload: bytes = b"") -> bytes:
    return write_header(first, len(payload), MASKED) + KEY + mask(payload, KEY)


def from_server(first: int, payload: bytes = b"") -> bytes:
    return write_header(first, len(payload), 0) + payload


def close_body(code: int, reason: bytes = b"") -> bytes:
    return code.to_bytes(2, "big") + reason


def pull(machine: WebSocketConnection) -> list[Received]:
    """All events up to the Signal or the end, which is left out."""
    return list(itertools.takewhile(lambda e: not isinstance(e, (Signal, ConnectionEnd)), iter(machine.next_event, None)))


def written(machine: WebSocketConnection, at_most: int = 1 << 30) -> bytes:
    out = b""
    while buffers := machine.data_to_send(at_most):
        out += b"".join(buffers)
        machine.data_sent()
    return out


def violation(machine: WebSocketConnection, data: bytes) -> int | None:
    """The wire code of the error that `data` ends in, after any good events."""
    machine.receive_data(data)
    with pytest.raises(RemoteProtocolError) as caught:
        pull(machine)
    return caught.value.wire_code


# Golden bytes: RFC 6455 section 5.7

GOLDEN = [
    pytest.param(client, "810548656c6c6f", [HELLO], id="unmasked text"),
    pytest.param(server, "818537fa213d7f9f4d5158", [HELLO], id="masked text"),
    pytest.param(
        client,
        "010348656c80026c6f",
        [Frame(opcode=TEXT, fin=False, data=b"Hel"), Frame(opcode=CONTINUATION, fin=True, data=b"lo")],
        id="fragmented text",
    ),
    pytest.param(client, "890548656c6c6f", [Ping(data=b"Hello")], id="unmasked ping"),
    pytest.param(server, "8a8537fa213d7f9f4d5158", [Pong(data=b"Hello")], id="masked pong"),
    pytest.param(client, "827e0100" + "ab" * 256, [Frame(opcode=BINARY, fin=True, data=b"\xab" * 256)], id="256 bytes"),
    pytest.param(
        client, "827f0000000000010000" + "cd" * 65536, [Frame(opcode=BINARY, fin=True, data=b"\xcd" * 65536)], id="64 KiB"
    ),
]


@pytest.mark.parametrize(("end", "wire", "events"), GOLDEN)
def test_the_examples_of_the_rfc_are_read(end: Callable[[], WebSocketConnection], wire: str, events: list[Received]) -> None:
    machine = end()
    machine.receive_data(bytes.fromhex(wire))
    assert pull(machine) == events


@pytest.mark.parametrize(
    ("end", "wire", "events"),
    [case for case in GOLDEN if isinstance(case.values[2][0], Frame)],  # type: ignore[index]
)
def test_the_examples_of_the_rfc_are_written(end: Callable[[], WebSocketConnection], wire: str, events: list[Frame]) -> None:
    machine = client() if end is server else server()
    for event in events:
        machine.send(event)
    assert written(machine).hex() == wire


def test_a_ping_of_the_rfc_is_answered_with_its_pong_in_either_role() -> None:
    for end, ping, pong in [
        (client, "890548656c6c6f", "8a8537fa213d7f9f4d5158"),
        (server, "898537fa213d7f9f4d5158", "8a0548656c6c6f"),
    ]:
        machine = end()
        machine.receive_data(bytes.fromhex(ping))
        assert pull(machine) == [Ping(data=b"Hello")]
        assert written(machine).hex() == pong


def test_own_pings_and_closes_are_written_in_either_role() -> None:
    a_server, a_client = server(), client()
    for machine in (a_server, a_client):
        machine.send(Ping(data=b"Hello"))
        machine.send(Close(code=1000, reason="ok"))
    assert written(a_server) == b"\x89\x05Hello" + b"\x88\x04\x03\xe8ok"
    assert written(a_client) == from_client(0x89, b"Hello") + from_client(0x88, b"\x03\xe8ok")


def test_a_client_asks_for_a_new_key_for_every_frame() -> None:
    keys = iter(bytes([n]) * 4 for n in range(1, 9))
    machine = WebSocketConnection(Role.CLIENT, mask=keys.__next__)
    machine.send(HELLO)
    machine.send(Ping())
    machine.send(Close(code=None))
    assert written(machine) == b"\x81\x85\1\1\1\1" + mask(b"Hello", b"\1" * 4) + b"\x89\x80\2\2\2\2" + b"\x88\x80\3\3\3\3"


# Every split

CONVERSATION = [
    (0x01, b"\xc3"),  # half of a character: bytes are passed on, where they are cut is not our business
    (0x89, b"still there?"),
    (0x00, b""),
    (0x80, b"\xa9"),
    (0x8A, b""),
    (0x82, bytes(range(130))),
    (0x82, b""),
    (0x88, close_body(1000, b"bye")),
]
HEARD = [
    Frame(opcode=TEXT, fin=False, data=b"\xc3"),
    Ping(data=b"still there?"),
    Frame(opcode=CONTINUATION, fin=False, data=b""),
    Frame(opcode=CONTINUATION, fin=True, data=b"\xa9"),
    Pong(data=b""),
    Frame(opcode=BINARY, fin=True, data=bytes(range(130))),
    Frame(opcode=BINARY, fin=True, data=b""),
    Close(code=1000, reason="bye"),
]


@pytest.mark.parametrize(("end", "encode"), [(server, from_client), (client, from_server)])
def test_a_conversation_is_the_same_however_it_is_cut(
    end: Callable[..., WebSocketConnection], encode: Callable[[int, bytes], bytes]
) -> None:
    wire = b"".join(itertools.starmap(encode, CONVERSATION))
    for cut in range(len(wire) + 1):
        machine = end(check_utf8=True)
        machine.receive_data(wire[:cut])
        events = pull(machine)
        machine.receive_data(memoryview(wire)[cut:])
        assert events + pull(machine) == HEARD
    machine = end()
    events = []
    for octet in wire:
        machine.receive_data(bytes([octet]))
        events += pull(machine)
    assert events == HEARD


def test_one_event_is_pulled_at_a_time_and_the_rest_waits() -> None:
    machine = server()
    wire = from_client(0x81, b"one")
    machine.receive_data(wire + from_client(0x81, b"two") + b"\x81")
    assert machine.unread == 2 * len(wire) + 1
    assert machine.next_event() == Frame(opcode=TEXT, fin=True, data=b"one")
    assert machine.unread == len(wire) + 1
    assert machine.next_event() == Frame(opcode=TEXT, fin=True, data=b"two")
    assert machine.next_event() is NEED_DATA
    assert machine.unread == 1


# Violations

BAD_FOR_BOTH = [
    pytest.param(0xC1, b"x", 1002, id="extension bit on data"),
    pytest.param(0x93, b"x", 1002, id="extension bit and reserved opcode"),
    pytest.param(0x83, b"x", 1002, id="reserved data opcode"),
    pytest.param(0x8B, b"x", 1002, id="reserved control opcode"),
    pytest.param(0xC9, b"x", 1002, id="extension bit on a ping"),
    pytest.param(0x09, b"x", 1002, id="fragmented ping"),
    pytest.param(0x08, b"", 1002, id="fragmented close"),
    pytest.param(0x89, bytes(126), 1002, id="ping of 126 bytes"),
    pytest.param(0x88, bytes(70000), 1002, id="close of 70000 bytes"),
    pytest.param(0x80, b"x", 1002, id="continuation of nothing"),
    pytest.param(0x88, b"\x03", 1002, id="half a close code"),
    pytest.param(0x88, close_body(999), 1002, id="close 999"),
    pytest.param(0x88, close_body(1004), 1002, id="close 1004"),
    pytest.param(0x88, close_body(1005), 1002, id="close 1005"),
    pytest.param(0x88, close_body(1006), 1002, id="close 1006"),
    pytest.param(0x88, close_body(1015), 1002, id="close 1015"),
    pytest.param(0x88, close_body(2999), 1002, id="close 2999"),
    pytest.param(0x88, close_body(5000), 1002, id="close 5000"),
    pytest.param(0x88, close_body(1000, b"\xff"), 1007, id="close reason not UTF-8"),
]


@pytest.mark.parametrize(("first", "payload", "code"), BAD_FOR_BOTH)
def test_a_violation_is_answered_by_a_close_and_then_nothing_is_read(first: int, payload: bytes, code: int) -> None:
    for end, encode in [(server, from_client), (client, from_server)]:
        machine = end()
        machine.receive_data(encode(0x81, b"good"))
        assert violation(machine, encode(first, payload) + encode(0x81, b"unheard")) == code
        assert (machine.unread, machine.is_open, machine.closed, machine.close_code) == (0, False, False, 1006)
        closing = written(machine)
        head = 6 if end is client else 2
        assert closing[0] == 0x88
        assert mask(closing[head:], closing[2:6] if end is client else bytes(4))[:2] == close_body(code)
        assert violation(machine, encode(0x82, b"unheard")) == code
        machine.receive_eof()
        with pytest.raises(RemoteProtocolError):
            machine.next_event()
        assert written(machine) == b""


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param("8105", id="unmasked data"),
        pytest.param("8900", id="unmasked ping"),
        pytest.param("82fe007d", id="125 in two bytes"),
        pytest.param("82ff000000000000ffff", id="65535 in eight bytes"),
        pytest.param("82ff8000000000000000", id="2**63 bytes"),
        pytest.param("c2", id="extension bit, length unknown"),
    ],
)
def test_a_server_refuses_a_header_before_its_payload(wire: str) -> None:
    machine = server()
    for octet in bytes.fromhex(wire)[:-1]:
        machine.receive_data(bytes([octet]))
        assert machine.next_event() is NEED_DATA
    last = bytes.fromhex(wire)[-1:] + (b"\x80" if wire == "c2" else b"")
    assert violation(machine, last) == 1002


def test_a_client_refuses_masked_frames() -> None:
    assert violation(client(), from_client(0x81, b"x")) == 1002
    assert violation(client(), from_client(0x89, b"x")) == 1002


def test_a_new_message_inside_a_fragmented_one_is_a_violation() -> None:
    assert violation(server(), from_client(0x01, b"a") + from_client(0x81, b"b")) == 1002
    assert violation(server(), from_client(0x02, b"a") + from_client(0x80, b"b") + from_client(0x00, b"c")) == 1002


def test_the_error_is_always_the_same_and_does_not_grow() -> None:
    machine = server()
    violation(machine, from_client(0x80))
    errors = []
    for _ in range(3):
        with pytest.raises(RemoteProtocolError) as caught:
            machine.next_event()
        error = caught.value
        errors.append((str(error), error.status, error.wire_code, len(caught.traceback)))
    assert errors == [errors[0]] * 3


def test_a_violation_after_our_close_adds_no_second_one() -> None:
    machine = server()
    machine.send(Close(code=1001))
    assert violation(machine, from_client(0x80)) == 1002
    assert written(machine) == b"\x88\x02\x03\xe9"


# Limits


def test_a_part_of_the_limit_passes_and_one_byte_more_does_not() -> None:
    for limit in (0, 10, 125, 126, LARGE - 1, LARGE):
        machine = server(part=limit)
        machine.receive_data(from_client(0x82, bytes(limit)))
        assert pull(machine) == [Frame(opcode=BINARY, fin=True, data=bytes(limit))]
        assert violation(machine, write_header(0x82, limit + 1, MASKED) + KEY) == 1009


def test_no_memory_is_taken_for_a_part_above_the_limit() -> None:
    asked: list[int] = []
    machine = WebSocketConnection(Role.SERVER, memory=Memory(allocate=asked.append))
    assert violation(machine, write_header(0x82, 2**62, MASKED) + KEY) == 1009
    assert asked == []


def test_memory_that_can_never_be_had_ends_the_connection_with_1009() -> None:
    machine = WebSocketConnection(Role.SERVER, memory=Memory(allocate=lambda n: None))
    machine.receive_data(from_client(0x82, bytes(LARGE - 1)))
    assert len(pull(machine)) == 1
    assert violation(machine, write_header(0x82, LARGE, MASKED) + KEY) == 1009


def test_memory_that_is_refused_ends_the_connection_with_1013_and_not_before_a_byte_needs_it() -> None:
    machine = WebSocketConnection(Role.SERVER, memory=Memory(pay=lambda n: False))
    machine.receive_data(write_header(0x82, LARGE, MASKED) + KEY)
    assert machine.next_event() is NEED_DATA
    assert violation(machine, b"x") == 1013


@pytest.mark.parametrize("size", [LARGE, 3 * LARGE + 5, 5_000_000])
def test_a_large_frame_is_paid_for_as_it_arrives(size: int) -> None:
    paid: list[int] = []

    def pay(n: int) -> bool:
        paid.append(n)
        return True

    machine = WebSocketConnection(Role.SERVER, memory=Memory(pay=pay))
    machine.receive_data(write_header(0x82, size, MASKED) + KEY)
    assert machine.next_event() is NEED_DATA
    assert (paid, machine.get_buffer()) == ([], None), "what is only announced takes nothing"
    arrived = 0
    while arrived < size:
        buffer = machine.get_buffer()
        n = min(size - arrived, 40_000 if buffer is None else len(buffer))
        if buffer is None:
            machine.receive_data(bytes(n))
        else:
            machine.buffer_updated(n)
        arrived += n
        event = machine.next_event()
        assert arrived <= sum(paid) <= min(size, arrived + min(max(arrived, 16_384), 1024 * 1024))
    assert isinstance(event, Frame)
    assert sum(paid) == size


def test_a_message_of_the_limit_passes_and_one_byte_more_does_not() -> None:
    machine = server(message=10)
    exact = from_client(0x02, bytes(6)) + from_client(0x80, bytes(4))
    machine.receive_data(exact + exact)
    assert len(pull(machine)) == 4
    assert violation(machine, from_client(0x02, bytes(6)) + from_client(0x80, bytes(5))) == 1009


def test_fragments_up_to_the_limit_pass_and_one_more_does_not() -> None:
    machine = server(fragments=3)
    exact = from_client(0x02) + from_client(0x00) + from_client(0x80)
    machine.receive_data(exact + exact)
    assert len(pull(machine)) == 6
    assert violation(machine, from_client(0x02) + from_client(0x00) * 3) == 1009


def test_text_is_not_looked_into_unless_asked() -> None:
    machine = server()
    machine.receive_data(from_client(0x81, b"\xff\xfe"))
    assert pull(machine) == [Frame(opcode=TEXT, fin=True, data=b"\xff\xfe")]


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([(0x81, b"\xff")], id="never legal"),
        pytest.param([(0x81, b"\xc3")], id="cut short"),
        pytest.param([(0x01, b"\xc3"), (0x80, b"")], id="cut short in fragments"),
        pytest.param([(0x01, b"\xc3"), (0x00, b"("), (0x80, b"")], id="continued wrongly"),
        pytest.param([(0x81, b"\xed\xa0\x80")], id="surrogate"),
        pytest.param([(0x81, b"a" * LARGE + b"\xff")], id="at the end of a large frame"),
    ],
)
def test_invalid_text_is_refused_where_the_check_is_on(frames: list[tuple[int, bytes]]) -> None:
    machine = server(check_utf8=True)
    assert violation(machine, b"".join(itertools.starmap(from_client, frames))) == 1007


def test_the_check_lets_binary_and_characters_split_over_fragments_pass() -> None:
    machine = server(check_utf8=True)
    frames = [
        (0x02, b"\xff"),
        (0x80, b"\xff"),
        (0x01, b"\xf0\x9f"),
        (0x89, b"\xff"),
        (0x00, b"\x98"),
        (0x80, b"\x80"),
        (0x82, b"\xff"),
    ]
    machine.receive_data(b"".join(itertools.starmap(from_client, frames)))
    assert len(pull(machine)) == len(frames)


# Closing


def test_a_close_received_is_echoed_and_nothing_follows_it() -> None:
    machine = server()
    machine.receive_data(from_client(0x88, close_body(4321, "später".encode())) + from_client(0x81, b"late"))
    assert machine.next_event() == Close(code=4321, reason="später")
    assert machine.next_event() is NEED_DATA
    machine.receive_data(b"\xff\xff\xff")
    assert (machine.next_event(), machine.unread) == (NEED_DATA, 0)
    assert (machine.closed, machine.is_open, machine.close_code) == (True, False, 4321)
    machine.receive_eof()
    assert machine.next_event() == ConnectionEnd()
    assert machine.next_event() == ConnectionEnd()
    assert machine.close_code == 4321
    assert written(machine) == from_server(0x88, close_body(4321, "später".encode()))


def test_a_close_without_a_body_has_no_code_on_the_wire_and_1005_in_the_state() -> None:
    machine = server()
    machine.receive_data(from_client(0x88))
    assert pull(machine) == [Close(code=None)]
    assert machine.close_code == 1005
    assert written(machine) == b"\x88\x00"


def test_frames_still_arrive_after_our_close_until_theirs_which_is_not_echoed() -> None:
    machine = server()
    machine.send(Close(code=1000))
    assert (machine.is_open, machine.close_sent, machine.closed) == (False, True, False)
    machine.receive_data(from_client(0x81, b"last words") + from_client(0x89, b"?") + from_client(0x88, close_body(1000)))
    assert pull(machine) == [Frame(opcode=TEXT, fin=True, data=b"last words"), Ping(data=b"?"), Close(code=1000)]
    assert machine.closed
    assert written(machine) == b"\x88\x02\x03\xe8"


def test_the_stream_has_ended_when_the_last_byte_of_our_close_is_written() -> None:
    machine = server()
    machine.send(HELLO)
    machine.send(Close())
    ends = []
    while machine.data_to_send(1):
        ends.append(machine.data_sent().ended)
    assert ends == [[]] * 10 + [[1]]
    assert machine.data_sent() == Sent()


@pytest.mark.parametrize("cut", [0, 1, 4, 8])
def test_an_end_without_close_is_1006(cut: int) -> None:
    machine = server()
    machine.receive_data(from_client(0x81, b"all") + from_client(0x81, b"half")[:cut])
    machine.receive_eof()
    assert machine.next_event() == Frame(opcode=TEXT, fin=True, data=b"all")
    assert machine.close_code is None
    assert machine.next_event() == ConnectionEnd()
    assert [machine.close_code, machine.is_open, machine.closed] == [1006, False, False]
    with pytest.raises(LocalProtocolError, match="transport has ended"):
        machine.send(HELLO)
    with pytest.raises(LocalProtocolError, match="after receive_eof"):
        machine.receive_data(b"")


def test_an_end_in_the_middle_of_a_large_frame_is_1006() -> None:
    machine = server()
    machine.receive_data(from_client(0x82, bytes(LARGE))[:-1])
    assert machine.next_event() is NEED_DATA
    machine.receive_eof()
    assert machine.get_buffer() is None
    assert machine.next_event() == ConnectionEnd()


def test_an_end_in_the_middle_of_a_ping_is_1006() -> None:
    machine = server()
    machine.receive_data(from_client(0x89, b"half")[:-1])
    machine.receive_eof()
    assert machine.next_event() == ConnectionEnd()
    assert machine.close_code == 1006


# Sending


def test_a_continuation_is_sent_exactly_when_one_is_due() -> None:
    machine = server()
    with pytest.raises(LocalProtocolError, match="not due"):
        machine.send(Frame(opcode=CONTINUATION, fin=True, data=b""))
    machine.send(Frame(opcode=TEXT, fin=False, data=b"a"))
    with pytest.raises(LocalProtocolError, match="is due"):
        machine.send(HELLO)
    machine.send(Ping())
    machine.send(Frame(opcode=CONTINUATION, fin=True, data=b"b"))
    machine.send(HELLO)
    assert written(machine) == b"\x01\x01a" + b"\x89\x00" + b"\x80\x01b" + b"\x81\x05Hello"


def test_nothing_is_sent_after_a_close() -> None:
    for close in (lambda m: m.send(Close()), lambda m: (m.receive_data(from_client(0x88)), m.next_event())):
        machine = server()
        close(machine)
        before = machine.room()
        for event in (HELLO, Ping(), Close()):
            with pytest.raises(LocalProtocolError, match="our Close is queued"):
                machine.send(event)
        assert machine.room() == before


REGISTERED = {*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)}
"""The codes that a Close frame may have: IANA's registry, without those that it reserves for no frame (RFC 6455 section 7.4)."""


@pytest.mark.parametrize("payload_path", [True, False])
def test_every_registered_close_code_arrives_in_both_directions_and_no_other_does(payload_path: bool) -> None:
    for code in (*range(1017), 2998, 2999, 3000, 3001, 4998, 4999, 5000, 5001, 65535):
        for reads, encode, sends in ((Role.SERVER, from_client, Role.CLIENT), (Role.CLIENT, from_server, Role.SERVER)):
            machine = WebSocketConnection(reads, mask=lambda: KEY, payload_path=payload_path)
            peer = WebSocketConnection(sends, mask=lambda: KEY, payload_path=payload_path)
            machine.receive_data(encode(0x88, close_body(code, "später".encode())))
            if code in REGISTERED:
                assert machine.next_event() == Close(code=code, reason="später")
                assert (machine.close_code, machine.closed) == (code, True)
                peer.send(Close(code=code, reason="später"))
                assert written(peer) == encode(0x88, close_body(code, "später".encode()))
            else:
                assert violation(machine, b"") == 1002
                with pytest.raises(LocalProtocolError, match=f"code {code} may not be sent"):
                    peer.send(Close(code=code))


def test_a_close_of_a_bad_gateway_is_read_whatever_masks_it_and_however_it_is_cut() -> None:
    for key in (b"\0\0\0\0", b"\x03\xf6\0\0", b"\x03\xf5\xff\xff", b"\xff\xff\xff\xff"):
        data = bytes((0x88, 0x80 | 5)) + key + mask(close_body(1014, b"bye"), key)
        for cut in range(len(data)):
            machine = server()
            machine.receive_data(data[:cut])
            assert machine.next_event() is NEED_DATA
            machine.receive_data(data[cut:])
            assert machine.next_event() == Close(code=1014, reason="bye")
    assert violation(server(), from_client(0x88, close_body(1014, b"\xff"))) == 1007
    assert violation(client(), from_server(0x08, close_body(1014))) == 1002


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 70000, -1])
def test_a_close_code_that_may_not_be_sent_is_our_own_mistake(code: int) -> None:
    machine = server()
    with pytest.raises(LocalProtocolError, match=str(code)):
        machine.send(Close(code=code))
    assert machine.is_open
    assert written(machine) == b""


@pytest.mark.parametrize("code", [1000, 1001, 1003, 1007, 1009, 1011, 1013, 3000, 4999])
def test_a_legal_close_code_arrives(code: int) -> None:
    machine, peer = server(), client()
    machine.send(Close(code=code, reason="why"))
    peer.receive_data(written(machine))
    assert peer.next_event() == Close(code=code, reason="why")


def test_a_close_reason_is_cut_at_a_character_and_needs_a_code() -> None:
    machine = server()
    with pytest.raises(LocalProtocolError, match="needs a code"):
        machine.send(Close(code=None, reason="why"))
    machine.send(Close(code=1011, reason="\udcff" + "é" * 100))
    assert written(machine) == from_server(0x88, close_body(1011, b"?" + "é".encode() * 61))


def test_a_ping_holds_at_most_125_bytes() -> None:
    machine = server()
    machine.send(Ping(data=bytes(125)))
    with pytest.raises(LocalProtocolError, match="at most 125"):
        machine.send(Ping(data=bytes(126)))
    assert written(machine) == from_server(0x89, bytes(125))


def test_several_buffers_are_one_frame() -> None:
    for sizes in ([], [0], [1, 2, 3], [10, 5000, 0, 7], [5000, 0], [LARGE, LARGE]):
        data = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
        whole = b"".join(data)
        for machine, encode in ((server(), from_server), (client(), from_client)):
            machine.send_frame(BINARY, True, [memoryview(data[0]), *map(bytearray, data[1:])] if data else [])
            assert written(machine) == encode(0x82, whole)


def test_an_empty_buffer_at_the_end_leaves_nothing_behind() -> None:
    machine = server()
    machine.send_frame(BINARY, True, [bytes(5000), b""])
    assert sum(map(len, machine.data_to_send(5004))) == 5004
    machine.data_sent()
    assert machine.data_to_send() == []


def test_an_empty_frame_leaves_nothing_behind_in_either_role() -> None:
    for machine, head in ((server(), 2), (client(), 6)):
        machine.send(Frame(opcode=BINARY, fin=True, data=b""))
        assert list(map(len, machine.data_to_send(head))) == [head]
        machine.data_sent()
        assert machine.data_to_send() == []


def test_a_view_of_wider_items_is_sent_as_its_bytes() -> None:
    machine = server()
    machine.send(Frame(opcode=BINARY, fin=True, data=memoryview(bytes(range(8))).cast("I")))
    assert written(machine) == from_server(0x82, bytes(range(8)))


def test_a_server_queues_large_payloads_by_reference_and_small_ones_by_copy() -> None:
    machine = server()
    small, large = bytearray(4095), bytearray(4096)
    machine.send_frame(BINARY, True, [small])
    machine.send_frame(BINARY, True, [large])
    small[0] = large[0] = 1
    *copied, referenced = machine.data_to_send()
    assert b"".join(copied) == from_server(0x82, bytes(4095)) + write_header(0x82, 4096, 0)
    assert referenced is large


def test_small_frames_leave_as_one_buffer() -> None:
    machine = server()
    for _ in range(100):
        machine.send(HELLO)
    [buffer] = machine.data_to_send()
    assert buffer == b"\x81\x05Hello" * 100


@pytest.mark.parametrize("at_most", [1, 2, 5, 4095, 4096, 5000, 65536])
def test_no_call_gives_out_more_than_asked(at_most: int) -> None:
    machine = server()
    for size in (5, 10000, 0, 5):
        machine.send(Frame(opcode=BINARY, fin=True, data=bytes(size)))
    total, out = machine.limits.send_buffer - machine.room(), b""
    while buffers := machine.data_to_send(at_most):
        assert 0 < sum(map(len, buffers)) <= at_most
        out += b"".join(buffers)
        machine.data_sent()
    assert out == b"".join(from_server(0x82, bytes(size)) for size in (5, 10000, 0, 5))
    assert len(out) == total
    assert machine.room() == machine.limits.send_buffer


def test_what_is_given_out_must_be_sent_before_more_is_taken() -> None:
    machine = server(send_buffer=100)
    assert machine.data_to_send() == []
    assert machine.data_to_send() == []
    machine.send(HELLO)
    assert machine.data_to_send(3) == [b"\x81\x05H"]
    with pytest.raises(LocalProtocolError, match="before data_sent"):
        machine.data_to_send(3)
    assert machine.room() == 93
    assert machine.data_sent() == Sent(room=[1])
    assert machine.room() == 96
    assert machine.data_to_send() == [b"ello"]
    machine.data_sent()
    assert machine.room() == 100


def test_a_message_larger_than_the_room_is_taken_whole() -> None:
    machine = server(send_buffer=10)
    machine.send(Frame(opcode=BINARY, fin=True, data=bytes(9000)))
    assert machine.room() == 0
    assert len(written(machine)) == 9004
    assert machine.room() == 10


# Pings while the output is backed up


def test_every_ping_has_its_own_pong_in_order_and_too_many_that_wait_choke_the_connection() -> None:
    machine = server(pongs=999)
    for i in range(1000):
        assert not machine.choked
        machine.receive_data(from_client(0x89, b"%d" % i))
        assert machine.next_event() == Ping(data=b"%d" % i)
    assert machine.choked
    assert machine.counters.control == 1000
    assert written(machine) == b"".join(from_server(0x8A, b"%d" % i) for i in range(1000))
    assert not machine.choked
    assert machine.room() == machine.limits.send_buffer


def test_a_pong_goes_ahead_of_waiting_frames_but_never_into_one() -> None:
    machine = server()
    for _ in range(2):
        machine.send(Frame(opcode=BINARY, fin=True, data=bytes(5000)))
    out = b"".join(machine.data_to_send(1000))
    machine.data_sent()
    machine.receive_data(from_client(0x89, b"?"))
    machine.next_event()
    frame = from_server(0x82, bytes(5000))
    assert out + written(machine, 777) == frame + from_server(0x8A, b"?") + frame


def test_a_pong_goes_before_a_close_that_waits() -> None:
    machine = server()
    machine.receive_data(from_client(0x89, b"?") + from_client(0x88))
    assert pull(machine) == [Ping(data=b"?"), Close(code=None)]
    assert written(machine, 1) == from_server(0x8A, b"?") + b"\x88\x00"


def test_a_pong_that_has_begun_to_leave_is_finished() -> None:
    machine = server()
    machine.receive_data(from_client(0x89, b"one"))
    machine.next_event()
    assert machine.data_to_send(2) == [b"\x8a\x03"]
    machine.data_sent()
    machine.receive_data(from_client(0x89, b"two"))
    machine.next_event()
    assert written(machine) == b"one" + from_server(0x8A, b"two")


# Large frames


def test_a_large_frame_is_received_into_the_memory_it_is_given_out_in() -> None:
    memory: list[bytearray] = []

    def allocate(n: int) -> bytearray:
        memory.append(bytearray(n))
        return memory[-1]

    machine = WebSocketConnection(Role.SERVER, memory=Memory(allocate=allocate))
    payload = bytes(i * 31 & 0xFF for i in range(3 * LARGE + 5))
    wire = memoryview(from_client(0x02, payload) + from_client(0x80, b"end"))
    assert machine.get_buffer() is None
    machine.receive_data(wire[:1000])
    assert machine.get_buffer() is None
    assert machine.next_event() is NEED_DATA
    assert machine.unread == 0
    at = 1000
    while (buffer := machine.get_buffer()) is not None:
        assert len(buffer) > 0
        n = min(len(buffer), 77777)
        buffer[:n] = wire[at : at + n]
        at += n
        machine.buffer_updated(n)
        frame = machine.next_event()
    assert isinstance(frame, Frame)
    assert (frame.opcode, frame.fin, frame.data) == (BINARY, False, payload)
    assert frame.data is memory[0]
    assert machine.get_buffer() is None
    machine.receive_data(wire[at:])
    assert pull(machine) == [Frame(opcode=CONTINUATION, fin=True, data=b"end")]


def test_a_large_frame_and_what_follows_it_may_come_by_receive_data_at_any_cut() -> None:
    payload = bytes(i * 31 & 0xFF for i in range(LARGE))
    events = [Frame(opcode=BINARY, fin=True, data=payload), Ping(data=b"?")]
    for end, encode in ((server, from_client), (client, from_server)):
        wire = encode(0x82, payload) + encode(0x89, b"?")
        for cut in (*range(16), 1000, 1001, 1002, 1003, LARGE, *range(len(wire) - 8, len(wire))):
            machine = end()
            machine.receive_data(wire[:cut])
            heard = pull(machine)
            machine.receive_data(wire[cut:])
            assert heard + pull(machine) == events


def test_no_buffer_is_offered_while_older_bytes_are_unread() -> None:
    machine = server()
    machine.receive_data(from_client(0x82, bytes(LARGE))[:100])
    machine.next_event()
    machine.receive_data(b"12345")
    assert machine.get_buffer() is None
    with pytest.raises(LocalProtocolError, match="did not offer"):
        machine.buffer_updated(1)
    machine.next_event()
    buffer = machine.get_buffer()
    assert buffer is not None
    with pytest.raises(LocalProtocolError, match="did not offer"):
        machine.buffer_updated(len(buffer) + 1)


# The ledger


def test_credit_returns_exactly_what_frames_gave_out() -> None:
    machine = server()
    machine.receive_data(from_client(0x01, b"abc") + from_client(0x89, b"ping") + from_client(0x80, bytes(LARGE)))
    assert machine.unconsumed == 0
    pull(machine)
    assert machine.unconsumed == 3 + LARGE
    machine.credit(3)
    machine.credit(0)
    for wrong in (LARGE + 1, -1):
        with pytest.raises(LocalProtocolError, match="credit"):
            machine.credit(wrong)
    machine.credit(LARGE)
    assert machine.unconsumed == 0


def test_an_event_that_is_only_received_cannot_be_sent() -> None:
    with pytest.raises(AssertionError):
        server().send(Pong())  # type: ignore[arg-type]


def test_the_client_role_demands_a_source_of_keys() -> None:
    with pytest.raises(LocalProtocolError, match="mask"):
        WebSocketConnection(Role.CLIENT)
