"""Models in processes of their own, as their clients, their operators and the machine see them: nothing here is pretended."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trio.testing import wait_all_tasks_blocked

from gateway.catalog.factories import load_spec
from gateway.client import connect, http1, questions
from gateway.client.answers import Answer
from gateway.client.conversations import Client, Conversation
from gateway.config import BatchingConfig, Config, ModelConfig, ProcessConfig, RepositoryConfig, RestartConfig
from gateway.config.problem import ConfigError
from gateway.testing import MemoryGateway, memory_gateway
from gateway.version import version
from gateway.workers.states import State
from protocols.events import End
from tests.gateway.promises import raw

pytestmark = pytest.mark.programs

MODELS = "tests.gateway.instances.process_models"
ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 60
"""Real seconds in which whatever is waited for has happened on the slowest machine."""
QUICK = RestartConfig(backoff=0.01, backoff_max=0.05, intensity=1000)


def there(attribute: str, *, instances: int = 1, process: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    """A model of `process_models`, in processes."""
    settings.setdefault("restart", QUICK)
    section = ProcessConfig(enabled=True, instances=instances, **(process or {}))
    return ModelConfig(factory=f"{MODELS}:{attribute}", process=section, **settings)


def here(attribute: str, **settings: Any) -> ModelConfig:
    """A model of `process_models`, in the gateway's own process."""
    return ModelConfig(factory=f"{MODELS}:{attribute}", restart=settings.pop("restart", QUICK), **settings)


async def until(true: Callable[[], Any]) -> Any:
    """Waits until `true` returns a true value, and returns it. Fails after PATIENCE seconds."""
    with trio.fail_after(PATIENCE):
        while not (found := true()):  # noqa: ASYNC110
            await trio.sleep(0.005)
    return found


def children() -> set[int]:
    """The processes that this one has started, those included that are dead and not waited for."""
    found = set[int]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found |= set(map(int, (task / "children").read_text().split()))
    return found


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process; "" if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """True if the process runs; a zombie does not."""
    return state_of(pid) not in ("", "Z", "X")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def serving(config: Config | None = None, *, capacity: int = 65536, **models: Any) -> AsyncIterator[MemoryGateway]:
    """A gateway with these models. At the end nothing may be left, in it or on the machine."""
    before = children()
    failure: Exception | None = None
    with trio.move_on_after(PATIENCE) as patience:
        try:
            config = replace(config or Config(), models=models)
            async with memory_gateway((), config, capacity=capacity, check=True) as memory:
                yield memory
        except Exception as e:
            failure = e
    if failure is not None:
        raise failure
    assert not patience.cancelled_caught, "nothing moves any more"
    assert children() <= before


def pids(memory: MemoryGateway, name: str = "m") -> list[int]:
    """The ids of the model's processes that take sessions."""
    return [one.pid for one in status(memory, name).instances if one.state == "ready"]


def status(memory: MemoryGateway, name: str = "m") -> Any:
    return memory.gateway.models[name]


async def ready(memory: MemoryGateway, instances: int = 1, name: str = "m", *, but: Any = ()) -> list[int]:
    """Waits until `instances` processes take sessions, none of them in `but`. Returns their ids."""
    found: list[int] = await until(lambda: len(now := pids(memory, name)) == instances and not {*now} & {*but} and now)
    return found


async def get(memory: MemoryGateway, path: str) -> tuple[int, Any]:
    """A whole GET."""
    peer = memory.http1()
    await peer.send(raw(1, b"GET", path), End(stream=1))
    status, _, body = await peer.read_answer(1)
    return status, json.loads(body) if body[:1] in (b"{", b"[") else bytes(body)


async def lmi(memory: MemoryGateway, prompt: str, model: str = "m", *, stream: bool = True, **parameters: Any) -> Answer:
    """A whole answer on a connection of its own."""
    return await memory.client().lmi(prompt, model, stream=stream, max_new_tokens=1000, **parameters)


async def begin(memory: MemoryGateway, prompt: str, model: str = "m", wire: str = "http1") -> tuple[Client, Conversation]:
    """A stream that has begun to be asked for."""
    client = memory.client(wire)
    conversation = client.about(questions.lmi(prompt, model, stream=True, max_new_tokens=60_000))
    await conversation.begin()
    return client, conversation


