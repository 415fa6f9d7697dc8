"""The OpenAPI document: valid, of every route of v2 and no other, and true of what is really asked and answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway.config import Config, RepositoryConfig, V2Config
from gateway.core.route import WEBSOCKET
from gateway.dialects.v2.operations import OPERATIONS, document
from gateway.gateway import Gateway
from models.adapt import spec_of
from models.library.tensors import identity
from models.messages import DATATYPES, Family
from protocols.v2 import schema
from protocols.v2.typed_request import _Head, _Input, _Output
from tests.gateway.dialects.aws.test_mme_api import folder
from tests.gateway.promises import House, Probe, serving, silent

DOCUMENT = document("1.2.3")
TENSOR = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2.5]}
FILLED = {"name": "probe", "version": "1", "repository": "any", "region": "some"}
CALLS = [
    pytest.param(path, method.upper(), id=f"{method}-{path}") for path, at in DOCUMENT["paths"].items() for method in at
]


def config(root: Path) -> Config:
    return Config(v2=V2Config(model_control=True), repository=RepositoryConfig(roots=(str(root / "models"),)))


def check(value: Any, schema: Any) -> None:
    Draft202012Validator({"components": DOCUMENT["components"], "allOf": [schema]}).validate(value)


async def ask(house: House, method: str, path: str, body: Any = None, template: str = "") -> tuple[int, Any]:
    """One request; both it, if it is accepted, and its answer are as the document says."""
    operation = DOCUMENT["paths"][template or path][method.lower()]
    said = None if method == "GET" else b"" if body is None else json.dumps(body).encode()
    status, headers, answer = await house.ask(path, said, method=method.encode())
    answered = operation["responses"][str(status)]
    if not answer:
        assert "content" not in answered
        return status, None
    kind = headers["content-type"].partition(";")[0]
    told = json.loads(answer) if kind == "application/json" else answer
    if kind == "application/json":
        check(told, answered["content"][kind]["schema"])
    else:
        assert kind in answered["content"]
    if status == 200 and body is not None:
        check(body, operation["requestBody"]["content"]["application/json"]["schema"])
    return status, told


# -- the document


def test_it_is_valid() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()
    assert DOCUMENT["info"]["version"] == "1.2.3"


def test_every_route_of_v2_is_in_it_and_no_other() -> None:
    there = {
        (row.method, row.path)
        for row in Gateway(Config()).router.rows
        if (row.path == "/v2" or row.path.startswith("/v2/")) and row.method != WEBSOCKET
    }
    documented = {(method.upper(), path) for path, at in DOCUMENT["paths"].items() for method in at}
    assert there == documented


def test_every_error_is_the_one_that_v2_has() -> None:
    for operation in OPERATIONS:
        for answer in operation.answers:
            if answer.status >= 400 and answer.status != 503:
                assert [body.type.__name__ for body in answer.bodies] == ["ErrorReply"], operation.name


async def test_it_is_served(tmp_path: Path) -> None:
    async with serving(config=config(tmp_path)) as house:
        for _ in range(2):
            status, told = await ask(house, "GET", "/v2/openapi.json")
            assert (status, told["paths"]) == (200, json.loads(json.dumps(DOCUMENT["paths"])))


# -- requests and replies


@pytest.mark.parametrize(("template", "method"), CALLS)
async def test_an_empty_request_is_answered_as_it_says(template: str, method: str, tmp_path: Path) -> None:
    path = template.format_map(FILLED)
    probe = spec_of(identity, "probe", family=Family.TENSOR)
    async with serving(probe, config=config(tmp_path)) as house:
        await ask(house, method, path, template=template)
        await ask(house, method, path.replace("probe", "nobody"), template=template)
        if path.endswith("/unload"):
            await ask(house, "POST", path.replace("unload", "load"), template=template.replace("unload", "load"))


async def test_tensors_are_answered_as_it_says(tmp_path: Path) -> None:
    async with serving(spec_of(identity, "probe", family=Family.TENSOR), config=config(tmp_path)) as house:
        infer, at = "/v2/models/probe/infer", "/v2/models/{name}/infer"
        every = [
            {"name": name, "datatype": name, "shape": [1], "data": ["a"] if name == "BYTES" else [name == "BOOL" or 1]}
            for name in DATATYPES
        ]
        nested = {"name": "n", "datatype": "INT8", "shape": [2, 0], "data": [[], []]}
        nothing = {"name": "f", "datatype": "FP16", "shape": [], "data": [None], "parameters": {"a": True}}
        for body in (
            {"inputs": [TENSOR]},
            {"inputs": every, "id": "7", "model_name": "probe"},
            {"inputs": [nested, nothing], "outputs": [{"name": "n"}, {"name": "f"}], "parameters": {"p": 1.5, "q": "s"}},
        ):
            status, told = await ask(house, "POST", infer, body, at)
            assert status == 200, told
        binary = {"inputs": [TENSOR], "outputs": [{"name": "x", "parameters": {"binary_data": True}}]}
        status, told = await ask(house, "POST", infer, binary, at)
        length = told.index(b"\0\0\x80?")
        reply = DOCUMENT["paths"][at]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        check(json.loads(told[:length]), reply)
        assert np.frombuffer(told[length:], np.float32).tolist() == [1, 2.5]
        calls: dict[str, Any] = {
            "generate": {"x": [1, 2.5], "id": "7"},
            "generate_stream": {"x": 3},
            "infer_stream": {"inputs": every},
        }
        for call, asked in calls.items():
            path = f"/v2/models/{{name}}/{call}"
            status, told = await ask(house, "POST", path.format(name="probe"), asked, path)
            assert status == 200, told
        status, told = await ask(house, "GET", "/v2/models/probe/stats", template="/v2/models/{name}/stats")
        assert told["model_stats"][0]["inference_count"] == 7


async def test_management_is_answered_as_it_says(tmp_path: Path) -> None:
    folder(tmp_path, "a", 'factory = "identity"\n')
    async with serving(Probe(silent, "probe").spec("lmi-http1"), config=config(tmp_path)) as house:
        load, unload = "/v2/repository/models/{name}/load", "/v2/repository/models/{name}/unload"
        calls: list[tuple[str, Any, int]] = [
            ("/v2/repository/index", {"ready": False}, 200),
            (load, {"parameters": {}}, 200),
            ("/v2/repository/index", {}, 200),
            (unload, {"parameters": {"unload_dependents": True}}, 200),
            ("/v2/logging", {"log_verbose_level": None}, 200),
            (load, {"parameters": {"config": ""}}, 400),
            ("/v2/logging", {"log_file": "x"}, 400),
        ]
        for path, body, expected in calls:
            status, told = await ask(house, "POST", path.format(name="a"), body, path)
            assert status == expected, told


@pytest.mark.parametrize(
    ("read", "shown"),
    [
        (_Head, schema.InferRequest),
        (_Input, schema.InferInput),
        (_Output, schema.RequestedOutput),
    ],
)
def test_it_has_the_members_that_the_codec_reads(read: Any, shown: Any) -> None:
    def members(struct: Any) -> dict[str, bool]:
        return {field.name: field.required for field in msgspec.structs.fields(struct)}

    assert members(read) == members(shown)
    assert set(get_args(schema.Datatype)) == set(DATATYPES)


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": [{**TENSOR, "shape": [-1]}]},
        {"inputs": [{**TENSOR, "shape": ["2"]}]},
        {"inputs": [{**TENSOR, "datatype": "fp32"}]},
        {"inputs": [{**TENSOR, "data": 1}]},
        {"inputs": [{**TENSOR, "parameters": {"a": {}}}]},
        {"inputs": TENSOR},
        {"inputs": [TENSOR], "id": 7},
        {"outputs": []},
    ],
)
async def test_what_its_schema_refuses_the_server_refuses(body: Any, tmp_path: Path) -> None:
    schema = DOCUMENT["paths"]["/v2/models/{name}/infer"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    with pytest.raises(Exception, match="Failed validating"):
        check(body, schema)
    async with serving(spec_of(identity, "probe", family=Family.TENSOR), config=config(tmp_path)) as house:
        status, _ = await ask(house, "POST", "/v2/models/probe/infer", body, "/v2/models/{name}/infer")
        assert status == 400
