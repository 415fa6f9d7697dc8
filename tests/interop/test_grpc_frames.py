"""gRPC by hand-made frames of HTTP/2: what no client of gRPC's own sends, and how an answer looks on the wire."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop import served_grpc
from tests.interop.grpc_frames import HEALTH, SERVICE, Frames, infer_answer, infer_request, prefixed, text_field
from tests.interop.servers import Server, serving

INFER, STREAM, LIVE = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer", f"{SERVICE}/ServerLive"
ASKED = prefixed(infer_request("refusing", "frames 0"))
LIMIT = 100_000
CANCELLED, INVALID, LATE, EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 1, 3, 4, 8, 12, 13, 14


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that has little patience, and little room."""
    limits = f"limits = {{ body = {LIMIT}, body_silence = 1.0, keep_alive = 1.0 }}"
    full = [f"{model}\ncapacity = 1\nqueue = 0" if "[models.waiting]" in model else model for model in served_grpc.models()]
    with serving(tmp_path_factory.mktemp("strict"), "served_grpc.py", [limits, *full]) as server:
        yield server


@pytest.fixture
def frames(grpc_server: Server) -> Iterator[Frames]:
    with Frames(grpc_server.host, grpc_server.port) as frames:
        yield frames
        # After every kind of error the connection goes on.
        assert frames.call(LIVE, prefixed(b"")).messages == [b"\x08\x01"]


# ---- the head


@pytest.mark.by_default
def test_an_answer_is_a_head_a_message_and_trailers(frames: Frames) -> None:
    answer = frames.call(INFER, ASKED)
    assert (answer.head[":status"], answer.head["content-type"]) == ("200", "application/grpc")
    assert {name.strip() for name in answer.head["grpc-accept-encoding"].split(",")} == {"identity", "deflate", "gzip"}
    assert "content-length" not in answer.head
    assert "grpc-status" not in answer.head
    assert not answer.alone
    assert answer.trailers["grpc-status"] == "0"
    assert infer_answer(answer.messages[0]).isdigit()


@pytest.mark.by_default
def test_an_error_before_a_message_is_one_head(frames: Frames) -> None:
    answer = frames.call(INFER, prefixed(infer_request("nobody", "x")))
    assert answer.alone
    assert answer.head[":status"] == "200"
    assert answer.head["content-type"] == "application/grpc"
    assert answer.status[0] == 5
    assert "content-length" not in answer.head
    assert (answer.body, answer.trailers) == (b"", {})


def test_texts_are_percent_encoded(frames: Frames) -> None:
    status, message = frames.call(INFER, prefixed(infer_request("failing", "400"))).status
    assert (status, message) == (INVALID, "the model refuses, gr%C3%BCn")


@pytest.mark.parametrize(
    "path", [f"{SERVICE}/Nothing", "/inference.Other/ModelInfer", f"{INFER}/", "/nothing", "/", "/v2/models/refusing/infer"]
)
def test_an_unknown_method_is_named(frames: Frames, path: str) -> None:
    answer = frames.call(path, ASKED)
    assert answer.alone
    assert answer.status[0] == UNIMPLEMENTED
    assert path in answer.status[1]


@pytest.mark.parametrize("kind", ["text/plain", "application/grpc-web", "application/json", "application/grpcx", None])
def test_another_content_type_is_no_grpc(frames: Frames, kind: str | None) -> None:
    answer = frames.call(INFER, ASKED, {"content-type": kind})
    assert answer.head[":status"] == "415"
    assert "grpc-status" not in answer.head


@pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc;charset=utf-8", "Application/GRPC"])
def test_a_content_type_may_say_more(frames: Frames, kind: str) -> None:
    assert frames.call(INFER, ASKED, {"content-type": kind}).status[0] == 0


def test_nothing_depends_on_te(frames: Frames) -> None:
    assert frames.call(INFER, ASKED, {"te": None}).status[0] == 0
    assert frames.call(INFER, ASKED, {"te": "gzip"}).reset == 1  # RFC 9113 section 8.2.2: malformed, gRPC or not


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_another_method_is_refused(frames: Frames, method: str) -> None:
    answer = frames.call(INFER, None, {":method": method})
    assert answer.head[":status"] == "405" or answer.status[0] in (UNIMPLEMENTED, INTERNAL)


@pytest.mark.parametrize("timeout", ["1", "S", "123456789S", "1x", "-1S", "1.5S", "", "1 S"])
def test_a_timeout_that_is_none_is_told(frames: Frames, timeout: str) -> None:
    answer = frames.call(INFER, ASKED, {"grpc-timeout": timeout})
    assert answer.alone
    assert answer.status[0] == INTERNAL
    assert "grpc-timeout" in answer.status[1]


