"""The event-stream codec by itself: pieces, limits, memory, and every way a message can be wrong."""

import struct
import uuid
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.aws.eventstream import (
    MAX_PAYLOAD,
    Byte,
    Decoder,
    EventMessage,
    Integer,
    Limits,
    Long,
    Short,
    Timestamp,
    decode_headers,
    encode,
    encode_block,
    encode_buffers,
    encode_headers,
    split,
)
from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.events import NEED_DATA

KIB = 1024


def framed(block, payload=b"", *, total=None, headers=None):
    """A message with right checksums and whatever lengths the test wants to tell."""
    lengths = struct.pack(
        ">II", 16 + len(block) + len(payload) if total is None else total, len(block) if headers is None else headers
    )
    body = lengths + crc32(lengths).to_bytes(4, "big") + block + payload
    return body + crc32(body).to_bytes(4, "big")


def pull(decoder):
    messages = []
    while (message := decoder.next_message()) is not NEED_DATA:
        messages.append(message)
    return messages


def decode(data, limits=None):
    decoder = Decoder(limits)
    decoder.receive_data(data)
    messages = pull(decoder)
    decoder.receive_eof()
    return messages


def refused(data, complaint, limits=None):
    decoder = Decoder(limits)
    decoder.receive_data(data)
    with pytest.raises(RemoteProtocolError, match=complaint):
        pull(decoder)
    return decoder


def signed(kind):
    bound = 1 << 8 * kind.size - 1
    return st.integers(-bound, bound - 1).map(kind)