class Diary:
    """The lines that models have written to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    async def says(self, word: str, times: int = 1) -> list[str]:
        """Waits for `times` lines with this first word. Returns the rest of each."""

        def found() -> list[str] | None:
            rest = [line.partition(" ")[2] for line in self.lines if line.split()[0] == word]
            return rest if len(rest) >= times else None

        lines: list[str] = await until(found)
        return lines


@pytest.fixture
def diary(tmp_path: Path) -> Diary:
    return Diary(tmp_path / "diary")


def logged(caplog: pytest.LogCaptureFixture, message: str) -> list[Any]:
    return [record for record in caplog.records if record.getMessage() == message]


# -- each shape of a model -------------------------------------------------------------------------------------------------

SHAPES = ("double", "declared", "words", "letters", "parrot", "Shouter", "loader", "batched", "counting")


async def test_each_shape_of_a_model_answers_as_in_process_and_says_the_same_of_itself() -> None:
    models = {
        **{f"here-{shape}": here(shape, restart=RestartConfig()) for shape in SHAPES},
        **{f"there-{shape}": there(shape, restart=RestartConfig()) for shape in SHAPES},
    }
    async with serving(**models) as memory:
        supervisor = memory.gateway.supervisor
        for shape in SHAPES:
            said = []
            for side in ("here", "there"):
                name = f"{side}-{shape}"
                nothing: Any = None
                called = {"load": nothing, "warmup": (), "chat_template": None, "count_tokens": None}
                spec = replace(supervisor.configured[name], name="m", **called)
                shown: list[Any] = [spec]
                for path in (f"/v2/models/{name}", f"/v2/models/{name}/config", f"/v2/models/{name}/ready"):
                    shown.append((await get(memory, path))[0])
                    shown.append(json.dumps((await get(memory, path))[1] or "").replace(name, "").replace(side, ""))
                answers: list[Any] = []
                match spec.family.value:
                    case "tensor":
                        for binary in (True, False):
                            x: Any = np.ones((3, 2)) if shape == "declared" else np.ones((2, 1), np.float32)
                            answer = await memory.client().infer({"x": x}, name, binary=binary)
                            assert answer.status == 200, answer.error
                            (message,) = answer.messages
                            answers += [(one.name, one.datatype, one.elements.tolist()) for one in message.outputs]
                    case "text":
                        for stream in (True, False):
                            answer = await memory.client().lmi("the quick fox", name, stream=stream, max_new_tokens=5)
                            answers.append((answer.status, answer.text))
                        answer = await memory.client("http2").openai("hello you", name, max_tokens=5)
                        answers.append((answer.status, answer.text))
                    case "parts":
                        socket = await memory.conversation(name)
                        await socket.send(b"one")
                        await socket.send(b"two")
                        answers += [await socket.receive() for _ in range(3)]
                        await socket.end()
                        answers += [await socket.receive(), socket.code]
                said.append((shown, answers))
            assert said[0] == said[1], shape


async def test_the_gateways_own_process_imports_nothing_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secluded.py").write_text("def answer(prompt: str) -> str:\n    return __file__\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with serving(m=ModelConfig(factory="secluded:answer", process=ProcessConfig(enabled=True))) as memory:
        assert (await lmi(memory, "where?")).text == f"{tmp_path}/secluded.py"
        assert "secluded" not in sys.modules


async def test_functions_of_a_models_author_are_called_in_its_process() -> None:
    async with serving(m=there("Shouter", options={"end": "?"})) as memory:
        answer = await memory.client().openai("how are you", "m", max_tokens=100)
        assert answer.text == "USER: HOW ARE YOU?"
        document = json.loads(answer.body)
        assert document["usage"]["prompt_tokens"] == 4
        too_long = await memory.client().openai("how are you this evening", "m")
        assert (too_long.status, "maximum context length is 6 tokens" in str(too_long.error)) == (400, True)


async def test_each_instance_has_its_number_its_device_its_threads_and_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVERYWIRE_SECRET", "token")
    process = {"devices": ["3", "5"], "cpu_threads": 2, "environment": {"OF_OURS": "so", "MKL_NUM_THREADS": "9"}}
    async with serving(m=there("seen", instances=2, process=process)) as memory:
        instances = await ready(memory, 2)
        held = [await begin(memory, "x") for _ in range(2)]  # one in each
        told = {(await conversation.rest()).text for _, conversation in held}
        assert told == {f"{pid} {n} {device} 2 9 so -" for n, (pid, device) in enumerate(zip(instances, "35", strict=True))}
        assert [one.device for one in status(memory).instances] == ["3", "5"]


async def test_the_access_line_and_the_span_of_a_call_name_its_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.exchange")
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    models = {"m": there("words"), "here": here("words"), "batched": there("batched")}
    async with memory_gateway((), Config(models=models), tracer_provider=provider) as memory:
        assert len(status(memory, "batched").instances) == 1
        await lmi(memory, "one", "m")
        await lmi(memory, "one", "here")
        await memory.client().infer({"x": np.ones((1, 1), np.float32)}, "batched")
    told = [(record.model, vars(record).get("instance")) for record in logged(caplog, "exchange")]
    assert sorted(told, key=str) == [("batched", 0), ("here", None), ("m", 0)]
    spans = [
        span.attributes or {} for span in exporter.get_finished_spans() if "everywire.exchange" in (span.attributes or {})
    ]
    assert sorted([(one["everywire.model"], one.get("everywire.instance")) for one in spans], key=str) == sorted(
        told, key=str
    )


async def test_what_a_model_prints_and_logs_is_in_the_gateways_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(m=there("telling")) as memory:
        (pid,) = await ready(memory)
        assert (await lmi(memory, "it")).text == "told"
        lines = await until(lambda: len(found := logged(caplog, "model output")) >= 2 and found)
        assert {(one.stream, one.line, one.instance, one.pid, one.model) for one in lines} == {
            ("stdout", "printed it", 0, pid, "m"),
            ("stderr", "complained it", 0, pid, "m"),
        }
        records = await until(lambda: len(found := [r for r in caplog.records if r.name == "app.words"]) >= 3 and found)
        assert [(one.levelname, one.getMessage().splitlines()[0], one.pid) for one in records[:2]] == [
            ("WARNING", "warned of it", pid),
            ("ERROR", "caught", pid),
        ]
        assert "KeyError: 'it'" in records[1].getMessage()
        assert records[2].getMessage().startswith("half of a pair: ")
        assert pids(memory) == [pid]


async def test_a_model_that_logs_while_it_is_imported_is_heard_from_the_first_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(m=there("Loud")) as memory:
        (pid,) = await ready(memory)
        assert (await lmi(memory, "x")).text == "quiet"
        assert pids(memory) == [pid]
        said = [one.getMessage().split()[0] for one in caplog.records if one.name == "app.words"]
        assert said[:200] == [str(number) for number in range(200)]


# -- how processes end -----------------------------------------------------------------------------------------------------

ENDS = {
    "segv": "SIGSEGV",
    "_exit 3": "exit status 3",
    "_exit 0": "exit status 0",
    "kill": "SIGKILL",
    "abort": "SIGABRT",
    "daemon": "exit status 5",
}


async def test_the_death_of_a_process_ends_each_of_its_sessions_once_and_nobody_elses(
    diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    models = {"m": there("Doomed", instances=2, options={"diary": str(diary.path)}), "other": there("ticking")}
    async with serving(**models) as memory:
        _, neighbour = await begin(memory, "x", "other")
        for what, told in ENDS.items():
            caplog.clear()
            old = await ready(memory, 2)
            await until(lambda: not any(one.sessions for one in status(memory).instances))
            # in each waits one whose head is out, and one whose head is not
            begun = [(await begin(memory, "now wait"))[1] for _ in range(2)]
            of = {int(await one.receive()): one for one in begun}
            assert {*of} == {*old}
            silent = [(await begin(memory, "before wait"))[1] for _ in range(2)]
            assert {*await diary.says("called", 4)} == {*map(str, old)}
            _, killer = await begin(memory, f"now {what}")
            dead = int(await killer.receive())
            for lost in (killer, of.pop(dead)):
                answer = await lost.rest()
                assert (answer.status, "ended; try again" in answer.error) == (200, True)
            async with trio.open_nursery() as nursery:
                for one in silent:

                    @nursery.start_soon
                    async def refused(one: Conversation = one) -> None:
                        answer = await one.rest()
                        assert (answer.status, "ended; try again" in answer.error) == (503, True)
                        nursery.cancel_scope.cancel()

            assert sorted(one.answer.status for one in silent) == [0, 503]
            (ended,) = await until(lambda: logged(caplog, "instance ended"))
            assert (ended.model, ended.pid) == ("m", dead)
            assert f"({told}" in ended.reason
            assert ("process_models.py line" in ended.reason) is (what in ("segv", "abort"))
            assert not logged(caplog, "instance killed")
            for one in (*of.values(), *silent):
                one.leave()
            diary.path.unlink()
            await ready(memory, 2, but=[dead])
            assert (await neighbour.receive()).strip().isdecimal()
        neighbour.leave()
        assert sum(one.restarts for one in status(memory).instances) == len(ENDS)
        assert status(memory, "other").instances[0].restarts == 0


async def test_a_session_that_exits_or_raises_is_all_that_ends(diary: Diary) -> None:
    async with serving(m=there("Doomed", options={"diary": str(diary.path)})) as memory:
        (pid,) = await ready(memory)
        for what, text in {
            "exit 3": "incident", "surrogate": "incident", "error": "no such \ufffd voice",
        }.items():  # fmt: skip
            before, after = await lmi(memory, f"before {what}"), await lmi(memory, f"now {what}")
            assert (before.status, after.status) == ({"error": 422}.get(what, 424), 200), before.error
            assert text in before.error
            assert text in after.error
        assert pids(memory) == [pid]


async def test_a_message_that_is_none_is_the_end_of_its_session_alone() -> None:
    async with serving(here=here("unfit"), m=there("unfit")) as memory:
        (pid,) = await ready(memory)
        for prompt in ("id", "log_prob", "text", "surrogate", "top", "str", "object"):
            answers = [await lmi(memory, prompt, model) for model in ("here", "m")]
            if prompt != "top":  # which is looked at in a process only
                assert len({(answer.status, answer.text) for answer in answers}) == 1
            assert answers[1].status == (200 if prompt in ("str", "surrogate") else 424)
            assert pids(memory) == [pid]
            assert (await lmi(memory, "else")).text == "fine"


async def test_an_answer_without_a_message_has_the_models_head() -> None:
    async with serving(m=there("brief")) as memory:
        answer = await memory.client("http2").invoke("m", b"x")
        assert (answer.status, dict(answer.headers)[b"content-type"]) == (200, b"text/x-own")


async def test_a_head_that_is_none_is_the_end_of_its_session_alone() -> None:
    async with serving(m=there("beheaded")) as memory:
        (pid,) = await ready(memory)
        answer = await memory.client("http2").invoke("m", b"x")
        assert answer.status in (424, 500)
        assert pids(memory) == [pid]


async def test_a_process_that_has_no_memory_left_says_507(diary: Diary) -> None:
    config = there("Doomed", options={"diary": str(diary.path)}, process={"memory_limit": 4 << 30})
    async with serving(m=config) as memory:
        (pid,) = await ready(memory)
        answer = await lmi(memory, "before memory")
        assert (answer.status, "out of memory" in answer.error) == (507, True)
        assert (await lmi(memory, "now")).text == f"{pid} done"


async def test_background_work_that_raises_loses_the_sessions_of_its_process(diary: Diary, caplog: Any) -> None:
    async with serving(m=there("mortal", options={"diary": str(diary.path)})) as memory:
        (pid,) = await ready(memory)
        _, conversation = await begin(memory, "x")
        assert await conversation.receive() == "begun"
        diary.path.touch()
        answer = await conversation.rest()
        assert "ended; try again" in answer.error
        await ready(memory, but=[pid])
        assert "RuntimeError: the background work has ended" in status(memory).last_error.error


async def test_sigkill_from_outside_in_a_call_that_holds_the_interpreter(diary: Diary) -> None:
    async with serving(m=there("Doomed", instances=2, options={"diary": str(diary.path)})) as memory:
        both = await ready(memory, 2)
        _, conversation = await begin(memory, "now gil")
        (pid,) = map(int, await diary.says("holds"))
        assert pid in both
        os.kill(pid, signal.SIGKILL)
        answer = await conversation.rest()
        assert (answer.status, "503" in answer.error or "try again" in answer.error) in ((503, True), (200, True))
        await ready(memory, 2, but=[pid])


async def test_a_model_whose_processes_keep_ending_is_given_up_and_readiness_says_so(tmp_path: Path) -> None:
    restart = RestartConfig(intensity=2, backoff=0.01)
    config = there("crashing_loads", options={"diary": str(tmp_path / "die")}, restart=restart)
    async with serving(m=config, other=there("letters", required=False)) as memory:
        assert (await get(memory, "/ping"))[0] == 200
        assert (await get(memory, "/v2/health/ready"))[0] == 200
        answer = await lmi(memory, "die")
        assert answer.status == 503
        await until(lambda: status(memory).state is State.FAILED)
        assert (await get(memory, "/ping"))[0] == 503
        assert (await get(memory, "/v2/health/ready"))[0] != 200
        assert (await get(memory, "/v2/models/m/ready"))[0] != 200
        refused = await lmi(memory, "x")
        assert refused.status == 503
        assert (await lmi(memory, "abc", "other")).text == "abc"


async def test_a_model_is_ready_while_one_of_its_processes_is_and_no_longer(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with serving(m=there("patient", instances=2, options={"gate": str(gate)})) as memory:
        first, second = await ready(memory, 2)
        os.kill(first, signal.SIGKILL)
        await until(lambda: [one.state for one in status(memory).instances].count("loading") == 1)
        assert (await get(memory, "/v2/models/m/ready"))[0] == 200
        assert (await lmi(memory, "x")).text == "fine"
        os.kill(second, signal.SIGKILL)
        await until(lambda: not status(memory).ready)
        assert (await get(memory, "/v2/models/m/ready"))[0] != 200
        gate.touch()
        await ready(memory, 2, but=[first, second])
        assert (await lmi(memory, "x")).text == "fine"


async def test_a_warm_up_that_ends_its_process_says_how_it_ended(diary: Diary) -> None:
    restart = RestartConfig(intensity=1, backoff=0.01)
    config = there("Doomed", options={"diary": str(diary.path)}, warmup=["now _exit 3"], restart=restart)
    async with serving(m=config) as memory:
        await until(lambda: status(memory).state is State.FAILED)
        assert status(memory).last_error.error == "InstanceEnded: its process ended (exit status 3)"


async def test_a_process_that_cannot_be_started_is_tried_again_and_nobody_notices(
    diary: Diary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(m=there("Doomed", instances=2, options={"diary": str(diary.path)})) as memory:
        both = await ready(memory, 2)
        _, conversation = await begin(memory, "now wait")
        pid = int(await conversation.receive())

        def no_more(*_: object, **__: object) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", no_more)
            os.kill(next(one for one in both if one != pid), signal.SIGKILL)
            await until(lambda: len(logged(caplog, "instance ended")) > 2)
        assert "Too many open files" in logged(caplog, "instance ended")[-1].reason
        assert pid in await ready(memory, 2)
        assert not conversation.answer.over
        conversation.leave()


async def test_fifty_sessions_and_sigkill_at_any_moment(diary: Diary, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chance = random.Random(7)
    over: list[str] = []

    async def calling(memory: MemoryGateway) -> None:
        for _ in range(4):
            client, conversation = await begin(memory, "x", wire=chance.choice(["http1", "http2"]))
            numbers = []
            for _ in range(chance.randrange(10, 400)):
                if (token := await conversation.receive()) is None:
                    break
                numbers.append(int(token))
            assert numbers == list(range(len(numbers)))
            answer = conversation.answer
            if answer.over:
                assert answer.error
                assert answer.status == (200 if numbers else 503), answer.error
                assert "try again" in answer.error
            over.append("lost" if answer.over else "left")
            client.close()

    async with serving(m=there("ticking", instances=2, capacity=200)) as memory:
        await ready(memory, 2)
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(calling, memory)

            @nursery.start_soon
            async def killing() -> None:
                for _ in range(6):
                    await trio.sleep(chance.uniform(0.1, 0.6))
                    if found := pids(memory):
                        with suppress(ProcessLookupError):  # it has ended in this moment
                            os.kill(chance.choice(found), signal.SIGKILL)

        await ready(memory, 2)
        assert len(over) == 200
        assert {*over} == {"left", "lost"}
        ended = logged(caplog, "instance ended") + logged(caplog, "model crashed")
        assert not logged(caplog, "instance killed")
        assert all("SIGKILL" in one.reason for one in ended)


@pytest.mark.parametrize("by", ["hang_timeout", "stop_within"])
async def test_a_stopped_process_is_killed_told_of_and_started_again(
    by: str, diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    hang = {"process": {"hang_timeout": 0.3}} if by == "hang_timeout" else {"stop_within": 0.2}
    async with serving(m=there("Doomed", instances=2, options={"diary": str(diary.path)}, **hang)) as memory:
        await ready(memory, 2)
        _, other = await begin(memory, "now wait")
        survivor = int(await other.receive())
        client, conversation = await begin(memory, "now stop")
        pid = int(await conversation.receive())
        assert pid != survivor
        await until(lambda: state_of(pid) == "T")
        if by == "stop_within":
            client.close()
        else:
            assert "try again" in (await conversation.rest()).error
        (killed,) = await until(lambda: logged(caplog, "instance killed"))
        assert killed.pid == pid
        assert by in killed.reason
        await ready(memory, 2, but=[pid])
        other.leave()
        assert survivor in pids(memory)


# -- cancel ----------------------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_or_whose_time_is_over_has_the_models_finally_run(diary: Diary) -> None:
    models = {
        "m": there("Doomed", options={"diary": str(diary.path)}),
        "brief": there("Doomed", options={"diary": str(diary.path)}, timeout=0.5),
    }
    async with serving(**models) as memory:
        client, conversation = await begin(memory, "now wait")
        await conversation.receive()
        client.close()
        await diary.says("finally")
        client, conversation = await begin(memory, "now wait", wire="http2")
        await conversation.receive()
        await conversation.abandon()
        await diary.says("finally", 2)
        assert (await lmi(memory, "before wait", "brief")).status == 504
        await diary.says("finally", 3)


async def test_a_function_in_a_thread_keeps_its_slot_until_it_returns(diary: Diary, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = there("Sitting", options={"diary": str(diary.path), "gate": str(gate)}, capacity=1)
    async with serving(m=config) as memory:
        client, _ = await begin(memory, "x")
        await diary.says("sits")
        client.close()
        await until(lambda: memory.gateway.counts().exchanges == 0)
        assert memory.gateway.counts().slots_in_use == 1
        _, waits = await begin(memory, "y")
        await wait_all_tasks_blocked(0.05)
        assert len(await diary.says("sits")) == 1
        gate.touch()
        assert (await waits.rest()).text == "sat"
        await diary.says("rises", 2)


# -- steps that take too long, and sessions that do not stop ---------------------------------------------------------------


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A pipe: who opens it to read waits until `let_go`."""
    os.mkfifo(path := tmp_path / "gate")
    return path


