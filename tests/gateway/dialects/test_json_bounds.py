"""JSON bodies have the same bounds on every route; memory is reserved first, and long texts are read one at a time."""

from __future__ import annotations

import gc
import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import trio
import trio.lowlevel

from gateway import client
from gateway.codecs import threads
from gateway.codecs.threads import FREE
from gateway.codecs.turns import CodecTurns, Stage
from gateway.config import Config, LimitsConfig
from gateway.dialects import json_bodies
from gateway.dialects.v2 import requests
from models.adapt import blocking, spec_of
from models.formatters import Input, TextInput
from models.messages import Family, InferRequest, InferResponse, Tensor
from models.spec import ModelSpec
from protocols.events import Frame, Opcode
from protocols.json import strict
from protocols.json.text import close_census_of
from tests.gateway.dialects.v2.test_v2_pieces import Taker, body_of
from tests.gateway.promises import House, limits, serving

MiB = 1024 * 1024
CONTAINERS, VALUES = 30, 100
FEW = limits(json_containers=CONTAINERS, json_values=VALUES)


@blocking(False)
def lm(prompt: str) -> str:
    return "an answer"


@blocking(False)
def identity(request: InferRequest) -> InferResponse:
    return InferResponse(outputs=tuple(Tensor(name=t.name, data=t.data) for t in request.inputs))


@blocking(False)
def total(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return x.sum(keepdims=True)


def from_json(item: Input, **_: Any) -> TextInput:
    return TextInput(item.as_json()["inputs"], stream=False)


def specs() -> list[ModelSpec]:
    return [
        spec_of(lm, "lm"),
        spec_of(lm, "tgi", options={"tgi_compat": "true"}),
        spec_of(lm, "batch", options={"rolling_batch": "disable"}),
        spec_of(lm, "own", input_formatter=from_json),
        spec_of(identity, "id"),
        spec_of(total, "total"),
        spec_of(Taker(), "pieces", family=Family.TENSOR, pieces=True),
    ]


class Route(NamedTuple):
    """A request with `%b` where any value may stand that nobody asked for, and the status of a refusal."""

    path: str
    body: bytes
    refused: int = 400
    binary: bool = False


TENSOR = b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1],"data":["a"]}],"ignored":%b}'
ROUTES = {
    "predictions": Route("/predictions/lm", b'{"inputs":"x","ignored":%b}', 424),
    "predictions, parameters": Route("/predictions/lm", b'{"inputs":"x","parameters":{"ignored":%b}}', 424),
    "predictions, TGI": Route("/predictions/tgi", b'{"inputs":"x","ignored":%b}', 424),
    "predictions, batch": Route("/predictions/batch", b'{"inputs":["x","y"],"ignored":%b}', 424),
    "predictions, a formatter": Route("/predictions/own", b'{"inputs":"x","ignored":%b}'),
    "predictions, chat": Route("/predictions/lm", b'{"messages":[{"role":"user","content":"x"}],"ignored":%b}', 424),
    "invocations": Route("/invocations?model_name=lm", b'{"inputs":"x","ignored":%b}', 424),
    "invoke": Route("/models/lm/invoke", b'{"inputs":"x","ignored":%b}', 424),
    "platform": Route("/endpoints/lm/invocations", b'{"inputs":"x","ignored":%b}', 424),
    "platform, tensors": Route("/endpoints/id/invocations", TENSOR, 424),
    "chat": Route("/v1/chat/completions", b'{"model":"lm","messages":[{"role":"user","content":"x"}],"ignored":%b}'),
    "completions": Route("/v1/completions", b'{"model":"lm","prompt":"x","ignored":%b}'),
    "generate": Route("/v2/models/lm/generate", b'{"text_input":"x","ignored":%b}'),
    "generate_stream": Route("/v2/models/lm/generate_stream", b'{"text_input":"x","parameters":{"ignored":%b}}'),
    "generate, tensors": Route("/v2/models/id/generate", b'{"x":%b}'),
    "infer": Route("/v2/models/id/infer", TENSOR),
    "infer, invoke": Route("/models/id/invoke", TENSOR),
    "infer_stream": Route("/v2/models/id/infer_stream", TENSOR),
    "infer, binary": Route("/v2/models/id/infer", TENSOR, binary=True),
    "infer, pieces": Route("/v2/models/pieces/infer", TENSOR, binary=True),
}


