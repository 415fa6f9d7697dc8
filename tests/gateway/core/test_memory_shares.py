"""Memory: up to half of it any party may take any amount, above that only up to a share; and which party is ended first."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from gateway.config import Config
from gateway.core.server import Server
from gateway.errors import Refusal
from gateway.party import MemoryAccount, Party
from gateway.testing.stories.talk import Leave
from protocols.buffers import ByteBudget
from protocols.events import Data, End, Reset
from protocols.floods import STALLED_UPLOAD
from tests.gateway.promises import KiB, Probe, SocketCall, answering, deaf, limits, raw, serving

TICK = 1.0


def accounts(limit: int, share: int, n: int) -> list[MemoryAccount]:
    budget = ByteBudget(limit)
    return [MemoryAccount(budget, plenty=limit // 2, share=share) for _ in range(n)]


# The bytes that the asking party holds, that others hold, that it asks for, and True if it gets them. The budget has 100,
# of which 50 are plenty; a share is 12.
TABLE = [
    (0, 0, 50, True),  # below half, any party may take any amount
    (40, 0, 10, True),
    (40, 0, 11, False),  # above half, a party that holds a share gets no more
    (12, 38, 1, False),
    (11, 39, 1, True),
    (11, 39, 30, True),  # a party below its share gets all that it asks for
    (0, 50, 1, True),
    (0, 99, 1, True),
    (0, 99, 2, False),  # unless the budget has not enough
    (12, 37, 1, True),
    (12, 38, 0, True),
    (50, 0, 1, False),
]


@pytest.mark.parametrize(("own", "others", "asked", "had"), TABLE)
def test_above_half_of_the_budget_nobody_gets_more_who_holds_a_share(own: int, others: int, asked: int, had: bool) -> None:
    budget = ByteBudget(100)
    account = MemoryAccount(budget, plenty=50, share=12)
    assert budget.try_reserve(others)
    account.held = own
    assert budget.try_reserve(own)
    refused = account.has_its_share(asked)
    assert refused is (not had and own >= 12)
    assert account.try_reserve(asked) is had
    assert (account.held, budget.used) == (own + asked * had, own + others + asked * had)


def test_what_is_given_back_may_be_taken_by_others_and_moves_with_its_exchange() -> None:
    one, other = accounts(100, 12, 2)
    assert one.try_reserve(50)
    assert not one.try_reserve(1)
    assert other.try_reserve(20)
    one.hand_over(20, other)
    assert (one.held, other.held, one.used) == (30, 40, 70)
    one.release(30)
    other.release(40)
    assert (one.held, other.held, one.used) == (0, 0, 0)
    with pytest.raises(AssertionError):
        one.release(1)


def test_a_party_has_one_account() -> None:
    server = Server(Config(), lambda _: None, lambda _: None)
    party = Party("somebody")
    assert server.account_of(party) is server.account_of(party)
    assert server.account_of(Party("somebody")) is not server.account_of(party)


async def test_who_holds_its_share_is_refused_and_others_are_not(autojump_clock: Any) -> None:
    probe, other = Probe(deaf), Probe(answering, "other")
    other.go.set()
    config = limits(total_bytes=400 * KiB, body=100 * KiB, party_share=20)
    async with serving(probe.spec("v2-http1"), other.spec("lmi-http2"), config=config) as house:
        greedy, modest = house.line("http2"), house.line("http2")
        await greedy.send(raw(1, b"POST", "/v2/models/probe/infer", content_length=90 * KiB))
        for _ in range(9):
            await greedy.send(Data(stream=1, buffers=(bytes(10 * KiB - 1),)))
        await house.still()
        holder = house.connection(greedy).budget
        assert 80 * KiB <= holder.held < 150 * KiB
        stranger = Party("stranger")
        account = house.gateway.server.account_of(stranger)
        assert account.try_reserve(120 * KiB)
        assert holder.has_its_share(), "half of the budget is in use"

        await greedy.send(raw(3, b"GET", "/v2"), End(stream=3))
        assert await greedy.event(3) == Reset(stream=3, code=7), "REFUSED_STREAM: it may be sent again"
        await modest.send(raw(1, b"GET", "/v2"), End(stream=1))
        assert (await modest.peer.read_answer(1))[0] == 200

        account.release(120 * KiB)
        await greedy.send(raw(5, b"GET", "/v2"), End(stream=5))
        assert (await greedy.event(5)).status == 200
        greedy.peer.close()
        await house.still()
        assert holder.held == 0


async def test_a_request_of_who_holds_its_share_is_told_503_and_when_to_come_again(autojump_clock: Any) -> None:
    config = limits(total_bytes=200 * KiB)
    async with serving(Probe(deaf).spec("v2-http1"), config=config) as house:
        line = house.line("http1")
        await house.still()
        await line.send(raw(1, b"GET", "/v2"), End(stream=1))
        assert (await line.peer.read_answer(1))[0] == 200
        account = house.connection(line).budget
        assert account.try_reserve(99 * KiB)
        assert house.gateway.budget.try_reserve(10 * KiB)
        await line.send(raw(2, b"GET", "/v2"), End(stream=2))
        status, headers, body = await line.peer.read_answer(2)
        assert (status, b"limits.party_share" in body) == (503, True)
        assert headers[b"retry-after"] == b"1"
        assert house.gateway.observer.refusals == {Refusal.PARTY_SHARE: 1}
        await line.send(raw(3, b"GET", "/v2/health/live"), End(stream=3))
        assert (await line.peer.read_answer(3))[0] == 200, "health is always told"
        account.release(99 * KiB)
        house.gateway.budget.release(10 * KiB)


async def test_what_a_key_holds_is_counted_over_its_connections(autojump_clock: Any) -> None:
    probe = Probe(deaf)
    async with serving(probe.spec("websocket")) as house:
        key = Party("key")
        account = house.gateway.server.account_of(key)
        calls = [await house.call("websocket") for _ in range(2)]
        for call in calls:
            assert isinstance(call, SocketCall)
            await call.say(40 * KiB)
        await house.still()
        assert account.held == 0
        for exchange in house.gateway.observer.live:
            exchange.count_for(key)
        assert account.held == house.gateway.budget.used >= 80 * KiB
        assert [house.connection(call.line).budget.held for call in calls] == [0, 0]
        await calls[0].say(40 * KiB)
        await house.still()
        assert account.held == house.gateway.budget.used >= 120 * KiB
        for call in calls:
            await call.leave(Leave.STREAM)
        await house.still()
        assert account.held == house.gateway.budget.used == 0


async def test_a_stream_of_http2_moves_to_its_key_with_what_it_has_reserved(autojump_clock: Any) -> None:
    async with serving(Probe(deaf).spec("bidi")) as house:
        line = house.line("http2")
        call = await house.call("bidi", line=line)
        await call.line.send(Data(stream=call.stream, buffers=(bytes(30 * KiB),)))
        await house.still()
        (exchange,) = house.gateway.observer.live
        exchange.count_for(Party("key"))
        assert exchange.account is house.gateway.server.account_of(exchange.key)
        assert exchange.account.held == house.gateway.budget.used >= 30 * KiB
        assert exchange.held_with_wire == exchange.account.held
        await call.leave(Leave.RESET)
        await house.still()
        assert exchange.account.held == 0


async def test_of_the_party_that_holds_most_the_largest_makes_room(autojump_clock: Any) -> None:
    """Not the largest of all: who spreads what it holds over many is the one that has them."""
    probe = Probe(deaf)
    config = limits(total_bytes=200 * KiB, party_share=100, memory_refuse=100)
    async with serving(probe.spec("websocket"), config=config) as house:
        many = Party("many")
        alone = await house.call("websocket")
        assert isinstance(alone, SocketCall)
        for _ in range(2):
            await alone.say(40 * KiB)
        await house.still()
        (largest,) = house.gateway.observer.live
        spread = []
        for size in (30, 45, 27):
            call = await house.call("websocket")
            assert isinstance(call, SocketCall)
            await house.still()
            for exchange in house.gateway.observer.live:
                if exchange is not largest:
                    exchange.count_for(many)
            await call.say(size * KiB)
            await house.still()
            spread.append(call)
        assert house.endings == {}
        await trio.sleep(2 * TICK)
        assert house.endings == {"refused": 1}
        _, over = await spread[1].rest()
        assert (over.how, over.code) == ("error", "1013")
        assert "limits.memory_reset" in over.text
        probe.go.set()
        for call in (alone, spread[0], spread[2]):
            await call.leave(Leave.STREAM)


def test_who_asks_for_more_than_it_can_have_is_noted() -> None:
    budget = ByteBudget(100)
    one, other = (MemoryAccount(budget, plenty=50, share=12) for _ in range(2))
    assert one.try_reserve(50)
    assert budget.wanted is None
    assert not one.try_reserve(1)
    assert budget.wanted is one
    assert other.try_reserve(11)
    assert budget.wanted is one
    assert not other.try_reserve(40)
    assert budget.wanted is other


@pytest.mark.parametrize("pause", [1.0, 2.5])
async def test_an_upload_that_stalls_is_ended_once_another_party_needs_memory_and_not_before(
    pause: float, autojump_clock: Any
) -> None:
    """One that sends a byte now and then is not: it is slow, and has its own limits."""
    config = limits(total_bytes=200 * KiB, body=100 * KiB, party_share=20)
    async with serving(Probe(deaf).spec("v2-http1"), config=config) as house:
        holder = house.line("http1")
        await holder.send(raw(1, b"POST", "/v2/models/probe/infer", content_length=60 * KiB))
        for _ in range(5):
            await holder.send(Data(stream=1, buffers=(bytes(10 * KiB),)))
        for _ in range(10):
            await trio.sleep(pause)
            if pause < STALLED_UPLOAD:
                await holder.send(Data(stream=1, buffers=(b"x",)))
        assert house.endings == {}
        needy = house.line("http1")
        await needy.send(raw(1, b"GET", "/v2"), End(stream=1))
        assert (await needy.peer.read_answer(1))[0] == 200
        account = house.connection(needy).budget
        assert account.try_reserve(50 * KiB)  # it holds a share, and more than half is in use
        began = trio.current_time()
        await needy.send(raw(2, b"GET", "/v2"), End(stream=2))
        assert (await needy.peer.read_answer(2))[0] == 503
        await trio.sleep(2 * TICK if pause > STALLED_UPLOAD else TICK)
        account.release(50 * KiB)
        if pause < STALLED_UPLOAD:
            assert house.gateway.observer.refusals == {Refusal.PARTY_SHARE: 1}
        else:
            status, _, said = await holder.peer.read_answer(1)
            assert (status, b"no byte of the body for 2 s" in said) == (503, True)
            assert trio.current_time() - began <= 4 * TICK
            assert house.gateway.observer.refusals == {Refusal.PARTY_SHARE: 1, Refusal.SHED: 1}
        holder.peer.close()
        await house.still()


async def test_who_needs_memory_does_not_end_its_own_upload(autojump_clock: Any) -> None:
    config = limits(total_bytes=200 * KiB, body=150 * KiB, party_share=20)
    async with serving(Probe(deaf).spec("v2-http1"), config=config) as house:
        line = house.line("http2")
        await line.send(raw(1, b"POST", "/v2/models/probe/infer", content_length=60 * KiB))
        for _ in range(5):
            await line.send(Data(stream=1, buffers=(bytes(10 * KiB),)))
        await trio.sleep(5)
        house.gateway.budget.wanted = house.connection(line).budget
        await trio.sleep(3 * TICK)
        assert house.endings == {}
        house.gateway.budget.wanted = object()
        await trio.sleep(2 * TICK)
        assert house.endings == {"refused": 1}
        line.peer.close()
        await house.still()
