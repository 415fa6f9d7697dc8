"""Server-Sent Events: what is written, and what a client reads whatever the pieces it arrives in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.errors import RemoteProtocolError
from protocols.events import NEED_DATA
from protocols.sse import ServerSentEvent, SSEDecoder, encode_event


def drain(decoder: SSEDecoder) -> list[ServerSentEvent]:
    events = []
    while isinstance(event := decoder.next_event(), ServerSentEvent):
        events.append(event)
    return events


def decode(*pieces: bytes) -> list[ServerSentEvent]:
    decoder = SSEDecoder()
    events = []
    for piece in pieces:
        decoder.receive_data(piece)
        events += drain(decoder)
    return events


def test_an_event_is_data_one_space_and_a_blank_line() -> None:
    assert encode_event(b'{"a": 1}') == b'data: {"a": 1}\n\n'


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_data_of_several_lines_is_several_data_lines(end: bytes) -> None:
    assert encode_event(b"a" + end + b"b") == b"data: a\ndata: b\n\n"
    assert encode_event(end) == b"data: \ndata: \n\n"


STREAM = (
    b"\xef\xbb\xbf: a comment\r\n"
    b"data: first\r\n\r\n"
    b"event: add\rdata:no space\rdata:  two spaces\rid: 7\r\r"
    b"retry: 10\nunknown: x\ndata\ndata\n\n"
    b"event: lost, for want of data\n\n"
    b"id: with\0nul\ndata: :\n\n"
    b"data: never completed\n"
)
EVENTS = [
    ServerSentEvent(data=b"first"),
    ServerSentEvent(data=b"no space\n two spaces", event="add", id="7"),
    ServerSentEvent(data=b"\n", id="7"),
    ServerSentEvent(data=b":", id="7"),
]


def test_a_stream_is_read_by_the_rules_of_the_standard() -> None:
    assert decode(STREAM) == EVENTS


def test_every_cut_of_a_stream_gives_the_same_events() -> None:
    for cut in range(len(STREAM) + 1):
        assert decode(STREAM[:cut], STREAM[cut:]) == EVENTS
    assert decode(*(bytes([byte]) for byte in STREAM)) == EVENTS


def test_an_event_is_given_out_at_its_blank_line_without_waiting_for_a_second_half_of_crlf() -> None:
    decoder = SSEDecoder()
    decoder.receive_data(b"data: a\r\n\r")
    assert drain(decoder) == [ServerSentEvent(data=b"a")]
    decoder.receive_data(b"\ndata: b\r\r")
    assert drain(decoder) == [ServerSentEvent(data=b"b")]


def test_an_empty_data_line_is_an_event_and_no_data_line_is_none() -> None:
    assert decode(b"data:\n\n") == [ServerSentEvent(data=b"")]
    assert decode(b"\n\n:\n\nevent: a\n\n") == []


def test_a_name_and_an_id_that_are_not_utf8_do_not_break_the_stream() -> None:
    assert decode(b"event: \xff\nid: \xff\ndata: \xff\n\n") == [ServerSentEvent(data=b"\xff", event="\ufffd", id="\ufffd")]


def test_only_one_byte_order_mark_is_skipped_and_only_at_the_start() -> None:
    assert decode(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n") == [ServerSentEvent(data=b"a")]


def test_the_bound_of_a_line_is_exact_whether_its_end_has_come_or_not() -> None:
    decoder = SSEDecoder(max_event=7)
    decoder.receive_data(b"data: a\n\n")
    assert drain(decoder) == [ServerSentEvent(data=b"a")]
    for tail in (b"data: ab", b"data: ab\n\n", b":2345678"):
        decoder = SSEDecoder(max_event=7)
        decoder.receive_data(tail)
        for _ in range(2):
            with pytest.raises(RemoteProtocolError, match="at most 7 bytes"):
                decoder.next_event()


def test_the_bound_holds_for_the_lines_of_one_event_together() -> None:
    decoder = SSEDecoder(max_event=12)
    decoder.receive_data(b"data: 123456\ndata: 12345\n\ndata: 123456\ndata: 123456\n\n")
    assert decoder.next_event() == ServerSentEvent(data=b"123456\n12345")
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="the data of a server-sent event is at most 12 bytes"):
            decoder.next_event()


def test_nothing_is_kept_of_what_has_been_given_out() -> None:
    decoder = SSEDecoder(max_event=20)
    for _ in range(1000):
        decoder.receive_data(b": keep alive\n\ndata: a\n\n")
        assert drain(decoder) == [ServerSentEvent(data=b"a")]


@settings(max_examples=80)
@given(st.lists(st.binary(max_size=12), max_size=5), st.integers(1, 9))
def test_what_is_encoded_is_decoded_with_its_line_ends_made_lf(payloads: list[bytes], size: int) -> None:
    body = b"".join(map(encode_event, payloads))
    expected = [data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") for data in payloads]
    assert [event.data for event in decode(*(body[i : i + size] for i in range(0, len(body), size)))] == expected


@settings(max_examples=80)
@given(
    st.lists(
        st.sampled_from([b"data", b"id", b"event", b":", b" ", b"\r", b"\n", b"\xef\xbb\xbf", b"\0", b"x"]), max_size=30
    )
)
def test_any_bytes_in_any_pieces_give_the_same_events(pieces: list[bytes]) -> None:
    assert decode(*pieces) == decode(b"".join(pieces))


def test_any_buffer_is_taken() -> None:
    assert decode(bytearray(b"data: a\n"), memoryview(b"\n")) == [ServerSentEvent(data=b"a")]  # type: ignore[arg-type]


def test_need_data_is_what_an_unfinished_event_gives() -> None:
    decoder = SSEDecoder()
    decoder.receive_data(b"data: a\n")
    assert decoder.next_event() is NEED_DATA


@pytest.mark.parametrize(
    ("rest", "begun"),
    [
        (b"", False),
        (b"d", True),
        (b"data: x\n", True),
        (b"event: e\n", True),
        (b": so\n", False),
        (b": so", False),
        (b"\r", False),
    ],
)
def test_a_decoder_knows_whether_its_body_may_end_here(rest: bytes, begun: bool) -> None:
    decoder = SSEDecoder()
    decoder.receive_data(b"data: whole\r\n\r\n" + rest)
    assert len(drain(decoder)) == 1
    assert decoder.begun == begun


@pytest.mark.parametrize(
    ("body", "begun"), [(b"\xef\xbb\xbf", False), (b"\xef\xbb\xbf: so", False), (b"\xef\xbb\xbfd", True), (b"d", True)]
)
def test_a_mark_at_the_start_is_no_event(body: bytes, begun: bool) -> None:
    decoder = SSEDecoder()
    decoder.receive_data(body)
    assert not drain(decoder)
    assert decoder.begun == begun
