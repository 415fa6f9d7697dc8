"""Parts in the SDK's envelope are read, and parts of a response written, in one go: the same as by the general way."""

import struct
from itertools import pairwise, permutations
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.aws import bidi, eventstream
from protocols.aws.bidi import (
    END,
    ENVELOPE_OVERHEAD,
    Completion,
    DataType,
    PartDecoder,
    PayloadPart,
    encode_envelope,
    encode_part,
    encode_request_end,
    encode_request_event,
    encode_request_part,
)
from protocols.aws.eventstream import Timestamp, decode_headers, encode_buffers
from protocols.errors import RemoteProtocolError
from protocols.events import NEED_DATA

EVENT = {":message-type": "event", ":event-type": "PayloadPart"}
OCTETS = {":content-type": "application/octet-stream"}
FULL = EVENT | {"DataType": "BINARY", "CompletionState": "COMPLETE"} | OCTETS


def message(headers, payload=b""):
    return b"".join(encode_buffers(headers, payload))


def sealed(event):
    return b"".join(encode_envelope(event, date_ms=1_700_000_000_000, signature=bytes(range(32))))


def general(**limits):
    """A decoder that opens nothing itself."""
    decoder = PartDecoder(**limits)
    decoder._short = 0
    return decoder


def story(decoder, pieces):
    """Everything a caller can see, piece after piece."""
    seen = []
    for piece in pieces:
        decoder.receive_data(piece)
        try:
            while (part := decoder.next_part()) is not NEED_DATA:
                seen.append((part, type(getattr(part, "data", None)), decoder.buffered, decoder.need))
                if part is END:
                    break
        except RemoteProtocolError as error:
            seen.append(str(error))
        seen.append((decoder.buffered, decoder.need))
    try:
        decoder.receive_eof()
        seen.append(decoder.next_part())
    except RemoteProtocolError as error:
        seen.append(str(error))
    return seen


def seen_before(*events):
    """Their header blocks are known from now on."""
    story(general(), [b"".join(events)])


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(bidi, "_HEADS", {})