def let_go(gate: Path) -> None:
    os.close(os.open(gate, os.O_RDWR))


async def leaves(memory: MemoryGateway, prompt: str, diary: Diary, times: int = 1) -> None:
    """Runs a client that leaves once the model's diary has `times` lines with the prompt."""
    client, conversation = await begin(memory, prompt)
    await conversation.receive()
    await diary.says(prompt, times)
    client.close()


async def test_a_step_that_takes_too_long_ends_its_session_as_in_process(
    diary: Diary, gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"diary": str(diary.path), "gate": str(gate)}
    settings: Any = {"options": options, "step_timeout": 0.2, "capacity": 1}
    async with serving(there=there("Held", **settings), here=here("Held", **settings)) as memory:
        answers = [await lmi(memory, "held", model, stream=False) for model in ("there", "here")]
        assert [answer.status for answer in answers] == [504, 504]
        assert answers[0].error.replace("there", "here") == answers[1].error
        assert "step_timeout" in answers[0].error
        stuck = logged(caplog, "model is stuck")
        assert [(record.model, record.replaced, "os.open(self._gate" in record.stack) for record in stuck] == [
            ("there", True, True), ("here", True, True)
        ]  # fmt: skip
        assert [status(memory, name).stuck for name in ("there", "here")] == [1, 1]
        assert "over" in (await lmi(memory, "quick", "there")).text, "its place is somebody else's"
        let_go(gate)
        await until(lambda: memory.gateway.counts().slots_in_use == 0)
        await until(lambda: status(memory, "there").stuck == 0)


