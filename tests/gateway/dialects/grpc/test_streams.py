"""ModelStreamInfer: requests of many models in one call, each with its own end, and one answer that all of them share."""

from __future__ import annotations

import gc
import gzip
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import trio

from gateway.config import Config, DrainConfig, HTTP2Config, LimitsConfig, V2Config
from models.adapt import spec_of
from models.errors import ModelError
from models.messages import Family, InferRequest, InferResponse, Part, Tensor
from models.session import Session
from models.spec import ModelSpec
from protocols.grpc.framing import encode_prefix
from protocols.grpc.status import StatusCode
from tests.gateway.dialects.grpc.by_hand import EMPTY_FINAL, OK, SILENT, ByHand, Status, announced, request
from tests.gateway.promises import CANCELLED, PAYLOAD, House, KiB, Probe, at_once, counting, limits, serving, silent

WIRE = "grpcstream-http2"
SEND_BUFFER, WINDOW = LimitsConfig().send_buffer, HTTP2Config().initial_window


class Told:
    """A model of tensors whose answers the test gives. The first number of a request names it: `say` gives its next answer,
    and `over` ends it."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[Any, Any]] = {}
        self.begun: list[int] = []
        self.ended = Counter[str]()

    def _line(self, number: int) -> tuple[Any, Any]:
        if number not in self._lines:
            self._lines[number] = trio.open_memory_channel(100)
        return self._lines[number]

    def say(self, number: int, answer: int) -> None:
        self._line(number)[0].send_nowait(answer)

    def over(self, number: int) -> None:
        self._line(number)[0].close()

    async def __call__(self, session: Session[InferRequest, InferResponse]) -> None:
        number = int((await session.receive())["x"][0])
        self.begun.append(number)
        try:
            async for answer in self._line(number)[1]:
                await session.send(InferResponse(outputs=[Tensor(name="y", data=np.array([answer]))]))
        except trio.Cancelled:
            self.ended["cancelled"] += 1
            raise
        self.ended["returned"] += 1

    def spec(self, name: str, *, decoupled: bool = True, **options: Any) -> ModelSpec:
        return spec_of(self, name, family=Family.TENSOR, decoupled=decoupled, **options)


async def doubled(session: Session[InferRequest, InferResponse]) -> None:
    """2 x, at once; fails at negative numbers."""
    x = (await session.receive())["x"]
    if x[0] == -1:
        raise ModelError("no negative numbers", status=422)
    if x[0] == -2:
        raise RuntimeError("secret")
    await session.send(InferResponse(outputs=[Tensor(name="y", data=2 * x)]))


DOUBLE = spec_of(doubled, "double", family=Family.TENSOR)


@asynccontextmanager
async def stream(*specs: ModelSpec, config: Config | None = None, **how: Any) -> AsyncIterator[tuple[House, ByHand]]:
    """A stream that has been opened, and a house of these models."""
    fields = how.pop("fields", ())
    async with serving(*specs, config=config) as house:
        yield house, await ByHand(house.line("http2")).open(*fields, **how)


# -- one answer of many models -----------------------------------------------------------------------------------------


async def test_three_models_speak_in_turn_on_one_stream() -> None:
    a, b, c = Told(), Told(), Told()
    async with stream(a.spec("a"), b.spec("b"), c.spec("c", decoupled=False)) as (house, call):
        for model in ("a", "b", "c"):
            await call.ask(model, 1, id=f"of {model}")
        await house.still()
        for model, name, answer in ((a, "a", 1), (b, "b", 2), (a, "a", 3), (c, "c", 4), (b, "b", 5), (a, "a", 6)):
            model.say(1, answer)
            if model is c:
                c.over(1)
            found = await call.response()
            assert (found.answer.id, found.answer.model_name) == (f"of {name}", name)
            assert [int(n) for n in found.answer["y"].elements] == [answer]
            assert found.final is (model is c)  # a decoupled request may go on
        await call.end()
        a.over(1)
        b.over(1)
        assert await call.rest() == ([], OK)
        assert house.endings == {"complete": 1}


async def test_a_slow_answer_holds_back_those_that_were_asked_for_behind_it() -> None:
    slow, fast = Told(), Told()
    async with stream(slow.spec("slow", decoupled=False), fast.spec("fast", decoupled=False)) as (house, call):
        await call.ask("slow", 1, id="first")
        await call.ask("fast", 2, id="second")
        await call.ask("slow", 3, id="third")
        await house.still()
        assert (slow.begun, fast.begun) == ([1, 3], [2])  # all at once
        for model, number in ((slow, 3), (fast, 2)):
            model.say(number, number)
            model.over(number)
        await house.still()
        await call.line.read()
        assert not call.line._kept.get(call.stream), "nothing may come before the first"
        assert fast.ended["returned"] == 1
        slow.say(1, 1)
        slow.over(1)
        assert [await call.told() for _ in range(3)] == [("first", [1]), ("second", [2]), ("third", [3])]
        await call.end()
        assert await call.rest() == ([], OK)


async def test_decoupled_requests_wait_for_nobody() -> None:
    slow, free = Told(), Told()
    async with stream(slow.spec("slow", decoupled=False), free.spec("free")) as (_, call):
        await call.ask("slow", 1, id="slow")
        for number in (2, 3):
            await call.ask("free", number, id=str(number))
        for number, answer in ((3, 30), (2, 20), (3, 31), (2, 21)):
            free.say(number, answer)
            assert await call.told() == (str(number), [answer])
        slow.say(1, 1)
        for model, number in ((slow, 1), (free, 2), (free, 3)):
            model.over(number)
        assert await call.told() == ("slow", [1])
        await call.end()
        assert await call.rest() == ([], OK)


async def test_the_end_of_a_decoupled_request_is_said_where_it_was_asked_for() -> None:
    model = Told()
    async with stream(model.spec("m"), DOUBLE) as (_, call):
        await call.ask("m", 1, id="asks", parameters={EMPTY_FINAL: True})
        await call.ask("m", 2, id="does not", parameters={EMPTY_FINAL: False})
        await call.ask("double", 1, id="has one", parameters={EMPTY_FINAL: True})
        found = await call.response()
        assert (found.answer.id, found.final) == ("has one", True)  # and there is no other
        model.say(1, 7)
        assert await call.told() == ("asks", [7])
        model.over(2)
        model.over(1)
        end = await call.response()
        assert (end.answer.id, end.answer.model_name, end.final, end.error, end.answer.outputs) == (
            "asks",
            "m",
            True,
            "",
            (),
        )
        await call.end()
        assert await call.rest() == ([], OK)


async def test_a_stream_without_a_request_is_well() -> None:
    async with stream(DOUBLE) as (house, call):
        await call.end()
        assert await call.rest() == ([], SILENT)
        assert house.endings == {"complete": 1}


async def test_after_the_last_request_the_rest_is_delivered() -> None:
    model = Told()
    async with stream(model.spec("m"), DOUBLE) as (house, call):
        await call.ask("m", 1)
        await call.ask("double", 4)
        await call.end()
        await house.still()
        for answer in (1, 2):
            model.say(1, answer)
        model.over(1)
        came, ended = await call.rest()
        assert ended == OK
        assert sorted(int(one.answer["y"].elements[0]) for one in came) == [1, 2, 8]
        assert house.endings == {"complete": 1}


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_requests_are_told_apart_wherever_they_are_cut(step: int) -> None:
    async with stream(DOUBLE) as (_, call):
        body = b"".join(request("double", n, id=str(n)) for n in range(5))
        for at in range(0, len(body), step):
            await call.say(body[at : at + step])
        assert [await call.told() for _ in range(5)] == [(str(n), [2 * n]) for n in range(5)]
        await call.end()
        assert await call.rest() == ([], OK)


async def test_a_large_request_comes_in_pieces_and_its_memory_is_given_back_with_its_answer() -> None:
    model = Told()
    async with stream(model.spec("m", decoupled=False), DOUBLE) as (house, call):
        large = request("m", 1, *range(200_000))
        for at in range(0, len(large), 50_000):
            await call.say(large[at : at + 50_000])
            await call.line.read()  # which opens the window
        (exchange,) = house.gateway.observer.live
        assert len(large) - 5 <= exchange.held < 2 * len(large)
        assert house.gateway.budget.high_water < 1.5 * len(large)  # its memory is paid for once
        model.say(1, 1)
        model.over(1)
        assert await call.told() == ("", [1])
        await house.still()
        assert exchange.held == 0  # and the stream goes on
        views = [view for view in gc.get_objects() if type(view) is memoryview]
        assert not [view for view in views if type(view.obj) is np.ndarray and view.nbytes > len(large) // 2]
        del views
        await call.ask("double", 4)
        assert await call.told() == ("", [8])
        await call.end()
        assert await call.rest() == ([], OK)


async def test_requests_may_be_compressed() -> None:
    async with stream(DOUBLE, fields=((b"grpc-encoding", b"gzip"),)) as (house, call):
        for n in range(3):
            message = gzip.compress(request("double", n)[5:])
            await call.say(encode_prefix(len(message), compressed=True) + message)
            await call.ask("double", 10 + n)
        assert [await call.told() for _ in range(6)] == [("", [2 * n]) for n in (0, 10, 1, 11, 2, 12)]
        await house.still()
        (exchange,) = house.gateway.observer.live
        assert exchange.held == 0  # a request is paid for until its answer, not until the end of the stream
        await call.end()
        assert await call.rest() == ([], OK)


# -- errors of one request ---------------------------------------------------------------------------------------------


async def text(part: Part) -> bytes:
    return b""


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        (request("nobody", 1, id="7"), "unknown model 'nobody'"),
        (request("parts", 1, id="7"), "asked by an input 'text_input'"),
        (request("double", 1, id="7", parameters={"timeout": -1}), "timeout"),
        (request("double", 1, id="7", parameters={"priority": "high"}), "priority"),
        (request("double", 1, id="7", parameters={"triton_x": True}), "reserved"),
        (request("double", 1, id="7", parameters={EMPTY_FINAL: 1}), EMPTY_FINAL),
        (request("double", -1, id="7"), "no negative numbers"),
        (request("double", -2, id="7"), "incident"),
        (request("full", 1, id="7"), "sessions run"),
    ],
)
async def test_a_request_that_fails_is_told_so_by_its_id_and_the_stream_goes_on(refused: bytes, says: str) -> None:
    full = Told()
    specs = full.spec("full", capacity=1, queue=0), DOUBLE, spec_of(text, "parts", family=Family.PARTS)
    async with stream(*specs) as (house, call):
        await call.ask("full", 0, id="held")
        await call.ask("double", 1, id="before")
        await call.say(refused)
        await call.ask("double", 2, id="behind")
        came = {(one := await call.response()).answer.id: one for _ in range(3)}
        assert says in came["7"].error
        assert "secret" not in came["7"].error
        assert (came["7"].final, came["7"].answer.outputs) == (True, ())
        assert [int(came[id].answer["y"].elements[0]) for id in ("before", "behind")] == [2, 4]
        full.over(0)
        await call.end()
        assert await call.rest() == ([], OK)
        assert house.endings == {"complete": 1}


async def test_a_request_whose_tensors_are_none_is_told_so_by_its_id_and_the_stream_goes_on() -> None:
    message = request("double", 1, id="7")
    surplus = message[5:] + b"\x3a\x01x"  # one more entry of raw_input_contents
    async with stream(DOUBLE) as (_, call):
        await call.say(encode_prefix(len(surplus)) + surplus)
        await call.ask("double", 2, id="next")
        came = {(one := await call.response()).answer.id: one for _ in range(2)}
        assert "raw_input_contents" in came["7"].error
        assert (came["7"].answer.model_name, came["7"].final, came["next"].error) == ("double", True, "")
        await call.end()
        assert await call.rest() == ([], OK)


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (request("nobody", 1), StatusCode.NOT_FOUND),
        (request("double", 1, parameters={"timeout": -1}), StatusCode.INVALID_ARGUMENT),
        (request("double", -1), StatusCode.INVALID_ARGUMENT),
        (request("double", -2), StatusCode.INTERNAL),
        (request("full", 1), StatusCode.UNAVAILABLE),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
async def test_with_triton_grpc_error_the_first_error_is_the_streams(refused: bytes, code: StatusCode, begun: bool) -> None:
    full, other = Told(), Told()
    specs = full.spec("full", capacity=1, queue=0), other.spec("other"), DOUBLE
    async with stream(*specs, fields=((b"triton_grpc_error", b"true"),)) as (house, call):
        await call.ask("full", 0)
        await call.ask("other", 1)
        await house.still()
        if begun:
            other.say(1, 5)
            assert await call.told() == ("", [5])
        await call.say(refused)
        came, ended = await call.rest()
        assert (came, ended.code, ended.alone) == ([], code, not begun)
        assert ended.text
        await house.still()
        assert full.ended + other.ended == {"cancelled": 2}


async def test_other_values_of_triton_grpc_error_say_nothing() -> None:
    async with stream(DOUBLE, fields=((b"triton_grpc_error", b"false"),)) as (_, call):
        await call.ask("nobody", 1)
        assert "nobody" in (await call.response()).error
        await call.end()
        assert await call.rest() == ([], OK)


async def test_a_models_own_time_ends_its_request_alone(autojump_clock: Any) -> None:
    brief, long = Told(), Told()
    async with stream(brief.spec("brief", timeout=5), long.spec("long", timeout=50)) as (house, call):
        began = trio.current_time()
        await call.ask("long", 1, id="long")
        await call.ask("brief", 1, id="brief")
        await call.ask("long", 2, id="asked", parameters={"timeout": 8_000_000})
        found = await call.response()
        assert (found.answer.id, trio.current_time() - began) == ("brief", 5)
        assert "models.brief.timeout" in found.error
        found = await call.response()
        assert (found.answer.id, trio.current_time() - began) == ("asked", pytest.approx(8))
        assert "parameter timeout" in found.error
        long.say(1, 1)
        assert await call.told() == ("long", [1])
        long.over(1)
        await call.end()
        assert await call.rest() == ([], OK)
        assert (brief.ended, long.ended) == ({"cancelled": 1}, {"cancelled": 1, "returned": 1})
        assert house.endings == {"complete": 1}


# -- its tasks ---------------------------------------------------------------------------------------------------------


class Begun(trio.abc.Instrument):
    """Counts the tasks of streams that begin, and those that live."""

    def __init__(self) -> None:
        self.number = self.live = 0

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        self.number += "_Stream" in task.name
        self.live += "_Stream" in task.name

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        self.live -= "_Stream" in task.name


@contextmanager
def tasks_begun() -> Iterator[Begun]:
    begun = Begun()
    trio.lowlevel.add_instrument(begun)
    try:
        yield begun
    finally:
        trio.lowlevel.remove_instrument(begun)


async def test_requests_that_never_wait_share_one_task() -> None:
    async with stream(DOUBLE) as (_, call):
        with tasks_begun() as begun:
            await call.say(b"".join(request("double", number) for number in range(1, 200)))
            assert [await call.told() for _ in range(1, 200)] == [("", [2 * number]) for number in range(1, 200)]
        assert begun.number <= 3  # the one that leads, and who follows where a turn is over
        await call.end()
        assert await call.rest() == ([], OK)


async def test_tasks_of_requests_that_wait_are_used_again() -> None:
    model = Told()
    async with stream(model.spec("m", decoupled=False)) as (house, call):
        with tasks_begun() as begun:
            for number in range(0, 60, 3):
                for asked in range(number, number + 3):
                    await call.ask("m", asked)
                await house.still()
                for asked in range(number, number + 3):
                    model.say(asked, asked)
                    model.over(asked)
                    assert await call.told() == ("", [asked])
        assert begun.number <= 4
        await call.end()
        assert await call.rest() == ([], OK)


@pytest.fixture
def two_ready(monkeypatch: pytest.MonkeyPatch) -> int:
    """So many streams may keep their tasks while they are quiet."""
    monkeypatch.setattr("gateway.dialects.grpc.stream._MOST_READY", 2)
    return 2


async def opened(call: ByHand, number: int) -> list[ByHand]:
    """So many streams on the connection of this one, each with one request that is answered."""
    streams = [await ByHand(call.line).open() for _ in range(number)]
    for n, one in enumerate(streams):
        await one.ask("waits", n)
        assert await one.told() == ("", [n])
    return streams


async def waits(session: Session[InferRequest, InferResponse]) -> None:
    """Its number, after a wait."""
    x = (await session.receive())["x"]
    await trio.lowlevel.checkpoint()
    await session.send(InferResponse(outputs=[Tensor(name="y", data=x)]))


WAITS = spec_of(waits, "waits", family=Family.TENSOR)


async def test_among_many_streams_quiet_ones_have_no_tasks_and_are_answered_again(
    two_ready: int, autojump_clock: Any
) -> None:
    async with stream(WAITS, DOUBLE) as (house, call):
        with tasks_begun() as tasks:
            streams = await opened(call, 20)
            await trio.sleep(1)
            await call.ask("double", 1)  # a stream that begins its tasks looks at some of the others
            for _ in range(5):
                streams += await opened(call, 1)
            await house.still()
            assert tasks.live <= 2 * (two_ready + 5 + 1)  # each has one that leads, and one that follows
            assert await call.told() == ("", [2])
        for n, one in enumerate(streams):
            for number in (n, n + 1):
                await one.ask("double", number, id=str(number))
                assert await one.told() == (str(number), [2 * number])
            await one.end()
            assert await one.rest() == ([], OK)
        await call.end()
        assert await call.rest() == ([], OK)
        assert house.endings == {"complete": len(streams) + 1}


async def test_a_stream_that_talks_keeps_its_tasks_among_many(two_ready: int, autojump_clock: Any) -> None:
    async with stream(WAITS) as (house, call):
        streams = await opened(call, 10)
        with tasks_begun() as tasks:
            for number in range(10):
                await trio.sleep(0.1)
                for one in streams:
                    await one.ask("waits", number)
                    assert await one.told() == ("", [number])
            assert tasks.number == 0
        call.line.peer.close()
        await house.still()


@pytest.mark.parametrize("cut", [1, 20])
async def test_what_is_under_way_is_no_quiet_stream_and_half_a_message_is_kept(
    cut: int, two_ready: int, autojump_clock: Any
) -> None:
    model = Told()
    async with stream(WAITS, model.spec("m")) as (house, call):
        half, *busy = await opened(call, 3)
        message = request("waits", 7)
        await half.say(message[:cut])
        for number, one in enumerate(busy):
            await one.ask("m", number)
        await trio.sleep(2)
        others = await opened(call, 10)
        await trio.sleep(2)
        others += await opened(call, 10)
        assert sorted(model.begun) == [0, 1]
        for number, one in enumerate(busy):
            model.say(number, number)
            assert await one.told() == ("", [number])
        await half.say(message[cut:])
        assert await half.told() == ("", [7])
        assert not model.ended
        for number in range(2):
            model.over(number)
        for one in (half, *busy, *others, call):
            await one.end()
            assert (await one.rest())[0] == []
        assert house.endings == {"complete": 24}


async def test_many_streams_whose_requests_were_under_way_together_rest_as_those_end(
    two_ready: int, autojump_clock: Any
) -> None:
    model = Told()
    async with stream(model.spec("m", decoupled=False)) as (house, call):
        with tasks_begun() as tasks:
            streams = [await ByHand(call.line).open() for _ in range(30)]
            for number, one in enumerate(streams):
                await one.ask("m", number)
            await trio.sleep(2)
            for number, one in enumerate(streams):
                model.say(number, number)
                model.over(number)
                assert await one.told() == ("", [number])
            await house.still()
            assert tasks.live <= 2 * (two_ready + 1)
        call.line.peer.close()
        await house.still()


@pytest.mark.parametrize("how", ["reset", "close", "deadline", "drain"])
async def test_a_stream_that_ends_while_it_rests_has_its_one_ending(how: str, two_ready: int, autojump_clock: Any) -> None:
    config = Config(drain=DrainConfig(timeout=3.0))
    async with stream(WAITS, config=config, within=60 if how == "deadline" else None) as (house, call):
        await call.ask("waits", 1)
        assert await call.told() == ("", [1])
        with tasks_begun() as tasks:
            await trio.sleep(1)
            others = await opened(call, 3)
            await house.still()
            assert tasks.live == tasks.number - 2  # those of the first stream, which began before
        match how:
            case "reset":
                await call.leave()
                await house.still()
                assert house.endings == CANCELLED
            case "close":
                call.line.peer.close()
                await house.still()
                assert house.endings == {"cancelled-by-client": 1 + len(others)}
            case "deadline":
                came, ended = await call.rest()
                assert (came, ended.code) == ([], StatusCode.DEADLINE_EXCEEDED)
                assert house.endings == {"deadline": 1}
            case "drain":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(house.gateway.drain)
                    came, ended = await call.rest()
                    assert (came, ended.code) == ([], StatusCode.UNAVAILABLE)
        call.line.peer.close()
        await house.still()
        house.check_ledger()


@pytest.mark.parametrize("brief", ["double", "m", "m, cancelled"])
async def test_the_time_of_one_request_is_not_that_of_the_next(brief: str, autojump_clock: Any) -> None:
    """Both are done by one task."""
    model = Told()
    async with stream(model.spec("m", decoupled=False), DOUBLE) as (_, call):
        await call.ask(brief.split(",")[0], 1, id="brief", parameters={"timeout": 1_000_000})
        if brief == "m, cancelled":
            assert "parameter timeout" in (await call.response()).error
        else:
            model.say(1, 2)
            model.over(1)
            assert await call.told() == ("brief", [2])
        await call.ask("m", 2, id="long")
        await trio.sleep(5)
        model.say(2, 2)
        model.over(2)
        assert await call.told() == ("long", [2])
        await call.end()
        assert await call.rest() == ([], OK)


async def stubborn(session: Session[InferRequest, InferResponse]) -> None:
    """Its number, after five seconds in which nothing stops it."""
    x = (await session.receive())["x"]
    with trio.CancelScope(shield=True):
        await trio.sleep(5)
    await session.send(InferResponse(outputs=[Tensor(name="y", data=x)]))


async def test_an_answer_that_comes_after_its_time_waits_for_those_before_it(autojump_clock: Any) -> None:
    slow = Told()
    async with stream(slow.spec("slow", decoupled=False), spec_of(stubborn, "late", family=Family.TENSOR)) as (_, call):
        await call.ask("slow", 1)
        await call.ask("late", 2, parameters={"timeout": 1_000_000})
        await trio.sleep(10)
        slow.say(1, 1)
        slow.over(1)
        assert await call.told() == ("", [1])
        assert await call.told() == ("", [2])
        await call.end()
        assert await call.rest() == ([], OK)


async def test_requests_without_answers_let_others_run() -> None:
    asked = [0]

    async def count(session: Session[InferRequest, InferResponse]) -> None:
        asked[-1] += 1

    async def watch() -> None:
        while True:
            await trio.lowlevel.checkpoint()
            asked.append(0)

    counting = spec_of(count, "count", family=Family.TENSOR, decoupled=True)
    async with stream(counting) as (_, call), trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await call.say(b"".join(request("count", 1) for _ in range(640)))
        await call.end()
        assert await call.rest() == ([], SILENT)
        nursery.cancel_scope.cancel()
    assert sum(asked) == 640
    assert max(asked) <= 2 * 64  # a turn each, before the watch and after it


SET = ContextVar("set", default=0)


async def setting(session: Session[InferRequest, InferResponse]) -> None:
    """Sets a context variable, and answers with the value that it found there; waits at odd numbers."""
    x = (await session.receive())["x"]
    found = SET.get()
    SET.set(int(x[0]))
    if x[0] % 2:
        await trio.lowlevel.checkpoint()
    await session.send(InferResponse(outputs=[Tensor(name="y", data=np.array([found]))]))


async def test_what_a_model_sets_in_its_context_is_not_another_requests() -> None:
    async with stream(spec_of(setting, "setting", family=Family.TENSOR)) as (_, call):
        for number in (2, 1, 4, 3, 6):
            await call.ask("setting", number)
            assert await call.told() == ("", [0])
        await call.end()
        assert await call.rest() == ([], OK)


async def leaving_open(session: Session[InferRequest, InferResponse]) -> None:
    """Enters a scope that it never leaves, and which is cancelled later; waits at odd numbers."""
    x = (await session.receive())["x"]
    scope = trio.move_on_after(1)
    scope.__enter__()
    OPEN.append(scope)
    if x[0] % 2:
        await trio.lowlevel.checkpoint()
    await session.send(InferResponse(outputs=[Tensor(name="y", data=x)]))


OPEN: list[trio.CancelScope] = []


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("behind", [False, True])
async def test_a_scope_that_a_model_has_left_open_cancels_no_other_request(
    number: int, behind: bool, autojump_clock: Any
) -> None:
    OPEN.clear()
    model = Told()
    specs = (spec_of(leaving_open, "open", family=Family.TENSOR), model.spec("m", decoupled=False))
    async with stream(*specs) as (house, call):
        if behind:
            await call.ask("m", 0)
        await call.ask("open", number)
        if behind:
            await trio.sleep(5)
            model.say(0, 0)
            model.over(0)
            assert await call.told() == ("", [0])
        assert await call.told() == ("", [number])
        await call.ask("m", 1)
        await trio.sleep(5)
        model.say(1, 1)
        model.over(1)
        assert await call.told() == ("", [1])
        await call.end()
        assert await call.rest() == ([], OK)
        assert house.endings == {"complete": 1}


# -- errors that end the stream ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "code", "says"),
    [
        (encode_prefix(3) + b"\xff\xff\xff", StatusCode.INTERNAL, "cannot be read"),
        (encode_prefix(4) + b"\x0a\x02\xff\xfe", StatusCode.INTERNAL, "cannot be read"),  # no UTF-8 in model_name
        (b"\x02" + bytes(4), StatusCode.INTERNAL, "compressed flag"),
        (b"\x01" + bytes(4), StatusCode.INTERNAL, "grpc-encoding"),
        (announced(10 * KiB + 1), StatusCode.RESOURCE_EXHAUSTED, "the limit is 10240 bytes (limits.body)"),
    ],
)
async def test_what_is_no_message_ends_the_stream(said: bytes, code: StatusCode, says: str) -> None:
    model = Told()
    async with stream(model.spec("m"), config=limits(body=10 * KiB)) as (house, call):
        await call.ask("m", 1)
        model.say(1, 5)
        assert await call.told() == ("", [5])
        await call.say(said)
        came, ended = await call.rest()
        assert (came, ended.code) == ([], code)
        assert says in ended.text
        await house.still()
        assert model.ended == {"cancelled": 1}
        assert house.endings == {"refused": 1}


@pytest.mark.parametrize("cut", [1, 4, 5, 20])
async def test_an_end_inside_a_message_ends_the_stream(cut: int) -> None:
    model = Told()
    async with stream(model.spec("m")) as (house, call):
        await call.ask("m", 1)
        await house.still()
        await call.say(request("m", 2)[:cut])
        await call.end()
        came, ended = await call.rest()
        assert (came, ended.code, ended.alone) == ([], StatusCode.INTERNAL, True)
        assert "the body ends inside a message" in ended.text
        await house.still()
        assert (model.begun, model.ended) == ([1], {"cancelled": 1})


async def test_a_compressed_message_is_bounded_by_what_it_becomes() -> None:
    async with stream(DOUBLE, config=limits(body=10 * KiB), fields=((b"grpc-encoding", b"gzip"),)) as (_, call):
        message = gzip.compress(bytes(1024 * KiB))
        assert len(message) < 10 * KiB
        await call.say(encode_prefix(len(message), compressed=True) + message)
        came, ended = await call.rest()
        assert (came, ended.code) == ([], StatusCode.RESOURCE_EXHAUSTED)
        assert "limits.body" in ended.text


async def test_a_message_that_is_announced_and_never_comes_ends_the_stream(autojump_clock: Any) -> None:
    async with stream(DOUBLE) as (_, call):
        await call.ask("double", 1)
        assert await call.told() == ("", [2])
        await trio.sleep(200)  # between two messages a stream may be silent
        await call.say(announced(1000) + b"x")
        came, ended = await call.rest()
        assert (came, ended.code) == ([], StatusCode.DEADLINE_EXCEEDED)
        assert "limits.body_silence" in ended.text


async def test_the_deadline_of_the_call_cancels_all(autojump_clock: Any) -> None:
    first, second = Told(), Told()
    async with stream(first.spec("first"), second.spec("second", decoupled=False), within=3) as (house, call):
        began = trio.current_time()
        await call.ask("first", 1)
        await call.ask("second", 1)
        first.say(1, 1)
        assert await call.told() == ("", [1])
        came, ended = await call.rest()
        assert (came, ended.code, trio.current_time() - began) == ([], StatusCode.DEADLINE_EXCEEDED, 3)
        assert "grpc-timeout" in ended.text
        await house.still()
        assert first.ended + second.ended == {"cancelled": 2}
        assert house.endings == {"deadline": 1}


async def test_a_call_whose_time_is_over_calls_no_model() -> None:
    model = Told()
    async with stream(model.spec("m"), fields=((b"grpc-timeout", b"0S"),)) as (house, call):
        assert (await call.next()) == Status(
            StatusCode.DEADLINE_EXCEEDED, "no time is left (grpc-timeout of the call)", True
        )
        assert model.begun == []
        await house.still()


async def test_a_drain_ends_it_at_its_deadline_and_no_model_outlives_it(autojump_clock: Any) -> None:
    first, second = Told(), Told()
    specs = first.spec("first"), second.spec("second", decoupled=False)
    async with stream(*specs, config=Config(drain=DrainConfig(timeout=7.0))) as (house, call):
        await call.ask("first", 1)
        await call.ask("second", 1)
        first.say(1, 1)
        assert await call.told() == ("", [1])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.gateway.drain)
            began = trio.current_time()
            first.say(1, 2)
            assert await call.told() == ("", [2])  # it goes on until then
            came, ended = await call.rest()
            assert (came, ended.code, trio.current_time() - began) == ([], StatusCode.UNAVAILABLE, 7)
            assert "drain" in ended.text
            await call.line.over()
        assert first.ended + second.ended == {"cancelled": 2}
        assert house.endings == {"drained": 1}


# -- bounds ------------------------------------------------------------------------------------------------------------


async def test_behind_so_many_requests_under_way_the_window_closes(autojump_clock: Any) -> None:
    model = Probe(silent, "m")
    config = Config(v2=V2Config(stream_requests=3), http2=HTTP2Config(max_window=WINDOW))
    async with stream(model.spec(WIRE), DOUBLE, config=config) as (house, call):
        await call.line.read()  # the server's SETTINGS
        large = request("m", *range(2000))  # 16 KB
        for _ in range(20):
            await call.say(large)
        await call.line.read()
        assert model.live == 3
        (connection,) = house.gateway.server.connections
        machine = connection.wire._machine  # type: ignore[attr-defined]
        assert 0 < machine.unconsumed <= WINDOW
        assert call.line.machine.queued(call.stream) > 20 * len(large) - WINDOW - 4 * len(large)  # type: ignore[attr-defined]
        await call.line.ping()
        with at_once():  # and another stream of the connection has its own
            other = await ByHand(call.line).open()
            await other.ask("double", 4)
            assert await other.told() == ("", [8])
            await other.end()
            assert await other.rest() == ([], OK)
            await call.leave()
            await house.still()
        assert (model.live, model.calls) == (0, 3)


async def test_one_that_is_answered_makes_room_for_the_next() -> None:
    model = Told()
    config = Config(v2=V2Config(stream_requests=2))
    async with stream(model.spec("m"), config=config) as (house, call):
        for number in range(5):
            await call.ask("m", number)
        for number in range(5):
            await house.still()
            assert model.begun == list(range(min(5, number + 2)))
            model.over(number)
        await call.end()
        assert await call.rest() == ([], SILENT)


async def test_a_client_that_does_not_read_stops_each_of_its_models_within_the_bound(autojump_clock: Any) -> None:
    probes = [Probe(counting, f"m{n}") for n in range(8)]
    async with stream(*(probe.spec(WIRE) for probe in probes)) as (house, call):
        for probe in probes:
            await call.ask(probe.name)
        await call.line.read()  # takes all from the transport, and gives no credit
        said = sum(probe.sent for probe in probes)
        assert (SEND_BUFFER // (PAYLOAD + 50)) <= said <= (WINDOW + SEND_BUFFER) // (PAYLOAD - 50) + 2
        assert all(probe.live for probe in probes)
        await trio.sleep(20)  # below limits.write_stall
        assert sum(probe.sent for probe in probes) == said
        held = house.gateway.budget.used
        assert held < 64 * KiB
        heard = Counter[str]()
        for _ in range(said + 400):
            heard[(await call.response()).answer.model_name] += 1
        assert min(heard.values()) > 20  # a model that sends more waits for the others
        await call.leave()
        await house.still()
        assert not any(probe.live for probe in probes)


@pytest.mark.parametrize("how", ["reset", "close", "half-close"])
async def test_a_stream_of_many_models_that_is_left_in_the_middle_leaves_nothing(how: str, autojump_clock: Any) -> None:
    models = [Told() for _ in range(64)]
    specs = [model.spec(f"m{n}", decoupled=n % 3 > 0, capacity=1) for n, model in enumerate(models)]
    async with stream(*specs) as (house, call):
        for n in range(64):
            await call.ask(f"m{n}", 1, id=str(n))
        await house.still()
        for n, model in enumerate(models):
            if n % 3 == 1:
                model.say(1, n)
        for _ in range(10):
            await call.told()
        with at_once():
            match how:
                case "reset":
                    await call.leave()
                case "close":
                    call.line.peer.close()
                case "half-close":
                    call.line.transport.send_eof()
            await house.still()
            assert [model.ended for model in models] == [{"cancelled": 1}] * 64
            assert house.endings == CANCELLED
            house.check_ledger()


async def test_a_stream_that_is_left_touches_no_other_of_its_connection() -> None:
    gone, other = Told(), Told()
    async with stream(gone.spec("gone"), other.spec("other")) as (house, call):
        beside = await ByHand(call.line).open()
        await beside.ask("other", 1)
        other.say(1, 1)
        assert await beside.told() == ("", [1])
        for number in range(5):
            left = await ByHand(call.line).open()
            await left.ask("gone", number)
            await house.still()
            await left.leave()
        await house.still()
        assert gone.ended == {"cancelled": 5}
        other.say(1, 2)
        other.over(1)
        assert await beside.told() == ("", [2])
        for one, end in ((beside, OK), (call, SILENT)):
            await one.end()
            assert await one.rest() == ([], end)
