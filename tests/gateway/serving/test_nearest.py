"""A path that nothing answers is told which route its client meant, and costs no more for it."""

from __future__ import annotations

import json

import pytest

from gateway.client import post
from gateway.config import Config
from gateway.gateway import Gateway
from gateway.serving.nearest import nearest
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.library.echo import Echo

ROUTES = [row.path.encode() for row in Gateway(Config()).router.rows if row.kind is None and row.path.startswith("/")]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/prediction/chat", "/predictions/{name}"),
        ("/invocation", "/invocations"),
        ("/invocations/", "/invocations"),
        ("/v2/model/chat/infer", "/v2/models/{name}/infer"),
        ("/v2/models/chat/infr", "/v2/models/{name}/infer"),
        ("/v2/models/chat/version/1/infer", "/v2/models/{name}/versions/{version}/infer"),
        ("/endpoints/chat/invocation", "/endpoints/{endpoint}/invocations"),
        ("/v2/health", "/v2/health/live"),
        ("/favicon.ico", ""),
        ("/no/such/path", ""),
        ("/", ""),
        ("", ""),
        ("/predictions/" + "x" * 200, ""),
    ],
)
def test_the_route_that_is_most_alike_is_meant(path: str, meant: str) -> None:
    assert nearest(path.encode(), ROUTES).decode() == meant


async def test_a_client_is_told_the_route_with_its_method() -> None:
    async with memory_gateway([spec_of(Echo(), "echo")]) as there:
        for path, said in [("/pings", "; did you mean GET /ping?"), ("/favicon.ico", "; GET / says what is here")]:
            peer = there.http1()
            await peer.send(*post(1, path, b""))
            status, _, body = await peer.read_answer(1)
            assert (status, json.loads(body)) == (404, {"error": f"no such path: {path}{said}"})
            peer.close()
