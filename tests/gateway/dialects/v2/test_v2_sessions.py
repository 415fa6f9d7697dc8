"""v2 over a WebSocket: many requests of one session, each answered in its form; errors that end one request, or the session."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio

from gateway.config import BidiConfig, Config, LimitsConfig, WebSocketConfig
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import InferRequest, InferResponse, Part, Tensor
from models.session import Session
from models.spec import Model, ModelSpec
from protocols import v2
from protocols.events import Close, Frame, Opcode
from protocols.websocket.handshake import request_headers
from tests.gateway.promises import House, KiB, Line, limits, raw, serving

TEXT, BINARY, CONTINUATION = Opcode.TEXT, Opcode.BINARY, Opcode.CONTINUATION


async def double(session: Session[InferRequest, InferResponse]) -> None:
    """Answers every request with 2 x; has a state of its own, and fails at negative numbers."""
    served = 0
    async for request in session:
        x = request["x"]
        if x.size and x.flat[0] == -1:
            raise ModelError("no negative numbers", status=422)
        if x.size and x.flat[0] == -2:
            raise RuntimeError("secret")
        served += 1
        outputs = (Tensor(name="y", data=2 * x), Tensor(name="served", data=np.array([served])))
        await session.send(InferResponse(outputs=outputs))


def asked(*numbers: int, **members: Any) -> bytes:
    tensor = {"name": "x", "shape": [len(numbers)], "datatype": "INT64", "data": list(numbers)}
    return json.dumps({"inputs": [tensor], **members}).encode()


def framed(*numbers: int, **options: Any) -> bytes:
    x = v2.V2Tensor(name="x", datatype="INT64", array=np.array(numbers, np.int64))
    return b"".join(v2.encode_infer_frame([x], **options))


class Client:
    """One session, as its client sees it."""

    def __init__(self, line: Line) -> None:
        self.line = line

    async def say(self, data: bytes, opcode: Opcode = TEXT, fin: bool = True) -> None:
        await self.line.send(Frame(opcode=opcode, fin=fin, data=data))

    async def hear(self) -> tuple[Opcode, bytes]:
        frame = await self.line.event(1)
        assert isinstance(frame, Frame), frame
        assert frame.fin
        return frame.opcode, bytes(frame.data)

    async def answer(self) -> v2.V2Answer:
        """The next reply, whatever its form."""
        opcode, data = await self.hear()
        if opcode is TEXT:
            return v2.decode_streamed_reply(data)
        frame = v2.split_frame(data)
        return v2.decode_streamed_reply(frame.body, frame.header_length)

    async def error(self) -> dict[str, str]:
        """The next reply, which is an error."""
        opcode, data = await self.hear()
        assert opcode is TEXT
        said: dict[str, str] = json.loads(data)
        assert list(said) in (["error"], ["error", "id"])
        return said

    async def closed(self) -> tuple[int | None, str]:
        event = await self.line.event(1)
        assert isinstance(event, Close), event
        await self.line.peer.flush()
        return event.code, event.reason


async def join(house: House, path: str = "/v2/models/m/infer") -> Client:
    return Client(await house.socket(path))


@asynccontextmanager
async def session(*specs: ModelSpec, config: Config | None = None) -> AsyncIterator[tuple[House, Client]]:
    """A session with a model, which the client leaves at the end."""
    async with serving(*(specs or (spec_of(double, "m"),)), config=config) as house:
        peer = await join(house)
        yield house, peer
        await peer.line.peer.send(Close(code=1000))


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/models/m/versions/1/infer"])
async def test_many_requests_are_answered_in_one_call_of_the_model(path: str) -> None:
    async with serving(spec_of(double, "m")) as house:
        peer = await join(house, path)
        for n in range(1, 5):
            await peer.say(asked(n, id=str(n)))
            answer = await peer.answer()
            assert (answer.id, answer["y"].elements.tolist(), answer["served"].elements.tolist()) == (str(n), [2 * n], [n])
        await peer.line.peer.send(Close(code=1000))
        await house.still()
        assert house.endings == {"cancelled-by-client": 1}


async def test_an_answer_has_the_form_of_its_request_and_binary_outputs_come_as_a_frame() -> None:
    async with session() as (_, peer):
        output = [{"name": "y", "parameters": {"binary_data": True}}]
        for data, opcode, answered, binary in (
            (asked(1), TEXT, TEXT, False),
            (framed(1), BINARY, BINARY, False),
            (asked(1, parameters={"binary_data_output": True}), TEXT, BINARY, True),
            (asked(1, outputs=output), TEXT, BINARY, True),
            (framed(1, binary_data_output=True), BINARY, BINARY, True),
            (b"".join(v2.encode_frame(asked(1))), BINARY, BINARY, False),
            (asked(1), TEXT, TEXT, False),
        ):
            await peer.say(data, opcode)
            heard, reply = await peer.hear()
            assert heard is answered
            if heard is BINARY:
                frame = v2.split_frame(reply)
                assert (len(frame.body) > frame.header_length) is binary
            else:
                assert json.loads(reply)["outputs"][0]["data"] == [2]


async def test_answers_come_as_they_are_sent_and_any_number_of_them(autojump_clock: Any) -> None:
    async def count(request: InferRequest) -> AsyncIterator[Any]:
        for number in range(int(request["x"][0])):
            yield np.array([number])

    async with session(spec_of(count, "m")) as (_, peer):
        await peer.say(asked(3, id="a"))
        await peer.say(asked(0))
        await peer.say(asked(2, id="b"))
        found = [await peer.answer() for _ in range(5)]
        assert [(answer.id, answer.outputs[0].elements.tolist()) for answer in found] == [
            ("a", [0]), ("a", [1]), ("a", [2]), ("b", [0]), ("b", [1]),
        ]  # fmt: skip


async def test_the_fragments_of_a_message_are_one_request() -> None:
    async with session() as (house, peer):
        for data, opcode in ((asked(3, id="7"), TEXT), (framed(3, id="7"), BINARY)):
            await peer.say(data[:5], opcode, fin=False)
            await peer.say(b"", CONTINUATION, fin=False)
            for byte in data[5:-1]:
                await peer.say(bytes((byte,)), CONTINUATION, fin=False)
            await house.still()
            assert house.gateway.budget.used > 0
            await peer.say(data[-1:], CONTINUATION)
            answer = await peer.answer()
            assert (answer.id, answer["y"].elements.tolist()) == ("7", [6])


@pytest.mark.parametrize(
    ("data", "opcode", "id"),
    [
        (b"", TEXT, ""),
        (b"nonsense", TEXT, ""),
        (b"\xff", TEXT, ""),
        (b'{"id":"7"}', TEXT, "7"),
        (asked(1, id="7", parameters={"timeout": -1}), TEXT, "7"),
        (asked(1, id="7", outputs=[{"name": "a"}, {"name": "a"}]), TEXT, "7"),
        (b"", BINARY, ""),
        (framed(1, id="7")[:-1], BINARY, ""),
        (framed(1, id="7") + b"x", BINARY, ""),
        (b"".join(v2.encode_frame(b'{"id":"7","inputs":[]}', [b"surplus"])), BINARY, "7"),
        (b"".join(v2.encode_frame(b"", [b"raw"])), BINARY, ""),
    ],
)
async def test_a_bad_request_is_told_so_and_the_session_goes_on(data: bytes, opcode: Opcode, id: str) -> None:
    async with session() as (_, peer):
        await peer.say(asked(1))
        await peer.say(data, opcode)
        await peer.say(asked(2))
        assert (await peer.answer())["y"].elements.tolist() == [2]
        assert (await peer.error()).get("id", "") == id
        answer = await peer.answer()
        assert (answer["y"].elements.tolist(), answer["served"].elements.tolist()) == ([4], [2])


@pytest.mark.parametrize(("number", "text"), [(-1, "no negative numbers"), (-2, "incident")])
async def test_a_model_that_fails_at_a_request_is_called_anew_for_the_next(
    number: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with session() as (house, peer):
        await peer.say(asked(1))
        await peer.say(asked(number, id="7"))
        await peer.say(asked(3))
        assert (await peer.answer())["served"].elements.tolist() == [1]
        error = await peer.error()
        assert (error["id"], text in error["error"], "secret" in error["error"]) == ("7", True, False)
        assert (await peer.answer())["served"].elements.tolist() == [1]  # its state is clean
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["model raised"] * (
            number == -2
        )
        assert house.gateway.counts().exchanges == 1
        statistics = house.gateway.supervisor.workers["m"].statistics
        assert (statistics.succeeded, statistics.failed) == (2, 1)


async def test_an_output_that_nobody_has_is_an_error_of_that_request() -> None:
    async with session() as (_, peer):
        await peer.say(asked(1, id="7", outputs=[{"name": "nope"}]))
        error = await peer.error()
        assert (error["id"], "nope" in error["error"]) == ("7", True)
        await peer.say(asked(1))
        assert (await peer.answer())["y"].elements.tolist() == [2]


async def test_a_model_that_fails_without_a_request_ends_the_session() -> None:
    async def broken(session: Session[InferRequest, InferResponse]) -> None:
        raise RuntimeError("secret")

    async with serving(spec_of(broken, "m")) as house:
        peer = await join(house)
        code, reason = await peer.closed()
        assert (code, "incident" in reason) == (1011, True)
        await house.still()
        assert house.endings == {"model-error": 1}


async def test_a_model_that_returns_ends_the_session() -> None:
    async def brief(session: Session[InferRequest, InferResponse]) -> None:
        await session.send(InferResponse(outputs=(Tensor(name="y", data=(await session.receive())["x"]),)))

    async with serving(spec_of(brief, "m")) as house:
        peer = await join(house)
        await peer.say(asked(5))
        assert (await peer.answer())["y"].elements.tolist() == [5]
        assert await peer.closed() == (1000, "")
        await house.still()
        assert house.endings == {"complete": 1}


async def test_the_model_may_read_while_it_writes_and_bad_requests_wait_for_their_turn(autojump_clock: Any) -> None:
    async def duplex(session: Session[InferRequest, InferResponse]) -> None:
        async def listen() -> None:
            async for _ in session:
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            for number in range(400):
                await session.send(InferResponse(outputs=(Tensor(name="y", data=np.full(100, number)),)))
            nursery.cancel_scope.cancel()

    async with serving(spec_of(duplex, "m"), capacity=4 * KiB) as house:
        peer = await join(house)
        await house.still()  # the model waits for room
        for _ in range(10):
            await peer.say(b"nonsense")
        await house.still()
        errors = numbers = 0
        while isinstance(event := await peer.line.event(1), Frame):
            said = json.loads(bytes(event.data))
            if "error" in said:
                errors += 1
            else:
                assert said["outputs"][0]["data"][0] == numbers
                numbers += 1
        assert (numbers, errors > 0) == (400, True)


async def test_a_request_has_its_own_timeout_and_the_session_goes_on(autojump_clock: Any) -> None:
    deadlines = []

    async def slow(session: Session[InferRequest, InferResponse]) -> None:
        async for request in session:
            deadlines.append(session.deadline - trio.current_time())
            await trio.sleep(float(request["x"][0]))
            await session.send(InferResponse(outputs=(Tensor(name="y", data=request["x"]),)))

    async with session(spec_of(slow, "m")) as (house, peer):
        await peer.say(asked(1, parameters={"timeout": 2_000_000}))
        assert (await peer.answer())["y"].elements.tolist() == [1]
        await trio.sleep(10)  # the next may be as late as it likes
        await peer.say(asked(5, id="7", parameters={"timeout": 2_000_000}))
        error = await peer.error()
        assert (error["id"], "2 s are over (parameter timeout of the request)" in error["error"]) == ("7", True)
        await peer.say(asked(5))
        assert (await peer.answer())["y"].elements.tolist() == [5]
        await peer.say(asked(1, parameters={"timeout": 2_000_000}))
        await peer.say(asked(5))
        assert [(await peer.answer())["y"].elements.tolist() for _ in range(2)] == [[1], [5]]
        assert [deadline > 1000 or deadline for deadline in deadlines] == [2, 2, True, 2, True]
        assert house.gateway.counts().exchanges == 1


async def test_an_answer_that_was_just_late_stays_the_only_one(autojump_clock: Any) -> None:
    async def late(session: Session[InferRequest, InferResponse]) -> None:
        async for request in session:
            with trio.CancelScope(shield=True):
                await trio.sleep(3)
                await session.send(InferResponse(outputs=(Tensor(name="y", data=request["x"]),)))

    async with session(spec_of(late, "m")) as (_, peer):
        for number in range(3):
            await peer.say(asked(number, parameters={"timeout": 2_000_000}))
            assert (await peer.answer())["y"].elements.tolist() == [number]


async def test_the_timeout_of_the_model_bounds_the_session(autojump_clock: Any) -> None:
    async with serving(spec_of(double, "m", timeout=5)) as house:
        peer = await join(house)
        await peer.say(asked(1))
        await peer.answer()
        code, reason = await peer.closed()
        assert (code, "models.m.timeout" in reason, trio.current_time()) == (1011, True, 5)
        assert house.endings == {"deadline": 1}


@pytest.mark.parametrize(
    ("config", "name"),
    [(BidiConfig(session_timeout=20), "bidi.session_timeout"), (BidiConfig(idle_timeout=3), "bidi.idle_timeout")],
)
async def test_sessions_have_the_limits_of_bidi(config: BidiConfig, name: str, autojump_clock: Any) -> None:
    async with serving(spec_of(double, "m"), config=Config(bidi=config)) as house:
        peer = await join(house)
        code, reason = await peer.closed()
        assert (code, name in reason) == (1011, True)
        assert house.endings == {"deadline": 1}


async def test_a_session_is_one_slot_and_waits_for_it_before_it_is_accepted(autojump_clock: Any) -> None:
    async with serving(spec_of(double, "m", capacity=1, queue=1)) as house:
        first = await join(house)
        second: list[Client] = []
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def wait() -> None:
                second.append(await join(house))

            await house.still()
            assert (second, house.gateway.counts().slots_in_use) == ([], 1)
            assert (await upgrade(house))[0] == 503
            await first.line.peer.send(Close(code=1000))
        await second[0].say(asked(4))
        assert (await second[0].answer())["y"].elements.tolist() == [8]
        await second[0].line.peer.send(Close(code=1000))


async def upgrade(house: House, path: str = "/v2/models/m/infer", **changed: str) -> tuple[int, dict[bytes, bytes], bytes]:
    """The answer to a handshake that the gateway refuses."""
    line = house.line("http1")
    headers = dict(request_headers(bytes(16))) | {k.replace("_", "-").encode(): v.encode() for k, v in changed.items()}
    await line.send(raw(1, b"GET", path, headers=list(headers.items()), upgrade=b"websocket"))
    return await line.peer.read_answer(1)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/nobody/infer", 404),
        ("/v2/models/m/versions/2/infer", 404),
        ("/v2/models/parts/infer", 400),
        ("/v2/models/slow/infer", 503),
    ],
)
async def test_a_handshake_for_what_is_not_there_is_an_http_error_in_json(path: str, status: int) -> None:
    def parts(part: Part) -> bytes:
        return b""

    @asynccontextmanager
    async def loading() -> AsyncIterator[Model]:
        await trio.sleep(math.inf)
        yield double

    slow = ModelSpec(name="slow", family=spec_of(double).family, load=loading, load_timeout=0.01)
    async with serving(spec_of(double, "m"), spec_of(parts, "parts"), slow) as house:
        got, headers, body = await upgrade(house, path)
        assert (got, headers[b"content-type"]) == (status, b"application/json")
        assert json.loads(body)["error"]


async def test_a_handshake_of_another_version_is_told_ours() -> None:
    async with serving(spec_of(double, "m")) as house:
        status, headers, body = await upgrade(house, sec_websocket_version="8")
        assert (status, headers[b"sec-websocket-version"]) == (426, b"13")
        assert "expected 13" in json.loads(body)["error"]


async def test_a_message_above_the_limit_of_a_body_ends_the_session() -> None:
    for size, code in ((2000, 1000), (2001, 1009)):
        async with serving(spec_of(double, "m"), config=limits(body=2000)) as house:
            peer = await join(house)
            await peer.say(asked(1).ljust(1000), fin=False)
            await peer.say(b" " * (size - 1000), CONTINUATION)
            if code == 1000:
                assert (await peer.answer())["y"].elements.tolist() == [2]
                await peer.line.peer.send(Close(code=1000))
            else:
                assert await peer.closed() == (1009, "a message of 2001 bytes is over the limit of 2000 bytes (limits.body)")


async def test_a_message_for_which_there_is_no_memory_ends_the_session() -> None:
    config = Config(
        limits=LimitsConfig(body=2_000_000, total_bytes=1_000_000, party_share=100, memory_refuse=100, memory_reset=100)
    )
    async with serving(spec_of(double, "m"), config=config) as house:
        peer = await join(house)
        await peer.say(b" " * 60_000, fin=False)
        while True:
            await peer.say(b" " * 60_000, CONTINUATION, fin=False)
            await house.still()
            if not house.gateway.counts().exchanges:
                break
        code, reason = await peer.closed()
        assert (code, "limits.total_bytes" in reason) == (1013, True)
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize("drips", [False, True])
async def test_a_message_whose_frames_stop_coming_ends_the_session(drips: bool, autojump_clock: Any) -> None:
    config = Config(websocket=WebSocketConfig(ping_interval=0))
    async with serving(spec_of(double, "m"), config=config) as house:
        peer = await join(house)
        await trio.sleep(100)
        await peer.say(b" " * 100, fin=False)
        for _ in range(60 if drips else 0):
            if house.endings:
                break
            await peer.say(b" " * 100, CONTINUATION, fin=False)
            await trio.sleep(1)
        code, reason = await peer.closed()
        assert (code, ("limits.body_rate" if drips else "limits.body_silence") in reason) == (1008, True)
        assert 130 < trio.current_time() <= 140
        await house.still()
        assert house.endings == {"refused": 1}


async def test_the_memory_of_a_message_is_paid_for_until_the_next_one_is_asked_for() -> None:
    go, taken = trio.Event(), trio.Event()

    async def holding(session: Session[InferRequest, InferResponse]) -> None:
        await session.receive()
        taken.set()
        await go.wait()
        await session.receive()

    async with session(spec_of(holding, "m"), config=Config(websocket=WebSocketConfig(part=100_000))) as (house, peer):
        await peer.say(framed(*range(5000)), BINARY)
        await taken.wait()
        assert house.gateway.budget.used >= 40_000
        go.set()
        await house.still()
        assert house.gateway.budget.used == 0


async def test_a_model_that_is_read_from_slowly_takes_its_time_and_loses_nothing(autojump_clock: Any) -> None:
    # requests are read ahead to the bound of the wire and no further; a cancelled receive has lost none of them
    async def impatient(session: Session[InferRequest, InferResponse]) -> None:
        while True:
            with trio.move_on_after(0.5):
                request = await session.receive()
                await session.send(InferResponse(outputs=(Tensor(name="y", data=request["x"]),)))

    async with session(spec_of(impatient, "m")) as (_, peer):
        for number in range(30):
            data = asked(number)
            await peer.say(data[:10], fin=False)
            await trio.sleep(0.7)
            await peer.say(data[10:], CONTINUATION)
            assert (await peer.answer())["y"].elements.tolist() == [number]
