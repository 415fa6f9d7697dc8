"""Models that ask for pieces: binary inputs reach them while the upload goes on, and nothing is read that they do not ask for."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import trio

from gateway.config import HTTP2Config, LimitsConfig
from models.adapt import spec_of
from models.messages import Family, InferRequest, InferResponse, Tensor
from models.session import Session
from models.spec import ModelSpec, TensorSpec
from protocols import v2
from protocols.events import Data, End
from tests.gateway.dialects.v2.test_v2_streams import FRAMED, events_in, frames_in
from tests.gateway.promises import House, KiB, Line, at_once, limits, raw, serving

MiB = 1024 * KiB
KINDS = ["http1", "http2"]


class Taker:
    """Takes every piece, and answers with the sum of each input's rows so far, or at the end."""

    def __init__(self, *, streams: bool = False) -> None:
        self.streams = streams
        self.taken: list[InferRequest] = []
        self.errors: list[str] = []
        self.go = trio.Event()
        self.go.set()

    async def __call__(self, session: Session[InferRequest, InferResponse]) -> None:
        total = 0
        while True:
            await self.go.wait()
            try:
                piece = await session.receive()
            except Exception as e:
                self.errors.append(str(e))
                raise
            self.taken.append(piece)
            total += sum(int(tensor.data.sum()) for tensor in piece.inputs if tensor.datatype != "BYTES")
            if self.streams or piece.last:
                await session.send(InferResponse(outputs=(Tensor(name="sum", data=np.array([total])),)))
            if piece.last:
                return

    @property
    def bytes(self) -> int:
        return sum(tensor.data.nbytes for piece in self.taken for tensor in piece.inputs)

    def spec(self, **options: Any) -> ModelSpec:
        return spec_of(self, "m", family=Family.TENSOR, pieces=True, **options)


