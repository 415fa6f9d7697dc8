"""The list of live streams: chosen and sorted by the server, with what each has waited and where its bytes are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import trio

from gateway.client.questions import lmi
from gateway.core.waits import INPUT, ROOM, SLOT, Waits
from gateway.testing import memory_gateway
from models.adapt import spec_of
from models.messages import Part, Prompt, Token
from models.session import Session
from tests.gateway.operator.operators import Operator, operated
from tests.gateway.operator.test_operator import NO_PORT
from tests.gateway.telemetry.test_tallies import X, flood, wait, words

KiB = 1024


async def deaf(session: Session[Part, Part]) -> None:
    await trio.sleep_forever()


async def test_they_are_chosen_and_sorted_by_the_server_and_counted_all(autojump_clock: Any) -> None:
    async with memory_gateway([words, spec_of(wait, capacity=1, queue=8)], NO_PORT) as house:
        operator = Operator(house.gateway)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(house.client().lmi, "x", "words", stream=True))  # its last token is a moment ago
            await trio.sleep(0.5)
            for _ in range(3):
                nursery.start_soon(house.client().infer, X, "wait")
                await trio.sleep(0.5)
            await trio.sleep(0.2)
            told = await operator.get("/streams?limit=2")
            assert [(s["model"], s["age"]) for s in told["streams"]] == [
                ("words", pytest.approx(2.2)), ("wait", pytest.approx(1.7)),
            ]  # fmt: skip
            told = await operator.get("/streams?sort=waited&limit=2")
            assert [(s["model"], s["waits_for"]) for s in told["streams"]] == [("wait", "model"), ("wait", "slot")]
            assert [s["waited"] for s in told["streams"]] == [pytest.approx(1.7), pytest.approx(1.2)]
            assert (told["live"], told["matched"]) == (4, 4)
            told = await operator.get("/streams?waits_for=slot")
            assert [s["waited"] for s in told["streams"]] == [pytest.approx(1.2), pytest.approx(0.7)]
            assert (told["live"], told["matched"]) == (4, 2)
            (stream,) = (await operator.get("/streams?model=words"))["streams"]
            assert (stream["items_in"], stream["items_out"], stream["first"]) == (1, 2, pytest.approx(1.0))
            assert stream["spent"]["model"] == pytest.approx(2.2)
            assert stream["waited"] == pytest.approx(0.2)
            peer = stream["peer"]
            assert (await operator.get(f"/streams?peer={peer}&limit=1"))["matched"] >= 1
            assert (await operator.get("/streams?peer=203.0.113.9"))["matched"] == 0
            assert (await operator.get("/streams?sort=&waits_for=&model=&peer="))["matched"] == 4


async def test_an_answer_that_is_complete_waits_for_its_client_to_take_the_end(autojump_clock: Any) -> None:
    async def short(prompt: Prompt) -> AsyncIterator[Token]:
        for number in range(20):
            yield Token(text="x" * 1000, id=number)

    async with memory_gateway([short], NO_PORT, capacity=KiB) as house:
        talk = house.client("http1").about(lmi("x", "short", stream=True, max_new_tokens=5000))
        await talk.begin()
        await trio.sleep(5)
        (stream,) = (await Operator(house.gateway).get("/streams"))["streams"]
        assert (stream["waits_for"], stream["waited"]) == ("end", pytest.approx(5, abs=0.1))
        assert (stream["spent"]["flush"], stream["spent"]["model"]) == (pytest.approx(5, abs=0.1), pytest.approx(0, abs=0.1))
        talk.leave()


@pytest.mark.parametrize("wire", ["http1", "http2"])
async def test_a_client_that_does_not_read_fills_the_hops_towards_it(wire: str, autojump_clock: Any) -> None:
    async with memory_gateway([flood], capacity=KiB) as house:
        talk = house.client(wire).about(lmi("x", "flood", stream=True, max_new_tokens=5000))
        await talk.begin()
        await trio.sleep(5)
        (stream,) = (await Operator(house.gateway).get("/streams"))["streams"]
        assert (stream["waits_for"], stream["waited"]) == ("room", pytest.approx(5, abs=0.1))
        assert stream["spent"]["room"] == pytest.approx(5, abs=0.1)
        hops = {hop["name"]: hop for hop in stream["hops"]}
        assert list(hops) == (["received", "queued"] if wire == "http1" else ["received", "queued", "window"])
        assert hops["queued"]["held"] == pytest.approx(hops["queued"]["limit"], rel=0.1)
        if wire == "http2":
            assert 0 < hops["window"]["held"] <= hops["window"]["limit"]
        talk.leave()


@pytest.mark.parametrize("wire", ["bidi", "websocket"])
async def test_a_model_that_does_not_read_fills_the_first_hop(wire: str, autojump_clock: Any) -> None:
    async with memory_gateway([deaf]) as house:
        if wire == "bidi":
            await (await house.client("http2").bidi("deaf")).send(bytes(20 * KiB))
        else:
            await (await house.conversation("deaf")).send(bytes(20 * KiB))
        await trio.sleep(1)
        (stream,) = (await Operator(house.gateway).get("/streams"))["streams"]
        first = stream["hops"][0]
        assert (first["name"], first["held"]) == ("received", pytest.approx(20 * KiB, rel=0.1))
        assert first["limit"] >= first["held"]


async def test_the_kernel_says_what_it_holds_for_a_real_client() -> None:
    async with operated(flood) as gateway:
        stream = await trio.open_tcp_stream("127.0.0.1", gateway.port)
        async with stream:
            body = b'{"inputs": "x", "parameters": {"max_new_tokens": 5000}, "stream": true}'
            head = b"POST /predictions/flood HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            await stream.send_all(head % len(body) + body)
            operator, hops = Operator(gateway), dict[str, Any]()
            with trio.fail_after(20):
                while not hops.get("socket", {"held": 0})["held"]:
                    told = (await operator.get("/streams"))["streams"]
                    hops = {hop["name"]: hop for hop in told[0]["hops"]} if told else {}
            assert hops["socket"]["limit"] > 0


def test_what_is_waited_for_has_lasted_since_it_began_whatever_else_comes_and_goes() -> None:
    waits = Waits()
    assert waits.lasted(5.0) == 0.0
    waits.begin(INPUT, 10.0)
    waits.begin(ROOM, 12.0)
    assert (waits.what, waits.lasted(13.0)) == (ROOM, 1.0)
    waits.over(INPUT, 14.0)
    assert waits.lasted(15.0) == 3.0
    waits.begin(INPUT, 16.0)
    waits.over(ROOM, 17.0)
    assert (waits.what, waits.lasted(18.0)) == (INPUT, 1.0)
    waits.over(INPUT, 19.0)
    waits.begin(SLOT, 20.0)
    assert waits.lasted(21.5) == 1.5
