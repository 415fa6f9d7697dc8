"""Refusals before a handler is asked: in the words of the route, and readable by a client that is still sending."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import trio

from gateway.client import post
from gateway.config import Config, DrainConfig, LimitsConfig, SageMakerConfig
from gateway.gateway import Gateway
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.library.echo import Echo
from protocols.events import End, Head, Request

MiB = 1024**2
CONFIG = Config(
    limits=LimitsConfig(total_bytes=64 * MiB),
    sagemaker=SageMakerConfig(multi_model=True),
    drain=DrainConfig(delay=60.0),
)


def draining(gateway: Gateway) -> None:
    gateway.begin_drain()


def full(gateway: Gateway) -> None:
    assert gateway.budget.try_reserve(56 * MiB)  # above 75 percent of the budget, no request begins


def platform(headers: dict[bytes, bytes], body: dict[str, Any]) -> bool:
    return headers[b"x-amzn-errortype"] == b"ServiceUnavailable" and list(body) == ["Message"]


def bidirectional(headers: dict[bytes, bytes], body: dict[str, Any]) -> bool:
    return headers[b"x-amzn-errortype"] == b"ServiceUnavailableError" and "Message" in body


def container(headers: dict[bytes, bytes], body: dict[str, Any]) -> bool:
    return headers[b"retry-after"] == b"1" and (body["code"], body["type"]) == (503, "ServiceUnavailableException")


def generation(headers: dict[bytes, bytes], body: dict[str, Any]) -> bool:
    return headers[b"retry-after"] == b"1" and body["code"] == 503


def inference(headers: dict[bytes, bytes], body: dict[str, Any]) -> bool:
    return headers[b"retry-after"] == b"1" and list(body) == ["error"]


@pytest.mark.parametrize("why", [draining, full])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("POST /endpoints/echo/invocations", platform),
        ("POST /endpoints/echo/invocations-response-stream", platform),
        ("POST /endpoints/echo/invocations-bidirectional-stream", bidirectional),
        ("POST /models", container),
        ("GET /models", container),
        ("GET /models/echo", container),
        ("DELETE /models/echo", container),
        ("POST /models/echo/invoke", container),
        ("POST /invocations", generation),
        ("POST /predictions/echo", generation),
        ("POST /v2/models/echo/infer", inference),
    ],
)
async def test_a_server_that_takes_nothing_new_says_so_in_the_words_of_the_route(
    why: Callable[[Gateway], None], call: str, words: Callable[[dict[bytes, bytes], dict[str, Any]], bool]
) -> None:
    method, _, path = call.partition(" ")
    async with memory_gateway([spec_of(Echo(), "echo")], CONFIG, chance=lambda: 0.0) as served:
        why(served.gateway)
        await trio.testing.wait_all_tasks_blocked()
        peer = served.http2()
        head = Request(stream=1, head=Head(method=method.encode(), target=path.encode(), authority=b"localhost"))
        await peer.send(head, End(stream=1))
        status, headers, body = await peer.read_answer(1)
        assert status == 503
        assert words(headers, json.loads(body))
        peer.close()


async def test_who_sends_far_beyond_a_limit_can_send_on_and_reads_why(autojump_clock: Any) -> None:
    async with memory_gateway([spec_of(Echo(), "echo")], CONFIG, chance=lambda: 0.0) as served:
        peer = served.http1()
        with trio.fail_after(0.5):  # on the clock that stands still while anything can run
            await peer.send(*post(1, "/endpoints/echo/invocations", bytes(32 * MiB)))  # fails where it is cut off
            status, headers, body = await peer.read_answer(1)
        assert (status, headers[b"x-amzn-errortype"]) == (400, b"ValidationError")
        assert b"sagemaker.body" in body
        assert served.gateway.budget.used == 0
        peer.close()
