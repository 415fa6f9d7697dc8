"""An operator ends one stream: its client is told on every wire as at a drain, its model stops, and no other notices."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio

from gateway.testing.stories.talk import Leave
from tests.gateway.operator.operators import Operator
from tests.gateway.operator.test_operator import NO_PORT
from tests.gateway.promises import STREAMS, WIRE, WIRES, House, Probe, at_once, counting, pausing, serving, silent


async def ended(house: House, operator: Operator, model: str = "probe") -> dict[str, Any]:
    """Ends the youngest stream of a model."""
    *_, stream = [row for row in (await operator.get("/streams"))["streams"] if row["model"] == model]
    answer = await operator.ask("POST", f"/streams/{stream['id']}/end")
    assert (answer.status, answer.json["id"]) == (202, stream["id"])
    return dict(answer.json)


@pytest.mark.parametrize("wire", STREAMS)
async def test_a_stream_ends_in_band_as_at_a_drain(wire: str, autojump_clock: Any) -> None:
    probe = Probe(pausing)
    async with serving(probe.spec(wire), wire=wire) as house:
        other = await house.call(wire)
        await other.take(3)
        await trio.sleep(1)
        call = await house.call(wire)
        await call.take(3)
        with at_once():
            await ended(house, Operator(house.gateway))
            numbers, over = await call.rest()
        how, code = WIRE[wire].expected(lost=True)
        assert (numbers, over.how) == ([], how)
        if how == "error":
            assert "operator" in over.text
            assert over.code == (WIRE[wire].drained or code)
        await house.still()
        assert house.endings == {"ended-by-operator": 1}
        assert probe.live == 1
        probe.go.set()
        assert (await other.rest())[1].how == "complete"


@pytest.mark.parametrize("wire", [w for w in WIRES if not WIRE[w].accepted])
async def test_a_call_without_an_answer_is_refused_as_retryable(wire: str, autojump_clock: Any) -> None:
    probe = Probe(silent)
    async with serving(probe.spec(wire), wire=wire) as house:
        call = await house.call(wire)
        await house.still()
        with at_once():
            await ended(house, Operator(house.gateway))
            _, over = await call.rest()
        assert (over.how, over.code) == ("refused", WIRE[wire].code("503"))
        if not (WIRE[wire].blames or WIRE[wire].grpc):  # their clients go by the error's name, or its code
            assert call.headers[b"retry-after"] == b"1"
        await house.still()
        assert house.endings == {"ended-by-operator": 1}
        assert probe.live == 0


async def test_one_that_waits_for_a_slot_gives_its_place_to_the_next(autojump_clock: Any) -> None:
    async with serving(Probe(silent).spec("lmi-http1", capacity=1), config=NO_PORT) as house:
        first = await house.call("lmi-http1")
        await trio.sleep(1)
        second = await house.call("lmi-http1")
        await house.still()
        stream = await ended(house, Operator(house.gateway))
        assert (stream["waits_for"], (await second.rest())[1].how) == ("slot", "refused")
        assert house.gateway.models["probe"].queued == 0
        await first.leave(Leave.RESET)


async def test_a_client_that_does_not_read_cannot_keep_its_model(autojump_clock: Any) -> None:
    probe = Probe(counting)
    async with serving(probe.spec("lmi-http2"), config=NO_PORT) as house:
        call = await house.call("lmi-http2")
        await trio.sleep(5)
        assert (await ended(house, Operator(house.gateway)))["waits_for"] == "room"
        await house.still()
        assert (probe.live, house.gateway.models["probe"].slots_in_use) == (0, 0)
        await call.leave(Leave.RESET)


async def test_who_has_ended_it_is_in_the_log(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(Probe(silent).spec("lmi-http1"), config=NO_PORT) as house:
        call = await house.call("lmi-http1")
        await house.still()
        stream = await ended(house, Operator(house.gateway))
        await call.rest()
        await house.still()
    (request,) = [record for record in caplog.records if record.message == "operator request"]
    assert (request.action, request.id, request.peer) == ("end", stream["id"], "127.0.0.1:4711")  # type: ignore[attr-defined]
    (line,) = [record for record in caplog.records if record.message == "exchange"]
    assert (line.id, line.ending, line.status) == (stream["id"], "ended-by-operator", 503)  # type: ignore[attr-defined]


async def test_one_that_is_not_there_or_is_complete_cannot_be_ended(autojump_clock: Any) -> None:
    probe = Probe(counting)
    async with serving(probe.spec("lmi-http1"), config=NO_PORT) as house:
        operator = Operator(house.gateway)
        missing = await operator.ask("POST", "/streams/nobody/end")
        assert (missing.status, missing.json["code"]) == (404, "NotFound")
        assert "no stream 'nobody' is live" in missing.json["error"]
        call = await house.call("lmi-http1")
        await trio.sleep(1)
        (exchange,) = house.gateway.live
        await ended(house, operator)
        await house.still()
        again = await operator.ask("POST", f"/streams/{exchange.id}/end")  # its error waits for a client that does not read
        assert (again.status, again.json["code"]) == (409, "Conflict")
        await call.leave(Leave.RESET)
