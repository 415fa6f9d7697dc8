"""Message framing: pieces, limits, memory, cardinality, and every way a body can be wrong."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.content_coding import Coding
from protocols.errors import LocalProtocolError
from protocols.events import NEED_DATA, Buffer
from protocols.grpc.compression import MessageInflater
from protocols.grpc.framing import (
    LARGE,
    MAX_LENGTH,
    MessageDecoder,
    RawMessage,
    encode_message,
    encode_prefix,
    frame,
    read_unary,
)
from protocols.grpc.status import GRPCError, StatusCode

KIB, MIB = 1024, 1024 * 1024
INTERNAL, EXHAUSTED, UNIMPLEMENTED = StatusCode.INTERNAL, StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNIMPLEMENTED
GZIP, DEFLATE = Coding.GZIP, Coding.DEFLATE
COMPRESS: dict[Coding, Callable[[bytes], bytes]] = {GZIP: gzip.compress, DEFLATE: zlib.compress}


def framed(*messages: bytes) -> bytes:
    return b"".join(b"".join(frame([message])) for message in messages)


def pull(decoder: MessageDecoder) -> list[bytes]:
    messages = []
    while (message := decoder.next_message()) is not NEED_DATA:
        assert message.readonly
        messages.append(bytes(message))
    return messages


def decode(
    *pieces: Buffer, limit: int = MIB, encoding: Coding | None = None, unary: bool = False, eof: bool = True
) -> list[bytes]:
    decoder = MessageDecoder(limit=limit, encoding=encoding, unary=unary)
    messages = []
    for piece in pieces:
        decoder.receive_data(piece)
        messages += pull(decoder)
    if eof:
        decoder.receive_eof()
    return messages


def refused(
    *pieces: bytes, limit: int = MIB, encoding: Coding | None = None, unary: bool = False, eof: bool = True
) -> GRPCError:
    with pytest.raises(GRPCError) as caught:
        decode(*pieces, limit=limit, encoding=encoding, unary=unary, eof=eof)
    return caught.value


def cut(wire: bytes, sizes: Iterable[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(wire[at : at + size])
        at += size
    return [*pieces, wire[at:]]


# ---- round trips

GOLDEN = bytes.fromhex(
    "00 00000000"  # an empty message
    "00 00000003 616263"
    "01 0000000b 789c4b4c4a0600024d0127"  # "abc" in the zlib format
    "00 00000001 64"
)
GOLDEN_MESSAGES = [b"", b"abc", b"abc", b"d"]


def test_golden_bytes_are_these_messages() -> None:
    assert decode(GOLDEN, encoding=DEFLATE) == GOLDEN_MESSAGES
    assert framed(b"", b"abc") == GOLDEN[:13]


def test_golden_bytes_cut_at_every_two_positions_are_the_same_messages() -> None:
    for first in range(len(GOLDEN) + 1):
        for second in range(first, len(GOLDEN) + 1):
            assert decode(*cut(GOLDEN, (first, second - first)), encoding=DEFLATE) == GOLDEN_MESSAGES
    assert decode(*(bytes([byte]) for byte in GOLDEN), encoding=DEFLATE) == GOLDEN_MESSAGES


@given(
    st.lists(st.one_of(st.binary(max_size=300), st.integers(LARGE - 8, 40_000).map(bytes)), max_size=4),
    st.lists(st.integers(0, 20_000), max_size=20),
    st.sampled_from([None, *Coding]),
)
@settings(max_examples=100)
def test_every_message_comes_back_whatever_its_encoding_and_its_pieces(
    messages: list[bytes], sizes: list[int], encoding: Coding | None
) -> None:
    wire = b"".join(b"".join(encode_message([message[:7], message[7:]], encoding)) for message in messages)
    assert decode(*cut(wire, sizes), encoding=encoding) == messages


@given(st.binary(max_size=60), st.lists(st.integers(0, 20), max_size=6), st.sampled_from([None, *Coding]), st.booleans())
@settings(max_examples=100)
def test_garbage_is_messages_or_one_status_whatever_its_pieces(
    wire: bytes, sizes: list[int], encoding: Coding | None, unary: bool
) -> None:
    def outcome(*pieces: bytes) -> list[bytes] | tuple[StatusCode, str]:
        try:
            return decode(*pieces, limit=50, encoding=encoding, unary=unary)
        except GRPCError as e:
            return e.code, e.message

    def at_once() -> list[bytes] | tuple[StatusCode, str]:
        try:
            return [bytes(read_unary(wire, limit=50, encoding=encoding))]
        except GRPCError as e:
            return e.code, e.message

    whole = outcome(wire)
    assert isinstance(whole, list) or whole[0] in (INTERNAL, EXHAUSTED, UNIMPLEMENTED)
    assert outcome(*cut(wire, sizes)) == whole
    assert not unary or at_once() == whole


# ---- refusals by the prefix


@pytest.mark.parametrize("at", range(6))
def test_a_length_over_the_limit_is_resource_exhausted_by_its_prefix_alone(at: int) -> None:
    error = refused(*cut(encode_prefix(101), (at,)), limit=100, eof=False)
    assert (error.code, error.message) == (EXHAUSTED, "a message has 101 bytes, the limit is 100 bytes (limit)")
    assert decode(framed(bytes(100)), limit=100) == [bytes(100)]


def test_the_setting_that_changes_the_limit_is_named() -> None:
    for wire in (framed(bytes(101)), b"".join(encode_message([bytes(101)], GZIP))):
        decoder = MessageDecoder(limit=100, encoding=GZIP, setting="grpc.max_message")
        decoder.receive_data(wire)
        with pytest.raises(GRPCError, match=r"100 bytes \(grpc\.max_message\)"):
            decoder.next_message()
        with pytest.raises(GRPCError, match=r"100 bytes \(grpc\.max_message\)"):
            read_unary(wire, limit=100, encoding=GZIP, setting="grpc.max_message")


def test_a_length_that_no_limit_allows_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        assert refused(encode_prefix(MAX_LENGTH), limit=64 * MIB, eof=False).code is EXHAUSTED
        assert tracemalloc.get_traced_memory()[1] < 64 * KIB
    finally:
        tracemalloc.stop()


def test_a_length_below_the_limit_that_no_bytes_follow_takes_no_memory() -> None:
    decoder = MessageDecoder(limit=512 * MIB)
    tracemalloc.start()
    try:
        decoder.receive_data(encode_prefix(512 * MIB))
        assert decoder.next_message() is NEED_DATA
        assert (decoder.wanted, decoder.held) == (512 * MIB, 0)
        assert tracemalloc.get_traced_memory()[1] < 64 * KIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("flag", [2, 3, 128, 255])
def test_a_flag_above_1_is_internal(flag: int) -> None:
    error = refused(bytes([flag]) + bytes(4), encoding=GZIP, eof=False)
    assert (error.code, error.message) == (INTERNAL, f"the compressed flag of a message is 0 or 1, got {flag}")


def test_flag_1_without_an_encoding_is_internal_before_the_message_comes() -> None:
    error = refused(encode_prefix(10, compressed=True), eof=False)
    assert error.code is INTERNAL
    assert "grpc-encoding" in error.message
    assert decode(framed(b"plain"), encoding=GZIP) == [b"plain"]  # flag 0 is right with an encoding


def test_an_error_is_final() -> None:
    decoder = MessageDecoder(limit=3)
    decoder.receive_data(framed(b"abc") + framed(b"abcd", b"abc"))
    assert decoder.next_message() == b"abc"
    for _ in range(2):
        with pytest.raises(GRPCError, match="4 bytes, the limit is 3"):
            decoder.next_message()
        decoder.receive_data(framed(b"abc"))
        with pytest.raises(GRPCError, match="4 bytes, the limit is 3"):
            decoder.receive_eof()
    assert (decoder.wanted, decoder.held) == (0, 0)


# ---- ends


def test_a_body_that_is_cut_anywhere_is_internal() -> None:
    wire = framed(b"abc", b"defgh")
    boundaries = {0: 0, 8: 1, len(wire): 2}
    for at in range(len(wire) + 1):
        if at in boundaries:
            assert len(decode(wire[:at])) == boundaries[at]
        else:
            assert refused(wire[:at]).code is INTERNAL


def test_a_cut_is_told_with_what_came() -> None:
    assert refused(b"\0\0").message == "the body ends inside a message's prefix, after 2 of 5 bytes"
    wire = framed(b"abcdef")
    for pieces in ([wire[:8]], [wire[:5], wire[5:8]], [wire[:7], wire[7:8]]):
        assert refused(*pieces).message == "the body ends inside a message of 6 bytes, after 3 of them"


def test_a_message_that_was_cut_is_wanted_no_more() -> None:
    decoder = MessageDecoder(limit=100)
    decoder.receive_data(framed(b"abcdef")[:8])
    assert decoder.next_message() is NEED_DATA
    with pytest.raises(GRPCError, match="ends inside a message"):
        decoder.receive_eof()
    assert (decoder.wanted, decoder.held) == (0, 0)


# ---- cardinality


@pytest.mark.parametrize("pieces", [[], [b""]])
def test_a_unary_call_without_a_message_is_internal(pieces: list[bytes]) -> None:
    error = refused(*pieces, unary=True)
    assert (error.code, error.message) == (INTERNAL, "a unary call has exactly one message, this one had none")
    assert decode(*pieces) == []


@pytest.mark.parametrize("second", [framed(b"b"), framed(b""), encode_prefix(MAX_LENGTH), b"\xff\0\0\0\0"])
@pytest.mark.parametrize("at", [0, 6, 8, 11])
def test_a_second_message_of_a_unary_call_is_unimplemented_by_its_prefix(second: bytes, at: int) -> None:
    error = refused(*cut(framed(b"a") + second, (at,)), unary=True, eof=False)
    assert (error.code, error.message) == (UNIMPLEMENTED, "a unary call has exactly one message, this one has a second")


def test_a_cut_prefix_behind_the_message_of_a_unary_call_is_internal() -> None:
    assert refused(framed(b"a") + b"\0", unary=True).code is INTERNAL
    assert decode(framed(b"a"), unary=True) == [b"a"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", INTERNAL),
        (b"\0\0\0", INTERNAL),
        (framed(b"abc")[:-1], INTERNAL),
        (framed(b"abc") + b"\0", INTERNAL),
        (framed(b"abc", b""), UNIMPLEMENTED),
        (framed(bytes(51)), EXHAUSTED),
        (b"\2" + framed(b"")[1:], INTERNAL),
        (b"\1" + framed(b"")[1:], INTERNAL),
    ],
)
def test_a_unary_body_that_is_all_here_is_refused_as_by_a_decoder(body: bytes, code: StatusCode) -> None:
    with pytest.raises(GRPCError) as caught:
        read_unary(body, limit=50)
    assert caught.value.code is code


@pytest.mark.parametrize("encoding", [None, *Coding])
def test_a_unary_body_that_is_all_here_is_read_at_once(encoding: Coding | None) -> None:
    content = b"again and " * 100
    body = bytearray(b"".join(encode_message([content], encoding)))
    message = read_unary(body, limit=len(content), encoding=encoding)
    assert message == content
    assert message.readonly
    assert (message.obj is body) is (encoding is None)


# ---- memory


def test_a_message_that_lies_in_one_buffer_is_a_view_of_it() -> None:
    data = bytearray(framed(b"one", b"", b"three"))
    decoder = MessageDecoder(limit=100)
    for pieces in ([data], [data[:5], data[5:]], [data[:3], data[3:5], data[5:]]):
        for piece in pieces:
            decoder.receive_data(piece)
            while (message := decoder.next_message()) is not NEED_DATA:
                assert message.obj is piece
                assert message.readonly


def test_a_message_in_pieces_is_gathered_once_and_what_follows_is_a_view_again() -> None:
    wire = framed(bytes(range(256)) * 400, b"after")
    decoder = MessageDecoder(limit=MIB)
    decoder.receive_data(wire[:1000])
    assert decoder.next_message() is NEED_DATA
    assert (decoder.wanted, decoder.held) == (102_400, 995)
    decoder.receive_data(wire[1000:50_000])
    assert decoder.next_message() is NEED_DATA
    assert (decoder.wanted, decoder.held) == (102_400, 49_995)
    last = wire[50_000:]
    decoder.receive_data(last)
    message = decoder.next_message()
    assert message is not NEED_DATA
    assert message == bytes(range(256)) * 400
    assert message.readonly
    assert (decoder.wanted, decoder.held) == (0, 0)
    after = decoder.next_message()
    assert after is not NEED_DATA
    assert after.obj is last
    assert pull(decoder) == []
    decoder.receive_eof()


def test_a_message_in_single_bytes_takes_its_length_and_no_more() -> None:
    wire = framed(bytes(30_000))
    decoder = MessageDecoder(limit=MIB)
    tracemalloc.start()
    try:
        for at in range(len(wire)):
            decoder.receive_data(wire[at : at + 1])
            if at < len(wire) - 1:
                assert decoder.next_message() is NEED_DATA
        assert decoder.next_message() == bytes(30_000)
        assert tracemalloc.get_traced_memory()[1] < 90_000  # the message, and the copy that it is compared with
    finally:
        tracemalloc.stop()


def test_nothing_is_kept_of_a_buffer_that_is_read() -> None:
    decoder = MessageDecoder(limit=100)
    data = bytearray(framed(b"one") + b"\0\0")
    decoder.receive_data(data)
    assert pull(decoder) == [b"one"]
    data += b"a bytearray that is viewed cannot grow"
    assert decoder.wanted == 0


def test_a_view_of_wider_items_is_taken_as_its_bytes() -> None:
    wire = framed(bytes(range(11)))
    assert decode(memoryview(wire).cast("I")) == [bytes(range(11))]
    assert read_unary(memoryview(wire).cast("I"), limit=11) == bytes(range(11))
    assert decode(np.frombuffer(wire, np.int8).reshape(4, 4).data) == [bytes(range(11))]


# ---- memory of the caller's own


@pytest.mark.parametrize("first", [5, 6, 12, 104])
def test_a_message_lands_in_memory_of_the_caller(first: int) -> None:
    content = bytes(range(100))
    wire, memory = framed(content, b"after"), bytearray(120)
    decoder = MessageDecoder(limit=100)
    decoder.receive_data(wire[:first])
    assert decoder.next_message() is NEED_DATA
    assert decoder.wanted == 100
    decoder.land(memory)
    assert decoder.held == first - 5
    decoder.receive_data(wire[first:])
    message = decoder.next_message()
    assert message is not NEED_DATA
    assert message.obj is memory
    assert message.readonly
    assert message == content
    assert pull(decoder) == [b"after"]


def test_a_caller_may_write_into_its_memory_itself() -> None:
    content = bytes(range(100))
    memory, decoder = bytearray(100), MessageDecoder(limit=100)
    decoder.receive_data(framed(content)[:15])
    assert decoder.next_message() is NEED_DATA
    decoder.land(memory)
    memory[10:60] = content[10:60]
    decoder.landed(50)
    with pytest.raises(LocalProtocolError, match="has not said NEED_DATA"):
        decoder.landed(1)
    assert decoder.next_message() is NEED_DATA
    assert decoder.held == 60
    decoder.receive_data(content[60:70])
    assert decoder.next_message() is NEED_DATA
    memory[70:] = content[70:]
    decoder.landed(30)
    assert decoder.next_message() == content
    assert decoder.next_message() is NEED_DATA
    decoder.receive_eof()


def test_memory_is_only_taken_for_a_message_that_needs_some_and_fits() -> None:
    decoder = MessageDecoder(limit=100)
    with pytest.raises(LocalProtocolError, match="no message is being received"):
        decoder.land(bytearray(100))
    decoder.receive_data(encode_prefix(10) + b"abc")
    with pytest.raises(LocalProtocolError, match="has not said NEED_DATA"):
        decoder.land(bytearray(100))
    assert decoder.next_message() is NEED_DATA
    with pytest.raises(LocalProtocolError, match="expected 10 writable bytes, got 9 writable"):
        decoder.land(bytearray(9))
    with pytest.raises(LocalProtocolError, match="expected 10 writable bytes, got 10 read-only"):
        decoder.land(bytes(10))
    with pytest.raises(LocalProtocolError, match="1 bytes, of a message that lacks 7"):
        decoder.landed(1)
    decoder.land(bytearray(10))
    with pytest.raises(LocalProtocolError, match="no message is being received that needs memory"):
        decoder.land(bytearray(10))
    for n in (8, -1):
        with pytest.raises(LocalProtocolError, match="of a message that lacks 7"):
            decoder.landed(n)


def test_a_buffer_is_only_taken_when_the_last_one_is_read() -> None:
    decoder = MessageDecoder(limit=100)
    decoder.receive_data(framed(b"a"))
    for call in (lambda: decoder.receive_data(b""), decoder.receive_eof):
        with pytest.raises(LocalProtocolError, match="has not said NEED_DATA"):
            call()
    assert pull(decoder) == [b"a"]
    decoder.receive_eof()


# ---- compression


@pytest.mark.parametrize("encoding", Coding)
def test_a_message_may_inflate_to_the_limit_and_not_to_one_byte_more(encoding: Coding) -> None:
    wire = b"".join(frame([COMPRESS[encoding](bytes(1000))], compressed=True))
    assert decode(wire, limit=1000, encoding=encoding) == [bytes(1000)]
    error = refused(wire, limit=999, encoding=encoding, eof=False)
    assert error.code is EXHAUSTED
    assert "inflates to more than 999 bytes" in error.message


@pytest.mark.parametrize("encoding", Coding)
def test_damaged_and_cut_data_are_internal_and_end_the_decoder(encoding: Coding) -> None:
    data = COMPRESS[encoding](b"not much at all")
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    for wrong in (b"", data[:-1], damaged, b"not compressed", data + b"x", data + data):
        decoder = MessageDecoder(limit=1000, encoding=encoding)
        decoder.receive_data(b"".join(frame([wrong], compressed=True)) + framed(b"after"))
        for _ in range(2):
            with pytest.raises(GRPCError, match="compressed message is invalid") as caught:
                decoder.next_message()
            assert caught.value.code is INTERNAL


def test_a_compressed_message_is_had_as_it_came_and_inflated_in_steps() -> None:
    decoder = MessageDecoder(limit=10_000, encoding=GZIP)
    data = gzip.compress(bytes(10_000))
    decoder.receive_data(b"".join(frame([data], compressed=True)) + framed(b"plain"))
    raw = decoder.next_raw()
    assert raw == RawMessage(True, memoryview(data))
    inflater, out, steps = MessageInflater(data, GZIP, limit=10_000), bytearray(), 1
    while not inflater.step(out, 1000):
        assert len(out) == 1000 * steps
        steps += 1
    assert out == bytes(10_000)
    assert decoder.next_raw() == RawMessage(False, memoryview(b"plain"))
    assert decoder.next_raw() is NEED_DATA


# ---- writing


def test_a_small_message_is_one_buffer_and_a_large_one_goes_by_reference() -> None:
    small, large = bytes(LARGE - 1), memoryview(bytes(LARGE))
    assert frame([small[:5], small[5:]]) == (encode_prefix(LARGE - 1) + small,)
    prefix, *rest = frame([large[:5], large[5:]])
    assert prefix == b"\0\0\0\x40\0"
    assert [view.obj is large.obj for view in rest if isinstance(view, memoryview)] == [True, True]
    assert frame([]) == (bytes(5),)
    assert frame([np.arange(3, dtype="<i2").data]) == (b"\0\0\0\0\6\0\0\1\0\2\0",)


def test_a_message_that_compression_makes_longer_goes_out_plain() -> None:
    assert encode_message([b"abc"], GZIP) == (b"\0\0\0\0\3abc",)
    (wire,) = encode_message([b"a" * 500, b"a" * 500], DEFLATE, level=9)
    assert wire[0] == 1
    assert zlib.decompress(bytes(wire[5:])) == b"a" * 1000


def test_a_message_that_no_prefix_can_announce_is_our_mistake() -> None:
    assert encode_prefix(MAX_LENGTH, compressed=True) == b"\1\xff\xff\xff\xff"
    with pytest.raises(LocalProtocolError, match="at most 4294967295 bytes, not 4294967296"):
        encode_prefix(MAX_LENGTH + 1)
