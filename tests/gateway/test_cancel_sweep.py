"""Any cancellation at any step: messages stay a prefix, each exchange has one true ending, and nothing is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest
import trio

from gateway.catalog.repository import Repository
from gateway.containers.connection import Container, Within
from gateway.containers.relay import Relay
from gateway.core.connection import Connection
from gateway.core.exchange import Exchange
from gateway.core.inbound import Inbound
from gateway.core.outbound import Outbound
from gateway.core.runner import Runner
from gateway.dialects.aws.bidi import _EventStreamChannel
from gateway.dialects.aws.invoke import _Streamed
from gateway.dialects.grpc.calls import end_stream, start_stream
from gateway.dialects.grpc.stream import _Stream
from gateway.dialects.text.lmi import _TextChannel
from gateway.dialects.text.lmi_dynamic_batch import _Batch, _PromptChannel
from gateway.dialects.text.lmi_formatters import FormattedAnswer
from gateway.dialects.text.openai import _Answer
from gateway.dialects.v2.channels import StreamedResponses
from gateway.errors import Ending, GatewayError
from gateway.instances.child import Child
from gateway.instances.instance import Instance
from gateway.instances.messages import Cancel
from gateway.net.transport import Transport
from gateway.wires.http2 import HTTP2Wire
from gateway.workers.slots import Slots
from gateway.workers.worker import Worker
from models.batching import _Run
from models.continuations import Stops
from models.convert import _OnePrompt
from models.messages import Part
from models.rolling import RollingBatch
from protocols.http2.connection import HTTP2Connection
from protocols.http2.stream import Stream
from tests.gateway.sweep import SCENARIOS, TARGETS, applies, followed_by, run_once, sweep
from tests.gateway.sweep_batched import BATCHED
from tests.gateway.sweep_grpc import SLOW
from tests.gateway.sweep_processes import PROCESSES
from tests.gateway.sweep_sagemaker import SAGEMAKER
from tests.gateway.sweep_text import TEXT
from tests.gateway.ways import DRIVERS

STRIDES = {
    "v2": 11, "v2-h2": 23, "pipelined": 1, "inline": 2, "lmi": 7, "chunked": 11, "threads": 11, "queue": 9, "bidi": 43,
    "tls": 53, "early": 19, "nursery": 43, "rude": 53, "bidi-large": 29, "websocket": 19, "websocket-large": 13,
    "stream": 23, "stream-h2": 47, "invoke": 23, "invoke-h2": 41, "container": 23, "container-h2": 47, "bidi-json": 67,
    "bidi-literal": 61, "bidi-signed": 61, "bidi-padded": 61, "anywhere": 31, "bridge": 97, "bridge-late": 97, "ended": 29, "bridge-invoke": 31, "load": 17,
    "unload": 31, "first-use": 13, "grpc": 23, "grpc-stream": 53, "grpc-text": 23, "v2-stream": 17, "v2-stream-h2": 41, "v2-pieces": 29, "v2-pieces-h2": 67, "v2-session": 37,
    "chat": 5, "chat-h2": 7, "chat-stream": 7, "chat-stream-h2": 11, "completions": 17, "completions-stream": 17,
    "completions-stream-h2": 13, "chat-counted": 7, "completions-counted-h2": 17, "messages": 5, "messages-h2": 7, "messages-streamed-h2": 7, "lmi-json": 5, "lmi-json-h2": 7,
    "best-of": 7, "best-of-h2": 7, "lmi-sse": 11, "lmi-sse-h2": 7, "lmi-parts": 7, "tgi": 5, "tgi-stream": 7, "tgi-stream-h2": 7,
    "dynamic": 17, "dynamic-lines": 37, "dynamic-rude": 37, "dynamic-lines-h2": 61, "dynamic-streamed-h2": 41,
    "formatted": 7, "formatted-h2": 7, "formatted-invoked": 13, "v2-generate": 5, "v2-generate-stream": 11,
    "v2-generate-stream-h2": 7, "text-websocket": 11, "text-bidi": 17, "text-bidi-threads": 29, "slow": 31, "slow-h2": 23,
    "slow-lmi": 29, "slow-lines": 29, "slow-formatted": 17, "slow-v2": 17,
    "more-chat": 7, "more-completions-h2": 7, "more-lmi": 7, "more-tgi-h2": 7, "more-dynamic": 13, "more-formatted": 7,
    "more-v2-generate": 7, "more-v2-generate-stream-h2": 7, "more-bidi": 17, "stop-chat": 7,
    "stop-completions-h2": 7, "stop-lmi": 7, "stop-tgi": 7, "stop-dynamic-h2": 13, "stop-v2-generate": 7,
    "stop-v2-generate-stream-h2": 7, "stop-bidi": 17,
    "batched": 7, "batched-threads": 7, "batched-h2": 23, "rolling": 7, "rolling-threads": 7, "rolling-h2": 17,
    "rolling-slow": 31,
    "process-v2": 5, "process-lmi": 11, "process-threads": 11, "process-queue": 11, "process-bidi": 61,
    "process-websocket": 59, "process-rude": 61, "process-rolling": 11,
}  # fmt: skip
"""Strides: a test here takes each n-th step of its scenario. The targets of a scenario start at different steps, and so
cover them together. By default, `pytest` takes one in six of those, with the first readiness. `python -m
tests.gateway.sweep` takes every step of everything."""
AT_ONCE = {("inline", "leader")}
"""Pairs in which the victim's exchange ends in the step that began it, and so is never found live."""
ALONE = SAGEMAKER.keys() | TEXT.keys() | BATCHED.keys() | PROCESSES.keys()
"""Scenarios that are played on one driver."""
FEW_STEPS = ("raise", "memory")
"""Targets that count by themselves."""


