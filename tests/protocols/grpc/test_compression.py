"""Compression of messages: names of encodings, limits while inflating, and data that are damaged, cut or doubled."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.content_coding import Coding
from protocols.events import Buffer
from protocols.grpc.compression import (
    ACCEPTED,
    MessageInflater,
    deflate_message,
    inflate_message,
    parse_accepted,
    parse_encoding,
)
from protocols.grpc.status import GRPCError, StatusCode

GZIP, DEFLATE = Coding.GZIP, Coding.DEFLATE
MIB = 1024 * 1024
COMPRESS: dict[Coding, Callable[[bytes], bytes]] = {GZIP: gzip.compress, DEFLATE: zlib.compress}


def refused(data: bytes, encoding: Coding, limit: int = MIB) -> GRPCError:
    with pytest.raises(GRPCError) as caught:
        inflate_message(data, encoding, limit=limit)
    return caught.value


@pytest.mark.parametrize(
    ("value", "encoding"), [(b"identity", None), (b"gzip", GZIP), (b"deflate", DEFLATE), (b"GZip", GZIP)]
)
def test_an_encoding_is_named_in_any_case(value: bytes, encoding: Coding | None) -> None:
    assert parse_encoding(value) is encoding


@pytest.mark.parametrize("value", [b"", b"snappy", b"x-gzip", b"gzip,gzip", b"gzip, deflate", b"\xff" * 500])
def test_an_unknown_encoding_is_unimplemented_with_the_names_of_ours(value: bytes) -> None:
    with pytest.raises(GRPCError, match="grpc-encoding: expected one of identity,deflate,gzip, got ") as caught:
        parse_encoding(value)
    assert caught.value.code is StatusCode.UNIMPLEMENTED
    assert len(caught.value.message) < 150


@pytest.mark.parametrize(
    ("values", "accepted"),
    [
        ([], set()),
        ([b""], set()),
        ([b"identity"], set()),
        ([ACCEPTED], {GZIP, DEFLATE}),
        ([b"identity, deflate, gzip"], {GZIP, DEFLATE}),
        ([b"snappy,\tGZIP ,zstd"], {GZIP}),
        ([b"identity", b"deflate"], {DEFLATE}),
        ([b"gzip;q=1"], set()),  # no weights here
    ],
)
def test_what_a_peer_accepts_is_what_it_names_of_ours(values: list[bytes], accepted: set[Coding]) -> None:
    assert parse_accepted(values) == accepted


@given(
    st.lists(st.one_of(st.binary(max_size=50), st.integers(0, 70_000).map(bytes)), max_size=4),
    st.sampled_from(Coding),
    st.integers(1, 9),
    st.integers(1, 100_000),
)
@settings(max_examples=60)
def test_what_is_deflated_is_inflated_in_whatever_steps(
    buffers: list[Buffer], encoding: Coding, level: int, at_most: int
) -> None:
    content = b"".join(buffers)
    pieces = deflate_message(buffers, encoding, level=level)
    data = COMPRESS[encoding](content) if pieces is None else b"".join(pieces)
    assert pieces is None or len(data) < len(content)
    inflater, out, whole = MessageInflater(data, encoding, limit=len(content)), bytearray(), False
    at_most = max(at_most, len(content) // 100)
    while not whole:
        before = len(out)
        whole = inflater.step(out, at_most)
        assert len(out) - before <= at_most
    assert out == content
    assert inflate_message(data, encoding, limit=len(content)) == content


@given(st.binary(max_size=100), st.sampled_from(Coding))
@settings(max_examples=60)
def test_garbage_is_internal(data: bytes, encoding: Coding) -> None:
    assert refused(data, encoding).code is StatusCode.INTERNAL


@pytest.mark.parametrize("encoding", Coding)
def test_data_that_are_cut_at_any_byte_are_internal(encoding: Coding) -> None:
    data = COMPRESS[encoding](b"not much, not much at all")
    for at in range(len(data)):  # also no data at all, which C-core reads as an empty message
        error = refused(data[:at], encoding)
        assert error.code is StatusCode.INTERNAL
        assert f"cut off after {at} bytes" in error.message


@pytest.mark.parametrize("encoding", Coding)
def test_data_that_are_changed_anywhere_are_internal_or_mean_the_same(encoding: Coding) -> None:
    content = b"not much, not much at all"
    data = COMPRESS[encoding](content)
    outcomes: set[object] = set()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        try:
            outcomes.add(inflate_message(changed, encoding, limit=MIB) == content)
        except GRPCError as e:
            outcomes.add(e.code)
    # a few bits of gzip's head (time, system) mean nothing
    assert outcomes == ({StatusCode.INTERNAL, True} if encoding is GZIP else {StatusCode.INTERNAL})


@pytest.mark.parametrize("encoding", Coding)
def test_a_second_member_and_whatever_else_follows_is_internal_as_from_c_core(encoding: Coding) -> None:
    data = COMPRESS[encoding](b"abc")
    for more in (COMPRESS[encoding](b"def"), COMPRESS[encoding](b""), b"\0", b"x" * 100_000):
        assert refused(data + more, encoding).code is StatusCode.INTERNAL


def test_deflate_is_the_zlib_format_and_not_the_bare_stream() -> None:
    engine = zlib.compressobj(wbits=-15)
    error = refused(engine.compress(b"abc") + engine.flush(), DEFLATE)
    assert error.code is StatusCode.INTERNAL
    assert "RFC 1950" in error.message


@pytest.mark.parametrize("encoding", Coding)
@pytest.mark.parametrize("limit", [0, 1, 65_536, 100_000])
def test_the_limit_is_the_last_size_that_passes(encoding: Coding, limit: int) -> None:
    assert inflate_message(COMPRESS[encoding](bytes(limit)), encoding, limit=limit) == bytes(limit)
    error = refused(COMPRESS[encoding](bytes(limit + 1)), encoding, limit=limit)
    assert error.code is StatusCode.RESOURCE_EXHAUSTED
    assert f"inflates to more than {limit} bytes" in error.message


def test_a_bomb_takes_no_more_memory_than_the_limit() -> None:
    data = gzip.compress(bytes(32 * MIB), 9)
    tracemalloc.start()
    try:
        assert refused(data, GZIP, limit=MIB).code is StatusCode.RESOURCE_EXHAUSTED
        assert tracemalloc.get_traced_memory()[1] < 2.5 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("cut", [0, 1])
def test_what_is_inflated_before_an_error_is_given_back(cut: int) -> None:
    size = 3500 if cut else 10_000
    data = gzip.compress(bytes(size))
    inflater, out = MessageInflater(data[: len(data) - cut], GZIP, limit=5000), bytearray()
    assert not inflater.step(out, 3000)
    assert len(out) == 3000
    with pytest.raises(GRPCError, match="cut off" if cut else "inflates to more than 5000 bytes"):
        inflater.step(out, 3000)
    assert out == b""
