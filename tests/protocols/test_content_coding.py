"""Content codings: names, weights, and bodies that are whole, cut, damaged, or larger than they look."""

import gzip
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.content_coding import (
    STEP,
    Coding,
    Inflater,
    choose_coding,
    deflate,
    deflate_steps,
    parse_content_encoding,
)
from protocols.errors import RemoteProtocolError
from protocols.events import Buffer

GZIP, DEFLATE = Coding.GZIP, Coding.DEFLATE
MiB = 1024**2
TEXT = bytes(range(256)) * 40 + b"the same again " * 1000
CODED: dict[Coding, Callable[[bytes], bytes]] = {GZIP: gzip.compress, DEFLATE: zlib.compress}


def inflate(
    body: bytes, *codings: Coding, limit: int = MiB, at_most: int = MiB, piece: int = MiB, members: int = 100
) -> bytes:
    """The content of a body that arrives in pieces and is asked for in steps."""
    inflater, out = Inflater(codings or (GZIP,), limit=limit, members=members), bytearray()
    for at in range(0, len(body), piece):
        inflater.feed(body[at : at + piece])
        while not inflater.hungry:
            before = len(out)
            inflater.inflate_into(out, at_most)
            assert len(out) - before <= at_most
    inflater.finish()
    return bytes(out)


def refused(body: bytes, *codings: Coding, **how: int) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        inflate(body, *codings, **how)
    return caught.value


# -- names and weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "codings"),
    [
        ([], ()),
        ([b""], ()),
        ([b"identity"], ()),
        ([b"gzip"], (GZIP,)),
        ([b" GZip\t"], (GZIP,)),
        ([b"x-gzip"], (GZIP,)),
        ([b"Deflate"], (DEFLATE,)),
        ([b"deflate, ,identity,gzip,"], (DEFLATE, GZIP)),
        ([b"deflate", b"gzip"], (DEFLATE, GZIP)),
    ],
)
def test_a_content_encoding_names_what_was_put_on_in_order(values: list[bytes], codings: tuple[Coding, ...]) -> None:
    assert parse_content_encoding(values) == codings


@pytest.mark.parametrize("value", [b"br", b"gzip, zstd", b"gzip;q=1", b"compress", b"\xff" * 500])
def test_an_unknown_coding_is_415_with_its_name_and_no_more_of_it(value: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="is not known: gzip and deflate are") as caught:
        parse_content_encoding([value])
    assert caught.value.status == 415
    assert len(str(caught.value)) < 250


def test_three_codings_inside_one_another_are_one_too_many() -> None:
    assert len(parse_content_encoding([b"gzip, identity, gzip"])) == 2
    with pytest.raises(RemoteProtocolError, match="names 3 codings inside one another: at most 2") as caught:
        parse_content_encoding([b"gzip, gzip", b"deflate"])
    assert caught.value.status == 415


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        (b"", None),
        (b"gzip", GZIP),
        (b"deflate", DEFLATE),
        (b"x-gzip", GZIP),
        (b"GZIP;Q=0.5", GZIP),
        (b"deflate, gzip", GZIP),  # as curl --compressed
        (b"gzip, deflate, br", GZIP),  # as aiohttp and browsers
        (b"gzip;q=0.5, deflate;q=0.8", DEFLATE),
        (b"gzip; q=0.8 ,\tdeflate ; q=0.5", GZIP),
        (b"gzip;q=0", None),
        (b"gzip;q=0.000, deflate", DEFLATE),
        (b"gzip;q=0.001", GZIP),
        (b"identity", None),
        (b"identity, gzip", GZIP),
        (b"identity, gzip;q=0.9", None),
        (b"identity;q=0.5, gzip;q=0.9", GZIP),
        (b"*", None),
        (b"*;q=0", None),
        (b"*, gzip;q=0.5", None),
        (b"*;q=0.1, gzip;q=0.5", GZIP),
        (b"gzip, *;q=0", GZIP),
        (b"*, gzip", GZIP),
        (b"identity;q=0, *", None),
        (b"br, zstd", None),
        (b"gzip;q=2", None),
        (b"gzip;q=1.001", None),
        (b"gzip;q=0.1234", None),
        (b"gzip;q=", None),
        (b"gzip;level=1", None),
        (b"gzip deflate", None),
        (b"gzip;q=abc, deflate;q=0.1", DEFLATE),
        (b"gzip;q=0, gzip", None),  # only the first member of a name counts
        (b",,\xff,gzip,", GZIP),
    ],
)
def test_the_best_weight_is_chosen(value: bytes, chosen: Coding | None) -> None:
    assert choose_coding([value]) is chosen
    assert choose_coding(value.split(b",")) is chosen


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_any_bytes_are_an_accept_encoding(values: list[bytes]) -> None:
    choose_coding(values)