def test_a_call_whose_time_is_over_calls_no_model(frames: Frames) -> None:
    for timeout in ("0S", "0n", "1n"):
        answer = frames.call(INFER, prefixed(infer_request("refusing", "late 0")), {"grpc-timeout": timeout})
        assert answer.alone
        assert answer.status[0] == LATE
    assert infer_answer(frames.call(INFER, prefixed(infer_request("tried", "late"))).messages[0]) == "0"


def test_a_deadline_is_said_by_the_server_too(frames: Frames) -> None:
    answer = frames.call(INFER, prefixed(infer_request("waiting", "deadline")), {"grpc-timeout": "50m"})
    assert answer.status[0] == LATE
    assert answer.alone


def test_metadata_reaches_the_model(frames: Frames) -> None:
    asked = prefixed(infer_request("headers", ""))
    fields = {"x-text": "one", "x-data-bin": "AAH/", "x-bare-bin": "AAE", "x-wrong-bin": "%", "grpc-timeout": "1M"}
    told = json.loads(infer_answer(frames.call(INFER, asked, fields).messages[0]))["headers"]
    assert told["x-text"] == "one"
    assert told["x-data-bin"].encode("latin-1") == b"\0\1\xff"
    assert told["x-bare-bin"].encode("latin-1") == b"\0\1"


def test_large_metadata_is_read_or_refused(frames: Frames, grpc_server: Server) -> None:
    asked = prefixed(infer_request("headers", ""))
    told = json.loads(infer_answer(frames.call(INFER, asked, {"x-large": "x" * 20_000}).messages[0]))
    assert len(told["headers"]["x-large"]) == 20_000
    answer = frames.call(INFER, asked, {"x-large": "x" * 40_000})
    assert (answer.status[0], answer.alone) == (EXHAUSTED, True)
    assert "limits.head" in answer.status[1]


# ---- messages


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (None, INTERNAL),
        (b"", INTERNAL),
        (ASKED[:3], INTERNAL),
        (ASKED[:5], INTERNAL),
        (ASKED[:-1], INTERNAL),
        (prefixed(b"\xff\xff\xff"), INTERNAL),
        (prefixed(infer_request("x", "y").replace(b"x", b"\xff", 1)), INTERNAL),
        (ASKED + ASKED, UNIMPLEMENTED),
        (ASKED + ASKED[:3], UNIMPLEMENTED),
        (prefixed(gzip.compress(ASKED[5:]), 1), INTERNAL),
        (prefixed(ASKED[5:], 2), INTERNAL),
        (prefixed(ASKED[5:], 255), INTERNAL),
    ],
    ids=[
        "no message", "an empty frame", "a cut prefix", "a prefix alone", "a cut message", "no protobuf", "no UTF-8",
        "two messages", "a second one's prefix", "compressed without an encoding", "flag 2", "flag 255",
    ],
)  # fmt: skip
def test_what_is_not_one_message(frames: Frames, body: bytes | None, status: int) -> None:
    answer = frames.call(INFER, body)
    assert answer.alone
    told, message = answer.status
    assert (told, message != "") == (status, True)


def test_a_second_message_is_refused_however_it_comes(frames: Frames) -> None:
    whole = frames.call(INFER, ASKED + b"\0")
    stream = frames.open(INFER, ASKED, end=False)
    frames.ping(1)
    frames.send(stream, b"\0", end=True)
    for answer in (whole, frames.answer(stream)):
        assert (answer.alone, answer.status[0]) == (True, UNIMPLEMENTED)


def test_pieces_of_a_message_may_come_one_by_one(frames: Frames) -> None:
    stream = frames.open(INFER, b"", end=False)
    for at in range(len(ASKED)):
        frames.send(stream, ASKED[at : at + 1], end=at == len(ASKED) - 1)
    assert frames.answer(stream).status[0] == 0


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_messages(frames: Frames, encoding: str, pack: object) -> None:
    assert callable(pack)
    packed = pack(ASKED[5:])
    for flag, message, status in ((1, packed, 0), (0, ASKED[5:], 0), (1, packed[:-3], INTERNAL), (1, b"damaged", INTERNAL)):
        answer = frames.call(INFER, prefixed(message, flag), {"grpc-encoding": encoding})
        assert answer.status[0] == status
        assert "grpc-encoding" not in answer.head  # a compressed request may get a plain answer
    assert frames.call(INFER, prefixed(ASKED[5:], 1), {"grpc-encoding": "identity"}).status[0] == INTERNAL


