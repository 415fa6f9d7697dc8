"""One contract for every transport: sockets, memory, any trio Stream, and TLS over each; and what TLS adds to it."""

from __future__ import annotations

import errno
import hashlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from gateway.config import TLSConfig
from gateway.errors import TransportLost
from gateway.net.tls_context import client_context, development_certificate, server_context
from gateway.net.tls_transport import TLSTransport, first_record
from gateway.net.transport import MemoryTransport, SocketTransport, StreamTransport, Transport, front, memory_pair

# -- pairs of each kind ----------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Two connected ends. `reset` ends the connection under `a` as a lost network does."""

    a: Transport
    b: Transport
    reset: Callable[[], None]
    leave: Callable[[Transport], Awaitable[None]]

    @property
    def ends(self) -> tuple[Transport, Transport]:
        return self.a, self.b


@pytest.fixture(scope="session", name="contexts")
def _contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context and that of a client which trusts it."""
    config = TLSConfig(dev=True, dev_dir=str(tmp_path_factory.mktemp("tls")))
    return server_context(config), client_context(development_certificate(config).ca)


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


async def close(transport: Transport) -> None:
    transport.close()


async def close_stream(transport: Transport) -> None:
    transport.close()
    below = transport._below if isinstance(transport, TLSTransport) else transport
    assert isinstance(below, StreamTransport)
    await below.aclose()


def reset_socket(transport: SocketTransport) -> Callable[[], None]:
    def reset() -> None:
        # zero seconds of linger make close send RST instead of FIN
        with suppress(OSError):
            transport._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.close()

    return reset


def socket_ends(a: socket.socket, b: socket.socket) -> Pair:
    ends = SocketTransport(a), SocketTransport(b)
    return Pair(*ends, reset_socket(ends[0]), close)


def unix_pair() -> Pair:
    return socket_ends(*socket.socketpair())


def tcp_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    for end in (a, b):  # small, so that a peer that does not read is soon noticed
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * 1024)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
    return socket_ends(a, b)


def in_memory(capacity: int) -> Callable[[], Pair]:
    def make() -> Pair:
        a, b = memory_pair(capacity)
        return Pair(a, b, a.reset, close)

    return make


def over_streams(streams: Callable[[], tuple[Any, Any]], chunk: int) -> Callable[[], Pair]:
    def make() -> Pair:
        a, b = (StreamTransport(stream, chunk=chunk) for stream in streams())
        return Pair(a, b, a.close, close_stream)

    return make


PLAIN: dict[str, Callable[[], Pair]] = {
    "unix": unix_pair,
    "tcp": tcp_pair,
    "memory": in_memory(65536),
    "memory of 7 bytes": in_memory(7),
    "stream": over_streams(memory_stream_pair, 65536),
    "lockstep stream": over_streams(lockstep_stream_pair, 1000),
}
KINDS = [*PLAIN, *(f"TLS over {kind}" for kind in PLAIN)]
STREAMS = [kind for kind in KINDS if kind.endswith("stream")]
CANCELLABLE = [kind for kind in KINDS if kind not in STREAMS]
BOUNDED = [*CANCELLABLE, *(kind for kind in STREAMS if "lockstep" in kind)]
"""The kinds where a peer that does not read stops the sender."""


@asynccontextmanager
async def connected(kind: str, contexts: Contexts) -> AsyncIterator[Pair]:
    pair = PLAIN[kind.removeprefix("TLS over ")]()
    below = pair.ends
    try:
        if kind.startswith("TLS"):
            pair.a, pair.b = await secured(below, contexts)
        yield pair
    finally:
        for end in pair.ends:
            await pair.leave(end)


async def secured(below: tuple[Transport, Transport], contexts: Contexts) -> tuple[TLSTransport, TLSTransport]:
    """A TLS client over the first, a server over the second, their handshake done."""
    server, client = contexts
    a = TLSTransport(below[0], client, server_side=False, hostname="localhost")
    b = TLSTransport(below[1], server)
    async with trio.open_nursery() as nursery:
        shaken = trio.Event()
        nursery.start_soon(shake_and_listen, a, shaken)
        await b.handshake()
        await shaken.wait()
        nursery.cancel_scope.cancel()
    return a, b


async def shake_and_listen(transport: TLSTransport, shaken: trio.Event) -> None:
    """A server's handshake is complete when its session tickets are out, so its client must read them."""
    await transport.handshake()
    shaken.set()
    while transport.try_receive_into(buffer()) is None:
        await transport.wait_readable()