VALUES = st.one_of(
    st.booleans(),
    *(signed(kind) for kind in (Byte, Short, Integer, Long, Timestamp)),
    st.binary(max_size=300),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=100),
    st.uuids(),
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
HEADERS = st.dictionaries(NAMES, VALUES, max_size=8)
PAYLOADS = st.one_of(st.binary(max_size=400), st.integers(16380, 40000).map(lambda n: bytes(range(256)) * (n // 256)))
MESSAGES = st.builds(EventMessage, headers=HEADERS, payload=PAYLOADS)


# ---- round trips


@given(HEADERS, PAYLOADS)
@settings(max_examples=100)
def test_every_message_comes_back_with_its_types_and_its_order(headers, payload):
    (message,) = decode(encode(EventMessage(headers=headers, payload=payload)))
    assert [(n, type(v), v) for n, v in message.headers.items()] == [(n, type(v), v) for n, v in headers.items()]
    assert message.payload == payload


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.lists(st.integers(1, 20000), min_size=1, max_size=30))
@settings(max_examples=100)
def test_the_messages_do_not_depend_on_the_pieces_they_arrive_in(messages, sizes):
    wire = b"".join(map(encode, messages))
    decoder, got, at, turn = Decoder(), [], 0, 0
    while at < len(wire):
        n = sizes[turn % len(sizes)]
        decoder.receive_data(bytearray(wire[at : at + n]))
        if turn % 3:  # a caller that does not pull after each piece is right too
            got += pull(decoder)
        at, turn = at + n, turn + 1
    got += pull(decoder)
    decoder.receive_eof()
    assert got == messages
    assert (decoder.buffered, decoder.need) == (0, 0)


def test_three_messages_cut_at_every_position_are_the_same_three_messages():
    messages = [
        EventMessage(headers={"a": "b"}, payload=b"one"),
        EventMessage(),
        EventMessage(headers={"n": Long(-1)}, payload=b"three"),
    ]
    wire = b"".join(map(encode, messages))
    for cut in range(len(wire) + 1):
        decoder = Decoder()
        decoder.receive_data(wire[:cut])
        first = pull(decoder)
        decoder.receive_data(wire[cut:])
        assert first + pull(decoder) == messages
        decoder.receive_eof()


def test_a_large_message_between_two_small_ones_survives_every_piece_size():
    messages = [
        EventMessage(payload=b"before"),
        EventMessage(headers={"n": "large"}, payload=bytes(range(251)) * 80),
        EventMessage(payload=b"after"),
    ]
    wire = b"".join(map(encode, messages))
    for size in (1, 7, 16, 1000, 16384, 16385, len(wire) - 1):
        decoder, got = Decoder(), []
        for at in range(0, len(wire), size):
            decoder.receive_data(memoryview(wire)[at : at + size])
            got += pull(decoder)
        assert got == messages


def test_a_large_message_cut_at_every_position_near_its_ends_is_the_same_message():
    message = EventMessage(headers={"n": "large"}, payload=bytes(range(251)) * 80)
    wire = encode(message)
    for cut in [*range(40), *range(len(wire) - 20, len(wire))]:
        decoder = Decoder()
        for piece in (wire[:cut], wire[cut:] + b"\0\0\0"):
            decoder.receive_data(piece)
            got = pull(decoder)
        assert got == [message]
        assert decoder.buffered == 3


def test_the_bytes_of_a_message_are_these():
    assert (
        encode(EventMessage(headers={":date": Timestamp(1), "b": True}, payload=b"hi")).hex()
        == (
            "00000024"  # total length 36
            "00000012"  # headers length 18
            + f"{crc32(bytes.fromhex('0000002400000012')):08x}"
            + "053a64617465080000000000000001"  # :date, type 8
            "016200"  # b, type 0
            "6869" + f"{crc32(encode(EventMessage(headers={':date': Timestamp(1), 'b': True}, payload=b'hi'))[:-4]):08x}"
        )
    )


def test_wire_types_are_never_equal_to_one_another():
    assert len({Byte(1), Short(1), Integer(1), Long(1), Timestamp(1)}) == 5
    assert Byte(1) != Long(1)


def test_decoded_headers_cannot_be_changed():
    (message,) = decode(encode(EventMessage(headers={"a": "b"})))
    with pytest.raises(TypeError):
        message.headers["a"] = "c"


# ---- memory


def test_a_small_payload_is_copied_and_a_large_one_is_a_read_only_view():
    small, large = decode(encode(EventMessage(payload=bytes(16383))) + encode(EventMessage(payload=bytes(16384))))
    assert type(small.payload) is bytes
    assert type(large.payload) is memoryview
    assert large.payload.readonly


def test_a_large_message_in_pieces_is_assembled_where_it_stays():
    wire = encode(EventMessage(payload=bytes(100_000)))
    decoder = Decoder()
    decoder.receive_data(wire[:50])
    assert decoder.next_message() is NEED_DATA
    decoder.receive_data(wire[50:60_000])
    memory = decoder._target.obj
    decoder.receive_data(wire[60_000:])
    message = decoder.next_message()
    assert message.payload.obj is memory
    assert message.payload.readonly


def test_the_buffer_that_bytes_came_in_may_be_reused_at_once():
    wire = encode(EventMessage(headers={"a": "b"}, payload=bytes(range(256)) * 100))
    decoder, pool = Decoder(), bytearray(1000)
    for at in range(0, len(wire), 1000):
        piece = wire[at : at + 1000]
        pool[: len(piece)] = piece
        decoder.receive_data(memoryview(pool)[: len(piece)])
        pool[:] = b"\xff" * 1000
        got = pull(decoder)
    assert got == [EventMessage(headers={"a": "b"}, payload=bytes(range(256)) * 100)]


def test_a_view_of_wider_items_is_taken_as_its_bytes():
    wire = encode(EventMessage(payload=bytes(17_000)))
    wire += bytes(-len(wire) % 4)
    decoder = Decoder()
    decoder.receive_data(memoryview(wire[:400]).cast("I"))
    decoder.next_message()
    decoder.receive_data(memoryview(wire[400:]).cast("I"))
    assert decoder.next_message() == EventMessage(payload=bytes(17_000))


def test_need_is_told_once_the_prelude_holds_and_memory_is_taken_only_after():
    wire = encode(EventMessage(payload=bytes(1_000_000)))
    decoder = Decoder()
    decoder.receive_data(wire[:11])
    assert decoder.next_message() is NEED_DATA
    assert (decoder.need, decoder.buffered) == (0, 11)
    decoder.receive_data(wire[11:12])
    assert decoder.next_message() is NEED_DATA
    assert (decoder.need, decoder.buffered) == (len(wire), 12)
    assert decoder._target is None
    decoder.receive_data(wire[12:500])
    assert decoder._target.nbytes == len(wire)
    assert (decoder.need, decoder.buffered) == (len(wire), 500)
    decoder.receive_data(wire[500:] + b"abc")
    assert decoder.next_message().payload == bytes(1_000_000)
    assert (decoder.need, decoder.buffered) == (0, 3)


def test_need_covers_small_messages_too():
    wire = encode(EventMessage(payload=b"12345"))
    decoder = Decoder()
    decoder.receive_data(wire[:-1])
    assert decoder.next_message() is NEED_DATA
    assert (decoder.need, decoder.buffered) == (len(wire), len(wire) - 1)
    decoder.receive_data(wire[-1:])
    assert decoder.next_message().payload == b"12345"
    assert (decoder.need, decoder.buffered) == (0, 0)


@pytest.mark.parametrize(
    "lengths", [(0xFFFFFFFF, 0), (16, 0xFFFFFFFF), (16 * 2**20, 2**31), (0, 0), (15, 0), (1 << 24, 200_000)]
)
def test_a_lie_about_a_length_never_becomes_a_need(lengths):
    told = struct.pack(">II", *lengths)
    for crc in (crc32(told), crc32(told) ^ 1):
        decoder = refused(told + struct.pack(">I", crc) + bytes(100), "prelude CRC" if crc != crc32(told) else "bytes")
        assert (decoder.need, decoder.buffered) == (0, 0)


def test_a_wrong_prelude_is_refused_at_its_twelfth_byte_not_after_the_message():
    decoder = Decoder()
    decoder.receive_data(bytes(11))
    assert decoder.next_message() is NEED_DATA
    decoder.receive_data(b"\1")
    with pytest.raises(RemoteProtocolError, match="prelude CRC is 0x00000001"):
        decoder.next_message()


# ---- limits, at their boundaries


def test_a_message_of_the_limit_passes_and_one_byte_more_does_not():
    limits = Limits(message=1000)
    assert decode(framed(b"", bytes(984)), limits) == [EventMessage(payload=bytes(984))]
    refused(framed(b"", bytes(985)), "message of 1001 bytes, the limit is 1000", limits)


def test_the_default_limit_takes_the_largest_message_that_can_be_encoded():
    values = {f"header-{n}": bytes(32000) for n in range(4)}
    values["last"] = bytes(128 * KIB - len(encode_headers(values)) - 8)
    wire = b"".join(encode_buffers(values, bytes(MAX_PAYLOAD)))
    assert len(wire) == MAX_PAYLOAD + 128 * KIB + 16
    (message,) = decode(wire)
    assert message.payload.nbytes == MAX_PAYLOAD
    with pytest.raises(LocalProtocolError, match="at most 16777216 bytes, not 16777217"):
        encode_block(b"", bytes(MAX_PAYLOAD + 1))
    with pytest.raises(LocalProtocolError, match="at most 131072 bytes, these take 131073"):
        encode_headers(values | {"last": values["last"] + b"x"})


def test_a_header_block_of_the_limit_passes_and_one_byte_more_does_not():
    assert decode(framed(encode_headers({"a": bytes(95)})), Limits(headers=100))
    refused(framed(encode_headers({"a": bytes(96)})), "headers of 101 bytes, the limit is 100", Limits(headers=100))


def test_sixty_four_fields_pass_and_sixty_five_do_not():
    many = {f"h{n}": True for n in range(64)}
    assert len(decode(encode(EventMessage(headers=many)))[0].headers) == 64
    refused(framed(encode_headers(many) + b"\4last\0"), "more than 64 header fields")
    with pytest.raises(LocalProtocolError, match="at most 64 header fields, not 65"):
        encode_headers(many | {"last": True})


@pytest.mark.parametrize(("kind", "value"), [(6, b"x" * 32767), (7, "x" * 32767)])
def test_a_value_of_32767_bytes_passes_and_one_more_does_not(kind, value):
    assert decode(encode(EventMessage(headers={"a": value})))[0].headers == {"a": value}
    refused(
        framed(b"\1a" + bytes([kind]) + (32768).to_bytes(2, "big") + b"x" * 32768), "value of 32768 bytes, at most 32767"
    )
    with pytest.raises(LocalProtocolError, match="at most 32767 bytes, not 32768"):
        encode_headers({"a": value + value[:1]})


def test_a_name_has_1_to_255_bytes_of_utf8():
    for name in ("x", "é" * 127 + "x"):
        assert decode(encode(EventMessage(headers={name: False}))) == [EventMessage(headers={name: False})]
    refused(framed(b"\0\0"), "header name is empty, at byte 0")
    refused(framed(b"\2\xc3\x28\0"), "header name is not UTF-8")
    for name in ("", "é" * 128):
        with pytest.raises(LocalProtocolError, match="1 to 255 bytes"):
            encode_headers({name: True})


# ---- other errors


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        (b"\1a\0\1b\0\1a\1", "header 'a' is there twice"),
        (b"\1a\x0a", "header 'a': type 10, there are 0 to 9"),
        (b"\1a\xff", "header 'a': type 255"),
        (b"\5ab", "header name needs 5 bytes, 2 are left"),
        (b"\1a", "header 'a' needs 1 bytes, 0 are left"),
        (b"\1a\2", "header 'a' needs 1 bytes, 0 are left"),
        (b"\1a\4\0\0\0", "header 'a' needs 4 bytes, 3 are left"),
        (b"\1a\x08" + bytes(7), "header 'a' needs 8 bytes, 7 are left"),
        (b"\1a\x09" + bytes(15), "header 'a' needs 16 bytes, 15 are left"),
        (b"\1a\6\0", "header 'a' needs 2 bytes, 1 are left"),
        (b"\1a\7\0\3ab", "header 'a' needs 3 bytes, 2 are left"),
        (b"\1a\7\0\2\xff\xfe", "header 'a' is not UTF-8"),
    ],
)
def test_a_header_block_that_breaks_the_format_is_refused_by_name(block, complaint):
    refused(framed(block, b"payload"), complaint)


