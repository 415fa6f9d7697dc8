"""The simulator: a sample of seeds, the same trace for the same seed, and bugs planted in the product, each found."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result

from gateway.cli.main import program
from gateway.core import connection
from gateway.core.connection import Connection
from gateway.core.exchange import Exchange
from gateway.core.inbound import Inbound
from gateway.core.outbound import Outbound
from gateway.errors import Ending
from gateway.instances.child import Child
from gateway.instances.instance import Instance
from gateway.instances.messages import Cancel
from gateway.instances.pipe import SessionLine
from gateway.net.readiness import Poller
from gateway.testing.log_capture import errors_logged
from gateway.testing.processes import MemoryProcess, _End
from gateway.testing.stories.hostile import ENDS
from gateway.testing.stories.plan import CALM, FAULTY, KINDS, THERE, Fate, plan
from gateway.testing.stories.run import run_seed
from gateway.testing.stories.talk import Form, Hostility
from gateway.wires.http2 import HTTP2Wire
from gateway.workers.slots import Slots
from gateway.workers.worker import Worker
from protocols.events import Buffer
from protocols.floods import FloodPolicy

ROOT = Path(__file__).parents[3]
SAMPLE = 20
CUT_OFF = (642, 6621)
"""A client loses its stream of gRPC, or leaves, before it hears that its request is nonsense; the call has ended well."""


@pytest.mark.parametrize("seed", [*range(SAMPLE), *CUT_OFF])
def test_what_is_promised_holds_under_this_seed(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.problems == (), "\n".join(outcome.lines)
    assert outcome.calls


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_what_is_promised_holds_under_a_thousand_seeds(first: int) -> None:
    outcomes = [run_seed(seed) for seed in range(first, first + 100)]
    assert {outcome.seed: outcome.problems for outcome in outcomes if outcome.problems} == {}


def test_the_sample_has_every_form_and_fault_and_drains() -> None:
    plans = [plan(seed) for seed in range(SAMPLE)]
    talks = [talk for each in plans for line in each.lines for talk in line.talks]
    assert {talk.form for talk in talks} == set(Form)
    assert {talk.deceit for talk in talks} > {None}
    assert {talk.leave for talk in talks if talk.leave_after is not None}
    assert {name for talk in talks if talk.faults for name in ("raise_at", "hang_at", "crash_at", "lie_at", "block_at")
            if getattr(talk.faults, name) is not None} == {"raise_at", "hang_at", "crash_at", "lie_at", "block_at"}  # fmt: skip
    assert any(each.drain_at < 10 for each in plans)
    assert any(each.swizzles for each in plans)
    assert any(each.crashes for each in plans)
    assert any(line.cut for each in plans for line in each.lines)
    assert {mishap.fate for each in plans for mishap in each.mishaps} == set(Fate)
    assert {mishap.at is None for each in plans for mishap in each.mishaps} == {True, False}
    assert {f"{kind}-{THERE}-{letter}" for kind in KINDS for letter in (CALM, FAULTY)} <= {talk.model for talk in talks}
    hostile = {(client.hostility, client.transport) for each in plans for client in each.hostile}
    assert hostile == set(ENDS)
    assert {hostility for hostility, _ in hostile} == set(Hostility)
    assert {each.hub for each in plans} == ({True, False} if Poller.available else {False})


def test_the_same_seed_has_the_same_trace_and_another_has_another() -> None:
    first, again, other = run_seed(3, keep=None), run_seed(3, keep=None), run_seed(4, keep=None)
    assert first.lines == again.lines
    assert first == again
    assert other.trace != first.trace


@pytest.mark.parametrize("seed", [12, 39, 49, 57])
def test_when_a_model_starts_again_is_the_seeds_to_say(seed: int) -> None:
    assert run_seed(seed).trace == run_seed(seed).trace  # each with a restart, whose wait has jitter


def test_the_time_of_day_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def dates() -> list[float]:
        told: list[float] = []
        monkeypatch.setattr(
            "gateway.serving.timer.formatdate", lambda now, **options: told.append(now) or formatdate(now, **options)
        )
        run_seed(49)
        return told

    assert dates() == dates() != []


@pytest.mark.programs
def test_the_order_of_hashes_and_addresses_decides_nothing() -> None:
    def traces(hashes: str, ballast: int) -> list[str]:
        program = f"""
