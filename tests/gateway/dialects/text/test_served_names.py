"""Served names: how OpenAI's clients call a model besides its own name, and who else may not have such a name."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import trio

from gateway.catalog.process_model import described_fields, spec_of_fields
from gateway.config import AccessConfig, Config, OpenAIConfig, RepositoryConfig, V2Config
from gateway.config.problem import ConfigError
from gateway.errors import Conflict
from gateway.gateway import Gateway
from gateway.testing import in_memory_processes
from models.adapt import adapt, spec_of
from models.messages import Family, InferRequest, Prompt
from models.spec import Model, ModelSpec
from tests.gateway.access.asked import BEARER, alice, keys_of
from tests.gateway.dialects.text.test_lmi_forms import KINDS, ask, text_spec
from tests.gateway.dialects.text.test_openai_paths import error_of, upgraded
from tests.gateway.promises import House, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, COMPLETIONS: {"prompt": "Hi"}}
LLAMA, GPT = "org/llama-3.1:8b", "gpt-4o"
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


async def says_its_name(prompt: Prompt) -> AsyncIterator[str]:
    yield "llama"


async def other(prompt: Prompt) -> str:
    return "other"


async def adds(request: InferRequest) -> None:
    return None


def llama(*names: str, name: str = "chat", **options: Any) -> ModelSpec:
    return text_spec(says_its_name, name, served_names=names or (LLAMA, GPT), **options)


async def post(house: House, path: str, model: str | None, **more: Any) -> tuple[int, Any]:
    status, _, body = await ask(house, path, {**ASKED[path], "model": model, **more})
    return status, json.loads(body)


async def get(house: House, path: str, *headers: tuple[str, str], kind: str = "http1") -> tuple[int, Any]:
    status, _, body = await house.ask(path, None, *headers, method=b"GET", line=house.line(kind))
    return status, json.loads(body)


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


# -- calls -------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("name", ["chat", LLAMA, GPT])
async def test_a_model_answers_by_each_of_its_names_and_echoes_the_one_that_was_asked(
    path: str, name: str, autojump_clock: Any
) -> None:
    async with serving(llama(), text_spec(other, "other")) as house:
        status, answer = await post(house, path, name)
        assert (status, answer["model"], text_of(answer)) == (200, name, "llama")
        _, _, stream = await ask(house, path, {**ASKED[path], "model": name, "stream": True})
        chunks = [json.loads(line[6:]) for line in stream.decode().split("\n\n") if line.startswith("data: {")]
        assert {chunk["model"] for chunk in chunks} == {name}


@BOTH
async def test_a_served_name_that_stands_for_no_model_elsewhere_is_the_models(path: str, autojump_clock: Any) -> None:
    config = Config(openai=OpenAIConfig(default_model="other"))
    async with serving(llama("tgi"), text_spec(other, "other"), config=config) as house:
        assert text_of((await post(house, path, "tgi"))[1]) == "llama"
        assert text_of((await post(house, path, "dummy"))[1]) == "other"
        assert text_of((await post(house, path, None))[1]) == "other"


@BOTH
async def test_a_model_of_tensors_is_refused_by_its_served_name_too(path: str, autojump_clock: Any) -> None:
    tensors = spec_of(adds, "sums", served_names=("org/sums",))
    async with serving(llama(), tensors) as house:
        status, answer = await post(house, path, "org/sums")
        assert (status, answer["error"]["param"]) == (400, "model")
        assert "'sums' speaks tensor" in answer["error"]["message"]


@BOTH
async def test_an_unknown_model_is_told_before_any_other_member_is_read(path: str, autojump_clock: Any) -> None:
    async with serving(llama()) as house:
        status, answer = await post(house, path, "org/llama", temperature="hot", tools=3, n=-1)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        status, answer = await post(house, path, LLAMA, temperature="hot")
        assert (status, answer["error"]["param"]) == (400, "temperature")


@BOTH
async def test_a_request_without_a_model_has_the_only_one_or_is_told_which_there_are(path: str, autojump_clock: Any) -> None:
    async with serving(llama(), spec_of(adds, "sums")) as house:
        status, answer = await post(house, path, None)
        assert (status, answer["model"]) == (200, "chat")  # several names are one model
    async with serving(llama(), text_spec(other, "other")) as house:
        status, answer = await post(house, path, None)
        assert (status, answer["error"]["param"]) == (400, "model")
        assert "chat, other" in answer["error"]["message"]


async def test_the_access_line_has_the_models_own_name(autojump_clock: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    async with serving(llama()) as house:
        assert (await post(house, CHAT, LLAMA))[0] == 200
    assert [record.model for record in caplog.records if record.getMessage() == "exchange"] == ["chat"]


# -- the list ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_list_has_every_name_and_the_own_name_behind_it(
    kind: str, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.9)
    tensors = spec_of(adds, "sums", served_names=("org/sums",))
    async with serving(llama(context=12), text_spec(other, "other"), tensors) as house:
        plain = {"object": "model", "created": 1_700_000_000, "owned_by": "everywire"}
        served = {**plain, "root": "chat", "max_model_len": 12}
        told = [
            {"id": "chat", **plain, "max_model_len": 12},
            {"id": GPT, **served},
            {"id": LLAMA, **served},
            {"id": "other", **plain},
        ]
        assert await get(house, "/v1/models", kind=kind) == (200, {"object": "list", "data": told})
        for one in told:
            for path in (one["id"], quote(one["id"], safe=""), quote(one["id"], safe="/:")):
                assert await get(house, f"/v1/models/{path}", kind=kind) == (200, one)
        # the list is of models that answer here, a question for one is of any
        assert await get(house, "/v1/models/org/sums", kind=kind) == (200, {"id": "org/sums", **plain, "root": "sums"})


@pytest.mark.parametrize("name", ["/mnt/models/llama", "a b", "ünï/códe", "100%", "a%2Fb", "..", "a//b/", "?#", "x" * 256])
async def test_any_printable_text_is_a_name(name: str, autojump_clock: Any) -> None:
    async with serving(llama(name)) as house:
        status, answer = await post(house, CHAT, name)
        assert (status, answer["model"]) == (200, name)
        for path in (quote(name, safe=""), quote(name, safe="/")):
            status, told = await get(house, f"/v1/models/{path}")
            assert (status, told["id"], told["root"]) == (200, name, "chat")


@pytest.mark.parametrize("path", ["org/llama", "chat/", "/chat", "org%2Fllama", "chat/ready"])
async def test_a_name_that_nobody_has_is_no_model(path: str, autojump_clock: Any) -> None:
    async with serving(llama()) as house:
        status, answer = await get(house, f"/v1/models/{path}")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


# -- all others know own names -----------------------------------------------------------------------------------------


async def test_all_other_routes_know_own_names_alone(autojump_clock: Any) -> None:
    async with serving(llama(GPT)) as house:
        for path in (f"/v2/models/{GPT}", f"/v2/models/{GPT}/ready", f"/v2/models/{GPT}/config"):
            assert (await get(house, path))[0] == 404
        assert (await get(house, "/v2/models")) == (200, {"models": ["chat"]})
        for path in (f"/predictions/{GPT}", f"/models/{GPT}/invoke", f"/v2/models/{GPT}/generate"):
            assert (await ask(house, path, {"inputs": "Hi", "text_input": "Hi"}))[0] == 404
        assert (await ask(house, f"/endpoints/{GPT}/invocations", {"inputs": "Hi"}))[0] == 400
        for path in ("/predictions/chat", "/models/chat/invoke"):
            assert (await ask(house, path, {"inputs": "Hi"}))[0] == 200
    with pytest.raises(ConfigError, match=r"openai\.default_model: no model 'gpt-4o'"):
        Gateway(Config(openai=OpenAIConfig(default_model=GPT)), [llama(GPT)])


@pytest.mark.parametrize(("name", "code"), [(GPT, "unknown_url"), ("chat", "unknown_url"), ("gpt-5", "model_not_found")])
async def test_a_websocket_where_there_is_none_is_told_the_nearer_reason(name: str, code: str, autojump_clock: Any) -> None:
    async with serving(llama()) as house:
        assert error_of(await upgraded(house, f"/v1/realtime?model={name}"), 404)["code"] == code


@pytest.mark.parametrize("models", ["other", "other,gpt-*,org/*"])
async def test_a_key_that_may_not_see_the_model_cannot_tell_a_served_name_from_one_that_is_not_there(
    models: str, tmp_path: Path, autojump_clock: Any
) -> None:
    config = Config(access=AccessConfig(keys_file=keys_of(tmp_path, alice(f"models={models}"))))
    (key,) = [(name.decode(), value.decode()) for name, value in BEARER]
    async with serving(llama(), text_spec(other, "other", served_names=("mine",)), config=config) as house:
        for there, absent in ((GPT, "gpt-5o"), (LLAMA, "org/llama-3.2:8b")):
            answers = []
            for name in (there, absent):
                for path in (CHAT, COMPLETIONS):
                    status, _, body = await ask(house, path, {**ASKED[path], "model": name}, key)
                    assert status == 404
                    answers.append(body.decode().replace(name, "NAME"))
                status, answer = await get(house, f"/v1/models/{name}", key)
                assert status == 404
                answers.append(json.dumps(answer).replace(name, "NAME"))
            assert answers[:3] == answers[3:]
            assert "chat" not in "".join(answers).replace("chat/completions", "")
        _, listed = await get(house, "/v1/models", key)
        assert [one["id"] for one in listed["data"]] == ["mine", "other"]
        status, _, body = await ask(house, CHAT, {**ASKED[CHAT], "model": "mine"}, key)
        assert (status, json.loads(body)["model"]) == (200, "mine")
        assert (await get(house, "/v1/models/mine", key))[0] == 200


# -- one name, one model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ((llama(GPT, "a"), llama("b", GPT, name="second")), "both have the served name 'gpt-4o'"),
        ((llama("second"), llama("b", name="second")), "'chat' has the served name 'second', which is the name of another"),
    ],
)
def test_a_name_that_two_models_have_is_an_error_of_the_configuration_that_names_both(
    specs: tuple[ModelSpec, ...], said: str, reverse: bool
) -> None:
    with pytest.raises(ConfigError) as caught:
        Gateway(Config(), reversed(specs) if reverse else specs)
    assert said in str(caught.value)
    assert "'chat'" in str(caught.value)
    assert "'second'" in str(caught.value)


async def test_a_models_own_name_may_be_among_its_served_ones(autojump_clock: Any) -> None:
    async with serving(llama("chat", GPT, GPT)) as house:
        _, listed = await get(house, "/v1/models")
        assert [(one["id"], one.get("root")) for one in listed["data"]] == [("chat", None), (GPT, "chat")]


BAD = ["", "x" * 257, "a\nb", "tab\t", "\x7f", "\u200b", "\ud800", "\u2028"]


@pytest.mark.parametrize("bad", BAD)
def test_a_text_that_does_not_print_is_no_name(bad: str) -> None:
    with pytest.raises(ValueError, match="served_names: each is 1 to 256 printable characters"):
        llama("good", bad)


@pytest.mark.parametrize("bad", [["a"], "a", (1,)])
def test_names_are_a_tuple_of_texts(bad: Any) -> None:
    with pytest.raises(ValueError, match="served_names"):
        text_spec(says_its_name, served_names=bad)


# -- models in processes, and of folders -------------------------------------------------------------------------------


async def test_a_model_in_processes_has_its_names_from_its_code() -> None:
    spec, _ = in_memory_processes(llama(context=12), instances=2)
    assert spec.served_names == (LLAMA, GPT)
    described = msgspec.msgpack.decode(msgspec.msgpack.encode(described_fields(spec)))  # as a process of its own tells it
    assert spec_of_fields("chat", described, spec.load).served_names == (LLAMA, GPT)
    async with serving(spec) as house:
        status, answer = await post(house, CHAT, LLAMA)
        assert (status, answer["model"], text_of(answer)) == (200, LLAMA, "llama")
        assert (await get(house, "/v1/models/org%2Fllama-3.1%3A8b"))[1]["max_model_len"] == 12


CODE = """
def model(prompt: str) -> str:
    return "from a folder"