@pytest.fixture(params=KINDS, name="kind")
def _kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(name="pair")
async def _pair(kind: str, contexts: Contexts) -> AsyncIterator[Pair]:
    async with connected(kind, contexts) as pair:
        yield pair


# -- a driver's use of a transport -----------------------------------------------------------------------------------


def after(buffers: list[Any], n: int) -> list[Any]:
    """The buffers without their first n bytes."""
    while buffers and n >= len(buffers[0]):
        n -= len(buffers.pop(0))
    return [memoryview(buffers[0])[n:], *buffers[1:]] if buffers else []


async def send(transport: Transport, *buffers: Any) -> None:
    """Sends as a connection's writer does, until the kernel has everything."""
    rest = list(buffers)
    while rest or transport.pending:
        n = transport.try_send(rest)
        if n:
            rest = after(rest, n)
        else:
            await transport.wait_writable()


async def receive(transport: Transport, n: float = float("inf"), *, at_most: int = 65536) -> bytes:
    """n bytes, or what comes before the end of the stream."""
    got, buffer = bytearray(), memoryview(bytearray(at_most))
    while len(got) < n:
        taken = transport.try_receive_into(buffer[: int(min(n - len(got), at_most))])
        if taken is None:
            await transport.wait_readable()
        elif taken == 0:
            break
        else:
            got += buffer[:taken]
            await trio.lowlevel.checkpoint()
    return bytes(got)


async def until_lost(transport: Transport) -> int:
    """Sends until the connection is known to be gone; how many bytes it took."""
    total = 0
    while True:
        try:
            n = transport.try_send([b"x" * 1000])
            total += n
            if not n:
                await transport.wait_writable()
            await trio.lowlevel.checkpoint()
        except TransportLost:
            return total


async def fill(transport: Transport) -> int:
    """Sends until it would block; how many bytes it took."""
    total = 0
    while n := transport.try_send([b"x" * 5000]):
        total += n
    return total


def pattern(n: int) -> bytes:
    """Bytes of which no two stretches are alike."""
    return b"".join(hashlib.sha256(i.to_bytes(4, "big")).digest() for i in range(n // 32 + 1))[:n]


def buffer(n: int = 1000) -> memoryview:
    return memoryview(bytearray(n))


# -- the contract ----------------------------------------------------------------------------------------------------


async def test_bytes_arrive_in_order_in_both_directions(pair: Pair) -> None:
    for sender, receiver in ((pair.a, pair.b), (pair.b, pair.a)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, sender, b"hello, ", bytearray(b"wor"), memoryview(b"ld"))
            assert await receive(receiver, 12) == b"hello, world"


@pytest.mark.parametrize("at_most", [1, 1000])
async def test_small_reads_and_many_small_buffers_lose_nothing(pair: Pair, at_most: int) -> None:
    data = pattern(2000)
    pieces = [data[i : i + 1] for i in range(1500)] + [data[1500:1507], b"", data[1507:]]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, pair.a, *pieces)
        assert await receive(pair.b, len(data), at_most=at_most) == data


@pytest.mark.parametrize("kind", [k for k in KINDS if "7 bytes" not in k])
async def test_big_transfers_go_both_ways_at_once(pair: Pair) -> None:
    there, back = pattern(1_000_000), pattern(700_001)[::-1]
    got: dict[str, bytes] = {}

    async def take(name: str, transport: Transport, n: int) -> None:
        got[name] = await receive(transport, n)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, pair.a, there[:10], there[10:300_000], memoryview(there)[300_000:])
        nursery.start_soon(send, pair.b, back)
        nursery.start_soon(take, "there", pair.b, len(there))
        nursery.start_soon(take, "back", pair.a, len(back))
    assert (got["there"] == there, got["back"] == back) == (True, True)