async def test_a_batch_that_takes_too_long_ends_all_its_requests_and_the_next_one_runs(gate: Path) -> None:
    answers = []

    async def ask(memory: MemoryGateway, value: float) -> None:
        answers.append(await memory.client().infer({"x": np.full((1, 1), value, np.float32)}, "m"))

    async with serving(m=there("HeldRows", options={"gate": str(gate)}, step_timeout=0.3, capacity=9)) as memory:
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask, memory, 1)
        assert [answer.status for answer in answers] == [504, 504]
        assert all("step_timeout" in answer.error for answer in answers)
        await ask(memory, 0)
        assert answers.pop().status == 200
        assert status(memory).stuck == 1
        let_go(gate)
        await until(lambda: status(memory).stuck == 0)
        assert memory.gateway.counts().slots_in_use == 0


async def test_python_code_that_goes_on_after_its_client_is_ended(diary: Diary, caplog: pytest.LogCaptureFixture) -> None:
    config = there("Held", options={"diary": str(diary.path), "gate": ""}, stop_within=0.5, capacity=1)
    async with serving(m=config) as memory:
        (pid,) = pids(memory)
        await leaves(memory, "spins", diary)
        assert await diary.says("raised") == ["StepCancelled"]
        await until(lambda: memory.gateway.counts().slots_in_use == 0)
        assert (await lmi(memory, "quick")).text == f"{pid} over"
        assert not logged(caplog, "model is stuck")


