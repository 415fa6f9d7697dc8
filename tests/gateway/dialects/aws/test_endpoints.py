"""Endpoints and their variants: by header, by weight, by the model's own name; and what must not be asked of them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from gateway.client.questions import bidirectional
from gateway.config import BidiConfig, Config, EndpointConfig, VariantConfig
from gateway.config.problem import ConfigError
from gateway.gateway import Gateway
from gateway.testing.stories.talk import Leave
from models.messages import Part
from models.session import Session
from tests.gateway.promises import EventsCall, House, Over, Probe, raw, serving

INVOKED = "x-amzn-invoked-production-variant"
ASKED = "x-amzn-sagemaker-target-variant"
PATHS = ("/endpoints/live/invocations", "/endpoints/live/invocations-response-stream")


async def names_itself(probe: Probe, session: Session[Any, Any]) -> None:
    await session.send(Part(data=probe.name.encode()))


def variants(**weights: float) -> Config:
    """An endpoint `live` whose variants have models of their names."""
    return Config(
        bidi=BidiConfig(default_model="blue"),
        endpoints={"live": EndpointConfig(variants={n: VariantConfig(model=n, weight=w) for n, w in weights.items()})},
    )


def models(*names: str) -> list[Any]:
    return [Probe(names_itself, name).spec("bidi") for name in names]


async def invoked(house: House, *headers: tuple[str, str], path: str = PATHS[0]) -> str:
    """The variant that answered."""
    status, answered, body = await house.ask(path, b"", *headers)
    assert (status, answered[INVOKED].encode() in body) == (200, True)
    return answered[INVOKED]


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_may_name_its_variant(path: str, autojump_clock: Any) -> None:
    async with serving(*models("blue", "green"), config=variants(blue=1, green=0)) as house:
        assert [await invoked(house, (ASKED, name), path=path) for name in ("green", "blue", "green")] == [
            "green",
            "blue",
            "green",
        ]


@pytest.mark.parametrize(
    ("weights", "calls", "shares"),
    [
        ({"blue": 1, "green": 1}, 10, {"blue": 5, "green": 5}),
        ({"blue": 9, "green": 1}, 100, {"blue": 90, "green": 10}),
        ({"blue": 0.7, "green": 0.2, "grey": 0.1}, 100, {"blue": 70, "green": 20, "grey": 10}),
        ({"blue": 1, "green": 0}, 10, {"blue": 10}),
    ],
)
async def test_of_any_run_of_calls_each_variant_has_its_share(
    weights: dict[str, float], calls: int, shares: dict[str, int], autojump_clock: Any
) -> None:
    async with serving(*models(*weights), config=variants(**weights)) as house:
        given = [await invoked(house) for _ in range(calls)]
        assert Counter(given) == shares
        total = sum(weights.values())
        for n in range(1, calls + 1):
            for name, count in Counter(given[:n]).items():
                assert abs(count - n * weights[name] / total) <= 1


async def test_a_variant_that_is_named_takes_no_turn_of_the_others(autojump_clock: Any) -> None:
    async with serving(*models("blue", "green"), config=variants(blue=1, green=1)) as house:
        for _ in range(5):
            await invoked(house, (ASKED, "green"))
        assert Counter([await invoked(house) for _ in range(10)]) == {"blue": 5, "green": 5}


async def test_bidi_takes_its_turn_with_the_others_and_says_who_answers(autojump_clock: Any) -> None:
    async with serving(*models("blue", "green"), config=variants(blue=1, green=1)) as house:
        given = []
        for _ in range(4):
            given.append(await invoked(house))
            call = EventsCall(house.line("http2"), 1)
            await call.open(bidirectional("live"))
            while not call.status:
                await call._step()
            given.append(call.headers[INVOKED.encode()].decode())
            await call.leave(Leave.STREAM)
        assert Counter(given) == {"blue": 4, "green": 4}


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        (PATHS[0], "no", "ValidationError"),
        (PATHS[1], "no", "ValidationError"),
        ("/endpoints/blue/invocations", "green", "ValidationError"),
    ],
)
async def test_a_variant_that_there_is_not_is_named_with_those_that_there_are(
    path: str, name: str, kind: str, autojump_clock: Any
) -> None:
    async with serving(*models("blue", "green"), config=variants(blue=1, green=1)) as house:
        status, headers, body = await house.ask(path, b"", (ASKED, name))
        assert (status, headers["x-amzn-errortype"]) == (400, kind)
        assert ("AllTraffic" if "blue" in path else "blue, green") in json.loads(body)["Message"]


async def test_bidi_refuses_a_variant_that_there_is_not(autojump_clock: Any) -> None:
    async with serving(*models("blue"), config=variants(blue=1)) as house:
        line = house.line("http2")
        head = [(b"content-type", b"application/vnd.amazon.eventstream"), (ASKED.encode(), b"no")]
        await line.send(raw(1, b"POST", "/endpoints/live/invocations-bidirectional-stream", headers=head))
        status, headers, _ = await line.peer.read_answer(1)
        assert (status, headers[b"x-amzn-errortype"]) == (400, b"InputValidationError")


async def test_every_model_is_an_endpoint_with_the_one_variant_of_the_configuration(autojump_clock: Any) -> None:
    async with serving(*models("blue")) as house:
        path = "/endpoints/blue/invocations"
        for headers in ((), ((ASKED, "AllTraffic"),)):
            assert (await house.ask(path, b"", *headers))[1][INVOKED] == "AllTraffic"


async def test_a_name_that_is_both_is_the_endpoint(autojump_clock: Any) -> None:
    config = Config(endpoints={"blue": EndpointConfig(variants={"v": VariantConfig(model="green")})})
    async with serving(*models("blue", "green"), config=config) as house:
        assert (await house.ask("/endpoints/blue/invocations", b""))[2] == b"green"
        assert (await house.ask("/models/blue/invoke", b""))[2] == b"blue"


def test_a_variant_without_its_model_is_a_mistake_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"endpoints\.live\.variants\.grey\.model: no model 'grey'; there are: blue"):
        Gateway(variants(grey=1), models("blue"))


async def test_a_duplex_call_reaches_the_variants_model(autojump_clock: Any) -> None:
    async def says(probe: Probe, session: Session[Any, Any]) -> None:
        await probe.say(session, 2)

    async with serving(Probe(says, "blue").spec("bidi"), config=variants(blue=1)) as house:
        call = EventsCall(house.line("http2"), 1)
        await call.open(bidirectional("live"))
        assert await call.rest() == ([0, 1], Over("complete"))
