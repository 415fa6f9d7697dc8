"""KeyboardInterrupt, SystemExit and GeneratorExit out of a model's code are that model's failures, and nobody else's end."""

from __future__ import annotations

import http.client
import json
import logging
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.catalog.factories import load_spec
from gateway.config import Config, ModelConfig, RepositoryConfig, SageMakerConfig
from gateway.config.problem import ConfigError
from models.adapt import blocking, spec_of
from models.errors import ModelExit, contain_interrupts, is_failure
from models.messages import Family, Finish, InferRequest, InferResponse, Prompt, Tensor, Token
from models.rolling import rolling
from models.session import Session
from models.spec import Batching, Model, ModelSpec, RestartPolicy
from tests.gateway.dialects.aws.test_mme_api import folder
from tests.gateway.dialects.v2.test_v2_control import CONTROL, load
from tests.gateway.promises import House, Probe, answering, serving
from tests.ports import free_port

EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit)
TEXT = json.dumps({"inputs": "hi", "parameters": {"max_new_tokens": 5}}).encode()


async def neighbour(data: bytes) -> bytes:
    return data


@asynccontextmanager
async def served(*specs: ModelSpec, config: Config | None = None) -> AsyncIterator[House]:
    """A gateway as the standalone server runs it; at the end its neighbour still answers."""
    contain_interrupts()
    async with serving(*specs, spec_of(neighbour), config=config) as house:
        yield house
        if house.gateway.draining:
            return
        assert (await house.ask("/models/neighbour/invoke", b"hello"))[::2] == (200, b"hello")
        if any(not model.ready for model in house.gateway.models.values()):
            await house.gateway.drain()  # the ledger counts the tasks of a loaded model


async def fails(house: House, path: str = "/predictions/m", body: bytes = TEXT, status: int = 424) -> None:
    """The call fails as any whose model raises: with an incident."""
    got, _, answer = await house.ask(path, body)
    assert (got, b"incident" in answer) == (status, True)


def raising(exit: type[BaseException]) -> dict[str, Any]:
    """Models that raise it, by where they do."""

    async def session(session: Session[Prompt, Token]) -> None:
        await session.receive()
        raise exit

    async def child(session: Session[Prompt, Token]) -> None:
        async def leave() -> None:
            raise exit

        await session.receive()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(leave)

    def thread(prompt: Prompt) -> str:
        raise exit

    @blocking(False)
    def loop(prompt: Prompt) -> str:
        raise exit

    async def coroutine(prompt: Prompt) -> str:
        raise exit

    def generator(prompt: Prompt) -> Iterator[str]:
        yield "a"
        raise exit

    async def generated(prompt: Prompt) -> AsyncIterator[str]:
        yield "a"
        raise exit

    return {
        "session": session, "task": child, "thread": thread, "loop": loop, "coroutine": coroutine,
        "generator": generator, "async generator": generated,
    }  # fmt: skip