async def test_one_more_that_is_stuck_is_the_end_of_its_process_but_not_of_its_other_sessions(
    diary: Diary, gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"diary": str(diary.path), "gate": str(gate)}
    async with serving(m=there("Held", options=options, stop_within=0.2, stuck_limit=1, capacity=9)) as memory:
        (pid,) = pids(memory)
        client, survivor = await begin(memory, "ticks")
        assert int(await survivor.receive()) == pid
        await leaves(memory, "held", diary)
        await until(lambda: status(memory).stuck == 1)
        assert (await lmi(memory, "quick")).text == f"{pid} over", "it was replaced"
        await leaves(memory, "held", diary, 2)
        (new,) = await ready(memory, but=[pid])
        (ended,) = logged(caplog, "instance ended")
        assert (ended.pid, "stuck_limit" in ended.reason) == (pid, True)
        assert (await lmi(memory, "quick")).text == f"{new} over"
        assert alive(pid)
        assert status(memory).state is State.READY
        for _ in range(3):
            assert "tick" in await survivor.receive()
        assert memory.gateway.counts().slots_in_use == 3, "and what is stuck, replaced or not"
        client.close()
        await until(lambda: not alive(pid))
        await until(lambda: memory.gateway.counts().slots_in_use == 0)
        assert status(memory).stuck == 0
        assert pids(memory) == [new]


async def test_sessions_beside_what_is_stuck_have_the_patience_of_an_unload(diary: Diary, gate: Path) -> None:
    options = {"diary": str(diary.path), "gate": str(gate)}
    config = Config(repository=RepositoryConfig(unload_timeout=0.3))
    async with serving(config, m=there("Held", options=options, stop_within=0.1, stuck_limit=0)) as memory:
        (pid,) = pids(memory)
        _, survivor = await begin(memory, "ticks")
        await leaves(memory, "held", diary)
        assert "try again" in (await survivor.rest()).error
        await ready(memory, but=[pid])