def test_an_unknown_encoding_is_told_what_there_is(frames: Frames) -> None:
    answer = frames.call(INFER, prefixed(ASKED[5:], 1), {"grpc-encoding": "snappy"})
    assert answer.alone
    assert answer.status[0] == UNIMPLEMENTED
    assert "gzip" in answer.head["grpc-accept-encoding"]


def test_a_message_over_the_limit_is_refused_by_its_prefix(frames: Frames) -> None:
    small = "the limit is 4096 bytes (of this method)"
    for path, limit in (
        (INFER, "limits.body"),
        (STREAM, "limits.body"),
        (f"{SERVICE}/ModelMetadata", small),
        (f"{HEALTH}/Check", small),
    ):
        stream = frames.open(path, b"\0\xff\xff\xff\xff", end=False)  # a prefix without its message
        answer = frames.answer(stream)
        assert answer.alone
        assert answer.status[0] == EXHAUSTED
        assert limit in answer.status[1]


def test_a_message_that_becomes_too_large_is_refused(strict: Server) -> None:
    with Frames(strict.host, strict.port) as frames:
        answer = frames.call(INFER, prefixed(gzip.compress(bytes(LIMIT + 1)), 1), {"grpc-encoding": "gzip"})
        assert (answer.alone, answer.status[0]) == (True, EXHAUSTED)
        answer = frames.call(INFER, prefixed(infer_request("headers", "")[:-4] + bytes(LIMIT)))
        assert (answer.alone, answer.status[0]) == (True, EXHAUSTED)
        assert frames.call(LIVE, prefixed(b"")).status[0] == 0


def test_what_is_announced_and_never_sent_is_not_waited_for(strict: Server) -> None:
    with Frames(strict.host, strict.port) as frames:
        for path in (INFER, STREAM):
            answer = frames.answer(frames.open(path, b"\0\0\0\x10\0begun", end=False))
            assert answer.alone
            assert answer.status[0] == LATE
            assert "body_silence" in answer.status[1]


def test_a_client_that_never_ends_its_request_is_answered_or_waited_for(frames: Frames) -> None:
    stream = frames.open(INFER, ASKED, end=False)
    frames.ping(1)
    if not frames.answers[stream].over:
        frames.send(stream, b"", end=True)
    answer = frames.answer(stream)
    assert answer.status[0] == 0
    assert answer.reset in (None, 0)


# ---- streams


def test_a_stream_that_cannot_be_read_ends(frames: Frames) -> None:
    stream = frames.open(STREAM, prefixed(infer_request("refusing", "frames 0", "one")), end=False)
    assert b"one" in frames.message(stream, 0)
    frames.send(stream, prefixed(b"\xff\xff"))
    answer = frames.answer(stream)
    assert not answer.alone
    assert answer.status[0] == INTERNAL


def test_a_stream_that_is_cut_within_a_message_ends(frames: Frames) -> None:
    answer = frames.call(STREAM, prefixed(infer_request("refusing", "frames 0")) + ASKED[:-1])
    assert answer.status[0] == INTERNAL


def test_a_stream_that_asks_for_statuses_is_refused_by_one_head(frames: Frames) -> None:
    answer = frames.call(STREAM, prefixed(infer_request("nobody", "x")), {"triton_grpc_error": "true"})
    assert answer.alone
    assert answer.status[0] == 5


def test_what_is_left_of_a_stream_is_answered_after_its_end(frames: Frames) -> None:
    asked = [infer_request("refusing", "rest 0", str(number)) for number in range(5)]
    answer = frames.call(STREAM, b"".join(map(prefixed, asked)))
    assert len(answer.messages) == 5
    assert answer.status == (0, "")


def test_a_client_that_does_not_read_stops_the_model(grpc_server: Server) -> None:
    with Frames(grpc_server.host, grpc_server.port) as silent, Frames(grpc_server.host, grpc_server.port) as other:
        stream = silent.open(STREAM, prefixed(infer_request("flowing", "unread")), end=False)
        other.call(INFER, prefixed(infer_request("tells", "begun unread")))
        for _ in range(50):  # meanwhile it could say much more
            other.call(INFER, ASKED)
        silent.reset(stream)
        other.call(INFER, prefixed(infer_request("tells", "cancelled unread")))
        told = other.call(INFER, prefixed(infer_request("tried", "pieces of unread")))
        # The pieces fit the client's window of 64 KiB and the gateway's buffer (limits.send_buffer).
        assert int(infer_answer(told.messages[0])) <= 4