def test_a_headers_length_beyond_the_message_is_refused():
    refused(framed(b"\1a\0", total=18), "message of 18 bytes cannot hold headers of 3")


def test_one_flipped_bit_anywhere_is_refused():
    wire = encode(EventMessage(headers={"name": "value"}, payload=b"payload"))
    for bit in range(8 * len(wire)):
        damaged = bytearray(wire)
        damaged[bit // 8] ^= 1 << bit % 8
        refused(damaged, "CRC")


def test_a_damaged_byte_of_a_large_message_in_pieces_is_refused():
    wire = bytearray(encode(EventMessage(payload=bytes(100_000))))
    for at in (12, 50_000, len(wire) - 5, len(wire) - 1):
        wire[at] ^= 1
        decoder = Decoder()
        decoder.receive_data(wire[:100])
        assert decoder.next_message() is NEED_DATA
        decoder.receive_data(wire[100:])
        with pytest.raises(RemoteProtocolError, match="message CRC"):
            decoder.next_message()
        wire[at] ^= 1


def test_an_end_between_messages_is_clean_and_an_end_inside_one_is_not():
    wire = encode(EventMessage(headers={"a": "b"}, payload=b"payload"))
    for cut in range(1, len(wire)):
        decoder = Decoder()
        decoder.receive_data(wire + wire[:cut])
        assert len(pull(decoder)) == 1
        with pytest.raises(RemoteProtocolError, match=f"after {cut} bytes of it"):
            decoder.receive_eof()
    assert len(decode(wire + wire)) == 2
    assert decode(b"") == []


def test_an_end_told_before_the_messages_are_pulled_still_gives_the_whole_ones():
    wire = encode(EventMessage(payload=b"whole"))
    for cut in (5, 13):
        decoder = Decoder()
        decoder.receive_data(wire + wire[:cut])
        decoder.receive_eof()
        assert decoder.next_message() == EventMessage(payload=b"whole")
        with pytest.raises(RemoteProtocolError, match="ends inside a message"):
            decoder.next_message()


def test_an_error_is_final():
    decoder = refused(b"\1" * 20, "prelude CRC")
    decoder.receive_data(encode(EventMessage()))
    decoder.receive_eof()
    assert decoder.buffered == 0
    with pytest.raises(RemoteProtocolError, match="prelude CRC"):
        decoder.next_message()


def test_an_error_in_the_headers_is_final_too():
    decoder = refused(framed(b"\1a\x0b") + encode(EventMessage()), "type 11")
    with pytest.raises(RemoteProtocolError, match="type 11"):
        decoder.next_message()


def test_an_error_never_echoes_a_name_at_length():
    with pytest.raises(RemoteProtocolError) as caught:
        decode_headers(b"\xff" + b"n" * 255 + b"\x0b")
    assert len(str(caught.value)) < 200


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=200)
def test_garbage_is_refused_or_waited_for_and_nothing_else(garbage, checksums):
    decoder = Decoder()
    decoder.receive_data(framed(garbage[:100], garbage[100:]) if checksums else garbage)
    try:
        pull(decoder)
        decoder.receive_eof()
    except RemoteProtocolError:
        pass
    else:
        assert decoder.buffered == 0


