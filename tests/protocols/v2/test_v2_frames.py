"""Frames of v2 requests and replies: the bytes, every split, bounds before memory, and what a client makes of them."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import v2
from protocols.errors import RemoteProtocolError
from protocols.events import NEED_DATA

TEXT = b'{"model_name":"m","outputs":[{"name":"y","datatype":"UINT8","shape":[3],"parameters":{"binary_data_size":3}}]}'
FRAME = struct.pack("<IQ", len(TEXT), 3) + TEXT + b"abc"


def frames_in(*pieces: bytes, **limits: int) -> list[tuple[bytes, int]]:
    """The body and header length of each frame that a decoder finds in these pieces."""
    decoder, found = v2.FrameDecoder(**limits), []
    for piece in pieces:
        decoder.receive_data(piece)
        while isinstance(frame := decoder.next_frame(), v2.V2Frame):
            found.append((bytes(frame.body), frame.header_length))
    decoder.receive_eof()
    return found


def test_a_frame_is_two_lengths_and_then_the_json_and_the_data() -> None:
    assert (
        b"".join(v2.encode_frame(b"{}", [b"ab", memoryview(b"c")])) == bytes.fromhex("02000000 0300000000000000") + b"{}abc"
    )
    assert b"".join(v2.encode_frame(b"{}")) == bytes.fromhex("02000000 0000000000000000") + b"{}"


def test_the_data_of_a_frame_are_not_copied() -> None:
    data = memoryview(bytearray(10))
    assert v2.encode_frame(b"{}", [data])[1] is data


def test_frames_are_the_same_whatever_pieces_they_come_in() -> None:
    run = FRAME + b"".join(v2.encode_frame(b"{}")) + FRAME
    whole = [(TEXT + b"abc", len(TEXT)), (b"{}", 2), (TEXT + b"abc", len(TEXT))]
    assert frames_in(run) == whole
    assert frames_in(*(run[i : i + 1] for i in range(len(run)))) == whole
    for at in range(len(run)):
        assert frames_in(run[:at], run[at:]) == whole


@given(st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=40)), max_size=6), st.data())
def test_any_run_of_frames_reads_back(frames: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    run = b"".join(b"".join(v2.encode_frame(text, [more])) for text, more in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(run)), max_size=8)))
    pieces = [run[a:b] for a, b in zip([0, *cuts], [*cuts, len(run)], strict=True)]
    assert frames_in(*pieces) == [(text + more, len(text)) for text, more in frames]


@pytest.mark.parametrize(("header_length", "size"), [(11, 0), (0, 101), (10, 91), (2**32 - 1, 0), (0, 2**64 - 1)])
def test_a_frame_beyond_the_limits_is_refused_before_memory_is_taken(header_length: int, size: int) -> None:
    decoder = v2.FrameDecoder(json=10, body=100)
    decoder.receive_data(struct.pack("<IQ", header_length, size))
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="at most 1") as refused:
            decoder.next_frame()
    assert refused.value.status == 413
    assert decoder.need == 0


def test_a_frame_at_the_limits_is_read_and_its_need_is_known_from_its_lengths_on() -> None:
    decoder = v2.FrameDecoder(json=10, body=100)
    decoder.receive_data(struct.pack("<IQ", 10, 90)[:11])
    assert (decoder.next_frame(), decoder.need) == (NEED_DATA, 0)
    decoder.receive_data(bytes(1))
    assert (decoder.next_frame(), decoder.need) == (NEED_DATA, 100)
    decoder.receive_data(bytes(100))
    frame = decoder.next_frame()
    assert isinstance(frame, v2.V2Frame)
    assert (len(frame.body), frame.header_length, decoder.need) == (100, 10, 0)
    assert frame.body.readonly


@pytest.mark.parametrize("at", [1, 11, 12, 13, len(FRAME) - 1])
def test_a_body_that_ends_inside_of_a_frame_is_an_error_from_then_on(at: int) -> None:
    decoder = v2.FrameDecoder()
    decoder.receive_data(FRAME[:at])
    assert decoder.next_frame() is NEED_DATA
    for call in (decoder.receive_eof, decoder.next_frame):
        with pytest.raises(RemoteProtocolError, match="in the middle of a frame"):
            call()


@given(st.binary(max_size=60))
def test_garbage_is_a_frame_or_an_error_and_nothing_else(data: bytes) -> None:
    decoder = v2.FrameDecoder(json=50, body=50)
    decoder.receive_data(data)
    try:
        while decoder.next_frame() is not NEED_DATA:
            pass
        decoder.receive_eof()
    except RemoteProtocolError:
        pass
    with contextlib.suppress(v2.V2Error):
        v2.split_frame(data)


def test_a_message_is_one_frame_and_its_body_a_view_of_it() -> None:
    frame = v2.split_frame(FRAME)
    assert (bytes(frame.body), frame.header_length) == (TEXT + b"abc", len(TEXT))
    assert frame.body.obj is FRAME


@pytest.mark.parametrize("message", [b"", FRAME[:11], FRAME[:-1], FRAME + b"x", struct.pack("<IQ", 2**32 - 1, 2**64 - 1)])
def test_a_message_whose_lengths_are_wrong_is_refused(message: bytes) -> None:
    with pytest.raises(v2.V2Error, match="binary message"):
        v2.split_frame(message)


def test_a_request_of_a_client_reads_back_on_the_server() -> None:
    x = v2.V2Tensor(name="x", datatype="FP32", array=np.array([1, 2.5], np.float32))
    frame = v2.split_frame(b"".join(v2.encode_infer_frame([x], id="7", binary_data_output=True)))
    request = v2.parse_infer(frame.body, frame.header_length, v2.ModelSignature(name="m"))
    assert (request.id, request.binary_default) == ("7", True)
    assert request.inputs[0].elements.tolist() == [1, 2.5]


def test_a_reply_reads_back_from_a_frame_and_from_json() -> None:
    frame = v2.split_frame(FRAME)
    assert v2.decode_streamed_reply(frame.body, frame.header_length)["y"].elements.tolist() == [97, 98, 99]
    text = b'{"model_name":"m","id":"7","outputs":[{"name":"y","datatype":"UINT8","shape":[1],"data":[9]}]}'
    answer = v2.decode_streamed_reply(text)
    assert (answer.id, answer["y"].elements.tolist()) == ("7", [9])


def test_a_failure_in_place_of_a_reply_has_the_servers_text() -> None:
    text = v2.failure_body("no such voice", "7")
    assert text == b'{"error":"no such voice","id":"7"}'
    for header_length in (None, len(text)):
        with pytest.raises(v2.V2Error, match="no such voice") as failed:
            v2.decode_streamed_reply(text, header_length)
        assert failed.value.status == 500
    assert v2.failure_body("no such voice") == b'{"error":"no such voice"}'


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b'"\xff"', b'{"outputs":3}', b'{"error":7}'])
def test_what_is_no_reply_is_an_error(body: bytes) -> None:
    with pytest.raises(v2.V2Error):
        v2.decode_streamed_reply(body)


@pytest.mark.parametrize(
    ("text", "id"),
    [
        (b'{"id":"7","inputs":3}', "7"),
        (b'{"inputs":[NaN],"id":"7"}', "7"),
        (b'{"id":null}', ""),
        (b'{"id":7}', ""),
        (b'{"inputs":[]}', ""),
        (b"[1]", ""),
        (b'{"id":"7"', ""),
        (b"\xff", ""),
        (b"", ""),
    ],
)
def test_the_id_of_a_refused_request_is_found_where_there_is_one(text: bytes, id: str) -> None:
    assert v2.id_of(text) == id


@pytest.mark.parametrize(
    ("accept", "frames"),
    [
        ([], False),
        ([b"*/*"], False),
        ([b"application/*"], False),
        ([b"application/json"], False),
        ([b"text/event-stream"], False),
        ([b"application/vnd.everywire.infer-stream"], True),
        ([b"Application/VND.everywire.infer-stream ; charset=x ; q=0.5"], True),
        ([b"text/event-stream, application/vnd.everywire.infer-stream"], True),
        ([b"text/event-stream", b"application/vnd.everywire.infer-stream;q=0.9"], False),
        ([b"text/event-stream;q=0.8", b"application/vnd.everywire.infer-stream;q=0.9"], True),
        ([b"application/vnd.everywire.infer-stream;q=0"], False),
        ([b"application/vnd.everywire.infer-stream;q=abc"], False),
        ([b"application/vnd.everywire.infer-stream;q=1e9"], False),
        ([b",;,=\xff;q=2"], False),
    ],
)
def test_frames_are_for_those_who_name_them(accept: list[bytes], frames: bool) -> None:
    assert v2.prefers_frames(accept) is frames