async def test_what_a_cancelled_model_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(m=there("raising")) as memory:
        client, conversation = await begin(memory, "x")
        await conversation.receive()
        client.close()
        (said,) = await until(lambda: logged(caplog, "model raised while cancelled"))
        assert (said.model, said.instance) == ("m", 0)
        assert said.id
        assert "ValueError: no clean-up" in caplog.text


# -- backpressure ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "ahead"), [(1000, 16), (64 * 1024, 4)])
async def test_a_client_that_does_not_read_stops_the_model_in_its_process(size: int, ahead: int, tmp_path: Path) -> None:
    counts, capacity = tmp_path / "count", 32 * 1024

    def count() -> int:
        text = counts.read_text().split() if counts.exists() else []
        return int(text[0]) if text else 0

    config = Config()
    async with serving(config, capacity=capacity, m=there("Counter", options={"file": str(counts), "size": size})) as memory:
        socket = await memory.conversation("m")
        await until(count)
        last = -1
        while last != (last := count()):
            with trio.move_on_after(0.3):
                await trio.sleep_forever()
        # in flight, in the queue of the wire, one that waits for it, and what is ahead of it
        bound = (capacity + config.limits.send_buffer) // size + 2 + ahead
        assert last <= bound + 1, (last, bound)
        for number in range(last + 100 if size == 1000 else last + 10):
            data = await socket.receive()
            assert data is not None
            assert int(data[:8]) == number
        socket.peer.close()
        await until(lambda: "over" in counts.read_text())