import sys
ballast = [object() for _ in range({ballast})]
from gateway.testing.stories.run import run_seed
print(*[run_seed(seed).trace for seed in range(4)])
"""
        environment = os.environ | {"PYTHONHASHSEED": hashes, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert traces("1", 0) == traces("2", 100_000)


# -- planted bugs ------------------------------------------------------------------------------------------------------


def _every(n: int) -> Callable[[], bool]:
    """Returns a function that returns True on each n-th call."""
    numbers = itertools.count(1)
    return lambda: next(numbers) % n == 0


def _without_every(n: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, of which each n-th call is lost."""
    lost = _every(n)
    return lambda self, *args, **kwargs: None if lost() else method(self, *args, **kwargs)


def _lost_terminal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "_close", _without_every(7, Exchange._close))


def _unsettled_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchange, "answer_written", _without_every(7, Exchange.answer_written))


def _two_terminals(patch: pytest.MonkeyPatch) -> None:
    close = Exchange._close

    def twice(self: Exchange) -> None:
        close(self)
        if self.outbound.bytes_out > 2000:
            self.owner.server.exchange_closed(self)  # type: ignore[attr-defined]

    patch.setattr(Exchange, "_close", twice)


def _wrong_terminal(patch: pytest.MonkeyPatch) -> None:
    finish = Outbound.finish
    patch.setattr(Outbound, "finish", lambda self, ending=None, **more: finish(self, Ending.COMPLETE, **more))


def _leaked_credit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HTTP2Wire, "credit", _without_every(11, HTTP2Wire.credit))


def _double_release(patch: pytest.MonkeyPatch) -> None:
    settle = Exchange._settle

    def twice(self: Exchange, ending: Ending) -> None:
        charged = self.outbound.charged
        settle(self, ending)
        if charged:
            self.owner.budget.release(charged)

    patch.setattr(Exchange, "_settle", twice)


def _torn_frame(patch: pytest.MonkeyPatch) -> None:
    after = connection._after

    def torn(buffers: list[Buffer], n: int) -> list[Buffer]:
        rest = after(buffers, n)
        return [memoryview(rest[0])[1:], *rest[1:]] if n % 5 == 0 and rest and len(rest[0]) > 1 else rest

    patch.setattr(connection, "_after", torn)


def _lost_message(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Outbound, "push", _without_every(50, Outbound.push))


def _leaked_slot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slots, "released", _without_every(9, Slots.released))


def _client_left_unseen(patch: pytest.MonkeyPatch) -> None:
    def cut(self: Exchange, ending: Ending) -> None:
        self.gone = True
        self._settle(ending)

    patch.setattr(Exchange, "peer_gone", cut)


def _no_backpressure(patch: pytest.MonkeyPatch) -> None:
    async def wait_room(self: Outbound, n: int = 1) -> None:
        return

    patch.setattr(Outbound, "wait_room", wait_room)


def _lost_wake_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Connection, "writable", _without_every(13, Connection.writable))


def _orphans(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "_lose_sessions", lambda self: None)


def _drain_without_words(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Connection, "drain_now", lambda self: None)


def _patience_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inbound, "too_slow", lambda self, now: None)


def _floods_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FloodPolicy, "judge", lambda self, counters, now: None)
    patch.setattr(FloodPolicy, "tick", lambda self, counters, now: None)


def _sessions_of_a_dead_process(patch: pytest.MonkeyPatch) -> None:
    def lose(self: Instance) -> None:
        self.ready, self.loaded, self._lost = False, None, True

    patch.setattr(Instance, "_lose_all", lose)


def _cancel_not_told(patch: pytest.MonkeyPatch) -> None:
    real = Child._take

    def take(child: Child, link: Any, message: Any) -> None:
        if type(message) is not Cancel:
            real(child, link, message)

    patch.setattr(Child, "_take", take)


