"""TLS records without payload: a few at a time, counted, and too many of them end the connection."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from gateway.config import TLSConfig
from gateway.errors import TransportFlooded, TransportLost
from gateway.net.tls_context import client_context, development_certificate, server_context
from gateway.net.tls_transport import TLSTransport
from gateway.net.transport import MemoryTransport, memory_pair
from protocols.floods import HANDSHAKE_RECORDS, TLS_FLOODS
from tests.tls_records import ForgingClient, Records

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]
BURST = next(iter(TLS_FLOODS)).burst


@pytest.fixture(scope="module", name="contexts")
def _contexts(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    config = TLSConfig(dev=True, dev_dir=str(tmp_path_factory.mktemp("tls")))
    return server_context(config), client_context(development_certificate(config).ca)


async def connected(contexts: Contexts, capacity: int = 2**20) -> tuple[MemoryTransport, TLSTransport, Records]:
    """A server's transport behind its handshake, the client's end below it, and the writer of the client's records."""
    ours, theirs = memory_pair(capacity)
    server, client = TLSTransport(theirs, contexts[0]), ForgingClient(contexts[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.handshake)
        done, out = client.shake_hands()
        while True:
            if out:
                ours.try_send([out])
            if done:
                break
            buffer = memoryview(bytearray(65536))
            while not (n := ours.try_receive_into(buffer)):
                await trio.lowlevel.checkpoint()
            done, out = client.shake_hands(bytes(buffer[:n]))
    return ours, server, client.records()


def received(server: TLSTransport, size: int = 65536) -> bytes:
    """Receives until there is nothing."""
    whole, buffer = b"", memoryview(bytearray(size))
    while (n := server.try_receive_into(buffer)) or server.behind:
        whole += bytes(buffer[: n or 0])
    return whole


HOLLOW: dict[str, Callable[[Records], bytes]] = {
    "KeyUpdates that want an answer": lambda records: records.key_update(),
    "KeyUpdates that want none": lambda records: records.key_update(answered=False),
}


@pytest.mark.parametrize("kind", HOLLOW)
async def test_a_turn_takes_a_few_records_without_payload_and_what_follows_them_is_received(
    contexts: Contexts, kind: str
) -> None:
    ours, server, records = await connected(contexts)
    flood = b"".join(HOLLOW[kind](records) for _ in range(500))
    ours.try_send([flood + records.record(b"question")])
    turns, buffer = 0, memoryview(bytearray(100))
    while (n := server.try_receive_into(buffer)) is None:
        assert server.behind
        turns += 1
        with trio.fail_after(1):
            await server.wait_readable()
    assert bytes(buffer[:n]) == b"question"
    assert 20 <= turns <= 40
    assert server.try_receive_into(buffer) is None
    assert not server.behind


@pytest.mark.parametrize("kind", HOLLOW)
async def test_too_many_end_the_connection(contexts: Contexts, kind: str) -> None:
    ours, server, records = await connected(contexts)
    ours.try_send([b"".join(HOLLOW[kind](records) for _ in range(BURST + 200))])
    with pytest.raises(TransportFlooded, match="too many TLS records without payload"):
        received(server)


@pytest.mark.parametrize("hollow", [lambda records: records.key_update(), lambda records: records.record(b"")])
async def test_payload_between_them_does_not_hide_them(contexts: Contexts, hollow: Callable[[Records], bytes]) -> None:
    """OpenSSL itself takes 32 empty records in a row at most."""
    ours, server, records = await connected(contexts)
    ours.try_send([b"".join(hollow(records) + hollow(records) + records.record(b"x") for _ in range(BURST))])
    with pytest.raises(TransportFlooded):
        received(server)


async def test_those_of_a_long_life_are_forgotten_and_a_long_silence_earns_one_burst(
    contexts: Contexts, autojump_clock: MockClock
) -> None:
    ours, server, records = await connected(contexts)
    for _ in range(20):
        ours.try_send([b"".join(records.key_update(answered=False) for _ in range(200))])
        assert received(server) == b""
        await trio.sleep(20)
    await trio.sleep(80_000)
    ours.try_send([b"".join(records.key_update(answered=False) for _ in range(BURST + 200))])
    with pytest.raises(TransportFlooded):
        received(server)


@pytest.mark.parametrize("bite", [1, 2, 3, 4, 5, 6, 21, 22, 23, 24, 1000, 16_384, 65_536])
@pytest.mark.parametrize("size", [7, 65_536])
async def test_payload_in_pieces_of_any_size_is_no_flood(contexts: Contexts, bite: int, size: int) -> None:
    ours, server, records = await connected(contexts)
    payload = [b"x" * n for n in (1, 16_000, 100, 1, 0, 16_384, 3) * (1 if bite < 100 else 40)]
    wire = b"".join(records.record(piece) for piece in payload)
    got = b""
    for at in range(0, len(wire), bite):
        ours.try_send([wire[at : at + bite]])
        got += received(server, size)
    assert got == b"".join(payload)


async def test_a_handshake_of_many_records_is_lost(contexts: Contexts) -> None:
    """A ClientHello of 100 kB, of which each record has a byte."""
    ours, theirs = memory_pair(2**20)
    hello = b"\x01" + (100_000).to_bytes(3) + b"\x03\x03" + bytes(5 * HANDSHAKE_RECORDS)
    ours.try_send([b"".join(b"\x16\x03\x01\x00\x01" + bytes([byte]) for byte in hello)])
    with pytest.raises(TransportLost, match="more than 1000 records in a TLS handshake"):
        await TLSTransport(theirs, contexts[0]).handshake()


async def test_what_a_read_leaves_over_is_safe_from_the_reads_of_other_connections(contexts: Contexts) -> None:
    """They all receive into the same memory."""
    both = [await connected(contexts) for _ in range(2)]
    sent = [b"".join(records.record(b"%d" % number * 50) for _ in range(40)) for number, (_, _, records) in enumerate(both)]
    for (ours, server, _), data in zip(both, sent, strict=True):
        ours.try_send([data[:-3]])
        assert server.try_receive_into(memoryview(bytearray(1)))
    found = [received(server) for _, server, _ in both]
    for (ours, _, _), data in zip(both, sent, strict=True):
        ours.try_send([data[-3:]])
    found = [before + received(server) for before, (_, server, _) in zip(found, both, strict=True)]
    assert found == [b"0" * (40 * 50 - 1), b"1" * (40 * 50 - 1)]
