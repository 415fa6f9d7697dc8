"""The frame splitter: whole frames out of any pieces, and a refusal before anything large is kept."""

from __future__ import annotations

import pytest
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, RstStreamFrame, SettingsFrame
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import RemoteProtocolError
from protocols.http2.frames import PREFACE, FrameSplitter, Kind, data_head, goaway, rst_stream, settings, unpad
from protocols.http2.frames import HTTP2Frame as Whole
from tests.protocols.http2.http2_helpers import PADDED, frame


def splitter(*, preface: bool = False) -> FrameSplitter:
    return FrameSplitter(preface=preface, frame_size=100, continuations=2, block=150, settings_entries=3)


def all_of(one: FrameSplitter, *written: bytes) -> list[Whole]:
    found = []
    for piece in written:
        one.receive(piece)
        while (whole := one.next_frame()) is not None:
            found.append(whole)
    return found


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=100)), max_size=6), st.data())
def test_frames_come_out_whole_however_the_bytes_come_in(content: list[tuple[int, bytes]], choice: st.DataObject) -> None:
    kinds = [kind for kind, _ in content if kind not in (1, 4, 5, 9)]
    written = (
        PREFACE + frame(4) + b"".join(frame(kind, 7, 0x8000_0005, payload) for kind, payload in content if kind in kinds)
    )
    cut = choice.draw(st.integers(0, len(written)))
    step = choice.draw(st.integers(1, 50))
    pieces = [written[:cut], *(written[i : i + step] for i in range(cut, len(written), step))]
    one = splitter(preface=True)
    found = all_of(one, *pieces)
    assert [whole.kind for whole in found] == [4, *kinds]
    assert all(whole.stream == 5 and whole.flags == 7 for whole in found[1:]), "the reserved bit is no part of the number"
    assert PREFACE + b"".join(whole.head + whole.payload for whole in found) == written
    assert one.at_boundary


@pytest.mark.parametrize(
    "written", [frame(0, 0, 1, bytes(101))[:9], frame(4, 0, 0, bytes(24))[:9], frame(1, 4, 1, bytes(151))[:9]]
)
def test_a_frame_that_is_too_large_is_refused_by_its_head(written: bytes) -> None:
    one = splitter()
    assert all_of(one, frame(4), frame(0, 0, 1, bytes(100)), frame(4, 0, 0, bytes(18)), written[:8])
    with pytest.raises(RemoteProtocolError):
        all_of(one, written[8:])
    assert one.pending_head == written


def test_an_open_header_block_is_known_until_it_ends() -> None:
    one = splitter()
    seen = []
    for piece in (
        frame(4),
        frame(1, 0, 7, b"a"),
        frame(9, 0, 7, b"b"),
        frame(6, 0, 0, bytes(8)),
        frame(9, 4, 7),
        frame(5, 4, 7),
    ):
        all_of(one, piece)
        seen.append(one.block_stream)
    assert seen == [0, 7, 7, 7, 0, 0]


def test_header_blocks_are_bounded_in_pieces_and_bytes() -> None:
    one = splitter()
    all_of(one, frame(4), frame(1, 0, 1, bytes(100)), frame(9, 0, 1, bytes(50)), frame(9, 4, 1))
    all_of(one, frame(1, 0, 3), frame(9, 0, 3), frame(9, 0, 3))
    with pytest.raises(RemoteProtocolError, match="CONTINUATION"):
        all_of(one, frame(9, 4, 3))
    one = splitter()
    all_of(one, frame(4), frame(1, 0, 1, bytes(100)))
    with pytest.raises(RemoteProtocolError, match="151 bytes"):
        all_of(one, frame(9, 0, 1, bytes(51)))


def test_padding_is_taken_off() -> None:
    def padded(payload: bytes) -> bytes | None:
        return unpad(Whole(Kind.DATA, PADDED, 1, payload))

    assert unpad(Whole(Kind.DATA, 0, 1, b"\x02plain")) == b"\x02plain"
    assert padded(b"\x02abxx") == b"ab"
    assert padded(b"\x00ab") == b"ab"
    assert padded(b"\x02xx") == b""
    assert padded(b"\x03xx") is None
    assert padded(b"") is None


def test_frames_written_by_hand_are_what_hyperframe_writes() -> None:
    def same(ours: bytes, theirs: Frame) -> bool:
        return ours == theirs.serialize()

    assert same(data_head(5, end=True, stream=9) + b"hello", DataFrame(9, b"hello", flags=["END_STREAM"]))
    assert same(data_head(70_000, end=False, stream=9) + bytes(70_000), DataFrame(9, bytes(70_000)))
    assert same(rst_stream(2**31 - 1, 8), RstStreamFrame(2**31 - 1, 8))
    assert same(goaway(11, 2**31 - 1, b"why"), GoAwayFrame(0, 2**31 - 1, 11, b"why"))
    assert same(settings({3: 1, 4: 2**31 - 1}), SettingsFrame(0, {3: 1, 4: 2**31 - 1}))