@pytest.mark.parametrize("where", raising(SystemExit))
@pytest.mark.parametrize("exit", EXITS)
async def test_a_session_that_raises_it_is_a_crash_of_that_session(
    exit: type[BaseException], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(spec_of(raising(exit)[where], "m", family=Family.TEXT)) as house:
        await fails(house)
        await fails(house)
        assert house.endings["model-error"] == 2
    records = [record for record in caplog.records if record.message == "model raised"]
    assert len(records) == 2
    assert all(exit.__name__ in vars(record)["exc_text"] for record in records if vars(record).get("exc_text"))


@pytest.mark.parametrize("exit", EXITS)
async def test_a_session_that_raises_it_while_it_is_cancelled_ends_as_cancelled(
    exit: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    async def model(session: Session[Prompt, Token]) -> None:
        async def leave() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise exit

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            nursery.start_soon(trio.sleep_forever)

    async with served(spec_of(model, "m", family=Family.TEXT)) as house:
        line = house.line("http1")
        await line.send(*house.posted(1, "/predictions/m", TEXT))
        await house.still()
        line.peer.close()
        await house.still()
        assert house.endings == {"cancelled-by-client": 1}
    assert "model raised while cancelled" in [record.message for record in caplog.records]


@pytest.mark.parametrize("where", ["thread", "loop"])
@pytest.mark.parametrize("exit", EXITS)
async def test_a_batch_that_raises_it_costs_its_own_requests(exit: type[BaseException], where: str) -> None:
    @blocking(where == "thread")
    def model(request: InferRequest) -> InferResponse:
        if request["x"][0, 0] < 0:
            raise exit
        return InferResponse(outputs=(Tensor(name="y", data=request["x"]),))

    def body(x: int) -> bytes:
        return json.dumps({"inputs": [{"name": "x", "shape": [1, 1], "datatype": "INT64", "data": [x]}]}).encode()

    async with served(spec_of(model, "m", max_batch_size=4, batching=Batching())) as house:
        await fails(house, "/v2/models/m/infer", body(-1), 500)
        assert (await house.ask("/v2/models/m/infer", body(1)))[0] == 200
        assert house.gateway.models["m"].restarts == 0


@dataclass
class State:
    prompt_tokens: int | None = 1
    pending: int = 1
    bad: bool = False


class Steps:
    """A model of a rolling batch that raises where a prompt says."""

    def __init__(self, exit: type[BaseException]) -> None:
        self._exit = exit

    def open(self, prompt: Prompt) -> Sequence[State]:
        if prompt.text == "open":
            raise self._exit
        return [State(bad=prompt.text == "prefill")]

    def prefill(self, sequence: State, at_most: int) -> None:
        if sequence.bad:
            raise self._exit
        sequence.pending = 0

    def step(self, sequences: Sequence[State]) -> list[Token | Finish | list[Token | Finish]]:
        return [Token(text="a", id=0) for _ in sequences]

    def close(self, sequence: State) -> None:
        pass


@pytest.mark.parametrize("threads", [True, False], ids=["in a thread", "on the loop"])
@pytest.mark.parametrize("exit", EXITS)
async def test_a_rolling_batch_loses_that_sequence_alone(exit: type[BaseException], threads: bool) -> None:
    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        async with rolling(Steps(exit), blocking=threads) as model:
            yield model

    async with served(ModelSpec(name="m", family=Family.TEXT, load=load)) as house:
        for text in ("open", "prefill"):
            await fails(house, body=json.dumps({"inputs": text}).encode())
        assert (await house.ask("/predictions/m", TEXT))[0] == 200
        assert house.gateway.models["m"].restarts == 0


def loading(exit: type[BaseException]) -> dict[str, ModelSpec]:
    """Models whose load raises it, by where."""

    @asynccontextmanager
    async def enter() -> AsyncIterator[Model]:
        raise exit
        yield

    @asynccontextmanager
    async def background() -> AsyncIterator[Model]:
        async def leave() -> None:
            raise exit

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            yield Probe(answering)

    @asynccontextmanager
    async def fine() -> AsyncIterator[Model]:
        yield Probe(answering)

    async def warm(model: Any) -> None:
        raise exit

    def spec(load: Any, **more: Any) -> ModelSpec:
        return ModelSpec(name="m", family=Family.TEXT, load=load, restart=RestartPolicy(intensity=1, jitter=0.0), **more)

    return {"load()": spec(enter), "a task of it": spec(background), "warm-up": spec(fine, warmup=warm)}


@pytest.mark.parametrize("where", loading(SystemExit))
@pytest.mark.parametrize("exit", EXITS)
async def test_a_load_that_raises_it_is_a_failed_load(
    exit: type[BaseException], where: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(loading(exit)[where]) as house:
        await trio.sleep(10)
        model = house.gateway.models["m"]
        assert (model.state.value, exit.__name__ in model.reason) == ("failed", True)
        assert house.gateway.unready != ()
    assert [r.levelno for r in caplog.records if r.message == "model given up"] == [logging.ERROR]


class Factory:
    """A factory that a configuration names; its objects cannot be made."""

    exit: type[BaseException] = SystemExit

    def __init__(self) -> None:
        raise self.exit("no weights")

    async def __call__(self, session: Session[Prompt, Token]) -> None: ...


def unannotated() -> Any:
    raise Factory.exit("no weights")


@pytest.mark.parametrize("exit", EXITS)
async def test_a_factory_that_raises_it_is_a_failed_load(
    exit: type[BaseException], monkeypatch: pytest.MonkeyPatch, autojump_clock: Any
) -> None:
    monkeypatch.setattr(Factory, "exit", exit)
    contain_interrupts()
    spec = load_spec("m", ModelConfig(factory=f"{__name__}:Factory"))
    async with served(replace(spec, restart=RestartPolicy(intensity=0))) as house:
        assert house.gateway.models["m"].state.value == "failed"
    # one without annotations is called at once
    with pytest.raises(ConfigError, match=f"calling it raised {exit.__name__}: no weights"):
        load_spec("m", ModelConfig(factory=f"{__name__}:unannotated"))


@pytest.mark.parametrize("exit", EXITS)
async def test_a_module_that_raises_it_cannot_be_imported(
    exit: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contain_interrupts()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"leaves_{exit.__name__}.py").write_text(f"raise {exit.__name__}('bye')\n")
    with pytest.raises(ConfigError, match=f"cannot import .*: {exit.__name__}: bye"):
        load_spec("m", ModelConfig(factory=f"leaves_{exit.__name__}:model"))


@pytest.mark.parametrize("when", ["import", "load"])
@pytest.mark.parametrize("exit", EXITS)
async def test_a_folder_that_raises_it_is_a_load_that_failed(exit: type[BaseException], when: str, tmp_path: Path) -> None:
    code = f"raise {exit.__name__}('bye')\n"
    if when == "load":
        code = f"class Model:\n    def __init__(self) -> None:\n        {code}\n    def __call__(self, x: str) -> str: ...\n"
    folder(tmp_path, "m", "", code)
    where = (str(tmp_path / "models"),)
    config = replace(
        CONTROL, repository=RepositoryConfig(roots=where, code=where), sagemaker=SageMakerConfig(multi_model=True)
    )
    async with served(config=config) as house:
        status, body = await load(house, "m")
        assert (status, f"{exit.__name__}: bye" in body["error"]) == (500, True)


@pytest.mark.parametrize("exit", EXITS)
async def test_a_reload_that_raises_it_is_an_exception_of_its_caller(exit: type[BaseException]) -> None:
    loads: list[int] = []

    @asynccontextmanager
    async def versions() -> AsyncIterator[Model]:
        loads.append(1)
        if len(loads) > 1:
            raise exit("no weights")
        yield Probe(answering)

    async with served(ModelSpec(name="m", family=Family.TEXT, load=versions)) as house:
        with pytest.raises(ModelExit, match=f"{exit.__name__}: no weights"):
            await house.gateway.reload("m")
        assert house.gateway.models["m"].ready


@pytest.mark.parametrize("which", ["input_formatter", "output_formatter", "chat_template"])
@pytest.mark.parametrize("exit", EXITS)
async def test_so_are_formatters_and_templates(exit: type[BaseException], which: str) -> None:
    def formatter(*given: object, **more: object) -> Any:
        raise exit

    async def model(session: Session[Prompt, Token]) -> None:
        await session.receive()
        await session.send(Token(text="a"))

    given: Any = {which: formatter}
    async with served(spec_of(model, "m", **given)) as house:
        if which == "chat_template":
            chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            await fails(house, "/v1/chat/completions", json.dumps(chat).encode(), 500)
        else:
            await fails(house)


@pytest.mark.parametrize("exit", [KeyboardInterrupt, SystemExit, ValueError])  # GeneratorExit is how it ends well
async def test_what_a_generator_raises_as_it_is_closed_is_in_the_log(
    exit: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    closed = trio.Event()
    loop = trio.lowlevel.current_trio_token()

    def model(prompt: Prompt) -> Iterator[str]:
        try:
            while True:
                yield "a"
        finally:
            loop.run_sync_soon(closed.set)
            raise exit

    async with served(spec_of(model, "m")) as house:
        line = house.line("http1")
        body = json.dumps({"inputs": "hi", "stream": True, "parameters": {"max_new_tokens": 50_000}}).encode()
        await line.send(*house.posted(1, "/predictions/m", body))
        await line.event(1)
        line.peer.close()
        with trio.fail_after(30):
            await closed.wait()
            await house.gateway.drain()
    (record,) = [record for record in caplog.records if record.message == "a generator raised as it was closed"]
    assert record.exc_info is not None
    assert exit.__name__ in repr(record.exc_info[1])


# -- Ctrl-C of whoever embeds a gateway


def test_whose_it_is() -> None:
    assert [is_failure(exit()) for exit in (SystemExit, GeneratorExit, ValueError)] == [True] * 3
    assert not is_failure(KeyboardInterrupt())
    assert not is_failure(BaseExceptionGroup("", [ValueError(), KeyboardInterrupt()]))


EMBEDDED = """
import sys

import trio

from gateway.config import Config, ListenConfig
from gateway.gateway import Gateway
from models.adapt import blocking, spec_of


async def waits(prompt: str) -> str:
    print("called", flush=True)
    await trio.sleep_forever()


@blocking(False)
def spins(prompt: str) -> str:
    print("called", flush=True)
    while True:
        pass


async def main() -> None:
    gateway = Gateway(Config(listen=ListenConfig(port=int(sys.argv[1]))), [spec_of(globals()[sys.argv[2]], "m")])
    async with trio.open_nursery() as nursery:
        await nursery.start(gateway.serve)
        print("serving", flush=True)


try:
    trio.run(main)
except BaseException as e:
    leaves = [e]
    while isinstance(leaves[0], BaseExceptionGroup):
        leaves = list(leaves[0].exceptions)
    print("ended by", type(leaves[0]).__name__, flush=True)
"""


@pytest.mark.programs
@pytest.mark.parametrize("where", ["nowhere", "waits", "spins"])
def test_ctrl_c_ends_the_program_of_an_embedder_wherever_it_meets_it(where: str) -> None:
    port = free_port()
    model = "waits" if where == "nowhere" else where
    with subprocess.Popen(
        [sys.executable, "-c", EMBEDDED, str(port), model],
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3], start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "serving\n"
            if where != "nowhere":
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("POST", "/predictions/m", TEXT)
                assert process.stdout.readline() == "called\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "ended by KeyboardInterrupt\n"
            if where != "nowhere":
                connection.close()
        finally:
            process.kill()


STANDALONE = """
import sys

from gateway.config import Config, ListenConfig
from gateway.cli.serve import run
from models.adapt import blocking, spec_of


@blocking(False)
def leaves(prompt: str) -> str:
    raise KeyboardInterrupt


sys.exit(run(Config(listen=ListenConfig(port=int(sys.argv[1]))), [spec_of(leaves, "m")]))
"""


@pytest.mark.programs
def test_a_server_that_is_a_program_goes_on_when_a_model_raises_keyboard_interrupt() -> None:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", STANDALONE, str(port)], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[3], start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if '"serving"' in line:
                    break
            for _ in range(2):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("POST", "/predictions/m", TEXT)
                answer = connection.getresponse()
                assert (answer.status, b"incident" in answer.read()) == (424, True)
                connection.close()
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            assert process.wait() == 0
        finally:
            process.kill()