@given(sizes=st.lists(st.integers(0, 40000), min_size=1, max_size=8), at_most=st.integers(1, 70000), tls=st.booleans())
@settings(max_examples=30)
def test_any_sizes_arrive_as_they_were_sent(contexts: Contexts, sizes: list[int], at_most: int, tls: bool) -> None:
    pieces = [pattern(size + i)[i:] for i, size in enumerate(sizes)]

    async def main() -> bytes:
        kind = "TLS over memory" if tls else "memory"
        async with connected(kind, contexts) as pair, trio.open_nursery() as nursery:
            if any(pieces):
                nursery.start_soon(send, pair.a, *pieces)
            return await receive(pair.b, sum(sizes), at_most=max(at_most, sum(sizes) // 100 + 1))

    assert trio.run(main) == b"".join(pieces)


async def test_nothing_there_would_block_and_changes_nothing(pair: Pair) -> None:
    for end in pair.ends:
        assert end.try_receive_into(buffer()) is None
        assert end.try_receive_into(buffer()) is None
        assert end.try_send([]) == 0
        assert not end.pending
        assert not end.hung_up()
        assert not end.receivable()


async def test_what_has_arrived_is_seen_before_it_is_read(pair: Pair) -> None:
    while pair.b.try_receive_into(buffer()) is not None or pair.b.behind:
        pass
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, pair.a, b"unread")
        await pair.b.wait_readable()
        assert pair.b.receivable()
        assert await receive(pair.b, 6) == b"unread"
    assert pair.b.try_receive_into(buffer()) is None
    assert not pair.b.receivable()
    await pair.leave(pair.a)
    await pair.b.wait_readable()
    assert pair.b.receivable()  # the end of the stream


async def test_a_waiting_reader_wakes_when_bytes_come(pair: Pair) -> None:
    got: list[bytes] = []

    async def read() -> None:
        got.append(await receive(pair.b, 5))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        assert got == []
        await send(pair.a, b"hello")
    assert got == [b"hello"]


async def test_the_end_of_the_stream_is_told_after_the_last_byte_again_and_again(pair: Pair) -> None:
    async with trio.open_nursery() as nursery:

        async def say_and_leave() -> None:
            await send(pair.a, b"last words")
            pair.a.send_eof()
            await pair.leave(pair.a)

        nursery.start_soon(say_and_leave)
        assert await receive(pair.b) == b"last words"
    for _ in range(3):
        assert pair.b.try_receive_into(buffer()) == 0
        await pair.b.wait_readable()


@pytest.mark.parametrize("kind", BOUNDED)
async def test_a_peer_that_does_not_read_stops_the_sender_until_it_reads(kind: str, pair: Pair) -> None:
    data = pattern(20_000 if "7 bytes" in kind else 1_000_000)
    sent = trio.Event()

    async def send_all() -> None:
        await send(pair.a, data)
        sent.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_all)
        await wait_all_tasks_blocked()
        assert not sent.is_set()
        assert pair.a.try_send([b"more"]) == 0
        assert await receive(pair.b, len(data)) == data
    assert sent.is_set()
    assert not stuck(pair.a)


@pytest.mark.parametrize("kind", CANCELLABLE)
async def test_cancelled_waits_leave_the_transport_usable(pair: Pair) -> None:
    for end in pair.ends:
        with trio.move_on_after(0):
            await end.wait_readable()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.b.wait_readable)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    sent = await fill(pair.a)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.a.wait_writable)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    with trio.move_on_after(0):
        await pair.b.wait_readable()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, pair.a, b"the rest")
        assert (await receive(pair.b, sent + 8)).endswith(b"xthe rest")


async def test_closing_wakes_a_waiting_reader(pair: Pair) -> None:
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            with suppress(TransportLost):
                assert await receive(pair.b, 5) == b""

        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        pair.b.close()


@pytest.mark.parametrize("kind", BOUNDED)
async def test_closing_wakes_a_waiting_writer(pair: Pair) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(until_lost, pair.a)
        await wait_all_tasks_blocked()
        pair.a.close()


async def test_a_closed_transport_is_lost_for_every_call_and_never_hangs(pair: Pair) -> None:
    for _ in range(2):
        pair.b.close()
        with pytest.raises(TransportLost):
            pair.b.try_receive_into(buffer())
        with pytest.raises(TransportLost):
            pair.b.try_send([b"x"])
        with suppress(TransportLost):
            await pair.b.wait_readable()
        with suppress(TransportLost):
            await pair.b.wait_writable()
        pair.b.send_eof()
        assert pair.b.hung_up()
        assert pair.b.receivable()