def rows(count: int) -> bytes:
    """That many arrays."""
    return b"[%b]" % b",".join([b"[1]"] * (count - 1))


def numbers(count: int) -> bytes:
    """An array of `count` values."""
    return b"[1%b]" % (b",1" * (count - 1))


async def ask(house: House, route: Route, value: bytes, *fields: tuple[str, str]) -> tuple[int, bytes]:
    body = route.body % value
    length = (("inference-header-content-length", str(len(body))),) if route.binary else ()
    if fields:
        body = gzip.compress(body)
    status, _, said = await house.ask(route.path, body, ("content-type", "application/json"), *length, *fields)
    return status, said


async def check_bounds(house: House, route: Route, *fields: tuple[str, str]) -> None:
    """As much as may be is answered; one more is refused, by the name of the setting."""
    around = close_census_of(route.body % b"0")
    for make, most, has, setting in (
        (rows, CONTAINERS, around.containers, b"arrays and objects (limits.json_containers)"),
        (numbers, VALUES, around.values, b"values (limits.json_values)"),
    ):
        status, said = await ask(house, route, make(most - has), *fields)
        assert status == 200, (make.__name__, said)
        status, said = await ask(house, route, make(most - has + 1), *fields)
        assert status == route.refused, (make.__name__, said)
        assert b"has more than %d %b" % (most, setting) in said


@pytest.mark.parametrize("name", ROUTES)
async def test_every_route_takes_what_may_be_and_not_one_more(name: str) -> None:
    route = ROUTES[name]
    async with serving(*specs(), config=FEW) as house:
        await check_bounds(house, route)
        if not route.path.startswith("/endpoints") and name != "infer, pieces":  # they take no content codings
            await check_bounds(house, route, ("content-encoding", "gzip"))


@pytest.mark.parametrize("name", ["predictions", "chat", "generate", "infer", "predictions, a formatter"])
async def test_a_route_that_does_not_ask_is_found(name: str) -> None:
    with mock.patch.object(strict, "_check_counts"):
        async with serving(*specs(), config=FEW) as house:
            with pytest.raises(AssertionError):
                await check_bounds(house, ROUTES[name])


async def test_messages_of_a_session_are_counted_each() -> None:
    async with serving(*specs(), config=FEW) as house:
        peer = await client.websocket(house.memory.connect(), "/v2/models/id/infer")
        has = close_census_of(TENSOR % b"0").containers
        for count, wanted in ((CONTAINERS - has, b'"outputs"'), (CONTAINERS - has + 1, b"limits.json_containers")):
            for _ in range(2):
                await peer.send(Frame(opcode=Opcode.TEXT, fin=True, data=TENSOR % rows(count)))
                assert wanted in bytes((await peer.next_event()).data)
        peer.close()


@pytest.mark.parametrize("beside", [0, 300_000])
async def test_prompts_of_a_bidirectional_stream_are_counted(beside: int) -> None:
    body = b'{"inputs":"x","ignored":%b}' + b" " * beside
    async with serving(*specs(), config=FEW) as house:
        for count, good in ((CONTAINERS - 1, True), (CONTAINERS, False)):
            peer = await client.websocket(house.memory.connect(), "/models/lm/invocations-bidirectional-stream")
            await peer.send(Frame(opcode=Opcode.TEXT, fin=True, data=body % rows(count)))
            event = await peer.next_event()
            assert (b"answer" in bytes(getattr(event, "data", b""))) is good
            assert good or "limits.json_containers" in repr(event)
            peer.close()
            await house.still()