SPARSER = 5
"""Times the strides: for connections with tasks that wait, which a leader's embedded targets have as well."""


def stride_of(scenario: str, target: str, driver: str) -> int:
    sparser = SPARSER if driver != DRIVERS[0] else 1
    if target in FEW_STEPS:
        return 1 if target == "memory" else 2 * sparser
    return STRIDES[scenario] * (2 if TARGETS[target].embedded else 1) * sparser


def each_target() -> list[tuple[str, str, str]]:
    """Every target of every scenario, on the first driver; every second one on the others too. SageMaker's wires, which add
    nothing below the exchange, have each target on one of them, and the forms of text, which are many, every fourth one; so have
    models in processes, but for what befalls these."""
    known = [(s, t) for s in SCENARIOS for t in TARGETS if applies(SCENARIOS[s], TARGETS[t])]
    fewer = TEXT.keys() | PROCESSES.keys()
    known = [pair for at, pair in enumerate(known) if pair[0] not in fewer or at % 4 == 0 or TARGETS[pair[1]].process]
    return [
        (scenario, target, driver)
        for at, (scenario, target) in enumerate(known)
        for turn, driver in enumerate(DRIVERS)
        if (turn == at % len(DRIVERS) if scenario in ALONE else turn <= at % 2)
    ]


def every_one(first: int, stride: int) -> Iterable[int]:
    return count(first, stride)


def one_in_six(first: int, stride: int) -> Iterable[int]:
    return count(first, 6 * stride)


def five_in_six(first: int, stride: int) -> Iterable[int]:
    return (step for at, step in enumerate(count(first, stride)) if at % 6)


def shares() -> Iterator[Any]:
    """Each default share of the sweep, and then the rest of it."""
    for scenario, target, driver in each_target():
        if driver == DRIVERS[0]:
            yield scenario, target, driver, one_in_six
            yield pytest.param(scenario, target, driver, five_in_six, marks=pytest.mark.sweep)
        else:
            yield pytest.param(scenario, target, driver, every_one, marks=pytest.mark.sweep)