async def test_a_cancelled_task_can_close(pair: Pair) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        finally:
            await pair.leave(pair.a)
    assert await receive(pair.b) == b""


async def test_a_writer_learns_that_its_peer_has_left(pair: Pair) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(until_lost, pair.b)
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        await pair.leave(pair.a)


@pytest.mark.parametrize("kind", CANCELLABLE)
async def test_a_peer_that_left_is_seen_before_what_it_sent_is_read(pair: Pair) -> None:
    assert pair.a.try_send([b"unread"]) > 0
    await pair.b.wait_readable()
    assert not pair.b.hung_up()
    await pair.leave(pair.a)
    await pair.b.wait_readable()
    assert pair.b.hung_up()


@pytest.mark.parametrize("kind", STREAMS)
async def test_a_peer_that_left_a_stream_is_seen_at_its_end(pair: Pair) -> None:
    await pair.leave(pair.a)
    assert await receive(pair.b) == b""
    assert pair.b.hung_up()


@pytest.mark.parametrize("kind", CANCELLABLE)
async def test_a_reset_is_a_lost_transport_for_reader_and_writer(pair: Pair) -> None:
    async with trio.open_nursery() as nursery:

        async def read() -> None:
            with suppress(TransportLost):
                assert await receive(pair.b) == b""

        nursery.start_soon(read)
        nursery.start_soon(until_lost, pair.b)
        await wait_all_tasks_blocked()
        pair.reset()
    assert pair.b.hung_up()
    with pytest.raises(TransportLost):
        pair.b.try_send([b"x"])


@pytest.mark.parametrize("kind", CANCELLABLE)
async def test_one_direction_can_end_while_the_other_goes_on(pair: Pair) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, pair.a, b"question")
        assert await receive(pair.b, 8) == b"question"
    pair.a.send_eof()
    pair.a.send_eof()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flush, pair.a)
        assert await receive(pair.b) == b""
    with pytest.raises(TransportLost):
        pair.a.try_send([b"x"])
    answer = pattern(3000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, pair.b, answer)
        assert await receive(pair.a, len(answer)) == answer


def stuck(transport: Transport) -> bool:
    return transport.pending


async def flush(transport: Transport) -> None:
    await send(transport)


async def test_a_transport_says_who_is_there(pair: Pair) -> None:
    assert {type(x) for end in pair.ends for x in (end.peer, end.alpn)} == {str}


# -- sockets, memory and streams alone -------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1:"), ("::1", "[::1]:")])
async def test_a_tcp_peer_is_an_address_and_a_port(host: str, shown: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"{host} is not here")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        accepted, _ = listener.accept()
        transport = SocketTransport(accepted)
        assert transport.peer == f"{shown}{client.getsockname()[1]}"
        transport.close()


async def test_a_unix_peer_and_one_that_is_gone_have_names_too() -> None:
    a, b = socket.socketpair()
    with b, socket.socket() as unconnected:
        assert SocketTransport(a).peer == "unix:"
        assert SocketTransport(unconnected).peer == ""
        a.close()


async def test_a_tcp_transport_does_not_wait_to_fill_segments() -> None:
    pair = tcp_pair()
    assert all(
        end._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in pair.ends if isinstance(end, SocketTransport)
    )
    for end in pair.ends:
        end.close()


async def test_a_reset_says_that_the_peer_left() -> None:
    pair = tcp_pair()
    pair.reset()
    await pair.b.wait_readable()
    with pytest.raises(TransportLost) as lost:
        pair.b.try_receive_into(buffer())
    assert lost.value.left
    pair.b.close()


async def test_a_wait_that_the_kernel_refuses_is_a_lost_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # epoll's, for too many watches

    pair = unix_pair()
    monkeypatch.setattr("trio.lowlevel.wait_readable", refuse)
    with pytest.raises(TransportLost, match="No space left") as lost:
        await pair.a.wait_readable()
    assert not lost.value.left
    for end in pair.ends:
        end.close()


async def test_memory_holds_its_capacity_in_each_direction_and_no_more() -> None:
    a, b = memory_pair(10)
    assert a.try_send([b"12345", b"6789", b"0abc"]) == 10
    assert a.try_send([b"more"]) == 0
    assert b.try_send([b"x" * 20]) == 10
    assert b.try_receive_into(buffer(3)) == 3
    assert a.try_send([b"abcd"]) == 3


