"""The operator plane's OpenAPI document: valid, of every route and no other, and true of what is asked and answered."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from gateway.config import Config, ListenConfig, OperatorConfig, RepositoryConfig
from gateway.gateway import Gateway
from gateway.operator import app
from gateway.operator.app import operator_app
from gateway.operator.operations import OPEN, OPERATIONS, document
from gateway.testing.stories.talk import Leave
from gateway.version import version
from tests.gateway.operator.operators import Operator
from tests.gateway.promises import Probe, serving, silent

DOCUMENT = document(version())
NO_ROOTS = Config(repository=RepositoryConfig(roots=()))


def check(value: Any, schema: Any) -> None:
    Draft202012Validator({"components": DOCUMENT["components"], "allOf": [schema]}).validate(value)


def test_it_is_valid() -> None:
    OpenAPIV31SpecValidator(DOCUMENT).validate()


def test_it_has_every_route_and_no_other() -> None:
    routes = [
        route for route in operator_app(Gateway(Config(listen=ListenConfig(port=-1)))).routes if isinstance(route, Route)
    ]
    served = {(route.path.replace(":path", ""), m) for route in routes for m in (route.methods or set()) - {"HEAD"}}
    assert {(path, method.upper()) for path, at in DOCUMENT["paths"].items() for method in at} == served


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
async def test_what_needs_a_token_says_so_and_nothing_else(operation: Any) -> None:
    (path,) = operation.paths
    said = DOCUMENT["paths"][path][operation.method.lower()]
    assert ("security" in said, "401" in said["responses"]) == ((operation.name not in OPEN),) * 2
    gateway = Gateway(Config(listen=ListenConfig(port=-1), operator=OperatorConfig(token="correct-horse-battery")))
    answer = await Operator(gateway).ask(operation.method, path)
    assert (answer.status == 401) is (operation.name not in OPEN)


CALLS = [
    ("GET", "/openapi.json", None, 200), ("GET", "/health/live", None, 200), ("GET", "/health/ready", None, 200),
    ("GET", "/models", None, 200), ("GET", "/models/{name}", None, 200), ("GET", "/streams", None, 200), ("GET", "/drain", None, 200),
    ("POST", "/play/ticket", {}, 200), ("GET", "/incidents", None, 200), ("GET", "/stats", None, 200), ("GET", "/history", None, 200), ("GET", "/history?seconds=x", None, 400),
    ("GET", "/log", None, 200), ("PUT", "/log", {"level": "info"}, 200), ("PUT", "/log", {"level": 1}, 400),
    ("POST", "/models/{name}/load", {}, 200), ("POST", "/models/{name}/load", {"x": 1}, 400),
    ("POST", "/models/{name}/instances/{number}/restart", {}, 409), ("POST", "/models/{name}/reload", {"patience": 1.5}, 200), ("POST", "/drain", {"timeout": 5, "wait": True}, 200),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status"), CALLS)
async def test_what_is_asked_and_answered_is_as_it_says(
    method: str, path: str, body: Any, status: int, autojump_clock: Any
) -> None:
    async with serving(Probe(silent).spec("json-http1"), config=NO_ROOTS) as house:
        live = await house.call("json-http1")
        await house.still()
        answer = await Operator(house.gateway).ask(
            method, path.format(name="probe", number=0), b"" if body is None else body
        )
        assert answer.status == status
        operation = DOCUMENT["paths"][path.partition("?")[0]][method.lower()]
        check(answer.json, operation["responses"][str(status)]["content"]["application/json"]["schema"])
        if status == 200 and body is not None:
            check(body, operation["requestBody"]["content"]["application/json"]["schema"])
        await live.leave(Leave.RESET)


def test_the_document_is_made_once() -> None:
    assert app._document("1") is app._document("1")