# ---- one message in one buffer


def test_split_wants_exactly_one_message():
    wire = encode(EventMessage(headers={"a": "b"}, payload=b"inner"))
    assert split(wire, Limits()) == (encode_headers({"a": "b"}), b"inner")
    assert split(memoryview(wire), Limits()).payload == b"inner"
    for wrong in (wire[:11], wire[:-1], wire + b"\0", b""):
        with pytest.raises(RemoteProtocolError, match="bytes"):
            split(wrong, Limits())
    with pytest.raises(RemoteProtocolError, match="limit"):
        split(wire, Limits(message=len(wire) - 1))


# ---- writing


def test_a_small_payload_is_joined_and_a_large_one_goes_by_reference():
    small, large = bytes(16383), bytearray(16384)
    assert len(encode_buffers({"a": "b"}, small)) == 1
    head, payload, tail = encode_buffers({"a": "b"}, large)
    assert payload is large
    assert len(tail) == 4
    assert head + payload + tail == encode(EventMessage(headers={"a": "b"}, payload=large))


def test_a_payload_of_wider_items_is_measured_in_bytes():
    words = memoryview(bytes(range(64))).cast("I")
    assert decode(encode(EventMessage(payload=words))) == [EventMessage(payload=bytes(range(64)))]


@pytest.mark.parametrize("value", [5, 1.5, None, bytearray(b"x"), [1]])
def test_a_value_without_a_wire_type_is_our_own_mistake(value):
    with pytest.raises(
        LocalProtocolError, match=f"header 'a': no event-stream type for a value of type {type(value).__name__}"
    ):
        encode_headers({"a": value})


@pytest.mark.parametrize("kind", [Byte, Short, Integer, Long, Timestamp])
def test_an_integer_must_fit_its_type(kind):
    bound = 1 << 8 * kind.size - 1
    for value in (-bound, bound - 1):
        assert decode(encode(EventMessage(headers={"a": kind(value)}))) == [EventMessage(headers={"a": kind(value)})]
    for value in (-bound - 1, bound):
        with pytest.raises(ValueError, match=f"{kind.__name__} holds {8 * kind.size} bits"):
            kind(value)


def test_a_uuid_is_its_sixteen_bytes():
    assert encode_headers({"u": uuid.UUID(int=1)}) == b"\1u\x09" + bytes(15) + b"\1"