async def test_memory_that_is_reset_forgets_what_was_under_way() -> None:
    a, b = memory_pair()
    a.try_send([b"under way"])
    b.reset()
    for end in (a, b):
        with pytest.raises(TransportLost) as lost:
            end.try_receive_into(buffer())
        assert lost.value.left
        assert end.hung_up()


class BrokenStream(trio.abc.Stream):
    """A stream that fails whatever is asked of it."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.closed = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        raise self.error

    async def send_all(self, data: Any) -> None:
        raise self.error

    async def wait_send_all_might_not_block(self) -> None:
        raise self.error

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.parametrize("error", [trio.BrokenResourceError("gone"), trio.ClosedResourceError("closed")])
async def test_what_a_stream_raises_is_a_lost_transport(error: Exception) -> None:
    stream = BrokenStream(error)
    transport = StreamTransport(stream)
    for wait in (transport.wait_readable, transport.wait_writable):
        with pytest.raises(TransportLost) as lost:
            await wait()
        assert lost.value.left is isinstance(error, trio.BrokenResourceError)
        if not transport.pending:
            assert transport.try_send([b"x"]) == 1
    transport.close()
    assert not stream.closed
    await transport.aclose()
    assert stream.closed


async def test_a_stream_that_breaks_while_it_sends_has_ended_and_its_send_says_that_it_is_broken() -> None:
    transport = StreamTransport(BrokenStream(trio.BrokenResourceError("gone")))
    assert transport.try_send([b"x"]) == 1
    await transport.wait_readable()
    assert transport.try_receive_into(memoryview(bytearray(1))) == 0
    with pytest.raises(TransportLost) as lost:
        await transport.wait_writable()
    assert lost.value.left


class SlowlyClosed(BrokenStream):
    """Waits for its peer before it is closed well."""

    def __init__(self) -> None:
        super().__init__(trio.BrokenResourceError())
        self.peer_answers, self.well = trio.Event(), False

    async def aclose(self) -> None:
        self.closed = True
        await self.peer_answers.wait()
        self.well = True


@pytest.mark.parametrize("answers", [True, False])
async def test_a_stream_has_a_second_to_end_well(autojump_clock: trio.testing.MockClock, answers: bool) -> None:
    stream = SlowlyClosed()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(StreamTransport(stream).aclose)
        await trio.sleep(0.5)
        if answers:
            stream.peer_answers.set()
    assert (stream.closed, stream.well) == (True, answers)
    assert trio.current_time() - began == (0.5 if answers else 1.0)


async def test_a_stream_that_is_closed_by_who_is_cancelled_is_closed_at_once() -> None:
    stream = SlowlyClosed()
    with trio.CancelScope() as scope:
        scope.cancel()
        await StreamTransport(stream).aclose()
    assert (stream.closed, stream.well) == (True, False)


async def test_a_stream_transport_takes_a_chunk_at_a_time_without_copying_the_rest() -> None:
    a, _ = memory_stream_pair()
    transport = StreamTransport(a, chunk=10)
    assert transport.try_send([b"123", b"4567", memoryview(b"x" * 1000)]) == 10
    assert transport.pending
    await transport.wait_writable()
    assert not transport.pending


@given(st.lists(st.binary(max_size=5)), st.integers(-1, 30))
def test_the_front_of_buffers_is_their_first_bytes_by_reference(buffers: list[bytes], n: int) -> None:
    assert b"".join(front(buffers, n)) == b"".join(buffers)[: max(n, 0)]


# -- TLS -------------------------------------------------------------------------------------------------------------

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture(params=VERSIONS, ids=lambda v: v.name)
def version(request: pytest.FixtureRequest, contexts: Contexts) -> Iterator[ssl.TLSVersion]:
    _, client = contexts
    before = client.maximum_version
    client.maximum_version = request.param
    yield request.param
    client.maximum_version = before


@pytest.mark.parametrize(
    ("offered", "chosen"), [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), (["http/1.1", "h2"], "h2"), (["imap"], ""), (None, "")]
)  # fmt: skip
async def test_alpn_is_chosen_in_the_servers_order(
    contexts: Contexts, offered: list[str] | None, chosen: str, tmp_path: Any
) -> None:
    server, _ = contexts
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    if offered:
        client.set_alpn_protocols(offered)
    a, b = await secured(memory_pair(), (server, client))
    assert (a.alpn, b.alpn) == (chosen, chosen)


@pytest.mark.parametrize("capacity", [1, 7, 1000])
async def test_a_handshake_passes_through_any_capacity(contexts: Contexts, version: ssl.TLSVersion, capacity: int) -> None:
    a, b = await secured(memory_pair(capacity), contexts)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, a, b"question")
        assert await receive(b, 8) == b"question"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, b, b"answer")
        assert await receive(a, 6) == b"answer"


async def test_bytes_that_came_with_the_last_flight_of_the_handshake_are_there_at_once(contexts: Contexts) -> None:
    server, client = contexts
    below, theirs = memory_pair()
    a, b = TLSTransport(below, client, server_side=False, hostname="localhost"), TLSTransport(theirs, server)

    async def shake_and_speak() -> None:
        await a.handshake()
        await send(a, b"early")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shake_and_speak)
        await wait_all_tasks_blocked()
        nursery.start_soon(b.handshake)
    await b.wait_readable()
    assert await receive(b, 5) == b"early"


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(100), bytes(50)])
async def test_a_server_that_hears_no_tls_is_lost(contexts: Contexts, garbage: bytes, autojump_clock: MockClock) -> None:
    ours, theirs = memory_pair()
    ours.try_send([garbage])
    with pytest.raises(TransportLost, match="handshake failed"):
        await TLSTransport(theirs, contexts[0]).handshake()


async def test_a_server_waits_a_moment_for_a_client_whose_handshake_failed_and_reads_what_it_says(
    contexts: Contexts, autojump_clock: MockClock
) -> None:
    """Unread bytes would make the kernel destroy the alert that says what is wrong."""
    ours, theirs = memory_pair()
    lost = trio.Event()

    async def shake() -> None:
        with pytest.raises(TransportLost, match="HTTP_REQUEST: the client sent HTTP without TLS to the TLS port"):
            await TLSTransport(theirs, contexts[0]).handshake()
        lost.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shake)
        ours.try_send([b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"])
        await trio.sleep(0.5)
        assert ours.try_receive_into(buffer()) == 0
        ours.try_send([b"more"])
        await trio.sleep(0.4)
        assert not lost.is_set()
        ours.close()
        await trio.sleep(0.05)
        assert lost.is_set()


async def test_a_client_that_hears_no_tls_is_lost(contexts: Contexts) -> None:
    ours, theirs = memory_pair()
    ours.try_send([b"HTTP/1.1 400 Bad Request\r\n\r\n"])
    with pytest.raises(TransportLost, match="handshake failed"):
        await TLSTransport(theirs, contexts[1], server_side=False, hostname="localhost").handshake()


async def test_a_client_that_does_not_trust_the_server_says_so_to_it(contexts: Contexts, autojump_clock: MockClock) -> None:
    below, theirs = memory_pair()
    a = TLSTransport(below, ssl.create_default_context(), server_side=False, hostname="localhost")
    b = TLSTransport(theirs, contexts[0])

    async def distrust() -> None:
        with pytest.raises(TransportLost, match="CERTIFICATE_VERIFY_FAILED"):
            await a.handshake()

    async def be_distrusted() -> None:
        with pytest.raises(TransportLost, match="UNKNOWN_CA"):
            await shake_and_listen(b, trio.Event())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(distrust)
        nursery.start_soon(be_distrusted)


async def test_a_certificate_for_another_name_is_refused(contexts: Contexts) -> None:
    below, theirs = memory_pair()
    a = TLSTransport(below, contexts[1], server_side=False, hostname="elsewhere")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lost_or_done, TLSTransport(theirs, contexts[0]))
        with pytest.raises(TransportLost, match="CERTIFICATE_VERIFY_FAILED"):
            await a.handshake()
        a.close()


async def lost_or_done(transport: TLSTransport) -> None:
    with suppress(TransportLost):
        await transport.handshake()


@pytest.mark.parametrize(
    ("said", "enough"),
    [
        (b"\x16\x03\x01\x00\x05hello" + b"more", 10),
        (b"\x16\x03\x01\x07\xfb" + bytes(3000), 2048),
        (b"\x16\x03\x01\x07\xfc" + bytes(3000), 5),  # longer than usual: OpenSSL has the room for it
        (b"\x16\x02\x01", 2),
        (b"GET / HTTP/1.1\r\n\r\n", 1),
    ],
)
async def test_a_client_has_its_tls_once_its_first_record_is_whole_or_cannot_be_waited_for(said: bytes, enough: int) -> None:
    got: list[bytes] = []

    async def read(below: MemoryTransport) -> None:
        got.append(await first_record(below))

    ours, theirs = memory_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, theirs)
        ours.try_send([said[: enough - 1]])
        await wait_all_tasks_blocked()
        assert got == []
        ours.try_send([said[enough - 1 :]])
    assert got == [said]
    assert await first_record(theirs, said) == said  # read before, behind a PROXY header
    ours.close()
    with pytest.raises(TransportLost, match="left during the TLS handshake"):
        await first_record(theirs, said[: enough - 1])


class Leaving:
    """A transport that leaves once it has sent n bytes."""

    def __init__(self, below: MemoryTransport, n: int) -> None:
        self.below, self.n = below, n

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def try_send(self, buffers: Any) -> int:
        sent = self.below.try_send(front(buffers, self.n))
        self.n -= sent
        if self.n == 0:
            self.below.close()
        return sent


@pytest.mark.parametrize("n", [1, 4, 5, 100, 200])
async def test_a_client_that_leaves_inside_its_hello_is_lost(contexts: Contexts, version: ssl.TLSVersion, n: int) -> None:
    ours, theirs = memory_pair()
    client: Any = Leaving(ours, n)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lost_or_done, TLSTransport(client, contexts[1], server_side=False, hostname="localhost"))
        with pytest.raises(TransportLost, match="left during the TLS handshake"):
            await TLSTransport(theirs, contexts[0]).handshake()


@pytest.mark.parametrize("n", [1, 5, 60, 500, 700])
async def test_a_server_that_leaves_inside_its_answer_is_lost(contexts: Contexts, version: ssl.TLSVersion, n: int) -> None:
    ours, theirs = memory_pair()
    server: Any = Leaving(theirs, n)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lost_or_done, TLSTransport(server, contexts[0]))
        with pytest.raises(TransportLost, match=r"left during the TLS handshake|the peer is gone"):
            await TLSTransport(ours, contexts[1], server_side=False, hostname="localhost").handshake()


async def test_a_handshake_that_is_cancelled_leaves_nothing_behind(contexts: Contexts) -> None:
    ours, theirs = memory_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(TLSTransport(theirs, contexts[0]).handshake)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert ours.try_receive_into(buffer()) is None
    theirs.close()


async def test_ciphertext_that_is_stuck_is_pending_until_the_peer_has_room(contexts: Contexts) -> None:
    below = memory_pair(100)
    a, b = await secured(below, contexts)
    await drained(b)
    assert a.try_send([b"x" * 150]) == 150, "a byte counts as sent when its ciphertext was produced"
    assert stuck(a)
    assert a.try_send([b"more"]) == 0
    assert a.try_send([]) == 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flush, a)
        assert await receive(b, 150) == b"x" * 150
    assert not stuck(a)
    assert a.try_send([b"more"]) == 4
    assert await receive(b, 4) == b"more"


async def drained(transport: TLSTransport) -> None:
    """Takes in what TLS has to say for itself, such as session tickets."""
    assert transport.try_receive_into(buffer()) is None


async def test_an_end_that_is_stuck_behind_ciphertext_is_told_after_it(contexts: Contexts) -> None:
    a, b = await secured(memory_pair(100), contexts)
    assert a.try_send([b"x" * 150]) == 150
    a.send_eof()
    assert stuck(a)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flush, a)
        assert await receive(b) == b"x" * 150
    assert not stuck(a)
    assert b.hung_up()


async def test_the_end_is_a_close_notify_and_then_the_end_below(contexts: Contexts) -> None:
    below = memory_pair()
    a, b = await secured(below, contexts)
    a.send_eof()
    assert await receive(b) == b""
    assert below[1].hung_up()
    assert b._tls.read(10) == b"", "which TLS itself says only after a close_notify"


async def test_an_end_loses_nothing_that_came_before_and_was_not_read(contexts: Contexts, version: ssl.TLSVersion) -> None:
    a, b = await secured(memory_pair(), contexts)
    data = pattern(40_000)
    await send(b, data)
    assert await receive(a, 1, at_most=1) == data[:1]
    a.send_eof()
    await a.wait_readable()
    assert await receive(a, 20_000, at_most=999) == data[1:20_001]
    await send(b, b" and after")
    assert await receive(a, 20_009) == data[20_001:] + b" and after"


async def test_a_truncated_stream_is_an_end_and_our_direction_goes_on(contexts: Contexts, version: ssl.TLSVersion) -> None:
    below = memory_pair()
    a, b = await secured(below, contexts)
    await send(a, b"question")
    below[0].send_eof()  # a FIN, but no close_notify
    assert await receive(b) == b"question"
    for _ in range(3):
        assert b.try_receive_into(buffer()) == 0
    await send(b, b"answer")
    assert await receive(a, 6) == b"answer"


async def test_both_ends_may_end_and_the_end_stays(contexts: Contexts, version: ssl.TLSVersion) -> None:
    a, b = await secured(memory_pair(), contexts)
    a.send_eof()
    assert await receive(b) == b""
    b.send_eof()
    for end in (a, b):
        for _ in range(3):
            assert end.try_receive_into(buffer()) == 0


@pytest.mark.parametrize("at", [0, 3, 20])
async def test_a_record_that_was_tampered_with_loses_the_transport_on_both_ends(contexts: Contexts, at: int) -> None:
    below = memory_pair()
    a, b = await secured(below, contexts)
    await drained(a)
    assert a.try_send([b"secret"]) == 6
    record = bytearray(below[1]._inbox.pop())
    record[at] ^= 0x55
    below[1]._inbox.append(bytes(record))
    for end in (b, a):  # the second is told by an alert
        with pytest.raises(TransportLost, match="TLS failed"):
            end.try_receive_into(buffer())
    await until_lost(b)


async def test_bytes_of_a_record_that_were_not_taken_yet_are_readable(contexts: Contexts) -> None:
    a, b = await secured(memory_pair(), contexts)
    await drained(b)
    await send(a, b"abc")
    got = b""
    for _ in range(3):
        with trio.move_on_after(0):
            await b.wait_readable()  # a wait in vain changes nothing, nor does a second one
        assert await is_readable(b)
        assert await is_readable(b)
        one = buffer(1)
        assert b.try_receive_into(one) == 1
        got += one
    assert got == b"abc"
    assert b.try_receive_into(buffer()) is None
    assert not await is_readable(b)


async def is_readable(transport: Transport) -> bool:
    readable = trio.Event()

    async def wait() -> None:
        await transport.wait_readable()
        readable.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return readable.is_set()


async def test_small_buffers_share_a_record_and_large_ones_are_not_copied_together(contexts: Contexts) -> None:
    below = memory_pair(1_000_000)
    a, b = await secured(below, contexts)
    assert a.try_send([b"x" * 100] * 500) == 50_000
    assert a.try_send([b"x" * 100] * 2000) == 65_536
    assert a.try_send([b"x" * 20_000, b"y"]) == 20_000
    assert a.try_send([memoryview(b"x" * 200_000), b"y"]) == 65_536
    assert await receive(b, 201_072) == b"x" * 201_072


async def test_tls_over_a_stream_counts_what_the_stream_still_holds(contexts: Contexts) -> None:
    async with connected("TLS over lockstep stream", contexts) as pair:
        assert pair.a.try_send([b"x" * 100]) == 100
        assert stuck(pair.a)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flush, pair.a)
            assert await receive(pair.b, 100) == b"x" * 100
        assert not stuck(pair.a)


async def test_a_stream_of_a_socket_has_its_peers_address_below_tls_too(contexts: Contexts) -> None:
    with trio.fail_after(60):
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with listener:
            address = listener.socket.getsockname()
            ours = await trio.open_tcp_stream(*address)
            theirs = await listener.accept()
            async with ours, theirs:
                port = ours.socket.getsockname()[1]
                secure = trio.SSLStream(theirs, contexts[0], server_side=True)
                assert [StreamTransport(stream).peer for stream in (theirs, secure)] == [f"127.0.0.1:{port}"] * 2
    one, _ = trio.testing.memory_stream_pair()
    assert StreamTransport(one).peer == "stream"