def test_a_reset_stops_the_model_and_nothing_else(frames: Frames) -> None:
    stream = frames.open(INFER, prefixed(infer_request("waiting", "reset")))
    other = frames.open(INFER, prefixed(infer_request("waiting", "beside")))
    for name in ("reset", "beside"):
        frames.call(INFER, prefixed(infer_request("tells", f"begun {name}")))
    frames.reset(stream)
    frames.call(INFER, prefixed(infer_request("tells", "cancelled reset")))
    frames.call(INFER, prefixed(infer_request("says", "beside")))
    assert infer_answer(frames.answer(other).messages[0]) == "beside"


# ---- the connection


def test_pings_are_answered_with_and_without_calls(frames: Frames) -> None:
    frames.ping(50)
    stream = frames.open(INFER, prefixed(infer_request("waiting", "pinged")))
    frames.ping(50)
    frames.call(INFER, prefixed(infer_request("says", "pinged")))
    assert frames.answer(stream).status[0] == 0
    frames.ping(50)
    assert frames.going == []


def test_an_idle_connection_is_told_to_go(strict: Server) -> None:
    with Frames(strict.host, strict.port) as frames:
        assert frames.call(LIVE, prefixed(b"")).status[0] == 0
        frames.until_closed()
        assert {error for error, _ in frames.going} == {0}


def test_a_full_model_is_unavailable_by_one_head(strict: Server) -> None:
    with Frames(strict.host, strict.port) as frames:
        first = frames.open(INFER, prefixed(infer_request("waiting", "first")))
        frames.call(INFER, prefixed(infer_request("tells", "begun first")))
        answer = frames.call(INFER, prefixed(infer_request("waiting", "second")))
        assert answer.alone
        assert answer.status[0] == UNAVAILABLE
        frames.call(INFER, prefixed(infer_request("says", "first")))
        assert frames.answer(first).status[0] == 0


def test_a_drain_says_goodbye_twice_and_what_it_refuses_may_be_tried_elsewhere(tmp_path: Path) -> None:
    settings = ["drain = { timeout = 600 }", *served_grpc.models()]
    with serving(tmp_path, "served_grpc.py", settings) as server, Frames(server.host, server.port) as frames:
        waiting = frames.open(INFER, prefixed(infer_request("waiting", "last")))
        frames.call(INFER, prefixed(infer_request("tells", "begun last")))
        watched = frames.open(f"{HEALTH}/Watch", prefixed(b""))
        assert frames.message(watched, 0) == b"\x08\x01"
        session = frames.open(STREAM, b"", end=False)
        server.terminate()
        frames.until_going(1)
        asked = [
            (frames.open(INFER, ASKED), (UNAVAILABLE, [])),
            (frames.open(f"{HEALTH}/Check", prefixed(b"")), (0, [b"\x08\x02"])),
            (frames.open(f"{SERVICE}/ServerReady", prefixed(b"")), (0, [b""])),
            (frames.open(LIVE, prefixed(b"")), (0, [b"\x08\x01"])),
        ]
        for stream, expected in asked:
            answer = frames.answer(stream)
            if answer.reset is None:  # else it came after the second goodbye: REFUSED_STREAM
                assert (answer.status[0], answer.messages) == expected
                assert answer.alone == (expected[0] != 0)
            else:
                assert answer.reset == 7
        assert frames.message(watched, 1) == b"\x08\x02"  # no longer serving, and over
        assert frames.answer(watched).status[0] == 0
        frames.send(session, prefixed(infer_request("says", "last")), end=True)
        assert frames.answer(waiting).status[0] == 0
        frames.until_closed()
        assert [error for error, _ in frames.going] == [0, 0]


# ---- health


def test_health_as_probes_ask_for_it(frames: Frames) -> None:
    for service in ("", "inference.GRPCInferenceService"):
        assert frames.call(f"{HEALTH}/Check", prefixed(text_field(1, service))).messages == [b"\x08\x01"]
    answer = frames.call(f"{HEALTH}/Check", prefixed(text_field(1, "other.Service")))
    assert answer.alone
    assert answer.status[0] == 5
    assert "other.Service" in answer.status[1]
    watched = frames.open(f"{HEALTH}/Watch", prefixed(text_field(1, "other.Service")))
    assert frames.message(watched, 0) == b"\x08\x03"  # SERVICE_UNKNOWN, and more may come
    assert not frames.answers[watched].over
    frames.reset(watched)