HEADERS = st.one_of(
    st.just(FULL),
    st.just(EVENT),
    st.permutations(list(FULL.items())).map(dict),
    st.sampled_from(
        [
            EVENT | {"DataType": "UTF8", "CompletionState": "PARTIAL"},
            EVENT | {"CompletionStatus": "PARTIAL"},
            EVENT | {"CompletionState": "PARTIAL", "CompletionStatus": "COMPLETE"},
            FULL | {"P": "padding"},
            FULL | {":content-type": b"application/octet-stream"},
            FULL | {":content-type": "text/plain"},
            FULL | {"DataType": "WRONG"},
            {":message-type": "event"},
            {},
        ]
    ),
)
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([1024, 16_090, 16_200, 16_290, 16_300, 16_384]))
EVENTS = st.builds(
    lambda headers, size: message(headers, bytes(range(251)) * (size // 251) + bytes(size % 251)), HEADERS, SIZES
)
WIRES = st.one_of(
    EVENTS,
    EVENTS.map(sealed),
    EVENTS.map(sealed),
    EVENTS.map(sealed),
    EVENTS.map(lambda event: sealed(sealed(event))),
    EVENTS.map(lambda event: sealed(event[:-1])),
    EVENTS.map(lambda event: sealed(event + b"\0")),
    EVENTS.map(lambda event: message({":chunk-signature": bytes(32), ":date": Timestamp(0)}, event)),
    st.just(sealed(b"")),
)


@given(
    st.lists(WIRES, min_size=1, max_size=6),
    st.lists(st.integers(1, 20_000), max_size=6),
    st.one_of(st.none(), st.tuples(st.integers(0, 100_000), st.integers(0, 7))),
    st.fixed_dictionaries(
        {},
        optional={
            "max_part": st.sampled_from([0, 16, 150, 1160, 1175, 16_384]),
            "max_headers": st.sampled_from([60, 67, 130, 255, 256]),
            "max_fields": st.integers(1, 7),
        },
    ),
)
@settings(max_examples=300)
def test_an_envelope_read_in_one_go_is_the_same_as_one_read_step_by_step(wires, cuts, damage, limits):
    seen_before(message(FULL), message(EVENT), message(EVENT | {"DataType": "UTF8", "CompletionState": "PARTIAL"}))
    wire = bytearray(b"".join(wires))
    if damage is not None:
        wire[damage[0] % len(wire)] ^= 1 << damage[1]
    cuts = sorted({0, len(wire), *(cut % len(wire) for cut in cuts)})
    pieces = [bytes(wire[a:b]) for a, b in pairwise(cuts)]
    assert story(PartDecoder(**limits), pieces) == story(general(**limits), pieces)


def test_the_usual_part_is_read_in_one_go(monkeypatch):
    wire = b"".join(encode_request_part(b"x" * 1024, DataType.BINARY, Completion.COMPLETE, date_ms=0))
    seen_before(wire)
    monkeypatch.setattr(PartDecoder, "_next_part", None)
    decoder = PartDecoder()
    for _ in range(2):
        assert decoder.next_part() is NEED_DATA
        decoder.receive_data(memoryview(wire + wire))
        for left in (len(wire), 0):
            assert decoder.next_part() == PayloadPart(data=b"x" * 1024, content_type="application/octet-stream")
            assert decoder.buffered == left


@pytest.mark.parametrize("repaired", [False, True])
def test_one_changed_byte_anywhere_is_judged_alike_also_under_right_checksums(repaired):
    event = message(FULL, b"payload")
    seen_before(event)
    whole = sealed(event)
    after = sealed(message(EVENT, b"after"))
    for at in range(len(whole)):
        for flip in (1, 0x80):
            wire = bytearray(whole)
            wire[at] ^= flip
            if repaired:
                repair(wire, 79, len(wire) - 4)
                repair(wire, 0, len(wire))
            assert story(PartDecoder(), [bytes(wire) + after]) == story(general(), [bytes(wire) + after])


def test_a_prelude_with_a_wrong_checksum_is_refused_though_the_message_s_own_goes_on_from_it():
    event = message(FULL, b"payload")
    seen_before(event)
    for start, cut in ((0, 0), (79, 4)):
        wire = bytearray(sealed(event))
        end = len(wire) - cut
        wire[start + 8] ^= 1
        (wrong,) = struct.unpack_from(">I", wire, start + 8)
        struct.pack_into(">I", wire, end - 4, crc32(wire[start + 8 : end - 4], wrong))
        if start:
            repair(wire, 0, len(wire))
        (complaint,) = [seen for seen in story(PartDecoder(), [bytes(wire)])[:1] if isinstance(seen, str)]
        assert complaint.startswith("event-stream prelude CRC")


class Whatever:
    """A checksum that fits."""

    __hash__ = None

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


@given(
    st.lists(st.tuples(st.sampled_from([0, 4, 79, 83]), st.integers(-140, 140)), min_size=1, max_size=4), st.integers(0, 9)
)
@settings(max_examples=200)
def test_lies_about_lengths_are_judged_alike_also_where_every_checksum_fits(lies, size):
    event = message(FULL, bytes(size))
    seen_before(event)
    wire = bytearray(sealed(event) + sealed(event))
    for at, lie in lies:
        (told,) = struct.unpack_from(">I", wire, at)
        struct.pack_into(">I", wire, at, max(0, told + lie))
    with pytest.MonkeyPatch.context() as patch:
        for module in (bidi, eventstream):
            patch.setattr(module, "crc32", lambda *_: Whatever())
        assert story(PartDecoder(), [bytes(wire)]) == story(general(), [bytes(wire)])


def test_a_large_part_in_pieces_comes_before_the_small_one_behind_it():
    large, small = (sealed(message(FULL, data)) for data in (bytes(20_000), b"small"))
    seen_before(small)
    decoder = PartDecoder()
    decoder.receive_data(large[:100])
    assert decoder.next_part() is NEED_DATA
    decoder.receive_data(large[100:] + small)
    assert [bytes(decoder.next_part().data) for _ in range(2)] == [bytes(20_000), b"small"]


def test_data_is_bytes_below_16_kib_and_a_view_from_there_on():
    seen_before(message(FULL))
    for size, kind in ((16_383, bytes), (16_384, memoryview)):
        decoder = PartDecoder()
        decoder.receive_data(sealed(message(FULL, bytes(size))))
        assert type(decoder.next_part().data) is kind


def repair(wire, start, end):
    struct.pack_into(">I", wire, start + 8, crc32(wire[start : start + 8]))
    struct.pack_into(">I", wire, end - 4, crc32(wire[start : end - 4]))


def test_the_limit_of_a_part_is_exact_for_known_headers_too():
    event = message(FULL, bytes(1000))
    seen_before(event)
    assert len(story(PartDecoder(len(event)), [sealed(event)])) == 3
    decoder = PartDecoder(len(event) - 1)
    decoder.receive_data(sealed(event))
    limit = len(event) - 1 + ENVELOPE_OVERHEAD
    with pytest.raises(RemoteProtocolError, match=f"message of {limit + 1} bytes, the limit is {limit}"):
        decoder.next_part()


@pytest.mark.parametrize(
    ("limits", "complaint"),
    [({"max_fields": 4}, "more than 4 header fields"), ({"max_headers": 133}, "headers of 134 bytes, the limit is 133")],
)
def test_known_headers_are_measured_like_unknown_ones(limits, complaint):
    event = message(FULL, b"x")
    seen_before(event)
    for wire in (event, sealed(event)):
        decoder = PartDecoder(**limits)
        decoder.receive_data(wire)
        with pytest.raises(RemoteProtocolError, match=complaint):
            decoder.next_part()


def test_parts_are_taken_out_of_a_buffer_that_stays_as_it_is():
    wire = b"".join(encode_request_part(b"x", date_ms=0)) * 40
    seen_before(wire[: len(wire) // 40])
    decoder = PartDecoder()
    decoder.receive_data(wire)
    for _ in range(39):
        assert decoder.next_part().data == b"x"
        assert decoder._buffer is wire
    assert decoder.next_part().data == b"x"
    assert (decoder._buffer, decoder.next_part()) == (b"", NEED_DATA)


def test_an_end_among_known_parts_is_an_end():
    part = b"".join(encode_request_part(b"x", date_ms=0))
    seen_before(part)
    decoder = PartDecoder()
    decoder.receive_data(part + b"".join(encode_request_end(date_ms=0)) + part)
    assert decoder.next_part().data == b"x"
    assert decoder.next_part() is END
    with pytest.raises(RemoteProtocolError, match=f"{len(part)} bytes after the end"):
        decoder.next_part()


# ---- remembered headers


def test_only_headers_that_tell_nothing_about_a_request_are_remembered():
    for private in ({"P": "secret"}, {":content-type": "secret"}, {":content-type": b"secret"}, {"New": Timestamp(0)}):
        seen_before(message(EVENT | private), sealed(message(EVENT | private)))
    assert bidi._HEADS == {}
    seen_before(sealed(message(FULL)), message(EVENT))
    assert [dict(decode_headers(block)) for block in bidi._HEADS] == [FULL, EVENT]


def test_what_is_remembered_is_bounded_and_short():
    fields = FULL | {"CompletionStatus": "COMPLETE"}
    for order in permutations(fields.items()):
        seen_before(message(dict(order)))
        assert 1 <= len(bidi._HEADS) <= 64
    assert {len(block) for block in bidi._HEADS} == {len(message(fields)) - 16}
    assert len(message(fields)) - 16 <= 256


def test_headers_that_were_refused_are_refused_again():
    for _ in range(2):
        decoder = PartDecoder()
        decoder.receive_data(sealed(message(FULL | {"DataType": "WRONG"})))
        with pytest.raises(RemoteProtocolError, match="DataType must be"):
            decoder.next_part()


# ---- the way out


@given(
    st.one_of(st.integers(0, 3000), st.sampled_from([16_383, 16_384, 16_385])),
    st.sampled_from([None, *DataType]),
    st.sampled_from([None, *Completion]),
    st.sampled_from([bytes, bytearray, memoryview, lambda data: memoryview(data + bytes(-len(data) % 4)).cast("I")]),
)
@settings(max_examples=150)
def test_a_part_written_in_one_go_is_the_message_that_the_codec_writes(size, data_type, completion, kind):
    data = kind((bytes(range(256)) * (size // 256 + 1))[:size])
    headers = EVENT | OCTETS
    if data_type is not None:
        headers |= {"DataType": data_type.value}
    if completion is not None:
        headers |= {"CompletionState": completion.value}
    for _ in range(2):
        buffers = encode_part(data, data_type, completion)
        assert b"".join(buffers) == message(headers, data)
        assert len(buffers) == (1 if memoryview(data).nbytes < 16_384 else 3)


def test_our_client_s_events_are_of_the_kind_that_is_remembered():
    for data_type in (None, *DataType):
        for completion in (None, *Completion):
            seen_before(encode_request_event(b"x", data_type, completion))
    assert len(bidi._HEADS) == 9
