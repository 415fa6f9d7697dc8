"""No text wire passes over in silence what a client takes for a guarantee: refused by name, or named in the answer's head."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.config import Config, LMIConfig
from models.messages import Prompt
from tests.gateway.dialects.text import text_wires
from tests.gateway.dialects.text.test_lmi_forms import ask, text_spec
from tests.gateway.dialects.text.test_text_ends import config_for, over, served, spec_for
from tests.gateway.dialects.text.text_wires import SESSIONS, WAYS, Asked, Refused, Way
from tests.gateway.promises import House, serving
from tests.protocols.text_guarantees import GUARANTEES, HINTS, LISTED, NOTHING

OPENAI = [name for name, way in WAYS.items() if way.path.startswith("/v1") or name.startswith("lmi-chat")]
STATUS = {**dict.fromkeys(WAYS, 424), **dict.fromkeys(OPENAI, 400), **dict.fromkeys(SESSIONS, 0)}
STATUS |= {"generate": 400, "generate_stream": 400}


async def refused(house: House, way: Way, members: dict[str, Any]) -> Refused | None:
    """The refusal of a request with these members; None if it is answered."""
    try:
        await way.ask(house, way.path, way.kinds[0], Asked("w0 w1", members=members))
    except Refused as error:
        return error
    return None


@pytest.mark.parametrize("wire", WAYS)
async def test_every_name_of_the_list_is_refused_by_that_name_on_every_wire(wire: str) -> None:
    way = WAYS[wire]
    async with served("async generator", way) as house:
        for name, (value, *_) in GUARANTEES.items():
            error = await refused(house, way, {name: value})
            assert error is not None, f"{name} is passed over"
            assert error.status == STATUS[wire], (name, error)
            assert f"{name}: ".encode() in error.body, (name, error)
        for name, value in NOTHING.items():
            assert await refused(house, way, {name: value}) is None, name
        assert await refused(house, way, {}) is None


@pytest.mark.parametrize("members", [{"guided_regex": "a+"}, {"adapters": ["french"]}, {"watermark": True}])
async def test_a_session_behind_a_bridge_is_refused_by_its_container(members: dict[str, Any]) -> None:
    way = WAYS["websocket"]
    async with serving(spec_for("async generator", way), wire="bridge") as house:
        error = await refused(house, way, members)
        assert error is not None
        assert f"{next(iter(members))}: ".encode() in error.body


@pytest.mark.parametrize("wire", [name for name in WAYS if name not in SESSIONS])
async def test_a_model_of_parts_is_asked_for_no_more_than_a_text(wire: str) -> None:
    way = WAYS[wire]
    if way.path.startswith(("/invocations", "/models", "/endpoints")):
        return  # there it takes its parts as they come
    async with served("parts", way) as house:
        error = await refused(house, way, {"guided_json": {"type": "object"}})
        assert error is not None
        assert b"guided_json: " in error.body


@pytest.mark.parametrize("route", ["/predictions/m", "/invocations", "/models/m/invoke", "/endpoints/m/invocations"])
@pytest.mark.parametrize("tgi", [False, True])
@pytest.mark.parametrize("batch", ["auto", "disable"])
async def test_adapters_beside_the_parameters_are_refused_too(route: str, tgi: bool, batch: str) -> None:
    config = Config(lmi=LMIConfig(tgi_compat=tgi, rolling_batch=batch))
    async with serving(spec_for("async generator", WAYS["lmi-json"]), config=config) as house:
        for name, value in {"adapters": ["french"], "guided_json": {"type": "object"}, "grammar": "root"}.items():
            status, _, body = await ask(house, route, {"inputs": "x", name: value})
            assert (status, f"{name}: model 'm' does not declare".encode() in body) == (424, True), body
        assert (await ask(house, route, {"inputs": "x", "adapters": [], "nobody_knows": 1}))[0] == 200


@pytest.mark.parametrize("wire", WAYS)
async def test_what_nobody_knows_goes_on_to_the_model_and_the_head_and_a_debug_line_name_it(
    wire: str, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[Any] = []

    async def model(prompt: Prompt) -> AsyncIterator[str]:
        got.append(dict(prompt.parameters.extra))
        yield "w"

    way = WAYS[wire]
    caplog.set_level(logging.DEBUG, "gateway.dialects")
    text_wires.HEADS.clear()
    async with serving(text_spec(model, **way.spec), config=config_for(way)) as house:
        await way.ask(house, way.path, way.kinds[0], Asked("x", members={"delay_ms": 5, "priority": 3, "watermark": False}))
        await way.ask(house, way.path, way.kinds[0], Asked("x"))
        await over(house)
    assert got == [{"delay_ms": 5, "priority": 3}, {}]
    named = [record for record in caplog.records if record.message == "members passed on to the model"]
    assert [record.__dict__["members"] for record in named] == ["delay_ms, priority"]
    heads = [head.get("x-everywire-passed") for head in text_wires.HEADS]
    assert heads == ([] if wire in SESSIONS else ["delay_ms, priority", None])


@pytest.mark.parametrize("wire", OPENAI)
async def test_hints_are_passed_over_without_a_word(wire: str) -> None:
    got: list[Any] = []

    async def model(prompt: Prompt) -> AsyncIterator[str]:
        got.append(dict(prompt.parameters.extra))
        yield "w"

    way = WAYS[wire]
    text_wires.HEADS.clear()
    async with serving(text_spec(model, **way.spec), config=config_for(way)) as house:
        for name, (value, wrong) in HINTS.items():
            assert await refused(house, way, {name: value}) is None, name
            error = await refused(house, way, {name: wrong})
            assert error is not None, name
            assert (error.status, f"{name}: expected".encode() in error.body) == (400, True)
    assert got == [{}] * len(HINTS)
    assert not [head for head in text_wires.HEADS if "x-everywire-passed" in head]


@pytest.mark.parametrize("wire", WAYS)
@pytest.mark.parametrize("unsupported", ["ignore", "refuse"])
async def test_a_model_that_lists_it_in_its_parameters_gets_it(wire: str, unsupported: str) -> None:
    got: list[Any] = []

    async def model(prompt: Prompt) -> AsyncIterator[str]:
        got.append(dict(prompt.parameters.extra))
        yield "w"

    way = WAYS[wire]
    config = Config(lmi=LMIConfig(**{**way.lmi, "unsupported": unsupported}))
    values = {name: GUARANTEES[name][0] for name in LISTED if name in GUARANTEES}
    async with serving(text_spec(model, parameters=frozenset(LISTED), **way.spec), config=config) as house:
        assert await refused(house, way, values) is None
    assert got == [values]


async def test_the_head_names_at_most_16_members_in_256_bytes_and_none_that_a_field_cannot_hold() -> None:
    async with serving(text_spec()) as house:
        for names, told in (
            ([f"m{number}" for number in range(40)], ", ".join(f"m{number}" for number in range(16))),
            (["a" * 100, "b" * 100, "c" * 100], f"{'a' * 100}, {'b' * 100}"),
            (["a\r\nx: y", "é", "two words", "fine"], "fine"),
            (["x" * 300], None),
        ):
            body = {"inputs": "x", "parameters": dict.fromkeys(names, 1)}
            _, headers, _ = await ask(house, "/predictions/m", body)
            assert headers.get("x-everywire-passed") == told


async def test_the_model_is_looked_up_before_its_members_are_read() -> None:
    async with serving(text_spec()) as house:
        for path, document in (
            ("/v1/chat/completions", {"model": "gone", "messages": "x", "tools": [{}]}),
            ("/v1/completions", {"model": "gone", "prompt": "x", "guided_json": {"a": 1}}),
        ):
            assert (await ask(house, path, document))[0] == 404


async def test_the_error_of_a_chat_has_the_path_of_the_member() -> None:
    async with serving(text_spec()) as house:
        asked = {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "a+"}}
        status, _, body = await ask(house, "/v1/chat/completions", asked)
        error = json.loads(body)["error"]
        assert (status, error["param"], error["type"]) == (400, "structured_outputs.regex", "invalid_request_error")
