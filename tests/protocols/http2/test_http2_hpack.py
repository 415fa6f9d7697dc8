"""HPACK: the decoder that remembers means what hpack means, and what the encoder writes any decoder reads."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived, TrailersReceived
from hpack import Decoder, Encoder, HeaderTuple, NeverIndexedHeaderTuple
from hpack import hpack as library
from hpack.exceptions import HPACKError
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hpack.table import HeaderTable
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.events import End, Request, Response
from protocols.http2 import hpack
from protocols.http2.connection import HTTP2Connection
from protocols.http2.hpack import REMEMBERED_BYTES, RememberingDecoder, StatelessEncoder, encode_field
from protocols.huffman import decode_huffman
from protocols.roles import Role
from tests.protocols.http2.http2_helpers import output, pull

# Decoding.


def meaning(decoder: Decoder, block: bytes) -> object:
    """The list with the kind of each field, or the error, and the table afterwards."""
    try:
        found: object = [(type(field), tuple(field)) for field in decoder.decode(block, raw=True)]
    except HPACKError as error:
        return type(error), re.sub("0x[0-9a-f]+", "", str(error))  # hpack names objects by address
    table = decoder.header_table
    return found, list(table.dynamic_entries), table._current_size, table.maxsize


def looked_up(decoder: RememberingDecoder, block: bytes) -> object:
    """Like `meaning`, but as the machine does: `decode` is called only if `look` finds nothing or its find is put back."""
    found = decoder.look(block)
    if found is not None and len(block) % 2:
        decoder.put_back(found)
    elif found is not None:
        table = decoder.header_table
        fields = [(type(field), tuple(field)) for field in found.headers]
        return fields, list(table.dynamic_entries), table._current_size, table.maxsize
    return meaning(decoder, block)


names = st.sampled_from([b":method", b":path", b"x-a", b"x-b", b"cookie", b"accept", b"content-length", b""])
values = st.one_of(st.sampled_from([b"GET", b"/", b"1", b"", b"y" * 200]), st.binary(max_size=4))
strings = st.builds(lambda value, raw: raw(value), values, st.sampled_from([lambda v: literal(v), lambda v: huffman(v)]))


def literal(value: bytes) -> bytes:
    return hpack._encode_integer(len(value), 0x7F) + value


def huffman(value: bytes) -> bytes:
    encoded = Encoder().huffman_coder.encode(value)
    return hpack._encode_integer(len(encoded), 0x7F, 0x80) + encoded


def integer(first: int, mask: int) -> st.SearchStrategy[bytes]:
    number = st.one_of(st.sampled_from([1, 2, 8, 14, 15, 16, 28, 61, 62, 62, 63, 64, 70]), st.integers(0, 2**22))
    return number.map(lambda value: hpack._encode_integer(value, mask, first))


indexed = integer(0x80, 0x7F)
with_index = st.builds(
    lambda head, value: head + value, st.one_of(integer(0x40, 0x3F), integer(0, 15), integer(16, 15)), strings
)
with_name = st.builds(
    lambda first, name, value: bytes((first,)) + name + value,
    st.sampled_from([0x00, 0x10, 0x40, 0x40]),
    st.one_of(strings, names.map(literal)),
    strings,
)
updates = st.sampled_from([0, 30, 40, 100, 4096, 4097]).map(lambda size: hpack._encode_integer(size, 0x1F, 0x20))
fields = st.one_of(indexed, indexed, with_index, with_name, with_name, st.binary(max_size=3), updates)
blocks = st.builds(
    lambda update, rest: update + b"".join(rest),
    st.one_of(st.just(b""), st.just(b""), updates),
    st.lists(fields, max_size=5),
)


@settings(max_examples=400)
@given(pool=st.lists(blocks, min_size=1, max_size=4), order=st.lists(st.integers(0, 3), max_size=14), look=st.booleans())
def test_any_blocks_mean_what_they_mean_to_hpack(pool: list[bytes], order: list[int], look: bool) -> None:
    ours, theirs = RememberingDecoder(), Decoder()
    ours.max_header_list_size = theirs.max_header_list_size = 600
    for choice in order:
        block = pool[choice % len(pool)]
        expected = meaning(theirs, block)
        assert (looked_up if look else meaning)(ours, block) == expected
        if not isinstance(expected, tuple) or len(expected) == 2:
            return


@settings(max_examples=100)
@given(st.lists(st.lists(st.tuples(names, values, st.booleans()), max_size=6), max_size=12), st.data())
def test_the_blocks_of_an_encoder_that_fills_and_empties_its_table(
    lists: list[list[tuple[bytes, bytes, bool]]], choice: st.DataObject
) -> None:
    encoder, ours, theirs = Encoder(), RememberingDecoder(), Decoder()
    for headers in lists:
        if choice.draw(st.booleans()):
            encoder.header_table_size = choice.draw(st.sampled_from([0, 50, 120, 4096]))
        block = encoder.encode(headers)
        for _ in range(2):  # a block that adds to the table means something else the second time
            assert meaning(ours, block) == meaning(theirs, block)


def test_a_block_that_changes_nothing_is_read_once_while_the_table_stays() -> None:
    encoder, decoder = Encoder(), RememberingDecoder()
    first, again = (encoder.encode([(b"x", b"y"), (b":method", b"GET")]) for _ in range(2))
    assert decoder.look(first) is not decoder.look(first), "it adds to the table"
    found = decoder.look(again)
    assert found is not None
    assert decoder.look(again) is found
    decoder.decode(encoder.encode([(b"other", b"field")]), raw=True)
    moved = decoder.look(again)
    assert moved is not found
    assert moved is not None
    assert moved.headers[0] == (b"other", b"field"), "the same index names another entry now"


@pytest.mark.parametrize("between", [b"\x20", b"\x3f\xe1\x1f\x82", b"\x40\x01a\x01b"])
def test_whatever_may_change_the_table_ends_what_is_remembered(between: bytes) -> None:
    decoder = RememberingDecoder()
    found = decoder.look(b"\x82")
    assert decoder.look(b"\x82") is found
    decoder.decode(between, raw=True)
    assert decoder.look(b"\x82") is not found


def test_a_remembered_block_obeys_the_limits_of_today() -> None:
    decoder = RememberingDecoder()
    assert decoder.look(b"\x82") is not None
    decoder.max_header_list_size = 10
    assert decoder.look(b"\x82") is None
    with pytest.raises(HPACKError, match="larger than 10"):
        decoder.decode(b"\x82", raw=True)
    decoder.max_header_list_size, decoder.max_allowed_table_size = 1000, 100
    assert decoder.look(b"\x82") is None
    with pytest.raises(HPACKError, match="shrink"):
        decoder.decode(b"\x82", raw=True)
    assert decoder.decode(b"\x3f\x45\x82", raw=True) == [(b":method", b"GET")]


def test_a_block_put_back_has_no_effect_twice() -> None:
    decoder, block = RememberingDecoder(), b"\x40\x01a\x01b"
    found = decoder.look(block)
    assert found is not None
    decoder.put_back(found)
    assert decoder.decode(block, raw=True) == found.headers
    assert list(decoder.header_table.dynamic_entries) == [(b"a", b"b")]
    decoder.decode(block, raw=True)
    assert list(decoder.header_table.dynamic_entries) == [(b"a", b"b")] * 2


def test_the_memory_of_one_connection_is_bounded_and_forgets_the_oldest() -> None:
    decoder = RememberingDecoder()
    every = [b"\x00\x01a" + literal(b"%08d" % n + bytes(n % 300)) for n in range(500)]
    for block in every:
        assert decoder.look(block) is not None
        held = sum(len(block) + known.size for block, known in decoder._known.items())
        assert held == decoder._held <= REMEMBERED_BYTES
    assert every[-1] in decoder._known
    assert every[0] not in decoder._known
    large = b"\x00\x01a" + literal(bytes(REMEMBERED_BYTES // 8))
    assert decoder.look(large) is not decoder.look(large)


def test_what_is_never_to_be_indexed_is_in_no_shared_memory() -> None:
    before = hpack._decode_short.cache_info().currsize
    decoder = RememberingDecoder()
    decoder.decode(b"\x10" + literal(b"authorization") + huffman(b"the secret of this test"), raw=True)
    assert hpack._decode_short.cache_info().currsize == before
    decoder.decode(b"\x00" + literal(b"x") + huffman(b"no secret of this test"), raw=True)
    assert hpack._decode_short.cache_info().currsize in (before + 1, 1024)


def test_text_is_given_as_hpack_gives_it() -> None:
    assert RememberingDecoder().decode(b"\x82") == Decoder().decode(b"\x82")


def test_hpack_takes_over_from_the_table_as_it_was_before_the_block() -> None:
    ours, theirs = RememberingDecoder(), Decoder()
    long_integer = b"\x0f\x80\x80\x80\x00" + literal(b"v")
    for update in (b"\x3f\x45", b""):  # a table of 100 bytes, so that each entry moves another out
        for n in range(3):
            entry = b"\x40\x01a" + literal(b"%d" % n * 40)
            assert meaning(ours, update + entry) == meaning(theirs, update + entry)
            odd = b"\x40\x01b" + literal(b"short") + b"\xbe" + long_integer
            assert meaning(ours, odd) == meaning(theirs, odd)
            assert theirs.decode(long_integer, raw=True) == [(b"accept-charset", b"v")]
            update = b""


def test_a_bomb_of_references_is_not_unpacked() -> None:
    decoder = RememberingDecoder()
    decoder.max_header_list_size = 10_000
    decoder.decode(b"\x40\x01a" + literal(bytes(4000)), raw=True)
    assert decoder.look(b"\xbe" * 60_000) is None
    with pytest.raises(HPACKError, match="larger than 10000"):
        decoder.decode(b"\xbe" * 60_000, raw=True)


def told(decode: Callable[[bytes], bytes], data: bytes) -> object:
    try:
        return decode(data)
    except HPACKError as error:
        return type(error), str(error)


@settings(max_examples=1000)
@given(st.lists(st.one_of(st.binary(max_size=6), st.binary(max_size=6).map(Encoder().huffman_coder.encode)), max_size=4))
def test_huffman_s_code_means_what_it_means_to_hpack(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    assert told(decode_huffman, data) == told(library.decode_huffman, data)


def test_each_byte_behind_each_code_that_has_begun_means_what_it_means_to_hpack() -> None:
    for symbol in range(257):
        code, length = REQUEST_CODES[symbol], REQUEST_CODES_LENGTH[symbol]
        for zeros in range(8):  # codes of "0" have 5 bits, so that the symbol begins at each bit of a byte
            bits = "00000" * zeros + f"{code:0{length}b}"
            for end in ("", "1" * (-len(bits) % 8), "1" * (-len(bits) % 8 + 8), "0" * (-len(bits) % 8)):
                whole = (bits + end)[: len(bits + end) // 8 * 8]
                data = int("0" + whole, 2).to_bytes(len(whole) // 8, "big")
                assert told(decode_huffman, data) == told(library.decode_huffman, data)


@pytest.mark.parametrize("first", [b"", b"\x20", b"\x0f\x80\x80\x80\x00\x00"], ids=["usual", "size update", "long integer"])
def test_no_block_is_left_to_the_slow_decoder_of_huffman_s_code(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Encoder().encode([(b"x%d" % n, b"v" * 290) for n in range(90)])
    expected = Decoder().decode(first + block, raw=True)
    monkeypatch.setattr(library, "decode_huffman", None)
    assert RememberingDecoder().decode(first + block, raw=True) == expected


# Encoding.


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.one_of(names, st.sampled_from([name for name, _ in HeaderTable.STATIC_TABLE]), st.binary(max_size=300)),
            st.one_of(values, st.sampled_from([value for _, value in HeaderTable.STATIC_TABLE]), st.binary(max_size=300)),
        )
    )
)
def test_any_fields_come_back_and_leave_no_trace(headers: list[tuple[bytes, bytes]]) -> None:
    decoder, encoder = Decoder(), StatelessEncoder()
    decoder.max_header_list_size = 10**6
    for _ in range(2):
        assert list(decoder.decode(encoder.encode(headers), raw=True)) == headers
    assert not decoder.header_table.dynamic_entries


@pytest.mark.parametrize("field", HeaderTable.STATIC_TABLE)
def test_fields_of_the_static_table_are_one_byte(field: tuple[bytes, bytes]) -> None:
    assert len(encode_field(*field)) == 1


@pytest.mark.parametrize("length", [0, 126, 127, 128, 254, 255, 127 + 2**14, 2**21 + 127])
def test_long_strings_have_long_lengths(length: int) -> None:
    decoder = Decoder(max_header_list_size=2**22)
    assert list(decoder.decode(encode_field(b"x", bytes(length)), raw=True)) == [(b"x", bytes(length))]


@pytest.mark.parametrize("name", [b"authorization", b"proxy-authorization", b"cookie", b"set-cookie"])
def test_credentials_are_marked_never_to_be_indexed(name: bytes) -> None:
    (field,) = Decoder().decode(encode_field(name, b"secret"), raw=True)
    assert type(field) is NeverIndexedHeaderTuple
    (field,) = Decoder().decode(encode_field(b"x-" + name, b"not"), raw=True)
    assert type(field) is HeaderTuple


@given(st.lists(st.one_of(st.none(), st.sampled_from([0, 1, 100, 4095, 4096, 4097, 2**32 - 1])), max_size=12))
def test_a_peer_may_change_the_size_of_its_table_at_any_time(changes: list[int | None]) -> None:
    decoder, encoder = Decoder(), StatelessEncoder()
    for change in changes:
        if change is None:
            assert list(decoder.decode(encoder.encode([(b"x", b"y")]), raw=True)) == [(b"x", b"y")]
        else:
            decoder.max_allowed_table_size = change
            encoder.header_table_size = change
    assert encoder.header_table_size <= min([change for change in changes if change is not None], default=4096)


def test_the_size_is_told_once_and_only_to_a_peer_that_wants_it_smaller() -> None:
    encoder = StatelessEncoder()
    for size, said in ((2**20, b""), (4096, b""), (4095, b"\x20"), (0, b""), (4096, b""), (0, b"")):
        encoder.header_table_size = size
        assert encoder.encode([(b":status", b"200")]) == said + b"\x88"


def h2_client(first: dict[int, int]) -> tuple[H2Connection, HTTP2Connection]:
    client, server = H2Connection(H2Configuration(client_side=True, header_encoding=None)), HTTP2Connection(Role.SERVER)
    client.initiate_connection()
    client.update_settings(first)
    for _ in range(2):
        server.receive_data(client.data_to_send())
        pull(server)
        client.receive_data(output(server))
    return client, server


@pytest.mark.parametrize("first", [{}, {1: 0}, {1: 100}, {1: 2**20}, {5: 16_384}, {5: 40_000}])
def test_h2_reads_our_heads_and_trailers_of_any_length(first: dict[int, int]) -> None:
    client, server = h2_client(first)
    for stream, length in ((1, 1), (3, 16_370), (5, 50_000)):
        client.send_headers(
            stream, [(b":method", b"GET"), (b":path", b"/"), (b":scheme", b"https"), (b":authority", b"h")], end_stream=True
        )
        server.receive_data(client.data_to_send())
        assert isinstance(pull(server)[0], Request)
        server.send(Response(stream=stream, status=103, headers=((b"link", b"</x>"),)))
        server.send(Response(stream=stream, status=404, headers=((b"x", b"y" * length), (b"set-cookie", b"a=b"))))
        server.send(End(stream=stream, trailers=((b"t", b"z" * length),)))
        events = client.receive_data(output(server))
        (head,) = [event for event in events if isinstance(event, ResponseReceived)]
        assert head.headers == [(b":status", b"404"), (b"x", b"y" * length), (b"set-cookie", b"a=b")]
        (trailers,) = [event for event in events if isinstance(event, TrailersReceived)]
        assert trailers.headers == [(b"t", b"z" * length)]