# -- taking off --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", Coding)
@pytest.mark.parametrize("at_most", [1, 7, 1000, MiB])
@pytest.mark.parametrize("piece", [1, 3, 1000, MiB])
def test_a_body_is_the_same_in_whatever_pieces_and_steps(coding: Coding, at_most: int, piece: int) -> None:
    text = TEXT[:2000] if at_most == 1 else TEXT
    assert inflate(CODED[coding](text), coding, at_most=at_most, piece=piece) == text


@pytest.mark.parametrize("coding", Coding)
def test_a_body_that_is_cut_at_any_byte_is_cut_off(coding: Coding) -> None:
    body = CODED[coding](b"not much, not much at all")
    for at in range(len(body)):
        error = refused(body[:at], coding, piece=5)
        assert (error.status, str(error)) == (400, f"the {coding.value.decode()} body is cut off after {at} bytes")
    assert inflate(body, coding) == b"not much, not much at all"


@pytest.mark.parametrize("coding", Coding)
def test_a_body_that_is_changed_anywhere_is_damaged_or_the_same(coding: Coding) -> None:
    text = b"not much, not much at all"
    body = CODED[coding](text)
    outcomes: set[int] = set()
    for at in range(len(body)):
        for bit in range(8):
            changed = bytearray(body)
            changed[at] ^= 1 << bit
            try:
                outcomes.add(inflate(bytes(changed), coding) == text)
            except RemoteProtocolError as e:
                outcomes.add(e.status)
    # a few bits of gzip's head (time, system) mean nothing
    assert outcomes == ({400, True} if coding is GZIP else {400})


def test_a_deflate_body_without_header_and_checksum_is_told_what_deflate_means() -> None:
    engine = zlib.compressobj(wbits=-15)
    error = refused(engine.compress(TEXT) + engine.flush(), DEFLATE)
    assert (
        str(error)
        == "the deflate body is damaged after byte 0: incorrect header check (deflate is the zlib format of RFC 1950)"
    )


def test_a_deflate_body_with_a_preset_dictionary_is_refused() -> None:
    engine = zlib.compressobj(zdict=b"the same again")
    assert "damaged" in str(refused(engine.compress(b"the same again") + engine.flush(), DEFLATE))


@pytest.mark.parametrize("coding", Coding)
@pytest.mark.parametrize("more", [b"\0", b"x" * 40000, b"\x1f\x8c"])
@pytest.mark.parametrize("piece", [1, MiB])
def test_what_follows_the_end_is_refused(coding: Coding, more: bytes, piece: int) -> None:
    assert refused(CODED[coding](TEXT) + more, coding, piece=piece).status == 400


@pytest.mark.parametrize("piece", [1, 30, MiB])
def test_the_members_of_a_gzip_body_are_one_content(piece: int) -> None:
    body = gzip.compress(b"one, ") + gzip.compress(b"") + gzip.compress(b"two, ") + gzip.compress(TEXT)
    assert inflate(body, piece=piece) == b"one, two, " + TEXT
    assert str(refused(body[:-1], piece=piece)) == f"the gzip body is cut off after {len(body) - 1} bytes"