@pytest.mark.parametrize(("scenario", "target", "driver", "share"), list(shares()))
def test_a_cancellation_leaves_every_promise_true(
    scenario: str, target: str, driver: str, share: Callable[[int, int], Iterable[int]]
) -> None:
    stride = stride_of(scenario, target, driver)
    start = 1 + list(TARGETS).index(target) % min(stride, 5)
    swept = sweep(SCENARIOS[scenario], TARGETS[target], seed=0, driver=driver, steps=share(start, stride))
    assert not swept.failures
    assert swept.runs > 1 or share is five_in_six or (scenario, driver) in AT_ONCE, "there was nothing to cancel"


READINESS = [DRIVERS[0], *(pytest.param(driver, marks=pytest.mark.sweep) for driver in DRIVERS[1:])]
"""One by default, and the others."""


@pytest.mark.parametrize("driver", READINESS)
@pytest.mark.parametrize("scenario", ["v2", "lmi", "bidi", "websocket"])
@pytest.mark.parametrize(
    ("first", "second"), [("interrupt", "close"), ("drain", "abort"), ("worker", "serve"), ("half-close", "connection")]
)
def test_a_second_cancellation_close_behind_the_first_changes_nothing(
    scenario: str, first: str, second: str, driver: str
) -> None:
    target = followed_by(TARGETS[first], 2, TARGETS[second])
    swept = sweep(SCENARIOS[scenario], target, seed=0, driver=driver, steps=count(1, stride_of(scenario, first, driver)))
    assert not swept.failures
    assert swept.runs > 1


@pytest.mark.parametrize("driver", READINESS)
@pytest.mark.parametrize("target", [name for name, target in TARGETS.items() if applies(SLOW, target)])
def test_a_stream_of_grpc_that_rests_between_its_messages_keeps_every_promise(
    target: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.dialects.grpc.stream._MOST_READY", 0)
    monkeypatch.setattr("gateway.dialects.grpc.stream._QUIET", -1.0)
    begun = count()
    real = _Stream.serve
    monkeypatch.setattr(_Stream, "serve", lambda stream: (next(begun), real(stream))[1])
    stride = 61 if driver == DRIVERS[0] else 61 * SPARSER
    swept = sweep(SLOW, TARGETS[target], seed=0, driver=driver, steps=count(1 + list(TARGETS).index(target), stride))
    assert not swept.failures
    assert next(begun) > 5 * swept.runs, "it has kept its tasks"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "scenario",
    ["process-lmi", "process-queue", "process-rolling", pytest.param("process-websocket", marks=pytest.mark.soak)],
)
@pytest.mark.parametrize("target", [name for name, target in TARGETS.items() if target.process])
def test_a_process_may_end_or_stop_at_every_step(scenario: str, target: str) -> None:
    swept = sweep(SCENARIOS[scenario], TARGETS[target], seed=0, driver=DRIVERS[0])
    assert not swept.failures
    assert swept.runs > 100


@pytest.mark.sweep
@pytest.mark.parametrize("driver", READINESS)
@pytest.mark.parametrize("scenario", ["lmi", "queue", "pipelined"])
@pytest.mark.parametrize("seed", [1, 2])
def test_another_order_of_the_tasks_changes_nothing(scenario: str, seed: int, driver: str) -> None:
    assert not sweep(SCENARIOS[scenario], TARGETS["close"], seed, driver=driver).failures


@pytest.mark.parametrize(
    ("scenario", "driver"),
    [
        pytest.param(s, d, marks=[pytest.mark.sweep] * ((n % 4 > 0) or d != DRIVERS[0]))
        for n, s in enumerate(SCENARIOS)
        if not SCENARIOS[s].tls
        for d in (DRIVERS[:1] if s in ALONE else DRIVERS)
    ],
)
def test_the_same_seed_gives_the_same_trace(scenario: str, driver: str) -> None:
    first, second, other = (
        run_once(SCENARIOS[scenario], TARGETS["close"], seed, 1, driver=driver, trace=True) for seed in (7, 7, 8)
    )
    assert first.trace == second.trace != other.trace
    assert first.fired