def _credit_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SessionLine, "_has_room", lambda self, size: True)


def _stopped_and_left_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Instance, "kill", lambda self, why: None)


def _process_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryProcess, "close", lambda self: None)
    patch.setattr(MemoryProcess, "kill", lambda self: None)
    patch.setattr(_End, "send_eof", trio.abc.AsyncResource.__aenter__)


PLANTED: Sequence[tuple[Callable[[pytest.MonkeyPatch], None], range]] = (
    (_lost_terminal, range(5)),
    (_unsettled_end, range(5)),
    (_two_terminals, range(5)),
    (_wrong_terminal, range(10)),
    (_leaked_credit, range(20)),
    (_double_release, range(10)),
    (_torn_frame, range(5)),
    (_lost_message, range(5)),
    (_leaked_slot, range(10)),
    (_client_left_unseen, range(10)),
    (_no_backpressure, range(20)),
    (_lost_wake_up, range(10)),
    (_orphans, range(20)),
    (_drain_without_words, range(15)),
    (_patience_without_end, range(5)),
    (_floods_without_end, range(7, 11)),
    (_sessions_of_a_dead_process, range(20)),
    (_cancel_not_told, range(20)),
    (_credit_for_all, range(20)),
    (_stopped_and_left_alone, range(40)),
    (_process_kept, range(20)),
)
"""Each with seeds of which one must find it."""


@pytest.mark.sweep
@pytest.mark.parametrize(("plant", "seeds"), PLANTED, ids=[plant.__name__.strip("_") for plant, _ in PLANTED])
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = next((seed for seed in seeds if run_seed(seed).problems), None)
    assert found is not None, f"not found by {len(seeds)} seeds"


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command outside the checkout, whose packages would hide the installed ones."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(program, ["simulate", *arguments])


def test_the_command_tells_what_it_played_and_writes_the_trace(command: Callable[..., Result]) -> None:
    result = command("--seeds", "1..3", "--twice", "--trace", "trace.txt")
    assert result.exit_code == 0, result.output
    assert "3 seeds, none failed" in result.output
    traces = [line for line in Path("trace.txt").read_text().splitlines() if line.startswith("seed ")]
    assert traces == [f"seed {seed} trace {run_seed(seed).trace}" for seed in (1, 2, 3)]


def test_the_command_tells_how_to_see_a_failure_again(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    _lost_message(monkeypatch)
    result = command("--seeds", "0..4")
    assert result.exit_code == 1
    found = [line for line in result.output.splitlines() if line.startswith("seed ")]
    assert found
    seed = found[0].split()[1]
    assert found[0] == f"seed {seed} failed; again: python -m gateway simulate --seeds {seed}..{seed}"
    assert "  the end of its trace:" in result.output
    assert "PROBLEM 1: " in result.output


def test_the_command_speaks_json(command: Callable[..., Result]) -> None:
    result = command("--seeds", "7..8", "--json")
    first, second, whole = map(json.loads, result.stdout.splitlines())  # progress is told beside it
    assert (first["seed"], second["seed"]) == (7, 8)
    assert first["problems"] == second["problems"] == whole["failed"] == []
    assert whole["exchanges"] == first["exchanges"] + second["exchanges"] == sum(whole["endings"].values())


@pytest.mark.parametrize("seeds", ["3", "5..1", "a..b", "1..", "-1..2"])
def test_the_command_takes_a_range(command: Callable[..., Result], seeds: str) -> None:
    result = command(f"--seeds={seeds}")
    assert (result.exit_code, "--seeds takes A..B, such as 0..99" in result.output) == (2, True)


def test_after_a_run_the_gateway_logs_as_before(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("gateway.worker")
    with errors_logged() as logged:
        log.warning("within")
        log.error("within")
    log.warning("after")
    assert [record.levelname for record in logged] == ["ERROR"]
    assert [record.getMessage() for record in caplog.records] == ["after"]