def test_members_are_counted() -> None:
    one = gzip.compress(b"")
    assert inflate(one * 100) == b""
    error = refused(one * 101)
    assert (error.status, str(error)) == (
        400,
        f"the gzip body has too many members: at byte {len(one) * 100} begins one more",
    )


@pytest.mark.parametrize("outer", Coding)
@pytest.mark.parametrize("inner", Coding)
@pytest.mark.parametrize("piece", [1, 1000, MiB])
def test_two_codings_come_off_in_turn(outer: Coding, inner: Coding, piece: int) -> None:
    body = CODED[outer](CODED[inner](TEXT))
    assert inflate(body, inner, outer, piece=piece, at_most=5000) == TEXT
    assert refused(CODED[outer](CODED[inner](TEXT)[:-1]), inner, outer, piece=piece).status == 400
    assert refused(body[:-1], inner, outer, piece=piece).status == 400


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", Coding)
@pytest.mark.parametrize("limit", [1, 65536, 100_000])
@pytest.mark.parametrize("piece", [1, MiB])
def test_the_limit_is_the_last_size_that_passes(coding: Coding, limit: int, piece: int) -> None:
    assert len(inflate(CODED[coding](bytes(limit)), coding, limit=limit, piece=piece)) == limit
    error = refused(CODED[coding](bytes(limit + 1)), coding, limit=limit, piece=piece)
    assert (error.status, str(error)) == (413, f"the {coding.value.decode()} body inflates to more than {limit} bytes")


def test_a_bomb_takes_no_more_memory_than_its_limit() -> None:
    body = gzip.compress(bytes(16 * MiB), 9) * 64
    tracemalloc.start()
    try:
        assert refused(body, limit=MiB).status == 413
        assert tracemalloc.get_traced_memory()[1] < 2 * MiB
    finally:
        tracemalloc.stop()


def test_a_bomb_inside_of_a_coding_that_ends_in_nothing_is_bounded_too() -> None:
    nothing = zlib.compressobj(wbits=31)
    begun = nothing.compress(b"") + nothing.flush(zlib.Z_FULL_FLUSH)
    idle = b"\0\0\0\xff\xff" * 2_000_000  # stored blocks of no bytes
    error = refused(gzip.compress(begun + idle), GZIP, GZIP, limit=MiB)
    assert (error.status, str(error)) == (413, "the gzip body inflates to more than 1048576 bytes")


def test_a_step_ends_though_it_has_made_nothing() -> None:
    inflater, out = Inflater((GZIP,), limit=MiB), bytearray()
    inflater.feed(gzip.compress(b"") * 20_000)
    steps = 0
    while not inflater.hungry:
        inflater.inflate_into(out, 65536)
        steps += 1
    inflater.finish()
    assert steps > 20_000 * 20 // 65536


# -- putting on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 6, 9])
def test_what_is_put_on_others_take_off(level: int) -> None:
    buffers: list[Buffer] = [b"", b"head", memoryview(TEXT), bytearray(TEXT), b""]
    content = b"".join(buffers)
    assert gzip.decompress(b"".join(deflate(GZIP, buffers, level))) == content
    assert zlib.decompress(b"".join(deflate(DEFLATE, buffers, level))) == content
    assert gzip.decompress(b"".join(deflate(GZIP, [], level))) == b""


def test_no_clock_is_in_what_is_put_on() -> None:
    assert b"".join(deflate(GZIP, [b"x"], 1))[4:8] == bytes(4)


@pytest.mark.parametrize(("size", "steps"), [(0, 1), (STEP - 1, 1), (STEP, 2), (STEP * 2 + 5, 3)])
def test_a_step_reads_no_more_than_a_step(size: int, steps: int) -> None:
    made = list(deflate_steps(DEFLATE, [bytes(5), bytes(size)][size % 2 :][-1:], 1))
    assert len(made) == steps
    assert len(zlib.decompress(b"".join(piece for step in made for piece in step))) == size