# -- the sweep can fail --------------------------------------------------------------------------------------------


def unread_bytes_are_not_credited(monkeypatch: pytest.MonkeyPatch) -> None:
    real = HTTP2Wire.credit

    def credit(wire: HTTP2Wire, stream: int, n: int) -> None:
        exchange = wire._connection.exchanges.get(stream)
        if exchange is None or not exchange._returned:
            real(wire, stream, n)

    monkeypatch.setattr(HTTP2Wire, "credit", credit)
    monkeypatch.setattr(HTTP2Wire, "release", lambda wire, stream: None)


def no_late_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = HTTP2Connection._accept_payload

    def accept(machine: HTTP2Connection, found: Stream, data: bytes, n: int, *, ended: bool) -> None:
        late = found.lingering
        real(machine, found, data, n, ended=ended)
        machine._windows.connection.owed -= n * late

    monkeypatch.setattr(HTTP2Connection, "_accept_payload", accept)


def forgotten_body(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Exchange._close

    def close(exchange: Exchange) -> None:
        if exchange.ending is Ending.CANCELLED:
            exchange.reserved = 0
        real(exchange)

    monkeypatch.setattr(Exchange, "_close", close)


def swallowed_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Inbound.receive

    async def receive(inbound: Inbound) -> Any:
        while True:
            try:
                return await real(inbound)
            except trio.Cancelled:
                continue

    monkeypatch.setattr(Inbound, "receive", receive)


def checkpoint_after_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _EventStreamChannel.send

    async def send(channel: _EventStreamChannel, message: Part) -> None:
        await real(channel, message)
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(_EventStreamChannel, "send", send)


def slot_kept_when_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Slots.released

    def released(slots: Slots) -> None:
        if trio.current_effective_deadline() > -float("inf"):
            real(slots)

    monkeypatch.setattr(Slots, "released", released)


def two_endings(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Exchange.answer_written

    def ended(exchange: Exchange) -> None:
        real(exchange)
        if exchange._returned:
            exchange._close()

    monkeypatch.setattr(Exchange, "answer_written", ended)


def dishonest_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Exchange.peer_gone
    monkeypatch.setattr(Exchange, "peer_gone", lambda exchange, ending: real(exchange, Ending.COMPLETE))


def one_reset_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Exchange.peer_gone

    def cut(exchange: Exchange, ending: Ending) -> None:
        for other in exchange.owner.exchanges.values():  # type: ignore[attr-defined]
            real(other, ending)

    monkeypatch.setattr(Exchange, "peer_gone", cut)


def deaf_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(connection: Connection) -> None:
        connection._dirty = False
        if connection._lost is None:
            if connection.behind:
                connection._catch_up()
            if not connection.blocked:
                connection._write()

    monkeypatch.setattr(Connection, "turn", turn)


def scope_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Exchange, "leave_scope", lambda exchange: None)


def leadership_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "_promote_follower", lambda tasks, place: None)


def turns_of_the_leader_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Runner.write

    def write(runner: Runner) -> bool:
        if runner.leading:
            runner._due.clear()
        return real(runner)

    monkeypatch.setattr(Runner, "write", write)


def end_behind_a_short_read_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Connection.readable
    monkeypatch.setattr(Connection, "readable", lambda connection, hung_up=False: real(connection))


def user_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def in_use(repository: Repository, name: str, url: str, *, shown: str = "") -> AsyncIterator[Worker]:
        entry = await repository._wanted(name, url, shown)
        assert entry.worker is not None
        yield entry.worker
        entry.users.count -= 1

    monkeypatch.setattr(Repository, "in_use", in_use)


def container_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def connect(container: Container, within: Within) -> AsyncIterator[Transport]:
        transport = await container._dial()
        yield transport
        transport.close()

    monkeypatch.setattr(Container, "connect", connect)
    monkeypatch.setattr(Relay, "_leave", lambda relay: None)