async def test_a_model_that_does_not_read_closes_its_clients_window(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with serving(m=there("Deaf", options={"gate": str(gate)})) as memory:
        client = memory.client("http2")
        conversation = await client.bidi("m")
        parts = 200
        sent = []

        async def say() -> None:
            for number in range(parts):
                await conversation.wait_room()
                await conversation.send(f"{number:08d}".encode().ljust(16 * 1024, b"."))
                sent.append(number)
            await conversation.end()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(say)
            heard: list[int] = []

            @nursery.start_soon
            async def hear() -> None:
                while (data := await conversation.receive()) is not None:
                    heard.append(int(bytes(data)[:8]))

            last = -1
            while last != (last := len(sent)):
                with trio.move_on_after(0.3):
                    await trio.sleep_forever()
            limits = memory.gateway.config
            bound = (limits.http2.max_window + limits.limits.read_ahead + 256 * 1024 + 128 * 1024) // (16 * 1024)
            assert 16 <= last <= bound, (last, bound)
            gate.touch()
        assert heard == list(range(parts))


async def test_tensors_of_16_mib_there_and_back_and_300_sessions_at_once() -> None:
    limits = replace(Config().limits, body=64 << 20)
    async with serving(Config(limits=limits), m=there("identity"), t=there("ticking", instances=2, capacity=400)) as memory:
        x = np.random.default_rng(1).random((2, 1 << 20), np.float64)
        for _ in range(2):
            answer = await memory.client("http2").infer({"x": x}, "m")
            assert answer.status == 200, answer.error
            assert (answer.messages[0]["x-back"].elements.reshape(x.shape) == x).all()

        async def twenty() -> None:
            client, conversation = await begin(memory, "x", "t")
            assert [int(await conversation.receive()) for _ in range(20)] == list(range(20))
            client.close()

        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(twenty)


# -- the process of a session ----------------------------------------------------------------------------------------------


async def in_sequence(memory: MemoryGateway, number: int | str, value: float, **marks: bool) -> Any:
    """The sum so far and the process that knows it, or the error."""
    parameters = {"sequence_id": number, **{f"sequence_{key}": mark for key, mark in marks.items()}}
    answer = await memory.client().infer({"x": np.array([value])}, "m", parameters=parameters)
    if answer.status != 200:
        return answer.status, answer.error
    return tuple(answer.messages[0]["y"].elements.tolist())


@pytest.mark.parametrize("instances", [1, 2])
async def test_a_sequence_stays_with_its_process_and_is_lost_with_it(instances: int) -> None:
    async with serving(m=there("Remembering", instances=instances)) as memory:
        await ready(memory, instances)
        began = {number: await in_sequence(memory, number, 1, start=True) for number in (1, 2, 3, "x")}
        for number, (_, pid) in began.items():
            assert await in_sequence(memory, number, 2) == (3, pid)
        pid = int(began[1][1])
        os.kill(pid, signal.SIGKILL)
        await ready(memory, instances, but=[pid])
        for number, (_, of) in began.items():
            if of == pid:
                for _ in range(2):
                    refused, text = await in_sequence(memory, number, 3)
                    assert (refused, f"sequence {number} is lost: its process ended; begin it again" in text) == (400, True)
                assert (await in_sequence(memory, number, 5, start=True))[0] == 5
                assert (await in_sequence(memory, number, 5, end=True))[0] == 10
            else:
                assert await in_sequence(memory, number, 3) == (6, of)


async def test_a_batch_goes_whole_to_one_process() -> None:
    async with serving(m=there("batched", instances=2, batching=BatchingConfig(max_delay=0.5))) as memory:
        await ready(memory, 2)
        rows: list[Any] = []

        async def one() -> None:
            answer = await memory.client().infer({"x": np.ones((1, 1), np.float32)}, "m")
            assert answer.status == 200, answer.error
            rows.extend(answer.messages[0]["OUTPUT0"].elements.tolist())

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(one)
        assert rows == [[8]] * 8


async def test_a_batch_that_a_crash_took_is_called_nowhere_again(diary: Diary) -> None:
    batching = BatchingConfig(enabled=True, max_delay=0.5)
    config = there("Killed", instances=2, options={"diary": str(diary.path)}, max_batch_size=8, batching=batching)
    async with serving(m=config) as memory:
        await ready(memory, 2)
        answers: list[Answer] = []

        async def one(number: float) -> None:
            answers.append(await memory.client().infer({"x": np.full((1, 1), number, np.float32)}, "m"))

        async with trio.open_nursery() as nursery:
            for number in (1, -1, 2):
                nursery.start_soon(one, number)
        assert [(answer.status, "ended; try again" in str(answer.error)) for answer in answers] == [(503, True)] * 3
        assert [line.split()[2] for line in diary.lines] == ["3"]


async def test_each_process_has_as_many_batches_as_batching_allows(diary: Diary, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = there(
        "Meeting", instances=2, options={"diary": str(diary.path), "gate": str(gate)}, max_batch_size=1,
        batching=BatchingConfig(enabled=True),
    )  # fmt: skip
    async with serving(m=config) as memory:
        both = await ready(memory, 2)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(memory.client().infer, {"x": np.ones((1, 1), np.float32)}, "m")
            met = await diary.says("meets", 2)
            assert {*map(int, met)} == {*both}
            gate.touch()


# -- coming and going ------------------------------------------------------------------------------------------------------


async def test_a_reload_begins_new_processes_beside_the_old_ones_and_lets_sessions_end(diary: Diary) -> None:
    async with serving(m=there("Doomed", instances=2, options={"diary": str(diary.path)})) as memory:
        old = await ready(memory, 2)
        _, conversation = await begin(memory, "now wait")
        pid = int(await conversation.receive())
        await memory.gateway.reload("m", patience=1)
        new = await ready(memory, 2, but=old)
        assert int((await lmi(memory, "now")).text.split()[0]) in new
        assert alive(pid)
        answer = await conversation.rest()
        assert "reloaded" in answer.error or "ended" in answer.error
        await until(lambda: not any(map(alive, old)))
        assert len(await diary.says("finally", 2)) == 2


async def test_a_model_is_unloaded_with_its_clean_up_and_while_it_answers(diary: Diary) -> None:
    async with serving(m=there("loader", options={"diary": str(diary.path)}), big=there("identity")) as memory:
        (pid,) = await ready(memory)
        x = np.zeros((4, 1 << 20), np.float64)
        client = memory.client("http2")
        conversation = client.about(questions.infer({"x": x}, "big"))
        await conversation.begin()
        with trio.fail_after(4):
            await memory.gateway.control.unload("m")
            await memory.gateway.control.unload("big")
        await until(lambda: not alive(pid))
        assert diary.lines == ["loaded", "unloaded"]
        client.close()


async def test_nothing_is_left_of_500_sessions_and_20_restarts() -> None:
    async with serving(m=there("letters", instances=2, capacity=100)) as memory:
        await ready(memory, 2)

        async def some() -> None:
            client = memory.client()
            for _ in range(25):
                assert (await client.lmi("abc", "m", stream=True)).text == "abc"
            client.close()

        async def all_of_them() -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(some)

        await all_of_them()
        before, processes = descriptors(), children()
        for _ in range(10):
            both = await ready(memory, 2)
            for pid in both:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: status(memory).state is State.READY)
            await ready(memory, 2, but=both)
        await all_of_them()
        assert descriptors() <= before
        assert len(children()) == len(processes)


async def test_what_a_model_has_started_ends_with_its_process() -> None:
    async with serving(m=there("parent")) as memory:
        (old,) = await ready(memory)
        _, conversation = await begin(memory, "die")
        started = int(await conversation.receive())
        assert "try again" in (await conversation.rest()).error
        await until(lambda: not alive(started))
        (new,) = await ready(memory, but=[old])
        client, conversation = await begin(memory, "live")
        started = int(await conversation.receive())
        client.close()
        await memory.gateway.control.unload("m")
        await until(lambda: not alive(new) and not alive(started))


# -- the program -----------------------------------------------------------------------------------------------------------


@contextmanager
def program(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[dict[str, Any]]]]:
    """`python -m gateway` with these flags, and its log; it is killed at the end where it has not ended."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("EVERYWIRE_")}
    path = os.pathsep.join([str(folder), str(ROOT)])
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "--port", "0", "--log-format", "json", *flags],
        cwd=folder, env=environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        yield process, map(json.loads, process.stderr)
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stderr.close()


def doomed(diary: Diary, attribute: str = "Doomed") -> list[str]:
    return [
        *("--model", f"m={MODELS}:{attribute}", "--set", "models.m.process.instances=2"),
        *("--set", f"models.m.options.diary={diary.path}"),
    ]


@asynccontextmanager
async def dialled(log: Iterator[dict[str, Any]]) -> AsyncIterator[Client]:
    """A client of the program, once it serves."""
    at = next(line["at"][0] for line in log if line["event"] == "serving")
    async with connect("127.0.0.1", int(at.rpartition(":")[2])) as transport:
        yield Client(http1(transport))


async def test_sigterm_drains_the_sessions_of_processes_and_leaves_none(diary: Diary, tmp_path: Path) -> None:
    with program(tmp_path, *doomed(diary), "--set", "drain.timeout=0.5") as (process, log):
        async with dialled(log) as client:
            conversation = client.about(questions.lmi("now wait", "m", stream=True))
            await conversation.begin()
            pid = int(await conversation.receive())
            started = [int(one) for one in await diary.says("loaded", 2)]
            assert pid in started
            process.send_signal(signal.SIGTERM)
            answer = await conversation.rest()
            assert "shutting down" in answer.error or "drain" in answer.error, answer.error
        with trio.fail_after(PATIENCE):
            assert await trio.to_thread.run_sync(process.wait) == 3
        assert not any(map(alive, started))
        assert await diary.says("finally") == [str(pid)]
        events = [line["event"] for line in log]
        assert "instance ended" not in events
        assert "model did not unload" not in events


@pytest.mark.parametrize("moment", ["importing", "loading", "serving", "in a call", "stopped"])
async def test_sigkill_of_the_gateway_leaves_no_process(moment: str, diary: Diary, tmp_path: Path) -> None:
    flags = doomed(diary, "slow_loader" if moment == "loading" else "Doomed")
    if moment == "importing":
        (tmp_path / "app.py").write_text(
            f"import os, time\nopen({str(diary.path)!r}, 'a').write(f'imports {{os.getpid()}}\\n')\ntime.sleep(3600)\n"
        )
        flags = ["--model", "m=app:answer", "--set", "models.m.process.enabled=true"]
    with program(tmp_path, *flags) as (process, log):
        match moment:
            case "importing":
                started = await diary.says("imports")
            case "loading":
                started = await diary.says("loads", 2)
            case _:
                started = await diary.says("loaded", 2)
                async with dialled(log) as client:
                    if moment != "serving":
                        conversation = client.about(
                            questions.lmi("now gil" if moment == "in a call" else "now stop", "m", stream=True)
                        )
                        await conversation.begin()
                        pid = int(await conversation.receive())
                        if moment == "in a call":
                            await diary.says("holds")
                        else:
                            await until(lambda: state_of(pid) == "T")
        assert all(alive(int(one)) for one in started)
        process.kill()
        await until(lambda: not any(alive(int(one)) for one in started))


# -- models that cannot be served ------------------------------------------------------------------------------------------

WRONG = {
    "missing": ("", "nowhere:answer", "cannot import 'nowhere'"),
    "attribute": ("", "app:answr", "has no 'answr'"),
    "raises": ("raise OSError('no weights here')", "app:answer", "OSError: no weights here"),
    "exits": ("import sys; sys.exit(3)", "app:answer", "SystemExit: 3"),
    "segv": ("import faulthandler\nfaulthandler._sigsegv()", "app:answer", "its process ended (SIGSEGV) while it was imported: "),
    "leaves": ("import os; os._exit(4)", "app:answer", "its process ended (exit status 4) while it was imported"),
    "shouts": ("print('x' * 2**20); import sys; sys.stderr.write('y' * 2**20); raise OSError('hoarse')", "app:answer", "OSError: hoarse"),
    "hangs": ("import time; time.sleep(3600)", "app:answer", "load_timeout"),
    "no model": ("answer = 7", "app:answer", "app:answer"),
    "surrogate": (r"raise OSError('no file named \udc80')", "app:answer", "OSError: no file named"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_imported_is_one_line(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, factory, said = WRONG[wrong]
    (tmp_path / "app.py").write_text(code + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    before, files = children(), descriptors()
    config = ModelConfig(factory=factory, process=ProcessConfig(enabled=True), load_timeout=1 if wrong == "hangs" else 60)
    with pytest.raises(ConfigError) as caught:
        load_spec("m", config)
    text = str(caught.value)
    assert said in text
    assert text.startswith("models.m")
    assert "\n" not in text
    until = time.monotonic() + PATIENCE
    while not (children() <= before and descriptors() <= files) and time.monotonic() < until:
        time.sleep(0.01)  # a killed process takes a moment to die
    assert children() <= before
    assert descriptors() <= files


def interpreter(folder: Path, options: str = "", **environment: str) -> str:
    """Ours under another name, with these options and variables."""
    said = " ".join(f"{name}={value}" for name, value in environment.items())
    (program := folder / "python").write_text(f'#!/bin/sh\nexec env {said} {sys.executable} {options} "$@"\n')
    program.chmod(0o755)
    return str(program)


async def test_another_interpreter_runs_the_model(tmp_path: Path) -> None:
    python = interpreter(tmp_path, PYTHONPATH=str(ROOT), OF_OURS="theirs")
    async with serving(m=there("seen", process={"python": python})) as memory:
        assert "theirs" in (await lmi(memory, "x")).text


def of_another_version(folder: Path) -> str:
    (folder / "sitecustomize.py").write_text("import gateway.version\ngateway.version.version = lambda: '0.0.9'\n")
    return interpreter(folder, PYTHONPATH=f"{folder}:{ROOT}")


OTHERS: dict[str, tuple[Callable[[Path], str], str]] = {
    "another version": (of_another_version, f"its process has everywire 0.0.9, and this is {version()}"),
    "none there": (lambda folder: interpreter(folder, "-I -S"), f"has no everywire {version()}: "),
    "no program": (lambda folder: str(folder / "none"), "its process cannot be started: No such file or directory"),
    "no interpreter": (lambda folder: "/bin/true", f"/bin/true has no everywire {version()}: exit status 0"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_interpreter_must_have_everywire_of_this_version(other: str, tmp_path: Path) -> None:
    make, said = OTHERS[other]
    before = children()
    config = ModelConfig(factory=f"{MODELS}:double", process=ProcessConfig(python=make(tmp_path)))
    with pytest.raises(ConfigError) as caught:
        load_spec("m", config)
    text = str(caught.value)
    assert text.startswith("models.m.process.python")
    assert said in text
    assert "\n" not in text
    assert children() <= before


def test_config_check_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("import faulthandler\nfaulthandler._sigsegv()\n")
    (tmp_path / "everywire.toml").write_text(
        '[models.chat]\nfactory = "app:answer"\n[models.chat.process]\nenabled = true\n'
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "gateway", "--config", "everywire.toml", "config", "check", "--import"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    (line,) = (run.stdout + run.stderr).strip().splitlines()
    assert "models.chat: its process ended (SIGSEGV) while it was imported: " in line
    assert "app.py line 2" in line