# -- legal bodies ------------------------------------------------------------------------------------------------------


def bias() -> dict[str, float]:
    return {str(token): 0.5 for token in range(50_000)}


LEGAL = {
    "256 prompts": ("/predictions/batch", {"inputs": ["x"] * 256}),
    "10,000 messages": ("/v1/chat/completions", {"model": "lm", "messages": [{"role": "user", "content": "hello"}] * 10_000}),
    "a logit bias": ("/predictions/lm", {"inputs": "x", "parameters": {"logit_bias": bias()}}),
    "a logit bias of OpenAI's": ("/v1/completions", {"model": "lm", "prompt": "x", "logit_bias": bias()}),
    "images": ("/v1/completions", {"model": "lm", "prompt": "x", "images": ["QUJD" * MiB] * 3 + ["QUJD" * (MiB // 2)]}),
    "an image of LMI's": ("/predictions/lm", {"inputs": "x", "parameters": {"image": "QUJD" * (4 * MiB - 4096)}}),
    "an image of generate's": ("/v2/models/lm/generate", {"text_input": "x", "image": "QUJD" * (4 * MiB - 4096)}),
}  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
async def test_large_and_legal_requests_are_answered(name: str) -> None:
    path, document = LEGAL[name]
    async with serving(*specs()) as house:
        status, _, said = await house.ask(path, json.dumps(document).encode(), ("content-type", "application/json"))
        assert status == 200, said[:300]


@pytest.mark.parametrize("shape", [[1_200_000], [300_000, 4], [1_200_000, 1], [1, 2, 600_000]])
@pytest.mark.parametrize("more", ["", ',"parameters":null'])
async def test_tensors_of_more_numbers_than_values_are_answered(shape: list[int], more: str) -> None:
    data = json.dumps(np.ones(shape, np.int8).tolist(), separators=(",", ":"))
    body = f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":{json.dumps(shape)},"data":{data}{more}}}]}}'
    async with serving(*specs()) as house:
        status, _, said = await house.ask("/v2/models/total/infer", body.encode())
        assert (status, b"1200000.0" in said) == (200, True), said[:300]


# -- memory ------------------------------------------------------------------------------------------------------------


@contextmanager
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


DENSE = b"[%b]" % b",".join([b"{}"] * 20_000)  # takes 5 MB
LONG = b"[%b]" % b",".join([b"{}"] * 99_000)  # is read in a thread


@pytest.mark.parametrize("value", [DENSE, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", [name for name in ROUTES if name != "generate, tensors"])
async def test_values_are_paid_for_before_they_are_made_and_given_back(
    name: str, value: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    paid: list[int] = []
    async with serving(*specs()) as house:
        real = strict.loads

        def watched(data: Any, **options: Any) -> Any:
            if len(data) > len(value):
                paid.append(house.gateway.budget.used)
            return real(data, **options)

        monkeypatch.setattr(strict, "loads", watched)
        monkeypatch.setattr("gateway.codecs.formatting.loads", watched)
        with uncollected():
            for _ in range(2):
                status, said = await ask(house, ROUTES[name], value)
                assert status == 200, said[:300]
                await house.still()
                assert house.gateway.budget.used == 0
        assert paid
        assert min(paid) >= 248 * value.count(b"{}")


@pytest.mark.parametrize("name", [name for name in ROUTES if name != "generate, tensors"])
async def test_where_there_is_no_room_for_values_the_request_is_refused(name: str) -> None:
    config = Config(limits=replace(LimitsConfig(), total_bytes=4 * MiB, memory_refuse=100, memory_reset=100))
    async with serving(*specs(), config=config) as house:
        with mock.patch.object(strict, "_Reader", side_effect=AssertionError), uncollected():
            status, said = await ask(house, ROUTES[name], DENSE)
        assert status in (503, 429), said
        assert b"limits.total_bytes" in said
        await house.still()
        assert house.gateway.budget.used == 0


async def test_what_nobody_asked_for_is_paid_for_no_longer_than_it_is_there() -> None:
    held: list[int] = []
    houses: list[House] = []

    @blocking(False)
    def looking(prompt: str) -> str:
        held.append(houses[0].gateway.budget.used)
        return "an answer"

    async with serving(spec_of(looking, "m")) as house:
        houses.append(house)
        for body in (
            b'{"inputs":"x","ignored":%b}',
            b'{"inputs":"x","parameters":{"more":%b}}',
            b'{"messages":[{"role":"user","content":"x"}],"more":%b}',
        ):
            assert (await ask(house, Route("/predictions/m", body), DENSE))[0] == 200
    assert held[0] < MiB
    assert min(held[1:]) >= 248 * 20_000


async def test_a_short_body_is_not_counted_for_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "cost_of", mock.Mock(side_effect=AssertionError))
    async with serving(*specs()) as house:
        assert (await ask(house, ROUTES["predictions"], b'"%b"' % (b"x" * 1500)))[0] == 200


async def test_long_texts_are_read_one_after_the_other_and_short_ones_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    release, reading, most = threading.Event(), [0, 0], threading.Lock()
    real = strict.loads

    def watched(data: Any, **options: Any) -> Any:
        if len(data) < threads.LONG:
            return real(data, **options)
        with most:
            reading[0] += 1
            reading[1] = max(reading)
        assert release.wait(60)
        with most:
            reading[0] -= 1
        return real(data, **options)

    monkeypatch.setattr(strict, "loads", watched)
    text = b'"%b"' % (b"x" * threads.LONG)
    async with serving(*specs()) as house, trio.open_nursery() as nursery:
        names = ("predictions", "chat", "generate", "infer", "infer, pieces")
        for name in names:
            nursery.start_soon(ask, house, ROUTES[name], text)
        while not reading[0]:
            await trio.lowlevel.checkpoint()
        assert (await ask(house, ROUTES["predictions"], b"1"))[0] == 200
        status, _, _ = await house.ask("/v2/models/total/infer", *_binary())
        assert status == 200
        release.set()
    assert reading == [0, 1]


@pytest.mark.parametrize("size", [1_500, 20_000, 100_000])
async def test_a_coded_body_is_inflated_and_read_in_turns(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stages, real = list[Stage](), CodecTurns.step

    async def watched(turns: CodecTurns, n: int, call: Any, owner: object, stage: Stage) -> Any:
        stages.append(stage)
        return await real(turns, n, call, owner, stage)

    monkeypatch.setattr(CodecTurns, "step", watched)
    async with serving(*specs()) as house:
        text = b'"%b"' % (b"x" * size)
        assert (await ask(house, ROUTES["predictions"], text, ("content-encoding", "gzip")))[0] == 200
    assert stages[:2] == [Stage.INFLATE, Stage.READ][: 2 if size > FREE else 1]


def _binary() -> Any:
    headers, body = body_of(np.zeros(100_000, np.float32), datatype="FP32")
    return (body, *[(name.decode(), value.decode()) for name, value in headers])


def test_what_takes_turns_is_known_to_both() -> None:
    assert requests.json_turn is json_bodies.json_turn


@pytest.mark.parametrize(("all_of_it", "counted"), [(1024 * MiB, 0), (16 * MiB, 1)])
async def test_a_long_text_is_counted_before_it_is_read_only_where_memory_may_run_out(all_of_it: int, counted: int) -> None:
    numbers = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [100_000], "data": [0.5] * 100_000}]})
    config = limits(total_bytes=all_of_it, memory_refuse=100, memory_reset=100)
    with mock.patch.object(requests, "census_of", wraps=requests.census_of) as census:
        async with serving(spec_of(total, "m"), config=config) as house:
            status, _, said = await house.ask("/v2/models/m/infer", numbers.encode())
            assert (status, json.loads(said)["outputs"][0]["data"]) == (200, [50_000.0])
            await house.still()
            assert house.gateway.budget.used == 0
    assert census.call_count == counted