def room_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_room(wrapped: _Streamed, n: int = 1) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(_Streamed, "wait_room", wait_room)
    monkeypatch.setattr(_Streamed, "fail", lambda wrapped, error: wrapped._exchange.outbound.finish(error.ending))


def done_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _Answer._error_event
    monkeypatch.setattr(_Answer, "_error_event", lambda answer, error: real(answer, error) + b"data: [DONE]\n\n")


def slot_kept_by_a_second_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Worker.call

    async def call(worker: Worker, session: Any, *arguments: Any) -> None:
        try:
            await real(worker, session, *arguments)
        except BaseException:
            worker.slots.free -= session.channel._place > 0
            raise

    monkeypatch.setattr(Worker, "call", call)


def last_event_without_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(channel: StreamedResponses, error: GatewayError) -> None:
        channel._exchange.outbound.finish(error.ending)

    monkeypatch.setattr(StreamedResponses, "fail", fail)


def prompt_that_cannot_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _Batch._run_one

    async def run_one(batch: _Batch, channel: _PromptChannel, call: Any, *arguments: Any) -> None:
        with trio.CancelScope(shield=channel._place == 2):
            await real(batch, channel, call, *arguments)

    monkeypatch.setattr(_Batch, "_run_one", run_one)


def failure_as_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(answer: FormattedAnswer, error: GatewayError) -> None:
        exchange = answer._exchange
        if exchange.outbound.status:
            exchange.outbound.push(answer._error_line(error))
            exchange.outbound.finish()
        else:
            exchange.outbound.respond(error.status, [], b"", ending=error.ending)

    monkeypatch.setattr(FormattedAnswer, "_fail", fail)


def tokens_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_room(outbound: Outbound, n: int = 1) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(Outbound, "wait_room", wait_room)


def no_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_TextChannel, "finish", lambda channel: channel._answer.finish())


def answer_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(prompt: _OnePrompt) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(_OnePrompt, "end", end)


def stop_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stops, "feed", lambda stops, text, ignore=False: text)


def last_to_leave_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _Run.leave

    def leave(run: _Run, waiting: Any) -> None:
        real(run, waiting)
        run.scope.cancel()

    monkeypatch.setattr(_Run, "leave", leave)


def sequence_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RollingBatch, "_close", lambda batch: batch._closing.clear())


def steps_without_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RollingBatch.__init__

    def init(batch: RollingBatch[Any], model: Any, **options: Any) -> None:
        real(batch, model, **{**options, "ahead": 1000})

    monkeypatch.setattr(RollingBatch, "__init__", init)


def request_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Stream, "_over", lambda stream, me: setattr(stream, "_places", stream._places + 1))


def failed_stream_as_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.dialects.grpc.calls.fail", lambda exchange, error: end_stream(exchange))


def place_kept_by_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def over(stream: _Stream, me: Any) -> None:
        request, me.request = me.request, None
        request.after.set()
        request.inner.close()

    monkeypatch.setattr(_Stream, "_over", over)
    real = _Stream.__init__

    def init(stream: _Stream, *arguments: Any) -> None:
        real(stream, *arguments[:-1], 2)

    monkeypatch.setattr(_Stream, "__init__", init)


def cut_message_as_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async def say(stream: _Stream, buffers: Any) -> None:
        for buffer in buffers:
            for piece in (buffer[:7], buffer[7:]):
                await stream._exchange.outbound.wait_room(len(piece))
                if not stream._exchange.outbound.status:
                    start_stream(stream._exchange)
                stream._exchange.outbound.push(piece)

    monkeypatch.setattr(_Stream, "_say", say)


def sessions_of_a_dead_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(instance: Instance) -> None:
        instance.ready, instance.loaded, instance._lost = False, None, True

    monkeypatch.setattr(Instance, "_lose_all", lose)