def body_of(array: Any, name: str = "x", datatype: str = "UINT8", **options: Any) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Head fields and body of a request."""
    headers, body = v2.encode_infer_request([v2.V2Tensor(name=name, datatype=datatype, array=array)], **options)
    return [header for header in headers if header[0] != b"content-length"], b"".join(body)


async def begin(line: Line, headers: Any, path: str, length: int | None = None) -> int:
    stream = line.next_stream()
    await line.send(raw(stream, b"POST", path, headers=headers, content_length=length))
    return stream


async def more(line: Line, stream: int, data: bytes) -> None:
    await line.send(Data(stream=stream, buffers=(data,)))


async def whole(house: House, kind: str, headers: Any, body: bytes, path: str = "/v2/models/m/infer") -> tuple[int, bytes]:
    """A request in one go, and its answer."""
    line = house.line(kind)
    stream = await begin(line, headers, path, len(body))
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def upload() -> None:
            await more(line, stream, body)
            await line.send(End(stream=stream))

        status, _, answer = await line.peer.read_answer(stream)
    return status, answer


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/models/m/infer_stream"])
async def test_two_tasks_cannot_wait_for_a_piece_and_the_first_goes_on(path: str, autojump_clock: Any) -> None:
    told: list[str] = []

    async def both(session: Session[InferRequest, InferResponse]) -> None:
        async def first() -> None:
            async for piece in session:
                told.append(f"a piece, last: {piece.last}")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await trio.testing.wait_all_tasks_blocked()
            for wait in (session.receive, session.__anext__):
                with pytest.raises(trio.BusyResourceError):
                    await wait()
            told.append("one waits")
        await session.send(InferResponse(outputs=(Tensor(name="sum", data=np.array([1])),)))

    headers, body = body_of(np.arange(3, dtype=np.uint8))
    async with serving(spec_of(both, "m", family=Family.TENSOR, pieces=True)) as house:
        line = house.line("http1")
        stream = await begin(line, headers, path, len(body))
        await more(line, stream, body[:-3])  # the model is called, and waits
        await trio.testing.wait_all_tasks_blocked(0.01)
        await more(line, stream, body[-3:])
        await line.send(End(stream=stream))
        status, _, _ = await line.peer.read_answer(stream)
    assert (status, told) == (200, ["one waits", "a piece, last: True"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 1000, 3 * MiB])
async def test_a_request_comes_in_pieces_and_is_answered_once(kind: str, size: int) -> None:
    taker = Taker()
    array = np.arange(size, dtype=np.uint8)
    headers, body = body_of(array, id="7", parameters={"a": 1})
    async with serving(taker.spec()) as house:
        status, answer = await whole(house, kind, headers, body)
        reply = json.loads(answer)
        assert (status, reply["id"], reply["outputs"][0]["data"]) == (200, "7", [int(array.sum())])
        assert all(piece.id == "7" and piece.parameters == {"a": 1} for piece in taker.taken)
        assert [piece.last for piece in taker.taken] == [False] * (len(taker.taken) - 1) + [True]
        assert np.concatenate([piece["x"] for piece in taker.taken]).tobytes() == array.tobytes()
        if size > MiB:
            assert {piece.inputs[0].whole for piece in taker.taken} == {(size,)}
            assert max(piece["x"].nbytes for piece in taker.taken) <= MiB
        else:
            assert [piece.inputs[0].whole for piece in taker.taken] == [()]
        assert house.gateway.budget.high_water < MiB


@pytest.mark.parametrize("kind", KINDS)
async def test_a_piece_reaches_the_model_when_it_is_here_and_answers_leave_during_the_upload(
    kind: str, autojump_clock: Any
) -> None:
    taker = Taker(streams=True)
    headers, body = body_of(np.ones((6, 100), np.uint8))
    at = len(body) - 600
    async with serving(taker.spec()) as house:
        line = house.line(kind)
        stream = await begin(line, headers, "/v2/models/m/infer_stream")
        await more(line, stream, body[:at])
        await house.still()
        assert taker.taken == []
        with at_once():
            for row in range(5):
                await more(line, stream, body[at + 100 * row : at + 100 * (row + 1)])
                (reply,) = events_in(bytes((await line.data(stream)).buffers[0]))
                assert reply["outputs"][0]["data"] == [100 * (row + 1)]
                assert (taker.taken[-1]["x"].shape, taker.taken[-1].inputs[0].whole) == ((1, 100), (6, 100))
        await more(line, stream, body[at + 500 :])
        await line.send(End(stream=stream))
        (reply,) = events_in(bytes((await line.data(stream)).buffers[0]))
        assert reply["outputs"][0]["data"] == [600]
        await line.read()
        assert house.endings == {"complete": 1}


async def test_answers_in_frames_during_the_upload() -> None:
    taker = Taker(streams=True)
    headers, body = body_of(np.ones((3, 10), np.uint8), binary_data_output=True)
    async with serving(taker.spec()) as house:
        accept = (FRAMED[0].encode(), FRAMED[1].encode())
        status, answer = await whole(house, "http2", [*headers, accept], body, "/v2/models/m/infer_stream")
        last = frames_in(answer)[-1]
        assert (status, int.from_bytes(last.body[last.header_length :], "little")) == (200, 30)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_model_does_not_ask_for_stays_with_the_client(kind: str, autojump_clock: Any) -> None:
    taker = Taker()
    taker.go = trio.Event()
    size = 4 * MiB
    headers, body = body_of(np.ones(size, np.uint8))
    bound = HTTP2Config().max_window if kind == "http2" else LimitsConfig().read_ahead + 64 * KiB
    async with serving(taker.spec(), capacity=32 * KiB) as house:
        line = house.line(kind)
        stream = await begin(line, headers, "/v2/models/m/infer", len(body))
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def upload() -> None:
                for at in range(0, len(body), 64 * KiB):
                    await more(line, stream, body[at : at + 64 * KiB])
                await line.send(End(stream=stream))

            await house.still()
            assert 0 < house.gateway.budget.used < bound + 64 * KiB
            (connection,) = house.gateway.server.connections
            (exchange,) = connection.exchanges.values()
            assert exchange.bytes_in < bound + 64 * KiB
            taker.go.set()
            status, _, answer = await line.peer.read_answer(stream)
        assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [size])
        assert house.gateway.budget.high_water < bound + 128 * KiB


async def test_a_row_larger_than_what_is_read_ahead_is_paid_for_before_it_is_taken(autojump_clock: Any) -> None:
    taker = Taker()
    size = 2 * MiB
    headers, body = body_of(np.ones((1, size), np.uint8))
    for total, expected in ((8 * MiB, 200), (2 * MiB - 1, 503)):
        async with serving(taker.spec(), config=limits(body=4 * MiB, total_bytes=total, memory_refuse=100)) as house:
            line = house.line("http1")
            stream = await begin(line, headers, "/v2/models/m/infer", len(body))
            await more(line, stream, body[: len(body) - size + 100 * KiB])
            await house.still()
            if expected == 200:
                assert 100 * KiB <= house.gateway.budget.used < 300 * KiB, "what is here, and as much ahead"
                await more(line, stream, body[len(body) - size + 100 * KiB :])
                await line.send(End(stream=stream))
            status, _, answer = await line.peer.read_answer(stream)
            assert status == expected
            if expected == 503:
                assert "limits.total_bytes" in json.loads(answer)["error"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ["infer", "infer_stream"])
@pytest.mark.parametrize("fault", ["short", "long"])
async def test_a_chunked_body_that_lies_is_an_error_for_the_model_and_the_client(kind: str, route: str, fault: str) -> None:
    taker = Taker()
    headers, body = body_of(np.ones((10, 100), np.uint8))
    body = body[:-50] if fault == "short" else body + b"z"
    text = "the body ended after 950 of its 1000 bytes" if fault == "short" else "follow the last input"
    async with serving(taker.spec()) as house:
        line = house.line(kind)
        stream = await begin(line, headers, f"/v2/models/m/{route}")
        await more(line, stream, body)
        await line.send(End(stream=stream))
        status, _, answer = await line.peer.read_answer(stream)
        assert (status, text in json.loads(answer)["error"]) == (400, True)
        assert [text in error for error in taker.errors] == [True]
        assert not any(piece.last for piece in taker.taken)
        await house.still()
        assert house.endings == {"refused": 1}


async def test_a_lie_after_the_first_response_is_the_last_event() -> None:
    taker = Taker(streams=True)
    headers, body = body_of(np.ones((10, 100), np.uint8))
    async with serving(taker.spec()) as house:
        line = house.line("http2")
        stream = await begin(line, headers, "/v2/models/m/infer_stream")
        await more(line, stream, body[:-50])
        await line.send(End(stream=stream))
        status, _, answer = await line.peer.read_answer(stream)
        assert status == 200
        assert ["outputs" in event for event in events_in(answer)] == [True, False]
        assert "ended after 950" in events_in(answer)[-1]["error"]


async def test_a_model_that_goes_on_after_a_lie_is_cancelled(autojump_clock: Any) -> None:
    async def stubborn(session: Session[InferRequest, InferResponse]) -> None:
        try:
            while not (await session.receive()).last:
                pass
        except Exception:
            await trio.sleep_forever()

    headers, body = body_of(np.ones((10, 100), np.uint8))
    async with serving(spec_of(stubborn, "m", pieces=True)) as house:
        with at_once():
            line = house.line("http1")
            stream = await begin(line, headers, "/v2/models/m/infer")
            await more(line, stream, body[:-1])
            await line.send(End(stream=stream))
            assert (await line.peer.read_answer(stream))[0] == 400


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        {"shape": [11, 100]},
        {"shape": [10, 100, 2**62]},
        {"datatype": "FP32"},
        {"name": "z"},
        {"parameters": {"binary_data_size": 999}},
        {"parameters": {"binary_data_size": "many"}},
        {"parameters": {}},
    ],
)
async def test_what_needs_no_data_is_refused_before_the_model_is_called(kind: str, change: dict[str, Any]) -> None:
    taker = Taker()
    entry = {"name": "x", "shape": [10, 100], "datatype": "UINT8", "parameters": {"binary_data_size": 1000}} | change
    text = json.dumps({"inputs": [entry]}).encode()
    spec = taker.spec(inputs=(TensorSpec(name="x", datatype="UINT8", shape=(-1, 100)),))
    async with serving(spec) as house:
        line = house.line(kind)
        headers = [(v2.IHCL, b"%d" % len(text))]
        stream = await begin(line, headers, "/v2/models/m/infer", len(text) + 1000)
        await more(line, stream, text)  # and none of the data
        status, _, answer = await line.peer.read_answer(stream)
        assert (status, json.loads(answer)["error"] != "") == (400, True)
        assert (taker.taken, taker.errors) == ([], [])
        line.peer.close()


@pytest.mark.parametrize("codings", [[b"gzip"], [b"identity", b"gzip"], [b"identity, GZIP"]])
async def test_a_body_with_a_content_coding_is_refused_by_name(codings: list[bytes]) -> None:
    taker = Taker()
    headers, body = body_of(np.ones(10, np.uint8))
    async with serving(taker.spec()) as house:
        coded = [(b"content-encoding", coding) for coding in codings]
        status, answer = await whole(house, "http1", [*headers, *coded], body)
        assert (status, "gzip" in json.loads(answer)["error"].lower(), taker.taken) == (415, True, [])


@pytest.mark.parametrize("path", ["infer", "infer_stream"])
async def test_bytes_that_came_in_pieces_are_not_among_those_transferred(path: str) -> None:
    taker = Taker()
    headers, body = body_of(np.ones(10, np.uint8))
    async with serving(taker.spec()) as house:
        for coded in ([], [(b"content-encoding", b"identity")], [(b"content-encoding", b" ,")]):
            assert (await whole(house, "http1", [*headers, *coded], body, f"/v2/models/m/{path}"))[0] == 200
        statistics = house.gateway.supervisor.workers["m"].statistics
        assert (statistics.succeeded, statistics.received, statistics.copied) == (3, 0, 0)


async def test_requests_without_binary_data_come_whole() -> None:
    taker = Taker()
    async with serving(taker.spec()) as house:
        tensor = {"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2]}
        status, _, _ = await house.ask("/v2/models/m/infer", json.dumps({"inputs": [tensor]}).encode())
        assert status == 200
        (request,) = taker.taken
        assert (request.last, request["x"].tolist(), request.inputs[0].whole) == (True, [1, 2], ())


async def test_a_model_that_has_enough_answers_and_the_rest_is_dropped() -> None:
    async def early(session: Session[InferRequest, InferResponse]) -> None:
        piece = await session.receive()
        assert not piece.last
        await session.send(InferResponse(outputs=(Tensor(name="y", data=np.array([7])),)))

    headers, body = body_of(np.ones((10, 100), np.uint8))
    async with serving(spec_of(early, "m", pieces=True)) as house:
        for kind in KINDS:
            line = house.line(kind)
            stream = await begin(line, headers, "/v2/models/m/infer", len(body))
            await more(line, stream, body[:-500])
            status, _, answer = await line.peer.read_answer(stream)
            assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [7])
            line.peer.close()
        await house.still()
        assert house.endings == {"complete": 2}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_leaves_in_mid_upload_cancels_the_model(kind: str, autojump_clock: Any) -> None:
    taker = Taker()
    headers, body = body_of(np.ones((10, 100), np.uint8))
    async with serving(taker.spec()) as house:
        line = house.line(kind)
        stream = await begin(line, headers, "/v2/models/m/infer", len(body))
        await more(line, stream, body[:-500])
        await house.still()
        assert taker.bytes == 500
        with at_once():
            line.peer.close()
            await house.still()
            assert house.endings == {"cancelled-by-client": 1}
            house.check_ledger()


async def test_a_cancelled_receive_loses_no_row(autojump_clock: Any) -> None:
    rows: list[int] = []

    async def impatient(session: Session[InferRequest, InferResponse]) -> None:
        while True:
            with trio.move_on_after(0.3):
                piece = await session.receive()
                rows.extend(piece["x"][:, 0].tolist())
                if piece.last:
                    break
        await session.send(InferResponse(outputs=(Tensor(name="y", data=np.array([1])),)))

    array = np.repeat(np.arange(10, dtype=np.uint8), 10).reshape(10, 10)
    headers, body = body_of(array)
    async with serving(spec_of(impatient, "m", pieces=True)) as house:
        line = house.line("http1")
        stream = await begin(line, headers, "/v2/models/m/infer", len(body))
        for at in range(0, len(body), 7):
            await trio.sleep(0.2)
            await more(line, stream, body[at : at + 7])
        await line.send(End(stream=stream))
        assert (await line.peer.read_answer(stream))[0] == 200
        assert rows == list(range(10))


async def test_strings_come_in_whole_rows() -> None:
    taker = Taker()
    words = np.array([[b"a" * n, b"b"] for n in range(2000)], object)
    headers, body = body_of(words, datatype="BYTES")
    async with serving(taker.spec()) as house:
        status, _ = await whole(house, "http2", headers, body)
        assert status == 200
        assert len(taker.taken) > 1
        assert np.concatenate([piece["x"] for piece in taker.taken]).tolist() == words.tolist()


async def test_the_timeout_of_a_request_bounds_its_upload_too(autojump_clock: Any) -> None:
    taker = Taker()
    headers, body = body_of(np.ones((10, 100), np.uint8), parameters={"timeout": 2_000_000})
    async with serving(taker.spec(timeout=60)) as house:
        line = house.line("http1")
        stream = await begin(line, headers, "/v2/models/m/infer", len(body))
        await more(line, stream, body[:-500])
        status, _, answer = await line.peer.read_answer(stream)
        assert (status, trio.current_time()) == (504, 2)
        assert "parameter timeout" in json.loads(answer)["error"]
        line.peer.close()


async def test_more_than_one_response_is_an_error_that_names_the_route_for_many() -> None:
    taker = Taker(streams=True)
    headers, body = body_of(np.ones((3, 100_000), np.uint8))
    async with serving(taker.spec()) as house:
        status, answer = await whole(house, "http1", headers, body)
        assert (status, "/infer_stream" in json.loads(answer)["error"]) == (500, True)


async def test_who_stops_in_the_middle_of_the_json_is_not_waited_for_but_pieces_are(autojump_clock: Any) -> None:
    taker = Taker()
    headers, body = body_of(np.ones((10, 100), np.uint8))
    async with serving(taker.spec()) as house:
        line = house.line("http1")
        stream = await begin(line, headers, "/v2/models/m/infer", len(body))
        await more(line, stream, body[:20])
        status, _, answer = await line.peer.read_answer(stream)
        assert (status, "limits.body_silence" in json.loads(answer)["error"]) == (504, True)
        line.peer.close()
        line = house.line("http1")
        stream = await begin(line, headers, "/v2/models/m/infer", len(body))
        await more(line, stream, body[:-500])
        await trio.sleep(300)
        await more(line, stream, body[-500:])
        await line.send(End(stream=stream))
        assert (await line.peer.read_answer(stream))[0] == 200
