"""Warm-up: the first calls of a model are made before any client's, and one that fails is a failed load."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from gateway.catalog.factories import load_spec
from gateway.catalog.folder import find_folder, make_spec, read_folder
from gateway.config import ModelConfig
from gateway.config.problem import ConfigError
from gateway.workers.states import State
from models.adapt import spec_of
from models.messages import Family, Part, PartKind, Prompt, Token
from models.session import Session
from models.spec import Model, ModelSpec, Restart, RestartPolicy
from tests.gateway.promises import serving

POLICY = RestartPolicy(intensity=1, backoff=1.0, jitter=0.0)


class Diary:
    """A text model that writes down what it was asked, and whether anybody was served before."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.fails = 0
        self.hangs = False

    @asynccontextmanager
    async def load(self) -> AsyncIterator[Model]:
        self.asked.append(("load", ""))
        yield self

    async def __call__(self, session: Session[Prompt, Token]) -> None:
        prompt = await session.receive()
        self.asked.append((session.call.dialect, prompt.text))
        if self.hangs:
            await trio.sleep_forever()
        if self.fails:
            self.fails -= 1
            raise ValueError("cold")
        await session.send(Token(text="warm"))
        await session.receive()  # reads on, as many loops do

    def spec(self, warmup: Any, **more: Any) -> ModelSpec:
        return ModelSpec(name="m", family=Family.TEXT, load=self.load, restart=POLICY, warmup=warmup, **more)


async def ask(house: Any) -> tuple[int, bytes]:
    status, _, body = await house.ask("/predictions/m", b'{"inputs": "client"}')
    return status, body


async def test_a_model_is_called_with_its_warm_up_before_any_client_and_after_each_load(autojump_clock: MockClock) -> None:
    diary = Diary()
    async with serving(diary.spec((Prompt(text="one"), Prompt(text="two")))) as house:
        assert await ask(house) == (200, b'{"generated_text": "warm"}')
        assert diary.asked == [("load", ""), ("warmup", "one"), ("warmup", "two"), ("lmi", "client")]
        assert house.gateway.models["m"].slots_in_use == 0


async def test_a_warm_up_that_fails_is_a_failed_load_and_tried_again(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary()
    diary.fails = 1
    async with serving(diary.spec([Prompt(text="one")])) as house:
        status = house.gateway.models["m"]
        assert status.state is State.RESTARTING
        assert status.reason == "WarmupFailed: warm-up request 1 of 1 raised ValueError: cold"
        assert (await ask(house))[0] == 503
        await trio.sleep(1.1)
        assert (await ask(house))[0] == 200


async def test_a_model_that_reads_on_in_a_task_of_its_own_has_ended_as_well_as_in_a_call(autojump_clock: MockClock) -> None:
    async def model(session: Session[Prompt, Token]) -> None:
        async def read() -> None:
            while True:
                await session.receive()
                await session.send(Token(text="warm"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)

    async with serving(spec_of(model, "m", warmup=(Prompt(text="one"),))) as house:
        assert house.gateway.models["m"].reason == ""
        assert await ask(house) == (200, b'{"generated_text": "warm"}')


async def test_a_warm_up_that_never_works_gives_the_model_up(autojump_clock: MockClock) -> None:
    diary = Diary()
    diary.fails = 1000
    async with serving(diary.spec([Prompt(text="one")])) as house:
        await trio.sleep(10)
        assert house.gateway.models["m"].state is State.FAILED


@pytest.mark.parametrize(
    ("contains", "why"),
    [
        (suppress(Exception), "WarmupFailed: warm-up request 1 of 1 raised ValueError: cold"),
        (trio.move_on_after(5), "RuntimeError: load() ended its context before its model was ready"),
    ],
)
async def test_a_load_that_contains_the_end_of_its_warm_up_has_failed_of_it(
    contains: Any, why: str, autojump_clock: MockClock
) -> None:
    diary = Diary()
    diary.fails, diary.hangs = 1, isinstance(contains, trio.CancelScope)

    @asynccontextmanager
    async def load() -> AsyncIterator[Model]:
        with contains:
            yield diary

    policy = RestartPolicy(kind=Restart.TEMPORARY)
    spec = ModelSpec(name="m", family=Family.TEXT, load=load, warmup=[Prompt(text="one")], restart=policy)
    async with serving(spec) as house:
        status = house.gateway.models["m"]
        assert (status.state, status.reason) == (State.FAILED, why)
        await house.gateway.drain()


async def test_a_warm_up_that_hangs_ends_at_the_load_timeout(autojump_clock: MockClock) -> None:
    diary = Diary()
    diary.hangs = True
    async with serving(diary.spec([Prompt(text="one")], load_timeout=7.0)) as house:
        assert "took longer than 7 s" in house.gateway.models["m"].reason


async def test_a_function_of_the_author_warms_the_model_as_it_likes(autojump_clock: MockClock) -> None:
    seen: list[Any] = []

    async def warm(model: Model) -> None:
        seen.append(model)
        if len(seen) == 1:
            raise OSError("no kernels")

    diary = Diary()
    async with serving(diary.spec(warm)) as house:
        assert house.gateway.models["m"].reason == "WarmupFailed: the warm-up raised OSError: no kernels"
        await trio.sleep(1.1)
        assert (seen, house.gateway.models["m"].ready) == ([diary, diary], True)


def test_the_bodies_of_a_configuration_are_messages_of_the_models_family() -> None:
    def configured(factory: str, *bodies: str) -> Any:
        return load_spec("m", ModelConfig(factory=factory, warmup=bodies)).warmup

    assert configured("models.library.echo:Echo", "hi") == (Part(data=b"hi", kind=PartKind.UTF8),)
    plain, full = configured(
        "models.library.lm:LanguageModel.load", "hi", '{"inputs": "you", "parameters": {"max_new_tokens": 3}}'
    )
    assert (plain.text, full.text, full.parameters.max_new_tokens) == ("hi", "you", 3)
    body = '{"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}]}'
    (request,) = configured("models.library.tensors:identity", body)
    assert request.inputs[0].data.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("factory", "body", "said"),
    [
        ("models.library.tensors:identity", "{", "models.m: .*warmup: request 2: "),
        ("models.library.lm:LanguageModel.load", '{"inputs": 7}', "models.m: .*warmup: request 2: "),
    ],
)
def test_a_body_that_no_client_could_send_is_a_mistake_of_the_configuration(factory: str, body: str, said: str) -> None:
    fine = '{"inputs": []}' if "tensors" in factory else "hi"
    with pytest.raises(ConfigError, match=said):
        load_spec("m", ModelConfig(factory=factory, warmup=(fine, body)))


def test_a_folder_may_have_a_warm_up(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.toml").write_text('factory = "echo"\nwarmup = ["hi"]\n')
    path = find_folder(str(tmp_path / "m"), [str(tmp_path)])
    spec = make_spec(read_folder(path, code=(), defaults=ModelConfig(factory="")), "m", "everywire_model_x")
    assert spec.warmup == (Part(data=b"hi", kind=PartKind.UTF8),)


def test_spec_of_takes_a_warm_up() -> None:
    async def shout(prompt: Prompt) -> str:
        return prompt.text.upper()

    assert spec_of(shout, "m", warmup=[Prompt(text="x")]).warmup == [Prompt(text="x")]