def stopped_and_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch(instance: Instance) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(Instance, "_watch_loop", watch)


def session_kept_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Child._take

    def take(child: Child, link: Any, message: Any) -> None:
        if type(message) is not Cancel:
            real(child, link, message)

    monkeypatch.setattr(Child, "_take", take)


BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = [
    (unread_bytes_are_not_credited, "bidi", "reset", "4:"),
    (no_late_credit, "bidi-large", "interrupt", "4:"),
    (forgotten_body, "v2", "close", "3:"),
    (swallowed_cancelled, "bidi", "interrupt", "11:"),
    (checkpoint_after_commit, "bidi", "interrupt", "1:"),
    (slot_kept_when_cancelled, "queue", "abort", "11:"),
    (two_endings, "v2", "close", "8:"),
    (dishonest_ending, "lmi", "close", "2:"),
    (one_reset_for_all, "bidi", "reset", "7:"),
    (deaf_reader, "websocket", "close", "2:"),
    (user_never_leaves, "first-use", "close", "8:"),
    (container_kept, "bridge", "interrupt", "3:"),
    (room_for_nothing, "stream", "interrupt", ""),
    (done_after_a_failure, "chat-stream", "interrupt", "8:"),
    (slot_kept_by_a_second_prompt, "completions", "interrupt", "3:"),
    (last_event_without_its_cause, "v2-generate-stream", "interrupt", "2:"),
    (prompt_that_cannot_be_stopped, "dynamic-lines", "interrupt", "11:"),
    (failure_as_success, "formatted", "interrupt", "2:"),
    (tokens_without_room, "slow-lmi", "interrupt", "6:"),
    (no_last_line, "lmi-sse", "close", "8:"),
    (answer_not_closed, "text-websocket", "interrupt", "1:"),
    (stop_forgotten, "stop-chat", "interrupt", ""),
    (last_to_leave_is_the_first, "batched-h2", "interrupt", "11:"),
    (sequence_kept, "rolling", "interrupt", "3:"),
    (steps_without_credit, "rolling-slow", "interrupt", "6:"),
    (request_kept, "grpc-stream", "interrupt", ""),
    (failed_stream_as_success, "grpc-stream", "interrupt", ""),
    (place_kept_by_a_request, "grpc-stream", "interrupt", "11:"),
    (cut_message_as_a_status, "grpc-stream", "interrupt", "8:"),
    (sessions_of_a_dead_process, "process-lmi", "kill", ""),
    (stopped_and_not_noticed, "process-lmi", "stop", "11:"),
    (session_kept_by_its_process, "process-bidi", "interrupt", ""),
]
OF_THE_LEADER: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = [
    (scope_of_another, "v2-h2", "reset", "8:"),
    (leadership_kept, "bidi", "close", "11:"),
    (turns_of_the_leader_forgotten, "bidi", "close", "11:"),
    (end_behind_a_short_read_missed, "v2", "half-close", "11:"),
]
"""In what only a driver of that name has."""
if "leader" in DRIVERS:
    BUGS += OF_THE_LEADER


@pytest.fixture(
    params=[
        pytest.param(bug, id=bug[0].__name__, marks=[pytest.mark.sweep] * (at % 4 > 0 or bug[1] in PROCESSES))
        for at, bug in enumerate(BUGS)
    ]
)
def planted(request: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    plant, *where = request.param
    plant(monkeypatch)
    return tuple(where)


def test_a_planted_bug_is_found_and_its_seed_and_step_find_it_again(planted: tuple[str, ...]) -> None:
    scenario, target, kind = planted
    swept = sweep(SCENARIOS[scenario], TARGETS[target], seed=0, driver=DRIVERS[0], most=1)
    step, problems = swept.failures[0]
    assert any(p.startswith(kind) for p in problems), problems
    assert run_once(SCENARIOS[scenario], TARGETS[target], 0, step, driver=DRIVERS[0]).problems == problems