"""


def folder(root: Path, name: str, *names: str) -> None:
    (made := root / name).mkdir(exist_ok=True)
    (made / "model.py").write_text(CODE)
    (made / "model.toml").write_text(f"served_names = {json.dumps(names)}\n")


def controlled(root: Path) -> Config:
    at = (str(root),)
    return Config(v2=V2Config(model_control=True), repository=RepositoryConfig(roots=at, code=at, unload_timeout=5.0))


async def change(house: House, what: str, name: str) -> tuple[int, Any]:
    status, _, body = await house.ask(f"/v2/repository/models/{name}/{what}", b"")
    return status, json.loads(body)


async def ids(house: House) -> list[str]:
    return [one["id"] for one in (await get(house, "/v1/models"))[1]["data"]]


async def test_the_names_of_a_model_of_a_folder_come_and_go_with_it(tmp_path: Path) -> None:
    folder(tmp_path, "late", "org/late:1")
    async with serving(llama(), config=controlled(tmp_path)) as house:
        for _ in range(2):
            assert (await post(house, CHAT, "org/late:1"))[0] == 404
            assert (await get(house, "/v1/models/org/late:1"))[0] == 404
            assert (await change(house, "load", "late"))[0] == 200
            status, answer = await post(house, CHAT, "org/late:1")
            assert (status, answer["model"], text_of(answer)) == (200, "org/late:1", "from a folder")
            assert (await get(house, "/v1/models/org/late:1"))[1]["root"] == "late"
            assert (await change(house, "unload", "late"))[0] == 200
        assert await ids(house) == ["chat", GPT, LLAMA]


async def test_a_new_version_of_a_folder_brings_its_own_names(tmp_path: Path) -> None:
    folder(tmp_path, "late", "first", "both")
    async with serving(llama(), config=controlled(tmp_path)) as house:
        await change(house, "load", "late")
        assert await ids(house) == ["both", "chat", "first", GPT, "late", LLAMA]
        folder(tmp_path, "late", "both", "second")
        assert (await change(house, "load", "late"))[0] == 200
        assert await ids(house) == ["both", "chat", GPT, "late", LLAMA, "second"]
        folder(tmp_path, "late", GPT)
        status, answer = await change(house, "load", "late")
        assert (status, "models 'chat' and 'late' both have the served name 'gpt-4o'" in answer["error"]) == (409, True)
        assert await ids(house) == ["both", "chat", GPT, "late", LLAMA, "second"]  # the old version goes on


@pytest.mark.parametrize(
    ("name", "names", "said"),
    [
        ("late", ("new", GPT), "models 'chat' and 'late' both have the served name 'gpt-4o'"),
        ("late", ("chat",), "model 'late' has the served name 'chat', which is the name of another model"),
        (GPT, (), "model 'gpt-4o' cannot be loaded: that is a served name of model 'chat'"),
    ],
)
async def test_a_load_that_claims_a_taken_name_is_refused_and_leaves_nothing(
    name: str, names: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    folder(tmp_path, name, *names)
    async with serving(llama(), config=controlled(tmp_path)) as house:
        status, answer = await change(house, "load", name)
        assert (status, said in answer["error"]) == (409, True), answer
        assert await ids(house) == ["chat", GPT, LLAMA]
        assert house.gateway.repository.names == []
        assert text_of((await post(house, CHAT, GPT))[1]) == "llama"


async def test_the_names_of_a_configured_model_wait_for_it_while_it_is_unloaded(tmp_path: Path) -> None:
    folder(tmp_path, "late", GPT)
    async with serving(llama(), text_spec(other, "other"), config=controlled(tmp_path)) as house:
        assert (await change(house, "unload", "chat"))[0] == 200
        assert (await post(house, CHAT, GPT))[0] == 404
        assert (await change(house, "load", "late"))[0] == 409
        assert (await change(house, "load", "chat"))[0] == 200
        assert (await post(house, CHAT, GPT))[0] == 200


async def test_of_two_models_that_load_at_once_the_first_has_the_name(autojump_clock: Any) -> None:
    gate = trio.Event()

    @asynccontextmanager
    async def slowly() -> AsyncIterator[Model]:
        await gate.wait()
        yield adapt(other)[0]

    slow = ModelSpec(name="slow", family=Family.TEXT, load=slowly, served_names=("new",))
    async with serving(llama()) as house:
        supervisor = house.gateway.supervisor
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.load, slow)
            await house.still()
            for spec in (text_spec(other, "late", served_names=("new",)), text_spec(other, "new")):
                with pytest.raises(Conflict, match="'slow'"):
                    await supervisor.load(spec)
            assert (await post(house, CHAT, "new"))[0] == 404  # until its model is there
            gate.set()
        assert (await post(house, CHAT, "new"))[0] == 200
        await supervisor.unload("slow")
        await supervisor.load(text_spec(other, "new"))
        assert await ids(house) == ["chat", GPT, "new", LLAMA]
        await supervisor.unload("new")


async def test_a_reload_with_other_names_takes_none_of_another_model(autojump_clock: Any) -> None:
    async with serving(llama(), text_spec(other, "other", served_names=("taken",))) as house:
        with pytest.raises(Conflict, match="both have the served name 'taken'"):
            await house.gateway.reload("chat", llama("taken"))
        assert await ids(house) == ["chat", GPT, LLAMA, "other", "taken"]
        await house.gateway.reload("chat", llama(GPT, "newest"))
        assert await ids(house) == ["chat", GPT, "newest", "other", "taken"]
        assert (await post(house, CHAT, "newest"))[0] == 200
        assert (await post(house, CHAT, LLAMA))[0] == 404
